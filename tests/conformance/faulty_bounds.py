"""Kernels that touch memory of others, or read what nobody wrote. See faulty_kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from faulty_kernels import case, floats, ints

from conformance.triton_sanitizer.faults import FaultKind

READ, WRITE = FaultKind.OUT_OF_BOUNDS_READ, FaultKind.OUT_OF_BOUNDS_WRITE
UNWRITTEN = FaultKind.UNINITIALISED_READ
BLOCK = 32


# --- reads -----------------------------------------------------------------------------------------------------------


@triton.jit
def tail_without_mask(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i)  # fault
    tl.store(out + i, value, mask=i < n)


@triton.jit
def tail_with_mask(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(out + i, value, mask=i < n)


@triton.jit
def mask_one_too_wide(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i <= n, other=0.0)  # fault
    tl.store(out + i, value, mask=i < n)


@case(READ, tail_without_mask, tail_with_mask, "x")
@case(READ, mask_one_too_wide, tail_with_mask, "x")
def _copy(kernel: Any, session: Any) -> None:
    kernel[(3,)](floats(70), torch.zeros(70), 70, BLOCK)


@triton.jit
def before_the_first(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(x + i - 1, mask=i < n, other=0.0)  # fault
    tl.store(out + i, left, mask=i < n)


@triton.jit
def nothing_before_the_first(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(x + i - 1, mask=(i < n) & (i > 0), other=0.0)
    tl.store(out + i, left, mask=i < n)


@case(READ, before_the_first, nothing_before_the_first, "x")
def _shift(kernel: Any, session: Any) -> None:
    kernel[(3,)](floats(70), torch.zeros(70), 70, BLOCK)


@triton.jit
def padded_count_in_the_mask(x, out, n, n_padded, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n_padded, other=0.0)  # fault
    tl.store(out + i, value, mask=i < n_padded)


@triton.jit
def real_count_in_the_mask(x, out, n, n_padded, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(out + i, value, mask=i < n_padded)


@case(READ, padded_count_in_the_mask, real_count_in_the_mask, "x")
def _pad(kernel: Any, session: Any) -> None:
    kernel[(2,)](floats(37), torch.zeros(64), 37, 64, BLOCK)


@triton.jit
def token_past_the_table(token_ids, table, out, vocab_size, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + i, mask=i < n, other=0)
    tl.store(out + i, tl.load(table + token, mask=i < n, other=0.0), mask=i < n)  # fault


@triton.jit
def token_in_the_table(token_ids, table, out, vocab_size, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + i, mask=i < n, other=0)
    known = (i < n) & (token < vocab_size)
    tl.store(out + i, tl.load(table + token, mask=known, other=0.0), mask=i < n)


@case(READ, token_past_the_table, token_in_the_table, "table")
def _embed(kernel: Any, session: Any) -> None:
    token_ids = torch.arange(40, dtype=torch.int32) % 11
    token_ids[36] = 11  # the vocabulary has 11 tokens
    kernel[(2,)](token_ids, floats(11), torch.zeros(40), 11, 40, BLOCK)


@triton.jit
def placeholder_as_an_index(slot_mapping, cache, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_mapping + i, mask=i < n, other=0)
    value = tl.load(cache + slot, mask=i < n, other=0.0)  # fault
    tl.store(out + i, value, mask=i < n)


@triton.jit
def placeholder_skipped(slot_mapping, cache, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_mapping + i, mask=i < n, other=-1)
    value = tl.load(cache + slot, mask=slot >= 0, other=0.0)
    tl.store(out + i, value, mask=i < n)


@case(READ, placeholder_as_an_index, placeholder_skipped, "cache")
def _gather_slots(kernel: Any, session: Any) -> None:
    slot_mapping = torch.arange(40, dtype=torch.int64).flip(0)
    slot_mapping[35] = -1
    kernel[(2,)](slot_mapping, floats(40), torch.zeros(40), 40, BLOCK)


@triton.jit
def past_the_view(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n + 1, other=0.0)  # fault
    tl.store(out + i, value, mask=i < n)


@case(READ, past_the_view, tail_with_mask, "x")
def _copy_a_view(kernel: Any, session: Any) -> None:
    storage = floats(200)
    kernel[(2,)](storage[:50], torch.zeros(50), 50, BLOCK)  # what lies behind is allocated, and not the argument's


@triton.jit
def reads_the_neighbour(keys, values, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(keys + n + i, mask=i < n, other=0.0)  # fault
    tl.store(out + i, value, mask=i < n)


@triton.jit
def reads_its_own(keys, values, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + i, mask=i < n, other=0.0)
    tl.store(out + i, value, mask=i < n)


@case(READ, reads_the_neighbour, reads_its_own, "keys")
def _two_in_one_storage(kernel: Any, session: Any) -> None:
    both = floats(2, 48)
    kernel[(2,)](both[0], both[1], torch.zeros(48), 48, BLOCK)  # the address is one of `values`


@triton.jit
def loop_runs_once_too_often(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n + 1, BLOCK):
        total += tl.load(x + row * n + start + tl.arange(0, BLOCK))  # fault
    tl.store(out + row, tl.sum(total, 0))


@triton.jit
def loop_covers_the_row(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        total += tl.load(x + row * n + start + tl.arange(0, BLOCK))
    tl.store(out + row, tl.sum(total, 0))


@case(READ, loop_runs_once_too_often, loop_covers_the_row, "x")
def _sum_rows(kernel: Any, session: Any) -> None:
    kernel[(3,)](floats(3, 64), torch.zeros(3), 64, BLOCK)


@triton.jit
def stride_of_the_other_axis(x, out, rows, columns, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    value = tl.load(x + row * rows + column, mask=column < columns, other=0.0)  # fault
    tl.store(out + row * columns + column, value, mask=column < columns)


@triton.jit
def stride_of_its_axis(x, out, rows, columns, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    value = tl.load(x + row * columns + column, mask=column < columns, other=0.0)
    tl.store(out + row * columns + column, value, mask=column < columns)


@case(READ, stride_of_the_other_axis, stride_of_its_axis, "x")
def _rows(kernel: Any, session: Any) -> None:
    kernel[(9,)](floats(9, 3), torch.zeros(9, 3), 9, 3, BLOCK)


@triton.jit
def block_past_the_table(block_table, seq_lens, out, width, SIZE: tl.constexpr):
    i = tl.program_id(0)
    position = tl.load(seq_lens + i)
    tl.store(out + i, tl.load(block_table + i * width + position // SIZE))  # fault


@triton.jit
def block_of_the_last_token(block_table, seq_lens, out, width, SIZE: tl.constexpr):
    i = tl.program_id(0)
    position = tl.load(seq_lens + i) - 1
    tl.store(out + i, tl.load(block_table + i * width + position // SIZE))


@case(READ, block_past_the_table, block_of_the_last_token, "block_table")
def _last_block(kernel: Any, session: Any) -> None:
    table = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    kernel[(2,)](table, ints(5, 12), ints(0, 0), 3, 4)  # request 1 fills its three blocks of 4 tokens


# --- writes ----------------------------------------------------------------------------------------------------------


@triton.jit
def store_one_too_far(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(out + i + 1, value, mask=i < n)  # fault


@triton.jit
def store_without_mask(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(out + i, value)  # fault


@case(WRITE, store_one_too_far, tail_with_mask, "out")
@case(WRITE, store_without_mask, tail_with_mask, "out")
def _copy_out(kernel: Any, session: Any) -> None:
    kernel[(3,)](floats(70), torch.zeros(70), 70, BLOCK)


@triton.jit
def padded_tail_written(out, n, n_padded, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.where(i < n, i, -1), mask=i < n_padded)  # fault


@triton.jit
def real_part_written(out, n, n_padded, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.where(i < n, i, -1), mask=i < n)


@case(WRITE, padded_tail_written, real_part_written, "out")
def _blank_the_tail(kernel: Any, session: Any) -> None:
    kernel[(2,)](torch.zeros(37, dtype=torch.int32), 37, 64, BLOCK)


@triton.jit
def placeholder_slot_written(slot_mapping, key, cache, WIDTH: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token)
    channel = tl.arange(0, WIDTH)
    tl.store(cache + slot * WIDTH + channel, tl.load(key + token * WIDTH + channel))  # fault


@triton.jit
def placeholder_slot_left_alone(slot_mapping, key, cache, WIDTH: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token)
    channel = tl.arange(0, WIDTH)
    if slot >= 0:
        tl.store(cache + slot * WIDTH + channel, tl.load(key + token * WIDTH + channel))


@case(WRITE, placeholder_slot_written, placeholder_slot_left_alone, "cache")
def _kv_write(kernel: Any, session: Any) -> None:
    kernel[(4,)](torch.tensor([5, 2, 7, -1]), floats(4, 16), torch.zeros(8, 16), 16)


@triton.jit
def unknown_token_counted(token_ids, counts, vocab_size, BLOCK: tl.constexpr):
    token = tl.load(token_ids + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(counts + token, 1)  # fault


@triton.jit
def unknown_token_skipped(token_ids, counts, vocab_size, BLOCK: tl.constexpr):
    token = tl.load(token_ids + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(counts + token, 1, mask=token < vocab_size)


@case(WRITE, unknown_token_counted, unknown_token_skipped, "counts")
def _count_tokens(kernel: Any, session: Any) -> None:
    token_ids = torch.arange(64, dtype=torch.int32) % 10
    token_ids[50] = 10
    kernel[(2,)](token_ids, torch.zeros(10, dtype=torch.int32), 10, BLOCK)


@triton.jit
def writes_the_neighbour(seen, counts, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK) + tl.program_id(0) * BLOCK
    tl.store(seen + n + i, 1, mask=i < n)  # fault


@triton.jit
def writes_its_own(seen, counts, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK) + tl.program_id(0) * BLOCK
    tl.store(counts + i, 1, mask=i < n)


@case(WRITE, writes_the_neighbour, writes_its_own, "seen")
def _two_flags_in_one_storage(kernel: Any, session: Any) -> None:
    state = torch.zeros(2, 48, dtype=torch.int32)
    kernel[(2,)](state[0], state[1], 48, BLOCK)


@triton.jit
def clears_behind_the_view(row, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        tl.store(row + start + tl.arange(0, BLOCK), 0.0)  # fault


@triton.jit
def clears_the_view(row, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(row + i, 0.0, mask=i < n)


@case(WRITE, clears_behind_the_view, clears_the_view, "row")
def _clear_one_row(kernel: Any, session: Any) -> None:
    kernel[(1,)](floats(3, 80)[1], 80, BLOCK)


@triton.jit
def mask_of_one_axis_only(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + place, mask=inside, other=0.0)
    tl.store(out + place, value, mask=(column < columns)[None, :])  # fault


@triton.jit
def mask_of_both_axes(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + place, mask=inside, other=0.0)
    tl.store(out + place, value, mask=inside)


@case(WRITE, mask_of_one_axis_only, mask_of_both_axes, "out")
def _tiles(kernel: Any, session: Any) -> None:
    kernel[(2, 2)](floats(7, 20), torch.zeros(7, 20), 7, 20, 4, 16)


@triton.jit
def past_a_tensor_behind_a_table(caches, lengths, n, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    cache = tl.load(caches + group).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, BLOCK)
    tl.store(cache + i, 0.0, mask=i < n)  # fault


@triton.jit
def inside_a_tensor_behind_a_table(caches, lengths, n, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    cache = tl.load(caches + group).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, BLOCK)
    tl.store(cache + i, 0.0, mask=i < tl.load(lengths + group))


@case(WRITE, past_a_tensor_behind_a_table, inside_a_tensor_behind_a_table, "cache of group 1")
def _clear_groups(kernel: Any, session: Any) -> None:
    caches = floats(24), floats(16)
    for group, cache in enumerate(caches):
        session.register(f"cache of group {group}", cache)
    kernel[(2,)](torch.tensor([cache.data_ptr() for cache in caches]), ints(24, 16), 24, BLOCK)


# --- memory that nobody wrote ----------------------------------------------------------------------------------------


@triton.jit
def _write_first(buffer, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(buffer + i, i.to(tl.float32), mask=i < n)


@triton.jit
def stale_tail_read(buffer, out, n, n_padded, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(buffer + i, mask=i < n_padded, other=0.0), 0))  # fault


@triton.jit
def stale_tail_ignored(buffer, out, n, n_padded, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(buffer + i, mask=i < n, other=0.0), 0))


@case(UNWRITTEN, stale_tail_read, stale_tail_ignored, "buffer")
def _padded_buffer(kernel: Any, session: Any) -> None:
    buffer = session.uninitialised(torch.empty(32))
    _write_first[(1,)](buffer, 20, 32)
    kernel[(1,)](buffer, torch.zeros(1), 20, 24, 32)


@triton.jit
def sum_starts_anywhere(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(out + i, mask=i < n, other=0.0)  # fault
    tl.store(out + i, before + tl.load(x + i, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def sum_starts_at_zero(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.float32)
    tl.store(out + i, before + tl.load(x + i, mask=i < n, other=0.0), mask=i < n)


@case(UNWRITTEN, sum_starts_anywhere, sum_starts_at_zero, "out")
def _add_to_a_new_tensor(kernel: Any, session: Any) -> None:
    kernel[(2,)](floats(40), session.uninitialised(torch.empty(40)), 40, BLOCK)


@triton.jit
def counter_starts_anywhere(counter, old):
    tl.store(old + tl.program_id(0), 0)
    tl.atomic_add(counter, 1)  # fault


@triton.jit
def counter_unused(counter, old):
    tl.store(old + tl.program_id(0), 0)


@case(UNWRITTEN, counter_starts_anywhere, counter_unused, "counter")
def _count_programs(kernel: Any, session: Any) -> None:
    kernel[(2,)](session.uninitialised(torch.empty(1, dtype=torch.int32)), ints(0, 0))


@triton.jit
def key_after_the_last(key_cache, seq_lens, out, width, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    position = tl.arange(0, BLOCK)
    seen = position <= tl.load(seq_lens + i)
    keys = tl.load(key_cache + i * width + position, mask=seen, other=float("-inf"))  # fault
    tl.store(out + i, tl.max(keys, 0))


@triton.jit
def keys_of_the_sequence(key_cache, seq_lens, out, width, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    position = tl.arange(0, BLOCK)
    seen = position < tl.load(seq_lens + i)
    keys = tl.load(key_cache + i * width + position, mask=seen, other=float("-inf"))
    tl.store(out + i, tl.max(keys, 0))


@case(UNWRITTEN, key_after_the_last, keys_of_the_sequence, "key_cache")
def _attend(kernel: Any, session: Any) -> None:
    key_cache = session.uninitialised(torch.empty(2, 16))
    key_cache[0, :5] = floats(5)  # the host writes too
    key_cache[1, :9] = floats(9)
    kernel[(2,)](key_cache, ints(5, 9), torch.zeros(2), 16, 16)
