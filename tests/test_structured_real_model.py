"""Answers of a given form from a real model: ended by the grammar, and of that form, as other libraries read it."""

from __future__ import annotations

import json
import re

import pytest

from engine_core.llm import LLM
from runner_api import CheckpointError, SamplingParams, StructuredOutputsParams
from runner_api.checkpoint import load_checkpoint
from runner_api.checkpoint.smollm2 import smollm2_path

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

NO_SPACES = {"x-guidance": {"whitespace_flexible": False}}
SHORT = {"type": "string", "minLength": 1, "maxLength": 12}
SCHEMAS = {
    "person": {
        "type": "object", "additionalProperties": False, "required": ["name", "age", "member"],
        "properties": {
            "name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 120}, "member": {"type": "boolean"},
        },
    },
    "colours": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"enum": ["red", "green", "blue", "ocre"]}},
    "place": {
        "type": "object", "additionalProperties": False, "required": ["city", "at"],
        "properties": {
            "city": SHORT,
            "at": {"type": "array", "minItems": 2, "maxItems": 2,
                   "items": {"type": "integer", "minimum": -180, "maximum": 180}},
        },
    },
    "answer": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}, {"const": "maybe"}]},
}  # fmt: skip
REGEXES = [
    r"[0-9]{4}-[01][0-9]-[0-3][0-9]",
    r"(yes|no), because [a-z ]{3,20}\.",
    r"#[0-9a-f]{6}",
    r"[A-Z][a-z]{2,9}( [A-Z][a-z]{2,9})?",
]
QUESTIONS = {
    "person": "Describe one member of the club as JSON.", "colours": "Name some colours as JSON.",
    "place": "Where is the capital of France? Answer as JSON.", "answer": "What is two and two? Answer as JSON.",
    REGEXES[0]: "When did it begin? Give a date.", REGEXES[1]: "Is the sea blue?",
    REGEXES[2]: "Which colour has the sky, in hex?", REGEXES[3]: "Who wrote Hamlet?",
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint():
    try:
        return load_checkpoint(smollm2_path())
    except CheckpointError as e:
        pytest.skip(f"the real model is not installed: {e}")


def requests():
    """20: each schema and each regular expression with its own seeds."""
    for i in range(20):
        key = list(QUESTIONS)[i % len(QUESTIONS)]
        form = StructuredOutputsParams(json={**SCHEMAS[key], **NO_SPACES}) if key in SCHEMAS else None
        yield key, SamplingParams(
            temperature=0.9, seed=100 + i, max_tokens=60,
            structured_outputs=form or StructuredOutputsParams(regex=key),
        )  # fmt: skip


@pytest.mark.slow
def test_twenty_answers_of_a_form(checkpoint):
    keys, params = zip(*requests(), strict=True)
    with LLM(checkpoint, max_model_len=160, max_num_reqs=20, num_blocks=220) as llm:
        outputs = llm.generate([QUESTIONS[key] for key in keys], list(params), chat=True)
    for key, output in zip(keys, outputs, strict=True):
        assert (output.finish_reason, output.stop_reason, output.error) == ("stop", None, None), (key, output.text)
        if key in SCHEMAS:
            jsonschema.validate(json.loads(output.text), SCHEMAS[key])
        else:
            assert re.fullmatch(key, output.text), (key, output.text)
    assert len({output.text for output in outputs}) > 10  # temperature and seeds are at work
