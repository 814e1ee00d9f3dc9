"""The noise of a draw as the judge reads it: the rules of both schemes once more, in float64 behind the uniform.

Words and float32 uniforms are the same bits for every runner; what follows them is rounded by each in its own way.
Sources: vLLM 0.33 (`murmur3`) and 0.26 (`philox`).
"""

from __future__ import annotations

import numpy as np

MASK = np.uint64(0xFFFFFFFF)
SCHEMES = ("murmur3", "philox")


def gumbel_noise(seeds: np.ndarray, positions: np.ndarray, vocab_size: int, scheme: str) -> np.ndarray:
    """float64[L, V]: -log(-log(1 - u)) of the uniform u of each (seed, position, token).

    Shapes: seeds, positions: int64[L]. 1 - u is kept from 0 by the smallest step of float32 below 1.
    """
    seed, position = (np.asarray(a, np.int64).view(np.uint64)[:, None] for a in (seeds, positions))
    tokens = np.arange(vocab_size, dtype=np.uint64)[None, :]
    words = murmur3(seed, position, tokens) if scheme == "murmur3" else philox(philox(seed, position), tokens)
    u = uniforms(words, scheme).astype(np.float64)
    return -np.log(-np.log1p(-np.minimum(u, 1.0 - 2.0**-24)))


def murmur3(seed: np.ndarray, position: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The 32-bit hash of the words (seed low, seed high, position low, token), as uint64.

    >>> hex(murmur3(*np.uint64([[42], [7], [0]]))[0])
    '0x661eb28d'
    """
    h = np.uint64(0)
    for word in (seed & MASK, seed >> np.uint64(32), position & MASK, tokens & MASK):
        w = word * np.uint64(0xCC9E2D51) & MASK
        w = _rotated(w, 15) * np.uint64(0x1B873593) & MASK
        h = _rotated(h ^ w, 13) * np.uint64(5) + np.uint64(0xE6546B64) & MASK
    h = h ^ np.uint64(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> np.uint64(shift)) * np.uint64(factor) & MASK
    return h ^ h >> np.uint64(16)


def _rotated(w: np.ndarray, n: int) -> np.ndarray:
    return (w << np.uint64(n) | w >> np.uint64(32 - n)) & MASK


def philox(key: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """First word of Philox4x32-10 with a 64-bit key and a counter of two words, as uint64.

    >>> hex(philox(np.uint64([0]), np.uint64([0]))[0])
    '0x6627e8d5'
    """
    k0, k1 = key & MASK, key >> np.uint64(32)
    c0, c1 = counter & MASK, counter >> np.uint64(32)
    c2 = c3 = np.zeros_like(c0)
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = b >> np.uint64(32) ^ c1 ^ k0, b & MASK, a >> np.uint64(32) ^ c3 ^ k1, a & MASK
        k0, k1 = k0 + np.uint64(0x9E3779B9) & MASK, k1 + np.uint64(0xBB67AE85) & MASK
    return c0


def uniforms(words: np.ndarray, scheme: str) -> np.ndarray:
    """float32 in (0, 1] (murmur3) or (0, 1) (philox); large noise comes from small ones.

    murmur3: (word + 1/2) / 2^32, rounded once. philox: the word as a signed number, one's complement if it is negative,
    times the float32 just below 2^-31.
    """
    if scheme == "murmur3":
        return ((words.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32)
    scale = np.float32(4.6566127342e-10)
    magnitude = np.where(words >> np.uint64(31), MASK - words, words).astype(np.float32)
    return np.maximum(magnitude * scale, scale)
