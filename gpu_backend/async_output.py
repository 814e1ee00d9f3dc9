"""The result of a step on its way to the host. Waiting for it is the only wait of a step.

Twin: cpu_reference/async_output.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from gpu_backend.sample.logprob import LogprobsTensors
from runner_api.outputs import LogprobsLists, ModelRunnerOutput, SampleFault


class AsyncOutput:
    """Holds its own copies: later steps may change rows and buffers before somebody asks.

    On a GPU the copies run on a stream of their own, from where the main stream stands now: what the main stream is
    given next need not wait for them, nor they for it. `copied` is recorded behind them; who writes `token_ids`,
    `num_sampled` or `faults` again must wait for it, on the device.

    faults: int32[R] the `SampleFault` of each request. prompt_logprobs: runs of rows, on the host or on their way there
    (`start_for_host` on the same stream).
    """

    def __init__(
        self,
        req_ids: tuple[str, ...],
        token_ids: torch.Tensor,
        num_sampled: torch.Tensor,
        faults: torch.Tensor | None = None,
        logprobs: LogprobsTensors | None = None,
        prompt_logprobs: Mapping[str, Sequence[LogprobsTensors]] | None = None,
        copy_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._req_ids = req_ids
        self._prompt_logprobs = dict(prompt_logprobs or {})
        self._output: ModelRunnerOutput | None = None
        self.copied: torch.cuda.Event | None = None
        faults = torch.zeros_like(num_sampled) if faults is None else faults
        sources = [token_ids, num_sampled, faults]
        if logprobs is not None:
            sources += logprobs.tensors()
        # int64[R, 1+K], int32[R], int32[R], and the fields of LogprobsTensors
        self._token_ids, self._num_sampled, self._faults, *rest = start_for_host(sources, copy_stream)
        self._logprobs = LogprobsTensors(*rest) if rest else None
        if copy_stream is not None:
            self.copied = torch.cuda.Event()
            self.copied.record(copy_stream)

    def get_output(self) -> ModelRunnerOutput:
        """Row i gives its first num_sampled[i] tokens, or an error and none. May be called again; the answer is the
        same."""
        if self._output is None:
            if self.copied is not None:
                self.copied.synchronize()
            rows = zip(self._token_ids.tolist(), self._num_sampled.tolist(), self._faults.tolist(), strict=True)
            tokens, errors = [], {}
            for req_id, (row, n, fault) in zip(self._req_ids, rows, strict=True):
                failed = n > 0 and fault != SampleFault.NONE
                tokens.append(() if failed else tuple(row[:n]))
                if failed:
                    errors[req_id] = SampleFault(fault)
            logprobs = None if self._logprobs is None else self._logprobs.lists()
            prompts = {req_id: _joined(parts) for req_id, parts in self._prompt_logprobs.items()}
            self._output = ModelRunnerOutput(self._req_ids, tuple(tokens), logprobs, prompts, errors)
        return self._output


def start_for_host(tensors: Sequence[torch.Tensor], copy_stream: torch.cuda.Stream | None) -> list[torch.Tensor]:
    """Copies on the host, complete once the copy stream has come so far; at once where there is none.

    The memory copied from is not given to anybody else before.
    """
    if copy_stream is None:
        return [tensor.clone() for tensor in tensors]
    copy_stream.wait_stream(torch.cuda.current_stream(copy_stream.device))
    copies = []
    with torch.cuda.stream(copy_stream):
        for tensor in tensors:
            copies.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
            copies[-1].copy_(tensor, non_blocking=True)
            tensor.record_stream(copy_stream)
    return copies


def _joined(parts: Sequence[LogprobsTensors]) -> LogprobsLists:
    """Runs of rows, one behind the other."""
    lists = [part.lists() for part in parts]
    return LogprobsLists(
        np.concatenate([p.token_ids for p in lists]), np.concatenate([p.logprobs for p in lists]),
        np.concatenate([p.ranks for p in lists]),
    )  # fmt: skip
