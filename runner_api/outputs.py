"""What a step gives back. Source: vLLM 0.33 `ModelRunnerOutput`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True, slots=True)
class LogprobsLists:
    """Log probabilities of one step; column 0 is the sampled token, the rest the top n.

    token_ids int32[R, 1+n], logprobs float32[R, 1+n], ranks int64[R] (1 = most likely).
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """Tokens by request, in batch order. An empty list: the row sampled nothing (an unfinished prefill)."""

    req_ids: tuple[str, ...] = ()
    sampled_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: LogprobsLists | None = None
    prompt_logprobs: Mapping[str, LogprobsLists] = field(default_factory=dict)
    pooler_output: tuple[Any, ...] | None = None

    @property
    def req_id_to_index(self) -> dict[str, int]:
        return {r: i for i, r in enumerate(self.req_ids)}

    def tokens(self) -> dict[str, tuple[int, ...]]:
        """The same tokens keyed by request id."""
        return dict(zip(self.req_ids, self.sampled_token_ids, strict=True))


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput()


@runtime_checkable
class AsyncModelRunnerOutput(Protocol):
    """A result on its way to the host. `get_output` is the only wait of a step; a second call gives the same."""

    def get_output(self) -> ModelRunnerOutput: ...


@dataclass(frozen=True, slots=True)
class DraftTokenIds:
    """Drafts held for the next step, by request."""

    req_ids: tuple[str, ...]
    draft_token_ids: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class IntermediateTensors:
    """Activations handed from one pipeline stage to the next, by name."""

    tensors: dict[str, Any]
