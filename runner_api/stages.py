"""Stages: the plain functions a runner's step is made of, listed so that a judge can run one alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage: `fn(**inputs, **outputs)` fills each array in `outputs` in place, padding included.

    `inputs` and `outputs` are parameter names in the function's own order of appearance; the twin in another
    backend has the same names in the same order.
    """

    name: str
    fn: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageSet:
    """All stages of one backend, with the way in and out of its memory."""

    backend: str
    stages: Mapping[str, StageSpec]
    to_device: Callable[[np.ndarray], Any] = field(default=lambda a: a)
    to_host: Callable[[Any], np.ndarray] = field(default=lambda a: a)

    def run(self, name: str, **arrays: Any) -> dict[str, np.ndarray]:
        """Run one stage on NumPy arrays (lists of arrays for per-group parameters, scalars as they are).

        Returns the outputs by name; the arrays passed in are left as they were.
        """
        spec = self.stages[name]
        moved = {k: self._in(v) for k, v in arrays.items()}
        spec.fn(**moved)
        return {k: self._out(moved[k]) for k in spec.outputs}

    def _in(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self.to_device(value.copy())
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], np.ndarray):
            return [self.to_device(v.copy()) for v in value]
        return value

    def _out(self, value: Any) -> Any:
        return [self.to_host(v) for v in value] if isinstance(value, (list, tuple)) else self.to_host(value)
