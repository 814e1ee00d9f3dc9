"""Allowed tokens: whatever a request does not list can not be drawn. Twin: gpu_backend/sample/allowed_token_ids.py."""

from __future__ import annotations

import numpy as np

from cpu_reference.sample.bitmask import NUM_BITS, allowed_by, pack_bits
from cpu_reference.sample.logits_rows import LogitsRows
from runner_api import NewRequestData, SamplingParams


def apply_allowed_token_ids(
    expanded_idx_mapping: np.ndarray,
    restricted: np.ndarray,
    allowed_bitmask: np.ndarray,
    num_logits: int,
    logits: np.ndarray,
) -> None:
    """Set to -inf every token that is not on its request's list; requests without a list keep all.

    Shapes: expanded_idx_mapping: int64[>= L]; restricted: int32[N] by row, 1 = the row has a list;
    allowed_bitmask: int32[N, ceil(V / 32)] by row; logits: float[L, V]. Writes: logits.
    """
    vocab_size = logits.shape[1]
    for i in range(num_logits):
        # 1 the request's row; nothing to do without one, or without a list
        row = expanded_idx_mapping[i]
        if row < 0 or not restricted[row]:
            continue
        # 2 drop what its bits do not name
        logits[i, ~allowed_by(allowed_bitmask[row], vocab_size)] = -np.inf


class AllowedTokenIds:
    """The lists, as bits by row: a list of any length takes the same room."""

    def __init__(self, max_num_reqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.restricted = np.zeros(max_num_reqs, np.int32)
        self.allowed_bitmask = np.zeros((max_num_reqs, -(-vocab_size // NUM_BITS)), np.int32)

    def row_tables(self) -> dict[str, np.ndarray]:
        return {"restricted": self.restricted, "allowed_bitmask": self.allowed_bitmask}

    def row_widths(self, row: int) -> dict[str, int]:
        return {"allowed_bitmask": self.allowed_bitmask.shape[1] if self.restricted[row] else 0}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        listed = params.allowed_token_ids
        self.restricted[row] = listed is not None
        if listed is not None:
            self.allowed_bitmask[row] = pack_bits(listed, self.vocab_size)

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool(self.restricted[batch_rows].any())

    def apply(self, rows: LogitsRows, logits: np.ndarray) -> None:
        apply_allowed_token_ids(
            rows.expanded_idx_mapping, self.restricted, self.allowed_bitmask, rows.num_logits, logits
        )
