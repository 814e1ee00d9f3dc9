"""Random calls of the stages of the dense layout: tokens that the host has not seen, and rows that move."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.stage_case import GARBAGE, KEPT, NO_ROW_SKIPPED, VALUES, StageCase
from runner_api import NO_ROW


def dense_cases(random: np.random.Generator) -> Iterator[StageCase]:
    yield late_tokens(random)
    yield moves(random)


def late_tokens(random: np.random.Generator) -> StageCase:
    """Requests in other rows than in the step before; some whose tokens the host knew, and rows without a request."""
    n, r = 9, 6
    previous = np.full(n, GARBAGE - 1, np.int64)  # what an earlier step left: a row, and of nobody in this one
    previous[:r] = random.permutation(n)[:r]
    seen = np.zeros(r, bool)
    seen[random.permutation(r)[:2]] = True
    previous[:r][seen] = NO_ROW
    scheduled = np.where(seen, random.integers(1, 5, r), 1)
    query_start_loc = np.full(n + 1, scheduled.sum(), np.int32)
    query_start_loc[: r + 1] = np.concatenate([[0], np.cumsum(scheduled)])
    written, skipped = np.zeros((2, query_start_loc[-1] + 3), bool)
    last = query_start_loc[1 : r + 1] - 1
    written[last[~seen]], skipped[last[seen]] = True, True
    return StageCase(
        "patch_input_ids",
        {
            "previous_rows": previous, "query_start_loc": query_start_loc,
            "last_sampled_tokens": random.integers(10, 64, n).astype(np.int64), "num_reqs": r,
            "input_ids": np.full(len(written), GARBAGE, np.int32),
        },
        [
            (VALUES, "input_ids", written), (NO_ROW_SKIPPED, "input_ids", skipped),
            (KEPT, "input_ids", ~written & ~skipped),
        ],
    )  # fmt: skip


def moves(random: np.random.Generator) -> StageCase:
    """A chain that leaves an empty row, two rows that change places, a row that is cleared, one that stays."""
    n, widths = 9, (7, 40)
    tables = [random.integers(10, 64, (n, w)).astype(np.int32) for w in widths]
    a, b, c, d, e, f, *_ = (int(row) for row in random.permutation(n))
    listed, inside, emptied = [], [np.zeros(t.shape, bool) for t in tables], [np.zeros(t.shape, bool) for t in tables]
    for k, width in enumerate(widths):
        for source, target in ((a, b), (b, c), (NO_ROW, a), (d, e), (e, d), (NO_ROW, f)):
            length = int(random.integers(1, width + 1))
            listed.append((k, source, target, length))
            (emptied if source == NO_ROW else inside)[k][target, :length] = True
    order = random.permutation(len(listed))
    inside_all, emptied_all = np.concatenate(inside, axis=1), np.concatenate(emptied, axis=1)
    return StageCase(
        "move_rows",
        {"moves": np.array(listed, np.int64)[order].T.copy(), "max_length": max(widths), "tables": tables},
        [
            (VALUES, "tables", inside_all), (NO_ROW_SKIPPED, "tables", emptied_all),
            (KEPT, "tables", ~inside_all & ~emptied_all),
        ],
    )  # fmt: skip
