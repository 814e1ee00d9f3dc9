"""What a logits row has seen: the known tokens of its request, then the drafts that come before it.

Twin: gpu_backend/sample/history.py.
"""

from __future__ import annotations

import numpy as np


def tokens_seen(
    i: int,
    row: int,
    positions: np.ndarray,
    input_ids: np.ndarray,
    total_len: np.ndarray,
    all_token_ids: np.ndarray,
) -> np.ndarray:
    """Tokens at places 0 .. positions[i] of the request's sequence, int32[positions[i] + 1].

    What is not known yet are drafts: the inputs of the request's logits rows, of which row i's own is the last.

    Shapes: positions: int64[>= L], input_ids: int32[>= L] by logits row; total_len: int32[N], all_token_ids:
    int32[N, M] by row.

    >>> tokens_seen(1, 0, np.int64([3, 4]), np.int32([8, 9]), np.int32([4]), np.int32([[5, 6, 7, 8, 0]])).tolist()
    [5, 6, 7, 8, 9]
    """
    length = int(positions[i]) + 1
    known = min(int(total_len[row]), length)
    num_drafts = length - known
    return np.concatenate([all_token_ids[row, :known], input_ids[i + 1 - num_drafts : i + 1]])
