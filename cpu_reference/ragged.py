"""The one helper of all ragged code: from run boundaries to the owner of each element."""

from __future__ import annotations

import numpy as np


def token_owners(query_start_loc: np.ndarray, num_reqs: int) -> tuple[np.ndarray, np.ndarray]:
    """For each flat token: the batch index of its request, and its offset within the request's query.

    Shapes: query_start_loc: int32[num_reqs+1 or more], request i owns [query_start_loc[i], query_start_loc[i+1]).
    Returns two int64[num_tokens].

    >>> owners, offsets = token_owners(np.int32([0, 2, 2, 3, 6]), 4)
    >>> owners.tolist(), offsets.tolist()
    ([0, 0, 2, 3, 3, 3], [0, 1, 0, 0, 1, 2])
    """
    starts = query_start_loc[:num_reqs].astype(np.int64)
    lengths = query_start_loc[1 : num_reqs + 1] - starts
    owners = np.repeat(np.arange(num_reqs), lengths)
    return owners, np.arange(len(owners)) - starts[owners]
