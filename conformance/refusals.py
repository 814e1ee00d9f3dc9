"""Calls that a runner must refuse, and what of its state has changed behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from conformance.context import Mismatch
from runner_api import PlanError
from runner_api.errors import safely

ACCEPTED = "accepted"


def refusal(
    call: Callable[[], object], clause_id: str, where: str, req_id: str | None = None, *, accepted: str = ACCEPTED
) -> list[Mismatch]:
    """What is wrong with the answer to a call that must raise PlanError with this clause's id as its code: at most one.

    Another code is MR-ERR-101's. No PlanError is the clause's own: `got` is `accepted`, or the error, which is a
    crash and no refusal.
    """
    try:
        call()
    except PlanError as e:
        return [] if e.code == clause_id else [Mismatch("MR-ERR-101", "code", None, (), e.code, clause_id)]
    except Exception as e:
        return [Mismatch(clause_id, where, req_id, (), safely(repr, e), "PlanError")]
    return [Mismatch(clause_id, where, req_id, (), accepted, "PlanError")]


def changed_parts(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The names under which two fingerprints of a state differ, in order."""
    return sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
