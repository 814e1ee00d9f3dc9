"""Every kind of fault is planted on both runners and in both layouts, at distinct places, and a sample is found."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from conformance.clauses import load_clauses
from conformance.gpu_mutants import GPU_MUTANTS
from conformance.kill_matrix import SIZES, try_mutant
from conformance.mutant import KINDS, Mutant
from conformance.mutant_kinds import kind_table, table_as_text
from conformance.mutants import CPU_MUTANTS, MUTANTS

ROOTS = {"cpu": "cpu_reference", "gpu": "gpu_backend"}
GPU_SAMPLE = ("seq-lens-tail-stale", "gather-by-batch-index", "first-mask-is-none", "dense-logits-of-first-tokens")


def source(runner: str, mutant: Mutant) -> str:
    spec = find_spec(ROOTS[runner])
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / mutant.path).read_text(encoding="utf-8")


def line_of(runner: str, mutant: Mutant) -> tuple[str, int]:
    """File and line of the change, as far as both texts agree at their beginning."""
    same = next((i for i, (a, b) in enumerate(zip(mutant.old, mutant.new, strict=False)) if a != b), len(mutant.new))
    text = source(runner, mutant)
    return mutant.path, text[: text.index(mutant.old) + min(same, len(mutant.old))].count("\n") + 1


def test_every_kind_is_planted_everywhere() -> None:
    assert list(KINDS) == [f"K{n}" for n in range(1, 20)]
    table = kind_table()
    assert len(table) == 19 * 2 * 2
    assert [cell for cell, n in table.items() if n == 0] == []
    assert sum(table.values()) == sum(map(len, MUTANTS.values()))


def test_the_table_is_readable() -> None:
    lines = table_as_text().splitlines()
    assert lines[0].split()[:5] == ["kind", "cpu", "slots", "cpu", "dense"]
    assert [line.split()[0] for line in lines[1:]] == list(KINDS)


@pytest.mark.parametrize("runner", MUTANTS)
def test_no_two_mutants_are_the_same_change(runner: str) -> None:
    mutants = MUTANTS[runner]
    assert len({m.id for m in mutants}) == len(mutants)
    assert len({(m.layout, m.path, m.old, m.new) for m in mutants}) == len(mutants)


def test_mutants_stand_at_many_places() -> None:
    places = {line_of("cpu", m) for m in CPU_MUTANTS}
    assert len(places) >= 200
    assert len({path for path, _ in places}) >= 30
    assert len({line_of("gpu", m) for m in GPU_MUTANTS}) >= 45


@pytest.mark.parametrize("mutant", GPU_MUTANTS, ids=lambda m: m.id)
def test_a_gpu_mutant_fits_the_code_and_names_known_clauses(mutant: Mutant) -> None:
    text = source("gpu", mutant)
    assert text.count(mutant.old) == 1
    compile(text.replace(mutant.old, mutant.new), mutant.path, "exec")
    clauses = load_clauses()
    assert mutant.clauses
    assert all(clauses[c].layout in (None, mutant.layout) for c in mutant.clauses)
    assert mutant.kind in KINDS
    assert mutant.why.endswith(".")


def test_metamorphic_clauses_have_mutants() -> None:
    """All but that of graphs, which neither runner captures."""
    named = {c for m in CPU_MUTANTS for c in m.clauses if c.startswith("MR-META-")}
    assert named == {c for c in load_clauses() if c.startswith("MR-META-")} - {"MR-META-010"}


@pytest.mark.interpret
@pytest.mark.parametrize("name", GPU_SAMPLE)
def test_a_sample_of_gpu_mutants_is_killed(name: str) -> None:
    pytest.importorskip("gpu_backend.triton_support")
    mutant = next(m for m in GPU_MUTANTS if m.id == name)
    seeds, steps = SIZES["gpu"]
    verdict = try_mutant("gpu", mutant, seeds[:1], steps, frozenset())
    assert verdict.killed, verdict.reason
