"""Where a token's K and V go when blocks are divided into kernel blocks, or shared out over several ranks.

Worked numbers, and brute force: positions are dealt out one by one to ranks that write them down.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu_reference.block_table import BlockTables, gather_block_tables, map_to_kernel_block_table
from cpu_reference.slot_mapping import (
    compute_dcp_local_seq_lens,
    compute_slot_mappings,
    rank_and_local_position,
)
from runner_api import (
    NULL_BLOCK_ID,
    PAD_SLOT_ID,
    CapabilityError,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    ParallelContext,
    RunnerConfig,
    load_runner,
)

WAYS = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 4, 8, 16)))  # (ranks, interleave)


def dealt(num_positions: int, size: int, interleave: int) -> list[list[int]]:
    """Of each rank: the positions it keeps, in order."""
    hands: list[list[int]] = [[] for _ in range(size)]
    for position in range(num_positions):
        for rank in range(size):
            if interleave * rank <= position % (interleave * size) < interleave * (rank + 1):
                hands[rank].append(position)
    return hands


def slots_of(positions, table, block_size, size=1, rank=0, interleave=1, *, sharded=True, enabled=True, row=0):
    """Slots of one request's tokens, whose row of the table is `row`."""
    table = np.asarray(table, np.int32).reshape(1, -1) if np.ndim(table) < 2 else table
    out = np.full((1, len(positions)), -9)
    compute_slot_mappings(
        np.int64([row]), np.int32([0, len(positions)]), np.asarray(positions, np.int64), [block_size], [enabled],
        [sharded], size, rank, interleave, 1, [table], out,
    )  # fmt: skip
    return out[0]


def lengths_of(seq_lens, size, rank, interleave, num_reqs=None):
    out = np.full(len(seq_lens), -9, np.int32)
    compute_dcp_local_seq_lens(
        np.asarray(seq_lens, np.int32), size, rank, interleave, len(seq_lens) if num_reqs is None else num_reqs, out
    )
    return out


# -- ranks: worked numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "interleave", "rank", "local"),
    [
        (0, 4, 0, 0), (5, 4, 1, 1), (13, 4, 1, 5), (31, 4, 1, 15), (32, 4, 0, 16), (37, 4, 1, 17), (63, 4, 1, 31),
        (1, 1, 1, 0), (5, 1, 1, 2), (33, 1, 1, 16),
    ],
)  # fmt: skip
def test_who_keeps_a_position_and_where(position, interleave, rank, local):
    """Two ranks, blocks of 16 tokens: block 1 of the table holds positions 32 .. 63, sixteen on each rank."""
    assert [int(x[0]) for x in rank_and_local_position(np.int64([position]), 2, interleave)] == [rank, local]
    table = [7, 9]
    slots = [int(slots_of([position], table, 16, 2, r, interleave)[0]) for r in range(2)]
    assert slots[rank] == table[local // 16] * 16 + local % 16
    assert slots[1 - rank] == PAD_SLOT_ID


@pytest.mark.parametrize(
    ("length", "size", "interleave", "lengths"),
    [(13, 2, 4, [8, 5]), (41, 2, 1, [21, 20]), (37, 4, 2, [10, 10, 9, 8])],
)
def test_local_lengths(length, size, interleave, lengths):
    assert [int(lengths_of([length], size, rank, interleave)[0]) for rank in range(size)] == lengths


# -- ranks: brute force -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "interleave"), WAYS)
def test_a_rank_counts_what_it_keeps_without_holes(size, interleave):
    rank, local = rank_and_local_position(np.arange(300), size, interleave)
    for r, kept in enumerate(dealt(300, size, interleave)):
        assert np.flatnonzero(rank == r).tolist() == kept
        assert local[rank == r].tolist() == list(range(len(kept)))


@pytest.mark.parametrize(("size", "interleave"), WAYS)
def test_local_lengths_add_up_and_hardly_differ(size, interleave):
    seq_lens = np.arange(200, dtype=np.int32)
    lengths = np.stack([lengths_of(seq_lens, size, rank, interleave) for rank in range(size)])
    for length in seq_lens:
        assert lengths[:, length].tolist() == [len(kept) for kept in dealt(length, size, interleave)]
    assert (lengths.sum(0) == seq_lens).all()
    assert (lengths.max(0) - lengths.min(0)).max() <= interleave


@pytest.mark.parametrize(("size", "interleave"), WAYS)
def test_together_the_ranks_keep_every_token_once(size, interleave):
    """One block id stands for a block on every rank: the table is as wide as the longest rank needs."""
    length, block_size = 160, 16
    table = 1 + np.random.default_rng(size * 100 + interleave).permutation(-(-length // (block_size * size)))
    places = []
    for rank in range(size):
        slots = slots_of(range(length), table, block_size, size, rank, interleave)
        kept = np.flatnonzero(slots != PAD_SLOT_ID)
        places += [(position, rank, int(slots[position])) for position in kept]
        # read back in the order of the rank's own places: its positions ascend
        block_of = {int(b): c for c, b in enumerate(table)}
        local = [block_of[int(s) // block_size] * block_size + int(s) % block_size for s in slots[kept]]
        assert local == list(range(len(kept)))
        assert len(kept) == lengths_of([length], size, rank, interleave)[0]
    assert sorted(position for position, _, _ in places) == list(range(length))
    assert len({place[1:] for place in places}) == length, "no two tokens in one place"


@pytest.mark.parametrize(("size", "interleave"), WAYS)
def test_two_other_forms_of_the_formula_say_the_same(size, interleave):
    """By virtual blocks of block_size * size tokens: as vLLM 0.33 has it, and as its V1 has it."""
    block_size, position = 16, np.arange(500)
    virtual = block_size * size
    offset = position % virtual
    rank = (offset // interleave) % size
    in_block = (offset // (interleave * size)) * interleave + offset % interleave
    local = position // virtual * block_size + in_block
    assert [x.tolist() for x in rank_and_local_position(position, size, interleave)] == [rank.tolist(), local.tolist()]
    table = 1 + np.arange(-(-500 // virtual))
    for r in range(size):
        v1 = np.where(rank == r, table[position // virtual] * block_size + in_block, PAD_SLOT_ID)
        assert slots_of(position, table, block_size, size, r, interleave).tolist() == v1.tolist()


@pytest.mark.parametrize("interleave", [1, 2, 4, 16])
def test_one_rank_is_the_plain_law_for_any_interleave(interleave):
    plain = slots_of(range(60), [3, 1, 2, 5], 16, sharded=False)
    assert slots_of(range(60), [3, 1, 2, 5], 16, 1, 0, interleave).tolist() == plain.tolist()
    assert lengths_of([0, 1, 59], 1, 0, interleave).tolist() == [0, 1, 59]


# -- ranks: edges -------------------------------------------------------------------------------------------------


def test_every_rank_keeps_a_group_that_is_not_sharded():
    plain = slots_of(range(40), [4, 2, 6], 16)
    for rank in range(3):
        assert slots_of(range(40), [4, 2, 6], 16, 3, rank, 2, sharded=False).tolist() == plain.tolist()


def test_groups_are_sharded_one_by_one():
    table, out = np.int32([[3, 5, 8, 9]]), np.full((4, 12), -9)
    compute_slot_mappings(
        np.zeros(1, np.int64), np.int32([0, 8]), np.arange(12), [4, 2, 4, 4], [True, True, False, True],
        [True, False, True, True], 2, 1, 2, 1, [table] * 4, out,
    )  # fmt: skip
    x = PAD_SLOT_ID
    assert out.tolist() == [
        [x, x, 12, 13, x, x, 14, 15, x, x, x, x],
        [6, 7, 10, 11, 16, 17, 18, 19, x, x, x, x],
        [x] * 12,
        [x, x, 12, 13, x, x, 14, 15, x, x, x, x],
    ]


def test_a_row_of_nobody_owns_no_slot_and_reads_no_table():
    assert slots_of([10**9, 5], [1], 16, 2, 0, 4, row=-1).tolist() == [PAD_SLOT_ID] * 2


def test_a_token_of_another_rank_reads_no_table():
    """Of 16 tokens the first rank keeps 8, in one block of 8: the second block's column is not there."""
    assert slots_of([7, 8, 15], [3], 8, 2, 0, 8).tolist() == [31, PAD_SLOT_ID, PAD_SLOT_ID]


def test_slots_on_a_rank_are_computed_in_64_bits():
    assert slots_of([37], [1, 2**31 - 1], 16, 2, 1, 4)[0] == (2**31 - 1) * 16 + 1


def test_a_run_that_crosses_blocks_is_a_mistake():
    with pytest.raises(AssertionError, match="inside of a block"):
        slots_of([0], [1], 16, 2, 0, 32)


def test_padding_rows_have_no_length():
    assert lengths_of([9, 13, 77, 77], 2, 1, 4, num_reqs=2).tolist() == [4, 5, 0, 0]
    assert lengths_of([5], 2, 1, 4, num_reqs=0).tolist() == [0]
    assert lengths_of([2**31 - 1], 3, 1, 4).tolist() == [(2**31 - 1) // 12 * 4 + 3]


def test_a_runner_is_one_rank():
    """Ranks are index stages alone: nothing merges what attention finds on each of them."""
    with pytest.raises(CapabilityError, match="several ranks are not offered"):
        load_runner("cpu", RunnerConfig(parallel=ParallelContext(dcp_size=2)))


# -- kernel blocks ------------------------------------------------------------------------------------------------


def divided(table, parts, stride=None, num_rows=None):
    table = np.asarray(table, np.int32)
    out = np.full((len(table), table.shape[1] * parts), -9, np.int32)
    map_to_kernel_block_table(table, parts, stride or parts, len(table) if num_rows is None else num_rows, out)
    return out


def test_the_kernel_blocks_of_a_table():
    assert divided([[5, 2, 0]], 2).tolist() == [[10, 11, 4, 5, 0, 1]]
    assert divided([[5, 2, 0]], 1).tolist() == [[5, 2, 0]]


def test_packed_blocks_lie_a_stride_apart():
    """Each block of two kernel blocks is followed by one of something else."""
    assert divided([[5, 2, 0]], 2, stride=3).tolist() == [[15, 16, 6, 7, 0, 1]]


def test_rows_of_padding_and_columns_behind_a_window_are_null_blocks():
    """32-token blocks, 16-token kernel blocks: what is null in the table is null in the kernel's."""
    source, gathered = np.int32([[4, 5, 6, 7]]), np.full((3, 4), -9, np.int32)
    gather_block_tables(np.zeros(1, np.int64), np.int32([100]), np.int32([[4]]), [32], [31], 1, 2, [source], [gathered])
    assert gathered.tolist() == [[0, 0, 6, 7], [0, 0, 0, 0], [-9] * 4]
    out = divided(gathered, 2, num_rows=2)
    assert out.tolist() == [[0, 1, 0, 1, 12, 13, 14, 15], [0, 1] * 4, [-9] * 8]
    assert (out[:2] // 2 == np.repeat(gathered[:2], 2, axis=1)).all()
    assert (out[1] // 2 == NULL_BLOCK_ID).all()


@given(
    st.integers(1, 8), st.integers(1, 6), st.lists(st.integers(0, 2**20), min_size=1, max_size=9),
    st.integers(0, 2**32),
)  # fmt: skip
def test_a_token_has_the_same_slot_in_both_views(parts, kernel_size, blocks, seed):
    block_size = parts * kernel_size
    positions = np.random.default_rng(seed).integers(0, len(blocks) * block_size, 20)
    table = np.int32([blocks])
    expected = slots_of(positions, table, block_size)
    assert slots_of(positions, divided(table, parts), kernel_size).tolist() == expected.tolist()
    # spelled out: kernel_table[c * r + j] * kernel_size + o == table[c] * block_size + j * kernel_size + o
    for c, j, o in itertools.product(range(len(blocks)), range(parts), (0, kernel_size - 1)):
        assert divided(table, parts)[0, c * parts + j] * kernel_size + o == (
            blocks[c] * block_size + j * kernel_size + o
        )


@given(st.integers(2, 4), st.lists(st.lists(st.integers(1, 99), max_size=3), min_size=1, max_size=4))
def test_dividing_what_is_appended_gives_the_same_row(parts, appended):
    """vLLM's V1 divides blocks when a row grows; here they are divided when attention is prepared."""
    spec = KVCacheSpec(4, 1, 1, "int64", kind="token_position")
    tables, grown = BlockTables(KVCacheConfig(999, (KVCacheGroup(("a",), spec),)), 1, 16, 64, [0]), []
    for ids in appended:
        tables.append_block_ids(0, [ids], overwrite=False)
        tables.apply_staged_writes()
        grown += [b * parts + j for b in ids for j in range(parts)]
    row = divided(tables.block_tables[0], parts)[0]
    assert row[: tables.num_blocks[0, 0] * parts].tolist() == grown
