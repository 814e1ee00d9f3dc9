"""Random numbers as a pure function of (seed, position, token): no state, no order, no generator.

Two schemes: `murmur3` hashes all three at once (vLLM 0.33); `philox` derives a key from seed and position and counts
tokens (vLLM 0.26). Words and uniforms are the same bits on every backend. Twin: gpu_backend/sample/noise.py.
"""

from __future__ import annotations

import numpy as np

U32 = np.uint32
MASK = np.uint64(0xFFFFFFFF)
PHILOX_A, PHILOX_B = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
PHILOX_KEY_A, PHILOX_KEY_B = 0x9E3779B9, 0xBB67AE85
PHILOX_SCALE = np.float32(4.6566127342e-10)  # just below 2^-31, so that the largest uniform stays below 1


def philox4x32(key: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """First word of Philox4x32 with ten rounds (Salmon et al. 2011).

    Shapes: key: uint64[...] (low word, high word); counter: uint64[...], its words 0 and 1 (2 and 3 are zero).
    Returns uint32[...].

    >>> hex(philox4x32(np.uint64([0]), np.uint64([0]))[0])
    '0x6627e8d5'
    """
    key, counter = np.asarray(key, np.uint64), np.asarray(counter, np.uint64)
    k0, k1 = key & MASK, key >> np.uint64(32)
    c0, c1 = counter & MASK, counter >> np.uint64(32)
    c2 = c3 = np.zeros_like(c0)
    for _ in range(10):
        # 1 two 32 x 32 -> 64 bit products
        a, b = PHILOX_A * c0, PHILOX_B * c2
        # 2 mix their halves with the other words and the key
        c0, c1, c2, c3 = (b >> np.uint64(32)) ^ c1 ^ k0, b & MASK, (a >> np.uint64(32)) ^ c3 ^ k1, a & MASK
        # 3 bump the key
        k0, k1 = (k0 + np.uint64(PHILOX_KEY_A)) & MASK, (k1 + np.uint64(PHILOX_KEY_B)) & MASK
    return c0.astype(U32)


def _rotl(x: np.ndarray, r: int) -> np.ndarray:
    return (x << U32(r)) | (x >> U32(32 - r))


def _mix(h: np.ndarray, w: np.ndarray) -> np.ndarray:
    w = _rotl(w * U32(0xCC9E2D51), 15) * U32(0x1B873593)
    return _rotl(h ^ w, 13) * U32(5) + U32(0xE6546B64)


def murmur3(seeds: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """murmur3-32 of the words (seed low, seed high, position low, token id), broadcast together.

    Shapes: seeds, positions: int64[...]; token_ids: integer[...]. Returns uint32[...].

    >>> hex(murmur3(np.int64([42]), np.int64([7]), np.int64([0]))[0])
    '0x661eb28d'
    """
    seed = np.asarray(seeds, np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        h = np.zeros(np.shape(seed), U32)
        for word in (
            (seed & MASK).astype(U32),
            (seed >> np.uint64(32)).astype(U32),
            (np.asarray(positions, np.int64).view(np.uint64) & MASK).astype(U32),
            np.asarray(token_ids).astype(U32),
        ):
            h = _mix(h, word)
        h = h ^ U32(16)
        h = (h ^ (h >> U32(16))) * U32(0x85EBCA6B)
        h = (h ^ (h >> U32(13))) * U32(0xC2B2AE35)
        return h ^ (h >> U32(16))


def noise_words(seeds: np.ndarray, positions: np.ndarray, vocab_size: int, scheme: str) -> np.ndarray:
    """The random word of every (logits row, token): uint32[L, V].

    Shapes: seeds, positions: int64[L].
    """
    tokens = np.arange(vocab_size, dtype=np.uint64)[None, :]
    if scheme == "murmur3":
        return murmur3(seeds[:, None], positions[:, None], tokens)
    row_key = philox4x32(seeds.view(np.uint64), positions.view(np.uint64))
    return philox4x32(row_key.astype(np.uint64)[:, None], tokens)


def uniforms(words: np.ndarray, scheme: str) -> np.ndarray:
    """Words to float32 in (0, 1] (murmur3) or (0, 1) (philox); every rounding is a single one, so bits are fixed."""
    if scheme == "murmur3":
        high = (words >> U32(16)).astype(np.float32) * np.float32(2.0**-16)
        low = ((words & U32(0xFFFF)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
        return high + low
    signed = words.view(np.int32)
    magnitude = np.where(signed < 0, ~signed, signed).astype(np.float32)
    return np.maximum(magnitude * PHILOX_SCALE, PHILOX_SCALE)


def gumbel_noise(seeds: np.ndarray, positions: np.ndarray, vocab_size: int, scheme: str) -> np.ndarray:
    """Gumbel noise float64[L, V]: -log(-log(1 - u)) of the float32 uniform u; large where u is near 0.

    1 - u is kept from 0, where u rounds to 1, by the smallest step of float32 below 1.
    """
    u = uniforms(noise_words(seeds, positions, vocab_size, scheme), scheme).astype(np.float64)
    return -np.log(-np.log1p(-np.minimum(u, 1.0 - 2.0**-24)))
