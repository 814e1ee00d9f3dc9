"""Block tables of the dense layout: a row per batch index, of which each step sends the first n, whole.

Sending a prefix is what makes the rows dense: it is one copy without any gathering, and it needs live rows to stand
side by side. (Fixed rows are sent as differences instead, and gathered on the device.)
Source: vLLM V1 `BlockTable`. Twin: gpu_backend/dense/block_table.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cpu_reference.dense.row_fields import RowFields
from runner_api.constants import NULL_BLOCK_ID
from runner_api.kv_cache import KVCacheConfig


class DenseBlockTables:
    """The host's tables, what was committed of them, and the slot-mapping buffer.

    G groups, N rows, W_g columns of group g, T = max_num_batched_tokens. Rows are moved by `fields`.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        fields: RowFields,
        max_num_batched_tokens: int,
        max_model_len: int,
        window_reach: Sequence[int],
    ) -> None:
        specs = [group.spec for group in kv_cache_config.groups]
        n, self._fields = fields.max_num_reqs, fields
        self.block_sizes = [spec.block_size for spec in specs]  # int[G]
        self.slot_mapping_enabled = [spec.has_slot_mapping for spec in specs]  # bool[G]
        self.dcp_sharded = self.slot_mapping_enabled  # bool[G], groups whose tokens ranks would share out
        self.window_reach = list(window_reach)  # int[G]
        widths = [spec.block_table_width(max_model_len) for spec in specs]
        self.num_blocks = np.zeros((len(specs), n), np.int32)  # int32[G, N]
        self.block_tables = []  # G times int32[N, W_g]
        for g, width in enumerate(widths):
            table, count = np.zeros((n, width), np.int32), self.num_blocks[g]
            self.block_tables.append(fields.declare(f"block_table {g}", table, NULL_BLOCK_ID, count))
            fields.declare(f"num_blocks {g}", count)
        self.input_block_tables = [np.zeros((n, w), np.int32) for w in widths]  # as committed
        self.slot_mappings = np.zeros((len(specs), max_num_batched_tokens), np.int64)  # int64[G, T]
        # Every commit defines all that its step reads: nothing of an earlier one must stay.
        self.num_dirty_rows = n
        self.total_values_written = 0  # block ids laid into rows so far
        self.bytes_committed = 0  # by the latest commit
        self.total_bytes_committed = 0

    def append_block_ids(self, row: int, block_ids: Sequence[Sequence[int]], *, overwrite: bool) -> None:
        """Write a request's new blocks: behind the ones it has, or in place of them."""
        for g, ids in enumerate(block_ids):
            start = 0 if overwrite else int(self.num_blocks[g, row])
            self.block_tables[g][row, start : start + len(ids)] = ids
            self.num_blocks[g, row] = start + len(ids)
            self.total_values_written += len(ids)

    def commit(self, num_computed_tokens: np.ndarray, num_reqs: int, num_rows: int) -> None:
        """Send the first rows of every group, over their full width; rows behind them, up to num_rows, are blank.

        Entries that lie wholly before the reach of a sliding window are sent as the null block: their blocks may
        already belong to someone else.

        Shapes: num_computed_tokens: int32[N] by row.
        """
        self.bytes_committed = 0
        for g, (table, out) in enumerate(zip(self.block_tables, self.input_block_tables, strict=True)):
            # 1 the live prefix
            sent = out[:num_reqs]
            sent[...] = table[:num_reqs]
            self.bytes_committed += sent.nbytes
            # 2 hide what a window has left behind
            if self.window_reach[g] > 0:
                behind = np.maximum(num_computed_tokens[:num_reqs] - self.window_reach[g], 0) // self.block_sizes[g]
                hidden = np.minimum(behind, self.num_blocks[g, :num_reqs])
                sent[np.arange(sent.shape[1]) < hidden[:, None]] = NULL_BLOCK_ID
            # 3 padding rows own nothing
            out[num_reqs:num_rows] = NULL_BLOCK_ID
        self.total_bytes_committed += self.bytes_committed

    def traffic(self) -> dict[str, int]:
        """See `runner_api.loader.table_traffic`; rows are moved elsewhere."""
        moved = sum(self._fields.moved[f"block_table {g}"] for g in range(len(self.block_tables)))
        return {
            "entries": self.total_values_written,
            "bytes_committed": self.total_bytes_committed,
            "entries_moved": moved,
        }

    def row_tables(self) -> dict[str, np.ndarray]:
        """Every table by row."""
        return {f"block_table {g}": table for g, table in enumerate(self.block_tables)}

    def row_widths(self, row: int) -> dict[str, int]:
        """Of a live row: how many elements mean something."""
        return {f"block_table {g}": int(counts[row]) for g, counts in enumerate(self.num_blocks)}
