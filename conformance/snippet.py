"""A case as plain Python: build the runner, send the plans, read one cell, assert what it should be.

The text needs `runner_api` alone. Fields at their defaults are left out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np

from conformance.case import Case, CaseStep
from conformance.cell import Cell

WIDTH = 84
# How lists of numbers spell what has no literal.
_NOT_FINITE = re.compile(r"\b(inf|nan)\b")
_STEP = """

def step(plan, descriptor=None, grammar=None, forced=None):
    done = runner.execute_model(plan, descriptor=descriptor)
    return done if done is not None else runner.sample_tokens(grammar, forced=forced).get_output()

"""
# The second answer of an output's handle is the one that is asked for.
_TWICE = """

def step(plan, descriptor=None, grammar=None, forced=None):
    done = runner.execute_model(plan, descriptor=descriptor)
    if done is not None:
        return done
    handle = runner.sample_tokens(grammar, forced=forced)
    handle.get_output()
    return handle.get_output()

"""


def write_snippet(case: Case, runner: str, cell: Cell | None, title: str) -> str:
    """Python text that passes on a right runner and raises AssertionError, with both values, on the one at fault.

    runner: as `load_runner` takes it. cell None: nothing is asserted; where the runner raises on a legal plan, or gives
    what cannot be read, so does the text. title: what is wrong, in one line.
    """
    names: set[str] = {"load_runner", "group_kv_cache_specs"}
    parts = [
        f"runner = {_call('load_runner', [_text(runner), literal(case.config, names)])}",
        f"runner.load_model({literal(case.model, names)})",
        f"runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), {case.num_blocks}))",
        _TWICE if cell is None or cell.twice else _STEP,
    ]
    parts += [_step(step, number, names) for number, step in enumerate(case.steps)]
    if cell is not None and cell.earlier:
        parts.insert(-1, "earlier = runner.last_step()")
    parts += _readings(names) if cell is None else _assertion(cell, title)
    body = "\n".join(parts)
    check = "\nfrom runner_api.record_check import check_own_record" if "check_own_record(" in body else ""
    numpy = "import numpy as np\n\n" if "np." in body else ""
    if _NOT_FINITE.search(body):
        numpy = f"from math import inf, nan\n\n{numpy}"
    head = title.replace("\\", "/").replace('"', "'")
    return f'"""{head}"""\n\n{numpy}{_imports(names)}{check}\n\n{body}\n'


def _imports(names: set[str]) -> str:
    listed = sorted(names, key=lambda n: (n.islower(), n.lower()))
    line = f"from runner_api import {', '.join(listed)}"
    if len(line) <= WIDTH:
        return line
    return "from runner_api import (\n" + "".join(f"    {n},\n" for n in listed) + ")"


def _step(step: CaseStep, number: int, names: set[str]) -> str:
    arguments = [literal(step.plan, names)]
    for name in ("descriptor", "grammar", "forced"):
        value = getattr(step, name)
        if value is not None:
            arguments.append(f"{name}={literal(value, names)}")
    lines = [f"# step {number}"]
    if step.keep_blocks is not None:
        kept = f"keep_blocks={sorted(step.keep_blocks)}" if step.keep_blocks else ""
        lines.append(f"runner.poison_unused({kept})")
    lines.append(f"output = {_call('step', arguments)}")
    return "\n".join(lines)


def _readings(names: set[str]) -> list[str]:
    names.add("Capability")
    return [
        "",
        "# The last step is the one that goes wrong; no single value of the record shows it.",
        "output.tokens()",
        "if Capability.STEP_RECORD in runner.describe().capabilities:",
        '    check_own_record(runner.last_step(), "record")',
    ]


def _assertion(cell: Cell, title: str) -> list[str]:
    clause_id = title.split(maxsplit=1)[0] if title.startswith("MR-") else "tokens"
    owner = "" if cell.req_id is None else f" of request {cell.req_id!r}"
    lines = ["record = runner.last_step()"] if "record." in cell.expression else []
    what = f"{clause_id} {cell.expression}{owner}".replace("{", "{{").replace("}", "}}")
    equal = f"got == {cell.expected!r}"
    if cell.tolerance:
        equal = f"all(abs(a - b) <= {cell.tolerance} * (1 + abs(b)) for a, b in zip(got, {cell.expected!r}))"
    text = f"{what}: got {{got}}, expected {_braced(cell.expected)}"
    return ["", *lines, f"got = {cell.expression}", f"assert {equal}, f{_quoted(text)}"]


def _braced(value: Any) -> str:
    return repr(value).replace("{", "{{").replace("}", "}}")


def _quoted(text: str) -> str:
    """A string literal of the text, for an f before it; quotes inside are of the other kind."""
    return '"' + text.replace("\\", "\\\\").replace('"', "'") + '"'


# -- literals -----------------------------------------------------------------------------------------------------


def literal(value: Any, names: set[str]) -> str:
    """Python text that gives the value; classes that it calls are added to `names`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names.add(type(value).__name__)
        arguments = [f"{f.name}={literal(getattr(value, f.name), names)}" for f in _told(value)]
        return _call(type(value).__name__, arguments)
    if isinstance(value, np.ndarray):
        return f"np.array({value.tolist()}, np.{value.dtype})"
    if isinstance(value, Enum):
        names.add(type(value).__name__)
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, frozenset):
        return f"frozenset({sorted(value)!r})" if value else "frozenset()"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(k, names)}: {literal(v, names)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        items = [literal(v, names) for v in value]
        if isinstance(value, list):
            return _bracketed("[", items, "]")
        return _bracketed("(", items, ",)" if len(items) == 1 else ")")
    if isinstance(value, str):
        return _text(value)
    return repr(value.item() if isinstance(value, np.generic) else value)


def _text(value: str) -> str:
    """In double quotes where that is as plain."""
    text = repr(value)
    return text if '"' in text or "\\" in text else f'"{text[1:-1]}"'


def _told(value: Any) -> list[dataclasses.Field[Any]]:
    """Fields that are not at their default."""
    told = []
    for f in dataclasses.fields(value):
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        mine = getattr(value, f.name)
        if default is dataclasses.MISSING or isinstance(mine, np.ndarray) or mine != default:
            told.append(f)
    return told


def _call(name: str, arguments: list[str]) -> str:
    return _bracketed(f"{name}(", arguments, ")")


def _bracketed(opening: str, items: list[str], closing: str) -> str:
    """In one line if it fits, else one item a line."""
    line = opening + ", ".join(items) + closing
    if len(line) <= WIDTH and "\n" not in line:
        return line
    indented = [item.replace("\n", "\n    ") for item in items]
    return opening + "\n    " + ",\n    ".join(indented) + ",\n" + closing.removeprefix(",")
