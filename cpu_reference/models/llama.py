"""Llama, Qwen2 and Qwen3: one decoder, whose differences are biases, norms of q and k, and tied embeddings.

Twin: gpu_backend/models/llama.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cpu_reference.attention import paged_attention
from cpu_reference.attn_metadata import AttentionMetadata
from cpu_reference.kv_cache import LayerCache, reshape_and_cache
from cpu_reference.ops import apply_rotary, linear, rms_norm, rotary_tables, silu_and_mul
from runner_api.kv_cache import KVCacheSpec
from runner_api.protocol import Collectives, SingleRank, check_shard

DEFAULT_BLOCK_SIZE = 16


class LlamaModel:
    """Weights in `dtype` (float32 or float64); layer i attends under the name `model.layers.i.self_attn`.

    rank, size: whose share of the weights is loaded; raises CapabilityError for any but the whole.
    """

    def __init__(
        self, checkpoint: Any, dtype: np.dtype, collectives: Collectives | None = None, *, rank: int = 0, size: int = 1
    ) -> None:
        from runner_api.checkpoint.rope import inverse_frequencies

        check_shard(rank, size)
        self.config = config = checkpoint.config
        self.vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        self.dtype = dtype
        self.collectives = collectives or SingleRank()
        self.scale = config.head_dim**-0.5
        self.inv_freq, self.mscale = inverse_frequencies(config.rope, config.head_dim, config.max_position_embeddings)
        self.weights = {name: checkpoint.tensor(name).astype(dtype) for name in checkpoint.names()}
        tied = "lm_head.weight" not in self.weights
        self.lm_head = self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        c = self.config
        spec = KVCacheSpec(DEFAULT_BLOCK_SIZE, c.num_kv_heads, c.head_dim, self.dtype.name)
        return {f"model.layers.{i}.self_attn": spec for i in range(c.num_layers)}

    def forward(
        self,
        input_ids: np.ndarray,
        positions: np.ndarray,
        kv_caches: dict[str, LayerCache],
        attn_metadata: dict[str, AttentionMetadata],
        intermediates: dict[str, np.ndarray] | None = None,
    ) -> np.ndarray:
        """Hidden state of every token after the last norm: [tp, hidden_size]."""
        eps = self.config.rms_norm_eps
        rope = rotary_tables(positions, self.inv_freq, self.mscale, self.dtype)
        x = self.weights["model.embed_tokens.weight"][input_ids]
        for i in range(self.config.num_layers):
            name = f"model.layers.{i}"
            # 1 attention, added to the stream
            h = rms_norm(x, self.weights[f"{name}.input_layernorm.weight"], eps)
            layer = f"{name}.self_attn"
            x = x + self._attention(layer, h, rope, kv_caches[layer], attn_metadata[layer])
            # 2 the gated feed-forward part, added too
            h = rms_norm(x, self.weights[f"{name}.post_attention_layernorm.weight"], eps)
            x = x + self._mlp(f"{name}.mlp", h)
            if intermediates is not None:
                intermediates[name] = x.copy()
        return rms_norm(x, self.weights["model.norm.weight"], eps)

    def compute_logits(self, hidden_states: np.ndarray) -> np.ndarray:
        return self.collectives.all_gather(linear(hidden_states, self.lm_head))

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _attention(
        self,
        name: str,
        x: np.ndarray,
        rope: tuple[np.ndarray, np.ndarray],
        kv_cache: LayerCache,
        m: AttentionMetadata,
    ) -> np.ndarray:
        c = self.config
        # 1 queries, keys, values  [tp, heads, head_dim]
        q = self._linear(f"{name}.q_proj", x).reshape(-1, c.num_heads, c.head_dim)
        k = self._linear(f"{name}.k_proj", x).reshape(-1, c.num_kv_heads, c.head_dim)
        v = self._linear(f"{name}.v_proj", x).reshape(-1, c.num_kv_heads, c.head_dim)
        # 2 Qwen3 norms each head before rotating it
        if c.qk_norm:
            q = rms_norm(q, self.weights[f"{name}.q_norm.weight"], c.rms_norm_eps)
            k = rms_norm(k, self.weights[f"{name}.k_norm.weight"], c.rms_norm_eps)
        # 3 rotate by position
        q, k = apply_rotary(q, *rope), apply_rotary(k, *rope)
        # 4 every token's k and v are stored before any is read
        reshape_and_cache(k, v, m.slot_mapping, *kv_cache)
        # 5 attend
        out = np.empty_like(q)
        paged_attention(
            q, *kv_cache, m.block_table, m.query_start_loc, m.seq_lens, m.num_reqs, self.scale, m.window,
            m.max_query_len, out,
        )  # fmt: skip
        return self.collectives.all_reduce(self._linear(f"{name}.o_proj", out.reshape(len(x), -1)))

    def _mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        h = silu_and_mul(self._linear(f"{name}.gate_proj", x), self._linear(f"{name}.up_proj", x))
        return self.collectives.all_reduce(self._linear(f"{name}.down_proj", h))
