"""What becomes of each clause, and what an expectations file makes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from conformance.clauses import load_clauses
from conformance.context import Mismatch
from conformance.evaluation import Evaluation, EvaluationError
from conformance.expectations import check_applying, load_expectations
from conformance.outcomes import Outcome, Results, results_of
from cpu_reference.runner import CAPABILITIES, CpuModelRunner
from runner_api import ConfigError, RunnerConfig, UnknownNameError

INFO = CpuModelRunner(RunnerConfig(max_num_reqs=2)).describe()
TODAY = date(2026, 11, 29)
A, B, C, LAX = "MR-SLOT-001", "MR-SLOT-002", "MR-PAD-004", "MR-ERR-101"


def ran(*failed: str, errors: tuple[EvaluationError, ...] = (), untested: tuple[str, ...] = ()) -> Evaluation:
    """An evaluation of a runner with the reference's capabilities, in which all but these clauses hold."""
    found = Evaluation(INFO)
    found.skipped = {c.id: m for c in load_clauses().values() if (m := c.missing(CAPABILITIES))}
    found.tested = Counter({c: 3 for c in load_clauses() if c not in found.skipped and c not in untested})
    found.by_clause = {c: [Mismatch(c, "positions", "a", (1,), 7, 8)] for c in failed}
    found.errors = list(errors)
    return found


def expecting(tmp_path: Path, evaluation: Evaluation, text: str) -> Results:
    path = tmp_path / "expect.toml"
    path.write_text(text)
    return results_of(evaluation, load_expectations(path), TODAY)


def entry(clause: str = A, outcome: str = "fail", more: str = "") -> str:
    return f'[[expect]]\nclause = "{clause}"\noutcome = "{outcome}"\nreason = "known"\nissue = "#12"\n{more}\n'


def test_outcomes_without_expectations() -> None:
    results = results_of(ran(A, untested=(B,)))
    assert results.clauses[A].outcome is Outcome.FAIL
    assert results.clauses[A].first == f"{A} positions[1], request 'a': got 7, expected 8"
    assert results.clauses[B].outcome is Outcome.UNTESTED
    assert results.clauses[C].outcome is Outcome.PASS
    assert results.clauses["MR-DENSE-001"].reason == "not offered: dense_layout"
    assert results.faults == ("1 MUST clause failed", "1 MUST clause nothing tested")
    assert results_of(ran()).passed


def test_what_a_failure_hides_is_no_fault_of_its_own(tmp_path: Path) -> None:
    """Slots are read only where the index laws hold: a run with a known fault of slots can still pass."""
    seen_later, first = "MR-KV-005", "MR-BATCH-001"
    results = results_of(ran(A, untested=(seen_later,)))
    assert results.clauses[seen_later].outcome is Outcome.UNTESTED
    assert results.clauses[seen_later].reason == f"asked only where {A} holds"
    assert results.faults == ("1 MUST clause failed",)
    assert expecting(tmp_path, ran(A, untested=(seen_later,)), entry(A)).passed
    assert results_of(ran(first, untested=(A,))).clauses[A].reason == f"asked only where {first} holds"
    assert results_of(ran(A, untested=(B,))).clauses[B].reason is None
    assert results_of(ran("MR-SAMPLE-007", untested=(seen_later,))).clauses[seen_later].reason is None
    assert results_of(ran(seen_later, untested=(A,))).clauses[A].reason is None
    assert not results_of(ran(untested=(seen_later,))).passed


def test_a_should_that_fails_is_told_and_no_fault() -> None:
    results = results_of(ran(LAX))
    assert results.clauses[LAX].outcome is Outcome.FAIL
    assert results.areas()["ERR"]["should"] == [0, 1]
    assert results.passed


def test_exceptions_are_told_apart_from_wrong_results() -> None:
    """A probe's exception belongs to its clauses; a world's to those that nothing else has tested."""
    probe = EvaluationError("some_probe", "ValueError('x')", "", frozenset({C}))
    results = results_of(ran(errors=(probe,)))
    assert results.clauses[C].outcome is Outcome.ERROR
    assert results.clauses[C].first == "some_probe: ValueError('x')"
    assert results.clauses[A].outcome is Outcome.PASS
    assert results.faults == ("1 MUST clause ended in an exception", "1 exception where none was due")
    world = EvaluationError("world basic, step 3", "IndexError()", "")
    results = results_of(ran(errors=(world,), untested=(A,)))
    assert results.clauses[A].outcome is Outcome.ERROR
    assert results.clauses[B].outcome is Outcome.PASS
    assert not results.passed


def test_what_is_expected_is_no_fault(tmp_path: Path) -> None:
    results = expecting(tmp_path, ran(A), entry(A))
    assert results.passed
    assert results.clauses[A].outcome is Outcome.XFAIL
    assert (results.clauses[A].reason, results.clauses[A].issue) == ("known", "#12")
    slot = results.areas()["SLOT"]["must"]
    assert slot == [8, 9], "an expected failure has not passed"
    probe = EvaluationError("some_probe", "ValueError('x')", "", frozenset({C}))
    results = expecting(tmp_path, ran(errors=(probe,)), entry(C, "error"))
    assert results.passed
    assert results.errors == ()
    results = expecting(tmp_path, ran(), entry("MR-DENSE-001", "skip"))
    assert results.passed
    assert results.clauses["MR-DENSE-001"].outcome is Outcome.SKIP
    assert results.clauses["MR-DENSE-001"].reason == "not offered: dense_layout"


@pytest.mark.parametrize(
    ("failed", "text", "outcome", "fault"),
    [
        ((), entry(A), Outcome.XPASS, "MR-SLOT-001 passes, though it is expected to fail: take the entry out (#12)"),
        ((), entry(A, "skip"), Outcome.XPASS, "MR-SLOT-001 passes, though it is expected to skip"),
        ((A,), entry(A, "error"), Outcome.FAIL, "MR-SLOT-001 is expected to error and came to fail"),
        ((A,), entry(A, "skip"), Outcome.FAIL, "MR-SLOT-001 is expected to skip and came to fail"),
        ((A,), entry(A, more="until = 2026-11-28"), Outcome.FAIL, "expired on 2026-11-28"),
    ],
)
def test_what_does_not_come_true_is_a_fault(tmp_path: Path, failed: tuple[str, ...], text: str, outcome: Outcome,
                                            fault: str) -> None:  # fmt: skip
    results = expecting(tmp_path, ran(*failed), text)
    assert results.clauses[A].outcome is outcome
    assert len(results.expectation_faults) == 1
    assert fault in results.expectation_faults[0]
    assert not results.passed


def test_a_clause_that_was_not_tested_does_not_come_true(tmp_path: Path) -> None:
    results = expecting(tmp_path, ran(untested=(A,)), entry(A))
    assert "came to untested" in results.expectation_faults[0]
    skipped = expecting(tmp_path, ran(), entry("MR-DENSE-001"))
    assert "MR-DENSE-001 is expected to fail and came to skip (#12)" in skipped.faults


def test_it_holds_until_the_end_of_the_day(tmp_path: Path) -> None:
    assert expecting(tmp_path, ran(A), entry(A, more="until = 2026-11-29")).passed
    assert expecting(tmp_path, ran(A), entry(A, more='until = "2026-11-29"')).passed


def test_when_names_who_it_is_about(tmp_path: Path) -> None:
    here = 'when = { runner = "cpu", device = "c*", dtype = "float32", layout = "slots", version = "?.*" }'
    assert expecting(tmp_path, ran(A), entry(A, more=here)).passed
    elsewhere = entry(A, more='when = { device = "cuda*" }')
    results = expecting(tmp_path, ran(A), elsewhere)
    assert results.clauses[A].outcome is Outcome.FAIL
    assert results.notes == ("expectation for MR-SLOT-001 does not apply here: device cuda*",)
    both = expecting(tmp_path, ran(A), elsewhere + entry(A, more=here))
    assert both.passed
    on_gpu = replace(ran(A), info=replace(INFO, device="cuda:0"))
    assert expecting(tmp_path, on_gpu, elsewhere).passed


def test_other_clauses_than_the_selected_ones_are_left_alone(tmp_path: Path) -> None:
    selected = replace(ran(A), selected=frozenset({A}))
    assert set(results_of(selected).clauses) == {A}
    assert expecting(tmp_path, replace(ran(), selected=frozenset({B})), entry(A)).passed


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        (entry("MR-SLOT-999"), UnknownNameError, "unknown clause 'MR-SLOT-999'"),
        (entry(outcome="failed"), UnknownNameError, "Did you mean 'fail'"),
        (entry(outcome="pass"), UnknownNameError, "one of error, fail, skip"),
        (entry(more='wen = "x"'), UnknownNameError, "Did you mean 'when'"),
        (entry(more='when = { devise = "cuda" }'), UnknownNameError, "Did you mean 'device'"),
        (entry(more="when = { device = 1 }"), ConfigError, "patterns by name"),
        (entry(more='until = "soon"'), ConfigError, "no date"),
        (entry(more="until = 2026-11-29T10:00:00"), ConfigError, "no date"),
        (entry().replace('issue = "#12"\n', ""), ConfigError, "issue is missing"),
        (entry().replace('"known"', '" "'), ConfigError, "reason is missing"),
        (entry() + entry(), ConfigError, "two entries for one clause"),
        ("", ConfigError, "expects nothing"),
        ("expect = 3", ConfigError, "expects nothing"),
        ("[[expected]]", UnknownNameError, "unknown key 'expected'"),
        ("[[expect", ConfigError, "cannot be read"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str, error: type[Exception], said: str) -> None:
    path = tmp_path / "expect.toml"
    path.write_text(text)
    with pytest.raises(error, match=said):
        load_expectations(path)


def test_two_entries_for_one_clause_may_not_both_apply(tmp_path: Path) -> None:
    path = tmp_path / "expect.toml"
    path.write_text(entry(more='when = { device = "c*" }') + entry(more='when = { dtype = "float32" }'))
    with pytest.raises(ConfigError, match=f"{A}: two entries for one clause apply to this run .got 'when device c"):
        check_applying(load_expectations(path), INFO)
    check_applying(load_expectations(path), replace(INFO, device="xpu"))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_expectations("no/such/file.toml")
