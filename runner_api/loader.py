"""Find a runner by name. Entry points of group `modelrunner.runners`, or `package.module:factory`.

A target is a callable `factory(config: RunnerConfig) -> ModelRunner`. Its stages, if it offers any, are found as the
attribute `stages` of the factory: a callable without arguments that returns a `StageSet`. Nothing falls back: an
unknown name is an error that lists the known ones.
"""

from __future__ import annotations

import importlib
import logging
from importlib.metadata import entry_points
from typing import Any

from runner_api.config import RunnerConfig
from runner_api.errors import CapabilityError, ConfigError, RunnerError, UnknownNameError
from runner_api.protocol import ModelRunner, RunnerFactory, RunnerInfo
from runner_api.stages import StageSet

ENTRY_POINT_GROUP = "modelrunner.runners"
# What every engine calls. Judges and capabilities need more, and say so where they do.
PROTOCOL_METHODS = (
    "describe", "load_model", "get_kv_cache_specs", "initialize_kv_cache", "execute_model", "sample_tokens", "shutdown",
)  # fmt: skip
log = logging.getLogger("modelrunner")


def runner_names() -> dict[str, str]:
    """Installed runners: name to `package.module:factory`."""
    return {e.name: e.value for e in entry_points(group=ENTRY_POINT_GROUP)}


def load_factory(name: str | RunnerFactory) -> RunnerFactory:
    """The factory behind a name or a `package.module:factory` path; a factory is its own answer."""
    if not isinstance(name, str):
        if not callable(name):
            raise ConfigError(
                "no runner", field="runner", got=name, expected="an installed name, package.module:factory or a factory"
            )
        return name
    target = name if ":" in name else runner_names().get(name)
    if target is None:
        raise UnknownNameError("runner", name, runner_names(), field="runner")
    module_name, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as e:  # importing runs foreign code
        raise ConfigError(
            f"runner {name!r} cannot be imported from {target!r}: {type(e).__name__}: {e}",
            field="runner",
            hint="Install what it needs (for the gpu runner: modelrunner[gpu]) or correct the path",
        ) from e
    if not callable(found):
        raise ConfigError("a runner's factory must be callable", field="runner", got=found, expected="factory(config)")
    return found


def call_factory(name: str | RunnerFactory, config: RunnerConfig) -> ModelRunner:
    """Build a runner; whatever a foreign factory raises or returns instead becomes a ConfigError."""
    try:
        runner = load_factory(name)(config)
        info = runner.describe() if hasattr(runner, "describe") else None
    except RunnerError:
        raise
    except Exception as e:  # foreign code
        raise ConfigError(
            f"runner {name!r} cannot be built: {type(e).__name__}: {e}", field="runner",
            hint="Its factory raised this; --log-level debug shows where",
        ) from e  # fmt: skip
    missing = [method for method in PROTOCOL_METHODS if not callable(getattr(runner, method, None))]
    if missing or not isinstance(info, RunnerInfo):
        raise ConfigError(
            f"the factory of {name!r} gave no ModelRunner", field="runner", got=runner,
            expected=f"methods {', '.join(missing)}" if missing else "describe() to return a RunnerInfo",
        )  # fmt: skip
    return runner


def load_runner(name: str | RunnerFactory, config: RunnerConfig | None = None) -> ModelRunner:
    """Build the runner and say once in the log which one it is."""
    runner = call_factory(name, config or RunnerConfig())
    log.info("%s", runner.describe().line())
    return runner


def kernel_launches(runner: Any) -> dict[str, int]:
    """Launches of each kernel in this process so far; empty for a runner that does not count or has no kernels."""
    return dict(getattr(runner, "kernel_launches", dict)())


def load_stages(name: str | RunnerFactory) -> StageSet:
    """The stages of a runner, to be run one at a time."""
    stages = getattr(load_factory(name), "stages", None)
    if stages is None:
        raise CapabilityError(f"runner {name!r} offers no stages", hint="Give its factory an attribute `stages`")
    return stages()
