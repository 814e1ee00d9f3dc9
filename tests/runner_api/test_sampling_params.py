"""Sampling parameters: normal forms, ranges, what they require, and reading them back."""

import json
import math

import numpy as np
import pytest

from runner_api import Capability, RunnerError, SamplingParams, SamplingParamsError, UnknownNameError


def test_defaults_are_plain_sampling():
    p = SamplingParams()
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.seed, p.max_tokens) == (1.0, 0, 1.0, 0.0, None, 16)
    assert not p.greedy
    assert p.required_capabilities() == {Capability.SEEDED_SAMPLING}


def test_greedy_switches_the_filters_off():
    p = SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.5)
    assert p.greedy
    assert (p.top_k, p.top_p, p.min_p) == (0, 1.0, 0.0)
    assert p.required_capabilities() == frozenset()


@pytest.mark.parametrize(("given", "stored"), [(1e-9, 0.01), (0.001, 0.01), (0.01, 0.01), (0.02, 0.02), (2, 2)])
def test_tiny_temperatures_are_lifted_and_are_not_greedy(given, stored):
    assert SamplingParams(temperature=given).temperature == stored


@pytest.mark.parametrize(
    ("fields", "stored"),
    [
        ({"seed": -1}, {"seed": None}),
        ({"seed": 0}, {"seed": 0}),
        ({"seed": -5}, {"seed": -5}),
        ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"stop": None}, {"stop": ()}),
        ({"stop": "end"}, {"stop": ("end",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop_token_ids": None}, {"stop_token_ids": ()}),
        ({"stop_token_ids": [7, 3, 7]}, {"stop_token_ids": (7, 3)}),
        ({"max_tokens": None, "min_tokens": 9}, {"min_tokens": 9}),
    ],
)
def test_normal_forms(fields, stored):
    p = SamplingParams(**fields)
    assert {name: getattr(p, name) for name in stored} == stored


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 16385), ("n", 1.0), ("temperature", -0.1), ("temperature", 2.1), ("temperature", math.nan),
        ("temperature", math.inf), ("temperature", None), ("temperature", "1"), ("temperature", True),
        ("temperature", 10**400), ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan), ("top_p", None),
        ("top_k", -2), ("top_k", 1.5), ("top_k", True), ("top_k", np.array(3)), ("min_p", -0.1), ("min_p", 1.1),
        ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 1.0), ("seed", "a"),
        ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 3), ("repetition_penalty", 0),
        ("repetition_penalty", math.inf), ("repetition_penalty", -1), ("max_tokens", 0), ("max_tokens", 1.5),
        ("min_tokens", -1), ("min_tokens", 17), ("logprobs", -2), ("logprobs", 0.5), ("prompt_logprobs", -2),
        ("stop", ""), ("stop", ["a", ""]), ("stop", 5), ("stop", [5]), ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.5]), ("stop_token_ids", 5), ("stop_token_ids", [[1]]), ("allowed_token_ids", ()),
        ("allowed_token_ids", 5), ("allowed_token_ids", ["a"]), ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [True]), ("stop", 0), ("stop_token_ids", False), ("stop_token_ids", "ab"),
        ("seed", np.array([1, 2])), ("logit_bias", [1]), ("logit_bias", {"a": 1}), ("logit_bias", {-4: 1.0}),
        ("logit_bias", {1: math.nan}), ("logit_bias", {1: math.inf}), ("logit_bias", {1: None}),
        ("bad_words_token_ids", 5), ("bad_words_token_ids", ((),)), ("bad_words_token_ids", ((-1,),)),
        ("bad_words_token_ids", ("ab",)), ("ignore_eos", "x"), ("ignore_eos", 1),
    ],
    ids=lambda v: str(v)[:12],
)  # fmt: skip
def test_values_out_of_range(field, value):
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert field in str(caught.value)
    assert isinstance(caught.value, (RunnerError, ValueError))


def test_greedy_has_one_answer():
    with pytest.raises(SamplingParamsError):
        SamplingParams(n=2, temperature=0)
    assert SamplingParams(n=2).n == 2


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
def test_numpy_numbers_are_numbers(kind):
    assert SamplingParams(temperature=kind(0.5), top_k=np.int32(3)).temperature == 0.5


@pytest.mark.parametrize(
    ("fields", "capability"),
    [
        ({"top_k": 1}, Capability.TOP_K),
        ({"top_p": 0.5}, Capability.TOP_P),
        ({"min_p": 0.1}, Capability.MIN_P),
        ({"logprobs": 0}, Capability.LOGPROBS),
        ({"prompt_logprobs": 0}, Capability.PROMPT_LOGPROBS),
        ({"presence_penalty": -1}, Capability.PENALTIES),
        ({"frequency_penalty": 0.1}, Capability.PENALTIES),
        ({"repetition_penalty": 1.1}, Capability.PENALTIES),
        ({"logit_bias": {1: 0.0}}, Capability.LOGIT_BIAS),
        ({"allowed_token_ids": (1,)}, Capability.ALLOWED_TOKEN_IDS),
        ({"min_tokens": 1}, Capability.MIN_TOKENS),
        ({"bad_words_token_ids": ((1,),)}, Capability.BAD_WORDS),
    ],
)
def test_every_parameter_names_what_it_requires(fields, capability):
    assert SamplingParams(**fields).required_capabilities() == {Capability.SEEDED_SAMPLING, capability}


def test_what_the_engine_serves_requires_nothing():
    p = SamplingParams(temperature=0, stop="x", stop_token_ids=(1,), ignore_eos=True, max_tokens=5, seed=3)
    assert p.required_capabilities() == frozenset()


def test_round_trip_through_json():
    p = SamplingParams(
        temperature=0.7, top_k=4, stop=["a"], stop_token_ids=[3], bad_words_token_ids=((1, 2), (3,)), seed=2**62,
        allowed_token_ids=(5, 6),
    )  # fmt: skip
    assert SamplingParams.from_dict(json.loads(json.dumps(p.to_dict()))) == p


def test_an_unknown_name_lists_the_nearest():
    with pytest.raises(UnknownNameError, match="temperature") as caught:
        SamplingParams.from_dict({"temprature": 1.0})
    assert "Did you mean 'temperature'" in str(caught.value)
    assert "top_p" in caught.value.expected


def test_values_are_stored_as_plain_numbers_and_tuples():
    p = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), logit_bias={np.int32(3): 1}, allowed_token_ids=[np.int8(3), 4],
        bad_words_token_ids=[[1, 2]],
    )  # fmt: skip
    assert type(p.temperature) is float
    assert type(p.top_k) is int
    assert p.allowed_token_ids == (3, 4)
    assert p.bad_words_token_ids == ((1, 2),)
    assert p.logit_bias == {3: 1.0}
    json.dumps(p.to_dict())


def test_the_bias_is_a_copy_and_survives_text_keys():
    given = {5: 1.5}
    p = SamplingParams(logit_bias=given)
    given[6] = math.nan
    assert p.logit_bias == {5: 1.5}
    assert SamplingParams.from_dict(json.loads(json.dumps(p.to_dict()))) == p


def test_parameters_come_as_a_mapping():
    with pytest.raises(SamplingParamsError, match="mapping"):
        SamplingParams.from_dict(None)
