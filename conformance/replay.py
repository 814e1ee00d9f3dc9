"""Replay recordings of vLLM: give a runner the recorded plans, impose the recorded outcome, compare what it built.

Every integer field is compared element by element; the token that the runner would have drawn itself is held against
the recorded one and judged equal, a near tie, or different. The runner sees `recording.ReplayStep`s alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.lockstep import AGREE, DIVERGE
from conformance.recording import Launch, ReplayStep, Setup, check_offered, launch_of, prepare, replay_steps
from conformance.replay_drive import Driver
from conformance.replay_judge import RecordingReport, StepJudge
from conformance.replay_layout import in_batch_order, plans_for
from runner_api import ConfigError, Trace, load_trace
from runner_api.loader import built_layout
from runner_api.protocol import RunnerFactory

log = logging.getLogger("modelrunner")


@dataclass(frozen=True, slots=True)
class Replay:
    """One recording, read and checked, with all that is needed to run it."""

    trace: Trace
    setup: Setup
    launch: Launch
    steps: tuple[ReplayStep, ...]


def prepare_replay(
    path: str | Path,
    *,
    runner: str | RunnerFactory = "cpu",
    model: str | None = None,
    logits: str = "auto",
    steps: int | None = None,
    dtype: str = "float32",
    device: str = "auto",
    layout: str | None = None,
    trace: Trace | None = None,
) -> Replay:
    """Read a recording and find out whether `runner` can be held against `steps` of it (all if None).

    layout: of the runner's rows, if not the recorded one. trace: the recording, if it is read already. Raises
    `TraceError`, `CapabilityError`, `CheckpointError` or `ConfigError` where it cannot.
    """
    path = Path(path)
    trace = load_trace(path) if trace is None else trace
    setup = prepare(path, trace, model=model, logits=logits, dtype=dtype, device=device, layout=layout)
    total = len(trace.steps) if steps is None else min(steps, len(trace.steps))
    launch = launch_of(setup, trace, total)
    check_offered(runner, launch)
    return Replay(trace, setup, launch, tuple(replay_steps(setup, trace, total)))


def run(
    replay: Replay, runner: str | RunnerFactory = "cpu", progress: Callable[[int, int], None] | None = None
) -> RecordingReport:
    """Take the runner through the steps. Ends early where it refuses or breaks on one, which is a divergence.

    progress: called with (steps done, steps in all).
    """
    with Driver(runner, replay.launch) as driver:
        info = driver.describe()
        log.info("%s", info.line())
        setup, steps = replay.setup, replay.trace.steps
        report = RecordingReport(replay.trace.name, info.name, setup.model_name, notes=list(setup.notes))
        report.layout, report.selection = info.layout, built_layout(setup.config, info).to_dict()
        judge = StepJudge(setup, report)
        # To the judge a resumed request is a new one, whatever the layout.
        admitted = plans_for("slots", (record.plan for record in steps))
        for number, (record, plan, step) in enumerate(zip(steps, admitted, replay.steps, strict=False)):
            judge.admit(replace(record, plan=plan))
            taken = driver.take(step)
            if taken.error is not None:
                judge.failed(number, record, taken.stage, taken.error)
                break
            report.steps += 1
            expected = in_batch_order(record, taken.record) if setup.by_request else record
            judge.compare(number, expected, taken.record, taken.output)
            if progress is not None:
                progress(report.steps, len(replay.steps))
        report.launches = driver.launches()
    return report


def replay_recording(
    path: str | Path,
    *,
    runner: str | RunnerFactory = "cpu",
    model: str | None = None,
    logits: str = "auto",
    steps: int | None = None,
    dtype: str = "float32",
    device: str = "auto",
    layout: str | None = None,
    trace: Trace | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RecordingReport:
    """Both in one: `prepare_replay`, whose arguments and errors these are, then `run`."""
    prepared = prepare_replay(
        path, runner=runner, model=model, logits=logits, steps=steps, dtype=dtype, device=device, layout=layout,
        trace=trace,
    )  # fmt: skip
    return run(prepared, runner, progress)


# -- the command ----------------------------------------------------------------------------------------------


def run_replay(args: argparse.Namespace) -> int:
    """Replay every file named; print a report; 0 if all agree, 1 if one diverges. Misuse is raised."""
    if args.steps is not None and args.steps < 1:
        raise ConfigError("nothing to replay", field="--steps", got=args.steps, expected=">= 1")
    if args.logits.endswith(".npz") and len(args.files) > 1:
        raise ConfigError(
            "logits belong to one recording", field="--logits", got=f"{len(args.files)} recordings", expected="one"
        )
    # A file that cannot be replayed is found before an hour is spent on the ones in front of it.
    prepared = [
        prepare_replay(
            path, runner=args.runner, model=args.model, logits=args.logits, steps=args.steps, dtype=args.dtype,
            device=args.device, layout=args.layout,
        )
        for path in args.files
    ]  # fmt: skip
    reports = []
    for replay in prepared:
        with _progress_bar(replay.trace.name) as progress:
            report = run(replay, args.runner, progress)
        reports.append(report)
        if not args.json:
            print("\n".join(_table(report)), flush=True)
    verdict = AGREE if all(r.verdict == AGREE for r in reports) else DIVERGE
    if args.json:
        print(json.dumps({"recordings": [r.to_json() for r in reports]}, default=str))
    else:
        print(f"verdict: {verdict} ({len(reports)} recording{'s' * (len(reports) != 1)})")
    return 0 if verdict == AGREE else 1


def _table(report: RecordingReport) -> list[str]:
    who = f"runner {report.runner}, layout {report.layout}, model {report.model}"
    lines = [f"{report.recording}: {report.steps} steps, {who}"]
    lines.append(f"  {'field':24}{'equal':>10}{'near tie':>10}{'different':>11}")
    for name, (equal, different) in report.fields.items():
        lines.append(f"  {name:24}{equal:>10}{'':>10}{different:>11}")
    t = report.tokens
    if sum(t.values()):
        lines.append(f"  {'tokens':24}{t['equal']:>10}{t['near_tie']:>10}{t['different']:>11}")
    if report.launches:
        lines.append("  launches: " + ", ".join(f"{k.strip('_')} {n}" for k, n in sorted(report.launches.items())))
    lines += [f"  note: {note}" for note in report.notes]
    if report.first_divergence is not None:
        lines.append(f"  first divergence: {report.first_divergence}")
    return [*lines, f"  {report.verdict}", ""]


@contextmanager
def _progress_bar(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """Gives a function of (steps done, steps in all) that moves a bar on stderr; None where nobody is watching."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
