"""An engine that keeps no batch: it builds every input anew from its sequences, and an adapter that lets it be judged.

The first half is an engine of the small kind and knows nothing of runner_api: sequences with block tables, a flat batch
of prompts, a batch of decodes, a model, greedy. The second half turns a scheduler's plan into calls of it. There are no
persistent rows, so no StepRecord is offered: the judge takes tokens alone and holds them against each other (the same
requests in chunks, preempted, among strangers …). Each of three faults can be planted:

    modelrunner check examples/rebuilding_engine.py:build
    modelrunner check examples/rebuilding_engine.py:plan_order
"""

import functools
from dataclasses import dataclass

import numpy as np

import runner_api as api
from runner_api import Capability, witness

FAULTS = {
    "plan_order": "tokens come back prompts first and are handed out in the order of the plan",
    "first_chunk": "positions of a prompt's later chunks start at 0 again",
    "old_blocks": "a sequence that comes back after a preemption keeps its old blocks in front of the new ones",
}

# -- the engine -------------------------------------------------------------------------------------------------------


@dataclass
class Sequence:
    tokens: list[int]
    num_cached: int  # tokens whose KV exists
    block_table: list[int]


@dataclass
class Batch:
    """One flat batch: int64 arrays of one element a token, and for each sequence how many keys its last query sees."""

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    context_lens: np.ndarray
    block_tables: list[np.ndarray]


class Engine:
    """Runs sequences on a model whose logits are a hash of what each token sees (runner_api/witness.py)."""

    def __init__(self, vocab_size, num_blocks, block_size, fault=None):
        self.block_size, self.fault = block_size, fault
        self.kv = np.zeros((num_blocks * block_size, 2), np.uint64)  # (token, position) by slot
        self.words = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(witness.VOCAB)

    def prepare_prefill(self, chunks):
        """chunks: (sequence, tokens to compute) of prompts, in parts or whole."""
        ids, positions, slots = [], [], []
        for seq, n in chunks:
            where = np.arange(seq.num_cached, seq.num_cached + n)
            ids.append(np.array(seq.tokens)[where])
            positions.append(where - seq.num_cached if self.fault == "first_chunk" else where)
            slots.append(self.slots(seq, where))
        lengths = np.array([seq.num_cached + n for seq, n in chunks], np.int64)
        tables = [np.array(seq.block_table) for seq, _ in chunks]
        return Batch(np.concatenate(ids), np.concatenate(positions), np.concatenate(slots), lengths, tables)

    def prepare_decode(self, seqs):
        """One token each: the last."""
        last = np.array([seq.num_cached for seq in seqs], np.int64)
        ids = np.array([seq.tokens[-1] for seq in seqs], np.int64)
        slots = [self.slots(seq, where) for seq, where in zip(seqs, last[:, None], strict=True)]
        tables = [np.array(seq.block_table) for seq in seqs]
        return Batch(ids, last, np.concatenate(slots), last + 1, tables)

    def slots(self, seq, positions):
        blocks = np.array(seq.block_table)[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def run(self, prefills, decodes):
        """The next token of each: prompts' chunks first, then decodes. Everybody writes before anybody reads."""
        batches = [self.prepare_prefill(prefills)] if prefills else []
        batches += [self.prepare_decode(decodes)] if decodes else []
        for batch in batches:
            self.kv[batch.slot_mapping] = np.stack([batch.input_ids, batch.positions], axis=1)
        rows = [row for b in batches for row in zip(b.context_lens, b.block_tables, strict=True)]
        return [int(self.logits(length, table).argmax()) for length, table in rows]

    def logits(self, length, block_table):
        """The last of `length` tokens hashes every (token, position) pair up to itself."""
        index = np.arange(length)
        token, position = self.kv[block_table[index // self.block_size] * self.block_size + index % self.block_size].T
        seen = token * np.uint64(witness.TOKEN) + position * np.uint64(witness.POSITION)
        hidden = mix(seen + (index + 1).astype(np.uint64) * np.uint64(witness.INDEX)).sum()
        return mix(hidden + self.words) >> np.uint64(witness.LOGIT_SHIFT)


def mix(x):
    """The finaliser of splitmix64, on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(witness.MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(witness.MIX_2)
    return x ^ (x >> np.uint64(31))


# -- the adapter ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    output: api.ModelRunnerOutput

    def get_output(self):
        return self.output


def refuse(**asked):
    """Refuse, by name, whatever is asked for and not offered; an empty value asks for nothing."""
    for name, value in asked.items():
        if value:
            raise api.CapabilityError("is not offered", field=name, got=value)


class RebuildingRunner:
    """A plan is followed by changing sequences; a batch lives as long as one call."""

    def __init__(self, config, fault=None):
        usual = api.RunnerConfig()
        refuse(layout=config.layout == "dense", fault=fault not in (None, *FAULTS))
        for name in ("num_speculative_tokens", "record", "reasoning", "logits_processors", "parallel", "window_reach"):
            refuse(**{name: getattr(config, name) != getattr(usual, name) and getattr(config, name)})
        self.config, self.fault = config, fault
        self.model = self.engine = None
        self.sequences, self.left, self.waiting = {}, {}, None

    def describe(self):
        notes = (f"planted fault: {self.fault}",) if self.fault else ()
        path, offered = f"{__name__}.RebuildingRunner", frozenset({Capability.GENERATE})
        return api.RunnerInfo("rebuilding", path, "1.0", "cpu", "float32", "slots", "none", offered, notes)

    def load_model(self, model):
        plain = isinstance(model, api.WitnessConfig) and len(model.groups) == 1
        refuse(model=not plain or model.groups[0].sliding_window)
        self.model = model

    def get_kv_cache_specs(self):
        return self.model.kv_cache_specs()

    def initialize_kv_cache(self, kv_cache_config):
        size = kv_cache_config.groups[0].spec.block_size
        self.engine = Engine(self.model.vocab_size, kv_cache_config.num_blocks, size, self.fault)
        self.sequences, self.left, self.waiting = {}, {}, None

    def capture_graphs(self):
        return ()

    def execute_model(self, plan, *, descriptor=None, intermediate_tensors=None):
        refuse(descriptor=descriptor, drafts=plan.scheduled_spec_decode_tokens)
        for req_id in plan.finished_req_ids | plan.preempted_req_ids:
            seq = self.sequences.pop(req_id, None)
            if self.fault == "old_blocks" and seq and req_id in plan.preempted_req_ids:
                self.left[req_id] = seq.block_table
        for new in plan.scheduled_new_reqs:
            params = new.sampling_params or api.SamplingParams(temperature=0.0)
            refuse(sampling_params=params.required_capabilities(), extra_args=params.extra_args)
            refuse(pooling=new.pooling_params, lora=new.lora_request, mm_features=new.mm_features)
            tokens, blocks = list(new.prefill_token_ids), self.left.pop(new.req_id, []) + new.block_ids[0]
            self.sequences[new.req_id] = Sequence(tokens, new.num_computed_tokens, blocks)
        cached = plan.scheduled_cached_reqs
        for req_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self.sequences[req_id].block_table += [] if ids is None else ids[0]
        if not plan.num_scheduled_tokens:
            return api.EMPTY_MODEL_RUNNER_OUTPUT
        self.waiting = dict(plan.num_scheduled_tokens)
        return None

    def sample_tokens(self, grammar=None, *, forced=None):
        refuse(grammar=grammar, forced=forced)
        counts, self.waiting = self.waiting, None
        due = {r: self.sequences[r] for r in counts}
        decodes = [r for r, seq in due.items() if counts[r] == 1 and seq.num_cached + 1 == len(seq.tokens)]
        prefills = [r for r in due if r not in decodes]
        order = list(due) if self.fault == "plan_order" else prefills + decodes
        drawn = self.engine.run([(due[r], counts[r]) for r in prefills], [due[r] for r in decodes])
        taken = {}
        for req_id, token in zip(order, drawn, strict=True):
            seq = due[req_id]
            seq.num_cached += counts[req_id]
            taken[req_id] = (token,) if seq.num_cached == len(seq.tokens) else ()
            seq.tokens.extend(taken[req_id])
        return Done(api.ModelRunnerOutput(tuple(taken), tuple(taken.values())))

    def shutdown(self):
        self.engine = None


def build(config, fault=None):
    return RebuildingRunner(config, fault)


plan_order, first_chunk, old_blocks = (functools.partial(build, fault=name) for name in FAULTS)
