"""The GPU runner beside the NumPy runner on the witness model: same plans, same records, same state, bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

import torch
from step_driver import Driver, force, full, make_plan, new

from gpu_backend.runner import GpuModelRunner
from gpu_backend.triton_support import INTERPRETED
from runner_api import (
    INTEGER_FIELDS,
    BatchDescriptor,
    CallOrderError,
    Capability,
    CapabilityError,
    ConfigError,
    CUDAGraphMode,
    ForcedStep,
    PlanError,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
    load_runner,
)

pytestmark = pytest.mark.interpret

RECORD = frozenset({"logits", "kv", "intermediates"})
TWO_GROUPS = WitnessConfig(groups=(WitnessGroup(4, sliding_window=6), WitnessGroup(8)))
SEEDED = SamplingParams(temperature=0.8)


def make(name: str, model: WitnessConfig, num_blocks: int = 64, **config: Any) -> Any:
    defaults = {"max_num_reqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "record": RECORD}
    runner = load_runner(name, RunnerConfig(**{**defaults, **config}))
    runner.load_model(model)
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), num_blocks))
    return runner


class Lockstep:
    """A runner for `Driver` that is two: each call goes to both, what comes back must be the same.

    Memory that nothing may read is poisoned before every step."""

    def __init__(self, model: WitnessConfig = TWO_GROUPS, **config: Any) -> None:
        self.cpu, self.gpu = make("cpu", model, **config), make("gpu", model, **config)
        self.kv_cache_config = self.cpu.kv_cache_config
        self.config = self.cpu.config
        self.outputs: list[tuple[Any, Any]] = []

    def execute_model(self, plan: SchedulerOutput, descriptor: BatchDescriptor | None = None) -> None:
        for runner in (self.cpu, self.gpu):
            runner.poison_unused()
            assert runner.execute_model(plan, descriptor=descriptor) is None

    def sample_tokens(self, forced: ForcedStep | None = None) -> Any:
        expected, got = (runner.sample_tokens(forced=forced) for runner in (self.cpu, self.gpu))
        self.outputs.append((expected, got))
        self.compare()
        return got

    def last_step(self) -> Any:
        return self.gpu.last_step()

    def compare(self) -> None:
        here, there = self.cpu.last_step(), self.gpu.last_step()
        for name in (*INTEGER_FIELDS, "seeds", "draft_token_ids", "token_ids", "forced_token_ids", "logits"):
            a, b = getattr(here, name), getattr(there, name)
            if isinstance(a, np.ndarray):
                assert a.dtype == b.dtype, name
            if name == "block_tables":
                for rows in zip(a, b, strict=True):
                    for x, y in zip(*rows, strict=True):
                        np.testing.assert_array_equal(y, x, err_msg=name)
            else:
                np.testing.assert_array_equal(b, a, err_msg=name)
        assert (here.descriptor, here.num_reqs_padded) == (there.descriptor, there.num_reqs_padded)
        assert here.kv.keys() == there.kv.keys()
        for req_id in here.kv:
            np.testing.assert_array_equal(there.kv[req_id], here.kv[req_id])
        np.testing.assert_array_equal(there.intermediates["hidden"], here.intermediates["hidden"])
        assert self.cpu.state_digest() == self.gpu.state_digest()


def test_chunks_decodes_padding_finish_and_readd_in_two_groups() -> None:
    pair = Lockstep()
    d = Driver(pair)  # type: ignore[arg-type]
    d.add("a", range(1, 12), sampling_params=SEEDED, seed=-7)
    d.add("b", [5, 6, 7])
    d.step({"a": 4, "b": 3})
    d.step({"a": 7, "b": 1})
    d.step({"a": 1, "b": 1}, full(4, 3))
    d.add("c", range(20, 29), sampling_params=SEEDED, seed=2**40)
    d.step({"a": 1, "b": 1, "c": 6})
    d.remove("b")
    d.step({"a": 1, "c": 3}, BatchDescriptor(CUDAGraphMode.PIECEWISE, 8))
    d.remove("a", preempt=True)
    d.step({"c": 1})
    d.readd("a", sampling_params=SEEDED, seed=-7)
    d.add("b", [9] * 9)
    d.step({"a": 15, "b": 9, "c": 1})
    d.decode(["a", "b"], 1, descriptor=full(4, 4, 1))  # the third row of the tables was somebody's a step ago
    d.decode(["a", "b", "c"], 3, descriptor=full(4, 4, 1))
    # Every step's tokens are still to be had, unchanged, and again.
    for expected, got in pair.outputs:
        assert got.get_output() == expected.get_output() == got.get_output()


def test_drafts_with_imposed_outcomes() -> None:
    pair = Lockstep(num_speculative_tokens=2)

    def step(plan: SchedulerOutput, tokens: Mapping[str, Sequence[int]], drafts: Mapping[str, Sequence[int]]) -> None:
        pair.execute_model(plan)
        pair.sample_tokens(force(pair, tokens, drafts))  # type: ignore[arg-type]

    a, b = new("a", range(1, 6), ([1, 2, 3], [1, 2])), new("b", [8, 9], ([4, 5], [4]))
    step(make_plan({"a": 3, "b": 2}, [a, b]), {"b": [40]}, {"b": [41, 42]})
    step(
        make_plan({"a": 2, "b": 3}, cached={"a": (3, None), "b": (2, None)}, drafts={"b": [41, 42]}),
        {"a": [60], "b": [41, 50]}, {"a": [61, 62], "b": [51, 52]},
    )  # fmt: skip
    assert pair.last_step().req_ids == ("b", "a")
    np.testing.assert_array_equal(pair.last_step().num_rejected, [1, 0])
    step(
        make_plan({"a": 3, "b": 2}, cached={"a": (5, None), "b": (4, None)}, drafts={"a": [-1, -1], "b": [-1]}),
        {"a": [61, 62, 63], "b": [55]}, {"a": [1, 2], "b": [3, 4]},
    )  # fmt: skip
    np.testing.assert_array_equal(pair.last_step().draft_token_ids, [[61, 62], [51, 52]])


def test_imposed_logits_are_what_is_drawn_from() -> None:
    pair = Lockstep()
    d = Driver(pair)  # type: ignore[arg-type]
    d.add("a", [1, 2, 3])
    pair.execute_model(d.plan({"a": 3}))
    logits = np.zeros((1, 64), np.float32)
    logits[0, 17] = 1.0
    pair.sample_tokens(ForcedStep(np.array([[5]]), np.array([1]), logits=logits))
    record = pair.last_step()
    assert record.token_ids.tolist() == [[17]], "its own draw"
    assert record.tokens() == {"a": (5,)}, "what entered the state"


def test_blank_and_copied_blocks_and_plans_without_tokens() -> None:
    pair = Lockstep(WitnessConfig())
    d = Driver(pair)  # type: ignore[arg-type]
    d.add("a", range(1, 20))
    d.step({"a": 19})
    plan = SchedulerOutput.empty(new_block_ids_to_zero=[9, 3], kv_cache_block_copies=[(1, 9), (9, 8), (2, 3)])
    for runner in (pair.cpu, pair.gpu):
        assert runner.execute_model(plan).req_ids == ()
        assert runner.last_step().plan is plan
    for here, there in zip(*(r.kv_caches["witness.0"] for r in (pair.cpu, pair.gpu)), strict=True):
        np.testing.assert_array_equal(there.cpu().numpy()[:12], here[:12])
    plan = d.plan({"a": 1})
    plan.finished_req_ids = frozenset({"unknown"})
    pair.execute_model(plan)
    pair.sample_tokens()


def test_only_changed_rows_travel_and_always_in_one_copy() -> None:
    gpu = make("gpu", WitnessConfig(groups=(WitnessGroup(4), WitnessGroup(8))), record=frozenset())
    d = Driver(gpu)
    d.add("a", range(1, 4))
    rows, addresses = [], set()
    for n in (3, 1, 1, 1, 1):
        d.step({"a": n})
        rows.append(gpu.block_tables.rows_written)
        addresses.add(tuple(t.data_ptr() for t in (gpu.idx_mapping, gpu.req_states.prefill_len, gpu.input_ids)))
    assert rows == [2, 0, 1, 0, 0]  # both groups at first; then position 4 opens the smaller group's second block
    assert gpu.packed.num_copies == 5
    assert len(addresses) == 1, "a buffer has moved"


def test_nothing_else_is_copied_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """New requests with sampling parameters, and rows whose last owner left drafts, ride in the same copy."""
    gpu = make("gpu", WitnessConfig(), record=frozenset(), num_speculative_tokens=2)
    d = Driver(gpu)
    copies: list[Any] = []
    monkeypatch.setattr("gpu_backend.runner.copy_to_device", lambda *a: copies.append(a))
    for i, name in enumerate("abc"):
        d.add(name, range(1, 4), sampling_params=SEEDED, seed=i)
    assert gpu.req_states.draft_tokens.fill_(9).any()
    kept = gpu.req_states.draft_tokens.clone()
    d.step({"a": 3, "b": 3})
    assert gpu.req_states.draft_tokens.tolist() == [[9, 9], [9, 9], [0, 0], [0, 0]]
    d.step({"a": 1, "b": 1, "c": 3})
    assert gpu.req_states.draft_tokens.tolist() == [[9, 9], [0, 0], [0, 0], [0, 0]] != kept.tolist()
    assert gpu.packed.num_copies == 2
    assert copies == []


def test_a_step_with_more_than_the_arena_holds_takes_a_second_copy() -> None:
    gpu = make("gpu", WitnessConfig(), max_num_batched_tokens=1, max_num_reqs=8, max_model_len=2048, num_blocks=128)
    prompt = [i % 60 for i in range(2040)]
    added = [new(f"r{i}", prompt, [i + 1]) for i in range(8)]
    gpu.execute_model(make_plan({"r0": 1}, added))
    assert gpu.packed.num_copies == 2
    gpu.sample_tokens()
    for i in range(8):
        row = gpu.req_states.req_id_to_row[f"r{i}"]
        assert gpu.req_states.all_token_ids[row, :2040].tolist() == prompt


def test_an_impossible_plan_changes_nothing() -> None:
    pair = Lockstep()
    d = Driver(pair)  # type: ignore[arg-type]
    d.add("a", range(1, 9))
    d.step({"a": 8})
    before = pair.gpu.state_digest()
    for bad in (make_plan({"zzz": 1}), make_plan({"a": 2}, cached={"a": (8, None)})):
        with pytest.raises(PlanError):
            pair.gpu.execute_model(bad)
    with pytest.raises(PlanError, match="MR-ERR-043"):
        pair.gpu.execute_model(make_plan({"a": 1}, cached={"a": (8, ([30], [30]))}), descriptor=full(1, 9))
    assert pair.gpu.state_digest() == before
    d.step({"a": 1})


def test_an_impossible_outcome_leaves_the_step_waiting() -> None:
    pair = Lockstep()
    d = Driver(pair)  # type: ignore[arg-type]
    d.add("a", range(1, 9))
    pair.execute_model(d.plan({"a": 4}))
    for forced in (ForcedStep(np.zeros((1, 1)), np.array([1])), ForcedStep(np.zeros((2, 1)), np.array([0]))):
        texts = []
        for runner in (pair.cpu, pair.gpu):
            with pytest.raises(PlanError) as e:
                runner.sample_tokens(forced=forced)
            texts.append(str(e.value))
        assert texts[0] == texts[1]
    pair.sample_tokens()


def test_calls_out_of_order_are_refused() -> None:
    runner = load_runner("gpu", RunnerConfig(max_num_reqs=2))
    for call in (runner.get_kv_cache_specs, runner.last_step, runner.sample_tokens, runner.state_digest):
        with pytest.raises(CallOrderError):
            call()
    with pytest.raises(CallOrderError):
        runner.execute_model(SchedulerOutput.empty())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": "float64"}, CapabilityError),
        ({"layout": "dense", "num_speculative_tokens": 1}, CapabilityError),
        ({"device": "tpu"}, ConfigError),
        ({"dtype": "float16"} if INTERPRETED else {"device": "cpu"}, CapabilityError if INTERPRETED else ConfigError),
    ],
)
def test_what_is_not_offered_is_refused(options: Mapping[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        load_runner("gpu", RunnerConfig(**options))


def test_the_runner_says_where_it_runs_and_counts_its_kernels(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "modelrunner"):
        gpu = make("gpu", WitnessConfig())
    info = gpu.describe()
    assert info.line() in caplog.text
    assert info.device == "cpu (Triton interpreter)" if INTERPRETED else info.device.startswith("cuda:0 ")
    assert info.notes[0].startswith("auto: ")
    assert Capability.FLOAT64 not in info.capabilities
    before = gpu.kernel_launches()
    d = Driver(gpu)
    d.add("a", [1, 2])
    d.step({"a": 2})
    after = gpu.kernel_launches()
    assert after["_post_update_kernel"] == before["_post_update_kernel"] + 1
    assert after["_apply_staged_writes_kernel"] == before["_apply_staged_writes_kernel"] + 4
    after.clear()
    assert gpu.kernel_launches(), "a copy is handed out"


def test_a_record_asked_for_late_is_of_its_step() -> None:
    gpu = make("gpu", WitnessConfig(), record=frozenset())
    d = Driver(gpu)
    d.add("a", [1, 2, 3])
    drawn = d.step({"a": 3})
    gpu.poison_unused()
    record = gpu.last_step()
    assert record.input_ids.tolist() == [1, 2, 3]
    assert record.tokens() == drawn
    assert record.logits is None
    assert not record.kv
    gpu.shutdown()
    assert gpu.last_step() is record


@pytest.mark.gpu
def test_nothing_waits_for_the_device_between_a_plan_and_its_output() -> None:
    gpu: GpuModelRunner = make("gpu", TWO_GROUPS, record=frozenset())
    d = Driver(gpu)
    d.add("a", range(1, 12), sampling_params=SEEDED)
    d.step({"a": 11})  # kernels are compiled and loaded by the first step
    d.add("b", range(1, 12), sampling_params=SEEDED)
    for counts in ({"a": 1, "b": 11}, {"a": 1, "b": 1}):
        plan = d.plan(counts)
        torch.cuda.set_sync_debug_mode("error")
        try:
            gpu.execute_model(plan)
            output = gpu.sample_tokens()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for req_id, n in counts.items():
            d.computed[req_id] += n
        assert all(len(t) == 1 for t in output.get_output().sampled_token_ids)
