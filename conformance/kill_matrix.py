"""Hold every mutant against the clauses: who was noticed, by whom, and who got away.

A mutant is killed if a clause that it names reports a mismatch while at least half of the other tested clauses stay
green: the suite must point at the fault, and neither a crash nor a runner that is wrong everywhere shows that. A
clause that the unchanged runner fails kills nothing. Everything else is a survivor, with the reason.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from conformance.mutants import KINDS, MUTANTS, Mutant
from conformance.mutation import mutated
from runner_api.errors import ConfigError, UnknownNameError
from runner_api.loader import load_factory

T = TypeVar("T")
# A mutant that is not noticed with the plans of the first seed gets the next ones.
SEEDS = (0, 1, 2)
STEPS = 20
# By runner, where kernels may be interpreted and a step takes a hundred times as long: (seeds, steps).
SIZES: dict[str, tuple[tuple[int, ...], int]] = {"gpu": ((0, 1), 8)}
# So many clauses that a mutant does not name must have been tested before an evaluation is cut short.
ENOUGH_OTHERS = 40
# So many clauses without a mutant are listed by name.
SHOWN = 20


@dataclass(frozen=True, slots=True)
class Findings:
    """What one or several evaluations of a runner said, by clause id."""

    failed: frozenset[str] = frozenset()
    tested: frozenset[str] = frozenset()
    errors: tuple[str, ...] = ()

    def __or__(self, other: Findings) -> Findings:
        return Findings(self.failed | other.failed, self.tested | other.tested, self.errors + other.errors)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One mutant's fate. `failed`: the clauses that reported a mismatch, sorted; `reason`: why it survived, or ""."""

    mutant: str
    killed: bool
    reason: str
    failed: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class KillMatrix:
    """All fates, and the clauses that the unchanged runner fails (there should be none)."""

    runner: str
    verdicts: tuple[Verdict, ...]
    broken_clauses: tuple[str, ...]
    unproven_clauses: tuple[str, ...]  # tested, but failed for no mutant that names them (full runs only)
    seconds: float

    @property
    def survivors(self) -> tuple[Verdict, ...]:
        return tuple(v for v in self.verdicts if not v.killed)

    @property
    def complete(self) -> bool:
        """Every mutant is killed, by a suite that the unchanged runner passes."""
        return bool(self.verdicts) and not self.survivors and not self.broken_clauses

    def as_json(self) -> dict[str, Any]:
        return {
            "runner": self.runner,
            "killed": len(self.verdicts) - len(self.survivors),
            "total": len(self.verdicts),
            "seconds": round(self.seconds, 2),
            "survivors": [{"mutant": v.mutant, "reason": v.reason} for v in self.survivors],
            "matrix": {v.mutant: list(v.failed) for v in self.verdicts},
            "broken_clauses": list(self.broken_clauses),
            "clauses_without_mutant": list(self.unproven_clauses),
        }


def judge(named: frozenset[str], findings: Findings, broken: frozenset[str] = frozenset()) -> tuple[bool, str]:
    """(killed, why not). `named`: the mutant's clauses; `broken`: those that the unchanged runner fails too."""
    failed = findings.failed - broken
    others = findings.tested - named
    red = failed & others
    if failed & named:
        if 2 * len(red) > len(others):
            return False, f"too many clauses failed: {len(red)} of {len(others)} that should not care"
        return True, ""
    if failed:
        return False, f"killed by other clauses only: {', '.join(sorted(failed))}"
    if findings.errors:
        return False, f"died of an exception: {findings.errors[0]}"
    if not named & findings.tested:
        return False, f"none of its clauses was tested: {', '.join(sorted(named))}"
    return False, "noticed by no clause"


def findings_of(
    runner: Any, seeds: Sequence[int], steps: int, named: frozenset[str] = frozenset(),
    broken: frozenset[str] = frozenset(), layout: str | None = None,
) -> Findings:  # fmt: skip
    """Evaluate a runner (a name or a factory) and keep what the verdict needs.

    named: what a mutant's clauses are; as soon as each of them has failed, and enough others have been tested to say
    that they do not care, the rest is left out. Probes come first where they speak of a named clause.
    layout: of the rows.
    """
    from conformance.dense_rows import TRACKED
    from conformance.evaluate import Evaluation, evaluate
    from conformance.laws import LAWS

    def so_far(e: Evaluation) -> Findings:
        failed = (c for c, mismatches in e.by_clause.items() if mismatches)
        return Findings(frozenset(failed), frozenset(e.tested), tuple(f"{x.where}: {x.error}" for x in e.errors))

    def enough(e: Evaluation) -> bool:
        found = so_far(e)
        proven = bool(named) and named - broken <= found.failed and len(found.tested - named) >= ENOUGH_OTHERS
        return proven and judge(named, found, broken)[0]

    try:
        seen = LAWS.keys() | TRACKED
        first = any((c not in seen and "-STATE-" not in c) or "-LOGPROB-" in c for c in named)
        factory = load_factory(runner)  # brings triton, if it needs that
        with fast_kernels():
            found = evaluate(
                factory, seeds=tuple(seeds), steps=steps, enough=enough, layout=layout, sought=named if first else ()
            )
        return so_far(found)
    except Exception as x:  # a mutant that the judge cannot stand is one that the judge has not named
        return Findings(errors=(f"in the judge itself: {x!r}",))


@contextmanager
def fast_kernels() -> Iterator[None]:
    """Inside it interpreted kernels take half the time; nothing changes where none are interpreted."""
    if "triton" not in sys.modules:
        yield
        return
    from conformance.triton_sanitizer import fast_interpreter
    from conformance.triton_sanitizer.versions import interpreting

    with fast_interpreter() if interpreting() else nullcontext():
        yield


def try_mutant(runner: str, mutant: Mutant, seeds: Sequence[int], steps: int, broken: frozenset[str]) -> Verdict:
    """Load the mutant and evaluate it, seed after seed, until it is killed or the seeds are used up."""
    start = time.perf_counter()
    named = frozenset(mutant.clauses)
    findings, killed, reason = Findings(), False, ""
    with mutated(runner, mutant.path, mutant.old, mutant.new) as copy:
        for seed in seeds:
            findings |= findings_of(copy.factory, (seed,), steps, named, broken, mutant.layout)
            killed, reason = judge(named, findings, broken)
            if killed:
                break
    return Verdict(mutant.id, killed, reason, tuple(sorted(findings.failed)), time.perf_counter() - start)


def run_matrix(
    runner: str,
    *,
    mutants: Iterable[Mutant] | None = None,
    seeds: Sequence[int] | None = None,
    steps: int | None = None,
    jobs: int | None = None,
    progress: Callable[[Verdict], None] | None = None,
) -> KillMatrix:
    """Every mutant of `runner`, in `jobs` processes (one per core if None; 1 = in this process).

    seeds, steps: of the worlds; None: as this runner's speed allows.

    Raises: `UnknownNameError` for a runner that has no mutants, `ConfigError` for a mutant whose text is gone.
    """
    start = time.perf_counter()
    every = mutants is None
    if mutants is None:
        if runner not in MUTANTS:
            raise UnknownNameError("runner with mutants", runner, MUTANTS, field="runner")
        mutants = MUTANTS[runner]
    mutants = tuple(mutants)
    usual = SIZES.get(runner, (SEEDS, STEPS))
    seeds, steps = usual[0] if seeds is None else seeds, usual[1] if steps is None else steps
    layouts = sorted({m.layout for m in mutants})
    jobs = jobs or os.cpu_count() or 1
    sound = dict(
        zip(layouts, _spread(_soundness, [(runner, seeds, steps, name) for name in layouts], jobs), strict=True)
    )
    tasks = [(runner, m, tuple(seeds), steps, sound[m.layout].failed) for m in mutants]
    verdicts = []
    for verdict in _spread(_try_task, tasks, jobs, _died):
        verdicts.append(verdict)
        if progress is not None:
            progress(verdict)
    proven = {c for m, v in zip(mutants, verdicts, strict=True) if v.killed for c in m.clauses if c in v.failed}
    failed = frozenset().union(*(found.failed for found in sound.values()))
    tested = frozenset().union(*(found.tested for found in sound.values()))
    return KillMatrix(
        runner, tuple(verdicts), tuple(sorted(failed)), tuple(sorted(tested - proven)) if every else (),
        time.perf_counter() - start,
    )  # fmt: skip


def _soundness(task: tuple[str, Sequence[int], int, str]) -> Findings:
    """What the unchanged runner says of itself in one layout."""
    runner, seeds, steps, layout = task
    return findings_of(runner, seeds, steps, frozenset(), frozenset(), layout)


Task = tuple[str, Mutant, tuple[int, ...], int, frozenset[str]]


def _try_task(task: Task) -> Verdict:
    return try_mutant(*task)


def _died(task: Task) -> Verdict:
    """A mutant that takes its process with it has not been noticed by any clause."""
    return Verdict(task[1].id, False, "its process died: it reads or writes outside of its arrays, perhaps", (), 0.0)


def _spread(
    work: Callable[[Any], T], tasks: list[Any], jobs: int, died: Callable[[Any], T] | None = None
) -> Iterable[T]:
    """Answers in the order of the tasks, as they become known.

    died: the answer for a task whose process ends (on a GPU that is what an access out of bounds does); None: raised.
    """
    if jobs == 1 or len(tasks) < 2:
        yield from map(work, tasks)
        return
    known = 0
    try:
        with _processes(min(jobs, len(tasks))) as pool:
            for answer in pool.map(work, tasks):
                known += 1
                yield answer
    except BrokenProcessPool:
        if died is None:
            raise
    # A process that ends takes the whole pool with it: what is left gets a pool for each task.
    with ThreadPoolExecutor(jobs) as threads:
        yield from threads.map(lambda task: _alone(work, task, died), tasks[known:])


def _alone(work: Callable[[Any], T], task: Any, died: Callable[[Any], T] | None) -> T:
    try:
        with _processes(1) as pool:
            return pool.submit(work, task).result()
    except BrokenProcessPool:
        assert died is not None
        return died(task)


def _processes(number: int) -> ProcessPoolExecutor:
    """Fresh ones: a forked child of a program that holds a GPU or threads is not usable."""
    return ProcessPoolExecutor(number, mp_context=multiprocessing.get_context("spawn"))


def run_mutants(args: argparse.Namespace) -> int:
    """The command: 0 = all killed, 1 = some survive or the unchanged runner fails. Misuse is raised."""
    if args.runner not in MUTANTS:
        raise UnknownNameError("runner with mutants", args.runner, MUTANTS, field="--runner")
    if args.jobs is not None and args.jobs < 1:
        raise ConfigError("no process", field="--jobs", got=args.jobs, expected=">= 1")
    by_id = {m.id: m for m in MUTANTS[args.runner]}
    chosen = None
    if args.only:
        if args.only not in by_id:
            raise UnknownNameError("mutant", args.only, by_id, field="--only")
        chosen = [by_id[args.only]]
        if args.layout and chosen[0].layout != args.layout:
            raise ConfigError(
                f"mutant {args.only!r} is of the other layout", field="--layout", got=args.layout,
                expected=chosen[0].layout,
            )  # fmt: skip
    elif args.layout:
        chosen = [m for m in MUTANTS[args.runner] if m.layout == args.layout]
    progress = None if args.json else _print_verdict
    matrix = run_matrix(args.runner, mutants=chosen, jobs=args.jobs, progress=progress)
    if args.json:
        print(json.dumps(matrix.as_json(), indent=1))
    else:
        _print_summary(matrix, by_id)
    return 0 if matrix.complete else 1


def _print_verdict(v: Verdict) -> None:
    by = " ".join(c.removeprefix("MR-") for c in v.failed)
    print(f"killed    {v.mutant:34} {by}" if v.killed else f"SURVIVED  {v.mutant:34} {v.reason}", flush=True)


def _print_summary(matrix: KillMatrix, by_id: dict[str, Mutant]) -> None:
    for v in matrix.survivors:
        m = by_id[v.mutant]
        print(f"\n{m.id} ({m.kind}, {KINDS[m.kind]}): {m.why}\n  {m.path}\n  - {m.old.strip()}\n  + {m.new.strip()}")
        print(f"  should fail {', '.join(m.clauses)}; {v.reason}")
    if matrix.broken_clauses:
        print(f"\nthe unchanged runner fails {', '.join(matrix.broken_clauses)}; these clauses can kill nothing")
    if len(matrix.unproven_clauses) > SHOWN:
        print(f"\n{len(matrix.unproven_clauses)} clauses have no mutant of {matrix.runner} (--json lists them)")
    elif matrix.unproven_clauses:
        print(f"\nclauses without a mutant: {', '.join(matrix.unproven_clauses)}")
    killed = len(matrix.verdicts) - len(matrix.survivors)
    print(f"\n{killed} of {len(matrix.verdicts)} mutants of {matrix.runner} killed in {matrix.seconds:.1f} s")
