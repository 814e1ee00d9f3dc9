"""Runner options: ranges, names, and that none is silently ignored."""

import dataclasses

import pytest

from runner_api import ConfigError, ParallelContext, RunnerConfig, UnknownNameError, WitnessConfig


def test_defaults():
    c = RunnerConfig()
    assert (c.layout, c.noise, c.dtype, c.device) == ("slots", "murmur3", "float32", "auto")
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
    [("layout", "slot", "slots"), ("noise", "murmur", "murmur3"), ("dtype", "float23", "float32")],
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
