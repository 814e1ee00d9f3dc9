"""Run the notebooks from start to end, or write their .ipynb halves anew.

    python notebooks/run.py            run all, each in a process of its own; fails at the first exception
    python notebooks/run.py 01 06      only these
    python notebooks/run.py --sync     write NN_name.ipynb from NN_name.py, without outputs
    python notebooks/run.py --out DIR  keep the executed notebooks there

The .py half (jupytext, percent format) is the source; the .ipynb half is for people who open notebooks.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
# Seconds that one notebook may take on two cores.
LIMIT = 60


def sources(chosen: list[str]) -> list[Path]:
    """The .py halves whose names start with one of `chosen` (all if there is none); an empty choice is an error."""
    found = [p for p in sorted(HERE.glob("[0-9][0-9]_*.py")) if not chosen or p.stem.startswith(tuple(chosen))]
    if not found:
        raise SystemExit(
            f"no notebook starts with {chosen}: there are {[p.stem for p in sorted(HERE.glob('[0-9]*.py'))]}"
        )
    return found


def read(path: Path) -> Any:
    """The notebook of a .py half, without outputs; cell ids count up, so that the same text gives the same file."""
    import jupytext

    notebook = jupytext.read(path)
    notebook.metadata = {"kernelspec": KERNEL, "jupytext": {"formats": "ipynb,py:percent"}}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02d}"
        cell["metadata"] = {}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def text_of(path: Path) -> str:
    """The .ipynb half of a .py half."""
    import nbformat

    return str(nbformat.writes(read(path))) + "\n"


def check_pair(path: Path) -> None:
    """Stop where the .ipynb half is missing or says something else than the .py half."""
    half = path.with_suffix(".ipynb")
    if not half.is_file() or half.read_text(encoding="utf-8") != text_of(path):
        raise SystemExit(f"{half.name} is not what {path.name} says: run `python notebooks/run.py --sync`")


def run(path: Path, out: Path | None) -> float:
    """Execute one notebook beside its file; seconds."""
    import nbformat
    from nbclient import NotebookClient

    notebook, start = read(path), time.perf_counter()
    try:
        NotebookClient(
            notebook, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}
        ).execute()
    finally:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook, out / f"{path.stem}.ipynb")
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the notebooks, or write their .ipynb halves.")
    parser.add_argument("names", nargs="*", help="starts of names, for example 01 (default: all)")
    parser.add_argument("--sync", action="store_true", help="write the .ipynb halves and run nothing")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the executed notebooks there")
    args = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for path in sources(args.names):
        if args.sync:
            path.with_suffix(".ipynb").write_text(text_of(path), encoding="utf-8")
            continue
        check_pair(path)
        seconds = run(path, args.out)
        print(f"{path.stem}: {seconds:.1f} s", flush=True)
        if seconds > LIMIT:
            raise SystemExit(f"{path.stem} took {seconds:.0f} s: a notebook has at most {LIMIT} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
