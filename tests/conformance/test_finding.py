"""A fault is found, named by the clause of the stage that goes wrong first, and shrunk to a batch read at a glance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, settings

from conformance.clauses import clause
from conformance.context import Mismatch
from conformance.divergence import first_divergence
from conformance.finding import Budget, Finding, find, reproduces
from conformance.layouts import in_layout
from conformance.machine import StoryFailed, search
from conformance.mutants import CPU_MUTANTS
from conformance.mutation import mutated
from conformance.profiles import profile
from runner_api import Capability, ConfigError, RunnerConfig, RunnerInfo, SchedulerOutput, UnknownNameError
from runner_api.loader import call_factory

BY_ID = {m.id: m for m in CPU_MUTANTS}
# Of every area whose clauses worlds can see.
NAMED = (
    "slot-tail-stale", "slot-row-is-batch-index", "slot-block-of-previous-position", "query-start-tail-padded",
    "seq-lens-tail-starts-late", "positions-of-first-token", "positions-by-batch-index", "seq-lens-of-decode",
    "prefill-chunk-restarts", "last-sampled-by-batch-index", "logits-of-first-tokens", "drafts-by-batch-index",
    "expanded-row-is-batch-index", "order-long-first", "gather-by-batch-index", "dirty-rows-forgotten",
    "overwrite-appends", "window-rounds-up", "free-rows-as-queue", "prefix-hit-ignored", "row-not-taken-off-the-stack",
    "padded-reqs-lost", "empty-plan-names-requests", "padding-written-to-last-slot", "record-counts-padding",
    "dense-tokens-left-behind", "dense-holes-ascending", "dense-blocks-kept-backwards",
)  # fmt: skip


def find_mutant(mutant_id: str, budget: Budget) -> Finding | None:
    m = BY_ID[mutant_id]
    with mutated("cpu", m.path, m.old, m.new) as copy:
        return find(copy.factory, layout=m.layout, budget=budget)


@pytest.mark.parametrize("mutant_id", NAMED)
def test_the_first_clause_is_one_that_the_mutant_names(mutant_id: str) -> None:
    found = find_mutant(mutant_id, Budget(attempts=0))
    assert found is not None
    assert found.clause_id in BY_ID[mutant_id].clauses


@pytest.mark.parametrize(
    "mutant_id", ["slot-tail-stale", "last-sampled-by-batch-index", "dense-arrivals-by-name", "output-consumed"]
)
def test_it_is_shrunk_and_the_snippet_shows_it(mutant_id: str) -> None:
    m = BY_ID[mutant_id]
    with mutated("cpu", m.path, m.old, m.new) as copy:
        found = find(copy.factory, layout=m.layout)
        assert found is not None
        assert found.clause_id in m.clauses
        assert found.num_requests <= 3
        assert len(found.case.steps) <= 3
        assert found.step == len(found.case.steps) - 1, "nothing follows the failure"
        assert reproduces(found, copy.factory)
        assert not reproduces(found, "cpu")
        assert found.cell is not None
        with pytest.raises(AssertionError) as shown:
            exec(found.snippet.replace(f"{copy.alias}.layouts:build_runner", copy.target), {})
        assert f"got {found.cell.got}" in str(shown.value)
        assert f"expected {found.cell.expected}" in str(shown.value)
    exec(found.snippet.replace(f"{copy.alias}.layouts:build_runner", "cpu"), {})
    text = found.text()
    assert text.startswith(f"{found.clause_id} {clause(found.clause_id).law}\n")
    assert str(found.cell) in text
    assert "»" in text or mutant_id == "output-consumed", "the table shows no output"
    assert text.rstrip().endswith(found.snippet.rstrip())


def test_hypothesis_finds_what_no_seeded_world_was_asked_for() -> None:
    m = BY_ID["slot-tail-stale"]
    with mutated("cpu", m.path, m.old, m.new) as copy:
        assert find(copy.factory, budget=Budget(worlds=0)) is None
        found = find(copy.factory, budget=Budget(worlds=0, examples=60))
    assert found is not None
    assert found.clause_id == "MR-PAD-004"
    assert len(found.case.steps) <= 2
    assert found.num_requests <= 2
    assert find("cpu", budget=Budget(worlds=0, examples=3)) is None


def test_a_wrong_draw_points_at_the_clauses_of_its_parameter() -> None:
    m = BY_ID["bias-replaces"]
    with mutated("cpu", m.path, m.old, m.new) as copy:
        found = find(copy.factory)
    assert found is not None
    assert found.clause_id in ("MR-SAMPLE-001", "MR-SAMPLE-002", "MR-SAMPLE-012"), "the laws of any draw"
    assert set(m.clauses) <= set(found.related)
    assert ", ".join(found.related) in found.text()


def test_the_same_fault_is_told_in_the_same_words() -> None:
    m = BY_ID["slot-tail-stale"]
    with mutated("cpu", m.path, m.old, m.new) as copy:
        assert find(copy.factory).text() == find(copy.factory).text()  # type: ignore[union-attr]


def test_the_reference_has_no_fault() -> None:
    for layout in ("slots", "dense"):
        assert find("cpu", layout=layout, budget=Budget(worlds=1)) is None


def test_a_crash_is_told_with_the_smallest_plan() -> None:
    with mutated("cpu", "slot_mapping.py", "local // block_size", "local // None") as copy:
        found = find(copy.factory)
    assert found is not None
    assert found.clause_id is None
    assert found.cell is None
    assert len(found.case.steps) <= 2
    text = found.text()
    assert text.startswith("An exception on a legal plan: TypeError(")
    assert "as it should have been:" in text, "the oracle's batch stands in for the one that is not there"
    assert found.traceback is not None
    assert "slot_mapping" in found.traceback


def test_only_the_clauses_that_are_asked_for_are_looked_for() -> None:
    m = BY_ID["slot-tail-stale"]
    with mutated("cpu", m.path, m.old, m.new) as copy:
        assert find(copy.factory, clauses=["MR-BATCH-001"], budget=Budget(worlds=1)) is None
        found = find(copy.factory, clauses=["MR-PAD-004", "MR-BATCH-001"])
        assert found is not None
        assert found.clause_id == "MR-PAD-004"


class OnlyHere:
    """Raises in its third step where Hypothesis looks alone: no seeded world has room for 40 tokens a request."""

    def __init__(self, config: RunnerConfig) -> None:
        self._runner = call_factory("cpu", config)
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute_model(self, plan: SchedulerOutput, **kwargs: Any) -> Any:
        self.steps += 1
        if self._runner.config.max_model_len == 40 and self.steps == 3:
            raise SystemExit("only here")
        return self._runner.execute_model(plan, **kwargs)


def test_hypothesis_finds_an_exception_too() -> None:
    found = find(OnlyHere, budget=Budget(worlds=0, examples=20))
    assert found is not None
    assert (found.clause_id, len(found.case.steps)) == (None, 3)
    assert "only here" in (found.error or "")
    unshrunk = settings(profile("ci"), max_examples=20, stateful_step_count=15, phases=(Phase.generate,))
    with pytest.raises(StoryFailed, match=r"An exception on a legal plan: LeftTheProgram: .*only here"):
        search(OnlyHere, unshrunk)


class Mute:
    """A runner whose capabilities are cut down; it has no `last_step`."""

    def __init__(self, factory, config: RunnerConfig) -> None:
        self._runner = call_factory(factory, config)
        self.config = self._runner.config

    def __getattr__(self, name: str):
        if name == "last_step":
            raise AttributeError(name)
        return getattr(self._runner, name)

    def describe(self) -> RunnerInfo:
        info = self._runner.describe()
        return replace(info, capabilities=frozenset({Capability.GENERATE, Capability.PADDED_BATCH}))


def test_without_a_record_the_tokens_must_do() -> None:
    assert find(lambda config: Mute("cpu", config), budget=Budget(worlds=1)) is None
    m = BY_ID["slot-row-is-batch-index"]
    with mutated("cpu", m.path, m.old, m.new) as copy:
        found = find(lambda config: Mute(copy.factory, config))
        assert found is not None
        assert found.clause_id is None
        assert "the tokens are not the oracle's" in found.law
        assert found.num_requests <= 3
        assert found.cell is not None
        assert found.cell.expression.startswith("tuple(output.tokens()")


def test_misuse_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty selection"):
        find("cpu", clauses=[])
    with pytest.raises(UnknownNameError, match="MR-SLOT-001"):
        find("cpu", clauses=["MR-SLOT-01"])


def test_no_whole_steps_is_refused() -> None:
    def stages_only(config: RunnerConfig) -> object:
        runner = in_layout("cpu", "slots")(config)
        info = replace(runner.describe(), capabilities=frozenset({Capability.STAGES}))
        runner.describe = lambda: info  # type: ignore[method-assign]
        return runner

    with pytest.raises(ConfigError, match="no whole steps"):
        find(stages_only)


def test_of_several_mismatches_the_stage_that_comes_first_is_the_cause() -> None:
    def mismatch(clause_id: str, field: str) -> Mismatch:
        return Mismatch(clause_id, field, "a", (0,), 1, 2)

    slot, token, table = (
        mismatch("MR-SLOT-001", "slot_mappings"), mismatch("MR-SAMPLE-001", "token_ids"),
        mismatch("MR-KV-001", "block_tables"),
    )  # fmt: skip
    assert first_divergence({"MR-SAMPLE-001": [token], "MR-SLOT-001": [slot]}) is slot
    assert first_divergence({"MR-SLOT-001": [slot], "MR-KV-001": [table]}) is table
    twice = mismatch("MR-SLOT-002", "slot_mappings")
    assert first_divergence({"MR-SLOT-002": [twice], "MR-SLOT-001": [slot]}) is slot
    given = mismatch("MR-OUT-001", "req_ids")
    assert first_divergence({"MR-OUT-001": [given], "MR-SAMPLE-001": [token]}) is token, "the output comes last"
    assert first_divergence({"MR-SLOT-001": []}) is None


def test_a_move_is_the_cause_where_nobody_else_is_wrong() -> None:
    def wrong(clause_id: str, req_id: str) -> Mismatch:
        return Mismatch(clause_id, "block_tables", req_id, (0, 0, 0), 1, 2)

    moved, same, other = wrong("MR-DENSE-010", "a"), wrong("MR-KV-001", "a"), wrong("MR-KV-001", "b")
    assert first_divergence({"MR-KV-001": [same], "MR-DENSE-010": [moved]}) is moved
    assert first_divergence({"MR-KV-001": [same, other], "MR-DENSE-010": [moved]}) is same
