"""The sampler: parameters by row, and the order in which the steps run.

Source: vLLM 0.33 sampling order (temperature, min-p, top-k, top-p, draw). Twin: gpu_backend/sample/sampler.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cpu_reference.sample.gumbel import gumbel_sample, gumbel_scores
from cpu_reference.sample.min_p import apply_min_p
from cpu_reference.sample.temperature import apply_temperature
from cpu_reference.sample.top_k_top_p import apply_top_k_top_p
from runner_api.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """sampled: int64[L] one token per logits row; scores: float64[L, V] what they won by, if asked for."""

    sampled: np.ndarray
    scores: np.ndarray | None


class Sampler:
    """One entry per row in every array; a row is rewritten whole when a request moves in."""

    def __init__(self, max_num_reqs: int, vocab_size: int, noise: str) -> None:
        self.vocab_size = vocab_size
        self.noise = noise
        self.temperature = np.zeros(max_num_reqs, np.float32)
        self.top_k = np.full(max_num_reqs, vocab_size, np.int32)  # vocab_size = keep all
        self.top_p = np.ones(max_num_reqs, np.float32)
        self.min_p = np.zeros(max_num_reqs, np.float32)
        self.seeds = np.zeros(max_num_reqs, np.int64)
        self.num_logprobs = np.full(max_num_reqs, -1, np.int32)  # -1 = none asked for

    def add_request(self, row: int, params: SamplingParams, seed: int) -> None:
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seeds[row] = seed
        wanted = params.logprobs
        self.num_logprobs[row] = -1 if wanted is None else self.vocab_size if wanted == -1 else wanted

    def sample(
        self, logits: np.ndarray, expanded_idx_mapping: np.ndarray, positions: np.ndarray, *, keep_scores: bool = False
    ) -> SamplerOutput:
        """Draw one token per logits row.

        Shapes: logits: float[L, V], left as they are; expanded_idx_mapping: int64[L]; positions: int64[L] of the rows'
        input tokens, so that the noise belongs to (request, place in the sequence) and to nothing else.
        """
        num_logits = len(logits)
        rows = expanded_idx_mapping[:num_logits]
        processed = logits.copy()
        # 1 temperature
        apply_temperature(rows, self.temperature, num_logits, processed)
        # 2 min-p
        if self.min_p[rows].any():
            apply_min_p(rows, self.min_p, num_logits, processed)
        # 3 top-k, then top-p
        apply_top_k_top_p(rows, self.top_k, self.top_p, num_logits, processed)
        # 4 draw
        arguments = (rows, positions, self.temperature, self.seeds, self.noise, num_logits, processed)
        sampled = np.zeros(num_logits, np.int64)
        gumbel_sample(*arguments, sampled)
        scores = gumbel_scores(*arguments) if keep_scores else None
        return SamplerOutput(sampled, scores)

    def logprobs_width(self, rows: np.ndarray) -> int:
        """The most log probabilities that any of these rows asked for; -1 if none did."""
        return int(self.num_logprobs[rows].max(initial=-1))
