"""The README's programs run and print what it says, its commands exist, its numbers of clauses and mutants are true."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from conformance.catalogue import catalogue
from conformance.clauses import load_clauses
from conformance.layouts import in_layout
from conformance.mutants import MUTANTS
from engine_core.cli import build_parser
from runner_api import CheckpointError, RunnerConfig
from runner_api.checkpoint import resolve_model
from runner_api.config import LAYOUTS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_step_prints_what_its_comments_say(capsys: pytest.CaptureFixture[str]) -> None:
    program = PROGRAMS[0]
    exec(compile(program, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    promised = [comment.strip() for comment in re.findall(r"print\(.*\)\s+# (.*)", program)]
    assert printed == promised


@pytest.mark.slow
def test_the_real_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        resolve_model("smollm2")
    except CheckpointError as e:
        pytest.skip(f"the real model is not installed: {e}")
    exec(compile(PROGRAMS[1], "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


# Runners for the judge, which do nothing by themselves; tests of their own judge them.
JUDGED = {"json_runner", "rebuilding_engine", "stranger"}


@pytest.mark.parametrize(
    "example", sorted(p for p in (ROOT / "examples").glob("*.py") if p.stem not in JUDGED), ids=lambda p: p.stem
)
def test_examples_run(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_commands_parse() -> None:
    lines = re.findall(r"^(modelrunner .*?)(?: {2,}#.*)?$", README, re.MULTILINE)
    assert len(lines) >= 6
    parser = build_parser()
    for line in lines:
        parser.parse_args(shlex.split(line)[1:])


def test_counts() -> None:
    must = [c for c in load_clauses().values() if c.level == "MUST"]
    config = RunnerConfig(max_num_reqs=2)
    offered = [in_layout("cpu", layout)(config).describe().capabilities for layout in LAYOUTS]
    asked = sum(any(not c.missing(o) for o in offered) for c in must)
    assert README.count(f"{asked} of {len(must)} over both layouts") == 2
    runs = sum(case.status == "runs" for case in catalogue().values())
    assert f"{len(catalogue())} public bugs" in README
    assert f"{runs} run now" in README
    assert f"plant {len(MUTANTS['cpu'])} faults" in README
    assert f"{len(MUTANTS['cpu'])} mutants judged" in README


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (ROOT / target).exists(), target
