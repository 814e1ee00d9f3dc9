"""min-p: drop tokens far less likely than the best one."""

from __future__ import annotations

import numpy as np


def apply_min_p(expanded_idx_mapping: np.ndarray, min_p: np.ndarray, num_logits: int, logits: np.ndarray) -> None:
    """Set to -inf every token whose probability is below min_p times the row's largest.

    Compared as logits: x < max + log(min_p); equality survives. min_p = 0 keeps everything.

    Shapes: expanded_idx_mapping: int64[>= L]; min_p: float32[N] by row; logits: float[L, V]. Writes: logits.
    """
    rows = logits[:num_logits]
    # 1 each row's threshold
    p = min_p[expanded_idx_mapping[:num_logits]].astype(logits.dtype)
    with np.errstate(divide="ignore"):
        threshold = rows.max(axis=1) + np.log(p)
    # 2 drop below it
    rows[rows < threshold[:, None]] = -np.inf
