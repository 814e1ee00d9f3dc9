"""Looking into a runner: the records of its steps, the KV of a request, poison, and a fingerprint of its state.

Nothing here takes part in a step, and everything here waits for the device. Twin: cpu_reference/inspection.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runner_api import BatchDescriptor, CUDAGraphMode, ForcedStep, SchedulerOutput, StepRecord

if TYPE_CHECKING:
    from gpu_backend.runner import GpuModelRunner, InputBatch
    from gpu_backend.sample.logprob import LogprobsTensors


def host(tensor: torch.Tensor) -> np.ndarray:
    """A copy on the host, also of what is on the host already; bfloat16 as the float32 of the same value."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().cpu().clone().numpy()


def record_inputs(
    runner: GpuModelRunner,
    plan: SchedulerOutput,
    batch: InputBatch,
    descriptor: BatchDescriptor | None,
    intermediates: dict[str, Any],
) -> StepRecord:
    """What the step was asked and what was built for it; read from the buffers, which serve until the next step."""
    r, rp, t, tp, n = batch.num_reqs, batch.num_reqs_padded, batch.num_tokens, batch.num_tokens_padded, batch.num_logits
    rows = batch.rows_np
    tables = runner.block_tables
    gathered = [host(table[:rp]) for table in tables.input_block_tables]
    return StepRecord(
        plan=plan,
        num_reqs=r,
        num_reqs_padded=rp,
        num_tokens=t,
        num_tokens_padded=tp,
        descriptor=descriptor or BatchDescriptor(CUDAGraphMode.NONE, t, r),
        req_ids=batch.req_ids,
        idx_mapping=host(runner.idx_mapping[:r]),
        query_start_loc=host(runner.query_start_loc[: rp + 1]),
        seq_lens=host(runner.seq_lens[:rp]),
        input_ids=host(runner.input_ids[:t]),
        positions=host(runner.positions[:t]),
        logits_indices=host(runner.logits_indices[:n]),
        cu_num_logits=host(runner.cu_num_logits[: r + 1]),
        expanded_idx_mapping=host(runner.expanded_idx_mapping[:n]),
        expanded_local_pos=host(runner.expanded_local_pos[:n]),
        block_tables=tuple(
            tuple(table[i, : tables.num_blocks_np[g, rows[i]]] for i in range(r)) + tuple(table[r:rp])
            for g, table in enumerate(gathered)
        ),
        slot_mappings=host(tables.slot_mappings[:, :tp]),
        seeds=runner.sampler.seeds_np[rows].copy(),
        draft_token_ids=None if batch.draft_token_ids is None else host(batch.draft_token_ids),
        intermediates={name: host(tensor) for name, tensor in intermediates.items()},
        runner=runner.describe().line(),
    )


def record_outcome(
    runner: GpuModelRunner,
    batch: InputBatch,
    logits: torch.Tensor,
    own: torch.Tensor,
    forced: ForcedStep | None,
    scores: torch.Tensor | None,
    logprobs: LogprobsTensors | None,
    intermediates: dict[str, Any],
) -> dict[str, Any]:
    """The fields of the record that are known after sampling.

    logits: float[L, V], the model's, before anything; own: int64[R, 1+K], what the runner itself took.
    """
    r = batch.num_reqs
    fields: dict[str, Any] = {
        "token_ids": host(own),
        "num_sampled": host(runner.num_sampled[:r]),
        "num_rejected": host(runner.num_rejected[:r]),
        "faults": host(runner.faults[:r]),
        "forced_token_ids": None if forced is None else np.array(forced.token_ids, np.int64),
    }
    if "logits" in runner.config.record:
        fields["logits"] = host(logits)
    if logprobs is not None:
        ids, values, ranks = map(host, logprobs.tensors())
        fields |= {"logprob_token_ids": ids, "logprobs": values, "ranks": ranks}
    if scores is not None:
        fields["intermediates"] = {**intermediates, "scores": host(scores)}
    if "kv" in runner.config.record:
        fields["kv"] = {req_id: request_kv(runner, req_id) for req_id in batch.req_ids}
    return fields


def request_kv(runner: GpuModelRunner, req_id: str) -> np.ndarray:
    """A live request's KV by logical position: [layers, 2, computed, heads, head_size]; for the witness model
    int64[groups, computed, 2]. Places behind a sliding window read 0: their blocks may be somebody else's."""
    blocks, n = _held(runner, req_id)
    position = torch.arange(n, device=runner.device)
    parts = []
    for g, group in enumerate(runner.kv_cache_config.groups):
        size, reach = group.spec.block_size, runner.block_tables.window_reach[g]
        block = blocks[g][position // size]
        for layer in group.layer_names:
            pair = torch.stack([cache[block, position % size] for cache in runner.kv_caches[layer]])
            if reach > 0:
                pair[:, : max(n - reach, 0)] = 0
            parts.append(pair)
    stacked = host(torch.stack(parts))
    return stacked[..., 0, 0].swapaxes(1, 2) if stacked.dtype == np.int64 else stacked


def _held(runner: GpuModelRunner, req_id: str) -> tuple[list[torch.Tensor], int]:
    """A live request's blocks, int64[blocks] per group, and how many of its tokens have KV in them."""
    states, tables = runner.req_states, runner.block_tables
    waiting = runner.waiting_requests.get(req_id)
    if waiting is not None:
        ids, n = waiting.block_ids, waiting.num_computed_tokens
    else:
        row = states.req_id_to_row[req_id]
        ids = [table[row, : tables.num_blocks_np[g, row]].tolist() for g, table in enumerate(tables.block_tables)]
        # the dense layout's device is told with every step, the slots layout's knows best
        counter = states.num_computed_tokens_np if states.clears_rows else states.num_computed_tokens
        n = int(counter[row])
    return [torch.tensor(blocks, dtype=torch.int64, device=runner.device) for blocks in ids], n


def _live_requests(runner: GpuModelRunner) -> list[str]:
    return sorted([*runner.req_states.req_id_to_row, *runner.waiting_requests])


def poison_unused(runner: GpuModelRunner, value: int, keep_blocks: Collection[int]) -> None:
    """Fill what no later step may read: free rows (unless they are kept cleared), places past a row's end, buffers,
    free blocks.

    `keep_blocks`: blocks that belong to no live request but may be handed out again with their contents (a prefix
    cache's). Float caches get NaN, except in the null block, which padding may read.
    """
    states, tables = runner.req_states, runner.block_tables
    # 1 rows: what lies behind a live row's end, and free rows whole
    live_rows = set(states.live_rows())
    for row in range(runner.config.max_num_reqs):
        live = row in live_rows
        if not live and states.clears_rows:
            continue
        for part in (states, tables, runner.sampler):
            widths = part.row_widths(row) if live else {}
            for name, table in part.row_tables().items():
                if not live or name in widths:
                    _fill(table[row : row + 1].reshape(-1)[widths.get(name, 0) :], value)
    if states.clears_rows:
        states.fields.spoilt = True  # from now on they are cleared, and move, whole
    # 2 per-step buffers: each step must write what it reads
    for buffer in (
        runner.input_ids, runner.positions, runner.seq_lens, runner.query_start_loc, runner.idx_mapping,
        runner.cu_num_logits, runner.logits_indices, runner.expanded_idx_mapping, runner.expanded_local_pos,
        runner.num_scheduled_tokens, runner.num_logits, tables.slot_mappings,
        *(ids for ids, *_ in runner.output_ring),
    ):  # fmt: skip
        buffer.fill_(value)
    # 3 gathered tables: rows known to be blank stay so
    for table, kernel_table in zip(
        tables.input_block_tables, runner.attn_metadata_builder.kernel_block_tables, strict=True
    ):
        table[: tables.num_dirty_rows] = value
        if kernel_table is not table:
            kernel_table[...] = value
    _poison_kv(runner, value, set(keep_blocks))


def _fill(values: np.ndarray | torch.Tensor, value: int) -> None:
    floating = values.dtype.kind == "f" if isinstance(values, np.ndarray) else values.is_floating_point()
    values[...] = np.nan if floating else value


def _poison_kv(runner: GpuModelRunner, value: int, keep_blocks: set[int]) -> None:
    held = [_held(runner, req_id) for req_id in _live_requests(runner)]
    for g, group in enumerate(runner.kv_cache_config.groups):
        size = group.spec.block_size
        used = torch.zeros((runner.kv_cache_config.num_blocks, size), dtype=torch.bool, device=runner.device)
        used[[0, *keep_blocks]] = True
        for blocks, n in held:
            position = torch.arange(n, device=runner.device)
            used[blocks[g][position // size], position % size] = True
        for layer in group.layer_names:
            for cache in runner.kv_caches[layer]:
                cache[~used] = value if cache.dtype == torch.int64 else torch.nan


def state_digest(runner: GpuModelRunner) -> dict[str, str]:
    """SHA-256 of each part of the state, over defined elements only: rows, counters, tokens, blocks, KV.

    On the witness model the parts are the twin's, bit for bit."""
    states, waiting = runner.req_states, runner.waiting_requests
    parts: dict[str, Any] = {"rows": sorted(states.req_id_to_row.items()), "free_rows": states.unowned()}
    for req_id in _live_requests(runner):
        if req_id in waiting:
            waiting[req_id].fetch_tokens()
            parts[f"request {req_id}"] = waiting[req_id]
        else:
            row = states.req_id_to_row[req_id]
            parts[f"request {req_id}"] = _defined(states, row)
            parts[f"sampling {req_id}"] = _defined(runner.sampler, row)
        parts[f"blocks {req_id}"] = [ids.tolist() for ids in _held(runner, req_id)[0]]
        parts[f"kv {req_id}"] = request_kv(runner, req_id).tobytes()
    return {
        name: hashlib.sha256(part if isinstance(part, bytes) else repr(part).encode()).hexdigest()
        for name, part in parts.items()
    }


def _defined(part: Any, row: int) -> list[tuple[str, list[Any]]]:
    """What a live row's tables hold, as far as it means something."""
    widths = part.row_widths(row)
    return [
        (name, table[row : row + 1].reshape(-1)[: widths.get(name)].tolist())
        for name, table in sorted(part.row_tables().items())
    ]
