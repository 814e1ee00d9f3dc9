"""The first thing that goes wrong in a step, in the order in which a step computes.

All laws look at every step; of those that fail, the one whose field is computed first is the cause and is reported.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from conformance.clauses import clause
from conformance.context import Mismatch
from conformance.driver import WorldSize
from conformance.evaluate import StepJudge, record_parts
from conformance.foreign import PlanChanged
from conformance.harness import build_runner
from conformance.laws import LAWS
from conformance.planned_step import PlannedStep
from runner_api import (
    INTEGER_FIELDS,
    Capability,
    ForcedStep,
    ModelRunnerOutput,
    RunnerError,
    SamplingParams,
    SchedulerOutput,
    StepRecord,
)
from runner_api.errors import safely
from runner_api.protocol import RunnerFactory

_BUILT = INTEGER_FIELDS[: INTEGER_FIELDS.index("num_sampled")]
# Fields of records and outputs, in the order in which a step computes them.
STAGE_ORDER = (
    "num_reqs", "num_tokens", "num_reqs_padded", "num_tokens_padded", *_BUILT, "draft_token_ids", "kv", "logits",
    "seeds", "token_ids", "faults", "num_sampled", "num_rejected", "logprobs", "ranks", "prompt_logprobs",
    "sampled_token_ids",
)  # fmt: skip
# Of clauses that speak of one field these say more than the others, the first ones most: what brought a row to its
# place, which parameter was broken.
_TELLING = (
    "MR-DENSE-001", "MR-DENSE-007", "MR-DENSE-006", "MR-SAMPLE-008", "MR-SAMPLE-009", "MR-SAMPLE-010",
)  # fmt: skip
OTHER_TOKENS = "the tokens are not the oracle's"


@dataclass(frozen=True, slots=True)
class Failure:
    """What failed first. clause_id is None for an exception (`error`), and where only the tokens differ."""

    step: int
    clause_id: str | None
    mismatch: Mismatch | None = None
    error: str | None = None
    traceback: str | None = None
    record: StepRecord | None = None
    reference: StepRecord | None = None
    output: ModelRunnerOutput | None = None

    @property
    def key(self) -> str:
        """Two failures of one key are the same fault as far as anybody can tell."""
        return self.clause_id or (self.error.partition("(")[0] if self.error else OTHER_TOKENS)


class NotLegal(Exception):
    """The oracle refused the plan: it says nothing about the candidate."""


@dataclass(frozen=True, slots=True)
class Sides:
    """Who is judged, against whom, by what. clauses: None for all. quiet: nobody is judged, the oracle runs alone."""

    candidate: RunnerFactory
    oracle: RunnerFactory
    offered: frozenset[Capability]
    clauses: frozenset[str] | None = None
    quiet: bool = False

    def asks(self, clause_id: str) -> bool:
        return (self.clauses is None or clause_id in self.clauses) and not clause(clause_id).missing(self.offered)

    def judge(self, size: WorldSize) -> StepJudge:
        """Fresh runners of both sides. Raises what the candidate's factory raises, and NotLegal if the oracle
        cannot be built."""
        try:
            theirs = replace(size.config, record=size.config.record - {"kv"})
            reference, cache = build_runner(self.oracle, size.model, theirs, size.num_blocks)
        except RunnerError as e:
            raise NotLegal(str(e)) from e
        if self.quiet:
            return QuietJudge(reference, reference, size, cache, self.offered)
        candidate, _ = build_runner(self.candidate, size.model, size.config, size.num_blocks)
        kind = StepJudge if Capability.STEP_RECORD in self.offered else OutputJudge
        return kind(candidate, reference, size, cache, self.offered)

    def parts(self) -> frozenset[str]:
        return record_parts(self.offered)


def first_divergence(found: Mapping[str, Iterable[Mismatch]]) -> Mismatch | None:
    """The mismatch whose field is computed first; of several of one field the most telling clause's.

    What is wrong only in requests that moved is told by the clause about the move; where others are wrong too, the
    move is not the cause.
    """
    every = [m for mismatches in found.values() for m in mismatches]
    if not every:
        return None
    stage = min(map(_stage, every))
    here = [m for m in every if _stage(m) == stage]
    moved = [m for m in here if m.clause_id.startswith("MR-DENSE-")]
    others = [m for m in here if m not in moved]
    if moved and {m.req_id for m in others} <= {m.req_id for m in moved}:
        return min(moved, key=_rank)
    return min(others or moved, key=_rank)


def _stage(m: Mismatch) -> int:
    of_output = m.clause_id.startswith(("MR-OUT-", "MR-ASYNC-"))
    name = "sampled_token_ids" if of_output else m.field
    return STAGE_ORDER.index(name) if name in STAGE_ORDER else len(STAGE_ORDER)


def _rank(m: Mismatch) -> tuple[int, int, str]:
    """Where nothing else decides, laws keep the order in which they are asked."""
    telling = _TELLING.index(m.clause_id) if m.clause_id in _TELLING else len(_TELLING)
    asked = list(LAWS).index(m.clause_id) if m.clause_id in LAWS else -1
    return telling, asked, m.clause_id


def run_step(
    sides: Sides, judge: StepJudge, step: PlannedStep, number: int, keep_blocks: frozenset[int] | None,
    observe: Callable[[StepRecord], None], tested: Counter[str] | None = None,
) -> Failure | None:  # fmt: skip
    """One step on both sides and what failed in it first. Raises NotLegal if the oracle cannot run it.

    keep_blocks: as in `StepJudge.run_candidate`. observe: told the oracle's record before the laws are asked, which
    look at the requests as they are behind the step. tested: counts the clauses that were put to the test.
    """
    error = trace = changed = None
    try:
        judge.run_candidate(step, keep_blocks)
    except PlanChanged as e:  # the step itself was run: what a law says of it comes first
        changed = Failure(number, None, None, _say(e), traceback.format_exc())
    except Exception as e:
        error, trace = _say(e), traceback.format_exc()
    try:
        judge.run_oracle(step)
    except RunnerError as e:
        raise NotLegal(str(e)) from e
    assert judge.reference is not None
    observe(judge.reference)
    if error is not None:
        return Failure(number, None, None, error, trace, None, judge.reference)
    try:
        found = {c: m for c, m in judge.laws(step).items() if sides.asks(c)}
    except Exception as e:
        return Failure(
            number,
            None,
            None,
            f"a record that no law can read: {_say(e)}",
            traceback.format_exc(),
            judge.record,
            judge.reference,
        )
    if tested is not None:
        tested.update(found.keys())
    first = first_divergence(found)
    if first is None and sides.clauses is None:
        first = _other_tokens(judge, step)
    if first is None:
        return changed if sides.clauses is None else None
    output = judge.output_again if first.clause_id == "MR-ASYNC-001" else judge.output
    return Failure(number, first.clause_id or None, first, None, None, judge.record, judge.reference, output)


def _say(e: Exception) -> str:
    return f"{type(e).__name__}({safely(str, e) or 'no text'})"


class OutputJudge(StepJudge):
    """For runners without a record: tokens are all that there is to see."""

    def _whole_step(
        self, plan: SchedulerOutput, step: PlannedStep, keep_blocks: frozenset[int] | None, take_output: bool
    ) -> None:
        self.output = self.output_again = None
        if keep_blocks is not None and Capability.POISON in self.capabilities:
            self.candidate.poison_unused(keep_blocks=keep_blocks | step.blocks_read())
        done = self.candidate.execute_model(plan, descriptor=step.descriptor)
        if done is None:
            done = self.candidate.sample_tokens(step.grammar, forced=step.forced).get_output()
        self.output = self.output_again = done

    def laws(self, step: PlannedStep) -> dict[str, list[Mismatch]]:
        return {}

    def _candidates_tokens(self, step: PlannedStep) -> ForcedStep | None:
        try:
            given = {r: tuple(map(int, t)) for r, t in self.output.tokens().items()}
        except Exception:  # an output that cannot be read has no outcome to follow
            return None
        rows, width = len(step.truth.order), 1 + self.size.config.num_speculative_tokens
        token_ids, num_sampled = np.zeros((rows, width), np.int64), np.zeros(rows, np.int32)
        for i, req_id in enumerate(step.truth.order):
            tokens, due = given.get(req_id, ()), int(step.truth.requests[req_id].samples)
            if len(tokens) != due or not all(0 <= t < self.size.model.vocab_size for t in tokens):
                return None
            token_ids[i, :due], num_sampled[i] = tokens, due
        return ForcedStep(token_ids, num_sampled)


class QuietJudge(StepJudge):
    """The oracle makes the tokens that plans go on with; nobody is judged."""

    def run_candidate(self, step: PlannedStep, keep_blocks: frozenset[int] | None, *, take_output: bool = True) -> None:
        self.record = self.output = self.output_again = None

    def laws(self, step: PlannedStep) -> dict[str, list[Mismatch]]:
        return {}


def _other_tokens(judge: StepJudge, step: PlannedStep) -> Mismatch | None:
    """A greedy request whose token is not the oracle's, where no law could say why: the candidate hides its logits.
    Where nothing was imposed it is not the argmax of the witness model, which is a clause.

    Seeded draws may differ by the rounding of their noise, which without logits nobody can tell from a fault.
    """
    reference, output = judge.reference, judge.output
    if reference is None or output is None or not step.truth.order:
        return None
    given = dict(zip(output.req_ids, output.sampled_token_ids, strict=False))
    own = reference if step.forced is not None else None
    for i, req_id in enumerate(reference.req_ids):
        truth = step.truth.requests[req_id]
        if own is not None:
            wanted = own.tokens()[req_id]
        else:
            wanted = (int(reference.token_ids[i, 0]),) if truth.samples else ()
        if own is None and truth.samples and not _exact(truth.request.params):
            continue
        got = given.get(req_id)
        if got is None or tuple(int(t) for t in got) != wanted:
            clause_id = "MR-OUT-004" if own is None and truth.samples and got is not None else ""
            return Mismatch(clause_id, "sampled_token_ids", req_id, (i,), got, wanted)
    return None


def _exact(params: SamplingParams) -> bool:
    """Whether the draw is the same on every right runner: the greatest of integers."""
    plain = SamplingParams(temperature=0.0)
    rest = ("allowed_token_ids", "logit_bias", "bad_words_token_ids", "thinking_token_budget", "structured_outputs",
            "repetition_penalty", "frequency_penalty", "presence_penalty", "min_tokens",
            "trace_decode_token_ids")  # fmt: skip
    return params.greedy and all(getattr(params, name) == getattr(plain, name) for name in rest)
