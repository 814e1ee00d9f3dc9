"""Two runners on the same plans, step by step; the first element in which they differ ends the run.

The candidate draws, the oracle follows: it takes the candidate's tokens, so that one near tie does not part their
ways. Integers are compared exactly, in the order in which a step computes them. Tokens are exact too, except where
logits are rounded and the certificate of `TokenPolicy` says that rounding explains the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from conformance.comparison import Difference, compare_field
from conformance.report import batch_table
from runner_api import (
    INTEGER_FIELDS,
    BatchDescriptor,
    ForcedStep,
    ModelRunner,
    PlanError,
    SchedulerOutput,
    StepRecord,
)
from runner_api.record_check import readable

AGREE, DIVERGE = "AGREE", "DIVERGE"


class DenseRun(Protocol):
    """An independent computation of a step's logits (conformance/dense.py)."""

    def observe(self, plan: SchedulerOutput) -> None: ...

    def logits(self, record: StepRecord) -> np.ndarray:
        """float[L, V]; asked once for each step with a batch."""
        ...


@dataclass(frozen=True, slots=True)
class TokenPolicy:
    """When two runners may differ in logits and tokens.

    With `exact` (models of integers) they may not. Otherwise two rules hold, row by row. A logit may be off by at most
    `relative` times the row's largest |logit|; where `dense` is given (half precision), by at most `factor` times the
    error of that independent run. A token may be another one if the oracle itself scores the two nearly alike: its
    own token leads by at most twice the row's largest logit error (divided by the temperature, as the scores are).
    """

    exact: bool = True
    relative: float = 1e-4
    factor: float = 4.0
    dense: DenseRun | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two runners part: the step, the element, and the candidate's batch with that cell marked."""

    step: int
    difference: Difference
    table: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.difference}\n{self.table}"


@dataclass(slots=True)
class LockstepResult:
    """What was compared. `first` is the first divergence, None while the runners agree."""

    steps: int = 0
    fields: int = 0
    elements: int = 0
    tokens: int = 0
    near_ties: int = 0
    largest_logit_error: float = 0.0  # relative to the row's largest |logit|
    first: Divergence | None = None

    @property
    def verdict(self) -> str:
        """AGREE needs at least one step."""
        return AGREE if self.first is None and self.steps else DIVERGE

    def line(self) -> str:
        """One line: the verdict and what it rests on."""
        text = (
            f"verdict: {self.verdict} steps={self.steps} fields={self.fields} elements={self.elements} "
            f"tokens={self.tokens} near_ties={self.near_ties}"
        )
        return text if self.first is None else f"{text} first={self.first.difference}"


@dataclass(eq=False)
class Lockstep:
    """Run `candidate` and `oracle` side by side. Both must be ready for plans and built alike.

    lag: 0 takes each step's output at once, 1 takes it after the next step was queued. With a policy that is not
    exact both runners must record logits (`RunnerConfig.record`).
    """

    candidate: ModelRunner
    oracle: ModelRunner
    policy: TokenPolicy = TokenPolicy()
    lag: int = 0
    result: LockstepResult = field(default_factory=LockstepResult)

    def __post_init__(self) -> None:
        self._late: tuple[int, Any, StepRecord] | None = None
        self._temperature: dict[str, float] = {}

    def step(
        self, plan: SchedulerOutput, descriptor: BatchDescriptor | None = None, forced: ForcedStep | None = None
    ) -> StepRecord | None:
        """One plan on both. The oracle's record, whose tokens are those that entered both states; None once the
        runners have diverged. `forced` is imposed on both (batches with drafts)."""
        if self.result.first is not None:
            return None
        number = self.result.steps
        if self.policy.dense is not None:
            self.policy.dense.observe(plan)
        for new in plan.scheduled_new_reqs:
            self._temperature[new.req_id] = new.sampling_params.temperature if new.sampling_params else 0.0
        try:
            given, handle = _run(self.candidate, plan, descriptor, forced)
        except Exception as e:  # a crash on a legal plan is a divergence, and the report must say where
            error = Difference("execute_model", (), None, None, "a step", f"{type(e).__name__}: {e}")
            self.result.first = Divergence(number, error, "")
            return None
        self._take_late_output()
        if self.result.first is not None:
            return None
        record, faults = readable(given)
        reference = self._follow(plan, descriptor, forced, None if faults else record)
        self.result.steps += 1
        if record is None:
            wrong = Difference("record", (), None, None, "a StepRecord", faults["record"])
            self.result.first = Divergence(number, wrong, "")
            return None
        self._compare(number, reference, record, faults)
        if reference.num_reqs and self.result.first is None:
            self._late = (number, handle, record)
            if not self.lag:
                self._take_late_output()
        return None if self.result.first is not None else reference

    def finish(self) -> LockstepResult:
        """Take the last output and give the result."""
        if self.result.first is None:
            self._take_late_output()
        return self.result

    # -- internals --------------------------------------------------------------------------------------------

    def _follow(
        self,
        plan: SchedulerOutput,
        descriptor: BatchDescriptor | None,
        forced: ForcedStep | None,
        record: StepRecord | None,
    ) -> StepRecord:
        """The oracle's step. record: the candidate's, None if it cannot be read."""
        if self.oracle.execute_model(plan, descriptor=descriptor) is None:
            # An outcome that no right runner can have drawn is not followed: the oracle draws itself, and the
            # comparison shows the difference. In another batch order the outcome would mean something else.
            imposed = forced
            if record is not None and record.req_ids == self.oracle.last_step().req_ids:
                imposed = forced or ForcedStep(record.token_ids, record.num_sampled)
            try:
                self.oracle.sample_tokens(forced=imposed)
            except PlanError:
                self.oracle.sample_tokens()
        return self.oracle.last_step()

    def _compare(self, number: int, reference: StepRecord, record: StepRecord, faults: Mapping[str, str]) -> None:
        """faults: fields of the candidate's record that cannot be read (and are None in `record`)."""
        result = self.result
        for name in INTEGER_FIELDS:
            found = compare_field(name, reference, record)
            result.fields += 1
            result.elements += found.equal + found.different
            difference = found.first
            if difference is not None and name in faults:
                difference = replace(difference, got=faults[name])
            if difference is not None:
                result.first = Divergence(number, difference, "" if faults else batch_table(record, difference))
                return
        if not reference.num_reqs:
            return
        difference = (
            self._compare_shapes(reference, record, faults)
            or self._compare_logits(reference, record)
            or self._compare_tokens(reference, record)
        )
        if difference is not None:
            result.first = Divergence(number, difference, "" if faults else batch_table(record, difference))

    def _compare_shapes(
        self, reference: StepRecord, record: StepRecord, faults: Mapping[str, str]
    ) -> Difference | None:
        """Whatever else cannot be read, and arrays of values that do not fit the batch."""
        for name, fault in faults.items():
            return Difference(name, (), None, None, "a field that can be read", fault)
        for name in ("token_ids", "logits"):
            left, right = getattr(reference, name), getattr(record, name)
            if left is not None and right is not None and left.shape != right.shape:
                return Difference(name, (), None, None, f"shape {left.shape}", f"shape {right.shape}")
        if reference.logits is not None and record.logits is None and not self.policy.exact:
            return Difference("logits", (), None, None, "the logits asked for", None)
        return None

    def _logit_errors(self, reference: StepRecord, record: StepRecord) -> np.ndarray | None:
        """float64[L] largest |difference| of each logits row; None where a side does not record logits."""
        if reference.logits is None or record.logits is None:
            return None
        return np.abs(record.logits.astype(np.float64) - reference.logits).max(axis=1)

    def _compare_logits(self, reference: StepRecord, record: StepRecord) -> Difference | None:
        if self.policy.exact:
            return None
        errors = self._logit_errors(reference, record)
        if errors is None:
            return None
        largest = np.abs(reference.logits).max(axis=1)
        self.result.largest_logit_error = max(self.result.largest_logit_error, float((errors / largest).max()))
        if self.policy.dense is not None:
            dense = np.abs(self.policy.dense.logits(record).astype(np.float64) - reference.logits).max(axis=1)
            bound = self.policy.factor * dense
        else:
            bound = self.policy.relative * largest
        # NaN must count as beyond every bound
        wrong = np.flatnonzero(~(errors <= bound))
        if not len(wrong):
            return None
        j = int(wrong[0])
        i = int(np.searchsorted(reference.cu_num_logits[1:], j, side="right"))
        position = int(reference.positions[reference.logits_indices[j]])
        expected = f"error at most {bound[j]:.3g}"
        return Difference("logits", (j,), reference.req_ids[i], position, expected, f"error {errors[j]:.3g}")

    def _compare_tokens(self, reference: StepRecord, record: StepRecord) -> Difference | None:
        counts = np.diff(reference.cu_num_logits)
        counts = np.where(reference.num_sampled > 0, counts, 0)
        drawn = np.arange(reference.token_ids.shape[1])[None, :] < counts[:, None]
        self.result.tokens += int(reference.num_sampled.sum())
        same = record.token_ids == reference.token_ids
        if same[drawn].all():
            return None
        for i, column in np.argwhere(drawn & ~same):
            row = int(reference.cu_num_logits[i]) + int(column)
            own, other = int(reference.token_ids[i, column]), int(record.token_ids[i, column])
            if self._near_tie(reference, record, row, reference.req_ids[i], own, other):
                self.result.near_ties += 1
                continue
            position = int(reference.positions[reference.logits_indices[row]]) + 1
            return Difference("token_ids", (int(i), int(column)), reference.req_ids[i], position, own, other)
        return None

    def _near_tie(self, reference: StepRecord, record: StepRecord, row: int, req_id: str, own: int, other: int) -> bool:
        scores = reference.intermediates.get("scores")
        errors = self._logit_errors(reference, record)
        if self.policy.exact or scores is None or errors is None or not 0 <= other < scores.shape[1]:
            return False
        # Scores are logits over the temperature, plus noise that both sides share.
        temperature = self._temperature.get(req_id, 0.0) or 1.0
        return bool(scores[row, own] - scores[row, other] <= 2.0 * errors[row] / temperature)

    def _take_late_output(self) -> None:
        if self._late is None or self.result.first is not None:
            return
        number, handle, record = self._late
        self._late = None
        taken = record.tokens()
        try:
            output = handle.get_output()
            given = {r: tuple(t) for r, t in zip(output.req_ids, output.sampled_token_ids, strict=True)}
            right = tuple(output.req_ids) == record.req_ids and given == taken
        except Exception as e:  # the candidate's own code and whatever it returned
            error = Difference("sampled_token_ids", (), None, None, "an output", f"{type(e).__name__}: {e}")
            self.result.first = Divergence(number, error, batch_table(record, error))
            return
        if not right:
            wrong = next((r for r in taken if given.get(r) != taken[r]), None)
            index = () if wrong is None else (record.row_of(wrong),)
            difference = Difference(
                "sampled_token_ids", index, wrong, None, taken.get(wrong or "", tuple(taken)),
                given.get(wrong or "", tuple(given)),
            )  # fmt: skip
            self.result.first = Divergence(number, difference, batch_table(record, difference))


def _run(
    runner: ModelRunner, plan: SchedulerOutput, descriptor: BatchDescriptor | None, forced: ForcedStep | None
) -> tuple[Any, Any]:
    """(record, output on its way), as the runner gives them."""
    handle: Any = None
    if runner.execute_model(plan, descriptor=descriptor) is None:
        handle = runner.sample_tokens(forced=forced)
    return runner.last_step(), handle
