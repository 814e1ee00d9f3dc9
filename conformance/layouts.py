"""A runner in one of its row layouts, and the two shapes of a plan.

Probes tell their stories in the shape of the slots layout, where a preempted request comes back as new. Told to a
runner with dense rows the same story needs the other shape; everything else of a plan is passed on untouched, so that
an impossible plan stays as impossible as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from conformance.replay_layout import resumed_as_cached
from runner_api import BatchDescriptor, ModelRunner, NewRequestData, RunnerConfig, SchedulerOutput, StageSet
from runner_api.loader import call_factory, load_factory, load_stages
from runner_api.protocol import RunnerFactory


@dataclass(frozen=True, slots=True)
class InLayout:
    """A factory whose runners have one layout, whatever else their configuration says.

    stories: its runners take plans in the shape of the slots layout.
    """

    runner: str | RunnerFactory
    layout: str
    stories: bool = False

    def __call__(self, config: RunnerConfig) -> ModelRunner:
        config = replace(config, layout=self.layout)
        if self.layout == "dense":
            config = replace(config, initial_free_rows=None)  # there is no stack of rows
        built = call_factory(self.runner, config)
        return ToldAsSlots(built) if self.stories and self.layout == "dense" else built  # type: ignore[return-value]

    @property
    def LAYOUTS(self) -> tuple[str, ...]:
        return (self.layout,)

    @property
    def stages(self) -> Callable[[], StageSet]:
        return lambda: load_stages(self.runner)


def in_layout(runner: str | RunnerFactory, layout: str) -> InLayout:
    """The same runner, whose layout is this one, whatever layout it had before. Raises when it is called, if the runner
    does not offer it."""
    return InLayout(load_factory(bare(runner)), layout)


def bare(runner: str | RunnerFactory) -> str | RunnerFactory:
    """The factory itself, which builds what its configuration says."""
    while isinstance(runner, InLayout):
        runner = runner.runner
    return runner


class ToldAsSlots:
    """A runner with dense rows that takes plans in which preempted requests come back as new."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._known: dict[str, NewRequestData] = {}
        self._preempted: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute_model(self, plan: SchedulerOutput, *, descriptor: BatchDescriptor | None = None, **rest: Any) -> Any:
        if not isinstance(plan, SchedulerOutput):
            return self._runner.execute_model(plan, descriptor=descriptor, **rest)
        away = (self._preempted | plan.preempted_req_ids) - plan.finished_req_ids
        known = {req_id: new for req_id, new in self._known.items() if req_id in away}
        done = self._runner.execute_model(resumed_as_cached(plan, known), descriptor=descriptor, **rest)
        self._known |= {new.req_id: new for new in plan.scheduled_new_reqs}
        self._preempted = away - {new.req_id for new in plan.scheduled_new_reqs}
        return done
