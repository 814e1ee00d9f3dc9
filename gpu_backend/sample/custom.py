"""Custom logits processors: where a user's own code takes part in sampling. Twin: cpu_reference/sample/custom.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpu_backend.packed_copy import PackedCopy, copy_to_device, torch_dtype
from gpu_backend.sample.logits_rows import LogitsRows
from runner_api import NewRequestData, SamplingParams
from runner_api.logits_processors import (
    LogitsContext,
    RowMove,
    build_processors,
    call_processor,
    edit_logits,
    tell_of_request,
)


class Arrays:
    """torch's tensors on the runner's device, for processors. See `runner_api.logits_processors.ArrayBackend`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, shape: int | tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch_dtype(np.dtype(dtype)), device=self.device)

    def array(self, values: Sequence[Any], dtype: str) -> torch.Tensor:
        return copy_to_device(np.array(values, dtype), self.device)

    def arange(self, count: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.int64, device=self.device)

    def where(self, condition: torch.Tensor, chosen: Any, other: Any) -> torch.Tensor:
        return torch.where(condition, chosen, other)


class CustomProcessors:
    """The processors of one runner, in order, and which rows each of them edits.

    A processor works on copies of the logits rows of requests that asked for it: it cannot reach a neighbour's. What it
    keeps by row is its own; the runner only tells it what happens to rows.
    """

    def __init__(self, max_num_reqs: int, vocab_size: int, factories: Sequence[Any], device: torch.device) -> None:
        self.processors = build_processors(factories, max_num_reqs, vocab_size, Arrays(device))
        self.edits = np.zeros((len(self.processors), max_num_reqs), bool)  # bool[P, N] processor p edits the row; host

    def host_tables(self) -> dict[str, np.ndarray]:
        return {}

    def bind(self, packed: PackedCopy) -> None:
        """Nothing to take: which rows are edited is asked on the host."""

    def row_tables(self) -> dict[str, torch.Tensor]:
        """None: a user's state is the user's."""
        return {}

    def row_widths(self, row: int) -> dict[str, int]:
        return {}

    def pack(self, packed: PackedCopy) -> None:
        """Nothing to send: processors make their own arrays."""

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        """Nothing was staged."""

    # -- what happens to rows ---------------------------------------------------------------------------------

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        """Tell of a request that moves in, with what it had drawn before a preemption."""
        prompt, outputs = list(new.prompt_token_ids), list(new.prefill_token_ids[new.prompt_len :])
        for p, processor in enumerate(self.processors):
            self.edits[p, row] = tell_of_request(processor, row, params, prompt, outputs)

    def remove_request(self, row: int) -> None:
        """Tell of a request that leaves, finished or preempted."""
        self.edits[:, row] = False
        for processor in self.processors:
            call_processor(processor, "remove_request", row)

    def move_rows(self, moves: Sequence[RowMove]) -> None:
        """Tell of requests that change rows, in this order."""
        for move in moves:
            there = self.edits[:, move.target].copy()
            self.edits[:, move.target] = self.edits[:, move.source]
            self.edits[:, move.source] = there if move.swap else False
        for processor in self.processors:
            call_processor(processor, "move_rows", tuple(moves))

    def observe(self, idx_mapping: torch.Tensor, sampled_token_ids: torch.Tensor, num_sampled: torch.Tensor) -> None:
        """Tell of tokens that entered the state.

        Shapes: idx_mapping: int64[R]; sampled_token_ids: int64[R, 1+K]; num_sampled: int32[R].
        """
        for processor in self.processors:
            call_processor(processor, "observe", idx_mapping.clone(), sampled_token_ids.clone(), num_sampled.clone())

    # -- the step ---------------------------------------------------------------------------------------------

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool(self.edits[:, batch_rows].any())

    def apply(self, rows: LogitsRows, logits: torch.Tensor) -> None:
        """Let each processor edit the logits rows of the requests that asked for it. `logits`: float[L, V]."""
        owner = np.repeat(rows.batch_rows, rows.batch_num_logits)  # known to the host, so that nothing is read back
        num_drafts = int(rows.batch_num_logits.max(initial=1)) - 1
        for processor, edits in zip(self.processors, self.edits, strict=True):
            # 1 the logits rows of requests that asked for it
            chosen_np = np.flatnonzero(edits[owner])
            if len(chosen_np) == 0:
                continue
            chosen = copy_to_device(chosen_np.astype(np.int64), logits.device)
            # 2 it works on copies of them
            edited = logits[chosen]
            context = LogitsContext(
                rows.expanded_idx_mapping[chosen], rows.positions[chosen], rows.input_ids[chosen],
                rows.expanded_local_pos[chosen], num_drafts,
            )  # fmt: skip
            edit_logits(processor, edited, context)
            # 3 which go back to their places
            logits[chosen] = edited
