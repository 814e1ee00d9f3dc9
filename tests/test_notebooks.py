"""The notebooks as files: halves of a pair agree, nothing is kept of a run, links lead somewhere; and what runs them.

`make notebooks` executes them. Nothing here does, but for a tiny one that shows that a failure is not overlooked.
"""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
NUMBERS = [path.stem[:2] for path in SOURCES]


def percent_cells(text):
    """(kind, text) of each cell of a py:percent file, read by a few lines of our own."""
    cells = []
    for line in text.splitlines():
        if line.startswith("# %%"):
            cells.append(("markdown" if "[markdown]" in line else "code", []))
        else:
            cells[-1][1].append(line)
    plain = {"code": lambda line: line, "markdown": lambda line: line.removeprefix("#").removeprefix(" ")}
    return [(kind, "\n".join(map(plain[kind], lines)).strip("\n")) for kind, lines in cells]


def runner_of_notebooks():
    spec = importlib.util.spec_from_file_location("notebooks_run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_seven_of_them_in_pairs():
    assert [f"{n:02}" for n in range(1, 8)] == NUMBERS
    assert {p.stem for p in FOLDER.glob("*.ipynb")} == {p.stem for p in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=NUMBERS)
def test_both_halves_say_the_same_and_keep_no_outputs(path):
    notebook = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert cells == percent_cells(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


@pytest.mark.parametrize("path", SOURCES, ids=NUMBERS)
def test_each_is_prose_and_short_cells_that_assert_what_they_show(path):
    cells = percent_cells(path.read_text(encoding="utf-8"))
    kind, text = cells[0]
    assert kind == "markdown"
    assert text.startswith(f"# {path.stem[:2]} ")
    code = [text for kind, text in cells if kind == "code"]
    assert max(len(text.splitlines()) for text in code) <= 48
    asserts = sum(isinstance(node, ast.Assert) for text in code for node in ast.walk(ast.parse(text)))
    assert asserts >= 10
    assert sum("figures." in text or "plot" in text for text in code) >= 1


@pytest.mark.parametrize("path", SOURCES, ids=NUMBERS)
def test_links_lead_to_files(path):
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (FOLDER / link).is_file()]
    assert not missing


def test_the_second_draws_every_field_of_the_padding():
    """Each tail that is not neutral as a picture of its own: whatever else the cell does, it ends in one."""
    code = [text for kind, text in percent_cells(SOURCES[1].read_text(encoding="utf-8")) if kind == "code"]
    drawn = [i for i, text in enumerate(code) if text.splitlines()[-1].startswith("figures.divergence(")]
    fields = {
        "slots": "slot-tail-stale", "query_start_loc": "query-start-tail-padded", "seq_lens": "seq-lens-tail-stale",
        "block tables": "dirty-rows-forgotten", "token ids": "input-ids-tail-stale",
        "positions": "positions-tail-stale", "logits_indices": "logits-indices-tail-stale",
    }  # fmt: skip
    for field, mutant in fields.items():
        assert any(f'("{mutant}")' in code[i] for i in drawn), field
    assert len(drawn) == len(fields)


# -- notebooks/run.py -----------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    """notebooks/run.py over a folder of its own."""
    for name in ("jupytext", "nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(name)
    module = runner_of_notebooks()
    monkeypatch.setattr(module, "HERE", tmp_path)
    return module


def call(module, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["run.py", *arguments])
    return module.main()


def test_a_notebook_that_fails_stops_the_run(run, tmp_path, monkeypatch, capsys):
    from nbclient.exceptions import CellExecutionError

    (tmp_path / "01_good.py").write_text("# %% [markdown]\n# # 01 good\n\n# %%\nassert 1 + 1 == 2\n")
    (tmp_path / "02_bad.py").write_text("# %%\nassert 1 + 1 == 3\n")
    assert call(run, monkeypatch, "--sync") == 0
    assert call(run, monkeypatch, "01") == 0
    assert "01_good: " in capsys.readouterr().out
    with pytest.raises(CellExecutionError, match="AssertionError"):
        call(run, monkeypatch, "02", "--out", str(tmp_path / "kept"))
    assert (tmp_path / "kept" / "02_bad.ipynb").is_file()


def test_an_empty_choice_and_a_pair_out_of_step_are_errors(run, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="no notebook starts with"):
        call(run, monkeypatch, "09")
    (tmp_path / "01_good.py").write_text("# %%\nx = 1\n")
    with pytest.raises(SystemExit, match="--sync"):
        call(run, monkeypatch, "01")  # there is no other half
    call(run, monkeypatch, "--sync")
    (tmp_path / "01_good.py").write_text("# %%\nx = 2\n")
    with pytest.raises(SystemExit, match=r"01_good\.ipynb is not what 01_good\.py says"):
        call(run, monkeypatch, "01")


def test_a_notebook_that_takes_too_long_is_an_error(run, tmp_path, monkeypatch):
    (tmp_path / "01_slow.py").write_text("# %%\nx = 1\n")
    call(run, monkeypatch, "--sync")
    monkeypatch.setattr(run, "run", lambda path, out: run.LIMIT + 1.0)
    with pytest.raises(SystemExit, match="01_slow took 61 s"):
        call(run, monkeypatch)
