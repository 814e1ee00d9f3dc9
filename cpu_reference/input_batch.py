"""From plan and persistent rows to the flat inputs of one step, and back into the rows after sampling.

A batch is ragged: request i owns the flat tokens [query_start_loc[i], query_start_loc[i+1]). Every function here is a
stage: it reads rows through `idx_mapping` and fills arrays of fixed size and address, padding included.
N rows, R requests, T tokens at most, t tokens now, L logits rows. Twin: gpu_backend/input_batch.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cpu_reference.ragged import token_owners
from runner_api.constants import NO_ROW


def sort_batch_req_ids(
    num_scheduled_tokens: Mapping[str, int], draft_tokens: Mapping[str, Sequence[int]], decode_query_len: int
) -> list[str]:
    """Batch order: rows with drafts, then full-width decodes, then the rest by length; ties keep the plan's order.

    Attention takes everything before the first long row as decodes, so the short ones must lead.

    >>> sort_batch_req_ids({"P": 300, "D": 1, "C": 12}, {}, 1)
    ['D', 'C', 'P']
    """
    return sorted(
        num_scheduled_tokens,
        key=lambda r: (not draft_tokens.get(r), num_scheduled_tokens[r] != decode_query_len, num_scheduled_tokens[r]),
    )


def prepare_query_start_loc(num_scheduled_tokens: np.ndarray, num_reqs: int, query_start_loc: np.ndarray) -> None:
    """Running token counts; the tail repeats the total, so that the array never decreases.

    Shapes: num_scheduled_tokens: int32[R]; query_start_loc: int32[N+1]. Writes: query_start_loc whole.

    >>> out = np.full(6, -9, np.int32)
    >>> prepare_query_start_loc(np.int32([2, 0, 1]), 3, out)
    >>> out.tolist()
    [0, 2, 2, 3, 3, 3]
    """
    # 1 exclusive prefix sum
    query_start_loc[0] = 0
    np.cumsum(num_scheduled_tokens[:num_reqs], out=query_start_loc[1 : num_reqs + 1])
    # 2 tail: the number of real tokens, never the padded one
    query_start_loc[num_reqs + 1 :] = query_start_loc[num_reqs]


def prepare_prefill_inputs(
    idx_mapping: np.ndarray,
    query_start_loc: np.ndarray,
    all_token_ids: np.ndarray,
    prefill_len: np.ndarray,
    num_computed_tokens: np.ndarray,
    num_reqs: int,
    input_ids: np.ndarray,
    next_prefill_tokens: np.ndarray,
) -> None:
    """Copy known tokens into the input of every request that still computes known tokens.

    The copy is not clipped at prefill_len: positions past it belong to drafts and are written by
    `combine_sampled_and_draft_tokens` afterwards.

    Shapes: idx_mapping: int64[N]; query_start_loc: int32[N+1]; all_token_ids: int32[N, M]; prefill_len,
    num_computed_tokens: int32[N] by row; input_ids: int32[T]; next_prefill_tokens: int32[lookahead, N] by row.
    Writes: the query ranges of prefilling requests in input_ids; for their rows the tokens that follow the chunk in
    next_prefill_tokens (0 past the end).
    """
    lookahead = next_prefill_tokens.shape[0]
    for i in range(num_reqs):
        # 1 row, query range, progress
        row = idx_mapping[i]
        start, end = query_start_loc[i], query_start_loc[i + 1]
        computed = num_computed_tokens[row]
        if computed >= prefill_len[row]:
            continue
        # 2 copy the chunk
        input_ids[start:end] = all_token_ids[row, computed : computed + end - start]
        # 3 the tokens behind it, for a drafter
        for j in range(lookahead):
            p = computed + end - start + j
            next_prefill_tokens[j, row] = all_token_ids[row, p] if p < prefill_len[row] else 0


def prepare_pos_seq_lens(
    idx_mapping: np.ndarray,
    query_start_loc: np.ndarray,
    num_computed_tokens: np.ndarray,
    num_reqs: int,
    positions: np.ndarray,
    seq_lens: np.ndarray,
) -> None:
    """Absolute position of each token, and how many keys each request attends over.

    Shapes: idx_mapping: int64[N]; query_start_loc: int32[N+1]; num_computed_tokens: int32[N] by row;
    positions: int64[T]; seq_lens: int32[N]. Writes: both whole; tails are 0. A stale length in a padded row would
    make attention walk blocks that someone else owns.
    """
    # 1 tokens computed before this step, by batch index
    computed = num_computed_tokens[idx_mapping[:num_reqs]].astype(np.int64)
    # 2 positions count on from there
    batch_idx, offset = token_owners(query_start_loc, num_reqs)
    positions[: len(batch_idx)] = computed[batch_idx] + offset
    positions[len(batch_idx) :] = 0
    # 3 keys: what was there plus what is added now
    query_len = query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
    seq_lens[:num_reqs] = computed + query_len
    # 4 padding rows have no keys
    seq_lens[num_reqs:] = 0


def expand_idx_mapping(
    idx_mapping: np.ndarray,
    cu_num_logits: np.ndarray,
    num_reqs: int,
    expanded_idx_mapping: np.ndarray,
    expanded_local_pos: np.ndarray,
) -> None:
    """Repeat each request's row for each of its logits rows, and number these from 0.

    Shapes: idx_mapping: int64[N]; cu_num_logits: int32[N+1]; expanded_idx_mapping: int64[N*(1+K)];
    expanded_local_pos: int32[N*(1+K)]. Writes: both whole; tails are NO_ROW and 0.
    """
    # 1 owner and offset of each logits row
    batch_idx, local_pos = token_owners(cu_num_logits, num_reqs)
    num_logits = len(batch_idx)
    # 2 its persistent row
    expanded_idx_mapping[:num_logits] = idx_mapping[batch_idx]
    expanded_local_pos[:num_logits] = local_pos
    # 3 tail
    expanded_idx_mapping[num_logits:] = NO_ROW
    expanded_local_pos[num_logits:] = 0


def combine_sampled_and_draft_tokens(
    idx_mapping: np.ndarray,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    prefill_len: np.ndarray,
    last_sampled_tokens: np.ndarray,
    draft_tokens: np.ndarray,
    cu_num_logits: np.ndarray,
    num_reqs: int,
    input_ids: np.ndarray,
    logits_indices: np.ndarray,
) -> None:
    """Write what the host has never seen into the input: the last sampled token and the drafts; name the rows that
    get logits, which are the last ones of each request.

    Shapes: idx_mapping: int64[N]; query_start_loc: int32[N+1]; seq_lens: int32[N]; prefill_len: int32[N] by row;
    last_sampled_tokens: int64[N] by row; draft_tokens: int64[N, K] by row; cu_num_logits: int32[N+1];
    input_ids: int32[T]; logits_indices: int64[N*(1+K)].
    Writes: logits_indices whole (tail 0); in input_ids the decode tokens and the tail (0, a valid token id).
    """
    for i in range(num_reqs):
        # 1 row, end of the query, logits rows and drafts of this request
        row = idx_mapping[i]
        end = query_start_loc[i + 1]
        first_logit, num_logits = cu_num_logits[i], cu_num_logits[i + 1] - cu_num_logits[i]
        num_drafts = num_logits - 1
        # 2 its last num_logits tokens get logits
        logits_indices[first_logit : first_logit + num_logits] = np.arange(end - num_logits, end)
        # 3 a pure prefill row takes all its tokens from the known ones
        if seq_lens[i] <= prefill_len[row]:
            continue
        # 4 the token sampled last, unless the first logits position is still a known one
        if seq_lens[i] - num_logits >= prefill_len[row]:
            input_ids[end - num_logits] = last_sampled_tokens[row]
        # 5 the drafts
        if num_drafts > 0:
            input_ids[end - num_drafts : end] = draft_tokens[row, :num_drafts]
    # 6 tails
    logits_indices[cu_num_logits[num_reqs] :] = 0
    input_ids[query_start_loc[num_reqs] :] = 0


def count_sampled_and_rejected(
    idx_mapping: np.ndarray,
    seq_lens: np.ndarray,
    prefill_len: np.ndarray,
    cu_num_logits: np.ndarray,
    num_reqs: int,
    num_sampled: np.ndarray,
    num_rejected: np.ndarray,
) -> None:
    """Discard the samples of unfinished prefills; what was neither sampled nor discarded was rejected.

    Shapes: idx_mapping: int64[N]; seq_lens: int32[N]; prefill_len: int32[N] by row; cu_num_logits: int32[N+1];
    num_sampled (in and out), num_rejected: int32[N]. Writes: entries < num_reqs of both.
    """
    # 1 more known tokens are to come
    unfinished = seq_lens[:num_reqs] < prefill_len[idx_mapping[:num_reqs]]
    num_logits = cu_num_logits[1 : num_reqs + 1] - cu_num_logits[:num_reqs]
    # 2 count
    num_sampled[:num_reqs] = np.where(unfinished, 0, num_sampled[:num_reqs])
    num_rejected[:num_reqs] = np.where(unfinished, 0, num_logits - num_sampled[:num_reqs])


def post_update(
    idx_mapping: np.ndarray,
    query_start_loc: np.ndarray,
    sampled_token_ids: np.ndarray,
    num_sampled: np.ndarray,
    num_rejected: np.ndarray,
    num_reqs: int,
    last_sampled_tokens: np.ndarray,
    total_len: np.ndarray,
    all_token_ids: np.ndarray,
    num_computed_tokens: np.ndarray,
) -> None:
    """Advance the rows by what the step computed and drew.

    Shapes: idx_mapping: int64[N] (a negative row is skipped); query_start_loc: int32[N+1]; sampled_token_ids:
    int64[N, 1+K]; num_sampled, num_rejected: int32[N]; the rest by row: last_sampled_tokens: int64[N], total_len,
    num_computed_tokens: int32[N], all_token_ids: int32[N, M].
    Writes: the batch's rows of the last four.
    """
    for i in range(num_reqs):
        # 1 row and counts
        row = idx_mapping[i]
        if row < 0:
            continue
        n = num_sampled[i]
        # 2 the tokens join the known ones; the last of them is the next step's input
        if n > 0:
            total = total_len[row]
            all_token_ids[row, total : total + n] = sampled_token_ids[i, :n]
            last_sampled_tokens[row] = sampled_token_ids[i, n - 1]
            total_len[row] = total + n
        # 3 every query token now has its KV, except those of rejected drafts
        query_len = query_start_loc[i + 1] - query_start_loc[i]
        num_computed_tokens[row] += query_len - num_rejected[i]
