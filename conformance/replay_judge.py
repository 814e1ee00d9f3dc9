"""Holds each replayed step against the recording: fields, output, tokens, log probabilities, and counts what it finds.

Runs after the runner has taken its step, and trusts nothing that the runner gave: what cannot be read is different.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from conformance.certificates import DIVERGENCE, Certifier, ExactDraw
from conformance.comparison import Difference, FieldComparison, compare_field, owner_of
from conformance.lockstep import AGREE, DIVERGE
from conformance.logprob_comparison import LOGPROB_FIELDS, compare_logprobs
from conformance.recording import Setup, step_logits
from runner_api import INTEGER_FIELDS, Capability, ModelRunnerOutput, PlanError, SamplingParams, StepRecord
from runner_api.errors import safely
from runner_api.plan_types import is_integer
from runner_api.record_check import readable

# How far the exact logit of the runner's winner may exceed that of the recorded token. The recorded program attended
# with TF32 products (10 bits of mantissa): its logits are off the exact ones by up to 0.04. Scores, which are logits
# behind a repetition penalty and the temperature, move by as much more as these make of it.
NEAR_TIE = 0.05
# A near tie must have been one for the recorded program too: each of the two logits moved by at most 0.04, so its own
# margin cannot exceed this. Keeps a runner with flat logits from calling every token a near tie.
NEAR_TIE_MARGIN = NEAR_TIE + 2 * 0.04

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
    """What one replay found.

    layout, selection: of the runner's rows, and why it has that one. fields: name to (equal, different) elements;
    tokens: how each drawn token was judged; launches: kernel launches of the runner during the replay, by kernel (empty
    for a runner without kernels).
    """

    recording: str
    runner: str
    model: str
    layout: str = ""
    selection: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    fields: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=lambda: {"equal": 0, "near_tie": 0, "different": 0})
    first_divergence: Divergence | None = None
    launches: dict[str, int] = field(default_factory=dict)
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
            "layout": self.layout,
            "selection": self.selection,
            "steps": self.steps,
            "fields": {n: {"equal": e, "different": d} for n, (e, d) in self.fields.items()},
            "tokens": self.tokens,
            "first_divergence": None if self.first_divergence is None else self.first_divergence.to_json(),
            "verdict": self.verdict,
            "launches": self.launches,
            "notes": self.notes,
        }


class StepJudge:
    """Holds one step after the other against the recording and adds what it finds to the report."""

    def __init__(self, setup: Setup, report: RecordingReport) -> None:
        self.setup = setup
        self.report = report
        self._params: dict[str, SamplingParams] = {}
        self._certifier = Certifier(setup.config)

    def admit(self, record: StepRecord) -> None:
        """Remember how the step's new requests want to be sampled."""
        self._certifier.observe(record.plan)
        for new in record.plan.scheduled_new_reqs:
            self._params[new.req_id] = new.sampling_params or GREEDY

    def compare(self, number: int, expected: StepRecord, given: Any, output: Any) -> None:
        """One step: its fields in the order in which they are computed, its output, tokens, log probabilities.

        given, output: what `last_step` and `get_output` (or `execute_model`, in a step without tokens) returned.
        """
        got, faults = readable(given)
        if expected.num_reqs == 0:
            self._compare_output(number, expected, (), output)
            return
        if got is None:
            self.report.diverge(number, Difference("record", (), None, None, "a StepRecord", faults["record"]))
            got = StepRecord(expected.plan, **dict.fromkeys((*INTEGER_FIELDS, "token_ids")))
        self._explain(number, faults)
        for name in INTEGER_FIELDS:
            # None alone is a field that this recording does not hold.
            if getattr(expected, name) is not None:
                self.report.add(number, compare_field(name, expected, got))
        self._compare_output(number, expected, got.req_ids, output)
        if not self.setup.judge_tokens:
            return
        self._judge_tokens(number, expected, got)
        self._certifier.take(expected.tokens())
        wanted = [self._params.get(r, GREEDY).logprobs for r in expected.req_ids]
        for name in LOGPROB_FIELDS:
            if getattr(expected, name) is not None:
                self.report.add(number, compare_logprobs(name, expected, got, wanted, exact=self.setup.recorded_logits))

    def failed(self, number: int, record: StepRecord, stage: str, error: BaseException) -> None:
        """The runner could not take a step that the recorded program took: a divergence that ends the replay.

        stage: the call that raised.
        """
        name, req_id, text = stage, None, f"{type(error).__name__}: {safely(str, error)}"
        if isinstance(error, PlanError):
            name, req_id, text = (error.field or name).removeprefix("forced."), error.req_id, str(error)
        expected: Any = "the recorded step to be accepted"
        if name == "num_sampled":  # which row, the runner does not say
            expected = record.num_sampled.tolist()
            self.report.fields.setdefault(name, [0, 0])[1] += 1
        log.debug("step %d failed", number, exc_info=error)
        self.report.diverge(number, Difference(name, (), req_id, None, expected, text))
        self.report.notes.append(f"ended at step {number}: the runner did not take it ({text})")

    def _explain(self, number: int, faults: Mapping[str, str]) -> None:
        """Say once what is wrong with a field that cannot be read; a whole replay of it would say nothing new."""
        for name, fault in faults.items():
            known = f"{name} cannot be read: "
            if not any(known in note for note in self.report.notes):
                self.report.notes.append(f"step {number}: {known}{fault}")

    def _compare_output(self, number: int, expected: StepRecord, req_ids: tuple[str, ...] | None, output: Any) -> None:
        """One element a request: its id, at its place in the runner's own batch, and the tokens that were imposed."""
        same_batch = req_ids is not None and len(req_ids) == expected.num_reqs
        ids = req_ids if same_batch and req_ids is not None else expected.req_ids
        wanted = list(zip(ids, expected.tokens().values(), strict=True))
        given = _pairs(output)
        if given is None:
            what = Difference("output", (), None, None, "a ModelRunnerOutput", type(output).__name__)
            self.report.add(number, FieldComparison("output", 0, max(len(wanted), 1), what))
            return
        longest = max(len(wanted), len(given))
        wrong = [i for i in range(longest) if wanted[i : i + 1] != given[i : i + 1]]
        first = None
        if wrong:
            i = wrong[0]
            pair = tuple(side[i] if i < len(side) else None for side in (wanted, given))
            owner = wanted[i][0] if i < len(wanted) else None
            first = Difference("output", (i,), owner, None, *pair)
        self.report.add(number, FieldComparison("output", longest - len(wrong), len(wrong), first))

    def _judge_tokens(self, number: int, expected: StepRecord, got: StepRecord) -> None:
        own: Any = got.token_ids
        draws: list[list[ExactDraw]] | None = None
        for i in np.flatnonzero(expected.num_sampled > 0).tolist():
            recorded = int(expected.token_ids[i, 0])
            drawn = int(own[i, 0]) if own is not None and i < len(own) and own.shape[1] else None
            kind = "equal"
            if drawn != recorded:
                draws = self._exact_draws(expected, got) if draws is None else draws
                explained = bool(draws) and self._is_near_tie(i, recorded, drawn, expected, draws[i][0])
                kind = "near_tie" if explained else "different"
            self.report.tokens[kind] += 1
            if kind == "different":
                # The token drawn after logits row i: this only runs without drafts, one logits row a request.
                req_id, at = owner_of("logits_indices", (i,), expected)
                position = None if at is None else at + 1
                self.report.diverge(number, Difference("token_ids", (i, 0), req_id, position, recorded, drawn))

    def _exact_draws(self, expected: StepRecord, got: StepRecord) -> list[list[ExactDraw]]:
        """What follows from the logits that the runner drew from; empty where it does not give them, or where the
        recorded batch makes no sense."""
        logits: Any = got.logits
        if self.setup.recorded_logits:
            logits = step_logits(self.setup.logits, expected, self.report.recording)
        rows, known = expected.logits_indices, self._certifier.requests
        if logits is None or not set(expected.req_ids) <= known.keys():
            return []
        if len(logits) != len(rows) or (np.diff(expected.cu_num_logits) != 1).any():
            return []
        if rows.min() < 0 or rows.max() >= expected.num_tokens:
            return []
        return self._certifier.draws(expected, logits)

    def _is_near_tie(self, i: int, recorded: int, drawn: int | None, expected: StepRecord, draw: ExactDraw) -> bool:
        """Can rounding explain that row i drew another token than the recorded program did?"""
        # 1 the runner's token follows from its own logits
        if drawn is None or draw.certify(drawn).verdict == DIVERGENCE:
            return False
        # 2 on the recorded logits the recorded one does so, too: nothing but the sampler's rounding lies between them
        if self.setup.recorded_logits:
            return draw.certify(recorded).verdict != DIVERGENCE
        # 3 otherwise the recorded program's logits were off
        params = self._params.get(expected.req_ids[i], GREEDY)
        plain = params.greedy and not params.required_capabilities() - {Capability.LOGPROBS, Capability.PROMPT_LOGPROBS}
        margin = expected.extra["top2_margin"][i] if "top2_margin" in expected.extra else None
        if plain and margin is not None and margin > NEAR_TIE_MARGIN:
            return False
        if not 0 <= recorded < len(draw.scores) or not (params.greedy or draw.sets.kept[recorded]):
            return False
        bound = NEAR_TIE * max(1.0, params.repetition_penalty) / (params.temperature or 1.0)
        return bool(draw.scores[drawn] - draw.scores[recorded] <= bound)


def _pairs(output: Any) -> list[tuple[str, tuple[int, ...]]] | None:
    """(request, its tokens) of an output; None for one that cannot be read."""
    if not isinstance(output, ModelRunnerOutput):
        return None
    try:
        pairs = [(r, tuple(tokens)) for r, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True)]
    except (TypeError, ValueError):
        return None
    return pairs if all(is_integer(t) for _, tokens in pairs for t in tokens) else None
