"""Row changes collected on the host, packed into one buffer, applied to a persistent table in one go.

A table of N rows is too large to send every step, and most rows do not change. Between two steps the host stages
short runs of values; `apply_staged_writes` lays them into the table. Twin: gpu_backend/staged_write.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def apply_staged_writes(
    indices: np.ndarray,
    starts: np.ndarray,
    contents: np.ndarray,
    cu_lens: np.ndarray,
    num_writes: int,
    base: np.ndarray,
) -> None:
    """Lay `num_writes` runs of values into the rows of a table.

    Run p is `contents[cu_lens[p-1] : cu_lens[p]]` (from 0 for p = 0) and goes to `base[indices[p], starts[p]:]`. Runs
    never overlap: they are applied in no particular order.

    Shapes: indices, starts, cu_lens: int32[num_writes]; contents: base.dtype[cu_lens[-1]]; base: [rows, width].
    Writes: the named runs of base; every other element keeps its value.

    >>> table = np.zeros((3, 8), np.int32)
    >>> apply_staged_writes(
    ...     np.int32([2, 0]), np.int32([3, 1]), np.int32([3, 1, 2, -1, -2, -5]), np.int32([3, 6]), 2, table)
    >>> table.tolist()
    [[0, -1, -2, -5, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 3, 1, 2, 0, 0]]
    """
    for p in range(num_writes):
        # 1 locate the run in the packed contents
        low = int(cu_lens[p - 1]) if p > 0 else 0
        high = int(cu_lens[p])
        # 2 locate its place in the table
        row, start = int(indices[p]), int(starts[p])
        # 3 copy
        base[row, start : start + high - low] = contents[low:high]


class StagedWriteTensor:
    """A table with its staged changes. Rows are persistent places; a one-column table takes `stage_write_elem`.

    `rows_written` counts the runs applied by the latest `apply`, `total_rows_written` those of all of them and
    `total_values_written` their elements: "no block boundary was crossed, so nothing was sent" is a statement about
    these counters.
    """

    def __init__(self, rows: int, width: int, dtype: type[np.generic]) -> None:
        self.table = np.zeros((rows, width), dtype)  # [rows, width]
        self.rows_written = 0
        self.total_rows_written = 0
        self.total_values_written = 0
        self._clear()

    def _clear(self) -> None:
        self._indices: list[int] = []
        self._starts: list[int] = []
        self._contents: list[int] = []
        self._cu_lens: list[int] = []

    @property
    def total_bytes_staged(self) -> int:
        """What all applied runs took to send: their elements, and for each run its row, its start and its end."""
        places = 3 * self.total_rows_written * np.dtype(np.int32).itemsize
        return places + self.total_values_written * self.table.itemsize

    def stage_write(self, row: int, start: int, values: Sequence[int]) -> None:
        """Stage `table[row, start : start + len(values)] = values`. No values, no entry."""
        assert row >= 0, row
        assert start >= 0, start
        if len(values) == 0:
            return
        self._indices.append(row)
        self._starts.append(start)
        self._contents.extend(values)
        self._cu_lens.append(len(self._contents))

    def stage_write_elem(self, row: int, value: int) -> None:
        self.stage_write(row, 0, (value,))

    def apply(self) -> None:
        """Apply and forget what is staged."""
        self.rows_written = len(self._indices)
        if not self._indices:
            return
        self.total_rows_written += self.rows_written
        self.total_values_written += len(self._contents)
        apply_staged_writes(
            np.array(self._indices, np.int32),
            np.array(self._starts, np.int32),
            np.array(self._contents, self.table.dtype),
            np.array(self._cu_lens, np.int32),
            self.rows_written,
            self.table,
        )
        self._clear()
