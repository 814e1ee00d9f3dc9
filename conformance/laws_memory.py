"""Laws about block tables, slots and padding. See `conformance.laws`."""

from __future__ import annotations

import numpy as np

from conformance.context import MOST_MISMATCHES, Mismatch, StepContext
from conformance.laws import Found, law
from runner_api import NULL_BLOCK_ID, PAD_SLOT_ID

# -- KV and SLOT ----------------------------------------------------------------------------------------------


@law("MR-KV-003")
def rows_are_as_long_as_their_blocks(c: StepContext) -> Found:
    found = []
    for g, table in enumerate(c.record.block_tables):
        for i, ids in enumerate(c.blocks[g]):
            if len(table[i]) != len(ids):
                found.append(
                    Mismatch("MR-KV-003", "block_tables", c.record.req_ids[i], (g, i), len(table[i]), len(ids))
                )
    return found[:MOST_MISMATCHES]


@law("MR-KV-001")
def rows_hold_their_blocks(c: StepContext) -> Found:
    return _tables(c, "MR-KV-001", slice(0, 1), hidden=False)


@law("MR-KV-004")
def further_groups_hold_their_blocks(c: StepContext) -> Found:
    return _tables(c, "MR-KV-004", slice(1, None), hidden=False) if c.num_groups > 1 else None


@law("MR-KV-002")
def blocks_behind_the_window_are_null(c: StepContext) -> Found:
    """Both ways: what lies behind is null, and what is null lies behind."""
    return _tables(c, "MR-KV-002", slice(0, None), hidden=True) if any(c.reach) else None


def _tables(c: StepContext, clause_id: str, groups: slice, *, hidden: bool) -> Found:
    """Gathered rows against the truth: columns behind the window (and wrong nulls), or all the others."""
    found: list[Mismatch] = []
    for g in range(c.num_groups)[groups]:
        size, reach = c.kv_cache_config.groups[g].spec.block_size, c.reach[g]
        for i, ids in enumerate(c.blocks[g]):
            row = c.record.block_tables[g][i][: len(ids)]
            behind = min(max(int(c.computed[i]) - reach, 0) // size, len(row)) if reach else 0
            # the common case in one comparison
            if np.array_equal(row[behind:], ids[behind : len(row)]) and not row[:behind].any():
                continue
            wanted = ids[: len(row)].copy()
            wanted[:behind] = NULL_BLOCK_ID
            column = np.arange(len(row))
            # A null in front of the window's edge is the window's fault; any other wrong id is the table's.
            windowed = (column < behind) | ((row == NULL_BLOCK_ID) & (reach > 0))
            for j in np.flatnonzero((row != wanted) & (windowed == hidden)):
                index = (g, i, int(j))
                found.append(
                    Mismatch(clause_id, "block_tables", c.record.req_ids[i], index, int(row[j]), int(wanted[j]))
                )
    return found[:MOST_MISMATCHES]


@law("MR-SLOT-001")
def slots_follow_the_table(c: StepContext) -> Found:
    return _slots(c, "MR-SLOT-001", range(1))


@law("MR-SLOT-004")
def further_groups_have_their_slots(c: StepContext) -> Found:
    return _slots(c, "MR-SLOT-004", range(1, c.num_groups)) if c.num_groups > 1 else None


def _slots(c: StepContext, clause_id: str, groups: range) -> Found:
    """By the candidate's own positions and the blocks that the request was given."""
    found: list[Mismatch] = []
    for g in groups:
        size = c.kv_cache_config.groups[g].spec.block_size
        width = max(len(ids) for ids in c.blocks[g])
        table = np.zeros((c.num_reqs, width), np.int64)
        for i, ids in enumerate(c.blocks[g]):
            table[i, : len(ids)] = ids
        column = c.record.positions // size
        owned = np.array([len(ids) for ids in c.blocks[g]])[c.owner]
        inside = (column >= 0) & (column < owned)
        slot = table[c.owner, np.where(inside, column, 0)] * size + c.record.positions % size
        got = c.record.slot_mappings[g, : c.num_tokens]
        found += [
            Mismatch(m.clause_id, m.field, m.req_id, (g, *m.index), m.got, m.expected)
            for m in c.differ(clause_id, "slot_mappings", got, slot, c.owner, inside)
        ]
    return found


@law("MR-SLOT-002")
def slots_are_distinct(c: StepContext) -> Found:
    found = []
    for g, group in enumerate(c.kv_cache_config.groups):
        slots = c.record.slot_mappings[g, : c.num_tokens]
        repeated = len(np.unique(slots)) < len(slots)
        if repeated or (slots < group.spec.block_size).any():
            what = "a slot twice" if repeated else int(slots.min())
            wanted = "each once" if repeated else f">= {group.spec.block_size}"
            found.append(Mismatch("MR-SLOT-002", "slot_mappings", None, (g,), what, wanted))
    return found


@law("MR-SLOT-003", needs_batch=False, first=True)
def slots_cover_the_padded_batch(c: StepContext) -> Found:
    if not c.num_tokens:
        return None
    slots, wanted = c.record.slot_mappings, (c.num_groups, c.tokens_padded)
    if isinstance(slots, np.ndarray) and slots.shape == wanted and slots.dtype == np.int64:
        return []
    got = f"{getattr(slots, 'dtype', type(slots).__name__)}{list(np.shape(slots))}"
    return [Mismatch("MR-SLOT-003", "slot_mappings", None, (), got, f"int64{list(wanted)}")]


# -- PAD ------------------------------------------------------------------------------------------------------


@law("MR-PAD-001")
def padding_starts_at_the_real_total(c: StepContext) -> Found:
    if c.reqs_padded == c.num_reqs:
        return None
    tail = c.record.query_start_loc[c.num_reqs + 1 :]
    return _tail("MR-PAD-001", "query_start_loc", tail, c.num_tokens, c.num_reqs + 1)


@law("MR-PAD-002")
def padding_rows_have_no_keys(c: StepContext) -> Found:
    if c.reqs_padded == c.num_reqs:
        return None
    return _tail("MR-PAD-002", "seq_lens", c.record.seq_lens[c.num_reqs :], 0, c.num_reqs)


@law("MR-PAD-003")
def padding_rows_own_no_block(c: StepContext) -> Found:
    if c.reqs_padded == c.num_reqs:
        return None
    found = []
    for g, table in enumerate(c.record.block_tables):
        width = -(-c.config.max_model_len // c.kv_cache_config.groups[g].spec.block_size)
        for i in range(c.num_reqs, c.reqs_padded):
            if len(table[i]) < width:  # a captured graph reads whole rows
                found.append(Mismatch("MR-PAD-003", "block_tables", None, (g, i), len(table[i]), width))
                continue
            wrong = np.flatnonzero(table[i] != NULL_BLOCK_ID)
            if len(wrong):
                j = int(wrong[0])
                found.append(Mismatch("MR-PAD-003", "block_tables", None, (g, i, j), int(table[i][j]), NULL_BLOCK_ID))
    return found[:MOST_MISMATCHES]


@law("MR-PAD-004")
def padding_tokens_own_no_slot(c: StepContext) -> Found:
    if c.tokens_padded == c.num_tokens:
        return None
    found = []
    for g in range(c.num_groups):
        tail = c.record.slot_mappings[g, c.num_tokens :]
        found += _tail("MR-PAD-004", "slot_mappings", tail, PAD_SLOT_ID, c.num_tokens, g)
    return found


@law("MR-PAD-005", needs_batch=False)
def padded_sizes_are_told(c: StepContext) -> Found:
    if c.descriptor is None or not c.num_tokens:
        return None
    wanted = {"num_tokens_padded": c.tokens_padded, "num_reqs_padded": c.reqs_padded}
    return [
        Mismatch("MR-PAD-005", name, None, (), getattr(c.record, name), value)
        for name, value in wanted.items()
        if getattr(c.record, name) != value
    ]


def _tail(clause_id: str, name: str, tail: np.ndarray, value: int, start: int, *lead: int) -> list[Mismatch]:
    wrong = np.flatnonzero(tail != value)[:MOST_MISMATCHES]
    return [Mismatch(clause_id, name, None, (*lead, start + int(i)), int(tail[i]), value) for i in wrong]
