"""Block tables: which physical block holds the n-th run of tokens of a request, per KV cache group.

The persistent tables are indexed by row and changed by staged writes alone. Every step the rows of the batch are
gathered, in batch order, into a second set of tables at fixed addresses, which attention reads.
Twin: gpu_backend/block_table.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cpu_reference.staged_write import StagedWriteTensor
from runner_api.constants import NULL_BLOCK_ID
from runner_api.kv_cache import KVCacheConfig


def gather_block_tables(
    idx_mapping: np.ndarray,
    num_computed_tokens: np.ndarray,
    num_blocks: np.ndarray,
    block_sizes: Sequence[int],
    window_reach: Sequence[int],
    num_reqs: int,
    num_rows: int,
    block_tables: Sequence[np.ndarray],
    input_block_tables: Sequence[np.ndarray],
) -> None:
    """Copy the batch's rows of every group's table into batch order, and blank the rows behind them.

    Entries that lie wholly before the reach of a sliding window become the null block: their blocks may already
    belong to someone else.

    Shapes: idx_mapping: int64[N]; num_computed_tokens: int32[N] by row; num_blocks: int32[G, N] by row;
    block_sizes, window_reach: int[G] (reach 0 = keep all); block_tables, input_block_tables: G times int32[N, W_g].
    Writes: of each input table, row i < num_reqs in columns < num_blocks; rows num_reqs .. num_rows-1 whole (null
    block). Columns past num_blocks keep old values, which nothing may read.
    """
    for g, (source, out) in enumerate(zip(block_tables, input_block_tables, strict=True)):
        for i in range(num_reqs):
            # 1 the request's row and how much of it is defined
            row = int(idx_mapping[i])
            n = int(num_blocks[g, row])
            # 2 copy the defined columns
            out[i, :n] = source[row, :n]
            # 3 hide what the window has left behind
            if window_reach[g] > 0:
                behind = max(int(num_computed_tokens[row]) - window_reach[g], 0) // block_sizes[g]
                out[i, : min(behind, n)] = NULL_BLOCK_ID
        # 4 padding rows own nothing
        out[num_reqs:num_rows] = NULL_BLOCK_ID


def map_to_kernel_block_table(
    block_table: np.ndarray,
    blocks_per_kv_block: int,
    kernel_block_stride: int,
    num_rows: int,
    kernel_block_table: np.ndarray,
) -> None:
    """Name the kernel blocks inside of each block, for attention whose blocks are smaller than the allocator's.

    Block b holds the kernel blocks b * kernel_block_stride + 0 .. blocks_per_kv_block - 1. The stride is
    blocks_per_kv_block where blocks lie one behind the other, and more where something else lies between them. Without
    gaps a token has the same slot in both views, so that slot mappings know of blocks alone. The null block becomes
    the kernel blocks inside of it. Each entry is expanded by itself: it is the same whether that is done when attention
    is prepared, as here in both layouts, or when a row grows (vLLM V1).

    Shapes: block_table: int32[num_rows or more, W]; kernel_block_table: int32[num_rows or more, W *
    blocks_per_kv_block]. Ids of kernel blocks fit into 32 bits.
    Writes: of kernel_block_table, the first num_rows rows whole; what was not defined is not defined there either.

    >>> out = np.zeros((1, 6), np.int32)
    >>> map_to_kernel_block_table(np.int32([[5, 2, 0]]), 2, 2, 1, out)
    >>> out[0].tolist()
    [10, 11, 4, 5, 0, 1]
    """
    # 1 the block that each entry lies in, and which part of it the entry is
    column = np.arange(kernel_block_table.shape[1])
    block = block_table[:num_rows, column // blocks_per_kv_block].astype(np.int64)
    part = column % blocks_per_kv_block
    # 2 the kernel block
    kernel_block_table[:num_rows] = block * kernel_block_stride + part


class BlockTables:
    """The persistent tables of all groups, their gathered copies and the slot-mapping buffer.

    G groups, N rows, W_g columns of group g, T = max_num_batched_tokens.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        window_reach: Sequence[int],
    ) -> None:
        specs = [group.spec for group in kv_cache_config.groups]
        self.block_sizes = [spec.block_size for spec in specs]  # int[G]
        self.slot_mapping_enabled = [spec.has_slot_mapping for spec in specs]  # bool[G]
        self.dcp_sharded = self.slot_mapping_enabled  # bool[G], groups whose tokens ranks would share out
        self.window_reach = list(window_reach)  # int[G]
        widths = [spec.block_table_width(max_model_len) for spec in specs]
        self._tables = [StagedWriteTensor(max_num_reqs, w, np.int32) for w in widths]
        self.block_tables = [t.table for t in self._tables]  # G times int32[N, W_g], by row
        self.num_blocks = np.zeros((len(specs), max_num_reqs), np.int32)  # int32[G, N]
        self.input_block_tables = [np.zeros((max_num_reqs, w), np.int32) for w in widths]  # by batch index
        self.slot_mappings = np.zeros((len(specs), max_num_batched_tokens), np.int64)  # int64[G, T]
        # Rows of the gathered tables that may hold something: a smaller batch must blank what a larger one left.
        self.num_dirty_rows = 0
        self.total_bytes_gathered = 0

    def append_block_ids(self, row: int, block_ids: Sequence[Sequence[int]], *, overwrite: bool) -> None:
        """Stage a request's new blocks: behind the ones it has, or in place of them."""
        for g, ids in enumerate(block_ids):
            start = 0 if overwrite else int(self.num_blocks[g, row])
            self._tables[g].stage_write(row, start, ids)
            self.num_blocks[g, row] = start + len(ids)

    def apply_staged_writes(self) -> None:
        for table in self._tables:
            table.apply()

    @property
    def rows_written(self) -> int:
        """Runs applied by the latest `apply_staged_writes`, over all groups."""
        return sum(t.rows_written for t in self._tables)

    @property
    def total_values_written(self) -> int:
        """Block ids sent so far, over all groups; rebuilding every row every step would send far more."""
        return sum(t.total_values_written for t in self._tables)

    def count_gather(self, rows: np.ndarray) -> None:
        """Remember what the gather of these rows copies. rows: int64[R]."""
        self.total_bytes_gathered += int(self.num_blocks[:, rows].sum()) * np.dtype(np.int32).itemsize

    def traffic(self) -> dict[str, int]:
        """See `runner_api.loader.table_traffic`."""
        return {
            "entries": self.total_values_written, "bytes_staged": sum(t.total_bytes_staged for t in self._tables),
            "bytes_gathered": self.total_bytes_gathered,
        }  # fmt: skip

    def rows_to_fill(self, num_reqs: int, num_reqs_padded: int) -> int:
        """How many rows the next gather must define; remembers how many it leaves dirty."""
        rows = max(num_reqs_padded, self.num_dirty_rows)
        self.num_dirty_rows = num_reqs
        return rows

    def row_tables(self) -> dict[str, np.ndarray]:
        """Every table by row."""
        return {f"block_table {g}": table for g, table in enumerate(self.block_tables)}

    def row_widths(self, row: int) -> dict[str, int]:
        """Of a live row: how many elements mean something."""
        return {f"block_table {g}": int(counts[row]) for g, counts in enumerate(self.num_blocks)}
