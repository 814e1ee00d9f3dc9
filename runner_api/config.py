"""How a runner is built, and the shape under which one step is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from runner_api.checks import check_integer, check_name, check_names, check_options, check_sequence
from runner_api.errors import ConfigError

LAYOUTS = ("slots", "dense")
NOISE_SCHEMES = ("murmur3", "philox")
DTYPES = ("float64", "float32", "float16", "bfloat16")
RECORD_PARTS = ("logits", "kv", "intermediates")
# What log probabilities are taken from: the logits after the grammar mask and before everything else, or after all
# processing; and whether they are normalised at all.
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


class CUDAGraphMode(IntEnum):
    """How a step is launched. FULL pads requests and tokens, PIECEWISE tokens only, NONE nothing."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """The padded shape of one step; the key under which a captured graph is kept."""

    cg_mode: CUDAGraphMode
    num_tokens: int
    num_reqs: int | None = None  # None: requests are not padded
    uniform_token_count: int | None = None
    max_query_len: int | None = None
    num_active_loras: int = 0
    num_ubatches: int = 1


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Which rank of which groups this runner is. One rank of one everywhere unless said otherwise.

    Raises `ConfigError` for a rank outside its group, and for an interleave that no context group could use.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    dcp_interleave: int = 1

    def __post_init__(self) -> None:
        for group in ("tp", "pp", "dp", "dcp"):
            size = check_integer(f"{group}_size", getattr(self, f"{group}_size"), 1)
            rank = check_integer(f"{group}_rank", getattr(self, f"{group}_rank"), 0, size - 1)
            object.__setattr__(self, f"{group}_size", size)
            object.__setattr__(self, f"{group}_rank", rank)
        most = None if self.dcp_size > 1 else 1
        object.__setattr__(self, "dcp_interleave", check_integer("dcp_interleave", self.dcp_interleave, 1, most))

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size * self.dp_size * self.dcp_size


@dataclass(frozen=True, slots=True)
class ReasoningConfig:
    """How a model thinks aloud: token ids of the marker that starts it, of the text that ends it when the budget of a
    request is used up, and of the marker by which the model ends it by itself (the tail of the former).

    Raises `ConfigError` for an empty marker.
    """

    start_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    natural_end_token_ids: tuple[int, ...] = ()  # empty: end_token_ids

    def __post_init__(self) -> None:
        if not self.natural_end_token_ids:
            object.__setattr__(self, "natural_end_token_ids", self.end_token_ids)
        for name in ("start_token_ids", "end_token_ids", "natural_end_token_ids"):
            ids = tuple(check_integer(name, t, 0) for t in check_sequence(name, getattr(self, name)))
            if not ids:
                raise ConfigError("a marker has no token", field=name, expected="at least one token id")
            object.__setattr__(self, name, ids)


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Everything a runner is built from besides the model. Every field changes something or is refused.

    Sizes: max_num_reqs = rows (N), max_num_batched_tokens = tokens of one step (T), max_model_len = tokens of one
    request (M). Raises `ConfigError` naming the field.
    """

    max_num_reqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 1024
    # None: left to the environment and the policy (runner_api.selection).
    layout: str | None = None
    # Decodes before prefills: a row that schedules at most so many tokens counts as a decode. None: no reordering.
    # The dense layout alone has it.
    reorder_batch_threshold: int | None = None
    noise: str = "murmur3"
    dtype: str = "float32"
    device: str = "auto"
    num_speculative_tokens: int = 0
    max_concurrent_batches: int = 2
    # The free list at the start, bottom to top (the last entry is taken first). None: 0 .. N-1.
    initial_free_rows: tuple[int, ...] | None = None
    # Per KV cache group, how many tokens behind the current one are read; replaces the spec's own window in the
    # gathered block tables. 0 = keep every entry, also those that are somebody else's by now, so that writes to
    # another request's blocks are not looked for in that group. None: take it from the specs.
    window_reach: tuple[int, ...] | None = None
    # One of LOGPROBS_MODES.
    logprobs_mode: str = "raw_logprobs"
    # None: no request may have a thinking budget.
    reasoning: ReasoningConfig | None = None
    # Factories of custom logits processors (runner_api.logits_processors), or their `package.module:factory` names;
    # they run in this order.
    logits_processors: tuple[Any, ...] = ()
    # Extra parts of the StepRecord: any of RECORD_PARTS.
    record: frozenset[str] = frozenset()
    parallel: ParallelContext = ParallelContext()

    def __post_init__(self) -> None:
        for name, least in (
            ("max_num_reqs", 1), ("max_num_batched_tokens", 1), ("max_model_len", 1), ("max_concurrent_batches", 1),
            ("num_speculative_tokens", 0),
        ):  # fmt: skip
            self._set(name, check_integer(name, getattr(self, name), least))
        for name, valid in (
            ("noise", NOISE_SCHEMES), ("dtype", DTYPES), ("logprobs_mode", LOGPROBS_MODES),
        ):  # fmt: skip
            check_name(name, getattr(self, name), valid)
        if self.layout is not None:
            check_name("layout", self.layout, LAYOUTS)
        if self.reorder_batch_threshold is not None:
            threshold = check_integer("reorder_batch_threshold", self.reorder_batch_threshold, 1)
            self._set("reorder_batch_threshold", threshold)
        if self.reasoning is not None and not isinstance(self.reasoning, ReasoningConfig):
            raise ConfigError(
                "markers are told in a ReasoningConfig", field="reasoning", got=self.reasoning,
                expected="a ReasoningConfig or None",
            )  # fmt: skip
        processors = tuple(check_sequence("logits_processors", self.logits_processors))
        for processor in processors:
            if not (callable(processor) or (isinstance(processor, str) and ":" in processor)):
                raise ConfigError(
                    "not a logits processor", field="logits_processors", got=processor,
                    expected="a factory, or 'package.module:factory'",
                )  # fmt: skip
        self._set("logits_processors", processors)
        if not isinstance(self.device, str):
            raise ConfigError("a device is named by a string", field="device", got=self.device, expected="a str")
        if not isinstance(self.parallel, ParallelContext):
            raise ConfigError(
                "ranks are told in a ParallelContext", field="parallel", got=self.parallel, expected="a ParallelContext"
            )
        self._set("record", check_names("record", self.record, RECORD_PARTS))
        if self.window_reach is not None:
            reach = check_sequence("window_reach", self.window_reach)
            self._set("window_reach", tuple(check_integer("window_reach", r, 0) for r in reach))
        if self.initial_free_rows is not None:
            listed = check_sequence("initial_free_rows", self.initial_free_rows)
            rows = tuple(check_integer("initial_free_rows", r, 0) for r in listed)
            if sorted(rows) != list(range(self.max_num_reqs)):
                raise ConfigError(
                    "not a permutation of the rows", field="initial_free_rows", got=rows,
                    expected=f"each of 0 .. {self.max_num_reqs - 1} once",
                )  # fmt: skip
            self._set("initial_free_rows", rows)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunnerConfig:
        """Build from a mapping; an unknown key is an error that lists the valid names."""
        return cls(**check_options("runner option", values, {f.name for f in dataclasses.fields(cls)}))
