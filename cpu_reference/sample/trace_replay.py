"""Trace replay: a request takes the tokens of its own list instead of those drawn.

It comes behind the draw and before log probabilities, which so tell how likely the listed tokens were.
Twin: gpu_backend/sample/trace_replay.py.
"""

from __future__ import annotations

import numpy as np

from runner_api import NewRequestData, SamplingParams


def apply_trace_replay(
    idx_mapping: np.ndarray,
    seq_lens: np.ndarray,
    prompt_len: np.ndarray,
    trace_len: np.ndarray,
    trace_token_ids: np.ndarray,
    num_reqs: int,
    sampled_token_ids: np.ndarray,
) -> None:
    """Put the listed token in the place of the drawn one, as long as the list lasts.

    Shapes: idx_mapping: int64[>= R]; seq_lens: int32[>= R]; by row: prompt_len, trace_len: int32[N], trace_token_ids:
    int32[N, M]; sampled_token_ids: int64[>= R, 1+K]. Writes: column 0 of sampled_token_ids.
    """
    for i in range(num_reqs):
        # 1 the request's row
        row = idx_mapping[i]
        if row < 0:
            continue
        # 2 how many outputs come before the one that is drawn now
        index = seq_lens[i] - prompt_len[row]
        # 3 replace
        if 0 <= index < trace_len[row]:
            sampled_token_ids[i, 0] = trace_token_ids[row, index]


class TraceReplay:
    """The lists, as far as a sequence can reach."""

    def __init__(self, max_num_reqs: int, max_model_len: int) -> None:
        self.trace_len = np.zeros(max_num_reqs, np.int32)
        self.trace_token_ids = np.zeros((max_num_reqs, max_model_len), np.int32)

    def row_tables(self) -> dict[str, np.ndarray]:
        return {"trace_len": self.trace_len, "trace_token_ids": self.trace_token_ids}

    def row_widths(self, row: int) -> dict[str, int]:
        return {"trace_token_ids": int(self.trace_len[row])}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        tokens = (params.trace_decode_token_ids or ())[: self.trace_token_ids.shape[1]]
        self.trace_len[row] = len(tokens)
        self.trace_token_ids[row, : len(tokens)] = tokens

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool(self.trace_len[batch_rows].any())

    def apply(
        self,
        idx_mapping: np.ndarray,
        seq_lens: np.ndarray,
        prompt_len: np.ndarray,
        num_reqs: int,
        sampled_token_ids: np.ndarray,
    ) -> None:
        """Shapes: see `apply_trace_replay`."""
        apply_trace_replay(
            idx_mapping, seq_lens, prompt_len, self.trace_len, self.trace_token_ids, num_reqs, sampled_token_ids
        )
