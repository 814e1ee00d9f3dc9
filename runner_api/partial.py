"""An adapter that offers stages alone: kernels, and neither a model nor whole steps.

Who has, say, a slot mapping kernel and a sampling kernel wraps them as a `StageSet` and gives the judge

    adapter = StageAdapter(info, stages)

by the name `package.module:adapter`. What the adapter does not offer is not judged, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from runner_api.capabilities import Capability
from runner_api.config import RunnerConfig
from runner_api.errors import CapabilityError, ConfigError
from runner_api.protocol import ModelRunner, RunnerInfo
from runner_api.stages import StageSet


class StageAdapter:
    """A `RunnerFactory` of runners that only describe themselves.

    info: who the adapter is; its capabilities may name STAGES and dtypes, and STAGES is added if it does not say so.
    stages: gives the `StageSet`; it may list any of the contract's stages, by their names, at least one.

    Raises: `ConfigError` if `info` offers whole steps.
    """

    def __init__(self, info: RunnerInfo, stages: Callable[[], StageSet]) -> None:
        if Capability.GENERATE in info.capabilities:
            raise ConfigError(
                "an adapter of stages runs no whole step", field="info.capabilities", got="generate",
                expected="stages, and dtypes", hint="A runner that runs whole steps is its own factory",
            )  # fmt: skip
        self.info = replace(info, capabilities=info.capabilities | {Capability.STAGES})
        self.LAYOUTS = (info.layout,)
        self._stages = stages

    def stages(self) -> StageSet:
        """The stages; raises ConfigError if there is none."""
        found = self._stages()
        if not isinstance(found, StageSet) or not found.stages:
            raise ConfigError(
                f"adapter {self.info.name!r} lists no stage", field="stages", got=found,
                expected="a StageSet with at least one StageSpec",
            )  # fmt: skip
        return found

    def __call__(self, config: RunnerConfig) -> ModelRunner:
        return _StagesAlone(config, self.info)  # type: ignore[return-value]


class _StagesAlone:
    """What `StageAdapter` builds: everything but `describe` and `shutdown` raises CapabilityError."""

    def __init__(self, config: RunnerConfig, info: RunnerInfo) -> None:
        self.config, self._info = config, info

    def describe(self) -> RunnerInfo:
        return self._info

    def shutdown(self) -> None:
        pass

    def load_model(self, model: Any) -> None:
        self._refuse("load_model")

    def get_kv_cache_specs(self) -> Mapping[str, Any]:
        self._refuse("get_kv_cache_specs")

    def initialize_kv_cache(self, kv_cache_config: Any) -> None:
        self._refuse("initialize_kv_cache")

    def capture_graphs(self) -> tuple[Any, ...]:
        self._refuse("capture_graphs")

    def execute_model(self, plan: Any, **_: Any) -> Any:
        self._refuse("execute_model")

    def sample_tokens(self, grammar: Any = None, **_: Any) -> Any:
        self._refuse("sample_tokens")

    def pool(self) -> Any:
        self._refuse("pool")

    def take_draft_token_ids(self) -> Any:
        self._refuse("take_draft_token_ids")

    def last_step(self) -> Any:
        self._refuse("last_step")

    def poison_unused(self, value: int = -77, keep_blocks: Any = ()) -> None:
        self._refuse("poison_unused")

    def state_digest(self) -> Mapping[str, str]:
        self._refuse("state_digest")

    def _refuse(self, method: str) -> NoReturn:
        raise CapabilityError(
            f"runner {self._info.name!r} offers stages alone", field=method, got="a call",
            expected="capability generate", hint="Judge its stages, or take a runner that runs whole steps",
        )  # fmt: skip
