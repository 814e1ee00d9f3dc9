"""The stages of the reference, listed so that a judge can run one alone. Twin: gpu_backend/stages.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from cpu_reference.attention import paged_attention
from cpu_reference.block_table import gather_block_tables
from cpu_reference.input_batch import (
    combine_sampled_and_draft_tokens,
    count_sampled_and_rejected,
    expand_idx_mapping,
    post_update,
    prepare_pos_seq_lens,
    prepare_prefill_inputs,
    prepare_query_start_loc,
)
from cpu_reference.kv_cache import reshape_and_cache
from cpu_reference.models.witness import witness_attention
from cpu_reference.sample.gumbel import gumbel_sample
from cpu_reference.sample.temperature import apply_temperature
from cpu_reference.slot_mapping import compute_slot_mappings
from cpu_reference.staged_write import apply_staged_writes
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


def cpu_stages() -> StageSet:
    """Every stage by name; inputs and outputs are read off the functions' own signatures."""
    specs = {}
    for fn, num_outputs in _STAGES:
        names = tuple(inspect.signature(fn).parameters)
        specs[fn.__name__] = StageSpec(fn.__name__, fn, names[:-num_outputs], names[-num_outputs:])
    return StageSet("cpu", specs)
