"""What became of each clause, and what the whole run comes to.

PASS and FAIL are what the tests say. ERROR: the tests of the clause ended in an exception, which is told apart from a
wrong result. SKIP: the runner does not offer what the clause needs. UNTESTED: it applies, and nothing put it to the
test (its reason says so if that is because another clause failed first). XFAIL: it fails as an expectations file said
it would. XPASS: it does not fail though the file said so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from conformance.clauses import Clause, load_clauses
from conformance.evaluate import APART, CONSEQUENCES, FIRST, WORLD_CLAUSES
from conformance.evaluation import Evaluation, EvaluationError

if TYPE_CHECKING:
    from conformance.expectations import Expectation


class Outcome(StrEnum):
    """See above. `value` is what reports say."""

    PASS = "pass"
    FAIL = "fail"
    ERROR = "error"
    SKIP = "skip"
    XFAIL = "xfail"
    XPASS = "xpass"
    UNTESTED = "untested"


# Clauses by the order in which laws are asked: where one fails, those of later turns are not asked.
_FIRST, _LAST = (frozenset(law.clause_id for law in laws) for laws in (FIRST, CONSEQUENCES))
TURNS = (_FIRST, WORLD_CLAUSES - _FIRST - _LAST, _LAST)
# What no MUST may come to.
BAD = (Outcome.FAIL, Outcome.ERROR, Outcome.UNTESTED)


@dataclass(frozen=True, slots=True)
class ClauseResult:
    """One clause. first: the first mismatch in words, or the exception. reason: why it was skipped, not asked, or
    expected to fail."""

    clause: Clause
    outcome: Outcome
    evaluations: int = 0
    reason: str | None = None
    first: str | None = None
    issue: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome.value, "evaluations": self.evaluations, "reason": self.reason, "first": self.first,
            "issue": self.issue,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Results:
    """Every clause of the run by id, in the order of the file; exceptions that no expectation covers; and `faults`: why
    the run is no pass, one sentence each (none: it is one). notes: what else a reader should know."""

    clauses: Mapping[str, ClauseResult]
    errors: tuple[EvaluationError, ...]
    faults: tuple[str, ...]
    notes: tuple[str, ...] = ()
    expectation_faults: tuple[str, ...] = ()  # those of `faults` that tell of expectations that did not come true

    @property
    def passed(self) -> bool:
        return not self.faults

    def ids(self, *outcomes: Outcome) -> list[str]:
        """The clauses that came to one of these."""
        return [c for c, result in self.clauses.items() if result.outcome in outcomes]

    def areas(self) -> dict[str, dict[str, Any]]:
        """Area to {must: [passed, asked], should: [passed, asked], skipped}; an expected failure has not passed."""
        found: dict[str, dict[str, Any]] = {}
        for result in self.clauses.values():
            area = found.setdefault(result.clause.area, {"must": [0, 0], "should": [0, 0], "skipped": 0})
            if result.outcome == Outcome.SKIP:
                area["skipped"] += 1
            elif result.clause.level != "MAY":
                area[result.clause.level.lower()][0] += result.outcome in (Outcome.PASS, Outcome.XPASS)
                area[result.clause.level.lower()][1] += 1
        return found


def results_of(evaluation: Evaluation, expectations: Iterable[Expectation] = (), today: date | None = None) -> Results:
    """What an evaluation comes to, in the light of what was expected of this runner. today: for `until`."""
    found = {
        c.id: _result(c, evaluation)
        for c in load_clauses().values()
        if evaluation.selected is None or c.id in evaluation.selected
    }
    faults: list[str] = []
    notes = [f"stages that no clause speaks of: {', '.join(evaluation.unjudged_stages)}"] * bool(
        evaluation.unjudged_stages
    )
    for e in expectations:
        if not e.applies(evaluation.info):
            notes.append(f"expectation for {e.clause} does not apply here: {e.when_text()}")
        elif e.clause in found:
            found[e.clause], fault = e.judge(found[e.clause], today or date.today())
            faults += [fault] if fault else []
    expected = {c for c, result in found.items() if result.outcome == Outcome.XFAIL}
    errors = tuple(e for e in evaluation.errors if not (e.clauses and e.clauses & found.keys() <= expected))
    results = Results(found, errors, (), tuple(notes))
    return replace(results, faults=(*_faults(results), *faults), expectation_faults=tuple(faults))


def _result(c: Clause, e: Evaluation) -> ClauseResult:
    if c.id in e.skipped:
        return ClauseResult(c, Outcome.SKIP, reason="not offered: " + ", ".join(e.skipped[c.id]))
    mismatches, evaluations = e.by_clause.get(c.id), e.tested[c.id]
    if mismatches:
        return ClauseResult(c, Outcome.FAIL, evaluations, first=str(mismatches[0]))
    # A probe that raised has not asked all that it wanted to; a world only if the clause was never asked at all.
    raised = [x for x in e.errors if c.id in x.clauses or (not x.clauses and not evaluations)]
    if raised:
        return ClauseResult(c, Outcome.ERROR, evaluations, first=f"{raised[0].where}: {raised[0].error}")
    if evaluations:
        return ClauseResult(c, Outcome.PASS, evaluations)
    return ClauseResult(c, Outcome.UNTESTED, reason=_behind(c.id, e))


def _behind(clause_id: str, e: Evaluation) -> str | None:
    """Why worlds could not ask a clause: a law that is asked before it has failed. None: for no such reason."""
    turn = _turn(clause_id)
    failed = [c for c in e.failed if c not in APART]
    before = [] if turn is None else [c for c in failed if (other := _turn(c)) is not None and other < turn]
    return f"asked only where {before[0]} holds" if before else None


def _turn(clause_id: str) -> int | None:
    """When laws of worlds are asked: 0 first, 1 causes, 2 consequences; None: worlds do not test it."""
    return next((n for n, laws in enumerate(TURNS) if clause_id in laws), None)


def _faults(results: Results) -> list[str]:
    must = dict.fromkeys(BAD, 0)
    for result in results.clauses.values():
        # What was not asked because of a failure is no fault of its own.
        behind = result.outcome == Outcome.UNTESTED and result.reason is not None
        if result.outcome in BAD and result.clause.level == "MUST" and not behind:
            must[result.outcome] += 1
    words = {Outcome.FAIL: "failed", Outcome.ERROR: "ended in an exception", Outcome.UNTESTED: "nothing tested"}
    found = [f"{n} MUST {'clause' if n == 1 else 'clauses'} {words[outcome]}" for outcome, n in must.items() if n]
    if results.errors:
        n = len(results.errors)
        found.append(f"{n} {'exception' if n == 1 else 'exceptions'} where none was due")
    if not results.ids(Outcome.PASS, Outcome.XPASS):
        found.append(_why_nothing(results))
    return found


def _why_nothing(results: Results) -> str:
    """No clause has passed: a run in which all is skipped, expected to fail or broken shows nothing."""
    if not results.clauses:
        return "no clause was asked"
    counts = {o: len(results.ids(o)) for o in Outcome if results.ids(o)}
    told = ", ".join(f"{n} {outcome.value}" for outcome, n in counts.items())
    return f"no clause has passed ({told}): nothing was shown to be right"
