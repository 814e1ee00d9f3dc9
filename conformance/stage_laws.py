"""Stages alone: each is given a random batch and garbage in its outputs, and is held against the oracle's stage.

Whole steps cannot show everything: what a stage does to the far end of a buffer, to a row of -1 or to a block id
beyond 2^27 is seen here only. Works on any two `StageSet`s with the same stage names; a stage that the candidate does
not list is not judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from conformance.context import MOST_MISMATCHES, Mismatch
from conformance.stage_cases import VALUES, draw_cases
from runner_api import Capability, StageSet, load_stages

if TYPE_CHECKING:
    from conformance.probes import Bench

# Batches that the probe draws.
BATCHES = 3


def stages_alone(bench: Bench) -> dict[str, list[Mismatch]]:
    """The probe: the candidate's stages on a few batches, beside the `cpu` runner's."""
    if Capability.STAGES not in bench.capabilities:
        return {}
    runner: Any = bench.runner
    candidate = load_stages(runner) if isinstance(runner, str) else runner.stages()
    found: dict[str, list[Mismatch]] = {}
    for seed in range(BATCHES):
        for clause_id, mismatches in check_stages(candidate, load_stages("cpu"), seed).items():
            found.setdefault(clause_id, []).extend(mismatches)
    return found


def check_stages(candidate: StageSet, oracle: StageSet, seed: int) -> dict[str, list[Mismatch]]:
    """One random batch: the mismatches of each clause that it put to the test."""
    found: dict[str, list[Mismatch]] = {}
    for case in draw_cases(np.random.default_rng(seed), oracle):
        if case.stage not in candidate.stages:
            continue
        expected = oracle.run(case.stage, **case.arrays)
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
    return found


def _differences(
    got: Any, expected: Any, mask: np.ndarray, bound: np.ndarray | float | None, clause_id: str, name: str
) -> list[Mismatch]:
    a, b = _joined(got), _joined(expected)
    if bound is None:
        wrong = mask & (a != b)
    else:
        wrong = mask & ~(np.abs(a.astype(np.float64) - b.astype(np.float64)) <= bound)
    return [
        Mismatch(clause_id, name, None, tuple(int(i) for i in at), a[tuple(at)].item(), b[tuple(at)].item())
        for at in np.argwhere(wrong)[:MOST_MISMATCHES]
    ]


def _joined(value: Any) -> np.ndarray:
    """Tables of several groups side by side; unsigned words as the signed ones of the same bits."""
    array = np.concatenate(value, axis=1) if isinstance(value, list) else np.asarray(value)
    return array.view(np.int64) if array.dtype == np.uint64 else array
