"""Judge Triton kernels without a GPU: run launches in the interpreter with every access checked.

    with sanitize():
        my_kernel[grid](x, y, n, BLOCK=128)

torch and triton are needed only by who uses it. `TRITON_INTERPRET=1` must be set before triton is imported.
"""

from __future__ import annotations

import importlib
from typing import Any

from conformance.triton_sanitizer.faults import FaultKind, KernelFault, Where

# What needs torch and triton, imported when first asked for.
_LATER = {
    "Session": "session",
    "sanitize": "session",
    "orders": "ordering",
    "check_order_independence": "ordering",
    "fast_interpreter": "execution",
}

__all__ = ["FaultKind", "KernelFault", "Where", *_LATER]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
