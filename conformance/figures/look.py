"""Colours, sizes and names that every picture shares. Nothing here needs a drawing library.

The hues are those of Okabe and Ito, which people with any common colour blindness can tell apart. Requests are filled
with a light tint of theirs, so that black text reads on it; there are fewer hues than requests, therefore every colour
comes with a label.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

WIDTH = 9.0  # inches: a notebook cell, or a page in landscape
CELL, SMALL, TITLE = 8.0, 7.0, 10.0  # points
INK, GREY, PALE, FAINT = "#1a1a1a", "#666666", "#bbbbbb", "#eeeeee"
BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442",
)  # fmt: skip
DARK_YELLOW = "#B3A200"
# Neighbours in this order differ in lightness too, for print without colour.
HUES = (SKY, ORANGE, GREEN, YELLOW, PURPLE, BLUE, VERMILION)
HATCH = "////"
LONGEST_NAME = 6
NO_BREAK = "\u00a0"  # a space at which no line ends


def tint(colour: str, part: float = 0.5) -> str:
    """The colour mixed with white: `part` of it is left."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - c) * part):02x}" for c in channels)


def hue(number: int) -> str:
    """The hue of the request with this number."""
    return HUES[number % len(HUES)]


class Names:
    """Requests by number, colour and a name short enough for a cell.

    order: the ids by number. Ids of up to LONGEST_NAME letters stand for themselves, longer ones lose what all share in
    front; where that does not help either, a request is called by its number.
    """

    def __init__(self, req_ids: Iterable[str]) -> None:
        self.order = tuple(dict.fromkeys(req_ids))
        self._number = {r: i for i, r in enumerate(self.order)}
        self._short = short_names(self.order)

    def number(self, req_id: str) -> int:
        """Which request it is, from 0, in the order of their ids here."""
        return self._number[req_id]

    def short(self, req_id: str | None) -> str:
        """Its name in a cell; empty for nobody."""
        return "" if req_id is None else self._short[req_id]

    def hue(self, req_id: str | None) -> str:
        """Its colour as "#rrggbb"; grey for nobody."""
        return PALE if req_id is None else hue(self._number[req_id])

    def stroke(self, req_id: str | None) -> str:
        """The colour of a thin line of the request's: yellow would be too pale for one."""
        return DARK_YELLOW if self.hue(req_id) == YELLOW else self.hue(req_id)

    def fill(self, req_id: str | None) -> str:
        """The colour of its cells. Every second round of the hues is lighter, so that few neighbours look the same."""
        if req_id is None:
            return FAINT
        return tint(self.hue(req_id), 0.28 if self._number[req_id] // len(HUES) % 2 else 0.5)

    def legend(self, shown: Iterable[str]) -> str:
        """What the short names stand for; empty where each is the id itself. A pair is never broken into two lines."""
        pairs = [(self.short(r), r) for r in dict.fromkeys(shown)]
        told = (f"{short} = {cut(plain(r))}".replace(" ", NO_BREAK) for short, r in pairs if short != r)
        return ", ".join(told)


def short_names(req_ids: Sequence[str]) -> Mapping[str, str]:
    """A name of at most LONGEST_NAME letters for each id, all different. Ids that are not printable go by number.

    >>> list(short_names(["cmpl-8f3a-0", "cmpl-8f3a-1"]).values())
    ['…0', '…1']
    """
    if not all(r and r == plain(r) for r in req_ids):
        return {r: f"#{i}" for i, r in enumerate(req_ids)}
    if all(len(r) <= LONGEST_NAME for r in req_ids):
        return {r: r for r in req_ids}
    shared = len(_common_prefix(req_ids)) if len(req_ids) > 1 else 0
    tails = ["…" + r[shared:] if shared else r for r in req_ids]
    if all(1 < len(t) <= LONGEST_NAME or not shared for t in tails) and max(map(len, tails)) <= LONGEST_NAME:
        return dict(zip(req_ids, tails, strict=True))
    return {r: f"#{i}" for i, r in enumerate(req_ids)}


def plain(text: str) -> str:
    """The text, or its escapes where it is not printable ASCII: no font has every letter."""
    return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]


def _common_prefix(texts: Sequence[str]) -> str:
    low, high = min(texts), max(texts)
    n = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[:n]


def cut(text: str, limit: int = 40) -> str:
    """The text without its middle where it is longer than `limit`."""
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 2 + 1 :]}"
