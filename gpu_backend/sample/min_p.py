"""min-p: drop tokens far less likely than the best one. Twin: cpu_reference/sample/min_p.py."""

from __future__ import annotations

import numpy as np
import torch

from gpu_backend.packed_copy import PackedCopy
from gpu_backend.sample.candidates import KEEP_ALL, drop_behind_cuts
from gpu_backend.sample.cut import lowest_key_of_min_p
from gpu_backend.sample.group_bests import group_maxima
from gpu_backend.sample.logits_rows import LogitsRows
from gpu_backend.sample.noise import vocab_tiles
from gpu_backend.triton_support import block, entry, launch, signature, tile, tl, triton
from runner_api import NewRequestData, SamplingParams


@entry
@signature({"*i64": "expanded_idx_mapping", "*fp32": "min_p bests", "*i32": "cut_keys cut_tokens"}, ROWS=2, GROUPS=1024)
@triton.jit(do_not_specialize=["num_logits", "num_groups"])
def _apply_min_p_kernel(
    expanded_idx_mapping,
    min_p,
    num_logits,
    bests,
    num_groups,
    cut_keys,
    cut_tokens,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # 1 each row's share; 0 for a row that belongs to no request
    row = tl.load(expanded_idx_mapping + i, mask=i < num_logits, other=-1)
    m = tl.load(min_p + row, mask=row >= 0, other=0.0)
    # 2 its threshold, as the cut behind it: none where there is no share, no token or a NaN
    g = tl.arange(0, GROUPS)[None, :]
    inside = (i < num_logits)[:, None] & (g < num_groups)
    best = tl.load(bests + (i * num_groups)[:, None] + g, mask=inside, other=float("-inf"))
    is_nan = tl.max((best != best).to(tl.int32), 1)
    highest = tl.max(tl.where(best != best, float("-inf"), best), 1)
    cuts = (m > 0.0) & (is_nan == 0) & (highest > float("-inf"))
    tl.store(cut_keys + i, tl.where(cuts, lowest_key_of_min_p(highest, m) - 1, KEEP_ALL), mask=i < num_logits)
    tl.store(cut_tokens + i, tl.full([ROWS], -1, tl.int32), mask=i < num_logits)


def apply_min_p(expanded_idx_mapping: torch.Tensor, min_p: torch.Tensor, num_logits: int, logits: torch.Tensor) -> None:
    """Set to -inf every token whose probability is below min_p times the row's largest.

    Compared as logits: x < max + log(min_p), in float64; equality survives. min_p = 0 keeps everything, and a row that
    holds a NaN or no token at all stays as it is.

    Shapes: expanded_idx_mapping: int64[>= L]; min_p: float32[N] by row; logits: float32[L, V], contiguous.
    Writes: logits.
    """
    groups = group_maxima(num_logits, logits)
    cuts = torch.empty(2, num_logits, dtype=torch.int32, device=logits.device)
    width = block(groups.num_groups)
    rows = tile(num_logits, most=max(2048 // width, 1), least=1)
    launch(
        _apply_min_p_kernel, (triton.cdiv(num_logits, rows),), expanded_idx_mapping, min_p, num_logits, groups.bests,
        groups.num_groups, cuts[0], cuts[1], ROWS=rows, GROUPS=width,
    )  # fmt: skip
    # 3 drop below it
    drop_behind_cuts(cuts[0], cuts[1], num_logits, logits, vocab_tiles(num_logits, logits.shape[1])[1])


class MinP:
    """The shares; 0 = keep all."""

    def __init__(self, max_num_reqs: int) -> None:
        self.min_p_np = np.zeros(max_num_reqs, np.float32)
        self.min_p: torch.Tensor  # float32[N], device; set by `bind`

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        return {"min_p": self.min_p_np}

    def bind(self, packed: PackedCopy) -> None:
        self.min_p = packed.views["min_p"]

    def row_tables(self) -> dict[str, torch.Tensor]:
        """Device tables by row that no step's copy overwrites."""
        return {}

    def row_widths(self, row: int) -> dict[str, int]:
        """How much of the row's part of a table means anything, where that is not all of it."""
        return {}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        self.min_p_np[row] = params.min_p

    def pack(self, packed: PackedCopy) -> None:
        """Nothing is staged."""

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        """Nothing was staged."""

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool(self.min_p_np[batch_rows].any())

    def apply(self, rows: LogitsRows, logits: torch.Tensor) -> None:
        apply_min_p(rows.expanded_idx_mapping, self.min_p, rows.num_logits, logits)
