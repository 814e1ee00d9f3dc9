"""What probes find is told by their own plans: as few requests as show it, and a program that shows it again."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from conformance.evaluate import WORLD_CLAUSES
from conformance.layouts import in_layout
from conformance.mutants import CPU_MUTANTS
from conformance.mutation import mutated
from conformance.probe_findings import find_in_probes
from conformance.tape import Tape, Taping
from cpu_reference.runner import CAPABILITIES
from runner_api import Capability, PlanError, RunnerConfig, WitnessConfig, group_kv_cache_specs
from runner_api.loader import call_factory

BY_ID = {m.id: m for m in CPU_MUTANTS}
# With a NaN or an infinity in what is imposed, masks, drafts, traces, preemption, kv, dense rows, retold stories.
SHOWN = {
    "nan-not-noticed": 1, "fault-stops-the-batch": 2, "penalties-by-batch-index": 4, "top-k-ties-to-the-last": 1,
    "top-p-before-top-k": 1, "mask-of-the-first-row": 1, "masks-in-batch-order": 2, "trace-from-the-resumption": 1,
    "drafts-not-counted": 1, "blocks-not-blanked": 2, "dense-prompt-lengths-left-behind": 3,
    "noise-depends-on-padding": 1, "seed-changes-on-resumption": 1, "noise-keyed-by-a-large-batch": 6,
}  # fmt: skip


@pytest.mark.parametrize("mutant_id", SHOWN)
def test_the_plans_of_a_probe_become_a_finding(mutant_id: str) -> None:
    m = BY_ID[mutant_id]
    clause_id = next(c for c in m.clauses if c not in WORLD_CLAUSES)
    with mutated("cpu", m.path, m.old, m.new) as copy:
        found = find_in_probes(copy.factory, clause_id, layout=m.layout)
        assert found is not None
        assert found.clause_id == clause_id
        assert found.cell is not None
        assert found.num_requests <= SHOWN[mutant_id]
        assert found.step == len(found.case.steps) - 1
        assert f"in plans of the probe {found.probe}," in found.text()
        assert "»" in found.table
        if clause_id == "MR-KV-008":
            assert found.cell.field == "kv"  # and not the token that it spoils
        with pytest.raises(AssertionError, match="got "):
            exec(found.snippet.replace(f"{copy.alias}.layouts:build_runner", copy.target), {})
    exec(re.sub(r'"_mutant_\d+_cpu_reference.layouts:build_runner"', '"cpu"', found.snippet), {})


def test_the_configuration_says_no_more_than_it_need() -> None:
    m = BY_ID["penalties-by-batch-index"]
    with mutated("cpu", m.path, m.old, m.new) as copy:
        found = find_in_probes(copy.factory, "MR-SAMPLE-019")
    assert found is not None
    config = found.case.config
    assert (config.initial_free_rows, config.reasoning, config.record) == (None, None, frozenset())


@pytest.mark.parametrize(
    "mutant_id", ["digest-of-names", "validation-skipped", "processor-not-asked", "query-start-tail-zero"]
)
def test_some_things_show_in_no_record(mutant_id: str) -> None:
    m = BY_ID[mutant_id]
    with mutated("cpu", m.path, m.old, m.new) as copy:
        assert find_in_probes(copy.factory, m.clauses[0]) is None


def test_a_right_runner_has_nothing_to_find() -> None:
    assert find_in_probes("cpu", "MR-SAMPLE-019") is None
    assert find_in_probes("cpu", "MR-SLOT-001") is None  # no probe speaks of it


def outputs_only(config: RunnerConfig) -> Any:
    runner: Any = call_factory("cpu", config)
    info = replace(runner.describe(), capabilities=CAPABILITIES - {Capability.STEP_RECORD})
    runner.describe = lambda: info
    return runner


def test_without_records_nothing_can_be_shown() -> None:
    assert find_in_probes(outputs_only, "MR-OUT-004") is None


def test_a_tape_holds_what_was_done_and_no_more() -> None:
    """Refused plans, and runs of other models or with a user's own code, make no case."""
    from conformance.probes import new, plan_of

    tapes: list[Tape] = []
    factory = Taping(in_layout("cpu", "slots"), tapes)
    assert factory.LAYOUTS == ("slots",)
    runner = factory(RunnerConfig(max_num_reqs=2, max_model_len=16))
    model = WitnessConfig()
    runner.load_model(model)
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), num_blocks=4))
    (tape,) = tapes
    assert tape.case(frozenset()) is None
    runner.poison_unused(-77, keep_blocks={2})
    with pytest.raises(PlanError):
        runner.execute_model(plan_of(new("a", [1], [9])))  # no such block
    plan = plan_of(new("a", [1, 2], [1]))
    runner.execute_model(plan)
    plan.scheduled_new_reqs[0].prompt_token_ids.clear()
    runner.sample_tokens()
    case = tape.case(frozenset({"logits"}))
    assert case is not None
    assert (case.model, case.num_blocks, case.config.record) == (model, 4, {"logits"})
    (step,) = case.steps
    assert step.plan.scheduled_new_reqs[0].prompt_token_ids == [1, 2]
    assert step.keep_blocks == {2}
    assert replace(tape, config=replace(tape.config, logits_processors=("x:y",))).case(frozenset()) is None
    assert replace(tape, model=object()).case(frozenset()) is None
