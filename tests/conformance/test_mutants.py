"""The clauses notice every planted fault, and a mutant is not called killed for the wrong reason."""

from __future__ import annotations

import argparse
import json
import os

import pytest

from conformance import kill_matrix
from conformance.clauses import load_clauses
from conformance.commands import mutants as add_mutants_parser
from conformance.gpu_mutants import GPU_MUTANTS
from conformance.kill_matrix import Findings, Verdict, judge, run_matrix
from conformance.mutants import CPU_MUTANTS, KINDS, MUTANTS, Mutant
from conformance.mutation import mutated
from conformance.sampling_mutants import SAMPLING_MUTANTS
from runner_api import ConfigError, UnknownNameError

SEEN, OTHERS = "MR-SLOT-001", ("MR-SLOT-002", "MR-KV-001", "MR-INPUT-001")
MUTANT = Mutant("m", "slot_mapping.py", "a", "b", (SEEN,), "K4", "")
ALL = frozenset({SEEN, *OTHERS})


def test_there_are_enough_mutants_all_distinct_and_spread() -> None:
    assert len(CPU_MUTANTS) >= 40
    assert len({m.id for m in CPU_MUTANTS}) == len(CPU_MUTANTS)
    assert len({(m.layout, m.path, m.old, m.new) for m in CPU_MUTANTS}) == len(CPU_MUTANTS)
    assert len({m.path for m in CPU_MUTANTS}) >= 12
    assert len({m.kind for m in CPU_MUTANTS}) >= 12


@pytest.mark.parametrize("mutant", CPU_MUTANTS, ids=lambda m: m.id)
def test_the_mutant_fits_the_code_and_names_known_clauses(mutant: Mutant) -> None:
    with mutated("cpu", mutant.path, mutant.old, mutant.new):
        pass
    assert mutant.clauses
    assert not set(mutant.clauses) - set(load_clauses())
    assert mutant.kind in KINDS
    assert mutant.why.endswith(".")


@pytest.fixture(scope="module")
def matrix() -> kill_matrix.KillMatrix:
    return run_matrix("cpu")


@pytest.mark.slow
def test_every_mutant_is_killed(matrix: kill_matrix.KillMatrix) -> None:
    assert not matrix.broken_clauses, "the unchanged runner fails"
    assert [f"{v.mutant}: {v.reason}" for v in matrix.survivors] == []
    assert matrix.complete
    assert len(matrix.verdicts) == len(CPU_MUTANTS)
    print(f"\nclauses without a mutant: {', '.join(matrix.unproven_clauses)}")
    print(f"{len(matrix.verdicts)} mutants in {matrix.seconds:.1f} s")


@pytest.mark.slow
def test_no_clause_fails_for_every_mutant(matrix: kill_matrix.KillMatrix) -> None:
    """A clause that goes off whatever is wrong says nothing about where."""
    for clause in load_clauses():
        assert sum(clause in v.failed for v in matrix.verdicts) <= len(matrix.verdicts) * 2 // 3, clause


@pytest.mark.parametrize(
    ("findings", "killed", "reason"),
    [
        (Findings(frozenset({SEEN}), ALL), True, ""),
        (Findings(frozenset({SEEN, OTHERS[0]}), ALL, ("IndexError: x",)), True, ""),
        (Findings(frozenset({SEEN, *OTHERS[:2]}), ALL), False, "too many clauses failed: 2 of 3"),
        (Findings(frozenset(OTHERS[:1]), ALL), False, "killed by other clauses only: MR-SLOT-002"),
        (Findings(frozenset(), ALL, ("IndexError: x",)), False, "died of an exception: IndexError: x"),
        (Findings(frozenset(), frozenset(OTHERS)), False, "none of its clauses was tested"),
        (Findings(frozenset(), ALL), False, "noticed by no clause"),
    ],
)
def test_judgement(findings: Findings, killed: bool, reason: str) -> None:
    named = frozenset(MUTANT.clauses)
    assert judge(named, findings) == (killed, reason) if killed else judge(named, findings)[1].startswith(reason)
    assert judge(named, findings)[0] is killed


def test_a_clause_that_the_unchanged_runner_fails_kills_nothing() -> None:
    assert not judge(frozenset(MUTANT.clauses), Findings(frozenset({SEEN}), ALL), broken=frozenset({SEEN}))[0]


def test_an_equivalent_mutant_survives() -> None:
    """A change without effect must not be reported as killed, however often it is tried."""
    old = "row = int(idx_mapping[i])"
    same = Mutant("same", "block_table.py", old, f"{old} + 0", (SEEN,), "K3", "")
    found = run_matrix("cpu", mutants=[same], seeds=(0,), steps=10, jobs=1)
    assert [(v.killed, v.failed) for v in found.verdicts] == [(False, ())]
    assert not found.complete


def test_an_evaluation_ends_when_every_named_clause_has_failed() -> None:
    """The verdict is what a whole evaluation gives, and fewer clauses have been tested."""
    mutant = next(m for m in CPU_MUTANTS if m.id == "trace-one-ahead")
    named = frozenset(mutant.clauses)
    with mutated("cpu", mutant.path, mutant.old, mutant.new) as copy:
        short = kill_matrix.findings_of(copy.factory, (0,), 10, named)
        whole = kill_matrix.findings_of(copy.factory, (0,), 10)
    assert named <= short.failed <= whole.failed
    assert kill_matrix.ENOUGH_OTHERS <= len(short.tested - named) < len(whole.tested) - 30
    assert judge(named, short) == judge(named, whole) == (True, "")


def test_sampling_has_mutants_at_many_places() -> None:
    places = {(m.path, m.old) for m in SAMPLING_MUTANTS}
    assert len(places) >= 80
    assert len({m.path for m in SAMPLING_MUTANTS}) >= 18
    named = {c for m in SAMPLING_MUTANTS for c in m.clauses}
    assert {c for c in load_clauses() if c.split("-")[1] == "GRAMMAR"} <= named


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_mutants_parser(parser.add_subparsers())
    return parser.parse_args(["mutants", *arguments])


def test_command_prints_json_and_says_who_survives(monkeypatch, capsys) -> None:
    monkeypatch.setattr(kill_matrix, "findings_of", lambda *_: Findings(frozenset(), ALL))
    args = parse("--json", "--jobs", "1", "--only", "slot-tail-stale")
    assert args.run(args) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["killed"], answer["total"]) == (0, 1)
    assert answer["seconds"] >= 0
    assert answer["survivors"][0]["mutant"] == "slot-tail-stale"
    assert answer["matrix"] == {"slot-tail-stale": []}


def test_command_ends_with_0_if_all_are_killed(monkeypatch, capsys) -> None:
    def findings(runner, *_):
        return Findings(frozenset() if runner == "cpu" else frozenset({"MR-PAD-004"}), ALL | {"MR-PAD-004"})

    monkeypatch.setattr(kill_matrix, "findings_of", findings)
    args = parse("--jobs", "1", "--only", "slot-tail-stale")
    assert args.run(args) == 0
    assert "1 of 1 mutants of cpu killed" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("--runner", "cpx"), ("--only", "no-such-mutant")])
def test_command_refuses_unknown_names(arguments: tuple[str, ...]) -> None:
    args = parse(*arguments)
    with pytest.raises(UnknownNameError, match="unknown"):
        args.run(args)


@pytest.mark.parametrize(
    "arguments",
    [("--only", "dense-swap-by-views", "--layout", "slots"), ("--only", "slot-tail-stale", "--layout", "dense")],
)
def test_command_refuses_a_mutant_of_the_other_layout(arguments: tuple[str, ...]) -> None:
    args = parse(*arguments)
    with pytest.raises(ConfigError, match="of the other layout"):
        args.run(args)


def test_a_runner_without_mutants_is_refused() -> None:
    with pytest.raises(UnknownNameError):
        run_matrix("no such runner")
    assert set(MUTANTS) >= {"cpu"}


def test_verdicts_keep_the_order_of_the_mutants(monkeypatch) -> None:
    monkeypatch.setattr(kill_matrix, "findings_of", lambda *_: Findings(frozenset(), ALL))
    few = CPU_MUTANTS[::12]
    monkeypatch.setitem(MUTANTS, "cpu", few)
    seen: list[Verdict] = []
    found = run_matrix("cpu", seeds=(0,), jobs=1, progress=seen.append)
    assert [v.mutant for v in found.verdicts] == [m.id for m in few] == [v.mutant for v in seen]


def _ends_for_three(number: int) -> int:
    if number == 3:
        os._exit(9)
    return 10 * number


def test_a_process_that_dies_takes_no_other_with_it() -> None:
    answers = kill_matrix._spread(_ends_for_three, [1, 2, 3, 4], 2, died=lambda number: -number)
    assert list(answers) == [10, 20, -3, 40]
    assert not kill_matrix._died(("gpu", GPU_MUTANTS[0], (0,), 1, frozenset())).killed
