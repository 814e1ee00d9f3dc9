"""How many mutants there are of each kind of fault, by runner and layout: `python -m conformance.mutant_kinds`."""

from __future__ import annotations

from collections import Counter

from conformance.mutant import KINDS
from conformance.mutants import MUTANTS
from runner_api.config import LAYOUTS

Cell = tuple[str, str, str]  # kind, runner, layout


def kind_table() -> dict[Cell, int]:
    """Every kind, runner and layout; 0 where there is no mutant."""
    found = Counter((m.kind, runner, m.layout) for runner, mutants in MUTANTS.items() for m in mutants)
    cells = ((kind, runner, layout) for kind in KINDS for runner in MUTANTS for layout in LAYOUTS)
    return {cell: found[cell] for cell in cells}


def table_as_text() -> str:
    """One line for each kind, one column for each runner and layout."""
    table = kind_table()
    columns = [(runner, layout) for runner in MUTANTS for layout in LAYOUTS]
    lines = ["kind " + "".join(f"{f'{runner} {layout}':>12}" for runner, layout in columns) + "  what"]
    for kind, what in KINDS.items():
        lines.append(f"{kind:5}" + "".join(f"{table[kind, *column]:>12}" for column in columns) + f"  {what}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table_as_text())
