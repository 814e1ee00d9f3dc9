"""Block tables: which physical block holds the n-th run of tokens of a request, per KV cache group.

The persistent tables are indexed by row and changed by staged writes alone. Every step the rows of the batch are
gathered, in batch order, into a second set of tables at fixed addresses, which attention reads.
Twin: cpu_reference/block_table.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpu_backend.group_tables import device_integers, forget_pointer_table, pointer_table
from gpu_backend.packed_copy import PackedCopy
from gpu_backend.staged_write import StagedWriteTensor
from gpu_backend.triton_support import entry, launch, signature, tile, tl, triton
from runner_api.constants import NULL_BLOCK_ID
from runner_api.kv_cache import KVCacheConfig


@entry
@signature(
    {
        "*i64": "idx_mapping source_pointers out_pointers source_strides out_strides",
        "*i32": "num_computed_tokens num_blocks block_sizes window_reach",
    },
    NULL=NULL_BLOCK_ID,
    BLOCK=1024,
)
@triton.jit(do_not_specialize=["num_blocks_stride", "num_reqs"])
def _gather_block_tables_kernel(
    idx_mapping, num_computed_tokens, num_blocks, num_blocks_stride, block_sizes, window_reach, num_reqs,
    source_pointers, out_pointers, source_strides, out_strides, NULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    width = tl.load(out_strides + g)
    out = tl.load(out_pointers + g).to(tl.pointer_type(tl.int32)) + i * width
    if i < num_reqs:
        # 1 the request's row and how much of it is defined
        row = tl.load(idx_mapping + i)
        n = tl.load(num_blocks + g * num_blocks_stride + row).to(tl.int64)
        source = tl.load(source_pointers + g).to(tl.pointer_type(tl.int32)) + row * tl.load(source_strides + g)
        reach = tl.load(window_reach + g)
        behind = tl.maximum(tl.load(num_computed_tokens + row) - reach, 0) // tl.load(block_sizes + g)
        behind = tl.where(reach > 0, behind, 0)
        for first in range(0, n, BLOCK):
            column = first + tl.arange(0, BLOCK)
            # 2 copy the defined columns
            blocks = tl.load(source + column, mask=column < n, other=NULL)
            # 3 hide what the window has left behind
            tl.store(out + column, tl.where(column < behind, NULL, blocks), mask=column < n)
    else:
        # 4 padding rows own nothing
        for first in range(0, width, BLOCK):
            column = first + tl.arange(0, BLOCK)
            tl.store(out + column, tl.full((BLOCK,), NULL, tl.int32), mask=column < width)


def gather_block_tables(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    num_blocks: torch.Tensor,
    block_sizes: Sequence[int],
    window_reach: Sequence[int],
    num_reqs: int,
    num_rows: int,
    block_tables: Sequence[torch.Tensor],
    input_block_tables: Sequence[torch.Tensor],
) -> None:
    """Copy the batch's rows of every group's table into batch order, and blank the rows behind them.

    Entries that lie wholly before the reach of a sliding window become the null block: their blocks may already
    belong to someone else. One program per row and group.

    Shapes: idx_mapping: int64[N]; num_computed_tokens: int32[N] by row; num_blocks: int32[G, N] by row;
    block_sizes, window_reach: int[G] (reach 0 = keep all); block_tables, input_block_tables: G times int32[N, W_g].
    Writes: of each input table, row i < num_reqs in columns < num_blocks; rows num_reqs .. num_rows-1 whole (null
    block). Columns past num_blocks keep old values, which nothing may read.
    """
    assert all(t.is_contiguous() for t in input_block_tables), "a row's width is its stride"
    source, out, device = pointer_table(block_tables), pointer_table(input_block_tables), idx_mapping.device
    launch(
        _gather_block_tables_kernel, (max(num_rows, num_reqs), len(block_tables)),
        idx_mapping, num_computed_tokens, num_blocks, num_blocks.stride(0),
        device_integers(block_sizes, device), device_integers(window_reach, device), num_reqs,
        source.pointers, out.pointers, source.strides, out.strides,
        NULL=NULL_BLOCK_ID, BLOCK=tile(max(t.shape[1] for t in block_tables)),
    )  # fmt: skip


@entry
@signature({"*i32": "block_table kernel_block_table"}, BLOCKS_PER_KV_BLOCK=2, BLOCK=1024)
@signature({"*i32": "block_table kernel_block_table"}, BLOCKS_PER_KV_BLOCK=3, BLOCK=1024)
@triton.jit(do_not_specialize=["num_rows", "width", "kernel_block_stride"])
def _map_to_kernel_block_table_kernel(
    block_table, table_stride, kernel_block_stride, num_rows, kernel_block_table, width,
    BLOCKS_PER_KV_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Element e of the flat [rows, width] run is column e % width of row e // width.
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = e // width
    # 1 the block that each entry lies in, and which part of it the entry is
    column = e % width
    place = block_table + row * table_stride + column // BLOCKS_PER_KV_BLOCK
    block = tl.load(place, mask=row < num_rows, other=0).to(tl.int64)
    part = column % BLOCKS_PER_KV_BLOCK
    # 2 the kernel block
    tl.store(kernel_block_table + e, (block * kernel_block_stride + part).to(tl.int32), mask=row < num_rows)


def map_to_kernel_block_table(
    block_table: torch.Tensor,
    blocks_per_kv_block: int,
    kernel_block_stride: int,
    num_rows: int,
    kernel_block_table: torch.Tensor,
) -> None:
    """Name the kernel blocks inside of each block, for attention whose blocks are smaller than the allocator's.

    Block b holds the kernel blocks b * kernel_block_stride + 0 .. blocks_per_kv_block - 1. The stride is
    blocks_per_kv_block where blocks lie one behind the other, and more where something else lies between them. Without
    gaps a token has the same slot in both views, so that slot mappings know of blocks alone. The null block becomes
    the kernel blocks inside of it. Each entry is expanded by itself: it is the same whether that is done when attention
    is prepared, as here in both layouts, or when a row grows (vLLM V1). A program owns a tile of entries.

    Shapes: block_table: int32[num_rows or more, W]; kernel_block_table: int32[num_rows or more, W *
    blocks_per_kv_block]. Ids of kernel blocks fit into 32 bits.
    Writes: of kernel_block_table, the first num_rows rows whole; what was not defined is not defined there either.
    """
    assert kernel_block_table.is_contiguous(), "a row's width is its stride"
    width = kernel_block_table.shape[1]
    count = tile(num_rows * width)
    launch(
        _map_to_kernel_block_table_kernel, (triton.cdiv(num_rows * width, count),),
        block_table, block_table.stride(0), kernel_block_stride, num_rows, kernel_block_table, width,
        BLOCKS_PER_KV_BLOCK=blocks_per_kv_block, BLOCK=count,
    )  # fmt: skip


class BlockTables:
    """The persistent tables of all groups, their gathered copies and the slot-mapping buffer.

    G groups, N rows, W_g columns of group g, T = max_num_batched_tokens. `num_blocks_np` is the host's own table; it
    is sent whole every step and read on the device as `num_blocks`.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        window_reach: Sequence[int],
        device: torch.device,
    ) -> None:
        specs = [group.spec for group in kv_cache_config.groups]
        self.block_sizes = [spec.block_size for spec in specs]  # int[G]
        self.slot_mapping_enabled = [spec.has_slot_mapping for spec in specs]  # bool[G]
        self.dcp_sharded = self.slot_mapping_enabled  # bool[G], groups whose tokens ranks would share out
        self.window_reach = list(window_reach)  # int[G]
        widths = [spec.block_table_width(max_model_len) for spec in specs]
        self._tables = [StagedWriteTensor(max_num_reqs, w, np.int32, device) for w in widths]
        self.block_tables = [t.table for t in self._tables]  # G times int32[N, W_g], by row
        self.num_blocks_np = np.zeros((len(specs), max_num_reqs), np.int32)  # int32[G, N], host
        self.num_blocks: torch.Tensor  # int32[G, N], device; set by `bind`
        self.input_block_tables = [
            torch.zeros((max_num_reqs, w), dtype=torch.int32, device=device) for w in widths
        ]  # by batch index
        self.slot_mappings = torch.zeros(
            (len(specs), max_num_batched_tokens), dtype=torch.int64, device=device
        )  # int64[G, T]
        # Rows of the gathered tables that may hold something: a smaller batch must blank what a larger one left.
        self.num_dirty_rows = 0

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        return {"num_blocks": self.num_blocks_np}

    def bind(self, packed: PackedCopy) -> None:
        """Take the device copy of the host's table, and bring the lists of groups to the device."""
        self.num_blocks = packed.views["num_blocks"]
        device = self.slot_mappings.device
        for tensors in (self.block_tables, self.input_block_tables):
            pointer_table(tensors)
        for values in (self.block_sizes, self.window_reach, self.slot_mapping_enabled):
            device_integers(values, device)

    def append_block_ids(self, row: int, block_ids: Sequence[Sequence[int]], *, overwrite: bool) -> None:
        """Stage a request's new blocks: behind the ones it has, or in place of them."""
        for g, ids in enumerate(block_ids):
            start = 0 if overwrite else int(self.num_blocks_np[g, row])
            self._tables[g].stage_write(row, start, ids)
            self.num_blocks_np[g, row] = start + len(ids)

    def pack(self, packed: PackedCopy) -> None:
        for table in self._tables:
            table.pack(packed)

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        for table in self._tables:
            table.apply(packed)

    @property
    def rows_written(self) -> int:
        """Runs applied by the latest `apply_staged_writes`, over all groups."""
        return sum(t.rows_written for t in self._tables)

    @property
    def total_values_written(self) -> int:
        """Block ids sent so far, over all groups; rebuilding every row every step would send far more."""
        return sum(t.total_values_written for t in self._tables)

    def traffic(self) -> dict[str, int]:
        """See `runner_api.loader.table_traffic`; what the device gathers is not counted."""
        return {
            "entries": self.total_values_written, "bytes_staged": sum(t.total_bytes_staged for t in self._tables)
        }  # fmt: skip

    def rows_to_fill(self, num_reqs: int, num_reqs_padded: int) -> int:
        """How many rows the next gather must define; remembers how many it leaves dirty."""
        rows = max(num_reqs_padded, self.num_dirty_rows)
        self.num_dirty_rows = num_reqs
        return rows

    def row_tables(self) -> dict[str, torch.Tensor]:
        """Every table by row."""
        return {f"block_table {g}": table for g, table in enumerate(self.block_tables)}

    def row_widths(self, row: int) -> dict[str, int]:
        """Of a live row: how many elements mean something."""
        return {f"block_table {g}": int(counts[row]) for g, counts in enumerate(self.num_blocks_np)}

    def release(self) -> None:
        """Let go of the tables that are kept by address."""
        for tensors in (self.block_tables, self.input_block_tables):
            forget_pointer_table(tensors)
