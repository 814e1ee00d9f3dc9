"""Where in a record, or in an output, a mismatch can be read: the cell that a report marks and a snippet asks for.

Laws count in their own way: by request, by logits row, or over several fields at once. Here each mismatch becomes one
Python expression over `record` (the step's StepRecord) and `output`, with the value it should have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conformance.comparison import COMPARABLE_FIELDS, compare_field
from conformance.context import Mismatch
from conformance.divergence import STAGE_ORDER, Failure
from runner_api import ModelRunnerOutput, StepRecord

# Laws that count requests where the field counts tokens.
_BY_REQUEST = frozenset({"MR-STATE-009", "MR-POST-001", "MR-DENSE-009", "MR-DENSE-013", "MR-DENSE-017"})


@dataclass(frozen=True, slots=True)
class Cell:
    """`expression` gives `expected` on a right runner and `got` on the one that was judged.

    field, index: of the record, for whoever marks it; index is () where the whole field is meant.
    tolerance: of numbers that are rounded; 0 for all others. twice: `output` is what the handle gives when it is asked
    a second time. earlier: the expression reads `earlier`, the record of the step before, which this step has changed.
    """

    expression: str
    got: Any
    expected: Any
    field: str
    index: tuple[int, ...] = ()
    req_id: str | None = None
    tolerance: float = 0.0
    twice: bool = False
    earlier: bool = False

    def __str__(self) -> str:
        owner = "" if self.req_id is None else f" of request {self.req_id!r}"
        return f"{self.expression}{owner}: got {self.got!r}, expected {self.expected!r}"


def cell_of(failure: Failure) -> Cell | None:
    """The cell that shows a failure; None for an exception, and for what can be read off neither record nor output."""
    m = failure.mismatch
    if m is None:
        return None
    if m.clause_id == "MR-ASYNC-005":
        return _earlier(m)
    unreadable: Cell | None = None
    for cell in _cells(m, failure):
        owned = replace(cell, req_id=cell.req_id or m.req_id)
        try:
            read = _read(cell.expression, failure.record, failure.output)
            differs = _differs(read, cell.expected, cell.tolerance)
        except Exception as e:  # whoever asks meets the same error
            unreadable = unreadable or replace(owned, got=f"nothing to read ({type(e).__name__}: {e})")
            continue
        if differs:
            return replace(owned, got=read)
    return unreadable


def holds(
    cell: Cell, record: StepRecord | None, output: ModelRunnerOutput | None, earlier: StepRecord | None = None
) -> bool:
    """Whether the cell of this record and output is as expected. earlier: the record of the step before. Raises what
    reading the cell raises."""
    return not _differs(_read(cell.expression, record, output, earlier), cell.expected, cell.tolerance)


def _earlier(m: Mismatch) -> Cell:
    """An element of the record of the step before."""
    owner = "" if m.field != "kv" else f"[{m.req_id!r}]"
    expression = f"earlier.{m.field}{owner}{_brackets(m.field, m.index)}"
    return Cell(expression, m.got, m.expected, m.field, m.index, m.req_id, earlier=True)


def _cells(m: Mismatch, failure: Failure) -> list[Cell]:
    """Expressions that may show a mismatch, best first; `got` is filled in by whoever evaluates them."""
    record, reference = failure.record, failure.reference
    if m.clause_id.startswith(("MR-OUT-", "MR-ASYNC-")) or m.field == "prompt_logprobs" or record is None:
        return _output_cells(m)
    found = [c for c in (_direct(m, record, reference),) if c is not None]
    if reference is not None:
        found += _by_comparison(m.field, record, reference)
        for name in STAGE_ORDER:
            if name != m.field:
                found += _by_comparison(name, record, reference)
    return found


def _direct(m: Mismatch, record: StepRecord, reference: StepRecord | None) -> Cell | None:
    """The law's own element, if the index can be read as one of the field."""
    if m.clause_id == "MR-BATCH-005":
        return _shape(m)
    if m.field == "kv":
        return _kv(m)
    if m.field == "block_tables" and len(m.index) == 2:  # lengths
        g, i = m.index
        if m.clause_id == "MR-PAD-003":  # at least so many
            return Cell(f"len(record.block_tables[{g}][{i}]) >= {m.expected}", None, True, m.field, m.index)
        return Cell(f"len(record.block_tables[{g}][{i}])", None, m.expected, m.field, m.index)
    if m.field == "logprobs" and len(m.index) == 2:
        return _logprob(m)
    index = _index(m, record)
    if index is None:
        return None
    expected = m.expected
    if m.field == "token_ids" and reference is not None and record.req_ids == reference.req_ids:
        expected = _element(reference.token_ids, index)  # laws of sampling may know a bound alone
    if m.field == "idx_mapping" and m.req_id in record.req_ids:
        # by name, because the batch order of dense rows goes with the rows
        owned = f"record.idx_mapping[record.row_of({m.req_id!r})]"
        if reference is not None and m.req_id in reference.req_ids:
            expected = int(reference.idx_mapping[reference.row_of(m.req_id)])
        return Cell(owned, None, expected, m.field, index, m.req_id)
    if not isinstance(expected, (int, float, np.integer, np.floating)) or isinstance(expected, bool):
        return None
    return Cell(f"record.{m.field}{_brackets(m.field, index)}", None, expected, m.field, index)


def _index(m: Mismatch, record: StepRecord) -> tuple[int, ...] | None:
    """The index that the record's own field has, or None if there is none."""
    if m.field not in COMPARABLE_FIELDS or m.field == "req_ids":
        return None
    index = m.index
    if m.clause_id == "MR-DENSE-006":  # regions, not rows
        return None
    if m.clause_id in _BY_REQUEST and m.field == "positions" and index:
        index = (int(record.query_start_loc[index[0]]),)
    elif m.field == "draft_token_ids":
        index = index[::-1]
    elif m.field == "token_ids" and len(index) == 1:
        i = int(np.searchsorted(record.cu_num_logits[1:], index[0], side="right"))
        index = (i, index[0] - int(record.cu_num_logits[i]))
    value = getattr(record, m.field)
    if m.field == "block_tables":
        return index if len(index) == 3 else None
    return index if len(index) == np.ndim(value) else None


def _by_comparison(name: str, record: StepRecord, reference: StepRecord) -> list[Cell]:
    """The first element of a field in which the record is not the oracle's."""
    if name not in COMPARABLE_FIELDS or getattr(reference, name) is None or getattr(record, name) is None:
        return []
    if name == "token_ids" and record.req_ids != reference.req_ids:
        return []
    try:
        first = compare_field(name, reference, record).first
    except Exception:  # a field of another kind
        return []
    if first is None:
        return []
    if first.expected is None or first.got is None or name in ("req_ids", "logits"):
        return [_whole(name, reference)]
    return [Cell(f"record.{name}{_brackets(name, first.index)}", None, first.expected, name, first.index, first.req_id)]


def _whole(name: str, reference: StepRecord) -> Cell:
    value = getattr(reference, name)
    if isinstance(value, np.ndarray):
        return Cell(f"record.{name}.tolist()", None, value.tolist(), name)
    if name == "block_tables":
        rows = [[row.tolist() for row in table] for table in value]
        return Cell(f"[[row.tolist() for row in table] for table in record.{name}]", None, rows, name)
    return Cell(f"record.{name}", None, value, name)


def _shape(m: Mismatch) -> Cell | None:
    if m.field == "block_tables":
        if isinstance(m.expected, list):
            return Cell("[len(table) for table in record.block_tables]", None, m.expected, m.field)
        if len(m.index) == 2:
            g, i = m.index
            return Cell(f"str(record.block_tables[{g}][{i}].dtype)", None, m.expected, m.field, m.index)
        return None
    if m.field == "kv" and m.req_id is not None:  # the request's own part is not there
        return Cell(f"{m.req_id!r} in record.kv", None, True, m.field)
    kind = {"req_ids": "tuple", "kv": "dict", "descriptor": "BatchDescriptor", "logits": "ndarray"}.get(m.field)
    if kind is not None:
        return Cell(f"type(record.{m.field}).__name__", None, kind, m.field)
    return Cell(f'f"{{record.{m.field}.dtype}}{{list(record.{m.field}.shape)}}"', None, m.expected, m.field)


def _kv(m: Mismatch) -> Cell:
    if not m.index:
        return Cell(f"record.kv[{m.req_id!r}].shape", None, tuple(m.expected), m.field)
    g, p = m.index
    return Cell(f"record.kv[{m.req_id!r}][{g}, {p}].tolist()", None, list(m.expected), m.field, m.index)


def _logprob(m: Mismatch) -> Cell:
    j, at = m.index
    if m.got is None:
        return Cell(f"record.logprobs.shape[1] > {at}", None, True, m.field, m.index)
    expression = f"[int(record.logprob_token_ids[{j}, {at}]), round(float(record.logprobs[{j}, {at}]), 5)]"
    return Cell(expression, None, list(m.expected), m.field, m.index, tolerance=1e-3)


def _output_cells(m: Mismatch) -> list[Cell]:
    """What only the output says."""
    if m.clause_id == "MR-ASYNC-001":
        return [Cell("output.tokens()", None, m.expected, m.field, twice=True)]
    if m.field == "req_ids" and isinstance(m.expected, tuple):
        expected = m.expected[0] if m.clause_id == "MR-OUT-003" else m.expected
        return [Cell("tuple(output.req_ids)", None, expected, m.field)]
    if m.field == "sampled_token_ids" and m.req_id is not None:
        row = f"output.tokens()[{m.req_id!r}]"
        kinds = f"isinstance({row}, (tuple, list)) and all(isinstance(t, (int, np.integer)) for t in {row})"
        return [
            Cell(f"tuple({row})", None, tuple(m.expected), m.field, m.index),
            Cell(kinds, None, True, m.field, m.index),
        ]
    if m.field == "errors":
        return [Cell("dict(output.errors)", None, m.expected, m.field)]
    if m.field == "prompt_logprobs" and m.req_id is not None:
        lists = f"output.prompt_logprobs[{m.req_id!r}]"
        if not m.index:
            return [Cell(f"{lists}.token_ids.shape", None, tuple(m.expected), m.field)]
        t = m.index[0]
        told = f"({lists}.token_ids[{t}].tolist(), int({lists}.ranks[{t}]))"
        return [Cell(told, None, tuple(m.expected), m.field, m.index)]
    if m.field == "prompt_logprobs":
        return [Cell("sorted(output.prompt_logprobs)", None, list(m.expected), m.field)]
    return []


def _brackets(name: str, index: tuple[int, ...]) -> str:
    if not index:
        return ""
    if name == "block_tables":
        return "".join(f"[{i}]" for i in index)
    return f"[{', '.join(map(str, index))}]"


def _element(array: np.ndarray, index: tuple[int, ...]) -> Any:
    inside = len(index) == array.ndim and all(i < n for i, n in zip(index, array.shape, strict=True))
    return array[index].item() if inside else None


def _read(
    expression: str, record: StepRecord | None, output: ModelRunnerOutput | None, earlier: StepRecord | None = None
) -> Any:
    """The value of a cell's expression, which is our own text, written above. Raises what reading it raises."""
    value = eval(expression, {"np": np, "record": record, "output": output, "earlier": earlier})
    return value.item() if isinstance(value, np.generic) else value


def _differs(got: Any, expected: Any, tolerance: float) -> bool:
    if not tolerance:
        return bool(got != expected)
    return any(abs(a - b) > tolerance * (1 + abs(b)) for a, b in zip(got, expected, strict=True))
