"""Files of StepRecords: our own traces, and recordings of vLLM, which are read as they are.

Both are JSON lines: a header, one line a step, a footer. A trace of ours stores arrays as `{"dtype", "shape",
"data"}`; a recording of vLLM uses plain lists (its README gives the fields). Reading never runs code from the file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runner_api.config import BatchDescriptor, CUDAGraphMode
from runner_api.constants import SCHEMA_VERSION, VLLM_RECORDING_FORMAT
from runner_api.errors import RunnerError, TraceError
from runner_api.plan import CachedRequestData, NewRequestData, SchedulerOutput
from runner_api.record import StepRecord
from runner_api.record_check import check_own_record
from runner_api.sampling_params import SamplingParams
from runner_api.structured_outputs import StructuredOutputsParams
from runner_api.trace_vllm import RECORDED_LAYOUTS, check_meta, check_outputs, step_from_vllm
from runner_api.trace_vllm_dense import DenseHistory


@dataclass(frozen=True, slots=True)
class Trace:
    """The steps of one run. `meta` holds what the header said, `outputs` the tokens by request at the end."""

    name: str
    meta: Mapping[str, Any]
    steps: tuple[StepRecord, ...]
    outputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_vllm_recording(self) -> bool:
        return "recording_format" in self.meta


# -- our own format -------------------------------------------------------------------------------------------


def save_trace(path: str | Path, steps: Iterable[StepRecord], meta: Mapping[str, Any] | None = None) -> None:
    """Write a trace; `load_trace` reads back equal records. A file without its footer is refused when read.

    Raises TraceError for what is no StepRecord, for values that JSON has no form for, and for a file that cannot be
    written.
    """
    count = 0
    try:
        with open(path, "w", encoding="utf-8") as f:
            f.write(json.dumps({"trace": {"schema_version": SCHEMA_VERSION, **(meta or {})}}) + "\n")
            for record in steps:
                check_own_record(record, f"step {count}")
                f.write(json.dumps(_encode(record)) + "\n")
                count += 1
            f.write(json.dumps({"end": {"steps": count}}) + "\n")
    except OSError as e:
        raise TraceError(f"cannot be written: {e}", field=str(path)) from e
    except (TypeError, ValueError) as e:
        raise TraceError(f"cannot be told in JSON: {e}", field=f"{path}: step {count}") from e


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"$": type(value).__name__} | {
            f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)
        }
    if isinstance(value, np.ndarray):
        return {"$": "array", "dtype": value.dtype.name, "shape": list(value.shape), "data": value.ravel().tolist()}
    if isinstance(value, (frozenset, set)):
        return {"$": "set", "items": sorted(value)}
    if isinstance(value, tuple):
        return {"$": "tuple", "items": [_encode(v) for v in value]}
    if isinstance(value, list):
        return [_encode(v) for v in value]
    if isinstance(value, Mapping):
        return {"$": "map", "items": [[k, _encode(v)] for k, v in value.items()]}
    if isinstance(value, CUDAGraphMode):
        return value.name
    if isinstance(value, np.generic):
        return value.item()
    return value


_TYPES: dict[str, Any] = {
    c.__name__: c
    for c in (
        StepRecord, SchedulerOutput, NewRequestData, CachedRequestData, SamplingParams, StructuredOutputsParams,
        BatchDescriptor,
    )
}  # fmt: skip


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind == "array":
        return np.array(value["data"], dtype=np.dtype(value["dtype"])).reshape(value["shape"])
    if kind == "set":
        return frozenset(value["items"])
    if kind == "tuple":
        return tuple(_decode(v) for v in value["items"])
    if kind == "map":
        return {k if not isinstance(k, list) else tuple(k): _decode(v) for k, v in value["items"]}
    cls = _TYPES[str(kind)]
    fields = {k: _decode(v) for k, v in value.items() if k != "$"}
    missing = [f.name for f in dataclasses.fields(cls) if f.name not in fields]
    if missing:
        raise TypeError(f"{kind} without {', '.join(missing)}")
    if cls is BatchDescriptor:
        fields["cg_mode"] = CUDAGraphMode[fields["cg_mode"]]
    return cls(**fields)


# -- reading either -------------------------------------------------------------------------------------------


def load_trace(path: str | Path) -> Trace:
    """Read a trace of ours or a recording of vLLM.

    Raises TraceError naming the file, the line and the field: a missing file, a broken or missing line, a field that
    is absent, or a version that this program does not read.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise TraceError(f"cannot be read: {e}", field=str(path)) from e
    if not lines:
        raise TraceError("is empty", field=str(path))
    header = _parse(path, 1, lines[0])
    if "meta" in header:
        return _load_vllm(path, header["meta"], lines)
    if "trace" in header:
        return _load_own(path, header["trace"], lines)
    raise TraceError("is no trace", field=f"{path}:1", got=sorted(header), expected="a key 'meta' or 'trace'")


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as e:
        raise TraceError(f"line is not JSON: {e}", field=f"{path}:{number}") from e
    if not isinstance(value, dict):
        raise TraceError("line is not an object", field=f"{path}:{number}", got=type(value).__name__)
    return value


def _load_own(path: Path, meta: Any, lines: list[str]) -> Trace:
    version = meta.get("schema_version") if isinstance(meta, dict) else None
    if version != SCHEMA_VERSION:
        raise TraceError("schema version", field=f"{path}:1", got=version, expected=SCHEMA_VERSION)
    end = _parse(path, len(lines), lines[-1])
    if end.get("end") != {"steps": len(lines) - 2}:
        raise TraceError(
            "is cut short", field=f"{path}:{len(lines)}", got=str(end)[:60], expected={"end": {"steps": len(lines) - 2}}
        )
    steps = []
    for number, line in enumerate(lines[1:-1], 2):
        try:
            record = _decode(_parse(path, number, line))
            check_own_record(record, f"{path}:{number}")
        except TraceError:
            raise
        except Exception as e:
            raise TraceError(f"broken record: {type(e).__name__}: {e}", field=f"{path}:{number}") from e
        steps.append(record)
    return Trace(path.stem, meta, tuple(steps))


# -- recordings of vLLM ---------------------------------------------------------------------------------------


def _load_vllm(path: Path, meta: Any, lines: list[str]) -> Trace:
    if not isinstance(meta, dict) or meta.get("recording_format") != VLLM_RECORDING_FORMAT:
        got = meta.get("recording_format") if isinstance(meta, dict) else meta
        raise TraceError("recording format", field=f"{path}:1", got=got, expected=VLLM_RECORDING_FORMAT)
    check_meta(meta, f"{path}:1 meta")
    steps: list[StepRecord] = []
    dense = DenseHistory(meta["block_size"]) if RECORDED_LAYOUTS[meta["runner"]] == "dense" else None
    for number, line in enumerate(lines[1:], 2):
        value, where = _parse(path, number, line), f"{path}:{number}"
        if "outputs" in value:
            rest = next((n for n, text in enumerate(lines[number:], number + 1) if text.strip()), None)
            if rest is not None:
                raise TraceError("goes on behind its outputs", field=f"{path}:{rest}", expected="the end of the file")
            check_outputs(value["outputs"], steps, where)
            return Trace(path.stem, meta, tuple(steps), value["outputs"])
        try:
            if type(value["step"]) is not int or value["step"] != len(steps):
                raise TraceError("step number", field="step", got=value["step"], expected=len(steps))
            record = step_from_vllm(value, meta)
            steps.append(record if dense is None else dense.complete(record))
        except RunnerError as e:
            raise TraceError(f"broken step: {e}", field=where) from e
        except KeyError as e:
            raise TraceError(f"missing field {e.args[0]!r}", field=where) from e
        except (TypeError, ValueError, AttributeError, OverflowError) as e:
            raise TraceError(f"broken step: {type(e).__name__}: {e}", field=where) from e
    raise TraceError("is cut short", field=f"{path}:{len(lines)}", expected="a last line with 'outputs'")
