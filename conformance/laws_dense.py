"""Laws about rows that move: whatever a request has, it has in its new row too. See `conformance.laws`.

Which row each request must hold is judged by `conformance.dense_rows`; here is what must have come along, in the very
step of a move, a swap or a return. Sound rows make all of these follow from other clauses; these say what broke.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from conformance.context import Mismatch, StepContext
from conformance.dense_rows import DenseRowTracker, RowChange
from conformance.laws import Found, law
from conformance.laws_memory import blocks_behind_the_window_are_null as window_is_null
from conformance.laws_memory import (
    further_groups_hold_their_blocks,
    rows_are_as_long_as_their_blocks,
    rows_hold_their_blocks,
)
from conformance.laws_sampling import draws_win


def _change(c: StepContext) -> RowChange:
    return c.rows.change if isinstance(c.rows, DenseRowTracker) else RowChange()


def _of(clause_id: str, chosen: Collection[str], found: Found) -> list[Mismatch]:
    """Another law's mismatches of some requests, as this clause's."""
    return [
        Mismatch(clause_id, m.field, m.req_id, m.index, m.got, m.expected) for m in found or () if m.req_id in chosen
    ]


# -- what each kind of law asks of some requests ------------------------------------------------------------------


def _tokens(c: StepContext, clause_id: str, chosen: Collection[str]) -> Found:
    if not chosen:
        return None
    wanted = np.array([t for m in c.members for t in m.input_ids], np.int64)
    mine = np.array([r in chosen for r in c.record.req_ids])
    return c.differ(clause_id, "input_ids", c.record.input_ids, wanted, c.owner, mine[c.owner])


def _progress(c: StepContext, clause_id: str, chosen: Collection[str]) -> Found:
    """Where the first token of each request stands, and its length."""
    if not chosen:
        return None
    mine, owner = np.array([r in chosen for r in c.record.req_ids]), np.arange(c.num_reqs)
    first, lens = c.record.positions[c.starts[:-1]], c.record.seq_lens[: c.num_reqs]
    return [
        *c.differ(clause_id, "positions", first, c.computed, owner, mine),
        *c.differ(clause_id, "seq_lens", lens, c.computed + c.scheduled, owner, mine),
    ]


def _blocks(c: StepContext, clause_id: str, chosen: Collection[str]) -> Found:
    if not chosen:
        return None
    faults = [*rows_are_as_long_as_their_blocks(c), *rows_hold_their_blocks(c)]
    return _of(clause_id, chosen, [*faults, *(further_groups_hold_their_blocks(c) or ())])


def _draws(c: StepContext, clause_id: str, chosen: Collection[str]) -> Found:
    if not chosen:
        return None
    if c.record.logits is None or len(c.record.logits) != len(c.logit_owner):
        return None
    wanted = np.array([m.request.seed for m in c.members], np.int64)
    mine = np.array([r in chosen for r in c.record.req_ids])
    seeds = c.differ(clause_id, "seeds", c.record.seeds, wanted, np.arange(c.num_reqs), mine)
    samples = np.array([m.samples for m in c.members])
    counts = c.differ(clause_id, "num_sampled", c.record.num_sampled > 0, samples, np.arange(c.num_reqs), mine)
    return [*seeds, *counts, *_of(clause_id, chosen, c.once(draws_win))]


# -- moved into a hole ----------------------------------------------------------------------------------------


@law("MR-DENSE-008")
def moved_requests_feed_their_tokens(c: StepContext) -> Found:
    return _tokens(c, "MR-DENSE-008", _change(c).condensed)


@law("MR-DENSE-009")
def moved_requests_go_on(c: StepContext) -> Found:
    return _progress(c, "MR-DENSE-009", _change(c).condensed)


@law("MR-DENSE-010")
def moved_requests_have_their_blocks(c: StepContext) -> Found:
    return _blocks(c, "MR-DENSE-010", _change(c).condensed)


@law("MR-DENSE-011")
def moved_requests_draw_as_they_ask(c: StepContext) -> Found:
    return _draws(c, "MR-DENSE-011", _change(c).condensed)


# -- swapped --------------------------------------------------------------------------------------------------


@law("MR-DENSE-012")
def swapped_requests_feed_their_tokens(c: StepContext) -> Found:
    return _tokens(c, "MR-DENSE-012", _change(c).swapped)


@law("MR-DENSE-013")
def swapped_requests_go_on(c: StepContext) -> Found:
    return _progress(c, "MR-DENSE-013", _change(c).swapped)


@law("MR-DENSE-014")
def swapped_requests_have_their_blocks(c: StepContext) -> Found:
    return _blocks(c, "MR-DENSE-014", _change(c).swapped)


@law("MR-DENSE-015")
def swapped_requests_draw_as_they_ask(c: StepContext) -> Found:
    return _draws(c, "MR-DENSE-015", _change(c).swapped)


# -- away and back --------------------------------------------------------------------------------------------


@law("MR-DENSE-016")
def returning_requests_feed_their_tokens(c: StepContext) -> Found:
    return _tokens(c, "MR-DENSE-016", _change(c).returned)


@law("MR-DENSE-017")
def returning_requests_go_on(c: StepContext) -> Found:
    return _progress(c, "MR-DENSE-017", _change(c).returned)


@law("MR-DENSE-018")
def returning_requests_have_their_blocks(c: StepContext) -> Found:
    return _blocks(c, "MR-DENSE-018", _change(c).returned)


@law("MR-DENSE-019")
def resumed_requests_have_new_blocks(c: StepContext) -> Found:
    return _blocks(c, "MR-DENSE-019", _change(c).resumed)


@law("MR-DENSE-020")
def those_that_come_back_draw_as_they_ask(c: StepContext) -> Found:
    return _draws(c, "MR-DENSE-020", _change(c).returned | _change(c).resumed)


# -- windows --------------------------------------------------------------------------------------------------


@law("MR-DENSE-033")
def windows_move_along(c: StepContext) -> Found:
    change = _change(c)
    chosen = change.condensed | change.swapped | change.returned
    return _of("MR-DENSE-033", chosen, window_is_null(c)) if chosen and any(c.reach) else None
