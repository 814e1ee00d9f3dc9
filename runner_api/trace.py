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
from runner_api.sampling_params import SamplingParams


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
    """Write a trace; `load_trace` reads back equal records. A file without its footer is refused when read."""
    count = 0
    with open(path, "w", encoding="utf-8") as f:
        f.write(json.dumps({"trace": {"schema_version": SCHEMA_VERSION, **(meta or {})}}) + "\n")
        for record in steps:
            f.write(json.dumps(_encode(record)) + "\n")
            count += 1
        f.write(json.dumps({"end": {"steps": count}}) + "\n")


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
    for c in (StepRecord, SchedulerOutput, NewRequestData, CachedRequestData, SamplingParams, BatchDescriptor)
}


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
            if not isinstance(record, StepRecord):
                raise TypeError(f"{type(record).__name__} is not a StepRecord")
        except RunnerError:
            raise
        except Exception as e:
            raise TraceError(f"broken record: {type(e).__name__}: {e}", field=f"{path}:{number}") from e
        steps.append(record)
    return Trace(path.stem, meta, tuple(steps))


# -- recordings of vLLM ---------------------------------------------------------------------------------------

_META_KEYS = ("source", "runner", "model", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
              "num_gpu_blocks_override")  # fmt: skip


def _load_vllm(path: Path, meta: Any, lines: list[str]) -> Trace:
    if not isinstance(meta, dict) or meta.get("recording_format") != VLLM_RECORDING_FORMAT:
        got = meta.get("recording_format") if isinstance(meta, dict) else meta
        raise TraceError("recording format", field=f"{path}:1", got=got, expected=VLLM_RECORDING_FORMAT)
    for key in _META_KEYS:
        if key not in meta:
            raise TraceError("missing field", field=f"{path}:1 meta.{key}")
    steps: list[StepRecord] = []
    outputs: Mapping[str, Any] | None = None
    for number, line in enumerate(lines[1:], 2):
        value = _parse(path, number, line)
        if "outputs" in value:
            outputs = value["outputs"]
            break
        try:
            steps.append(_step_from_vllm(value, meta))
        except RunnerError as e:
            raise TraceError(f"broken step: {e}", field=f"{path}:{number}") from e
        except KeyError as e:
            raise TraceError(f"missing field {e.args[0]!r}", field=f"{path}:{number}") from e
        except (TypeError, ValueError, AttributeError) as e:
            raise TraceError(f"broken step: {type(e).__name__}: {e}", field=f"{path}:{number}") from e
    if outputs is None:
        raise TraceError("is cut short", field=f"{path}:{len(lines)}", expected="a last line with 'outputs'")
    return Trace(path.stem, meta, tuple(steps), outputs)


def _params_from_vllm(values: Mapping[str, Any]) -> SamplingParams:
    """The engine already folded the end-of-sequence ids into `all_stop_token_ids`; everything else has our names."""
    kept = {k: v for k, v in values.items() if k not in ("all_stop_token_ids", "output_kind", "logprob_token_ids")}
    if kept.get("logit_bias"):
        kept["logit_bias"] = {int(k): v for k, v in kept["logit_bias"].items()}
    return SamplingParams.from_dict(kept)


def _plan_from_vllm(plan: Mapping[str, Any]) -> SchedulerOutput:
    new = []
    for r in plan["new"]:
        params = _params_from_vllm(r["sampling_params"])
        prefill = r["prefill_token_ids"] if r["prefill_token_ids"] is not None else r["prompt_token_ids"]
        new.append(
            NewRequestData(
                r["req_id"],
                r["prompt_token_ids"],
                prefill,
                r["num_computed_tokens"],
                tuple(list(b) for b in r["block_ids"]),
                params,
                seed=params.seed or 0,
            )
        )
    c = plan["cached"]
    cached = CachedRequestData(
        list(c["req_ids"]),
        list(c["num_computed_tokens"]),
        [None if b is None else tuple(list(x) for x in b) for b in c["new_block_ids"]],
        list(c["num_output_tokens"]),
        frozenset(c["resumed"]),
    )
    return SchedulerOutput(
        new, cached, dict(plan["num_scheduled_tokens"]), plan["total"], dict(plan["spec"]),
        frozenset(plan["finished"]), frozenset(plan["preempted"]),
    )  # fmt: skip


def _step_from_vllm(value: Mapping[str, Any], meta: Mapping[str, Any]) -> StepRecord:
    plan = _plan_from_vllm(value["plan"])
    runner = f"{meta['source']} {meta['runner']}"
    batch = value.get("batch")
    if batch is None:
        return StepRecord(plan, runner=runner)
    sampled = value["sampled"]
    dense = "slot_mapping" in batch
    mode = CUDAGraphMode[batch.get("cg_mode", "NONE")]
    num_reqs, num_tokens = len(batch["req_ids"]), len(batch["input_ids"])
    tokens_padded = batch.get("num_tokens_padded", num_tokens)
    reqs_padded = batch.get("num_reqs_padded", num_reqs)
    descriptor = BatchDescriptor(mode, tokens_padded, reqs_padded if mode is CUDAGraphMode.FULL else None)
    width = max((len(row) for row in sampled["token_ids"]), default=1)
    record = {
        "plan": plan,
        "num_reqs": num_reqs,
        "num_reqs_padded": reqs_padded,
        "num_tokens": num_tokens,
        "num_tokens_padded": tokens_padded,
        "descriptor": descriptor,
        "req_ids": tuple(batch["req_ids"]),
        "idx_mapping": np.array(batch["idx_mapping"] if not dense else range(num_reqs), np.int64),
        "query_start_loc": np.array(batch["query_start_loc"], np.int32),
        "seq_lens": np.array(batch["seq_lens"], np.int32),
        "input_ids": np.array(batch["input_ids"], np.int32),
        "positions": np.array(batch["positions"], np.int64),
        "logits_indices": np.array(batch["logits_indices"], np.int64),
        "slot_mappings": np.array([batch["slot_mapping"]] if dense else batch["slot_mappings"], np.int64),
        "token_ids": np.array(sampled["token_ids"], np.int64).reshape(num_reqs, width),
        "runner": runner,
    }
    if not dense:
        record["num_sampled"] = np.array(sampled["num_sampled"], np.int32)
        record["cu_num_logits"] = np.array(batch["cu_num_logits"], np.int32)
        record["block_tables"] = tuple(
            tuple(np.array(row, np.int32) for row in group) for group in batch["block_tables"]
        )
    for name, source, dtype in (
        ("expanded_idx_mapping", batch, np.int64),
        ("expanded_local_pos", batch, np.int32),
        ("num_rejected", sampled, np.int32),
        ("logprobs", sampled, np.float32),
        ("ranks", sampled, np.int64),
    ):
        if source.get(name) is not None:
            record[name] = np.array(source[name], dtype)
    if sampled.get("logprob_token_ids") is not None:
        record["logprob_token_ids"] = np.array(sampled["logprob_token_ids"], np.int64)
    if batch.get("draft_tokens_state") is not None:
        record["draft_token_ids"] = np.array(batch["draft_tokens_state"], np.int64)
    record["extra"] = {k: sampled[k] for k in ("top2_margin", "target_argmax") if k in sampled} | {
        "step": value["step"]
    }
    return StepRecord(**record)
