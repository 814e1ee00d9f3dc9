"""The scheduler's plan for one step, and what comes with it to `sample_tokens`.

Both row layouts read the same types: a resumed request may arrive as new (slots layout, `prefill_token_ids` holds
prompt and earlier outputs) or as cached (dense layout, its id in `resumed_req_ids` and its blocks replaced).
Plans are read, never written: a runner copies what it keeps. Source: vLLM 0.33 `SchedulerOutput`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runner_api.sampling_params import SamplingParams

BlockIds = tuple[list[int], ...]  # one list per KV cache group


@dataclass(slots=True)
class NewRequestData:
    """A request the runner does not hold yet: scheduled for the first time, or resumed after preemption."""

    req_id: str
    prompt_token_ids: Sequence[int]
    # Every token known so far: the prompt, then outputs drawn before a preemption. len >= len(prompt).
    prefill_token_ids: Sequence[int]
    # Tokens whose KV already exists (prefix cache). Always < len(prefill_token_ids).
    num_computed_tokens: int
    # The complete block list of each group; replaces whatever the row held.
    block_ids: BlockIds
    sampling_params: SamplingParams | None = None
    # Drawn by the engine where the user gave none, so that ranks and resumes agree. Signed 64 bit.
    seed: int = 0
    # End-of-sequence ids of the model. Part of the stop set that `min_tokens` masks, also where `ignore_eos` is set.
    eos_token_ids: Sequence[int] = ()
    pooling_params: Any = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every token that may end the request, each once: its own stop tokens, then the model's."""
        own = () if self.sampling_params is None else self.sampling_params.stop_token_ids
        return tuple(dict.fromkeys([*own, *self.eos_token_ids]))


@dataclass(slots=True)
class CachedRequestData:
    """Requests the runner already holds, as parallel lists: only differences travel."""

    req_ids: list[str] = field(default_factory=list)
    # Before this step, as the scheduler believes: optimistic while drafts are in flight.
    num_computed_tokens: list[int] = field(default_factory=list)
    # None: no new block in any group. Otherwise one list per group to append (to replace, if resumed).
    new_block_ids: list[BlockIds | None] = field(default_factory=list)
    # Outputs of each request so far. The slots layout keeps this count itself and reads none: the list may be empty.
    num_output_tokens: list[int] = field(default_factory=list)
    resumed_req_ids: frozenset[str] = frozenset()
    # Dense layout only: prompt and outputs of a resumed request.
    all_token_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(slots=True)
class SchedulerOutput:
    """One step's plan. `num_scheduled_tokens` counts drafts too; its order breaks ties in the batch order."""

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    # Only requests with drafts. Ids may be real or PLACEHOLDER_TOKEN_ID: the runner reads the length alone.
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    # Since the previous plan; may hold ids that the runner never saw (a no-op).
    finished_req_ids: frozenset[str] = frozenset()
    preempted_req_ids: frozenset[str] = frozenset()
    new_block_ids_to_zero: list[int] = field(default_factory=list)
    kv_cache_block_copies: list[tuple[int, int]] = field(default_factory=list)
    num_spec_tokens_to_schedule: int = 0

    @classmethod
    def empty(cls, **changes: Any) -> SchedulerOutput:
        """A plan that schedules nothing: state changes only."""
        return cls(**changes)


@dataclass(slots=True)
class GrammarOutput:
    """Which tokens structured-output requests may take next.

    grammar_bitmask: int32[len(structured_output_request_ids) * (1 + K), ceil(vocab_size / 32)], bit 1 = allowed,
    least significant bit first; request j owns rows j*(1+K) .. j*(1+K)+K.
    """

    structured_output_request_ids: list[str]
    grammar_bitmask: np.ndarray
    num_acceptable_drafts: list[int] | None = None


@dataclass(slots=True)
class ForcedStep:
    """An outcome imposed between sampling and the state update: replay, steered lockstep, trace replay.

    Rows are in batch order (R requests, K = num_speculative_tokens).
    """

    token_ids: np.ndarray  # int64[R, 1 + K]; entries at or past num_sampled[i] are ignored
    num_sampled: np.ndarray  # int32[R]; 0 where known tokens are left and nothing is sampled, else 1 .. 1 + drafts
    draft_token_ids: np.ndarray | None = None  # int64[R, K]: drafts to hold for the next step
    logits: np.ndarray | None = None  # float32[L, V]: replaces the model's logits before sampling
