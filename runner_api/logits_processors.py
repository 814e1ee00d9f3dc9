"""Custom logits processors: the one place where a user's own code takes part in sampling.

A processor keeps its state by row, as the sampler does, and is told of everything that happens to rows. The same
source runs on both runners: arrays are NumPy's on `cpu` and torch's on `gpu`; both know indexing, comparison and
arithmetic, and what they spell differently is in the `ArrayBackend` that the processor is given.
docs/custom-logits-processor.md shows how to write one. Source: vLLM 0.33 custom logits processors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from runner_api.errors import ConfigError, LogitsProcessorError, RunnerError, SamplingParamsError, UnknownNameError
from runner_api.loader import load_object
from runner_api.sampling_params import SamplingParams

METHODS = ("validate", "add_request", "remove_request", "move_rows", "observe", "apply")


class ArrayBackend(Protocol):
    """Makes arrays where the runner keeps its own. dtypes are named as NumPy names them ("int64", "float32", "bool").

    Nothing here waits for the device.
    """

    def zeros(self, shape: int | tuple[int, ...], dtype: str) -> Any: ...

    def array(self, values: Sequence[Any], dtype: str) -> Any:
        """A copy of plain values."""
        ...

    def arange(self, count: int) -> Any:
        """int64[count]: 0, 1, 2, …"""
        ...

    def where(self, condition: Any, chosen: Any, other: Any) -> Any:
        """`chosen` where the condition holds, `other` elsewhere. Both may be arrays or plain numbers."""
        ...


class HostArrays:
    """The `ArrayBackend` of processors whose arrays are NumPy's."""

    def zeros(self, shape: int | tuple[int, ...], dtype: str) -> np.ndarray:
        return np.zeros(shape, dtype)

    def array(self, values: Sequence[Any], dtype: str) -> np.ndarray:
        return np.array(values, dtype)

    def arange(self, count: int) -> np.ndarray:
        return np.arange(count, dtype=np.int64)

    def where(self, condition: np.ndarray, chosen: Any, other: Any) -> np.ndarray:
        return np.where(condition, chosen, other)


@dataclass(frozen=True, slots=True)
class RowMove:
    """A request went from one row to another (one way), or two requests changed places (swap). Dense layout only."""

    source: int
    target: int
    swap: bool = False


@dataclass(frozen=True, slots=True)
class LogitsContext:
    """What `apply` may look at; arrays of the runner's own kind, copies. L logits rows: those that are edited.

    rows: int64[L] state row of each logits row. positions: int64[L] place of the row's input token in its sequence.
    input_ids: int32[L] that token. local_pos: int32[L] how many drafts of the request come before; logits row i with
    local_pos d follows on drafts input_ids[i - d + 1], …, input_ids[i], which no `observe` has told of. num_drafts: the
    largest local_pos of the batch, a plain number.
    """

    rows: Any
    positions: Any
    input_ids: Any
    local_pos: Any
    num_drafts: int


class LogitsProcessor(Protocol):
    """One processor of one runner. Built by `factory(max_num_reqs, vocab_size, arrays)`.

    arguments: the names in a request's `extra_args` that it reads. A name that no processor reads is refused.
    """

    @property
    def arguments(self) -> Collection[str]: ...

    def validate(self, params: SamplingParams) -> None:
        """Raise SamplingParamsError if the request's `extra_args` make no sense; called before anything changes."""
        ...

    def add_request(
        self, row: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> bool:
        """A request moves into a row: set all state of that row, also if there is nothing to do for it.

        True: its logits are edited. False: they are not, and `apply` never sees them.

        output_token_ids: what it had drawn before a preemption, or before it sat out steps and lost its row (dense
        layout); empty for a fresh request.
        """
        ...

    def remove_request(self, row: int) -> None:
        """The row's request has left: finished, preempted, or not scheduled in this step (dense layout)."""
        ...

    def move_rows(self, moves: Sequence[RowMove]) -> None:
        """Requests changed rows, in this order."""
        ...

    def observe(self, rows: Any, token_ids: Any, num_sampled: Any) -> None:
        """Tokens entered the state, drawn or imposed. rows: int64[R] of all requests of the step; token_ids:
        int64[R, 1+K]; num_sampled: int32[R] how many of them count, 0 for an unfinished prefill. Arrays of the
        runner's own kind, copies: do not wait for them."""
        ...

    def apply(self, logits: Any, context: LogitsContext) -> None:
        """Edit `logits` in place: float[L, V], rows of requests that asked for it alone. Returns nothing."""
        ...


def build_processors(
    factories: Sequence[Any], max_num_reqs: int, vocab_size: int, arrays: ArrayBackend
) -> list[LogitsProcessor]:
    """Build the processors of `RunnerConfig.logits_processors`, in order. Raises ConfigError naming the factory."""
    built = []
    for factory in factories:
        made = factory
        if isinstance(factory, str):
            made = load_object(factory, f"logits processor {factory!r}", "logits_processors")
        try:
            processor = made(max_num_reqs, vocab_size, arrays)
        except Exception as e:  # foreign code
            raise ConfigError(
                f"a logits processor cannot be built: {type(e).__name__}: {e}", field="logits_processors", got=factory,
                expected="factory(max_num_reqs, vocab_size, arrays)",
            ) from e  # fmt: skip
        missing = [name for name in METHODS if not callable(getattr(processor, name, None))]
        names = getattr(processor, "arguments", None)
        if isinstance(names, str) or not isinstance(names, Collection):
            missing.append("arguments (the names in extra_args that it reads)")
        if missing:
            raise ConfigError(
                "its factory gave no logits processor", field="logits_processors", got=factory,
                expected="an object that has " + ", ".join(missing),
            )  # fmt: skip
        built.append(processor)
    return built


def check_params(processors: Sequence[LogitsProcessor], params: SamplingParams | None, req_id: str) -> None:
    """Refuse a request whose `extra_args` are read by no processor, or make no sense to one. Changes nothing.

    Raises UnknownNameError or SamplingParamsError. params None: a greedy request.
    """
    params = params or SamplingParams(temperature=0.0)
    read = {name for processor in processors for name in processor.arguments}
    for name in params.extra_args or ():
        if name not in read:
            raise UnknownNameError("argument", name, read, field="extra_args", req_id=req_id)
    for processor in processors:
        try:
            processor.validate(params)
        except Exception as e:  # foreign code: whatever it raises is its refusal
            why = str(e).removeprefix(f"{e.code} ") if isinstance(e, RunnerError) else f"{type(e).__name__}: {e}"
            raise SamplingParamsError(
                f"logits processor {name_of(processor)} refuses the request: {why}", field="extra_args", req_id=req_id
            ) from e


def tell_of_request(
    processor: LogitsProcessor, row: int, params: SamplingParams, prompt: list[int], outputs: list[int]
) -> bool:
    """Tell a processor of a request that moves into a row, with what it had drawn before; does it edit its logits?

    Raises LogitsProcessorError, also for an answer that is neither True nor False.
    """
    edits = call_processor(processor, "add_request", row, params, prompt, outputs)
    if not isinstance(edits, (bool, np.bool_)):
        raise LogitsProcessorError(
            "does it edit this request's logits?", field=f"{name_of(processor)}.add_request", got=edits,
            expected="True or False as the answer",
        )  # fmt: skip
    return bool(edits)


def edit_logits(processor: LogitsProcessor, logits: Any, context: LogitsContext) -> None:
    """Let a processor edit logits in place. Raises LogitsProcessorError, also for an answer of its own."""
    answer = call_processor(processor, "apply", logits, context)
    if answer is not None:
        raise LogitsProcessorError(
            "logits are edited in place", field=f"{name_of(processor)}.apply", got=answer,
            expected="nothing as the answer",
        )  # fmt: skip


def call_processor(processor: LogitsProcessor, method: str, *arguments: Any) -> Any:
    """Call a method of a processor. Whatever it raises becomes a LogitsProcessorError that names it."""
    try:
        return getattr(processor, method)(*arguments)
    except Exception as e:  # foreign code
        raise LogitsProcessorError(
            f"{type(e).__name__}: {e}", field=f"{name_of(processor)}.{method}",
            hint="The processor's own code failed; the step cannot go on",
        ) from e  # fmt: skip


def name_of(processor: LogitsProcessor) -> str:
    """What errors call it."""
    return type(processor).__qualname__
