"""Logit bias: a request adds a number of its own to some logits. Twin: cpu_reference/sample/logit_bias.py."""

from __future__ import annotations

import numpy as np
import torch

from gpu_backend.packed_copy import PackedCopy
from gpu_backend.sample.logits_rows import LogitsRows
from gpu_backend.staged_write import StagedWriteTensor
from gpu_backend.triton_support import entry, launch, signature, tile, tl, triton
from runner_api import NewRequestData, SamplingParams
from runner_api.constants import MAX_LOGIT_BIAS


@entry
@signature(
    {"*i64": "expanded_idx_mapping", "*i32": "num_bias bias_token_ids", "*fp32": "bias logits"}, BLOCK=1024
)  # fmt: skip
@triton.jit
def _apply_logit_bias_kernel(
    expanded_idx_mapping, num_bias, bias_token_ids, bias, bias_stride, logits, vocab_size, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    # 1 the request's row; nothing to do without one, or without a bias
    row = tl.load(expanded_idx_mapping + i)
    n = tl.load(num_bias + row, mask=row >= 0, other=0)
    # 2 add; no token is named twice, so that no lane meets another
    for first in range(0, n, BLOCK):
        j = first + tl.arange(0, BLOCK)
        named = j < n
        token = tl.load(bias_token_ids + row * bias_stride + j, mask=named, other=0)
        more = tl.load(bias + row * bias_stride + j, mask=named, other=0.0)
        place = logits + i * vocab_size + token
        tl.store(place, tl.load(place, mask=named, other=0.0) + more, mask=named)


def apply_logit_bias(
    expanded_idx_mapping: torch.Tensor,
    num_bias: torch.Tensor,
    bias_token_ids: torch.Tensor,
    bias: torch.Tensor,
    num_logits: int,
    logits: torch.Tensor,
) -> None:
    """Add to the logits of the tokens that a request names what it gives for each.

    A token at -inf stays there. No token is named twice.

    Shapes: expanded_idx_mapping: int64[>= L]; num_bias: int32[N] by row, how many tokens are named; bias_token_ids:
    int32[N, MAX_LOGIT_BIAS], bias: float32[N, MAX_LOGIT_BIAS] by row; logits: float32[L, V], contiguous.
    Writes: logits.
    """
    assert bias.stride() == bias_token_ids.stride(), "both tables are laid out alike"
    launch(
        _apply_logit_bias_kernel, (num_logits,), expanded_idx_mapping, num_bias, bias_token_ids, bias, bias.stride(0),
        logits, logits.shape[1], BLOCK=tile(bias.shape[1]),
    )  # fmt: skip


class LogitBias:
    """The pairs, packed to the left."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self.num_bias_np = np.zeros(max_num_reqs, np.int32)
        self.num_bias: torch.Tensor  # int32[N], device; set by `bind`
        self._bias_token_ids = StagedWriteTensor(max_num_reqs, MAX_LOGIT_BIAS, np.int32, device)
        self._bias = StagedWriteTensor(max_num_reqs, MAX_LOGIT_BIAS, np.float32, device)

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        return {"num_bias": self.num_bias_np}

    def bind(self, packed: PackedCopy) -> None:
        self.num_bias = packed.views["num_bias"]

    def row_tables(self) -> dict[str, torch.Tensor]:
        """Device tables by row that no step's copy overwrites."""
        return {"bias_token_ids": self._bias_token_ids.table, "bias": self._bias.table}

    def row_widths(self, row: int) -> dict[str, int]:
        """How much of the row's part of a table means anything, where that is not all of it."""
        n = int(self.num_bias_np[row])
        return {"bias_token_ids": n, "bias": n}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        pairs = params.logit_bias or {}
        self.num_bias_np[row] = len(pairs)
        self._bias_token_ids.stage_write(row, 0, list(pairs))
        self._bias.stage_write(row, 0, list(pairs.values()))

    def pack(self, packed: PackedCopy) -> None:
        self._bias_token_ids.pack(packed)
        self._bias.pack(packed)

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        self._bias_token_ids.apply(packed)
        self._bias.apply(packed)

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool(self.num_bias_np[batch_rows].any())

    def apply(self, rows: LogitsRows, logits: torch.Tensor) -> None:
        apply_logit_bias(
            rows.expanded_idx_mapping, self.num_bias, self._bias_token_ids.table, self._bias.table, rows.num_logits,
            logits,
        )  # fmt: skip
