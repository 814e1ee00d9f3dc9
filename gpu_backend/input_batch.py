"""From plan and persistent rows to the flat inputs of one step, and back into the rows after sampling.

A batch is ragged: request i owns the flat tokens [query_start_loc[i], query_start_loc[i+1]). Every function here is a
stage: it reads rows through `idx_mapping` and fills arrays of fixed size and address, padding included. One program
serves one request; where there is padding to fill, one more fills it.
N rows, R requests, T tokens at most, t tokens now, L logits rows. Twin: cpu_reference/input_batch.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gpu_backend.triton_support import block, entry, launch, signature, tile, tl, triton
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


@entry
@signature({"*i32": "num_scheduled_tokens query_start_loc"}, BLOCK=1024)
@triton.jit(do_not_specialize=["num_reqs", "size"])
def _prepare_query_start_loc_kernel(num_scheduled_tokens, num_reqs, query_start_loc, size, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    # 1 exclusive prefix sum
    before = tl.load(num_scheduled_tokens + i - 1, mask=(i > 0) & (i <= num_reqs), other=0)
    # 2 tail: the number of real tokens, never the padded one
    tl.store(query_start_loc + i, tl.cumsum(before, 0), mask=i < size)


def prepare_query_start_loc(num_scheduled_tokens: torch.Tensor, num_reqs: int, query_start_loc: torch.Tensor) -> None:
    """Running token counts; the tail repeats the total, so that the array never decreases.

    Shapes: num_scheduled_tokens: int32[R]; query_start_loc: int32[N+1]. Writes: query_start_loc whole. One program.
    """
    size = len(query_start_loc)
    launch(
        _prepare_query_start_loc_kernel, (1,), num_scheduled_tokens, num_reqs, query_start_loc, size,
        BLOCK=block(size, most=triton.next_power_of_2(size)),
    )  # fmt: skip


@entry
@signature(
    {"*i64": "idx_mapping",
     "*i32": "query_start_loc all_token_ids prefill_len num_computed_tokens input_ids next_prefill_tokens"},
    LOOKAHEAD=1, LOOKAHEAD_BLOCK=1, BLOCK=1024,
)  # fmt: skip
@signature(
    {"*i64": "idx_mapping",
     "*i32": "query_start_loc all_token_ids prefill_len num_computed_tokens input_ids next_prefill_tokens"},
    LOOKAHEAD=3, LOOKAHEAD_BLOCK=4, BLOCK=1024,
)  # fmt: skip
@triton.jit(do_not_specialize=["next_stride"])
def _prepare_prefill_inputs_kernel(
    idx_mapping, query_start_loc, all_token_ids, all_stride, prefill_len, num_computed_tokens, input_ids,
    next_prefill_tokens, next_stride, LOOKAHEAD: tl.constexpr, LOOKAHEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    # 1 row, query range, progress
    row = tl.load(idx_mapping + i)
    start = tl.load(query_start_loc + i)
    query_len = tl.load(query_start_loc + i + 1) - start
    computed = tl.load(num_computed_tokens + row)
    known = tl.load(prefill_len + row)
    if computed < known:
        tokens = all_token_ids + row * all_stride
        # 2 copy the chunk
        for first in range(0, query_len, BLOCK):
            j = first + tl.arange(0, BLOCK)
            ids = tl.load(tokens + computed + j, mask=j < query_len, other=0)
            tl.store(input_ids + start + j, ids, mask=j < query_len)
        # 3 the tokens behind it, for a drafter
        j = tl.arange(0, LOOKAHEAD_BLOCK)
        p = computed + query_len + j
        ids = tl.load(tokens + p, mask=(j < LOOKAHEAD) & (p < known), other=0)
        tl.store(next_prefill_tokens + j.to(tl.int64) * next_stride + row, ids, mask=j < LOOKAHEAD)


def prepare_prefill_inputs(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    all_token_ids: torch.Tensor,
    prefill_len: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    num_reqs: int,
    input_ids: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
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
    launch(
        _prepare_prefill_inputs_kernel, (num_reqs,), idx_mapping, query_start_loc, all_token_ids,
        all_token_ids.stride(0), prefill_len, num_computed_tokens, input_ids, next_prefill_tokens,
        next_prefill_tokens.stride(0), LOOKAHEAD=lookahead, LOOKAHEAD_BLOCK=block(lookahead, least=1),
        BLOCK=tile(len(input_ids)),
    )  # fmt: skip


@entry
@signature({"*i64": "idx_mapping positions", "*i32": "query_start_loc num_computed_tokens seq_lens"}, BLOCK=1024)
@triton.jit(do_not_specialize=["num_reqs", "max_num_tokens", "max_num_reqs"])
def _prepare_pos_seq_lens_kernel(
    idx_mapping, query_start_loc, num_computed_tokens, num_reqs, positions, max_num_tokens, seq_lens, max_num_reqs,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    start = tl.load(query_start_loc + i)
    if i < num_reqs:
        # 1 tokens computed before this step, by batch index
        computed = tl.load(num_computed_tokens + tl.load(idx_mapping + i))
        # 2 positions count on from there
        query_len = tl.load(query_start_loc + i + 1) - start
        for first in range(0, query_len, BLOCK):
            j = first + tl.arange(0, BLOCK)
            tl.store(positions + start + j, computed.to(tl.int64) + j, mask=j < query_len)
        # 3 keys: what was there plus what is added now
        tl.store(seq_lens + i, computed + query_len)
    else:
        for first in range(start, max_num_tokens, BLOCK):
            k = first + tl.arange(0, BLOCK)
            tl.store(positions + k, tl.zeros((BLOCK,), tl.int64), mask=k < max_num_tokens)
        # 4 padding rows have no keys
        for first in range(num_reqs, max_num_reqs, BLOCK):
            k = first + tl.arange(0, BLOCK)
            tl.store(seq_lens + k, tl.zeros((BLOCK,), tl.int32), mask=k < max_num_reqs)


def prepare_pos_seq_lens(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    num_reqs: int,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Absolute position of each token, and how many keys each request attends over.

    Shapes: idx_mapping: int64[N]; query_start_loc: int32[N+1]; num_computed_tokens: int32[N] by row;
    positions: int64[T]; seq_lens: int32[N]. Writes: both whole; tails are 0. A stale length in a padded row would
    make attention walk blocks that someone else owns.
    """
    launch(
        _prepare_pos_seq_lens_kernel, (num_reqs + 1,), idx_mapping, query_start_loc, num_computed_tokens, num_reqs,
        positions, len(positions), seq_lens, len(seq_lens), BLOCK=tile(len(positions)),
    )  # fmt: skip


@entry
@signature(
    {"*i64": "idx_mapping expanded_idx_mapping", "*i32": "cu_num_logits expanded_local_pos"}, NO_ROW=NO_ROW, BLOCK=1024
)
@triton.jit(do_not_specialize=["num_reqs", "size"])
def _expand_idx_mapping_kernel(
    idx_mapping, cu_num_logits, num_reqs, expanded_idx_mapping, expanded_local_pos, size, NO_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    start = tl.load(cu_num_logits + i)
    if i < num_reqs:
        # 1 owner and offset of each logits row
        end = tl.load(cu_num_logits + i + 1)
        row = tl.load(idx_mapping + i)
        for first in range(start, end, BLOCK):
            k = first + tl.arange(0, BLOCK)
            # 2 its persistent row
            tl.store(expanded_idx_mapping + k, tl.zeros((BLOCK,), tl.int64) + row, mask=k < end)
            tl.store(expanded_local_pos + k, k - start, mask=k < end)
    else:
        # 3 tail
        for first in range(start, size, BLOCK):
            k = first + tl.arange(0, BLOCK)
            tl.store(expanded_idx_mapping + k, tl.full((BLOCK,), NO_ROW, tl.int64), mask=k < size)
            tl.store(expanded_local_pos + k, tl.zeros((BLOCK,), tl.int32), mask=k < size)


def expand_idx_mapping(
    idx_mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_reqs: int,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
) -> None:
    """Repeat each request's row for each of its logits rows, and number these from 0.

    Shapes: idx_mapping: int64[N]; cu_num_logits: int32[N+1]; expanded_idx_mapping: int64[N*(1+K)];
    expanded_local_pos: int32[N*(1+K)]. Writes: both whole; tails are NO_ROW and 0.
    """
    size = len(expanded_idx_mapping)
    launch(
        _expand_idx_mapping_kernel, (num_reqs + 1,), idx_mapping, cu_num_logits, num_reqs, expanded_idx_mapping,
        expanded_local_pos, size, NO_ROW=NO_ROW, BLOCK=tile(size),
    )  # fmt: skip


@entry
@signature(
    {"*i64": "idx_mapping last_sampled_tokens draft_tokens logits_indices",
     "*i32": "query_start_loc seq_lens prefill_len cu_num_logits input_ids"},
    LOGITS_BLOCK=8, BLOCK=1024,
)  # fmt: skip
@signature(  # no drafts: their table has no columns, and torch gives it a stride of 1
    {"*i64": "idx_mapping last_sampled_tokens draft_tokens logits_indices",
     "*i32": "query_start_loc seq_lens prefill_len cu_num_logits input_ids"},
    draft_stride=1, LOGITS_BLOCK=1, BLOCK=1024,
)  # fmt: skip
@triton.jit(do_not_specialize=["num_reqs", "max_num_tokens", "max_num_logits"])
def _combine_sampled_and_draft_tokens_kernel(
    idx_mapping, query_start_loc, seq_lens, prefill_len, last_sampled_tokens, draft_tokens, draft_stride,
    cu_num_logits, num_reqs, input_ids, max_num_tokens, logits_indices, max_num_logits, LOGITS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    first_logit = tl.load(cu_num_logits + i)
    if i < num_reqs:
        # 1 row, end of the query, logits rows and drafts of this request
        row = tl.load(idx_mapping + i)
        end = tl.load(query_start_loc + i + 1)
        num_logits = tl.load(cu_num_logits + i + 1) - first_logit
        num_drafts = num_logits - 1
        # 2 its last num_logits tokens get logits
        j = tl.arange(0, LOGITS_BLOCK)
        tl.store(logits_indices + first_logit + j, (end - num_logits + j).to(tl.int64), mask=j < num_logits)
        # 3 a pure prefill row takes all its tokens from the known ones
        seq_len = tl.load(seq_lens + i)
        known = tl.load(prefill_len + row)
        if seq_len > known:
            # 4 the token sampled last, unless the first logits position is still a known one
            if seq_len - num_logits >= known:
                tl.store(input_ids + end - num_logits, tl.load(last_sampled_tokens + row).to(tl.int32))
            # 5 the drafts
            drafts = tl.load(draft_tokens + row * draft_stride + j, mask=j < num_drafts, other=0)
            tl.store(input_ids + end - num_drafts + j, drafts.to(tl.int32), mask=j < num_drafts)
    else:
        # 6 tails
        for first in range(first_logit, max_num_logits, BLOCK):
            k = first + tl.arange(0, BLOCK)
            tl.store(logits_indices + k, tl.zeros((BLOCK,), tl.int64), mask=k < max_num_logits)
        for first in range(tl.load(query_start_loc + i), max_num_tokens, BLOCK):
            k = first + tl.arange(0, BLOCK)
            tl.store(input_ids + k, tl.zeros((BLOCK,), tl.int32), mask=k < max_num_tokens)


def combine_sampled_and_draft_tokens(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_reqs: int,
    input_ids: torch.Tensor,
    logits_indices: torch.Tensor,
) -> None:
    """Write what the host has never seen into the input: the last sampled token and the drafts; name the rows that
    get logits, which are the last ones of each request.

    Shapes: idx_mapping: int64[N]; query_start_loc: int32[N+1]; seq_lens: int32[N]; prefill_len: int32[N] by row;
    last_sampled_tokens: int64[N] by row; draft_tokens: int64[N, K] by row; cu_num_logits: int32[N+1];
    input_ids: int32[T]; logits_indices: int64[N*(1+K)].
    Writes: logits_indices whole (tail 0); in input_ids the decode tokens and the tail (0, a valid token id).
    """
    launch(
        _combine_sampled_and_draft_tokens_kernel, (num_reqs + 1,), idx_mapping, query_start_loc, seq_lens,
        prefill_len, last_sampled_tokens, draft_tokens, draft_tokens.stride(0), cu_num_logits, num_reqs, input_ids,
        len(input_ids), logits_indices, len(logits_indices),
        LOGITS_BLOCK=block(1 + draft_tokens.shape[1], least=1), BLOCK=tile(len(input_ids)),
    )  # fmt: skip


@entry
@signature({"*i64": "idx_mapping", "*i32": "seq_lens prefill_len cu_num_logits num_sampled num_rejected"}, BLOCK=256)
@triton.jit(do_not_specialize=["num_reqs"])
def _count_sampled_and_rejected_kernel(
    idx_mapping, seq_lens, prefill_len, cu_num_logits, num_reqs, num_sampled, num_rejected, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < num_reqs
    # 1 more known tokens are to come
    row = tl.load(idx_mapping + i, mask=here, other=0)
    unfinished = tl.load(seq_lens + i, mask=here, other=0) < tl.load(prefill_len + row, mask=here, other=0)
    low = tl.load(cu_num_logits + i, mask=here, other=0)
    num_logits = tl.load(cu_num_logits + i + 1, mask=here, other=0) - low
    # 2 count
    sampled = tl.load(num_sampled + i, mask=here, other=0)
    tl.store(num_sampled + i, tl.where(unfinished, 0, sampled), mask=here)
    tl.store(num_rejected + i, tl.where(unfinished, 0, num_logits - sampled), mask=here)


def count_sampled_and_rejected(
    idx_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_reqs: int,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
) -> None:
    """Discard the samples of unfinished prefills; what was neither sampled nor discarded was rejected.

    Shapes: idx_mapping: int64[N]; seq_lens: int32[N]; prefill_len: int32[N] by row; cu_num_logits: int32[N+1];
    num_sampled (in and out), num_rejected: int32[N]. Writes: entries < num_reqs of both.
    """
    width = tile(len(num_sampled))
    launch(
        _count_sampled_and_rejected_kernel, (triton.cdiv(num_reqs, width),), idx_mapping, seq_lens, prefill_len,
        cu_num_logits, num_reqs, num_sampled, num_rejected, BLOCK=width,
    )  # fmt: skip


@entry
@signature(
    {"*i64": "idx_mapping sampled_token_ids last_sampled_tokens",
     "*i32": "query_start_loc num_sampled num_rejected total_len all_token_ids num_computed_tokens"},
    BLOCK=8,
)  # fmt: skip
@signature(  # no drafts: one token a request
    {"*i64": "idx_mapping sampled_token_ids last_sampled_tokens",
     "*i32": "query_start_loc num_sampled num_rejected total_len all_token_ids num_computed_tokens"},
    sampled_stride=1, BLOCK=1,
)  # fmt: skip
@triton.jit
def _post_update_kernel(
    idx_mapping, query_start_loc, sampled_token_ids, sampled_stride, num_sampled, num_rejected, last_sampled_tokens,
    total_len, all_token_ids, all_stride, num_computed_tokens, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    # 1 row and counts
    row = tl.load(idx_mapping + i)
    if row >= 0:
        n = tl.load(num_sampled + i)
        # 2 the tokens join the known ones; the last of them is the next step's input
        if n > 0:
            total = tl.load(total_len + row)
            j = tl.arange(0, BLOCK)
            tokens = tl.load(sampled_token_ids + i * sampled_stride + j, mask=j < n, other=0)
            tl.store(all_token_ids + row * all_stride + total + j, tokens.to(tl.int32), mask=j < n)
            last = tl.load(sampled_token_ids + i * sampled_stride + n - 1)
            tl.store(last_sampled_tokens + row, last)
            tl.store(total_len + row, total + n)
        # 3 every query token now has its KV, except those of rejected drafts
        query_len = tl.load(query_start_loc + i + 1) - tl.load(query_start_loc + i)
        computed = tl.load(num_computed_tokens + row)
        tl.store(num_computed_tokens + row, computed + query_len - tl.load(num_rejected + i))


def post_update(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    num_reqs: int,
    last_sampled_tokens: torch.Tensor,
    total_len: torch.Tensor,
    all_token_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    """Advance the rows by what the step computed and drew.

    Shapes: idx_mapping: int64[N] (a negative row is skipped); query_start_loc: int32[N+1]; sampled_token_ids:
    int64[N, 1+K]; num_sampled, num_rejected: int32[N]; the rest by row: last_sampled_tokens: int64[N], total_len,
    num_computed_tokens: int32[N], all_token_ids: int32[N, M].
    Writes: the batch's rows of the last four.
    """
    launch(
        _post_update_kernel, (num_reqs,), idx_mapping, query_start_loc, sampled_token_ids,
        sampled_token_ids.stride(0), num_sampled, num_rejected, last_sampled_tokens, total_len, all_token_ids,
        all_token_ids.stride(0), num_computed_tokens, BLOCK=block(sampled_token_ids.shape[1], least=1),
    )  # fmt: skip
