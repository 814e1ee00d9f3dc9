"""Pictures: the data behind each is compared with the record, and every text of every drawing has its place."""

from __future__ import annotations

import dataclasses
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_records import mixed_steps, two_sizes

from conformance import figures
from conformance.certificates import EQUAL
from conformance.comparison import Difference, compare_field
from conformance.exact_rows import KnownRequest
from conformance.figures import look, style
from conformance.figures.blocks import BlockCell, _draw_block, blocks_held
from conformance.figures.holdings import follow
from conformance.figures.kill_matrix import num_columns
from conformance.figures.ragged import block_size, token_places
from conformance.figures.sampling import STEPS
from conformance.figures.sheet import BOLD, Sheet, prose_width, wrapped
from conformance.figures.strip import Column, thin_out
from conformance.figures.timeline import returns
from conformance.noise import gumbel_noise
from conformance.recording import RECORDINGS, step_logits
from conformance.report import batch_table
from runner_api import (
    CachedRequestData,
    ConfigError,
    GrammarOutput,
    NewRequestData,
    ReasoningConfig,
    RunnerConfig,
    SampleFault,
    SamplingParams,
    SchedulerOutput,
    StepRecord,
    StructuredOutputsParams,
    Trace,
    UnknownNameError,
    WitnessConfig,
    group_kv_cache_specs,
    load_runner,
    load_trace,
)

SIZES = (1, 8, 64)
EMPTY = StepRecord(SchedulerOutput(finished_req_ids=frozenset({"a"})))


def small_record(**changes: object) -> StepRecord:
    """'b' decodes at position 7 out of row 3, 'a' prefills positions 0..2 in row 1; one token, one row of padding."""
    plan = SchedulerOutput(
        [NewRequestData("a", [60, 61, 62], [60, 61, 62], 0, ([6],))],
        CachedRequestData(["b"], [7], [None], [1]),
        {"b": 1, "a": 3},
        4,
    )
    base = StepRecord(
        plan, num_reqs=2, num_reqs_padded=3, num_tokens=4, num_tokens_padded=5, req_ids=("b", "a"),
        idx_mapping=np.array([3, 1]), query_start_loc=np.array([0, 1, 4, 4], np.int32),
        seq_lens=np.array([8, 3, 0], np.int32), input_ids=np.array([50, 60, 61, 62], np.int32),
        positions=np.array([7, 0, 1, 2]), logits_indices=np.array([0, 3]), cu_num_logits=np.array([0, 1, 2], np.int32),
        expanded_idx_mapping=np.array([3, 1]),
        block_tables=((np.array([4, 5], np.int32), np.array([6], np.int32), np.zeros(2, np.int32)),),
        slot_mappings=np.array([[23, 24, 25, 26, -1]]), token_ids=np.array([[9], [8]]),
        num_sampled=np.array([1, 1], np.int32), runner="runner=cpu noise=murmur3",
    )  # fmt: skip
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@cache
def recording(name: str) -> Trace:
    return load_trace(RECORDINGS / f"{name}.jsonl")


# -- batch ----------------------------------------------------------------------------------------------------


def test_batch_tells_each_token_its_slot_and_who_is_asked_for_logits():
    data = figures.batch_data(small_record())
    told = [(t.index, t.req_id, t.token_id, t.position, t.slots, t.logits_rows, t.starts) for t in data.tokens]
    assert told == [
        (0, "b", 50, 7, (23,), (0,), True),
        (1, "a", 60, 0, (24,), (), True),
        (2, "a", 61, 1, (25,), (), False),
        (3, "a", 62, 2, (26,), (1,), False),
        (4, None, None, None, (-1,), (), True),
    ]
    requests = [(p.req_id, p.kind, p.row, p.start, p.end, p.seq_len, p.sampled) for p in data.requests]
    assert requests == [
        ("b", "decode", 3, 0, 1, 8, (9,)), ("a", "prefill", 1, 1, 4, 3, (8,)), (None, "padding", None, 4, 4, 0, ()),
    ]  # fmt: skip
    assert all(data.drawn)
    assert data.lost_logits == data.lost_starts == ()


def test_what_points_off_the_axis_is_told_and_not_dropped():
    record = small_record(
        logits_indices=np.array([0, 77]), query_start_loc=np.array([0, 1, 99999, 4], np.int32)
    )  # fmt: skip
    data = figures.batch_data(record)
    assert data.lost_logits == ((1, 77),)
    assert data.lost_starts == ((2, 99999),)
    assert figures.batch_data(small_record(logits_indices=np.array([-1, 4]))).lost_logits == ((0, -1),)
    pytest.importorskip("matplotlib")
    said = [t.get_text() for t in figures.batch(record).axes[0].texts]
    assert "Not on the axis: ▲1 at 77, query_start_loc[2] = 99999." in said


def test_a_single_token_that_the_plan_brings_is_of_a_prompt():
    plan = SchedulerOutput([NewRequestData("a", [60, 61], [60, 61], 1, ([6],))], CachedRequestData(), {"a": 1}, 1)
    record = small_record(
        plan=plan, num_reqs=1, num_reqs_padded=1, num_tokens=1, req_ids=("a",), query_start_loc=np.array([0, 1, 1, 1])
    )
    assert [p.kind for p in figures.batch_data(record).requests] == ["prefill"]


@pytest.mark.parametrize("num_reqs", SIZES)
def test_what_a_batch_leaves_out_follows_from_what_it_draws(num_reqs: int):
    record = mixed_steps(num_reqs)[-1]
    data = figures.batch_data(record, max_tokens=0)
    assert num_reqs == 1 or not all(data.drawn)
    position, slot = -1, -1
    for token, drawn in zip(data.tokens, data.drawn, strict=True):
        if drawn:
            position, slot = (-1 if token.position is None else token.position), token.slots[0]
        elif not token.padding:
            position, slot = position + 1, slot + 1
        assert slot == record.slot_mappings[0, token.index]
        assert token.padding or position == record.positions[token.index]
    for index in record.logits_indices:
        assert data.drawn[index]
    assert all(data.drawn[i] for i in record.query_start_loc[:num_reqs])


@pytest.mark.parametrize("field", ["positions", "slot_mappings"])
def test_a_jump_inside_of_a_run_is_drawn(field: str):
    n = 20
    values = {"positions": np.r_[7, np.arange(n - 1)], "slot_mappings": np.r_[23, 100 + np.arange(n - 1)][None]}
    values[field][..., 10:] += 5
    record = small_record(
        num_tokens=n, num_tokens_padded=n, query_start_loc=np.array([0, 1, n, n], np.int32),
        input_ids=np.zeros(n, np.int32), logits_indices=np.array([0, n - 1]), **values,
    )  # fmt: skip
    drawn = figures.batch_data(record, max_tokens=0).drawn
    assert [i for i, d in enumerate(drawn) if d] == [0, 1, 9, 10, n - 1]


def test_a_batch_of_very_many_stretches_keeps_ends_and_logits():
    tokens = 3000
    record = small_record(
        num_tokens=tokens, num_tokens_padded=tokens, query_start_loc=np.array([0, 1, tokens, tokens], np.int32),
        input_ids=np.zeros(tokens, np.int32), positions=np.r_[7, np.arange(tokens - 1)],
        slot_mappings=np.arange(tokens)[None, ::-1] * 2, logits_indices=np.array([0, tokens - 1]),
    )  # fmt: skip
    data = figures.batch_data(record)
    assert [i for i, d in enumerate(data.drawn) if d] == [0, 1, tokens - 1]


def test_thin_out_says_how_many_are_missing():
    columns = [Column((str(i), "x"), "a" if i < 5 else "b", "") for i in range(8)]
    kept = [True, False, False, False, True, True, False, True]
    assert [c.texts for c in thin_out(columns, kept)] == [
        ("0", "x"), ("+3", "…"), ("4", "x"), ("5", "x"), ("6", "x"), ("7", "x"),
    ]  # fmt: skip


@pytest.mark.parametrize("draw", [figures.batch_data, figures.rows_data, figures.slots_data])
def test_a_step_without_tokens_has_no_batch(draw: Any):
    with pytest.raises(ConfigError, match="schedules no tokens"):
        draw(EMPTY)


def test_a_request_that_got_an_error_shows_it_in_place_of_a_token():
    record = small_record(faults=np.array([int(SampleFault.NAN), 0], np.int32))
    assert [p.fault for p in figures.batch_data(record).requests] == ["NaN", "", ""]
    faults = np.array([77, int(SampleFault.NO_TOKEN)], np.int32)
    assert [p.fault for p in figures.batch_data(small_record(faults=faults)).requests] == ["fault 77", "no token", ""]
    # within a prompt nothing is drawn, and nothing can be wrong
    none = small_record(faults=faults, num_sampled=np.array([0, 0], np.int32))
    assert [p.fault for p in figures.batch_data(none).requests] == ["", "", ""]
    table = batch_table(record).splitlines()
    assert table[2].split()[-1] == "NaN"
    assert table[3].endswith("[8]")
    wrong = Difference("token_ids", (0, 0), "b", None, 3, 9)
    assert "»[9]«" in batch_table(record, wrong)  # here the token itself is what is looked at
    pytest.importorskip("matplotlib")
    figure = figures.batch(record)
    _check_texts(figure, "batch with an error")
    said = [t.get_text() for t in figure.axes[0].texts]
    assert "NaN" in said
    assert "9" not in said
    assert any("an error and no token" in text for text in said)


# -- rows -----------------------------------------------------------------------------------------------------


def test_rows_have_an_arrow_for_each_entry_of_idx_mapping():
    data = figures.rows_data(small_record(), num_rows=12)
    assert data.arrows == ((1, 1), (3, 0))
    assert data.batch == ("b", "a", None)
    assert [(r.first, r.last, r.req_id) for r in data.rows] == [
        (0, 0, None), (1, 1, "a"), (2, 2, None), (3, 3, "b"), (4, 11, None),
    ]  # fmt: skip


def test_entries_of_idx_mapping_that_are_no_or_nobody_elses_row_are_told():
    twice = figures.rows_data(small_record(idx_mapping=np.array([1, 1])))
    assert twice.idx_mapping == (1, 1, None)
    assert twice.arrows == ((1, 0), (1, 1))
    assert [twice.fault(i) for i in range(3)] == ["twice", "twice", ""]
    negative = figures.rows_data(small_record(idx_mapping=np.array([3, -1])))
    assert negative.arrows == ((3, 0),)
    assert [negative.fault(i) for i in range(3)] == ["", "negative", ""]
    far = figures.rows_data(small_record(idx_mapping=np.array([2**31 - 1, 1])))
    assert far.arrows == ((1, 1), (2**31 - 1, 0))
    assert len(far.rows) == 4
    pytest.importorskip("matplotlib")
    said = [t.get_text() for t in figures.rows(small_record(idx_mapping=np.array([1, 1]))).axes[0].texts]
    assert {"0  (row 1, twice)", "1  (row 1, twice)"} <= set(said)
    assert "1  (row -1)" in [
        t.get_text() for t in figures.rows(small_record(idx_mapping=np.array([3, -1]))).axes[0].texts
    ]


def test_rows_of_requests_that_stand_by_are_known_from_earlier_steps():
    steps = recording("wide").steps
    checked = 0
    for n in range(1, 40):
        record = steps[n]
        if not record.num_reqs:
            continue
        data = figures.rows_data(steps[: n + 1])
        assert sorted(data.arrows) == sorted((int(r), i) for i, r in enumerate(record.idx_mapping))
        for line in data.rows:
            if line.stands_by:
                checked += 1
                assert line.req_id not in record.req_ids
                last = next(s for s in reversed(steps[:n]) if line.req_id in s.req_ids)
                assert last.idx_mapping[last.row_of(line.req_id)] == line.first
    assert checked


def test_in_the_dense_layout_nobody_stands_by():
    steps = recording("preempt_v1").steps
    for n in range(0, len(steps), 3):
        if steps[n].num_reqs:
            data = figures.rows_data(steps[: n + 1])
            assert data.arrows == tuple((i, i) for i in range(steps[n].num_reqs))
            assert not any(line.stands_by for line in data.rows)


# -- blocks and slots -----------------------------------------------------------------------------------------


def test_blocks_have_owners_and_the_slots_of_this_step():
    data = figures.blocks_data(small_record(), num_blocks=9, block_size=4)
    assert [(t.req_id, t.blocks, t.seq_len) for t in data.tables] == [("b", (4, 5), 8), ("a", (6,), 3)]
    held = {c.block: (c.owners, c.filled, c.written) for c in data.blocks if c.owners}
    assert held == {4: (("b",), (4,), ()), 5: (("b",), (4,), (3,)), 6: (("a",), (3,), (0, 1, 2))}
    assert {c.size for c in data.blocks} == {4}
    assert len(data.blocks) == 9
    assert data.complete
    assert not any(c.wrong for c in data.blocks)


def test_a_block_is_as_full_as_its_own_size_says():
    data = figures.blocks_data(two_sizes())
    assert data.block_size == (16, 8)
    cells = {c.block: (c.size, *c.filled) for c in data.blocks if c.owners}
    assert cells == {
        1: (16, 16), 2: (16, 16), 3: (8, 8), 4: (8, 8), 5: (8, 8), 6: (8, 8), 7: (16, 16), 8: (16, 3), 9: (8, 8),
        10: (8, 8), 11: (8, 3),
    }  # fmt: skip
    # of a size that nothing tells, no bar is drawn
    unknown = blocks_held(*follow(two_sizes()), (16, 0)).blocks
    assert [(c.block, c.filled, c.written) for c in unknown if c.size == 0 and c.owners] == [
        (b, (0,), ()) for b in (3, 4, 5, 6, 9, 10, 11)
    ]


def bars(cells: list[BlockCell]) -> set[float]:
    """How long the bars of these blocks are, in parts of a block."""
    sheet, names = Sheet(), figures.Names(r for c in cells for r in c.owners)
    for cell in cells:
        _draw_block(sheet, cell, 0.0, 0.0, 1.0, 0.3, names)
    fills = {names.fill(r) for c in cells for r in c.owners}
    return {b.width for b in sheet.boxes if b.fill in fills}


def test_a_bar_ends_where_the_owners_tokens_end():
    assert bars([c for c in figures.blocks_data(two_sizes()).blocks if c.owners]) == {1.0, 3 / 8, 3 / 16}
    # r001's sliding window has left both behind; of r003, to whom they were given, they hold 8 tokens
    given_on = [c for c in figures.blocks_data(recording("hybrid").steps[:12]).blocks if c.block in (7, 29)]
    assert [(c.owners, c.filled) for c in given_on] == [(("r001", "r003"), (16, 8))] * 2
    assert bars(given_on) == {1.0, 0.5}


def test_the_number_of_a_block_and_its_owner_are_two_texts():
    pytest.importorskip("matplotlib")
    record = mixed_steps(8, True, "")[-1]
    figure = figures.blocks(mixed_steps(8, True, ""))
    _check_texts(figure, "blocks of numbers")
    texts = [t for t in figure.axes[0].texts if t.get_fontsize() == look.SMALL]
    assert not any(" " in t.get_text() for t in texts if t.get_text()[0].isdigit())
    owners = [t for t in texts if t.get_text() in record.req_ids]
    assert owners
    assert all(t.get_fontweight() == "bold" and t.get_ha() == "right" for t in owners)


def test_a_garbage_slot_does_not_make_the_cache_large():
    record = small_record(slot_mappings=np.array([[2**31 - 1, 24, 25, 26, -1]]))
    for num_blocks, free in ((None, 0), (5000, 4997)):
        data = figures.blocks_data(record, num_blocks=num_blocks, block_size=4)
        assert len(data.blocks) < 10
        assert data.free == free
        assert data.blocks[-1] == figures.blocks_data(record, block_size=4).blocks[-1]
        assert (data.blocks[-1].block, data.blocks[-1].wrong) == (2**29 - 1, (3,))


def test_what_is_written_into_a_block_of_others_is_marked():
    # b's token at 'a's second slot, which 'a' writes too; padding in a block of b's
    record = small_record(slot_mappings=np.array([[25, 24, 25, 26, 16]]))
    cells = {c.block: c for c in figures.blocks_data(record, block_size=4).blocks}
    assert (cells[6].written, cells[6].wrong) == ((0, 1, 2), (1,))
    assert (cells[4].written, cells[4].wrong) == ((0,), (0,))
    (group,) = figures.slots_data(record, block_size=4)
    assert [p.wrong for p in group.places] == [True, False, False, False, True]
    # one slot too far, within a block of its own
    (group,) = figures.slots_data(small_record(slot_mappings=np.array([[23, 25, 26, 27, -1]])), block_size=4)
    assert [p.index for p in group.places if p.wrong] == [1, 2, 3]


@pytest.mark.parametrize("name", ["preempt_v1", "prefix", "eagle", "hybrid", "wide", "graph"])
def test_no_slot_of_a_recording_is_marked(name: str):
    trace = recording(name)
    for n in range(0, len(trace.steps), 9):
        if trace.steps[n].num_reqs:
            groups = figures.slots_data(trace.steps[n], block_size=trace.meta["block_size"])
            assert not any(p.wrong for g in groups for p in g.places)
            blocks = figures.blocks_data(trace.steps[: n + 1], block_size=trace.meta["block_size"]).blocks
            assert not any(c.wrong for c in blocks)


def test_a_jump_of_positions_is_drawn_with_its_slots():
    n = 30
    table = ((np.array([4, 5], np.int32), np.arange(6, 26, dtype=np.int32), np.zeros(2, np.int32)),)
    positions = np.r_[7, np.arange(n - 1)]
    positions[15:] += 1
    record = small_record(
        num_tokens=n, num_tokens_padded=n, query_start_loc=np.array([0, 1, n, n], np.int32), positions=positions,
        input_ids=np.zeros(n, np.int32), slot_mappings=np.r_[23, 24 + np.arange(n - 1)][None], block_tables=table,
    )  # fmt: skip
    (group,) = figures.slots_data(record, block_size=4, max_tokens=0)
    assert {14, 15} <= {p.index for p in group.places if p.drawn}


@pytest.mark.parametrize("name", ["preempt", "prefix", "eagle"])
def test_blocks_of_a_recording_are_those_of_its_tables_and_slots(name: str):
    steps = recording(name).steps
    shared = False
    for n in range(0, len(steps), 5):
        record = steps[n]
        if not record.num_reqs:
            continue
        data = figures.blocks_data(steps[: n + 1], num_blocks=200)
        cells = {c.block: c for c in data.blocks}
        for i, req_id in enumerate(record.req_ids):
            for block in record.block_tables[0][i]:
                assert req_id in cells[int(block)].owners
        written = sorted(c.block * 16 + offset for c in data.blocks for offset in c.written)
        assert written == sorted(set(record.slot_mappings[0][record.slot_mappings[0] >= 0].tolist()))
        shared |= any(len(c.owners) > 1 for c in data.blocks)
    assert shared == (name == "prefix")


def test_a_resumed_request_has_its_new_blocks_alone():
    again = SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(["b"], [0], [([7, 8],)], [1], frozenset({"b"})),
        num_scheduled_tokens={"b": 9},
    )
    data = figures.blocks_data([small_record(), StepRecord(again)], block_size=4)
    assert {t.req_id: t.blocks for t in data.tables} == {"b": (7, 8), "a": (6,)}


def test_a_large_cache_is_drawn_without_its_free_blocks():
    data = figures.blocks_data(small_record(), num_blocks=5000, block_size=4)
    assert [c.block for c in data.blocks if c.drawn] == [4, 5, 6]


def test_slots_fall_apart_into_block_and_offset_with_a_sentinel_tail():
    (group,) = figures.slots_data(small_record())
    assert group.block_size == 4
    assert [(p.req_id, p.position, p.block, p.offset, p.slot) for p in group.places] == [
        ("b", 7, 5, 3, 23), ("a", 0, 6, 0, 24), ("a", 1, 6, 1, 25), ("a", 2, 6, 2, 26), (None, None, None, None, -1),
    ]  # fmt: skip


def test_a_recording_tells_its_block_size():
    for name in ("preempt", "preempt_v1", "eagle", "hybrid", "wide"):
        trace = recording(name)
        record = max(trace.steps, key=lambda s: s.num_tokens)
        for g in range(len(record.slot_mappings)):
            assert block_size(record, g) == trace.meta["block_size"]


def test_a_wrong_slot_does_not_hide_the_block_size_and_no_slots_are_refused():
    record = mixed_steps(8)[-1]
    slots = record.slot_mappings.copy()
    slots[0, 3] += 1
    assert block_size(dataclasses.replace(record, slot_mappings=slots)) == 16
    with pytest.raises(ConfigError, match="size of a block cannot be told"):
        block_size(dataclasses.replace(record, slot_mappings=np.full_like(slots, -1)))


# -- timeline -------------------------------------------------------------------------------------------------


def test_timeline_counts_what_the_plans_say():
    trace = recording("preempt")
    data = figures.timeline_data(trace)
    assert len(data.work) == sum(s.num_reqs for s in trace.steps)
    said = sorted((n, r) for n, s in enumerate(trace.steps) for r in s.plan.preempted_req_ids)
    assert sorted((n, life.req_id) for life in data.lives for n in life.preempted) == said
    assert said
    again = [w for w in data.work if w.resumed]
    seen: set[str] = set()
    expected = []
    for n, s in enumerate(trace.steps):
        expected += [(n, x.req_id) for x in s.plan.scheduled_new_reqs if x.req_id in seen]
        seen |= {x.req_id for x in s.plan.scheduled_new_reqs}
    assert [(w.step, w.req_id) for w in again] == expected
    assert all(w.kind == "prefill" for w in again)


def test_the_key_of_a_timeline_tells_of_aborts():
    pytest.importorskip("matplotlib")
    said = [t.get_text() for t in figures.timeline(recording("abort")).axes[0].texts]
    assert "finished or aborted" in said


def test_returns_are_those_of_the_timeline_however_long_the_trace():
    for name in ("preempt", "preempt_v1"):
        steps = recording(name).steps
        told = {(n, r) for n, back in enumerate(returns(steps)) for r in back}
        assert told == {(w.step, w.req_id) for w in figures.timeline_data(steps).work if w.resumed}
        assert told
    assert returns([EMPTY] * 1001) == [frozenset()] * 1001


def test_timeline_tells_prefills_from_decodes():
    trace = recording("mixed")
    prompts = {n.req_id: len(n.prefill_token_ids) for s in trace.steps for n in s.plan.scheduled_new_reqs}
    for work in figures.timeline_data(trace).work:
        record = trace.steps[work.step]
        first = int(record.positions[record.query_start_loc[record.row_of(work.req_id)]])
        assert work.kind == ("prefill" if first < prompts[work.req_id] else "decode")


def test_the_last_token_of_a_prompt_is_a_prefill_in_the_timeline():
    first = small_record(
        plan=SchedulerOutput([NewRequestData("a", [1, 2, 3], [1, 2, 3], 0, ([6],))], CachedRequestData(), {"a": 2}, 2),
        req_ids=("a",), seq_lens=np.array([2], np.int32), num_sampled=np.array([0], np.int32), num_reqs=1,
    )  # fmt: skip
    steps = [first]
    for length, sampled in ((3, 1), (4, 1)):
        plan = SchedulerOutput([], CachedRequestData(["a"], [length - 1], [None], [0]), {"a": 1}, 1)
        arrays = {"seq_lens": np.array([length], np.int32), "num_sampled": np.array([sampled], np.int32)}
        steps.append(dataclasses.replace(first, plan=plan, **arrays))
    assert [w.kind for w in figures.timeline_data(steps).work] == ["prefill", "prefill", "decode"]


def test_a_dense_recording_has_the_timeline_of_the_same_scenario_in_slots():
    slots, dense = (figures.timeline_data(recording(n)) for n in ("preempt", "preempt_v1"))
    assert [life.preempted for life in slots.lives] == [life.preempted for life in dense.lives]
    by_step = [sorted((w.step, w.req_id, w.kind, w.tokens, w.resumed) for w in d.work) for d in (slots, dense)]
    assert by_step[0] == by_step[1]
    assert slots.held == dense.held


def test_timeline_counts_free_blocks_and_drafts():
    trace = recording("eagle")
    data = figures.timeline_data(trace)
    tables: dict[str, list[int]] = {}
    for record, free in zip(trace.steps, data.free or (), strict=True):
        for req_id in record.plan.finished_req_ids:
            tables.pop(req_id, None)
        for new in record.plan.scheduled_new_reqs:
            tables[new.req_id] = list(new.block_ids[0])
        cached = record.plan.scheduled_cached_reqs
        for req_id, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            tables[req_id] += more[0] if more else []
        assert free == 200 - 1 - len({b for t in tables.values() for b in t})
    rejected = sum(int(s.num_rejected.sum()) for s in trace.steps if s.num_rejected is not None)
    assert sum(w.rejected for w in data.work) == rejected > 0
    assert all(w.accepted == w.sampled - 1 for w in data.work if w.kind == "drafts")


def test_a_timeline_has_steps_and_not_too_many():
    with pytest.raises(ConfigError, match="0 steps"):
        figures.timeline_data([])
    with pytest.raises(ConfigError, match="1001 steps"):
        figures.timeline([EMPTY] * 1001)
    assert figures.timeline_data([EMPTY] * 1001).num_steps == 1001  # for the page, which scrolls


# -- sampling -------------------------------------------------------------------------------------------------


def test_sampling_follows_a_row_through_its_steps():
    steps = mixed_steps(8)
    record = steps[-1]
    for req_id in record.req_ids:
        data = figures.sampling_data(steps, req_id)
        assert data.winner == data.drawn == record.tokens()[req_id][0]
        assert data.verdict == "equal"
        names = [s.name for s in data.steps]
        assert names == (["raw logits"] if data.greedy else ["raw logits", "temperature", "top-k"])
        raw = record.logits[record.row_of(req_id)].astype(np.float64)
        p = np.exp(raw - raw.max())
        np.testing.assert_allclose(data.steps[0].probabilities, (p / p.sum())[list(data.tokens)], rtol=1e-9)
        for step in data.steps:
            assert sum(step.probabilities) + step.rest == pytest.approx(1)
        lead = data.scores[data.tokens.index(data.winner)] - data.scores[data.tokens.index(data.second)]
        assert data.margin == pytest.approx(lead)
        assert data.margin > 0
        if not data.greedy:
            assert data.steps[-1].left == 20
            assert data.noise is not None


def test_sampling_of_recorded_logits_gives_the_recorded_tokens():
    trace = recording("sampling")
    with np.load(RECORDINGS / "sampling_logits.npz", allow_pickle=False) as stored:
        met: set[str] = set()
        for n in (3, 17, 30):
            record = trace.steps[n]
            logits = step_logits(stored, record, "sampling")
            for req_id in (r for r, tokens in record.tokens().items() if tokens):
                data = figures.sampling_data(trace.steps[: n + 1], req_id, logits=logits, noise="philox")
                assert data.winner == record.tokens()[req_id][0]
                met |= {s.name for s in data.steps}
    assert {"temperature", "min-p", "top-k", "top-p", "penalties"} <= met


def test_of_equally_likely_tokens_those_with_the_best_scores_are_shown():
    record = mixed_steps(1)[-1]
    request = KnownRequest(SamplingParams(temperature=1.0), 5, 5, [3, 8, 13, 18, 23, 255])
    flat = np.zeros_like(record.logits)
    data = figures.sampling_data(record, "r000", request=request, logits=flat)
    noise = gumbel_noise(np.array([5]), np.array([data.position]), flat.shape[1], "murmur3")[0]
    best = [int(t) for t in np.argsort(-noise)[:6]]
    assert (data.winner, data.second) == tuple(best[:2])
    assert [t for t in data.tokens if t != data.drawn or t in best] == best


def prompts_behind(params, grammar=None, **config):
    """The record of a step in which two requests, A and B, draw their first token behind the same prompt."""
    runner = load_runner("cpu", RunnerConfig(max_num_reqs=4, record=frozenset({"logits"}), **config))
    runner.load_model(WitnessConfig())
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), num_blocks=16))
    prompt = [1, 7, 3]
    new = [NewRequestData(r, prompt, prompt, 0, ([3 + i],), params) for i, r in enumerate("AB")]
    runner.execute_model(SchedulerOutput(new, num_scheduled_tokens={"A": 3, "B": 3}, total_num_scheduled_tokens=6))
    runner.sample_tokens(grammar)
    return runner.last_step()


def test_sampling_tells_of_a_thinking_budget_of_nothing():
    reasoning = ReasoningConfig((7,), (9, 10), (10,))
    record = prompts_behind(SamplingParams(temperature=1.0, thinking_token_budget=0), reasoning=reasoning)
    data = figures.sampling_data(record, "A", reasoning=reasoning)
    assert [step.name for step in data.steps] == ["raw logits", "thinking budget"]
    assert (data.winner, data.drawn, data.verdict) == (9, 9, EQUAL)


def test_sampling_takes_the_mask_of_a_runner_with_drafts():
    """Of A's two mask rows and B's two, B's first one holds for its first token."""
    allowed = np.zeros((4, 64), bool)
    allowed[[0, 1, 2, 3], [5, 6, 20, 30]] = True
    words = np.packbits(allowed, axis=1, bitorder="little").view("<i4").astype(np.int32)
    grammar = GrammarOutput(["A", "B"], words)
    params = SamplingParams(temperature=0.0, structured_outputs=StructuredOutputsParams(regex="a*"))
    record = prompts_behind(params, grammar, num_speculative_tokens=1)
    data = figures.sampling_data(record, "B", grammar=grammar)
    assert (data.winner, data.drawn, data.verdict) == (20, 20, EQUAL)


def test_sampling_needs_to_know_the_request():
    record = mixed_steps(8)[-1]
    with pytest.raises(ConfigError, match="nothing is known of what the request wants"):
        figures.sampling_data(record, "r000")
    with pytest.raises(UnknownNameError, match="'r00x'"):
        figures.sampling_data(record, "r00x")
    with pytest.raises(ConfigError, match="holds no logits"):
        figures.sampling_data([*mixed_steps(8)[:1], dataclasses.replace(record, logits=None)], "r000")
    with pytest.raises(ConfigError, match="no such logits row"):
        figures.sampling_data(mixed_steps(8), "r000", row=1)
    processed = KnownRequest(SamplingParams(extra_args={"ban": 3}), 0, 2, [1, 2])
    with pytest.raises(ConfigError, match=r"extra_args.*custom logits processors"):
        figures.sampling_data(record, "r000", request=processed)
    thinking = KnownRequest(SamplingParams(thinking_token_budget=3), 0, 2, [1, 2])
    with pytest.raises(ConfigError, match="reasoning"):
        figures.sampling_data(record, "r000", request=thinking)


def test_a_token_that_the_request_never_took_is_not_told_of():
    first, second = mixed_steps(8)
    req_id = second.req_ids[0]
    none = dataclasses.replace(second, num_sampled=np.zeros_like(second.num_sampled))
    with pytest.raises(ConfigError, match=r"took no token of this row.*row 0, num_sampled 0"):
        figures.sampling_data([first, none], req_id)
    # two rows of logits, for a token and a draft, which was rejected
    drafted = dataclasses.replace(second, cu_num_logits=second.cu_num_logits + (np.arange(9) > 0).astype(np.int32))
    with pytest.raises(ConfigError, match=r"took no token of this row.*row 1, num_sampled 1"):
        figures.sampling_data([first, drafted], req_id, row=1)
    faults = np.array([int(SampleFault.NO_TOKEN)] + [0] * 7, np.int32)
    with pytest.raises(ConfigError, match=r"got an error, and no token was drawn.*no token"):
        figures.sampling_data([first, dataclasses.replace(second, faults=faults)], req_id)


def test_bias_and_bans_show_in_their_columns():
    record = mixed_steps(1)[-1]
    params = SamplingParams(temperature=0.0, logit_bias={7: 50.0}, allowed_token_ids=(7, 8, 9))
    request = KnownRequest(params, 0, 5, [3, 8, 13, 18, 23, 255])
    data = figures.sampling_data(record, "r000", request=request)
    assert [s.name for s in data.steps] == ["raw logits", "allowed tokens", "bias"]
    assert [s.left for s in data.steps] == [512, 3, 3]
    assert data.winner == 7
    assert data.steps[-1].probabilities[data.tokens.index(7)] == pytest.approx(1)
    assert data.verdict == "divergence"  # the runner was not asked for any of this


# -- divergence and kill matrix -------------------------------------------------------------------------------


def test_divergence_marks_the_cells_that_differ_and_no_others():
    left = small_record()
    tables = ((np.array([4, 9], np.int32), np.array([6, 7], np.int32), np.zeros(2, np.int32)),)
    right = small_record(slot_mappings=np.array([[23, 24, 99, 26, 4]]), block_tables=tables)
    data = figures.divergence_data(left, right)
    assert [f.name for f in data.different] == ["block_tables", "slot_mappings"]
    for field in data.different:
        found = compare_field(field.name, left, right)
        assert (field.equal, field.different) == (found.equal, found.different)
        assert sum(c.differs for c in field.cells) == found.different
    table, slots = data.different
    assert [(c.index, c.left, c.right, c.req_id) for c in table.cells if c.differs] == [((0, 0, 1), 5, 9, "b")]
    wrong = [(c.index, c.left, c.right, c.req_id, c.position) for c in slots.cells if c.differs]
    assert wrong == [((0, 2), 25, 99, "a", 1), ((0, 4), -1, 4, None, None)]
    assert "positions" in data.equal


def test_divergence_names_an_entry_of_query_start_loc_after_the_request_that_begins_there():
    left = small_record()
    (field,) = figures.divergence_data(left, small_record(query_start_loc=left.query_start_loc + 1)).different
    assert [(c.index[0], c.req_id, c.padding) for c in field.cells] == [
        (0, "b", False), (1, "a", False), (2, None, True), (3, None, False),
    ]  # fmt: skip
    pytest.importorskip("matplotlib")
    figure = figures.divergence(left, small_record(query_start_loc=left.query_start_loc + 1))
    labels = [t.get_text() for t in figure.axes[0].texts]
    assert labels[labels.index("b") : labels.index("b") + 4] == ["b", "a", "pad", "end"]


def test_divergence_hatches_the_tails_of_every_field():
    tails = {
        "input_ids": np.array([50, 60, 61, 62, 0]), "positions": np.array([7, 0, 1, 2, 0]),
        "logits_indices": np.array([0, 3, 0]), "seq_lens": np.array([8, 3, 0], np.int32),
    }  # fmt: skip
    left = small_record(**tails)
    stale = small_record(**{name: np.r_[value[:-1], 99] for name, value in tails.items()})
    found = figures.divergence_data(left, stale).different
    assert {f.name for f in found} == set(tails)
    for field in found:
        assert [c.padding for c in field.cells] == [*[False] * (len(field.cells) - 1), True]
        assert field.cells[-1].req_id is None


def test_divergence_says_where_only_the_order_differs():
    slots, dense = (recording(name).steps[10] for name in ("mixed", "mixed_v1"))
    assert figures.divergence_data(slots, dense).reordered
    assert not figures.divergence_data(slots, slots).reordered
    other = dataclasses.replace(dense, req_ids=("x", *dense.req_ids[1:]))
    assert not figures.divergence_data(slots, other).reordered
    pytest.importorskip("matplotlib")
    figure = figures.divergence(slots, dense, labels=("mixed", "mixed_v1"))
    _check_texts(figure, "another order")
    notes = {t.get_text(): t.get_color() for t in figure.axes[0].texts}
    said = " ".join(notes)
    assert "same requests in another order" in said
    assert "names are those of the upper record (mixed)" in said.replace("\n", " ")
    assert {c for text, c in notes.items() if "another order" in text} == {look.VERMILION}


def test_divergence_explains_its_gaps_and_its_indices():
    pytest.importorskip("matplotlib")
    left = recording("hybrid").steps[11]
    slots = left.slot_mappings.copy()
    slots[1, 5] = slots[3, 40] = 0
    tables = [[row.copy() for row in group] for group in left.block_tables]
    tables[2][3][1] = 5
    right = dataclasses.replace(left, slot_mappings=slots, block_tables=tuple(map(tuple, tables)))
    said = [t.get_text() for t in figures.divergence(left, right).axes[0].texts]
    assert any("+n: n equal ones" in text for text in said)
    assert "block_tables by group, request, block of its table: 1 of 116 elements differ" in said
    assert "slot_mappings by group, token: 2 of 192 elements differ" in said
    # of one group the index has one part less
    left = small_record()
    tables = ((np.array([4, 9], np.int32), *left.block_tables[0][1:]),)
    said = [t.get_text() for t in figures.divergence(left, small_record(block_tables=tables)).axes[0].texts]
    assert "block_tables by request, block of its table: 1 of 5 elements differ" in said
    assert not any("+n" in text for text in said)


def test_divergence_in_the_drawn_tokens_alone_is_seen_and_junk_behind_them_is_not():
    record = recording("eagle").steps[10]
    tokens = record.token_ids.copy()
    tokens[0, 0] += 1
    (field,) = figures.divergence_data(record, dataclasses.replace(record, token_ids=tokens)).different
    assert (field.name, field.different, field.equal) == ("token_ids", 1, int(record.num_sampled.sum()) - 1)
    junk = record.token_ids.copy()
    behind = np.arange(junk.shape[1]) >= record.num_sampled[:, None]
    assert behind.any()
    junk[behind] = -7
    data = figures.divergence_data(record, dataclasses.replace(record, token_ids=junk))
    assert not data.different
    assert "token_ids" in data.equal


def test_divergence_shows_what_differs_far_apart_with_gaps_between():
    left = mixed_steps(64)[-1]
    slots = left.slot_mappings.copy()
    slots[0, [10, 50, 51, -1]] = 7
    (field,) = figures.divergence_data(left, dataclasses.replace(left, slot_mappings=slots)).different
    n = slots.shape[1]
    assert [c.index[1] for c in field.cells] == [6, 7, 8, 9, 10, 49, 50, 51, n - 2, n - 1]
    assert [c.left_out for c in field.cells] == [0, 0, 0, 0, 0, 38, 0, 0, n - 54, 0]
    assert sum(c.differs for c in field.cells) == field.different == 4
    assert [c.padding for c in field.cells[-3:]] == [False, True, True]


def test_divergence_shows_the_first_of_many_and_elements_of_one_side():
    left = mixed_steps(64)[-1]
    positions = left.positions.copy()
    positions[200:] += 1
    right = dataclasses.replace(left, positions=positions, req_ids=left.req_ids[:-1])
    ids, at = figures.divergence_data(left, right).different
    assert [(c.left, c.right) for c in ids.cells if c.differs] == [(left.req_ids[-1], None)]
    assert (at.name, at.different) == ("positions", left.num_tokens - 200)
    assert at.cells[4].index == (200,)
    assert [c.differs for c in at.cells[:5]] == [False] * 4 + [True]
    with pytest.raises(ConfigError, match="nothing to compare"):
        figures.divergence_data(EMPTY, EMPTY)
    assert not figures.divergence_data(left, left).different


def test_kill_matrix_counts_clauses_by_area():
    matrix = {
        "runner": "cpu", "survivors": [{"mutant": "two", "reason": "noticed by no clause"}],
        "matrix": {"one": ["MR-SLOT-001", "MR-SLOT-002", "MR-BATCH-001"], "two": []},
    }  # fmt: skip
    data = figures.kill_matrix_data(matrix)
    assert data.areas == ("BATCH", "SLOT")
    assert [(line.mutant, line.failed, line.survived) for line in data.lines] == [
        ("one", (1, 2), False), ("two", (0, 0), True),
    ]  # fmt: skip
    assert data.killed == 1
    # two columns where there is room for them
    assert [num_columns(m, 13, name, 8.7) for m, name in ((40, 1.0), (41, 1.0), (359, 2.0))] == [1, 2, 1]
    for broken in ({}, {"runner": "cpu", "matrix": 3, "survivors": []}, []):
        with pytest.raises(ConfigError, match="no kill matrix"):
            figures.kill_matrix_data(broken)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no mutant"):
        figures.kill_matrix_data({"runner": "cpu", "matrix": {}, "survivors": []})


def test_the_heads_of_a_long_kill_matrix_are_repeated():
    pytest.importorskip("matplotlib")
    long = "a-name-so-long-that-two-columns-would-have-no-room-for-their-cells-at-all-"
    areas = ("SLOT", "BATCH", "PAD", "KV")
    for name, count, expected in ((long, 100, 3), ("m", 40, 1), ("m", 100, 4)):
        matrix = {f"{name}{i}": [f"MR-{a}-001" for a in areas] for i in range(count)}
        data = {"runner": "cpu", "matrix": matrix | {"gone": []}, "survivors": [{"mutant": "gone"}]}
        if count == 40:
            del data["matrix"][f"{name}0"]
        figure = figures.kill_matrix(data)
        _check_texts(figure, f"kill matrix of {count}")
        said = [t.get_text() for t in figure.axes[0].texts]
        assert said.count("SLOT") == expected
        assert any("Survivors are orange." in text for text in said)


# -- drawing --------------------------------------------------------------------------------------------------


def _drawings(num_reqs: int) -> dict[str, Any]:
    steps = mixed_steps(num_reqs)
    record = steps[-1]
    slots = record.slot_mappings.copy()
    slots[0, 0] += 1
    wrong = dataclasses.replace(record, slot_mappings=slots, positions=record.positions + 1)
    matrix = {f"mutant-{i}": ["MR-SLOT-001"] * (i % 4) for i in range(num_reqs)}
    return {
        "batch": figures.batch(record),
        "rows": figures.rows(steps),
        "blocks": figures.blocks(steps),
        "slots": figures.slots(record),
        "timeline": figures.timeline(steps),
        "sampling": figures.sampling(steps, record.req_ids[-1]),
        "divergence": figures.divergence(record, wrong),
        "sampling_all": figures.sampling(record, record.req_ids[-1], request=_asks_for_everything()),
        "kill_matrix": figures.kill_matrix({"runner": "x", "matrix": matrix, "survivors": [{"mutant": "mutant-0"}]}),
    }


def _asks_for_everything(**more: Any) -> KnownRequest:
    """A request for which every step of the sampler has work to do."""
    params = SamplingParams(
        temperature=0.8, allowed_token_ids=tuple(range(400)), logit_bias={7: 5.0, 9: -3.0}, min_tokens=12,
        stop_token_ids=(1, 2), repetition_penalty=1.25, frequency_penalty=-0.25, presence_penalty=0.123457,
        bad_words_token_ids=((5,), (3, 8)), min_p=0.0125, top_k=200, top_p=0.9875, **more,
    )  # fmt: skip
    return KnownRequest(params, 5, 5, [3, 8, 13, 18, 23, 255])


def _check_texts(figure: Any, what: str) -> None:
    """Every text lies on the figure, is large enough, and covers no other one."""
    renderer = figure.canvas.get_renderer()
    texts = [t for axes in figure.axes for t in axes.texts if t.get_text()]
    boxes = np.array([t.get_window_extent(renderer).extents for t in texts])
    width, height = figure.bbox.width, figure.bbox.height
    for text, (x0, y0, x1, y1) in zip(texts, boxes, strict=True):
        inside = min(x0, y0, width - x1, height - y1) >= 0
        assert inside, f"{what}: {text.get_text()!r} is cut"
        assert text.get_fontsize() >= 7, f"{what}: {text.get_text()!r}"
    # Descenders and the room above small letters may touch: a tenth of a letter's height is no overlap.
    slack = 0.1 * look.SMALL * style.DOTS_PER_INCH / 72
    x0, y0, x1, y1 = boxes.T
    meet = (
        (x0[:, None] < x1 - slack)
        & (x0 < x1[:, None] - slack)
        & (y0[:, None] < y1 - slack)
        & (y0 < y1[:, None] - slack)
    )
    np.fill_diagonal(meet, False)
    pairs = [(texts[i].get_text(), texts[j].get_text()) for i, j in np.argwhere(meet)]
    assert not pairs, f"{what}: {pairs[:3]}"


@pytest.mark.parametrize("num_reqs", SIZES)
def test_no_text_is_cut_or_covered(num_reqs: int):
    pytest.importorskip("matplotlib")
    for what, figure in _drawings(num_reqs).items():
        assert figure.get_size_inches()[0] == look.WIDTH
        _check_texts(figure, f"{what}, {num_reqs} requests")


def test_every_step_of_the_sampler_has_room_for_its_name():
    pytest.importorskip("matplotlib")
    record = mixed_steps(1)[-1]
    known = {"request": _asks_for_everything(thinking_token_budget=100), "reasoning": ReasoningConfig((1,), (2,))}
    data = figures.sampling_data(record, "r000", **known)
    assert [s.name for s in data.steps[1:]] == [name for name, _ in STEPS]
    assert not data.not_asked_for
    figure = figures.sampling(record, "r000", **known)
    _check_texts(figure, "sampling")
    said = [t.get_text() for t in figure.axes[0].texts]
    assert {"temper-", "ature", "penal-", "ties", "pres.", "0.123457"} <= set(said)
    assert said[0].startswith("How request r000 came to its token")
    # where there is room, no word is broken
    said = [t.get_text() for t in figures.sampling(mixed_steps(8), "r001").axes[0].texts]
    assert "temperature" in said


def test_lines_are_broken_by_the_width_that_they_have():
    pytest.importorskip("matplotlib")
    for figure in (*_drawings(8).values(), figures.timeline(recording("preempt"))):
        renderer = figure.canvas.get_renderer()
        for text in (t for t in figure.axes[0].texts if len(t.get_text()) > 30):
            bold = text.get_fontweight() == "bold"
            told = prose_width(text.get_text(), text.get_fontsize() * (BOLD if bold else 1.0))
            true = text.get_window_extent(renderer).width / style.DOTS_PER_INCH
            assert 0.99 * true < told < 1.05 * true, text.get_text()
    lines = wrapped("Fields in the order in which a step computes them. " * 6, look.CELL, 8.7)
    assert all(prose_width(line, look.CELL) <= 8.7 for line in lines)
    assert prose_width(f"{lines[0]} {lines[1].split()[0]}", look.CELL) > 8.7


@pytest.mark.parametrize("name", ["wide", "eagle", "hybrid"])
def test_no_text_of_a_recording_is_cut_or_covered(name: str):
    pytest.importorskip("matplotlib")
    trace = recording(name)
    n = max(range(len(trace.steps)), key=lambda i: trace.steps[i].num_reqs)
    _check_texts(figures.timeline(trace), "timeline")
    _check_texts(figures.batch(trace.steps[n]), "batch")
    _check_texts(figures.blocks(trace.steps[: n + 1], num_blocks=100), "blocks")


def test_long_request_ids_get_short_names_and_a_legend():
    pytest.importorskip("matplotlib")
    record = mixed_steps(8, True, "chatcmpl-5f2a-")[-1]
    figure = figures.batch(record)
    _check_texts(figure, "batch")
    said = " ".join(t.get_text() for t in figure.axes[0].texts)
    assert "…3 = chatcmpl-5f2a-003" in said
    ids = ["one-very-long-name", "another-very-long-name"]
    told = figures.Names(ids).legend(ids)
    assert told.replace(look.NO_BREAK, " ") == "#0 = one-very-long-name, #1 = another-very-long-name"
    assert told.count(" ") == 1  # lines end between the pairs alone
    # ids that are cut at the same place stay apart
    for ids in (["prefix-0000001", "prefix-0000002"], ["abcdefgh", "abcdefgh1"], ["same-length-x"]):
        assert len({figures.Names(ids).short(i) for i in ids}) == len(ids)
        assert all(0 < len(figures.Names(ids).short(i)) <= look.LONGEST_NAME for i in ids)


@pytest.mark.parametrize("ids", [["a\nb", "c"], ["\t", "x"], ["请求", "y"], ["", "z"]])
def test_ids_that_cannot_be_printed_go_by_number_and_are_escaped(ids: list[str]):
    names = figures.Names(ids)
    assert [names.short(i) for i in ids] == ["#0", "#1"]
    assert names.legend(ids).isprintable() or look.NO_BREAK in names.legend(ids)
    assert names.legend(ids).replace(look.NO_BREAK, " ").isascii()


@pytest.mark.parametrize("prefix", ["WWW", "two words " + "W" * 200])
def test_no_text_is_cut_for_odd_ids(prefix: str):
    pytest.importorskip("matplotlib")
    steps = mixed_steps(8, True, prefix)
    other = dataclasses.replace(steps[-1], positions=steps[-1].positions + 1)
    for figure in (
        figures.batch(steps[-1]), figures.rows(steps), figures.blocks(steps), figures.slots(steps[-1]),
        figures.timeline(steps), figures.sampling(steps, steps[-1].req_ids[0]), figures.divergence(steps[-1], other),
    ):  # fmt: skip
        _check_texts(figure, prefix)


def test_the_second_round_of_hues_is_lighter():
    names = figures.Names(f"r{i}" for i in range(3 * len(look.HUES)))
    fills = [names.fill(r) for r in names.order]
    assert len(set(fills)) == 2 * len(look.HUES)
    assert fills[: len(look.HUES)] == fills[2 * len(look.HUES) :]


def test_files_are_png_or_svg_and_the_same_each_time(tmp_path: Path):
    pytest.importorskip("matplotlib")
    for ending, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        for k in range(2):
            figures.save(figures.batch(small_record()), tmp_path / f"{k}{ending}")
        first, second = ((tmp_path / f"{k}{ending}").read_bytes() for k in range(2))
        assert first == second
        assert first.startswith(start)
    assert figures.batch(small_record())._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"\.gif"):
        figures.save(figures.batch(small_record()), tmp_path / "x.gif")
    with pytest.raises(ConfigError, match="cannot be written"):
        figures.save(figures.batch(small_record()), tmp_path / "no" / "x.png")


def test_without_matplotlib_drawing_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    style._figure_class.cache_clear()
    with pytest.raises(ConfigError, match=r"modelrunner\[plot\]"):
        figures.batch(small_record())
    assert figures.batch_data(small_record()).tokens == token_places(small_record())
    style._figure_class.cache_clear()
