"""The sanitizer on kernels of a few lines: what each check says, what it leaves alone, and that it leaves no trace."""

from __future__ import annotations

import inspect
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.triton_sanitizer import (
    FaultKind,
    KernelFault,
    check_order_independence,
    fast_interpreter,
    orders,
    sanitize,
    versions,
)
from conformance.triton_sanitizer.fixture import sanitized  # noqa: F401
from gpu_backend.triton_support import INTERPRETED, PointerTable, tl, triton
from runner_api import ConfigError

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled in this process"),
]


@triton.jit
def _copy(x, y, n, shift, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + i + shift, mask=i < n, other=0)
    tl.store(y + i, values, mask=i < n)


@triton.jit
def _fetch(x, i):
    return tl.load(x + i)


@triton.jit
def _copy_through_a_helper(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, _fetch(x, i))


@triton.jit
def _copy_tuple(pair, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(pair[1] + i, tl.load(pair[0] + i))


@triton.jit
def _copy_from_table(pointers, strides, y, n, BLOCK: tl.constexpr):
    g = tl.program_id(0)
    source = tl.load(pointers + g).to(tl.pointer_type(tl.int32))
    i = tl.arange(0, BLOCK)
    values = tl.load(source + tl.load(strides + g) + i, mask=i < n, other=0)
    tl.store(y + g * BLOCK + i, values, mask=i < n)


@triton.jit
def _store_everywhere(y, value):
    tl.store(y, value)


@triton.jit
def _read_next_then_store(y):
    p = tl.program_id(0)
    later = tl.load(y + p + 1)
    tl.store(y + p, later)


@triton.jit
def _read_previous_then_store(y):
    p = tl.program_id(0)
    tl.store(y + p + 1, tl.load(y + p) + 1)


@triton.jit
def _store_lanes(y, divisor, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i // divisor, i)


@triton.jit
def _reverse_through_memory(y, z, BLOCK: tl.constexpr, BARRIER: tl.constexpr, REVERSE: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, i)
    if BARRIER:
        tl.debug_barrier()
    if REVERSE:
        i = BLOCK - 1 - i
    tl.store(z + tl.arange(0, BLOCK), tl.load(y + i))


@triton.jit
def _count(y, PLAIN: tl.constexpr):
    tl.atomic_add(y, 1)
    if PLAIN:
        tl.store(y + 1, tl.load(y))


@triton.jit
def _last_one_sums(parts, ticket, total, n, BLOCK: tl.constexpr, WAIT: tl.constexpr):
    p = tl.program_id(0)
    tl.store(parts + p, p + 1)
    tl.debug_barrier()
    if (tl.atomic_add(ticket, 1, sem="acq_rel" if WAIT else "relaxed") == n - 1) | (not WAIT):
        i = tl.arange(0, BLOCK)
        tl.store(total, tl.sum(tl.load(parts + i, mask=i < n, other=0)))


@triton.jit
def _add_under_a_lock(lock, total):
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total, tl.load(total) + tl.program_id(0))
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def _offset(y, stride, WIDE: tl.constexpr, WRAP: tl.constexpr):
    row = tl.program_id(0) + 1
    if WIDE:
        row = row.to(tl.int64)
    if WRAP:
        tl.store(y, tl.mul(row, stride, sanitize_overflow=False))
    else:
        tl.store(y, row * stride)


@triton.jit
def _sum_all(x, y, BLOCK: tl.constexpr):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, BLOCK))))


@triton.jit
def _row_sum(x, y, n, BLOCK: tl.constexpr, SELECT: tl.constexpr):
    i = tl.arange(0, BLOCK)
    values = tl.load(x + i, mask=i < n) * 2.0
    if SELECT:
        values = tl.where(i < n, values, 0.0)
    tl.store(y, tl.sum(values))


@triton.jit
def _index_by_masked(index, x, y, n, BLOCK: tl.constexpr, GUARD: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = tl.load(index + i, mask=i < n)
    keep = i < (n if GUARD else BLOCK)
    tl.store(y + i, tl.load(x + at, mask=keep, other=0), mask=i < n)


@triton.jit
def _branch_on_masked(x, y, known):
    if tl.load(x, mask=known > 0) > 0:
        tl.store(y, 1)


@triton.jit
def _scalar_with_other_zero(x, y, known):
    tl.store(y, tl.load(x, mask=known > 0, other=0))


@triton.jit
def _matmul(a, b, c, n, BLOCK: tl.constexpr, SELECT: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = (i < n)[:, None] & (i < n)[None, :]
    left = tl.load(a + i[:, None] * n + i[None, :], mask=mask)
    right = tl.load(b + i[:, None] * n + i[None, :], mask=mask, other=0.0)
    if SELECT:
        left = tl.where((i < n)[None, :], left, 0.0)
    tl.store(c + i[:, None] * n + i[None, :], tl.dot(left, right), mask=mask)


@triton.jit
def _insist(x):
    tl.device_assert(tl.load(x) > 0, "x must be positive")


@triton.jit
def _bytes_of(x, y, BLOCK: tl.constexpr):
    p = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(y.to(tl.pointer_type(tl.int8)) + p * BLOCK + i, tl.load(x.to(tl.pointer_type(tl.int8)) + p * BLOCK + i))


@triton.jit
def _copy_by_descriptor(x, y, rows, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    source = tl.make_tensor_descriptor(x, shape=[rows, WIDTH], strides=[WIDTH, 1], block_shape=[ROWS, WIDTH])
    target = tl.make_tensor_descriptor(y, shape=[rows, WIDTH], strides=[WIDTH, 1], block_shape=[ROWS, WIDTH])
    first = tl.program_id(0) * ROWS
    target.store([first, 0], source.load([first, 0]))


@triton.jit
def _sort(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.sort(tl.load(x + i)))


@triton.jit
def _latest_wins(y, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK), tl.program_id(0))


def ints(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.int32)


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


def fault(
    kernel: Any, grid: tuple[int, ...], *args: Any, options: dict[str, Any] | None = None, **k: Any
) -> KernelFault:
    with sanitize(**(options or {})), pytest.raises(KernelFault) as caught:
        kernel[grid](*args, **k)
    return caught.value


def clean(kernel: Any, grid: tuple[int, ...], *args: Any, options: dict[str, Any] | None = None, **k: Any) -> None:
    with sanitize(**(options or {})) as session:
        kernel[grid](*args, **k)
    assert session.launches == 1


def line_of(kernel: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(kernel.fn)
    return next(first + i for i, line in enumerate(lines) if text in line)


class TestBounds:
    def test_a_fault_names_kernel_program_line_argument_index_and_extent(self) -> None:
        caught = fault(_copy, (4,), ints(100), zeros(100), 100, 1, BLOCK=32)
        assert caught.kind is FaultKind.OUT_OF_BOUNDS_READ
        assert caught.where.kernel == "_copy"
        assert caught.where.file == __file__
        assert caught.where.line == line_of(_copy, "tl.load")
        assert caught.where.source.startswith("values = tl.load(")
        assert (caught.program, caught.argument, caught.index, caught.extent) == ((3, 0, 0), "x", 100, 100)
        for part in ("_copy", "(3, 0, 0)", "x[100] of 100", f"{__file__}:{caught.where.line}", "values = tl.load("):
            assert part in str(caught)

    def test_a_helper_s_own_line_is_named(self) -> None:
        caught = fault(_copy_through_a_helper, (1,), ints(15), zeros(16), BLOCK=16)
        assert caught.where.line == line_of(_fetch, "tl.load")
        assert caught.where.kernel == "_copy_through_a_helper"

    @pytest.mark.parametrize("shift", [-1, 1, 5000, 2**27])
    def test_outside_on_either_side_near_and_far(self, shift: int) -> None:
        caught = fault(_copy, (1,), ints(16), zeros(16), 16, shift, BLOCK=16)
        assert caught.argument == "x"
        assert caught.index == (shift if shift in (-1, 5000, 2**27) else 16)

    def test_a_neighbour_s_memory_is_not_one_s_own(self) -> None:
        storage = ints(64)
        first, second = storage[:32], storage[32:]
        assert fault(_copy, (1,), first, second, 32, 1, BLOCK=32).argument == "x"
        assert fault(_copy, (1,), ints(33), first, 33, 0, BLOCK=64).kind is FaultKind.OUT_OF_BOUNDS_WRITE

    def test_a_strided_view_reaches_to_its_last_element(self) -> None:
        view = ints(40).view(4, 10)[:, :3]  # spans 33 elements
        clean(_copy, (1,), view, zeros(33), 33, 0, BLOCK=64)
        caught = fault(_copy, (1,), view, zeros(34), 34, 0, BLOCK=64)
        assert (caught.index, caught.extent) == (33, 33)

    def test_nothing_outside_is_touched(self) -> None:
        storage = zeros(64)
        fault(_copy, (1,), ints(64), storage[:32], 64, 0, BLOCK=64)
        assert not storage.any()

    def test_an_empty_tensor_has_no_element(self) -> None:
        caught = fault(_copy, (1,), zeros(0), zeros(1), 1, 0, BLOCK=1)
        assert (caught.index, caught.extent) == (0, 0)

    def test_tuples_are_arguments_too(self) -> None:
        clean(_copy_tuple, (1,), (ints(16), zeros(16)), BLOCK=16)
        assert fault(_copy_tuple, (1,), (ints(16), zeros(15)), BLOCK=16).argument == "pair[1]"

    def test_a_descriptor_that_promises_too_much(self) -> None:
        x, y = torch.rand(10, 8), torch.zeros(10, 8)
        clean(_copy_by_descriptor, (3,), x, y, 10, ROWS=4, WIDTH=8)
        assert y.equal(x)
        caught = fault(_copy_by_descriptor, (3,), x[:9], y, 10, ROWS=4, WIDTH=8)
        assert (caught.argument, caught.index, caught.program) == ("x", 72, (2, 0, 0))

    def test_a_kind_that_is_allowed_is_left_out_of_the_launch(self) -> None:
        storage = zeros(64)
        with sanitize(bounds=False):
            _copy[(1,)](ints(64) + 1, storage[:32], 64, 0, BLOCK=64)
        assert (storage[:32] == ints(32) + 1).all()
        assert not storage[32:].any()


class TestTablesOfAddresses:
    def setup_method(self) -> None:
        self.tensors = [ints(20), ints(20) + 100]
        self.addresses = torch.tensor([t.data_ptr() for t in self.tensors])
        self.strides = torch.zeros(2, dtype=torch.int64)

    def test_an_unknown_address_is_refused_with_advice(self) -> None:
        caught = fault(_copy_from_table, (2,), self.addresses, self.strides, zeros(32), 20, BLOCK=16)
        assert caught.argument is None
        assert "Session.register" in str(caught)

    def test_registered_tensors_are_bounded(self) -> None:
        out = zeros(64)
        with sanitize(extra={"first": self.tensors[0]}) as session:
            session.register("second", self.tensors[1])
            _copy_from_table[(2,)](self.addresses, self.strides, out, 20, BLOCK=32)
            self.strides[1] = 1
            with pytest.raises(KernelFault) as caught:
                _copy_from_table[(2,)](self.addresses, self.strides, out, 20, BLOCK=32)
        assert (caught.value.argument, caught.value.index, caught.value.program) == ("second", 20, (1, 0, 0))
        assert (out[32:52] == self.tensors[1]).all()

    def test_a_pointer_table_names_its_tensors_itself(self) -> None:
        table = PointerTable(self.tensors, torch.device("cpu"))
        clean(_copy_from_table, (2,), table.pointers, self.strides, zeros(64), 20, BLOCK=32)
        caught = fault(_copy_from_table, (2,), table.pointers, self.strides, zeros(64), 21, BLOCK=32)
        assert caught.argument == "pointers->[0]"


class TestRaces:
    def test_two_programs_store_to_one_element(self) -> None:
        caught = fault(_store_everywhere, (3,), zeros(1), 7)
        assert (caught.kind, caught.program, caught.other) == (FaultKind.WRITE_WRITE_RACE, (1, 0, 0), (0, 0, 0))
        clean(_store_everywhere, (1,), zeros(1), 7)

    def test_programs_are_told_apart_in_three_dimensions(self) -> None:
        caught = fault(_store_everywhere, (1, 2, 3), zeros(1), 7, options={"order": None})
        assert (caught.program, caught.other) == ((0, 0, 1), (0, 0, 0))

    @pytest.mark.parametrize("kernel", [_read_next_then_store, _read_previous_then_store])
    def test_one_loads_what_another_stores(self, kernel: Any) -> None:
        caught = fault(kernel, (3,), zeros(4))
        assert (caught.kind, caught.program, caught.other) == (FaultKind.READ_WRITE_RACE, (1, 0, 0), (0, 0, 0))
        clean(kernel, (1,), zeros(4))
        clean(kernel, (3,), zeros(4), options={"races": False})

    def test_views_of_one_storage_share_their_history(self) -> None:
        storage = ints(64)
        caught = fault(_copy, (2,), storage[16:48], storage[:32], 32, 0, BLOCK=16)
        assert caught.kind is FaultKind.READ_WRITE_RACE

    def test_bytes_of_one_word_belong_to_different_programs(self) -> None:
        x, y = ints(1) + 0x01020304, zeros(1)
        clean(_bytes_of, (2,), x, y, BLOCK=2)
        assert x.equal(y)

    def test_two_lanes_of_one_store(self) -> None:
        assert fault(_store_lanes, (1,), zeros(16), 2, BLOCK=16).kind is FaultKind.LANE_CONFLICT
        clean(_store_lanes, (1,), zeros(16), 1, BLOCK=16)

    def test_store_then_load_needs_a_barrier_only_between_lanes(self) -> None:
        caught = fault(_reverse_through_memory, (1,), zeros(16), zeros(16), BLOCK=16, BARRIER=False, REVERSE=True)
        assert caught.kind is FaultKind.STORE_THEN_LOAD
        for barrier, reverse in ((True, True), (False, False)):
            clean(_reverse_through_memory, (1,), zeros(16), zeros(16), BLOCK=16, BARRIER=barrier, REVERSE=reverse)

    def test_atomics_agree_among_themselves_only(self) -> None:
        counter = zeros(2)
        clean(_count, (8,), counter, PLAIN=False)
        assert counter[0] == 8
        assert fault(_count, (2,), zeros(2), PLAIN=True).kind in (
            FaultKind.READ_WRITE_RACE, FaultKind.WRITE_WRITE_RACE,
        )  # fmt: skip

    def test_a_scalar_atomic_orders_what_was_released_before_it(self) -> None:
        total = zeros(1)
        clean(_last_one_sums, (5,), zeros(5), zeros(1), total, 5, BLOCK=8, WAIT=True, options={"order": 3})
        assert total.item() == 15
        caught = fault(_last_one_sums, (5,), zeros(5), zeros(1), total, 5, BLOCK=8, WAIT=False)
        assert caught.kind is FaultKind.READ_WRITE_RACE

    def test_a_lock_protects_plain_accesses(self) -> None:
        total = zeros(1)
        clean(_add_under_a_lock, (5,), zeros(1), total)
        assert total.item() == 10


class TestUnwrittenMemory:
    def test_marks_last_until_something_is_stored(self) -> None:
        with sanitize() as session:
            buffer = session.uninitialised(torch.empty(32, dtype=torch.int32))
            _copy[(1,)](ints(20), buffer, 20, 0, BLOCK=32)
            _copy[(1,)](buffer, zeros(20), 20, 0, BLOCK=32)
            with pytest.raises(KernelFault) as caught:
                _copy[(1,)](buffer, zeros(32), 32, 0, BLOCK=32)
            assert (caught.value.kind, caught.value.index) == (FaultKind.UNINITIALISED_READ, 20)
            buffer[20:] = 0  # the host writes
            _copy[(1,)](buffer, zeros(32), 32, 0, BLOCK=32)

    def test_only_the_view_s_elements_are_marked(self) -> None:
        with sanitize() as session:
            storage = ints(40).view(4, 10)
            session.uninitialised(storage[:, 7:])
            _copy[(1,)](storage, zeros(7), 7, 0, BLOCK=8)
            with pytest.raises(KernelFault) as caught:
                _copy[(1,)](storage, zeros(8), 8, 0, BLOCK=8)
        assert caught.value.index == 7

    def test_auto_marks_what_torch_empty_returns(self) -> None:
        original = torch.empty
        with sanitize(poison="auto"):
            for made in (torch.empty(16, dtype=torch.int32), torch.empty_like(ints(16)), ints(16).new_empty(16)):
                with pytest.raises(KernelFault) as caught:
                    _copy[(1,)](made, zeros(16), 16, 0, BLOCK=16)
                assert caught.value.kind is FaultKind.UNINITIALISED_READ
        assert torch.empty is original

    def test_marking_belongs_inside(self) -> None:
        session = sanitize()
        with pytest.raises(ConfigError, match="inside"):
            session.uninitialised(zeros(4))


class TestValues:
    def test_overflow_unless_wide_or_declared(self) -> None:
        wide = torch.zeros(1, dtype=torch.int64)
        caught = fault(_offset, (2,), wide, 2**30, WIDE=False, WRAP=False, options={"races": False})
        assert caught.kind is FaultKind.INT32_OVERFLOW
        assert f"2 * {2**30} = {2**31}" in str(caught)
        for declared in ({"WIDE": True, "WRAP": False}, {"WIDE": False, "WRAP": True}):
            clean(_offset, (2,), wide, 2**30, options={"races": False}, **declared)
        clean(_offset, (2,), wide, 2**30, WIDE=False, WRAP=False, options={"races": False, "overflow": False})

    def test_a_sum_that_does_not_fit(self) -> None:
        assert fault(_sum_all, (1,), torch.full((16,), 2**28, dtype=torch.int32), zeros(1), BLOCK=16).kind is (
            FaultKind.INT32_OVERFLOW
        )
        clean(_sum_all, (1,), torch.full((16,), 2**26, dtype=torch.int32), zeros(1), BLOCK=16)

    def test_a_masked_lane_in_a_sum(self) -> None:
        x, y = torch.ones(16), torch.zeros(1)
        assert fault(_row_sum, (1,), x, y, 10, BLOCK=16, SELECT=False).kind is FaultKind.MASKED_VALUE_USED
        clean(_row_sum, (1,), x, y, 10, BLOCK=16, SELECT=True)
        clean(_row_sum, (1,), x, y, 16, BLOCK=16, SELECT=False)  # no lane is masked off
        clean(_row_sum, (1,), x, y, 10, BLOCK=16, SELECT=False, options={"masked_values": False})

    def test_a_masked_lane_in_an_address(self) -> None:
        index, x, y = zeros(16), ints(16), zeros(16)
        caught = fault(_index_by_masked, (1,), index, x, y, 10, BLOCK=16, GUARD=False)
        assert caught.kind is FaultKind.MASKED_VALUE_USED
        assert caught.where.line == line_of(_index_by_masked, "tl.load(x + at")
        clean(_index_by_masked, (1,), index, x, y, 10, BLOCK=16, GUARD=True)

    def test_a_masked_value_in_a_condition(self) -> None:
        assert fault(_branch_on_masked, (1,), ints(1), zeros(1), 0).kind is FaultKind.MASKED_VALUE_USED
        clean(_branch_on_masked, (1,), ints(1), zeros(1), 5)

    def test_a_scalar_other_of_zero_counts(self) -> None:
        clean(_scalar_with_other_zero, (1,), ints(1), zeros(1), 0)

    def test_masked_lanes_in_a_product_of_matrices(self) -> None:
        a, b, c = torch.rand(10, 10), torch.rand(10, 10), torch.zeros(10, 10)
        assert fault(_matmul, (1,), a, b, c, 10, BLOCK=16, SELECT=False).kind is FaultKind.MASKED_VALUE_USED
        clean(_matmul, (1,), a, b, c, 10, BLOCK=16, SELECT=True)
        torch.testing.assert_close(c, a @ b)

    def test_device_assert_is_on(self) -> None:
        caught = fault(_insist, (1,), zeros(1))
        assert caught.kind is FaultKind.DEVICE_ASSERT
        assert "x must be positive" in str(caught)
        clean(_insist, (1,), zeros(1), options={"allow": [FaultKind.DEVICE_ASSERT]})


class TestOrder:
    @given(orders(100))
    @settings(max_examples=8)
    def test_programs_run_each_once_in_any_order(self, order: int | None) -> None:
        x, y = ints(100), zeros(100)
        with sanitize(order=order) as session:
            _copy[(7,)](x, y, 100, 0, BLOCK=16)
        assert session.programs == 7
        assert x.equal(y)

    def test_a_permuted_order_is_reproducible_and_another_one(self) -> None:
        def last(order: int | None) -> int:
            y = zeros(1)
            with sanitize(order=order, races=False):
                _latest_wins[(50,)](y, BLOCK=1)
            return int(y.item())

        assert last(None) == 49
        assert last(1) == last(1)
        assert len({last(order) for order in range(5)}) > 1

    def test_order_dependence_names_the_element(self) -> None:
        def run(kernel: Any, *args: Any, **k: Any) -> Any:
            y = zeros(16)
            kernel[(4,)](*args, y, **k)
            return {"y": y}

        with pytest.raises(KernelFault) as caught:
            check_order_independence(lambda: run(_latest_wins, BLOCK=16), range(1, 8))
        assert (caught.value.kind, caught.value.argument) == (FaultKind.ORDER_DEPENDENCE, "y")
        assert caught.value.where.kernel == "_latest_wins"
        check_order_independence(lambda: run(_count, PLAIN=False), range(1, 4))


def _patched_state() -> dict[str, Any]:
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    return {
        "builder": interpreter.interpreter_builder,
        "semantic": interpreter.interpreter_semantic.builder,
        **{
            f"{owner.__name__}.{name}": value
            for owner in (
                interpreter.GridExecutor, interpreter.InterpretedFunction, interpreter.InterpreterBuilder,
                interpreter.ReduceOps, interpreter.ScanOps, TritonSemantic, tl, tl.core, tl.tensor, tl.math,
            )
            for name, value in vars(owner).items()
            if not name.startswith("__") or name in ("__call__", "__bool__", "__index__")
        },
    }  # fmt: skip


class TestSession:
    def test_every_patch_is_undone_after_a_fault_too(self) -> None:
        with sanitize():  # what Triton itself leaves behind on a first launch is there now
            _copy[(1,)](ints(16), zeros(16), 16, 0, BLOCK=16)
        before = _patched_state()
        fault(_copy, (1,), ints(16), zeros(15), 16, 0, BLOCK=16, options={"poison": "auto"})
        with pytest.raises(ZeroDivisionError), sanitize():
            raise ZeroDivisionError
        assert _patched_state() == before
        _copy[(1,)](ints(16), zeros(16), 16, 0, BLOCK=16)

    def test_counts_and_use_again(self) -> None:
        session = sanitize()
        for _ in range(2):
            with session:
                _copy[(2,)](ints(32), zeros(32), 32, 0, BLOCK=16)
        _copy[(2,)](ints(32), zeros(32), 32, 0, BLOCK=16)  # outside: not counted
        assert (session.launches, session.programs, session.accesses) == (2, 4, 8)

    def test_a_fault_does_not_end_the_session(self) -> None:
        with sanitize() as session:
            with pytest.raises(KernelFault):
                _copy[(1,)](ints(16), zeros(15), 16, 0, BLOCK=16)
            y = zeros(16)
            _copy[(1,)](ints(16), y, 16, 0, BLOCK=16)
        assert y.equal(ints(16))
        assert session.launches == 2

    def test_no_sanitizer_inside_another(self) -> None:
        with sanitize() as outer:
            for inner in (outer, sanitize()):
                with pytest.raises(ConfigError, match="already on"), inner:
                    pass
            _copy[(1,)](ints(16), zeros(16), 16, 0, BLOCK=16)
        assert outer.launches == 1

    def test_the_fixture_is_a_session(self, sanitized: Any) -> None:  # noqa: F811
        with pytest.raises(KernelFault):
            _copy[(1,)](sanitized.uninitialised(torch.empty(4)), torch.zeros(4), 4, 0, BLOCK=4)
        assert sanitized.launches == 1


class TestVersions:
    def test_this_one_is_known(self) -> None:
        assert versions.obstacles() == []

    def test_an_unknown_one_warns_once_and_runs_plainly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(triton, "__version__", "9.1.0")
        storage, session = zeros(32), sanitize()
        with pytest.warns(RuntimeWarning, match=r"triton 9.1.0 is not one of the known versions 3.6, 3.9"), session:
            _store_everywhere[(2,)](storage, 7)
        assert storage[0] == 7
        assert (session.active, session.launches) == (False, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with sanitize():
                pass

    def test_a_private_name_that_moved_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime import interpreter

        monkeypatch.delattr(interpreter, "_implicit_cvt")
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", lambda self, lhs, rhs: None)
        missing, changed = versions.obstacles()
        assert "_implicit_cvt is missing" in missing
        assert "create_dot takes ['self', 'lhs', 'rhs'], expected" in changed

    def test_compiled_kernels_cannot_be_judged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"), sanitize():
            pass
        with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"), fast_interpreter():
            pass


class TestFastInterpreter:
    @given(st.integers(0, 2**32 - 1))
    @settings(max_examples=5)
    def test_same_results(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        x = torch.randint(-(2**31), 2**31 - 1, (32,), generator=random, dtype=torch.int32)
        stock, fast = zeros(32), zeros(32)
        _sort[(1,)](x, stock, BLOCK=32)
        with fast_interpreter():
            _sort[(1,)](x, fast, BLOCK=32)
        assert stock.equal(fast)
        assert fast.equal(x.sort().values)

    def test_it_checks_nothing_and_may_hold_a_sanitizer(self) -> None:
        before = _patched_state()
        with fast_interpreter():
            _insist[(1,)](zeros(1))
            _offset[(2,)](torch.zeros(1, dtype=torch.int64), 2**30, WIDE=False, WRAP=False)
            assert fault(_copy, (1,), ints(16), zeros(15), 16, 0, BLOCK=16).argument == "y"
            _insist[(1,)](zeros(1))
        assert _patched_state() == before

    def test_other_errors_come_as_the_interpreter_s(self) -> None:
        from triton.runtime.errors import InterpreterError

        for context in (fast_interpreter, sanitize):
            with pytest.raises(InterpreterError), context():
                _copy_tuple[(1,)]((ints(16),), BLOCK=16)


def test_results_are_those_of_the_plain_interpreter() -> None:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(16).astype(np.float32))
    stock, judged = torch.zeros(1), torch.zeros(1)
    _row_sum[(1,)](x, stock, 10, BLOCK=16, SELECT=True)
    with sanitize():
        _row_sum[(1,)](x, judged, 10, BLOCK=16, SELECT=True)
    assert stock.equal(judged)


@triton.jit
def _spread_truth_kernel(x, y, enabled, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    on = tl.load(enabled) != 0  # one truth value, which the interpreter spreads over the block as integers
    tl.store(y + i, tl.load(x + i), mask=on)


def test_a_spread_truth_value_is_taken_or_refused_as_without_the_sanitizer() -> None:
    """Triton 3.9's interpreter refuses it, 3.6's takes it; read as positions, it would hit the wrong lanes."""
    outcomes = []
    for context in (nullcontext(), sanitize()):
        x, y, enabled = torch.arange(8), torch.zeros(8, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
        try:
            with context:
                _spread_truth_kernel[(1,)](x, y, enabled, BLOCK=8)
            outcomes.append(("stored", y.tolist()))
        except triton.runtime.interpreter.InterpreterError as e:
            outcomes.append(("refused", str(e)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] == ("stored", list(range(8))) or "unsupported dtype" in outcomes[0][1]
