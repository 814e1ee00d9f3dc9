"""Whole models through both twins: chunked prefill beside decode, padded tokens, and caches full of poison."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

import torch
from safetensors.numpy import save_file

from cpu_reference.attn_metadata import AttentionMetadata as CpuMetadata
from cpu_reference.models import build_model as cpu_build_model
from cpu_reference.models.witness import witness_attention as cpu_witness_attention
from gpu_backend.attn_metadata import AttentionMetadata
from gpu_backend.models import build_model
from gpu_backend.models.witness import witness_attention, witness_logits
from gpu_backend.triton_support import resolve_device
from runner_api import ConfigError, KVCacheSpec, WitnessConfig, WitnessGroup
from runner_api.checkpoint import expected_shapes, model_config_from_hf

pytestmark = pytest.mark.interpret
DEVICE, _ = resolve_device("auto")
NUM_BLOCKS = 40
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 90, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}


def write_checkpoint(folder: Path, hf: dict[str, Any], dtype: Any = np.float32) -> Path:
    rng = np.random.default_rng(1)
    shapes = expected_shapes(model_config_from_hf(hf))
    tensors = {
        name: (rng.normal(size=s) / np.sqrt(s[-1]) if len(s) > 1 else 1 + rng.normal(size=s) / 4).astype(dtype)
        for name, s in shapes.items()
    }
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(tensors, folder / "model.safetensors")
    return folder


class Batches:
    """Requests that live over several steps; each step's inputs, for either backend."""

    def __init__(self, specs: dict[str, KVCacheSpec], vocab_size: int, seed: int) -> None:
        self.specs, self.rng, self.vocab_size = specs, np.random.default_rng(seed), vocab_size
        self.computed: dict[int, int] = {}
        # One table per layer kind; requests are named by small numbers and own scattered blocks.
        self.tables = {
            spec: self.rng.permutation(np.arange(1, NUM_BLOCKS))[:36].reshape(4, 9) for spec in set(specs.values())
        }

    def step(self, scheduled: dict[int, int], padding: int) -> dict[str, Any]:
        counts = list(scheduled.values())
        query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        done = np.array([self.computed.get(i, 0) for i in scheduled])
        positions = np.concatenate([d + np.arange(n) for d, n in zip(done, counts, strict=True)])
        owner = np.repeat(list(scheduled), counts)
        total = len(positions)
        fields: dict[str, dict[str, Any]] = {}
        for layer, spec in self.specs.items():
            table, size = self.tables[spec], spec.block_size
            slots = table[owner, positions // size] * size + positions % size
            fields[layer] = {
                "query_start_loc": query_start_loc,
                "seq_lens": (done + counts).astype(np.int32),
                "block_table": table[list(scheduled)].astype(np.int32),
                "slot_mapping": np.concatenate([slots, np.full(padding, -1)]).astype(np.int64),
                "num_reqs": len(counts), "num_actual_tokens": total, "max_query_len": max(counts),
                "max_seq_len": int((done + counts).max()), "num_decodes": 0, "num_prefills": len(counts),
                "num_decode_tokens": 0, "num_prefill_tokens": total, "window": spec.sliding_window,
            }  # fmt: skip
        for i, n in scheduled.items():
            self.computed[i] = self.computed.get(i, 0) + n
        tokens = self.rng.integers(0, self.vocab_size, total)
        return {
            "input_ids": np.concatenate([tokens, np.zeros(padding)]).astype(np.int32),
            "positions": np.concatenate([positions, np.zeros(padding)]).astype(np.int64),
            "metadata": fields,
        }


STEPS: tuple[tuple[dict[int, int], int], ...] = (({0: 5, 1: 21}, 3), ({0: 1, 2: 11, 1: 9}, 0), ({2: 1, 0: 1, 1: 1}, 5))


def run_cpu(model: Any, dtype: Any, seed: int) -> list[dict[str, np.ndarray]]:
    """Hidden states, logits and intermediates of every step through the reference."""
    specs = model.kv_cache_specs()
    caches = {layer: tuple(poison(spec, dtype) for _ in range(2)) for layer, spec in specs.items()}
    batches, answers = Batches(specs, model.vocab_size, seed), []
    for scheduled, padding in STEPS:
        step = batches.step(scheduled, padding)
        metadata = {layer: CpuMetadata(**fields) for layer, fields in step["metadata"].items()}
        seen: dict[str, np.ndarray] = {}
        hidden = model.forward(step["input_ids"], step["positions"], caches, metadata, seen)
        answers.append({"hidden": hidden, "logits": model.compute_logits(hidden), **seen})
    return answers


def run_device(model: Any, dtype: torch.dtype, seed: int) -> list[dict[str, np.ndarray]]:
    specs = model.kv_cache_specs()
    caches = {
        layer: tuple(torch.from_numpy(poison(spec, np.float32)) for _ in range(2)) for layer, spec in specs.items()
    }
    caches = {
        layer: tuple(c.to(DEVICE, dtype if c.is_floating_point() else c.dtype) for c in pair)
        for layer, pair in caches.items()
    }
    batches, answers = Batches(specs, model.vocab_size, seed), []
    to_device: Callable[[Any], Any] = lambda a: torch.from_numpy(a).to(DEVICE) if isinstance(a, np.ndarray) else a  # noqa: E731
    for scheduled, padding in STEPS:
        step = batches.step(scheduled, padding)
        metadata = {
            layer: AttentionMetadata(**{k: to_device(v) for k, v in fields.items()})
            for layer, fields in step["metadata"].items()
        }
        seen: dict[str, torch.Tensor] = {}
        hidden = model.forward(to_device(step["input_ids"]), to_device(step["positions"]), caches, metadata, seen)
        got = {"hidden": hidden, "logits": model.compute_logits(hidden), **seen}
        answers.append({name: (t if t.dtype == torch.int64 else t.float()).cpu().numpy() for name, t in got.items()})
    return answers


def poison(spec: KVCacheSpec, dtype: Any) -> np.ndarray:
    shape = (NUM_BLOCKS, spec.block_size, spec.num_kv_heads, spec.head_size)
    if spec.kind == "token_position":
        return np.full(shape, -77, np.int64)
    return np.full(shape, np.nan, dtype)


@pytest.mark.parametrize("hf", [LLAMA, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_decoders_equal_the_twin(hf: dict[str, Any], tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, hf)
    exact = run_cpu(cpu_build_model(path, "float64"), np.float64, 0)
    single = run_cpu(cpu_build_model(path, "float32"), np.float32, 0)
    got = run_device(build_model(path, "float32", DEVICE), torch.float32, 0)
    for e, s, g in zip(exact, single, got, strict=True):
        assert g.keys() == e.keys()
        assert len(g) == 2 + 2  # hidden, logits and one intermediate per layer
        for name in e:
            rounding = np.abs(s[name] - e[name]).max()
            assert np.abs(g[name] - e[name]).max() <= 4 * rounding + np.finfo(np.float32).eps, name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_weights(dtype: str, tmp_path: Path) -> None:
    """A bfloat16 file is read exactly; the results are as near as the type's spacing lets them be."""
    path = write_checkpoint(tmp_path, LLAMA, ml_dtypes.bfloat16)
    model = build_model(path, dtype, DEVICE)
    assert model.kv_cache_specs()["model.layers.0.self_attn"].dtype == dtype
    exact = run_cpu(cpu_build_model(path, "float64"), np.float64, 0)
    wide = run_device(build_model(path, "float32", DEVICE), torch.float32, 0)
    got = run_device(model, getattr(torch, dtype), 0)
    for e, w, g in zip(exact, wide, got, strict=True):
        scale = np.sqrt(np.mean(e["logits"] ** 2))
        assert np.abs(w["logits"] - e["logits"]).max() < 1e-4 * scale
        error = np.sqrt(np.mean((g["logits"] - e["logits"]) ** 2)) / scale
        assert 0 < error < 8 * torch.finfo(getattr(torch, dtype)).eps
        assert g["logits"].dtype == np.float32


WITNESSES = {
    "one group": WitnessConfig(vocab_size=64),
    "odd vocabulary": WitnessConfig(vocab_size=1003, groups=(WitnessGroup(5),)),
    "two groups, one window": WitnessConfig(64, (WitnessGroup(16), WitnessGroup(8, sliding_window=6))),
}


@pytest.mark.parametrize("config", WITNESSES.values(), ids=WITNESSES)
def test_witness_is_the_twins_bits(config: WitnessConfig) -> None:
    exact = run_cpu(cpu_build_model(config, "float32"), np.float32, 0)
    got = run_device(build_model(config, "float32", DEVICE), torch.float32, 0)
    for e, g in zip(exact, got, strict=True):
        np.testing.assert_array_equal(g["hidden"].view(np.uint64).ravel(), e["hidden"].view(np.uint64).ravel())
        np.testing.assert_array_equal(g["logits"], e["logits"])
        assert g["logits"].dtype == np.float32


def test_witness_attention_over_several_tiles() -> None:
    """Long prompts, far positions, negative and huge stored values, an empty padded request."""
    rng = np.random.default_rng(2)
    caches = [rng.integers(-(2**63), 2**63 - 1, (60, 16, 1, 1)) for _ in range(2)]
    table = np.vstack([rng.permutation(np.arange(1, 60))[:40].reshape(2, 20), np.zeros((1, 20))]).astype(np.int32)
    query_start_loc, seq_lens = np.int32([0, 150, 151, 151]), np.int32([150, 320, 0])
    for window in (None, 1, 70):
        expected = rng.integers(0, 2**63, 155).astype(np.uint64)
        hidden = torch.from_numpy(expected.view(np.int64).copy()).to(DEVICE)
        cpu_witness_attention(*caches, table, query_start_loc, seq_lens, 3, window, 1, expected)
        tensors = (torch.from_numpy(a).to(DEVICE) for a in (*caches, table, query_start_loc, seq_lens))
        witness_attention(*tensors, 3, window, 1, hidden)
        np.testing.assert_array_equal(hidden.cpu().numpy().view(np.uint64), expected)


def test_witness_logits_of_every_sign() -> None:
    model = cpu_build_model(WitnessConfig(vocab_size=300), "float32")
    bits = np.int64([0, -1, 1, -(2**63), 2**63 - 1, -77])
    logits = torch.full((6, 300), float("nan"), device=DEVICE)
    witness_logits(torch.from_numpy(bits).to(DEVICE), 300, logits)
    np.testing.assert_array_equal(logits.cpu().numpy(), model.compute_logits(bits.view(np.uint64)[:, None]))


def test_what_is_not_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a model"):
        build_model(3, "float32", DEVICE)
    model = build_model(WitnessConfig(), "float32", DEVICE)
    assert build_model(model, "float32", DEVICE) is model
