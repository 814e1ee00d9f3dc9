"""Kernels whose result depends on which program, or which lane, comes first. See faulty_kernels.

Of two accesses that get into each other's way, the later one is the fault: programs run in the order of their ids.
Where only the result tells, the kernel as a whole is at fault, which is its first line.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from faulty_kernels import case, floats, ints

from conformance.triton_sanitizer.faults import FaultKind

WRITE_WRITE, READ_WRITE = FaultKind.WRITE_WRITE_RACE, FaultKind.READ_WRITE_RACE
LANES, NO_BARRIER = FaultKind.LANE_CONFLICT, FaultKind.STORE_THEN_LOAD
ORDER = FaultKind.ORDER_DEPENDENCE
BLOCK = 32


# --- two programs store to one element -------------------------------------------------------------------------------


@triton.jit
def all_store_to_one_place(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x + i, mask=i < n, other=0.0), 0)
    tl.store(out, total)  # fault


@triton.jit
def each_stores_to_its_place(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x + i, mask=i < n, other=0.0), 0)
    tl.store(out + tl.program_id(0), total)


@case(WRITE_WRITE, all_store_to_one_place, each_stores_to_its_place, "out")
def _sum_tiles(kernel: Any, session: Any) -> None:
    kernel[(3,)](floats(70), torch.zeros(3), 70, BLOCK)


@triton.jit
def tiles_overlap(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * (BLOCK - 1) + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)  # fault


@triton.jit
def tiles_touch(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)


@case(WRITE_WRITE, tiles_overlap, tiles_touch, "out")
def _copy(kernel: Any, session: Any) -> None:
    kernel[(3,)](floats(70), torch.zeros(70), 70, BLOCK)


@triton.jit
def two_programs_own_a_row(logits, temperature, width, BLOCK: tl.constexpr):
    row = tl.program_id(0) // 2
    token = tl.arange(0, BLOCK)
    tl.store(logits + row * width + token, tl.load(temperature + row), mask=token < width)  # fault


@triton.jit
def one_program_owns_a_row(logits, temperature, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.arange(0, BLOCK)
    tl.store(logits + row * width + token, tl.load(temperature + row), mask=token < width)


@case(WRITE_WRITE, two_programs_own_a_row, one_program_owns_a_row, "logits")
def _fill_rows(kernel: Any, session: Any) -> None:
    kernel[(4,)](torch.zeros(4, 20), floats(4), 20, BLOCK)


@triton.jit
def padding_has_slot_zero(slot_mapping, key, cache, n, WIDTH: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token, mask=token < n, other=0)
    channel = tl.arange(0, WIDTH)
    tl.store(cache + slot * WIDTH + channel, tl.load(key + token * WIDTH + channel))  # fault


@triton.jit
def padding_has_no_slot(slot_mapping, key, cache, n, WIDTH: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token, mask=token < n, other=-1)
    channel = tl.arange(0, WIDTH)
    if slot >= 0:
        tl.store(cache + slot * WIDTH + channel, tl.load(key + token * WIDTH + channel))


@case(WRITE_WRITE, padding_has_slot_zero, padding_has_no_slot, "cache")
def _kv_write(kernel: Any, session: Any) -> None:
    kernel[(4,)](torch.tensor([5, 0]), floats(4, 16), torch.zeros(8, 16), 2, 16)


# --- one program loads what another stores ---------------------------------------------------------------------------


@triton.jit
def lost_update(x, total, BLOCK: tl.constexpr):
    part = tl.sum(tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), 0)
    before = tl.load(total)  # fault
    tl.store(total, before + part)


@triton.jit
def atomic_update(x, total, BLOCK: tl.constexpr):
    part = tl.sum(tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), 0)
    tl.atomic_add(total, part)


@case(READ_WRITE, lost_update, atomic_update, "total")
def _add_up(kernel: Any, session: Any) -> None:
    kernel[(3,)](ints(*range(96)), ints(0), BLOCK)


@triton.jit
def shifted_in_place(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i + 1, mask=i < n - 1, other=0.0)
    tl.store(x + i, value, mask=i < n - 1)  # fault


@triton.jit
def shifted_into_another(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i + 1, mask=i < n - 1, other=0.0)
    tl.store(out + i, value, mask=i < n - 1)


@case(READ_WRITE, shifted_in_place, shifted_into_another, "x")
def _shift(kernel: Any, session: Any) -> None:
    kernel[(3,)](floats(70), torch.zeros(70), 70, BLOCK)


@triton.jit
def rows_moved_in_a_chain(source, destination, state, moved, WIDTH: tl.constexpr):
    i = tl.program_id(0)
    channel = tl.arange(0, WIDTH)
    value = tl.load(state + tl.load(source + i) * WIDTH + channel)  # fault
    tl.store(state + tl.load(destination + i) * WIDTH + channel, value)


@triton.jit
def rows_moved_aside(source, destination, state, moved, WIDTH: tl.constexpr):
    i = tl.program_id(0)
    channel = tl.arange(0, WIDTH)
    value = tl.load(state + tl.load(source + i) * WIDTH + channel)
    tl.store(moved + tl.load(destination + i) * WIDTH + channel, value)


@case(READ_WRITE, rows_moved_in_a_chain, rows_moved_aside, "state")
def _condense(kernel: Any, session: Any) -> None:
    kernel[(2,)](ints(3, 1), ints(1, 0), floats(4, 16), torch.zeros(4, 16), 16)


@triton.jit
def reads_what_the_first_computed(x, total, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(total, tl.sum(tl.load(x + i), 0))
    else:
        tl.store(out + i, tl.load(x + i) / tl.load(total))  # fault


@triton.jit
def computes_it_itself(x, total, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(total, tl.sum(tl.load(x + i), 0))
    else:
        tl.store(out + i, tl.load(x + i) / tl.sum(tl.load(x + i), 0))


@case(READ_WRITE, reads_what_the_first_computed, computes_it_itself, "total")
def _normalise(kernel: Any, session: Any) -> None:
    kernel[(2,)](floats(32), torch.ones(1), torch.zeros(32), BLOCK)


@triton.jit
def reads_on_through_an_alias(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    following = tl.load(x + i + 1, mask=i + 1 < n, other=0.0)
    tl.store(out + i, following, mask=i < n)  # fault


@triton.jit
def reads_its_own_through_an_alias(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(out + i, value * 2, mask=i < n)


@case(READ_WRITE, reads_on_through_an_alias, reads_its_own_through_an_alias, "out")
def _in_place(kernel: Any, session: Any) -> None:
    x = floats(70)
    kernel[(3,)](x, x, 70, BLOCK)  # one tensor, given twice


@triton.jit
def last_one_does_not_wait(x, partial, arrived, out, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    tl.store(partial + i, tl.sum(tl.load(x + i * BLOCK + tl.arange(0, BLOCK)), 0))
    before = tl.atomic_add(arrived, 1, sem="relaxed")
    tl.debug_barrier()
    if before == PROGRAMS - 1:
        tl.store(out, tl.sum(tl.load(partial + tl.arange(0, PROGRAMS)), 0))  # fault


@triton.jit
def last_one_waits(x, partial, arrived, out, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    tl.store(partial + i, tl.sum(tl.load(x + i * BLOCK + tl.arange(0, BLOCK)), 0))
    before = tl.atomic_add(arrived, 1, sem="acq_rel")
    tl.debug_barrier()
    if before == PROGRAMS - 1:
        tl.store(out, tl.sum(tl.load(partial + tl.arange(0, PROGRAMS)), 0))


@case(READ_WRITE, last_one_does_not_wait, last_one_waits, "partial")
def _sum_of_sums(kernel: Any, session: Any) -> None:
    kernel[(4,)](floats(4, 32), torch.zeros(4), ints(0), torch.zeros(1), 4, BLOCK)


# --- two lanes of one store ------------------------------------------------------------------------------------------


@triton.jit
def duplicate_lanes(places, x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    place = tl.load(places + i, mask=i < n, other=0)
    tl.store(out + place, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)  # fault


@triton.jit
def last_of_the_duplicates(places, x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    place = tl.load(places + i, mask=i < n, other=0)
    following = tl.load(places + i + 1, mask=i + 1 < n, other=-1)  # duplicates stand side by side
    tl.store(out + place, tl.load(x + i, mask=i < n, other=0.0), mask=(i < n) & (place != following))


@case(LANES, duplicate_lanes, last_of_the_duplicates, "out")
def _scatter(kernel: Any, session: Any) -> None:
    kernel[(1,)](ints(7, 2, 2, 5), floats(4), torch.zeros(8), 4, BLOCK)


@triton.jit
def tile_wraps_around(x, ring, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(ring + i % SIZE, tl.load(x + i))  # fault


@triton.jit
def tile_fits_the_ring(x, ring, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(ring + i % SIZE, tl.load(x + i), mask=i >= BLOCK - SIZE)


@case(LANES, tile_wraps_around, tile_fits_the_ring, "ring")
def _ring(kernel: Any, session: Any) -> None:
    kernel[(1,)](floats(32), torch.zeros(16), 16, BLOCK)


@triton.jit
def counts_by_store(token_ids, counts, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + i, mask=i < n, other=0)
    tl.store(counts + token, 1, mask=i < n)  # fault


@triton.jit
def counts_by_atomics(token_ids, counts, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + i, mask=i < n, other=0)
    tl.atomic_add(counts + token, 1, mask=i < n)


@case(LANES, counts_by_store, counts_by_atomics, "counts")
def _count_tokens(kernel: Any, session: Any) -> None:
    kernel[(2,)](torch.arange(40, dtype=torch.int32) % 9, torch.zeros(9, dtype=torch.int32), 40, BLOCK)


# --- a program loads what it stored, and its threads have not met in between -----------------------------------------


@triton.jit
def reversed_through_memory(x, scratch, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    first = tl.program_id(0) * BLOCK
    tl.store(scratch + first + i, tl.load(x + first + i))
    tl.store(out + first + i, tl.load(scratch + first + BLOCK - 1 - i))  # fault


@triton.jit
def reversed_behind_a_barrier(x, scratch, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    first = tl.program_id(0) * BLOCK
    tl.store(scratch + first + i, tl.load(x + first + i))
    tl.debug_barrier()
    tl.store(out + first + i, tl.load(scratch + first + BLOCK - 1 - i))


@case(NO_BARRIER, reversed_through_memory, reversed_behind_a_barrier, "scratch")
def _reverse(kernel: Any, session: Any) -> None:
    kernel[(2,)](floats(64), torch.zeros(64), torch.zeros(64), BLOCK)


@triton.jit
def running_sum_through_memory(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0) * n
    tl.store(out + row, tl.load(x + row))
    for j in range(1, n):
        before = tl.load(out + row + j - 1)  # fault
        tl.store(out + row + j, before + tl.load(x + row + j))


@triton.jit
def running_sum_in_a_register(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0) * n
    total = tl.load(x + row)
    tl.store(out + row, total)
    for j in range(1, n):
        total += tl.load(x + row + j)
        tl.store(out + row + j, total)


@case(NO_BARRIER, running_sum_through_memory, running_sum_in_a_register, "out")
def _running_sums(kernel: Any, session: Any) -> None:
    kernel[(2,)](floats(2, 5), torch.zeros(2, 5), 5, BLOCK)


@triton.jit
def staged_then_used(token_ids, lengths, new_token, out, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    tl.store(token_ids + row * WIDTH + length, tl.load(new_token + row))
    i = tl.arange(0, WIDTH)
    tokens = tl.load(token_ids + row * WIDTH + i, mask=i <= length, other=0)  # fault
    tl.store(out + row, tl.sum(tokens, 0))


@triton.jit
def used_as_it_was_given(token_ids, lengths, new_token, out, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    new = tl.load(new_token + row)
    tl.store(token_ids + row * WIDTH + length, new)
    i = tl.arange(0, WIDTH)
    tokens = tl.load(token_ids + row * WIDTH + i, mask=i < length, other=0)
    tl.store(out + row, tl.sum(tokens, 0) + new)


@case(NO_BARRIER, staged_then_used, used_as_it_was_given, "token_ids")
def _append_token(kernel: Any, session: Any) -> None:
    kernel[(2,)](torch.ones(2, 16, dtype=torch.int32), ints(3, 8), ints(40, 50), ints(0, 0), 16)


# --- another order of programs, another result -----------------------------------------------------------------------


@triton.jit
def last_one_wins(scores, best, BLOCK: tl.constexpr):  # fault
    i = tl.program_id(0)
    tl.atomic_xchg(best, tl.load(scores + i))


@triton.jit
def largest_wins(scores, best, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    tl.atomic_max(best, tl.load(scores + i))


@case(ORDER, last_one_wins, largest_wins, "best")
def _best(kernel: Any, session: Any) -> dict[str, torch.Tensor]:
    best = ints(-1)
    kernel[(4,)](ints(3, 9, 4, 1), best, BLOCK)
    return {"best": best}


@triton.jit
def first_one_wins(winner, scores, BLOCK: tl.constexpr):  # fault
    i = tl.program_id(0)
    tl.atomic_cas(winner, -1, i)


@triton.jit
def lowest_one_wins(winner, scores, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    tl.atomic_max(winner, 100 - i)


@case(ORDER, first_one_wins, lowest_one_wins, "winner")
def _winner(kernel: Any, session: Any) -> dict[str, torch.Tensor]:
    winner = ints(-1)
    kernel[(4,)](winner, ints(3, 9, 4, 1), BLOCK)
    return {"winner": winner}


@triton.jit
def packed_in_order_of_arrival(x, counter, out, BLOCK: tl.constexpr):  # fault
    i = tl.program_id(0)
    value = tl.load(x + i)
    if value > 0:
        place = tl.atomic_add(counter, 1)
        tl.store(out + place, value)


@triton.jit
def packed_in_order_of_ids(x, counter, out, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    value = tl.load(x + i)
    if value > 0:
        tl.atomic_add(counter, 1)
        j = tl.arange(0, BLOCK)
        place = tl.sum((tl.load(x + j, mask=j < i, other=0) > 0).to(tl.int32), 0)
        tl.store(out + place, value)


@case(ORDER, packed_in_order_of_arrival, packed_in_order_of_ids, "out")
def _compact(kernel: Any, session: Any) -> dict[str, torch.Tensor]:
    counter, out = ints(0), ints(0, 0, 0, 0, 0)
    kernel[(5,)](ints(3, 0, 4, 1, 8), counter, out, BLOCK)
    return {"counter": counter, "out": out}


@triton.jit
def running_maximum(scores, best, seen, BLOCK: tl.constexpr):  # fault
    i = tl.program_id(0)
    before = tl.atomic_max(best, tl.load(scores + i))
    tl.store(seen + i, before)


@triton.jit
def maximum_of_those_before(scores, best, seen, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    tl.atomic_max(best, tl.load(scores + i))
    tl.store(seen + i, tl.max(tl.load(scores + j, mask=j < i, other=-1), 0))


@case(ORDER, running_maximum, maximum_of_those_before, "seen")
def _records(kernel: Any, session: Any) -> dict[str, torch.Tensor]:
    best, seen = ints(-1), ints(0, 0, 0, 0)
    kernel[(4,)](ints(3, 9, 4, 11), best, seen, BLOCK)
    return {"best": best, "seen": seen}


@triton.jit
def rounded_between_additions(x, total, BLOCK: tl.constexpr):  # fault
    tl.atomic_add(total, tl.load(x + tl.program_id(0)))


@triton.jit
def added_without_rounding(x, total, BLOCK: tl.constexpr):
    tl.atomic_add(total, tl.floor(tl.load(x + tl.program_id(0)) / 16777216.0))


@case(ORDER, rounded_between_additions, added_without_rounding, "total")
def _sum_of_floats(kernel: Any, session: Any) -> dict[str, torch.Tensor]:
    total = torch.zeros(1)
    kernel[(4,)](torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)]), total, BLOCK)
    return {"total": total}
