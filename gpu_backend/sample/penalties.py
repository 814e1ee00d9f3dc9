"""Penalties: a token that has been said becomes less likely. Twin: cpu_reference/sample/penalties.py.

repetition: any token of the prompt or the output; its logit is moved away from likely by a factor. frequency: an output
token, by its count. presence: an output token, once. What was said is kept by row: prompt tokens as bits, output tokens
as counts. Rows of requests without a penalty are not kept up to date.
"""

from __future__ import annotations

import numpy as np
import torch

from gpu_backend.packed_copy import PackedCopy
from gpu_backend.request_state import RequestState
from gpu_backend.sample.bitmask import NUM_BITS, allowed_by
from gpu_backend.sample.logits_rows import LogitsRows
from gpu_backend.triton_support import INTERPRETED, entry, launch, signature, tile, tl, triton
from runner_api import NewRequestData, SamplingParams

# How many programs share the tokens of one row: a prompt of a million tokens must not wait for one of them.
PROGRAMS_PER_ROW = 2 if INTERPRETED else 16


@entry
@signature(
    {"*i64": "rows", "*i32": "prompt_len total_len all_token_ids prompt_bitmask output_counts"}, BLOCK=1024
)  # fmt: skip
@triton.jit
def _count_prompt_and_output_tokens_kernel(
    rows, prompt_len, total_len, all_token_ids, all_stride, prompt_bitmask, bitmask_stride, output_counts,
    counts_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    # 1 its tokens
    row = tl.load(rows + tl.program_id(0))
    num_prompt = tl.load(prompt_len + row)
    known = tl.load(total_len + row)
    for first in range(tl.program_id(1) * BLOCK, known, tl.num_programs(1) * BLOCK):
        s = first + tl.arange(0, BLOCK)
        token = tl.load(all_token_ids + row * all_stride + s, mask=s < known, other=0)
        # 2 prompt tokens as bits
        word = prompt_bitmask + row * bitmask_stride + token // 32
        tl.atomic_or(word, 1 << (token % 32), mask=s < num_prompt, sem="relaxed")
        # 3 outputs drawn before a preemption as counts
        count = output_counts + row * counts_stride + token
        tl.atomic_add(count, 1, mask=(s < known) & (s >= num_prompt), sem="relaxed")


def count_prompt_and_output_tokens(
    rows: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
    all_token_ids: torch.Tensor,
    num_rows: int,
    prompt_bitmask: torch.Tensor,
    output_counts: torch.Tensor,
) -> None:
    """Set up what rows have said, from the tokens that they know; whatever a former owner left is overwritten.

    Shapes: rows: int64[>= num_rows], each row once; by row: prompt_len, total_len: int32[N], all_token_ids:
    int32[N, M], prompt_bitmask: int32[N, ceil(V / 32)], output_counts: int32[N, V]. Writes: the named rows of the last
    two.
    """
    prompt_bitmask.index_fill_(0, rows[:num_rows], 0)
    output_counts.index_fill_(0, rows[:num_rows], 0)
    launch(
        _count_prompt_and_output_tokens_kernel, (num_rows, PROGRAMS_PER_ROW), rows, prompt_len, total_len,
        all_token_ids, all_token_ids.stride(0), prompt_bitmask, prompt_bitmask.stride(0), output_counts,
        output_counts.stride(0), BLOCK=tile(all_token_ids.shape[1]),
    )  # fmt: skip


@entry
@signature(
    {"*i64": "expanded_idx_mapping", "*i32": "expanded_local_pos input_ids prompt_bitmask output_counts",
     "*fp32": "repetition frequency presence logits"},
    BLOCK=1024, enable_fp_fusion=False,
)  # fmt: skip
@triton.jit
def _apply_penalties_kernel(
    expanded_idx_mapping, expanded_local_pos, input_ids, repetition, frequency, presence, prompt_bitmask,
    bitmask_stride, output_counts, counts_stride, logits, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    # 1 the request's row and penalties; nothing to do without any
    row = tl.load(expanded_idx_mapping + i)
    factor = tl.load(repetition + row, mask=row >= 0, other=1.0)
    per_use = tl.load(frequency + row, mask=row >= 0, other=0.0)
    once = tl.load(presence + row, mask=row >= 0, other=0.0)
    if (factor != 1.0) | (per_use != 0.0) | (once != 0.0):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab_size
        x = tl.load(logits + i * vocab_size + token, mask=inside, other=0.0)
        # 2 what it has said: outputs, and the drafts before this row, which are the inputs of its rows 1 .. local_pos
        counts = tl.load(output_counts + row * counts_stride + token, mask=inside, other=0)
        for back in range(tl.load(expanded_local_pos + i)):
            counts += (token == tl.load(input_ids + i - back)).to(tl.int32)
        # 3 repetition, prompt included: positive logits shrink, negative ones grow; a product in both cases
        seen = (counts > 0) | (allowed_by(prompt_bitmask + row * bitmask_stride, token, inside) != 0)
        factors = tl.where(seen, factor, 1.0)
        x = x * tl.where(x > 0.0, tl.div_rn(1.0, factors), factors)
        # 4 frequency
        x = x - per_use * counts.to(tl.float32)
        # 5 presence
        x = x - once * (counts > 0).to(tl.float32)
        tl.store(logits + i * vocab_size + token, x, mask=inside)


def apply_penalties(
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    input_ids: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    prompt_bitmask: torch.Tensor,
    output_counts: torch.Tensor,
    num_logits: int,
    logits: torch.Tensor,
) -> None:
    """Make what has been said less likely: repetition, then frequency, then presence.

    Drafts before a row count as output. A penalty of 1 (repetition) or 0 (the others) changes no bit, and -inf stays.
    Products and differences are rounded one by one, as in the twin, never fused.

    Shapes: expanded_idx_mapping: int64[>= L]; expanded_local_pos, input_ids: int32[>= L]; by row: repetition,
    frequency, presence: float32[N], prompt_bitmask: int32[N, ceil(V / 32)], output_counts: int32[N, V];
    logits: float32[L, V], contiguous. Writes: logits.
    """
    vocab_size = logits.shape[1]
    width = tile(vocab_size)
    launch(
        _apply_penalties_kernel, (num_logits, triton.cdiv(vocab_size, width)), expanded_idx_mapping,
        expanded_local_pos, input_ids, repetition, frequency, presence, prompt_bitmask, prompt_bitmask.stride(0),
        output_counts, output_counts.stride(0), logits, vocab_size, BLOCK=width, enable_fp_fusion=False,
    )  # fmt: skip


@entry
@signature({"*i64": "idx_mapping sampled_token_ids", "*i32": "num_sampled penalised output_counts"}, WIDTH=1, BLOCK=256)
@signature({"*i64": "idx_mapping sampled_token_ids", "*i32": "num_sampled penalised output_counts"}, WIDTH=4, BLOCK=256)
@triton.jit(do_not_specialize=["num_reqs"])
def _count_sampled_tokens_kernel(
    idx_mapping, sampled_token_ids, num_sampled, penalised, num_reqs, output_counts, counts_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # 1 the request's row; nothing to do without one, or without a penalty
    row = tl.load(idx_mapping + i, mask=i < num_reqs, other=-1)
    n = tl.load(num_sampled + i, mask=row >= 0, other=0)
    counted = tl.load(penalised + row, mask=row >= 0, other=0) != 0
    # 2 count; a token may have been drawn more than once
    for j in range(WIDTH):
        drawn = counted & (j < n)
        token = tl.load(sampled_token_ids + i * WIDTH + j, mask=drawn, other=0)
        tl.atomic_add(output_counts + row * counts_stride + token, 1, mask=drawn, sem="relaxed")


def count_sampled_tokens(
    idx_mapping: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    num_sampled: torch.Tensor,
    penalised: torch.Tensor,
    num_reqs: int,
    output_counts: torch.Tensor,
) -> None:
    """Count what the step drew, for requests with a penalty.

    Shapes: idx_mapping: int64[>= R]; sampled_token_ids: int64[>= R, 1+K], contiguous; num_sampled: int32[>= R]; by row:
    penalised: int32[N], output_counts: int32[N, V]. Writes: output_counts of the batch's penalised rows.
    """
    width = tile(num_reqs, most=256)
    launch(
        _count_sampled_tokens_kernel, (triton.cdiv(num_reqs, width),), idx_mapping, sampled_token_ids, num_sampled,
        penalised, num_reqs, output_counts, output_counts.stride(0), WIDTH=sampled_token_ids.shape[1], BLOCK=width,
    )  # fmt: skip


class Penalties:
    """The penalties, and what each penalised row has said."""

    def __init__(self, max_num_reqs: int, vocab_size: int, req_states: RequestState, device: torch.device) -> None:
        self.req_states = req_states
        self.repetition_np = np.ones(max_num_reqs, np.float32)
        self.frequency_np, self.presence_np = np.zeros((2, max_num_reqs), np.float32)
        self.penalised_np = np.zeros(max_num_reqs, np.int32)  # 1 = any of them is not neutral
        # [N], device; set by `bind`
        self.repetition: torch.Tensor
        self.frequency: torch.Tensor
        self.presence: torch.Tensor
        self.penalised: torch.Tensor
        # -- kept on the device alone: the host does not know what was drawn --------------------------------------
        words = -(-vocab_size // NUM_BITS)
        self.prompt_bitmask = torch.zeros((max_num_reqs, words), dtype=torch.int32, device=device)
        self.output_counts = torch.zeros((max_num_reqs, vocab_size), dtype=torch.int32, device=device)
        self._added: list[int] = []  # penalised rows taken since the last `apply_staged_writes`
        self._ticket = 0  # of their device copy

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        return {
            "repetition": self.repetition_np, "frequency": self.frequency_np, "presence": self.presence_np,
            "penalised": self.penalised_np,
        }  # fmt: skip

    def bind(self, packed: PackedCopy) -> None:
        views = packed.views
        self.repetition, self.frequency, self.presence = views["repetition"], views["frequency"], views["presence"]
        self.penalised = views["penalised"]

    def row_tables(self) -> dict[str, torch.Tensor]:
        """Device tables by row that no step's copy overwrites."""
        return {"prompt_bitmask": self.prompt_bitmask, "output_counts": self.output_counts}

    def row_widths(self, row: int) -> dict[str, int]:
        """How much of the row's part of a table means anything, where that is not all of it."""
        if self.penalised_np[row]:
            return {}
        return {"prompt_bitmask": 0, "output_counts": 0}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        self.repetition_np[row] = params.repetition_penalty
        self.frequency_np[row] = params.frequency_penalty
        self.presence_np[row] = params.presence_penalty
        # Asked of the stored values: a penalty may round to a neutral one.
        neutral = self.repetition_np[row] == 1 and self.frequency_np[row] == 0 and self.presence_np[row] == 0
        self.penalised_np[row] = not neutral
        if not neutral:
            self._added.append(row)

    def pack(self, packed: PackedCopy) -> None:
        if self._added:
            self._ticket = packed.add(np.array(self._added, np.int64))

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        """Set up the rows taken since the last call; the request state must know their tokens."""
        if self._added:
            states = self.req_states
            count_prompt_and_output_tokens(
                packed.extra[self._ticket], states.prompt_len, states.total_len, states.all_token_ids,
                len(self._added), self.prompt_bitmask, self.output_counts,
            )  # fmt: skip
            self._added.clear()

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool(self.penalised_np[batch_rows].any())

    def apply(self, rows: LogitsRows, logits: torch.Tensor) -> None:
        apply_penalties(
            rows.expanded_idx_mapping, rows.expanded_local_pos, rows.input_ids, self.repetition, self.frequency,
            self.presence, self.prompt_bitmask, self.output_counts, rows.num_logits, logits,
        )  # fmt: skip

    def observe(self, idx_mapping: torch.Tensor, sampled_token_ids: torch.Tensor, num_sampled: torch.Tensor) -> None:
        """Tokens entered the state; for a batch that uses the step. Shapes: see `count_sampled_tokens`."""
        count_sampled_tokens(
            idx_mapping, sampled_token_ids, num_sampled, self.penalised, len(idx_mapping), self.output_counts
        )
