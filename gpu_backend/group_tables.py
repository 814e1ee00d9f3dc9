"""Device-side lists with one entry per KV cache group, so that one launch serves all groups.

Stages take plain lists, of tensors or of integers, as their twins do. A kernel needs them on the device: addresses of
the tensors, values of the integers. Each list is brought there once and kept; a runner's lists never change, so after
the first step nothing is sent. GPU only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from gpu_backend.triton_support import PointerTable

# Lists kept at most, over all runners of the process; the one used longest ago goes first.
MAX_KEPT = 64

T = TypeVar("T")


class _Kept:
    """A bounded dictionary of what was built for a key."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Any, Any] = OrderedDict()

    def get(self, key: Any, build: Callable[[], T]) -> T:
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key]
        value = self._entries[key] = build()
        if len(self._entries) > MAX_KEPT:
            self._entries.popitem(last=False)
        return value

    def discard(self, key: Any) -> None:
        self._entries.pop(key, None)


_pointers = _Kept()
_integers = _Kept()


def _key(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((t.data_ptr(), t.stride(0), t.device) for t in tensors)


def pointer_table(tensors: Sequence[torch.Tensor]) -> PointerTable:
    """Addresses and row strides of these tensors, on their device.

    The entry holds the tensors: while it lives, their addresses cannot come to mean other memory.
    """
    return _pointers.get(_key(tensors), lambda: PointerTable(tensors, tensors[0].device))


def forget_pointer_table(tensors: Sequence[torch.Tensor]) -> None:
    """Let go of the tensors: a runner that shuts down gives its memory back."""
    _pointers.discard(_key(tensors))


def device_integers(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """These integers as int32[G] on the device."""
    key = (tuple(int(v) for v in values), device)
    return _integers.get(key, lambda: torch.tensor(key[0], dtype=torch.int32, device=device))
