"""The demo: two models on two runners, a verdict, and a planted fault that is found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import conformance
from conformance.demo import FAULTS
from engine_core.cli import main
from runner_api import CheckpointError
from runner_api.checkpoint.smollm2 import smollm2_path

pytestmark = pytest.mark.interpret
pytest.importorskip("gpu_backend.triton_support")
MODEL = Path(conformance.__file__).parent / "data" / "checkpoints" / "llama-tiny"


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_planted_fault_is_named(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Found on the witness model, before the real one has its turn.
    assert main(["demo", "--fault", fault, "--model", str(MODEL)]) == 1
    out = capsys.readouterr().out
    first = re.search(r"first divergence at step \d+: (\w+)", out)
    assert first is not None, out
    assert first[1].startswith(fault)
    assert "verdict: DIVERGE" in out.splitlines()[-1]


def test_an_unknown_fault_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--fault", "slot_maping"]) == 2
    assert "slot_mapping" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [["--max-tokens", "0"], ["--compare-tokens", "0"], ["--compare-tokens", "-3"], ["--model", "/no/such/model"],
     ["--runner", "nope"], ["--against", "nope"]],
)  # fmt: skip
def test_misuse_is_refused_before_anything_runs(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *option]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: MR-ERR-0")


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        smollm2_path()
    except CheckpointError as e:
        pytest.skip(f"the real model is not installed: {e}")
    assert main(["demo", "--json", "--fault", "positions"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["verdict"] == "DIVERGE"
    assert "positions" in answer["first"]
    assert len(answer["runners"]) == 2
    assert set(answer) >= {"steps", "elements", "tokens", "near_ties", "launches", "answers"}


@pytest.mark.slow
def test_the_runners_agree(capsys: pytest.CaptureFixture[str]) -> None:
    """One token of each answer on both runners, the rest on the reference alone; kernels that stay idle are named."""
    try:
        smollm2_path()
    except CheckpointError as e:
        pytest.skip(f"the real model is not installed: {e}")
    assert main(["demo", "--compare-tokens", "1", "--max-tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert "The capital of France is Paris" in out
    launches = dict(re.findall(r"launches of (\w+) +(\d+)", out))
    for kernel in ("gather_block_tables", "compute_slot_mappings", "post_update", "apply_penalties", "apply_bad_words"):
        assert int(launches[f"{kernel}_kernel"]) > 0
    assert "0" not in launches.values()
    idle = re.search(r"so not compared: (.+)", out)
    assert idle is not None
    assert "apply_thinking_budget_kernel" in idle[1]
    assert not launches.keys() & set(idle[1].split(", "))
    assert re.match(r"verdict: AGREE steps=\d+ fields=\d+ elements=\d+ tokens=\d+", out.splitlines()[-1])
