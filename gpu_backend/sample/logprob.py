"""Log probabilities: of the token that was taken, and of the likeliest ones or those that a request lists.

A row of logits is normalised as a whole, log p(v) = x_v - log sum exp(x), but only a few columns of it are handed out.
Logits are read twice, by the two kernels over [L, V]; no copy of them is made. Twin: cpu_reference/sample/logprob.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gpu_backend.packed_copy import PackedCopy
from gpu_backend.sample.keys import to_key
from gpu_backend.sample.logits_rows import LogitsRows
from gpu_backend.sample.noise import vocab_tiles
from gpu_backend.staged_write import StagedWriteTensor
from gpu_backend.triton_support import INTERPRETED, block, entry, launch, signature, tile, tl, triton
from runner_api import LogprobsLists, NewRequestData, SamplingParams
from runner_api.constants import MAX_LOGPROB_TOKEN_IDS

# Stands in a list of columns where a row has no more tokens to tell of.
UNUSED = -1
# Neighbouring tokens whose best one is looked for first. Of n tokens none is outside of the n best groups.
GROUP = 32
# The most keys of a full selection (every token of the vocabulary) that are held at once.
KEYS_PER_RUN = 2**26


@dataclass(frozen=True, slots=True)
class LogprobsTensors:
    """`LogprobsLists` as tensors: token_ids int32[L, 1+n], logprobs float32[L, 1+n], ranks int64[L]."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.token_ids, self.logprobs, self.ranks

    def lists(self) -> LogprobsLists:
        """Tensors of the host as NumPy arrays; copies to them must be complete."""
        return LogprobsLists(self.token_ids.numpy(), self.logprobs.numpy(), self.ranks.numpy())


@entry
@signature(
    {"*i64": "token_ids", "*fp32": "logits tile_best tile_total", "*i32": "tile_count"}, ROWS=1, BLOCK=2048
)  # fmt: skip
@signature(
    {"*i64": "token_ids", "*bf16": "logits", "*fp32": "tile_best tile_total", "*i32": "tile_count"}, ROWS=1, BLOCK=2048
)  # fmt: skip
@triton.jit(do_not_specialize=["num_logits"])
def _compute_logprob_stats_kernel(
    token_ids,
    num_logits,
    vocab_size,
    logits,
    tile_best,
    tile_total,
    tile_count,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (i < num_logits)[:, None] & (token < vocab_size)[None, :]
    place = logits + (i * vocab_size)[:, None] + token[None, :]
    x = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
    # 1 the best logit; 0 where there is none, so that nothing is subtracted
    best = tl.max(x, 1)
    shift = tl.where(best == float("-inf"), 0.0, best)
    # 2 the softmax's denominator, relative to it
    total = tl.sum(tl.exp(x - shift[:, None]), 1)
    # 3 tokens that are at least as likely
    taken = tl.load(token_ids + i, mask=i < num_logits, other=0)
    own = tl.load(logits + i * vocab_size + taken, mask=i < num_logits, other=0.0).to(tl.float32)
    count = tl.sum(((x >= own[:, None]) & inside).to(tl.int32), 1)
    out = i * tl.num_programs(1) + tl.program_id(1)
    tl.store(tile_best + out, best, mask=i < num_logits)
    tl.store(tile_total + out, total, mask=i < num_logits)
    tl.store(tile_count + out, count, mask=i < num_logits)


@entry
@signature({"*fp32": "tile_best tile_total log_sum", "*i32": "tile_count", "*i64": "ranks"}, ROWS=1, TILES=64)
@triton.jit(do_not_specialize=["num_logits"])
def _stats_of_tiles_kernel(
    tile_best,
    tile_total,
    tile_count,
    num_tiles,
    num_logits,
    log_sum,
    ranks,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    t = tl.arange(0, TILES)
    place = (i * num_tiles)[:, None] + t[None, :]
    inside = (i < num_logits)[:, None] & (t < num_tiles)[None, :]
    # 1, 2 and 3 once more, over the tiles of a row
    tile = tl.load(tile_best + place, mask=inside, other=float("-inf"))
    best = tl.max(tile, 1)
    shift = tl.where(best == float("-inf"), 0.0, best)
    part = tl.load(tile_total + place, mask=inside, other=0.0)
    total = tl.sum(part * tl.exp(tile - shift[:, None]), 1)
    tl.store(log_sum + i, shift + tl.log(total), mask=i < num_logits)
    count = tl.sum(tl.load(tile_count + place, mask=inside, other=0), 1)
    tl.store(ranks + i, count.to(tl.int64), mask=i < num_logits)


def compute_logprob_stats(
    token_ids: torch.Tensor, num_logits: int, logits: torch.Tensor, log_sum: torch.Tensor, ranks: torch.Tensor
) -> None:
    """What a row's log probabilities are measured from, and how many tokens are at least as likely as the one given.

    log_sum is log sum exp(x), NaN for a row that holds a NaN or +inf, -inf for a row of only -inf: such a row has no
    distribution, and all of its log probabilities are NaN. The rank is 1 for the only best token, counts ties, is V
    for a token at -inf (less the NaNs of the row) and 0 for a token at NaN. Sums run in an order that V alone decides.

    Shapes: token_ids: int64[>= L]; logits: float[L, V], contiguous; log_sum: float32[>= L]; ranks: int64[>= L]. Writes:
    the first L entries of log_sum and ranks.
    """
    vocab_size = logits.shape[1]
    grid, tiling = vocab_tiles(num_logits, vocab_size)
    num_tiles = grid[1]
    floats = torch.empty(2, num_logits, num_tiles, dtype=torch.float32, device=logits.device)
    counts = torch.empty(num_logits, num_tiles, dtype=torch.int32, device=logits.device)
    launch(
        _compute_logprob_stats_kernel, grid,
        token_ids, num_logits, vocab_size, logits, floats[0], floats[1], counts, **tiling,
    )  # fmt: skip
    rows = tiling["ROWS"]
    launch(
        _stats_of_tiles_kernel, (triton.cdiv(num_logits, rows),),
        floats[0], floats[1], counts, num_tiles, num_logits, log_sum, ranks, ROWS=rows, TILES=block(num_tiles),
    )  # fmt: skip


@triton.jit
def order_key(x):
    """An int32 that orders as the float32 does: equal for 0 and -0, lowest for NaN."""
    return tl.where(x == x, to_key(x), -2147483648)


@triton.jit
def with_index(key, index):
    """An int64 that orders by key, then by lower index; no two are equal."""
    return key.to(tl.int64) * 4294967296 + (4294967295 - index)


@entry
@signature({"*fp32": "logits", "*i64": "keys"}, GROUP=32, BLOCK=64)
@signature({"*bf16": "logits", "*i64": "keys"}, GROUP=32, BLOCK=64)
@triton.jit(do_not_specialize=["num_logits"])
def _group_keys_kernel(num_logits, num_groups, vocab_size, logits, keys, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    q = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i, group = q // num_groups, q % num_groups
    # The best of the tokens side by side in a group.
    token = (group * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    inside = (i < num_logits)[:, None] & (token < vocab_size)
    x = tl.load(logits + (i * vocab_size)[:, None] + token, mask=inside, other=float("nan")).to(tl.float32)
    tl.store(keys + q, with_index(tl.max(order_key(x), 1), group), mask=i < num_logits)


@entry
@signature({"*fp32": "logits", "*i64": "groups keys"}, GROUP=32, BLOCK=64)
@signature({"*bf16": "logits", "*i64": "groups keys"}, GROUP=32, BLOCK=64)
@triton.jit(do_not_specialize=["num_logits", "num_groups"])
def _token_keys_kernel(
    groups, num_logits, num_groups, vocab_size, logits, keys, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    q = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = q // num_groups
    # Each token of the groups named for its row; a place behind the vocabulary comes last of all, after every NaN.
    group = tl.load(groups + q, mask=i < num_logits, other=0)
    token = (group * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    inside = (i < num_logits)[:, None] & (token < vocab_size)
    x = tl.load(logits + (i * vocab_size)[:, None] + token, mask=inside, other=float("nan")).to(tl.float32)
    key = tl.where(inside, with_index(order_key(x), token), -9223372036854775808)
    tl.store(keys + (q * GROUP)[:, None] + tl.arange(0, GROUP)[None, :], key, mask=(i < num_logits)[:, None])


def select_top_tokens(num_logits: int, num_top: int, logits: torch.Tensor, columns: torch.Tensor) -> None:
    """The `num_top` best tokens of each row, best first, ties to the lower id; NaNs come last.

    Every token has a key of its own, so that a selection by key has one answer. Where few of many are wanted, the best
    groups of neighbouring tokens are found first: who is among the n best tokens is in one of the n best groups.

    Shapes: logits: float[L, V], contiguous; num_top: 0 .. min(V, C); columns: int32[>= L, C]. Writes: the first L rows
    of columns, whole: UNUSED behind the first num_top.
    """
    columns[:num_logits, num_top:] = UNUSED
    vocab_size = logits.shape[1]
    if num_top == 0 or num_logits == 0:
        return
    num_groups = triton.cdiv(vocab_size, GROUP)
    few = 2 * num_top < num_groups
    held = num_groups + num_top * GROUP if few else num_groups * GROUP
    per_run = max(KEYS_PER_RUN // held, 1)
    for low in range(0, num_logits, per_run):
        part = logits[low : min(low + per_run, num_logits)]
        # 1 where to look: the best groups, or all
        if few:
            groups = _indices(_group_keys(part, num_groups).topk(num_top, dim=1).values)
        else:
            groups = torch.arange(num_groups, device=logits.device).repeat(len(part), 1)
        # 2 the best of their tokens
        best = _token_keys(part, groups).topk(num_top, dim=1).values
        columns[low : low + len(part), :num_top] = _indices(best)


def _indices(keys: torch.Tensor) -> torch.Tensor:
    """What `with_index` put into keys: int64."""
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)


def _group_keys(logits: torch.Tensor, num_groups: int) -> torch.Tensor:
    keys = torch.empty(len(logits), num_groups, dtype=torch.int64, device=logits.device)
    width = _groups_per_program(keys.numel())
    launch(
        _group_keys_kernel, (triton.cdiv(keys.numel(), width),),
        len(logits), num_groups, logits.shape[1], logits, keys, GROUP=GROUP, BLOCK=width,
    )  # fmt: skip
    return keys


def _token_keys(logits: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    keys = torch.empty(len(logits), groups.shape[1] * GROUP, dtype=torch.int64, device=logits.device)
    width = _groups_per_program(groups.numel())
    launch(
        _token_keys_kernel, (triton.cdiv(groups.numel(), width),),
        groups, len(logits), groups.shape[1], logits.shape[1], logits, keys, GROUP=GROUP, BLOCK=width,
    )  # fmt: skip
    return keys


def _groups_per_program(num_groups: int) -> int:
    """So many that a program holds 2048 tokens; an interpreted one, which costs the same whatever it holds, more."""
    return max(tile(num_groups * GROUP, most=65536 if INTERPRETED else 2048) // GROUP, 1)


@entry
@signature({"*i64": "expanded_idx_mapping", "*i32": "num_listed listed_token_ids columns"}, BLOCK=1024)
@triton.jit(do_not_specialize=["num_columns", "num_logits"])
def _select_listed_tokens_kernel(
    expanded_idx_mapping,
    num_listed,
    listed_token_ids,
    listed_stride,
    num_columns,
    num_logits,
    columns,
    BLOCK: tl.constexpr,
):
    q = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i, c = q // num_columns, q % num_columns
    # 1 the request's row; nothing to do without one, or without a list
    row = tl.load(expanded_idx_mapping + i, mask=i < num_logits, other=-1)
    n = tl.load(num_listed + row, mask=row >= 0, other=0)
    # 2 its list, then nothing
    token = tl.load(listed_token_ids + row * listed_stride + c, mask=c < n, other=-1)
    tl.store(columns + q, token, mask=n > 0)


def select_listed_tokens(
    expanded_idx_mapping: torch.Tensor,
    num_listed: torch.Tensor,
    listed_token_ids: torch.Tensor,
    num_logits: int,
    columns: torch.Tensor,
) -> None:
    """Put the tokens that a request lists in the place of the best ones; requests without a list keep those.

    Shapes: expanded_idx_mapping: int64[>= L]; num_listed: int32[N] by row, 0 = no list; listed_token_ids: int32[N,
    MAX_LOGPROB_TOKEN_IDS] by row; columns: int32[>= L, C], contiguous, C >= every num_listed of the batch. Writes:
    columns of requests with a list, whole: UNUSED behind the list.
    """
    num_columns = columns.shape[1]
    width = tile(num_logits * num_columns)
    launch(
        _select_listed_tokens_kernel, (triton.cdiv(num_logits * num_columns, width),),
        expanded_idx_mapping, num_listed, listed_token_ids, listed_token_ids.stride(0), num_columns, num_logits,
        columns, BLOCK=width,
    )  # fmt: skip


@entry
@signature(
    {"*i64": "token_ids", "*i32": "columns logprob_token_ids", "*fp32": "log_sum logits logprobs"}, BLOCK=1024
)  # fmt: skip
@signature(
    {"*i64": "token_ids", "*i32": "columns logprob_token_ids", "*fp32": "log_sum logprobs", "*bf16": "logits"},
    BLOCK=1024,
)  # fmt: skip
@triton.jit(do_not_specialize=["num_columns", "num_logits"])
def _gather_logprobs_kernel(
    token_ids,
    columns,
    log_sum,
    num_columns,
    num_logits,
    vocab_size,
    logits,
    logprob_token_ids,
    logprobs,
    BLOCK: tl.constexpr,
):
    q = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i, c = q // (1 + num_columns), q % (1 + num_columns)
    inside = i < num_logits
    # 1 which tokens
    taken = tl.load(token_ids + i, mask=inside, other=0)
    other = tl.load(columns + i * num_columns + c - 1, mask=inside & (c > 0), other=-1).to(tl.int64)
    token = tl.where(c == 0, taken, other)
    used = token >= 0
    # 2 their log probabilities
    x = tl.load(logits + i * vocab_size + token, mask=inside & used, other=0.0).to(tl.float32)
    value = x - tl.load(log_sum + i, mask=inside, other=0.0)
    tl.store(logprob_token_ids + q, tl.where(used, token, 0).to(tl.int32), mask=inside)
    tl.store(logprobs + q, tl.where(used, value, float("-inf")), mask=inside)


def gather_logprobs(
    token_ids: torch.Tensor,
    columns: torch.Tensor,
    log_sum: torch.Tensor,
    num_logits: int,
    logits: torch.Tensor,
    logprob_token_ids: torch.Tensor,
    logprobs: torch.Tensor,
) -> None:
    """Column 0 is the token that was taken, the others those in `columns`, each with its logit less `log_sum`.

    A column of UNUSED gives id 0 at -inf. A log_sum of 0 hands out the logits themselves.

    Shapes: token_ids: int64[>= L]; columns: int32[>= L, C]; log_sum: float32[>= L]; logits: float[L, V];
    logprob_token_ids: int32[>= L, 1+C]; logprobs: float32[>= L, 1+C]; all contiguous. Writes: the first L rows of the
    last two.
    """
    num_columns = columns.shape[1]
    width = tile(num_logits * (1 + num_columns))
    launch(
        _gather_logprobs_kernel, (triton.cdiv(num_logits * (1 + num_columns), width),),
        token_ids, columns, log_sum, num_columns, num_logits, logits.shape[1], logits, logprob_token_ids, logprobs,
        BLOCK=width,
    )  # fmt: skip


def score_tokens(
    token_ids: torch.Tensor, columns: torch.Tensor, normalised: bool, num_logits: int, logits: torch.Tensor
) -> LogprobsTensors:
    """Log probabilities (`normalised`) or logits of the tokens that were taken and of `columns`, with ranks.

    Shapes: token_ids: int64[>= L]; columns: int32[>= L, C]; logits: float[L, V]; all contiguous.
    """
    width = 1 + columns.shape[1]
    log_sum = torch.empty(num_logits, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_logits, dtype=torch.int64, device=logits.device)
    ids = torch.empty(num_logits, width, dtype=torch.int32, device=logits.device)
    values = torch.empty(num_logits, width, dtype=torch.float32, device=logits.device)
    compute_logprob_stats(token_ids, num_logits, logits, log_sum, ranks)
    if not normalised:
        log_sum.zero_()
    gather_logprobs(token_ids, columns, log_sum, num_logits, logits, ids, values)
    return LogprobsTensors(ids, values, ranks)


def compute_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, normalised: bool = True
) -> LogprobsTensors:
    """The tokens that were taken and the `num_top` best of each row.

    Shapes: logits: float[L, V], contiguous; token_ids: int64[L]. Returns token_ids int32[L, 1+num_top], logprobs
    float32[L, 1+num_top], ranks int64[L].
    """
    num_logits = len(logits)
    columns = torch.empty(num_logits, num_top, dtype=torch.int32, device=logits.device)
    select_top_tokens(num_logits, num_top, logits, columns)
    return score_tokens(token_ids, columns, normalised, num_logits, logits)


class TokenLogprobs:
    """What each request wants to know of the tokens it takes, by row.

    mode: one of runner_api.config.LOGPROBS_MODES, the same for all requests of a runner.
    """

    def __init__(self, max_num_reqs: int, vocab_size: int, mode: str, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.normalised = mode.endswith("_logprobs")
        self.of_processed = mode.startswith("processed_")
        self.num_top_np = np.full(max_num_reqs, -1, np.int32)  # -1 = nothing is wanted
        self.num_listed_np = np.zeros(max_num_reqs, np.int32)
        self.num_listed: torch.Tensor  # int32[N], device; set by `bind`
        self._listed_token_ids = StagedWriteTensor(max_num_reqs, MAX_LOGPROB_TOKEN_IDS, np.int32, device)

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        return {"num_top": self.num_top_np, "num_listed": self.num_listed_np}

    def bind(self, packed: PackedCopy) -> None:
        self.num_listed = packed.views["num_listed"]

    def row_tables(self) -> dict[str, torch.Tensor]:
        """Device tables by row that no step's copy overwrites."""
        return {"listed_token_ids": self._listed_token_ids.table}

    def row_widths(self, row: int) -> dict[str, int]:
        """How much of the row's part of a table means anything, where that is not all of it."""
        return {"listed_token_ids": int(self.num_listed_np[row])}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        listed = params.logprob_token_ids or ()
        self.num_listed_np[row] = len(listed)
        self._listed_token_ids.stage_write(row, 0, listed)
        wanted = None if listed else params.logprobs
        self.num_top_np[row] = -1 if wanted is None else self.vocab_size if wanted == -1 else wanted

    def pack(self, packed: PackedCopy) -> None:
        self._listed_token_ids.pack(packed)

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        self._listed_token_ids.apply(packed)

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool((self.num_top_np[batch_rows] >= 0).any() or (self.num_listed_np[batch_rows] > 0).any())

    def widths(self, batch_rows: np.ndarray) -> tuple[int, int]:
        """(most top tokens, most tokens at all) that any request of the batch wants, the one taken not counted."""
        num_top = max(int(self.num_top_np[batch_rows].max(initial=0)), 0)
        return num_top, max(num_top, int(self.num_listed_np[batch_rows].max(initial=0)))

    def compute(self, rows: LogitsRows, token_ids: torch.Tensor, logits: torch.Tensor) -> LogprobsTensors:
        """One row per logits row, also of requests that want nothing, as wide as the batch's widest wish.

        token_ids: int64[L] what was taken; logits: float[L, V], processed or not as `of_processed` says.
        """
        num_top, num_columns = self.widths(rows.batch_rows)
        columns = torch.empty(rows.num_logits, num_columns, dtype=torch.int32, device=logits.device)
        # 1 the best ones
        select_top_tokens(rows.num_logits, num_top, logits, columns)
        # 2 or those on a list
        if (self.num_listed_np[rows.batch_rows] > 0).any():
            select_listed_tokens(
                rows.expanded_idx_mapping, self.num_listed, self._listed_token_ids.table, rows.num_logits, columns
            )
        # 3 their values
        return score_tokens(token_ids, columns, self.normalised, rows.num_logits, logits)
