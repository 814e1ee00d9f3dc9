"""Log probabilities: of the token that was taken, and of the likeliest ones or those that a request lists.

A row of logits is normalised as a whole, log p(v) = x_v - log sum exp(x), but only a few columns of it are handed out.
Source: vLLM 0.33 sample log probabilities; ranks count real tokens only. Twin: gpu_backend/sample/logprob.py.
"""

from __future__ import annotations

import numpy as np

from cpu_reference.sample.logits_rows import LogitsRows
from runner_api import LogprobsLists, NewRequestData, SamplingParams
from runner_api.constants import MAX_LOGPROB_TOKEN_IDS

# Stands in a list of columns where a row has no more tokens to tell of.
UNUSED = -1


def compute_logprob_stats(
    token_ids: np.ndarray, num_logits: int, logits: np.ndarray, log_sum: np.ndarray, ranks: np.ndarray
) -> None:
    """What a row's log probabilities are measured from, and how many tokens are at least as likely as the one given.

    log_sum is log sum exp(x), NaN for a row that holds a NaN or +inf, -inf for a row of only -inf: such a row has no
    distribution, and all of its log probabilities are NaN. The rank is 1 for the only best token, counts ties, is V
    for a token at -inf (less the NaNs of the row) and 0 for a token at NaN.

    Shapes: token_ids: int64[>= L]; logits: float[L, V]; log_sum: float[>= L]; ranks: int64[>= L]. Writes: the first L
    entries of log_sum and ranks.
    """
    x = logits[:num_logits].astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        # 1 the best logit; 0 where there is none, so that nothing is subtracted
        best = x.max(axis=1, keepdims=True)
        shift = np.where(best == -np.inf, 0.0, best)
        # 2 the softmax's denominator, relative to it
        total = np.exp(x - shift).sum(axis=1)
        log_sum[:num_logits] = shift[:, 0] + np.log(total)
    # 3 tokens that are at least as likely
    taken = np.take_along_axis(x, token_ids[:num_logits, None], axis=1)
    ranks[:num_logits] = (x >= taken).sum(axis=1)


def select_top_tokens(num_logits: int, num_top: int, logits: np.ndarray, columns: np.ndarray) -> None:
    """The `num_top` best tokens of each row, best first, ties to the lower id; NaNs come last.

    Shapes: logits: float[L, V]; num_top: 0 .. min(V, C); columns: int32[>= L, C]. Writes: the first L rows of columns,
    whole: UNUSED behind the first num_top.
    """
    # 1 a stable sort leaves ties in order of token id
    order = np.argsort(-logits[:num_logits], axis=1, kind="stable")
    # 2 the first of them
    columns[:num_logits] = UNUSED
    columns[:num_logits, :num_top] = order[:, :num_top]


def select_listed_tokens(
    expanded_idx_mapping: np.ndarray,
    num_listed: np.ndarray,
    listed_token_ids: np.ndarray,
    num_logits: int,
    columns: np.ndarray,
) -> None:
    """Put the tokens that a request lists in the place of the best ones; requests without a list keep those.

    Shapes: expanded_idx_mapping: int64[>= L]; num_listed: int32[N] by row, 0 = no list; listed_token_ids: int32[N,
    MAX_LOGPROB_TOKEN_IDS] by row; columns: int32[>= L, C], C >= every num_listed of the batch. Writes: columns of
    requests with a list, whole: UNUSED behind the list.
    """
    for i in range(num_logits):
        # 1 the request's row; nothing to do without one, or without a list
        row = expanded_idx_mapping[i]
        if row < 0 or num_listed[row] == 0:
            continue
        # 2 its list, then nothing
        n = num_listed[row]
        columns[i, :n] = listed_token_ids[row, :n]
        columns[i, n:] = UNUSED


def gather_logprobs(
    token_ids: np.ndarray,
    columns: np.ndarray,
    log_sum: np.ndarray,
    num_logits: int,
    logits: np.ndarray,
    logprob_token_ids: np.ndarray,
    logprobs: np.ndarray,
) -> None:
    """Column 0 is the token that was taken, the others those in `columns`, each with its logit less `log_sum`.

    A column of UNUSED gives id 0 at -inf. A log_sum of 0 hands out the logits themselves.

    Shapes: token_ids: int64[>= L]; columns: int32[>= L, C]; log_sum: float[>= L]; logits: float[L, V];
    logprob_token_ids: int32[>= L, 1+C]; logprobs: float[>= L, 1+C]. Writes: the first L rows of the last two.
    """
    # 1 which tokens
    tokens = np.concatenate([token_ids[:num_logits, None], columns[:num_logits]], axis=1)
    unused = tokens == UNUSED
    ids = np.where(unused, 0, tokens)
    # 2 their log probabilities
    with np.errstate(invalid="ignore"):
        values = np.take_along_axis(logits[:num_logits], ids, axis=1) - log_sum[:num_logits, None]
    logprob_token_ids[:num_logits] = ids
    logprobs[:num_logits] = np.where(unused, -np.inf, values)


def score_tokens(
    token_ids: np.ndarray, columns: np.ndarray, normalised: bool, num_logits: int, logits: np.ndarray
) -> LogprobsLists:
    """Log probabilities (`normalised`) or logits of the tokens that were taken and of `columns`, with ranks.

    Shapes: token_ids: int64[>= L]; columns: int32[>= L, C]; logits: float[L, V].
    """
    width = 1 + columns.shape[1]
    log_sum, ranks = np.zeros(num_logits, np.float64), np.zeros(num_logits, np.int64)
    ids, values = np.zeros((num_logits, width), np.int32), np.zeros((num_logits, width), np.float32)
    compute_logprob_stats(token_ids, num_logits, logits, log_sum, ranks)
    if not normalised:
        log_sum[:] = 0.0
    gather_logprobs(token_ids, columns, log_sum, num_logits, logits, ids, values)
    return LogprobsLists(ids, values, ranks)


def compute_logprobs(logits: np.ndarray, token_ids: np.ndarray, num_top: int, normalised: bool = True) -> LogprobsLists:
    """The tokens that were taken and the `num_top` best of each row.

    Shapes: logits: float[L, V]; token_ids: int64[L]. Returns token_ids int32[L, 1+num_top], logprobs float32[L,
    1+num_top], ranks int64[L].
    """
    num_logits = len(logits)
    columns = np.zeros((num_logits, num_top), np.int32)
    select_top_tokens(num_logits, num_top, logits, columns)
    return score_tokens(token_ids, columns, normalised, num_logits, logits)


class TokenLogprobs:
    """What each request wants to know of the tokens it takes, by row.

    mode: one of runner_api.config.LOGPROBS_MODES, the same for all requests of a runner.
    """

    def __init__(self, max_num_reqs: int, vocab_size: int, mode: str) -> None:
        self.vocab_size = vocab_size
        self.normalised = mode.endswith("_logprobs")
        self.of_processed = mode.startswith("processed_")
        self.num_top = np.full(max_num_reqs, -1, np.int32)  # -1 = nothing is wanted
        self.num_listed = np.zeros(max_num_reqs, np.int32)
        self.listed_token_ids = np.zeros((max_num_reqs, MAX_LOGPROB_TOKEN_IDS), np.int32)

    def row_tables(self) -> dict[str, np.ndarray]:
        return {
            "num_top": self.num_top, "num_listed": self.num_listed, "listed_token_ids": self.listed_token_ids,
        }  # fmt: skip

    def row_widths(self, row: int) -> dict[str, int]:
        return {"listed_token_ids": int(self.num_listed[row])}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        listed = params.logprob_token_ids or ()
        self.num_listed[row] = len(listed)
        self.listed_token_ids[row, : len(listed)] = listed
        wanted = None if listed else params.logprobs
        self.num_top[row] = -1 if wanted is None else self.vocab_size if wanted == -1 else wanted

    def used_by(self, batch_rows: np.ndarray) -> bool:
        return bool((self.num_top[batch_rows] >= 0).any() or (self.num_listed[batch_rows] > 0).any())

    def widths(self, batch_rows: np.ndarray) -> tuple[int, int]:
        """(most top tokens, most tokens at all) that any request of the batch wants, the one taken not counted."""
        num_top = max(int(self.num_top[batch_rows].max(initial=0)), 0)
        return num_top, max(num_top, int(self.num_listed[batch_rows].max(initial=0)))

    def compute(self, rows: LogitsRows, token_ids: np.ndarray, logits: np.ndarray) -> LogprobsLists:
        """One row per logits row, also of requests that want nothing, as wide as the batch's widest wish.

        token_ids: int64[L] what was taken; logits: float[L, V], processed or not as `of_processed` says.
        """
        num_top, num_columns = self.widths(rows.batch_rows)
        columns = np.zeros((rows.num_logits, num_columns), np.int32)
        # 1 the best ones
        select_top_tokens(rows.num_logits, num_top, logits, columns)
        # 2 or those on a list
        if (self.num_listed[rows.batch_rows] > 0).any():
            select_listed_tokens(
                rows.expanded_idx_mapping, self.num_listed, self.listed_token_ids, rows.num_logits, columns
            )
        # 3 their values
        return score_tokens(token_ids, columns, self.normalised, rows.num_logits, logits)
