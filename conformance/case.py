"""A case: literal plans for one runner on the witness model, as plain JSON, and what fails first when it is run.

The plans are complete in themselves. What a right runner must make of them (`StepTruth`) is worked out from them alone,
so that a case can be run on any runner, years later, or in another language.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from conformance.dense_rows import next_rows
from conformance.divergence import Failure, NotLegal, Sides, run_step
from conformance.driver import WorldSize
from conformance.foreign import all_let_go
from conformance.harness import info_of
from conformance.layouts import in_layout
from conformance.planned_step import PlannedStep, RequestTruth, StepTruth, WorldRequest, order_key
from runner_api import (
    NULL_BLOCK_ID,
    BatchDescriptor,
    Capability,
    ConfigError,
    ForcedStep,
    GrammarOutput,
    NewRequestData,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    StepRecord,
    WitnessConfig,
    group_kv_cache_specs,
)
from runner_api.loader import load_factory
from runner_api.protocol import RunnerFactory
from runner_api.wire import from_json, to_json

SCHEMA = "modelrunner-case/1"


class CaseError(ConfigError):
    """The case itself is at fault, whoever runs it: no right runner can follow it."""


@dataclass(frozen=True, slots=True)
class CaseStep:
    """One plan and what comes with it. keep_blocks: unused memory but these blocks is poisoned before; None: not."""

    plan: SchedulerOutput
    descriptor: BatchDescriptor | None = None
    forced: ForcedStep | None = None
    grammar: GrammarOutput | None = None
    keep_blocks: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that a runner is built from and asked. `config.layout` is never None."""

    config: RunnerConfig
    model: WitnessConfig
    num_blocks: int
    steps: tuple[CaseStep, ...]

    def __post_init__(self) -> None:
        if self.config.layout is None:
            object.__setattr__(self, "config", replace(self.config, layout="slots"))

    @property
    def size(self) -> WorldSize:
        return WorldSize(self.config, self.model, self.num_blocks)

    def new_requests(self) -> Iterator[NewRequestData]:
        for step in self.steps:
            yield from step.plan.scheduled_new_reqs

    def tidy(self) -> Case:
        """Without what cannot matter: the ends of sequence, where no request has `min_tokens`."""
        asking = any(_params(new).min_tokens for new in self.new_requests())
        if asking:
            return self
        steps = [
            replace(s, plan=replace(
                s.plan, scheduled_new_reqs=[replace(n, eos_token_ids=()) for n in s.plan.scheduled_new_reqs]
            ))
            for s in self.steps
        ]  # fmt: skip
        return replace(self, steps=tuple(steps))

    def needs(self) -> frozenset[Capability]:
        """What a runner must offer to be asked this."""
        found = {Capability.GENERATE}
        params = [_params(new) for new in self.new_requests()]
        found |= {c for p in params for c in p.required_capabilities()}
        asked = {
            Capability.MULTI_GROUP: len(self.model.groups) > 1,
            Capability.SLIDING_WINDOW: any(g.sliding_window for g in self.model.groups),
            Capability.DRAFT_LAYOUT: any(s.plan.scheduled_spec_decode_tokens for s in self.steps),
            Capability.FORCED_STEP: any(s.forced for s in self.steps),
            Capability.PADDED_BATCH: any(s.descriptor for s in self.steps),
            Capability.GRAMMAR: any(s.grammar for s in self.steps),
        }
        return frozenset(found | {c for c, wanted in asked.items() if wanted})

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **to_json(self)}

    @classmethod
    def from_json(cls, data: Any) -> Case:
        """Raises ConfigError, with the path to the part, for what is not a case."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            got = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ConfigError("not a case", field="schema", got=got, expected=SCHEMA)
        return from_json(cls, {k: v for k, v in data.items() if k != "schema"})

    def text(self) -> str:
        """The JSON in one line. The order of keys is kept: that of `num_scheduled_tokens` breaks ties."""
        return json.dumps(self.as_json())


@dataclass(slots=True)
class CaseRun:
    """What came of a case: how many steps ran, which clauses were put to the test how often, what failed first."""

    steps: int = 0
    tested: Counter[str] = field(default_factory=Counter)
    failure: Failure | None = None

    @property
    def passed(self) -> bool:
        """Every step ran, laws looked at them, and nothing failed."""
        return self.failure is None and self.steps > 0


def run_case(
    case: Case, runner: str | RunnerFactory, oracle: str | RunnerFactory = "cpu",
    clauses: frozenset[str] | None = None,
) -> CaseRun:  # fmt: skip
    """The candidate beside the oracle, every law after each step, up to the first failure.

    An exception over poisoned memory says that something was read, not what: then the case is run once more without
    poison, and a clause that fails in that run is the one that is told.

    Raises ConfigError for a case whose plans rely on tokens that were not drawn, and CaseError for one without steps,
    one that names requests it never added, and one that the oracle refuses.
    """
    if not case.steps:
        raise CaseError("a case without steps tests nothing", field="steps", got=0, expected=">= 1")
    factory = in_layout(load_factory(runner), case.config.layout or "slots")
    offered = info_of(factory).capabilities
    sides = Sides(factory, in_layout(oracle, case.config.layout or "slots"), offered, clauses)
    run = _run(case, sides)
    if run.failure is not None and run.failure.error and any(s.keep_blocks is not None for s in case.steps):
        calm = replace(case, steps=tuple(replace(s, keep_blocks=None) for s in case.steps))
        again = _run(replace(calm, config=replace(case.config, record=case.config.record - {"kv"})), sides)
        if again.failure is not None and again.failure.clause_id is not None:
            return again
    return run


@all_let_go()
def _run(case: Case, sides: Sides) -> CaseRun:
    size, run = case.size, CaseRun()
    size = replace(size, config=replace(size.config, record=size.config.record & sides.parts()))
    truth = CaseTruth(case)
    try:
        judge = sides.judge(size)
        for number, step in enumerate(case.steps):
            planned = truth.next(step)
            run.failure = run_step(sides, judge, planned, number, step.keep_blocks, truth.observe, run.tested)
            run.steps += 1
            if run.failure is not None:
                break
    except NotLegal as e:
        raise CaseError(f"the oracle refuses the case: {e}", field="steps") from e
    return run


class CaseTruth:
    """What a right runner must build, worked out from plans and the tokens that were taken."""

    def __init__(self, case: Case) -> None:
        self._config = case.config
        self._dense = case.config.layout == "dense"
        specs = case.model.kv_cache_specs()
        self._block_sizes = [g.spec.block_size for g in group_kv_cache_specs(specs, case.num_blocks).groups]
        self._held: dict[str, WorldRequest] = {}
        self._rows: tuple[str, ...] = ()
        self._planned: PlannedStep | None = None

    def next(self, step: CaseStep) -> PlannedStep:
        """The step with its truth. Raises ConfigError where the plan names what was not there."""
        plan = step.plan
        for req_id in plan.finished_req_ids:
            self._held.pop(req_id, None)
        for new in plan.scheduled_new_reqs:
            self._held[new.req_id] = self._added(new, plan)
        self._take_cached(plan)
        truths = {r: self._truth(r, n, plan) for r, n in plan.num_scheduled_tokens.items()}
        removed = plan.finished_req_ids | plan.preempted_req_ids
        truth = StepTruth(self._order(plan, truths), truths, frozenset(removed))
        self._planned = PlannedStep(plan, step.descriptor, truth, step.forced, step.grammar)
        return self._planned

    def observe(self, reference: StepRecord) -> None:
        """Advance by one step: the tokens that each request took."""
        assert self._planned is not None
        tokens, drafts = reference.tokens(), self._planned.drafts_held()
        for req_id, truth in self._planned.truth.requests.items():
            request, taken = truth.request, tokens.get(req_id, ())
            request.tokens.extend(taken)
            request.computed += truth.num_scheduled - (1 + truth.num_drafts - len(taken) if truth.samples else 0)
            if drafts is not None:
                request.drafts = list(drafts[req_id])

    # -- internals --------------------------------------------------------------------------------------------

    def _added(self, new: NewRequestData, plan: SchedulerOutput) -> WorldRequest:
        before = self._held.get(new.req_id)
        tokens = [int(t) for t in new.prefill_token_ids]
        if before is not None and tokens != before.tokens:
            raise _relies(new.req_id, tokens, before.tokens)
        request = WorldRequest(
            new.req_id, new.prompt_len, tokens, _params(new), new.seed, len(tokens), new.num_computed_tokens,
            tuple(list(ids) for ids in new.block_ids), resumed=before is not None,
            shared_until=new.num_computed_tokens, admitted_at=new.num_computed_tokens,
        )  # fmt: skip
        request.drafts = [0] * self._config.num_speculative_tokens
        request.copied = self._copied(request, plan)
        return request

    def _copied(self, request: WorldRequest, plan: SchedulerOutput) -> range:
        """The positions that arrive by a block copy, in whichever group that reaches back least."""
        targets = {int(target) for _, target in plan.kv_cache_block_copies}
        starts = [
            column * size
            for size, ids in zip(self._block_sizes, request.blocks, strict=True)
            for column, block in enumerate(ids)
            if block in targets and block != NULL_BLOCK_ID and column * size < request.computed
        ]
        return range(max(starts), request.computed) if starts else range(0)

    def _take_cached(self, plan: SchedulerOutput) -> None:
        cached = plan.scheduled_cached_reqs
        for req_id, computed, fresh in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            request = self._held.get(req_id)
            if request is None:
                raise CaseError("the case goes on with a request that it never added", field="steps", req_id=req_id)
            if req_id in cached.resumed_req_ids:
                tokens = [int(t) for t in cached.all_token_ids[req_id]]
                if tokens != request.tokens:
                    raise _relies(req_id, tokens, request.tokens)
                self._held[req_id] = WorldRequest(
                    req_id, request.prompt_len, tokens, request.params, request.seed, len(tokens), computed,
                    tuple(list(ids) for ids in fresh or ()), resumed=True, shared_until=computed, admitted_at=computed,
                    drafts=[0] * self._config.num_speculative_tokens,
                )  # fmt: skip
            elif fresh is not None:
                for owned, ids in zip(request.blocks, fresh, strict=True):
                    owned.extend(ids)

    def _truth(self, req_id: str, n: int, plan: SchedulerOutput) -> RequestTruth:
        request = self._held.get(req_id)
        if request is None:
            raise CaseError("the case schedules a request that it never added", field="steps", req_id=req_id)
        num_drafts = len(plan.scheduled_spec_decode_tokens.get(req_id, ()))
        known = request.tokens[request.computed : request.computed + n]
        drafts = request.drafts[: n - len(known)]
        is_new, request.started = not request.started, True
        return RequestTruth(
            request, n, request.computed, request.prefill_len, num_drafts, (*known, *drafts), tuple(request.drafts),
            is_new, request.resumed,
        )  # fmt: skip

    def _order(self, plan: SchedulerOutput, truths: dict[str, RequestTruth]) -> tuple[str, ...]:
        if self._dense:
            lens = {r: t.request.prompt_len for r, t in truths.items()}
            self._rows = next_rows(self._rows, plan, lens, self._config.reorder_batch_threshold).order
            return self._rows
        k = self._config.num_speculative_tokens
        return tuple(sorted(truths, key=lambda r: order_key(truths[r].num_scheduled, truths[r].num_drafts, k)))


def _params(new: NewRequestData) -> SamplingParams:
    return new.sampling_params or SamplingParams()


def _relies(req_id: str, wanted: list[int], got: list[int]) -> ConfigError:
    return ConfigError(
        "the case relies on tokens that were not drawn", field="steps", req_id=req_id, got=got, expected=repr(wanted),
        hint="It was recorded on a runner that draws otherwise",
    )  # fmt: skip
