"""Around the candidate's code, which may do anything: leave the program, or write to the plan that it is given."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from runner_api import SchedulerOutput
from runner_api.errors import safely

# What a candidate may raise: a wish to leave too. What the user wants (KeyboardInterrupt) is not the candidate's.
RAISED = (Exception, SystemExit, GeneratorExit)


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
