"""A copy that the device makes later than it was asked for: what a reused buffer does to a step, and what holds.

On a simulated stream everywhere, which is as late as can be, every time; on an NVIDIA GPU with copies that wait behind
a long kernel.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

import torch
from two_layouts import Story, resuming

from gpu_backend.copy_engine import SimulatedCopies, StreamCopies
from gpu_backend.dense.staging import Staging
from gpu_backend.layouts import build_runner
from gpu_backend.packed_copy import PackedCopy
from runner_api import (
    LogitsProcessorError,
    RunnerConfig,
    SamplingParams,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
)

pytestmark = pytest.mark.interpret
CPU = torch.device("cpu")
MODEL = WitnessConfig(vocab_size=50, groups=(WitnessGroup(4), WitnessGroup(3, sliding_window=5)))
EXAMPLE = Path(__file__).parents[2] / "examples" / "late_copy.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("late_copy", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WHERE = ["simulated", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("where", WHERE)
def test_the_example(where: str) -> None:
    seen = {design: example().positions_seen(design, where) for design in example().DESIGNS}
    first, second = example().STEPS
    assert seen == {
        "one buffer, no barrier": [second, second],
        "one buffer, barrier": [first, second],
        "a buffer used once": [first, second],
    }


# -- the stand-in for a stream ------------------------------------------------------------------------------------


def test_simulated_copies_read_their_source_when_their_turn_comes() -> None:
    stream = SimulatedCopies()
    source, target, told = torch.tensor([1, 2]), torch.zeros(2, dtype=torch.int64), []
    never, event = stream.event(), stream.event()
    stream.copy(target, source)
    event.record()
    stream.launch(lambda: told.append(target.tolist()))
    source[0] = 7
    never.synchronize()
    assert target.tolist() == [0, 0], "an event that was never recorded is not waited for"
    event.synchronize()
    assert target.tolist() == [7, 2]
    assert told == []
    source[1] = 8
    stream.run()
    event.synchronize()
    assert told == [[7, 2]]
    assert (stream.num_copies, stream.num_bytes, stream.num_queued, stream.num_done) == (1, 16, 2, 2)


def test_copies_on_the_cpu_are_made_at_once() -> None:
    copies = StreamCopies(CPU)
    target = torch.zeros(2)
    copies.copy(target, torch.ones(2))
    event = copies.event()
    event.record()
    event.synchronize()
    assert target.tolist() == [1, 1]
    assert (copies.num_copies, copies.num_bytes) == (1, 8)


# -- the barrier --------------------------------------------------------------------------------------------------


def staging(copies: Any, extra_bytes: int = 0) -> tuple[np.ndarray, Staging]:
    host = np.zeros(3, np.int64)
    return host, Staging({"x": host}, extra_bytes, CPU, copies)


def test_the_barrier_is_set_again_by_an_error_too() -> None:
    """A step that fails after it has sent something: the next one must still wait for that."""
    stream = SimulatedCopies()
    host, packed = staging(stream)

    def failing_step() -> None:
        with packed.barrier():
            host[:] = [1, 2, 3]
            packed.send()
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        failing_step()
    seen: list[Any] = []
    stream.launch(lambda: seen.append(packed.views["x"].tolist()))
    with packed.barrier():
        host[:] = 9
        packed.send()
    assert packed.views["x"].tolist() == [1, 2, 3], "made when the second step came to the barrier"
    stream.run()
    assert seen == [[1, 2, 3]]
    assert packed.views["x"].tolist() == [9, 9, 9]


def test_the_barrier_waits_for_the_last_copies_and_for_nothing_else() -> None:
    stream = SimulatedCopies()
    host, packed = staging(stream)
    with packed.barrier():
        assert stream.num_done == 0
        packed.send()
    stream.launch(lambda: None)  # the step's kernels
    with packed.barrier():
        assert stream.num_done == 1, "the copy, and no kernel behind it"
        host[:] = 5
        packed.send()


def test_a_buffer_that_grows_is_a_new_one() -> None:
    """A step with more than fits: the copies of the step before still read the old one."""
    stream = SimulatedCopies()
    host, packed = staging(stream, 16)
    packed.guarded = False
    for values, size in (([1, 2, 3], 1), ([4, 5, 6], 100), ([7, 8, 9], 100)):
        host[:] = values
        ticket = packed.add(np.full(size, values[0], np.int64))
        packed.send()
        extra = packed.extra[ticket]
    stream.run(1)
    assert packed.views["x"].tolist() == [1, 2, 3]
    stream.run()
    assert packed.views["x"].tolist() == [7, 8, 9]
    assert extra.tolist() == [7] * 100
    assert (stream.num_copies, packed.num_copies) == (5, 5)


def test_the_slots_layout_has_nothing_to_wait_for() -> None:
    stream = SimulatedCopies()
    host = np.zeros(3, np.int64)
    packed, seen = PackedCopy({"x": host}, 64, CPU, stream), []
    for step in range(6):
        with packed.barrier():
            host[:] = step
            ticket = packed.add(np.full(2, step, np.int64))
            packed.send()
        extra = packed.extra[ticket]
        stream.launch(lambda x=extra: seen.append((packed.views["x"].tolist(), x.tolist())))
    assert stream.num_done == 0
    stream.run()
    assert seen == [([step] * 3, [step] * 2) for step in range(6)]


# -- whole runners ------------------------------------------------------------------------------------------------


def make(layout: str, copies: Any = None, guarded: bool = True, **config: Any) -> Any:
    config = {"max_num_reqs": 5, "max_num_batched_tokens": 40, "max_model_len": 64, "layout": layout} | config
    runner = build_runner(RunnerConfig(**config))
    runner.copies = copies or runner.copies
    runner.load_model(MODEL)
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), 90))
    if layout == "dense":
        runner.packed.guarded = guarded
    return runner


def plans(layout: str) -> list[Any]:
    """A story that can be told without a token: prompts in chunks, one comes, one goes, one is left out for a step."""
    story, told = Story([4, 3], 90), []
    params = [SamplingParams(temperature=t) for t in (0.0, 1.0, 1.8)]
    for i, name in enumerate("abc"):
        story.add(name, [(5 * i + j) % 50 for j in range(20 - 3 * i)], sampling_params=params[i], seed=i)

    def step(counts: dict[str, int]) -> None:
        told.append(story.plans(counts)[layout])
        # what is drawn is of no matter: each request that draws goes on at once, in its row
        drawn = {name: () if story.missing(name) > n else (0,) for name, n in counts.items()}
        story.drawn(counts, drawn)

    step({"a": 7, "b": 4, "c": 3})
    step({"a": 2, "b": 6, "c": 9})
    story.finish("b")
    story.add("d", range(30, 42), sampling_params=params[2], seed=9)
    step({"c": 1, "a": 5, "d": 7})
    step({"d": 5, "a": 3})
    step({"a": 3, "c": 1, "d": 1})
    return [resuming(plan, {}) if layout == "dense" else plan for plan in told]


SENT = ("positions", "seq_lens", "query_start_loc", "input_ids", "logits_indices")


def inputs(runner: Any) -> dict[str, Any]:
    """What the host sent, as the device has it."""
    found = {name: runner.packed.views[name].tolist() for name in (*SENT, "temperature", "seeds", "idx_mapping")
             if name in runner.packed.views}  # fmt: skip
    if hasattr(runner.block_tables, "bytes_committed"):
        found["tables"] = [table.tolist() for table in runner.block_tables.input_block_tables]
    return found


def seen_by_the_device(layout: str, guarded: bool = True) -> list[dict[str, Any]]:
    """The host runs through the story without the device; then the device begins, and looks at each step's inputs."""
    stream = SimulatedCopies()
    runner, seen = make(layout, stream, guarded), []
    for plan in plans(layout):
        runner.validator.check(plan)
        runner.validator.commit(plan)
        batch = runner._prepare_on_host(plan, None)
        stream.launch(lambda: seen.append(inputs(runner)))
        runner._advance_on_host(batch)
    stream.run()
    return seen


def in_time(layout: str) -> list[dict[str, Any]]:
    """The same with a device that keeps up."""
    runner, seen = make(layout), []
    for plan in plans(layout):
        runner.validator.check(plan)
        runner.validator.commit(plan)
        batch = runner._prepare_on_host(plan, None)
        seen.append(inputs(runner))
        runner._advance_on_host(batch)
    return seen


@pytest.mark.skipif(torch.cuda.is_available(), reason="its stream is simulated on the CPU")
def test_the_device_is_steps_behind_the_host() -> None:
    right = in_time("dense")
    assert len({str(step) for step in right}) == len(right) == 5
    assert seen_by_the_device("dense") == right
    wrong = seen_by_the_device("dense", guarded=False)
    assert wrong[-1] == right[-1], "the last step's values are there"
    for late, expected in zip(wrong[:-1], right[:-1], strict=True):
        for name in (*SENT, "tables"):
            assert late[name] != expected[name], name
        assert late == right[-1], "and every step before has them too"
    assert seen_by_the_device("slots") == in_time("slots")


class Failing:
    """Fails when the third request comes."""

    arguments = ()

    def __init__(self, *args: Any) -> None:
        self.seen = 0

    def add_request(self, *args: Any) -> bool:
        self.seen += 1
        if self.seen == 3:
            raise ValueError("no third one")
        return False

    def ignore(self, *args: Any) -> None:
        pass

    validate = remove_request = move_rows = observe = apply = ignore


@pytest.mark.skipif(torch.cuda.is_available(), reason="its stream is simulated on the CPU")
def test_a_step_that_fails_leaves_the_barrier_set() -> None:
    stream = SimulatedCopies()
    runner = make("dense", stream, logits_processors=(Failing,))
    with pytest.raises(LogitsProcessorError):
        runner.execute_model(plans("dense")[0])
    assert runner.packed._last_use._place == stream.num_queued
    before = stream.num_done
    with runner.packed.barrier():
        assert stream.num_done == stream.num_queued >= before


# Tokens of each request's prompt by step. The first step brings the requests; in the others nobody comes, goes or
# moves, and there are ever fewer tokens: whatever the last step has put into the buffers lies inside of what an
# earlier one may read.
CHUNKS = {"a": (3, 9, 7, 5, 4, 2), "b": (3, 8, 6, 5, 3, 2), "c": (3, 7, 6, 4, 3, 1)}


def drawn_late(layout: str, guarded: bool, sleep: int) -> list[Any]:
    """The first tokens of the requests, whose prompts are computed without waiting, each step behind a long kernel."""
    story = Story([4, 3], 90)
    for i, (name, counts) in enumerate(CHUNKS.items()):
        prompt = [(5 * i + j) % 50 for j in range(sum(counts))]
        story.add(name, prompt, sampling_params=SamplingParams(temperature=1.0), seed=i)
    runner = make(layout, max_concurrent_batches=8)
    for i in range(6):
        counts = {name: chunks[i] for name, chunks in CHUNKS.items()}
        if i == 1 and layout == "dense":
            runner.packed.guarded = guarded
        if i > 0:
            torch.cuda._sleep(sleep)
        runner.execute_model(story.plans(counts)[layout])
        output = runner.sample_tokens()
        if i == 0:
            output.get_output()
        story.drawn(counts, dict.fromkeys(counts, ()))
    return sorted(output.get_output().tokens().items())


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "guarded"), [("dense", True), ("dense", False), ("slots", True)])
def test_a_real_late_copy(layout: str, guarded: bool) -> None:
    right = drawn_late("slots", True, 1)
    assert drawn_late("dense", True, 1) == right  # all kernels are compiled now
    assert all(len(tokens) == 1 for _, tokens in right)
    late = drawn_late(layout, guarded, 300_000_000)
    assert (late == right) == guarded
