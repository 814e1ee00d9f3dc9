"""`modelrunner demo`: a real language model on the reference and on the Triton runner, step by step in agreement.

The reference answers in full. Where there is no GPU the Triton kernels run in an interpreter, which is slow, so the
Triton runner goes along for the first tokens of each answer; on a GPU it goes along to the end. `--fault` plants one
wrong expression in the Triton runner's source, to show that it is found.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from conformance.lockstep import AGREE, DIVERGE, LockstepResult, TokenPolicy
from conformance.mutation import mutated
from conformance.paired import Diverged, PairedRunner
from engine_core.llm import LLM
from runner_api import (
    ConfigError,
    ModelRunner,
    RunnerConfig,
    RunnerFactory,
    SamplingParams,
    StepRecord,
    UnknownNameError,
    WitnessConfig,
    load_factory,
    load_runner,
)
from runner_api.checkpoint import Checkpoint, load_checkpoint, resolve_model
from runner_api.loader import kernel_launches

PROMPTS = ("What is the capital of France?", "Write one sentence about the sea.")
TOKENS_WITHOUT_GPU = 8


@dataclass(frozen=True, slots=True)
class Fault:
    """One expression of the Triton runner's source, and what it is replaced by."""

    path: str
    old: str
    new: str
    story: str


FAULTS = {
    "slot_mapping": Fault(
        "slot_mapping.py", "block * block_size + offset, PAD", "block * block_size + (offset ^ 1), PAD",
        "each token's KV goes to its neighbour's place",
    ),
    "positions": Fault(
        "input_batch.py", "computed.to(tl.int64) + j, mask", "computed.to(tl.int64) + j + 1, mask",
        "positions are one too high",
    ),
    "seq_lens": Fault(
        "input_batch.py", "tl.store(seq_lens + i, computed + query_len)", "tl.store(seq_lens + i, computed + 1)",
        "a prompt's keys are counted as if one token had come",
    ),
}  # fmt: skip


WITNESS_PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [2, 7, 1, 8])


def run_demo(args: argparse.Namespace) -> int:
    """Two models, each on both runners; ends on a verdict. Exit code 0 agree, 1 diverge; misuse is raised at once."""
    for name in ("max_tokens", "compare_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError("nothing would be compared", field=option, got=value, expected=">= 1")
    if args.fault and args.fault not in FAULTS:
        raise UnknownNameError("fault", args.fault, FAULTS, field="--fault")
    load_factory(args.against)
    load_factory(args.runner)
    checkpoint = load_checkpoint(resolve_model(args.model))
    with ExitStack() as stack:
        factory: str | RunnerFactory = args.runner
        demo = _Demo(args, stack)
        if args.fault:
            fault = FAULTS[args.fault]
            factory = stack.enter_context(mutated(args.runner, fault.path, fault.old, fault.new)).factory
            demo.say(f"planted in {args.runner}, {fault.path}: {fault.story}")
        try:
            demo.witness(factory)
            demo.real_model(factory, checkpoint)
        except Diverged as e:
            demo.say(f"\nfirst divergence at {e.divergence}\n")
        return demo.verdict()


class _Demo:
    """The pairs that ran, and what was compared in all. With --json nothing is printed before the end."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self.args = args
        self._stack = stack
        self.pairs: list[PairedRunner] = []
        self.answers: list[dict[str, str]] = []
        self._launched_before: dict[str, int] = {}

    def say(self, *lines: str) -> None:
        if not self.args.json:
            print(*lines, sep="\n", flush=True)

    def witness(self, factory: str | RunnerFactory) -> None:
        """A model of integers whose tokens show every index; with random draws, since its logits are exact."""
        self.say("\nthe witness model: integers only, so every token must be the same")
        params = [
            SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, repetition_penalty=1.3, min_tokens=3),
            SamplingParams(
                temperature=0.8, seed=7, max_tokens=6, top_k=30, top_p=0.9, min_p=0.01, presence_penalty=0.5,
                logit_bias={5: 1.5}, bad_words_token_ids=((3, 1), (4,)), allowed_token_ids=tuple(range(50)),
            ),
        ]  # fmt: skip
        build = self._build(factory, TokenPolicy(exact=True), None)
        with LLM(WitnessConfig(), build, max_num_reqs=8, max_model_len=64, max_num_batched_tokens=16) as llm:
            llm.generate(list(WITNESS_PROMPTS), params)

    def real_model(self, factory: str | RunnerFactory, checkpoint: Checkpoint) -> None:
        self.say(f"\n{self.args.model}: floats, so a token may differ where rounding explains it")
        params = SamplingParams(temperature=0.0, max_tokens=self.args.max_tokens)
        prompts = self.args.prompts or list(PROMPTS)
        build = self._build(factory, TokenPolicy(exact=False), self.args.compare_tokens)
        with LLM(checkpoint, build, max_num_reqs=8, max_model_len=1024, enable_prefix_caching=False) as llm:
            outputs = llm.generate(prompts, params, chat=True)
        for prompt, output in zip(prompts, outputs, strict=True):
            self.answers.append({"prompt": prompt, "text": output.text.strip()})
            self.say(f"\n> {prompt}\n{output.text.strip()}")
        self.say("")

    def _build(self, factory: str | RunnerFactory, policy: TokenPolicy, most_tokens: int | None) -> RunnerFactory:
        def build(config: RunnerConfig) -> ModelRunner:
            config = replace(config, record=frozenset({"logits"}))
            candidate, oracle = load_runner(factory, config), load_runner(self.args.against, config)
            info = candidate.describe()
            if not self.pairs:
                self._launched_before = kernel_launches(candidate)
                if "interpreter" in info.device:
                    from conformance.triton_sanitizer import fast_interpreter

                    self._stack.enter_context(fast_interpreter())
                self.say(oracle.describe().line(), info.line())
            most = most_tokens
            if most is None and not policy.exact and not info.device.startswith("cuda"):
                most = TOKENS_WITHOUT_GPU
                self.say(f"kernels are interpreted here, so {info.name} goes along for {most} tokens of each answer")
            pair = PairedRunner(candidate, oracle, policy=policy, most_tokens=most, observer=self._step)
            self.pairs.append(pair)
            return pair

        return build

    def _step(self, number: int, record: StepRecord, seconds: float, result: LockstepResult) -> None:
        tokens = sum(len(t) for t in record.tokens().values())
        error = f"  largest logit error {result.largest_logit_error:.1e}" if result.largest_logit_error else ""
        self.say(
            f"step {number:3}: {record.num_reqs} requests, {record.num_tokens:3} tokens in, {tokens} out; "
            f"{result.elements:6} elements equal so far{error}  ({seconds:.2f} s)"
        )

    def verdict(self) -> int:
        """Tell what each kernel was launched for, then the verdict. A kernel that never ran was not compared; a runner
        whose kernels never ran at all was not compared either."""
        total = LockstepResult()
        for pair in self.pairs:
            total.add(pair.lockstep.finish())
        counted = kernel_launches(self.pairs[-1].candidate) if self.pairs else {}
        launches = {name.strip("_"): n - self._launched_before.get(name, 0) for name, n in sorted(counted.items())}
        idle = [name for name, count in launches.items() if count == 0]
        nothing_ran = bool(launches) and len(idle) == len(launches) and total.first is None
        verdict = DIVERGE if nothing_ran else total.verdict
        self.say(*(f"launches of {name:45} {count:6}" for name, count in launches.items() if count))
        if nothing_ran:
            self.say(f"verdict: {DIVERGE} no kernel was launched, so nothing of them was compared")
        else:
            if idle:
                self.say(f"not asked for by these requests, so not compared: {', '.join(idle)}")
            self.say(total.line())
        if self.args.json:
            print(json.dumps(self._json(total, launches, verdict), indent=2, default=str))
        return 0 if verdict == AGREE else 1

    def _json(self, total: LockstepResult, launches: dict[str, int], verdict: str) -> dict[str, Any]:
        pair = self.pairs[-1] if self.pairs else None
        return {
            "runners": [] if pair is None else [r.describe().line() for r in (pair.oracle, pair.candidate)],
            "model": self.args.model, "steps": total.steps, "elements": total.elements, "tokens": total.tokens,
            "near_ties": total.near_ties, "launches": launches, "answers": self.answers, "verdict": verdict,
            "first": None if total.first is None else str(total.first),
        }  # fmt: skip
