"""The two row layouts of one runner are the same runner: for every plan, deferred outputs included, the same tokens,
log probabilities and KV by request, wherever its row is.

One world makes the plans of dense rows, and each is told to fixed rows in their shape. On the witness model everything
is compared to the last bit. On a real model sums come in another order, so that logits, KV and log probabilities have
bounds, and each token is certified from the logits that it was drawn from; fixed rows then take the dense ones' tokens.
Driven by Hypothesis (`equivalence_machine`), and by seeds: `python -m conformance.equivalence --help`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from conformance.certificates import DIVERGENCE, NEAR_TIE, Certifier, near_tie_cap, near_ties_text
from conformance.driver import KINDS, REASONING, RandomDriver, draw_masks, draw_size, palette
from conformance.evaluate import can_run, record_parts
from conformance.foreign import all_let_go, let_go, staying
from conformance.harness import build_runner, info_of
from conformance.layouts import in_layout
from conformance.machine import VOCAB, plan_rules
from conformance.planned_step import PlannedStep
from conformance.replay_layout import resumed_as_new
from conformance.world import PlanWorld
from runner_api import (
    AsyncModelRunnerOutput,
    Capability,
    ConfigError,
    ForcedStep,
    ModelRunner,
    ModelRunnerOutput,
    NewRequestData,
    PlanError,
    RunnerConfig,
    SchedulerOutput,
    StepRecord,
    WitnessConfig,
    WitnessGroup,
)
from runner_api.errors import safely
from runner_api.loader import load_factory
from runner_api.protocol import RunnerFactory

# Of a real model, relative to the largest |value|: logits as in lockstep, and what is made of them or stored.
LOGITS, VALUES = 1e-4, 1e-3
# Fixed rows are held by requests that sit out steps: there must be one for whoever may be live.
MORE_ROWS = 32
# What a run of the machine must have met, by the world's own counts.
LEAST = {"condense_move": 200, "swap": 50, "preempt": 50, "prefix_hit": 50}


class Parted(AssertionError):
    """The layouts differ."""


@dataclass(slots=True)
class Tally:
    """What was compared so far, over any number of runs. events: the worlds' counts."""

    runs: int = 0
    steps: int = 0
    tokens: int = 0
    late_outputs: int = 0
    near_ties: int = 0
    expected_near_ties: float = 0.0
    events: Counter[str] = field(default_factory=Counter)

    def missing(self, least: Mapping[str, int]) -> dict[str, int]:
        """What was met too seldom."""
        return {name: self.events[name] for name, n in least.items() if self.events[name] < n}

    def line(self) -> str:
        events = ", ".join(f"{self.events[name]} {name}" for name in (*LEAST, "return", "resume", "resume_same_plan"))
        ties = near_ties_text(self.near_ties, self.tokens, self.expected_near_ties, self.near_tie_cap)
        return (
            f"{self.runs} runs, {self.steps} steps, {self.tokens} tokens, {self.late_outputs} late outputs, "
            f"{ties}; {events}"
        )

    @property
    def near_tie_cap(self) -> float:
        return near_tie_cap(self.tokens, self.expected_near_ties)


class Twins:
    """One runner in both layouts, on the same plans. exact: nothing may differ. lag: steps until outputs are taken."""

    def __init__(
        self, runner: str | RunnerFactory, model: Any, config: RunnerConfig, num_blocks: int, tally: Tally,
        *, exact: bool = True, lag: int = 0,
    ) -> None:  # fmt: skip
        self.config = replace(config, layout="dense", initial_free_rows=None)
        fixed = replace(
            config, layout="slots", initial_free_rows=None, reorder_batch_threshold=None,
            max_num_reqs=num_blocks + MORE_ROWS,
        )  # fmt: skip
        self.dense, self.kv_cache_config = build_runner(runner, model, self.config, num_blocks)
        self.slots, _ = build_runner(runner, model, fixed, num_blocks)
        self.exact, self.lag, self.tally = exact, lag, tally
        self.certifier = Certifier(self.config, self.dense.describe().dtype)
        self._poisons = Capability.POISON in self.dense.describe().capabilities
        self._known: dict[str, NewRequestData] = {}  # live requests as they were announced
        self._late: deque[tuple[AsyncModelRunnerOutput, AsyncModelRunnerOutput, dict[str, Any]]] = deque()
        tally.runs += 1

    def step(self, step: PlannedStep, keep_blocks: frozenset[int]) -> StepRecord:
        """One plan on both; the dense rows' record. Raises Parted."""
        told = self._for_slots(step)
        self.certifier.observe(told)
        if self._poisons:
            self.dense.poison_unused(keep_blocks=keep_blocks | step.blocks_read())
        first = self._run(self.dense, step.plan, step, None)
        follow = self.dense.last_step() if first is not None and not self.exact else None
        second = self._run(self.slots, told, step, follow)
        record, other = self.dense.last_step(), self.slots.last_step()
        self.tally.steps += 1
        if (first is None) != (second is None):
            raise Parted(f"one layout has a batch: dense {record.req_ids}, slots {other.req_ids}")
        if first is not None and second is not None:
            self._compare(step, record, other)
            self._late.append((first, second, record.tokens()))
        self.certifier.take(record.tokens())
        while len(self._late) > self.lag:
            self._take_output()
        return record

    def finish(self) -> None:
        """Take the last outputs. The runners are let go by whoever has built the twins."""
        while self._late:
            self._take_output()

    # -- one step ---------------------------------------------------------------------------------------------

    def _for_slots(self, step: PlannedStep) -> SchedulerOutput:
        """Who comes back is new, and whoever was preempted must be told."""
        plan = step.plan
        told = replace(
            resumed_as_new(plan, self._known), preempted_req_ids=step.truth.removed - plan.finished_req_ids
        )  # fmt: skip
        for req_id in plan.finished_req_ids:
            self._known.pop(req_id, None)
        self._known |= {new.req_id: new for new in plan.scheduled_new_reqs}
        return told

    def _run(
        self, runner: ModelRunner, plan: SchedulerOutput, step: PlannedStep, follow: StepRecord | None
    ) -> AsyncModelRunnerOutput | None:
        """follow: whose tokens enter the state."""
        if runner.execute_model(plan, descriptor=step.descriptor) is not None:
            return None
        forced = None
        if follow is not None:
            order = _order(runner.last_step(), follow)
            forced = ForcedStep(follow.token_ids[order], follow.num_sampled[order])
        try:
            return runner.sample_tokens(step.grammar, forced=forced)
        except PlanError as e:
            if follow is None:
                raise
            raise Parted(f"an outcome of dense rows that fixed rows cannot have: {e}") from e

    # -- comparing --------------------------------------------------------------------------------------------

    def _compare(self, step: PlannedStep, record: StepRecord, other: StepRecord) -> None:
        """By request: what is told to the model, what it gives, what is drawn, and what is stored."""
        order = _order(record, other)  # where the dense batch's requests stand in the other one
        for name in ("num_sampled", "num_rejected", "seeds", "faults"):
            self._same(name, record, getattr(record, name), getattr(other, name)[order])
        for i, j in enumerate(order):
            mine, theirs = (_tokens_of(r, k) for r, k in ((record, i), (other, j)))
            for name in ("input_ids", "positions"):
                got, wanted = getattr(record, name)[mine], getattr(other, name)[theirs]
                if not np.array_equal(got, wanted):
                    raise Parted(f"{name} of {record.req_ids[i]}: dense {got.tolist()}, slots {wanted.tolist()}")
        if record.logits is not None and other.logits is not None:
            self._close("logits", record, record.logits, other.logits[order], LOGITS)
        for req_id in record.kv if record.kv else ():
            kv, wanted = record.kv[req_id], other.kv[req_id]
            if kv.shape != wanted.shape:
                raise Parted(f"kv of {req_id}: dense has shape {kv.shape}, slots {wanted.shape}")
            if not (np.array_equal(kv, wanted) if self.exact else _near(kv, wanted, VALUES)):
                raise Parted(f"kv of {req_id} differs")
        self.tally.tokens += int(record.num_sampled.sum())
        if self.exact:
            self._same("token_ids", record, record.token_ids[:, 0], other.token_ids[order, 0])
        else:
            self._certify(step, record)
            self._certify(step, other)

    def _same(self, name: str, record: StepRecord, got: np.ndarray, wanted: np.ndarray) -> None:
        wrong = np.flatnonzero(got != wanted)
        if len(wrong):
            i = int(wrong[0])
            raise Parted(f"{name} of {record.req_ids[i]}: dense {got[i]}, slots {wanted[i]}")

    def _close(self, name: str, record: StepRecord, got: np.ndarray, wanted: np.ndarray, bound: float) -> None:
        for req_id, mine, theirs in zip(record.req_ids, got, wanted, strict=True):
            if not (np.array_equal(mine, theirs, equal_nan=True) if self.exact else _near(mine, theirs, bound)):
                raise Parted(f"{name} of {req_id} differ by up to {np.nanmax(np.abs(mine - theirs)):.3g}")

    def _certify(self, step: PlannedStep, record: StepRecord) -> None:
        """Each token that counts, from the logits that it was drawn from."""
        assert record.logits is not None
        for i, rows in enumerate(self.certifier.draws(record, record.logits, step.grammar)):
            if not record.num_sampled[i]:
                continue
            certificate = rows[0].certify(int(record.token_ids[i, 0]))
            self.tally.expected_near_ties += certificate.expected
            self.tally.near_ties += certificate.verdict == NEAR_TIE
            if certificate.verdict == DIVERGENCE:
                raise Parted(f"token of {record.req_ids[i]}: {certificate}")

    def _take_output(self) -> None:
        first, second, taken = self._late.popleft()
        mine, theirs = first.get_output(), second.get_output()
        self.tally.late_outputs += self.lag > 0
        failed = set(mine.errors)
        given, others = mine.tokens(), theirs.tokens()
        wanted = {req_id: () if req_id in failed else tuple(tokens) for req_id, tokens in taken.items()}
        if given != wanted or {r: others.get(r) for r in given} != given or set(theirs.errors) != failed:
            raise Parted(f"outputs: dense {given}, slots {others}, taken {wanted}")
        scores, other_scores = _scores(mine), _scores(theirs)
        if scores.keys() != other_scores.keys():
            raise Parted(f"log probabilities of {sorted(scores)} and {sorted(other_scores)}")
        for key, part in scores.items():
            if not self._scores_agree(part, other_scores[key]):
                raise Parted(f"{key[0]} of {key[1]}: dense {part}, slots {other_scores[key]}")

    def _scores_agree(self, got: tuple[np.ndarray, ...], wanted: tuple[np.ndarray, ...]) -> bool:
        """Token ids, values and ranks; where sums may differ, values alone: tokens of near values change places."""
        if [a.shape for a in got] != [a.shape for a in wanted]:
            return False
        if self.exact:
            return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(got, wanted, strict=True))
        same_token = np.array_equal(got[0][..., 0], wanted[0][..., 0])
        return same_token and _near(got[1], wanted[1], VALUES)


def _order(record: StepRecord, other: StepRecord) -> np.ndarray:
    """int64[R] where each request of a batch stands in the other one."""
    place = {req_id: i for i, req_id in enumerate(other.req_ids)}
    if place.keys() != set(record.req_ids):
        raise Parted(f"the batches hold {sorted(record.req_ids)} and {sorted(other.req_ids)}")
    return np.array([place[req_id] for req_id in record.req_ids], np.int64)


def _tokens_of(record: StepRecord, i: int) -> slice:
    return slice(int(record.query_start_loc[i]), int(record.query_start_loc[i + 1]))


def _near(got: np.ndarray, wanted: np.ndarray, bound: float) -> bool:
    """Infinities and NaN alike; the rest within a bound relative to the largest value."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    finite = np.isfinite(wanted)
    if not np.array_equal(np.where(finite, 0, wanted), np.where(finite, 0, got), equal_nan=True):
        return False
    scale = 1.0 + np.abs(wanted[finite]).max(initial=0.0)
    return bool((np.abs(got[finite] - wanted[finite]) <= bound * scale).all())


def _scores(output: ModelRunnerOutput) -> dict[tuple[str, str], tuple[np.ndarray, ...]]:
    """(what, request) to its token ids, values and ranks."""
    found = {}
    if output.logprobs is not None:
        for i, req_id in enumerate(output.req_ids):
            lists = output.logprobs
            parts = (np.asarray(lists.token_ids[i]), np.asarray(lists.logprobs[i]), np.asarray(lists.ranks[i]))
            found["logprobs", req_id] = parts
    for req_id, lists in output.prompt_logprobs.items():
        parts = (np.asarray(lists.token_ids), np.asarray(lists.logprobs), np.asarray(lists.ranks))
        found["prompt_logprobs", req_id] = parts
    return found


# -- by seeds -------------------------------------------------------------------------------------------------


@all_let_go()
def run_world(runner: str | RunnerFactory, seed: int, number: int, steps: int, tally: Tally) -> None:
    """One seeded world on the witness model, of every kind in turn."""
    offered = _offered(runner)
    kinds = [kind for kind in KINDS if can_run(kind, offered)]
    random = np.random.default_rng([seed, number])
    size = draw_size(kinds[number % len(kinds)], random, record_parts(offered), offered, "dense")
    lag = int(random.integers(3)) if Capability.ASYNC_OUTPUT in offered else 0
    twins = Twins(runner, size.model, size.config, size.num_blocks, tally, lag=lag)
    world = PlanWorld(twins.config, twins.kv_cache_config, size.model.vocab_size)
    _drive(twins, world, RandomDriver(random, offered, churn=0.12), steps)


@all_let_go()
def run_model(
    runner: str | RunnerFactory, model: str, seed: int, number: int, steps: int, tally: Tally, dtype: str = "float32"
) -> None:
    """One seeded world on a real model."""
    from runner_api.checkpoint import load_checkpoint, resolve_model

    checkpoint = load_checkpoint(resolve_model(model))
    offered, random = _offered(runner), np.random.default_rng([seed, number, 1])
    threshold = [None, 1, 4][int(random.integers(3))]
    config = RunnerConfig(
        max_num_reqs=int(random.integers(2, 6)), max_num_batched_tokens=48, max_model_len=48, dtype=dtype,
        record=record_parts(offered), reorder_batch_threshold=threshold,
    )  # fmt: skip
    lag = int(random.integers(3)) if Capability.ASYNC_OUTPUT in offered else 0
    twins = Twins(runner, checkpoint, config, 40, tally, exact=False, lag=lag)
    world = PlanWorld(twins.config, twins.kv_cache_config, checkpoint.config.vocab_size)
    _drive(twins, world, RandomDriver(random, offered, max_prompt=16, churn=0.12), steps)


def _drive(twins: Twins, world: PlanWorld, driver: RandomDriver, steps: int) -> None:
    try:
        for _ in range(steps):
            step = driver.next_step(world)
            world.observe(twins.step(step, world.kept_blocks()).tokens())
        twins.finish()
    finally:
        twins.tally.events += world.counts


def _offered(runner: str | RunnerFactory) -> frozenset[Capability]:
    """What both layouts offer: drafts are not among it."""
    return info_of(in_layout(runner, "dense")).capabilities


# -- under Hypothesis -----------------------------------------------------------------------------------------


def equivalence_machine(runner: str | RunnerFactory, tally: Tally) -> type[RuleBasedStateMachine]:
    """A state machine class that searches for a plan after which the layouts of `runner` part."""
    factory, offered = load_factory(runner), _offered(runner)
    reasoning = REASONING if Capability.THINKING_BUDGET in offered else None
    asked = st.sampled_from(palette(offered, RunnerConfig(reasoning=reasoning), VOCAB))

    class EquivalenceMachine(plan_rules(asked)):  # type: ignore[misc]
        @initialize(
            rows=st.integers(1, 6), block_size=st.integers(1, 6), window=st.none() | st.integers(1, 8),
            num_blocks=st.integers(12, 48), threshold=st.sampled_from([1, None, 3]), lag=st.integers(0, 2),
            masks=st.integers(0, 2**20),
        )  # fmt: skip
        def start(
            self, rows: int, block_size: int, window: int | None, num_blocks: int, threshold: int | None, lag: int,
            masks: int,
        ) -> None:  # fmt: skip
            groups = [WitnessGroup(block_size)]
            if window is not None and {Capability.MULTI_GROUP, Capability.SLIDING_WINDOW} <= offered:
                groups.append(WitnessGroup(2 * block_size, window))
            config = RunnerConfig(
                max_num_reqs=rows, max_num_batched_tokens=64, max_model_len=40, record=record_parts(offered),
                reorder_batch_threshold=threshold, reasoning=reasoning,
            )  # fmt: skip
            lag = lag if Capability.ASYNC_OUTPUT in offered else 0
            self.twins = Twins(factory, WitnessConfig(VOCAB, tuple(groups)), config, num_blocks, tally, lag=lag)
            self.world = PlanWorld(self.twins.config, self.twins.kv_cache_config, VOCAB)
            self.masks = np.random.default_rng(masks)

        @rule(seed=st.integers(0, 2**20), steps=st.integers(2, 10))
        def ramble(self, seed: int, steps: int) -> None:
            """A few steps in which a driver does everything at once."""
            driver = RandomDriver(seed, offered, churn=0.12)
            for _ in range(steps):
                self._run(driver.next_step(self.world))

        def close_and_run(self, pad_tokens: int, pad_reqs: int | None) -> None:
            padded = Capability.PADDED_BATCH in offered
            step = self.world.close(pad_tokens, pad_reqs) if padded else self.world.close()
            self._run(replace(step, grammar=draw_masks(self.world, step, self.masks)))

        def _run(self, step: PlannedStep) -> None:
            self.world.observe(self.twins.step(step, self.world.kept_blocks()).tokens())

        def teardown(self) -> None:
            if hasattr(self, "twins"):
                tally.events += self.world.counts
                try:
                    self.twins.finish()
                finally:
                    let_go(self.twins.dense)
                    let_go(self.twins.slots)

    return EquivalenceMachine


def search_equivalence(runner: str | RunnerFactory, profile: settings, tally: Tally) -> None:
    """Run the machine; raises AssertionError with the smallest story after which the layouts part."""
    run_state_machine_as_test(equivalence_machine(runner, tally), settings=profile)


# -- the campaign ---------------------------------------------------------------------------------------------


def campaign(
    runner: str | RunnerFactory, worlds: int, models: int, model: str, seed: int, steps: int,
    report: Callable[[str], object] = print,
) -> int:  # fmt: skip
    """Thousands of seeded worlds; 0 if all agree and everything was met.

    Raises ConfigError where there is nothing to run.
    """
    if worlds < 0 or models < 0 or worlds + models < 1 or steps < 1:
        raise ConfigError(
            "nothing would be tested", field="worlds, models, steps", got=(worlds, models, steps),
            expected="a world or a model, and steps >= 1",
        )  # fmt: skip
    exact, bounded = Tally(), Tally()
    start = time.perf_counter()
    for kind, tally, number in _runs(worlds, models, exact, bounded):
        try:
            with staying():
                if kind == "witness":
                    run_world(runner, seed, number, steps, tally)
                else:
                    run_model(runner, model, seed, number, steps, tally)
        except Exception as e:
            report(f"PARTED {kind} seed={seed} number={number}: {type(e).__name__}: {safely(str, e)}")
            return 1
    for name, tally in (("witness", exact), (model, bounded)):
        if tally.runs:
            report(f"{name}: {tally.line()}")
    seconds = time.perf_counter() - start
    missing = exact.missing(LEAST if worlds >= 300 else {})
    empty = [name for name, tally in (("witness", exact), (model, bounded)) if tally.runs and not tally.tokens]
    too_many = bounded.near_ties > bounded.near_tie_cap
    verdict = "DIVERGE" if missing or empty or too_many else "AGREE"
    why = f", met too seldom: {missing}" if missing else ""
    why += f", no token was compared: {', '.join(empty)}" if empty else ""
    report(f"verdict: {verdict} in {seconds:.1f} s{why}")
    return int(verdict != "AGREE")


def _runs(worlds: int, models: int, exact: Tally, bounded: Tally) -> Iterator[tuple[str, Tally, int]]:
    for number in range(worlds):
        yield "witness", exact, number
    for number in range(models):
        yield "model", bounded, number


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.equivalence", description="Both layouts, same plans.")
    parser.add_argument("--runner", default="cpu", help="whose layouts (default: cpu)")
    parser.add_argument("--worlds", type=int, default=3000, metavar="N", help="on the witness model (default: 3000)")
    parser.add_argument("--models", type=int, default=300, metavar="N", help="on the real model (default: 300)")
    parser.add_argument("--model", default="", metavar="PATH", help="the real model (default: llama-tiny of the tests)")
    parser.add_argument("--steps", type=int, default=25, help="of one world (default: 25)")
    parser.add_argument("--seed", type=int, default=0, help="of the first world (default: 0)")
    args = parser.parse_args(arguments)
    try:
        return campaign(args.runner, args.worlds, args.models, args.model or llama_tiny(), args.seed, args.steps)
    except ConfigError as e:
        print(e, file=sys.stderr)
        return 2


def llama_tiny() -> str:
    """The small real model that is kept beside the judge."""
    from importlib.resources import files

    return str(files("conformance") / "data" / "checkpoints" / "llama-tiny")


if __name__ == "__main__":
    sys.exit(main())
