"""vLLM's layout and sampling kernels as stages of ours, so that `conformance.stage_laws` can judge them.

Each function gets a stage's parameters as tensors, calls what vLLM calls in that place, and leaves the outputs where
the stage leaves them. What vLLM has nothing for is in `NOT_THEIRS`, with the reason: it is not counted, neither for nor
against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gpu_backend.triton_support import triton
from peers.harness import Modules
from peers.vllm_package import (
    BAD_WORDS,
    BIAS,
    BUFFERS,
    CONTEXT_PARALLEL,
    GRAMMAR,
    GUMBEL,
    INPUTS,
    MIN_P,
    PENALTIES,
    TABLES,
    TOP_K_TOP_P,
    TRACE,
    VERSION,
)
from runner_api import Capability, RunnerInfo, StageAdapter, StageSet, StageSpec, load_stages

Tensor = torch.Tensor
I32, I64 = torch.int32, torch.int64

# -- inputs ---------------------------------------------------------------------------------------------------------


def apply_staged_writes(m: Modules, a: Any) -> None:
    table = m[BUFFERS].StagedWriteTensor(tuple(a.base.shape), a.base.dtype, "cpu")
    table.gpu.copy_(a.base)
    ends = a.cu_lens.tolist()
    for i, start in enumerate([0, *ends[:-1]][: a.num_writes]):
        table.stage_write(int(a.indices[i]), int(a.starts[i]), a.contents[start : ends[i]].tolist())
    table.apply_write()
    a.base.copy_(table.gpu)


def prepare_prefill_inputs(m: Modules, a: Any) -> None:
    m[INPUTS].prepare_prefill_inputs(
        a.input_ids, a.next_prefill_tokens, a.idx_mapping[: a.num_reqs], a.query_start_loc, a.all_token_ids,
        a.prefill_len, a.num_computed_tokens,
    )  # fmt: skip


def prepare_pos_seq_lens(m: Modules, a: Any) -> None:
    m[INPUTS].prepare_pos_seq_lens(
        a.idx_mapping[: a.num_reqs], a.query_start_loc, a.num_computed_tokens, a.positions, a.seq_lens
    )


def expand_idx_mapping(m: Modules, a: Any) -> None:
    starts = a.cu_num_logits[: a.num_reqs + 1]
    total, most = int(starts[-1]), int(starts.diff().max())
    rows, local = m[INPUTS].expand_idx_mapping(a.idx_mapping[: a.num_reqs], total, starts, most)
    a.expanded_idx_mapping[:total], a.expanded_local_pos[:total] = rows, local


def combine_sampled_and_draft_tokens(m: Modules, a: Any) -> None:
    total = int(a.cu_num_logits[a.num_reqs])
    a.logits_indices[:total] = m[INPUTS].combine_sampled_and_draft_tokens(
        a.input_ids, a.idx_mapping[: a.num_reqs], a.last_sampled_tokens, a.query_start_loc, a.seq_lens, a.prefill_len,
        a.draft_tokens, a.cu_num_logits, total,
    )  # fmt: skip


# -- block tables and slots -----------------------------------------------------------------------------------------


def _tables(m: Modules, a: Any, num_tokens: int, **more: Any) -> Any:
    """vLLM's BlockTables, holding the rows of a stage's tables."""
    widths = [table.shape[1] for table in a.block_tables]
    tables = m[TABLES].BlockTables(a.block_sizes, len(a.block_tables[0]), num_tokens, widths, "cpu", **more)
    for table, values in zip(tables.block_tables, a.block_tables, strict=True):
        table.gpu.copy_(values)
    return tables


def gather_block_tables(m: Modules, a: Any) -> None:
    tables = _tables(m, a, 1, sliding_window_reach=list(a.window_reach))
    tables.num_blocks.np[:] = a.num_blocks
    tables.num_blocks.copy_to_uva()
    for theirs, ours in zip(tables.input_block_tables, a.input_block_tables, strict=True):
        theirs.copy_(ours)
    tables.gather_block_tables(a.idx_mapping[: a.num_reqs], a.num_rows, num_computed_tokens=a.num_computed_tokens)
    for theirs, ours in zip(tables.input_block_tables, a.input_block_tables, strict=True):
        ours.copy_(theirs)


def compute_slot_mappings(m: Modules, a: Any) -> None:
    tables = _tables(
        m, a, a.slot_mappings.shape[1], cp_size=a.dcp_size, cp_rank=a.dcp_rank, cp_interleave=a.dcp_interleave,
        slot_mapping_enabled=list(a.slot_mapping_enabled), dcp_sharded=list(a.dcp_sharded),
    )  # fmt: skip
    tables.slot_mappings.copy_(a.slot_mappings)
    rows = a.idx_mapping[: a.num_reqs]
    tables.compute_slot_mappings(rows, a.query_start_loc, a.positions, a.slot_mappings.shape[1])
    a.slot_mappings.copy_(tables.slot_mappings)


def compute_dcp_local_seq_lens(m: Modules, a: Any) -> None:
    m[CONTEXT_PARALLEL].prepare_dcp_local_seq_lens(
        a.dcp_local_seq_lens, a.seq_lens, a.num_reqs, a.dcp_size, a.dcp_rank, a.dcp_interleave
    )


# -- logits ---------------------------------------------------------------------------------------------------------


@contextmanager
def _counted(a: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits, their rows), float32[L, V] and int64[L]. vLLM has no logits row without a request: it gets row 0 for
    the call and its logits back afterwards."""
    logits, rows = a.logits[: a.num_logits], a.expanded_idx_mapping[: a.num_logits]
    nobody = rows < 0
    kept = logits[nobody].clone()
    yield logits, rows.clamp(min=0)
    logits[nobody] = kept


def apply_grammar_bitmask(m: Modules, a: Any) -> None:
    """Every logits row as a request of one row, those with a mask in a list."""
    module, logits = m[GRAMMAR], a.logits[: a.num_logits]
    rows = torch.nonzero(a.mask_rows[: a.num_logits] >= 0).view(-1).to(I32)
    bitmask = a.bitmask[a.mask_rows[rows.long()].long()].contiguous()
    starts, block = torch.arange(a.num_logits + 1, dtype=I32), module.GRAMMAR_BITMASK_BLOCK_SIZE
    vocab_size = logits.shape[1]
    module._apply_grammar_bitmask_kernel[(len(rows), triton.cdiv(vocab_size, block))](
        logits, logits.stride(0), rows, starts, bitmask, bitmask.stride(0), vocab_size, MASK_STRIDE=1, BLOCK_SIZE=block
    )


def _bias_kernel(m: Modules, a: Any, **given: Tensor) -> None:
    """vLLM's one kernel for allowed tokens, bias and minimum length; what is not given is empty."""
    with _counted(a) as (logits, rows):
        n = int(rows.max()) + 1
        none, empty = torch.zeros(n, dtype=I32), torch.zeros((n, 1), dtype=I32)
        g = SimpleNamespace(**(_NO_BIAS(none, empty) | given))
        positions = given.get("positions", torch.zeros(a.num_logits, dtype=I64))[: a.num_logits]
        m[BIAS].apply_logit_bias(
            logits, rows, positions, g.num_allowed, g.allowed, g.num_bias, g.bias_ids, g.bias, g.min_len, g.num_stop,
            g.restores, g.stop_ids, bool(g.restores.any()),
        )  # fmt: skip


def _NO_BIAS(none: Tensor, empty: Tensor) -> dict[str, Tensor]:
    counts = dict.fromkeys(("num_allowed", "num_bias", "num_stop", "min_len", "restores"), none)
    return counts | {"allowed": empty, "bias_ids": empty, "stop_ids": empty, "bias": empty.float()}


def apply_allowed_token_ids(m: Modules, a: Any) -> None:
    """Bits become the lists of ids that vLLM keeps."""
    width = a.logits.shape[1]
    bits = np.unpackbits(a.allowed_bitmask.numpy().view(np.uint8), axis=1, bitorder="little")[:, :width].astype(bool)
    ids = np.zeros(bits.shape, np.int32)
    for row, allowed in enumerate(bits):
        ids[row, : allowed.sum()] = np.flatnonzero(allowed)
    counts = torch.from_numpy(bits.sum(axis=1).astype(np.int32)) * (a.restricted != 0)
    _bias_kernel(m, a, num_allowed=counts.to(I32), allowed=torch.from_numpy(ids))


def apply_logit_bias(m: Modules, a: Any) -> None:
    _bias_kernel(m, a, num_bias=a.num_bias, bias_ids=a.bias_token_ids, bias=a.bias)


def apply_min_tokens(m: Modules, a: Any) -> None:
    _bias_kernel(
        m, a, positions=a.positions, min_len=a.min_len, num_stop=a.num_stop, stop_ids=a.stop_token_ids,
        restores=a.restores_stops,
    )  # fmt: skip


def count_prompt_and_output_tokens(m: Modules, a: Any) -> None:
    rows = a.rows[: a.num_rows]
    m[PENALTIES].bincount(
        rows, a.all_token_ids, a.prompt_len, a.total_len, a.prompt_bitmask, a.output_counts,
        int(a.total_len[rows].max()),
    )  # fmt: skip


def apply_penalties(m: Modules, a: Any) -> None:
    with _counted(a) as (logits, rows):
        m[PENALTIES].apply_penalties(
            logits, rows, a.input_ids[: a.num_logits], a.expanded_local_pos[: a.num_logits], a.repetition, a.frequency,
            a.presence, a.prompt_bitmask, a.output_counts,
        )  # fmt: skip


def apply_bad_words(m: Modules, a: Any) -> None:
    """Words by where they start, and each logits row by its place behind the last known token."""
    starts = torch.cat([torch.zeros((len(a.bad_word_ends), 1), dtype=I32), a.bad_word_ends], dim=1)
    with _counted(a) as (logits, rows):
        local = (a.positions[: a.num_logits] + 1 - a.total_len[rows]).clamp(min=0).to(I32)
        m[BAD_WORDS].apply_bad_words(
            logits, rows, a.bad_word_tokens, starts, a.num_bad_words, a.all_token_ids, a.prompt_len, a.total_len,
            a.input_ids[: a.num_logits], local, int(a.num_bad_words.max()),
        )  # fmt: skip


def apply_temperature(m: Modules, a: Any) -> None:
    with _counted(a) as (logits, rows):
        m[GUMBEL].apply_temperature(logits, rows, a.temperature)


def apply_min_p(m: Modules, a: Any) -> None:
    with _counted(a) as (logits, rows):
        m[MIN_P].apply_min_p(logits, rows, a.min_p)


def apply_top_k_top_p(m: Modules, a: Any) -> None:
    m[TOP_K_TOP_P]._TRITON_BUFFER_CACHE.clear()
    with _counted(a) as (logits, rows):
        logits.copy_(m[TOP_K_TOP_P].apply_top_k_top_p_triton(logits.clone(), a.top_k[rows], a.top_p[rows]))


def gumbel_sample(m: Modules, a: Any) -> None:
    n = a.num_logits
    rows = a.expanded_idx_mapping[:n]
    drawn = m[GUMBEL].gumbel_sample(
        a.logits[:n].clone(), rows.clamp(min=0), a.temperature, a.seeds, a.positions[:n], apply_temperature=False,
        is_drafting=False,
    )  # fmt: skip
    a.sampled[:n] = torch.where(rows >= 0, drawn, a.sampled[:n])


# -- after the draw -------------------------------------------------------------------------------------------------


def apply_trace_replay(m: Modules, a: Any) -> None:
    """vLLM counts a request's tokens by row, our stage by batch index."""
    rows = a.idx_mapping[: a.num_reqs]
    real = rows >= 0
    total = torch.zeros(len(a.prompt_len), dtype=I32)
    total[rows[real]] = a.seq_lens[: a.num_reqs][real]
    drawn = a.sampled_token_ids[: a.num_reqs, 0].contiguous()
    m[TRACE].apply_trace_tokens(drawn, rows, a.trace_token_ids, a.trace_len, total, a.prompt_len)
    a.sampled_token_ids[: a.num_reqs, 0] = drawn


def count_sampled_and_rejected(m: Modules, a: Any) -> None:
    n = a.num_reqs
    sampled, rejected = m[INPUTS].get_num_sampled_and_rejected(
        a.num_sampled[:n].contiguous(), a.seq_lens[:n], a.cu_num_logits, a.idx_mapping[:n], a.prefill_len
    )
    a.num_sampled[:n], a.num_rejected[:n] = sampled, rejected


def count_sampled_tokens(m: Modules, a: Any) -> None:
    """Part of vLLM's post_update, whose other tables are thrown away here."""
    n, rows = a.num_reqs, len(a.output_counts)
    zeros = torch.zeros(rows, dtype=I32)
    history = torch.zeros((rows, a.sampled_token_ids.shape[1]), dtype=I32)
    m[INPUTS].post_update(
        a.idx_mapping[:n], zeros.clone(), torch.zeros((rows, 1), dtype=I64), a.output_counts, a.sampled_token_ids[:n],
        a.num_sampled[:n], zeros[:n].clone(), None, history, zeros.clone(),
    )  # fmt: skip


def post_update(m: Modules, a: Any) -> None:
    n = a.num_reqs
    m[INPUTS].post_update(
        a.idx_mapping[:n], a.num_computed_tokens, a.last_sampled_tokens, None, a.sampled_token_ids[:n],
        a.num_sampled[:n], a.num_rejected[:n], a.query_start_loc, a.all_token_ids, a.total_len,
    )  # fmt: skip


STAGES: tuple[Callable[[Modules, Any], None], ...] = (
    apply_staged_writes, prepare_prefill_inputs, prepare_pos_seq_lens, expand_idx_mapping,
    combine_sampled_and_draft_tokens, gather_block_tables, compute_slot_mappings, compute_dcp_local_seq_lens,
    apply_grammar_bitmask, apply_allowed_token_ids, apply_logit_bias, apply_min_tokens, count_prompt_and_output_tokens,
    apply_penalties, apply_bad_words, apply_temperature, apply_min_p, apply_top_k_top_p, gumbel_sample,
    apply_trace_replay, count_sampled_and_rejected, count_sampled_tokens, post_update,
)  # fmt: skip


def vllm_stages(modules: Modules) -> StageSet:
    """The stages above with the parameters of ours. modules: the package's files, as `peers.loader.loaded` gives."""
    ours = load_stages("cpu").stages

    def spec(fn: Callable[[Modules, Any], None]) -> StageSpec:
        def call(**arrays: Any) -> None:
            fn(modules, SimpleNamespace(**arrays))

        like = ours[fn.__name__]
        return StageSpec(fn.__name__, call, like.inputs, like.outputs)

    return StageSet(f"vllm {VERSION}", {fn.__name__: spec(fn) for fn in STAGES}, torch.from_numpy, lambda t: t.numpy())


def vllm_adapter(modules: Modules) -> StageAdapter:
    """A runner of stages alone, as `modelrunner check` takes it."""
    info = RunnerInfo(
        "vllm-stages", f"{__name__}.vllm_adapter", VERSION, "cpu (interpreted)", "float32", "slots", "murmur3",
        frozenset({Capability.STAGES, Capability.FLOAT32}),
    )  # fmt: skip
    return StageAdapter(info, partial(vllm_stages, modules))
