"""The pages of the site: the tutorial runs and prints what it shows, links lead somewhere, generated pages are whole.

Whether the site builds is for `make docs` to say, which has the tools.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import posixpath
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from conformance.clauses import load_clauses
from engine_core.cli import build_parser, main
from runner_api import Capability, save_trace
from runner_api.environment import VARIABLES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TUTORIAL = (DOCS / "tutorial.md").read_text(encoding="utf-8")
NAV = re.findall(r"^ +- (?:.+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
LEFT_OUT = "…"


def module(name: str) -> ModuleType:
    """A module of docs/, which is a folder of programs and no package."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOCS))


pages = module("pages")
generated = module("generated")


# -- the tutorial ---------------------------------------------------------------------------------------------


def same_text(shown: str, printed: str) -> bool:
    """Whether the printed text is the shown one: `…` alone on a line stands for any lines, inside of one for any text.

    Blanks and blank lines do not count.
    """
    lines = [" ".join(line.split()) for line in shown.splitlines() if line.strip()]
    pattern = "".join(
        r"(?:.*\n)*?" if line == LEFT_OUT else ".*".join(map(re.escape, line.split(LEFT_OUT))) + r"\n" for line in lines
    )
    text = "".join(f"{' '.join(line.split())}\n" for line in printed.splitlines() if line.strip())
    return re.fullmatch(pattern, text) is not None


def test_what_is_shown_must_be_printed() -> None:
    assert same_text("a\n…\nc\n", "a\n\nb\nc\n")
    assert same_text("a  b …\n", "a b c\n")
    assert not same_text("a\nc\n", "a\nb\nc\n")
    assert not same_text("a\n", "a\nb\n")
    assert not same_text("…\na\n", "b\n")
    assert not same_text("a … d\n", "a b c\n")


def test_the_tutorial_runs_and_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "stranger.py").write_bytes((ROOT / "examples" / "stranger.py").read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = 0
    for kind, block in re.findall(r"^```(python|console)\n(.*?)^```$", TUTORIAL, re.DOTALL | re.MULTILINE):
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", block)
            assert name, block
            (tmp_path / name[1]).write_text(block, encoding="utf-8")
            continue
        for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, shown = command.partition("\n")
            if line.endswith(".svg") and not _has_matplotlib():
                continue
            exit_code, printed = _run(line, capsys)
            assert same_text(shown, printed), f"{line}\n{printed}"
            assert exit_code == ("verdict: DIVERGE" in shown), line
            run += 1
    assert run >= 6


def _has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    program, *arguments = shlex.split(line)
    if program == "modelrunner":
        return main(arguments), "".join(capsys.readouterr())
    assert program == "python"
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("page", ["see-a-batch", "recordings-and-traces"])
def test_programs_of_a_page_run_on_the_tutorials_trace(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    save_trace("right.jsonl", module("pictures").run_tutorial("cpu").steps)
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    programs = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    for program in programs:
        exec(compile(program, f"{page}.md", "exec"), names)
    assert len(list(tmp_path.iterdir())) == 1 + text.count("save(") + text.count("save_trace(")


def test_commands_that_pages_show_parse() -> None:
    """In blocks that show nothing else; other pages run theirs."""
    parser, lines = build_parser(), []
    for page in PAGES:
        for block in re.findall(r"^```\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            lines += re.findall(r"^(?:\w+=\w+ )?(modelrunner .*?)(?: +#.*)?$", block, re.MULTILINE)
    assert len(lines) >= 10
    for line in lines:
        parser.parse_args(shlex.split(line)[1:])


# -- links ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    """As GitHub follows them; `make docs` follows them in the site."""
    for target in pages.links(page.read_text(encoding="utf-8")):
        if not pages.is_outside(target):
            assert (DOCS / target.partition("#")[0]).is_file(), target


def test_every_page_has_its_place_and_every_place_a_page() -> None:
    made = {page for page, _ in generated.generated_pages()} | set(pages.PAGES.values())
    assert len(NAV) == len(set(NAV)) >= 25
    assert set(NAV) == {p.name for p in PAGES} | made


def test_a_link_is_turned_to_the_page_that_shows_its_file(tmp_path: Path) -> None:
    root, out = tmp_path / "repository", tmp_path / "site"
    (root / "docs").mkdir(parents=True)
    (root / "docs" / "a.md").write_text(
        "# A\n\n[b](b.md#there), [program](../x/p.py), [design](../DESIGN.md), [far](https://example.org/)\n\n"
        "```\n[as it is](b.md)\n```\n"
    )
    (root / "docs" / "b.md").write_text("# B\n\n[back](a.md), by `MR-SLOT-001`\n```\n`MR-SLOT-001`\n```\n")
    (root / "DESIGN.md").write_text("# Design\n\n[a](docs/a.md)\n")
    (root / "x").mkdir()
    (root / "x" / "p.py").write_text('"""```"""\n')
    site = pages.Site(root, out)
    site.add("docs/a.md")
    text = (out / "a.md").read_text()
    assert "[b](b.md#there), [program](source/x/p.py.md), [design](design.md), [far](https://example.org/)" in text
    assert "[as it is](b.md)" in text
    assert (out / "design.md").read_text() == "# Design\n\n[a](a.md)\n"
    law = "[`MR-SLOT-001`](./clauses.md#mr-slot-001)"
    assert (out / "b.md").read_text() == f"# B\n\n[back](a.md), by {law}\n```\n`MR-SLOT-001`\n```\n"
    shown = (out / "source" / "x" / "p.py.md").read_text()
    assert shown.endswith('# x/p.py\n\n````python\n"""```"""\n````\n')
    (root / "docs" / "a.md").write_text("[gone](c.md)\n")
    with pytest.raises(SystemExit, match=r"docs/c\.md is linked to, but is no file"):
        pages.Site(root, out).add("docs/a.md")


def test_a_notebook_is_shown_as_prose_and_programs() -> None:
    text = "# ---\n# jupyter: x\n# ---\n# %% [markdown]\n# # One\n#\n# Prose.\n\n# %%\nx = 1\n# why\n\n# %%\n\n"
    shown = "Prose.\n\n```python\nx = 1\n# why\n```\n"
    assert pages.notebook_page(text) == f"# One\n\n{pages.WITHOUT_OUTPUTS}\n\n\n{shown}"


# -- pictures -------------------------------------------------------------------------------------------------


def test_pages_ask_for_pictures_that_exist_and_show_them(tmp_path: Path) -> None:
    pictures = module("pictures")
    asked = {name for page in PAGES for name, _ in pages.PICTURE.findall(page.read_text(encoding="utf-8"))}
    assert asked == set(pictures.PICTURES)
    with pytest.raises(SystemExit, match="no picture is called 'other'"):
        pictures.save_picture("other", tmp_path / "other.svg")


def test_a_picture_stands_where_a_page_asks_for_it(tmp_path: Path) -> None:
    site = pages.Site(tmp_path, tmp_path)
    site.write("a.md", "One.\n\n<!-- picture: batch: A batch: one step -->\n\nTwo.\n")
    site.write("api/b.md", "<!-- picture: batch: The same -->\n")
    drawn = site.add_pictures(lambda name, path: path.write_text(name) and None)
    assert drawn == ["batch"]
    assert (tmp_path / "pictures" / "batch.svg").read_text() == "batch"
    assert (tmp_path / "a.md").read_text() == (
        "One.\n\n![A batch: one step](./pictures/batch.svg){ .picture }\n\nTwo.\n"
    )
    assert "(../pictures/batch.svg)" in (tmp_path / "api" / "b.md").read_text()


def test_the_tutorials_program_gives_the_pictures_their_steps() -> None:
    steps = module("pictures").run_tutorial("cpu").steps
    assert [s.num_tokens for s in steps] == [13, 8]
    assert steps[1].num_tokens_padded == 10


# -- pages that are made from the code ------------------------------------------------------------------------


def test_the_page_of_commands_has_every_command_with_every_argument() -> None:
    text = dict(generated.generated_pages())["commands.md"]
    commands = generated.subcommands(build_parser())
    assert {"check", "show", "replay", "report", "clauses"} <= set(commands)
    for name, parser in commands.items():
        start = text.index(f"\n## modelrunner {name}\n")
        section = text[start : (text + "\n## ").index("\n## ", start + 1)]
        for inner in generated.subcommands(parser).values() or [parser]:
            for written, _ in generated.arguments(inner):
                assert f"| `{written}` |" in section, (name, written)


def test_the_page_of_clauses_has_a_place_for_every_clause() -> None:
    text = generated.clause_page()
    assert len(re.findall(r'<span id="mr-', text)) == len(load_clauses())
    assert all(f'<span id="{c.lower()}">{c}</span>' in text for c in load_clauses())


def test_the_page_of_capabilities_tells_each_of_them() -> None:
    texts = generated.capability_texts()
    assert set(texts) == set(Capability)
    assert all(texts.values())
    assert texts[Capability.STEP_RECORD].startswith("last_step()")
    assert texts[Capability.PLAN_VALIDATION].startswith("Impossible plans")
    page = "\n".join(generated.capability_page())
    assert all(f"| `{c.value}` |" in page for c in Capability)


def test_the_page_of_variables_has_all_of_ours() -> None:
    page = "\n".join(generated.environment_page())
    assert all(f"| `{name}` | {text} |" in page for name, text in VARIABLES.items())


def test_the_api_pages_name_modules_that_are_there() -> None:
    for _, modules in generated.API.values():
        for name in modules:
            parent, _, last = name.rpartition(".")
            if last[0].isupper():
                assert inspect.isclass(getattr(importlib.import_module(parent), last)), name
                continue
            place = ROOT.joinpath(*name.split("."))
            assert place.with_suffix(".py").is_file() or (place / "__init__.py").is_file(), name


def test_the_page_of_pictures_has_every_name_that_figures_gives() -> None:
    """As functions of modules on the page, or as the class that the page names."""
    from conformance import figures

    _, modules = generated.API["figures"]
    for name in figures.__all__:
        value = getattr(figures, name)
        assert {value.__module__, f"{value.__module__}.{value.__qualname__}"} & set(modules), name


def test_a_fields_comment_is_its_docstring() -> None:
    pytest.importorskip("griffe")
    comments = module("field_comments")
    lines = ["# above, and", "# more", "a: int = 0", "b: int = 0  # behind", "# -- part ---", "c = (", ")  # noqa: X"]
    assert comments.comment_at(lines, 3, 3) == "above, and more"
    assert comments.comment_at(lines, 4, 4) == "behind"
    assert comments.comment_at(lines, 6, 7) == ""
    assert comments.plain("int32[R] of `a[0]`") == r"int32\[R\] of `a[0]`"


def test_paths_in_the_site_do_not_clash() -> None:
    """Two files of the repository never share a page."""
    named = ["docs/a.md", "DESIGN.md", "reports/a.md", "examples/a.py", "conformance/data/README.md"]
    assert len({pages.page_of(n) for n in named}) == len(named)
    assert all(posixpath.normpath(pages.page_of(n)) == pages.page_of(n) for n in named)
