"""Packed rows of the GPU runner beside the twin's: every field, on the host or on the device, follows its request.

And that no array by row is left undeclared, whatever memory it lives in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

import torch
from step_driver import make_plan, new
from two_layouts import Counting, make_layout

import cpu_reference.dense.block_table as cpu_tables
import cpu_reference.dense.inputs as cpu_inputs
import cpu_reference.dense.rows as cpu_rows
from gpu_backend.copy_engine import StreamCopies
from gpu_backend.dense.block_table import DenseBlockTables
from gpu_backend.dense.inputs import prepare_dense_inputs
from gpu_backend.dense.row_fields import RowFields
from gpu_backend.dense.rows import CachedRequest, DenseRows
from gpu_backend.dense.staging import Staging
from gpu_backend.triton_support import resolve_device
from runner_api import (
    CallOrderError,
    ReasoningConfig,
    RunnerError,
    SamplingParams,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
)

pytestmark = pytest.mark.interpret
DEVICE, _ = resolve_device("auto")
ROWS, LONGEST = 6, 12


# -- every field follows its request ------------------------------------------------------------------------------


class Two:
    """The twin's rows and this backend's, with two more tables by row each: one whole, one as long as is said."""

    def __init__(self) -> None:
        self.cpu, self.gpu = cpu_rows.DenseRows(ROWS, LONGEST), DenseRows(ROWS, LONGEST, DEVICE)
        self.lengths = [f.declare("length", np.zeros(ROWS, np.int32)) for f in (self.cpu.fields, self.gpu.fields)]
        self.whole = self.cpu.fields.declare("whole", np.zeros((ROWS, 3), np.float32))
        self.ragged = self.cpu.fields.declare("ragged", np.zeros((ROWS, 9), np.int32))
        self.whole_there = torch.zeros((ROWS, 3), device=DEVICE)
        self.ragged_there = torch.zeros((ROWS, 9), dtype=torch.int32, device=DEVICE)
        length = self.lengths[1]
        self.gpu.fields.declare_on_device(
            {"all_token_ids": self.gpu.all_token_ids, "whole": self.whole_there, "ragged": self.ragged_there},
            lambda row: [int(self.gpu.total_len_np[row]), 3, int(length[row])],
        )
        self.packed = Staging(self.gpu.host_tables(), 4096, DEVICE, StreamCopies(DEVICE))
        self.gpu.bind(self.packed)
        self.born = 0

    def step(self, leaving: set[int], coming: int, threshold: int | None, seed: int, spoil: bool) -> None:
        rng = np.random.default_rng(seed)
        if spoil:  # what nobody may read, and what must not travel into the free rows
            for row in range(self.gpu.num_reqs):
                self.ragged_there[row, int(self.lengths[1][row]) :] = -7
                self.gpu.all_token_ids[row, int(self.gpu.total_len_np[row]) :] = -7
                self.ragged[row, int(self.lengths[0][row]) :] = -7
                self.cpu.all_token_ids[row, int(self.cpu.total_len[row]) :] = -7
            self.gpu.fields.spoilt = True
        for rows in (self.cpu, self.gpu):
            rows.begin_step()
        # 1 out
        for row in leaving:
            if row < self.cpu.num_reqs and self.cpu.req_ids[row] is not None:
                assert self.cpu.remove(self.cpu.req_ids[row]) == self.gpu.remove(self.gpu.req_ids[row]) == row
        # 2 in
        newcomers = []
        for _ in range(min(coming, ROWS - self.cpu.num_reqs)):
            self.born += 1
            tokens = rng.integers(1, 99, rng.integers(1, LONGEST)).tolist()
            request = new(f"r{self.born}", tokens, ([],), int(rng.integers(0, 3)), prompt=tokens[:4])
            added = [kind.announced_by(request) for kind in (cpu_rows.CachedRequest, CachedRequest)]
            row = self.cpu.add(added[0])
            assert self.gpu.add(added[1]) == row
            newcomers.append(request.req_id)
        # 3 about
        for rows in (self.cpu, self.gpu):
            rows.condense()
            rows.reorder(lambda name: 1 + int(name[1:]) % 3, threshold)
        assert self.cpu.moves == self.gpu.moves
        for req_id in newcomers:
            self.gpu.stage_tokens(req_id)
        self.gpu.pack(self.packed)
        self.packed.send()
        self.gpu.apply_staged_writes(self.packed)
        # 4 what newcomers bring to the other tables, and what kernels add to tokens
        for req_id in newcomers:
            row = self.gpu.req_id_to_row[req_id]
            n = int(rng.integers(0, 10))
            values, more = rng.integers(1, 2**31, n).astype(np.int32), rng.normal(size=3).astype(np.float32)
            for length in self.lengths:
                length[row] = n
            self.ragged[row, :n], self.whole[row] = values, more
            self.ragged_there[row, :n] = torch.from_numpy(values)
            self.whole_there[row] = torch.from_numpy(more)
        for row in range(self.gpu.num_reqs):
            total = int(self.gpu.total_len_np[row])
            if total < LONGEST and rng.random() < 0.5:
                self.gpu.all_token_ids[row, total] = self.cpu.all_token_ids[row, total] = int(rng.integers(100, 200))
                self.gpu.total_len_np[row] = self.cpu.total_len[row] = total + 1

    def compare(self) -> None:
        here, there = self.cpu, self.gpu
        assert here.req_id_to_row == there.req_id_to_row
        for name in ("prompt_len", "total_len", "num_computed_tokens"):
            assert getattr(here, name).tolist() == getattr(there, f"{name}_np").tolist(), name
        assert there.all_token_ids.tolist() == here.all_token_ids.tolist()
        assert self.whole_there.tolist() == self.whole.tolist()
        assert self.ragged_there.tolist() == self.ragged.tolist()
        assert there.unowned() == here.unowned()
        for row in range(ROWS):
            n = int(there.num_known_np[row])
            assert there.known_token_ids_np[row].tolist() == [*here.all_token_ids[row, :n], *[0] * (LONGEST - n)]


STEPS = st.lists(
    st.tuples(
        st.sets(st.integers(0, ROWS - 1), max_size=4), st.integers(0, 4), st.sampled_from([None, 1, 2]),
        st.integers(0, 2**20),
    ),
    max_size=6,
)  # fmt: skip


@given(STEPS, st.integers(0, 9))
@settings(max_examples=40)
def test_all_fields_follow_as_the_twins_do(steps: list[Any], spoilt_at: int) -> None:
    two = Two()
    for i, (leaving, coming, threshold, seed) in enumerate(steps):
        two.step(leaving, coming, threshold, seed, i == spoilt_at)
        if not two.gpu.fields.spoilt:
            two.compare()
        else:  # of spoilt rows only the free ones, which are clean, and what is defined
            free = slice(two.gpu.num_reqs, None)
            assert not two.ragged_there[free].any()
            assert not two.gpu.all_token_ids[free].any()
            assert two.gpu.unowned() == two.cpu.unowned()
            for row in range(two.gpu.num_reqs):
                n, total = int(two.lengths[0][row]), int(two.cpu.total_len[row])
                assert two.ragged_there[row, :n].tolist() == two.ragged[row, :n].tolist()
                assert two.gpu.all_token_ids[row, :total].tolist() == two.cpu.all_token_ids[row, :total].tolist()
                assert two.whole_there[row].tolist() == two.whole[row].tolist()


def test_only_what_is_defined_is_moved() -> None:
    """Counted by field: a move of a row takes its entries, a swap those of both, a clearing none."""
    two = Two()
    two.step(set(), 4, None, 1, False)
    total, ragged = two.gpu.total_len_np.tolist(), two.lengths[1].tolist()
    two.step({0}, 0, None, 2, False)  # the last one moves into row 0
    moved = two.gpu.fields.moved
    assert (moved["all_token_ids"], moved["ragged"], moved["whole"]) == (total[3], ragged[3], 3)
    assert moved["known_token_ids"] <= total[3]
    assert moved["total_len"] == 1
    two.step({2}, 0, None, 3, False)  # the last one leaves: nothing moves
    assert moved["whole"] == 3
    assert two.gpu.fields.values_moved == sum(moved.values())


def test_declarations_that_make_no_sense() -> None:
    fields = RowFields(3)
    table = torch.ones((3, 2), dtype=torch.int32, device=DEVICE)
    fields.declare_on_device({"a": table}, lambda row: [2])
    assert not table.any()
    host = fields.declare("h", np.ones((3, 2), np.int32), 5)
    assert (host == 5).all()
    for name, other, what in (
        ("a", torch.zeros((3, 2), device=DEVICE), "twice"), ("b", torch.zeros((4, 2), device=DEVICE), "by row"),
        ("c", table, "two names"),
    ):  # fmt: skip
        with pytest.raises(RunnerError, match=what):
            fields.declare_on_device({name: other}, lambda row: [2])
    for name, array, what in (("a", np.zeros(3), "twice"), ("b", np.zeros(4), "by row"), ("c", host, "two names")):
        with pytest.raises(RunnerError, match=what):
            fields.declare(name, array)
    assert [f.name for f in fields] == ["a", "h"]


def test_who_leaves_does_so_before_holes_are_filled() -> None:
    rows = DenseRows(4, 8, DEVICE)
    rows.add(CachedRequest.announced_by(new("a", [1], ([],))))
    with pytest.raises(CallOrderError, match="after holes were filled"):
        rows.remove("a")


# -- nothing is left undeclared -----------------------------------------------------------------------------------

N = 37  # no other size of the runner below

# Arrays with an axis of N that no request owns a row of, with the reason.
NOT_BY_ROW = {
    **dict.fromkeys(
        (
            "idx_mapping_np", "num_scheduled_tokens_np", "num_logits_np", "seq_lens_np", "logits_indices_np",
            "num_rejected", "packed.tables['expanded_local_pos']",
        ),
        "built by each step, by batch index",
    ),
    "block_tables.input_block_tables[0]": "committed by each step",
    "block_tables.input_block_tables[1]": "committed by each step",
    "block_tables._sent[0]": "what a commit sends where a window hides entries",
    "req_states.last_sampled_tokens": "of the latest step, by the row that a request had in it",
    "sampler.custom.edits": "moved by CustomProcessors.move_rows, beside the tables of processors",
    **{f"output_ring[{i}][{j}]": "of one step, by batch index" for i in range(2) for j in range(3)},
}  # fmt: skip


def memory(array: Any) -> int:
    """Where an array's memory begins, whoever has a view of it."""
    if isinstance(array, torch.Tensor):
        return array.untyped_storage().data_ptr()
    while array.base is not None and isinstance(array.base, np.ndarray):
        array = array.base
    return array.ctypes.data


def undeclared(runner: Any) -> dict[str, Any]:
    """Paths of all arrays with an axis of N that share no memory with a declared field, nor with a former finding.

    The device's copy of what the host sends is the step's own, made anew by each: it is looked at on the host.
    """
    known = {memory(field.table) for field in runner.req_states.fields}
    known |= {memory(table) for table in runner.block_tables._pinned} | {memory(runner.packed._arena)}
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def walk(value: Any, path: str) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, (np.ndarray, torch.Tensor)):
            if N in value.shape and 0 not in value.shape and memory(value) not in known:
                found[path] = value
                known.add(memory(value))
        elif isinstance(value, dict):
            assert not any(isinstance(key, (int, np.integer)) for key in value), f"{path} is kept by row, unseen"
            for key, item in value.items():
                walk(item, f"{path}[{key!r}]")
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                walk(item, f"{path}[{i}]")
        elif type(value).__module__.startswith("gpu_backend"):
            for owner in type(value).__mro__:
                for name in getattr(owner, "__slots__", ()):
                    walk(getattr(value, name), f"{path}.{name}")
            for name, item in vars(value).items() if hasattr(value, "__dict__") else ():
                walk(item, f"{path}.{name}")

    passing = ("kv_caches", "_record", "_record_inputs", "_record_outcome", "_outputs", "_pending", "_model")
    for name, value in vars(runner).items():
        if name not in passing:
            walk(value, name)
    return found


def scanned_runner() -> Any:
    """After a step in which everything is in use."""
    model = WitnessConfig(vocab_size=40, groups=(WitnessGroup(4, sliding_window=5), WitnessGroup(3)))
    runner = make_layout(
        "dense", model, 30, backend="gpu", max_num_reqs=N, max_model_len=16, max_num_batched_tokens=24,
        logits_processors=(Counting,), reasoning=ReasoningConfig((1,), (2, 3)),
    )  # fmt: skip
    params = SamplingParams(
        prompt_logprobs=1, logprobs=1, presence_penalty=1.0, thinking_token_budget=3, bad_words_token_ids=[[5]]
    )
    runner.execute_model(make_plan({"a": 2}, [new("a", [1, 2, 3, 4], ([1], [1, 2]), sampling_params=params)]))
    runner.sample_tokens()
    return runner


def test_every_array_by_row_is_declared() -> None:
    runner = scanned_runner()
    assert undeclared(runner).keys() == NOT_BY_ROW.keys()
    sampler = runner.sampler
    assert len(list(runner.req_states.fields)) == 12 + len(sampler.row_tables()) + len(sampler.unsent_tables())


@pytest.mark.parametrize(
    "change",
    [
        lambda r: setattr(r, "extra", np.zeros(N)),
        lambda r: setattr(r, "extra", torch.zeros(3, N)),
        lambda r: setattr(r.sampler, "seeds_np", r.sampler.seeds_np.copy()),
        lambda r: setattr(r.sampler.steps[0], "extra", [torch.zeros((2, N))]),
        lambda r: setattr(r.sampler.penalties, "output_counts", r.sampler.penalties.output_counts.clone()),
        lambda r: setattr(r.block_tables, "num_blocks_np", r.block_tables.num_blocks_np.copy()),
    ],
)
def test_the_scan_sees_what_is_not_declared(change: Callable[[Any], None]) -> None:
    runner = scanned_runner()
    before = undeclared(runner).keys()
    change(runner)
    assert len(undeclared(runner).keys() - before) == 1


def test_the_scan_sees_what_is_kept_in_a_dict_by_row() -> None:
    runner = scanned_runner()
    runner.sampler.prompt_logprobs.by_row = {3: []}
    with pytest.raises(AssertionError, match="kept by row"):
        undeclared(runner)


# -- blocks and inputs --------------------------------------------------------------------------------------------


def test_commits_are_the_twins() -> None:
    """Whole rows, hidden entries, blank padding; and what each of them says that it sent."""
    rng = np.random.default_rng(3)
    model = WitnessConfig(groups=(WitnessGroup(4, sliding_window=6), WitnessGroup(16)))
    kv, reach = group_kv_cache_specs(model.kv_cache_specs(), 500), (5, 0)
    fields = RowFields(ROWS)
    there = DenseBlockTables(kv, fields, 64, 96, reach, DEVICE, StreamCopies(DEVICE))
    here = cpu_tables.DenseBlockTables(kv, cpu_rows.DenseRows(ROWS, 96).fields, 64, 96, reach)
    for row in range(ROWS):
        for overwrite in (True, False, False):
            blocks = [rng.integers(1, 500, rng.integers(0, 4)).tolist() for _ in range(2)]
            for tables in (here, there):
                tables.append_block_ids(row, blocks, overwrite=overwrite)
    for num_reqs, num_rows in ((ROWS, ROWS), (4, 6), (2, 2), (3, 5)):
        computed = rng.integers(0, 60, ROWS).astype(np.int32)
        for tables in (here, there):
            tables.commit(computed, num_reqs, num_rows)
        for mine, its in zip(there.input_block_tables, here.input_block_tables, strict=True):
            assert mine[:num_rows].tolist() == its[:num_rows].tolist()
        assert there.bytes_committed == here.bytes_committed
    assert there.traffic() == here.traffic()
    assert [t.tolist() for t in there.block_tables] == [t.tolist() for t in here.block_tables]


def test_inputs_are_the_twins() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        n, width = int(rng.integers(1, 6)), int(rng.integers(8, 20))
        arguments = (
            rng.integers(1, 4, n).astype(np.int32), rng.integers(0, width - 4, 6).astype(np.int32),
            rng.integers(0, 99, (6, width)).astype(np.int32), n,
        )  # fmt: skip
        outputs = [
            [np.full(7, -9, np.int32), np.full(6, -9, np.int32), np.full(20, -9, np.int64), np.full(20, -9, np.int32)]
            for _ in range(2)
        ]
        cpu_inputs.prepare_dense_inputs(*arguments, *outputs[0])
        prepare_dense_inputs(*arguments, *outputs[1])
        assert [a.tolist() for a in outputs[1]] == [a.tolist() for a in outputs[0]]
