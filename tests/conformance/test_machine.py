"""The state machine passes on the reference, and shrinks a planted fault to a batch that can be read at a glance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from conformance.layouts import in_layout
from conformance.machine import search
from conformance.mutation import mutated
from conformance.profiles import PROFILES, profile
from conformance.strategies import StepCase, step_cases
from runner_api import PAD_SLOT_ID, UnknownNameError, load_stages

FEW = settings(profile("ci"), max_examples=40, stateful_step_count=15)


def test_the_reference_passes() -> None:
    search("cpu", profile("ci"))


def test_the_reference_passes_with_dense_rows() -> None:
    search(in_layout("cpu", "dense"), FEW)


def test_a_fault_is_found_with_dense_rows() -> None:
    with (
        mutated("cpu", "slot_mapping.py", "slot_mappings[g, num_tokens:] = PAD_SLOT_ID", "pass") as mutant,
        pytest.raises(AssertionError, match="MR-PAD-004"),
    ):
        search(in_layout(mutant.factory, "dense"), FEW)


def test_a_fault_is_found_shrunk_and_drawn() -> None:
    with (
        mutated("cpu", "slot_mapping.py", "slot_mappings[g, num_tokens:] = PAD_SLOT_ID", "pass") as mutant,
        pytest.raises(AssertionError) as caught,
    ):
        search(mutant.factory, FEW)
    clause_line, header, _, *rows = str(caught.value).splitlines()
    assert clause_line == "MR-PAD-004 Tokens past the real ones own no slot"
    assert header.split()[:3] == ["req", "row", "query"]
    assert rows[-1].startswith("MR-PAD-004 slot_mappings[0, ")
    assert len(rows) <= 3, "one or two requests show it"


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="ci, dev, nightly"):
        profile("cl")
    assert PROFILES["ci"].derandomize
    assert PROFILES["ci"].database is None


@settings(max_examples=60)
@given(step_cases(num_groups=2))
def test_one_step_cases_are_batches_that_stages_can_take(case: StepCase) -> None:
    arrays = case.arrays()
    r, n, t = arrays["num_reqs"], case.max_num_reqs, case.num_tokens
    assert len(set(case.rows)) == r <= n
    stages = load_stages("cpu")
    out = stages.run(
        "prepare_pos_seq_lens", idx_mapping=arrays["idx_mapping"], query_start_loc=arrays["query_start_loc"],
        num_computed_tokens=arrays["num_computed_tokens"], num_reqs=r, positions=np.full(t + 3, -9),
        seq_lens=np.full(n, -9, np.int32),
    )  # fmt: skip
    expected = [q.computed + i for q in case.requests for i in range(q.num_scheduled)]
    assert out["positions"].tolist() == expected + [0] * 3
    assert out["seq_lens"].tolist() == [q.computed + q.num_scheduled for q in case.requests] + [0] * (n - r)
    slots = stages.run(
        "compute_slot_mappings", idx_mapping=arrays["idx_mapping"], query_start_loc=arrays["query_start_loc"],
        positions=out["positions"], block_sizes=list(case.block_sizes), slot_mapping_enabled=[True, True],
        dcp_sharded=[True, True], dcp_size=1, dcp_rank=0, dcp_interleave=1, num_reqs=r,
        block_tables=arrays["block_tables"], slot_mappings=np.full((2, t + 3), -9),
    )["slot_mappings"]  # fmt: skip
    for g, size in enumerate(case.block_sizes):
        assert len(set(slots[g, :t].tolist())) == t, "each token has a slot of its own"
        assert (slots[g, :t] >= size).all(), "none in the null block"
        assert (slots[g, t:] == PAD_SLOT_ID).all()
