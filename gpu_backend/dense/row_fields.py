"""Everything that belongs to a row, declared once: add, move, swap and clear are derived from the declarations.

A field that is forgotten in one of the four leaves one request with another one's past, and shows only when requests
finish out of order. So none of the four names a field. Tables of the host change at once. For those of the device, the
step's changes are summed up, row by row, and made by `apply`: two kernels whatever happened, and none if nothing did.
Twin: cpu_reference/dense/row_fields.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpu_backend.dense.move_rows import move_rows
from gpu_backend.group_tables import forget_pointer_table, pointer_table
from gpu_backend.packed_copy import PackedCopy
from runner_api import NO_ROW, RunnerError


@dataclass(frozen=True, slots=True)
class RowField:
    """One array whose first axis is the row.

    empty: what a row holds that belongs to nobody. count: int32[N], how many entries of a row are defined; None: all.
    Only defined entries travel; a swap takes as many as the longer of the two rows has.
    """

    name: str
    table: np.ndarray | torch.Tensor
    empty: Any
    count: np.ndarray | None = None

    def length(self, row: int) -> int | None:
        return None if self.count is None else int(self.count[row])


class RowFields:
    """The declared fields. Every change of rows goes through here."""

    def __init__(self, max_num_reqs: int) -> None:
        self.max_num_reqs = max_num_reqs
        self._fields: dict[str, RowField] = {}
        self._on_host: list[RowField] = []
        # Elements copied by moves and swaps so far, by field: what density costs.
        self.moved: dict[str, int] = {}
        # -- tables of the device -----------------------------------------------------------------------------
        self._on_device: list[RowField] = []
        self._device_lengths: Callable[[int], Sequence[int]] = lambda row: ()
        # Of each row that the step has touched: whose contents it is to have, by the row they were in when the step
        # began (NO_ROW: none); and how much of each table it held then.
        self._origin: dict[int, int] = {}
        self._lengths: dict[int, list[int]] = {}
        self._ticket = self._max_length = 0
        # Somebody has filled live rows past their ends (poison): nothing is known to be empty any more.
        self.spoilt = False

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
        self._check(name, table)
        for other in self._on_host:
            if np.shares_memory(table, other.table):  # it would be moved twice
                raise RunnerError("a table is declared under two names", field=name, got=other.name)
        table[...] = empty
        self._add(RowField(name, table, empty, count), self._on_host)
        return table

    def declare_on_device(self, tables: dict[str, torch.Tensor], lengths: Callable[[int], Sequence[int]]) -> None:
        """Declare the tables of the device, all of them, once. Whoever leaves a row leaves zeros.

        tables: [N, W_k] of 32-bit elements. lengths: of a row, how many entries of each are defined, as the host knows
        it; asked before anything of the row changes. Raises RunnerError as `declare` does.
        """
        for name, table in tables.items():
            self._check(name, table)
            for other in self._on_device:
                if table.untyped_storage().data_ptr() == other.table.untyped_storage().data_ptr():
                    raise RunnerError("a table is declared under two names", field=name, got=other.name)
            table.zero_()
            self._add(RowField(name, table, 0), self._on_device)
        self._device_lengths = lengths

    def _check(self, name: str, table: np.ndarray | torch.Tensor) -> None:
        if name in self._fields:
            raise RunnerError("a row field is declared twice", field=name)
        if len(table) != self.max_num_reqs:
            raise RunnerError("not a table by row", field=name, got=len(table), expected=f"{self.max_num_reqs} rows")

    def _add(self, field: RowField, place: list[RowField]) -> None:
        self._fields[field.name], self.moved[field.name] = field, 0
        place.append(field)

    # -- rows change ------------------------------------------------------------------------------------------

    def take(self, row: int) -> None:
        """A request comes into a row that belongs to nobody; to be told before anything is written there."""
        self._touch(row)

    def clear(self, row: int) -> None:
        """The row belongs to nobody."""
        self._touch(row)
        lengths = [self._length(field, row) for field in self._on_host]  # before the counts themselves go
        for field, n in zip(self._on_host, lengths, strict=True):
            _entries(field, row, n)[...] = field.empty
        self._origin[row] = NO_ROW

    def move(self, source: int, target: int) -> None:
        """The request of `source` goes to `target`, whose own request has left; `source` belongs to nobody then."""
        self._touch(source, target)
        self._origin[target] = self._origin[source]
        lengths = [self._length(field, source) for field in self._on_host]  # before the counts themselves go
        for field, n in zip(self._on_host, lengths, strict=True):
            moved = _entries(field, source, n)
            _entries(field, target, n)[...] = moved
            self.moved[field.name] += moved.size
            moved[...] = field.empty
        self._origin[source] = NO_ROW

    def swap(self, a: int, b: int) -> None:
        """The requests of two rows change places."""
        self._touch(a, b)
        self._origin[a], self._origin[b] = self._origin[b], self._origin[a]
        both = [(self._length(field, a), self._length(field, b)) for field in self._on_host]
        lengths = [None if m is None or n is None else max(m, n) for m, n in both]
        for field, n in zip(self._on_host, lengths, strict=True):
            # Both sides are views of one table: without a copy the first assignment would spoil the second.
            kept = _entries(field, a, n).copy()
            _entries(field, a, n)[...] = _entries(field, b, n)
            _entries(field, b, n)[...] = kept
            self.moved[field.name] += 2 * kept.size

    def _length(self, field: RowField, row: int) -> int | None:
        return None if self.spoilt else field.length(row)

    # -- … and on the device ----------------------------------------------------------------------------------

    def _touch(self, *rows: int) -> None:
        """Remember what rows held when the step began."""
        for row in rows:
            if row not in self._origin:
                self._origin[row] = row
                widths = [field.table.shape[1] for field in self._on_device]
                self._lengths[row] = widths if self.spoilt else list(self._device_lengths(row))

    def pack(self, packed: PackedCopy) -> None:
        """Sum up what the step did to rows, and add it to the copy that is about to be sent."""
        moves = []
        for row, origin in self._origin.items():
            if row == origin:
                continue
            for k, field in enumerate(self._on_device):
                arriving = self._lengths[origin][k] if origin != NO_ROW else 0
                n = max(arriving, self._lengths[row][k])
                if n:
                    moves.append((k, origin, row, n))
                self.moved[field.name] += arriving
        self._origin, self._lengths, self._max_length = {}, {}, 0
        if moves:
            table = np.array(moves, np.int64).T
            self._ticket, self._max_length = packed.add(table), int(table[3].max())

    def apply(self, packed: PackedCopy) -> None:
        """Do it on the device, before anything new is written to its tables."""
        if self._max_length:
            move_rows(packed.extra[self._ticket], self._max_length, self._device_tables())
            self._max_length = 0

    def bind(self) -> None:
        """Bring the list of tables to the device, so that no step has to wait for that."""
        if self._on_device:
            pointer_table(self._device_tables())

    def release(self) -> None:
        """Let go of the tables that are kept by address."""
        forget_pointer_table(self._device_tables())

    def _device_tables(self) -> list[torch.Tensor]:
        return [field.table for field in self._on_device]


def _entries(field: RowField, row: int, n: int | None) -> np.ndarray:
    """A view of the first n entries of a row, or of all of it."""
    return field.table[row : row + 1] if n is None else field.table[row, :n]
