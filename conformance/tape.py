"""What a probe tells its runners, kept as cases: so that what a probe finds can be told as a batch and as a program."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from conformance.case import Case, CaseStep
from conformance.foreign import own_copy
from runner_api import ModelRunner, RunnerConfig, SchedulerOutput, WitnessConfig
from runner_api.loader import call_factory
from runner_api.protocol import RunnerFactory


@dataclass(slots=True)
class Tape:
    """One runner: what it was built from, and the steps that it took without an error."""

    config: RunnerConfig
    model: Any = None
    num_blocks: int = 0
    steps: list[CaseStep] = field(default_factory=list)

    def case(self, record: frozenset[str]) -> Case | None:
        """None where no step of the witness model was taken, or a user's own code took part. record: the parts that
        shall be recorded."""
        if not isinstance(self.model, WitnessConfig) or not self.steps or self.config.logits_processors:
            return None
        return Case(replace(self.config, record=record), self.model, self.num_blocks, tuple(self.steps))


@dataclass(frozen=True, slots=True)
class Taping:
    """A factory whose runners are kept on tapes."""

    runner: RunnerFactory
    tapes: list[Tape]

    def __call__(self, config: RunnerConfig) -> ModelRunner:
        built = call_factory(self.runner, config)
        self.tapes.append(Tape(config))
        return Taped(built, self.tapes[-1])  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


class Taped:
    """A runner that writes down what it is told."""

    def __init__(self, runner: ModelRunner, tape: Tape) -> None:
        self._runner, self._tape = runner, tape
        self._keep: frozenset[int] | None = None  # of the poison before the next step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def load_model(self, model: Any) -> None:
        self._runner.load_model(model)
        self._tape.model = model

    def initialize_kv_cache(self, kv_cache_config: Any) -> None:
        self._runner.initialize_kv_cache(kv_cache_config)
        self._tape.num_blocks = kv_cache_config.num_blocks

    def poison_unused(self, *args: Any, **kwargs: Any) -> None:
        self._runner.poison_unused(*args, **kwargs)
        self._keep = frozenset(kwargs.get("keep_blocks", args[1] if len(args) > 1 else ()))

    def execute_model(self, plan: Any, *, descriptor: Any = None, **rest: Any) -> Any:
        told = own_copy(plan) if isinstance(plan, SchedulerOutput) else None
        done = self._runner.execute_model(plan, descriptor=descriptor, **rest)
        if told is not None:
            self._tape.steps.append(CaseStep(told, descriptor, keep_blocks=self._keep))
        self._keep = None
        return done

    def sample_tokens(self, grammar: Any = None, *, forced: Any = None) -> Any:
        done = self._runner.sample_tokens(grammar, forced=forced)
        if self._tape.steps:
            self._tape.steps[-1] = replace(self._tape.steps[-1], forced=forced, grammar=grammar)
        return done
