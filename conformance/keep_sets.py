"""Which tokens min-p, top-k and top-p leave when the logits are known up to a rounding error.

All three keep the head of one order: value descending, id ascending. What rounding can do is move a token across the
end of that head, so each row gets three sets: `kept` by exact arithmetic, `certain` whatever the rounding, and
`possible` with some rounding. certain <= kept <= possible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Sums of masses are taken to be made in blocks of this many lanes (a tree inside, the blocks one after the other), as
# vLLM's statistics are. A float32 sum over a vocabulary that runs from one end to the other is too coarse for top-p.
SUM_BLOCK = 8192


@dataclass(frozen=True, slots=True)
class Row:
    """One logits row before the truncation. x: float64[V]; error: float64[V] how far a runner's value may lie from it;
    raw: float[V] the logits it came from: two tokens with the same `raw`, `x` and `error` were treated alike, so their
    values are equal for every runner."""

    x: np.ndarray
    error: np.ndarray
    raw: np.ndarray


@dataclass(frozen=True, slots=True)
class KeepSets:
    """bool[V] each."""

    kept: np.ndarray
    certain: np.ndarray
    possible: np.ndarray

    @classmethod
    def whole(cls, vocab_size: int) -> KeepSets:
        everything = np.ones(vocab_size, bool)
        return cls(everything, everything, everything)


def keep_sets(row: Row, min_p: float, top_k: int, top_p: float, unit: float) -> KeepSets:
    """The sets of one row. top_k 0: all. unit: half a step of the runner's arithmetic below 1.

    A row that holds a NaN, or no token at all, is left whole.
    """
    best = row.x.max()
    if np.isnan(best) or best == -np.inf:
        return KeepSets.whole(len(row.x))
    alive = row.x > -np.inf
    sets = KeepSets(alive, alive, alive)
    # 1 min-p
    if min_p > 0:
        sets = _min_p(row, sets, best, min_p, unit)
    # 2 top-k
    if 0 < top_k < len(row.x):
        sets = _top_k(row, sets, top_k)
    # 3 top-p over what top-k left
    if top_p < 1:
        sets = _top_p(row, sets, best, top_p, unit)
    return sets


def _min_p(row: Row, sets: KeepSets, best: float, min_p: float, unit: float) -> KeepSets:
    highest = row.x == best
    if best == np.inf:
        return KeepSets(highest, highest, highest)
    log = np.log(min_p)
    threshold = best + log
    # Both values' errors; the logarithm (2 units) and the sum are rounded, where there is anything to add.
    band = row.error + row.error[highest].max() + unit * (2 * abs(log) + abs(threshold)) * (log != 0)
    certain, possible = row.x >= threshold + band, row.x >= threshold - band
    # The best one is never below its own threshold, unless rounding may make another one the best.
    if (row.x + row.error >= best - row.error[highest].max()).sum() == highest.sum():
        certain |= highest
    return KeepSets(sets.kept & (row.x >= threshold), sets.certain & certain, sets.possible & possible)


def _top_k(row: Row, sets: KeepSets, k: int) -> KeepSets:
    if k == 1 and not row.error.any():  # the greedy token of logits that nothing has rounded
        first = np.zeros(len(row.x), bool)
        first[row.x.argmax()] = True
        return KeepSets(first, first, first)
    least, exact, most = _before(row, sets.certain * 1.0, sets.kept * 1.0, sets.possible * 1.0)
    return KeepSets(sets.kept & (exact < k), sets.certain & (most < k), sets.possible & (least < k))


def _top_p(row: Row, sets: KeepSets, best: float, p: float, unit: float) -> KeepSets:
    distance = _distance(row.x, best)
    mass = np.exp(distance)
    certain, kept, possible = (np.where(s, mass, 0.0) for s in (sets.certain, sets.kept, sets.possible))
    least, exact, most = _before(row, certain, kept, possible)
    # A mass is off by its logit's error, the best one's, the difference, its product with log2(e), and 2^x (4 units); a
    # ratio of sums by no more than the mean of that, and, where it is near p, by p times the roundings of both sums.
    off = row.error + row.error[row.x == best].max() + unit * (2 * np.abs(distance) + 4)
    mean = float((possible * np.where(possible > 0, off, 0.0)).sum() / possible.sum())
    eta = mean + p * unit * (2 * sum_roundings(len(row.x)) + 4)
    # The first token is kept whatever p is. The best one has mass 1: before any other one there stands as much.
    at_least, share, at_most = least / possible.sum(), exact / kept.sum(), most / max(certain.sum(), 1e-300)
    return KeepSets(
        sets.kept & ((share < p) | (exact < 0.5)),
        sets.certain & ((at_most + eta < p) | (most < 0.5)),
        sets.possible & ((at_least - eta < p) | (least < 0.5)),
    )


def sum_roundings(vocab_size: int) -> int:
    """How many roundings one term of a sum over the vocabulary goes through."""
    return -(-vocab_size // SUM_BLOCK) + int(np.ceil(np.log2(SUM_BLOCK)))


def _distance(x: np.ndarray, best: float) -> np.ndarray:
    """x - best, and 0 for the best, also where both are +inf."""
    with np.errstate(invalid="ignore"):
        return np.where(x == best, 0.0, x - best)


def _before(
    row: Row, certain: np.ndarray, kept: np.ndarray, possible: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How much weight stands before each token, float64[V] each: at least, exactly, at most.

    At least: the `certain` weight of tokens whose value is surely higher. At most: the `possible` weight of tokens
    whose value may be as high. Tokens treated alike stand in the order of their ids in any case.
    """
    n = len(row.x)
    ids = np.arange(n)
    order = np.lexsort((ids, -row.x))
    exact = _scattered(order, np.cumsum(kept[order]) - kept[order])
    low, high = row.x - row.error, row.x + row.error
    # 1 surely higher: the lower end lies above this token's upper end
    by_low = np.argsort(low, kind="stable")
    above = np.append(_suffix_sums(certain[by_low]), 0.0)
    least = above[np.searchsorted(low[by_low], high, side="right")]
    # 2 may be as high: the upper end reaches this token's lower end; itself not
    by_high = np.argsort(high, kind="stable")
    above = np.append(_suffix_sums(possible[by_high]), 0.0)
    most = above[np.searchsorted(high[by_high], low, side="left")] - possible
    # 3 among tokens treated alike, those with lower ids come before, those with higher ids do not
    group = np.lexsort((ids, row.raw, row.error, -row.x))
    same = np.ones(n, bool)
    for a in (row.x, row.raw, row.error):
        same[1:] &= a[group][1:] == a[group][:-1]
    start = np.maximum.accumulate(np.where(np.append(False, same[1:]), 0, ids))
    end = _group_ends(start)
    for total, weight, sign in ((least, certain, 1.0), (most, possible, -1.0)):
        sums = np.append(0.0, np.cumsum(weight[group]))
        lower, higher = sums[ids] - sums[start], sums[end] - sums[ids + 1]
        total[group] += lower if sign > 0 else -higher
    return least, exact, most


def _group_ends(start: np.ndarray) -> np.ndarray:
    """Where each element's group ends (exclusive), from where it starts."""
    n = len(start)
    last = np.append(start[1:] != start[:-1], True)
    ends = np.where(last, np.arange(1, n + 1), n)
    return np.minimum.accumulate(ends[::-1])[::-1]


def _suffix_sums(a: np.ndarray) -> np.ndarray:
    return np.cumsum(a[::-1])[::-1]


def _scattered(order: np.ndarray, values: np.ndarray) -> np.ndarray:
    out = np.empty_like(values)
    out[order] = values
    return out
