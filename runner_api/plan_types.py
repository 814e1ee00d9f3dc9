"""Is everything in a plan of the kind that its type says? The first half of validation; values come second.

A plan is read several times (checked, committed, applied), so what can be read only once, or reads differently as a
list and as an index (a generator, a string, a float that equals an integer), is refused here. NumPy integers count as
integers, bools do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from runner_api.checks import is_integer
from runner_api.errors import PlanError
from runner_api.plan import CachedRequestData, NewRequestData, SchedulerOutput
from runner_api.sampling_params import SamplingParams


def check_types(plan: SchedulerOutput) -> None:
    """Raise PlanError (MR-ERR-020) naming the first field that is of the wrong kind."""
    if not isinstance(plan, SchedulerOutput):
        raise _wrong("plan", plan, "a SchedulerOutput")
    for name in ("finished_req_ids", "preempted_req_ids"):
        _ids(name, getattr(plan, name))
    _list("scheduled_new_reqs", plan.scheduled_new_reqs)
    for new in plan.scheduled_new_reqs:
        _new(new)
    _cached(plan.scheduled_cached_reqs)
    _mapping("num_scheduled_tokens", plan.num_scheduled_tokens)
    for req_id, n in plan.num_scheduled_tokens.items():
        _integer("num_scheduled_tokens", n, req_id)
    _integer("total_num_scheduled_tokens", plan.total_num_scheduled_tokens)
    _mapping("scheduled_spec_decode_tokens", plan.scheduled_spec_decode_tokens)
    for req_id, drafts in plan.scheduled_spec_decode_tokens.items():
        _integers("scheduled_spec_decode_tokens", drafts, req_id)
    _integers("new_block_ids_to_zero", plan.new_block_ids_to_zero)
    _list("kv_cache_block_copies", plan.kv_cache_block_copies)
    for pair in plan.kv_cache_block_copies:
        _integers("kv_cache_block_copies", pair)
        if len(pair) != 2:
            raise _wrong("kv_cache_block_copies", pair, "a pair (source, destination)")
    _integer("num_spec_tokens_to_schedule", plan.num_spec_tokens_to_schedule)


def _new(new: NewRequestData) -> None:
    where = "scheduled_new_reqs"
    if not isinstance(new, NewRequestData):
        raise _wrong(where, new, "a NewRequestData")
    req_id = new.req_id
    if not isinstance(req_id, str):
        raise _wrong(f"{where}.req_id", req_id, "a string")
    _tokens(f"{where}.prompt_token_ids", new.prompt_token_ids, req_id)
    _tokens(f"{where}.prefill_token_ids", new.prefill_token_ids, req_id)
    _integer(f"{where}.num_computed_tokens", new.num_computed_tokens, req_id)
    _integer(f"{where}.seed", new.seed, req_id)
    _integers(f"{where}.eos_token_ids", new.eos_token_ids, req_id)
    _blocks(f"{where}.block_ids", new.block_ids, req_id)
    if new.sampling_params is not None and not isinstance(new.sampling_params, SamplingParams):
        raise _wrong(f"{where}.sampling_params", new.sampling_params, "SamplingParams or None", req_id)


def _cached(cached: CachedRequestData) -> None:
    where = "scheduled_cached_reqs"
    if not isinstance(cached, CachedRequestData):
        raise _wrong(where, cached, "a CachedRequestData")
    _list(f"{where}.req_ids", cached.req_ids)
    for req_id in cached.req_ids:
        if not isinstance(req_id, str):
            raise _wrong(f"{where}.req_ids", req_id, "strings")
    _integers(f"{where}.num_computed_tokens", cached.num_computed_tokens)
    _list(f"{where}.new_block_ids", cached.new_block_ids)
    for block_ids in cached.new_block_ids:
        if block_ids is not None:
            _blocks(f"{where}.new_block_ids", block_ids)
    _integers(f"{where}.num_output_tokens", cached.num_output_tokens)
    _ids(f"{where}.resumed_req_ids", cached.resumed_req_ids)
    _mapping(f"{where}.all_token_ids", cached.all_token_ids)
    for req_id, tokens in cached.all_token_ids.items():
        _tokens(f"{where}.all_token_ids", tokens, req_id)


def _ids(field: str, value: Any) -> None:
    if not isinstance(value, Set) or not all(isinstance(r, str) for r in value):
        raise _wrong(field, value, "a set of strings")


def _list(field: str, value: Any, req_id: str | None = None) -> None:
    if not isinstance(value, (list, tuple)):
        raise _wrong(field, value, "a list", req_id)


def _mapping(field: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(r, str) for r in value):
        raise _wrong(field, value, "a dict keyed by request id")


def _integer(field: str, value: Any, req_id: str | None = None) -> None:
    if not is_integer(value):
        raise _wrong(field, value, "an integer", req_id)


def _integers(field: str, value: Any, req_id: str | None = None) -> None:
    # One test per distinct type, not per element: prompts are long.
    if not isinstance(value, (list, tuple)) or not all(
        kind is int or (issubclass(kind, (int, np.integer)) and kind is not bool) for kind in set(map(type, value))
    ):
        raise _wrong(field, value, "a list of integers", req_id)


def _tokens(field: str, value: Any, req_id: str) -> None:
    if isinstance(value, range) or (isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"):
        return
    _integers(field, value, req_id)


def _blocks(field: str, value: Any, req_id: str | None = None) -> None:
    _list(field, value, req_id)
    for ids in value:
        _integers(field, ids, req_id)


def _wrong(field: str, value: Any, expected: str, req_id: str | None = None) -> PlanError:
    return PlanError(
        f"is of type {type(value).__name__}",
        code="MR-ERR-020",
        field=field,
        req_id=req_id,
        got=value,
        expected=expected,
        hint="Build plans from the types in runner_api.plan",
    )
