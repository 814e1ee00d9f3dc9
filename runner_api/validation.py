"""Is this plan possible? Checked against what the runner holds, before anything changes.

The validator keeps the host's own picture of every live request: lengths, an upper and a lower bound of the computed
tokens (they differ only while drafts are in flight) and the block lists. It never reads the device, which may run
behind. `check` changes nothing; `commit` advances the picture once the plan is accepted; `settle` narrows it once an
outcome is known. The cost of a check does not grow with the blocks a request already has.
Source: the preconditions of vLLM 0.33's runner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from runner_api.capabilities import Capability
from runner_api.config import RunnerConfig
from runner_api.constants import NULL_BLOCK_ID, PLACEHOLDER_TOKEN_ID
from runner_api.errors import CapabilityError, PlanError, RunnerError
from runner_api.kv_cache import KVCacheConfig
from runner_api.plan import BlockIds, NewRequestData, SchedulerOutput
from runner_api.plan_types import check_types
from runner_api.sampling_params import INT64_MAX, INT64_MIN


@dataclass(slots=True)
class LiveRequest:
    """What the host knows of one request."""

    prompt_len: int
    prefill_len: int
    computed_upper: int  # if every draft in flight is accepted
    computed_lower: int  # if every draft in flight is rejected
    block_ids: tuple[list[int], ...]


@dataclass(slots=True)
class Scheduled:
    """One request of the plan that is being checked: what it held before, and what the plan adds."""

    prefill_len: int
    computed: int
    held: Sequence[Sequence[int]]  # blocks checked by an earlier plan, per group
    more: Sequence[Sequence[int]]  # blocks that this plan brings, per group

    def num_blocks(self, group: int) -> int:
        return len(self.held[group]) + len(self.more[group])

    def block(self, group: int, column: int) -> int:
        held = self.held[group]
        return held[column] if column < len(held) else self.more[group][column - len(held)]


@dataclass(slots=True)
class PlanValidator:
    """Checks plans for one runner. `requests` is the picture after the last committed plan."""

    config: RunnerConfig
    kv_cache_config: KVCacheConfig
    vocab_size: int
    capabilities: frozenset[Capability]
    requests: dict[str, LiveRequest] = field(default_factory=dict)

    # -- the entry points -------------------------------------------------------------------------------------

    def check(self, plan: SchedulerOutput) -> None:
        """Raise PlanError or CapabilityError if the plan is impossible; change nothing."""
        try:
            check_types(plan)
            self._check(plan)
        except RunnerError:
            raise
        except Exception as e:  # a plan whose own parts raise when they are read
            raise PlanError(
                f"malformed plan: {type(e).__name__}: {e}",
                code="MR-ERR-020",
                hint="Build plans from the types in runner_api.plan",
            ) from e

    def commit(self, plan: SchedulerOutput) -> None:
        """Advance the picture by an accepted plan."""
        for req_id in plan.finished_req_ids | plan.preempted_req_ids:
            self.requests.pop(req_id, None)
        for new in plan.scheduled_new_reqs:
            computed, block_ids = int(new.num_computed_tokens), tuple(list(ids) for ids in new.block_ids)
            self.requests[new.req_id] = LiveRequest(
                new.prompt_len, len(new.prefill_token_ids), computed, computed, block_ids
            )
        cached = plan.scheduled_cached_reqs
        for req_id, computed, ids in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            live = self.requests[req_id]
            live.computed_upper = int(computed)
            if ids is not None:
                for owned, more in zip(live.block_ids, ids, strict=True):
                    owned.extend(more)
        for req_id, n in plan.num_scheduled_tokens.items():
            live = self.requests[req_id]
            live.computed_upper += int(n)
            live.computed_lower += int(n) - len(plan.scheduled_spec_decode_tokens.get(req_id, ()))

    def settle(self, req_ids: Iterable[str], num_sampled: Iterable[int]) -> None:
        """The outcome of the latest step is known: all tokens a request sampled but one were accepted drafts.

        From then on a plan may not rewind the request behind them. A runner whose outcomes reach the host late need
        not call this; its bounds stay wide.
        """
        for req_id, n in zip(req_ids, num_sampled, strict=True):
            if n > 1:
                self.requests[req_id].computed_lower += int(n) - 1

    # -- the clauses ------------------------------------------------------------------------------------------

    def _check(self, plan: SchedulerOutput) -> None:
        removed = plan.finished_req_ids | plan.preempted_req_ids
        scheduled: dict[str, Scheduled] = {}
        self._check_new(plan, removed, scheduled)
        added = set(scheduled)
        self._check_counts(plan, removed, added)
        self._check_drafts(plan)
        self._check_cached(plan, removed, scheduled)
        missing = plan.num_scheduled_tokens.keys() - scheduled.keys()
        if missing:
            raise PlanError(
                "scheduled but listed neither as new nor as cached",
                code="MR-ERR-021",
                field="num_scheduled_tokens",
                req_id=min(missing),
                hint="Put it into scheduled_cached_reqs (or scheduled_new_reqs)",
            )
        for req_id, request in scheduled.items():
            n = int(plan.num_scheduled_tokens.get(req_id, 0))  # a new request may wait for its first tokens
            if n:
                self._check_lengths(plan, req_id, n, request)
            self._check_blocks(req_id, n, request)
        self._check_writes(plan, scheduled)
        self._check_block_operations(plan)

    def _is_live(self, req_id: str, removed: frozenset[str]) -> bool:
        return req_id in self.requests and req_id not in removed

    def _check_new(self, plan: SchedulerOutput, removed: frozenset[str], scheduled: dict[str, Scheduled]) -> None:
        where = "scheduled_new_reqs"
        for new in plan.scheduled_new_reqs:
            req_id = new.req_id
            if self._is_live(req_id, removed) or req_id in scheduled:
                raise PlanError(
                    "a live request cannot be added again",
                    code="MR-ERR-022",
                    field=where,
                    req_id=req_id,
                    got="listed twice" if req_id in scheduled else "live",
                    expected="an id that is not live, or finished or preempted by the same plan",
                )
            self._check_prompt(new)
            self._check_features(new)
            self._check_group_count(where, req_id, new.block_ids)
            nothing = [()] * len(new.block_ids)
            scheduled[req_id] = Scheduled(
                len(new.prefill_token_ids), int(new.num_computed_tokens), nothing, new.block_ids
            )
        rows = len(self.requests) - len(self.requests.keys() & removed) + len(scheduled)
        if rows > self.config.max_num_reqs:
            raise PlanError(
                "more requests than rows",
                code="MR-ERR-023",
                field=where,
                got=rows,
                expected=f"at most max_num_reqs = {self.config.max_num_reqs}",
                hint="Finish or preempt some, or raise max_num_reqs",
            )

    def _check_prompt(self, new: NewRequestData) -> None:
        req_id, known = new.req_id, new.prefill_token_ids
        prefill_len = len(known)
        if prefill_len < 1 or prefill_len < new.prompt_len or prefill_len > self.config.max_model_len:
            raise PlanError(
                "number of known tokens",
                code="MR-ERR-024",
                field="prefill_token_ids",
                req_id=req_id,
                got=prefill_len,
                expected=f"from max(1, prompt length {new.prompt_len}) to max_model_len {self.config.max_model_len}",
            )
        if min(known) < 0 or max(known) >= self.vocab_size:
            raise PlanError(
                "token id out of range",
                code="MR-ERR-025",
                field="prefill_token_ids",
                req_id=req_id,
                got=next(t for t in known if not 0 <= t < self.vocab_size),
                expected=f"0 <= id < {self.vocab_size}",
            )
        if list(known[: new.prompt_len]) != list(new.prompt_token_ids):
            raise PlanError(
                "the known tokens do not begin with the prompt",
                code="MR-ERR-024",
                field="prompt_token_ids",
                req_id=req_id,
                expected="prefill_token_ids = prompt_token_ids, then the outputs drawn so far",
            )
        if not 0 <= new.num_computed_tokens < prefill_len:
            raise PlanError(
                "computed tokens of a new request",
                code="MR-ERR-026",
                field="num_computed_tokens",
                req_id=req_id,
                got=new.num_computed_tokens,
                expected=f"0 <= n < {prefill_len}: the last known token must be computed to get its logits",
            )

    def _check_features(self, new: NewRequestData) -> None:
        wanted: set[Capability] = set()
        params = new.sampling_params
        if params is not None:
            wanted |= params.required_capabilities()
        for value, capability in (
            (new.pooling_params, Capability.POOLING),
            (new.lora_request, Capability.LORA),
            (new.mm_features or None, Capability.MULTIMODAL),
            (new.prompt_embeds, Capability.PROMPT_EMBEDS),
        ):
            if value is not None:
                wanted.add(capability)
        refused = sorted(c.value for c in wanted - self.capabilities)
        if refused:
            raise CapabilityError(
                f"this runner does not offer {', '.join(refused)}",
                field="scheduled_new_reqs",
                req_id=new.req_id,
                hint="`modelrunner runners` lists what each runner offers",
            )
        if not INT64_MIN <= new.seed <= INT64_MAX:
            raise PlanError(
                "seed out of range", code="MR-ERR-027", field="seed", req_id=new.req_id, got=new.seed,
                expected="a signed 64-bit integer",
            )  # fmt: skip
        if params is not None and params.logprobs is not None and params.logprobs > self.vocab_size:
            raise PlanError(
                "more log probabilities than tokens", code="MR-ERR-046", field="sampling_params.logprobs",
                req_id=new.req_id, got=params.logprobs, expected=f"-1 .. {self.vocab_size}",
            )  # fmt: skip

    def _check_group_count(self, where: str, req_id: str, block_ids: BlockIds) -> None:
        if len(block_ids) != len(self.kv_cache_config.groups):
            raise PlanError(
                "number of KV cache groups",
                code="MR-ERR-028",
                field=f"{where}.block_ids",
                req_id=req_id,
                got=len(block_ids),
                expected=len(self.kv_cache_config.groups),
            )

    def _check_counts(self, plan: SchedulerOutput, removed: frozenset[str], added: set[str]) -> None:
        total = 0
        for req_id, n in plan.num_scheduled_tokens.items():
            if req_id not in added and not self._is_live(req_id, removed):
                raise PlanError(
                    "unknown request", code="MR-ERR-029", field="num_scheduled_tokens", req_id=req_id,
                    expected="a live id, not finished or preempted by this plan",
                )  # fmt: skip
            drafts = len(plan.scheduled_spec_decode_tokens.get(req_id, ()))
            if n < 1 + drafts:
                raise PlanError(
                    "scheduled tokens",
                    code="MR-ERR-030",
                    field="num_scheduled_tokens",
                    req_id=req_id,
                    got=n,
                    expected=f">= {1 + drafts} (one, plus its drafts); leave a request out rather than give it none",
                )
            total += int(n)
        if total != plan.total_num_scheduled_tokens:
            raise PlanError(
                "counts do not add up",
                code="MR-ERR-031",
                field="total_num_scheduled_tokens",
                got=plan.total_num_scheduled_tokens,
                expected=total,
            )
        if total > self.config.max_num_batched_tokens:
            raise PlanError(
                "too many tokens in one step",
                code="MR-ERR-032",
                field="total_num_scheduled_tokens",
                got=total,
                expected=f"at most max_num_batched_tokens = {self.config.max_num_batched_tokens}",
            )

    def _check_drafts(self, plan: SchedulerOutput) -> None:
        most, where = self.config.num_speculative_tokens, "scheduled_spec_decode_tokens"
        for req_id, drafts in plan.scheduled_spec_decode_tokens.items():
            if req_id not in plan.num_scheduled_tokens:
                raise PlanError(
                    "drafts of a request that is not scheduled", code="MR-ERR-033", field=where, req_id=req_id
                )
            if len(drafts) > most:
                raise PlanError(
                    "too many drafts",
                    code="MR-ERR-033",
                    field=where,
                    req_id=req_id,
                    got=len(drafts),
                    expected=f"at most num_speculative_tokens = {most}",
                )
            for token in drafts:
                if not PLACEHOLDER_TOKEN_ID <= token < self.vocab_size:
                    raise PlanError(
                        "draft id out of range", code="MR-ERR-025", field=where, req_id=req_id, got=token,
                        expected=f"0 <= id < {self.vocab_size}, or {PLACEHOLDER_TOKEN_ID} where it is not known",
                    )  # fmt: skip
        if not 0 <= plan.num_spec_tokens_to_schedule <= most:
            raise PlanError(
                "drafts to propose", code="MR-ERR-033", field="num_spec_tokens_to_schedule",
                got=plan.num_spec_tokens_to_schedule, expected=f"0 .. num_speculative_tokens = {most}",
            )  # fmt: skip

    def _check_cached(self, plan: SchedulerOutput, removed: frozenset[str], scheduled: dict[str, Scheduled]) -> None:
        cached, where = plan.scheduled_cached_reqs, "scheduled_cached_reqs"
        lengths = [len(cached.req_ids), len(cached.num_computed_tokens), len(cached.new_block_ids)]
        if len(set(lengths)) != 1:
            raise PlanError("parallel lists differ in length", code="MR-ERR-034", field=where, got=lengths)
        if cached.resumed_req_ids:
            raise PlanError(
                "a resumed request arrives as new in the slots layout",
                code="MR-ERR-035",
                field="resumed_req_ids",
                got=sorted(cached.resumed_req_ids),
                expected="none",
                hint="Send it in scheduled_new_reqs with all its tokens in prefill_token_ids",
            )
        nothing = [()] * len(self.kv_cache_config.groups)
        for req_id, computed, ids in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            if not self._is_live(req_id, removed) or req_id in scheduled:
                raise PlanError(
                    "not a request that the runner holds", code="MR-ERR-029", field=where, req_id=req_id,
                    expected="a live id, once, not finished, preempted or added by this plan",
                )  # fmt: skip
            live = self.requests[req_id]
            low, high = live.computed_lower, live.computed_upper
            if not low <= computed <= high:
                raise PlanError(
                    "computed tokens disagree with the runner",
                    code="MR-ERR-036",
                    field=f"{where}.num_computed_tokens",
                    req_id=req_id,
                    got=computed,
                    expected=str(low) if low == high else f"{low} .. {high}",
                    hint="The runner owns this counter; preempt the request to rewind it",
                )
            if ids is not None:
                self._check_group_count(where, req_id, ids)
            if req_id not in plan.num_scheduled_tokens:
                raise PlanError(
                    "cached request without scheduled tokens", code="MR-ERR-021", field=where, req_id=req_id
                )
            scheduled[req_id] = Scheduled(
                live.prefill_len, int(computed), live.block_ids, nothing if ids is None else ids
            )

    def _check_lengths(self, plan: SchedulerOutput, req_id: str, n: int, request: Scheduled) -> None:
        computed, drafts = request.computed, len(plan.scheduled_spec_decode_tokens.get(req_id, ()))
        known = max(request.prefill_len - computed, 1)
        # Drafts continue the last known token, so a request with drafts computes everything before them too.
        exact = drafts > 0 or computed >= request.prefill_len
        if n > known + drafts or (exact and n != known + drafts):
            raise PlanError(
                "scheduled tokens are not the known ones",
                code="MR-ERR-037",
                field="num_scheduled_tokens",
                req_id=req_id,
                got=n,
                expected=f"{'' if exact else 'at most '}{known + drafts}: {known} known after {computed} computed, "
                f"{drafts} drafts",
            )
        if computed + n > self.config.max_model_len - 1:
            raise PlanError(
                "past max_model_len",
                code="MR-ERR-038",
                field="num_scheduled_tokens",
                req_id=req_id,
                got=f"{computed} computed + {n} scheduled",
                expected=f"at most {self.config.max_model_len - 1}, so that the sampled token has a place",
            )

    def _check_blocks(self, req_id: str, n: int, request: Scheduled) -> None:
        num_blocks, computed = self.kv_cache_config.num_blocks, request.computed
        for g, group in enumerate(self.kv_cache_config.groups):
            spec, where = group.spec, f"block_ids (group {g})"
            count = request.num_blocks(g)
            if spec.has_slot_mapping and count * spec.block_size < computed + n:
                raise PlanError(
                    "a scheduled position has no block",
                    code="MR-ERR-039",
                    field=where,
                    req_id=req_id,
                    got=f"{count} blocks of {spec.block_size}",
                    expected=f"room for {computed + n} tokens",
                )
            more = request.more[g]
            if not more:
                continue
            width = spec.block_table_width(self.config.max_model_len)
            if count > width:
                raise PlanError(
                    "more blocks than the table has columns", code="MR-ERR-040", field=where, req_id=req_id,
                    got=count, expected=f"at most {width}", hint="Raise max_model_len",
                )  # fmt: skip
            if min(more) > NULL_BLOCK_ID and max(more) < num_blocks:
                continue
            # The null block stands in for blocks that a window has left behind, and for nothing else.
            behind = max(computed - spec.window_reach, 0) // spec.block_size if spec.window_reach else 0
            for column, block in enumerate(more, len(request.held[g])):
                if not 0 < block < num_blocks and not (block == NULL_BLOCK_ID and column < behind):
                    raise PlanError(
                        "block id out of range",
                        code="MR-ERR-041",
                        field=where,
                        req_id=req_id,
                        got=block,
                        expected=f"1 <= id < num_blocks = {num_blocks} (column {column})",
                    )

    def _check_writes(self, plan: SchedulerOutput, scheduled: dict[str, Scheduled]) -> None:
        """No slot is written twice in a step. Works on runs of slots inside one block, never on single tokens."""
        for g, group in enumerate(self.kv_cache_config.groups):
            if not group.spec.has_slot_mapping:
                continue
            size = group.spec.block_size
            runs = []
            for req_id, n in plan.num_scheduled_tokens.items():
                request = scheduled[req_id]
                start, end = request.computed, request.computed + int(n)
                for column in range(start // size, (end - 1) // size + 1):
                    low, high = max(start - column * size, 0), min(end - column * size, size)
                    runs.append((request.block(g, column), low, high, req_id))
            runs.sort()
            for (block, _, high, first), (other, low, _, second) in pairwise(runs):
                if block == other and low < high:
                    raise PlanError(
                        "two writes to one slot in one step",
                        code="MR-ERR-042",
                        field=f"block_ids (group {g})",
                        req_id=second,
                        got=f"block {block} offset {low}, also written for {first!r}",
                        expected="each slot written once (reading shared blocks is legal)",
                    )

    def _check_block_operations(self, plan: SchedulerOutput) -> None:
        ids = [*plan.new_block_ids_to_zero, *(i for pair in plan.kv_cache_block_copies for i in pair)]
        for block in ids:
            if not 0 < block < self.kv_cache_config.num_blocks:
                raise PlanError(
                    "block id out of range", code="MR-ERR-041", field="new_block_ids_to_zero / kv_cache_block_copies",
                    got=block, expected=f"1 <= id < num_blocks = {self.kv_cache_config.num_blocks}",
                )  # fmt: skip
