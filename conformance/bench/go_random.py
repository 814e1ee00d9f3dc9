"""The random numbers of Go's `math/rand`, so that a program written in Go can be repeated number for number.

Go's generator is x(t) = x(t - 607) + x(t - 273) modulo 2^64. A seed is not laid into its 607 words directly: it is
mixed with the words of a second generator of the same kind after 7.8 * 10^12 steps. Go ships those words as a table;
here they are computed: t steps of a linear recurrence are one polynomial power, z^t modulo z^607 - z^334 - 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

LENGTH, TAP = 607, 273
STEPS_OF_TABLE = 7_800_000_000_000
MODULUS = 2**31 - 1  # of the generator that spreads a seed over many words


def _spread(seed: int) -> Iterator[int]:
    """The words behind a seed: a multiplicative generator, its first twenty numbers left out."""
    x = seed % MODULUS or 89482311
    for i in range(20 + 3 * LENGTH):
        x = 48271 * x % MODULUS
        if i >= 20:
            yield x


def _words(seed: int, first_shift: int, second_shift: int) -> list[int]:
    """LENGTH words of three numbers each."""
    numbers = _spread(seed)
    return [(a << first_shift) ^ (b << second_shift) ^ c for a, b, c in zip(numbers, numbers, numbers, strict=True)]


def _multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Product of two polynomials, uint64[LENGTH] each, modulo z^607 - z^334 - 1 and 2^64."""
    product = np.convolve(a, b)
    with np.errstate(over="ignore"):
        for power in range(len(product) - 1, LENGTH - 1, -1):
            product[power - TAP] += product[power]
            product[power - LENGTH] += product[power]
    return product[:LENGTH]


@cache
def _table() -> tuple[int, ...]:
    """The 607 words that every seed is mixed with."""
    # Word t of the sequence lies in cell (LENGTH - TAP - t) % LENGTH; the words at the start are t = -606 .. 0.
    cells = _words(1, 20, 10)
    start = np.array([cells[(LENGTH - TAP - t) % LENGTH] for t in range(1 - LENGTH, 1)], np.uint64)
    # 1 z^STEPS by squaring
    power, square, left = np.zeros(LENGTH, np.uint64), np.zeros(LENGTH, np.uint64), STEPS_OF_TABLE
    power[0], square[1] = 1, 1
    while left:
        if left & 1:
            power = _multiply(power, square)
        square, left = _multiply(square, square), left >> 1
    # 2 each of the last 607 words is one combination of the words at the start
    table = [0] * LENGTH
    for t in range(STEPS_OF_TABLE - LENGTH + 1, STEPS_OF_TABLE + 1):
        table[(LENGTH - TAP - t) % LENGTH] = int((power * start).sum(dtype=np.uint64))
        power = np.roll(power, 1)  # times z; what was z^607 is now the constant, and belongs to z^334 as well
        power[LENGTH - TAP : LENGTH - TAP + 1] += power[0]
    return tuple(table)


class GoRandom:
    """`rand.New(rand.NewSource(seed))`.

    >>> random = GoRandom(1)
    >>> [random.below(100) for _ in range(5)]
    [81, 87, 47, 59, 81]
    """

    def __init__(self, seed: int) -> None:
        self._cells = [w ^ t for w, t in zip(_words(seed, 40, 20), _table(), strict=True)]
        self._tap, self._feed = 0, LENGTH - TAP

    def _next(self) -> int:
        self._tap, self._feed = (self._tap - 1) % LENGTH, (self._feed - 1) % LENGTH
        self._cells[self._feed] = (self._cells[self._feed] + self._cells[self._tap]) % 2**64
        return self._cells[self._feed]

    def _int31(self) -> int:
        return (self._next() & (2**63 - 1)) >> 32

    def below(self, n: int) -> int:
        """`Intn(n)`: an integer in [0, n), 0 < n < 2^31."""
        if n & (n - 1) == 0:
            return self._int31() & (n - 1)
        most = 2**31 - 1 - 2**31 % n
        value = self._int31()
        while value > most:
            value = self._int31()
        return value % n
