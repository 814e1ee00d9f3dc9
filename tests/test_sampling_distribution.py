"""What is drawn follows the law that its parameters state: chi-square tests, each with a wrong law that is rejected.

Laws are computed here, in float64, from the meaning of each parameter. Seeds are fixed, so a test passes or fails for
good. A right sampler with other seeds would fail one test at a rate of ALPHA = 1e-6; by Bonferroni's bound the whole
file, MOST_TESTS tests at most, at a rate below 1e-4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cpu_reference.request_state import RequestState
from cpu_reference.sample.logits_rows import LogitsRows
from cpu_reference.sample.sampler import Sampler
from runner_api import NewRequestData, RunnerConfig, SamplingParams

ALPHA, MOST_TESTS = 1e-6, 100
NUM_DRAWS = 16_000
LEAST_EXPECTED = 5
X = np.array([0.4, -1.3, 2.0, 0.1, 1.5, -0.5, 0.7, -2.5, -0.2, 1.0, -1.8, -0.9])  # the logits; exact enough in float32
V = len(X)
PROMPT, OUTPUTS = (1, 2, 2), (3, 3, 5)  # of requests with a past
NOISES = ("murmur3", "philox")


# -- statistics -------------------------------------------------------------------------------------------------------


def chi_square_tail(x: float, df: int) -> float:
    """The probability that a chi-square variable with `df` degrees of freedom exceeds x; exact for integers df.

    Q(a + 1, h) = Q(a, h) + h^a e^-h / Gamma(a + 1) with a = df / 2, h = x / 2.
    """
    h, a = x / 2, 0.5 if df % 2 else 1.0
    if h == 0:
        return 1.0
    tail = math.erfc(math.sqrt(h)) if df % 2 else math.exp(-h)
    while a < df / 2:
        tail += math.exp(a * math.log(h) - h - math.lgamma(a + 1))
        a += 1
    return min(tail, 1.0)


def p_value(tokens: np.ndarray, law: np.ndarray) -> float:
    """How likely counts at least this far from the law are; 0 if a token was drawn that the law excludes.

    The rarest tokens share a bin until each bin is expected to hold at least LEAST_EXPECTED draws.
    """
    law = law / law.sum()
    counts = np.bincount(tokens, minlength=len(law))
    if counts[law == 0].any():
        return 0.0
    order = np.argsort(law)[np.count_nonzero(law == 0) :]
    expected, observed = (law * len(tokens))[order].tolist(), counts[order].tolist()
    while len(expected) > 1 and expected[0] < LEAST_EXPECTED:
        rarest = expected.pop(0), observed.pop(0)
        expected[0], observed[0] = expected[0] + rarest[0], observed[0] + rarest[1]
    if len(expected) == 1:
        return 1.0
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return chi_square_tail(statistic, len(expected) - 1)


def follows(tokens: np.ndarray, law: np.ndarray) -> None:
    p = p_value(tokens, law)
    counts = np.bincount(tokens, minlength=len(law))
    assert p >= ALPHA, f"p = {p:.3g}: {counts} drawn where {law / law.sum() * len(tokens)} are expected"


def does_not_follow(tokens: np.ndarray, wrong: np.ndarray) -> None:
    p = p_value(tokens, wrong)
    assert p < ALPHA, f"p = {p:.3g}: too few draws to tell the wrong law from the right one"


@pytest.mark.parametrize(
    ("x", "df", "tail"),  # from published tables
    [
        (3.841459, 1, 0.05), (5.991465, 2, 0.05), (18.307038, 10, 0.05), (19.675138, 11, 0.05), (24.724970, 11, 0.01),
        (124.342113, 100, 0.05), (23.928127, 1, 1e-6), (27.631021, 2, 1e-6),
    ],
)  # fmt: skip
def test_the_tail_of_chi_square(x: float, df: int, tail: float) -> None:
    assert chi_square_tail(x, df) == pytest.approx(tail, rel=1e-5)


def test_a_p_value_is_uniform_and_bins_are_pooled() -> None:
    random, law = np.random.default_rng(5), softmax(2 * X)
    p = np.sort([p_value(random.choice(V, 500, p=law), law) for _ in range(400)])
    assert np.abs(p - (np.arange(400) + 0.5) / 400).max() < 1.95 / math.sqrt(400)  # Kolmogorov's bound at 0.001
    assert p_value(np.array([0, 1]), np.array([0.5, 0.5])) == 1.0
    assert p_value(np.array([2]), np.array([0.5, 0.5, 0.0])) == 0.0


# -- laws -------------------------------------------------------------------------------------------------------------


def softmax(x: np.ndarray) -> np.ndarray:
    weight = np.exp(x - x.max())
    return weight / weight.sum()


def among(kept: Any, x: np.ndarray = X) -> np.ndarray:
    """The law where these tokens alone are left."""
    left = np.full(V, -np.inf)
    left[list(kept)] = x[list(kept)]
    return softmax(left)


def best(k: int, x: np.ndarray = X) -> list[int]:
    return np.argsort(-x, kind="stable")[:k].tolist()


def nucleus(p: float, x: np.ndarray = X) -> list[int]:
    """The fewest most likely tokens that have a probability of p together."""
    law, kept = softmax(x), []
    for token in best(V, x):
        kept.append(token)
        if law[kept].sum() >= p:
            break
    return kept


def lost_mass_to_the_best(kept: list[int]) -> np.ndarray:
    law = np.where(np.isin(np.arange(V), kept), softmax(X), 0)
    law[X.argmax()] += 1 - law.sum()
    return law


def plus(change: dict[int, float], x: np.ndarray = X) -> np.ndarray:
    changed = x.copy()
    for token, value in change.items():
        changed[token] += value
    return changed


def times(tokens: Any, factor: float, otherwise: float) -> np.ndarray:
    changed = X.copy()
    for token in tokens:
        changed[token] *= factor if X[token] > 0 else otherwise
    return changed


@dataclass(frozen=True)
class Case:
    """What a request asks for, the law that follows, and a law that does not. past: it depends on earlier tokens."""

    name: str
    params: dict[str, Any]
    law: np.ndarray
    wrong: np.ndarray
    past: bool = False
    eos: tuple[int, ...] = ()


def without(*tokens: int) -> list[int]:
    return [v for v in range(V) if v not in tokens]


class Boost:
    """A custom processor: adds a number to the logit of one token."""

    arguments = ("boost",)

    def __init__(self, *args: Any) -> None:
        self.boost: dict[int, float] = {}

    def add_request(self, row: int, params: SamplingParams, prompt: Any, outputs: Any) -> bool:
        self.boost[row] = (params.extra_args or {}).get("boost", 0.0)
        return self.boost[row] != 0

    def apply(self, logits: Any, context: Any) -> None:
        logits[:, 3] += np.array([self.boost[int(row)] for row in context.rows])

    def ignore(self, *args: Any) -> None:
        pass

    validate = remove_request = move_rows = observe = ignore


NUCLEUS_OF_5 = [best(5)[i] for i in range(5) if softmax(X[best(5)])[:i].sum() < 0.8]  # of the 5 best, renormalised
SEEN, USED = {*PROMPT, *OUTPUTS}, {3: 2, 5: 1}
CASES = [
    Case("nothing", {}, softmax(X), softmax(X / 1.08)),
    Case("temperature", {"temperature": 0.7}, softmax(X / 0.7), softmax(X / 0.75)),
    Case("hot", {"temperature": 1.9}, softmax(X / 1.9), softmax(X / 2.2)),
    Case("top_k", {"top_k": 5}, among(best(5)), lost_mass_to_the_best(best(5))),
    Case("top_p", {"top_p": 0.8}, among(nucleus(0.8)), lost_mass_to_the_best(nucleus(0.8))),
    Case("top_p cut short", {"top_p": 0.8}, among(nucleus(0.8)), among(nucleus(0.8)[:-1])),
    Case("top_k and top_p", {"top_k": 5, "top_p": 0.8}, among(NUCLEUS_OF_5), among(set(best(5)) & {*nucleus(0.8)})),
    Case("min_p", {"min_p": 0.2}, among(np.flatnonzero(softmax(X) >= 0.2 * softmax(X).max())),
         lost_mass_to_the_best(np.flatnonzero(softmax(X) >= 0.2 * softmax(X).max()).tolist())),
    Case("min_p before temperature", {"min_p": 0.2, "temperature": 0.5},
         among(np.flatnonzero(softmax(X / 0.5) >= 0.2 * softmax(X / 0.5).max()), X / 0.5),
         among(np.flatnonzero(softmax(X) >= 0.2 * softmax(X).max()), X / 0.5)),
    Case("bias", {"logit_bias": {2: -1.0, 7: 2.5}, "temperature": 0.7}, softmax(plus({2: -1.0, 7: 2.5}) / 0.7),
         softmax(plus({2: -1.0, 7: 2.5}, X / 0.7))),
    Case("allowed", {"allowed_token_ids": [0, 4, 7, 11]}, among([0, 4, 7, 11]), np.bincount([0, 4, 7, 11]) / 4),
    Case("custom", {"extra_args": {"boost": 1.5}}, softmax(plus({3: 1.5})), softmax(plus({3: 1.7}))),
    Case("presence", {"presence_penalty": 0.9}, softmax(plus({3: -0.9, 5: -0.9})), softmax(plus({3: -1.8, 5: -0.9})),
         past=True),
    Case("frequency", {"frequency_penalty": 0.9}, softmax(plus({3: -1.8, 5: -0.9})),
         softmax(plus({1: -0.9, 2: -1.8, 3: -1.8, 5: -0.9})), past=True),
    Case("repetition", {"repetition_penalty": 1.6}, softmax(times(SEEN, 1 / 1.6, 1.6)),
         softmax(times(SEEN, 1 / 1.6, 1 / 1.6)), past=True),
    Case("repetition of outputs", {"repetition_penalty": 1.6}, softmax(times(SEEN, 1 / 1.6, 1.6)),
         softmax(times(OUTPUTS, 1 / 1.6, 1.6)), past=True),
    Case("all penalties", {"repetition_penalty": 0.5, "frequency_penalty": -0.4, "presence_penalty": 1.0},
         softmax(plus({3: 0.8 - 1.0, 5: 0.4 - 1.0}, times(SEEN, 2, 0.5))),
         softmax(np.where(plus({3: 0.8 - 1.0, 5: 0.4 - 1.0}) > 0, 2, 0.5) * plus({3: 0.8 - 1.0, 5: 0.4 - 1.0})),
         past=True),
    Case("too short", {"min_tokens": 4, "stop_token_ids": [0, 4]}, among(without(0, 4, 6)), among(without(0, 4)),
         past=True, eos=(6,)),
    Case("long enough", {"min_tokens": 3, "stop_token_ids": [0, 4]}, softmax(X), among(without(0, 4, 6)),
         past=True, eos=(6,)),
    Case("bad words", {"bad_words_token_ids": [[9], [3, 5, 4], [3, 3, 0], [2, 3, 3, 5, 6]]}, among(without(9, 4)),
         among(without(9, 4, 6)), past=True),
]  # fmt: skip


# -- draws ------------------------------------------------------------------------------------------------------------


def spread(n: int) -> np.ndarray:
    """n seeds from all of int64, 0 and neighbours among them."""
    wild = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, n)
    return np.where(np.arange(n) % 2 == 0, np.arange(n) - 4, wild)


def cpu_sampler(case: Case, noise: str, num_reqs: int) -> tuple[Sampler, RequestState]:
    """A sampler that holds `num_reqs` equal requests, in rows 0, 1, …"""
    config = RunnerConfig(max_num_reqs=num_reqs, max_model_len=16, noise=noise, logits_processors=(Boost,))
    states = RequestState(num_reqs, 16, 0, range(num_reqs - 1, -1, -1))
    sampler = Sampler(config, V, states)
    params = SamplingParams(**{"temperature": 1.0, **case.params})
    for row in range(num_reqs):
        new = NewRequestData(str(row), PROMPT, PROMPT + OUTPUTS, 0, ([1],), params, eos_token_ids=case.eos)
        assert states.add_request(new.req_id, new.prompt_len, new.prefill_token_ids, 0) == row
        sampler.add_request(row, new)
    states.apply_staged_writes()
    sampler.apply_staged_writes()
    return sampler, states


def draw(sampler: Any, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    n = len(rows)
    last = np.full(n, OUTPUTS[-1], np.int32)
    drawn = sampler.sample(np.tile(X, (n, 1)), LogitsRows(n, rows, np.zeros(n, np.int32), positions, last, rows))
    assert not drawn.faults.any()
    return drawn.sampled


def over_positions(case: Case, noise: str, positions: np.ndarray | None = None) -> np.ndarray:
    """One request, one seed, NUM_DRAWS places. (Parameters that look at the past need the place that is theirs.)"""
    sampler, _ = cpu_sampler(case, noise, 1)
    sampler.seeds[:] = 42
    positions = np.arange(NUM_DRAWS) if positions is None else positions
    return draw(sampler, np.zeros(len(positions), np.int64), positions)


def over_seeds(case: Case, noise: str, seeds: np.ndarray | None = None, position: int | None = None) -> np.ndarray:
    """Requests that differ by their seeds, at one place: the end of their past."""
    seeds = spread(NUM_DRAWS) if seeds is None else seeds
    num_reqs, tokens = NUM_DRAWS // 16, []
    sampler, _ = cpu_sampler(case, noise, num_reqs)
    place = len(PROMPT) + len(OUTPUTS) - 1 if position is None else position
    for part in np.split(seeds, len(seeds) // num_reqs):
        sampler.seeds[:] = part
        tokens.append(draw(sampler, np.arange(num_reqs), np.full(num_reqs, place)))
    return np.concatenate(tokens)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_over_seeds(case: Case, noise: str) -> None:
    tokens = over_seeds(case, noise)
    follows(tokens, case.law)
    does_not_follow(tokens, case.wrong)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("case", [c for c in CASES if not c.past], ids=lambda c: c.name)
def test_over_positions(case: Case, noise: str) -> None:
    tokens = over_positions(case, noise)
    follows(tokens, case.law)
    does_not_follow(tokens, case.wrong)


# -- independence -----------------------------------------------------------------------------------------------------

PLAIN = Case("few tokens", {"top_k": 6}, among(best(6)), np.ones(V) / V)
PAIR_LAW = np.outer(PLAIN.law, PLAIN.law).reshape(-1)


def pairs(tokens: np.ndarray) -> np.ndarray:
    """Draws 0 and 1, 2 and 3, … as one outcome each: no draw in two pairs, so that pairs are independent too."""
    return tokens[::2] * V + tokens[1::2]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("stride", [1, 2**16, 2**31 - 1], ids=["adjacent", "far", "farthest"])
def test_places_are_independent(noise: str, stride: int) -> None:
    """A request's draws at place p and p + stride, p even."""
    first = np.arange(0, NUM_DRAWS, 2)
    positions = np.stack([first, first + stride], axis=1).reshape(-1)
    follows(pairs(over_positions(PLAIN, noise, positions)), PAIR_LAW)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("stride", [1, 2**32, 2**63 - 1], ids=["adjacent", "high word", "farthest"])
def test_seeds_are_independent(noise: str, stride: int) -> None:
    """Two requests at one place, of seeds s and s + stride, s even."""
    first = np.arange(0, NUM_DRAWS, 2)
    with np.errstate(over="ignore"):
        seeds = np.stack([first, first + np.int64(stride)], axis=1).reshape(-1)
    follows(pairs(over_seeds(PLAIN, noise, seeds, 7)), PAIR_LAW)


@pytest.mark.parametrize("noise", NOISES)
def test_shared_noise_is_noticed(noise: str) -> None:
    """The negative controls of both: pairs that share a place, or a seed, draw the same token."""
    halved = np.arange(NUM_DRAWS) // 2
    does_not_follow(pairs(over_positions(PLAIN, noise, halved)), PAIR_LAW)
    does_not_follow(pairs(over_seeds(PLAIN, noise, halved, 7)), PAIR_LAW)


# -- the gpu sampler --------------------------------------------------------------------------------------------------

GPU_CASES = [c for c in CASES if c.name in ("temperature", "top_k and top_p")]
NUM_INTERPRETED = 6000


@pytest.mark.interpret
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda c: c.name)
def test_over_positions_on_gpu(case: Case) -> None:
    """One request, one seed, many places, with the noise of murmur3; laws as above."""
    pytest.importorskip("gpu_backend.triton_support")
    import torch

    from gpu_backend.packed_copy import PackedCopy
    from gpu_backend.request_state import RequestState
    from gpu_backend.sample.logits_rows import LogitsRows
    from gpu_backend.sample.sampler import Sampler

    n, device = NUM_INTERPRETED, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = RunnerConfig(max_num_reqs=1, max_model_len=16)
    states = RequestState(1, 16, 0, [0], device)
    sampler = Sampler(config, V, states, device)
    packed = PackedCopy({**states.host_tables(), **sampler.host_tables()}, 4096, device)
    for part in (states, sampler):
        part.bind(packed)
    new = NewRequestData("0", PROMPT, PROMPT, 0, ([1],), SamplingParams(**{"temperature": 1.0, **case.params}), 42)
    sampler.add_request(states.add_request("0", new.prompt_len, new.prefill_token_ids, 0), new)
    for part in (states, sampler):
        part.pack(packed)
    packed.send()
    for part in (states, sampler):
        part.apply_staged_writes(packed)
    zeros = torch.zeros(n, dtype=torch.int32, device=device)
    rows = LogitsRows(n, zeros.long(), zeros, torch.arange(n, device=device), zeros, np.array([0]), np.array([n]))
    drawn = sampler.sample(torch.tensor(X, dtype=torch.float32, device=device).repeat(n, 1), rows)
    assert not drawn.faults.any()
    tokens = drawn.sampled.cpu().numpy()
    follows(tokens, case.law)
    does_not_follow(tokens, case.wrong if case.name != "temperature" else softmax(X / 0.8))


def test_the_bound_on_false_alarms_counts_every_test() -> None:
    free = sum(not c.past for c in CASES)
    assert len(NOISES) * (len(CASES) + free + 3 + 3) + len(GPU_CASES) <= MOST_TESTS
    assert ALPHA * MOST_TESTS <= 1e-4
