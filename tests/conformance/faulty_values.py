"""Kernels that compute with the wrong numbers, or break what they themselves assert. See faulty_kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from faulty_kernels import case, floats, ints

from conformance.triton_sanitizer.faults import FaultKind

OVERFLOW, MASKED, ASSERT = FaultKind.INT32_OVERFLOW, FaultKind.MASKED_VALUE_USED, FaultKind.DEVICE_ASSERT
BLOCK = 32


# --- int32 ------------------------------------------------------------------------------------------------------------
# The places of huge tensors are computed and stored: no test needs the memory itself.


@triton.jit
def row_times_vocabulary(rows, places, vocab_size):
    i = tl.program_id(0)
    row = tl.load(rows + i)
    tl.store(places + i, (row * vocab_size).to(tl.int64))  # fault


@triton.jit
def wide_row_times_vocabulary(rows, places, vocab_size):
    i = tl.program_id(0)
    row = tl.load(rows + i).to(tl.int64)
    tl.store(places + i, row * vocab_size)


@case(OVERFLOW, row_times_vocabulary, wide_row_times_vocabulary)
def _logits_rows(kernel: Any, session: Any) -> None:
    kernel[(2,)](ints(14134, 14135), torch.zeros(2, dtype=torch.int64), 151936)  # 14135 * 151936 is past 2^31


@triton.jit
def block_times_stride(block_table, places, stride, n, BLOCK: tl.constexpr):
    j = tl.arange(0, BLOCK)
    block = tl.load(block_table + j, mask=j < n, other=0)
    place = block * stride  # fault
    tl.store(places + j, place.to(tl.int64), mask=j < n)


@triton.jit
def wide_block_times_stride(block_table, places, stride, n, BLOCK: tl.constexpr):
    j = tl.arange(0, BLOCK)
    block = tl.load(block_table + j, mask=j < n, other=0)
    place = block.to(tl.int64) * stride
    tl.store(places + j, place, mask=j < n)


@case(OVERFLOW, block_times_stride, wide_block_times_stride)
def _kv_blocks(kernel: Any, session: Any) -> None:
    kernel[(1,)](ints(7, 65535, 65536), torch.zeros(3, dtype=torch.int64), 32768, 3, BLOCK)


@triton.jit
def last_offset_added(starts, places, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    place = tl.load(starts + i) + tl.arange(0, BLOCK)  # fault
    tl.store(places + i * BLOCK + tl.arange(0, BLOCK), place.to(tl.int64))


@triton.jit
def last_offset_added_wide(starts, places, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    place = tl.load(starts + i).to(tl.int64) + tl.arange(0, BLOCK)
    tl.store(places + i * BLOCK + tl.arange(0, BLOCK), place)


@case(OVERFLOW, last_offset_added, last_offset_added_wide)
def _offsets(kernel: Any, session: Any) -> None:
    kernel[(2,)](ints(2**31 - BLOCK, 2**31 - BLOCK + 1), torch.zeros(2 * BLOCK, dtype=torch.int64), BLOCK)


@triton.jit
def difference_of_extremes(x, y, out):
    i = tl.program_id(0)
    tl.store(out + i, tl.abs((tl.load(x + i) - tl.load(y + i)).to(tl.int64)))  # fault


@triton.jit
def wide_difference(x, y, out):
    i = tl.program_id(0)
    tl.store(out + i, tl.abs(tl.load(x + i).to(tl.int64) - tl.load(y + i)))


@case(OVERFLOW, difference_of_extremes, wide_difference)
def _differences(kernel: Any, session: Any) -> None:
    kernel[(2,)](ints(5, 2**31 - 1), ints(9, -1), torch.zeros(2, dtype=torch.int64))


@triton.jit
def hash_wraps_unsaid(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) * 1540483477)  # fault


@triton.jit
def hash_wraps_as_declared(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.mul(tl.load(x + i), 1540483477, sanitize_overflow=False))


@case(OVERFLOW, hash_wraps_unsaid, hash_wraps_as_declared)
def _hash(kernel: Any, session: Any) -> None:
    kernel[(1,)](ints(*range(32)), ints(*[0] * 32), BLOCK)


# --- lanes that were masked off and have no value --------------------------------------------------------------------


@triton.jit
def sum_of_no_value(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    value = tl.load(x + row * n + i, mask=i < n)
    tl.store(out + row, tl.sum(value, 0))  # fault


@triton.jit
def sum_of_zeros(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    value = tl.load(x + row * n + i, mask=i < n, other=0.0)
    tl.store(out + row, tl.sum(value, 0))


@triton.jit
def maximum_of_no_value(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    value = tl.load(x + row * n + i, mask=i < n)
    tl.store(out + row, tl.max(value, 0))  # fault


@triton.jit
def maximum_of_chosen_values(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    value = tl.load(x + row * n + i, mask=i < n)
    tl.store(out + row, tl.max(tl.where(i < n, value, float("-inf")), 0))


@case(MASKED, sum_of_no_value, sum_of_zeros)
@case(MASKED, maximum_of_no_value, maximum_of_chosen_values)
def _reduce_rows(kernel: Any, session: Any) -> None:
    kernel[(3,)](-floats(3, 20), torch.zeros(3), 20, BLOCK)


@triton.jit
def address_of_no_value(block_table, cache, out, n, BLOCK: tl.constexpr):
    j = tl.arange(0, BLOCK)
    block = tl.load(block_table + j, mask=j < n)
    tl.store(out + j, tl.load(cache + block))  # fault


@triton.jit
def address_where_there_is_one(block_table, cache, out, n, BLOCK: tl.constexpr):
    j = tl.arange(0, BLOCK)
    block = tl.load(block_table + j, mask=j < n)
    tl.store(out + j, tl.load(cache + block, mask=j < n, other=0.0))


@case(MASKED, address_of_no_value, address_where_there_is_one)
def _gather(kernel: Any, session: Any) -> None:
    kernel[(1,)](ints(4, 2, 0), floats(6), torch.zeros(32), 3, BLOCK)


@triton.jit
def stored_under_a_wider_mask(x, out, n, n_padded, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    tl.store(out + i, value * 2, mask=i < n_padded)  # fault


@triton.jit
def stored_under_the_same_mask(x, out, n, n_padded, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    tl.store(out + i, value * 2, mask=i < n)


@case(MASKED, stored_under_a_wider_mask, stored_under_the_same_mask)
def _double(kernel: Any, session: Any) -> None:
    kernel[(2,)](floats(37), torch.zeros(64), 37, 50, BLOCK)


# --- device_assert ---------------------------------------------------------------------------------------------------


@triton.jit
def asserts_too_much(token_ids, out, vocab_size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + i)
    tl.device_assert(token < vocab_size, "a token id is past the vocabulary")  # fault
    tl.store(out + i, token, mask=token < vocab_size)


@triton.jit
def asserts_what_holds(token_ids, out, vocab_size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + i)
    tl.device_assert(token <= vocab_size, "a token id is past the vocabulary")
    tl.store(out + i, token, mask=token < vocab_size)


@case(ASSERT, asserts_too_much, asserts_what_holds)
def _check_tokens(kernel: Any, session: Any) -> None:
    token_ids = torch.arange(64, dtype=torch.int32) % 12
    token_ids[45] = 12
    kernel[(2,)](token_ids, torch.zeros(64, dtype=torch.int32), 12, BLOCK)


@triton.jit
def _checked_block(block_table, i, num_blocks):
    block = tl.load(block_table + i)
    tl.device_assert((block >= 0) & (block < num_blocks), "no such block")  # fault
    return block


@triton.jit
def asserts_in_a_called_function(block_table, num_blocks, out, SKIP: tl.constexpr):
    i = tl.program_id(0)
    tl.store(out + i, _checked_block(block_table, i, num_blocks))


@triton.jit
def asserts_for_known_blocks(block_table, num_blocks, out, SKIP: tl.constexpr):
    i = tl.program_id(0)
    if i < SKIP:
        tl.store(out + i, _checked_block(block_table, i, num_blocks))


@case(ASSERT, asserts_in_a_called_function, asserts_for_known_blocks)
def _blocks(kernel: Any, session: Any) -> None:
    kernel[(3,)](ints(4, 0, -1), 5, ints(0, 0, 0), 2)


@triton.jit
def probabilities_do_not_add_up(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    weights = tl.exp(tl.load(x + i, mask=i < n, other=0.0))
    probability = weights / tl.sum(weights, 0)
    total = tl.sum(tl.where(i < n, probability, 0.0), 0)
    tl.device_assert(tl.abs(total - 1.0) < 1e-5, "probabilities do not add up to 1")  # fault
    tl.store(out + i, probability, mask=i < n)


@triton.jit
def probabilities_add_up(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    weights = tl.exp(tl.load(x + i, mask=i < n, other=float("-inf")))
    probability = weights / tl.sum(weights, 0)
    total = tl.sum(tl.where(i < n, probability, 0.0), 0)
    tl.device_assert(tl.abs(total - 1.0) < 1e-5, "probabilities do not add up to 1")
    tl.store(out + i, probability, mask=i < n)


@case(ASSERT, probabilities_do_not_add_up, probabilities_add_up)
def _softmax(kernel: Any, session: Any) -> None:
    kernel[(1,)](floats(20) / 4, torch.zeros(20), 20, BLOCK)
