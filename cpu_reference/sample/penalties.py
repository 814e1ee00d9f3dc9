"""Penalties: a token that has been said becomes less likely. Twin: gpu_backend/sample/penalties.py.

repetition: any token of the prompt or the output; its logit is moved away from likely by a factor. frequency: an output
token, by its count. presence: an output token, once. What was said is kept by row: prompt tokens as bits, output tokens
as counts. Rows of requests without a penalty are not kept up to date.
"""

from __future__ import annotations

import numpy as np

from cpu_reference.request_state import RequestState
from cpu_reference.sample.bitmask import NUM_BITS, allowed_by, pack_bits
from cpu_reference.sample.logits_rows import LogitsRows
from runner_api import NewRequestData, SamplingParams


def count_prompt_and_output_tokens(
    rows: np.ndarray,
    prompt_len: np.ndarray,
    total_len: np.ndarray,
    all_token_ids: np.ndarray,
    num_rows: int,
    prompt_bitmask: np.ndarray,
    output_counts: np.ndarray,
) -> None:
    """Set up what rows have said, from the tokens that they know; whatever a former owner left is overwritten.

    Shapes: rows: int64[>= num_rows]; by row: prompt_len, total_len: int32[N], all_token_ids: int32[N, M],
    prompt_bitmask: int32[N, ceil(V / 32)], output_counts: int32[N, V]. Writes: the named rows of the last two.
    """
    vocab_size = output_counts.shape[1]
    for row in rows[:num_rows]:
        # 1 its tokens
        prompt = all_token_ids[row, : prompt_len[row]]
        outputs = all_token_ids[row, prompt_len[row] : total_len[row]]
        # 2 prompt tokens as bits
        prompt_bitmask[row] = pack_bits(prompt.tolist(), vocab_size)
        # 3 outputs drawn before a preemption as counts
        output_counts[row] = np.bincount(outputs, minlength=vocab_size)


def apply_penalties(
    expanded_idx_mapping: np.ndarray,
    expanded_local_pos: np.ndarray,
    input_ids: np.ndarray,
    repetition: np.ndarray,
    frequency: np.ndarray,
    presence: np.ndarray,
    prompt_bitmask: np.ndarray,
    output_counts: np.ndarray,
    num_logits: int,
    logits: np.ndarray,
) -> None:
    """Make what has been said less likely: repetition, then frequency, then presence.

    Drafts before a row count as output. A penalty of 1 (repetition) or 0 (the others) changes no bit, and -inf stays.

    Shapes: expanded_idx_mapping: int64[>= L]; expanded_local_pos, input_ids: int32[>= L]; by row: repetition,
    frequency, presence: float32[N], prompt_bitmask: int32[N, ceil(V / 32)], output_counts: int32[N, V];
    logits: float[L, V]. Writes: logits.
    """
    vocab_size = logits.shape[1]
    for i in range(num_logits):
        # 1 the request's row and penalties; nothing to do without any
        row = expanded_idx_mapping[i]
        if row < 0 or (repetition[row] == 1 and frequency[row] == 0 and presence[row] == 0):
            continue
        factor, per_use, once = (a[row].astype(logits.dtype) for a in (repetition, frequency, presence))
        # 2 what it has said: outputs, and the drafts before this row, which are the inputs of its rows 1 .. local_pos
        drafts = input_ids[i + 1 - expanded_local_pos[i] : i + 1]
        counts = output_counts[row] + np.bincount(drafts[drafts >= 0], minlength=vocab_size)
        x = logits[i]
        # 3 repetition, prompt included: positive logits shrink, negative ones grow; a product in both cases
        if factor != 1:
            seen = (counts > 0) | allowed_by(prompt_bitmask[row], vocab_size)
            x[seen] *= np.where(x[seen] > 0, 1 / factor, factor)
        # 4 frequency
        if per_use != 0:
            x -= per_use * counts.astype(logits.dtype)
        # 5 presence
        if once != 0:
            x -= once * (counts > 0)


def count_sampled_tokens(
    idx_mapping: np.ndarray,
    sampled_token_ids: np.ndarray,
    num_sampled: np.ndarray,
    penalised: np.ndarray,
    num_reqs: int,
    output_counts: np.ndarray,
) -> None:
    """Count what the step drew, for requests with a penalty.

    Shapes: idx_mapping: int64[>= R]; sampled_token_ids: int64[>= R, 1+K]; num_sampled: int32[>= R]; by row: penalised:
    int32[N], output_counts: int32[N, V]. Writes: output_counts of the batch's penalised rows.
    """
    for i in range(num_reqs):
        # 1 the request's row; nothing to do without one, or without a penalty
        row = idx_mapping[i]
        if row < 0 or not penalised[row]:
            continue
        # 2 count; a token may have been drawn more than once
        np.add.at(output_counts[row], sampled_token_ids[i, : num_sampled[i]], 1)


class Penalties:
    """The penalties, and what each penalised row has said."""

    def __init__(self, max_num_reqs: int, vocab_size: int, req_states: RequestState) -> None:
        self.req_states = req_states
        self.repetition = np.ones(max_num_reqs, np.float32)
        self.frequency = np.zeros(max_num_reqs, np.float32)
        self.presence = np.zeros(max_num_reqs, np.float32)
        self.penalised = np.zeros(max_num_reqs, np.int32)  # 1 = any of them is not neutral
        self.prompt_bitmask = np.zeros((max_num_reqs, -(-vocab_size // NUM_BITS)), np.int32)
        self.output_counts = np.zeros((max_num_reqs, vocab_size), np.int32)
        self._added: list[int] = []  # penalised rows taken since the last `apply_staged_writes`

    def row_tables(self) -> dict[str, np.ndarray]:
        return {
            "repetition": self.repetition, "frequency": self.frequency, "presence": self.presence,
            "penalised": self.penalised, "prompt_bitmask": self.prompt_bitmask, "output_counts": self.output_counts,
        }  # fmt: skip

    def row_widths(self, row: int) -> dict[str, int]:
        if self.penalised[row]:
            return {}
        return {"prompt_bitmask": 0, "output_counts": 0}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        self.repetition[row] = params.repetition_penalty
        self.frequency[row] = params.frequency_penalty
        self.presence[row] = params.presence_penalty
        # Asked of the stored values: a penalty may round to a neutral one.
        neutral = self.repetition[row] == 1 and self.frequency[row] == 0 and self.presence[row] == 0
        self.penalised[row] = not neutral
        if not neutral:
            self._added.append(row)

    def apply_staged_writes(self) -> None:
        """Set up the rows taken since the last call; the request state must know their tokens."""
        if self._added:
            states = self.req_states
            count_prompt_and_output_tokens(
                np.array(self._added, np.int64), states.prompt_len, states.total_len, states.all_token_ids,
                len(self._added), self.prompt_bitmask, self.output_counts,
            )  # fmt: skip
            self._added.clear()

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool(self.penalised[batch_rows].any())

    def apply(self, rows: LogitsRows, logits: np.ndarray) -> None:
        apply_penalties(
            rows.expanded_idx_mapping, rows.expanded_local_pos, rows.input_ids, self.repetition, self.frequency,
            self.presence, self.prompt_bitmask, self.output_counts, rows.num_logits, logits,
        )  # fmt: skip

    def observe(self, idx_mapping: np.ndarray, sampled_token_ids: np.ndarray, num_sampled: np.ndarray) -> None:
        """Count tokens that entered the state. Shapes: idx_mapping: int64[R]; the others as `count_sampled_tokens`."""
        if self.used_by(idx_mapping):
            count_sampled_tokens(
                idx_mapping, sampled_token_ids, num_sampled, self.penalised, len(idx_mapping), self.output_counts
            )
