"""What a draw must be, read a second time from the rules: one logits row at a time, plain lists, float64.

Independent of every runner: it is what makes laws about sampling sharp for a stranger's runner, and the oracle itself
answerable. A row's history is the request's tokens up to and with the row's input token, drafts included; the token
that is drawn comes behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from runner_api import ReasoningConfig, SamplingParams
from runner_api.constants import FORCED_LOGIT

NEG_INF = -np.inf


@dataclass(frozen=True, slots=True)
class RowHistory:
    """What one logits row stands behind."""

    tokens: Sequence[int]  # everything known to the row: prompt, outputs, drafts before it
    prompt_len: int
    params: SamplingParams
    eos_token_ids: Collection[int] = ()
    reasoning: ReasoningConfig | None = None
    allowed_by_grammar: np.ndarray | None = None  # bool[V]

    @property
    def outputs(self) -> list[int]:
        return list(self.tokens[self.prompt_len :])

    @property
    def stop_set(self) -> list[int]:
        return sorted({*self.params.stop_token_ids, *self.eos_token_ids})


def after_grammar(logits: np.ndarray, row: RowHistory) -> np.ndarray:
    """The row that raw log probabilities are taken from: float64[V]."""
    x = logits.astype(np.float64)
    if row.allowed_by_grammar is not None:
        x[~row.allowed_by_grammar] = NEG_INF
    return x


def processed(logits: np.ndarray, row: RowHistory, slack: float = 0.0) -> np.ndarray:
    """The row after every step but the noise: float64[V]. `slack`: see `kept`."""
    x = before_truncation(logits, row)
    x[~kept(x, row.params, slack)] = NEG_INF
    return x


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Log probabilities of one row."""
    best = x.max()
    return x - best - np.log(np.exp(x - best).sum())


def columns_of(scores: np.ndarray, params: SamplingParams, num_top: int) -> list[int]:
    """The ids behind column 0 of log probabilities: those asked for, or the `num_top` best, ties to the lower id."""
    if params.logprob_token_ids is not None:
        return list(params.logprob_token_ids)
    return np.argsort(-scores, kind="stable")[:num_top].tolist()


def before_truncation(logits: np.ndarray, row: RowHistory) -> np.ndarray:
    """Up to and with the temperature: float64[V]."""
    p = row.params
    x = after_grammar(logits, row)
    if p.allowed_token_ids is not None:
        x[[v for v in range(len(x)) if v not in set(p.allowed_token_ids)]] = NEG_INF
    for token, bias in (p.logit_bias or {}).items():
        x[token] += np.float32(bias)
    _min_tokens(x, row)
    _penalties(x, row)
    for token in banned_by_words(row):
        x[token] = NEG_INF
    forced = thinking_token(row)
    if forced is not None:
        x[forced] = FORCED_LOGIT
    if not p.greedy:
        x /= np.float64(np.float32(p.temperature))
    return x


def _min_tokens(x: np.ndarray, row: RowHistory) -> None:
    if len(row.outputs) >= row.params.min_tokens:
        return
    stops = row.stop_set
    before = x[stops]
    x[stops] = NEG_INF
    if row.params.structured_outputs is not None and (x == NEG_INF).all():
        x[stops] = before


def _penalties(x: np.ndarray, row: RowHistory) -> None:
    p = row.params
    if (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) == (1.0, 0.0, 0.0):
        return
    counts = np.bincount(row.outputs, minlength=len(x))[: len(x)] if row.outputs else np.zeros(len(x))
    seen = counts > 0
    seen[list(row.tokens[: row.prompt_len])] = True
    s = np.float64(np.float32(p.repetition_penalty))
    with np.errstate(over="ignore"):
        x[seen] = np.where(x[seen] > 0, x[seen] / s, x[seen] * s)
    x -= np.float64(np.float32(p.frequency_penalty)) * counts
    x -= np.float64(np.float32(p.presence_penalty)) * (counts > 0)


def banned_by_words(row: RowHistory) -> set[int]:
    """Last tokens of the bad words whose other tokens were just put out."""
    said = row.outputs
    words = row.params.bad_words_token_ids or ()
    return {w[-1] for w in words if len(w) - 1 <= len(said) and tuple(said[len(said) - len(w) + 1 :]) == w[:-1]}


def thinking_token(row: RowHistory) -> int | None:
    """The token that a used-up thinking budget makes come next."""
    budget, r = row.params.thinking_token_budget, row.reasoning
    if budget is None or r is None:
        return None
    tokens = tuple(row.tokens)
    start, natural = _last_of(tokens, r.start_token_ids), _last_of(tokens, r.natural_end_token_ids)
    if start < 0 or start < natural or len(tokens) - (start + len(r.start_token_ids)) < budget:
        return None
    end = r.end_token_ids
    said = max((q for q in range(1, len(end)) if tokens[-q:] == end[:q]), default=0)
    return end[said]


def _last_of(tokens: tuple[int, ...], marker: tuple[int, ...]) -> int:
    """Where the marker stands last; -1 if nowhere."""
    n = len(marker)
    return max((i for i in range(len(tokens) - n + 1) if tokens[i : i + n] == marker), default=-1)


def kept(x: np.ndarray, params: SamplingParams, slack: float = 0.0) -> np.ndarray:
    """bool[V]: what min-p, top-k and top-p leave. A row without a token, or with a NaN, is left whole.

    slack: how far a value may lie on the wrong side of a bound; negative: how far it must lie on the right side. Equal
    values at the cutoff of top-k are no matter of rounding: the lower ids stay.
    """
    alive = x > NEG_INF
    if np.isnan(x).any() or not alive.any():
        return np.ones(len(x), bool)
    if params.min_p > 0:
        alive &= x >= x.max() + np.log(np.float64(np.float32(params.min_p))) - slack
    order = np.argsort(-x, kind="stable")
    order = order[alive[order]]
    if 0 < params.top_k < len(order):
        cutoff = x[order[params.top_k - 1]]
        exact = np.zeros(len(x), bool)
        exact[order[: params.top_k]] = True
        near = (np.abs(x - cutoff) < abs(slack)) & (x != cutoff)
        alive &= (exact | near) if slack > 0 else (exact & ~near)
        order = order[alive[order]]
    if np.float32(params.top_p) < 1 and len(order):
        mass = np.exp(x[order] - x[order[0]])
        before = np.concatenate([[0.0], np.cumsum(mass[:-1])]) / mass.sum()
        alive[order[(before >= np.float64(np.float32(params.top_p)) + slack) & (before > 0)]] = False
    return alive
