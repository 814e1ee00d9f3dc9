"""Sizes of the KV cache: widths of block tables, bytes, reach of a window, and configurations that cannot be."""

import dataclasses

import pytest

from runner_api import (
    CapabilityError,
    ConfigError,
    KVCacheConfig,
    KVCacheError,
    KVCacheGroup,
    KVCacheSpec,
    KVCacheTensor,
    RunnerConfig,
    UnknownNameError,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
)
from runner_api.step_validation import check_kv_cache_config


def spec(block_size=16, **rest):
    return KVCacheSpec(block_size, 1, 8, "float32", **rest)


@pytest.mark.parametrize(
    ("block_size", "max_model_len", "width"),
    [(16, 8192, 512), (48, 8192, 176), (64, 8192, 128), (256, 8192, 32), (16, 100, 8), (1, 5, 128), (128, 129, 2)],
)
def test_width_of_a_block_table(block_size, max_model_len, width):
    """Enough columns for every token, in whole runs of 128 tokens."""
    assert spec(block_size).block_table_width(max_model_len) == width
    assert width * block_size >= max_model_len
    assert width * block_size % 128 == 0


@pytest.mark.parametrize(("window", "reach"), [(None, 0), (1, 0), (2, 1), (32, 31)])
def test_reach_of_a_window(window, reach):
    """A query reads the window's tokens, itself among them."""
    assert spec(sliding_window=window).window_reach == reach


def test_bytes_of_a_block():
    one = KVCacheSpec(16, 8, 128, "bfloat16")
    assert one.bytes_per_block == 2 * 16 * 8 * 128 * 2
    config = KVCacheConfig(4, (KVCacheGroup(("a", "b"), one), KVCacheGroup(("c",), spec())))
    assert config.bytes_per_block == 2 * one.bytes_per_block + spec().bytes_per_block
    assert KVCacheSpec(4, 1, 1, "int64", kind="token_position").bytes_per_block == 64


def test_states_have_no_slots():
    assert not spec(kind="state").has_slot_mapping
    assert spec().has_slot_mapping
    assert KVCacheSpec(4, 1, 1, "int64", kind="token_position").has_slot_mapping


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("block_size", (0, 1, 8)), ("block_size", (-4, 1, 8)), ("block_size", (1.5, 1, 8)),
        ("block_size", (True, 1, 8)), ("num_kv_heads", (16, 0, 8)), ("head_size", (16, 1, 0)),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be(field, values):
    with pytest.raises(KVCacheError) as caught:
        KVCacheSpec(*values, "float32")
    assert caught.value.field == field


@pytest.mark.parametrize("window", [0, -1, 2.5])
def test_windows_that_cannot_be(window):
    """A window of 0 would hide every key; it does not mean "no window"."""
    with pytest.raises(KVCacheError) as caught:
        spec(sliding_window=window)
    assert caught.value.field == "sliding_window"
    with pytest.raises(KVCacheError):
        WitnessConfig(groups=(WitnessGroup(4, sliding_window=window),)).kv_cache_specs()


def test_unknown_names():
    with pytest.raises(UnknownNameError, match="float32"):
        KVCacheSpec(16, 1, 8, "float23")
    with pytest.raises(UnknownNameError, match="attention"):
        spec(kind="atention")


def test_block_zero_is_not_enough():
    with pytest.raises(KVCacheError, match="null block"):
        KVCacheConfig(1, ())


@pytest.mark.parametrize("kernel", [0, 3, 32])
def test_kernel_blocks_divide_allocator_blocks(kernel):
    with pytest.raises(KVCacheError, match="kernel"):
        KVCacheConfig(4, (KVCacheGroup(("a",), spec(), kernel),))
    KVCacheConfig(4, (KVCacheGroup(("a",), spec(), 8),))


def test_layers_of_one_spec_form_a_group():
    specs = {"a": spec(), "b": spec(8), "c": spec()}
    config = group_kv_cache_specs(specs, 10)
    assert [g.layer_names for g in config.groups] == [("a", "c"), ("b",)]
    assert [(t.size, t.shared_by) for t in config.tensors] == [
        (10 * spec().bytes_per_block, ("a",)), (10 * spec(8).bytes_per_block, ("b",)),
        (10 * spec().bytes_per_block, ("c",)),
    ]  # fmt: skip


@pytest.mark.parametrize("num_blocks", [None, "20", 2.5, True, 1])
def test_numbers_of_blocks_that_cannot_be(num_blocks):
    with pytest.raises(KVCacheError) as caught:
        KVCacheConfig(num_blocks, (KVCacheGroup(("a",), spec()),))
    assert caught.value.field == "num_blocks"


def test_parts_of_the_wrong_kind():
    good = KVCacheGroup(("a",), spec())
    for build in (
        lambda: KVCacheConfig(4, None),
        lambda: KVCacheConfig(4, (5,)),
        lambda: KVCacheConfig(4, (good,), (good,)),
        lambda: KVCacheGroup("a", spec()),
        lambda: KVCacheGroup((), spec()),
        lambda: KVCacheGroup((1,), spec()),
        lambda: KVCacheGroup(("a",), None),
        lambda: KVCacheGroup(("a",), spec(), "8"),
        lambda: KVCacheTensor(0, ("a",)),
        lambda: KVCacheTensor("8", ("a",)),
        lambda: KVCacheTensor(8, "a"),
    ):
        with pytest.raises(KVCacheError):
            build()


# -- held against the model ----------------------------------------------------------------------------------------

WITNESS = WitnessConfig(groups=(WitnessGroup(4), WitnessGroup(8, sliding_window=6)))
SPECS = WITNESS.kv_cache_specs()
CONFIG = group_kv_cache_specs(SPECS, 10)


def changed(**fields):
    """The cache of the witness model with the first group's spec changed."""
    first = dataclasses.replace(CONFIG.groups[0], spec=dataclasses.replace(CONFIG.groups[0].spec, **fields))
    return KVCacheConfig(10, (first, CONFIG.groups[1]))


@pytest.mark.parametrize(
    "fields",
    [
        {"num_kv_heads": 3}, {"head_size": 2}, {"dtype": "float32"}, {"kind": "attention"}, {"kind": "state"},
        {"sliding_window": 4},
    ],
)  # fmt: skip
def test_a_spec_is_what_the_model_stores(fields):
    with pytest.raises(KVCacheError, match=r"witness\.0") as caught:
        check_kv_cache_config(RunnerConfig(), changed(**fields), SPECS)
    assert caught.value.field == "groups[0].spec"


def test_the_block_size_is_free():
    assert check_kv_cache_config(RunnerConfig(), changed(block_size=16), SPECS) == (0, 5)


def test_a_cache_is_a_kv_cache_config():
    for value in (None, 5, {"num_blocks": 10}):
        with pytest.raises(KVCacheError):
            check_kv_cache_config(RunnerConfig(), value, SPECS)


def test_no_reach_for_no_group_is_not_the_default():
    with pytest.raises(ConfigError, match="one entry per KV cache group"):
        check_kv_cache_config(RunnerConfig(window_reach=()), CONFIG, SPECS)


@pytest.mark.parametrize(
    ("tensors", "error", "field"),
    [
        (CONFIG.tensors[:1], KVCacheError, "tensors"),
        (CONFIG.tensors * 2, KVCacheError, "tensors"),
        ((KVCacheTensor(1, ("witness.0",)), CONFIG.tensors[1]), KVCacheError, "tensors.size"),
        ((KVCacheTensor(640, ("witness.0", "witness.1")),), CapabilityError, "tensors.shared_by"),
    ],
)
def test_each_layer_has_one_tensor_of_its_own(tensors, error, field):
    with pytest.raises(error) as caught:
        check_kv_cache_config(RunnerConfig(), dataclasses.replace(CONFIG, tensors=tensors), SPECS)
    assert caught.value.field == field
    assert check_kv_cache_config(RunnerConfig(), dataclasses.replace(CONFIG, tensors=()), SPECS)
