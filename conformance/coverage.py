"""Which tests put each clause to the test, and which mutants each clause has killed: found out by running them all.

The `cpu` runner is judged in both row layouts, and so is every mutant of it, which takes about a minute. The answer is
kept in the user's cache folder, under a digest of the sources that it depends on, so that asking again costs nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from conformance.clauses import load_clauses
from conformance.evaluate import evaluate
from conformance.kill_matrix import run_matrix
from conformance.mutants import MUTANTS, Mutant
from runner_api.config import LAYOUTS

PACKAGES = ("conformance", "runner_api", "cpu_reference", "engine_core")
SOURCES = (".py", ".toml", ".json")
RUNNER = "cpu"


@dataclass(frozen=True, slots=True)
class Coverage:
    """Clause id to what tested it ("law …", "probe …", "stage …"), and to the mutants that it has killed."""

    tests: dict[str, list[str]]
    mutants: dict[str, list[str]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def coverage(*, use_cache: bool = True, tell: Callable[[str], None] = say) -> Coverage:
    """From the cache if the sources are what they were; else by running everything. tell: where progress is said."""
    path = cache_folder() / f"coverage-{digest()}.json"
    if use_cache and (kept := _read(path)) is not None:
        return kept
    tell(f"running every test and every mutant of {RUNNER}, once for these sources (about a minute)")
    start = time.perf_counter()
    found = measure()
    tell(f"done in {time.perf_counter() - start:.0f} s")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(found)), encoding="utf-8")
    except OSError as e:
        tell(f"the answer cannot be kept: {e}")
    return found


def measure(mutants: Sequence[Mutant] | None = None, jobs: int | None = None) -> Coverage:
    """Run it all. mutants: these alone; jobs: processes for them (None: one per core)."""
    mutants = MUTANTS[RUNNER] if mutants is None else mutants
    tests: dict[str, set[str]] = {}
    for layout in LAYOUTS:
        for clause_id, names in evaluate(RUNNER, layout=layout).testers.items():
            tests.setdefault(clause_id, set()).update(names)
    killers: dict[str, set[str]] = {}
    named = {m.id: frozenset(m.clauses) for m in mutants}
    for verdict in run_matrix(RUNNER, mutants=mutants, jobs=jobs).verdicts:
        for clause_id in named[verdict.mutant] & set(verdict.failed) if verdict.killed else ():
            killers.setdefault(clause_id, set()).add(verdict.mutant)
    return Coverage(
        {c: sorted(tests.get(c, ())) for c in load_clauses()}, {c: sorted(killers.get(c, ())) for c in load_clauses()}
    )


def cache_folder() -> Path:
    """XDG_CACHE_HOME/modelrunner, or ~/.cache/modelrunner."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "modelrunner"


def digest() -> str:
    """Of every source that the answer depends on, and of the versions of Python and NumPy."""
    found = hashlib.sha256(f"{platform.python_version()} {np.__version__}".encode())
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parent
        for path in sorted(p for p in root.rglob("*") if p.suffix in SOURCES):
            found.update(f"{package}/{path.relative_to(root).as_posix()}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _read(path: Path) -> Coverage | None:
    """What is kept there; None if there is nothing, or nothing that can be read."""
    try:
        return Coverage(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
