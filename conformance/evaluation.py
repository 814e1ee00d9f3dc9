"""What an evaluation collects: mismatches, exceptions, and who put which clause to the test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from conformance.clauses import load_clauses
from conformance.context import Mismatch
from conformance.laws import LAWS
from conformance.laws_inputs import rows_follow_their_rules
from conformance.stage_laws import stages_alone, stages_of_clauses
from runner_api import RunnerInfo

# The source of what laws say of the steps of worlds.
WORLDS = "worlds"


@dataclass(frozen=True, slots=True)
class EvaluationError:
    """An exception of the candidate where none was due; the world or probe ended there."""

    where: str
    error: str
    traceback: str
    clauses: frozenset[str] = frozenset()  # those that the probe speaks of; none: a world, which speaks of many


@dataclass(slots=True)
class Evaluation:
    """What came of it. A clause passes if it was tested and has no mismatch.

    selected: the only clauses that were asked for; None: all.
    """

    info: RunnerInfo
    selected: frozenset[str] | None = None
    by_clause: dict[str, list[Mismatch]] = field(default_factory=dict)
    errors: list[EvaluationError] = field(default_factory=list)
    tested: Counter[str] = field(default_factory=Counter)  # clause id to number of evaluations
    skipped: dict[str, tuple[str, ...]] = field(default_factory=dict)  # clause id to what is not offered
    counts: Counter[str] = field(default_factory=Counter)
    sources: dict[str, set[str]] = field(default_factory=dict)  # probe, or WORLDS, to the clauses it put to the test
    unjudged_stages: tuple[str, ...] = ()  # offered under names that no clause knows

    def asks(self, clause_id: str) -> bool:
        """Whether this run is about the clause."""
        return clause_id not in self.skipped and (self.selected is None or clause_id in self.selected)

    @property
    def failed(self) -> list[str]:
        """Ids of clauses with a mismatch, in the order of the clause list."""
        return [c for c in load_clauses() if self.by_clause.get(c)]

    @property
    def untested(self) -> list[str]:
        """Clauses that apply to this runner and that nothing put to the test."""
        return [c for c in load_clauses() if not self.tested[c] and self.asks(c)]

    @property
    def passed(self) -> bool:
        """No exception, and every MUST that applies was tested and has no mismatch; testing nothing is no pass."""
        broken = [c for c in [*self.failed, *self.untested] if load_clauses()[c].level == "MUST"]
        return bool(self.tested) and not broken and not self.errors

    @property
    def testers(self) -> dict[str, tuple[str, ...]]:
        """Clause id to the names of what put it to the test: laws, probes and stages."""
        found: dict[str, set[str]] = {}
        for source, clause_ids in self.sources.items():
            for clause_id in clause_ids:
                found.setdefault(clause_id, set()).update(_testers(source, clause_id))
        return {clause_id: tuple(sorted(found[clause_id])) for clause_id in load_clauses() if clause_id in found}

    def note(self, found: Mapping[str, Iterable[Mismatch]], source: str = WORLDS) -> None:
        """Take in what one step of a world, or one probe, says."""
        told = self.sources.setdefault(source, set())
        for clause_id, mismatches in found.items():
            if self.asks(clause_id):
                told.add(clause_id)
                self.tested[clause_id] += 1
                self.by_clause.setdefault(clause_id, []).extend(mismatches)


def _testers(source: str, clause_id: str) -> list[str]:
    if source == WORLDS:
        return [f"law {LAWS[clause_id].fn.__name__ if clause_id in LAWS else rows_follow_their_rules.__name__}"]
    if source == stages_alone.__name__:
        return [f"stage {' + '.join(sorted(stages))}" for stages in stages_of_clauses()[clause_id]]
    return [f"probe {source}"]
