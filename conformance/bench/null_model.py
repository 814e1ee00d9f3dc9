"""A model that does nothing, so that what a step takes is the runner's own work."""

from __future__ import annotations

from typing import Any

import numpy as np

from runner_api import KVCacheSpec


class NullModel:
    """One layer that neither reads nor writes its cache; every logit is 0, so the first token always wins.

    Runs on any backend: its zeros are of the kind that the inputs are, and are made once.
    """

    def __init__(self, vocab_size: int, block_size: int = 16) -> None:
        self.vocab_size = vocab_size
        self._spec = KVCacheSpec(block_size, num_kv_heads=1, head_size=1, dtype="float32")
        self._hidden: Any = None
        self._logits: Any = None

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {"null": self._spec}

    def forward(
        self, input_ids: Any, positions: Any, kv_caches: Any, attn_metadata: Any, intermediates: Any = None
    ) -> Any:
        """float32[tp, 1]"""
        if self._hidden is None or len(self._hidden) < len(input_ids):
            self._hidden = _zeros(input_ids, len(input_ids), 1)
        return self._hidden[: len(input_ids)]

    def compute_logits(self, hidden_states: Any) -> Any:
        """float32[L, V]"""
        if self._logits is None or len(self._logits) < len(hidden_states):
            self._logits = _zeros(hidden_states, len(hidden_states), self.vocab_size)
        return self._logits[: len(hidden_states)]


def _zeros(like: Any, rows: int, width: int) -> Any:
    """float32 zeros where `like` is: a NumPy array or a torch tensor."""
    if isinstance(like, np.ndarray):
        return np.zeros((rows, width), np.float32)
    return like.new_zeros((rows, width)).float()
