"""`modelrunner show`: tables, pictures and pages, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from picture_records import mixed_steps

from conformance.figures import blocks_data
from conformance.recording import RECORDINGS
from conformance.show import WHATS, steps_table
from conformance.show_html import page_data, trace_page
from engine_core.cli import main
from runner_api import ConfigError, SampleFault, SchedulerOutput, StepRecord, Trace, load_trace, save_trace

PREEMPT = str(RECORDINGS / "preempt.jsonl")


def run(*args: str) -> int:
    return main(["show", *args])


@pytest.fixture
def own_trace(tmp_path: Path) -> str:
    """A trace of ours with logits, two steps, eight requests."""
    path = tmp_path / "own.jsonl"
    save_trace(path, mixed_steps(8))
    return str(path)


def test_without_options_all_steps_are_listed(capsys: pytest.CaptureFixture[str]):
    assert run(PREEMPT) == 0
    lines = capsys.readouterr().out.splitlines()
    trace = load_trace(PREEMPT)
    assert len(lines) == 3 + len(trace.steps)
    for number, (record, line) in enumerate(zip(trace.steps, lines[3:], strict=True)):
        assert line.split()[:3] == [str(number), str(record.num_reqs), str(record.num_tokens)]
        for req_id in record.plan.preempted_req_ids:
            assert req_id in line.partition("preempted:")[2]


def test_who_comes_back_from_a_preemption_is_not_new(capsys: pytest.CaptureFixture[str]):
    for asked in ((), ("--step", "37")):
        assert run(PREEMPT, *asked) == 0
        out = capsys.readouterr().out
        assert "resumed: r009 (17 of 17 tokens)" in out
        assert out.count("new: r009") == (not asked)  # when it came for the first time
    # a trace that is too long for a timeline has its table all the same
    assert "1001 steps" in steps_table(Trace("x", {}, (mixed_steps(1)[0],) * 1001))


def test_an_error_in_place_of_a_token_is_told(own_trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = mixed_steps(8)
    path = tmp_path / "nan.jsonl"
    faults = np.array([0, int(SampleFault.NAN), *[0] * 6], np.int32)
    save_trace(path, [first, dataclasses.replace(second, faults=faults)])
    assert run(str(path)) == 0
    assert "7 (1 error)" in capsys.readouterr().out
    assert run(str(path), "--step", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith(" NaN")] == [second.req_ids[1]]
    step = page_data(load_trace(path))["steps"][1]
    assert [r[7] for r in step["requests"]] == ["", "NaN", *[""] * 8]
    asked = ("--step", "1", "--what", "sampling", "--request", second.req_ids[1], "-o", str(tmp_path / "x.png"))
    assert run(str(path), *asked) == 2
    assert "got an error" in capsys.readouterr().err


def test_a_step_is_told_as_plan_and_table(capsys: pytest.CaptureFixture[str]):
    assert run(str(RECORDINGS / "graph.jsonl"), "--step", "84") == 0
    record = load_trace(RECORDINGS / "graph.jsonl").steps[84]
    out = capsys.readouterr().out
    assert out.startswith("graph, step 84 of 85, vllm 0.26.0 V2\n")
    for i, req_id in enumerate(record.req_ids):
        assert any(line.split()[:2] == [req_id, str(record.idx_mapping[i])] for line in out.splitlines())
    assert f"{record.num_reqs} requests" in out or f"(padded to {record.num_reqs_padded}) requests" in out


def test_new_finished_and_drafts_are_in_the_plans_summary(capsys: pytest.CaptureFixture[str]):
    assert run(str(RECORDINGS / "eagle.jsonl"), "--step", "10") == 0
    out = capsys.readouterr().out
    assert "new: r008 (36 of 48 tokens)" in out
    assert "finished: r001" in out
    assert "drafts: r000 3, r002 3" in out


@pytest.mark.parametrize("what", ["batch", "rows", "blocks", "slots"])
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_pictures_of_a_step(what: str, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    out = tmp_path / f"x.{ending}"
    assert run(PREEMPT, "--step", "30", "--what", what, "-o", str(out)) == 0
    assert out.read_bytes().startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert str(out) in capsys.readouterr().out


def test_timeline_sampling_divergence_and_kill_matrix(own_trace: str, tmp_path: Path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "x.png"
    other = tmp_path / "other.jsonl"
    first, second = mixed_steps(8)
    save_trace(other, [first, dataclasses.replace(second, positions=second.positions + 1)])
    matrix = tmp_path / "matrix.json"
    matrix.write_text(json.dumps({"runner": "cpu", "matrix": {"m": ["MR-SLOT-001"]}, "survivors": []}))
    for args in (
        (own_trace, "--what", "timeline"),
        (own_trace, "--step", "1", "--what", "sampling", "--request", "r001"),
        (str(RECORDINGS / "sampling.jsonl"), "--step", "17", "--what", "sampling", "--request", "r009"),
        (own_trace, "--step", "1", "--what", "divergence", "--against", str(other)),
        (str(matrix), "--what", "kill-matrix"),
    ):
        out.unlink(missing_ok=True)
        assert run(*args, "-o", str(out)) == 0, args
        assert out.read_bytes().startswith(b"\x89PNG")


def test_two_recordings_of_other_plans_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    out = tmp_path / "x.png"
    asked = ("--step", "10", "--what", "divergence", "-o", str(out), "--against")
    mixed = str(RECORDINGS / "mixed.jsonl")
    assert run(mixed, *asked, PREEMPT) == 2
    assert "other plans in this step" in capsys.readouterr().err
    assert not out.exists()
    assert run(mixed, *asked, str(RECORDINGS / "mixed_v1.jsonl")) == 0


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--step", "129"], "0 to 128"),
        (["--step", "-1"], "0 to 128"),
        (["--what", "batch", "-o", "x.gif"], ".png, .svg or .html"),
        (["--what", "batch", "--step", "1"], "Add -o FILE.png"),
        (["--what", "bach", "--step", "1", "-o", "x.png"], "'batch'"),
        (["-o", "x.png"], "what to draw is not said"),
        (["--what", "batch", "-o", "x.html"], "Leave --what out"),
        (["--what", "batch", "-o", "x.png"], "--step"),
        (["--what", "timeline", "--step", "1", "-o", "x.png"], "no use for it"),
        (["--what", "sampling", "--step", "1", "-o", "x.png"], "--request"),
        (["--what", "batch", "--step", "1", "--request", "r000", "-o", "x.png"], "no use for it"),
        (["--what", "divergence", "--step", "1", "-o", "x.png"], "--against"),
        (["--request", "r000"], "no use for it"),
        (["--what", "batch", "--step", "1", "--block-size", "16", "-o", "x.png"], "--block-size"),
        (["--what", "slots", "--step", "1", "--block-size", "0", "-o", "x.png"], "at least 1"),
        (["--what", "sampling", "--step", "1", "--request", "nobody", "-o", "x.png"], "--request"),
        (["--what", "sampling", "--step", "1", "--request", "r000", "-o", "x.png"], "holds no logits"),
        (["-o", "/no/such/folder/x.html"], "cannot be written"),
        (["--what", "kill-matrix", "-o", "x.png"], "cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused(
    args: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert run(PREEMPT, *args) == 2
    err = capsys.readouterr().err
    assert told in err
    assert not list(tmp_path.iterdir())


def test_where_slots_tell_no_block_size_it_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    record, path, out = mixed_steps(1)[0], tmp_path / "own.jsonl", tmp_path / "x.png"
    save_trace(path, [dataclasses.replace(record, slot_mappings=np.full_like(record.slot_mappings, -1))])
    asked = (str(path), "--step", "0", "--what", "slots", "-o", str(out))
    assert run(*asked) == 2
    assert "--block-size N" in capsys.readouterr().err
    assert run(*asked, "--block-size", "16") == 0
    assert out.exists()


def test_a_missing_recording_is_refused(capsys: pytest.CaptureFixture[str]):
    assert run("/no/such.jsonl") == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_step_without_tokens_is_told_but_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace = load_trace(PREEMPT)
    empty = next((i for i, s in enumerate(trace.steps) if s.num_reqs == 0), None)
    assert empty is not None
    assert run(PREEMPT, "--step", str(empty)) == 0
    assert "(no request is scheduled)" in capsys.readouterr().out
    assert run(PREEMPT, "--step", str(empty), "--what", "batch", "-o", str(tmp_path / "x.png")) == 2
    assert "schedules no tokens" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    assert run(PREEMPT, "--step", str(empty), "--what", "blocks", "-o", str(tmp_path / "x.png")) == 0


def test_every_picture_is_named_in_the_help(capsys: pytest.CaptureFixture[str]):
    assert main(["show", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(what in out for what in WHATS)


# -- the page, without a browser ------------------------------------------------------------------------------


def test_the_page_is_written_and_holds_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "trace.html"
    assert run(PREEMPT, "--step", "7", "-o", str(out)) == 0
    assert "129 steps" in capsys.readouterr().out
    text = out.read_text(encoding="utf-8")
    stored = json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])
    assert stored["start"] == 7
    assert {k: v for k, v in stored.items() if k != "start"} == json.loads(json.dumps(page_data(load_trace(PREEMPT))))
    for address in ("http:", "https:"):
        assert address not in text.replace("http://www.w3.org/2000/svg", "")
    assert "@DATA@" not in text
    assert "@TITLE@" not in text


def test_a_page_of_many_steps_is_written_and_said_to_be_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    empty = StepRecord(SchedulerOutput())
    for count, said in ((500, "500 steps, 0."), (1001, "1001 steps, 0.")):
        path = tmp_path / f"{count}.jsonl"
        save_trace(path, [mixed_steps(8)[0], *[empty] * (count - 1)])
        assert run(str(path), "-o", str(tmp_path / "page.html")) == 0
        out = capsys.readouterr().out
        assert said in out
        assert ("much for a browser" in out) == (count > 500)


@pytest.mark.parametrize("name", ["preempt", "eagle", "hybrid", "preempt_v1"])
def test_page_data_is_what_the_records_say(name: str):
    trace = load_trace(RECORDINGS / f"{name}.jsonl")
    data = page_data(trace)
    ids = [r["id"] for r in data["requests"]]
    assert len(data["steps"]) == len(trace.steps)
    for record, step in zip(trace.steps, data["steps"], strict=True):
        assert step["ids"] == record.input_ids.tolist()
        assert step["positions"] == record.positions.tolist()
        assert step["slots"] == record.slot_mappings.tolist()
        assert step["logits"] == record.logits_indices.tolist()
        assert [ids[r[0]] for r in step["requests"] if r[0] >= 0] == list(record.req_ids)
        assert [r[2] for r in step["requests"] if r[0] >= 0] == record.idx_mapping.tolist()
        tables = {ids[r]: groups for r, _, groups in step["tables"]}
        for g, group in enumerate(record.block_tables):
            for i, req_id in enumerate(record.req_ids):
                assert tables[req_id][g][: len(group[i])] == group[i].tolist()
    assert data["blockSize"] == [trace.meta["block_size"]] * len(data["blockSize"])


@pytest.mark.parametrize("name", ["preempt", "hybrid"])
def test_the_pages_cache_is_that_of_the_picture(name: str):
    trace = load_trace(RECORDINGS / f"{name}.jsonl")
    data = page_data(trace)
    ids = [r["id"] for r in data["requests"]]
    for n in range(0, len(trace.steps), 5):
        told = {}
        for block, size, owners, *more in data["steps"][n]["cells"]:
            written, wrong = [*more, [], []][:2]
            told[block] = (size, [(ids[r], filled) for r, filled in owners], written, wrong)
        cells = blocks_data(trace.steps[: n + 1], block_size=trace.meta["block_size"]).blocks
        assert told == {
            c.block: (c.size, list(zip(c.owners, c.filled, strict=True)), list(c.written), list(c.wrong))
            for c in cells
            if c.owners or c.written
        }


def test_what_the_pictures_mark_is_in_the_page():
    first, record = mixed_steps(8)
    slots, logits, rows = record.slot_mappings.copy(), record.logits_indices.copy(), record.idx_mapping.copy()
    slots[0, 1], logits[1], rows[2], rows[3] = slots[0, 0], 500, -1, rows[0]
    wrong = dataclasses.replace(record, slot_mappings=slots, logits_indices=logits, idx_mapping=rows)
    step = page_data(Trace("x", {}, (first, wrong)))["steps"][1]
    assert step["lost"] == "Not on the axis: ▲1 at 500."
    assert [r[8] for r in step["requests"]] == ["twice", "", "negative", "twice", *[""] * 6]
    block, offset = divmod(int(slots[0, 0]), 16)
    assert [(c[0], c[4]) for c in step["cells"] if len(c) > 4] == [(block, [offset])]
    right = page_data(Trace("x", {}, (first, record)))["steps"][1]
    assert right["lost"] == ""
    assert not any(r[8] for r in right["requests"])
    assert not any(len(c) > 4 for c in right["cells"])


def test_padding_is_in_the_page():
    data = page_data(Trace("x", {}, mixed_steps(8)))
    step = data["steps"][-1]
    assert step["padded"] == [10, 30]
    assert len(step["ids"]) == 27
    assert step["slots"][0][27:] == [-1, -1, -1]
    assert [r[1] for r in step["requests"][-2:]] == ["padding", "padding"]


def test_text_of_a_trace_cannot_end_the_script():
    record = mixed_steps(1)[0]
    page = trace_page(Trace("</script>", {}, (dataclasses.replace(record, runner="</script>"),)))
    assert page.count("</script>") == 2
    assert "\\u003c/script>" in page


def test_a_page_needs_steps():
    with pytest.raises(ConfigError, match="0 steps"):
        trace_page(Trace("x", {}, ()))
    with pytest.raises(ConfigError, match="no such step"):
        trace_page(Trace("x", {}, mixed_steps(1)), start=2)


def test_a_page_of_a_trace_without_slots_has_no_block_size():
    record = mixed_steps(1)[0]
    hidden = dataclasses.replace(record, slot_mappings=np.full_like(record.slot_mappings, -1))
    assert page_data(Trace("x", {}, (hidden,)))["blockSize"] == [None]
