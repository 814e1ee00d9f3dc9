"""Lockstep agrees where two runners agree, names the first element where they do not, and certifies near ties."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.certificates import Certifier
from conformance.check import lockstep_on_worlds
from conformance.driver import KINDS, RandomDriver, draw_size
from conformance.harness import build_runner
from conformance.lockstep import AGREE, DIVERGE, Lockstep, LockstepResult, TokenPolicy
from conformance.report import batch_table
from conformance.world import PlanWorld
from cpu_reference.async_output import AsyncOutput
from cpu_reference.runner import CAPABILITIES, CpuModelRunner
from runner_api import (
    CachedRequestData,
    ForcedStep,
    GrammarOutput,
    NewRequestData,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    StepRecord,
    WitnessConfig,
)

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


def test_exact_models_have_the_oracles_logits() -> None:
    for swap in (False, True):
        lockstep = pair(nudged(1e-3, swap=swap))
        assert lockstep.step(FIRST) is None
        assert lockstep.result.first is not None
        assert lockstep.result.first.difference.field == "logits"


def test_logits_that_are_off_excuse_no_token() -> None:
    """The tolerance of logits is not handed on: the token is judged by the candidate's own logits."""
    lockstep = pair(nudged(0.4, swap=True), TokenPolicy(exact=False, relative=0.2))
    record = lockstep.step(FIRST)
    assert record is not None, lockstep.result.first
    assert (lockstep.result.verdict, lockstep.result.near_ties) == (AGREE, 0), "it drew what its logits say"
    assert record.forced_token_ids is not None, "the oracle goes on with the candidate's tokens"
    assert record.forced_token_ids[0, 0] != record.token_ids[0, 0]


SEEDED = SchedulerOutput(
    [NewRequestData("a", [1, 2, 3], [1, 2, 3], 0, ([1],), SamplingParams(temperature=0.7), seed=5)],
    num_scheduled_tokens={"a": 3}, total_num_scheduled_tokens=3,
)  # fmt: skip


def given_logits(share: float) -> tuple[np.ndarray, int, float]:
    """Logits of `SEEDED` under which one token is behind the winner by a share of the certificate's bound; that token;
    the bound in logits."""
    runner = build_runner("cpu", WitnessConfig(), CONFIG, 16)[0]
    runner.execute_model(SEEDED)
    runner.sample_tokens()
    logits = runner.last_step().logits.astype(np.float64)
    certifier = Certifier(CONFIG)
    certifier.observe(SEEDED)
    for _ in range(3):
        draw = certifier.draws(runner.last_step(), logits)[0][0]
        second, winner = np.argsort(draw.scores)[-2:]
        bound = draw.bounds[second] + draw.bounds[winner]
        logits[0, second] += 0.7 * (draw.scores[winner] - draw.scores[second] - share * bound)
    return logits, int(second), float(0.7 * bound)


def rounding(token: int, amount: float) -> type[CpuModelRunner]:
    """A runner that processes the logit of one token with an error."""

    class Rounding(CpuModelRunner):
        def initialize_kv_cache(self, cache):  # type: ignore[no-untyped-def]
            super().initialize_kv_cache(cache)
            exact = self.sampler.sample

            def sample(logits, rows, **kwargs):  # type: ignore[no-untyped-def]
                logits = logits.copy()
                logits[0, token] += amount
                return exact(logits, rows, **kwargs)

            self.sampler.sample = sample

    return Rounding


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("share", "off", "verdict"), [(0.3, 0.6, AGREE), (1.7, 2.0, DIVERGE)])
def test_rounding_that_explains_a_token_is_a_near_tie(exact: bool, share: float, off: float, verdict: str) -> None:
    """On given logits, which are the same for both: an error of half the bound and one of twice the bound."""
    logits, token, bound = given_logits(share)
    config = replace(CONFIG, dtype="float64")
    runners = [build_runner(r, WitnessConfig(), config, 16)[0] for r in (rounding(token, off * bound), "cpu")]
    lockstep = Lockstep(*runners, TokenPolicy(exact=exact))
    lockstep.certifier = Certifier(CONFIG)  # judged as what computes in float32
    lockstep.step(SEEDED, forced=ForcedStep(np.array([[9]]), np.array([1], np.int32), logits=logits))
    result = lockstep.finish()
    assert result.verdict == verdict, result.line()
    assert lockstep.candidate.last_step().token_ids.tolist() == [[token]]
    assert result.near_ties == (verdict == AGREE)
    if verdict == AGREE:
        assert result.first is None
        assert "near_ties=1 (rate 1.0e+00, expected" in result.line()
    else:
        assert result.first is not None
        assert result.first.difference.field == "token_ids"
        assert re.search(r"margin \S+, bound \S+\)", str(result.first))


def test_more_near_ties_than_expected_are_a_divergence() -> None:
    result = LockstepResult(steps=9, tokens=1000, near_ties=4, expected_near_ties=0.01)
    assert (result.verdict, result.near_tie_cap) == (DIVERGE, pytest.approx(3.1))
    assert result.line().endswith("near_ties=4 (rate 4.0e-03, expected 1.0e-05): more than 3.1")
    assert replace(result, near_ties=3).verdict == AGREE
    assert replace(result, max_near_ties=0.004).verdict == AGREE
    assert replace(result, near_ties=1, max_near_ties=0.0).verdict == DIVERGE
    total = LockstepResult()
    total.add(result)
    total.add(replace(result, expected_near_ties=1.0))
    assert (total.near_ties, total.tokens, total.verdict) == (8, 2000, AGREE)


class Unfaithful(CpuModelRunner):
    """Reports a row without a winner where there is one."""

    def last_step(self):  # type: ignore[no-untyped-def]
        record = super().last_step()
        return replace(record, faults=record.faults + 1) if record.num_reqs else record


@pytest.mark.parametrize("exact", [True, False])
def test_faults_are_compared(exact: bool) -> None:
    lockstep = pair(Unfaithful, TokenPolicy(exact=exact))
    assert lockstep.step(FIRST) is None
    assert lockstep.result.first is not None
    assert lockstep.result.first.difference.field == "faults"


@pytest.mark.parametrize("exact", [True, False])
def test_a_row_without_a_winner_agrees_where_both_say_so(exact: bool) -> None:
    """A NaN on one request: token 0 in the state, no token in the output, the other request untouched."""
    lockstep = pair(CpuModelRunner, TokenPolicy(exact=exact, relative=np.inf))
    logits = np.tile(np.arange(64, dtype=np.float32), (2, 1))
    logits[0, 7] = np.nan
    forced = ForcedStep(np.zeros((2, 1), np.int64), np.ones(2, np.int32), logits=logits)
    lockstep.step(FIRST, forced=forced)
    result = lockstep.finish()
    if exact:
        assert result.verdict == AGREE, result.first
        assert lockstep.candidate.last_step().faults.tolist() == [1, 0]
    else:  # where logits have a tolerance, a NaN is outside of it
        assert result.first is not None
        assert result.first.difference.field == "logits"


class Echo:
    """A logits processor with state by row: what was drawn last, and drafts before a row, gain a little."""

    arguments = ("gain",)

    def __init__(self, max_num_reqs: int, vocab_size: int, arrays: Any) -> None:
        self.last, self.gain = arrays.zeros(max_num_reqs, "int64"), arrays.zeros(max_num_reqs, "float64")

    def validate(self, params: SamplingParams) -> None:
        """Anything goes."""

    def add_request(self, row: int, params: SamplingParams, prompt: list[int], outputs: list[int]) -> bool:
        self.last[row] = (outputs or prompt)[-1]
        self.gain[row] = (params.extra_args or {}).get("gain", 0.0)
        return self.gain[row] != 0

    def remove_request(self, row: int) -> None:
        self.last[row] = -1

    def move_rows(self, moves: Any) -> None:
        raise AssertionError("rows do not move in this layout")

    def observe(self, rows: Any, token_ids: Any, num_sampled: Any) -> None:
        for row, tokens, n in zip(rows, token_ids, num_sampled, strict=True):
            if n:
                self.last[row] = tokens[n - 1]

    def apply(self, logits: Any, context: Any) -> None:
        for x, row, local_pos, token in zip(logits, context.rows, context.local_pos, context.input_ids, strict=True):
            x[token if local_pos else self.last[row]] += self.gain[row]


@pytest.mark.parametrize("exact", [True, False])
def test_custom_processors_have_their_part_in_certificates(exact: bool) -> None:
    """A world whose requests ask for a processor, preempted and finished in between: every token is certified."""
    size = draw_size("plain", np.random.default_rng(3), frozenset({"logits"}))
    config = replace(size.config, logits_processors=(Echo,))
    runners = [build_runner("cpu", size.model, config, size.num_blocks) for _ in range(2)]
    world, driver = PlanWorld(config, runners[0][1], size.model.vocab_size), RandomDriver(3)
    lockstep = Lockstep(runners[0][0], runners[1][0], TokenPolicy(exact=exact))
    certified = 0
    for _ in range(60):
        step = driver.next_step(world)
        for new in step.plan.scheduled_new_reqs:
            new.sampling_params = SamplingParams(temperature=0.7, extra_args={"gain": 9.0})
        record = lockstep.step(step.plan, step.descriptor, step.forced)
        assert record is not None, lockstep.result.first
        world.observe(record.tokens())
        certified += sum(lockstep.certifier.processors._edits.values())
    assert world.counts["preempt"] > 0
    assert world.counts["finish"] > 0
    assert (certified > 0) == (not exact), "in exact runs only where tokens differ"


@pytest.mark.parametrize("seed", range(2))
def test_certificates_and_reference_agree_on_worlds_of_every_kind(seed: int) -> None:
    """Every parameter, masks, drafts, preemptions: each token of the reference is the winner of its certificate."""
    tokens = 0
    for kind in KINDS:
        random = np.random.default_rng([seed, KINDS.index(kind)])
        size = draw_size(kind, random, frozenset({"logits"}), CAPABILITIES)
        candidate, cache = build_runner("cpu", size.model, size.config, size.num_blocks)
        oracle, _ = build_runner("cpu", size.model, size.config, size.num_blocks)
        world, driver = PlanWorld(size.config, cache, size.model.vocab_size), RandomDriver(random, CAPABILITIES)
        lockstep = Lockstep(candidate, oracle, TokenPolicy(exact=False))
        for _ in range(30):
            step = driver.next_step(world)
            record = lockstep.step(step.plan, step.descriptor, step.forced, step.grammar)
            assert record is not None, lockstep.result.first
            world.observe(record.tokens(), step.drafts_held())
        result = lockstep.finish()
        assert (result.verdict, result.near_ties) == (AGREE, 0), result.line()
        tokens += result.tokens
    assert tokens > 300


def test_masks_are_given_to_both() -> None:
    """Request b alone has a grammar: one token is left to it, whatever its logits."""
    mask = np.zeros((1, 2), np.int32)
    mask[0, 1] = 0b1000
    lockstep = pair(CpuModelRunner, TokenPolicy(exact=False))
    record = lockstep.step(FIRST, grammar=GrammarOutput(["b"], mask))
    assert record is not None, lockstep.result.first
    assert record.tokens()["b"] == (35,)
    assert lockstep.finish().verdict == AGREE


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
