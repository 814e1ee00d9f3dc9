"""A report: JSON lines with a header, one line per clause, findings, and a footer. Schema: data/report.schema.json.

The header is written before anything is judged and the footer last, so that a file without a footer tells of a run
that was cut short. Such a file is refused, and so is one of another schema.
"""

from __future__ import annotations

import inspect
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import runner_api
from conformance.outcomes import Outcome, Results
from runner_api import SPEC_VERSION, ConfigError, ModelRunner

SCHEMA = 1
KINDS = ("header", "clause", "error", "lockstep", "corpus", "finding", "footer")
# What is read of a report again, by kind of line: fields and their types.
_TEXT, _MAYBE = (str,), (str, type(None))
READ: dict[str, dict[str, tuple[type, ...]]] = {
    "header": {
        **dict.fromkeys(
            ("runner", "class", "version", "device", "dtype", "noise", "layout", "spec_version", "oracle"), _TEXT
        ),
        "seed": (int,), "rounds": (int,), "selection": (list, type(None)),
    },
    "clause": {"id": _TEXT, "level": _TEXT, "area": _TEXT, "outcome": _TEXT, "layout": _MAYBE},
    "footer": {"counts": (dict,), "verdict": _TEXT},
}  # fmt: skip


def header_of(
    runner: ModelRunner, target: str, oracle: str, seed: int, rounds: int = 1, selection: Sequence[str] | None = None,
    expectations: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Who is judged, by what, with what. runner: as it was built; target: as it was named."""
    info = runner.describe()
    return {
        "kind": "header", "schema": SCHEMA, "target": target, "runner": info.name, "class": info.class_path,
        "file": _file_of(runner), "version": info.version, "device": info.device, "dtype": info.dtype,
        "noise": info.noise, "layout": info.layout, "capabilities": sorted(c.value for c in info.capabilities),
        "notes": list(info.notes), "spec_version": SPEC_VERSION, "oracle": oracle, "seed": seed, "rounds": rounds,
        "modelrunner": runner_api.__version__, "python": platform.python_version(), "numpy": np.__version__,
        "selection": None if selection is None else list(selection), "expectations": expectations,
    }  # fmt: skip


def _file_of(runner: ModelRunner) -> str | None:
    """Where the class is written; None for one that is in another process, or in no file."""
    if runner.describe().class_path.rpartition(".")[2] != type(runner).__name__:
        return None
    try:
        return inspect.getsourcefile(type(runner))
    except TypeError:  # a class without a file
        return None


class ReportWriter:
    """Writes the lines of one run. `close` without `finish` leaves the file without a footer, as it must be."""

    def __init__(self, path: str | Path, header: Mapping[str, Any]) -> None:
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 — closed in close()
        except OSError as e:
            raise ConfigError(f"the report cannot be written: {e}", field="--report", got=str(path)) from e
        self.line(header)

    def line(self, content: Mapping[str, Any]) -> None:
        """One line, on disk at once."""
        self._file.write(json.dumps(content, allow_nan=False) + "\n")
        self._file.flush()

    def results(self, results: Results) -> None:
        """One line per clause and per exception."""
        for line in clause_lines(results):
            self.line(line)
        for e in results.errors:
            self.line({"kind": "error", "where": e.where, "error": e.error})

    def finish(self, footer: Mapping[str, Any]) -> None:
        self.line(footer)
        self.close()

    def close(self) -> None:
        self._file.close()


def clause_lines(results: Results) -> Iterator[dict[str, Any]]:
    for clause_id, result in results.clauses.items():
        c = result.clause
        about = {"kind": "clause", "id": clause_id, "level": c.level, "area": c.area, "layout": c.layout}
        yield about | result.as_json()


def footer_of(results: Results | None, faults: Sequence[str], verdict: str, smoke: str | None = None) -> dict[str, Any]:
    """The sum of it. faults: every reason why the verdict is DIVERGE. results None: no clause was asked."""
    counts = {o.value: 0 if results is None else len(results.ids(o)) for o in Outcome}
    return {"kind": "footer", "counts": counts, "smoke": smoke, "faults": list(faults), "verdict": verdict}


@dataclass(frozen=True, slots=True)
class ReportFile:
    """A report that was read. clauses: the clause lines by id, in their order."""

    path: str
    header: Mapping[str, Any]
    clauses: Mapping[str, Mapping[str, Any]]
    footer: Mapping[str, Any]


def read_report(path: str | Path) -> ReportFile:
    """Read a report. Raises ConfigError if it is none, was cut short, or contradicts itself."""

    def refuse(what: str, **more: Any) -> ConfigError:
        return ConfigError(what, field=str(path), hint="Write it anew with modelrunner check --report", **more)

    try:
        text = Path(path).read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError, RecursionError) as e:
        raise refuse(f"no report: {e}") from e
    kinds = [line.get("kind") if isinstance(line, dict) else None for line in lines]
    if not lines or kinds[0] != "header" or lines[0].get("schema") != SCHEMA:
        raise refuse("the file does not begin with a header", got=lines[:1], expected=f"kind header, schema {SCHEMA}")
    if kinds[-1] != "footer":
        raise refuse(
            "the file has no footer: the run was cut short", got=kinds[-1], expected="a last line of kind footer"
        )
    unknown = [k for k in kinds if k not in KINDS]
    if unknown or kinds.count("header") != 1 or kinds.count("footer") != 1:
        raise refuse(
            "lines that do not belong there", got=unknown or "several headers or footers", expected="one of each"
        )
    for number, line in enumerate(lines, 1):
        for name, types in READ.get(line["kind"], {}).items():
            if not isinstance(line.get(name), types) or (name not in line):
                expected = " or ".join("null" if t is type(None) else t.__name__ for t in types)
                got = {"got": line[name]} if name in line else {}
                raise refuse(f"line {number} ({line['kind']}): {name} is missing or odd", expected=expected, **got)
    clauses = {line["id"]: line for line in lines if line["kind"] == "clause"}
    counts = {o.value: sum(c["outcome"] == o.value for c in clauses.values()) for o in Outcome}
    if lines[-1]["counts"] != counts or kinds.count("clause") != len(clauses):
        raise refuse("the footer counts other clauses than the file holds", got=lines[-1]["counts"], expected=counts)
    return ReportFile(str(path), lines[0], clauses, lines[-1])
