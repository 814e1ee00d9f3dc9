"""Random calls of the stages about kernel blocks and about ranks that share out a request's tokens.

Who keeps a token is found here by dealing positions out, not by the oracle's formula. What must hold between several
calls of a stage is in `conformance.slot_stage_laws`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.stage_case import GARBAGE, KEPT, NO_ROW_SKIPPED, NO_SLOTS, WHOLE, StageCase
from runner_api import NO_ROW

IN_ORDER, NULL_DIVIDED, STRIDE = "MR-SLOT-005", "MR-SLOT-006", "MR-SLOT-007"
NOT_SHARDED, OTHERS_SKIPPED, LOCAL_SLOTS = "MR-DCP-002", "MR-DCP-003", "MR-DCP-004"
LENGTHS, LENGTHS_TAIL, ONE_RANK, WIDE_LOCAL_SLOTS = "MR-DCP-005", "MR-DCP-006", "MR-DCP-007", "MR-DCP-008"


def ranks_of(num_positions: int, dcp_size: int, dcp_interleave: int) -> np.ndarray:
    """int64[num_positions]: the rank that keeps each position: runs are dealt out, one to each rank, over and over."""
    return np.resize(np.repeat(np.arange(dcp_size), dcp_interleave), num_positions)


class SlotBatch:
    """R requests in N rows, with a block table of two groups (blocks of 4 and of 16 tokens) for each row."""

    def __init__(
        self, random: np.random.Generator, idx_mapping: np.ndarray, query_start_loc: np.ndarray, positions: np.ndarray,
        seq_lens: np.ndarray, tables: list[np.ndarray], num_reqs: int,
    ) -> None:  # fmt: skip
        self.random, self.r = random, num_reqs
        self.idx_mapping, self.query_start_loc, self.positions = idx_mapping, query_start_loc, positions
        self.seq_lens, self.tables = seq_lens, tables
        self.t, self.buffer = int(query_start_loc[num_reqs]), len(positions)
        self.owner = np.repeat(np.arange(num_reqs), np.diff(query_start_loc[: num_reqs + 1]))

    def cases(self) -> Iterator[StageCase]:
        yield from self.kernel_blocks()
        for size, interleave in ((2, 1), (3, 4), (4, 2)):
            yield self.shards(size, int(self.random.integers(size)), interleave)
            for rank in range(size):
                yield self.lengths(size, rank, interleave)
        yield self.one_rank()
        yield self.wide()

    def kernel_blocks(self) -> Iterator[StageCase]:
        """Tables in batch order, with null entries, as behind a window, and rows of padding."""
        num_rows = self.r + 2
        for parts, stride in ((2, 2), (4, 4), (3, 5)):
            table = self.tables[0][self.idx_mapping].copy()
            table[self.random.random(table.shape) < 0.2] = 0
            table[self.r : num_rows] = 0
            inside = np.zeros((len(table), table.shape[1] * parts), bool)
            inside[:num_rows] = True
            null = np.repeat(table == 0, parts, axis=1)
            yield StageCase(
                "map_to_kernel_block_table",
                {
                    "block_table": table, "blocks_per_kv_block": parts, "kernel_block_stride": stride,
                    "num_rows": num_rows, "kernel_block_table": np.full(inside.shape, GARBAGE, np.int32),
                },
                [
                    (clause, "kernel_block_table", mask)
                    for clause, mask in (
                        (IN_ORDER if parts == stride else STRIDE, inside & ~null),
                        (NULL_DIVIDED, inside & null), (KEPT, ~inside),
                    )
                ],
            )  # fmt: skip

    def _mapping(
        self, tables: list[np.ndarray], regions: list[tuple[str, np.ndarray]], size: int, rank: int, interleave: int
    ) -> StageCase:
        """Three groups: shared out, kept whole by every rank, and without slots. The last request has no row."""
        mapping = self.idx_mapping.copy()
        mapping[self.r - 1] = NO_ROW
        return StageCase(
            "compute_slot_mappings",
            {
                "idx_mapping": mapping, "query_start_loc": self.query_start_loc, "positions": self.positions,
                "block_sizes": [4, 16, 4], "slot_mapping_enabled": [True, True, False],
                "dcp_sharded": [True, False, True], "dcp_size": size, "dcp_rank": rank, "dcp_interleave": interleave,
                "num_reqs": self.r, "block_tables": [*tables, tables[0]],
                "slot_mappings": np.full((3, self.buffer), GARBAGE, np.int64),
            },
            [(clause, "slot_mappings", mask) for clause, mask in regions],
        )  # fmt: skip

    def _real(self) -> np.ndarray:
        """bool[3, T]: tokens of requests with a row."""
        real = np.zeros((3, self.buffer), bool)
        real[:, : self.t] = self.owner < self.r - 1
        return real

    def shards(self, size: int, rank: int, interleave: int) -> StageCase:
        real, group = self._real(), np.arange(3)[:, None]
        tail = np.broadcast_to(np.arange(self.buffer) >= self.t, real.shape)
        kept = np.zeros(self.buffer, bool)
        positions = self.positions[: self.t]
        kept[: self.t] = ranks_of(int(positions.max()) + 1, size, interleave)[positions] == rank
        regions = [
            (LOCAL_SLOTS, real & (group == 0) & kept),
            (OTHERS_SKIPPED, real & (group == 0) & ~kept),
            (NOT_SHARDED, real & (group == 1)),
            (NO_SLOTS, real & (group == 2)),
            (NO_ROW_SKIPPED, ~real & ~tail),
            (WHOLE, tail),
        ]
        return self._mapping(self.tables, regions, size, rank, interleave)

    def one_rank(self) -> StageCase:
        return self._mapping(self.tables, [(ONE_RANK, self._real())], 1, 0, 4)

    def wide(self) -> StageCase:
        sharded = self._real() & (np.arange(3)[:, None] == 0)
        return self._mapping([t + 2**29 for t in self.tables], [(WIDE_LOCAL_SLOTS, sharded)], 2, 1, 2)

    def lengths(self, size: int, rank: int, interleave: int) -> StageCase:
        n = len(self.seq_lens)
        seq_lens = self.seq_lens.copy()
        seq_lens[self.r :] = GARBAGE
        tail = np.arange(n) >= self.r
        return StageCase(
            "compute_dcp_local_seq_lens",
            {
                "seq_lens": seq_lens, "dcp_size": size, "dcp_rank": rank, "dcp_interleave": interleave,
                "num_reqs": self.r, "dcp_local_seq_lens": np.full(n, GARBAGE, np.int32),
            },
            [(LENGTHS, "dcp_local_seq_lens", ~tail), (LENGTHS_TAIL, "dcp_local_seq_lens", tail)],
        )  # fmt: skip
