"""The sampler: parameters by row, and the order in which the steps run.

Source: vLLM 0.33 sampling order (temperature, draw; the filters between them are refused by capability). Twin:
cpu_reference/sample/sampler.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gpu_backend.packed_copy import PackedCopy
from gpu_backend.sample.gumbel import gumbel_sample, gumbel_scores
from gpu_backend.sample.temperature import apply_temperature
from runner_api.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """sampled: int64[L] one token per logits row; scores: float32[L, V] what they won by, if asked for."""

    sampled: torch.Tensor
    scores: torch.Tensor | None


class Sampler:
    """One entry per row in every array; a row is rewritten whole when a request moves in.

    The host's arrays (`*_np`) hold what was asked; the device's are their copies as of the step's one packed copy.
    """

    def __init__(self, max_num_reqs: int, vocab_size: int, noise: str) -> None:
        self.vocab_size = vocab_size
        self.noise = noise
        self.temperature_np = np.zeros(max_num_reqs, np.float32)
        self.seeds_np = np.zeros(max_num_reqs, np.int64)
        self.temperature: torch.Tensor  # float32[N], device; set by `bind`, as is the next
        self.seeds: torch.Tensor  # int64[N], device

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        return {"temperature": self.temperature_np, "seeds": self.seeds_np}

    def bind(self, packed: PackedCopy) -> None:
        """Take the device copies of the host's tables."""
        self.temperature, self.seeds = packed.views["temperature"], packed.views["seeds"]

    def add_request(self, row: int, params: SamplingParams, seed: int) -> None:
        """Set the row's parameters; the device has them after the next `PackedCopy.send`."""
        self.temperature_np[row] = params.temperature
        self.seeds_np[row] = seed

    def sample(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        positions: torch.Tensor,
        *,
        keep_scores: bool = False,
    ) -> SamplerOutput:
        """Draw one token per logits row.

        Shapes: logits: float[L, V], left as they are; expanded_idx_mapping: int64[L]; positions: int64[L] of the rows'
        input tokens, so that the noise belongs to (request, place in the sequence) and to nothing else.
        """
        num_logits = len(logits)
        rows = expanded_idx_mapping[:num_logits]
        processed = logits.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        # 1 temperature
        apply_temperature(rows, self.temperature, num_logits, processed)
        # 2 draw
        arguments = (rows, positions, self.temperature, self.seeds, self.noise, num_logits, processed)
        sampled = torch.empty(num_logits, dtype=torch.int64, device=logits.device)
        gumbel_sample(*arguments, sampled)
        scores = gumbel_scores(*arguments) if keep_scores else None
        return SamplerOutput(sampled, scores)
