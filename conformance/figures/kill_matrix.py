"""Which mutant was noticed by clauses of which areas, from the JSON of `modelrunner mutants --json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conformance.clauses import load_clauses
from conformance.figures.look import BLUE, FAINT, GREY, INK, SMALL, VERMILION, tint
from conformance.figures.sheet import Sheet, text_width
from runner_api import ConfigError

# More mutants than this are drawn in two columns, where cells stay wide enough for their numbers.
ONE_COLUMN, NARROWEST = 40, 0.2
LINE = 0.14


@dataclass(frozen=True, slots=True)
class MutantLine:
    """One mutant. failed: how many clauses of each area noticed it, in the order of the picture's areas."""

    mutant: str
    failed: tuple[int, ...]
    survived: bool


@dataclass(frozen=True, slots=True)
class KillMatrixPicture:
    """areas: those of the clauses that noticed anything, in the order of the clauses' file."""

    runner: str
    areas: tuple[str, ...]
    lines: tuple[MutantLine, ...]

    @property
    def killed(self) -> int:
        return sum(not line.survived for line in self.lines)


def kill_matrix_data(matrix: Mapping[str, Any]) -> KillMatrixPicture:
    """Mutants in the file's order. Raises ConfigError for what is no kill matrix, and for one of no mutants."""
    try:
        failed = {str(m): [str(c) for c in clauses] for m, clauses in matrix["matrix"].items()}
        survivors = {str(s["mutant"]) for s in matrix["survivors"]}
        runner = str(matrix["runner"])
        met = {c.split("-")[1] for clauses in failed.values() for c in clauses}
    except (KeyError, TypeError, AttributeError, IndexError) as e:
        raise ConfigError(
            f"is no kill matrix: {type(e).__name__}: {e}",
            field="matrix",
            expected="the output of `modelrunner mutants --json`",
        ) from e
    if not failed:
        raise ConfigError("no mutant to draw", field="matrix", got=0, expected="at least one")
    order = dict.fromkeys(c.area for c in load_clauses().values())
    areas = tuple(a for a in order if a in met) + tuple(sorted(met - order.keys()))
    lines = tuple(
        MutantLine(m, tuple(sum(c.split("-")[1] == a for c in clauses) for a in areas), m in survivors)
        for m, clauses in failed.items()
    )
    return KillMatrixPicture(runner, areas, lines)


def kill_matrix(matrix: Mapping[str, Any]) -> Any:
    """Figure of a kill matrix (see the module)."""
    from conformance.figures.style import render

    data = kill_matrix_data(matrix)
    sheet = Sheet()
    total = len(data.lines)
    sheet.title(
        f"{data.killed} of {total} mutants of {data.runner} killed",
        "A number says how many clauses of that area noticed the mutant; darker is more. Survivors are orange.",
    )
    name = max(text_width(line.mutant, SMALL) * 0.95 for line in data.lines) + 0.1
    columns = num_columns(total, len(data.areas), name, sheet.width - 0.3)
    per_column = -(-total // columns)
    panel = (sheet.width - 0.3) / columns
    cell = min((panel - name - 0.1) / max(len(data.areas), 1), 0.3)
    heads = max((text_width(a, SMALL) for a in data.areas), default=0) + 0.1
    top = sheet.height + heads
    for k in range(columns):
        x = 0.15 + k * panel + name
        for n, line in enumerate(data.lines[k * per_column : (k + 1) * per_column]):
            y = top + n * LINE + n // ONE_COLUMN * heads
            if n % ONE_COLUMN == 0:  # again and again: nobody sees the heads of a picture of many pages
                for a, area in enumerate(data.areas):
                    sheet.label(x + (a + 0.5) * cell, y - 0.05, area, size=SMALL, turned=True)
            _draw_mutant(sheet, line, x, y, cell)
    sheet.height = top + per_column * LINE + (per_column - 1) // ONE_COLUMN * heads + 0.15
    return render(sheet)


def num_columns(mutants: int, areas: int, name: float, width: float) -> int:
    """Two for many mutants, unless their cells would be too narrow. name: the widest one's inches; width: of both."""
    return 2 if mutants > ONE_COLUMN and (width / 2 - name) / max(areas, 1) >= NARROWEST else 1


def _draw_mutant(sheet: Sheet, line: MutantLine, x: float, y: float, cell: float) -> None:
    middle = y + LINE / 2
    sheet.label(
        x - 0.05,
        middle,
        line.mutant,
        align="right",
        size=SMALL,
        bold=line.survived,
        colour=VERMILION if line.survived else INK,
    )
    for a, count in enumerate(line.failed):
        if count:
            sheet.box(x + a * cell, y + 0.01, cell - 0.02, LINE - 0.02, fill=tint(BLUE, min(0.25 + 0.08 * count, 0.6)))
            sheet.label(x + (a + 0.5) * cell - 0.01, middle, str(count), size=SMALL)
        else:
            sheet.box(
                x + a * cell, y + 0.01, cell - 0.02, LINE - 0.02, fill=tint(VERMILION, 0.2) if line.survived else FAINT
            )
    if line.survived and not any(line.failed):
        sheet.label(x + 0.05, middle, "survived", align="left", size=SMALL, colour=GREY)
