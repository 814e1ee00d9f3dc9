"""`modelrunner demo`: a real language model on the reference and on the Triton runner, step by step in agreement.

The reference answers in full. Where there is no GPU the Triton kernels run in an interpreter, which is slow, so the
Triton runner goes along for the first tokens of each answer; on a GPU it goes along to the end. `--fault` plants one
wrong expression in the Triton runner's source, to show that it is found.
"""

from __future__ import annotations

import argparse
import sys
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
        "input_batch.py", "computed.to(tl.int64) + j, mask=j < query_len", "computed.to(tl.int64) + j + 1, mask=j < query_len",
        "positions are one too high",
    ),
    "seq_lens": Fault(
        "input_batch.py", "tl.store(seq_lens + i, computed + query_len)", "tl.store(seq_lens + i, computed + 1)",
        "a prompt's keys are counted as if one token had come",
    ),
}  # fmt: skip


def run_demo(args: argparse.Namespace) -> int:
    """Answer the prompts, compare, and end on a verdict. Exit code 0 agree, 1 diverge."""
    with ExitStack() as stack:
        factory: str | RunnerFactory = args.runner
        if args.fault:
            if args.fault not in FAULTS:
                raise UnknownNameError("fault", args.fault, FAULTS, field="--fault")
            fault = FAULTS[args.fault]
            factory = stack.enter_context(mutated(args.runner, fault.path, fault.old, fault.new)).factory
            print(f"planted in {args.runner}: {fault.path}: {fault.story}")
        return _answer(args, factory)


def _answer(args: argparse.Namespace, factory: str | RunnerFactory) -> int:
    pair: list[PairedRunner] = []

    def build(config: RunnerConfig) -> ModelRunner:
        config = replace(config, record=frozenset({"logits"}))
        candidate, oracle = load_runner(factory, config), load_runner(args.against, config)
        for runner in (oracle, candidate):
            print(runner.describe().line())
        on_gpu = candidate.describe().device.startswith("cuda")
        most = args.compare_tokens or (None if on_gpu else TOKENS_WITHOUT_GPU)
        pair.append(
            PairedRunner(candidate, oracle, policy=TokenPolicy(exact=False), most_tokens=most, observer=_print_step)
        )
        return pair[0]

    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    prompts = args.prompts or list(PROMPTS)
    with LLM(args.model, build, max_num_reqs=8, max_model_len=1024, enable_prefix_caching=False) as llm:
        try:
            outputs = llm.generate(prompts, params, chat=True)
        except Diverged as e:
            print(f"\nfirst divergence at {e.divergence}\n")
            print(pair[0].lockstep.result.line())
            return 1
        print()
        for prompt, output in zip(prompts, outputs, strict=True):
            print(f"> {prompt}\n{output.text.strip()}\n")
        return _verdict(pair[0])


def _print_step(number: int, record: StepRecord, seconds: float, result: LockstepResult) -> None:
    tokens = sum(len(t) for t in record.tokens().values())
    print(
        f"step {number:3}  requests {record.num_reqs}  tokens in {record.num_tokens:3}  out {tokens}  "
        f"elements equal so far {result.elements:6}  largest logit error {result.largest_logit_error:.1e}  "
        f"{seconds:.2f} s",
        flush=True,
    )


def _verdict(pair: PairedRunner) -> int:
    """Print what each kernel was launched for, then the verdict; a kernel that never ran was not compared."""
    result = pair.lockstep.finish()
    launches = getattr(pair.candidate, "kernel_launches", dict)()
    idle = sorted(name for name, count in launches.items() if count == 0)
    if launches:
        print("launches: " + "  ".join(f"{name} {count}" for name, count in sorted(launches.items())))
    if idle:
        print(f"never launched, so not compared: {', '.join(idle)}", file=sys.stderr)
    verdict = DIVERGE if idle else result.verdict
    print(result.line().replace(f"verdict: {result.verdict}", f"verdict: {verdict}"))
    return 0 if verdict == AGREE else 1
