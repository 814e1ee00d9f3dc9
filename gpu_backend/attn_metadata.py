"""What attention must know of the batch: built once per KV cache group and step, shared by all its layers.

Device tensors for kernels, host numbers for launches: nothing is read back.
Twin: cpu_reference/attn_metadata.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpu_backend.block_table import map_to_kernel_block_table
from runner_api.kv_cache import KVCacheConfig


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One group's view of one step. R' requests (padded only under full graphs), tp tokens after padding."""

    query_start_loc: torch.Tensor  # int32[R'+1]
    seq_lens: torch.Tensor  # int32[R'] keys of each request, its new tokens included
    block_table: torch.Tensor  # int32[R', W] by batch index, of kernel blocks
    slot_mapping: torch.Tensor  # int64[tp], PAD_SLOT_ID in the tail
    num_reqs: int  # R'
    num_actual_tokens: int  # tokens that attention computes
    max_query_len: int
    max_seq_len: int  # an upper bound
    # Requests [0, num_decodes) have short queries and own the first num_decode_tokens tokens; the rest are prefills.
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    window: int | None = None  # keys further behind the query than this are not read


def split_decodes_and_prefills(
    query_start_loc: np.ndarray, num_reqs: int, num_tokens: int, max_query_len: int, decode_threshold: int = 1
) -> tuple[int, int, int, int]:
    """Where the leading run of short queries ends: (decodes, prefills, decode tokens, prefill tokens).

    Everything behind the first long query counts as prefill, even a short one; that is why batches are sorted.

    >>> split_decodes_and_prefills(np.int32([0, 1, 2, 7, 8]), 4, 8, 5)
    (2, 2, 2, 6)
    """
    # 1 nothing long
    if max_query_len <= decode_threshold:
        return num_reqs, 0, num_tokens, 0
    # 2 first long query
    is_prefill = np.diff(query_start_loc[: num_reqs + 1]) > decode_threshold
    if not is_prefill.any():
        return num_reqs, 0, num_tokens, 0
    first = int(np.argmax(is_prefill))
    # 3 split there
    decode_tokens = int(query_start_loc[first])
    return first, num_reqs - first, decode_tokens, num_tokens - decode_tokens


class AttentionMetadataBuilder:
    """Builds one `AttentionMetadata` per group; `num_builds` counts, so that a test can say "once a step".

    input_block_tables: G times int32[N, W_g], in batch order, at addresses that stay. Attention of a group whose kernel
    blocks are smaller reads a table of these, which each build makes.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, input_block_tables: Sequence[torch.Tensor]) -> None:
        self.groups = kv_cache_config.groups
        self.input_block_tables = input_block_tables
        parts = [group.blocks_per_kv_block for group in self.groups]
        # int32[N, W_g * r]; where a block is one kernel block (r = 1), the group's table itself
        self.kernel_block_tables = [
            table if r == 1 else table.new_zeros((len(table), table.shape[1] * r))
            for table, r in zip(input_block_tables, parts, strict=True)
        ]
        self.num_builds = 0

    def build(
        self,
        query_start_loc: torch.Tensor,
        query_start_loc_np: np.ndarray,
        seq_lens: torch.Tensor,
        slot_mappings: torch.Tensor,
        num_reqs: int,
        num_tokens: int,
        num_tokens_padded: int,
        max_query_len: int,
        max_seq_len: int,
    ) -> dict[str, AttentionMetadata]:
        """Layer name to metadata; the layers of a group get the same object.

        query_start_loc_np: the host's own copy of query_start_loc, int32[num_reqs+1], from which the split is told.
        """
        split = split_decodes_and_prefills(query_start_loc_np, num_reqs, num_tokens, max_query_len)
        by_layer: dict[str, AttentionMetadata] = {}
        for g, group in enumerate(self.groups):
            self.num_builds += 1
            r, table = group.blocks_per_kv_block, self.kernel_block_tables[g]
            if r > 1:
                map_to_kernel_block_table(self.input_block_tables[g], r, r, num_reqs, table)
            metadata = AttentionMetadata(
                query_start_loc[: num_reqs + 1],
                seq_lens[:num_reqs],
                table[:num_reqs],
                slot_mappings[g, :num_tokens_padded],
                num_reqs,
                num_tokens,
                max_query_len,
                max_seq_len,
                *split,
                window=group.spec.sliding_window,
            )
            by_layer.update(dict.fromkeys(group.layer_names, metadata))
        return by_layer
