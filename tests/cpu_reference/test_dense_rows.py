"""Packed rows: who stands where after leaving, coming, condensing and reordering, and that everything came along.

Worked examples of condense and reorder were made with vLLM's own code.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from step_driver import make_plan, new
from two_layouts import make_layout

from cpu_reference.dense.block_table import DenseBlockTables
from cpu_reference.dense.inputs import prepare_dense_inputs
from cpu_reference.dense.row_fields import RowFields
from cpu_reference.dense.rows import CachedRequest, DenseRows
from cpu_reference.sample.sampler import Sampler
from runner_api import (
    CallOrderError,
    ReasoningConfig,
    RunnerConfig,
    RunnerError,
    SamplingParams,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
)
from runner_api.logits_processors import RowMove

MODEL = WitnessConfig(vocab_size=40, groups=(WitnessGroup(4), WitnessGroup(3, sliding_window=5)))


def request(req_id, tokens=(1,), computed=0, prompt_len=None):
    known = new(req_id, list(tokens), ([], []), computed, prompt=list(tokens)[:prompt_len])
    return CachedRequest.announced_by(known)


def rows_of(*req_ids, max_num_reqs=8):
    """A step in which these come, in this order; then the next step begins."""
    rows = DenseRows(max_num_reqs, 16)
    for req_id in req_ids:
        rows.add(request(req_id))
    rows.condense()
    rows.begin_step()
    return rows


def order(rows):
    assert rows.req_id_to_row == {req_id: row for row, req_id in enumerate(rows.req_ids[: rows.num_reqs])}
    assert all(req_id is None for req_id in rows.req_ids[rows.num_reqs :])
    return "".join(rows.req_ids[: rows.num_reqs])


# -- condense -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "leave", "come", "after", "moves"),
    [
        ("ABCDE", "BD", "", "AEC", [(4, 1)]),
        ("ABCD", "AC", "X", "XBD", [(3, 2)]),
        ("ABCDEF", "ABC", "", "FED", [(5, 0), (4, 1), (3, 2)]),
        ("ABC", "C", "", "AB", []),
        ("ABC", "AB", "XYZ", "XYCZ", []),
        ("ABC", "ABC", "", "", []),
        ("", "", "AB", "AB", []),
        ("A", "A", "B", "B", []),
        ("ABCDEFGH", "H", "I", "ABCDEFGI", []),
        ("ABCDEFGH", "AH", "", "GBCDEF", [(6, 0)]),
    ],
)
def test_condense(before, leave, come, after, moves):
    """The last ones move into the lowest holes that nobody filled, and no one else moves."""
    rows = rows_of(*before)
    for req_id in leave:
        rows.remove(req_id)
    for req_id in come:
        rows.add(request(req_id))
    rows.condense()
    assert order(rows) == after
    assert rows.moves == [RowMove(source, target) for source, target in moves]
    assert rows.num_condense_moves == len(moves)


def test_who_leaves_does_so_before_holes_are_filled():
    """Else the row would be taken for a hole of this step that is not one any more."""
    rows = rows_of(*"ABC")
    rows.remove("A")
    rows.add(request("X"))
    with pytest.raises(CallOrderError, match="after holes were filled"):
        rows.remove("B")
    rows.condense()
    with pytest.raises(CallOrderError):
        rows.remove("B")
    assert order(rows) == "XBC"
    rows.begin_step()
    assert rows.remove("B") == 1
    assert rows.remove("B") is None
    assert rows.remove("never seen") is None


# -- reorder ------------------------------------------------------------------------------------------------------


# Name to (computed, prompt length, scheduled): D decode, E short extend, L long extend, P fresh prefill.
REQUESTS = {
    "P": (0, 6, 6), "Q": (0, 1, 1), "D": (9, 6, 1), "C": (12, 6, 1), "E": (3, 6, 1), "F": (4, 6, 1), "L": (8, 14, 6),
}  # fmt: skip


@pytest.mark.parametrize(
    ("before", "threshold", "after", "swaps"),
    [
        ("PDECL", 1, "CDELP", [(0, 3), (3, 4)]),
        ("LPD", 1, "DLP", [(0, 2), (2, 1)]),
        ("QDC", 1, "CDQ", [(0, 2)]),  # a first chunk of one token is a prefill
        ("DC", 1, "DC", []),
        ("CD", 1, "CD", []),  # who stands in its region stays
        ("EDPL", 1, "DELP", None),
        ("LEDP", 6, "DELP", None),  # a long extend of six tokens is short for this threshold
        ("PLEDC", None, "PLEDC", []),
        ("PLDEQFC", 1, "DCFELPQ", None),
        ("", 1, "", []),
    ],
)
def test_reorder(before, threshold, after, swaps):
    rows = DenseRows(8, 16)
    for name in before:
        computed, prompt_len, _ = REQUESTS[name]
        rows.add(request(name, range(15), computed, prompt_len))
    rows.condense()
    rows.reorder(lambda name: REQUESTS[name][2], threshold)
    assert order(rows) == after
    if swaps is not None:
        assert rows.moves == [RowMove(a, b, swap=True) for a, b in swaps]
    assert rows.num_swaps == len(rows.moves)


# -- everything comes along ---------------------------------------------------------------------------------------


def all_fields(max_num_reqs=7):
    """The rows of a runner, with all that blocks and sampling keep of them."""
    config = RunnerConfig(max_num_reqs=max_num_reqs, max_model_len=16, reasoning=ReasoningConfig((1,), (2, 3)))
    rows = DenseRows(max_num_reqs, 16)
    DenseBlockTables(group_kv_cache_specs(MODEL.kv_cache_specs(), 9), rows.fields, 32, 16, (0, 4))
    for name, table in Sampler(config, MODEL.vocab_size, rows).row_tables().items():
        rows.fields.declare(f"sampling {name}", table, table[0].copy())
    return rows


def fill(fields, row, rng):
    """Give every field of the row contents of its own; what each of them holds now, as far as it is defined."""
    counts = {id(f.count): f.count for f in fields if f.count is not None}
    for count in counts.values():
        widths = [f.table.shape[1] for f in fields if f.count is count]
        count[row] = rng.integers(0, min(widths) + 1)
    for f in fields:
        if f.name != "req_ids" and not any(f.table is count for count in counts.values()):
            f.table[row] = f.empty  # what `add` has written and is not defined any more
            values = f.table[row : row + 1].reshape(-1)[: f.length(row)]
            values[...] = rng.integers(1, 2**30, len(values))
    return contents(fields, row)


def contents(fields, row):
    return {f.name: f.table[row : row + 1].reshape(-1).tolist() for f in fields}


def empty(fields):
    return {f.name: np.broadcast_to(f.empty, f.table.shape)[:1].reshape(-1).tolist() for f in fields}


STEPS = st.lists(
    st.tuples(
        st.sets(st.integers(0, 6), max_size=5),  # rows whose requests leave
        st.integers(0, 4),  # how many come
        st.sampled_from([None, 1, 2]),  # threshold
        st.integers(0, 2**20),  # of counters, lengths and contents
    ),
    max_size=8,
)


@given(STEPS)
def test_every_field_follows_its_request(steps):
    """Against a dict of rows: each request keeps all contents of all fields, and rows of nobody are empty."""
    rows, kept, born = all_fields(), {}, 0
    cleared = empty(rows.fields)
    place = {}  # request by row, from what processors are told: removed, added, moved
    for leaving, coming, threshold, seed in steps:
        rng = np.random.default_rng(seed)
        rows.begin_step()
        for row in leaving:
            if row < rows.num_reqs and rows.req_ids[row] is not None:
                del kept[rows.req_ids[row]], place[row]
                assert rows.remove(rows.req_ids[row]) == row
        for _ in range(min(coming, 7 - len(kept))):
            born += 1
            name = f"r{born}"
            row = rows.add(request(name, range(rng.integers(1, 17))))
            fill(rows.fields, row, rng)
            rows.num_computed_tokens[row] = rng.integers(0, 3)
            rows.prompt_len[row] = rng.integers(0, 3)
            kept[name] = contents(rows.fields, row)
            place[row] = name
        n = len(kept)
        holes = sum(row >= n for row in rows.req_id_to_row.values())
        rows.condense()
        assert len(rows.moves) == holes
        rows.reorder(lambda name: 1 + int(name[1:]) % 3, threshold)
        for move in rows.moves:
            if move.swap:
                place[move.source], place[move.target] = place[move.target], place[move.source]
            else:
                place[move.target] = place.pop(move.source)
        # who stands where
        assert rows.num_reqs == n
        assert place == dict(enumerate(rows.req_ids[:n]))
        assert rows.req_id_to_row == {name: row for row, name in place.items()}
        # with what
        for row in range(7):
            assert contents(rows.fields, row) == (kept[place[row]] if row < n else cleared)
        if n < 7:
            assert rows.unowned() == all_fields().unowned()


def test_a_swap_changes_both_rows():
    """Two views of one table: a swap without a copy would leave one of the requests twice."""
    fields = RowFields(3)
    table = fields.declare("table", np.zeros((3, 4), np.int32))
    count = np.zeros(3, np.int32)
    ragged = fields.declare("ragged", np.zeros((3, 4), np.int32), -1, count)
    fields.declare("count", count)
    table[...] = np.arange(12).reshape(3, 4)
    count[...] = [1, 0, 3]
    ragged[0, :1], ragged[2, :3] = 7, [4, 5, 6]
    fields.swap(0, 2)
    assert table.tolist() == [[8, 9, 10, 11], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert ragged.tolist() == [[4, 5, 6, -1], [-1] * 4, [7, -1, -1, -1]]
    assert count.tolist() == [3, 0, 1]
    assert fields.values_moved == 2 * (4 + 3 + 1)
    fields.move(2, 1)
    assert table.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3], [0, 0, 0, 0]]
    assert ragged.tolist() == [[4, 5, 6, -1], [7, -1, -1, -1], [-1] * 4]
    assert fields.values_moved == 16 + 4 + 1 + 1


def test_declarations_that_make_no_sense():
    fields = RowFields(3)
    table = fields.declare("a", np.ones((3, 2)), 5)
    assert (table == 5).all()
    for name, other, what in (
        ("a", np.zeros(3), "twice"), ("b", np.zeros(4), "by row"), ("c", table, "two names"), ("d", table[:, 1], "two"),
    ):  # fmt: skip
        with pytest.raises(RunnerError, match=what):
            fields.declare(name, other)
    assert [f.name for f in fields] == ["a"]


# -- nothing is left undeclared -----------------------------------------------------------------------------------

N = 37  # no other size of the runner below

# Arrays with an axis of N that no request owns a row of, with the reason.
NOT_BY_ROW = {
    **dict.fromkeys(
        (
            "idx_mapping", "seq_lens", "logits_indices", "expanded_idx_mapping", "expanded_local_pos", "num_sampled",
            "num_rejected",
        ),
        "built by each step, by batch index",
    ),
    "block_tables.input_block_tables[0]": "committed by each step",
    "block_tables.input_block_tables[1]": "committed by each step",
    "req_states.last_sampled_tokens": "of the latest step, by the row that a request had in it",
    "sampler.custom.edits": "moved by CustomProcessors.move_rows, beside the tables of processors",
}  # fmt: skip


def undeclared(runner):
    """Paths of all arrays with an axis of N that share no memory with a declared field."""
    declared = [field.table for field in runner.req_states.fields]
    found, seen = {}, set()

    def walk(value, path):
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, np.ndarray):
            if N in value.shape and value.size and not any(np.shares_memory(value, table) for table in declared):
                found[path] = value
        elif isinstance(value, dict):
            assert not any(isinstance(key, (int, np.integer)) for key in value), f"{path} is kept by row, unseen"
            for key, item in value.items():
                walk(item, f"{path}[{key!r}]")
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                walk(item, f"{path}[{i}]")
        elif type(value).__module__.startswith("cpu_reference"):
            for owner in type(value).__mro__:
                for name in getattr(owner, "__slots__", ()):
                    walk(getattr(value, name), f"{path}.{name}")
            for name, item in vars(value).items() if hasattr(value, "__dict__") else ():
                walk(item, f"{path}.{name}")

    for name, value in vars(runner).items():
        if name != "kv_caches":
            walk(value, name)
    return found


class Quiet:
    """A processor that does nothing."""

    arguments = ()

    def __init__(self, max_num_reqs, vocab_size, arrays):
        pass

    def add_request(self, *args):
        return True

    def ignore(self, *args):
        pass

    validate = remove_request = move_rows = observe = apply = ignore


def scanned_runner():
    """After a step in which everything is in use."""
    runner = make_layout(
        "dense", MODEL, 30, max_num_reqs=N, max_model_len=16, max_num_batched_tokens=24, logits_processors=(Quiet,),
        reasoning=ReasoningConfig((1,), (2, 3)),
    )  # fmt: skip
    params = SamplingParams(prompt_logprobs=1, logprobs=1, presence_penalty=1.0, thinking_token_budget=3)
    runner.execute_model(make_plan({"a": 2}, [new("a", [1, 2, 3, 4], ([1], [1, 2]), sampling_params=params)]))
    runner.sample_tokens()
    return runner


def test_every_array_by_row_is_declared():
    runner = scanned_runner()
    assert undeclared(runner).keys() == NOT_BY_ROW.keys()
    assert len(list(runner.req_states.fields)) == 9 + len(runner.sampler.row_tables())


def test_the_scan_sees_what_is_not_declared():
    for change in (
        lambda r: setattr(r, "extra", np.zeros(N)),
        lambda r: setattr(r.sampler, "seeds", r.sampler.seeds.copy()),
        lambda r: setattr(r.sampler.steps[0], "extra", [np.zeros((2, N))]),
        lambda r: setattr(r.block_tables, "num_blocks", r.block_tables.num_blocks.copy()),
    ):
        runner = scanned_runner()
        change(runner)
        assert len(undeclared(runner).keys() - NOT_BY_ROW.keys()) == 1
    runner.sampler.prompt_logprobs.by_row = {3: []}
    with pytest.raises(AssertionError, match="kept by row"):
        undeclared(runner)


# -- blocks and inputs --------------------------------------------------------------------------------------------


def test_a_commit_sends_the_live_rows_whole():
    """Four rows of 512 entries are 8 KiB, whatever changed; padding rows behind them are blank."""
    fields = RowFields(6)
    kv = group_kv_cache_specs(WitnessConfig(groups=(WitnessGroup(16),)).kv_cache_specs(), 1000)
    tables = DenseBlockTables(kv, fields, 64, 512 * 16, (0,))
    for row in range(4):
        tables.append_block_ids(row, [[row + 1, row + 11]], overwrite=True)
    tables.append_block_ids(2, [[50]], overwrite=False)
    (out,) = tables.input_block_tables
    out[...] = -9
    tables.commit(np.zeros(6, np.int32), 4, 5)
    assert out.shape == (6, 512)
    assert tables.bytes_committed == 8192
    assert out[:4, :3].tolist() == [[1, 11, 0], [2, 12, 0], [3, 13, 50], [4, 14, 0]]
    assert not out[:5, 3:].any()
    assert not out[4].any()
    assert (out[5] == -9).all()
    tables.commit(np.zeros(6, np.int32), 3, 3)
    assert (tables.bytes_committed, tables.total_bytes_committed) == (6144, 14336)
    assert tables.total_values_written == 9
    tables.append_block_ids(2, [[7]], overwrite=True)
    assert tables.num_blocks[0, 2] == 1


def test_what_a_window_has_left_behind_is_sent_as_the_null_block():
    """As a gather of fixed rows hides it: whole blocks before the reach, and of blocks that the row has."""
    fields = RowFields(3)
    kv = group_kv_cache_specs(WitnessConfig(groups=(WitnessGroup(4, sliding_window=6),)).kv_cache_specs(), 20)
    tables = DenseBlockTables(kv, fields, 32, 40, (5,))
    for row, blocks in enumerate(([1, 2, 3, 4], [5, 6], [7, 8, 9])):
        tables.append_block_ids(row, [blocks], overwrite=True)
    tables.commit(np.int32([13, 4, 100]), 3, 3)
    assert tables.input_block_tables[0][:, :4].tolist() == [[0, 0, 3, 4], [5, 6, 0, 0], [0, 0, 0, 0]]
    assert tables.block_tables[0][0, :4].tolist() == [1, 2, 3, 4]


def test_inputs_against_a_loop():
    rng = np.random.default_rng(0)
    for _ in range(50):
        n, width = int(rng.integers(1, 6)), int(rng.integers(8, 20))
        tokens = rng.integers(0, 99, (6, width)).astype(np.int32)
        scheduled = rng.integers(1, 4, n).astype(np.int32)
        computed = rng.integers(0, width - 4, 6).astype(np.int32)
        start, lens = np.full(7, -9, np.int32), np.full(6, -9, np.int32)
        positions, ids = np.full(20, -9, np.int64), np.full(20, -9, np.int32)
        prepare_dense_inputs(scheduled, computed, tokens, n, start, lens, positions, ids)
        want = [(row, computed[row] + j) for row in range(n) for j in range(scheduled[row])]
        t = len(want)
        assert positions.tolist() == [p for _, p in want] + [0] * (20 - t)
        assert ids.tolist() == [tokens[row, p] for row, p in want] + [0] * (20 - t)
        assert start.tolist() == [0, *np.cumsum(scheduled).tolist()] + [t] * (6 - n)
        assert lens.tolist() == (computed[:n] + scheduled).tolist() + [0] * (6 - n)


def test_flat_indices_are_wide():
    """Row times width passes 2^31 long before memory does: 3000 rows of a million tokens, of which none is there."""
    table = np.lib.stride_tricks.as_strided(np.arange(4, dtype=np.int32), (3000, 1_000_000), (0, 0))
    ids = np.zeros(3000, np.int32)

    class Table:  # remembers the indices it is asked for
        shape = table.shape

        def reshape(self, *shape):
            return self

        def __getitem__(self, flat):
            self.flat = flat
            return np.zeros(len(flat), np.int32)

    asked = Table()
    prepare_dense_inputs(
        np.ones(3000, np.int32), np.full(3000, 7, np.int32), asked, 3000, np.zeros(3001, np.int32),
        np.zeros(3000, np.int32), np.zeros(3000, np.int64), ids,
    )  # fmt: skip
    assert asked.flat.dtype == np.int64
    assert asked.flat[-1] == 2999 * 1_000_000 + 7
