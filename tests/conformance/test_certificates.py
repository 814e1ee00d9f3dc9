"""The bounds of certificates hold, are not wider than they must be, and excuse no fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from conformance.certificates import DIVERGENCE, EQUAL, NEAR_TIE, Certifier, ExactDraw, exact_draw, near_tie_cap
from conformance.exact_rows import Arithmetic, ExactRows, KnownRequest, RowProcessor
from conformance.keep_sets import KeepSets
from conformance.noise import SCHEMES, gumbel_noise, murmur3, philox, uniforms
from runner_api import (
    GrammarOutput,
    NewRequestData,
    ReasoningConfig,
    RunnerConfig,
    SampleFault,
    SamplingParams,
    SchedulerOutput,
    StageSet,
    StepRecord,
    load_stages,
)

FLOAT32, FLOAT64 = Arithmetic.of("float32"), Arithmetic.of("float64")
F = np.float32


def step_of(requests: list[KnownRequest], drafts: list[list[int]] | None = None) -> StepRecord:
    """A decode step of these requests, with drafts or without."""
    drafts = drafts or [[] for _ in requests]
    ids = [[r.tokens[-1], *d] for r, d in zip(requests, drafts, strict=True)]
    cu = np.cumsum([0, *map(len, ids)]).astype(np.int32)
    positions = [len(r.tokens) - 1 + j for r, row in zip(requests, ids, strict=True) for j in range(len(row))]
    return StepRecord(
        SchedulerOutput(), len(requests), req_ids=tuple(str(i) for i in range(len(requests))),
        input_ids=np.concatenate(ids).astype(np.int32), positions=np.array(positions), cu_num_logits=cu,
        logits_indices=np.arange(cu[-1]), num_sampled=np.ones(len(requests), np.int32),
    )  # fmt: skip


def request(random: np.random.Generator, vocab_size: int, **params: Any) -> KnownRequest:
    prompt, outputs = (random.integers(0, vocab_size, n).tolist() for n in random.integers(1, 60, 2))
    return KnownRequest(
        SamplingParams(max_tokens=None, **params),
        int(random.integers(-(2**63), 2**63 - 1)),
        len(prompt),
        prompt + outputs,
        (2,),
    )


def process(requests: list[KnownRequest], logits: np.ndarray, stages: StageSet | None = None) -> ExactRows:
    processor = RowProcessor(stages or load_stages("cpu"), FLOAT32)
    return processor.process(step_of(requests), logits, requests)


# -- the noise ------------------------------------------------------------------------------------------------


def test_words_and_uniforms_are_those_of_the_definition() -> None:
    seed, position, token = (np.array([x], np.int64).view(np.uint64) for x in (123456789012345678, 1000, 151935))
    assert hex(murmur3(seed, position, token)[0]) == "0x44762489"
    assert hex(philox(np.array([-1], np.int64).view(np.uint64), np.uint64([0]))[0]) == "0x72a47709"
    assert hex(philox(np.uint64([42]), np.uint64([2**32 + 7]))[0]) == "0x5b263f6"
    words = np.uint64([0, 1, 0x3FFFFFFF, 0x40000000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF])
    bits = [0x2FFFFFFF, 0x2FFFFFFF, 0x3EFFFFFF, 0x3EFFFFFF, 0x3F7FFFFF, 0x3F7FFFFF, 0x2FFFFFFF, 0x2FFFFFFF]
    assert uniforms(words, "philox").view(np.uint32).tolist() == bits
    assert uniforms(np.uint64([0xFFFFFFD5, 9]), "murmur3").view(np.uint32).tolist() == [0x3F800000, 0x31180000]


def test_noise_is_that_of_the_definition() -> None:
    noise = gumbel_noise(np.int64([42, -1, 7]), np.int64([7, 0, 29]), 31, "murmur3")
    np.testing.assert_allclose(noise[0, :2], [0.675299818, 0.298964832], atol=5e-10)
    assert noise[1, 0] == pytest.approx(1.282568268, abs=5e-10)
    assert gumbel_noise(np.int64([7]), np.int64([29]), 148239, "murmur3")[0, -1] == pytest.approx(-2.8115408, abs=2e-7)


def float32_noise(words: np.ndarray, scheme: str, limit: float, terms: int) -> np.ndarray:
    """As a float32 program computes it: a series for -log(1 - u) below `limit`, logarithms elsewhere."""
    u = uniforms(words, scheme)
    series = np.zeros_like(u)
    for k in range(terms, 0, -1):
        series = series * u + F(1 / k)
    exact = -np.log(np.maximum(F(1) - u, F(2.0**-24)))
    return -np.log(np.where(u < F(limit), series * u, exact))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("limit", "terms"), [(0.125, 8), (0.25, 8)])
def test_the_bound_of_the_noise(scheme: str, limit: float, terms: int) -> None:
    """At most 20 times the largest error of a float32 program, at every size of noise."""
    random = np.random.default_rng(0)
    words = np.concatenate([random.integers(0, 2**32, 100_000), random.integers(0, 2**16, 5_000)]).astype(np.uint64)
    u = uniforms(words, scheme).astype(np.float64)
    exact = -np.log(-np.log1p(-np.minimum(u, 1.0 - 2.0**-24)))
    error = np.abs(float32_noise(words, scheme, limit, terms) - exact)
    bound = FLOAT32.noise_error(exact)
    assert (error <= bound).all()
    for low, high in ((-3, -1), (-1, 1), (1, 1.246), (1.2461, 2), (2, 4), (4, 10), (10, 30)):
        inside = (exact >= low) & (exact < high)
        assert 20 * error[inside].max() >= bound[inside].max(), (low, error[inside].max(), bound[inside].max())


# -- the steps ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InFloat32(StageSet):
    """The same stages on float32 logits; `divide`: how the temperature is applied."""

    divide: str = "/"

    def run(self, name: str, **arrays: Any) -> dict[str, np.ndarray]:
        x = arrays["logits"].astype(F)
        if name == "apply_temperature" and self.divide == "reciprocal":
            t = arrays["temperature"][arrays["expanded_idx_mapping"]]
            return {"logits": x * np.where(t == 0, F(1), F(1) / np.where(t == 0, F(1), t))[:, None]}
        # The dataclass has slots, so that super() without arguments finds no class.
        return StageSet.run(self, name, **(arrays | {"logits": x}))


STEPS: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "temperature": lambda r: {"temperature": float(r.choice([0.01, 0.1, 0.7, 1.3, 2.0]))},
    "bias": lambda r: {"temperature": 1.0, "logit_bias": {v: float(r.normal() * 20) for v in range(0, 300, 7)}},
    "repetition": lambda r: {"temperature": 1.0, "repetition_penalty": float(r.uniform(0.3, 3))},
    "frequency": lambda r: {"temperature": 1.0, "frequency_penalty": float(r.uniform(-2, 2))},
    "presence": lambda r: {"temperature": 1.0, "presence_penalty": float(r.uniform(-2, 2))},
    "greedy": lambda r: {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": float(r.uniform(-2, 2))},
    "all": lambda r: {
        "temperature": float(r.choice([0.01, 0.3, 0.9, 1.7])), "repetition_penalty": float(r.uniform(0.5, 2)),
        "frequency_penalty": float(r.uniform(-2, 2)), "presence_penalty": float(r.uniform(-2, 2)),
        "logit_bias": {int(v): float(r.normal() * 5) for v in r.integers(0, 300, 9)}, "min_tokens": 15,
        "allowed_token_ids": tuple(range(0, 300, 2)), "bad_words_token_ids": ((4,), (6,)),
    },
}  # fmt: skip


@pytest.mark.parametrize("divide", ["/", "reciprocal"])
@pytest.mark.parametrize("name", STEPS)
def test_the_bound_of_the_steps(name: str, divide: str) -> None:
    """What float32 makes of 200 rows lies within the bound, and somewhere at a twentieth of it or more."""
    random = np.random.default_rng(1)
    cpu = load_stages("cpu")
    worst = 0.0
    for _ in range(10):
        requests = [request(random, 300, **STEPS[name](random)) for _ in range(20)]
        logits = (random.normal(size=(20, 300)) * random.choice([0.1, 3, 30], (20, 1))).astype(F)
        exact = process(requests, logits)
        got = process(requests, logits, InFloat32(cpu.backend, cpu.stages, divide=divide)).x.astype(np.float64)
        touched = exact.error > 0
        assert (got == exact.x)[~touched].all()
        share = np.abs(got[touched] - exact.x[touched]) / exact.error[touched]
        assert (share <= 1).all()
        worst = max(worst, float(share.max()))
    assert worst >= 1 / 20


def test_steps_that_drop_tokens_round_nothing() -> None:
    random = np.random.default_rng(2)
    lists = {"allowed_token_ids": (1, 2, 3, 9), "min_tokens": 99, "bad_words_token_ids": ((3,),)}
    known = request(random, 20, temperature=1.0, top_k=2, min_p=0.1, **lists)
    rows = process([known], random.normal(size=(1, 20)).astype(F))
    assert np.flatnonzero(rows.x[0] > -np.inf).tolist() == [1, 9], "2 is the stop token"
    assert not rows.error.any()
    assert (rows.x[rows.x > -np.inf] == rows.raw[rows.x > -np.inf]).all()


def test_penalties_at_low_temperature_are_off_by_more_than_their_own_size() -> None:
    """x = 10 and 10 tokens at a frequency penalty of 1: almost 0 is left, and the temperature blows up its error.

    A bound that leaves the temperature out of the penalties' share calls a right float32 runner wrong.
    """
    outputs = [5] * 10
    penalised = KnownRequest(SamplingParams(temperature=0.01, frequency_penalty=1.1), 0, 1, [1, *outputs])
    logits = np.zeros((1, 16), F)
    logits[0, 5] = 11.0
    cpu = load_stages("cpu")
    exact = process([penalised], logits)
    got = process([penalised], logits, InFloat32(cpu.backend, cpu.stages)).x
    error = abs(float(got[0, 5]) - exact.x[0, 5])
    without = 2.0**-22 * (abs(exact.x[0, 5]) + 11 + abs(exact.x[0, 5]))
    assert without < error <= exact.error[0, 5]


def test_what_float32_cannot_hold_is_infinite() -> None:
    huge = KnownRequest(SamplingParams(temperature=0.01), 0, 1, [1])
    rows = process([huge], np.array([[3e37, -3e37, 1.0, -np.inf]], F))
    assert rows.x[0].tolist() == [np.inf, -np.inf, pytest.approx(100.0), -np.inf]
    assert (rows.error[0] > 0).tolist() == [False, False, True, False]


def test_drafts_grammars_and_thinking_are_seen() -> None:
    """Rows behind drafts count them; a mask belongs to a request by id and to its rows in order."""
    a = KnownRequest(SamplingParams(temperature=0.0, presence_penalty=2.0), 0, 1, [1, 2])
    b = KnownRequest(SamplingParams(temperature=0.0, thinking_token_budget=1), 0, 2, [7, 8, 9])
    processor = RowProcessor(load_stages("cpu"), FLOAT32, ReasoningConfig((8,), (4, 5)))
    record = step_of([a, b], [[3, 6], []])
    mask = np.full((2 * 3, 1), -1, np.int32)
    mask[3:6, 0] = [0b11111111, 0b1000, -1]  # "0" comes second in the mask's order
    grammar = GrammarOutput(["1", "0"], mask)
    rows = processor.process(record, np.ones((4, 10), F), [a, b], grammar, num_speculative_tokens=2)
    assert rows.x[0].tolist() == [1, 1, -1, 1, 1, 1, 1, 1, -np.inf, -np.inf]
    assert np.flatnonzero(rows.x[1] > -np.inf).tolist() == [3]
    assert rows.x[1, 3] == -1, "the first draft was said before the second row"
    assert np.flatnonzero(rows.x[2] < 1).tolist() == [2, 3, 6]
    assert rows.x[3].argmax() == 4
    assert rows.x[3, 4] == 1e9
    assert rows.owner.tolist() == [0, 0, 0, 1]


# -- verdicts -------------------------------------------------------------------------------------------------


def draw_of(scores: list[float], bounds: list[float], possible: list[int] | None = None) -> ExactDraw:
    x = np.array(scores)
    some = np.ones(len(x), bool) if possible is None else np.isin(np.arange(len(x)), possible)
    return ExactDraw(x, np.array(bounds), KeepSets(some, some, some), SampleFault.NONE)


def test_a_margin_within_the_bound_is_a_near_tie() -> None:
    draw = draw_of([1.0, 3.0, 2.9, 0.0], [0.01, 0.06, 0.05, 9.0])
    assert draw.winner == 1
    assert [draw.certify(t).verdict for t in range(4)] == [DIVERGENCE, EQUAL, NEAR_TIE, NEAR_TIE]
    near = draw.certify(2)
    assert (near.margin, near.bound) == (pytest.approx(0.1), pytest.approx(0.11))
    assert draw.certify(1).expected == pytest.approx(0.11)
    assert str(draw.certify(0)) == "token 0, winner 1: margin 2, bound 0.07"


NO_TOKEN, LEFT_OUT = "it is no token of the vocabulary", "the request's own parameters leave it out"


@pytest.mark.parametrize(("token", "why"), [(-1, NO_TOKEN), (4, NO_TOKEN), (3, LEFT_OUT)])
def test_what_cannot_be_drawn_is_no_near_tie(token: int, why: str) -> None:
    draw = draw_of([1.0, 3.0, 3.0, 3.0], [9.0, 9.0, 9.0, 9.0], possible=[0, 1, 2])
    assert draw.certify(token).verdict == DIVERGENCE
    assert str(draw.certify(token)) == f"token {token}, winner 1: {why}"


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (0, "its logit is not the highest, and no rounding makes it so"),
        (2, "of equal logits the lowest id wins"),
        (3, LEFT_OUT),
        (4, NO_TOKEN),
    ],
)
def test_a_greedy_token_that_cannot_win_is_not_said_to_be_left_out(token: int, why: str) -> None:
    draw = replace(draw_of([1.0, 3.0, 3.0, -np.inf], [0.1, 0.1, 0.1, 0.0], possible=[1]), greedy=True)
    assert draw.certify(token).verdict == DIVERGENCE
    assert str(draw.certify(token)) == f"token {token}, winner 1: {why}"


def test_faults_and_listed_tokens_are_exact() -> None:
    faulty = replace(draw_of([1.0, 1.0], [9.0, 9.0]), fault=SampleFault.NAN)
    assert [faulty.certify(t).verdict for t in (0, 1)] == [EQUAL, DIVERGENCE]
    listed = replace(draw_of([5.0, 1.0], [0.0, 9.0]), listed=1)
    assert [listed.certify(t).verdict for t in (0, 1)] == [DIVERGENCE, EQUAL]


def test_greedy_rows_without_a_rounding_are_exact() -> None:
    """Ties go to the lowest id, and no bound excuses another one, not even where the row was rounded."""
    for params in ({}, {"repetition_penalty": 1.3}):
        greedy = KnownRequest(SamplingParams(temperature=0.0, **params), 0, 1, [1, 2, 4, 5])
        rows = process([greedy], np.array([[0, 0, 0, 7, 12, 12, 0]], F))
        draw = exact_draw(rows, 0, greedy, None, FLOAT32)
        assert draw.winner == 4
        assert draw.certify(5).verdict == DIVERGENCE
        assert draw.certify(3).verdict == DIVERGENCE


def test_a_nearly_equal_greedy_row_is_a_near_tie_only_where_it_was_rounded() -> None:
    penalised = KnownRequest(SamplingParams(temperature=0.0, repetition_penalty=1.3), 0, 1, [1, 2, 4])
    logits = np.array([[0, 0, 0, 7, F(7) * F(1.3), 1, 0]], F)
    verdicts = []
    for known in (penalised, replace(penalised, params=SamplingParams(temperature=0.0))):
        draw = exact_draw(process([known], logits), 0, known, None, FLOAT32)
        verdicts.append({draw.certify(t).verdict for t in (3, 4)})
    assert verdicts == [{EQUAL, NEAR_TIE}, {EQUAL, DIVERGENCE}]


def drawn_from(known: KnownRequest, logits: np.ndarray) -> ExactDraw:
    rows = process([known], logits[None])
    noise = gumbel_noise(np.array([known.seed]), rows.positions, len(logits), "murmur3")[0]
    return exact_draw(rows, 0, known, noise, FLOAT32)


def slope_of(known: KnownRequest, logits: np.ndarray, token: int) -> float:
    """How much the token's score grows with its logit."""
    nudged = logits.copy()
    nudged[token] += 1e-6
    return float(drawn_from(known, nudged).scores[token] - drawn_from(known, logits).scores[token]) / 1e-6


def at_margin(random: np.random.Generator, share: float, **params: Any) -> tuple[KnownRequest, np.ndarray, int, int]:
    """A row whose runner-up is behind the winner by `share` of what rounding may explain: (…, winner, runner-up)."""
    known, logits = request(random, 200, **params), random.normal(size=200) * 2
    draw = drawn_from(known, logits)
    second, winner = np.argsort(np.where(draw.sets.kept, draw.scores, -np.inf))[-2:].tolist()
    for _ in range(4):  # the bound depends a little on the logits, and a penalty on their sign
        draw = drawn_from(known, logits)
        lead = draw.scores[winner] - draw.scores[second] - share * (draw.bounds[winner] + draw.bounds[second])
        logits[second] += lead / slope_of(known, logits, second)
    return known, logits, winner, second


MARGINS = [
    {"temperature": 1.0},
    {"temperature": 0.05},
    {"temperature": 1.7, "frequency_penalty": 1.5},
    {"temperature": 0.4, "repetition_penalty": 1.2, "presence_penalty": -0.7, "top_k": 20, "top_p": 0.99},
]


@pytest.mark.parametrize("params", MARGINS)
def test_a_perturbation_of_half_the_bound_is_a_near_tie_and_of_twice_a_divergence(params: dict[str, Any]) -> None:
    """A candidate whose score, logit or temperature is off draws the runner-up; what its certificate says depends on
    how far off it had to be."""
    random = np.random.default_rng(7)
    verdicts: dict[tuple[str, float], Counter[str]] = {}
    for _ in range(6):
        for share, off in ((0.4, 0.5), (1.9, 2.0)):
            known, logits, winner, second = at_margin(random, share, **params)
            draw = drawn_from(known, logits)
            assert draw.winner == winner
            amount = off * float(draw.bounds[winner] + draw.bounds[second])
            for what, scores in perturbed(known, logits, draw, winner, second, amount).items():
                drawn = int(np.where(draw.sets.kept, scores, -np.inf).argmax())
                assert drawn == second, what
                verdicts.setdefault((what, off), Counter())[draw.certify(drawn).verdict] += 1
    for what in ("score", "logit", "temperature"):
        assert verdicts[what, 0.5] == {NEAR_TIE: 6}, what
        assert verdicts[what, 2.0] == {DIVERGENCE: 6}, what


def perturbed(
    known: KnownRequest, logits: np.ndarray, draw: ExactDraw, winner: int, second: int, amount: float
) -> dict[str, np.ndarray]:
    """Scores of runners that are off in one thing, such that the runner-up gains `amount` on the winner."""
    # 1 the score itself
    score = draw.scores.copy()
    score[second] += amount
    # 2 the logit, by what becomes of it behind the penalties and the temperature
    nudged = logits.copy()
    nudged[second] += amount / slope_of(known, logits, second)
    # 3 the temperature, by which both move in proportion to their logits
    x = process([known], logits[None]).x[0]
    factor = 1 - amount / (x[winner] - x[second])
    return {
        "score": score,
        "logit": drawn_from(known, nudged).scores,
        "temperature": x * factor + (draw.scores - x),
    }


# -- faults are never excused ---------------------------------------------------------------------------------

Params = dict[str, Any]
FAULTS: dict[str, tuple[Params, Callable[[KnownRequest], KnownRequest]]] = {
    "another temperature": ({}, lambda r: with_params(r, temperature=r.params.temperature * 1.02)),
    "no temperature": ({}, lambda r: with_params(r, temperature=1.0)),
    "another seed": ({}, lambda r: replace(r, seed=r.seed + 1)),
    "a position late": ({}, lambda r: replace(r, tokens=[*r.tokens, r.tokens[-1]])),
    "top-k off by one": ({"top_k": 3}, lambda r: with_params(r, top_k=4)),
    "top-p left out": ({"top_p": 0.7}, lambda r: with_params(r, top_p=1.0)),
    "top-p a little wider": ({"top_p": 0.7}, lambda r: with_params(r, top_p=0.72)),
    "min-p of another request": ({"min_p": 0.2}, lambda r: with_params(r, min_p=0.1)),
    "bias left out": ({"logit_bias": dict.fromkeys(range(0, 64, 3), 2.0)}, lambda r: with_params(r, logit_bias=None)),
    "penalty divided twice": (
        {"repetition_penalty": 1.2}, lambda r: with_params(r, repetition_penalty=1.2 * 1.2)
    ),
    "prompt counted as output": ({"frequency_penalty": 0.9}, lambda r: replace(r, prompt_len=0)),
    "presence of nothing": ({"presence_penalty": 0.8}, lambda r: with_params(r, presence_penalty=0.0)),
    "allowed ids shifted": (
        {"allowed_token_ids": tuple(range(0, 64, 2))},
        lambda r: with_params(r, allowed_token_ids=tuple(range(1, 64, 2))),
    ),
    "bad words ignored": (
        {"bad_words_token_ids": tuple((v,) for v in range(0, 64, 4))},
        lambda r: with_params(r, bad_words_token_ids=None),
    ),
    "minimum length forgotten": ({"min_tokens": 99}, lambda r: with_params(r, min_tokens=0)),
}  # fmt: skip


def with_params(known: KnownRequest, **changes: Any) -> KnownRequest:
    return replace(known, params=replace(known.params, **changes))


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_never_a_near_tie(name: str) -> None:
    """300 rows: where the faulty runner draws another token, that token is a divergence, every time."""
    random = np.random.default_rng(3)
    params, plant = FAULTS[name]
    requests = []
    for _ in range(300):
        made = request(random, 64, temperature=float(random.choice([0.5, 0.8, 1.4])), **params)
        requests.append(replace(made, stop_token_ids=tuple(range(16))))
    logits = random.normal(size=(300, 64)) * 2
    right, wrong = (draws(r, logits) for r in (requests, [plant(r) for r in requests]))
    verdicts = Counter(a.certify(b.winner).verdict for a, b in zip(right, wrong, strict=True))
    assert verdicts[NEAR_TIE] == 0
    assert verdicts[DIVERGENCE] >= 2, "the fault changes tokens"


def draws(requests: list[KnownRequest], logits: np.ndarray) -> list[ExactDraw]:
    certifier = Certifier(RunnerConfig())
    record = step_of(requests)
    certifier.requests = dict(zip(record.req_ids, requests, strict=True))
    return [own[0] for own in certifier.draws(record, logits)]


# -- how often ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_near_ties_come_as_often_as_expected(scheme: str) -> None:
    """With bounds blown up to 0.01 and more, so that near ties can be counted: tokens drawn with errors of that size
    and random sign all have certificates, and about as many are near ties as was expected."""
    random = np.random.default_rng(5)
    arithmetic = replace(FLOAT32, unit=0.01 / 8)
    known = [request(random, 64, temperature=1.0, top_k=30) for _ in range(800)]
    logits = random.normal(size=(800, 64)) * 1.5
    rows = RowProcessor(load_stages("cpu"), arithmetic).process(step_of(known), logits, known)
    noise = gumbel_noise(np.array([r.seed for r in known]), rows.positions, 64, scheme)
    ties, expected = Counter(), 0.0
    for i, r in enumerate(known):
        draw = exact_draw(rows, i, r, noise[i], arithmetic)
        off = np.where(draw.sets.kept, draw.scores + draw.bounds * random.choice([-1.0, 1.0], 64), -np.inf)
        certificate = draw.certify(int(off.argmax()))
        ties[certificate.verdict] += 1
        expected += certificate.expected
    assert ties[DIVERGENCE] == 0
    assert 5 <= ties[NEAR_TIE] <= expected <= 8 * ties[NEAR_TIE]


def test_the_cap_grows_with_what_is_expected() -> None:
    assert near_tie_cap(1000, 0.0) == 3
    assert near_tie_cap(100_000, 0.7) == pytest.approx(10)
    assert near_tie_cap(1000, 0.7, max_rate=0.002) == 2


def test_a_float64_runner_has_a_bound_of_its_own() -> None:
    random = np.random.default_rng(6)
    known = request(random, 50, temperature=0.3, repetition_penalty=1.2)
    logits = random.normal(size=(1, 50))
    bounds = []
    for dtype in ("float64", "bfloat16"):
        certifier = Certifier(RunnerConfig(), dtype)
        certifier.requests = {"0": known}
        bounds.append(certifier.draws(step_of([known]), logits)[0][0].bounds.max())
    assert bounds[0] < 1e-13 < 1e-6 < bounds[1] < 1e-4


def test_the_certifier_follows_plans_and_tokens() -> None:
    certifier = Certifier(RunnerConfig())
    new = NewRequestData("a", [1, 2], [1, 2, 3], 0, ([1],), SamplingParams(stop_token_ids=(5,)), 9, (2,))
    certifier.observe(SchedulerOutput([new]))
    certifier.take({"a": (4,)})
    assert certifier.requests["a"] == KnownRequest(new.sampling_params, 9, 2, [1, 2, 3, 4], (5, 2))
    certifier.observe(SchedulerOutput(preempted_req_ids=frozenset({"a"}), finished_req_ids=frozenset({"ghost"})))
    assert certifier.requests == {}


def test_a_trace_is_followed_to_its_end() -> None:
    """Output 0 and 1 are listed; behind them a token is drawn."""
    known = KnownRequest(SamplingParams(temperature=0.0, trace_decode_token_ids=(3, 1)), 0, 2, [7, 7])
    logits = np.zeros((1, 8))
    winners = []
    for _ in range(3):
        winners.append(draws([known], logits)[0].winner)
        known.tokens.append(winners[-1])
    assert winners == [3, 1, 0]
