"""examples/rebuilding_engine.py, which keeps no record of its steps: judged by tokens alone, its faults are found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conformance.evaluate import evaluate
from conformance.metamorphic import judge_metamorphic
from conformance.smoke import smoke
from engine_core.llm import LLM
from runner_api import Capability, CapabilityError, RunnerConfig, SamplingParams, WitnessConfig
from runner_api.loader import load_factory

FILE = Path(__file__).parents[2] / "examples" / "rebuilding_engine.py"
# Each fault, and one clause that it breaks and another that it keeps.
FAULTS = {
    "plan_order": ("MR-META-001", "MR-META-003"),
    "first_chunk": ("MR-META-004", "MR-META-003"),
    "old_blocks": ("MR-META-005", "MR-META-004"),
}


def runner(name: str) -> str:
    return f"{FILE}:{name}"


def test_the_right_one_passes() -> None:
    assert smoke(runner("build")) is None
    result = evaluate(runner("build"), seeds=(0,))
    assert result.passed, (result.failed, result.errors)
    assert result.info.capabilities == {Capability.GENERATE}
    laws = {f"MR-META-{n:03}" for n in (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 14)}
    assert laws <= {clause for clause, n in result.tested.items() if n}
    assert any("step_record" in missing for missing in result.skipped.values())


@pytest.mark.parametrize("seed", [1, 2])
def test_the_right_one_passes_on_other_stories(seed: int) -> None:
    found = judge_metamorphic(runner("build"), seed=seed)
    assert not any(found.values()), found
    assert len(found) > 10


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_by_its_clause(fault: str) -> None:
    broken, kept = FAULTS[fault]
    result = evaluate(runner(fault), seeds=(0,))
    assert not result.passed
    assert broken in result.failed
    assert kept not in result.failed
    assert result.tested[kept]
    assert not result.errors


def test_its_tokens_are_those_of_the_reference() -> None:
    prompts = [[5, 9, 3, 7], [1] * 19, [8, 8, 2], [4] * 40]
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    options = {"num_blocks": 24, "max_num_reqs": 3, "max_num_batched_tokens": 16, "max_model_len": 64}
    answers = []
    for name in ("cpu", runner("build")):
        with LLM(WitnessConfig(), runner=load_factory(name), **options) as llm:
            answers.append([output.token_ids for output in llm.generate(prompts, greedy)])
    assert answers[0] == answers[1]
    assert all(len(tokens) == 9 for tokens in answers[0])


def test_what_it_does_not_offer_is_refused() -> None:
    with pytest.raises(CapabilityError, match="layout"):
        load_factory(runner("build"))(RunnerConfig(layout="dense"))
    with pytest.raises(CapabilityError, match="record"):
        load_factory(runner("build"))(RunnerConfig(record=frozenset({"logits"})))


def test_its_faults_are_the_ones_that_are_tested() -> None:
    load_factory(runner("build"))
    module = next(m for m in sys.modules.values() if getattr(m, "__file__", None) == str(FILE))
    assert set(module.FAULTS) == set(FAULTS)
