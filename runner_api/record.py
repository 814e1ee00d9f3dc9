"""StepRecord: what one step was asked, what it built, what it drew. Host arrays only; the one currency.

Runners produce it, recordings of vLLM are read into it (`runner_api.trace`), lockstep compares it, pictures draw it,
reports store it. R requests, Rp after padding, t tokens, tp after padding, L logits rows, G KV cache groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runner_api.config import BatchDescriptor
from runner_api.constants import SCHEMA_VERSION
from runner_api.plan import SchedulerOutput

# The integer fields that must agree element by element, in the order in which a step computes them: the first that
# differs is where a divergence starts.
INTEGER_FIELDS = (
    "req_ids",
    "idx_mapping",
    "query_start_loc",
    "cu_num_logits",
    "expanded_idx_mapping",
    "expanded_local_pos",
    "seq_lens",
    "positions",
    "input_ids",
    "logits_indices",
    "block_tables",
    "slot_mappings",
    "num_sampled",
    "num_rejected",
)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. A step that scheduled no tokens has `num_reqs == 0` and empty arrays.

    Arrays hold defined elements only: `input_ids` and `positions` the real tokens, `block_tables`
    per group one row per real request cut to the blocks it owns, then the padding rows whole.
    """

    plan: SchedulerOutput
    # -- shape ------------------------------------------------------------------------------------------------
    num_reqs: int = 0
    num_reqs_padded: int = 0
    num_tokens: int = 0
    num_tokens_padded: int = 0
    descriptor: BatchDescriptor | None = None
    # -- what was built ---------------------------------------------------------------------------------------
    req_ids: tuple[str, ...] = ()  # batch order
    idx_mapping: np.ndarray = field(default_factory=lambda: _empty(np.int64))  # int64[R] row of each request
    query_start_loc: np.ndarray = field(default_factory=lambda: _empty(np.int32))  # int32[Rp+1]
    seq_lens: np.ndarray = field(default_factory=lambda: _empty(np.int32))  # int32[Rp]
    input_ids: np.ndarray = field(default_factory=lambda: _empty(np.int32))  # int32[t]
    positions: np.ndarray = field(default_factory=lambda: _empty(np.int64))  # int64[t] (or [D, t])
    logits_indices: np.ndarray = field(default_factory=lambda: _empty(np.int64))  # int64[L]
    cu_num_logits: np.ndarray = field(default_factory=lambda: _empty(np.int32))  # int32[R+1]
    expanded_idx_mapping: np.ndarray = field(default_factory=lambda: _empty(np.int64))  # int64[L]
    expanded_local_pos: np.ndarray = field(default_factory=lambda: _empty(np.int32))  # int32[L]
    # [group][request] int32[num_blocks of the row]; padding rows follow, whole, and must be zero
    block_tables: tuple[tuple[np.ndarray, ...], ...] = ()
    slot_mappings: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # int64[G, tp]
    seeds: np.ndarray = field(default_factory=lambda: _empty(np.int64))  # int64[R]
    draft_token_ids: np.ndarray | None = None  # int64[R, K] held for each row when inputs were built
    # -- what was drawn ---------------------------------------------------------------------------------------
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros((0, 1), np.int64))  # int64[R, 1+K] its own draw
    num_sampled: np.ndarray = field(default_factory=lambda: _empty(np.int32))  # int32[R], after forcing
    num_rejected: np.ndarray = field(default_factory=lambda: _empty(np.int32))  # int32[R], after forcing
    faults: np.ndarray = field(default_factory=lambda: _empty(np.int32))  # int32[R] SampleFault of what was drawn
    forced_token_ids: np.ndarray | None = None  # int64[R, 1+K] what was imposed instead, if anything
    logprob_token_ids: np.ndarray | None = None  # int32[R, 1+n]
    logprobs: np.ndarray | None = None  # float32[R, 1+n]
    ranks: np.ndarray | None = None  # int64[R]
    # -- on request -------------------------------------------------------------------------------------------
    logits: np.ndarray | None = None  # float[L, V], before any processing
    # req_id -> the request's KV by logical position after the step: int64[G, seq_len, 2] for the witness model,
    # float[layers, 2, seq_len, num_kv_heads, head_size] otherwise
    kv: dict[str, np.ndarray] = field(default_factory=dict)
    intermediates: dict[str, np.ndarray] = field(default_factory=dict)
    # -- provenance -------------------------------------------------------------------------------------------
    runner: str = ""  # RunnerInfo.line()
    extra: dict[str, Any] = field(default_factory=dict)  # fields of a recording that have no place above
    schema_version: int = SCHEMA_VERSION

    def row_of(self, req_id: str) -> int:
        """Batch index of a request; KeyError if it was not scheduled."""
        try:
            return self.req_ids.index(req_id)
        except ValueError:
            raise KeyError(req_id) from None

    def tokens(self) -> dict[str, tuple[int, ...]]:
        """The tokens that entered the state, by request: forced ones where some were imposed."""
        source = self.token_ids if self.forced_token_ids is None else self.forced_token_ids
        return {r: tuple(int(x) for x in source[i, : int(self.num_sampled[i])]) for i, r in enumerate(self.req_ids)}


def _empty(dtype: Any) -> np.ndarray:
    return np.zeros(0, dtype)
