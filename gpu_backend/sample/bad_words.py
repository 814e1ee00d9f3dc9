"""Bad words: sequences of tokens that the output must not hold. Twin: cpu_reference/sample/bad_words.py."""

from __future__ import annotations

import numpy as np
import torch

from gpu_backend.packed_copy import PackedCopy
from gpu_backend.request_state import RequestState
from gpu_backend.sample.history import tokens_seen
from gpu_backend.sample.logits_rows import LogitsRows
from gpu_backend.staged_write import StagedWriteTensor
from gpu_backend.triton_support import block, entry, launch, signature, tl, triton
from runner_api import NewRequestData, SamplingParams
from runner_api.constants import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS


@entry
@signature(
    {"*i64": "expanded_idx_mapping positions",
     "*i32": "input_ids prompt_len total_len all_token_ids num_bad_words bad_word_ends bad_word_tokens",
     "*fp32": "logits"},
    WORDS=128,
)  # fmt: skip
@triton.jit
def _apply_bad_words_kernel(
    expanded_idx_mapping, positions, input_ids, prompt_len, total_len, all_token_ids, all_stride, num_bad_words,
    bad_word_ends, ends_stride, bad_word_tokens, tokens_stride, logits, vocab_size, WORDS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    # 1 the request's row; nothing to do without one, or without bad words
    row = tl.load(expanded_idx_mapping + i)
    num_words = tl.load(num_bad_words + row, mask=row >= 0, other=0)
    if num_words > 0:
        # 2 the output so far, drafts before this row included
        position = tl.load(positions + i)
        num_outputs = tl.maximum(position + 1 - tl.load(prompt_len + row), 0)
        known = tl.load(total_len + row)
        # 3 each word, a lane for each
        w = tl.arange(0, WORDS)
        ends = bad_word_ends + row * ends_stride
        start = tl.load(ends + w - 1, mask=(w > 0) & (w < num_words), other=0)
        last = tl.load(ends + w, mask=w < num_words, other=1) - 1
        words = bad_word_tokens + row * tokens_stride
        # 4 is all of it but the last token what was said last? Backwards, a token of every word at a time
        out = (w < num_words) & (last - start <= num_outputs)
        for back in range(tl.max(tl.where(out, last - start, 0), 0)):
            said = tokens_seen(
                position - back, back <= position, i, position, input_ids, known, all_token_ids + row * all_stride
            )  # fmt: skip
            more = back < last - start
            token = tl.load(words + last - 1 - back, mask=more, other=0)
            out = out & (~more | (token == said))
        token = tl.load(words + last, mask=out, other=0)
        # Several words may end in one token: the first of them drops it.
        same = out[None, :] & (token[:, None] == token[None, :])
        first = tl.min(tl.where(same, w[None, :], WORDS), 1)
        tl.store(logits + i * vocab_size + token, float("-inf"), mask=first == w)


def apply_bad_words(
    expanded_idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    input_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
    all_token_ids: torch.Tensor,
    num_bad_words: torch.Tensor,
    bad_word_ends: torch.Tensor,
    bad_word_tokens: torch.Tensor,
    num_logits: int,
    logits: torch.Tensor,
) -> None:
    """Set to -inf the last token of every bad word whose other tokens are the latest ones of the output.

    The prompt is never part of a match. A word of one token is always out.

    Shapes: expanded_idx_mapping: int64[>= L]; positions: int64[>= L], input_ids: int32[>= L] of each row's input token;
    by row: prompt_len, total_len: int32[N], all_token_ids: int32[N, M], num_bad_words: int32[N], bad_word_ends:
    int32[N, MAX_BAD_WORDS] where each word ends in bad_word_tokens: int32[N, MAX_BAD_WORD_TOKENS];
    logits: float32[L, V], contiguous. Writes: logits.
    """
    launch(
        _apply_bad_words_kernel, (num_logits,), expanded_idx_mapping, positions, input_ids, prompt_len, total_len,
        all_token_ids, all_token_ids.stride(0), num_bad_words, bad_word_ends, bad_word_ends.stride(0), bad_word_tokens,
        bad_word_tokens.stride(0), logits, logits.shape[1], WORDS=block(bad_word_ends.shape[1]),
    )  # fmt: skip


class BadWords:
    """The words, one behind the other."""

    def __init__(self, max_num_reqs: int, req_states: RequestState, device: torch.device) -> None:
        self.req_states = req_states
        self.num_bad_words_np = np.zeros(max_num_reqs, np.int32)
        self.num_bad_words: torch.Tensor  # int32[N], device; set by `bind`
        self._bad_word_ends = StagedWriteTensor(max_num_reqs, MAX_BAD_WORDS, np.int32, device)
        self._bad_word_tokens = StagedWriteTensor(max_num_reqs, MAX_BAD_WORD_TOKENS, np.int32, device)
        self.num_tokens_np = np.zeros(max_num_reqs, np.int32)  # of all words; the host's own

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        return {"num_bad_words": self.num_bad_words_np}

    def bind(self, packed: PackedCopy) -> None:
        self.num_bad_words = packed.views["num_bad_words"]

    def row_tables(self) -> dict[str, torch.Tensor]:
        """Device tables by row that no step's copy overwrites."""
        return {"bad_word_ends": self._bad_word_ends.table, "bad_word_tokens": self._bad_word_tokens.table}

    def row_widths(self, row: int) -> dict[str, int]:
        """How much of the row's part of a table means anything, where that is not all of it."""
        return {"bad_word_ends": int(self.num_bad_words_np[row]), "bad_word_tokens": int(self.num_tokens_np[row])}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        words = params.bad_words_token_ids or ()
        tokens = [token for word in words for token in word]
        self.num_bad_words_np[row], self.num_tokens_np[row] = len(words), len(tokens)
        self._bad_word_ends.stage_write(row, 0, np.cumsum([len(word) for word in words], dtype=np.int32).tolist())
        self._bad_word_tokens.stage_write(row, 0, tokens)

    def pack(self, packed: PackedCopy) -> None:
        self._bad_word_ends.pack(packed)
        self._bad_word_tokens.pack(packed)

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        self._bad_word_ends.apply(packed)
        self._bad_word_tokens.apply(packed)

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool(self.num_bad_words_np[batch_rows].any())

    def apply(self, rows: LogitsRows, logits: torch.Tensor) -> None:
        states = self.req_states
        apply_bad_words(
            rows.expanded_idx_mapping, rows.positions, rows.input_ids, states.prompt_len, states.total_len,
            states.all_token_ids, self.num_bad_words, self._bad_word_ends.table, self._bad_word_tokens.table,
            rows.num_logits, logits,
        )  # fmt: skip
