"""What a probe says of a call that must be refused, and of the state behind it."""

from __future__ import annotations

import pytest

from conformance.refusals import ACCEPTED, changed_parts, refusal
from runner_api import CallOrderError, PlanError


class Mute(Exception):
    """As foreign code may raise it: without a text."""

    def __repr__(self) -> str:
        raise ValueError


def raising(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PlanError("no", code="MR-ERR-022"), None),
        (PlanError("no", code="MR-ERR-020"), ("MR-ERR-101", "code", None, "MR-ERR-020", "MR-ERR-022")),
        (KeyError("a"), ("MR-ERR-022", "execute_model", "a", "KeyError('a')", "PlanError")),
        (Mute(), ("MR-ERR-022", "execute_model", "a", "<Mute without a text>", "PlanError")),
    ],
)
def test_a_refusal_has_its_own_code_and_a_crash_is_none(error: Exception, told: tuple[object, ...] | None) -> None:
    found = refusal(lambda: raising(error), "MR-ERR-022", "execute_model", "a")
    assert [(m.clause_id, m.field, m.req_id, m.got, m.expected) for m in found] == ([told] if told else [])


def test_another_refusal_is_a_crash_too() -> None:
    (found,) = refusal(lambda: raising(CallOrderError("no")), "MR-ERR-022", "execute_model")
    assert found.clause_id == "MR-ERR-022"
    assert found.req_id is None


def test_what_is_accepted_is_told() -> None:
    (found,) = refusal(lambda: 5, "MR-ERR-022", "execute_model", "a")
    assert (found.clause_id, found.got) == ("MR-ERR-022", ACCEPTED)


def test_parts_that_came_went_or_changed() -> None:
    before, after = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"}
    assert changed_parts(before, after) == changed_parts(after, before) == ["b", "c", "d"]
    assert changed_parts(before, dict(before)) == []
