"""What vLLM's model runners built and drew in a step, as the JSON of a recording (`runner_api.trace_vllm` reads it).

Reads by attribute name alone: 0.26 and 0.33 have the same names here. Device tensors are copied to the host at once,
since the buffers behind them are written again in the next step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from runner_api import CapabilityError, ConfigError


def host(value: Any) -> np.ndarray:
    """A NumPy copy of a tensor, an array, or vLLM's pair of buffers (then the device's one)."""
    value = getattr(value, "gpu", value)
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(getattr(value, "dtype", "")) == "torch.bfloat16":  # NumPy has none
            value = value.float()
        value = value.numpy()
    return np.array(value)


# -- the header -----------------------------------------------------------------------------------------------


def meta_of(runner: Any, interface: str, version: str, scenario: str) -> dict[str, Any]:
    """The header. Raises ConfigError where requests are running, CapabilityError for what cannot be recorded."""
    drafts, cache = getattr(runner, "speculative_config", None), getattr(runner, "cache_config", None)
    meta: dict[str, Any] = {
        "source": f"vllm {version}",
        "runner": interface,
        "scenario": scenario,
        "model": str(runner.model_config.model),
        "max_model_len": int(runner.max_model_len),
        "max_num_seqs": int(runner.max_num_reqs),
        "max_num_batched_tokens": int(runner.max_num_tokens),
        "block_size": _block_size(runner, interface),
        "enable_prefix_caching": bool(getattr(cache, "enable_prefix_caching", False)),
        "num_gpu_blocks_override": int(runner.kv_cache_config.num_blocks),
        "recording_format": 1,
    }
    if drafts is not None:
        meta["speculative_config"] = {"num_speculative_tokens": int(drafts.num_speculative_tokens)}
    _check_alone(runner)
    return meta | (_slots_meta(runner) if interface == "V2" else _dense_meta(runner))


def _block_size(runner: Any, interface: str) -> int:
    groups = runner.kv_cache_config.kv_cache_groups
    sizes = {int(group.kv_cache_spec.block_size) for group in groups}
    if len(sizes) != 1 or (interface == "V1" and len(groups) != 1):
        raise CapabilityError(
            "KV cache groups that a recording has no place for", field="kv_cache_groups",
            got=[int(group.kv_cache_spec.block_size) for group in groups],
            expected="one group" if interface == "V1" else "one block size",
        )  # fmt: skip
    return sizes.pop()


def _check_alone(runner: Any) -> None:
    """Refuse what makes the batch of one rank differ from the plan."""
    for name in ("pcp_manager", "adaptive_verification"):
        if getattr(runner, name, None) is not None:
            raise CapabilityError("its batches differ from the plan", field=name, expected="None")
    for name in ("dcp_size", "dcp_world_size"):
        if int(getattr(runner, name, None) or 1) != 1:
            raise CapabilityError("one rank does not see the whole step", field=name, got=getattr(runner, name))


def _slots_meta(runner: Any) -> dict[str, Any]:
    free = [int(row) for row in runner.req_states.free_indices]
    if len(free) != int(runner.max_num_reqs):
        raise ConfigError(
            "requests are running already: their plans were not seen", field="req_states.free_indices",
            got=f"{len(free)} free rows", expected=int(runner.max_num_reqs), hint="Record an engine that is idle",
        )  # fmt: skip
    meta: dict[str, Any] = {"free_rows": free, "free_rows_known": len(free)}
    reach = [int(r) for r in getattr(runner.block_tables, "_sliding_window_reach", None) or ()]
    return meta | ({"window_reach": reach} if any(reach) else {})


def _dense_meta(runner: Any) -> dict[str, Any]:
    if int(runner.input_batch.num_reqs):
        raise ConfigError(
            "requests are running already: their plans were not seen", field="input_batch.num_reqs",
            got=int(runner.input_batch.num_reqs), expected=0, hint="Record an engine that is idle",
        )  # fmt: skip
    if getattr(runner, "speculative_config", None) is not None:
        raise CapabilityError("drafts of a V1 runner are not recorded", field="speculative_config", expected="None")
    return {}


# -- V2: rows -------------------------------------------------------------------------------------------------


def slots_batch(runner: Any, batch: Any, cg_mode: str, tables: Any, slot_mappings: Any) -> dict[str, Any]:
    """`batch`: a V2 InputBatch; `tables`, `slot_mappings`: what prepare_attn gave for it."""
    r, rp = int(batch.num_reqs), int(batch.num_reqs_after_padding)
    t, tp = int(batch.num_tokens), int(batch.num_tokens_after_padding)
    seq_lens = host(batch.seq_lens)[:rp]
    result: dict[str, Any] = {
        "req_ids": list(batch.req_ids),
        "num_reqs": r,
        "num_reqs_padded": rp,
        "num_tokens": t,
        "num_tokens_padded": tp,
        "cg_mode": cg_mode,
        "idx_mapping": host(batch.idx_mapping)[:r].tolist(),
        "query_start_loc": host(batch.query_start_loc)[: rp + 1].tolist(),
        "seq_lens": seq_lens.tolist(),
        "input_ids": host(batch.input_ids)[:t].tolist(),
        "positions": host(batch.positions)[:t].tolist(),
        "logits_indices": host(batch.logits_indices).tolist(),
        "cu_num_logits": host(batch.cu_num_logits).tolist(),
        "num_scheduled_tokens": host(batch.num_scheduled_tokens).tolist(),
        "block_tables": _tables(runner, tables, seq_lens[:r]),
        "slot_mappings": host(slot_mappings)[:, :tp].tolist(),
    }
    if getattr(runner, "speculative_config", None) is not None:
        result["expanded_idx_mapping"] = host(batch.expanded_idx_mapping).tolist()
        result["expanded_local_pos"] = host(batch.expanded_local_pos).tolist()
        result["draft_tokens_state"] = host(runner.req_states.draft_tokens)[result["idx_mapping"]].tolist()
        if batch.num_draft_tokens_per_req is not None:
            result["num_draft_tokens_per_req"] = host(batch.num_draft_tokens_per_req).tolist()
    return result


def _tables(runner: Any, tables: Any, seq_lens: np.ndarray) -> list[list[list[int]]]:
    """[group][row], each row cut to the blocks of its request."""
    cut = []
    for table, size in zip(tables, runner.block_tables.block_sizes, strict=True):
        rows = host(table)
        cut.append([rows[i, : -(-int(n) // int(size))].tolist() for i, n in enumerate(seq_lens)])
    return cut


def slots_sampled(output: Any, drafts: bool) -> dict[str, Any]:
    """`output`: a V2 SamplerOutput."""
    sampled = {
        "token_ids": host(output.sampled_token_ids).tolist(),
        "num_sampled": host(output.num_sampled).tolist(),
    }
    if drafts:
        sampled["num_rejected"] = host(output.num_rejected).tolist()
    return sampled | _logprobs(output)


# -- V1: packed rows ------------------------------------------------------------------------------------------


def dense_batch(runner: Any, plan: Any, logits_indices: Any) -> dict[str, Any]:
    """What a V1 runner holds when `_prepare_inputs` has returned `logits_indices`."""
    r, t = int(runner.input_batch.num_reqs), int(plan.total_num_scheduled_tokens)
    req_ids = list(runner.input_batch.req_ids[:r])
    return {
        "req_ids": req_ids,
        "num_reqs": r,
        "num_tokens": t,
        "query_start_loc": host(runner.query_start_loc)[: r + 1].tolist(),
        "seq_lens": host(runner.seq_lens)[:r].tolist(),
        "input_ids": host(runner.input_ids)[:t].tolist(),
        "positions": host(runner.positions)[:t].tolist(),
        "slot_mapping": host(runner.input_batch.block_table[0].slot_mapping)[:t].tolist(),
        "logits_indices": host(logits_indices).tolist(),
        "num_scheduled_tokens": [int(plan.num_scheduled_tokens[req_id]) for req_id in req_ids],
    }


def dense_sampled(runner: Any, output: Any) -> dict[str, Any]:
    """`output`: a V1 SamplerOutput. Rows whose prefill goes on have a token, which the engine throws away."""
    tokens = host(output.sampled_token_ids)
    thrown_away = np.asarray(runner.discard_request_mask.np[: len(tokens)], bool)
    sampled = {"token_ids": tokens.tolist(), "num_sampled": (~thrown_away).astype(int).tolist()}
    return sampled | _logprobs(output)


def _logprobs(output: Any) -> dict[str, Any]:
    tensors = output.logprobs_tensors
    if tensors is None:
        return {}
    return {
        "logprob_token_ids": host(tensors.logprob_token_ids).tolist(),
        "logprobs": host(tensors.logprobs).tolist(),
        "ranks": host(tensors.selected_token_ranks).tolist(),
    }
