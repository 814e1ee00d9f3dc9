"""Thinking budget: a model that has thought aloud for long enough is made to stop.

The model marks where its thinking starts and ends (`ReasoningConfig`). Twin: cpu_reference/sample/thinking_budget.py.
"""

from __future__ import annotations

import numpy as np
import torch

from gpu_backend.packed_copy import PackedCopy
from gpu_backend.request_state import RequestState
from gpu_backend.sample.history import tokens_seen
from gpu_backend.sample.logits_rows import LogitsRows
from gpu_backend.triton_support import block, entry, launch, signature, tile, tl, triton
from runner_api import NewRequestData, ReasoningConfig, SamplingParams
from runner_api.constants import FORCED_LOGIT


@triton.jit
def last_occurrence(marker, lowest, i, position, input_ids, known, tokens, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """Where the marker stands last, whole, at `lowest` or behind it; -1 if nowhere."""
    found = tl.zeros((), tl.int64) - 1
    end = position + 2 - LENGTH  # no marker starts here or later
    while (found < 0) & (end > lowest):
        at = end - 1 - tl.arange(0, BLOCK)
        here = at >= lowest
        for m in tl.static_range(LENGTH):
            token = tokens_seen(at + m, here, i, position, input_ids, known, tokens)
            here = here & (token == tl.load(marker + m))
        found = tl.max(tl.where(here, at, -1), 0)
        end -= BLOCK
    return found


@entry
@signature(
    {"*i64": "expanded_idx_mapping positions",
     "*i32": "input_ids total_len all_token_ids thinking_budget start_token_ids end_token_ids natural_end_token_ids",
     "*fp32": "logits"},
    FORCED=FORCED_LOGIT, START_LENGTH=1, END_LENGTH=5, NATURAL_LENGTH=1, END_BLOCK=16, BLOCK=1024,
)  # fmt: skip
@triton.jit
def _apply_thinking_budget_kernel(
    expanded_idx_mapping, positions, input_ids, total_len, all_token_ids, all_stride, thinking_budget, start_token_ids,
    end_token_ids, natural_end_token_ids, logits, vocab_size, FORCED: tl.constexpr, START_LENGTH: tl.constexpr,
    END_LENGTH: tl.constexpr, NATURAL_LENGTH: tl.constexpr, END_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    # 1 the request's row; nothing to do without one, or without a budget
    row = tl.load(expanded_idx_mapping + i)
    budget = tl.load(thinking_budget + row, mask=row >= 0, other=-1)
    if budget >= 0:
        # 2 the latest markers in what it has seen, drafts before this row included
        position = tl.load(positions + i)
        known = tl.load(total_len + row)
        tokens = all_token_ids + row * all_stride
        start = last_occurrence(
            start_token_ids, 0, i, position, input_ids, known, tokens, LENGTH=START_LENGTH, BLOCK=BLOCK
        )  # fmt: skip
        # 3 tokens thought so far
        if (start >= 0) & (position + 1 - (start + START_LENGTH) >= budget):
            end = last_occurrence(
                natural_end_token_ids, start, i, position, input_ids, known, tokens, LENGTH=NATURAL_LENGTH, BLOCK=BLOCK
            )  # fmt: skip
            if end < 0:
                # 4 how much of the end text stands at the end already; never all of it
                n = tl.arange(0, END_BLOCK)
                begun = (n < END_LENGTH) & (n <= position + 1)
                for m in range(END_LENGTH - 1):
                    more = begun & (m < n)
                    token = tokens_seen(position + 1 - n + m, more, i, position, input_ids, known, tokens)
                    begun = begun & (~more | (token == tl.load(end_token_ids + m)))
                said = tl.max(tl.where(begun, n, 0), 0)
                # 5 its next token wins
                tl.store(logits + i * vocab_size + tl.load(end_token_ids + said), FORCED)


def apply_thinking_budget(
    expanded_idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    input_ids: torch.Tensor,
    total_len: torch.Tensor,
    all_token_ids: torch.Tensor,
    thinking_budget: torch.Tensor,
    start_token_ids: torch.Tensor,
    end_token_ids: torch.Tensor,
    natural_end_token_ids: torch.Tensor,
    num_logits: int,
    logits: torch.Tensor,
) -> None:
    """Where a request has thought for as many tokens as it may, make the next token of the end text win.

    It thinks if its latest start marker, in prompt or output, has no natural end marker behind it. The end text goes
    on where the request's latest tokens have begun it.

    Shapes: expanded_idx_mapping: int64[>= L]; positions: int64[>= L], input_ids: int32[>= L] of each row's input token;
    by row: total_len: int32[N], all_token_ids: int32[N, M], thinking_budget: int32[N] (-1 = none); start_token_ids:
    int32[A]; end_token_ids: int32[B]; natural_end_token_ids: int32[C]; logits: float32[L, V], contiguous.
    Writes: logits.
    """
    end_length = len(end_token_ids)
    launch(
        _apply_thinking_budget_kernel, (num_logits,), expanded_idx_mapping, positions, input_ids, total_len,
        all_token_ids, all_token_ids.stride(0), thinking_budget, start_token_ids, end_token_ids, natural_end_token_ids,
        logits, logits.shape[1], FORCED=FORCED_LOGIT, START_LENGTH=len(start_token_ids), END_LENGTH=end_length,
        NATURAL_LENGTH=len(natural_end_token_ids), END_BLOCK=block(end_length), BLOCK=tile(all_token_ids.shape[1]),
    )  # fmt: skip


class ThinkingBudget:
    """The budgets; markers are those of the model."""

    def __init__(
        self, max_num_reqs: int, reasoning: ReasoningConfig | None, req_states: RequestState, device: torch.device
    ) -> None:
        self.req_states = req_states
        self.thinking_budget_np = np.full(max_num_reqs, -1, np.int32)
        self.thinking_budget: torch.Tensor  # int32[N], device; set by `bind`
        self.start_token_ids, self.end_token_ids, self.natural_end_token_ids = (
            torch.tensor(marker, dtype=torch.int32, device=device)
            for marker in (
                (reasoning.start_token_ids, reasoning.end_token_ids, reasoning.natural_end_token_ids)
                if reasoning
                else ((), (), ())
            )
        )

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        return {"thinking_budget": self.thinking_budget_np}

    def bind(self, packed: PackedCopy) -> None:
        self.thinking_budget = packed.views["thinking_budget"]

    def row_tables(self) -> dict[str, torch.Tensor]:
        """Device tables by row that no step's copy overwrites."""
        return {}

    def row_widths(self, row: int) -> dict[str, int]:
        """How much of the row's part of a table means anything, where that is not all of it."""
        return {}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        self.thinking_budget_np[row] = -1 if params.thinking_token_budget is None else params.thinking_token_budget

    def pack(self, packed: PackedCopy) -> None:
        """Nothing is staged."""

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        """Nothing was staged."""

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool((self.thinking_budget_np[batch_rows] >= 0).any())

    def apply(self, rows: LogitsRows, logits: torch.Tensor) -> None:
        apply_thinking_budget(
            rows.expanded_idx_mapping, rows.positions, rows.input_ids, self.req_states.total_len,
            self.req_states.all_token_ids, self.thinking_budget, self.start_token_ids, self.end_token_ids,
            self.natural_end_token_ids, rows.num_logits, logits,
        )  # fmt: skip
