"""A strip: columns of cells on an axis, broken into lines, with the runs of one owner labelled above.

Batch and slot mapping are strips. Columns that carry nothing new may be left out; a gap says how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from conformance.figures.look import BLUE, CELL, FAINT, GREY, HATCH, INK, PALE, SMALL, VERMILION, Names
from conformance.figures.sheet import Sheet, text_width

LEFT, RIGHT = 1.3, 0.15
CELL_HEIGHT = 0.18
NARROWEST = 0.32


@dataclass(frozen=True, slots=True)
class Row:
    """One line of cells. kind: "index" (small and grey), "cell" (filled with the owner's colour), "mark" (bold)."""

    label: str
    kind: str = "cell"


@dataclass(frozen=True, slots=True)
class Column:
    """One place of the axis. texts: one for each Row. owner: a request, or None for padding and gaps.

    run: what it belongs to (columns of one run that follow each other get one label). label: of the run.
    left_out: how many places a gap stands for, 0 for a place itself. strong: the index is one that is pointed at.
    wrong: rows whose cell is marked as differing.
    """

    texts: tuple[str, ...]
    run: str
    label: str
    owner: str | None = None
    padding: bool = False
    left_out: int = 0
    strong: bool = False
    wrong: frozenset[int] = frozenset()


def gap(count: int, like: Column) -> Column:
    """A column that stands for `count` others of the same run."""
    texts = (f"+{count}", *("…" if text else "" for text in like.texts[1:]))
    return Column(texts, like.run, like.label, like.owner, like.padding, count)


def thin_out(columns: Sequence[Column], kept: Sequence[bool]) -> list[Column]:
    """The columns that are kept, and a gap for each stretch of at least two others in one run."""
    result: list[Column] = []
    keys = [(k, "" if k else c.run) for c, k in zip(columns, kept, strict=True)]
    for (keep, _), items in groupby(zip(keys, columns, strict=True), key=lambda pair: pair[0]):
        stretch = [c for _, c in items]
        result += stretch if keep or len(stretch) < 2 else [gap(len(stretch), stretch[0])]
    return result


def draw_strip(sheet: Sheet, rows: Sequence[Row], columns: Sequence[Column], names: Names) -> None:
    """Put the strip below what is on the sheet, in as many lines as it takes."""
    width = cell_width(columns)
    per_line = max(int((sheet.width - LEFT - RIGHT) / width), 1)
    for first in range(0, len(columns), per_line):
        _draw_line(sheet, rows, columns[first : first + per_line], width, names)
        sheet.down(0.14)


def cell_width(columns: Sequence[Column]) -> float:
    """As wide as the longest text of a cell, and as the label of the shortest runs."""
    texts = max((text_width(t, CELL) for c in columns for t in c.texts), default=0)
    runs = [(key, len(list(items))) for key, items in groupby(columns, key=lambda c: (c.run, c.label))]
    # Bold letters are wider, and a run may be broken after its first column.
    labels = max((1.12 * text_width(key[1], CELL) / min(n, 2) for key, n in runs), default=0)
    return max(NARROWEST, texts + 0.07, labels + 0.04)


def _draw_line(sheet: Sheet, rows: Sequence[Row], columns: Sequence[Column], width: float, names: Names) -> None:
    top = sheet.height
    # 1 the runs
    at = 0
    for (_, label), items in groupby(columns, key=lambda c: (c.run, c.label)):
        run = list(items)
        x, w = LEFT + at * width, len(run) * width
        sheet.label(x + w / 2, top + 0.08, label, bold=not run[0].padding, colour=GREY if run[0].padding else INK)
        sheet.line(
            x + 0.02, top + 0.18, x + w - 0.02, top + 0.18, width=2.5,
            colour=PALE if run[0].padding else names.hue(run[0].owner),
        )  # fmt: skip
        at += len(run)
    # 2 the rows of cells
    y = top + 0.22
    for r, row in enumerate(rows):
        sheet.label(LEFT - 0.1, y + CELL_HEIGHT / 2, row.label, align="right", size=CELL)
        for c, column in enumerate(columns):
            _draw_cell(sheet, row, r, column, LEFT + c * width, y, width, names)
        y += CELL_HEIGHT
    # 3 where runs meet
    filled = [i for i, row in enumerate(rows) if row.kind == "cell"]
    low, high = top + 0.22 + filled[0] * CELL_HEIGHT, top + 0.22 + (filled[-1] + 1) * CELL_HEIGHT
    for c in range(1, len(columns)):
        if columns[c].run != columns[c - 1].run:
            sheet.line(LEFT + c * width, low, LEFT + c * width, high, width=1.8)
    sheet.height = y


def _draw_cell(
    sheet: Sheet, row: Row, r: int, column: Column, x: float, y: float, width: float, names: Names
) -> None:  # fmt: skip
    text, middle = column.texts[r], (x + width / 2, y + CELL_HEIGHT / 2)
    if row.kind == "cell":
        plain = FAINT if column.padding else names.fill(column.owner)
        sheet.box(
            x, y, width, CELL_HEIGHT, fill="#ffffff" if column.left_out or column.padding else plain, edge="#ffffff",
            hatch=HATCH if column.padding else "",
        )  # fmt: skip
        if column.padding and text:  # so that the pattern does not run through the number
            w = text_width(text, CELL) + 0.02
            sheet.box(middle[0] - w / 2, y + 0.02, w, CELL_HEIGHT - 0.04, fill="#ffffff", layer=2)
        sheet.label(*middle, text, colour=GREY if column.left_out or column.padding else INK)
        if r in column.wrong:
            sheet.box(x, y, width, CELL_HEIGHT, edge=INK, line=2.0, layer=4)
    elif row.kind == "index":
        sheet.label(*middle, text, size=SMALL, colour=BLUE if column.strong else GREY, bold=column.strong)
    else:
        sheet.label(*middle, text, bold=True, colour=VERMILION)
