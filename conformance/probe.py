"""What a probe declares: the clauses that it puts to the test, and what a runner must offer for it to run.

Clauses are named without their prefix, one by one or as a range: "ERR-001 SLOT-004..SLOT-006".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from conformance.clauses import clause, load_clauses
from conformance.context import Mismatch
from runner_api import Capability

Found = dict[str, list[Mismatch]]
# What a probe needs that reads what a whole step has built.
RECORDED = (Capability.GENERATE, Capability.STEP_RECORD)
ProbeFunction = Callable[[Any], Found]


def probe(clauses: str, *needs: Capability) -> Callable[[ProbeFunction], ProbeFunction]:
    """Mark a function that takes a `Bench` and returns the mismatches of each clause it put to the test.

    Its attributes `clauses` and `needs` hold what was declared. A bench whose runner offers less gets an empty answer;
    an answer about any other clause is a fault of the probe (ValueError).
    """
    declared, needed = _named(clauses), frozenset(needs)

    def mark(fn: ProbeFunction) -> ProbeFunction:
        @functools.wraps(fn)
        def judged(bench: Any) -> Found:
            if not needed <= bench.capabilities:
                return {}
            found = fn(bench)
            if not found.keys() <= declared:
                raise ValueError(f"probe {fn.__name__} does not declare {sorted(found.keys() - declared)}")
            return found

        judged.clauses, judged.needs = declared, needed  # type: ignore[attr-defined]
        return judged

    return mark


def clauses_of(fn: ProbeFunction) -> frozenset[str] | None:
    """The clauses that a probe declares; None for a function that declares nothing and so is always run."""
    return getattr(fn, "clauses", None)


def _named(words: str) -> frozenset[str]:
    found = set()
    for word in words.split():
        first, _, last = word.partition("..")
        low, high = clause(f"MR-{first}").id, clause(f"MR-{last or first}").id
        area = low.rpartition("-")[0]
        found |= {c for c in load_clauses() if low <= c <= high and c.rpartition("-")[0] == area}
    return frozenset(found)
