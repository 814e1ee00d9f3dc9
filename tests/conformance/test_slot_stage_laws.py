"""The clauses about kernel blocks and ranks: each fault is told under its own, with an oracle beside it or without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.slot_stage_cases import ranks_of
from conformance.slot_stage_laws import LAWS_OF, slot_laws
from conformance.stage_laws import check_stages
from runner_api import PAD_SLOT_ID, StageSet, load_stages

MAP, SLOTS, LOCAL = "map_to_kernel_block_table", "compute_slot_mappings", "compute_dcp_local_seq_lens"


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


def told(found: dict[str, Any]) -> set[str]:
    return {clause.removeprefix("MR-") for clause, mismatches in found.items() if mismatches}


def test_positions_are_dealt_out_in_runs() -> None:
    assert ranks_of(11, 2, 3).tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert ranks_of(4, 1, 2).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_the_oracle_keeps_the_laws_that_need_no_oracle(oracle: StageSet, seed: int) -> None:
    found = slot_laws(oracle, np.random.default_rng(seed))
    assert set(found) == {clause for clauses in LAWS_OF.values() for clause in clauses}
    assert not told(found)


def _one_more(slot_mappings: np.ndarray, dcp_size: int, **_: Any) -> None:
    if dcp_size > 1:
        slot_mappings[slot_mappings != PAD_SLOT_ID] += 1


def _nobodys(slot_mappings: np.ndarray, dcp_size: int, **_: Any) -> None:
    if dcp_size > 1:
        slot_mappings[0, 0] = PAD_SLOT_ID


def _twice(slot_mappings: np.ndarray, dcp_size: int, **_: Any) -> None:
    if dcp_size > 1:
        slot_mappings[0][slot_mappings[0] == PAD_SLOT_ID] = 3


def _null_is_null(block_table: np.ndarray, kernel_block_table: np.ndarray, blocks_per_kv_block: int, **_: Any) -> None:
    kernel_block_table[np.repeat(block_table == 0, blocks_per_kv_block, axis=1)] = 0


def _other_order(kernel_block_table: np.ndarray, num_rows: int, **_: Any) -> None:
    kernel_block_table[:num_rows] = kernel_block_table[:num_rows, ::-1].copy()


FAULTS = [
    (SLOTS, _one_more, {"DCP-004"}, {"DCP-004"}),
    (SLOTS, _nobodys, {"DCP-001"}, {"DCP-001", "DCP-004", "DCP-005"}),
    (SLOTS, _twice, {"DCP-003"}, {"DCP-001", "DCP-004", "DCP-005"}),
    (LOCAL, lambda dcp_local_seq_lens, **_: dcp_local_seq_lens.__iadd__(1), {"DCP-005", "DCP-006"}, {"DCP-005"}),
    (MAP, _null_is_null, {"SLOT-006"}, set()),
    (MAP, _other_order, {"SLOT-005", "SLOT-007"}, {"SLOT-008", "SLOT-009"}),
    (MAP, lambda kernel_block_table, **_: kernel_block_table.__setitem__(-1, 7), {"STAGE-002"}, {"SLOT-008"}),
]


@pytest.mark.parametrize(("stage", "after", "beside", "alone"), FAULTS)
def test_a_fault_is_told_under_its_clause(
    oracle: StageSet, stage: str, after: Callable[..., None], beside: set[str], alone: set[str]
) -> None:
    """beside: found by the oracle's answer, among others; alone: by the laws between calls, and these only."""
    candidate = changed(oracle, stage, after)
    laws = set().union(*(told(slot_laws(candidate, np.random.default_rng(seed))) for seed in range(3)))
    assert laws == alone
    assert beside | alone <= set().union(*(told(check_stages(candidate, oracle, seed)) for seed in range(3)))


def test_what_is_not_offered_is_not_judged_and_an_exception_is_a_mismatch(oracle: StageSet) -> None:
    def fail(**_: Any) -> None:
        raise IndexError("out of range")

    random = np.random.default_rng(0)
    assert told(slot_laws(changed(oracle, LOCAL, fail), random)) == {"DCP-001", "DCP-004", "DCP-005"}
    rest = {n: s for n, s in oracle.stages.items() if n != LOCAL}
    assert set(slot_laws(replace(oracle, stages=rest), random)) == {"MR-SLOT-008", "MR-SLOT-009"}
    assert slot_laws(replace(oracle, stages={}), random) == {}
