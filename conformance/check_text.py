"""The text of `modelrunner check`: who was judged, areas, what is not a pass, lockstep, findings, verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from conformance.certificates import near_ties_text
from conformance.clauses import clause
from conformance.lockstep import DIVERGE
from conformance.report import plain_table
from conformance.smoke import ADVICE

# The second line of the text.
SHOWN = {"layout": "layout", "spec": "spec_version", "seed": "seed", "rounds": "rounds", "against": "against"}
# Outcomes that are told clause by clause, with their titles.
TOLD = {
    "fail": "failed", "error": "error in", "xpass": "passes against expectation", "untested": "not tested",
    "xfail": "fails as expected",
}  # fmt: skip
WIDTH = 120


def check_text(report: dict[str, Any]) -> Iterator[str]:
    """The lines. report: what `check --json` prints."""
    yield report["runner"]
    yield " ".join(f"{key}={report[name]}" for key, name in SHOWN.items())
    if report["selection"] is not None:
        yield f"clauses: {len(report['selection'])} selected"
    if report["smoke"] is not None:
        yield f"\nsmoke: FAILED in the step: {report['smoke']}\n{ADVICE}\n\nverdict: {DIVERGE}"
        return
    yield "smoke: ok\n"
    if report["areas"]:
        yield plain_table([["area", "MUST", "SHOULD", "skipped"], *_area_lines(report["areas"])])
    yield from _exceptions(report)
    for entry in report["lockstep"]:
        yield from _lockstep(entry)
    if report["lockstep_left_out"]:
        yield f"\nlockstep: left out, {report['lockstep_left_out']}"
    yield from _corpus(report["corpus"])
    for finding in report["findings"]:
        yield f"\n{finding['text']}"
    yield from (f"note: {note}" for note in report["notes"])
    if report["areas"]:
        yield from (f"not a pass: {fault}" for fault in report["faults"])
    yield f"\n{_verdict(report)}"


def _area_lines(areas: dict[str, Any]) -> Iterator[list[str]]:
    for name, area in areas.items():
        cells = ["{}/{}".format(*area[level]) if area[level][1] else "-" for level in ("must", "should")]
        yield [name, *cells, str(area["skipped"] or "-")]


def _exceptions(report: dict[str, Any]) -> Iterator[str]:
    """What is not a pass: failures with their first mismatch, exceptions, clauses that nothing tested, skipped ones."""
    behind = clauses_by_reason(report["clauses"], "untested")
    for outcome, title in TOLD.items():
        for clause_id, entry in report["clauses"].items():
            if entry["outcome"] == outcome and not (outcome == "untested" and entry["reason"] in behind):
                yield f"{title}: {clause_id} {clause(clause_id).law}"
                yield from (f"    {text}" for text in _because(entry))
    for reason, clause_ids in behind.items():
        yield from _wrapped(f"not tested ({reason}):", clause_ids)
    for error, times in Counter(f"error: {e['where']}: {e['error']}" for e in report["errors"]).items():
        yield error if times == 1 else f"{error} (x{times})"
    for reason, clause_ids in skipped_by_reason(report["clauses"]).items():
        yield from _wrapped(f"skipped ({reason}):", clause_ids)


def skipped_by_reason(clauses: Mapping[str, Any]) -> dict[str, list[str]]:
    """Reason to the ids (without their prefix) of the clauses that were skipped for it; clauses: those of a report."""
    return clauses_by_reason(clauses, "skip")


def clauses_by_reason(clauses: Mapping[str, Any], outcome: str) -> dict[str, list[str]]:
    """As `skipped_by_reason`, for any outcome; clauses without a reason are left out."""
    found: dict[str, list[str]] = {}
    for clause_id, entry in clauses.items():
        if entry["outcome"] == outcome and entry["reason"]:
            found.setdefault(entry["reason"], []).append(clause_id.removeprefix("MR-"))
    return found


def _because(entry: dict[str, Any]) -> Iterator[str]:
    if entry["first"]:
        yield entry["first"]
    if entry["reason"]:
        yield f"{entry['reason']} ({entry['issue']})" if entry["issue"] else entry["reason"]


def _wrapped(line: str, words: list[str]) -> Iterator[str]:
    for word in words:
        if len(line) + 1 + len(word) > WIDTH:
            yield line
            line = "   "
        line += f" {word}"
    yield line


def _lockstep(entry: dict[str, Any]) -> Iterator[str]:
    where = f"{entry['model']} in {entry['dtype']}" if entry["dtype"] else entry["model"]
    yield (
        f"\nlockstep on {where}: {entry['verdict']} steps={entry['steps']} elements={entry['elements']} "
        f"tokens={entry['tokens']} "
        + near_ties_text(entry["near_ties"], entry["tokens"], entry["expected_near_ties"], entry["near_tie_cap"])
    )
    if entry["first"]:
        yield f"first divergence: {entry['first']}"


def _corpus(entries: list[dict[str, Any]]) -> Iterator[str]:
    if entries:
        told = (f"{sum(e['outcome'] == o for e in entries)} {o}" for o in ("agree", "diverge", "skip", "error"))
        yield f"\ncorpus: {len(entries)} cases, {', '.join(told)}"
    yield from (f"{e['outcome']}: {e['case']}\n    {e['first']}" for e in entries if e["first"])


def _verdict(report: dict[str, Any]) -> str:
    if not report["areas"]:
        return f"verdict: {report['verdict']} (lockstep alone: no clause was asked)"
    must, should = (
        [sum(area[level][i] for area in report["areas"].values()) for i in (0, 1)] for level in ("must", "should")
    )
    names = {"steps": "steps", "preempt": "preemptions", "prefix_hit": "prefix hits"}
    steps = ", ".join(f"{report['counts'].get(key, 0)} {name}" for key, name in names.items())
    return f"verdict: {report['verdict']} MUST {must[0]}/{must[1]} SHOULD {should[0]}/{should[1]} ({steps})"
