"""Literals read back as the value that they tell; a snippet is plain Python that fails on the fault alone."""

from __future__ import annotations

import ast

import numpy as np
import pytest

import runner_api
from conformance.case import Case, CaseStep
from conformance.cell import Cell
from conformance.probes import new, plan_of
from conformance.snippet import literal, write_snippet
from runner_api import (
    BatchDescriptor,
    CUDAGraphMode,
    ForcedStep,
    RunnerConfig,
    SamplingParams,
    StructuredOutputsParams,
    WitnessConfig,
    WitnessGroup,
)

CONFIG = RunnerConfig(max_num_reqs=2, max_num_batched_tokens=8, max_model_len=16, layout="slots")
CASE = Case(CONFIG, WitnessConfig(groups=(WitnessGroup(4),)), 4, (CaseStep(plan_of(new("a", [1, 2, 3], [1]))),))


@pytest.mark.parametrize(
    "value",
    [
        CONFIG, WitnessConfig(groups=(WitnessGroup(4), WitnessGroup(8, sliding_window=3))), (1,), (), [], {"a": [1]},
        frozenset({3, 1}), frozenset(), "it's", None, -1.5, BatchDescriptor(CUDAGraphMode.PIECEWISE, 4),
        SamplingParams(temperature=0.5, logit_bias={3: 1.5}, bad_words_token_ids=((1, 2), (3,))),
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z]*")),
        plan_of(new("a", [1] * 60, [1, 2]), new("b", [2], [3]), cached={"c": (3, ([4],))}),
    ],
)  # fmt: skip
def test_a_literal_reads_back(value: object) -> None:
    names: set[str] = set()
    text = literal(value, names)
    assert eval(text, {name: getattr(runner_api, name) for name in names}) == value


def test_arrays_keep_their_dtype() -> None:
    names: set[str] = set()
    forced = ForcedStep(np.array([[3, 0]]), np.array([1], np.int32))
    back = eval(literal(forced, names), {"np": np, "ForcedStep": ForcedStep})
    assert names == {"ForcedStep"}
    assert back.token_ids.dtype == np.int64
    assert back.num_sampled.dtype == np.int32
    assert back.token_ids.tolist() == [[3, 0]]
    assert back.draft_token_ids is None


def test_defaults_are_left_out() -> None:
    assert literal(SamplingParams(temperature=0.0), set()) == "SamplingParams(temperature=0.0)"


def test_it_needs_runner_api_alone() -> None:
    text = write_snippet(CASE, "cpu", Cell("record.seq_lens[0]", 4, 3, "seq_lens", (0,), "a"), "MR-INPUT-003 Lengths")
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [getattr(node, "module", None) for node in imported] == ["runner_api"]
    assert max(map(len, text.splitlines())) <= 120


def test_it_passes_where_the_cell_is_right_and_says_both_values_where_it_is_not() -> None:
    exec(write_snippet(CASE, "cpu", Cell("record.seq_lens[0]", 4, 3, "seq_lens", (0,), "a"), "MR-INPUT-003 x"), {})
    wrong = write_snippet(CASE, "cpu", Cell("record.seq_lens[0]", 3, 99, "seq_lens", (0,), "a"), "MR-INPUT-003 x")
    with pytest.raises(AssertionError, match=r"MR-INPUT-003 record.seq_lens\[0\] of request 'a': got 3, expected 99"):
        exec(wrong, {})


@pytest.mark.parametrize(
    ("expression", "right"),
    [
        ("record.kv['a'][0, 1].tolist()", [2, 1]), ("record.req_ids", ("a",)), ("record.idx_mapping.tolist()", [1]),
        ('f"{record.seq_lens.dtype}{list(record.seq_lens.shape)}"', "int32[1]"),
        ("tuple(output.tokens()['a'])", None),
    ],
)  # fmt: skip
def test_every_kind_of_cell_can_be_asked(expression: str, right: object) -> None:
    config = RunnerConfig(
        max_num_reqs=2, max_num_batched_tokens=8, max_model_len=16, layout="slots", record=frozenset({"kv"})
    )
    case = Case(config, CASE.model, 4, CASE.steps)
    if right is not None:
        exec(write_snippet(case, "cpu", Cell(expression, None, right, "x"), "MR-KV-005 x"), {})
    with pytest.raises(AssertionError, match="expected -5"):
        exec(write_snippet(case, "cpu", Cell(expression, None, -5, "x"), "MR-KV-005 x"), {})


def test_numbers_that_are_rounded_have_room() -> None:
    near = Cell("[record.seq_lens[0] * 1.0, 2.0]", None, [3.0001, 2.0], "logprobs", (0, 0), "a", tolerance=1e-3)
    exec(write_snippet(CASE, "cpu", near, "MR-LOGPROB-001 x"), {})
    far = Cell("[record.seq_lens[0] * 1.0, 2.0]", None, [3.1, 2.0], "logprobs", (0, 0), "a", tolerance=1e-3)
    with pytest.raises(AssertionError, match="got"):
        exec(write_snippet(CASE, "cpu", far, "MR-LOGPROB-001 x"), {})


def test_poison_padding_and_masks_travel_along() -> None:
    step = CaseStep(CASE.steps[0].plan, BatchDescriptor(CUDAGraphMode.FULL, 5, 2), keep_blocks=frozenset({3}))
    text = write_snippet(Case(CONFIG, CASE.model, 4, (step,)), "cpu", None, "An exception")
    assert "runner.poison_unused(keep_blocks=[3])" in text
    assert "BatchDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=5, num_reqs=2)" in text
    assert "assert " not in text
    exec(text, {})
