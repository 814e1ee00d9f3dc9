"""Log probabilities of a prompt: how likely the model thought each of its tokens, given those before.

The hidden state of prompt token t scores token t + 1, so a prompt of n tokens has n - 1 rows. They are collected while
the prompt is computed, chunk by chunk, and handed out once, by the step that finishes it.
Source: vLLM 0.33 prompt log probabilities. Twin: gpu_backend/sample/prompt_logprob.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cpu_reference.request_state import RequestState
from cpu_reference.sample.logprob import compute_logprobs
from runner_api import LogprobsLists, NewRequestData, SamplingParams

# The most logits that are held at once: a prompt is scored in runs of so many rows as make no more.
LOGITS_PER_RUN = 2**22


class PromptLogprobs:
    """What each request wants to know of its prompt, by row, and what is known so far, by request.

    mode: one of runner_api.config.LOGPROBS_MODES. Nothing processes the logits of a prompt: `processed_…` is `raw_…`.
    """

    def __init__(self, max_num_reqs: int, vocab_size: int, mode: str) -> None:
        self.vocab_size = vocab_size
        self.normalised = mode.endswith("_logprobs")
        self.num_prompt_top = np.full(max_num_reqs, -1, np.int32)  # -1 = nothing is wanted, or it was handed out
        self._parts: dict[str, list[LogprobsLists]] = {}

    def row_tables(self) -> dict[str, np.ndarray]:
        return {"num_prompt_top": self.num_prompt_top}

    def row_widths(self, row: int) -> dict[str, int]:
        return {}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        """A request that comes back with outputs had its prompt's log probabilities with the first of them."""
        wanted = None if len(new.prefill_token_ids) > new.prompt_len else params.prompt_logprobs
        self.num_prompt_top[row] = -1 if wanted is None else self.vocab_size if wanted == -1 else wanted
        # A request that has given up its row in the middle of its prompt goes on from what was collected.
        self._parts.setdefault(new.req_id, [])

    def forget_request(self, req_id: str) -> None:
        """Finished or preempted: what was collected is of no use; a prompt that comes back starts over."""
        self._parts.pop(req_id, None)

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool((self.num_prompt_top[batch_rows] >= 0).any())

    def compute(
        self,
        req_ids: Sequence[str],
        batch_rows: np.ndarray,
        query_start_loc: np.ndarray,
        req_states: RequestState,
        hidden_states: np.ndarray,
        compute_logits: Callable[[np.ndarray], np.ndarray],
    ) -> dict[str, LogprobsLists]:
        """Score what this step computed of prompts; returns those of requests whose prompt it finished.

        Called before the step's outcome enters the state. Whole prompts have one row per token but the first; after a
        prefix hit of h tokens the first row scores token h + 1. A prompt without a token to score gives no rows.

        Shapes: batch_rows: int64[R]; query_start_loc: int32[>= R+1]; hidden_states: [T, …].
        """
        finished = {}
        for i, req_id in enumerate(req_ids):
            # 1 who wants it
            row = int(batch_rows[i])
            num_top = int(self.num_prompt_top[row])
            if num_top < 0:
                continue
            # 2 the step computes prompt tokens [first, end); each but the prompt's last has a token behind it
            start = int(query_start_loc[i])
            first = int(req_states.num_computed_tokens_np[row])
            end = first + int(query_start_loc[i + 1]) - start
            prompt_len = int(req_states.prompt_len[row])
            count = max(min(end, prompt_len - 1) - first, 0)
            # 3 score them, a run of rows at a time
            per_run = max(LOGITS_PER_RUN // self.vocab_size, 1)
            for low in range(0, count, per_run):
                high = min(low + per_run, count)
                logits = compute_logits(hidden_states[start + low : start + high])
                targets = req_states.all_token_ids[row, first + low + 1 : first + high + 1].astype(np.int64)
                self._parts[req_id].append(compute_logprobs(logits, targets, num_top, self.normalised))
            # 4 the whole prompt is known
            if end >= prompt_len:
                finished[req_id] = _joined(self._parts.pop(req_id), 1 + num_top)
                self.num_prompt_top[row] = -1
        return finished


def _joined(parts: Sequence[LogprobsLists], width: int) -> LogprobsLists:
    """Runs of rows, one behind the other. width: of the answer, also where there is no row."""
    none = LogprobsLists(np.zeros((0, width), np.int32), np.zeros((0, width), np.float32), np.zeros(0, np.int64))
    return LogprobsLists(
        *(np.concatenate([getattr(p, name) for p in (none, *parts)]) for name in ("token_ids", "logprobs", "ranks"))
    )
