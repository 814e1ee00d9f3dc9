"""The NumPy model runner. `execute_model` and `sample_tokens` are the stages in call order, and little else.

Twin: gpu_backend/runner.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import runner_api
from cpu_reference import inspection
from cpu_reference.async_output import AsyncOutput
from cpu_reference.attn_metadata import AttentionMetadata, AttentionMetadataBuilder
from cpu_reference.block_table import BlockTables, gather_block_tables
from cpu_reference.input_batch import (
    combine_sampled_and_draft_tokens,
    count_sampled_and_rejected,
    expand_idx_mapping,
    post_update,
    prepare_pos_seq_lens,
    prepare_prefill_inputs,
    prepare_query_start_loc,
    sort_batch_req_ids,
)
from cpu_reference.kv_cache import allocate_kv_cache, copy_blocks, kernel_caches, zero_blocks
from cpu_reference.models import build_model
from cpu_reference.request_state import RequestState
from cpu_reference.sample.faults import first_faults
from cpu_reference.sample.grammar import apply_grammar_bitmask, grammar_mask_rows
from cpu_reference.sample.logits_rows import LogitsRows
from cpu_reference.sample.sampler import Sampler
from cpu_reference.slot_mapping import compute_slot_mappings
from cpu_reference.stages import cpu_stages
from runner_api import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    BatchDescriptor,
    CallOrderError,
    Capability,
    CapabilityError,
    CUDAGraphMode,
    DefaultModelState,
    DraftTokenIds,
    ForcedStep,
    GrammarOutput,
    IntermediateTensors,
    KVCacheConfig,
    KVCacheSpec,
    LogprobsLists,
    ModelRunnerOutput,
    ModelState,
    PlanValidator,
    RunnerConfig,
    RunnerInfo,
    SchedulerOutput,
    StepRecord,
)
from runner_api.logits_processors import check_params
from runner_api.selection import LayoutDecision, resolve_layout
from runner_api.step_validation import (
    check_descriptor,
    check_forced,
    check_grammar,
    check_kv_cache_config,
    check_model_reach,
    check_poison,
)

CAPABILITIES = frozenset(
    {
        Capability.GENERATE, Capability.STEP_RECORD, Capability.PLAN_VALIDATION, Capability.STAGES,
        Capability.RECORD_LOGITS, Capability.RECORD_KV, Capability.POISON,
        Capability.STATE_DIGEST, Capability.SEEDED_SAMPLING, Capability.TOP_K, Capability.TOP_P, Capability.MIN_P,
        Capability.LOGPROBS, Capability.PROMPT_LOGPROBS, Capability.PENALTIES, Capability.LOGIT_BIAS,
        Capability.ALLOWED_TOKEN_IDS, Capability.MIN_TOKENS, Capability.BAD_WORDS, Capability.GRAMMAR,
        Capability.THINKING_BUDGET, Capability.TRACE_REPLAY, Capability.LOGITS_PROCESSORS, Capability.SAMPLE_FAULTS,
        Capability.FORCED_STEP, Capability.PADDED_BATCH, Capability.MULTI_GROUP, Capability.SLIDING_WINDOW,
        Capability.DRAFT_LAYOUT, Capability.ASYNC_OUTPUT, Capability.FLOAT64, Capability.FLOAT32,
    }
)  # fmt: skip

DEFAULT_MAX_CONCURRENT_BATCHES = RunnerConfig().max_concurrent_batches


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's inputs: host facts and views of the persistent buffers. R requests, L logits rows."""

    req_ids: tuple[str, ...]
    num_reqs: int
    num_reqs_padded: int
    num_tokens: int
    num_tokens_padded: int
    num_logits: int
    num_scheduled_tokens: np.ndarray  # int32[R]
    attn_metadata: dict[str, AttentionMetadata]


class CpuModelRunner:
    """See `runner_api.protocol.ModelRunner` for what each method promises."""

    stages = staticmethod(cpu_stages)
    LAYOUTS: tuple[str, ...] = ("slots",)  # what this class is; `cpu_reference.layouts` chooses between classes
    capabilities = CAPABILITIES

    def __init__(self, config: RunnerConfig, selection: LayoutDecision | None = None) -> None:
        self.selection = selection or resolve_layout("cpu", config, self.LAYOUTS)
        if config.device not in ("auto", "cpu"):
            raise CapabilityError("the cpu runner runs on the CPU", field="device", got=config.device, expected="'cpu'")
        if config.dtype not in ("float32", "float64"):
            raise CapabilityError(
                "NumPy has no fast arithmetic of this kind", field="dtype", got=config.dtype,
                expected="'float32' or 'float64'",
            )  # fmt: skip
        if config.parallel.world_size != 1:
            raise CapabilityError(
                "several ranks are not offered", field="parallel", got=config.parallel, expected="one rank"
            )
        self.config = config
        self.notes: tuple[str, ...] = ()
        if config.max_concurrent_batches != DEFAULT_MAX_CONCURRENT_BATCHES:
            self.notes = ("max_concurrent_batches changes nothing: an output is complete at once",)
        self._model: Any = None
        self._model_state: ModelState = DefaultModelState()
        self._ready = False
        self._pending: tuple[InputBatch, np.ndarray] | None = None
        self._record: StepRecord | None = None

    def describe(self) -> RunnerInfo:
        c = self.config
        path = f"{type(self).__module__}.{type(self).__qualname__}"
        return RunnerInfo(
            "cpu", path, runner_api.__version__, "cpu", c.dtype, self.selection.layout, c.noise,
            self.capabilities, self.notes, self.selection,
        )  # fmt: skip

    # -- start-up ---------------------------------------------------------------------------------------------

    def load_model(self, model: Any) -> None:
        if self._ready:
            raise CallOrderError(
                "the KV cache was made for the model at hand", field="load_model", hint="Build a new runner"
            )
        built = build_model(model, self.config.dtype, self.config.parallel)
        check_model_reach(self.config, getattr(built, "max_position_embeddings", None))
        self._model = built
        self._model_state = getattr(built, "model_state", None) or DefaultModelState()

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        if self._model is None:
            raise CallOrderError("no model is loaded", field="get_kv_cache_specs", hint="Call load_model first")
        return self._model.kv_cache_specs()

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        c, specs = self.config, self.get_kv_cache_specs()
        if self._pending is not None:
            raise CallOrderError(
                "a step waits for its tokens", field="initialize_kv_cache", hint="Call sample_tokens first"
            )
        reach = check_kv_cache_config(c, kv_cache_config, specs)
        n, t, k = c.max_num_reqs, c.max_num_batched_tokens, c.num_speculative_tokens
        self.kv_cache_config = kv_cache_config
        self.kv_caches = allocate_kv_cache(kv_cache_config)
        self.validator = PlanValidator(
            c, kv_cache_config, self._model.vocab_size, self.capabilities, self.selection.layout
        )
        self._make_rows(kv_cache_config, reach)
        self.attn_metadata_builder = AttentionMetadataBuilder(kv_cache_config, self.block_tables.input_block_tables)
        # Per-step buffers, at addresses that never change.
        self.idx_mapping = np.zeros(n, np.int64)  # int64[N]
        self.query_start_loc = np.zeros(n + 1, np.int32)  # int32[N+1]
        self.seq_lens = np.zeros(n, np.int32)  # int32[N]
        self.input_ids = np.zeros(t, np.int32)  # int32[T]
        self.positions = np.zeros(t, np.int64)  # int64[T]
        self.cu_num_logits = np.zeros(n + 1, np.int32)  # int32[N+1]
        self.logits_indices = np.zeros(n * (1 + k), np.int64)  # int64[N*(1+K)]
        self.expanded_idx_mapping = np.zeros(n * (1 + k), np.int64)  # int64[N*(1+K)]
        self.expanded_local_pos = np.zeros(n * (1 + k), np.int32)  # int32[N*(1+K)]
        self.num_sampled = np.zeros(n, np.int32)  # int32[N]
        self.num_rejected = np.zeros(n, np.int32)  # int32[N]
        self._record = None
        self._ready = True

    def capture_graphs(self) -> tuple[BatchDescriptor, ...]:
        return ()

    # -- one step ---------------------------------------------------------------------------------------------

    def execute_model(
        self,
        plan: SchedulerOutput,
        *,
        descriptor: BatchDescriptor | None = None,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> ModelRunnerOutput | IntermediateTensors | None:
        # 1 refuse what is impossible, before anything changes
        self._check_call(intermediate_tensors)
        self.validator.check(plan)
        for new in plan.scheduled_new_reqs:
            check_params(self.sampler.custom.processors, new.sampling_params, new.req_id)
        check_descriptor(self.config, plan, descriptor)
        self.validator.commit(plan)
        self.end_of_part("plan")
        # 2 apply the plan to the rows
        self._update_states(plan)
        self.end_of_part("rows")
        if plan.total_num_scheduled_tokens == 0:
            self._record = StepRecord(plan, runner=self.describe().line())
            return EMPTY_MODEL_RUNNER_OUTPUT
        # 3 order the batch and build its inputs
        batch = self._prepare_inputs(plan, descriptor)
        self.end_of_part("inputs")
        # 4 block tables and slots
        self._prepare_attn(batch)
        self.end_of_part("tables")
        # 5 what attention must know, once per group
        batch = replace(batch, attn_metadata=self._build_attn_metadata(batch, descriptor))
        self.end_of_part("metadata")
        # 6 run the model
        intermediates: dict[str, np.ndarray] | None = {} if "intermediates" in self.config.record else None
        tp = batch.num_tokens_padded
        hidden_states = self._model.forward(
            self.input_ids[:tp], self.positions[:tp], kernel_caches(self.kv_caches, self.kv_cache_config),
            batch.attn_metadata, intermediates, **self._model_state.prepare_inputs(batch),
        )  # fmt: skip
        self.end_of_part("forward")
        self._record = inspection.record_inputs(self, plan, batch, descriptor, intermediates or {})
        self.end_of_part("record")
        self._pending = (batch, hidden_states)
        return None

    def sample_tokens(self, grammar: GrammarOutput | None = None, *, forced: ForcedStep | None = None) -> AsyncOutput:
        if self._pending is None:
            raise CallOrderError(
                "no step is waiting for its tokens", field="sample_tokens", hint="Call execute_model with a plan first"
            )
        batch, hidden_states = self._pending
        r, num_logits = batch.num_reqs, batch.num_logits
        check_grammar(self.config, self._model.vocab_size, batch.req_ids, grammar)
        check_forced(
            self.config, self._model.vocab_size, self.validator.requests, batch.req_ids,
            np.diff(self.cu_num_logits[: r + 1]), forced,
        )  # fmt: skip
        # 1 logits of the rows that get them
        rows = self._logits_rows(batch)
        logits = self._model.compute_logits(hidden_states[self.logits_indices[:num_logits]])
        if forced is not None and forced.logits is not None:
            logits = np.asarray(forced.logits).astype(logits.dtype)
        # 2 what grammars allow, by request
        allowed = logits
        if grammar is not None:
            mask_rows = grammar_mask_rows(
                batch.req_ids, self.cu_num_logits, grammar, self.config.num_speculative_tokens
            )
            allowed = logits.copy()
            apply_grammar_bitmask(mask_rows, grammar.grammar_bitmask, num_logits, allowed)
        # 3 draw
        drawn = self.sampler.sample(allowed, rows, keep_scores="logits" in self.config.record)
        token_ids, own = self._outcome(batch, drawn.sampled, forced)
        # 4 unfinished prefills sample nothing
        count_sampled_and_rejected(
            self.idx_mapping, self.seq_lens, self.req_states.prefill_len, self.cu_num_logits, r,
            self.num_sampled, self.num_rejected,
        )  # fmt: skip
        # 5 rows without a winner
        faults = np.zeros(r, np.int32)
        if drawn.faults.any():
            first_faults(self.cu_num_logits, self.num_sampled, drawn.faults, r, faults)
        # 6 log probabilities of what was taken, and of prompts
        taken = np.where(self.num_sampled[:r] > 0, token_ids[:, 0], own[:, 0])
        logprobs = self.sampler.logprobs(rows, taken, allowed, drawn.processed)
        prompt_logprobs = self._prompt_logprobs(batch, hidden_states)
        self.end_of_part("sample")
        # 7 the copy out starts before the state changes
        output = AsyncOutput(batch.req_ids, token_ids, self.num_sampled[:r], faults, logprobs, prompt_logprobs)
        self.end_of_part("advance")
        outcome = inspection.record_outcome(self, batch, logits, own, faults, forced, drawn.scores, logprobs)
        self._record = replace(self.last_step(), **outcome)
        self.end_of_part("record")
        # 8 advance the rows
        post_update(
            self.idx_mapping, self.query_start_loc, token_ids, self.num_sampled, self.num_rejected, r,
            self.req_states.last_sampled_tokens, self.req_states.total_len, self.req_states.all_token_ids,
            self.req_states.num_computed_tokens,
        )  # fmt: skip
        if forced is not None and forced.draft_token_ids is not None:
            self.req_states.draft_tokens[self.idx_mapping[:r]] = forced.draft_token_ids
        if "kv" in self.config.record:
            kv = {req_id: inspection.request_kv(self, req_id) for req_id in batch.req_ids}
            self._record = replace(self._record, kv=kv)
        self._model_state.postprocess(batch, self.num_sampled[:r])
        self.validator.settle(batch.req_ids, self.num_sampled[:r])
        self._pending = None
        # 9 tell the sampler what was taken; last, since a user's own code may listen
        self.sampler.observe(self.idx_mapping[:r], token_ids, self.num_sampled[:r])
        self.end_of_part("advance")
        return output

    def pool(self) -> AsyncOutput:
        raise CapabilityError("pooling is not offered", field="pool")

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return None

    def last_step(self) -> StepRecord:
        if self._record is None:
            raise CallOrderError("no step has run", field="last_step", hint="Call execute_model first")
        return self._record

    def poison_unused(self, value: int = -77, keep_blocks: Collection[int] = ()) -> None:
        if not self._ready or self._pending is not None:
            raise CallOrderError("only between two steps", field="poison_unused", hint="Call sample_tokens first")
        check_poison(self.kv_cache_config, value, keep_blocks)
        inspection.poison_unused(self, value, keep_blocks)

    def state_digest(self) -> Mapping[str, str]:
        if not self._ready:
            raise CallOrderError("no KV cache", field="state_digest", hint="Call initialize_kv_cache first")
        return inspection.state_digest(self)

    def table_traffic(self) -> Mapping[str, int]:
        """See `runner_api.loader.table_traffic`."""
        return self.block_tables.traffic() if self._ready else {}

    def end_of_part(self, name: str) -> None:
        """A part of the step ends here. Whoever measures puts a listener in place of this method, see
        `runner_api.loader.listen_to_parts`."""

    def shutdown(self) -> None:
        self._ready = False
        self._pending = None
        self.kv_caches = {}

    # -- the rows ---------------------------------------------------------------------------------------------

    def _make_rows(self, kv_cache_config: KVCacheConfig, reach: Sequence[int]) -> None:
        """Everything that is kept by row. reach: int[G], how far each group's window reads."""
        c = self.config
        n, t, k = c.max_num_reqs, c.max_num_batched_tokens, c.num_speculative_tokens
        self.req_states = RequestState(n, c.max_model_len, k, c.initial_free_rows)
        self.block_tables = BlockTables(kv_cache_config, n, t, c.max_model_len, reach)
        self.sampler = Sampler(c, self._model.vocab_size, self.req_states)

    @property
    def waiting_requests(self) -> Mapping[str, Any]:
        """Live requests without a row: here every one has one."""
        return {}

    # -- the parts of execute_model ---------------------------------------------------------------------------

    def _check_call(self, intermediate_tensors: IntermediateTensors | None) -> None:
        if not self._ready:
            raise CallOrderError(
                "the runner has no KV cache",
                field="execute_model",
                hint="Call load_model and initialize_kv_cache first",
            )
        if self._pending is not None:
            raise CallOrderError(
                "the previous step has not been sampled", field="execute_model", hint="Call sample_tokens first"
            )
        if intermediate_tensors is not None:
            raise CapabilityError("pipeline stages are not offered", field="intermediate_tensors")

    def _update_states(self, plan: SchedulerOutput) -> None:
        states, tables = self.req_states, self.block_tables
        # 1 finished and preempted requests leave their rows
        states.finish_requests(plan.finished_req_ids | plan.preempted_req_ids, before=self._leave)
        # 2 new ones take rows
        for new in plan.scheduled_new_reqs:
            row = states.add_request(new.req_id, new.prompt_len, new.prefill_token_ids, new.num_computed_tokens)
            tables.append_block_ids(row, new.block_ids, overwrite=True)
            self.sampler.add_request(row, new)
            self._model_state.add(row, new)
        # 3 the others get their new blocks; the device's own counter is never written from the plan
        cached = plan.scheduled_cached_reqs
        for req_id, computed, block_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            row = states.req_id_to_row[req_id]
            states.num_computed_tokens_np[row] = computed
            if block_ids is not None:
                tables.append_block_ids(row, block_ids, overwrite=False)
        # 4 staged rows are written
        states.apply_staged_writes()
        tables.apply_staged_writes()
        self.sampler.apply_staged_writes()
        # 5 blank fresh blocks, then copy shared ones
        self._change_blocks(plan)

    def _change_blocks(self, plan: SchedulerOutput) -> None:
        if plan.new_block_ids_to_zero:
            zero_blocks(self.kv_caches.values(), plan.new_block_ids_to_zero)
        if plan.kv_cache_block_copies:
            copy_blocks(self.kv_caches.values(), plan.kv_cache_block_copies)

    def _leave(self, req_id: str) -> None:
        self.sampler.remove_request(self.req_states.req_id_to_row[req_id])
        self.sampler.forget_request(req_id)
        self._model_state.remove(req_id)

    def _prepare_inputs(self, plan: SchedulerOutput, descriptor: BatchDescriptor | None) -> InputBatch:
        states = self.req_states
        drafts, counts = plan.scheduled_spec_decode_tokens, plan.num_scheduled_tokens
        # 1 batch order
        req_ids = sort_batch_req_ids(counts, drafts, 1 + self.config.num_speculative_tokens)
        r, t = len(req_ids), plan.total_num_scheduled_tokens
        num_scheduled = np.array([counts[i] for i in req_ids], np.int32)
        num_logits = np.array([1 + len(drafts.get(i, ())) for i in req_ids], np.int32)
        # 2 the row of each request
        self.idx_mapping[:r] = [states.req_id_to_row[i] for i in req_ids]
        rows = self.idx_mapping[:r]
        # 3 run boundaries of tokens and of logits
        prepare_query_start_loc(num_scheduled, r, self.query_start_loc)
        prepare_query_start_loc(num_logits, r, self.cu_num_logits)
        expand_idx_mapping(self.idx_mapping, self.cu_num_logits, r, self.expanded_idx_mapping, self.expanded_local_pos)
        # 4 known tokens
        if (states.num_computed_tokens_np[rows] < states.prefill_len[rows]).any():
            prepare_prefill_inputs(
                self.idx_mapping, self.query_start_loc, states.all_token_ids, states.prefill_len,
                states.num_computed_tokens, r, self.input_ids, states.next_prefill_tokens,
            )  # fmt: skip
        # 5 positions and lengths
        prepare_pos_seq_lens(
            self.idx_mapping, self.query_start_loc, states.num_computed_tokens, r, self.positions, self.seq_lens
        )
        # 6 sampled tokens, drafts, logits rows
        combine_sampled_and_draft_tokens(
            self.idx_mapping, self.query_start_loc, self.seq_lens, states.prefill_len, states.last_sampled_tokens,
            states.draft_tokens, self.cu_num_logits, r, self.input_ids, self.logits_indices,
        )  # fmt: skip
        reqs_padded = descriptor.num_reqs if descriptor and descriptor.num_reqs else r
        tokens_padded = descriptor.num_tokens if descriptor else t
        return InputBatch(tuple(req_ids), r, reqs_padded, t, tokens_padded, int(num_logits.sum()), num_scheduled, {})

    def _prepare_attn(self, batch: InputBatch) -> None:
        tables, states = self.block_tables, self.req_states
        tables.count_gather(self.idx_mapping[: batch.num_reqs])
        gather_block_tables(
            self.idx_mapping, states.num_computed_tokens, tables.num_blocks, tables.block_sizes, tables.window_reach,
            batch.num_reqs, tables.rows_to_fill(batch.num_reqs, batch.num_reqs_padded),
            tables.block_tables, tables.input_block_tables,
        )  # fmt: skip
        self._map_slots(batch)

    def _map_slots(self, batch: InputBatch) -> None:
        tables, c = self.block_tables, self.config.parallel
        compute_slot_mappings(
            self.idx_mapping, self.query_start_loc, self.positions, tables.block_sizes, tables.slot_mapping_enabled,
            tables.dcp_sharded, c.dcp_size, c.dcp_rank, c.dcp_interleave, batch.num_reqs, tables.block_tables,
            tables.slot_mappings,
        )  # fmt: skip

    def _build_attn_metadata(
        self, batch: InputBatch, descriptor: BatchDescriptor | None
    ) -> dict[str, AttentionMetadata]:
        # Only a full graph fixes the number of requests and tokens that attention is launched for.
        full = descriptor is not None and descriptor.cg_mode is CUDAGraphMode.FULL
        r = batch.num_reqs_padded if full else batch.num_reqs
        t = batch.num_tokens_padded if full else batch.num_tokens
        rows = self.idx_mapping[: batch.num_reqs]
        upper_bound = self.req_states.num_computed_tokens_np[rows] + batch.num_scheduled_tokens
        built = self.attn_metadata_builder.build(
            self.query_start_loc, self.seq_lens, self.block_tables.slot_mappings, r, t, batch.num_tokens_padded,
            int(batch.num_scheduled_tokens.max()), int(upper_bound.max()),
        )  # fmt: skip
        return {**built, **self._model_state.prepare_attn(batch)}

    # -- the parts of sample_tokens ---------------------------------------------------------------------------

    def _logits_rows(self, batch: InputBatch) -> LogitsRows:
        n = batch.num_logits
        rows = self.logits_indices[:n]
        return LogitsRows(
            n, self.expanded_idx_mapping[:n], self.expanded_local_pos[:n], self.positions[rows], self.input_ids[rows],
            self.idx_mapping[: batch.num_reqs],
        )  # fmt: skip

    def _outcome(
        self, batch: InputBatch, sampled: np.ndarray, forced: ForcedStep | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(tokens that enter the state, tokens that this runner took), both int64[R, 1+K]; sets num_sampled.

        With drafts the runner's own draw is its choice after each logits row; what of it counts is the outcome's."""
        r = batch.num_reqs
        own = np.zeros((r, 1 + self.config.num_speculative_tokens), np.int64)
        local = self.expanded_local_pos[: batch.num_logits]
        owner = np.repeat(np.arange(r), np.diff(self.cu_num_logits[: r + 1]))
        own[owner, local] = sampled
        if self.sampler.trace_replay.used_by(self.idx_mapping[:r]):
            self.sampler.trace_replay.apply(self.idx_mapping, self.seq_lens, self.req_states.prompt_len, r, own)
        if forced is None:
            self.num_sampled[:r] = 1
            return own, own
        self.num_sampled[:r] = forced.num_sampled
        return np.asarray(forced.token_ids, np.int64), own

    def _prompt_logprobs(self, batch: InputBatch, hidden_states: np.ndarray) -> dict[str, LogprobsLists]:
        """Of requests whose prompt this step finishes. The logits are always the model's, also in a forced step."""
        wanted, rows = self.sampler.prompt_logprobs, self.idx_mapping[: batch.num_reqs]
        if not wanted.used_by(rows):
            return {}
        return wanted.compute(
            batch.req_ids, rows, self.query_start_loc, self.req_states, hidden_states, self._model.compute_logits
        )
