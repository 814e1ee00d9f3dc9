"""One small function per clause, about what a step's record and output say.

A law returns its mismatches, or None where the step has nothing it could judge. Laws read the candidate's own other
fields wherever they can (its slots are judged by its own positions), so that one fault breaks one law. Laws marked
`consequence` judge what follows from the index fields; they are silent once an index law of the same run has failed.
Here: the registry, and the laws about batch and output. `laws_inputs`, `laws_memory` and `laws_values` hold the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from conformance.context import MOST_MISMATCHES, Mismatch, StepContext
from runner_api import EMPTY_MODEL_RUNNER_OUTPUT
from runner_api.record_check import INTEGER_ARRAYS, field_fault

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


@law("MR-BATCH-005", first=True)
def arrays_have_their_shapes(c: StepContext) -> Found:
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


@law("MR-BATCH-002")
def short_requests_lead(c: StepContext) -> Found:
    keys = _order_keys(c)
    at = next((i for i in range(1, len(keys)) if keys[i] < keys[i - 1]), None)
    if at is None:
        return []
    got = c.record.req_ids[at]
    return [Mismatch("MR-BATCH-002", "req_ids", got, (at,), got, c.expected.order[at])]


@law("MR-BATCH-003")
def ties_keep_the_plans_order(c: StepContext) -> Found:
    keys = _order_keys(c)
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


def _order_keys(c: StepContext) -> list[tuple[bool, bool, int]]:
    q = 1 + c.config.num_speculative_tokens
    return [(not m.num_drafts, m.num_scheduled != q, m.num_scheduled) for m in c.members]


# -- OUT and ASYNC --------------------------------------------------------------------------------------------


@law("MR-OUT-001")
def output_names_the_batch(c: StepContext) -> Found:
    got = tuple(c.output.req_ids)
    return [] if got == c.record.req_ids else [Mismatch("MR-OUT-001", "req_ids", None, (), got, c.record.req_ids)]


@law("MR-OUT-002")
def output_gives_the_tokens_taken(c: StepContext) -> Found:
    taken, given = c.record.tokens(), dict(zip(c.output.req_ids, c.output.sampled_token_ids, strict=False))
    return [
        Mismatch("MR-OUT-002", "sampled_token_ids", r, (i,), given.get(r), taken[r])
        for i, r in enumerate(c.record.req_ids)
        if r in given and tuple(given[r]) != taken[r]
    ][:MOST_MISMATCHES]


@law("MR-OUT-003", needs_batch=False)
def no_tokens_no_output(c: StepContext) -> Found:
    if c.num_tokens:
        return None
    got = (c.output.req_ids, c.output.sampled_token_ids)
    wanted = (EMPTY_MODEL_RUNNER_OUTPUT.req_ids, EMPTY_MODEL_RUNNER_OUTPUT.sampled_token_ids)
    return [] if got == wanted else [Mismatch("MR-OUT-003", "req_ids", None, (), got, wanted)]


@law("MR-ASYNC-001", needs_batch=False)
def output_is_the_same_twice(c: StepContext) -> Found:
    if c.output_again is None:
        return None
    first, again = c.output.tokens(), c.output_again.tokens()
    return [] if first == again else [Mismatch("MR-ASYNC-001", "sampled_token_ids", None, (), again, first)]
