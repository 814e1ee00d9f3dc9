"""`modelrunner clauses`: what a runner is judged by, as a table, as JSON with tests and mutants, or as a page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from conformance.clauses import Clause, areas, clause, load_clauses
from conformance.matrix import markdown_table
from conformance.report import plain_table
from runner_api import SPEC_VERSION, ConfigError


def run_clauses(args: argparse.Namespace) -> int:
    """List the clauses whose id (with or without `MR-`) starts with `args.area`."""
    if args.json and args.markdown:
        raise ConfigError("one form at a time", field="--markdown", got="--json --markdown", expected="one of them")
    start = (args.area or "").upper()
    chosen = [c for c in load_clauses().values() if c.id.startswith(start) or c.id.startswith(f"MR-{start}")]
    if not chosen:
        clause(start)  # raises, with the nearest ids
    if args.json:
        print(json.dumps(clauses_json(chosen, args.cache), indent=1))
    elif args.markdown:
        print("\n".join(page(chosen)))
    else:
        lines = [[c.id, c.level, c.law, requires(c)] for c in chosen]
        print(plain_table([["clause", "level", "law", "requires"], *lines]))
    return 0


def clauses_json(chosen: Sequence[Clause], use_cache: bool = True) -> dict[str, Any]:
    """{"clauses": [{id, level, area, law, requires, since, until, source, layout, tests, mutants}]}; the last two are
    what really ran, and what was really killed."""
    from conformance.coverage import coverage

    found = coverage(use_cache=use_cache)
    return {
        "clauses": [
            {
                "id": c.id, "level": c.level, "area": c.area, "law": c.law,
                "requires": sorted(x.value for x in c.requires), "since": c.since, "until": c.until,
                "source": c.source, "layout": c.layout, "tests": found.tests[c.id],
                "mutants": found.mutants[c.id],
            }
            for c in chosen
        ]
    }  # fmt: skip


def requires(c: Clause) -> str:
    """The capabilities, and the layout if there is one, in words."""
    return " ".join([*sorted(x.value for x in c.requires), *([f"{c.layout}_layout"] if c.layout else [])])


def page(chosen: Sequence[Clause]) -> Iterator[str]:
    """A page of Markdown: the clauses by area."""
    yield "# Clauses\n"
    yield (
        f"Spec {SPEC_VERSION}: {len(chosen)} clauses. Written by `modelrunner clauses --markdown` from "
        "`conformance/clauses.toml`; change that file, not this page.\n"
    )
    yield (
        "A runner is judged by the clauses whose capabilities it offers and whose layout it has; the others are "
        "skipped, and the report says why."
    )
    for area in areas():
        of_area = [c for c in chosen if c.area == area]
        if of_area:
            rows = [[c.id, c.level, c.law, requires(c), c.source] for c in of_area]
            yield f"\n## {area}\n"
            yield markdown_table([["clause", "level", "law", "requires", "source"], *rows])
