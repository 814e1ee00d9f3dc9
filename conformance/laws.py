"""One small function per clause, about what a step's record and output say.

A law returns its mismatches, or None where the step has nothing it could judge. Laws read the candidate's own other
fields wherever they can (its slots are judged by its own positions), so that one fault breaks one law. Laws marked
`consequence` judge what follows from the index fields; they are silent once an index law of the same run has failed.
Here: the registry, and the laws about batch and output. `laws_inputs`, `laws_memory` and `laws_values` hold the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.context import MOST_MISMATCHES, Mismatch, StepContext
from runner_api import EMPTY_MODEL_RUNNER_OUTPUT, INTEGER_FIELDS, Capability, ModelRunnerOutput
from runner_api.record_check import INTEGER_ARRAYS, field_fault, is_integer

Found = list[Mismatch] | None
LawFunction = Callable[[StepContext], Found]


@dataclass(frozen=True, slots=True)
class Law:
    """When a law can be asked: after steps with tokens, on a batch of the right requests, or always."""

    clause_id: str
    fn: LawFunction
    needs_batch: bool
    consequence: bool
    first: bool


LAWS: dict[str, Law] = {}


def law(
    clause_id: str, *, needs_batch: bool = True, consequence: bool = False, first: bool = False
) -> Callable[[LawFunction], LawFunction]:
    """Register a law. `first`: shapes and batch; where one of these fails nothing else can be read."""

    def register(fn: LawFunction) -> LawFunction:
        LAWS[clause_id] = Law(clause_id, fn, needs_batch, consequence, first)
        return fn

    return register


# -- BATCH ----------------------------------------------------------------------------------------------------


@law("MR-BATCH-001", needs_batch=False, first=True)
def batch_holds_the_plans_requests(c: StepContext) -> Found:
    if c.is_permutation:
        return []
    return [Mismatch("MR-BATCH-001", "req_ids", None, (), c.record.req_ids, c.expected.order)]


@law("MR-BATCH-005", needs_batch=False, first=True)
def arrays_have_their_shapes(c: StepContext) -> Found:
    """The record of a plan without tokens holds the plan and no batch: its arrays are empty."""
    if not c.num_tokens:
        return _not_empty(c)
    r, rp, t, n = c.num_reqs, c.reqs_padded, c.num_tokens, int(c.logit_starts[-1])
    k = c.config.num_speculative_tokens
    shapes = {
        "idx_mapping": (r,), "query_start_loc": (rp + 1,), "seq_lens": (rp,), "input_ids": (t,), "positions": (t,),
        "logits_indices": (n,), "cu_num_logits": (r + 1,), "expanded_idx_mapping": (n,), "expanded_local_pos": (n,),
        "seeds": (r,), "token_ids": (r, 1 + k), "num_sampled": (r,),
        "num_rejected": (r,),
    }  # fmt: skip
    found = []
    for name, shape in shapes.items():
        value, dtype = getattr(c.record, name), np.dtype(INTEGER_ARRAYS[name][0])
        if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype != dtype:
            got = f"{getattr(value, 'dtype', type(value).__name__)}{list(np.shape(value))}"
            found.append(Mismatch("MR-BATCH-005", name, None, (), got, f"{dtype}{list(shape)}"))
    found += _unreadable(c)
    fault = field_fault(c.record, "block_tables")
    if fault is not None:
        return [*found, Mismatch("MR-BATCH-005", "block_tables", None, (), fault, "int32 rows by group")]
    for g, table in enumerate(c.record.block_tables):
        wrong = next((i for i, row in enumerate(table) if row.dtype != np.int32), None)
        if wrong is not None:
            found.append(Mismatch("MR-BATCH-005", "block_tables", None, (g, wrong), str(table[wrong].dtype), "int32"))
    rows = [len(table) for table in c.record.block_tables]
    if rows != [rp] * c.num_groups:
        found.append(Mismatch("MR-BATCH-005", "block_tables", None, (), rows, [rp] * c.num_groups))
    return found


def _not_empty(c: StepContext) -> list[Mismatch]:
    """Arrays of a plan without tokens that have elements all the same."""
    names = [name for name in INTEGER_FIELDS if name not in ("req_ids", "block_tables")]
    shapes = {name: (np.asarray(getattr(c.record, name)), getattr(c.reference, name)) for name in names}
    found = [
        Mismatch("MR-BATCH-005", name, None, (), f"{got.dtype}{list(got.shape)}", f"{none.dtype}{list(none.shape)}")
        for name, (got, none) in shapes.items()
        if got.size
    ]
    rows = [len(table) for table in c.record.block_tables]
    return [*found, Mismatch("MR-BATCH-005", "block_tables", None, (), rows, [])] if any(rows) else found


def _unreadable(c: StepContext) -> list[Mismatch]:
    """Fields whose kind is not theirs, and parts that were asked for and are not there."""
    kinds = {"req_ids": "tuple", "faults": f"int32[{c.num_reqs}]", "kv": "dict", "descriptor": "BatchDescriptor"}
    faults = {name: field_fault(c.record, name) for name in kinds}
    found = [
        Mismatch("MR-BATCH-005", name, None, (), fault.partition(",")[0], kinds[name])
        for name, fault in faults.items()
        if fault is not None
    ]
    asked = c.config.record
    if "logits" in asked and Capability.RECORD_LOGITS in c.capabilities and c.record.logits is None:
        found.append(Mismatch("MR-BATCH-005", "logits", None, (), None, "float[L, V], as asked"))
    if "kv" in asked and Capability.RECORD_KV in c.capabilities and faults["kv"] is None:
        absent = next((r for r in c.record.req_ids if r not in c.record.kv), None)
        if absent is not None:
            found.append(Mismatch("MR-BATCH-005", "kv", absent, (), None, "int64[G, seq_len, 2], as asked"))
    return found


@law("MR-BATCH-002")
def short_requests_lead(c: StepContext) -> Found:
    keys = c.order_keys
    at = next((i for i in range(1, len(keys)) if keys[i] < keys[i - 1]), None)
    if at is None:
        return []
    got = c.record.req_ids[at]
    return [Mismatch("MR-BATCH-002", "req_ids", got, (at,), got, c.expected.order[at])]


@law("MR-BATCH-003")
def ties_keep_the_plans_order(c: StepContext) -> Found:
    keys = c.order_keys
    place = {r: i for i, r in enumerate(c.plan.num_scheduled_tokens)}
    ids = c.record.req_ids
    for i in range(1, len(ids)):
        if keys[i] == keys[i - 1] and place[ids[i]] < place[ids[i - 1]]:
            return [Mismatch("MR-BATCH-003", "req_ids", ids[i], (i,), ids[i], c.expected.order[i])]
    return []


@law("MR-BATCH-004", needs_batch=False)
def counts_are_the_plans(c: StepContext) -> Found:
    wanted = {"num_reqs": c.num_reqs, "num_tokens": c.num_tokens}
    return [
        Mismatch("MR-BATCH-004", name, None, (), getattr(c.record, name), value)
        for name, value in wanted.items()
        if getattr(c.record, name) != value
    ]


# -- OUT and ASYNC --------------------------------------------------------------------------------------------


@law("MR-OUT-001")
def output_names_the_batch(c: StepContext) -> Found:
    got, wanted = tuple(c.output.req_ids), tuple(c.record.req_ids)
    return [] if got == wanted else [Mismatch("MR-OUT-001", "req_ids", None, (), got, wanted)]


@law("MR-OUT-002")
def output_gives_the_tokens_taken(c: StepContext) -> Found:
    """A row without a winner gives its request an error and no tokens; nobody else has one."""
    failed = _failed(c)
    taken = c.record.tokens() | dict.fromkeys(failed, ())
    given = dict(zip(c.output.req_ids, c.output.sampled_token_ids, strict=False))
    found = [
        Mismatch("MR-OUT-002", "sampled_token_ids", r, (i,), given.get(r), taken[r])
        for i, r in enumerate(c.record.req_ids)
        if r in given and not (_are_tokens(given[r]) and tuple(given[r]) == taken[r])
    ]
    errors = c.output.errors
    if not isinstance(errors, Mapping) or dict(errors) != failed:
        got = dict(errors) if isinstance(errors, Mapping) else errors
        found.append(Mismatch("MR-OUT-002", "errors", None, (), got, failed))
    return found[:MOST_MISMATCHES]


def _failed(c: StepContext) -> dict[str, int]:
    """Requests that were due a token and had no winner, by the candidate's own record."""
    if Capability.SAMPLE_FAULTS not in c.capabilities:
        return {}
    rows = zip(c.record.req_ids, c.record.num_sampled.tolist(), c.record.faults.tolist(), strict=False)
    return {req_id: fault for req_id, n, fault in rows if n and fault}


def _are_tokens(row: Any) -> bool:
    return isinstance(row, (tuple, list)) and all(map(is_integer, row))


@law("MR-OUT-003", needs_batch=False)
def no_tokens_no_output(c: StepContext) -> Found:
    if c.num_tokens:
        return None
    got = tuple(tuple(v) if isinstance(v, list) else v for v in (c.output.req_ids, c.output.sampled_token_ids))
    wanted = (EMPTY_MODEL_RUNNER_OUTPUT.req_ids, EMPTY_MODEL_RUNNER_OUTPUT.sampled_token_ids)
    return [] if got == wanted else [Mismatch("MR-OUT-003", "req_ids", None, (), got, wanted)]


@law("MR-ASYNC-001", needs_batch=False)
def output_is_the_same_twice(c: StepContext) -> Found:
    if c.output_again is None:
        return None
    first, again = _given(c.output), _given(c.output_again)
    return [] if first == again else [Mismatch("MR-ASYNC-001", "sampled_token_ids", None, (), again, first)]


@law("MR-ASYNC-005", needs_batch=False, consequence=True)
def records_keep_their_values(c: StepContext) -> Found:
    """Asked last: an old record that has changed is no reason to mistrust the new one."""
    return c.stale


def _given(output: ModelRunnerOutput) -> dict[str, Any]:
    """Its tokens as plain tuples; what is no row stays what it is."""
    kinds = (tuple, list, np.ndarray)
    return {r: tuple(row) if isinstance(row, kinds) else row for r, row in output.tokens().items()}
