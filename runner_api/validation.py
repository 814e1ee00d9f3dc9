"""Is this plan possible? Checked against what the runner holds, before anything changes.

The validator keeps the host's own picture of every live request: lengths, an upper and a lower bound of the computed
tokens (they differ only while drafts are in flight) and the block lists. It never reads the device, which may run
behind. `check` changes nothing; `commit` advances the picture once the plan is accepted; `settle` narrows it once an
outcome is known. The cost of a check does not grow with the blocks a request already has.

The row layout decides how a preempted request comes back: as new (slots; it is forgotten until then), or as cached and
resumed (dense; it stays known, and that it was preempted may show as late as when its blocks are written for others).
Source: the preconditions of vLLM 0.33's runner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from runner_api.block_checks import (
    BlockHolders,
    check_block_operations,
    check_blocks,
    check_group_count,
    check_writes,
    find_losers,
)
from runner_api.capabilities import Capability
from runner_api.config import RunnerConfig
from runner_api.constants import PLACEHOLDER_TOKEN_ID
from runner_api.errors import CapabilityError, PlanError, RunnerError
from runner_api.kv_cache import KVCacheConfig
from runner_api.live_request import LiveRequest, Scheduled
from runner_api.new_request_checks import (
    check_features,
    check_prompt,
    check_resumed_tokens,
    check_sampling_params,
)
from runner_api.plan import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput
from runner_api.plan_types import check_types

__all__ = ["LiveRequest", "PlanValidator"]


@dataclass(slots=True)
class PlanValidator:
    """Checks plans for one runner. `requests` is the picture after the last committed plan.

    layout: "slots" or "dense", of the runner's rows.
    """

    config: RunnerConfig
    kv_cache_config: KVCacheConfig
    vocab_size: int
    capabilities: frozenset[Capability]
    layout: str = "slots"
    requests: dict[str, LiveRequest] = field(default_factory=dict)
    _holders: BlockHolders = field(init=False)

    def __post_init__(self) -> None:
        self._holders = BlockHolders(self.config, self.kv_cache_config)

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
        for req_id in self._gone(plan):
            gone = self.requests.pop(req_id, None)
            if gone is not None:
                self._holders.remove(req_id, gone.block_ids)
        cached = plan.scheduled_cached_reqs
        for req_id in (plan.preempted_req_ids | cached.resumed_req_ids) & self.requests.keys():
            self._start_over(req_id)
        for new in plan.scheduled_new_reqs:
            computed, block_ids = int(new.num_computed_tokens), tuple(list(ids) for ids in new.block_ids)
            prompt = list(new.prompt_token_ids) if self.layout == "dense" else ()
            self.requests[new.req_id] = LiveRequest(
                new.prompt_len, len(new.prefill_token_ids), computed, computed, block_ids, _wants_logprobs(new), prompt
            )
            self._holders.add(new.req_id, block_ids, [0] * len(block_ids))
        for req_id, computed, ids in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            live = self.requests[req_id]
            live.computed_upper = int(computed)
            if req_id in cached.resumed_req_ids:
                live.prefill_len, live.computed_lower = len(cached.all_token_ids[req_id]), int(computed)
                live.preempted = False
            if ids is not None:
                self._holders.add(req_id, ids, [len(owned) for owned in live.block_ids])
                for owned, more in zip(live.block_ids, ids, strict=True):
                    owned.extend(more)
        for req_id, n in plan.num_scheduled_tokens.items():
            live = self.requests[req_id]
            live.computed_upper += int(n)
            live.computed_lower += int(n) - len(plan.scheduled_spec_decode_tokens.get(req_id, ()))
        if self.layout == "dense":
            self._infer_preemptions(plan)

    def _start_over(self, req_id: str) -> None:
        live = self.requests[req_id]
        self._holders.remove(req_id, live.block_ids)
        live.start_over()

    def _infer_preemptions(self, plan: SchedulerOutput) -> None:
        """Whoever is not scheduled and lost what it had computed has been preempted, even if no plan said so."""
        if len(plan.num_scheduled_tokens) == len(self.requests):
            return
        nothing = [()] * len(self.kv_cache_config.groups)
        scheduled = {}
        for req_id, n in plan.num_scheduled_tokens.items():
            live = self.requests[req_id]
            scheduled[req_id] = Scheduled(live.prefill_len, live.computed_upper - int(n), live.block_ids, nothing)
        for req_id in find_losers(plan, scheduled, self._holders, self.requests) - scheduled.keys():
            self._start_over(req_id)

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
        removed = self._gone(plan)
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
            check_blocks(self.kv_cache_config, self.config.max_model_len, req_id, n, request)
        self._check_logprobs(plan, scheduled)
        freed = removed | plan.preempted_req_ids | plan.scheduled_cached_reqs.resumed_req_ids
        # Dense: whoever is not scheduled may have been preempted, and its blocks be free.
        owners = self.requests.keys() if self.layout == "slots" else plan.num_scheduled_tokens.keys()
        check_writes(plan, scheduled, self._holders, self.requests, freed, owners)
        check_block_operations(self.kv_cache_config, plan)

    def _gone(self, plan: SchedulerOutput) -> frozenset[str]:
        """Who is forgotten by the plan. The dense layout keeps what it knows of preempted requests."""
        return plan.finished_req_ids | (plan.preempted_req_ids if self.layout == "slots" else frozenset())

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
                    expected="an id that is not live, or finished or preempted by the same plan"
                    if self.layout == "slots"
                    else "an id that is not live, or finished by the same plan",
                    hint=None if self.layout == "slots" else "A preempted request comes back in scheduled_cached_reqs",
                )
            check_prompt(new, self.config.max_model_len, self.vocab_size)
            check_features(new, self.capabilities)
            check_sampling_params(new, self.config, self.vocab_size)
            check_group_count(self.kv_cache_config, where, req_id, new.block_ids)
            nothing = [()] * len(new.block_ids)
            scheduled[req_id] = Scheduled(
                len(new.prefill_token_ids), int(new.num_computed_tokens), nothing, new.block_ids, _wants_logprobs(new)
            )
        # Fixed rows are held from start to end, packed ones while a request is scheduled.
        rows = len(self.requests) - len(self.requests.keys() & removed) + len(scheduled)
        if self.layout == "dense":
            rows, where = len(plan.num_scheduled_tokens), "num_scheduled_tokens"
        if rows > self.config.max_num_reqs:
            raise PlanError(
                "more requests than rows",
                code="MR-ERR-023",
                field=where,
                got=rows,
                expected=f"at most max_num_reqs = {self.config.max_num_reqs}",
                hint="Finish or preempt some, or raise max_num_reqs",
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
                    "too few scheduled tokens",
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
                "cannot propose so many drafts", code="MR-ERR-033", field="num_spec_tokens_to_schedule",
                got=plan.num_spec_tokens_to_schedule, expected=f"0 .. num_speculative_tokens = {most}",
            )  # fmt: skip

    def _check_cached(self, plan: SchedulerOutput, removed: frozenset[str], scheduled: dict[str, Scheduled]) -> None:
        cached, where = plan.scheduled_cached_reqs, "scheduled_cached_reqs"
        lengths = [len(cached.req_ids), len(cached.num_computed_tokens), len(cached.new_block_ids)]
        if cached.num_output_tokens:  # nothing here reads them; a list that is given must still fit
            lengths.append(len(cached.num_output_tokens))
        if len(set(lengths)) != 1:
            raise PlanError("parallel lists differ in length", code="MR-ERR-034", field=where, got=lengths)
        if self.layout == "slots":
            _check_none_resumed(cached)
        else:
            _check_resumed_ids(cached)
        nothing: BlockIds = tuple([] for _ in self.kv_cache_config.groups)
        for req_id, computed, ids in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            if not self._is_live(req_id, removed) or req_id in scheduled:
                raise PlanError(
                    "not a request that the runner holds", code="MR-ERR-029", field=where, req_id=req_id,
                    expected="a live id, once, not finished, preempted or added by this plan",
                )  # fmt: skip
            if ids is not None:
                check_group_count(self.kv_cache_config, where, req_id, ids)
            if req_id not in plan.num_scheduled_tokens:
                raise PlanError(
                    "cached request without scheduled tokens", code="MR-ERR-021", field=where, req_id=req_id
                )
            more = nothing if ids is None else ids
            if req_id in cached.resumed_req_ids:
                scheduled[req_id] = self._resumed(req_id, cached, int(computed), more)
            else:
                scheduled[req_id] = self._continued(plan, req_id, computed, more)

    def _resumed(self, req_id: str, cached: CachedRequestData, computed: int, blocks: BlockIds) -> Scheduled:
        """A request that starts again from its tokens, with blocks in place of those that it had."""
        live, known = self.requests[req_id], cached.all_token_ids[req_id]
        check_resumed_tokens(req_id, live, known, computed, self.config.max_model_len, self.vocab_size)
        return Scheduled(len(known), computed, [()] * len(blocks), blocks, live.wants_logprobs)

    def _continued(self, plan: SchedulerOutput, req_id: str, computed: int, more: BlockIds) -> Scheduled:
        """A request that goes on from where the runner has it."""
        live, where = self.requests[req_id], "scheduled_cached_reqs"
        if live.preempted or req_id in plan.preempted_req_ids:
            raise PlanError(
                "a preempted request cannot go on where it was", code="MR-ERR-035", field=where, req_id=req_id,
                got="not resumed", expected="its id in resumed_req_ids, its tokens in all_token_ids, all its blocks",
            )  # fmt: skip
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
        return Scheduled(live.prefill_len, int(computed), live.block_ids, more, live.wants_logprobs)

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

    def _check_logprobs(self, plan: SchedulerOutput, scheduled: dict[str, Scheduled]) -> None:
        """A step with drafts has several logits rows per request, for which no log probabilities are handed out."""
        if not any(plan.scheduled_spec_decode_tokens.values()):
            return
        for req_id in plan.num_scheduled_tokens:
            if scheduled[req_id].wants_logprobs:
                raise CapabilityError(
                    "log probabilities are not offered in a step with drafts",
                    field="scheduled_spec_decode_tokens",
                    req_id=req_id,
                    hint="Schedule requests that ask for log probabilities apart from requests with drafts",
                )


def _wants_logprobs(new: NewRequestData) -> bool:
    params = new.sampling_params
    return params is not None and (params.logprobs is not None or params.logprob_token_ids is not None)


def _check_none_resumed(cached: CachedRequestData) -> None:
    """Slots layout: a resumed request is new to the runner."""
    for where, what, given in (
        ("resumed_req_ids", "a resumed request arrives as new in the slots layout", cached.resumed_req_ids),
        ("all_token_ids", "tokens of a resumed request belong to the dense layout", cached.all_token_ids),
    ):
        if given:
            raise PlanError(
                what, code="MR-ERR-035", field=where, got=sorted(given), expected="none",
                hint="Send it in scheduled_new_reqs with all its tokens in prefill_token_ids",
            )  # fmt: skip


def _check_resumed_ids(cached: CachedRequestData) -> None:
    """Dense layout: resumed requests are among the cached ones, and they alone come with all their tokens."""
    for req_id in sorted(cached.resumed_req_ids - set(cached.req_ids)):
        raise PlanError(
            "a resumed request is not listed", code="MR-ERR-035", field="resumed_req_ids", req_id=req_id,
            expected="an id in scheduled_cached_reqs.req_ids",
        )  # fmt: skip
    for req_id in sorted(cached.resumed_req_ids ^ cached.all_token_ids.keys()):
        raise PlanError(
            "tokens without a resumed request, or the other way round", code="MR-ERR-035", field="all_token_ids",
            req_id=req_id, expected="all tokens of each request in resumed_req_ids, and of no other",
        )  # fmt: skip
