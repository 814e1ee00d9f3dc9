"""What a law may look at: one step of the candidate, the oracle's record of it, and the world's truth before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from conformance.dense_rows import DenseRowTracker
from conformance.planned_step import RequestTruth, StepTruth, order_key
from runner_api import (
    BatchDescriptor,
    Capability,
    GrammarOutput,
    KVCacheConfig,
    ModelRunnerOutput,
    RunnerConfig,
    SchedulerOutput,
    StepRecord,
    WitnessConfig,
)

T = TypeVar("T")
# At most so many mismatches of one clause are kept per step: the first ones tell.
MOST_MISMATCHES = 3


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One element that breaks a clause."""

    clause_id: str
    field: str
    req_id: str | None
    index: tuple[int, ...]
    got: Any
    expected: Any

    def __str__(self) -> str:
        where = f"{self.field}{list(self.index)}" if self.index else self.field
        owner = "" if self.req_id is None else f", request {self.req_id!r}"
        return f"{self.clause_id} {where}{owner}: got {self.got!r}, expected {self.expected!r}"


# Clauses that the tracker asks, whether or not a law of `conformance.laws` is behind them.
TRACKED = frozenset(f"MR-STATE-{n:03}" for n in (1, 2, 3, 4, 8))


@dataclass(slots=True)
class RowTracker:
    """Which row each live request must hold, following the candidate once it has strayed.

    `free` is the stack (last entry on top): (row, whether several rows were freed by the plan that freed it).
    """

    free: list[tuple[int, bool]]
    rows: dict[str, int] = field(default_factory=dict)
    # Requests that were added without tokens: their row is assumed until a batch shows it. id -> clause id
    unseen: dict[str, str] = field(default_factory=dict)
    # Findings of the latest step: (clause id, request, got, expected); and the clauses that it put to the test.
    findings: list[tuple[str, str, int, int]] = field(default_factory=list)
    tested: set[str] = field(default_factory=set)

    @classmethod
    def start(cls, config: RunnerConfig) -> RowTracker:
        rows = range(config.max_num_reqs) if config.initial_free_rows is None else config.initial_free_rows
        return cls([(row, False) for row in rows])

    def advance(self, plan: SchedulerOutput, record: StepRecord) -> None:
        """Apply one plan, and hold the rows in the record against what they must be."""
        self.findings, self.tested = [], set()
        got = dict(zip(record.req_ids, record.idx_mapping.tolist(), strict=False))
        leaving = sorted(r for r in plan.finished_req_ids | plan.preempted_req_ids if r in self.rows)
        for req_id in leaving:
            self.free.append((self.rows.pop(req_id), len(leaving) > 1))
            self.unseen.pop(req_id, None)
        for req_id in [r for r in got if r in self.rows]:
            clause = self.unseen.pop(req_id, None)
            if clause is None:
                self._expect("MR-STATE-001", req_id, got[req_id], self.rows[req_id])
                self.rows[req_id] = got[req_id]
            else:
                self._take(clause, req_id, got[req_id], self.rows[req_id], False)
        for new in plan.scheduled_new_reqs:
            row, many = self.free.pop()
            clause = "MR-STATE-008" if new.req_id in leaving else "MR-STATE-004" if many else "MR-STATE-003"
            if new.req_id in got:
                self._take(clause, new.req_id, got[new.req_id], row, many)
            else:
                self.rows[new.req_id], self.unseen[new.req_id] = row, clause
        self._no_row_twice(got)

    def _take(self, clause_id: str, req_id: str, row: int, expected: int, many: bool) -> None:
        """A request shows its first row; if that is another than expected, the stack follows the candidate."""
        self._expect(clause_id, req_id, row, expected)
        if row != expected:
            self.free = [entry for entry in self.free if entry[0] != row] + [(expected, many)]
        self.rows[req_id] = row

    def _no_row_twice(self, got: dict[str, int]) -> None:
        if not got:
            return
        self.tested.add("MR-STATE-002")
        owner: set[int] = set()
        for req_id, row in self.rows.items():
            if req_id in self.unseen:
                continue
            if row in owner and req_id in got:
                self.findings.append(("MR-STATE-002", req_id, row, -1))
            owner.add(row)

    def _expect(self, clause_id: str, req_id: str, got: int, expected: int) -> None:
        self.tested.add(clause_id)
        if got != expected:
            self.findings.append((clause_id, req_id, got, expected))


@dataclass(eq=False)
class StepContext:
    """One step. `record` is the candidate's, `reference` the oracle's, `expected` the world's truth."""

    plan: SchedulerOutput
    descriptor: BatchDescriptor | None
    record: StepRecord
    reference: StepRecord
    expected: StepTruth
    output: ModelRunnerOutput
    output_again: ModelRunnerOutput | None
    config: RunnerConfig
    kv_cache_config: KVCacheConfig
    model: WitnessConfig
    capabilities: frozenset[Capability]
    rows: RowTracker | DenseRowTracker
    grammar: GrammarOutput | None = None
    # What the record of the step before has become since; None where there is none.
    stale: list[Mismatch] | None = None

    @property
    def num_reqs(self) -> int:
        return len(self.expected.order)

    @property
    def num_tokens(self) -> int:
        return self.plan.total_num_scheduled_tokens

    @property
    def tokens_padded(self) -> int:
        return self.descriptor.num_tokens if self.descriptor else self.num_tokens

    @property
    def reqs_padded(self) -> int:
        return self.descriptor.num_reqs if self.descriptor and self.descriptor.num_reqs else self.num_reqs

    @property
    def padded(self) -> bool:
        return self.tokens_padded > self.num_tokens or self.reqs_padded > self.num_reqs

    @cached_property
    def is_permutation(self) -> bool:
        """Whether the candidate's batch holds the plan's requests, in whatever order."""
        ids = self.record.req_ids
        return len(ids) == self.num_reqs and set(ids) == set(self.expected.requests)

    # Everything below is in the candidate's own batch order, so that a wrong order is one finding and not all.

    @cached_property
    def members(self) -> list[RequestTruth]:
        return [self.expected.requests[r] for r in self.record.req_ids]

    @cached_property
    def order_keys(self) -> list[tuple[bool, bool, int]]:
        return [order_key(m.num_scheduled, m.num_drafts, self.config.num_speculative_tokens) for m in self.members]

    @cached_property
    def scheduled(self) -> np.ndarray:
        return np.array([m.num_scheduled for m in self.members], np.int64)

    @cached_property
    def computed(self) -> np.ndarray:
        return np.array([m.computed for m in self.members], np.int64)

    @cached_property
    def num_logits(self) -> np.ndarray:
        return np.array([1 + m.num_drafts for m in self.members], np.int64)

    @cached_property
    def starts(self) -> np.ndarray:
        """int64[R+1] true run boundaries of the candidate's batch order."""
        return np.concatenate([[0], np.cumsum(self.scheduled)])

    @cached_property
    def logit_starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.num_logits)])

    @cached_property
    def owner(self) -> np.ndarray:
        """int64[t] batch index of each token."""
        return np.repeat(np.arange(self.num_reqs), self.scheduled)

    @cached_property
    def offset(self) -> np.ndarray:
        """int64[t] place of each token in its query."""
        return np.arange(self.num_tokens) - self.starts[self.owner]

    @cached_property
    def logit_owner(self) -> np.ndarray:
        return np.repeat(np.arange(self.num_reqs), self.num_logits)

    @cached_property
    def blocks(self) -> list[list[np.ndarray]]:
        """[group][request] the block ids that the request was given."""
        return [[np.array(m.request.blocks[g], np.int64) for m in self.members] for g in range(self.num_groups)]

    @property
    def num_groups(self) -> int:
        return len(self.kv_cache_config.groups)

    @cached_property
    def reach(self) -> list[int]:
        return list(self.config.window_reach or (g.spec.window_reach for g in self.kv_cache_config.groups))

    @cached_property
    def _known(self) -> dict[Callable[[StepContext], Any], Any]:
        return {}

    def once(self, fn: Callable[[StepContext], T]) -> T:
        """`fn` of this step, worked out when it is first asked for. For what several laws look at."""
        if fn not in self._known:
            self._known[fn] = fn(self)
        answer: T = self._known[fn]
        return answer

    def differ(
        self, clause_id: str, name: str, got: Any, expected: Any, owner: np.ndarray | None = None,
        where: np.ndarray | None = None,
    ) -> list[Mismatch]:  # fmt: skip
        """Mismatches of two arrays of one shape; `owner` gives the batch index along the last axis.

        `where` limits the comparison to some places of the last axis.
        """
        wrong = np.asarray(got) != np.asarray(expected)
        if where is not None:
            wrong = wrong & where
        if not wrong.any():
            return []
        found, got, expected = [], np.asarray(got), np.asarray(expected)
        for at in np.argwhere(wrong)[:MOST_MISMATCHES]:
            index = tuple(int(i) for i in at)
            i = None if owner is None else int(owner[index[-1]])
            req_id = self.record.req_ids[i] if i is not None and i < len(self.record.req_ids) else None
            found.append(Mismatch(clause_id, name, req_id, index, got[index].item(), expected[index].item()))
        return found
