"""Model runners with vLLM's method and attribute names that play a recording back, and an `LLM` around them.

They keep rows themselves, by vLLM's rules, and check that these are the recorded ones. Tensors give their values only
the way that a device tensor does.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import numpy as np

PARAM_NAMES = {"all_stop_token_ids": "_all_stop_token_ids", "bad_words_token_ids": "_bad_words_token_ids"}
# What vLLM's parameters hold besides: nothing that a runner reads.
OTHER_PARAMS = {"detokenize": True, "output_kind": 2, "stop": [], "structured_outputs": None, "extra_args": None}


class Tensor:
    """A device tensor: its values must be fetched."""

    def __init__(self, values: Any, dtype: Any = np.int32) -> None:
        self._values = np.array(values, dtype)

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> np.ndarray:
        return self._values

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a device tensor does not become an array by itself")

    @property
    def shape(self) -> tuple[int, ...]:
        return self._values.shape


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return lines[0]["meta"], lines[1:-1], lines[-1]["outputs"]


def scheduler_output(plan: dict[str, Any]) -> Some:
    """A recorded plan as the object that vLLM's scheduler makes."""
    cached = plan["cached"]
    return Some(
        scheduled_new_reqs=[_new_request(new) for new in plan["new"]],
        scheduled_cached_reqs=Some(
            req_ids=cached["req_ids"], resumed_req_ids=set(cached["resumed"]), all_token_ids={},
            new_block_ids=[None if ids is None else tuple(ids) for ids in cached["new_block_ids"]],
            num_computed_tokens=cached["num_computed_tokens"], num_output_tokens=cached["num_output_tokens"],
        ),
        num_scheduled_tokens=plan["num_scheduled_tokens"], total_num_scheduled_tokens=plan["total"],
        scheduled_spec_decode_tokens=plan["spec"], finished_req_ids=set(plan["finished"]),
        preempted_req_ids=set(plan["preempted"]) or None, scheduled_encoder_inputs={}, kv_connector_metadata=None,
    )  # fmt: skip


def _new_request(new: dict[str, Any]) -> Some:
    params = {PARAM_NAMES.get(name, name): value for name, value in new["sampling_params"].items()}
    params["_all_stop_token_ids"] = set(params["_all_stop_token_ids"])
    return Some(
        req_id=new["req_id"], prompt_token_ids=new["prompt_token_ids"], prefill_token_ids=new["prefill_token_ids"],
        sampling_params=Some(**(params | OTHER_PARAMS)), block_ids=tuple(new["block_ids"]), lora_request=None,
        num_computed_tokens=new["num_computed_tokens"], mm_features=[], pooling_params=None, prompt_embeds=None,
    )  # fmt: skip


class Model:
    """Its logits are the recorded ones."""

    def __init__(self, runner: _Playback) -> None:
        self._runner = runner

    def compute_logits(self, hidden_states: Any) -> Tensor:
        assert self._runner.stored is not None
        return Tensor(self._runner.stored[f"logits_{self._runner.step}"], np.float32)


class _Playback:
    """What both have: sizes, and the recorded steps one after the other."""

    def __init__(self, path: Path, num_groups: int, logits: Path | None = None) -> None:
        meta, self.recorded, _ = read(path)
        self.max_model_len, self.max_num_reqs = meta["max_model_len"], meta["max_num_seqs"]
        self.max_num_tokens = meta["max_num_batched_tokens"]
        self.model_config = Some(model=meta["model"])
        self.cache_config = Some(enable_prefix_caching=meta["enable_prefix_caching"])
        spec = Some(kv_cache_spec=Some(block_size=meta["block_size"]))
        self.kv_cache_config = Some(num_blocks=meta["num_gpu_blocks_override"], kv_cache_groups=[spec] * num_groups)
        drafts = meta.get("speculative_config")
        self.speculative_config = None if drafts is None else Some(**drafts)
        self.stored = None if logits is None else np.load(logits)
        self.model = Model(self)
        self.step = -1
        self.now: dict[str, Any] = {}

    def _next(self) -> None:
        self.step += 1
        self.now = self.recorded[self.step]

    def _sampler_output(self) -> Some:
        sampled = self.now["sampled"]
        n = len(sampled["token_ids"])
        tensors = None
        if "logprobs" in sampled:
            tensors = Some(
                logprob_token_ids=Tensor(sampled["logprob_token_ids"]),
                logprobs=Tensor(sampled["logprobs"], np.float32), selected_token_ranks=Tensor(sampled["ranks"]),
            )  # fmt: skip
        return Some(
            sampled_token_ids=Tensor(sampled["token_ids"], np.int64), logprobs_tensors=tensors,
            num_sampled=Tensor(sampled.get("num_sampled", [1] * n)),
            num_rejected=Tensor(sampled.get("num_rejected", [0] * n)),
        )  # fmt: skip


class V2Runner(_Playback):
    """Model runner V2 of 0.26. unseeded: seeds that it draws, by request."""

    def __init__(self, path: Path, logits: Path | None = None, unseeded: dict[str, int] | None = None) -> None:
        meta, steps, _ = read(path)
        groups = len(next(s["batch"]["block_tables"] for s in steps if "batch" in s))
        super().__init__(path, groups, logits)
        self.unseeded = unseeded or {}
        width = (meta.get("speculative_config") or {}).get("num_speculative_tokens", 0)
        drafts = np.zeros((self.max_num_reqs, width), np.int64)
        self.req_states = Some(free_indices=list(meta["free_rows"]), req_id_to_index={}, draft_tokens=drafts)
        self.block_tables = Some(block_sizes=[meta["block_size"]] * groups)
        self.sampler = Some(sampling_states=Some(seeds=Some(np=np.zeros(self.max_num_reqs, np.int64))))

    def execute_model(
        self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False, is_profile: bool = False
    ) -> None:
        if dummy_run:
            return
        self._next()
        self.finish_requests(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            row = self.req_states.free_indices.pop()
            self.req_states.req_id_to_index[new.req_id] = row
            self.sampler.sampling_states.seeds.np[row] = self.unseeded.get(new.req_id, 0)
        if scheduler_output.total_num_scheduled_tokens:
            shape = Some(cg_mode=Some(name=self.now["batch"]["cg_mode"]), num_tokens=1, num_reqs=None)
            self.prepare_attn(self._prepare(scheduler_output, shape))

    def _prepare(self, scheduler_output: Any, shape: Some) -> Any:
        return self.prepare_inputs(scheduler_output, shape)

    def finish_requests(self, scheduler_output: Any) -> None:
        leaving = scheduler_output.finished_req_ids
        if scheduler_output.preempted_req_ids:
            leaving = leaving.union(scheduler_output.preempted_req_ids)
        for req_id in leaving:
            row = self.req_states.req_id_to_index.pop(req_id, None)
            if row is not None:
                self.req_states.free_indices.append(row)

    def prepare_inputs(self, scheduler_output: Any, batch_desc: Any) -> Some:
        return self._batch()

    def _batch(self) -> Some:
        batch = self.now["batch"]
        rows = [self.req_states.req_id_to_index[req_id] for req_id in batch["req_ids"]]
        assert rows == batch["idx_mapping"], "rows were not given back in order"
        if "draft_tokens_state" in batch and self.speculative_config is not None:
            self.req_states.draft_tokens[rows] = batch["draft_tokens_state"]
        rest = [7] * (batch["num_tokens_padded"] - batch["num_tokens"])  # whatever lies there
        return Some(
            req_ids=batch["req_ids"], num_reqs=batch["num_reqs"], num_reqs_after_padding=batch["num_reqs_padded"],
            num_tokens=batch["num_tokens"], num_tokens_after_padding=batch["num_tokens_padded"],
            idx_mapping=Tensor(rows), query_start_loc=Tensor(batch["query_start_loc"]),
            seq_lens=Tensor(batch["seq_lens"]), input_ids=Tensor(batch["input_ids"] + rest),
            positions=Tensor(batch["positions"] + rest, np.int64), logits_indices=Tensor(batch["logits_indices"]),
            cu_num_logits=Tensor(batch["cu_num_logits"]),
            num_scheduled_tokens=np.array(batch["num_scheduled_tokens"], np.int32),
            expanded_idx_mapping=Tensor(batch.get("expanded_idx_mapping", [])),
            expanded_local_pos=Tensor(batch.get("expanded_local_pos", [])),
            num_draft_tokens_per_req=batch.get("num_draft_tokens_per_req"),
        )  # fmt: skip

    def prepare_attn(self, input_batch: Any) -> tuple[tuple[Tensor, ...], Tensor]:
        batch, width = self.now["batch"], -(-self.max_model_len // self.block_tables.block_sizes[0])
        tables = []
        for group in batch["block_tables"]:
            rows = np.full((batch["num_reqs_padded"], width), 99, np.int32)  # stale entries behind a row's end
            for i, row in enumerate(group):
                rows[i, : len(row)] = row
            tables.append(Tensor(rows))
        return tuple(tables), Tensor(batch["slot_mappings"], np.int64)

    def sample_tokens(self, grammar_output: Any = None) -> Any:
        return self.sample(None, None, grammar_output)[0]

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> tuple[Some, Any, Any]:
        if self.stored is not None:
            self.model.compute_logits(hidden_states)
        output = self._sampler_output()
        return output, output.num_sampled, output.num_rejected


class V2Runner33(V2Runner):
    """Of 0.33: other parameters, rows as 64-bit integers, a sorted walk, windows masked in the tables."""

    def __init__(self, *args: Any, reach: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.block_tables._sliding_window_reach = [reach] * len(self.block_tables.block_sizes)

    def _prepare(self, scheduler_output: Any, shape: Some) -> Any:
        return self.prepare_inputs(scheduler_output, Some(num_tokens=1), shape, 0)  # type: ignore[call-arg]

    def prepare_inputs(  # type: ignore[override]
        self, scheduler_output: Any, batch_req_state: Any, batch_desc: Any, num_active_loras: int
    ) -> Some:
        batch = self._batch()
        batch.idx_mapping = Tensor(batch.idx_mapping.numpy(), np.int64)
        return batch

    def finish_requests(self, scheduler_output: Any) -> None:
        leaving = scheduler_output.finished_req_ids
        for req_id in sorted(leaving.union(scheduler_output.preempted_req_ids or ())):
            row = self.req_states.req_id_to_index.pop(req_id, None)
            if row is not None:
                self.req_states.free_indices.append(row)


class V1Runner(_Playback):
    """Model runner V1, of both versions: they differ in how much `_prepare_inputs` returns."""

    def __init__(self, path: Path, more: tuple[Any, ...] = ()) -> None:
        super().__init__(path, 1)
        self.more = more
        self.query_start_loc = Some(gpu=Tensor([0]))
        self.input_ids = Some(gpu=Tensor([0]), cpu=None)
        self.seq_lens, self.positions = Tensor([0]), Tensor([0])
        self.discard_request_mask = Some(np=np.zeros(self.max_num_reqs, bool))
        self.input_batch = Some(num_reqs=0, req_ids=[], block_table=[Some(slot_mapping=Some(gpu=Tensor([0])))])
        self.prompts: dict[str, int] = {}
        self.lengths: dict[str, int] = {}  # tokens known when a request came, or came back

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> None:
        self._next()
        if scheduler_output.total_num_scheduled_tokens:
            self._prepare_inputs(scheduler_output, None)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> tuple[Any, ...]:
        batch, stale = self.now["batch"], [77, 77]
        self.input_batch.num_reqs, self.input_batch.req_ids = batch["num_reqs"], [*batch["req_ids"]]
        self.query_start_loc.gpu = Tensor(batch["query_start_loc"] + stale)
        self.seq_lens = Tensor(batch["seq_lens"] + stale)
        self.input_ids.gpu = Tensor(batch["input_ids"] + stale)
        self.positions = Tensor(batch["positions"] + stale, np.int64)
        self.input_batch.block_table[0].slot_mapping.gpu = Tensor(batch["slot_mapping"] + stale, np.int64)
        for new in scheduler_output.scheduled_new_reqs:
            self.prompts[new.req_id] = self.lengths[new.req_id] = len(new.prompt_token_ids)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if req_id in cached.resumed_req_ids:
                self.lengths[req_id] = self.prompts[req_id] + outputs
        for i, (req_id, seq_len) in enumerate(zip(batch["req_ids"], batch["seq_lens"], strict=True)):
            self.discard_request_mask.np[i] = seq_len < self.lengths[req_id]
        return (Tensor(batch["logits_indices"]), None, *self.more)

    def sample_tokens(self, grammar_output: Any = None) -> Any:
        return self._sample(None, None)

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Some:
        return self._sampler_output()


class WorkerWrapper:
    """Passes on whatever it has not, as vLLM's does."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)


class LLM:
    """`generate` takes the recorded steps; `steps`: only so many, then the rest of the requests are forgotten."""

    def __init__(self, runner: Any) -> None:
        worker = WorkerWrapper(Some(model_runner=runner))
        executor = Some(driver_worker=worker)
        self.llm_engine = Some(engine_core=Some(engine_core=Some(model_executor=executor)), model_executor=executor)
        self._runner = runner

    def generate(self, prompts: Any = None, sampling_params: Any = None, *, steps: int | None = None) -> None:
        runner = self._runner
        for line in runner.recorded[:steps]:
            plan = scheduler_output(line["plan"])
            runner.execute_model(plan)
            if plan.total_num_scheduled_tokens:
                runner.sample_tokens()
