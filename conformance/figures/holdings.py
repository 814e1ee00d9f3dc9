"""Which request holds which row and which blocks, step by step: plans followed, records believed where they speak.

A record tells of the requests that it schedules. Of the others the plans say when they came, what blocks they were
given, and when they left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from runner_api import ConfigError, StepRecord
from runner_api.constants import NULL_BLOCK_ID

Blocks = tuple[tuple[int, ...], ...]  # one tuple for each KV cache group


@dataclass(slots=True)
class Holding:
    """One live request. seq_len: tokens with KV after the last step that scheduled it. row: None if not known."""

    blocks: Blocks
    seq_len: int = 0
    row: int | None = None


@dataclass(slots=True)
class Holdings:
    """All live requests after a step, in the order in which they came. waiting: preempted, and not yet back."""

    live: dict[str, Holding] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)

    def blocks_held(self) -> set[int]:
        """Every block in a table of a live request, the null block left out."""
        held = {b for h in self.live.values() for group in h.blocks for b in group}
        return held - {NULL_BLOCK_ID}

    def take(self, record: StepRecord) -> None:
        """Follow one step."""
        plan = record.plan
        for req_id in plan.finished_req_ids | plan.preempted_req_ids:
            self.live.pop(req_id, None)
        self.waiting -= plan.finished_req_ids
        self.waiting |= plan.preempted_req_ids
        for new in plan.scheduled_new_reqs:
            self.live[new.req_id] = Holding(_blocks(new.block_ids), new.num_computed_tokens)
            self.waiting.discard(new.req_id)
        cached = plan.scheduled_cached_reqs
        for req_id, given in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self._extend(req_id, given, req_id in cached.resumed_req_ids)
        self._believe(record)

    def _extend(self, req_id: str, given: Sequence[Sequence[int]] | None, resumed: bool) -> None:
        self.waiting.discard(req_id)
        holding = self.live.setdefault(req_id, Holding(()))
        if resumed:
            holding.blocks = ()
        if given is not None:
            before = holding.blocks or ((),) * len(given)
            holding.blocks = tuple((*old, *new) for old, new in zip(before, _blocks(given), strict=True))

    def _believe(self, record: StepRecord) -> None:
        """What the record says of the requests it schedules comes before what the plans say."""
        for i, req_id in enumerate(record.req_ids):
            holding = self.live.setdefault(req_id, Holding(()))
            tables = [_blocks([group[i]])[0] for group in record.block_tables if i < len(group)]
            if tables:
                # A recording may show no more blocks than the sequence fills; the plans know of those ahead.
                told = holding.blocks or ((),) * len(tables)
                holding.blocks = tuple(t + old[len(t) :] for t, old in zip(tables, told, strict=False))
            if i < len(record.seq_lens):
                holding.seq_len = int(record.seq_lens[i])
            if record.idx_mapping is not None and i < len(record.idx_mapping):
                row = int(record.idx_mapping[i])
                for other in self.live.values():
                    if other.row == row:
                        other.row = None
                holding.row = row


def _blocks(given: Iterable[Iterable[int]]) -> Blocks:
    return tuple(tuple(int(b) for b in group) for group in given)


def follow(records: StepRecord | Sequence[StepRecord]) -> tuple[StepRecord, Holdings]:
    """The last record, and what is held after it. Raises ConfigError if there is none."""
    steps = [records] if isinstance(records, StepRecord) else list(records)
    if not steps:
        raise ConfigError("no record to draw", field="records", got=0, expected="at least one")
    holdings = Holdings()
    for record in steps:
        holdings.take(record)
    return steps[-1], holdings
