"""Shapes that a step can have and that random worlds meet seldom: what a corpus keeps one smallest case of."""

from __future__ import annotations

from collections import Counter

from conformance.driver import WorldSize
from conformance.planned_step import PlannedStep, RequestTruth

# Told by the counts of a world.
ACTIONS = (
    "prefix_hit", "block_copy", "add_without_tokens", "resume", "resume_same_plan", "preempt_untold", "abort_running",
    "abort_waiting", "abort_unknown", "exhausted", "empty_step", "condense_move", "swap", "return",
    "verify",
)  # fmt: skip
# Told by the steps.
STEPS = (
    "full_rows", "full_budget", "block_edge", "all_kinds", "pad_both", "pad_tokens_only", "rejected", "masked",
    "behind_window",
)  # fmt: skip
SHAPES = ACTIONS + STEPS


def shapes_of(step: PlannedStep, size: WorldSize) -> Counter[str]:
    """Which of STEPS this step has."""
    truths, d = list(step.truth.requests.values()), step.descriptor
    sizes = [g.block_size for g in size.model.groups]
    total = step.plan.total_num_scheduled_tokens
    found = {
        "full_rows": 1 < len(truths) == size.config.max_num_reqs,
        "full_budget": total == size.config.max_num_batched_tokens,
        "block_edge": any(t.samples and _end(t) % s == 0 for t in truths for s in sizes if s > 1),
        "all_kinds": {_kind(t) for t in truths} == {"decode", "chunk", "last chunk"},
        "pad_both": d is not None and d.num_reqs is not None and d.num_reqs > len(truths) and d.num_tokens > total,
        "pad_tokens_only": d is not None and d.num_reqs is None and d.num_tokens > total,
        "rejected": step.forced is not None and any(
            t.num_drafts and n <= t.num_drafts
            for t, n in zip((step.truth.requests[r] for r in step.truth.order), step.forced.num_sampled, strict=True)
        ),
        "masked": step.grammar is not None,
        "behind_window": any(any(t.request.evicted) for t in truths),
    }  # fmt: skip
    return Counter(name for name, there in found.items() if there)


def _end(t: RequestTruth) -> int:
    return t.computed + t.num_scheduled


def _kind(t: RequestTruth) -> str:
    if t.computed >= t.prefill_len:
        return "decode"
    return "last chunk" if t.samples else "chunk"
