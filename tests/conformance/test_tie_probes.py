"""Ties of the witness model itself: where they are, and who notices that they go to the wrong token."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.clauses import load_clauses
from conformance.mutants import CPU_MUTANTS
from conformance.mutation import mutated
from conformance.probes import MODEL, Bench
from conformance.tie_probes import TIES, ties_of_the_model_go_to_the_lowest_id
from conformance.truth import witness_logits
from cpu_reference.runner import CAPABILITIES
from runner_api import Capability

GENERATE = frozenset({Capability.GENERATE})


def test_two_tokens_share_the_highest_logit() -> None:
    for prompt, tied in TIES:
        logits = witness_logits(MODEL, [prompt])[0]
        assert tuple(np.flatnonzero(logits == logits.max()).tolist()) == tied


@pytest.mark.parametrize("name", ["ties-to-last", "ties-of-two-halves-to-last"])
@pytest.mark.parametrize("offered", [GENERATE, CAPABILITIES])
def test_the_higher_token_is_noticed(name: str, offered: frozenset[Capability]) -> None:
    """By runners without logits in their records too, and without imposed ones."""
    told = ["MR-OUT-004"] if offered == GENERATE else ["MR-OUT-004", "MR-SAMPLE-001"]
    assert all(not load_clauses()[c].missing(offered) for c in told)
    mutant = next(m for m in CPU_MUTANTS if m.id == name)
    with mutated("cpu", mutant.path, mutant.old, mutant.new) as copy:
        found = ties_of_the_model_go_to_the_lowest_id(Bench(copy.factory, offered))
    assert {c: [(m.got, m.expected) for m in wrong] for c, wrong in found.items()} == {
        c: [((high,), (low,)) for _, (low, high) in TIES] for c in told
    }
    assert not any(ties_of_the_model_go_to_the_lowest_id(Bench("cpu", offered)).values())
