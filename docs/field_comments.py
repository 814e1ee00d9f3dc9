"""For the API pages: fields of dataclasses and constants are explained by comments, which griffe does not read.

The comment behind a field, or the lines right above it, becomes its docstring. A default that a lambda makes is shown
as `...`: the comment says more.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

# Comments for tools, and lines that divide a file.
NOT_PROSE = re.compile(r"(noqa|fmt:|type:|pragma|--)")
CODE = re.compile(r"(`[^`]*`)")


class FieldComments(griffe.Extension):
    """Give each attribute without a docstring its comment."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        if "default_factory=lambda" in str(attr.value).replace(" = ", "="):
            attr.value = "..."
        if attr.docstring is None and attr.lineno and isinstance(attr.filepath, Path):
            text = comment_at(attr.lines_collection[attr.filepath], attr.lineno, attr.endlineno or attr.lineno)
            if text:
                attr.docstring = griffe.Docstring(plain(text), parent=attr)


def comment_at(lines: list[str], first: int, last: int) -> str:
    """The comment of the statement in lines first to last, counted from 1: behind its end, or else right above it."""
    _, mark, behind = lines[last - 1].partition("  # ")
    if mark and not NOT_PROSE.match(behind):
        return behind.strip()
    above: list[str] = []
    for line in reversed(lines[: first - 1]):
        text = line.strip()
        if not text.startswith("# ") or NOT_PROSE.match(text[2:]):
            break
        above.insert(0, text[2:])
    return " ".join(above)


def plain(text: str) -> str:
    """The text with nothing in it that Markdown would take for a link, a tag or emphasis; code stays code."""
    return "".join(
        part if CODE.fullmatch(part) else re.sub(r"([\[\]*_<>])", r"\\\1", part) for part in CODE.split(text)
    )
