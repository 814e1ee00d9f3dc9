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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from conformance.comparison import Difference, FieldComparison, compare_field, owner_of
from conformance.logprob_comparison import LOGPROB_FIELDS, compare_logprobs
from conformance.recording import Setup, build_runner, prepare, replay_steps
from runner_api import (
    INTEGER_FIELDS,
    CapabilityError,
    ConfigError,
    PlanError,
    SamplingParams,
    StepRecord,
    Trace,
    load_factory,
    load_trace,
)

AGREE, DIVERGE = "AGREE", "DIVERGE"
# How far the exact logit of the runner's winner may exceed that of the recorded token. The recorded program attended
# with TF32 products (10 bits of mantissa): its logits are off the exact ones by up to 0.04.
NEAR_TIE = 0.05
# A near tie must have been one for the recorded program too: each of the two logits moved by at most 0.04, so its own
# margin cannot exceed this. Keeps a runner with flat logits from calling every token a near tie.
NEAR_TIE_MARGIN = NEAR_TIE + 2 * 0.04
# Drawing from the recorded logits leaves no such error: only the last bits of the noise's logarithms may differ.
NEAR_TIE_RECORDED_LOGITS = 1e-4

GREEDY = SamplingParams(temperature=0.0)
log = logging.getLogger("modelrunner")


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first element that differs, with the recorded step it is in."""

    step: int
    difference: Difference

    def __str__(self) -> str:
        return f"step {self.step}: {self.difference}"

    def to_json(self) -> dict[str, Any]:
        values = asdict(self.difference)
        return {"step": self.step, **values, "index": list(values["index"])}


@dataclass(slots=True)
class RecordingReport:
    """What one replay found. fields: name to (equal, different) elements; tokens: how each drawn token was judged."""

    recording: str
    runner: str
    model: str
    steps: int = 0
    fields: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=lambda: {"equal": 0, "near_tie": 0, "different": 0})
    first_divergence: Divergence | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return AGREE if self.first_divergence is None else DIVERGE

    def add(self, step: int, comparison: FieldComparison) -> None:
        counts = self.fields.setdefault(comparison.name, [0, 0])
        counts[0] += comparison.equal
        counts[1] += comparison.different
        if comparison.first is not None:
            self.diverge(step, comparison.first)

    def diverge(self, step: int, difference: Difference) -> None:
        if self.first_divergence is None:
            self.first_divergence = Divergence(step, difference)

    def to_json(self) -> dict[str, Any]:
        return {
            "recording": self.recording,
            "runner": self.runner,
            "model": self.model,
            "steps": self.steps,
            "fields": {n: {"equal": e, "different": d} for n, (e, d) in self.fields.items()},
            "tokens": self.tokens,
            "first_divergence": None if self.first_divergence is None else self.first_divergence.to_json(),
            "verdict": self.verdict,
            "notes": self.notes,
        }


def replay_recording(
    path: str | Path,
    *,
    runner: str = "cpu",
    model: str | None = None,
    logits: str = "auto",
    steps: int | None = None,
    dtype: str = "float32",
    device: str = "auto",
    trace: Trace | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RecordingReport:
    """Replay one recording on one runner; `steps` of it if given.

    trace: the recording, if it is read already. progress: called with (steps done, steps in all). The replay ends
    early where the runner refuses or breaks on a recorded step, which counts as a divergence. Raises `TraceError`,
    `CapabilityError`, `CheckpointError` or `ConfigError` where nothing can be replayed.
    """
    path = Path(path)
    trace = load_trace(path) if trace is None else trace
    setup = prepare(path, trace, model=model, logits=logits, dtype=dtype, device=device)
    total = len(trace.steps) if steps is None else min(steps, len(trace.steps))
    built = build_runner(load_factory(runner), setup, trace, total)
    log.info("%s", built.describe().line())
    report = RecordingReport(trace.name, built.describe().name, setup.model_name, notes=list(setup.notes))
    judge = StepJudge(setup, report)
    try:
        for record, step in zip(trace.steps, replay_steps(setup, trace, total), strict=False):
            number = int(record.extra.get("step", report.steps))
            judge.admit(record)
            try:
                built.execute_model(step.plan, descriptor=step.descriptor)
                if step.forced is not None:
                    built.sample_tokens(forced=step.forced).get_output()
            except CapabilityError:
                raise
            except Exception as e:  # whatever a runner under test may raise
                judge.failed(number, record, e)
                break
            report.steps += 1
            if record.num_reqs:
                judge.compare(number, record, built.last_step())
            if progress is not None:
                progress(report.steps, total)
    finally:
        built.shutdown()
    return report


class StepJudge:
    """Holds one step after the other against the recording and adds what it finds to the report."""

    def __init__(self, setup: Setup, report: RecordingReport) -> None:
        self.setup = setup
        self.report = report
        self._params: dict[str, SamplingParams] = {}
        if setup.judge_tokens and not setup.recorded_logits:
            self._near_tie = NEAR_TIE
        else:
            self._near_tie = NEAR_TIE_RECORDED_LOGITS

    def admit(self, record: StepRecord) -> None:
        """Remember how the step's new requests want to be sampled."""
        for new in record.plan.scheduled_new_reqs:
            self._params[new.req_id] = new.sampling_params or GREEDY

    def compare(self, number: int, expected: StepRecord, got: StepRecord) -> None:
        """One step, its fields in the order in which they are computed, then its tokens, then log probabilities."""
        for name in INTEGER_FIELDS:
            # An empty array is a field that this recording does not hold.
            if len(getattr(expected, name)):
                self.report.add(number, compare_field(name, expected, got))
        if not self.setup.judge_tokens:
            return
        self._judge_tokens(number, expected, got)
        wanted = [self._params.get(r, GREEDY).logprobs for r in expected.req_ids]
        for name in LOGPROB_FIELDS:
            if getattr(expected, name) is not None:
                self.report.add(number, compare_logprobs(name, expected, got, wanted, exact=self.setup.recorded_logits))

    def failed(self, number: int, record: StepRecord, error: Exception) -> None:
        """The runner could not take a step that the recorded program took: a divergence that ends the replay."""
        name, req_id, text = "step", None, f"{type(error).__name__}: {error}"
        if isinstance(error, PlanError):
            name, req_id, text = (error.field or name).removeprefix("forced."), error.req_id, str(error)
        expected: Any = "the recorded step to be accepted"
        if name == "num_sampled":  # which row, the runner does not say
            expected = record.num_sampled.tolist()
            self.report.fields.setdefault(name, [0, 0])[1] += 1
        log.debug("step %d failed", number, exc_info=error)
        self.report.diverge(number, Difference(name, (), req_id, None, expected, text))
        self.report.notes.append(f"ended at step {number}: the runner did not take it ({text})")

    def _judge_tokens(self, number: int, expected: StepRecord, got: StepRecord) -> None:
        own = np.asarray(got.token_ids)
        for i in np.flatnonzero(expected.num_sampled > 0).tolist():
            recorded = int(expected.token_ids[i, 0])
            drawn = int(own[i, 0]) if i < len(own) and own.shape[1] else None
            if drawn == recorded:
                kind = "equal"
            else:
                kind = "near_tie" if self._is_near_tie(i, recorded, drawn, expected, got) else "different"
            self.report.tokens[kind] += 1
            if kind == "different":
                # The token drawn after logits row i: this only runs without drafts, one logits row a request.
                req_id, at = owner_of("logits_indices", (i,), expected)
                position = None if at is None else at + 1
                self.report.diverge(number, Difference("token_ids", (i, 0), req_id, position, recorded, drawn))

    def _is_near_tie(self, i: int, recorded: int, drawn: int | None, expected: StepRecord, got: StepRecord) -> bool:
        """Can rounding in the recorded program explain that row i drew another token?"""
        params = self._params.get(expected.req_ids[i], GREEDY)
        scores = got.logits if params.greedy else got.intermediates.get("scores")
        if scores is None or drawn is None or i >= len(scores) or max(drawn, recorded) >= scores.shape[1]:
            return False
        bound = self._near_tie
        margin = expected.extra["top2_margin"][i] if "top2_margin" in expected.extra else None
        if params.greedy and margin is not None and margin > NEAR_TIE_MARGIN:
            return False
        if not params.greedy:
            bound *= max(1.0, params.repetition_penalty) / params.temperature
        gap = float(scores[i, drawn]) - float(scores[i, recorded])
        return 0.0 <= gap <= bound


# -- the command ----------------------------------------------------------------------------------------------


def run_replay(args: argparse.Namespace) -> int:
    """Replay every file named; print a report; 0 if all agree, 1 if one diverges. Misuse is raised."""
    if args.steps is not None and args.steps < 1:
        raise ConfigError("nothing to replay", field="--steps", got=args.steps, expected=">= 1")
    # A broken file is found before an hour is spent on the ones in front of it.
    traces = [load_trace(path) for path in args.files]
    reports = []
    for path, trace in zip(args.files, traces, strict=True):
        with _progress_bar(trace.name) as progress:
            report = replay_recording(
                path, runner=args.runner, model=args.model, logits=args.logits, steps=args.steps, dtype=args.dtype,
                device=args.device, trace=trace, progress=progress,
            )  # fmt: skip
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
    lines = [f"{report.recording}: {report.steps} steps, runner {report.runner}, model {report.model}"]
    lines.append(f"  {'field':24}{'equal':>10}{'near tie':>10}{'different':>11}")
    for name, (equal, different) in report.fields.items():
        lines.append(f"  {name:24}{equal:>10}{'':>10}{different:>11}")
    t = report.tokens
    if sum(t.values()):
        lines.append(f"  {'tokens':24}{t['equal']:>10}{t['near_tie']:>10}{t['different']:>11}")
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
