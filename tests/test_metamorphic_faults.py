"""The metamorphic tests can fail: each fault here is planted in the reference, and noticed where it should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_metamorphic_sampling as metamorphic

from runner_api import GrammarOutput


def noise_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of a row comes from its place in the batch."""
    from cpu_reference.sample import sampler

    def faulty(mapping: Any, positions: Any, temperature: Any, seeds: Any, *rest: Any) -> None:
        mixed = seeds.copy()
        mixed[mapping] = seeds[np.arange(len(mapping))]
        real(mapping, positions, temperature, mixed, *rest)

    real = sampler.gumbel_sample
    monkeypatch.setattr(sampler, "gumbel_sample", faulty)


def a_neighbours_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest min-p of the batch is everybody's."""
    from cpu_reference.sample import min_p

    real = min_p.apply_min_p
    monkeypatch.setattr(min_p, "apply_min_p", lambda m, p, *rest: real(m, np.full_like(p, p[m].max()), *rest))


def counts_of_the_former_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's counts go on from where the last request left them."""
    from cpu_reference.sample.penalties import Penalties

    monkeypatch.setattr(Penalties, "apply_staged_writes", lambda self: None)


def outputs_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens from before a preemption are not output."""
    from cpu_reference.sample import penalties

    real = penalties.count_prompt_and_output_tokens
    monkeypatch.setattr(
        penalties, "count_prompt_and_output_tokens", lambda r, prompt, total, *rest: real(r, prompt, prompt, *rest)
    )


def a_processor_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor is not told what its request had drawn before a preemption."""
    from cpu_reference.sample.custom import CustomProcessors

    real = CustomProcessors.add_request
    monkeypatch.setattr(
        CustomProcessors, "add_request",
        lambda self, row, params, new: real(self, row, params, replace(new, prefill_token_ids=new.prompt_token_ids)),
    )  # fmt: skip


def a_processor_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor is told of tokens at a preemption alone."""
    from cpu_reference.sample.custom import CustomProcessors

    monkeypatch.setattr(CustomProcessors, "observe", lambda *args: None)


def masks_in_the_order_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from cpu_reference import runner

    real = runner.grammar_mask_rows

    def faulty(req_ids: Any, cu: Any, grammar: GrammarOutput, k: int) -> Any:
        asking = set(grammar.structured_output_request_ids)
        return real(req_ids, cu, replace(grammar, structured_output_request_ids=[i for i in req_ids if i in asking]), k)

    monkeypatch.setattr(runner, "grammar_mask_rows", faulty)


def a_fault_without_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unfinished prompts are judged too."""
    from cpu_reference import runner

    real = runner.first_faults
    monkeypatch.setattr(runner, "first_faults", lambda cu, n, *rest: real(cu, np.ones_like(n), *rest))


def minimum_from_the_resumption(monkeypatch: pytest.MonkeyPatch) -> None:
    from cpu_reference.sample.min_tokens import MinTokens

    real = MinTokens.add_request
    monkeypatch.setattr(
        MinTokens, "add_request",
        lambda self, row, params, new: real(self, row, params, replace(new, prompt_token_ids=new.prefill_token_ids)),
    )  # fmt: skip


def bias_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without a bias leaves its row's as it is."""
    from cpu_reference.sample.logit_bias import LogitBias

    real = LogitBias.add_request
    monkeypatch.setattr(LogitBias, "add_request", lambda self, row, p, new: p.logit_bias and real(self, row, p, new))


def drafts_are_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from cpu_reference.sample import penalties

    real = penalties.apply_penalties
    monkeypatch.setattr(penalties, "apply_penalties", lambda m, local, *rest: real(m, np.zeros_like(local), *rest))


def a_processor_sees_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    from cpu_reference.sample import custom

    real = custom.LogitsContext
    monkeypatch.setattr(custom, "LogitsContext", lambda *args: real(*args[:-1], 0))


@pytest.mark.parametrize(
    ("plant", "caught_by"),
    [
        (noise_by_place, "neighbours"), (noise_by_place, "order"), (noise_by_place, "batch size"),
        (a_neighbours_share, "neighbours"), (a_neighbours_share, "waiting"),
        (counts_of_the_former_owner, "rows used again"), (bias_left_behind, "rows used again"),
        (outputs_forgotten, "preemption"), (outputs_forgotten, "all of it"), (a_processor_forgets, "preemption"),
        (a_processor_is_not_told, "preemption"), (minimum_from_the_resumption, "preemption"),
        (masks_in_the_order_of_the_batch, "neighbours"), (a_fault_without_a_sample, "chunks"),
        (drafts_are_not_said, "drafts"), (a_processor_sees_no_drafts, "drafts"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], caught_by: str
) -> None:
    plant(monkeypatch)
    monkeypatch.setattr(metamorphic, "_ALONE", {})  # what a request does alone may be faulty too
    variation = metamorphic.test_nothing_about_the_batch_changes_a_request
    test: Callable[[], None] = {
        "rows used again": lambda: metamorphic.test_a_row_remembers_nothing("cpu", True),
        "drafts": lambda: metamorphic.test_a_row_behind_drafts_is_the_row_behind_tokens("cpu"),
    }.get(caught_by, lambda: variation("cpu", "given logits", caught_by))
    with pytest.raises(AssertionError):
        test()
