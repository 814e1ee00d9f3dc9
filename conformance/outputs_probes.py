"""Clauses that hold a runner to what its outputs say, for those that keep no record: one capability each.

Requests on the witness model, whose logits are exact, ask for one thing each; their tokens and log probabilities must
be those of the `cpu` runner. Where the noise of the judged runner is of neither known scheme, draws that hang on it are
left out: what is left is certain under any noise, such as `top_k` 1 or a temperature near zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from conformance.context import Mismatch
from conformance.harness import info_of
from conformance.metamorphic.judge import ONE_GROUP, VOCAB, Played, Stage, same_token, stage_of
from conformance.metamorphic.player import Token
from conformance.metamorphic.story import Ask, Story
from conformance.noise import SCHEMES
from conformance.probe import probe
from conformance.truth import witness_logits
from runner_api import Capability, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from conformance.probes import Bench

Found = dict[str, list[Mismatch]]
NUM_OUTPUTS = 6
TEMPERATURE = "MR-OUT-005"
FORM = StructuredOutputsParams(regex="a*")


@dataclass(frozen=True, slots=True)
class Wish:
    """One request. noisy: its tokens hang on the noise."""

    clause_id: str
    capability: Capability
    ask: Ask
    noisy: bool

    def servable(self, offered: frozenset[Capability]) -> bool:
        return self.ask.params.required_capabilities() | {self.capability} <= offered


def _prompt(seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, 9]).integers(0, VOCAB, 5).tolist())


# A greedy request behind the first one says two tokens twice; behind the other one it says one of the prompt.
REPEATING, ECHOING = _prompt(6), _prompt(9)
# Behind this one the best logit leads by 0.4 and more: at temperature 0.01 that outweighs any noise of 32 bits.
CALM = _prompt(1424)


def _ranked(prompt: Sequence[int]) -> list[int]:
    """Tokens by their logits behind a prompt, the best first."""
    order: list[int] = np.argsort(-witness_logits(ONE_GROUP, [prompt])[0], kind="stable").tolist()
    return order


def _stops() -> tuple[int, ...]:
    """What a greedy request would say first, second, third and fourth, each time kept from it."""
    stops, said = list[int](), list(REPEATING)
    for _ in range(4):
        ranked = _ranked(said)
        if ranked[0] not in said:  # what it has said before was no stop
            stops.append(ranked[0])
        said.append(next(v for v in ranked if v not in stops))
    return tuple(dict.fromkeys(stops))


@cache
def wishes() -> tuple[Wish, ...]:
    """Every request; for each clause at least one whose tokens no noise can change."""
    c, best = Capability, _ranked(REPEATING)
    # without its first choice it would begin with the second one, and go on with what is best behind that
    words = ((best[0],), (best[1], _ranked((*REPEATING, best[1]))[0]))
    # clause, prompt, temperature, what else it asks for, whether noise decides
    table: tuple[tuple[int, Capability, tuple[int, ...], float, Mapping[str, Any], bool], ...] = (
        (5, c.SEEDED_SAMPLING, CALM, 0.01, {}, False),
        (5, c.SEEDED_SAMPLING, CALM, 1.0, {}, True),
        (5, c.SEEDED_SAMPLING, CALM, 2.0, {}, True),
        (6, c.TOP_K, REPEATING, 2.0, {"top_k": 1}, False),
        (6, c.TOP_K, REPEATING, 2.0, {"top_k": 3}, True),
        (7, c.TOP_P, REPEATING, 2.0, {"top_p": 1e-6}, False),
        (7, c.TOP_P, REPEATING, 2.0, {"top_p": 0.6}, True),
        (8, c.MIN_P, REPEATING, 2.0, {"min_p": 1.0}, False),
        (8, c.MIN_P, REPEATING, 2.0, {"min_p": 0.5}, True),
        (9, c.PENALTIES, REPEATING, 0.0, {"presence_penalty": 2.0}, False),
        (9, c.PENALTIES, REPEATING, 0.0, {"frequency_penalty": 2.0}, False),
        (9, c.PENALTIES, ECHOING, 0.0, {"repetition_penalty": 2.0}, False),
        (10, c.LOGIT_BIAS, REPEATING, 0.0, {"logit_bias": {best[9]: 100.0}}, False),
        (10, c.LOGIT_BIAS, REPEATING, 0.0, {"logit_bias": {best[0]: -3.0, 7: 2.5}}, False),
        (11, c.ALLOWED_TOKEN_IDS, REPEATING, 0.0, {"allowed_token_ids": (best[5], best[3], 63)}, False),
        (12, c.MIN_TOKENS, REPEATING, 0.0, {"min_tokens": 3, "stop_token_ids": _stops()}, False),
        (13, c.BAD_WORDS, REPEATING, 0.0, {"bad_words_token_ids": words}, False),
        (14, c.GRAMMAR, REPEATING, 0.0, {"structured_outputs": FORM}, False),
        (14, c.GRAMMAR, ECHOING, 0.0, {"structured_outputs": FORM}, False),
        (15, c.LOGPROBS, REPEATING, 0.0, {"logprobs": 3}, False),
        (15, c.LOGPROBS, REPEATING, 0.0, {"logprob_token_ids": (49, 5, 0)}, False),
        (15, c.LOGPROBS, REPEATING, 2.0, {"logprobs": 0}, True),
    )  # fmt: skip
    found = []
    for n, (number, capability, prompt, temperature, asks, noisy) in enumerate(table):
        ask = Ask(f"w{n}", prompt, SamplingParams(temperature=temperature, **asks), 101 * n - 999, 0, NUM_OUTPUTS)
        found.append(Wish(f"MR-OUT-{number:03}", capability, ask, noisy))
    return tuple(found)


@probe("OUT-005..OUT-015", Capability.GENERATE)
def outputs_are_the_references(bench: Bench) -> Found:
    """All requests that can be served, in one batch, beside the `cpu` runner."""
    asked = [wish for wish in wishes() if wish.servable(bench.capabilities)]
    if not asked:
        return {}
    noise = info_of(bench.runner).noise
    known = noise in SCHEMES
    ids = frozenset(wish.ask.req_id for wish in asked)
    played = _play(_stage(bench), ids)
    wanted = references_tokens(ids, noise if known else SCHEMES[0])
    found: Found = {wish.clause_id: [] for wish in asked}
    for wish in asked:
        req_id = wish.ask.req_id
        if known or not wish.noisy:
            found[wish.clause_id] += _first_difference(wish, played[req_id], wanted[req_id])
        elif wish.clause_id == TEMPERATURE:
            found[TEMPERATURE] += _never_hot(wish, played)
    return found


@cache
def references_tokens(ids: frozenset[str], noise: str) -> Played:
    """What the `cpu` runner draws of these requests."""
    reference = stage_of("cpu", frozenset(Capability), ONE_GROUP, 0, {"layout": "slots", "noise": noise})
    return _play(reference, ids)


def _stage(bench: Bench) -> Stage:
    return stage_of(bench.runner, bench.capabilities, ONE_GROUP, 0, {})


def _play(stage: Stage, ids: frozenset[str]) -> Played:
    asks = tuple(wish.ask for wish in wishes() if wish.ask.req_id in ids)
    return replace(stage, story=Story(asks, (), stage.story.unit, 16)).play(asks)[0]


def _first_difference(wish: Wish, played: Sequence[Token], wanted: Sequence[Token]) -> list[Mismatch]:
    pairs = enumerate(zip(played, wanted, strict=True))
    wrong = next(((k, got, want) for k, (got, want) in pairs if not same_token(got, want)), None)
    if wrong is None:
        return []
    k, got, want = wrong
    if got.token != want.token:
        return [Mismatch(wish.clause_id, _told("tokens", wish), wish.ask.req_id, (k,), got.token, want.token)]
    name = _told("ids, log probabilities and rank", wish)
    return [Mismatch(wish.clause_id, name, wish.ask.req_id, (k,), got.scores, want.scores)]


def _never_hot(wish: Wish, played: Played) -> list[Mismatch]:
    """Under a noise that nobody knows, hot draws must be others than cold ones somewhere."""
    cold = next(other for other in wishes() if other.clause_id == TEMPERATURE and not other.noisy)
    hot_tokens, cold_tokens = ([t.token for t in played[w.ask.req_id]] for w in (wish, cold))
    if hot_tokens != cold_tokens:
        return []
    name = _told("tokens", wish)
    return [Mismatch(TEMPERATURE, name, wish.ask.req_id, (), hot_tokens, "others than near temperature 0")]


def _told(what: str, wish: Wish) -> str:
    """With what makes the request differ from a plain one."""
    params, plain = wish.ask.params.to_dict(), SamplingParams().to_dict()
    asked = ", ".join(f"{k}={v}" for k, v in params.items() if v != plain[k])
    return f"{what} with {asked[:60]}"
