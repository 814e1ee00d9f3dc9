"""The messages of the JSON-lines protocol that are no types of the contract. Both ends read and write them here.

docs/json-lines.md shows every request with its answer; `runner_api.wire` says how values look.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runner_api.errors import CapabilityError, ConfigError
from runner_api.outputs import ModelRunnerOutput
from runner_api.wire import array_from_json, array_to_json, to_json
from runner_api.witness import WitnessConfig


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a program says of itself when it is started. layouts: the row layouts that it can build; stages: whether it
    offers some."""

    spec_version: str
    name: str
    layouts: tuple[str, ...] = ("slots",)
    stages: bool = False


@dataclass(frozen=True, slots=True)
class Built:
    """The number of a new runner."""

    runner: int


@dataclass(frozen=True, slots=True)
class Model:
    """What `load_model` is to load: exactly one of the two. Raises ConfigError."""

    witness: WitnessConfig | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        if (self.witness is None) == (self.path is None):
            raise ConfigError("no model", field="model", got=self, expected="either a witness configuration or a path")


@dataclass(frozen=True, slots=True)
class Sampled:
    """The outcome of a step: the output, or, from a runner that offers async_output, the number to ask for it by."""

    output: ModelRunnerOutput | None = None
    pending: int | None = None

    def __post_init__(self) -> None:
        if (self.output is None) == (self.pending is None):
            raise ConfigError("no outcome", field="sample", got=self, expected="either an output or a pending number")


@dataclass(frozen=True, slots=True)
class ListedStage:
    """One stage: the names of its parameters, in order."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ListedStages:
    """All stages of a program."""

    backend: str
    stages: tuple[ListedStage, ...]


def model_to_json(model: Any) -> Any:
    """What is loaded, as a `Model`. Raises CapabilityError for a model object: it cannot leave its process."""
    if isinstance(model, WitnessConfig):
        return to_json(Model(witness=model))
    if isinstance(model, (str, Path)):
        return to_json(Model(path=str(model)))
    raise CapabilityError(
        "a model object cannot be sent to another process", field="model", got=model,
        expected="a WitnessConfig or the path of a checkpoint",
    )  # fmt: skip


def arguments_to_json(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments or outputs of a stage: arrays with dtype and shape, lists of such, plain numbers."""
    return {name: _argument_to_json(value) for name, value in arguments.items()}


def arguments_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """What `arguments_to_json` gave."""
    return {name: _argument_from_json(value) for name, value in data.items()}


def _argument_to_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return array_to_json(value)
    if isinstance(value, (list, tuple)):
        return [_argument_to_json(v) for v in value]
    return to_json(value, Any)


def _argument_from_json(data: Any) -> Any:
    if isinstance(data, dict):
        return array_from_json(data)
    return [_argument_from_json(v) for v in data] if isinstance(data, list) else data
