"""`modelrunner bench host`: what one decode step costs the host, by part of the step, batch size and layout.

Every request decodes one token a step; block boundaries are spread evenly over the steps. The layouts take turns step
by step, so that whatever else the machine does meets them alike: compare ratios, not the absolute times of two runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conformance.bench.arguments import BATCHES, DECODE_STEPS, VOCAB_SIZE
from conformance.bench.null_model import NullModel
from conformance.bench.report_text import microseconds, number_table
from conformance.bench.step_timer import (
    PARTS,
    StepTimer,
    StepTimes,
    caveat,
    clock_for,
    median,
    no_garbage_collection,
    parts_of,
    undisturbed,
)
from conformance.bench.trace_plans import GREEDY
from runner_api import (
    CachedRequestData,
    ConfigError,
    NewRequestData,
    RunnerConfig,
    RunnerFactory,
    RunnerInfo,
    SamplingParams,
    SchedulerOutput,
    group_kv_cache_specs,
    load_runner,
)
from runner_api.loader import load_factory
from runner_api.selection import offered_layouts

BLOCK_SIZE, PROMPT = 16, 64
WIDTH = 110  # of notes under a table
WARM_UP = 8  # steps before those that are measured
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, top_k=50)


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Steps of every layout at one batch size."""

    batch: int
    steps: dict[str, tuple[StepTimes, ...]]

    @property
    def ratio(self) -> float | None:
        """Time of dense over time of slots; None where one of them is missing."""
        if not {"dense", "slots"} <= self.steps.keys():
            return None
        return undisturbed(self.steps["dense"]) / undisturbed(self.steps["slots"])


@dataclass(frozen=True, slots=True)
class HostCosts:
    """All batch sizes; infos and times by layout."""

    infos: dict[str, RunnerInfo]
    clock: str
    batches: tuple[HostTimes, ...]


def run_host(args: argparse.Namespace) -> int:
    """The command."""
    batches = _batches(args.batches)
    for name, value, least in (("--steps", args.steps, 1), ("--vocab", args.vocab, 1)):
        if value < least:
            raise ConfigError("nothing would be measured", field=name, got=value, expected=f">= {least}")
    params = SAMPLED if args.sampled else GREEDY
    costs = measure(args.runner, batches, num_steps=args.steps, vocab_size=args.vocab, params=params)
    if args.json:
        print(json.dumps(_json(costs, args), indent=1))
    else:
        print(host_text(costs, args.vocab, args.steps))
    return 0


def _batches(text: str) -> tuple[int, ...]:
    try:
        batches = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as e:
        raise ConfigError("not a list of batch sizes", field="--batches", got=text, expected="such as 1,8,64") from e
    if min(batches) < 1:
        raise ConfigError("a batch has a request at least", field="--batches", got=text, expected=">= 1")
    return batches


def measure(
    runner: str | RunnerFactory,
    batches: Sequence[int] = BATCHES,
    *,
    num_steps: int = DECODE_STEPS,
    vocab_size: int = VOCAB_SIZE,
    params: SamplingParams = GREEDY,
) -> HostCosts:
    """Decode steps of all layouts that the runner offers, at every batch size."""
    steps_run = WARM_UP + num_steps
    blocks_per_request = -(-(PROMPT + BLOCK_SIZE + steps_run + 1) // BLOCK_SIZE)
    rows = max(batches)
    timers = {}
    for layout in offered_layouts(load_factory(runner)):
        config = RunnerConfig(
            max_num_reqs=rows, max_num_batched_tokens=rows, max_model_len=blocks_per_request * BLOCK_SIZE, layout=layout
        )
        built = load_runner(runner, config)
        built.load_model(NullModel(vocab_size, BLOCK_SIZE))
        timers[layout] = StepTimer(built, clock_for(built.describe())[0])
    infos = {layout: timer.runner.describe() for layout, timer in timers.items()}
    measured = []
    for batch in batches:
        for timer in timers.values():
            specs = timer.runner.get_kv_cache_specs()
            timer.runner.initialize_kv_cache(group_kv_cache_specs(specs, 1 + batch * blocks_per_request))
            timer.steps = []
        with no_garbage_collection():
            for step in range(steps_run):
                # The layouts take turns at being first.
                for timer in list(timers.values())[:: 1 if step % 2 else -1]:
                    timer.run(decode_plan(batch, step, blocks_per_request, params), keep=step >= WARM_UP)
        measured.append(HostTimes(batch, {layout: tuple(timer.steps) for layout, timer in timers.items()}))
    return HostCosts(infos, clock_for(next(iter(infos.values())))[1], tuple(measured))


def decode_plan(batch: int, step: int, blocks_per_request: int, params: SamplingParams) -> SchedulerOutput:
    """Step 0 brings the requests, whose prompts are computed but for a token; then each decodes one token a step.

    Prompts differ in length, so that one request in 16 crosses a block boundary in each step.
    """
    new, cached = [], CachedRequestData()
    for i in range(batch):
        tokens = PROMPT + i % BLOCK_SIZE + step  # known when the step begins
        first = 1 + i * blocks_per_request
        if step == 0:
            known, blocks = [0] * tokens, list(range(first, first + -(-tokens // BLOCK_SIZE)))
            new.append(NewRequestData(f"r{i}", known, known, tokens - 1, (blocks,), params))
            continue
        crossed = (tokens - 1) % BLOCK_SIZE == 0
        cached.req_ids.append(f"r{i}")
        cached.num_computed_tokens.append(tokens - 1)
        cached.new_block_ids.append(([first + (tokens - 1) // BLOCK_SIZE],) if crossed else None)
    return SchedulerOutput(new, cached, {f"r{i}": 1 for i in range(batch)}, batch)


def host_text(costs: HostCosts, vocab_size: int, num_steps: int) -> str:
    """A line per batch size and layout, a column per part."""
    parts = parts_of([s for times in costs.batches for steps in times.steps.values() for s in steps])
    lines = [["batch", "layout", *parts, "step", "output", "dense/slots"]]
    for times in costs.batches:
        for layout, steps in times.steps.items():
            ratio = f"{times.ratio:.2f}" if layout == "dense" and times.ratio is not None else ""
            lines.append(
                [str(times.batch), layout, *(microseconds(median(steps, part)) for part in parts),
                 microseconds(undisturbed(steps)), microseconds(median_output(steps)), ratio]
            )  # fmt: skip
    legend = "; ".join(f"{part}: {PARTS[part]}" for part in parts if part in PARTS)
    notes = (
        f"Microseconds of {costs.clock}, medians of {num_steps} decode steps; vocabulary {vocab_size}; a model that "
        f"does nothing. {legend}; step: the sum; output: get_output, which waits for the device, beside them."
    )
    notes += caveat(next(iter(costs.infos.values())))
    described = [info.line() for info in costs.infos.values()]
    return "\n".join([*described, "", number_table(lines, num_names=2), *textwrap.wrap(notes, WIDTH)])


def median_output(steps: Sequence[StepTimes]) -> float:
    """Median seconds of get_output."""
    return statistics.median(s.output for s in steps)


def _json(costs: HostCosts, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "clock": costs.clock, "vocab_size": args.vocab, "sampled": args.sampled, "steps": args.steps,
        "runners": {layout: info.line() for layout, info in costs.infos.items()},
        "batches": {times.batch: {layout: _times_json(steps) for layout, steps in times.steps.items()}
                    for times in costs.batches},
        "ratios": {times.batch: times.ratio for times in costs.batches},
    }  # fmt: skip


def _times_json(steps: Sequence[StepTimes]) -> dict[str, Any]:
    return {
        "seconds": undisturbed(steps), "parts": {part: median(steps, part) for part in parts_of(steps)},
        "output": median_output(steps),
    }  # fmt: skip
