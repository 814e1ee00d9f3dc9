"""Right bfloat16 in Triton's interpreter.

The interpreter keeps a bfloat16 as the 16 bits of a uint16. It cuts casts off instead of rounding them, and adds,
compares and reduces the bits as if they were integers. `patch_bfloat16` lets every such operation work on the values:
widened to float32, computed there, and rounded once, to nearest even. The compiler does the same where a GPU has no
instruction for it. Sums, scans and dots add in float32 and round at the end; a GPU may round between two additions.
Types other than float32 and float64 pass through float32, as in torch. `dot_scaled` and fp8 stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

from conformance.triton_sanitizer.patching import replace
from runner_api.errors import ConfigError

_HALF = np.uint32(0x7FFF)  # just below half of the last place that stays
_QUIET = np.uint16(0x0040)  # set in the upper half of a NaN, or cutting its payload off would leave an infinity


def widen(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 bits, exactly. bits: uint16[...]."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: np.ndarray, *, toward_zero: bool = False) -> np.ndarray:
    """bfloat16 bits, uint16[...], of real values: rounded to nearest even, or cut off `toward_zero`.

    Infinities stay, values past the largest bfloat16 become infinite (cut off: the largest), a NaN stays one with its
    sign.
    """
    values = np.asarray(values)
    with np.errstate(over="ignore", invalid="ignore"):
        single = _to_odd(values) if values.dtype == np.float64 else values.astype(np.float32)
    word = np.ascontiguousarray(single).reshape(single.shape).view(np.uint32)
    upper = (word >> np.uint32(16)).astype(np.uint16)
    if toward_zero:
        rounded = upper
    else:
        rounded = ((word + _HALF + (upper & np.uint16(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(single), upper | _QUIET, rounded)


def _to_odd(values: np.ndarray) -> np.ndarray:
    """float64 as float32, cut off, and with the last bit set where something was lost.

    Rounded to nearest, a value just beside the middle of two bfloat16s would fall on the middle, and the second
    rounding would no longer know on which side it was.
    """
    single = values.astype(np.float32)
    above = np.abs(single.astype(np.float64)) > np.abs(values)
    single = np.where(above, np.nextafter(single, np.float32(0)), single)
    lost = (single.astype(np.float64) != values) & np.isfinite(values)
    return np.where(lost, single.view(np.uint32) | np.uint32(1), single.view(np.uint32)).view(np.float32)


def _is_bfloat16(handle: Any) -> bool:
    # The interpreter labels the booleans of a comparison with the type of its operands; those are not values of it.
    return handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16


def _value(handle: Any) -> np.ndarray:
    return widen(handle.data) if _is_bfloat16(handle) else handle.data


def _as_float32(handle: Any) -> Any:
    return interpreter.TensorHandle(widen(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _result(values: np.ndarray) -> Any:
    """What an operation on bfloat16 gives: truth values of a comparison, or the rounded values."""
    if values.dtype == np.bool_:
        return interpreter.TensorHandle(values, tl.int1)
    return interpreter.TensorHandle(narrow(values), tl.bfloat16)


def _cast(stock: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if _is_bfloat16(src):
            return src if dst_type.scalar == tl.bfloat16 else stock(self, _as_float32(src), dst_type)
        if dst_type.scalar == tl.bfloat16:
            return interpreter.TensorHandle(narrow(src.data), tl.bfloat16)
        return stock(self, src, dst_type)

    return cast_impl


def _cast_rounded(stock: Callable[..., Any]) -> Callable[..., Any]:
    wide = (tl.float16, tl.float32, tl.float64)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if src.dtype.scalar in wide and dst_type.scalar == tl.bfloat16:
            toward_zero = rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ
            return interpreter.TensorHandle(narrow(src.data, toward_zero=toward_zero), tl.bfloat16)
        return stock(self, src, dst_type, rounding_mode)

    return create_fp_to_fp


def _unary(stock: Callable[..., Any]) -> Callable[..., Any]:
    def unary_op(self: Any, arg: Any, op: Callable[..., Any]) -> Any:
        return _result(op(widen(arg.data))) if _is_bfloat16(arg) else stock(self, arg, op)

    return unary_op


def _binary(stock: Callable[..., Any]) -> Callable[..., Any]:
    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        if not _is_bfloat16(lhs):
            return stock(self, lhs, rhs, op)
        with np.errstate(all="ignore"):
            return _result(op(widen(lhs.data), _value(rhs)))

    return binary_op


def _fma(stock: Callable[..., Any]) -> Callable[..., Any]:
    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not _is_bfloat16(z):
            return stock(self, x, y, z)
        with np.errstate(all="ignore"):  # in float64 the product is exact
            return _result(_value(x).astype(np.float64) * _value(y) + _value(z))

    return create_fma


def _dot(stock: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return stock(self, _as_float32(a), _as_float32(b), d, *options)

    return create_dot


def _atomic(stock: Callable[..., Any]) -> Callable[..., Any]:
    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *order: Any) -> Any:
        if not _is_bfloat16(val):
            return stock(self, op, ptr, val, mask, *order)
        if op != interpreter._ir.ATOMIC_OP.FADD:
            raise TypeError(f"a bfloat16 can be added atomically, and nothing else: got {op}")
        places, values, chosen = np.broadcast_arrays(ptr.data, val.data, mask.data)
        old = np.zeros(values.shape, np.uint16)
        for lane in np.ndindex(values.shape):  # one behind the other: two lanes may add to one element
            if chosen[lane]:
                place = interpreter.TensorHandle(places[lane].reshape(1), ptr.dtype)
                old[lane] = _add_to_element(self, place, values[lane], order)
        return interpreter.TensorHandle(old, tl.bfloat16)

    return create_atomic_rmw


def _add_to_element(builder: Any, place: Any, value: np.ndarray, order: tuple[Any, ...]) -> np.ndarray:
    """Add to one bfloat16 and return its old bits, by compare-and-swap: the one 16-bit atomic of the interpreter.

    The stock method: a sanitizer has judged the whole access already and given real addresses.
    """

    def swap(expected: Any, new: Any) -> Any:
        handles = [interpreter.TensorHandle(np.array([bits], np.uint16), tl.uint16) for bits in (expected, new)]
        return interpreter.InterpreterBuilder.create_atomic_cas(builder, place, *handles, *order).data[0]

    old = swap(0, 0)  # whatever stands there stays
    swap(old, narrow(widen(old) + widen(value)))
    return old


def _on_float32(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction or scan of the interpreter, whose inputs are widened before and whose results are rounded after."""

    def tensor(handle: Any, like: Any) -> Any:
        kind = tl.block_type(handle.dtype, list(like.shape)) if like.shape else handle.dtype
        return tl.core.tensor(handle, kind)

    def apply(self: Any, values: Any, *ops: Any, **named_ops: Any) -> Any:
        first = values[0] if isinstance(values, tuple) else values
        if not _is_bfloat16(first.handle):
            return stock(self, values, *ops, **named_ops)
        got = stock(self, tensor(_as_float32(first.handle), first), *ops, **named_ops)
        several = isinstance(got, (tuple, list))
        rounded = [
            tensor(_result(x.handle.data), x) if x.handle.dtype == tl.float32 else x
            for x in (got if several else [got])
        ]
        return type(got)(rounded) if several else rounded[0]

    return apply


# Reductions and scans with a combine function of the kernel's own call it element by element, on the operations above.
_PATCHES = (
    (interpreter.InterpreterBuilder, "cast_impl", _cast),
    (interpreter.InterpreterBuilder, "create_fp_to_fp", _cast_rounded),
    (interpreter.InterpreterBuilder, "unary_op", _unary),
    (interpreter.InterpreterBuilder, "binary_op", _binary),
    (interpreter.InterpreterBuilder, "create_fma", _fma),
    (interpreter.InterpreterBuilder, "create_dot", _dot),
    (interpreter.InterpreterBuilder, "create_atomic_rmw", _atomic),
    (interpreter.ReduceOps, "min_max", _on_float32),
    (interpreter.ReduceOps, "sum", _on_float32),
    (interpreter.ScanOps, "cumsum", _on_float32),
    (interpreter.ScanOps, "cumprod", _on_float32),
)


def _constant(builder: Any, value: float) -> Any:
    """A bfloat16 written as a number in the kernel."""
    return interpreter.TensorHandle(narrow(np.array([value], np.float32)), tl.bfloat16)


@contextmanager
def patch_bfloat16() -> Iterator[None]:
    """Inside, launches in the interpreter compute bfloat16 as a GPU does; on exit the interpreter is as it was.

    Raises: ConfigError for a Triton whose interpreter is built differently.
    """
    missing = [f"{owner.__name__}.{name}" for owner, name, _ in _PATCHES if name not in vars(owner)]
    if missing:
        raise ConfigError(
            f"the interpreter of triton {triton.__version__} cannot be patched", field="triton", got=missing,
            expected="methods that are replaced", hint="Turn bfloat16 off: sanitize(bf16=False)",
        )  # fmt: skip
    with ExitStack() as undo:
        for owner, name, patched in _PATCHES:
            stock = vars(owner)[name]
            undo.callback(setattr, owner, name, stock)
            setattr(owner, name, patched(stock))
        # Triton 3.6 has no such method, 3.9 cuts the constant off instead of rounding it.
        replace(undo, interpreter.InterpreterBuilder, "get_bf16", _constant)
        yield
