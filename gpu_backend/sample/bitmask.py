"""Sets of token ids as bits: 32 tokens to a word, least significant bit first.

Token v is in the set if bit v % 32 of word v // 32 is 1. Bits past the vocabulary mean nothing.
Twin: cpu_reference/sample/bitmask.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gpu_backend.triton_support import tl, triton

NUM_BITS = 32


def pack_bits(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """The set as words: int32[ceil(vocab_size / 32)], on the host."""
    ids = np.fromiter(token_ids, np.int64)
    words = np.zeros(-(-vocab_size // NUM_BITS), np.uint32)
    np.bitwise_or.at(words, ids // NUM_BITS, np.uint32(1) << (ids % NUM_BITS).astype(np.uint32))
    return words.view(np.int32)


@triton.jit
def allowed_by(words, token, inside):
    """Which tokens are in the set whose words start at `words`: int32, 1 = in; 0 where `inside` is false."""
    word = tl.load(words + token // 32, mask=inside, other=0)
    return (word >> (token % 32)) & 1
