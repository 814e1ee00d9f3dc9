"""Two records of one step, one above the other: every field that differs, with the differing cells framed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.comparison import SIZE_FIELDS, compare_field, owner_of
from conformance.figures.look import Names
from conformance.figures.sheet import Sheet
from conformance.figures.strip import Column, Row, draw_strip
from runner_api import INTEGER_FIELDS, ConfigError, StepRecord

FIELDS = (*sorted(SIZE_FIELDS), *INTEGER_FIELDS)
# Fields whose first index is the KV cache group.
GROUPED = ("block_tables", "slot_mappings")
# Elements shown of a field, those that differ and what stands in front of the first.
SHOWN, LEAD = 16, 4


@dataclass(frozen=True, slots=True)
class PairCell:
    """One element. left, right: None where that side has none. req_id, position: whose it is, where the index tells."""

    index: tuple[int, ...]
    left: Any
    right: Any
    differs: bool
    req_id: str | None = None
    position: int | None = None


@dataclass(frozen=True, slots=True)
class FieldPair:
    """One field that differs. cells: a window of its elements that begins shortly before the first that differs."""

    name: str
    equal: int
    different: int
    cells: tuple[PairCell, ...]


@dataclass(frozen=True, slots=True)
class DivergencePicture:
    """different: in the order in which a step computes them: the first is where it starts. equal: the others."""

    different: tuple[FieldPair, ...]
    equal: tuple[str, ...]
    elements: int


def divergence_data(left: StepRecord, right: StepRecord) -> DivergencePicture:
    """Compare sizes and integer fields. left: what is expected. Raises ConfigError if there is nothing to compare."""
    different, equal, elements = [], [], 0
    for name in FIELDS:
        found = compare_field(name, left, right)
        elements += found.equal + found.different
        if found.different:
            different.append(FieldPair(name, found.equal, found.different, _window(name, left, right)))
        elif found.equal:
            equal.append(name)
    if left.num_reqs == right.num_reqs == 0:
        raise ConfigError("two steps without tokens: there is nothing to compare", field="records")
    return DivergencePicture(tuple(different), tuple(equal), elements)


def _window(name: str, left: StepRecord, right: StepRecord) -> tuple[PairCell, ...]:
    a, b = _elements(name, left), _elements(name, right)
    if name == "block_tables":  # a runner may own more blocks than are expected
        rows = {index[:2]: len(left.block_tables[index[0]][index[1]]) for index in a}
        b = {index: value for index, value in b.items() if index[2] < rows.get(index[:2], index[2] + 1)}
    cells = []
    for index in sorted(a.keys() | b.keys()):
        x, y = a.get(index), b.get(index)
        cells.append(PairCell(index, x, y, index not in a or index not in b or x != y, *owner_of(name, index, left)))
    first = next((i for i, c in enumerate(cells) if c.differs), 0)
    return tuple(cells[max(first - LEAD, 0) :][:SHOWN])


def _elements(name: str, record: StepRecord) -> dict[tuple[int, ...], Any]:
    """Every element by its index."""
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
        sheet.title("The two records agree", f"{data.elements} elements are equal: {', '.join(data.equal)}.")
        sheet.down(0.1)
        return render(sheet)
    first = data.different[0]
    sheet.title(
        f"Where the two records differ: first in {first.name}",
        f"Fields in the order in which a step computes them. {labels[0]} above, {labels[1]} below; differing cells are "
        f"framed. {_equal(data.equal)}.",
    )
    rows = [Row("index", "index"), Row(labels[0]), Row(labels[1])]
    for field in data.different:
        one_group = field.name in GROUPED and all(c.index[0] == 0 for c in field.cells)
        sheet.down(0.1)
        told = sum(c.differs for c in field.cells)
        more = f", {told} of them here" if told < field.different else ""
        text = f"{field.name}: {field.different} of {field.different + field.equal} elements differ{more}"
        sheet.label(0.15, sheet.height, text, align="left", bold=True)
        sheet.down(0.12)
        draw_strip(sheet, rows, [_column(c, names, one_group) for c in field.cells], names)
    sheet.note(names.legend([*left.req_ids, *right.req_ids]))
    sheet.down(0.1)
    return render(sheet)


def _column(cell: PairCell, names: Names, one_group: bool) -> Column:
    def say(value: Any) -> str:
        return "none" if value is None else (names.short(value) if isinstance(value, str) else str(value))

    texts = (",".join(map(str, cell.index[one_group:])), say(cell.left), say(cell.right))
    wrong = frozenset({1, 2}) if cell.differs else frozenset()
    return Column(texts, cell.req_id or "", names.short(cell.req_id), cell.req_id, wrong=wrong)
