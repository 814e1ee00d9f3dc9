"""The judge's subcommands of `modelrunner`: each function adds its own parser and names what runs it.

The program finds them as entry points of group `modelrunner.commands`. Exit codes: 0 agree, 1 diverge, 2 misuse. What
a command needs is imported when it runs, so that `modelrunner --help` stays quick.
"""

from __future__ import annotations

import argparse
from typing import Any

from runner_api.config import DTYPES, LAYOUTS


def check(subparsers: Any) -> None:
    """`modelrunner check RUNNER`: hold a runner against the clauses and against an oracle on generated plans."""
    parser = subparsers.add_parser(
        "check",
        help="judge a runner: every clause, then lockstep with an oracle",
        description="Judge a runner by every clause, then run it in lockstep with an oracle on generated plans.",
    )
    parser.add_argument(
        "runner", help="an installed runner, package.module:factory, file.py:factory, or process:COMMAND LINE"
    )
    parser.add_argument("--against", default="cpu", metavar="ORACLE", help="the runner to compare with (default: cpu)")
    parser.add_argument("--model", metavar="PATH", help="also lockstep on this checkpoint (a folder, or smollm2)")
    parser.add_argument(
        "--dtype", choices=DTYPES,
        help="with --model: what the runner computes it in (default: float32)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=200, help="steps of the lockstep run (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the generated plans (default: 0)")
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N",
        help="as many times three seeds of each kind of generated plans, and one story told in other ways (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--max-near-ties", type=float, metavar="RATE",
        help="most near ties per token (default: ten times what rounding makes likely, and 3)",
    )  # fmt: skip
    parser.add_argument("--layout", choices=LAYOUTS, help="of the runner's rows (default: its own choice)")
    parser.add_argument("--lockstep-only", action="store_true", help="leave the clauses out")
    parser.add_argument(
        "--clause", action="append", metavar="ID",
        help="only clauses whose id begins with these parts, for example SLOT or PAD-004 (again for more); no lockstep",
    )  # fmt: skip
    parser.add_argument(
        "--expectations", metavar="FILE", help="clauses that are known to fail (TOML); see docs/read-a-report.md"
    )
    parser.add_argument("--report", metavar="FILE", help="also write a report, as JSON lines, for modelrunner report")
    parser.add_argument(
        "--find", action=argparse.BooleanOptionalAction, default=True,
        help="shrink the first failures to the smallest plans that show them (default: yes)",
    )  # fmt: skip
    parser.add_argument("--corpus", metavar="DIR", help="also run the cases that are saved in this folder")
    parser.add_argument(
        "--save-corpus", metavar="DIR", help="save failing plans, and plans of rare shapes, in this folder"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=_check)


def report(subparsers: Any) -> None:
    """`modelrunner report`: several reports of `check` as one table."""
    parser = subparsers.add_parser(
        "report",
        help="merge reports of check into one table of areas and runners",
        description="Merge reports that `modelrunner check --report` has written into one table of areas and runners.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a report (.jsonl)")
    parser.add_argument(
        "--format", choices=("terminal", "markdown", "badge"), default="terminal",
        help="badge: JSON of a shields.io endpoint, of one report (default: terminal)",
    )  # fmt: skip
    parser.set_defaults(run=_report)


def clauses(subparsers: Any) -> None:
    """`modelrunner clauses`: what a runner is judged by."""
    parser = subparsers.add_parser(
        "clauses", help="list the clauses", description="List the clauses that a runner is judged by."
    )
    parser.add_argument("area", nargs="?", help="only ids that start with this, for example SLOT or MR-SLOT-003")
    parser.add_argument(
        "--json", action="store_true",
        help="print one JSON object, with the tests and the mutants of each clause, which are run if need be",
    )  # fmt: skip
    parser.add_argument("--markdown", action="store_true", help="print a page of all clauses by area")
    parser.add_argument(
        "--no-cache",
        dest="cache",
        action="store_false",
        help="with --json: run tests and mutants even if nothing changed",
    )
    parser.set_defaults(run=_clauses)


def replay(subparsers: Any) -> None:
    """`modelrunner replay FILE…`: hold a runner against recorded steps of vLLM."""
    parser = subparsers.add_parser(
        "replay",
        help="hold a runner against recordings of vLLM",
        description="Give a runner recorded plans, impose the recorded outcome, and compare what it built and drew.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a recording (.jsonl)")
    parser.add_argument("--runner", default="cpu", help="an installed runner, or package.module:factory (default: cpu)")
    parser.add_argument("--model", metavar="PATH", help="the recorded model (default: checkpoints/NAME by the file)")
    parser.add_argument(
        "--logits", metavar="SOURCE", default="auto",
        help="draw from FILE's NAME_logits.npz (recorded), from another such file (its path), or from the model "
        "(model); default: recorded logits where they exist",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, metavar="N", help="only the first N steps")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32",
        help="what the runner computes in (default: float32, as recorded)",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="where the runner runs (default: auto)")
    parser.add_argument("--layout", choices=LAYOUTS, help="of the runner's rows (default: as recorded)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=_replay)


def mutants(subparsers: Any) -> None:
    """`modelrunner mutants`: show that the clauses notice faults."""
    parser = subparsers.add_parser(
        "mutants",
        help="plant known faults in a runner and show which clauses notice",
        description="Plant known faults in copies of a runner, one at a time, and show which clauses notice.",
    )
    parser.add_argument("--runner", default="cpu", help="whose mutants (default: cpu)")
    parser.add_argument("--only", metavar="ID", help="this mutant alone")
    parser.add_argument("--layout", choices=LAYOUTS, help="only those of this layout of rows")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: one per core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the kill matrix")
    parser.set_defaults(run=_mutants)


def kernels(subparsers: Any) -> None:
    """`modelrunner kernels check`: compile kernels for GPUs that are not there."""
    from conformance.kernels_check import SIGNATURES_HELP, TARGETS

    parser = subparsers.add_parser("kernels", help="look at Triton kernels without a GPU")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="compile every kernel for several targets",
        description="Compile every entry kernel of the modules for several targets; needs no GPU.",
        epilog=SIGNATURES_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument(
        "modules", nargs="*", metavar="MODULE", help="module, package or .py file (default: gpu_backend)"
    )
    check.add_argument("--signatures", metavar="FILE", help="how kernels of foreign modules are launched (see below)")
    check.add_argument("--targets", nargs="+", default=TARGETS, metavar="TARGET", help=f"default: {' '.join(TARGETS)}")
    check.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    check.set_defaults(run=_kernels_check)


def demo(subparsers: Any) -> None:
    """`modelrunner demo`: a real model on two runners, step by step in agreement."""
    parser = subparsers.add_parser(
        "demo",
        help="a real model on the reference and on the Triton runner, compared at every step",
        description="Answer prompts with a real model on the reference while the Triton runner goes along in lockstep.",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="questions (default: two of our own)")
    parser.add_argument("--model", default="smollm2", help="a checkpoint, or smollm2 (default)")
    parser.add_argument("--runner", default="gpu", help="the runner that goes along (default: gpu)")
    parser.add_argument("--against", default="cpu", metavar="ORACLE", help="the runner that answers (default: cpu)")
    parser.add_argument("--max-tokens", type=int, default=64, help="per answer (default: 64)")
    parser.add_argument(
        "--compare-tokens", type=int, metavar="N",
        help="tokens of each answer for which the runner goes along (default: 8 without a GPU, all with one)",
    )  # fmt: skip
    parser.add_argument("--fault", metavar="NAME", help="plant a fault in the runner's source: slot_mapping, …")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=_demo)


def bench(subparsers: Any) -> None:
    """`modelrunner bench`: what a runner's own work costs, with a model that does nothing."""
    from conformance.bench import arguments as a

    parser = subparsers.add_parser("bench", help="measure what a runner itself costs, with a model that does nothing")
    actions = parser.add_subparsers(title="experiments", metavar="EXPERIMENT", required=True)
    for name, text, epilog, add_arguments, run in (
        ("persistence", a.PERSISTENCE, a.PERSISTENCE_JSON, a.persistence_arguments, _bench_persistence),
        ("host", a.HOST, a.HOST_JSON, a.host_arguments, _bench_host),
    ):
        action = actions.add_parser(
            name, help=text, description=text, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add_arguments(action)
        action.set_defaults(run=run)


def _check(args: argparse.Namespace) -> int:
    from conformance.check import run_check

    return run_check(args)


def _clauses(args: argparse.Namespace) -> int:
    from conformance.clause_list import run_clauses

    return run_clauses(args)


def _report(args: argparse.Namespace) -> int:
    from conformance.matrix import run_report

    return run_report(args)


def _replay(args: argparse.Namespace) -> int:
    from conformance.replay import run_replay

    return run_replay(args)


def _mutants(args: argparse.Namespace) -> int:
    from conformance.kill_matrix import run_mutants

    return run_mutants(args)


def _kernels_check(args: argparse.Namespace) -> int:
    from conformance.kernels_check import run_kernels_check

    return run_kernels_check(args)


def _demo(args: argparse.Namespace) -> int:
    from conformance.demo import run_demo

    return run_demo(args)


def _bench_persistence(args: argparse.Namespace) -> int:
    from conformance.bench.persistence_report import run_persistence

    return run_persistence(args)


def _bench_host(args: argparse.Namespace) -> int:
    from conformance.bench.host import run_host

    return run_host(args)
