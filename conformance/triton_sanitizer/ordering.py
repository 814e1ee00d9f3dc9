"""Does a result depend on the order in which programs run? On a GPU that order is nobody's to choose."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from conformance.triton_sanitizer.faults import FaultKind, KernelFault, Where
from conformance.triton_sanitizer.session import sanitize


def check_order_independence(
    run: Callable[[], Any], seeds: Sequence[int], *, rtol: float = 0.0, atol: float = 0.0, **options: Any
) -> None:
    """Run launches in their own order and in permuted ones; the results must be equal.

    run: builds its inputs, launches, and returns a tensor, an array, or a sequence or dict of them. rtol, atol: for
    sums whose order of addition may vary. options: for sanitize(), with races off unless asked for: a race is reported
    as one before its effect can be seen.
    Raises: KernelFault of kind ORDER_DEPENDENCE, naming the first result and element that differ.
    """
    options.setdefault("races", False)
    expected: dict[str, np.ndarray] | None = None
    for order in itertools.chain([None], seeds):
        with sanitize(order=order, **options) as session:
            got = {name: _to_array(value) for name, value in _named(run())}
            last = session.last_kernel
        if expected is None:
            expected = got
            continue
        for name, value in got.items():
            _compare(name, expected[name], value, order, rtol, atol, last)


def _compare(
    name: str, expected: np.ndarray, got: np.ndarray, order: int | None, rtol: float, atol: float, where: Where
) -> None:
    same = np.isclose(got, expected, rtol=rtol, atol=atol, equal_nan=True) if rtol or atol else got == expected
    same |= (got != got) & (expected != expected)
    if same.all():
        return
    index = int(np.flatnonzero(~same)[0])
    raise KernelFault(
        FaultKind.ORDER_DEPENDENCE, where, (0, 0, 0), argument=name, index=index, extent=got.size,
        detail=f"{expected.reshape(-1)[index]} in the natural order, {got.reshape(-1)[index]} in order {order}",
    )  # fmt: skip


def _named(results: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(results, Mapping):
        yield from ((str(name), value) for name, value in results.items())
    elif isinstance(results, (list, tuple)):
        yield from ((f"result[{i}]", value) for i, value in enumerate(results))
    else:
        yield "result", results


def _to_array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy().copy()
    return np.array(value)


def orders(max_seed: int = 2**16 - 1) -> Any:
    """A Hypothesis strategy of values for `sanitize(order=...)`: None, the natural order, and permutations."""
    from hypothesis import strategies as st

    return st.one_of(st.none(), st.integers(0, max_seed))
