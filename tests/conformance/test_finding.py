"""A fault is found, named by the clause of the stage that goes wrong first, and shrunk to a batch read at a glance."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings

from conformance import finding
from conformance.case import Case, CaseStep
from conformance.cell import Cell
from conformance.clauses import clause
from conformance.context import Mismatch
from conformance.divergence import Failure, Sides, first_divergence
from conformance.driver import draw_size
from conformance.evaluate import StepJudge, evaluate
from conformance.finding import FRAMES, Budget, Finding, find, reproduces
from conformance.layouts import in_layout
from conformance.machine import StoryFailed, search
from conformance.mutants import CPU_MUTANTS
from conformance.mutation import mutated
from conformance.planned_step import PlannedStep
from conformance.probes import new, plan_of
from conformance.profiles import profile
from conformance.standing import stands
from conformance.story import Story
from conformance.telling import Told
from conformance.truth import witness_logits
from runner_api import (
    Capability,
    ConfigError,
    RunnerConfig,
    RunnerInfo,
    SchedulerOutput,
    UnknownNameError,
    WitnessConfig,
    WitnessGroup,
)
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
    exec(as_right_runner(found), {})


def as_right_runner(found: Finding) -> str:
    """The snippet for the reference in place of the runner at fault."""
    return re.sub(r'"_mutant_\d+_cpu_reference.layouts:build_runner"', '"cpu"', found.snippet)


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("sample/grammar.py", "stride = 1 + num_speculative_tokens", "stride = 1"),
        ("sample/grammar.py", "enumerate(grammar.structured_output_request_ids)}",
         "enumerate(r for r in req_ids if r in grammar.structured_output_request_ids)}"),
        ("runner.py", "row = states.add_request(new.req_id, new.prompt_len,",
         "row = states.add_request(new.req_id, len(new.prefill_token_ids),"),
    ],
)  # fmt: skip
def test_what_fails_in_the_worlds_that_judge_is_found_in_them(path: str, old: str, new: str) -> None:
    """Faults that few plans show."""
    with mutated("cpu", path, old, new) as copy:
        found = find(copy.factory, layout="slots", budget=Budget(attempts=0))
    assert found is not None
    assert found.clause_id is not None
    exec(as_right_runner(found), {})


def test_worlds_are_those_of_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plans, as far as the tokens are the same."""
    told: list[list[SchedulerOutput]] = []
    judged: list[list[SchedulerOutput]] = []

    def starts(self: StepJudge, *args: object) -> None:
        judged.append([])
        begin(self, *args)  # type: ignore[arg-type]

    def runs(self: StepJudge, step: PlannedStep, *args: object, **kwargs: object) -> None:
        judged[-1].append(step.plan)
        run(self, step, *args, **kwargs)  # type: ignore[arg-type]

    begin, run = StepJudge.__init__, StepJudge.run_candidate
    monkeypatch.setattr(StepJudge, "__init__", starts)
    monkeypatch.setattr(StepJudge, "run_candidate", runs)
    assert find("cpu", seed=3, budget=Budget(worlds=1)) is None
    told, judged = judged, told
    evaluate("cpu", seeds=[3], selected=["MR-BATCH-001"])
    assert len(told) == 10
    assert judged == told


def test_an_exception_does_not_hide_the_clause_that_is_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    crash, sought = Failure(0, None, error="ValueError(no)"), Failure(2, "MR-SLOT-001")
    sides = Sides(in_layout("cpu", "slots"), in_layout("cpu", "slots"), frozenset(Capability))
    size = draw_size("plain", np.random.default_rng(0))

    def worlds(sides: Sides, layout: str, seed: int) -> Iterator[Told]:
        yield Told(Story(size, ()), crash if seed < 2 else sought)

    monkeypatch.setattr(finding, "_worlds", worlds)
    assert finding._first(sides, "slots", 0, Budget()).failure is crash  # type: ignore[union-attr]
    some = replace(sides, clauses=frozenset({"MR-SLOT-001"}))
    assert finding._first(some, "slots", 0, Budget()).failure is sought  # type: ignore[union-attr]
    assert finding._first(some, "slots", 0, Budget(worlds=2)).failure is crash  # type: ignore[union-attr]


def test_a_smaller_story_must_stand_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    m = BY_ID["slot-tail-stale"]
    with mutated("cpu", m.path, m.old, m.new) as copy:
        plain = find(copy.factory)
        monkeypatch.setattr(finding, "stands", lambda case, cell, oracle: tokens_of(case) >= 7)
        raw, longer = find(copy.factory, budget=Budget(attempts=0)), find(copy.factory)
        assert raw is not None
        most = tokens_of(raw.case) - 1
        monkeypatch.setattr(finding, "stands", lambda case, cell, oracle: tokens_of(case) <= most)
        assert find(copy.factory, budget=Budget(attempts=0)) is None
        later = find(copy.factory)
        assert plain is not None
        least = tokens_of(plain.case) + 1
        monkeypatch.setattr(finding, "stands", lambda case, cell, oracle: least <= tokens_of(case) <= most)
        between = find(copy.factory)
        monkeypatch.setattr(finding, "stands", lambda case, cell, oracle: False)
        assert find(copy.factory, budget=Budget(attempts=20)) is None
    assert between is not None
    assert tokens_of(between.case) == least
    assert longer is not None
    assert tokens_of(plain.case) < 7
    assert tokens_of(longer.case) == 7, "the smallest of those that stand"
    assert later is not None
    assert tokens_of(later.case) == tokens_of(plain.case), "a shorter story may stand where the first does not"
    assert longer.clause_id == later.clause_id == plain.clause_id


def tokens_of(case: Case) -> int:
    return sum(s.plan.total_num_scheduled_tokens for s in case.steps)


def test_a_case_stands_if_the_oracle_alone_gives_what_is_expected() -> None:
    oracle = in_layout("cpu", "slots")
    config = RunnerConfig(max_num_reqs=2, max_num_batched_tokens=8, max_model_len=16, layout="slots")
    steps = CaseStep(plan_of(new("a", [1, 2, 3], [1]))), CaseStep(plan_of(cached={"a": (3, None)}))
    case = Case(config, WitnessConfig(groups=(WitnessGroup(4),)), 4, steps)
    drawn = int(witness_logits(case.model, [[1, 2, 3]])[0].argmax())
    fed = Cell("record.input_ids.tolist()", None, [drawn], "input_ids")
    assert stands(case, fed, oracle)
    assert not stands(case, replace(fed, expected=[drawn + 1]), oracle), "what the oracle is fed behind a wrong token"
    assert not stands(case, replace(fed, expression="record.nothing"), oracle)
    before = Cell("earlier.input_ids[2]", None, 3, "input_ids", (2,), earlier=True)
    assert stands(case, before, oracle)
    assert not stands(case, replace(before, expected=4), oracle)
    assert stands(case, None, oracle)
    assert not stands(replace(case, steps=steps[1:]), None, oracle), "no right runner goes on with a request unknown"


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
    frames = text.split("raised at, innermost last:\n")[1].split("\n\n")[0].splitlines()
    assert len(frames) == FRAMES
    assert re.fullmatch(r"    .*slot_mapping.*\.py:\d+ in \w+: .*local // None.*", frames[-1])


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
        assert found.clause_id == "MR-OUT-004", "greedy requests on the witness model"
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
