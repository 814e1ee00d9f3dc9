"""Takes a runner through replayed steps on a thread of its own.

On the thread's stack, from its first frame to the runner's, there are ReplaySteps and nothing else: a runner that
looks at its callers does not find the recorded batch that it is judged by. The judge runs on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from conformance.foreign import RAISED, let_go
from conformance.recording import Launch, ReplayStep, build_runner
from runner_api import CapabilityError, ModelRunner
from runner_api.loader import kernel_launches
from runner_api.protocol import RunnerFactory, RunnerInfo


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of one step: record and output, or the call that raised and its error."""

    record: Any = None
    output: Any = None
    stage: str = ""
    error: BaseException | None = None


class Driver:
    """One runner, built, driven and shut down on one thread. Use as a context manager."""

    def __init__(self, factory: str | RunnerFactory, launch: Launch) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replay")
        try:
            self._runner: ModelRunner = self._call(build_runner, factory, launch)
            self._launched: dict[str, int] = self._call(kernel_launches, self._runner)
        except BaseException:
            self._thread.shutdown()
            raise

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._call(let_go, self._runner)
        finally:
            self._thread.shutdown()

    def describe(self) -> RunnerInfo:
        return self._call(self._runner.describe)

    def take(self, step: ReplayStep) -> Taken:
        """One step. Raises `CapabilityError`; every other error comes back in the answer."""
        return self._call(take_step, self._runner, step)

    def launches(self) -> dict[str, int]:
        """Launches of each kernel since the runner was built."""
        counted: dict[str, int] = self._call(kernel_launches, self._runner)
        return {name: n - self._launched.get(name, 0) for name, n in counted.items()}

    def _call(self, fn: Callable[..., Any], *args: Any) -> Any:
        return self._thread.submit(fn, *args).result()


def take_step(runner: ModelRunner, step: ReplayStep) -> Taken:
    """Plan, imposed outcome, output, record: in the order in which an engine asks for them."""
    stage = "execute_model"
    try:
        output: Any = runner.execute_model(step.plan, descriptor=step.descriptor)
        if step.forced is not None:
            stage = "record"
            forced = step.forced if step.req_ids is None else step.forced_for(runner.last_step())
            stage = "sample_tokens"
            handle = runner.sample_tokens(forced=forced)
            stage = "output"
            output = handle.get_output()
        stage = "record"
        return Taken(runner.last_step(), output)
    except CapabilityError:
        raise
    except RAISED as e:  # whatever a runner under test may raise
        return Taken(stage=stage, error=e)
