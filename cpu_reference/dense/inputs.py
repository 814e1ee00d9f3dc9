"""The flat batch of the dense layout, in NumPy: the row number is the batch index, so nothing is looked up.

Source: vLLM V1 input preparation. Twin: gpu_backend/dense/inputs.py.
"""

from __future__ import annotations

import numpy as np


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

    Shapes: num_scheduled_tokens: int32[num_reqs]; num_computed_tokens: int32[N]; all_token_ids: int32[N, M];
    query_start_loc: int32[N+1]; seq_lens: int32[N]; positions: int64[T]; input_ids: int32[T].
    Writes: all four whole; tails are the token count, 0, 0 and 0.

    >>> qsl, lens, pos, ids = np.zeros(4, np.int32), np.zeros(3, np.int32), np.zeros(6, np.int64), np.zeros(6, np.int32)
    >>> prepare_dense_inputs(np.int32([2, 1]), np.int32([1, 0, 9]), np.arange(12, dtype=np.int32).reshape(3, 4), 2,
    ...                      qsl, lens, pos, ids)
    >>> qsl.tolist(), lens.tolist(), pos.tolist(), ids.tolist()
    ([0, 2, 3, 3], [3, 1, 0], [1, 2, 0, 0, 0, 0], [1, 2, 4, 0, 0, 0])
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


def patch_input_ids(
    previous_rows: np.ndarray,
    query_start_loc: np.ndarray,
    last_sampled_tokens: np.ndarray,
    num_reqs: int,
    input_ids: np.ndarray,
) -> None:
    """Put the tokens into the input that the host has not seen: what requests drew in the step before.

    A request may have had another row then; what the row that it has now drew was somebody else's. (The reference has
    seen every token: this is a stage for runners that work ahead of their device.)

    Shapes: previous_rows: int64[N] by batch index (NO_ROW: the host knew all its tokens); query_start_loc: int32[N+1];
    last_sampled_tokens: int64[N] by the row of the step before; input_ids: int32[T].
    Writes: input_ids, at the last token of requests that have a previous row.

    >>> ids = np.int32([7, 8, 0, 0])
    >>> patch_input_ids(np.int64([-1, 0, 2]), np.int32([0, 2, 3, 4]), np.int64([41, 42, 43]), 3, ids)
    >>> ids.tolist()
    [7, 8, 41, 43]
    """
    # 1 requests whose last token the host has not seen
    late = np.flatnonzero(previous_rows[:num_reqs] >= 0)
    # 2 it is what the row drew that was theirs then
    input_ids[query_start_loc[late + 1] - 1] = last_sampled_tokens[previous_rows[late]]
