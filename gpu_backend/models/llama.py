"""Llama, Qwen2 and Qwen3: one decoder, whose differences are biases, norms of q and k, and tied embeddings.

Dense layers are torch's; the KV cache is written and read by this package's kernels. Twin:
cpu_reference/models/llama.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from gpu_backend.attention import paged_attention
from gpu_backend.attn_metadata import AttentionMetadata
from gpu_backend.kv_cache import LayerCache, reshape_and_cache
from gpu_backend.ops import apply_rotary, linear, rms_norm, rotary_tables, silu_and_mul
from runner_api.kv_cache import KVCacheSpec
from runner_api.protocol import Collectives, SingleRank, check_shard

DEFAULT_BLOCK_SIZE = 16


def to_torch(array: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A NumPy array, bfloat16 of `ml_dtypes` included, as a tensor of its own memory."""
    if array.dtype.name == "bfloat16":  # unknown to torch: the same bits, read as integers, change hands
        return torch.tensor(array.view(np.int16)).view(torch.bfloat16).to(device, dtype)
    return torch.tensor(array).to(device, dtype)


class LlamaModel:
    """Weights in `dtype` (float32, float16 or bfloat16); layer i attends under the name `model.layers.i.self_attn`.

    rank, size: whose share of the weights is loaded; raises CapabilityError for any but the whole.
    """

    def __init__(
        self, checkpoint: Any, dtype: torch.dtype, device: torch.device, collectives: Collectives | None = None,
        *, rank: int = 0, size: int = 1,
    ) -> None:  # fmt: skip
        from runner_api.checkpoint.rope import inverse_frequencies

        check_shard(rank, size)
        self.config = config = checkpoint.config
        self.vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        self.dtype = dtype
        self.collectives = collectives or SingleRank()
        self.scale = config.head_dim**-0.5
        inv_freq, mscale = inverse_frequencies(config.rope, config.head_dim, config.max_position_embeddings)
        # Every position's row once; float32 also for half-precision weights, whose spacing near 1 is too coarse.
        tables = rotary_tables(np.arange(config.max_position_embeddings), inv_freq, mscale, np.float32)
        self.cos, self.sin = (torch.from_numpy(table).to(device) for table in tables)  # float32[P, 1, head_dim // 2]
        # One tensor at a time: the file's copy is dropped before the next is read.
        self.weights = {name: to_torch(checkpoint.tensor(name), dtype, device) for name in checkpoint.names()}
        tied = "lm_head.weight" not in self.weights
        self.lm_head = self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        if dtype == torch.float32:
            torch.set_float32_matmul_precision("highest")  # no TF32: its 10 bits would not be float32 results

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        c = self.config
        spec = KVCacheSpec(DEFAULT_BLOCK_SIZE, c.num_kv_heads, c.head_dim, str(self.dtype).removeprefix("torch."))
        return {f"model.layers.{i}.self_attn": spec for i in range(c.num_layers)}

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: dict[str, LayerCache],
        attn_metadata: dict[str, AttentionMetadata],
        intermediates: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Hidden state of every token after the last norm: [tp, hidden_size]."""
        eps = self.config.rms_norm_eps
        rope = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        x = F.embedding(input_ids, self.weights["model.embed_tokens.weight"])
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
                intermediates[name] = x.clone()
        return rms_norm(x, self.weights["model.norm.weight"], eps)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.collectives.all_gather(linear(hidden_states, self.lm_head)).float()

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _attention(
        self,
        name: str,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        kv_cache: LayerCache,
        m: AttentionMetadata,
    ) -> torch.Tensor:
        c = self.config
        # 1 queries, keys, values  [tp, heads, head_dim]
        q = self._linear(f"{name}.q_proj", x).view(-1, c.num_heads, c.head_dim)
        k = self._linear(f"{name}.k_proj", x).view(-1, c.num_kv_heads, c.head_dim)
        v = self._linear(f"{name}.v_proj", x).view(-1, c.num_kv_heads, c.head_dim)
        # 2 Qwen3 norms each head before rotating it
        if c.qk_norm:
            q = rms_norm(q, self.weights[f"{name}.q_norm.weight"], c.rms_norm_eps)
            k = rms_norm(k, self.weights[f"{name}.k_norm.weight"], c.rms_norm_eps)
        # 3 rotate by position
        q, k = apply_rotary(q, *rope), apply_rotary(k, *rope)
        # 4 every token's k and v are stored before any is read
        reshape_and_cache(k, v, m.slot_mapping, *kv_cache)
        # 5 attend
        out = torch.empty_like(q)
        paged_attention(
            q, *kv_cache, m.block_table, m.query_start_loc, m.seq_lens, m.num_reqs, self.scale, m.window,
            m.max_query_len, out,
        )  # fmt: skip
        return self.collectives.all_reduce(self._linear(f"{name}.o_proj", out.reshape(len(x), -1)))

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        h = silu_and_mul(self._linear(f"{name}.gate_proj", x), self._linear(f"{name}.up_proj", x))
        return self.collectives.all_reduce(self._linear(f"{name}.down_proj", h))
