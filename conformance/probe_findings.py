"""What a probe finds, told like any other finding: the plans of the probe up to the first step that shows it.

A probe makes up its own plans, for one clause or a few. They are kept on tapes (`conformance.tape`) and run once more,
on the candidate and on the oracle, each by itself: the first record in which the two part is where it shows. Requests
that it does not take are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from conformance.case import Case, CaseStep
from conformance.cell import Cell, cell_of, holds
from conformance.context import Mismatch
from conformance.divergence import Failure, Sides
from conformance.evaluate import record_parts
from conformance.finding import Finding, describe_case, runner_name, sides_of
from conformance.foreign import all_let_go, staying
from conformance.harness import info_of
from conformance.layouts import InLayout
from conformance.probe import RECORDED, clauses_of
from conformance.probes import PROBES, Bench
from conformance.standing import steps_alone
from conformance.tape import Tape, Taping
from runner_api import (
    CachedRequestData,
    ForcedStep,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    StepRecord,
)
from runner_api.protocol import RunnerFactory

# So many tapes of one probe are run once more.
MOST_TAPES = 60
Seen = tuple[StepRecord, ModelRunnerOutput]


@dataclass(frozen=True, slots=True)
class Shown:
    """A case that ends with the step that shows the fault, and the oracle's records of its steps."""

    failure: Failure
    case: Case
    records: tuple[StepRecord, ...]


def find_in_probes(
    runner: str | RunnerFactory, clause_id: str, *, oracle: str | RunnerFactory = "cpu", layout: str | None = None
) -> Finding | None:
    """The fault that fails this clause, in the plans of a probe that speaks of it. None if no probe fails it, and where
    the records of its steps are those of the oracle: some things show in no record.

    layout: of the rows; None: the one that the runner takes. Raises ConfigError for a runner without whole steps.
    """
    sides, layout = sides_of(runner, oracle, None, layout)
    if not set(RECORDED) <= sides.offered:
        return None
    for probe in PROBES:
        if clause_id not in (clauses_of(probe) or ()):
            continue
        tapes: list[Tape] = []
        told: RunnerFactory = Taping(sides.candidate, tapes)
        if layout == "dense":
            told = InLayout(told, "dense", stories=True)
        try:
            with staying(), all_let_go():
                wrong = probe(Bench(told, sides.offered)).get(clause_id)
        except Exception:  # the report tells of it as an error
            continue
        shown = _first_shown(wrong[0], tapes, sides) if wrong else None
        if shown is not None:
            shown = _plainer(_with_fewer_requests(shown, sides), sides)
            finding = describe_case(shown.failure, shown.case.tidy(), runner_name(runner))
            return replace(finding, probe=probe.__name__)
    return None


def _first_shown(mismatch: Mismatch, tapes: Iterable[Tape], sides: Sides) -> Shown | None:
    parts = record_parts(sides.offered) & record_parts(info_of(sides.oracle).capabilities)
    for tape in list(tapes)[:MOST_TAPES]:
        case = tape.case(parts)
        shown = None if case is None else _shown(case, mismatch, sides)
        if shown is not None:
            return shown
    return None


def _shown(case: Case, mismatch: Mismatch, sides: Sides) -> Shown | None:
    """The first step in which the candidate's record is not the oracle's, with the case up to it."""
    theirs, right = _run_alone(case, sides.candidate), _run_alone(case, sides.oracle)
    for number, ((record, output), (reference, wanted)) in enumerate(zip(theirs, right, strict=False)):
        failure = Failure(
            number, mismatch.clause_id, mismatch, record=record, reference=reference, output=output
        )  # fmt: skip
        cell = cell_of(failure)
        if cell is not None and _holds(cell, reference, wanted) and not _holds(cell, record, output):
            upto = replace(case, steps=case.steps[: number + 1])
            return Shown(failure, upto, tuple(record for record, _ in right[: number + 1]))
    return None


@all_let_go()
def _run_alone(case: Case, factory: RunnerFactory) -> list[Seen]:
    """Record and output of each step, up to the first error."""
    seen: list[Seen] = []
    try:
        with staying():
            for record, output in steps_alone(case, factory):
                assert record is not None
                seen.append((record, output))
    except Exception:  # the steps before it may show enough
        pass
    return seen


def _holds(cell: Cell, record: StepRecord, output: ModelRunnerOutput) -> bool:
    try:
        return holds(cell, record, output)
    except Exception:  # there is no such element
        return False


# -- plainer, and with fewer requests -----------------------------------------------------------------------------


def _plainer(shown: Shown, sides: Sides) -> Shown:
    """Without what the configuration need not say. What shows the fault stays recorded: without it a consequence might
    show in its place."""
    cell = cell_of(shown.failure)
    needed = shown.case.config.record & ({cell.field} if cell is not None else frozenset())
    for name, value in (("initial_free_rows", None), ("reasoning", None), ("record", needed)):
        config = replace(shown.case.config, **{name: value})
        shown = _shown(replace(shown.case, config=config), _mismatch(shown), sides) or shown
    return shown


def _mismatch(shown: Shown) -> Mismatch:
    assert shown.failure.mismatch is not None
    return shown.failure.mismatch


def _with_fewer_requests(shown: Shown, sides: Sides) -> Shown:
    """The request that shows the fault alone, or all that it does not show without."""
    everyone = tuple(dict.fromkeys(new.req_id for new in shown.case.new_requests()))
    cell = cell_of(shown.failure)
    guilty = None if cell is None else cell.req_id
    alone = None if guilty not in everyone else _shown_with({guilty}, shown, sides)
    if alone is not None:
        return alone
    for req_id in everyone:
        left = tuple(new.req_id for new in shown.case.new_requests() if new.req_id != req_id)
        shown = (_shown_with(left, shown, sides) if left else None) or shown
    return shown


def _shown_with(kept: Collection[str], shown: Shown, sides: Sides) -> Shown | None:
    steps = [_only(step, kept, record) for step, record in zip(shown.case.steps, shown.records, strict=True)]
    busy = [s for s in steps if s.plan != SchedulerOutput()]
    return _shown(replace(shown.case, steps=tuple(busy)), _mismatch(shown), sides) if busy else None


def _only(step: CaseStep, kept: Collection[str], record: StepRecord) -> CaseStep:
    """The step for some requests alone. record: the oracle's, for the order of what was imposed."""
    plan = step.plan
    counts = {r: n for r, n in plan.num_scheduled_tokens.items() if r in kept}
    plan = replace(
        plan, scheduled_new_reqs=[new for new in plan.scheduled_new_reqs if new.req_id in kept],
        scheduled_cached_reqs=_cached(plan.scheduled_cached_reqs, kept), num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens={r: d for r, d in plan.scheduled_spec_decode_tokens.items() if r in kept},
        finished_req_ids=plan.finished_req_ids & frozenset(kept),
        preempted_req_ids=plan.preempted_req_ids & frozenset(kept),
    )  # fmt: skip
    if not counts:
        return replace(step, plan=plan, descriptor=None, forced=None, grammar=None)
    return replace(step, plan=plan, forced=_forced(step.forced, kept, record), grammar=_grammar(step.grammar, kept))


def _cached(cached: CachedRequestData, kept: Collection[str]) -> CachedRequestData:
    at = [i for i, r in enumerate(cached.req_ids) if r in kept]
    outputs = cached.num_output_tokens
    return CachedRequestData(
        [cached.req_ids[i] for i in at], [cached.num_computed_tokens[i] for i in at],
        [cached.new_block_ids[i] for i in at], [outputs[i] for i in at] if outputs else [],
        cached.resumed_req_ids & frozenset(kept), {r: t for r, t in cached.all_token_ids.items() if r in kept},
    )  # fmt: skip


def _forced(forced: ForcedStep | None, kept: Collection[str], record: StepRecord) -> ForcedStep | None:
    if forced is None:
        return None
    at = [i for i, r in enumerate(record.req_ids) if r in kept]
    rows = [j for i in at for j in range(record.cu_num_logits[i], record.cu_num_logits[i + 1])]
    return ForcedStep(
        forced.token_ids[at], forced.num_sampled[at],
        None if forced.draft_token_ids is None else forced.draft_token_ids[at],
        None if forced.logits is None else forced.logits[rows],
    )  # fmt: skip


def _grammar(grammar: GrammarOutput | None, kept: Collection[str]) -> GrammarOutput | None:
    if grammar is None:
        return None
    ids, masks = grammar.structured_output_request_ids, grammar.grammar_bitmask
    at = [j for j, r in enumerate(ids) if r in kept]
    if not at:
        return None
    by_request = masks.reshape(len(ids), -1, masks.shape[1])[at]
    drafts = grammar.num_acceptable_drafts
    return GrammarOutput(
        [ids[j] for j in at], np.concatenate(list(by_request)), None if drafts is None else [drafts[j] for j in at]
    )
