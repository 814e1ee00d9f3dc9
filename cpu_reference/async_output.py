"""The result of a step. Here it is complete at once; the contract is the same as on a device.

Twin: gpu_backend/async_output.py.
"""

from __future__ import annotations

import numpy as np

from runner_api.outputs import LogprobsLists, ModelRunnerOutput


class AsyncOutput:
    """Holds its own copies: later steps may change rows and buffers before somebody asks."""

    def __init__(
        self,
        req_ids: tuple[str, ...],
        token_ids: np.ndarray,
        num_sampled: np.ndarray,
        logprobs: LogprobsLists | None = None,
    ) -> None:
        self._req_ids = req_ids
        self._token_ids = token_ids.copy()  # int64[R, 1+K]
        self._num_sampled = num_sampled.copy()  # int32[R]
        self._logprobs = logprobs

    def get_output(self) -> ModelRunnerOutput:
        """Row i gives its first num_sampled[i] tokens. May be called again; the answer is the same."""
        tokens = tuple(
            tuple(row[:n]) for row, n in zip(self._token_ids.tolist(), self._num_sampled.tolist(), strict=True)
        )
        return ModelRunnerOutput(self._req_ids, tokens, self._logprobs)
