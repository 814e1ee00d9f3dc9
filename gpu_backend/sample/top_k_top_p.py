"""top-k and top-p, exact: the smallest set, by descending probability, ties to the lower token id.

Twin: cpu_reference/sample/top_k_top_p.py.
"""

from __future__ import annotations

import numpy as np
import torch

from gpu_backend.packed_copy import PackedCopy
from gpu_backend.sample.candidates import SMALL_K, cut_lists, drop_behind_cuts, list_candidates
from gpu_backend.sample.cut import is_kept, row_cut
from gpu_backend.sample.draw import WIDEST_WHOLE_ROW
from gpu_backend.sample.group_bests import group_maxima
from gpu_backend.sample.keys import WIDEST_VOCABULARY, to_key
from gpu_backend.sample.logits_rows import LogitsRows
from gpu_backend.sample.noise import vocab_tiles
from gpu_backend.sample.row_params import Limits, look_up_limits, row_limits
from gpu_backend.sample.search import search_cuts
from gpu_backend.triton_support import block, entry, launch, signature, tile, tl, triton
from runner_api import NewRequestData, SamplingParams


@entry
@signature({"*i64": "expanded_idx_mapping", "*i32": "top_k", "*fp32": "no_min_p top_p logits"}, ROWS=1, WIDTH=2048)
@triton.jit(do_not_specialize=["num_logits"])
def _apply_top_k_top_p_kernel(
    expanded_idx_mapping,
    no_min_p,
    top_k,
    top_p,
    num_logits,
    logits,
    vocab_size,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, WIDTH)[None, :]
    # 1 each request's row; nothing to do without one, without a limit, or where there is nothing to choose from
    row = tl.load(expanded_idx_mapping + i, mask=i < num_logits, other=-1)
    m, k, p, limited = row_limits(row, row >= 0, no_min_p, top_k, top_p, vocab_size)
    if tl.max(limited.to(tl.int32), 0) > 0:
        inside = limited[:, None] & (token < vocab_size)
        place = logits + (i * vocab_size)[:, None] + token
        x = tl.load(place, mask=inside, other=float("-inf"))
        some = (tl.max((x != x).to(tl.int32), 1) == 0) & limited
        # 2 most likely first: nothing is sorted, the order is that of (key descending, id ascending)
        # 3 top-k
        # 4 top-p over what is left: of both, the key and the id of the last one kept
        x = tl.where(x != x, float("-inf"), x)
        cut, last = row_cut(x, token, m, k, p)
        # 5 drop the rest
        dropped = is_kept(to_key(x), token, cut[:, None], last[:, None]).to(tl.int32) == 0
        tl.store(place, float("-inf"), mask=inside & some[:, None] & dropped)


def apply_top_k_top_p(
    expanded_idx_mapping: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, num_logits: int, logits: torch.Tensor
) -> None:
    """Keep the k most likely tokens, then of these the fewest whose probability reaches p.

    A token is kept by top-p if the probability of those before it is below p; the most likely one always is. Tokens
    that are already -inf have no probability and are never brought back; one at +inf has all of it, several share it.
    k = V and p = 1 keep everything, and a row that holds a NaN or no token at all stays as it is.

    Exact: top-k in any case. top-p takes each probability as exp(x - max) in float64, rounded to 2^-42 of the best
    token's, and sums in integers; so with the n tokens that top-k leaves, a token whose mass before lies within
    2^-42 n of p (3e-8 for 128,256 tokens, 1e-11 for 50) may fall on the other side. The result is the same bits
    whatever the batch.

    Shapes: expanded_idx_mapping: int64[>= L]; top_k: int32[N], top_p: float32[N] by row; logits: float32[L, V],
    contiguous. Writes: logits.
    """
    _apply(expanded_idx_mapping, top_k, top_p, num_logits, logits, short=False)


def _apply(
    expanded_idx_mapping: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, num_logits: int,
    logits: torch.Tensor, *, short: bool,
) -> None:  # fmt: skip
    vocab_size = logits.shape[1]
    assert vocab_size <= WIDEST_VOCABULARY, vocab_size
    tiling = vocab_tiles(num_logits, vocab_size)[1]
    limits = Limits(torch.zeros_like(top_p), top_k, top_p)
    if vocab_size <= tile(vocab_size, most=WIDEST_WHOLE_ROW):
        rows = tiling["ROWS"]
        launch(
            _apply_top_k_top_p_kernel, (triton.cdiv(num_logits, rows),), expanded_idx_mapping, *limits, num_logits,
            logits, vocab_size, ROWS=rows, WIDTH=block(vocab_size),
        )  # fmt: skip
        return
    rows_of = look_up_limits(expanded_idx_mapping, limits, num_logits, vocab_size)
    groups = group_maxima(num_logits, logits)
    lists = list_candidates(rows_of, num_logits, logits, groups, short=short)
    cuts = torch.empty(2, num_logits, dtype=torch.int32, device=logits.device)
    cut_lists(rows_of, num_logits, groups, lists, cuts[0], cuts[1])
    search_cuts(rows_of, num_logits, logits, groups, lists, cuts[0], cuts[1])
    drop_behind_cuts(cuts[0], cuts[1], num_logits, logits, tiling)


class TopKTopP:
    """Both limits; k = V and p = 1 are none."""

    def __init__(self, max_num_reqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.top_k_np = np.full(max_num_reqs, vocab_size, np.int32)
        self.top_p_np = np.ones(max_num_reqs, np.float32)
        self.top_k: torch.Tensor  # int32[N], device; set by `bind`, as is the next
        self.top_p: torch.Tensor  # float32[N], device

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        return {"top_k": self.top_k_np, "top_p": self.top_p_np}

    def bind(self, packed: PackedCopy) -> None:
        self.top_k, self.top_p = packed.views["top_k"], packed.views["top_p"]

    def row_tables(self) -> dict[str, torch.Tensor]:
        """Device tables by row that no step's copy overwrites."""
        return {}

    def row_widths(self, row: int) -> dict[str, int]:
        """How much of the row's part of a table means anything, where that is not all of it."""
        return {}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        self.top_k_np[row] = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self.top_p_np[row] = params.top_p

    def pack(self, packed: PackedCopy) -> None:
        """Nothing is staged."""

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        """Nothing was staged."""

    def used_by(self, batch_rows: np.ndarray) -> bool:
        k, p = self.top_k_np[batch_rows], self.top_p_np[batch_rows]
        return bool((k < self.vocab_size).any() or (p < 1).any())

    def has_small_k(self, batch_rows: np.ndarray) -> bool:
        """Has every row with a limit a k that a short list of candidates is enough for? (Only speed hangs on it.)"""
        k, p = self.top_k_np[batch_rows], self.top_p_np[batch_rows]
        return bool((k[(k < self.vocab_size) | (p < 1)] <= SMALL_K).all())

    def apply(self, rows: LogitsRows, logits: torch.Tensor) -> None:
        short = self.has_small_k(rows.batch_rows)
        _apply(rows.expanded_idx_mapping, self.top_k, self.top_p, rows.num_logits, logits, short=short)
