"""Which Triton versions the interpreter patches fit: known numbers, and the private names that are replaced.

The interpreter has no public hooks. A version that is not known, or a known one whose private names have moved, is
told in words and left alone. Imports triton only when asked.
"""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from typing import Any

from runner_api.errors import ConfigError

_log = logging.getLogger(__name__)
_told: set[str] = set()  # what was warned of, once

KNOWN = ("3.6", "3.9")

# Everything that is read or replaced in triton.runtime.interpreter.
_NAMES = (
    "GridExecutor._init_args_hst", "GridExecutor._restore_args_dev", "GridExecutor.__call__",
    "InterpretedFunction.__call__", "InterpretedFunction.rewrite", "InterpreterError", "InterpreterOptions",
    "ReduceOps.apply_impl", "ReduceScanOpInterface.to_tensor", "ScanOps.apply_impl", "TensorHandle",
    "_get_np_dtype", "_implicit_cvt", "_interpreter.load", "_interpreter.store", "_interpreter.atomic_rmw",
    "_interpreter.atomic_cas", "_patch_lang", "interpreter_builder", "interpreter_semantic",
    "InterpreterBuilder.cast_impl", "InterpreterBuilder.create_fma", "InterpreterBuilder.create_fp_to_fp",
    "InterpreterBuilder.unary_op", "ReduceOps.min_max", "ReduceOps.sum", "ScanOps.cumprod", "ScanOps.cumsum",
)  # fmt: skip
_BUILDER_METHODS = {
    "create_load": ["self", "ptr"],
    "create_store": ["self", "ptr", "val"],
    "create_masked_load": ["self", "ptrs", "mask", "other"],
    "create_masked_store": ["self", "ptrs", "value", "mask"],
    "create_atomic_rmw": ["self", "rmwOp", "ptr", "val", "mask", "sem", "scope"],
    "create_atomic_cas": ["self", "ptr", "cmp", "val", "sem", "scope"],
    "create_select": ["self", "cond", "lhs", "rhs"],
    "create_dot": ["self", "a", "b", "d"],
    "create_int_to_ptr": ["self", "src", "dst_type"],
    "create_assert": ["self", "condition", "message"],
    "create_barrier": ["self"],
    "binary_op": ["self", "lhs", "rhs", "op"],
    "set_grid_idx": ["self", "x", "y", "z"],
    "set_grid_dim": ["self", "nx", "ny", "nz"],
}


def interpreting() -> bool:
    """Does `@triton.jit` make interpreted functions in this process? Decided when triton is imported."""
    if os.environ.get("TRITON_INTERPRET", "0").lower() not in ("1", "true", "on", "yes"):
        return False
    try:
        import triton.language as tl
    except ImportError:
        return False
    return type(tl.sum).__name__ == "InterpretedFunction"


def obstacles() -> list[str]:
    """Why this Triton cannot be patched: one sentence each, none if it can be."""
    import triton
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    found: list[str] = []
    if not triton.__version__.startswith(tuple(f"{known}." for known in KNOWN)):
        found.append(f"triton {triton.__version__} is not one of the known versions {', '.join(KNOWN)}")
    found += [f"triton.runtime.interpreter.{name} is missing" for name in _NAMES if _find(interpreter, name) is None]
    if not hasattr(TritonSemantic, "binary_op_sanitize_overflow_impl"):
        found.append("TritonSemantic.binary_op_sanitize_overflow_impl is missing")
    builder = type(getattr(interpreter, "interpreter_builder", None))
    for name, expected in _BUILDER_METHODS.items():
        method = getattr(builder, name, None)
        got = list(inspect.signature(method).parameters)[: len(expected)] if method else None
        if got != expected:
            found.append(f"InterpreterBuilder.{name} takes {got}, expected {expected}")
    return found


def patchable() -> bool:
    """May this process's Triton be patched? An unknown one is told once, logged and as a RuntimeWarning.

    Raises: ConfigError where kernels are not interpreted at all.
    """
    if not interpreting():
        raise ConfigError(
            "kernels are judged in Triton's interpreter, which this process does not use",
            field="TRITON_INTERPRET", got=os.environ.get("TRITON_INTERPRET"), expected="1 before triton is imported",
            hint="Start Python with TRITON_INTERPRET=1 in its environment",
        )  # fmt: skip
    found = obstacles()
    text = "kernels run in the plain interpreter, unjudged: " + "; ".join(found)
    if found and text not in _told:
        _told.add(text)
        _log.warning(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    return not found


def _find(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name, None)
    return root
