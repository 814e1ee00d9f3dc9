"""Block tables of the dense layout: a row per batch index, of which each step sends the first n, whole.

Sending a prefix is what makes the rows dense: it is one copy without any gathering, and it needs live rows to stand
side by side. (Fixed rows are sent as differences instead, and gathered on the device.) The host's tables are pinned and
copied from in place, so that they may be written inside of the staging's barrier alone.
Source: vLLM V1 `BlockTable`. Twin: cpu_reference/dense/block_table.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpu_backend.copy_engine import CopyEngine
from gpu_backend.dense.row_fields import RowFields
from gpu_backend.dense.staging import pinned_table
from gpu_backend.group_tables import device_integers, forget_pointer_table, pointer_table
from gpu_backend.packed_copy import PackedCopy
from runner_api.constants import NULL_BLOCK_ID
from runner_api.kv_cache import KVCacheConfig


class DenseBlockTables:
    """The host's tables, what the device has of them, and the slot-mapping buffer.

    G groups, N rows, W_g columns of group g, T = max_num_batched_tokens. Rows are moved by `fields`. Slots are mapped
    from the device's tables: a block that a window has left behind is written no more.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        fields: RowFields,
        max_num_batched_tokens: int,
        max_model_len: int,
        window_reach: Sequence[int],
        device: torch.device,
        copies: CopyEngine,
    ) -> None:
        specs = [group.spec for group in kv_cache_config.groups]
        n, self._fields, self._copies = fields.max_num_reqs, fields, copies
        self.block_sizes = [spec.block_size for spec in specs]  # int[G]
        self.slot_mapping_enabled = [spec.has_slot_mapping for spec in specs]  # bool[G]
        self.dcp_sharded = self.slot_mapping_enabled  # bool[G], groups whose tokens ranks would share out
        self.window_reach = list(window_reach)  # int[G]
        widths = [spec.block_table_width(max_model_len) for spec in specs]
        self.num_blocks_np = np.zeros((len(specs), n), np.int32)  # int32[G, N]
        self._pinned = [pinned_table((n, w), np.int32, device) for w in widths]
        self.block_tables = []  # G times int32[N, W_g], the host's
        for g, pinned in enumerate(self._pinned):
            count = self.num_blocks_np[g]
            self.block_tables.append(fields.declare(f"block_table {g}", pinned.numpy(), NULL_BLOCK_ID, count))
            fields.declare(f"num_blocks {g}", count)
        # Where a window hides entries, what is sent is not what is kept.
        self._sent = [
            pinned_table(tuple(pinned.shape), np.int32, device) if reach > 0 else pinned
            for pinned, reach in zip(self._pinned, window_reach, strict=True)
        ]
        self.input_block_tables = [
            torch.zeros((n, w), dtype=torch.int32, device=device) for w in widths
        ]  # as committed, on the device
        self.slot_mappings = torch.zeros(
            (len(specs), max_num_batched_tokens), dtype=torch.int64, device=device
        )  # int64[G, T]
        # Every commit defines all that its step reads: nothing of an earlier one must stay.
        self.num_dirty_rows = n
        self.total_values_written = 0  # block ids laid into rows so far
        self.bytes_committed = 0  # by the latest commit
        self.total_bytes_committed = 0

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole: nothing, rows go by themselves."""
        return {}

    def bind(self, packed: PackedCopy) -> None:
        """Bring the lists of groups to the device."""
        pointer_table(self.input_block_tables)
        device = self.slot_mappings.device
        for values in (self.block_sizes, self.slot_mapping_enabled):
            device_integers(values, device)

    def append_block_ids(self, row: int, block_ids: Sequence[Sequence[int]], *, overwrite: bool) -> None:
        """Write a request's new blocks: behind the ones it has, or in place of them."""
        for g, ids in enumerate(block_ids):
            start = 0 if overwrite else int(self.num_blocks_np[g, row])
            self.block_tables[g][row, start : start + len(ids)] = ids
            self.num_blocks_np[g, row] = start + len(ids)
            self.total_values_written += len(ids)

    def commit(self, num_computed_tokens: np.ndarray, num_reqs: int, num_rows: int) -> None:
        """Send the first rows of every group, over their full width; rows behind them, up to num_rows, are blank.

        Entries that lie wholly before the reach of a sliding window are sent as the null block: their blocks may
        already belong to someone else.

        Shapes: num_computed_tokens: int32[N] by row, the host's.
        """
        self.bytes_committed = 0
        for g, out in enumerate(self.input_block_tables):
            # 1 the live prefix
            sent = self._sent[g][:num_reqs]
            if self.window_reach[g] > 0:
                rows = sent.numpy()
                rows[...] = self.block_tables[g][:num_reqs]
                # 2 hide what a window has left behind
                behind = np.maximum(num_computed_tokens[:num_reqs] - self.window_reach[g], 0) // self.block_sizes[g]
                hidden = np.minimum(behind, self.num_blocks_np[g, :num_reqs])
                rows[np.arange(rows.shape[1]) < hidden[:, None]] = NULL_BLOCK_ID
            if num_reqs > 0:
                self._copies.copy(out[:num_reqs], sent)
            self.bytes_committed += sent.nbytes
            # 3 padding rows own nothing
            if num_rows > num_reqs:
                out[num_reqs:num_rows].fill_(NULL_BLOCK_ID)
        self.total_bytes_committed += self.bytes_committed

    def pack(self, packed: PackedCopy) -> None:
        """Nothing is staged: rows were committed."""

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        """Nothing was staged."""

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
        return {f"block_table {g}": int(counts[row]) for g, counts in enumerate(self.num_blocks_np)}

    def release(self) -> None:
        """Let go of the tables that are kept by address."""
        forget_pointer_table(self.input_block_tables)
        self._fields.release()
