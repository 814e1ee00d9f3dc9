"""A plan of vLLM's scheduler as the JSON of a recording. Works on any object with vLLM's attribute names.

What a recording has no place for (images, adapters, grammars …) and would change tokens is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from runner_api import CapabilityError

# Sampling parameters that a recording holds: vLLM's attribute, and its name in the file.
RECORDED_PARAMS = {
    "n": "n", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "seed",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty", "stop_token_ids": "stop_token_ids", "ignore_eos": "ignore_eos",
    "max_tokens": "max_tokens", "min_tokens": "min_tokens", "logprobs": "logprobs",
    "logprob_token_ids": "logprob_token_ids", "allowed_token_ids": "allowed_token_ids", "logit_bias": "logit_bias",
    "trace_decode_token_ids": "trace_decode_token_ids", "_all_stop_token_ids": "all_stop_token_ids",
    "_bad_words_token_ids": "bad_words_token_ids",
}  # fmt: skip
# Those that no runner reads: how text is made of tokens, when the engine stops, what it tells and caches. Bad words
# are recorded as tokens, prompt log probabilities not at all.
UNREAD_PARAMS = frozenset({
    "stop", "bad_words", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone", "output_text_buffer_length",
    "flat_logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "_eos_token_id",
    "_watermarking_skipped", "skip_reading_prefix_cache", "repetition_detection", "routed_experts_prompt_start",
})  # fmt: skip
# Parts of a new request, and of a plan, that a recording has no place for.
REQUEST_PARTS = ("mm_features", "pooling_params", "lora_request", "prompt_embeds")
PLAN_PARTS = ("scheduled_encoder_inputs", "kv_connector_metadata", "ec_connector_metadata")


def plan_json(plan: Any) -> dict[str, Any]:
    """`plan`: a vLLM SchedulerOutput. Raises CapabilityError naming what cannot be recorded."""
    for part in PLAN_PARTS:
        _refuse(getattr(plan, part, None), part)
    cached = plan.scheduled_cached_reqs
    return {
        "new": [new_request_json(new) for new in plan.scheduled_new_reqs],
        "cached": {
            "req_ids": list(cached.req_ids),
            "resumed": sorted(cached.resumed_req_ids),
            "new_block_ids": [None if ids is None else blocks_json(ids) for ids in cached.new_block_ids],
            "num_computed_tokens": ints(cached.num_computed_tokens),
            "num_output_tokens": ints(cached.num_output_tokens),
        },
        "num_scheduled_tokens": {r: int(n) for r, n in plan.num_scheduled_tokens.items()},
        "total": int(plan.total_num_scheduled_tokens),
        "spec": {r: ints(ids) for r, ids in (plan.scheduled_spec_decode_tokens or {}).items()},
        "finished": sorted(plan.finished_req_ids),
        "preempted": sorted(getattr(plan, "preempted_req_ids", None) or ()),
    }


def new_request_json(new: Any) -> dict[str, Any]:
    for part in REQUEST_PARTS:
        _refuse(getattr(new, part, None), part, new.req_id)
    prefill = getattr(new, "prefill_token_ids", None)
    return {
        "req_id": new.req_id,
        "prompt_token_ids": ints(new.prompt_token_ids),
        "prefill_token_ids": None if prefill is None else ints(prefill),
        "sampling_params": params_json(new.sampling_params, new.req_id),
        "block_ids": blocks_json(new.block_ids),
        "num_computed_tokens": int(new.num_computed_tokens),
    }


def params_json(params: Any, req_id: str) -> dict[str, Any]:
    """What a runner reads of sampling parameters; absent ones are left out."""
    names: Iterable[str] = getattr(params, "__struct_fields__", None) or vars(params)
    values: dict[str, Any] = {"bad_words_token_ids": None}
    for name in names:
        value = getattr(params, name)
        if name in RECORDED_PARAMS:
            if value is not None:
                values[RECORDED_PARAMS[name]] = _plain(value)
        elif name not in UNREAD_PARAMS:
            _refuse(value, f"sampling_params.{name}", req_id)
    return values


def blocks_json(block_ids: Iterable[Iterable[int]]) -> list[list[int]]:
    return [ints(group) for group in block_ids]


def ints(values: Iterable[Any]) -> list[int]:
    return [int(v) for v in values]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): float(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [list(v) if isinstance(v, (list, tuple)) else v for v in value]
    return value


def _refuse(value: Any, what: str, req_id: str | None = None) -> None:
    if value:
        raise CapabilityError(
            "a recording has no place for it", field=what, req_id=req_id, got=type(value).__name__, expected="nothing",
            hint="Record requests without it",
        )  # fmt: skip
