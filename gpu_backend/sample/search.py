"""The cut of a row that no list decides: searched in the row itself, which is read again for every few bits of the key.

Taken for flat rows under top-p alone, a k beyond the number of groups, and ties in masses: right in any case, and many
times as slow as a list. Where no row is marked TOO_MANY it costs one look at the marks.

GPU only: NumPy sorts.
"""

from __future__ import annotations

import torch

from gpu_backend.sample.candidates import TOO_MANY, Lists, append, read_list
from gpu_backend.sample.cut import cut_by_weight, is_kept, lowest_key_of_min_p, mass_wanted, ties_wanted
from gpu_backend.sample.group_bests import GroupBests
from gpu_backend.sample.keys import LOWEST, NO_TOKEN, divided, from_key, mass_of, to_key
from gpu_backend.sample.noise import to_gumbel, to_uniforms, words_of
from gpu_backend.sample.row_params import RowParams
from gpu_backend.triton_support import INTERPRETED, block, entry, launch, signature, tile, tl, triton

PIVOTS = tl.constexpr(8)
BLOCK_WIDTH, WARPS = 4096, 16
# One such program fills a multiprocessor, and takes one row after the other.
PROGRAMS = 4 if INTERPRETED else 132


@triton.jit
def kept_keys(place, token, vocab_size, t, cut, last):
    """Keys of a tile's tokens, LOWEST for those behind the cut. place: where the row starts; t: its divisor."""
    x = tl.load(place + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    key = to_key(divided(x, t))
    return tl.where(is_kept(key, token, cut, last), key, LOWEST)


@triton.jit
def weight_of(key, highest, BY_MASS: tl.constexpr):
    """What a token weighs: its mass, or 1; nothing if it is not kept. int64."""
    weight = (key > LOWEST).to(tl.int64)
    if BY_MASS:
        weight = tl.where(key > LOWEST, mass_of(from_key(key), highest), 0)
    return weight


@triton.jit
def totals_of(place, vocab_size, t, highest, cut, last, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Of the tokens before a cut: their weight and number."""
    weight = tl.full([], 0, tl.int64)
    count = tl.full([], 0, tl.int32)
    for first in range(0, vocab_size, BLOCK):
        key = kept_keys(place, first + tl.arange(0, BLOCK), vocab_size, t, cut, last)
        weight += tl.sum(weight_of(key, highest, BY_MASS), 0)
        count += tl.sum((key > LOWEST).to(tl.int32), 0)
    return weight, count


@triton.jit
def searched_cut(
    place, vocab_size, t, highest, cut, last, count, wanted, entries,
    BY_MASS: tl.constexpr, LIST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The cut behind the last token with less than `wanted` before it, among those before an earlier cut: (key, id).

    count: how many these are; they weigh at least `wanted`. entries: room for a list of LIST tokens.
    """
    # 1 keys low < cut <= high, until there are few tokens with such keys
    low = tl.full([], LOWEST, tl.int64)
    high = to_key(highest).to(tl.int64)
    before = tl.full([], 0, tl.int64)  # weighs what stands above `high`
    above_low, above_high = count, tl.full([], 0, tl.int32)  # how many stand above either
    share = tl.arange(0, PIVOTS) + 1
    while (high - low > 1) & (above_low - above_high > LIST):
        pivot = low + (high - low) * share // (PIVOTS + 1)
        weights = tl.zeros([PIVOTS], tl.int64)
        counts = tl.zeros([PIVOTS], tl.int32)
        for first in range(0, vocab_size, BLOCK):
            key = kept_keys(place, first + tl.arange(0, BLOCK), vocab_size, t, cut, last)
            above = key[None, :] > pivot.to(tl.int32)[:, None]
            counts += tl.sum(above.to(tl.int32), 1)
            if BY_MASS:
                weights += tl.sum(tl.where(above, weight_of(key, highest, BY_MASS)[None, :], 0), 1)
        if not BY_MASS:
            weights = counts.to(tl.int64)
        little = weights < wanted
        before = tl.maximum(before, tl.max(tl.where(little, weights, 0), 0))
        above_high = tl.maximum(above_high, tl.max(tl.where(little, counts, 0), 0))
        above_low = tl.minimum(above_low, tl.min(tl.where(little, 0x7FFFFFFF, counts), 0))
        high = tl.minimum(high, tl.min(tl.where(little, pivot, high), 0))
        low = tl.maximum(low, tl.max(tl.where(little, low, pivot), 0))
    # 2 few: the rest of the search in a list of them
    found = high.to(tl.int32)
    found_last = tl.full([], -1, tl.int32)
    if above_low - above_high <= LIST:
        length = tl.full([], 0, tl.int32)
        for first in range(0, vocab_size, BLOCK):
            token = first + tl.arange(0, BLOCK)
            key = kept_keys(place, token, vocab_size, t, cut, last)
            length = append(key, token, (key > low) & (key <= high), length, entries, LIST)
        tl.debug_barrier()
        key, token = read_list(entries, length, LIST)
        rest = tl.full([1], wanted - before, tl.int64)
        key_cut, token_cut = cut_by_weight(key, token, weight_of(key, highest, BY_MASS), rest)
        found, found_last = tl.max(key_cut, 0), tl.max(token_cut, 0)
        tl.debug_barrier()
    else:
        # 3 many, and all tie: count them by their ids
        one = tl.max(weight_of(tl.full([1], found, tl.int32), highest, BY_MASS), 0)
        ties = ties_wanted(before, wanted, one)
        seen = tl.full([], 0, tl.int32)
        for first in range(0, vocab_size, BLOCK):
            token = first + tl.arange(0, BLOCK)
            tie = (kept_keys(place, token, vocab_size, t, cut, last) == found).to(tl.int32)
            nth = seen + tl.cumsum(tie, 0)
            found_last = tl.maximum(found_last, tl.max(tl.where((tie > 0) & (nth <= ties), token, -1), 0))
            seen += tl.sum(tie, 0)
    return found, found_last


@triton.jit
def best_of_kept(place, vocab_size, t, noise_key, cut, last, SCHEME: tl.constexpr, BLOCK: tl.constexpr):
    """The best score of the tokens before a cut and its token, the first of equals: (float32, int32)."""
    best_score, best_token = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for first in range(0, vocab_size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        key = kept_keys(place, token, vocab_size, t, cut, last)
        score = from_key(key) + to_gumbel(to_uniforms(words_of(noise_key, token.to(tl.uint64), SCHEME), SCHEME))
        score = tl.where(key > LOWEST, score, float("-inf"))
        best, at = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
        best_token = tl.where(best > best_score, first + at, best_token)
        best_score = tl.maximum(best_score, best)
    return best_score, best_token


_TYPES = {"*i64": "entries sampled", "*i32": "top_k list_lens cut_keys cut_tokens faults", "*u32": "keys"}
_FLOATS = "divisors min_p top_p bests"
_WAY = {"GROUPS": 1024, "LIST": 2048, "BLOCK": BLOCK_WIDTH, "EACH": 8, "num_warps": WARPS}


@entry
@signature({**_TYPES, "*fp32": f"{_FLOATS} logits"}, SCHEME="murmur3", DRAW=False, **_WAY)
@signature({**_TYPES, "*fp32": f"{_FLOATS} logits"}, SCHEME="philox", DRAW=True, **_WAY)
@signature({**_TYPES, "*fp32": _FLOATS, "*bf16": "logits"}, SCHEME="murmur3", DRAW=True, **_WAY)
@triton.jit(do_not_specialize=["num_logits", "num_groups"])
def _search_rows_kernel(
    keys,
    divisors,
    min_p,
    top_k,
    top_p,
    num_logits,
    logits,
    vocab_size,
    bests,
    num_groups,
    entries,
    list_lens,
    cut_keys,
    cut_tokens,
    sampled,
    faults,
    SCHEME: tl.constexpr,
    DRAW: tl.constexpr,
    GROUPS: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
):
    mine = tl.program_id(0) + tl.arange(0, EACH) * tl.num_programs(0)
    marks = tl.load(list_lens + mine, mask=mine < num_logits, other=0)
    rows_left = tl.sum((marks == TOO_MANY).to(tl.int32), 0)
    while rows_left > 0:
        # One marked row after the other, the last of them first.
        row = tl.max(tl.where(marks == TOO_MANY, mine, -1), 0)
        marks = tl.where(mine == row, 0, marks)
        rows_left -= 1
        i = row.to(tl.int64)
        t, m, k, p = tl.load(divisors + i), tl.load(min_p + i), tl.load(top_k + i), tl.load(top_p + i)
        g = tl.arange(0, GROUPS)
        best = tl.max(tl.load(bests + i * num_groups + g, mask=g < num_groups, other=float("-inf")), 0)
        highest = divided(best, t)
        place = logits + i * vocab_size
        room = entries + i * LIST
        # 1 min-p
        cut, last = lowest_key_of_min_p(highest, m) - 1, tl.full([], -1, tl.int32)
        # 2 top-k
        _, count = totals_of(place, vocab_size, t, highest, cut, last, False, BLOCK)
        if k < count:
            cut, last = searched_cut(
                place, vocab_size, t, highest, cut, last, count, k.to(tl.int64), room, False, LIST, BLOCK
            )  # fmt: skip
        # 3 top-p over what is left
        if p < 1.0:
            total, count = totals_of(place, vocab_size, t, highest, cut, last, True, BLOCK)
            cut, last = searched_cut(
                place, vocab_size, t, highest, cut, last, count, mass_wanted(total, p), room, True, LIST, BLOCK
            )  # fmt: skip
        if DRAW:
            # 4 the best score of what is left
            score, token = best_of_kept(place, vocab_size, t, tl.load(keys + i), cut, last, SCHEME, BLOCK)
            tl.store(sampled + i, token.to(tl.int64))
            tl.store(faults + i, tl.where(score == float("-inf"), NO_TOKEN, 0))
        else:
            tl.store(cut_keys + i, cut)
            tl.store(cut_tokens + i, last)


def search_cuts(
    rows: RowParams, num_logits: int, logits: torch.Tensor, groups: GroupBests, lists: Lists, cut_keys: torch.Tensor,
    cut_tokens: torch.Tensor,
) -> None:  # fmt: skip
    """Where rows marked TOO_MANY are cut. Shapes: as `cut_lists`. Writes: their entries of cut_keys and cut_tokens."""
    outputs = (cut_keys, cut_tokens, cut_keys, cut_keys)
    _launch(rows, "murmur3", num_logits, logits, groups, lists, outputs, draw=False)


def draw_searched(
    rows: RowParams, noise: str, num_logits: int, logits: torch.Tensor, groups: GroupBests, lists: Lists,
    sampled: torch.Tensor, faults: torch.Tensor,
) -> None:  # fmt: skip
    """The tokens of rows marked TOO_MANY. Shapes: as `draw`. Writes: their entries of sampled and faults."""
    outputs = (faults, faults, sampled, faults)
    _launch(rows, noise, num_logits, logits, groups, lists, outputs, draw=True)


def _launch(
    rows: RowParams, noise: str, num_logits: int, logits: torch.Tensor, groups: GroupBests, lists: Lists,
    outputs: tuple[torch.Tensor, ...], *, draw: bool,
) -> None:  # fmt: skip
    vocab_size, programs = logits.shape[1], min(num_logits, PROGRAMS)
    launch(
        _search_rows_kernel, (programs,), rows.keys, rows.divisors, rows.min_p, rows.top_k, rows.top_p, num_logits,
        logits, vocab_size, groups.bests, groups.num_groups, lists.entries, lists.lens, *outputs, SCHEME=noise,
        DRAW=draw, GROUPS=block(groups.num_groups), LIST=lists.width, BLOCK=tile(vocab_size, most=BLOCK_WIDTH),
        EACH=block(triton.cdiv(num_logits, max(programs, 1)), least=1), num_warps=WARPS,
    )  # fmt: skip
