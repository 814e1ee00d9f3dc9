"""`modelrunner runners --explain` and `--explain-vllm`: who would run, and why. No runner is built, no model opened."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine_core.vllm_config import VllmConfig
from engine_core.vllm_policy import POLICIES, VllmDecision, explain_vllm
from runner_api import ConfigError, RunnerConfig, RunnerError, runner_names
from runner_api.loader import decide_layout
from runner_api.selection import LayoutDecision

EXPLAIN_JSON = """\
--explain --json prints a list with one object per runner:
  name, target, error (null, or why no layout can be chosen)
  decision   (null where error is set) runner, layout, reason, requested (the configuration's word, or null),
             environment (that of MODELRUNNER_LAYOUT, or null), offered, forced_by (features in use that no other layout
             has), lacking (by layout: features in use that it lacks), packages (name: version or null), digest
--explain-vllm --json prints a list with one object per version:
  version, runner ("V1", "V2", or null where vLLM does not start), layout (ours of the same design), reason,
  log (what vLLM says of the choice), error (null, or what it stops with), notes,
  async_scheduling, max_concurrent_batches   (null where the table does not say)
CONFIG.json holds one object; what is left out is as vLLM has it by default. Its keys:
"""


def vllm_keys() -> str:
    """The keys of CONFIG.json with their defaults, wrapped for a help text."""
    lines, line = [], ""
    for name, default in _vllm_defaults().items():
        item = f"{name}={json.dumps(default)}"
        if len(line) + len(item) > 112:
            lines.append(line)
            line = ""
        line = f"{line}, {item}" if line else item
    return "".join(f"  {text}\n" for text in [*lines, line])


def _vllm_defaults() -> dict[str, Any]:
    return {name: getattr(VllmConfig(), name) for name in VllmConfig.__slots__}


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` texts as options; a value is read as JSON where it is JSON. Raises ConfigError."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name in options:
            what = "is given twice" if equals else "names no value"
            raise ConfigError(what, field="--option", got=text, expected="NAME=VALUE, each name once")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def explain_runners(names: Sequence[str], options: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry per runner, `decision` a LayoutDecision. All installed ones if none is named.

    Raises RunnerError where a named one refuses; of all installed ones, one that refuses does not hide the others.
    """
    config, known = RunnerConfig.from_dict(options), runner_names()
    entries = []
    for name in names or sorted(known):
        entry: dict[str, Any] = {"name": name, "target": known.get(name, name), "error": None, "decision": None}
        try:
            entry["decision"] = decide_layout(name, config)
        except RunnerError as e:
            if names:
                raise
            entry["error"] = str(e)
        entries.append(entry)
    return entries


def explain_runners_text(entries: Sequence[dict[str, Any]]) -> str:
    """Paragraphs, one per runner."""
    parts = []
    for entry in entries:
        decision: LayoutDecision | None = entry["decision"]
        parts.append(decision.explain() if decision else f"{entry['name']}\n  no layout      {entry['error']}")
    return "\n\n".join(parts)


def read_vllm_config(path: str) -> VllmConfig:
    """Read CONFIG.json. Raises ConfigError for what is no file, no JSON object, or no configuration."""
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"cannot be read: {type(e).__name__}: {e}", field="--explain-vllm", got=path) from e
    if not isinstance(values, dict):
        raise ConfigError("a configuration is one JSON object", field="--explain-vllm", got=values, expected="{…}")
    return VllmConfig.from_dict(values)


def explain_vllm_versions(path: str, version: str | None = None) -> list[VllmDecision]:
    """What each version (or one) does with a configuration file."""
    config = read_vllm_config(path)
    return [explain_vllm(config, v) for v in ([version] if version else POLICIES)]
