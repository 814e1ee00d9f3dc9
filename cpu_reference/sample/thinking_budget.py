"""Thinking budget: a model that has thought aloud for long enough is made to stop.

The model marks where its thinking starts and ends (`ReasoningConfig`). Twin: gpu_backend/sample/thinking_budget.py.
"""

from __future__ import annotations

import numpy as np

from cpu_reference.request_state import RequestState
from cpu_reference.sample.history import tokens_seen
from cpu_reference.sample.logits_rows import LogitsRows
from runner_api import NewRequestData, ReasoningConfig, SamplingParams
from runner_api.constants import FORCED_LOGIT


def apply_thinking_budget(
    expanded_idx_mapping: np.ndarray,
    positions: np.ndarray,
    input_ids: np.ndarray,
    total_len: np.ndarray,
    all_token_ids: np.ndarray,
    thinking_budget: np.ndarray,
    start_token_ids: np.ndarray,
    end_token_ids: np.ndarray,
    natural_end_token_ids: np.ndarray,
    num_logits: int,
    logits: np.ndarray,
) -> None:
    """Where a request has thought for as many tokens as it may, make the next token of the end text win.

    It thinks if its latest start marker, in prompt or output, has no natural end marker behind it. The end text goes
    on where the request's latest tokens have begun it.

    Shapes: expanded_idx_mapping: int64[>= L]; positions: int64[>= L], input_ids: int32[>= L] of each row's input token;
    by row: total_len: int32[N], all_token_ids: int32[N, M], thinking_budget: int32[N] (-1 = none); start_token_ids:
    int32[A]; end_token_ids: int32[B]; natural_end_token_ids: int32[C]; logits: float[L, V]. Writes: logits.
    """
    for i in range(num_logits):
        # 1 the request's row; nothing to do without one, or without a budget
        row = expanded_idx_mapping[i]
        if row < 0 or thinking_budget[row] < 0:
            continue
        # 2 the latest markers in what it has seen, drafts before this row included
        seen = tokens_seen(i, row, positions, input_ids, total_len, all_token_ids)
        start = last_occurrence(seen, start_token_ids)
        if start < 0 or start <= last_occurrence(seen, natural_end_token_ids):
            continue
        # 3 tokens thought so far
        if len(seen) - (start + len(start_token_ids)) < thinking_budget[row]:
            continue
        # 4 how much of the end text stands at the end already; never all of it
        said = 0
        for n in range(1, len(end_token_ids)):
            if n <= len(seen) and (seen[len(seen) - n :] == end_token_ids[:n]).all():
                said = n
        # 5 its next token wins
        logits[i, end_token_ids[said]] = FORCED_LOGIT


def last_occurrence(tokens: np.ndarray, marker: np.ndarray) -> int:
    """Where the marker stands last, whole; -1 if nowhere.

    >>> last_occurrence(np.int32([7, 8, 7, 8, 7]), np.int32([7, 8]))
    2
    """
    if len(tokens) < len(marker):
        return -1
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(marker))
    return int(np.flatnonzero((windows == marker).all(axis=1)).max(initial=-1))


class ThinkingBudget:
    """The budgets; markers are those of the model."""

    def __init__(self, max_num_reqs: int, reasoning: ReasoningConfig | None, req_states: RequestState) -> None:
        self.req_states = req_states
        self.thinking_budget = np.full(max_num_reqs, -1, np.int32)
        self.start_token_ids = np.array(reasoning.start_token_ids if reasoning else (), np.int32)
        self.end_token_ids = np.array(reasoning.end_token_ids if reasoning else (), np.int32)
        self.natural_end_token_ids = np.array(reasoning.natural_end_token_ids if reasoning else (), np.int32)

    def row_tables(self) -> dict[str, np.ndarray]:
        return {"thinking_budget": self.thinking_budget}

    def row_widths(self, row: int) -> dict[str, int]:
        return {}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        self.thinking_budget[row] = -1 if params.thinking_token_budget is None else params.thinking_token_budget

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool((self.thinking_budget[batch_rows] >= 0).any())

    def apply(self, rows: LogitsRows, logits: np.ndarray) -> None:
        apply_thinking_budget(
            rows.expanded_idx_mapping, rows.positions, rows.input_ids, self.req_states.total_len,
            self.req_states.all_token_ids, self.thinking_budget, self.start_token_ids, self.end_token_ids,
            self.natural_end_token_ids, rows.num_logits, logits,
        )  # fmt: skip
