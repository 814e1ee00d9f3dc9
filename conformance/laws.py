"""One small function per clause, about what a step's record and output say.

A law returns its mismatches, or None where the step has nothing it could judge. Laws read the candidate's own other
fields wherever they can (its slots are judged by its own positions), so that one fault breaks one law. Laws marked
`consequence` judge what follows from the index fields; they are silent once an index law of the same run has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from conformance.context import MOST_MISMATCHES, Mismatch, StepContext
from runner_api import EMPTY_MODEL_RUNNER_OUTPUT, NULL_BLOCK_ID, PAD_SLOT_ID

Found = list[Mismatch] | None
LawFunction = Callable[[StepContext], Found]


@dataclass(frozen=True, slots=True)
class Law:
    """When a law can be asked: after steps with tokens, on a batch of the right requests, or always."""

    clause_id: str
    fn: LawFunction
    needs_batch: bool
    consequence: bool
    first: bool


LAWS: dict[str, Law] = {}


def law(
    clause_id: str, *, needs_batch: bool = True, consequence: bool = False, first: bool = False
) -> Callable[[LawFunction], LawFunction]:
    """Register a law. `first`: shapes and batch; where one of these fails nothing else can be read."""

    def register(fn: LawFunction) -> LawFunction:
        LAWS[clause_id] = Law(clause_id, fn, needs_batch, consequence, first)
        return fn

    return register


# -- BATCH ----------------------------------------------------------------------------------------------------


@law("MR-BATCH-001", needs_batch=False, first=True)
def batch_holds_the_plans_requests(c: StepContext) -> Found:
    if c.is_permutation:
        return []
    return [Mismatch("MR-BATCH-001", "req_ids", None, (), c.record.req_ids, c.expected.order)]


@law("MR-BATCH-005", first=True)
def arrays_have_their_shapes(c: StepContext) -> Found:
    r, rp, t, tp, n = c.num_reqs, c.reqs_padded, c.num_tokens, c.tokens_padded, int(c.logit_starts[-1])
    k = c.config.num_speculative_tokens
    shapes = {
        "idx_mapping": (r,), "query_start_loc": (rp + 1,), "seq_lens": (rp,), "input_ids": (t,), "positions": (t,),
        "logits_indices": (n,), "cu_num_logits": (r + 1,), "expanded_idx_mapping": (n,), "expanded_local_pos": (n,),
        "slot_mappings": (c.num_groups, tp), "seeds": (r,), "token_ids": (r, 1 + k), "num_sampled": (r,),
        "num_rejected": (r,),
    }  # fmt: skip
    found = []
    for name, shape in shapes.items():
        value = getattr(c.record, name)
        if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype.kind != "i":
            got = f"{getattr(value, 'dtype', type(value).__name__)}{list(np.shape(value))}"
            found.append(Mismatch("MR-BATCH-005", name, None, (), got, f"integers {list(shape)}"))
    rows = [len(table) for table in c.record.block_tables]
    if rows != [rp] * c.num_groups:
        found.append(Mismatch("MR-BATCH-005", "block_tables", None, (), rows, [rp] * c.num_groups))
    return found


@law("MR-BATCH-002")
def short_requests_lead(c: StepContext) -> Found:
    keys = _order_keys(c)
    at = next((i for i in range(1, len(keys)) if keys[i] < keys[i - 1]), None)
    if at is None:
        return []
    got = c.record.req_ids[at]
    return [Mismatch("MR-BATCH-002", "req_ids", got, (at,), got, c.expected.order[at])]


@law("MR-BATCH-003")
def ties_keep_the_plans_order(c: StepContext) -> Found:
    keys = _order_keys(c)
    place = {r: i for i, r in enumerate(c.plan.num_scheduled_tokens)}
    ids = c.record.req_ids
    for i in range(1, len(ids)):
        if keys[i] == keys[i - 1] and place[ids[i]] < place[ids[i - 1]]:
            return [Mismatch("MR-BATCH-003", "req_ids", ids[i], (i,), ids[i], c.expected.order[i])]
    return []


@law("MR-BATCH-004", needs_batch=False)
def counts_are_the_plans(c: StepContext) -> Found:
    wanted = {"num_reqs": c.num_reqs, "num_tokens": c.num_tokens}
    return [
        Mismatch("MR-BATCH-004", name, None, (), getattr(c.record, name), value)
        for name, value in wanted.items()
        if getattr(c.record, name) != value
    ]


def _order_keys(c: StepContext) -> list[tuple[bool, bool, int]]:
    q = 1 + c.config.num_speculative_tokens
    return [(not m.num_drafts, m.num_scheduled != q, m.num_scheduled) for m in c.members]


# -- INPUT ----------------------------------------------------------------------------------------------------


@law("MR-INPUT-001")
def runs_are_as_long_as_scheduled(c: StepContext) -> Found:
    got = c.record.query_start_loc[: c.num_reqs + 1]
    return c.differ("MR-INPUT-001", "query_start_loc", got, c.starts, np.maximum(np.arange(c.num_reqs + 1) - 1, 0))


@law("MR-INPUT-002")
def positions_count_up_to_the_last_key(c: StepContext) -> Found:
    first, before = _starts(c)
    wanted = np.where((first == c.computed) | (first == before), first, c.computed)
    return c.differ("MR-INPUT-002", "positions", c.record.positions, wanted[c.owner] + c.offset, c.owner)


@law("MR-INPUT-003")
def lengths_end_behind_the_last_position(c: StepContext) -> Found:
    first, before = _starts(c)
    wanted = np.where((before == c.computed) | (before == first), before, c.computed) + c.scheduled
    return c.differ("MR-INPUT-003", "seq_lens", c.record.seq_lens[: c.num_reqs], wanted, np.arange(c.num_reqs))


def _starts(c: StepContext) -> tuple[np.ndarray, np.ndarray]:
    """int64[R] twice: where each request starts, as its positions say and as its length says.

    One that differs from both the other and the truth is at fault; two that agree on a wrong number show that the
    counter they come from is wrong.
    """
    return c.record.positions[c.starts[:-1]], c.record.seq_lens[: c.num_reqs].astype(np.int64) - c.scheduled


@law("MR-INPUT-004")
def known_tokens_are_fed(c: StepContext) -> Found:
    return _fed(c, "MR-INPUT-004", lambda m: m.computed < m.prefill_len and not m.resumed)


@law("MR-STATE-006")
def resumed_requests_feed_their_known_tokens(c: StepContext) -> Found:
    return _fed(c, "MR-STATE-006", lambda m: m.computed < m.prefill_len and m.resumed)


@law("MR-INPUT-005")
def decodes_feed_the_last_token(c: StepContext) -> Found:
    return _fed(c, "MR-INPUT-005", lambda m: m.computed >= m.prefill_len)


@law("MR-INPUT-010")
def verifying_requests_feed_their_drafts(c: StepContext) -> Found:
    if not any(m.num_drafts for m in c.members):
        return None
    return _fed(c, "MR-INPUT-010", lambda m: m.num_drafts > 0, drafts=True)


def _fed(c: StepContext, clause_id: str, chosen: Callable[..., bool], drafts: bool = False) -> Found:
    """Input ids of the chosen requests: the draft places or the others."""
    mine = np.array([chosen(m) for m in c.members])
    if not mine.any():
        return None
    wanted = np.array([t for m in c.members for t in m.input_ids], np.int64)
    is_draft = c.offset >= np.array([m.num_scheduled - m.num_drafts for m in c.members])[c.owner]
    return c.differ(clause_id, "input_ids", c.record.input_ids, wanted, c.owner, mine[c.owner] & (is_draft == drafts))


@law("MR-INPUT-006")
def logits_rows_end_their_request(c: StepContext) -> Found:
    ends = c.record.query_start_loc[1 : c.num_reqs + 1].astype(np.int64)
    local = np.arange(len(c.logit_owner)) - c.logit_starts[c.logit_owner]
    wanted = (ends - c.num_logits)[c.logit_owner] + local
    return c.differ("MR-INPUT-006", "logits_indices", c.record.logits_indices, wanted, c.logit_owner)


@law("MR-INPUT-007")
def logits_rows_are_counted(c: StepContext) -> Found:
    owner = np.maximum(np.arange(c.num_reqs + 1) - 1, 0)
    return c.differ("MR-INPUT-007", "cu_num_logits", c.record.cu_num_logits, c.logit_starts, owner)


@law("MR-INPUT-008")
def logits_rows_know_their_row(c: StepContext) -> Found:
    wanted = c.record.idx_mapping[c.logit_owner]
    return c.differ("MR-INPUT-008", "expanded_idx_mapping", c.record.expanded_idx_mapping, wanted, c.logit_owner)


@law("MR-INPUT-009")
def logits_rows_are_numbered(c: StepContext) -> Found:
    wanted = np.arange(len(c.logit_owner)) - c.logit_starts[c.logit_owner]
    return c.differ("MR-INPUT-009", "expanded_local_pos", c.record.expanded_local_pos, wanted, c.logit_owner)


@law("MR-INPUT-011")
def drafts_are_held(c: StepContext) -> Found:
    if c.record.draft_token_ids is None or not c.config.num_speculative_tokens:
        return None
    wanted = np.array([m.drafts for m in c.members], np.int64)
    return c.differ("MR-INPUT-011", "draft_token_ids", c.record.draft_token_ids.T, wanted.T, np.arange(c.num_reqs))


# -- STATE and POST: where a request's progress stands --------------------------------------------------------


@law("MR-STATE-009")
def new_requests_start_where_the_plan_says(c: StepContext) -> Found:
    mine = np.array([m.is_new for m in c.members])
    return _starts_at(c, "MR-STATE-009", mine) if mine.any() else None


@law("MR-POST-001")
def progress_grows_by_what_was_computed(c: StepContext) -> Found:
    mine = np.array([not m.is_new for m in c.members])
    return _starts_at(c, "MR-POST-001", mine) if mine.any() else None


def _start_is_wrong(c: StepContext) -> np.ndarray:
    """bool[R] where positions and lengths agree with each other and not with the truth: the counter is wrong."""
    first, before = _starts(c)
    return (first == before) & (first != c.computed)


def _starts_at(c: StepContext, clause_id: str, mine: np.ndarray) -> Found:
    got = c.record.positions[c.starts[:-1]]
    return c.differ(clause_id, "positions", got, c.computed, np.arange(c.num_reqs), mine & _start_is_wrong(c))


def rows_follow_the_stack(c: StepContext) -> dict[str, list[Mismatch]]:
    """All clauses about rows at once, from the tracker: MR-STATE-001 .. 004 and 008."""
    found: dict[str, list[Mismatch]] = {clause_id: [] for clause_id in c.rows.tested}
    for clause_id, req_id, got, expected in c.rows.findings:
        index = (c.record.req_ids.index(req_id),)
        found.setdefault(clause_id, []).append(Mismatch(clause_id, "idx_mapping", req_id, index, got, expected))
    return found


@law("MR-STATE-007", needs_batch=False)
def plans_without_tokens_build_nothing(c: StepContext) -> Found:
    if c.num_tokens:
        return None
    shape = (c.record.num_reqs, c.record.num_tokens, len(c.record.req_ids), len(c.record.input_ids))
    return [] if shape == (0, 0, 0, 0) else [Mismatch("MR-STATE-007", "num_reqs", None, (), shape, (0, 0, 0, 0))]


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
    shape, wanted = c.record.slot_mappings.shape, (c.num_groups, c.tokens_padded)
    return [] if shape == wanted else [Mismatch("MR-SLOT-003", "slot_mappings", None, (), shape, wanted)]


# -- PAD ------------------------------------------------------------------------------------------------------


@law("MR-PAD-001")
def padding_starts_at_the_real_total(c: StepContext) -> Found:
    if c.reqs_padded == c.num_reqs:
        return None
    tail = c.record.query_start_loc[c.num_reqs + 1 :]
    return _tail(c, "MR-PAD-001", "query_start_loc", tail, c.num_tokens, c.num_reqs + 1)


@law("MR-PAD-002")
def padding_rows_have_no_keys(c: StepContext) -> Found:
    if c.reqs_padded == c.num_reqs:
        return None
    return _tail(c, "MR-PAD-002", "seq_lens", c.record.seq_lens[c.num_reqs :], 0, c.num_reqs)


@law("MR-PAD-003")
def padding_rows_own_no_block(c: StepContext) -> Found:
    if c.reqs_padded == c.num_reqs:
        return None
    found = []
    for g, table in enumerate(c.record.block_tables):
        for i in range(c.num_reqs, c.reqs_padded):
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
        found += _tail(c, "MR-PAD-004", "slot_mappings", tail, PAD_SLOT_ID, c.num_tokens, g)
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


def _tail(
    c: StepContext, clause_id: str, name: str, tail: np.ndarray, value: int, start: int, *lead: int
) -> list[Mismatch]:
    wrong = np.flatnonzero(tail != value)[:MOST_MISMATCHES]
    return [Mismatch(clause_id, name, None, (*lead, start + int(i)), int(tail[i]), value) for i in wrong]


# -- OUT and ASYNC --------------------------------------------------------------------------------------------


@law("MR-OUT-001")
def output_names_the_batch(c: StepContext) -> Found:
    got = tuple(c.output.req_ids)
    return [] if got == c.record.req_ids else [Mismatch("MR-OUT-001", "req_ids", None, (), got, c.record.req_ids)]


@law("MR-OUT-002")
def output_gives_the_tokens_taken(c: StepContext) -> Found:
    taken, given = c.record.tokens(), dict(zip(c.output.req_ids, c.output.sampled_token_ids, strict=False))
    return [
        Mismatch("MR-OUT-002", "sampled_token_ids", r, (i,), given.get(r), taken[r])
        for i, r in enumerate(c.record.req_ids)
        if r in given and tuple(given[r]) != taken[r]
    ][:MOST_MISMATCHES]


@law("MR-OUT-003", needs_batch=False)
def no_tokens_no_output(c: StepContext) -> Found:
    if c.num_tokens:
        return None
    got = (c.output.req_ids, c.output.sampled_token_ids)
    wanted = (EMPTY_MODEL_RUNNER_OUTPUT.req_ids, EMPTY_MODEL_RUNNER_OUTPUT.sampled_token_ids)
    return [] if got == wanted else [Mismatch("MR-OUT-003", "req_ids", None, (), got, wanted)]


@law("MR-ASYNC-001", needs_batch=False)
def output_is_the_same_twice(c: StepContext) -> Found:
    if c.output_again is None:
        return None
    first, again = c.output.tokens(), c.output_again.tokens()
    return [] if first == again else [Mismatch("MR-ASYNC-001", "sampled_token_ids", None, (), again, first)]
