"""From a sheet to a matplotlib figure, and from a figure to a file. The only module here that needs matplotlib."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

from conformance.figures.look import HATCH, PALE
from conformance.figures.sheet import Sheet
from runner_api import ConfigError

DOTS_PER_INCH = 150
ENDINGS = (".png", ".svg")
_SETTINGS: Any = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "hatch.linewidth": 0.5, "hatch.color": PALE,
    "svg.hashsalt": "modelrunner", "svg.fonttype": "path", "path.simplify": False,
}  # fmt: skip


def check_matplotlib() -> None:
    """Raise ConfigError, with what to install, where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise ConfigError(
            f"pictures need matplotlib, which cannot be imported: {e}", field="figures",
            hint="pip install 'modelrunner[plot]'",
        ) from e  # fmt: skip


@cache
def _figure_class() -> type:
    """A Figure that a notebook shows by itself, without pyplot and its list of open figures."""
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A matplotlib Figure; `_repr_png_` is what notebooks ask for."""

        def __init__(self, width: float, height: float) -> None:
            super().__init__(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor="white")
            FigureCanvasAgg(self)

        def _repr_png_(self) -> bytes:
            return picture_bytes(self, ".png")

    return Picture


def render(sheet: Sheet) -> Any:
    """The sheet as a matplotlib Figure of the same size in inches."""
    figure_class = _figure_class()
    import matplotlib
    from matplotlib.patches import FancyArrowPatch, Rectangle

    with matplotlib.rc_context(_SETTINGS):
        figure = figure_class(sheet.width, sheet.height)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, sheet.width)
        axes.set_ylim(sheet.height, 0)
        for b in sheet.boxes:
            axes.add_patch(
                Rectangle(
                    (b.x, b.y), b.width, b.height, facecolor=b.fill or "none", edgecolor=b.edge or "none",
                    linewidth=b.line, zorder=b.layer,
                )
            )  # fmt: skip
            if b.hatch:  # on its own, so that lines of the pattern have their own colour
                axes.add_patch(
                    Rectangle(
                        (b.x, b.y), b.width, b.height, facecolor="none", edgecolor=PALE, linewidth=0, hatch=b.hatch,
                        zorder=b.layer,
                    )
                )  # fmt: skip
        for line in sheet.lines:
            if line.arrow:
                axes.add_patch(
                    FancyArrowPatch(
                        (line.x0, line.y0), (line.x1, line.y1), arrowstyle="-|>", mutation_scale=7, color=line.colour,
                        linewidth=line.width, shrinkA=0, shrinkB=0, zorder=line.layer,
                    )
                )  # fmt: skip
            else:
                axes.plot(
                    (line.x0, line.x1), (line.y0, line.y1), color=line.colour, linewidth=line.width,
                    linestyle=":" if line.dashed else "-", solid_capstyle="butt", zorder=line.layer,
                )  # fmt: skip
        for t in sheet.labels:
            axes.text(
                t.x, t.y, t.text.replace("$", r"\$"), fontsize=t.size, color=t.colour,
                fontweight="bold" if t.bold else "normal", zorder=5, rotation=90 if t.turned else 0,
                ha="center" if t.turned else t.align, va="bottom" if t.turned else "center",
            )  # fmt: skip
    return figure


def picture_bytes(figure: Any, ending: str) -> bytes:
    """The figure as PNG or SVG; the same figure gives the same bytes."""
    import matplotlib

    buffer = io.BytesIO()
    metadata = {"Date": None} if ending == ".svg" else {"Software": None}
    with matplotlib.rc_context(_SETTINGS):
        figure.savefig(buffer, format=ending[1:], dpi=DOTS_PER_INCH, metadata=metadata)
    return buffer.getvalue()


def save(figure: Any, path: str | Path) -> None:
    """Write a figure. Raises ConfigError for an ending that is no picture's, and for a file that cannot be written."""
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError("no ending of a picture", field=str(path), got=path.suffix, expected=" or ".join(ENDINGS))
    try:
        path.write_bytes(picture_bytes(figure, path.suffix.lower()))
    except OSError as e:
        raise ConfigError(f"cannot be written: {e}", field=str(path)) from e


__all__ = ["DOTS_PER_INCH", "ENDINGS", "HATCH", "check_matplotlib", "picture_bytes", "render", "save"]
