"""The bug catalogue: the right runner passes each case, every faulty variant is caught, nothing passes by silence."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.catalogue import Scenario, catalogue, caught, parse, run, run_case, run_variants, select
from conformance.catalogue.__main__ import main
from cpu_reference.runner import CpuModelRunner
from runner_api import Capability, ConfigError, RunnerConfig, StepRecord, UnknownNameError
from runner_api.loader import load_factory

DOC = Path(__file__).parents[2] / "docs" / "write-a-scenario.md"
CASES = catalogue()
RUNNING = [case for case in CASES.values() if case.status == "runs"]
# How many cases each kind has.
KINDS = {
    "K1": 4, "K2": 5, "K3": 5, "K4": 8, "K5": 3, "K6": 3, "K7": 5, "K8": 5, "K9": 3, "K10": 5, "K11": 3, "K12": 4,
    "K13": 7, "K14": 3, "K15": 4, "K16": 6, "K17": 4, "K18": 3, "K19": 3,
}  # fmt: skip


def case_of(**changes: Any) -> str:
    """A small scenario as TOML, with lines of one's own behind its head."""
    head = {"id": '"X1"', "kind": '"K8"', "title": '"t"', "source": '["s"]', "status": '"runs"'} | changes
    return "[[case]]\n" + "".join(f"{k} = {v}\n" for k, v in head.items() if v)


REQUEST = '[[case.requests]]\nname = "A"\nprompt = [1, 2, 3]\n'
STEP = '[[case.steps]]\nrun = ["A"]\nseen.positions = [0, 1, 2]\n'
CALL = '[[case.calls]]\nstage = "s"\nargs = {}\nseen.x = [1]\n'
VARIANT = '[[case.variants]]\npath = "input_batch.py"\nold = "positions[: len(batch_idx)] = computed[batch_idx] + offset"\nnew = "positions[: len(batch_idx)] = offset + 1"\nwhy = "w"\n'  # noqa: E501


# -- the cases ----------------------------------------------------------------------------------------------------


def needs_its_runner(case: Scenario) -> None:
    if case.runner == "gpu":
        pytest.importorskip("gpu_backend.triton_support")


@pytest.mark.parametrize("case", RUNNING, ids=lambda c: c.id)
def test_the_right_runner_passes(case: Scenario) -> None:
    needs_its_runner(case)
    results = run_case(case)
    assert [r.layout for r in results] == (list(case.layouts) if case.level != "stage" else [""])
    assert [(r.outcome, r.story) for r in results] == [("pass", "")] * len(results)


@pytest.mark.parametrize("case", RUNNING, ids=lambda c: c.id)
def test_every_variant_is_caught(case: Scenario) -> None:
    needs_its_runner(case)
    results = run_variants(case)
    assert {r.variant for r in results} == set(range(len(case.variants)))
    assert [(r.layout, r.outcome, r.story) for r in results if not caught(case, r)] == []


def test_every_report_is_listed() -> None:
    assert {kind: sum(c.kind == kind for c in CASES.values()) for kind in KINDS} == KINDS
    assert len(CASES) == 83
    assert all(re.fullmatch(r"B\d\d\d?", c.id) for c in CASES.values())
    assert all(url.startswith("https://github.com/") for c in CASES.values() for url in c.source)
    assert len(RUNNING) >= 62


def test_a_crash_counts_only_where_the_report_was_one() -> None:
    for case in RUNNING:
        if any(variant.crash for variant in case.variants):
            crashed = {r.variant for r in run_variants(case) if r.outcome == "error"}
            assert crashed == {n for n, v in enumerate(case.variants) if v.crash}, f"{case.id}: an idle flag"
    (case,) = parse(case_of() + REQUEST + STEP + VARIANT.replace("offset + 1", "offset[0:0]"))
    (result,) = run_variants(case)
    assert (result.outcome, caught(case, result)) == ("error", False)


def test_a_stale_table_entry_is_seen_where_it_does_harm() -> None:
    (case,) = select(["B04"])
    by_variant = {r.variant: [d.where for d in r.differences] for r in run_variants(case)}
    assert by_variant[0] == ["step 3 refused"]  # nothing else of validation is gone
    assert "step 4 kv[E]" in by_variant[1]


class Keeper(CpuModelRunner):
    """Reads the blocks that a cached request was given from the plan's own lists, after the step."""

    def execute_model(self, plan: Any, **kwargs: Any) -> Any:
        self.given = [ids for blocks in plan.scheduled_cached_reqs.new_block_ids if blocks for ids in blocks]
        return super().execute_model(plan, **kwargs)

    def last_step(self) -> StepRecord:
        record = super().last_step()
        slots = record.slot_mappings.copy()
        for ids in self.given:
            slots[0, -1] = ids[0] * 4 if ids else -1
        return replace(record, slot_mappings=slots)


@pytest.mark.parametrize(("spoilt", "story"), [(False, ""), (True, "step 2 slot_mappings: got [-1], expected [8]")])
def test_the_plans_lists_are_overwritten_where_a_step_says_so(spoilt: bool, story: str) -> None:
    setup = "setup.groups = [{ block_size = 4 }]\n"
    first = STEP.replace("[1, 2, 3]", "[1, 2, 3, 4]").replace("[0, 1, 2]", "[0, 1, 2, 3]")
    second = f'[[case.steps]]\nrun = ["A"]\nspoil = {str(spoilt).lower()}\nseen.slot_mappings = [8]\n'
    request = REQUEST.replace("[1, 2, 3]", "[1, 2, 3, 4]")
    (case,) = parse(case_of() + setup + request + first + second + VARIANT)
    assert [r.outcome for r in run_case(case)] == ["pass"]
    (result,) = run_case(case, Keeper)
    assert result.story == story


# -- no silent pass -----------------------------------------------------------------------------------------------


def test_a_wrong_expectation_fails() -> None:
    (case,) = parse(case_of() + REQUEST + STEP.replace("[0, 1, 2]", "[0, 1, 3]") + VARIANT)
    (result,) = run_case(case)
    assert (result.outcome, result.story) == ("fail", "step 1 positions: got [0, 1, 2], expected [0, 1, 3]")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (case_of(extra="1") + REQUEST + STEP + VARIANT, "unknown key of scenario X1 'extra'"),
        (case_of() + REQUEST + STEP.replace("seen", "sen") + VARIANT, "unknown key of .* 'sen'.*Did you mean 'seen'"),
        (case_of(title="") + REQUEST + STEP + VARIANT, "a key is missing.*title"),
        (case_of(status='"maybe"'), "maybe"),
        (case_of(status='"missing"'), "names what it waits for"),
        (case_of() + REQUEST + STEP, "no fault to show"),
        (case_of() + STEP + VARIANT, "nothing to run"),
        (case_of() + REQUEST + STEP.replace("seen.positions = [0, 1, 2]\n", "") + VARIANT, "nothing is expected"),
        (case_of() + REQUEST + STEP + VARIANT + 'package = "engine_core"\n', "at its own level"),
        (case_of(level='"kernel"'), "kernel"),
        (case_of() + REQUEST + STEP.replace('["A"]', '["B"]') + VARIANT, "unknown request 'B'"),
        (case_of() + REQUEST + STEP.replace("seen.positions", "seen.positions.Z") + VARIANT, "unknown request 'Z'"),
        (case_of() + REQUEST + STEP.replace("positions", "position") + VARIANT, "Did you mean 'positions'"),
        (case_of() + REQUEST + STEP + VARIANT + 'layout = "dense"\n', "a layout that the scenario does not run in"),
        (case_of() + REQUEST + STEP + '[case.expect]\nsolo = ["C"]\n' + VARIANT, "unknown request 'C'"),
        ("[[case]\n", "not TOML"),
    ],
)
def test_what_a_scenario_may_not_say(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse(text)


@pytest.mark.parametrize(
    ("text", "unread"),
    [
        (
            case_of() + REQUEST + STEP + '[case.expect]\nfinish.A = "x"\npreempted = ["A"]\n',
            "expect.finish, expect.preempted",
        ),
        (case_of(level='"engine"') + REQUEST + STEP + "[case.expect]\ntokens.A = [1]\n", "steps[1]"),
        (case_of(level='"engine"') + REQUEST + 'eos = [1]\n[case.expect]\nsolo = "all"\n', "requests[1].eos"),
        (case_of(level='"late"') + REQUEST + STEP + "draws.A = 3\nrepeat = 2\n", "steps[1].draws, steps[1].repeat"),
        (case_of(level='"late"') + REQUEST + STEP + '[case.expect]\nsolo = "all"\n', "expect"),
        (case_of(level='"stage"') + REQUEST + CALL, "requests[1]"),
        (case_of() + REQUEST + STEP + CALL, "calls[1]"),
        (case_of() + REQUEST + "abort = 3\n" + STEP + "[case.setup]\nseed = 1\n", "setup.seed, requests[1].abort"),
        (case_of() + REQUEST + STEP + 'refused = "MR-ERR-029"\nlate = true\n', "steps[1].late, steps[1].seen"),
    ],
)
def test_what_a_level_never_looks_at_may_not_be_said(text: str, unread: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"never looks at this (got {unread!r}")):
        parse(text + VARIANT)


@pytest.mark.parametrize(
    "nothing", ["seen.positions = {}", 'refused = ""', '[case.expect]\nalike = [["A"], []]', "[case.expect]\nsolo = []"]
)
def test_an_empty_expectation_is_none(nothing: str) -> None:
    with pytest.raises(ConfigError, match="nothing is expected"):
        parse(case_of() + REQUEST + f'[[case.steps]]\nrun = ["A"]\n{nothing}\n' + VARIANT)


# Masks of a request that is not in the batch, and a token that is none.
MISFITS = {
    "masks": ('grammar = [{ request = "B", allow = [[1]] }]\n', "MR-ERR-049"),
    "outcome": ("take.A = 99\n", "MR-ERR-025"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_masks_and_outcomes_must_be_refused_too(what: str) -> None:
    """The step still waits, and is sampled without them: what follows is as if nobody had tried."""
    misfit, code = MISFITS[what]
    step = f'[[case.steps]]\nrun = ["A"]\n{misfit}refused = "{code}"\n'
    then = '[[case.steps]]\nrun = ["A"]\nseen.positions = [3]\n[case.expect]\nsolo = ["A"]\n'
    other = REQUEST.replace('"A"', '"B"') + 'params.structured_outputs.regex = "a*"\n'
    (case,) = parse(case_of() + REQUEST + other + step + then + VARIANT)
    (result,) = run_case(case)
    assert (result.outcome, result.story) == ("pass", "")
    (case,) = parse(
        case_of()
        + REQUEST
        + other
        + step.replace(misfit, misfit.replace('"B"', '"A"').replace("99", "9"))
        + then
        + VARIANT
    )
    (result,) = run_case(case)
    assert (result.outcome, result.story) == ("fail", f"step 1 refused: got accepted, expected {code}")


def test_a_refused_outcome_of_drafts_takes_none_of_them() -> None:
    steps = (
        '[[case.steps]]\nrun = ["A"]\ntake.A = 7\nhold.A = [5, 6]\n'
        '[[case.steps]]\nrun = ["A"]\ndrafts.A = 2\ntake.A = [5, 99]\nrefused = "MR-ERR-025"\n'
        '[[case.steps]]\nrun = ["A"]\nseen.input_ids = [0]\nseen.positions = [4]\n'
    )
    setup = "[case.setup.config]\nnum_speculative_tokens = 2\n"
    (case,) = parse(case_of() + REQUEST + steps + setup + VARIANT)
    (result,) = run_case(case)
    assert (result.outcome, result.story) == ("pass", "")


def test_no_log_probabilities_can_be_expected() -> None:
    plain, scored = REQUEST, REQUEST + "params.logprobs = 0\n"
    for request, outcome in ((plain, "pass"), (scored, "fail")):
        (case,) = parse(case_of() + request + STEP + "logprobs.A = []\n" + VARIANT)
        assert run_case(case)[0].outcome == outcome


def test_a_selection_is_never_empty() -> None:
    with pytest.raises(ConfigError, match="no case is selected"):
        select([])
    with pytest.raises(UnknownNameError, match="B3"):
        run(["B3"])
    assert {c.kind for c in select(["K5", "B21"])} == {"K5", "K4"}


# -- other runners ------------------------------------------------------------------------------------------------


def without(*lacking: Capability) -> Any:
    """The reference, which does not declare some of what it offers."""
    factory = load_factory("cpu")

    def build(config: RunnerConfig) -> Any:
        runner = factory(config)
        runner.capabilities = runner.capabilities - set(lacking)
        return runner

    build.LAYOUTS = ("slots",)  # type: ignore[attr-defined]
    return build


def test_what_a_runner_lacks_is_skipped_with_the_reason() -> None:
    (slots, dense) = run(["B21"], without(Capability.PADDED_BATCH))
    assert (slots.outcome, slots.reason) == ("skip", "the runner does not offer padded_batch")
    assert (dense.outcome, dense.reason) == ("skip", "the runner has no dense layout")
    (stage,) = run(["B56"], without())
    assert (stage.outcome, "no stages" in stage.reason) == ("skip", True)
    (late,) = run(["B47"], "cpu")
    assert (late.outcome, "cannot be held back" in late.reason) == ("skip", True)
    with pytest.raises(UnknownNameError, match="nobody"):
        run(["B21"], "nobody")


# -- the command --------------------------------------------------------------------------------------------------


def test_the_command_tells_what_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["B21", "B20", "--variants"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-2:] == ["1 of 2 cases ran: 1 missing, 2 pass", "2 of 2 runs of faulty variants were caught"]
    assert main(["B21", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert [c["outcome"] for c in read["cases"]] == ["pass", "pass"]


def test_the_command_fails_where_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["B20"]) == 2
    assert "nothing ran" in capsys.readouterr().out
    assert main(["B999"]) == 2
    assert main(["B21", "--file", "x.toml"]) == 2
    assert main(["--file", "no-such.toml"]) == 2


def test_the_command_fails_on_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(case_of() + REQUEST + STEP.replace("[0, 1, 2]", "[5]") + VARIANT)
    assert main(["--file", str(file)]) == 1


# -- the guide ----------------------------------------------------------------------------------------------------


def test_the_guide_tells_the_truth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = DOC.read_text(encoding="utf-8")
    example, missing = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    file = tmp_path / "x1.toml"
    file.write_text(example)
    assert main(["--file", str(file), "--variants"]) == 0
    told = capsys.readouterr().out
    assert told in text
    assert [c.status for c in parse(missing)] == ["missing"]
