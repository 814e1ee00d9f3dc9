"""Looking into a runner: the records of its steps, the KV of a request, poison, and a fingerprint of its state.

Nothing here takes part in a step. Twin: gpu_backend/inspection.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from runner_api import BatchDescriptor, CUDAGraphMode, ForcedStep, SchedulerOutput, StepRecord

if TYPE_CHECKING:
    from cpu_reference.runner import CpuModelRunner, InputBatch


def record_inputs(
    runner: CpuModelRunner,
    plan: SchedulerOutput,
    batch: InputBatch,
    descriptor: BatchDescriptor | None,
    intermediates: dict[str, Any],
) -> StepRecord:
    """What the step was asked and what was built for it; copies, since the buffers serve every step."""
    r, rp, t, tp, n = batch.num_reqs, batch.num_reqs_padded, batch.num_tokens, batch.num_tokens_padded, batch.num_logits
    rows = runner.idx_mapping[:r]
    tables = runner.block_tables
    return StepRecord(
        plan=plan,
        num_reqs=r,
        num_reqs_padded=rp,
        num_tokens=t,
        num_tokens_padded=tp,
        descriptor=descriptor or BatchDescriptor(CUDAGraphMode.NONE, t, r),
        req_ids=batch.req_ids,
        idx_mapping=rows.copy(),
        query_start_loc=runner.query_start_loc[: rp + 1].copy(),
        seq_lens=runner.seq_lens[:rp].copy(),
        input_ids=runner.input_ids[:t].copy(),
        positions=runner.positions[:t].copy(),
        logits_indices=runner.logits_indices[:n].copy(),
        cu_num_logits=runner.cu_num_logits[: r + 1].copy(),
        expanded_idx_mapping=runner.expanded_idx_mapping[:n].copy(),
        expanded_local_pos=runner.expanded_local_pos[:n].copy(),
        block_tables=tuple(
            tuple(table[i, : tables.num_blocks[g, rows[i]]].copy() for i in range(r))
            + tuple(table[i].copy() for i in range(r, rp))
            for g, table in enumerate(tables.input_block_tables)
        ),
        slot_mappings=tables.slot_mappings[:, :tp].copy(),
        seeds=runner.sampler.seeds[rows].copy(),
        draft_token_ids=runner.req_states.draft_tokens[rows].copy() if runner.config.num_speculative_tokens else None,
        intermediates=intermediates,
        runner=runner.describe().line(),
    )


def record_outcome(
    runner: CpuModelRunner,
    batch: InputBatch,
    logits: np.ndarray,
    own: np.ndarray,
    faults: np.ndarray,
    forced: ForcedStep | None,
    scores: np.ndarray | None,
    logprobs: Any,
) -> dict[str, Any]:
    """The fields of the record that are known after sampling.

    logits: float[L, V] of the model, before anything; own: int64[R, 1+K], what the runner itself took; faults:
    int32[R].
    """
    r = batch.num_reqs
    fields: dict[str, Any] = {
        "token_ids": own,
        "num_sampled": runner.num_sampled[:r].copy(),
        "num_rejected": runner.num_rejected[:r].copy(),
        "faults": faults,
        "forced_token_ids": None if forced is None else np.array(forced.token_ids, np.int64),
    }
    if "logits" in runner.config.record:
        fields["logits"] = logits.copy()
    if logprobs is not None:
        fields |= {"logprob_token_ids": logprobs.token_ids, "logprobs": logprobs.logprobs, "ranks": logprobs.ranks}
    if scores is not None:
        fields["intermediates"] = {**runner.last_step().intermediates, "scores": scores}
    return fields


def request_kv(runner: CpuModelRunner, req_id: str) -> np.ndarray:
    """A live request's KV by logical position: [layers, 2, computed, heads, head_size]; for the witness model
    int64[groups, computed, 2]. Places behind a sliding window read 0: their blocks may be somebody else's."""
    blocks, n = _held(runner, req_id)
    position = np.arange(n)
    parts = []
    for g, group in enumerate(runner.kv_cache_config.groups):
        size, reach = group.spec.block_size, runner.block_tables.window_reach[g]
        block = blocks[g][position // size]
        for layer in group.layer_names:
            pair = np.stack([cache[block, position % size] for cache in runner.kv_caches[layer]])
            if reach > 0:
                pair[:, : max(n - reach, 0)] = 0
            parts.append(pair)
    stacked = np.stack(parts)
    return stacked[..., 0, 0].swapaxes(1, 2) if stacked.dtype == np.int64 else stacked


def _held(runner: CpuModelRunner, req_id: str) -> tuple[list[np.ndarray], int]:
    """A live request's blocks, int32[blocks] per group, and how many of its tokens have KV in them."""
    states, tables = runner.req_states, runner.block_tables
    waiting = runner.waiting_requests.get(req_id)
    if waiting is not None:
        return [np.array(ids, np.int32) for ids in waiting.block_ids], waiting.num_computed_tokens
    row = states.req_id_to_row[req_id]
    blocks = [table[row, : tables.num_blocks[g, row]] for g, table in enumerate(tables.block_tables)]
    return blocks, int(states.num_computed_tokens[row])


def _live_requests(runner: CpuModelRunner) -> list[str]:
    return sorted([*runner.req_states.req_id_to_row, *runner.waiting_requests])


def poison_unused(runner: CpuModelRunner, value: int, keep_blocks: Collection[int]) -> None:
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
    # 2 per-step buffers: each step must write what it reads
    for buffer in (
        runner.input_ids, runner.positions, runner.seq_lens, runner.query_start_loc, runner.idx_mapping,
        runner.cu_num_logits, runner.logits_indices, runner.expanded_idx_mapping, runner.expanded_local_pos,
        tables.slot_mappings,
    ):  # fmt: skip
        buffer[...] = value
    # 3 gathered tables: rows known to be blank stay so
    for table, kernel_table in zip(
        tables.input_block_tables, runner.attn_metadata_builder.kernel_block_tables, strict=True
    ):
        table[: tables.num_dirty_rows] = value
        if kernel_table is not table:
            kernel_table[...] = value
    _poison_kv(runner, value, set(keep_blocks))


def _fill(array: np.ndarray, value: int) -> None:
    array[...] = value if array.dtype.kind in "iu" else np.nan


def _poison_kv(runner: CpuModelRunner, value: int, keep_blocks: set[int]) -> None:
    held = [_held(runner, req_id) for req_id in _live_requests(runner)]
    for g, group in enumerate(runner.kv_cache_config.groups):
        size = group.spec.block_size
        used = np.zeros((runner.kv_cache_config.num_blocks, size), bool)
        used[[0, *keep_blocks]] = True
        for blocks, n in held:
            position = np.arange(n)
            used[blocks[g][position // size], position % size] = True
        for layer in group.layer_names:
            for cache in runner.kv_caches[layer]:
                cache[~used] = value if cache.dtype == np.int64 else np.nan


def state_digest(runner: CpuModelRunner) -> dict[str, str]:
    """SHA-256 of each part of the state, over defined elements only: rows, counters, tokens, blocks, KV."""
    states, waiting = runner.req_states, runner.waiting_requests
    parts: dict[str, Any] = {"rows": sorted(states.req_id_to_row.items()), "free_rows": states.unowned()}
    for req_id in _live_requests(runner):
        if req_id in waiting:
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
