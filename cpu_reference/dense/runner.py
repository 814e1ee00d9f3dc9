"""The NumPy model runner in the dense layout: the same step, with rows that are kept packed.

What differs from `cpu_reference.runner` is here and nothing else is: how a plan changes rows, how inputs are built
from them, and what a request keeps while it has no row. Source: vLLM V1. Twin: gpu_backend/dense/runner.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cpu_reference.dense.block_table import DenseBlockTables
from cpu_reference.dense.inputs import prepare_dense_inputs
from cpu_reference.dense.rows import CachedRequest, DenseRows
from cpu_reference.input_batch import expand_idx_mapping, prepare_query_start_loc
from cpu_reference.runner import CAPABILITIES, CpuModelRunner, InputBatch
from cpu_reference.sample.sampler import Sampler
from runner_api import BatchDescriptor, Capability, KVCacheConfig, SchedulerOutput

DENSE_CAPABILITIES = (CAPABILITIES - {Capability.DRAFT_LAYOUT}) | {Capability.DENSE_LAYOUT}


class DenseCpuModelRunner(CpuModelRunner):
    """See `runner_api.protocol.ModelRunner` for what each method promises."""

    LAYOUTS = ("dense",)
    capabilities = DENSE_CAPABILITIES

    def _make_rows(self, kv_cache_config: KVCacheConfig, reach: Sequence[int]) -> None:
        c = self.config
        self.requests: dict[str, CachedRequest] = {}  # every live request, with a row or without
        self.req_states = DenseRows(c.max_num_reqs, c.max_model_len)
        fields = self.req_states.fields
        self.block_tables = DenseBlockTables(kv_cache_config, fields, c.max_num_batched_tokens, c.max_model_len, reach)
        self.sampler = Sampler(c, self._model.vocab_size, self.req_states)
        for name, table in self.sampler.row_tables().items():
            # At the start every row is one that belongs to nobody.
            fields.declare(f"sampling {name}", table, table[0].copy())

    @property
    def waiting_requests(self) -> dict[str, CachedRequest]:
        """Live requests without a row."""
        rows = self.req_states.req_id_to_row
        return {req_id: request for req_id, request in self.requests.items() if req_id not in rows}

    def table_traffic(self) -> Mapping[str, int]:
        """See `runner_api.loader.table_traffic`."""
        traffic = super().table_traffic()
        if not traffic:
            return traffic
        rows = self.req_states
        return {**traffic, "rows_moved": rows.num_condense_moves + 2 * rows.num_swaps}

    # -- a plan changes rows ----------------------------------------------------------------------------------

    def _update_states(self, plan: SchedulerOutput) -> None:
        rows, tables, cached = self.req_states, self.block_tables, plan.scheduled_cached_reqs
        rows.begin_step()
        # 1 finished requests are forgotten
        for req_id in sorted(plan.finished_req_ids & self.requests.keys()):
            self._leave(req_id)
            self.sampler.forget_request(req_id)
            del self.requests[req_id]
        # 2 blank fresh blocks, then copy shared ones
        self._change_blocks(plan)
        # 3 whoever is not scheduled leaves its row, and whoever comes back from a preemption in the same plan
        for req_id in sorted(rows.req_id_to_row.keys() - (plan.num_scheduled_tokens.keys() - cached.resumed_req_ids)):
            self._leave(req_id)
        for req_id in sorted(plan.preempted_req_ids & self.requests.keys()):
            self.requests[req_id].start_over()
        # 4 new requests; one that is not scheduled yet waits without a row
        arriving = []
        for new in plan.scheduled_new_reqs:
            self.requests[new.req_id] = CachedRequest.announced_by(new)
            if new.req_id in plan.num_scheduled_tokens:
                arriving.append(new.req_id)
        # 5 known ones: blocks behind those they have, or, for who starts over, in place of them; a row's own counter is
        # as far as the plan says
        for req_id, computed, block_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            request = self.requests[req_id]
            if req_id in cached.resumed_req_ids:
                request.start_over(cached.all_token_ids[req_id])
                self.sampler.forget_request(req_id)
            request.num_computed_tokens = int(computed)
            if block_ids is not None:
                for owned, more in zip(request.block_ids, block_ids, strict=True):
                    owned.extend(more)
            row = rows.req_id_to_row.get(req_id)
            if row is None:
                arriving.append(req_id)
            elif block_ids is not None:
                tables.append_block_ids(row, block_ids, overwrite=False)
        # 6 those without a row get one, the lowest hole first; what is made of their tokens is made there
        for req_id in arriving:
            self._arrive(self.requests[req_id])
        self.sampler.apply_staged_writes()
        # 7 no holes; then decodes to the front, if a threshold is set
        rows.condense()
        rows.reorder(plan.num_scheduled_tokens.__getitem__, self.config.reorder_batch_threshold)
        if rows.moves:
            self.sampler.move_rows(rows.moves)
            self._model_state.move_rows(rows.moves)

    def _arrive(self, request: CachedRequest) -> None:
        """Into a row: everything that a row holds is written from what the request keeps."""
        row, new = self.req_states.add(request), request.announcement()
        self.block_tables.append_block_ids(row, new.block_ids, overwrite=True)
        self.sampler.add_request(row, new)
        self._model_state.add(row, new)

    def _leave(self, req_id: str) -> None:
        """Out of its row, if it has one; what it drew there is kept."""
        rows, row = self.req_states, self.req_states.req_id_to_row.get(req_id)
        if row is None:
            return
        request = self.requests[req_id]
        request.token_ids = rows.all_token_ids[row, : rows.total_len[row]].tolist()
        request.num_computed_tokens = int(rows.num_computed_tokens[row])
        self.sampler.remove_request(row)
        self._model_state.remove(req_id)
        rows.remove(req_id)

    # -- inputs -----------------------------------------------------------------------------------------------

    def _prepare_inputs(self, plan: SchedulerOutput, descriptor: BatchDescriptor | None) -> InputBatch:
        rows = self.req_states
        r, t = rows.num_reqs, plan.total_num_scheduled_tokens
        # 1 batch order is row order
        req_ids = tuple(rows.req_ids[:r])
        num_scheduled = np.array([plan.num_scheduled_tokens[i] for i in req_ids], np.int32)
        self.idx_mapping[:r] = np.arange(r)
        # 2 boundaries, lengths, positions, tokens
        prepare_dense_inputs(
            num_scheduled, rows.num_computed_tokens, rows.all_token_ids, r,
            self.query_start_loc, self.seq_lens, self.positions, self.input_ids,
        )  # fmt: skip
        # 3 one logits row per request: behind its last token
        prepare_query_start_loc(np.ones(r, np.int32), r, self.cu_num_logits)
        expand_idx_mapping(self.idx_mapping, self.cu_num_logits, r, self.expanded_idx_mapping, self.expanded_local_pos)
        self.logits_indices[:r] = self.query_start_loc[1 : r + 1] - 1
        self.logits_indices[r:] = 0
        reqs_padded = descriptor.num_reqs if descriptor and descriptor.num_reqs else r
        tokens_padded = descriptor.num_tokens if descriptor else t
        return InputBatch(req_ids, r, reqs_padded, t, tokens_padded, r, num_scheduled, {})

    def _prepare_attn(self, batch: InputBatch) -> None:
        computed = self.req_states.num_computed_tokens
        self.block_tables.commit(computed, batch.num_reqs, batch.num_reqs_padded)
        self._map_slots(batch)
