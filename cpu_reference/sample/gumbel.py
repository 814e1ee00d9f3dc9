"""The draw: argmax of logits plus noise, which samples from their softmax. Twin: gpu_backend/sample/gumbel.py."""

from __future__ import annotations

import numpy as np

from cpu_reference.sample.noise import gumbel_noise
from runner_api import SampleFault


def gumbel_scores(
    expanded_idx_mapping: np.ndarray,
    positions: np.ndarray,
    temperature: np.ndarray,
    seeds: np.ndarray,
    noise: str,
    num_logits: int,
    logits: np.ndarray,
) -> np.ndarray:
    """Logits plus Gumbel noise keyed by (seed, position, token id), float64[L, V]; greedy rows get none.

    Shapes: expanded_idx_mapping: int64[>= L]; positions: int64[L] of each row's input token; temperature: float32[N],
    seeds: int64[N] by row; logits: float[L, V], already divided by the temperature.
    """
    # 1 each row's parameters
    rows = expanded_idx_mapping[:num_logits]
    random = (rows >= 0) & (temperature[rows] != 0)
    scores = logits[:num_logits].astype(np.float64)
    # 2 noise where the row is not greedy
    if random.any():
        scores[random] += gumbel_noise(seeds[rows][random], positions[:num_logits][random], logits.shape[1], noise)
    return scores


def gumbel_sample(
    expanded_idx_mapping: np.ndarray,
    positions: np.ndarray,
    temperature: np.ndarray,
    seeds: np.ndarray,
    noise: str,
    num_logits: int,
    logits: np.ndarray,
    sampled: np.ndarray,
    faults: np.ndarray,
) -> None:
    """The token of each logits row: the highest score, ties to the lowest id.

    +inf is a score like others and always wins. A row that holds a NaN, or only -inf, has no winner: it is marked and
    gives token 0.

    Shapes: as `gumbel_scores`; sampled: int64[>= L]; faults: int32[>= L], a `SampleFault` each. Writes: the first L
    entries of both.
    """
    scores = gumbel_scores(expanded_idx_mapping, positions, temperature, seeds, noise, num_logits, logits)
    # 3 who has the best score: argmax takes the first of equals, and a NaN for the best of all
    winner = scores.argmax(axis=1)
    best = scores[np.arange(num_logits), winner]
    # 4 rows without a winner
    faults[:num_logits] = SampleFault.NAN * np.isnan(best) + SampleFault.NO_TOKEN * (best == -np.inf)
    # 5 the others' winners
    sampled[:num_logits] = np.where(faults[:num_logits] == SampleFault.NONE, winner, 0)
