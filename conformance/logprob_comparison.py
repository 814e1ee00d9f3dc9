"""Log probabilities of two records of one step: only the columns that each request asked for count.

A batch's arrays are as wide as its widest request; what stands behind a narrower request's own width is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conformance.comparison import Difference, FieldComparison, owner_of
from runner_api.errors import TraceError
from runner_api.record import StepRecord

LOGPROB_FIELDS = ("logprob_token_ids", "ranks", "logprobs")
# Recorded logits are off the exact ones by up to 0.04 (TF32 attention). A log probability is a logit minus the log of
# a sum of exponentials, which moves by no more than the largest of its terms: 2 * 0.04 in all. The k-th largest of a
# list moves by no more than its largest move either, so the bound holds column by column even where ids swap.
LOGPROB_BOUND = 0.08
# On the recorded logits themselves: both sides sum in float32, and the recording was rounded to six decimals.
LOGPROB_BOUND_RECORDED_LOGITS = 2e-5


def compare_logprobs(
    name: str, expected: StepRecord, got: StepRecord, wanted: Sequence[int | None], *, exact: bool
) -> FieldComparison:
    """Compare one of LOGPROB_FIELDS.

    wanted: by request, its `SamplingParams.logprobs` (None = none; the drawn token's column comes on top). exact: both
    sides saw the same logits. Where they did not, rounding may swap neighbours, so that ids behind column 0 and ranks
    say nothing: they are not counted. Raises `TraceError` if `expected` has not one row per request.
    """
    left = _columns(getattr(expected, name))
    right = getattr(got, name)
    if left.shape[0] != len(wanted):
        raise TraceError("not one row per request", field=name, got=left.shape[0], expected=len(wanted))
    # 1 which elements count
    own = np.array([0 if n is None else left.shape[1] if n == -1 else 1 + n for n in wanted])
    counted = np.arange(left.shape[1])[None, :] < own[:, None]
    if not exact and name == "ranks":
        counted[:] = False
    if not exact and name == "logprob_token_ids":
        counted[:, 1:] = False
    # 2 what the runner gave, and where it gave nothing
    theirs = np.zeros(left.shape, np.float64)
    present = np.zeros(left.shape, bool)
    if right is not None:
        right = _columns(right)
        r, w = (min(a, b) for a, b in zip(left.shape, right.shape, strict=True))
        theirs[:r, :w], present[:r, :w] = right[:r, :w], True
    # 3 integers must be equal, floats near
    if name == "logprobs":
        bound = LOGPROB_BOUND_RECORDED_LOGITS if exact else LOGPROB_BOUND
        with np.errstate(invalid="ignore"):
            same = (np.abs(left - theirs) <= bound) | (left == theirs)
    else:
        same = left == theirs
    wrong = np.argwhere(counted & ~(present & same))
    equal = int(counted.sum()) - len(wrong)
    if not len(wrong):
        return FieldComparison(name, equal, 0)
    i, c = (int(x) for x in wrong[0])
    req_id, position = owner_of("logits_indices", (i,), expected)
    value = theirs[i, c].item() if present[i, c] else None
    if value is not None and name != "logprobs":
        value = int(value)
    index = (i,) if name == "ranks" else (i, c)
    first = Difference(name, index, req_id, position, left[i, c].item(), value)
    return FieldComparison(name, equal, len(wrong), first)


def _columns(array: np.ndarray) -> np.ndarray:
    return array[:, None] if array.ndim == 1 else array
