"""Each law about draws and log probabilities is silent on the oracle and speaks when its own subject is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.driver import FORM, REASONING, WorldSize
from conformance.evaluate import LAWS, StepJudge
from conformance.harness import build_runner
from conformance.planned_step import PlannedStep
from conformance.world import PlanWorld
from cpu_reference.runner import CAPABILITIES
from runner_api import (
    GrammarOutput,
    ModelRunnerOutput,
    RunnerConfig,
    SamplingParams,
    StepRecord,
    WitnessConfig,
    WitnessGroup,
)

SAMPLING = [c for c in LAWS if c.split("-")[1] in ("SAMPLE", "LOGPROB")]
MODEL = WitnessConfig(groups=(WitnessGroup(4),))


class Stage:
    """The oracle judged as a candidate, step by step; a test may falsify what it tells."""

    def __init__(self, **config: Any) -> None:
        fields = {"max_num_reqs": 4, "max_num_batched_tokens": 32, "max_model_len": 40, "reasoning": REASONING}
        size = WorldSize(RunnerConfig(**{**fields, "record": frozenset({"logits"}), **config}), MODEL, 40)
        candidate, cache = build_runner("cpu", MODEL, size.config, size.num_blocks)
        reference, _ = build_runner("cpu", MODEL, size.config, size.num_blocks)
        self.world = PlanWorld(size.config, cache, MODEL.vocab_size)
        self.judge = StepJudge(candidate, reference, size, cache, CAPABILITIES)

    def step(
        self, grammar: GrammarOutput | None = None, record: Callable[[StepRecord], dict[str, Any]] | None = None,
        output: Callable[[ModelRunnerOutput], dict[str, Any]] | None = None,
    ) -> set[str]:  # fmt: skip
        """Close the plan, run it, falsify; which laws found something."""
        step: PlannedStep = replace(self.world.close(), grammar=grammar)
        self.judge.run_candidate(step, None)
        self.judge.run_oracle(step)
        self.judge.observe(self.world, step)
        if record is not None:
            self.judge.record = replace(self.judge.record, **record(self.judge.record))
        if output is not None:
            self.judge.output = replace(self.judge.output, **output(self.judge.output))
        c = self.judge.context(step)
        found = {clause_id: LAWS[clause_id].fn(c) for clause_id in SAMPLING}
        self.spoke = {clause_id for clause_id, answer in found.items() if answer is not None}
        return {clause_id for clause_id, answer in found.items() if answer}


def changed(name: str, at: Any, value: Any) -> Callable[[Any], dict[str, Any]]:
    def change(told: Any) -> dict[str, Any]:
        array = np.array(getattr(told, name))
        array[at] = value(array[at]) if callable(value) else value
        return {name: array}

    return change


def other(token: int) -> int:
    return (token + 1) % MODEL.vocab_size


@pytest.mark.parametrize(
    "asks",
    [
        {"temperature": 1.0}, {"logit_bias": {3: 20.0}}, {"presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"allowed_token_ids": (1, 2, 3)}, {"bad_words_token_ids": ((1,), (2,))}, {"thinking_token_budget": 0},
        {"min_tokens": 3, "stop_token_ids": tuple(range(0, 64, 2))},
        {"temperature": 1.5, "top_k": 3, "repetition_penalty": 1.7, "min_p": 0.2},
    ],
)  # fmt: skip
def test_a_draw_that_does_not_win_is_told(asks: dict[str, Any]) -> None:
    stage = Stage()
    params = SamplingParams(**{"temperature": 0.0, **asks})
    stage.world.add([7, 5, 7, 6], 4, params, seed=5, req_id="a")
    assert stage.step() == set()
    stage.world.schedule("a", 1)
    assert stage.step() == set()
    assert "MR-SAMPLE-012" in stage.spoke
    stage.world.schedule("a", 1)
    assert "MR-SAMPLE-012" in stage.step(record=changed("token_ids", (0, 0), other))


def test_a_draw_outside_the_mask_is_told() -> None:
    stage = Stage()
    stage.world.add([1, 2], 2, SamplingParams(temperature=0.0, structured_outputs=FORM), req_id="a")
    mask = np.array([[1 << 9, 0]], np.int32)
    assert stage.step(GrammarOutput(["a"], mask)) == set()
    assert stage.world.running["a"].tokens[-1] == 9
    stage.world.schedule("a", 1)
    assert stage.step(GrammarOutput(["a"], mask), changed("token_ids", (0, 0), 10)) == {"MR-SAMPLE-012"}


def test_a_replayed_token_need_not_win() -> None:
    stage = Stage()
    stage.world.add([1, 2], 2, SamplingParams(temperature=0.0, trace_decode_token_ids=(9, 9, 9)), req_id="a")
    assert stage.step() == set()
    assert "MR-SAMPLE-012" not in stage.spoke
    assert stage.world.running["a"].tokens[-1] == 9


MODES = {
    "raw_logprobs": "MR-LOGPROB-001", "processed_logprobs": "MR-LOGPROB-003", "raw_logits": "MR-LOGPROB-004",
    "processed_logits": "MR-LOGPROB-004",
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("column", [0, 2])
def test_a_wrong_value_is_told_in_its_mode(mode: str, column: int) -> None:
    stage = Stage(logprobs_mode=mode)
    params = SamplingParams(temperature=0.5, logit_bias={5: 30.0}, logprobs=2)
    stage.world.add([1, 2, 3], 3, params, seed=1, req_id="a")
    assert stage.step() == set()
    assert {MODES[mode], "MR-LOGPROB-002"} <= stage.spoke
    stage.world.schedule("a", 1)
    assert stage.step(record=changed("logprobs", (0, column), lambda x: x + np.float32(0.01))) == {MODES[mode]}


def test_a_wrong_rank_is_told() -> None:
    stage = Stage()
    stage.world.add([1, 2, 3], 3, SamplingParams(temperature=0.0, logprobs=0), req_id="a")
    assert stage.step(record=changed("ranks", 0, lambda r: r + 1)) == {"MR-LOGPROB-002"}


def test_missing_log_probabilities_are_told() -> None:
    stage = Stage()
    stage.world.add([1, 2, 3], 3, SamplingParams(temperature=0.0, logprob_token_ids=(4, 5)), req_id="a")
    assert stage.step(record=lambda r: {"logprobs": None}) == {"MR-LOGPROB-001"}


def scored(**changes: Any) -> Callable[[ModelRunnerOutput], dict[str, Any]]:
    def change(told: ModelRunnerOutput) -> dict[str, Any]:
        return {"prompt_logprobs": {r: replace(lists, **changes) for r, lists in told.prompt_logprobs.items()}}

    return change


def test_prompts_are_judged_with_the_step_that_ends_them() -> None:
    stage = Stage()
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    stage.world.add([1, 2, 3, 4, 5], 3, params, req_id="a")
    assert stage.step() == set()
    assert "MR-LOGPROB-011" not in stage.spoke
    stage.world.schedule("a", 2)
    assert stage.step() == set()
    assert {"MR-LOGPROB-011", "MR-LOGPROB-013"} <= stage.spoke


def test_prompts_that_are_scored_wrong_or_not_at_all_are_told() -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    for output, clause in (
        (lambda told: {"prompt_logprobs": {}}, "MR-LOGPROB-013"),
        (scored(ranks=np.ones(4, np.int64)), "MR-LOGPROB-011"),
        (scored(token_ids=np.zeros((4, 2), np.int32)), "MR-LOGPROB-011"),
        (scored(token_ids=np.zeros((3, 2), np.int32)), "MR-LOGPROB-011"),
    ):
        stage = Stage()
        stage.world.add([1, 2, 3, 4, 5], 5, params, req_id="a")
        assert stage.step(output=output) == {clause}
