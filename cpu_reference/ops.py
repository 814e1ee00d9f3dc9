"""The layers' arithmetic, one function each. Tokens first: x is [T, ...]. Twin: gpu_backend/ops.py."""

from __future__ import annotations

from typing import Any

import numpy as np


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, *, lora: Any = None) -> np.ndarray:
    """x W^T + b. Shapes: x: [T, in]; weight: [out, in]; bias: [out]. Adapters (`lora`) are not built yet."""
    assert lora is None, "a plan with an adapter is refused by capability"
    y = x @ weight.T
    return y if bias is None else y + bias


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * w over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight


def silu_and_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) * up, with silu(z) = z / (1 + e^-z)."""
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def rotary_tables(
    positions: np.ndarray, inv_freq: np.ndarray, mscale: float, dtype: Any
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [T, 1, head_dim // 2] of position * frequency, in float64 before they are rounded to `dtype`."""
    angle = positions.astype(np.float64)[:, None, None] * inv_freq
    return (np.cos(angle) * mscale).astype(dtype), (np.sin(angle) * mscale).astype(dtype)


def apply_rotary(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate pairs (x[i], x[i + d/2]) of each head by the token's angle. x: [T, heads, d]."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
