"""Our kernels under the sanitizer: clean with every check on, in permuted orders; a store one place off is found."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

import torch

from conformance.kernel_battery import KernelCase, Side, kernel_cases
from conformance.kernel_mutants import STAGES
from conformance.kernel_mutations import OFFSET, KernelMutant, mutants_of
from conformance.mutation import mutated
from conformance.triton_sanitizer import KernelFault, fast_interpreter, sanitize
from gpu_backend import triton_support
from runner_api import StageSet, load_stages

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not triton_support.INTERPRETED, reason="judges kernels in the interpreter"),
]
CASES = kernel_cases()
OURS = load_stages("gpu")  # brings every module with kernels
ENTRIES = {**triton_support.KERNEL_LAUNCHES, **triton_support.PROBE_LAUNCHES}
# A running sum over the batch, which one program carries from tile to tile.
ONE_PROGRAM = {"_prepare_query_start_loc_kernel"}
# Divides with float32's correctly rounded division, which takes nothing else; logits are float32 by contract.
FLOAT32_ALONE = ("apply_temperature",)


def run(case: KernelCase, side: Side) -> None:
    support = sys.modules[f"{side.package}.triton_support"]
    support.TILE_LIMIT = case.tile
    try:
        with np.errstate(all="ignore"):
            case.run(side)
    finally:
        support.TILE_LIMIT = 65536


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Most programs that each kernel was launched with."""
    most: dict[str, int] = dict.fromkeys(ENTRIES, 0)
    launch = triton_support.launch

    def spy(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        most[kernel.__name__] = max(most[kernel.__name__], int(np.prod(grid)))
        launch(kernel, grid, *args, **constants)

    for name, module in list(sys.modules.items()):
        if name.startswith("gpu_backend.") and getattr(module, "launch", None) is launch:
            monkeypatch.setattr(module, "launch", spy)
    return most


@pytest.mark.parametrize("order", [None, 3])
def test_clean_in_float32(order: int | None, grids: dict[str, int]) -> None:
    side = Side("gpu_backend", OURS, is_twin=False)
    with sanitize(poison="auto", order=order) as session:
        assert session.active
        for case in CASES:
            run(case, side)
    assert session.launches >= len(CASES)
    assert {name for name, programs in grids.items() if programs < 2} == ONE_PROGRAM


def in_bfloat16(array: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor


def test_clean_in_bfloat16() -> None:
    stages: StageSet = replace(OURS, to_device=in_bfloat16, to_host=lambda t: t.float().numpy())
    side = Side("gpu_backend", stages, is_twin=False)
    floats = ("paged_attention", "reshape_and_cache", "gumbel")
    chosen = [c for c in CASES if c.name.startswith(floats)]
    assert {c.name.split()[0] for c in chosen} >= {"paged_attention", "reshape_and_cache"}
    with sanitize(poison="auto", order=1) as session:
        for case in chosen:
            if not case.name.startswith(FLOAT32_ALONE):
                run(case, side)
    assert session.programs > 100


def one_off_stores() -> Iterator[KernelMutant]:
    """For each entry kernel, its stores moved by one place."""
    root = Path(triton_support.__file__).parent
    for file in sorted(root.rglob("*.py")):
        text = file.read_text("utf-8")
        for mutant in mutants_of(str(file.relative_to(root)), text):
            if (
                mutant.kind == OFFSET
                and mutant.function in ENTRIES
                and re.search(r"tl\.(store|atomic_\w+)\(", text.splitlines()[mutant.line - 1])
            ):
                yield mutant


def cases_by_kernel() -> dict[str, list[KernelCase]]:
    """The cases that launch each kernel."""
    side = Side("gpu_backend", OURS, is_twin=False)
    counts = (triton_support.KERNEL_LAUNCHES, triton_support.PROBE_LAUNCHES)
    reached: dict[str, list[KernelCase]] = {}
    with fast_interpreter():
        for case in CASES:
            before = {**counts[0], **counts[1]}
            run(case, side)
            for name, count in {**counts[0], **counts[1]}.items():
                if count > before[name]:
                    reached.setdefault(name, []).append(case)
    return reached


def test_a_store_one_place_off_is_found_in_each() -> None:
    reached = cases_by_kernel()
    found: dict[str, set[str]] = {}
    for mutant in one_off_stores():
        if found.get(mutant.function):
            continue
        with mutated(f"gpu_backend.{STAGES}", mutant.path, mutant.original, mutant.source) as copy:
            side = Side(copy.alias, copy.factory(), is_twin=False)
            for case in reached[mutant.function]:
                try:
                    with sanitize(poison="auto"):
                        run(case, side)
                except KernelFault as fault:
                    if fault.where.kernel == mutant.function:
                        found.setdefault(mutant.function, set()).add(fault.kind.value)
                        break
    assert set(found) == set(ENTRIES), set(ENTRIES) - set(found)
