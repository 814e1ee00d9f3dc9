"""The second reading of the sampling rules, held against numbers worked by hand and published vectors."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.noise import gumbel_noise
from conformance.sampling_truth import (
    RowHistory,
    after_grammar,
    banned_by_words,
    before_truncation,
    columns_of,
    kept,
    processed,
    thinking_token,
)
from runner_api import ReasoningConfig, SamplingParams, StructuredOutputsParams

INF = np.inf


def noise(seeds, positions, vocab_size) -> np.ndarray:
    return gumbel_noise(np.array(seeds), np.array(positions), vocab_size, "murmur3")


def row(outputs=(), prompt=(0,), eos=(), reasoning=None, allowed=None, **asks) -> RowHistory:
    params = SamplingParams(**{"temperature": 0.0, **asks})
    return RowHistory([*prompt, *outputs], len(prompt), params, eos, reasoning, allowed)


def survivors(x, **asks) -> list[int]:
    params = SamplingParams(**{"temperature": 1.0, **asks})
    return np.flatnonzero(kept(np.array(x, np.float64), params)).tolist()


@pytest.mark.parametrize(
    ("seed", "position", "temperature", "token"),
    [(42, 7, 1, 5), (42, 8, 1, 4), (42, 9, 1, 5), (42, 7, 0.5, 4), (0, 0, 1, 1), (-1, 3, 1, 5)],
)
def test_noise_draws_the_published_tokens(seed, position, temperature, token) -> None:
    x = np.array([1, 0.5, 0, -0.5, 2, 1.5, -1, 0.25])
    assert (x / temperature + noise([seed], [position], 8)[0]).argmax() == token


def test_noise_has_the_published_values() -> None:
    seeds, positions = [42, -1, 2**32 + 42, -(2**63)], [7, 0, 7, 131071]
    got = noise(seeds, positions, 6)
    wanted = [0.675299818, 1.282568268, -0.330890390]
    assert got[:3, 0] == pytest.approx(wanted, abs=1e-6)
    assert got[3, 5] == pytest.approx(2.105631854, abs=1e-6)
    assert noise([42], [7], 32000)[0, 31999] == pytest.approx(-0.684759250, abs=1e-6)
    flat = [int(noise([42], [p], 32000)[0].argmax()) for p in range(6)]
    assert flat == [19432, 25102, 1127, 16035, 18369, 23633]


def test_the_noise_of_a_uniform_of_one_is_finite() -> None:
    assert noise([7], [29], 148239)[0, 148238] == pytest.approx(-2.8115408, abs=1e-6)


def test_lists() -> None:
    x = np.array([1.0, 2, 3, 4, 5], np.float32)
    assert before_truncation(x, row(allowed_token_ids=(1, 3))).tolist() == [-INF, 2, -INF, 4, -INF]
    assert before_truncation(x, row(logit_bias={0: 2.5, 4: -1})).tolist() == [3.5, 2, 3, 4, 4]
    both = row(allowed_token_ids=(1, 3), logit_bias={0: 100.0, 1: 1.0})
    assert before_truncation(x, both).tolist() == [-INF, 3, -INF, 4, -INF]
    only = np.array([True, False, False, False, True])
    assert after_grammar(x, row(allowed=only)).tolist() == [1, -INF, -INF, -INF, 5]


def test_stop_tokens_are_held_back_until_there_are_enough() -> None:
    x = np.array([1.0, 2, 3, 4], np.float32)
    asks = {"min_tokens": 2, "stop_token_ids": (3,), "ignore_eos": True}
    for outputs, held in (((), True), ((1,), True), ((1, 2), False)):
        got = before_truncation(x, row(outputs, eos=(0,), **asks))
        assert got.tolist() == ([-INF, 2, 3, -INF] if held else x.tolist())


def test_held_back_stop_tokens_come_back_for_a_form_that_leaves_no_other() -> None:
    x, only = np.array([1.0, 2, -INF, 4], np.float32), np.array([False, False, True, True])
    asks = {"min_tokens": 2, "stop_token_ids": (2, 3), "allowed": only}
    form = StructuredOutputsParams(regex="a")
    assert before_truncation(x, row(**asks)).tolist() == [-INF] * 4
    assert before_truncation(x, row(structured_outputs=form, **asks)).tolist() == [-INF, -INF, -INF, 4]


def test_penalties() -> None:
    x = np.array([2.0, -2, 0, 3, 1, -INF], np.float32)
    history = {"prompt": (0, 1), "outputs": (3, 3, 5)}
    assert before_truncation(x, row(repetition_penalty=2.0, **history)).tolist() == [1, -4, 0, 1.5, 1, -INF]
    assert before_truncation(x, row(frequency_penalty=0.5, **history)).tolist() == [2, -2, 0, 2, 1, -INF]
    assert before_truncation(x, row(presence_penalty=0.5, **history)).tolist() == [2, -2, 0, 2.5, 1, -INF]


def test_bad_words_match_the_output_alone() -> None:
    words = ((9,), (1, 2, 3), (2, 4), (7, 1, 5))
    assert banned_by_words(row((), (1, 2), bad_words_token_ids=words)) == {9}
    assert banned_by_words(row((1, 2), (7,), bad_words_token_ids=words)) == {9, 3, 4}
    assert banned_by_words(row((1,), (7,), bad_words_token_ids=words)) == {9}


@pytest.mark.parametrize(
    ("tokens", "budget", "forced"),
    [
        ((5, 6, 1), 1, 7),  # the end begins
        ((5, 6), 1, None),  # inside the budget
        ((5, 6), 0, 7),
        ((1, 2), 0, None),  # no start
        ((5, 6, 1, 7), 1, 8),  # goes on
        ((5, 6, 1, 7, 8), 1, 9),
        ((5, 6, 1, 7, 8, 9), 1, None),  # has ended
        ((5, 6, 8, 9, 5, 6, 2), 1, 7),  # has started again
        ((5, 6, 1, 8), 1, 7),  # part of the end, but not its beginning
    ],
)
def test_thinking(tokens, budget, forced) -> None:
    markers = ReasoningConfig((5, 6), (7, 8, 9), (8, 9))
    assert thinking_token(row(tokens, (), thinking_token_budget=budget, reasoning=markers)) == forced


def test_truncation() -> None:
    assert survivors([1, 3, 3, 3], top_k=2) == [1, 2]
    assert survivors([1, 3, -INF, 3], top_k=3) == [0, 1, 3]
    assert survivors([0, 0, -1], min_p=1.0) == [0, 1]
    half = np.log([0.5, 0.25, 0.125, 0.125])
    assert survivors(half, min_p=0.25 * (1 + 1e-6)) == [0, 1]
    assert survivors(np.log([0.5, 0.3, 0.2]), top_p=0.6) == [0, 1]
    assert survivors(np.log([0.2, 0.5, 0.3]), top_p=1e-9) == [1]
    assert survivors([2, 2, 1, 0], top_p=0.3) == [0]
    assert survivors([0, 0, 0, 0], top_p=0.5) == [0, 1]
    # of the two that are left the first has more than half
    assert survivors(np.log([0.3, 0.25, 0.25, 0.2]), top_k=2, top_p=0.52) == [0]
    assert survivors(np.log([0.3, 0.25, 0.25, 0.2]), top_p=0.52) == [0, 1]


def test_rows_without_an_answer_are_left_whole() -> None:
    assert survivors([np.nan, 1, 2], top_k=1) == [0, 1, 2]
    assert survivors([-INF] * 3, top_k=1, top_p=0.1, min_p=0.5) == [0, 1, 2]


def test_slack_widens_and_narrows_what_is_kept() -> None:
    x, params = np.array([3.0, 2.0, 2.0 - 1e-6, 1.0]), SamplingParams(temperature=1.0, top_k=2)
    assert np.flatnonzero(kept(x, params)).tolist() == [0, 1]
    assert np.flatnonzero(kept(x, params, 1e-5)).tolist() == [0, 1, 2]
    assert np.flatnonzero(kept(x, params, -1e-5)).tolist() == [0, 1]
    near = SamplingParams(temperature=1.0, min_p=float(np.exp(-1.0)))
    assert kept(np.array([1.0, 0.0 - 1e-7]), near, 1e-5).all()
    assert kept(np.array([1.0, 0.0 + 1e-7]), near, -1e-5).tolist() == [True, False]


def test_the_whole_row() -> None:
    x = np.array([4.0, 2, 1, 0], np.float32)
    got = processed(x, row((0,), temperature=0.5, frequency_penalty=1.0, logit_bias={3: 3.0}, top_k=2))
    assert got.tolist() == [6, -INF, -INF, 6]


def test_columns() -> None:
    scores = np.array([1.0, 3, 3, -INF])
    assert columns_of(scores, SamplingParams(logprobs=3), 3) == [1, 2, 0]
    assert columns_of(scores, SamplingParams(logprob_token_ids=(3, 0)), 3) == [3, 0]
