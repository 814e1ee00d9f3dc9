"""Cases kept as files: plans that once failed, and shapes that random worlds meet seldom.

A corpus is a folder of JSON files, one case each: {"clause", "note", "case"}. Every case can be run on any runner that
offers what it asks for, the candidate beside the oracle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from conformance.case import Case, CaseError, run_case
from conformance.clauses import clause
from conformance.divergence import NotLegal, Sides
from conformance.driver import KINDS, draw_size
from conformance.evaluate import STEPS_PER_WORLD, can_run
from conformance.harness import info_of
from conformance.layouts import in_layout
from conformance.shapes import SHAPES
from conformance.shrink import shrink_while
from conformance.telling import Told, tell, tell_at_random
from runner_api import Capability, ConfigError
from runner_api.errors import safely
from runner_api.loader import load_factory
from runner_api.protocol import RunnerFactory

AGREE, DIVERGE, SKIP, ERROR = "agree", "diverge", "skip", "error"
# Worlds of each kind in which rare shapes are looked for, and stories that are told to make one smaller.
WORLDS, ATTEMPTS = 3, 250


@dataclass(frozen=True, slots=True)
class SavedCase:
    """One file. clause_id: what failed when it was saved; None for a rare shape."""

    name: str
    clause_id: str | None
    note: str
    case: Case


@dataclass(frozen=True, slots=True)
class CorpusResult:
    """One case on one runner. clause_id: what failed when it was saved; failed: what fails now, None for an exception.

    first: what failed first, why the case was skipped, or what is wrong with the case.
    """

    name: str
    clause_id: str | None
    outcome: str
    first: str | None = None
    failed: str | None = None

    @property
    def agrees(self) -> bool:
        """Nothing failed; a skipped case says in `first` what the runner does not offer."""
        return self.outcome in (AGREE, SKIP)


def save_case(folder: str | Path, case: Case, clause_id: str | None, note: str, name: str | None = None) -> Path:
    """Write one case, named by clause (or `name`, or "rare") and a digest of its plans; the same case is written once.

    Raises ConfigError for a case without steps, UnknownNameError for a clause that does not exist.
    """
    if not case.steps:
        raise ConfigError("a case without steps tests nothing", field="case", got=0, expected=">= 1 step")
    if clause_id is not None:
        clause(clause_id)
    data = {"clause": clause_id, "note": note, "case": case.as_json()}
    digest = hashlib.sha256(case.text().encode()).hexdigest()[:8]
    path = Path(folder) / f"{name or clause_id or 'rare'}-{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return path


def load_corpus(folder: str | Path) -> list[SavedCase]:
    """Every case of a folder, sorted by file name. Raises ConfigError for a folder without cases, and for a file that
    is none."""
    files = sorted(Path(folder).glob("*.json"))
    if not files:
        raise ConfigError("no case in this folder", field="corpus", got=str(folder), expected="at least one *.json")
    return [_load(path) for path in files]


def _load(path: Path) -> SavedCase:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return SavedCase(path.stem, data["clause"], data["note"], Case.from_json(data["case"]))
    except (ValueError, KeyError, TypeError, OSError) as e:  # ConfigError is a ValueError
        raise ConfigError(f"not a case: {e}", field="corpus", got=str(path), expected="clause, note and case") from e


def run_corpus(
    folder: str | Path, runner: str | RunnerFactory, oracle: str | RunnerFactory = "cpu"
) -> list[CorpusResult]:
    """Every case of the folder on `runner`. What it does not offer is skipped; if that is all, ConfigError."""
    factory = load_factory(runner)
    info = info_of(factory)
    layouts = getattr(factory, "LAYOUTS", (info.layout,))
    results = [_run(saved, factory, info.capabilities, layouts, oracle) for saved in load_corpus(folder)]
    if all(r.outcome == SKIP for r in results):
        raise ConfigError(
            "every case of the corpus asks for more than the runner offers", field="corpus", got=results[0].first
        )
    return results


def _run(
    saved: SavedCase, runner: RunnerFactory, offered: frozenset[Capability], layouts: Collection[str],
    oracle: str | RunnerFactory,
) -> CorpusResult:  # fmt: skip
    missing = sorted(c.value for c in saved.case.needs() - offered)
    if saved.case.config.layout not in layouts:
        missing.append(f"{saved.case.config.layout}_layout")
    if missing:
        return CorpusResult(saved.name, saved.clause_id, SKIP, f"not offered: {', '.join(missing)}")
    try:
        failure = run_case(saved.case, runner, oracle).failure
    except CaseError as e:  # says nothing about the runner
        return CorpusResult(saved.name, saved.clause_id, ERROR, str(e))
    except ConfigError as e:  # it drew other tokens than the plans go on with
        return CorpusResult(saved.name, saved.clause_id, DIVERGE, str(e))
    except Exception as e:  # the factory's: it came through the smoke test, and cannot be built as the case says
        return CorpusResult(saved.name, saved.clause_id, DIVERGE, f"{type(e).__name__}: {safely(str, e)}")
    if failure is None:
        return CorpusResult(saved.name, saved.clause_id, AGREE)
    first = f"step {failure.step}: {failure.mismatch or failure.error}"
    return CorpusResult(saved.name, saved.clause_id, DIVERGE, first, failure.clause_id)


# -- rare shapes --------------------------------------------------------------------------------------------------


def rare_cases(
    runner: str | RunnerFactory, seed: int, capabilities: frozenset[Capability], oracle: str | RunnerFactory = "cpu",
    shapes: Collection[str] = SHAPES,
) -> dict[str, Case]:  # fmt: skip
    """By shape (of `shapes.SHAPES`), those alone that were met.

    The runner says which layout; the plans are made with the oracle on both sides, so that they go on with the tokens
    that a right runner draws."""
    layout = info_of(runner).layout
    right = in_layout(oracle, layout)
    offered = capabilities & info_of(right).capabilities
    sides = Sides(right, right, offered, quiet=True)
    met = _meet(sides, layout, seed)
    return {shape: _smallest(met[shape], shape, sides) for shape in shapes if shape in met}


def _meet(sides: Sides, layout: str, seed: int) -> dict[str, Told]:
    """For each shape the first world that meets it, up to the step in which it does."""
    met: dict[str, Told] = {}

    def watch(told: Told) -> bool:
        for shape in SHAPES:
            if told.counts[shape] and shape not in met:
                met[shape] = replace(told, steps=list(told.steps))
        return False

    for number in range(WORLDS):
        for place, kind in enumerate(KINDS):
            if can_run(kind, sides.offered):
                entropy = [seed + number, place]
                size = draw_size(kind, np.random.default_rng(entropy), frozenset(), sides.offered, layout)
                try:
                    tell_at_random(sides, size, [*entropy, 2], STEPS_PER_WORLD, poison=False, watch=watch)
                except NotLegal:  # a world that the oracle does not take in this layout
                    continue
    return met


def _smallest(told: Told, shape: str, sides: Sides) -> Case:
    """Shrunk without poison and records, which only slow it down; the case asks for both, where they are offered."""
    small = shrink_while(told, sides, lambda t: t.counts[shape] > 0, ATTEMPTS).told
    case = tell(replace(small.story, poison=True), sides).case()
    return replace(case, config=replace(case.config, record=frozenset({"logits", "kv"})))
