"""Row changes collected on the host, packed into one buffer, applied to a persistent table in one go.

A table of N rows is too large to send every step, and most rows do not change. Between two steps the host stages
short runs of values; they travel in the step's packed copy, and `apply_staged_writes` lays them into the table.
Twin: cpu_reference/staged_write.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpu_backend.packed_copy import PackedCopy, torch_dtype
from gpu_backend.triton_support import entry, launch, signature, tile, tl, triton


@entry
@signature({"*i32": "indices starts cu_lens contents base"}, BLOCK=1024)
@signature({"*i32": "indices starts cu_lens", "*fp32": "contents base"}, BLOCK=16, base_stride=1)
@triton.jit
def _apply_staged_writes_kernel(indices, starts, contents, cu_lens, base, base_stride, BLOCK: tl.constexpr):
    p = tl.program_id(0)
    # 1 locate the run in the packed contents
    low = tl.load(cu_lens + p - 1, mask=p > 0, other=0)
    high = tl.load(cu_lens + p)
    # 2 locate its place in the table; the row is widened before it is multiplied
    row = tl.load(indices + p).to(tl.int64)
    place = base + row * base_stride + tl.load(starts + p)
    # 3 copy
    for first in range(0, high - low, BLOCK):
        j = first + tl.arange(0, BLOCK)
        values = tl.load(contents + low + j, mask=j < high - low, other=0)
        tl.store(place + j, values, mask=j < high - low)


def apply_staged_writes(
    indices: torch.Tensor,
    starts: torch.Tensor,
    contents: torch.Tensor,
    cu_lens: torch.Tensor,
    num_writes: int,
    base: torch.Tensor,
) -> None:
    """Lay `num_writes` runs of values into the rows of a table.

    Run p is `contents[cu_lens[p-1] : cu_lens[p]]` (from 0 for p = 0) and goes to `base[indices[p], starts[p]:]`. Runs
    never overlap: one program copies each, in no particular order.

    Shapes: indices, starts, cu_lens: int32[num_writes]; contents: base.dtype[cu_lens[-1]]; base: [rows, width].
    Writes: the named runs of base; every other element keeps its value.
    """
    assert base.stride(1) == 1 or base.shape[1] == 1, "values of a row lie side by side"
    launch(
        _apply_staged_writes_kernel, (num_writes,), indices, starts, contents, cu_lens, base, base.stride(0),
        BLOCK=tile(base.shape[1]),
    )  # fmt: skip


class StagedWriteTensor:
    """A table with its staged changes. Rows are persistent places; a one-column table takes `stage_write_elem`.

    `pack` hands the staged runs to the step's copy, `apply` lays them in once that is sent. `rows_written` counts the
    runs applied by the latest `apply`, `total_rows_written` those of all of them and `total_values_written` their
    elements: "no block boundary was crossed, so nothing was sent" is a statement about these counters.
    """

    def __init__(self, rows: int, width: int, dtype: type[np.generic], device: torch.device) -> None:
        self.dtype = dtype
        self.table = torch.zeros((rows, width), dtype=torch_dtype(np.dtype(dtype)), device=device)  # [rows, width]
        self.rows_written = 0
        self.total_rows_written = 0
        self.total_values_written = 0
        self._tickets: tuple[int, ...] = ()
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
        return places + self.total_values_written * np.dtype(self.dtype).itemsize

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

    def pack(self, packed: PackedCopy) -> None:
        """Add what is staged to the copy that is about to be sent, and forget it here."""
        self._tickets = ()
        if not self._indices:
            return
        arrays = ((self._indices, np.int32), (self._starts, np.int32), (self._contents, self.dtype),
                  (self._cu_lens, np.int32))  # fmt: skip
        self._tickets = tuple(packed.add(np.array(values, dtype)) for values, dtype in arrays)
        self._clear()

    def apply(self, packed: PackedCopy) -> None:
        """Apply what was packed and has been sent."""
        self.rows_written = 0
        if not self._tickets:
            return
        indices, starts, contents, cu_lens = (packed.extra[ticket] for ticket in self._tickets)
        self.rows_written = len(indices)
        self.total_rows_written += self.rows_written
        self.total_values_written += len(contents)
        self._tickets = ()
        apply_staged_writes(indices, starts, contents, cu_lens, self.rows_written, self.table)
