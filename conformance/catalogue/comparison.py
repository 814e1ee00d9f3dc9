"""Where what was seen is not what a scenario expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TOLERANCE = 1e-5  # of log probabilities in float32, relative to the value and absolute


@dataclass(frozen=True, slots=True)
class Difference:
    """where: the step and the field, e.g. "step 2 slot_mappings[A]"."""

    where: str
    got: Any
    expected: Any

    def line(self) -> str:
        return f"{self.where}: got {self.got}, expected {self.expected}"


def plain(value: Any) -> Any:
    """Arrays and tuples as lists, so that what is read from a file compares with what a runner gives."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return {k: plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def differs(where: str, got: Any, expected: Any) -> list[Difference]:
    """One fact, as plain values: nothing, or the difference. Numbers with a point are equal within rounding."""
    got, expected = plain(got), plain(expected)
    return [] if _same(got, expected) else [Difference(where, got, expected)]


def _same(got: Any, expected: Any) -> bool:
    """Equal; numbers that a scenario writes with a point are equal within rounding."""
    if isinstance(expected, float) and isinstance(got, (int, float)):
        return bool(np.isclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True))
    if isinstance(expected, list) and isinstance(got, list):
        return len(got) == len(expected) and all(map(_same, got, expected))
    return type(got) is type(expected) and bool(got == expected)


def differ_between(
    where: str, draws: Mapping[str, Sequence[Any]], alike: Sequence[Sequence[str]], differ: Sequence[Sequence[str]],
    varied: Sequence[str],
) -> list[Difference]:  # fmt: skip
    """Requests against each other: groups that must be alike, or differ, and requests that must vary in themselves."""
    found = []
    for names in alike:
        for name in names[1:]:
            found += differs(f"{where} of {name}, as of {names[0]}", draws[name], draws[names[0]])
    for names in differ:
        rows = [plain(draws[name]) for name in names]
        if all(row == rows[0] for row in rows):
            found.append(Difference(f"{where} of {', '.join(names)}", rows[0], "not all the same"))
    for name in varied:
        row = plain(draws[name])
        if all(x == row[0] for x in row):
            found.append(Difference(f"{where} of {name}", row, "not the same all the time"))
    return found
