"""Cases as files: saved once, loaded whole, run on any runner; the ones that come with the project agree on the
reference and each of them is of some use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import conformance
from conformance.case import Case, CaseStep, run_case
from conformance.corpus import (
    AGREE,
    DIVERGE,
    ERROR,
    SKIP,
    load_corpus,
    rare_cases,
    run_corpus,
    save_case,
)
from conformance.layouts import in_layout
from conformance.mutation import mutated
from conformance.probes import new, plan_of
from conformance.shapes import SHAPES
from cpu_reference.runner import CpuModelRunner
from engine_core.cli import main
from runner_api import (
    Capability,
    ConfigError,
    RunnerConfig,
    RunnerInfo,
    SamplingParams,
    UnknownNameError,
    WitnessConfig,
)
from runner_api.loader import call_factory

OURS = Path(conformance.__file__).parent / "data" / "corpus"
CONFIG = RunnerConfig(max_num_reqs=2, max_num_batched_tokens=8, max_model_len=16)
CASE = Case(CONFIG, WitnessConfig(), 4, (CaseStep(plan_of(new("a", [1, 2, 3], [1]))),))


def test_our_corpus_agrees_on_the_reference() -> None:
    results = run_corpus(OURS, "cpu")
    assert [(r.name, r.first) for r in results if r.outcome != AGREE] == []
    assert len(results) >= 12
    assert {r.name.partition("-")[0] for r in results} == {"slots", "dense"}


def test_the_command_runs_cases_of_either_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """Each case in its own layout, whichever one the runner has by itself; with a layout given, those of it alone."""
    command = ["check", "cpu", "--clause", "SLOT-001", "--corpus", str(OURS), "--json"]
    assert main(command) == 0
    cases = json.loads(capsys.readouterr().out)["corpus"]
    assert len(cases) >= 12
    assert {c["outcome"] for c in cases} == {AGREE}
    assert main([*command, "--layout", "dense"]) == 0
    outcomes = {(c["case"].partition("-")[0], c["outcome"]) for c in json.loads(capsys.readouterr().out)["corpus"]}
    assert outcomes == {("dense", AGREE), ("slots", SKIP)}


def test_a_layout_takes_the_place_of_another() -> None:
    for outer, inner in (("slots", "dense"), ("dense", "slots")):
        twice = in_layout(in_layout("cpu", inner), outer)
        assert call_factory(twice, CONFIG).describe().layout == outer
        assert list(twice.LAYOUTS) == [outer]


def test_a_case_that_the_oracle_refuses_is_an_error_of_the_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = plan_of(new("a", [1, 2, 3], [1]), total_num_scheduled_tokens=4)
    save_case(tmp_path, replace(CASE, steps=(CaseStep(wrong),)), "MR-SLOT-001", "x")
    save_case(tmp_path, replace(CASE, steps=(CaseStep(plan_of(cached={"b": (3, None)})),)), None, "x", name="unknown")
    save_case(tmp_path, CASE, None, "x")
    refused, right, unknown = run_corpus(tmp_path, "cpu")
    assert (refused.outcome, right.outcome, unknown.outcome) == (ERROR, AGREE, ERROR)
    assert not refused.agrees
    assert "the oracle refuses the case" in str(refused.first)
    assert "never added" in str(unknown.first)
    assert main(["check", "cpu", "--clause", "SLOT-001", "--corpus", str(tmp_path), "--no-find"]) == 1
    out = capsys.readouterr().out
    assert "corpus: 3 cases, 1 agree, 0 diverge, 0 skip, 2 error" in out
    assert f"not a pass: case {refused.name} of the corpus is no test: " in out


def test_every_saved_case_is_named_by_its_plans() -> None:
    for saved in load_corpus(OURS):
        assert saved.note
        assert saved.clause_id is None
        assert run_case(saved.case, "cpu").tested


@pytest.mark.parametrize(
    ("path", "old", "new_text", "shape", "clause_id"),
    [
        (
            "slot_mapping.py",
            "slot_mappings[g, num_tokens:] = PAD_SLOT_ID",
            "pass",
            "slots-pad-tokens-only",
            "MR-PAD-004",
        ),
        ("input_batch.py", "seq_lens[num_reqs:] = 0", "seq_lens[num_reqs:] = 1", "slots-pad-both", "MR-PAD-002"),
    ],
)
def test_a_fault_shows_in_the_cases_that_are_about_it(
    path: str, old: str, new_text: str, shape: str, clause_id: str
) -> None:
    with mutated("cpu", path, old, new_text) as mutant:
        results = {r.name.rpartition("-")[0]: r for r in run_corpus(OURS, mutant.factory)}
    assert (results[shape].outcome, results[shape].failed) == (DIVERGE, clause_id)
    assert not results[shape].agrees
    assert f"step 0: {clause_id}" in str(results[shape].first)
    assert results["slots-add-without-tokens"].agrees


def test_what_cannot_be_built_as_a_case_says_diverges(tmp_path: Path) -> None:
    def small(config: RunnerConfig):
        if config.max_num_batched_tokens == CONFIG.max_num_batched_tokens:
            raise SystemExit("too small")
        return call_factory("cpu", config)

    class Leaves(CpuModelRunner):
        def load_model(self, model):
            raise SystemExit("no model")

    save_case(tmp_path, CASE, None, "x")
    for runner, said in ((small, "too small"), (Leaves, "no model")):
        (result,) = run_corpus(tmp_path, runner)
        assert (result.outcome, result.failed, said in str(result.first)) == (DIVERGE, None, True)


def test_saving_and_loading(tmp_path: Path) -> None:
    path = save_case(tmp_path / "new", CASE, "MR-SLOT-001", "why")
    assert path == save_case(tmp_path / "new", CASE, "MR-SLOT-001", "why"), "the same case is one file"
    assert path.name.startswith("MR-SLOT-001-")
    other = replace(CASE, num_blocks=5)
    assert save_case(tmp_path / "new", other, None, "x").name.startswith("rare-")
    first, second = load_corpus(tmp_path / "new")
    assert (first.clause_id, first.note, first.case.text()) == ("MR-SLOT-001", "why", CASE.text())
    assert second.case.text() == other.text()


def test_what_cannot_be_saved_or_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tests nothing"):
        save_case(tmp_path, replace(CASE, steps=()), None, "x")
    with pytest.raises(UnknownNameError, match="MR-SLOT-999"):
        save_case(tmp_path, CASE, "MR-SLOT-999", "x")
    with pytest.raises(ConfigError, match="no case in this folder"):
        load_corpus(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json"):
        load_corpus(tmp_path)
    (tmp_path / "broken.json").write_text(json.dumps({"clause": None, "note": "", "case": {}}))
    with pytest.raises(ConfigError, match="schema"):
        load_corpus(tmp_path)


def plain(config: RunnerConfig):
    """The reference, offering whole steps and their records alone."""
    runner = call_factory(in_layout("cpu", "slots"), config)
    info = replace(runner.describe(), capabilities=frozenset({Capability.GENERATE, Capability.STEP_RECORD}))

    def describe() -> RunnerInfo:
        return info

    runner.describe = describe  # type: ignore[method-assign]
    return runner


def test_what_is_not_offered_is_skipped_with_the_reason(tmp_path: Path) -> None:
    asking = CaseStep(plan_of(new("a", [1], [1], sampling_params=SamplingParams(temperature=1.0))))
    save_case(tmp_path, replace(CASE, steps=(asking,)), None, "x", name="asking")
    with pytest.raises(ConfigError, match="more than the runner offers"):
        run_corpus(tmp_path, plain)
    save_case(tmp_path, CASE, None, "x", name="plain")
    asking_result, plain_result = run_corpus(tmp_path, plain)
    assert (asking_result.outcome, asking_result.first) == (SKIP, "not offered: seeded_sampling")
    assert plain_result.outcome == AGREE
    save_case(tmp_path, replace(CASE, config=replace(CONFIG, layout="dense")), None, "x", name="dense")
    assert run_corpus(tmp_path, plain)[1].first == "not offered: dense_layout"


def test_rare_shapes_are_collected_and_small() -> None:
    offered = frozenset({Capability.GENERATE, Capability.STEP_RECORD, Capability.PADDED_BATCH})
    met = ("resume_same_plan", "empty_step", "pad_both")
    asked = (*met, "masked", "verify", "behind_window")
    assert set(asked) <= set(SHAPES)
    found = rare_cases("cpu", 0, offered, shapes=asked)
    assert tuple(found) == met, "the others ask for what is not offered"
    for shape, case in found.items():
        assert case.needs() <= offered, shape
        assert run_case(case, "cpu").passed, shape
    assert len(found["pad_both"].steps) == 1
    again = rare_cases("cpu", 0, offered, shapes=["pad_both"])
    assert again["pad_both"].text() == found["pad_both"].text()
