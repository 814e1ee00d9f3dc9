"""Trace replay: a request takes the tokens of its own list instead of those drawn. Twin: cpu_reference/sample/trace_replay.py.

It comes behind the draw and before log probabilities, which so tell how likely the listed tokens were.
"""  # noqa: E501

from __future__ import annotations

import numpy as np
import torch

from gpu_backend.packed_copy import PackedCopy
from gpu_backend.staged_write import StagedWriteTensor
from gpu_backend.triton_support import entry, launch, signature, tile, tl, triton
from runner_api import NewRequestData, SamplingParams


@entry
@signature(
    {"*i64": "idx_mapping sampled_token_ids", "*i32": "seq_lens prompt_len trace_len trace_token_ids"}, BLOCK=256
)  # fmt: skip
@signature(  # no drafts: one token a request
    {"*i64": "idx_mapping sampled_token_ids", "*i32": "seq_lens prompt_len trace_len trace_token_ids"},
    sampled_stride=1, BLOCK=256,
)  # fmt: skip
@triton.jit(do_not_specialize=["num_reqs"])
def _apply_trace_replay_kernel(
    idx_mapping, seq_lens, prompt_len, trace_len, trace_token_ids, trace_stride, num_reqs, sampled_token_ids,
    sampled_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # 1 the request's row
    row = tl.load(idx_mapping + i, mask=i < num_reqs, other=-1)
    # 2 how many outputs come before the one that is drawn now
    here = row >= 0
    index = tl.load(seq_lens + i, mask=here, other=0) - tl.load(prompt_len + row, mask=here, other=0)
    # 3 replace
    listed = (index >= 0) & (index < tl.load(trace_len + row, mask=here, other=0))
    token = tl.load(trace_token_ids + row * trace_stride + index, mask=listed, other=0)
    tl.store(sampled_token_ids + i * sampled_stride, token.to(tl.int64), mask=listed)


def apply_trace_replay(
    idx_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    prompt_len: torch.Tensor,
    trace_len: torch.Tensor,
    trace_token_ids: torch.Tensor,
    num_reqs: int,
    sampled_token_ids: torch.Tensor,
) -> None:
    """Put the listed token in the place of the drawn one, as long as the list lasts.

    Shapes: idx_mapping: int64[>= R]; seq_lens: int32[>= R]; by row: prompt_len, trace_len: int32[N], trace_token_ids:
    int32[N, M]; sampled_token_ids: int64[>= R, 1+K]. Writes: column 0 of sampled_token_ids.
    """
    width = tile(num_reqs, most=256)
    launch(
        _apply_trace_replay_kernel, (triton.cdiv(num_reqs, width),), idx_mapping, seq_lens, prompt_len, trace_len,
        trace_token_ids, trace_token_ids.stride(0), num_reqs, sampled_token_ids, sampled_token_ids.stride(0),
        BLOCK=width,
    )  # fmt: skip


class TraceReplay:
    """The lists, as far as a sequence can reach."""

    def __init__(self, max_num_reqs: int, max_model_len: int, device: torch.device) -> None:
        self.trace_len_np = np.zeros(max_num_reqs, np.int32)
        self.trace_len: torch.Tensor  # int32[N], device; set by `bind`
        self._trace_token_ids = StagedWriteTensor(max_num_reqs, max_model_len, np.int32, device)

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        return {"trace_len": self.trace_len_np}

    def bind(self, packed: PackedCopy) -> None:
        self.trace_len = packed.views["trace_len"]

    def row_tables(self) -> dict[str, torch.Tensor]:
        """Device tables by row that no step's copy overwrites."""
        return {"trace_token_ids": self._trace_token_ids.table}

    def row_widths(self, row: int) -> dict[str, int]:
        """How much of the row's part of a table means anything, where that is not all of it."""
        return {"trace_token_ids": int(self.trace_len_np[row])}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        tokens = (params.trace_decode_token_ids or ())[: self._trace_token_ids.table.shape[1]]
        self.trace_len_np[row] = len(tokens)
        self._trace_token_ids.stage_write(row, 0, tokens)

    def pack(self, packed: PackedCopy) -> None:
        self._trace_token_ids.pack(packed)

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        self._trace_token_ids.apply(packed)

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool(self.trace_len_np[batch_rows].any())

    def apply(
        self,
        idx_mapping: torch.Tensor,
        seq_lens: torch.Tensor,
        prompt_len: torch.Tensor,
        num_reqs: int,
        sampled_token_ids: torch.Tensor,
    ) -> None:
        """Shapes: see `apply_trace_replay`."""
        apply_trace_replay(
            idx_mapping, seq_lens, prompt_len, self.trace_len, self._trace_token_ids.table, num_reqs, sampled_token_ids
        )
