"""Bring a runner up the way an engine does: build, load the model, group its KV specs, give it a cache."""

from __future__ import annotations

from typing import Any

from conformance.foreign import staying
from runner_api import KVCacheConfig, ModelRunner, RunnerConfig, group_kv_cache_specs
from runner_api.loader import call_factory
from runner_api.protocol import RunnerFactory


def build_runner(
    runner: str | RunnerFactory, model: Any, config: RunnerConfig, num_blocks: int
) -> tuple[ModelRunner, KVCacheConfig]:
    """A runner that is ready for its first plan, and its cache. `model` is whatever `load_model` takes."""
    built = call_factory(runner, config)
    with staying():
        built.load_model(model)
        kv_cache_config = group_kv_cache_specs(built.get_kv_cache_specs(), num_blocks)
        built.initialize_kv_cache(kv_cache_config)
    return built, kv_cache_config
