"""A request trace as plans: the ordinary ones, which bring what changed, and ones that bring everything anew.

Requests arrive with all but their last token computed, so that each step schedules one token of each.
"""

from __future__ import annotations

from conformance.bench.request_trace import BLOCK_SIZE, RequestTrace, TraceRequest, TraceStep
from runner_api import CachedRequestData, NewRequestData, SamplingParams, SchedulerOutput

GREEDY = SamplingParams(temperature=0.0)


def max_blocks(trace: RequestTrace) -> int:
    """Most blocks of one request; lists run ahead of need, as in the original program."""
    return trace.max_model_len // BLOCK_SIZE


def num_blocks(trace: RequestTrace) -> int:
    """Blocks of a cache that can hold the trace; block 0 is the null block."""
    return 1 + max(trace.most_active, 1) * max_blocks(trace)


def row_length(request: TraceRequest, step: int) -> int:
    """Entries of the request's whole row at the beginning of a step."""
    return request.tokens_at(step) // BLOCK_SIZE + 1


class DiffPlans:
    """Plans of the trace's steps, to be made in order: arrivals whole, then a block at every boundary."""

    def __init__(self, trace: RequestTrace) -> None:
        self._free = list(range(num_blocks(trace) - 1, 0, -1))
        self._held: dict[str, list[int]] = {}

    def plan(self, step: TraceStep) -> SchedulerOutput:
        for req_id in step.left:
            self._free += self._held.pop(req_id)
        new, cached = [], CachedRequestData()
        for request in step.active:
            at_boundary = request.tokens_at(step.number) % BLOCK_SIZE == 0
            if request.arrival == step.number:
                blocks = self._take(row_length(request, step.number) + at_boundary)
                self._held[request.req_id] = list(blocks)
                new.append(_announced(request, step.number, blocks))
                continue
            more = self._take(1) if at_boundary else None
            self._held[request.req_id] += more or ()
            cached.req_ids.append(request.req_id)
            cached.num_computed_tokens.append(request.tokens_at(step.number) - 1)
            cached.new_block_ids.append(None if more is None else (more,))
        return _plan(step, new, cached, frozenset(step.left))

    def _take(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]


class RebuildPlans:
    """Plans in which everybody leaves and comes back, so that every row is written whole. Steps may be left out."""

    def __init__(self, trace: RequestTrace) -> None:
        width = max_blocks(trace)
        self._blocks = [list(range(1 + i * width, 1 + (i + 1) * width)) for i in range(max(trace.most_active, 1))]
        self._present: frozenset[str] = frozenset()

    def rows(self, step: TraceStep) -> list[list[int]]:
        """The block list of every active request."""
        return [self._blocks[i][: row_length(r, step.number)] for i, r in enumerate(step.active)]

    def plan(self, step: TraceStep) -> SchedulerOutput:
        new = [_announced(r, step.number, row) for r, row in zip(step.active, self.rows(step), strict=True)]
        leaving, self._present = self._present, frozenset(r.req_id for r in step.active)
        return _plan(step, new, CachedRequestData(), leaving)


def _announced(request: TraceRequest, step: int, blocks: list[int]) -> NewRequestData:
    tokens = [0] * request.tokens_at(step)
    return NewRequestData(request.req_id, tokens, tokens, len(tokens) - 1, (blocks,), GREEDY)


def _plan(
    step: TraceStep, new: list[NewRequestData], cached: CachedRequestData, finished: frozenset[str]
) -> SchedulerOutput:
    scheduled = dict.fromkeys((r.req_id for r in step.active), 1)
    return SchedulerOutput(new, cached, scheduled, len(scheduled), finished_req_ids=finished)
