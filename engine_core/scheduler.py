"""Which requests run in the next step, and for how many tokens each: requests in, `SchedulerOutput` plans out.

One token budget per step. Running requests first, in order of admission, then waiting ones; a prompt that does not
fit is computed in chunks. If blocks run out, the request admitted last gives all of its blocks back and later starts
over with its outputs as part of its prompt. Knows blocks only through the KV cache manager, and the runner not at
all. Deterministic: the same calls give the same plans. Source: vLLM 0.33 `Scheduler`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine_core.kv_cache_manager import KVCacheManager
from engine_core.logprobs import prompt_logprobs, token_logprobs
from engine_core.plan_builder import EngineCoreOutput, PlanBuilder, SchedulerConfig
from engine_core.request import Request, RequestStatus
from engine_core.structured_output import Constrained, usable_drafts
from runner_api import CallOrderError, EngineError, ModelRunnerOutput, SampleFault, SchedulerOutput

# What a user is told of a request whose logits had no winner.
FAULTS = {
    SampleFault.NAN: "the logits hold a NaN: the model's weights or a logits processor are broken",
    SampleFault.NO_TOKEN: "no token is left to draw: what the request allows and what it forbids exclude each other",
}


@dataclass(frozen=True, slots=True)
class _Scheduled:
    """One request's share of a plan, as it was when the plan was made."""

    request: Request
    num_tokens: int
    num_drafts: int
    samples: bool  # False: an unfinished prefill, which yields no token


class Scheduler:
    """Owns every live request. Each plan that `schedule` makes is answered once, in order, by `update_from_output`;
    only with `async_scheduling` may a second plan be made before the first is answered. `add_request` and `abort`
    may come between any two calls."""

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        # Finished since the last plan, in order. The next plan reports them, even if it schedules nothing.
        self._finished: dict[str, None] = {}
        # Plans whose result has not been seen. Requests are held as objects: an id may be used again by then.
        self._in_flight: deque[tuple[SchedulerOutput, list[_Scheduled]]] = deque()

    # -- requests in and out ----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises EngineError if its id is live, or if it could never be finished."""
        if request.req_id in self.requests:
            raise EngineError("request id is live", field="req_id", req_id=request.req_id, hint="Abort it first")
        self._check_fits(request)
        self.requests[request.req_id] = request
        self.waiting.append(request)

    def _check_fits(self, request: Request) -> None:
        """A request that needs more than everything would preempt itself for ever; refuse it here."""
        longest = self.config.max_model_len - 1
        if not 1 <= request.num_prompt_tokens <= longest:
            raise EngineError(
                "not a possible prompt length",
                field="prompt_token_ids",
                req_id=request.req_id,
                got=request.num_prompt_tokens,
                expected=f"1 .. {longest} tokens (max_model_len less the first sampled token)",
            )
        lookahead = self.config.num_speculative_tokens
        # The last token is never fed back, so it needs no KV.
        most = request.max_num_tokens(self.config.max_model_len) - 1 + lookahead
        needed = self.kv_cache_manager.max_blocks_needed(most, self.config.max_num_batched_tokens + lookahead)
        usable = self.kv_cache_manager.pool.num_blocks - 1
        if needed > usable:
            raise EngineError(
                "the KV cache can never hold this request",
                field="prompt_token_ids",
                req_id=request.req_id,
                got=f"{request.num_prompt_tokens} prompt tokens and max_tokens={request.sampling_params.max_tokens}, "
                f"up to {needed} blocks",
                expected=f"at most {usable} blocks",
                hint="Lower max_tokens, or raise num_blocks",
            )

    def abort(self, req_id: str) -> EngineCoreOutput | None:
        """Finish a request now. None if the id is not live (it may have finished by itself).

        A step in flight may still return tokens for it; they are ignored.
        """
        request = self.requests.get(req_id)
        if request is None:
            return None
        self._finish(request, RequestStatus.FINISHED_ABORTED)
        return EngineCoreOutput(req_id, (), request.status.finish_reason)

    def fail(self, req_id: str, why: str) -> EngineCoreOutput:
        """End a live request with an error. As with `abort`, steps in flight may still return tokens for it."""
        request = self.requests[req_id]
        request.error = why
        self._finish(request, RequestStatus.FINISHED_ERROR)
        return EngineCoreOutput(req_id, (), request.status.finish_reason, error=why)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        (self.running if request.status is RequestStatus.RUNNING else self.waiting).remove(request)
        request.status = status
        self.kv_cache_manager.free(request)
        del self.requests[request.req_id]
        self._finished[request.req_id] = None

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    @property
    def has_requests(self) -> bool:
        """Is there a plan to make: live requests, or finished ids that the runner has not been told yet?"""
        return bool(self.requests or self._finished)

    # -- the plan ---------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Make the plan of the next step and advance the requests by it.

        Raises CallOrderError if the plan before is unanswered and scheduling is synchronous; EngineError if live
        requests exist and none can ever take a step (that would be a fault in here).
        """
        if self._in_flight and not self.config.async_scheduling:
            raise CallOrderError("the last plan is unanswered", field="schedule", expected="update_from_output first")
        plan = PlanBuilder(self.config.layout)
        budget = self._schedule_running(plan, self.config.max_num_batched_tokens)
        if not plan.preempted:  # blocks just ran out; admitting would take them from those who run
            self._schedule_waiting(plan, budget)
        if self.requests and not plan.num_scheduled and not plan.preempted and not self._in_flight:
            raise EngineError(
                "no request can take a step", field="schedule",
                got=f"{len(self.running)} running, {len(self.waiting)} waiting, "
                f"{self.kv_cache_manager.pool.num_free} free blocks",
            )  # fmt: skip
        # A new dict, not a cleared one: whoever still holds the plan keeps its ids.
        finished, self._finished = frozenset(self._finished), {}
        built = plan.build(finished)
        self._in_flight.append((built, [self._advance(r, n, plan) for r, n in plan.num_scheduled.items()]))
        return built

    def _advance(self, req_id: str, n: int, plan: PlanBuilder) -> _Scheduled:
        """Count a request's scheduled tokens as computed, before the result is known."""
        request, num_drafts = self.requests[req_id], len(plan.spec.get(req_id, ()))
        request.num_computed_tokens += n
        request.num_in_flight_tokens += n
        request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
        request.spec_token_ids = []
        if self.config.async_scheduling and not request.is_prefill_chunk:
            request.num_output_placeholders += 1
        return _Scheduled(request, n, num_drafts, not request.is_prefill_chunk)

    def _num_new_tokens(self, request: Request, num_computed: int, budget: int) -> int:
        """Tokens to schedule: what is known and not computed, with drafts, cut to every limit.

        The limit M - 1 keeps a place below max_model_len for the token that the step samples. A request whose
        tokens in flight reach its length limit gets none: it has finished, only the news is under way.
        """
        known = request.num_tokens + request.num_output_placeholders
        if known >= request.max_num_tokens(self.config.max_model_len):
            return 0
        known += len(request.spec_token_ids)
        n = min(known - num_computed, budget, self.config.max_model_len - 1 - num_computed)
        cap = self.config.long_prefill_token_threshold
        return min(n, max(cap, 1 + len(request.spec_token_ids))) if cap else n

    def _schedule_running(self, plan: PlanBuilder, budget: int) -> int:
        i = 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            n = self._num_new_tokens(request, request.num_computed_tokens, budget)
            if n <= 0:  # everything known of it is in flight: skip it, those behind it may still run
                i += 1
                continue
            new_blocks = self._allocate_or_preempt(request, n, plan)
            if new_blocks is None:
                break
            plan.add_cached(request, new_blocks)
            plan.num_scheduled[request.req_id] = n
            num_drafts = request.num_computed_tokens + n - request.num_tokens - request.num_output_placeholders
            if num_drafts > 0:
                plan.spec[request.req_id] = request.spec_token_ids[:num_drafts]
            budget -= n
            i += 1
        return budget

    def _allocate_or_preempt(self, request: Request, n: int, plan: PlanBuilder) -> tuple[list[int], ...] | None:
        """Blocks for n tokens of a running request, taken from the request admitted last if need be.

        None: the request itself was the last and is preempted now. Victims stand behind `request` in the running
        order, so none of them is in the plan yet.
        """
        while True:
            blocks = self.kv_cache_manager.allocate_slots(
                request, n, num_lookahead_tokens=self.config.num_speculative_tokens
            )
            if blocks is not None:
                return blocks
            victim = self.running.pop()
            self._preempt(victim)
            plan.preempted.add(victim.req_id)
            if victim is request:
                return None

    def _preempt(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_output_placeholders = 0
        # Tokens of steps in flight are still good (they depend on history alone), but count for no placeholder.
        request.num_stale_tokens = request.num_in_flight_tokens
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _schedule_waiting(self, plan: PlanBuilder, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_reqs:
            request = self.waiting[0]
            if request.num_stale_tokens:
                break  # its last token is still in flight, and its prefill must include it
            hit, num_hit = self.kv_cache_manager.get_computed_blocks(request)
            n = self._num_new_tokens(request, num_hit, budget)
            # A hit leaves at least one known token, and a live request has fewer than max_model_len tokens: n >= 1.
            blocks = self.kv_cache_manager.allocate_slots(request, n, hit, self.config.num_speculative_tokens)
            if blocks is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            request.num_computed_tokens = request.num_cached_tokens = num_hit
            plan.add_admitted(request, self.kv_cache_manager.get_block_ids(request.req_id))
            request.status = RequestStatus.RUNNING
            plan.num_scheduled[request.req_id] = n
            budget -= n

    # -- grammars ---------------------------------------------------------------------------------------------

    def waits_for_tokens(self, plan: SchedulerOutput) -> bool:
        """Is there a request in the latest plan whose next mask depends on a token that is still in flight?"""
        return any(share.request.num_output_placeholders > 1 for share in self._constrained_shares(plan))

    def constrained(self, plan: SchedulerOutput) -> list[Constrained]:
        """The requests of the latest plan that sample under a grammar, in plan order; those that ended since are left
        out, and so are unfinished prefills."""
        drafts = plan.scheduled_spec_decode_tokens
        return [
            Constrained(share.request.req_id, share.request.matcher, drafts.get(share.request.req_id, ()))
            for share in self._constrained_shares(plan)
            if share.request.matcher is not None
        ]

    def _constrained_shares(self, plan: SchedulerOutput) -> list[_Scheduled]:
        latest, shares = self._in_flight[-1]
        assert latest is plan
        return [s for s in shares if s.samples and s.request.matcher is not None and not s.request.status.is_finished]

    # -- the result -------------------------------------------------------------------------------------------

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Apply the result of the oldest unanswered plan; one output per request that got a token or an error, in plan
        order.

        Raises CallOrderError for any other plan; EngineError if the result does not answer the plan: a request is
        missing, a prefill chunk sampled, a finished prefill or decode did not, or more tokens came than drafts allow.
        """
        if not self._in_flight or self._in_flight[0][0] is not plan:
            raise CallOrderError("not the oldest unanswered plan", field="update_from_output")
        scheduled = self._in_flight.popleft()[1]
        sampled = output.tokens()
        outputs = []
        for share in scheduled:
            request = share.request
            if request.status.is_finished:
                continue  # aborted, or stopped by the step before, while this one ran
            fault = output.errors.get(request.req_id) if share.samples else None
            if fault:
                outputs.append(self.fail(request.req_id, FAULTS.get(fault, f"the runner reports fault {fault!r}")))
                continue
            tokens = _checked_tokens(share, sampled)
            first = request.num_output_tokens == 0
            kept = self._apply(share, tokens)
            if kept:
                outputs.append(
                    EngineCoreOutput(
                        request.req_id, tuple(kept), request.status.finish_reason, request.stop_reason,
                        logprobs=token_logprobs(request, output),
                        prompt_logprobs=prompt_logprobs(request, output) if first else None,
                        ends_with_stop=request.status.is_finished and request.is_stop_token(kept[-1]),
                        error=request.error,
                    )
                )  # fmt: skip
        return outputs

    def _apply(self, share: _Scheduled, tokens: list[int]) -> list[int]:
        """Advance one request by its result; returns the tokens that were kept."""
        request = share.request
        request.num_in_flight_tokens -= share.num_tokens
        stale = request.num_stale_tokens > 0
        if stale:  # preempted while the step ran: it owns no block and its counters were set back
            request.num_stale_tokens -= share.num_tokens
        else:
            request.num_computed_tokens -= share.num_drafts - (len(tokens) - 1) if share.num_drafts else 0
            if self.config.async_scheduling:
                request.num_output_placeholders -= len(tokens)
        kept, status = request.append(tokens, self.config.max_model_len)
        if not stale:
            self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens - request.num_in_flight_tokens)
        if status is not None:
            self._finish(request, status)
        return kept

    def update_draft_token_ids(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Take what a drafter proposes for the next step. Ignored for ids that are not about to decode."""
        for req_id, tokens in drafts.items():
            request = self.requests.get(req_id)
            if request is None or request.status is not RequestStatus.RUNNING or request.is_prefill_chunk:
                continue
            if len(tokens) > self.config.num_speculative_tokens:
                raise EngineError(
                    "too many drafts",
                    field="draft_token_ids",
                    req_id=req_id,
                    got=len(tokens),
                    expected=f"at most num_speculative_tokens = {self.config.num_speculative_tokens}",
                )
            # A draft against the grammar becomes a placeholder: the step keeps its shape, and accepts none from there.
            request.spec_token_ids = list(tokens) if request.matcher is None else usable_drafts(request.matcher, tokens)


def _checked_tokens(share: _Scheduled, sampled: Mapping[str, Sequence[int]]) -> list[int]:
    """The tokens that a step returned for a request, if they can answer what was planned."""
    tokens = sampled.get(share.request.req_id)
    low, high = (1, 1 + share.num_drafts) if share.samples else (0, 0)
    if tokens is None or not low <= len(tokens) <= high:
        raise EngineError(
            "the runner's output does not answer the plan",
            field="sampled_token_ids",
            req_id=share.request.req_id,
            got="nothing" if tokens is None else f"{len(tokens)} tokens",
            expected=f"{low} tokens" if low == high else f"{low} .. {high} tokens",
            hint="A prefill chunk samples nothing; any other row samples one token, plus the drafts it accepted",
        )
    return list(tokens)
