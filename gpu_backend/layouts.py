"""The two layouts of the runner, and which of them is built. Twin: cpu_reference/layouts.py."""

from __future__ import annotations

from gpu_backend.dense.runner import DenseGpuModelRunner
from gpu_backend.runner import GpuModelRunner
from gpu_backend.stages import gpu_stages
from runner_api import RunnerConfig
from runner_api.selection import resolve_layout

LAYOUTS = {"slots": GpuModelRunner, "dense": DenseGpuModelRunner}


def build_runner(config: RunnerConfig) -> GpuModelRunner:
    """This backend's runner, in the layout that configuration, environment and policy choose.

    Raises ConfigError and CapabilityError as `runner_api.selection.resolve_layout` and the runner do.
    """
    selection = resolve_layout("gpu", config, tuple(LAYOUTS))
    return LAYOUTS[selection.layout](config, selection)


# What a factory says of itself; see `runner_api.loader`.
build_runner.LAYOUTS = tuple(LAYOUTS)
build_runner.stages = gpu_stages
