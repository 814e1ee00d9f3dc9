"""An expectations file: which clauses a runner is known to break, where, why, and until when.

    [[expect]]
    clause = "MR-SLOT-004"
    outcome = "fail"                          # or "error", "skip"
    reason = "one block size for all groups"
    issue = "https://example.org/issues/12"
    when = { device = "cuda*", dtype = "bfloat16" }
    until = 2027-03-01

`when` may name device, dtype, version, layout and runner, each a pattern with `*` and `?`; what it leaves out matches
everything. An entry must come true: if the clause passes or comes to something else, or if `until` is over, the run
fails.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from conformance.clauses import clause
from conformance.outcomes import ClauseResult, Outcome
from runner_api import ConfigError, RunnerInfo, UnknownNameError

WHEN = {"device": "device", "dtype": "dtype", "version": "version", "layout": "layout", "runner": "name"}
OUTCOMES = (Outcome.FAIL, Outcome.ERROR, Outcome.SKIP)
KEYS = ("clause", "when", "outcome", "reason", "issue", "until")
REQUIRED = ("clause", "outcome", "reason", "issue")


@dataclass(frozen=True, slots=True)
class Expectation:
    """One entry. when: field of the runner's description to pattern. until: the last day on which it holds."""

    clause: str
    outcome: Outcome
    reason: str
    issue: str
    when: Mapping[str, str] = field(default_factory=dict)
    until: date | None = None

    def applies(self, info: RunnerInfo) -> bool:
        """Whether the entry speaks of this runner, on this device, …"""
        return all(fnmatchcase(str(getattr(info, WHEN[key])), pattern) for key, pattern in self.when.items())

    def when_text(self) -> str:
        return ", ".join(f"{key} {pattern}" for key, pattern in self.when.items()) or "always"

    def judge(self, result: ClauseResult, today: date) -> tuple[ClauseResult, str | None]:
        """(what the clause comes to under this entry, why the entry is a fault or None)."""
        seen = replace(result, reason=self.reason if result.reason is None else result.reason, issue=self.issue)
        if self.until is not None and today > self.until:
            return result, f"the expectation for {self.clause} has expired on {self.until} ({self.issue})"
        if result.outcome == self.outcome:
            return (seen if self.outcome == Outcome.SKIP else replace(seen, outcome=Outcome.XFAIL)), None
        if result.outcome == Outcome.PASS:
            fault = f"{self.clause} passes, though it is expected to {self.outcome}: take the entry out ({self.issue})"
            return replace(seen, outcome=Outcome.XPASS), fault
        return result, f"{self.clause} is expected to {self.outcome} and came to {result.outcome} ({self.issue})"


def load_expectations(path: str | Path) -> tuple[Expectation, ...]:
    """The entries of a file.

    Raises ConfigError if it cannot be read, is no TOML, is empty, lacks a key, or names a clause twice for one `when`;
    UnknownNameError for an unknown clause, key or outcome.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"expectations cannot be read: {e}", field="--expectations", got=str(path)) from e
    _known(data, ("expect",), str(path))
    entries = data.get("expect", [])
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
        raise ConfigError(
            "the file expects nothing", field="--expectations", got=str(path), expected="one [[expect]] or more",
            hint="Leave the option out if every clause is to hold",
        )  # fmt: skip
    found = tuple(_entry(entry, f"{path}, entry {n}") for n, entry in enumerate(entries, 1))
    seen: set[tuple[str, Any]] = set()
    for e in found:
        key = (e.clause, tuple(sorted(e.when.items())))
        if key in seen:
            raise ConfigError(
                "two entries for one clause", field=str(path), got=e.clause, expected="one, or another when"
            )
        seen.add(key)
    return found


def check_applying(expectations: Iterable[Expectation], info: RunnerInfo) -> None:
    """Raises ConfigError if two entries for one clause apply to this runner: they cannot both come true."""
    first: dict[str, Expectation] = {}
    for e in expectations:
        if e.applies(info):
            other = first.setdefault(e.clause, e)
            if other is not e:
                raise ConfigError(
                    "two entries for one clause apply to this run", field=e.clause,
                    got=f"when {other.when_text()}; when {e.when_text()}", expected="one entry",
                )  # fmt: skip


def _entry(entry: dict[str, Any], where: str) -> Expectation:
    _known(entry, KEYS, where)
    for key in REQUIRED:
        if not isinstance(entry.get(key), str) or not entry[key].strip():
            raise ConfigError(f"{key} is missing", field=where, got=entry.get(key), expected=f'{key} = "…"')
    when = entry.get("when", {})
    if not isinstance(when, dict) or not all(isinstance(v, str) for v in when.values()):
        raise ConfigError("conditions are patterns by name", field=where, got=when, expected='{ device = "cuda*" }')
    _known(when, WHEN, where)
    if entry["outcome"] not in OUTCOMES:
        raise UnknownNameError("outcome", entry["outcome"], [o.value for o in OUTCOMES], field=where)
    return Expectation(
        clause(entry["clause"]).id, Outcome(entry["outcome"]), entry["reason"], entry["issue"], when,
        _date(entry.get("until"), where),
    )  # fmt: skip


def _date(value: Any, where: str) -> date | None:
    if value is None or type(value) is date:
        return value
    try:
        return date.fromisoformat(value)
    except (TypeError, ValueError):
        raise ConfigError("no date", field=f"{where}, until", got=value, expected="2027-03-01") from None


def _known(table: Mapping[str, Any], valid: Any, where: str) -> None:
    for key in table:
        if key not in valid:
            raise UnknownNameError("key", key, valid, field=where)
