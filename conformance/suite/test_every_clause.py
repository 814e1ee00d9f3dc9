"""One item per clause; the evaluation behind them is shared."""

from __future__ import annotations

import pytest

from conformance.clauses import load_clauses
from conformance.pytest_plugin import clause
from conformance.pytest_session import RunnerSession


@pytest.mark.parametrize("clause_id", [pytest.param(c, marks=clause(c), id=c) for c in load_clauses()])
def test_clause(clause_id: str, runner_session: RunnerSession) -> None:
    runner_session.hold(clause_id)
