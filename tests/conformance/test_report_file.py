"""Reports: every line follows the published schema, broken files are refused, and several make one table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from conformance.matrix import asked, badge, markdown_table, matrix
from conformance.report_file import ReportWriter, footer_of, header_of, read_report
from cpu_reference.runner import CpuModelRunner
from engine_core.cli import main
from runner_api import SPEC_VERSION, ConfigError, RunnerConfig, RunnerInfo, StepRecord

HERE = __name__
SCHEMA = json.loads((files("conformance") / "data" / "report.schema.json").read_text(encoding="utf-8"))
EXPECTED = """
[[expect]]
clause = "MR-SLOT-001"
outcome = "fail"
reason = "slots are counted from one"
issue = "https://example.org/1"
"""


class WrongSlots(CpuModelRunner):
    """Its record tells slots that are off by one."""

    def last_step(self) -> StepRecord:
        record = super().last_step()
        return replace(record, slot_mappings=record.slot_mappings + 1) if record.num_reqs else record


class Raises(CpuModelRunner):
    """Cannot fingerprint its state."""

    def state_digest(self) -> Any:
        raise OSError("no digest")


class Dead(CpuModelRunner):
    """Does not come through the smoke test."""

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError("dead")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports of four runners, of some clauses each."""
    found = tmp_path_factory.mktemp("reports")
    (found / "expect.toml").write_text(EXPECTED)
    wrong, known = f"{HERE}:WrongSlots", ["--expectations", str(found / "expect.toml")]
    for name, runner, clauses, more in (
        ("cpu", "cpu", "STAGE STATE-005 DENSE-001", []), ("raises", f"{HERE}:Raises", "STATE-005 ASYNC", []),
        ("wrong", wrong, "SLOT PAD-004", []), ("known", wrong, "SLOT-001 SLOT-005", known),
        ("dead", f"{HERE}:Dead", "SLOT", []),
    ):  # fmt: skip
        selection = [word for c in clauses.split() for word in ("--clause", c)]
        main(["check", runner, *selection, *more, "--no-find", "--json", "--report", str(found / f"{name}.jsonl")])
    main(["check", "cpu", "--steps", "10", "--json", "--report", str(found / "all.jsonl")])
    return found


NAMES = ("cpu", "wrong", "raises", "known", "dead", "all")


@pytest.mark.parametrize("name", NAMES)
def test_every_line_follows_the_schema(folder: Path, name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    for line in lines:
        assert [e.message for e in validator.iter_errors(line)] == []
    assert (lines[0]["kind"], lines[-1]["kind"]) == ("header", "footer")


def test_the_schema_refuses_what_contradicts_itself(folder: Path) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    lines = [json.loads(line) for line in (folder / "cpu.jsonl").read_text().splitlines()]
    clause, footer = next(line for line in lines if line["kind"] == "clause"), lines[-1]
    for wrong in (
        clause | {"evaluations": 0}, clause | {"outcome": "fail"}, clause | {"outcome": "failed"}, clause | {"more": 1},
        footer | {"verdict": "DIVERGE"}, footer | {"faults": ["x"]}, {"kind": "clause"}, {"kind": "feeling"},
    ):  # fmt: skip
        assert not validator.is_valid(wrong), wrong


def test_the_header_says_who_was_judged(folder: Path) -> None:
    h = read_report(folder / "wrong.jsonl").header
    assert h["target"] == f"{HERE}:WrongSlots"
    assert h["file"] == str(Path(__file__))
    assert (h["layout"], h["device"], h["dtype"], h["noise"]) == ("slots", "cpu", "float32", "murmur3")
    assert (h["spec_version"], h["oracle"], h["seed"]) == (SPEC_VERSION, "cpu", 0)
    assert "step_record" in h["capabilities"]
    assert "MR-PAD-004" in h["selection"]
    assert read_report(folder / "all.jsonl").header["selection"] is None


def test_outcomes_and_verdicts(folder: Path) -> None:
    def of(name: str, clause: str) -> str:
        return read_report(folder / f"{name}.jsonl").clauses[clause]["outcome"]

    assert [of(n, "MR-SLOT-001") for n in ("all", "wrong", "known")] == ["pass", "fail", "xfail"]
    assert of("raises", "MR-STATE-005") == "error"
    assert of("cpu", "MR-DENSE-001") == "skip"
    verdicts = [read_report(folder / f"{n}.jsonl").footer["verdict"] for n in NAMES]
    assert verdicts == ["AGREE", "DIVERGE", "DIVERGE", "AGREE", "DIVERGE", "AGREE"]
    dead = read_report(folder / "dead.jsonl")
    assert dead.clauses == {}
    assert "OSError: dead" in dead.footer["smoke"]


def test_a_matrix_of_runners(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = [read_report(folder / f"{n}.jsonl") for n in ("cpu", "wrong")]
    rows = matrix(reports)
    assert rows[0] == ["area", "cpu #1", "cpu #2"]
    assert ["STAGE", "9/9", "not asked"] in rows
    assert ["DENSE", "- (1 skipped)", "not asked"] in rows
    assert rows[-1] == ["verdict", "AGREE", "DIVERGE"]
    assert main(["report", *(str(folder / f"{n}.jsonl") for n in ("cpu", "wrong")), "--format", "markdown"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("| area | cpu #1 | cpu #2 |\n| --- | --- | --- |\n")
    legends = dict(line.split(": ", 1) for line in out.splitlines() if line.startswith("- cpu #"))
    assert legends["- cpu #1"].startswith("cpu, cpu_reference.runner.CpuModelRunner ")
    assert legends["- cpu #2"].startswith(f"{HERE}:Wrong"), "the target tells runners of one package apart"
    assert "10 clauses selected" in out
    assert markdown_table([["a|b"]]).startswith("| a\\|b |")


def test_expected_failures_are_told(folder: Path) -> None:
    report = read_report(folder / "known.jsonl")
    assert ["SLOT", "1/2 (1 expected to fail)"] in matrix([report])
    assert asked(report, "MUST") == (1, 2)


def test_a_badge_counts_and_never_rounds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = read_report(folder / "all.jsonl")
    passed, total = asked(report, "MUST", skipped_too=True)
    assert passed == asked(report, "MUST")[0]
    assert total > passed, "a capability that nobody offers yet counts as not passed"
    assert main(["report", str(folder / "all.jsonl"), "--format", "badge"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == badge(report)
    assert printed["schemaVersion"] == 1
    assert printed["message"] == f"MUST {passed}/{total} · SHOULD 1/1 · spec {SPEC_VERSION}"


def test_a_badge_of_less_than_everything_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder / "cpu.jsonl"), "--format", "badge"]) == 2
    assert "selected clauses" in capsys.readouterr().err
    both = [str(folder / "all.jsonl")] * 2
    assert main(["report", *both, "--format", "badge"]) == 2


def test_specs_are_not_mixed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(
        (folder / "cpu.jsonl").read_text().replace(f'"spec_version": "{SPEC_VERSION}"', '"spec_version": "2027.01"')
    )
    assert main(["report", str(folder / "cpu.jsonl"), str(other)]) == 2
    assert "different specs" in capsys.readouterr().err


def drop(kind: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [line for line in lines if f'"kind": "{kind}"' not in line]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop("footer"), "no footer"),
        (drop("header"), "does not begin with a header"),
        (lambda lines: [], "does not begin with a header"),
        (lambda lines: [*lines[:2], *lines[3:]], "the footer counts other clauses"),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], "the footer counts other clauses"),
        (lambda lines: lines[:3] + ["{"], "no report"),
        (lambda lines: [lines[0], *lines], "several headers"),
        (lambda lines: [lines[0], '{"kind": "feeling"}', *lines[1:]], "do not belong"),
        (lambda lines: [lines[0].replace('"layout"', '"lay"'), *lines[1:]], r"line 1 \(header\): layout is missing"),
        (lambda lines: [lines[0].replace('"seed": 0', '"seed": "0"'), *lines[1:]], "seed is missing or odd .got '0'"),
        (lambda lines: [lines[0], lines[1].replace('"outcome"', '"out"'), *lines[2:]], "clause.: outcome is missing"),
        (lambda lines: [lines[0], lines[1].replace('"id": "', '"id": 5, "x": "'), *lines[2:]], "id is missing or odd"),
        (lambda lines: [*lines[:-1], '{"kind": "footer"}'], "footer.: counts is missing"),
        (lambda lines: [lines[0], "[" * 10**5], "no report"),
        (lambda lines: [lines[0].replace('"schema": 1', '"schema": 2'), *lines[1:]], "does not begin with a header"),
    ],
)
def test_broken_reports_are_refused(folder: Path, tmp_path: Path, change: Callable[[list[str]], list[str]],
                                    said: str) -> None:  # fmt: skip
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(change((folder / "cpu.jsonl").read_text().splitlines())))
    with pytest.raises(ConfigError, match=said):
        read_report(path)


SEPARATORS = "a\u2028b\x85c\nd|e \udcff"


class Separated(CpuModelRunner):
    """Says of itself what ends a line for some readers."""

    def describe(self) -> RunnerInfo:
        return replace(super().describe(), name=SEPARATORS, notes=(SEPARATORS,))


def test_no_text_of_a_runner_breaks_a_report(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    writer = ReportWriter(path, header_of(Separated(RunnerConfig()), "x", "cpu", 0))
    writer.finish(footer_of(None, ["smoke: x"], "DIVERGE", "x"))
    assert path.read_bytes().isascii()
    report = read_report(path)
    assert report.header["runner"] == SEPARATORS
    table = markdown_table(matrix([report])).split("\n")
    assert table[0] == "| area | a b c d\\|e \udcff |"
    assert len(table) == 5
    run = [sys.executable, "-m", "engine_core.cli", "report", str(path)]
    for encoding in ("ascii", "utf-8"):  # a terminal that cannot show it all
        out = subprocess.run(
            run, capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}, check=True
        ).stdout
        assert b"a b c d|e \\udcff" in out


def test_a_report_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "cpu", "--clause", "STAGE", "--report", str(tmp_path / "no" / "r.jsonl")]) == 2
    assert "cannot be written" in capsys.readouterr().err
