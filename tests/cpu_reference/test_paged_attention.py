"""Paged attention against a plain softmax over each request's own keys, and what it must not depend on."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from cpu_reference.attention import paged_attention

HEAD_SIZE = 8


class Batch:
    """Requests with random keys in scattered blocks; everything nobody owns is NaN, the null block included.

    lengths: (query_len, context) per request.
    """

    def __init__(self, lengths, heads=(4, 2), block_size=4, dtype=np.float64, seed=0, scatter=True):
        rng = np.random.default_rng(seed)
        self.lengths, self.heads, self.block_size = lengths, heads, block_size
        num_blocks = [-(-(n + c) // block_size) for n, c in lengths]
        ids = np.arange(1, sum(num_blocks) + 1 + 3)
        if scatter:
            rng.shuffle(ids)
        shape = (len(ids) + 1, block_size, heads[1], HEAD_SIZE)
        self.k, self.v = np.full(shape, np.nan, dtype), np.full(shape, np.nan, dtype)
        self.block_table = np.full((len(lengths), max([*num_blocks, 1]) + 2), len(ids), np.int32)  # stale columns
        self.keys, self.values, used = [], [], 0
        for i, (n, c) in enumerate(lengths):
            total = n + c
            self.block_table[i, : num_blocks[i]] = ids[used : used + num_blocks[i]]
            used += num_blocks[i]
            keys, values = rng.normal(size=(2, total, heads[1], HEAD_SIZE)).astype(dtype)
            position = np.arange(total)
            block, offset = self.block_table[i, position // block_size], position % block_size
            self.k[block, offset], self.v[block, offset] = keys, values
            self.keys.append(keys), self.values.append(values)
        self.query_start_loc = np.cumsum([0, *(n for n, _ in lengths)]).astype(np.int32)
        self.seq_lens = np.int32([n + c if n else 0 for n, c in lengths])
        self.query = rng.normal(size=(int(self.query_start_loc[-1]) + 3, heads[0], HEAD_SIZE)).astype(dtype)
        self.scale = HEAD_SIZE**-0.5

    def run(self, window=None):
        out = np.full_like(self.query, np.nan)
        paged_attention(
            self.query, self.k, self.v, self.block_table, self.query_start_loc, self.seq_lens, len(self.lengths),
            self.scale, window, max(n for n, _ in self.lengths), out,
        )  # fmt: skip
        return out

    def dense(self, window=None):
        """One query at a time, in float64."""
        out, t = np.zeros(self.query.shape), 0
        for i, (n, c) in enumerate(self.lengths):
            for j in range(n):
                first = 0 if window is None else max(c + j - window + 1, 0)
                for h in range(self.heads[0]):
                    group = h // (self.heads[0] // self.heads[1])
                    keys = self.keys[i][first : c + j + 1, group].astype(np.float64)
                    values = self.values[i][first : c + j + 1, group].astype(np.float64)
                    score = np.exp(keys @ self.query[t, h].astype(np.float64) * self.scale)
                    out[t, h] = score @ values / score.sum()
                t += 1
        return out


LENGTHS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=5)


@settings(max_examples=60)
@given(
    lengths=LENGTHS,
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    block_size=st.sampled_from([1, 3, 4, 16]),
    window=st.sampled_from([None, 1, 3, 8]),
)
def test_equals_a_dense_softmax(lengths, heads, block_size, window):
    """NaN fills what nobody owns: other blocks, the rest of the last block, stale columns of the table."""
    batch = Batch(lengths, heads, block_size)
    np.testing.assert_allclose(batch.run(window), batch.dense(window), rtol=1e-12, atol=1e-13)


def test_tokens_of_no_request_get_zero():
    batch = Batch([(2, 3), (0, 0), (1, 0)])
    assert np.array_equal(batch.run()[3:], np.zeros((3, 4, HEAD_SIZE)))


def test_one_key_gives_its_value():
    batch = Batch([(1, 0)], heads=(4, 2))
    assert np.array_equal(batch.run()[0], batch.values[0][0][[0, 0, 1, 1]])


@settings(max_examples=25)
@given(total=st.integers(2, 14), data=st.data(), window=st.sampled_from([None, 4]))
def test_chunks_give_what_the_whole_gives(total, data, window):
    """Row by row of the same keys, whatever the cut: each query sees the keys up to its own position."""
    whole = Batch([(total, 0)], block_size=4)
    expected, query = whole.run(window), whole.query
    cut = data.draw(st.integers(1, total - 1))
    for start, end in ((0, cut), (cut, total)):
        out = np.full((end - start, *query.shape[1:]), np.nan)
        paged_attention(
            query[start:end], whole.k, whole.v, whole.block_table, np.int32([0, end - start]), np.int32([end]), 1,
            whole.scale, window, end - start, out,
        )  # fmt: skip
        np.testing.assert_allclose(out, expected[start:end], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("window", [1, 3, 7, 16, 100])
def test_keys_behind_the_window_are_not_read(window):
    """Their blocks may be somebody else's: NaN in them, or the null block in their column, changes nothing."""
    batch = Batch([(1, 15), (3, 12)], block_size=4)
    expected = batch.dense(window)
    for i, (n, c) in enumerate(batch.lengths):
        behind = max(c - window + 1, 0)  # positions that no query of the request sees
        position = np.arange(behind)
        block = batch.block_table[i, position // 4]
        batch.k[block, position % 4] = batch.v[block, position % 4] = np.nan
        batch.block_table[i, : behind // 4] = 0
        assert n + c > behind
    np.testing.assert_allclose(batch.run(window), expected, rtol=1e-12, atol=1e-13)


def test_neighbours_do_not_matter():
    """The same request alone and between others; its blocks lie elsewhere."""
    alone, among = Batch([(3, 9)], seed=1), Batch([(3, 9), (1, 30), (0, 0)], seed=1)
    among.keys[0][:], among.values[0][:] = alone.keys[0], alone.values[0]
    position = np.arange(12)
    block = among.block_table[0, position // 4]
    among.k[block, position % 4], among.v[block, position % 4] = alone.keys[0], alone.values[0]
    among.query[:3] = alone.query[:3]
    np.testing.assert_allclose(among.run()[:3], alone.run()[:3], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("context", [0, 31, 400])
def test_float32_stays_within_its_rounding(context):
    """|error| <= 2 e^(2 d) - 2 times the largest |value|, where d bounds a score's error and the sums add (n + 4) eps.

    A score is a dot product of head_size terms: its error is at most (head_size + 2) eps * sum |q| |k| * scale.
    """
    batch = Batch([(2, context), (1, context)], heads=(4, 2), dtype=np.float32)
    eps, result, exact = float(np.finfo(np.float32).eps), batch.run(), batch.dense()
    largest = max(float(np.abs(v).max()) for v in batch.values)
    magnitude = max(
        float((np.abs(batch.query).max(0).max(0) @ np.abs(k).max(0).max(0)) * batch.scale) for k in batch.keys
    )
    score_error = (HEAD_SIZE + 2) * eps * magnitude
    bound = (2 * np.expm1(2 * score_error) + (context + 6) * eps) * largest
    error = np.abs(result[:3] - exact[:3]).max()
    assert error <= bound
    assert bound < 1e-3  # the bound says something
    assert error > 0  # and float32 was used
