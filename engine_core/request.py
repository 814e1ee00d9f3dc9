"""The life of one request inside the engine: its tokens, its progress, and when it stops.

A request has no prefill or decode phase. Each step moves `num_computed_tokens` towards the number of known tokens;
once every known token is computed, the step draws a new one. Knows nothing of blocks, rows or batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from engine_core.structured_output import GrammarError, Matcher
from runner_api import EngineError, SamplingParams


class RequestStatus(Enum):
    """Where a request is. The `FINISHED_*` states are final."""

    WAITING = "waiting"  # never scheduled
    RUNNING = "running"  # owns blocks, and a row in the runner
    PREEMPTED = "preempted"  # gave its blocks back; starts over with its outputs as part of the prompt
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"  # nothing could be drawn for it; `Request.error` says why

    @property
    def is_finished(self) -> bool:
        return self in _FINISHED

    @property
    def finish_reason(self) -> str | None:
        """What the user is told: "stop", "length", "abort", "error", or None while the request lives."""
        return self.value if self.is_finished else None


_FINISHED = frozenset(status for status in RequestStatus if status.name.startswith("FINISHED_"))


@dataclass(slots=True, eq=False)
class Request:
    """One request. The scheduler owns and advances every field after the first block.

    num_computed_tokens: advanced when a step is scheduled, not when its result arrives; drafts that turn out
        rejected are taken back by `Scheduler.update_from_output`.
    num_in_flight_tokens: scheduled, result not yet seen.
    num_output_placeholders: tokens that steps in flight will sample and the next plan already counts on. Always 0
        with synchronous scheduling, where a step's result is known before the next plan is made.
    num_stale_tokens: those of num_in_flight_tokens that were scheduled before a preemption.
    spec_token_ids: drafts to verify in the next step.
    is_prefill_chunk: the latest scheduled step leaves known tokens uncomputed, so it must not yield a token.
    block_hashes: one per full block of known tokens (filled by the KV cache manager if prefixes are cached).
    matcher: where the outputs stand in the grammar that they must follow; None without one.
    """

    req_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    # Whatever else decides the KV of a token: two requests share cached blocks only if these are equal.
    extra_keys: tuple[str, ...] = ()
    matcher: Matcher | None = None

    status: RequestStatus = RequestStatus.WAITING
    stop_reason: int | str | None = None
    error: str | None = None
    all_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_output_placeholders: int = 0
    num_stale_tokens: int = 0
    spec_token_ids: list[int] = field(default_factory=list)
    is_prefill_chunk: bool = False
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_tokens: int = 0  # of the prefix hit at the latest admission
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.prompt_token_ids = tuple(self.prompt_token_ids)
        self.all_token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and outputs."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[len(self.prompt_token_ids) :]

    @property
    def reads_prefix_cache(self) -> bool:
        """May it skip tokens that are computed already? Not before log probabilities of its prompt are handed out,
        which is with the first output: they need every prompt token."""
        return self.sampling_params.prompt_logprobs is None or self.num_output_tokens > 0

    def max_num_tokens(self, max_model_len: int) -> int:
        """The most tokens this request can ever have, the last one (which needs no KV) included."""
        limit = self.sampling_params.max_tokens
        return max_model_len if limit is None else min(self.num_prompt_tokens + limit, max_model_len)

    def append(self, tokens: list[int], max_model_len: int) -> tuple[list[int], RequestStatus | None]:
        """Append sampled tokens one by one until one of them stops the request.

        Returns the tokens that were kept, and the final status if the last of them ends the request. Raises EngineError
        for a token that the request's grammar does not allow: the runner has not kept to the mask.
        """
        for i, token in enumerate(tokens):
            self.all_token_ids.append(token)
            try:
                self._advance_grammar(token)
                status = self._stop_status(token, max_model_len)
            except GrammarError as e:
                self.error, status = str(e), RequestStatus.FINISHED_ERROR
            if status is not None:
                return tokens[: i + 1], status
        return tokens, None

    def _advance_grammar(self, token: int) -> None:
        if self.matcher is not None and not self.matcher.accept(token):
            raise EngineError(
                "the runner drew a token that the request's grammar does not allow", field="sampled_token_ids",
                req_id=self.req_id, got=token, expected="a token whose bit is set in the grammar's mask",
            )  # fmt: skip

    def _stop_status(self, token: int, max_model_len: int) -> RequestStatus | None:
        """Order: end of sequence, then stop token ids, then the grammar's end, then length; the first that holds gives
        the reason. A grammar ends its request when nothing may follow, without waiting for an end-of-sequence token.

        Neither min_tokens nor stop strings are looked at here: the runner masks the former on the logits, and the
        latter need text.
        """
        params = self.sampling_params
        if token in self.eos_token_ids and not params.ignore_eos:
            return RequestStatus.FINISHED_STOPPED
        if token in params.stop_token_ids:
            self.stop_reason = token
            return RequestStatus.FINISHED_STOPPED
        if self.matcher is not None and self.matcher.is_terminated():
            return RequestStatus.FINISHED_STOPPED
        if self.num_tokens >= self.max_num_tokens(max_model_len):
            return RequestStatus.FINISHED_LENGTH
        return None

    def is_stop_token(self, token: int) -> bool:
        """Does this token end a request rather than belong to its text?"""
        return token in self.eos_token_ids or token in self.sampling_params.stop_token_ids
