"""A world that makes legal plans: it owns its own small truth and never asks a runner what that is.

The truth is: each request's known tokens, how many are computed, its blocks in every KV cache group, and who shares
which block. Actions (add, schedule, preempt, resume, finish, copy on write, …) change the plan under construction;
`close` turns it into a `PlannedStep` with what a right runner must build from it; `observe` is told the tokens. The
same actions are driven by a random generator (`conformance.driver`) and by Hypothesis (`conformance.machine`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from conformance.dense_rows import next_rows
from conformance.planned_step import PlannedStep, RequestTruth, StepTruth, WorldRequest, order_key
from conformance.world_blocks import Ghost, WorldBlocks
from runner_api import (
    NULL_BLOCK_ID,
    PLACEHOLDER_TOKEN_ID,
    BatchDescriptor,
    CachedRequestData,
    CUDAGraphMode,
    KVCacheConfig,
    NewRequestData,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
)

GREEDY = SamplingParams(temperature=0.0)
# The model's end of sequence, as far as `min_tokens` is concerned: a world's requests go on behind it.
EOS_TOKEN_IDS = (11,)


class PlanWorld:
    """Legal plans for one runner, in the shape of its layout. N rows, T tokens of a step, M tokens of a request, K
    drafts.

    Every action returns whether it was possible; one that was not leaves the plan as it was. Blocks of all groups come
    from one pool, so that a block id names one place in one group. Frees must come before the adds that use them.
    With dense rows only those have one that a plan schedules, and more requests than rows may be live.
    """

    def __init__(
        self,
        config: RunnerConfig,
        kv_cache_config: KVCacheConfig,
        vocab_size: int,
        block_order: Sequence[int] | None = None,
    ) -> None:
        self.config = config
        self.dense = config.layout == "dense"
        self.kv_cache_config = kv_cache_config
        self.vocab_size = vocab_size
        self.block_sizes = [g.spec.block_size for g in kv_cache_config.groups]
        self.reach = list(config.window_reach or (g.spec.window_reach for g in kv_cache_config.groups))
        self.running: dict[str, WorldRequest] = {}
        self.waiting: dict[str, WorldRequest] = {}  # preempted
        self.counts: Counter[str] = Counter()  # how often each action took place
        self._pool = WorldBlocks(block_order if block_order is not None else range(1, kv_cache_config.num_blocks))
        self._serial = 0
        self._rows: tuple[str, ...] = ()  # dense rows, as a right runner has them
        self._start_plan()

    # -- what a driver asks -----------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """Tokens that the plan under construction may still schedule."""
        return self.config.max_num_batched_tokens - sum(self._counts.values())

    @property
    def free_rows(self) -> int:
        return self.config.max_num_reqs - len(self._counts if self.dense else self.running)

    @property
    def free_blocks(self) -> frozenset[int]:
        return frozenset(self._pool.free)

    @property
    def pending(self) -> bool:
        """Whether the plan under construction says anything yet."""
        return bool(self._touched or self._finished or self._left)

    def unscheduled(self) -> list[WorldRequest]:
        """Running requests that the plan does not mention yet and that may still grow."""
        return [r for r in self.running.values() if r.req_id not in self._touched and self.room(r) > 0]

    def room(self, request: WorldRequest) -> int:
        """Tokens that may still be computed for a request, so that the sampled one has a place."""
        return self.config.max_model_len - 1 - request.computed

    def removable(self) -> list[str]:
        """Running requests that the plan neither schedules nor copies from."""
        return [r for r in self.running if r not in self._touched and r not in self._copied_from]

    def kept_blocks(self) -> frozenset[int]:
        """Blocks of no live request whose contents a prefix hit may still read."""
        return self._pool.readable()

    def hit_sources(self) -> list[WorldRequest | Ghost]:
        """Whose computed blocks a new request may share."""
        return [*(r for r in self.running.values() if r.req_id not in self._touched), *self._pool.ghosts]

    # -- actions ----------------------------------------------------------------------------------------------

    def add(
        self, prompt: Sequence[int], num_tokens: int, params: SamplingParams = GREEDY, seed: int = 0,
        req_id: str | None = None, spare_blocks: int = 0,
    ) -> bool:  # fmt: skip
        """A fresh request with its first chunk; zero tokens: the plan only announces it."""
        request = self._fresh(prompt, params, seed, req_id)
        return self._admit(request, num_tokens, [[] for _ in self.block_sizes], "add", spare_blocks)

    def add_with_prefix(
        self, source: WorldRequest | Ghost, tail: Sequence[int], num_tokens: int, params: SamplingParams = GREEDY,
        seed: int = 0, num_shared: int | None = None,
    ) -> bool:  # fmt: skip
        """A request that starts with tokens which `source` has computed, and shares its full blocks."""
        unit = math.lcm(*self.block_sizes)
        shared = min(source.computed, source.computed if num_shared is None else num_shared) // unit * unit
        if shared == 0 or not self._readable(source, shared) or not tail:
            return False
        request = self._fresh([*source.tokens[:shared], *tail], params, seed, None)
        request.computed = request.shared_until = shared
        blocks = [self._shared_columns(source, g, shared) for g in range(len(self.block_sizes))]
        return self._admit(request, num_tokens, blocks, "prefix_hit")

    def add_with_copy(
        self, source: WorldRequest, num_copied: int, tail: Sequence[int], num_tokens: int,
        params: SamplingParams = GREEDY, seed: int = 0,
    ) -> bool:  # fmt: skip
        """As `add_with_prefix`, but the prefix ends inside a block, which is copied before it is written."""
        if not 0 < num_copied <= source.computed or not self._readable(source, num_copied) or not tail:
            return False
        request = self._fresh([*source.tokens[:num_copied], *tail], params, seed, None)
        request.computed = request.shared_until = num_copied
        partial = [g for g, size in enumerate(self.block_sizes) if num_copied % size]
        if not partial or len(partial) > len(self._pool.free):
            return False
        blocks = [self._shared_columns(source, g, num_copied) for g in range(len(self.block_sizes))]
        copies = [(source.blocks[g][num_copied // self.block_sizes[g]], g) for g in partial]
        start = max(num_copied // self.block_sizes[g] * self.block_sizes[g] for g in partial)
        request.copied = range(start, num_copied)
        if not self._admit(request, num_tokens, blocks, "block_copy", copies=copies):
            return False
        self._copied_from.add(source.req_id)
        return True

    def schedule(self, req_id: str, num_tokens: int, num_drafts: int = 0) -> bool:
        """Go on with a running request: a chunk of known tokens, or one token and its drafts."""
        request = self.running.get(req_id)
        if request is None or req_id in self._touched or (self.dense and self.free_rows < 1):
            return False
        n = self._legal_count(request, num_tokens, num_drafts)
        fresh = self._blocks_for(request, request.computed + n) if n else None
        if fresh is None:
            return False
        for owned, ids in zip(request.blocks, fresh, strict=True):
            owned.extend(ids)
        cached = self._cached
        cached.req_ids.append(req_id)
        cached.num_computed_tokens.append(request.computed)
        cached.new_block_ids.append(fresh if any(fresh) else None)
        cached.num_output_tokens.append(len(request.tokens) - request.prompt_len)
        self._mark(request, n, num_drafts, "chunk" if request.prefilling else "decode")
        return True

    def preempt(self, req_id: str, *, told: bool = True) -> bool:
        """Take a running request off its row and blocks; it waits to be resumed.

        told: the plan lists it. Dense rows need not be told: whoever is not scheduled leaves anyway.
        """
        if req_id not in self.removable():
            return False
        self.waiting[req_id] = self._leave(req_id)
        self._left.add(req_id)
        if told or not self.dense:
            self._preempted.add(req_id)
        else:
            self.counts["preempt_untold"] += 1
        self.counts["preempt"] += 1
        return True

    def resume(self, req_id: str, num_tokens: int) -> bool:
        """A preempted request comes back with every token known by now: as new, or, to dense rows, as cached."""
        request = self.waiting.get(req_id)
        if request is None:
            return False
        again = WorldRequest(req_id, request.prompt_len, request.tokens, request.params, request.seed, resumed=True)
        name = "resume_same_plan" if req_id in self._left else "resume"
        if not self._admit(again, num_tokens, [[] for _ in self.block_sizes], name):
            return False
        del self.waiting[req_id]
        return True

    def finish(self, req_id: str) -> bool:
        """A running request ends; its computed blocks stay readable until they are handed out."""
        if req_id not in self.removable():
            return False
        self._leave(req_id)
        self._finished.add(req_id)
        self.counts["finish"] += 1
        return True

    def abort(self, req_id: str) -> bool:
        """End an id whatever its state: running, preempted, or never heard of."""
        if req_id in self.running:
            if not self.finish(req_id):
                return False
            self.counts["abort_running"] += 1
            return True
        if req_id in self._touched:
            return False
        self.counts["abort_waiting" if self.waiting.pop(req_id, None) else "abort_unknown"] += 1
        self._finished.add(req_id)
        return True

    # -- closing the plan -------------------------------------------------------------------------------------

    def close(self, pad_tokens: int = 0, pad_reqs: int | None = 0) -> PlannedStep:
        """The plan as it stands. pad_tokens, pad_reqs: padding behind it; `pad_reqs=None` pads tokens alone."""
        total, r = sum(self._counts.values()), len(self._counts)
        plan = SchedulerOutput(
            self._new, self._cached, self._counts, total, {k: v for k, v in self._drafts.items() if v},
            frozenset(self._finished), frozenset(self._preempted), self._zero, self._copies,
        )  # fmt: skip
        k = self.config.num_speculative_tokens
        order = tuple(sorted(self._counts, key=lambda i: order_key(self._counts[i], len(self._drafts.get(i, ())), k)))
        if self.dense:
            order = self._dense_order(plan)
        truth = StepTruth(order, self._truths, plan.finished_req_ids | self._left)
        descriptor = None
        if total and (pad_tokens or pad_reqs or pad_reqs is None):
            full = pad_reqs is not None
            t = min(total + pad_tokens, self.config.max_num_batched_tokens)
            rp = min(r + (pad_reqs or 0), self.config.max_num_reqs)
            descriptor = BatchDescriptor(
                CUDAGraphMode.FULL if full else CUDAGraphMode.PIECEWISE, t, rp if full else None
            )
            self.counts["padded"] += 1
        self.counts["steps"] += 1
        if not total:
            self.counts["empty_step"] += 1
        self.counts["tokens"] += total
        self._planned = truth
        self._start_plan()
        return PlannedStep(plan, descriptor, truth)

    def observe(self, tokens: Mapping[str, Sequence[int]], drafts: Mapping[str, Sequence[int]] | None = None) -> None:
        """Advance the truth by one step: the tokens that each request took, and the drafts held for it from now on."""
        for req_id, truth in self._planned.requests.items():
            request, taken = truth.request, list(tokens.get(req_id, ()))
            request.tokens.extend(int(t) for t in taken)
            rejected = 1 + truth.num_drafts - len(taken) if truth.samples else 0
            request.computed += truth.num_scheduled - rejected
            if drafts is not None:
                request.drafts = list(drafts[req_id])
            self._evict(request)

    # -- internals --------------------------------------------------------------------------------------------

    def _start_plan(self) -> None:
        self._new: list[NewRequestData] = []
        self._cached = CachedRequestData()
        self._counts: dict[str, int] = {}
        self._drafts: dict[str, list[int]] = {}
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self._left: set[str] = set()  # preempted by this plan, told or not
        self._zero: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self._truths: dict[str, RequestTruth] = {}
        self._touched: set[str] = set()
        self._copied_from: set[str] = set()

    def _fresh(self, prompt: Sequence[int], params: SamplingParams, seed: int, req_id: str | None) -> WorldRequest:
        if req_id is None:
            # Ids whose text order is not their age, so that an order by id cannot pass for an order of arrival.
            self._serial += 1
            req_id = f"{'qkzbmd'[self._serial % 6]}{self._serial}"
        return WorldRequest(req_id, len(prompt), list(prompt), params, seed)

    def _admit(
        self, request: WorldRequest, num_tokens: int, shared: list[list[int]], action: str, spare_blocks: int = 0,
        copies: Sequence[tuple[int, int]] = (),
    ) -> bool:  # fmt: skip
        """Give `request` a row, the shared blocks and fresh ones, and its first tokens; False if there is no room."""
        held = request.req_id in self.running or request.req_id in self._touched
        request.prefill_len, request.admitted_at = len(request.tokens), request.computed
        if held or self.free_rows < 1 or not request.computed < request.prefill_len < self.config.max_model_len:
            return False
        n = self._legal_count(request, num_tokens, 0) if num_tokens else 0
        if num_tokens and not n:
            return False
        claimed = [b for ids in shared for b in ids if b != NULL_BLOCK_ID]
        for b in claimed:
            self._pool.claim(b)
        request.blocks = tuple(list(ids) for ids in shared)
        request.evicted = [sum(b == NULL_BLOCK_ID for b in ids) for ids in shared]
        fresh = self._blocks_for(request, request.computed + n, spare_blocks)
        if fresh is None:
            for b in claimed:
                self._pool.release(b)
            return False
        for source, g in copies:
            self._copies.append((source, fresh[g][0]))
            self._zero.append(fresh[g][0])
        for owned, ids in zip(request.blocks, fresh, strict=True):
            owned.extend(ids)
        request.drafts = [0] * self.config.num_speculative_tokens
        self.running[request.req_id] = request
        blocks = tuple(list(ids) for ids in request.blocks)
        if self.dense and request.resumed:
            self._list_resumed(request, blocks)
        else:
            self._new.append(
                NewRequestData(
                    request.req_id, request.tokens[: request.prompt_len], list(request.tokens), request.computed,
                    blocks, request.params, request.seed, EOS_TOKEN_IDS,
                )
            )  # fmt: skip
        self._touched.add(request.req_id)
        if n:
            self._mark(request, n, 0, action)
        else:
            self.counts[action] += 1
            self.counts["add_without_tokens"] += 1
        return True

    def _list_resumed(self, request: WorldRequest, blocks: tuple[list[int], ...]) -> None:
        cached = self._cached
        cached.req_ids.append(request.req_id)
        cached.num_computed_tokens.append(request.computed)
        cached.new_block_ids.append(blocks)
        cached.num_output_tokens.append(len(request.tokens) - request.prompt_len)
        cached.resumed_req_ids |= {request.req_id}
        cached.all_token_ids = {**cached.all_token_ids, request.req_id: list(request.tokens)}

    def _dense_order(self, plan: SchedulerOutput) -> tuple[str, ...]:
        """The batch order of dense rows, and what this step does to rows, counted."""
        prompt_lens = {req_id: self.running[req_id].prompt_len for req_id in self._counts}
        change = next_rows(self._rows, plan, prompt_lens, self.config.reorder_batch_threshold)
        self._rows = change.order
        self.counts["condense_move"] += len(change.condensed)
        self.counts["swap"] += len(change.swapped)
        self.counts["return"] += len(change.returned)
        return change.order

    def _legal_count(self, request: WorldRequest, num_tokens: int, num_drafts: int) -> int:
        """The count nearest to `num_tokens` that a plan may schedule; 0 if there is none."""
        known = max(request.prefill_len - request.computed, 1)
        if num_drafts and (known > 1 or num_drafts > self.config.num_speculative_tokens):
            return 0
        n = 1 + num_drafts if num_drafts else min(num_tokens, known, self.budget, self.room(request))
        return n if 0 < n <= min(self.budget, self.room(request)) else 0

    def _mark(self, request: WorldRequest, n: int, num_drafts: int, action: str) -> None:
        req_id, computed = request.req_id, request.computed
        known = request.tokens[computed : computed + n]
        drafts = request.drafts[: n - len(known)]
        self._counts[req_id] = n
        if num_drafts:
            self._drafts[req_id] = [PLACEHOLDER_TOKEN_ID] * num_drafts
            self.counts["verify"] += 1
        self._touched.add(req_id)
        self._truths[req_id] = RequestTruth(
            request, n, computed, request.prefill_len, num_drafts, (*known, *drafts), tuple(request.drafts),
            not request.started, request.resumed,
        )  # fmt: skip
        request.started = True
        self.counts[action] += 1

    def _leave(self, req_id: str) -> WorldRequest:
        request = self.running.pop(req_id)
        full = [ids[: request.computed // size] for ids, size in zip(request.blocks, self.block_sizes, strict=True)]
        if all(full):
            blocks = tuple([NULL_BLOCK_ID] * gone + ids[gone:] for ids, gone in zip(full, request.evicted, strict=True))
            self._pool.remember(Ghost(request.tokens, request.computed, blocks, list(request.evicted)))
        for ids, gone in zip(request.blocks, request.evicted, strict=True):
            for block in ids[gone:]:
                self._pool.release(block)
        return request

    def _evict(self, request: WorldRequest) -> None:
        """Give back the blocks that a windowed group can never read again."""
        for g, (size, reach) in enumerate(zip(self.block_sizes, self.reach, strict=True)):
            behind = max(request.computed - reach, 0) // size if reach else 0
            behind = min(behind, len(request.blocks[g]))
            for block in request.blocks[g][request.evicted[g] : behind]:
                self._pool.release(block)
                self.counts["window_eviction"] += 1
            request.evicted[g] = max(request.evicted[g], behind)

    def _readable(self, source: WorldRequest | Ghost, length: int) -> bool:
        """Whether every block that a request of `length` computed tokens may read is still there."""
        for g, (size, reach) in enumerate(zip(self.block_sizes, self.reach, strict=True)):
            behind = max(length - reach, 0) // size if reach else 0
            if source.evicted[g] > behind:
                return False
        return True

    def _shared_columns(self, source: WorldRequest | Ghost, group: int, length: int) -> list[int]:
        size, reach = self.block_sizes[group], self.reach[group]
        behind = max(length - reach, 0) // size if reach else 0
        return [NULL_BLOCK_ID] * behind + source.blocks[group][behind : length // size]

    def _blocks_for(self, request: WorldRequest, num_tokens: int, spare: int = 0) -> tuple[list[int], ...] | None:
        """Fresh blocks so that every group has room for `num_tokens`; None (and no change) if the pool is too small."""
        wanted = []
        for ids, size, group in zip(request.blocks, self.block_sizes, self.kv_cache_config.groups, strict=True):
            width = group.spec.block_table_width(self.config.max_model_len)
            wanted.append(min(max(-(-num_tokens // size) - len(ids), 0) + spare, width - len(ids)))
        if sum(wanted) > len(self._pool.free):
            self.counts["exhausted"] += 1
            return None
        return tuple([self._pool.take() for _ in range(k)] for k in wanted)
