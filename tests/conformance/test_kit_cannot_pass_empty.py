"""The kit cannot pass by testing nothing: no capability, no clause, constants, expectations alone, half a report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.clauses import load_clauses, select
from conformance.evaluate import evaluate
from conformance.outcomes import Outcome, results_of
from conformance.report_file import read_report
from conformance.smoke import smoke
from cpu_reference.runner import CAPABILITIES, CpuModelRunner
from engine_core.cli import main
from runner_api import Capability, ConfigError, ModelRunnerOutput, RunnerInfo, UnknownNameError

HERE = __name__
ROOT = Path(__file__).resolve().parents[2]


class OffersNothing(CpuModelRunner):
    """Right in everything, and declares no capability."""

    def describe(self) -> RunnerInfo:
        return replace(super().describe(), capabilities=frozenset())


class Kept:
    """An output that is at hand."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output

    def get_output(self) -> ModelRunnerOutput:
        return self.output


class Constants(CpuModelRunner):
    """Plays back one step that was recorded from the reference, whatever it is asked."""

    def sample_tokens(self, grammar: Any = None, *, forced: Any = None) -> Any:
        output = super().sample_tokens(grammar, forced=forced).get_output()
        if not hasattr(self, "_kept"):
            self._kept = (CpuModelRunner.last_step(self), output)
        self._step = self._kept
        return Kept(self._step[1])

    def last_step(self) -> Any:
        return self._kept[0] if hasattr(self, "_step") else super().last_step()


class SameToken(CpuModelRunner):
    """Offers whole steps alone; every request gets the token 5, as in a recording."""

    def describe(self) -> RunnerInfo:
        return replace(super().describe(), capabilities=frozenset({Capability.GENERATE}))

    def sample_tokens(self, grammar: Any = None, *, forced: Any = None) -> Any:
        output = super().sample_tokens(grammar, forced=forced).get_output()
        return Kept(replace(output, sampled_token_ids=tuple((5,) if t else () for t in output.sampled_token_ids)))


def test_an_adapter_without_capabilities(capsys: pytest.CaptureFixture[str]) -> None:
    assert "neither whole steps" in (smoke(OffersNothing) or "")
    assert main(["check", f"{HERE}:OffersNothing"]) == 1
    out = capsys.readouterr().out
    assert "smoke: FAILED" in out
    assert out.rstrip().endswith("verdict: DIVERGE")
    found = evaluate(OffersNothing)
    assert not found.tested
    assert not found.passed
    results = results_of(found)
    assert set(results.ids(Outcome.SKIP)) == set(load_clauses())
    assert results.faults == (f"no clause has passed ({len(load_clauses())} skip): nothing was shown to be right",)


@pytest.mark.parametrize("pattern", ["SLOD", "MR-SLOT-999", "SLOT-00", "", "-", "MR-"])
def test_a_selection_that_matches_nothing(pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "cpu", "--clause", pattern]) == 2
    assert "unknown clause" in capsys.readouterr().err


def test_an_empty_selection() -> None:
    with pytest.raises(ConfigError, match="no clause is selected"):
        select(())
    with pytest.raises(ConfigError, match="no clause is selected"):
        evaluate("cpu", selected=())
    with pytest.raises(UnknownNameError):
        evaluate("cpu", selected=["MR-SLOT-999"])


def test_a_selection_that_does_not_apply(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "cpu", "--layout", "slots", "--clause", "DENSE"]) == 1
    out = capsys.readouterr().out
    assert "not a pass: no clause has passed (33 skip)" in out
    assert "verdict: DIVERGE" in out


def test_recorded_constants() -> None:
    found = evaluate(Constants, seeds=(0,), steps=20)
    assert not found.passed
    assert len(found.failed) > 3 or found.errors
    assert found.info.capabilities == CAPABILITIES


def test_a_constant_token() -> None:
    """It keeps every law that says what changes no token, and fails the ones that say what does."""
    found = evaluate(SameToken)
    assert "MR-META-015" in found.failed
    assert not found.passed


def expectations_for(clauses: list[str]) -> str:
    entry = '[[expect]]\nclause = "{}"\noutcome = "fail"\nreason = "known"\nissue = "#1"\n'
    return "\n".join(entry.format(c) for c in clauses)


def test_expectations_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever expects all to fail is told that nothing was shown; where a clause holds, that its entry is wrong."""
    path = tmp_path / "all.toml"
    path.write_text(expectations_for(["MR-META-015", "MR-ASYNC-003"]))
    selection = ["--clause", "META-015", "--clause", "ASYNC-003"]
    assert main(["check", f"{HERE}:SameToken", *selection, "--expectations", str(path), "--no-find"]) == 1
    assert "MR-ASYNC-003 passes, though it is expected to fail" in capsys.readouterr().out
    path.write_text(expectations_for(["MR-META-015"]))
    alone = ["--clause", "META-015", "--expectations", str(path), "--no-find"]
    assert main(["check", f"{HERE}:SameToken", *alone]) == 1
    assert "no clause has passed (1 xfail): nothing was shown to be right" in capsys.readouterr().out
    path.write_text("")
    assert main(["check", "cpu", *selection, "--expectations", str(path)]) == 2
    assert "expects nothing" in capsys.readouterr().err


def test_half_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.jsonl"
    assert main(["check", "cpu", "--clause", "STAGE", "--report", str(path)]) == 0
    lines = path.read_text().splitlines()
    assert json.loads(lines[-1])["verdict"] == "AGREE"
    path.write_text("\n".join(lines[:-1]))
    with pytest.raises(ConfigError, match="footer"):
        read_report(path)
    assert main(["report", str(path)]) == 2
    assert "no footer" in capsys.readouterr().err


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(folder)])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments], cwd=folder, capture_output=True,
        text=True, timeout=120, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_pytest_with_nothing_selected(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--pyargs", "conformance.suite", "--runner", "cpu", "-k", "no_such_test")
    assert done.returncode == 5, done.stdout


def test_pytest_where_everything_is_skipped(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--pyargs", "conformance.suite", "--runner", "cpu", "-k", "DENSE")
    assert done.returncode == 1, done.stdout
    assert "no test has passed (33 skipped): nothing was shown to be right, the run is a failure" in done.stdout


def test_pytest_without_a_runner(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--pyargs", "conformance.suite", "-k", "SLOT-001")
    assert done.returncode == 1, done.stdout
    assert "no runner to judge: give --runner NAME" in done.stdout
