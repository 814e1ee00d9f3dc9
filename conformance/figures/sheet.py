"""A sheet of boxes, texts, lines and arrows, in inches from the upper left corner; no drawing library is needed.

A picture puts its marks on a sheet one below the other and takes as much height as it needs; `style.render` makes a
figure of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance.figures.look import CELL, INK, NO_BREAK, TITLE, WIDTH

# Widths of the letters of the font that pictures are drawn in (DejaVu Sans), in parts of the size, rounded up.
LETTERS = {
    letter: width
    for width, letters in {
        0.28: "'ijl", 0.3: "IJ", 0.32: f" ,.·{NO_BREAK}", 0.34: "/:;\\|", 0.37: "f-", 0.4: "()[]t", 0.42: "r!",
        0.46: '"', 0.5: "*_`–", 0.54: "sz?", 0.56: "cL", 0.6: "Fkvxy", 0.62: "PTYoae", 0.64: "EhnuSbdgpq$0123456789{}",
        0.66: "K", 0.7: "AVXZBRC", 0.76: "UNH", 0.79: "DG&OQ▲", 0.84: "w#+<=>^~×→", 0.87: "M", 1.0: "%mW@…",
    }.items()
    for letter in letters
}  # fmt: skip
BOLD = 1.14  # how much wider bold text is


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle. fill, edge: colours, "" for none. hatch: a pattern of lines, "" for none."""

    x: float
    y: float
    width: float
    height: float
    fill: str = ""
    edge: str = ""
    hatch: str = ""
    line: float = 0.5
    layer: int = 1


@dataclass(frozen=True, slots=True)
class Label:
    """A text; (x, y) is the middle of its `align` side. size in points."""

    x: float
    y: float
    text: str
    size: float = CELL
    colour: str = INK
    align: str = "center"
    bold: bool = False
    turned: bool = False  # read from below to above; (x, y) is then its lower end


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line; with `arrow`, its end has a head."""

    x0: float
    y0: float
    x1: float
    y1: float
    colour: str = INK
    width: float = 1.0
    arrow: bool = False
    dashed: bool = False
    layer: int = 3


@dataclass(slots=True)
class Sheet:
    """Marks, and how far down they go."""

    width: float = WIDTH
    height: float = 0.0
    boxes: list[Box] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, **look: object) -> None:
        self.boxes.append(Box(x, y, width, height, **look))  # type: ignore[arg-type]

    def label(self, x: float, y: float, text: str, **look: object) -> None:
        if text:
            self.labels.append(Label(x, y, text, **look))  # type: ignore[arg-type]

    def line(self, x0: float, y0: float, x1: float, y1: float, **look: object) -> None:
        self.lines.append(Line(x0, y0, x1, y1, **look))  # type: ignore[arg-type]

    def title(self, text: str, note: str = "") -> None:
        """A heading at the current height, with a smaller line below."""
        self.down(0.2)
        for line in wrapped(text, BOLD * TITLE, self.width - 0.3):
            self.label(0.15, self.height, line, size=TITLE, align="left", bold=True)
            self.down(0.2)
        self.note(note)
        self.down(0.05)

    def note(self, text: str, colour: str = "#555555") -> None:
        """A paragraph in small print, broken into lines that fit."""
        for line in wrapped(text, CELL, self.width - 0.3):
            self.label(0.15, self.height, line, align="left", colour=colour)
            self.down(0.17)

    def down(self, inches: float) -> None:
        self.height += inches


def text_width(text: str, size: float) -> float:
    """An upper estimate of the width of numbers and names in inches."""
    return sum(map(_em, text)) * size / 72


def _em(letter: str) -> float:
    """Of one letter, in parts of the size: a digit is 0.64."""
    if letter in "WMmw@%" or not letter.isascii():
        return 1.1
    return 0.7 if letter.isupper() else 0.64


def prose_width(text: str, size: float) -> float:
    """The width of a line of text in inches, letter by letter; a letter that is not known counts as a wide one."""
    return sum(LETTERS.get(letter, 1.1) for letter in text) * size / 72


def wrapped(text: str, size: float, width: float) -> list[str]:
    """The text in lines of at most that width, broken between words (not at no-break spaces)."""
    lines: list[str] = []
    for word in filter(None, text.split(" ")):
        if lines and prose_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [line.replace(NO_BREAK, " ") for line in lines]
