"""min-p, top-k and top-p under rounding: what is certain, what is kept, what is possible."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.keep_sets import SUM_BLOCK, KeepSets, Row, keep_sets
from runner_api import load_stages

UNIT = 2.0**-24


def row(x: list[float] | np.ndarray, error: float | list[float] = 0.0, raw: list[float] | None = None) -> Row:
    values = np.array(x, np.float64)
    return Row(values, np.broadcast_to(np.asarray(error, np.float64), values.shape).copy(), np.array(raw or x))


def ids(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(mask).tolist()


def sets_of(r: Row, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> tuple[list[int], list[int], list[int]]:
    s = keep_sets(r, min_p, top_k, top_p, UNIT)
    return ids(s.certain), ids(s.kept), ids(s.possible)


def test_without_a_limit_every_token_is_kept() -> None:
    assert sets_of(row([1.0, -np.inf, 2.0])) == ([0, 2], [0, 2], [0, 2])


@pytest.mark.parametrize("x", [[1.0, np.nan], [-np.inf, -np.inf]])
def test_rows_that_are_no_distribution_are_left_whole(x: list[float]) -> None:
    assert sets_of(row(x), min_p=0.5, top_k=1, top_p=0.1) == ([0, 1],) * 3


def test_top_k_takes_ties_by_id_whatever_the_rounding() -> None:
    """Equal logits were treated alike: they are equal for everybody."""
    for error in (0.0, 0.1):
        assert sets_of(row([1, 3, 3, 3], error), top_k=2) == ([1, 2],) * 3
    # The same value from two different logits, with errors: either may come first.
    assert sets_of(row([1, 3, 3, 3], 0.1, raw=[1, 3, 4, 5]), top_k=2) == ([], [1, 2], [1, 2, 3])


def test_top_k_is_uncertain_where_values_are_closer_than_their_errors() -> None:
    x = [5.0, 4.0, 3.9, 1.0]
    assert sets_of(row(x, 0.04), top_k=2) == ([0, 1], [0, 1], [0, 1])
    assert sets_of(row(x, 0.06), top_k=2) == ([0], [0, 1], [0, 1, 2])
    assert sets_of(row(x, [0.0, 0.0, 0.2, 0.0]), top_k=2) == ([0], [0, 1], [0, 1, 2])
    assert sets_of(row(x, 0.6), top_k=1) == ([], [0], [0, 1, 2])


def test_min_p_keeps_equality_and_its_band() -> None:
    threshold = 2.0 + np.log(0.5)
    x = [2.0, threshold, threshold - 1e-3, threshold + 1e-3]
    certain, kept, possible = sets_of(row(x), min_p=0.5)
    assert (certain, kept, possible) == ([0, 3], [0, 1, 3], [0, 1, 3])
    assert sets_of(row(x, 1e-3), min_p=0.5) == ([0], [0, 1, 3], [0, 1, 2, 3])
    assert sets_of(row([2.0, 2.0, 1.9]), min_p=1.0) == ([0, 1],) * 3
    assert sets_of(row([2.0, 1.95, 1.0], 0.1), min_p=1.0) == ([], [0], [0, 1])


def test_top_p_keeps_the_token_that_crosses_p() -> None:
    x = np.log([0.4, 0.3, 0.2, 0.1])
    assert sets_of(row(x), top_p=0.65) == ([0, 1],) * 3
    assert sets_of(row(x), top_p=0.4 + 1e-9) == ([0], [0, 1], [0, 1])
    assert sets_of(row(x), top_p=0.4 - 1e-9) == ([0], [0], [0, 1])
    assert sets_of(row(x, 0.1), top_p=0.69) == ([0, 1], [0, 1], [0, 1, 2])


def test_top_p_of_equal_values_goes_by_id() -> None:
    assert sets_of(row([0.0] * 8, 1e-6), top_p=0.45) == ([0, 1, 2, 3],) * 3
    assert sets_of(row([0.0] * 8), top_p=1e-12) == ([0],) * 3


def test_top_p_counts_what_top_k_left() -> None:
    x = np.log([0.4, 0.3, 0.2, 0.1])
    assert sets_of(row(x), top_k=2, top_p=0.57) == ([0],) * 3  # 0.4 of 0.7 is 0.571
    assert sets_of(row(x), top_k=2, top_p=0.58) == ([0, 1],) * 3


def test_an_uncertain_member_changes_every_mass() -> None:
    """Whether min-p leaves the last token decides what share the first has."""
    x = [0.0, np.log(0.8), np.log(0.5)]
    assert sets_of(row(x), min_p=0.5)[2] == [0, 1, 2]
    certain, kept, possible = sets_of(row(x), min_p=0.5, top_p=0.5)
    assert kept == [0, 1]  # 1 / 2.3 of the mass comes before the second, and 1 / 1.8 without the third
    assert (certain, possible) == ([0], [0, 1])


def test_infinite_logits() -> None:
    x = [1.0, np.inf, np.inf, -np.inf]
    assert sets_of(row(x), min_p=0.1) == ([1, 2],) * 3
    assert sets_of(row(x), top_k=1) == ([1],) * 3
    assert sets_of(row(x), top_p=0.4) == ([1],) * 3
    assert sets_of(row(x), top_p=0.9) == ([1, 2],) * 3


def random_row(random: np.random.Generator) -> tuple[np.ndarray, dict[str, float]]:
    v = int(random.integers(1, 90))
    x = random.normal(size=v) * random.choice([0.0, 0.3, 3.0])
    if random.random() < 0.4:
        x = np.round(x, 1)
    x[random.random(v) < 0.2] = -np.inf
    limits = {
        "min_p": float(random.choice([0.0, 0.05, 0.4, 1.0])), "top_k": int(random.choice([0, 1, 2, 7, 200])),
        "top_p": float(np.float32(random.choice([1.0, 0.99, 0.6, 0.1, 1e-9]))),
    }  # fmt: skip
    return x, limits


def staged(x: np.ndarray, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    """What the reference's stages leave, in the arithmetic of `x`."""
    cpu = load_stages("cpu")
    common = {"expanded_idx_mapping": np.zeros(1, np.int64), "num_logits": 1}
    y = cpu.run("apply_min_p", **common, min_p=np.array([min_p], np.float32), logits=x[None])["logits"]
    k = np.array([top_k or len(x)], np.int32)
    y = cpu.run("apply_top_k_top_p", **common, top_k=k, top_p=np.array([top_p], np.float32), logits=y)["logits"]
    return y[0] > -np.inf


def test_the_kept_set_is_the_reference_s() -> None:
    random = np.random.default_rng(0)
    for _ in range(250):
        x, limits = random_row(random)
        if (x == -np.inf).all():
            continue
        limits["min_p"] = float(np.float32(limits["min_p"]))
        sets = keep_sets(row(x), **limits, unit=UNIT)
        np.testing.assert_array_equal(sets.kept, staged(x, **limits), str(limits))
        assert not (sets.certain & ~sets.kept).any()
        assert not (sets.kept & ~sets.possible).any()


def test_whatever_rounding_does_lies_between_certain_and_possible() -> None:
    """Values moved by up to their errors, and float32 in place of float64."""
    random = np.random.default_rng(1)
    moved = 0
    for _ in range(400):
        x, limits = random_row(random)
        if (x == -np.inf).all():
            continue
        limits["min_p"] = float(np.float32(limits["min_p"]))
        amount = float(random.choice([1e-7, 1e-2, 0.1]))
        # Equal values stay equal, as they do for every runner.
        values, group = np.unique(x, return_inverse=True)
        y = (values + random.uniform(-amount, amount, len(values)))[group].astype(np.float32)
        error = np.where(x > -np.inf, amount + UNIT * np.abs(x) * 2, 0.0)
        sets = keep_sets(Row(x, error, x), **limits, unit=UNIT)
        kept = staged(y, **limits)
        assert not (sets.certain & ~kept).any(), (x, limits)
        assert not (kept & ~sets.possible).any(), (x, limits)
        moved += bool((kept != sets.kept).any())
    assert moved > 5


def float32_shares(x: np.ndarray) -> np.ndarray:
    """Cumulated probabilities of descending logits as a float32 program has them: 2^x, and sums by trees in blocks."""
    y = x.astype(np.float32)
    mass = np.exp2((y - y[0]) * np.float32(np.log2(np.e)))
    inside = np.pad(mass, (0, -len(x) % SUM_BLOCK)).reshape(-1, SUM_BLOCK)
    for shift in 2 ** np.arange(13):
        inside[:, shift:] = inside[:, shift:] + inside[:, :-shift].copy()
    blocks = np.cumsum(np.append(np.float32(0), inside[:, -1]), dtype=np.float32)
    return (inside + blocks[:-1, None]).ravel()[: len(x)] / blocks[-1]


def test_masses_in_float32_lie_in_the_band() -> None:
    """The band of top-p is at least the largest error of a float32 program, and at most 20 times as wide."""
    random = np.random.default_rng(2)
    worst = 0.0
    for _ in range(30):
        x = np.sort(random.normal(size=int(random.choice([100, 4096, 32000]))) * 2)[::-1]
        mass = np.exp(x - x[0])
        error = np.abs(float32_shares(x) - np.cumsum(mass) / mass.sum()).max()
        logits = Row(x, UNIT * np.abs(x), x)
        low, high = 0.0, 1e-3  # how far p may be from a token's share, for the token to be uncertain
        share = float((np.cumsum(mass) / mass.sum())[len(x) // 50])
        for _ in range(20):
            middle = (low + high) / 2
            sets = keep_sets(logits, 0.0, 0, share - middle, UNIT)
            low, high = (middle, high) if sets.possible[len(x) // 50 + 1] else (low, middle)
        assert error <= low
        worst = max(worst, error / low)
    assert worst >= 1 / 20


def test_sets_of_no_limit_are_shared() -> None:
    whole = KeepSets.whole(3)
    assert whole.certain is whole.kept is whole.possible
