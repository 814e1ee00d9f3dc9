"""Runner options: ranges, names, and that none is silently ignored."""

import dataclasses

import numpy as np
import pytest

from runner_api import (
    ConfigError,
    KVCacheError,
    ParallelContext,
    ReasoningConfig,
    RunnerConfig,
    UnknownNameError,
    WitnessConfig,
    WitnessGroup,
)


def test_defaults():
    c = RunnerConfig()
    assert (c.layout, c.noise, c.dtype, c.device) == (None, "murmur3", "float32", "auto")
    assert c.parallel.world_size == 1


@pytest.mark.parametrize("field", ["max_num_reqs", "max_num_batched_tokens", "max_model_len", "max_concurrent_batches"])
@pytest.mark.parametrize("value", [0, -1, 1.5, None, "8", True])
def test_sizes_are_positive_integers(field, value):
    with pytest.raises(ConfigError) as caught:
        RunnerConfig(**{field: value})
    assert caught.value.field == field
    assert caught.value.got is value


@pytest.mark.parametrize("value", [-1, 0.5, None])
def test_number_of_drafts(value):
    with pytest.raises(ConfigError) as caught:
        RunnerConfig(num_speculative_tokens=value)
    assert caught.value.field == "num_speculative_tokens"


@pytest.mark.parametrize(
    ("field", "value", "near"),
    [
        ("layout", "slot", "slots"),
        ("noise", "murmur", "murmur3"),
        ("dtype", "float23", "float32"),
        ("logprobs_mode", "raw_logprob", "raw_logprobs"),
        ("logprobs_mode", "processed", "processed_logits"),
    ],
)
def test_names_list_the_nearest(field, value, near):
    with pytest.raises(UnknownNameError) as caught:
        RunnerConfig(**{field: value})
    assert caught.value.field == field
    assert f"Did you mean {near!r}" in str(caught.value)


def test_record_parts():
    with pytest.raises(UnknownNameError, match="logits"):
        RunnerConfig(record=frozenset({"logit"}))
    assert RunnerConfig(record=frozenset({"kv", "logits", "intermediates"})).record


@pytest.mark.parametrize("rows", [(), (0,), (0, 0), (1, 2), (0, 1, 2)])
def test_free_rows_are_a_permutation(rows):
    with pytest.raises(ConfigError) as caught:
        RunnerConfig(max_num_reqs=2, initial_free_rows=rows)
    assert caught.value.field == "initial_free_rows"
    RunnerConfig(max_num_reqs=2, initial_free_rows=(1, 0))


def test_a_reach_is_not_negative():
    with pytest.raises(ConfigError) as caught:
        RunnerConfig(window_reach=(3, -1))
    assert caught.value.field == "window_reach"


def test_from_dict():
    assert RunnerConfig.from_dict({"max_num_reqs": 3}).max_num_reqs == 3
    with pytest.raises(UnknownNameError, match="max_num_reqs"):
        RunnerConfig.from_dict({"max_num_seqs": 3})
    values = {f.name: getattr(RunnerConfig(), f.name) for f in dataclasses.fields(RunnerConfig)}
    assert RunnerConfig.from_dict(values) == RunnerConfig()


def test_world_size():
    assert ParallelContext(tp_size=2, pp_size=3, dp_size=1, dcp_size=2).world_size == 12


@pytest.mark.parametrize("values", [{"vocab_size": 1}, {"groups": ()}])
def test_witness_models_that_cannot_be(values):
    with pytest.raises(ConfigError) as caught:
        WitnessConfig(**values)
    assert caught.value.field == next(iter(values))


# -- every field is of its type, or refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parallel", None), ("parallel", (1,)), ("device", None), ("device", 5), ("record", None), ("record", "kv"),
        ("record", 5), ("window_reach", 5), ("window_reach", ("a",)), ("window_reach", (1.5,)),
        ("window_reach", (True,)),
        ("initial_free_rows", 5), ("initial_free_rows", ("a",)), ("layout", 5), ("noise", None),
        ("dtype", np.float32),
    ],
)  # fmt: skip
def test_fields_of_the_wrong_kind(field, value):
    with pytest.raises(ConfigError) as caught:
        RunnerConfig(**{field: value})
    assert caught.value.field == field


def test_numpy_integers_and_lists_are_stored_plainly():
    c = RunnerConfig(
        max_num_reqs=np.int64(2), initial_free_rows=[np.int32(1), 0], window_reach=[np.int64(3)], record=["kv"]
    )
    assert c == RunnerConfig(max_num_reqs=2, initial_free_rows=(1, 0), window_reach=(3,), record=frozenset({"kv"}))
    assert type(c.max_num_reqs) is type(c.initial_free_rows[0]) is int


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("tp_rank", {"tp_rank": 1}), ("pp_rank", {"pp_rank": -1}), ("dp_rank", {"dp_size": 2, "dp_rank": 2}),
        ("tp_size", {"tp_size": -1}), ("dcp_size", {"dcp_size": 0}), ("tp_size", {"tp_size": 1.0}),
        ("dcp_interleave", {"dcp_interleave": 2}), ("dcp_interleave", {"dcp_size": 2, "dcp_interleave": 0}),
    ],
)  # fmt: skip
def test_ranks_lie_in_their_groups(field, values):
    with pytest.raises(ConfigError) as caught:
        ParallelContext(**values)
    assert caught.value.field == field
    assert ParallelContext(tp_size=2, tp_rank=1, dcp_size=2, dcp_interleave=16).dcp_interleave == 16


@pytest.mark.parametrize("values", [None, 5, [("max_num_reqs", 3)]])
def test_options_come_as_a_mapping(values):
    with pytest.raises(ConfigError, match="mapping"):
        RunnerConfig.from_dict(values)


@pytest.mark.parametrize("groups", [5, (4,), None])
def test_witness_groups_are_groups(groups):
    with pytest.raises(ConfigError):
        WitnessConfig(groups=groups)


@pytest.mark.parametrize("block_size", [0, -1, None, "4"])
def test_a_witness_group_has_a_block_size(block_size):
    with pytest.raises(KVCacheError):
        WitnessGroup(block_size)


def test_markers_of_thinking():
    r = ReasoningConfig([1, np.int64(2)], [5, 6, 3])
    assert (r.start_token_ids, r.end_token_ids, r.natural_end_token_ids) == ((1, 2), (5, 6, 3), (5, 6, 3))
    assert type(r.start_token_ids[1]) is int
    assert ReasoningConfig((1,), (5, 6, 3), (6, 3)).natural_end_token_ids == (6, 3)
    assert RunnerConfig(reasoning=r).reasoning is r
    assert RunnerConfig().reasoning is None


@pytest.mark.parametrize(
    ("markers", "field"),
    [
        (((), (1,)), "start_token_ids"), (((1,), ()), "end_token_ids"), (((1,), (2,), (-1,)), "natural_end_token_ids"),
        (((1.5,), (2,)), "start_token_ids"), (((True,), (2,)), "start_token_ids"), ((5, (2,)), "start_token_ids"),
        (("ab", (2,)), "start_token_ids"), (((1,), (2,), 3), "natural_end_token_ids"),
    ],
)  # fmt: skip
def test_markers_that_are_none(markers, field):
    with pytest.raises(ConfigError) as caught:
        ReasoningConfig(*markers)
    assert caught.value.field == field


def test_reasoning_is_told_in_its_own_type():
    with pytest.raises(ConfigError) as caught:
        RunnerConfig(reasoning={"start_token_ids": (1,)})
    assert caught.value.field == "reasoning"


@pytest.mark.parametrize("processors", ["a:b", [3], ["no_colon"], {"a:b"}, None])
def test_logits_processors_are_factories_or_their_names(processors):
    with pytest.raises(ConfigError) as caught:
        RunnerConfig(logits_processors=processors)
    assert caught.value.field == "logits_processors"
    assert RunnerConfig(logits_processors=[dict, "a.b:c"]).logits_processors == (dict, "a.b:c")
