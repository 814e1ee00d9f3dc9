"""The draw as one composite: temperature, min-p, top-k, top-p, noise and argmax, out of the logits as they are.

Gives bit for bit the tokens of the steps one by one (`apply_temperature`, `apply_min_p`, `apply_top_k_top_p`,
`gumbel_sample`), without a copy of the logits and hardly reading them more than once:

1. `row_params` looks up what each row is drawn with.
2. `group_bests` reads the logits: per group of neighbouring tokens, the best logit or a cheap bound of the best score.
3. a row without limits is decided by its groups: the exact scores of the group with the highest bound, and of any
   other whose bound is higher than the best score found (rarely another one).
4. a row with limits gets a list of the tokens that they can keep (`candidates`), is cut and drawn from there,
5. or, where no list decides, is searched (`search`).

Rows of a small vocabulary are done whole in one kernel. GPU only: the twin takes the steps one by one.
"""

from __future__ import annotations

import torch

from gpu_backend.sample.candidates import NO_LIST, TOO_MANY, Lists, list_candidates, list_cut
from gpu_backend.sample.cut import is_kept, row_cut
from gpu_backend.sample.group_bests import GroupBests, group_bests
from gpu_backend.sample.keys import NAN, NO_TOKEN, WIDEST_VOCABULARY, divided, from_key, to_key
from gpu_backend.sample.noise import row_key, to_gumbel, to_uniforms, vocab_tiles, words_of
from gpu_backend.sample.row_params import GREEDY, Draws, Limits, RowParams, look_up_draws, row_limits
from gpu_backend.sample.search import draw_searched
from gpu_backend.triton_support import INTERPRETED, block, entry, launch, signature, tile, tl, triton

WIDEST_WHOLE_ROW = 32768 if INTERPRETED else 2048


@triton.jit
def score(x, noisy, key, token, SCHEME: tl.constexpr):
    """x plus noise where `noisy`. key: of the row's noise."""
    return tl.where(noisy, x + to_gumbel(to_uniforms(words_of(key, token.to(tl.uint64), SCHEME), SCHEME)), x)


@triton.jit
def best_of_groups(
    best, place, vocab_size, t, noisy, key, SCHEME: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr
):
    """The best score of a row and its token, the first of equals: (float32, int32); (-inf, 0) if there is none.

    best: float32[GROUPS] a bound of each group, no NaN; place: where the row starts; t: its divisor.
    """
    g = tl.arange(0, GROUPS)
    best_score, best_token = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    bound = tl.max(best, 0)
    # A bound that is no higher than the best score is that of a group without a better one; a greedy row's are exact,
    # and the first of equal groups comes first.
    while bound > best_score:
        group = tl.min(tl.where(best == bound, g, GROUPS), 0)
        token = group * GROUP + tl.arange(0, GROUP)
        x = divided(tl.load(place + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32), t)
        if noisy:
            x = score(x, noisy, key, token, SCHEME)
        here, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        at += group * GROUP
        best_token = tl.where((here > best_score) | ((here == best_score) & (at < best_token)), at, best_token)
        best_score = tl.maximum(best_score, here)
        best = tl.where(g == group, float("-inf"), best)
        bound = tl.max(best, 0)
    return best_score, best_token


_TYPES = {"*i64": "entries list_totals sampled", "*i32": "kinds top_k list_lens faults", "*u32": "keys"}
_FLOATS = "divisors min_p top_p bests"
_PLAIN = {"LIMITED": False, "GROUPS": 512, "GROUP": 256, "LIST": 16, "num_warps": 1}
_SHORT = {"LIMITED": True, "GROUPS": 1024, "GROUP": 128, "LIST": 256, "num_warps": 1}
_LONG = {"LIMITED": True, "GROUPS": 1024, "GROUP": 128, "LIST": 2048, "num_warps": 4}


@entry
@signature({**_TYPES, "*fp32": f"{_FLOATS} logits"}, SCHEME="murmur3", **_PLAIN)
@signature({**_TYPES, "*fp32": _FLOATS, "*fp16": "logits"}, SCHEME="philox", **_PLAIN)
@signature({**_TYPES, "*fp32": _FLOATS, "*bf16": "logits"}, SCHEME="murmur3", **_SHORT)
@signature({**_TYPES, "*fp32": f"{_FLOATS} logits"}, SCHEME="philox", **_LONG)
@triton.jit(do_not_specialize=["num_groups"])
def _draw_rows_kernel(
    kinds,
    keys,
    divisors,
    min_p,
    top_k,
    top_p,
    logits,
    vocab_size,
    bests,
    num_groups,
    entries,
    list_lens,
    list_totals,
    sampled,
    faults,
    SCHEME: tl.constexpr,
    LIMITED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LIST: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    # 1 the row's parameters
    g = tl.arange(0, GROUPS)
    best = tl.load(bests + i * num_groups + g, mask=g < num_groups, other=float("-inf"))
    noisy = tl.load(kinds + i) != GREEDY
    noise_key, t = tl.load(keys + i), tl.load(divisors + i)
    length = tl.full([], NO_LIST, tl.int32)
    if LIMITED:
        length = tl.load(list_lens + i)
    is_nan = tl.max((best != best).to(tl.int32), 0)
    fault, token = tl.full([], NAN, tl.int32), tl.full([], 0, tl.int32)
    if (length == NO_LIST) & (is_nan == 0):
        # 2 no limits: the best of all
        best_score, token = best_of_groups(
            best, logits + i * vocab_size, vocab_size, t, noisy, noise_key, SCHEME, GROUPS, GROUP
        )
        fault = tl.where(best_score == float("-inf"), NO_TOKEN, 0)
    if LIMITED:  # noqa: SIM102
        if length >= 0:
            # 3 limits: the best of what is kept of the list
            m, k, p, total = tl.load(min_p + i), tl.load(top_k + i), tl.load(top_p + i), tl.load(list_totals + i)
            key, listed, cut, last, found = list_cut(
                entries + i * LIST, length, tl.max(best, 0), total, t, m, k, p, LIST
            )
            scores = score(from_key(key), noisy, noise_key, listed, SCHEME)
            scores = tl.where(is_kept(key, listed, cut, last), scores, float("-inf"))
            best_of_list, at = tl.max(scores, 1, return_indices=True, return_indices_tie_break_left=True)
            wins = (tl.arange(0, LIST)[None, :] == at[:, None]) & (scores > float("-inf"))
            token = tl.max(tl.max(tl.where(wins, listed, 0), 1), 0)
            fault = tl.where(tl.max(best_of_list, 0) == float("-inf"), NO_TOKEN, 0)
            length = tl.where(found > 0, length, TOO_MANY)
            tl.store(list_lens + i, length)
    if length != TOO_MANY:
        tl.store(sampled + i, token.to(tl.int64))
        tl.store(faults + i, fault)


_WHOLE = {"*i64": "expanded_idx_mapping positions seeds sampled", "*i32": "top_k faults"}


@entry
@signature(
    {**_WHOLE, "*fp32": "temperature min_p top_p logits"},
    SCHEME="murmur3", DIVIDE=True, LIMITED=True, ROWS=1, WIDTH=2048,
)  # fmt: skip
@signature(
    {**_WHOLE, "*fp32": "temperature min_p top_p", "*bf16": "logits"},
    SCHEME="philox", DIVIDE=False, LIMITED=False, ROWS=1, WIDTH=2048,
)  # fmt: skip
@triton.jit(do_not_specialize=["num_logits"])
def _draw_whole_rows_kernel(
    expanded_idx_mapping,
    positions,
    temperature,
    seeds,
    min_p,
    top_k,
    top_p,
    num_logits,
    logits,
    vocab_size,
    sampled,
    faults,
    SCHEME: tl.constexpr,
    DIVIDE: tl.constexpr,
    LIMITED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # 1 each row's parameters; a row that belongs to no request is taken as greedy
    row = tl.load(expanded_idx_mapping + i, mask=i < num_logits, other=-1)
    t = tl.load(temperature + row, mask=row >= 0, other=0.0)
    noisy = t != 0.0
    token = tl.arange(0, WIDTH)[None, :]
    inside = (i < num_logits)[:, None] & (token < vocab_size)
    x = tl.load(logits + (i * vocab_size)[:, None] + token, mask=inside, other=float("-inf")).to(tl.float32)
    is_nan = tl.max((x != x).to(tl.int32), 1)
    x = tl.where(x != x, float("-inf"), x)
    if DIVIDE:
        x = divided(x, tl.where(noisy, t, 1.0)[:, None])
    if LIMITED:
        # 2 what the limits keep
        m, k, p, limited = row_limits(row, noisy, min_p, top_k, top_p, vocab_size)
        if tl.max(limited.to(tl.int32), 0) > 0:
            cut, last = row_cut(x, token, m, k, p)
            x = tl.where(is_kept(to_key(x), token, cut[:, None], last[:, None]), x, float("-inf"))
    if tl.max(noisy.to(tl.int32), 0) > 0:
        # 3 noise where the row is not greedy
        seed = tl.load(seeds + row, mask=noisy, other=0)
        position = tl.load(positions + i, mask=noisy, other=0)
        key = row_key(seed, position, SCHEME)
        x = score(x, noisy[:, None], key[:, None], token, SCHEME)
    # 4 the best, the first of equals
    best, at = tl.max(x, 1, return_indices=True, return_indices_tie_break_left=True)
    fault = tl.where(is_nan > 0, NAN, tl.where(best == float("-inf"), NO_TOKEN, 0))
    tl.store(sampled + i, tl.where(fault > 0, 0, at).to(tl.int64), mask=i < num_logits)
    tl.store(faults + i, fault, mask=i < num_logits)


def draw(
    expanded_idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    noise: str,
    limits: Limits | None,
    num_logits: int,
    logits: torch.Tensor,
    sampled: torch.Tensor,
    faults: torch.Tensor,
    *,
    short: bool = False,
    divide: bool = True,
) -> None:
    """Draw one token per logits row from `logits / temperature`, limited by min-p, top-k and top-p, in this order.

    +inf is a score like others and always wins. A row that holds a NaN, or only -inf, has no winner: it is marked and
    gives token 0.

    Shapes: expanded_idx_mapping: int64[>= L], NO_ROW is taken as greedy; positions: int64[>= L] of each row's input
    token; temperature: float32[N], seeds: int64[N] by state row; limits: by state row, None = no row of the batch has
    any; logits: float32, bfloat16 or float16 [L, V], contiguous; sampled: int64[>= L]; faults: int32[>= L], a
    `SampleFault` each. short: every row with top-k or top-p has a k of at most SMALL_K (`candidates`); only the speed
    depends on it. divide: False = the logits are divided by the temperature already.
    Writes: the first L entries of sampled and faults.
    """
    vocab_size = logits.shape[1]
    assert vocab_size <= WIDEST_VOCABULARY, vocab_size
    draws = Draws(expanded_idx_mapping, positions, temperature, seeds, noise)
    if vocab_size <= tile(vocab_size, most=WIDEST_WHOLE_ROW):
        _draw_whole_rows(draws, limits, num_logits, logits, sampled, faults, divide)
        return
    rows = look_up_draws(draws, limits, num_logits, vocab_size, divide=divide)
    groups = group_bests(rows, noise, num_logits, logits, limited=limits is not None)
    if limits is None:
        _draw_rows(rows, noise, num_logits, logits, groups, None, sampled, faults)
        return
    lists = list_candidates(rows, num_logits, logits, groups, short=short)
    _draw_rows(rows, noise, num_logits, logits, groups, lists, sampled, faults)
    draw_searched(rows, noise, num_logits, logits, groups, lists, sampled, faults)


def _draw_whole_rows(
    draws: Draws, limits: Limits | None, num_logits: int, logits: torch.Tensor, sampled: torch.Tensor,
    faults: torch.Tensor, divide: bool,
) -> None:  # fmt: skip
    vocab_size = logits.shape[1]
    rows = vocab_tiles(num_logits, vocab_size)[1]["ROWS"]
    some = limits or Limits(draws.temperature, faults, draws.temperature)  # none of it is read
    launch(
        _draw_whole_rows_kernel, (triton.cdiv(num_logits, rows),), *draws[:4], *some, num_logits, logits, vocab_size,
        sampled, faults, SCHEME=draws.noise, DIVIDE=divide, LIMITED=limits is not None, ROWS=rows,
        WIDTH=block(vocab_size),
    )  # fmt: skip


def _draw_rows(
    rows: RowParams, noise: str, num_logits: int, logits: torch.Tensor, groups: GroupBests, lists: Lists | None,
    sampled: torch.Tensor, faults: torch.Tensor,
) -> None:  # fmt: skip
    tables = (sampled, faults, sampled) if lists is None else lists[:3]
    launch(
        _draw_rows_kernel, (num_logits,), *rows, logits, logits.shape[1], groups.bests, groups.num_groups, *tables,
        sampled, faults, SCHEME=noise, LIMITED=lists is not None, GROUPS=block(groups.num_groups), GROUP=groups.width,
        LIST=lists.width if lists else 16, num_warps=lists.num_warps if lists else 1,
    )  # fmt: skip
