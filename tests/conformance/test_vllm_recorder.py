"""The recorder on model runners with vLLM's names: it writes what they did, replay reads it, and it leaves no trace."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_vllm import LLM, V1Runner, V2Runner, V2Runner33, read, scheduler_output

from conformance.adapters.vllm_recorder import record
from conformance.recording import RECORDINGS
from conformance.replay import replay_recording
from runner_api import CallOrderError, CapabilityError, ConfigError, StepRecord, TraceError, load_trace

SAMPLING_LOGITS = RECORDINGS / "sampling_logits.npz"
PAGE = (Path(__file__).parents[2] / "docs/record-vllm.md").read_text(encoding="utf-8")


def source(name: str) -> Path:
    return RECORDINGS / f"{name}.jsonl"


def record_all(runner: Any, path: Path, version: str = "0.26.0", logits: bool = False) -> None:
    llm = LLM(runner)
    with record(llm, path, version=version, logits=logits):
        llm.generate()


def assert_same(got: StepRecord, want: StepRecord, unknown: tuple[str, ...] = ()) -> None:
    """Every field of a record, but for those that the recording it came from does not have."""
    for field in dataclasses.fields(StepRecord):
        a, b = getattr(got, field.name), getattr(want, field.name)
        if field.name in ("runner", "extra", *unknown):
            continue
        if field.name == "block_tables":
            assert [[r.tolist() for r in g] for g in a] == [[r.tolist() for r in g] for g in b]
        elif isinstance(b, np.ndarray):
            np.testing.assert_array_equal(a, b, field.name)
        else:
            assert a == b, field.name


# Fields that a recording without drafts may hold all the same, and that the recorder then leaves out.
NO_DRAFTS = ("expanded_idx_mapping", "expanded_local_pos", "draft_token_ids", "num_rejected")


@pytest.mark.parametrize("name", ["mixed", "preempt", "abort", "prefix", "graph", "piecewise", "hybrid", "sampling"])
def test_a_v2_runner_is_written_as_it_was_recorded(name: str, tmp_path: Path) -> None:
    record_all(V2Runner(source(name)), tmp_path / "t.jsonl")
    got, want = load_trace(tmp_path / "t.jsonl"), load_trace(source(name))
    assert len(got.steps) == len(want.steps) > 50
    for a, b in zip(got.steps, want.steps, strict=True):
        assert_same(a, b, NO_DRAFTS)
    told = {k: v for k, v in got.meta.items() if k not in ("scenario", "free_rows_known")}
    assert told == {k: want.meta[k] for k in told}


def test_drafts_are_written_as_they_were_recorded(tmp_path: Path) -> None:
    record_all(V2Runner(source("eagle")), tmp_path / "t.jsonl")
    got, want = load_trace(tmp_path / "t.jsonl"), load_trace(source("eagle"))
    for a, b in zip(got.steps, want.steps, strict=True):
        assert_same(a, b, ("num_rejected",) if b.num_rejected is None else ())
    assert sum(int(step.num_rejected.sum()) for step in got.steps) > 100


@pytest.mark.parametrize("name", ["mixed", "hybrid"])
def test_the_interface_of_0_33_gives_the_same(name: str, tmp_path: Path) -> None:
    record_all(V2Runner33(source(name), reach=31), tmp_path / "t.jsonl", "0.33.0")
    got, want = load_trace(tmp_path / "t.jsonl"), load_trace(source(name))
    for a, b in zip(got.steps, want.steps, strict=True):
        assert_same(a, b, NO_DRAFTS)
    assert got.meta["source"] == "vllm 0.33.0"
    assert got.meta["window_reach"] == [31] * len(got.steps[0].block_tables)


@pytest.mark.parametrize(("name", "more"), [("mixed_v1", ()), ("preempt_v1", (1,))])
def test_a_v1_runner_is_written_as_it_was_recorded(name: str, more: tuple[int, ...], tmp_path: Path) -> None:
    record_all(V1Runner(source(name), more), tmp_path / "t.jsonl")
    got, want = load_trace(tmp_path / "t.jsonl"), load_trace(source(name))
    for a, b in zip(got.steps, want.steps, strict=True):
        assert_same(a, b)
    _, steps, outputs = read(tmp_path / "t.jsonl")
    # What was drawn begins with what was put out: discarded rows do not count, a token past the end may follow.
    for req_id, output in read(source(name))[2].items():
        assert outputs[req_id]["token_ids"][: len(output["token_ids"])] == output["token_ids"]
    assert {n for s in steps if "sampled" in s for n in s["sampled"]["num_sampled"]} == {0, 1}


@pytest.mark.parametrize(
    ("make", "version"),
    [
        (lambda: V2Runner(source("mixed")), "0.26.0"),
        (lambda: V2Runner33(source("mixed")), "0.33.0"),
        (lambda: V1Runner(source("preempt_v1")), "0.26.0"),
    ],
    ids=["V2 0.26", "V2 0.33", "V1"],
)
def test_replay_reads_it_and_agrees(make: Any, version: str, tmp_path: Path) -> None:
    record_all(make(), tmp_path / "t.jsonl", version)
    report = replay_recording(tmp_path / "t.jsonl", steps=20)
    assert report.verdict == "AGREE", report.first_divergence
    assert report.model == "llama-tiny"
    assert report.tokens["equal"] > 30


def test_recorded_logits_stand_in_for_the_model(tmp_path: Path) -> None:
    record_all(V2Runner(source("sampling"), SAMPLING_LOGITS), tmp_path / "t.jsonl", logits=True)
    got = np.load(tmp_path / "t_logits.npz")
    want = np.load(SAMPLING_LOGITS)
    assert sorted(got.files) == sorted(want.files)
    assert all(np.array_equal(got[name], want[name]) for name in want.files)
    margins = load_trace(tmp_path / "t.jsonl").steps[0].extra["top2_margin"]
    first = np.sort(want["logits_0"], axis=1)
    assert margins == (first[:, -1] - first[:, -2]).tolist()
    report = replay_recording(tmp_path / "t.jsonl", steps=20)
    assert (report.verdict, report.model) == ("AGREE", "recorded logits")


def test_logits_that_were_asked_for_and_are_not_there_are_told(tmp_path: Path) -> None:
    class Elsewhere(V2Runner):
        def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
            output = self._sampler_output()
            return output, output.num_sampled, output.num_rejected

    with pytest.raises(CapabilityError, match=r"computed in another place.*got 'none'"):
        record_all(Elsewhere(source("mixed")), tmp_path / "t.jsonl", logits=True)


def test_replay_finds_a_wrong_slot_of_the_recorded_engine(tmp_path: Path) -> None:
    class OffByOne(V2Runner):
        def prepare_attn(self, input_batch: Any) -> Any:
            tables, slots = super().prepare_attn(input_batch)
            if self.step == 7:
                slots.numpy()[0, 2] += 1
            return tables, slots

    record_all(OffByOne(source("mixed")), tmp_path / "t.jsonl")
    report = replay_recording(tmp_path / "t.jsonl", steps=12)
    assert report.first_divergence is not None
    assert (report.first_divergence.step, report.first_divergence.difference.field) == (7, "slot_mappings")
    assert report.first_divergence.difference.index == (0, 2)


def test_a_seed_that_the_engine_drew_is_recorded(tmp_path: Path) -> None:
    runner = V2Runner(source("sampling"), unseeded={"r000": 4711})
    params = runner.recorded[0]["plan"]["new"][0]["sampling_params"]
    assert params["temperature"] > 0
    assert params.pop("seed") != 4711
    record_all(runner, tmp_path / "t.jsonl")
    assert load_trace(tmp_path / "t.jsonl").steps[0].plan.scheduled_new_reqs[0].seed == 4711


# -- it comes and goes ----------------------------------------------------------------------------------------


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    runner = V2Runner(source("mixed"))
    before = dict(vars(runner))
    record_all(runner, tmp_path / "t.jsonl")
    assert vars(runner).keys() == before.keys()


def test_what_was_recorded_before_an_error_can_be_read(tmp_path: Path) -> None:
    class Failing(V2Runner):
        def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
            if self.step == 9:
                raise ZeroDivisionError
            return super().sample(hidden_states, input_batch, grammar_output)

    llm = LLM(Failing(source("mixed")))
    with pytest.raises(ZeroDivisionError):
        record_all(llm._runner, tmp_path / "t.jsonl")
    assert len(load_trace(tmp_path / "t.jsonl").steps) == 9
    assert "execute_model" not in vars(llm._runner)


def test_dummy_runs_are_no_steps(tmp_path: Path) -> None:
    llm = LLM(V2Runner(source("mixed")))
    with record(llm, tmp_path / "t.jsonl", version="0.26.0") as recorder:
        llm._runner.execute_model(scheduler_output(llm._runner.recorded[0]["plan"]), dummy_run=True)
        llm.generate(steps=4)
    assert recorder.steps == len(load_trace(tmp_path / "t.jsonl").steps) == 4


def test_a_runner_is_recorded_once_at_a_time(tmp_path: Path) -> None:
    llm = LLM(V2Runner(source("mixed")))
    with record(llm, tmp_path / "t.jsonl", version="0.26.0"):
        with pytest.raises(ConfigError, match="once at a time"), record(llm, tmp_path / "u.jsonl", version="0.26.0"):
            pass
        assert not (tmp_path / "u.jsonl").exists()
        llm.generate(steps=2)


# -- what it refuses ------------------------------------------------------------------------------------------


def test_nothing_recorded_is_an_error(tmp_path: Path) -> None:
    llm = LLM(V2Runner(source("mixed")))
    with pytest.raises(ConfigError, match="took no step"), record(llm, tmp_path / "t.jsonl", version="0.26.0"):
        pass


def test_an_engine_without_a_runner_is_told_what_was_looked_for(tmp_path: Path) -> None:
    llm = LLM(object())
    with pytest.raises(ConfigError, match=r"LLM -> .*V2 with execute_model, prepare_inputs.*MULTIPROCESSING=0"):
        record_all(llm, tmp_path / "t.jsonl")


def test_another_signature_is_told_with_the_known_versions(tmp_path: Path) -> None:
    class Newer(V2Runner):
        def prepare_attn(self, batch_view: Any) -> Any: ...

    with pytest.raises(ConfigError, match=r"prepare_attn: .*got '\(batch_view\)'.*0\.26 and 0\.33"):
        record_all(Newer(source("mixed")), tmp_path / "t.jsonl")


def test_the_version_must_be_known(tmp_path: Path) -> None:
    llm = LLM(V2Runner(source("mixed")))
    with pytest.raises(ConfigError, match="vLLM is not installed"), record(llm, tmp_path / "t.jsonl"):
        llm.generate(steps=2)


@pytest.mark.parametrize("make", [V2Runner, V1Runner])
def test_an_engine_at_work_is_refused(make: Any, tmp_path: Path) -> None:
    runner = make(source("mixed" if make is V2Runner else "mixed_v1"))
    LLM(runner).generate(steps=3)
    with pytest.raises(ConfigError, match="running already"):
        record_all(runner, tmp_path / "t.jsonl")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be written"):
        record_all(V2Runner(source("mixed")), tmp_path / "no/such/folder.jsonl")


def refusal(runner: Any, tmp_path: Path, change: Any) -> str:
    """The error that a changed first plan brings."""
    plan = scheduler_output(runner.recorded[0]["plan"])
    change(plan)
    with pytest.raises(CapabilityError) as error, record(runner, tmp_path / "t.jsonl", version="0.26.0"):
        runner.execute_model(plan)
    return str(error.value)


@pytest.mark.parametrize(
    ("part", "value"),
    [("mm_features", ["image"]), ("lora_request", "adapter"), ("pooling_params", 1), ("prompt_embeds", [[0.5]])],
)
def test_parts_of_requests_without_a_place_are_refused(part: str, value: Any, tmp_path: Path) -> None:
    message = refusal(
        V2Runner(source("mixed")), tmp_path, lambda plan: setattr(plan.scheduled_new_reqs[0], part, value)
    )
    assert f"{part}['r000']" in message


@pytest.mark.parametrize("name", ["structured_outputs", "extra_args", "watermarking", "something_new"])
def test_parameters_that_change_tokens_and_have_no_place_are_refused(name: str, tmp_path: Path) -> None:
    message = refusal(
        V2Runner(source("mixed")), tmp_path,
        lambda plan: setattr(plan.scheduled_new_reqs[0].sampling_params, name, {"x": 1}),
    )  # fmt: skip
    assert f"sampling_params.{name}['r000']" in message


def test_random_draws_of_v1_are_refused(tmp_path: Path) -> None:
    def warm(plan: Any) -> None:
        plan.scheduled_new_reqs[0].sampling_params.temperature = 0.7

    assert "PyTorch's generators" in refusal(V1Runner(source("mixed_v1")), tmp_path, warm)


def test_masks_are_refused(tmp_path: Path) -> None:
    class Masked(V2Runner):
        def sample_tokens(self, grammar_output: Any = None) -> Any:
            return super().sample_tokens(object())

    with pytest.raises(CapabilityError, match="grammar masks"):
        record_all(Masked(source("mixed")), tmp_path / "t.jsonl")


def test_a_rank_that_draws_nothing_is_told(tmp_path: Path) -> None:
    class First(V2Runner):
        def sample_tokens(self, grammar_output: Any = None) -> Any:
            return None

    with pytest.raises(CallOrderError, match="drew no tokens"):
        record_all(First(source("mixed")), tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("name", "value"), [("pcp_manager", object()), ("adaptive_verification", object()), ("dcp_size", 2)]
)
def test_a_share_of_a_batch_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    runner = V2Runner(source("mixed"))
    setattr(runner, name, value)
    with pytest.raises(CapabilityError, match=name):
        record_all(runner, tmp_path / "t.jsonl")


# -- the page -------------------------------------------------------------------------------------------------


def test_the_page_s_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an `LLM` of ours in place of vLLM's; the commands are not run: replay is tested above."""
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(programs) == 2
    monkeypatch.chdir(tmp_path)
    vllm: Any = type(re)("vllm")
    vllm.__version__ = "0.26.0"
    vllm.LLM = lambda **_: LLM(V2Runner(source("mixed")))
    vllm.SamplingParams = lambda **_: None
    monkeypatch.setitem(__import__("sys").modules, "vllm", vllm)
    names: dict[str, Any] = {}
    exec(programs[0], names)
    assert len(load_trace(tmp_path / "trace.jsonl").steps) == 97 - 1
    runner = V2Runner(source("mixed"))
    names |= {"worker": LLM(runner).llm_engine.model_executor.driver_worker, "serve": LLM(runner).generate}
    exec(programs[1], names)
    assert load_trace(tmp_path / "rank0.jsonl").steps
