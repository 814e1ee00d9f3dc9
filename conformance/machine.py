"""The plan world under Hypothesis: it searches for a sequence of actions that breaks a clause, and shrinks it.

Rules are the actions of `PlanWorld`; a step closes the plan, runs it on candidate and oracle and asks every law.
The failure text names the clause, its law, the batch with the differing cell marked, and the first mismatch. What took
place is a story too (`conformance.story`), which `conformance.shrink` makes smaller than Hypothesis can.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from conformance.clauses import clause
from conformance.divergence import Sides, first_divergence
from conformance.driver import REASONING, WorldSize, palette
from conformance.evaluate import StepJudge, record_parts
from conformance.foreign import let_go, staying
from conformance.harness import build_runner, info_of
from conformance.layouts import in_layout
from conformance.planned_step import WorldRequest
from conformance.report import batch_table
from conformance.story import Story, StoryWorld
from conformance.telling import Told, try_to_tell
from conformance.world import PlanWorld
from runner_api import AsyncModelRunnerOutput, Capability, RunnerConfig, WitnessConfig, WitnessGroup
from runner_api.errors import safely
from runner_api.loader import load_factory
from runner_api.protocol import RunnerFactory

VOCAB = 64
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
CHUNK = st.integers(1, 16)
INDEX = st.integers(0, 15)
SEED = st.integers(-(2**63), 2**63 - 1)


class StoryFailed(AssertionError):
    """A clause is broken, or the runner has raised; `story` is what led there."""

    def __init__(self, text: str, story: Story) -> None:
        super().__init__(text)
        self.story = story


def plan_rules(asked: st.SearchStrategy[Any]) -> type[RuleBasedStateMachine]:
    """The actions of a world as rules; who inherits them builds `world`, and runs a plan in `close_and_run`.

    asked: what requests may ask for.
    """

    class PlanRules(RuleBasedStateMachine):
        world: PlanWorld

        def close_and_run(self, pad_tokens: int, pad_reqs: int | None) -> None:
            raise NotImplementedError

        @precondition(lambda self: self.world.free_rows)
        @rule(prompt=TOKENS, chunk=CHUNK, params=asked, seed=SEED, spare=st.integers(0, 1))
        def add(self, prompt: list[int], chunk: int, params: Any, seed: int, spare: int) -> None:
            self.world.add(prompt, chunk, params, seed, spare_blocks=spare)

        @precondition(lambda self: self.world.free_rows > 1)
        @rule(prompt=TOKENS)
        def announce(self, prompt: list[int]) -> None:
            self.world.add(prompt, 0)

        @precondition(lambda self: self.world.hit_sources() and self.world.free_rows)
        @rule(which=INDEX, tail=TOKENS, chunk=CHUNK)
        def hit_prefix(self, which: int, tail: list[int], chunk: int) -> None:
            sources = self.world.hit_sources()
            self.world.add_with_prefix(sources[which % len(sources)], tail, chunk)

        @precondition(lambda self: self.world.unscheduled())
        @rule(which=INDEX, copied=CHUNK, tail=TOKENS, chunk=CHUNK)
        def copy_prefix(self, which: int, copied: int, tail: list[int], chunk: int) -> None:
            sources = [s for s in self.world.hit_sources() if isinstance(s, WorldRequest)]
            if sources:
                source = sources[which % len(sources)]
                self.world.add_with_copy(source, min(copied, source.computed), tail, chunk)

        @precondition(lambda self: self.world.unscheduled())
        @rule(which=INDEX, chunk=CHUNK)
        def extend(self, which: int, chunk: int) -> None:
            requests = self.world.unscheduled()
            self.world.schedule(requests[which % len(requests)].req_id, chunk)

        @precondition(lambda self: self.world.unscheduled())
        @rule(chunk=CHUNK, steps=st.integers(1, 4))
        def go_on(self, chunk: int, steps: int) -> None:
            """Steps in which everybody goes on: most of what an engine ever does."""
            for _ in range(steps):
                for request in self.world.unscheduled():
                    self.world.schedule(request.req_id, chunk)
                self.close_and_run(0, 0)

        @precondition(lambda self: self.world.removable())
        @rule(which=INDEX, told=st.booleans())
        def preempt(self, which: int, told: bool) -> None:
            held = self.world.removable()
            self.world.preempt(held[which % len(held)], told=told)

        @precondition(lambda self: self.world.waiting)
        @rule(which=INDEX, chunk=CHUNK)
        def resume(self, which: int, chunk: int) -> None:
            waiting = list(self.world.waiting)
            self.world.resume(waiting[which % len(waiting)], chunk)

        @precondition(lambda self: self.world.removable())
        @rule(which=INDEX)
        def finish(self, which: int) -> None:
            held = self.world.removable()
            self.world.finish(held[which % len(held)])

        @precondition(lambda self: self.world.running)
        @rule(which=INDEX)
        def abort(self, which: int) -> None:
            known = [*self.world.waiting, "nobody"]
            self.world.abort(known[which % len(known)])

        @precondition(lambda self: self.world.pending)
        @rule(pad_tokens=st.integers(0, 4), pad_reqs=st.none() | st.integers(0, 2))
        def step(self, pad_tokens: int, pad_reqs: int | None) -> None:
            self.close_and_run(pad_tokens, pad_reqs)

    return PlanRules


def machine_for(
    runner: str | RunnerFactory, oracle: str | RunnerFactory = "cpu", *, late_outputs: bool = True
) -> type[RuleBasedStateMachine]:
    """A state machine class that judges `runner`: it raises StoryFailed, also where the runner raises on a legal plan.

    late_outputs: some stories take outputs a step late, which a `Story` does not tell.
    """
    candidate_factory = load_factory(runner)
    info = info_of(candidate_factory)
    offered, layout = info.capabilities, info.layout
    oracle_factory = in_layout(oracle, layout)
    reasoning = REASONING if Capability.THINKING_BUDGET in offered else None
    asked = st.sampled_from(palette(offered, RunnerConfig(reasoning=reasoning), VOCAB))

    class PlanMachine(plan_rules(asked)):  # type: ignore[misc]
        @initialize(
            rows=st.integers(1, 8) | st.integers(9, 64), block_size=st.integers(1, 6) | st.integers(7, 64),
            window=st.none() | st.integers(1, 8), num_blocks=st.integers(12, 60), flip=st.booleans(),
            late=st.booleans(), order=st.randoms(use_true_random=False), threshold=st.sampled_from([None, 1, 4]),
        )  # fmt: skip
        def start(
            self, rows: int, block_size: int, window: int | None, num_blocks: int, flip: bool, late: bool,
            order: Random, threshold: int | None,
        ) -> None:  # fmt: skip
            groups = [WitnessGroup(block_size)]
            if window is not None and {Capability.MULTI_GROUP, Capability.SLIDING_WINDOW} <= offered:
                groups.append(WitnessGroup(2 * block_size, window))
            config = RunnerConfig(
                max_num_reqs=rows, max_num_batched_tokens=64, max_model_len=40, record=record_parts(offered),
                reasoning=reasoning, layout=layout,
            )  # fmt: skip
            if layout == "dense":
                config = replace(config, reorder_batch_threshold=threshold)
            elif flip:
                config = replace(config, initial_free_rows=tuple(range(rows))[::-1])
            size = WorldSize(config, WitnessConfig(groups=tuple(groups)), num_blocks)
            candidate, cache = build_runner(candidate_factory, size.model, config, num_blocks)
            reference, _ = build_runner(oracle_factory, size.model, config, num_blocks)
            blocks = list(range(1, num_blocks))
            order.shuffle(blocks)
            self.size, self.blocks = size, tuple(blocks)
            self.world = StoryWorld(size, cache, blocks)
            # Outputs are taken after the next step; what they must hold is known when their own step ends.
            self.late = late and late_outputs and Capability.ASYNC_OUTPUT in offered
            self.on_its_way: tuple[AsyncModelRunnerOutput, dict[str, tuple[int, ...]]] | None = None
            self.judge = StepJudge(candidate, reference, size, cache, offered)
            self.failed = False

        def close_and_run(self, pad_tokens: int, pad_reqs: int | None) -> None:
            padded = Capability.PADDED_BATCH in offered
            step = self.world.close(pad_tokens, pad_reqs) if padded else self.world.close()
            with self._answering("An exception on a legal plan"):
                self.judge.run_candidate(step, self.world.kept_blocks(), take_output=not self.late)
            self._take_late_output()
            self.judge.run_oracle(step)
            self.judge.observe(self.world, step)
            with self._answering("A record that no law can read"):
                found = {c: m for c, m in self.judge.laws(step).items() if not clause(c).missing(offered)}
                first = first_divergence(found)
                table = "" if first is None or self.judge.record is None else batch_table(self.judge.record, first)
            if first is not None:
                raise self._failed(f"{first.clause_id} {clause(first.clause_id).law}\n{table}\n{first}")

        def _take_late_output(self) -> None:
            with self._answering("An exception on a legal plan"):
                handle, taken = self.on_its_way or (None, {})
                given = {} if handle is None else handle.get_output().tokens()
                self.on_its_way = None
                if self.late and self.judge.handle is not None and self.judge.record is not None:
                    self.on_its_way = (self.judge.handle, self.judge.record.tokens())
            if given != taken:
                raise self._failed(f"MR-ASYNC-002 {clause('MR-ASYNC-002').law}\ngot {given}, expected {taken}")

        @contextmanager
        def _answering(self, what: str) -> Iterator[None]:
            """Whatever the runner raises in here fails the story."""
            try:
                with staying():
                    yield
            except Exception as e:
                raise self._failed(f"{what}: {type(e).__name__}: {safely(str, e)}") from e

        def _failed(self, text: str) -> StoryFailed:
            self.failed = True
            return StoryFailed(text, Story(self.size, self.blocks, tuple(self.world.actions)))

        def teardown(self) -> None:
            if not hasattr(self, "judge"):
                return
            try:
                if not self.failed:  # a second failure would take the place of the first
                    self._take_late_output()
            finally:
                let_go(self.judge.candidate)
                let_go(self.judge.oracle)

    return PlanMachine


def search(runner: str | RunnerFactory, profile: settings, oracle: str | RunnerFactory = "cpu") -> None:
    """Run the machine; raises AssertionError with the smallest failure that was found."""
    run_state_machine_as_test(machine_for(runner, oracle), settings=profile)


def first_story(sides: Sides, examples: int, number: int) -> Told | None:
    """The first failing story among `examples` of Hypothesis, as it is; None if none fails, or if it does not fail when
    it is told again. number: a seed."""
    profile = settings(
        max_examples=examples, phases=(Phase.generate,), database=None, deadline=None, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    machine = seed(number)(machine_for(sides.candidate, sides.oracle, late_outputs=False))
    try:
        run_state_machine_as_test(machine, settings=profile)
    except StoryFailed as e:
        told = try_to_tell(e.story, sides)
        return told if told is not None and told.failure is not None else None
    return None
