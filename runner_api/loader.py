"""Find a runner by name: an entry point of group `modelrunner.runners`, an object in a module or a file, a process.

    cpu                        an installed name
    package.module:factory     an object in a module that can be imported
    path/to/file.py:factory    an object in a file; anything before the colon that ends in .py is a path
    process:COMMAND LINE       a program that speaks JSON lines (`runner_api.process_runner`, docs/json-lines.md)

A target is a callable `factory(config: RunnerConfig) -> ModelRunner`. Its stages, if it offers any, are found as the
attribute `stages` of the factory: a callable without arguments that returns a `StageSet`. Nothing falls back: an
unknown name is an error that lists the known ones.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from runner_api.capabilities import Capability
from runner_api.config import RunnerConfig
from runner_api.environment import check_environment
from runner_api.errors import CapabilityError, ConfigError, RunnerError, UnknownNameError, safely
from runner_api.protocol import ModelRunner, RunnerFactory, RunnerInfo
from runner_api.selection import LayoutDecision, offered_layouts, resolve_layout
from runner_api.stages import StageSet

ENTRY_POINT_GROUP = "modelrunner.runners"
# What every engine calls. Judges and capabilities need more, and say so where they do.
PROTOCOL_METHODS = (
    "describe", "load_model", "get_kv_cache_specs", "initialize_kv_cache", "execute_model", "sample_tokens", "shutdown",
)  # fmt: skip
PROCESS = "process:"
# What foreign code may raise: also its wish to end the program, which is ours.
FOREIGN = (Exception, SystemExit, GeneratorExit)
log = logging.getLogger("modelrunner")


def runner_names() -> dict[str, str]:
    """Installed runners: name to `package.module:factory`."""
    return {e.name: e.value for e in entry_points(group=ENTRY_POINT_GROUP)}


def load_factory(name: str | RunnerFactory) -> RunnerFactory:
    """The factory behind a name, in any of the forms above; a factory is its own answer. Nothing is started yet.

    Raises UnknownNameError for a name that is not installed, ConfigError for a target without a factory and for an
    environment variable of ours that does not exist.
    """
    check_environment()
    if not isinstance(name, str):
        if not callable(name):
            raise ConfigError(
                "no runner", field="runner", got=name, expected="an installed name, package.module:factory or a factory"
            )
        return name
    if name.startswith(PROCESS):
        return _process_factory(name.removeprefix(PROCESS))
    target = name if ":" in name else runner_names().get(name)
    if target is None:
        raise UnknownNameError("runner", name, runner_names(), field="runner")
    found = load_object(
        target, f"runner {name!r}", "runner",
        "Install what it needs (for the gpu runner: modelrunner[gpu]) or correct the path",
    )  # fmt: skip
    if not callable(found):
        raise ConfigError("a runner's factory must be callable", field="runner", got=found, expected="factory(config)")
    return found


def load_object(target: str, what: str, field: str, hint: str = "Correct the path, or install what it needs") -> Any:
    """The object behind `package.module:name.in.it` or `path/to/file.py:name.in.it`. Raises ConfigError for whatever
    goes wrong on the way."""
    module_name, _, attribute = target.rpartition(":")
    try:
        found: Any = _import_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except FOREIGN as e:  # importing runs foreign code
        raise ConfigError(
            f"{what} cannot be imported from {target!r}: {type(e).__name__}: {safely(str, e)}", field=field, hint=hint
        ) from e
    return found


def _import_file(path: str) -> ModuleType:
    """The module of this file, under a name of its own: its directory does not become a place to import from. A file
    that has changed since is another module."""
    file = Path(path).resolve()
    key = f"{file} {file.stat().st_mtime_ns} {file.stat().st_size}"
    name = f"modelrunner_file_{hashlib.sha256(key.encode()).hexdigest()[:12]}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module can be made of {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@functools.cache
def _process_factory(command: str) -> RunnerFactory:
    """One factory, hence one program, for each command line."""
    from runner_api.process_runner import ProcessFactory

    return ProcessFactory(command)


def call_factory(name: str | RunnerFactory, config: RunnerConfig) -> ModelRunner:
    """Build a runner; whatever a foreign factory raises or returns instead becomes a ConfigError."""
    try:
        runner = load_factory(name)(config)
        info = runner.describe() if hasattr(runner, "describe") else None
    except RunnerError:
        raise
    except FOREIGN as e:  # foreign code
        raise ConfigError(
            f"runner {_label(name)!r} cannot be built: {type(e).__name__}: {safely(str, e)}", field="runner",
            hint="Its factory raised this; --log-level debug shows where",
        ) from e  # fmt: skip
    missing = [method for method in PROTOCOL_METHODS if not callable(getattr(runner, method, None))]
    if missing or not isinstance(info, RunnerInfo):
        raise ConfigError(
            f"the factory of {_label(name)!r} gave no ModelRunner", field="runner", got=runner,
            expected=f"methods {', '.join(missing)}" if missing else "describe() to return a RunnerInfo",
        )  # fmt: skip
    _check_info(info)
    built_layout(config, info)
    return runner


def _check_info(info: RunnerInfo) -> None:
    """What logs and reports are made of. Raises ConfigError that names the field."""
    for name in ("name", "class_path", "version", "device", "dtype", "layout", "noise"):
        if not isinstance(value := getattr(info, name), str):
            raise ConfigError(
                "the runner describes itself wrongly", field=f"RunnerInfo.{name}", got=value, expected="str"
            )
    capabilities, notes = info.capabilities, info.notes
    if not isinstance(capabilities, frozenset) or not all(isinstance(c, Capability) for c in capabilities):
        raise ConfigError(
            "the runner describes itself wrongly", field="RunnerInfo.capabilities", got=capabilities,
            expected="a frozenset of Capability",
        )  # fmt: skip
    if not isinstance(notes, tuple) or not all(isinstance(note, str) for note in notes):
        raise ConfigError(
            "the runner describes itself wrongly", field="RunnerInfo.notes", got=notes, expected="a tuple of str"
        )
    if info.selection is not None and not isinstance(info.selection, LayoutDecision):
        raise ConfigError(
            "the runner describes itself wrongly", field="RunnerInfo.selection", got=info.selection,
            expected="a LayoutDecision or None",
        )  # fmt: skip


def _label(name: str | RunnerFactory) -> str:
    """A runner as the user may have named it: `module:factory` for a factory."""
    if isinstance(name, str):
        return name
    if hasattr(name, "__qualname__"):
        return f"{name.__module__}:{name.__qualname__}"
    inner = getattr(name, "runner", None)  # of a factory that gives another one's runners a layout
    return _label(inner) if inner is not None else repr(name)


def decide_layout(name: str | RunnerFactory, config: RunnerConfig) -> LayoutDecision:
    """Which layout the runner of this name takes, and why; the runner is not built. Raises what building it would."""
    factory = load_factory(name)
    return resolve_layout(_label(name), config, offered_layouts(factory))


def built_layout(config: RunnerConfig, info: RunnerInfo) -> LayoutDecision:
    """Why a runner has its layout: by its own word, or, where it has no choice, by what asks for another.

    Raises CapabilityError or ConfigError if it was asked for a layout and has another one.
    """
    decision = info.selection or resolve_layout(info.name, config, (info.layout,))
    if info.layout != decision.layout:
        raise ConfigError(
            f"runner {info.name!r} has another layout than it chose", field="layout", got=info.layout,
            expected=decision.line(),
        )  # fmt: skip
    return decision


def load_runner(name: str | RunnerFactory, config: RunnerConfig | None = None) -> ModelRunner:
    """Build the runner and say once in the log which one it is, with which layout, and why."""
    config = config or RunnerConfig()
    runner = call_factory(name, config)
    info = runner.describe()
    log.info("%s", info.line() if info.selection else f"{info.line()} {built_layout(config, info).line()}")
    return runner


def kernel_launches(runner: Any) -> dict[str, int]:
    """Launches of each kernel in this process so far; empty for a runner that does not count or has no kernels."""
    return dict(getattr(runner, "kernel_launches", dict)())


def table_traffic(runner: Any) -> dict[str, int]:
    """What the runner wrote to its block tables since `initialize_kv_cache`; empty for one that does not count.

    entries: block ids written into rows, as plans brought them; bytes_staged: sent to write them, with where they go;
    bytes_gathered, bytes_committed: of the batch's rows, brought into batch order or sent as a prefix, step by step;
    rows_moved, entries_moved: to keep rows dense. A runner leaves out what it does not have or does not count.
    """
    return dict(getattr(runner, "table_traffic", dict)())


def listen_to_parts(runner: Any, listener: Callable[[str], object]) -> bool:
    """Have `listener(name)` called where a part of a step ends; False if the runner does not tell its parts.

    The parts of execute_model are plan, rows, inputs, tables, metadata and forward, those of sample_tokens sample and
    advance; record is what either does for `last_step`. A part may end several times in one step.
    """
    if not callable(getattr(runner, "end_of_part", None)):
        return False
    runner.end_of_part = listener
    return True


def load_stages(name: str | RunnerFactory) -> StageSet:
    """The stages of a runner, to be run one at a time."""
    stages = getattr(load_factory(name), "stages", None)
    if stages is None:
        raise CapabilityError(
            f"runner {_label(name)!r} offers no stages",
            hint="Give its factory an attribute `stages`, or leave the capability stages out of describe()",
        )
    return stages()
