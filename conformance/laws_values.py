"""Laws about values: what the KV cache holds, what attention saw, what was drawn. See `conformance.laws`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conformance.context import MOST_MISMATCHES, Mismatch, StepContext
from conformance.laws import Found, law
from conformance.planned_step import WorldRequest
from conformance.truth import witness_logits
from runner_api import SamplingParams

# Rounding of a float32 softmax that may move a token across a top-p or min-p bound.
SLACK = 1e-5


# -- KV contents ----------------------------------------------------------------------------------------------


@law("MR-KV-005", consequence=True)
def own_positions_are_stored(c: StepContext) -> Found:
    return _stored(c, "MR-KV-005")


@law("MR-KV-006", consequence=True)
def copied_blocks_keep_their_contents(c: StepContext) -> Found:
    return _stored(c, "MR-KV-006") if any(m.request.copied for m in c.members) else None


@law("MR-KV-007", consequence=True)
def shared_blocks_keep_their_contents(c: StepContext) -> Found:
    return _stored(c, "MR-KV-007") if any(m.request.shared_until for m in c.members) else None


def _stored(c: StepContext, clause_id: str) -> Found:
    """(token, position) at each computed position that a later query may still read."""
    if not c.record.kv:
        return None
    found: list[Mismatch] = []
    for m in c.members:
        kv, request = c.record.kv.get(m.request.req_id), m.request
        rejected = int(c.record.num_rejected[c.record.req_ids.index(request.req_id)])
        n = m.computed + m.num_scheduled - rejected
        if kv is not None and kv.ndim == 3 and kv.shape[1] > n:
            kv = kv[:, :n]  # a counter that has run ahead is MR-POST-001's finding, in the next step
        if kv is None or kv.shape != (c.num_groups, n, 2):
            shape = None if kv is None else kv.shape
            found.append(Mismatch("MR-KV-005", "kv", request.req_id, (), shape, (c.num_groups, n, 2)))
            continue
        tokens = np.array(request.tokens[:n], np.int64)
        position = np.arange(n)
        for g, reach in enumerate(c.reach):
            first = max(n - reach, 0) if reach else 0
            token_ok, position_ok = kv[g, first:, 0] == tokens[first:], kv[g, first:, 1] == position[first:]
            if token_ok.all() and position_ok.all():
                continue
            for p in (first + np.flatnonzero(~(token_ok & position_ok))).tolist():
                if _stored_clause(p, request) == clause_id:
                    wanted = (int(tokens[p]), p)
                    found.append(Mismatch(clause_id, "kv", request.req_id, (g, p), tuple(kv[g, p].tolist()), wanted))
    return [m for m in found if m.clause_id == clause_id][:MOST_MISMATCHES]


def _stored_clause(position: int, request: WorldRequest) -> str:
    """Which clause answers for a position: copied, shared, or computed by the request itself."""
    if position in request.copied:
        return "MR-KV-006"
    return "MR-KV-007" if position < request.shared_until else "MR-KV-005"


# -- attention ------------------------------------------------------------------------------------------------


@law("MR-ATTN-001", consequence=True)
def queries_see_every_key(c: StepContext) -> Found:
    return _logits(c, "MR-ATTN-001", padded=False, windowed=False)


@law("MR-ATTN-002", consequence=True)
def queries_see_their_window(c: StepContext) -> Found:
    return _logits(c, "MR-ATTN-002", padded=False, windowed=True) if any(c.reach) else None


@law("MR-PAD-006", consequence=True)
def padding_leaves_logits_alone(c: StepContext) -> Found:
    return _logits(c, "MR-PAD-006", padded=True, windowed=False)


def _logits(c: StepContext, clause_id: str, *, padded: bool, windowed: bool) -> Found:
    """Logits rows against the dense definition. Padded steps and rows whose window has moved have their own clause."""
    if c.record.logits is None or c.padded != padded:
        return None
    wanted = c.once(_true_logits)
    if c.record.logits.shape != wanted.shape:
        return [Mismatch(clause_id, "logits", None, (), c.record.logits.shape, wanted.shape)]
    moved = np.array([any(reach and m.computed + m.num_scheduled > reach + 1 for reach in c.reach) for m in c.members])
    found = []
    for j in np.flatnonzero((c.record.logits != wanted).any(axis=1)):
        i = int(c.logit_owner[j])
        if padded or bool(moved[i]) == windowed:
            v = int(np.flatnonzero(c.record.logits[j] != wanted[j])[0])
            got, expected = float(c.record.logits[j, v]), float(wanted[j, v])
            found.append(Mismatch(clause_id, "logits", c.record.req_ids[i], (int(j), v), got, expected))
    return found[:MOST_MISMATCHES]


def _true_logits(c: StepContext) -> np.ndarray:
    """float32[L, V] from each request's own tokens, drafts included."""
    sequences = []
    for m in c.members:
        known = [*m.request.tokens[: m.computed], *m.input_ids]
        sequences += [known[: len(known) - d] for d in range(m.num_drafts, -1, -1)]
    return witness_logits(c.model, sequences)


# -- drawing --------------------------------------------------------------------------------------------------


@law("MR-SAMPLE-003")
def unfinished_prefills_sample_nothing(c: StepContext) -> Found:
    unfinished = np.array([not m.samples for m in c.members])
    if not unfinished.any():
        return None
    owner = np.arange(c.num_reqs)
    both = c.record.num_sampled + c.record.num_rejected
    return c.differ("MR-SAMPLE-003", "num_sampled", both, np.zeros_like(both), owner, unfinished)


@law("MR-SAMPLE-004")
def finished_prefills_sample(c: StepContext) -> Found:
    samples = np.array([m.samples for m in c.members])
    if not samples.any():
        return None
    got = c.record.num_sampled
    wanted = np.clip(got, 1, c.num_logits)
    return c.differ("MR-SAMPLE-004", "num_sampled", got, wanted, np.arange(c.num_reqs), samples)


@law("MR-SAMPLE-005")
def what_is_not_sampled_is_rejected(c: StepContext) -> Found:
    samples = np.array([m.samples for m in c.members]) & (c.record.num_sampled > 0)
    if not samples.any():
        return None
    wanted = c.num_logits - c.record.num_sampled
    return c.differ("MR-SAMPLE-005", "num_rejected", c.record.num_rejected, wanted, np.arange(c.num_reqs), samples)


@law("MR-SAMPLE-006")
def draws_are_token_ids(c: StepContext) -> Found:
    drawn, counts = draws(c), (c.record.num_sampled > 0)[c.logit_owner]
    if not counts.any():
        return None
    wanted = np.clip(drawn, 0, c.model.vocab_size - 1)
    return c.differ("MR-SAMPLE-006", "token_ids", drawn, wanted, c.logit_owner, counts)


@law("MR-SAMPLE-007")
def seeds_are_the_requests(c: StepContext) -> Found:
    wanted = np.array([m.request.seed for m in c.members], np.int64)
    return c.differ("MR-SAMPLE-007", "seeds", c.record.seeds, wanted, np.arange(c.num_reqs))


def draws(c: StepContext) -> np.ndarray:
    """int64[L] the candidate's own draw after each logits row."""
    local = np.arange(len(c.logit_owner)) - c.logit_starts[c.logit_owner]
    return c.record.token_ids[c.logit_owner, local]


def rows_with(c: StepContext, chosen: Callable[[SamplingParams], bool]) -> np.ndarray:
    """Logits rows of the requests whose parameters are chosen and whose draw counts; empty without logits of the right
    shape."""
    if c.record.logits is None or len(c.record.logits) != len(c.logit_owner):
        return np.zeros(0, np.int64)
    mine = np.array([chosen(m.request.params) for m in c.members]) & (c.record.num_sampled > 0)
    drawn = draws(c)
    inside = (drawn >= 0) & (drawn < c.record.logits.shape[1])
    return np.flatnonzero(mine[c.logit_owner] & inside)


def _judge(c: StepContext, clause_id: str, rows: np.ndarray, ok: np.ndarray, expected: str) -> Found:
    drawn = draws(c)
    return [
        Mismatch(clause_id, "token_ids", c.record.req_ids[int(c.logit_owner[j])], (int(j),), int(drawn[j]), expected)
        for j in rows[~ok][:MOST_MISMATCHES]
    ]


def _draws_plainly(p: SamplingParams) -> bool:
    """Whether nothing but temperature, top-k, top-p and min-p stands between the logits and the draw."""
    asked = (p.allowed_token_ids, p.logit_bias, p.bad_words_token_ids, p.thinking_token_budget, p.structured_outputs)
    penalties = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
    return not any(a is not None for a in (*asked, p.trace_decode_token_ids)) and (
        p.min_tokens == 0 and penalties == (1.0, 0.0, 0.0)
    )


@law("MR-SAMPLE-001")
def greedy_takes_the_first_of_the_highest(c: StepContext) -> Found:
    rows = rows_with(c, lambda p: p.greedy and _draws_plainly(p))
    if not len(rows):
        return None
    return _judge(c, "MR-SAMPLE-001", rows, draws(c)[rows] == c.record.logits[rows].argmax(axis=1), "the argmax")


@law("MR-SAMPLE-002")
def seeded_draws_are_the_oracles(c: StepContext) -> Found:
    """On rows whose logits equal the oracle's; both hold the same seed, position and parameters there."""
    rows = rows_with(c, lambda p: not p.greedy)
    theirs = c.reference
    if not len(rows) or theirs.logits is None or theirs.req_ids != c.record.req_ids:
        return None
    rows = rows[(c.record.logits[rows] == theirs.logits[rows]).all(axis=1)]
    if not len(rows):
        return None
    local = np.arange(len(c.logit_owner)) - c.logit_starts[c.logit_owner]
    wanted = theirs.token_ids[c.logit_owner, local]
    chosen = np.zeros(len(wanted), bool)
    chosen[rows] = True
    return c.differ("MR-SAMPLE-002", "token_ids", draws(c), wanted, c.logit_owner, chosen)


@law("MR-SAMPLE-008")
def top_k_bounds_the_rank(c: StepContext) -> Found:
    rows = rows_with(c, lambda p: p.top_k > 0 and _draws_plainly(p))
    if not len(rows):
        return None
    logits = c.record.logits[rows]
    above = (logits > logits[np.arange(len(rows)), draws(c)[rows]][:, None]).sum(axis=1)
    k = np.array([c.members[i].request.params.top_k for i in c.logit_owner[rows]])
    return _judge(c, "MR-SAMPLE-008", rows, above < k, "one of the top_k")


@law("MR-SAMPLE-009")
def top_p_bounds_the_mass_above(c: StepContext) -> Found:
    rows = rows_with(c, lambda p: p.top_p < 1.0 and _draws_plainly(p))
    if not len(rows):
        return None
    probability, drawn = _probabilities(c, rows)
    above = np.where(probability > drawn[:, None], probability, 0.0).sum(axis=1)
    p = np.array([c.members[i].request.params.top_p for i in c.logit_owner[rows]])
    return _judge(c, "MR-SAMPLE-009", rows, above < p + SLACK, "inside the top_p mass")


@law("MR-SAMPLE-010")
def min_p_bounds_the_probability(c: StepContext) -> Found:
    rows = rows_with(c, lambda p: p.min_p > 0.0 and _draws_plainly(p))
    if not len(rows):
        return None
    probability, drawn = _probabilities(c, rows)
    p = np.array([c.members[i].request.params.min_p for i in c.logit_owner[rows]])
    bound = p * probability.max(axis=1) * (1.0 - SLACK)
    return _judge(c, "MR-SAMPLE-010", rows, drawn >= bound, "at least min_p of the best")


def _probabilities(c: StepContext, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Softmax of the candidate's logits at the request's temperature: float64[n, V], and that of the drawn token."""
    temperature = np.array([c.members[i].request.params.temperature for i in c.logit_owner[rows]])
    x = c.record.logits[rows].astype(np.float64) / temperature[:, None]
    probability = np.exp(x - x.max(axis=1, keepdims=True))
    probability /= probability.sum(axis=1, keepdims=True)
    return probability, probability[np.arange(len(rows)), draws(c)[rows]]
