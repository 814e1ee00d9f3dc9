"""Flat position to physical KV slot, for every KV cache group. Twin: cpu_reference/slot_mapping.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_backend.group_tables import device_integers, pointer_table
from gpu_backend.triton_support import entry, launch, signature, tile, tl, triton
from runner_api.constants import PAD_SLOT_ID


@triton.jit
def rank_and_local_position(positions, SIZE: tl.constexpr, INTERLEAVE: tl.constexpr):
    """The rank that keeps each position, and which of that rank's own positions it is."""
    run = positions // INTERLEAVE
    return run % SIZE, run // SIZE * INTERLEAVE + positions % INTERLEAVE


_MAPPING_TYPES = {
    "*i64": "idx_mapping positions slot_mappings table_pointers table_strides",
    "*i32": "query_start_loc block_sizes enabled sharded",
}


@entry
@signature(_MAPPING_TYPES, DCP_SIZE=1, DCP_INTERLEAVE=1, PAD=PAD_SLOT_ID, BLOCK=1024)
@signature(_MAPPING_TYPES, DCP_SIZE=2, DCP_INTERLEAVE=1, PAD=PAD_SLOT_ID, BLOCK=1024)
@signature(_MAPPING_TYPES, DCP_SIZE=3, DCP_INTERLEAVE=4, PAD=PAD_SLOT_ID, BLOCK=1024)
@triton.jit(do_not_specialize=["num_reqs", "max_num_tokens", "dcp_rank"])
def _compute_slot_mappings_kernel(
    idx_mapping, query_start_loc, positions, block_sizes, enabled, sharded, dcp_rank, num_reqs, max_num_tokens,
    table_pointers, table_strides, slot_mappings, slot_mappings_stride, DCP_SIZE: tl.constexpr,
    DCP_INTERLEAVE: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    g = tl.program_id(1).to(tl.int64)
    out = slot_mappings + g * slot_mappings_stride
    start = tl.load(query_start_loc + i)
    if i < num_reqs:
        end = tl.load(query_start_loc + i + 1)
        # 1 per token: the batch index of its request (one program each), and from it the row
        row = tl.load(idx_mapping + i)
        owns_slots = (tl.load(enabled + g) != 0) & (row >= 0)
        read_end = tl.where(owns_slots, end, start)  # a row without slots reads no table
        table = tl.load(table_pointers + g).to(tl.pointer_type(tl.int32))
        table += tl.maximum(row, 0) * tl.load(table_strides + g)
        block_size = tl.load(block_sizes + g).to(tl.int64)
        for first in range(start, end, BLOCK):
            k = first + tl.arange(0, BLOCK)
            local = tl.load(positions + k, mask=k < end, other=0)
            owned = k < read_end
            # 2 whether this rank keeps the token, and as which of its own positions
            if DCP_SIZE > 1:
                is_sharded = tl.load(sharded + g) != 0
                owner, own = rank_and_local_position(local, DCP_SIZE, DCP_INTERLEAVE)
                owned = owned & (tl.where(is_sharded, owner, dcp_rank) == dcp_rank)
                local = tl.where(is_sharded, own, local)
            # 3 block index and offset; what a token without a slot says is never used as an index
            block_index = local // block_size
            offset = local % block_size
            # 4 physical block from the request's row
            block = tl.load(table + block_index, mask=owned, other=0).to(tl.int64)
            # 5 slot; 64 bits wide before multiplying
            slot = tl.where(owned, block * block_size + offset, PAD)
            tl.store(out + k, slot, mask=k < end)
    else:
        # 6 tail
        for first in range(start, max_num_tokens, BLOCK):
            k = first + tl.arange(0, BLOCK)
            tl.store(out + k, tl.full((BLOCK,), PAD, tl.int64), mask=k < max_num_tokens)


def compute_slot_mappings(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_sizes: Sequence[int],
    slot_mapping_enabled: Sequence[bool],
    dcp_sharded: Sequence[bool],
    dcp_size: int,
    dcp_rank: int,
    dcp_interleave: int,
    num_reqs: int,
    block_tables: Sequence[torch.Tensor],
    slot_mappings: torch.Tensor,
) -> None:
    """Name, for each token of the batch, the slot of the flat KV cache that its K and V go to.

    slot = block_table[row, position // block_size] * block_size + position % block_size, from the persistent table.
    In a sharded group the position is the rank's own (`rank_and_local_position`), and a token that another rank keeps
    has no slot: one block id stands for block_size tokens on every rank. Decode context parallelism is offered as index
    stages alone: runners refuse more than one rank, since nothing merges attention over ranks.
    One program per request and group, and one per group for the tail.

    Shapes: idx_mapping: int64[N] (a negative row owns no slot); query_start_loc: int32[N+1]; positions: int64[T];
    block_sizes, slot_mapping_enabled, dcp_sharded: [G] (not sharded: every rank keeps every token); block_tables: G
    times int32[N, W_g]; slot_mappings: int64[G, T]. dcp_interleave divides the block size of every sharded group.
    Writes: slot_mappings whole. The tail is PAD_SLOT_ID from the real token count on, not from the padded one:
    the gap between them still holds slots of an earlier step, which a padded graph would overwrite.
    """
    tables, device, max_num_tokens = pointer_table(block_tables), idx_mapping.device, slot_mappings.shape[1]
    for size, sharded in zip(block_sizes, dcp_sharded, strict=True):
        assert dcp_size == 1 or not sharded or size % dcp_interleave == 0, "a run lies inside of a block"
    launch(
        _compute_slot_mappings_kernel, (num_reqs + 1, len(block_tables)),
        idx_mapping, query_start_loc, positions,
        device_integers(block_sizes, device), device_integers(slot_mapping_enabled, device),
        device_integers(dcp_sharded, device), dcp_rank, num_reqs,
        max_num_tokens, tables.pointers, tables.strides, slot_mappings, slot_mappings.stride(0),
        DCP_SIZE=dcp_size, DCP_INTERLEAVE=dcp_interleave, PAD=PAD_SLOT_ID, BLOCK=tile(max_num_tokens),
    )  # fmt: skip


@entry
@signature({"*i32": "seq_lens dcp_local_seq_lens"}, DCP_SIZE=2, DCP_INTERLEAVE=1, BLOCK=1024)
@signature({"*i32": "seq_lens dcp_local_seq_lens"}, DCP_SIZE=3, DCP_INTERLEAVE=4, BLOCK=1024)
@triton.jit(do_not_specialize=["dcp_rank", "num_reqs", "max_num_reqs"])
def _compute_dcp_local_seq_lens_kernel(
    seq_lens, dcp_rank, num_reqs, max_num_reqs, dcp_local_seq_lens, DCP_SIZE: tl.constexpr,
    DCP_INTERLEAVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seq_len = tl.load(seq_lens + i, mask=i < num_reqs, other=0)
    # 1 in every whole turn round the ranks a rank gets one run
    turn = DCP_SIZE * DCP_INTERLEAVE
    whole = seq_len // turn * DCP_INTERLEAVE
    # 2 the last turn fills one rank after the other
    rest = tl.maximum(seq_len % turn - dcp_rank * DCP_INTERLEAVE, 0)
    rest = tl.minimum(rest, DCP_INTERLEAVE)
    # 3 padding rows own nothing
    tl.store(dcp_local_seq_lens + i, whole + rest, mask=i < max_num_reqs)


def compute_dcp_local_seq_lens(
    seq_lens: torch.Tensor,
    dcp_size: int,
    dcp_rank: int,
    dcp_interleave: int,
    num_reqs: int,
    dcp_local_seq_lens: torch.Tensor,
) -> None:
    """How many of each request's keys this rank keeps: its local positions are 0 .. length-1.

    Shapes: seq_lens: int32[N], keys over all ranks; dcp_local_seq_lens: int32[N].
    Writes: dcp_local_seq_lens whole, 0 from num_reqs on.
    """
    max_num_reqs = len(dcp_local_seq_lens)
    width = tile(max_num_reqs)
    launch(
        _compute_dcp_local_seq_lens_kernel, (triton.cdiv(max_num_reqs, width),),
        seq_lens, dcp_rank, num_reqs, max_num_reqs, dcp_local_seq_lens,
        DCP_SIZE=dcp_size, DCP_INTERLEAVE=dcp_interleave, BLOCK=width,
    )  # fmt: skip
