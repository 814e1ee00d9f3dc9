"""The builder of the interpreter with every access judged, and what else stands in a kernel's way.

Undefined values are followed by `undefined`; here it is a fault when one is stored, used as an address, or decides what
a program does next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import numpy as np
from triton.runtime import interpreter as stock

from conformance.triton_sanitizer.faults import FaultKind
from conformance.triton_sanitizer.memory import Memory
from conformance.triton_sanitizer.undefined import (
    Bools,
    FollowingBuilder,
    Handle,
    any_of,
    data_of,
    mark,
    undefined_lanes,
)

tl = stock.tl

_SEMANTICS = stock._ir.MEM_SEMANTIC
_ACQUIRES = {_SEMANTICS.ACQUIRE, _SEMANTICS.ACQUIRE_RELEASE}
_RELEASES = {_SEMANTICS.RELEASE, _SEMANTICS.ACQUIRE_RELEASE}
_EXACT: dict[str, Callable[..., Any]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_SIGNS = {"add": "+", "sub": "-", "mul": "*"}


class Reporter(Protocol):
    """Where faults go. `report` returns if that kind is allowed."""

    def report(self, kind: FaultKind, **what: Any) -> None: ...


@cache
def _integer_masks() -> bool:
    """Does this Triton's interpreter take masks of integers? (3.6 does, 3.9 does not.)"""
    nobody = np.zeros(1, np.int32)
    try:
        stock._interpreter.load(np.zeros(1, np.uint64), nobody, nobody, np.dtype(np.int32))
    except ValueError:
        return False
    return True


class SanitizingBuilder(FollowingBuilder):
    """The stock builder; `memory` is that of the running launch."""

    def __init__(self, reporter: Reporter, *, follow_undefined: bool, overflow: bool) -> None:
        super().__init__()
        self.options = stock.InterpreterOptions(debug=True, sanitize_overflow=overflow)
        self.memory: Memory | None = None
        self.accesses = 0
        self.other_given = False  # did the running tl.load name `other`? See `load_with_other`
        self._reporter = reporter
        self._follow = follow_undefined

    # Memory ----------------------------------------------------------------------------------------------------------

    def _access(
        self, kind: str, ptrs: Any, mask: Any, size: int, acquire: bool = False, release: bool = False
    ) -> tuple[Any, Bools | None]:
        assert self.memory is not None, "a kernel runs outside of a launch"
        self.accesses += 1
        lanes = None if mask is None else np.broadcast_to(data_of(mask), ptrs.data.shape)
        if lanes is not None and lanes.dtype != np.bool_:
            if not _integer_masks():
                raise ValueError("mask has unsupported dtype")  # in stock's own words
            lanes = lanes != 0  # integers would be taken for positions here
        if self.any_undefined:
            self._refuse_undefined(undefined_lanes(mask), None, "the mask")
            self._refuse_undefined(undefined_lanes(ptrs), lanes, "the address")
        return self.memory.access(kind, ptrs.data, lanes, size, acquire, release)

    def _refuse_undefined(self, undefined: Bools | None, mask: Bools | None, what: str) -> None:
        if undefined is None:
            return
        used = undefined if mask is None else undefined & mask
        if used.any():
            self._reporter.report(
                FaultKind.MASKED_VALUE_USED,
                detail=f"{what} of lane {int(np.flatnonzero(used)[0])} comes from a lane that a load without `other` "
                "masked off",
            )

    def _load(self, ptrs: Any, mask: Any, other: Any, atomic: bool = False, acquire: bool = False) -> Any:
        dtype = ptrs.get_element_ty()
        np_dtype = stock._get_np_dtype(dtype)
        kind = "atomic" if atomic else "load"
        addresses, lanes = self._access(kind, ptrs, mask, np_dtype.itemsize, acquire)
        if lanes is None:
            lanes = np.ones(addresses.shape, bool)
        fill = np.zeros(addresses.shape, np_dtype) if other is None else np.broadcast_to(other.data, addresses.shape)
        result = Handle(stock._interpreter.load(addresses, lanes, fill, np_dtype), dtype)
        if self._follow and mask is not None:
            if other is None and not self.other_given:
                mark(result, ~np.broadcast_to(data_of(mask), addresses.shape))
            elif self.any_undefined and other is not None and undefined_lanes(other) is not None:
                mark(result, ~lanes & undefined_lanes(other))
            self.any_undefined |= undefined_lanes(result) is not None
        return result

    def _store(self, ptrs: Any, value: Any, mask: Any, atomic: bool = False, release: bool = False) -> None:
        kind = "atomic" if atomic else "store"
        addresses, lanes = self._access(kind, ptrs, mask, value.data.itemsize, release=release)
        if self.any_undefined:
            self._refuse_undefined(undefined_lanes(value), lanes, "the stored value")
        if lanes is None:
            lanes = np.ones(addresses.shape, bool)
        stock._interpreter.store(addresses, value.data, lanes)

    def create_load(self, ptr: Any, *_: Any, **__: Any) -> Any:
        return self._load(ptr, None, None)

    def create_store(self, ptr: Any, val: Any, *_: Any, **__: Any) -> None:
        self._store(ptr, val, None)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *_: Any, **__: Any) -> Any:
        return self._load(ptrs, mask, other)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *_: Any, **__: Any) -> None:
        self._store(ptrs, value, mask)

    def create_atomic_load(self, ptr: Any, mask: Any, sem: Any, scope: Any) -> Any:
        self.other_given = False
        return self._load(ptr, mask, None, atomic=True, acquire=sem in _ACQUIRES)

    def create_atomic_store(self, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> None:
        self._store(ptr, val, mask, atomic=True, release=sem in _RELEASES)

    def create_atomic_rmw(self, rmwOp: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        addresses, lanes = self._access("atomic", ptr, mask, val.data.itemsize, sem in _ACQUIRES, sem in _RELEASES)
        if self.any_undefined:
            self._refuse_undefined(undefined_lanes(val), lanes, "the operand")
        real, kept = Handle(addresses, ptr.dtype), mask if lanes is None else Handle(lanes, tl.int1)
        result = super().create_atomic_rmw(rmwOp, real, val, kept, sem, scope)
        if self._follow and lanes is not None:
            mark(result, ~lanes)
            self.any_undefined = True
        return result

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        size = val.data.itemsize
        addresses, lanes = self._access("atomic", ptr, None, size, sem in _ACQUIRES, sem in _RELEASES)
        if lanes is not None and not lanes.all():
            return Handle(np.zeros_like(cmp.data), cmp.dtype.scalar)  # outside, which was allowed: nothing is done
        return super().create_atomic_cas(Handle(addresses, ptr.dtype), cmp, val, sem, scope)

    def create_int_to_ptr(self, src: Any, dst_type: Any) -> Any:
        result = super().create_int_to_ptr(src, dst_type)
        if self.memory is not None:
            result.data = self.memory.to_address(result.data)
        return mark(result, undefined_lanes(src))

    def create_barrier(self) -> None:
        if self.memory is not None:
            self.memory.barrier()

    # Checks that a kernel asks for itself --------------------------------------------------------------------------

    def create_assert(self, condition: Any, message: Any) -> None:
        if not condition:
            self._reporter.report(FaultKind.DEVICE_ASSERT, detail=str(message))

    def check_overflow(self, lhs: Any, rhs: Any, name: str) -> None:
        """A signed sum, difference or product must fit its type. Unsigned integers are there to wrap."""
        scalar = lhs.type.scalar
        if not self.options.sanitize_overflow or scalar.int_bitwidth >= 64 or not scalar.is_int_signed():
            return
        a, b = lhs.handle.data, rhs.handle.data
        if a.size == b.size == 1:
            wide = low = high = _EXACT[name](int(a.item()), int(b.item()))
        else:
            wide = _EXACT[name](a, b, dtype=np.int64)
            low, high = wide.min(), wide.max()
        limit = 1 << (scalar.int_bitwidth - 1)
        if low >= -limit and high < limit:
            return
        wide = np.asarray(wide)
        lane = int(np.flatnonzero((wide < -limit) | (wide >= limit))[0])
        x, y = (int(np.broadcast_to(side, wide.shape if wide.ndim else (1,)).reshape(-1)[lane]) for side in (a, b))
        self._reporter.report(
            FaultKind.INT32_OVERFLOW,
            detail=f"{x} {_SIGNS[name]} {y} = {int(wide.reshape(-1)[lane])} does not fit int{scalar.int_bitwidth}; "
            f"tl.{name}(..., sanitize_overflow=False) declares that it may wrap",
        )

    def refuse_undefined_choice(self, handle: Any, what: str) -> None:
        self._refuse_undefined(undefined_lanes(handle), None, what)

    def check_running_sum(self, handle: Any, axis: int | None) -> None:
        """Sums and running sums of signed integers add up in their own type; the last or any of them may not fit."""
        dtype, data = handle.dtype.scalar, handle.data
        if not self.options.sanitize_overflow or not dtype.is_int_signed() or dtype.int_bitwidth >= 64:
            return
        sums = np.cumsum(data, axis=axis, dtype=np.int64)
        limit = 1 << (dtype.int_bitwidth - 1)
        if sums.size and (sums.min() < -limit or sums.max() >= limit):
            outside = sums[(sums < -limit) | (sums >= limit)]
            self._reporter.report(
                FaultKind.INT32_OVERFLOW,
                detail=f"a sum reaches {int(outside[0])}, which does not fit int{dtype.int_bitwidth}",
            )


def load_with_other(original: Callable[..., Any]) -> Callable[..., Any]:
    """TritonSemantic.load that tells the builder whether `other` was named: a scalar 0 gets lost on the way."""

    def load(self: Any, ptr: Any, mask: Any, other: Any, *rest: Any) -> Any:
        self.builder.other_given = other is not None
        return original(self, ptr, mask, other, *rest)

    return load


def careful_choice(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For tl.tensor.__bool__ and __index__: a kernel must not branch or count by an undefined value."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any) -> Any:
            if undefined_lanes(self.handle) is not None and self.handle.data.size == 1:
                asker = sys._getframe(1).f_globals.get("__name__", "")
                if not asker.startswith("triton."):  # Triton asks `if other` itself
                    stock.interpreter_builder.refuse_undefined_choice(self.handle, what)
            return original(self)

        return method

    return wrap


def reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    """ReduceOps.apply_impl or ScanOps.apply_impl that passes undefined lanes on and looks at sums of integers."""

    def apply_impl(self: Any, inputs: Any) -> Any:
        builder = stock.interpreter_builder
        if self.combine_fn is tl.standard._sum_combine:
            builder.check_running_sum(inputs[0].handle, self.axis)
        result = original(self, inputs)
        lanes = any_of(tuple(i.handle for i in inputs)) if builder.any_undefined else None
        if lanes is not None:
            if isinstance(self, stock.ReduceOps):
                lanes = lanes.any(axis=self.axis, keepdims=self.keep_dims)
            else:
                order = np.flip(lanes, self.axis) if self.reverse else lanes
                reached = np.logical_or.accumulate(order, axis=self.axis)
                lanes = np.flip(reached, self.axis) if self.reverse else reached
            for tensor in result if isinstance(result, (list, tuple)) else (result,):
                mark(tensor.handle, np.asarray(lanes))
        return result

    return apply_impl
