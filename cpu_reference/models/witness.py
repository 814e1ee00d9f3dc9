"""The witness model in NumPy. Its definition is in runner_api/witness.py. Twin: gpu_backend/models/witness.py."""

from __future__ import annotations

import numpy as np

from cpu_reference.attn_metadata import AttentionMetadata
from cpu_reference.kv_cache import LayerCache, reshape_and_cache
from cpu_reference.ragged import token_owners
from runner_api import witness as w
from runner_api.kv_cache import KVCacheSpec
from runner_api.witness import WitnessConfig


def mix64(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser on uint64, modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(w.MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(w.MIX_2)
    return x ^ (x >> np.uint64(31))


def witness_attention(
    token_cache: np.ndarray,
    position_cache: np.ndarray,
    block_table: np.ndarray,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    num_reqs: int,
    window: int | None,
    group: int,
    hidden: np.ndarray,
) -> None:
    """Add to each token's hidden value the hash of the pairs it sees through its request's block table.

    Shapes: caches: int64[num_blocks, block_size, 1, 1]; block_table: int32[num_reqs, W]; query_start_loc:
    int32[num_reqs+1]; seq_lens: int32[num_reqs]; hidden: uint64[tp]. Writes: hidden of the batch's tokens.
    """
    block_size = token_cache.shape[1]
    # 1 every key of every request, as one ragged axis: its owner and its logical position
    key_start_loc = np.concatenate([[0], np.cumsum(seq_lens[:num_reqs])])
    owner, index = token_owners(key_start_loc, num_reqs)
    # 2 the pair stored at its slot
    slot = block_table[owner, index // block_size].astype(np.int64) * block_size + index % block_size
    token = token_cache.reshape(-1)[slot].astype(np.uint64)
    position = position_cache.reshape(-1)[slot].astype(np.uint64)
    # 3 hash; sums over a run of keys are differences of running sums
    term = mix64(
        token * np.uint64(w.TOKEN)
        + position * np.uint64(w.POSITION)
        + (index + 1).astype(np.uint64) * np.uint64(w.INDEX)
    )
    running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(term)])
    # 4 each query sees the keys from the window's edge to itself
    query_owner, offset = token_owners(query_start_loc, num_reqs)
    query_len = query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
    at = seq_lens[query_owner] - query_len[query_owner] + offset
    first = np.zeros_like(at) if window is None else np.maximum(at - window + 1, 0)
    base = key_start_loc[query_owner]
    hidden[: len(at)] += (running[base + at + 1] - running[base + first]) * np.uint64(2 * group + 1)


class WitnessModel:
    def __init__(self, config: WitnessConfig) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        tokens = np.arange(1, config.vocab_size + 1, dtype=np.uint64)
        self._vocab = tokens * np.uint64(w.VOCAB)  # uint64[V]

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self.config.kv_cache_specs()

    def forward(
        self,
        input_ids: np.ndarray,
        positions: np.ndarray,
        kv_caches: dict[str, LayerCache],
        attn_metadata: dict[str, AttentionMetadata],
        intermediates: dict[str, np.ndarray] | None = None,
    ) -> np.ndarray:
        """Hidden values as uint64[tp, 1]."""
        hidden = np.zeros(len(input_ids), np.uint64)
        key, value = input_ids.astype(np.int64).reshape(-1, 1, 1), positions.reshape(-1, 1, 1)
        for g in range(len(self.config.groups)):
            layer = f"witness.{g}"
            cache, m = kv_caches[layer], attn_metadata[layer]
            # 1 every token's pair is written before any is read
            reshape_and_cache(key, value, m.slot_mapping, *cache)
            # 2 read them back through the block table
            witness_attention(*cache, m.block_table, m.query_start_loc, m.seq_lens, m.num_reqs, m.window, g, hidden)
        if intermediates is not None:
            intermediates["hidden"] = hidden.view(np.int64).copy()
        return hidden[:, None]

    def compute_logits(self, hidden_states: np.ndarray) -> np.ndarray:
        """float32[L, V], exact."""
        word = mix64(hidden_states + self._vocab[None, :]) >> np.uint64(w.LOGIT_SHIFT)
        return word.astype(np.float32) * np.float32(w.LOGIT_SCALE)
