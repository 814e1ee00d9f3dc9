"""`modelrunner check` and `modelrunner clauses`: exit codes, text, JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import conformance
from conformance.case import CaseRun
from conformance.check import _same_cell, lockstep_on_model
from conformance.clauses import load_clauses
from conformance.corpus import load_corpus, save_case
from conformance.evaluate import evaluate
from conformance.finding import Budget, find
from conformance.smoke import smoke
from cpu_reference.async_output import AsyncOutput
from cpu_reference.runner import CAPABILITIES, CpuModelRunner
from engine_core.cli import main
from runner_api import SPEC_VERSION, ModelRunnerOutput, RunnerConfig, RunnerInfo, StageAdapter, load_stages
from runner_api.checkpoint import expected_shapes, model_config_from_hf

HERE = __name__
OURS = Path(conformance.__file__).parent / "data" / "corpus"


class Dumb(CpuModelRunner):
    """Never says which tokens it drew."""

    def sample_tokens(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        super().sample_tokens(*args, **kwargs)
        return AsyncOutput((), super().last_step().token_ids[:0], super().last_step().num_sampled[:0])


class WrongSeed(CpuModelRunner):
    """Adds requests with a seed that is off by one."""

    def execute_model(self, plan, **kwargs):  # type: ignore[no-untyped-def]
        for new in plan.scheduled_new_reqs:
            new.seed = new.seed - 1 if new.seed > 0 else new.seed + 1
        return super().execute_model(plan, **kwargs)


STAGES = RunnerInfo("s", "s.S", "1", "cpu", "float32", "slots", "murmur3", frozenset())
stages_alone = StageAdapter(STAGES, lambda: load_stages("cpu"))


def no_runner(config):  # type: ignore[no-untyped-def]
    return 5


def raising(config):  # type: ignore[no-untyped-def]
    raise ValueError("no driver")


def test_the_reference_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "cpu", "--steps", "60"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("runner=cpu class=cpu_reference.runner.CpuModelRunner")
    assert f"spec={SPEC_VERSION} seed=0 rounds=1 against=cpu" in out
    assert "smoke: ok" in out
    assert "lockstep on witness: AGREE steps=60" in out
    apply = [c for c in load_clauses().values() if not c.missing(CAPABILITIES)]
    must = sum(c.level == "MUST" for c in apply)
    assert must > 200
    assert f"verdict: AGREE MUST {must}/{must}" in out.splitlines()[-1]


def test_the_dense_layout_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    """Smoke, laws, probes and lockstep, with dense rows on both sides; what is not asked is said."""
    assert main(["check", "cpu", "--layout", "dense", "--steps", "20", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["layout"] == "dense"
    assert "layout=dense" in report["runner"]
    assert report["verdict"] == "AGREE"
    assert report["clauses"]["MR-STATE-001"]["reason"] == "not offered: slots_layout"
    asked = [c for c in load_clauses() if c.startswith("MR-DENSE-")]
    assert len(asked) >= 20
    assert {report["clauses"][c]["outcome"] for c in asked} == {"pass"}
    assert all(load_clauses()[c].level == "MUST" and load_clauses()[c].layout == "dense" for c in asked)
    assert report["counts"]["condense_move"] > 20
    assert report["counts"]["swap"] > 20


def test_the_layout_is_named_and_must_be_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "cpu", "--layout", "slots", "--steps", "5", "--lockstep-only"]) == 0
    assert "layout=slots spec=" in capsys.readouterr().out
    assert main(["check", "cpu_reference.runner:CpuModelRunner", "--layout", "dense"]) == 2
    assert "only one layout" in capsys.readouterr().err


def test_json_holds_every_clause(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "cpu", "--steps", "20", "--seed", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["seed"] == 3
    assert report["verdict"] == "AGREE"
    assert set(report["clauses"]) == set(load_clauses())
    assert {entry["outcome"] for entry in report["clauses"].values()} <= {"pass", "skip"}
    assert report["lockstep"][0]["steps"] == 20
    entry = report["lockstep"][0]
    assert (entry["near_ties"], entry["near_tie_rate"]) == (0, 0.0)
    assert entry["near_tie_cap"] == pytest.approx(3 + 10 * entry["expected_near_ties"])
    assert 0 < entry["expected_near_ties"] < 0.01
    assert report["errors"] == []


def test_more_rounds_are_more_plans(capsys: pytest.CaptureFixture[str]) -> None:
    def evaluations(rounds: int) -> int:
        assert main(["check", "cpu", "--clause", "SLOT-001", "--seed", "5", "--rounds", str(rounds), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["rounds"] == rounds
        number: int = report["clauses"]["MR-SLOT-001"]["evaluations"]
        return number

    assert evaluations(2) > 1.8 * evaluations(1)


def test_lockstep_alone_asks_no_clause(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "cpu", "--steps", "30", "--lockstep-only"]) == 0
    out = capsys.readouterr().out
    assert "lockstep on witness: AGREE steps=30" in out
    assert "MUST" not in out
    assert out.splitlines()[-1] == "verdict: AGREE (lockstep alone: no clause was asked)"


class Unsteady(CpuModelRunner):
    """Rounds more coarsely than anything explains, but not by much: each score is off by up to 2^-13."""

    def initialize_kv_cache(self, cache):  # type: ignore[no-untyped-def]
        super().initialize_kv_cache(cache)
        exact, random = self.sampler.sample, np.random.default_rng(0)

        def sample(logits, rows, **kwargs):  # type: ignore[no-untyped-def]
            return exact(logits + random.choice([-1, 1], logits.shape).astype(np.float32) * 2.0**-13, rows, **kwargs)

        self.sampler.sample = sample


def test_rounding_that_is_too_coarse_diverges(capsys: pytest.CaptureFixture[str]) -> None:
    """It draws another token about once in a few thousand times, and has no certificate for the first of them."""
    assert main(["check", f"{HERE}:Unsteady", "--steps", "1500", "--lockstep-only", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["clauses"] == {}
    first = report["lockstep"][0]["first"]
    assert re.match(r"step \d+: token_ids.*: expected \d+, got \d+ \(token \d+, winner \d+: ", first)


def test_a_failing_smoke_test_stops_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{HERE}:Dumb"]) == 1
    out = capsys.readouterr().out
    assert "smoke: FAILED in the step: sample and take the output" in out
    assert "adapter" in out
    assert "MR-" not in out
    assert out.rstrip().endswith("verdict: DIVERGE")


def test_a_fault_is_named_with_its_law(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{HERE}:WrongSeed", "--steps", "10", "--json", "--no-find"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["clauses"]["MR-SAMPLE-007"]["outcome"] == "fail"
    assert report["clauses"]["MR-SAMPLE-007"]["first"].startswith("MR-SAMPLE-007 seeds[")
    assert report["verdict"] == "DIVERGE"
    assert report["findings"] == []
    assert report["outcomes"]["fail"] >= 1
    assert re.match(r"\d+ MUST clauses? failed", report["faults"][0])


def test_selected_clauses_alone_are_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "cpu", "--clause", "PAD-004", "--clause", "mr-stage", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["selection"] == list(report["clauses"])
    assert set(report["areas"]) == {"PAD", "STAGE"}
    assert {entry["outcome"] for entry in report["clauses"].values()} == {"pass"}
    assert report["lockstep"] == []
    assert report["lockstep_left_out"] == "clauses are selected"


def test_a_failure_is_shrunk_kept_and_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner, folder = f"{HERE}:WrongSeed", str(tmp_path / "corpus")
    assert main(["check", runner, "--clause", "SAMPLE-007", "--save-corpus", folder]) == 1
    out = capsys.readouterr().out
    assert "MR-SAMPLE-007 A request samples with the seed it was added with\n\nrecord.seeds[0]" in out
    assert f'"{runner}"' in out.split("load_runner(")[1]
    assert re.search(r"corpus: 1 failing and \d+ rare cases saved in", out)
    names = [path.name for path in Path(folder).iterdir()]
    assert all(n.startswith(("slots-", "MR-SAMPLE-007-")) and "_" not in n for n in names), names
    assert main(["check", "cpu", "--clause", "STAGE", "--corpus", folder, "--json"]) == 0
    cases = json.loads(capsys.readouterr().out)["corpus"]
    assert len(cases) > 5
    assert {case["outcome"] for case in cases} == {"agree"}
    assert main(["check", runner, "--clause", "STAGE", "--corpus", folder]) == 1
    out = capsys.readouterr().out
    assert re.search(r"diverge: MR-SAMPLE-007-\w+\n    step 0: MR-SAMPLE-007 seeds\[0\]", out)
    assert "not a pass: case MR-SAMPLE-007-" in out


class OtherSeeds(CpuModelRunner):
    """Tells of seeds that are off by one."""

    def last_step(self):  # type: ignore[no-untyped-def]
        record = super().last_step()
        return replace(record, seeds=record.seeds + 1)


class OtherLengths(OtherSeeds):
    """Tells of one key too many besides."""

    def last_step(self):  # type: ignore[no-untyped-def]
        record = super().last_step()
        return replace(record, seq_lens=record.seq_lens + 1)


def test_a_case_is_excused_by_what_fails_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not by what failed when it was saved: a rare shape may show the expected failure, and a failing case another."""
    expected = tmp_path / "expected.toml"
    expected.write_text(
        '[[expect]]\nclause = "MR-SAMPLE-007"\noutcome = "fail"\nreason = "known"\nissue = "https://example.org/1"\n'
    )
    saved = next(case for case in load_corpus(OURS) if case.name.startswith("slots-abort-running"))
    save_case(tmp_path / "rare", saved.case, None, "x")
    save_case(tmp_path / "failing", saved.case, "MR-SAMPLE-007", "x")
    options = ["--clause", "SAMPLE-007", "--clause", "SLOT-001", "--expectations", str(expected), "--no-find", "--json"]
    for runner, folder, rc in (("OtherSeeds", "rare", 0), ("OtherSeeds", "failing", 0), ("OtherLengths", "failing", 1)):
        command = ["check", f"{HERE}:{runner}", *options, "--corpus", str(tmp_path / folder)]
        assert main(command) == rc, (runner, folder)
        report = json.loads(capsys.readouterr().out)
        assert report["clauses"]["MR-SAMPLE-007"]["outcome"] == "xfail"
        assert [case["outcome"] for case in report["corpus"]] == ["diverge"]
        assert report["faults"] == [f"case {case['case']} of the corpus diverges" for case in report["corpus"]][:rc]


class Lists(CpuModelRunner):
    """Hands out lists where the reference has tuples; wrong: answers a step without tokens for somebody."""

    wrong = False

    def execute_model(self, plan, **kwargs):  # type: ignore[no-untyped-def]
        done = super().execute_model(plan, **kwargs)
        if done is None:
            return None
        return ModelRunnerOutput(["a"], [[]]) if self.wrong else ModelRunnerOutput([], [])


def test_an_output_without_requests_may_be_of_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    assert smoke(Lists) is None
    assert main(["check", f"{HERE}:Lists", "--clause", "OUT-003"]) == 0
    monkeypatch.setattr(Lists, "wrong", True)
    assert "expected an output without requests" in (smoke(Lists) or "")
    assert evaluate(Lists, seeds=(0,), steps=20, selected=["MR-OUT-003"]).failed == ["MR-OUT-003"]


def test_failing_plans_are_kept_where_they_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "corpus"
    options = ["--clause", "SAMPLE-007", "--no-find", "--save-corpus", str(folder), "--json"]
    assert main(["check", f"{HERE}:WrongSeed", *options]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["findings"] == []
    assert report["notes"][-1].startswith("corpus: 1 failing and ")
    assert list(folder.glob("MR-SAMPLE-007-*"))


class Unblanked(CpuModelRunner):
    """Takes no notice of the blocks that are to be blanked."""

    def execute_model(self, plan, **kwargs):  # type: ignore[no-untyped-def]
        return super().execute_model(replace(plan, new_block_ids_to_zero=[]), **kwargs)


def test_what_only_a_probe_sees_is_told_by_its_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", f"{HERE}:Unblanked", "--clause", "KV-008", "--json", "--save-corpus", str(tmp_path)]
    assert main(command) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["clauses"]["MR-KV-008"]["first"].startswith("MR-KV-008 kv[0, 0]")
    (finding,) = report["findings"]
    assert finding["clause"] == "MR-KV-008"
    assert "in plans of the probe listed_blocks_read_as_zero" in finding["text"]
    assert "record.kv['b'][0, 0]" in finding["text"]
    assert "not shrunk" not in str(report["notes"])
    assert "corpus: 1 failing and" in report["notes"][-1]
    assert main(["check", f"{HERE}:Unblanked", "--clause", "KV-008", "--json", "--corpus", str(tmp_path)]) == 1
    again = json.loads(capsys.readouterr().out)
    assert [c["clause"] for c in again["corpus"] if c["outcome"] == "diverge"] == ["MR-KV-008"]


def test_what_no_law_of_whole_steps_sees_is_no_case_for_a_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conformance.check, "run_case", lambda *_: CaseRun(steps=1))
    command = ["check", f"{HERE}:Unblanked", "--clause", "KV-008", "--json", "--save-corpus", str(tmp_path)]
    assert main(command) == 1
    report = json.loads(capsys.readouterr().out)
    assert "MR-KV-008 not saved" in report["notes"][-1]
    assert not list(tmp_path.glob("MR-KV-008*"))


class SameDigest(CpuModelRunner):
    """Its fingerprint never changes."""

    def state_digest(self):  # type: ignore[no-untyped-def]
        return {"all": "0"}


def test_what_no_record_shows_is_said_to_be_not_shrunk(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{HERE}:SameDigest", "--clause", "STATE-010", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["notes"] == ["MR-STATE-010: shown by probe unknown_ids_change_nothing on its own plans, not shrunk"]
    assert report["findings"] == []


class WrongLater(CpuModelRunner):
    """Right for as many steps as a generated world has."""

    steps = 0

    def execute_model(self, plan, **kwargs):  # type: ignore[no-untyped-def]
        self.steps += 1
        if self.steps > 20:
            for new in plan.scheduled_new_reqs:
                new.seed = new.seed - 1 if new.seed > 0 else new.seed + 1
        return super().execute_model(plan, **kwargs)


def test_what_only_lockstep_sees_is_said_to_be_not_shrunk(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{HERE}:WrongLater", "--lockstep-only", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["faults"] == ["lockstep on witness diverges"]
    assert report["findings"] == []
    assert report["notes"] == ["lockstep on witness: no world shows it by itself, not shrunk"]


class Raises(CpuModelRunner):
    """Stops over the first request that is preempted."""

    def execute_model(self, plan, **kwargs):  # type: ignore[no-untyped-def]
        if plan.preempted_req_ids:
            raise ValueError("no way back")
        return super().execute_model(plan, **kwargs)


def test_one_exception_is_told_once() -> None:
    told = [find(f"{HERE}:Raises", clauses=c, layout="slots", budget=Budget(attempts=n)) for c, n in
            ((None, 0), (["MR-KV-005"], 60))]  # fmt: skip
    assert [t is not None and t.error for t in told] == ["ValueError(no way back)"] * 2
    assert _same_cell(*told)  # type: ignore[arg-type]
    assert not _same_cell(told[0], replace(told[1], error="ValueError(another)"))  # type: ignore[arg-type, type-var]


def test_two_expectations_that_both_apply_are_misuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "expect.toml"
    entry = '[[expect]]\nclause = "MR-SLOT-001"\noutcome = "fail"\nreason = "known"\nissue = "#1"\n'
    path.write_text(entry + 'when = { device = "c*" }\n' + entry + 'when = { runner = "cpu" }\n')
    assert main(["check", "cpu", "--clause", "SLOT", "--expectations", str(path)]) == 2
    assert "two entries for one clause apply to this run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["nobody"],
        ["cpu", "--steps", "0"],
        ["cpu", "--rounds", "0"],
        ["cpu", "--against", "cpq"],
        ["cpu", "--seed", "-1"],
        ["cpu", "--dtype", "float64"],
        ["cpu", "--max-near-ties", "-0.1"],
        ["cpu", "--max-near-ties", "1.5"],
        ["cpu", "--max-near-ties", "nan"],
        ["cpu", "--lockstep-only", "--clause", "SLOT"],
        ["cpu", "--lockstep-only", "--expectations", "x.toml"],
        ["cpu", "--clause", "SLOT", "--model", "x"],
        ["cpu", "--expectations", "no/such.toml"],
        ["cpu", "--clause", "STAGE", "--corpus", "no/such/folder"],
        [f"{HERE}:stages_alone", "--save-corpus", "folder"],
        [f"{HERE}:no_runner"],
        [f"{HERE}:raising"],
    ],
)
def test_misuse_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments]) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--runner", "nope"], ["--only", "nope"], ["--jobs", "-1"]])
def test_misuse_of_mutants_reads_like_any_other(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutants", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: MR-ERR-00")


def test_clauses_are_listed_by_area(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clauses", "slot"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + sum(c.area == "SLOT" for c in load_clauses().values())


def test_an_unknown_area_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clauses", "MR-SLOT-909"]) == 2
    assert "Did you mean" in capsys.readouterr().err


HF = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 50, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small model with random weights."""
    rng = np.random.default_rng(1)
    shapes = expected_shapes(model_config_from_hf(HF))
    save_file({n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(HF))
    return tmp_path


class Coarse(CpuModelRunner):
    """Computes in float64 what the oracle computes in float32."""

    def __init__(self, config: RunnerConfig) -> None:
        super().__init__(replace(config, dtype="float64"))


def test_lockstep_on_a_checkpoint(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "cpu", "--steps", "15", "--model", str(checkpoint), "--json"]) == 0
    on_model = json.loads(capsys.readouterr().out)["lockstep"][1]
    assert on_model["model"] == str(checkpoint)
    assert on_model["verdict"] == "AGREE"
    assert on_model["tokens"] > 0


def test_lockstep_on_a_checkpoint_allows_rounding_and_measures_it(checkpoint: Path) -> None:
    result = lockstep_on_model(Coarse, CpuModelRunner, str(checkpoint), steps=15, seed=0)
    assert result.verdict == "AGREE"
    assert 0.0 < result.largest_logit_error < 1e-4
