"""Persistent rows on the left, the batch on the right, and an arrow for each entry of `idx_mapping`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conformance.figures.holdings import follow
from conformance.figures.look import FAINT, GREY, HATCH, INK, PALE, VERMILION, Names
from conformance.figures.ragged import need_tokens, request_places
from conformance.figures.sheet import Sheet
from runner_api import StepRecord

# A stretch of unused rows longer than this is drawn as one line.
LONGEST_FREE = 3


@dataclass(frozen=True, slots=True)
class RowLine:
    """One line on the left: rows first..last (one row unless nobody known holds them). batch: where it goes, if at all.

    req_id: who holds it, None if nobody is known to. stands_by: held by a request that this step leaves out.
    """

    first: int
    last: int
    req_id: str | None = None
    batch: int | None = None
    stands_by: bool = False


@dataclass(frozen=True, slots=True)
class RowsPicture:
    """rows: the left side, ascending. batch: the right side, in batch order; None is padding.

    idx_mapping: the row of each place of the batch as the record says it, which may be none that exists; None in the
    padding.
    """

    rows: tuple[RowLine, ...]
    batch: tuple[str | None, ...]
    idx_mapping: tuple[int | None, ...]

    @property
    def arrows(self) -> tuple[tuple[int, int], ...]:
        """(row, batch index) of each entry of idx_mapping whose row is on the left side, by row."""
        return tuple(sorted((r, i) for i, r in enumerate(self.idx_mapping) if r is not None and r >= 0))

    def fault(self, i: int) -> str:
        """What is wrong with the entry of this batch index: "negative", "twice", or nothing."""
        row = self.idx_mapping[i]
        if row is None:
            return ""
        return "negative" if row < 0 else ("twice" if self.idx_mapping.count(row) > 1 else "")


def rows_data(records: StepRecord | Sequence[StepRecord], *, num_rows: int | None = None) -> RowsPicture:
    """Rows and batch of the last of the records; earlier ones tell who holds a row that this step leaves out.

    num_rows: how many rows there are, where it is known. Raises ConfigError for a step without tokens.
    """
    record, holdings = follow(records)
    need_tokens(record)
    places = request_places(record)
    at = {p.row: p for p in reversed(places) if p.row is not None and p.row >= 0}
    held = {h.row: r for r, h in holdings.live.items() if h.row is not None and h.row not in at}
    if _packed(record):
        held = {}
    total = max([*at, *held, (num_rows or 0) - 1]) + 1
    lines: list[RowLine] = []
    row = 0
    while row < total:
        if row in at:
            lines.append(RowLine(row, row, at[row].req_id, at[row].index))
        elif row in held:
            lines.append(RowLine(row, row, held[row], stands_by=True))
        else:
            end = min((r for r in (*at, *held) if r > row), default=total)
            whole = end - row > LONGEST_FREE
            lines += [RowLine(row, end - 1)] if whole else [RowLine(r, r) for r in range(row, end)]
            row = end - 1
        row += 1
    return RowsPicture(tuple(lines), tuple(p.req_id for p in places), tuple(p.row for p in places))


def _packed(record: StepRecord) -> bool:
    """In the dense layout a request that a step leaves out has no row. Its runner's line tells the layout."""
    return "layout=dense" in record.runner or record.runner.endswith(" V1")


def rows(records: StepRecord | Sequence[StepRecord], *, num_rows: int | None = None, names: Names | None = None) -> Any:
    """Figure of rows and batch order (see the module)."""
    from conformance.figures.style import render

    data = rows_data(records, num_rows=num_rows)
    names = names or Names([r for r in data.batch if r is not None] + [r.req_id for r in data.rows if r.req_id])
    sheet = Sheet()
    sheet.title(
        "From persistent rows to batch order: idx_mapping",
        "An arrow from row r to batch index i says idx_mapping[i] = r.",
    )
    sheet.down(0.1)
    left, right, width, height = 1.9, 5.6, 1.5, 0.2
    top = sheet.height
    sheet.label(left + width / 2, top, "row", bold=True)
    sheet.label(right + width / 2, top, "batch index", bold=True)
    top += 0.14
    pitch_left, pitch_right = _pitches(len(data.rows), len(data.batch), height)
    for k, line in enumerate(data.rows):
        _draw_row(sheet, line, left, top + k * pitch_left, width, height, names)
    for i, req_id in enumerate(data.batch):
        y = top + i * pitch_right
        look = {"fill": names.fill(req_id)} if req_id else {"hatch": HATCH}
        sheet.box(right, y, width, height - 0.03, edge=GREY if req_id else PALE, **look)
        if req_id is None:
            sheet.box(right + width / 2 - 0.22, y + 0.02, 0.44, height - 0.07, fill="#ffffff", layer=2)
        sheet.label(
            right + width / 2, y + height / 2 - 0.015, names.short(req_id) or "pad", colour=INK if req_id else GREY
        )
        fault, row = data.fault(i), data.idx_mapping[i]
        came = str(i) if row is None else f"{i}  (row {row}{', twice' if fault == 'twice' else ''})"
        sheet.label(
            right + width + 0.08, y + height / 2 - 0.015, came, align="left", colour=VERMILION if fault else GREY
        )
    line_of = {line.first: k for k, line in enumerate(data.rows)}
    for row, i in data.arrows:
        sheet.line(
            left + width + 0.03, top + line_of[row] * pitch_left + height / 2 - 0.015,
            right - 0.03, top + i * pitch_right + height / 2 - 0.015,
            colour=names.stroke(data.batch[i]), width=1.2, arrow=True,
        )  # fmt: skip
    sheet.height = top + max(len(data.rows) * pitch_left, len(data.batch) * pitch_right) + 0.15
    if any(line.req_id is None for line in data.rows):
        sheet.note("free: held by nobody, as far as these steps tell.")
    sheet.note(names.legend([r for r in data.batch if r] + [r.req_id for r in data.rows if r.req_id]))
    sheet.down(0.05)
    return render(sheet)


def _pitches(left: int, right: int, height: float) -> tuple[float, float]:
    """Distances between lines, so that both sides are about equally high; at most twice the usual one."""
    tall = max(left, right) * height
    return min(tall / max(left, 1), 2 * height), min(tall / max(right, 1), 2 * height)


def _draw_row(sheet: Sheet, line: RowLine, x: float, y: float, width: float, height: float, names: Names) -> None:
    middle = y + height / 2 - 0.015
    numbers = str(line.first) if line.first == line.last else f"{line.first}–{line.last}"
    sheet.label(x - 0.08, middle, numbers, align="right", colour=GREY)
    if line.batch is not None:
        sheet.box(x, y, width, height - 0.03, fill=names.fill(line.req_id), edge=GREY)
        sheet.label(x + width / 2, middle, names.short(line.req_id))
    elif line.stands_by:
        sheet.box(x, y, width, height - 0.03, fill="#ffffff", edge=names.hue(line.req_id))
        sheet.label(x + width / 2, middle, f"{names.short(line.req_id)} waits", colour=GREY)
    else:
        sheet.box(x, y, width, height - 0.03, fill=FAINT)
        sheet.label(x + width / 2, middle, "free", colour=GREY)
