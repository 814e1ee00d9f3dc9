"""What a recording of the dense layout leaves out, and its plans tell: how many tokens a row sampled, block tables, and
the tokens of resumed requests.

Such a recording lists one token for every row, also where the prefill was unfinished and the engine threw the token
away. `runner_api.trace` sends every step through here, in order; nothing that was recorded is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from runner_api.errors import TraceError
from runner_api.plan import CachedRequestData, SchedulerOutput
from runner_api.record import StepRecord


@dataclass(slots=True)
class _Request:
    """One request so far. outputs: every token drawn for it; prefill_len: tokens known when it started (again)."""

    prompt: Sequence[int]
    outputs: list[int]
    blocks: list[int]
    prefill_len: int
    num_computed: int = 0


class DenseHistory:
    """Follows the plans and tokens of one recording. block_size: of its one KV cache group."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._requests: dict[str, _Request] = {}

    def complete(self, record: StepRecord) -> StepRecord:
        """The step with `num_sampled`, `block_tables` and `all_token_ids`.

        Raises TraceError for a resumed request that no step announced, or whose outputs no step has drawn.
        """
        # 1 who leaves, comes, goes on
        plan = self._follow(record.plan)
        if record.num_reqs == 0:
            return replace(record, plan=plan)
        # 2 a row samples once all that was known of its request is computed
        num_sampled, tables = np.zeros(record.num_reqs, np.int32), []
        for i, (req_id, token) in enumerate(zip(_owners(record), record.token_ids[:, 0].tolist(), strict=True)):
            request = self._requests.get(req_id)
            if request is None:  # neither announced nor refused until a runner is asked
                tables.append(np.zeros(0, np.int32))
                continue
            seq_len = request.num_computed + plan.num_scheduled_tokens[req_id]
            tables.append(np.array(request.blocks[: -(-seq_len // self.block_size)], np.int32))
            if seq_len >= request.prefill_len:
                num_sampled[i] = 1
                request.outputs.append(token)
        return replace(record, plan=plan, num_sampled=num_sampled, block_tables=(tuple(tables),))

    def _follow(self, plan: SchedulerOutput) -> SchedulerOutput:
        """Apply a plan to the requests; the plan with the tokens of those that it resumes."""
        cached = plan.scheduled_cached_reqs
        for req_id in plan.finished_req_ids:
            self._requests.pop(req_id, None)
        for new in plan.scheduled_new_reqs:
            if len(new.block_ids) != 1:
                raise TraceError(
                    "not the blocks of one KV cache group", field="plan.new.block_ids", req_id=new.req_id,
                    got=new.block_ids, expected="one list",
                )  # fmt: skip
            self._requests[new.req_id] = _Request(
                new.prompt_token_ids, [], list(new.block_ids[0]), len(new.prefill_token_ids), new.num_computed_tokens
            )
        all_token_ids = {}
        for i, req_id in enumerate(cached.req_ids):
            request, more = self._requests.get(req_id), cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                request = self._resume(request, cached, i)
                all_token_ids[req_id] = [*request.prompt, *request.outputs]
            if request is None:
                continue
            request.num_computed = cached.num_computed_tokens[i]
            request.blocks.extend(more[0] if more else ())
        return replace(plan, scheduled_cached_reqs=replace(cached, all_token_ids=all_token_ids))

    def _resume(self, request: _Request | None, cached: CachedRequestData, i: int) -> _Request:
        """Its blocks are others from now on; the engine has as many of its outputs as the plan counts."""
        outputs = cached.num_output_tokens[i]
        drawn = -1 if request is None else len(request.outputs)
        if request is None or not 0 <= outputs <= drawn:
            raise TraceError(
                "a request is resumed whose tokens are not recorded: steps are missing",
                field=f"plan.cached.num_output_tokens[{i}]", req_id=cached.req_ids[i], got=outputs,
                expected="a request that was announced" if request is None else f"at most the {drawn} that were drawn",
            )  # fmt: skip
        del request.outputs[outputs:]
        request.blocks = []
        request.prefill_len = len(request.prompt) + outputs
        return request


def _owners(record: StepRecord) -> list[str]:
    """Whose row each row is: that of its id. A row with an id that it cannot have is that of the request that has none,
    so that a wrong id is wrong in `req_ids` alone, where replay finds it."""
    scheduled = record.plan.num_scheduled_tokens
    without = [req_id for req_id in scheduled if req_id not in record.req_ids]
    owners: list[str] = []
    for req_id in record.req_ids:
        owners.append(req_id if req_id in scheduled and req_id not in owners else without.pop(0))
    return owners
