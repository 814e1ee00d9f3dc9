"""Steps computed by hand, with their exact numbers: the measure of all other runners must be right itself."""

import dataclasses

import numpy as np
import pytest
from step_driver import force, full, make_plan, make_runner, new

from cpu_reference.block_table import BlockTables, gather_block_tables
from cpu_reference.input_batch import prepare_pos_seq_lens, prepare_query_start_loc, sort_batch_req_ids
from cpu_reference.kv_cache import reshape_and_cache
from cpu_reference.ragged import token_owners
from cpu_reference.request_state import RequestState
from cpu_reference.slot_mapping import compute_slot_mappings
from cpu_reference.staged_write import StagedWriteTensor, apply_staged_writes
from runner_api import KVCacheConfig, KVCacheGroup, KVCacheSpec, WitnessConfig, WitnessGroup


def equal(actual, expected, dtype=None):
    actual = np.asarray(actual)
    assert actual.tolist() == np.asarray(expected).tolist()
    if dtype is not None:
        assert actual.dtype == dtype


# -- three requests in one step: a decode, a decode and a prompt ---------------------------------------------


@pytest.fixture
def three():
    """R1 (40 computed, last sampled 1) in row 1023, R2 (17, last sampled 2) in row 1022; the plan brings R3."""
    runner = make_runner(max_num_reqs=1024, max_num_batched_tokens=64, max_model_len=128)
    first = make_plan({"R1": 40, "R2": 17}, [new("R1", [7] * 40, [7, 8, 9]), new("R2", [8] * 17, [10, 11])])
    runner.execute_model(first)
    runner.sample_tokens(forced=force(runner, {"R1": [1], "R2": [2]}))
    second = make_plan(
        {"R3": 6, "R1": 1, "R2": 1}, [new("R3", range(50, 56), [12])], {"R1": (40, None), "R2": (17, None)}
    )
    runner.execute_model(second)
    return runner


def test_three_requests_in_one_step(three):
    record = three.last_step()
    assert record.req_ids == ("R1", "R2", "R3")
    equal(record.idx_mapping, [1023, 1022, 1021], np.int64)
    equal(record.query_start_loc, [0, 1, 2, 8], np.int32)
    equal(three.query_start_loc[3:], [8] * 1022)
    equal(record.positions, [40, 17, 0, 1, 2, 3, 4, 5], np.int64)
    equal(record.seq_lens, [41, 18, 6], np.int32)
    equal(record.input_ids, [1, 2, 50, 51, 52, 53, 54, 55], np.int32)
    equal(record.logits_indices, [0, 1, 7], np.int64)
    equal(record.slot_mappings, [[9 * 16 + 8, 11 * 16 + 1, *range(192, 198)]], np.int64)
    equal(three.block_tables.slot_mappings[0, 8:], [-1] * 56)
    assert three.block_tables.rows_written == 1  # R3's row alone: no other request crossed a block boundary
    three.sample_tokens(forced=force(three, {"R1": [3], "R2": [4], "R3": [5]}))
    rows = [1023, 1022, 1021]
    equal(three.req_states.num_computed_tokens[rows], [41, 18, 6])
    equal(three.req_states.total_len[rows], [42, 19, 7])


def test_the_step_after_as_a_padded_decode_graph(three):
    three.sample_tokens(forced=force(three, {"R1": [3], "R2": [4], "R3": [5]}))
    plan = make_plan(dict.fromkeys(("R1", "R2", "R3"), 1), (), {"R1": (41, None), "R2": (18, None), "R3": (6, None)})
    three.execute_model(plan, descriptor=full(4, 4, uniform=1))
    record = three.last_step()
    assert (record.num_reqs, record.num_reqs_padded, record.num_tokens, record.num_tokens_padded) == (3, 4, 3, 4)
    equal(record.query_start_loc, [0, 1, 2, 3, 3])
    equal(record.seq_lens, [42, 19, 7, 0])
    equal(record.positions, [41, 18, 6])
    equal(record.input_ids, [3, 4, 5])
    equal(record.slot_mappings, [[153, 178, 198, -1]])
    equal(record.logits_indices, [0, 1, 2])
    assert not record.block_tables[0][3].any()
    assert three.block_tables.rows_written == 0  # no block boundary crossed: nothing was sent
    metadata = three._pending[0].attn_metadata["witness.0"]
    equal(metadata.seq_lens, [42, 19, 7, 0])
    assert (metadata.num_reqs, metadata.num_decodes, metadata.max_query_len, metadata.max_seq_len) == (4, 4, 1, 42)


def test_a_decode_reads_the_last_sampled_token_of_its_row(three):
    """The host has not seen the token: it comes from the row, not from the plan."""
    three.sample_tokens(forced=force(three, {"R1": [3], "R2": [4], "R3": [5]}))
    three.req_states.last_sampled_tokens[1022] = 33
    three.execute_model(make_plan({"R2": 1}, (), {"R2": (18, None)}))
    equal(three.last_step().input_ids, [33])


# -- rows and order ------------------------------------------------------------------------------------------


def test_the_first_row_is_the_last_one():
    states = RequestState(1024, 8, 0)
    assert [states.add_request(r, 1, [1], 0) for r in "abc"] == [1023, 1022, 1021]
    states.finish_requests({"b", "a"})  # sorted: a leaves first, b last
    assert states.add_request("d", 1, [1], 0) == 1022


def test_batch_order():
    assert sort_batch_req_ids({"P": 300, "D": 1, "C": 12}, {}, 1) == ["D", "C", "P"]
    counts = {"A": 1, "B": 4, "C": 4, "D": 3, "E": 20}
    drafts = {"C": [-1] * 3, "D": [-1] * 2}
    assert sort_batch_req_ids(counts, drafts, 4) == ["C", "D", "B", "A", "E"]
    assert sort_batch_req_ids({"A": 1, "B": 1}, {"B": []}, 1) == ["A", "B"]  # an empty list is no draft
    assert sort_batch_req_ids({"B": 1, "C": 7, "A": 1, "D": 7}, {}, 1) == ["B", "A", "C", "D"]  # ties: plan's order


def test_token_table_size():
    """1024 rows of 131072 tokens: 512 MiB, from the shape of a table that is never touched."""
    table = RequestState(1024, 131072, 0).all_token_ids
    assert table.shape == (1024, 131072)
    assert table.nbytes == 512 * 2**20


# -- four decodes ---------------------------------------------------------------------------------------------


def test_four_decodes():
    computed = np.int32([1000, 512, 37, 2047])
    idx_mapping = np.arange(4)
    query_start_loc, positions, seq_lens = np.full(5, -9, np.int32), np.full(4, -9), np.full(4, -9, np.int32)
    prepare_query_start_loc(np.ones(4, np.int32), 4, query_start_loc)
    prepare_pos_seq_lens(idx_mapping, query_start_loc, computed, 4, positions, seq_lens)
    equal(query_start_loc, [0, 1, 2, 3, 4], np.int32)
    equal(positions, [1000, 512, 37, 2047], np.int64)
    equal(seq_lens, [1001, 513, 38, 2048], np.int32)
    equal(query_start_loc[1:] - 1, [0, 1, 2, 3])


def test_four_decodes_through_the_runner():
    model = WitnessConfig()
    runner = make_runner(model, num_blocks=520, max_num_reqs=4, max_num_batched_tokens=4000, max_model_len=8192)
    lengths = {"a": 1000, "b": 512, "c": 37, "d": 2047}
    free = iter(range(1, 520))
    added = [new(r, [5] * n, [next(free) for _ in range(n // 16 + 1)]) for r, n in lengths.items()]
    runner.execute_model(make_plan(lengths, added))
    runner.sample_tokens().get_output()
    runner.execute_model(make_plan(dict.fromkeys(lengths, 1), (), {r: (n, None) for r, n in lengths.items()}))
    record = runner.last_step()
    equal(record.query_start_loc, [0, 1, 2, 3, 4], np.int32)
    equal(record.positions, [1000, 512, 37, 2047], np.int64)
    equal(record.seq_lens, [1001, 513, 38, 2048], np.int32)
    equal(record.logits_indices, [0, 1, 2, 3], np.int64)
    output = runner.sample_tokens()
    equal(record.cu_num_logits, [0, 1, 2, 3, 4])
    assert runner.last_step().token_ids.shape == (4, 1)
    assert runner.last_step().token_ids.dtype == np.int64
    assert [len(t) for t in output.get_output().sampled_token_ids] == [1, 1, 1, 1]
    # 512 columns of int32: 2 KiB a row, 8 KiB for the four live ones, 2 MiB for 1024 rows
    table = runner.block_tables.block_tables[0]
    assert table.shape == (4, 512)
    assert table[0].nbytes == 2048
    assert table.nbytes == 8 * 2**10
    assert table[0].nbytes * 1024 == 2 * 2**20


# -- addressing with an empty row ------------------------------------------------------------------------------


def test_addressing_with_an_empty_row():
    counts, computed = np.int32([2, 0, 1, 3]), np.int32([5, 0, 12, 1])
    table = np.int32([[2, 3], [4, 5], [6, 7], [8, 9]])
    query_start_loc, seq_lens = np.full(5, -9, np.int32), np.full(4, -9, np.int32)
    positions, slots = np.full(8, -9), np.full((1, 8), -9)
    prepare_query_start_loc(counts, 4, query_start_loc)
    prepare_pos_seq_lens(np.arange(4), query_start_loc, computed, 4, positions, seq_lens)
    compute_slot_mappings(np.arange(4), query_start_loc, positions, [8], [True], [True], 1, 0, 1, 4, [table], slots)
    equal(query_start_loc, [0, 2, 2, 3, 6])
    equal(positions[:6], [5, 6, 12, 1, 2, 3])
    equal(seq_lens, [7, 0, 13, 4])
    equal(slots[0], [21, 22, 60, 65, 66, 67, -1, -1])
    # writing eight values through it: the two without a slot go nowhere, the last place of the cache least of all
    keys, values = np.full((10, 8, 1, 1), -99), np.full((10, 8, 1, 1), -99)
    written = np.arange(8).reshape(8, 1, 1)
    reshape_and_cache(written, written * 10, slots[0], keys, values)
    flat = keys.reshape(-1)
    assert flat[79] == -99
    assert np.count_nonzero(flat != -99) == 6
    equal(flat[[21, 22, 60, 65, 66, 67]], range(6))
    equal(values.reshape(-1)[[21, 22, 60, 65, 66, 67]], range(0, 60, 10))


def test_ragged_helper():
    cumulative = np.cumsum([2, 5, 3])
    equal(cumulative, [2, 7, 10])
    owners, offsets = token_owners(np.int32([0, *cumulative]), 3)
    equal(owners, [0, 0, 1, 1, 1, 1, 1, 2, 2, 2])
    equal(offsets, [0, 1, 0, 1, 2, 3, 4, 0, 1, 2])


# -- staged writes ----------------------------------------------------------------------------------------------


def test_staged_write_packs_its_runs():
    state = StagedWriteTensor(1024, 1000, np.int32)
    state.stage_write(2, 3, [3, 1, 2])
    state.stage_write(0, 1, [-1, -2, -5])
    assert state._indices == [2, 0]
    assert state._starts == [3, 1]
    assert state._contents == [3, 1, 2, -1, -2, -5]
    assert state._cu_lens == [3, 6]
    assert not state.table.any()  # nothing is applied before it is told to
    state.apply()
    expected = np.zeros((1024, 1000), np.int32)
    expected[2, 3:6], expected[0, 1:4] = [3, 1, 2], [-1, -2, -5]
    assert np.array_equal(state.table, expected)
    assert (state.rows_written, state.total_rows_written) == (2, 2)
    state.apply()
    assert (state.rows_written, state.total_rows_written) == (0, 2)
    assert np.array_equal(state.table, expected)


def test_staged_writes_as_a_stage():
    base = np.zeros((1024, 1000), np.int32)
    packed = np.int32([3, 1, 2, -1, -2, -5])
    apply_staged_writes(np.int32([2, 0]), np.int32([3, 1]), packed, np.int32([3, 6]), 2, base)
    equal(base[2, :8], [0, 0, 0, 3, 1, 2, 0, 0])
    equal(base[0, :8], [0, -1, -2, -5, 0, 0, 0, 0])
    assert np.count_nonzero(base) == 6


def test_an_empty_run_shifts_nothing():
    state = StagedWriteTensor(4, 4, np.int32)
    state.stage_write(0, 0, [])
    state.stage_write(1, 0, [5])
    state.stage_write(2, 2, [])
    state.stage_write(3, 1, [6, 7])
    state.apply()
    equal(state.table, [[0] * 4, [5, 0, 0, 0], [0] * 4, [0, 6, 7, 0]])
    assert state.rows_written == 2


def test_a_run_longer_than_a_chunk():
    state = StagedWriteTensor(2, 5000, np.int32)
    state.stage_write(1, 7, range(3000))
    state.apply()
    equal(state.table[1, 7:3007], range(3000))
    assert np.count_nonzero(state.table) == 2999


# -- rebuilding against sending differences ---------------------------------------------------------------------


@pytest.mark.parametrize(("lifetime", "least", "most"), [((50, 450), 50, 1e9), ((2, 6), 0, 6)])
def test_differences_are_far_fewer_than_a_rebuild(lifetime, least, most):
    """Long-lived requests: a rebuild of all rows writes over 50 times more entries. Short-lived ones: nothing won."""
    rng = np.random.default_rng(1)
    spec = KVCacheSpec(16, 1, 1, "int64", kind="token_position")
    tables = BlockTables(KVCacheConfig(2, (KVCacheGroup(("layer",), spec),)), 256, 1, 2048, [0])
    free, active = list(range(256)), {}
    rebuilt = sent = 0
    for step in range(400):
        for _ in range(rng.integers(3)):
            if not free:
                break
            row, tokens = free.pop(), int(rng.integers(200, 1000))
            active[step, row] = [row, tokens, int(rng.integers(*lifetime))]
            blocks = [1] * (tokens // 16 + 1)
            tables.append_block_ids(row, [blocks], overwrite=True)
            sent += len(blocks)
        for key, request in list(active.items()):
            row, tokens, remaining = request
            rebuilt += tokens // 16 + 1
            if (tokens + 1) % 16 == 1:
                tables.append_block_ids(row, [[1]], overwrite=False)
                sent += 1
            request[1:] = tokens + 1, remaining - 1
            if remaining == 1:
                free.append(row)
                del active[key]
        tables.apply_staged_writes()
    assert tables.total_values_written == sent
    assert least < rebuilt / sent < most


# -- drafts -----------------------------------------------------------------------------------------------------


@pytest.fixture
def drafting():
    return make_runner(
        WitnessConfig(vocab_size=128, groups=(WitnessGroup(4),)), max_num_reqs=8, max_num_batched_tokens=32,
        max_model_len=64, num_speculative_tokens=3,
    )  # fmt: skip


def test_a_speculative_run(drafting):
    runner, states = drafting, drafting.req_states
    # 1 two prompts, one of them cut
    runner.execute_model(
        make_plan({"A": 5, "B": 6}, [new("A", range(11, 16), [1, 2]), new("B", range(21, 31), [3, 4])])
    )
    record = runner.last_step()
    assert record.req_ids == ("A", "B")
    equal(record.idx_mapping, [7, 6])
    equal(record.query_start_loc, [0, 5, 11])
    equal(record.slot_mappings, [[4, 5, 6, 7, 8, 12, 13, 14, 15, 16, 17]])
    equal(record.logits_indices, [4, 10])
    runner.sample_tokens(forced=force(runner, {"A": [40]}, {"A": [60, 61, 62]}))
    equal(runner.last_step().num_sampled, [1, 0])
    equal(runner.last_step().num_rejected, [0, 0])
    equal(states.num_computed_tokens[[7, 6]], [5, 6])
    equal(states.total_len[[7, 6]], [6, 10])
    equal(states.next_prefill_tokens[0, [7, 6]], [0, 27])
    # 2 A verifies three drafts, B computes the rest of its prompt
    runner.execute_model(make_plan({"B": 4, "A": 4}, (), {"A": (5, [5]), "B": (6, [6])}, {"A": [-1] * 3}))
    record = runner.last_step()
    assert record.req_ids == ("A", "B")
    equal(record.query_start_loc, [0, 4, 8])
    equal(record.cu_num_logits, [0, 4, 5])
    equal(record.logits_indices, [0, 1, 2, 3, 7])
    equal(record.expanded_idx_mapping, [7, 7, 7, 7, 6])
    equal(record.expanded_local_pos, [0, 1, 2, 3, 0])
    equal(record.input_ids, [40, 60, 61, 62, 27, 28, 29, 30])
    equal(record.positions, [5, 6, 7, 8, 6, 7, 8, 9])
    equal(record.seq_lens, [9, 10])
    equal(record.slot_mappings, [[9, 10, 11, 20, 18, 19, 24, 25]])
    equal(record.draft_token_ids, [[60, 61, 62], [0, 0, 0]])
    runner.sample_tokens(forced=force(runner, {"A": [60, 61, 44], "B": [45]}, {"A": [80, 81, 82], "B": [90, 91, 92]}))
    equal(runner.last_step().num_sampled, [3, 1])
    equal(runner.last_step().num_rejected, [1, 0])
    equal(states.num_computed_tokens[[7, 6]], [8, 10])
    equal(states.total_len[[7, 6]], [9, 11])
    equal(states.last_sampled_tokens[[7, 6]], [44, 45])
    equal(states.all_token_ids[7, :9], [11, 12, 13, 14, 15, 40, 60, 61, 44])
    # 3 the plan still believes that A computed 9: positions follow the row, which knows 8
    runner.execute_model(
        make_plan({"A": 4, "B": 4}, (), {"A": (9, [7]), "B": (10, [8])}, {"A": [-1] * 3, "B": [-1] * 3}),
        descriptor=full(8, 2, uniform=4),
    )
    record = runner.last_step()
    equal(record.positions, [8, 9, 10, 11, 10, 11, 12, 13])
    equal(record.seq_lens, [12, 14])
    equal(record.input_ids, [44, 80, 81, 82, 45, 90, 91, 92])
    equal(record.slot_mappings, [[20, 21, 22, 23, 26, 27, 32, 33]])
    equal(record.logits_indices, range(8))
    equal(states.num_computed_tokens_np[[7, 6]], [9, 10])
    assert runner._pending[0].attn_metadata["witness.0"].max_seq_len == 14  # the bound: 9 + 4 and 10 + 4


def test_a_padded_prefill_tail(drafting):
    runner = drafting
    runner.execute_model(make_plan({"P": 5}, [new("P", range(1, 7), [1, 2, 3])]))
    runner.sample_tokens(forced=force(runner, {}))
    runner.execute_model(make_plan({"P": 4}, (), {"P": (5, None)}, {"P": [-1] * 3}), descriptor=full(4, 1, uniform=4))
    record = runner.last_step()
    equal(record.input_ids, [6, 0, 0, 0])
    equal(record.positions, [5, 6, 7, 8])
    equal(record.seq_lens, [9])
    equal(record.slot_mappings, [[9, 10, 11, 12]])
    equal(record.cu_num_logits, [0, 4])
    runner.sample_tokens(forced=force(runner, {"P": [50]}, {"P": [1, 2, 3]}))
    equal(runner.last_step().num_sampled, [1])
    equal(runner.last_step().num_rejected, [3])
    row = runner.req_states.req_id_to_row["P"]
    assert runner.req_states.num_computed_tokens[row] == 6
    assert runner.req_states.total_len[row] == 7


# -- sliding window ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("computed", "hidden"), [(31, 0), (40, 0), (46, 0), (47, 1), (48, 1), (100, 4)])
def test_columns_behind_a_window_become_null(computed, hidden):
    spec = KVCacheSpec(16, 1, 1, "int64", kind="token_position", sliding_window=32)
    assert spec.window_reach == 31
    source, out = np.arange(1, 9, dtype=np.int32)[None], np.full((1, 8), -9, np.int32)
    gather_block_tables(
        np.zeros(1, np.int64), np.int32([computed]), np.int32([[8]]), [16], [spec.window_reach], 1, 1, [source], [out]
    )
    equal(out[0], [0] * hidden + list(range(1 + hidden, 9)))


def test_records_are_not_changed_by_later_steps(three):
    record = three.last_step()
    before = {f.name: np.copy(getattr(record, f.name)) for f in dataclasses.fields(record) if f.name == "input_ids"}
    three.sample_tokens()
    three.execute_model(make_plan({"R1": 1}, (), {"R1": (41, None)}))
    assert np.array_equal(record.input_ids, before["input_ids"])
