"""From whatever a user holds (an `LLM`, an engine, a worker) to the model runner in it, and which of the two it is."""

from __future__ import annotations

import inspect
import sys
from importlib import metadata
from typing import Any

from runner_api import ConfigError

# Where each object keeps the next one, from `LLM` down to the runner.
STEPS_DOWN = ("llm_engine", "engine_core", "model_executor", "driver_worker", "worker", "model_runner")
# What a recorder hooks and reads: methods, then attributes.
INTERFACES = {
    "V2": (("execute_model", "prepare_inputs", "prepare_attn", "sample"), ("req_states", "block_tables")),
    "V1": (("execute_model", "_prepare_inputs", "_sample"), ("input_batch", "query_start_loc", "seq_lens")),
}
KNOWN_VERSIONS = ("0.26", "0.33")


def find_model_runner(engine: Any) -> Any:
    """The model runner inside of `engine`. Raises ConfigError saying how far it came and what it looked for."""
    seen, at = [], engine
    while True:
        seen.append(type(at).__name__)
        if interface_of(at) is not None:
            return at
        # A wrapper that passes attributes on (vLLM's own around a worker) offers everything: the farthest comes first.
        below = next((name for name in reversed(STEPS_DOWN) if _get(at, name) is not None), None)
        if below is None or len(seen) > 2 * len(STEPS_DOWN):
            break
        at = _get(at, below)
    raise ConfigError(
        "no model runner of vLLM in it", field="engine", got=" -> ".join(seen), expected=_wanted(),
        hint="An engine in another process cannot be reached: set VLLM_ENABLE_V1_MULTIPROCESSING=0 and use one GPU, "
        "or record inside of the worker: record(worker.model_runner, path)",
    )  # fmt: skip


def interface_of(runner: Any) -> str | None:
    """V1, V2, or None for what is no model runner."""
    for name, (methods, attributes) in INTERFACES.items():
        offered = all(callable(_get(runner, m)) for m in methods)
        if offered and all(_get(runner, a) is not None for a in attributes):
            return name
    return None


def check_signatures(runner: Any, interface: str) -> None:
    """Raise ConfigError where a hooked method does not take what the known versions give it."""
    for method, parameter in first_parameters(interface).items():
        names = list(inspect.signature(getattr(runner, method)).parameters)
        if names[:1] != [parameter]:
            raise ConfigError(
                f"vLLM's {interface} runner has another {method} than the recorder knows", field=method,
                got=f"({', '.join(names)})", expected=f"({parameter}, …) as in {' and '.join(KNOWN_VERSIONS)}",
            )  # fmt: skip


def first_parameters(interface: str) -> dict[str, str]:
    """The hooked methods whose first parameter is named in the same way by all known versions."""
    plan = "scheduler_output"
    if interface == "V2":
        return {"execute_model": plan, "prepare_inputs": plan, "prepare_attn": "input_batch", "sample": "hidden_states"}
    return {"execute_model": plan, "_prepare_inputs": plan, "_sample": "logits"}


def vllm_version() -> str:
    """Of the vLLM in use. Raises ConfigError where there is none."""
    version = getattr(sys.modules.get("vllm"), "__version__", None)
    try:
        return str(version or metadata.version("vllm"))
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "vLLM is not installed here", field="version", hint="Name the recorded version: record(…, version='0.33.0')"
        ) from None


def _get(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name, None)
    except Exception:  # a property of somebody else's object
        return None


def _wanted() -> str:
    return " or ".join(
        f"{name} with {', '.join((*methods, *attributes))}" for name, (methods, attributes) in INTERFACES.items()
    )
