"""The metamorphic laws pass a right runner, and each of them fails on a runner with the fault that it is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import conformance
from conformance.clauses import load_clauses
from conformance.layouts import in_layout
from conformance.metamorphic import judge_metamorphic
from conformance.metamorphic.judge import LAWS, ONE_GROUP, stage_of
from conformance.metamorphic.player import BrokenStory, Way
from conformance.metamorphic.story import Ask, tell_story
from conformance.mutants import CPU_MUTANTS
from conformance.mutation import mutated
from cpu_reference.runner import CAPABILITIES
from engine_core.cli import main
from runner_api import (
    BatchDescriptor,
    Capability,
    CapabilityError,
    ConfigError,
    CUDAGraphMode,
    ModelRunnerOutput,
    RunnerConfig,
    SamplingParams,
    StructuredOutputsParams,
)
from runner_api.loader import PROTOCOL_METHODS, call_factory

IDS = [law.clause_id for law in LAWS]
GRAPHS = "MR-META-010"
CHECKPOINT = Path(conformance.__file__).parent / "data" / "checkpoints" / "llama-tiny"
BARE = frozenset({Capability.GENERATE})


def failed(found: dict[str, list[Any]]) -> list[str]:
    return [clause for clause, mismatches in found.items() if mismatches]


def wrapped(change: Callable[[Any], Any]) -> Callable[[RunnerConfig], Any]:
    """A factory of reference runners, each one changed after it was built."""

    def factory(config: RunnerConfig) -> Any:
        runner: Any = call_factory("cpu", config)
        change(runner)
        return runner

    return factory


def test_every_law_has_a_clause_and_every_clause_a_law() -> None:
    assert sorted(IDS) == [c for c in load_clauses() if c.startswith("MR-META-")]


@pytest.mark.parametrize("layout", ["slots", "dense"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_reference_keeps_every_law(layout: str, seed: int) -> None:
    found = judge_metamorphic(in_layout("cpu", layout), seed=seed)
    assert sorted(found) == [c for c in IDS if c != GRAPHS]
    assert failed(found) == []


@cache
def prompts_of_story_one() -> set[tuple[int, ...]]:
    """One each, with and without several KV cache groups."""
    return {stage_of("cpu", CAPABILITIES, m, 1, {}).story.asks[0].prompt for m in (None, ONE_GROUP)}


def spoilt_in_story_one(config: RunnerConfig) -> Any:
    """A runner whose tokens are wrong in odd steps once a prompt of story 1 has come."""
    runner: Any = call_factory("cpu", config)
    info = replace(runner.describe(), capabilities=CAPABILITIES - {Capability.STAGES})
    execute, sample, state = runner.execute_model, runner.sample_tokens, {"met": False, "steps": 0}

    def executes(plan: Any, **kwargs: Any) -> Any:
        state["met"] |= any(tuple(new.prompt_token_ids) in prompts_of_story_one() for new in plan.scheduled_new_reqs)
        state["steps"] += 1
        return execute(plan, **kwargs)

    def samples(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs).get_output()
        if state["met"] and state["steps"] % 2:
            tokens = tuple(tuple(t ^ 1 for t in row) for row in output.sampled_token_ids)
            output = replace(output, sampled_token_ids=tokens)
        return SimpleNamespace(get_output=lambda: output)

    runner.describe, runner.execute_model, runner.sample_tokens = lambda: info, executes, samples
    return runner


@pytest.mark.parametrize("clause", ["META-012", "OUT-004"])
def test_more_rounds_are_more_stories(clause: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A fault that one story meets is found where that story is told."""
    command = ["check", f"{__name__}:spoilt_in_story_one", "--clause", clause, "--no-find"]
    assert main([*command, "--rounds", "1"]) == 0
    assert main([*command, "--rounds", "2"]) == 1
    assert main([*command, "--seed", "1"]) == 1
    assert f"failed: MR-{clause}" in capsys.readouterr().out


def test_interpreted_runners_get_the_short_story() -> None:
    """Every law comes up in it too."""

    def slow(runner: Any) -> None:
        info = replace(runner.describe(), device="cpu (an interpreter)")
        runner.describe = lambda: info

    short, long = tell_story(0, 64, 4, BARE, short=True), tell_story(0, 64, 4, BARE)
    assert len(short.asks) < len(long.asks)
    found = judge_metamorphic(wrapped(slow))
    assert sorted(found) == [c for c in IDS if c != GRAPHS]
    assert failed(found) == []


def test_a_real_model_keeps_every_law() -> None:
    found = judge_metamorphic("cpu", model=str(CHECKPOINT), dtype="float64")
    assert sorted(found) == [c for c in IDS if c != GRAPHS]
    assert failed(found) == []


def test_a_runner_that_draws_only_greedily_and_keeps_no_record_is_judged() -> None:
    class Bare:
        """The methods that every engine calls, and no other."""

        def __init__(self, config: RunnerConfig) -> None:
            runner = call_factory("cpu", config)
            for name in PROTOCOL_METHODS:
                setattr(self, name, getattr(runner, name))

    found = judge_metamorphic(Bare, model=ONE_GROUP, capabilities=BARE)
    assert sorted(found) == [c for c in IDS if load_clauses()[c].requires == BARE]
    assert failed(found) == []


def test_a_runner_without_a_list_of_free_rows_is_given_other_rows_all_the_same() -> None:
    def factory(config: RunnerConfig) -> Any:
        if config.initial_free_rows is not None:
            raise CapabilityError("rows are free in one order", field="initial_free_rows")
        return call_factory("cpu", config)

    assert judge_metamorphic(factory)["MR-META-002"] == []


def test_a_greedy_story_asks_for_nothing_else() -> None:
    story = tell_story(0, 64, 4, BARE)
    assert {a.params.required_capabilities() for a in (*story.asks, *story.strangers)} == {frozenset()}
    every = tell_story(0, 64, 4, frozenset(Capability))
    asked = frozenset().union(*(a.params.required_capabilities() for a in every.asks))
    assert asked >= {
        Capability.SEEDED_SAMPLING, Capability.PENALTIES, Capability.LOGIT_BIAS, Capability.ALLOWED_TOKEN_IDS,
        Capability.BAD_WORDS, Capability.MIN_TOKENS, Capability.TOP_K, Capability.TOP_P, Capability.MIN_P,
    }  # fmt: skip


def test_nothing_to_judge_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no metamorphic law applies"):
        judge_metamorphic("cpu", capabilities=frozenset())


# One mutant for each law; those that break little besides are preferred.
MUTANTS = {
    "MR-META-001": "greedy-by-batch-index",
    "MR-META-002": "seed-is-row",
    "MR-META-003": "slot-other-groups-size",
    "MR-META-004": "prefill-chunk-restarts",
    "MR-META-005": "resume-from-prompt",
    "MR-META-006": "slot-tail-starts-late",
    "MR-META-007": "allowed-by-batch-index",
    "MR-META-008": "prefix-hit-ignored",
    "MR-META-009": "counts-not-copied",
    "MR-META-011": "seed-and-row",
    "MR-META-012": "seed-and-batch-place",
    "MR-META-013": "dense-idle-tokens-lost",
    "MR-META-014": "bias-of-former-owner",
    "MR-META-017": "dense-keeps-the-plans-lists",
    "MR-META-019": "seed-of-the-names-first-owner",
    "MR-META-020": "caches-shared-by-runners",
}


@pytest.mark.parametrize(("clause", "name"), MUTANTS.items(), ids=MUTANTS)
def test_each_law_fails_on_a_fault_of_its_own(clause: str, name: str) -> None:
    mutant = next(m for m in CPU_MUTANTS if m.id == name)
    with mutated("cpu", mutant.path, mutant.old, mutant.new) as copy:
        found = judge_metamorphic(in_layout(copy.factory, mutant.layout))
    assert clause in failed(found)


def test_a_mismatch_names_request_step_token_and_the_way() -> None:
    mutant = next(m for m in CPU_MUTANTS if m.id == "resume-from-prompt")
    with mutated("cpu", mutant.path, mutant.old, mutant.new) as copy:
        found = judge_metamorphic(copy.factory)
    assert failed(found) == ["MR-META-005"]
    first = found["MR-META-005"][0]
    assert first.req_id in {a.req_id for a in tell_story(0, 64, 4, BARE).asks}
    assert first.field.startswith("tokens with preempted and resumed, step ")
    assert len(first.index) == 1
    assert first.got != first.expected


def test_a_runner_of_constants_fails() -> None:
    """Constants are the same in whatever way a story is told; other prompts and other seeds find them out."""

    def constant(runner: Any) -> None:
        sample = runner.sample_tokens

        class Constant:
            def __init__(self, output: Any) -> None:
                self.output = output

            def get_output(self) -> ModelRunnerOutput:
                true = self.output.get_output()
                return ModelRunnerOutput(true.req_ids, tuple(tuple(3 for _ in t) for t in true.sampled_token_ids))

        runner.sample_tokens = lambda *a, **k: Constant(sample(*a, **k))

    assert failed(judge_metamorphic(wrapped(constant))) == ["MR-META-015", "MR-META-016"]


def test_a_missing_token_is_told_by_its_law_or_ends_the_judgement() -> None:
    def silent_when_late(runner: Any) -> None:
        sample, live = runner.sample_tokens, []

        class Silent:
            def __init__(self, output: Any) -> None:
                self.output = output
                live.append(self)

            def get_output(self) -> ModelRunnerOutput:
                true = self.output.get_output()
                late = live[-1] is not self
                return ModelRunnerOutput(true.req_ids, tuple(() if late else t for t in true.sampled_token_ids))

        runner.sample_tokens = lambda *a, **k: Silent(sample(*a, **k))

    found = judge_metamorphic(wrapped(silent_when_late))
    assert failed(found) == ["MR-META-009"]
    assert found["MR-META-009"][0].field.startswith("number of tokens with outputs taken late")

    def mute(runner: Any) -> None:
        class Nothing:
            def __init__(self, output: Any) -> None:
                self.output = output

            def get_output(self) -> ModelRunnerOutput:
                req_ids = self.output.get_output().req_ids
                return ModelRunnerOutput(req_ids, tuple(() for _ in req_ids))

        sample = runner.sample_tokens
        runner.sample_tokens = lambda *a, **k: Nothing(sample(*a, **k))

    with pytest.raises(BrokenStory, match="0 tokens where 1 are due"):
        judge_metamorphic(wrapped(mute))


def test_graphs_are_judged_where_a_runner_has_them() -> None:
    """A runner that pads to the shape it captured; one that captures nothing leaves the law untested."""
    shapes = tuple(BatchDescriptor(CUDAGraphMode.FULL, n, 8) for n in (8, 16, 64))
    asked: list[BatchDescriptor] = []

    def capture(runner: Any) -> None:
        execute = runner.execute_model

        def listening(plan: Any, *, descriptor: Any = None, **rest: Any) -> Any:
            asked.extend([descriptor] if descriptor in shapes else [])
            return execute(plan, descriptor=descriptor, **rest)

        runner.capture_graphs, runner.execute_model = lambda: shapes, listening

    offered = BARE | {Capability.CUDA_GRAPHS}
    found = judge_metamorphic(wrapped(capture), capabilities=offered)
    assert found[GRAPHS] == []
    assert len(set(asked)) > 1
    assert GRAPHS not in judge_metamorphic("cpu", capabilities=offered)


def test_log_probabilities_belong_to_a_token() -> None:
    """A runner whose tokens are right and whose log probabilities hang on the size of the batch."""

    def crowded(runner: Any) -> None:
        sample = runner.sample_tokens

        class Crowded:
            def __init__(self, output: Any) -> None:
                self.output = output

            def get_output(self) -> ModelRunnerOutput:
                true = self.output.get_output()
                if true.logprobs is None:
                    return true
                values = true.logprobs.logprobs - np.float32(len(true.req_ids))
                return replace(true, logprobs=replace(true.logprobs, logprobs=values))

        runner.sample_tokens = lambda *a, **k: Crowded(sample(*a, **k))

    found = judge_metamorphic(wrapped(crowded))
    assert "MR-META-007" in failed(found)
    assert found["MR-META-007"][0].field.startswith("log probabilities with two strangers in between, step ")
    assert "MR-META-001" not in failed(found)


def test_grammar_masks_follow_the_request() -> None:
    """Tokens of a request with structured outputs are those that its masks allow, one mask for each output."""
    form = SamplingParams(temperature=0.0, structured_outputs=StructuredOutputsParams(regex="a*"))
    ask = Ask("g", (3, 4, 5), form)
    stage = stage_of("cpu", frozenset(Capability), ONE_GROUP, 0, {"layout": "slots"})
    for way in (Way(), Way(chunks=(2, 1)), Way(preempt={"g": ((1, 0),)})):
        tokens = [t.token for t in stage.play([ask], way)[0]["g"]]
        assert len(tokens) == ask.num_outputs
        assert all(token in ask.formed(k + 1, 64) for k, token in enumerate(tokens))
    assert ask.formed(1, 64) != ask.formed(2, 64)


def test_a_crash_belongs_to_the_law_that_met_it() -> None:
    def no_padding(runner: Any) -> None:
        execute = runner.execute_model

        def refusing(plan: Any, *, descriptor: Any = None, **rest: Any) -> Any:
            if descriptor is not None:
                raise RuntimeError("no such shape")
            return execute(plan, **rest)

        runner.execute_model = refusing

    found = judge_metamorphic(wrapped(no_padding))
    assert failed(found) == ["MR-META-006"]
    assert "no such shape" in found["MR-META-006"][0].got
