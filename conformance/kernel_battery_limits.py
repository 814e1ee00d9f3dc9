"""Calls of min-p, top-k, top-p and the draw for `conformance.kernel_battery`: rows on which a search can go wrong.

Ties at every cut, one live token, none, NaN, both infinities, values far apart, flat rows that only a search in the row
decides, and enough of them that every program has neighbours. What happens on the way to a cut changes no cut when it
goes wrong, only the speed; so bounds of groups and lists of candidates are worked out here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from runner_api import NO_ROW

INF = np.float32(np.inf)
LOWEST = -2139095041  # the key of -inf
MASS_UNIT = 2.0**42
# (logits rows, vocabulary, widest tile): rows that fit into a tile, and rows of five groups.
SIZES = ((38, 11, 16), (18, 300, 64))
NO_LIST, TOO_MANY = -1, -2


class LimitedRows:
    """L logits rows of N state rows, some of no request; parameters are whatever is asked for by row."""

    def __init__(self, num_logits: int, vocab_size: int) -> None:
        self.rng = rng = np.random.default_rng([num_logits, vocab_size])
        self.l, self.v, self.n = num_logits, vocab_size, 9
        named = [8, NO_ROW, 0, 3, 1, 7, 2, 4, 6, 1, 5, 0, 3, 1]
        self.rows = np.concatenate([named, rng.integers(0, self.n, num_logits - len(named))])
        self.rows[-1] = 5  # is searched where there are many tokens: one step further is outside
        self.temperature = np.float32([0.7, 1, 0, 2, 1, 0.3, 1, 1, 0.5])
        self.min_p = np.float32([0, 0, 0.02, 0, 1, 0.1, 0.3, 0, 0.5])
        self.top_k = np.minimum(np.int32([3, vocab_size, 1, 2, 2 * vocab_size, 40, 4, 2, vocab_size]), vocab_size)
        self.top_p = np.float32([1, 0.9, 0.5, 0.7, 0.99, 0.8, 0.8, 1e-9, 1])
        self.seeds = rng.integers(-(2**63), 2**63 - 1, self.n)
        self.positions = rng.integers(0, 2**33, num_logits + 3)

    def logits(self) -> np.ndarray:
        """float32[L, V]: a kind of row after the other."""
        rng, shape = self.rng, (self.l, self.v)
        x = (rng.normal(size=shape) * 3).astype(np.float32)
        x[1::7] = rng.integers(-2, 3, x[1::7].shape)  # ties everywhere
        x[2::7, ::2] = -INF
        x[3::14] = np.where(rng.random(x[3::14].shape) < 0.02, x[3::14], -INF)
        x[7::14] = 0.0  # flat: both zeros
        x[7::14, 1::3] = -0.0
        x[5::21] = -INF
        x[6::21, self.v // 2] = np.nan
        x[8::21, [1, self.v - 1]] = INF
        x[9::14] *= 10
        x[10::14] *= 30
        x[11::14] = rng.permutation(self.v) * np.float32(1e-4)
        x[-1] = x[0, ::-1]
        x[14] = -INF  # and behind the division all of it
        x[14, 3::3][:5] = -3e38
        return x

    def without_greedy(self) -> dict[str, np.ndarray]:
        """The limits as requests have them: a greedy one has none."""
        greedy = self.temperature == 0
        return {
            "min_p": np.where(greedy, np.float32(0), self.min_p),
            "top_k": np.where(greedy, np.int32(self.v), self.top_k),
            "top_p": np.where(greedy, np.float32(1), self.top_p),
        }

    def group_bounds(self, x: np.ndarray, words: Callable[[], np.ndarray], bits: int, width: int) -> np.ndarray:
        """What no score of a group of `width` tokens reaches: float64[L, groups]; the best logit of greedy rows.

        words: gives uint32[L, V], the random words (of `bits` bits each) of rows with noise.
        """
        t = np.where(self.rows >= 0, self.temperature[self.rows], 0)[:, None].astype(np.float64)
        logs = words().astype(np.float32).view(np.int32) * (np.log(2) / 2**23)
        scores = np.where(t == 0, x, x / np.where(t == 0, 1, t) + (127 + bits) * np.log(2) - logs)
        tail = -self.v % width
        grouped = np.pad(scores, ((0, 0), (0, tail)), constant_values=-np.inf).reshape(self.l, -1, width)
        best = grouped.max(2)  # NaN for a group that holds one
        return np.where(best > -np.inf, np.maximum(best, -3.4e38), best)

    def lists(self, x: np.ndarray, group: int, width: int, *, alone: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Candidates of every row: entries int64[L, width] (0 past the end), lengths int32[L], masses int64[L]."""
        entries = np.zeros((self.l, width), np.int64)
        lens, totals = np.full(self.l, NO_LIST, np.int32), np.zeros(self.l, np.int64)
        for i, row in enumerate(self.rows):
            m, k, p = float(self.min_p[row]), int(self.top_k[row]), self.top_p[row]
            t = self.temperature[row] if row >= 0 else np.float32(0)
            limited = t > 0 and (m > 0 or k < self.v or p < 1)
            if limited and not np.isnan(x[i]).any() and x[i].max() > -np.inf:
                lens[i], totals[i] = self._list(x[i], m, k, p, t, group, entries[i], alone)
        return entries, lens, totals

    def _list(
        self, x: np.ndarray, m: float, k: int, p: np.float32, t: np.float32, group: int, entries: np.ndarray,
        alone: bool,
    ) -> tuple[int, int]:  # fmt: skip
        keys, num_groups = key_of(x), -(-self.v // group)
        bests = np.array([keys[g * group : (g + 1) * group].max() for g in range(num_groups)])
        by_top_p = k == self.v and p < 1
        wanted = k if k < self.v else max(num_groups * 5 // 8, 1) if by_top_p else num_groups + 1
        low, high, reached = LOWEST, int(bests.max()) + 1, num_groups
        while wanted <= num_groups and high - low > 1 and reached > wanted + wanted // 8 + 1:
            middle = (low + high) >> 1
            count = int((bests >= middle).sum())
            low, high, reached = (middle, high, count) if count >= wanted else (low, middle, reached)
        y = x / t
        threshold = float(y.max()) + np.log(m) if m > 0 else -np.inf
        by_groups, by_min_p = lower(float(value_of(low))), lower(threshold * float(t))
        bound = max(by_groups, by_min_p)
        chosen = np.flatnonzero((x >= bound) & (x > -np.inf))
        if y.max() == np.inf or len(chosen) > len(entries):
            return TOO_MANY, 0
        total = 0
        if by_top_p and by_groups > by_min_p:
            if not alone:
                return TOO_MANY, 0
            mass = np.floor(np.exp(y.astype(np.float64) - float(y.max())) * MASS_UNIT + 0.5).astype(np.int64)
            total = int(mass[y >= threshold].sum())
        entries[: len(chosen)] = (keys[chosen].astype(np.int64) << 32) | chosen
        return len(chosen), total


def lower(x: float) -> float:
    """A little less than x."""
    return x - abs(x) * 2.0**-22 - 1e-30 if abs(x) < np.inf else x


def key_of(x: np.ndarray) -> np.ndarray:
    """float32 as int32 in the same order."""
    bits = np.where(x == 0, np.float32(0), x).view(np.int32)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def value_of(key: int) -> np.float32:
    """The float32 of a key."""
    return np.int32(key ^ 0x7FFFFFFF if key < 0 else key).view(np.float32)


def limited_rows() -> Iterator[tuple[str, int, LimitedRows, np.ndarray]]:
    """(label, widest tile, rows, their logits)."""
    for num_logits, vocab_size, tile in SIZES:
        rows = LimitedRows(num_logits, vocab_size)
        yield f"{num_logits} x {vocab_size}", tile, rows, rows.logits()
