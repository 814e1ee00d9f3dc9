"""Logit bias: a request adds a number of its own to some logits. Twin: gpu_backend/sample/logit_bias.py."""

from __future__ import annotations

import numpy as np

from cpu_reference.sample.logits_rows import LogitsRows
from runner_api import NewRequestData, SamplingParams
from runner_api.constants import MAX_LOGIT_BIAS


def apply_logit_bias(
    expanded_idx_mapping: np.ndarray,
    num_bias: np.ndarray,
    bias_token_ids: np.ndarray,
    bias: np.ndarray,
    num_logits: int,
    logits: np.ndarray,
) -> None:
    """Add to the logits of the tokens that a request names what it gives for each.

    A token at -inf stays there. No token is named twice.

    Shapes: expanded_idx_mapping: int64[>= L]; num_bias: int32[N] by row, how many tokens are named; bias_token_ids:
    int32[N, MAX_LOGIT_BIAS], bias: float32[N, MAX_LOGIT_BIAS] by row; logits: float[L, V]. Writes: logits.
    """
    for i in range(num_logits):
        # 1 the request's row; nothing to do without one, or without a bias
        row = expanded_idx_mapping[i]
        if row < 0 or num_bias[row] == 0:
            continue
        # 2 add
        n = num_bias[row]
        logits[i, bias_token_ids[row, :n]] += bias[row, :n]


class LogitBias:
    """The pairs, packed to the left."""

    def __init__(self, max_num_reqs: int) -> None:
        self.num_bias = np.zeros(max_num_reqs, np.int32)
        self.bias_token_ids = np.zeros((max_num_reqs, MAX_LOGIT_BIAS), np.int32)
        self.bias = np.zeros((max_num_reqs, MAX_LOGIT_BIAS), np.float32)

    def row_tables(self) -> dict[str, np.ndarray]:
        return {"num_bias": self.num_bias, "bias_token_ids": self.bias_token_ids, "bias": self.bias}

    def row_widths(self, row: int) -> dict[str, int]:
        n = int(self.num_bias[row])
        return {"bias_token_ids": n, "bias": n}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        pairs = params.logit_bias or {}
        n = len(pairs)
        self.num_bias[row] = n
        self.bias_token_ids[row, :n] = list(pairs)
        self.bias[row, :n] = list(pairs.values())

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool(self.num_bias[batch_rows].any())

    def apply(self, rows: LogitsRows, logits: np.ndarray) -> None:
        apply_logit_bias(
            rows.expanded_idx_mapping, self.num_bias, self.bias_token_ids, self.bias, rows.num_logits, logits
        )
