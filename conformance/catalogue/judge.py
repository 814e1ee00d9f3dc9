"""Run scenarios: on any runner, and on the faulty variants that they bring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from conformance.catalogue import engine_level, late_level, runner_level, stage_level
from conformance.catalogue.comparison import Difference, plain
from conformance.catalogue.scenario import Scenario, Setup, Variant, select
from conformance.catalogue.script import config_of
from conformance.foreign import all_let_go, opened, staying
from conformance.mutation import mutated
from runner_api import CapabilityError, ConfigError
from runner_api.errors import safely
from runner_api.loader import call_factory, load_factory
from runner_api.protocol import RunnerFactory
from runner_api.selection import offered_layouts

PASS, FAIL, ERROR, SKIP, MISSING = "pass", "fail", "error", "skip", "missing"
# Where a package that variants change is entered.
TARGETS = {"cpu_reference": "cpu", "gpu_backend": "gpu", "engine_core": "engine_core.engine:Engine"}


@dataclass(frozen=True, slots=True)
class Result:
    """One scenario in one layout. variant: which of its faults was planted, None for the runner as it is.

    outcome: "pass"; "fail" with the differences; "error" with what was raised; "skip" and "missing" with the reason.
    """

    id: str
    kind: str
    layout: str
    outcome: str
    differences: tuple[Difference, ...] = ()
    reason: str = ""
    variant: int | None = None

    @property
    def story(self) -> str:
        """What went wrong, or why nothing ran."""
        return self.differences[0].line() if self.differences else self.reason

    def to_json(self) -> dict[str, Any]:
        differences = [{"where": d.where, "got": plain(d.got), "expected": plain(d.expected)} for d in self.differences]
        return {
            "id": self.id, "kind": self.kind, "layout": self.layout, "variant": self.variant, "outcome": self.outcome,
            "reason": self.reason, "differences": differences,
        }  # fmt: skip


def run(ids: Sequence[str] | None = None, runner: str | RunnerFactory | None = None) -> list[Result]:
    """Each selected scenario in each of its layouts. ids: of cases or kinds; None: all. runner: None: the scenario's.

    Raises UnknownNameError for an id or a runner that there is none of, ConfigError where nothing is selected or the
    runner cannot be loaded.
    """
    if runner is not None:
        offered_layouts(load_factory(runner))
    return [result for case in select(ids) for result in run_case(case, runner)]


def run_case(case: Scenario, runner: str | RunnerFactory | None = None) -> list[Result]:
    """One scenario in each of its layouts; a single result where it cannot run at all. runner: None: the scenario's."""
    if case.status == "missing":
        return [Result(case.id, case.kind, "", MISSING, reason=f"waits for {case.missing}")]
    absent = _absent(case) if runner is None else ""
    if absent:
        return [Result(case.id, case.kind, "", SKIP, reason=absent)]
    return [_judged(case, layout, runner or case.runner) for layout in _layouts(case)]


def run_variants(case: Scenario) -> list[Result]:
    """The scenario on each of its faulty variants, which it must catch (`caught`); "skip" where the package that they
    change cannot be loaded here."""
    results = []
    absent = _absent(case)
    if absent:
        return [Result(case.id, case.kind, "", SKIP, reason=absent, variant=n) for n in range(len(case.variants))]
    for n, variant in enumerate(case.variants if case.status == "runs" else ()):
        with planted(variant) as (runner, package):
            layouts = (variant.layout,) if variant.layout else _layouts(case)
            results += [_judged(case, layout, runner, package, n) for layout in layouts]
    return results


def _absent(case: Scenario) -> str:
    """Why the scenario's own runner cannot be loaded here; empty if it can."""
    try:
        load_factory(case.runner)
    except ConfigError as e:
        return str(e)
    return ""


def caught(case: Scenario, result: Result) -> bool:
    """Did the scenario see its variant? An exception counts only where the report was a crash."""
    assert result.variant is not None
    return result.outcome == FAIL or (result.outcome == ERROR and case.variants[result.variant].crash)


@contextmanager
def planted(variant: Variant) -> Iterator[tuple[str | RunnerFactory, str]]:
    """The faulty copy: (runner, package of the engine). Usable inside of the `with` block."""
    more = [(change["path"], change["old"], change["new"]) for change in variant.also]
    with mutated(TARGETS[variant.package], variant.path, variant.old, variant.new, *more) as copy:
        yield ("cpu", copy.alias) if variant.package == engine_level.ENGINE else (copy.factory, engine_level.ENGINE)


def _layouts(case: Scenario) -> tuple[str, ...]:
    """A stage knows no layout: it runs once."""
    return ("",) if case.level == "stage" else case.layouts


def _judged(
    case: Scenario, layout: str, runner: str | RunnerFactory, package: str = engine_level.ENGINE,
    variant: int | None = None,
) -> Result:  # fmt: skip
    def result(outcome: str, differences: Sequence[Difference] = (), reason: str = "") -> Result:
        return Result(case.id, case.kind, layout, outcome, tuple(differences), reason, variant)

    try:
        with staying(), all_let_go():
            lacking = _lacks(case, layout, runner)
            found = [] if lacking else _play(case, layout, runner, package)
    except runner_level.NotOffered as e:
        return result(SKIP, reason=str(e))
    except Exception as e:  # a foreign runner may raise anything
        return result(ERROR, reason=f"{type(e).__name__}: {safely(str, e)}")
    if lacking:
        return result(SKIP, reason=lacking)
    return result(FAIL if found else PASS, found)


def _play(case: Scenario, layout: str, runner: str | RunnerFactory, package: str) -> list[Difference]:
    if case.level == "stage":
        return stage_level.play(case, runner)
    if case.level == "engine":
        return engine_level.play(case, layout, runner, package)
    if case.level == "late":
        return late_level.play(case, layout, runner)
    return runner_level.play(case, layout, runner)


def _lacks(case: Scenario, layout: str, runner: str | RunnerFactory) -> str:
    """Why the scenario means nothing for this runner; empty if it means something."""
    if case.level == "stage":
        return stage_level.lacks(case, runner)
    if layout not in offered_layouts(load_factory(runner)):
        return f"the runner has no {layout} layout"
    try:
        built = opened(call_factory(runner, config_of(Setup(), layout)))
    except (CapabilityError, ConfigError) as e:
        return str(e)
    if case.level == "late":
        return late_level.lacks(built)
    if case.level == "engine" and not callable(getattr(built, "capture_graphs", None)):
        return "the runner has no capture_graphs, which the engine calls"
    offered = built.describe().capabilities
    level = engine_level if case.level == "engine" else runner_level
    lacking = sorted(c.value for c in level.needs(case, layout) - offered)
    return f"the runner does not offer {', '.join(lacking)}" if lacking else ""
