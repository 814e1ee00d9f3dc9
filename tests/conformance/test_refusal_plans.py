"""Each impossible plan is asked: a runner that takes this one alone fails its clause, and the report shows the plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conformance.layouts import in_layout
from conformance.probes import (
    MODEL,
    NUM_BLOCKS,
    Bench,
    bad_plans,
    impossible_outcomes_are_refused,
    impossible_plans_are_refused,
)
from conformance.refusal_plans import LONGEST, accepted, bad_outcomes, more_bad_plans
from cpu_reference.runner import CAPABILITIES, CpuModelRunner
from runner_api import ForcedStep, PlanError, SchedulerOutput

PLANS = more_bad_plans(NUM_BLOCKS)
OUTCOMES = bad_outcomes(MODEL.vocab_size)


def bench_of(hole: Any) -> Bench:
    """Of a runner that refuses what the reference refuses, except for one plan or outcome."""

    class Holey(CpuModelRunner):
        def execute_model(self, plan: SchedulerOutput, **kwargs: Any) -> Any:
            try:
                return super().execute_model(plan, **kwargs)
            except PlanError:
                if repr(plan) != repr(hole):
                    raise
                return None

        def sample_tokens(self, grammar: Any = None, *, forced: ForcedStep | None = None) -> Any:
            return super().sample_tokens(grammar, forced=None if repr(forced) == repr(hole) else forced)

    return Bench(Holey, CAPABILITIES)


@pytest.mark.parametrize("layout", ["slots", "dense"])
def test_the_reference_refuses_all_with_the_clause_of_each(layout: str) -> None:
    bench = Bench(in_layout("cpu", layout), CAPABILITIES)
    for found in (impossible_plans_are_refused(bench), impossible_outcomes_are_refused(bench)):
        assert not any(found.values())
        assert "MR-ERR-101" in found


@pytest.mark.parametrize(("clause_id", "plan"), [*PLANS, ("MR-ERR-020", bad_plans()["MR-ERR-020"][0])])
def test_a_hole_in_the_validation_is_seen_and_shown(clause_id: str, plan: SchedulerOutput) -> None:
    found = impossible_plans_are_refused(bench_of(plan))
    assert [c for c, mismatches in found.items() if mismatches] == [clause_id]
    assert [m.got for m in found[clause_id]] == [accepted(plan)]


@pytest.mark.parametrize(("clause_id", "outcome"), OUTCOMES)
def test_a_hole_in_the_checks_of_outcomes_is_seen_and_shown(clause_id: str, outcome: ForcedStep) -> None:
    found = impossible_outcomes_are_refused(bench_of(outcome))
    assert [c for c, mismatches in found.items() if mismatches] == [clause_id]
    assert accepted(outcome) in [m.got for m in found[clause_id]]


def test_every_wrong_type_survives_a_parser_that_reads_all_numbers_as_floats() -> None:
    """1.0 would not: in JSON of JavaScript it is 1."""
    totals = [plan.total_num_scheduled_tokens for c, plan in PLANS if c == "MR-ERR-020"]
    totals.append(bad_plans()["MR-ERR-020"][0].total_num_scheduled_tokens)
    assert not any(isinstance(n, float) and n == int(n) for n in totals)


def test_what_was_accepted_is_short_json_without_defaults() -> None:
    assert accepted(PLANS[0][1]) == (
        'accepted {"scheduled_cached_reqs":{"req_ids":["a","b"],"num_computed_tokens":[3,3],'
        '"new_block_ids":[null,null],"num_output_tokens":[1,1]},"num_scheduled_tokens":{"a":1,"b":1},'
        '"total_num_scheduled_tokens":1.5}'
    )
    assert accepted(OUTCOMES[2][1]) == 'accepted {"token_ids":[[5]],"num_sampled":[0]}'
    text = accepted(bad_plans()["MR-ERR-040"][0])
    assert len(text) == len("accepted ") + LONGEST + 2
    assert text.endswith(" …")
    odd = SchedulerOutput(num_scheduled_tokens={"a": object()})  # type: ignore[dict-item]
    assert accepted(odd).startswith("accepted SchedulerOutput(")
    assert "dtype=float64" not in accepted(ForcedStep(np.zeros((1, 1)), np.zeros(1, np.int32)))
