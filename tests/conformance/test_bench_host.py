"""What a decode step costs the host: the plans are fair, both layouts are measured in turns, the tables hold it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conformance.bench.host import SAMPLED, decode_plan, host_text, measure
from conformance.bench.null_model import NullModel
from conformance.bench.step_timer import PARTS, parts_of
from conformance.bench.trace_plans import GREEDY
from engine_core.cli import main
from runner_api import RunnerConfig, group_kv_cache_specs, load_runner


def test_plans_decode_one_token_of_each_request() -> None:
    known = {}
    for step in range(40):
        plan = decode_plan(32, step, 8, GREEDY)
        assert set(plan.num_scheduled_tokens.values()) == {1}
        assert plan.total_num_scheduled_tokens == 32
        if step == 0:
            known = {new.req_id: list(new.block_ids[0]) for new in plan.scheduled_new_reqs}
            continue
        cached = plan.scheduled_cached_reqs
        # One request in 16 crosses a block boundary, in every step.
        assert sum(ids is not None for ids in cached.new_block_ids) == 2
        for req_id, computed, ids in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            known[req_id] += ids[0] if ids else []
            assert len(known[req_id]) == computed // 16 + 1
    everyone = [block for blocks in known.values() for block in blocks]
    assert len(set(everyone)) == len(everyone)


def test_null_model_on_numpy() -> None:
    runner = load_runner("cpu", RunnerConfig(max_num_reqs=4, max_num_batched_tokens=4, max_model_len=128))
    runner.load_model(NullModel(50))
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), 33))
    for step in range(3):
        runner.execute_model(decode_plan(4, step, 8, GREEDY))
        assert runner.sample_tokens().get_output().tokens() == {f"r{i}": (0,) for i in range(4)}


def test_every_layout_and_batch_size() -> None:
    costs = measure("cpu", (3, 1), num_steps=4, vocab_size=20, params=SAMPLED)
    assert set(costs.infos) == {"slots", "dense"}
    assert {layout: info.layout for layout, info in costs.infos.items()} == {"slots": "slots", "dense": "dense"}
    assert [times.batch for times in costs.batches] == [3, 1]
    for times in costs.batches:
        assert times.ratio is not None
        assert times.ratio > 0
        for steps in times.steps.values():
            assert len(steps) == 4
            assert set(parts_of(steps)) == set(PARTS)
            assert all(s.total > 0 and s.output > 0 for s in steps)
    text = host_text(costs, 20, 4)
    assert "dense/slots" in text
    assert "processor time" in text
    assert sum(line.startswith(("3 ", "1 ")) for line in text.splitlines()) == 4


def only_slots(config: RunnerConfig) -> Any:
    """A runner of one layout."""
    return load_runner("cpu", config)


def test_a_runner_of_one_layout() -> None:
    costs = measure(only_slots, (1,), num_steps=2, vocab_size=8)
    assert set(costs.infos) == {"slots"}
    assert costs.batches[0].ratio is None
    assert "dense" not in host_text(costs, 8, 2).replace("dense/slots", "")


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--batches", "2,1", "--steps", "3", "--vocab", "16"]
    assert main(["bench", "host", *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["batches"]) == ["2", "1"]
    assert set(printed["batches"]["2"]) == set(printed["runners"]) == {"slots", "dense"}
    assert set(printed["batches"]["1"]["dense"]["parts"]) == set(PARTS)
    assert printed["ratios"]["2"] == pytest.approx(
        printed["batches"]["2"]["dense"]["seconds"] / printed["batches"]["2"]["slots"]["seconds"]
    )
    assert main(["bench", "host", *options]) == 0
    assert "vocabulary 16" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--batches", "1,x"], "--batches"),
        (["--batches", "0"], "--batches"),
        (["--steps", "0"], "--steps"),
        (["--vocab", "0"], "--vocab"),
        (["--runner", "nobody"], "nobody"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_misuse(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", *options]) == 2
    assert told in capsys.readouterr().err
