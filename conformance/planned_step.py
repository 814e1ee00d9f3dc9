"""What a world hands out: a plan, and the truth that a right runner must build from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from runner_api import NULL_BLOCK_ID, BatchDescriptor, ForcedStep, GrammarOutput, SamplingParams, SchedulerOutput


@dataclass(slots=True, eq=False)
class WorldRequest:
    """One request as the world knows it. `blocks[g]` is what the runner was given, evicted columns included."""

    req_id: str
    prompt_len: int
    tokens: list[int]  # every known token
    params: SamplingParams
    seed: int
    prefill_len: int = 0
    computed: int = 0
    blocks: tuple[list[int], ...] = ()
    evicted: list[int] = field(default_factory=list)  # per group: leading columns that were given back
    drafts: list[int] = field(default_factory=list)  # held in the runner's row
    resumed: bool = False
    started: bool = False  # scheduled since it was added
    shared_until: int = 0  # positions below it were computed by another request
    copied: range = range(0)  # positions that arrived by a block copy
    admitted_at: int = 0  # tokens computed when it was added last

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prefill_len


@dataclass(frozen=True, slots=True)
class RequestTruth:
    """What one scheduled request must look like in this step. Counts are those before the step."""

    request: WorldRequest
    num_scheduled: int
    computed: int
    prefill_len: int
    num_drafts: int
    input_ids: tuple[int, ...]
    drafts: tuple[int, ...]  # held when the inputs are built
    is_new: bool  # its first tokens since it was added
    resumed: bool

    @property
    def samples(self) -> bool:
        """Whether the step reaches the end of the known tokens."""
        return self.computed + self.num_scheduled >= self.prefill_len


@dataclass(frozen=True, slots=True)
class StepTruth:
    """The world's truth of one step: `order` is the batch order, `requests` is keyed by request id.

    removed: who finished or was preempted, whether or not the plan lists it.
    """

    order: tuple[str, ...]
    requests: Mapping[str, RequestTruth]
    removed: frozenset[str]


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One plan, its padded shape if it has one, the truth, an imposed outcome where drafts are verified, and masks."""

    plan: SchedulerOutput
    descriptor: BatchDescriptor | None
    truth: StepTruth
    forced: ForcedStep | None = None
    grammar: GrammarOutput | None = None  # masks for some of the requests that ask for a form

    def blocks_read(self) -> frozenset[int]:
        """Blocks whose earlier contents this plan relies on: those that requests bring along, and sources of copies.

        The world may have let go of their former owner by the time the plan is closed."""
        cached = self.plan.scheduled_cached_reqs
        brought = [new.block_ids for new in self.plan.scheduled_new_reqs if new.num_computed_tokens > 0]
        brought += [
            ids for req_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True)
            if ids is not None and req_id in cached.resumed_req_ids
        ]  # fmt: skip
        sources = {int(source) for source, _ in self.plan.kv_cache_block_copies}
        return frozenset(int(b) for groups in brought for ids in groups for b in ids if b != NULL_BLOCK_ID) | sources

    def drafts_held(self) -> dict[str, list[int]] | None:
        """The drafts that the imposed outcome leaves in each request's row; None without one."""
        if self.forced is None or self.forced.draft_token_ids is None:
            return None
        return dict(zip(self.truth.order, self.forced.draft_token_ids.tolist(), strict=True))


def order_key(num_scheduled: int, num_drafts: int, num_speculative_tokens: int) -> tuple[bool, bool, int]:
    """What a batch of the slots layout is sorted by; ties keep the plan's order. Who verifies drafts leads, then who
    has a decode's number of tokens, then the shorter."""
    return not num_drafts, num_scheduled != 1 + num_speculative_tokens, num_scheduled


def spoil(plan: SchedulerOutput) -> None:
    """What an engine may do that uses its lists again: other tokens, no blocks, no counts."""
    cached = plan.scheduled_cached_reqs
    for new in plan.scheduled_new_reqs:
        for tokens in (new.prompt_token_ids, new.prefill_token_ids):
            assert isinstance(tokens, list)
            tokens[:] = [0] * len(tokens)
    for blocks in (*(new.block_ids for new in plan.scheduled_new_reqs), *(b for b in cached.new_block_ids if b)):
        for ids in blocks:
            ids.clear()
    for values in (cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, cached.num_output_tokens):
        values.clear()
    plan.num_scheduled_tokens.clear()
