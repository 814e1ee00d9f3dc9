"""Is a StepRecord what its type says? Kinds, dtypes and dimensions of every field; values are not looked at.

Whoever reads a record that a stranger wrote asks here first: a trace file, or a judge handed one by the runner under
test.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from runner_api.config import BatchDescriptor
from runner_api.errors import PlanError, TraceError
from runner_api.plan_types import check_types
from runner_api.record import StepRecord

# dtype and number of dimensions of each integer array, as StepRecord documents them. `positions` may have two.
INTEGER_ARRAYS: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
    "idx_mapping": (np.int64, (1,)),
    "query_start_loc": (np.int32, (1,)),
    "seq_lens": (np.int32, (1,)),
    "input_ids": (np.int32, (1,)),
    "positions": (np.int64, (1, 2)),
    "logits_indices": (np.int64, (1,)),
    "cu_num_logits": (np.int32, (1,)),
    "expanded_idx_mapping": (np.int64, (1,)),
    "expanded_local_pos": (np.int32, (1,)),
    "slot_mappings": (np.int64, (2,)),
    "seeds": (np.int64, (1,)),
    "token_ids": (np.int64, (2,)),
    "num_sampled": (np.int32, (1,)),
    "num_rejected": (np.int32, (1,)),
    "faults": (np.int32, (1,)),
    "draft_token_ids": (np.int64, (2,)),
    "forced_token_ids": (np.int64, (2,)),
    "logprob_token_ids": (np.int32, (2,)),
    "ranks": (np.int64, (1,)),
}
FLOAT_ARRAYS: dict[str, int] = {"logits": 2, "logprobs": 2}
# May be None: not every step has them, and a recording of another program may lack them.
OPTIONAL = frozenset(
    {
        "draft_token_ids", "forced_token_ids", "logprob_token_ids", "ranks", "logits", "logprobs", "num_rejected",
        "expanded_idx_mapping", "expanded_local_pos",
    }
)  # fmt: skip
_SIZES = ("num_reqs", "num_reqs_padded", "num_tokens", "num_tokens_padded")


def field_fault(record: StepRecord, name: str) -> str | None:
    """What is wrong with one field's kind or dimensions ("float64[3], expected integers"); None if nothing is."""
    value = getattr(record, name)
    if name in INTEGER_ARRAYS:
        dims = INTEGER_ARRAYS[name][1]
        ok = isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.ndim in dims
        return None if ok else f"{_kind(value)}, expected integers of {' or '.join(map(str, dims))} dimensions"
    if name in FLOAT_ARRAYS:
        ok = isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.ndim == FLOAT_ARRAYS[name]
        return None if ok else f"{_kind(value)}, expected floats of {FLOAT_ARRAYS[name]} dimensions"
    if name == "req_ids":
        ok = isinstance(value, tuple) and all(isinstance(r, str) for r in value)
        return None if ok else f"{_kind(value)}, expected a tuple of strings"
    if name == "block_tables":
        return None if _is_tables(value) else f"{_kind(value)}, expected tuples of integer rows by group"
    if name in _SIZES:
        return None if is_integer(value) else f"{_kind(value)}, expected an integer"
    if name == "descriptor":
        ok = value is None or isinstance(value, BatchDescriptor)
        return None if ok else f"{_kind(value)}, expected a BatchDescriptor or None"
    if name in ("kv", "intermediates"):
        ok = isinstance(value, dict) and all(isinstance(v, np.ndarray) for v in value.values())
        return None if ok else f"{_kind(value)}, expected arrays by name"
    return None


def readable(record: Any) -> tuple[StepRecord | None, dict[str, str]]:
    """A record in which every field that cannot be read is None (an empty dict for kv and intermediates).

    The second value tells what was wrong, by field. None alone for what is no record at all.
    """
    if not isinstance(record, StepRecord):
        return None, {"record": f"{_kind(record)}, expected a StepRecord"}
    faults: dict[str, str] = {}
    blank: dict[str, Any] = {}
    for f in dataclasses.fields(record):
        fault = field_fault(record, f.name)
        if fault is None or (getattr(record, f.name) is None and f.name in OPTIONAL):
            continue
        faults[f.name] = fault
        blank[f.name] = {} if f.name in ("kv", "intermediates") else None
    return (dataclasses.replace(record, **blank) if blank else record), faults


def check_own_record(record: Any, where: str) -> None:
    """Raise TraceError unless `record` is a StepRecord whose fields are all of their kinds. where: for the error."""
    faults = dict(readable(record)[1])
    if not faults:
        try:
            check_types(record.plan)
        except PlanError as e:
            faults["plan"] = str(e)
        for name, kind in (("extra", dict), ("runner", str), ("schema_version", int)):
            if type(getattr(record, name)) is not kind:
                faults[name] = f"{_kind(getattr(record, name))}, expected {kind.__name__}"
    if faults:
        name, fault = next(iter(faults.items()))
        raise TraceError(f"broken record: {name} is {fault}", field=where)


def is_integer(value: Any) -> bool:
    """Of Python or of NumPy; a bool is none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_tables(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(group, tuple)
        and all(isinstance(row, np.ndarray) and row.dtype.kind in "iu" and row.ndim == 1 for row in group)
        for group in value
    )


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return "nothing" if value is None else type(value).__name__
