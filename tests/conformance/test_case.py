"""Cases: complete as JSON, run anywhere, and their truth is that of the world they came from."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from conformance.case import SCHEMA, Case, CaseStep, CaseTruth, run_case
from conformance.divergence import Sides
from conformance.driver import KINDS, draw_size
from conformance.layouts import in_layout
from conformance.mutation import mutated
from conformance.probes import new, plan_of
from conformance.telling import Told, tell, tell_at_random
from runner_api import (
    BatchDescriptor,
    Capability,
    ConfigError,
    CUDAGraphMode,
    RunnerConfig,
    SamplingParams,
    UnknownNameError,
    WitnessConfig,
)
from runner_api.loader import call_factory

CONFIG = RunnerConfig(max_num_reqs=3, max_num_batched_tokens=12, max_model_len=24)
MODEL = WitnessConfig()


def two_steps(**changes: object) -> Case:
    first = plan_of(new("a", [1, 2, 3], [1], **changes), new("b", [4, 5], [2]))
    return Case(CONFIG, MODEL, 8, (CaseStep(first), CaseStep(plan_of(cached={"a": (3, None), "b": (2, None)}))))


def right_sides(layout: str) -> Sides:
    factory = in_layout("cpu", layout)
    offered = call_factory(factory, RunnerConfig(max_num_reqs=2)).describe().capabilities
    return Sides(factory, factory, offered)


def random_story(layout: str, kind: str, seed: int, steps: int = 12) -> Told:
    sides = right_sides(layout)
    random = np.random.default_rng([seed, KINDS.index(kind)])
    size = draw_size(kind, random, sides.parts(), sides.offered, layout)
    return tell_at_random(sides, size, [seed, 5], steps)


@pytest.mark.parametrize(
    ("layout", "kind"), [("slots", kind) for kind in KINDS] + [("dense", kind) for kind in KINDS if kind != "drafts"]
)
def test_a_world_told_again_and_as_a_case_is_right_too(layout: str, kind: str) -> None:
    sides = right_sides(layout)
    for seed in range(2):
        told = random_story(layout, kind, seed)
        assert told.failure is None
        assert tell(told.story, sides).story == told.story
        case = Case.from_json(json.loads(told.case().text()))
        assert case.text() == told.case().text()
        run = run_case(case, "cpu")
        assert run.passed, run.failure and run.failure.mismatch
        assert run.steps == len(told.steps)
        assert len(run.tested) > 20, "the laws had something to look at"


def test_the_layout_is_always_said() -> None:
    assert two_steps().config.layout == "slots"
    assert two_steps().as_json()["schema"] == SCHEMA


def test_a_case_asks_for_what_its_plans_need() -> None:
    assert two_steps().needs() == {Capability.GENERATE}
    asking = two_steps(sampling_params=SamplingParams(temperature=0.5, top_k=3, logprobs=1))
    wanted = {Capability.GENERATE, Capability.SEEDED_SAMPLING, Capability.TOP_K, Capability.LOGPROBS}
    assert asking.needs() == wanted


def test_tidying_keeps_ends_of_sequence_that_matter() -> None:
    plain = two_steps(eos_token_ids=(11,)).tidy()
    assert [n.eos_token_ids for n in plain.new_requests()] == [(), ()]
    minimum = two_steps(eos_token_ids=(11,), sampling_params=SamplingParams(temperature=0.0, min_tokens=2)).tidy()
    assert next(minimum.new_requests()).eos_token_ids == (11,)


def test_what_fails_first_is_told_with_its_step() -> None:
    with mutated("cpu", "slot_mapping.py", "local // block_size", "np.maximum(local - 1, 0) // block_size") as mutant:
        first = plan_of(new("a", list(range(17)), [1, 2]))
        case = Case(replace(CONFIG, max_num_batched_tokens=20), MODEL, 8, (CaseStep(first),))
        run = run_case(case, mutant.factory)
        assert run.failure is not None
        assert (run.failure.step, run.failure.clause_id) == (0, "MR-SLOT-001")
        assert run.failure.mismatch is not None
        assert (run.failure.mismatch.index, run.failure.mismatch.got, run.failure.mismatch.expected) == (
            (0, 16),
            16,
            32,
        )
        assert not run.passed
        assert run_case(case, mutant.factory, clauses=frozenset({"MR-BATCH-001"})).passed, "only what is asked for"
    assert run_case(case, "cpu").passed


def test_a_crash_over_poison_is_told_by_the_clause_that_calm_memory_breaks() -> None:
    padded = BatchDescriptor(CUDAGraphMode.FULL, 6, 3)
    step = CaseStep(plan_of(new("a", [1, 2, 3], [1])), padded, keep_blocks=frozenset())
    with mutated("cpu", "input_batch.py", "seq_lens[num_reqs:] = 0", "pass") as mutant:
        before = CaseStep(plan_of(new("b", [1, 2], [2]), new("c", [4], [3])))
        leave = replace(step, plan=replace(step.plan, finished_req_ids=frozenset({"b", "c"})))
        failure = run_case(Case(CONFIG, MODEL, 8, (before, leave)), mutant.factory).failure
    assert failure is not None
    assert (failure.step, failure.clause_id) == (1, "MR-PAD-002")


def test_an_exception_on_a_legal_plan_is_a_failure_without_a_clause() -> None:
    with mutated("cpu", "slot_mapping.py", "local // block_size", "local // None") as mutant:
        failure = run_case(two_steps(), mutant.factory).failure
        assert failure is not None
        assert failure.clause_id is None
        assert failure.error is not None
        assert failure.error.startswith("TypeError")
        assert failure.key == "TypeError"


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"schema": "other/1"}, "schema"), ([], "schema"), ({"schema": SCHEMA, "extra": 1}, "extra"),
        ({"schema": SCHEMA, "config": {"max_num_reqs": "many"}, "model": {}, "num_blocks": 2, "steps": []}, "config"),
    ],
)  # fmt: skip
def test_what_is_no_case_is_refused_with_its_place(data: object, field: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=field):
        Case.from_json(data)


def test_nothing_to_run_is_an_error() -> None:
    with pytest.raises(ConfigError, match="tests nothing"):
        run_case(Case(CONFIG, MODEL, 8, ()), "cpu")


def test_plans_that_no_engine_makes_are_not_the_candidates_fault() -> None:
    bad = Case(CONFIG, MODEL, 8, (CaseStep(plan_of(new("a", [1, 2], [1]), total_num_scheduled_tokens=7)),))
    with pytest.raises(ConfigError, match="the oracle refuses"):
        run_case(bad, "cpu")
    stray = Case(CONFIG, MODEL, 8, (CaseStep(plan_of(cached={"nobody": (3, None)})),))
    with pytest.raises(ConfigError, match="never added"):
        run_case(stray, "cpu")


def test_plans_that_go_on_with_other_tokens_are_refused() -> None:
    first = plan_of(new("a", [1, 2, 3], [1]))
    again = new("a", [1, 2, 3], [1])
    again.prefill_token_ids = [1, 2, 3, 63, 62]
    resumed = plan_of(again, preempted_req_ids=frozenset({"a"}))
    with pytest.raises(ConfigError, match="relies on tokens that were not drawn"):
        run_case(Case(CONFIG, MODEL, 8, (CaseStep(first), CaseStep(resumed))), "cpu")


def test_the_truth_of_a_case_is_that_of_its_world() -> None:
    """Batch order, input tokens and blocks of every step, worked out from plans alone."""
    told = random_story("slots", "groups", 1)
    truth = CaseTruth(told.case())
    sides = right_sides("slots")
    judge = sides.judge(told.story.size)
    for step in told.steps:
        planned = truth.next(step)
        judge.run_oracle(planned)
        record = judge.reference
        assert record is not None
        assert planned.truth.order == record.req_ids
        fed = [t for r in record.req_ids for t in planned.truth.requests[r].input_ids]
        assert fed == record.input_ids.tolist()
        truth.observe(record)
