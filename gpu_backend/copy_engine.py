"""Who copies from the host to the device, and when: in stream order, or as late as a test wants it.

A copy that was asked for is not a copy that was made: the device reads the host's memory when its stream gets there,
which may be steps later. `SimulatedCopies` makes that visible without a GPU. GPU only: in NumPy nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch


class CopyEvent(Protocol):
    """A place in the stream. `synchronize` waits until the stream has got there; before any `record` it need not."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class CopyEngine(Protocol):
    """num_copies, num_bytes: asked for so far."""

    num_copies: int
    num_bytes: int

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Ask for `target` (on the device) to become `source` (host memory, pinned if there is a GPU)."""
        ...

    def event(self) -> CopyEvent: ...


class _Now:
    """Where nothing is ever late."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class StreamCopies:
    """Copies in the order of the current stream, without waiting; on the CPU they are made at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_copies = self.num_bytes = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.num_copies += 1
        self.num_bytes += source.nbytes
        if self.device.type == "cuda":
            target.copy_(source, non_blocking=True)
        else:  # torch would start threads for a few kilobytes
            np.copyto(target.numpy(), source.numpy())

    def event(self) -> CopyEvent:
        # blocking: whoever waits sleeps, and leaves its core to others
        return torch.cuda.Event(blocking=True) if self.device.type == "cuda" else _Now()  # type: ignore[return-value]


class SimulatedCopies:
    """A stream that does nothing until somebody waits for it: the latest that a device may be, every time.

    Copies keep no copy of their source: each reads the host's memory when its turn comes.
    """

    def __init__(self) -> None:
        self.num_copies = self.num_bytes = 0
        self.num_queued = self.num_done = 0  # pieces of work so far
        self._queue: deque[Callable[[], object]] = deque()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.num_copies += 1
        self.num_bytes += source.nbytes
        self.launch(lambda: target.copy_(source))

    def launch(self, work: Callable[[], object]) -> None:
        """Queue what the device does: a kernel, say."""
        self._queue.append(work)
        self.num_queued += 1

    def run(self, until: int | None = None) -> None:
        """Let the stream run: to its end, or until so many pieces of work are done."""
        while self._queue and (until is None or self.num_done < until):
            self.num_done += 1
            self._queue.popleft()()

    def event(self) -> CopyEvent:
        return _SimulatedEvent(self)


class _SimulatedEvent:
    def __init__(self, stream: SimulatedCopies) -> None:
        self._stream, self._place = stream, 0

    def record(self) -> None:
        self._place = self._stream.num_queued

    def synchronize(self) -> None:
        self._stream.run(self._place)
