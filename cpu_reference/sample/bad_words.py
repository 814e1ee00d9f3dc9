"""Bad words: sequences of tokens that the output must not hold. Twin: gpu_backend/sample/bad_words.py."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from cpu_reference.request_state import RequestState
from cpu_reference.sample.history import tokens_seen
from cpu_reference.sample.logits_rows import LogitsRows
from runner_api import NewRequestData, SamplingParams
from runner_api.constants import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS


def apply_bad_words(
    expanded_idx_mapping: np.ndarray,
    positions: np.ndarray,
    input_ids: np.ndarray,
    prompt_len: np.ndarray,
    total_len: np.ndarray,
    all_token_ids: np.ndarray,
    num_bad_words: np.ndarray,
    bad_word_ends: np.ndarray,
    bad_word_tokens: np.ndarray,
    num_logits: int,
    logits: np.ndarray,
) -> None:
    """Set to -inf the last token of every bad word whose other tokens are the latest ones of the output.

    The prompt is never part of a match. A word of one token is always out.

    Shapes: expanded_idx_mapping: int64[>= L]; positions: int64[>= L], input_ids: int32[>= L] of each row's input token;
    by row: prompt_len, total_len: int32[N], all_token_ids: int32[N, M], num_bad_words: int32[N], bad_word_ends:
    int32[N, MAX_BAD_WORDS] where each word ends in bad_word_tokens: int32[N, MAX_BAD_WORD_TOKENS];
    logits: float[L, V]. Writes: logits.
    """
    for i in range(num_logits):
        # 1 the request's row; nothing to do without one, or without bad words
        row = expanded_idx_mapping[i]
        if row < 0 or num_bad_words[row] == 0:
            continue
        # 2 the output so far, drafts before this row included
        outputs = tokens_seen(i, row, positions, input_ids, total_len, all_token_ids)[prompt_len[row] :]
        # 3 each word
        for w in range(num_bad_words[row]):
            start = bad_word_ends[row, w - 1] if w > 0 else 0
            *beginning, last = bad_word_tokens[row, start : bad_word_ends[row, w]].tolist()
            # 4 is all of it but the last token what was said last?
            n = len(beginning)
            if n <= len(outputs) and outputs[len(outputs) - n :].tolist() == beginning:
                logits[i, last] = -np.inf


class BadWords:
    """The words, one behind the other."""

    def __init__(self, max_num_reqs: int, req_states: RequestState) -> None:
        self.req_states = req_states
        self.num_bad_words = np.zeros(max_num_reqs, np.int32)
        self.bad_word_ends = np.zeros((max_num_reqs, MAX_BAD_WORDS), np.int32)
        self.bad_word_tokens = np.zeros((max_num_reqs, MAX_BAD_WORD_TOKENS), np.int32)

    def row_tables(self) -> dict[str, np.ndarray]:
        return {
            "num_bad_words": self.num_bad_words, "bad_word_ends": self.bad_word_ends,
            "bad_word_tokens": self.bad_word_tokens,
        }  # fmt: skip

    def row_widths(self, row: int) -> dict[str, int]:
        n = int(self.num_bad_words[row])
        return {"bad_word_ends": n, "bad_word_tokens": int(self.bad_word_ends[row, n - 1]) if n else 0}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        words = params.bad_words_token_ids or ()
        tokens = [token for word in words for token in word]
        self.num_bad_words[row] = len(words)
        self.bad_word_ends[row, : len(words)] = list(accumulate(map(len, words)))
        self.bad_word_tokens[row, : len(tokens)] = tokens

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool(self.num_bad_words[batch_rows].any())

    def apply(self, rows: LogitsRows, logits: np.ndarray) -> None:
        states = self.req_states
        apply_bad_words(
            rows.expanded_idx_mapping, rows.positions, rows.input_ids, states.prompt_len, states.total_len,
            states.all_token_ids, self.num_bad_words, self.bad_word_ends, self.bad_word_tokens, rows.num_logits, logits,
        )  # fmt: skip
