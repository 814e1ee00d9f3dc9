"""Memory between two pages that nobody may touch: a stray access of an interpreted kernel ends the process.

The interpreter follows raw pointers and lands in a neighbour's memory without a word. Arrays made here end (or begin)
where a protected page begins (or ends), so that the first element beyond that side is out of reach. For processes
that may die, such as those that run a mutated kernel. `reverse_programs` runs the programs of a launch from the last
to the first, so that what one writes into another's part is not put right by chance.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import interpreter_builder

_PROT_NONE = 0
# What a kernel that reads in front of an array finds there: large, and no sum of small things.
_FILLING = 0x5B

_libc = ctypes.CDLL(None, use_errno=True)
_kept: list[mmap.mmap] = []
_plain_empty = torch.empty


def fenced_copy(array: np.ndarray, at_end: bool = True) -> np.ndarray:
    """A copy whose last (or first) byte is the last (first) one of its pages; the memory is never given back.

    The pages next to it on both sides are protected; between the array's other side and its page's edge lies filling.
    """
    size = array.nbytes
    page = mmap.PAGESIZE
    inner = max(-(-size // page), 1) * page
    region = mmap.mmap(-1, inner + 2 * page)
    whole = np.frombuffer(region, np.uint8)
    address = whole.ctypes.data
    inside = whole[page : page + inner]
    inside[:] = _FILLING
    for edge in (address, address + page + inner):
        if _libc.mprotect(ctypes.c_void_p(edge), ctypes.c_size_t(page), _PROT_NONE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    _kept.append(region)
    place = inside[inner - size :] if at_end else inside[:size]
    out = place[:size].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def fence_allocations(at_end: bool = True) -> None:
    """From now on `torch.empty` on the CPU gives fenced memory, filled with garbage."""

    def empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None, **rest: Any) -> torch.Tensor:
        tensor = _plain_empty(*size, dtype=dtype, device=device, **rest)
        if tensor.device.type != "cpu" or rest or tensor.numel() == 0:
            return tensor
        raw = np.zeros(tensor.numel() * tensor.element_size(), np.uint8)
        fenced = fenced_copy(raw, at_end)
        fenced[...] = _FILLING
        return torch.from_numpy(fenced).view(tensor.dtype).view(tensor.shape)

    torch.empty = empty  # type: ignore[assignment]


def reverse_programs() -> None:
    """From now on the programs of every launch run from the last to the first."""
    plain = interpreter_builder.set_grid_idx

    def set_grid_idx(x: int, y: int, z: int) -> None:
        nx, ny, nz = interpreter_builder.grid_dim
        plain(nx - 1 - x, ny - 1 - y, nz - 1 - z)

    interpreter_builder.set_grid_idx = set_grid_idx
