"""What a right runner must compute on the witness model, from a request's tokens alone.

A second, dense reading of the definition in `runner_api.witness`: no blocks, no slots, no batch. It is what makes
the oracle itself answerable.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runner_api import WitnessConfig
from runner_api import witness as w


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(w.MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(w.MIX_2)
    return x ^ (x >> np.uint64(31))


def witness_logits(config: WitnessConfig, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Logits after the last token of each sequence: float32[len(sequences), V]."""
    lengths = np.array([len(s) for s in sequences])
    ends = np.cumsum(lengths)
    starts = ends - lengths
    tokens = np.array([t for s in sequences for t in s], np.uint64)
    position = (np.arange(len(tokens)) - np.repeat(starts, lengths)).astype(np.uint64)
    index = position + np.uint64(1)
    term = _mix64(tokens * np.uint64(w.TOKEN) + position * np.uint64(w.POSITION) + index * np.uint64(w.INDEX))
    running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(term)])
    hidden = np.zeros(len(lengths), np.uint64)
    for g, group in enumerate(config.groups):
        first = starts if group.sliding_window is None else np.maximum(starts, ends - group.sliding_window)
        hidden += (running[ends] - running[first]) * np.uint64(2 * g + 1)
    vocab = np.arange(1, config.vocab_size + 1, dtype=np.uint64) * np.uint64(w.VOCAB)
    word = _mix64(hidden[:, None] + vocab[None, :]) >> np.uint64(w.LOGIT_SHIFT)
    return word.astype(np.float32) * np.float32(w.LOGIT_SCALE)
