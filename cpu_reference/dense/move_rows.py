"""All moves of a step at once, as a device makes them. Twin: gpu_backend/dense/move_rows.py.

The reference itself moves one row after the other (`row_fields`); this is what that comes to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def move_rows(moves: np.ndarray, max_length: int, tables: Sequence[np.ndarray]) -> None:
    """Give rows what other rows hold, all at once: every source is read before any target is written.

    A move is (table, source row, target row, how many entries); from NO_ROW come zeros. So a chain of moves, a swap and
    a clearing are all told alike, by what each row is to hold in the end. No two moves have the same table and target.

    Shapes: moves: int64[4, P]; max_length: the largest number of entries; tables: [N, W_k] of 32-bit elements.
    Writes: the named entries of the tables.

    >>> table = np.int32([[1, 2], [3, 4], [5, 6]])
    >>> move_rows(np.int64([[0, 0, 0], [1, 0, -1], [0, 1, 2], [2, 2, 1]]), 2, [table])
    >>> table.tolist()
    [[3, 4], [1, 2], [0, 6]]
    """
    assert moves[3].max(initial=0) <= max_length
    # 1 what each move takes along, before anything is written; nothing comes from no row
    kept = [tables[table][source, :n].copy() if source >= 0 else 0 for table, source, _, n in moves.T]
    # 2 to its place
    for (table, _, target, n), values in zip(moves.T, kept, strict=True):
        tables[table][target, :n] = values
