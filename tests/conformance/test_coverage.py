"""Which tests and mutants speak of which clause: found out by running them, and kept until a source changes."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from conformance import coverage as module
from conformance.clauses import load_clauses
from conformance.coverage import Coverage, cache_folder, coverage, digest, measure
from conformance.mutants import MUTANTS
from engine_core.cli import main


def test_what_really_ran() -> None:
    mutants = [m for m in MUTANTS["cpu"] if "MR-SLOT-001" in m.clauses][:1]
    found = measure(mutants, jobs=1)
    assert list(found.tests) == list(found.mutants) == list(load_clauses())
    assert found.tests["MR-SLOT-001"] == ["law slots_follow_the_table"]
    assert found.tests["MR-DENSE-001"] == ["law rows_follow_their_rules"]
    assert found.tests["MR-STAGE-008"] == ["stage gumbel_sample"]
    assert "probe impossible_plans_are_refused" in found.tests["MR-ERR-020"]
    assert "probe retold_stories" in found.tests["MR-META-001"]
    assert found.tests["MR-META-010"] == [], "nobody offers graphs yet"
    assert set(found.mutants["MR-SLOT-001"]) == {m.id for m in mutants}
    assert found.mutants["MR-STATE-001"] == []
    lacking = [c.id for c in load_clauses().values() if c.level == "MUST" and not found.tests[c.id]]
    assert lacking == ["MR-META-010"]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """How often everything was run, with a cache of its own."""
    runs: list[int] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run() -> Coverage:
        runs.append(1)
        return Coverage({c: ["law x"] for c in load_clauses()}, {c: ["m"] for c in load_clauses()})

    monkeypatch.setattr(module, "measure", run)
    return runs


def test_it_is_run_once_for_the_same_sources(counted: list[int]) -> None:
    told: list[str] = []
    first = coverage(tell=told.append)
    assert "running every test and every mutant of cpu" in told[0]
    assert coverage(tell=told.append) == first
    assert len(counted) == 1
    assert len(told) == 2
    coverage(use_cache=False, tell=told.append)
    assert len(counted) == 2


def test_a_broken_cache_is_no_answer(counted: list[int]) -> None:
    coverage(tell=lambda text: None)
    (kept,) = cache_folder().iterdir()
    kept.write_text("{")
    coverage(tell=lambda text: None)
    assert len(counted) == 2


def test_a_folder_that_cannot_be_written_is_told(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    told: list[str] = []
    coverage(tell=told.append)
    assert "cannot be kept" in told[-1]


def test_another_source_is_another_answer(counted: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = digest()
    package = tmp_path / "some_judge"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "PACKAGES", (*module.PACKAGES, "some_judge"))
    one = digest()
    (package / "law.toml").write_text("x = 1")
    assert len({before, one, digest()}) == 3


def test_every_package_that_a_run_imports_is_in_the_digest() -> None:
    """A change of any of them may change the answer."""
    program = textwrap.dedent("""
        import json, sys
        from conformance import coverage

        coverage.evaluate(coverage.RUNNER, seeds=(0,), steps=3)
        coverage.run_matrix(coverage.RUNNER, mutants=coverage.MUTANTS[coverage.RUNNER][:1], jobs=1)
        print(json.dumps(list(sys.modules)))
        """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ours = {path.parent.name for path in Path(__file__).parents[2].glob("*/__init__.py")}
    assert ours & set(json.loads(done.stdout)) == set(module.PACKAGES)


def test_clauses_as_json(counted: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clauses", "--json"]) == 0
    printed = capsys.readouterr()
    entries = json.loads(printed.out)["clauses"]
    assert [e["id"] for e in entries] == list(load_clauses())
    assert entries[0] == {
        "id": "MR-STATE-001", "level": "MUST", "area": "STATE", "law": load_clauses()["MR-STATE-001"].law,
        "requires": ["generate", "step_record"], "since": "2026.11", "until": None,
        "source": "vLLM 0.33, row life cycle", "layout": "slots", "tests": ["law x"], "mutants": ["m"],
    }  # fmt: skip
    assert "running every test" in printed.err
    assert main(["clauses", "slot", "--json"]) == 0
    printed = capsys.readouterr()
    assert {e["area"] for e in json.loads(printed.out)["clauses"]} == {"SLOT"}
    assert printed.err == ""
    assert main(["clauses", "--json", "--no-cache"]) == 0
    assert len(counted) == 2


def test_one_form_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clauses", "--json", "--markdown"]) == 2
    assert "one form at a time" in capsys.readouterr().err
