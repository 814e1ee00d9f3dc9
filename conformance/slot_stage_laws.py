"""What must hold between several calls of a stage: two views of one cache, and the ranks that share out a request.

No oracle is asked: a candidate whose stages all follow another formula fails here too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.context import MOST_MISMATCHES, Mismatch
from conformance.slot_stage_cases import LENGTHS, LOCAL_SLOTS
from runner_api import PAD_SLOT_ID, StageSet

SAME_SLOTS, GROWS, ONE_OWNER = "MR-SLOT-008", "MR-SLOT-009", "MR-DCP-001"
MAP, SLOTS, LOCAL = "map_to_kernel_block_table", "compute_slot_mappings", "compute_dcp_local_seq_lens"
Found = dict[str, list[Mismatch]]
POISON = -7


def slot_laws(candidate: StageSet, random: np.random.Generator) -> Found:
    """The laws on one random cache; those whose stages the candidate does not list are not judged."""
    cache = _Cache(candidate, random)
    found: Found = {}
    for law in (cache.two_views, cache.growing_row, cache.ranks):
        if STAGES_OF[law.__name__] <= candidate.stages.keys():
            try:
                found |= law()
            except Exception as e:  # every call is legal
                found |= {
                    c: [Mismatch(c, law.__name__, None, (), repr(e), "no exception")] for c in LAWS_OF[law.__name__]
                }
    return found


LAWS_OF = {"two_views": (SAME_SLOTS,), "growing_row": (GROWS,), "ranks": (ONE_OWNER, LOCAL_SLOTS, LENGTHS)}
STAGES_OF = {
    "two_views": frozenset({MAP, SLOTS}), "growing_row": frozenset({MAP}), "ranks": frozenset({SLOTS, LOCAL})
}  # fmt: skip
# Clause id to the stages that its law runs.
STAGES_OF_LAWS = {clause_id: STAGES_OF[law] for law, clauses in LAWS_OF.items() for clause_id in clauses}


def _wrong(clause: str, field: str, got: np.ndarray, expected: np.ndarray) -> list[Mismatch]:
    return [
        Mismatch(clause, field, None, tuple(int(i) for i in at), got[tuple(at)].item(), expected[tuple(at)].item())
        for at in np.argwhere(got != expected)[:MOST_MISMATCHES]
    ]


class _Cache:
    """Four requests, computed from their first token on, whose blocks of 12 tokens lie anywhere."""

    def __init__(self, stages: StageSet, random: np.random.Generator) -> None:
        self.stages, self.random = stages, random
        self.block_size = 12
        self.lengths = random.integers(1, 60, 4).astype(np.int32)
        self.table = (1 + random.permutation(4 * 8)).reshape(4, 8).astype(np.int32)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
        self.owner = np.repeat(np.arange(4), self.lengths)
        self.positions = np.arange(self.starts[-1], dtype=np.int64) - self.starts[self.owner]

    def _slots(self, table: np.ndarray, block_size: int, size: int = 1, rank: int = 0, interleave: int = 1) -> Any:
        """int64[T]"""
        return self.stages.run(
            SLOTS, idx_mapping=np.arange(4), query_start_loc=self.starts, positions=self.positions,
            block_sizes=[block_size], slot_mapping_enabled=[True], dcp_sharded=[True], dcp_size=size, dcp_rank=rank,
            dcp_interleave=interleave, num_reqs=4, block_tables=[table],
            slot_mappings=np.full((1, len(self.positions)), POISON),
        )["slot_mappings"][0]  # fmt: skip

    def _divided(self, table: np.ndarray, parts: int) -> Any:
        out = np.full((len(table), table.shape[1] * parts), POISON, np.int32)
        return self.stages.run(
            MAP, block_table=table, blocks_per_kv_block=parts, kernel_block_stride=parts, num_rows=len(table),
            kernel_block_table=out,
        )["kernel_block_table"]  # fmt: skip

    def two_views(self) -> Found:
        """A token's slot by blocks, and by the kernel blocks that they are divided into."""
        expected, wrong = self._slots(self.table, self.block_size), []
        for parts in (2, 3, 12):
            got = self._slots(self._divided(self.table, parts), self.block_size // parts)
            wrong += _wrong(SAME_SLOTS, f"slots through {parts} kernel blocks", got, expected)
        return {SAME_SLOTS: wrong}

    def growing_row(self) -> Found:
        """Dividing what is appended gives what dividing the whole row gives."""
        cut, parts = int(self.random.integers(1, 8)), int(self.random.integers(2, 5))
        pieces = [self._divided(np.ascontiguousarray(t), parts) for t in np.split(self.table, [cut], axis=1)]
        return {GROWS: _wrong(GROWS, MAP, np.concatenate(pieces, axis=1), self._divided(self.table, parts))}

    def ranks(self) -> Found:
        """Together the ranks keep every token once; each keeps a request's own in order, without holes."""
        found: Found = {c: [] for c in LAWS_OF["ranks"]}
        for size, interleave in ((2, 1), (3, 4), (4, 2), (5, 12)):
            slots = np.stack([self._slots(self.table, self.block_size, size, r, interleave) for r in range(size)])
            keepers = (slots != PAD_SLOT_ID).sum(0)
            found[ONE_OWNER] += _wrong(ONE_OWNER, f"keepers among {size}", keepers, np.ones_like(keepers))
            for rank in range(size):
                lengths = self.stages.run(
                    LOCAL, seq_lens=self.lengths, dcp_size=size, dcp_rank=rank, dcp_interleave=interleave, num_reqs=4,
                    dcp_local_seq_lens=np.full(4, POISON, np.int32),
                )["dcp_local_seq_lens"]  # fmt: skip
                kept = slots[rank] != PAD_SLOT_ID
                held = np.bincount(self.owner[kept], minlength=4)
                found[LENGTHS] += _wrong(LENGTHS, f"length on rank {rank} of {size}", lengths, held)
                # the n-th of a request's tokens that a rank keeps lies at the rank's local position n
                n = np.arange(kept.sum()) - np.concatenate([[0], np.cumsum(held)])[self.owner[kept]]
                block = self.table[self.owner[kept], n // self.block_size].astype(np.int64)
                where = block * self.block_size + n % self.block_size
                found[LOCAL_SLOTS] += _wrong(LOCAL_SLOTS, f"slots on rank {rank} of {size}", slots[rank][kept], where)
        return found
