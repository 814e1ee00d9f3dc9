"""The first steps of a runner: what goes wrong there is said to be the adapter's, in words of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conformance.smoke import ANSWERED, smoke
from cpu_reference.runner import CpuModelRunner
from engine_core.cli import EXIT_DIVERGED, main
from runner_api import EMPTY_MODEL_RUNNER_OUTPUT, KVCacheSpec, SchedulerOutput

HERE = __name__
GROUPS = "build the runner and load the witness model: get_kv_cache_specs gives (block size, window)"


class NoSpecs(CpuModelRunner):
    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {}


class OtherSize(CpuModelRunner):
    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {name: replace(spec, block_size=16) for name, spec in super().get_kv_cache_specs().items()}


class Answers(CpuModelRunner):
    """Gives an output for plans with tokens."""

    def execute_model(self, plan: SchedulerOutput, **kwargs: Any) -> Any:
        return super().execute_model(plan, **kwargs) or EMPTY_MODEL_RUNNER_OUTPUT


class AnswersDecodes(Answers):
    def execute_model(self, plan: SchedulerOutput, **kwargs: Any) -> Any:
        done = super().execute_model(plan, **kwargs)
        return None if plan.scheduled_new_reqs else done


@pytest.mark.parametrize(
    ("runner", "said"),
    [
        (CpuModelRunner, None),
        (NoSpecs, f"{GROUPS} [] by group, expected [(4, None)]"),
        (OtherSize, f"{GROUPS} [(16, None)] by group, expected [(4, None)]"),
        (Answers, f"prefill three tokens of one request: {ANSWERED}"),
        (AnswersDecodes, f"decode one token: {ANSWERED}"),
    ],
)
def test_the_step_is_named(runner: type[CpuModelRunner], said: str | None) -> None:
    assert smoke(runner) == said


@pytest.mark.parametrize("name", ["NoSpecs", "Answers"])
def test_it_is_a_divergence_and_no_misuse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{HERE}:{name}"]) == EXIT_DIVERGED
    assert "smoke: FAILED in the step: " in capsys.readouterr().out
