"""Build the site into site/: `python docs/build.py`. A warning is an error.

Pages are laid out in build/docs first: those of this folder, DESIGN.md and CHANGELOG.md, the pages made from clauses,
commands and docstrings, the pictures, and every file that a page links to. Needs the extras `docs` and `plot`.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
STAGE = ROOT / "build" / "docs"
SITE = ROOT / "site"
sys.path[:0] = [str(HERE), str(ROOT)]
# What a browser would fetch by itself from elsewhere.
REMOTE = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*\bhref=\"?(?:https?:)?//")


def lay_out(stage: Path) -> None:
    """All pages and pictures, in place of whatever is there."""
    from generated import generated_pages
    from pages import PAGES, Site
    from pictures import save_picture

    shutil.rmtree(stage, ignore_errors=True)
    site = Site(ROOT, stage)
    for path in [*sorted(HERE.glob("*.md")), *(ROOT / name for name in PAGES)]:
        site.add(path.relative_to(ROOT).as_posix())
    for page, text in generated_pages():
        site.write(page, text)
    shutil.copytree(HERE / "assets", stage / "assets")
    site.add_pictures(save_picture)


def build() -> None:
    """mkdocs, strictly: a link without a target, a page without a place, a name without its docstrings end it."""
    from mkdocs.commands.build import build as build_site
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build_site(config)


def check_self_contained(site: Path) -> None:
    """No page makes a browser fetch anything from another place."""
    pages = sorted(site.rglob("*.html"))
    found = [f"{p.relative_to(site)}: {m[0]}" for p in pages for m in REMOTE.finditer(p.read_text(encoding="utf-8"))]
    if found or not pages:
        raise SystemExit("pages that fetch from elsewhere:\n" + "\n".join(found) if found else "no page was built")


def main() -> int:
    import logging

    from mkdocs.exceptions import Abort

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    start = time.perf_counter()
    lay_out(STAGE)
    laid_out = time.perf_counter()
    try:
        build()
    except Abort as e:
        print(e, file=sys.stderr)
        return 1
    check_self_contained(SITE)
    end = time.perf_counter()
    count = len(list(SITE.rglob("*.html")))
    print(f"site/: {count} pages, laid out in {laid_out - start:.1f} s, built in {end - laid_out:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
