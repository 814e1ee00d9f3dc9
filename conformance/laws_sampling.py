"""Laws about whole draws and log probabilities, for requests that ask for anything at all. See `conformance.laws`.

Every row is worked out a second time from the candidate's own logits, by `conformance.sampling_truth`; the oracle is
not asked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conformance.context import MOST_MISMATCHES, Mismatch, StepContext
from conformance.laws import Found, law
from conformance.laws_values import draws, rows_with
from conformance.noise import gumbel_noise
from conformance.sampling_truth import (
    RowHistory,
    after_grammar,
    before_truncation,
    columns_of,
    kept,
    log_softmax,
    processed,
)
from conformance.truth import witness_logits
from conformance.world import EOS_TOKEN_IDS
from runner_api import LogprobsLists, SamplingParams

# Rounding of the float32 pipeline, in a score and across a bound of truncation.
NEAR = 2e-5
LOGPROB_TOLERANCE = 1e-4


def histories(c: StepContext) -> list[RowHistory]:
    """What each logits row stands behind."""
    return [_history(c, j) for j in range(len(c.logit_owner))]


def _history(c: StepContext, j: int) -> RowHistory:
    m = c.members[int(c.logit_owner[j])]
    local = j - int(c.logit_starts[c.logit_owner[j]])
    known = [*m.request.tokens[: m.computed], *m.input_ids]
    tokens = known[: len(known) - m.num_drafts + local]
    return RowHistory(
        tokens, m.request.prompt_len, m.request.params, EOS_TOKEN_IDS, c.config.reasoning,
        _allowed(c, m.request.req_id, local),
    )  # fmt: skip


def _allowed(c: StepContext, req_id: str, local: int) -> np.ndarray | None:
    """bool[V] what the step's masks leave one logits row of a request; None without a mask."""
    if c.grammar is None or req_id not in c.grammar.structured_output_request_ids:
        return None
    g = c.grammar.structured_output_request_ids.index(req_id)
    words = c.grammar.grammar_bitmask[g * (1 + c.config.num_speculative_tokens) + local]
    bits = np.unpackbits(words.astype("<i4").view(np.uint8), bitorder="little")
    return bits[: c.model.vocab_size].astype(bool)


# -- draws ----------------------------------------------------------------------------------------------------


@law("MR-SAMPLE-012")
def draws_win(c: StepContext) -> Found:
    """The drawn token has survived every step, and no other that has surely survived scores more."""
    rows = rows_with(c, lambda p: p.trace_decode_token_ids is None)
    rows = rows[np.array([c.members[i].samples for i in c.logit_owner[rows]], bool)]
    if not len(rows):
        return None
    every, drawn = c.once(histories), draws(c)
    seeds = np.array([c.members[int(c.logit_owner[j])].request.seed for j in rows], np.int64)
    positions = np.array([len(every[j].tokens) - 1 for j in rows], np.int64)
    gumbel = gumbel_noise(seeds, positions, c.model.vocab_size, c.config.noise)
    found = []
    for j, g in zip(rows.tolist(), gumbel, strict=True):
        x = before_truncation(c.record.logits[j], every[j])
        score = x if every[j].params.greedy else x + g
        sure = np.where(kept(x, every[j].params, -NEAR), score, -np.inf)
        winner = int(sure.argmax())
        if drawn[j] != winner and not (
            kept(x, every[j].params, NEAR)[drawn[j]] and score[drawn[j]] >= sure[winner] - NEAR
        ):
            req_id = c.record.req_ids[int(c.logit_owner[j])]
            found.append(Mismatch("MR-SAMPLE-012", "token_ids", req_id, (j,), int(drawn[j]), winner))
    return found[:MOST_MISMATCHES]


# -- log probabilities of tokens ------------------------------------------------------------------------------


@law("MR-LOGPROB-001", consequence=True)
def raw_log_probabilities(c: StepContext) -> Found:
    return _values(c, "MR-LOGPROB-001") if c.config.logprobs_mode == "raw_logprobs" else None


@law("MR-LOGPROB-003", consequence=True)
def processed_log_probabilities(c: StepContext) -> Found:
    return _values(c, "MR-LOGPROB-003") if c.config.logprobs_mode == "processed_logprobs" else None


@law("MR-LOGPROB-004", consequence=True)
def logits_handed_out(c: StepContext) -> Found:
    return _values(c, "MR-LOGPROB-004") if c.config.logprobs_mode.endswith("logits") else None


@law("MR-LOGPROB-002", consequence=True)
def rank_of_the_taken_token(c: StepContext) -> Found:
    rows = _logprob_rows(c)
    if not len(rows) or c.record.ranks is None:
        return None
    token, chosen = draws(c), np.zeros(c.num_reqs, bool)
    wanted = np.zeros(c.num_reqs, np.int64)
    for j in rows:
        base = _base(c, int(j))
        others = np.delete(base, token[j])
        if (np.abs(others - base[token[j]]) < NEAR)[others != base[token[j]]].any():
            continue  # rounding may have swapped the two
        wanted[j], chosen[j] = (base >= base[token[j]]).sum(), True
    return c.differ("MR-LOGPROB-002", "ranks", c.record.ranks, wanted, np.arange(c.num_reqs), chosen)


def _values(c: StepContext, clause_id: str) -> Found:
    """Column 0 and every column that the request itself asked for: ids that may stand there, and their values."""
    rows = _logprob_rows(c)
    if not len(rows):
        return None
    ids, values = c.record.logprob_token_ids, c.record.logprobs
    if ids is None or values is None:
        return [Mismatch(clause_id, "logprobs", c.record.req_ids[int(rows[0])], (), None, "asked for")]
    found = []
    for j in rows.tolist():
        base, params = _base(c, j), c.members[j].request.params
        scores = log_softmax(base) if c.config.logprobs_mode.endswith("_logprobs") else base
        num_top = c.model.vocab_size if params.logprobs == -1 else params.logprobs or 0
        columns = [int(draws(c)[j]), *columns_of(scores, params, num_top)]
        got = values[j, : len(columns)].astype(np.float64)
        wanted = scores[columns]
        with np.errstate(invalid="ignore"):
            right = (got == wanted) | (np.abs(got - wanted) <= LOGPROB_TOLERANCE * (1 + np.abs(wanted)))
        right[0] &= ids[j, 0] == columns[0]
        if len(got) != len(columns) or not right.all():
            at = int(np.flatnonzero(~right)[0]) if len(got) == len(columns) else len(got)
            mine = (int(ids[j, at]), float(got[at])) if at < len(got) else None
            expected = (columns[at], round(float(wanted[at]), 5))
            found.append(Mismatch(clause_id, "logprobs", c.record.req_ids[j], (j, at), mine, expected))
    return found[:MOST_MISMATCHES]


def _base(c: StepContext, j: int) -> np.ndarray:
    """float64[V] the row that log probabilities of the mode are taken from."""
    take = processed if c.config.logprobs_mode.startswith("processed") else after_grammar
    return take(c.record.logits[j], c.once(histories)[j])


def _logprob_rows(c: StepContext) -> np.ndarray:
    """Requests that asked for log probabilities and took a token of their own drawing; none in steps with drafts."""

    def asks(p: SamplingParams) -> bool:
        return p.logprobs is not None or p.logprob_token_ids is not None

    wanted = any(asks(m.request.params) for m in c.members)
    if not wanted or c.record.forced_token_ids is not None or len(c.logit_owner) != c.num_reqs:
        return np.zeros(0, np.int64)
    rows = rows_with(c, asks)
    return rows[np.array([c.members[i].samples for i in rows], bool)]


# -- log probabilities of prompts -----------------------------------------------------------------------------


@law("MR-LOGPROB-013", consequence=True)
def prompts_are_scored_when_they_end(c: StepContext) -> Found:
    if c.output_again is None or not any(m.request.params.prompt_logprobs is not None for m in c.members):
        return None
    due = sorted(m.request.req_id for m in c.members if _prompt_ends(c, m.request.req_id))
    got = sorted(r for r, lists in c.output.prompt_logprobs.items() if len(lists.ranks) or r in due)
    missing = [r for r in due if r not in got and len(_targets(c, r))]
    return [] if not missing and set(got) <= set(due) else [
        Mismatch("MR-LOGPROB-013", "prompt_logprobs", None, (), got, due)
    ]  # fmt: skip


@law("MR-LOGPROB-011", consequence=True)
def prompts_are_scored_right(c: StepContext) -> Found:
    """Of prompts that arrived in any chunks, behind any prefix, with any neighbours."""
    if c.output_again is None:
        return None
    due = {r: lists for r, lists in c.output.prompt_logprobs.items() if r in c.record.req_ids and _prompt_ends(c, r)}
    found = []
    for req_id, lists in due.items():
        found += _prompt_faults(c, req_id, lists)
    return found[:MOST_MISMATCHES] if due else None


def _prompt_ends(c: StepContext, req_id: str) -> bool:
    """Whether the step computes the last token of a prompt that is to be scored."""
    m = c.expected.requests[req_id]
    r = m.request
    whole = r.params.prompt_logprobs is not None and m.prefill_len == r.prompt_len
    return whole and m.computed < r.prompt_len <= m.computed + m.num_scheduled


def _targets(c: StepContext, req_id: str) -> Sequence[int]:
    r = c.expected.requests[req_id].request
    return r.tokens[r.admitted_at + 1 : r.prompt_len]


def _prompt_faults(c: StepContext, req_id: str, lists: LogprobsLists) -> list[Mismatch]:
    r, targets = c.expected.requests[req_id].request, _targets(c, req_id)
    num_top = c.model.vocab_size if r.params.prompt_logprobs == -1 else r.params.prompt_logprobs or 0
    shape = tuple(np.shape(lists.token_ids))
    if shape != (len(targets), 1 + num_top):
        return [Mismatch("MR-LOGPROB-011", "prompt_logprobs", req_id, (), shape, (len(targets), 1 + num_top))]
    raw = witness_logits(c.model, [r.tokens[: r.admitted_at + 1 + t] for t in range(len(targets))]) if targets else []
    for t, target in enumerate(targets):
        x = raw[t].astype(np.float64)
        scores = log_softmax(x) if c.config.logprobs_mode.endswith("_logprobs") else x
        ids = [target, *np.argsort(-x, kind="stable")[:num_top].tolist()]
        rank = int((x >= x[target]).sum())
        told = (lists.token_ids[t].tolist(), int(lists.ranks[t]))
        close = np.abs(lists.logprobs[t] - scores[ids]) <= LOGPROB_TOLERANCE
        if told != (ids, rank) or not close.all():
            return [Mismatch("MR-LOGPROB-011", "prompt_logprobs", req_id, (t,), told, (ids, rank))]
    return []
