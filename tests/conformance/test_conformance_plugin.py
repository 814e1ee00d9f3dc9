"""The pytest plugin: header, items by clause, @clause and the fixture in a user's own tests, report, silence without
--runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.pytest_plugin import LAYOUTS
from conformance.report_file import read_report
from runner_api import SPEC_VERSION
from runner_api.config import LAYOUTS as ALL_LAYOUTS

ROOT = Path(__file__).resolve().parents[2]
SUITE = ("--pyargs", "conformance.suite")

RUNNERS = """
from dataclasses import replace
from cpu_reference.runner import CpuModelRunner
from runner_api import RunnerInfo, StageAdapter, load_stages

class WrongSlots(CpuModelRunner):
    def last_step(self):
        record = super().last_step()
        return replace(record, slot_mappings=record.slot_mappings + 1) if record.num_reqs else record

class Dead(CpuModelRunner):
    def execute_model(self, *args, **kwargs):
        raise OSError("dead")

def some():
    reference = load_stages("cpu")
    return replace(reference, stages={"gumbel_sample": reference.stages["gumbel_sample"]})

INFO = RunnerInfo("draws", "mine:draws", "1.0", "cpu", "float32", "slots", "murmur3", frozenset())

def wrong():
    stage = some().stages["gumbel_sample"]
    def fn(sampled, **arrays):
        stage.fn(sampled=sampled, **arrays)
        sampled += 1
    slots = load_stages("cpu").stages["compute_slot_mappings"]
    return replace(some(), stages={"gumbel_sample": replace(stage, fn=fn), "compute_slot_mappings": slots})

draws, wrong_draws = StageAdapter(INFO, some), StageAdapter(INFO, wrong)
"""
MINE = """
from conformance.pytest_plugin import clause
from runner_api import RunnerConfig

@clause("MR-SLOT-001")
def test_of_slots(runner_under_test):
    assert runner_under_test(RunnerConfig(max_num_reqs=2)).describe().name

@clause("MR-DENSE-001")
def test_of_dense_rows(runner_under_test):
    raise AssertionError("does not apply")

def test_of_mine():
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(RUNNERS)
    return tmp_path


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(folder)])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rsfx", *arguments], cwd=folder,
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""},
    )  # fmt: skip


def test_a_wrong_runner_fails_its_clause_and_writes_a_report(folder: Path) -> None:
    report = folder / "r.jsonl"
    chosen = ("-k", "SLOT-001 or SLOT-005 or DENSE-001 or exception")
    done = run_pytest(folder, *SUITE, "--runner", "mine:WrongSlots", *chosen, "--runner-report", str(report),
                      "--runner-rounds", "2")  # fmt: skip
    out = done.stdout
    assert done.returncode == 1, out
    assert "modelrunner: runner=cpu class=mine.WrongSlots version=" in out
    assert f"modelrunner: seed=0 rounds=2 against=cpu spec={SPEC_VERSION}" in out
    assert "layout=slots noise=murmur3" in out
    assert "fail: MR-SLOT-001 The slot of a token is its block times the block size plus its offset" in out
    assert "MR-SLOT-001 slot_mappings[" in out
    assert "not offered: dense_layout" in out
    assert "1 failed, 2 passed, 1 skipped" in out
    read = read_report(report)
    assert [c["outcome"] for c in read.clauses.values()] == ["fail", "pass", "skip"]
    assert read.header["target"] == "mine:WrongSlots"
    assert read.header["rounds"] == 2
    assert read.footer["verdict"] == "DIVERGE"


def test_expected_failures_are_xfail(folder: Path) -> None:
    (folder / "expect.toml").write_text(
        '[[expect]]\nclause = "MR-STAGE-008"\noutcome = "fail"\nreason = "from one"\nissue = "#7"\n'
    )
    expect = ("--runner-expectations", "expect.toml")
    chosen = ("-k", "STAGE-008 or STAGE-005 or STAGE-007 or expectations or lockstep")
    done = run_pytest(folder, *SUITE, "--runner", "mine:wrong_draws", *chosen, *expect)
    assert done.returncode == 0, done.stdout
    assert "from one (#7)" in done.stdout
    assert "2 passed, 2 skipped, " in done.stdout
    assert "1 xfailed" in done.stdout
    done = run_pytest(folder, *SUITE, "--runner", "mine:draws", "-k", "STAGE-008 or expectations", *expect)
    assert done.returncode == 1, done.stdout
    assert "passes, though it is expected to fail" in done.stdout


def test_stages_alone(folder: Path) -> None:
    done = run_pytest(folder, *SUITE, "--runner", "mine:draws", "--runner-report", "r.jsonl")
    assert done.returncode == 0, done.stdout
    assert "stage compute_slot_mappings" in done.stdout
    assert "not offered: generate, step_record" in done.stdout
    read = read_report(folder / "r.jsonl")
    assert read.header["selection"] is None
    assert read.footer["verdict"] == "AGREE"
    assert read.clauses["MR-STAGE-008"]["outcome"] == "pass"


def test_smoke_stops_the_session_with_advice(folder: Path) -> None:
    done = run_pytest(folder, *SUITE, "--runner", "mine:Dead", "--runner-report", "r.jsonl")
    assert done.returncode == 1, done.stdout
    assert "smoke: FAILED in the step: prefill three tokens of one request: OSError: dead" in done.stdout
    assert "The adapter itself is at fault" in done.stdout
    assert "failed" not in done.stdout.splitlines()[-1]
    assert "OSError: dead" in read_report(folder / "r.jsonl").footer["smoke"]


def test_a_users_own_tests(folder: Path) -> None:
    (folder / "test_mine.py").write_text(MINE)
    done = run_pytest(folder, "test_mine.py", "--runner", "cpu", "--runner-layout", "slots")
    assert done.returncode == 0, done.stdout
    assert "2 passed, 1 skipped" in done.stdout
    assert "not offered: dense_layout" in done.stdout


def test_without_a_runner_nothing_is_said(folder: Path) -> None:
    (folder / "test_mine.py").write_text(MINE)
    done = run_pytest(folder, "test_mine.py", "--strict-markers", "-k", "mine and not slots and not dense")
    assert done.returncode == 0, done.stdout
    assert "modelrunner:" not in done.stdout
    done = run_pytest(folder, "test_mine.py", "-k", "slots")
    assert done.returncode == 1, done.stdout
    assert "no runner to judge" in done.stdout


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("from conformance.pytest_plugin import clause\n@clause('MR-SLOT-999')", "unknown clause 'MR-SLOT-999'"),
        ("import pytest\n@pytest.mark.clause('MR-SLOT-99')", "test_it: MR-ERR-004 unknown clause 'MR-SLOT-99'"),
    ],
)
def test_an_unknown_clause_is_an_error_of_collection(folder: Path, mark: str, said: str) -> None:
    (folder / "test_bad.py").write_text(f"{mark}\ndef test_it(): pass\n")
    done = run_pytest(folder, "test_bad.py")
    assert done.returncode in (2, 4), done.stdout
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--runner-seed", "1"), "--runner-seed needs --runner"),
        (("--runner", "nobody"), "unknown runner 'nobody'"),
        (("--runner", "cpu", "--runner-seed", "-1"), "a seed is not negative"),
        (("--runner", "cpu", "--runner-expectations", "none.toml"), "cannot be read"),
        (("--runner", "mine:WrongSlots", "--runner-layout", "dense"), "only one layout"),
    ],
)
def test_misuse(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    done = run_pytest(folder, *SUITE, *arguments)
    assert done.returncode == 4, done.stdout
    assert said in done.stderr


def test_collecting_alone_judges_nobody(folder: Path) -> None:
    done = run_pytest(folder, *SUITE, "--runner", "mine:Dead", "--collect-only", "-q", "--runner-report", "r.jsonl")
    assert done.returncode == 0, done.stdout
    assert "test_clause[MR-SLOT-001]" in done.stdout
    assert not (folder / "r.jsonl").exists()


def test_an_interrupted_run_has_no_footer(folder: Path) -> None:
    (folder / "conftest.py").write_text(
        "import pytest\ndef pytest_runtest_logreport(report):\n    pytest.exit('enough', returncode=3)\n"
    )
    arguments = (*SUITE, "--runner", "mine:draws", "--runner-report", "r.jsonl", "-p", "conftest")
    done = run_pytest(folder, *arguments)
    assert done.returncode == 3, done.stdout
    kinds = [json.loads(line)["kind"] for line in (folder / "r.jsonl").read_text().splitlines()]
    assert kinds[0] == "header"
    assert "footer" not in kinds


def test_every_layout_can_be_chosen() -> None:
    """The plugin spells them again: it imports nothing until a runner is judged."""
    assert LAYOUTS == ALL_LAYOUTS
