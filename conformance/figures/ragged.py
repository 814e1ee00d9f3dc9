"""The flat token axis of a record: whose token each place is, what it holds, whether it is asked for logits.

What several pictures need of one step. Everything comes from the record alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from conformance.report import fault_of
from runner_api import ConfigError, StepRecord
from runner_api.constants import PAD_SLOT_ID

# Blocks hold no more tokens than this in any engine that we know.
LARGEST_BLOCK = 2048


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """One place of the flat axis. req_id, token_id and position are None in the padding.

    slots: where its KV goes, one for each KV cache group. logits_row: the row of the logits that is taken here.
    starts: query_start_loc points here.
    """

    index: int
    req_id: str | None
    token_id: int | None
    position: int | None
    slots: tuple[int, ...]
    logits_rows: tuple[int, ...] = ()
    starts: bool = False

    @property
    def padding(self) -> bool:
        return self.req_id is None


@dataclass(frozen=True, slots=True)
class RequestPlace:
    """One place of the request axis. req_id is None in the padding.

    A single token is a "decode" unless the plan brings the request: whether it is the last of a prompt that came in
    chunks, one record cannot tell.

    kind: "decode", "drafts", "prefill" or "padding". row: its persistent row. start, end: its tokens on the flat axis.
    sampled: the tokens that it took. fault: why it got an error in their place, empty where it did not.
    """

    index: int
    req_id: str | None
    kind: str
    row: int | None
    start: int
    end: int
    seq_len: int
    sampled: tuple[int, ...] = ()
    fault: str = ""


def need_tokens(record: StepRecord) -> None:
    """Raise ConfigError for a step that scheduled no tokens: there is no batch to draw."""
    if record.num_reqs == 0:
        raise ConfigError(
            "the step schedules no tokens, so there is no batch to draw", field="record", got="num_reqs = 0",
            expected="at least one request", hint="Draw another step; `blocks` and `timeline` show this one too",
        )  # fmt: skip


def token_places(record: StepRecord) -> tuple[TokenPlace, ...]:
    """Every place of the flat axis, padding included, in order."""
    owners = np.searchsorted(record.query_start_loc[1 : record.num_reqs + 1], np.arange(record.num_tokens), "right")
    positions = record.positions if record.positions.ndim == 1 else record.positions[0]
    asked: dict[int, list[int]] = {}
    for row, index in enumerate(record.logits_indices.tolist()):
        asked.setdefault(index, []).append(row)
    starts = set(record.query_start_loc.tolist())
    places = []
    for i in range(max(record.num_tokens, record.num_tokens_padded, record.slot_mappings.shape[-1])):
        slots = tuple(int(group[i]) for group in record.slot_mappings if i < len(group))
        real = i < record.num_tokens and owners[i] < len(record.req_ids)
        places.append(
            TokenPlace(
                i,
                record.req_ids[owners[i]] if real else None,
                int(record.input_ids[i]) if real and i < len(record.input_ids) else None,
                int(positions[i]) if real and i < len(positions) else None,
                slots,
                tuple(asked.get(i, ())),
                i in starts,
            )
        )
    return tuple(places)


def request_places(record: StepRecord) -> tuple[RequestPlace, ...]:
    """Every place of the request axis, padding included, in batch order."""
    tokens, loc = record.tokens(), record.query_start_loc.tolist()
    places = []
    for i in range(max(record.num_reqs, record.num_reqs_padded)):
        start, end = (loc[i], loc[i + 1]) if i + 1 < len(loc) else (loc[-1], loc[-1])
        seq_len = int(record.seq_lens[i]) if i < len(record.seq_lens) else 0
        if i >= record.num_reqs:
            places.append(RequestPlace(i, None, "padding", None, start, end, seq_len))
            continue
        req_id = record.req_ids[i]
        row = int(record.idx_mapping[i]) if i < len(record.idx_mapping) else None
        places.append(
            RequestPlace(
                i, req_id, _kind(record, req_id, end - start), row, start, end, seq_len, tokens[req_id],
                fault_of(record, i),
            )
        )  # fmt: skip
    return tuple(places)


def _kind(record: StepRecord, req_id: str, count: int) -> str:
    drafts = len(record.plan.scheduled_spec_decode_tokens.get(req_id, ()))
    if drafts:
        return "drafts"
    plan = record.plan
    comes = req_id in plan.scheduled_cached_reqs.resumed_req_ids or any(
        new.req_id == req_id for new in plan.scheduled_new_reqs
    )
    return "decode" if count == 1 and not comes else "prefill"


def block_size(record: StepRecord, group: int = 0, *, among: tuple[int, ...] | None = None) -> int:
    """How many tokens a block of the group holds: the size that explains the most of the record's slots.

    A record does not say it; slot = block * size + position % size does. among: the sizes to consider. Raises
    ConfigError if no size explains half of the slots, as where the record holds no slot or no table.
    """
    positions = record.positions if record.positions.ndim == 1 else record.positions[0]
    slots = record.slot_mappings[group][: record.num_tokens] if group < len(record.slot_mappings) else np.zeros(0)
    tables = record.block_tables[group] if group < len(record.block_tables) else ()
    n = min(len(slots), len(positions))
    owners = np.searchsorted(record.query_start_loc[1 : record.num_reqs + 1], np.arange(n), "right")
    known = np.flatnonzero((slots[:n] != PAD_SLOT_ID) & (owners < len(tables)))
    longest = max((len(t) for t in tables), default=0)
    table = np.full((len(tables), longest + 1), -1, np.int64)
    for row, blocks in zip(table, tables, strict=True):
        row[: len(blocks)] = blocks
    best, explained = 0, 0
    for size in among or range(1, LARGEST_BLOCK + 1):
        column = np.minimum(positions[known] // size, longest)
        block = table[owners[known], column]
        count = int(((block >= 0) & (block * size + positions[known] % size == slots[known])).sum())
        if count > explained:
            best, explained = size, count
    if not explained or 2 * explained < len(known):
        raise ConfigError(
            "the size of a block cannot be told from the record", field="block_size",
            got=f"{explained} of {len(known)} slots explained by {best}" if best else "no slots that a size explains",
            hint="Give block_size (`modelrunner show`: --block-size N)",
        )  # fmt: skip
    return best
