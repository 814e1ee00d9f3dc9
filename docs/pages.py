"""Lays out the pages of the site: those of docs/, those made from the code, and files of the repository they link to.

Pages are written for GitHub, where a link is a path in the repository. Here a link to another page is one to its place
in the site, and a link to any other file is one to a page that shows it, so that the site needs no network. The id of a
clause is made a link to its law.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

LINK = re.compile(r"(!?\[[^\]\n]*\])\(([^()\s]+)\)")
CLAUSE = re.compile(r"(?<!\[)`(MR-[A-Z]+-\d{3})`")
PICTURE = re.compile(r"^<!-- picture: (\w+): (.+) -->$", re.MULTILINE)
# Files outside of docs/ that are pages of their own.
PAGES = {"DESIGN.md": "design.md", "CHANGELOG.md": "changelog.md"}
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".jsonl": "json", ".sh": "bash"}
CELL = re.compile(r"^# %%(.*)$", re.MULTILINE)
SHOWN_CHARACTERS = 200_000
# In front of a page that the search leaves out.
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
WITHOUT_OUTPUTS = "*What its programs print and draw is not shown here: run the notebook to see it.*"


def page_of(path: str) -> str:
    """The page, relative to the site's root, that shows this file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and path.endswith(".md"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def lines_outside_code(text: str) -> Iterator[tuple[str, bool]]:
    """Each line with its end, and whether it is prose, not in a fenced block."""
    fence = False
    for line in text.splitlines(keepends=True):
        is_fence = line.lstrip().startswith("```")
        yield line, not fence and not is_fence
        fence ^= is_fence


def links(text: str) -> list[str]:
    """What the prose of a page links to, in order."""
    return [target for line, prose in lines_outside_code(text) if prose for _, target in LINK.findall(line)]


def is_outside(target: str) -> bool:
    """Whether a link leads to another site, or to a place in its own page."""
    return target.startswith(("http://", "https://", "mailto:", "#"))


class Site:
    """The folder that the site is built from."""

    def __init__(self, root: Path, out: Path) -> None:
        self.root, self.out = root, out
        self.done: set[str] = set()  # files of the repository that have their page

    def add(self, path: str) -> None:
        """The page of a file of the repository, and those of whatever it links to."""
        if path in self.done:
            return
        self.done.add(path)
        source = self.root / path
        if path.endswith(".ipynb"):
            source = source.with_suffix(".py")  # the half that people edit
        if not source.is_file():
            raise SystemExit(f"{path} is linked to, but is no file")
        text = source.read_text(encoding="utf-8")
        if path.endswith(".md"):
            searched = path.startswith("docs/") or path in PAGES
            self.write(page_of(path), ("" if searched else NOT_SEARCHED) + self.relinked(text, path))
        elif path.endswith(".ipynb"):
            self.write(page_of(path), self.relinked(notebook_page(text), path))
        else:
            self.write(page_of(path), source_page(path, text))

    def write(self, page: str, text: str) -> None:
        place = self.out / page
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")

    def relinked(self, text: str, path: str) -> str:
        """The text of a page at `path` with its links turned to pages of the site, which are added."""

        def turned(match: re.Match[str]) -> str:
            label, target = match.groups()
            return match[0] if is_outside(target) else f"{label}({self._turned(target, path)})"

        up = posixpath.relpath(".", posixpath.dirname(page_of(path)) or ".")

        def law(match: re.Match[str]) -> str:
            return f"[{match[0]}]({up}/clauses.md#{match[1].lower()})"

        return "".join(
            CLAUSE.sub(law, LINK.sub(turned, line)) if prose else line for line, prose in lines_outside_code(text)
        )

    def _turned(self, target: str, path: str) -> str:
        file, hash_mark, anchor = target.partition("#")
        linked = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
        self.add(linked)
        return posixpath.relpath(page_of(linked), posixpath.dirname(page_of(path)) or ".") + hash_mark + anchor

    def add_pictures(self, draw: Callable[[str, Path], None]) -> list[str]:
        """Put a picture where a page asks for one; the names, each of which is drawn once."""
        drawn: list[str] = []
        for page in sorted(self.out.rglob("*.md")):
            text = page.read_text(encoding="utf-8")
            for name, _ in PICTURE.findall(text):
                if name not in drawn:
                    (self.out / "pictures").mkdir(exist_ok=True)
                    draw(name, self.out / "pictures" / f"{name}.svg")
                    drawn.append(name)
            up = posixpath.relpath(".", page.parent.relative_to(self.out).as_posix())
            page.write_text(PICTURE.sub(rf"![\2]({up}/pictures/\1.svg){{ .picture }}", text), encoding="utf-8")
        return drawn


def source_page(path: str, text: str) -> str:
    """A page that shows a file; of a long one, its beginning."""
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    rest = f"\n\n… and {len(text) - SHOWN_CHARACTERS} more characters" if len(text) > SHOWN_CHARACTERS else ""
    return f"{NOT_SEARCHED}# {path}\n\n{fence}{language}\n{text[:SHOWN_CHARACTERS].rstrip()}\n{fence}{rest}\n"


def notebook_page(text: str) -> str:
    """A page of a notebook's prose and programs, from the text of its .py half (jupytext, percent format)."""
    _, *pieces = CELL.split(text)
    cells = []
    for marker, body in zip(pieces[::2], pieces[1::2], strict=True):
        if "[markdown]" in marker:
            cells.append(re.sub(r"^# ?", "", body.strip("\n"), flags=re.MULTILINE))
        elif body.strip():
            cells.append(f"```python\n{body.strip()}\n```")
    title, line, rest = cells[0].partition("\n")
    return "\n\n".join([title + f"\n\n{WITHOUT_OUTPUTS}\n" + line + rest, *cells[1:]]) + "\n"
