"""The sampler: parameters by row, and the order in which the steps run.

Source: vLLM 0.33 sampling order (temperature, draw; the filters between them are refused by capability). Twin:
cpu_reference/sample/sampler.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gpu_backend.packed_copy import copy_to_device
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

    The host's arrays (`*_np`) hold what was asked, the device's what `apply_staged_writes` has sent.
    """

    def __init__(self, max_num_reqs: int, vocab_size: int, noise: str, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.noise = noise
        self.device = device
        self.temperature_np = np.zeros(max_num_reqs, np.float32)
        self.seeds_np = np.zeros(max_num_reqs, np.int64)
        self.temperature = torch.zeros(max_num_reqs, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self._changed: set[int] = set()

    def add_request(self, row: int, params: SamplingParams, seed: int) -> None:
        """Stage the row's parameters; the device has them after `apply_staged_writes`."""
        self.temperature_np[row] = params.temperature
        self.seeds_np[row] = seed
        self._changed.add(row)

    def apply_staged_writes(self) -> None:
        """Send the changed rows in one copy that nobody waits for. No change, no copy."""
        if not self._changed:
            return
        rows = np.array(sorted(self._changed), np.int64)
        # Three lines of int64: row, seed, temperature (as the bits of a float64, which holds any float32).
        packed = np.stack([rows, self.seeds_np[rows], self.temperature_np[rows].astype(np.float64).view(np.int64)])
        at, seeds, temperature = copy_to_device(packed, self.device)
        self.seeds.index_copy_(0, at, seeds)
        self.temperature.index_copy_(0, at, temperature.view(torch.float64).float())
        self._changed.clear()

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
