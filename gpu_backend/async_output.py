"""The result of a step on its way to the host. Waiting for it is the only wait of a step.

Twin: cpu_reference/async_output.py.
"""

from __future__ import annotations

import torch

from runner_api.outputs import LogprobsLists, ModelRunnerOutput


class AsyncOutput:
    """Holds its own copies: later steps may change rows and buffers before somebody asks.

    On a GPU the copies run on a stream of their own, from where the main stream stands now: what the main stream is
    given next need not wait for them, nor they for it. `copied` is recorded behind them; who writes `token_ids` or
    `num_sampled` again must wait for it, on the device.
    """

    def __init__(
        self,
        req_ids: tuple[str, ...],
        token_ids: torch.Tensor,
        num_sampled: torch.Tensor,
        logprobs: LogprobsLists | None = None,
        copy_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._req_ids = req_ids
        self._logprobs = logprobs
        self.copied: torch.cuda.Event | None = None
        if copy_stream is None:
            self._token_ids = token_ids.clone()  # int64[R, 1+K]
            self._num_sampled = num_sampled.clone()  # int32[R]
            return
        copy_stream.wait_stream(torch.cuda.current_stream(copy_stream.device))
        with torch.cuda.stream(copy_stream):
            self._token_ids = _to_pinned(token_ids)
            self._num_sampled = _to_pinned(num_sampled)
            self.copied = torch.cuda.Event()
            self.copied.record(copy_stream)
        self._sources = (token_ids, num_sampled)  # the device's memory must outlive the copies

    def get_output(self) -> ModelRunnerOutput:
        """Row i gives its first num_sampled[i] tokens. May be called again; the answer is the same."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens = tuple(
            tuple(row[:n]) for row, n in zip(self._token_ids.tolist(), self._num_sampled.tolist(), strict=True)
        )
        return ModelRunnerOutput(self._req_ids, tokens, self._logprobs)


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
