"""Minimum length: until it is reached, no token may end the request. Twin: cpu_reference/sample/min_tokens.py."""

from __future__ import annotations

import numpy as np
import torch

from gpu_backend.packed_copy import PackedCopy
from gpu_backend.sample.logits_rows import LogitsRows
from gpu_backend.staged_write import StagedWriteTensor
from gpu_backend.triton_support import block, entry, launch, signature, tile, tl, triton
from runner_api import NewRequestData, SamplingParams
from runner_api.constants import MAX_STOP_TOKEN_IDS
from runner_api.sampling_params import INT32_MAX


@entry
@signature(
    {"*i64": "expanded_idx_mapping positions", "*i32": "min_len num_stop stop_token_ids restores_stops",
     "*fp32": "logits"},
    STOPS=128, BLOCK=4096,
)  # fmt: skip
@triton.jit
def _apply_min_tokens_kernel(
    expanded_idx_mapping, positions, min_len, num_stop, stop_token_ids, stop_stride, restores_stops, logits, vocab_size,
    STOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    # 1 the request's row; nothing to do without one, or without stop tokens to mask
    row = tl.load(expanded_idx_mapping + i)
    # 2 the row's input token is the last of positions + 1 tokens: the next one may end what is long enough
    least = tl.load(min_len + row, mask=row >= 0, other=0)
    if tl.load(positions + i) + 1 < least:
        # 3 mask
        stops = tl.arange(0, STOPS) < tl.load(num_stop + row)
        token = tl.load(stop_token_ids + row * stop_stride + tl.arange(0, STOPS), mask=stops, other=0)
        place = logits + i * vocab_size + token
        before = tl.load(place, mask=stops, other=float("-inf"))
        tl.store(place, float("-inf"), mask=stops)
        if tl.load(restores_stops + row) != 0:
            tl.debug_barrier()  # what each thread has masked, all must see
            left = tl.zeros((BLOCK,), tl.int32)
            for first in range(0, vocab_size, BLOCK):
                t = first + tl.arange(0, BLOCK)
                x = tl.load(logits + i * vocab_size + t, mask=t < vocab_size, other=float("-inf"))
                left += (x != float("-inf")).to(tl.int32)
            # 4 nothing is left: take back
            if tl.sum(left, 0) == 0:
                tl.store(place, before, mask=tl.abs(before) < float("inf"))


def apply_min_tokens(
    expanded_idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    min_len: torch.Tensor,
    num_stop: torch.Tensor,
    stop_token_ids: torch.Tensor,
    restores_stops: torch.Tensor,
    num_logits: int,
    logits: torch.Tensor,
) -> None:
    """Set the request's stop tokens to -inf while its sequence is shorter than its minimum.

    A grammar may allow nothing but a stop token. Where a request says so (`restores_stops`) and masking leaves the row
    only -inf, the stop tokens that were finite come back. No token is listed twice.

    Shapes: expanded_idx_mapping: int64[>= L]; positions: int64[>= L] of each row's input token; by row: min_len:
    int32[N] prompt and outputs together, num_stop: int32[N] (0 = no minimum), stop_token_ids:
    int32[N, MAX_STOP_TOKEN_IDS], restores_stops: int32[N]; logits: float32[L, V], contiguous. Writes: logits.
    """
    vocab_size = logits.shape[1]
    launch(
        _apply_min_tokens_kernel, (num_logits,), expanded_idx_mapping, positions, min_len, num_stop, stop_token_ids,
        stop_token_ids.stride(0), restores_stops, logits, vocab_size,
        STOPS=block(stop_token_ids.shape[1]), BLOCK=tile(vocab_size, most=4096),
    )  # fmt: skip


class MinTokens:
    """The stop tokens of requests with a minimum, packed to the left: their own and the model's."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self.min_len_np, self.num_stop_np, self.restores_stops_np = np.zeros((3, max_num_reqs), np.int32)
        # int32[N], device; set by `bind`
        self.min_len: torch.Tensor
        self.num_stop: torch.Tensor
        self.restores_stops: torch.Tensor
        self._stop_token_ids = StagedWriteTensor(max_num_reqs, MAX_STOP_TOKEN_IDS, np.int32, device)

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        return {"min_len": self.min_len_np, "num_stop": self.num_stop_np, "restores_stops": self.restores_stops_np}

    def bind(self, packed: PackedCopy) -> None:
        self.min_len, self.num_stop = packed.views["min_len"], packed.views["num_stop"]
        self.restores_stops = packed.views["restores_stops"]

    def row_tables(self) -> dict[str, torch.Tensor]:
        """Device tables by row that no step's copy overwrites."""
        return {"stop_token_ids": self._stop_token_ids.table}

    def row_widths(self, row: int) -> dict[str, int]:
        """How much of the row's part of a table means anything, where that is not all of it."""
        return {"stop_token_ids": int(self.num_stop_np[row])}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        stops = new.stop_token_ids if params.min_tokens > 0 else ()
        self.min_len_np[row] = min(new.prompt_len + params.min_tokens, INT32_MAX)
        self.num_stop_np[row] = len(stops)
        self._stop_token_ids.stage_write(row, 0, stops)
        self.restores_stops_np[row] = params.structured_outputs is not None

    def pack(self, packed: PackedCopy) -> None:
        self._stop_token_ids.pack(packed)

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        self._stop_token_ids.apply(packed)

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool(self.num_stop_np[batch_rows].any())

    def apply(self, rows: LogitsRows, logits: torch.Tensor) -> None:
        apply_min_tokens(
            rows.expanded_idx_mapping, rows.positions, self.min_len, self.num_stop, self._stop_token_ids.table,
            self.restores_stops, rows.num_logits, logits,
        )  # fmt: skip
