"""Undefined values followed through the operations of the interpreter.

A lane that a load masks off without `other` has an undefined value. Its handle carries `undefined`, a bool array beside
the data; operations pass it on, `where` and a known zero under `and` or `*` end it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from triton.runtime import interpreter as stock

tl = stock.tl
Handle = stock.TensorHandle
Bools = npt.NDArray[np.bool_]

# Operations that move lanes: what they do to the data they do to `undefined`.
_MOVES = (
    "create_reshape", "create_trans", "create_expand_dims", "create_broadcast", "create_cat", "create_join",
    "create_splat", "create_unsplat",
)  # fmt: skip
# Operations that have a method of their own below, or nothing to pass on.
_APART = {
    "create_load", "create_store", "create_masked_load", "create_masked_store", "create_atomic_rmw",
    "create_atomic_cas", "create_atomic_load", "create_atomic_store", "create_atomic_poll", "create_select",
    "create_and", "create_or", "create_mul", "create_dot", "create_dot_scaled", "create_split", "create_gather",
    "create_histogram", "create_int_to_ptr", "create_assert", "create_assume", "create_barrier", "create_print",
    "create_get_program_id", "create_get_num_programs", "create_make_range", "create_make_tensor_descriptor",
    "create_descriptor_load", "create_descriptor_store", "create_descriptor_gather", "create_descriptor_scatter",
    "create_tensor_pointer_load", "create_tensor_pointer_store", "create_make_block_ptr", "create_advance",
    "create_extern_elementwise", "create_inline_asm", *_MOVES,
}  # fmt: skip


def undefined_lanes(handle: Any) -> Bools | None:
    return getattr(handle, "undefined", None)


def mark(handle: Any, lanes: Bools | None) -> Any:
    if lanes is not None and lanes.any():
        handle.undefined = np.broadcast_to(lanes, handle.data.shape)
    return handle


def any_of(handles: tuple[Any, ...]) -> Bools | None:
    lanes = None
    for handle in handles:
        other = undefined_lanes(handle)
        if other is not None:
            lanes = other if lanes is None else lanes | other
    return lanes


def data_of(mask: Any) -> Any:
    """A mask's bools: block pointers of Triton 3.6 hand over a bare array."""
    return mask.data if isinstance(mask, Handle) else np.asarray(mask)


class FollowingBuilder(stock.InterpreterBuilder):
    """The stock builder, passing undefined lanes on once there are any."""

    any_undefined = False  # becomes True with the first such lane of a launch

    def create_select(self, cond: Any, lhs: Any, rhs: Any) -> Any:
        result = super().create_select(cond, lhs, rhs)
        if self.any_undefined:
            left, right, unsure = (undefined_lanes(h) for h in (lhs, rhs, cond))
            if left is not None or right is not None or unsure is not None:
                chosen = np.where(cond.data, False if left is None else left, False if right is None else right)
                mark(result, chosen if unsure is None else chosen | unsure)
        return result

    def create_and(self, lhs: Any, rhs: Any) -> Any:
        return self._unless_known(super().create_and(lhs, rhs), lhs, rhs, 0)

    def create_or(self, lhs: Any, rhs: Any) -> Any:
        ones = True if lhs.data.dtype == np.bool_ else -1
        return self._unless_known(super().create_or(lhs, rhs), lhs, rhs, ones)

    def create_mul(self, lhs: Any, rhs: Any) -> Any:
        return self._unless_known(super().create_mul(lhs, rhs), lhs, rhs, 0)

    def _unless_known(self, result: Any, lhs: Any, rhs: Any, decides: Any) -> Any:
        """Undefined where an operand is, except where the other one alone decides the result."""
        if self.any_undefined:
            left, right = undefined_lanes(lhs), undefined_lanes(rhs)
            if left is not None or right is not None:
                left = np.zeros((), bool) if left is None else left
                right = np.zeros((), bool) if right is None else right
                fixed_by_left = ~left & (lhs.data == np.asarray(decides).astype(lhs.data.dtype))
                fixed_by_right = ~right & (rhs.data == np.asarray(decides).astype(rhs.data.dtype))
                mark(result, (left | right) & ~fixed_by_left & ~fixed_by_right)
        return result

    def create_dot(self, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        result = super().create_dot(a, b, d, *rest)
        if self.any_undefined:
            left, right, lanes = undefined_lanes(a), undefined_lanes(b), undefined_lanes(d)
            lanes = np.zeros(result.data.shape, bool) if lanes is None else lanes.copy()
            if left is not None:
                lanes |= left.any(-1)[..., :, None]
            if right is not None:
                lanes |= right.any(-2)[..., None, :]
            mark(result, lanes)
        return result

    def create_split(self, val: Any) -> Any:
        halves = super().create_split(val)
        lanes = undefined_lanes(val)
        return halves if lanes is None else tuple(mark(half, lanes[..., i]) for i, half in enumerate(halves))

    def create_gather(self, src: Any, indices: Any, axis: Any) -> Any:
        result = super().create_gather(src, indices, axis)
        lanes = undefined_lanes(src)
        moved = None if lanes is None else np.take_along_axis(lanes, indices.data, axis=axis)
        unsure = undefined_lanes(indices)
        if moved is not None and unsure is not None:
            return mark(result, moved | unsure)
        return mark(result, unsure if moved is None else moved)

    def create_histogram(self, data: Any, bins: Any, mask: Any) -> Any:
        result = super().create_histogram(data, bins, mask)
        lanes = undefined_lanes(data)
        if lanes is not None and (lanes if mask is None else lanes & data_of(mask)).any():
            mark(result, np.ones(result.data.shape, bool))
        return result


def _elementwise(name: str) -> Callable[..., Any]:
    def method(self: FollowingBuilder, *args: Any, **kwargs: Any) -> Any:
        result = getattr(super(FollowingBuilder, self), name)(*args, **kwargs)
        return mark(result, any_of(args)) if self.any_undefined and isinstance(result, Handle) else result

    return method


def _moving(name: str) -> Callable[..., Any]:
    def method(self: FollowingBuilder, *args: Any, **kwargs: Any) -> Any:
        original = getattr(super(FollowingBuilder, self), name)
        result = original(*args, **kwargs)
        if self.any_undefined and any_of(args) is not None:
            mark(result, original(*(_lanes_as_handle(arg) for arg in args), **kwargs).data.astype(bool))
        return result

    return method


def _lanes_as_handle(arg: Any) -> Any:
    if not isinstance(arg, Handle):
        return arg
    lanes = undefined_lanes(arg)
    return Handle(np.zeros(arg.data.shape, bool) if lanes is None else np.array(lanes), tl.int1)


for _name in dir(stock.InterpreterBuilder):
    if _name in _MOVES:
        setattr(FollowingBuilder, _name, _moving(_name))
    elif _name.startswith("create_") and _name not in _APART:
        setattr(FollowingBuilder, _name, _elementwise(_name))
