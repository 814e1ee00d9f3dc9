"""Flat position to physical KV slot, for every KV cache group. Twin: cpu_reference/slot_mapping.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_backend.group_tables import device_integers, pointer_table
from gpu_backend.triton_support import entry, launch, signature, tile, tl, triton
from runner_api.constants import PAD_SLOT_ID


@entry
@signature(
    {
        "*i64": "idx_mapping positions slot_mappings table_pointers table_strides",
        "*i32": "query_start_loc block_sizes enabled",
    },
    PAD=PAD_SLOT_ID,
    BLOCK=1024,
)
@triton.jit(do_not_specialize=["num_reqs", "max_num_tokens"])
def _compute_slot_mappings_kernel(
    idx_mapping, query_start_loc, positions, block_sizes, enabled, num_reqs, max_num_tokens, table_pointers,
    table_strides, slot_mappings, slot_mappings_stride, PAD: tl.constexpr, BLOCK: tl.constexpr,
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
            # 2 block index and offset of each position
            position = tl.load(positions + k, mask=k < end, other=0)
            block_index = position // block_size
            offset = position % block_size
            # 3 physical block from the request's row
            block = tl.load(table + block_index, mask=k < read_end, other=0).to(tl.int64)
            # 4 slot; 64 bits wide before multiplying
            slot = tl.where(owns_slots, block * block_size + offset, PAD)
            tl.store(out + k, slot, mask=k < end)
    else:
        # 5 tail
        for first in range(start, max_num_tokens, BLOCK):
            k = first + tl.arange(0, BLOCK)
            tl.store(out + k, tl.full((BLOCK,), PAD, tl.int64), mask=k < max_num_tokens)


def compute_slot_mappings(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_sizes: Sequence[int],
    slot_mapping_enabled: Sequence[bool],
    num_reqs: int,
    block_tables: Sequence[torch.Tensor],
    slot_mappings: torch.Tensor,
) -> None:
    """Name, for each token of the batch, the slot of the flat KV cache that its K and V go to.

    slot = block_table[row, position // block_size] * block_size + position % block_size, from the persistent table.
    One program per request and group, and one per group for the tail.

    Shapes: idx_mapping: int64[N] (a negative row owns no slot); query_start_loc: int32[N+1]; positions: int64[T];
    block_sizes, slot_mapping_enabled: [G]; block_tables: G times int32[N, W_g]; slot_mappings: int64[G, T].
    Writes: slot_mappings whole. The tail is PAD_SLOT_ID from the real token count on, not from the padded one:
    the gap between them still holds slots of an earlier step, which a padded graph would overwrite.
    """
    tables, device, max_num_tokens = pointer_table(block_tables), idx_mapping.device, slot_mappings.shape[1]
    launch(
        _compute_slot_mappings_kernel, (num_reqs + 1, len(block_tables)),
        idx_mapping, query_start_loc, positions,
        device_integers(block_sizes, device), device_integers(slot_mapping_enabled, device), num_reqs,
        max_num_tokens, tables.pointers, tables.strides, slot_mappings, slot_mappings.stride(0),
        PAD=PAD_SLOT_ID, BLOCK=tile(max_num_tokens),
    )  # fmt: skip
