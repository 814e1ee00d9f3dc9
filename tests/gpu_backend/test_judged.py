"""The Triton runner before the judge: clauses and lockstep on generated plans. Short here, long on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import conformance
from conformance.check import lockstep_on_model, lockstep_on_worlds
from conformance.clauses import load_clauses
from conformance.evaluate import evaluate
from runner_api import load_factory

pytestmark = pytest.mark.interpret
pytest.importorskip("gpu_backend.triton_support")

MODEL = str(Path(conformance.__file__).parent / "data" / "checkpoints" / "llama-tiny")


def test_every_clause_it_offers_holds() -> None:
    evaluation = evaluate("gpu", seeds=(0,), steps=6)
    assert evaluation.passed, (evaluation.by_clause, evaluation.errors)
    untested = (
        {c.id for c in load_clauses().values() if c.level == "MUST"} - set(evaluation.tested) - set(evaluation.skipped)
    )
    assert not untested


def test_lockstep_on_the_witness_model() -> None:
    result = lockstep_on_worlds(load_factory("gpu"), load_factory("cpu"), steps=60, seed=1)
    assert result.verdict == "AGREE", result.first
    assert result.steps == 60


def test_lockstep_on_a_real_model() -> None:
    result = lockstep_on_model(load_factory("gpu"), load_factory("cpu"), MODEL, steps=12, seed=3)
    assert result.verdict == "AGREE", result.first
    assert result.tokens > 10
    assert 0 < result.largest_logit_error < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["llama-tiny", "qwen3-tiny"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_lockstep_by_dtype(model: str, dtype: str) -> None:
    """Layout exact; float32 within 1e-4 of the largest logit, half precision within four times a dense run's error."""
    path = str(Path(MODEL).parent / model)
    result = lockstep_on_model(load_factory("gpu"), load_factory("cpu"), path, steps=200, seed=5, dtype=dtype)
    assert result.verdict == "AGREE", result.first
    assert result.steps == 200
