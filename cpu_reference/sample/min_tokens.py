"""Minimum length: until it is reached, no token may end the request. Twin: gpu_backend/sample/min_tokens.py."""

from __future__ import annotations

import numpy as np

from cpu_reference.sample.logits_rows import LogitsRows
from runner_api import NewRequestData, SamplingParams
from runner_api.constants import MAX_STOP_TOKEN_IDS
from runner_api.sampling_params import INT32_MAX


def apply_min_tokens(
    expanded_idx_mapping: np.ndarray,
    positions: np.ndarray,
    min_len: np.ndarray,
    num_stop: np.ndarray,
    stop_token_ids: np.ndarray,
    restores_stops: np.ndarray,
    num_logits: int,
    logits: np.ndarray,
) -> None:
    """Set the request's stop tokens to -inf while its sequence is shorter than its minimum.

    A grammar may allow nothing but a stop token. Where a request says so (`restores_stops`) and masking leaves the row
    only -inf, the stop tokens that were finite come back.

    Shapes: expanded_idx_mapping: int64[>= L]; positions: int64[>= L] of each row's input token; by row: min_len:
    int32[N] prompt and outputs together, num_stop: int32[N] (0 = no minimum), stop_token_ids:
    int32[N, MAX_STOP_TOKEN_IDS], restores_stops: int32[N]; logits: float[L, V]. Writes: logits.
    """
    for i in range(num_logits):
        # 1 the request's row; nothing to do without one, or without stop tokens to mask
        row = expanded_idx_mapping[i]
        if row < 0 or num_stop[row] == 0:
            continue
        # 2 the row's input token is the last of positions + 1 tokens: the next one may end what is long enough
        if positions[i] + 1 >= min_len[row]:
            continue
        # 3 mask
        stops = stop_token_ids[row, : num_stop[row]]
        before = logits[i, stops]
        logits[i, stops] = -np.inf
        # 4 nothing is left: take back
        if restores_stops[row] and logits[i].max() == -np.inf:
            logits[i, stops] = np.where(np.isfinite(before), before, -np.inf)


class MinTokens:
    """The stop tokens of requests with a minimum, packed to the left: their own and the model's."""

    def __init__(self, max_num_reqs: int) -> None:
        self.min_len = np.zeros(max_num_reqs, np.int32)
        self.num_stop = np.zeros(max_num_reqs, np.int32)
        self.stop_token_ids = np.zeros((max_num_reqs, MAX_STOP_TOKEN_IDS), np.int32)
        self.restores_stops = np.zeros(max_num_reqs, np.int32)

    def row_tables(self) -> dict[str, np.ndarray]:
        return {
            "min_len": self.min_len, "num_stop": self.num_stop, "stop_token_ids": self.stop_token_ids,
            "restores_stops": self.restores_stops,
        }  # fmt: skip

    def row_widths(self, row: int) -> dict[str, int]:
        return {"stop_token_ids": int(self.num_stop[row])}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        stops = new.stop_token_ids if params.min_tokens > 0 else ()
        self.min_len[row] = min(new.prompt_len + params.min_tokens, INT32_MAX)
        self.num_stop[row] = len(stops)
        self.stop_token_ids[row, : len(stops)] = stops
        self.restores_stops[row] = params.structured_outputs is not None

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool(self.num_stop[batch_rows].any())

    def apply(self, rows: LogitsRows, logits: np.ndarray) -> None:
        apply_min_tokens(
            rows.expanded_idx_mapping, rows.positions, self.min_len, self.num_stop, self.stop_token_ids,
            self.restores_stops, rows.num_logits, logits,
        )  # fmt: skip
