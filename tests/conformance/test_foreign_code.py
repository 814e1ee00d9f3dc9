"""Whatever a candidate does, leave the program or write to its plan, the judge ends with a verdict."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import conformance
from conformance import catalogue
from conformance.catalogue.__main__ import main as catalogue_main
from conformance.corpus import run_corpus
from conformance.driver import RandomDriver, WorldSize, draw_size
from conformance.equivalence import campaign
from conformance.equivalence import main as equivalence_main
from conformance.evaluate import Evaluation, StepJudge, evaluate
from conformance.finding import Budget, find
from conformance.foreign import (
    LeftTheProgram,
    PlanChanged,
    all_let_go,
    let_go,
    must_be_unchanged,
    own_copy,
    shut_down,
    staying,
)
from conformance.harness import build_runner
from conformance.lockstep_runs import lockstep_on_worlds
from conformance.metamorphic import judge_metamorphic
from conformance.report_file import read_report
from conformance.smoke import smoke
from conformance.world import PlanWorld
from cpu_reference.runner import CpuModelRunner
from engine_core.cli import EXIT_DIVERGED, main
from runner_api import (
    Capability,
    NewRequestData,
    RunnerConfig,
    RunnerError,
    SamplingParams,
    SchedulerOutput,
    StepRecord,
    WitnessConfig,
)
from runner_api.loader import load_factory

HERE = __name__
CORPUS = Path(conformance.__file__).parent / "data" / "corpus"
AFTER = 6  # steps that a runner here does right: more than the smoke test asks for


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class Late(CpuModelRunner):
    """Does something odd from its AFTER-th step on."""

    steps = 0

    def execute_model(self, plan: SchedulerOutput, **kwargs: Any) -> Any:
        done = super().execute_model(plan, **kwargs)
        self.steps += 1
        if self.steps > AFTER:
            self.odd(plan)
        return done

    def odd(self, plan: SchedulerOutput) -> None:
        pass


class Leaves(Late):
    def odd(self, plan: SchedulerOutput) -> None:
        raise SystemExit(0)


class GivesUp(Late):
    def odd(self, plan: SchedulerOutput) -> None:
        raise GeneratorExit


class RaisesMute(Late):
    def odd(self, plan: SchedulerOutput) -> None:
        raise Mute


class Writes(Late):
    def odd(self, plan: SchedulerOutput) -> None:
        plan.num_scheduled_tokens.clear()


class LeavesAtOnce(CpuModelRunner):
    def execute_model(self, plan: SchedulerOutput, **kwargs: Any) -> Any:
        raise SystemExit(0)


class RaisesMuteAtOnce(CpuModelRunner):
    def execute_model(self, plan: SchedulerOutput, **kwargs: Any) -> Any:
        raise Mute


class NoSecondOutput(CpuModelRunner):
    """Its outputs can be taken once."""

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return Once(super().sample_tokens(*args, **kwargs))


class Once:
    def __init__(self, handle: Any) -> None:
        self.handle, self.taken = handle, False

    def get_output(self) -> Any:
        if self.taken:
            return None
        self.taken = True
        return self.handle.get_output()


def judged(runner: type[CpuModelRunner], *clauses: str) -> Evaluation:
    return evaluate(runner, seeds=(0,), steps=10, selected=clauses)


@pytest.mark.parametrize(
    ("runner", "says"),
    [
        (Leaves, "LeftTheProgram('the runner raised SystemExit(0), which ends the program')"),
        (GivesUp, "LeftTheProgram('the runner raised GeneratorExit(), which ends the program')"),
        (RaisesMute, "<Mute without a text>"),
        (Writes, "the runner changed the plan that it was given: num_scheduled_tokens is {}, was {"),
    ],
)
def test_what_it_does_is_an_error_of_the_candidate(runner: type[CpuModelRunner], says: str) -> None:
    found = judged(runner, "MR-BATCH-001")
    assert not found.passed
    assert any(e.where.startswith("world ") and e.error.startswith(says) for e in found.errors), found.errors[:2]
    result = lockstep_on_worlds(runner, CpuModelRunner, steps=20, seed=0)
    assert result.verdict == "DIVERGE"
    assert result.first is not None


@pytest.mark.parametrize("runner", [Leaves, RaisesMute, Writes])
def test_it_is_found_and_told(runner: type[CpuModelRunner]) -> None:
    finding = find(runner)
    assert finding is not None
    assert finding.clause_id is None
    assert finding.error is not None
    assert "exception on a legal plan" in finding.text()


def test_the_command_ends_with_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{HERE}:LeavesAtOnce"]) == EXIT_DIVERGED
    assert "SystemExit: 0" in capsys.readouterr().out
    assert main(["check", f"{HERE}:Leaves", "--clause", "MR-BATCH-001", "--no-find"]) == EXIT_DIVERGED
    assert "verdict: DIVERGE" in capsys.readouterr().out


def test_smoke_names_the_step() -> None:
    assert smoke(LeavesAtOnce) == "prefill three tokens of one request: SystemExit: 0"


def test_a_second_output_of_none_is_no_second_output() -> None:
    assert judged(NoSecondOutput, "MR-ASYNC-001").by_clause["MR-ASYNC-001"]
    assert judged(CpuModelRunner, "MR-ASYNC-001").by_clause["MR-ASYNC-001"] == []


@pytest.mark.parametrize(
    "change",
    [{"num_sampled": None}, {"num_sampled": np.int32(1)}, {"req_ids": None}, {"token_ids": None}, {"req_ids": ([1],)}],
    ids=str,
)
def test_no_record_breaks_the_judge(change: dict[str, Any]) -> None:
    class Odd(CpuModelRunner):
        def last_step(self) -> StepRecord:
            record = super().last_step()
            return replace(record, **change) if record.num_reqs else record

    found = judged(Odd, "MR-BATCH-005", "MR-BATCH-001")
    assert found.errors or found.failed


def world_of(runner: type[CpuModelRunner]) -> tuple[StepJudge, PlanWorld, RandomDriver]:
    offered = CpuModelRunner(RunnerConfig()).describe().capabilities
    size: WorldSize = draw_size("plain", np.random.default_rng(0), frozenset(), offered, "slots")
    candidate, cache = build_runner(runner, size.model, size.config, size.num_blocks)
    oracle, _ = build_runner(CpuModelRunner, size.model, size.config, size.num_blocks)
    world = PlanWorld(size.config, cache, size.model.vocab_size)
    return StepJudge(candidate, oracle, size, cache, offered), world, RandomDriver(0, offered)


def test_the_judges_own_plan_stays_as_it_is() -> None:
    judge, world, driver = world_of(Writes)
    for number in range(AFTER + 1):
        step = driver.next_step(world)
        scheduled = dict(step.plan.num_scheduled_tokens)
        if number < AFTER:
            judge.run_candidate(step, None)
        else:
            with pytest.raises(PlanChanged, match="num_scheduled_tokens"):
                judge.run_candidate(step, None)
        assert step.plan.num_scheduled_tokens == scheduled
        judge.run_oracle(step)
        judge.observe(world, step)
        judge.laws(step)


def test_a_copy_of_a_plan_shares_what_is_the_users() -> None:
    params, embeds = SamplingParams(), np.zeros((2, 2))
    new = NewRequestData("a", [1, 2], [1, 2], 0, ([1],), params, prompt_embeds=embeds)
    plan = SchedulerOutput([new], num_scheduled_tokens={"a": 2}, total_num_scheduled_tokens=2)
    given = own_copy(plan)
    must_be_unchanged(given, plan)
    assert given.scheduled_new_reqs[0].sampling_params is params
    assert given.scheduled_new_reqs[0].prompt_embeds is embeds
    given.scheduled_new_reqs[0].block_ids[0].append(2)
    assert new.block_ids == ([1],)
    with pytest.raises(PlanChanged, match="scheduled_new_reqs"):
        must_be_unchanged(given, plan)


def test_only_wishes_to_leave_are_turned_into_errors() -> None:
    with pytest.raises(LeftTheProgram), staying():
        raise SystemExit("bye")
    with pytest.raises(KeyboardInterrupt), staying():
        raise KeyboardInterrupt
    with pytest.raises(StopIteration), staying():
        raise StopIteration


class Around:
    """The reference in either layout, with a method of its own; counts who was built and not shut down."""

    LAYOUTS = ("slots", "dense")
    open: ClassVar[list[Around]] = []

    def __init__(self, config: RunnerConfig) -> None:
        self._runner = load_factory("cpu")(config)
        self.open.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def shutdown(self) -> None:
        self.open.remove(self)  # ValueError for one that was shut down before
        self._runner.shutdown()


class LeavesAround(Around):
    def execute_model(self, plan: SchedulerOutput, **kwargs: Any) -> Any:
        raise SystemExit(0)


class Wedged(Around):
    """Cannot take two requests, nor be shut down."""

    def execute_model(self, plan: SchedulerOutput, **kwargs: Any) -> Any:
        if len(plan.num_scheduled_tokens) > 1:
            self.shutdown = self.fail  # type: ignore[method-assign]
            self.fail()
        return self._runner.execute_model(plan, **kwargs)

    def fail(self) -> None:
        raise Mute


def test_a_wish_to_leave_is_an_error_in_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert [(r.outcome, r.layout) for r in catalogue.run(["B21"], LeavesAround)] == [
        ("error", "slots"), ("error", "dense"),
    ]  # fmt: skip
    assert catalogue_main(["B21", "--runner", f"{HERE}:LeavesAround"]) == 1
    assert "SystemExit(0), which ends the program" in capsys.readouterr().out
    mute = catalogue.run(["B21"], RaisesMuteAtOnce)[0]
    assert (mute.outcome, mute.reason) == ("error", "Mute: <Mute without a text>")


def test_a_wish_to_leave_parts_the_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert equivalence_main(["--runner", f"{HERE}:LeavesAround", "--worlds", "2", "--models", "0"]) == 1
    assert "PARTED witness seed=0 number=0: LeftTheProgram" in capsys.readouterr().out


def test_who_cannot_be_shut_down_is_judged_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.jsonl"
    command = ["check", f"{HERE}:Wedged", "--clause", "BATCH-001", "--corpus", str(CORPUS), "--no-find"]
    assert main([*command, "--report", str(report)]) == EXIT_DIVERGED
    assert "verdict: DIVERGE" in capsys.readouterr().out
    assert read_report(report).footer["verdict"] == "DIVERGE"
    with_two = next(r for r in run_corpus(CORPUS, Wedged) if r.outcome == "diverge")
    assert "<Mute without a text>" in (with_two.first or "")


def test_whatever_judges_leaves_no_runner_open() -> None:
    """Every runner is shut down, once; also by what ends early, as it does on a failure."""
    judges: dict[str, Callable[[type[Around]], object]] = {
        "evaluate": lambda r: evaluate(r, seeds=(0,), steps=4),
        "smoke": smoke,
        "lockstep": lambda r: lockstep_on_worlds(r, CpuModelRunner, steps=60, seed=0),
        "find": lambda r: find(r, budget=Budget(worlds=1, examples=2, attempts=9)),
        "corpus": lambda r: run_corpus(CORPUS, r),
        "catalogue": lambda r: catalogue.run(["B21", "B101", "K13"], r),
        "equivalence": lambda r: campaign(r, 2, 0, "", 0, 9, lambda _: None),
        "metamorphic": lambda r: judge_metamorphic(r, capabilities=frozenset({Capability.GENERATE})),
    }
    for name, judge in judges.items():
        for runner in (Around, LeavesAround):
            Around.open.clear()
            with contextlib.suppress(LeftTheProgram, SystemExit):
                judge(runner)
            assert Around.open == [], f"{name} of {runner.__name__}"


def test_letting_go_is_quiet_and_nested() -> None:
    Around.open.clear()
    size = (WitnessConfig(), RunnerConfig(max_num_reqs=2), 8)
    with all_let_go():
        outer, _ = build_runner(Around, *size)
        with all_let_go():
            inner, _ = build_runner(Around, *size)
            early, _ = build_runner(Around, *size)
            let_go(early)
            assert Around.open == [outer, inner]
        assert Around.open == [outer]
        let_go(5)  # no runner
    assert Around.open == []
    with pytest.raises(ValueError, match="x not in list"):
        shut_down(outer)
    kept, _ = build_runner(Around, *size)
    assert Around.open == [kept]


def test_a_runner_that_cannot_be_built_again_diverges_in_lockstep() -> None:
    built = []

    def factory(config: RunnerConfig) -> CpuModelRunner:
        built.append(config)
        if len(built) > 1:
            raise RunnerError("the program has died")
        return CpuModelRunner(config)

    result = lockstep_on_worlds(factory, CpuModelRunner, steps=5, seed=0)
    assert result.verdict == "DIVERGE"
    assert "the program has died" in str(result.first)


def test_a_runner_that_dies_between_smoke_and_clauses_is_an_error() -> None:
    info = CpuModelRunner(RunnerConfig()).describe()

    def dead(config: RunnerConfig) -> CpuModelRunner:
        raise RunnerError("the program has died")

    with pytest.raises(RunnerError):
        evaluate(dead, seeds=(0,), steps=1)
    assert evaluate(dead, seeds=(0,), steps=1, selected=("MR-BATCH-001",), info=info).errors
