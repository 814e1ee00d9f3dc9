"""Is this plan possible? Checked against what the runner holds, before anything changes.

The validator keeps the host's own picture of every live request: lengths, an upper and a lower bound of the computed
tokens (they differ only while drafts are in flight) and the block lists. It never reads the device, which may run
behind. `check` changes nothing; `commit` advances the picture once the plan is accepted. Source: spec_core 1.8.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runner_api.capabilities import Capability
from runner_api.config import RunnerConfig
from runner_api.constants import NULL_BLOCK_ID
from runner_api.errors import CapabilityError, PlanError, RunnerError
from runner_api.kv_cache import KVCacheConfig
from runner_api.plan import BlockIds, NewRequestData, SchedulerOutput
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
class PlanValidator:
    """Checks plans for one runner. `requests` is the picture after the last committed plan."""

    config: RunnerConfig
    kv_cache_config: KVCacheConfig
    vocab_size: int
    capabilities: frozenset[Capability]
    requests: dict[str, LiveRequest] = field(default_factory=dict)

    # -- the two entry points ---------------------------------------------------------------------------------

    def check(self, plan: SchedulerOutput) -> None:
        """Raise PlanError or CapabilityError if the plan is impossible; change nothing."""
        try:
            self._check(plan)
        except RunnerError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError) as e:
            raise PlanError(
                f"malformed plan: {type(e).__name__}: {e}",
                code="MR-ERR-020",
                hint="Build it from runner_api.plan types with lists of ints",
            ) from e

    def commit(self, plan: SchedulerOutput) -> None:
        """Advance the picture by an accepted plan."""
        for req_id in self._removed(plan):
            self.requests.pop(req_id, None)
        for new in plan.scheduled_new_reqs:
            self.requests[new.req_id] = LiveRequest(
                new.prompt_len,
                len(new.prefill_token_ids),
                new.num_computed_tokens,
                new.num_computed_tokens,
                tuple(list(ids) for ids in new.block_ids),
            )
        cached = plan.scheduled_cached_reqs
        for req_id, computed, ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            live = self.requests[req_id]
            live.computed_upper = computed
            for owned, more in zip(live.block_ids, ids or (), strict=False):
                owned.extend(more)
        for req_id, n in plan.num_scheduled_tokens.items():
            live = self.requests[req_id]
            live.computed_upper += n
            live.computed_lower += n - len(plan.scheduled_spec_decode_tokens.get(req_id, ()))

    @staticmethod
    def _removed(plan: SchedulerOutput) -> set[str]:
        return set(plan.finished_req_ids) | set(plan.preempted_req_ids)

    # -- the clauses ------------------------------------------------------------------------------------------

    def _check(self, plan: SchedulerOutput) -> None:
        removed = self._removed(plan)
        after = self.requests.keys() - removed
        added = self._check_new(plan, after)
        self._check_counts(plan, after | added.keys())
        computed, blocks = self._check_cached(plan, after, added)
        for req_id, new in added.items():
            computed[req_id] = new.num_computed_tokens
            blocks[req_id] = new.block_ids
        missing = plan.num_scheduled_tokens.keys() - computed.keys()
        if missing:
            req_id = min(missing)
            raise PlanError(
                "scheduled but listed neither as new nor as cached",
                code="MR-ERR-021",
                field="num_scheduled_tokens",
                req_id=req_id,
                hint="Put it into scheduled_cached_reqs (or scheduled_new_reqs)",
            )
        for req_id, n in plan.num_scheduled_tokens.items():
            self._check_lengths(plan, req_id, n, computed[req_id], added.get(req_id))
            self._check_blocks(req_id, n, computed[req_id], blocks[req_id])
        self._check_writes(plan, computed, blocks)
        self._check_block_operations(plan)

    def _check_new(self, plan: SchedulerOutput, after: set[str]) -> dict[str, NewRequestData]:
        added: dict[str, NewRequestData] = {}
        where = "scheduled_new_reqs"
        for new in plan.scheduled_new_reqs:
            req_id = new.req_id
            if not isinstance(req_id, str):
                raise PlanError("id is not a string", code="MR-ERR-020", field=where, got=req_id, expected="str")
            if req_id in after or req_id in added:
                raise PlanError(
                    "a live request cannot be added again",
                    code="MR-ERR-022",
                    field=where,
                    req_id=req_id,
                    got="live" if req_id in after else "listed twice",
                    expected="an id that is not live, or finished or preempted by the same plan",
                )
            self._check_prompt(new)
            self._check_features(new)
            self._check_group_count(where, req_id, new.block_ids)
            added[req_id] = new
        if len(after) + len(added) > self.config.max_num_reqs:
            raise PlanError(
                "more requests than rows",
                code="MR-ERR-023",
                field=where,
                got=len(after) + len(added),
                expected=f"at most max_num_reqs = {self.config.max_num_reqs}",
                hint="Finish or preempt some, or raise max_num_reqs",
            )
        return added

    def _check_prompt(self, new: NewRequestData) -> None:
        req_id, prefill_len = new.req_id, len(new.prefill_token_ids)
        if prefill_len < 1 or prefill_len < new.prompt_len or prefill_len > self.config.max_model_len:
            raise PlanError(
                "number of known tokens",
                code="MR-ERR-024",
                field="prefill_token_ids",
                req_id=req_id,
                got=prefill_len,
                expected=f"from max(1, prompt length {new.prompt_len}) to max_model_len {self.config.max_model_len}",
            )
        for token in new.prefill_token_ids:
            if not 0 <= token < self.vocab_size:
                raise PlanError(
                    "token id out of range",
                    code="MR-ERR-025",
                    field="prefill_token_ids",
                    req_id=req_id,
                    got=token,
                    expected=f"0 <= id < {self.vocab_size}",
                )
        if not 0 <= _int(new.num_computed_tokens) < prefill_len:
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
        if new.sampling_params is not None:
            wanted |= new.sampling_params.required_capabilities()
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
        if not INT64_MIN <= _int(new.seed) <= INT64_MAX:
            raise PlanError(
                "seed out of range", code="MR-ERR-027", field="seed", req_id=new.req_id, got=new.seed,
                expected="a signed 64-bit integer",
            )

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

    def _check_counts(self, plan: SchedulerOutput, live: set[str]) -> None:
        total = 0
        for req_id, n in plan.num_scheduled_tokens.items():
            if req_id not in live:
                raise PlanError(
                    "unknown request", code="MR-ERR-029", field="num_scheduled_tokens", req_id=req_id,
                    expected="a live id, not finished or preempted by this plan",
                )
            drafts = len(plan.scheduled_spec_decode_tokens.get(req_id, ()))
            if _int(n) < 1 + drafts:
                raise PlanError(
                    "scheduled tokens",
                    code="MR-ERR-030",
                    field="num_scheduled_tokens",
                    req_id=req_id,
                    got=n,
                    expected=f">= {1 + drafts} (one, plus its drafts); leave a request out rather than give it none",
                )
            total += n
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
        for req_id, drafts in plan.scheduled_spec_decode_tokens.items():
            if req_id not in plan.num_scheduled_tokens:
                raise PlanError(
                    "drafts of a request that is not scheduled", code="MR-ERR-033",
                    field="scheduled_spec_decode_tokens", req_id=req_id,
                )
            if len(drafts) > self.config.num_speculative_tokens:
                raise PlanError(
                    "too many drafts",
                    code="MR-ERR-033",
                    field="scheduled_spec_decode_tokens",
                    req_id=req_id,
                    got=len(drafts),
                    expected=f"at most num_speculative_tokens = {self.config.num_speculative_tokens}",
                )

    def _check_cached(
        self, plan: SchedulerOutput, after: set[str], added: dict[str, NewRequestData]
    ) -> tuple[dict[str, int], dict[str, tuple[list[int], ...]]]:
        cached = plan.scheduled_cached_reqs
        computed_of: dict[str, int] = {}
        blocks_of: dict[str, tuple[list[int], ...]] = {}
        lengths = {len(cached.req_ids), len(cached.num_computed_tokens), len(cached.new_block_ids)}
        if len(lengths) != 1:
            raise PlanError(
                "parallel lists differ in length", code="MR-ERR-034", field="scheduled_cached_reqs", got=sorted(lengths)
            )
        if cached.resumed_req_ids:
            raise PlanError(
                "a resumed request arrives as new in the slots layout",
                code="MR-ERR-035",
                field="resumed_req_ids",
                got=sorted(cached.resumed_req_ids),
                expected="none",
                hint="Send it in scheduled_new_reqs with all its tokens in prefill_token_ids",
            )
        for req_id, computed, ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if req_id not in after or req_id in added or req_id in computed_of:
                raise PlanError(
                    "not a request that the runner holds", code="MR-ERR-029",
                    field="scheduled_cached_reqs", req_id=req_id,
                    expected="a live id, once, not finished, preempted or added by this plan",
                )
            live = self.requests[req_id]
            if not live.computed_lower <= _int(computed) <= live.computed_upper:
                low, high = live.computed_lower, live.computed_upper
                raise PlanError(
                    "computed tokens disagree with the runner",
                    code="MR-ERR-036",
                    field="scheduled_cached_reqs.num_computed_tokens",
                    req_id=req_id,
                    got=computed,
                    expected=str(low) if low == high else f"{low} .. {high}",
                    hint="The runner owns this counter; preempt the request to rewind it",
                )
            if ids is not None:
                self._check_group_count("scheduled_cached_reqs", req_id, ids)
            computed_of[req_id] = computed
            blocks_of[req_id] = (
                live.block_ids if ids is None else tuple([*o, *m] for o, m in zip(live.block_ids, ids, strict=True))
            )
            if req_id not in plan.num_scheduled_tokens:
                raise PlanError(
                    "cached request without scheduled tokens", code="MR-ERR-021",
                    field="scheduled_cached_reqs", req_id=req_id,
                )
        return computed_of, blocks_of

    def _check_lengths(
        self, plan: SchedulerOutput, req_id: str, n: int, computed: int, new: NewRequestData | None
    ) -> None:
        prefill_len = len(new.prefill_token_ids) if new else self.requests[req_id].prefill_len
        drafts = len(plan.scheduled_spec_decode_tokens.get(req_id, ()))
        most = max(prefill_len - computed, 1) + drafts
        if n > most or (computed >= prefill_len and n != most):
            raise PlanError(
                "more tokens than are known",
                code="MR-ERR-037",
                field="num_scheduled_tokens",
                req_id=req_id,
                got=n,
                expected=f"at most {most}: {max(prefill_len - computed, 1)} known after {computed} computed, {drafts} drafts",
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

    def _check_blocks(self, req_id: str, n: int, computed: int, blocks: tuple[list[int], ...]) -> None:
        for g, (group, ids) in enumerate(zip(self.kv_cache_config.groups, blocks, strict=True)):
            spec, where = group.spec, f"block_ids (group {g})"
            if spec.has_slot_mapping and len(ids) * spec.block_size < computed + n:
                raise PlanError(
                    "a scheduled position has no block",
                    code="MR-ERR-039",
                    field=where,
                    req_id=req_id,
                    got=f"{len(ids)} blocks of {spec.block_size}",
                    expected=f"room for {computed + n} tokens",
                )
            width = spec.block_table_width(self.config.max_model_len)
            if len(ids) > width:
                raise PlanError(
                    "more blocks than the table has columns", code="MR-ERR-040", field=where, req_id=req_id,
                    got=len(ids), expected=f"at most {width}", hint="Raise max_model_len",
                )
            behind = max(computed - spec.window_reach, 0) // spec.block_size if spec.window_reach else 0
            for column, block in enumerate(ids):
                null_is_fine = block == NULL_BLOCK_ID and column < behind
                if not 0 < _int(block) < self.kv_cache_config.num_blocks and not null_is_fine:
                    raise PlanError(
                        "block id out of range",
                        code="MR-ERR-041",
                        field=where,
                        req_id=req_id,
                        got=block,
                        expected=f"1 <= id < num_blocks = {self.kv_cache_config.num_blocks} (column {column})",
                    )

    def _check_writes(
        self, plan: SchedulerOutput, computed: dict[str, int], blocks: dict[str, tuple[list[int], ...]]
    ) -> None:
        """No slot is written twice in a step. Works on runs of slots inside one block, never on single tokens."""
        for g, group in enumerate(self.kv_cache_config.groups):
            if not group.spec.has_slot_mapping:
                continue
            size = group.spec.block_size
            runs = []
            for req_id, n in plan.num_scheduled_tokens.items():
                start, end = computed[req_id], computed[req_id] + n
                ids = blocks[req_id][g]
                for column in range(start // size, (end - 1) // size + 1):
                    low, high = max(start - column * size, 0), min(end - column * size, size)
                    runs.append((ids[column], low, high, req_id))
            runs.sort()
            for (block, _, high, first), (other, low, _, second) in zip(runs, runs[1:], strict=False):
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
            if not 0 < _int(block) < self.kv_cache_config.num_blocks:
                raise PlanError(
                    "block id out of range", code="MR-ERR-041", field="new_block_ids_to_zero / kv_cache_block_copies",
                    got=block, expected=f"1 <= id < num_blocks = {self.kv_cache_config.num_blocks}",
                )


def _int(value: Any) -> int:
    """The value, if it is an integer (bools are not); TypeError otherwise."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{value!r} is not an integer")
    return value
