"""Carries a session through its launches: arguments in, programs in order, faults out.

Patches the interpreter; imported only after `versions` has found that this Triton can be patched.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import triton
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock

from conformance.triton_sanitizer.bf16 import patch_bfloat16
from conformance.triton_sanitizer.execution import Grid, install
from conformance.triton_sanitizer.faults import FaultKind, KernelFault, Where
from conformance.triton_sanitizer.memory import Memory
from conformance.triton_sanitizer.patching import replace
from conformance.triton_sanitizer.unwritten import Unwritten
from conformance.triton_sanitizer.values import SanitizingBuilder, careful_choice, load_with_other, reduction

if TYPE_CHECKING:
    from conformance.triton_sanitizer.session import Session

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TRITON = os.path.dirname(os.path.abspath(triton.__file__)) + os.sep


def _check_overflow(semantic: Any, lhs: Any, rhs: Any, binary_op: Callable[..., Any]) -> None:
    """In the place of TritonSemantic.binary_op_sanitize_overflow_impl."""
    semantic.builder.check_overflow(lhs, rhs, binary_op.__name__)


class Judge:
    """Carries one session through its launches."""

    def __init__(self, session: Session) -> None:
        self._session = session
        checks = session.checks
        self.builder = SanitizingBuilder(self, follow_undefined=checks.masked_values, overflow=checks.overflow)
        self._memory: Memory | None = None
        self._fn: Callable[..., Any] | None = None
        self._marks: list[Unwritten] = []
        self.last_kernel = Where("<none>", "<unknown>", 0, "")

    def patch(self, stack: ExitStack) -> None:
        """Put the judge into the interpreter until the stack closes."""
        if self._session.checks.bf16:
            stack.enter_context(patch_bfloat16())
        wrappers = {"__bool__": careful_choice("the condition"), "__index__": careful_choice("the bound or index")}
        install(stack, self, self.builder, wrappers)
        replace(stack, TritonSemantic, "load", load_with_other(TritonSemantic.load))
        for ops in (stock.ReduceOps, stock.ScanOps):
            replace(stack, ops, "apply_impl", reduction(ops.apply_impl))
        replace(stack, TritonSemantic, "binary_op_sanitize_overflow_impl", _check_overflow)

    # A launch ---------------------------------------------------------------------------------------------------------

    def convert(self, name: str, host: Any, device: Any) -> Any:
        """A tensor becomes an address of its own region; everything else is what stock makes of it."""
        if self._memory is None:
            self._memory = Memory(self.report, races=self._session.checks.races)
        if isinstance(host, tuple):
            parts = [self.convert(f"{name}[{i}]", h, d) for i, (h, d) in enumerate(zip(host, device, strict=True))]
            return stock._tuple_create(host, parts)
        seen = stock._implicit_cvt(host)
        if hasattr(host, "data_ptr"):
            seen.handle.data = np.array([self._memory.add(name, host)], np.uint64)
            for i, tensor in enumerate(getattr(device, "points_to", ())):
                self._memory.add(f"{name}->[{i}]", tensor)
        elif isinstance(host, stock.TensorDescriptor):
            seen.handle.base.data = np.array([self._memory.add(name, host.base)], np.uint64)
        return seen

    def begin(self, fn: Callable[..., Any], grid: Grid) -> None:
        if self._memory is None:  # a kernel without arguments
            self._memory = Memory(self.report, races=self._session.checks.races)
        for name, tensor in self._session.known.items():
            self._memory.add(name, tensor)
        self._marks = self._session.live_marks()
        self._memory.seal(self._marks)
        self.builder.memory, self.builder.any_undefined = self._memory, False
        self._fn, code = fn, fn.__code__
        file, line = os.path.abspath(code.co_filename), code.co_firstlineno
        self.last_kernel = Where(fn.__name__, file, line, linecache.getline(file, line).strip())
        self._session.launches += 1

    def programs(self, grid: Grid) -> Iterator[Grid]:
        assert self._memory is not None
        count = grid[0] * grid[1] * grid[2]
        numbers: Sequence[int] = range(count)
        if self._session.checks.order is not None:
            random = np.random.default_rng((self._session.checks.order, self._session.launches))
            numbers = random.permutation(count).tolist()

        def program_of(number: int) -> Grid:
            xy, z = divmod(number - 1, grid[2])
            return *divmod(xy, grid[1]), z

        for number in numbers:
            self._memory.begin_program(number + 1, program_of)
            self._session.programs += 1
            yield program_of(number + 1)

    def end(self) -> None:
        if self._memory is not None and self._fn is not None:
            self._memory.take_marks(self._marks)
        self._memory = self.builder.memory = self._fn = None
        self._marks = []

    # A fault ----------------------------------------------------------------------------------------------------------

    def report(self, kind: FaultKind, **what: Any) -> None:
        if kind in self._session.checks.allow:
            return
        raise KernelFault(kind, self._where(), tuple(int(i) for i in self.builder.grid_idx), **what)

    def _where(self) -> Where:
        """The innermost line of the kernel, or of a function it calls, that belongs neither to Triton nor to us."""
        assert self._fn is not None
        place = None
        frame = sys._getframe()
        while frame is not None:
            file = os.path.abspath(frame.f_code.co_filename)
            foreign = not file.startswith((_OURS, _TRITON))
            if frame.f_code is self._fn.__code__ or (foreign and place is None):
                place = place or (file, frame.f_lineno)
                if frame.f_code is self._fn.__code__:
                    break
            frame = frame.f_back  # type: ignore[assignment]
        file, line = place or ("<unknown>", 0)
        return Where(self._fn.__name__, file, line, linecache.getline(file, line).strip())
