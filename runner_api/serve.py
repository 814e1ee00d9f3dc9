"""Offer a runner in Python to another process: `python -m runner_api.serve package.module:factory`.

Reads requests from stdin and answers on stdout, one JSON object a line (docs/json-lines.md). Whatever the runner prints
goes to stderr, so that a stray print is no answer.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import sys
import traceback
import typing
from collections import OrderedDict
from collections.abc import Iterable
from types import TracebackType
from typing import IO, Any

from runner_api.capabilities import Capability
from runner_api.config import BatchDescriptor, RunnerConfig
from runner_api.constants import SPEC_VERSION
from runner_api.errors import CapabilityError, ConfigError, PlanError, RunnerError, UnknownNameError
from runner_api.json_lines import (
    Built,
    Greeting,
    ListedStage,
    ListedStages,
    Model,
    Sampled,
    arguments_from_json,
    arguments_to_json,
)
from runner_api.kv_cache import KVCacheConfig, KVCacheSpec
from runner_api.loader import call_factory, load_factory, load_stages
from runner_api.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput
from runner_api.plan import ForcedStep, GrammarOutput, SchedulerOutput
from runner_api.protocol import ModelRunner, RunnerInfo
from runner_api.record import StepRecord
from runner_api.selection import offered_layouts
from runner_api.stages import StageSet
from runner_api.wire import error_to_json, from_json, to_json

# The latest outputs are kept, asked for or not: they may be asked for again. Far more than steps are ever in flight.
KEPT_OUTPUTS = 64
# What a step is refused with where a part of it cannot be read.
CODES = {"plan": "MR-ERR-020", "descriptor": "MR-ERR-043", "forced": "MR-ERR-044", "grammar": "MR-ERR-049"}


class Server:
    """The runners of one factory, by number. Every public method but `answer` is an operation of the protocol: its
    parameters are the fields of the request, its result is the answer."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._runners: dict[int, ModelRunner] = {}
        self._outputs: OrderedDict[tuple[int, int], AsyncModelRunnerOutput] = OrderedDict()
        self._serial = 0

    def start(self, spec_version: str) -> Greeting:
        if spec_version != SPEC_VERSION:
            raise ConfigError(
                "another version of the contract", field="spec_version", got=spec_version, expected=repr(SPEC_VERSION)
            )
        factory = load_factory(self._name)
        has_stages = getattr(factory, "stages", None) is not None
        return Greeting(SPEC_VERSION, self._name, offered_layouts(factory), has_stages)

    def build(self, config: RunnerConfig) -> Built:
        self._serial += 1
        self._runners[self._serial] = call_factory(self._name, config)
        return Built(self._serial)

    def describe(self, runner: int) -> RunnerInfo:
        return self._runner(runner).describe()

    def load_model(self, runner: int, model: Model) -> None:
        self._runner(runner).load_model(model.path if model.witness is None else model.witness)

    def kv_cache_specs(self, runner: int) -> dict[str, KVCacheSpec]:
        return self._runner(runner).get_kv_cache_specs()

    def initialize_kv_cache(self, runner: int, kv_cache_config: KVCacheConfig) -> None:
        self._runner(runner).initialize_kv_cache(kv_cache_config)

    def capture_graphs(self, runner: int) -> tuple[BatchDescriptor, ...]:
        return self._call(runner, "capture_graphs")

    def step(
        self, runner: int, plan: SchedulerOutput, descriptor: BatchDescriptor | None = None
    ) -> ModelRunnerOutput | None:
        return self._call(runner, "execute_model", plan, descriptor=descriptor)

    def sample(self, runner: int, grammar: GrammarOutput | None = None, forced: ForcedStep | None = None) -> Sampled:
        built = self._runner(runner)
        handle = built.sample_tokens(grammar, forced=forced)
        if Capability.ASYNC_OUTPUT not in built.describe().capabilities:
            return Sampled(output=handle.get_output())
        self._serial += 1
        self._outputs[runner, self._serial] = handle
        if len(self._outputs) > KEPT_OUTPUTS:
            self._outputs.popitem(last=False)
        return Sampled(pending=self._serial)

    def output(self, runner: int, pending: int) -> ModelRunnerOutput:
        if (runner, pending) not in self._outputs:
            raise RunnerError("no such output is kept", field="pending", got=pending, expected="a number from sample")
        return self._outputs[runner, pending].get_output()

    def take_draft_token_ids(self, runner: int) -> DraftTokenIds | None:
        return self._call(runner, "take_draft_token_ids")

    def record(self, runner: int) -> StepRecord:
        return self._call(runner, "last_step")

    def poison(self, runner: int, value: Any = -77, keep_blocks: Any = ()) -> None:
        self._call(runner, "poison_unused", value, keep_blocks)

    def digest(self, runner: int) -> dict[str, str]:
        return dict(self._call(runner, "state_digest"))

    def shutdown(self, runner: int) -> None:
        """Shut the runner down and forget it. One that is unknown by now has been: nothing happens."""
        if runner in self._runners:
            self._runners.pop(runner).shutdown()
        for key in [k for k in self._outputs if k[0] == runner]:
            del self._outputs[key]

    def stages(self) -> ListedStages:
        found = self._stages()
        listed = (ListedStage(s.name, tuple(s.inputs), tuple(s.outputs)) for s in found.stages.values())
        return ListedStages(found.backend, tuple(listed))

    def stage(self, name: str, arrays: dict[str, Any]) -> dict[str, Any]:
        found = self._stages()
        if name not in found.stages:
            raise UnknownNameError("stage", name, found.stages, field="name")
        return arguments_to_json(found.run(name, **arguments_from_json(arrays)))

    def stop(self) -> None:
        for number in list(self._runners):
            self.shutdown(number)

    # -- how a request is answered ----------------------------------------------------------------------------

    def answer(self, request: Any) -> Any:
        """What stands under "ok". Raises whatever the runner does; ConfigError for what is no request."""
        if not isinstance(request, dict) or not isinstance(request.get("op"), str):
            raise ConfigError("no request", field="op", got=request, expected="an object with id and op")
        op = request["op"]
        if op not in OPERATIONS:
            raise UnknownNameError("operation", op, OPERATIONS, field="op")
        hints, signature = OPERATIONS[op]
        fields = {k: v for k, v in request.items() if k not in ("id", "op")}
        try:
            signature.bind(self, **fields)
        except TypeError as e:
            raise ConfigError(
                f"not the fields of this operation: {e}", field=op, got=sorted(fields), expected=f"of {sorted(hints)}"
            ) from None
        result = getattr(self, op)(**{name: _read(name, hints[name], value) for name, value in fields.items()})
        return to_json(result, hints["return"])

    def _runner(self, number: int) -> ModelRunner:
        if number not in self._runners:
            raise RunnerError("no such runner", field="runner", got=number, expected="a number from build")
        return self._runners[number]

    def _call(self, number: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method that not every runner has."""
        runner = self._runner(number)
        if not callable(getattr(runner, method, None)):
            raise CapabilityError(f"the runner has no method {method}", field=method)
        return getattr(runner, method)(*args, **kwargs)

    @functools.cache  # noqa: B019 - one server a process
    def _stages(self) -> StageSet:
        return load_stages(self._name)


# Operations, with the types of their fields and answers.
OPERATIONS = {
    name: (typing.get_type_hints(method), inspect.signature(method))
    for name, method in vars(Server).items()
    if inspect.isfunction(method) and not name.startswith("_") and name != "answer"
}


def _read(name: str, hint: Any, value: Any) -> Any:
    try:
        return from_json(hint, value)
    except ConfigError as e:
        if name not in CODES:
            raise
        raise PlanError(e.what, code=CODES[name], field=f"{name}.{e.field}", got=e.got, expected=e.expected) from e


def serve(server: Server, requests: Iterable[str], answers: IO[str]) -> None:
    """Answer until `stop`, or until the requests end."""
    for line in requests:
        number, op = None, None
        try:
            request = json.loads(line)
            if isinstance(request, dict):
                number, op = request.get("id"), request.get("op")
            answer = {"id": number, "ok": server.answer(request)}
        except Exception as e:
            if not isinstance(e, RunnerError):
                traceback.print_exception(type(e), e, _below_us(e.__traceback__))
            answer = {"id": number, "error": error_to_json(e)}
        sys.stderr.flush()
        answers.write(json.dumps(answer, separators=(",", ":")) + "\n")
        answers.flush()
        if op == "stop":
            return


def _below_us(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that tells of the runner."""
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def main(argv: list[str] | None = None) -> int:
    """Serve the runner of this name on stdin and stdout."""
    parser = argparse.ArgumentParser(prog="python -m runner_api.serve", description=__doc__)
    parser.add_argument("runner", help="an installed name, package.module:factory or path/to/file.py:factory")
    args = parser.parse_args(argv)
    # From here on stdout is stderr, for native code too; answers have a descriptor of their own.
    with open(os.dup(1), "w", encoding="utf-8") as answers:
        sys.stdout = sys.stderr
        os.dup2(2, 1)
        serve(Server(args.runner), sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
