"""`modelrunner report`: reports of several runners side by side, area by area, and the badge of one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from conformance.report import plain_table
from conformance.report_file import ReportFile, read_report
from runner_api import ConfigError

PASSED = ("pass", "xpass")


def run_report(args: argparse.Namespace) -> int:
    """The command. Returns 0 whatever the reports say: it tells, it does not judge."""
    reports = [read_report(path) for path in args.files]
    if args.format == "badge":
        if len(reports) != 1:
            raise ConfigError("a badge speaks of one report", field="--format", got=args.files, expected="one FILE")
        print(json.dumps(badge(reports[0]), ensure_ascii=False))
        return 0
    rows = matrix(reports)
    told = markdown_table(rows) if args.format == "markdown" else plain_table([[*map(_one_line, row)] for row in rows])
    print(told)
    print()
    for number, report in enumerate(reports):
        print(("- " if args.format == "markdown" else "") + _legend(_name(reports, number), report))
    return 0


def matrix(reports: Sequence[ReportFile]) -> list[list[str]]:
    """Lines of cells: a heading with the runners, one line per area, MUST and SHOULD in all, and the verdicts.

    A cell is passed/asked of the MUSTs, with what was skipped behind it. Raises ConfigError for reports of different
    spec versions: their clauses are not the same.
    """
    versions = sorted({report.header["spec_version"] for report in reports})
    if len(versions) != 1:
        raise ConfigError(
            "reports of different specs cannot be merged", field="spec_version", got=versions, expected="one version",
            hint="Judge the runners again with one version of modelrunner",
        )  # fmt: skip
    areas = dict.fromkeys(c["area"] for report in reports for c in report.clauses.values())
    lines = [["area", *(_name(reports, n) for n in range(len(reports)))]]
    lines += [[area, *(_cell(report, area) for report in reports)] for area in areas]
    for level in ("MUST", "SHOULD"):
        lines.append([f"all {level}", *("{}/{}".format(*asked(report, level)) for report in reports)])
    lines.append(["verdict", *(report.footer["verdict"] for report in reports)])
    return lines


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(_one_line(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    return "\n".join(lines)


def _one_line(text: str) -> str:
    """What a runner says of itself may hold line breaks, which would end a row of the table."""
    return " ".join(text.split())


def badge(report: ReportFile) -> dict[str, Any]:
    """JSON of a shields.io endpoint. Counted are all clauses of the runner's row layout, those that were skipped too:
    who offers little cannot show full marks. Nothing is rounded.

    Raises ConfigError for a report of selected clauses, which says nothing of the others.
    """
    if report.header["selection"] is not None:
        raise ConfigError("the report is of selected clauses", field=report.path, expected="a report of all clauses")
    must, should = (asked(report, level, skipped_too=True) for level in ("MUST", "SHOULD"))
    whole = report.footer["verdict"] == "AGREE"
    message = f"MUST {must[0]}/{must[1]} · SHOULD {should[0]}/{should[1]} · spec {report.header['spec_version']}"
    color = "red" if not whole else "brightgreen" if must[0] == must[1] else "green"
    return {"schemaVersion": 1, "label": "modelrunner", "message": message, "color": color}


def asked(report: ReportFile, level: str, skipped_too: bool = False) -> tuple[int, int]:
    """(passed, asked) of the clauses of a level that are not about the other row layout.

    skipped_too: with those for which the runner offers too little.
    """
    layouts = (None, report.header["layout"])
    chosen = [c for c in report.clauses.values() if c["level"] == level and c["layout"] in layouts]
    if not skipped_too:
        chosen = [c for c in chosen if c["outcome"] != "skip"]
    return sum(c["outcome"] in PASSED for c in chosen), len(chosen)


def _cell(report: ReportFile, area: str) -> str:
    clauses = [c for c in report.clauses.values() if c["area"] == area]
    if not clauses:
        return "not asked"
    must = [c for c in clauses if c["level"] == "MUST" and c["outcome"] != "skip"]
    skipped = sum(c["outcome"] == "skip" for c in clauses)
    expected = sum(c["outcome"] == "xfail" for c in must)
    text = f"{sum(c['outcome'] in PASSED for c in must)}/{len(must)}" if must else "-"
    more = [f"{n} {word}" for n, word in ((expected, "expected to fail"), (skipped, "skipped")) if n]
    return f"{text} ({', '.join(more)})" if more else text


def _name(reports: Sequence[ReportFile], number: int) -> str:
    """The runner's name; with layout and device where a name occurs twice; with a number where that is not enough."""
    for keys in (("runner",), ("runner", "layout"), ("runner", "layout", "device")):
        names = [" ".join(report.header[key] for key in keys) for report in reports]
        if names.count(names[number]) == 1:
            return names[number]
    return f"{reports[number].header['runner']} #{number + 1}"


def _legend(name: str, report: ReportFile) -> str:
    h = report.header
    only = "" if h["selection"] is None else f", {len(h['selection'])} clauses selected"
    return _one_line(
        f"{name}: {h['target']}, {h['class']} {h['version']} on {h['device']}, {h['dtype']}, layout {h['layout']}, "
        f"noise {h['noise']}, seed {h['seed']}, against {h['oracle']}, spec {h['spec_version']}{only}"
    )
