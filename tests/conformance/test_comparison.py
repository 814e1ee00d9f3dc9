"""compare_field: counts, the first difference, and whose element it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from conformance.comparison import COMPARABLE_FIELDS, compare_field
from runner_api import INTEGER_FIELDS, SchedulerOutput, StepRecord, UnknownNameError


def record(**changes: object) -> StepRecord:
    """Two requests: 'a' decodes at position 7, 'b' prefills positions 0..2; one padding token."""
    base = StepRecord(
        SchedulerOutput(),
        num_reqs=2,
        num_reqs_padded=2,
        num_tokens=4,
        num_tokens_padded=5,
        req_ids=("a", "b"),
        idx_mapping=np.array([3, 1]),
        query_start_loc=np.array([0, 1, 4], np.int32),
        seq_lens=np.array([8, 3], np.int32),
        input_ids=np.array([50, 60, 61, 62], np.int32),
        positions=np.array([7, 0, 1, 2]),
        logits_indices=np.array([0, 3]),
        cu_num_logits=np.array([0, 1, 2], np.int32),
        expanded_idx_mapping=np.array([3, 1]),
        block_tables=((np.array([4, 5], np.int32), np.array([6], np.int32)),),
        slot_mappings=np.array([[83, 96, 97, 98, -1]]),
        num_sampled=np.array([1, 0], np.int32),
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_every_integer_field_can_be_compared_and_is_a_field():
    assert set(INTEGER_FIELDS) <= COMPARABLE_FIELDS <= {f.name for f in dataclasses.fields(StepRecord)}


@pytest.mark.parametrize("name", sorted(COMPARABLE_FIELDS))
def test_equal_records_have_no_difference(name):
    result = compare_field(name, record(), record())
    assert (result.name, result.different, result.first) == (name, 0, None)


def test_elements_are_counted_and_the_first_is_placed():
    result = compare_field("input_ids", record(), record(input_ids=np.array([50, 60, 99, 98], np.int64)))
    assert (result.equal, result.different) == (2, 2)
    first = result.first
    assert (first.index, first.req_id, first.position, first.expected, first.got) == ((2,), "b", 1, 61, 99)
    assert "input_ids[2], request 'b', position 1: expected 61, got 99" in str(first)


def test_dtype_does_not_matter():
    assert compare_field("seq_lens", record(), record(seq_lens=np.array([8, 3], np.int64))).different == 0


@pytest.mark.parametrize(
    ("got", "equal", "different", "index"),
    [([3], 1, 1, (1,)), ([3, 1, 9], 2, 1, (2,)), ([], 0, 2, (0,)), ([9, 1, 9], 1, 2, (0,)), ([[3, 1]], 0, 4, (0,))],
)
def test_missing_and_extra_elements_are_different(got, equal, different, index):
    result = compare_field("idx_mapping", record(), record(idx_mapping=np.array(got)))
    assert (result.equal, result.different, result.first.index) == (equal, different, index)


def test_req_ids_compare_as_a_tuple():
    result = compare_field("req_ids", record(), record(req_ids=("a", "c", "d")))
    assert (result.equal, result.different) == (1, 2)
    assert (result.first.req_id, result.first.expected, result.first.got) == ("b", "b", "c")


def test_padding_of_slot_mappings_counts_and_belongs_to_nobody():
    result = compare_field("slot_mappings", record(), record(slot_mappings=np.array([[83, 96, 97, 98, 0]])))
    assert (result.equal, result.different, result.first.index) == (4, 1, (0, 4))
    assert (result.first.req_id, result.first.position) == (None, None)
    shorter = compare_field("slot_mappings", record(), record(slot_mappings=np.array([[83, 96, 97, 98]])))
    assert (shorter.equal, shorter.different, shorter.first.got) == (4, 1, None)


def test_slots_know_their_request_and_position():
    result = compare_field("slot_mappings", record(), record(slot_mappings=np.array([[83, 96, 97, 99, -1]])))
    assert (result.first.index, result.first.req_id, result.first.position) == ((0, 3), "b", 2)


def test_logits_rows_and_boundaries_know_their_request():
    result = compare_field("logits_indices", record(), record(logits_indices=np.array([0, 2])))
    assert (result.first.req_id, result.first.position) == ("b", 2)
    result = compare_field("query_start_loc", record(), record(query_start_loc=np.array([0, 2, 4])))
    assert (result.first.index, result.first.req_id) == ((1,), "a")


@pytest.mark.parametrize("name", ["logprobs", "num_sampled", "block_tables", "slot_mappings", "logits"])
def test_a_field_that_was_not_given_is_different_everywhere(name):
    expected = record(logprobs=np.zeros((2, 1)), logits=np.zeros((2, 4)))
    got = dataclasses.replace(expected, **{name: None})
    result = compare_field(name, expected, got)
    assert result.equal == 0
    assert result.different > 0
    assert result.first.got is None
    assert result.first.expected is not None


def test_a_field_that_was_not_recorded_has_nothing_to_compare():
    result = compare_field("ranks", record(), record(ranks=np.array([1, 1])))
    assert (result.equal, result.different, result.first) == (0, 0, None)


def test_rows_of_padding_are_compared_as_far_as_both_are_wide():
    (rows,) = record().block_tables
    wide, narrow = ((*rows, np.zeros(n, np.int32)) for n in (8, 3))
    assert compare_field("block_tables", record(block_tables=(wide,)), record(block_tables=(narrow,))).different == 0
    stale = (*rows, np.array([0, 0, 7], np.int32))
    result = compare_field("block_tables", record(block_tables=(wide,)), record(block_tables=(stale,)))
    assert result.different == 1
    assert result.first.index == (0, 2, 2)


def test_block_tables_compare_the_columns_that_the_expected_side_holds():
    longer = ((np.array([4, 5, 70]), np.array([6, 71]), np.array([0, 0])),)
    assert compare_field("block_tables", record(), record(block_tables=longer)).different == 0
    shorter = ((np.array([4]), np.array([9])),)
    result = compare_field("block_tables", record(), record(block_tables=shorter))
    assert (result.equal, result.different) == (1, 2)
    first = result.first
    assert (first.index, first.req_id, first.expected, first.got) == ((0, 0, 1), "a", 5, None)


def test_block_table_groups_on_one_side_only_are_different():
    two = record().block_tables * 2
    assert compare_field("block_tables", record(block_tables=two), record()).different == 3
    result = compare_field("block_tables", record(), record(block_tables=two))
    assert (result.equal, result.different, result.first.index) == (3, 3, (1, 0, 0))
    assert result.first.expected is None


def test_nan_equals_nan():
    values = np.array([[np.nan, 1.0], [2.0, 3.0]])
    other = np.array([[np.nan, 1.5], [2.0, np.nan]])
    assert compare_field("logprobs", record(logprobs=values), record(logprobs=values.copy())).different == 0
    result = compare_field("logprobs", record(logprobs=values), record(logprobs=other))
    assert (result.equal, result.different) == (2, 2)


def test_unknown_fields_are_refused():
    with pytest.raises(UnknownNameError, match="seq_lens"):
        compare_field("seq_len", record(), record())
