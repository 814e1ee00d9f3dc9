"""Paged attention as one kernel: prefill, decode and any mix of them. Twin: cpu_reference/attention.py.

A program owns one request, one tile of its queries and one KV head; all query heads that share the KV head stand in
the same tile, so that each key is loaded once for all of them. Softmax runs online in float32 over tiles of keys.
"""

from __future__ import annotations

import math

import torch

from gpu_backend.triton_support import INTERPRETED, block, entry, launch, signature, tile, tl, triton

_CACHES = "query key_cache value_cache out"
_INDICES = "block_table query_start_loc seq_lens"


@entry
@signature(
    {"*fp32": _CACHES, "*i32": _INDICES, "fp32": "scale_log2"},
    BLOCK_SIZE=16, HEAD_SIZE=64, HEAD_TILE=64, QUERIES_PER_KV=3, WINDOW=0, ROWS=32, KEYS=32, DOT_DTYPE=tl.float32,
)  # fmt: skip
@signature(
    {"*fp16": _CACHES, "*i32": _INDICES, "fp32": "scale_log2"},
    BLOCK_SIZE=16, HEAD_SIZE=128, HEAD_TILE=128, QUERIES_PER_KV=4, WINDOW=0, ROWS=64, KEYS=64, DOT_DTYPE=tl.float16,
)  # fmt: skip
@signature(
    {"*bf16": _CACHES, "*i32": _INDICES, "fp32": "scale_log2"},
    BLOCK_SIZE=16, HEAD_SIZE=80, HEAD_TILE=128, QUERIES_PER_KV=1, WINDOW=0, ROWS=16, KEYS=64, DOT_DTYPE=tl.bfloat16,
)  # fmt: skip
@signature(
    {"*bf16": _CACHES, "*i32": _INDICES, "fp32": "scale_log2"},
    BLOCK_SIZE=32, HEAD_SIZE=128, HEAD_TILE=128, QUERIES_PER_KV=8, WINDOW=512, ROWS=64, KEYS=64, DOT_DTYPE=tl.bfloat16,
)  # fmt: skip
@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def _paged_attention_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    query_start_loc,
    seq_lens,
    num_reqs,
    num_tokens,
    scale_log2,
    out,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,  # tokens of one KV block
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,  # HEAD_SIZE, up to a power of two
    QUERIES_PER_KV: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 = none
    ROWS: tl.constexpr,  # of a query tile: row r is query r // QUERIES_PER_KV, head r % QUERIES_PER_KV
    KEYS: tl.constexpr,  # of a key tile
    DOT_DTYPE: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // QUERIES_PER_KV
    i = tl.program_id(0)
    tile = tl.program_id(1)
    kv_head = tl.program_id(2)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_TILE)
    # Rows behind the last whole query belong to nobody.
    owned = row < QUERIES * QUERIES_PER_KV
    head = kv_head * QUERIES_PER_KV + row % QUERIES_PER_KV
    out_head = head[:, None] * out_head_stride + dim[None, :]
    in_head = dim < HEAD_SIZE

    if i == num_reqs:
        # The program behind the last request: tokens that belong to no request.
        tail = tl.load(query_start_loc + num_reqs)
        for first_token in range(tail + tile * QUERIES, num_tokens, tl.num_programs(1) * QUERIES):
            token = first_token + row // QUERIES_PER_KV
            place = out + token.to(tl.int64)[:, None] * out_token_stride + out_head
            blank = tl.zeros([ROWS, HEAD_TILE], out.dtype.element_ty)
            tl.store(place, blank, mask=(owned & (token < num_tokens))[:, None] & in_head[None, :])
        return

    # 1 the request's queries; an empty row (padding) has none
    start = tl.load(query_start_loc + i)
    query_len = tl.load(query_start_loc + i + 1) - start
    seq_len = tl.load(seq_lens + i)
    first_query = tile * QUERIES
    if first_query >= query_len:
        return
    index = first_query + row // QUERIES_PER_KV
    position = seq_len - query_len + index
    token = (start + index).to(tl.int64)
    in_tile = (owned & (index < query_len))[:, None] & in_head[None, :]
    place = query + token[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(place, mask=in_tile, other=0.0).to(DOT_DTYPE)
    # Every key in [first_key, end_key) is seen by at least one query of the tile; no other is read.
    end_key = seq_len - query_len + tl.minimum(first_query + QUERIES, query_len)
    if WINDOW > 0:
        first_key = tl.maximum(seq_len - query_len + first_query - WINDOW + 1, 0)
    else:
        first_key = 0

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_TILE], tl.float32)
    for tile_start in range(first_key, end_key, KEYS):
        # 2 its keys and values, tile by tile; block ids are widened before they are multiplied
        j = tile_start + tl.arange(0, KEYS)
        known = j < end_key
        kv_block = tl.load(block_table + i * table_stride + j // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        slot = j % BLOCK_SIZE
        key_place = kv_block * key_block_stride + slot * key_slot_stride + kv_head * key_head_stride
        value_place = kv_block * value_block_stride + slot * value_slot_stride + kv_head * value_head_stride
        readable = known[None, :] & in_head[:, None]
        k = tl.load(key_cache + key_place[None, :] + dim[:, None], mask=readable, other=0.0).to(DOT_DTYPE)
        readable = known[:, None] & in_head[None, :]
        v = tl.load(value_cache + value_place[:, None] + dim[None, :], mask=readable, other=0.0).to(DOT_DTYPE)
        # 3 scores, in units of log 2
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        # 4 a query sees no key behind the window and none after itself
        seen = known[None, :] & (j[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (position[:, None] - j[None, :] < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        # 5 softmax, weighted sum, both rescaled when a higher score comes; a row that has seen no key (one behind the
        # last query, under a window) stays 0, where -inf less -inf would be NaN
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(highest - shift)
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(DOT_DTYPE), v, input_precision="ieee")
        highest = new_highest
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + token[:, None] * out_token_stride + out_head, result.to(out.dtype.element_ty), mask=in_tile)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_reqs: int,
    scale: float,
    window: int | None,
    max_query_len: int,
    out: torch.Tensor,
) -> None:
    """softmax(q k^T * scale) v over the request's own keys, causal, read through its block table.

    Query head h uses KV head h // (num_heads // num_kv_heads). The j-th query of a request stands at position
    seq_len - query_len + j and sees keys up to and including its own, at most `window` of them.

    Shapes: query, out: [tp, num_heads, head_size]; caches: [num_blocks, block_size, num_kv_heads, head_size];
    block_table: int32[num_reqs, W]; query_start_loc: int32[num_reqs+1]; seq_lens: int32[num_reqs].
    max_query_len: an upper bound of the query lengths; queries past it are not computed (the twin refuses them).
    Writes: out whole; tokens that belong to no request get 0.
    """
    num_tokens, num_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    for tensor in (query, key_cache, value_cache, block_table, out):
        assert tensor.stride(-1) == 1, "the last axis must be contiguous"
    queries_per_kv = num_heads // num_kv_heads
    rows, keys = _tile_sizes(max_query_len * queries_per_kv, queries_per_kv, query.dtype)
    dot_dtype, target = _DOT_DTYPES[query.dtype], out
    if INTERPRETED and query.dtype == torch.bfloat16:
        # The interpreter neither multiplies bfloat16 nor rounds to it; torch does the rounding.
        dot_dtype, target = tl.float32, torch.empty_like(out, dtype=torch.float32)
    tiles = max(1, triton.cdiv(max_query_len, rows // queries_per_kv))
    launch(
        _paged_attention_kernel, (num_reqs + 1, tiles, num_kv_heads),
        query, key_cache, value_cache, block_table, query_start_loc, seq_lens, num_reqs, num_tokens,
        scale * math.log2(math.e), target, *query.stride()[:2], *target.stride()[:2], *key_cache.stride()[:3],
        *value_cache.stride()[:3], block_table.stride(0),
        BLOCK_SIZE=block_size, HEAD_SIZE=head_size, HEAD_TILE=block(head_size), QUERIES_PER_KV=queries_per_kv,
        WINDOW=window or 0, ROWS=rows, KEYS=keys, DOT_DTYPE=dot_dtype,
    )  # fmt: skip
    if target is not out:
        out.copy_(target)


_DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _tile_sizes(num_rows: int, queries_per_kv: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows of a query tile and keys of a key tile; a tile holds at least one whole query."""
    least = block(queries_per_kv)
    if INTERPRETED:
        return tile(num_rows, most=max(256, least), least=least), tile(256)
    most = 32 if dtype == torch.float32 else 64  # float32 dots are done in registers, without tensor cores
    return tile(num_rows, most=max(most, least), least=least), tile(most)
