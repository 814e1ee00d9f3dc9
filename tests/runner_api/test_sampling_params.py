"""Sampling parameters: normal forms, ranges, what they require, and reading them back."""

import json
import math

import numpy as np
import pytest

from runner_api import (
    Capability,
    RunnerError,
    SamplingParams,
    SamplingParamsError,
    StructuredOutputsParams,
    UnknownNameError,
)


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
        ({"thinking_token_budget": -1}, {"thinking_token_budget": None}),
        ({"thinking_token_budget": 0}, {"thinking_token_budget": 0}),
        ({"thinking_token_budget": 2**40}, {"thinking_token_budget": 2**31 - 1}),
        ({"logprob_token_ids": [5, np.int64(3)]}, {"logprob_token_ids": (5, 3)}),
        ({"logprob_token_ids": [5, 3], "logprobs": 2}, {"logprobs": 2}),
        ({"trace_decode_token_ids": [4, 4]}, {"trace_decode_token_ids": (4, 4)}),
        ({"extra_args": {"a": [1]}}, {"extra_args": {"a": [1]}}),
        ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": StructuredOutputsParams(regex="a+")}),
        ({"repetition_penalty": 2.0**-126}, {"repetition_penalty": 2.0**-126}),
        ({"repetition_penalty": 2.0**126}, {"repetition_penalty": 2.0**126}),
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
        ("bad_words_token_ids", ("ab",)), ("ignore_eos", "x"), ("ignore_eos", 1), ("repetition_penalty", 1e-40),
        ("repetition_penalty", 1e38), ("logit_bias", {1: 1e39}), ("logprob_token_ids", ()),
        ("logprob_token_ids", [-1]), ("logprob_token_ids", 5), ("trace_decode_token_ids", ()),
        ("trace_decode_token_ids", [-1]), ("trace_decode_token_ids", ["a"]), ("thinking_token_budget", -2),
        ("thinking_token_budget", 1.0), ("thinking_token_budget", True), ("extra_args", [1]), ("extra_args", {1: 2}),
        ("structured_outputs", "json"), ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}),
    ],
    ids=lambda v: str(v)[:12],
)  # fmt: skip
def test_values_out_of_range(field, value):
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert field in str(caught.value)
    assert isinstance(caught.value, (RunnerError, ValueError))


@pytest.mark.parametrize(
    ("field", "most", "values"),
    [
        ("logit_bias", 1024, lambda n: dict.fromkeys(range(n), 1.0)),
        ("stop_token_ids", 128, range),
        ("bad_words_token_ids", 128, lambda n: [[i] for i in range(n)]),
        ("bad_words_token_ids", 1024, lambda n: [list(range(n))]),
        ("logprob_token_ids", 128, range),
        ("allowed_token_ids", None, range),
    ],
    ids=["bias", "stops", "words", "tokens of words", "scored", "allowed"],
)
def test_what_the_tables_have_room_for(field, most, values):
    """As many as there is room for, and not one more; allowed tokens are bits and as many as there are."""
    if most is None:
        assert len(getattr(SamplingParams(**{field: list(values(5000))}), field)) == 5000
        return
    as_list = lambda v: v if isinstance(v, (dict, list)) else list(v)  # noqa: E731
    assert getattr(SamplingParams(**{field: as_list(values(most))}), field)
    with pytest.raises(SamplingParamsError, match=f"got {most + 1}, expected at most {most}") as caught:
        SamplingParams(**{field: as_list(values(most + 1))})
    assert caught.value.field == field


def test_a_stop_token_named_twice_is_one():
    assert len(SamplingParams(stop_token_ids=[*range(128), *range(128)]).stop_token_ids) == 128


def test_scores_of_named_tokens_are_as_many_as_logprobs_says():
    with pytest.raises(SamplingParamsError, match="expected 2 or None") as caught:
        SamplingParams(logprobs=3, logprob_token_ids=[4, 5])
    assert caught.value.field == "logprobs"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2}, {"prompt_logprobs": 0}, {"structured_outputs": {"json_object": True}}, {"thinking_token_budget": 0},
        {"bad_words_token_ids": [[1]]},
    ],
    ids=lambda f: next(iter(f)),
)  # fmt: skip
def test_a_trace_does_not_go_with_what_depends_on_draws(fields):
    assert SamplingParams(**fields)
    with pytest.raises(SamplingParamsError, match="trace_decode_token_ids") as caught:
        SamplingParams(trace_decode_token_ids=[1], **fields)
    assert caught.value.field == next(iter(fields))


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
        ({"logprob_token_ids": (1,)}, Capability.LOGPROBS),
        ({"thinking_token_budget": 0}, Capability.THINKING_BUDGET),
        ({"structured_outputs": {"regex": "a"}}, Capability.GRAMMAR),
        ({"trace_decode_token_ids": (1,)}, Capability.TRACE_REPLAY),
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
        allowed_token_ids=(5, 6), structured_outputs={"choice": ["a", "b"]}, logprob_token_ids=[3],
        thinking_token_budget=4, extra_args={"a": {"b": 1}}, logit_bias={4: 0.5},
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


def test_an_unknown_form_lists_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'regex'"):
        SamplingParams(structured_outputs={"regx": "a"})


def test_arguments_of_processors_are_a_copy():
    given = {"a": 1}
    p = SamplingParams(extra_args=given)
    given["a"] = 2
    assert p.extra_args == {"a": 1}


def test_parameters_come_as_a_mapping():
    with pytest.raises(SamplingParamsError, match="mapping"):
        SamplingParams.from_dict(None)
