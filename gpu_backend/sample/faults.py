"""From rows without a winner to requests without a token. Twin: cpu_reference/sample/faults.py."""

from __future__ import annotations

import torch

from gpu_backend.triton_support import entry, launch, signature, tile, tl, triton


@entry
@signature({"*i32": "cu_num_logits num_sampled row_faults faults"}, BLOCK=256)
@triton.jit(do_not_specialize=["num_reqs"])
def _first_faults_kernel(cu_num_logits, num_sampled, row_faults, num_reqs, faults, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < num_reqs
    # 1 the request's rows that count
    start = tl.load(cu_num_logits + i, mask=here, other=0)
    n = tl.load(num_sampled + i, mask=here, other=0)
    # 2 the first that is faulty
    first = tl.zeros((BLOCK,), tl.int32)
    for j in range(tl.max(n, 0)):
        fault = tl.load(row_faults + start + j, mask=j < n, other=0)
        first = tl.where(first == 0, fault, first)
    tl.store(faults + i, first, mask=here)


def first_faults(
    cu_num_logits: torch.Tensor,
    num_sampled: torch.Tensor,
    row_faults: torch.Tensor,
    num_reqs: int,
    faults: torch.Tensor,
) -> None:
    """The fault of each request's first faulty logits row, of those whose token counts.

    Shapes: cu_num_logits: int32[>= R + 1]; num_sampled: int32[>= R], 0 where the step's sample is discarded;
    row_faults: int32[>= L], a `SampleFault` each; faults: int32[>= R]. Writes: the first R entries of faults.
    """
    width = tile(num_reqs, most=256)
    launch(
        _first_faults_kernel, (triton.cdiv(num_reqs, width),), cu_num_logits, num_sampled, row_faults, num_reqs, faults,
        BLOCK=width,
    )  # fmt: skip
