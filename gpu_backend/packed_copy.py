"""Everything a step sends to the device, in one copy.

The host lays named arrays side by side into a pinned buffer that is used once, and one asynchronous copy takes them
to an arena on the device. A pinned buffer that were written again for the next step could change under a copy that
the device has not made yet. GPU only: in NumPy there is nothing to send.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from gpu_backend.copy_engine import CopyEngine, StreamCopies

# Every array starts at a multiple of this many bytes, so that any element type may follow any other.
ALIGNMENT = 16


def pinned_empty(num_bytes: int, device: torch.device) -> torch.Tensor:
    """A fresh host buffer uint8[num_bytes], pinned if the device copies asynchronously.

    PyTorch hands pinned memory out again only after the copies that read it are done.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def copy_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """One array to a fresh device tensor of its shape and type, without waiting."""
    host = pinned_empty(array.nbytes, device)
    host.numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    on_device = torch.empty_like(host, device=device).copy_(host, non_blocking=True)
    return on_device.view(torch_dtype(array.dtype)).view(array.shape)


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """The torch type of a NumPy type."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


class PackedCopy:
    """One step's host arrays: `tables` at addresses that never change, and `extra` arrays that come and go.

    `tables` maps a name to a host array that its owner keeps and changes; `views` maps the name to its device copy,
    which has the values of the latest `send`. `add` registers an array for the next `send` alone, and is answered
    with a ticket: `extra[ticket]` is its device copy until the send after it. Both travel together, as long as the
    extra ones fit into `extra_bytes`; a step with more (many long prompts at once) sends those in a second copy.
    """

    def __init__(
        self, tables: Mapping[str, np.ndarray], extra_bytes: int, device: torch.device, copies: CopyEngine | None = None
    ) -> None:
        self.tables = dict(tables)
        self.device = device
        self.copies = copies or StreamCopies(device)
        self.num_copies = 0
        self._offsets, end = {}, 0
        for name, array in self.tables.items():
            self._offsets[name] = end
            end = _aligned(end + array.nbytes)
        self._tables_end = end
        self._arena = torch.zeros(end + _aligned(extra_bytes), dtype=torch.uint8, device=device)
        self.views = {name: _view(self._arena, self._offsets[name], array) for name, array in self.tables.items()}
        self.extra: list[torch.Tensor] = []
        self._added: list[np.ndarray] = []

    def add(self, array: np.ndarray) -> int:
        """Send this array too; the answer is its index in `extra` after the next `send`."""
        self._added.append(np.ascontiguousarray(array))
        return len(self._added) - 1

    def barrier(self) -> AbstractContextManager[None]:
        """Enter it to write what is sent. Nothing to wait for: no buffer is written while a copy may read it."""
        return nullcontext()

    def _host_buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8[at least num_bytes] to lay a step's arrays into."""
        return pinned_empty(num_bytes, self.device)

    def send(self) -> None:
        """Copy all tables and all added arrays; what was added before the last send is gone."""
        # 1 where each added array goes, behind the tables
        offsets, end = [], self._tables_end
        for array in self._added:
            offsets.append(end)
            end = _aligned(end + array.nbytes)
        # 2 one host buffer holds everything
        buffer = self._host_buffer(end)
        host = buffer.numpy()
        for name, array in self.tables.items():
            _lay(host, self._offsets[name], array)
        for offset, array in zip(offsets, self._added, strict=True):
            _lay(host, offset, array)
        # 3 one copy, or two if the arena is too small
        fits = end <= len(self._arena)
        sent = end if fits else self._tables_end
        self.copies.copy(self._arena[:sent], buffer[:sent])
        target, shift = self._arena, 0
        if not fits:
            shift = self._tables_end
            target = torch.empty(end - shift, dtype=torch.uint8, device=self.device)
            self.copies.copy(target, buffer[shift:end])
        self.num_copies += 1 if fits else 2
        # 4 the added arrays as the device sees them
        self.extra = [_view(target, o - shift, a) for o, a in zip(offsets, self._added, strict=True)]
        self._added = []


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _lay(host: np.ndarray, offset: int, array: np.ndarray) -> None:
    host[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)


def _view(buffer: torch.Tensor, offset: int, array: np.ndarray) -> torch.Tensor:
    return buffer[offset : offset + array.nbytes].view(torch_dtype(array.dtype)).view(array.shape)
