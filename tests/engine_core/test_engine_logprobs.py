"""Log probabilities as users get them: by token, for answers and prompts, under caching, chunks and preemption."""

import dataclasses
import math

import numpy as np
import pytest
from engine_fake_runner import CAPABILITIES, build_engine

from engine_core.llm import LLM
from runner_api import (
    Capability,
    CapabilityError,
    ConfigError,
    EngineError,
    SamplingParams,
    WitnessConfig,
    WitnessGroup,
)

MODEL = WitnessConfig(groups=(WitnessGroup(4),))
VOCAB = MODEL.vocab_size
PROMPTS = [[5, 9, 2, 44, 1, 60, 7, 7, 3, 21, 12, 8, 30], [3, 4], [9], list(range(20))]


def llm(**options):
    options = {"max_num_reqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "max_logprobs": -1} | options
    return LLM(MODEL, **options)


def greedy(**params):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 5} | params))


def generate(params, prompts=PROMPTS, **options):
    with llm(**options) as engine:
        return engine.generate(prompts, params)


def test_prompts_and_answers_have_one_distribution():
    """What an answer's tokens were worth when they were drawn is what they are worth as a prompt."""
    (first,) = generate(greedy(logprobs=-1), PROMPTS[:1])
    (again,) = generate(greedy(prompt_logprobs=-1), [PROMPTS[0] + first.token_ids])
    assert first.prompt_logprobs is again.logprobs is None
    assert again.prompt_logprobs[0] is None
    assert len(again.prompt_logprobs) == len(PROMPTS[0]) + 5
    for drawn, read in zip(first.logprobs, again.prompt_logprobs[-5:], strict=True):
        assert drawn == read
        assert len(drawn) == VOCAB
        assert math.fsum(map(math.exp, drawn.values())) == pytest.approx(1, abs=1e-5)


def test_each_gets_what_it_asked_for():
    """Answers of one batch that is as wide as the vocabulary."""
    asks = [greedy(logprobs=-1), greedy(logprobs=2), greedy(logprob_token_ids=(7, 3, 7)), greedy()]
    outputs = generate(asks, [[1, 2, 3]] * 4)
    for whole, few, own in zip(*(o.logprobs for o in outputs[:3]), strict=True):
        token = next(iter(whole))
        assert list(few.items()) == list(whole.items())[:2]  # the token drawn is the likeliest here
        assert own == {t: whole[t] for t in (token, 7, 3)}
    assert outputs[3].logprobs is None
    assert len({tuple(o.token_ids) for o in outputs}) == 1


def test_filler_behind_a_list_is_nobodys():
    """A list longer than the vocabulary makes a row wider than `all`; its filler must not stand for token 0."""
    listed = tuple(range(VOCAB)) * 2
    outputs = generate([greedy(logprobs=-1), greedy(logprob_token_ids=listed[:128])], [[1, 2, 3]] * 2)
    for a, b in zip(outputs[0].logprobs, outputs[1].logprobs, strict=True):
        assert a == b
        assert min(a.values()) > -math.inf


@pytest.mark.parametrize(
    "options",
    [
        {"long_prefill_token_threshold": 3},
        {"max_num_batched_tokens": 7},
        {"num_blocks": 12},
        {"async_scheduling": True},
        {"async_scheduling": True, "num_blocks": 12, "max_num_batched_tokens": 9},
        {"enable_prefix_caching": False},
        {"max_num_reqs": 1},
    ],
    ids=str,
)
def test_the_way_of_scheduling_changes_nothing(options):
    params = greedy(prompt_logprobs=2, logprobs=1, max_tokens=8)
    plain, other = generate(params), generate(params, **options)
    for a, b in zip(plain, other, strict=True):
        assert a.token_ids == b.token_ids
        assert a.prompt_logprobs == b.prompt_logprobs
        assert a.logprobs == b.logprobs
        assert [p is None for p in a.prompt_logprobs] == [True] + [False] * (len(a.prompt_token_ids) - 1)


def test_the_small_cache_does_preempt():
    """The case above is about preemption: twelve blocks are too few for these prompts together."""
    with llm(num_blocks=12) as engine:
        requests = []
        add = engine.engine.add_request
        engine.engine.add_request = lambda *a, **k: requests.append(add(*a, **k)) or requests[-1]
        engine.generate(PROMPTS, greedy(prompt_logprobs=2, max_tokens=8))
        assert any(r.num_preemptions for r in requests)


def test_a_prompt_is_read_whole_although_its_prefix_is_cached():
    """… and its blocks serve later requests that do not ask."""
    prompt = PROMPTS[3]
    with llm() as engine:
        (plain,) = engine.generate([prompt], greedy())
        requests = []
        add = engine.engine.add_request
        engine.engine.add_request = lambda *a, **k: requests.append(add(*a, **k)) or requests[-1]
        (asked,) = engine.generate([prompt], greedy(prompt_logprobs=0))
        (after,) = engine.generate([prompt], greedy())
    assert [r.num_cached_tokens for r in requests] == [0, 16]
    assert len(asked.prompt_logprobs) == len(prompt)
    assert plain.token_ids == asked.token_ids == after.token_ids


def test_n_answers_have_the_prompt_each():
    outputs = generate(SamplingParams(n=3, seed=4, prompt_logprobs=1, logprobs=0, max_tokens=3), PROMPTS[:1])
    assert len(outputs) == 3
    assert outputs[0].prompt_logprobs == outputs[1].prompt_logprobs == outputs[2].prompt_logprobs
    for output in outputs:
        assert [list(entry) for entry in output.logprobs] == [[t] for t in output.token_ids]


def test_entries_name_the_prompt_tokens_first():
    (output,) = generate(greedy(prompt_logprobs=0), PROMPTS[:1])
    assert [list(entry) for entry in output.prompt_logprobs[1:]] == [[t] for t in PROMPTS[0][1:]]


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "processed_logprobs"])
def test_modes(mode):
    params = greedy(temperature=0.5, seed=3, top_k=3, logprobs=-1, max_tokens=2)
    (raw,), (got,) = generate(params, PROMPTS[:1]), generate(params, PROMPTS[:1], logprobs_mode=mode)
    assert raw.token_ids == got.token_ids
    for a, b in zip(raw.logprobs, got.logprobs, strict=True):
        kept = [t for t, x in b.items() if x > -math.inf]
        assert len(kept) == (3 if mode.startswith("processed") else VOCAB)
        factor = 2 if mode.startswith("processed") else 1
        pairs = np.array([(a[t] * factor, b[t]) for t in kept])
        np.testing.assert_allclose(np.ptp(pairs[:, 0] - pairs[:, 1]), 0, atol=1e-4)  # up to a constant
        total = math.fsum(math.exp(b[t]) for t in kept)
        assert (total == pytest.approx(1, abs=1e-5)) == mode.endswith("logprobs")


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("limit", "wanted", "message"),
    [
        (20, 21, "max_logprobs = 20"), (20, -1, f"-1, all {VOCAB}"), (3, 4, "max_logprobs = 3"),
        (0, 1, "max_logprobs = 0"), (-1, VOCAB + 1, f"-1 .. {VOCAB}"),
    ],
)  # fmt: skip
def test_no_more_than_the_engine_hands_out(field, limit, wanted, message):
    with llm(max_logprobs=limit) as engine:
        with pytest.raises(EngineError, match=field) as raised:
            engine.generate([[1, 2]], greedy(**{field: wanted}))
        assert message in str(raised.value)
        assert not engine.engine.has_requests
        (output,) = engine.generate([[1, 2]], greedy(**{field: min(limit, VOCAB)}))
        assert getattr(output, field) is not None


def test_the_default_limit_and_bad_limits():
    with LLM(MODEL, max_model_len=32) as engine:
        assert engine.config.max_logprobs == 20
        engine.generate([[1]], greedy(logprobs=20, prompt_logprobs=20))
        with pytest.raises(EngineError, match="at most max_logprobs = 20"):
            engine.generate([[1]], greedy(logprobs=21))
        # A list has a limit of its own.
        (output,) = engine.generate([[1]], greedy(logprob_token_ids=tuple(range(40)), max_tokens=1))
        assert len(output.logprobs[0]) >= 40
    for bad in (-2, 1.5, None):
        with pytest.raises(ConfigError, match="max_logprobs"):
            LLM(MODEL, max_logprobs=bad)


def test_lists_are_checked_before_anything_is_queued():
    with llm() as engine:
        with pytest.raises(EngineError, match="logprob_token_ids"):
            engine.generate([[1]], greedy(logprob_token_ids=(VOCAB,)))
        assert not engine.engine.has_requests


def test_a_list_and_drafts_are_not_asked_together():
    with llm() as engine:
        admission = engine.engine.admission
        admission.runner_config = dataclasses.replace(admission.runner_config, num_speculative_tokens=1)
        for wish in ({"logprobs": 0}, {"logprob_token_ids": (1,)}):
            with pytest.raises(CapabilityError, match="drafts"):
                engine.engine.add_request("x", [1], greedy(**wish))


@pytest.mark.parametrize("field", ["prompt_logprobs", "logprobs"])
def test_a_runner_that_does_not_give_what_it_offers(monkeypatch, field):
    monkeypatch.setattr("engine_fake_runner.CAPABILITIES", CAPABILITIES | {Capability(field)})
    engine, _ = build_engine()
    engine.add_request("x", [1, 2, 3], greedy(**{field: 1}))
    with pytest.raises(EngineError, match=rf"{field}\['x'\]"):
        engine.step()
