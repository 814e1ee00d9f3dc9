"""Flat position to physical KV slot, for every KV cache group. Twin: gpu_backend/slot_mapping.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cpu_reference.ragged import token_owners
from runner_api.constants import PAD_SLOT_ID


def compute_slot_mappings(
    idx_mapping: np.ndarray,
    query_start_loc: np.ndarray,
    positions: np.ndarray,
    block_sizes: Sequence[int],
    slot_mapping_enabled: Sequence[bool],
    num_reqs: int,
    block_tables: Sequence[np.ndarray],
    slot_mappings: np.ndarray,
) -> None:
    """Name, for each token of the batch, the slot of the flat KV cache that its K and V go to.

    slot = block_table[row, position // block_size] * block_size + position % block_size, from the persistent table.

    Shapes: idx_mapping: int64[N] (a negative row owns no slot); query_start_loc: int32[N+1]; positions: int64[T];
    block_sizes, slot_mapping_enabled: [G]; block_tables: G times int32[N, W_g]; slot_mappings: int64[G, T].
    Writes: slot_mappings whole. The tail is PAD_SLOT_ID from the real token count on, not from the padded one:
    the gap between them still holds slots of an earlier step, which a padded graph would overwrite.

    >>> out = np.zeros((1, 8), np.int64)
    >>> table = np.int32([[2, 3], [4, 5], [6, 7], [8, 9]])
    >>> compute_slot_mappings(np.arange(4), np.int32([0, 2, 2, 3, 6]), np.int64([5, 6, 12, 1, 2, 3, 0, 0]),
    ...                       [8], [True], 4, [table], out)
    >>> out[0].tolist()
    [21, 22, 60, 65, 66, 67, -1, -1]
    """
    # 1 per token: the batch index of its request, and from it the row
    batch_idx, _ = token_owners(query_start_loc, num_reqs)
    num_tokens = len(batch_idx)
    rows = idx_mapping[batch_idx]
    for g, (table, block_size) in enumerate(zip(block_tables, block_sizes, strict=True)):
        if not slot_mapping_enabled[g]:
            slot_mappings[g] = PAD_SLOT_ID
            continue
        # 2 block index and offset of each position; what a token without a row says is never used as an index
        block_index = np.where(rows >= 0, positions[:num_tokens] // block_size, 0)
        offset = positions[:num_tokens] % block_size
        # 3 physical block from the request's row
        block = table[np.maximum(rows, 0), block_index].astype(np.int64)
        # 4 slot; 64 bits wide before multiplying
        slot_mappings[g, :num_tokens] = np.where(rows >= 0, block * block_size + offset, PAD_SLOT_ID)
        # 5 tail
        slot_mappings[g, num_tokens:] = PAD_SLOT_ID
