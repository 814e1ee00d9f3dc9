"""The record of a step is the caller's: later steps leave it as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conformance.clauses import clause
from conformance.evaluate import evaluate
from conformance.finding import find
from conformance.kept_record import KeptRecord
from conformance.layouts import in_layout
from conformance.mutants import CPU_MUTANTS
from conformance.mutation import mutated
from runner_api import RunnerConfig, SchedulerOutput, StepRecord
from runner_api.loader import load_factory

FILE = Path(__file__).parents[2] / "examples" / "stranger.py"
ID = "MR-ASYNC-005"


def test_a_view_of_a_buffer_is_found_and_shown() -> None:
    m = next(m for m in CPU_MUTANTS if m.id == "record-shows-the-buffer")
    with mutated("cpu", m.path, m.old, m.new) as copy:
        judged = evaluate(copy.factory, seeds=[0], steps=20)
        assert set(judged.failed) == {ID}
        found = find(copy.factory, clauses=[ID], layout="slots")
        assert found is not None
        assert (found.num_requests, len(found.case.steps)) == (1, 2)
        assert "of the step before: »earlier.seq_lens[0]« = " in found.text()
        with pytest.raises(AssertionError, match=f"{ID} earlier.seq_lens"):
            exec(found.snippet.replace(f"{copy.alias}.layouts:build_runner", copy.target), {})
    exec(found.snippet.replace(f"{copy.alias}.layouts:build_runner", "cpu"), {})


def test_a_runner_with_outputs_at_once_is_asked_too() -> None:
    """A stranger whose record shows the buffer that it draws into."""
    build = load_factory(f"{FILE}:build")

    def views(config: RunnerConfig) -> object:
        runner = build(config)
        sample = runner.sample_tokens

        def sample_tokens(*args: object, **kwargs: object) -> object:
            done, n = sample(*args, **kwargs), len(runner.record.num_sampled)
            runner.record = replace(runner.record, token_ids=runner.drawn[:n, None])
            return done

        runner.sample_tokens = sample_tokens
        return runner

    judged = evaluate(views, seeds=[0], steps=20, selected=[ID])
    assert judged.by_clause[ID]
    assert judged.by_clause[ID][0].field == "token_ids"
    right = evaluate(build, seeds=[0], steps=20, selected=[ID])
    assert right.tested[ID] > 0
    assert not right.by_clause[ID]


def test_every_kind_of_field_is_held_against_what_it_was() -> None:
    record = StepRecord(
        SchedulerOutput(), num_reqs=1, req_ids=("a",), seq_lens=np.array([3], np.int32),
        kv={"a": np.zeros((1, 3, 2), np.int64)}, block_tables=((np.array([4, 5], np.int32),),),
        logits=np.array([[np.nan, 1.0]], np.float32),
    )  # fmt: skip
    kept = KeptRecord.of(record)
    assert kept is not None
    assert kept.changes(ID) == []
    for field, change in (
        ("seq_lens", lambda: record.seq_lens.fill(7)), ("kv", lambda: record.kv["a"].fill(7)),
        ("block_tables", lambda: record.block_tables[0][0].fill(7)), ("logits", lambda: record.logits.fill(7)),
    ):  # fmt: skip
        kept = KeptRecord.of(record)
        change()
        assert [m.field for m in kept.changes(ID)] == [field]
    assert [str(m) for m in KeptRecord.of(replace(record, num_reqs=2)).changes(ID)] == []
    assert KeptRecord.of(None) is None
    assert KeptRecord.of(5) is None, "no record at all is other clauses' business"


def test_the_reference_keeps_its_records_in_both_layouts() -> None:
    for layout in ("slots", "dense"):
        judged = evaluate(in_layout("cpu", layout), seeds=[0], selected=[ID], layout=layout)
        assert judged.tested[ID] > 50
        assert not judged.by_clause[ID]
    assert clause(ID).level == "MUST"
