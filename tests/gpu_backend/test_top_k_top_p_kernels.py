"""min-p, top-k and top-p against the NumPy twins: exact sets, whatever the batch, the tile and the way taken."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

import torch

from cpu_reference.sample import min_p as cpu_min_p
from cpu_reference.sample import top_k_top_p as cpu_top_k_top_p
from gpu_backend import triton_support
from gpu_backend.packed_copy import PackedCopy
from gpu_backend.sample import candidates
from gpu_backend.sample.min_p import MinP, apply_min_p
from gpu_backend.sample.top_k_top_p import TopKTopP, apply_top_k_top_p
from gpu_backend.triton_support import resolve_device
from runner_api import NO_ROW, NewRequestData, SamplingParams

pytestmark = pytest.mark.interpret
DEVICE, _ = resolve_device("auto")
INF = np.float32(np.inf)
ROW_COUNTS = (1, 7, 8, 64, 1024)


def device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


@pytest.fixture(params=["whole rows", "groups"])
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Rows in one tile, and rows of several groups, lists and searches."""
    if request.param == "groups":
        monkeypatch.setattr(triton_support, "TILE_LIMIT", 64)
    return request.param == "groups"


def filtered(
    logits: np.ndarray, k: np.ndarray | int, p: np.ndarray | float, rows: np.ndarray | None = None
) -> np.ndarray:
    """The kernels' result; k and p by logits row where no `rows` are given."""
    n = len(logits)
    rows = np.arange(n) if rows is None else rows
    x = device(logits.copy())
    limits = np.broadcast_to(np.int32(k), n).copy(), np.broadcast_to(np.float32(p), n).copy()
    apply_top_k_top_p(device(rows), device(limits[0]), device(limits[1]), n, x)
    return x.cpu().numpy()


def twins(logits: np.ndarray, k: np.ndarray | int, p: np.ndarray | float) -> np.ndarray:
    """The twin's result in float64."""
    n, x = len(logits), logits.astype(np.float64)
    k, p = np.broadcast_to(np.int32(k), n), np.broadcast_to(np.float32(p), n)
    with np.errstate(invalid="ignore"):
        cpu_top_k_top_p.apply_top_k_top_p(np.arange(n), k, p, n, x)
    return x.astype(np.float32)


def probabilities(*p: float, width: int) -> np.ndarray:
    """A row with these probabilities, scattered among tokens of none."""
    row = np.full(width, -INF)
    row[np.random.default_rng(len(p)).permutation(width)[: len(p)]] = np.log(np.float32(p))
    return row


# What a runner that we recorded drops in batches of eight rows and more (vLLM 0.26.0, and 0.33.0 above 64 rows).
@pytest.mark.parametrize(("kept", "p"), [((0.6838, 0.3162), 0.99), ((0.5853, 0.2208, 0.1939), 0.9)])
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_rows_that_hold_minus_infinity_keep_what_they_must(num_rows: int, kept: tuple[float, ...], p: float) -> None:
    logits = np.tile(probabilities(*kept, width=64), (num_rows, 1))
    np.testing.assert_array_equal(filtered(logits, 64, p), logits)


@pytest.mark.gpu
@pytest.mark.parametrize(("kept", "p"), [((0.6838, 0.3162), 0.99), ((0.5853, 0.2208, 0.1939), 0.9)])
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_long_rows_that_hold_minus_infinity_too(num_rows: int, kept: tuple[float, ...], p: float) -> None:
    for k in (32003, 50):
        logits = np.tile(probabilities(*kept, width=32003), (num_rows, 1))
        np.testing.assert_array_equal(filtered(logits, k, p), logits)


def kinds_of_rows(rng: np.random.Generator, width: int) -> np.ndarray:
    """float32[9, width]: bell-shaped, ties, mostly dead, flat, far apart, close, steep, two zeros, one live."""
    x = np.stack([
        rng.normal(size=width) * 3, rng.integers(-2, 3, width), np.where(rng.random(width) < 0.1, 1.0, -np.inf),
        np.zeros(width), rng.normal(size=width) * 300, 5 + rng.random(width) * 1e-6, -np.arange(width) * 0.7,
        np.where(rng.random(width) < 0.5, -0.0, 0.0), np.full(width, -np.inf),
    ]).astype(np.float32)  # fmt: skip
    x[2, 0] = 0
    x[8, width // 2] = -1e30
    return x


def test_sets_are_the_twins(narrow: bool) -> None:
    rng = np.random.default_rng(0)
    for width in (5, 300):
        logits = kinds_of_rows(rng, width)
        for k in (1, 7, 100, width):
            p = rng.choice(np.float32([0.1, 0.5, 0.9, 0.999, 1, 1]), len(logits))
            np.testing.assert_array_equal(filtered(logits, min(k, width), p), twins(logits, min(k, width), p))


def test_lists_of_just_k_tokens_cut_the_row_behind_them(narrow: bool) -> None:
    """The k best groups often hold k candidates and no more; what the row has behind them must go all the same."""
    logits = np.random.default_rng(5).normal(size=(60, 700)).astype(np.float32)
    for k in (1, 2, 3, 9):
        np.testing.assert_array_equal(filtered(logits, k, 1.0), twins(logits, k, 1.0))


@pytest.mark.parametrize(
    ("logits", "k", "p", "kept"),
    [
        ([1, 3, 3, 3], 2, 1.0, [1, 2]),  # ties to the lower id
        ([3, 1, 3, 2], 3, 1.0, [0, 2, 3]),
        ([0, 0, 0, 0], 4, 0.5, [0, 1]),  # a flat row has a head as well
        ([0, -0.0, 0, -0.0], 4, 0.75, [0, 1, 2]),  # zeros are equal
        ([0, 0, 0, 0], 4, 1e-9, [0]),  # the best one always stays
        ([2, 2, 1, 0], 4, 0.5, [0, 1]),
        ([-INF, 5, -INF, -INF], 2, 0.9, [1]),
        ([-INF, 5, 5, -INF], 3, 0.5, [1]),
        ([0, INF, 7, INF], 4, 0.9, [1, 3]),  # +inf has all the probability, several share it
        ([0, INF, 7, INF], 4, 0.5, [1]),
        ([0, INF, 7, INF], 3, 1.0, [1, 2, 3]),
        ([np.log(4), np.log(2), np.log(1)], 2, 0.6, [0]),  # 4/6 of what top-k leaves, not 4/7
    ],
)
def test_worked_examples(logits: list[float], k: int, p: float, kept: list[int], narrow: bool) -> None:
    row = np.full((1, 150 if narrow else len(logits)), -INF, np.float32)
    row[0, : len(logits)] = logits
    assert np.flatnonzero(filtered(row, k, p)[0] > -INF).tolist() == kept


def test_rows_with_nothing_to_do_keep_their_bits(narrow: bool) -> None:
    rng = np.random.default_rng(1)
    logits = np.tile((rng.normal(size=150)).astype(np.float32), (6, 1))
    logits[:, 3] = -0.0
    logits[1, 5] = np.nan
    logits[2] = -INF
    logits[3, [7, 9]] = np.nan, INF
    rows = np.int64([0, 1, 2, 3, 4, NO_ROW])
    # Row 0 has no limits, 1 and 3 hold a NaN, 2 no token; 4 has k and p past their ends, the last belongs to nobody.
    k, p = np.int32([150, 3, 3, 2, 151, 3]), np.float32([1, 0.5, 0.5, 1, 1.5, 0.5])
    got = filtered(logits, k, p, rows)
    np.testing.assert_array_equal(got.view(np.int32), logits.view(np.int32))
    x = device(logits.copy())
    share = device(np.float32([0, 0.5, 0.5, 0.5, 0, 0.5]))
    apply_min_p(device(rows), share, 6, x)
    np.testing.assert_array_equal(x.cpu().numpy().view(np.int32), logits.view(np.int32))


def test_a_row_is_cut_alike_in_every_batch(narrow: bool) -> None:
    rng = np.random.default_rng(2)
    logits = kinds_of_rows(rng, 150)[[0, 1, 5]]
    k, p = np.int32([150, 9, 150]), np.float32([0.83, 0.6, 0.41])
    alone = np.concatenate([filtered(logits[i : i + 1], k[i : i + 1], p[i : i + 1]) for i in range(3)])
    for times in (3,) if narrow else (3, 21, 341):
        got = filtered(np.tile(logits, (times, 1)), np.tile(k, times), np.tile(p, times))
        np.testing.assert_array_equal(got.reshape(times, *logits.shape), np.broadcast_to(alone, (times, *logits.shape)))


def test_list_search_and_whole_row_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    logits = kinds_of_rows(rng, 300)
    p = np.float32([0.9, 0.7, 0.9, 0.31, 0.5, 0.77, 0.9, 0.1, 0.9])
    whole = filtered(logits, 300, p)
    monkeypatch.setattr(triton_support, "TILE_LIMIT", 256)
    lists = filtered(logits, 300, p)
    monkeypatch.setattr(candidates, "LONG_LIST", 16)
    searches = filtered(logits, 300, p)
    np.testing.assert_array_equal(lists, whole)
    np.testing.assert_array_equal(searches, whole)


def near_the_edge(rng: np.random.Generator, width: int) -> Iterator[tuple[np.ndarray, np.float32]]:
    """Rows and p that differ from the mass before some token by nothing but float32's rounding of p."""
    for _ in range(12):
        x = np.float32(np.sort(rng.normal(size=width) * 2)[::-1])
        mass = np.exp(x.astype(np.float64) - x[0])
        before = np.cumsum(mass)[:-1] / mass.sum()
        p = np.float32(before[rng.integers(len(before))])
        yield x, p
        yield x, np.nextafter(p, np.float32(0))


def test_only_tokens_within_the_stated_bound_of_p_may_differ() -> None:
    width, rows = 400, list(near_the_edge(np.random.default_rng(4), 400))
    logits, p = np.stack([x for x, _ in rows]), np.float32([p for _, p in rows])
    got = (filtered(logits, width, p) > -INF).sum(1)  # values descend, so the number kept says which
    for x, q, kept in zip(logits, p, got, strict=True):
        # exp in float64 is within a unit in its last place; everything else is exact here
        mass = [Fraction(float(m)) for m in np.exp(x.astype(np.float64) - float(x[0]))]
        total, before, exact, nearest = sum(mass), Fraction(0), 0, Fraction(1)
        for m in mass:
            exact += before < Fraction(float(q)) * total
            nearest = min(nearest, abs(before / total - Fraction(float(q))))
            before += m
        bound = Fraction(width, 2**42)
        assert kept == exact or (abs(int(kept) - exact) == 1 and nearest <= bound), (q, kept, exact, float(nearest))


def test_min_p_is_the_twins(narrow: bool) -> None:
    rng = np.random.default_rng(5)
    logits = kinds_of_rows(rng, 300)
    logits[4, 9] = INF
    for share in (1e-30, 0.02, 0.5, 1.0):
        m = np.full(len(logits), share, np.float32)
        x, expected = device(logits.copy()), logits.astype(np.float64)
        apply_min_p(device(np.arange(len(logits))), device(m), len(logits), x)
        cpu_min_p.apply_min_p(np.arange(len(logits)), m, len(logits), expected)
        np.testing.assert_array_equal(x.cpu().numpy(), expected.astype(np.float32))


def test_parameters_by_row_travel_in_the_steps_copy() -> None:
    shares, limits = MinP(4), TopKTopP(4, 1000)
    packed = PackedCopy({**shares.host_tables(), **limits.host_tables()}, 0, DEVICE)
    shares.bind(packed), limits.bind(packed)
    new = NewRequestData("r", [1], [1], 0, ([1],), None)
    for row, params in ((2, SamplingParams(top_k=3, top_p=0.5, min_p=0.25)), (1, SamplingParams(top_k=1000))):
        shares.add_request(row, params, new), limits.add_request(row, params, new)
    packed.send()
    assert shares.min_p.tolist() == [0, 0, 0.25, 0]
    assert (limits.top_k.tolist(), limits.top_p.tolist()) == ([1000, 1000, 3, 1000], [1, 1, 0.5, 1])
    assert [limits.used_by(np.int64([r])) for r in range(4)] == [False, False, True, False]
    assert limits.has_small_k(np.int64([0, 1, 2]))
    limits.add_request(2, SamplingParams(top_p=0.5), new)  # a row is rewritten whole
    assert limits.used_by(np.int64([2]))
    assert not limits.has_small_k(np.int64([1, 2]))
    limits.add_request(2, SamplingParams(), new), shares.add_request(2, SamplingParams(), new)
    assert not limits.used_by(np.arange(4))
    assert not shares.used_by(np.arange(4))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [32000, 128256, 50257, 262144])
def test_long_rows_equal_the_twin(width: int) -> None:
    rng = np.random.default_rng(width)
    logits = np.concatenate([kinds_of_rows(rng, width), (rng.normal(size=(7, width)) * 4).astype(np.float32)])
    for k in (width, 50, 1000):
        p = rng.choice(np.float32([0.3, 0.9, 0.95, 0.999, 1]), len(logits))
        got, expected = filtered(logits, k, p), twins(logits, k, p)
        np.testing.assert_array_equal(got, expected)
        many = filtered(np.tile(logits, (16, 1)), k, np.tile(p, 16))
        np.testing.assert_array_equal(many.reshape(16, *got.shape), np.broadcast_to(got, (16, *got.shape)))
