"""Between one engine and its workers: every call the engine makes goes through here, to all ranks at once.

`InProcessExecutor` runs one worker in the engine's own thread. It copies plans at the boundary, so that what the
scheduler does next cannot reach a step that is still running, and resolves asynchronous outputs in `result()`.
"""

from __future__ import annotations

import dataclasses
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from engine_core.worker import Worker, WorkerConfig
from runner_api import (
    AsyncModelRunnerOutput,
    EngineError,
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    RunnerError,
    SchedulerOutput,
    UnknownNameError,
)

Method = str | Callable[..., Any]
FailureCallback = Callable[[], None]


class WorkerError(EngineError):
    """A worker failed in a way that no plan explains. `rank`, `method` and the worker's own traceback as text."""

    default_code = "MR-ERR-011"

    def __init__(self, rank: int, method: str, cause: BaseException) -> None:
        self.rank = rank
        self.method = method
        self.worker_traceback = "".join(traceback.format_exception(cause))
        super().__init__(f"rank {rank} failed in {method}: {type(cause).__name__}: {cause}", field="executor")


class AsyncOutputFuture(Future[Any]):
    """A step's output on its way: `result()` fetches it (the only wait of a step) and keeps it."""

    def __init__(self, fetch: Callable[[], Any]) -> None:
        super().__init__()
        self._fetch = fetch

    def result(self, timeout: float | None = None) -> Any:
        """The output. Raises EngineError for a timeout: a copy in flight cannot be given up half way."""
        if timeout is not None:
            raise EngineError("this future cannot time out", field="timeout", got=timeout, expected="None")
        if not self.done():
            try:
                self.set_result(self._fetch())
            except Exception as e:
                self.set_exception(e)
        return super().result()


def copy_plan(plan: SchedulerOutput) -> SchedulerOutput:
    """The plan with containers of its own. Parameters are frozen and token ids never change, so they are shared."""
    cached = plan.scheduled_cached_reqs
    return dataclasses.replace(
        plan,
        scheduled_new_reqs=[
            dataclasses.replace(new, block_ids=_copy_blocks(new.block_ids)) for new in plan.scheduled_new_reqs
        ],
        scheduled_cached_reqs=dataclasses.replace(
            cached,
            req_ids=list(cached.req_ids),
            num_computed_tokens=list(cached.num_computed_tokens),
            new_block_ids=[None if ids is None else _copy_blocks(ids) for ids in cached.new_block_ids],
            num_output_tokens=list(cached.num_output_tokens),
            all_token_ids=dict(cached.all_token_ids),
        ),
        num_scheduled_tokens=dict(plan.num_scheduled_tokens),
        scheduled_spec_decode_tokens={r: list(ids) for r, ids in plan.scheduled_spec_decode_tokens.items()},
        new_block_ids_to_zero=list(plan.new_block_ids_to_zero),
        kv_cache_block_copies=list(plan.kv_cache_block_copies),
    )


def _copy_blocks(block_ids: tuple[list[int], ...]) -> tuple[list[int], ...]:
    return tuple(list(ids) for ids in block_ids)


class Executor(ABC):
    """What an engine asks of its workers. Subclasses implement `collective_rpc`, `check_health` and `shutdown`."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.is_failed = False
        self._callbacks: list[FailureCallback] = []

    @abstractmethod
    def collective_rpc(
        self,
        method: Method,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call a worker method (or `method(worker, …)`) on every rank.

        Returns a list of results in rank order; with `non_block` a future of that list. Raises what the worker raised
        if it is a `RunnerError`, `WorkerError` for anything else.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineError if the workers can no longer serve."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give everything back. A second call does nothing."""

    @property
    def max_concurrent_batches(self) -> int:
        """How many steps may be under way at once."""
        return self.config.runner_config.max_concurrent_batches

    # -- start-up, in this order ------------------------------------------------------------------------------

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """One dict of layer name to spec for each worker."""
        return self.collective_rpc("get_kv_cache_spec")

    def determine_available_memory(self) -> list[int]:
        """Bytes that each worker can give to the KV cache."""
        return self.collective_rpc("determine_available_memory")

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Allocate the KV cache (each worker picks its rank's entry) and capture graphs."""
        self.collective_rpc("initialize_from_config", (kv_cache_configs,))
        self.collective_rpc("compile_or_warm_up_model")

    # -- a step -----------------------------------------------------------------------------------------------

    @abstractmethod
    def execute_model(self, plan: SchedulerOutput, non_block: bool = False) -> Any:
        """Queue one step. The output rank's answer: None (call `sample_tokens`) or an output without tokens."""

    @abstractmethod
    def sample_tokens(self, grammar: GrammarOutput | None = None, non_block: bool = False) -> Any:
        """Draw the step's tokens. A ModelRunnerOutput, or a future of it."""

    # -- failure ----------------------------------------------------------------------------------------------

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Call `callback` once when the executor fails; at once if it already has."""
        if self.is_failed:
            callback()
        else:
            self._callbacks.append(callback)

    def _fail(self) -> None:
        if not self.is_failed:
            self.is_failed = True
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()


class InProcessExecutor(Executor):
    """One worker, called inline. Timeouts do not apply: the call is the work.

    A `RunnerError` (a refused plan, say) leaves the worker usable. Anything else a step raises leaves its state
    unknown: the executor is failed from then on, and says so in every later call.
    """

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._shut_down = False
        self.worker = Worker(config, rank=0)
        for method in ("init_device", "load_model"):
            self._call(method, (), {})

    def _call(self, method: Method, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.is_failed or self._shut_down:
            raise EngineError(
                "the executor has failed" if self.is_failed else "the executor is shut down",
                field="executor",
                hint="Build a new one",
            )
        name = method if isinstance(method, str) else getattr(method, "__name__", repr(method))
        if isinstance(method, str) and not hasattr(self.worker, method):
            raise UnknownNameError("worker method", method, [m for m in dir(self.worker) if not m.startswith("_")])
        with _Rank(self, name):
            if isinstance(method, str):
                return getattr(self.worker, method)(*args, **kwargs)
            return method(self.worker, *args, **kwargs)

    def collective_rpc(
        self,
        method: Method,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        non_block: bool = False,
    ) -> Any:
        if not non_block:
            return [self._call(method, args, kwargs or {})]
        return _completed(lambda: [self._call(method, args, kwargs or {})])

    def execute_model(self, plan: SchedulerOutput, non_block: bool = False) -> Any:
        plan = copy_plan(plan)
        if non_block:
            return _completed(lambda: self._call("execute_model", (plan,), {}))
        return self._call("execute_model", (plan,), {})

    def sample_tokens(self, grammar: GrammarOutput | None = None, non_block: bool = False) -> Any:
        sampled = _completed(lambda: self._call("sample_tokens", (grammar,), {}))
        future = AsyncOutputFuture(lambda: self._resolve(sampled.result()))
        return future if non_block else future.result()

    def _resolve(self, output: AsyncModelRunnerOutput | ModelRunnerOutput) -> ModelRunnerOutput:
        with _Rank(self, "get_output"):
            return output if isinstance(output, ModelRunnerOutput) else output.get_output()

    def check_health(self) -> None:
        self._call("check_health", (), {})

    def shutdown(self) -> None:
        if not self._shut_down:
            self._shut_down = True
            self.worker.shutdown()


_STEP_METHODS = ("execute_model", "sample_tokens", "get_output")


class _Rank:
    """Says which rank and method an error came from, and fails the executor if a step left its state unknown."""

    def __init__(self, executor: InProcessExecutor, method: str) -> None:
        self.executor, self.method = executor, method

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        rank = self.executor.worker.rank
        if isinstance(error, RunnerError):
            error.add_note(f"raised on rank {rank} in {self.method}")
        elif isinstance(error, Exception):
            if self.method in _STEP_METHODS:
                self.executor._fail()
            raise WorkerError(rank, self.method, error) from error


def _completed(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as e:
        future.set_exception(e)
    return future


EXECUTORS: dict[str, type[Executor]] = {"uni": InProcessExecutor}


def make_executor(config: WorkerConfig, executor: str | type[Executor] = "uni") -> Executor:
    """Build an executor by name or from a class. "uni": one worker in this process."""
    if isinstance(executor, type) and issubclass(executor, Executor):
        return executor(config)
    if executor not in EXECUTORS:
        raise UnknownNameError("executor", str(executor), EXECUTORS, field="executor")
    return EXECUTORS[str(executor)](config)
