"""Small Triton kernels with one fault each, and their correct twins, as data.

The line that a tool must name ends in `# fault`. Both kernels of a case are launched in the same way: `launch(kernel,
session)` builds the tensors. The kernels stand by the place of their fault: in `faulty_bounds` (memory of others, or
that nobody wrote), `faulty_races` (what depends on when a program runs) and `faulty_values` (what is computed).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from conformance.triton_sanitizer.faults import FaultKind

# launch(kernel, session); a dict of results where another order of programs may give others
Launch = Callable[[Any, Any], dict[str, torch.Tensor] | None]


@dataclass(frozen=True, slots=True)
class Case:
    """One fault. `argument` is the kernel's parameter that a report must name, None where no memory is at fault."""

    name: str
    kind: FaultKind
    faulty: Any
    correct: Any
    launch: Launch
    argument: str | None


CASES: list[Case] = []


def case(kind: FaultKind, faulty: Any, correct: Any, argument: str | None = None) -> Callable[[Launch], Launch]:
    """Decorate the function that launches either kernel: the three become a case."""

    def register(launch: Launch) -> Launch:
        CASES.append(Case(faulty.__name__, kind, faulty, correct, launch, argument))
        return launch

    return register


def floats(*shape: int) -> torch.Tensor:
    """Different values, none of them 0, so that no mistake is hidden by equal neighbours."""
    return (torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32) * 0.5).reshape(shape)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


import faulty_bounds  # noqa: E402, F401  (each module fills CASES)
import faulty_races  # noqa: E402, F401
import faulty_values  # noqa: E402, F401
