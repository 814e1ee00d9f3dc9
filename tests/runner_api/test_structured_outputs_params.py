"""The form of an answer: exactly one, of the right kind, and travelling as JSON."""

import dataclasses
import json

import pytest

from runner_api import SamplingParamsError, StructuredOutputsParams
from runner_api.structured_outputs import MAX_JSON_DEPTH

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def nested(levels):
    """A schema of so many levels."""
    schema = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        ("json", SCHEMA, json.dumps(SCHEMA)),
        ("json", json.dumps(SCHEMA), json.dumps(SCHEMA)),
        ("json", "true", "true"),
        ("json", nested(MAX_JSON_DEPTH), json.dumps(nested(MAX_JSON_DEPTH))),
        ("regex", "a|b", "a|b"),
        ("choice", ["yes", "no"], ("yes", "no")),
        ("grammar", "start: A", "start: A"),
        ("json_object", True, True),
    ],
)
def test_one_form(kind, value, stored):
    form = StructuredOutputsParams(**{kind: value})
    assert form.kind == kind
    assert getattr(form, kind) == stored
    plain = json.loads(json.dumps(dataclasses.asdict(form)))
    assert StructuredOutputsParams(**plain) == form


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"regex": None}, {"regex": "a", "grammar": "start: A"}, {"choice": ["a"], "json_object": True},
    ],
    ids=str,
)  # fmt: skip
def test_exactly_one(fields):
    with pytest.raises(SamplingParamsError, match="one form at a time") as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.field == "structured_outputs"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", "{"), ("json", "3"), ("json", "null"), ("json", [1]), ("json", 3),
        ("json", nested(MAX_JSON_DEPTH + 1)), ("json", json.dumps(nested(MAX_JSON_DEPTH + 1))),
        ("regex", ""), ("regex", "a\0b"), ("regex", 3),
        ("choice", ()), ("choice", "ab"), ("choice", ["a", ""]), ("choice", [1]), ("grammar", " \n"), ("grammar", 3),
        ("json_object", False), ("json_object", 1),
    ],
    ids=lambda v: str(v)[:12],
)  # fmt: skip
def test_of_the_right_kind(kind, value):
    with pytest.raises(SamplingParamsError) as caught:
        StructuredOutputsParams(**{kind: value})
    assert caught.value.field == f"structured_outputs.{kind}"
