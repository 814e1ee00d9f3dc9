"""From rows without a winner to requests without a token. Twin: gpu_backend/sample/faults.py."""

from __future__ import annotations

import numpy as np

from runner_api import SampleFault


def first_faults(
    cu_num_logits: np.ndarray, num_sampled: np.ndarray, row_faults: np.ndarray, num_reqs: int, faults: np.ndarray
) -> None:
    """The fault of each request's first faulty logits row, of those whose token counts.

    Shapes: cu_num_logits: int32[>= R + 1]; num_sampled: int32[>= R], 0 where the step's sample is discarded;
    row_faults: int32[>= L], a `SampleFault` each; faults: int32[>= R]. Writes: the first R entries of faults.
    """
    for i in range(num_reqs):
        # 1 the request's rows that count
        start = cu_num_logits[i]
        counted = row_faults[start : start + num_sampled[i]]
        # 2 the first that is faulty
        faulty = counted[counted != SampleFault.NONE]
        faults[i] = faulty[0] if len(faulty) else SampleFault.NONE
