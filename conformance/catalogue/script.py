"""A scenario's requests as a scheduler sees them: from "run so many tokens of A" to the plans of one runner.

Keeps what is true of each request (tokens, progress, blocks) and hands out blocks: the lowest free ids at first, then
those that were given back last, so that a former owner's contents are met again soon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.catalogue.scenario import Mask, Request, Setup, Step
from runner_api import (
    BatchDescriptor,
    CachedRequestData,
    ConfigError,
    CUDAGraphMode,
    ForcedStep,
    GrammarOutput,
    NewRequestData,
    ReasoningConfig,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    WitnessConfig,
    WitnessGroup,
)

# Small sizes, so that limits are near; a scenario changes what it needs.
DEFAULTS = {"max_num_reqs": 4, "max_num_batched_tokens": 32, "max_model_len": 32}


def model_of(setup: Setup) -> WitnessConfig:
    """The witness model that a scenario runs on."""
    return WitnessConfig(setup.vocab, tuple(WitnessGroup(g.block_size, g.window) for g in setup.groups))


def config_of(setup: Setup, layout: str, **changes: Any) -> RunnerConfig:
    """What a scenario's runner is built from, in this layout of rows. Raises ConfigError for a value out of range."""
    values = {**DEFAULTS, **setup.config, "layout": layout, **changes}
    # What one layout alone has: an order in which rows are free, and decodes that are moved to the front.
    values.pop("initial_free_rows" if layout == "dense" else "reorder_batch_threshold", None)
    if isinstance(values.get("reasoning"), Mapping):
        values["reasoning"] = ReasoningConfig(**values["reasoning"])
    return RunnerConfig.from_dict(values)


def params_of(request: Request, **changes: Any) -> SamplingParams:
    """Greedy unless the scenario says otherwise."""
    return SamplingParams.from_dict({"temperature": 0.0, **request.params, **changes})


@dataclass(slots=True)
class Life:
    """One request as it is now. `outputs` tells of each what it was drawn from: (logits or None, was it imposed,
    own draws, tokens taken)."""

    spec: Request
    req_id: str
    params: SamplingParams
    tokens: list[int]
    computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    live: bool = False
    preempted: bool = False
    outputs: list[tuple[Any, bool, list[int], list[int]]] = field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - len(self.spec.prompt)


@dataclass(frozen=True, slots=True)
class Share:
    """One request's part of a plan."""

    known: int  # tokens that were known already
    drafts: int
    samples: bool


class Script:
    """Plans for one runner. Every call of `plan` is meant to be run: who may not run it keeps a copy of the script."""

    def __init__(self, setup: Setup, layout: str, requests: Sequence[Request]) -> None:
        self.setup, self.layout = setup, layout
        self.lives = {r.name: Life(r, r.id or r.name, params_of(r), list(r.prompt)) for r in requests}
        self._free = list(range(1, setup.num_blocks))

    def by_id(self, req_id: str) -> Life:
        """The live request of this id."""
        return next(life for life in self.lives.values() if life.req_id == req_id and life.live)

    # -- the plan -----------------------------------------------------------------------------------------------

    def plan(self, step: Step) -> tuple[SchedulerOutput, dict[str, Share]]:
        """The next plan, and the share of each request by id."""
        left = [self._leave(step.finish), self._leave(step.preempt)]
        for name in step.preempt:
            self.lives[name].preempted = True
        counts = dict(step.run) if isinstance(step.run, Mapping) else dict.fromkeys(step.run, 10**9)
        plan, shares = SchedulerOutput(finished_req_ids=left[0], preempted_req_ids=left[1]), {}
        resumed: set[str] = set()
        for name, count in counts.items():
            life = self.lives[name]
            starts = not life.live
            if starts:
                life.computed, life.blocks = life.spec.computed, self._first_blocks(life)
            known = min(count, len(life.tokens) - life.computed)
            drafts = step.drafts.get(name, 0)
            shares[life.req_id] = Share(known, drafts, life.computed + known >= len(life.tokens))
            more = self._more_blocks(life, known + drafts, step.blocks.get(name))
            plan.num_scheduled_tokens[life.req_id] = known + drafts
            if drafts:
                plan.scheduled_spec_decode_tokens[life.req_id] = [-1] * drafts
            if starts and not (life.preempted and self.layout == "dense"):
                plan.scheduled_new_reqs.append(self._new(life))
            else:
                if starts:
                    resumed.add(life.req_id)
                self._add_cached(plan.scheduled_cached_reqs, life, life.blocks if starts else more)
            life.live, life.preempted = True, False
        cached = plan.scheduled_cached_reqs
        cached.resumed_req_ids = frozenset(resumed)
        cached.all_token_ids = {r: list(self.by_id(r).tokens) for r in resumed}
        plan.total_num_scheduled_tokens = sum(plan.num_scheduled_tokens.values())
        plan.new_block_ids_to_zero = list(step.zero_blocks)
        return plan, shares

    def _leave(self, names: Sequence[str]) -> frozenset[str]:
        for name in names:
            life = self.lives[name]
            held = [b for other in self.lives.values() if other is not life for ids in other.blocks for b in ids]
            given_back = [b for ids in life.blocks for b in ids if b not in held]
            self._free[:0] = [b for b in given_back if b not in self._free]
            life.live, life.blocks, life.computed = False, [], 0
        return frozenset(self.lives[name].req_id for name in names)

    def _first_blocks(self, life: Life) -> list[list[int]]:
        given = life.spec.blocks
        return [[] for _ in self.setup.groups] if given is None or life.num_outputs else self._taken(given)

    def _more_blocks(self, life: Life, scheduled: int, given: Any) -> list[list[int]]:
        if given is not None:
            more = self._taken(given)
        else:
            more = []
            for group, ids in zip(self.setup.groups, life.blocks, strict=True):
                count = -(-(life.computed + scheduled) // group.block_size) - len(ids)
                if count > len(self._free):
                    raise ConfigError("the scenario runs out of blocks", field="num_blocks", got=self.setup.num_blocks)
                more.append([self._free.pop(0) for _ in range(max(count, 0))])
        for ids, added in zip(life.blocks, more, strict=True):
            ids.extend(added)
        return more

    def _taken(self, given: Any) -> list[list[int]]:
        """Ids that the scenario names: one list per group, or a single one."""
        lists = [list(g) for g in given] if given and isinstance(given[0], (list, tuple)) else [list(given)]
        for ids in lists:
            self._free = [b for b in self._free if b not in ids]
        return lists

    def _new(self, life: Life) -> NewRequestData:
        blocks = tuple(list(ids) for ids in life.blocks)
        return NewRequestData(
            life.req_id, list(life.spec.prompt), list(life.tokens), life.computed, blocks, life.params, life.spec.seed,
            life.spec.eos,
        )  # fmt: skip

    def _add_cached(self, cached: CachedRequestData, life: Life, more: list[list[int]]) -> None:
        cached.req_ids.append(life.req_id)
        cached.num_computed_tokens.append(life.computed)
        cached.new_block_ids.append(tuple(list(ids) for ids in more) if any(more) else None)
        cached.num_output_tokens.append(life.num_outputs)

    # -- what goes with it ------------------------------------------------------------------------------------

    def forced(self, step: Step, order: Sequence[str], shares: Mapping[str, Share]) -> ForcedStep | None:
        """The outcome and the logits that the step imposes; None if it imposes nothing. order: the batch's ids."""
        if not (step.logits or step.take or step.hold):
            return None
        k = dict(self.setup.config).get("num_speculative_tokens", 0)
        token_ids, num_sampled = np.zeros((len(order), 1 + k), np.int64), np.zeros(len(order), np.int32)
        held = np.zeros((len(order), k), np.int64)
        rows = []
        for i, req_id in enumerate(order):
            name, share = self.by_id(req_id).spec.name, shares[req_id]
            if share.samples:
                tokens = _tokens(step, name)
                token_ids[i, : len(tokens)], num_sampled[i] = tokens, len(tokens)
            held[i, : len(step.hold.get(name, ()))] = step.hold.get(name, ())
            rows += self.logits_rows(step, name, 1 + share.drafts)
        logits = np.array(rows, np.float32) if step.logits else None
        return ForcedStep(token_ids, num_sampled, held if step.hold else None, logits)

    def logits_rows(self, step: Step, name: str, count: int) -> list[list[float]]:
        """count rows, zeros behind what the scenario gives; all zeros for a request that it gives none."""
        given = step.logits.get(name, ())
        rows = [list(r) for r in given] if given and isinstance(given[0], (list, tuple)) else [list(given)]
        rows += [list(rows[-1]) for _ in range(count - len(rows))]
        return [[*map(float, row), *[0.0] * (self.setup.vocab - len(row))] for row in rows[:count]]

    def grammar(self, masks: Sequence[Mask]) -> GrammarOutput | None:
        if not masks:
            return None
        k = dict(self.setup.config).get("num_speculative_tokens", 0)
        words = np.zeros((len(masks) * (1 + k), -(-self.setup.vocab // 32)), np.uint32)
        for m, mask in enumerate(masks):
            for j, tokens in enumerate(mask.allow):
                for token in tokens:
                    words[m * (1 + k) + j, token // 32] |= np.uint32(1 << token % 32)
        return GrammarOutput([self.lives[m.request].req_id for m in masks], words.view(np.int32))

    def descriptor(self, step: Step) -> BatchDescriptor | None:
        if step.pad is None:
            return None
        return BatchDescriptor(CUDAGraphMode[step.pad.mode], step.pad.tokens, step.pad.requests)

    # -- the outcome ------------------------------------------------------------------------------------------

    def advance(
        self, step: Step, shares: Mapping[str, Share], drawn: Mapping[str, list[int]], taken: Mapping[str, list[int]]
    ) -> None:
        """Follow what entered the state. drawn: the runner's own choice after each logits row; taken: by id."""
        for req_id, share in shares.items():
            life, tokens = self.by_id(req_id), taken[req_id]
            rejected = 1 + share.drafts - len(tokens) if share.samples else 0
            life.computed += share.known + share.drafts - rejected
            if share.samples:
                name = life.spec.name
                logits = self.logits_rows(step, name, 1 + share.drafts) if step.logits else None
                life.outputs.append((logits, bool(step.logits or step.take or step.hold), drawn[req_id], tokens))
                life.tokens.extend(tokens)


def _tokens(step: Step, name: str) -> list[int]:
    """What enters the state of a request: `take`, else what it is expected to draw."""
    said = step.take.get(name, step.draws.get(name))
    if said is None:
        raise ConfigError("logits are given, so it must be said what is taken", field=f"take or draws of {name}")
    return [said] if isinstance(said, int) else list(said)
