"""top-k and top-p, exact: the smallest set, by descending probability, ties to the lower token id.

Twin: gpu_backend/sample/top_k_top_p.py.
"""

from __future__ import annotations

import numpy as np

from cpu_reference.sample.logits_rows import LogitsRows
from runner_api import NewRequestData, SamplingParams


def apply_top_k_top_p(
    expanded_idx_mapping: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, num_logits: int, logits: np.ndarray
) -> None:
    """Keep the k most likely tokens, then of these the fewest whose probability reaches p.

    A token is kept by top-p if the probability of those before it is below p; the most likely one always is. Tokens
    that are already -inf have no probability and are never brought back; one at +inf has all of it, several share it.
    k = V and p = 1 keep everything, and a row that holds a NaN or no token at all stays as it is.

    Shapes: expanded_idx_mapping: int64[>= L]; top_k: int32[N], top_p: float32[N] by row; logits: float[L, V].
    Writes: logits.
    """
    vocab_size = logits.shape[1]
    best = logits[:num_logits].max(axis=1)  # NaN if the row holds one
    for i in range(num_logits):
        # 1 the request's row; nothing to do without one, without a limit, or where there is nothing to choose from
        row = expanded_idx_mapping[i]
        if row < 0 or (top_k[row] >= vocab_size and top_p[row] >= 1.0) or not best[i] > -np.inf:
            continue
        # 2 most likely first; a stable sort leaves ties in order of token id
        order = np.argsort(-logits[i], kind="stable")
        # 3 top-k
        k, p = int(top_k[row]), float(top_p[row])
        kept = order[:k]
        # 4 top-p over what is left, renormalised; probability of the tokens before each one
        if p < 1.0:
            probability = _softmax(logits[i, kept].astype(np.float64))
            before = np.concatenate([[0.0], np.cumsum(probability[:-1])])
            before[0] = -1.0  # also where float32 rounds p to 0
            kept = kept[before < p]
        # 5 drop the rest
        dropped = np.ones(vocab_size, bool)
        dropped[kept] = False
        logits[i, dropped] = -np.inf


def _softmax(x: np.ndarray) -> np.ndarray:
    """Of logits in descending order. One at +inf has all the probability, several share it."""
    weight = np.exp(x - x[0]) if x[0] < np.inf else (x == np.inf).astype(np.float64)
    return weight / weight.sum()


class TopKTopP:
    """Both limits; k = V and p = 1 are none."""

    def __init__(self, max_num_reqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.top_k = np.full(max_num_reqs, vocab_size, np.int32)
        self.top_p = np.ones(max_num_reqs, np.float32)

    def row_tables(self) -> dict[str, np.ndarray]:
        return {"top_k": self.top_k, "top_p": self.top_p}

    def row_widths(self, row: int) -> dict[str, int]:
        return {}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        self.top_k[row] = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self.top_p[row] = params.top_p

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool((self.top_k[batch_rows] < self.vocab_size).any() or (self.top_p[batch_rows] < 1).any())

    def apply(self, rows: LogitsRows, logits: np.ndarray) -> None:
        apply_top_k_top_p(rows.expanded_idx_mapping, self.top_k, self.top_p, rows.num_logits, logits)
