"""Plain JSON of everything that crosses a process border: plans, outcomes, configurations, outputs, records, errors.

A dataclass is an object of its fields; a field at its default may be left out. Tuples, lists and sets are lists (sets
sorted), mappings are objects (keys that are no text as text), enums are names (text enums their value). An array is
nested lists where its type says dtype and rank (`wire_types.ARRAYS`) and the lists show its shape; else
`{"dtype", "shape", "data"}` with the elements in C order. NaN and infinities are the strings "nan", "inf" and "-inf".
Reading builds values and calls constructors of the type that was asked for; it never runs code that the data names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from runner_api import errors
from runner_api.errors import ConfigError, RunnerError, UnknownNameError, safely
from runner_api.wire_types import codec_of
from runner_api.wire_values import Fault, read_full, write_full

ERRORS: dict[str, type[RunnerError]] = {
    name: found for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, RunnerError)
}


def to_json(value: Any, hint: Any = None) -> Any:
    """The value as dicts, lists, strings, numbers, bools and None, ready for json.dumps.

    hint: its type, such as `dict[str, KVCacheSpec]`; None: its own class. Raises ConfigError, with the path to the
    part, for what JSON cannot hold.
    """
    if isinstance(value, RunnerError):
        return error_to_json(value)
    kind: Any = type(value) if hint is None else hint
    return _at_the_edge(codec_of(kind).write, value, "written")


def from_json(cls: Any, data: Any) -> Any:
    """The value of type `cls` (a class, or a hint such as `dict[str, KVCacheSpec]`) from what `to_json` gave.

    Raises UnknownNameError for an unknown field or name, ConfigError for a missing field or a value of the wrong kind,
    both with the path; and whatever the constructors on the way raise for values out of range.
    """
    if isinstance(cls, type) and issubclass(cls, RunnerError):
        return error_from_json(data)
    return _at_the_edge(codec_of(cls).read, data, "read")


def error_to_json(error: BaseException) -> dict[str, Any]:
    """type, code and text; of a RunnerError also what, field, req_id, got, expected and hint: text, whatever a runner
    put there."""
    plain: dict[str, Any] = {"type": type(error).__name__, "text": safely(str, error)}
    if not isinstance(error, RunnerError):
        return plain
    # The nearest class that the other side knows.
    plain["type"] = next(c.__name__ for c in type(error).__mro__ if ERRORS.get(c.__name__) is c)
    told = {name: getattr(error, name, None) for name in ("code", "what", "field", "req_id", "got", "expected", "hint")}
    return plain | {k: v if isinstance(v, str) else safely(repr, v) for k, v in told.items() if v is not None}


def error_from_json(data: Any) -> RunnerError:
    """The error with its class, code, text and whatever else was told; a plain RunnerError where the type is no class
    of `runner_api.errors`. `got` and `expected` are text."""
    if not isinstance(data, Mapping) or not isinstance(data.get("text"), str):
        raise ConfigError("not an error", field="error", got=data, expected="an object with type, code and text")
    cls = ERRORS.get(str(data.get("type")), RunnerError)
    # Constructors put the text together from its parts; here it is complete.
    error = cls.__new__(cls, data["text"])
    error.args = (data["text"],)
    error.what = str(data.get("what", data["text"]))
    error.code = str(data.get("code", cls.default_code))
    for name in ("field", "req_id", "got", "expected", "hint"):
        setattr(error, name, data.get(name))
    return error


def array_to_json(array: np.ndarray) -> dict[str, Any]:
    """The form that tells dtype and shape. Raises ConfigError for a dtype that JSON cannot hold."""
    return _at_the_edge(write_full, array, "written")


def array_from_json(data: Any) -> np.ndarray:
    """What `array_to_json` gave. Raises ConfigError."""
    return _at_the_edge(read_full, data, "read")


def _at_the_edge(convert: Callable[[Any], Any], value: Any, done: str) -> Any:
    try:
        return convert(value)
    except Fault as fault:
        path = "".join(fault.path).lstrip(".") or "value"
        if fault.valid is not None:
            raise UnknownNameError(fault.what, str(fault.got), fault.valid, field=path) from None
        raise ConfigError(
            f"cannot be {done} as JSON: {fault.what}", field=path, got=fault.got, expected=fault.expected
        ) from None
