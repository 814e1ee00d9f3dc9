"""Clauses of dense rows: who stands where, the two shapes of plans, and a layout's own clauses asked of it alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conformance.clauses import clause, load_clauses
from conformance.dense_mutants import DENSE_MUTANTS
from conformance.dense_rows import DenseRowTracker, next_rows
from conformance.evaluate import Evaluation, evaluate
from conformance.layouts import InLayout, bare, in_layout
from conformance.probes import bad_plans
from cpu_reference.dense.runner import DenseCpuModelRunner
from runner_api import (
    CachedRequestData,
    Capability,
    NewRequestData,
    RunnerConfig,
    SchedulerOutput,
    StepRecord,
)
from runner_api.loader import call_factory


@pytest.fixture(scope="module")
def dense() -> Evaluation:
    return evaluate("cpu", layout="dense", seeds=(0, 1))


def test_the_reference_passes_everything(dense: Evaluation) -> None:
    assert [str(m) for found in dense.by_clause.values() for m in found] == []
    assert [e.traceback for e in dense.errors] == []
    assert dense.untested == []
    assert dense.passed


def test_worlds_met_what_dense_rows_get_wrong(dense: Evaluation) -> None:
    for action in (
        "preempt", "preempt_untold", "resume", "resume_same_plan", "prefix_hit", "return", "condense_move", "swap",
        "empty_step", "padded",
    ):  # fmt: skip
        assert dense.counts[action] > 10, action


def test_a_layouts_own_clauses_are_asked_of_it_alone(dense: Evaluation) -> None:
    assert dense.skipped["MR-STATE-001"] == ("slots_layout",)
    assert clause("MR-DENSE-001").missing(frozenset()) == ("dense_layout", "generate", "step_record")
    whole = frozenset({Capability.GENERATE, Capability.STEP_RECORD})
    assert clause("MR-STATE-001").missing(whole) == ()
    assert clause("MR-STATE-001").missing(whole | {Capability.DENSE_LAYOUT}) == ("slots_layout",)
    assert clause("MR-STATE-002").missing(whole | {Capability.DENSE_LAYOUT}) == ()
    own = [c for c in load_clauses().values() if c.layout == "dense"]
    assert len([c for c in own if c.level == "MUST"]) >= 20
    assert {c.id for c in own} == {c for c in load_clauses() if c.startswith("MR-DENSE-")}


def test_a_record_that_lies_about_rows_fails() -> None:
    class Liar(DenseCpuModelRunner):
        def last_step(self) -> StepRecord:
            record = super().last_step()
            return replace(record, idx_mapping=record.idx_mapping + 1) if record.num_reqs else record

    failed = evaluate(Liar, seeds=(0,), steps=20).failed
    assert "MR-DENSE-001" in failed


# -- rows -----------------------------------------------------------------------------------------------------


def plan(counts: dict[str, int], new: dict[str, int], cached: dict[str, int], resumed: str = "") -> SchedulerOutput:
    """new, cached: computed counts by id."""
    added = [NewRequestData(r, [1] * 6, [1] * 6, computed, ([1],)) for r, computed in new.items()]
    data = CachedRequestData(
        list(cached), list(cached.values()), [None] * len(cached), [], frozenset(resumed), dict.fromkeys(resumed, ())
    )
    return SchedulerOutput(added, data, counts, sum(counts.values()))


def after(before: str, stay: str, come: str = "", back: str = "") -> str:
    """Everybody decodes; `come` are new, `back` had been away."""
    known = dict.fromkeys(stay + back, 9)
    change = next_rows(before, plan(dict.fromkeys(stay + come + back, 1), dict.fromkeys(come, 1), known), {}, None)
    assert set(change.arrived) == set(come + back)
    return "".join(change.order)


@pytest.mark.parametrize(
    ("before", "stay", "come", "expected"),
    [
        ("ABCDE", "ACE", "", "AEC"), ("ABCD", "BD", "X", "XBD"), ("ABCDEF", "DEF", "", "FED"), ("ABC", "AB", "", "AB"),
        ("ABC", "C", "XYZ", "XYCZ"), ("ABC", "", "", ""), ("", "", "AB", "AB"), ("ABCDEFGH", "BCDEFG", "", "GBCDEF"),
    ],
)  # fmt: skip
def test_who_stands_where(before: str, stay: str, come: str, expected: str) -> None:
    """Worked examples made with vLLM's own code."""
    assert after(before, stay, come) == expected


def test_new_requests_come_before_those_that_return() -> None:
    assert after("ABCD", "BD", "X", "Y") == "XBYD"
    assert after("", "", "X", "Y") == "XY"


def test_who_is_resumed_leaves_first() -> None:
    told = plan({"A": 3, "B": 1, "X": 1}, {"X": 0}, {"A": 0, "B": 9}, resumed="A")
    change = next_rows("AB", told, {}, None)
    assert (change.order, change.resumed, change.returned) == (("X", "B", "A"), {"A"}, frozenset())


@pytest.mark.parametrize(
    ("before", "threshold", "expected"),
    [
        ("PDECL", 1, "CDELP"), ("LPD", 1, "DLP"), ("QDC", 1, "CDQ"), ("CD", 1, "CD"), ("EDPL", 1, "DELP"),
        ("LEDP", 6, "DELP"), ("PLEDC", None, "PLEDC"),
    ],
)  # fmt: skip
def test_decodes_lead(before: str, threshold: int | None, expected: str) -> None:
    kinds = {"P": (0, 6, 6), "Q": (0, 1, 1), "D": (9, 6, 1), "C": (12, 6, 1), "E": (3, 6, 1), "L": (8, 14, 6)}
    told = plan({r: kinds[r][2] for r in before}, {}, {r: kinds[r][0] for r in before})
    change = next_rows(before, told, {r: kinds[r][1] for r in before}, threshold)
    assert "".join(change.order) == expected


def test_the_tracker_follows_a_candidate_that_has_strayed() -> None:
    tracker = DenseRowTracker.start(RunnerConfig(layout="dense"))
    first = plan(dict.fromkeys("AB", 6), {"A": 0, "B": 0}, {})
    record = StepRecord(first, num_reqs=2, req_ids=("B", "A"), idx_mapping=np.array([0, 1]))
    tracker.advance(first, record)
    assert {finding[0] for finding in tracker.findings} == {"MR-DENSE-003"}
    again = plan(dict.fromkeys("AB", 1), {}, {"A": 6, "B": 6})
    tracker.advance(again, replace(record, plan=again))
    assert tracker.findings == []


# -- factories, plans and mutants -----------------------------------------------------------------------------


def test_a_factory_in_one_layout() -> None:
    dense = in_layout("cpu", "dense")
    assert dense.LAYOUTS == ("dense",)
    assert call_factory(dense, RunnerConfig(max_num_reqs=2, initial_free_rows=(1, 0))).describe().layout == "dense"
    assert dense.stages().backend == "cpu"
    told = InLayout(dense, "dense", stories=True)
    assert bare(told) is bare(dense)
    assert call_factory(in_layout("cpu", "slots"), RunnerConfig()).describe().layout == "slots"


def test_bad_plans_have_a_clause_for_both_layouts() -> None:
    shared = {"MR-ERR-022", "MR-ERR-023", "MR-ERR-035", "MR-ERR-047"}
    assert shared <= bad_plans().keys()
    assert all(load_clauses()[c].layout is None for c in shared)


def test_dense_rows_have_mutants_at_many_places() -> None:
    places = {(m.path, m.old) for m in DENSE_MUTANTS if m.path.startswith("dense/")}
    assert len(places) >= 25
    assert {m.layout for m in DENSE_MUTANTS} == {"dense"}
    assert len({path for path, _ in places}) == 5
