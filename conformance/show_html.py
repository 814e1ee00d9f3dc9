"""A trace as one HTML page: a slider over the steps, the batch, the tables and the cache of each, the timeline above.

The page holds its data as JSON and draws it with the script of data/trace_page.html; it asks nothing of any network,
which its own content policy forbids. What is drawn where comes from the data functions of `conformance.figures`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from conformance.figures import Names, timeline_data
from conformance.figures.batch import lost_pointers, lost_text
from conformance.figures.blocks import BlockCell, blocks_held
from conformance.figures.holdings import Holdings
from conformance.figures.ragged import block_size as told_block_size
from conformance.figures.ragged import request_places, token_places
from conformance.figures.rows import RowsPicture
from runner_api import ConfigError, StepRecord, Trace
from runner_api.constants import PAD_SLOT_ID

# Pages of more steps work, but are slow to load; whoever writes one is told.
MANY_STEPS = 500


def trace_page(trace: Trace, *, start: int = 0) -> str:
    """The whole page. start: the step that it opens at. Raises ConfigError for a trace without steps."""
    data = page_data(trace)
    if not 0 <= start < len(trace.steps):
        raise ConfigError("no such step", field="start", got=start, expected=f"0 to {len(trace.steps) - 1}")
    data["start"] = start
    template = (files("conformance") / "data" / "trace_page.html").read_text(encoding="utf-8")
    # "<" is written as an escape, so that no text of a trace can end the script that holds it.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return template.replace("@TITLE@", html.escape(str(data["name"]))).replace("@DATA@", text)


def page_data(trace: Trace) -> dict[str, Any]:
    """What the page's script reads; requests are told by their number in order of arrival.

    requests: [{id, short, fill, line}]. steps: see `_step`. work: [step, request, kind, tokens, accepted, rejected,
    sampled]; lives: [request, [[first, last], …], [preempted at, …], end or null]; free: blocks after each step, or
    null.
    """
    picture = timeline_data(trace)
    names = Names(life.req_id for life in picture.lives)
    holdings, steps = Holdings(), []
    sizes = _block_sizes(trace.steps)
    back: dict[int, set[str]] = {}
    for work in picture.work:
        if work.resumed:
            back.setdefault(work.step, set()).add(work.req_id)
    for number, record in enumerate(trace.steps):
        holdings.take(record)
        steps.append(_step(record, holdings, names, back.get(number, set()), sizes))
    return {
        "name": trace.name,
        "runner": next((s.runner for s in trace.steps if s.runner), ""),
        "blockSize": sizes,
        "numBlocks": picture.num_blocks,
        "requests": [
            {"id": r, "short": names.short(r), "fill": names.fill(r), "line": names.stroke(r)} for r in names.order
        ],
        "work": [
            [w.step, names.number(w.req_id), w.kind, w.tokens, w.accepted, w.rejected, w.sampled] for w in picture.work
        ],
        "lives": [
            [names.number(life.req_id), [list(s) for s in life.spans], list(life.preempted), life.end]
            for life in picture.lives
        ],
        "free": None if picture.free is None else list(picture.free),
        "held": list(picture.held),
        "steps": steps,
    }


def _block_sizes(steps: Iterable[StepRecord]) -> list[int | None]:
    """Of each group, as the first record says that can; None where none can."""
    records = [s for s in steps if s.num_tokens]
    groups = max((len(s.block_tables) for s in records), default=0)
    sizes: list[int | None] = []
    for g in range(groups):
        size = None
        for record in records:
            try:
                size = told_block_size(record, g)
                break
            except ConfigError:
                continue
        sizes.append(size)
    return sizes


def _step(
    record: StepRecord, holdings: Holdings, names: Names, back: set[str], sizes: list[int | None]
) -> dict[str, Any]:
    """One step, as short as may be. back: requests that it brings back from a preemption. sizes: of blocks, by group.

    plan: who comes, returns, leaves (request numbers; ids that the trace never shows are left out). ids, positions: of
    the real tokens. slots: of each group, padding included. logits: logits_indices. lost: what points at no place of
    the axis, as a text. requests: in batch order, [request or -1, kind, row, start, end, seq_len, [sampled], why it got
    an error, what is wrong with its row]. tables: of all live ones, [request, seq_len, [blocks by group]]. cells: of
    all blocks held or written, see `_cell`.
    """
    plan = record.plan

    def numbers(req_ids: Iterable[str]) -> list[int]:
        return sorted(names.number(r) for r in req_ids if r in names.order)

    tokens = token_places(record) if record.num_reqs else ()
    places = request_places(record) if record.num_reqs else ()
    rows = RowsPicture((), (), tuple(p.row for p in places))
    cells = blocks_held(record, holdings, [size or 0 for size in sizes]).blocks
    return {
        "plan": {
            "new": numbers(n.req_id for n in plan.scheduled_new_reqs if n.req_id not in back),
            "resumed": numbers(back),
            "preempted": numbers(plan.preempted_req_ids),
            "finished": numbers(plan.finished_req_ids),
        },
        "padded": [max(record.num_reqs, record.num_reqs_padded), len(tokens)],
        "ids": [t.token_id for t in tokens if not t.padding],
        "positions": [t.position for t in tokens if not t.padding],
        "slots": [
            [t.slots[g] if g < len(t.slots) else PAD_SLOT_ID for t in tokens] for g in range(len(record.slot_mappings))
        ],
        "logits": record.logits_indices.tolist(),
        "lost": lost_text(*lost_pointers(record, len(tokens))) if record.num_reqs else "",
        "requests": [
            [
                -1 if p.req_id is None else names.number(p.req_id),
                p.kind,
                p.row,
                p.start,
                p.end,
                p.seq_len,
                list(p.sampled),
                p.fault,
                rows.fault(i),
            ]
            for i, p in enumerate(places)
        ],
        "tables": [[names.number(r), h.seq_len, [list(g) for g in h.blocks]] for r, h in holdings.live.items()],
        "cells": [_cell(c, names) for c in cells if c.owners or c.written],
    }


def _cell(cell: BlockCell, names: Names) -> list[Any]:
    """[block, slots, [[owner, slots that hold KV], …], [written], [written wrongly]], with no empty list at the end."""
    owners = [[names.number(r), n] for r, n in zip(cell.owners, cell.filled, strict=True)]
    parts: list[Any] = [cell.block, cell.size, owners, list(cell.written), list(cell.wrong)]
    while len(parts) > 3 and not parts[-1]:
        parts.pop()
    return parts
