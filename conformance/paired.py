"""Two runners behind one interface: an engine drives the pair as if it were one, and every step is compared.

The candidate goes with the oracle until every request has `most_tokens` tokens; from then on the oracle runs alone.
The first divergence raises `Diverged`, so that the engine stops where the runners part.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from conformance.lockstep import Divergence, Lockstep, LockstepResult, TokenPolicy
from runner_api import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    BatchDescriptor,
    CallOrderError,
    CapabilityError,
    DraftTokenIds,
    ForcedStep,
    GrammarOutput,
    IntermediateTensors,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunner,
    ModelRunnerOutput,
    RunnerError,
    RunnerInfo,
    SchedulerOutput,
    StepRecord,
)

# observer(step number, record, seconds, result so far), after each compared step
Observer = Callable[[int, StepRecord, float, LockstepResult], None]


class Diverged(RunnerError):
    """The two runners differ; `divergence` says where."""

    default_code = "MR-ERR-012"

    def __init__(self, divergence: Divergence) -> None:
        self.divergence = divergence
        super().__init__(f"the runners diverge at step {divergence.step}: {divergence.difference}")


class PairedRunner:
    """A `ModelRunner` made of a candidate and an oracle, both built alike; both must record logits.

    While both run, `execute_model` only keeps the plan: an impossible one is refused by `sample_tokens` (as a
    divergence, since the candidate refuses it first), not by the call that brought it. Drive it with legal plans.
    """

    def __init__(
        self,
        candidate: ModelRunner,
        oracle: ModelRunner,
        *,
        policy: TokenPolicy,
        most_tokens: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.candidate, self.oracle = candidate, oracle
        self.config = oracle.config
        self.lockstep = Lockstep(candidate, oracle, policy)
        self.most_tokens = most_tokens
        self.observer = observer
        self._drawn: Counter[str] = Counter()
        self._pending: tuple[SchedulerOutput, BatchDescriptor | None] | None = None
        self._alone = False

    def describe(self) -> RunnerInfo:
        return self.oracle.describe()

    def load_model(self, model: Any) -> None:
        self.oracle.load_model(model)
        self.candidate.load_model(model)

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self.oracle.get_kv_cache_specs()

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        self.oracle.initialize_kv_cache(kv_cache_config)
        self.candidate.initialize_kv_cache(kv_cache_config)

    def capture_graphs(self) -> tuple[BatchDescriptor, ...]:
        return self.oracle.capture_graphs()

    def execute_model(
        self,
        plan: SchedulerOutput,
        *,
        descriptor: BatchDescriptor | None = None,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> ModelRunnerOutput | IntermediateTensors | None:
        """Both runners take their step in `sample_tokens`, where they can be compared whole."""
        if self._pending is not None:
            raise CallOrderError("the previous step has not been sampled", field="execute_model")
        if intermediate_tensors is not None:
            raise CapabilityError("pipeline stages are not offered", field="intermediate_tensors")
        if self._alone:
            return self.oracle.execute_model(plan, descriptor=descriptor)
        if plan.total_num_scheduled_tokens == 0:
            self._step(plan, descriptor)
            return EMPTY_MODEL_RUNNER_OUTPUT
        self._pending = (plan, descriptor)
        return None

    def sample_tokens(
        self, grammar: GrammarOutput | None = None, *, forced: ForcedStep | None = None
    ) -> AsyncModelRunnerOutput:
        if self._alone:
            return self.oracle.sample_tokens(grammar, forced=forced)
        if self._pending is None:
            raise CallOrderError("no step is waiting for its tokens", field="sample_tokens")
        plan, descriptor = self._pending
        self._pending = None
        record = self._step(plan, descriptor, forced, grammar)
        self._drawn.update({req_id: len(t) for req_id, t in record.tokens().items()})
        if self.most_tokens is not None:
            self._alone = min(self._drawn.values()) >= self.most_tokens
        output = self.lockstep.oracle_output
        assert output is not None
        return output

    def _step(
        self,
        plan: SchedulerOutput,
        descriptor: BatchDescriptor | None,
        forced: ForcedStep | None = None,
        grammar: GrammarOutput | None = None,
    ) -> StepRecord:
        start = time.perf_counter()
        record = self.lockstep.step(plan, descriptor, forced, grammar)
        result = self.lockstep.result
        if record is None:
            assert result.first is not None
            raise Diverged(result.first)
        if self.observer is not None and record.num_reqs:
            self.observer(result.steps, record, time.perf_counter() - start, result)
        return record

    def pool(self) -> AsyncModelRunnerOutput:
        raise CapabilityError("pooling is not offered", field="pool")

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.oracle.take_draft_token_ids()

    def last_step(self) -> StepRecord:
        return self.oracle.last_step()

    def poison_unused(self, value: int = -77, keep_blocks: Collection[int] = ()) -> None:
        self.oracle.poison_unused(value, keep_blocks)
        self.candidate.poison_unused(value, keep_blocks)

    def state_digest(self) -> Mapping[str, str]:
        return self.oracle.state_digest()

    def shutdown(self) -> None:
        self.candidate.shutdown()
        self.oracle.shutdown()
