"""The Triton/CUDA model runner. `execute_model` and `sample_tokens` are the stages in call order, and little else.

The host works ahead of the device: a step sends one packed copy, launches kernels, and reads nothing back before
`get_output`. Twin: cpu_reference/runner.py. The numbers in comments run on through the parts of a step as they do
there, so that a step and its twin's can be read side by side, although some parts are cut elsewhere here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

import runner_api
from gpu_backend import inspection
from gpu_backend.async_output import AsyncOutput
from gpu_backend.attn_metadata import AttentionMetadata, AttentionMetadataBuilder
from gpu_backend.block_table import BlockTables, gather_block_tables
from gpu_backend.copy_engine import StreamCopies
from gpu_backend.input_batch import (
    combine_sampled_and_draft_tokens,
    count_sampled_and_rejected,
    expand_idx_mapping,
    post_update,
    prepare_pos_seq_lens,
    prepare_prefill_inputs,
    prepare_query_start_loc,
    sort_batch_req_ids,
)
from gpu_backend.kv_cache import allocate_kv_cache, copy_blocks, kernel_caches, zero_blocks
from gpu_backend.models import build_model
from gpu_backend.packed_copy import PackedCopy, copy_to_device
from gpu_backend.request_state import RequestState
from gpu_backend.sample.faults import first_faults
from gpu_backend.sample.grammar import apply_grammar_bitmask, grammar_mask_rows, send_masks
from gpu_backend.sample.logits_rows import LogitsRows
from gpu_backend.sample.logprob import LogprobsTensors
from gpu_backend.sample.sampler import Sampler
from gpu_backend.slot_mapping import compute_slot_mappings
from gpu_backend.stages import gpu_stages
from gpu_backend.triton_support import INTERPRETED, KERNEL_LAUNCHES, resolve_device
from runner_api import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    NO_ROW,
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
        Capability.DRAFT_LAYOUT, Capability.ASYNC_OUTPUT, Capability.FLOAT32,
    }
)  # fmt: skip
# Triton's interpreter rounds bfloat16 wrongly, and torch on the CPU adds float16 in another order than a GPU.
COMPILED_CAPABILITIES = CAPABILITIES | {Capability.FLOAT16, Capability.BFLOAT16}

# Of the GPU memory that is free once the weights are loaded; the rest is for activations.
GPU_MEMORY_SHARE = 0.85

F = TypeVar("F", bound=Callable[..., Any])


def on_device(method: F) -> F:
    """Run a method with the runner's GPU current, where kernels and streams are looked for, and without gradients."""

    @functools.wraps(method)
    def wrapped(self: GpuModelRunner, *args: Any, **kwargs: Any) -> Any:
        index = self.device.index if self.device.type == "cuda" else -1  # -1: leave the current device alone
        with torch.no_grad(), torch.cuda.device(index):
            return method(self, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's inputs: host facts, beside the persistent buffers. R requests, L logits rows."""

    req_ids: tuple[str, ...]
    num_reqs: int
    num_reqs_padded: int
    num_tokens: int
    num_tokens_padded: int
    num_logits: int
    rows_np: np.ndarray  # int64[R] row of each request
    num_scheduled_tokens_np: np.ndarray  # int32[R]
    num_logits_np: np.ndarray  # int32[R]
    attn_metadata: dict[str, AttentionMetadata]
    draft_token_ids: torch.Tensor | None = None  # int64[R, K] held when the inputs were built


class GpuModelRunner:
    """See `runner_api.protocol.ModelRunner` for what each method promises."""

    stages = staticmethod(gpu_stages)
    LAYOUTS: tuple[str, ...] = ("slots",)  # what this class is; `gpu_backend.layouts` chooses between classes
    capabilities = CAPABILITIES if INTERPRETED else COMPILED_CAPABILITIES

    def __init__(self, config: RunnerConfig, selection: LayoutDecision | None = None) -> None:
        self.selection = selection or resolve_layout("gpu", config, self.LAYOUTS)
        if config.parallel.world_size != 1:
            raise CapabilityError(
                "several ranks are not offered", field="parallel", got=config.parallel, expected="one rank"
            )
        self.device, why = resolve_device(config.device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        if Capability(config.dtype) not in self.capabilities:
            offered = " or ".join(c.value for c in Capability if c in self.capabilities and c.value.find("float") >= 0)
            where = "in Triton's interpreter" if INTERPRETED else "on a GPU"
            raise CapabilityError(f"is not offered {where}", field="dtype", got=config.dtype, expected=offered)
        # TF32 keeps 10 bits of a float32 factor: too few for a runner that is held against float64.
        torch.set_float32_matmul_precision("highest")
        self.notes = (why, "float32 products without TF32")
        self.config = config
        self._copy_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.copies: Any = StreamCopies(self.device)  # how host arrays get to the device
        self._model: Any = None
        self._model_state: ModelState = DefaultModelState()
        self._ready = False
        self._pending: tuple[InputBatch, torch.Tensor] | None = None
        # The outputs of the latest steps, by place in the ring of their sources.
        self._outputs: list[AsyncOutput | None] = [None] * config.max_concurrent_batches
        # The latest step's record, once somebody asks for it; until then what it is built from.
        self._record: StepRecord | None = None
        self._record_inputs: tuple[Any, ...] | None = None
        self._record_outcome: tuple[Any, ...] | None = None

    def describe(self) -> RunnerInfo:
        c = self.config
        path = f"{type(self).__module__}.{type(self).__qualname__}"
        device = "cpu (Triton interpreter)"
        if self.device.type == "cuda":
            device = f"{self.device} {torch.cuda.get_device_name(self.device)}"
        return RunnerInfo(
            "gpu", path, runner_api.__version__, device, c.dtype, self.selection.layout, c.noise, self.capabilities,
            self.notes, self.selection,
        )  # fmt: skip

    def kernel_launches(self) -> dict[str, int]:
        """How often each Triton kernel was launched in this process."""
        return dict(KERNEL_LAUNCHES)

    # -- start-up ---------------------------------------------------------------------------------------------

    @on_device
    def load_model(self, model: Any) -> None:
        if self._ready:
            raise CallOrderError(
                "the KV cache was made for the model at hand", field="load_model", hint="Build a new runner"
            )
        built = build_model(model, self.config.dtype, self.device, self.config.parallel)
        check_model_reach(self.config, getattr(built, "max_position_embeddings", None))
        self._model = built
        self._model_state = getattr(built, "model_state", None) or DefaultModelState()

    def determine_available_memory(self) -> int | None:
        """Bytes that a KV cache may take: most of what the GPU has free. None in the interpreter: the host's matter."""
        if self.device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free * GPU_MEMORY_SHARE)

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        if self._model is None:
            raise CallOrderError("no model is loaded", field="get_kv_cache_specs", hint="Call load_model first")
        return self._model.kv_cache_specs()

    @on_device
    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        c, specs, device = self.config, self.get_kv_cache_specs(), self.device
        if self._pending is not None:
            raise CallOrderError(
                "a step waits for its tokens", field="initialize_kv_cache", hint="Call sample_tokens first"
            )
        reach = check_kv_cache_config(c, kv_cache_config, specs)
        if self._ready:
            self.block_tables.release()
        self._record = self._record_inputs = self._record_outcome = None
        self._outputs = [None] * c.max_concurrent_batches
        n, t, k = c.max_num_reqs, c.max_num_batched_tokens, c.num_speculative_tokens
        self.kv_cache_config = kv_cache_config
        self.kv_caches = allocate_kv_cache(kv_cache_config, device)
        self.validator = PlanValidator(
            c, kv_cache_config, self._model.vocab_size, self.capabilities, self.selection.layout
        )
        self._make_rows(kv_cache_config, reach)
        self.attn_metadata_builder = AttentionMetadataBuilder(kv_cache_config, self.block_tables.input_block_tables)
        # What the host sends every step, in one copy, with room for a full batch of new tokens and block ids.
        parts = (self.req_states, self.block_tables, self.sampler)
        tables = self._host_inputs()
        for part in parts:
            tables |= part.host_tables()
        lists = 2 + len(reach) + len(self.sampler.steps)
        self.packed = self._make_packed(tables, 4 * (t + c.max_model_len) + 64 * n * lists)
        for part in parts:
            part.bind(self.packed)
        # Per-step buffers, at addresses that never change; what the host has made is its copy's view.
        for name, size, dtype in (
            ("idx_mapping", n, torch.int64),
            ("query_start_loc", n + 1, torch.int32),
            ("seq_lens", n, torch.int32),
            ("input_ids", t, torch.int32),
            ("positions", t, torch.int64),
            ("num_scheduled_tokens", n, torch.int32),
            ("num_logits", n, torch.int32),
            ("cu_num_logits", n + 1, torch.int32),
            ("logits_indices", n * (1 + k), torch.int64),
            ("expanded_idx_mapping", n * (1 + k), torch.int64),
            ("expanded_local_pos", n * (1 + k), torch.int32),
            ("num_rejected", n, torch.int32),
        ):
            sent = self.packed.views.get(name)
            setattr(self, name, torch.zeros(size, dtype=dtype, device=device) if sent is None else sent)
        # What the copies out read: a ring, so that a step writes where the copy of a step long past has read.
        self.output_ring = tuple(
            (
                torch.zeros((n, 1 + k), dtype=torch.int64, device=device),  # sampled_token_ids int64[N, 1+K]
                torch.zeros(n, dtype=torch.int32, device=device),  # num_sampled int32[N]
                torch.zeros(n, dtype=torch.int32, device=device),  # faults int32[N]
            )
            for _ in range(c.max_concurrent_batches)
        )
        self.ring_place = 0
        self._ready = True

    @property
    def sampled_token_ids(self) -> torch.Tensor:
        """Tokens of the latest step in its place of the ring: int64[N, 1+K]."""
        return self.output_ring[self.ring_place][0]

    @property
    def num_sampled(self) -> torch.Tensor:
        """How many of them count: int32[N]."""
        return self.output_ring[self.ring_place][1]

    @property
    def faults(self) -> torch.Tensor:
        """The `SampleFault` of each request: int32[N]."""
        return self.output_ring[self.ring_place][2]

    def capture_graphs(self) -> tuple[BatchDescriptor, ...]:
        return ()

    # -- one step ---------------------------------------------------------------------------------------------

    @on_device
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
        check_descriptor(self.config, plan, descriptor)
        for new in plan.scheduled_new_reqs:
            check_params(self.sampler.custom.processors, new.sampling_params, new.req_id)
        self.validator.commit(plan)
        self.end_of_part("plan")
        # 2 apply the plan to the rows: on the host, in one copy, on the device
        batch = self._prepare_on_host(plan, descriptor)
        self._apply_updates(plan)
        self.end_of_part("rows")
        if plan.total_num_scheduled_tokens == 0:
            self._record, self._record_inputs = StepRecord(plan, runner=self.describe().line()), None
            return EMPTY_MODEL_RUNNER_OUTPUT
        # 3 build the batch's inputs
        batch = self._prepare_inputs(batch)
        self.end_of_part("inputs")
        # 4 block tables and slots
        self._prepare_attn(batch)
        self.end_of_part("tables")
        # 5 what attention must know, once per group
        batch = replace(batch, attn_metadata=self._build_attn_metadata(batch, descriptor))
        self.end_of_part("metadata")
        # 6 run the model
        intermediates: dict[str, torch.Tensor] | None = {} if "intermediates" in self.config.record else None
        tp = batch.num_tokens_padded
        hidden_states = self._model.forward(
            self.input_ids[:tp], self.positions[:tp], kernel_caches(self.kv_caches, self.kv_cache_config),
            batch.attn_metadata, intermediates, **self._model_state.prepare_inputs(batch),
        )  # fmt: skip
        self.end_of_part("forward")
        self._record_inputs, self._record_outcome = (plan, batch, descriptor, intermediates or {}), None
        self._record = None
        self._pending = (batch, hidden_states)
        return None

    @on_device
    def sample_tokens(self, grammar: GrammarOutput | None = None, *, forced: ForcedStep | None = None) -> AsyncOutput:
        if self._pending is None:
            raise CallOrderError(
                "no step is waiting for its tokens", field="sample_tokens", hint="Call execute_model with a plan first"
            )
        batch, hidden_states = self._pending
        r, num_logits = batch.num_reqs, batch.num_logits
        check_grammar(self.config, self._model.vocab_size, batch.req_ids, grammar)
        check_forced(
            self.config, self._model.vocab_size, self.validator.requests, batch.req_ids, batch.num_logits_np, forced
        )
        # 1 logits of the rows that get them
        rows = self._logits_rows(batch)
        logits = self._model.compute_logits(hidden_states[self.logits_indices[:num_logits]]).contiguous()
        if forced is not None and forced.logits is not None:
            logits = copy_to_device(np.asarray(forced.logits, np.float32), self.device).to(logits.dtype)
        # 2 what grammars allow, by request
        allowed = logits
        if grammar is not None:
            cu_num_logits_np = np.concatenate([[0], np.cumsum(batch.num_logits_np)])
            mask_rows_np = grammar_mask_rows(
                batch.req_ids, cu_num_logits_np, grammar, self.config.num_speculative_tokens
            )
            mask_rows, bitmask = send_masks(mask_rows_np, grammar.grammar_bitmask, self.device)
            allowed = logits.clone() if "logits" in self.config.record else logits
            apply_grammar_bitmask(mask_rows, bitmask, num_logits, allowed)
        # 3 draw
        drawn = self.sampler.sample(allowed, rows, keep_scores="logits" in self.config.record)
        self._take_ring_place()
        own = self._outcome(batch, drawn.sampled, forced)
        # 4 unfinished prefills sample nothing
        count_sampled_and_rejected(
            self.idx_mapping, self.seq_lens, self.req_states.prefill_len, self.cu_num_logits, r,
            self.num_sampled, self.num_rejected,
        )  # fmt: skip
        # 5 rows without a winner
        first_faults(self.cu_num_logits, self.num_sampled, drawn.faults, r, self.faults)
        # 6 log probabilities of what was taken, and of prompts
        logprobs = None
        if self.sampler.token_logprobs.used_by(batch.rows_np):
            taken = torch.where(self.num_sampled[:r] > 0, self.sampled_token_ids[:r, 0], own[:, 0])
            logprobs = self.sampler.logprobs(rows, taken, allowed, drawn.processed)
        prompt_logprobs = self._prompt_logprobs(batch, hidden_states)
        self.end_of_part("sample")
        # 7 the copy out starts before the state changes
        output = AsyncOutput(
            batch.req_ids, self.sampled_token_ids[:r], self.num_sampled[:r], self.faults[:r], logprobs,
            prompt_logprobs, self._copy_stream,
        )  # fmt: skip
        # 8 advance the rows
        post_update(
            self.idx_mapping, self.query_start_loc, self.sampled_token_ids, self.num_sampled, self.num_rejected, r,
            self.req_states.last_sampled_tokens, self.req_states.total_len, self.req_states.all_token_ids,
            self.req_states.num_computed_tokens,
        )  # fmt: skip
        self._advance_on_host(batch)
        if forced is not None:
            if forced.draft_token_ids is not None:
                drafts = copy_to_device(np.asarray(forced.draft_token_ids, np.int64), self.device)
                self.req_states.draft_tokens[self.idx_mapping[:r]] = drafts
            # Outcomes that the device decides reach the host late; an imposed one is known now.
            self.validator.settle(batch.req_ids, np.asarray(forced.num_sampled))
        keep_logits = logits if "logits" in self.config.record else None
        self._record, self._record_outcome = None, (batch, keep_logits, own, forced, drawn.scores, logprobs)
        self._model_state.postprocess(batch, self.num_sampled[:r])
        self._pending, self._outputs[self.ring_place] = None, output
        # 9 tell the sampler what was taken; last, since a user's own code may listen
        self.sampler.observe(
            batch.rows_np, self.idx_mapping[:r], self.sampled_token_ids[:r], self.num_sampled[:r]
        )  # fmt: skip
        self.end_of_part("advance")
        return output

    def pool(self) -> AsyncOutput:
        raise CapabilityError("pooling is not offered", field="pool")

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return None

    @on_device
    def last_step(self) -> StepRecord:
        if self._record is None:
            if self._record_inputs is None:
                raise CallOrderError("no step has run", field="last_step", hint="Call execute_model first")
            record = inspection.record_inputs(self, *self._record_inputs)
            if self._record_outcome is not None:
                outcome = inspection.record_outcome(self, *self._record_outcome, record.intermediates)
                record = replace(record, **outcome)
            self._record = record
        return self._record

    @on_device
    def poison_unused(self, value: int = -77, keep_blocks: Collection[int] = ()) -> None:
        if not self._ready or self._pending is not None:
            raise CallOrderError("only between two steps", field="poison_unused", hint="Call sample_tokens first")
        check_poison(self.kv_cache_config, value, keep_blocks)
        self._settle_record()
        with self.packed.barrier():
            inspection.poison_unused(self, value, keep_blocks)

    @on_device
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

    @on_device
    def shutdown(self) -> None:
        if self._ready:
            self._settle_record()
            self.block_tables.release()
        self._ready = False
        self._pending = None
        self.kv_caches = {}

    def _settle_record(self) -> None:
        """Build the latest record while the buffers still hold its step, and let copies out come to an end."""
        if self._record_inputs is not None:
            self.last_step()
        for output in self._outputs:
            if output is not None:
                output.get_output()

    # -- the rows ---------------------------------------------------------------------------------------------

    def _make_rows(self, kv_cache_config: KVCacheConfig, reach: Sequence[int]) -> None:
        """Everything that is kept by row. reach: int[G], how far each group's window reads."""
        c, device = self.config, self.device
        n, t, k = c.max_num_reqs, c.max_num_batched_tokens, c.num_speculative_tokens
        self.req_states = RequestState(n, c.max_model_len, k, c.initial_free_rows, device)
        self.block_tables = BlockTables(kv_cache_config, n, t, c.max_model_len, reach, device)
        self.sampler = Sampler(c, self._model.vocab_size, self.req_states, device)

    def _host_inputs(self) -> dict[str, np.ndarray]:
        """The buffers of a step that the host fills; the step's copy sends them whole."""
        n = self.config.max_num_reqs
        self.idx_mapping_np = np.full(n, NO_ROW, np.int64)
        self.num_scheduled_tokens_np = np.zeros(n, np.int32)
        self.num_logits_np = np.zeros(n, np.int32)
        return {
            "idx_mapping": self.idx_mapping_np, "num_scheduled_tokens": self.num_scheduled_tokens_np,
            "num_logits": self.num_logits_np,
        }  # fmt: skip

    def _make_packed(self, tables: Mapping[str, np.ndarray], extra_bytes: int) -> PackedCopy:
        return PackedCopy(tables, extra_bytes, self.device, self.copies)

    @property
    def waiting_requests(self) -> Mapping[str, Any]:
        """Live requests without a row: here every one has one."""
        return {}

    # -- the parts of execute_model ---------------------------------------------------------------------------

    def _prepare_on_host(self, plan: SchedulerOutput, descriptor: BatchDescriptor | None) -> InputBatch:
        """All that the host does for the step before the device does anything. It may write what it sends while the
        device is steps behind: the copies are the only thing that both touch."""
        with self.packed.barrier():
            self._update_states(plan)
            batch = self._order_batch(plan, descriptor)
            self.packed.send()
        return batch

    def _check_call(self, intermediate_tensors: IntermediateTensors | None) -> None:
        if not self._ready:
            raise CallOrderError(
                "the runner has no KV cache", field="execute_model",
                hint="Call load_model and initialize_kv_cache first",
            )  # fmt: skip
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
        for part in (states, tables, self.sampler):
            part.pack(self.packed)

    def _leave(self, req_id: str) -> None:
        self.sampler.remove_request(self.req_states.req_id_to_row[req_id])
        self.sampler.forget_request(req_id)
        self._model_state.remove(req_id)

    def _order_batch(self, plan: SchedulerOutput, descriptor: BatchDescriptor | None) -> InputBatch:
        states = self.req_states
        drafts, counts = plan.scheduled_spec_decode_tokens, plan.num_scheduled_tokens
        # 1 batch order
        req_ids = sort_batch_req_ids(counts, drafts, 1 + self.config.num_speculative_tokens)
        r, t = len(req_ids), plan.total_num_scheduled_tokens
        num_scheduled = np.array([counts[i] for i in req_ids], np.int32)
        num_logits = np.array([1 + len(drafts.get(i, ())) for i in req_ids], np.int32)
        # 2 the row of each request
        rows = np.array([states.req_id_to_row[i] for i in req_ids], np.int64)
        for table, values, padding in (
            (self.idx_mapping_np, rows, NO_ROW),
            (self.num_scheduled_tokens_np, num_scheduled, 0),
            (self.num_logits_np, num_logits, 0),
        ):
            table[:r], table[r:] = values, padding
        reqs_padded = descriptor.num_reqs if descriptor and descriptor.num_reqs else r
        tokens_padded = descriptor.num_tokens if descriptor else t
        return InputBatch(
            tuple(req_ids), r, reqs_padded, t, tokens_padded, int(num_logits.sum()), rows, num_scheduled, num_logits,
            {},
        )  # fmt: skip

    def _apply_updates(self, plan: SchedulerOutput) -> None:
        # 4 staged rows are written
        for part in (self.req_states, self.block_tables, self.sampler):
            part.apply_staged_writes(self.packed)
        # 5 blank fresh blocks, then copy shared ones
        if plan.new_block_ids_to_zero:
            zero_blocks(self.kv_caches.values(), plan.new_block_ids_to_zero)
        if plan.kv_cache_block_copies:
            copy_blocks(self.kv_caches.values(), plan.kv_cache_block_copies)

    def _prepare_inputs(self, batch: InputBatch) -> InputBatch:
        states, r, rows = self.req_states, batch.num_reqs, batch.rows_np
        # 3 run boundaries of tokens and of logits
        prepare_query_start_loc(self.num_scheduled_tokens, r, self.query_start_loc)
        prepare_query_start_loc(self.num_logits, r, self.cu_num_logits)
        expand_idx_mapping(self.idx_mapping, self.cu_num_logits, r, self.expanded_idx_mapping, self.expanded_local_pos)
        # 4 known tokens
        if (states.num_computed_tokens_np[rows] < states.prefill_len_np[rows]).any():
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
        if self.config.num_speculative_tokens == 0:
            return batch
        return replace(batch, draft_token_ids=states.draft_tokens[self.idx_mapping[:r]])

    def _prepare_attn(self, batch: InputBatch) -> None:
        tables, states, c = self.block_tables, self.req_states, self.config.parallel
        gather_block_tables(
            self.idx_mapping, states.num_computed_tokens, tables.num_blocks, tables.block_sizes, tables.window_reach,
            batch.num_reqs, tables.rows_to_fill(batch.num_reqs, batch.num_reqs_padded),
            tables.block_tables, tables.input_block_tables,
        )  # fmt: skip
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
        upper_bound = self.req_states.num_computed_tokens_np[batch.rows_np] + batch.num_scheduled_tokens_np
        query_start_loc_np = np.concatenate([[0], np.cumsum(self.num_scheduled_tokens_np[:r])])
        built = self.attn_metadata_builder.build(
            self.query_start_loc, query_start_loc_np, self.seq_lens, self.block_tables.slot_mappings, r, t,
            batch.num_tokens_padded,
            int(batch.num_scheduled_tokens_np.max()), int(upper_bound.max()),
        )  # fmt: skip
        return {**built, **self._model_state.prepare_attn(batch)}

    # -- the parts of sample_tokens ---------------------------------------------------------------------------

    def _logits_rows(self, batch: InputBatch) -> LogitsRows:
        n = batch.num_logits
        rows = self.logits_indices[:n]
        return LogitsRows(
            n, self.expanded_idx_mapping[:n], self.expanded_local_pos[:n], self.positions[rows], self.input_ids[rows],
            batch.rows_np, batch.num_logits_np,
        )  # fmt: skip

    def _advance_on_host(self, batch: InputBatch) -> None:
        """What the host knows of the rows without having seen a token: here nothing, the next plan says it."""

    def _take_ring_place(self) -> None:
        """Go on to the next place of the ring; on the device, after the copy that has read it.

        That copy is of the step `max_concurrent_batches` ago, not of the one before: it has long had its turn.
        """
        self.ring_place = (self.ring_place + 1) % len(self.output_ring)
        former = self._outputs[self.ring_place]
        if former is not None and former.copied is not None:
            torch.cuda.current_stream().wait_event(former.copied)

    def _outcome(self, batch: InputBatch, sampled: torch.Tensor, forced: ForcedStep | None) -> torch.Tensor:
        """Set sampled_token_ids and num_sampled to what enters the state; the answer is what this runner took,
        int64[R, 1+K].

        With drafts the runner's own draw is its choice after each logits row; what of it counts is the outcome's."""
        r, token_ids = batch.num_reqs, self.sampled_token_ids[: batch.num_reqs]
        if token_ids.shape[1] > 1:
            token_ids.zero_()
        if batch.num_logits == r:
            token_ids[:, 0] = sampled
        else:
            first = np.cumsum(batch.num_logits_np) - batch.num_logits_np
            owner = np.repeat(np.arange(r), batch.num_logits_np)
            place = owner * token_ids.shape[1] + np.arange(batch.num_logits) - first[owner]
            token_ids.view(-1).index_copy_(0, copy_to_device(place, self.device), sampled)
        if self.sampler.trace_replay.used_by(batch.rows_np):
            self.sampler.trace_replay.apply(self.idx_mapping, self.seq_lens, self.req_states.prompt_len, r, token_ids)
        if forced is None:
            self.num_sampled[:r] = 1
            return token_ids
        own = token_ids.clone()
        token_ids.copy_(copy_to_device(np.asarray(forced.token_ids, np.int64), self.device))
        self.num_sampled[:r] = copy_to_device(np.asarray(forced.num_sampled, np.int32), self.device)
        return own

    def _prompt_logprobs(self, batch: InputBatch, hidden_states: torch.Tensor) -> dict[str, list[LogprobsTensors]]:
        """Of requests whose prompt this step finishes. The logits are always the model's, also in a forced step."""
        wanted = self.sampler.prompt_logprobs
        if not wanted.used_by(batch.rows_np):
            return {}
        query_start_loc_np = np.concatenate([[0], np.cumsum(batch.num_scheduled_tokens_np)])
        return wanted.compute(
            batch.req_ids, batch.rows_np, query_start_loc_np, self.req_states, hidden_states,
            self._model.compute_logits, self._copy_stream,
        )  # fmt: skip
