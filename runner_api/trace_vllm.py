"""A recording of vLLM, line by line, as StepRecords. Nothing is converted: what is not of its kind is refused.

Every list of a step has a length that its plan and padded sizes determine, so a list that was emptied or cut cannot
pass for a short one. Values are left alone: whether they are right is for replay to say. `runner_api.trace` reads the
file and knows the header; this module knows nothing of files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runner_api.config import BatchDescriptor, CUDAGraphMode
from runner_api.errors import TraceError, UnknownNameError
from runner_api.plan import CachedRequestData, NewRequestData, SchedulerOutput
from runner_api.plan_types import check_types
from runner_api.record import StepRecord
from runner_api.sampling_params import SamplingParams

# Header fields by the type they must have; the numbers are sizes, at least 1.
META_FIELDS: dict[str, type] = {
    "source": str, "runner": str, "model": str, "max_model_len": int, "max_num_seqs": int,
    "max_num_batched_tokens": int, "block_size": int, "num_gpu_blocks_override": int,
}  # fmt: skip
# The row layout of each of the two runners that are recorded.
RECORDED_LAYOUTS = {"V1": "dense", "V2": "slots"}
# A length that is free: the first row decides, the others must have the same.
ANY = None


def check_meta(meta: Mapping[str, Any], where: str) -> None:
    """Raise TraceError unless every header field is there and of its kind. where: what errors call the header."""
    for key, kind in META_FIELDS.items():
        if key not in meta:
            raise TraceError("missing field", field=f"{where}.{key}")
        value: Any = meta[key]
        if type(value) is not kind or (isinstance(value, int) and value < 1):
            expected = "a string" if kind is str else "an integer >= 1"
            raise TraceError("broken field", field=f"{where}.{key}", got=value, expected=expected)
    if meta["runner"] not in RECORDED_LAYOUTS:
        raise TraceError(
            "no such runner", field=f"{where}.runner", got=meta["runner"], expected=" or ".join(RECORDED_LAYOUTS)
        )
    if "free_rows" in meta:
        integers(meta["free_rows"], np.int64, (meta["max_num_seqs"],), f"{where}.free_rows")
    drafts = meta.get("speculative_config")
    if drafts is not None and (not isinstance(drafts, dict) or type(drafts.get("num_speculative_tokens")) is not int):
        raise TraceError(
            "broken field", field=f"{where}.speculative_config", got=drafts, expected="num_speculative_tokens or null"
        )


# -- strict readers -------------------------------------------------------------------------------------------


def integers(value: Any, dtype: Any, shape: tuple[int | None, ...], name: str) -> np.ndarray:
    """An array of `dtype` from nested lists of exactly that shape; raises TraceError naming the element at fault."""
    limits = np.iinfo(dtype)

    def bad(x: Any) -> bool:
        return type(x) is not int or not limits.min <= x <= limits.max

    expected = f"an integer from {limits.min} to {limits.max}"
    found = _checked(value, shape, name, bad, expected)
    return np.array(value, dtype).reshape(found)


def floats(value: Any, shape: tuple[int | None, ...], name: str) -> np.ndarray:
    """float32, likewise; integers are numbers too, null and bools are not."""
    found = _checked(value, shape, name, _is_no_number, "a number")
    return np.array(value, np.float32).reshape(found)


def _is_no_number(x: Any) -> bool:
    return type(x) not in (int, float) or (abs(x) > np.finfo(np.float32).max and x not in (np.inf, -np.inf))


def _checked(value: Any, shape: tuple[int | None, ...], name: str, bad: Any, expected: str) -> tuple[int, ...]:
    """The shape that nested lists have, once each list and element is known to be what it must."""
    n = shape[0]
    if not isinstance(value, list) or (n is not None and len(value) != n):
        got = len(value) if isinstance(value, list) else value
        raise TraceError("wrong length", field=name, got=got, expected=f"a list of {'any length' if n is None else n}")
    if len(shape) == 1:
        at = next((i for i, x in enumerate(value) if bad(x)), None)
        if at is not None:
            raise TraceError("broken element", field=f"{name}[{at}]", got=value[at], expected=expected)
        return (len(value),)
    inner = shape[1:]
    for i, row in enumerate(value):
        found = _checked(row, inner, f"{name}[{i}]", bad, expected)
        inner = found  # rows after the first have its lengths
    return (len(value), *(0 if k is None else k for k in inner))


def _strings(value: Any, n: int, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) != n or not all(isinstance(x, str) for x in value):
        raise TraceError("broken field", field=name, got=value, expected=f"a list of {n} request ids")
    return tuple(value)


# -- plans ----------------------------------------------------------------------------------------------------


def _params_from_vllm(values: Mapping[str, Any]) -> SamplingParams:
    """All but two names are ours: the engine's stop set is read apart; how outputs are told is no runner's matter."""
    kept = {k: v for k, v in values.items() if k not in ("all_stop_token_ids", "output_kind")}
    if kept.get("logit_bias"):
        kept["logit_bias"] = {int(k): v for k, v in kept["logit_bias"].items()}
    return SamplingParams.from_dict(kept)


def _eos_token_ids(values: Mapping[str, Any], params: SamplingParams) -> tuple[int, ...]:
    """The engine folded the model's end-of-sequence ids into `all_stop_token_ids`: those that the request did not give.

    An id that both name is the request's; the stop set, which is all that a runner makes of it, is the same.
    """
    ids = integers(values.get("all_stop_token_ids", []), np.int64, (ANY,), "sampling_params.all_stop_token_ids")
    return tuple(t for t in ids.tolist() if t not in params.stop_token_ids)


def plan_from_vllm(plan: Mapping[str, Any]) -> SchedulerOutput:
    """The plan of one step. Raises KeyError for a field that is absent, PlanError or TraceError for a broken one."""
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
                eos_token_ids=_eos_token_ids(r["sampling_params"], params),
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
    result = SchedulerOutput(
        new, cached, dict(plan["num_scheduled_tokens"]), plan["total"], dict(plan["spec"]),
        frozenset(plan["finished"]), frozenset(plan["preempted"]),
    )  # fmt: skip
    check_types(result)
    n = len(cached.req_ids)
    for name in ("num_computed_tokens", "num_output_tokens"):
        integers(c[name], np.int64, (n,), f"plan.cached.{name}")
    total = sum(result.num_scheduled_tokens.values())
    if total != result.total_num_scheduled_tokens or len(cached.new_block_ids) != n:
        raise TraceError("counts do not add up", field="plan", got=plan["total"], expected=total)
    return result


# -- steps ----------------------------------------------------------------------------------------------------


def step_from_vllm(value: Mapping[str, Any], meta: Mapping[str, Any]) -> StepRecord:
    """One line. Raises KeyError naming a field that is absent, a RunnerError for one that is broken."""
    plan = plan_from_vllm(value["plan"])
    runner = f"{meta['source']} {meta['runner']}"
    batch = value.get("batch")
    if (batch is None) != (plan.total_num_scheduled_tokens == 0):
        raise TraceError(
            "a batch belongs to a plan that schedules tokens, and to no other", field="batch",
            got="none" if batch is None else "one", expected=f"plan.total = {plan.total_num_scheduled_tokens}",
        )  # fmt: skip
    if batch is None:
        return StepRecord(plan, runner=runner, extra={"step": value["step"]})
    if not isinstance(batch, dict) or not isinstance(value["sampled"], dict):
        raise TraceError("batch and sampled are objects", field="batch", got=type(batch).__name__)
    record = _read_common(plan, batch, value["sampled"])
    if RECORDED_LAYOUTS[meta["runner"]] == "dense":
        record |= _read_dense(plan, batch, value["sampled"])
    else:
        record |= _read_slots(plan, batch, value["sampled"], meta)
    return StepRecord(plan, runner=runner, **record, extra=_extra(value, plan))


def _read_common(plan: SchedulerOutput, batch: Mapping[str, Any], sampled: Mapping[str, Any]) -> dict[str, Any]:
    """What both row layouts record."""
    r, t = len(plan.num_scheduled_tokens), plan.total_num_scheduled_tokens
    num_logits = r + sum(len(d) for d in plan.scheduled_spec_decode_tokens.values())
    for name, n in (("num_reqs", r), ("num_tokens", t)):
        if batch.get(name, n) != n:
            raise TraceError("differs from the plan", field=f"batch.{name}", got=batch[name], expected=n)
    return {
        "num_reqs": r,
        "num_tokens": t,
        "req_ids": _strings(batch["req_ids"], r, "batch.req_ids"),
        "input_ids": integers(batch["input_ids"], np.int32, (t,), "batch.input_ids"),
        "positions": integers(batch["positions"], np.int64, (t,), "batch.positions"),
        "logits_indices": integers(batch["logits_indices"], np.int64, (num_logits,), "batch.logits_indices"),
        "token_ids": integers(sampled["token_ids"], np.int64, (r, ANY), "sampled.token_ids"),
    } | _read_optional(r, num_logits, batch, sampled)


def _read_optional(r: int, num_logits: int, batch: Mapping[str, Any], sampled: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that a recording may lack: None then, so that nobody takes an absent field for an empty one."""
    fields: tuple[tuple[str, str, Mapping[str, Any], Any, tuple[int | None, ...]], ...] = (
        ("expanded_idx_mapping", "expanded_idx_mapping", batch, np.int64, (num_logits,)),
        ("expanded_local_pos", "expanded_local_pos", batch, np.int32, (num_logits,)),
        ("draft_token_ids", "draft_tokens_state", batch, np.int64, (r, ANY)),
        ("num_rejected", "num_rejected", sampled, np.int32, (r,)),
        ("ranks", "ranks", sampled, np.int64, (r,)),
        ("logprob_token_ids", "logprob_token_ids", sampled, np.int64, (r, ANY)),
    )
    record: dict[str, Any] = {}
    for name, key, source, dtype, shape in fields:
        value = source.get(key)
        record[name] = None if value is None else integers(value, dtype, shape, key)
    value = sampled.get("logprobs")
    record["logprobs"] = None if value is None else floats(value, (r, ANY), "logprobs")
    return record


def _read_slots(
    plan: SchedulerOutput, batch: Mapping[str, Any], sampled: Mapping[str, Any], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """What the slots layout records: rows, padding, tables of every KV cache group."""
    r, t = len(plan.num_scheduled_tokens), plan.total_num_scheduled_tokens
    if batch["cg_mode"] not in CUDAGraphMode.__members__:
        raise UnknownNameError("cg_mode", batch["cg_mode"], CUDAGraphMode.__members__, field="batch.cg_mode")
    mode = CUDAGraphMode[batch["cg_mode"]]
    rp, tp = batch["num_reqs_padded"], batch["num_tokens_padded"]
    for name, n, least in (("num_reqs_padded", rp, r), ("num_tokens_padded", tp, t)):
        if type(n) is not int or n < least:
            raise TraceError("padded size", field=f"batch.{name}", got=n, expected=f"an integer >= {least}")
    tables = batch["block_tables"]
    if not isinstance(tables, list) or not tables:
        raise TraceError("no KV cache group", field="batch.block_tables", got=tables, expected="[group][request]")
    return {
        "num_reqs_padded": rp,
        "num_tokens_padded": tp,
        "descriptor": BatchDescriptor(mode, tp, rp if mode is CUDAGraphMode.FULL else None),
        "idx_mapping": integers(batch["idx_mapping"], np.int64, (r,), "batch.idx_mapping"),
        "query_start_loc": integers(batch["query_start_loc"], np.int32, (rp + 1,), "batch.query_start_loc"),
        "seq_lens": integers(batch["seq_lens"], np.int32, (rp,), "batch.seq_lens"),
        "cu_num_logits": integers(batch["cu_num_logits"], np.int32, (r + 1,), "batch.cu_num_logits"),
        "slot_mappings": integers(batch["slot_mappings"], np.int64, (len(tables), tp), "batch.slot_mappings"),
        "block_tables": tuple(_table(group, g, plan, batch["req_ids"], meta) for g, group in enumerate(tables)),
        "num_sampled": integers(sampled["num_sampled"], np.int32, (r,), "sampled.num_sampled"),
    }


def _table(
    group: Any, g: int, plan: SchedulerOutput, req_ids: Sequence[str], meta: Mapping[str, Any]
) -> tuple[np.ndarray, ...]:
    """One group's rows, each as long as its request has blocks of computed and scheduled tokens."""
    name = f"batch.block_tables[{g}]"
    if not isinstance(group, list) or len(group) != len(req_ids):
        raise TraceError("wrong length", field=name, got=group, expected=f"{len(req_ids)} rows")
    cached, size = plan.scheduled_cached_reqs, meta["block_size"]
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
    # The plan counts drafts in flight as accepted; the batch knows how many were.
    in_flight = (meta.get("speculative_config") or {}).get("num_speculative_tokens", 0)
    rows = []
    for i, (req_id, row) in enumerate(zip(req_ids, group, strict=True)):
        rows.append(integers(row, np.int32, (ANY,), f"{name}[{i}]"))
        if req_id not in computed:  # a wrong id is a difference in req_ids, and for replay to find
            continue
        most = computed[req_id] + plan.num_scheduled_tokens.get(req_id, 0)
        low, high = (-(-max(n, 1) // size) for n in (most - in_flight, most))
        if not low <= len(row) <= high:
            expected = str(low) if low == high else f"{low} .. {high}"
            raise TraceError("wrong length", field=f"{name}[{i}]", got=len(row), expected=expected)
    return tuple(rows)


def _read_dense(plan: SchedulerOutput, batch: Mapping[str, Any], sampled: Mapping[str, Any]) -> dict[str, Any]:
    """What the dense layout records: a row is its batch index, nothing is padded, one KV cache group.

    `trace_vllm_dense` adds what the plans tell. How many drafts were accepted they do not.
    """
    r, t = len(plan.num_scheduled_tokens), plan.total_num_scheduled_tokens
    if any(plan.scheduled_spec_decode_tokens.values()):
        raise TraceError(
            "drafts on the dense layout: how many were accepted is not recorded", field="plan.spec",
            got=plan.scheduled_spec_decode_tokens, expected="none",
        )  # fmt: skip
    return {
        "num_reqs_padded": r,
        "num_tokens_padded": t,
        "descriptor": BatchDescriptor(CUDAGraphMode.NONE, t),
        "idx_mapping": np.arange(r),
        "query_start_loc": integers(batch["query_start_loc"], np.int32, (r + 1,), "batch.query_start_loc"),
        "seq_lens": integers(batch["seq_lens"], np.int32, (r,), "batch.seq_lens"),
        "cu_num_logits": np.arange(r + 1, dtype=np.int32),
        "token_ids": integers(sampled["token_ids"], np.int64, (r, 1), "sampled.token_ids"),
        "slot_mappings": integers([batch["slot_mapping"]], np.int64, (1, t), "batch.slot_mapping"),
    }


def _extra(value: Mapping[str, Any], plan: SchedulerOutput) -> dict[str, Any]:
    sampled = value["sampled"]
    num_logits = len(plan.num_scheduled_tokens) + sum(map(len, plan.scheduled_spec_decode_tokens.values()))
    extra: dict[str, Any] = {"step": value["step"]}
    if "top2_margin" in sampled:
        floats(sampled["top2_margin"], (num_logits,), "sampled.top2_margin")
        extra["top2_margin"] = sampled["top2_margin"]
    if "target_argmax" in sampled:
        extra["target_argmax"] = sampled["target_argmax"]
    return extra


# -- the last line --------------------------------------------------------------------------------------------


def check_outputs(outputs: Any, steps: Sequence[StepRecord], where: str) -> None:
    """No request may have put out more tokens than the plans let it draw: steps are missing if one has.

    Fewer are legal: a step planned before a stop or an abort was known still draws. Counted from the plans, so that a
    wrong token or count in a batch stays a difference for replay to find. Raises TraceError naming the request.
    """
    if not isinstance(outputs, dict):
        raise TraceError("outputs by request", field=where, got=type(outputs).__name__, expected="an object")
    drawn: Counter[str] = Counter()
    known: dict[str, int] = {}
    prompt: dict[str, int] = {}
    for record in steps:
        plan, cached = record.plan, record.plan.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in plan.scheduled_new_reqs:
            computed[new.req_id], prompt[new.req_id] = new.num_computed_tokens, new.prompt_len
            known[new.req_id] = len(new.prefill_token_ids)
        for req_id, n in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if req_id in cached.resumed_req_ids:
                known[req_id] = prompt.get(req_id, 0) + n
        for i, (req_id, n) in enumerate(plan.num_scheduled_tokens.items()):
            drafts = len(plan.scheduled_spec_decode_tokens.get(req_id, ()))
            if computed.get(req_id, 0) + n >= known.get(req_id, 0):
                i = record.req_ids.index(req_id) if drafts and req_id in record.req_ids else i
                drawn[req_id] += min(max(int(record.num_sampled[i]), 1), 1 + drafts) if drafts else 1
    for req_id, output in outputs.items():
        if not isinstance(output, dict) or "token_ids" not in output:
            raise TraceError("missing field 'token_ids'", field=where, req_id=req_id, got=output)
        tokens = integers(output["token_ids"], np.int64, (ANY,), f"{where} outputs[{req_id!r}].token_ids")
        if len(tokens) > drawn[req_id]:
            raise TraceError(
                "is cut short: steps are missing", field=where, req_id=req_id, got=f"{drawn[req_id]} tokens drawn",
                expected=f"at least the {len(tokens)} that were put out",
            )  # fmt: skip
