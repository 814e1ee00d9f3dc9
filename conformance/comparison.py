"""One field of two StepRecords, element by element: how many agree, how many do not, and where the first one lies.

Lockstep holds a candidate's records against the oracle's with it, replay holds them against recorded steps. It knows
the shapes of records and nothing of runners; floats are compared as numbers here (NaN equals NaN), and whoever allows
them a bound does so on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from runner_api.errors import UnknownNameError
from runner_api.record import StepRecord

# What the first axis of a field counts (of slot_mappings the second, of block_tables the second of three).
TOKEN_FIELDS = frozenset({"input_ids", "positions", "slot_mappings"})
LOGITS_FIELDS = frozenset({"logits_indices", "expanded_idx_mapping", "expanded_local_pos", "logits"})
REQUEST_FIELDS = frozenset(
    {
        "req_ids", "idx_mapping", "seq_lens", "block_tables", "seeds", "draft_token_ids", "token_ids", "num_sampled",
        "num_rejected", "faults", "forced_token_ids", "logprob_token_ids", "logprobs", "ranks",
    }
)  # fmt: skip
# Boundaries: entry i + 1 is where request i ends.
BOUNDARY_FIELDS = frozenset({"query_start_loc", "cu_num_logits"})
SIZE_FIELDS = frozenset({"num_reqs", "num_reqs_padded", "num_tokens", "num_tokens_padded"})
COMPARABLE_FIELDS = TOKEN_FIELDS | LOGITS_FIELDS | REQUEST_FIELDS | BOUNDARY_FIELDS | SIZE_FIELDS


@dataclass(frozen=True, slots=True)
class Difference:
    """One element that differs. `expected` or `got` is None where that side has no such element.

    req_id, position: whose element it is and at which place of its sequence, where the index tells.
    """

    field: str
    index: tuple[int, ...]
    req_id: str | None
    position: int | None
    expected: Any
    got: Any

    def __str__(self) -> str:
        where = f"{self.field}{list(self.index)}" if self.index else self.field
        owner = "" if self.req_id is None else f", request {self.req_id!r}"
        place = "" if self.position is None else f", position {self.position}"
        return f"{where}{owner}{place}: expected {_say(self.expected)}, got {_say(self.got)}"


@dataclass(frozen=True, slots=True)
class FieldComparison:
    """Counts of one field in one step; `first` is the first element that differs, in index order."""

    name: str
    equal: int
    different: int
    first: Difference | None = None


def compare_field(name: str, expected: StepRecord, got: StepRecord) -> FieldComparison:
    """Compare one field of two records of the same step.

    Elements that only one side has count as different. `block_tables` is compared per [group][request] on the rows
    and columns that `expected` holds, because a runner may already own blocks for tokens to come, and rows of padding
    as far as both tables are wide; a group that only one side has counts as different. A field that `expected` lacks
    (None) has nothing to compare; one that `got` lacks is different in every element. Raises `UnknownNameError` for a
    field without a comparison.
    """
    if name not in COMPARABLE_FIELDS:
        raise UnknownNameError("field to compare", name, COMPARABLE_FIELDS, field="name")
    left, right = getattr(expected, name), getattr(got, name)
    if left is None:
        return FieldComparison(name, 0, 0)
    if name == "block_tables":
        equal, different, index = _compare_block_tables(left, right or (), expected.num_reqs)
    else:
        equal, different, index = compare_arrays(_array(left), None if right is None else _array(right))
    if index is None:
        return FieldComparison(name, equal, different)
    req_id, position = owner_of(name, index, expected)
    first = Difference(name, index, req_id, position, _element(left, index), _element(right, index))
    return FieldComparison(name, equal, different, first)


def compare_arrays(expected: np.ndarray, got: np.ndarray | None) -> tuple[int, int, tuple[int, ...] | None]:
    """(equal, different, index of the first difference or None) of two arrays, aligned at index 0 of every axis.

    >>> compare_arrays(np.array([1, 2, 3]), np.array([1, 9]))
    (1, 2, (1,))
    """
    # 1 the common case costs one pass
    if got is not None and np.array_equal(expected, got):
        return expected.size, 0, None
    # 2 nothing can be aligned
    if got is None or expected.ndim != got.ndim:
        extra = 0 if got is None else got.size
        return 0, expected.size + extra, (0,) * expected.ndim if expected.size + extra else None
    # 3 the part that both have
    shared = tuple(slice(min(a, b)) for a, b in zip(expected.shape, got.shape, strict=True))
    same = _same(expected[shared], got[shared])
    equal = int(same.sum())
    different = expected.size + got.size - same.size - equal
    # 4 in index order of the smallest box around both, an element is fine only where both have it and it agrees
    box = np.zeros(tuple(max(a, b) for a, b in zip(expected.shape, got.shape, strict=True)), bool)
    for array in (expected, got):
        box[tuple(slice(n) for n in array.shape)] = True
    box[shared] &= ~same
    wrong = np.argwhere(box)
    return equal, different, tuple(int(i) for i in wrong[0]) if len(wrong) else None


def owner_of(name: str, index: tuple[int, ...], record: StepRecord) -> tuple[str | None, int | None]:
    """Whose element this is, and its place in that sequence: (req_id, position), None where the index does not say."""
    req: int | None = None
    token: int | None = None
    if name in TOKEN_FIELDS and index:
        token = index[-1]
        if token < record.num_tokens and len(record.query_start_loc) > 1:
            req = int(np.searchsorted(record.query_start_loc[1:], token, side="right"))
        else:
            token = None  # padding belongs to nobody
    elif name in LOGITS_FIELDS and index and index[0] < len(record.logits_indices):
        req = int(np.searchsorted(record.cu_num_logits[1:], index[0], side="right"))
        token = int(record.logits_indices[index[0]])
    elif name in REQUEST_FIELDS and index:
        req = index[1] if name == "block_tables" and len(index) > 1 else index[0]
    elif name in BOUNDARY_FIELDS and index:
        req = max(index[0] - 1, 0)
    req_id = record.req_ids[req] if req is not None and req < len(record.req_ids) else None
    at = record.positions
    known = token is not None and at.ndim == 1 and 0 <= token < len(at)
    return req_id, int(at[token]) if known else None


def _compare_block_tables(expected: Any, got: Any, num_reqs: int) -> tuple[int, int, tuple[int, ...] | None]:
    equal = different = 0
    first: tuple[int, ...] | None = None
    for g in range(max(len(expected), len(got))):
        theirs = expected[g] if g < len(expected) else ()
        ours = got[g] if g < len(got) else ()
        for i, row in enumerate(theirs if g < len(expected) else ours):
            if i < len(theirs) and i < len(ours):
                wide = len(row) if i < num_reqs else min(len(row), len(ours[i]))
                e, d, at = compare_arrays(row[:wide], ours[i][:wide])
            else:
                e, d, at = compare_arrays(row, None)
            equal, different = equal + e, different + d
            if first is None and at is not None:
                first = (g, i, *at)
    return equal, different, first


def _array(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    return np.array(value, object) if isinstance(value, tuple) else np.asarray(value)


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    same = np.asarray(a == b, bool)
    if a.dtype.kind == "f" and b.dtype.kind == "f":
        same |= np.isnan(a) & np.isnan(b)
    return same


def _element(value: Any, index: tuple[int, ...]) -> Any:
    """The element as a Python value, or None where this side has none."""
    if value is None:
        return None
    if isinstance(value, tuple):
        if not index:
            return None
        if index[0] >= len(value):
            return None
        return _element(value[index[0]], index[1:])
    if not isinstance(value, np.ndarray):
        return value if not index else None
    if len(index) != value.ndim or any(i >= n for i, n in zip(index, value.shape, strict=True)):
        return None
    return value[index].item() if isinstance(value[index], np.generic) else value[index]


def _say(value: Any) -> str:
    return "nothing" if value is None else repr(value)
