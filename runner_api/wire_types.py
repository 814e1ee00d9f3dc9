"""How values of each type are written as JSON and read back, by their type hints. For `runner_api.wire`."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum, StrEnum
from typing import Any

import numpy as np

from runner_api.config import RunnerConfig
from runner_api.outputs import LogprobsLists
from runner_api.plan import ForcedStep, GrammarOutput
from runner_api.record import StepRecord
from runner_api.wire_values import NOT_FINITE, Codec, Fault, array_codec, spell_number

# dtype and rank of arrays, by where they stand; those inside of tuples and mappings too.
ARRAYS: dict[type, dict[str, tuple[str, int]]] = {
    StepRecord: {
        "idx_mapping": ("int64", 1), "query_start_loc": ("int32", 1), "seq_lens": ("int32", 1),
        "input_ids": ("int32", 1), "positions": ("int64", 1), "logits_indices": ("int64", 1),
        "cu_num_logits": ("int32", 1), "expanded_idx_mapping": ("int64", 1), "expanded_local_pos": ("int32", 1),
        "block_tables": ("int32", 1), "slot_mappings": ("int64", 2), "seeds": ("int64", 1),
        "draft_token_ids": ("int64", 2), "token_ids": ("int64", 2), "num_sampled": ("int32", 1),
        "num_rejected": ("int32", 1), "faults": ("int32", 1), "forced_token_ids": ("int64", 2),
        "logprob_token_ids": ("int32", 2), "logprobs": ("float32", 2), "ranks": ("int64", 1),
        "logits": ("float32", 2), "kv": ("int64", 3), "intermediates": ("float32", 2),
    },
    ForcedStep: {
        "token_ids": ("int64", 2), "num_sampled": ("int32", 1), "draft_token_ids": ("int64", 2),
        "logits": ("float32", 2),
    },
    GrammarOutput: {"grammar_bitmask": ("int32", 2)},
    LogprobsLists: {"token_ids": ("int32", 2), "logprobs": ("float32", 2), "ranks": ("int64", 1)},
}  # fmt: skip


@functools.cache
def codec_of(hint: Any, array: tuple[str, int] | None = None) -> Codec:
    """How values of this type are written and read. array: dtype and rank of the arrays in it, where they are known."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    if hint is np.ndarray:
        return array_codec(array)
    if hint in _SCALARS:
        return Codec(_write_scalar, functools.partial(_read_scalar, _SCALARS[hint]))
    if hint is float:
        return Codec(_write_scalar, _read_float)
    if origin in (typing.Union, types.UnionType):
        return _union(parts, array)
    if origin is tuple and parts[-1:] != (Ellipsis,):
        return _fixed(parts)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(parts[0], codec_of(parts[1], array))
    if origin is not None and issubclass(origin, Set):
        return _set(codec_of(parts[0]))
    if origin is not None and issubclass(origin, Sequence):
        return _list(tuple if origin is tuple else list, parts[0], codec_of(parts[0], array), origin is Sequence)
    return Codec(_write_anything, _read_anything)


_SCALARS: dict[Any, str] = {int: "an integer", str: "text", bool: "true or false", type(None): "null"}


def _write_scalar(value: Any) -> Any:
    """Also of the wrong kind, so that a plan nobody should make reaches whoever is to refuse it."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else spell_number(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise Fault(f"is of type {type(value).__name__}", value, "a number, text, true, false or null")


def _read_scalar(expected: str, data: Any) -> Any:
    if type(data) in _SCALARS and _SCALARS[type(data)] == expected:
        return data
    raise Fault(f"is of type {type(data).__name__}", data, expected)


def _read_float(data: Any) -> float:
    if type(data) in (float, int):
        return float(data)
    if isinstance(data, str) and data in NOT_FINITE:
        return NOT_FINITE[data]
    raise Fault(f"is of type {type(data).__name__}", data, "a number, 'nan', 'inf' or '-inf'")


def _union(members: tuple[Any, ...], array: tuple[str, int] | None) -> Codec:
    others = [m for m in members if m is not type(None)]
    inner = codec_of(others[0], array) if len(others) == 1 else Codec(_write_anything, _read_anything)

    def write(value: Any) -> Any:
        return None if value is None else inner.write(value)

    def read(data: Any) -> Any:
        return None if data is None else inner.read(data)

    return Codec(write, read)


def _list(kind: type, item: Any, inner: Codec, any_sequence: bool = False) -> Codec:
    """any_sequence: ranges and arrays are sequences of integers too."""

    def write(value: Any) -> list[Any]:
        if any_sequence and isinstance(value, (np.ndarray, range)):
            return list(value) if isinstance(value, range) else value.tolist()
        if not isinstance(value, (list, tuple)):
            raise Fault(f"is of type {type(value).__name__}", value, "a list")
        if set(map(type, value)) <= _COMMON:
            return list(value)  # by far the most: integers
        return [_each(inner.write, i, v) for i, v in enumerate(value)]

    def read(data: Any) -> Any:
        if not isinstance(data, list):
            raise Fault(f"is of type {type(data).__name__}", data, "a list")
        if item in (int, str) and set(map(type, data)) <= {item}:
            return kind(data)
        return kind([_each(inner.read, i, v) for i, v in enumerate(data)])

    return Codec(write, read)


_COMMON = {int, str}


def _fixed(parts: tuple[Any, ...]) -> Codec:
    """A tuple of so many members. Written at any length, so that a wrong one reaches whoever is to refuse it."""
    codecs = [codec_of(p) for p in parts]

    def write(value: Any) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise Fault(f"is of type {type(value).__name__}", value, "a list")
        return [_each(codecs[min(i, len(codecs) - 1)].write, i, v) for i, v in enumerate(value)]

    def read(data: Any) -> tuple[Any, ...]:
        if not isinstance(data, list) or len(data) != len(codecs):
            raise Fault("is not a list of that length", data, f"a list of {len(codecs)}")
        return tuple(_each(c.read, i, v) for i, (c, v) in enumerate(zip(codecs, data, strict=True)))

    return Codec(write, read)


def _set(inner: Codec) -> Codec:
    def write(value: Any) -> list[Any]:
        if not isinstance(value, Set):
            raise Fault(f"is of type {type(value).__name__}", value, "a set")
        return sorted(map(inner.write, value), key=lambda v: (type(v).__name__, v))

    def read(data: Any) -> frozenset[Any]:
        if not isinstance(data, list):
            raise Fault(f"is of type {type(data).__name__}", data, "a list")
        return frozenset(_each(inner.read, i, v) for i, v in enumerate(data))

    return Codec(write, read)


def _mapping(key: Any, inner: Codec) -> Codec:
    """Keys are text in JSON; integers come back as such."""

    def write(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(k, (str, int, np.integer)) for k in value):
            raise Fault(f"is of type {type(value).__name__}", value, "a mapping of names or integers")
        return {str(k): _each(inner.write, k, v) for k, v in value.items()}

    def read(data: Any) -> dict[Any, Any]:
        if not isinstance(data, dict):
            raise Fault(f"is of type {type(data).__name__}", data, "an object")
        return {(_integer_key(k) if key is int else k): _each(inner.read, k, v) for k, v in data.items()}

    return Codec(write, read)


def _integer_key(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise Fault("has a key that is no integer", key, "an integer as text") from None


def _each(convert: Callable[[Any], Any], key: Any, value: Any) -> Any:
    try:
        return convert(value)
    except Fault as fault:
        raise fault.below(f"[{key!r}]") from None


def _enum(cls: type[Enum]) -> Codec:
    textual = issubclass(cls, StrEnum)
    by_name = {(m.value if textual else m.name): m for m in cls}

    def write(value: Any) -> Any:
        if not isinstance(value, cls):
            raise Fault(f"is of type {type(value).__name__}", value, f"a {cls.__name__}")
        return value.value if textual else value.name

    def read(data: Any) -> Enum:
        if isinstance(data, str) and data in by_name:
            return by_name[data]
        if type(data) is int and data in {m.value for m in cls}:
            return cls(data)
        raise Fault(cls.__name__, data, "", sorted(by_name))

    return Codec(write, read)


# -- dataclasses ------------------------------------------------------------------------------------------------------


def _dataclass(cls: type) -> Codec:
    hints = typing.get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if f.init]
    defaults = {f.name: d for f in fields if (d := _default(f)) is not dataclasses.MISSING}
    codecs = {f.name: _field_codec(cls, f.name, hints[f.name], defaults.get(f.name)) for f in fields}

    def write(value: Any) -> dict[str, Any]:
        if type(value) is not cls:
            raise Fault(f"is of type {type(value).__name__}", value, f"a {cls.__name__}")
        plain = {}
        for name, codec in codecs.items():
            part = getattr(value, name)
            if name not in defaults or not _equal(part, defaults[name]):
                try:
                    plain[name] = codec.write(part)
                except Fault as fault:
                    raise fault.below(f".{name}") from None
        return plain

    def read(data: Any) -> Any:
        if not isinstance(data, dict):
            raise Fault(f"is of type {type(data).__name__}", data, f"an object: the fields of a {cls.__name__}")
        for name in data:
            if name not in codecs:
                raise Fault(f"field of {cls.__name__}", name, "", sorted(codecs))
        for name in codecs:
            if name not in data and name not in defaults:
                raise Fault(f"{cls.__name__} lacks a field", sorted(data), f"field {name!r}")
        values = {}
        for name, part in data.items():
            try:
                values[name] = codecs[name].read(part)
            except Fault as fault:
                raise fault.below(f".{name}") from None
        return cls(**values)

    return Codec(write, read)


def _field_codec(cls: type, name: str, hint: Any, default: Any) -> Codec:
    if (cls, name) == (RunnerConfig, "logits_processors"):
        return _list(tuple, Any, Codec(_name_of_factory, functools.partial(_read_scalar, "text")))
    if typing.get_origin(hint) is Sequence and isinstance(default, tuple):  # read as what the default is
        (item,) = typing.get_args(hint)
        return _list(tuple, item, codec_of(item))
    return codec_of(hint, ARRAYS.get(cls, {}).get(name))


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _equal(value: Any, default: Any) -> bool:
    """The same, type included; an array only where it is empty, so that long ones are not compared."""
    if type(value) is not type(default):
        return False
    if isinstance(value, np.ndarray):
        return not value.size and value.shape == default.shape and value.dtype == default.dtype
    return bool(value == default)


def _name_of_factory(value: Any) -> str:
    """A callable by the name under which its module has it."""
    if isinstance(value, str):
        return value
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    found: Any = sys.modules.get(module or "")
    for part in (name or "").split("."):
        found = getattr(found, part, None)
    if found is not value or found is None:
        raise Fault("a callable without a name of its own", value, "'package.module:factory', or what has such a name")
    return f"{module}:{name}"


def _write_anything(value: Any) -> Any:
    """A field of no fixed type: plain values, and lists and mappings of them."""
    if isinstance(value, (list, tuple)):
        return [_each(_write_anything, i, v) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        return {str(k): _each(_write_anything, k, v) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return codec_of(type(value)).write(value)
    return _write_scalar(value)


def _read_anything(data: Any) -> Any:
    return data
