"""The pictures of the site, drawn by conformance.figures: of the tutorial's own run, and of recordings of vLLM.

A page asks for one with `<!-- picture: NAME: what it shows -->`, alone on its line. On GitHub, where pages are read as
they are, nothing is seen of it: a page must read well without.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from conformance import figures
from conformance.kill_matrix import run_matrix
from conformance.mutants import KINDS, MUTANTS
from conformance.mutation import mutated
from conformance.recording import step_logits
from runner_api import Trace, load_trace

ROOT = Path(__file__).parent.parent
RECORDINGS = ROOT / "conformance" / "data" / "recordings"
WRONG_SLOT = f"{ROOT / 'examples' / 'stranger.py'}:chunk_edge"


def save_picture(name: str, path: Path) -> None:
    """Draw the picture of this name; an unknown name is an error that lists the others."""
    if name not in PICTURES:
        raise SystemExit(f"no picture is called {name!r}: there are {', '.join(sorted(PICTURES))}")
    figures.save(PICTURES[name](), path)


def tutorial_program() -> str:
    """The program `first.py` of docs/tutorial.md: it runs two steps and saves their records."""
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(# first\.py\n.*?)^```$", page, re.DOTALL | re.MULTILINE)
    if found is None:
        raise SystemExit("docs/tutorial.md has no program first.py")
    return found[1]


@cache
def run_tutorial(runner: str) -> Trace:
    """Its two steps on a runner, which its command line names."""
    before = sys.argv
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "first.jsonl"
        sys.argv = ["first.py", runner, str(path)]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(tutorial_program(), "first.py", "exec"), {"__name__": "__main__"})
        finally:
            sys.argv = before
        return load_trace(path)


def _divergence() -> Any:
    right, wrong = (run_tutorial(name).steps[0] for name in ("cpu", WRONG_SLOT))
    return figures.divergence(right, wrong, labels=("right", "wrong"))


def _stale_padding() -> Any:
    """The tutorial's padded step, by the reference and by one whose slots behind the last token are not cleared."""
    fault = next(m for m in MUTANTS["cpu"] if m.id == "slot-tail-stale")
    with mutated("cpu", fault.path, fault.old, fault.new) as faulty:
        wrong = run_tutorial(faulty.target).steps[1]
    return figures.divergence(run_tutorial("cpu").steps[1], wrong, labels=("right", "wrong"))


def _kill_matrix() -> Any:
    """The first mutant of each kind, judged here and now."""
    first = {m.kind: m for m in reversed(MUTANTS["cpu"]) if m.layout == "slots"}
    return figures.kill_matrix(run_matrix("cpu", mutants=[first[k] for k in KINDS if k in first], jobs=1).as_json())


def _sampling() -> Any:
    """A draw of the recording `sampling`, from the logits that were recorded with it."""
    import numpy as np

    trace, step, req_id = load_trace(RECORDINGS / "sampling.jsonl"), SAMPLED_STEP, SAMPLED_REQUEST
    with np.load(RECORDINGS / "sampling_logits.npz", allow_pickle=False) as stored:
        logits = step_logits(stored, trace.steps[step], trace.name)
    return figures.sampling(trace.steps[: step + 1], req_id, logits=logits, noise="philox")


SAMPLED_STEP, SAMPLED_REQUEST = 5, "r000"
PICTURES: dict[str, Callable[[], Any]] = {
    "batch": lambda: figures.batch(run_tutorial("cpu").steps[1]),
    "rows": lambda: figures.rows(run_tutorial("cpu").steps, num_rows=8),
    "blocks": lambda: figures.blocks(run_tutorial("cpu").steps, num_blocks=16, block_size=4),
    "slots": lambda: figures.slots(run_tutorial("cpu").steps[1], block_size=4),
    "divergence": _divergence,
    "stale_padding": _stale_padding,
    "timeline": lambda: figures.timeline(load_trace(RECORDINGS / "preempt.jsonl")),
    "drafts": lambda: figures.timeline(load_trace(RECORDINGS / "eagle.jsonl")),
    "sampling": _sampling,
    "kill_matrix": _kill_matrix,
}
