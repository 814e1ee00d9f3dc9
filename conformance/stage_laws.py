"""Stages alone: each is given a random batch and garbage in its outputs, and is held against the oracle's stage.

Whole steps cannot show everything: what a stage does to the far end of a buffer, to a row of -1 or to a block id
beyond 2^27 is seen here only. Works on any two `StageSet`s with the same stage names; a stage that the candidate does
not list is not judged.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from conformance.context import MOST_MISMATCHES, Mismatch
from conformance.probe import probe
from conformance.slot_stage_laws import STAGES_OF_LAWS, slot_laws
from conformance.stage_case import VALUES, StageCase
from conformance.stage_cases import draw_cases
from runner_api import Capability, StageSet, load_stages

if TYPE_CHECKING:
    from conformance.probes import Bench

# Batches that the probe draws.
BATCHES = 3


@probe("STAGE-001..STAGE-009 SLOT-005..SLOT-009 DCP-001..DCP-008", Capability.STAGES)
def stages_alone(bench: Bench) -> dict[str, list[Mismatch]]:
    """The probe: the candidate's stages on a few batches, beside the `cpu` runner's."""
    candidate = load_stages(bench.runner)
    found: dict[str, list[Mismatch]] = {}
    for seed in range(BATCHES):
        for clause_id, mismatches in _judge(candidate, _oracles_cases(seed), seed).items():
            found.setdefault(clause_id, []).extend(mismatches)
    return found


def check_stages(candidate: StageSet, oracle: StageSet, seed: int) -> dict[str, list[Mismatch]]:
    """One random batch: the mismatches of each clause that it put to the test."""
    return _judge(candidate, _solved(oracle, seed), seed)


Solved = tuple[tuple[StageCase, dict[str, Any]], ...]  # calls, and what they must give


def _solved(oracle: StageSet, seed: int) -> Solved:
    cases = draw_cases(np.random.default_rng(seed), oracle)
    return tuple((case, oracle.run(case.stage, **case.arrays)) for case in cases)


@cache
def stages_of_clauses() -> dict[str, tuple[frozenset[str], ...]]:
    """Clause id to the sets of stages that put it to the test: one of them is enough to be judged by it."""
    found: dict[str, set[frozenset[str]]] = {}
    for seed in range(BATCHES):
        for case, _ in _oracles_cases(seed):
            for clause_id in [VALUES, *(region[0] for region in case.regions if region[2].any())]:
                found.setdefault(clause_id, set()).add(frozenset({case.stage}))
    for clause_id, stages in STAGES_OF_LAWS.items():
        found.setdefault(clause_id, set()).add(stages)
    return {clause_id: tuple(sorted(sets, key=sorted)) for clause_id, sets in found.items()}


def stages_lacking(clause_id: str, offered: Collection[str]) -> tuple[str, ...]:
    """What a runner that lists the stages `offered` would have to list too, to be judged by a clause about stages.

    In words, for the reason why a clause is skipped. Empty if it is judged, and for clauses of whole steps.
    """
    ways = stages_of_clauses().get(clause_id, ())
    if not ways or any(stages <= set(offered) for stages in ways):
        return ()
    shortest = min((stages - set(offered) for stages in ways), key=lambda s: (len(s), sorted(s)))
    more = f" or one of {len(ways) - 1} others" if len(ways) > 1 else ""
    return (f"stage {' and '.join(sorted(shortest))}{more}",)


def stages_judged() -> frozenset[str]:
    """Every stage that some clause speaks of."""
    return frozenset(name for sets in stages_of_clauses().values() for stages in sets for name in stages)


@cache
def _oracles_cases(seed: int) -> Solved:
    """They do not depend on who is judged: worked out once, however many are."""
    return _solved(load_stages("cpu"), seed)


def _judge(candidate: StageSet, cases: Solved, seed: int) -> dict[str, list[Mismatch]]:
    found: dict[str, list[Mismatch]] = {}
    for case, expected in cases:
        if case.stage not in candidate.stages:
            continue
        try:
            got = candidate.run(case.stage, **case.arrays)
        except Exception as e:  # every batch is legal; the other stages are still worth a look
            found.setdefault(VALUES, []).append(Mismatch(VALUES, case.stage, None, (), repr(e), "no exception"))
            continue
        for clause_id, output, mask in case.regions:
            if mask.any():
                name = f"{case.stage}.{output}"
                wrong = _differences(got[output], expected[output], mask, case.bounds.get(output), clause_id, name)
                found.setdefault(clause_id, []).extend(wrong)
    for clause_id, wrong in slot_laws(candidate, np.random.default_rng([seed, 1])).items():
        found.setdefault(clause_id, []).extend(wrong)
    return found


def _differences(
    got: Any, expected: Any, mask: np.ndarray, bound: np.ndarray | float | None, clause_id: str, name: str
) -> list[Mismatch]:
    a, b = _joined(got), _joined(expected)
    right = (a == b) | ((a != a) & (b != b))  # a NaN is right where one is due
    if bound is not None:
        with np.errstate(invalid="ignore"):
            right |= np.abs(a.astype(np.float64) - b.astype(np.float64)) <= bound
    wrong = mask & ~right
    return [
        Mismatch(clause_id, name, None, tuple(int(i) for i in at), a[tuple(at)].item(), b[tuple(at)].item())
        for at in np.argwhere(wrong)[:MOST_MISMATCHES]
    ]


def _joined(value: Any) -> np.ndarray:
    """Tables of several groups side by side; unsigned words as the signed ones of the same bits."""
    array = np.concatenate(value, axis=1) if isinstance(value, list) else np.asarray(value)
    return array.view(np.int64) if array.dtype == np.uint64 else array
