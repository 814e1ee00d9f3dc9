"""A step as plain text: one line per request, the differing cell marked, and what it should have held."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conformance.comparison import Difference
from conformance.context import Mismatch
from runner_api import SampleFault, StepRecord

# Elements shown of a long list, around the one that differs.
SHOWN = 6
_COLUMNS = {
    "req_ids": "req", "idx_mapping": "row", "query_start_loc": "query", "seq_lens": "seq_len", "positions": "positions",
    "input_ids": "input_ids", "block_tables": "blocks", "slot_mappings": "slots", "logits_indices": "logits rows",
    "num_sampled": "sampled", "token_ids": "token",
}  # fmt: skip
# Why a request got an error in place of its tokens, in as few letters as a cell has.
_FAULTS = {SampleFault.NAN: "NaN", SampleFault.NO_TOKEN: "no token"}


def fault_of(record: StepRecord, i: int) -> str:
    """Why the request at batch index i got an error and no token: a word or two, empty where it got what it should."""
    fault = int(record.faults[i]) if i < len(record.faults) else SampleFault.NONE
    if fault == SampleFault.NONE or i >= len(record.num_sampled) or record.num_sampled[i] <= 0:
        return ""
    return _FAULTS[SampleFault(fault)] if fault in _FAULTS else f"fault {fault}"


def batch_table(record: StepRecord, difference: Difference | Mismatch | None = None) -> str:
    """The ragged batch of a record; `»…«` marks the cell that the difference lies in.

    Padding rows are shown as `(pad)`. Groups are separated by `|` in the columns of blocks and slots. In place of the
    tokens of a request that got an error stands why, unless the difference lies in them.
    """
    lines = [[*_COLUMNS.values()]]
    field = difference.field if difference else ""
    index = tuple(difference.index) if difference else ()
    marked = _batch_index(record, field, index)
    for i in range(max(record.num_reqs_padded, record.num_reqs)):
        cells = _cells(record, i, field, index if i == marked else ())
        if i == marked and field in _COLUMNS:
            at = list(_COLUMNS).index(field)
            cells[at] = f"»{cells[at]}«"
        lines.append(cells)
    if record.num_reqs == 0:
        lines.append(["(no request is scheduled)"] + [""] * (len(_COLUMNS) - 1))
    return plain_table(lines)


def plain_table(lines: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the left, a rule below the first line."""
    widths = [max(len(line[j]) for line in lines) for j in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    text.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(text)


def _cells(record: StepRecord, i: int, field: str, index: tuple[int, ...]) -> list[str]:
    """One line of the table. `index` is the differing element if it is this line's."""
    real = i < record.num_reqs
    loc = record.query_start_loc
    start, end = (int(loc[i]), int(loc[i + 1])) if i + 1 < len(loc) else (0, 0)
    tokens = slice(start, end)
    at = index[-1] - start if index else None
    column = index[-1] if index else None
    blocks = [
        _short(table[i] if i < len(table) else (), column if field == "block_tables" and index[:1] == (g,) else None)
        for g, table in enumerate(record.block_tables)
    ]
    slots = [
        _short(group[tokens], at if field == "slot_mappings" and index[:1] == (g,) else None)
        for g, group in enumerate(record.slot_mappings)
    ]
    cu = record.cu_num_logits
    rows = record.logits_indices[cu[i] : cu[i + 1]] if real and i + 1 < len(cu) else ()
    num = int(record.num_sampled[i]) if i < len(record.num_sampled) else 0
    fault = "" if field == "token_ids" else fault_of(record, i)
    drawn = _short(record.token_ids[i][: max(num, 0)]) if i < len(record.token_ids) else ""
    return [
        record.req_ids[i] if i < len(record.req_ids) else "(pad)",
        str(record.idx_mapping[i]) if i < len(record.idx_mapping) else "",
        f"[{start}, {end})",
        str(record.seq_lens[i]) if i < len(record.seq_lens) else "",
        _short(record.positions[tokens], at if field == "positions" else None) if real else "",
        _short(record.input_ids[tokens], at if field == "input_ids" else None) if real else "",
        " | ".join(blocks),
        " | ".join(slots) if real else "",
        _short(rows) if real else "",
        str(num) if real else "",
        fault or drawn,
    ]


def _batch_index(record: StepRecord, field: str, index: tuple[int, ...]) -> int | None:
    """Which line of the table an element belongs to."""
    if not index:
        return None
    if field in ("positions", "input_ids", "slot_mappings"):
        return int(np.searchsorted(record.query_start_loc[1:], index[-1], side="right"))
    if field in ("logits_indices", "token_ids"):
        return index[0] if field == "token_ids" else int(np.searchsorted(record.cu_num_logits[1:], index[0], "right"))
    if field == "query_start_loc":
        return max(index[0] - 1, 0)
    return index[1] if field == "block_tables" and len(index) > 1 else index[0]


def _short(values: Sequence[int] | np.ndarray, at: int | None = None) -> str:
    items = [str(int(v)) for v in values]
    if at is not None and 0 <= at < len(items):
        items[at] = f"*{items[at]}*"
    first = 0 if at is None else min(max(at - SHOWN // 2, 0), max(len(items) - SHOWN, 0))
    shown = items[first : first + SHOWN]
    lead, more = "… " if first else "", " …" if first + SHOWN < len(items) else ""
    return "[" + lead + " ".join(shown) + more + "]"
