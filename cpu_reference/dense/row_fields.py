"""Everything that belongs to a row, declared once: add, move, swap and clear are derived from the declarations.

A field that is forgotten in one of the four leaves one request with another one's past, and shows only when requests
finish out of order. So none of the four names a field. Twin: gpu_backend/dense/row_fields.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner_api import RunnerError


@dataclass(frozen=True, slots=True)
class RowField:
    """One array whose first axis is the row.

    empty: what a row holds that belongs to nobody. count: int32[N], how many entries of a row are defined; None: all.
    Only defined entries travel; a swap takes as many as the longer of the two rows has.
    """

    name: str
    table: np.ndarray
    empty: Any
    count: np.ndarray | None = None

    def length(self, row: int) -> int | None:
        return None if self.count is None else int(self.count[row])


class RowFields:
    """The declared fields. Every change of rows goes through here."""

    def __init__(self, max_num_reqs: int) -> None:
        self.max_num_reqs = max_num_reqs
        self._fields: dict[str, RowField] = {}
        # Elements copied by moves and swaps so far, by field: what density costs.
        self.moved: dict[str, int] = {}

    @property
    def values_moved(self) -> int:
        """Elements copied by moves and swaps so far, over all fields."""
        return sum(self.moved.values())

    def __iter__(self) -> Iterator[RowField]:
        return iter(self._fields.values())

    def declare(self, name: str, table: np.ndarray, empty: Any = 0, count: np.ndarray | None = None) -> np.ndarray:
        """Declare a field and return its table, whose rows now belong to nobody.

        Raises RunnerError for a name used twice, a table of other rows, and one that is declared under another name.
        """
        if name in self._fields:
            raise RunnerError("a row field is declared twice", field=name)
        if len(table) != self.max_num_reqs:
            raise RunnerError("not a table by row", field=name, got=len(table), expected=f"{self.max_num_reqs} rows")
        for other in self:
            if np.shares_memory(table, other.table):  # it would be moved twice
                raise RunnerError("a table is declared under two names", field=name, got=other.name)
        table[...] = empty
        self._fields[name], self.moved[name] = RowField(name, table, empty, count), 0
        return table

    def clear(self, row: int) -> None:
        """The row belongs to nobody."""
        for field in self:
            field.table[row] = field.empty

    def move(self, source: int, target: int) -> None:
        """The request of `source` goes to `target`, whose own request has left; `source` belongs to nobody then."""
        lengths = [field.length(source) for field in self]  # before the counts themselves go
        for field, n in zip(self, lengths, strict=True):
            moved = _entries(field, source, n)
            _entries(field, target, n)[...] = moved
            self.moved[field.name] += moved.size
        self.clear(source)

    def swap(self, a: int, b: int) -> None:
        """The requests of two rows change places."""
        lengths = [None if field.count is None else max(field.length(a), field.length(b)) for field in self]
        for field, n in zip(self, lengths, strict=True):
            # Both sides are views of one table: without a copy the first assignment would spoil the second.
            kept = _entries(field, a, n).copy()
            _entries(field, a, n)[...] = _entries(field, b, n)
            _entries(field, b, n)[...] = kept
            self.moved[field.name] += 2 * kept.size


def _entries(field: RowField, row: int, n: int | None) -> np.ndarray:
    """A view of the first n entries of a row, or of all of it."""
    return field.table[row : row + 1] if n is None else field.table[row, :n]
