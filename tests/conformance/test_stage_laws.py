"""Stages alone: the oracle's pass, and each way of being wrong is told under its own clause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.clauses import load_clauses
from conformance.probes import MODEL, Bench
from conformance.stage_cases import draw_cases
from conformance.stage_laws import check_stages, stages_alone
from runner_api import Capability, StageSet, load_stages

STAGE_CLAUSES = {c for c, entry in load_clauses().items() if entry.requires == {Capability.STAGES}}


@pytest.fixture(scope="module")
def oracle() -> StageSet:
    return load_stages("cpu")


def changed(stages: StageSet, name: str, after: Callable[..., None]) -> StageSet:
    """A copy whose stage `name` does `after(**arrays)` when it is done."""
    spec = stages.stages[name]

    def fn(**arrays: Any) -> None:
        spec.fn(**arrays)
        after(**arrays)

    return replace(stages, stages={**stages.stages, name: replace(spec, fn=fn)})


def failed(candidate: StageSet, oracle: StageSet) -> set[str]:
    return {c for seed in range(3) for c, found in check_stages(candidate, oracle, seed).items() if found}


@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_agrees_with_itself_on_every_clause(oracle: StageSet, seed: int) -> None:
    found = check_stages(oracle, oracle, seed)
    assert set(found) == STAGE_CLAUSES
    assert not any(found.values())


def test_every_stage_is_called(oracle: StageSet) -> None:
    assert {c.stage for c in draw_cases(np.random.default_rng(0), oracle)} == set(oracle.stages)


def test_every_element_of_an_output_is_spoken_of_once_at_most(oracle: StageSet) -> None:
    for case in draw_cases(np.random.default_rng(1), oracle):
        for output in {name for _, name, _ in case.regions}:
            masks = [mask for _, name, mask in case.regions if name == output]
            assert np.sum(masks, axis=0).max() == 1, (case.stage, output)


STEPS = (
    "apply_grammar_bitmask", "apply_allowed_token_ids", "apply_logit_bias", "apply_min_tokens", "apply_penalties",
    "apply_bad_words", "apply_thinking_budget", "apply_temperature", "apply_min_p", "apply_top_k_top_p",
)  # fmt: skip


def _touch_every_row(logits: np.ndarray, expanded_idx_mapping: np.ndarray, num_logits: int, **_: Any) -> None:
    logits[:num_logits][expanded_idx_mapping[:num_logits] >= 0] += np.float32(2.0**-20)


def _use_no_row(logits: np.ndarray, expanded_idx_mapping: np.ndarray, num_logits: int, **_: Any) -> None:
    logits[:num_logits][expanded_idx_mapping[:num_logits] < 0] = 0.0


@pytest.mark.parametrize(
    ("stage", "after", "clause"),
    [
        ("prepare_pos_seq_lens", lambda seq_lens, num_reqs, **_: seq_lens.__setitem__(slice(num_reqs, None), 1), "001"),
        ("reshape_and_cache", lambda key_cache, **_: key_cache.__setitem__((-1, -1), 5), "002"),
        ("expand_idx_mapping", lambda expanded_local_pos, **_: expanded_local_pos.__iadd__(expanded_local_pos), "003"),
        ("post_update", lambda total_len, **_: total_len.__setitem__(-1, total_len[-1] + 1), "004"),
        ("paged_attention", lambda out, **_: out.__imul__(1.1), "007"),
        ("paged_attention", lambda out, **_: out.__setitem__(-1, np.nan), "001"),
        ("gumbel_sample", lambda sampled, **_: sampled.__iadd__(1), "008"),
        ("gumbel_sample", lambda faults, **_: faults.__iadd__(1), "003"),
        *((name, lambda logits, **_: logits.__iadd__(0.25), "003") for name in STEPS),
        *((name, lambda logits, **_: logits.__setitem__(-1, 0.0), "002") for name in STEPS),
        *((name, _touch_every_row, "009") for name in STEPS if name != "apply_grammar_bitmask"),
        *((name, _use_no_row, "004") for name in STEPS if name != "apply_grammar_bitmask"),
        ("apply_penalties", lambda logits, **_: logits.__imul__(np.float32(1 + 1e-5)), "003"),
        ("count_sampled_tokens", lambda output_counts, **_: output_counts.__iadd__(1), "002"),
        ("count_prompt_and_output_tokens", lambda prompt_bitmask, **_: prompt_bitmask.__iadd__(1), "003"),
        ("apply_trace_replay", lambda sampled_token_ids, **_: sampled_token_ids.__iadd__(1), "003"),
        ("first_faults", lambda faults, **_: faults.__iadd__(1), "003"),
        ("compute_logprob_stats", lambda ranks, **_: ranks.__iadd__(1), "003"),
        ("compute_logprob_stats", lambda log_sum, **_: log_sum.__iadd__(np.float32(1e-3)), "003"),
        ("select_top_tokens", lambda columns, **_: columns.__setitem__(..., columns[:, ::-1].copy()), "003"),
        ("select_listed_tokens", lambda columns, **_: columns.__iadd__(1), "009"),
        ("gather_logprobs", lambda logprobs, **_: logprobs.__iadd__(1), "003"),
    ],
)  # fmt: skip
def test_a_fault_is_told_under_its_clause(oracle: StageSet, stage: str, after: Callable, clause: str) -> None:
    assert f"MR-STAGE-{clause}" in failed(changed(oracle, stage, after), oracle)


def test_rounding_is_no_fault(oracle: StageSet) -> None:
    """Attention that rounds its output to half precision stays inside the bound."""
    rounded = changed(oracle, "paged_attention", lambda out, **_: out.__setitem__(..., out.astype(np.float16)))
    assert failed(rounded, oracle) == set()


def test_a_stage_that_raises_does_not_hide_the_others(oracle: StageSet) -> None:
    def fail(**_: Any) -> None:
        raise IndexError("out of range")

    both = changed(changed(oracle, "post_update", fail), "gumbel_sample", lambda sampled, **_: sampled.__iadd__(1))
    found = check_stages(both, oracle, 0)
    assert [m.got for m in found["MR-STAGE-003"] if m.field == "post_update"] == ["IndexError('out of range')"]
    assert found["MR-STAGE-008"]


def test_a_stage_that_is_not_offered_is_not_judged(oracle: StageSet) -> None:
    rest = {n: s for n, s in oracle.stages.items() if n != "gumbel_sample"}
    assert "MR-STAGE-008" not in check_stages(replace(oracle, stages=rest), oracle, 0)


def test_the_probe_needs_the_capability() -> None:
    assert MODEL.vocab_size
    assert stages_alone(Bench("cpu", frozenset())) == {}
    assert set(stages_alone(Bench("cpu", frozenset({Capability.STAGES})))) == STAGE_CLAUSES
