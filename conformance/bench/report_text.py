"""Tables of numbers for people."""

from __future__ import annotations

from collections.abc import Sequence


def number_table(lines: Sequence[Sequence[str]], num_names: int = 1) -> str:
    """Columns of a table whose first line is its head: `num_names` of names, to the left, then numbers, to the right.

    >>> print(number_table([["", "ms"], ["rows", "12.0"], ["all", "3"]]))
            ms
    ----  ----
    rows  12.0
    all      3
    """
    widths = [max(len(line[j]) for line in lines) for j in range(len(lines[0]))]
    text = [
        "  ".join(
            cell.ljust(w) if j < num_names else cell.rjust(w)
            for j, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    text.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(text)


def count(value: float | None) -> str:
    """A number of things, with commas; a dash for None."""
    return "–" if value is None else f"{value:,.0f}"


def ratio(value: float, other: float) -> str:
    """How many times `other` is in `value`; a dash if there is nothing to divide by."""
    return f"{value / other:.2f}" if other else "–"


def microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f}"
