"""`modelrunner demo`: a real language model on the reference and on the Triton runner, step by step in agreement.

The reference answers in full. Where there is no GPU the Triton kernels run in an interpreter, which is slow, so the
Triton runner goes along for the first tokens of each answer; on a GPU it goes along to the end. `--fault` plants one
wrong expression in the Triton runner's source, to show that it is found.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import dataclass, replace

from conformance.lockstep import AGREE, DIVERGE, LockstepResult, TokenPolicy
from conformance.mutation import mutated
from conformance.paired import Diverged, PairedRunner
from engine_core.llm import LLM
from runner_api import (
    ModelRunner,
    RunnerConfig,
    RunnerFactory,
    SamplingParams,
    StepRecord,
    UnknownNameError,
    WitnessConfig,
    load_runner,
)

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
    """Two models, each on both runners; ends on a verdict. Exit code 0 agree, 1 diverge."""
    with ExitStack() as stack:
        factory: str | RunnerFactory = args.runner
        if args.fault:
            if args.fault not in FAULTS:
                raise UnknownNameError("fault", args.fault, FAULTS, field="--fault")
            fault = FAULTS[args.fault]
            factory = stack.enter_context(mutated(args.runner, fault.path, fault.old, fault.new)).factory
            print(f"planted in {args.runner}, {fault.path}: {fault.story}")
        demo = _Demo(args, factory)
        try:
            demo.witness()
            demo.real_model()
        except Diverged as e:
            print(f"\nfirst divergence at {e.divergence}\n")
        return demo.verdict()


class _Demo:
    """The pairs that ran, and what was compared in all."""

    def __init__(self, args: argparse.Namespace, factory: str | RunnerFactory) -> None:
        self.args = args
        self.factory = factory
        self.pairs: list[PairedRunner] = []
        self._launched_before: dict[str, int] = {}

    def witness(self) -> None:
        """A model of integers whose tokens show every index; with random draws, since its logits are exact."""
        print("\nthe witness model: integers only, so every token must be the same")
        params = [SamplingParams(temperature=t, seed=7, max_tokens=6) for t in (0.0, 0.8)]
        build = self._build(TokenPolicy(exact=True), None)
        with LLM(WitnessConfig(), build, max_num_reqs=8, max_model_len=64, max_num_batched_tokens=16) as llm:
            llm.generate(list(WITNESS_PROMPTS), params)

    def real_model(self) -> None:
        print(f"\n{self.args.model}: floats, so a token may differ where rounding explains it")
        params = SamplingParams(temperature=0.0, max_tokens=self.args.max_tokens)
        prompts = self.args.prompts or list(PROMPTS)
        build = self._build(TokenPolicy(exact=False), self.args.compare_tokens)
        with LLM(self.args.model, build, max_num_reqs=8, max_model_len=1024, enable_prefix_caching=False) as llm:
            outputs = llm.generate(prompts, params, chat=True)
        for prompt, output in zip(prompts, outputs, strict=True):
            print(f"\n> {prompt}\n{output.text.strip()}")
        print()

    def _build(self, policy: TokenPolicy, most_tokens: int | None) -> RunnerFactory:
        def build(config: RunnerConfig) -> ModelRunner:
            config = replace(config, record=frozenset({"logits"}))
            candidate, oracle = load_runner(self.factory, config), load_runner(self.args.against, config)
            info = candidate.describe()
            if not self.pairs:
                self._launched_before = _launches(candidate)
                print(oracle.describe().line(), info.line(), sep="\n")
            most = most_tokens
            if most is None and not policy.exact and not info.device.startswith("cuda"):
                most = TOKENS_WITHOUT_GPU
                print(f"kernels are interpreted here, so {info.name} goes along for {most} tokens of each answer")
            pair = PairedRunner(candidate, oracle, policy=policy, most_tokens=most, observer=_print_step)
            self.pairs.append(pair)
            return pair

        return build

    def verdict(self) -> int:
        """Print what each kernel was launched for, then the verdict; a kernel that never ran was not compared."""
        total = LockstepResult()
        for pair in self.pairs:
            result = pair.lockstep.finish()
            for name in ("steps", "fields", "elements", "tokens", "near_ties"):
                setattr(total, name, getattr(total, name) + getattr(result, name))
            total.first = total.first or result.first
        counted = _launches(self.pairs[-1].candidate) if self.pairs else {}
        launches = {name: count - self._launched_before.get(name, 0) for name, count in counted.items()}
        for name, count in sorted(launches.items()):
            print(f"launches of {name.strip('_'):45} {count:6}")
        idle = [name for name, count in launches.items() if count == 0]
        if idle and total.first is None:
            print(f"verdict: {DIVERGE} never launched, so not compared: {', '.join(sorted(idle))}")
            return 1
        print(total.line())
        return 0 if total.verdict == AGREE else 1


def _launches(runner: ModelRunner) -> dict[str, int]:
    """Launches of each kernel in this process so far; empty for a runner that has no kernels."""
    return dict(getattr(runner, "kernel_launches", dict)())


def _print_step(number: int, record: StepRecord, seconds: float, result: LockstepResult) -> None:
    tokens = sum(len(t) for t in record.tokens().values())
    error = f"  largest logit error {result.largest_logit_error:.1e}" if result.largest_logit_error else ""
    print(
        f"step {number:3}: {record.num_reqs} requests, {record.num_tokens:3} tokens in, {tokens} out; "
        f"{result.elements:6} elements equal so far{error}  ({seconds:.2f} s)",
        flush=True,
    )
