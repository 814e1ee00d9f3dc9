"""Temperature: divide a row by its request's temperature. Twin: gpu_backend/sample/temperature.py."""

from __future__ import annotations

import numpy as np

from cpu_reference.sample.logits_rows import LogitsRows
from runner_api import NewRequestData, SamplingParams


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


class Temperature:
    """The temperatures; 0 = greedy, which also tells the draw to add no noise."""

    def __init__(self, max_num_reqs: int) -> None:
        self.temperature = np.zeros(max_num_reqs, np.float32)

    def row_tables(self) -> dict[str, np.ndarray]:
        return {"temperature": self.temperature}

    def row_widths(self, row: int) -> dict[str, int]:
        return {}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        self.temperature[row] = params.temperature

    def used_by(self, batch_rows: np.ndarray) -> bool:
        t = self.temperature[batch_rows]
        return bool(((t != 0) & (t != 1)).any())

    def apply(self, rows: LogitsRows, logits: np.ndarray) -> None:
        apply_temperature(rows.expanded_idx_mapping, self.temperature, rows.num_logits, logits)
