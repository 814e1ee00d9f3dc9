"""Flat position to physical KV slot, for every KV cache group. Twin: gpu_backend/slot_mapping.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cpu_reference.ragged import token_owners
from runner_api.constants import PAD_SLOT_ID


def rank_and_local_position(positions: np.ndarray, dcp_size: int, dcp_interleave: int) -> tuple[np.ndarray, np.ndarray]:
    """The rank that keeps each position, and which of that rank's own positions it is.

    Runs of dcp_interleave positions go round the ranks; a rank counts its own without holes. With one rank nothing
    changes, whatever the interleave. Returns two int64 of the shape of positions.

    >>> rank, local = rank_and_local_position(np.int64([0, 5, 13, 31, 32, 37, 63]), 2, 4)
    >>> rank.tolist(), local.tolist()
    ([0, 1, 1, 1, 0, 1, 1], [0, 1, 5, 15, 16, 17, 31])
    """
    run = positions // dcp_interleave
    return run % dcp_size, run // dcp_size * dcp_interleave + positions % dcp_interleave


def compute_slot_mappings(
    idx_mapping: np.ndarray,
    query_start_loc: np.ndarray,
    positions: np.ndarray,
    block_sizes: Sequence[int],
    slot_mapping_enabled: Sequence[bool],
    dcp_sharded: Sequence[bool],
    dcp_size: int,
    dcp_rank: int,
    dcp_interleave: int,
    num_reqs: int,
    block_tables: Sequence[np.ndarray],
    slot_mappings: np.ndarray,
) -> None:
    """Name, for each token of the batch, the slot of the flat KV cache that its K and V go to.

    slot = block_table[row, position // block_size] * block_size + position % block_size, from the persistent table.
    In a sharded group the position is the rank's own (`rank_and_local_position`), and a token that another rank keeps
    has no slot: one block id stands for block_size tokens on every rank. Decode context parallelism is offered as index
    stages alone: runners refuse more than one rank, since nothing merges attention over ranks.

    Shapes: idx_mapping: int64[N] (a negative row owns no slot); query_start_loc: int32[N+1]; positions: int64[T];
    block_sizes, slot_mapping_enabled, dcp_sharded: [G] (not sharded: every rank keeps every token); block_tables: G
    times int32[N, W_g]; slot_mappings: int64[G, T]. dcp_interleave divides the block size of every sharded group.
    Writes: slot_mappings whole. The tail is PAD_SLOT_ID from the real token count on, not from the padded one:
    the gap between them still holds slots of an earlier step, which a padded graph would overwrite.

    >>> out = np.zeros((1, 8), np.int64)
    >>> table = np.int32([[2, 3], [4, 5], [6, 7], [8, 9]])
    >>> compute_slot_mappings(np.arange(4), np.int32([0, 2, 2, 3, 6]), np.int64([5, 6, 12, 1, 2, 3, 0, 0]),
    ...                       [8], [True], [True], 1, 0, 1, 4, [table], out)
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
        # 2 whether this rank keeps the token, and as which of its own positions
        size, rank = (dcp_size, dcp_rank) if dcp_sharded[g] else (1, 0)
        assert size == 1 or block_size % dcp_interleave == 0, "a run lies inside of a block"
        owner, local = rank_and_local_position(positions[:num_tokens], size, dcp_interleave)
        owned = (rows >= 0) & (owner == rank)
        # 3 block index and offset; what a token without a slot says is never used as an index
        block_index = np.where(owned, local // block_size, 0)
        offset = local % block_size
        # 4 physical block from the request's row
        block = table[np.maximum(rows, 0), block_index].astype(np.int64)
        # 5 slot; 64 bits wide before multiplying
        slot_mappings[g, :num_tokens] = np.where(owned, block * block_size + offset, PAD_SLOT_ID)
        # 6 tail
        slot_mappings[g, num_tokens:] = PAD_SLOT_ID


def compute_dcp_local_seq_lens(
    seq_lens: np.ndarray,
    dcp_size: int,
    dcp_rank: int,
    dcp_interleave: int,
    num_reqs: int,
    dcp_local_seq_lens: np.ndarray,
) -> None:
    """How many of each request's keys this rank keeps: its local positions are 0 .. length-1.

    Shapes: seq_lens: int32[N], keys over all ranks; dcp_local_seq_lens: int32[N].
    Writes: dcp_local_seq_lens whole, 0 from num_reqs on.

    >>> out = np.full(3, -1, np.int32)
    >>> compute_dcp_local_seq_lens(np.int32([13, 41, 9]), 2, 1, 4, 2, out)
    >>> out.tolist()
    [5, 20, 0]
    """
    # 1 in every whole turn round the ranks a rank gets one run
    turn = dcp_size * dcp_interleave
    whole = seq_lens[:num_reqs] // turn * dcp_interleave
    # 2 the last turn fills one rank after the other
    rest = np.clip(seq_lens[:num_reqs] % turn - dcp_rank * dcp_interleave, 0, dcp_interleave)
    dcp_local_seq_lens[:num_reqs] = whole + rest
    # 3 padding rows own nothing
    dcp_local_seq_lens[num_reqs:] = 0
