"""Sets of token ids as bits: 32 tokens to a word, least significant bit first.

Token v is in the set if bit v % 32 of word v // 32 is 1. Bits past the vocabulary mean nothing.
Twin: gpu_backend/sample/bitmask.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

NUM_BITS = 32


def pack_bits(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """The set as words: int32[ceil(vocab_size / 32)].

    >>> pack_bits([0, 33], 40).tolist()
    [1, 2]
    """
    words = np.zeros(-(-vocab_size // NUM_BITS), np.uint32)
    for token in token_ids:
        words[token // NUM_BITS] |= np.uint32(1 << token % NUM_BITS)
    return words.view(np.int32)


def allowed_by(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """Which tokens are in the set: bool[vocab_size].

    >>> allowed_by(np.int32([5]), 3).tolist()
    [True, False, True]
    """
    token = np.arange(vocab_size)
    return (words[token // NUM_BITS] >> (token % NUM_BITS)) & 1 == 1
