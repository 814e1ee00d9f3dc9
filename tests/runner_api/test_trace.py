"""Traces: what is written is read back; a broken file is refused with its line and field."""

import dataclasses
import json

import numpy as np
import pytest
from sameness import same
from step_driver import force, full, make_plan, make_runner, new

from runner_api import RunnerError, SamplingParams, StepRecord, TraceError, load_trace, save_trace


@pytest.fixture(scope="module")
def steps():
    """A step with everything in it, one with drafts and a padded graph, one without tokens."""
    runner = make_runner(num_speculative_tokens=2, max_num_reqs=4, record=frozenset({"logits", "kv", "intermediates"}))
    params = SamplingParams(temperature=0.5, logprobs=2, stop=["x"], seed=2**62)
    added = [new("a", [1, 2, 3], [1], seed=-(2**63)), new("b", [4], [2], sampling_params=params)]
    runner.execute_model(make_plan({"a": 3, "b": 1}, added, finished_req_ids=frozenset({"z", "y"})))
    runner.sample_tokens(forced=force(runner, {"a": [5], "b": [6]}, {"a": [7, 8]}))
    records = [runner.last_step()]
    plan = make_plan({"a": 3}, (), {"a": (3, ([3],))}, {"a": [-1, -1]})
    runner.execute_model(plan, descriptor=full(8, 4))
    runner.sample_tokens(forced=force(runner, {"a": [7, 9]}))
    records.append(dataclasses.replace(runner.last_step(), extra={"margin": [0.1, float("inf")], "note": ("x", 1)}))
    runner.execute_model(make_plan({}, kv_cache_block_copies=[(1, 5)]))
    return [*records, runner.last_step()]


def test_round_trip(tmp_path, steps):
    path = tmp_path / "run.jsonl"
    save_trace(path, steps, {"seed": 3})
    trace = load_trace(path)
    assert trace.name == "run"
    assert trace.meta["seed"] == 3
    assert not trace.is_vllm_recording
    assert len(trace.steps) == 3
    for i, (written, read) in enumerate(zip(steps, trace.steps, strict=True)):
        same(written, read, f"step {i}")


def test_every_parameter_of_a_request_survives(tmp_path):
    params = SamplingParams(
        logit_bias={3: -1.5}, bad_words_token_ids=((1, 2), (3,)), allowed_token_ids=(5, 6), logprob_token_ids=(7,),
        thinking_token_budget=4, structured_outputs={"json": '{"type": "object"}'},
        extra_args={"topic": [1, 2], "deep": {"x": (1,)}},
    )  # fmt: skip
    traced = SamplingParams(trace_decode_token_ids=(8, 9))
    added = [new("a", [1], [1], sampling_params=params), new("b", [1], [2], sampling_params=traced)]
    added[0].eos_token_ids = (2, 5)
    record = StepRecord(make_plan({"a": 1, "b": 1}, added), faults=np.array([1, 2], np.int32))
    save_trace(tmp_path / "x.jsonl", [record])
    same(record, load_trace(tmp_path / "x.jsonl").steps[0])


def test_a_trace_without_steps(tmp_path):
    save_trace(tmp_path / "empty.jsonl", [])
    assert load_trace(str(tmp_path / "empty.jsonl")).steps == ()


def test_records_of_other_runners_survive_nan_and_shapes(tmp_path):
    record = StepRecord(make_plan({}), logits=np.array([[np.nan, -np.inf, 1e-30]], np.float32),
                        kv={"a": np.zeros((2, 0, 2), np.int64)})  # fmt: skip
    save_trace(tmp_path / "x.jsonl", [record])
    same(record, load_trace(tmp_path / "x.jsonl").steps[0])


def lines_of(path, steps):
    save_trace(path, steps)
    return path.read_text().splitlines()


def broken(tmp_path, lines):
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(lines) + "\n" if lines else "")
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(path) in str(caught.value)
    return caught.value


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(TraceError, match="cannot be read"):
            load_trace(path)
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path / "bytes.jsonl")


def test_files_that_are_no_traces(tmp_path):
    assert "empty" in broken(tmp_path, []).what
    assert "not JSON" in broken(tmp_path, ["hello"]).what
    assert "not an object" in broken(tmp_path, ["[1]"]).what
    assert broken(tmp_path, ["{}"]).expected == "a key 'meta' or 'trace'"


@pytest.mark.parametrize("keep", [1, 2, 3, 4])
def test_a_trace_that_is_cut_short(tmp_path, steps, keep):
    lines = lines_of(tmp_path / "whole.jsonl", steps)
    assert len(lines) == 5
    assert "cut short" in broken(tmp_path, lines[:keep]).what


def test_a_step_that_is_missing_in_the_middle(tmp_path, steps):
    lines = lines_of(tmp_path / "whole.jsonl", steps)
    assert "cut short" in broken(tmp_path, [lines[0], lines[2], *lines[3:]]).what


def test_another_version(tmp_path, steps):
    lines = lines_of(tmp_path / "whole.jsonl", steps)
    header = json.loads(lines[0])
    header["trace"]["schema_version"] = 999
    error = broken(tmp_path, [json.dumps(header), *lines[1:]])
    assert error.got == 999


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: r.pop("$"),
        lambda r: r.update({"$": "NoSuchType"}),
        lambda r: r.update({"$": "SchedulerOutput"}),
        lambda r: r.update({"no_such_field": 1}),
        lambda r: r["positions"].update({"shape": [999]}),
        lambda r: r["positions"].update({"dtype": "no_such_dtype"}),
        lambda r: r["positions"].pop("data"),
        lambda r: r["descriptor"].update({"cg_mode": "NO_SUCH_MODE"}),
        lambda r: r["plan"].pop("$"),
        lambda r: r.pop("plan"),
    ],
)
def test_broken_records_name_their_line(tmp_path, steps, damage):
    lines = lines_of(tmp_path / "whole.jsonl", steps)
    record = json.loads(lines[2])
    damage(record)
    error = broken(tmp_path, [*lines[:2], json.dumps(record), *lines[3:]])
    assert error.field.endswith(":3")
    assert isinstance(error, RunnerError)


def test_a_line_of_a_trace_that_is_not_json(tmp_path, steps):
    lines = lines_of(tmp_path / "whole.jsonl", steps)
    assert broken(tmp_path, [*lines[:2], lines[2][:-9], *lines[3:]]).field.endswith(":3")


# -- recordings of vLLM -------------------------------------------------------------------------------------------

META = {
    "recording_format": 1, "source": "vLLM 0.33", "runner": "V2", "model": "m", "max_model_len": 64, "max_num_seqs": 4,
    "max_num_batched_tokens": 16, "block_size": 16, "num_gpu_blocks_override": 9,
}  # fmt: skip
STEP = {
    "step": 0,
    "plan": {
        "new": [{
            "req_id": "a", "prompt_token_ids": [1, 2], "prefill_token_ids": None, "num_computed_tokens": 0,
            "block_ids": [[1]], "sampling_params": {"temperature": 0.0, "logit_bias": {"3": 1.0}, "output_kind": 0},
        }],
        "cached": {
            "req_ids": [], "num_computed_tokens": [], "new_block_ids": [], "num_output_tokens": [], "resumed": [],
        },
        "num_scheduled_tokens": {"a": 2}, "total": 2, "spec": {}, "finished": [], "preempted": [],
    },
    "batch": {
        "req_ids": ["a"], "idx_mapping": [3], "query_start_loc": [0, 2], "seq_lens": [2], "input_ids": [1, 2],
        "positions": [0, 1], "logits_indices": [1], "cu_num_logits": [0, 1], "block_tables": [[[1]]],
        "slot_mappings": [[16, 17]], "cg_mode": "NONE", "num_reqs_padded": 1, "num_tokens_padded": 2,
    },
    "sampled": {"token_ids": [[7]], "num_sampled": [1], "top2_margin": [0.5]},
}  # fmt: skip


IDLE = {
    "step": 1, "plan": {**STEP["plan"], "new": [], "num_scheduled_tokens": {}, "total": 0, "finished": ["a"]},
}  # fmt: skip
OUTPUTS = {"a": {"token_ids": [7]}}


def recording(tmp_path, step=STEP, meta=META, end=True):
    path = tmp_path / "vllm.jsonl"
    lines = [{"meta": meta}, step, IDLE]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *([{"outputs": OUTPUTS}] if end else [])]))
    return path


def test_a_recording_is_read_as_it_is(tmp_path):
    trace = load_trace(recording(tmp_path))
    assert trace.is_vllm_recording
    assert trace.outputs == OUTPUTS
    step, idle = trace.steps
    assert step.plan.scheduled_new_reqs[0].prefill_token_ids == [1, 2]
    assert step.plan.scheduled_new_reqs[0].sampling_params.logit_bias == {3: 1.0}
    assert (step.num_reqs, step.num_tokens_padded) == (1, 2)
    assert step.tokens() == {"a": (7,)}
    assert step.slot_mappings.tolist() == [[16, 17]]
    assert step.extra == {"top2_margin": [0.5], "step": 0}
    assert step.runner == "vLLM 0.33 V2"
    assert idle.num_reqs == 0


@pytest.mark.parametrize(
    ("values", "own", "eos"),
    [
        ({}, (), ()),
        ({"all_stop_token_ids": [2]}, (), (2,)),
        ({"all_stop_token_ids": [2, 5, 9], "stop_token_ids": [9, 5]}, (9, 5), (2,)),
        ({"all_stop_token_ids": [5], "stop_token_ids": [5]}, (5,), ()),
    ],
)
def test_the_models_end_of_sequence_ids_are_those_that_the_request_did_not_give(tmp_path, values, own, eos):
    step = changed("plan", "new", 0, "sampling_params", to={"temperature": 0.0, "min_tokens": 1, **values})
    new = load_trace(recording(tmp_path, step)).steps[0].plan.scheduled_new_reqs[0]
    assert (new.sampling_params.stop_token_ids, tuple(new.eos_token_ids)) == (own, eos)
    assert new.stop_token_ids == (*own, *eos)


@pytest.mark.parametrize("value", [None, 5, [2.0], [[2]], "2"])
def test_a_stop_set_is_a_list_of_ids(tmp_path, value):
    with pytest.raises(TraceError, match="all_stop_token_ids"):
        load_trace(recording(tmp_path, changed("plan", "new", 0, "sampling_params", "all_stop_token_ids", to=value)))


@pytest.mark.parametrize("key", sorted(META))
def test_recordings_whose_header_is_incomplete(tmp_path, key):
    with pytest.raises(TraceError, match="recording format" if key == "recording_format" else key):
        load_trace(recording(tmp_path, meta={k: v for k, v in META.items() if k != key}))


@pytest.mark.parametrize("part", ["plan", "batch", "sampled"])
def test_recordings_with_a_missing_field(tmp_path, part):
    for key in STEP[part]:
        step = {**STEP, part: {k: v for k, v in STEP[part].items() if k != key}}
        if key == "top2_margin":  # the only one that a recording may lack
            load_trace(recording(tmp_path, step))
            continue
        with pytest.raises(TraceError, match=f":2: missing field '{key}'"):
            load_trace(recording(tmp_path, step))


def test_recordings_that_are_wrong(tmp_path):
    with pytest.raises(TraceError, match="cut short"):
        load_trace(recording(tmp_path, end=False))
    bad = json.loads(json.dumps(STEP))
    bad["plan"]["new"][0]["sampling_params"]["temperature"] = -1
    with pytest.raises(TraceError, match="temperature"):
        load_trace(recording(tmp_path, bad))
    with pytest.raises(TraceError, match="broken step"):
        load_trace(recording(tmp_path, {**STEP, "batch": 5}))


def changed(*path, to):
    """STEP with the value at this path replaced."""
    step = json.loads(json.dumps(STEP))
    at = step
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = to
    return step


LISTS = [k for k, v in STEP["batch"].items() if isinstance(v, list)]


@pytest.mark.parametrize("value", [[], [1] * 9, None, 5, "12"])
@pytest.mark.parametrize(("part", "key"), [*(("batch", k) for k in LISTS), ("sampled", "num_sampled"),
                                           ("sampled", "token_ids"), ("sampled", "top2_margin")])  # fmt: skip
def test_a_list_of_another_length_is_refused(tmp_path, part, key, value):
    # How many groups there are, slot_mappings must agree with.
    named = "block_tables|slot_mappings" if key == "block_tables" else key
    with pytest.raises(TraceError, match=f":2: broken step: .*({named})"):
        load_trace(recording(tmp_path, changed(part, key, to=value)))


def test_a_row_of_a_block_table_has_the_blocks_of_its_tokens(tmp_path):
    for row in ([], [1, 2]):
        with pytest.raises(TraceError, match=r"block_tables\[0\]\[0\]: wrong length"):
            load_trace(recording(tmp_path, changed("batch", "block_tables", 0, 0, to=row)))


@pytest.mark.parametrize("value", [2.0, True, "2", None, 2**40, [2]])
@pytest.mark.parametrize("key", ["seq_lens", "input_ids", "logits_indices", "idx_mapping", "cu_num_logits"])
def test_numbers_are_never_converted(tmp_path, key, value):
    if key in ("logits_indices", "idx_mapping") and value == 2**40:
        value = 2**63  # these are 64 bits wide
    with pytest.raises(TraceError, match=rf"{key}\[0\]: broken element"):
        load_trace(recording(tmp_path, changed("batch", key, 0, to=value)))


def test_plans_and_sizes_are_checked_too(tmp_path):
    for path, value, text in (
        (("plan", "num_scheduled_tokens", "a"), 2.0, "num_scheduled_tokens"),
        (("plan", "total"), 3, "add up"),
        (("plan", "new", 0, "block_ids"), [[1.0]], "block_ids"),
        (("batch", "num_tokens_padded"), 1, "num_tokens_padded"),
        (("batch", "num_reqs_padded"), None, "num_reqs_padded"),
        (("batch", "cg_mode"), "HALF", "expected one of FULL, NONE, PIECEWISE"),
        (("batch",), None, "schedules tokens"),
        (("step",), 1, "step number"),
        (("step",), "0", "step number"),
    ):
        with pytest.raises(TraceError, match=text):
            load_trace(recording(tmp_path, changed(*path, to=value)))


@pytest.mark.parametrize("key", sorted(set(META) - {"recording_format"}))
@pytest.mark.parametrize("value", [None, 0, "", [], 1.5, True])
def test_headers_are_of_their_types(tmp_path, key, value):
    if isinstance(META[key], str) and value == "":
        return
    with pytest.raises(TraceError, match=key):
        load_trace(recording(tmp_path, meta={**META, key: value}))


def test_nothing_stands_behind_the_outputs(tmp_path):
    path = recording(tmp_path)
    text = path.read_text()
    path.write_text(text + "\n  \n")
    assert len(load_trace(path).steps) == 2
    path.write_text(text + json.dumps(STEP))
    with pytest.raises(TraceError, match="goes on behind"):
        load_trace(path)


def test_more_output_than_the_plans_can_draw_means_missing_steps(tmp_path):
    path = recording(tmp_path)
    path.write_text(path.read_text().replace('"token_ids": [7]}}', '"token_ids": [7, 8]}}'))
    with pytest.raises(TraceError, match="cut short"):
        load_trace(path)
    # a token that was drawn and thrown away, because its request had ended
    path.write_text(path.read_text().replace('"token_ids": [7, 8]}}', '"token_ids": []}}'))
    load_trace(path)
    path.write_text(path.read_text().replace('{"token_ids": []}}', "5}"))
    with pytest.raises(TraceError, match="token_ids"):
        load_trace(path)


def test_fields_that_a_recording_lacks_are_none(tmp_path):
    record = load_trace(recording(tmp_path)).steps[0]
    assert record.expanded_idx_mapping is record.num_rejected is record.ranks is record.logprobs is None


def test_what_cannot_be_saved(tmp_path, steps):
    with pytest.raises(TraceError, match="cannot be written"):
        save_trace(tmp_path / "no" / "folder", steps)
    for record in (1, None, steps[0].plan, dataclasses.replace(steps[0], seq_lens=None)):
        with pytest.raises(TraceError, match="step 0"):
            save_trace(tmp_path / "x.jsonl", [record])
    with pytest.raises(TraceError, match="JSON"):
        save_trace(tmp_path / "x.jsonl", steps, {"what": object()})


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(StepRecord)])
def test_a_record_of_ours_has_every_field(tmp_path, steps, name):
    lines = lines_of(tmp_path / "whole.jsonl", steps)
    record = json.loads(lines[2])
    del record[name]
    assert name in broken(tmp_path, [*lines[:2], json.dumps(record), *lines[3:]]).what
    record[name] = {"$": "array", "dtype": "float64", "shape": [1, 1, 1], "data": [0.5]}
    assert broken(tmp_path, [*lines[:2], json.dumps(record), *lines[3:]]).field.endswith(":3")
