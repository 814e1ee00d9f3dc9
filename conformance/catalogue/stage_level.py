"""Scenarios of single stages: call, compare the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.catalogue.comparison import Difference, differs
from conformance.catalogue.scenario import Scenario
from runner_api import CapabilityError, ConfigError
from runner_api.loader import load_stages
from runner_api.protocol import RunnerFactory
from runner_api.stages import StageSet


def play(case: Scenario, runner: str | RunnerFactory) -> list[Difference]:
    """Call the scenario's stages one by one: the outputs that are not as it says. Raises what a stage raises."""
    stages = load_stages(runner)
    found: list[Difference] = []
    for n, call in enumerate(case.calls, 1):
        outputs = stages.run(call.stage, **{name: argument(name, value) for name, value in call.args.items()})
        for name, expected in call.seen.items():
            found += differs(f"call {n} {call.stage} {name}", outputs[name], expected)
    return found


def lacks(case: Scenario, runner: str | RunnerFactory) -> str:
    """Why the scenario cannot run here; empty if it can."""
    try:
        stages: StageSet = load_stages(runner)
    except CapabilityError as e:
        return str(e)
    missing = sorted({call.stage for call in case.calls} - set(stages.stages))
    return f"the runner does not offer the stage {', '.join(missing)}" if missing else ""


def argument(name: str, value: Any) -> Any:
    """{int32 = [...]} is an array; a list of such, or an array of arrays, one per group; "none" is None."""
    if isinstance(value, Mapping):
        if len(value) != 1:
            raise ConfigError("an array is one type and its values", field=name, got=sorted(value))
        ((dtype, values),) = value.items()
        return np.array(values, np.dtype(dtype))
    if isinstance(value, (list, tuple)):
        return [argument(name, v) for v in value]
    return None if value == "none" else value
