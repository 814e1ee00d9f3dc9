"""Outputs and records that are almost right: each is found, and the snippet shows it again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.cell import cell_of
from conformance.context import Mismatch
from conformance.divergence import Failure
from conformance.evaluate import evaluate
from conformance.finding import Budget, find
from conformance.metamorphic import judge_metamorphic
from conformance.metamorphic.player import _tokens
from cpu_reference.runner import CpuModelRunner
from runner_api import Capability, ModelRunnerOutput, RunnerError, RunnerInfo, SchedulerOutput, StepRecord
from runner_api.record_check import field_fault, is_integer

PLANNED = ("b", "a")


class Handle:
    """Asks `change` for the output that it hands out the n-th time it is asked."""

    def __init__(self, handle: Any, change: Any) -> None:
        self.handle, self.change, self.asked = handle, change, 0

    def get_output(self) -> Any:
        self.asked += 1
        return self.change(self.handle.get_output(), self.asked)


class Changed(CpuModelRunner):
    """The reference, with another output or another record."""

    def output(self, output: ModelRunnerOutput, asked: int) -> Any:
        return output

    def record(self, record: StepRecord) -> StepRecord:
        return record

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return Handle(super().sample_tokens(*args, **kwargs), self.output)

    def last_step(self) -> StepRecord:
        return self.record(super().last_step())


class Errors(Changed):
    def output(self, output: ModelRunnerOutput, asked: int) -> Any:
        return replace(output, errors=dict.fromkeys(output.req_ids, 2))


class Floats(Changed):
    def output(self, output: ModelRunnerOutput, asked: int) -> Any:
        return replace(output, sampled_token_ids=tuple(tuple(map(float, t)) for t in output.sampled_token_ids))


class Arrays(Changed):
    def output(self, output: ModelRunnerOutput, asked: int) -> Any:
        return replace(output, sampled_token_ids=tuple(map(np.array, output.sampled_token_ids)))


class RaisesTheSecondTime(Changed):
    def output(self, output: ModelRunnerOutput, asked: int) -> Any:
        if asked > 1:
            raise RuntimeError("asked twice")
        return output


class OthersTheSecondTime(Changed):
    def output(self, output: ModelRunnerOutput, asked: int) -> Any:
        tokens = tuple(tuple(7 for _ in t) for t in output.sampled_token_ids)
        return output if asked == 1 else replace(output, sampled_token_ids=tokens)


class Short(Changed):
    def output(self, output: ModelRunnerOutput, asked: int) -> Any:
        return replace(output, sampled_token_ids=output.sampled_token_ids[:-1])


class NoLists(Changed):
    def output(self, output: ModelRunnerOutput, asked: int) -> Any:
        return replace(output, sampled_token_ids=None)


class RowsInTwoDimensions(Changed):
    def record(self, record: StepRecord) -> StepRecord:
        return replace(record, idx_mapping=record.idx_mapping[None])


class NamesAsList(Changed):
    def record(self, record: StepRecord) -> StepRecord:
        return replace(record, req_ids=list(record.req_ids))  # type: ignore[arg-type]


class DescriptorAsText(Changed):
    def record(self, record: StepRecord) -> StepRecord:
        return replace(record, descriptor="full")  # type: ignore[arg-type]


class NoFaults(Changed):
    def record(self, record: StepRecord) -> StepRecord:
        return replace(record, faults=None)  # type: ignore[arg-type]


class NoKv(Changed):
    def record(self, record: StepRecord) -> StepRecord:
        return replace(record, kv={})


class NoLogits(Changed):
    def record(self, record: StepRecord) -> StepRecord:
        return replace(record, logits=None)


class WithoutRecord(CpuModelRunner):
    def describe(self) -> RunnerInfo:
        return replace(super().describe(), capabilities=frozenset({Capability.GENERATE}), layout="slots")


FOUND = [
    (Errors, "MR-OUT-002", "dict(output.errors)"), (Floats, "MR-OUT-002", "isinstance("),
    (Arrays, "MR-OUT-002", "isinstance("), (OthersTheSecondTime, "MR-ASYNC-001", "output.tokens()"),
    (NamesAsList, "MR-BATCH-005", "type(record.req_ids)"), (DescriptorAsText, "MR-BATCH-005", "type(record.desc"),
    (NoFaults, "MR-BATCH-005", 'f"{record.faults.dtype}'), (NoKv, "MR-BATCH-005", "'"),
    (NoLogits, "MR-BATCH-005", "type(record.logits)"),
]  # fmt: skip


@pytest.mark.parametrize(("runner", "clause_id", "start"), FOUND)
def test_what_is_almost_right_breaks_a_clause_and_is_shown_again(runner: type, clause_id: str, start: str) -> None:
    found = find(runner, budget=Budget(worlds=1, attempts=40))
    assert found is not None
    assert found.clause_id == clause_id
    assert found.cell is not None
    assert found.cell.expression.startswith(start)
    with pytest.raises((AssertionError, AttributeError)):
        exec(found.snippet, {})
    exec(found.snippet.replace(f"{__name__}:{runner.__name__}", "cpu"), {})


@pytest.mark.parametrize("runner", [RaisesTheSecondTime, Short, NoLists, RowsInTwoDimensions])
def test_what_no_law_can_read_is_shown_again(runner: type) -> None:
    found = find(runner, budget=Budget(worlds=1, attempts=40))
    assert found is not None
    assert found.clause_id is None
    assert found.cell is None
    with pytest.raises((RuntimeError, ValueError, TypeError, RunnerError)):
        exec(found.snippet, {})
    exec(found.snippet.replace(f"{__name__}:{runner.__name__}", "cpu"), {})


def test_an_error_without_a_fault_breaks_the_law_about_outputs() -> None:
    assert "MR-OUT-002" in evaluate(Errors, seeds=(0,), steps=10).failed


# -- runners whose outputs are all there is to see ------------------------------------------------------------------


def test_of_a_right_output_every_token_is_read() -> None:
    output = ModelRunnerOutput(("a", "b"), ([np.int64(3)], ()))  # type: ignore[arg-type]
    assert _tokens(output, PLANNED) == {"a": (3,), "b": ()}
    assert _tokens(ModelRunnerOutput(), PLANNED) == {}


@pytest.mark.parametrize(
    ("output", "field"),
    [
        (ModelRunnerOutput(("a", "b"), ((3.0,), ())), "sampled_token_ids"),  # type: ignore[arg-type]
        (ModelRunnerOutput(("a", "b"), ((True,), ())), "sampled_token_ids"),
        (ModelRunnerOutput(("a", "ghost"), ((3,), ())), "req_ids"),
        (ModelRunnerOutput(("a", "a"), ((3,), (3,))), "req_ids"),
        (ModelRunnerOutput(("a", "b"), ((3,), ()), errors={"b": 2}), "errors"),  # type: ignore[dict-item]
        (ModelRunnerOutput(("a", "b"), ((3,), ()), errors=None), "errors"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_output_is_refused(output: ModelRunnerOutput, field: str) -> None:
    with pytest.raises(RunnerError) as refused:
        _tokens(output, PLANNED)
    assert refused.value.field == field


class MuteOthers(WithoutRecord, OthersTheSecondTime):
    pass


class MuteErrors(WithoutRecord, Errors):
    pass


@pytest.mark.parametrize(("runner", "why"), [(MuteOthers, "second get_output"), (MuteErrors, "without a reason")])
def test_without_a_record_the_outputs_must_do(runner: type, why: str) -> None:
    with pytest.raises(RunnerError, match=why):
        judge_metamorphic(runner)


# -- small things ---------------------------------------------------------------------------------------------------


def test_reading_a_cell_may_use_all_of_numpy_and_an_error_is_no_value() -> None:
    record = StepRecord(SchedulerOutput(), logits=np.zeros((1, 2), np.float16), req_ids=("a",))
    # the expression formats a dtype, for which NumPy imports a part of itself
    found = cell_of(Failure(0, "MR-BATCH-005", Mismatch("MR-BATCH-005", "seeds", None, (), 1, "int64[1]"), None, None,
                            record))  # fmt: skip
    assert found is not None
    assert found.got == "int64[0]"
    gone = replace(record, seeds=None)  # type: ignore[arg-type]
    found = cell_of(Failure(0, "MR-BATCH-005", Mismatch("MR-BATCH-005", "seeds", None, (), 1, "int64[1]"), None, None,
                            gone))  # fmt: skip
    assert found is not None
    assert found.got.startswith("nothing to read (AttributeError")


def test_kinds_of_fields() -> None:
    assert list(map(is_integer, (1, np.int32(1), True, np.bool_(True), 1.0, None))) == [True, True] + [False] * 4
    record = StepRecord(SchedulerOutput(), descriptor="x")  # type: ignore[arg-type]
    assert field_fault(record, "descriptor") == "str, expected a BatchDescriptor or None"
    assert field_fault(replace(record, descriptor=None), "descriptor") is None
