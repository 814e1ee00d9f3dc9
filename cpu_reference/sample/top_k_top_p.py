"""top-k and top-p, exact: the smallest set, by descending probability, ties to the lower token id."""

from __future__ import annotations

import numpy as np


def apply_top_k_top_p(
    expanded_idx_mapping: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, num_logits: int, logits: np.ndarray
) -> None:
    """Keep the k most likely tokens, then of these the fewest whose probability reaches p.

    A token is kept by top-p if the probability of those before it is below p, so at least one always is. Tokens that
    are already -inf have no probability and are never brought back. k = V and p = 1 keep everything.

    Shapes: expanded_idx_mapping: int64[>= L]; top_k: int32[N], top_p: float32[N] by row; logits: float[L, V].
    Writes: logits.
    """
    vocab_size = logits.shape[1]
    for j in range(num_logits):
        row = expanded_idx_mapping[j]
        k, p = int(top_k[row]), float(top_p[row])
        if k >= vocab_size and p >= 1.0:
            continue
        # 1 most likely first; a stable sort leaves ties in order of token id
        order = np.argsort(-logits[j], kind="stable")
        # 2 top-k
        kept = order[:k]
        # 3 top-p over what is left, renormalised; probability of the tokens before each one
        if p < 1.0:
            x = logits[j, kept].astype(np.float64)
            if x[0] == -np.inf:  # nothing is left to choose from
                continue
            probability = np.exp(x - x[0])
            probability /= probability.sum()
            before = np.concatenate([[0.0], np.cumsum(probability[:-1])])
            kept = kept[before < p]
        # 4 drop the rest
        dropped = np.ones(vocab_size, bool)
        dropped[kept] = False
        logits[j, dropped] = -np.inf
