"""bfloat16 in the patched interpreter against torch and ml_dtypes, bit for bit, NaN taken as equal to NaN."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

import gpu_backend.attention
from conformance.triton_sanitizer import sanitize
from conformance.triton_sanitizer.bf16 import _PATCHES, narrow, patch_bfloat16, widen
from cpu_reference.attention import paged_attention as cpu_paged_attention
from gpu_backend.attention import paged_attention
from gpu_backend.kv_cache import reshape_and_cache
from gpu_backend.sample.gumbel import gumbel_scores
from gpu_backend.triton_support import INTERPRETED
from runner_api.errors import ConfigError

pytestmark = [pytest.mark.interpret, pytest.mark.skipif(not INTERPRETED, reason="patches the interpreter")]
N = 512
NEGATES_ZERO = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
BF16_EPS = torch.finfo(torch.bfloat16).eps


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal values of one type, NaN equal to NaN, -0 equal to -0 alone."""
    assert got.dtype == expected.dtype
    nan = expected != expected
    torch.testing.assert_close(got != got, nan)
    bits = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}.get(got.dtype)
    if bits is not None:
        got, expected = got.view(bits), expected.view(bits)
    assert torch.equal(got.masked_fill(nan, 0), expected.masked_fill(nan, 0))


def any_values(seed: int, n: int = N) -> torch.Tensor:
    """Random bits: every second one of ordinary size, the others subnormal, huge, infinite or NaN too."""
    rng = np.random.default_rng(seed)
    bits = torch.from_numpy(rng.integers(-(2**15), 2**15, n).astype(np.int16)).view(torch.bfloat16).clone()
    bits[::2] = torch.from_numpy(rng.normal(size=len(bits[::2]))).bfloat16()
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 3.3895e38, 1.0, -1.0])
    bits[: len(special)] = special.bfloat16()
    return bits


def ordinary(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).bfloat16()


def words() -> np.ndarray:
    """float32 with every upper half there is and the lower halves around a tie."""
    lower = np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return ((np.arange(2**16, dtype=np.uint32) << np.uint32(16))[:, None] | lower).reshape(-1).view(np.float32)


def test_rounding_of_every_float32_near_a_bfloat16() -> None:
    x = words()
    got = narrow(x)
    with np.errstate(all="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(got[number], expected[number])
    assert np.isnan(widen(got[~number])).all()
    np.testing.assert_array_equal(np.signbit(widen(got)), np.signbit(x))
    same(torch.from_numpy(got.view(np.int16)).view(torch.bfloat16), torch.from_numpy(x).bfloat16())


def test_widening_is_exact() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    same(torch.from_numpy(widen(bits)), torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float())


def test_float64_is_rounded_once() -> None:
    """Beside the middle of 1 and 1 + 2^-7 by less than float32 can tell."""
    middle, little = 1 + 2**-8, 2.0**-40
    x = np.array([middle - little, middle, middle + little, -middle - little, 1e300, -1e300, np.nan, 2.0**-133, 0.0])
    expected = [1, 1, 1 + 2**-7, -1 - 2**-7, np.inf, -np.inf, np.nan, 2.0**-133, 0.0]
    np.testing.assert_array_equal(widen(narrow(x)), np.float32(expected))


@triton.jit
def _elementwise(x, y, out, truth, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i, mask=i >= 0, other=0.0)
    tl.store(out + i, a + b)
    tl.store(out + N + i, a - b)
    tl.store(out + 2 * N + i, a * b)
    tl.store(out + 3 * N + i, a / b)
    tl.store(out + 4 * N + i, -a)
    tl.store(out + 5 * N + i, tl.abs(a))
    tl.store(out + 6 * N + i, tl.where(a > b, a, b))
    tl.store(out + 7 * N + i, a + 0.1)
    tl.store(out + 8 * N + i, tl.full([N], 0.1, tl.bfloat16))
    tl.store(truth + i, a < b)
    tl.store(truth + N + i, a <= b)
    tl.store(truth + 2 * N + i, a > b)
    tl.store(truth + 3 * N + i, a >= b)
    tl.store(truth + 4 * N + i, a == b)
    tl.store(truth + 5 * N + i, a != b)
    tl.store(truth + 6 * N + i, (a > 0) & (b > 0))


def test_arithmetic_and_comparisons() -> None:
    a, b = any_values(0), any_values(1)
    b[20:60] = a[20:60]
    out, truth = torch.zeros(9, N, dtype=torch.bfloat16), torch.zeros(7, N, dtype=torch.bool)
    with patch_bfloat16():
        _elementwise[(1,)](a, b, out, truth, N)
    tenth = torch.full_like(a, 0.1)
    # Triton negates by subtracting: from 0 before 3.9, which loses the sign of a zero, from -0 since.
    negated = -a if NEGATES_ZERO else 0 - a
    values = [a + b, a - b, a * b, a / b, negated, a.abs(), torch.where(a > b, a, b), a + tenth, tenth]
    for got, expected in zip(out, values, strict=True):
        same(got, expected)
    for got, expected in zip(truth, [a < b, a <= b, a > b, a >= b, a == b, a != b, (a > 0) & (b > 0)], strict=True):
        assert torch.equal(got, expected)


@triton.jit
def _fma_kernel(x, y, z, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.fma(tl.load(x + i), tl.load(y + i), tl.load(z + i)))


def test_fma_rounds_once() -> None:
    a, b, c = ordinary(2, N), ordinary(3, N), ordinary(4, N)
    a[0], b[0], c[0] = 1 + 2**-4, 1 + 2**-4, -1 - 2**-3  # 2^-8 is left, unless the product was rounded before
    out = torch.zeros_like(a)
    with patch_bfloat16():
        _fma_kernel[(1,)](a, b, c, out, N)
    same(out, (a.double() * b.double() + c.double()).bfloat16())
    assert out[0] == 2**-8 != a[0] * b[0] + c[0]


@triton.jit
def _casts(x, out, ROUNDING: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty, fp_downcast_rounding=ROUNDING))


def cast(x: torch.Tensor, dtype: torch.dtype, rounding: str | None = None) -> torch.Tensor:
    out = torch.zeros(len(x), dtype=dtype)
    with patch_bfloat16():
        _casts[(1,)](x, out, rounding, len(x))
    return out


@pytest.mark.parametrize("rounding", [None, "rtne"])
def test_casts_from_float32(rounding: str | None) -> None:
    x = torch.from_numpy(words()[np.random.default_rng(5).integers(0, 6 * 2**16, 4096)])
    same(cast(x, torch.bfloat16, rounding), x.bfloat16())


def test_a_cast_toward_zero_cuts_off() -> None:
    x = torch.tensor([1 + 2**-7 - 2**-20, -1 - 2**-7 + 2**-20, 3.4e38, math.inf, math.nan, 0.0, 1.0, -0.0])
    x.view(torch.int32)[5] = 0x7F800001  # a NaN by its last bit alone
    expected = torch.tensor([1.0, -1.0, torch.finfo(torch.bfloat16).max, math.inf, math.nan, math.nan, 1.0, -0.0])
    same(cast(x, torch.bfloat16, "rtz"), expected.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.int64, torch.bool])
def test_casts_from_other_types(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(6)
    x = rng.normal(size=N) * 1000 if dtype == torch.float16 else rng.integers(-(2**30), 2**30, N)
    x = torch.from_numpy(x).to(dtype)
    same(cast(x, torch.bfloat16), x.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64])
def test_casts_to_other_types(dtype: torch.dtype) -> None:
    x = ordinary(7, N) * 100 if dtype in (torch.int32, torch.int64) else any_values(7)
    same(cast(x, dtype), x.to(dtype))


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _added(a, b):
    return a + b + 0.0


@triton.jit
def _reductions(x, sums, extremes, places, custom, R: tl.constexpr, C: tl.constexpr):
    r = tl.arange(0, R)
    c = tl.arange(0, C)
    a = tl.load(x + r[:, None] * C + c[None, :])
    tl.store(sums + r, tl.sum(a, 1))
    tl.store(sums + R, tl.sum(a))
    tl.store(extremes + r, tl.max(a, 1))
    tl.store(extremes + R + r, tl.min(a, 1))
    tl.store(places + r, tl.argmax(a, 1))
    tl.store(places + R + r, tl.argmin(a, 1))
    tl.store(custom + r, tl.reduce(a, 1, _larger))
    tl.store(custom + R + r, tl.reduce(a, 1, _added))


def test_reductions() -> None:
    rows, columns = 4, 64
    x = ordinary(8, rows, columns)
    x[1] = 0.001 * x[1] - 5  # all negative, many ties
    x[2, 7] = math.inf
    sums, extremes = torch.zeros(rows + 1, dtype=torch.bfloat16), torch.zeros(2, rows, dtype=torch.bfloat16)
    places, custom = torch.zeros(2, rows, dtype=torch.int32), torch.zeros(2, rows, dtype=torch.bfloat16)
    with patch_bfloat16():
        _reductions[(1,)](x, sums, extremes, places, custom, rows, columns)
    wide = x.float().numpy()  # added up in the order of NumPy, as the interpreter adds float32
    same(sums[:rows], torch.from_numpy(wide.sum(1)).bfloat16())
    same(sums[rows], torch.tensor(wide.sum()).bfloat16())
    same(extremes, torch.stack([x.max(1).values, x.min(1).values]))
    same(places, torch.from_numpy(np.stack([wide.argmax(1), wide.argmin(1)])).int())
    same(custom[0], x.max(1).values)
    one_by_one = x[:, 0]  # a combine function of one's own works, and rounds, element by element
    for column in x.T[1:]:
        one_by_one = one_by_one + column
    same(custom[1], one_by_one)


@triton.jit
def _scans(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(out + i, tl.associative_scan(a, 0, tl.standard._sum_combine))
    tl.store(out + N + i, tl.associative_scan(a, 0, tl.standard._prod_combine))
    tl.store(out + 2 * N + i, tl.associative_scan(a, 0, _larger))
    tl.store(out + 3 * N + i, tl.cumsum(a, reverse=True))
    tl.store(out + 4 * N + i, tl.sort(a))


def test_scans_and_sort() -> None:
    x = ordinary(9, 32)
    out = torch.zeros(5, 32, dtype=torch.bfloat16)
    with patch_bfloat16():
        _scans[(1,)](x, out, 32)
    wide = x.float().numpy()
    same(out[0], torch.from_numpy(wide.cumsum()).bfloat16())
    same(out[1], torch.from_numpy(wide.cumprod()).bfloat16())
    same(out[2], x.cummax(0).values)
    same(out[3], torch.from_numpy(wide[::-1].cumsum()[::-1].copy()).bfloat16())
    same(out[4], x.sort().values)


@triton.jit
def _dot_kernel(a, b, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(left, right))


def test_dot_adds_in_float32() -> None:
    a, b = ordinary(10, 16, 64), ordinary(11, 64, 32)
    out = torch.zeros(16, 32)
    with patch_bfloat16():
        _dot_kernel[(1,)](a, b, out, 16, 64, 32)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@triton.jit
def _count(x, total, old, n, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    before = tl.atomic_add(total + i % 2, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)
    tl.store(old + i, before, mask=i < n)


@pytest.mark.parametrize("judged", [False, True])
def test_atomic_add_rounds_each_time(judged: bool) -> None:
    x, total, old = ordinary(12, 40), ordinary(13, 3), torch.zeros(40, dtype=torch.bfloat16)
    expected, before = total.clone(), torch.zeros_like(old)
    for i, value in enumerate(x):
        before[i] = expected[i % 2]
        expected[i % 2] += value
    with sanitize() if judged else patch_bfloat16():
        _count[(3,)](x, total, old, len(x), 16)
    same(total, expected)
    same(old, before)


@triton.jit
def _exp(x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, tl.exp(tl.load(x + i)))


def test_unary_mathematics_is_refused_as_the_compiler_does() -> None:
    with patch_bfloat16(), pytest.raises(InterpreterError, match="got bf16"):
        _exp[(1,)](ordinary(14, 16), 16)


def test_every_patch_is_undone() -> None:
    def now() -> list[Any]:
        return [vars(owner)[name] for owner, name, _ in _PATCHES]

    before = now()
    with patch_bfloat16():
        assert not any(a is b for a, b in zip(before, now(), strict=True))
        with patch_bfloat16():
            pass
    assert all(a is b for a, b in zip(before, now(), strict=True))
    with pytest.raises(ZeroDivisionError), patch_bfloat16():
        _ = 1 / 0
    assert all(a is b for a, b in zip(before, now(), strict=True))
    assert interpreter.InterpreterBuilder.create_fadd is vars(interpreter.InterpreterBuilder)["create_fadd"]


def test_an_interpreter_that_is_built_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(interpreter.ScanOps, "cumprod")
    with pytest.raises(ConfigError, match=r"ScanOps\.cumprod"), patch_bfloat16():
        pass


# Our own kernels. Their launchers avoid bfloat16 where kernels are interpreted, so the test says that they are not.


@pytest.mark.parametrize("window", [None, 5])
def test_attention(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_backend.attention, "INTERPRETED", False)
    query_start_loc, seq_lens = np.int32([0, 1, 8, 8]), np.int32([19, 37, 0])
    table = np.int32([[3, 5, 0, 0, 0], [1, 2, 4, 6, 7], [0, 0, 0, 0, 0]])
    query, keys, values = ordinary(15, 10, 4, 32), ordinary(16, 8, 8, 2, 32), ordinary(17, 8, 8, 2, 32)
    out, single = torch.full_like(query, math.nan), np.zeros(query.shape, np.float32)
    scale = 32**-0.5
    cpu_paged_attention(
        query.float().numpy(), keys.float().numpy(), values.float().numpy(), table, query_start_loc, seq_lens, 3,
        scale, window, 7, single,
    )  # fmt: skip
    with patch_bfloat16():
        paged_attention(
            query, keys, values, *map(torch.from_numpy, (table, query_start_loc, seq_lens)), 3, scale, window, 7, out
        )
    largest = values.float().abs().max().item()
    assert np.abs(out.float().numpy() - single).max() <= 2 * BF16_EPS * largest
    assert (out[8:] == 0).all()


def test_kv_cache_write() -> None:
    slots = torch.tensor([9, -1, 0, 31, 17])
    key, value = torch.from_numpy(words()[7 : 7 + 5 * 24].reshape(5, 3, 8).copy()), ordinary(18, 5, 3, 8)
    key_cache, value_cache = (torch.full((4, 8, 3, 8), 7.0, dtype=torch.bfloat16) for _ in range(2))
    with patch_bfloat16():
        reshape_and_cache(key, value, slots, key_cache, value_cache)
    for cache, new in ((key_cache, key), (value_cache, value)):
        expected = torch.full((32, 3, 8), 7.0, dtype=torch.bfloat16)
        expected[slots[slots >= 0]] = new[slots >= 0].bfloat16()
        same(cache.view(32, 3, 8), expected)


def test_gumbel_scores() -> None:
    """Logits in bfloat16 are widened first: the noise and the scores are those of the same logits in float32."""
    logits, temperature = ordinary(19, 4, 300), torch.tensor([0.0, 0.7, 1.0, 3.0])
    rows, positions, seeds = torch.tensor([3, 0, 1, -1]), torch.arange(4), torch.arange(4) + 50
    with patch_bfloat16():
        got = gumbel_scores(rows, positions, temperature, seeds, "philox", 4, logits)
    same(got, gumbel_scores(rows, positions, temperature, seeds, "philox", 4, logits.float()))
