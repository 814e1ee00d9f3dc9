"""Checks of single values, shared by every configuration at the edges of this package.

Each refuses with one `ConfigError` that names the field; those that may normalise give the plain value back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from runner_api.errors import ConfigError, UnknownNameError


def is_integer(value: Any) -> bool:
    """Python and NumPy integers; not bools, not floats that happen to be whole."""
    return type(value) is int or (isinstance(value, (int, np.integer)) and not isinstance(value, bool))


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """The value as a Python int. Raises ConfigError for what is no integer (bools are none) or out of range."""
    if not is_integer(value) or value < least or (most is not None and value > most):
        expected = f"an integer >= {least}" if most is None else f"an integer in [{least}, {most}]"
        raise ConfigError("out of range", field=name, got=value, expected=expected)
    return int(value)


def check_bool(name: str, value: Any) -> None:
    """Raises ConfigError for what is neither True nor False."""
    if not isinstance(value, bool):
        raise ConfigError("a switch is on or off", field=name, got=value, expected="True or False")


def check_name(name: str, value: Any, valid: tuple[str, ...]) -> None:
    """Raises UnknownNameError, with the nearest valid names, for what is not one of them."""
    if not isinstance(value, str) or value not in valid:
        raise UnknownNameError(name, value, valid, field=name)


def check_names(name: str, values: Any, valid: tuple[str, ...]) -> frozenset[str]:
    """The names as a set. A single string is refused: its letters would be read as names."""
    if not isinstance(values, (frozenset, set, list, tuple)):
        raise ConfigError("a set of names is needed", field=name, got=values, expected=f"any of {', '.join(valid)}")
    for value in values:
        if not isinstance(value, str) or value not in valid:
            raise UnknownNameError(f"{name} part", value, valid, field=name)
    return frozenset(values)


def check_sequence(name: str, value: Any) -> tuple[Any, ...]:
    """The value as a tuple. Raises ConfigError for what is neither list nor tuple."""
    if not isinstance(value, (list, tuple)):
        raise ConfigError("several values are needed", field=name, got=value, expected="a tuple of integers, or None")
    return tuple(value)


def check_options(kind: str, values: Any, names: set[str]) -> dict[str, Any]:
    """The options as a dict. Raises ConfigError for what is no mapping, UnknownNameError for an unknown key."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{kind}s come as a mapping", field="options", got=values, expected="a dict of name to value")
    for key in values:
        if key not in names:
            raise UnknownNameError(kind, key, names)
    return dict(values)
