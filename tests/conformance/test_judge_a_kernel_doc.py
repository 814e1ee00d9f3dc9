"""docs/judge-a-kernel.md: its programs run in order and print what the page shows; its commands too."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

from conformance.commands import kernels
from conformance.triton_sanitizer import FaultKind
from gpu_backend.triton_support import INTERPRETED

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not INTERPRETED, reason="kernels are judged in the interpreter"),
]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "judge-a-kernel.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|text|toml|console)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def file_name(block: str) -> str:
    match = re.match(r"# (\w+\.\w+)\n", block)
    assert match, f"the first line of a program is its file name: {block[:60]}"
    return match[1]


def write_files(folder: Path) -> None:
    for kind, block in BLOCKS:
        if kind in ("python", "toml"):
            (folder / file_name(block)).write_text(block, encoding="utf-8")


def same_output(got: str, shown: str) -> bool:
    """Equal but for blanks, and for figures that depend on the compiler."""

    def plain(text: str) -> list[str]:
        text = re.sub(r"\d+ / \d+ / \d+", "r / s / s", text)
        return [" ".join(line.split()) for line in text.splitlines() if line.strip()]

    return plain(got) == plain(shown)


def test_programs_print_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path)  # the interpreter reads kernels, and messages quote them, from their files
    names: dict[str, object] = {"__name__": "judge_a_kernel"}
    programs = 0
    for i, (kind, block) in enumerate(BLOCKS):
        if kind != "python" or file_name(block).startswith("test_"):
            continue
        exec(compile(block, str(tmp_path / file_name(block)), "exec"), names)
        printed = capsys.readouterr().out.replace(f"{tmp_path}{os.sep}", "…/")
        shown = BLOCKS[i + 1][1] if BLOCKS[i + 1][0] == "text" else ""
        assert printed == shown, file_name(block)
        programs += 1
    assert programs >= 8


def commands() -> dict[str, str]:
    """What follows `$ ` in console blocks, and the output shown for it."""
    shown = {}
    for kind, block in BLOCKS:
        if kind == "console":
            first, _, output = block.partition("\n")
            shown[first.removeprefix("$ ")] = output
    return shown


def test_the_test_passes(tmp_path: Path) -> None:
    write_files(tmp_path)
    command = next(c for c in commands() if "pytest" in c)
    setting, _, arguments = command.partition(" ")
    assert setting == "TRITON_INTERPRET=1"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *shlex.split(arguments)[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert commands()[command].strip() in done.stdout


def test_the_compile_check_prints_what_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = next(c for c in commands() if c.startswith("modelrunner "))
    parser = argparse.ArgumentParser()
    kernels(parser.add_subparsers())
    args = parser.parse_args(shlex.split(command)[1:])
    assert args.run(args) == 0
    assert same_output(capsys.readouterr().out, commands()[command])


def test_the_table_names_every_kind() -> None:
    table = PAGE[PAGE.index("## What is found") : PAGE.index("Each check can be turned off")]
    assert set(re.findall(r"`([a-z0-9]+_[a-z0-9_]+)`", table)) >= {str(kind) for kind in FaultKind}
