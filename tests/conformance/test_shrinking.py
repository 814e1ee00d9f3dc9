"""The ways in which a story gets smaller, each on a story that no other way makes small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from conformance.case import CaseStep
from conformance.divergence import Sides
from conformance.driver import WorldSize
from conformance.layouts import in_layout
from conformance.shrink import shrink_while
from conformance.story import Action, Add, Close, Go, Story
from conformance.telling import Told, tell
from cpu_reference.runner import CAPABILITIES
from runner_api import RunnerConfig, WitnessConfig, WitnessGroup

RIGHT = in_layout("cpu", "slots")
SIDES = Sides(RIGHT, RIGHT, CAPABILITIES, quiet=True)


def story(*actions: Action, rows: int = 4, blocks: int = 40) -> Story:
    config = RunnerConfig(max_num_reqs=rows, max_num_batched_tokens=64, max_model_len=64, layout="slots")
    size = WorldSize(config, WitnessConfig(groups=(WitnessGroup(4),)), blocks)
    return Story(size, tuple(range(1, blocks)), actions)


def smallest(begin: Story, holds: Callable[[Told], bool]) -> Story:
    assert holds(tell(begin, SIDES)), "the story itself must show it"
    return shrink_while(tell(begin, SIDES), SIDES, holds).told.story


def _asks(step: CaseStep, token: int) -> bool:
    return any(new.prefill_token_ids == [token] for new in step.plan.scheduled_new_reqs)


def test_what_needs_full_rows_needs_no_more_rows_than_two() -> None:
    """A request that goes takes a row with it; with rows alone the last request would go first, and that one counts."""

    def full(told: Told) -> bool:
        rows = told.story.size.config.max_num_reqs
        return any(len(s.plan.num_scheduled_tokens) == rows > 1 and _asks(s, 9) for s in told.steps)

    begin = story(*(Add(i, (1, 2), 2) for i in "pqr"), Add("s", (9,), 1), Close())
    small = smallest(begin, full)
    assert (len(small.requests), small.size.config.max_num_reqs) == (2, 2)
    turned = replace(begin.size.config, initial_free_rows=(3, 1, 0, 2))
    small = smallest(replace(begin, size=replace(begin.size, config=turned)), full)
    assert (len(small.requests), small.size.config.max_num_reqs) == (2, 2)


def test_what_needs_the_last_block_needs_no_others_to_take_those_before_it() -> None:
    def last(told: Told) -> bool:
        blocks = [b for s in told.steps for new in s.plan.scheduled_new_reqs for b in new.block_ids[0]]
        return told.story.size.num_blocks == 7 and 6 in blocks

    small = smallest(story(*(Add(i, (1, 2, 3, 4, 5), 5) for i in "pqr"), Close(), blocks=7), last)
    assert len(small.requests) == 1
    assert small.num_steps == 1


@pytest.mark.parametrize("first", [1, 3])
def test_chunks_become_one(first: int) -> None:
    """What counts is how far the request has come, in a step of its own."""

    def far(told: Told) -> bool:
        cached = [s.plan.scheduled_cached_reqs for s in told.steps]
        counts = [s.plan.num_scheduled_tokens for s in told.steps]
        return any(
            n + counts[k]["p"] == 24
            for k, c in enumerate(cached) for r, n in zip(c.req_ids, c.num_computed_tokens, strict=True) if r == "p"
        )  # fmt: skip

    chunks = [Go("p", n) for n in (5, 6, 7, 24 - first - 18)]
    actions = [a for go in chunks for a in (go, Close())]
    small = smallest(story(Add("p", tuple(range(24)), first), Close(), *actions), far)
    assert small.num_steps == 2
    assert len(small.actions) == 4


def test_who_shared_blocks_computes_by_itself() -> None:
    """The one whose blocks were shared is in the way of a single step."""

    def longest(told: Told) -> bool:
        return any(
            new.num_computed_tokens + s.plan.num_scheduled_tokens[new.req_id] == 9
            for s in told.steps for new in s.plan.scheduled_new_reqs
        )  # fmt: skip

    prompt = tuple(range(1, 9))
    begin = story(Add("p", prompt, 8), Close(), Add("q", (9,), 1, source="p", shared=8), Close())
    narrow = replace(begin.size.config, max_num_batched_tokens=8)
    small = smallest(replace(begin, size=replace(begin.size, config=narrow)), longest)
    assert (small.num_steps, len(small.requests)) == (1, 1)
    assert np.all([a.source is None for a in small.actions if isinstance(a, Add)])
