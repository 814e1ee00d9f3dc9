"""Allowed tokens: what a request does not list can not be drawn. Twin: cpu_reference/sample/allowed_token_ids.py."""

from __future__ import annotations

import numpy as np
import torch

from gpu_backend.packed_copy import PackedCopy
from gpu_backend.sample.bitmask import NUM_BITS, allowed_by, pack_bits
from gpu_backend.sample.logits_rows import LogitsRows
from gpu_backend.staged_write import StagedWriteTensor
from gpu_backend.triton_support import entry, launch, signature, tile, tl, triton
from runner_api import NewRequestData, SamplingParams


@entry
@signature({"*i64": "expanded_idx_mapping", "*i32": "restricted allowed_bitmask", "*fp32": "logits"}, BLOCK=1024)
@triton.jit
def _apply_allowed_token_ids_kernel(
    expanded_idx_mapping, restricted, allowed_bitmask, bitmask_stride, logits, vocab_size, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    # 1 the request's row; nothing to do without one, or without a list
    row = tl.load(expanded_idx_mapping + i)
    if tl.load(restricted + row, mask=row >= 0, other=0) != 0:
        # 2 drop what its bits do not name
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab_size
        allowed = allowed_by(allowed_bitmask + row * bitmask_stride, token, inside)
        tl.store(logits + i * vocab_size + token, float("-inf"), mask=inside & (allowed == 0))


def apply_allowed_token_ids(
    expanded_idx_mapping: torch.Tensor,
    restricted: torch.Tensor,
    allowed_bitmask: torch.Tensor,
    num_logits: int,
    logits: torch.Tensor,
) -> None:
    """Set to -inf every token that is not on its request's list; requests without a list keep all.

    Shapes: expanded_idx_mapping: int64[>= L]; restricted: int32[N] by row, 1 = the row has a list;
    allowed_bitmask: int32[N, ceil(V / 32)] by row; logits: float32[L, V], contiguous. Writes: logits.
    """
    vocab_size = logits.shape[1]
    width = tile(vocab_size)
    launch(
        _apply_allowed_token_ids_kernel, (num_logits, triton.cdiv(vocab_size, width)),
        expanded_idx_mapping, restricted, allowed_bitmask, allowed_bitmask.stride(0), logits, vocab_size, BLOCK=width,
    )  # fmt: skip


class AllowedTokenIds:
    """The lists, as bits by row: a list of any length takes the same room."""

    def __init__(self, max_num_reqs: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.restricted_np = np.zeros(max_num_reqs, np.int32)
        self.restricted: torch.Tensor  # int32[N], device; set by `bind`
        self._allowed_bitmask = StagedWriteTensor(max_num_reqs, -(-vocab_size // NUM_BITS), np.int32, device)

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        return {"restricted": self.restricted_np}

    def bind(self, packed: PackedCopy) -> None:
        self.restricted = packed.views["restricted"]

    def row_tables(self) -> dict[str, torch.Tensor]:
        """Device tables by row that no step's copy overwrites."""
        return {"allowed_bitmask": self._allowed_bitmask.table}

    def row_widths(self, row: int) -> dict[str, int]:
        """How much of the row's part of a table means anything, where that is not all of it."""
        return {} if self.restricted_np[row] else {"allowed_bitmask": 0}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        listed = params.allowed_token_ids
        self.restricted_np[row] = listed is not None
        if listed is not None:
            self._allowed_bitmask.stage_write(row, 0, pack_bits(listed, self.vocab_size).tolist())

    def pack(self, packed: PackedCopy) -> None:
        self._allowed_bitmask.pack(packed)

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        self._allowed_bitmask.apply(packed)

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool(self.restricted_np[batch_rows].any())

    def apply(self, rows: LogitsRows, logits: torch.Tensor) -> None:
        apply_allowed_token_ids(
            rows.expanded_idx_mapping, self.restricted, self._allowed_bitmask.table, rows.num_logits, logits
        )
