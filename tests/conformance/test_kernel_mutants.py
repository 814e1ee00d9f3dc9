"""The kernel mutator: which changes it makes, how a mutant dies, and that a sample of ours does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

from conformance import kernel_mutants
from conformance.kernel_battery import differences
from conformance.kernel_equivalents import EQUIVALENT
from conformance.kernel_mutants import Fate, Report, sample_of
from conformance.kernel_mutations import jit_functions, mutants_of
from gpu_backend.triton_support import INTERPRETED

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not INTERPRETED, reason="mutants run in the interpreter"),
]

KERNEL = '''
import triton
import triton.language as tl

def host(n):
    return n + 1

@triton.jit
def helper(x):
    """Doc with 1 number."""
    return x * 3

@triton.jit(do_not_specialize=["n"])
def kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0)
    tl.store(y + i, tl.where(v > 2, helper(v), tl.minimum(v, 7)), mask=i < n)
'''


def changes(text: str = KERNEL) -> set[tuple[str, str, str, str]]:
    return {(m.function, m.kind, m.old, m.new) for m in mutants_of("a.py", text)}


def test_only_jitted_bodies_are_changed() -> None:
    assert {m.function for m in mutants_of("a.py", KERNEL)} == {"helper", "kernel"}
    assert [(f.name, f.calls) for f in jit_functions(KERNEL)] == [
        ("helper", frozenset()),
        ("kernel", frozenset({"helper"})),
    ]
    assert not any("Doc" in old or "do_not_specialize" in old for _, _, old, _ in changes())


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("comparison", "i < n", "(i) <= (n)"),
        ("comparison", "v > 2", "(v) <= (2)"),
        ("constant", "7", "8"),
        ("constant", "7", "6"),
        ("dropped term", "x * 3", "(x)"),
        ("operator", "x + i", "(x) - (i)"),
        ("swapped pointer", "x", "y"),
        ("min/max", "tl.minimum(v, 7)", "tl.maximum(v, 7)"),
        ("mask", "tl.load(x + i, mask=i < n, other=0)", "tl.load(x + i)"),
        ("offset", "tl.load(x + i, mask=i < n, other=0)", "tl.load((x + i) - 1, mask=i < n, other=0)"),
    ],
)
def test_each_kind_of_change_is_made(kind: str, old: str, new: str) -> None:
    assert (kind, old, new) in {c[1:] for c in changes()}


def test_a_store_may_go_and_branches_be_swapped() -> None:
    kinds = {(kind, new) for _, kind, _, new in changes()}
    assert ("dropped statement", "pass") in kinds
    assert ("where", "tl.where(v > 2, tl.minimum(v, 7), helper(v))") in kinds


def test_changes_that_cannot_matter_are_not_made() -> None:
    """The value is stored under the mask that it was loaded with; under another one `other` would show."""
    assert not any(kind == "other" for _, kind, _, _ in changes())
    assert any(kind == "other" for _, kind, _, _ in changes(KERNEL.replace("7)), mask=i < n", "7)), mask=i < n + 1")))
    assert any(kind == "other" for _, kind, _, _ in changes(KERNEL.replace("tl.where(v", "tl.where(tl.max(v, 0)")))


def test_a_mutant_changes_one_expression_and_nothing_else() -> None:
    for mutant in mutants_of("a.py", KERNEL):
        assert mutant.old in mutant.original.splitlines()[mutant.line - 1]
        differing = [a for a, b in zip(KERNEL.splitlines(), mutant.source.splitlines(), strict=True) if a != b]
        assert len(differing) == 1
        compile(mutant.source, "a.py", "exec")


def test_lines_above_do_not_change_a_mutants_name() -> None:
    here = {m.id for m in mutants_of("a.py", KERNEL)}
    assert {m.id for m in mutants_of("a.py", "\n# more\n" + KERNEL)} == here


def test_a_sample_is_always_the_same_and_spread() -> None:
    mutants = mutants_of("a.py", KERNEL)
    assert sample_of(mutants, 5) == sample_of(mutants, 5)
    assert len({m.line for m in sample_of(mutants, 5)}) >= 3
    assert sample_of(mutants, None) == mutants == sample_of(mutants, 10_000)


def test_differences_name_the_element_and_take_bounds_and_nan() -> None:
    nan = np.float32([np.nan, 1.0, 2.0])
    assert differences({"out": [nan]}, {"out": [nan]}, {}) == []
    found = differences({"out": [nan + np.float32([0, 0, 1])]}, {"out": [nan]}, {})
    assert found == ["out[0][2]: 3.0 instead of 2.0"]
    assert differences({"out": [np.float32([1.5])]}, {"out": [np.float64([1.0])]}, {"out": 0.5}) == []
    assert differences({"out": [np.float32([np.nan])]}, {"out": [np.float64([1.0])]}, {"out": 0.5})


def test_the_score_leaves_out_what_cannot_be_killed() -> None:
    mutant = mutants_of("a.py", KERNEL)[0]
    fates = [Fate(mutant, "killed", "")] * 19 + [Fate(mutant, "survived", "")] + [Fate(mutant, "unseen", "")]
    report = Report(tuple(fates), (), 0.0)
    assert report.score == 0.95
    assert report.enough
    assert not replace(report, wrong=("declared equivalent, but noticed",)).enough
    assert not replace(report, fates=(*fates, Fate(mutant, "survived", ""))).enough
    assert replace(report, fates=(*fates, Fate(mutant, "equivalent", "why"))).score == 0.95


class Behaving:
    """A battery whose mutants do what they are called."""

    wrong: tuple[str, ...] = ()

    def judge_mutant(self, mutant: str) -> str:
        end = time.monotonic() + {"spins": 3600.0, "sleeps": 3600.0}.get(mutant, 1.5)
        while time.monotonic() < end:
            if mutant != "spins":
                time.sleep(0.01)
        return ""


def test_a_mutant_has_its_processor_time_however_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_mutants, "LONGEST", 1)
    monkeypatch.setattr(kernel_mutants, "WAITS", 5)
    told = dict(kernel_mutants._noticed(Behaving(), ["spins", "is kept waiting", "sleeps"], 3))  # type: ignore[arg-type]
    assert told == {"spins": "does not end within 1 s", "is kept waiting": "", "sleeps": "waits for ever: 5 s"}


def run(*argv: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "conformance.kernel_mutants", "--json", *argv],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_a_sample_of_our_kernels_mutants_is_killed() -> None:
    rc, report = run("--sample", "100")
    assert report["wrong"] == []
    assert report["total"] == 100
    assert report["score"] >= 0.95, report["survivors"]
    assert rc == 0, report


def test_too_many_or_stale_declarations_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    mutants = mutants_of("a.py", KERNEL)
    monkeypatch.setattr(kernel_mutants, "EQUIVALENT", {m.id: "why" for m in mutants[:2]} | {"gone": "why"})
    assert [text.partition(":")[0] for text in kernel_mutants.wrong_declarations(mutants)] == [
        "declared equivalent, but no such mutant",
        f"{2 / len(mutants):.1%} of the mutants are declared equivalent, at most 3% may be",
    ]


def test_every_equivalent_has_a_reason() -> None:
    assert all(len(reason) > 20 for reason in EQUIVALENT.values())
