"""The layers' arithmetic, one function each. Tokens first: x is [T, ...]. Twin: cpu_reference/ops.py.

Half-precision inputs are normalised and rotated in float32 and rounded once, at the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, lora: Any = None
) -> torch.Tensor:
    """x W^T + b. Shapes: x: [T, in]; weight: [out, in]; bias: [out]. Adapters (`lora`) are not built yet."""
    assert lora is None, "a plan with an adapter is refused by capability"
    return F.linear(x, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * w over the last axis."""
    wide = x.float()
    return (wide / torch.sqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, with silu(z) = z / (1 + e^-z)."""
    return F.silu(gate) * up


def rotary_tables(
    positions: np.ndarray, inv_freq: np.ndarray, mscale: float, dtype: Any
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [T, 1, head_dim // 2] of position * frequency, in float64 before they are rounded to `dtype`.

    NumPy on the host, as in the twin, so that both runners turn by the same bits; a model keeps the tables of all its
    positions on the device and picks rows.
    """
    angle = positions.astype(np.float64)[:, None, None] * inv_freq
    return (np.cos(angle) * mscale).astype(dtype), (np.sin(angle) * mscale).astype(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (x[i], x[i + d/2]) of each head by the token's angle. x: [T, heads, d]; cos, sin: float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
