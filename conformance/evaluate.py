"""Judge a runner by every clause, without stopping at the first mismatch.

Seeded worlds of several kinds are run on the candidate with an oracle beside it; unused memory is poisoned before every
step; each law looks at each step. The probes follow. The oracle obeys the world's plans and takes the candidate's
tokens only where a right runner could have drawn them, so that a wrong candidate cannot lead it astray.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

# These register their laws; the order of imports is the order in which laws are asked.
import conformance.laws_dense
import conformance.laws_inputs
import conformance.laws_memory
import conformance.laws_sampling
import conformance.laws_values  # noqa: F401
from conformance.clauses import clause, load_clauses
from conformance.context import TRACKED, Mismatch, RowTracker, StepContext
from conformance.dense_rows import TRACKED as DENSE_TRACKED
from conformance.dense_rows import DenseRowTracker
from conformance.driver import GROUPS, KINDS, RandomDriver, WorldSize, draw_size
from conformance.evaluation import Evaluation, EvaluationError
from conformance.foreign import PlanChanged, all_let_go, must_be_unchanged, own_copy, staying
from conformance.harness import build_runner, info_of
from conformance.kept_record import KeptRecord
from conformance.laws import LAWS, Law
from conformance.laws_inputs import rows_follow_their_rules
from conformance.layouts import InLayout, in_layout
from conformance.planned_step import PlannedStep
from conformance.probe import RECORDED, clauses_of
from conformance.probes import PROBES, Bench
from conformance.stage_laws import stages_judged, stages_lacking
from conformance.world import PlanWorld
from runner_api import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    Capability,
    ConfigError,
    ForcedStep,
    KVCacheConfig,
    ModelRunner,
    ModelRunnerOutput,
    RunnerConfig,
    RunnerInfo,
    SchedulerOutput,
    StepRecord,
)
from runner_api.errors import safely
from runner_api.loader import load_factory, load_stages
from runner_api.protocol import RunnerFactory

# Seeds of one round: each gives a world of every kind.
SEEDS = 3
# Steps of one world: long enough for rows and blocks to change hands often, short enough to see many sizes.
STEPS_PER_WORLD = 20
# Steps of one kind and seed: two worlds.
STEPS = 40
# Clauses that worlds can put to the test: by laws, and by following the rows of either layout.
WORLD_CLAUSES = frozenset(LAWS) | TRACKED | DENSE_TRACKED
# The order in which laws are asked: where one of FIRST fails, the record cannot be read any further.
FIRST = tuple(law for law in LAWS.values() if law.first)
CAUSES = tuple(law for law in LAWS.values() if not law.first and not law.consequence)
CONSEQUENCES = tuple(law for law in LAWS.values() if law.consequence)
# Of the causes those that no consequence hangs on: seeds spoil draws, not what is stored or computed.
APART = frozenset({"MR-SAMPLE-007"})


def evaluate(
    runner: str | RunnerFactory, *, seeds: Sequence[int] = range(SEEDS), stories: Sequence[int] = (0,),
    steps: int = STEPS, oracle: str | RunnerFactory = "cpu", enough: Callable[[Evaluation], bool] | None = None,
    layout: str | None = None, selected: Collection[str] | None = None, sought: Collection[str] = (),
    info: RunnerInfo | None = None,
) -> Evaluation:  # fmt: skip
    """Judge `runner` on worlds of every kind it can run, `steps` steps of each kind and seed, and by every probe.

    stories: seeds of the stories that the metamorphic laws retell, at least one. enough: asked after each world and
    each probe whether to leave it at that; what was not tested by then makes no pass. layout: of the rows, on both
    sides; None: the one that the runner takes by itself. selected: ids of the clauses to judge by, at least one; None:
    all. Worlds and probes that speak of none of them are left out. sought: ids of clauses whose probes are run before
    the worlds. info: what the runner has said of itself; None: it is asked.

    A runner that runs no whole steps, or keeps no record of them, is judged by what it does offer; the other clauses
    are in `skipped`. Raises: ConfigError, UnknownNameError for what cannot be judged at all.
    """
    if selected is not None:
        if not selected:
            raise ConfigError("no clause is selected", field="selected", got=selected, expected="at least one id")
        selected = frozenset(clause(c).id for c in selected)
    runner = load_factory(runner) if layout is None else in_layout(runner, layout)
    info = info or info_of(runner)
    oracle = in_layout(oracle, info.layout)
    bench = Bench(runner, info.capabilities, tuple(stories))
    if info.layout == "dense":
        bench = replace(bench, runner=InLayout(runner, "dense", stories=True))
    result = _begin(info, runner, selected)
    first = [p for p in PROBES if not frozenset(sought).isdisjoint(clauses_of(p) or ())]
    rest = [p for p in PROBES if p not in first]
    worlds = _worlds(runner, oracle, seeds, steps, result)
    for part in (_probes(first, bench, result), worlds, _probes(rest, bench, result)):
        for _ in part:
            if enough is not None and enough(result):
                return result
    return result


def _worlds(
    runner: RunnerFactory, oracle: RunnerFactory, seeds: Sequence[int], steps: int, result: Evaluation
) -> Iterator[None]:
    """Run the worlds one by one; comes back after each."""
    if not set(RECORDED) <= result.info.capabilities or not any(map(result.asks, WORLD_CLAUSES)):
        return
    for seed in seeds:
        for kind in KINDS:
            if not can_run(kind, result.info.capabilities):
                continue
            for part in range(-(-steps // STEPS_PER_WORLD)):
                entropy = [seed, KINDS.index(kind), part]
                world = (runner, oracle, kind, entropy, min(STEPS_PER_WORLD, steps), result)
                # A crash over poisoned memory, or where KV is collected by a table that has gone wrong, says that
                # something was read, not what: without poison and without KV the laws may.
                if not _run_world(*world, poison=True):
                    _run_world(*world, poison=False)
                yield


def _probes(
    probes: Iterable[Callable[[Bench], dict[str, list[Mismatch]]]], bench: Bench, result: Evaluation
) -> Iterator[None]:  # fmt: skip
    """Run the probes one by one; comes back after each."""
    for probe in probes:
        clauses = clauses_of(probe)
        if clauses is not None and not any(map(result.asks, clauses)):
            continue
        try:
            with staying(), all_let_go():
                found = probe(bench)
            result.note(found, probe.__name__)
        except Exception as e:
            error = EvaluationError(probe.__name__, safely(repr, e), traceback.format_exc(), clauses or frozenset())
            result.errors.append(error)
        yield


def _begin(info: RunnerInfo, runner: RunnerFactory, selected: frozenset[str] | None) -> Evaluation:
    """An evaluation that knows what does not apply to this runner."""
    result = Evaluation(info, selected)
    clauses = load_clauses().values()
    result.skipped = {c.id: missing for c in clauses if (missing := c.missing(info.capabilities))}
    if Capability.STAGES not in info.capabilities:
        return result
    try:
        with staying():
            offered = load_stages(runner).stages.keys()
    except Exception as e:  # foreign code; without a list no clause about stages can be tested
        result.errors.append(EvaluationError("the list of stages", safely(repr, e), traceback.format_exc()))
        return result
    result.unjudged_stages = tuple(sorted(offered - stages_judged()))
    for c in clauses:
        lacking = stages_lacking(c.id, offered)
        if lacking:
            result.skipped[c.id] = (*result.skipped.get(c.id, ()), *lacking)
    return result


def can_run(kind: str, offered: frozenset[Capability]) -> bool:
    """Whether worlds of this kind ask only for what is offered."""
    if kind == "groups":
        return bool(GROUPS & offered)
    return kind != "drafts" or {Capability.DRAFT_LAYOUT, Capability.FORCED_STEP} <= offered


def record_parts(offered: frozenset[Capability]) -> frozenset[str]:
    """The extra record parts to ask a runner for."""
    parts = {"logits": Capability.RECORD_LOGITS, "kv": Capability.RECORD_KV}
    return frozenset(part for part, capability in parts.items() if capability in offered)


@all_let_go()
def _run_world(
    runner: RunnerFactory, oracle: RunnerFactory, kind: str, entropy: list[int], steps: int, result: Evaluation,
    *, poison: bool,
) -> bool:  # fmt: skip
    """Run one world on fresh runners; False if the candidate raised where it must not."""
    random = np.random.default_rng(entropy)
    offered = result.info.capabilities
    parts = record_parts(offered) if poison else record_parts(offered) - {"kv"}
    size = draw_size(kind, random, parts, offered, result.info.layout)
    where = f"world {kind}"
    errors = len(result.errors)
    changed: EvaluationError | None = None
    try:
        candidate, kv_cache_config = build_runner(runner, size.model, size.config, size.num_blocks)
    except Exception as e:
        result.errors.append(EvaluationError(where, safely(repr, e), traceback.format_exc()))
        return True
    oracle_config = replace(size.config, record=size.config.record - {"kv"})
    reference, _ = build_runner(oracle, size.model, oracle_config, size.num_blocks)
    order = random.permutation(np.arange(1, size.num_blocks)).tolist()
    world = PlanWorld(size.config, kv_cache_config, size.model.vocab_size, order)
    driver = RandomDriver(random, offered)
    judge = StepJudge(candidate, reference, size, kv_cache_config, offered)
    for number in range(steps):
        step = driver.next_step(world)
        try:
            judge.run_candidate(step, world.kept_blocks() if poison else None)
        except PlanChanged as e:  # the step itself was run, on a plan of its own: laws may say more
            changed = changed or EvaluationError(f"{where}, step {number}", str(e), traceback.format_exc())
        except Exception as e:
            result.errors.append(EvaluationError(f"{where}, step {number}", safely(repr, e), traceback.format_exc()))
            break
        finally:
            judge.run_oracle(step)
            judge.observe(world, step)
        try:
            with staying():  # a record may run code of its own when it is read
                found = judge.laws(step)
            result.note(found)
        except Exception as e:  # a record that no law can read
            result.errors.append(
                EvaluationError(f"{where}, record of step {number}", safely(repr, e), traceback.format_exc())
            )
            break
    result.counts += world.counts
    passed = len(result.errors) == errors
    result.errors += [changed] if changed else []
    return passed


def row_tracker(config: RunnerConfig) -> RowTracker | DenseRowTracker:
    """What follows the rows of this layout."""
    return DenseRowTracker.start(config) if config.layout == "dense" else RowTracker.start(config)


class StepJudge:
    """One candidate and one oracle on the same plans, and the laws on each step."""

    def __init__(
        self, candidate: ModelRunner, oracle: ModelRunner, size: WorldSize, kv_cache_config: KVCacheConfig,
        capabilities: frozenset[Capability],
    ) -> None:  # fmt: skip
        self.candidate, self.oracle = candidate, oracle
        self.size, self.kv_cache_config, self.capabilities = size, kv_cache_config, capabilities
        self.rows = row_tracker(size.config)
        # Clauses of the other layout: their laws would misread these rows.
        here = (None, size.config.layout or "slots")
        self.elsewhere = {c.id for c in load_clauses().values() if c.layout not in here}
        self.clean = True  # no index law has failed so far
        self.record: StepRecord | None = None
        self.reference: StepRecord | None = None
        self.handle: AsyncModelRunnerOutput | None = None  # the latest output on its way
        self.kept: KeptRecord | None = None  # the latest record, and what it was when its step ended
        self.stale: list[Mismatch] | None = None  # what the one before has become

    def run_candidate(self, step: PlannedStep, keep_blocks: frozenset[int] | None, *, take_output: bool = True) -> None:
        """One whole step on the candidate, its unused memory but `keep_blocks` poisoned first (None: no poison).

        take_output False: the output stays on its way, in `handle`; the laws are shown what the record says was taken,
        and who takes the output later compares it with that.

        Raises what the candidate raises, LeftTheProgram and PlanChanged.
        """
        self.record = self.handle = None
        plan = own_copy(step.plan)
        before, self.kept, self.stale = self.kept, None, None
        with staying():
            self._whole_step(plan, step, keep_blocks, take_output)
            self.stale = None if before is None else before.changes("MR-ASYNC-005")
            self.kept = KeptRecord.of(self.record)
        must_be_unchanged(plan, step.plan)

    def _whole_step(
        self, plan: SchedulerOutput, step: PlannedStep, keep_blocks: frozenset[int] | None, take_output: bool
    ) -> None:
        if keep_blocks is not None and Capability.POISON in self.capabilities:
            self.candidate.poison_unused(keep_blocks=keep_blocks | step.blocks_read())
        done = self.candidate.execute_model(plan, descriptor=step.descriptor)
        self.output = self.output_again = None
        if done is None:
            self.handle = self.candidate.sample_tokens(step.grammar, forced=self._in_candidates_order(step))
            if take_output:
                self.output = self.handle.get_output()
                again = self.handle.get_output()
                # None is an answer here, and the wrong one; `output_again` None means that nobody asked.
                self.output_again = EMPTY_MODEL_RUNNER_OUTPUT if again is None else again
        else:
            self.output = done
        self.record = self.candidate.last_step()
        if done is None and not take_output:
            tokens = self.record.tokens()
            self.output = ModelRunnerOutput(self.record.req_ids, tuple(tokens.values()))

    def _in_candidates_order(self, step: PlannedStep) -> ForcedStep | None:
        """The imposed outcome by the candidate's own batch order, so that a wrong order is found and not a crash."""
        if step.forced is None:
            return None
        order, ids = step.truth.order, self.candidate.last_step().req_ids
        if ids == order or sorted(ids) != sorted(order):
            return step.forced
        index = [order.index(r) for r in ids]
        f = step.forced
        drafts = None if f.draft_token_ids is None else f.draft_token_ids[index]
        return ForcedStep(f.token_ids[index], f.num_sampled[index], drafts)

    def run_oracle(self, step: PlannedStep) -> None:
        """The same step on the oracle, which takes the candidate's tokens if they are possible ones."""
        if self.oracle.execute_model(step.plan, descriptor=step.descriptor) is None:
            self.oracle.sample_tokens(step.grammar, forced=step.forced or self._candidates_tokens(step))
        self.reference = self.oracle.last_step()

    def observe(self, world: PlanWorld, step: PlannedStep) -> None:
        """Tell the world what entered the oracle's state."""
        assert self.reference is not None
        world.observe(self.reference.tokens(), step.drafts_held())

    def laws(self, step: PlannedStep) -> dict[str, list[Mismatch]]:
        """Every law on the latest step: clause id to mismatches, for the clauses it could judge."""
        c = self.context(step)
        self.rows.advance(step.plan, c.record)
        found: dict[str, list[Mismatch]] = {}
        for law in FIRST:
            found |= self._ask(c, (law,))
            if any(found.values()):
                self.clean = False
                return found
        found |= rows_follow_their_rules(c)
        found |= self._ask(c, CAUSES)
        self.clean = self.clean and not any(wrong for clause_id, wrong in found.items() if clause_id not in APART)
        if self.clean:
            found |= self._ask(c, CONSEQUENCES)
        return found

    def context(self, step: PlannedStep) -> StepContext:
        assert self.record is not None
        assert self.reference is not None
        return StepContext(
            step.plan, step.descriptor, self.record, self.reference, step.truth,
            self.output or EMPTY_MODEL_RUNNER_OUTPUT, self.output_again, self.size.config, self.kv_cache_config,
            self.size.model, self.capabilities, self.rows, step.grammar, self.stale,
        )  # fmt: skip

    def _ask(self, c: StepContext, laws: Iterable[Law]) -> dict[str, list[Mismatch]]:
        found = {}
        for law in laws:
            if law.clause_id not in self.elsewhere and (c.num_tokens or not law.needs_batch):
                answer = law.fn(c)
                if answer is not None:
                    found[law.clause_id] = answer
        return found

    def _candidates_tokens(self, step: PlannedStep) -> ForcedStep | None:
        """The candidate's outcome in true batch order; None where a right runner could not have drawn it."""
        try:
            if self.record is None or len(self.record.num_sampled) != len(self.record.req_ids):
                return None
            taken = self.record.tokens()
        except Exception:  # a record that cannot be read has no outcome to follow
            return None
        width = 1 + self.size.config.num_speculative_tokens
        token_ids = np.zeros((len(step.truth.order), width), np.int64)
        num_sampled = np.zeros(len(step.truth.order), np.int32)
        for i, req_id in enumerate(step.truth.order):
            tokens = taken.get(req_id)
            due = 1 if step.truth.requests[req_id].samples else 0
            if tokens is None or len(tokens) != due or not all(0 <= t < self.size.model.vocab_size for t in tokens):
                return None
            token_ids[i, :due] = tokens
            num_sampled[i] = due
        return ForcedStep(token_ids, num_sampled)
