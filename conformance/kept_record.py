"""A record of a step that is over, and what it has become since."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.comparison import COMPARABLE_FIELDS, compare_arrays
from conformance.context import MOST_MISMATCHES, Mismatch
from runner_api import StepRecord

_FIELDS = (*sorted(COMPARABLE_FIELDS), "kv")


@dataclass(frozen=True, slots=True)
class KeptRecord:
    """`record` as the runner gave it, and copies of its fields from then."""

    record: StepRecord
    values: dict[str, Any]

    @classmethod
    def of(cls, record: StepRecord | None) -> KeptRecord | None:
        """None where there is no record, or none that can be read: other clauses speak of that."""
        if record is None:
            return None
        try:
            return cls(record, {name: copy.deepcopy(getattr(record, name)) for name in _FIELDS})
        except Exception:  # foreign code may run where a record is read
            return None

    def changes(self, clause_id: str) -> list[Mismatch]:
        """The first element of each field that is not what it was; raises what reading the record raises."""
        found = []
        for name in _FIELDS:
            now = _parts(getattr(self.record, name))
            for place, before in _parts(self.values[name]).items():
                index = compare_arrays(before, now.get(place))[2]
                if index is not None:
                    req_id = next((p for p in place if isinstance(p, str)), None)
                    where = (*(p for p in place if isinstance(p, int)), *index)
                    got, expected = _element(now.get(place), index), _element(before, index)
                    found.append(Mismatch(clause_id, name, req_id, where, got, expected))
                    break
        return found[:MOST_MISMATCHES]


def _parts(value: Any) -> dict[tuple[Any, ...], np.ndarray]:
    """The arrays of a field by where they stand in it: () for one that is an array or a number itself."""
    return {place: np.asarray(part) for place, part in _walk(value, ())}


def _walk(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _walk(part, (*place, key))
    elif isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            yield from _walk(part, (*place, i))
    else:
        yield place, value


def _element(array: np.ndarray | None, index: tuple[int, ...]) -> Any:
    """As a Python value; None where the array has no such element."""
    if array is None or len(index) != array.ndim or any(i >= n for i, n in zip(index, array.shape, strict=True)):
        return None
    return array[index].item()
