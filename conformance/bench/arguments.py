"""What the experiments take on the command line, and what holds where nothing is said.

Apart from what they run, so that `modelrunner --help` stays quick.
"""

from __future__ import annotations

import argparse

from runner_api.config import LAYOUTS

# persistence: steps of the trace, most arrivals in one of them, steps to time, and lifetimes of a sweep
STEPS, MOST_ARRIVALS, TIMED_STEPS = 2000, 2, 50
LIFETIMES = (1, 2, 4, 8, 16, 64, 250)
# host: batch sizes, steps to measure for each, size of the vocabulary
BATCHES, DECODE_STEPS, VOCAB_SIZE = (1, 8, 64, 256), 64, 1024

PERSISTENCE = "Does it pay to keep rows between steps? Rebuild them, or apply diffs."
PERSISTENCE_JSON = """\
--json prints one object:
  runner, layout, clock, seed, steps, joined, finished, active
  traces     by name ("main", and "L = 4" and so on for a sweep): rebuild and diffs, each with
             entries (of all steps), steps_run, traffic (the runner's counters after those steps),
             seconds (mean of the timed steps), parts (the same by part);
             entry_ratio, time_ratio, computed (entries by arithmetic), agrees
  answer     when keeping rows stops paying (null without --lifetimes)
  agrees     whether the runner counted what arithmetic says everywhere (else the exit code is 1)
"""
HOST = "What a decode step costs the host, by part, batch size and layout."
HOST_JSON = """\
--json prints one object:
  clock, vocab_size, sampled (whether tokens are drawn, not the greatest taken), steps
  runners    by layout: how the runner describes itself
  batches    by batch size, by layout: parts (median seconds of each part of execute_model and sample_tokens),
             seconds (their sum), output (median of get_output, which waits for the device)
  ratios     by batch size: seconds of dense / seconds of slots (null where one of them is missing)
"""


def persistence_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="of the requests (default: 1, the original program's)")
    parser.add_argument("--short", action="store_true", help="requests of 2 to 5 steps instead of 50 to 449")
    parser.add_argument(
        "--lifetimes", type=int, nargs="*", metavar="L",
        help=f"also sweep: requests that all live L steps (without numbers: {' '.join(map(str, LIFETIMES))})",
    )  # fmt: skip
    _runner(parser)
    parser.add_argument("--layout", choices=LAYOUTS, help="of the runner's rows (default: its choice)")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of the trace (default: {STEPS})")
    parser.add_argument(
        "--arrivals", type=int, default=MOST_ARRIVALS, metavar="N",
        help=f"most requests that arrive in one step (default: {MOST_ARRIVALS})",
    )  # fmt: skip
    parser.add_argument(
        "--timed-steps", type=int, default=TIMED_STEPS, metavar="N",
        help=f"steps in which rebuilding is timed, unless it is in all (default: {TIMED_STEPS})",
    )  # fmt: skip
    parser.add_argument("--full", action="store_true", help="rebuild through the runner in every step; takes minutes")
    parser.add_argument("--plot", metavar="FILE", help="also draw it, as .png or .svg")
    _json(parser)


def host_arguments(parser: argparse.ArgumentParser) -> None:
    _runner(parser)
    parser.add_argument(
        "--batches", default=",".join(map(str, BATCHES)), metavar="N,…",
        help="requests of a step (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=DECODE_STEPS, metavar="N", help="to measure, per batch size (default: %(default)s)"
    )
    parser.add_argument(
        "--vocab", type=int, default=VOCAB_SIZE, metavar="N", help="size of the vocabulary (default: %(default)s)"
    )
    parser.add_argument(
        "--sampled", action="store_true", help="draw at temperature 1, top-p 0.9, top-k 50 (default: greedy)"
    )
    _json(parser)


def _runner(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runner", default="cpu", help="an installed runner, or package.module:factory (default: cpu)")


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
