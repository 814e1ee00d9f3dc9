"""Errors say what, where, what came, what was expected and what to do; all are RunnerErrors."""

import inspect

import pytest

import runner_api
from runner_api import ConfigError, PlanError, RunnerError, SamplingParamsError, UnknownNameError, errors


def test_the_text_has_every_part():
    e = PlanError(
        "block id out of range", code="MR-ERR-041", field="block_ids", req_id="r1", got=99, expected="id < 40",
        hint="Raise num_blocks",
    )  # fmt: skip
    assert str(e) == "MR-ERR-041 block_ids['r1']: block id out of range (got 99, expected id < 40). Raise num_blocks"
    assert (e.what, e.code, e.field, e.req_id) == ("block id out of range", "MR-ERR-041", "block_ids", "r1")
    assert (e.got, e.expected, e.hint) == (99, "id < 40", "Raise num_blocks")


def test_parts_that_are_not_given_leave_no_trace():
    assert str(PlanError("broken")) == "MR-ERR-001 broken"
    assert str(PlanError("broken", got=None)) == "MR-ERR-001 broken (got None)"
    assert str(PlanError("broken", expected=5)) == "MR-ERR-001 broken (expected 5)"
    assert str(PlanError("broken", req_id="a")) == "MR-ERR-001 ['a']: broken"


def test_long_values_are_cut():
    text = str(PlanError("broken", got=list(range(1000))))
    assert len(text) < 200
    assert "…" in text


def test_one_tree_with_distinct_codes():
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, RunnerError)]
    codes = [c.default_code for c in classes]
    assert len(set(codes)) == len(codes) > 8
    for c in classes:
        assert getattr(runner_api, c.__name__) is c
        assert c.__doc__


def test_bad_values_are_value_errors_too():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(SamplingParamsError, ValueError)
    assert issubclass(UnknownNameError, ConfigError)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("temprature", "Did you mean 'temperature'?"), ("tpo_p", "Did you mean 'top_p'"), ("zzzzzz", None)],
)
def test_unknown_names_list_the_nearest(name, hint):
    e = UnknownNameError("parameter", name, ["temperature", "top_p", "top_k"], field="params")
    assert f"unknown parameter {name!r}" in str(e)
    assert "one of temperature, top_k, top_p" in str(e)
    assert (e.hint or "").startswith(hint or "")
    assert (e.hint is None) == (hint is None)
    assert e.field == "params"


def test_of_many_names_the_nearest_alone_are_listed():
    e = UnknownNameError("clause", "MR-007x", [f"MR-{n:03}" for n in range(200)])
    assert "one of 200 names" in str(e)
    assert "Did you mean 'MR-007'" in (e.hint or "")
    assert len(str(e)) < 200


def test_nothing_is_known():
    assert "(none)" in str(UnknownNameError("runner", "x", []))
