"""One pass over the logits: of every group of neighbouring tokens the best that is in it.

What comes after it looks only into groups that can matter: a draw into those whose bound reaches the best score found
so far, top-k into those whose best logit is one of the k best. So the logits are read once and a little more.

GPU only: NumPy sorts and takes maxima of whole rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gpu_backend.sample.keys import max_or_nan
from gpu_backend.sample.noise import LOG_STEP, noise_most, rough_logs
from gpu_backend.sample.row_params import PLAIN, RowParams
from gpu_backend.triton_support import INTERPRETED, block, entry, launch, signature, tile, tl, triton

# Tokens to a group. A limit (min-p, top-k, top-p) is found among groups, so they are narrow where one is asked for.
PLAIN_GROUP, LIMITED_GROUP = 256, 128
# A compiled program is one warp. It holds a tile of 4 rows (which share part of the hash) by 256 tokens at a time, and
# a few tiles one after the other, which share what is loaded by row. Few rows are not put together: they would not fill
# the GPU.
TILE_ROWS, TILE_WIDTH, TILES_TO_A_PROGRAM, FEW_ROWS = 4, 256, 4, 64
NO_NOISE = "none"


class GroupBests(NamedTuple):
    """bests: float32[L, groups], NaN for a group that holds one; width: tokens to a group."""

    bests: torch.Tensor
    width: int

    @property
    def num_groups(self) -> int:
        return self.bests.shape[1]


_TYPES = {"*i32": "kinds", "*u32": "keys"}
_TILES = {"ROWS": TILE_ROWS, "WIDTH": TILE_WIDTH, "TILES": TILES_TO_A_PROGRAM, "num_warps": 1}
_FEW = {"ROWS": 1, "WIDTH": TILE_WIDTH, "TILES": 1, "num_warps": 1}


@entry
@signature({**_TYPES, "*fp32": "divisors bests logits"}, SCHEME="murmur3", GROUP=PLAIN_GROUP, **_TILES)
@signature({**_TYPES, "*fp32": "divisors bests", "*bf16": "logits"}, SCHEME="murmur3", GROUP=LIMITED_GROUP, **_TILES)
@signature({**_TYPES, "*fp32": "divisors bests", "*fp16": "logits"}, SCHEME="philox", GROUP=PLAIN_GROUP, **_FEW)
@signature({**_TYPES, "*fp32": "divisors bests logits"}, SCHEME=NO_NOISE, GROUP=LIMITED_GROUP, **_TILES)
@triton.jit(do_not_specialize=["num_logits"])
def _group_bests_kernel(
    kinds,
    keys,
    divisors,
    num_logits,
    logits,
    vocab_size,
    num_groups,
    bests,
    SCHEME: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = i < num_logits
    if SCHEME != "none":
        # 1 which rows get noise: not the greedy ones, and not those of which not every token may be drawn
        noisy = tl.load(kinds + i, mask=real, other=0) == PLAIN
        key = tl.load(keys + i, mask=real, other=0)[:, None]
        t = tl.load(divisors + i, mask=real, other=1.0)
        # A score's bound is x / t + most - step * r, and t times what differs from token to token x - t * step * r.
        step = tl.where(noisy, t * LOG_STEP, 0.0)
        back = 1.0 / t
        any_noisy = tl.max(noisy.to(tl.int32), 0)
    for n in range(TILES):
        first = (tl.program_id(1) * TILES + n) * WIDTH
        token = first + tl.arange(0, WIDTH)
        inside = real[:, None] & (token < vocab_size)[None, :]
        x = tl.load(logits + (i * vocab_size)[:, None] + token[None, :], mask=inside, other=float("-inf")).to(
            tl.float32
        )
        # 2 a bound of each score that costs no logarithm
        if SCHEME != "none":  # noqa: SIM102
            if any_noisy > 0:
                x = x - rough_logs(key, token.to(tl.uint64)[None, :], SCHEME) * step[:, None]
        # 3 the best of each group
        best = max_or_nan(tl.reshape(x, [ROWS, WIDTH // GROUP, GROUP]), 2)
        # 4 in units of the score, and so much higher that no rounding makes it less than one
        if SCHEME != "none":
            bound = tl.maximum(best * back[:, None], -3.4e38) + noise_most(SCHEME)
            bound = bound + tl.abs(bound) * 0.00000095367431640625 + 0.001  # 2^-20
            best = tl.where(noisy[:, None] & (best > float("-inf")), bound, best)
        group = first // GROUP + tl.arange(0, WIDTH // GROUP)
        place = bests + (i * num_groups)[:, None] + group[None, :]
        tl.store(place, best, mask=real[:, None] & (group < num_groups)[None, :])


def group_bests(rows: RowParams, noise: str, num_logits: int, logits: torch.Tensor, *, limited: bool) -> GroupBests:
    """The best of every group: for rows with noise and without limits a bound of the scores, else the best logit.

    A score is `logits / divisor + noise`; the bound lies above every score of its group, by some tenths at most where
    values are small. limited: some row has limits. logits: float[L, V], contiguous.
    """
    return _launch(rows.kinds, rows.keys, rows.divisors, noise, num_logits, logits, narrow=limited)


def group_maxima(num_logits: int, logits: torch.Tensor) -> GroupBests:
    """The best logit of every group."""
    return _launch(logits, logits, logits, NO_NOISE, num_logits, logits, narrow=True)  # nothing by row is read


def _launch(
    kinds: torch.Tensor, keys: torch.Tensor, divisors: torch.Tensor, noise: str, num_logits: int,
    logits: torch.Tensor, *, narrow: bool,
) -> GroupBests:  # fmt: skip
    vocab_size = logits.shape[1]
    width = tile(vocab_size, most=LIMITED_GROUP if narrow else PLAIN_GROUP)
    num_groups = triton.cdiv(vocab_size, width)
    bests = torch.empty(num_logits, num_groups, dtype=torch.float32, device=logits.device)
    tiling = _tiling(num_logits, vocab_size, width)
    grid = (triton.cdiv(num_logits, tiling["ROWS"]), triton.cdiv(vocab_size, tiling["WIDTH"] * tiling["TILES"]))
    launch(
        _group_bests_kernel, grid, kinds, keys, divisors, num_logits, logits, vocab_size, num_groups, bests,
        SCHEME=noise, GROUP=width, **tiling,
    )  # fmt: skip
    return GroupBests(bests, width)


def _tiling(num_logits: int, vocab_size: int, group: int) -> dict[str, Any]:
    """The tile of a program, and how many it takes one after the other."""
    if INTERPRETED:  # programs cost alike, however much they hold
        width = max(group, tile(vocab_size))
        return {"ROWS": tile(num_logits, most=max(65536 // width, 1), least=1), "WIDTH": width, "TILES": 1}
    tiling = _TILES if num_logits >= FEW_ROWS else _FEW
    return tiling | {"WIDTH": max(group, block(vocab_size, most=tiling["WIDTH"]))}
