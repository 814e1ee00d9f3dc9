"""The contract: what a model runner is, whoever wrote it.

A step is two calls. `execute_model(plan)` applies the plan to the runner's state, builds the inputs and queues the
forward pass; `sample_tokens()` draws the tokens, queues their copy to the host and advances the state. Nothing waits
for the device before `get_output()`. Source: vLLM 0.33 `ModelRunner`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from runner_api.capabilities import Capability
from runner_api.config import BatchDescriptor, RunnerConfig
from runner_api.kv_cache import KVCacheConfig, KVCacheSpec
from runner_api.outputs import AsyncModelRunnerOutput, DraftTokenIds, IntermediateTensors, ModelRunnerOutput
from runner_api.plan import ForcedStep, GrammarOutput, SchedulerOutput
from runner_api.record import StepRecord


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Who the runner is. Said once in the log and stored in every record and report."""

    name: str
    class_path: str
    version: str
    device: str
    dtype: str
    layout: str
    noise: str
    capabilities: frozenset[Capability]
    notes: tuple[str, ...] = ()  # why this device and not another, and the like

    def line(self) -> str:
        text = (
            f"runner={self.name} class={self.class_path} version={self.version} device={self.device} "
            f"dtype={self.dtype} layout={self.layout} noise={self.noise}"
        )
        return text + "".join(f" ({note})" for note in self.notes)


@runtime_checkable
class ModelRunner(Protocol):
    """The methods, in the order in which an engine calls them."""

    config: RunnerConfig

    def describe(self) -> RunnerInfo: ...

    def load_model(self, model: Any) -> None:
        """`model`: a path to a checkpoint, a `Checkpoint`, a `WitnessConfig`, or a model object of this backend."""
        ...

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Layer name to what the layer stores; raises CallOrderError before load_model."""
        ...

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None: ...

    def capture_graphs(self) -> tuple[BatchDescriptor, ...]:
        """Prepare whole-step graphs; an empty tuple where every step is launched piece by piece."""
        ...

    def execute_model(
        self,
        plan: SchedulerOutput,
        *,
        descriptor: BatchDescriptor | None = None,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> ModelRunnerOutput | IntermediateTensors | None:
        """Queue one step. None: call sample_tokens next. A plan of zero tokens changes state and returns an
        empty output. Raises PlanError (state unchanged), CallOrderError."""
        ...

    def sample_tokens(
        self, grammar: GrammarOutput | None = None, *, forced: ForcedStep | None = None
    ) -> AsyncModelRunnerOutput:
        """Draw, start the copy out, advance the state. `forced` replaces the outcome before the state advances;
        the record still tells what the runner itself drew."""
        ...

    def pool(self) -> AsyncModelRunnerOutput: ...

    def take_draft_token_ids(self) -> DraftTokenIds | None: ...

    def last_step(self) -> StepRecord:
        """The record of the latest step (complete once sample_tokens was called). May wait for the device."""
        ...

    def poison_unused(self, value: int = -77, keep_blocks: Collection[int] = ()) -> None:
        """Fill whatever no later step may read (free rows, freed blocks, stale columns, buffer tails)."""
        ...

    def state_digest(self) -> Mapping[str, str]:
        """A fingerprint of every persistent table and of the KV of live requests; may wait for the device."""
        ...

    def shutdown(self) -> None: ...


RunnerFactory = Callable[[RunnerConfig], ModelRunner]


class ModelState(Protocol):
    """Hooks for model families whose inputs need more than token ids and positions."""

    def add_request(self, row: int, req_id: str) -> None: ...

    def remove_request(self, req_id: str) -> None: ...

    def prepare_inputs(self, batch: Any) -> Mapping[str, Any]: ...

    def prepare_attn(self, batch: Any) -> Mapping[str, Any]: ...

    def postprocess(self, batch: Any, num_sampled: Any) -> None: ...


class Collectives(Protocol):
    """What a model asks of its rank's group; `SingleRank` is the identity."""

    rank: int
    world_size: int

    def all_reduce(self, x: Any) -> Any: ...

    def all_gather(self, x: Any, axis: int = -1) -> Any: ...


class SingleRank:
    """One rank: reductions and gathers give back their argument."""

    rank = 0
    world_size = 1

    def all_reduce(self, x: Any) -> Any:
        return x

    def all_gather(self, x: Any, axis: int = -1) -> Any:
        return x
