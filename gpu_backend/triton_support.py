"""Where kernels run, and how often each was launched. The first module of this package to import triton.

With an NVIDIA GPU kernels are compiled; without one they run in Triton's interpreter, which must be chosen before
triton is imported. GPU only: there is no NumPy twin.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from runner_api.errors import ConfigError

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402, F401

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

# The widest tile of a copying kernel. An interpreted program costs the same whatever its width; on a GPU a tile must
# fit into the registers of one program.
WIDEST_TILE = 65536 if INTERPRETED else 1024

# Launches of every entry kernel in this process, by kernel name; a kernel that was never launched is listed with 0.
KERNEL_LAUNCHES: dict[str, int] = {}
PROBE_LAUNCHES: dict[str, int] = {}

# The widest tile that a launcher may choose, and no limit by default. A test narrows it, so that loops over tiles run
# more than once on little data.
TILE_LIMIT = 65536

K = TypeVar("K")


def entry(kernel: K) -> K:
    """Decorate a `@triton.jit` kernel that the host launches: it is listed and its launches are counted."""
    KERNEL_LAUNCHES.setdefault(kernel.__name__, 0)  # type: ignore[attr-defined]
    return kernel


def probe(kernel: K) -> K:
    """Decorate a kernel that no step launches: it exists so that its parts can be looked at. Counted apart."""
    PROBE_LAUNCHES.setdefault(kernel.__name__, 0)  # type: ignore[attr-defined]
    return kernel


def signature(types: Mapping[str, str], **constants: Any) -> Callable[[K], K]:
    """Declare one way in which the host launches a kernel, so that it can be compiled where nothing can be launched.

    types: element type ("i64", "fp32", "*i32" for a pointer to int32) to the names of the arguments that have it;
    arguments named nowhere are i32. constants: the constexpr parameters, and arguments of a value that a launch
    compiles into the kernel (a stride of 1). Stack one decorator per way; `modelrunner kernels check` compiles each.
    """

    def declare(kernel: K) -> K:
        earlier = getattr(kernel, "compile_signatures", ())
        kernel.compile_signatures = ({"types": dict(types), "constants": constants}, *earlier)  # type: ignore[attr-defined]
        return kernel

    return declare


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch an entry kernel over `grid` and count it. An empty grid launches nothing."""
    if 0 in grid:
        return
    counts = PROBE_LAUNCHES if kernel.__name__ in PROBE_LAUNCHES else KERNEL_LAUNCHES
    counts[kernel.__name__] += 1
    kernel[grid](*args, **constants)


def resolve_device(device: str) -> tuple[torch.device, str]:
    """The device for a RunnerConfig's `device`, and a sentence on why it was chosen.

    Raises ConfigError for a device that this process cannot use; nothing falls back.
    """
    if device == "auto":
        device = "cuda" if HAS_CUDA and not INTERPRETED else "cpu"
        why = "auto: a CUDA device was found" if device == "cuda" else "auto: no CUDA device, kernels are interpreted"
        if HAS_CUDA and INTERPRETED:
            why = "auto: TRITON_INTERPRET=1, kernels are interpreted"
    else:
        why = "as configured"
    kind = device.partition(":")[0]
    if kind == "cuda" and (not HAS_CUDA or INTERPRETED):
        reason = "TRITON_INTERPRET=1 is set" if HAS_CUDA else "torch sees no CUDA device"
        raise ConfigError(f"device {device!r} cannot be used: {reason}", field="device", hint="Use device='auto'")
    if kind == "cpu" and not INTERPRETED:
        raise ConfigError(
            "on the CPU kernels run in Triton's interpreter only, which this process did not choose",
            field="device",
            hint="Set TRITON_INTERPRET=1 before Python starts, or use device='auto'",
        )
    if kind not in ("cpu", "cuda"):
        raise ConfigError("unknown device", field="device", got=device, expected="'auto', 'cpu' or 'cuda[:index]'")
    return torch.device(device), why


class PointerTable:
    """Device addresses of one tensor per KV cache group, so that one launch serves all groups.

    The tensors must stay where they are for as long as the table is used.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self.tensors = tuple(tensors)  # keeps the memory alive
        self.pointers = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)  # int64[G]
        self.pointers.points_to = self.tensors  # a sanitizer learns from it which memory the addresses mean
        self.strides = torch.tensor([t.stride(0) for t in tensors], dtype=torch.int64, device=device)  # int64[G]


def block(n: int, most: int = 65536, least: int = 16) -> int:
    """A power of two that covers n, within bounds: the width of one tile."""
    return max(least, min(most, triton.next_power_of_2(max(n, 1))))


def tile(n: int, most: int | None = None, least: int = 16) -> int:
    """The tile of a kernel that walks over n elements, as wide as the place where it runs likes it.

    Where a kernel must see all n at once, take `block`: a tile may be narrower than what it walks over.
    """
    return block(n, min(WIDEST_TILE if most is None else most, max(TILE_LIMIT, least)), least)
