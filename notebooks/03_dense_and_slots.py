# %% [markdown]
# # 03 Dense against slots
#
# Where does a request's state live between two steps? There are two answers. In the *slots* layout a request keeps
# its row; rows may have holes, and `idx_mapping` leads from the batch to the rows. In the *dense* layout the live
# requests always stand in the first rows, so that row number and batch index are one and the same; whoever leaves a
# hole has another request moved into it.
#
# Both give the same tokens. What differs is the work, and which mistakes are easily made.

# %%
import matplotlib.pyplot as plt
import numpy as np

from conformance import figures
from conformance.bench.persistence import compare, stops_paying
from conformance.bench.request_trace import fixed, request_trace, short
from conformance.mutants import MUTANTS
from conformance.mutation import mutated
from runner_api import (
    CachedRequestData,
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
from runner_api.loader import table_traffic


# %%
def build(layout, factory="cpu", **more):
    runner = load_runner(factory, RunnerConfig(max_num_reqs=8, layout=layout, **more))
    runner.load_model(WitnessConfig(groups=(WitnessGroup(4),)))
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), 32))
    return runner


# %%
class Plans:
    """Plans of requests that come with a prompt, decode, and leave; it keeps the books that a scheduler keeps."""

    def __init__(self):
        self.known, self.drawn, self.next_block = {}, {}, 1

    def plan(self, arrive=None, go_on="", leave=""):
        """arrive: prompt length by name; go_on: names of those that decode; leave: who finished before this step."""
        new, cached = [], CachedRequestData()
        for name in go_on:
            cached.req_ids.append(name)
            cached.num_computed_tokens.append(self.known[name] - 1)
            cached.new_block_ids.append(None)
            cached.num_output_tokens.append(self.drawn[name])
        for name, length in (arrive or {}).items():
            blocks, self.next_block = [self.next_block, self.next_block + 1], self.next_block + 2
            tokens = [ord(name) - 60 + i for i in range(length)]
            seed = 1000 + ord(name)
            new.append(NewRequestData(name, tokens, tokens, 0, (blocks,), SamplingParams(temperature=1.0), seed))
            self.known[name], self.drawn[name] = length, 0
        counts = (arrive or {}) | dict.fromkeys(go_on, 1)
        for name in counts:
            self.known[name] += 1
            self.drawn[name] += 1
        return SchedulerOutput(new, cached, counts, sum(counts.values()), finished_req_ids=frozenset(leave))


def run(runner, *steps):
    """The record of each step."""
    plans, records = Plans(), []
    for what in steps:
        runner.execute_model(plans.plan(**what))
        runner.sample_tokens()
        records.append(runner.last_step())
    return records


# %% [markdown]
# ## A request leaves
#
# Four requests arrive. B finishes, the others go on. Then A finishes and E comes.

# %%
STORY = (
    {"arrive": {"A": 3, "B": 3, "C": 3, "D": 3}},
    {"go_on": "ACD", "leave": "B"},
    {"arrive": {"E": 2}, "go_on": "CD", "leave": "A"},
    {"go_on": "CDE"},
)
slots_runner, dense_runner = build("slots"), build("dense")
slots, dense = run(slots_runner, *STORY), run(dense_runner, *STORY)
names = figures.Names("ABCDE")
for number, (s, d) in enumerate(zip(slots, dense, strict=True)):
    rows = [dict(zip(r.req_ids, r.idx_mapping.tolist(), strict=True)) for r in (s, d)]
    print(f"step {number}  rows in slots {rows[0]!s:38} in dense {rows[1]}")

# %% [markdown]
# In the slots layout rows were given from the top, and nobody ever moved.

# %%
assert slots[1].idx_mapping.tolist() == [7, 5, 4]
figures.rows(slots[:2], num_rows=8, names=names)

# %% [markdown]
# In the dense layout B left a hole in row 1, and D, the last one, was moved into it. `idx_mapping` is 0, 1, 2, …
# in every step, and the order of the batch is the order of the rows.

# %%
assert dense[1].req_ids == ("A", "D", "C")
assert all(r.idx_mapping.tolist() == list(range(r.num_reqs)) for r in dense)
figures.rows(dense[:2], num_rows=8, names=names)

# %% [markdown]
# When A leaves, E takes row 0 at once: who comes fills holes first, and only what is left over is condensed.

# %%
assert dense[2].req_ids == ("E", "D", "C")
figures.rows(dense[:3], num_rows=8, names=names)

# %% [markdown]
# Tokens depend on neither. What it costs is in the counters: one row moved.

# %%
assert [r.tokens() for r in slots] == [r.tokens() for r in dense]
traffic = {name: table_traffic(r) for name, r in (("slots", slots_runner), ("dense", dense_runner))}
for name, counters in traffic.items():
    print(name, counters)
assert traffic["dense"]["rows_moved"] == 1
assert "rows_moved" not in traffic["slots"]

# %% [markdown]
# ## Decodes to the front
#
# Attention kernels want requests with one token before the others. The slots layout sorts a list of names. The dense
# layout has to swap rows: a prompt that stands in front of a decode changes places with it.

# %%
MIXED = ({"arrive": {"A": 3, "B": 3}}, {"arrive": {"C": 4}, "go_on": "B", "leave": "A"})
as_they_come = run(build("dense"), *MIXED)
reordering = build("dense", reorder_batch_threshold=1)
reordered = run(reordering, *MIXED)
print("as they come:", as_they_come[1].req_ids, "  decodes first:", reordered[1].req_ids)
assert as_they_come[1].req_ids == ("C", "B")
assert reordered[1].req_ids == ("B", "C")
assert as_they_come[1].tokens() == reordered[1].tokens()
assert table_traffic(reordering)["rows_moved"] == 2
figures.batch(reordered[1], names=figures.Names("ABC"))

# %% [markdown]
# ## What moving rows invites
#
# Whatever belongs to a row has to move along: tokens, counters, blocks, and a dozen fields of the sampler. Forget
# one, and nothing is wrong until a request leaves out of order. In this mutant the seeds are forgotten.

# %%
fault = next(m for m in MUTANTS["cpu"] if m.id == "dense-seeds-left-behind")
print(fault.why)
with mutated("cpu", fault.path, fault.old, fault.new) as copy:
    faulty = run(build("dense", copy.factory), *STORY)
for number, (right, wrong) in enumerate(zip(dense, faulty, strict=True)):
    print(f"step {number}  right {right.tokens()}  with the fault {wrong.tokens()}")
assert faulty[0].tokens() == dense[0].tokens()
assert faulty[1].tokens() != dense[1].tokens()

# %% [markdown]
# In step 1 the tokens of D, and of D alone, are wrong: it was moved, and draws with the seed of B, who has left. A
# test that lets requests finish in the order in which they came would never see it.

# %%
wrong = {r for a, b in zip(dense, faulty, strict=True) for r in a.req_ids if a.tokens()[r] != b.tokens()[r]}
print("requests with wrong tokens:", wrong)
assert wrong == {"D"}

# %% [markdown]
# ## Why keep anything at all?
#
# Both layouts keep rows from step to step, since two steps one behind the other are nearly the same. How much does
# that save? The experiment: requests of 200 to 999 tokens arrive, up to two a step, and stay for 50 to 449 steps. One
# way, every request leaves and comes back in each step, so that its row is written whole. The other way, a row is
# written once, and a block is appended every 16 tokens. The runner's own tables count the entries.

# %%
trace = request_trace(seed=1, num_steps=60)
small = compare("cpu", trace, "slots", timed_steps=5)
print(f"{trace.num_steps} steps, {len(trace.requests)} requests, at most {trace.most_active} at once")
print(f"entries, rebuilding: {small.rebuild.entries:,}   with differences: {small.diffs.entries:,}")
print(f"ratio: {small.entry_ratio:.1f}")
assert small.as_computed  # what the runner counted is what arithmetic says
assert small.entry_ratio > 10

# %% [markdown]
# Sixty steps are a short run: most of the rows written once have not paid yet. Since the counters follow arithmetic,
# arithmetic gives the whole experiment of 2000 steps, a ratio of 200. (`modelrunner bench persistence` drives the
# runner through all of it.)

# %%
whole = request_trace(seed=1)
ratio = whole.entries_rebuilding / whole.entries_of_diffs
print(f"{whole.num_steps} steps: {whole.entries_rebuilding:,} / {whole.entries_of_diffs:,} = {ratio:.1f}")
assert 199 < ratio < 201

# %% [markdown]
# ## When does it stop paying?
#
# Make every request short, so that the batch turns over in each step. A request of 2 to 5 steps still has its row
# written once instead of three or four times. One that lives a single step has it written once either way.

# %%
points = {n: compare("cpu", request_trace(1, 60, fixed(n)), "slots", timed_steps=5) for n in (1, 2, 4, 16)}
for lifetime, point in points.items():
    print(f"{lifetime:3} steps: {point.rebuild.entries:7,} / {point.diffs.entries:6,} = {point.entry_ratio:.2f}")
assert all(point.as_computed for point in points.values())
assert stops_paying({n: point.entry_ratio for n, point in points.items()}) == 1

very_short = request_trace(1, 2000, short)
print(f"2 to 5 steps: {very_short.entries_rebuilding / very_short.entries_of_diffs:.2f}")
assert 3.4 < very_short.entries_rebuilding / very_short.entries_of_diffs < 3.6

# %% [markdown]
# So the persistent batch stops paying where every request lives for one step: a service that answers with a single
# token, a classifier. There it even writes a little more, for a prompt that ends at a block boundary gets its next
# block as an entry of its own. From two steps on it saves.
#
# The picture has the short run step by step on the left, as the runner counted it, and on the right what 2000 steps
# come to if every request lives as long as the axis says.

# %%
lifetimes = (1, 2, 4, 8, 16, 64, 250)
traces = [request_trace(1, 2000, fixed(n)) for n in lifetimes]
ratios = [t.entries_rebuilding / t.entries_of_diffs for t in traces]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for way, label, colour in ((small.rebuild, "rebuilding", "#D55E00"), (small.diffs, "differences", "#0072B2")):
    sums = np.cumsum(way.written)
    left.semilogy(range(1, 1 + len(sums)), sums, color=colour)
    end = (len(sums), sums[-1])
    left.annotate(f"{label}: {end[1]:,}", end, (-2, 5), textcoords="offset points", ha="right", color=colour)
left.margins(y=0.12)
left.set(xlabel="step", ylabel="entries written so far")
right.loglog(lifetimes, ratios, "o-", color="#0072B2")
for lifetime, ratio in zip(lifetimes, ratios, strict=True):
    right.annotate(f"{ratio:.3g}", (lifetime, ratio), (-5, 5), textcoords="offset points", ha="right", fontsize=9)
right.axhline(1, color="0.6", linestyle=":")
right.margins(y=0.15)
right.set_xlim(0.4, 330)
right.set(xlabel="steps that a request lives", ylabel="rebuilding / differences")
right.set_xticks(lifetimes, map(str, lifetimes))
right.minorticks_off()
for panel in (left, right):
    panel.spines[["top", "right"]].set_visible(False)
plt.show()
assert 0.99 < ratios[0] < 1 < ratios[1]
assert ratios == sorted(ratios)

# %% [markdown]
# Time is another matter: a step has other work too, so that its time gains less than the entries do. `modelrunner bench
# persistence --lifetimes --plot FILE` measures both on your machine.

# %% [markdown]
# ## What each layout sends
#
# A difference is a row, a column, and what is written from there on. All differences of a step are packed one behind
# the other and applied by one stage. Two of them, in a table of three rows:

# %%
written = load_stages("cpu").run(
    "apply_staged_writes", indices=np.array([2, 0], np.int32), starts=np.array([3, 1], np.int32),
    contents=np.array([3, 1, 2, -1, -2, -5], np.int32), cu_lens=np.array([3, 6], np.int32), num_writes=2,
    base=np.zeros((3, 8), np.int32),
)["base"]  # fmt: skip
print(written)
assert written[2].tolist() == [0, 0, 0, 3, 1, 2, 0, 0]
assert written[0].tolist() == [0, -1, -2, -5, 0, 0, 0, 0]
assert not written[1].any()

# %% [markdown]
# The dense layout copies the front of its table in every step, live rows whole, changed or not. The slots layout
# keeps its table on the device and sends differences; there, the rows of the batch are gathered into batch order.

# %%
dense_small = compare("cpu", trace, "dense", timed_steps=5)
for name, result in (("slots", small), ("dense", dense_small)):
    for counter in ("bytes_staged", "bytes_gathered", "bytes_committed"):
        value = result.diffs.per_step(counter)
        if value is not None:
            print(f"{name:6} {counter:16} {value:12,.0f} a step")
assert dense_small.diffs.entries == small.diffs.entries
assert dense_small.diffs.per_step("bytes_committed") > 20 * small.diffs.per_step("bytes_staged")
