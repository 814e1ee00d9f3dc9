"""One call of one stage, and the clauses about stages alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

WHOLE, KEPT, VALUES = "MR-STAGE-001", "MR-STAGE-002", "MR-STAGE-003"
NO_ROW_SKIPPED, WIDE_SLOTS, NO_SLOTS = "MR-STAGE-004", "MR-STAGE-005", "MR-STAGE-006"
ATTENTION, TIES, NEUTRAL = "MR-STAGE-007", "MR-STAGE-008", "MR-STAGE-009"
GARBAGE = 9  # a plausible leftover: a valid token, row and position


@dataclass(slots=True)
class StageCase:
    """One call. `regions`: (clause, output, mask of the elements it speaks of); `bounds`: largest error allowed."""

    stage: str
    arrays: dict[str, Any]
    regions: list[tuple[str, str, np.ndarray]]
    bounds: dict[str, np.ndarray | float] = field(default_factory=dict)
