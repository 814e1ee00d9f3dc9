"""The two layouts of the runner, and which of them is built. Twin: gpu_backend/layouts.py."""

from __future__ import annotations

from cpu_reference.dense.runner import DenseCpuModelRunner
from cpu_reference.runner import CpuModelRunner
from cpu_reference.stages import cpu_stages
from runner_api import RunnerConfig
from runner_api.selection import resolve_layout

LAYOUTS = {"slots": CpuModelRunner, "dense": DenseCpuModelRunner}


def build_runner(config: RunnerConfig) -> CpuModelRunner:
    """This backend's runner, in the layout that configuration, environment and policy choose.

    Raises ConfigError and CapabilityError as `runner_api.selection.resolve_layout` and the runner do.
    """
    selection = resolve_layout("cpu", config, tuple(LAYOUTS))
    return LAYOUTS[selection.layout](config, selection)


# What a factory says of itself; see `runner_api.loader`.
build_runner.LAYOUTS = tuple(LAYOUTS)
build_runner.stages = cpu_stages
