# %% [markdown]
# # 02 Rows, slots, and why padding is not optional
#
# Two numbers are easily mixed up. A *row* is the place of a request in the runner's own tables: its tokens, its block
# table, its sampling state. A *slot* is the place of one token's key and value in the KV cache. A row stays with a
# request while it runs; slots follow from the blocks that the scheduler gave it.
#
# The second half is about the tails of arrays. A captured graph runs at a fixed size, so a small batch leaves entries
# that belong to nobody. What stands in them is read all the same.

# %%
import dataclasses

import numpy as np

from conformance import figures
from conformance.mutants import MUTANTS
from conformance.mutation import mutated
from runner_api import (
    BatchDescriptor,
    CachedRequestData,
    CUDAGraphMode,
    NewRequestData,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
    load_runner,
    load_stages,
)

# %%
GREEDY = SamplingParams(temperature=0.0)


def build(factory, rows=4, num_blocks=16, block_size=4):
    config = RunnerConfig(max_num_reqs=rows, max_num_batched_tokens=16, max_model_len=16, layout="slots")
    runner = load_runner(factory, config)
    runner.load_model(WitnessConfig(groups=(WitnessGroup(block_size),)))
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), num_blocks))
    return runner


def new(name, length, blocks):
    tokens = [ord(name) - 60 + i for i in range(length)]
    return NewRequestData(name, tokens, tokens, 0, (blocks,), GREEDY)


def plan(arrivals=(), going_on=None, finished=()):
    """arrivals: new requests, whole prompts; going_on: tokens computed so far of requests that decode."""
    going_on = going_on or {}
    counts = {r.req_id: len(r.prompt_token_ids) for r in arrivals} | dict.fromkeys(going_on, 1)
    cached = CachedRequestData(list(going_on), list(going_on.values()), [None] * len(going_on))
    return SchedulerOutput(
        list(arrivals), cached, counts, sum(counts.values()), finished_req_ids=frozenset(finished)
    )  # fmt: skip


def step(runner, plan, descriptor=None):
    runner.execute_model(plan, descriptor=descriptor)
    runner.sample_tokens()
    return runner.last_step()


# %% [markdown]
# ## Rows stay, the batch does not
#
# Three requests come. Then B finishes, D comes, and only D and A run. C keeps its row while it waits, D takes the row
# that was freed last, and the batch of the step is put in order anew. `idx_mapping` is the arrow between the two.

# %%
runner = build("cpu", rows=6)
first = step(runner, plan([new("A", 6, [1, 2]), new("B", 5, [3, 4]), new("C", 3, [5])]))
second = step(runner, plan([new("D", 3, [3])], {"A": 6}, finished={"B"}))
row, rows_then = (dict(zip(s.req_ids, s.idx_mapping.tolist(), strict=True)) for s in (first, second))
print("rows of the first step", row, "  of the second", rows_then)
assert second.req_ids == ("A", "D")
assert second.idx_mapping.tolist() == [row["A"], row["B"]]

# %%
names = figures.Names("ABCD")
figures.rows([first, second], num_rows=6, names=names)

# %% [markdown]
# Slots are another matter: D got block 3, which was B's. Its first token goes to slot 3 × 4 = 12, whatever row D has.

# %%
assert second.slot_mappings[0].tolist() == [1 * 0 + 2 * 4 + 2, 12, 13, 14]
figures.blocks([first, second], num_blocks=16, names=names)

# %% [markdown]
# ## A step that is smaller than its buffers
#
# Now a story of three steps. A, B and C arrive together. Then A goes on alone, while B and C wait. Then B and C go
# on. The middle step has one token; it is launched as a graph of four requests and four tokens.

# %%
FULL = BatchDescriptor(CUDAGraphMode.FULL, num_tokens=4, num_reqs=4, uniform_token_count=1)


def story(factory):
    runner = build(factory)
    arrive = step(runner, plan([new("A", 5, [1, 2]), new("B", 4, [3, 4]), new("C", 3, [5])]))
    alone = step(runner, plan(going_on={"A": 5}), FULL)
    others = step(runner, plan(going_on={"B": 4, "C": 3}))
    return arrive, alone, others


right = story("cpu")
names = figures.Names("ABC")
figures.batch(right[0], names=names)

# %%
figures.batch(right[1], names=names)

# %% [markdown]
# What stands in the tails of the middle step is *neutral*: it does no harm, whoever reads it.
#
# | field | neutral value | so that |
# |---|---|---|
# | `query_start_loc` | the token count again | padding requests have no query, and the array never falls |
# | `seq_lens` | 0 | they have no key to walk over |
# | block table rows | block 0, which nobody owns | what is looked up all the same is nobody's |
# | slots | -1 | padding tokens write nothing |
# | token ids, positions | 0 | an embedding and a rotary table know them |
# | `logits_indices` | 0 | a gather of a fixed size stays inside |

# %%
_, alone, _ = right
assert (alone.num_reqs, alone.num_reqs_padded, alone.num_tokens, alone.num_tokens_padded) == (1, 4, 1, 4)
assert alone.query_start_loc.tolist() == [0, 1, 1, 1, 1]
assert alone.seq_lens.tolist() == [6, 0, 0, 0]
assert all((table == 0).all() for table in alone.block_tables[0][1:])
assert alone.slot_mappings[0, 1:].tolist() == [-1, -1, -1]

# %% [markdown]
# ## Faults on purpose
#
# The project keeps a list of *mutants*: the reference with one expression changed. Those of kind K4 leave padding as
# it is. Each is loaded as a second copy of the package, told the same story, and held against the right one.

# %%
K4 = {m.id: m for m in MUTANTS["cpu"] if m.kind == "K4" and m.layout == "slots"}
print(f"{len(K4)} mutants of kind K4, for example:")
CHOSEN = ("slot-tail-stale", "query-start-tail-padded", "seq-lens-tail-stale", "dirty-rows-forgotten")
for name in CHOSEN:
    print(f"  {name:26} {K4[name].why}")


def with_fault(name):
    mutant = K4[name]
    with mutated("cpu", mutant.path, mutant.old, mutant.new) as faulty:
        return story(faulty.factory)


def tokens(records):
    return [record.tokens() for record in records]


# %% [markdown]
# ### Slots: somebody else's memory is overwritten
#
# The tail of the slot mapping keeps what the first, larger step left there. The padded step then stores its padding
# tokens in slots of B and C, who are not even part of it.

# %%
faulty = with_fault("slot-tail-stale")
figures.divergence(right[1], faulty[1], labels=("right", "stale"), names=names)

# %% [markdown]
# The step with the fault draws the right token. The wrong ones come one step later, from two other requests. Nothing
# crashed. This is why such faults are looked for in the record and not in the text that a model writes.

# %%
print("right:", tokens(right))
print("stale:", tokens(faulty))
places = zip(right[0].slot_mappings[0].tolist(), "CCCBBBBAAAAA", right[0].positions.tolist(), strict=True)
owner = {slot: (request, position) for slot, request, position in places}
overwritten = [owner[int(s)] for s in faulty[1].slot_mappings[0, 1:]]
print("overwritten:", ", ".join(f"{r} at position {p}" for r, p in overwritten))
assert overwritten == [("C", 1), ("C", 2), ("B", 0)]
assert tokens(faulty)[:2] == tokens(right)[:2]
assert all(tokens(faulty)[2][r] != tokens(right)[2][r] for r in "BC")

# %% [markdown]
# ### Where queries begin
#
# The tail counts one token too many, so that the first padding request has a query of its own. Attention then works
# for a request that is not there, and a kernel that splits decodes from prompts miscounts both.

# %%
faulty = with_fault("query-start-tail-padded")
assert np.diff(faulty[1].query_start_loc).tolist() == [1, 1, 0, 0]
assert tokens(faulty) == tokens(right)  # the reference leaves what padding computes alone
figures.divergence(right[1], faulty[1], labels=("right", "padded"), names=names)

# %% [markdown]
# A tail that falls back to an earlier value, or to 0, gives the last request a negative length. This one is loud:

# %%
for name in ("query-start-tail-zero", "query-start-tail-stale"):
    try:
        with_fault(name)
    except ValueError as error:
        print(f"{name}: {error}")
    else:
        raise AssertionError(f"{name} went unnoticed")

# %% [markdown]
# ### Lengths: keys that nobody has
#
# Padding requests keep the lengths of an earlier batch. The tokens stay right, since no query looks at these keys.
# But attention walks over them in every step.

# %%
faulty = with_fault("seq-lens-tail-stale")
keys = {"right": int(right[1].seq_lens.sum()), "stale": int(faulty[1].seq_lens.sum())}
print("keys that attention walks over:", keys)
assert keys == {"right": 6, "stale": 15}
assert tokens(faulty) == tokens(right)
figures.divergence(right[1], faulty[1], labels=("right", "stale"), names=names)

# %% [markdown]
# ### Table rows: whose keys they are
#
# Rows that a larger batch has left behind keep its blocks. With right lengths nobody looks at them; with stale
# lengths attention reads blocks of requests that do not run, or that have gone and whose blocks are somebody else's.
# Two small faults, each without a symptom, make a bad one together.

# %%
faulty = with_fault("dirty-rows-forgotten")
assert tokens(faulty) == tokens(right)
figures.divergence(right[1], faulty[1], labels=("right", "stale"), names=names)


# %%
def blocks_walked(record, block_size=4):
    """Blocks that the keys of padding requests are read from."""
    walked = set()
    for i in range(record.num_reqs, record.num_reqs_padded):
        columns = -(-int(record.seq_lens[i]) // block_size)
        walked |= set(record.block_tables[0][i][:columns].tolist())
    return walked


table, lengths = K4["dirty-rows-forgotten"], K4["seq-lens-tail-stale"]
with mutated("cpu", table.path, table.old, table.new, (lengths.path, lengths.old, lengths.new)) as both:
    middle = story(both.factory)[1]
print("right", blocks_walked(right[1]), "  tables", blocks_walked(faulty[1]), "  both faults", blocks_walked(middle))
assert blocks_walked(right[1]) == blocks_walked(faulty[1]) == set()
assert blocks_walked(middle) == {1, 2, 3}  # B's block 3, and A's blocks once more

# %% [markdown]
# ### Token ids, positions, logits rows
#
# The record holds real tokens only, so these tails are looked at where they are made: in two stages, run alone for the
# middle step of the story, with buffers in which an earlier step has left something.

# %%
STALE = 151_000  # a token id of a larger vocabulary, a position beyond the rotary table, a row of a larger batch


def tails(factory):
    """A's one token in buffers of four: the record of the middle step, with what stands behind the token."""
    stages, one = load_stages(factory), np.array([1, 0, 0, 0], np.int32)
    placed = stages.run(
        "prepare_pos_seq_lens", idx_mapping=np.arange(4), query_start_loc=alone.query_start_loc,
        num_computed_tokens=5 * one, num_reqs=1, positions=np.full(4, STALE), seq_lens=np.full(4, STALE, np.int32),
    )  # fmt: skip
    filled = stages.run(
        "combine_sampled_and_draft_tokens", idx_mapping=np.arange(4), query_start_loc=alone.query_start_loc,
        seq_lens=placed["seq_lens"], prefill_len=5 * one, last_sampled_tokens=int(alone.input_ids[0]) * one,
        draft_tokens=np.zeros((4, 0), np.int64), cu_num_logits=np.array([0, 1, 1, 1, 1], np.int32), num_reqs=1,
        input_ids=np.full(4, STALE, np.int32), logits_indices=np.full(4, STALE),
    )  # fmt: skip
    return dataclasses.replace(
        alone, positions=placed["positions"], input_ids=filled["input_ids"], logits_indices=filled["logits_indices"]
    )


def stale(name):
    mutant = K4[name]
    with mutated("cpu", mutant.path, mutant.old, mutant.new) as copy:
        return tails(copy.factory)


clean = tails("cpu")
for field in ("input_ids", "positions", "logits_indices"):
    values = getattr(clean, field)
    assert values[0] == getattr(alone, field)[0]
    assert (values[1:] == 0).all()


def differing(record):
    return {f.name: f.different for f in figures.divergence_data(clean, record).different}


# %% [markdown]
# An embedding cannot look up token 151000 if it has 64 entries:

# %%
stale_ids = stale("input-ids-tail-stale")
assert differing(stale_ids) == {"input_ids": 3}
figures.divergence(clean, stale_ids, labels=("clean", "stale"), names=names)

# %% [markdown]
# A rotary table ends at the longest sequence that the model allows, here 16 tokens:

# %%
stale_positions = stale("positions-tail-stale")
assert differing(stale_positions) == {"positions": 3}
figures.divergence(clean, stale_positions, labels=("clean", "stale"), names=names)

# %% [markdown]
# And the last layer's output has as many rows as the batch has tokens, so that a gather of four rows leaves it:

# %%
stale_rows = stale("logits-indices-tail-stale")
assert differing(stale_rows) == {"logits_indices": 3}
figures.divergence(clean, stale_rows, labels=("clean", "stale"), names=names)

# %% [markdown]
# NumPy says so when the step looks these values up. A GPU reads whatever lies there, or stops the whole process.

# %%
embedding = np.zeros((64, 2))
cosines = np.cos(np.arange(16)[:, None] / 10_000 ** np.array([0.0, 0.5]))
hidden = embedding[clean.input_ids] * cosines[clean.positions]  # four rows, and no harm done by the padding
assert hidden[clean.logits_indices].shape == (4, 2)


def refused(table, index):
    try:
        table[index]
    except IndexError as error:
        return str(error)
    raise AssertionError("the lookup went through")


for what, table, index in (
    ("embedding[input_ids]", embedding, stale_ids.input_ids),
    ("cosines[positions]", cosines, stale_positions.positions),
    ("hidden[logits_indices]", hidden, stale_rows.logits_indices),
):
    print(f"{what:24}{refused(table, index)}")
    assert "index 151000 is out of bounds" in refused(table, index)

# %% [markdown]
# ## What to take home
#
# Of the four faults that a record shows, one changed tokens, and it did so in a later step and in other requests.
# None would show in a step that is not padded. So every tail has a clause that is checked after every step, on
# batches that shrink and grow: `modelrunner clauses PAD` lists them.

# %%
unpadded = {}
for name in CHOSEN:
    mutant = K4[name]
    with mutated("cpu", mutant.path, mutant.old, mutant.new) as copy:
        runner = build(copy.factory)
        step(runner, plan([new("A", 5, [1, 2]), new("B", 4, [3, 4]), new("C", 3, [5])]))
        record = step(runner, plan(going_on={"A": 5}))  # no descriptor: nothing is padded
    eager = build("cpu")
    step(eager, plan([new("A", 5, [1, 2]), new("B", 4, [3, 4]), new("C", 3, [5])]))
    unpadded[name] = len(figures.divergence_data(step(eager, plan(going_on={"A": 5})), record).different)
print("fields that differ where nothing is padded:", unpadded)
assert not any(unpadded.values())
