"""Which row layout a runner uses, and why: decided by rules that are data, and said wherever a runner is named.

The configuration may name a layout; else the environment variable MODELRUNNER_LAYOUT may; else the policy chooses:
`slots`, unless the configuration uses something that only `dense` has. A layout that was asked for and lacks something
that is used is refused: nothing falls back. Two processes that must agree compare `LayoutDecision.digest`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner_api.config import LAYOUTS, RunnerConfig
from runner_api.errors import CapabilityError, ConfigError

LAYOUT_VARIABLE = "MODELRUNNER_LAYOUT"
# Whose versions may decide what a process can do.
PACKAGES = ("modelrunner", "numpy", "torch", "triton")


@dataclass(frozen=True, slots=True)
class Feature:
    """A part of a configuration that one layout lacks; `field` is where it is asked for."""

    field: str
    name: str
    used: Callable[[RunnerConfig], bool]


# What each layout lacks.
LACKS: dict[str, tuple[Feature, ...]] = {
    "slots": (
        Feature(
            "reorder_batch_threshold", "a batch order by threshold",
            lambda c: c.reorder_batch_threshold is not None,
        ),
    ),
    "dense": (
        Feature("num_speculative_tokens", "drafts", lambda c: c.num_speculative_tokens > 0),
        Feature("initial_free_rows", "a list of free rows", lambda c: c.initial_free_rows is not None),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayoutDecision:
    """The layout that was chosen, and everything that it was chosen from.

    runner: as it was named. layout: the choice. reason: who chose ("configuration", "environment" or "policy"), and
    what else there is to say. requested: the configuration's word, environment: the variable's (None: left open).
    offered: the layouts that the runner has. forced_by: features in use that no other layout has. lacking: by layout,
    the features in use that it lacks. packages: installed versions, None for one that is missing. digest: of layout,
    reason, packages and every field of the configuration; the same in every process that decides the same.
    """

    runner: str
    layout: str
    reason: str
    requested: str | None
    environment: str | None
    offered: tuple[str, ...]
    forced_by: tuple[str, ...]
    lacking: Mapping[str, tuple[str, ...]] = field(hash=False)
    packages: Mapping[str, str | None] = field(hash=False)
    digest: str

    def line(self) -> str:
        """One phrase, for logs and records."""
        return f"layout {self.layout} by {self.reason} [{self.digest}]"

    def explain(self) -> str:
        """Several lines, for people."""
        versions = ", ".join(f"{name} {version or '(not installed)'}" for name, version in self.packages.items())
        lines = [
            ("chosen", f"{self.layout}, by {self.reason}"),
            ("forced by", ", ".join(self.forced_by) or "nothing"),
            ("configuration", f"layout={self.requested!r}" if self.requested else "names no layout"),
            ("environment", f"{LAYOUT_VARIABLE}={self.environment}" if self.environment else "names no layout"),
            *((layout, self._verdict(layout)) for layout in LAYOUTS),
            ("packages", versions),
            ("digest", self.digest),
        ]
        return "\n".join([self.runner, *(f"  {key:<13}  {text}" for key, text in lines)])

    def _verdict(self, layout: str) -> str:
        """What a layout can do with this configuration."""
        where = "" if layout in self.offered else "not offered by this runner; "
        if self.lacking[layout]:
            return f"{where}forbidden: lacks {', '.join(self.lacking[layout])}"
        return f"{where}has all that is used; lacks {', '.join(feature.name for feature in LACKS[layout])}"

    def difference(self, other: LayoutDecision) -> str:
        """What this decision was made from that the other was not; where digests are equal, nothing."""
        if self.digest == other.digest:
            return ""
        parts = []
        if self.environment != other.environment:
            parts.append(f"{LAYOUT_VARIABLE} is {self.environment or 'unset'}, not {other.environment or 'unset'}")
        if self.offered != other.offered:
            parts.append(f"the runner offers {' and '.join(self.offered)}, not {' and '.join(other.offered)}")
        for name in PACKAGES:
            mine, theirs = (decision.packages.get(name) or "missing" for decision in (self, other))
            if mine != theirs:
                parts.append(f"{name} is {mine}, not {theirs}")
        return "; ".join(parts) or "the configuration is another"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-ready."""
        return dataclasses.asdict(self)


def resolve_layout(
    runner: str, config: RunnerConfig, offered: Sequence[str], environ: Mapping[str, str] | None = None
) -> LayoutDecision:
    """Decide. runner: its name, for messages; offered: the layouts that it has; environ: os.environ unless given.

    Raises ConfigError for a variable that names no layout; CapabilityError where the layout asked for is not offered
    or lacks something that the configuration uses, and where no layout has all that is used.
    """
    # 1 what was asked for, and what it needs
    offered = _known(offered)
    requested = config.layout
    environment = _environment(os.environ if environ is None else environ)
    lacking = {layout: tuple(f.name for f in LACKS[layout] if f.used(config)) for layout in LAYOUTS}
    # 2 who decides
    if requested is not None:
        layout, reason = requested, "configuration"
        _check(runner, config, layout, offered, lacking, "the configuration")
        if environment is not None and environment != requested:
            reason += f" ({LAYOUT_VARIABLE}={environment} is overruled)"
    elif environment is not None:
        layout, reason = environment, f"environment ({LAYOUT_VARIABLE}={environment})"
        _check(runner, config, layout, offered, lacking, f"{LAYOUT_VARIABLE}={environment}")
    else:
        layout, reason = _policy(runner, config, offered, lacking)
    # 3 what the others could not have done
    forced_by = tuple(name for other in LAYOUTS if other != layout for name in lacking[other])
    # 4 what two processes must agree on
    packages = package_versions()
    digest = _digest(layout, reason, config, packages)
    return LayoutDecision(runner, layout, reason, requested, environment, offered, forced_by, lacking, packages, digest)


def offered_layouts(factory: Any) -> tuple[str, ...]:
    """The layouts that a runner's factory can build, by its attribute LAYOUTS; slots alone where there is none.

    Raises ConfigError if the attribute lists none of the known layouts, or others.
    """
    return _known(getattr(factory, "LAYOUTS", ("slots",)))


def _known(listed: Any) -> tuple[str, ...]:
    if not isinstance(listed, (tuple, list)) or not listed or any(name not in LAYOUTS for name in listed):
        raise ConfigError(
            "not the layouts that a runner can build", field="LAYOUTS", got=listed,
            expected=f"some of {', '.join(LAYOUTS)}",
        )  # fmt: skip
    return tuple(listed)


def package_versions() -> dict[str, str | None]:
    """Versions of PACKAGES: of this one as it runs, of the others as their metadata has it; nothing is imported."""
    return {name: _version(name) for name in PACKAGES}


@functools.cache
def _version(name: str) -> str | None:
    if name == "modelrunner":
        import runner_api

        return runner_api.__version__
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _environment(environ: Mapping[str, str]) -> str | None:
    value = environ.get(LAYOUT_VARIABLE)
    if value is not None and value not in LAYOUTS:
        raise ConfigError(
            "no such layout", field=LAYOUT_VARIABLE, got=value,
            expected=" or ".join(map(repr, LAYOUTS)),
            hint="Unset the variable to leave the choice to the policy",
        )  # fmt: skip
    return value


def _check(
    runner: str, config: RunnerConfig, layout: str, offered: Sequence[str], lacking: Mapping[str, tuple[str, ...]],
    who: str,
) -> None:  # fmt: skip
    """The layout that was asked for is there, and has all that is used."""
    others = [other for other in offered if other != layout and not lacking[other]]
    if layout not in offered:
        raise CapabilityError(
            f"only one layout is offered by runner {runner!r}, and {who} asks for another", field="layout", got=layout,
            expected=" or ".join(map(repr, offered)),
        )  # fmt: skip
    for feature in LACKS[layout]:
        if feature.used(config):
            raise CapabilityError(
                f"the {layout} layout, which {who} asks for, lacks {feature.name}", field=feature.field,
                got=getattr(config, feature.field), expected=_default(feature.field),
                hint=f"Layout {others[0]!r} has it" if others else None,
            )  # fmt: skip


def _policy(
    runner: str, config: RunnerConfig, offered: Sequence[str], lacking: Mapping[str, tuple[str, ...]]
) -> tuple[str, str]:
    """The first layout, in the order of LAYOUTS, that is offered and lacks nothing; and why not the others."""
    able = [layout for layout in LAYOUTS if layout in offered and not lacking[layout]]
    faults = "; ".join(f"{name} lacks {', '.join(lacking[name])}" for name in LAYOUTS if lacking[name])
    if not able:
        used = next(f for layout in LAYOUTS if layout in offered for f in LACKS[layout] if f.used(config))
        elsewhere = [name for name in LAYOUTS if name not in offered and not lacking[name]]
        raise CapabilityError(
            f"no layout of runner {runner!r} has all that is used: {faults}", field=used.field,
            got=getattr(config, used.field), expected=_default(used.field),
            hint=f"Or take a runner that offers layout {elsewhere[0]!r}" if elsewhere else None,
        )  # fmt: skip
    why = [faults] if faults else []
    if len(offered) == 1:
        why = ["the only one offered", *why]
    elif able[0] == LAYOUTS[0]:
        why = ["the default", *why]
    return able[0], f"policy ({'; '.join(why)})"


def _default(name: str) -> str:
    """How a message says that a feature must stay unused."""
    value = next(f.default for f in dataclasses.fields(RunnerConfig) if f.name == name)
    return f"{name}={value!r}"


def _digest(layout: str, reason: str, config: RunnerConfig, packages: Mapping[str, str | None]) -> str:
    text = json.dumps([layout, reason, _plain(config), dict(packages)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    """A value as JSON can hold it, the same in every process: sets sorted, callables by name, other objects by type."""
    if isinstance(value, functools.partial):
        return ["partial", _plain(value.func), _plain(value.args), _plain(value.keywords)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(v) for v in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    # A spawned process knows the program's own module by another name.
    module = getattr(named, "__module__", "").replace("__mp_main__", "__main__")
    return f"{module}:{named.__qualname__}"
