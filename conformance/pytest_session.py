"""One pytest run with `--runner`: who is judged, the evaluation that its items share, and the report."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import pytest

from conformance.clauses import load_clauses
from conformance.evaluate import SEEDS, evaluate
from conformance.expectations import check_applying, load_expectations
from conformance.layouts import in_layout
from conformance.lockstep import AGREE, DIVERGE
from conformance.outcomes import Outcome, Results, results_of
from conformance.pytest_plugin import marked
from conformance.report_file import ReportWriter, footer_of, header_of
from conformance.smoke import ADVICE, smoke
from runner_api import SPEC_VERSION, Capability, ConfigError, RunnerConfig
from runner_api.loader import call_factory, load_factory

SUITE = "conformance.suite."
# Items of the suite that say more than the clauses do.
BESIDE_CLAUSES = ("test_whole_run.py::test_lockstep", "test_whole_run.py::test_search")


class RunnerSession:
    """Registered as a plugin of its own while a runner is judged."""

    def __init__(
        self, config: pytest.Config, target: str, layout: str | None, oracle: str, seed: int, rounds: int,
        expectations: str | None, report: str | None,
    ) -> None:  # fmt: skip
        if seed < 0:
            raise ConfigError("a seed is not negative", field="--runner-seed", got=seed, expected=">= 0")
        if rounds < 1:
            raise ConfigError("nothing would be tested", field="--runner-rounds", got=rounds, expected=">= 1")
        if report and (config.getoption("numprocesses", default=None) or hasattr(config, "workerinput")):
            raise ConfigError(
                "several processes cannot write one report", field="--runner-report", got=report, expected="no -n"
            )
        self.config, self.target, self.oracle_name = config, target, oracle
        self.seed, self.rounds = seed, rounds
        self.factory = load_factory(target) if layout is None else in_layout(target, layout)
        self.built = call_factory(self.factory, RunnerConfig(max_num_reqs=2))
        self.info = self.built.describe()
        self.oracle = in_layout(oracle, self.info.layout)
        call_factory(self.oracle, RunnerConfig(max_num_reqs=2))
        self.expectations_path, self.report_path = expectations, report
        self.expectations = load_expectations(expectations) if expectations else ()
        check_applying(self.expectations, self.info)
        self.selection: frozenset[str] = frozenset()  # clauses of the suite's items
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []  # of items that are about no clause
        self.writer: ReportWriter | None = None
        self._told = False

    # -- what items ask ---------------------------------------------------------------------------------------

    @cached_property
    def results(self) -> Results:
        """Every clause that the suite's items are about, judged once. Stops the session if the smoke test fails."""
        self.must_be_alive()
        selected = None if not self.selection or self.selection >= load_clauses().keys() else self.selection
        seed, rounds = self.seed, self.rounds
        found = evaluate(
            self.factory, seeds=range(seed, seed + SEEDS * rounds), stories=range(seed, seed + rounds),
            oracle=self.oracle, layout=self.info.layout, selected=selected, info=self.info,
        )  # fmt: skip
        results = results_of(found, self.expectations)
        if self.writer is not None:
            self.writer.results(results)
        return results

    def must_be_alive(self) -> None:
        """The smoke test, once; a runner that fails it is not worth judging."""
        if self._smoke is None:
            return
        text = f"smoke: FAILED in the step: {self._smoke}\n{ADVICE}"
        if not self._in_worker:
            pytest.exit(text, returncode=1)
        if self._told:  # a worker of pytest-xdist cannot end the session: it fails once
            pytest.skip("the smoke test has failed")
        self._told = True
        pytest.fail(text, pytrace=False)

    @cached_property
    def _smoke(self) -> str | None:
        return smoke(self.factory)

    def need(self, *capabilities: Capability) -> None:
        """Skip the item if the runner does not offer them all."""
        missing = sorted(c.value for c in set(capabilities) - self.info.capabilities)
        if missing:
            pytest.skip("not offered: " + ", ".join(missing))

    def hold(self, clause_id: str) -> None:
        """End an item as its clause ended."""
        result = self.results.clauses[clause_id]
        law, tracked = result.clause.law, f"{result.reason} ({result.issue})"
        match result.outcome:
            case Outcome.SKIP:
                pytest.skip(result.reason or "")
            case Outcome.XFAIL:
                pytest.xfail(tracked)
            case Outcome.XPASS:
                pytest.fail(f"{clause_id} {law}\npasses, though it is expected to fail: {tracked}", pytrace=False)
            case Outcome.PASS:
                return
            case _ if result.clause.level != "MUST":
                pytest.xfail(
                    f"{result.outcome.value} of a {result.clause.level}: {result.first or 'nothing tested it'}"
                )
            case Outcome.UNTESTED if result.reason is not None:
                pytest.skip(result.reason)
            case Outcome.UNTESTED:
                pytest.fail(f"{clause_id} {law}\nnothing put it to the test", pytrace=False)
            case _:
                pytest.fail(f"{result.outcome.value}: {clause_id} {law}\n{result.first}", pytrace=False)

    # -- hooks ------------------------------------------------------------------------------------------------

    def pytest_report_header(self) -> list[str]:
        return [
            f"modelrunner: {self.info.line()}",
            f"modelrunner: seed={self.seed} rounds={self.rounds} against={self.oracle_name} spec={SPEC_VERSION}",
        ]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        items = [i for i in session.items if getattr(getattr(i, "module", None), "__name__", "").startswith(SUITE)]
        self.selection = frozenset(clause_id for item in items for clause_id in marked(item))
        if self.report_path and not session.config.option.collectonly:
            if not self.selection:
                raise pytest.UsageError("--runner-report: no clause of conformance.suite is selected")
            selection = None if self.selection >= load_clauses().keys() else sorted(self.selection)
            header = header_of(
                self.built, self.target, self.oracle_name, self.seed, self.rounds, selection, self.expectations_path
            )
            self.writer = ReportWriter(self.report_path, header)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A user's test of a clause that does not apply is skipped; items of the suite find out by themselves."""
        missing = [m for clause_id in marked(item) for m in load_clauses()[clause_id].missing(self.info.capabilities)]
        if missing:
            pytest.skip("not offered: " + ", ".join(dict.fromkeys(missing)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
        if report.failed and report.nodeid.endswith(BESIDE_CLAUSES):
            self.faults.append(f"{report.nodeid.rpartition('::')[2]} failed")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        collected_only = session.config.option.collectonly
        if exitstatus == pytest.ExitCode.OK and self._nothing and not collected_only and not self._in_worker:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.writer is None:
            return
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and "results" in self.__dict__:
            faults = [*self.results.faults, *self.faults]
            self.writer.finish(footer_of(self.results, faults, DIVERGE if faults else AGREE))
        elif self.__dict__.get("_smoke") is not None:
            self.writer.finish(footer_of(None, [f"smoke: {self._smoke}"], DIVERGE, self._smoke))
        self.writer.close()  # without a footer, the file tells of a run that was cut short

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._nothing and not self.config.option.collectonly:
            told = ", ".join(f"{n} {outcome}" for outcome, n in sorted(self.outcomes.items())) or "no test was run"
            terminalreporter.section("modelrunner")
            terminalreporter.line(f"no test has passed ({told}): nothing was shown to be right, the run is a failure")

    @property
    def _nothing(self) -> bool:
        return not self.outcomes["passed"]

    @property
    def _in_worker(self) -> bool:
        return hasattr(self.config, "workerinput")
