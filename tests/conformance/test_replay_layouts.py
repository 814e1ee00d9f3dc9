"""Recordings of both row layouts on runners of both: each on its own to the row, on the other one by request."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from conformance.comparison import compare_field
from conformance.recording import RECORDINGS, ReplayStep
from conformance.replay import replay_recording
from conformance.replay_layout import ROW_FIELDS, batch_order, in_batch_order, plans_for
from engine_core.cli import main
from runner_api import (
    INTEGER_FIELDS,
    CachedRequestData,
    CapabilityError,
    ConfigError,
    ForcedStep,
    NewRequestData,
    PlanError,
    SchedulerOutput,
    StepRecord,
    TraceError,
    load_factory,
    load_trace,
)
from runner_api.selection import LAYOUT_VARIABLE
from runner_api.trace import save_trace

NOT_OF_V1 = {"expanded_idx_mapping", "expanded_local_pos", "num_rejected"}
# What a recording of V1 holds itself; the other fields follow from its plans.
RECORDED_BY_V1 = {"req_ids", "query_start_loc", "seq_lens", "positions", "input_ids", "logits_indices", "slot_mappings"}
FOLLOWS = {"idx_mapping", "cu_num_logits", "block_tables", "num_sampled"}


def recording(name: str) -> Path:
    return RECORDINGS / f"{name}.jsonl"


@pytest.fixture(scope="module")
def traces():
    return {name: load_trace(recording(name)) for name in ("mixed", "mixed_v1", "preempt", "preempt_v1", "sampling")}


def agrees(report):
    assert report.verdict == "AGREE", str(report.first_divergence)
    assert all(equal > 0 and different == 0 for equal, different in report.fields.values()), report.fields
    assert report.tokens["different"] == 0
    assert report.tokens["near_tie"] <= 3


# -- a recording of V1 on packed rows ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "steps", "elements", "tokens"), [("mixed_v1", 96, 591, 565),
                                                                   ("preempt_v1", 129, 510, 484)])  # fmt: skip
def test_the_reference_agrees_with_v1_to_the_row(traces, name, steps, elements, tokens):
    report = replay_recording(recording(name), trace=traces[name])
    agrees(report)
    assert (report.layout, report.steps, sum(report.tokens.values())) == ("dense", steps, tokens)
    assert set(report.fields) == RECORDED_BY_V1 | FOLLOWS | {"output"}
    assert report.fields["req_ids"] == report.fields["seq_lens"] == [elements, 0]
    assert any("follow from the layout" in note for note in report.notes)


def test_both_programs_put_out_the_same(traces):
    """By request: the recorded outputs, and what the engine made of the tokens that are recorded by step."""
    for one, other in (("mixed", "mixed_v1"), ("preempt", "preempt_v1")):
        assert traces[one].outputs == traces[other].outputs
        assert len(traces[one].outputs) == 24
        drawn: dict[str, dict[str, list[int]]] = {one: {}, other: {}}
        for name, tokens in drawn.items():
            for record in traces[name].steps:
                for req_id, more in record.tokens().items():
                    tokens.setdefault(req_id, []).extend(more)
        assert drawn[one] == drawn[other]
        for req_id, output in traces[one].outputs.items():
            assert drawn[one][req_id][: len(output["token_ids"])] == output["token_ids"]


def test_what_a_recording_of_v1_leaves_out(traces):
    """26 rows of each file list a token that the engine threw away. V2 recorded what follows here: the same counts."""
    for name in ("mixed", "preempt"):
        both = [[s for s in traces[n].steps if s.num_reqs] for n in (name, f"{name}_v1")]
        assert sum(int((s.num_sampled == 0).sum()) for s in both[1]) == 26
        for slots, dense in zip(*both, strict=True):
            moved = in_batch_order(slots, dense)
            for field in ("req_ids", "cu_num_logits", "seq_lens", "positions", "num_sampled"):
                assert compare_field(field, moved, dense).different == 0, (name, slots.extra["step"], field)
            assert compare_field("block_tables", moved, dense).different == 0 or name == "preempt"
    resumed = {r: tokens for s in traces["preempt_v1"].steps
               for r, tokens in s.plan.scheduled_cached_reqs.all_token_ids.items()}  # fmt: skip
    assert {r: len(tokens) for r, tokens in resumed.items()} == {"r009": 17, "r018": 100, "r019": 94}
    prompts = {
        new.req_id: new.prompt_token_ids for s in traces["preempt_v1"].steps for new in s.plan.scheduled_new_reqs
    }
    for req_id, tokens in resumed.items():
        count = len(tokens) - len(prompts[req_id])
        assert tokens == [*prompts[req_id], *traces["preempt_v1"].outputs[req_id]["token_ids"][:count]]


def test_a_recording_of_v1_is_a_trace_like_any_other(traces, tmp_path):
    save_trace(tmp_path / "own.jsonl", [dataclasses.replace(s, num_rejected=None) for s in traces["preempt_v1"].steps])
    again = load_trace(tmp_path / "own.jsonl")
    assert [s.tokens() for s in again.steps] == [s.tokens() for s in traces["preempt_v1"].steps]


def rewrite(tmp_path, name, change, num_steps=40, outputs=None):
    lines = [json.loads(line) for line in recording(name).read_text().splitlines()]
    steps = lines[1 : 1 + num_steps]
    change(lines[0]["meta"], steps)
    path = tmp_path / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in [lines[0], *steps, {"outputs": outputs or {}}]))
    return path


CELLS = {
    "req_ids": ("req_ids", 1), "query_start_loc": ("query_start_loc", 2), "seq_lens": ("seq_lens", 2),
    "positions": ("positions", -1), "input_ids": ("input_ids", 0), "logits_indices": ("logits_indices", -1),
    "slot_mappings": ("slot_mapping", 3),
}  # fmt: skip


def test_every_recorded_field_has_a_corruption():
    assert set(CELLS) == RECORDED_BY_V1


@pytest.mark.parametrize("name", CELLS)
def test_one_wrong_cell_of_v1_diverges_and_is_named(name, tmp_path):
    field, at = CELLS[name]

    def change(meta, steps):
        values = steps[6]["batch"][field]
        values[at] += "x" if name == "req_ids" else 1

    report = replay_recording(rewrite(tmp_path, "mixed_v1", change, 8))
    assert report.verdict == "DIVERGE"
    assert (report.first_divergence.step, report.first_divergence.difference.field) == (6, name)
    assert {f for f, (_, different) in report.fields.items() if different} == {name}
    assert report.fields[name][1] == 1


def test_two_rows_that_changed_places_diverge(tmp_path):
    """The order of rows is part of what V1 recorded, and is no matter on the other layout."""

    def change(meta, steps):
        batch, sampled = steps[12]["batch"], steps[12]["sampled"]["token_ids"]
        lengths = np.diff(batch["query_start_loc"])
        a, b = next((i, i + 1) for i in range(len(lengths) - 1) if lengths[i] == lengths[i + 1] == 1)
        for values in (*(batch[n] for n in ("req_ids", "seq_lens")), sampled):
            values[a], values[b] = values[b], values[a]
        a, b = (batch["query_start_loc"][i] for i in (a, b))
        for values in (batch[n] for n in ("input_ids", "positions", "slot_mapping")):
            values[a], values[b] = values[b], values[a]

    path = rewrite(tmp_path, "mixed_v1", change, 14)
    report = replay_recording(path)
    assert report.verdict == "DIVERGE"
    assert (report.first_divergence.step, report.first_divergence.difference.field) == (12, "req_ids")
    assert replay_recording(path, layout="slots").verdict == "AGREE"


def test_one_wrong_token_of_v1_diverges(tmp_path):
    def change(meta, steps):
        steps[6]["sampled"]["token_ids"][2][0] += 1

    report = replay_recording(rewrite(tmp_path, "mixed_v1", change, 8))
    first = report.first_divergence
    assert (first.step, first.difference.field, first.difference.index) == (6, "token_ids", (2, 0))
    # It was imposed: the next step reads it, and may draw another one behind it.
    assert report.fields["input_ids"][1] == 1
    assert 1 <= report.tokens["different"] <= 2


def test_the_token_of_an_unfinished_prefill_is_nobodys(tmp_path, traces):
    step = next(i for i, s in enumerate(traces["mixed_v1"].steps) if (s.num_sampled == 0).any())
    row = int(np.flatnonzero(traces["mixed_v1"].steps[step].num_sampled == 0)[0])

    def change(meta, steps):
        steps[step]["sampled"]["token_ids"][row][0] += 1

    agrees(replay_recording(rewrite(tmp_path, "mixed_v1", change, step + 3)))


# -- files of V1 that are broken --------------------------------------------------------------------------------


def drafts(meta, steps):
    step = steps[3]
    req_id = next(iter(step["plan"]["num_scheduled_tokens"]))
    step["plan"]["spec"] = {req_id: [5]}
    step["batch"]["logits_indices"].append(0)


def gone(meta, steps):
    for step in steps[:37]:
        step["plan"]["new"] = [new for new in step["plan"]["new"] if new["req_id"] != "r009"]


BROKEN = {
    "unknown runner": (lambda meta, steps: meta.update(runner="V3"), "no such runner"),
    "another layout": (lambda meta, steps: meta.update(runner="V2"), "missing field 'cg_mode'"),
    "drafts": (drafts, "how many were accepted is not recorded"),
    "two groups": (lambda meta, steps: steps[0]["plan"]["new"][0]["block_ids"].append([5]), "one KV cache group"),
    "no token": (lambda meta, steps: steps[3]["sampled"]["token_ids"][0].clear(), "token_ids.*wrong length"),
    "two tokens": (lambda meta, steps: [t.append(1) for t in steps[3]["sampled"]["token_ids"]], r"token_ids\[0\]"),
    "a null token": (lambda meta, steps: steps[3]["sampled"].update(token_ids=None), "token_ids"),
    "resumed, never announced": (gone, "steps are missing"),
    "resumed with more than was drawn": (
        lambda meta, steps: steps[37]["plan"]["cached"]["num_output_tokens"].__setitem__(-1, 4), "at most the 3",
    ),
    "resumed with less than nothing": (
        lambda meta, steps: steps[37]["plan"]["cached"]["num_output_tokens"].__setitem__(-1, -1), "steps are missing",
    ),
    "short slot mapping": (lambda meta, steps: steps[3]["batch"]["slot_mapping"].pop(), "slot_mapping"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_of_v1_are_refused(kind, tmp_path, capsys):
    change, text = BROKEN[kind]
    path = rewrite(tmp_path, "preempt_v1", change)
    with pytest.raises(TraceError, match=text):
        load_trace(path)
    assert main(["replay", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_v2_file_that_calls_itself_v1_is_refused(tmp_path):
    with pytest.raises(TraceError, match="missing field 'slot_mapping'"):
        load_trace(rewrite(tmp_path, "mixed", lambda meta, steps: meta.update(runner="V1"), 4))


# -- the other layout -------------------------------------------------------------------------------------------

BY_REQUEST = {  # recording: (layout, steps, fields that are not recorded)
    "preempt": ("dense", None, {"num_rejected"}),
    "preempt_v1": ("slots", None, NOT_OF_V1),
    "prefix": ("dense", 25, NOT_OF_V1),
    "piecewise": ("dense", 25, set()),
    "sampling": ("dense", None, NOT_OF_V1),
    "hybrid": ("dense", 30, NOT_OF_V1),
}
REST = {"mixed_v1": ("slots", 565), "mixed": ("dense", 565), "abort": ("dense", 303), "graph": ("dense", 485),
        "qwen": ("dense", 501), "wide": ("dense", 1085)}  # fmt: skip


@pytest.mark.parametrize("name", BY_REQUEST)
def test_a_recording_on_the_other_layout_agrees_by_request(name):
    layout, steps, missing = BY_REQUEST[name]
    records = load_trace(recording(name)).steps[:steps]
    report = replay_recording(recording(name), layout=layout, steps=steps, runner=f"{__name__}:Spy")
    agrees(report)
    assert report.layout == layout
    Spy.latest.saw_no_record(records)
    if name.startswith("preempt"):
        Spy.latest.saw_three_resumed(layout)
    logprobs = {"logprob_token_ids", "ranks", "logprobs"} if name == "sampling" else set()
    assert set(report.fields) == set(INTEGER_FIELDS) - ROW_FIELDS - missing | logprobs | {"output"}
    drawn = sum(int((s.num_sampled > 0).sum()) for s in records)
    assert sum(report.tokens.values()) == (0 if name == "hybrid" else drawn)
    assert any("compared by request" in note for note in report.notes)
    # What each of them is here for.
    exercised = {
        "prefix": sum(n.num_computed_tokens > 0 for s in records for n in s.plan.scheduled_new_reqs),
        "piecewise": sum(s.num_reqs_padded > s.num_reqs or s.num_tokens_padded > s.num_tokens for s in records),
        "hybrid": min(len(s.block_tables) for s in records if s.num_reqs) - 3,
    }
    assert exercised.get(name, 1) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_the_other_recordings_on_the_other_layout_agree_by_request(name):
    layout, tokens = REST[name]
    report = replay_recording(recording(name), layout=layout)
    agrees(report)
    assert sum(report.tokens.values()) == tokens


@pytest.mark.parametrize("name", sorted(set(INTEGER_FIELDS) - ROW_FIELDS - {"req_ids", "num_rejected", "block_tables"}))
def test_a_wrong_cell_is_wrong_in_any_order(name):
    """One cell of one request, whose place in the batch is another one."""
    trace = load_trace(recording("piecewise"))
    record = next(s for s in trace.steps if s.num_reqs > 3 and s.num_tokens_padded > s.num_tokens > s.num_reqs)
    wrong = dataclasses.replace(record, **{name: getattr(record, name).copy()})
    getattr(wrong, name)[..., 1] += 1
    built = StepRecord(record.plan, req_ids=record.req_ids[::-1])
    moved, right = in_batch_order(wrong, built), in_batch_order(record, built)
    assert compare_field(name, moved, right).different == 1
    for other in set(INTEGER_FIELDS) - ROW_FIELDS - {name}:
        assert compare_field(other, moved, right).different == 0
    assert compare_field("block_tables", moved, right).equal > 0


def test_a_wrong_cell_is_found_by_request(tmp_path):
    found = []

    def change(meta, steps):
        step = next(s for s in steps[4:] if len(s["batch"]["req_ids"]) > 3)
        found.extend([step["step"], step["batch"]["req_ids"][1]])
        step["batch"]["slot_mappings"][0][step["batch"]["query_start_loc"][1]] += 1

    report = replay_recording(rewrite(tmp_path, "hybrid", change, 12), layout="dense", steps=12)
    first = report.first_divergence
    assert [first.step, first.difference.req_id] == found
    assert (first.difference.field, report.fields["slot_mappings"][1]) == ("slot_mappings", 1)


def test_a_wrong_token_and_a_wrong_log_probability_are_found_by_request(tmp_path):
    (tmp_path / "sampling_logits.npz").symlink_to(RECORDINGS / "sampling_logits.npz")
    picked = {}

    def change(meta, steps):
        step = steps[10]
        picked.update(row=1, req_id=step["batch"]["req_ids"][1])
        step["sampled"]["token_ids"][1][0] ^= 1

    report = replay_recording(rewrite(tmp_path, "sampling", change, 11), layout="dense")
    assert report.tokens["different"] == 1
    first = report.first_divergence
    assert (first.step, first.difference.field, first.difference.req_id) == (10, "token_ids", picked["req_id"])


# -- what is chosen, and what is refused ------------------------------------------------------------------------


def test_the_recording_chooses_and_the_command_line_overrides(monkeypatch, capsys):
    monkeypatch.setenv(LAYOUT_VARIABLE, "slots")
    for options, layout in (((), "dense"), (("--layout", "slots"), "slots"), (("--layout", "dense"), "dense")):
        assert main(["replay", str(recording("mixed_v1")), "--steps", "3", "--json", *options]) == 0
        (report,) = json.loads(capsys.readouterr().out)["recordings"]
        assert (report["layout"], report["selection"]["layout"]) == (layout, layout)
        assert report["selection"]["requested"] == layout
        assert ("overruled" in report["selection"]["reason"]) == (layout == "dense")
    assert main(["replay", str(recording("mixed")), "--steps", "3", "--layout", "dense"]) == 0
    out = capsys.readouterr().out
    assert "mixed: 3 steps, runner cpu, layout dense, model llama-tiny" in out
    assert "note: recorded on the slots layout, replayed on the dense one" in out


def test_drafts_on_packed_rows_are_refused(capsys):
    with pytest.raises(CapabilityError, match="lacks drafts"):
        replay_recording(recording("eagle"), layout="dense")
    assert main(["replay", str(recording("eagle")), "--layout", "dense"]) == 2
    assert "Layout 'slots' has it" in capsys.readouterr().err


def test_a_runner_of_one_layout_is_told_so():
    slots_alone = "cpu_reference.runner:CpuModelRunner"
    with pytest.raises(CapabilityError, match="only one layout"):
        replay_recording(recording("mixed_v1"), runner=slots_alone)
    assert replay_recording(recording("mixed_v1"), runner=slots_alone, layout="slots", steps=4).verdict == "AGREE"
    with pytest.raises(ConfigError, match="layout"):
        replay_recording(recording("mixed"), layout="rows")


# -- what a runner gets to see ----------------------------------------------------------------------------------


class Spy:
    """The reference, with every plan and outcome noted down, and what its callers hold."""

    latest: Spy

    def __init__(self, config):
        self.plans, self.forced, self.held = [], [], []
        self._runner = load_factory("cpu")(config)
        Spy.latest = self

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def execute_model(self, plan, **kwargs):
        self.plans.append(plan)
        return self._runner.execute_model(plan, **kwargs)

    def sample_tokens(self, *, forced):
        self.forced.append(forced)
        frame = sys._getframe(1)
        while frame is not None:
            self.held += [v for v in frame.f_locals.values() if isinstance(v, (StepRecord, ReplayStep))]
            frame = frame.f_back
        return self._runner.sample_tokens(forced=forced)

    def saw_three_resumed(self, layout):
        """Each in the shape of its layout."""
        as_cached = sum(len(p.scheduled_cached_reqs.resumed_req_ids) for p in self.plans)
        new = Counter(n.req_id for p in self.plans for n in p.scheduled_new_reqs)
        assert (as_cached, max(new.values()), list(new.values()).count(2)) == {
            "dense": (3, 1, 0), "slots": (0, 2, 3),
        }[layout]  # fmt: skip

    def saw_no_record(self, records):
        assert {type(held) for held in self.held} == {ReplayStep}
        arrays = [a for s in records for a in (s.token_ids, s.num_sampled, s.input_ids)]
        for forced in self.forced:
            assert not any(np.shares_memory(x, a) for x in (forced.token_ids, forced.num_sampled) for a in arrays)


class Lying:
    """Says that it built another batch than it was asked for."""

    def __init__(self, config):
        self._runner = load_factory("cpu")(config)

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def last_step(self):
        record = self._runner.last_step()
        return dataclasses.replace(record, req_ids=tuple(r + "x" for r in record.req_ids))


class Silent(Lying):
    """Has nothing to say between the two calls."""

    def last_step(self):
        raise RuntimeError("not yet")


@pytest.mark.parametrize(("runner", "field"), [(Lying, "req_ids"), (Silent, "record")])
def test_a_runner_that_does_not_tell_its_batch_diverges(runner, field):
    report = replay_recording(recording("mixed"), layout="dense", runner=runner, steps=3)
    assert report.verdict == "DIVERGE"
    assert (report.steps, report.first_divergence.difference.field) == (0, field)


# -- the parts --------------------------------------------------------------------------------------------------


def new(req_id, prompt, known=None, computed=0, blocks=(1,)):
    return NewRequestData(req_id, prompt, known or prompt, computed, (list(blocks),), seed=7)


SLOTS_PLANS = [
    SchedulerOutput([new("a", [1, 2]), new("b", [3])], CachedRequestData(), {"a": 2, "b": 1}, 3),
    SchedulerOutput(
        [], CachedRequestData(["b"], [1], [None], [1]), {"b": 1}, 1, preempted_req_ids=frozenset({"a"})
    ),
    SchedulerOutput(
        [new("c", [9]), new("a", [1, 2], [1, 2, 5], 2, (4, 5))], CachedRequestData(["b"], [2], [([6],)], [2]),
        {"b": 1, "c": 1, "a": 1}, 3,
    ),
    # The same id again, but another request.
    SchedulerOutput([new("a", [8, 8])], CachedRequestData(), {"a": 2}, 2, finished_req_ids=frozenset({"a"})),
]  # fmt: skip


def test_plans_go_from_one_shape_to_the_other_and_back():
    dense = list(plans_for("dense", SLOTS_PLANS))
    assert dense[:2] == SLOTS_PLANS[:2]
    assert dense[3] == SLOTS_PLANS[3]
    plan = dense[2]
    assert [n.req_id for n in plan.scheduled_new_reqs] == ["c"]
    assert plan.scheduled_cached_reqs == CachedRequestData(
        ["b", "a"], [2, 2], [([6],), ([4, 5],)], [2, 1], frozenset({"a"}), {"a": [1, 2, 5]}
    )
    assert plan.num_scheduled_tokens == SLOTS_PLANS[2].num_scheduled_tokens
    again = list(plans_for("slots", dense))
    assert again[2] == dataclasses.replace(SLOTS_PLANS[2], preempted_req_ids=frozenset({"a"}))
    assert [*again[:2], again[3]] == [*SLOTS_PLANS[:2], SLOTS_PLANS[3]]
    for layout, plans in (("slots", SLOTS_PLANS), ("dense", dense)):
        assert all(x is y for x, y in zip(plans_for(layout, plans), plans, strict=True))


def test_counts_of_outputs_may_be_left_out():
    """Nobody reads them; a list that is given has one for each request."""
    bare = dataclasses.replace(
        SLOTS_PLANS[2],
        scheduled_cached_reqs=dataclasses.replace(SLOTS_PLANS[2].scheduled_cached_reqs, num_output_tokens=[]),
    )
    plans = [*SLOTS_PLANS[:2], bare]
    dense = list(plans_for("dense", plans))
    assert dense[2].scheduled_cached_reqs.req_ids == ["b", "a"]
    assert dense[2].scheduled_cached_reqs.num_output_tokens == []
    assert list(plans_for("slots", dense))[2].scheduled_cached_reqs == bare.scheduled_cached_reqs


def test_a_resumed_request_that_nobody_announced_is_left_for_the_runner():
    (plan,) = plans_for("slots", [dataclasses.replace(list(plans_for("dense", SLOTS_PLANS))[2])])
    assert plan.scheduled_cached_reqs.resumed_req_ids == {"a"}


@pytest.mark.parametrize("name", ["piecewise", "sampling"])
def test_a_step_in_another_order_and_back_is_the_step(name):
    rng = np.random.default_rng(0)
    padded = 0
    for record in load_trace(recording(name)).steps:
        if not record.num_reqs:
            assert in_batch_order(record, StepRecord(record.plan)) is record
            continue
        padded += record.num_tokens_padded > record.num_tokens
        mixed = tuple(rng.permutation(record.req_ids).tolist())
        there = in_batch_order(record, StepRecord(record.plan, req_ids=mixed))
        assert there.req_ids == mixed
        assert there.idx_mapping is None
        for i, req_id in enumerate(mixed):
            j = record.row_of(req_id)
            (a, b), (c, d) = there.query_start_loc[i : i + 2], record.query_start_loc[j : j + 2]
            assert np.array_equal(there.positions[a:b], record.positions[c:d])
            assert np.array_equal(there.slot_mappings[:, a:b], record.slot_mappings[:, c:d])
            assert np.array_equal(there.block_tables[0][i], record.block_tables[0][j])
            assert there.logits_indices[i] == b - 1
        assert there.tokens() == record.tokens()
        back = in_batch_order(there, record)
        for f in dataclasses.fields(StepRecord):
            if f.name not in ROW_FIELDS | {"extra", "plan"}:
                one, other = getattr(back, f.name), getattr(record, f.name)
                if isinstance(other, np.ndarray):
                    assert (one.dtype, one.tolist()) == (other.dtype, other.tolist()), f.name
                elif f.name != "block_tables":
                    assert one == other, f.name
        assert back.extra.get("top2_margin") == record.extra.get("top2_margin")
    assert (padded > 0) == (name == "piecewise")


def test_only_the_same_requests_have_an_order():
    assert batch_order(("a", "b"), ("b", "a")).tolist() == [1, 0]
    for wanted in (("a",), ("a", "a"), ("a", "c"), ["b", "a"], None, "ab", ("a", "b", "b")):
        assert batch_order(("a", "b"), wanted) is None
    assert batch_order(("a", "a"), ("a", "a")) is None
    step = ReplayStep(SLOTS_PLANS[0], None, ForcedStep(np.array([[5], [6]]), np.array([1, 0])), ("a", "b"))
    told = step.forced_for(StepRecord(SLOTS_PLANS[0], req_ids=("b", "a")))
    assert (told.token_ids.tolist(), told.num_sampled.tolist()) == ([[6], [5]], [0, 1])
    with pytest.raises(PlanError, match="not the requests of the step"):
        step.forced_for(StepRecord(SLOTS_PLANS[0], req_ids=("b", "c")))


# -- the GPU runner ---------------------------------------------------------------------------------------------

HAS_TRITON = all(importlib.util.find_spec(m) for m in ("torch", "triton"))


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="needs torch and triton")
def test_the_gpu_runner_agrees_with_v1_to_the_row():
    report = replay_recording(recording("mixed_v1"), runner="gpu", steps=25)
    agrees(report)
    assert (report.layout, report.steps) == ("dense", 25)
    assert sum(n >= 25 for n in report.launches.values()) >= 5


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixed_v1", "preempt_v1"])
@pytest.mark.parametrize("layout", ["dense", "slots"])
def test_the_gpu_runner_agrees_with_v1_on_a_gpu(name, layout):
    report = replay_recording(recording(name), runner="gpu", layout=layout)
    agrees(report)
    assert report.layout == layout
    assert report.launches


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["preempt", "prefix", "sampling", "hybrid"])
def test_packed_rows_agree_with_v2_by_request_on_a_gpu(name):
    report = replay_recording(recording(name), runner="gpu", layout="dense")
    agrees(report)
    assert report.layout == "dense"
