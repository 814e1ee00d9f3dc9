"""What a step gives back. Source: vLLM 0.33 `ModelRunnerOutput`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np


class SampleFault(IntEnum):
    """Why a logits row has no winner. Its request gets no token but an error; other rows are not touched.

    The state stays regular: the row takes token 0 and goes on, until the engine ends the request.
    """

    NONE = 0
    NAN = 1  # a NaN is left after all processing
    NO_TOKEN = 2  # every token is at -inf after all processing: the request's own constraints exclude each other


@dataclass(frozen=True, slots=True)
class LogprobsLists:
    """Log probabilities of one step; column 0 is the sampled token, the rest the top n or the ids asked for.

    token_ids int32[R, 1+n], logprobs float32[R, 1+n], ranks int64[R]. The width is that of the widest request of the
    batch, and a request that asked for nothing has a row too; whoever hands them out leaves the surplus. A request with
    `logprob_token_ids` has those in its columns 1 .., every other row has as many of its best tokens, ties to the lower
    id, as any request of the batch asked for; what is unused behind them is id 0 at -inf.

    A rank counts the tokens that are at least as likely as the sampled one: 1 = the only best, V for one at -inf. A row
    of logits that holds a NaN or +inf, or nothing but -inf, has no distribution: its log probabilities are NaN.
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
    # Requests whose prompt was finished by this step: row t scores token first + 1 + t of the prompt, where first is
    # the number of tokens that were computed when the request was admitted (0 without a prefix cache hit). Where
    # nothing is left to score, as in a prompt of one token, there are 0 rows. A request that comes back with outputs
    # after a preemption had them with the first of those, and gets none again.
    prompt_logprobs: Mapping[str, LogprobsLists] = field(default_factory=dict)
    # Requests whose row had no winner; their list of tokens is empty.
    errors: Mapping[str, SampleFault] = field(default_factory=dict)
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
