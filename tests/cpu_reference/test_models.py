"""Llama, Qwen2 and Qwen3 of random weights: the reference's logits are those of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runner_api import (
    CachedRequestData,
    ConfigError,
    NewRequestData,
    RunnerConfig,
    SchedulerOutput,
    group_kv_cache_specs,
    load_runner,
)

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

SIZES = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": False}),
    "llama with biases": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama with scaled rope": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "qwen2, tied": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": False}),
}


def random_model(family: str):
    config_name, model_name, extra = FAMILIES[family]
    torch.manual_seed(7)
    extra = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **extra}
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**SIZES, **extra)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that every part of the model shows in the logits
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def chunked_logits(path: Path, tokens: list[int], dtype: str) -> np.ndarray:
    """Logits after the last of `tokens`, computed in chunks of 5, 1 and the rest, over scattered blocks."""
    runner = load_runner("cpu", RunnerConfig(4, 64, 64, dtype=dtype, record=frozenset({"logits"})))
    runner.load_model(path)
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), 8))
    new = NewRequestData("a", tokens, tokens, 0, ([5, 2],))
    runner.execute_model(SchedulerOutput([new], num_scheduled_tokens={"a": 5}, total_num_scheduled_tokens=5))
    runner.sample_tokens()
    for computed, n in ((5, 1), (6, len(tokens) - 6)):
        cached = CachedRequestData(["a"], [computed], [None], [0])
        runner.execute_model(SchedulerOutput([], cached, {"a": n}, n))
        runner.sample_tokens()
    return runner.last_step().logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], 23).tolist()
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0, -1].numpy()
        exact = model.double()(torch.tensor([tokens])).logits[0, -1].numpy()
    largest = np.abs(exact).max()
    assert np.abs(chunked_logits(tmp_path, tokens, "float32") - theirs).max() <= 1e-5 * largest
    # Rotation tables are float32 in transformers whatever the weights are, so float64 agrees to their rounding.
    assert np.abs(chunked_logits(tmp_path, tokens, "float64") - exact).max() <= 3e-6 * largest


def test_rows_longer_than_the_model_reaches_are_refused(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="max_model_len: longer than the model reaches \\(got 65, expected <= 64\\)"):
        load_runner("cpu", RunnerConfig(4, 64, 65)).load_model(tmp_path)
