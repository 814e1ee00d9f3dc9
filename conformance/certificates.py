"""Is a drawn token right? Its certificate is worked out in float64 from the logits that the runner itself drew from.

The logits are exact inputs: whether they are good ones is another question, with a tolerance of its own. What is left
between two runners is the rounding of the sampler's steps and of the noise, and both have bounds. The exact winner
leads a token by some margin; a token is *equal* if it is the winner, a *near tie* if the margin is within the bound of
what rounding can turn round, and a *divergence* otherwise. A near tie can be counted beforehand: two scores lie within
a distance d with a probability of at most d, so that about `expected` of them are met in a run, and many more are a
fault that hides behind roundings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conformance.exact_processors import ExactProcessors
from conformance.exact_rows import Arithmetic, ExactRows, KnownRequest, RowProcessor
from conformance.keep_sets import KeepSets, Row, keep_sets
from conformance.noise import gumbel_noise
from runner_api import GrammarOutput, RunnerConfig, SampleFault, SchedulerOutput, StepRecord, load_stages

EQUAL, NEAR_TIE, DIVERGENCE = "equal", "near tie", "divergence"
# The bound of two scores in units, where noise and logits are of ordinary size (|noise| <= 10, |score| <= 16).
TYPICAL_BOUND = 128
# More near ties than this many times those to be expected, and as many on top, are no accident.
CAP_FACTOR, CAP_SLACK = 10.0, 3.0


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is known of one token.

    winner: the token that exact arithmetic draws. margin: how far the score of the best token that no rounding takes
    away exceeds this token's; bound: how far rounding can have moved the two. expected: the probability that a right
    runner draws another token than the winner here. fault: what the row is instead of a draw. why: where the margin is
    infinite, what leaves this token out.
    """

    token: int
    winner: int
    verdict: str
    margin: float = 0.0
    bound: float = 0.0
    expected: float = 0.0
    fault: SampleFault = SampleFault.NONE
    why: str = ""

    def __str__(self) -> str:
        if self.verdict == EQUAL:
            return f"token {self.token}"
        if self.margin == np.inf:
            return f"token {self.token}, winner {self.winner}: {self.why}"
        return f"token {self.token}, winner {self.winner}: margin {self.margin:.3g}, bound {self.bound:.3g}"


@dataclass(frozen=True, slots=True)
class ExactDraw:
    """One logits row, ready to judge tokens. scores, bounds: float64[V]; spread: how close two scores come, as the
    probability that they lie within a small distance, divided by it; listed: the token that a request's own trace puts
    in the place of any draw; greedy: the best logit wins, without noise."""

    scores: np.ndarray
    bounds: np.ndarray
    sets: KeepSets
    fault: SampleFault
    spread: float = 1.0
    listed: int | None = None
    greedy: bool = False

    @property
    def winner(self) -> int:
        """The token of exact arithmetic; ties go to the lower id."""
        if self.listed is not None:
            return self.listed
        return 0 if self.fault else int(np.where(self.sets.kept, self.scores, -np.inf).argmax())

    def certify(self, token: int) -> Certificate:
        """Judge one token. Whatever is no id of a possible token is a divergence."""
        winner = self.winner
        if self.listed is not None or self.fault:
            return Certificate(token, winner, EQUAL if token == winner else DIVERGENCE, fault=self.fault)
        expected = self._expected(winner)
        if token == winner:
            return Certificate(token, winner, EQUAL, expected=expected)
        if not 0 <= token < len(self.scores) or not self.sets.possible[token]:
            return Certificate(token, winner, DIVERGENCE, np.inf, expected=expected, why=self._left_out(token, winner))
        sure = np.where(self.sets.certain, self.scores - self.bounds, -np.inf)
        rival = int(sure.argmax())
        if sure[rival] == -np.inf:  # no token is beyond doubt, so that any possible one may be alone
            return Certificate(token, winner, NEAR_TIE, expected=expected)
        margin = float(self.scores[rival] - self.scores[token])
        bound = float(self.bounds[rival] + self.bounds[token])
        verdict = NEAR_TIE if margin <= bound else DIVERGENCE
        return Certificate(token, winner, verdict, margin, bound, expected)

    def _left_out(self, token: int, winner: int) -> str:
        """Why a token cannot have been drawn, whatever the rounding."""
        if not 0 <= token < len(self.scores):
            return "it is no token of the vocabulary"
        if not self.greedy or self.scores[token] == -np.inf:
            return "the request's own parameters leave it out"
        if self.scores[token] == self.scores[winner]:
            return "of equal logits the lowest id wins"
        return "its logit is not the highest, and no rounding makes it so"

    def _expected(self, winner: int) -> float:
        rest = np.where(self.sets.possible, self.scores, -np.inf)
        rest[winner] = -np.inf
        second = int(rest.argmax())
        if rest[second] == -np.inf:
            return 0.0
        return float(self.bounds[winner] + self.bounds[second]) * self.spread


def exact_draw(
    rows: ExactRows, i: int, request: KnownRequest, noise: np.ndarray | None, arithmetic: Arithmetic
) -> ExactDraw:
    """Row i of a step. noise: float64[V], None for a greedy row."""
    p, x, error = request.params, rows.x[i], rows.error[i]
    row = Row(x, error, rows.raw[i])
    fault = SampleFault.NONE
    if np.isnan(x).any():
        fault = SampleFault.NAN
    elif x.max() == -np.inf:
        fault = SampleFault.NO_TOKEN
    if noise is None:
        # The best logit wins: what top-k leaves with k = 1. A token that was treated like it, with a higher id, cannot.
        return ExactDraw(x, error, keep_sets(row, 0.0, 1, 1.0, arithmetic.unit), fault, greedy=True)
    sets = keep_sets(row, float(np.float32(p.min_p)), p.top_k, float(np.float32(p.top_p)), arithmetic.unit)
    scores = x + noise
    # What the logit, the noise and their sum are off by.
    bounds = error + arithmetic.noise_error(noise) + arithmetic.unit * np.abs(scores)
    bounds[~np.isfinite(scores)] = 0
    return ExactDraw(scores, bounds, sets, fault, _spread(x, sets.kept))


def _spread(x: np.ndarray, kept: np.ndarray) -> float:
    """Scores of probabilities p come within d of the best one with a probability of about d * sum of p (1 - p)."""
    best = x.max()
    if not np.isfinite(best):
        return 0.0
    p = np.where(kept, np.exp(x - best), 0.0)
    p /= p.sum()
    return float((p * (1 - p)).sum())


class Certifier:
    """Follows a runner's plans and tokens, and certifies what it draws.

    config: what the runner was built with. dtype: what it computes in, if not `config.dtype`.
    """

    def __init__(self, config: RunnerConfig, dtype: str | None = None) -> None:
        self.config = config
        self.arithmetic = Arithmetic.of(dtype or config.dtype)
        self.processors = ExactProcessors(config.logits_processors, config.max_num_reqs)
        self.processor = RowProcessor(load_stages("cpu"), self.arithmetic, config.reasoning, self.processors)
        self.requests: dict[str, KnownRequest] = {}

    def observe(self, plan: SchedulerOutput) -> None:
        """A plan was given to the runner: requests leave and enter."""
        for req_id in plan.finished_req_ids | plan.preempted_req_ids:
            if self.requests.pop(req_id, None) is not None:
                self.processors.remove(req_id)
        for new in plan.scheduled_new_reqs:
            self.requests[new.req_id] = KnownRequest.admitted(new)
            self.processors.add(new)

    def take(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """These tokens entered the runner's state; those of a request that no plan brought are nobody's."""
        for req_id, taken in tokens.items():
            if req_id in self.requests:
                self.requests[req_id].tokens.extend(int(t) for t in taken)
        self.processors.take(tokens)

    def expected_at_most(self, req_ids: Sequence[str], num_rows: np.ndarray) -> float:
        """Near ties to be expected of so many rows (int[R]) of each request, without looking at their logits."""
        random = np.array([not self.requests[r].params.greedy for r in req_ids], bool)
        return TYPICAL_BOUND * self.arithmetic.unit * int(num_rows[random].sum())

    def draws(
        self, record: StepRecord, logits: np.ndarray, grammar: GrammarOutput | None = None
    ) -> list[list[ExactDraw]]:
        """The rows of a step by request: float[L, V] logits as the model gave them; between `observe` and `take`."""
        requests = [self.requests[r] for r in record.req_ids]
        rows = self.processor.process(record, logits, requests, grammar, self.config.num_speculative_tokens)
        random = np.array([not r.params.greedy for r in requests], bool)[rows.owner]
        noise: dict[int, Any] = {}
        if random.any():
            seeds = np.array([r.seed for r in requests], np.int64)[rows.owner][random]
            values = gumbel_noise(seeds, rows.positions[random], logits.shape[1], self.config.noise)
            noise = dict(zip(np.flatnonzero(random).tolist(), values, strict=True))
        result: list[list[ExactDraw]] = [[] for _ in requests]
        for i, owner in enumerate(rows.owner.tolist()):
            request = requests[owner]
            draw = exact_draw(rows, i, request, noise.get(i), self.arithmetic)
            trace = request.params.trace_decode_token_ids or ()
            index = int(rows.positions[i]) + 1 - request.prompt_len
            if 0 <= index < len(trace):
                draw = replace(draw, listed=trace[index])
            result[owner].append(draw)
        return result


def near_tie_cap(tokens: int, expected: float, max_rate: float | None = None) -> float:
    """The most near ties that are no fault. max_rate: per token, instead of what is to be expected."""
    return CAP_FACTOR * expected + CAP_SLACK if max_rate is None else max_rate * tokens


def near_ties_text(near_ties: int, tokens: int, expected: float, cap: float) -> str:
    """For one line of a report: the rate where there are any, and the cap where they are beyond it."""
    text = f"near_ties={near_ties}"
    if near_ties:
        text += f" (rate {near_ties / max(tokens, 1):.1e}, expected {expected / max(tokens, 1):.1e})"
    return text if near_ties <= cap else f"{text}: more than {cap:.3g}"
