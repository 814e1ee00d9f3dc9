"""A world's plans as a list of actions that can be told again: the form in which a failure is made smaller.

An action names requests by id and never by place, and one that is not possible is left out. So every part of a story
is a story, and what is told may be shortened anywhere: `conformance.shrink` does so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from conformance.driver import WorldSize
from conformance.planned_step import PlannedStep, WorldRequest
from conformance.world import GREEDY, PlanWorld
from conformance.world_blocks import Ghost
from runner_api import ForcedStep, GrammarOutput, KVCacheConfig, SamplingParams


@dataclass(frozen=True, slots=True)
class Add:
    """A fresh request. With `source` its first `shared` tokens are those that this request has computed: its full
    blocks are shared or, if `copied`, its last block is copied; the prompt is what follows."""

    req_id: str
    prompt: tuple[int, ...]
    num_tokens: int
    params: SamplingParams = GREEDY
    seed: int = 0
    spare_blocks: int = 0
    source: str | None = None
    shared: int = 0
    copied: bool = False


@dataclass(frozen=True, slots=True)
class Go:
    """A running request goes on."""

    req_id: str
    num_tokens: int
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class Preempt:
    req_id: str
    told: bool = True


@dataclass(frozen=True, slots=True)
class Resume:
    req_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Leave:
    """A request ends; aborted: whatever its state."""

    req_id: str
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is imposed on one request where drafts are verified: how many are accepted, which token follows, and which
    drafts are held from then on."""

    accepted: int
    token: int
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Close:
    """The plan ends here and is run, with padding behind it. By request: imposed outcomes, and rows of masks."""

    pad_tokens: int = 0
    pad_reqs: int | None = 0
    outcomes: tuple[tuple[str, Outcome], ...] = ()
    masks: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = ()


Action = Add | Go | Preempt | Resume | Leave | Close


@dataclass(frozen=True, slots=True)
class Story:
    """A world from its beginning. block_order: free blocks, the first is handed out first. poison: whether memory that
    nothing may read is filled before each step."""

    size: WorldSize
    block_order: tuple[int, ...]
    actions: tuple[Action, ...] = ()
    poison: bool = True

    @property
    def requests(self) -> list[str]:
        return list(dict.fromkeys(a.req_id for a in self.actions if isinstance(a, Add)))

    @property
    def num_steps(self) -> int:
        return sum(isinstance(a, Close) for a in self.actions)


class StoryWorld(PlanWorld):
    """A world that writes down what takes place in it. `actions` is its story so far."""

    def __init__(self, size: WorldSize, kv_cache_config: KVCacheConfig, block_order: Sequence[int]) -> None:
        super().__init__(size.config, kv_cache_config, size.model.vocab_size, block_order)
        self.actions: list[Action] = []
        self._told_id: str | None = None  # of the request that a story adds
        self._names: dict[int, tuple[str, Ghost]] = {}  # ghosts by identity

    # -- telling ----------------------------------------------------------------------------------------------

    def tell(self, action: Action) -> PlannedStep | None:
        """Do what an action says, if it is possible here; the step that it closes, if it closes one."""
        match action:
            case Add():
                self._tell_add(action)
            case Go(req_id, num_tokens, num_drafts):
                self.schedule(req_id, num_tokens, num_drafts)
            case Preempt(req_id, told):
                self.preempt(req_id, told=told)
            case Resume(req_id, num_tokens):
                self.resume(req_id, num_tokens)
            case Leave(req_id, aborted):
                (self.abort if aborted else self.finish)(req_id)
            case Close(pad_tokens, pad_reqs):
                step = self.close(pad_tokens, pad_reqs)
                step = replace(step, forced=self._forced(action, step), grammar=self._masks(action, step))
                self.note(step)
                return step
        return None

    def note(self, step: PlannedStep) -> None:
        """Write down what is imposed on the step that was closed last, and its masks."""
        closed = self.actions[-1]
        assert isinstance(closed, Close)
        self.actions[-1] = replace(closed, outcomes=_outcomes(step), masks=_mask_rows(step))

    def _tell_add(self, a: Add) -> None:
        self._told_id = a.req_id
        try:
            if a.source is None:
                self.add(a.prompt, a.num_tokens, a.params, a.seed, spare_blocks=a.spare_blocks)
                return
            source = self._source(a.source, a.shared)
            if isinstance(source, WorldRequest) and a.copied:
                self.add_with_copy(source, a.shared, a.prompt, a.num_tokens, a.params, a.seed)
            elif source is not None and not a.copied:
                self.add_with_prefix(source, a.prompt, a.num_tokens, a.params, a.seed, a.shared)
        finally:
            self._told_id = None

    def _source(self, req_id: str, shared: int) -> WorldRequest | Ghost | None:
        """Whose blocks a story shares: the running request of this id, or what is left of it, if that is enough."""
        sources = self.hit_sources()
        live = [s for s in sources if isinstance(s, WorldRequest) and s.req_id == req_id]
        gone = [s for s in sources if isinstance(s, Ghost) and self._name(s) == req_id]
        found = [*live, *reversed(gone)]
        return next((s for s in found if s.computed >= shared), next(iter(found), None))

    def _forced(self, closed: Close, step: PlannedStep) -> ForcedStep | None:
        k, rows = self.config.num_speculative_tokens, len(step.truth.order)
        if not k or not rows:
            return None
        told = dict(closed.outcomes)
        token_ids, num_sampled = np.zeros((rows, 1 + k), np.int64), np.zeros(rows, np.int32)
        held = np.zeros((rows, k), np.int64)
        for i, req_id in enumerate(step.truth.order):
            truth, o = step.truth.requests[req_id], told.get(req_id, Outcome(0, 0, ()))
            drafts = o.drafts[:k]
            held[i, : len(drafts)] = drafts
            if truth.samples:
                accepted = min(o.accepted, truth.num_drafts if truth.computed >= truth.prefill_len else 0)
                token_ids[i, : accepted + 1] = (*truth.drafts[:accepted], o.token)
                num_sampled[i] = accepted + 1
        return ForcedStep(token_ids, num_sampled, held)

    def _masks(self, closed: Close, step: PlannedStep) -> GrammarOutput | None:
        rows, width = 1 + self.config.num_speculative_tokens, -(-self.vocab_size // 32)
        truths = step.truth.requests
        owners = {
            r: words for r, words in closed.masks
            if r in truths and truths[r].samples and truths[r].request.params.structured_outputs and len(words) >= rows
        }  # fmt: skip
        if not owners:
            return None
        bits = [words[:width] for mask in owners.values() for words in mask[:rows]]
        return GrammarOutput(list(owners), np.array(bits, np.int64).astype(np.int32))

    # -- writing down -----------------------------------------------------------------------------------------

    def add(self, prompt: Sequence[int], num_tokens: int, params: SamplingParams = GREEDY, seed: int = 0,
            req_id: str | None = None, spare_blocks: int = 0) -> bool:  # fmt: skip
        added = super().add(prompt, num_tokens, params, seed, req_id, spare_blocks)
        return added and self._write(Add(self._newest, tuple(prompt), num_tokens, params, seed, spare_blocks))

    def add_with_prefix(self, source: WorldRequest | Ghost, tail: Sequence[int], num_tokens: int,
                        params: SamplingParams = GREEDY, seed: int = 0,
                        num_shared: int | None = None) -> bool:  # fmt: skip
        name = self._name(source)
        if not super().add_with_prefix(source, tail, num_tokens, params, seed, num_shared):
            return False
        shared = self.running[self._newest].admitted_at
        return self._write(Add(self._newest, tuple(tail), num_tokens, params, seed, source=name, shared=shared))

    def add_with_copy(self, source: WorldRequest, num_copied: int, tail: Sequence[int], num_tokens: int,
                      params: SamplingParams = GREEDY, seed: int = 0) -> bool:  # fmt: skip
        if not super().add_with_copy(source, num_copied, tail, num_tokens, params, seed):
            return False
        return self._write(
            Add(self._newest, tuple(tail), num_tokens, params, seed, 0, source.req_id, num_copied, copied=True)
        )

    def schedule(self, req_id: str, num_tokens: int, num_drafts: int = 0) -> bool:
        done = super().schedule(req_id, num_tokens, num_drafts)
        return done and self._write(Go(req_id, self._counts[req_id], num_drafts))

    def preempt(self, req_id: str, *, told: bool = True) -> bool:
        return super().preempt(req_id, told=told) and self._write(Preempt(req_id, told))

    def resume(self, req_id: str, num_tokens: int) -> bool:
        return super().resume(req_id, num_tokens) and self._write(Resume(req_id, num_tokens))

    def finish(self, req_id: str) -> bool:
        return super().finish(req_id) and self._write(Leave(req_id))

    def abort(self, req_id: str) -> bool:
        written = len(self.actions)
        if not super().abort(req_id):
            return False
        del self.actions[written:]  # of a running request it is a finish besides
        return self._write(Leave(req_id, aborted=True))

    def close(self, pad_tokens: int = 0, pad_reqs: int | None = 0) -> PlannedStep:
        step = super().close(pad_tokens, pad_reqs)
        self._write(Close(pad_tokens, pad_reqs) if step.descriptor else Close())
        return step

    # -- internals --------------------------------------------------------------------------------------------

    @property
    def _newest(self) -> str:
        return next(reversed(self.running))

    def _write(self, action: Action) -> bool:
        self.actions.append(action)
        return True

    def _fresh(self, prompt: Sequence[int], params: SamplingParams, seed: int, req_id: str | None) -> WorldRequest:
        return super()._fresh(prompt, params, seed, req_id or self._told_id)

    def _leave(self, req_id: str) -> WorldRequest:
        request = super()._leave(req_id)
        for ghost in self._pool.ghosts:
            if ghost.tokens is request.tokens:
                self._names[id(ghost)] = (req_id, ghost)
        return request

    def _name(self, source: WorldRequest | Ghost) -> str:
        return source.req_id if isinstance(source, WorldRequest) else self._names[id(source)][0]


def _outcomes(step: PlannedStep) -> tuple[tuple[str, Outcome], ...]:
    f = step.forced
    if f is None:
        return ()
    held = f.draft_token_ids if f.draft_token_ids is not None else np.zeros((len(step.truth.order), 0), np.int64)
    found = []
    for i, req_id in enumerate(step.truth.order):
        count = int(f.num_sampled[i])
        token = int(f.token_ids[i, count - 1]) if count else 0
        found.append((req_id, Outcome(max(count - 1, 0), token, tuple(held[i].tolist()))))
    return tuple(found)


def _mask_rows(step: PlannedStep) -> tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]:
    g = step.grammar
    if g is None:
        return ()
    owners = g.structured_output_request_ids
    rows = np.reshape(g.grammar_bitmask, (len(owners), -1, g.grammar_bitmask.shape[1])).tolist()
    return tuple((r, tuple(map(tuple, mask))) for r, mask in zip(owners, rows, strict=True))
