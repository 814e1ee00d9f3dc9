"""One rank: builds a runner, brings it up in the order that memory accounting needs, and passes steps to it.

Order: device, model, KV cache specs, free memory, KV cache, graphs. Knows the runner by its name only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from runner_api import (
    AsyncModelRunnerOutput,
    BatchDescriptor,
    CallOrderError,
    DraftTokenIds,
    EngineError,
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunner,
    RunnerConfig,
    RunnerFactory,
    RunnerInfo,
    SchedulerOutput,
    load_runner,
)
from runner_api.loader import decide_layout
from runner_api.selection import LayoutDecision

# Of the host memory that is free at start-up, for a runner that does not measure its own: the rest is for activations
# and for whoever else lives on the machine.
HOST_MEMORY_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """runner: a name, `package.module:factory`, or the factory itself; model: what the runner's `load_model` takes.

    selection: the layout that plans are made for, decided where they are made. None: whatever the worker decides.
    """

    runner: str | RunnerFactory
    model: Any
    runner_config: RunnerConfig = field(default_factory=RunnerConfig)
    selection: LayoutDecision | None = None


class Worker:
    """The methods here are what `Executor.collective_rpc` can call by name."""

    def __init__(self, config: WorkerConfig, rank: int = 0) -> None:
        self.config = config
        self.rank = rank
        self._runner: ModelRunner | None = None

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise CallOrderError("the worker has no runner", field="worker", expected="init_device first")
        return self._runner

    def init_device(self) -> None:
        """Build the runner, which takes its device.

        The choice of the layout is made once more, from what this process sees: its environment, its packages. Raises
        EngineError if that is another decision than the one that plans are made for, or if the runner has another
        layout.
        """
        c, planned = self.config, self.config.selection
        if planned is None:
            self._runner = load_runner(c.runner, c.runner_config)
            return
        own = decide_layout(c.runner, c.runner_config)
        if own.digest != planned.digest:
            raise EngineError(
                f"the worker decides otherwise than the engine that plans for it: {own.difference(planned)}",
                field="layout", got=own.line(), expected=planned.line(),
                hint="Give both processes the same environment, packages and configuration",
            )  # fmt: skip
        runner = load_runner(c.runner, c.runner_config)
        layout = runner.describe().layout
        if layout != planned.layout:
            runner.shutdown()
            raise EngineError(
                "the runner has another layout than plans are made for", field="layout", got=layout,
                expected=planned.line(), hint="Its factory must name its layouts in LAYOUTS, and ask resolve_layout",
            )  # fmt: skip
        self._runner = runner

    def load_model(self) -> None:
        self.runner.load_model(self.config.model)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.runner.get_kv_cache_specs()

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: the runner's own measure if it has one, else a share of free host memory."""
        measure = getattr(self.runner, "determine_available_memory", None)
        measured = None if measure is None else measure()
        if measured is not None:
            return int(measured)
        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * HOST_MEMORY_SHARE)

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Allocate the KV cache described by this rank's entry."""
        self.runner.initialize_kv_cache(kv_cache_configs[self.rank])

    def compile_or_warm_up_model(self) -> tuple[BatchDescriptor, ...]:
        return self.runner.capture_graphs()

    def describe(self) -> RunnerInfo:
        """Who the runner is. One that has no choice of layouts gets the reason of whoever plans for it."""
        info = self.runner.describe()
        return info if info.selection else replace(info, selection=self.config.selection)

    def execute_model(self, plan: SchedulerOutput) -> Any:
        return self.runner.execute_model(plan)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> AsyncModelRunnerOutput:
        return self.runner.sample_tokens(grammar)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.runner.take_draft_token_ids()

    def check_health(self) -> None:
        """A worker that answers is healthy."""
        assert self.runner is not None

    def shutdown(self) -> None:
        if self._runner is not None:
            self._runner.shutdown()
            self._runner = None
