"""Would we notice a slip of the pen in a kernel? Runs every mutant of the Triton kernels and counts who got away.

    python -m conformance.kernel_mutants [--sample N] [--only FILE] [--json]

Each mutant (`conformance.kernel_mutations`) is loaded as a copy of the package (`conformance.mutation`) and put through
the cases that reach it (`conformance.kernel_battery`), in a forked process of its own with fenced memory: a stray
access ends that process and nothing else. Killed = another result than the twin's, an exception, a stray access, or
no end. Nothing is written to disk. Exit codes: 0 enough are killed, 1 too few, 2 misuse.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from conformance.kernel_battery import KernelCase, Outputs, Side, differences, kernel_cases
from conformance.kernel_equivalents import EQUIVALENT
from conformance.kernel_mutations import TIE, WIDENING, KernelMutant, jit_functions, mutants_of
from conformance.mutation import mutated
from runner_api import load_stages
from runner_api.errors import ConfigError, RunnerError
from runner_api.loader import runner_names

RUNNER, TWIN = "gpu", "cpu"
STAGES = "stages:gpu_stages"  # what is loaded of a mutated copy
ENOUGH_KILLED, MOST_EQUIVALENT = 0.95, 0.03
# No case takes a second of processor time; a mutant that takes longer than this does not end. How long a busy machine
# lets it wait says nothing of it: real time only ends one that waits for ever.
LONGEST, WAITS = 20, 400

# Kinds of mutants that are counted apart where nothing shows them.
UNSEEN = {
    WIDENING: "only offsets past 2^31 show it, which need more memory than a test has",
    TIE: "the interpreter takes the first of equals in any case",
}


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a mutant: "killed", "survived", "equivalent" (declared) or "unseen" (of a kind in `UNSEEN`)."""

    mutant: KernelMutant
    fate: str
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    """All fates. `wrong`: what is not in order besides: declarations that are untrue, cases that the original fails."""

    fates: tuple[Fate, ...]
    wrong: tuple[str, ...]
    seconds: float

    def of(self, fate: str) -> list[Fate]:
        return [f for f in self.fates if f.fate == fate]

    @property
    def score(self) -> float:
        """Killed, of those that could be."""
        judged = len(self.of("killed")) + len(self.of("survived"))
        return len(self.of("killed")) / judged if judged else 0.0

    @property
    def enough(self) -> bool:
        return not self.wrong and self.score >= ENOUGH_KILLED

    def as_json(self) -> dict[str, Any]:
        counts = Counter(f.fate for f in self.fates)
        return {
            "total": len(self.fates), "killed": counts["killed"], "equivalent": counts["equivalent"],
            "unseen": counts["unseen"], "score": round(self.score, 4), "seconds": round(self.seconds, 1),
            "wrong": list(self.wrong),
            "survivors": [
                {"id": f.mutant.id, "path": f.mutant.path, "line": f.mutant.line, "kind": f.mutant.kind}
                for f in self.of("survived")
            ],
        }  # fmt: skip


class Battery:
    """The cases with the twin's answers, and which functions of the runner's kernels each of them reaches."""

    def __init__(self) -> None:
        self.package, self.root = _package_of(RUNNER)
        self.texts = {str(p.relative_to(self.root)): p.read_text("utf-8") for p in sorted(self.root.rglob("*.py"))}
        twin = Side(_package_of(TWIN)[0], load_stages(TWIN), is_twin=True)
        self.cases = kernel_cases()
        self.expected: dict[str, Outputs] = {c.name: c.run(twin) for c in self.cases}
        self.own = load_stages(RUNNER)
        # Both bring triton; load_stages has chosen the interpreter by now.
        from conformance.triton_sanitizer import fast_interpreter, fences

        self.fast_interpreter, self.fences = fast_interpreter, fences
        self.wrong: list[str] = []
        with fast_interpreter():
            reached = {c.name: self._launched_by(c) for c in self.cases}
        functions = [f for text in self.texts.values() for f in jit_functions(text)]
        self.cases_of: dict[str, list[KernelCase]] = {}
        for function in functions:
            entries = _callers(function.name, {f.name: f.calls for f in functions})
            cases = [c for c in self.cases if reached[c.name][0] & entries]
            self.cases_of[function.name] = sorted(cases, key=lambda c: reached[c.name][1])
        self.wrong += [f"no case reaches {name}" for name, cases in self.cases_of.items() if not cases]
        self._load_once()

    def _load_once(self) -> None:
        """Load a copy that is changed by a comment alone: its compiled files serve all that are forked later."""
        path = f"{STAGES.partition(':')[0]}.py"
        with mutated(f"{self.package}.{STAGES}", path, self.texts[path], self.texts[path] + "# the same\n") as copy:
            copy.factory()

    def _launched_by(self, case: KernelCase) -> tuple[set[str], float]:
        """Kernels that the unchanged runner launches in this case, and how long that takes."""
        support = importlib.import_module(f"{self.package}.triton_support")
        counts = (support.KERNEL_LAUNCHES, support.PROBE_LAUNCHES)
        before = [dict(c) for c in counts]
        start = time.perf_counter()
        if error := self.judge(case, Side(self.package, self.own, is_twin=False)):
            self.wrong.append(f"the unchanged kernels fail: {error}")
        launched = {k for old, new in zip(before, counts, strict=True) for k in new if new[k] != old.get(k)}
        return launched, time.perf_counter() - start

    def judge(self, case: KernelCase, side: Side) -> str:
        """What is wrong with the side's answer, or ""."""
        importlib.import_module(f"{side.package}.triton_support").TILE_LIMIT = case.tile
        try:
            with np.errstate(all="ignore"):
                found = differences(case.run(side), self.expected[case.name], case.bounds)
        except Exception as e:
            return f"{case.name}: {type(e).__name__}: {e}"
        finally:
            importlib.import_module(f"{side.package}.triton_support").TILE_LIMIT = 65536
        return f"{case.name}: {found[0]}" if found else ""

    def judge_mutant(self, mutant: KernelMutant) -> str:
        """Put a mutant through its cases: what it was noticed by, or "". Strays end the process."""
        changed = mutated(f"{self.package}.{STAGES}", mutant.path, mutant.original, mutant.source)
        with self.fast_interpreter(), changed as copy:
            stages = copy.factory()
            plain = stages.to_device
            for at_end in (True, False):
                self.fences.fence_allocations(at_end)
                if not at_end:
                    self.fences.reverse_programs()
                fenced = replace(stages, to_device=lambda a, e=at_end: plain(self.fences.fenced_copy(a, e)))
                for case in self.cases_of[mutant.function]:
                    if found := self.judge(case, Side(copy.alias, fenced, is_twin=False)):
                        return found
        return ""


def _package_of(runner: str) -> tuple[str, Path]:
    package = runner_names()[runner].partition(":")[0].partition(".")[0]
    return package, Path(importlib.import_module(package).__file__ or "").parent


def _callers(name: str, calls: dict[str, frozenset[str]]) -> set[str]:
    """The function and all that call it, directly or not."""
    found, grown = {name}, True
    while grown:
        more = {caller for caller, called in calls.items() if called & found} - found
        found, grown = found | more, bool(more)
    return found


def all_mutants(battery: Battery, only: str | None = None) -> list[KernelMutant]:
    """Every mutant, or those of the files whose path contains `only`."""
    found = [m for path, text in battery.texts.items() if only is None or only in path for m in mutants_of(path, text)]
    if not found:
        raise ConfigError("no kernel to mutate", field="only", got=only, expected="a part of a file's path")
    return found


def wrong_declarations(mutants: Sequence[KernelMutant]) -> list[str]:
    """What is not in order with the declared equivalents, given all mutants: too many, or of no mutant."""
    ids = [m.id for m in mutants]
    share = sum(i in EQUIVALENT for i in ids) / len(ids)
    wrong = [f"declared equivalent, but no such mutant: {name}" for name in EQUIVALENT if name not in set(ids)]
    if share > MOST_EQUIVALENT:
        wrong.append(f"{share:.1%} of the mutants are declared equivalent, at most {MOST_EQUIVALENT:.0%} may be")
    return wrong


def sample_of(mutants: Sequence[KernelMutant], size: int | None) -> list[KernelMutant]:
    """`size` mutants at equal distances: always the same, and of every file."""
    if size is None or size >= len(mutants):
        return list(mutants)
    return [mutants[i * len(mutants) // size] for i in range(size)]


def run_mutants(
    battery: Battery, mutants: Sequence[KernelMutant], jobs: int, progress: Callable[[Fate], None] | None = None
) -> Report:
    """Run each mutant in a process of its own, `jobs` at a time."""
    start, fates, wrong = time.perf_counter(), [], list(battery.wrong)
    for mutant, why in _noticed(battery, mutants, jobs):
        declared = EQUIVALENT.get(mutant.id)
        if why:
            fate = Fate(mutant, "killed", why)
            if declared:
                wrong.append(f"declared equivalent, but noticed: {mutant.id} ({why})")
        elif declared:
            fate = Fate(mutant, "equivalent", declared)
        elif mutant.kind in UNSEEN:
            fate = Fate(mutant, "unseen", UNSEEN[mutant.kind])
        else:
            fate = Fate(mutant, "survived", "noticed by no case")
        fates.append(fate)
        if progress:
            progress(fate)
    return Report(tuple(fates), tuple(wrong), time.perf_counter() - start)


def _noticed(battery: Battery, mutants: Sequence[KernelMutant], jobs: int) -> Iterator[tuple[KernelMutant, str]]:
    """Each mutant with what it was noticed by, or "", as they end."""
    context = multiprocessing.get_context("fork")  # a child starts with all that is loaded and computed here
    todo, running = list(reversed(mutants)), {}
    while todo or running:
        while todo and len(running) < jobs:
            mutant, (receiver, sender) = todo.pop(), context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(battery, mutant, sender))
            process.start()
            sender.close()
            running[process.sentinel] = (mutant, process, receiver, time.monotonic() + WAITS)
        soonest = min(deadline for *_, deadline in running.values())
        ended = wait(list(running), timeout=max(soonest - time.monotonic(), 0))
        late = [s for s, (*_, deadline) in running.items() if deadline <= time.monotonic()]
        for sentinel in {*ended, *late}:
            mutant, process, receiver, _ = running.pop(sentinel)  # type: ignore[index]
            if sentinel not in ended:
                process.kill()
            process.join()
            yield mutant, _outcome(process, receiver, sentinel in ended)


def _outcome(process: Any, receiver: Connection, ended: bool) -> str:
    if not ended:
        return f"waits for ever: {WAITS} s"
    try:
        return receiver.recv()
    except EOFError:
        if process.exitcode == -signal.SIGXCPU:
            return f"does not end within {LONGEST} s"
        return f"a stray access: the process ended with {process.exitcode}"
    finally:
        receiver.close()


def _child(battery: Battery, mutant: KernelMutant, sender: Connection) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # what a crash prints is told by its exit code
    resource.setrlimit(resource.RLIMIT_CPU, (LONGEST, LONGEST + 1))
    sender.send(battery.judge_mutant(mutant))
    sender.close()
    os._exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m conformance.kernel_mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--sample", type=int, metavar="N", help="only N of them, at equal distances")
    parser.add_argument("--only", metavar="FILE", help="only those of files whose path contains FILE")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: cores)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: a fork must not lose its threads
    try:
        battery = Battery()
        mutants = sample_of(all_mutants(battery, args.only), args.sample)
        battery.wrong += wrong_declarations(all_mutants(battery))
    except RunnerError as e:
        print(f"kernel_mutants: {e}", file=sys.stderr)
        return 2
    report = run_mutants(battery, mutants, args.jobs, None if args.json else _print_survivor)
    if args.json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        _print_summary(report)
    return 0 if report.enough else 1


def _print_survivor(fate: Fate) -> None:
    m = fate.mutant
    if fate.fate == "survived":
        print(f"SURVIVED {m.path}:{m.line} ({m.kind})\n  {m.id}", flush=True)


def _print_summary(report: Report) -> None:
    for line in report.wrong:
        print(line)
    counts = Counter(f.fate for f in report.fates)
    by_kind = Counter(f.mutant.kind for f in report.of("survived"))
    print(
        f"\n{counts['killed']} of {len(report.fates)} mutants killed, {counts['survived']} survived, "
        f"{counts['equivalent']} declared equivalent, {counts['unseen']} unseen: "
        f"score {report.score:.1%} in {report.seconds:.0f} s"
    )
    if by_kind:
        print("survivors by kind: " + ", ".join(f"{kind} {n}" for kind, n in by_kind.most_common()))


if __name__ == "__main__":
    sys.exit(main())
