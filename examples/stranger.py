"""A model runner by somebody else: small, NumPy only, and judged like any other.

It keeps one object per request and builds every input anew in each step. It offers whole steps and their records,
padded batches and logits; it draws greedily, knows one KV cache group, and refuses everything else. The judge takes it
in three ways (docs/write-a-runner.md), each also with one of three planted faults:

    modelrunner check stranger                                 # where an entry point of this name is installed
    modelrunner check examples/stranger.py:wrong_row
    modelrunner check "process:python examples/stranger.py --serve --fault wrong_row"
"""

import argparse
import dataclasses
import functools
from dataclasses import dataclass

import numpy as np

import runner_api as api
from runner_api import Capability, witness

OFFERED = frozenset({Capability.GENERATE, Capability.STEP_RECORD, Capability.PADDED_BATCH, Capability.RECORD_LOGITS})
# What this runner reads of its configuration, or what changes nothing where one request draws greedily at a time.
READS = {"max_num_reqs", "max_num_batched_tokens", "max_model_len", "initial_free_rows", "record", "layout", "device"}
READS |= {"noise", "logprobs_mode", "max_concurrent_batches"}
USUAL = api.RunnerConfig()
FAULTS = {
    "stale_padding": "slots behind the last token keep what an earlier step wrote there, and padding overwrites KV",
    "wrong_row": "tokens are packed by who samples and read by the request's place in the batch",
    "chunk_edge": "the last token of a chunk takes its block from the chunk's end, one too far at a block's edge",
}


@dataclass
class Request:
    row: int  # its number as long as it is here
    tokens: list[int]  # all that are known
    computed: int  # how many of them have their KV
    blocks: list[int]
    seed: int


@dataclass(frozen=True)
class Done:
    """Nothing is on its way: the output is complete as soon as it exists."""

    output: api.ModelRunnerOutput

    def get_output(self):
        return self.output


def refuse(**asked):
    """Refuse what is asked for: by name, what cannot be done, empty if nothing of the kind is asked."""
    for field, value in asked.items():
        if value:
            raise api.CapabilityError("is not offered", field=field, got=value)


def in_order(fine, call):
    if not fine:
        raise api.CallOrderError("not now", field=call)


def mix(x):
    """The finaliser of splitmix64, on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(witness.MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(witness.MIX_2)
    return x ^ (x >> np.uint64(31))


class Stranger:
    def __init__(self, config, fault=None):
        for name in {field.name for field in dataclasses.fields(config)} - READS:
            if getattr(config, name) != getattr(USUAL, name):
                refuse(**{name: getattr(config, name)})
        refuse(layout=config.layout == "dense" and "dense", record=config.record - {"logits"})
        refuse(device=config.device not in ("auto", "cpu") and config.device, fault=fault not in FAULTS and fault)
        self.config, self.fault = config, fault
        self.model = self.kv = self.batch = self.record = None

    def describe(self):
        notes = () if self.fault is None else (f"planted fault: {self.fault}",)
        whose = ("stranger", "stranger.Stranger", "1.0")
        return api.RunnerInfo(*whose, "cpu", "float32", "slots", "none", OFFERED, notes)

    def load_model(self, model):
        in_order(self.kv is None, "load_model")
        known = isinstance(model, api.WitnessConfig) and len(model.groups) == 1
        refuse(model=(not known or model.groups[0].sliding_window) and repr(model))
        self.model = model
        self.words = np.arange(1, model.vocab_size + 1, dtype=np.uint64) * np.uint64(witness.VOCAB)

    def get_kv_cache_specs(self):
        in_order(self.model is not None, "get_kv_cache_specs")
        return self.model.kv_cache_specs()

    def initialize_kv_cache(self, kv_cache_config):
        in_order(self.model is not None and self.batch is None, "initialize_kv_cache")
        group, rows = kv_cache_config.groups[0], self.config.max_num_reqs
        refuse(kernel_block_size=group.blocks_per_kv_block > 1)
        self.size = group.spec.block_size
        self.kv = np.zeros((kv_cache_config.num_blocks, self.size, 2), np.uint64)  # (token, position) by block
        self.requests, self.free = {}, list(self.config.initial_free_rows or range(rows))
        self.slots = np.full(self.config.max_num_batched_tokens, api.PAD_SLOT_ID, np.int64)
        self.drawn = np.zeros(rows, np.int64)
        self.null_row = np.zeros(group.spec.block_table_width(self.config.max_model_len), np.int32)
        self.record = None

    def execute_model(self, plan, *, descriptor=None, intermediate_tensors=None):
        in_order(self.kv is not None and self.batch is None, "execute_model")
        refuse(intermediate_tensors=intermediate_tensors, drafts=plan.scheduled_spec_decode_tokens)
        for new in plan.scheduled_new_reqs:
            params = new.sampling_params or api.SamplingParams(temperature=0.0)
            refuse(sampling_params=params.required_capabilities() - OFFERED, extra_args=params.extra_args)
            refuse(pooling=new.pooling_params, lora=new.lora_request, mm_features=new.mm_features)
            refuse(prompt_embeds=new.prompt_embeds is not None)
        self.change_state(plan)
        self.record = api.StepRecord(plan, runner=self.describe().line())
        if not plan.num_scheduled_tokens:
            return api.EMPTY_MODEL_RUNNER_OUTPUT
        # Decodes lead, the others follow by length; between equals the plan's order decides.
        order = sorted(plan.num_scheduled_tokens.items(), key=lambda item: (item[1] != 1, item[1]))
        self.batch = [(req_id, self.requests[req_id], n) for req_id, n in order]
        self.run_model(plan.total_num_scheduled_tokens, descriptor)
        return None

    def change_state(self, plan):
        for req_id in sorted(plan.finished_req_ids | plan.preempted_req_ids):
            if req_id in self.requests:
                self.free.append(self.requests.pop(req_id).row)
        for new in plan.scheduled_new_reqs:
            tokens, blocks = list(new.prefill_token_ids), list(new.block_ids[0])
            self.requests[new.req_id] = Request(self.free.pop(), tokens, new.num_computed_tokens, blocks, new.seed)
        cached = plan.scheduled_cached_reqs
        for req_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self.requests[req_id].blocks += [] if ids is None else ids[0]
        self.kv[plan.new_block_ids_to_zero] = 0
        for source, target in plan.kv_cache_block_copies:
            self.kv[target] = self.kv[source]

    def places(self, request, positions):
        """The slots of these positions; behind the request's own blocks lies the null block."""
        block = positions // self.size
        if self.fault == "chunk_edge":
            block[-1] = (positions[-1] + 1) // self.size
        return np.array([*request.blocks, api.NULL_BLOCK_ID])[block] * self.size + positions % self.size

    def run_model(self, total, descriptor):
        padded, rest = total, 0  # tokens with padding, requests that are padding
        if descriptor is not None:
            padded, rest = descriptor.num_tokens, max((descriptor.num_reqs or 0) - len(self.batch), 0)
        requests, counts = [r for _, r, _ in self.batch], np.array([n for _, _, n in self.batch], np.int32)
        starts = np.append(0, np.cumsum(counts))
        where = [np.arange(r.computed, r.computed + n) for r, n in zip(requests, counts, strict=True)]
        ids, positions = np.zeros((2, padded), np.int64)
        ids[:total] = np.concatenate([np.array(r.tokens)[p] for r, p in zip(requests, where, strict=True)])
        positions[:total] = np.concatenate(where)
        self.slots[:total] = np.concatenate([self.places(r, p) for r, p in zip(requests, where, strict=True)])
        if self.fault != "stale_padding":
            self.slots[total:] = api.PAD_SLOT_ID
        # Padding computes along and must own no slot; everybody writes before anybody reads.
        slots = self.slots[:padded].copy()
        self.kv.reshape(-1, 2)[slots[slots >= 0]] = np.stack([ids, positions], axis=1)[slots >= 0]
        logits = np.stack([self.logits(r, p[-1] + 1) for r, p in zip(requests, where, strict=True)])
        self.drawn[: len(requests)] = logits.argmax(axis=1)
        tables = [np.array(r.blocks, np.int32) for r in requests]
        rows = np.array([r.row for r in requests], np.int64)
        self.record = dataclasses.replace(
            self.record, num_reqs=len(requests), num_reqs_padded=len(requests) + rest, num_tokens=total,
            num_tokens_padded=padded, descriptor=descriptor, req_ids=tuple(req_id for req_id, _, _ in self.batch),
            idx_mapping=rows, query_start_loc=np.append(starts, [total] * rest).astype(np.int32),
            seq_lens=np.append([p[-1] + 1 for p in where], [0] * rest).astype(np.int32),
            input_ids=ids[:total].astype(np.int32), positions=positions[:total], logits_indices=starts[1:] - 1,
            cu_num_logits=np.arange(len(requests) + 1, dtype=np.int32), expanded_idx_mapping=rows,
            expanded_local_pos=np.zeros(len(requests), np.int32), slot_mappings=slots[None],
            block_tables=(tuple(tables + [self.null_row] * rest),),
            seeds=np.array([r.seed for r in requests], np.int64),
            logits=logits if "logits" in self.config.record else None,
        )  # fmt: skip

    def logits(self, request, length):
        """float32[V]: the hash of every (token, position) pair that the last of `length` tokens sees."""
        index = np.arange(length)
        slots = np.array(request.blocks)[index // self.size] * self.size + index % self.size
        token, position = self.kv.reshape(-1, 2)[slots].T
        seen = token * np.uint64(witness.TOKEN) + position * np.uint64(witness.POSITION)
        hidden = mix(seen + (index + 1).astype(np.uint64) * np.uint64(witness.INDEX)).sum()
        word = mix(hidden + self.words) >> np.uint64(witness.LOGIT_SHIFT)
        return word.astype(np.float32) * np.float32(witness.LOGIT_SCALE)

    def sample_tokens(self, grammar=None, *, forced=None):
        in_order(self.batch is not None, "sample_tokens")
        refuse(grammar=grammar, forced=forced)
        samples = np.array([r.computed + n == len(r.tokens) for _, r, n in self.batch])
        place = np.arange(len(samples)) if self.fault != "wrong_row" else np.argsort(~samples, kind="stable")
        taken = {}
        for i, (req_id, request, n) in enumerate(self.batch):
            request.computed += n
            taken[req_id] = (int(self.drawn[i]),) if samples[i] else ()
            request.tokens += [int(self.drawn[place[i]])] if samples[i] else []
        counts = np.array([len(tokens) for tokens in taken.values()], np.int32)
        drawn = self.drawn[: len(counts), None].copy()
        self.record = dataclasses.replace(
            self.record, token_ids=drawn, num_sampled=counts, num_rejected=np.zeros_like(counts)
        )
        self.batch = None
        return Done(api.ModelRunnerOutput(tuple(taken), tuple(taken.values())))

    def last_step(self):
        in_order(self.record is not None, "last_step")
        return self.record

    def shutdown(self):
        self.kv = None


def build(config, fault=None):
    """The factory that an entry point, a file's path or the server names."""
    return Stranger(config, fault)


stale_padding, wrong_row, chunk_edge = (functools.partial(build, fault=name) for name in FAULTS)


if __name__ == "__main__":
    from runner_api.serve import main

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", required=True, help="speak JSON lines on stdin and stdout")
    parser.add_argument("--fault", choices=sorted(FAULTS), default="build", help="plant this fault")
    main([f"{__file__}:{parser.parse_args().fault}"])
