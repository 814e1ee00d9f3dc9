"""Numbers and arrays as JSON, and the fault that says what cannot be written or read. For `runner_api.wire`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip
LIMITS = {
    np.dtype(name): (int(np.iinfo(name).min), int(np.iinfo(name).max)) for name in DTYPES if np.dtype(name).kind in "iu"
}
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Fault(Exception):
    """Something that cannot be written or read; containers on the way out put their part of the path in front."""

    def __init__(self, what: str, got: Any, expected: str, valid: Sequence[str] | None = None) -> None:
        super().__init__(what)
        self.what, self.got, self.expected, self.valid = what, got, expected, valid
        self.path: list[str] = []

    def below(self, part: str) -> Fault:
        self.path.insert(0, part)
        return self


@dataclass(frozen=True, slots=True)
class Codec:
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def spell_number(value: float) -> str:
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def array_codec(known: tuple[str, int] | None) -> Codec:
    """known: dtype and rank that need not be told."""
    dtype, rank = (np.dtype(known[0]), known[1]) if known else (None, 0)

    def write(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise Fault(f"is of type {type(value).__name__}", value, "an array")
        shown = value.size or rank == 1  # empty lists do not show the shape of more than one axis
        if value.dtype == dtype and value.ndim == rank and shown:
            return _elements(value)
        return write_full(value)

    def read(data: Any) -> np.ndarray:
        if isinstance(data, dict):
            return read_full(data)
        if dtype is None:
            raise Fault("an array of unknown dtype", data, "an object with dtype, shape and data")
        return _read_nested(data, dtype, rank)

    return Codec(write, read)


def _elements(value: np.ndarray) -> Any:
    """Nested lists; what is not finite as text."""
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        return _spell(value.tolist())
    return value.tolist()


def _spell(value: Any) -> Any:
    if isinstance(value, list):
        return [_spell(v) for v in value]
    return value if math.isfinite(value) else spell_number(value)


def write_full(value: np.ndarray) -> dict[str, Any]:
    if value.dtype.name not in DTYPES:
        raise Fault("an array of a dtype that has no form", value.dtype.name, f"one of {', '.join(DTYPES)}")
    return {"dtype": value.dtype.name, "shape": list(value.shape), "data": _elements(value.ravel())}


def read_full(data: Any) -> np.ndarray:
    if not isinstance(data, dict) or set(data) != {"dtype", "shape", "data"} or data["dtype"] not in DTYPES:
        raise Fault("is no array", data, f"an object with dtype (one of {', '.join(DTYPES)}), shape and data")
    shape = data["shape"]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise Fault("is no shape", shape, "a list of integers >= 0")
    flat = _read_nested(data["data"], np.dtype(data["dtype"]), 1)
    if flat.size != math.prod(shape):
        raise Fault("has another number of elements than its shape", flat.size, str(math.prod(shape)))
    try:
        return flat.reshape(shape)
    except ValueError as e:  # more axes, or longer ones, than NumPy has
        raise Fault("is no shape of an array", shape, str(e)) from None


def _read_nested(data: Any, want: np.dtype[Any], rank: int) -> np.ndarray:
    """Nested lists as an array. Nothing is rounded to an integer, and no integer wraps."""
    if not isinstance(data, list):
        raise Fault(f"is of type {type(data).__name__}", data, "nested lists")
    if not data:
        return np.zeros((0,) * rank, want)
    limits = LIMITS.get(want)
    if limits and rank == 1 and set(map(type, data)) == {int} and limits[0] <= min(data) and max(data) <= limits[1]:
        return np.array(data, want)  # by far the most
    try:
        found = np.array(_unspell(data) if want.kind == "f" else data)
        if want == np.uint64 and found.dtype.kind == "f":  # NumPy's guess for small and large ones mixed
            found = _as_uint64(data)
    except ValueError:
        raise Fault("has rows of different lengths", data, f"{rank} levels of lists") from None
    kinds = {"f": "fiu", "b": "b"}.get(want.kind, "iu")
    if found.ndim != rank or (found.size and found.dtype.kind not in kinds) or (want.kind != "b" and _has_bool(data)):
        raise Fault("is no array of that kind", data, f"{want.name} in {rank} level{'s' * (rank > 1)} of lists")
    if limits and found.size and (int(found.min()) < limits[0] or int(found.max()) > limits[1]):
        raise Fault("has elements out of range", data, f"{want.name} values")
    with np.errstate(over="ignore"):  # a number beyond the type is an infinity
        return found.astype(want)


def _has_bool(data: list[Any]) -> bool:
    """Whether one is among the elements of nested lists: NumPy makes a number of it where numbers stand beside it."""
    kinds = set(map(type, data))
    return bool in kinds or (list in kinds and any(map(_has_bool, data)))


def _as_uint64(data: Any) -> np.ndarray:
    exact = np.array(data, object)
    if all(type(v) is int and 0 <= v < 2**64 for v in exact.flat):
        return exact.astype(np.uint64)
    return exact


def _unspell(value: Any) -> Any:
    if isinstance(value, list):
        return [_unspell(v) for v in value] if any(type(v) in (list, str) for v in value) else value
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value
