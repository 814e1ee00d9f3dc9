"""`python -m conformance.catalogue [ID or KIND …] [--file PATH] [--runner NAME] [--variants] [--json]`.

Exit codes: 0 every case that ran passed (and every variant was caught), 1 one did not, 2 nothing ran, or a name is
wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from conformance.catalogue.judge import ERROR, FAIL, PASS, SKIP, Result, caught, run_case, run_variants
from conformance.catalogue.scenario import Scenario, parse_file, select
from runner_api import ConfigError, RunnerError, load_factory
from runner_api.selection import offered_layouts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.catalogue", description="Public bugs as scenarios.")
    parser.add_argument("ids", nargs="*", metavar="ID", help="cases (B21) or kinds (K4); none: all")
    parser.add_argument("--file", help="scenarios of a file of your own instead of the catalogue's; all of them")
    parser.add_argument("--runner", help="a name, package.module:factory, …; the one that each case names by default")
    parser.add_argument("--variants", action="store_true", help="run the faulty variants of the reference too")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(argv)
    try:
        if args.file and args.ids:
            raise ConfigError("either ids of the catalogue or a file", field="--file", got=args.ids)
        if args.runner is not None:
            offered_layouts(load_factory(args.runner))  # a program that cannot be started is misuse, too
        cases = parse_file(args.file) if args.file else select(args.ids or None)
        results = [(case, result) for case in cases for result in run_case(case, args.runner)]
        faulty = [(case, result) for case in cases for result in run_variants(case)] if args.variants else []
    except RunnerError as e:
        print(e, file=sys.stderr)
        return 2
    told = _as_json(results, faulty) if args.json else _as_text(results, faulty)
    print(told)
    return _exit_code(results, faulty)


Pairs = Sequence[tuple[Scenario, Result]]


def _exit_code(results: Pairs, faulty: Pairs) -> int:
    outcomes = Counter(result.outcome for _, result in results)
    if outcomes[FAIL] or outcomes[ERROR] or _missed(faulty):
        return 1
    return 0 if outcomes[PASS] else 2


def _missed(faulty: Pairs) -> Pairs:
    """Runs of faulty variants that nobody noticed."""
    return [(case, result) for case, result in faulty if result.outcome != SKIP and not caught(case, result)]


def _as_text(results: Pairs, faulty: Pairs) -> str:
    lines = []
    for case, result in results:
        lines.append(f"{case.id:5}{case.kind:4} {result.layout:6} {result.outcome:8} {case.title}")
        lines += [f"      {d.line()}" for d in result.differences[:3]]
        lines += [f"      {result.reason}"] if result.reason else []
    for case, result in faulty:
        seen = "caught" if caught(case, result) else "skip" if result.outcome == SKIP else "MISSED"
        lines.append(f"{case.id:5}{case.kind:4} {result.layout:6} {seen:8} variant {result.variant}: {result.story}")
    outcomes = Counter(result.outcome for _, result in results)
    ran = len({case.id for case, result in results if result.outcome in (PASS, FAIL, ERROR)})
    total = len({case.id for case, _ in results})
    lines.append(f"{ran} of {total} cases ran: " + ", ".join(f"{n} {name}" for name, n in sorted(outcomes.items())))
    if faulty:
        lines.append(f"{sum(caught(c, r) for c, r in faulty)} of {len(faulty)} runs of faulty variants were caught")
    if not outcomes[PASS] and not outcomes[FAIL] and not outcomes[ERROR]:
        lines.append("nothing ran, so nothing is shown")
    return "\n".join(lines)


def _as_json(results: Pairs, faulty: Pairs) -> str:
    told: dict[str, Any] = {
        "cases": [{**r.to_json(), "title": case.title, "source": list(case.source)} for case, r in results],
        "variants": [{**r.to_json(), "caught": caught(case, r)} for case, r in faulty],
    }
    return json.dumps(told, indent=1, default=str)


if __name__ == "__main__":
    raise SystemExit(main())
