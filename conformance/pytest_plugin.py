"""pytest judges a runner: `pytest --pyargs conformance.suite --runner NAME`, or your own tests beside it.

Nothing happens unless `--runner` is given. Then the header says who is judged, the fixture `runner_under_test` is its
factory, and a test marked `@clause("MR-SLOT-001")` is skipped, with the reason, where that clause does not apply. A run
in which no test passes is a failure, whatever it skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conformance.pytest_session import RunnerSession

LAYOUTS = ("slots", "dense")  # `runner_api.config.LAYOUTS`: a run that judges no runner imports nothing of it
MARKER = "clause(*ids): the clauses of modelrunner that a test is about; see `modelrunner clauses`"
OTHERS = ("layout", "oracle", "seed", "rounds", "expectations", "report")  # options that say nothing without --runner
_NAME = "modelrunner_session"


def clause(*ids: str) -> pytest.MarkDecorator:
    """Mark a test as one of these clauses. An unknown id raises UnknownNameError, which pytest reports as an error of
    the file's collection."""
    from conformance.clauses import clause as known

    return pytest.mark.clause(*(known(clause_id).id for clause_id in ids))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("modelrunner", "conformance of a model runner")
    group.addoption("--runner", metavar="RUNNER", help="judge this runner: a name, module:factory, process:COMMAND …")
    group.addoption("--runner-layout", choices=LAYOUTS, help="of the runner's rows (default: its own choice)")
    group.addoption("--runner-oracle", metavar="ORACLE", help="the runner to compare with (default: cpu)")
    group.addoption("--runner-seed", type=int, metavar="N", help="seed of the generated plans (default: 0)")
    group.addoption("--runner-rounds", type=int, metavar="N", help="N times as many generated plans (default: 1)")
    group.addoption("--runner-expectations", metavar="FILE", help="clauses that are known to fail (TOML)")
    group.addoption("--runner-report", metavar="FILE", help="write a report, as modelrunner check --report does")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    given = [o for o in OTHERS if _option(config, f"runner_{o}") is not None]
    if _option(config, "runner") is None:
        if given:
            raise pytest.UsageError(f"--runner-{given[0]} needs --runner")
        return
    from conformance.pytest_session import RunnerSession
    from runner_api import RunnerError

    rounds = _option(config, "runner_rounds")
    try:
        session = RunnerSession(
            config, _option(config, "runner"), _option(config, "runner_layout"),
            _option(config, "runner_oracle") or "cpu", _option(config, "runner_seed") or 0,
            1 if rounds is None else rounds,
            _option(config, "runner_expectations"), _option(config, "runner_report"),
        )  # fmt: skip
    except RunnerError as e:
        raise pytest.UsageError(str(e)) from e
    config.pluginmanager.register(session, _NAME)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Marks that were not made by `clause` are checked here."""
    if not any(item.get_closest_marker("clause") for item in items):
        return
    from conformance.clauses import clause as known
    from runner_api import RunnerError

    for item in items:
        for clause_id in marked(item):
            try:
                known(clause_id)
            except RunnerError as e:
                raise pytest.UsageError(f"{item.nodeid}: {e}") from e


def marked(item: pytest.Item) -> list[str]:
    """The clauses that a test is marked with."""
    return [clause_id for mark in item.iter_markers("clause") for clause_id in mark.args]


@pytest.fixture(scope="session")
def runner_session(pytestconfig: pytest.Config) -> RunnerSession:
    """The judged runner, and what came of it."""
    session = pytestconfig.pluginmanager.get_plugin(_NAME)
    if session is None:
        pytest.fail("no runner to judge: give --runner NAME on the command line, or in addopts", pytrace=False)
    return session


@pytest.fixture(scope="session")
def runner_under_test(runner_session: RunnerSession) -> Any:
    """The factory of the judged runner: `runner_under_test(config)` builds one."""
    return runner_session.factory


def _option(config: pytest.Config, name: str) -> Any:
    return config.getoption(name, default=None)
