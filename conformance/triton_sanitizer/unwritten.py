"""Which elements of a tensor nobody has written yet, from launch to launch.

A fresh buffer cannot be told from one full of zeros. A marked tensor is filled with a pattern; an element counts as
unwritten until a kernel stores it, or until it no longer holds the pattern because the host wrote it. CPU tensors only.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.triton_sanitizer.shadow import Shadow

_PATTERN = 0xCB  # repeated in every byte: a float far from any data, an index far outside


class Unwritten:
    """Marks of one tensor. `size` bytes from address `start` on, elements of `itemsize` bytes."""

    def __init__(self, tensor: Any, size: int, itemsize: int) -> None:
        self.start = int(tensor.data_ptr())
        self.size, self.itemsize = size, itemsize
        elements = np.arange(size // itemsize)
        steps = tuple(stride * elements.itemsize for stride in tensor.stride())
        own = np.lib.stride_tricks.as_strided(elements, tuple(tensor.shape), steps).reshape(-1)
        self.marks = np.zeros(len(elements), bool)  # gaps between a view's elements stay unmarked
        self.marks[own] = True
        self._bytes()[self.marks] = _PATTERN

    def _bytes(self) -> npt.NDArray[np.uint8]:
        """uint8[elements, itemsize]: the memory itself. The tensor must be alive."""
        raw = (ctypes.c_uint8 * self.size).from_address(self.start)
        return np.frombuffer(raw, np.uint8).reshape(-1, self.itemsize)

    def notice_host_writes(self) -> bool:
        """Drop marks of elements that the host has written since; False when no mark is left."""
        if self.marks.any():
            self.marks &= (self._bytes() == _PATTERN).all(1)
        return bool(self.marks.any())

    def _overlap(self, shadow: Shadow) -> tuple[slice, slice]:
        """Elements here and units there that are the same memory."""
        begin = max(self.start, shadow.start)
        end = min(self.start + self.size, shadow.start + shadow.units * shadow.unit)
        first, last = -(-(begin - self.start) // self.itemsize), max(end - self.start, 0) // self.itemsize
        last = max(first, last)
        times, offset = self.itemsize // shadow.unit, (self.start - shadow.start) // shadow.unit
        return slice(first, last), slice(offset + first * times, offset + last * times)

    def lay_into(self, shadow: Shadow) -> None:
        elements, units = self._overlap(shadow)
        if shadow.unwritten is None:
            shadow.unwritten = np.zeros(shadow.units, bool)
        shadow.unwritten[units] |= np.repeat(self.marks[elements], self.itemsize // shadow.unit)

    def take_from(self, shadow: Shadow) -> None:
        elements, units = self._overlap(shadow)
        if shadow.unwritten is not None and elements.start < elements.stop:
            left = shadow.unwritten[units].reshape(-1, self.itemsize // shadow.unit).any(1)
            self.marks[elements] &= left
