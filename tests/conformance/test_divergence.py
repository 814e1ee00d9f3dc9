"""Of everything that is wrong in a step, the clause that is told is the one that says most."""

from __future__ import annotations

import pytest

from conformance.context import Mismatch
from conformance.divergence import first_divergence
from conformance.finding import _without_padding, _worlds, sides_of
from conformance.mutants import CPU_MUTANTS
from conformance.mutation import mutated

# What mutants of the reference break together in one field, and which clause of it says most.
TOGETHER = {
    "rows by name": ("idx_mapping", "MR-DENSE-001 MR-DENSE-002 MR-DENSE-005 MR-DENSE-006", "MR-DENSE-001"),
    "reordering those that stand right": ("idx_mapping", "MR-DENSE-003 MR-DENSE-007", "MR-DENSE-007"),
    "decode begins late": ("idx_mapping", "MR-DENSE-005 MR-DENSE-007", "MR-DENSE-007"),
    "threshold excluded": ("idx_mapping", "MR-DENSE-006 MR-DENSE-007", "MR-DENSE-007"),
    "first chunk of one is a decode": ("idx_mapping", "MR-DENSE-002 MR-DENSE-005 MR-DENSE-006", "MR-DENSE-006"),
    "top-k keeps one more": ("token_ids", "MR-SAMPLE-002 MR-SAMPLE-008 MR-SAMPLE-012", "MR-SAMPLE-008"),
    "top-p keeps one more": ("token_ids", "MR-SAMPLE-002 MR-SAMPLE-009 MR-SAMPLE-012", "MR-SAMPLE-009"),
    "min-p only if all": ("token_ids", "MR-SAMPLE-002 MR-SAMPLE-010", "MR-SAMPLE-010"),
    "overwriting appends": ("block_tables", "MR-KV-001 MR-KV-003", "MR-KV-003"),
}


@pytest.mark.parametrize(("field", "clauses", "told"), TOGETHER.values(), ids=TOGETHER)
def test_of_clauses_about_one_field_the_most_telling_is_told(field: str, clauses: str, told: str) -> None:
    found = {c: [Mismatch(c, field, "a", (0,), 1, 2)] for c in clauses.split()}
    for order in (found, dict(reversed(found.items()))):
        first = first_divergence(order)
        assert first is not None
        assert first.clause_id == told


def test_wrong_logits_of_a_padded_step_are_not_paddings_fault_if_they_are_wrong_without_it() -> None:
    m = next(m for m in CPU_MUTANTS if m.id == "attention-offset-of-other-block")
    with mutated("cpu", m.path, m.old, m.new) as copy:
        sides, layout = sides_of(copy.factory, "cpu", None, "slots")
        worlds = [told for seed in range(4) for told in _worlds(sides, layout, seed) if told.failure is not None]
        padded = [told for told in worlds if told.failure.clause_id == "MR-PAD-006"]  # type: ignore[union-attr]
        assert padded
        for told in padded:
            failure = _without_padding(told, sides).failure
            assert failure is not None
            assert failure.clause_id in ("MR-ATTN-001", "MR-ATTN-002")
