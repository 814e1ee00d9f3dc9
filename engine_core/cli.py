"""The program `modelrunner`: finds its subcommands, parses, runs one, and turns its outcome into an exit code.

A subcommand is an entry point of group `modelrunner.commands`: a callable that adds its parser to `subparsers` and
sets `run(args) -> int` on it. One that cannot be imported is listed with the reason and refuses to run; the others
work. Exit codes: 0 done or agreed, 1 diverged, 2 misuse or refused, 3 an error of
this program itself, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import runner_api
from runner_api import RunnerError
from runner_api.errors import safely

ENTRY_POINT_GROUP = "modelrunner.commands"
EXIT_OK, EXIT_DIVERGED, EXIT_MISUSE, EXIT_BROKEN, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
log = logging.getLogger("modelrunner")
LOG_LEVELS = ("debug", "info", "warning", "error")


def build_parser() -> argparse.ArgumentParser:
    """The parser with every installed subcommand."""
    parser = argparse.ArgumentParser(
        prog="modelrunner",
        description="Run, compare and check LLM model runners.",
        epilog="Exit codes: 0 done or agreed, 1 diverged, 2 misuse, 3 an error of this program. "
        "`modelrunner COMMAND --help` says more.",
    )
    parser.add_argument(
        "--version", action="version", version=f"modelrunner {runner_api.__version__} (spec {runner_api.SPEC_VERSION})"
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="warning", help="default: warning")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name):
        _add_command(subparsers, entry)
    return parser


def _add_command(subparsers: Any, entry: EntryPoint) -> None:
    """Let an entry point add its parser; if it cannot even be loaded, add one that says why."""
    try:
        add = entry.load()
    except Exception as e:
        reason = f"{type(e).__name__}: {e}"
        broken = subparsers.add_parser(entry.name, help=f"unavailable: {reason}".replace("%", "%%"), add_help=False)
        broken.set_defaults(
            run=lambda args: _refuse(f"command {entry.name!r} is unavailable: {reason}"), takes_anything=True
        )
        return
    add(subparsers)


def _refuse(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return EXIT_MISUSE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code instead of leaving the interpreter."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal cannot show is written as an escape
            stream.reconfigure(errors="backslashreplace")
    parser = build_parser()
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown and not getattr(args, "takes_anything", False):
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    except SystemExit as e:  # argparse has printed help, the version, or what is wrong
        return int(e.code or 0)
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_MISUSE
    try:
        return int(args.run(args))
    except RunnerError as e:
        return _refuse(" ".join(str(e).split()))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`, say) has left. Point stdout elsewhere, or the interpreter complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except BaseException as e:
        # Never 1, which says that a runner was judged and found wrong, nor the code of a runner that wants to leave.
        log.debug("unexpected", exc_info=e)
        text = " ".join(f"{type(e).__name__}: {safely(str, e)}".split())
        hint = "Please report it, with what `--log-level debug` in front of the command shows"
        print(f"error: not foreseen: {text}. {hint}", file=sys.stderr)
        return EXIT_BROKEN


if __name__ == "__main__":
    sys.exit(main())
