"""The draw: argmax of logits plus noise, which samples from their softmax. Twin: cpu_reference/sample/gumbel.py.

Scores are float32 here and float64 in the twin: two tokens whose scores differ by less than the noise's error (see
`noise.gumbel_noise`) may change places. Greedy rows have no noise and are exact.
"""

from __future__ import annotations

import torch

from gpu_backend.sample.draw import draw, score
from gpu_backend.sample.noise import row_key, vocab_tiles
from gpu_backend.triton_support import entry, launch, signature, tl, triton


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
        key = row_key(seed, position, SCHEME)
        scores = score(scores, random[:, None], key[:, None], token[None, :], SCHEME)
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


def gumbel_sample(
    expanded_idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    noise: str,
    num_logits: int,
    logits: torch.Tensor,
    sampled: torch.Tensor,
    faults: torch.Tensor,
) -> None:
    """The token of each logits row: the highest score, ties to the lowest id.

    +inf is a score like others and always wins. A row that holds a NaN, or only -inf, has no winner: it is marked and
    gives token 0.

    Shapes: as `gumbel_scores`; sampled: int64[>= L]; faults: int32[>= L], a `SampleFault` each. Writes: the first L
    entries of both.
    """
    # Nothing is left to divide or to drop: `draw` looks who has the best score, and marks rows without a winner.
    draw(
        expanded_idx_mapping, positions, temperature, seeds, noise, None, num_logits, logits, sampled, faults,
        divide=False,
    )  # fmt: skip
