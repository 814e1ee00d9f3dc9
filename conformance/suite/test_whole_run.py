"""What is about no clause alone: exceptions, expectations, lockstep, and a search for a plan that breaks anything."""

from __future__ import annotations

import pytest
from hypothesis import settings

from conformance.lockstep_runs import lockstep_on_worlds
from conformance.machine import search
from conformance.outcomes import Outcome
from conformance.probe import RECORDED
from conformance.profiles import PROFILES
from conformance.pytest_session import RunnerSession

LOCKSTEP_STEPS = 200
# The same plans in every run.
SEARCH = settings(PROFILES["dev"], derandomize=True, database=None)


def test_no_exception_where_none_is_due(runner_session: RunnerSession) -> None:
    errors = runner_session.results.errors
    if errors:
        pytest.fail("\n".join(f"{e.where}: {e.error}" for e in errors), pytrace=False)


def test_expectations_come_true(runner_session: RunnerSession) -> None:
    if not runner_session.expectations:
        pytest.skip("no --runner-expectations")
    faults = runner_session.results.expectation_faults
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


def test_lockstep(runner_session: RunnerSession) -> None:
    _ready(runner_session)
    result = lockstep_on_worlds(runner_session.factory, runner_session.oracle, LOCKSTEP_STEPS, runner_session.seed)
    if result.first is not None:
        pytest.fail(f"diverges from the oracle: {result.first}", pytrace=False)


def test_search(runner_session: RunnerSession) -> None:
    """Hypothesis looks for plans that break a clause, and shrinks them."""
    _ready(runner_session)
    search(runner_session.factory, SEARCH, oracle=runner_session.oracle)


def _ready(session: RunnerSession) -> None:
    """Skip what must diverge: a runner without records, and one of which faults are known."""
    session.need(*RECORDED)
    session.must_be_alive()
    known = session.results.ids(Outcome.XFAIL) if session.expectations else []
    if known:
        pytest.skip(f"clauses are expected to fail, and every run beside the oracle shows it: {', '.join(known)}")
