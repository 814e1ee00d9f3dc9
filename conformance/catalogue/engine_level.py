"""Scenarios of the whole engine: scheduler, block pool, executor and a runner, step by step to the end.

After every step the books of the block pool must balance, and every input token of the runner must be a token of the
vocabulary. The engine may come from a changed copy of its package.
"""

from __future__ import annotations

import importlib
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from conformance.catalogue.comparison import Difference, differ_between, differs
from conformance.catalogue.scenario import ALL, Request, Scenario, Setup
from conformance.catalogue.script import DEFAULTS, config_of, model_of, params_of
from conformance.foreign import opened
from runner_api import Capability, RunnerError, SchedulerOutput, group_kv_cache_specs
from runner_api.errors import safely
from runner_api.protocol import RunnerFactory

ENGINE = "engine_core"
MAX_STEPS = 300


def needs(case: Scenario, layout: str) -> frozenset[Capability]:
    """What a runner must offer for the scenario to mean anything."""
    wanted = {
        Capability.GENERATE: True,
        Capability.DENSE_LAYOUT: layout == "dense",
        Capability.MULTI_GROUP: len(case.setup.groups) > 1,
        Capability.SLIDING_WINDOW: any(g.window for g in case.setup.groups),
        Capability.ASYNC_OUTPUT: bool(case.setup.limits.get("async_scheduling")),
        Capability.LOGITS_PROCESSORS: bool(case.setup.config.get("logits_processors")),
    }
    asked = frozenset().union(*(params_of(r).required_capabilities() for r in case.requests))
    return asked | {c for c, wants in wanted.items() if wants}


@dataclass(slots=True)
class Story:
    """What became of each request, by the scenario's names."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finish: dict[str, str | None] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    admitted: dict[str, dict[str, int]] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)
    seeds: dict[str, int] = field(default_factory=dict)  # drawn by the engine for those that brought none
    scored: dict[str, int] = field(default_factory=dict)  # outputs that came with log probabilities
    faults: list[Difference] = field(default_factory=list)  # of the books and the inputs


class Play:
    """One engine on one runner. package: where the engine's modules are imported from."""

    def __init__(self, setup: Setup, layout: str, runner: str | RunnerFactory, package: str = ENGINE) -> None:
        self.setup = setup
        self.names: dict[str, str] = {}  # id to the name of its latest owner
        self.story = Story()
        self.engine = opened(_engine(setup, layout, runner, package))
        self._watch(self.engine.executor)

    def run(self, requests: tuple[Request, ...]) -> Story:
        """Add and abort when it is their time, step until nobody is left."""
        last = max(max(r.at, r.abort or 0) for r in requests)
        for n in range(MAX_STEPS):
            for request in requests:
                if request.at == n:
                    self._add(request)
                if request.abort == n:
                    self._tell(self.engine.abort(request.id or request.name))
            if not self.engine.has_requests and n >= last:
                return self.story
            for output in self.engine.step():
                self._tell(output)
            self._audit(n)
        self.story.faults.append(Difference("the engine", f"not done after {MAX_STEPS} steps", "done"))
        return self.story

    def _add(self, request: Request) -> None:
        req_id, name = request.id or request.name, request.name
        seed = request.seed if request.seeded else None
        try:
            added = self.engine.add_request(req_id, list(request.prompt), params_of(request, seed=seed))
        except RunnerError as e:
            self.story.refused[name] = e.code
            return
        self.names[req_id] = name
        self.story.tokens[name] = []
        self.story.seeds[name] = request.seed if request.seeded else added.seed

    def _tell(self, output: Any) -> None:
        """One EngineCoreOutput; None for an id that was not live."""
        if output is not None:
            name = self.names[output.req_id]
            self.story.tokens[name].extend(output.new_token_ids)
            self.story.scored[name] = self.story.scored.get(name, 0) + (output.logprobs is not None)
            self.story.finish[name] = output.finish_reason or self.story.finish.get(name)

    def _audit(self, n: int) -> None:
        try:
            self.engine.scheduler.kv_cache_manager.check_conservation()
        except RunnerError as e:
            self.story.faults.append(Difference(f"engine step {n} block pool", str(e), "books that balance"))

    def _watch(self, executor: Any) -> None:
        """See every plan on its way to the runner, and what the runner made of it."""
        execute = executor.execute_model
        records = Capability.STEP_RECORD in self.engine.runner_info.capabilities

        def watched(plan: SchedulerOutput, non_block: bool = False) -> Any:
            answer = execute(plan, non_block=non_block)
            self._see_plan(plan)
            failed = isinstance(answer, Future) and answer.done() and answer.exception() is not None
            if records and plan.total_num_scheduled_tokens and not failed:
                ids = executor.collective_rpc(lambda worker: worker.runner.last_step().input_ids)[0].tolist()
                strange = [t for t in ids if not 0 <= t < self.setup.vocab]
                self.story.faults += differs("input_ids outside of the vocabulary", strange, [])
            return answer

        executor.execute_model = watched

    def _see_plan(self, plan: SchedulerOutput) -> None:
        for new in plan.scheduled_new_reqs:
            facts = {"computed": new.num_computed_tokens, "scheduled": plan.num_scheduled_tokens[new.req_id]}
            self.story.admitted.setdefault(self.names[new.req_id], facts)
        self.story.preempted |= {self.names[r] for r in plan.preempted_req_ids}


def _engine(setup: Setup, layout: str, runner: str | RunnerFactory, package: str) -> Any:
    def module(name: str) -> Any:
        return importlib.import_module(f"{package}.{name}")

    limits = {name: DEFAULTS[name] for name in DEFAULTS} | dict(setup.limits)
    scheduler_config = module("plan_builder").SchedulerConfig(**limits, layout=layout)
    sizes = {name: limits[name] for name in DEFAULTS}
    config = config_of(setup, layout, **sizes, max_concurrent_batches=setup.depth)
    executor = module("executor").make_executor(module("worker").WorkerConfig(runner, model_of(setup), config))
    kv_cache_config = group_kv_cache_specs(executor.get_kv_cache_specs()[0], setup.num_blocks)
    executor.initialize_from_config([kv_cache_config])
    manager = module("kv_cache_manager").KVCacheManager(
        kv_cache_config, config.max_model_len, enable_prefix_caching=setup.prefix_caching
    )
    scheduler = module("scheduler").Scheduler(scheduler_config, manager)
    return module("engine").Engine(executor, scheduler, vocab_size=setup.vocab, seed=setup.seed)


def play(case: Scenario, layout: str, runner: str | RunnerFactory, package: str = ENGINE) -> list[Difference]:
    """Run the scenario's requests through an engine to their end: what is not as it says. package: the engine's.
    Raises what the engine raises, unless something else was seen before."""
    expect = case.expect
    played = Play(case.setup, layout, runner, package)
    story = played.story
    try:
        played.run(case.requests)
    except Exception as e:  # what was seen before it tells more than the exception
        if not story.faults:
            raise
        return [*story.faults, Difference("the engine", f"{type(e).__name__}: {safely(str, e)}", "a run to the end")]
    found = differs("refused", story.refused, dict(expect.refused))
    for name, want in expect.tokens.items():
        found += differs(f"tokens[{name}]", story.tokens.get(name), want)
    for name, reason in expect.finish.items():
        found += differs(f"finish[{name}]", story.finish.get(name), reason)
    for name, facts in expect.admitted.items():
        found += differs(f"admitted[{name}]", story.admitted.get(name), facts)
    for name in expect.scored:
        found += differs(f"outputs[{name}] with log probabilities", story.scored[name], len(story.tokens[name]))
    for name in expect.preempted:
        found += differs(f"preempted[{name}]", name in story.preempted, True)
    found += differ_between("tokens", story.tokens, expect.alike, expect.differ, expect.varied)
    for name in [r.name for r in case.requests if r.name in story.tokens] if expect.solo == ALL else expect.solo:
        alone = _alone(case, layout, runner, name, story.seeds[name])
        # An aborted request has what it drew until then.
        want = alone[: len(story.tokens[name])] if case.request(name).abort is not None else alone
        found += differs(f"tokens[{name}], as alone", story.tokens[name], want)
    return found + story.faults


def _alone(case: Scenario, layout: str, runner: str | RunnerFactory, name: str, seed: int) -> list[int]:
    """The request's tokens with a pool for itself, no prefix to hit, whole prompts and one step at a time.

    The engine is always the right one: what is faulty is held against it.
    """
    request = replace(case.request(name), at=0, abort=None, seed=seed, seeded=True)
    limits = {**case.setup.limits, "async_scheduling": False, "long_prefill_token_threshold": 0}
    limits["max_num_batched_tokens"] = max(limits.get("max_num_batched_tokens", 0), 64)
    setup = replace(case.setup, limits=limits, prefix_caching=False, num_blocks=256)
    return Play(setup, layout, runner).run((request,)).tokens[name]
