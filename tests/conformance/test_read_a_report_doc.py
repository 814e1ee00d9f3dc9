"""docs/read-a-report.md: its expectations load, its lines follow the schema, its test compiles, its outcomes exist."""

from __future__ import annotations

import json
import re
from datetime import date
from importlib.resources import files
from pathlib import Path

import jsonschema

from conformance.clauses import clause
from conformance.expectations import load_expectations
from conformance.outcomes import Outcome
from conformance.report_file import read_report

DOC = (Path(__file__).resolve().parents[2] / "docs" / "read-a-report.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOC, re.DOTALL | re.MULTILINE)


def test_the_expectations_load(tmp_path: Path) -> None:
    (text,) = blocks("toml")
    path = tmp_path / "expect.toml"
    path.write_text(text)
    (entry,) = load_expectations(path)
    assert (entry.clause, entry.until) == ("MR-SLOT-001", date(2027, 3, 1))


def test_the_lines_are_a_report(tmp_path: Path) -> None:
    (text,) = blocks("json")
    schema = json.loads((files("conformance") / "data" / "report.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    for line in text.splitlines():
        assert [e.message for e in validator.iter_errors(json.loads(line))] == []
    path = tmp_path / "report.jsonl"
    path.write_text(text)
    assert read_report(path).footer["verdict"] == "DIVERGE"


def test_outcomes_and_laws_are_the_real_ones() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", DOC, re.MULTILINE)) == {o.value for o in Outcome}
    for clause_id, law in re.findall(r"^(?:failed|not tested): (MR-\w+-\d+) (.*)$", DOC, re.MULTILINE):
        assert clause(clause_id).law == law


def test_the_program_compiles() -> None:
    (text,) = blocks("python")
    compile(text, "read-a-report.md", "exec")
