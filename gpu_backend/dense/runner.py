"""The Triton/CUDA model runner in the dense layout: the same step, with rows that are kept packed.

What differs from `gpu_backend.runner` is here and nothing else is: how a plan changes rows, how inputs are built from
them, and what a request keeps while it has no row. The host builds the inputs and never waits for a token; the device
puts in those that it drew itself a step before. Source: vLLM V1. Twin: cpu_reference/dense/runner.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from gpu_backend.dense.block_table import DenseBlockTables
from gpu_backend.dense.inputs import patch_input_ids, prepare_dense_inputs
from gpu_backend.dense.rows import CachedRequest, DenseRows
from gpu_backend.dense.staging import Staging
from gpu_backend.runner import GpuModelRunner, InputBatch
from gpu_backend.sample.sampler import Sampler
from gpu_backend.slot_mapping import compute_slot_mappings
from runner_api import NO_ROW, BatchDescriptor, Capability, KVCacheConfig, SchedulerOutput

DENSE_CAPABILITIES = (GpuModelRunner.capabilities - {Capability.DRAFT_LAYOUT}) | {Capability.DENSE_LAYOUT}


class DenseGpuModelRunner(GpuModelRunner):
    """See `runner_api.protocol.ModelRunner` for what each method promises."""

    LAYOUTS = ("dense",)
    capabilities = DENSE_CAPABILITIES

    def _make_rows(self, kv_cache_config: KVCacheConfig, reach: Sequence[int]) -> None:
        c = self.config
        self.requests: dict[str, CachedRequest] = {}  # every live request, with a row or without
        rows = self.req_states = DenseRows(c.max_num_reqs, c.max_model_len, self.device, self._copy_stream)
        fields = rows.fields
        self.block_tables = DenseBlockTables(
            kv_cache_config, fields, c.max_num_batched_tokens, c.max_model_len, reach, self.device, self.copies
        )
        sampler = self.sampler = Sampler(c, self._model.vocab_size, rows, self.device)
        for name, table in {**sampler.host_tables(), **sampler.unsent_tables()}.items():
            # At the start every row is one that belongs to nobody.
            fields.declare(f"sampling {name}", table, table[0].copy())
        rows.own_fields |= {f"sampling {name}" for name in sampler.unsent_tables()}
        on_device = {n: t for n, t in sampler.row_tables().items() if isinstance(t, torch.Tensor)}
        widths = {name: table.shape[1] for name, table in on_device.items()}

        def lengths(row: int) -> list[int]:
            defined = widths | sampler.row_widths(row)
            return [int(rows.total_len_np[row]), *(defined[name] for name in widths)]

        tables = {f"sampling {name}": table for name, table in on_device.items()}
        fields.declare_on_device({"all_token_ids": rows.all_token_ids, **tables}, lengths)

    def _host_inputs(self) -> dict[str, np.ndarray]:
        n, t = self.config.max_num_reqs, self.config.max_num_batched_tokens
        self.idx_mapping_np = np.full(n, NO_ROW, np.int64)
        self.num_scheduled_tokens_np = np.zeros(n, np.int32)
        self.num_logits_np = np.zeros(n, np.int32)
        self.query_start_loc_np = np.zeros(n + 1, np.int32)
        self.seq_lens_np = np.zeros(n, np.int32)
        self.cu_num_logits_np = np.zeros(n + 1, np.int32)
        self.logits_indices_np = np.zeros(n, np.int64)
        self.positions_np = np.zeros(t, np.int64)
        self.input_ids_np = np.zeros(t, np.int32)
        return {
            "idx_mapping": self.idx_mapping_np, "num_scheduled_tokens": self.num_scheduled_tokens_np,
            "num_logits": self.num_logits_np, "query_start_loc": self.query_start_loc_np,
            "seq_lens": self.seq_lens_np, "cu_num_logits": self.cu_num_logits_np,
            "logits_indices": self.logits_indices_np, "positions": self.positions_np, "input_ids": self.input_ids_np,
            # a request has one logits row: its own row, the first one
            "expanded_idx_mapping": self.idx_mapping_np, "expanded_local_pos": np.zeros(n, np.int32),
        }  # fmt: skip

    def _make_packed(self, tables: Mapping[str, np.ndarray], extra_bytes: int) -> Staging:
        return Staging(tables, extra_bytes, self.device, self.copies)

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
            self._leave(req_id, for_good=True)
            self.sampler.forget_request(req_id)
            del self.requests[req_id]
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
        # 5 known ones: counters, and blocks behind those they have, or in place of them
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
                continue
            rows.num_computed_tokens_np[row] = computed
            if block_ids is not None:
                tables.append_block_ids(row, block_ids, overwrite=False)
        # 6 those without a row get one, the lowest hole first
        for req_id in arriving:
            self._arrive(self.requests[req_id])
        # 7 no holes; then decodes to the front, if a threshold is set
        rows.condense()
        rows.reorder(plan.num_scheduled_tokens.__getitem__, self.config.reorder_batch_threshold)
        if rows.moves:
            self.sampler.move_rows(rows.moves)
            self._model_state.move_rows(rows.moves)
        # … and the device is told: who went where, and what newcomers bring, for the row that they have now
        for req_id in arriving:
            rows.stage_tokens(req_id)
            self.sampler.add_to_tables(rows.req_id_to_row[req_id], self.requests[req_id].announcement())
        for part in (rows, self.sampler):
            part.pack(self.packed)

    def _arrive(self, request: CachedRequest) -> None:
        """Into a row: everything that a row holds is written from what the request keeps."""
        request.fetch_tokens()
        row, new = self.req_states.add(request), request.announcement()
        self.block_tables.append_block_ids(row, new.block_ids, overwrite=True)
        self.sampler.add_to_custom(row, new)
        self._model_state.add(row, new)

    def _leave(self, req_id: str, for_good: bool = False) -> None:
        """Out of its row, if it has one; unless it is finished, what it drew there is kept."""
        rows, row = self.req_states, self.req_states.req_id_to_row.get(req_id)
        if row is None:
            return
        if not for_good:
            rows.keep_tokens(self.requests[req_id])
            self.requests[req_id].num_computed_tokens = int(rows.num_computed_tokens_np[row])
        self.sampler.remove_request(row)
        self._model_state.remove(req_id)
        rows.remove(req_id)

    # -- inputs -----------------------------------------------------------------------------------------------

    def _order_batch(self, plan: SchedulerOutput, descriptor: BatchDescriptor | None) -> InputBatch:
        rows = self.req_states
        r, t = rows.num_reqs, plan.total_num_scheduled_tokens
        reqs_padded = descriptor.num_reqs if descriptor and descriptor.num_reqs else r
        tokens_padded = descriptor.num_tokens if descriptor else t
        # 1 batch order is row order
        req_ids = tuple(rows.req_ids[:r])
        num_scheduled = np.array([plan.num_scheduled_tokens[i] for i in req_ids], np.int32)
        batch_rows, num_logits = np.arange(r), np.ones(r, np.int32)
        # the rows' blocks first: that copy runs while the rest is prepared
        self.block_tables.commit(rows.num_computed_tokens_np, r, reqs_padded)
        if r > 0:
            for table, values, padding in (
                (self.idx_mapping_np, batch_rows, NO_ROW),
                (self.num_scheduled_tokens_np, num_scheduled, 0),
                (self.num_logits_np, num_logits, 0),
            ):
                table[:r], table[r:] = values, padding
            # 2 boundaries, lengths, positions, tokens
            prepare_dense_inputs(
                num_scheduled, rows.num_computed_tokens_np, rows.known_token_ids_np, r,
                self.query_start_loc_np, self.seq_lens_np, self.positions_np, self.input_ids_np,
            )  # fmt: skip
            # 3 one logits row per request: behind its last token
            self.cu_num_logits_np[...] = np.minimum(np.arange(len(self.cu_num_logits_np)), r)
            self.logits_indices_np[:r] = self.query_start_loc_np[1 : r + 1] - 1
            self.logits_indices_np[r:] = 0
        return InputBatch(
            req_ids, r, reqs_padded, t, tokens_padded, r, batch_rows, num_scheduled, num_logits, {}
        )  # fmt: skip

    def _prepare_inputs(self, batch: InputBatch) -> InputBatch:
        # 4 tokens that the host has not seen
        rows, r = self.req_states, batch.num_reqs
        if (rows.previous_rows_np[:r] >= 0).any():
            patch_input_ids(rows.previous_rows, self.query_start_loc, rows.last_sampled_tokens, r, self.input_ids)
        return batch

    def _prepare_attn(self, batch: InputBatch) -> None:
        tables, c = self.block_tables, self.config.parallel
        compute_slot_mappings(
            self.idx_mapping, self.query_start_loc, self.positions, tables.block_sizes, tables.slot_mapping_enabled,
            tables.dcp_sharded, c.dcp_size, c.dcp_rank, c.dcp_interleave, batch.num_reqs, tables.input_block_tables,
            tables.slot_mappings,
        )  # fmt: skip

    def _advance_on_host(self, batch: InputBatch) -> None:
        self.req_states.advance(batch.num_scheduled_tokens_np)
