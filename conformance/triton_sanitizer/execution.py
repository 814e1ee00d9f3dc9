"""Launches in the interpreter, made faster: the same results with less ado.

Stock Triton patches `triton.language` anew on every call of a nested `@triton.jit` function, computes an overflow check
and drops its answer, and reduces xor and or element by element. Here the language is patched once a launch from a list
worked out beforehand. The sanitizer hangs itself into the same launch through a `Judge`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import triton
import triton.language as tl
from triton.language import semantic as tl_semantic
from triton.runtime import interpreter as stock

from conformance.triton_sanitizer import versions
from conformance.triton_sanitizer.faults import KernelFault
from conformance.triton_sanitizer.patching import ABSENT, replace

Grid = tuple[int, int, int]


class Judge(Protocol):
    """What a launch tells whoever watches it."""

    def begin(self, fn: Callable[..., Any], grid: Grid) -> None: ...

    def convert(self, name: str, host: Any, device: Any) -> Any:
        """An argument as the kernel sees it. host: in the interpreter's memory; device: as the caller gave it."""

    def programs(self, grid: Grid) -> Iterator[Grid]:
        """The programs in the order in which they shall run."""

    def end(self) -> None: ...


def _index(tensor: Any) -> int:
    """tl.tensor.__index__: NumPy from 2.4 on refuses the one-element arrays that Triton 3.6 converts."""
    return int(tensor.handle.data.item())


def _left_over() -> dict[tuple[int, str], tuple[Any, str, Any]]:
    """What nested calls of stock launches have patched and not put back; in Triton 3.6 it holds the builder of then."""
    return {
        (id(target), name): (target, name, member)
        for target in (tl, tl.core, tl.tensor, tl.math)
        for name, member in vars(target).items()
        if inspect.isfunction(member) and tl.core.is_builtin((member.__kwdefaults__ or {}).get("member"))
    }


class _Language:
    """`triton.language` as kernels in the interpreter see it: worked out once, then laid in and taken out."""

    def __init__(self, wrappers: Mapping[str, Callable[[Any], Any]]) -> None:
        """wrappers: for a method of tl.tensor, what to make of the interpreter's own replacement."""
        self._changes: list[tuple[Any, str, Any, Any]] = []  # (object, name, original, replacement)
        self.active = False
        seen: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        left_over = _left_over()
        for target, name, member in left_over.values():
            setattr(target, name, member.__kwdefaults__["member"])
        scope = stock._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        for target, name, original in scope._changes:
            seen.setdefault((id(target), name), (target, name, original))
        for target, name, original in seen.values():
            original = ABSENT if original is getattr(stock, "_MISSING", ABSENT) else original
            replacement = getattr(target, name)
            if target is tl.tensor:
                if name == "__index__":
                    replacement = _index
                replacement = wrappers.get(name, lambda method: method)(replacement)
            _, _, original = left_over.get((id(target), name), (target, name, original))
            self._changes.append((target, name, original, replacement))
        scope.restore()
        for target, name, member in left_over.values():
            setattr(target, name, member)

    def __enter__(self) -> None:
        for target, name, _, replacement in self._changes:
            setattr(target, name, replacement)
        self.active = True

    def __exit__(self, *_: object) -> None:
        self.active = False
        for target, name, original, _ in self._changes:
            if original is ABSENT:
                delattr(target, name)
            else:
                setattr(target, name, original)


@functools.lru_cache(maxsize=1024)
def _parameters(fn: Callable[..., Any]) -> frozenset[str]:
    spec = inspect.getfullargspec(fn)
    return frozenset(spec.args) | frozenset(spec.kwonlyargs)


def _launch(
    language: _Language, judge: Judge | None, executor: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Run all programs of one launch, as stock GridExecutor does."""
    fn = executor.fn
    kwargs = {name: value for name, value in kwargs.items() if name in _parameters(fn)}
    host_args, host_kwargs = executor._init_args_hst(args, kwargs)
    for hook in getattr(executor, "pre_run_hooks", ()):
        hook(*host_args, **host_kwargs)
    host = inspect.getcallargs(fn, *host_args, **host_kwargs)
    with language:
        if judge is None:
            seen = {n: v if n in executor.constexprs else stock._implicit_cvt(v) for n, v in host.items()}
            _run(executor, seen, None)
        else:
            device = inspect.getcallargs(fn, *args, **kwargs)
            try:
                seen = {n: v if n in executor.constexprs else judge.convert(n, v, device[n]) for n, v in host.items()}
                _run(executor, seen, judge)
            finally:
                judge.end()
    executor._restore_args_dev(args, host_args, kwargs, host_kwargs)


def _run(executor: Any, args: dict[str, Any], judge: Judge | None) -> None:
    fn, builder = executor.fn, stock.interpreter_builder
    grid = executor.grid(args) if callable(executor.grid) else executor.grid
    assert len(grid) <= 3, "grid must have at most 3 dimensions"
    extents = tuple(operator.index(extent) for extent in grid) + (1,) * (3 - len(grid))
    builder.set_grid_dim(*extents)
    programs: Iterator[Any] = itertools.product(*map(range, extents))
    if judge is not None:
        judge.begin(fn, extents)
        programs = judge.programs(extents)
    try:
        for program in programs:
            builder.set_grid_idx(*program)
            fn(**args)
    except KernelFault:
        raise
    except Exception as error:
        if triton.knobs.compilation.front_end_debugging:
            raise
        raise stock.InterpreterError(repr(error)) from error


def _nested_call(language: _Language, original: Callable[..., Any]) -> Callable[..., Any]:
    """InterpretedFunction.__call__ without patching; outside of a launch it is the stock one."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not language.active:
            return original(self, *args, **kwargs)
        fn = self.rewrite()
        try:
            return fn(*args, **kwargs)
        except (KernelFault, stock.InterpreterError):
            raise
        except Exception as error:
            raise stock.InterpreterError(repr(error)) from error

    return call


def _fast_reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    """ReduceOps.apply_impl with NumPy's own xor and or, which sorting spends its time in."""
    ufuncs = {
        getattr(tl.standard, name): ufunc
        for name, ufunc in (("_xor_combine", np.bitwise_xor), ("_or_combine", np.bitwise_or))
        if hasattr(tl.standard, name)
    }

    def apply_impl(self: Any, inputs: tuple[Any, ...]) -> Any:
        ufunc = ufuncs.get(self.combine_fn)
        if ufunc is None or len(inputs) != 1:
            return original(self, inputs)
        data, dtype = inputs[0].handle.data, inputs[0].dtype
        return self.to_tensor(ufunc.reduce(data, axis=self.axis, keepdims=self.keep_dims), dtype)

    return apply_impl


def install(
    stack: ExitStack,
    judge: Judge | None = None,
    builder: Any = None,
    wrappers: Mapping[str, Callable[[Any], Any]] | None = None,
) -> None:
    """Patch the interpreter until the stack closes.

    builder: takes the place of the stock one. wrappers: around what the interpreter puts into tl.tensor, by method.
    """
    if builder is not None:
        replace(stack, stock, "interpreter_builder", builder)
        replace(stack, stock.interpreter_semantic, "builder", builder)
    language = _Language(wrappers or {})
    replace(stack, stock.InterpretedFunction, "__call__", _nested_call(language, stock.InterpretedFunction.__call__))
    replace(stack, stock.ReduceOps, "apply_impl", _fast_reduction(stock.ReduceOps.apply_impl))

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        _launch(language, judge, executor, args, kwargs)

    replace(stack, stock.GridExecutor, "__call__", launch)


@contextmanager
def fast_interpreter() -> Iterator[None]:
    """Inside it launches are about twice as fast as stock Triton's, with the same results. Checks nothing.

    Raises ConfigError outside of the interpreter; a Triton that cannot be patched is left as it is, with a warning.
    """
    if not versions.patchable():
        yield
        return
    with ExitStack() as stack:
        replace(
            stack, tl_semantic.TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None
        )  # stock computes it and, without debug, asks nobody
        install(stack)
        yield
