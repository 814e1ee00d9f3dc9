"""The flat batch of the dense layout, in NumPy: the row number is the batch index, so nothing is looked up.

The host builds all of it, but for the tokens of the step before, which it has not seen: the device puts those in.
Source: vLLM V1 input preparation. Twin: cpu_reference/dense/inputs.py.
"""

from __future__ import annotations

import numpy as np
import torch

from gpu_backend.triton_support import entry, launch, signature, tile, tl, triton
from runner_api.constants import NO_ROW


def prepare_dense_inputs(
    num_scheduled_tokens: np.ndarray,
    num_computed_tokens: np.ndarray,
    all_token_ids: np.ndarray,
    num_reqs: int,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    positions: np.ndarray,
    input_ids: np.ndarray,
) -> None:
    """Lay the scheduled tokens of rows 0 .. num_reqs - 1 side by side.

    On the host. A token that it has not seen is taken as what the table holds there, and is put in by
    `patch_input_ids`.

    Shapes: num_scheduled_tokens: int32[num_reqs]; num_computed_tokens: int32[N]; all_token_ids: int32[N, M];
    query_start_loc: int32[N+1]; seq_lens: int32[N]; positions: int64[T]; input_ids: int32[T].
    Writes: all four whole; tails are the token count, 0, 0 and 0.
    """
    # 1 run boundaries; the tail repeats the last, so that padding rows have no token
    ends = np.cumsum(num_scheduled_tokens)
    num_tokens = int(ends[-1])
    query_start_loc[0] = 0
    query_start_loc[1 : num_reqs + 1] = ends
    query_start_loc[num_reqs + 1 :] = num_tokens
    # 2 the row of each token, and its place in its row's chunk
    rows = np.repeat(np.arange(num_reqs), num_scheduled_tokens)
    offset = np.arange(num_tokens) - np.repeat(ends - num_scheduled_tokens, num_scheduled_tokens)
    # 3 positions and lengths
    positions[:num_tokens] = num_computed_tokens[rows] + offset
    positions[num_tokens:] = 0
    seq_lens[:num_reqs] = num_computed_tokens[:num_reqs] + num_scheduled_tokens
    seq_lens[num_reqs:] = 0
    # 4 token ids by flat index; 64 bits wide, and with the table's own width
    flat = positions[:num_tokens] + rows * all_token_ids.shape[1]
    input_ids[:num_tokens] = all_token_ids.reshape(-1)[flat]
    input_ids[num_tokens:] = 0


@entry
@signature({"*i64": "previous_rows last_sampled_tokens", "*i32": "query_start_loc input_ids"}, NO_ROW=NO_ROW, BLOCK=256)
@triton.jit(do_not_specialize=["num_reqs"])
def _patch_input_ids_kernel(
    previous_rows, query_start_loc, last_sampled_tokens, num_reqs, input_ids, NO_ROW: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # 1 requests whose last token the host has not seen
    row = tl.load(previous_rows + i, mask=i < num_reqs, other=NO_ROW)
    late = row >= 0
    # 2 it is what the row drew that was theirs then
    token = tl.load(last_sampled_tokens + row, mask=late, other=0)
    end = tl.load(query_start_loc + i + 1, mask=late, other=0)
    tl.store(input_ids + end - 1, token.to(tl.int32), mask=late)


def patch_input_ids(
    previous_rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    num_reqs: int,
    input_ids: torch.Tensor,
) -> None:
    """Put the tokens into the input that the host has not seen: what requests drew in the step before.

    A request may have had another row then; what the row that it has now drew was somebody else's. A program owns a
    tile of requests.

    Shapes: previous_rows: int64[N] by batch index (NO_ROW: the host knew all its tokens); query_start_loc: int32[N+1];
    last_sampled_tokens: int64[N] by the row of the step before; input_ids: int32[T].
    Writes: input_ids, at the last token of requests that have a previous row.
    """
    width = tile(len(previous_rows))
    launch(
        _patch_input_ids_kernel, (triton.cdiv(num_reqs, width),), previous_rows, query_start_loc, last_sampled_tokens,
        num_reqs, input_ids, NO_ROW=NO_ROW, BLOCK=width,
    )  # fmt: skip
