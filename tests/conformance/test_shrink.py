"""What the shrinker proposes, and what it says where it ended for its limit alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.divergence import Sides
from conformance.driver import WorldSize
from conformance.finding import Budget, find
from conformance.layouts import in_layout
from conformance.mutation import mutated
from conformance.shrink import shrink
from conformance.story import Action, Add, Close, Go, Story
from conformance.telling import tell
from cpu_reference.runner import CpuModelRunner
from runner_api import RunnerConfig, StepRecord, WitnessConfig, WitnessGroup
from runner_api.loader import call_factory

# A prefill of which one token is left samples.
EDGE = "seq_lens[:num_reqs] < prefill_len[idx_mapping[:num_reqs]]"
SIZE = WorldSize(RunnerConfig(4, 64, 64, layout="slots"), WitnessConfig(groups=(WitnessGroup(4),)), 40)
PROMPT = tuple(range(1, 31))


@pytest.mark.parametrize(
    "actions",
    [
        (Add("a", PROMPT, 29), Close()),
        (Add("a", PROMPT, 19), Close(), Go("a", 10), Close()),
        (Add("a", PROMPT, 9), Close(), Go("a", 9), Close(), Go("a", 11), Close()),
    ],
)
def test_a_prompt_and_its_chunk_become_shorter_together(actions: tuple[Action, ...]) -> None:
    with mutated("cpu", "input_batch.py", EDGE, f"{EDGE} - 1") as copy:
        candidate, oracle = in_layout(copy.factory, "slots"), in_layout("cpu", "slots")
        offered = call_factory(candidate, RunnerConfig(max_num_reqs=2)).describe().capabilities
        sides = Sides(candidate, oracle, offered, frozenset({"MR-SAMPLE-003"}))
        told = tell(Story(SIZE, tuple(range(1, 40)), actions), sides)
        assert told.failure is not None
        small = shrink(told, sides)
    assert not small.cut_off
    assert small.told.story.actions == (Add("a", (1, 2), 1), Close())


def test_a_search_that_was_cut_off_says_so() -> None:
    with mutated("cpu", "input_batch.py", EDGE, f"{EDGE} - 1") as copy:
        found = find(copy.factory, clauses=["MR-SAMPLE-003"], budget=Budget(attempts=20))
        whole = find(copy.factory, clauses=["MR-SAMPLE-003"])
    assert found is not None
    assert whole is not None
    assert (found.attempts, found.cut_off, whole.cut_off) == (20, True, False)
    assert "\nthe search was cut off behind 20 attempts: smaller may exist\n" in found.text()
    assert "cut off" not in whole.text()


class Narrow(CpuModelRunner):
    """Shows padding rows that are cut short."""

    def last_step(self) -> StepRecord:
        r = super().last_step()
        cut = tuple((*t[: r.num_reqs], *(row[:1] for row in t[r.num_reqs :])) for t in r.block_tables)
        return replace(r, block_tables=cut)


def test_the_snippet_of_a_narrow_row_of_padding_takes_any_row_that_is_wide_enough() -> None:
    found = find(Narrow, clauses=["MR-PAD-003"])
    assert found is not None
    assert "got False, expected True" in found.text()
    with pytest.raises(AssertionError, match="got False"):
        exec(found.snippet, {})
    exec(found.snippet.replace(f"{__name__}:Narrow", "cpu"), {})
