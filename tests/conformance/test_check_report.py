"""What `modelrunner check` says of clauses that were not asked, of repeated errors, and of what the search finds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance import check
from conformance.check_text import check_text
from conformance.finding import find
from conformance.mutants import CPU_MUTANTS
from conformance.mutation import mutated
from conformance.report_file import read_report
from cpu_reference.runner import CpuModelRunner
from engine_core.cli import main

HERE = __name__


class OtherSeeds(CpuModelRunner):
    """Adds requests with a seed that is off by one."""

    def execute_model(self, plan: Any, **kwargs: Any) -> Any:
        news = [replace(new, seed=new.seed - 1 if new.seed > 0 else new.seed + 1) for new in plan.scheduled_new_reqs]
        return super().execute_model(replace(plan, scheduled_new_reqs=news), **kwargs)


def report_of(clauses: dict[str, Any], errors: list[dict[str, str]]) -> dict[str, Any]:
    rest = {"outcome": "pass", "reason": None, "first": None, "issue": None}
    return {
        "runner": "runner=r", "layout": "slots", "spec_version": "0", "seed": 0, "rounds": 1, "against": "cpu",
        "selection": None, "smoke": None, "areas": {"KV": {"must": [1, 2], "should": [0, 0], "skipped": 0}},
        "clauses": {c: rest | entry for c, entry in clauses.items()}, "errors": errors, "counts": {}, "lockstep": [],
        "lockstep_left_out": None, "corpus": [], "findings": [], "notes": [], "faults": [], "verdict": "DIVERGE",
    }  # fmt: skip


def test_what_was_not_asked_for_one_reason_is_one_line() -> None:
    behind = {"outcome": "untested", "reason": "asked only where MR-SLOT-001 holds"}
    clauses = {"MR-KV-005": behind, "MR-KV-006": behind, "MR-KV-007": {"outcome": "untested"}}
    lines = [line for line in check_text(report_of(clauses, [])) if "not tested" in line]
    assert lines == [
        "not tested: MR-KV-007 Blocks shared by a prefix hit are read as their first owner wrote them",
        "not tested (asked only where MR-SLOT-001 holds): KV-005 KV-006",
    ]


def test_the_same_error_is_told_once() -> None:
    errors = [{"where": "world mixed", "error": e} for e in ("A", "B", "A")]
    lines = [line for line in check_text(report_of({}, errors)) if line.startswith("error")]
    assert lines == ["error: world mixed: A (x2)", "error: world mixed: B"]


def test_a_clause_that_only_the_search_sees_fail_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Other worlds may show what the clauses' own did not: table, outcomes, faults and file must not deny it."""
    mutant = next(m for m in CPU_MUTANTS if m.id == "slot-tail-stale")
    with mutated("cpu", mutant.path, mutant.old, mutant.new) as copy:
        finding = find(copy.factory)
    assert finding is not None
    assert finding.clause_id == "MR-PAD-004"
    monkeypatch.setattr(check, "find", lambda *args, clauses, **kwargs: finding if clauses is None else None)
    path = tmp_path / "report.jsonl"
    command = ["check", f"{HERE}:OtherSeeds", "--steps", "5", "--json", "--report", str(path)]
    assert main(command) == 1
    report = json.loads(capsys.readouterr().out)
    assert {c for c, entry in report["clauses"].items() if entry["outcome"] == "fail"} >= {"MR-PAD-004"}
    assert report["clauses"]["MR-PAD-004"]["first"] == str(finding.mismatch)
    must = report["areas"]["PAD"]["must"]
    assert must[0] == must[1] - 1
    failed = report["outcomes"]["fail"]
    assert f"{failed} MUST clauses failed" in report["faults"]
    assert "lockstep on witness diverges" in report["faults"]
    assert report["notes"].count("MR-PAD-004: found by the search for small plans alone, in a world of its own") == 1
    assert report["findings"][0]["clause"] == "MR-PAD-004"
    written = read_report(path)
    assert written.clauses["MR-PAD-004"]["outcome"] == "fail"
    assert written.footer["counts"]["fail"] == failed
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert list(dict.fromkeys(kinds)) == ["header", "clause", "lockstep", "finding", "footer"]
