"""The clauses: each a numbered sentence that a right runner makes true. The text lives in clauses.toml.

An id is `MR-<AREA>-<NNN>`; it is never used again for another sentence. Laws, probes, mutants and reports name clauses
by id alone.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from runner_api import Capability, ConfigError, UnknownNameError
from runner_api.config import LAYOUTS

LEVELS = ("MUST", "SHOULD", "MAY")
_ID = re.compile(r"MR-([A-Z]+)-\d{3}")


@dataclass(frozen=True, slots=True)
class Clause:
    """One sentence, and what a runner must offer for it to apply. layout: of rows, where it holds for one alone."""

    id: str
    level: str
    since: str
    requires: frozenset[Capability]
    law: str
    source: str
    until: str | None = None
    layout: str | None = None

    @property
    def area(self) -> str:
        """The middle of the id: STATE, SLOT, …"""
        return self.id.split("-")[1]

    def missing(self, offered: frozenset[Capability]) -> tuple[str, ...]:
        """Names of required capabilities that are not offered, sorted; and the layout, if the runner has the other."""
        dense = Capability.DENSE_LAYOUT in offered
        wrong = [f"{self.layout}_layout"] if self.layout == ("slots" if dense else "dense") else []
        return tuple(sorted([*(c.value for c in self.requires - offered), *wrong]))


@cache
def load_clauses() -> dict[str, Clause]:
    """Every clause by id, in the order of the file. Raises ConfigError on a broken entry."""
    text = (files("conformance") / "clauses.toml").read_text(encoding="utf-8")
    found: dict[str, Clause] = {}
    for entry in tomllib.loads(text)["clause"]:
        clause_id = entry["id"]
        if not _ID.fullmatch(clause_id) or clause_id in found:
            raise ConfigError("clause id", field="clauses.toml", got=clause_id, expected="MR-<AREA>-<NNN>, once")
        if entry["level"] not in LEVELS:
            raise UnknownNameError("level", entry["level"], LEVELS, field=clause_id)
        if entry.get("layout", "slots") not in LAYOUTS:
            raise UnknownNameError("layout", entry["layout"], LAYOUTS, field=clause_id)
        requires = frozenset(Capability(name) for name in entry.pop("requires"))
        found[clause_id] = Clause(requires=requires, **entry)
    return found


def clause(clause_id: str) -> Clause:
    """One clause; an unknown id is an error that lists the nearest ones."""
    clauses = load_clauses()
    if clause_id not in clauses:
        raise UnknownNameError("clause", clause_id, clauses)
    return clauses[clause_id]


def select(patterns: Iterable[str]) -> tuple[str, ...]:
    """Ids of the clauses that some pattern stands for, in the order of the file.

    A pattern is the beginning of an id by whole parts, in any case, with or without `MR-`: "SLOT", "MR-SLOT",
    "slot-001". Raises UnknownNameError, with the nearest names, for a pattern that stands for nothing; ConfigError if
    there is no pattern.
    """
    chosen: set[str] = set()
    patterns = tuple(patterns)
    if not patterns:
        raise ConfigError("no clause is selected", field="--clause", got=(), expected="an area or an id")
    for pattern in patterns:
        parts = pattern.upper().removeprefix("MR-").split("-")
        found = {c for c in load_clauses() if c.split("-")[1 : 1 + len(parts)] == parts}
        if not found:
            near = [c for c in load_clauses() if c.split("-")[1] == parts[0]] or [f"MR-{area}" for area in areas()]
            raise UnknownNameError("clause", "-".join(["MR", *parts]), near, field="--clause")
        chosen |= found
    return tuple(c for c in load_clauses() if c in chosen)


def areas() -> tuple[str, ...]:
    """The areas, in the order of the file."""
    return tuple(dict.fromkeys(c.area for c in load_clauses().values()))
