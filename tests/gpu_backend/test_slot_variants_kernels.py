"""Kernel block tables, and slots and lengths of ranks: the kernels against their NumPy twins, over whole arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

from hypothesis import given, settings
from hypothesis import strategies as st

from runner_api import PAD_SLOT_ID, load_stages

pytestmark = pytest.mark.interpret

POISON = -77
CPU, GPU = load_stages("cpu"), load_stages("gpu")
FEW = settings(max_examples=12)
WAYS = st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 8), (3, 4), (4, 2), (5, 1)])  # (ranks, interleave)


def poisoned(shape: Any, dtype: Any) -> np.ndarray:
    return np.full(shape, POISON, dtype)


def both(name: str, output: str, **arrays: Any) -> np.ndarray:
    """Run the stage on both sides; the answer is what both wrote."""
    expected, got = CPU.run(name, **arrays)[output], GPU.run(name, **arrays)[output]
    assert expected.dtype == got.dtype
    np.testing.assert_array_equal(got, expected)
    return expected


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=5), WAYS, st.data(), st.integers(0, 2**32),
)  # fmt: skip
@FEW
def test_slots_of_ranks(counts: list[int], ways: tuple[int, int], data: st.DataObject, seed: int) -> None:
    rng, (size, interleave), r = np.random.default_rng(seed), ways, len(counts)
    rank = data.draw(st.integers(0, size - 1))
    enabled, sharded = ([data.draw(st.booleans()) for _ in range(3)] for _ in range(2))
    sizes = [interleave * f if s else 5 for f, s in zip((1, 2, 4), sharded, strict=True)]
    starts = np.concatenate([[0], np.cumsum(counts), [sum(counts)]]).astype(np.int32)
    computed = rng.integers(0, 30, r)
    positions = poisoned(sum(counts) + 3, np.int64)
    positions[: sum(counts)] = np.concatenate([c + np.arange(n) for c, n in zip(computed, counts, strict=True)])
    idx_mapping = np.full(r + 1, -1, np.int64)
    idx_mapping[:r] = rng.permutation(r + 1)[:r]
    if data.draw(st.booleans()):
        idx_mapping[0] = -1  # a row that owns no slot, and whose positions lead nowhere
        positions[: counts[0]] = 10**12
    # No wider than a rank needs, and ids so large that a slot needs 64 bits.
    widths = [-(-42 // (b * (size if s else 1))) if on else 1 for b, s, on in zip(sizes, sharded, enabled, strict=True)]
    both(
        "compute_slot_mappings", "slot_mappings", idx_mapping=idx_mapping, query_start_loc=starts, positions=positions,
        block_sizes=sizes, slot_mapping_enabled=enabled, dcp_sharded=sharded, dcp_size=size, dcp_rank=rank,
        dcp_interleave=interleave, num_reqs=r,
        block_tables=[(2**31 - 1 - rng.integers(0, 999, (r + 1, w))).astype(np.int32) for w in widths],
        slot_mappings=poisoned((3, len(positions)), np.int64),
    )  # fmt: skip


def test_together_the_kernels_ranks_keep_every_token_once() -> None:
    table = np.int32([[3, 7, 1, 6], [2, 8, 4, 5]])
    kept = np.zeros(100, np.int64)
    for rank in range(3):
        slots = both(
            "compute_slot_mappings", "slot_mappings", idx_mapping=np.arange(2), query_start_loc=np.int32([0, 60, 100]),
            positions=np.concatenate([np.arange(60), np.arange(40)]), block_sizes=[8], slot_mapping_enabled=[True],
            dcp_sharded=[True], dcp_size=3, dcp_rank=rank, dcp_interleave=4, num_reqs=2, block_tables=[table],
            slot_mappings=poisoned((1, 100), np.int64),
        )[0]  # fmt: skip
        assert len(set(slots[slots != PAD_SLOT_ID].tolist())) == (slots != PAD_SLOT_ID).sum()
        kept += slots != PAD_SLOT_ID
    assert (kept == 1).all()


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), WAYS, st.data())
@FEW
def test_local_lengths(seq_lens: list[int], ways: tuple[int, int], data: st.DataObject) -> None:
    size, interleave = ways
    num_reqs = data.draw(st.integers(0, len(seq_lens)))
    lengths = [
        both(
            "compute_dcp_local_seq_lens", "dcp_local_seq_lens", seq_lens=np.int32(seq_lens), dcp_size=size,
            dcp_rank=rank, dcp_interleave=interleave, num_reqs=num_reqs,
            dcp_local_seq_lens=poisoned(len(seq_lens), np.int32),
        )
        for rank in range(size)
    ]  # fmt: skip
    assert np.sum(lengths, axis=0, dtype=np.int64)[:num_reqs].tolist() == seq_lens[:num_reqs]
    assert not np.any(np.stack(lengths)[:, num_reqs:])


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 8), st.integers(0, 3), st.data())
@FEW
def test_kernel_block_tables(rows: int, width: int, parts: int, gap: int, data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(0, rows))
    table = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 2**27, (rows, width)).astype(np.int32)
    table[:, width // 2] = 0
    out = both(
        "map_to_kernel_block_table", "kernel_block_table", block_table=table, blocks_per_kv_block=parts,
        kernel_block_stride=parts + gap, num_rows=num_rows,
        kernel_block_table=poisoned((rows, width * parts), np.int32),
    )  # fmt: skip
    assert (out[num_rows:] == POISON).all()
