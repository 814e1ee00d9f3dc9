"""A model runner that imports nothing: a program that speaks JSON lines, as one in any other language would.

It draws greedily on the witness model with one KV cache group, keeps everything in lists and dictionaries, and refuses
what it does not offer. docs/json-lines.md explains the messages; judge it with

    modelrunner check "process:python examples/json_runner.py"
"""

import json
import sys
import traceback

SPEC_VERSION = "2026.11"
CAPABILITIES = ["generate", "step_record"]
BITS = 2**64 - 1
TOKEN, POSITION, INDEX = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
VOCAB, MIX_1, MIX_2 = 0xD6E8FEB86659FD93, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# The fields of a configuration that this runner reads, or that change nothing for one that draws greedily.
READS = ["max_num_reqs", "max_num_batched_tokens", "max_model_len", "initial_free_rows", "layout", "device", "noise"]
READS += ["logprobs_mode", "max_concurrent_batches"]
# And those of a request's sampling parameters: the others ask for something, or are the engine's.
ASKS = ["top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs"]
ASKS += ["prompt_logprobs", "allowed_token_ids", "logit_bias", "bad_words_token_ids", "logprob_token_ids"]
ASKS += ["min_tokens", "thinking_token_budget", "structured_outputs", "trace_decode_token_ids", "extra_args"]


class Refusal(Exception):
    """Something that this runner answers with an error: its type is a class of the contract."""

    def __init__(self, kind, text, field):
        super().__init__(text)
        self.answer = {"type": kind, "text": text, "field": field}


def refuse(field, asked):
    if asked:
        raise Refusal("CapabilityError", f"{field} is not offered here: {asked!r}", field)


def mix64(x):
    x = (x ^ (x >> 30)) * MIX_1 & BITS
    x = (x ^ (x >> 27)) * MIX_2 & BITS
    return x ^ (x >> 31)


def logits(pairs, vocab_size):
    """The logits behind these (token, position) pairs, times 2^16: integers order them as well."""
    terms = (mix64((t * TOKEN + p * POSITION + (j + 1) * INDEX) & BITS) for j, (t, p) in enumerate(pairs))
    hidden = sum(terms) & BITS
    return [mix64((hidden + (v + 1) * VOCAB) & BITS) >> 44 for v in range(vocab_size)]


class Runner:
    def __init__(self, config):
        for field in config:
            refuse(field, field not in READS and config[field])
        refuse("layout", config.get("layout") == "dense")
        self.rows = config.get("max_num_reqs", 64)
        self.free = list(config.get("initial_free_rows") or range(self.rows))
        self.requests = {}  # id to row, tokens, computed, blocks, seed
        self.last = self.batch = None

    def load_model(self, model):
        refuse("model.path", "path" in model)
        witness = model["witness"]
        groups = witness.get("groups", [{}])
        refuse("groups", len(groups) > 1 or groups[0].get("sliding_window"))
        self.vocab_size, self.block_size = witness.get("vocab_size", 64), groups[0].get("block_size", 16)

    def kv_cache_specs(self):
        spec = {"block_size": self.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": "int64"}
        return {"witness.0": spec | {"kind": "token_position"}}

    def initialize_kv_cache(self, kv_cache_config):
        self.block_size = kv_cache_config["groups"][0]["spec"]["block_size"]
        self.kv = [(0, 0)] * (kv_cache_config["num_blocks"] * self.block_size)

    def step(self, plan, descriptor=None):
        new = plan.get("scheduled_new_reqs", [])
        for request in new:
            params = request.get("sampling_params")
            params = {"temperature": 0} if params is None else params  # {}: all of them at their defaults
            refuse("temperature", params.get("temperature", 1.0))
            for field in ASKS:
                refuse(field, params.get(field) is not None and [params[field]])
        refuse("scheduled_spec_decode_tokens", plan.get("scheduled_spec_decode_tokens"))
        refuse("descriptor", descriptor)
        self.change_state(plan, new)
        counts = plan.get("num_scheduled_tokens", {})
        self.last = {"plan": plan, "runner": "json_runner"}
        if not counts:
            return {}  # an output without requests
        # Decodes lead, the others follow by length; between equals the plan's order decides.
        order = sorted(counts, key=lambda r: (counts[r] != 1, counts[r]))
        self.batch = [(req_id, self.requests[req_id], counts[req_id]) for req_id in order]
        self.last |= self.build()
        pairs = zip(self.last["input_ids"], self.last["positions"], strict=True)
        for slot, pair in zip(self.last["slot_mappings"][0], pairs, strict=True):
            self.kv[slot] = pair  # everybody writes before anybody reads
        self.drawn = []
        for _, r, n in self.batch:
            scores = logits([self.kv[self.slot(r, p)] for p in range(r["computed"] + n)], self.vocab_size)
            self.drawn.append(scores.index(max(scores)))
        return None

    def change_state(self, plan, new):
        for req_id in sorted({*plan.get("finished_req_ids", []), *plan.get("preempted_req_ids", [])}):
            if req_id in self.requests:
                self.free.append(self.requests.pop(req_id)["row"])
        for request in new:
            self.requests[request["req_id"]] = {
                "row": self.free.pop(), "tokens": list(request["prefill_token_ids"]),
                "computed": request["num_computed_tokens"], "blocks": list(request["block_ids"][0]),
                "seed": request.get("seed", 0),
            }  # fmt: skip
        cached = plan.get("scheduled_cached_reqs", {})
        for req_id, blocks in zip(cached.get("req_ids", []), cached.get("new_block_ids", []), strict=True):
            self.requests[req_id]["blocks"] += blocks[0] if blocks else []
        size = self.block_size
        for block in plan.get("new_block_ids_to_zero", []):
            self.kv[block * size : (block + 1) * size] = [(0, 0)] * size
        for source, target in plan.get("kv_cache_block_copies", []):
            self.kv[target * size : (target + 1) * size] = self.kv[source * size : (source + 1) * size]

    def slot(self, r, position):
        return r["blocks"][position // self.block_size] * self.block_size + position % self.block_size

    def build(self):
        """What a record says was built; nothing is padded."""
        where = [range(r["computed"], r["computed"] + n) for _, r, n in self.batch]
        together = list(zip(self.batch, where, strict=True))
        ends = [sum(len(w) for w in where[: i + 1]) for i in range(len(where))]
        rows, number = [r["row"] for _, r, _ in self.batch], len(where)
        return {
            "num_reqs": number, "num_reqs_padded": number, "num_tokens": ends[-1], "num_tokens_padded": ends[-1],
            "req_ids": [req_id for req_id, _, _ in self.batch], "idx_mapping": rows, "query_start_loc": [0, *ends],
            "seq_lens": [w[-1] + 1 for w in where], "positions": [p for w in where for p in w],
            "input_ids": [r["tokens"][p] for (_, r, _), w in together for p in w],
            "slot_mappings": [[self.slot(r, p) for (_, r, _), w in together for p in w]],
            "logits_indices": [end - 1 for end in ends], "cu_num_logits": list(range(number + 1)),
            "expanded_idx_mapping": rows, "expanded_local_pos": [0] * number,
            "block_tables": [[list(r["blocks"]) for _, r, _ in self.batch]],
            "seeds": [r["seed"] for _, r, _ in self.batch],
        }  # fmt: skip

    def sample(self, grammar=None, forced=None):
        refuse("grammar", grammar)
        refuse("forced", forced)
        if self.batch is None:
            raise Refusal("CallOrderError", "no step is waiting for its tokens", "sample")
        taken = []
        for (_, r, n), token in zip(self.batch, self.drawn, strict=True):
            r["computed"] += n
            samples = r["computed"] == len(r["tokens"])  # else the prompt goes on
            taken.append([token] if samples else [])
            r["tokens"] += taken[-1]
        self.last |= {
            "token_ids": [[token] for token in self.drawn], "num_sampled": [len(t) for t in taken],
            "num_rejected": [0] * len(taken),
        }  # fmt: skip
        output = {"req_ids": [req_id for req_id, _, _ in self.batch], "sampled_token_ids": taken}
        self.batch = None
        return {"output": output}

    def record(self):
        if self.last is None:
            raise Refusal("CallOrderError", "no step has run", "record")
        return self.last

    def describe(self):
        info = {"name": "json_runner", "class_path": "json_runner.Runner", "version": "1.0", "device": "cpu"}
        return info | {"dtype": "float32", "layout": "slots", "noise": "none", "capabilities": CAPABILITIES}

    def shutdown(self):
        self.kv, self.requests = None, {}


RUNNERS = {}
OPERATIONS = ["load_model", "kv_cache_specs", "initialize_kv_cache", "step", "sample", "record", "describe", "shutdown"]


def answer(op, fields):
    if op == "start":
        return {"spec_version": SPEC_VERSION, "name": "json_runner"}
    if op == "build":
        number = len(RUNNERS) + 1
        RUNNERS[number] = Runner(fields["config"])
        return {"runner": number}
    if op == "stop":
        return None
    if op not in OPERATIONS:
        raise Refusal("CapabilityError", f"no operation {op!r}", "op")
    runner = RUNNERS[fields.pop("runner")]
    return getattr(runner, op)(**fields)


def main():
    for line in sys.stdin:
        fields = json.loads(line)
        number, op = fields.pop("id"), fields.pop("op")
        try:
            reply = {"id": number, "ok": answer(op, fields)}
        except Refusal as e:
            reply = {"id": number, "error": e.answer}
        except Exception as e:
            traceback.print_exc()
            reply = {"id": number, "error": {"type": type(e).__name__, "text": str(e)}}
        print(json.dumps(reply), flush=True)
        if op == "stop":
            return


if __name__ == "__main__":
    main()
