"""Two records of one step, one above the other: every field that differs, with the differing cells framed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from conformance.comparison import BOUNDARY_FIELDS, LOGITS_FIELDS, SIZE_FIELDS, TOKEN_FIELDS, compare_field, owner_of
from conformance.figures.look import VERMILION, Names
from conformance.figures.sheet import Sheet
from conformance.figures.strip import Column, Row, draw_strip, gap
from runner_api import INTEGER_FIELDS, ConfigError, StepRecord

# What was drawn comes last; of it count the first num_sampled of each request, junk may lie behind.
DRAWN = "token_ids"
FIELDS = (*sorted(SIZE_FIELDS), *INTEGER_FIELDS, DRAWN)
# Fields whose first index is the KV cache group.
GROUPED = ("block_tables", "slot_mappings")
# What an index counts, where it is not the request alone, or the token, or the row of the logits.
AXES = {
    "slot_mappings": ("group", "token"), "block_tables": ("group", "request", "block of its table"),
    "token_ids": ("request", "token it drew"), "draft_token_ids": ("request", "draft"), "positions": ("axis", "token"),
}  # fmt: skip
# Elements shown of a field: those that differ, and what stands in front of the first and of each later one.
SHOWN, LEAD, LATER_LEAD = 16, 4, 1


@dataclass(frozen=True, slots=True)
class PairCell:
    """One element. left, right: None where that side has none. req_id, position: whose it is, where the index tells.

    padding: it lies behind the last token, request or logits row of both. left_out: elements not shown between the
    cell in front and this one.
    """

    index: tuple[int, ...]
    left: Any
    right: Any
    differs: bool
    req_id: str | None = None
    position: int | None = None
    padding: bool = False
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class FieldPair:
    """One field that differs. cells: those of its elements that differ, each with a few in front of it."""

    name: str
    equal: int
    different: int
    cells: tuple[PairCell, ...]


@dataclass(frozen=True, slots=True)
class DivergencePicture:
    """different: in the order in which a step computes them: the first is where it starts. equal: the others.

    reordered: both batches hold the same requests, in another order; they are compared place by place all the same.
    """

    different: tuple[FieldPair, ...]
    equal: tuple[str, ...]
    elements: int
    reordered: bool = False


def divergence_data(left: StepRecord, right: StepRecord) -> DivergencePicture:
    """Compare sizes, integer fields and drawn tokens. left: what is expected. Raises ConfigError where nothing is."""
    different, equal, elements = [], [], 0
    for name in FIELDS:
        cells = _cells(name, left, right)
        same, others = _counts(name, cells, left, right)
        elements += same + others
        if others:
            different.append(FieldPair(name, same, others, _window(cells)))
        elif same:
            equal.append(name)
    if left.num_reqs == right.num_reqs == 0:
        raise ConfigError("two steps without tokens: there is nothing to compare", field="records")
    reordered = left.req_ids != right.req_ids and sorted(left.req_ids) == sorted(right.req_ids)
    return DivergencePicture(tuple(different), tuple(equal), elements, reordered)


def _counts(name: str, cells: list[PairCell], left: StepRecord, right: StepRecord) -> tuple[int, int]:
    """Equal and different elements."""
    if name == DRAWN:
        different = sum(c.differs for c in cells)
        return len(cells) - different, different
    found = compare_field(name, left, right)
    return found.equal, found.different


def _cells(name: str, left: StepRecord, right: StepRecord) -> list[PairCell]:
    """Every element that is compared, in order."""
    a, b = _elements(name, left), _elements(name, right)
    if name == "block_tables":  # a runner may own more blocks than are expected; padding is as wide as the runner likes
        rows = {index[:2]: len(left.block_tables[index[0]][index[1]]) for index in a}
        b = {index: value for index, value in b.items() if index[2] < rows.get(index[:2], index[2] + 1)}
        wide = {index[:2] for index in b}
        padding = {index for index in a if index[1] >= left.num_reqs and index[:2] in wide and index not in b}
        a = {index: value for index, value in a.items() if index not in padding}
    last, end = _last(name, left, right)
    cells = []
    for index in sorted(a.keys() | b.keys()):
        x, y = a.get(index), b.get(index)
        owner = owner_of(name, index, left)
        place = index[_axis(name, index)] if index else -1
        if name in BOUNDARY_FIELDS:  # entry i is where request i begins
            owner = (left.req_ids[place] if place < len(left.req_ids) else None, None)
        differs = index not in a or index not in b or x != y
        cells.append(PairCell(index, x, y, differs, *owner, last <= place and place != end))
    return cells


def _axis(name: str, index: tuple[int, ...]) -> int:
    """Which part of the index counts tokens, requests or logits rows."""
    return len(index) - 1 if name in TOKEN_FIELDS else int(name == "block_tables")


def _last(name: str, left: StepRecord, right: StepRecord) -> tuple[int, int]:
    """Where the padding of a field begins, and which entry only says where the last one ends (-1: none does)."""
    both = (left, right)
    if name in TOKEN_FIELDS:
        return max(r.num_tokens for r in both), -1
    if name in LOGITS_FIELDS:
        return max((int(r.cu_num_logits[-1]) for r in both if len(r.cu_num_logits)), default=0), -1
    end = max(len(getattr(r, name)) for r in both) - 1 if name in BOUNDARY_FIELDS else -1
    return max(r.num_reqs for r in both), end


def _window(cells: list[PairCell]) -> tuple[PairCell, ...]:
    """The cells that differ and their leads, as many as are shown."""
    kept: set[int] = set()
    for i in (i for i, c in enumerate(cells) if c.differs):
        kept |= set(range(max(i - (LATER_LEAD if kept else LEAD), 0), i + 1))
    chosen = sorted(kept)[:SHOWN]
    before = [i - j - 1 for j, i in pairwise(chosen)]
    return tuple(replace(cells[i], left_out=n) for i, n in zip(chosen, [0, *before], strict=False))


def _elements(name: str, record: StepRecord) -> dict[tuple[int, ...], Any]:
    """Every element by its index."""
    if name == DRAWN:
        rows = zip(record.token_ids, record.num_sampled, strict=False)
        return {(i, n): int(t) for i, (row, count) in enumerate(rows) for n, t in enumerate(row[: max(int(count), 0)])}
    value = getattr(record, name)
    if value is None:
        return {}
    if name == "block_tables":
        return {
            (g, i, n): int(b) for g, rows in enumerate(value) for i, row in enumerate(rows) for n, b in enumerate(row)
        }
    if isinstance(value, tuple):
        return {(i,): v for i, v in enumerate(value)}
    if isinstance(value, np.ndarray):
        return {tuple(index): v.item() for index, v in np.ndenumerate(value)}
    return {(): value}


def _equal(names: tuple[str, ...]) -> str:
    """The fields that agree: by name while they are few."""
    if len(names) > 4:
        return f"The other {len(names)} fields are equal"
    return f"Equal: {', '.join(names) or 'no field'}"


def divergence(
    left: StepRecord, right: StepRecord, *, labels: tuple[str, str] = ("expected", "got"), names: Names | None = None
) -> Any:
    """Figure of two records of one step (see the module). labels: what the two are called."""
    from conformance.figures.style import render

    data = divergence_data(left, right)
    names = names or Names([*left.req_ids, *right.req_ids])
    sheet = Sheet()
    if not data.different:
        sheet.title(
            "The two records agree in every field compared",
            f"{data.elements} elements are equal: {', '.join(data.equal)}.",
        )
        sheet.down(0.1)
        return render(sheet)
    first = data.different[0]
    gaps = "; +n: n equal ones" if any(c.left_out for f in data.different for c in f.cells) else ""
    sheet.title(
        f"Where the two records differ: first in {first.name}",
        f"Fields in the order in which a step computes them: {labels[0]} above, {labels[1]} below. Differing cells are "
        f"framed{gaps}. {_equal(data.equal)}.",
    )
    if data.reordered:
        sheet.note(
            "The two batches hold the same requests in another order. Cells are compared place by place, so that most "
            f"of them differ; names are those of the upper record ({labels[0]}).",
            VERMILION,
        )
    rows = [Row("index", "index"), Row(labels[0]), Row(labels[1])]
    for field in data.different:
        one_group = field.name in GROUPED and all(c.index[0] == 0 for c in field.cells)
        sheet.down(0.1)
        told = sum(c.differs for c in field.cells)
        more = f", {told} of them here" if told < field.different else ""
        text = (
            f"{field.name}{_axes(field, one_group)}: {field.different} of {field.different + field.equal} elements "
            f"differ{more}"
        )
        sheet.label(0.15, sheet.height, text, align="left", bold=True)
        sheet.down(0.12)
        nobody = "end" if field.name in BOUNDARY_FIELDS else ""
        draw_strip(sheet, rows, [x for c in field.cells for x in _columns(c, names, one_group, nobody)], names)
    sheet.note(names.legend([*left.req_ids, *right.req_ids]))
    sheet.down(0.1)
    return render(sheet)


def _axes(field: FieldPair, one_group: bool) -> str:
    """What the parts of its index count, where there are several."""
    length = len(field.cells[0].index) - one_group
    axes = AXES.get(field.name, ("request", "column"))[one_group:]
    return f" by {', '.join(axes)}" if 1 < length == len(axes) else ""


def _columns(cell: PairCell, names: Names, one_group: bool, nobody: str) -> list[Column]:
    """The cell, and in front of it a gap where elements are left out. nobody: label of what belongs to no request."""

    def say(value: Any) -> str:
        return "none" if value is None else (names.short(value) if isinstance(value, str) else str(value))

    texts = (",".join(map(str, cell.index[one_group:])), say(cell.left), say(cell.right))
    wrong = frozenset({1, 2}) if cell.differs else frozenset()
    label = "pad" if cell.padding else names.short(cell.req_id) or nobody
    column = Column(texts, cell.req_id or "", label, cell.req_id, cell.padding, wrong=wrong)
    return [gap(cell.left_out, Column(texts, "gap", ""))] * bool(cell.left_out) + [column]
