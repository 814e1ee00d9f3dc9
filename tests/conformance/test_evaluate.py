"""The reference passes every clause; a runner with one fault fails the clause that names it, and not all others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.clauses import load_clauses
from conformance.context import TRACKED, RowTracker, StepContext
from conformance.dense_rows import TRACKED as DENSE_TRACKED
from conformance.dense_rows import DenseRowTracker
from conformance.evaluate import WORLD_CLAUSES, Evaluation, evaluate
from cpu_reference.async_output import AsyncOutput
from cpu_reference.runner import CAPABILITIES, CpuModelRunner
from runner_api import Capability, StepRecord


@pytest.fixture(scope="module")
def cpu() -> Evaluation:
    return evaluate("cpu")


def test_the_reference_passes_everything(cpu: Evaluation) -> None:
    assert [str(m) for found in cpu.by_clause.values() for m in found] == []
    assert [e.traceback for e in cpu.errors] == []
    assert cpu.passed


def test_every_clause_was_tested_or_skipped_with_a_reason(cpu: Evaluation) -> None:
    assert cpu.untested == []
    assert all(cpu.skipped.values())
    assert set(cpu.tested) <= set(load_clauses())


def test_worlds_met_what_runners_get_wrong(cpu: Evaluation) -> None:
    for action in ("preempt", "resume", "resume_same_plan", "prefix_hit", "block_copy", "window_eviction", "padded"):
        assert cpu.counts[action] > 10, action


@pytest.mark.parametrize(
    ("layout", "tracker", "clauses"),
    [("slots", RowTracker, TRACKED), ("dense", DenseRowTracker, DENSE_TRACKED)],
)
def test_trackers_ask_the_clauses_that_they_name(
    layout: str, tracker: Any, clauses: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()
    advance = tracker.advance

    def advanced(self: Any, plan: Any, record: StepRecord) -> None:
        advance(self, plan, record)
        asked.update(self.tested)

    monkeypatch.setattr(tracker, "advance", advanced)
    evaluate("cpu", layout=layout, seeds=range(4), enough=lambda e: asked == clauses)
    assert asked == clauses
    assert clauses <= WORLD_CLAUSES


def test_what_several_laws_look_at_is_worked_out_once() -> None:
    calls = []

    def told(c: StepContext) -> int:
        calls.append(c)
        return len(calls)

    (one, other) = (StepContext(*[None] * 12) for _ in range(2))  # type: ignore[arg-type]
    assert [one.once(told), one.once(told), other.once(told), one.once(told)] == [1, 1, 2, 1]
    assert calls == [one, other]


def record_with(change: Callable[[StepRecord], dict[str, object]]) -> type[CpuModelRunner]:
    """A runner that is right but says something else in its record."""

    class Liar(CpuModelRunner):
        def last_step(self) -> StepRecord:
            record = super().last_step()
            return replace(record, **change(record)) if record.num_reqs else record

    return Liar


def _bumped(name: str) -> Callable[[StepRecord], dict[str, object]]:
    def change(record: StepRecord) -> dict[str, object]:
        wrong = getattr(record, name).copy()
        wrong.reshape(-1)[0] += 1
        return {name: wrong}

    return change


def _slot_tail_not_padded(record: StepRecord) -> dict[str, object]:
    slots = record.slot_mappings.copy()
    slots[:, record.num_tokens :] = 17
    return {"slot_mappings": slots}


LIES = {
    "MR-PAD-004": _slot_tail_not_padded,
    "MR-INPUT-003": _bumped("seq_lens"),
    "MR-INPUT-002": _bumped("positions"),
    "MR-INPUT-006": _bumped("logits_indices"),
    "MR-INPUT-007": _bumped("cu_num_logits"),
    "MR-INPUT-008": _bumped("expanded_idx_mapping"),
    "MR-INPUT-009": _bumped("expanded_local_pos"),
    "MR-SLOT-001": _bumped("slot_mappings"),
    "MR-SAMPLE-007": _bumped("seeds"),
    "MR-BATCH-004": lambda record: {"num_tokens": record.num_tokens + 1},
    "MR-BATCH-001": lambda record: {"req_ids": ("x", *record.req_ids[1:])},
    "MR-BATCH-005": lambda record: {"input_ids": record.input_ids[:-1]},
    "MR-KV-003": lambda r: {
        "block_tables": tuple(tuple(np.append(row, np.int32(1)) for row in t) for t in r.block_tables)
    },
    "MR-PAD-003": lambda r: {
        "block_tables": tuple((*t[: r.num_reqs], *(row[:1] for row in t[r.num_reqs :])) for t in r.block_tables)
    },
    "MR-PAD-005": lambda record: {"num_reqs_padded": record.num_reqs_padded + 1},
    "MR-PAD-002": lambda record: {
        "seq_lens": np.concatenate([record.seq_lens[: record.num_reqs], record.seq_lens[record.num_reqs :] + 5])
    },
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("positions", np.int32), ("input_ids", np.int64), ("num_sampled", np.int64), ("token_ids", np.int32)],
)
def test_integers_of_another_width_fail_the_law_about_types(name: str, dtype: type) -> None:
    lie = record_with(lambda r: {name: getattr(r, name).astype(dtype)})
    assert evaluate(lie, seeds=(0,), steps=20).failed == ["MR-BATCH-005"]


def test_a_must_that_nothing_tested_is_no_pass(cpu: Evaluation) -> None:
    assert not Evaluation(cpu.info).passed
    partly = replace(cpu, tested=cpu.tested.copy())
    del partly.tested["MR-SLOT-001"]
    assert cpu.passed
    assert not partly.passed


@pytest.mark.parametrize("clause_id", LIES)
def test_a_wrong_field_fails_the_law_about_it(clause_id: str) -> None:
    found = evaluate(record_with(LIES[clause_id]), seeds=(0,), steps=20)
    assert clause_id in found.failed
    assert len(found.failed) <= 3, found.failed
    assert found.errors == []
    mismatch = found.by_clause[clause_id][0]
    assert mismatch.clause_id == clause_id
    assert str(mismatch).startswith(clause_id)


class Boundaries(CpuModelRunner):
    """Gives the record of a plan without tokens the boundaries of no request."""

    def last_step(self) -> StepRecord:
        record, none = super().last_step(), np.zeros(1, np.int32)
        return record if record.num_reqs else replace(record, query_start_loc=none, cu_num_logits=none)


class Tables(CpuModelRunner):
    """Gives the record of a plan without tokens a row of blocks."""

    def last_step(self) -> StepRecord:
        record, row = super().last_step(), np.zeros(3, np.int32)
        return record if record.num_reqs else replace(record, block_tables=((row,),))


@pytest.mark.parametrize(("runner", "told"), [(Boundaries, "query_start_loc: got 'int32[1]', expected 'int32[0]'"),
                                              (Tables, "block_tables: got [1], expected []")])  # fmt: skip
def test_the_record_of_a_plan_without_tokens_is_empty(runner: type[CpuModelRunner], told: str) -> None:
    found = evaluate(runner, seeds=(0,), steps=20)
    assert found.failed == ["MR-BATCH-005"]
    assert str(found.by_clause["MR-BATCH-005"][0]) == f"MR-BATCH-005 {told}"


def test_wrong_seeds_hide_nothing_that_does_not_hang_on_them() -> None:
    lie = record_with(lambda r: {"seeds": r.seeds & ~1023})  # as through a double
    found = evaluate(lie, seeds=(0,), steps=20)
    assert found.failed == ["MR-SAMPLE-007"]
    assert not {"MR-KV-005", "MR-KV-006", "MR-KV-007", "MR-ATTN-001", "MR-PAD-006"} & set(found.untested)


def test_nothing_is_asked_of_a_draw_that_does_not_count() -> None:
    def minus(r: StepRecord) -> dict[str, object]:
        return {"token_ids": np.where(r.num_sampled[:, None] > 0, r.token_ids, -1)}

    def zero(r: StepRecord) -> dict[str, object]:
        return {"token_ids": np.where(r.num_sampled[:, None] > 0, r.token_ids, 0)}

    for lie in (minus, zero):
        assert evaluate(record_with(lie), seeds=(0,), steps=20).failed == []
    wrong = record_with(lambda r: {"token_ids": r.token_ids - 100})
    assert "MR-SAMPLE-006" in evaluate(wrong, seeds=(0,), steps=20).failed


class OutputOfAnother(CpuModelRunner):
    """Hands out every request's tokens under its neighbour's name."""

    def sample_tokens(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        output = super().sample_tokens(*args, **kwargs)
        record = super().last_step()
        taken = record.token_ids if record.forced_token_ids is None else record.forced_token_ids
        return AsyncOutput(output._req_ids, taken[::-1], record.num_sampled)


def test_swapped_outputs_fail_the_output_law_alone() -> None:
    failed = evaluate(OutputOfAnother, seeds=(0,), steps=20).failed
    assert "MR-OUT-002" in failed
    assert not [c for c in failed if c.split("-")[1] in ("INPUT", "SLOT", "KV", "ATTN")]


class Crashing(CpuModelRunner):
    """Breaks down in its fifth step."""

    steps = 0

    def execute_model(self, plan, **kwargs):  # type: ignore[no-untyped-def]
        self.steps += 1
        if self.steps == 5:
            raise ZeroDivisionError("fifth step")
        return super().execute_model(plan, **kwargs)


def test_exceptions_are_kept_apart_from_mismatches() -> None:
    found = evaluate(Crashing, seeds=(0,), steps=20)
    assert not found.passed
    assert found.errors
    assert "fifth step" in found.errors[0].error
    assert found.errors[0].where == "world plain, step 4"


class Modest(CpuModelRunner):
    """Offers neither digests nor logprobs, and pads nothing."""

    def describe(self):  # type: ignore[no-untyped-def]
        absent = {Capability.STATE_DIGEST, Capability.LOGPROBS, Capability.PADDED_BATCH, Capability.FORCED_STEP}
        return replace(super().describe(), capabilities=CAPABILITIES - absent)


def test_what_is_not_offered_is_skipped_with_its_reason() -> None:
    found = evaluate(Modest, seeds=(0,), steps=20)
    assert found.skipped["MR-ERR-001"] == ("state_digest",)
    assert found.skipped["MR-PAD-006"] == ("padded_batch",)
    assert not found.tested["MR-PAD-004"]
    assert "MR-LOGPROB-001" in found.skipped
    assert found.counts["padded"] == found.counts["verify"] == 0


class Forgetful(CpuModelRunner):
    """Refuses bad plans only after it has freed the rows of the plan's finished requests."""

    def execute_model(self, plan, **kwargs):  # type: ignore[no-untyped-def]
        try:
            return super().execute_model(plan, **kwargs)
        except Exception:
            self.req_states.finish_requests(list(self.req_states.req_id_to_row)[:1])
            raise


def test_a_refusal_that_changes_the_state_is_noticed() -> None:
    assert "MR-ERR-001" in evaluate(Forgetful, seeds=(0,), steps=20).failed


def test_a_record_that_no_law_can_read_is_an_error_of_that_step() -> None:
    unreadable = record_with(lambda record: {"idx_mapping": None})
    found = evaluate(unreadable, seeds=(0,), steps=20)
    assert not found.passed
    assert any("record of step" in e.where for e in found.errors)
