"""Temperature: divide a row by its request's temperature. Twin: gpu_backend/sample/temperature.py."""

from __future__ import annotations

import numpy as np


def apply_temperature(
    expanded_idx_mapping: np.ndarray, temperature: np.ndarray, num_logits: int, logits: np.ndarray
) -> None:
    """Divide each row by its request's temperature; rows of temperature 0 (greedy) and 1 stay as they are.

    Shapes: expanded_idx_mapping: int64[>= L] row of each logits row; temperature: float32[N] by row;
    logits: float[L, V]. Writes: logits.
    """
    # 1 each row's temperature; a row that belongs to no request is left alone, and never used as an index
    rows = expanded_idx_mapping[:num_logits]
    t = np.where(rows >= 0, temperature[rows], 0).astype(logits.dtype)
    # 2 divide where it changes anything
    t = np.where(t == 0, 1, t)
    logits[:num_logits] /= t[:, None]
