"""What goes into a scheduler and comes out of it: its limits, its plans, and what a step meant for a request.

`PlanBuilder` alone knows how the two row layouts want a resumed request to be sent; the scheduler does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.request import Request, RequestStatus
from runner_api import CachedRequestData, ConfigError, NewRequestData, SchedulerOutput
from runner_api.checks import check_bool, check_integer, check_name
from runner_api.config import LAYOUTS


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and the shape of plans.

    layout: "slots" sends a resumed request as new, with every known token in `prefill_token_ids`; "dense" sends it
        as cached, listed in `resumed_req_ids`, with its blocks replaced and its tokens in `all_token_ids`.
    long_prefill_token_threshold: the most prompt tokens of one request in one step; 0 = no limit but the budget.
    num_speculative_tokens: the most drafts per request and step; also the lookahead that a drafter writes.
    async_scheduling: plan a step while the tokens of the one before are still unknown; a placeholder stands for
        each. Not together with drafts, whose number of accepted tokens the next plan depends on.
    """

    max_num_reqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 1024
    layout: str = "slots"
    long_prefill_token_threshold: int = 0
    num_speculative_tokens: int = 0
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        for name, low in (
            ("max_num_reqs", 1), ("max_num_batched_tokens", 1), ("max_model_len", 2),
            ("long_prefill_token_threshold", 0), ("num_speculative_tokens", 0),
        ):  # fmt: skip
            object.__setattr__(self, name, check_integer(name, getattr(self, name), low))
        check_name("layout", self.layout, LAYOUTS)
        check_bool("async_scheduling", self.async_scheduling)
        if self.async_scheduling and self.num_speculative_tokens:
            raise ConfigError(
                "asynchronous scheduling cannot plan around drafts",
                field="async_scheduling",
                got=f"num_speculative_tokens={self.num_speculative_tokens}",
                expected="0",
            )


@dataclass(frozen=True, slots=True)
class EngineCoreOutput:
    """What one step meant for one request.

    logprobs: of the new token and the likeliest ones, by token id. prompt_logprobs: the same of each prompt token (None
    for the first), with the first new token. ends_with_stop: the last token is an end of sequence or a stop token, no
    text. error: why a request with finish_reason "error" got no token.
    """

    req_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: dict[int, float] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    ends_with_stop: bool = False
    error: str | None = None


class PlanBuilder:
    """Collects one plan. Every list it holds is its own, so later scheduling does not reach a plan handed out."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.new: list[NewRequestData] = []
        self.cached = CachedRequestData()
        self.resumed: set[str] = set()
        self.all_token_ids: dict[str, list[int]] = {}
        self.num_scheduled: dict[str, int] = {}
        self.spec: dict[str, list[int]] = {}
        self.preempted: set[str] = set()

    def add_admitted(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """A request that enters the runner: all of its blocks, and all of its tokens."""
        if self.layout == "dense" and request.status is RequestStatus.PREEMPTED:
            self.resumed.add(request.req_id)
            self.all_token_ids[request.req_id] = list(request.all_token_ids)
            self.add_cached(request, block_ids)
            return
        self.new.append(
            NewRequestData(
                req_id=request.req_id,
                prompt_token_ids=list(request.prompt_token_ids),
                prefill_token_ids=list(request.all_token_ids),
                num_computed_tokens=request.num_computed_tokens,
                block_ids=block_ids,
                sampling_params=request.sampling_params,
                seed=request.seed,
                eos_token_ids=tuple(sorted(request.eos_token_ids)),
            )
        )

    def add_cached(self, request: Request, new_block_ids: tuple[list[int], ...]) -> None:
        self.cached.req_ids.append(request.req_id)
        self.cached.num_computed_tokens.append(request.num_computed_tokens)
        self.cached.new_block_ids.append(new_block_ids if any(new_block_ids) else None)
        self.cached.num_output_tokens.append(request.num_output_tokens + request.num_output_placeholders)

    def build(self, finished: frozenset[str]) -> SchedulerOutput:
        self.cached.resumed_req_ids = frozenset(self.resumed)
        self.cached.all_token_ids = self.all_token_ids
        return SchedulerOutput(
            scheduled_new_reqs=self.new,
            scheduled_cached_reqs=self.cached,
            num_scheduled_tokens=self.num_scheduled,
            total_num_scheduled_tokens=sum(self.num_scheduled.values()),
            scheduled_spec_decode_tokens=self.spec,
            finished_req_ids=finished,
            preempted_req_ids=frozenset(self.preempted),
        )
