"""What each logits row is drawn with, looked up once, so that kernels with many programs to a row need not.

GPU only: NumPy looks up what it needs where it needs it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpu_backend.sample.noise import row_key
from gpu_backend.triton_support import entry, launch, signature, tile, tl, triton

GREEDY, PLAIN, LIMITED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Limits(NamedTuple):
    """Parameters by state row, on the device. min_p, top_p: float32[N]; top_k: int32[N]; neutral: 0, 1, V."""

    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor


class Draws(NamedTuple):
    """Who draws, on the device: expanded_idx_mapping: int64[>= L] state row of each logits row; positions: int64[>= L];
    temperature: float32[N], seeds: int64[N] by state row; noise: the scheme."""

    expanded_idx_mapping: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    noise: str


class RowParams(NamedTuple):
    """By logits row. kinds: int32[L] GREEDY (also where there is no request), PLAIN (noise and no limit) or LIMITED;
    keys: uint32[L] of its noise; divisors: float32[L], what logits are divided by; min_p, top_p: float32[L], top_k:
    int32[L], its limits."""

    kinds: torch.Tensor
    keys: torch.Tensor
    divisors: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor


@triton.jit
def row_limits(row, asked, min_p, top_k, top_p, vocab_size):
    """Limits of rows, and whether they have any; neutral ones where not `asked`. Gives (min_p, k, p, is limited)."""
    m = tl.load(min_p + row, mask=asked, other=0.0)
    k = tl.load(top_k + row, mask=asked, other=0x7FFFFFFF)
    p = tl.load(top_p + row, mask=asked, other=1.0)
    return m, k, p, (m > 0.0) | (k < vocab_size) | (p < 1.0)


_TYPES = {"*i64": "expanded_idx_mapping positions seeds", "*i32": "top_k kinds row_top_k", "*u32": "keys"}
_FLOATS = {"*fp32": "temperature min_p top_p divisors row_min_p row_top_p"}


@entry
@signature({**_TYPES, **_FLOATS}, SCHEME="murmur3", DRAWN=True, DIVIDED=True, LIMITS=True, BLOCK=64)
@signature({**_TYPES, **_FLOATS}, SCHEME="philox", DRAWN=True, DIVIDED=False, LIMITS=False, BLOCK=64)
@signature({**_TYPES, **_FLOATS}, SCHEME="murmur3", DRAWN=False, DIVIDED=False, LIMITS=True, BLOCK=64)
@triton.jit(do_not_specialize=["num_logits"])
def _look_up_rows_kernel(
    expanded_idx_mapping,
    positions,
    temperature,
    seeds,
    min_p,
    top_k,
    top_p,
    num_logits,
    vocab_size,
    kinds,
    keys,
    divisors,
    row_min_p,
    row_top_k,
    row_top_p,
    SCHEME: tl.constexpr,
    DRAWN: tl.constexpr,
    DIVIDED: tl.constexpr,
    LIMITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = i < num_logits
    row = tl.load(expanded_idx_mapping + i, mask=real, other=-1)
    asked = row >= 0
    kind = tl.full([BLOCK], GREEDY, tl.int32)
    if DRAWN:
        # 1 greedy or not, and the key of the noise; a greedy draw needs no limits: the best token is always kept
        t = tl.load(temperature + row, mask=asked, other=0.0)
        asked = t != 0.0
        seed = tl.load(seeds + row, mask=asked, other=0)
        position = tl.load(positions + i, mask=asked, other=0)
        tl.store(keys + i, row_key(seed, position, SCHEME), mask=real)
        divisor = tl.where(asked, t, 1.0) if DIVIDED else tl.full([BLOCK], 1.0, tl.float32)
        tl.store(divisors + i, divisor, mask=real)
        kind = tl.where(asked, PLAIN, GREEDY)
    else:
        tl.store(divisors + i, tl.full([BLOCK], 1.0, tl.float32), mask=real)
    if LIMITS:
        # 2 limits
        m, k, p, limited = row_limits(row, asked, min_p, top_k, top_p, vocab_size)
        kind = tl.where(limited, LIMITED, kind)
        tl.store(row_min_p + i, m, mask=real)
        tl.store(row_top_k + i, k, mask=real)
        tl.store(row_top_p + i, p, mask=real)
    tl.store(kinds + i, kind, mask=real)


def look_up_draws(draws: Draws, limits: Limits | None, num_logits: int, vocab_size: int, *, divide: bool) -> RowParams:
    """Of rows that draw. limits: None = no row has any, and none are given; divide: by the temperature, or by 1."""
    some = limits or Limits(draws.temperature, draws.expanded_idx_mapping, draws.temperature)  # none of it is read
    how = {"SCHEME": draws.noise, "DRAWN": True, "DIVIDED": divide, "LIMITS": limits is not None}
    return _look_up(draws[:4], some, num_logits, vocab_size, how)


def look_up_limits(expanded_idx_mapping: torch.Tensor, limits: Limits, num_logits: int, vocab_size: int) -> RowParams:
    """Of rows that are limited and no more; no keys are given."""
    unread = (expanded_idx_mapping, expanded_idx_mapping, limits.min_p, expanded_idx_mapping)
    how = {"SCHEME": "murmur3", "DRAWN": False, "DIVIDED": False, "LIMITS": True}
    return _look_up(unread, limits, num_logits, vocab_size, how)


def _look_up(
    draws: tuple[torch.Tensor, ...], limits: Limits, num_logits: int, vocab_size: int, how: dict[str, object]
) -> RowParams:
    types = (torch.int32, torch.uint32, torch.float32, torch.float32, torch.int32, torch.float32)
    params = RowParams(*(torch.empty(num_logits, dtype=t, device=draws[0].device) for t in types))
    width = tile(num_logits, most=64)
    launch(
        _look_up_rows_kernel, (triton.cdiv(num_logits, width),), *draws, *limits, num_logits, vocab_size, *params,
        BLOCK=width, **how,
    )  # fmt: skip
    return params
