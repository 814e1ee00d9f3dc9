"""min-p: drop tokens far less likely than the best one. Twin: gpu_backend/sample/min_p.py."""

from __future__ import annotations

import numpy as np

from cpu_reference.sample.logits_rows import LogitsRows
from runner_api import NewRequestData, SamplingParams


def apply_min_p(expanded_idx_mapping: np.ndarray, min_p: np.ndarray, num_logits: int, logits: np.ndarray) -> None:
    """Set to -inf every token whose probability is below min_p times the row's largest.

    Compared as logits: x < max + log(min_p); equality survives. min_p = 0 keeps everything, and a row that holds a NaN
    or no token at all stays as it is.

    Shapes: expanded_idx_mapping: int64[>= L]; min_p: float32[N] by row; logits: float[L, V]. Writes: logits.
    """
    x = logits[:num_logits]
    # 1 each row's share; 0 for a row that belongs to no request
    rows = expanded_idx_mapping[:num_logits]
    p = np.where(rows >= 0, min_p[rows], 0).astype(logits.dtype)
    # 2 its threshold: -inf or NaN, which nothing is below, where there is no share, no token or a NaN
    with np.errstate(divide="ignore", invalid="ignore"):
        threshold = x.max(axis=1) + np.log(p)
    # 3 drop below it
    x[x < threshold[:, None]] = -np.inf


class MinP:
    """The shares; 0 = keep all."""

    def __init__(self, max_num_reqs: int) -> None:
        self.min_p = np.zeros(max_num_reqs, np.float32)

    def row_tables(self) -> dict[str, np.ndarray]:
        return {"min_p": self.min_p}

    def row_widths(self, row: int) -> dict[str, int]:
        return {}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        self.min_p[row] = params.min_p

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool(self.min_p[batch_rows].any())

    def apply(self, rows: LogitsRows, logits: np.ndarray) -> None:
        apply_min_p(rows.expanded_idx_mapping, self.min_p, rows.num_logits, logits)
