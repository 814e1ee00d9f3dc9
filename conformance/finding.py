"""Find a fault of a runner, make it small, and tell it so that it can be read and run.

Seeded worlds come first, because most faults show in the first of them; then Hypothesis searches. Whatever fails first,
in the order in which a step computes, is shrunk by `conformance.shrink`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from conformance.case import Case, run_case
from conformance.cell import Cell, cell_of
from conformance.clauses import clause, load_clauses
from conformance.context import Mismatch
from conformance.divergence import OTHER_TOKENS, Failure, NotLegal, Sides
from conformance.driver import KINDS, draw_size
from conformance.evaluate import STEPS, STEPS_PER_WORLD, can_run
from conformance.harness import info_of
from conformance.layouts import InLayout, bare, in_layout
from conformance.report import batch_table
from conformance.shrink import ATTEMPTS, Shrunk, shrink
from conformance.snippet import write_snippet
from conformance.standing import stands
from conformance.story import Close
from conformance.telling import Told, tell_at_random, try_to_tell
from runner_api import Capability, ConfigError, StepRecord
from runner_api.loader import load_factory
from runner_api.protocol import RunnerFactory

# So many frames of a traceback are told.
FRAMES = 3
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)\n(?:    (.*)\n)?', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to look. worlds: seeded ones of each kind; examples: of Hypothesis behind them; attempts: stories that
    the shrinker may tell."""

    worlds: int = 3
    examples: int = 0
    attempts: int = ATTEMPTS


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. clause_id is None for an exception on a legal plan, and where tokens alone show it.

    cell: where in the record or output it can be read; None for an exception. snippet: Python that shows it again.
    """

    clause_id: str | None
    law: str
    mismatch: Mismatch | None
    case: Case
    step: int
    table: str
    snippet: str
    cell: Cell | None = None
    error: str | None = None
    traceback: str | None = None
    record: StepRecord | None = None
    attempts: int = 0
    # Of a wrong draw: clauses about what its request still asks for after shrinking.
    related: tuple[str, ...] = ()
    cut_off: bool = False  # shrinking ended for its limit alone
    probe: str | None = None  # whose plans these are

    @property
    def num_requests(self) -> int:
        return len({new.req_id for new in self.case.new_requests()})

    def last_frames(self) -> str:
        """Where an exception was raised: the innermost frames of its traceback; empty without one."""
        frames = [] if self.traceback is None else _FRAME.findall(self.traceback)
        told = [f"    {path}:{line} in {name}: {source}" for path, line, name, source in frames[-FRAMES:]]
        return "\n".join(["raised at, innermost last:", *told]) if told else ""

    def text(self) -> str:
        """Clause, law, where an exception was raised, the batch with the cell marked, both values, and the snippet."""
        head = self.law if self.clause_id is None else f"{self.clause_id} {self.law}"
        what = str(self.cell or self.mismatch or self.error)
        size = f"{len(self.case.steps)} step(s), {self.num_requests} request(s)"
        where = f"{what}\nin step {self.step} of {size}"
        if self.related:
            where += f"\nthe request asks for what these clauses are about: {', '.join(self.related)}"
        if self.probe:
            where += f"\nin plans of the probe {self.probe}, for as few of its requests as show it"
        if self.cut_off:
            where += f"\nthe search was cut off behind {self.attempts} attempts: smaller may exist"
        parts = [head, where, self.last_frames(), self.table, self.snippet]
        return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def find(
    runner: str | RunnerFactory, *, oracle: str | RunnerFactory = "cpu", clauses: Collection[str] | None = None,
    seed: int = 0, budget: Budget = Budget(), layout: str | None = None,
) -> Finding | None:  # fmt: skip
    """The first fault of `runner` that worlds of every kind show, shrunk; None if there is none within the budget, and
    where a sought clause fails only behind tokens that no right runner draws.

    clauses: look for these alone (None: for all, exceptions, and tokens that are not the oracle's). layout: of the
    rows; None: the one that the runner takes. Raises ConfigError where nothing can be looked for: no clauses, a runner
    without whole steps.
    """
    sides, layout = sides_of(runner, oracle, clauses, layout)
    told = _first(sides, layout, seed, budget)
    if told is None or told.failure is None:
        return None
    shrunk = _standing(_without_padding(told, sides), sides, budget.attempts)
    if shrunk is None:
        return None
    return replace(describe(shrunk.told, runner_name(runner), shrunk.attempts), cut_off=shrunk.cut_off)


def describe(told: Told, runner: str, attempts: int = 0) -> Finding:
    """A failing story as a finding. runner: as the snippet shall load it."""
    assert told.failure is not None
    return describe_case(told.failure, told.case(), runner, attempts)


def describe_case(failure: Failure, case: Case, runner: str, attempts: int = 0) -> Finding:
    """The same of a case in which this is what failed."""
    cell = cell_of(failure)
    law = _law(failure)
    title = f"{failure.clause_id} {law}" if failure.clause_id else law
    return Finding(
        failure.clause_id, law, failure.mismatch, case, failure.step, marked_table(failure, cell),
        write_snippet(case, runner, cell, title), cell, failure.error, failure.traceback, failure.record, attempts,
        _related(failure, case),
    )  # fmt: skip


def _related(failure: Failure, case: Case) -> tuple[str, ...]:
    """Clauses that require what the request with the wrong draw asks for. A law of draws says that the token is wrong;
    which of the request's parameters was broken, they say."""
    m = failure.mismatch
    if m is None or m.field not in ("token_ids", "logprobs"):
        return ()
    asked = [new.sampling_params for new in case.new_requests() if new.req_id == m.req_id and new.sampling_params]
    wanted = {c for params in asked for c in params.required_capabilities()} - {Capability.SEEDED_SAMPLING}
    return tuple(c.id for c in load_clauses().values() if c.requires & wanted and c.id != m.clause_id)


def runner_name(runner: str | RunnerFactory) -> str:
    """What `load_runner` takes for it: its own name, or `module:factory`."""
    runner = bare(runner)
    if isinstance(runner, str):
        return runner
    name = getattr(runner, "__qualname__", type(runner).__qualname__)
    return f"{getattr(runner, '__module__', type(runner).__module__)}:{name}"


def marked_table(failure: Failure, cell: Cell | None) -> str:
    """The batch of the failing step, the cell marked; of the oracle's batch where the candidate has none."""
    record = failure.record if failure.record is not None else failure.reference
    if record is None:
        return ""
    here = None if cell is None or cell.earlier else cell
    marked = None if here is None else Mismatch("", here.field, here.req_id, here.index, here.got, here.expected)
    try:
        table = batch_table(record, marked)
    except Exception:  # a record of another shape than a record has
        return "" if record is failure.reference or failure.reference is None else batch_table(failure.reference)
    if cell is not None and cell.earlier:
        return f"{table}\nof the step before: »{cell.expression}« = {cell.got!r}"
    if record is failure.reference:
        return f"as it should have been:\n{table}"
    return table if marked is None or "»" in table else f"{table}\n{_outside(record, cell)}"


def _outside(record: StepRecord, cell: Cell | None) -> str:
    """A cell that no column of the table shows: its whole array, the element marked."""
    assert cell is not None
    values = getattr(record, cell.field, None)
    index = cell.index
    if isinstance(values, np.ndarray) and values.ndim == 2 and len(index) == 2:
        values, index = values[index[0]], index[1:]
    if not isinstance(values, np.ndarray) or values.ndim != 1 or len(index) != 1 or len(values) > 64:
        return f"»{cell.expression}« = {cell.got!r}"
    shown = [f"»{v}«" if i == index[0] else str(v) for i, v in enumerate(values.tolist())]
    lead = cell.expression.rpartition("[")[0] if len(cell.index) == 1 else f"record.{cell.field}[{cell.index[0]}]"
    return f"{lead} = [{' '.join(shown)}]"


def _law(failure: Failure) -> str:
    if failure.clause_id:
        return clause(failure.clause_id).law
    if failure.error:
        return f"An exception on a legal plan: {failure.error}"
    return f"No clause says why, but {OTHER_TOKENS}"


def sides_of(
    runner: str | RunnerFactory, oracle: str | RunnerFactory, clauses: Collection[str] | None, layout: str | None
) -> tuple[Sides, str]:
    """Both sides in the layout of the rows, and which that is; see `find`."""
    if clauses is not None and not clauses:
        raise ConfigError("an empty selection finds nothing", field="clauses", got=[], expected="ids, or None for all")
    chosen = None if clauses is None else frozenset(clause(c).id for c in clauses)
    factory = load_factory(runner) if layout is None else in_layout(runner, layout)
    info = info_of(factory)
    if Capability.GENERATE not in info.capabilities:
        raise ConfigError(
            "the runner offers no whole steps", field="runner", got=info.name, expected="the capability generate",
            hint="Its stages are judged by modelrunner check",
        )  # fmt: skip
    if not isinstance(factory, InLayout):
        factory = in_layout(factory, info.layout)
    return Sides(factory, in_layout(oracle, info.layout), info.capabilities, chosen), info.layout


def _first(sides: Sides, layout: str, seed: int, budget: Budget) -> Told | None:
    """The first story that breaks a clause. One that ends in an exception only if no world of its round does; where
    clauses are sought, only if no world of any round does."""
    fallback: Told | None = None
    for number in range(budget.worlds):
        for told in _worlds(sides, layout, seed + number):
            assert told.failure is not None
            if told.failure.clause_id is not None:
                return told
            fallback = fallback or told
        if fallback is not None and sides.clauses is None:
            return fallback
    if fallback is not None:
        return fallback
    if budget.examples:
        from conformance.machine import first_story

        return first_story(sides, budget.examples, seed)
    return None


def _worlds(sides: Sides, layout: str, seed: int) -> Iterator[Told]:
    """Failing stories of one seed: the very worlds that `evaluate` judges by."""
    for number, kind in enumerate(KINDS):
        if not can_run(kind, sides.offered):
            continue
        for part in range(-(-STEPS // STEPS_PER_WORLD)):
            try:
                told = _world(sides, layout, kind, [seed, number, part])
            except NotLegal:  # a world that the oracle does not take in this layout
                continue
            if told.failure is not None and told.failure.clause_id is None:
                # A crash over poisoned memory says that something was read, not what: without poison the laws may.
                again = _world(sides, layout, kind, [seed, number, part], poison=False)
                told = again if again.failure is not None and again.failure.clause_id else told
            if told.failure is not None:
                yield told


def _world(sides: Sides, layout: str, kind: str, entropy: list[int], *, poison: bool = True) -> Told:
    """One world up to its first failure; without poison no KV is recorded either. Raises NotLegal."""
    random = np.random.default_rng(entropy)  # sizes and plans are drawn from one generator, as in `evaluate`
    parts = sides.parts() if poison else sides.parts() - {"kv"}
    size = draw_size(kind, random, parts, sides.offered, layout)
    return tell_at_random(sides, size, random, STEPS_PER_WORLD, poison=poison)


def _without_padding(told: Told, sides: Sides) -> Told:
    """Wrong logits of a padded step are padding's fault only if they are right without it."""
    if told.failure is None or told.failure.clause_id != "MR-PAD-006":
        return told
    actions = tuple(replace(a, pad_tokens=0, pad_reqs=0) if isinstance(a, Close) else a for a in told.story.actions)
    bare_one = try_to_tell(replace(told.story, actions=actions), sides)
    return told if bare_one is None or bare_one.failure is None else bare_one


def _standing(told: Told, sides: Sides, attempts: int) -> Shrunk | None:
    """The smallest story of the failure whose case stands by itself; None if none that was told on the way does."""

    def alone(t: Told) -> bool:
        assert t.failure is not None
        return stands(t.case(), cell_of(t.failure), sides.oracle)

    if alone(told):
        return shrink(told, sides, attempts, alone)
    # Behind a wrong token: a shorter story may come without it.
    shown: list[Told] = []

    def note(t: Told) -> bool:
        shown.append(t)
        return True

    first = shrink(told, sides, attempts, note)
    if alone(first.told):
        return first
    start = next((t for t in reversed(shown) if alone(t)), None)
    if start is None:
        return None
    again = shrink(start, sides, attempts, alone)
    return replace(again, attempts=first.attempts + again.attempts)


def reproduces(finding: Finding, runner: str | RunnerFactory, oracle: str | RunnerFactory = "cpu") -> bool:
    """Whether the case alone, without the world that it came from, fails in the same way."""
    failure = run_case(finding.case, runner, oracle).failure
    return failure is not None and failure.clause_id == finding.clause_id
