"""Paged attention, one request at a time: the oracle. Twin: gpu_backend/attention.py."""

from __future__ import annotations

import numpy as np


def paged_attention(
    query: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    block_table: np.ndarray,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    num_reqs: int,
    scale: float,
    window: int | None,
    max_query_len: int,
    out: np.ndarray,
) -> None:
    """softmax(q k^T * scale) v over the request's own keys, causal, read through its block table.

    Query head h uses KV head h // (num_heads // num_kv_heads). The j-th query of a request stands at position
    seq_len - query_len + j and sees keys up to and including its own, at most `window` of them.

    Shapes: query, out: [tp, num_heads, head_size]; caches: [num_blocks, block_size, num_kv_heads, head_size];
    block_table: int32[num_reqs, W]; query_start_loc: int32[num_reqs+1]; seq_lens: int32[num_reqs].
    max_query_len: an upper bound of the query lengths; a device needs it to know how many programs to start.
    Writes: out whole; tokens that belong to no request get 0.
    """
    num_heads, head_size = query.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    queries_per_kv = num_heads // num_kv_heads
    out[query_start_loc[num_reqs] :] = 0
    for i in range(num_reqs):
        # 1 the request's queries; an empty row (padding) has none
        start, end, seq_len = int(query_start_loc[i]), int(query_start_loc[i + 1]), int(seq_lens[i])
        query_len = end - start
        assert query_len <= max_query_len, (i, query_len, max_query_len)
        if query_len == 0:
            continue
        # 2 its keys and values, block by block  [seq_len, num_kv_heads, head_size]
        blocks = block_table[i, : -(-seq_len // block_size)]
        k = key_cache[blocks].reshape(-1, num_kv_heads, head_size)[:seq_len]
        v = value_cache[blocks].reshape(-1, num_kv_heads, head_size)[:seq_len]
        # 3 scores  [num_kv_heads, queries_per_kv * query_len, seq_len]
        q = query[start:end].reshape(query_len, num_kv_heads, queries_per_kv, head_size).transpose(1, 2, 0, 3)
        scores = q.reshape(num_kv_heads, -1, head_size) @ k.transpose(1, 2, 0) * query.dtype.type(scale)
        # 4 a query sees no key behind the window and none after itself
        position = np.arange(seq_len - query_len, seq_len)
        behind = position[:, None] - np.arange(seq_len)[None, :]
        hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
        if hidden.any():
            scores = np.where(np.tile(hidden, (queries_per_kv, 1)), -np.inf, scores)
        # 5 softmax, weighted sum; keys that no query sees are left out, so that what they hold is never read
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        if window is not None:
            first = max(seq_len - query_len - window + 1, 0)
            weights, v = weights[..., first:], v[first:]
        result = weights @ v.transpose(1, 0, 2)
        out[start:end] = (
            result.reshape(num_kv_heads, queries_per_kv, query_len, head_size)
            .transpose(2, 0, 1, 3)
            .reshape(query_len, num_heads, head_size)
        )
