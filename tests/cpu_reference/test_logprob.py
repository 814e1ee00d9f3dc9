"""Log probabilities: each stage against a slow reading of its rule in Python's own floats, awkward rows included."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from cpu_reference.sample.logits_rows import LogitsRows
from cpu_reference.sample.logprob import (
    TokenLogprobs,
    compute_logprob_stats,
    compute_logprobs,
    gather_logprobs,
    select_listed_tokens,
    select_top_tokens,
)
from runner_api import NO_ROW, NewRequestData, SamplingParams
from runner_api.config import LOGPROBS_MODES

LOW, HIGH, NAN = -math.inf, math.inf, math.nan
VALUES = st.one_of(st.sampled_from([LOW, HIGH, NAN, 0.0, -0.0, 1.0]), st.floats(-30, 30, width=32))


def log_sum_exp(row):
    """In exact sums; as the stage's docstring says for rows without a distribution."""
    if any(math.isnan(x) or x == HIGH for x in row):
        return NAN
    best = max(row)
    return LOW if best == LOW else best + math.log(math.fsum(math.exp(x - best) for x in row))


def best_first(row):
    """Token ids by value, ties to the lower id, NaNs last."""
    return sorted(range(len(row)), key=lambda v: (math.isnan(row[v]), 0.0 if math.isnan(row[v]) else -row[v], v))


def brute_force(row, token, num_top):
    """ids, log probabilities and rank of one row."""
    total = log_sum_exp(row)
    ids = [token, *best_first(row)[:num_top]]
    return ids, [row[v] - total for v in ids], sum(x >= row[token] for x in row)


@settings(max_examples=150)
@given(st.data())
def test_against_brute_force(data):
    num_logits, vocab_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    rows = data.draw(st.lists(st.lists(VALUES, min_size=vocab_size, max_size=vocab_size), min_size=num_logits,
                              max_size=num_logits))  # fmt: skip
    tokens = [data.draw(st.integers(0, vocab_size - 1)) for _ in rows]
    num_top = data.draw(st.integers(0, vocab_size))
    for dtype in (np.float32, np.float64):
        got = compute_logprobs(np.array(rows, dtype), np.array(tokens), num_top)
        assert (got.token_ids.dtype, got.logprobs.dtype, got.ranks.dtype) == (np.int32, np.float32, np.int64)
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            ids, values, rank = brute_force(row, token, num_top)
            assert got.token_ids[i].tolist() == ids
            np.testing.assert_allclose(got.logprobs[i], values, rtol=1e-6, atol=2e-6)
            assert got.ranks[i] == rank


def test_ranks_count_real_tokens_that_are_at_least_as_likely():
    """1 for the only best, ties count, -inf has all before it, NaN is not anywhere."""
    logits = np.float32([[1, 3, 3, LOW, LOW, NAN]] * 6)
    log_sum, ranks = np.zeros(6, np.float32), np.zeros(6, np.int64)
    compute_logprob_stats(np.arange(6), 6, logits, log_sum, ranks)
    assert ranks.tolist() == [3, 2, 2, 5, 5, 0]
    assert np.isnan(log_sum).all()
    compute_logprob_stats(np.zeros(1, int), 1, np.full((1, 7), LOW, np.float32), log_sum, ranks)
    assert ranks[0] == 7
    assert log_sum[0] == LOW


def test_stages_write_their_rows_and_no_others():
    logits = np.float32([[0, 1, 2], [2, 1, 0], [5, 5, 5]])
    log_sum, ranks = np.full(3, 9.0), np.full(3, 9)
    compute_logprob_stats(np.int64([0, 1, 2]), 2, logits, log_sum, ranks)
    assert ranks.tolist() == [3, 2, 9]
    assert log_sum[2] == 9
    columns = np.full((3, 4), 9, np.int32)
    select_top_tokens(2, 2, logits, columns)
    assert columns.tolist() == [[2, 1, -1, -1], [0, 1, -1, -1], [9] * 4]
    ids, values = np.full((3, 5), 9, np.int32), np.full((3, 5), 9, np.float32)
    gather_logprobs(np.int64([0, 1, 2]), columns, np.zeros(3), 2, logits, ids, values)
    assert ids.tolist() == [[0, 2, 1, 0, 0], [1, 0, 1, 0, 0], [9] * 5]
    assert values.tolist() == [[0, 2, 1, LOW, LOW], [1, 2, 1, LOW, LOW], [9] * 5]


def test_listed_tokens_are_looked_up_by_row():
    columns = np.arange(20, dtype=np.int32).reshape(5, 4)
    before = columns.copy()
    listed = np.full((3, 128), -77, np.int32)
    listed[0, :2], listed[2, :4] = [8, 6], [1, 2, 3, 2]
    mapping = np.int64([2, NO_ROW, 1, 0, 0])
    select_listed_tokens(mapping, np.int32([2, 0, 4]), listed, 4, columns)
    assert columns.tolist() == [[1, 2, 3, 2], before[1].tolist(), before[2].tolist(), [8, 6, -1, -1],
                                before[4].tolist()]  # fmt: skip


def rows_of(batch_rows):
    n = len(batch_rows)
    rows = np.array(batch_rows, np.int64)
    return LogitsRows(n, rows, np.zeros(n, np.int32), np.zeros(n, np.int64), np.zeros(n, np.int32), rows)


def table(mode, wishes, vocab_size=10):
    kept = TokenLogprobs(len(wishes) + 2, vocab_size, mode)
    for row, wish in enumerate(wishes):
        kept.add_request(row, SamplingParams(**wish), NewRequestData("x", [1], [1], 0, ([1],)))
    return kept


WISHES = [{}, {"logprobs": 0}, {"logprobs": 2}, {"logprobs": -1}, {"logprob_token_ids": (7, 7, 0)},
          {"logprob_token_ids": (9,), "logprobs": 1}]  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "widths"),
    [([1], (0, 0)), ([0, 1], (0, 0)), ([2, 1], (2, 2)), ([4], (0, 3)), ([2, 4], (2, 3)), ([5, 2], (2, 2)),
     ([3, 4], (10, 10)), ([5], (0, 1))],
)  # fmt: skip
def test_a_batch_is_as_wide_as_its_widest_wish(batch, widths):
    kept = table("raw_logprobs", WISHES)
    assert kept.used_by(np.array(batch))
    assert kept.widths(np.array(batch)) == widths
    logits = np.random.default_rng(0).normal(size=(len(batch), 10)).astype(np.float32)
    got = kept.compute(rows_of(batch), np.zeros(len(batch), np.int64), logits)
    assert got.token_ids.shape == got.logprobs.shape == (len(batch), 1 + widths[1])
    assert got.ranks.shape == (len(batch),)
    for i, row in enumerate(batch):
        own = list(WISHES[row].get("logprob_token_ids", best_first(logits[i].tolist())[: widths[0]]))
        filler = [0] * (widths[1] - len(own))
        assert got.token_ids[i].tolist() == [0, *own, *filler]
        if filler:
            assert (got.logprobs[i, -len(filler) :] == LOW).all()
        assert np.isfinite(got.logprobs[i, : 1 + len(own)]).all()


def test_nobody_wants_any():
    kept = table("raw_logprobs", WISHES)
    assert not kept.used_by(np.array([0]))
    assert not kept.used_by(np.array([], int))


def test_a_row_forgets_its_last_owner():
    kept = table("raw_logprobs", WISHES)
    for row in range(len(WISHES)):
        kept.add_request(row, SamplingParams(), NewRequestData("y", [1], [1], 0, ([1],)))
        assert not kept.used_by(np.array([row]))
        assert kept.row_widths(row) == {"listed_token_ids": 0}


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_modes(mode):
    kept = table(mode, WISHES)
    assert kept.of_processed == mode.startswith("processed")
    logits = np.float32([np.arange(10) * 0.5])
    got = kept.compute(rows_of([3]), np.int64([4]), logits)
    values = logits[0].tolist() if mode.endswith("logits") else [x - log_sum_exp(logits[0].tolist()) for x in logits[0]]
    np.testing.assert_allclose(got.logprobs[0], np.float64(values)[[4, *range(9, -1, -1)]], rtol=1e-6)
    if mode.endswith("logprobs"):
        assert np.exp(got.logprobs[0, 1:].astype(np.float64)).sum() == pytest.approx(1, abs=1e-6)
    assert got.ranks.tolist() == [6]


def test_a_row_does_not_see_its_neighbours():
    rng = np.random.default_rng(1)
    logits, tokens = rng.normal(0, 4, (40, 300)).astype(np.float32), rng.integers(0, 300, 40)
    whole = compute_logprobs(logits, tokens, 5)
    for low, high in ((0, 1), (39, 40), (3, 20)):
        part = compute_logprobs(logits[low:high], tokens[low:high], 5)
        np.testing.assert_array_equal(part.logprobs, whole.logprobs[low:high])
        np.testing.assert_array_equal(part.token_ids, whole.token_ids[low:high])
        np.testing.assert_array_equal(part.ranks, whole.ranks[low:high])


def test_a_large_vocabulary():
    """In float32 logits of any size: no more than their own rounding is lost."""
    logits = np.random.default_rng(2).normal(200, 6, (2, 50257)).astype(np.float32)
    got = compute_logprobs(logits, np.int64([5, 50256]), 20)
    for i in range(2):
        ids, values, rank = brute_force(logits[i].tolist(), [5, 50256][i], 20)
        assert got.token_ids[i].tolist() == ids
        np.testing.assert_allclose(got.logprobs[i], values, rtol=1e-6)
        assert got.ranks[i] == rank
