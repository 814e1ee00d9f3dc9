"""A dense low-precision run of a Llama-family model: no cache, no blocks, no batch; every operation rounded.

It says how far logits move when the same weights are computed in bfloat16 or float16 by somebody who has nothing in
common with the runner but the format. A runner's own error is bounded by a multiple of it, not by a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from runner_api import SchedulerOutput, StepRecord
from runner_api.checkpoint import Checkpoint
from runner_api.checkpoint.rope import inverse_frequencies

Round = Callable[[np.ndarray], np.ndarray]


def rounding_to(dtype: str) -> Round:
    """A function that rounds float32 arrays to `dtype` and back (nearest, ties to even)."""
    import ml_dtypes

    kind: Any = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}[dtype]
    return lambda x: x.astype(kind).astype(np.float32)


class DenseLlama:
    """Logits of every position of one token sequence; products are summed in float32, results rounded."""

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        self.config = checkpoint.config
        self.round = rounding_to(dtype)
        self.weights = {
            name: self.round(np.asarray(checkpoint.tensor(name), np.float32)) for name in checkpoint.names()
        }
        c = self.config
        self.inv_freq, self.mscale = inverse_frequencies(c.rope, c.head_dim, c.max_position_embeddings)

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """float32[len(token_ids), vocab_size]."""
        w, c = self.weights, self.config
        angle = np.arange(len(token_ids))[:, None, None] * self.inv_freq
        rope = (np.cos(angle) * self.mscale).astype(np.float32), (np.sin(angle) * self.mscale).astype(np.float32)
        x = w["model.embed_tokens.weight"][token_ids]
        for i in range(c.num_layers):
            name = f"model.layers.{i}"
            x = self.round(x + self._attention(f"{name}.self_attn", self._norm(x, f"{name}.input_layernorm"), rope))
            h = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = self._linear(h, f"{name}.mlp.gate_proj"), self._linear(h, f"{name}.mlp.up_proj")
            h = self.round(self.round(gate / (1 + np.exp(-gate))) * up)
            x = self.round(x + self._linear(h, f"{name}.mlp.down_proj"))
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return self.round(self._norm(x, "model.norm") @ head.T)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.config.rms_norm_eps))
        return self.round(self.round(x * scale) * self.weights[f"{name}.weight"])

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return self.round(y if bias is None else y + bias)

    def _attention(self, name: str, x: np.ndarray, rope: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        c, n = self.config, len(x)
        q = self._linear(x, f"{name}.q_proj").reshape(n, c.num_heads, c.head_dim)
        k = self._linear(x, f"{name}.k_proj").reshape(n, c.num_kv_heads, c.head_dim)
        v = self._linear(x, f"{name}.v_proj").reshape(n, c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        q, k = self._rotate(q, *rope), self._rotate(k, *rope)
        repeat = c.num_heads // c.num_kv_heads
        k, v = np.repeat(k, repeat, axis=1), np.repeat(v, repeat, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * np.float32(c.head_dim**-0.5)
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = self.round(weights / weights.sum(-1, keepdims=True))
        out = self.round(np.einsum("hqk,khd->qhd", weights, v))
        return self._linear(out.reshape(n, -1), f"{name}.o_proj")

    def _rotate(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        a, b = np.split(x, 2, axis=-1)
        return self.round(np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1))


class DenseLogits:
    """The dense run beside a lockstep run (`TokenPolicy.dense`): it is told every plan, and asked once a step."""

    def __init__(self, model: DenseLlama) -> None:
        self.model = model
        self._tokens: dict[str, list[int]] = {}

    def observe(self, plan: SchedulerOutput) -> None:
        """Note the known tokens of new requests; a plan that schedules nothing may bring some too."""
        for new in plan.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prefill_token_ids)

    def logits(self, record: StepRecord) -> np.ndarray:
        """float32[L, V] of the step's logits rows; notes what was drawn after them."""
        rows = []
        for i, req_id in enumerate(record.req_ids):
            known = self._tokens[req_id]
            rows.append(self.model.logits(known[: int(record.seq_lens[i])])[-1])
            known.extend(record.tokens()[req_id])
        return np.stack(rows)
