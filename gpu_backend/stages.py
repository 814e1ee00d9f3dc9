"""The stages of this backend, listed so that a judge can run one alone. Twin: cpu_reference/stages.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gpu_backend.attention import paged_attention
from gpu_backend.block_table import gather_block_tables
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
from gpu_backend.sample.gumbel import gumbel_sample
from gpu_backend.sample.temperature import apply_temperature
from gpu_backend.slot_mapping import compute_slot_mappings
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
    (gather_block_tables, 1),
    (compute_slot_mappings, 1),
    (reshape_and_cache, 2),
    (paged_attention, 1),
    (witness_attention, 1),
    (apply_temperature, 1),
    (gumbel_sample, 1),
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
