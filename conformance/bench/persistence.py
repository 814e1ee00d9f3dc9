"""Does it pay to keep rows between steps? One request trace driven through a real runner in two ways, and counted.

Diffs: ordinary plans; a row is written when its request arrives, and one entry whenever a block boundary is crossed.
Rebuilding: in every step every request leaves and comes back, so that each row is written whole. Entries and bytes are
the runner's own count (`runner_api.loader.table_traffic`), times are those of whole steps with a model that does
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from conformance.bench.arguments import TIMED_STEPS
from conformance.bench.null_model import NullModel
from conformance.bench.request_trace import BLOCK_SIZE, ROWS, RequestTrace
from conformance.bench.step_timer import StepTimer, StepTimes, clock_for, mean, no_garbage_collection
from conformance.bench.trace_plans import DiffPlans, RebuildPlans, num_blocks
from runner_api import (
    CapabilityError,
    ConfigError,
    ModelRunner,
    RunnerConfig,
    RunnerFactory,
    RunnerInfo,
    group_kv_cache_specs,
    load_runner,
)
from runner_api.loader import table_traffic

VOCAB_SIZE = 16
# Requests in all steps together, up to which every step may be rebuilt through the runner.
NOT_LONG = 10_000
# Of the steps, one in so many comes before any is timed.
WARM_UP_SHARE = 20
# Below this a saving of time is not told from chance.
WORTH_IT = 1.05


@dataclass(frozen=True, slots=True)
class Way:
    """What one way of keeping rows took.

    written: entries of each step of the trace, as the runner counts; traffic: its counters after the `num_run` steps
    that it was run through; times: of the timed ones among them.
    """

    written: tuple[int, ...]
    traffic: dict[str, int]
    num_run: int
    times: tuple[StepTimes, ...]

    @property
    def entries(self) -> int:
        """Of all steps."""
        return sum(self.written)

    def per_step(self, counter: str) -> float | None:
        """Mean of a counter over the steps that were run; None if the runner has no such counter."""
        return self.traffic[counter] / self.num_run if counter in self.traffic else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both ways on one trace. through_runner: whether all steps of rebuilding went through the runner."""

    trace: RequestTrace
    info: RunnerInfo
    clock: str
    through_runner: bool
    rebuild: Way
    diffs: Way

    @property
    def entry_ratio(self) -> float:
        return self.rebuild.entries / max(self.diffs.entries, 1)

    @property
    def time_ratio(self) -> float:
        return mean(self.rebuild.times) / mean(self.diffs.times)

    @property
    def as_computed(self) -> bool:
        """Whether the runner counted what arithmetic says."""
        computed = (self.trace.entries_rebuilding, self.trace.entries_of_diffs)
        return (self.rebuild.entries, self.diffs.entries) == computed


class _Driven:
    """A runner that is driven along the trace, its clock and its counters."""

    def __init__(self, runner: str | RunnerFactory, layout: str | None, trace: RequestTrace) -> None:
        config = RunnerConfig(
            max_num_reqs=ROWS, max_num_batched_tokens=ROWS, max_model_len=trace.max_model_len, layout=layout
        )
        self.runner = load_runner(runner, config)
        self.runner.load_model(NullModel(VOCAB_SIZE, BLOCK_SIZE))
        self.start_over(num_blocks(trace))
        clock, self.clock_name = clock_for(self.runner.describe())
        self.timer = StepTimer(self.runner, clock)
        self.written: list[int] = []
        if "entries" not in table_traffic(self.runner):
            raise CapabilityError(
                "the runner does not count what it writes to its block tables", field="--runner",
                got=self.runner.describe().name, hint="Give it a method table_traffic, see runner_api.loader",
            )  # fmt: skip

    def start_over(self, blocks: int) -> None:
        self.runner.initialize_kv_cache(group_kv_cache_specs(self.runner.get_kv_cache_specs(), blocks))

    def run(self, plan: Any, *, keep: bool) -> None:
        before = table_traffic(self.runner)["entries"]
        self.timer.run(plan, keep=keep)
        self.written.append(table_traffic(self.runner)["entries"] - before)

    def way(self) -> Way:
        return Way(tuple(self.written), table_traffic(self.runner), len(self.written), tuple(self.timer.steps))


def compare(
    runner: str | RunnerFactory,
    trace: RequestTrace,
    layout: str | None = None,
    *,
    timed_steps: int = TIMED_STEPS,
    full: bool = False,
) -> Comparison:
    """Drive the trace both ways.

    Diffs run through every step, and so does rebuilding, where that does not take long, `full` is set, or rows cannot
    be laid into the runner's tables between two steps; all steps but the first few are timed then. Else rebuilding runs
    through `timed_steps` of them, spread evenly over the trace, each behind the step before it; what it writes in all
    steps is counted by laying their rows into the runner's own tables.
    """
    diffs, rebuild = (_Driven(runner, layout, trace) for _ in range(2))
    diff_plans, rebuild_plans = DiffPlans(trace), RebuildPlans(trace)
    full = full or sum(len(s.active) for s in trace.walk()) <= NOT_LONG or not _can_be_written(rebuild.runner)
    first = max(trace.num_steps // WARM_UP_SHARE, 1)
    timed = [step.number for step in trace.walk() if step.active and step.number >= first]
    timed = set(timed if full else spread(timed, timed_steps))
    if not timed:
        raise ConfigError("no request is active in any step", field="--steps", got=trace.num_steps, hint="Take more")
    with no_garbage_collection():
        for step in trace.walk():
            # 1 both ways keep the times of the same steps, and take turns at being first
            keep = step.number in timed
            ways = [(diffs, diff_plans)]
            if full or keep or step.number + 1 in timed:
                ways.insert(step.number % 2, (rebuild, rebuild_plans))
            for driven, plans in ways:
                driven.run(plans.plan(step), keep=keep)
    # 2 what rebuilding writes in every step, also in those that it was not run through
    way = rebuild.way()
    if not full:
        rebuild.start_over(num_blocks(trace))
        way = replace(way, written=tuple(_lay_rows(rebuild.runner, rebuild_plans.rows(s)) for s in trace.walk()))
    return Comparison(trace, diffs.runner.describe(), diffs.clock_name, full, way, diffs.way())


def spread(numbers: Sequence[int], count: int) -> list[int]:
    """`count` of the numbers at even distances, or all of them.

    >>> spread(range(10), 3)
    [1, 5, 8]
    """
    count = min(count, len(numbers))
    return [numbers[(2 * i + 1) * len(numbers) // (2 * count)] for i in range(count)]


def _can_be_written(runner: ModelRunner) -> bool:
    """Whether rows can be laid into the runner's tables between two steps: nothing needs to be sent for that."""
    tables = getattr(runner, "block_tables", None)
    return hasattr(tables, "append_block_ids") and not hasattr(tables, "pack")


def _lay_rows(runner: Any, rows: Sequence[Sequence[int]]) -> int:
    """Write whole rows into the runner's tables; how many entries it has counted."""
    before, tables = table_traffic(runner)["entries"], runner.block_tables
    for row, ids in enumerate(rows):
        tables.append_block_ids(row, (ids,), overwrite=True)
    if hasattr(tables, "apply_staged_writes"):  # where writes are staged
        tables.apply_staged_writes()
    return table_traffic(runner)["entries"] - before


def stops_paying(ratios: dict[int, float]) -> int | None:
    """The longest lifetime up to which rows are not worth keeping; None if they always are.

    >>> stops_paying({1: 0.998, 2: 1.99, 4: 3.98}), stops_paying({2: 1.99})
    (1, None)
    """
    longest = None
    for lifetime, ratio in sorted(ratios.items()):
        if ratio >= WORTH_IT:
            break
        longest = lifetime
    return longest


def answer(points: dict[int, Comparison]) -> str:
    """One sentence: when a persistent batch stops paying for itself."""
    verdicts = []
    for ratios in (
        {lifetime: c.entry_ratio for lifetime, c in points.items()},
        {lifetime: c.time_ratio for lifetime, c in points.items()},
    ):
        longest, shortest = stops_paying(ratios), min(ratios)
        if longest is None:
            verdicts.append(f"still pays at L = {shortest} ({ratios[shortest]:.2f}x)")
            continue
        later = [lifetime for lifetime in ratios if lifetime > longest]
        then = f", {ratios[min(later)]:.2f}x at L = {min(later)}" if later else ""
        verdicts.append(f"stops paying at L = {longest} ({ratios[longest]:.2f}x{then})")
    return f"Counted in entries, keeping rows {verdicts[0]}; in time, it {verdicts[1]}."
