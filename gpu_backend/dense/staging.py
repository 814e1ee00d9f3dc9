"""Buffers on the host that serve every step, and the barrier that this takes.

The slots layout lays each step's arrays into memory that is used once (`gpu_backend.packed_copy`). Here one pinned
buffer, and one pinned table per KV cache group, are written again for every step. A copy to the device is only queued
when it is asked for; if the device is still busy with an earlier step, it reads the host's memory later. What the host
has written by then for the next step would be computed with in this one: no crash, wrong tokens. So whoever writes
waits at a barrier until the copies that were queued last have been made. docs/late-copies.md shows both.

Source: vLLM V1, `synchronize_input_prep`. GPU only: in NumPy nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from gpu_backend.copy_engine import CopyEngine
from gpu_backend.packed_copy import PackedCopy, pinned_empty, torch_dtype


def pinned_table(shape: tuple[int, ...], dtype: type[np.generic], device: torch.device) -> torch.Tensor:
    """Zeros on the host, that the device can copy from without waiting; `.numpy()` is a view."""
    kind = torch_dtype(np.dtype(dtype))
    num_bytes = int(np.prod(shape)) * kind.itemsize
    return pinned_empty(num_bytes, device).zero_().view(kind).view(shape)


class Staging(PackedCopy):
    """A step's host arrays in one copy, from a buffer that lives as long as the runner.

    guarded: False leaves the barrier out. There is one reason to do so: to see what it is for.
    """

    def __init__(
        self, tables: Mapping[str, np.ndarray], extra_bytes: int, device: torch.device, copies: CopyEngine | None = None
    ) -> None:
        super().__init__(tables, extra_bytes, device, copies)
        self.guarded = True
        self._buffer = pinned_empty(len(self._arena), device)
        self._last_use = self.copies.event()

    def _host_buffer(self, num_bytes: int) -> torch.Tensor:
        """The same one each time, or from now on a larger one."""
        if num_bytes > len(self._buffer):
            self._buffer = pinned_empty(num_bytes, self.device)
        return self._buffer

    @contextmanager
    def barrier(self) -> Iterator[None]:
        """Whatever is sent, this buffer's and what else is copied from in place, is written inside.

        Entering waits for the copies of the last time. Leaving, also by an error, marks the place behind those that
        were queued inside: a mark that is missing once would let the next step overtake the copies of this one.
        """
        if self.guarded:
            self._last_use.synchronize()
        try:
            yield
        finally:
            self._last_use.record()
