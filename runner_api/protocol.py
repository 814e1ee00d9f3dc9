"""The contract: what a model runner is, whoever wrote it.

A step is two calls. `execute_model(plan)` applies the plan to the runner's state, builds the inputs and queues the
forward pass; `sample_tokens()` draws the tokens, queues their copy to the host and advances the state. Nothing waits
for the device before `get_output()`. Source: vLLM 0.33 `ModelRunner`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from runner_api.capabilities import Capability
from runner_api.config import BatchDescriptor, RunnerConfig
from runner_api.errors import CapabilityError
from runner_api.kv_cache import KVCacheConfig, KVCacheSpec
from runner_api.outputs import AsyncModelRunnerOutput, DraftTokenIds, IntermediateTensors, ModelRunnerOutput
from runner_api.plan import ForcedStep, GrammarOutput, NewRequestData, SchedulerOutput
from runner_api.record import StepRecord
from runner_api.selection import LayoutDecision

if TYPE_CHECKING:
    from runner_api.logits_processors import RowMove


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
    selection: LayoutDecision | None = None  # why this layout and not the other; None: the runner has no choice

    def line(self) -> str:
        """Everything in one line; the choice of the layout comes last."""
        text = (
            f"runner={self.name} class={self.class_path} version={self.version} device={self.device} "
            f"dtype={self.dtype} layout={self.layout} noise={self.noise}"
        )
        text += "".join(f" ({note})" for note in self.notes)
        return text if self.selection is None else f"{text} {self.selection.line()}"


@runtime_checkable
class ModelRunner(Protocol):
    """The methods, in the order in which an engine calls them."""

    config: RunnerConfig

    def describe(self) -> RunnerInfo: ...

    def load_model(self, model: Any) -> None:
        """`model`: a path to a checkpoint, a `Checkpoint`, a `WitnessConfig`, or a model object of this backend.

        May be called again until there is a KV cache; from then on it raises CallOrderError."""
        ...

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Layer name to what the layer stores; raises CallOrderError before load_model."""
        ...

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache and start with no request. Between two steps it may be called again, which forgets
        everything; while a step waits for its tokens it raises CallOrderError. Raises KVCacheError, ConfigError."""
        ...

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
        """Draw, start the copy out, advance the state.

        grammar: masks of requests of this step, by id; they go on the model's logits before everything else. forced
        replaces the outcome before the state advances, and the logits, if it has any, before the masks; the record
        still tells what the runner itself drew. A row without a winner is an error of its request (`SampleFault`),
        whatever is imposed. Raises PlanError for masks or an outcome that the step cannot have; nothing has changed
        then."""
        ...

    def pool(self) -> AsyncModelRunnerOutput: ...

    def take_draft_token_ids(self) -> DraftTokenIds | None: ...

    def last_step(self) -> StepRecord:
        """The record of the latest step (complete once sample_tokens was called); it keeps its values when later steps
        run. May wait for the device."""
        ...

    def poison_unused(self, value: int = -77, keep_blocks: Collection[int] = ()) -> None:
        """Fill whatever no later step may read (free rows, freed blocks, stale columns, buffer tails).

        Between two steps only. value: a 32-bit integer; keep_blocks: ids of blocks whose contents may be read again."""
        ...

    def state_digest(self) -> Mapping[str, str]:
        """A fingerprint of every persistent table and of the KV of live requests; may wait for the device."""
        ...

    def shutdown(self) -> None: ...


# May have two attributes: `stages` (see `runner_api.loader`), and `LAYOUTS`, the names of the row layouts that it can
# build; without it, slots alone. It chooses by `runner_api.selection.resolve_layout` and stores the decision in its
# `RunnerInfo`.
RunnerFactory = Callable[[RunnerConfig], ModelRunner]


class ModelState(Protocol):
    """Hooks for model families whose steps need more than token ids, positions and the usual metadata.

    A model brings its own as its attribute `model_state`; the others get `DefaultModelState`. `batch` is the runner's
    own description of the step. Order in a step: `remove` for every request that leaves (while it still has its row),
    `add` for every one that comes, `move_rows` if rows changed places (dense layout), then, if tokens are scheduled,
    `prepare_attn` once tables and slots are known, `prepare_inputs` just before the model runs, and `postprocess` when
    the rows have advanced. In the dense layout a request also leaves and comes where it only sits out a step.
    """

    def add(self, row: int, request: NewRequestData) -> None: ...

    def remove(self, req_id: str) -> None: ...

    def move_rows(self, moves: Sequence[RowMove]) -> None: ...

    def prepare_attn(self, batch: Any) -> Mapping[str, Any]:
        """Attention metadata by layer name, in place of what the runner has built."""
        ...

    def prepare_inputs(self, batch: Any) -> Mapping[str, Any]:
        """More keyword arguments for the model's `forward`."""
        ...

    def postprocess(self, batch: Any, num_sampled: Any) -> None:
        """num_sampled: int32[R] of this step, in batch order, where the backend keeps its arrays."""
        ...


class DefaultModelState:
    """Nothing to keep and nothing to add."""

    def add(self, row: int, request: NewRequestData) -> None:
        pass

    def remove(self, req_id: str) -> None:
        pass

    def move_rows(self, moves: Sequence[RowMove]) -> None:
        pass

    def prepare_attn(self, batch: Any) -> Mapping[str, Any]:
        return {}

    def prepare_inputs(self, batch: Any) -> Mapping[str, Any]:
        return {}

    def postprocess(self, batch: Any, num_sampled: Any) -> None:
        pass


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


def check_shard(rank: int, size: int) -> None:
    """Refuse to load a share of the weights where only all of them can be loaded. Raises CapabilityError."""
    if (rank, size) != (0, 1):
        raise CapabilityError(
            "weights are not split between ranks",
            field="parallel",
            got=f"rank {rank} of {size}",
            expected="rank 0 of 1",
        )
