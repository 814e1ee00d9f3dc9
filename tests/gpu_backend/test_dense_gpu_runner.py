"""Packed rows on the GPU runner: the same plans as the reference's and the same state, bit for bit; and the same
requests as fixed rows have. Outputs are taken when the engine likes: the host builds a step without seeing a token."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

import torch
from step_driver import GREEDY, Driver, force, full, make_plan, new
from two_layouts import EVERYTHING, Both, Story, make_layout, tell_random_story

import gpu_backend.dense.rows as rows_module
from gpu_backend.copy_engine import SimulatedCopies
from gpu_backend.dense.rows import LateTokens
from gpu_backend.dense.runner import DenseGpuModelRunner
from gpu_backend.layouts import build_runner
from gpu_backend.runner import GpuModelRunner
from runner_api import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    INTEGER_FIELDS,
    NO_ROW,
    BatchDescriptor,
    CapabilityError,
    RunnerConfig,
    SamplingParams,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
    load_factory,
    load_stages,
)
from runner_api.loader import listen_to_parts, table_traffic

pytestmark = pytest.mark.interpret

MODEL = WitnessConfig(vocab_size=50, groups=(WitnessGroup(4), WitnessGroup(3, sliding_window=5)))
ONE_GROUP = WitnessConfig(vocab_size=50, groups=(WitnessGroup(4),))
SMALL = {"max_num_reqs": 5, "max_num_batched_tokens": 40, "max_model_len": 40}
SEEDED = SamplingParams(temperature=1.0)


def dense(model: WitnessConfig = ONE_GROUP, num_blocks: int = 64, **config: Any) -> Any:
    return make_layout("dense", model, num_blocks, backend="gpu", **SMALL | config)


def run(runner: Any, plan: Any, **rest: Any) -> dict[str, tuple[int, ...]]:
    if runner.execute_model(plan, **rest) is EMPTY_MODEL_RUNNER_OUTPUT:
        return {}
    return runner.sample_tokens().get_output().tokens()


class Twins:
    """A pair for `tell_random_story`: both backends get the dense plan of each step and end up in the same state.

    `late`: outputs of the GPU runner that nobody has asked for yet; they are taken some steps later.
    """

    def __init__(self, threshold: int | None = None, **config: Any) -> None:
        config = {**SMALL, "record": frozenset({"kv", "logits"}), "reorder_batch_threshold": threshold} | config
        self.cpu, self.gpu = (make_layout("dense", MODEL, 90, backend=name, **config) for name in ("cpu", "gpu"))
        self.story = Story([g.block_size for g in MODEL.groups], 90)
        self.late: list[tuple[Any, Any]] = []

    def step(
        self, counts: Mapping[str, int], descriptor: BatchDescriptor | None = None, poison: Collection[str] = ()
    ) -> None:
        plan = self.story.plans(counts)["dense"]
        if poison:
            self.cpu.poison_unused()
            self.gpu.poison_unused()
        answers = [runner.execute_model(plan, descriptor=descriptor) for runner in (self.cpu, self.gpu)]
        if counts:
            assert answers == [None, None]
            output = self.cpu.sample_tokens().get_output()
            self.late.append((output, self.gpu.sample_tokens()))
            self.compare_records()
            self.story.drawn(counts, output.tokens())
        assert self.cpu.state_digest() == self.gpu.state_digest()
        if len(self.late) > 3 or not counts:
            self.take_outputs()

    def compare_records(self) -> None:
        here, there = self.cpu.last_step(), self.gpu.last_step()
        for name in (*INTEGER_FIELDS, "seeds", "token_ids", "faults", "logits"):
            a, b = getattr(here, name), getattr(there, name)
            if name == "block_tables":
                assert [[row.tolist() for row in group] for group in a] == [[r.tolist() for r in g] for g in b]
            else:
                np.testing.assert_array_equal(b, a, err_msg=name)
        assert here.kv.keys() == there.kv.keys()
        for req_id, kv in here.kv.items():
            np.testing.assert_array_equal(there.kv[req_id], kv)

    def take_outputs(self) -> None:
        for expected, output in self.late:
            got = output.get_output()
            assert (got.req_ids, got.sampled_token_ids) == (expected.req_ids, expected.sampled_token_ids)
            assert got.errors == expected.errors
            assert got.prompt_logprobs.keys() == expected.prompt_logprobs.keys()
        self.late = []


@pytest.mark.parametrize("seed", [0, 1])
def test_the_reference_has_the_same_state_after_every_step(seed: int) -> None:
    twins = Twins([None, 1][seed], **EVERYTHING)
    seen = tell_random_story(twins, seed, 22)
    twins.take_outputs()
    rows = twins.gpu.req_states
    assert (rows.num_condense_moves, rows.num_swaps) == (
        twins.cpu.req_states.num_condense_moves, twins.cpu.req_states.num_swaps,
    )  # fmt: skip
    assert rows.num_condense_moves > 1
    assert rows.num_swaps > (2 if seed else -1)
    assert seen["left out"] > 8
    assert seen["preempted"] > 1


def test_fixed_rows_give_the_same_requests_the_same() -> None:
    """Log probabilities too, to the last bit: the same kernels see the same rows, in another order."""
    pair = Both(MODEL, num_blocks=90, threshold=1, backend="gpu", **SMALL, **EVERYTHING)
    tell_random_story(pair, 5, 18)
    assert pair.runners["dense"].req_states.num_swaps > 2


# -- tokens that the host has not seen ----------------------------------------------------------------------------


def test_a_token_comes_from_the_row_that_its_request_had_then() -> None:
    """C drew in row 2 and computes in row 0, where A drew; nobody has looked at any output."""
    runner, outputs, eager = dense(), [], dense()
    added = [new(name, [3 * i + 1, 3 * i + 2], [i + 1], sampling_params=SEEDED, seed=i) for i, name in enumerate("ABC")]
    plans = [
        make_plan(dict.fromkeys("ABC", 2), added),
        make_plan({"B": 1, "C": 1}, (), dict.fromkeys("BC", (2, None)), finished_req_ids=frozenset("A")),
        make_plan({"B": 1, "C": 1}, (), dict.fromkeys("BC", (3, None))),
    ]
    for plan in plans:
        runner.execute_model(plan)
        outputs.append(runner.sample_tokens())
        drawn = run(eager, plan)
        assert runner.last_step().input_ids.tolist() == eager.last_step().input_ids.tolist()
    assert runner.last_step().req_ids == ("C", "B")
    first, second, third = (output.get_output().tokens() for output in outputs)
    assert third == drawn
    assert len({*first["A"], *first["B"], *first["C"]}) > 1, "a story that tells nothing"
    assert runner.last_step().input_ids.tolist() == [*second["C"], *second["B"]]
    rows = runner.req_states
    assert rows.known_token_ids_np[:2, :3].tolist() == [[7, 8, 0], [4, 5, 0]], "the host has seen the prompts alone"
    assert rows.num_known_np.tolist() == [2, 2, 0, 0, 0]
    assert rows.total_len_np.tolist() == [5, 5, 0, 0, 0]
    assert rows.previous_rows_np.tolist() == [0, 1, NO_ROW, NO_ROW, NO_ROW]
    assert rows.all_token_ids[0, :5].tolist() == [7, 8, *first["C"], *second["C"], *third["C"]]


def test_only_who_comes_back_waits_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    get = LateTokens._get
    monkeypatch.setattr(LateTokens, "_get", lambda self, a, b: asked.append((a, b)) or get(self, a, b))
    runner, story = dense(), Story([4])
    for i, name in enumerate("abcd"):
        story.add(name, [i, 2], sampling_params=SEEDED, seed=i)

    def step(*names: str) -> None:
        counts = {name: story.missing(name) for name in names}
        story.drawn(counts, run(runner, story.plans(counts)["dense"]))

    step("a", "b", "c", "d")
    story.finish("c")
    step("a", "b")  # c is done, d sits out
    assert asked == []
    assert runner.requests["d"].token_ids == [3, 2]
    assert runner.requests["d"].late is not None
    story.preempt("a")
    step("b")
    step("b", "d")  # d is back: with one token, the only one of those who left that is wanted
    assert asked == [(0, 1)]
    assert runner.last_step().input_ids.tolist() == [story.live[name].tokens[-2] for name in "bd"]
    step("a")
    assert asked == [(0, 1)], "a resumed request comes with its tokens"
    assert runner.last_step().input_ids.tolist() == story.live["a"].tokens[:-1]


def test_all_who_leave_in_one_step_share_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """… and each gets its own tokens, known ones and late ones."""
    pair, copies, start = Twins(), [], rows_module.start_for_host
    monkeypatch.setattr(rows_module, "start_for_host", lambda *a: copies.append(len(a[0][0])) or start(*a))
    for i, name in enumerate("abcd"):
        pair.story.add(name, range(i, 2 * i + 3), sampling_params=SEEDED, seed=i)
    pair.step({"a": 3, "b": 4, "c": 3, "d": 6})
    for _ in range(3):
        pair.step(dict.fromkeys("abcd", 1))
    assert copies == []
    pair.step({"b": 1})
    assert copies == [4 + 2 + 4]
    pair.step({})
    assert copies == [10, 5]
    pair.step(dict.fromkeys("dca", 1))
    pair.take_outputs()


def test_an_imposed_outcome_is_the_next_steps_input() -> None:
    runner = dense()
    runner.execute_model(make_plan({"a": 2, "b": 1}, [new("a", [1, 2], [1]), new("b", [3, 4], [2])]))
    runner.sample_tokens(forced=force(runner, {"a": [33]}))
    runner.execute_model(make_plan({"a": 1, "b": 1}, (), {"a": (2, None), "b": (1, None)}))
    assert runner.last_step().input_ids.tolist() == [33, 4]
    runner.sample_tokens(forced=force(runner, {"a": [34], "b": [35]}))
    runner.execute_model(make_plan({"b": 1}, (), {"b": (2, None)}))
    assert runner.last_step().input_ids.tolist() == [35]
    runner.sample_tokens()
    assert runner.waiting_requests["a"].late() == [33, 34]


def test_everybody_leaves_and_comes_back() -> None:
    pair = Twins(threshold=1, **EVERYTHING)
    pair.story.add("a", [7, 1, 2, 4], sampling_params=SamplingParams(presence_penalty=1.5, prompt_logprobs=1))
    pair.story.add("b", [5, 6], sampling_params=SamplingParams(bad_words_token_ids=[[5], [1, 2]], temperature=0.9))
    pair.step({"a": 2})
    pair.step({})
    for poison in ((), ("dense",)):
        pair.step({"b": 1 if pair.story.live["b"].computed else 2, "a": 1}, full(40, 5), poison)
        pair.step({}, poison=poison)
        pair.step({"a": 1}, poison=poison)
        pair.step({}, poison=poison)
    pair.story.finish("a")
    pair.story.finish("b")
    pair.step({})
    assert pair.gpu.requests == {}
    assert pair.gpu.state_digest() == dense(MODEL, 90, **EVERYTHING).state_digest()


# -- the choice ---------------------------------------------------------------------------------------------------


def test_the_factory_builds_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODELRUNNER_LAYOUT", raising=False)
    for config, kind in (
        (RunnerConfig(), GpuModelRunner),
        (RunnerConfig(layout="dense"), DenseGpuModelRunner),
        (RunnerConfig(reorder_batch_threshold=1), DenseGpuModelRunner),
        (RunnerConfig(num_speculative_tokens=2), GpuModelRunner),
    ):
        runner = build_runner(config)
        assert type(runner) is kind
        info = runner.describe()
        assert info.layout == info.selection.layout
        assert info.selection.offered == ("slots", "dense")
    monkeypatch.setenv("MODELRUNNER_LAYOUT", "dense")
    assert build_runner(RunnerConfig()).describe().layout == "dense"
    assert load_factory("gpu") is build_runner
    assert load_stages("gpu").backend == "gpu"


@pytest.mark.parametrize(
    ("field", "value"), [("num_speculative_tokens", 2), ("initial_free_rows", tuple(range(64)))], ids=str
)
def test_what_packed_rows_lack_is_refused(field: str, value: Any) -> None:
    with pytest.raises(CapabilityError) as caught:
        build_runner(RunnerConfig(layout="dense", **{field: value}))
    assert caught.value.field == field
    with pytest.raises(CapabilityError, match="only one layout"):
        GpuModelRunner(RunnerConfig(layout="dense"))


# -- what a step costs --------------------------------------------------------------------------------------------


def with_copies(copies: Any, **config: Any) -> Any:
    runner = build_runner(RunnerConfig(layout="dense", **config))
    runner.copies = copies
    runner.load_model(ONE_GROUP)
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), 64))
    return runner


def test_a_step_is_one_copy_and_one_per_block_table() -> None:
    """Four live rows of 512 entries are 8 KiB, in one piece, whatever else the table could hold."""
    runner = dense(ONE_GROUP, max_num_reqs=8, max_model_len=2048)
    driver, sizes, copy = Driver(runner), [], runner.copies.copy
    runner.copies.copy = lambda target, source: (sizes.append(source.nbytes), copy(target, source))
    for name in "abcd":
        driver.add(name, [1, 2, 3])
    driver.step(dict.fromkeys("abcd", 3))
    driver.decode("abcd", 2)
    assert runner.block_tables.block_tables[0].shape == (8, 512)
    assert [n for n in sizes if n == 8192] == [8192] * 3
    assert len(sizes) == runner.packed.num_copies + 3 == 6
    assert runner.block_tables.bytes_committed == 8192
    driver.decode("abc", 1)
    assert runner.block_tables.bytes_committed == 6144
    driver.decode("d", 1)  # which has sat out a step, and brings all its blocks
    assert table_traffic(runner) == {
        "entries": 4 + 4 + 2, "bytes_committed": 3 * 8192 + 6144 + 2048, "entries_moved": 0, "rows_moved": 0,
    }  # fmt: skip


def test_buffers_stay_where_they_are() -> None:
    runner = dense(MODEL)
    driver, addresses = Driver(runner), set()
    for name in "ab":
        driver.add(name, [1, 2, 3])
    for counts in ({"a": 3}, {"a": 1, "b": 3}, {"b": 1}):
        driver.step(counts)
        device = (
            runner.input_ids, runner.positions, runner.seq_lens, runner.query_start_loc, runner.idx_mapping,
            runner.logits_indices, runner.expanded_idx_mapping, *runner.block_tables.input_block_tables,
            runner.block_tables.slot_mappings, runner.packed._buffer,
        )  # fmt: skip
        addresses.add(tuple(tensor.data_ptr() for tensor in device))
    assert len(addresses) == 1


def test_rows_that_stay_cost_no_kernel() -> None:
    """Nothing is moved or cleared by a step of decodes; two launches do all of a step's moves."""
    runner = dense()
    driver = Driver(runner)
    for i, name in enumerate("abcde"):
        driver.add(name, [i, 2, 3], sampling_params=SEEDED)
    driver.step(dict.fromkeys("abcde", 3))
    before = runner.kernel_launches()
    driver.decode("abcde", 2)
    after = runner.kernel_launches()
    assert after["_keep_rows_kernel"] == before["_keep_rows_kernel"]
    driver.remove("a")
    driver.remove("c")
    driver.decode("bde", 1)
    assert runner.last_step().req_ids == ("e", "b", "d")
    for name in ("_keep_rows_kernel", "_place_rows_kernel"):
        assert runner.kernel_launches()[name] == before[name] + 1
    assert table_traffic(runner)["rows_moved"] == 2


def test_the_parts_of_a_step_are_told() -> None:
    runner, told = dense(), []
    assert listen_to_parts(runner, told.append)
    run(runner, make_plan({"a": 2}, [new("a", [1, 2], [1], sampling_params=GREEDY)]))
    assert told == ["plan", "rows", "inputs", "tables", "metadata", "forward", "sample", "advance"]


# -- two steps ahead of the device --------------------------------------------------------------------------------


@pytest.mark.gpu
def test_nothing_but_the_barrier_and_a_return_waits_for_the_device() -> None:
    """And these wait for one event each, not for all that was queued."""
    runner = dense(MODEL, record=frozenset())
    driver = Driver(runner)
    for name in "abc":
        driver.add(name, range(1, 8), sampling_params=SEEDED)
    driver.step(dict.fromkeys("abc", 7))  # kernels are compiled and loaded by the first steps
    driver.step({"a": 1, "c": 1})
    driver.step({"b": 1, "c": 1})
    for counts in ({"b": 1}, {"b": 1, "c": 1}):
        plan = driver.plan(counts)
        torch.cuda.set_sync_debug_mode("error")
        try:
            runner.execute_model(plan)
            output = runner.sample_tokens()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for req_id in counts:
            driver.computed[req_id] += 1
        assert all(len(tokens) == 1 for tokens in output.get_output().sampled_token_ids)


def test_simulated_copies_are_a_stand_in_for_the_stream() -> None:
    """A runner on them works once they are made before its kernels run."""
    copies = SimulatedCopies()
    slow, quick = with_copies(copies, **SMALL), dense()
    driver = [Driver(runner) for runner in (slow, quick)]
    prepare = slow._apply_updates
    slow._apply_updates = lambda plan: (copies.run(), prepare(plan))
    told = []
    for d in driver:
        d.add("a", [1, 2, 3], sampling_params=SEEDED, seed=4)
        d.add("b", [4], sampling_params=SEEDED, seed=5)
        told.append([d.step(counts) for counts in ({"a": 3}, {"a": 1, "b": 1}, {"b": 1}, {"a": 1, "b": 1})])
    assert told[0] == told[1]
    assert copies.num_done == copies.num_queued == copies.num_copies == 8
