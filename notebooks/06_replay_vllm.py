# %% [markdown]
# # 06 Replay a recording of vLLM
#
# `conformance/data/recordings` holds steps that vLLM 0.26 took on a GPU: for each of them the scheduler's plan, the
# arrays that vLLM's model runner built, and the tokens that it drew. A runner can be given the same plans, and
# whatever it builds can be held against numbers that nobody here has computed.

# %%
import json
import tempfile
from pathlib import Path

import conformance
from conformance import figures
from conformance.replay import replay_recording
from runner_api import TraceError, load_trace

RECORDINGS = Path(conformance.__file__).parent / "data" / "recordings"
for file in sorted(RECORDINGS.glob("*.jsonl")):
    trace = load_trace(file)
    print(f"{trace.name:12} {trace.meta['source']:14} runner {trace.meta['runner']}  {len(trace.steps):3} steps")

# %% [markdown]
# ## What happened
#
# This one had 22 blocks of KV cache for everybody, which is too few. When no block is left, the scheduler preempts a
# request: its blocks go to others, and later it begins again with all its tokens as a prompt.

# %%
preempt = load_trace(RECORDINGS / "preempt.jsonl")
picture = figures.timeline_data(preempt)
preemptions = [(life.req_id, step) for life in picture.lives for step in life.preempted]
print("preempted:", preemptions, "  fewest free blocks:", min(picture.free))
assert len(preemptions) == 4
assert min(picture.free) == 0
figures.timeline(preempt)

# %% [markdown]
# Three of the four come back. The other, r004, had been scheduled ahead: the token that it was still waiting for was
# its last one, so that it finished without another step.

# %%
resumed = {work.req_id for work in picture.work if work.resumed}
last = max(i for i, s in enumerate(preempt.steps) if "r004" in s.req_ids)
asked = next(n for s in preempt.steps for n in s.plan.scheduled_new_reqs if n.req_id == "r004").sampling_params
said = [t for s in preempt.steps for t in s.tokens().get("r004", ())]
print("resumed:", sorted(resumed), f"  r004: {len(said)} tokens of {asked.max_tokens}, the last in step {last}")
assert resumed == {"r009", "r018", "r019"}
assert len(said) == asked.max_tokens
assert last == 14

# %% [markdown]
# A single step is a `StepRecord`, the same type that our own runners fill in, so that every picture can be drawn of
# it. This is the first step of another recording that mixes decodes with chunks of prompts.

# %%
mixed = load_trace(RECORDINGS / "mixed.jsonl")
number = next(
    i
    for i, s in enumerate(mixed.steps)
    if s.num_reqs > 2 and len({*s.plan.num_scheduled_tokens.values()}) > 2 and 1 in s.plan.num_scheduled_tokens.values()
)
names = figures.Names(figures.requests_of(mixed))
print(f"step {number}: {mixed.steps[number].plan.num_scheduled_tokens}")
figures.batch(mixed.steps[number], names=names)

# %% [markdown]
# ## Replay
#
# The runner gets the recorded plan of each step, builds its arrays and draws its own tokens. Then the recorded tokens
# are imposed, so that one difference does not lead to another. The checkpoint is a small random Llama that lies
# beside the recordings, and it is really run.

# %%
report = replay_recording(RECORDINGS / "mixed.jsonl", runner="cpu")
for field, (equal, different) in report.fields.items():
    print(f"{field:22} {equal:5} elements equal, {different} different")
print("tokens:", report.tokens, "  verdict:", report.verdict)
assert report.verdict == "AGREE"
assert report.steps == len(mixed.steps)
assert all(different == 0 for _, different in report.fields.values())
assert report.tokens["different"] == 0

# %% [markdown]
# Every integer agrees. Tokens may be near ties: vLLM computed attention with shorter numbers (TF32), so that its
# logits are off by up to 0.04, and where two logits lie within that, either token may win. Each near tie is looked at
# and counted; here is how many there were.

# %%
total = sum(report.tokens.values())
print(f"{report.tokens['near_tie']} of {total} tokens were near ties")
assert total > 100
assert report.tokens["near_tie"] <= total // 50

# %% [markdown]
# ## A recording that was tampered with
#
# Would the replay notice if one number were wrong? In a copy, one slot of one step is changed by one. Everything else
# stays.

# %%
lines = (RECORDINGS / "mixed.jsonl").read_text(encoding="utf-8").splitlines()
changed = json.loads(lines[1 + number])  # the first line is the header
before = changed["batch"]["slot_mappings"][0][2]
changed["batch"]["slot_mappings"][0][2] = before + 1
lines[1 + number] = json.dumps(changed)

folder = tempfile.TemporaryDirectory()
copy = Path(folder.name) / "mixed.jsonl"
copy.write_text("\n".join(lines) + "\n", encoding="utf-8")

checkpoint = RECORDINGS.parent / "checkpoints" / mixed.meta["model"]
tampered = replay_recording(copy, runner="cpu", model=str(checkpoint))
print(tampered.verdict, tampered.first_divergence)
first = tampered.first_divergence
assert tampered.verdict == "DIVERGE"
assert first.step == number
assert first.difference.field == "slot_mappings"
assert first.difference.index == (0, 2)
assert (first.difference.expected, first.difference.got) == (before + 1, before)

# %% [markdown]
# It was found in the step, the field and the element where it was put, and nowhere else: all other elements are
# equal.

# %%
different = {field: d for field, (_, d) in tampered.fields.items() if d}
print(different)
assert different == {"slot_mappings": 1}
figures.divergence(load_trace(copy).steps[number], mixed.steps[number], labels=("tampered", "right"), names=names)

# %% [markdown]
# A recorded token that was changed is no better off. The runner draws its own, sees the other one, and asks whether
# rounding could explain it. It cannot.

# %%
lines = (RECORDINGS / "mixed.jsonl").read_text(encoding="utf-8").splitlines()
changed = json.loads(lines[1 + number])
token = changed["sampled"]["token_ids"][0][0]
changed["sampled"]["token_ids"][0][0] = token + 1
lines[1 + number] = json.dumps(changed)
copy.write_text("\n".join(lines) + "\n", encoding="utf-8")
tampered = replay_recording(copy, runner="cpu", model=str(checkpoint), steps=number + 1)
print(tampered.verdict, tampered.first_divergence)
first = tampered.first_divergence.difference
assert tampered.tokens["different"] == 1
assert (first.field, first.index) == ("token_ids", (0, 0))
assert (first.expected, first.got) == (token + 1, token)

# %% [markdown]
# And a recording that is cut short is refused before anything runs, with the line where it ends.

# %%
copy.write_text("\n".join(lines[:10]) + "\n", encoding="utf-8")
try:
    replay_recording(copy, runner="cpu", model=str(checkpoint))
except TraceError as error:
    print(str(error).replace(str(copy), copy.name))
else:
    raise AssertionError("half a recording was replayed")
folder.cleanup()

# %% [markdown]
# ## Nothing left to chance
#
# `sampling` was recorded with every sampling parameter mixed, and with the logits of each step. Given those logits,
# no rounding of the model is left: each token, rank and log probability must be the recorded one.

# %%
report = replay_recording(RECORDINGS / "sampling.jsonl", runner="cpu")
print(report.tokens, report.verdict, {f: report.fields[f] for f in report.fields if "logprob" in f or f == "ranks"})
assert report.verdict == "AGREE"
assert report.tokens["near_tie"] == report.tokens["different"] == 0
assert report.tokens["equal"] > 300

# %% [markdown]
# vLLM's other runner keeps its rows dense. Its recordings are replayed on the dense layout, and on the slots layout
# too: then steps are compared by request, for the batch has another order and rows have no counterpart.

# %%
for layout in ("dense", "slots"):
    report = replay_recording(RECORDINGS / "preempt_v1.jsonl", runner="cpu", layout=layout)
    print(f"{layout}: {report.verdict}, {sum(equal for equal, _ in report.fields.values())} elements equal")
    assert report.verdict == "AGREE"
    assert report.layout == layout

# %% [markdown]
# To record steps of your own vLLM, see [record vLLM](../docs/record-vllm.md).
