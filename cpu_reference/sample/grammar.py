"""The grammar's mask: what the form of an answer does not allow can not be drawn. Twin: gpu_backend/sample/grammar.py.

It is applied first, and to the logits as the model gives them, so that log probabilities know of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cpu_reference.sample.bitmask import allowed_by
from runner_api import NO_ROW, GrammarOutput


def apply_grammar_bitmask(mask_rows: np.ndarray, bitmask: np.ndarray, num_logits: int, logits: np.ndarray) -> None:
    """Set to -inf every token that the mask of its logits row does not name; rows without a mask keep all.

    Shapes: mask_rows: int32[>= L] row of the bitmask, or -1; bitmask: int32[masks, ceil(V / 32)]; logits: float[L, V].
    Writes: logits.
    """
    vocab_size = logits.shape[1]
    for i in range(num_logits):
        # 1 the logits row's mask; nothing to do without one
        mask_row = mask_rows[i]
        if mask_row < 0:
            continue
        # 2 drop what its bits do not name
        logits[i, ~allowed_by(bitmask[mask_row], vocab_size)] = -np.inf


def grammar_mask_rows(
    req_ids: Sequence[str], cu_num_logits: np.ndarray, grammar: GrammarOutput, num_speculative_tokens: int
) -> np.ndarray:
    """Which mask each logits row of the batch has, NO_ROW where none: int32[L].

    Masks come in an order of their own and belong to requests by id. Each request owns 1 + K of them, as many as it
    could have logits rows; those that it does not have this step stay unused.

    Shapes: req_ids: the batch's, in order; cu_num_logits: int32[>= R + 1], on the host.
    """
    stride = 1 + num_speculative_tokens
    first_mask = {req_id: g * stride for g, req_id in enumerate(grammar.structured_output_request_ids)}
    mask_rows = np.full(cu_num_logits[len(req_ids)], NO_ROW, np.int32)
    for i, req_id in enumerate(req_ids):
        if req_id in first_mask:
            start, end = cu_num_logits[i], cu_num_logits[i + 1]
            mask_rows[start:end] = first_mask[req_id] + np.arange(end - start)
    return mask_rows
