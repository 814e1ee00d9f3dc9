# %% [markdown]
# # 07 Swap backends in research code
#
# One script, two backends. With `"cpu"` every array is NumPy's and can be looked at; with `"gpu"` the same steps are
# Triton kernels on torch tensors. This notebook takes the GPU if there is one, and the NumPy runner otherwise. Set
# `NOTEBOOK_RUNNER=gpu` to run the kernels in Triton's interpreter on a machine without a GPU (slower, same results).

# %%
import importlib
import itertools
import os

import numpy as np

from conformance import figures
from engine_core.llm import LLM
from runner_api import (
    KVCacheSpec,
    NewRequestData,
    RunnerConfig,
    SamplingParams,
    SamplingParamsError,
    SchedulerOutput,
    WitnessConfig,
    group_kv_cache_specs,
    load_runner,
)


# %%
def has_gpu():
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


RUNNER = os.environ.get("NOTEBOOK_RUNNER") or ("gpu" if has_gpu() else "cpu")
print("runner:", RUNNER)

# %% [markdown]
# ## The same script
#
# A model, a runner's name, prompts, parameters. The model here is the *witness model*, whose logits are a hash of all
# that a token can see; `"smollm2"`, a Hugging Face folder or a GGUF file goes in its place, and then prompts are
# text.


# %%
def answers(runner):
    with LLM(WitnessConfig(), runner=runner) as llm:
        print(llm.runner_info.line())
        params = [SamplingParams(temperature=0.0, max_tokens=8), SamplingParams(top_p=0.9, seed=7, max_tokens=8)]
        return [output.token_ids for output in llm.generate([[11, 12, 13, 14, 15], [20, 21]], params)]


drawn = answers(RUNNER)
print(drawn)
assert [len(tokens) for tokens in drawn] == [8, 8]

# %% [markdown]
# The witness model computes with integers, so that backends have to agree to the last bit. On a real model they may
# differ in a token where two logits nearly tie, since they sum in different orders; `modelrunner check gpu --model
# FOLDER` tells that from a fault, and [notebook 04](04_sampling_and_certificates.ipynb) shows how.

# %% [markdown]
# ## A model of your own in 40 lines
#
# `load_model` takes any object with four members: `vocab_size`, `kv_cache_specs`, `forward` and `compute_logits`.
# Paged memory, batching, chunks and sampling are the runner's business.
#
# This one is not trained but made by hand. It has two attention layers and continues a pattern that it has seen
# before, as the *induction heads* of trained models do. The first layer looks one position back: its output is the
# token before. The second looks for earlier places whose token before is the present token, and gives what stood
# there.
#
# The two functions that touch the KV cache come from the backend. They have the same names and parameters in both
# packages, so that one class serves both.

# %%
SIZE = 64  # of a one-hot vector: tokens and positions are below it


class InductionModel:
    """Continues what followed the present token before. eye: float32[SIZE, SIZE] unit vectors, where arrays live."""

    vocab_size, max_position_embeddings = 32, SIZE
    layers = ("before", "after")

    def __init__(self, package, eye):
        self.write = importlib.import_module(f"{package}.kv_cache").reshape_and_cache
        self.attention = importlib.import_module(f"{package}.attention").paged_attention
        self.eye = eye

    def kv_cache_specs(self):
        spec = KVCacheSpec(block_size=16, num_kv_heads=1, head_size=SIZE, dtype="float32")
        return dict.fromkeys(self.layers, spec)

    def attend(self, name, query, key, value, kv_caches, attn_metadata):
        """[tp, SIZE] each: store keys and values at their slots, then read through the block tables."""
        m, q = attn_metadata[name], 40.0 * query[:, None]
        self.write(key[:, None], value[:, None], m.slot_mapping, *kv_caches[name])
        out = 0.0 * q
        self.attention(
            q, *kv_caches[name], m.block_table, m.query_start_loc, m.seq_lens, m.num_reqs, 1.0, m.window,
            m.max_query_len, out,
        )  # fmt: skip
        return out[:, 0]

    def forward(self, input_ids, positions, kv_caches, attn_metadata, intermediates=None):
        token, place = self.eye[input_ids], self.eye[positions]
        has_one_before = positions > 0
        place_before = self.eye[(positions - 1) * has_one_before]
        before = self.attend("before", place_before, place, token, kv_caches, attn_metadata)
        before = before * has_one_before[:, None]
        after = self.attend("after", token, before, token, kv_caches, attn_metadata)
        if intermediates is not None:
            intermediates |= {"before": before, "after": after}
        return after

    def compute_logits(self, hidden_states):
        return 10.0 * hidden_states[:, : self.vocab_size]


# %%
def induction_model(runner):
    if runner == "cpu":
        return InductionModel("cpu_reference", np.eye(SIZE, dtype=np.float32))
    import torch

    return InductionModel("gpu_backend", torch.eye(SIZE, device="cuda" if has_gpu() else "cpu"))


# %%
greedy = SamplingParams(temperature=0.0, max_tokens=8)
pattern = [[5, 9, 2, 7, 5], [20, 21, 20, 22, 23, 24, 20, 22, 25, 22]]
with LLM(induction_model(RUNNER), runner=RUNNER, max_model_len=SIZE, max_num_batched_tokens=8) as llm:
    continued = [output.token_ids for output in llm.generate(pattern, greedy)]
for prompt, tokens in zip(pattern, continued, strict=True):
    print(prompt, "->", tokens)
assert continued[0] == [9, 2, 7, 5, 9, 2, 7, 5]

# %% [markdown]
# A step took at most 8 tokens, so the second prompt came in chunks and beside the first request's decodes. Does that
# change anything? A few lines of plain Python say what the model should do: take what followed the present token most
# often, the lowest token of equals.


# %%
def by_counting(tokens, steps):
    tokens = list(tokens)
    for _ in range(steps):
        followed = [b for a, b in itertools.pairwise(tokens) if a == tokens[-1]]
        counts = np.bincount(followed or tokens, minlength=32)
        tokens.append(int(counts.argmax()))
    return tokens[-steps:]


assert continued == [by_counting(prompt, 8) for prompt in pattern]
print("the same by counting")

# %% [markdown]
# ## Look inside of a step
#
# A runner records more of a step if asked: logits, the KV of each request in the order of its tokens, and whatever
# the model put into `intermediates`. All of it comes back as NumPy arrays, from either backend.

# %%
everything = frozenset({"logits", "kv", "intermediates"})
runner = load_runner(RUNNER, RunnerConfig(max_num_reqs=4, max_model_len=SIZE, record=everything))
runner.load_model(induction_model(RUNNER))
runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), num_blocks=8))
new = [NewRequestData("A", pattern[0], pattern[0], 0, ([3],), SamplingParams(temperature=0.0))]
runner.execute_model(SchedulerOutput(new, num_scheduled_tokens={"A": 5}, total_num_scheduled_tokens=5))
runner.sample_tokens()
step = runner.last_step()
figures.batch(step)

# %%
print("tokens           ", pattern[0])
print("the one before   ", step.intermediates["before"].argmax(axis=1).tolist(), " (0 at the start: none)")
print("logits of the row", {int(t): round(float(step.logits[0, t]), 2) for t in np.argsort(-step.logits[0])[:3]})
print("KV of A          ", step.kv["A"].shape, " layers, K and V, tokens, heads, size")
assert step.intermediates["before"].argmax(axis=1).tolist()[1:] == pattern[0][:-1]
assert step.kv["A"].shape == (2, 2, 5, 1, SIZE)
assert step.tokens()["A"] == (9,)
assert step.logits[0].argmax() == 9

# %% [markdown]
# The keys of the second layer are the tokens before, as the KV cache holds them; the values of both are the tokens.

# %%
keys, values = step.kv["A"][1, :, :, 0].argmax(axis=-1)
print("keys of the second layer", keys, "  values", values)
assert keys[1:].tolist() == pattern[0][:-1]
assert values.tolist() == pattern[0]

# %% [markdown]
# ## A logits processor of your own
#
# Between the model and the draw, code of yours may edit the logits of the requests that ask for it. It is written
# once for both backends ([how](../docs/custom-logits-processor.md)). This one leaves a watermark: by the token
# before, two fifths of the vocabulary are "green" and become more likely. A reader who knows the rule can count.


# %%
def is_green(previous, token):
    return (7 * token + 13 * previous) % 5 < 2


class GreenList:
    arguments = ("green",)

    def __init__(self, max_num_reqs, vocab_size, arrays):
        self.arrays, self.tokens = arrays, arrays.arange(vocab_size)
        self.strength = arrays.zeros(max_num_reqs, "float32")  # by row

    def validate(self, params):
        if not isinstance((params.extra_args or {}).get("green", 0.0), float):
            raise SamplingParamsError("no number", field="green", expected="a float")

    def add_request(self, row, params, prompt_token_ids, output_token_ids):
        self.strength[row] = strength = (params.extra_args or {}).get("green", 0.0)
        return strength != 0

    def remove_request(self, row):
        pass

    def move_rows(self, moves):
        for move in moves:
            to = self.arrays.array([move.target, move.source], "int64")
            came_from = self.arrays.array([move.source, move.target], "int64")
            self.strength[to] = self.strength[came_from]

    def observe(self, rows, token_ids, num_sampled):
        pass

    def apply(self, logits, context):
        green = is_green(context.input_ids[:, None], self.tokens[None, :])
        logits[:] = logits + green * self.strength[context.rows][:, None]


# %%
shares = {}
with LLM(WitnessConfig(), runner=RUNNER, logits_processors=(GreenList,)) as llm:
    for strength in (0.0, 2.0, 8.0):
        wanted = SamplingParams(temperature=1.5, seed=3, max_tokens=40, extra_args={"green": strength})
        text = [5, *llm.generate([[5]], wanted)[0].token_ids]
        shares[strength] = float(np.mean([is_green(a, b) for a, b in itertools.pairwise(text)]))
print({strength: f"{share:.0%} green" for strength, share in shares.items()})
assert 0.2 < shares[0.0] < 0.6 < shares[8.0]
assert shares[0.0] < shares[2.0] < shares[8.0]

# %% [markdown]
# ## The other backend
#
# Everything above ran with one name in one variable. On the witness model, whose arithmetic is in integers, the two
# backends have to agree to the last bit, whatever the machine. Where the GPU runner is the one above, it is shown
# here.

# %%
if RUNNER == "cpu":
    print("only the reference ran; NOTEBOOK_RUNNER=gpu runs the other one too")
else:
    sides = {}
    for name in ("cpu", RUNNER):
        with LLM(WitnessConfig(), runner=name, logits_processors=(GreenList,)) as llm:
            wanted = SamplingParams(temperature=1.5, seed=3, max_tokens=20, extra_args={"green": 2.0})
            sides[name] = [o.token_ids for o in llm.generate([[5], [6, 7], [8] * 20], wanted)]
        with LLM(induction_model(name), runner=name, max_model_len=SIZE) as llm:
            sides[name] += [o.token_ids for o in llm.generate(pattern, greedy)]
    print("equal, token for token:", sides["cpu"] == sides[RUNNER])
    assert sides["cpu"] == sides[RUNNER]
