"""Kernel blocks smaller than the allocator's: attention reads another table, and nothing else changes.

A runner with such groups and one without are given the same plans; every part of their records must be equal, bit for
bit: the tokens, logits and KV, and the slots, which know of the allocator's blocks alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conformance
from conformance.driver import RandomDriver
from conformance.world import PlanWorld
from runner_api import KVCacheConfig, KVCacheError, KVCacheGroup, KVCacheSpec, RunnerConfig, WitnessConfig, WitnessGroup
from runner_api.checkpoint import load_checkpoint
from runner_api.kv_cache import group_kv_cache_specs
from runner_api.loader import load_factory, load_runner

LLAMA = str(Path(conformance.__file__).parent / "data" / "checkpoints" / "llama-tiny")
WITNESS = WitnessConfig(groups=(WitnessGroup(8), WitnessGroup(12, 7), WitnessGroup(4)))
CASES = [
    pytest.param("cpu", "slots", WITNESS, (4, 3, 4), 40, id="cpu-slots-witness"),
    pytest.param("cpu", "slots", WITNESS, (1, 12, 2), 40, id="cpu-slots-witness-whole-and-single"),
    pytest.param("cpu", "dense", WITNESS, (4, 3, 4), 40, id="cpu-dense-witness"),
    pytest.param("cpu", "slots", LLAMA, (8,), 25, id="cpu-slots-llama"),
    pytest.param("gpu", "slots", WITNESS, (4, 3, 4), 12, id="gpu-slots-witness", marks=pytest.mark.interpret),
    pytest.param("gpu", "slots", LLAMA, (8,), 4, id="gpu-slots-llama", marks=pytest.mark.interpret),
    pytest.param("gpu", "dense", WITNESS, (4, 3, 4), 12, id="gpu-dense-witness", marks=pytest.mark.interpret),
]


def made(name: str, model: Any, config: RunnerConfig, kernel_sizes: Sequence[int] | None) -> Any:
    """A runner ready for its first plan; kernel_sizes: of each group, None = the allocator's blocks."""
    runner = load_runner(name, config)
    runner.load_model(model)
    cache = group_kv_cache_specs(runner.get_kv_cache_specs(), 80)
    if kernel_sizes is not None:
        groups = zip(cache.groups, kernel_sizes, strict=True)
        cache = dataclasses.replace(
            cache, groups=tuple(dataclasses.replace(g, kernel_block_size=size) for g, size in groups)
        )
    runner.initialize_kv_cache(cache)
    return runner


def difference(a: Any, b: Any) -> str:
    """Where two values differ, or ""."""
    if isinstance(a, dict):
        return "" if a.keys() == b.keys() and not any(difference(a[k], b[k]) for k in a) else "dict"
    if isinstance(a, tuple):
        return "" if len(a) == len(b) and not any(difference(x, y) for x, y in zip(a, b, strict=True)) else "tuple"
    if isinstance(a, np.ndarray):
        return "" if np.array_equal(a, b, equal_nan=a.dtype.kind == "f") else f"{a} {b}"
    return "" if a == b else f"{a} {b}"


@pytest.mark.parametrize(("name", "layout", "model", "kernel_sizes", "steps"), CASES)
def test_whole_steps_are_the_same(name: str, layout: str, model: Any, kernel_sizes: Sequence[int], steps: int) -> None:
    if name == "gpu":
        pytest.importorskip("gpu_backend.triton_support")
    if layout not in load_factory(name).LAYOUTS:
        pytest.skip(f"runner {name!r} has no {layout} layout")
    config = RunnerConfig(
        max_num_reqs=4, max_num_batched_tokens=24, max_model_len=48, layout=layout, record=frozenset({"logits", "kv"})
    )
    divided, plain = made(name, model, config, kernel_sizes), made(name, model, config, None)
    offered = divided.describe().capabilities
    vocab_size = load_checkpoint(model).config.vocab_size if isinstance(model, str) else model.vocab_size
    world = PlanWorld(config, plain.kv_cache_config, vocab_size)
    driver = RandomDriver(7, offered, max_prompt=30, churn=0.1 if layout == "slots" else 0.0)
    with_batch = 0
    for _ in range(steps):
        step = driver.next_step(world)
        divided.poison_unused(keep_blocks=world.kept_blocks())
        records = []
        for runner in (divided, plain):
            if runner.execute_model(step.plan, descriptor=step.descriptor) is None:
                runner.sample_tokens(step.grammar, forced=step.forced)
            records.append(runner.last_step())
        for field in dataclasses.fields(records[0]):
            found = difference(*(getattr(r, field.name) for r in records))
            assert not found or field.name == "runner", (field.name, found)
        world.observe(records[0].tokens(), step.drafts_held())
        with_batch += len(records[0].req_ids) > 1
    assert with_batch > steps // 4
    tables = divided.attn_metadata_builder.kernel_block_tables
    for g, group in enumerate(divided.kv_cache_config.groups):
        r = group.blocks_per_kv_block
        assert tables[g].shape[1] == r * divided.block_tables.input_block_tables[g].shape[1]


def test_a_kernel_block_divides_a_block_of_tokens() -> None:
    spec = KVCacheSpec(32, 1, 8, "float32")
    assert KVCacheGroup(("a",), spec).blocks_per_kv_block == 1
    assert KVCacheGroup(("a",), spec, 32).blocks_per_kv_block == 1
    assert KVCacheGroup(("a",), spec, 16).blocks_per_kv_block == 2
    with pytest.raises(KVCacheError, match="kernel_block_size: kernel block size does not divide"):
        KVCacheGroup(("a",), spec, 12)
    state = KVCacheSpec(32, 1, 8, "float32", kind="state")
    assert KVCacheConfig(2, (KVCacheGroup(("a",), state, 32),)).groups[0].blocks_per_kv_block == 1
    with pytest.raises(KVCacheError, match="a state is not divided"):
        KVCacheGroup(("a",), state, 16)
