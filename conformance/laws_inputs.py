"""Laws about the flat inputs of a step and the progress of each request. See `conformance.laws`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conformance.context import Mismatch, StepContext
from conformance.laws import Found, law

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


def rows_follow_their_rules(c: StepContext) -> dict[str, list[Mismatch]]:
    """All clauses about rows at once, from the tracker: MR-STATE-001 .. 004 and 008, or MR-DENSE-001 .. 007."""
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
