"""The persistent-batch experiment drawn: entries written step by step, and the ratio against the lifetime.

matplotlib is imported when it is needed.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from conformance.bench.persistence import Comparison
from runner_api import ConfigError

FORMATS = (".png", ".svg")
REBUILD, DIFFS = "#b3461c", "#1b6ca8"


def check_plot(file: str) -> None:
    """Raise ConfigError, before anything has been measured, if no plot of that name can be made."""
    if Path(file).suffix.lower() not in FORMATS:
        raise ConfigError(
            "not a kind of picture", field="--plot", got=file, expected=f"a name in {' or '.join(FORMATS)}"
        )
    _figure_class()


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ConfigError(
            f"a plot needs matplotlib: {e}", field="--plot", hint="pip install 'modelrunner[plot]', or leave --plot out"
        ) from e
    return Figure


def plot_persistence(file: str, main: Comparison, points: dict[int, Comparison]) -> None:
    """Write the picture. points: the sweep by lifetime; without one there is one panel."""
    figure = _figure_class()(figsize=(11 if points else 5.5, 4.2), layout="constrained")
    panels = figure.subplots(1, 2 if points else 1, squeeze=False)[0]
    _draw_entries(panels[0], main)
    if points:
        _draw_ratios(panels[1], points)
    figure.suptitle(f"{main.info.name}, {main.info.layout} layout, seed {main.trace.seed}")
    figure.savefig(file, dpi=150)


def _draw_entries(panel: Any, c: Comparison) -> None:
    for way, label, colour in ((c.rebuild, "rebuilding", REBUILD), (c.diffs, "diffs", DIFFS)):
        entries = list(accumulate(way.written))
        panel.plot(range(1, len(entries) + 1), entries, color=colour)
        panel.annotate(f"{label}: {entries[-1]:,}", (len(entries), max(entries[-1], 1)), xytext=(-4, -24),
                       textcoords="offset points", ha="right", color=colour)  # fmt: skip
    panel.set(yscale="log", xlabel="step", ylabel="block-table entries written so far")
    panel.set_title(f"{c.entry_ratio:.2f} times fewer entries")
    _tidy(panel)


def _draw_ratios(panel: Any, points: dict[int, Comparison]) -> None:
    lifetimes = list(points)
    for values, label, colour in (
        ([c.entry_ratio for c in points.values()], "entries", REBUILD),
        ([c.time_ratio for c in points.values()], "time of a step", DIFFS),
    ):
        panel.plot(lifetimes, values, "o-", color=colour, label=label)
    panel.axhline(1, color="0.4", linewidth=1, linestyle="--")
    panel.annotate("no gain", (lifetimes[-1], 1), xytext=(0, 4), textcoords="offset points", ha="right", color="0.4")
    panel.set(xscale="log", yscale="log", xlabel="steps that every request lives", ylabel="rebuilding / diffs")
    panel.set_xticks(lifetimes, [str(lifetime) for lifetime in lifetimes])
    panel.minorticks_off()
    panel.set_title("What keeping rows saves")
    panel.legend(frameon=False)
    _tidy(panel)


def _tidy(panel: Any) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", color="0.9")
