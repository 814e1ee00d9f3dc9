"""Rotary frequencies: each scheme against transformers, and against what it promises."""

import math

import numpy as np
import pytest

from runner_api import CheckpointError
from runner_api.checkpoint import RopeConfig, inverse_frequencies
from runner_api.checkpoint.rope import rope_config_from_hf

HEAD_DIM, MAX_POSITION = 64, 4096
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0 + i / 64 for i in range(32)],
    "long_factor": [1.0 + i for i in range(32)], "original_max_position_embeddings": 1024,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def read(block, **rest):
    block = {"rope_parameters": {"rope_theta": 500000.0, **block}, **rest}
    return rope_config_from_hf(block, max_position=MAX_POSITION, default_theta=10000.0)


def transformers_frequencies(block, seq_len):
    """What transformers computes for the same block; seq_len is what its dynamic schemes look at."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=HEAD_DIM, max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": 500000.0, **block},
    )  # fmt: skip
    if block["rope_type"] == "default":
        return LlamaRotaryEmbedding(config).inv_freq.double().numpy(), 1.0
    inverse, mscale = ROPE_INIT_FUNCTIONS[block["rope_type"]](config, "cpu", seq_len=seq_len)
    return inverse.double().numpy(), mscale


@pytest.mark.parametrize(
    ("block", "longest", "seq_len"),
    [
        pytest.param({"rope_type": "default"}, MAX_POSITION, None, id="default"),
        pytest.param({"rope_type": "linear", "factor": 4.0}, MAX_POSITION, None, id="linear"),
        # Taken at factor times the trained length, once and for all.
        pytest.param({"rope_type": "dynamic", "factor": 2.0}, MAX_POSITION, 2 * MAX_POSITION, id="dynamic"),
        pytest.param(LLAMA3, MAX_POSITION, None, id="llama3"),
        pytest.param(YARN, MAX_POSITION, None, id="yarn"),
        pytest.param({**YARN, "attention_factor": 1.5}, MAX_POSITION, None, id="yarn-attention-factor"),
        pytest.param({**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}, MAX_POSITION, None, id="yarn-betas"),
        pytest.param({**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}, MAX_POSITION, None, id="yarn-mscale"),
        pytest.param({**YARN, "original_max_position_embeddings": 4}, MAX_POSITION, None, id="yarn-ramp-at-the-edge"),
        pytest.param(LONGROPE, 1024, 1024, id="longrope-short"),
        pytest.param(LONGROPE, 1025, 1025, id="longrope-long"),
        pytest.param({**LONGROPE, "attention_factor": 1.2}, 1025, 1025, id="longrope-attention-factor"),
    ],
)
def test_same_as_transformers(block, longest, seq_len):
    want, want_mscale = transformers_frequencies(dict(block), seq_len)
    got, mscale = inverse_frequencies(read(block), HEAD_DIM, longest)
    assert got.dtype == np.float64
    assert got.shape == (HEAD_DIM // 2,)
    np.testing.assert_allclose(got, want, rtol=2e-6)  # theirs is float32
    assert mscale == pytest.approx(want_mscale, rel=1e-12)


def test_default_is_a_geometric_series_from_one():
    got, mscale = inverse_frequencies(RopeConfig(theta=10000.0), 8, 100)
    np.testing.assert_allclose(got, [1.0, 0.1, 0.01, 0.001], rtol=1e-14)
    assert mscale == 1.0


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    rope = read(LLAMA3)
    plain, _ = inverse_frequencies(RopeConfig(theta=500000.0), HEAD_DIM, MAX_POSITION)
    got, _ = inverse_frequencies(rope, HEAD_DIM, MAX_POSITION)
    wave = 2 * math.pi / plain
    short, long = wave < 1024 / 4, wave > 1024
    assert short.any()
    assert long.any()
    assert not (short | long).all()
    np.testing.assert_array_equal(got[short], plain[short])
    np.testing.assert_array_equal(got[long], plain[long] / 8)


def test_old_spelling_reads_as_the_new_one():
    old = {"rope_theta": 500000.0, "rope_scaling": {k if k != "rope_type" else "type": v for k, v in LLAMA3.items()}}
    assert rope_config_from_hf(old, max_position=MAX_POSITION, default_theta=None) == read(LLAMA3)
    assert read({**LONGROPE, "rope_type": "su"}) == read(LONGROPE)


def test_theta_outside_and_inside_and_absent():
    def theta(hf, default=10000.0):
        return rope_config_from_hf(hf, max_position=8, default_theta=default).theta

    assert theta({}) == 10000.0
    assert theta({"rope_theta": 3e5, "rope_scaling": None}) == 3e5
    assert theta({"rope_theta": 3e5, "rope_parameters": {"rope_theta": 7e5}}) == 7e5
    with pytest.raises(CheckpointError, match="rope_theta"):
        theta({}, default=None)


def test_factor_left_out_is_the_ratio_of_the_lengths():
    assert read({k: v for k, v in YARN.items() if k != "factor"}).factor == 4.0
    assert read(LONGROPE).factor == 4.0


@pytest.mark.parametrize(
    ("block", "names"),
    [
        ({"rope_type": "mrope"}, "mrope"),
        ({"rope_type": ["llama3"]}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": "4"}, "factor"),
        ({"rope_type": "linear", "factor": -1.0}, "factor"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor"),
        ({"rope_type": "dynamic", "factor": 1e200}, "factor"),
        ({k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}, "low_freq_factor"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor"),
        ({**LLAMA3, "original_max_position_embeddings": 0}, "original_max_position"),
        ({**YARN, "truncate": 1}, "truncate"),
        ({**YARN, "mscale": 0.7, "mscale_all_dim": -10 / math.log(4.0)}, "attention_factor"),
        ({k: v for k, v in LONGROPE.items() if k != "long_factor"}, "long_factor"),
        ({**LONGROPE, "short_factor": [0.0] * 32}, "short_factor"),
        ({**LONGROPE, "short_factor": 1.0}, "short_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": 1.0}, "theta"),
        ({"rope_theta": True}, "rope_theta"),
    ],
)
def test_refusals_name_the_key(block, names):
    with pytest.raises(CheckpointError, match=names):
        read(block)


def test_a_factor_list_of_the_wrong_length_is_refused():
    with pytest.raises(CheckpointError, match="short_factor"):
        inverse_frequencies(read(LONGROPE), HEAD_DIM // 2, 10)
