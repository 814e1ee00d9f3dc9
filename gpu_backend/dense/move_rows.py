"""All moves of a step at once, in tables that the device alone keeps. Twin: cpu_reference/dense/move_rows.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_backend.group_tables import pointer_table
from gpu_backend.triton_support import entry, launch, signature, tile, tl, triton

_TYPES = {"*i64": "moves pointers strides", "*i32": "kept"}


@entry
@signature(_TYPES, BLOCK=1024)
@triton.jit(do_not_specialize=["num_moves", "max_length"])
def _keep_rows_kernel(moves, num_moves, pointers, strides, kept, max_length, BLOCK: tl.constexpr):
    p = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    table = tl.load(moves + p)
    source = tl.load(moves + num_moves + p)
    length = tl.load(moves + 3 * num_moves + p)
    # 1 what each move takes along, before anything is written; nothing comes from no row
    held = length * (source >= 0).to(tl.int64)
    row = tl.load(pointers + table).to(tl.pointer_type(tl.int32)) + source * tl.load(strides + table)
    values = tl.load(row + j, mask=j < held, other=0)
    tl.store(kept + p * max_length + j, values, mask=j < length)


@entry
@signature(_TYPES, BLOCK=1024)
@triton.jit(do_not_specialize=["num_moves", "max_length"])
def _place_rows_kernel(moves, num_moves, pointers, strides, kept, max_length, BLOCK: tl.constexpr):
    p = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    table = tl.load(moves + p)
    target = tl.load(moves + 2 * num_moves + p)
    length = tl.load(moves + 3 * num_moves + p)
    # 2 to its place
    row = tl.load(pointers + table).to(tl.pointer_type(tl.int32)) + target * tl.load(strides + table)
    values = tl.load(kept + p * max_length + j, mask=j < length, other=0)
    tl.store(row + j, values, mask=j < length)


def move_rows(moves: torch.Tensor, max_length: int, tables: Sequence[torch.Tensor]) -> None:
    """Give rows what other rows hold, all at once: every source is read before any target is written.

    A move is (table, source row, target row, how many entries); from NO_ROW come zeros. So a chain of moves, a swap and
    a clearing are all told alike, by what each row is to hold in the end. No two moves have the same table and target.
    Two launches, since one program may not read what another one writes; a program moves a tile of a row.

    Shapes: moves: int64[4, P]; max_length: the largest number of entries; tables: [N, W_k] of 32-bit elements.
    Writes: the named entries of the tables.
    """
    assert all(t.element_size() == 4 and t.stride(1) == 1 for t in tables), "entries are copied as 32 bits"
    assert moves.is_contiguous(), "a column is a move"
    num_moves, table_list = moves.shape[1], pointer_table(tables)
    width = tile(max_length)
    kept = torch.empty(num_moves * max_length, dtype=torch.int32, device=moves.device)
    for kernel in (_keep_rows_kernel, _place_rows_kernel):
        launch(
            kernel, (num_moves, triton.cdiv(max_length, width)), moves, num_moves, table_list.pointers,
            table_list.strides, kept, max_length, BLOCK=width,
        )  # fmt: skip
