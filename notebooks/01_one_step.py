# %% [markdown]
# # 01 One step, from plan to tokens
#
# A scheduler hands a model runner a plan: which requests run, how many tokens of each, and which memory blocks they
# own. The runner makes flat arrays of it, runs the model once, and draws the next tokens. This notebook follows one
# such step, number by number.
#
# Start with the picture. Try to read it before you read on.

# %%
import threading

import numpy as np

from conformance import figures
from engine_core.llm import LLM
from runner_api import (
    BatchDescriptor,
    CachedRequestData,
    CUDAGraphMode,
    NewRequestData,
    ParallelContext,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
    load_runner,
    load_stages,
)
from runner_api.errors import RunnerError
from runner_api.loader import table_traffic

# %%
GREEDY = SamplingParams(temperature=0.0)


def new(name, tokens, blocks, computed=0):
    """A request that the runner does not know yet; `computed` of its tokens have their KV already."""
    return NewRequestData(name, tokens, tokens, computed, (blocks,), GREEDY)


def plan(new_requests=(), counts=None, cached=None):
    """A plan in which `counts` says how many tokens of each request run."""
    return SchedulerOutput(list(new_requests), cached or CachedRequestData(), counts, sum(counts.values()))


def build(config, num_blocks, block_size=16):
    """The NumPy runner with the witness model, whose integer logits depend on every index of a step."""
    runner = load_runner("cpu", config)
    runner.load_model(WitnessConfig(groups=(WitnessGroup(block_size),)))
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), num_blocks))
    return runner


# %%
prompts = {
    "R1": [(7 * i) % 60 for i in range(40)],
    "R2": [(5 * i + 3) % 60 for i in range(17)],
    "R3": [21, 22, 23, 24, 25, 26],
}
blocks = {"R1": [5, 9, 3], "R2": [7, 2], "R3": [4]}


def two_running_requests():
    """A runner in which R1 and R2 have just had their prompts computed and drawn one token each."""
    runner = build(RunnerConfig(max_num_reqs=1024, layout="slots"), num_blocks=16)
    runner.execute_model(plan([new(r, prompts[r], blocks[r]) for r in ("R1", "R2")], {"R1": 40, "R2": 17}))
    runner.sample_tokens()
    return runner


def the_step():
    """R3 arrives with its prompt; R1 and R2 go on with one token each. Neither needs a new block."""
    cached = CachedRequestData(["R1", "R2"], [40, 17], [None, None])
    return plan([new("R3", prompts["R3"], blocks["R3"])], {"R3": 6, "R1": 1, "R2": 1}, cached)


runner = two_running_requests()
first_tokens = runner.last_step().tokens()
padded = BatchDescriptor(CUDAGraphMode.FULL, num_tokens=12, num_reqs=4)  # a captured graph has a fixed shape
runner.execute_model(the_step(), descriptor=padded)
runner.sample_tokens()
step = runner.last_step()
figures.batch(step)

# %% [markdown]
# Three questions, to be answered from the picture alone:
#
# 1. To which KV slot does the token at position 4 of R3 go? And the one token of R1?
# 2. Which entries of the token axis are padding, and which of the request axis? What keeps the padding from writing
#    anything, and from reading anything?
# 3. At which token are the logits of each request taken? Whose row of the logits is row 2?
#
# And one that the picture alone does not answer:
#
# 4. R3 came first in the plan. Why is it last in the batch?
#
# The answers stand below, worked out from the record of the step: a `StepRecord` holds what the runner was asked,
# what it built, and what it drew, as NumPy arrays. The picture shows nothing else.

# %% [markdown]
# ## The answers

# %%
index = {r: range(step.query_start_loc[i], step.query_start_loc[i + 1]) for i, r in enumerate(step.req_ids)}
slot_of = {(r, int(step.positions[t])): int(step.slot_mappings[0, t]) for r in step.req_ids for t in index[r]}
print("1. R3, position 4: slot", slot_of["R3", 4], "  R1, position 40: slot", slot_of["R1", 40])

padding_tokens = list(range(step.num_tokens, step.num_tokens_padded))
padding_requests = list(range(step.num_reqs, step.num_reqs_padded))
print("2. padding: tokens", padding_tokens, " requests", padding_requests)
print("   their slots", step.slot_mappings[0, padding_tokens], " their lengths", step.seq_lens[padding_requests])

taken_at = dict(zip(step.req_ids, step.logits_indices.tolist(), strict=True))
print("3. logits are taken at", taken_at, "  row 2 belongs to", step.req_ids[2])

print("4. batch order", step.req_ids, "for the plan", step.plan.num_scheduled_tokens)

assert slot_of["R3", 4] == 68
assert slot_of["R1", 40] == 56
assert (padding_tokens, padding_requests) == ([8, 9, 10, 11], [3])
assert (step.slot_mappings[0, 8:] == -1).all()
assert step.seq_lens[3] == 0
assert taken_at == {"R1": 0, "R2": 1, "R3": 7}
assert step.req_ids[2] == "R3"

# %% [markdown]
# A padding token has the slot -1, which a cache kernel must leave out, so it writes nothing. A padding request has no
# tokens (`query_start_loc` stays at 8) and no keys (`seq_len` 0), so attention reads nothing for it.
#
# R3 is last because decodes come first: an attention kernel wants them together at the front. What follows is how
# each of these numbers comes about.

# %% [markdown]
# ## Step by step
#
# ### 1. Batch order
#
# Requests are sorted by three things: those with drafts first, then those with a single token, then by how many
# tokens they have. Python's sort is stable, so that equal ones stay in the order of the plan.

# %%
counts = step.plan.num_scheduled_tokens
keys = {r: (True, n != 1, n) for r, n in counts.items()}  # nobody has drafts
order = sorted(counts, key=keys.__getitem__)
print(keys, "->", order)
assert tuple(order) == step.req_ids == ("R1", "R2", "R3")

# %% [markdown]
# ### 2. Rows
#
# A request keeps one row for its whole life. The free rows are a stack, and the highest number lies on top. R1 came
# first and took row 1023, R2 took 1022, and R3 takes 1021. `idx_mapping` says for each place of the batch which row
# it is; whatever a later stage wants to know of a request, it looks up through it.

# %%
print(step.idx_mapping)
assert step.idx_mapping.tolist() == [1023, 1022, 1021]
figures.rows(step, num_rows=1024)

# %% [markdown]
# ### 3. Where each request begins
#
# The model sees one flat sequence of 8 tokens. `query_start_loc` says where each request begins in it: the running
# sum of the counts. All entries behind the last request repeat the total, since kernels expect that it never falls.

# %%
tokens = [counts[r] for r in order]
starts = np.concatenate([[0], np.cumsum(tokens)])
print(tokens, "->", starts, "  in the record, with one padding request:", step.query_start_loc)
assert step.query_start_loc.tolist() == [0, 1, 2, 8, 8]

# %% [markdown]
# ### 4. Positions and lengths
#
# A token's position is what its request has computed so far, plus the token's place among the new ones. A request's
# length, as attention needs it, is what it has computed plus what is new. The two axes are independent: R1 has one
# query and 41 keys.

# %%
computed = {"R1": 40, "R2": 17, "R3": 0}
positions = [computed[r] + i for r in order for i in range(counts[r])]
lengths = [computed[r] + counts[r] for r in order]
print("positions", positions, "  lengths", lengths)
assert step.positions.tolist() == positions == [40, 17, 0, 1, 2, 3, 4, 5]
assert step.seq_lens.tolist() == [*lengths, 0] == [41, 18, 6, 0]

# %% [markdown]
# ### 5. Token ids
#
# The token that a decode starts from was drawn by the step before. It waits in the runner's own table of last sampled
# tokens, in the request's row. Tokens of a prompt come from the request's row in the table of all tokens.

# %%
last_sampled = [first_tokens["R1"][0], first_tokens["R2"][0]]
print("drawn before:", last_sampled, "  input ids:", step.input_ids)
assert step.input_ids.tolist() == last_sampled + prompts["R3"]

# %% [markdown]
# ### 6. Where logits are taken
#
# Only the last token of a request leads to a new one. R3's whole prompt fits into this step, so it draws its first
# token right away.

# %%
print(step.query_start_loc[1:4] - 1, step.logits_indices)
assert step.logits_indices.tolist() == [0, 1, 7]

# %% [markdown]
# ### 7. Slots
#
# A block table lists the blocks of a request in the order of its tokens. Block number × block size + offset is the
# place where a token's key and value are stored: its slot. R1's token at position 40 lies in its block number 2,
# which is block 3 of the cache, at offset 8.


# %%
def slot(request, position, block_size=16):
    return blocks[request][position // block_size] * block_size + position % block_size


owners = [r for r in order for _ in range(counts[r])]
slots = [slot(r, p) for r, p in zip(owners, positions, strict=True)]
print(slots)
assert slot("R1", 40) == 3 * 16 + 8
assert step.slot_mappings[0, :8].tolist() == slots == [56, 33, 64, 65, 66, 67, 68, 69]
figures.slots(step)

# %% [markdown]
# The same from the cache's side: who owns which block, how far it is filled, and which slots this step writes.

# %%
figures.blocks(step, num_blocks=16)

# %% [markdown]
# ### 8. The shape of the launch
#
# The picture above ran the step padded to 12 tokens and 4 requests, so that padding could be seen. A step that mixes
# a prompt and decodes would rather be launched piece by piece; 8 tokens is a size that graphs are captured for, and
# nothing is padded then. The tokens are the same, as they must be: padding changes no result.

# %%
other = two_running_requests()
other.execute_model(the_step(), descriptor=BatchDescriptor(CUDAGraphMode.PIECEWISE, num_tokens=8))
other.sample_tokens()
print(step.tokens(), other.last_step().tokens())
assert other.last_step().num_tokens_padded == 8
assert step.tokens() == other.last_step().tokens()

# %% [markdown]
# In the next step all three decode, one token each. That is a uniform batch, which a whole graph can run; the next
# captured size is 4, so one request and one token are padding.

# %%
cached = CachedRequestData(["R1", "R2", "R3"], [41, 18, 6], [None, None, None])
other.execute_model(
    plan(counts={"R1": 1, "R2": 1, "R3": 1}, cached=cached),
    descriptor=BatchDescriptor(CUDAGraphMode.FULL, num_tokens=4, num_reqs=4, uniform_token_count=1),
)
other.sample_tokens()
next_step = other.last_step()
assert next_step.seq_lens.tolist() == [42, 19, 7, 0]
assert next_step.slot_mappings.tolist() == [[slot("R1", 41), slot("R2", 18), slot("R3", 6), -1]]
figures.batch(next_step)

# %% [markdown]
# ## Which request is a token's?
#
# Three requests bring 2, 5 and 3 tokens. The model sees ten tokens in a row and no borders; whoever needs these works
# them out from the running sum: the owner of each token, and its place among its request's tokens. (The dense layout
# keeps the requests in the order in which they came, which makes the three lists easier to compare.)

# %%
ragged = build(RunnerConfig(max_num_reqs=8, layout="dense"), 16)
arrivals = [new(r, [1] * n, [1 + i]) for i, (r, n) in enumerate({"A": 2, "B": 5, "C": 3}.items())]
ragged.execute_model(plan(arrivals, {"A": 2, "B": 5, "C": 3}))
ragged.sample_tokens()
starts = ragged.last_step().query_start_loc
owner = np.searchsorted(starts[1:], np.arange(10), side="right")
print("running sum", starts[1:], "  owners", owner, "  places", np.arange(10) - starts[owner])
assert starts.tolist() == [0, 2, 7, 10]
assert owner.tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
assert (np.arange(10) - starts[owner]).tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
assert ragged.last_step().positions.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]  # nothing was computed before

# %% [markdown]
# A prompt of 512 tokens beside three decodes makes 515 tokens in a row. Only four of them lead to a new token. The
# step before gives the three their prompts, and so each a first token to decode from.

# %%
long_prompt = build(RunnerConfig(max_num_reqs=8, max_num_batched_tokens=1024, layout="slots"), 64)
three = [new(f"D{i}", [1] * 19, [40 + 2 * i, 41 + 2 * i]) for i in range(3)]
long_prompt.execute_model(plan(three, {"D0": 19, "D1": 19, "D2": 19}))
long_prompt.sample_tokens()
arrival = new("long", [i % 50 for i in range(512)], list(range(1, 33)))
going_on = CachedRequestData(["D0", "D1", "D2"], [19] * 3, [None] * 3)
long_prompt.execute_model(plan([arrival], {"long": 512, "D0": 1, "D1": 1, "D2": 1}, going_on))
long_prompt.sample_tokens()
mixed = long_prompt.last_step()
assert mixed.num_tokens == 515
assert mixed.logits_indices.tolist() == [0, 1, 2, 514]
assert [p.kind for p in figures.batch_data(mixed).requests] == ["decode", "decode", "decode", "prefill"]
figures.batch(mixed)

# %% [markdown]
# ## Four long decodes
#
# Four requests decode one token each; 1000, 512, 37 and 2047 tokens of theirs have been computed. The batch is short
# while the sequences are long: `query_start_loc` counts queries, `seq_lens` keys. In the step before each computes the
# last token of its prompt, whose other tokens have their KV already, as after a hit in a prefix cache.

# %%
have = {"A": 1000, "B": 512, "C": 37, "D": 2047}
long_runner = build(RunnerConfig(max_num_reqs=1024, max_model_len=8192, layout="dense"), num_blocks=300)
free = iter(range(1, 300))
arrivals = [new(r, [1] * n, [next(free) for _ in range(n // 16 + 1)], computed=n - 1) for r, n in have.items()]
long_runner.execute_model(plan(arrivals, dict.fromkeys(have, 1)))
long_runner.sample_tokens()
sent_before = table_traffic(long_runner)["bytes_committed"]
going_on = CachedRequestData(list(have), list(have.values()), [None] * 4)
long_runner.execute_model(plan(counts=dict.fromkeys(have, 1), cached=going_on))
long_runner.sample_tokens()
long_step = long_runner.last_step()
for name in ("query_start_loc", "positions", "seq_lens", "logits_indices"):
    values = getattr(long_step, name)
    print(f"{name:16}{values.dtype!s:8}{values.tolist()}")

assert long_step.query_start_loc.tolist() == [0, 1, 2, 3, 4]
assert long_step.positions.tolist() == [1000, 512, 37, 2047]
assert long_step.seq_lens.tolist() == [1001, 513, 38, 2048]
assert long_step.logits_indices.tolist() == [0, 1, 2, 3]
assert {p.kind for p in figures.batch_data(long_step).requests} == {"decode"}
assert (long_step.positions.dtype, long_step.query_start_loc.dtype, long_step.seq_lens.dtype) == ("i8", "i4", "i4")

# %% [markdown]
# What does it cost to send block tables? With 8192 tokens a request and blocks of 16, a row has 512 entries of 4
# bytes. A table of 1024 rows is 2 MiB. A runner that keeps its live rows together at the front (the dense layout,
# which this one has) sends those alone: 8 KiB for four requests, as the runner's own counter says.

# %%
row_bytes = 8192 // 16 * np.dtype(np.int32).itemsize
sent = table_traffic(long_runner)["bytes_committed"] - sent_before
print(f"a row: {row_bytes} bytes   the table: {1024 * row_bytes / 2**20} MiB   sent in this step: {sent / 2**10} KiB")
assert row_bytes == 2048
assert 1024 * row_bytes == 2 * 2**20
assert sent == 4 * row_bytes == 8 * 2**10

# %% [markdown]
# ## One stage alone
#
# A runner's step is a list of plain functions, *stages*, and each can be run by itself. This one is the slot mapping,
# for requests with 2, 0, 1 and 3 new tokens (the second has none), blocks of 8, and two padding tokens.

# %%
stages = load_stages("cpu")
new_tokens, prefix = np.array([2, 0, 1, 3]), np.array([5, 0, 12, 1])
starts = np.concatenate([[0], np.cumsum(new_tokens)]).astype(np.int32)
owner = np.repeat(np.arange(4), new_tokens)
place = np.arange(6) - starts[owner]
positions = (prefix[owner] + place).astype(np.int64)
table = np.array([[2, 3], [4, 5], [6, 7], [8, 9]], np.int32)
print("inputs of the stage:", ", ".join(stages.stages["compute_slot_mappings"].inputs))

# %%
result = stages.run(
    "compute_slot_mappings", idx_mapping=np.arange(4), query_start_loc=starts,
    positions=np.concatenate([positions, [0, 0]]), block_sizes=[8], slot_mapping_enabled=[True], dcp_sharded=[False],
    dcp_size=1, dcp_rank=0, dcp_interleave=1, num_reqs=4, block_tables=[table],
    slot_mappings=np.full((1, 8), 99, np.int64),
)  # fmt: skip
slots = result["slot_mappings"][0]
print("starts", starts, "  positions", positions, "  lengths", prefix + new_tokens)
print("slots ", slots)
assert starts.tolist() == [0, 2, 2, 3, 6]
assert (prefix + new_tokens).tolist() == [7, 0, 13, 4]
assert slots.tolist() == [21, 22, 60, 65, 66, 67, -1, -1]

# %% [markdown]
# The two entries of the tail held 99 before and are -1 now. A cache write has to leave them out: to NumPy, -1 as an
# index means the last element, and a write through it would hit somebody's memory without a word.

# %%
cache = np.full(80, -99)
cache[slots[slots >= 0]] = np.arange(6)
assert cache[-1] == -99
assert (cache != -99).sum() == 6

careless = np.full(80, -99)
careless[slots] = np.arange(8)
print("the last element of the cache, written with care and without:", cache[-1], careless[-1])
assert careless[-1] == 7

# %% [markdown]
# ## Check yourself
#
# Three texts on vLLM's runners end on questions like these. Where running code can answer, code answers.
#
# **Which row does the first request get, of 1024, and why?** The free rows are a stack, so the last one, 1023. A row
# that is given back lies on top and is the next to be taken.

# %%
rows = build(RunnerConfig(max_num_reqs=1024, layout="slots"), 16)


def row_of_newcomer(name, finished=frozenset()):
    arrival = SchedulerOutput([new(name, [1, 2], [1])], CachedRequestData(), {name: 2}, 2, finished_req_ids=finished)
    rows.execute_model(arrival)
    rows.sample_tokens()
    return int(rows.last_step().idx_mapping[0])


taken = [row_of_newcomer("first"), row_of_newcomer("second", frozenset({"first"}))]
print(taken)
assert taken == [1023, 1023]

# %% [markdown]
# **A batch has a prompt chunk of 300 tokens, a decode, and a chunk of 12 tokens. In which order are they?** The
# decode, then 12, then 300: decodes come first, and the others by size.

# %%
sizes = build(RunnerConfig(max_num_reqs=8, layout="slots"), 64)
sizes.execute_model(plan([new("decode", [1] * 19, [26, 27])], {"decode": 19}))
sizes.sample_tokens()
arrivals = [new("chunk of 300", [1] * 400, list(range(1, 26))), new("chunk of 12", [1] * 40, [28, 29, 30])]
counts = {"chunk of 300": 300, "decode": 1, "chunk of 12": 12}
sizes.execute_model(plan(arrivals, counts, CachedRequestData(["decode"], [19], [None])))
sizes.sample_tokens()
print(sizes.last_step().req_ids)
assert sizes.last_step().req_ids == ("decode", "chunk of 12", "chunk of 300")

# %% [markdown]
# **Where does a decode get its input token, if nobody on the host has seen the last one yet?** From the runner's own
# table of last sampled tokens. Below, the second step is built before anybody asks for the first step's output.

# %%
ahead = build(RunnerConfig(max_num_reqs=8, layout="slots"), 16)
ahead.execute_model(plan([new("A", [50, 51, 52], [3])], {"A": 3}))
promised = ahead.sample_tokens()  # not asked for its tokens yet
ahead.execute_model(plan(counts={"A": 1}, cached=CachedRequestData(["A"], [3], [None])))
used = ahead.last_step().input_ids.tolist()
drawn = promised.get_output().tokens()["A"]
print("input of the second step", used, "  output of the first", drawn)
assert used == list(drawn)

# %% [markdown]
# **How much memory do all token ids take, for 1024 requests of up to 131072 tokens? Why is that not on the GPU?**
# Half a GiB of 32-bit integers, much of it never written. vLLM keeps it in pinned host memory, which kernels read.

# %%
token_table = np.zeros((1024, 131072), np.int32)
print(token_table.nbytes / 2**20, "MiB")
assert token_table.nbytes == 512 * 2**20
del token_table

# %% [markdown]
# **What is wrong with copying a pinned buffer asynchronously and then using it again?** The copy reads the buffer
# when the device gets there, not when it was asked for. Here the stream is a list of things to do later. The cure is
# a buffer that is used once, or a barrier in front of the second use ([late copies](../docs/late-copies.md)).


# %%
def seen_by_first_step(copy_source):
    stream, device, buffer, seen = [], np.zeros(3, int), np.zeros(3, int), []
    for values in ([1000, 512, 37], [7, 8, 9]):
        buffer[:] = values
        source = copy_source(buffer)
        stream.append(lambda source=source: device.__setitem__(slice(None), source))  # the copy
        stream.append(lambda: seen.append(device.tolist()))  # the step that uses it
    for work in stream:
        work()
    return seen[0]


print("one buffer:", seen_by_first_step(lambda b: b), "  a buffer used once:", seen_by_first_step(np.copy))
assert seen_by_first_step(lambda b: b) == [7, 8, 9]
assert seen_by_first_step(np.copy) == [1000, 512, 37]

# %% [markdown]
# **Who calls `get_output`, the only place where a step waits?** With one rank, the engine's own thread. The runner
# below writes down the name of the thread that asks.

# %%
asked_by = set()


class Noting:
    """An output that remembers who asked for it."""

    def __init__(self, output):
        self.output = output

    def get_output(self):
        asked_by.add(threading.current_thread().name)
        return self.output.get_output()


def noting_runner(config):
    runner = load_runner("cpu", config)
    sample = runner.sample_tokens
    runner.sample_tokens = lambda *args, **more: Noting(sample(*args, **more))
    return runner


with LLM(WitnessConfig(), runner=noting_runner) as llm:
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, seed=1))
    ranks_that_answer = len(llm.collective_rpc("get_kv_cache_spec"))
print(asked_by, "  answers to a call of all workers:", ranks_that_answer)
assert asked_by == {threading.current_thread().name}
assert ranks_that_answer == 1

# %% [markdown]
# **With two ranks of tensor parallelism, how many workers run the model, and how many return tokens?** Both run it,
# for each holds half of every layer. Both draw the same tokens, but one of them replies; there, with asynchronous
# scheduling, a thread of its own waits for the copy. A call of all workers gets two answers. Our runners have one
# rank, so this cannot be shown here, and they say so:

# %%
try:
    load_runner("cpu", RunnerConfig(parallel=ParallelContext(tp_size=2)))
except RunnerError as error:
    print(error)
else:
    raise AssertionError("two ranks were accepted")

# %% [markdown]
# **Why does every model class take the same arguments in its constructor?** So that whoever builds a model need not
# know its family, and each layer can load its own share of the weights at once instead of cutting them afterwards.
# Here too a runner knows a model by four members alone; [notebook 07](07_swap_backends.ipynb) brings one of its own.
