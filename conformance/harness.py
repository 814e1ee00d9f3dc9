"""Bring a runner up the way an engine does: build, load the model, group its KV specs, give it a cache."""

from __future__ import annotations

from typing import Any

from conformance.foreign import let_go, opened, staying
from runner_api import KVCacheConfig, ModelRunner, RunnerConfig, RunnerInfo, group_kv_cache_specs
from runner_api.loader import call_factory
from runner_api.protocol import RunnerFactory


def build_runner(
    runner: str | RunnerFactory, model: Any, config: RunnerConfig, num_blocks: int
) -> tuple[ModelRunner, KVCacheConfig]:
    """A runner that is ready for its first plan, and its cache. `model` is whatever `load_model` takes.

    Who calls this shuts the runner down, or leaves that to `foreign.all_let_go`.
    """
    built = opened(call_factory(runner, config))
    with staying():
        built.load_model(model)
        kv_cache_config = group_kv_cache_specs(built.get_kv_cache_specs(), num_blocks)
        built.initialize_kv_cache(kv_cache_config)
    return built, kv_cache_config


def info_of(runner: str | RunnerFactory, **changes: Any) -> RunnerInfo:
    """What the smallest runner of its kind says of itself; it is let go. Raises what building it does, and what it
    raises. changes: fields of its configuration."""
    built = call_factory(runner, RunnerConfig(**{"max_num_reqs": 2, **changes}))
    try:
        with staying():
            return built.describe()
    finally:
        let_go(built)
