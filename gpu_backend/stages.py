"""The stages of this backend, listed so that a judge can run one alone. Twin: cpu_reference/stages.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gpu_backend.attention import paged_attention
from gpu_backend.block_table import gather_block_tables, map_to_kernel_block_table
from gpu_backend.dense.inputs import patch_input_ids
from gpu_backend.dense.move_rows import move_rows
from gpu_backend.input_batch import (
    combine_sampled_and_draft_tokens,
    count_sampled_and_rejected,
    expand_idx_mapping,
    post_update,
    prepare_pos_seq_lens,
    prepare_prefill_inputs,
    prepare_query_start_loc,
)
from gpu_backend.kv_cache import reshape_and_cache
from gpu_backend.models.witness import witness_attention
from gpu_backend.sample.allowed_token_ids import apply_allowed_token_ids
from gpu_backend.sample.bad_words import apply_bad_words
from gpu_backend.sample.faults import first_faults
from gpu_backend.sample.grammar import apply_grammar_bitmask
from gpu_backend.sample.gumbel import gumbel_sample
from gpu_backend.sample.logit_bias import apply_logit_bias
from gpu_backend.sample.logprob import (
    compute_logprob_stats,
    gather_logprobs,
    select_listed_tokens,
    select_top_tokens,
)
from gpu_backend.sample.min_p import apply_min_p
from gpu_backend.sample.min_tokens import apply_min_tokens
from gpu_backend.sample.penalties import apply_penalties, count_prompt_and_output_tokens, count_sampled_tokens
from gpu_backend.sample.temperature import apply_temperature
from gpu_backend.sample.thinking_budget import apply_thinking_budget
from gpu_backend.sample.top_k_top_p import apply_top_k_top_p
from gpu_backend.sample.trace_replay import apply_trace_replay
from gpu_backend.slot_mapping import compute_dcp_local_seq_lens, compute_slot_mappings
from gpu_backend.staged_write import apply_staged_writes
from gpu_backend.triton_support import resolve_device
from runner_api.stages import StageSet, StageSpec

# Each stage and how many of its last parameters it writes.
_STAGES: tuple[tuple[Callable[..., Any], int], ...] = (
    (apply_staged_writes, 1),
    (prepare_query_start_loc, 1),
    (prepare_prefill_inputs, 2),
    (prepare_pos_seq_lens, 2),
    (expand_idx_mapping, 2),
    (combine_sampled_and_draft_tokens, 2),
    (patch_input_ids, 1),
    (move_rows, 1),
    (gather_block_tables, 1),
    (map_to_kernel_block_table, 1),
    (compute_slot_mappings, 1),
    (compute_dcp_local_seq_lens, 1),
    (reshape_and_cache, 2),
    (paged_attention, 1),
    (witness_attention, 1),
    (apply_grammar_bitmask, 1),
    (apply_allowed_token_ids, 1),
    (apply_logit_bias, 1),
    (apply_min_tokens, 1),
    (count_prompt_and_output_tokens, 2),
    (apply_penalties, 1),
    (apply_bad_words, 1),
    (apply_thinking_budget, 1),
    (apply_temperature, 1),
    (apply_min_p, 1),
    (apply_top_k_top_p, 1),
    (gumbel_sample, 2),
    (apply_trace_replay, 1),
    (first_faults, 1),
    (compute_logprob_stats, 2),
    (select_top_tokens, 1),
    (select_listed_tokens, 1),
    (gather_logprobs, 2),
    (count_sampled_tokens, 1),
    (count_sampled_and_rejected, 2),
    (post_update, 4),
)


def gpu_stages() -> StageSet:
    """Every stage by name; inputs and outputs are read off the functions' own signatures.

    Arrays go to the device that `auto` stands for. uint64 travels as the int64 of the same bits: torch can hardly do
    anything with the former.
    """
    device, _ = resolve_device("auto")
    specs = {}
    for fn, num_outputs in _STAGES:
        names = tuple(inspect.signature(fn).parameters)
        specs[fn.__name__] = StageSpec(fn.__name__, fn, names[:-num_outputs], names[-num_outputs:])
    return StageSet("gpu", specs, lambda array: _to_device(array, device), _to_host)


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array.view(np.int64) if array.dtype == np.uint64 else array).to(device)


def _to_host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
