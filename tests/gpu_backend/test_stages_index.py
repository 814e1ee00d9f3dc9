"""The index stages of the GPU backend against their NumPy twins, on ragged batches, over whole arrays.

Every output starts as poison, so an element that one side writes and the other leaves is a difference too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

from hypothesis import given, settings
from hypothesis import strategies as st

from runner_api import load_stages

pytestmark = pytest.mark.interpret

POISON = -77
# Names, not arrays, are what a judge sees: both backends are reached through the loader.
CPU, GPU = load_stages("cpu"), load_stages("gpu")
FEW = settings(max_examples=12)


def poisoned(shape: Any, dtype: Any) -> np.ndarray:
    return np.full(shape, POISON, dtype)


def check(name: str, **arrays: Any) -> dict[str, np.ndarray]:
    """Run the stage on both sides and compare all it may write; the answer is what the NumPy twin wrote."""
    expected, got = CPU.run(name, **arrays), GPU.run(name, **arrays)
    assert expected.keys() == got.keys()
    for output in expected:
        for here, there in zip(listed(expected[output]), listed(got[output]), strict=True):
            assert here.dtype == there.dtype, output
            np.testing.assert_array_equal(there, here, err_msg=output)
    return expected


def listed(value: Any) -> list[np.ndarray]:
    return value if isinstance(value, list) else [value]


@dataclass
class Case:
    """N rows, R requests in them. M tokens of a request, T of a batch, K drafts."""

    n: int
    m: int
    t: int
    k: int
    num_reqs: int
    idx_mapping: np.ndarray  # int64[N], NO_ROW behind the batch
    prefill_len: np.ndarray  # int32[N]
    computed: np.ndarray  # int32[N]
    num_scheduled: np.ndarray  # int32[R]
    num_logits: np.ndarray  # int32[R]
    rng: np.random.Generator

    @property
    def query_start_loc(self) -> np.ndarray:
        return self.run_starts(self.num_scheduled)

    @property
    def cu_num_logits(self) -> np.ndarray:
        return self.run_starts(self.num_logits)

    def run_starts(self, lengths: np.ndarray) -> np.ndarray:
        """int32[N+1]: where each run starts; the tail repeats the end."""
        padded = np.zeros(self.n, np.int32)
        padded[: len(lengths)] = lengths
        return np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)

    @property
    def rows(self) -> np.ndarray:
        return self.idx_mapping[: self.num_reqs]

    @property
    def seq_lens(self) -> np.ndarray:
        """int32[N], 0 behind the batch."""
        out = np.zeros(self.n, np.int32)
        out[: self.num_reqs] = self.computed[self.rows] + self.num_scheduled
        return out

    @property
    def positions(self) -> np.ndarray:
        """int64[T], 0 behind the batch."""
        out = np.zeros(self.t, np.int64)
        runs = [self.computed[r] + np.arange(n) for r, n in zip(self.rows, self.num_scheduled, strict=True)]
        out[: self.num_scheduled.sum()] = np.concatenate([[], *runs])
        return out

    def integers(self, shape: Any, high: int, dtype: Any = np.int32) -> np.ndarray:
        return self.rng.integers(0, high, shape).astype(dtype)


@st.composite
def cases(draw: st.DrawFn, empty_rows: bool = False) -> Case:
    """Decodes, drafts, chunks, last chunks and (where a stage takes them) rows without tokens, in any order."""
    n, m, k = draw(st.integers(1, 6)), 48, draw(st.integers(0, 2))
    num_reqs = draw(st.integers(0 if empty_rows else 1, n))
    rows = draw(st.permutations(range(n)))[:num_reqs]
    prefill_len = np.array(draw(st.lists(st.integers(1, 30), min_size=n, max_size=n)), np.int32)
    computed = np.zeros(n, np.int32)
    num_scheduled, num_logits = [], []
    for row in rows:
        computed[row] = draw(st.integers(0, int(prefill_len[row]) + 10))
        known = max(int(prefill_len[row]) - int(computed[row]), 1)
        query_len = draw(st.integers(0 if empty_rows else 1, known))
        drafts = draw(st.integers(0, k)) if query_len == known else 0
        num_scheduled.append(query_len + drafts)
        num_logits.append(1 + drafts)
    total = sum(num_scheduled)
    t = total + draw(st.integers(0, 5))
    idx_mapping = np.full(n, -1, np.int64)
    idx_mapping[:num_reqs] = rows
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return Case(
        n, m, max(t, 1), k, num_reqs, idx_mapping, prefill_len, computed,
        np.array(num_scheduled, np.int32), np.array(num_logits, np.int32), rng,
    )  # fmt: skip


def test_both_backends_list_the_same_stages() -> None:
    assert list(CPU.stages) == list(GPU.stages)
    for name, spec in CPU.stages.items():
        other = GPU.stages[name]
        assert (spec.inputs, spec.outputs) == (other.inputs, other.outputs), name


@given(cases(empty_rows=True), st.sampled_from([np.int32, np.int64, np.float32]))
@FEW
def test_apply_staged_writes(case: Case, dtype: Any) -> None:
    rows = case.rng.permutation(case.n)
    starts = case.integers(case.n, case.m // 2)
    lengths = 1 + case.integers(case.n, case.m // 2)
    contents = case.integers(lengths.sum(), 1000, dtype)
    written = check(
        "apply_staged_writes", indices=rows.astype(np.int32), starts=starts, contents=contents,
        cu_lens=np.cumsum(lengths).astype(np.int32), num_writes=case.n, base=poisoned((case.n, case.m), dtype),
    )["base"]  # fmt: skip
    assert (written != POISON).sum() == lengths.sum()


@given(cases(empty_rows=True))
@FEW
def test_prepare_query_start_loc(case: Case) -> None:
    out = check(
        "prepare_query_start_loc", num_scheduled_tokens=case.num_scheduled, num_reqs=case.num_reqs,
        query_start_loc=poisoned(case.n + 1, np.int32),
    )  # fmt: skip
    np.testing.assert_array_equal(out["query_start_loc"], case.query_start_loc)


@given(cases(), st.integers(1, 3))
@FEW
def test_prepare_prefill_inputs(case: Case, lookahead: int) -> None:
    check(
        "prepare_prefill_inputs", idx_mapping=case.idx_mapping, query_start_loc=case.query_start_loc,
        all_token_ids=case.integers((case.n, case.m), 1000), prefill_len=case.prefill_len,
        num_computed_tokens=case.computed, num_reqs=case.num_reqs, input_ids=poisoned(case.t, np.int32),
        next_prefill_tokens=poisoned((lookahead, case.n), np.int32),
    )  # fmt: skip


@given(cases(empty_rows=True))
@FEW
def test_prepare_pos_seq_lens(case: Case) -> None:
    out = check(
        "prepare_pos_seq_lens", idx_mapping=case.idx_mapping, query_start_loc=case.query_start_loc,
        num_computed_tokens=case.computed, num_reqs=case.num_reqs, positions=poisoned(case.t, np.int64),
        seq_lens=poisoned(case.n, np.int32),
    )  # fmt: skip
    np.testing.assert_array_equal(out["positions"], case.positions)


@given(cases(empty_rows=True))
@FEW
def test_expand_idx_mapping(case: Case) -> None:
    size = case.n * (1 + case.k)
    check(
        "expand_idx_mapping", idx_mapping=case.idx_mapping, cu_num_logits=case.cu_num_logits, num_reqs=case.num_reqs,
        expanded_idx_mapping=poisoned(size, np.int64), expanded_local_pos=poisoned(size, np.int32),
    )  # fmt: skip


@given(cases())
@FEW
def test_combine_sampled_and_draft_tokens(case: Case) -> None:
    check(
        "combine_sampled_and_draft_tokens", idx_mapping=case.idx_mapping, query_start_loc=case.query_start_loc,
        seq_lens=case.seq_lens, prefill_len=case.prefill_len,
        last_sampled_tokens=case.integers(case.n, 1000, np.int64),
        draft_tokens=case.integers((case.n, case.k), 1000, np.int64), cu_num_logits=case.cu_num_logits,
        num_reqs=case.num_reqs, input_ids=poisoned(case.t, np.int32),
        logits_indices=poisoned(case.n * (1 + case.k), np.int64),
    )  # fmt: skip


@given(cases(), st.data())
@FEW
def test_patch_input_ids(case: Case, data: st.DataObject) -> None:
    """Requests in other rows than in the step before; behind the batch, what an earlier step left."""
    previous = case.rng.permutation(case.n)
    previous[data.draw(st.lists(st.integers(0, case.n - 1)))] = -1
    check(
        "patch_input_ids", previous_rows=previous, query_start_loc=case.query_start_loc,
        last_sampled_tokens=case.integers(case.n, 2**31, np.int64), num_reqs=case.num_reqs,
        input_ids=poisoned(case.t, np.int32),
    )  # fmt: skip


@given(st.integers(1, 7), st.lists(st.integers(1, 40), min_size=1, max_size=3), st.data())
@FEW
def test_move_rows(n: int, widths: list[int], data: st.DataObject) -> None:
    """Any row of any table gets what any row of it holds, or nothing."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    places = [(k, row) for k in range(len(widths)) for row in range(n)]
    chosen = data.draw(st.lists(st.sampled_from(places), min_size=1, unique=True))
    moves = [(k, int(rng.integers(-1, n)), row, int(rng.integers(1, widths[k] + 1))) for k, row in chosen]
    tables = [rng.integers(1, 2**31, (n, w)).astype(np.int32) for w in widths]
    tables[-1] = tables[-1].view(np.float32)
    check(
        "move_rows", moves=np.ascontiguousarray(np.array(moves, np.int64).T), max_length=max(widths), tables=tables
    )  # fmt: skip


@given(cases(empty_rows=True), st.lists(st.sampled_from([(16, 0), (8, 7), (4, 3), (5, 9)]), min_size=1, max_size=3))
@FEW
def test_gather_block_tables(case: Case, groups: list[tuple[int, int]]) -> None:
    widths = [-(-case.m // size) for size, _ in groups]
    num_blocks = np.stack([case.integers(case.n, w + 1) for w in widths])
    check(
        "gather_block_tables", idx_mapping=case.idx_mapping, num_computed_tokens=case.computed,
        num_blocks=num_blocks, block_sizes=[s for s, _ in groups], window_reach=[r for _, r in groups],
        num_reqs=case.num_reqs, num_rows=int(case.rng.integers(case.num_reqs, case.n + 1)),
        block_tables=[case.integers((case.n, w), 1000) for w in widths],
        input_block_tables=[poisoned((case.n, w), np.int32) for w in widths],
    )  # fmt: skip


@given(cases(empty_rows=True), st.lists(st.sampled_from([16, 8, 5]), min_size=1, max_size=3), st.data())
@FEW
def test_compute_slot_mappings(case: Case, sizes: list[int], data: st.DataObject) -> None:
    idx_mapping = case.idx_mapping.copy()
    if data.draw(st.booleans()):
        idx_mapping[0] = -1  # a row that owns no slot
    enabled = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    # Ids so large that block * block_size needs 64 bits; a disabled group's table is too narrow to be read.
    tables = [
        2**31 - 1 - case.integers((case.n, -(-case.m // s) if on else 1), 1000)
        for s, on in zip(sizes, enabled, strict=True)
    ]
    check(
        "compute_slot_mappings", idx_mapping=idx_mapping, query_start_loc=case.query_start_loc,
        positions=case.positions, block_sizes=sizes, slot_mapping_enabled=enabled, dcp_sharded=enabled, dcp_size=1,
        dcp_rank=0, dcp_interleave=1, num_reqs=case.num_reqs,
        block_tables=[t.astype(np.int32) for t in tables], slot_mappings=poisoned((len(sizes), case.t), np.int64),
    )  # fmt: skip


@given(cases(), st.sampled_from([np.float32, np.int64]), st.sampled_from([(1, 1), (3, 8)]))
@FEW
def test_reshape_and_cache(case: Case, dtype: Any, heads_size: tuple[int, int]) -> None:
    num_blocks, block_size = 8, 16
    slots = case.rng.permutation(num_blocks * block_size)[: case.t].astype(np.int64)
    slots[case.rng.random(len(slots)) < 0.3] = -1
    key, value = (case.integers((len(slots), *heads_size), 1000, dtype) for _ in range(2))
    cache = poisoned((num_blocks, block_size, *heads_size), dtype)
    check("reshape_and_cache", key=key, value=value, slot_mapping=slots, key_cache=cache, value_cache=cache)


@given(cases())
@FEW
def test_count_sampled_and_rejected(case: Case) -> None:
    num_sampled = poisoned(case.n, np.int32)
    num_sampled[: case.num_reqs] = case.rng.integers(0, case.num_logits + 1)
    check(
        "count_sampled_and_rejected", idx_mapping=case.idx_mapping, seq_lens=case.seq_lens,
        prefill_len=case.prefill_len, cu_num_logits=case.cu_num_logits, num_reqs=case.num_reqs,
        num_sampled=num_sampled, num_rejected=poisoned(case.n, np.int32),
    )  # fmt: skip


@given(cases(empty_rows=True), st.booleans())
@FEW
def test_post_update(case: Case, skip_a_row: bool) -> None:
    idx_mapping = case.idx_mapping.copy()
    if skip_a_row:
        idx_mapping[0] = -1
    num_sampled, num_rejected = np.zeros(case.n, np.int32), np.zeros(case.n, np.int32)
    num_sampled[: case.num_reqs] = case.rng.integers(0, case.num_logits + 1)
    num_rejected[: case.num_reqs] = case.num_logits - num_sampled[: case.num_reqs]
    check(
        "post_update", idx_mapping=idx_mapping, query_start_loc=case.query_start_loc,
        sampled_token_ids=case.integers((case.n, 1 + case.k), 1000, np.int64), num_sampled=num_sampled,
        num_rejected=num_rejected, num_reqs=case.num_reqs, last_sampled_tokens=poisoned(case.n, np.int64),
        total_len=case.integers(case.n, case.m - 4), all_token_ids=poisoned((case.n, case.m), np.int32),
        num_computed_tokens=case.computed,
    )  # fmt: skip
