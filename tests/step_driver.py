"""Plans by hand: short builders for plan types, and a driver that keeps the books of a few requests.

Tests that care about exact rows and blocks use the builders; tests about many steps use `Driver`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cpu_reference.runner import CpuModelRunner
from runner_api import (
    BatchDescriptor,
    CachedRequestData,
    CUDAGraphMode,
    ForcedStep,
    NewRequestData,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    WitnessConfig,
    group_kv_cache_specs,
)

GREEDY = SamplingParams(temperature=0.0)


def make_runner(model: Any = None, num_blocks: int = 64, **config: Any) -> CpuModelRunner:
    """A CPU runner, ready for its first plan."""
    runner = CpuModelRunner(RunnerConfig(**config))
    runner.load_model(model or WitnessConfig())
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), num_blocks))
    return runner


def groups(blocks: Any) -> Any:
    """A list is the blocks of the only group, a tuple one list per group."""
    return blocks if isinstance(blocks, tuple) or blocks is None else (list(blocks),)


def new(req_id: str, tokens: Sequence[int], blocks: Any, computed: int = 0, **rest: Any) -> NewRequestData:
    rest.setdefault("sampling_params", GREEDY)
    prompt = rest.pop("prompt", tokens)
    return NewRequestData(req_id, list(prompt), list(tokens), computed, groups(blocks), **rest)


def make_plan(
    counts: Mapping[str, int],
    added: Sequence[NewRequestData] = (),
    cached: Mapping[str, tuple[int, Any]] | None = None,
    drafts: Mapping[str, list[int]] | None = None,
    **rest: Any,
) -> SchedulerOutput:
    """cached: request to (computed tokens, its new blocks or None)."""
    cached = cached or {}
    return SchedulerOutput(
        list(added),
        CachedRequestData(list(cached), [c for c, _ in cached.values()], [groups(b) for _, b in cached.values()]),
        dict(counts),
        sum(counts.values()),
        dict(drafts or {}),
        **rest,
    )


def force(
    runner: CpuModelRunner, tokens: Mapping[str, Sequence[int]], drafts: Mapping[str, Sequence[int]] | None = None
) -> ForcedStep:
    """An outcome for the step that waits, by request; requests that are not named sample nothing."""
    req_ids, k = runner.last_step().req_ids, runner.config.num_speculative_tokens
    token_ids = np.zeros((len(req_ids), 1 + k), np.int64)
    held = np.zeros((len(req_ids), k), np.int64)
    for i, req_id in enumerate(req_ids):
        taken = list(tokens.get(req_id, ()))
        token_ids[i, : len(taken)] = taken
        held[i] = (drafts or {}).get(req_id, [0] * k)
    num_sampled = np.array([len(tokens.get(r, ())) for r in req_ids], np.int32)
    return ForcedStep(token_ids, num_sampled, held if drafts is not None else None)


def full(num_tokens: int, num_reqs: int, uniform: int | None = None) -> BatchDescriptor:
    return BatchDescriptor(CUDAGraphMode.FULL, num_tokens, num_reqs, uniform)


class Driver:
    """Adds requests, schedules what it is told, keeps their tokens and hands out blocks, lowest id first."""

    def __init__(self, runner: CpuModelRunner) -> None:
        self.runner = runner
        self.tokens: dict[str, list[int]] = {}
        self.prompt_len: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, tuple[list[int], ...]] = {}
        self.sizes = [g.spec.block_size for g in runner.kv_cache_config.groups]
        self.free = [list(range(runner.kv_cache_config.num_blocks - 1, 0, -1)) for _ in self.sizes]
        self.waiting: dict[str, dict[str, Any]] = {}
        self.gone: set[str] = set()
        self.preempted: set[str] = set()

    def add(self, req_id: str, tokens: Sequence[int], **rest: Any) -> None:
        """Announced with the next plan."""
        self.tokens[req_id] = list(tokens)
        self.prompt_len[req_id] = len(tokens)
        self.computed[req_id] = 0
        self.waiting[req_id] = rest

    def remove(self, req_id: str, *, preempt: bool = False) -> None:
        """Blocks go back at once; a preempted request waits with all its tokens and comes back as new."""
        for free, ids in zip(self.free, self.blocks.pop(req_id), strict=True):
            free.extend(reversed(ids))
        self.computed[req_id] = 0
        if preempt:
            self.preempted.add(req_id)
        else:
            self.gone.add(req_id)

    def readd(self, req_id: str, **rest: Any) -> None:
        self.waiting[req_id] = rest

    def plan(self, counts: Mapping[str, int]) -> SchedulerOutput:
        added, cached = [], {}
        for req_id, n in counts.items():
            fresh = req_id in self.waiting
            held = self.blocks.setdefault(req_id, tuple([] for _ in self.sizes))
            more = []
            for g, size in enumerate(self.sizes):
                missing = -(-(self.computed[req_id] + n) // size) - len(held[g])
                more.append([self.free[g].pop() for _ in range(max(missing, 0))])
                held[g].extend(more[g])
            if fresh:
                tokens = self.tokens[req_id]
                prompt, rest = tokens[: self.prompt_len[req_id]], self.waiting.pop(req_id)
                added.append(new(req_id, tokens, tuple(map(list, held)), prompt=prompt, **rest))
            else:
                cached[req_id] = (self.computed[req_id], tuple(more) if any(more) else None)
        plan = make_plan(
            counts, added, cached, finished_req_ids=frozenset(self.gone), preempted_req_ids=frozenset(self.preempted)
        )
        self.gone, self.preempted = set(), set()
        return plan

    def step(self, counts: Mapping[str, int], descriptor: BatchDescriptor | None = None) -> dict[str, tuple[int, ...]]:
        """Run one step; the tokens drawn, by request."""
        assert self.runner.execute_model(self.plan(counts), descriptor=descriptor) is None
        drawn = self.runner.sample_tokens().get_output().tokens()
        for req_id, n in counts.items():
            self.computed[req_id] += n
            self.tokens[req_id].extend(drawn[req_id])
        return drawn

    def decode(self, req_ids: Sequence[str], steps: int, **rest: Any) -> None:
        for _ in range(steps):
            self.step(dict.fromkeys(req_ids, 1), **rest)
