"""Around the candidate's code, which may do anything: leave the program, or write to the plan that it is given."""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from runner_api import SchedulerOutput
from runner_api.errors import safely

# What a candidate may raise: a wish to leave too. What the user wants (KeyboardInterrupt) is not the candidate's.
RAISED = (Exception, SystemExit, GeneratorExit)
# The runners that the innermost `all_let_go` has to shut down.
_opened: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("opened", default=None)


class LeftTheProgram(Exception):
    """The candidate wanted to end the process, which is the judge's."""


class PlanChanged(Exception):
    """The candidate wrote to its plan. Plans are read, never written: the engine goes on with them."""


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """Turn a wish to leave, by which a verdict would be lost, into an error like any other."""
    try:
        yield
    except (SystemExit, GeneratorExit) as e:
        raise LeftTheProgram(f"the runner raised {safely(repr, e)}, which ends the program") from e


def shut_down(runner: Any) -> None:
    """Shut a runner down. Raises what it raises, and LeftTheProgram."""
    runners = _opened.get()
    if runners is not None:
        runners[:] = [other for other in runners if other is not runner]
    with staying():
        runner.shutdown()


def let_go(runner: Any) -> None:
    """Shut a runner down that nobody asks anything more. What it raises takes no verdict back."""
    with contextlib.suppress(Exception):
        shut_down(runner)


def opened(runner: Any) -> Any:
    """The runner, which the innermost `all_let_go` around shuts down; outside of one, who calls this has to."""
    runners = _opened.get()
    if runners is not None:
        runners.append(runner)
    return runner


@contextlib.contextmanager
def all_let_go() -> Iterator[None]:
    """Whatever `harness.build_runner` builds in here, on this thread, is shut down at the end."""
    runners: list[Any] = []
    token = _opened.set(runners)
    try:
        yield
    finally:
        try:
            for runner in tuple(runners):
                let_go(runner)
        finally:
            _opened.reset(token)


def own_copy(plan: SchedulerOutput) -> SchedulerOutput:
    """A plan for the candidate alone. What is a user's own (parameters, features, processors) is not copied."""
    theirs: list[Any] = []
    for new in plan.scheduled_new_reqs:
        theirs += [new.sampling_params, new.pooling_params, new.lora_request, new.mm_features, new.prompt_embeds]
    return copy.deepcopy(plan, {id(value): value for value in theirs if value is not None})


def must_be_unchanged(given: SchedulerOutput, plan: SchedulerOutput) -> None:
    """Raises PlanChanged, with the field, if the copy that the candidate got is not as the plan any more."""
    for field in fields(plan):
        now, before = getattr(given, field.name), getattr(plan, field.name)
        if now != before:
            raise PlanChanged(
                f"the runner changed the plan that it was given: {field.name} is {safely(repr, now)}, was {before!r}"
            )
