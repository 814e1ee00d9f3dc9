"""Bring a runner up the way an engine does: build, load the model, group its KV specs, give it a cache."""

from __future__ import annotations

from typing import Any

from runner_api import KVCacheConfig, ModelRunner, RunnerConfig, group_kv_cache_specs, load_factory
from runner_api.loader import call_factory
from runner_api.protocol import RunnerFactory


def make_runner(runner: str | RunnerFactory, config: RunnerConfig) -> ModelRunner:
    """A runner without a model; `runner` is a name, `package.module:factory`, or the factory itself."""
    return call_factory(runner, config)


def factory_of(runner: str | RunnerFactory) -> RunnerFactory:
    """The factory behind a name; looking one up costs more than building a small runner."""
    return load_factory(runner)


def kv_cache_config_for(runner: ModelRunner, num_blocks: int) -> KVCacheConfig:
    """The cache of `num_blocks` blocks that the runner's loaded model needs."""
    return group_kv_cache_specs(runner.get_kv_cache_specs(), num_blocks)


def build_runner(
    runner: str | RunnerFactory, model: Any, config: RunnerConfig, num_blocks: int
) -> tuple[ModelRunner, KVCacheConfig]:
    """A runner that is ready for its first plan, and its cache. `model` is whatever `load_model` takes."""
    built = make_runner(runner, config)
    built.load_model(model)
    kv_cache_config = kv_cache_config_for(built, num_blocks)
    built.initialize_kv_cache(kv_cache_config)
    return built, kv_cache_config
