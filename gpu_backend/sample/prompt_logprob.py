"""Log probabilities of a prompt: how likely the model thought each of its tokens, given those before.

The hidden state of prompt token t scores token t + 1, so a prompt of n tokens has n - 1 rows. They are collected while
the prompt is computed, chunk by chunk, and handed out once, by the step that finishes it. What a chunk gives starts for
the host at once: the device keeps nothing, and nobody waits before `get_output`.
Twin: cpu_reference/sample/prompt_logprob.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from gpu_backend.async_output import start_for_host
from gpu_backend.packed_copy import PackedCopy
from gpu_backend.request_state import RequestState
from gpu_backend.sample.logprob import LogprobsTensors, compute_logprobs
from runner_api import NewRequestData, SamplingParams

# The most logits that are held at once: a prompt is scored in runs of so many rows as make no more.
LOGITS_PER_RUN = 2**26


class PromptLogprobs:
    """What each request wants to know of its prompt, by row, and what is known so far, by request.

    mode: one of runner_api.config.LOGPROBS_MODES. Nothing processes the logits of a prompt: `processed_…` is `raw_…`.
    """

    def __init__(self, max_num_reqs: int, vocab_size: int, mode: str) -> None:
        self.vocab_size = vocab_size
        self.normalised = mode.endswith("_logprobs")
        self.num_prompt_top_np = np.full(max_num_reqs, -1, np.int32)  # -1 = nothing is wanted, or it was handed out
        self._parts: dict[str, list[LogprobsTensors]] = {}

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        return {"num_prompt_top": self.num_prompt_top_np}

    def bind(self, packed: PackedCopy) -> None:
        """Nothing: the device is never asked."""

    def row_tables(self) -> dict[str, torch.Tensor]:
        """Device tables by row that no step's copy overwrites."""
        return {}

    def row_widths(self, row: int) -> dict[str, int]:
        """How much of the row's part of a table means anything, where that is not all of it."""
        return {}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        """A request that comes back with outputs had its prompt's log probabilities with the first of them."""
        wanted = None if len(new.prefill_token_ids) > new.prompt_len else params.prompt_logprobs
        self.num_prompt_top_np[row] = -1 if wanted is None else self.vocab_size if wanted == -1 else wanted
        # A request that has given up its row in the middle of its prompt goes on from what was collected.
        self._parts.setdefault(new.req_id, [])

    def forget_request(self, req_id: str) -> None:
        """Finished or preempted: what was collected is of no use; a prompt that comes back starts over."""
        self._parts.pop(req_id, None)

    def pack(self, packed: PackedCopy) -> None:
        """Nothing is staged."""

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        """Nothing is staged."""

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool((self.num_prompt_top_np[batch_rows] >= 0).any())

    def compute(
        self,
        req_ids: Sequence[str],
        batch_rows: np.ndarray,
        query_start_loc: np.ndarray,
        req_states: RequestState,
        hidden_states: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        copy_stream: torch.cuda.Stream | None = None,
    ) -> dict[str, list[LogprobsTensors]]:
        """Score what this step computed of prompts; returns those of requests whose prompt it finished.

        Called before the step's outcome enters the state. Whole prompts have one row per token but the first; after a
        prefix hit of h tokens the first row scores token h + 1. A prompt without a token to score gives no rows. The
        rows come in runs, on the host or on their way there.

        Shapes: batch_rows: int64[R], query_start_loc: int32[>= R+1], both on the host; hidden_states: [T, …].
        """
        finished = {}
        for i, req_id in enumerate(req_ids):
            # 1 who wants it
            row = int(batch_rows[i])
            num_top = int(self.num_prompt_top_np[row])
            if num_top < 0:
                continue
            # 2 the step computes prompt tokens [first, end); each but the prompt's last has a token behind it
            start = int(query_start_loc[i])
            first = int(req_states.num_computed_tokens_np[row])
            end = first + int(query_start_loc[i + 1]) - start
            prompt_len = int(req_states.prompt_len_np[row])
            count = max(min(end, prompt_len - 1) - first, 0)
            # 3 score them, a run of rows at a time
            per_run = max(LOGITS_PER_RUN // self.vocab_size, 1)
            for low in range(0, count, per_run):
                high = min(low + per_run, count)
                logits = compute_logits(hidden_states[start + low : start + high]).contiguous()
                targets = req_states.all_token_ids[row, first + low + 1 : first + high + 1].long()
                scored = compute_logprobs(logits, targets, num_top, self.normalised)
                self._parts[req_id].append(LogprobsTensors(*start_for_host(scored.tensors(), copy_stream)))
            # 4 the whole prompt is known
            if end >= prompt_len:
                finished[req_id] = [_no_rows(1 + num_top), *self._parts.pop(req_id)]
                self.num_prompt_top_np[row] = -1
        return finished


def _no_rows(width: int) -> LogprobsTensors:
    """For the width of the answer, also where there is no row."""
    return LogprobsTensors(
        torch.zeros(0, width, dtype=torch.int32), torch.zeros(0, width), torch.zeros(0, dtype=torch.int64)
    )
