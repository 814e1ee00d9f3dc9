"""Pages of the site that are made from the code: clauses, commands, capabilities, environment variables, the API."""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from conformance.clause_list import page as clauses_page
from conformance.clauses import load_clauses
from conformance.matrix import markdown_table
from engine_core.cli import build_parser
from runner_api import capabilities
from runner_api.environment import VARIABLES

CLAUSE_CELL = re.compile(r"^\| (MR-[A-Z]+-\d{3}) \|", re.MULTILINE)
# Variables of other packages that change what ours does.
FOREIGN_VARIABLES = {
    "TRITON_INTERPRET": "1: Triton's kernels run in its interpreter, without a GPU; read when triton is imported",
    "OPENBLAS_NUM_THREADS": "threads of NumPy's matrix products; give each of several processes 1",
    "HYPOTHESIS_PROFILE": "how hard the generated tests look; `nightly` looks harder",
}
# Page: title, modules (or a class, where the rest of its module is nobody's business). What a module gives to others is
# its public names.
API = {
    "contract": ("API: the contract", (
        "runner_api.protocol", "runner_api.config", "runner_api.plan", "runner_api.outputs", "runner_api.kv_cache",
        "runner_api.witness", "runner_api.validation", "runner_api.errors", "runner_api.constants",
    )),
    "records": ("API: records and traces", ("runner_api.record", "runner_api.trace", "runner_api.wire")),
    "sampling": ("API: sampling", (
        "runner_api.sampling_params", "runner_api.structured_outputs", "runner_api.logits_processors",
    )),
    "loading": ("API: loading and stages", (
        "runner_api.loader", "runner_api.selection", "runner_api.stages", "runner_api.partial",
        "runner_api.process_runner", "runner_api.environment",
    )),
    "engine": ("API: the engine", (
        "engine_core.llm", "engine_core.engine", "engine_core.engine_config", "engine_core.request",
        "engine_core.scheduler", "engine_core.block_pool", "engine_core.kv_cache_manager", "engine_core.executor",
        "engine_core.worker", "engine_core.structured_output",
    )),
    "judge": ("API: the judge", (
        "conformance.evaluate", "conformance.evaluation", "conformance.finding", "conformance.case",
        "conformance.lockstep", "conformance.metamorphic", "conformance.certificates",
        "conformance.adapters.vllm_recorder",
    )),
    "figures": ("API: pictures", (
        "conformance.figures.look.Names", "conformance.figures.batch", "conformance.figures.rows",
        "conformance.figures.blocks", "conformance.figures.slots", "conformance.figures.timeline",
        "conformance.figures.sampling", "conformance.figures.sampling_drawing", "conformance.figures.divergence",
        "conformance.figures.kill_matrix", "conformance.figures.style",
    )),
    "kernels": ("API: the kernel judge", (
        "conformance.triton_sanitizer.session", "conformance.triton_sanitizer.faults",
        "conformance.triton_sanitizer.ordering",
    )),
}  # fmt: skip


def generated_pages() -> Iterator[tuple[str, str]]:
    """(page, its Markdown) for every page that nobody writes by hand."""
    yield "clauses.md", clause_page()
    yield "commands.md", "\n".join(command_page())
    yield "capabilities.md", "\n".join(capability_page())
    yield "environment.md", "\n".join(environment_page())
    for name, (title, modules) in API.items():
        yield f"api/{name}.md", "\n\n".join([f"# {title}", *(f"::: {module}" for module in modules)]) + "\n"


def clause_page() -> str:
    """The page that `modelrunner clauses --markdown` prints, with a place to link to for every clause."""
    text = "\n".join(clauses_page(list(load_clauses().values())))
    return CLAUSE_CELL.sub(lambda m: f'| <span id="{m[1].lower()}">{m[1]}</span> |', text) + "\n"


def capability_page() -> Iterator[str]:
    """Every capability, what it stands for (from the comment beside it), and how many clauses ask for it."""
    yield (
        "# Capabilities\n\nWhat a runner may offer, as `describe()` tells it. A clause is asked of a runner that "
        "offers all that the clause requires; what is not offered is refused, never half done.\n"
    )
    clauses = load_clauses().values()
    rows = [
        [f"`{c.value}`", text, str(sum(c in clause.requires for clause in clauses) or "-")]
        for c, text in capability_texts().items()
    ]
    yield markdown_table([["capability", "what it stands for", "clauses that require it"], *rows])


def capability_texts() -> dict[capabilities.Capability, str]:
    """What the source says of each: the comment on its line, or the ones right above."""
    texts, above = {}, ""
    for line in inspect.getsource(capabilities.Capability).splitlines():
        code, _, comment = line.strip().partition("#")
        found = re.fullmatch(r"(\w+) = \"\w+\"\s*", code)
        if found:
            texts[capabilities.Capability[found[1]]] = comment.strip() or above
        above = comment.strip() if not code else ""
    return texts


def environment_page() -> Iterator[str]:
    yield (
        "# Environment variables\n\nA variable that begins with `MODELRUNNER_` and is not in this table is refused: a "
        "misspelt one would change nothing and say nothing.\n"
    )
    yield markdown_table([["variable", "what it is"], *([f"`{k}`", v] for k, v in VARIABLES.items())])
    yield "\nVariables of other packages that change what this one does:\n"
    yield markdown_table([["variable", "what it is"], *([f"`{k}`", v] for k, v in FOREIGN_VARIABLES.items())])


def command_page() -> Iterator[str]:
    """Every command with its arguments, from the parser that the program itself uses."""
    with mock.patch.dict(os.environ, COLUMNS="110"):
        parser = build_parser()
        yield "# Commands\n"
        yield f"{parser.description} {parser.epilog} In front of the command:\n"
        yield _arguments_table(parser)
        for name, command in subcommands(parser).items():
            yield from _command(f"modelrunner {name}", command, 2)


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """By name; none if the parser has none."""
    choices: Sequence[Any] = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(choices[0]) if choices else {}


def arguments(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """(how it is written, what it is) for every argument but --help."""
    formatter = argparse.HelpFormatter(parser.prog, width=1000)
    found = []
    for action in parser._actions:
        if isinstance(action, (argparse._SubParsersAction, argparse._HelpAction)):
            continue
        text = formatter._expand_help(action) if action.help else ""
        found.append((formatter._format_action_invocation(action), text))
    return found


def _command(name: str, parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    yield f"\n{'#' * level} {name}\n"
    if parser.description:
        yield f"{parser.description}\n"
    inner = subcommands(parser)
    if not inner:
        yield f"```text\n{parser.format_usage().removeprefix('usage: ').rstrip()}\n```\n"
        yield _arguments_table(parser)
    if parser.epilog:
        yield f"\n```text\n{parser.epilog.strip()}\n```"
    for word, action in inner.items():
        yield from _command(f"{name} {word}", action, level + 1)


def _arguments_table(parser: argparse.ArgumentParser) -> str:
    rows = [[f"`{written}`", _cell(text)] for written, text in arguments(parser)]
    return markdown_table([["argument", "what it is"], *rows]) if rows else ""


def _cell(text: str) -> str:
    """Help as the cell of a table, in which `<` begins no tag."""
    return " ".join(text.split()).replace("<", "&lt;")
