"""Clauses judged by outputs alone: a runner that keeps no record is held to each capability that it declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.check import unjudged
from conformance.clauses import load_clauses
from conformance.evaluate import evaluate
from conformance.kind_mutants import OUTPUT_MUTANTS
from conformance.metamorphic.judge import ONE_GROUP, greedy_tokens_are_the_models
from conformance.mutant import Mutant
from conformance.mutation import mutated
from conformance.noise import SCHEMES
from conformance.outcomes import results_of
from conformance.outputs_probes import CALM, outputs_are_the_references, references_tokens, wishes
from conformance.probes import Bench
from conformance.truth import witness_logits
from runner_api import Capability, ModelRunnerOutput, NewRequestData, RunnerConfig, RunnerInfo, SamplingParams
from runner_api.loader import call_factory

OFFERED = frozenset(
    c for c in Capability
    if c.value in (
        "generate", "seeded_sampling", "top_k", "top_p", "min_p", "penalties", "logit_bias", "allowed_token_ids",
        "min_tokens", "bad_words", "grammar", "logprobs", "prompt_logprobs", "padded_batch", "async_output", "float32",
    )
)  # fmt: skip
GROUPS = frozenset({Capability.MULTI_GROUP, Capability.SLIDING_WINDOW})
CLAUSES = sorted({wish.clause_id for wish in wishes()})


class Outputs:
    """The reference behind the methods that every engine calls, without records."""

    noise: str | None = None
    offered = OFFERED

    def __init__(self, config: RunnerConfig) -> None:
        self.runner: Any = call_factory("cpu", config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def describe(self) -> RunnerInfo:
        info = self.runner.describe()
        return replace(info, capabilities=self.offered, noise=self.noise or info.noise)

    def execute_model(self, plan: Any, **rest: Any) -> Any:
        plan.scheduled_new_reqs[:] = map(self.new, plan.scheduled_new_reqs)
        return self.runner.execute_model(plan, **rest)

    def sample_tokens(self, grammar: Any = None, *, forced: Any = None) -> Any:
        handle, change = self.runner.sample_tokens(self.masks(grammar), forced=forced), self.output

        class Changed:
            def get_output(self) -> ModelRunnerOutput:
                return change(handle.get_output())

        return Changed()

    def new(self, new: NewRequestData) -> NewRequestData:
        return new

    def masks(self, grammar: Any) -> Any:
        return grammar

    def output(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        return output


class NoMasks(Outputs):
    def masks(self, grammar: Any) -> Any:
        return None


class AllSevens(Outputs):
    def output(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        lists = output.logprobs
        if lists is None:
            return output
        return replace(output, logprobs=replace(lists, logprobs=np.full_like(lists.logprobs, 7)))


class NoLogprobs(Outputs):
    def output(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        return replace(output, logprobs=None)


class OneTemperature(Outputs):
    def new(self, new: NewRequestData) -> NewRequestData:
        params = new.sampling_params
        if params is None or params.greedy:
            return new
        return replace(new, sampling_params=replace(params, temperature=1.9))


class FirstOwner(Outputs):
    """An id that comes again is served as it was the first time."""

    def new(self, new: NewRequestData) -> NewRequestData:
        first = self.__dict__.setdefault("known", {}).setdefault(new.req_id, new)
        return replace(new, seed=first.seed, sampling_params=first.sampling_params)


class ForgetsHalfPrompts(Outputs):
    """Who was preempted before its first output comes back with another first token in its prompt."""

    def execute_model(self, plan: Any, **rest: Any) -> Any:
        self.__dict__.setdefault("silent", set()).update(n.req_id for n in plan.scheduled_new_reqs)
        self.__dict__.setdefault("gone", set()).update(plan.preempted_req_ids & self.silent)
        return super().execute_model(plan, **rest)

    def new(self, new: NewRequestData) -> NewRequestData:
        if new.req_id not in self.gone:
            return new
        other = [0, *list(new.prefill_token_ids)[1:]]
        return replace(new, prompt_token_ids=other[: len(new.prompt_token_ids)], prefill_token_ids=other)

    def output(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        self.silent.difference_update(r for r, tokens in output.tokens().items() if tokens)
        return output


def without(*names: str) -> type[Outputs]:
    """A runner that passes over these parameters."""
    plain = SamplingParams()

    class Ignores(Outputs):
        def new(self, new: NewRequestData) -> NewRequestData:
            params = new.sampling_params
            if params is None:
                return new
            return replace(new, sampling_params=replace(params, **{n: getattr(plain, n) for n in names}))

    return Ignores


def failed(runner: Callable[[RunnerConfig], Any], offered: frozenset[Capability] = OFFERED) -> list[str]:
    found = outputs_are_the_references(Bench(runner, offered))  # type: ignore[arg-type]
    return [clause for clause, mismatches in found.items() if mismatches]


def test_every_clause_is_asked_and_the_reference_passes() -> None:
    found = outputs_are_the_references(Bench(Outputs, OFFERED))
    assert sorted(found) == CLAUSES == [c for c in load_clauses() if "MR-OUT-005" <= c <= "MR-OUT-015"]
    assert not any(found.values())


@pytest.mark.parametrize("clause", CLAUSES)
def test_a_clause_is_asked_where_its_capabilities_are_offered_and_not_without(clause: str) -> None:
    needed = load_clauses()[clause].requires
    assert clause in outputs_are_the_references(Bench(Outputs, needed))
    for gone in needed - {Capability.GENERATE}:
        assert clause not in outputs_are_the_references(Bench(Outputs, needed - {gone}))


IGNORED = {
    "MR-OUT-006": ("top_k",),
    "MR-OUT-007": ("top_p",),
    "MR-OUT-008": ("min_p",),
    "MR-OUT-009": ("presence_penalty", "frequency_penalty", "repetition_penalty"),
    "MR-OUT-010": ("logit_bias",),
    "MR-OUT-011": ("allowed_token_ids",),
    "MR-OUT-012": ("min_tokens",),
    "MR-OUT-013": ("bad_words_token_ids",),
}


@pytest.mark.parametrize(("clause", "names"), IGNORED.items(), ids=IGNORED)
def test_a_parameter_that_is_passed_over_is_told_by_its_clause(clause: str, names: tuple[str, ...]) -> None:
    for name in names:
        assert failed(without(name)) == [clause], name


@pytest.mark.parametrize(
    ("runner", "clause"),
    [(NoMasks, "MR-OUT-014"), (AllSevens, "MR-OUT-015"), (NoLogprobs, "MR-OUT-015"), (OneTemperature, "MR-OUT-005")],
)
def test_a_wrong_runner_without_records_fails(runner: type[Outputs], clause: str) -> None:
    assert clause in failed(runner)


@pytest.mark.parametrize(("runner", "clause"), [(FirstOwner, "MR-META-019"), (ForgetsHalfPrompts, "MR-META-005")])
def test_what_a_runner_remembers_of_others_is_found(runner: type[Outputs], clause: str) -> None:
    assert clause in evaluate(runner, selected=[clause]).failed


@pytest.mark.parametrize("mutant", OUTPUT_MUTANTS, ids=lambda m: m.id)
def test_each_mutant_of_outputs_fails_its_clause(mutant: Mutant) -> None:
    with mutated("cpu", mutant.path, mutant.old, mutant.new) as copy:
        bench = Bench(copy.factory, OFFERED | GROUPS)
        found = outputs_are_the_references(bench) | greedy_tokens_are_the_models(bench)
    assert mutant.clauses[0] in [clause for clause, mismatches in found.items() if mismatches]


@pytest.mark.parametrize("gone", sorted(GROUPS))
def test_groups_and_windows_are_asked_where_both_are_offered(gone: Capability) -> None:
    assert greedy_tokens_are_the_models(Bench(Outputs, OFFERED | GROUPS)) == {"MR-OUT-004": [], "MR-OUT-016": []}
    assert greedy_tokens_are_the_models(Bench(Outputs, OFFERED | GROUPS - {gone})) == {"MR-OUT-004": []}


class OwnNoise(Outputs):
    """Noise that nobody knows: the seeds are others than those of the plan."""

    noise = "own"

    def new(self, new: NewRequestData) -> NewRequestData:
        return replace(new, seed=new.seed ^ 0x1234567)


def test_under_an_unknown_noise_all_clauses_are_asked_as_far_as_they_are_certain() -> None:
    found = outputs_are_the_references(Bench(OwnNoise, OFFERED))
    assert sorted(found) == CLAUSES
    assert not any(found.values())

    class Cold(OwnNoise):
        def new(self, new: NewRequestData) -> NewRequestData:
            params = new.sampling_params
            return replace(new, sampling_params=params and replace(params, temperature=0.0))

    assert failed(Cold) == ["MR-OUT-005"]

    class NoTopK(OwnNoise):
        def new(self, new: NewRequestData) -> NewRequestData:
            params = new.sampling_params
            return super().new(replace(new, sampling_params=params and replace(params, top_k=0)))

    assert failed(NoTopK) == ["MR-OUT-006"]


def test_what_is_certain_does_not_hang_on_the_noise() -> None:
    ids = frozenset(wish.ask.req_id for wish in wishes())
    one, other = (references_tokens(ids, noise) for noise in SCHEMES)
    for wish in wishes():
        same = [t.token for t in one[wish.ask.req_id]] == [t.token for t in other[wish.ask.req_id]]
        assert same is not wish.noisy, wish
    # the coldest request says what is best, by a margin that no noise of 32 bits makes up for (28 / 100)
    cold = next(wish for wish in wishes() if not wish.noisy)
    said = list(CALM)
    for token in one[cold.ask.req_id]:
        second, best = np.sort(witness_logits(ONE_GROUP, [said])[0])[-2:]
        assert token.token == int(witness_logits(ONE_GROUP, [said])[0].argmax())
        assert best - second > 0.28
        said.append(token.token)


def test_what_is_declared_and_not_judged_is_named() -> None:
    class Boasts(Outputs):
        offered = OFFERED | {Capability.THINKING_BUDGET, Capability.TRACE_REPLAY}

    found = evaluate(Boasts)
    assert found.passed
    assert unjudged(found.info, results_of(found)) == ["prompt_logprobs", "thinking_budget", "trace_replay"]
