"""A recording made on one row layout, and a runner that has the other: the same plans in its shape, the same numbers in
its batch order.

The layouts differ in two things that a recording shows. A preempted request comes back as new in the slots layout, as
cached and resumed in the dense one. And the batch has another order, so that steps are compared by request; rows have
nothing to be compared with then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.comparison import BOUNDARY_FIELDS, LOGITS_FIELDS, REQUEST_FIELDS, TOKEN_FIELDS
from runner_api import NewRequestData, SchedulerOutput, StepRecord

# Fields that tell in which row a request stands.
ROW_FIELDS = frozenset({"idx_mapping", "expanded_idx_mapping"})


# -- plans ----------------------------------------------------------------------------------------------------


def plans_for(layout: str, plans: Iterable[SchedulerOutput]) -> Iterator[SchedulerOutput]:
    """The plans of a run in the shape that a layout reads; one that has it already is given back as it is."""
    known: dict[str, NewRequestData] = {}
    for plan in plans:
        for req_id in plan.finished_req_ids:
            known.pop(req_id, None)
        yield resumed_as_new(plan, known) if layout == "slots" else resumed_as_cached(plan, known)
        for new in plan.scheduled_new_reqs:
            known.setdefault(new.req_id, new)


def resumed_as_new(plan: SchedulerOutput, known: Mapping[str, NewRequestData]) -> SchedulerOutput:
    """The plan in the shape of the slots layout.

    known: live requests as they were announced. One that nobody announced is left for the runner to refuse.
    """
    cached = plan.scheduled_cached_reqs
    back = [i for i, req_id in enumerate(cached.req_ids) if req_id in cached.resumed_req_ids & known.keys()]
    if not back:
        return plan
    new = [
        replace(
            known[cached.req_ids[i]], prefill_token_ids=cached.all_token_ids[cached.req_ids[i]],
            num_computed_tokens=cached.num_computed_tokens[i], block_ids=cached.new_block_ids[i] or (),
        )
        for i in back
    ]  # fmt: skip
    others = [i for i in range(len(cached.req_ids)) if i not in back]
    resumed = {again.req_id for again in new}
    return replace(
        plan,
        scheduled_new_reqs=[*plan.scheduled_new_reqs, *new],
        scheduled_cached_reqs=replace(
            cached,
            req_ids=[cached.req_ids[i] for i in others],
            num_computed_tokens=[cached.num_computed_tokens[i] for i in others],
            new_block_ids=[cached.new_block_ids[i] for i in others],
            num_output_tokens=[cached.num_output_tokens[i] for i in others if cached.num_output_tokens],
            resumed_req_ids=cached.resumed_req_ids - resumed,
            all_token_ids={r: tokens for r, tokens in cached.all_token_ids.items() if r not in resumed},
        ),
        # The dense layout need not be told who was preempted, the slots layout must; told twice it is told once.
        preempted_req_ids=plan.preempted_req_ids | resumed,
    )


def resumed_as_cached(plan: SchedulerOutput, known: Mapping[str, NewRequestData]) -> SchedulerOutput:
    """The plan in the shape of the dense layout. known: live requests; new ones among them are resumed."""
    back = [new for new in plan.scheduled_new_reqs if new.req_id in known]
    if not back:
        return plan
    cached = plan.scheduled_cached_reqs
    outputs = [len(new.prefill_token_ids) - new.prompt_len for new in back]
    told = len(cached.num_output_tokens) == len(cached.req_ids)  # the list may be left empty, and is then
    return replace(
        plan,
        scheduled_new_reqs=[new for new in plan.scheduled_new_reqs if new.req_id not in known],
        scheduled_cached_reqs=replace(
            cached,
            req_ids=cached.req_ids + [new.req_id for new in back],
            num_computed_tokens=cached.num_computed_tokens + [new.num_computed_tokens for new in back],
            new_block_ids=cached.new_block_ids + [new.block_ids for new in back],
            num_output_tokens=cached.num_output_tokens + (outputs if told else []),
            resumed_req_ids=cached.resumed_req_ids | {new.req_id for new in back},
            all_token_ids={**cached.all_token_ids, **{new.req_id: new.prefill_token_ids for new in back}},
        ),
    )


# -- batch order ----------------------------------------------------------------------------------------------


def in_batch_order(record: StepRecord, given: Any) -> StepRecord:
    """A recorded step as it would be in the batch order of `given`, which is what a runner's `last_step` gave.

    Rows are None: the recording has none of that layout. Where `given` holds other requests than the step, the step is
    not changed, and its `req_ids` differ.
    """
    order = batch_order(record.req_ids, given.req_ids) if isinstance(given, StepRecord) else None
    if order is None or not len(order):
        return record
    # 1 where the members of each axis stand in the recording
    plan = record.plan
    tokens = _members([plan.num_scheduled_tokens.get(r, 0) for r in record.req_ids], order)
    rows = _members([1 + len(plan.scheduled_spec_decode_tokens.get(r, ())) for r in record.req_ids], order)
    # 2 take them from there
    values: dict[str, Any] = dict.fromkeys(ROW_FIELDS)
    for fields, places in ((REQUEST_FIELDS, order), (LOGITS_FIELDS, rows)):
        for name in fields - ROW_FIELDS:
            values[name] = _taken(getattr(record, name), places)
    for name in TOKEN_FIELDS:
        value = getattr(record, name)
        values[name] = value[..., _padded(tokens, value.shape[-1])]
    for name in BOUNDARY_FIELDS:
        values[name] = _boundaries(getattr(record, name), order)
    # 3 a logits row is behind the same token, wherever that stands now
    now, indices = np.argsort(tokens), values["logits_indices"]
    inside = (indices >= 0) & (indices < len(now))
    values["logits_indices"] = np.where(inside, now[np.where(inside, indices, 0)], indices)
    extra = {**record.extra, "logits_rows": rows}
    for name in ("top2_margin", "target_argmax"):
        if name in extra:
            extra[name] = [extra[name][i] for i in rows.tolist()]
    return replace(record, **values, extra=extra)


def batch_order(req_ids: Sequence[str], wanted: Any) -> np.ndarray | None:
    """Where each of the wanted ids stands in `req_ids`; None unless they are the same ids, each once."""
    place = {req_id: i for i, req_id in enumerate(req_ids)}
    if not isinstance(wanted, tuple) or not all(isinstance(r, str) for r in wanted):
        return None
    if not len(wanted) == len(req_ids) == len(place) or set(wanted) != place.keys():
        return None
    return np.array([place[r] for r in wanted], np.int64)


def _members(counts: Sequence[int], order: np.ndarray) -> np.ndarray:
    """Indices of the members of each request, request by request in another order."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.concatenate([np.arange(ends[i] - counts[i], ends[i]) for i in order])


def _taken(value: Any, places: np.ndarray) -> Any:
    """The elements of a first axis at other places (of tables: inside each group); those behind them are padding."""
    if value is None or len(value) == 0:
        return value
    if isinstance(value, np.ndarray):
        return value[_padded(places, len(value))]
    if isinstance(value[0], tuple):
        return tuple(_taken(group, places) for group in value)
    return tuple(value[i] for i in _padded(places, len(value)))


def _padded(places: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([places, np.arange(len(places), length)])


def _boundaries(value: np.ndarray, order: np.ndarray) -> np.ndarray:
    counts = np.diff(value)
    return np.cumsum([value[0], *counts[_padded(order, len(counts))]]).astype(value.dtype)
