"""The result of a step. Here it is complete at once; the contract is the same as on a device.

Twin: gpu_backend/async_output.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from runner_api.outputs import LogprobsLists, ModelRunnerOutput, SampleFault


class AsyncOutput:
    """Holds its own copies: later steps may change rows and buffers before somebody asks.

    faults: int32[R] the `SampleFault` of each request.
    """

    def __init__(
        self,
        req_ids: tuple[str, ...],
        token_ids: np.ndarray,
        num_sampled: np.ndarray,
        faults: np.ndarray | None = None,
        logprobs: LogprobsLists | None = None,
        prompt_logprobs: Mapping[str, LogprobsLists] | None = None,
    ) -> None:
        self._req_ids = req_ids
        self._token_ids = token_ids.copy()  # int64[R, 1+K]
        self._num_sampled = num_sampled.copy()  # int32[R]
        self._faults = np.zeros_like(num_sampled) if faults is None else faults.copy()  # int32[R]
        self._logprobs = logprobs
        self._prompt_logprobs = dict(prompt_logprobs or {})

    def get_output(self) -> ModelRunnerOutput:
        """Row i gives its first num_sampled[i] tokens, or an error and none. May be called again; the answer is the
        same."""
        rows = zip(self._token_ids.tolist(), self._num_sampled.tolist(), self._faults.tolist(), strict=True)
        tokens, errors = [], {}
        for req_id, (row, n, fault) in zip(self._req_ids, rows, strict=True):
            failed = n > 0 and fault != SampleFault.NONE
            tokens.append(() if failed else tuple(row[:n]))
            if failed:
                errors[req_id] = SampleFault(fault)
        return ModelRunnerOutput(self._req_ids, tuple(tokens), self._logprobs, self._prompt_logprobs, errors)
