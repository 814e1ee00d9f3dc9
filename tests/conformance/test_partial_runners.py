"""Runners that offer only a part: they are judged by that part, and told what was skipped and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from conformance.clauses import load_clauses
from conformance.evaluate import evaluate
from conformance.outcomes import Outcome, results_of
from conformance.probe import clauses_of, probe
from conformance.probes import ASKED, OF_THE_ENGINE, PROBES, Bench, each_asked
from conformance.smoke import smoke
from conformance.stage_laws import stages_judged, stages_of_clauses
from cpu_reference.runner import CAPABILITIES, CpuModelRunner
from engine_core.cli import main
from runner_api import (
    Capability,
    CapabilityError,
    ConfigError,
    RunnerConfig,
    RunnerInfo,
    SamplingParams,
    SchedulerOutput,
    StageAdapter,
    StageSet,
    UnknownNameError,
    load_stages,
)
from runner_api.loader import call_factory

HERE = __name__
INFO = RunnerInfo("mine", f"{HERE}.mine", "1.0", "cpu", "float32", "slots", "murmur3", frozenset())


def only(*names: str, change: Callable[..., Any] | None = None) -> Callable[[], StageSet]:
    """These stages of the reference; the first of them with `change` behind it."""

    def stages() -> StageSet:
        reference = load_stages("cpu")
        chosen = {name: reference.stages[name] for name in names}
        if change is not None:
            first = chosen[names[0]]

            def changed(**arrays: Any) -> None:
                first.fn(**arrays)
                change(**arrays)

            chosen[names[0]] = replace(first, fn=changed)
        return replace(reference, stages=chosen)

    return stages


def _off_by_one(slot_mappings: Any, **_: Any) -> None:
    slot_mappings += 1


slots_alone = StageAdapter(INFO, only("compute_slot_mappings"))
wrong_slots = StageAdapter(INFO, only("compute_slot_mappings", change=_off_by_one))
no_stages = StageAdapter(INFO, only())


def test_an_adapter_describes_itself_and_refuses_the_rest() -> None:
    runner = call_factory(slots_alone, RunnerConfig())
    assert runner.describe().capabilities == {Capability.STAGES}
    assert slots_alone.LAYOUTS == ("slots",)
    for call in (
        lambda: runner.execute_model(SchedulerOutput()), runner.sample_tokens, runner.last_step, runner.pool,
        runner.state_digest, runner.poison_unused, runner.get_kv_cache_specs, runner.capture_graphs,
        lambda: runner.load_model("x"), runner.take_draft_token_ids,
    ):  # fmt: skip
        with pytest.raises(CapabilityError, match="offers stages alone"):
            call()
    runner.shutdown()


def test_whole_steps_are_no_adapter_of_stages() -> None:
    with pytest.raises(ConfigError, match="runs no whole step"):
        StageAdapter(replace(INFO, capabilities=frozenset({Capability.GENERATE})), only("gumbel_sample"))
    with pytest.raises(ConfigError, match="lists no stage"):
        no_stages.stages()


def test_the_clauses_of_its_stages_are_tested_and_no_other() -> None:
    found = evaluate(slots_alone)
    about = {c for c, ways in stages_of_clauses().items() if frozenset({"compute_slot_mappings"}) in ways}
    assert set(found.tested) == about
    assert "MR-STAGE-005" in about
    assert found.passed
    assert set(found.skipped) == load_clauses().keys() - about
    assert found.skipped["MR-SLOT-001"] == ("generate", "step_record")
    assert found.skipped["MR-STAGE-008"] == ("stage gumbel_sample",)
    assert found.skipped["MR-SLOT-008"] == ("stage map_to_kernel_block_table",)
    assert found.skipped["MR-STAGE-009"][0].endswith(" or one of 10 others")


def test_a_wrong_stage_is_found() -> None:
    found = evaluate(wrong_slots)
    assert "MR-STAGE-003" in found.failed
    assert not found.passed


def test_check_judges_stages_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{HERE}:slots_alone"]) == 0
    out = capsys.readouterr().out
    assert "smoke: ok" in out
    assert "skipped (not offered: generate, step_record):" in out
    assert "lockstep: left out, not offered: generate, step_record" in out
    must = len(evaluate(slots_alone).tested)
    assert f"verdict: AGREE MUST {must}/{must}" in out.splitlines()[-1]
    assert main(["check", f"{HERE}:wrong_slots"]) == 1
    assert "failed: MR-STAGE-003" in capsys.readouterr().out


def test_check_of_stages_has_no_lockstep(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{HERE}:slots_alone", "--lockstep-only"]) == 2
    assert "cannot run in lockstep, not offered: generate, step_record" in capsys.readouterr().err


def _breaks(**_: Any) -> None:
    raise OSError("no device")


def _listed(**arrays: Any) -> list[Any]:
    return [arrays]


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (only(), "list the stages: ConfigError"),
        (only("compute_slot_mappings", change=_breaks), "run stage compute_slot_mappings on one batch: OSError"),
        (lambda: replace(load_stages("cpu"), stages={"mine": load_stages("cpu").stages["gumbel_sample"]}),
         "list the stages: mine; no clause speaks of any of these"),
        (lambda: replace(only("compute_slot_mappings")(), to_host=lambda a: a[..., :1]),
         "slot_mappings came back as int64"),
    ],
)  # fmt: skip
def test_smoke_of_stages(stages: Callable[[], StageSet], said: str) -> None:
    assert said in (smoke(StageAdapter(INFO, stages)) or "")


def test_unknown_stages_are_told() -> None:
    reference = load_stages("cpu")

    def stages() -> StageSet:
        listed = only("gumbel_sample")().stages
        return replace(reference, stages={**listed, "my_own": reference.stages["gumbel_sample"]})

    found = evaluate(StageAdapter(INFO, stages))
    assert found.unjudged_stages == ("my_own",)
    assert results_of(found).notes == ("stages that no clause speaks of: my_own",)


def test_every_stage_of_the_reference_is_judged() -> None:
    assert stages_judged() == load_stages("cpu").stages.keys()


class Outputs:
    """The reference behind a wall: plans go in, tokens come out, and nothing else can be seen."""

    def __init__(self, config: RunnerConfig) -> None:
        self._runner = CpuModelRunner(config)
        self.config = config

    def describe(self) -> RunnerInfo:
        return replace(self._runner.describe(), capabilities=self.offered)

    offered = frozenset({Capability.GENERATE, Capability.ASYNC_OUTPUT, Capability.PADDED_BATCH})

    def load_model(self, model: Any) -> None:
        self._runner.load_model(model)

    def get_kv_cache_specs(self) -> Any:
        return self._runner.get_kv_cache_specs()

    def initialize_kv_cache(self, kv_cache_config: Any) -> None:
        self._runner.initialize_kv_cache(kv_cache_config)
        self._runner.validator.capabilities = self.offered

    def execute_model(self, plan: Any, **rest: Any) -> Any:
        return self._runner.execute_model(plan, **rest)

    def sample_tokens(self, grammar: Any = None, *, forced: Any = None) -> Any:
        return self._runner.sample_tokens(grammar, forced=forced)

    def last_step(self) -> Any:
        raise CapabilityError("no record")

    def shutdown(self) -> None:
        self._runner.shutdown()


def test_a_runner_of_outputs_alone_is_judged_by_them() -> None:
    assert smoke(Outputs) is None
    found = evaluate(Outputs)
    assert [e.traceback for e in found.errors] == []
    assert found.failed == []
    assert found.untested == []
    assert found.passed
    assert {"MR-ASYNC-002", "MR-ASYNC-003", "MR-ERR-005", "MR-META-001"} <= found.tested.keys()
    assert found.skipped["MR-BATCH-001"] == ("step_record",)
    assert found.skipped["MR-ERR-020"] == ("plan_validation",)
    assert found.counts == {}, "worlds need the record of each step"


def test_what_is_declared_must_be_there() -> None:
    """A runner without records that declares them does not come through the smoke test."""

    class Boasts(Outputs):
        offered = Outputs.offered | {Capability.STEP_RECORD}

    assert "read the record of the step" in (smoke(Boasts) or "")


@pytest.mark.parametrize("each", PROBES, ids=lambda p: p.__name__)
def test_probes_declare_what_they_test(each: Any) -> None:
    """And each runs only where what it needs is offered."""
    declared, needs = clauses_of(each), each.needs
    assert declared
    assert needs & {Capability.GENERATE, Capability.STAGES}
    assert each(Bench(None, CAPABILITIES - needs)) == {}  # type: ignore[arg-type]
    for clause_id in declared:
        assert load_clauses()[clause_id].requires & {Capability.GENERATE, Capability.STAGES}


def test_every_sampling_parameter_is_asked_for() -> None:
    """A new one must be asked for as well, or be the engine's."""
    names = {f.name for f in fields(SamplingParams)}
    assert set(ASKED) | OF_THE_ENGINE == names
    assert not set(ASKED) & OF_THE_ENGINE
    for params, name in zip(each_asked(), [n.name for n in fields(SamplingParams) if n.name in ASKED], strict=True):
        assert getattr(params, name) == getattr(SamplingParams(**{name: ASKED[name]}), name), "greedy switched it off"
        assert params.required_capabilities() or name == "extra_args"


class Overlooks(CpuModelRunner):
    """Offers no penalties, and refuses one of the three alone."""

    def describe(self) -> RunnerInfo:
        info = super().describe()
        return replace(info, capabilities=info.capabilities - {Capability.PENALTIES})

    def execute_model(self, plan: Any, **kwargs: Any) -> Any:
        if any(new.sampling_params.presence_penalty for new in plan.scheduled_new_reqs):
            raise CapabilityError("is not offered", field="presence_penalty")
        return super().execute_model(plan, **kwargs)


def test_a_parameter_that_is_overlooked_is_found() -> None:
    (told,) = (p for p in PROBES if p.__name__ == "capabilities_not_offered_are_refused")
    found = told(Bench(Overlooks, CAPABILITIES - {Capability.PENALTIES}))["MR-ERR-005"]
    assert [(m.got, m.expected) for m in found] == [("accepted", "CapabilityError for ['penalties']")] * 2


def test_a_probe_must_declare_what_it_reports() -> None:
    @probe("SLOT-001..SLOT-003", Capability.GENERATE)
    def strays(bench: Any) -> Any:
        return {"MR-PAD-001": []}

    assert clauses_of(strays) == {"MR-SLOT-001", "MR-SLOT-002", "MR-SLOT-003"}
    with pytest.raises(ValueError, match="does not declare"):
        strays(Bench("cpu", CAPABILITIES))
    with pytest.raises(UnknownNameError):
        probe("SLOT-999")


def test_each_clause_is_skipped_or_tested_whatever_is_missing() -> None:
    """Without one capability after another nothing that still applies is left untested."""
    for gone in (Capability.PLAN_VALIDATION, Capability.STATE_DIGEST, Capability.STEP_RECORD):

        class Lacks(CpuModelRunner):
            offered = CAPABILITIES - {gone}

            def describe(self) -> RunnerInfo:
                return replace(super().describe(), capabilities=self.offered)

        results = results_of(evaluate(Lacks, seeds=(0,), steps=20))
        assert results.ids(Outcome.UNTESTED, Outcome.FAIL, Outcome.ERROR) == [], gone
