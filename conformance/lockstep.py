"""Two runners on the same plans, step by step; the first element in which they differ ends the run.

The candidate draws, the oracle follows: it takes the candidate's tokens, so that one near tie does not part their
ways. Integers are compared exactly, in the order in which a step computes them. Logits have the tolerance of
`TokenPolicy`. Tokens have none of it: each is certified by what follows from the candidate's own logits
(`conformance.certificates`), and near ties, where the rounding of the sampler decides, are counted against a cap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from conformance.certificates import (
    DIVERGENCE,
    NEAR_TIE,
    Certificate,
    Certifier,
    ExactDraw,
    near_tie_cap,
    near_ties_text,
)
from conformance.comparison import Difference, compare_arrays, compare_field
from conformance.foreign import must_be_unchanged, own_copy, staying
from conformance.replay_layout import resumed_as_new
from conformance.report import batch_table
from runner_api import (
    INTEGER_FIELDS,
    AsyncModelRunnerOutput,
    BatchDescriptor,
    Capability,
    ForcedStep,
    GrammarOutput,
    ModelRunner,
    NewRequestData,
    PlanError,
    SchedulerOutput,
    StepRecord,
)
from runner_api.errors import safely
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
    """When two runners may differ in logits, and how many tokens may be near ties.

    With `exact` (models of integers) logits may not differ. Otherwise a logit may be off by at most `relative` times
    the row's largest |logit|; where `dense` is given (half precision), by at most `factor` times the error of that
    independent run. max_near_ties: per token; None: what is to be expected (`certificates.near_tie_cap`).
    """

    exact: bool = True
    relative: float = 1e-4
    factor: float = 4.0
    dense: DenseRun | None = None
    max_near_ties: float | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two runners part: the step, the element, and the candidate's batch with that cell marked.

    certificate: of the token, where a token is what differs.
    """

    step: int
    difference: Difference
    table: str
    certificate: Certificate | None = None

    def __str__(self) -> str:
        why = "" if self.certificate is None else f" ({self.certificate})"
        return f"step {self.step}: {self.difference}{why}\n{self.table}"


@dataclass(slots=True)
class LockstepResult:
    """What was compared. `first` is the first divergence, None while the runners agree."""

    steps: int = 0
    fields: int = 0
    elements: int = 0
    tokens: int = 0
    near_ties: int = 0
    expected_near_ties: float = 0.0
    max_near_ties: float | None = None  # per token, as in `TokenPolicy`
    largest_logit_error: float = 0.0  # relative to the row's largest |logit|
    first: Divergence | None = None

    @property
    def near_tie_cap(self) -> float:
        """More near ties than this are a divergence of their own."""
        return near_tie_cap(self.tokens, self.expected_near_ties, self.max_near_ties)

    @property
    def too_many_near_ties(self) -> bool:
        return self.near_ties > self.near_tie_cap

    @property
    def verdict(self) -> str:
        """AGREE needs at least one step."""
        return AGREE if self.first is None and self.steps and not self.too_many_near_ties else DIVERGE

    def add(self, other: LockstepResult) -> None:
        """Take in another run's counts."""
        for name in ("steps", "fields", "elements", "tokens", "near_ties", "expected_near_ties"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest_logit_error = max(self.largest_logit_error, other.largest_logit_error)
        self.max_near_ties = other.max_near_ties
        self.first = self.first or other.first

    def line(self) -> str:
        """One line: the verdict and what it rests on."""
        text = (
            f"verdict: {self.verdict} steps={self.steps} fields={self.fields} elements={self.elements} "
            f"tokens={self.tokens} "
            + near_ties_text(self.near_ties, self.tokens, self.expected_near_ties, self.near_tie_cap)
        )
        return text if self.first is None else f"{text} first={self.first.difference}"


@dataclass(eq=False)
class Lockstep:
    """Run `candidate` and `oracle` side by side. Both must be ready for plans and built alike.

    lag: 0 takes each step's output at once, 1 takes it after the next step was queued. With a policy that is not
    exact both runners must record logits (`RunnerConfig.record`); with one that is, there are near ties only if the
    oracle does.
    """

    candidate: ModelRunner
    oracle: ModelRunner
    policy: TokenPolicy = TokenPolicy()
    lag: int = 0
    result: LockstepResult = field(default_factory=LockstepResult)

    def __post_init__(self) -> None:
        self._late: tuple[int, Any, StepRecord] | None = None
        self._known: dict[str, NewRequestData] = {}  # live requests as they were announced
        # The oracle's output of the latest step with a batch: the tokens that entered both states.
        self.oracle_output: AsyncModelRunnerOutput | None = None
        self.certifier = Certifier(self.oracle.config, self.candidate.describe().dtype)
        self._reports_faults = Capability.SAMPLE_FAULTS in self.candidate.describe().capabilities
        self.result.max_near_ties = self.policy.max_near_ties

    def step(
        self,
        plan: SchedulerOutput,
        descriptor: BatchDescriptor | None = None,
        forced: ForcedStep | None = None,
        grammar: GrammarOutput | None = None,
    ) -> StepRecord | None:
        """One plan on both. The oracle's record, whose tokens are those that entered both states; None once the
        runners have diverged. `forced` is imposed on both (batches with drafts), `grammar` given to both."""
        if self.result.first is not None:
            return None
        number = self.result.steps
        as_new = self._as_new(plan)
        self.certifier.observe(as_new)
        if self.policy.dense is not None:
            self.policy.dense.observe(as_new)
        try:
            given, handle = _run(self.candidate, plan, descriptor, forced, grammar)
        except Exception as e:  # a crash on a legal plan is a divergence, and the report must say where
            error = Difference("execute_model", (), None, None, "a step", f"{type(e).__name__}: {safely(str, e)}")
            self.result.first = Divergence(number, error, "")
            return None
        self._take_late_output()
        if self.result.first is not None:
            return None
        record, faults = readable(given)
        reference = self._follow(plan, descriptor, forced, grammar, None if faults else record)
        self.result.steps += 1
        if record is None:
            wrong = Difference("record", (), None, None, "a StepRecord", faults["record"])
            self.result.first = Divergence(number, wrong, "")
            return None
        self._compare(number, reference, record, faults, grammar)
        self.certifier.take(reference.tokens())
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

    def _as_new(self, plan: SchedulerOutput) -> SchedulerOutput:
        """To the certifier and to an independent run a resumed request is a new one, whatever the layout."""
        plan_as_new = resumed_as_new(plan, self._known)
        for req_id in plan.finished_req_ids:
            self._known.pop(req_id, None)
        self._known |= {new.req_id: new for new in plan.scheduled_new_reqs}
        return plan_as_new

    def _follow(
        self,
        plan: SchedulerOutput,
        descriptor: BatchDescriptor | None,
        forced: ForcedStep | None,
        grammar: GrammarOutput | None,
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
                self.oracle_output = self.oracle.sample_tokens(grammar, forced=imposed)
            except PlanError:
                self.oracle_output = self.oracle.sample_tokens(grammar)
        return self.oracle.last_step()

    def _compare(
        self,
        number: int,
        reference: StepRecord,
        record: StepRecord,
        faults: Mapping[str, str],
        grammar: GrammarOutput | None,
    ) -> None:
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
        difference = self._compare_shapes(reference, record, faults) or self._compare_logits(reference, record)
        certificate = None
        if difference is None:
            difference, certificate = self._compare_tokens(reference, record, grammar)
        if difference is not None:
            table = "" if faults else batch_table(record, difference)
            result.first = Divergence(number, difference, table, certificate)

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
        errors = self._logit_errors(reference, record)
        if errors is None:
            return None
        if self.policy.exact:
            index = compare_arrays(reference.logits, record.logits)[2]
            return None if index is None else self._logits_differ(reference, index[0], "exactly the oracle's", errors)
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
        return self._logits_differ(reference, j, f"error at most {bound[j]:.3g}", errors)

    @staticmethod
    def _logits_differ(reference: StepRecord, j: int, expected: str, errors: np.ndarray) -> Difference:
        i = int(np.searchsorted(reference.cu_num_logits[1:], j, side="right"))
        position = int(reference.positions[reference.logits_indices[j]])
        return Difference("logits", (j,), reference.req_ids[i], position, expected, f"error {errors[j]:.3g}")

    def _compare_tokens(
        self, reference: StepRecord, record: StepRecord, grammar: GrammarOutput | None
    ) -> tuple[Difference | None, Certificate | None]:
        """Every token that counts: by its certificate, or, in exact runs, where it is not the oracle's."""
        counts = np.where(reference.num_sampled > 0, np.diff(reference.cu_num_logits), 0)
        drawn = np.arange(reference.token_ids.shape[1])[None, :] < counts[:, None]
        self.result.tokens += int(reference.num_sampled.sum())
        same = record.token_ids == reference.token_ids
        if self.policy.exact:
            self.result.expected_near_ties += self.certifier.expected_at_most(reference.req_ids, counts)
            if same[drawn].all():
                return self._compare_faults(reference, record, None), None
        draws = self._exact_draws(reference, record, grammar)
        for i, column in np.argwhere(drawn & ~same if self.policy.exact else drawn):
            own, other = int(reference.token_ids[i, column]), int(record.token_ids[i, column])
            certificate = None
            if draws is not None:
                certificate = draws[i][column].certify(other)
                own = certificate.winner
                self.result.expected_near_ties += 0.0 if self.policy.exact else certificate.expected
                self.result.near_ties += certificate.verdict == NEAR_TIE
            if certificate is None or certificate.verdict == DIVERGENCE:
                row = int(reference.cu_num_logits[i]) + int(column)
                position = int(reference.positions[reference.logits_indices[row]]) + 1
                place = (int(i), int(column))
                return Difference("token_ids", place, reference.req_ids[i], position, own, other), certificate
        return self._compare_faults(reference, record, draws), None

    def _exact_draws(
        self, reference: StepRecord, record: StepRecord, grammar: GrammarOutput | None
    ) -> list[list[ExactDraw]] | None:
        """What follows from the candidate's logits; where logits are exact, the oracle's are the same."""
        logits = reference.logits if self.policy.exact else record.logits
        return None if logits is None else self.certifier.draws(reference, logits, grammar)

    def _compare_faults(
        self, reference: StepRecord, record: StepRecord, draws: list[list[ExactDraw]] | None
    ) -> Difference | None:
        """Each request's first row without a winner: from the candidate's logits, or else as the oracle says."""
        if not self._reports_faults:
            return None
        expected = reference.faults
        if draws is not None:
            expected = np.array([next((int(d.fault) for d in own if d.fault), 0) for own in draws], np.int32)
            expected[reference.num_sampled == 0] = 0
        index = compare_arrays(expected, record.faults)[2]
        if index is None:
            return None
        got = int(record.faults[index]) if index[0] < len(record.faults) else None
        return Difference("faults", index, reference.req_ids[index[0]], None, int(expected[index]), got)

    def _take_late_output(self) -> None:
        if self._late is None or self.result.first is not None:
            return
        number, handle, record = self._late
        self._late = None
        failed = {r for r, fault in zip(record.req_ids, record.faults, strict=False) if fault}
        taken = {r: () if r in failed else tokens for r, tokens in record.tokens().items()}
        try:
            with staying():
                output = handle.get_output()
            given = {r: tuple(t) for r, t in zip(output.req_ids, output.sampled_token_ids, strict=True)}
            right = tuple(output.req_ids) == record.req_ids and given == taken
        except Exception as e:  # the candidate's own code and whatever it returned
            error = Difference(
                "sampled_token_ids", (), None, None, "an output", f"{type(e).__name__}: {safely(str, e)}"
            )
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
    runner: ModelRunner,
    plan: SchedulerOutput,
    descriptor: BatchDescriptor | None,
    forced: ForcedStep | None,
    grammar: GrammarOutput | None,
) -> tuple[Any, Any]:
    """(record, output on its way), as the runner gives them. Raises what it raises, LeftTheProgram and PlanChanged."""
    handle: Any = None
    given = own_copy(plan)
    with staying():
        if runner.execute_model(given, descriptor=descriptor) is None:
            handle = runner.sample_tokens(grammar, forced=forced)
        record = runner.last_step()
    must_be_unchanged(given, plan)
    return record, handle
