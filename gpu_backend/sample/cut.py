"""What min-p, top-k and top-p keep of a row, found on a tile that holds all that can be kept.

All three keep the head of one order: by descending value, ties by ascending token id. So what is left is said by a
*cut*: the key of the last value kept, and the last id kept of those that tie with it. Both top-k and top-p keep a token
if what stands before it weighs less than is wanted: k tokens of one each, or p of the mass. Values are compared as
integer keys and weights are integers, so a cut depends neither on the tile nor on who else is in it.

Keys: int32[rows, width], LOWEST where there is no candidate. GPU only: NumPy sorts.
"""

from __future__ import annotations

from gpu_backend.sample.keys import LOWEST, from_key, mass_of, to_key
from gpu_backend.triton_support import tl, triton

HIGHEST = tl.constexpr(0x7FFFFFFF)
ALL = tl.constexpr(2**62)  # more than any row weighs


@triton.jit
def lowest_key_of_min_p(highest, min_p):
    """The lowest key that min-p keeps in a row whose best value is `highest`; above LOWEST in any case.

    x is kept unless x < highest + log(min_p), in float64: the smallest float32 that is not below it is the limit.
    """
    threshold = highest.to(tl.float64) + tl.log(tl.where(min_p > 0.0, min_p, 1.0).to(tl.float64))
    rounded = threshold.to(tl.float32)
    key = to_key(rounded) + (rounded.to(tl.float64) < threshold).to(tl.int32)
    return tl.maximum(tl.where(min_p > 0.0, key, LOWEST), LOWEST + 1)


@triton.jit
def is_kept(key, token, cut, last):
    """Which tokens stand before the cut or on it."""
    return (key > cut) | ((key == cut) & (token <= last))


@triton.jit
def mass_wanted(total, p):
    """What must stand before a token for top-p to drop it: the least integer not below p * total, and at least 1."""
    wanted = tl.ceil(total.to(tl.float64) * tl.where(p < 1.0, p, 1.0).to(tl.float64)).to(tl.int64)
    return tl.where(p < 1.0, tl.maximum(wanted, 1), ALL)


@triton.jit
def ties_wanted(before, wanted, weight):
    """How many ties are kept: before the first stands `before`, before the n-th (n - 1) * weight more."""
    rest = wanted.to(tl.int64) - before + weight - 1
    return tl.minimum(rest // tl.maximum(weight, 1), HIGHEST).to(tl.int32)


@triton.jit
def cut_by_weight(key, token, weight, wanted):
    """The cut behind the last candidate with less than `wanted` before it: (key, last id), int32[rows].

    token: int32[1, width] or [rows, width], ascending; weight: int32 or int64[rows, width], 0 where there is no
    candidate; wanted: as weight, [rows], at least 1.
    """
    # 1 the lowest key with less than `wanted` above it, by bisection; a row that is done stays as it is
    high = tl.max(key, 1).to(tl.int64)
    low = tl.minimum(tl.min(tl.where(key > LOWEST, key, HIGHEST), 1).to(tl.int64), high) - 1
    while tl.max(high - low, 0) > 1:
        middle = (low + high) >> 1
        little = tl.sum(tl.where(key > middle.to(tl.int32)[:, None], weight, 0), 1) < wanted
        high = tl.where(little, tl.maximum(middle, low + 1), high)
        low = tl.where(little, low, tl.minimum(middle, high - 1))
    cut = high.to(tl.int32)
    # 2 the ties that have less than `wanted` before them
    before = tl.sum(tl.where(key > cut[:, None], weight, 0), 1)
    tie = key == cut[:, None]
    ties = ties_wanted(before, wanted, tl.max(tl.where(tie, weight, 0), 1))
    nth = tl.cumsum(tie.to(tl.int32), 1)
    return cut, tl.max(tl.where(tie & (nth <= ties[:, None]), token, -1), 1)


@triton.jit
def cut_of(key, token, highest, floor, k, p, total):
    """The cut by min-p, top-k and top-p, in this order: (key, last id, is it found), int32[rows] each.

    key: of all tokens that min-p keeps, LOWEST elsewhere; or, of a longer row, of at least the k best of these (all, if
    they are fewer). highest: float32[rows] the best value; floor: int32[rows] the lowest key that min-p keeps; k:
    int32, p: float32[rows], the vocabulary's size and 1 for rows without such a limit; total: int64[rows], the mass
    that top-p takes its share of, 0 = that of what top-k leaves here. Not found: top-p wants more mass than is here.
    """
    # 1 min-p
    cut, last = floor - 1, tl.full(k.shape, -1, tl.int32)
    found = tl.full(k.shape, 1, tl.int32)
    # 2 top-k
    count = tl.sum((key > LOWEST).to(tl.int32), 1)
    if tl.max((k <= count).to(tl.int32), 0) > 0:  # a list of just k has more of the row behind it
        cut, last = cut_by_weight(key, token, (key > LOWEST).to(tl.int32), k)
    # 3 top-p over what is left
    if tl.min(p, 0) < 1.0:
        left = tl.where(is_kept(key, token, cut[:, None], last[:, None]), key, LOWEST)
        mass = tl.where(left > LOWEST, mass_of(from_key(left), highest[:, None]), 0)
        here = tl.sum(mass, 1)
        wanted = mass_wanted(tl.where(total > 0, total, here), p)
        found = ((p >= 1.0) | (here >= wanted)).to(tl.int32)
        cut, last = cut_by_weight(left, token, mass, wanted)
    return cut, last, found


@triton.jit
def row_cut(x, token, min_p, k, p):
    """The cut of rows that lie in the tile as a whole: (key, last id), int32[rows].

    x: float32[rows, width] without NaN, -inf behind the row's end; token: int32[1, width], ascending; min_p: float32,
    k: int32, p: float32, [rows] each, 0, the vocabulary's size and 1 for rows without such a limit.
    """
    highest = tl.max(x, 1)
    floor = lowest_key_of_min_p(highest, min_p)
    key = to_key(x)
    key = tl.where(key >= floor[:, None], key, LOWEST)
    cut, last, _ = cut_of(key, token, highest, floor, k, p, tl.full(k.shape, 0, tl.int64))
    return cut, last
