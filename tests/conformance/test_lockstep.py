"""Lockstep agrees where two runners agree, names the first element where they do not, and certifies near ties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conformance.check import lockstep_on_worlds
from conformance.driver import RandomDriver, draw_size
from conformance.harness import build_runner
from conformance.lockstep import AGREE, DIVERGE, Lockstep, LockstepResult, TokenPolicy
from conformance.report import batch_table
from conformance.world import PlanWorld
from cpu_reference.async_output import AsyncOutput
from cpu_reference.runner import CpuModelRunner
from runner_api import CachedRequestData, NewRequestData, RunnerConfig, SchedulerOutput, StepRecord, WitnessConfig

CONFIG = RunnerConfig(max_num_reqs=4, max_num_batched_tokens=16, max_model_len=32, record=frozenset({"logits"}))
FIRST = SchedulerOutput(
    [NewRequestData("a", [1, 2, 3], [1, 2, 3], 0, ([1],)), NewRequestData("b", [4, 5], [4, 5], 0, ([2],))],
    num_scheduled_tokens={"a": 3, "b": 2}, total_num_scheduled_tokens=5,
)  # fmt: skip


def pair(candidate: type[CpuModelRunner], policy: TokenPolicy | None = None, lag: int = 0) -> Lockstep:
    model = WitnessConfig()
    runners = [build_runner(kind, model, CONFIG, 16)[0] for kind in (candidate, CpuModelRunner)]
    return Lockstep(*runners, policy or TokenPolicy(), lag)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_runner_agrees_with_itself_on_every_kind_of_world(lag: int) -> None:
    result = lockstep_on_worlds(CpuModelRunner, CpuModelRunner, steps=250, seed=1, lag=lag)
    assert result.first is None
    assert result.verdict == AGREE
    assert result.steps == 250
    assert result.fields == 250 * 14
    assert result.tokens > 500
    assert result.near_ties == 0


def test_nothing_compared_is_no_agreement() -> None:
    assert LockstepResult().verdict == DIVERGE


class LateTail(CpuModelRunner):
    """Says a wrong slot for the second token of the second request."""

    def last_step(self):  # type: ignore[no-untyped-def]
        record = super().last_step()
        if not record.num_reqs:
            return record
        slots = record.slot_mappings.copy()
        slots[0, int(record.query_start_loc[1]) + 1] = 18
        return replace(record, slot_mappings=slots)


def test_the_first_difference_is_named_and_marked() -> None:
    lockstep = pair(LateTail)
    assert lockstep.step(FIRST) is None
    first = lockstep.finish().first
    assert first is not None
    d = first.difference
    # the shorter request leads the batch: b owns tokens 0 and 1, a the rest
    assert (first.step, d.field, d.index, d.req_id, d.position) == (0, "slot_mappings", (0, 3), "a", 1)
    assert (d.got, d.expected) == (18, 17)
    line = next(x for x in first.table.splitlines() if x.startswith("a "))
    assert "»[16 *18* 18]«" in line
    assert lockstep.step(FIRST) is None, "nothing runs after a divergence"
    assert lockstep.result.steps == 1


class Stale(CpuModelRunner):
    """Gives, when asked late, what the newest step drew."""

    def sample_tokens(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        output = super().sample_tokens(*args, **kwargs)
        runner = self

        class Shared(AsyncOutput):
            def get_output(self):  # type: ignore[no-untyped-def]
                record = runner.last_step()
                return AsyncOutput(record.req_ids, record.token_ids, record.num_sampled).get_output()

        return Shared(output._req_ids, output._token_ids, output._num_sampled)


SECOND = SchedulerOutput([], CachedRequestData(["a"], [3], [None], [1]), {"a": 1}, 1)


@pytest.mark.parametrize(("lag", "verdict"), [(0, AGREE), (1, DIVERGE)])
def test_an_output_that_changes_later_shows_with_lag(lag: int, verdict: str) -> None:
    lockstep = pair(Stale, lag=lag)
    lockstep.step(FIRST)
    lockstep.step(SECOND)
    result = lockstep.finish()
    assert result.verdict == verdict
    if lag:
        assert result.first is not None
        assert (result.first.step, result.first.difference.field) == (0, "sampled_token_ids")


class Broken(CpuModelRunner):
    def execute_model(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        raise RuntimeError("no device")


def test_a_crash_is_a_divergence() -> None:
    lockstep = pair(Broken)
    assert lockstep.step(FIRST) is None
    assert "RuntimeError: no device" in str(lockstep.finish().first)
    assert lockstep.result.verdict == DIVERGE


class Impossible(CpuModelRunner):
    """Draws a token that does not exist."""

    def last_step(self):  # type: ignore[no-untyped-def]
        record = super().last_step()
        return replace(record, token_ids=record.token_ids + 1000)


def test_an_impossible_token_does_not_lead_the_oracle_astray() -> None:
    lockstep = pair(Impossible)
    assert lockstep.step(FIRST) is None
    assert lockstep.result.first is not None
    assert lockstep.result.first.difference.field == "token_ids"
    assert set(lockstep.oracle.last_step().tokens()) == {"a", "b"}


def nudged(by: float, swap: bool) -> type[CpuModelRunner]:
    """Logits off by `by`; with `swap` every row takes the runner-up instead of the best."""

    class Nudged(CpuModelRunner):
        def initialize_kv_cache(self, cache):  # type: ignore[no-untyped-def]
            super().initialize_kv_cache(cache)
            exact = self._model.compute_logits

            def compute_logits(hidden):  # type: ignore[no-untyped-def]
                logits = exact(hidden)
                best = logits.argmax(axis=1)
                rows = np.arange(len(logits))
                logits[rows, best] -= np.float32(by)
                if swap:
                    second = np.argsort(logits, axis=1)[:, -2:]
                    other = np.where(second[:, 1] == best, second[:, 0], second[:, 1])
                    logits[rows, other] = logits[rows, best] + np.float32(1e-3)
                return logits

            self._model.compute_logits = compute_logits

    return Nudged


def test_exact_models_know_no_near_tie() -> None:
    lockstep = pair(nudged(0.5, swap=True))
    assert lockstep.step(FIRST) is None
    assert lockstep.result.first is not None
    assert lockstep.result.first.difference.field == "token_ids"


def test_rounding_that_explains_a_token_is_a_near_tie() -> None:
    # two bounds: the logits may be off by this much, and then the winner's lead is within twice the error
    wide = TokenPolicy(exact=False, relative=0.2)
    lockstep = pair(nudged(0.4, swap=True), wide)
    record = lockstep.step(FIRST)
    assert record is not None, lockstep.result.first
    assert lockstep.result.near_ties == 2
    assert lockstep.result.verdict == AGREE
    assert record.forced_token_ids is not None, "the oracle goes on with the candidate's tokens"
    assert record.forced_token_ids[0, 0] != record.token_ids[0, 0]


def test_logits_beyond_the_bound_diverge_even_with_equal_tokens() -> None:
    lockstep = pair(nudged(0.001, swap=False), TokenPolicy(exact=False, relative=1e-5))
    assert lockstep.step(FIRST) is None
    assert lockstep.result.first is not None
    assert lockstep.result.first.difference.field == "logits"
    assert pair(nudged(0.001, swap=False), TokenPolicy(exact=False)).step(FIRST) is not None


class OffBy:
    """A dense run whose logits are off by a constant."""

    def __init__(self, logits: np.ndarray, error: float) -> None:
        self._logits = logits + error

    def observe(self, plan: SchedulerOutput) -> None:
        """It needs no plans."""

    def logits(self, record: StepRecord) -> np.ndarray:
        return self._logits


def test_low_precision_is_bounded_by_a_dense_run_of_it() -> None:
    exact = pair(CpuModelRunner).step(FIRST)
    assert exact is not None
    for dense_error, agrees in ((0.02, True), (0.005, False)):
        policy = TokenPolicy(exact=False, dense=OffBy(exact.logits, dense_error))
        lockstep = pair(nudged(0.05, swap=False), policy)
        assert (lockstep.step(FIRST) is not None) == agrees


def test_tables_show_padding_groups_and_empty_steps() -> None:
    size = draw_size("groups", np.random.default_rng(0))
    runner, cache = build_runner("cpu", size.model, size.config, size.num_blocks)
    world = PlanWorld(size.config, cache, 64)
    world.add([1, 2, 3], 3)
    step = world.close(pad_tokens=2, pad_reqs=1)
    runner.execute_model(step.plan, descriptor=step.descriptor)
    runner.sample_tokens()
    table = batch_table(runner.last_step())
    assert "(pad)" in table
    assert " | " in table
    runner.execute_model(SchedulerOutput())
    assert "(no request is scheduled)" in batch_table(runner.last_step())


def test_a_driver_repeats_its_plans() -> None:
    plans = []
    for _ in range(2):
        size = draw_size("plain", np.random.default_rng(5))
        cache = build_runner("cpu", size.model, size.config, size.num_blocks)[1]
        world, driver = PlanWorld(size.config, cache, 64), RandomDriver(5)
        steps = []
        for _ in range(5):
            step = driver.next_step(world)
            world.observe({r: [1] if t.samples else [] for r, t in step.truth.requests.items()})
            steps.append(step.plan.num_scheduled_tokens)
        plans.append(steps)
    assert plans[0] == plans[1]


class Around:
    """The reference behind another face: its own code never sees what this class says."""

    def __init__(self, config: RunnerConfig) -> None:
        self._runner = CpuModelRunner(config)

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)


def saying(**fields: object) -> type[Around]:
    """A runner whose record says something else in some fields; a callable changes the field."""

    class Saying(Around):
        def last_step(self):  # type: ignore[no-untyped-def]
            record = self._runner.last_step()
            return replace(record, **{k: f(getattr(record, k)) if callable(f) else f for k, f in fields.items()})

    return Saying


class NoRecord(Around):
    def last_step(self) -> None:
        return None


class NoOutput(CpuModelRunner):
    def sample_tokens(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        super().sample_tokens(*args, **kwargs)


HOSTILE = {
    "record": NoRecord,
    "sampled_token_ids": NoOutput,
    "token_ids": saying(token_ids=lambda a: a[:, 0]),
    "positions": saying(positions=lambda a: a.astype(float)),
    "logits": saying(logits=lambda a: a[:, :3]),
    "intermediates": saying(intermediates=None),
    **{
        name: saying(**{name: None})
        for name in ("req_ids", "query_start_loc", "seq_lens", "block_tables", "slot_mappings", "num_sampled")
    },
}


@pytest.mark.parametrize("field", HOSTILE)
def test_whatever_a_record_holds_is_a_divergence_that_names_the_field(field: str) -> None:
    lockstep = pair(HOSTILE[field], TokenPolicy(exact=False))
    assert lockstep.step(FIRST) is None
    result = lockstep.finish()
    assert result.verdict == DIVERGE
    assert result.first is not None
    assert result.first.difference.field == field
    assert str(result.first)
