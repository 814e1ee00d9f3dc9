"""Replay of recorded steps: the reference agrees with vLLM, one wrong cell is found, and no runner sees the answers."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from conformance.certificates import EQUAL, Certifier
from conformance.logprob_comparison import LOGPROB_BOUND_RECORDED_LOGITS
from conformance.noise import gumbel_noise
from conformance.recording import RECORDINGS, ReplayStep, build_runner, drafts_to_hold, launch_of, prepare, replay_steps
from conformance.replay import StepJudge, replay_recording
from engine_core.cli import main
from runner_api import (
    INTEGER_FIELDS,
    BatchDescriptor,
    CachedRequestData,
    Capability,
    CapabilityError,
    CheckpointError,
    ConfigError,
    CUDAGraphMode,
    ForcedStep,
    ModelRunnerOutput,
    NewRequestData,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    StepRecord,
    Trace,
    TraceError,
    UnknownNameError,
    load_factory,
    load_trace,
)

BASE_FIELDS = set(INTEGER_FIELDS) - {"expanded_idx_mapping", "expanded_local_pos", "num_rejected"} | {"output"}
EXPANDED = {"expanded_idx_mapping", "expanded_local_pos"}
# recording: (steps, tokens drawn, fields beside BASE_FIELDS)
WITH_TOKENS = {
    "mixed": (96, 565, set()),
    "wide": (77, 1085, set()),
    "prefix": (73, 437, set()),
    "abort": (61, 303, set()),
    "qwen": (87, 501, set()),
    "preempt": (129, 484, EXPANDED),
    "graph": (85, 485, set()),
    "piecewise": (90, 513, EXPANDED | {"num_rejected"}),
}
INTEGERS_ALONE = {"hybrid": (76, set()), "eagle": (39, EXPANDED | {"num_rejected"})}


def recording(name: str) -> Path:
    return RECORDINGS / f"{name}.jsonl"


# -- the reference agrees with the recorded program -----------------------------------------------------------


@pytest.mark.parametrize("name", WITH_TOKENS)
def test_the_reference_agrees_with_vllm(name):
    steps, tokens, more = WITH_TOKENS[name]
    report = replay_recording(recording(name))
    assert report.verdict == "AGREE", str(report.first_divergence)
    assert report.steps == steps
    assert set(report.fields) == BASE_FIELDS | more
    assert all(equal > 0 and different == 0 for equal, different in report.fields.values())
    assert report.tokens["different"] == 0
    assert report.tokens["near_tie"] <= 3
    assert sum(report.tokens.values()) == tokens


@pytest.mark.parametrize("name", INTEGERS_ALONE)
def test_the_reference_builds_what_vllm_built_without_the_model(name):
    steps, more = INTEGERS_ALONE[name]
    report = replay_recording(recording(name))
    assert report.verdict == "AGREE", str(report.first_divergence)
    assert (report.steps, report.model) == (steps, "witness")
    assert set(report.fields) == BASE_FIELDS | more
    assert all(equal > 0 and different == 0 for equal, different in report.fields.values())
    assert sum(report.tokens.values()) == 0
    assert any("tokens are not judged" in note for note in report.notes)


LOGPROBS = {"logprob_token_ids": 535, "ranks": 248, "logprobs": 535}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_sampling_parameter_agrees_with_vllm(dtype):
    """On the recorded logits nothing is left to chance: each token, each rank, each log probability to 2e-5."""
    report = replay_recording(recording("sampling"), dtype=dtype)
    assert report.verdict == "AGREE", str(report.first_divergence)
    assert (report.steps, report.model) == (76, "recorded logits")
    assert report.tokens == {"equal": 386, "near_tie": 0, "different": 0}
    assert set(report.fields) == BASE_FIELDS | set(LOGPROBS)
    assert {name: report.fields[name] for name in LOGPROBS} == {name: [n, 0] for name, n in LOGPROBS.items()}
    assert LOGPROB_BOUND_RECORDED_LOGITS == 2e-5


def test_sampled_tokens_agree_with_vllm_end_to_end():
    """With the model's own logits, which differ from the recorded ones by what TF32 does to them."""
    report = replay_recording(recording("sampling"), logits="model")
    assert report.verdict == "AGREE", str(report.first_divergence)
    assert (report.steps, report.model) == (76, "llama-tiny")
    assert report.tokens["different"] == 0
    assert report.tokens["near_tie"] <= 1
    assert sum(report.tokens.values()) == 386
    assert report.fields["ranks"] == [0, 0]
    assert report.fields["logprobs"] == [535, 0]


def test_every_recorded_token_has_its_certificate():
    """None is even a near tie, and the certificates knew how many to expect."""
    trace = load_trace(recording("sampling"))
    stored = np.load(RECORDINGS / "sampling_logits.npz")
    certifier = Certifier(RunnerConfig(noise="philox"))
    verdicts, expected = [], 0.0
    for record in trace.steps:
        certifier.observe(record.plan)
        if record.num_reqs:
            draws = certifier.draws(record, stored[f"logits_{record.extra['step']}"])
            for i in np.flatnonzero(record.num_sampled):
                certificate = draws[i][0].certify(int(record.token_ids[i, 0]))
                verdicts.append(certificate.verdict)
                expected += certificate.expected
            certifier.take(record.tokens())
    assert verdicts == [EQUAL] * 386
    assert 0 < expected < 0.01


def test_parameters_are_read_as_they_were_recorded():
    params = [new for s in load_trace(recording("sampling")).steps for new in s.plan.scheduled_new_reqs]
    assert len(params) == 24
    used = {
        "greedy": 3, "top_k": 8, "top_p": 7, "min_p": 7, "repetition_penalty": 9, "frequency_penalty": 9,
        "presence_penalty": 5, "logit_bias": 5, "allowed_token_ids": 2, "min_tokens": 5, "stop_token_ids": 5,
        "logprobs": 12, "seed": 21,
    }  # fmt: skip
    plain = SamplingParams()
    counted = {n: sum(getattr(r.sampling_params, n) != getattr(plain, n) for r in params) for n in used}
    assert counted == used
    assert {r.eos_token_ids for r in params} == {(2,)}
    assert {r.stop_token_ids for r in params} == {(2,), (5, 9, 2)}
    assert {r.seed for r in params} >= {0, 42, 2**40 + 3}


NEUTRAL = {
    "temperature": 1.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
    "presence_penalty": 0.0, "logit_bias": None, "allowed_token_ids": None, "seed": 5,
}  # fmt: skip


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_parameter_left_out_diverges(name):
    """Each of them decides tokens of this recording."""
    trace = load_trace(recording("sampling"))
    for record in trace.steps:
        for new in record.plan.scheduled_new_reqs:
            p = new.sampling_params
            if name == "seed" and not p.greedy:
                new.seed = NEUTRAL[name]
            elif name != "temperature" or not p.greedy:
                new.sampling_params = dataclasses.replace(p, **{name: NEUTRAL[name]})
    report = replay_recording(recording("sampling"), trace=trace)
    assert report.verdict == "DIVERGE"
    assert report.tokens["different"] > 0
    assert report.tokens["near_tie"] == 0


# -- one wrong cell is found ----------------------------------------------------------------------------------


def rewrite(tmp_path: Path, name: str, num_steps: int, change) -> Path:
    """The first steps of a shipped recording with `change(steps)` applied, as a file of its own."""
    lines = [json.loads(line) for line in recording(name).read_text().splitlines()]
    steps = lines[1 : 1 + num_steps]
    change(steps)
    path = tmp_path / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in [lines[0], *steps, {"outputs": {}}]))
    return path


def cell(*keys):
    """A change of one cell of step 6: the integer at this path + 1 (a string gets a letter)."""

    def change(steps):
        at = steps[6]
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] += "x" if isinstance(at[keys[-1]], str) else 1

    return change


CELLS = {
    "req_ids": ("batch", "req_ids", 1),
    "idx_mapping": ("batch", "idx_mapping", 1),
    "query_start_loc": ("batch", "query_start_loc", 2),
    "cu_num_logits": ("batch", "cu_num_logits", -1),
    "expanded_idx_mapping": ("batch", "expanded_idx_mapping", 0),
    "expanded_local_pos": ("batch", "expanded_local_pos", -1),
    "seq_lens": ("batch", "seq_lens", 2),
    "positions": ("batch", "positions", -1),
    "input_ids": ("batch", "input_ids", 0),
    "logits_indices": ("batch", "logits_indices", -1),
    "block_tables": ("batch", "block_tables", 0, 1, 0),
    "slot_mappings": ("batch", "slot_mappings", 0, 3),
    "num_sampled": ("sampled", "num_sampled", -1),
    "num_rejected": ("sampled", "num_rejected", 0),
}


def test_every_integer_field_has_a_corruption():
    assert set(CELLS) == set(INTEGER_FIELDS)


@pytest.mark.parametrize("name", CELLS)
def test_one_wrong_cell_diverges_and_is_named(name, tmp_path):
    path = rewrite(tmp_path, "piecewise", 8, cell(*CELLS[name]))
    report = replay_recording(path)
    assert report.verdict == "DIVERGE"
    assert (report.first_divergence.step, report.first_divergence.difference.field) == (6, name)
    assert report.fields[name][1] == 1
    assert sum(different for _, different in report.fields.values()) == 1


def test_one_wrong_token_diverges_and_is_named(tmp_path):
    path = rewrite(tmp_path, "piecewise", 8, cell("sampled", "token_ids", 2, 0))
    report = replay_recording(path, steps=7)
    assert report.verdict == "DIVERGE"
    assert report.tokens["different"] == 1
    assert not any(different for _, different in report.fields.values())
    divergence = report.first_divergence
    difference = divergence.difference
    assert (divergence.step, difference.field, difference.index) == (6, "token_ids", (2, 0))
    assert difference.expected == difference.got + 1
    # The token was imposed, so that the next step, whose recorded input is the right one, shows it again.
    assert replay_recording(path).fields["input_ids"][1] == 1


def test_one_wrong_padding_cell_diverges(tmp_path):
    def change(steps):
        padded = next(s for s in steps if s["batch"]["num_tokens_padded"] > s["batch"]["num_tokens"])
        padded["batch"]["slot_mappings"][0][-1] = 0

    report = replay_recording(rewrite(tmp_path, "piecewise", 40, change))
    assert report.verdict == "DIVERGE"
    difference = report.first_divergence.difference
    assert (difference.field, difference.req_id, difference.expected, difference.got) == ("slot_mappings", None, 0, -1)


def test_one_wrong_draft_diverges(tmp_path):
    def change(steps):
        drafted = next(s for s in steps if s["plan"]["spec"])
        drafted["batch"]["draft_tokens_state"][0][1] += 1

    report = replay_recording(rewrite(tmp_path, "eagle", 8, change))
    assert report.first_divergence.difference.field == "input_ids"


def test_a_recorded_field_that_the_runner_does_not_give_is_different():
    report = replay_recording(recording("piecewise"), steps=3, runner=f"{__name__}:forgetful")
    assert report.verdict == "DIVERGE"
    assert report.fields["expanded_local_pos"][0] == 0
    assert report.fields["expanded_local_pos"][1] > 0
    assert report.first_divergence.difference.got is None


@pytest.mark.parametrize("factory", ["broken", "refusing"])
def test_a_runner_that_does_not_take_a_step_diverges_there(factory):
    report = replay_recording(recording("mixed"), steps=6, runner=f"{__name__}:{factory}")
    assert report.verdict == "DIVERGE"
    assert (report.steps, report.first_divergence.step) == (3, 3)
    assert any("ended at step 3" in note for note in report.notes)


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


def around(**methods):
    return type("Odd", (Around,), methods)


def raises(error):
    def method(self, *args, **kwargs):
        raise error

    return method


@pytest.mark.parametrize("error", [RuntimeError("bye"), SystemExit(0)])
def test_a_runner_that_cannot_be_shut_down_loses_no_verdict(error):
    assert replay_recording(recording("mixed"), steps=2, runner=around(shutdown=raises(error))).verdict == "AGREE"
    odd = around(shutdown=raises(error), execute_model=raises(ValueError("no")))
    assert replay_recording(recording("mixed"), steps=2, runner=odd).verdict == "DIVERGE"


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), Mute()])
def test_what_has_no_text_or_wants_to_leave_diverges_in_its_step(error):
    report = replay_recording(recording("mixed"), steps=2, runner=around(execute_model=raises(error)))
    assert (report.verdict, report.first_divergence.step) == ("DIVERGE", 0)
    assert report.first_divergence.difference.got.startswith(type(error).__name__)


@pytest.mark.parametrize("error", [SystemExit(0), Mute()])
def test_a_runner_that_cannot_be_made_ready_is_misuse(error):
    with pytest.raises(ConfigError, match=f"cannot be made ready: {type(error).__name__}"):
        replay_recording(recording("mixed"), steps=2, runner=around(load_model=raises(error)))


def test_graphs_are_captured_only_where_they_are_offered():
    asked = []

    class Graphs(Around):
        offered = frozenset()

        def describe(self):
            info = self._runner.describe()
            return dataclasses.replace(info, capabilities=info.capabilities | self.offered)

        def capture_graphs(self):
            asked.append(self.offered)
            return ()

    class Offering(Graphs):
        offered = frozenset({Capability.CUDA_GRAPHS})

    assert replay_recording(recording("mixed"), steps=2, runner=Graphs).verdict == "AGREE"
    assert replay_recording(recording("mixed"), steps=2, runner=Offering).verdict == "AGREE"
    assert asked == [Offering.offered]


class Around:
    """The reference behind another face: its own code never sees what this class says."""

    def __init__(self, config):
        self._runner = load_factory("cpu")(config)

    def __getattr__(self, name):
        return getattr(self._runner, name)


class WrongOutput(Around):
    """Hands out an output of its own making."""

    output = ModelRunnerOutput(("nobody",), ((1, 2),))

    def sample_tokens(self, *args, **kwargs):
        self._runner.sample_tokens(*args, **kwargs)
        return SimpleNamespace(get_output=lambda: self.output)


def test_the_output_is_held_against_what_was_imposed(monkeypatch):
    right = replay_recording(recording("mixed"), steps=4)
    assert right.fields["output"][0] == 9
    for wrong in (WrongOutput.output, ModelRunnerOutput(), None, ModelRunnerOutput(("r000",), ((1.5,),)), 5):
        monkeypatch.setattr(WrongOutput, "output", wrong)
        report = replay_recording(recording("mixed"), steps=4, runner=f"{__name__}:WrongOutput")
        assert report.verdict == "DIVERGE"
        assert report.first_divergence.difference.field == "output"
        assert report.fields["output"] == [0, 9]


def sloppy(change):
    class Sloppy(Around):
        def last_step(self):
            record = self._runner.last_step()
            return change(record) if record.num_reqs else record

    return Sloppy


def with_field(name, value):
    return lambda r: dataclasses.replace(r, **{name: value(getattr(r, name)) if callable(value) else value})


SLOPPY = {
    "record": lambda r: None,
    "token_ids": with_field("token_ids", lambda a: a[:, 0]),
    "positions": with_field("positions", lambda a: a.astype(float)),
    **{n: with_field(n, None) for n in sorted(set(INTEGER_FIELDS) - {"num_rejected"})},
}


@pytest.mark.parametrize("name", SLOPPY)
def test_a_record_that_cannot_be_read_diverges_and_is_named(name):
    report = replay_recording(recording("piecewise"), steps=4, runner=sloppy(SLOPPY[name]))
    assert report.verdict == "DIVERGE"
    assert report.first_divergence.difference.field == name
    # None is legal in a field that not every runner gives: different then, but not unreadable.
    assert name in EXPANDED or any(f"{name} cannot be read" in note for note in report.notes)
    json.dumps(report.to_json())


@pytest.mark.parametrize("factory", [lambda config: 5, lambda config: 1 / 0])
def test_a_factory_that_gives_no_runner_is_misuse(factory):
    with pytest.raises(ConfigError):
        replay_recording(recording("mixed"), runner=factory)


def test_a_model_of_an_unsupported_family_leaves_the_integers(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["OtherForCausalLM"], "sliding_window": null}')
    report = replay_recording(recording("mixed"), model=str(tmp_path), steps=4)
    assert (report.verdict, report.model) == ("AGREE", "witness")
    assert any("OtherForCausalLM" in note for note in report.notes)


def test_every_file_is_checked_before_the_first_is_replayed(tmp_path, capsys):
    other = tmp_path / "mixed.jsonl"
    other.write_text(recording("mixed").read_text().replace('"model": "llama-tiny"', '"model": "nowhere"', 1))
    assert main(["replay", "--runner", f"{__name__}:Spy", str(recording("graph")), str(other)]) == 2
    assert not any(name == "execute_model" for name, _, _ in Spy.latest.calls)
    assert "nowhere" in capsys.readouterr().err


# -- tokens: equal, near tie, different -----------------------------------------------------------------------


def judged(gap: float, *, margin: float | None = 0.0, recorded: bool = False, **params: float) -> str:
    """How a token is judged whose score lies `gap` above the recorded one's, token 1's. It is token 2."""
    params = SamplingParams(**({"temperature": 0.0} | params))
    plan = SchedulerOutput([NewRequestData("a", [1], [1], 0, ([1],), params, seed=3)])
    expected = StepRecord(
        plan, 1, 1, 1, 1, None, ("a",), query_start_loc=np.array([0, 1]), input_ids=np.array([1], np.int32),
        positions=np.array([0]), logits_indices=np.array([0]), cu_num_logits=np.array([0, 1]),
        token_ids=np.array([[1]]), num_sampled=np.array([1]), extra={} if margin is None else {"top2_margin": [margin]},
    )  # fmt: skip
    scores = np.array([[0.0, 10.0, 10.0 + gap, 9.0]])
    logits = scores.copy()
    if not params.greedy:
        logits = (scores - gumbel_noise(np.int64([3]), np.int64([0]), 4, "philox")) * np.float32(params.temperature)
    logits[0, 1] *= params.repetition_penalty  # token 1 is in the prompt
    config = RunnerConfig(noise="philox")
    setup = SimpleNamespace(judge_tokens=True, recorded_logits=recorded, config=config, logits=Stored(logits))
    report = SimpleNamespace(
        tokens={"equal": 0, "near_tie": 0, "different": 0}, diverge=lambda *_: None, recording="given"
    )
    judge = StepJudge(setup, report)
    judge.admit(expected)
    expected.extra["step"] = 0
    judge._judge_tokens(0, expected, StepRecord(plan, 1, token_ids=np.array([[2]]), logits=logits))
    return next(kind for kind, n in report.tokens.items() if n)


class Stored(dict):
    """An archive of one step's logits."""

    files = ("logits_0",)

    def __init__(self, logits):
        super().__init__(logits_0=logits)


@pytest.mark.parametrize(
    ("gap", "options", "kind"),
    [
        (0.049, {}, "near_tie"),
        (0.051, {}, "different"),
        (-0.01, {}, "different"),  # not even the winner of its own logits
        (0.001, {"margin": 0.5}, "different"),  # flat logits, where the recorded program saw a clear winner
        (0.001, {"margin": 0.12}, "near_tie"),
        (0.001, {"margin": 0.14}, "different"),
        (0.001, {"margin": None}, "near_tie"),
        (0.09, {"temperature": 0.5}, "near_tie"),
        (0.11, {"temperature": 0.5}, "different"),
        (-0.01, {"temperature": 0.5}, "different"),
        (0.059, {"repetition_penalty": 1.2, "margin": 0.5}, "near_tie"),  # the margin was that of other scores
        (0.061, {"repetition_penalty": 1.2}, "different"),
        (0.01, {"recorded": True}, "different"),
        (0.00001, {"recorded": True}, "different"),  # nothing is rounded on the way to a greedy token
        (0.00001, {"recorded": True, "temperature": 0.5}, "different"),
        (0.000001, {"recorded": True, "temperature": 0.5}, "near_tie"),
    ],
)
def test_near_ties_have_a_bound(gap, options, kind):
    assert judged(gap, **options) == kind


@pytest.fixture(scope="module")
def with_logits(tmp_path_factory) -> Path:
    """Steps of `mixed` with seeded requests that want log probabilities, and the logits they were drawn from.

    The reference made the outcome, so this tests the judge, not the reference.
    """
    folder = tmp_path_factory.mktemp("with_logits")
    lines = [json.loads(line) for line in recording("mixed").read_text().splitlines()][:13]
    for step in lines[1:]:
        for i, new in enumerate(step["plan"]["new"]):
            new["sampling_params"] |= {"temperature": 0.8, "seed": 11 + i}
            if new["req_id"] != "r001":
                new["sampling_params"]["logprobs"] = 2
    path = folder / "drawn.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in [*lines, {"outputs": {}}]))
    trace = load_trace(path)
    setup = prepare(path, trace)
    runner = build_runner("cpu", launch_of(setup, trace, 12))
    stored = {}
    for line, step in zip(lines[1:], replay_steps(setup, trace, 12), strict=True):
        runner.execute_model(step.plan, descriptor=step.descriptor)
        runner.sample_tokens().get_output()
        record = runner.last_step()
        line["batch"]["input_ids"] = record.input_ids.tolist()
        line["sampled"] = {n: getattr(record, n).tolist() for n in ("token_ids", "num_sampled", "ranks", "logprobs")}
        line["sampled"]["logprob_token_ids"] = record.logprob_token_ids.tolist()
        stored[f"logits_{line['step']}"] = record.logits
    path.write_text("\n".join(json.dumps(line) for line in [*lines, {"outputs": {}}]))
    np.savez(folder / "drawn_logits.npz", **stored)
    return path


def test_tokens_are_drawn_from_recorded_logits(with_logits):
    report = replay_recording(with_logits)
    assert (report.verdict, report.model) == ("AGREE", "recorded logits")
    assert report.tokens["equal"] > 40
    assert report.tokens["near_tie"] == report.tokens["different"] == 0
    assert all(report.fields[name][0] > 0 for name in ("logprobs", "ranks", "logprob_token_ids"))


def test_the_model_can_be_asked_instead_of_the_recorded_logits(with_logits):
    report = replay_recording(with_logits, logits="model")
    assert (report.verdict, report.model) == ("AGREE", "llama-tiny")
    # Rounding may swap neighbours of a list: ids behind the drawn token and ranks are left out.
    assert report.fields["ranks"] == [0, 0]
    assert report.fields["logprob_token_ids"][0] * 3 == report.fields["logprobs"][0]


@pytest.mark.parametrize(("name", "amount"), [("logprob_token_ids", 1), ("ranks", 1), ("logprobs", 0.001)])
def test_one_wrong_log_probability_diverges_if_it_was_asked_for(with_logits, tmp_path, name, amount):
    (tmp_path / "drawn_logits.npz").write_bytes((with_logits.parent / "drawn_logits.npz").read_bytes())
    lines = [json.loads(line) for line in with_logits.read_text().splitlines()]
    for req_id, verdict in (("r001", "AGREE"), ("r002", "DIVERGE")):
        changed = copy.deepcopy(lines)
        row = changed[9]["batch"]["req_ids"].index(req_id)
        values = changed[9]["sampled"][name]
        if name == "ranks":
            values[row] += amount
        else:
            values[row][1] += amount
        path = tmp_path / "drawn.jsonl"
        path.write_text("\n".join(json.dumps(line) for line in changed))
        report = replay_recording(path)
        assert report.verdict == verdict, req_id
        assert report.fields[name][1] == (verdict == "DIVERGE")
    assert report.first_divergence.difference.req_id == "r002"


def test_recorded_logits_may_lie_elsewhere(with_logits, tmp_path, capsys):
    (tmp_path / "drawn.jsonl").write_bytes(with_logits.read_bytes())
    elsewhere = tmp_path / "other" / "anything.npz"
    elsewhere.parent.mkdir()
    stored = dict(np.load(with_logits.parent / "drawn_logits.npz"))
    np.savez(elsewhere, **stored)
    report = replay_recording(tmp_path / "drawn.jsonl", logits=str(elsewhere))
    assert (report.verdict, report.model) == ("AGREE", "recorded logits")
    assert main(["replay", "--logits", str(elsewhere), str(tmp_path / "drawn.jsonl")]) == 0
    # one file of logits belongs to one recording, and has a row for each of its steps' rows
    assert main(["replay", "--logits", str(elsewhere), str(tmp_path / "drawn.jsonl"), str(recording("mixed"))]) == 2
    stored["logits_5"] = stored["logits_5"][:-1]
    np.savez(elsewhere, **stored)
    with pytest.raises(TraceError, match="logits_5"):
        replay_recording(tmp_path / "drawn.jsonl", logits=str(elsewhere))
    with pytest.raises(TraceError, match="nowhere"):
        replay_recording(tmp_path / "drawn.jsonl", logits=str(tmp_path / "nowhere.npz"))
    capsys.readouterr()


def test_half_precision_leaves_the_layout():
    """bfloat16 logits are other logits: what they draw, the recording does not say."""
    trace = load_trace(recording("sampling"))
    setup = prepare(recording("sampling"), trace, dtype="bfloat16")
    assert not setup.judge_tokens
    assert any("layout alone" in note for note in setup.notes)


def test_other_logits_give_other_tokens(with_logits, tmp_path):
    (tmp_path / "drawn.jsonl").write_bytes(with_logits.read_bytes())
    stored = dict(np.load(with_logits.parent / "drawn_logits.npz"))
    stored["logits_5"] = stored["logits_5"][:, ::-1]
    np.savez(tmp_path / "drawn_logits.npz", **stored)
    report = replay_recording(tmp_path / "drawn.jsonl")
    assert report.verdict == "DIVERGE"
    assert report.tokens["different"] > 0
    assert report.first_divergence.step == 5


# -- what a runner gets to see --------------------------------------------------------------------------------


class Spy:
    """The reference, with every call noted down: name, positional and keyword arguments, as they were given."""

    latest: Spy

    def __init__(self, config):
        self.calls, self.frames = [], []
        self._runner = load_factory("cpu")(config)
        Spy.latest = self

    def __getattr__(self, name):
        method = getattr(self._runner, name)

        def noted(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            # At the time of the call: later the frames hold what the runner itself gave back.
            self.frames += [(name, f, k, type(v), leads_to_a_record(v)) for f, k, v in frames_above()]
            return method(*args, **kwargs)

        return noted


def frames_above():
    """What the functions that called the runner hold: every local of every frame down to the thread's first."""
    frame = sys._getframe(2)
    while frame is not None:
        yield from ((frame.f_code.co_name, k, v) for k, v in frame.f_locals.items())
        frame = frame.f_back


class SpyWithoutGraphs(Spy):
    """Has what `PROTOCOL_METHODS` asks for."""

    def __getattr__(self, name):
        if name == "capture_graphs":
            raise AttributeError(name)
        return super().__getattr__(name)


class SpyWithGraphs(Spy):
    def describe(self):
        info = self._runner.describe()
        return dataclasses.replace(info, capabilities=info.capabilities | {Capability.CUDA_GRAPHS})


@pytest.mark.parametrize(("spy", "captured"), [("Spy", 0), ("SpyWithoutGraphs", 0), ("SpyWithGraphs", 1)])
def test_graphs_are_captured_where_they_are_offered(spy, captured):
    assert replay_recording(recording("mixed"), steps=3, runner=f"{__name__}:{spy}").verdict == "AGREE"
    assert [name for name, *_ in Spy.latest.calls].count("capture_graphs") == captured


def leads_to_a_record(value, depth=4):
    """Whether a StepRecord can be reached from `value` through containers and attributes, the runner left out."""
    if isinstance(value, (StepRecord, Trace)):
        return True
    if depth == 0 or isinstance(value, (type, ModuleType, str, np.ndarray, Spy)):
        return False
    inner = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, (list, tuple)) else []
    inner += [getattr(value, s, None) for s in getattr(type(value), "__slots__", ())]
    inner += list(getattr(value, "__dict__", {}).values())
    return any(leads_to_a_record(x, depth - 1) for x in inner)


def test_no_caller_of_the_runner_holds_the_record():
    replay_recording(recording("piecewise"), steps=5, runner=f"{__name__}:Spy")
    names = {name for name, *_ in Spy.latest.frames}
    assert {"execute_model", "sample_tokens", "last_step", "load_model"} <= names
    assert ReplayStep in {kind for *_, kind, _ in Spy.latest.frames}
    found = [(name, f, k) for name, f, k, _, leads in Spy.latest.frames if leads]
    assert found == []


def objects_in(value, seen):
    """Every object that can be reached from `value`; a type that is not foreseen fails the test."""
    if id(value) in seen or value is None or isinstance(value, (int, float, str, bool, CUDAGraphMode)):
        return
    seen[id(value)] = value
    if isinstance(value, np.ndarray):
        assert value.dtype != object
        objects_in(value.base, seen)
    elif isinstance(value, dict):
        objects_in([*value.keys(), *value.values()], seen)
    elif isinstance(value, (list, tuple, frozenset)):
        for item in value:
            objects_in(item, seen)
    else:
        allowed = (SchedulerOutput, NewRequestData, CachedRequestData, SamplingParams, BatchDescriptor, ForcedStep)
        assert isinstance(value, allowed), type(value)
        for f in dataclasses.fields(value):
            objects_in(getattr(value, f.name), seen)


@pytest.mark.parametrize("name", ["piecewise", "eagle"])
def test_a_runner_gets_plan_shape_and_outcome_and_nothing_that_leads_to_the_record(name):
    trace = load_trace(recording(name))
    replay_recording(recording(name), trace=trace, steps=12, runner=f"{__name__}:Spy")
    steps = [c for c in Spy.latest.calls if c[0] in ("execute_model", "sample_tokens")]
    others = {c[0] for c in Spy.latest.calls} - {"execute_model", "sample_tokens"}
    assert len(steps) == 24
    assert others == {"describe", "load_model", "get_kv_cache_specs", "initialize_kv_cache", "last_step", "shutdown"}
    arrays = [
        a
        for record in trace.steps
        for f in dataclasses.fields(record)
        for a in (getattr(record, f.name), *(row for g in record.block_tables for row in g))
        if isinstance(a, np.ndarray)
    ]
    records: dict[int, object] = {}
    for record in trace.steps:
        objects_in(record.plan, records)
    for _, args, kwargs in steps:
        assert set(kwargs) <= {"descriptor", "forced"}
        seen: dict[int, object] = {}
        objects_in([args, kwargs], seen)
        for value in seen.values():
            assert not isinstance(value, StepRecord)
            if isinstance(value, np.ndarray):
                assert not any(np.shares_memory(value, a) for a in arrays)
            elif isinstance(value, (list, dict)) and value:
                assert id(value) not in records


@pytest.mark.parametrize("name", ["piecewise", "eagle"])
def test_the_recorded_batch_changes_nothing_that_a_runner_is_told(name):
    trace = load_trace(recording(name))

    def told(t):
        report = replay_recording(recording(name), trace=t, steps=15, runner=f"{__name__}:Spy")
        calls = [c for c in Spy.latest.calls if c[0] in ("execute_model", "sample_tokens", "initialize_kv_cache")]
        return report.verdict, repr(calls)

    built = ("idx_mapping", "query_start_loc", "seq_lens", "input_ids", "positions", "logits_indices",
             "cu_num_logits", "expanded_idx_mapping", "expanded_local_pos", "slot_mappings",
             "num_rejected")  # fmt: skip
    other = tuple(
        dataclasses.replace(
            record,
            **{f: np.ones_like(getattr(record, f)) for f in built if getattr(record, f) is not None},
            block_tables=tuple(tuple(np.ones_like(row) for row in g) for g in record.block_tables),
        )
        for record in trace.steps
    )
    right, wrong = told(trace), told(dataclasses.replace(trace, steps=other))
    assert (right[0], wrong[0]) == ("AGREE", "DIVERGE")
    assert right[1] == wrong[1]


def test_tokens_that_were_never_drawn_do_not_reach_the_runner():
    trace = load_trace(recording("eagle"))
    for record, drafts in zip(trace.steps, drafts_to_hold(trace.steps), strict=True):
        forced = ReplayStep.from_record(record, 3, drafts).forced
        for i in range(record.num_reqs):
            n = int(record.num_sampled[i])
            assert forced.token_ids[i, :n].tolist() == record.token_ids[i, :n].tolist()
            assert not forced.token_ids[i, n:].any()


# -- files, options, output -----------------------------------------------------------------------------------


def without(path: Path, *keys) -> str:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    at = lines[5]
    for key in keys[:-1]:
        at = at[key]
    del at[keys[-1]]
    return "\n".join(json.dumps(line) for line in lines)


BROKEN = {
    "missing field": lambda p: without(p, "batch", "seq_lens"),
    "missing plan field": lambda p: without(p, "plan", "finished"),
    "missing outcome": lambda p: without(p, "sampled"),
    "broken line": lambda p: p.read_text().replace('{"step": 7,', '{"step" 7,', 1),
    "cut in a line": lambda p: p.read_text()[:5000],
    "cut after a line": lambda p: "\n".join(p.read_text().splitlines()[:20]),
    "empty": lambda p: "",
    "not a recording": lambda p: '{"hello": 1}\n',
    "wrong format": lambda p: p.read_text().replace('"recording_format": 1', '"recording_format": 2', 1),
    "unknown version": lambda p: p.read_text().replace('"vllm 0.26.0"', '"vllm 0.29.0"', 1),
    "no rows": lambda p: p.read_text().replace('"free_rows"', '"rows"', 1),
    "no batch": lambda p: "\n".join(p.read_text().splitlines()[i] for i in (0, -2, -1)),
    "emptied field": lambda p: p.read_text().replace('"idx_mapping": [4]', '"idx_mapping": []', 1),
    "a step is missing": lambda p: "\n".join(x for i, x in enumerate(p.read_text().splitlines()) if i != 9),
    "last steps are missing": lambda p: "\n".join(
        x for i, x in enumerate(p.read_text().splitlines()) if i not in (94, 95, 96)
    ),
    "goes on": lambda p: p.read_text() + p.read_text(),
    "null in meta": lambda p: p.read_text().replace('"block_size": 16', '"block_size": null', 1),
    "outcome of another batch": lambda p: p.read_text().replace('"num_sampled": [1]', '"num_sampled": [1, 1]', 1),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_are_refused(kind, tmp_path, capsys):
    path = tmp_path / "mixed.jsonl"
    path.write_text(BROKEN[kind](recording("mixed")))
    with pytest.raises(TraceError):
        replay_recording(path)
    assert main(["replay", "--json", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: MR-ERR-008")


def test_a_missing_file_is_refused(tmp_path):
    assert main(["replay", str(tmp_path / "none.jsonl")]) == 2


class WithoutPenalties(Spy):
    """Offers less than the recording needs."""

    def describe(self):
        info = self._runner.describe()
        return dataclasses.replace(info, capabilities=info.capabilities - {Capability.PENALTIES})


def test_what_is_not_offered_is_refused_before_the_first_step():
    with pytest.raises(CapabilityError, match="penalties"):
        replay_recording(recording("sampling"), runner=f"{__name__}:WithoutPenalties")
    assert not any(name == "execute_model" for name, _, _ in Spy.latest.calls)
    assert main(["replay", "--runner", f"{__name__}:WithoutPenalties", str(recording("sampling"))]) == 2


def test_options_that_would_be_ignored_are_refused(with_logits):
    with pytest.raises(CapabilityError, match="--model"):
        replay_recording(recording("eagle"), model="somewhere")
    with pytest.raises(CapabilityError, match="--logits"):
        replay_recording(recording("hybrid"), logits="model")
    with pytest.raises(ConfigError, match="--model"):
        replay_recording(with_logits, logits="recorded", model="somewhere")
    with pytest.raises(TraceError, match="logits"):
        replay_recording(recording("mixed"), logits="recorded")
    with pytest.raises(UnknownNameError, match="model"):
        replay_recording(recording("mixed"), logits="modl")
    assert main(["replay", "--steps", "0", str(recording("mixed"))]) == 2


def test_a_model_that_is_not_there_is_refused(tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_text(recording("mixed").read_text().replace('"model": "llama-tiny"', '"model": "nowhere"', 1))
    with pytest.raises(CheckpointError, match="--model"):
        replay_recording(path)
    with pytest.raises(CheckpointError):
        replay_recording(recording("mixed"), model=str(tmp_path / "none"))


def test_json_output(tmp_path, capsys):
    wrong = rewrite(tmp_path, "piecewise", 8, cell(*CELLS["seq_lens"]))
    assert main(["replay", "--json", "--steps", "8", str(recording("graph")), str(wrong)]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["recordings"]
    agreed, diverged = answer["recordings"]
    for one in (agreed, diverged):
        assert set(one) == {
            "recording", "runner", "model", "layout", "selection", "steps", "fields", "tokens", "first_divergence",
            "verdict", "launches", "notes",
        }  # fmt: skip
        assert all(set(counts) == {"equal", "different"} for counts in one["fields"].values())
        assert set(one["tokens"]) == {"equal", "near_tie", "different"}
        assert (one["runner"], one["layout"], one["steps"]) == ("cpu", "slots", 8)
        assert one["selection"]["reason"] == "configuration"
    assert (agreed["recording"], agreed["verdict"], agreed["first_divergence"]) == ("graph", "AGREE", None)
    assert (diverged["recording"], diverged["verdict"]) == ("piecewise", "DIVERGE")
    assert diverged["fields"]["seq_lens"]["different"] == 1
    first = diverged["first_divergence"]
    assert (first["step"], first["field"], first["index"]) == (6, "seq_lens", [2])
    assert first["expected"] == first["got"] + 1


def test_text_output_explains_the_first_divergence(tmp_path, capsys):
    wrong = rewrite(tmp_path, "piecewise", 8, cell(*CELLS["positions"]))
    assert main(["replay", str(wrong)]) == 1
    out = capsys.readouterr().out
    assert "first divergence: step 6: positions[" in out
    assert "request 'r00" in out
    assert "position " in out
    assert out.rstrip().endswith("verdict: DIVERGE (1 recording)")
    assert main(["replay", "--steps", "4", str(recording("prefix"))]) == 0
    assert capsys.readouterr().out.rstrip().endswith("verdict: AGREE (1 recording)")


# -- the GPU runner -------------------------------------------------------------------------------------------

HAS_TRITON = all(importlib.util.find_spec(m) for m in ("torch", "triton"))
# All of a recording on a GPU, 25 steps in the interpreter.
SAMPLING_STEPS = 25


class Kept:
    """The gpu runner, kept within reach after the replay; kernels are counted by process, so what came before too."""

    latest: object
    launched_before: dict[str, int]

    def __new__(cls, config):
        cls.latest = load_factory("gpu")(config)
        cls.launched_before = dict(cls.latest.kernel_launches())
        return cls.latest


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="needs torch and triton")
@pytest.mark.parametrize("name", ["mixed", "graph", "hybrid"])
def test_the_gpu_runner_agrees_with_vllm(name):
    report = replay_recording(recording(name), steps=30, runner=f"{__name__}:Kept")
    assert report.verdict == "AGREE", str(report.first_divergence)
    assert report.steps == 30
    assert all(equal > 0 and different == 0 for equal, different in report.fields.values())
    before = Kept.launched_before
    launched = {k: n - before.get(k, 0) for k, n in Kept.latest.kernel_launches().items()}
    # Kernels did the work: those that build the inputs once a step at least, and attention in every layer.
    assert sum(n >= 30 for n in launched.values()) >= 5
    attention = "witness_attention" if name == "hybrid" else "paged_attention"
    assert sum(n for k, n in launched.items() if attention in k) >= 30


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="needs torch and triton")
def test_every_sampling_parameter_agrees_with_vllm_in_the_interpreter():
    report = replay_recording(recording("sampling"), steps=SAMPLING_STEPS, runner=f"{__name__}:Kept")
    assert report.verdict == "AGREE", str(report.first_divergence)
    assert report.tokens == {"equal": 121, "near_tie": 0, "different": 0}
    assert all(report.fields[name][0] > 0 and report.fields[name][1] == 0 for name in LOGPROBS)


@pytest.mark.gpu
@pytest.mark.parametrize("logits", ["recorded", "model"])
def test_every_sampling_parameter_agrees_with_vllm_on_a_gpu(logits):
    report = replay_recording(recording("sampling"), logits=logits, runner=f"{__name__}:Kept")
    assert Kept.latest.describe().device.startswith("cuda")
    assert report.verdict == "AGREE", str(report.first_divergence)
    assert report.tokens["near_tie"] <= 1
    assert sum(report.tokens.values()) == 386
    assert report.fields["logprobs"] == [535, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*WITH_TOKENS, *INTEGERS_ALONE])
def test_the_gpu_runner_agrees_with_vllm_on_a_gpu(name):
    report = replay_recording(recording(name), runner=f"{__name__}:Kept")
    assert Kept.latest.describe().device.startswith("cuda")
    assert report.verdict == "AGREE", str(report.first_divergence)
    assert all(equal > 0 and different == 0 for equal, different in report.fields.values())
    assert report.tokens["near_tie"] <= 3


# -- runners with one fault each ------------------------------------------------------------------------------


def forgetful(config):
    """Gives no expanded_local_pos."""
    runner = load_factory("cpu")(config)
    last_step = runner.last_step
    runner.last_step = lambda: dataclasses.replace(last_step(), expanded_local_pos=None)
    return runner


def _fails_at_the_fourth_step(config, error):
    runner = load_factory("cpu")(config)
    execute, calls = runner.execute_model, []

    def execute_model(plan, **kwargs):
        calls.append(plan)
        if len(calls) == 4:
            raise error
        return execute(plan, **kwargs)

    runner.execute_model = execute_model
    return runner


def broken(config):
    return _fails_at_the_fourth_step(config, IndexError("index 9 is out of bounds"))


def refusing(config):
    from runner_api import PlanError

    return _fails_at_the_fourth_step(config, PlanError("no", field="num_scheduled_tokens", req_id="r001"))
