"""Of each limited row the few tokens that its limits can keep, as a list; and the cut, where the list decides it.

The k best tokens of a row are among those that reach the k-th best of its groups' bests, and these are hardly more than
k: the list takes them from the groups concerned, a small part of the row. A row whose list would be too long, or whose
top-p wants more mass than the list has, is marked TOO_MANY and left to `search`.

GPU only: NumPy sorts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpu_backend.sample.cut import cut_of, is_kept, lowest_key_of_min_p
from gpu_backend.sample.group_bests import GroupBests
from gpu_backend.sample.keys import LOWEST, divided, from_key, mass_of, to_key
from gpu_backend.sample.row_params import LIMITED, RowParams
from gpu_backend.triton_support import INTERPRETED, block, entry, launch, signature, tile, tl, triton

NO_LIST = tl.constexpr(-1)  # nothing limits the row, or nothing may: it holds a NaN or no token
TOO_MANY = tl.constexpr(-2)
NO_ENTRY = tl.constexpr((-2139095041 << 32) | 0x7FFFFFFF)  # LOWEST, and an id behind all others
KEEP_ALL = tl.constexpr(-(2**31))  # the cut's key of a row that stays as it is
# Tokens to a list. A short one is a warp's work; a long one has a chance to hold what top-p alone keeps.
SHORT_LIST, LONG_LIST = 256, 2048
SHORT_WARPS, LONG_WARPS = 1, 4
SMALL_K = 64  # hardly ever too much for a short list
# Where top-p alone limits a row, the list takes what reaches the best of this many groups, or of 5 in 8.
GROUPS_FOR_TOP_P = 512
# How a compiled program looks through groups: with many rows every one should find room on the GPU at once.
MANY_ROWS = 384
WAY_OF_MANY, WAY_OF_FEW = {"AT_ONCE": 8, "num_warps": 2}, {"AT_ONCE": 16, "num_warps": 4}


class Lists(NamedTuple):
    """entries: int64[L, width], each the key of a logit and, in its lower half, the token; tokens ascend. lens:
    int32[L], NO_LIST or TOO_MANY where there is none. totals: int64[L], the mass that top-p takes its share of, 0 =
    that of the list. num_warps: of who works on a list."""

    entries: torch.Tensor
    lens: torch.Tensor
    totals: torch.Tensor
    num_warps: int

    @property
    def width(self) -> int:
        return self.entries.shape[1]


@triton.jit
def a_little_lower(x):
    """Below every value that division by a temperature makes equal to x / temperature, as long as that is finite."""
    return x - tl.abs(x) * 0.0000002384185791015625 - 1e-30  # 2^-22


@triton.jit
def append(key, token, take, length, entries, LIST: tl.constexpr):
    """Put a tile's chosen tokens (`take`) behind the first `length` of a list; what does not fit is only counted.

    key, token, take: [width]; entries: where the list starts. Gives the new length.
    """
    place = length + tl.cumsum(take.to(tl.int32), 0) - 1
    entry_of = (key.to(tl.int64) << 32) | token.to(tl.int64)
    tl.store(entries + place, entry_of, mask=take & (place < LIST))
    return length + tl.sum(take.to(tl.int32), 0)


@triton.jit
def read_list(entries, length, LIST: tl.constexpr):
    """The list as a tile: (keys, tokens), int32[1, LIST], LOWEST and an id behind all others past its end."""
    n = tl.arange(0, LIST)[None, :]
    entry_of = tl.load(entries + n, mask=n < length, other=NO_ENTRY)
    return (entry_of >> 32).to(tl.int32), (entry_of & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def mass_of_row(place, vocab_size, t, highest, floor, BLOCK: tl.constexpr):
    """The mass of all tokens that min-p keeps. place: where the row starts; t: its divisor."""
    total = tl.full([], 0, tl.int64)
    for first in range(0, vocab_size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = divided(tl.load(place + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32), t)
        total += tl.sum(tl.where(to_key(x) >= floor, mass_of(x, highest), 0), 0)
    return total


_TYPES = {"*i64": "entries list_totals", "*i32": "kinds top_k chosen list_lens"}
_FLOATS = "divisors min_p top_p bests"
_TILE = {"GROUPS": 1024, "GROUP": 128, "BLOCK": 2048}


@entry
@signature({**_TYPES, "*fp32": f"{_FLOATS} logits"}, ALONE=True, LIST=LONG_LIST, **_TILE, **WAY_OF_FEW)
@signature({**_TYPES, "*fp32": _FLOATS, "*bf16": "logits"}, ALONE=False, LIST=SHORT_LIST, **_TILE, **WAY_OF_MANY)
@triton.jit(do_not_specialize=["num_groups", "wanted_for_top_p"])
def _list_candidates_kernel(
    kinds,
    divisors,
    min_p,
    top_k,
    top_p,
    logits,
    vocab_size,
    bests,
    num_groups,
    wanted_for_top_p,
    chosen,
    entries,
    list_lens,
    list_totals,
    ALONE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    # 1 the row's limits, if it has any
    g = tl.arange(0, GROUPS)
    best = tl.load(bests + i * num_groups + g, mask=g < num_groups, other=float("-inf"))
    limited = tl.load(kinds + i) == LIMITED
    t = tl.load(divisors + i)
    m, k, p = tl.load(min_p + i), tl.load(top_k + i), tl.load(top_p + i)
    is_nan = tl.max((best != best).to(tl.int32), 0)
    best = tl.where(best != best, float("-inf"), best)
    length = tl.full([], NO_LIST, tl.int32)
    total = tl.full([], 0, tl.int64)
    best_of_row = tl.max(best, 0)
    if limited & (is_nan == 0) & (best_of_row > float("-inf")):
        # 2 a key that as many groups reach as are wanted, and not many more
        key = to_key(best)
        by_top_p = (k >= vocab_size) & (p < 1.0)
        wanted = tl.where(k < vocab_size, k, tl.where(by_top_p, wanted_for_top_p, num_groups + 1))
        enough = wanted + wanted // 8 + 1
        low = tl.full([], LOWEST, tl.int64)
        high = to_key(best_of_row).to(tl.int64) + 1
        reached = tl.full([], 0, tl.int32) + num_groups
        while (wanted <= num_groups) & (high - low > 1) & (reached > enough):
            middle = (low + high) >> 1
            count = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0)
            reached = tl.where(count >= wanted, count, reached)
            low = tl.where(count >= wanted, middle, low)
            high = tl.where(count >= wanted, high, middle)
        by_groups = a_little_lower(from_key(low.to(tl.int32)))
        # ... but none that min-p drops for certain
        highest = divided(best_of_row, t)
        floor = lowest_key_of_min_p(highest, m)
        by_min_p = tl.where(m > 0.0, a_little_lower(from_key(floor) * t), float("-inf"))
        bound = tl.maximum(to_key(tl.maximum(by_groups, by_min_p)), LOWEST + 1)
        # 3 the groups with such tokens
        pick = (key >= bound) & (g < num_groups)
        tl.store(chosen + i * num_groups + tl.cumsum(pick.to(tl.int32), 0) - 1, g, mask=pick)
        num_chosen = tl.sum(pick.to(tl.int32), 0)
        tl.debug_barrier()
        # 4 these tokens, in order of their ids (where a quotient is +inf, others may be that are not looked at here)
        length = tl.where(highest < float("inf"), 0, LIST + 1)
        first = tl.full([], 0, tl.int32)
        while (first < num_chosen) & (length <= LIST):
            n = first + tl.arange(0, AT_ONCE)
            group = tl.load(chosen + i * num_groups + n, mask=n < num_chosen, other=num_groups)
            token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            inside = token < vocab_size
            x = tl.load(logits + i * vocab_size + token, mask=inside, other=float("-inf")).to(tl.float32)
            token_key = to_key(x)
            take = tl.reshape(inside & (token_key >= bound), [AT_ONCE * GROUP])
            token_key, token = tl.reshape(token_key, [AT_ONCE * GROUP]), tl.reshape(token, [AT_ONCE * GROUP])
            length = append(token_key, token, take, length, entries + i * LIST, LIST)
            first += AT_ONCE
        # 5 top-p alone takes its share of more than is listed
        if ALONE:
            if by_top_p & (by_groups > by_min_p) & (length <= LIST):
                total = mass_of_row(logits + i * vocab_size, vocab_size, t, highest, floor, BLOCK)
        elif by_top_p & (by_groups > by_min_p):
            length = tl.full([], TOO_MANY, tl.int32)
        length = tl.where(length <= LIST, length, TOO_MANY)
    tl.store(list_lens + i, length)
    tl.store(list_totals + i, total)


def list_candidates(
    rows: RowParams, num_logits: int, logits: torch.Tensor, groups: GroupBests, *, short: bool
) -> Lists:
    """The candidates of every limited row.

    logits: float[L, V], contiguous; groups: their bests; short: every limited row has a small k.
    """
    device, vocab_size = logits.device, logits.shape[1]
    width = tile(vocab_size, most=SHORT_LIST if short else LONG_LIST)
    lists = Lists(
        torch.empty(num_logits, width, dtype=torch.int64, device=device),
        torch.empty(num_logits, dtype=torch.int32, device=device),
        torch.empty(num_logits, dtype=torch.int64, device=device),
        SHORT_WARPS if short else LONG_WARPS,
    )
    chosen = torch.empty(num_logits, groups.num_groups, dtype=torch.int32, device=device)
    wanted_for_top_p = max(min(GROUPS_FOR_TOP_P, groups.num_groups * 5 // 8), 1)
    launch(
        _list_candidates_kernel, (num_logits,),
        rows.kinds, rows.divisors, rows.min_p, rows.top_k, rows.top_p, logits, vocab_size, groups.bests,
        groups.num_groups, wanted_for_top_p, chosen, *lists[:3],
        ALONE=not short, GROUPS=block(groups.num_groups), GROUP=groups.width, LIST=width,
        BLOCK=tile(vocab_size, most=2048), **_way(num_logits, groups),
    )  # fmt: skip
    return lists


def _way(num_logits: int, groups: GroupBests) -> dict[str, int]:
    if INTERPRETED:
        return {"AT_ONCE": block(groups.num_groups, most=max(65536 // groups.width, 1), least=1)}
    return WAY_OF_MANY if num_logits >= MANY_ROWS else WAY_OF_FEW


@triton.jit
def list_cut(entries, length, best_of_row, total, t, m, k, p, LIST: tl.constexpr):
    """A list, as the keys of what is drawn from, and its cut: (keys, tokens, key, last id, is it found).

    keys, tokens: int32[1, LIST]; all else are scalars.
    """
    key, token = read_list(entries, length, LIST)
    key = to_key(divided(from_key(key), t))
    highest = divided(tl.full([1], best_of_row, tl.float32), t)
    floor = lowest_key_of_min_p(highest, m)
    key = tl.where(key >= floor[:, None], key, LOWEST)
    k, p, total = tl.full([1], k, tl.int32), tl.full([1], p, tl.float32), tl.full([1], total, tl.int64)
    cut, last, found = cut_of(key, token, highest, floor, k, p, total)
    return key, token, tl.max(cut, 0), tl.max(last, 0), tl.max(found, 0)


_CUTS = {
    "*i64": "entries list_totals",
    "*i32": "top_k list_lens cut_keys cut_tokens",
    "*fp32": "divisors min_p top_p bests",
}


@entry
@signature(_CUTS, GROUPS=1024, LIST=SHORT_LIST, num_warps=SHORT_WARPS)
@signature(_CUTS, GROUPS=1024, LIST=LONG_LIST, num_warps=LONG_WARPS)
@triton.jit(do_not_specialize=["num_groups"])
def _cut_lists_kernel(
    divisors,
    min_p,
    top_k,
    top_p,
    bests,
    num_groups,
    entries,
    list_lens,
    list_totals,
    cut_keys,
    cut_tokens,
    GROUPS: tl.constexpr,
    LIST: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    length = tl.load(list_lens + i)
    if length == NO_LIST:
        tl.store(cut_keys + i, KEEP_ALL)
        tl.store(cut_tokens + i, -1)  # nothing looks at it, but it is looked up
    if length >= 0:
        g = tl.arange(0, GROUPS)
        best = tl.max(tl.load(bests + i * num_groups + g, mask=g < num_groups, other=float("-inf")), 0)
        t, m, k, p = tl.load(divisors + i), tl.load(min_p + i), tl.load(top_k + i), tl.load(top_p + i)
        total = tl.load(list_totals + i)
        _, _, cut, last, found = list_cut(entries + i * LIST, length, best, total, t, m, k, p, LIST)
        tl.store(cut_keys + i, cut)
        tl.store(cut_tokens + i, last)
        tl.store(list_lens + i, tl.where(found > 0, length, TOO_MANY))


def cut_lists(
    rows: RowParams, num_logits: int, groups: GroupBests, lists: Lists, cut_keys: torch.Tensor,
    cut_tokens: torch.Tensor,
) -> None:  # fmt: skip
    """Where each row is cut: (KEEP_ALL, -1) for rows without a list, nothing for those marked TOO_MANY.

    cut_keys, cut_tokens: int32[L]. Writes: both, and lists.lens, which gets a mark where a list does not decide.
    """
    launch(
        _cut_lists_kernel, (num_logits,), rows.divisors, rows.min_p, rows.top_k, rows.top_p, groups.bests,
        groups.num_groups, *lists[:3], cut_keys, cut_tokens, GROUPS=block(groups.num_groups), LIST=lists.width,
        num_warps=lists.num_warps,
    )  # fmt: skip


@entry
@signature({"*fp32": "logits", "*i32": "cut_keys cut_tokens"}, ROWS=1, BLOCK=2048)
@triton.jit(do_not_specialize=["num_logits"])
def _drop_behind_cuts_kernel(
    cut_keys, cut_tokens, num_logits, vocab_size, logits, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = i < num_logits
    cut = tl.load(cut_keys + i, mask=real, other=KEEP_ALL)
    if tl.max(cut, 0) > KEEP_ALL:
        last = tl.load(cut_tokens + i, mask=real, other=-1)
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (cut > KEEP_ALL)[:, None] & (token < vocab_size)
        place = logits + (i * vocab_size)[:, None] + token
        key = to_key(tl.load(place, mask=inside, other=0.0))
        dropped = is_kept(key, token, cut[:, None], last[:, None]).to(tl.int32) == 0
        tl.store(place, float("-inf"), mask=inside & dropped)


def drop_behind_cuts(
    cut_keys: torch.Tensor, cut_tokens: torch.Tensor, num_logits: int, logits: torch.Tensor, tiling: dict[str, int]
) -> None:
    """Set to -inf what stands behind its row's cut. Shapes: int32[L] each; logits: float32[L, V]. Writes: logits."""
    grid = (triton.cdiv(num_logits, tiling["ROWS"]), triton.cdiv(logits.shape[1], tiling["BLOCK"]))
    launch(_drop_behind_cuts_kernel, grid, cut_keys, cut_tokens, num_logits, logits.shape[1], logits, **tiling)
