"""The dense low-precision run: right in float32, off by the format's rounding below it, and a bound that works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conformance
from conformance.dense import DenseLlama, DenseLogits
from conformance.driver import RandomDriver
from conformance.harness import build_runner
from conformance.lockstep import Lockstep, TokenPolicy
from conformance.world import PlanWorld
from runner_api import Capability, NewRequestData, RunnerConfig, SchedulerOutput, StepRecord, load_factory
from runner_api.checkpoint import Checkpoint, load_checkpoint

CAPABILITIES = frozenset(Capability) - {Capability.DRAFT_LAYOUT, Capability.LOGPROBS}
CONFIG = RunnerConfig(4, 64, 128, record=frozenset({"logits"}))
TOKENS = np.random.default_rng(5).integers(0, 512, 30).tolist()


@pytest.fixture(params=["llama-tiny", "qwen3-tiny"])
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return load_checkpoint(Path(conformance.__file__).parent / "data" / "checkpoints" / request.param)


def one_step() -> SchedulerOutput:
    new = NewRequestData("a", TOKENS, TOKENS, 0, ([2, 1],))
    return SchedulerOutput([new], num_scheduled_tokens={"a": 30}, total_num_scheduled_tokens=30)


def paged_record(checkpoint: Checkpoint, dtype: str = "float64") -> StepRecord:
    runner, _ = build_runner("cpu", checkpoint, replace(CONFIG, dtype=dtype), 8)
    runner.execute_model(one_step())
    runner.sample_tokens()
    return runner.last_step()


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("float32", 0, 3e-6), ("float16", 1e-4, 1e-2), ("bfloat16", 1e-3, 0.05)]
)
def test_error_is_that_of_the_format(checkpoint: Checkpoint, dtype: str, low: float, high: float) -> None:
    exact = paged_record(checkpoint).logits[0]
    dense = DenseLlama(checkpoint, dtype).logits(TOKENS)[-1]
    assert low <= np.abs(dense - exact).max() / np.abs(exact).max() <= high


def test_rows_follow_each_request(checkpoint: Checkpoint) -> None:
    record = paged_record(checkpoint)
    dense = DenseLogits(DenseLlama(checkpoint, "float32"))
    dense.observe(record.plan)
    rows = dense.logits(record)
    assert rows.shape == record.logits.shape
    np.testing.assert_allclose(rows, record.logits, atol=1e-5 * np.abs(record.logits).max())


class Noisy:
    """A candidate whose logits, which it draws from, are off by a share of each: what the bound is for."""

    relative = 0.0

    def __init__(self, config: RunnerConfig) -> None:
        self._runner = load_factory("cpu")(replace(config, dtype="float32"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def load_model(self, model: Any) -> None:
        self._runner.load_model(model)
        exact = self._runner._model.compute_logits
        self._runner._model.compute_logits = lambda hidden: exact(hidden) * np.float32(1 + self.relative)


def test_the_bound_follows_generated_plans(checkpoint: Checkpoint) -> None:
    """Chunks, preemptions, resumes and steps without tokens: the dense run always knows every request."""
    config = replace(CONFIG, max_num_batched_tokens=48, max_model_len=64)
    policy = TokenPolicy(exact=False, dense=DenseLogits(DenseLlama(checkpoint, "bfloat16")))
    candidate, cache = build_runner(type("Off", (Noisy,), {"relative": 0.001}), checkpoint, config, 40)
    oracle, _ = build_runner("cpu", checkpoint, config, 40)
    world = PlanWorld(config, cache, checkpoint.config.vocab_size)
    driver = RandomDriver(3, CAPABILITIES, max_prompt=20)
    lockstep = Lockstep(candidate, oracle, policy)
    empty = 0
    for _ in range(300):
        step = driver.next_step(world)
        empty += bool(step.plan.scheduled_new_reqs) and step.plan.total_num_scheduled_tokens == 0
        record = lockstep.step(step.plan, step.descriptor, step.forced, step.grammar)
        assert record is not None, lockstep.result.first
        world.observe(record.tokens(), step.drafts_held())
    assert empty, "no plan added a request without scheduling it"


@pytest.mark.parametrize(("relative", "verdict"), [(0.002, "AGREE"), (0.2, "DIVERGE")])
def test_the_bound_lets_rounding_pass_and_nothing_more(checkpoint: Checkpoint, relative: float, verdict: str) -> None:
    policy = TokenPolicy(exact=False, dense=DenseLogits(DenseLlama(checkpoint, "bfloat16")))
    candidate, _ = build_runner(type("Off", (Noisy,), {"relative": relative}), checkpoint, CONFIG, 8)
    oracle, _ = build_runner("cpu", checkpoint, CONFIG, 8)
    lockstep = Lockstep(candidate, oracle, policy)
    lockstep.step(one_step())
    result = lockstep.finish()
    assert result.verdict == verdict
    if verdict == "DIVERGE":
        assert result.first is not None
        assert result.first.difference.field == "logits"
