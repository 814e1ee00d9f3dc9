"""Times of a step and of its parts, by the runner's own word of where a part ends."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from runner_api import ModelRunner, RunnerInfo, SchedulerOutput
from runner_api.loader import listen_to_parts

Clock = Callable[[], float]

# What a runner's parts do, in the order of a step; see `runner_api.loader.listen_to_parts`.
PARTS = {
    "plan": "check the plan",
    "rows": "update rows",
    "inputs": "prepare inputs",
    "tables": "block tables and slots",
    "metadata": "attention metadata",
    "forward": "launch the model",
    "sample": "logits and sampling",
    "advance": "copy out, advance rows",
    "record": "record the step",
    "other": "everything else",
}


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step. parts: of the two calls, by name, what no part claims as "other"; output: get_output,
    which waits for the device."""

    parts: dict[str, float] = field(default_factory=dict)
    output: float = 0.0

    @property
    def total(self) -> float:
        """Of execute_model and sample_tokens together."""
        return sum(self.parts.values())


class StepTimer:
    """Runs steps of one runner and keeps their times. A runner that does not tell its parts has "other" alone."""

    def __init__(self, runner: ModelRunner, clock: Clock) -> None:
        self.runner = runner
        self.steps: list[StepTimes] = []
        self._clock = clock
        self._last = 0.0
        self._times = StepTimes()
        listen_to_parts(runner, self._end_of)

    def _end_of(self, part: str) -> None:
        now = self._clock()
        self._times.parts[part] = self._times.parts.get(part, 0.0) + now - self._last
        self._last = now

    def run(self, plan: SchedulerOutput, *, keep: bool = True) -> None:
        """One step; keep=False: its times are forgotten (a step to warm up, say)."""
        self._times, self._last = StepTimes(), self._clock()
        # 1 the two calls that an engine makes ahead of the device; a plan of no tokens needs only one
        if self.runner.execute_model(plan) is None:
            self._end_of("other")
            output = self.runner.sample_tokens()
            self._end_of("other")
            # 2 the wait for their outcome
            output.get_output()
            self._times.output = self._clock() - self._last
        else:
            self._end_of("other")
        if keep:
            self.steps.append(self._times)


def clock_for(info: RunnerInfo) -> tuple[Clock, str]:
    """A clock and what it shows: processor time of the step's thread, which other programs do not disturb, where the
    thread itself does all the work; wall time where there is a device to wait for."""
    if info.device.startswith("cpu"):
        return time.thread_time, "processor time"
    return time.perf_counter, "wall time"


def caveat(info: RunnerInfo) -> str:
    """What else must be said of times of this runner."""
    return " Kernels were interpreted: their times say nothing about a GPU." if "interpreter" in info.device else ""


def mean(steps: Sequence[StepTimes], part: str | None = None) -> float:
    """Mean seconds of a part, or of the whole step."""
    return statistics.fmean(s.total if part is None else s.parts.get(part, 0.0) for s in steps)


def median(steps: Sequence[StepTimes], part: str) -> float:
    """Median seconds of a part."""
    return statistics.median(s.parts.get(part, 0.0) for s in steps)


def undisturbed(steps: Sequence[StepTimes]) -> float:
    """Seconds of a step none of whose parts takes longer than usual: the medians of all parts together."""
    return sum(median(steps, part) for part in parts_of(steps))


def parts_of(steps: Sequence[StepTimes]) -> list[str]:
    """Names of the parts that occur, in the order of PARTS; unknown ones at the end."""
    seen = dict.fromkeys(name for s in steps for name in s.parts)
    return [name for name in PARTS if name in seen] + [name for name in seen if name not in PARTS]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collections come at times that have nothing to do with the step they fall into."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
