"""A runner in another process, in whatever language: `process:COMMAND LINE` as the name of a runner.

The program speaks JSON lines (docs/json-lines.md). One program serves every runner of a factory; it is started when it
is first needed, and again if it has ended. What it refuses is raised here as the error that it names.
`python -m runner_api.serve` is such a program for any runner in Python.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import replace
from typing import Any

import numpy as np

from runner_api.capabilities import Capability
from runner_api.config import BatchDescriptor, RunnerConfig
from runner_api.constants import SPEC_VERSION
from runner_api.errors import CapabilityError, ConfigError, PlanError, RunnerError
from runner_api.json_lines import (
    Built,
    Greeting,
    ListedStages,
    Sampled,
    arguments_from_json,
    arguments_to_json,
    model_to_json,
)
from runner_api.json_process import JsonProcess
from runner_api.kv_cache import KVCacheConfig, KVCacheSpec
from runner_api.outputs import AsyncModelRunnerOutput, DraftTokenIds, IntermediateTensors, ModelRunnerOutput
from runner_api.plan import ForcedStep, GrammarOutput, SchedulerOutput
from runner_api.protocol import RunnerInfo
from runner_api.record import StepRecord
from runner_api.stages import StageSet, StageSpec
from runner_api.wire import from_json, to_json

TIMEOUT_VARIABLE = "MODELRUNNER_PROCESS_TIMEOUT"
DEFAULT_TIMEOUT = 60.0
# What cannot be told in JSON: live objects, tensors of other ranks, a model's own features.
NOT_CARRIED = frozenset(
    {
        Capability.LOGITS_PROCESSORS, Capability.POOLING, Capability.LORA, Capability.MULTIMODAL,
        Capability.PROMPT_EMBEDS, Capability.TENSOR_PARALLEL, Capability.PIPELINE_PARALLEL,
        Capability.CONTEXT_PARALLEL,
    }
)  # fmt: skip


class ProcessFactory:
    """A `RunnerFactory` whose runners live in the program of this command line.

    timeout: seconds for one answer; None: MODELRUNNER_PROCESS_TIMEOUT, else 60. Raises ConfigError for a bad one.
    """

    def __init__(self, command: str, timeout: float | None = None) -> None:
        self.command = command
        self.timeout = _seconds(os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT) if timeout is None else timeout)
        self._process: JsonProcess | None = None
        self._greeting = Greeting(SPEC_VERSION, "")
        self._abandoned: list[tuple[JsonProcess, int]] = []

    def __call__(self, config: RunnerConfig) -> ProcessRunner:
        told, process = to_json(config), self.process()
        self._shut_down_abandoned(process)
        process = self.process()  # another one, if the program has ended meanwhile
        number = ask(process, "build", Built, config=told).runner
        runner = ProcessRunner(config, process, number)
        weakref.finalize(runner, self._abandoned.append, (process, number)).atexit = False
        return runner

    def __repr__(self) -> str:
        return f"ProcessFactory({self.command!r})"

    @property
    def LAYOUTS(self) -> tuple[str, ...]:
        """The layouts that the program can build, as it says at its start."""
        self.process()
        return self._greeting.layouts

    @property
    def stages(self) -> Callable[[], StageSet]:
        """Gives the program's stages; there is no such attribute where it offers none."""
        self.process()
        if not self._greeting.stages:
            raise AttributeError("stages")
        return self._stages

    def process(self) -> JsonProcess:
        """The running program, once it has said who it is."""
        if self._process is None or not self._process.alive:
            process = JsonProcess(self.command, self.timeout)
            greeting = ask(process, "start", Greeting, spec_version=SPEC_VERSION)
            if greeting.spec_version != SPEC_VERSION:
                process.close()
                raise ConfigError(
                    "the program speaks another version of the contract", field=f"process:{self.command}",
                    got=greeting.spec_version, expected=repr(SPEC_VERSION),
                )  # fmt: skip
            self._process, self._greeting = process, greeting
        return self._process

    def close(self) -> None:
        """End the program. Who uses the factory again starts another."""
        if self._process is not None and self._process.alive:
            with contextlib.suppress(RunnerError):  # one that ends without an answer has stopped too
                self._process.ask("stop")
            self._process.close()

    def _shut_down_abandoned(self, process: JsonProcess) -> None:
        """Runners that nobody holds any more, so that a long judgement does not fill the program's memory.

        A program that fails in this has failed a runner that is gone: the next one is not to blame.
        """
        while self._abandoned:
            owner, number = self._abandoned.pop()
            if owner is process and process.alive:
                with contextlib.suppress(RunnerError):
                    ask(process, "shutdown", type(None), runner=number)

    def _stages(self) -> StageSet:
        listed = ask(self.process(), "stages", ListedStages)
        run = functools.partial(functools.partial, self._run_stage)
        return StageSet(
            listed.backend, {s.name: StageSpec(s.name, run(s.name), s.inputs, s.outputs) for s in listed.stages}
        )

    def _run_stage(self, stage: str, /, **arrays: Any) -> None:
        """Run one stage in the program and fill the outputs in place."""
        data = ask(self.process(), "stage", dict[str, Any], name=stage, arrays=arguments_to_json(arrays))
        for name, result in arguments_from_json(data).items():
            given = arrays.get(name)
            mine, theirs = _listed(given), _listed(result)
            if len(mine) != len(theirs):
                raise RunnerError(
                    "another number of outputs than were given", field=f"{stage}.{name}", got=len(theirs),
                    expected=str(len(mine)),
                )  # fmt: skip
            for one, filled in zip(mine, theirs, strict=True):
                _fill(f"{stage}.{name}", one, filled)


class ProcessRunner:
    """One runner of the program, by its number. See `runner_api.protocol.ModelRunner` for what each method promises."""

    def __init__(self, config: RunnerConfig, process: JsonProcess, number: int) -> None:
        self.config = config
        self._process, self._number = process, number
        self._info: RunnerInfo | None = None

    def describe(self) -> RunnerInfo:
        """As the program tells it, less what cannot be carried; a note says so."""
        if self._info is None:
            info: RunnerInfo = self._ask("describe", RunnerInfo)
            missing = sorted(info.capabilities & NOT_CARRIED)
            notes: tuple[str, ...] = (f"in a process of its own: {self._process.command}",)
            if missing:
                notes += (f"not carried through the pipe: {', '.join(missing)}",)
            self._info = replace(info, capabilities=info.capabilities - NOT_CARRIED, notes=(*info.notes, *notes))
        return self._info

    # -- start-up ---------------------------------------------------------------------------------------------

    def load_model(self, model: Any) -> None:
        self._ask("load_model", type(None), model=model_to_json(model))

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        specs: dict[str, KVCacheSpec] = self._ask("kv_cache_specs", dict[str, KVCacheSpec])
        return specs

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        told = to_json(kv_cache_config, KVCacheConfig)
        self._ask("initialize_kv_cache", type(None), kv_cache_config=told)

    def capture_graphs(self) -> tuple[BatchDescriptor, ...]:
        if Capability.CUDA_GRAPHS not in self.describe().capabilities:
            return ()
        captured: tuple[BatchDescriptor, ...] = self._ask("capture_graphs", tuple[BatchDescriptor, ...])
        return captured

    # -- one step ---------------------------------------------------------------------------------------------

    def execute_model(
        self,
        plan: SchedulerOutput,
        *,
        descriptor: BatchDescriptor | None = None,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> ModelRunnerOutput | IntermediateTensors | None:
        if intermediate_tensors is not None:
            raise CapabilityError("tensors of other ranks are not carried", field="intermediate_tensors")
        fields = {"plan": _told("plan", plan, SchedulerOutput, "MR-ERR-020")}
        if descriptor is not None:
            fields["descriptor"] = _told("descriptor", descriptor, BatchDescriptor, "MR-ERR-043")
        done: ModelRunnerOutput | None = self._ask("step", ModelRunnerOutput | None, **fields)
        return done

    def sample_tokens(
        self, grammar: GrammarOutput | None = None, *, forced: ForcedStep | None = None
    ) -> AsyncModelRunnerOutput:
        fields = {}
        if grammar is not None:
            fields["grammar"] = _told("grammar", grammar, GrammarOutput, "MR-ERR-049")
        if forced is not None:
            fields["forced"] = _told("forced", forced, ForcedStep, "MR-ERR-044")
        sampled: Sampled = self._ask("sample", Sampled, **fields)
        return RemoteOutput(self, sampled)

    def pool(self) -> AsyncModelRunnerOutput:
        raise CapabilityError("pooling is not carried through the pipe", field="pool")

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        if Capability.SPECULATIVE not in self.describe().capabilities:
            return None
        taken: DraftTokenIds | None = self._ask("take_draft_token_ids", DraftTokenIds | None)
        return taken

    # -- what is seen of it -----------------------------------------------------------------------------------

    def output(self, pending: int) -> ModelRunnerOutput:
        """The output with this number; waits for it."""
        done: ModelRunnerOutput = self._ask("output", ModelRunnerOutput, pending=pending)
        return done

    def last_step(self) -> StepRecord:
        record: StepRecord = self._ask("record", StepRecord)
        return record

    def poison_unused(self, value: int = -77, keep_blocks: Collection[int] = ()) -> None:
        blocks = list(keep_blocks) if isinstance(keep_blocks, Set) else keep_blocks
        told = to_json({"value": value, "keep_blocks": blocks}, dict[str, Any])
        self._ask("poison", type(None), **told)

    def state_digest(self) -> Mapping[str, str]:
        digest: dict[str, str] = self._ask("digest", dict[str, str])
        return digest

    def shutdown(self) -> None:
        """Nothing is left to shut down where the program has ended."""
        if self._process.alive:
            self._ask("shutdown", type(None))

    def _ask(self, op: str, answer: Any, **fields: Any) -> Any:
        return ask(self._process, op, answer, runner=self._number, **fields)


class RemoteOutput:
    """An output that has come, or is asked for by its number. It keeps its runner alive."""

    def __init__(self, runner: ProcessRunner, sampled: Sampled) -> None:
        self._runner, self._sampled = runner, sampled

    def get_output(self) -> ModelRunnerOutput:
        output, pending = self._sampled.output, self._sampled.pending
        if output is not None:
            return output
        assert pending is not None
        return self._runner.output(pending)


def ask(process: JsonProcess, op: str, answer: Any, **fields: Any) -> Any:
    """The answer as a value of this type. Raises what `JsonProcess.ask` does, and a RunnerError for an answer that
    cannot be read."""
    data = process.ask(op, **fields)
    try:
        return from_json(answer, data)
    except RunnerError as e:
        raise RunnerError(
            f"the program's answer to {op!r} cannot be read: {e}", field=f"process:{process.command}", got=data
        ) from e


def _told(name: str, value: Any, kind: type, code: str) -> Any:
    """A part of a step as JSON. What has no form in JSON is refused as a runner refuses what it cannot read."""
    try:
        return to_json(value, kind)
    except ConfigError as e:
        raise PlanError(e.what, code=code, field=f"{name}.{e.field}", got=e.got, expected=e.expected) from e


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError("no time to wait", field=TIMEOUT_VARIABLE, got=value, expected="seconds > 0")
    return seconds


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _fill(where: str, given: Any, result: Any) -> None:
    if not isinstance(given, np.ndarray) or not isinstance(result, np.ndarray):
        raise RunnerError(
            "not an output that was given", field=where, got=result, expected="an array like the one sent"
        )
    if (given.shape, given.dtype) != (result.shape, result.dtype):
        raise RunnerError(
            "an output of another shape or type", field=where, got=f"{result.dtype}{list(result.shape)}",
            expected=f"{given.dtype}{list(given.shape)}",
        )  # fmt: skip
    given[...] = result
