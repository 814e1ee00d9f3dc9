"""The draw: argmax of logits plus noise, which samples from their softmax. Twin: cpu_reference/sample/gumbel.py.

Scores are float32 here and float64 in the twin: two tokens whose scores differ by less than the noise's error (see
`noise.gumbel_noise`) may change places. Greedy rows have no noise and are exact.
"""

from __future__ import annotations

import torch

from gpu_backend.sample.noise import row_words, to_gumbel, to_uniforms, vocab_tiles
from gpu_backend.triton_support import block, entry, launch, signature, tl, triton


@triton.jit
def tile_scores(
    i,
    token,
    expanded_idx_mapping,
    positions,
    temperature,
    seeds,
    num_logits,
    logits,
    vocab_size,
    SCHEME: tl.constexpr,
):
    """Scores of a tile: logits rows i, tokens `token`; -inf past either end."""
    # 1 each row's parameters; a row that belongs to no request is taken as greedy
    row = tl.load(expanded_idx_mapping + i, mask=i < num_logits, other=-1)
    random = tl.load(temperature + row, mask=row >= 0, other=0.0) != 0.0
    inside = (i < num_logits)[:, None] & (token < vocab_size)[None, :]
    place = logits + (i * vocab_size)[:, None] + token[None, :]
    scores = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
    # 2 noise where the row is not greedy
    if tl.max(random.to(tl.int32), 0) > 0:
        seed = tl.load(seeds + row, mask=random, other=0)
        position = tl.load(positions + i, mask=random, other=0)
        words = row_words(seed[:, None], position[:, None], token.to(tl.uint64)[None, :], SCHEME)
        scores = tl.where(random[:, None], scores + to_gumbel(to_uniforms(words, SCHEME)), scores)
    return scores


@entry
@signature(
    {"*i64": "expanded_idx_mapping positions seeds", "*fp32": "temperature logits scores"},
    SCHEME="murmur3", ROWS=1, BLOCK=2048,
)  # fmt: skip
@signature(
    {"*i64": "expanded_idx_mapping positions seeds", "*fp32": "temperature logits scores"},
    SCHEME="philox", ROWS=1, BLOCK=2048,
)  # fmt: skip
@triton.jit(do_not_specialize=["num_logits"])
def _gumbel_scores_kernel(
    expanded_idx_mapping,
    positions,
    temperature,
    seeds,
    num_logits,
    logits,
    vocab_size,
    scores,
    SCHEME: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tile_scores(
        i, token, expanded_idx_mapping, positions, temperature, seeds, num_logits, logits, vocab_size, SCHEME
    )
    inside = (i < num_logits)[:, None] & (token < vocab_size)[None, :]
    tl.store(scores + (i * vocab_size)[:, None] + token[None, :], x, mask=inside)


def gumbel_scores(
    expanded_idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    noise: str,
    num_logits: int,
    logits: torch.Tensor,
) -> torch.Tensor:
    """Logits plus Gumbel noise keyed by (seed, position, token id), float32[L, V]; greedy rows get none.

    Shapes: expanded_idx_mapping: int64[>= L]; positions: int64[L] of each row's input token; temperature: float32[N],
    seeds: int64[N] by row; logits: float[L, V], contiguous, already divided by the temperature.
    """
    vocab_size = logits.shape[1]
    scores = torch.empty(num_logits, vocab_size, dtype=torch.float32, device=logits.device)
    grid, tiling = vocab_tiles(num_logits, vocab_size)
    launch(
        _gumbel_scores_kernel, grid,
        expanded_idx_mapping, positions, temperature, seeds, num_logits, logits, vocab_size, scores,
        SCHEME=noise, **tiling,
    )  # fmt: skip
    return scores


@entry
@signature({"*fp32": "best_scores", "*i64": "best_tokens sampled"}, TILES=64)
@triton.jit
def _first_best_kernel(best_scores, best_tokens, num_tiles, sampled, TILES: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    scores = tl.load(best_scores + i * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    # Tiles stand in the order of their tokens, so the first of equal tiles holds the lowest token.
    first = tl.argmax(scores, 0, tie_break_left=True)
    tl.store(sampled + i, tl.load(best_tokens + i * num_tiles + first))


@entry
@signature(
    {"*i64": "expanded_idx_mapping positions seeds best_tokens", "*fp32": "temperature logits best_scores"},
    SCHEME="murmur3", ROWS=1, BLOCK=2048,
)  # fmt: skip
@signature(
    {"*i64": "expanded_idx_mapping positions seeds best_tokens", "*fp32": "temperature logits best_scores"},
    SCHEME="philox", ROWS=1, BLOCK=2048,
)  # fmt: skip
@triton.jit(do_not_specialize=["num_logits"])
def _gumbel_sample_kernel(
    expanded_idx_mapping,
    positions,
    temperature,
    seeds,
    num_logits,
    logits,
    vocab_size,
    best_scores,
    best_tokens,
    SCHEME: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    token = tile * BLOCK + tl.arange(0, BLOCK)
    scores = tile_scores(
        i, token, expanded_idx_mapping, positions, temperature, seeds, num_logits, logits, vocab_size, SCHEME
    )
    # 3 the best score of the tile, the first of equals
    best, first = tl.max(scores, 1, return_indices=True, return_indices_tie_break_left=True)
    place = i * tl.num_programs(1) + tile
    tl.store(best_scores + place, best, mask=i < num_logits)
    tl.store(best_tokens + place, (tile * BLOCK + first).to(tl.int64), mask=i < num_logits)


def gumbel_sample(
    expanded_idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    noise: str,
    num_logits: int,
    logits: torch.Tensor,
    sampled: torch.Tensor,
) -> None:
    """The token of each logits row: the highest score, ties to the lowest id.

    Shapes: as `gumbel_scores`; sampled: int64[>= L]. Writes: sampled[:L].
    """
    vocab_size = logits.shape[1]
    grid, tiling = vocab_tiles(num_logits, vocab_size)
    num_tiles = grid[1]
    best_scores = torch.empty(num_logits, num_tiles, dtype=torch.float32, device=logits.device)
    best_tokens = torch.empty(num_logits, num_tiles, dtype=torch.int64, device=logits.device)
    launch(
        _gumbel_sample_kernel, grid,
        expanded_idx_mapping, positions, temperature, seeds, num_logits, logits, vocab_size, best_scores,
        best_tokens if num_tiles > 1 else sampled, SCHEME=noise, **tiling,
    )  # fmt: skip
    if num_tiles > 1:
        launch(_first_best_kernel, (num_logits,), best_scores, best_tokens, num_tiles, sampled, TILES=block(num_tiles))
