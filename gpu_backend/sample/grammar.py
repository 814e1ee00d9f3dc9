"""The grammar's mask: what the form of an answer does not allow can not be drawn.

It is applied first, and to the logits as the model gives them, so that log probabilities know of it.
Twin: cpu_reference/sample/grammar.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpu_backend.packed_copy import copy_to_device
from gpu_backend.sample.bitmask import allowed_by
from gpu_backend.triton_support import entry, launch, signature, tile, tl, triton
from runner_api import NO_ROW, GrammarOutput


@entry
@signature({"*i32": "mask_rows bitmask", "*fp32": "logits"}, BLOCK=1024)
@signature({"*i32": "mask_rows bitmask", "*bf16": "logits"}, BLOCK=1024)
@signature({"*i32": "mask_rows bitmask", "*fp16": "logits"}, BLOCK=1024)
@triton.jit
def _apply_grammar_bitmask_kernel(mask_rows, bitmask, bitmask_stride, logits, vocab_size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    # 1 the logits row's mask; nothing to do without one
    mask_row = tl.load(mask_rows + i).to(tl.int64)
    if mask_row >= 0:
        # 2 drop what its bits do not name
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab_size
        allowed = allowed_by(bitmask + mask_row * bitmask_stride, token, inside)
        tl.store(logits + i * vocab_size + token, float("-inf"), mask=inside & (allowed == 0))


def apply_grammar_bitmask(
    mask_rows: torch.Tensor, bitmask: torch.Tensor, num_logits: int, logits: torch.Tensor
) -> None:
    """Set to -inf every token that the mask of its logits row does not name; rows without a mask keep all.

    Shapes: mask_rows: int32[>= L] row of the bitmask, or -1; bitmask: int32[masks, ceil(V / 32)]; logits: float[L, V],
    contiguous. Writes: logits.
    """
    vocab_size = logits.shape[1]
    width = tile(vocab_size)
    launch(
        _apply_grammar_bitmask_kernel, (num_logits, triton.cdiv(vocab_size, width)),
        mask_rows, bitmask, bitmask.stride(0), logits, vocab_size, BLOCK=width,
    )  # fmt: skip


def grammar_mask_rows(
    req_ids: Sequence[str], cu_num_logits: np.ndarray, grammar: GrammarOutput, num_speculative_tokens: int
) -> np.ndarray:
    """Which mask each logits row of the batch has, NO_ROW where none: int32[L], on the host.

    Masks stand in the order of the grammar's own list, 1 + K of them for each request, however many logits rows it has
    in this step: row j of a request takes its mask j, the others are not looked at.

    Shapes: cu_num_logits: int32[R+1], where each request's logits rows start.
    """
    mask_rows = np.full(int(cu_num_logits[len(req_ids)]), NO_ROW, np.int32)
    # 1 where each request stands in the grammar's list
    place = {req_id: g for g, req_id in enumerate(grammar.structured_output_request_ids)}
    # 2 by request id: the batch has an order of its own
    for i, req_id in enumerate(req_ids):
        if req_id in place:
            first, end = int(cu_num_logits[i]), int(cu_num_logits[i + 1])
            mask_rows[first:end] = place[req_id] * (1 + num_speculative_tokens) + np.arange(end - first)
    return mask_rows


def send_masks(mask_rows: np.ndarray, bitmask: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Both to the device, in one copy and without waiting."""
    both = np.concatenate([mask_rows.reshape(-1), np.asarray(bitmask, np.int32).reshape(-1)])
    sent = copy_to_device(both, device)
    return sent[: len(mask_rows)], sent[len(mask_rows) :].view(bitmask.shape)
