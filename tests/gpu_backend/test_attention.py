"""Paged attention kernel against the NumPy twin in float64; memory that nobody may read holds NaN.

The bound is not a constant: the kernel may be four times as far from the float64 result as the twin run in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

import torch

from cpu_reference.attention import paged_attention as cpu_paged_attention
from gpu_backend.attention import paged_attention
from gpu_backend.triton_support import resolve_device

pytestmark = pytest.mark.interpret
DEVICE, _ = resolve_device("auto")


@dataclass
class Case:
    """One batch in float64. `table` has a blank row for each padded request."""

    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    table: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    window: int | None

    @property
    def max_query_len(self) -> int:
        return int(np.diff(self.query_start_loc).max())

    def indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.table, self.query_start_loc, self.seq_lens

    def on_cpu(self, dtype: type[np.floating]) -> np.ndarray:
        out = np.full_like(self.query, np.nan, dtype)
        cpu_paged_attention(
            self.query.astype(dtype), self.keys.astype(dtype), self.values.astype(dtype), *self.indices(),
            len(self.seq_lens), self.query.shape[-1] ** -0.5, self.window, self.max_query_len, out,
        )  # fmt: skip
        return out

    def on_device(self, dtype: torch.dtype = torch.float32, longer: int = 0) -> np.ndarray:
        query, keys, values = (torch.from_numpy(a).to(DEVICE, dtype) for a in (self.query, self.keys, self.values))
        out = torch.full_like(query, float("nan"))
        paged_attention(
            query, keys, values, *(torch.from_numpy(a).to(DEVICE) for a in self.indices()),
            len(self.seq_lens), self.query.shape[-1] ** -0.5, self.window, self.max_query_len + longer, out,
        )  # fmt: skip
        return out.double().cpu().numpy()


def make_case(
    requests: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (9, 3),
    head_size: int = 64,
    block_size: int = 16,
    window: int | None = None,
    padded_reqs: int = 0,
    padded_tokens: int = 0,
    seed: int = 0,
) -> Case:
    """requests: (tokens computed before, tokens now). Whatever no request owns is NaN, the null block included."""
    rng = np.random.default_rng(seed)
    seq_lens = np.int32([computed + now for computed, now in requests] + [0] * padded_reqs)
    blocks_of = [-(-int(n) // block_size) for n in seq_lens]
    free = rng.permutation(np.arange(1, sum(blocks_of) + 4))
    keys, values = (np.full((len(free) + 1, block_size, heads[1], head_size), np.nan) for _ in range(2))
    table = np.full((len(seq_lens), max(blocks_of) + 2), len(free), np.int32)  # past a row's end: a NaN block
    table[len(requests) :] = 0
    for i, num_blocks in enumerate(blocks_of):
        table[i, :num_blocks], free = free[:num_blocks], free[num_blocks:]
        first = 0 if window is None else max(requests[i][0] - window + 1, 0)
        for j in range(first, int(seq_lens[i])):
            place = table[i, j // block_size], j % block_size
            keys[place], values[place] = rng.normal(size=(2, heads[1], head_size))
    counts = [now for _, now in requests] + [0] * padded_reqs
    query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    query = rng.normal(size=(int(query_start_loc[-1]) + padded_tokens, heads[0], head_size))
    return Case(query, keys, values, table, query_start_loc, seq_lens, window)


CASES = {
    "decodes": make_case([(0, 1), (15, 1), (16, 1), (17, 1), (300, 1)]),
    "one token": make_case([(0, 1)], heads=(1, 1)),
    "prefills": make_case([(0, 5), (0, 33), (0, 100)]),
    "mixed, padded": make_case([(40, 1), (7, 1), (0, 20), (31, 18)], padded_reqs=2, padded_tokens=9),
    "head size 80": make_case([(37, 1), (3, 12)], heads=(8, 2), head_size=80),
    "block size 5": make_case([(37, 1), (3, 12)], heads=(6, 2), head_size=16, block_size=5, padded_tokens=1),
    "one KV head for all": make_case([(9, 2), (50, 30)], heads=(20, 1), head_size=32),
    "several key tiles": make_case([(600, 1), (255, 2), (520, 30)]),
    "window across key tiles": make_case([(900, 1), (700, 12)], window=520),
    "a tail longer than a tile": make_case([(30, 1), (2, 1)], heads=(9, 1), padded_tokens=11),
    "window": make_case([(70, 1), (0, 40), (290, 25)], window=17, padded_tokens=3),
    "window of 1": make_case([(6, 1), (0, 9)], window=1),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_equals_the_twin(case: Case) -> None:
    owned = case.query_start_loc[-1]
    if case.window is None:
        exact, single = case.on_cpu(np.float64), case.on_cpu(np.float32)
    else:  # the twin multiplies keys behind the window before it hides them
        with np.errstate(invalid="ignore"):
            exact, single = case.on_cpu(np.float64), case.on_cpu(np.float32)
    got = case.on_device()
    assert np.isfinite(exact).all()
    rounding = np.abs(single - exact).max()
    assert np.abs(got - exact).max() <= 4 * rounding + np.finfo(np.float32).eps
    assert (got[owned:] == 0).all()


def test_a_loose_bound_of_the_query_length_changes_nothing() -> None:
    case = CASES["mixed, padded"]
    np.testing.assert_array_equal(case.on_device(), case.on_device(longer=200))


def test_a_batch_without_tokens_is_blank() -> None:
    case = make_case([(3, 1)], padded_tokens=4)
    case.query_start_loc[:] = 0
    case.seq_lens[:] = 0
    assert (case.on_device() == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once_or_twice(dtype: torch.dtype) -> None:
    """Inputs that both hold exactly; the weights and the result are rounded to the type, sums are not."""
    case = make_case([(40, 1), (7, 1), (0, 20)], padded_tokens=3, seed=5)
    for name in ("query", "keys", "values"):
        setattr(case, name, torch.from_numpy(getattr(case, name)).to(dtype).double().numpy())
    exact = case.on_cpu(np.float64)
    largest = np.nanmax(np.abs(case.values))
    assert np.abs(case.on_device(dtype) - exact).max() <= 2 * torch.finfo(dtype).eps * largest
