"""docs/write-a-runner.md: its blocks build up the files that they name, and its commands print what the page shows.

Commands run in the page's order, on the files as far as a reader has typed them by then. Where clauses were added, run
this file as a program: it writes how many of them passed into the page.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.clauses import load_clauses
from engine_core.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "write-a-runner.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
LEFT_OUT = "…"


@dataclass(frozen=True)
class Command:
    line: str
    shown: tuple[str, ...]
    typed: dict[str, str]  # files as they are when the command is run: name to text

    @property
    def exit_code(self) -> int:
        """As the page's text says: 2 for misuse, 1 for a verdict or a failed test, else 0."""
        if any(line.startswith("error: ") for line in self.shown):
            return 2
        return int(any(line.startswith("verdict: DIVERGE") or " failed" in line for line in self.shown))


def commands() -> list[Command]:
    typed: dict[str, str] = {}
    found = []
    for kind, block in BLOCKS:
        first, _, rest = block.partition("\n")
        if kind == "console":
            assert first.startswith("$ "), first
            found.append(Command(first.removeprefix("$ "), tuple(rest.splitlines()), dict(typed)))
        else:
            name = re.fullmatch(r"# (\w+\.(?:py|toml))", first)
            assert name, f"the first line of a block is its file's name: {first}"
            typed[name[1]] = typed.get(name[1], "") + block
    return found


def test_the_page_has_commands_and_shows_what_they_print() -> None:
    assert len(commands()) >= 12
    for command in commands():
        assert [line for line in command.shown if line.strip(f"{LEFT_OUT} ")], f"nothing is shown of {command.line}"


@pytest.mark.parametrize("command", commands(), ids=lambda c: c.line)
def test_a_command_prints_what_is_shown(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in command.typed.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for processes of their own
    program, *arguments = shlex.split(command.line)
    if program == "modelrunner":
        arguments = [a.replace("process:python ", f"process:{shlex.quote(sys.executable)} ") for a in arguments]
        exit_code = main(arguments)
        printed = "".join(capsys.readouterr())
    else:
        assert program == "pytest"
        own = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        done = subprocess.run([*own, *arguments], capture_output=True, text=True)
        exit_code, printed = done.returncode, done.stdout + done.stderr
    assert missing(command.shown, printed) is None, printed
    assert exit_code == command.exit_code, printed


def missing(shown: tuple[str, ...], printed: str) -> str | None:
    """The first shown line that is not printed behind those before it, or a printed one that nothing stands for.

    A line of `…` stands for any lines, `…` inside of a line for any text. Blanks and blank lines do not count.
    """
    wanted = [plain(line) for line in shown if line.strip()]
    left = [plain(line) for line in printed.splitlines() if line.strip()]
    anywhere = False
    for line in wanted:
        if line == LEFT_OUT:
            anywhere = True
            continue
        reach = len(left) if anywhere else 1
        at = next((i for i, got in enumerate(left[:reach]) if same(line, got)), None)
        if at is None:
            return line
        left, anywhere = left[at + 1 :], False
    return left[0] if left and not anywhere else None


def plain(line: str) -> str:
    """Blanks as one."""
    return " ".join(line.split())


def same(line: str, got: str) -> bool:
    return re.fullmatch(".*".join(re.escape(part) for part in line.split(LEFT_OUT)), got) is not None


# How many clauses of an area passed, and how many were skipped.
COUNTS = re.compile(r"\d+/\d+|(?<=\s)(?:\d+|-)$")


def renewed(shown: str, printed: str) -> str:
    """A shown line with the counts of the printed one that is the same but for them; as it is where there is none."""
    if "/" not in shown:
        return shown
    texts = [".*".join(re.escape(p) for p in plain(part).split(LEFT_OUT)) for part in COUNTS.split(shown)]
    pattern = re.compile(r"\s*" + r"\s*(\d+/\d+|\d+|-)\s*".join(texts))
    found = next((m for line in printed.splitlines() if (m := pattern.fullmatch(plain(line)))), None)
    counts = iter(found.groups() if found else ())
    return COUNTS.sub(lambda m: next(counts), shown) if found else shown


def renew_the_page() -> None:
    """Run every command and write the page anew."""
    page = PAGE
    for command in commands():
        program, *arguments = shlex.split(command.line.replace("process:python ", f"process:{sys.executable} "))
        module = "engine_core.cli" if program == "modelrunner" else program
        with tempfile.TemporaryDirectory() as folder:
            for name, text in command.typed.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            run = [sys.executable, "-m", module, *arguments]
            env = os.environ | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(run, cwd=folder, env=env, capture_output=True, text=True)
        old = "\n".join(command.shown)
        new = "\n".join(renewed(line, done.stdout + done.stderr) for line in command.shown)
        page = page.replace(f"$ {command.line}\n{old}\n", f"$ {command.line}\n{new}\n")
    (ROOT / "docs" / "write-a-runner.md").write_text(page, encoding="utf-8")


def test_what_is_shown_must_be_printed() -> None:
    """The comparison itself: order, what lies between, parts of lines, counts."""
    assert missing(("a", "…", "c"), "a\n\nb\nc\n") is None
    assert missing(("a", "c"), "a\nb\nc\n") == "c"
    assert missing(("…", "c", "…", "a"), "a\nb\nc\n") == "a"
    assert missing(("a", "…", "b"), "a\n") == "b"
    assert missing(("a b …", "c"), "a  b d\nc\n") is None
    assert missing(("a … d",), "a b c\n") == "a … d"
    assert missing(("a",), "a\nb\n") == "b"
    assert missing(("SLOT  3/3  -  6",), "SLOT  3/3    -  6\n") is None
    for other in ("SLOT  9/9  -  6\n", "SLOT  2/3  -  6\n", "SLOT  3/3  -  -\n"):
        assert missing(("SLOT  3/3  -  6",), other) is not None


def test_counts_are_renewed_and_nothing_else_is() -> None:
    printed = "SLOT 9/9 - -\nlockstep: AGREE steps=3\nverdict: AGREE MUST 101/101 SHOULD 1/1 (3 steps)\n"
    shown = ("SLOT     3/3  -  6", "lockstep: AGREE steps=2", "verdict: AGREE MUST 94/94 SHOULD 1/1 …", "…")
    assert [renewed(line, printed) for line in shown] == [
        "SLOT     9/9  -  -", "lockstep: AGREE steps=2", "verdict: AGREE MUST 101/101 SHOULD 1/1 …", "…",
    ]  # fmt: skip


def test_the_page_names_clauses_and_files_that_exist() -> None:
    named = set(re.findall(r"MR-[A-Z]+-\d{3}", PAGE))
    assert named <= set(load_clauses())
    for path in set(re.findall(r"`((?:docs|examples|runner_api|cpu_reference)/[\w./-]+\.(?:py|md))", PAGE)):
        assert (ROOT / path).exists(), path


if __name__ == "__main__":
    renew_the_page()
