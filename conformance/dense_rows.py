"""Who stands where in the dense layout, worked out from plans alone: a second telling of the rules, as short as can be.

Rows are a list of request ids. A plan takes ids out, which leaves holes; others come into the lowest holes; the last
ones fill what is left; a threshold sorts what stands in a foreign region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runner_api import RunnerConfig, SchedulerOutput, StepRecord

# Decodes, short extends, long extends, fresh prefills.
DECODE, SHORT_EXTEND, LONG_EXTEND, PREFILL = range(4)


@dataclass(frozen=True, slots=True)
class RowChange:
    """One step's rows. order: request by row; the rest: who came, who of them had been away (`returned`) or preempted
    (`resumed`), who was moved into a hole, and who was swapped into its region."""

    order: tuple[str, ...] = ()
    arrived: tuple[str, ...] = ()
    returned: frozenset[str] = frozenset()
    resumed: frozenset[str] = frozenset()
    condensed: frozenset[str] = frozenset()
    swapped: frozenset[str] = frozenset()


def regions(plan: SchedulerOutput, order: Sequence[str], prompt_lens: Mapping[str, int], threshold: int) -> list[int]:
    """The region that each scheduled request belongs to."""
    cached = plan.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
    found = []
    for req_id in order:
        if computed[req_id] == 0:
            found.append(PREFILL)
        elif plan.num_scheduled_tokens[req_id] > threshold:
            found.append(LONG_EXTEND)
        else:
            found.append(DECODE if computed[req_id] >= prompt_lens[req_id] else SHORT_EXTEND)
    return found


def next_rows(
    rows: Sequence[str], plan: SchedulerOutput, prompt_lens: Mapping[str, int], threshold: int | None
) -> RowChange:
    """The rows after one plan. prompt_lens: of every scheduled request."""
    cached, counts = plan.scheduled_cached_reqs, plan.num_scheduled_tokens
    new = [r.req_id for r in plan.scheduled_new_reqs if r.req_id in counts]
    # 1 out: finished, not scheduled, or back from a preemption
    stay = counts.keys() - plan.finished_req_ids - cached.resumed_req_ids - set(new)
    table: list[str | None] = [req_id if req_id in stay else None for req_id in rows]
    # 2 in: new ones, then those that return, into the lowest holes
    arrived = [*new, *(req_id for req_id in cached.req_ids if req_id not in table)]
    for req_id in arrived:
        if None in table:
            table[table.index(None)] = req_id
        else:
            table.append(req_id)
    # 3 the last ones into what is left
    condensed = set()
    while None in table:
        last = table.pop()
        if last is not None:
            table[table.index(None)] = last
            condensed.add(last)
    order = [req_id for req_id in table if req_id is not None]
    # 4 into regions: those that stand wrong change places among themselves, region by region
    swapped: list[str] = []
    if threshold is not None:
        have = regions(plan, order, prompt_lens, threshold)
        places = [row for row, (mine, wanted) in enumerate(zip(have, sorted(have), strict=True)) if mine != wanted]
        swapped = [order[row] for row in sorted(places, key=lambda row: have[row])]
        for row, req_id in zip(places, swapped, strict=True):
            order[row] = req_id
    returned = frozenset(arrived) - set(new) - cached.resumed_req_ids
    return RowChange(
        tuple(order), tuple(arrived), returned, cached.resumed_req_ids, frozenset(condensed), frozenset(swapped)
    )


# Clauses that the tracker asks, whether or not a law of `conformance.laws` is behind them.
TRACKED = frozenset({"MR-STATE-002", *(f"MR-DENSE-{n:03}" for n in range(1, 8))})


@dataclass(slots=True)
class DenseRowTracker:
    """Which row each request must hold, following the candidate once it has strayed. See `context.RowTracker`."""

    threshold: int | None = None
    rows: list[str] = field(default_factory=list)  # of the candidate
    prompt_lens: dict[str, int] = field(default_factory=dict)
    change: RowChange = RowChange()  # what the latest plan should have come to
    # Findings of the latest step: (clause id, request, got, expected); and the clauses that it put to the test.
    findings: list[tuple[str, str, int, int]] = field(default_factory=list)
    tested: set[str] = field(default_factory=set)

    @classmethod
    def start(cls, config: RunnerConfig) -> DenseRowTracker:
        return cls(config.reorder_batch_threshold)

    def advance(self, plan: SchedulerOutput, record: StepRecord) -> None:
        """Apply one plan, and hold the rows in the record against what they must be."""
        self.findings, self.tested = [], set()
        self.prompt_lens |= {new.req_id: new.prompt_len for new in plan.scheduled_new_reqs}
        self.change = next_rows(self.rows, plan, self.prompt_lens, self.threshold)
        got = dict(zip(record.req_ids, record.idx_mapping.tolist(), strict=False))
        if got.keys() == set(self.change.order) and got:
            self._judge(plan, got)
        # The rows are the candidate's own from here on; where they are no order, its batch order must do.
        packed = sorted(got.values()) == list(range(len(got)))
        self.rows = sorted(got, key=got.__getitem__) if packed else list(record.req_ids)

    def _judge(self, plan: SchedulerOutput, got: Mapping[str, int]) -> None:
        change = self.change
        # 1 the batch is the rows
        self.tested |= {"MR-STATE-002", "MR-DENSE-001"}
        for i, (req_id, row) in enumerate(got.items()):
            if row != i:
                self.findings.append(("MR-DENSE-001", req_id, row, i))
        rows = list(got.values())
        self.findings += [("MR-STATE-002", r, row, -1) for r, row in got.items() if rows.count(row) > 1]
        # 2 every row, by how its request came to it
        wanted = {req_id: row for row, req_id in enumerate(change.order)}
        came = {wanted[r] for r in change.arrived} == {got[r] for r in change.arrived}
        for req_id, row in wanted.items():
            if req_id in change.swapped:
                clause_id = "MR-DENSE-007"
            elif req_id in change.condensed:
                clause_id = "MR-DENSE-004"
            elif req_id in change.arrived:
                clause_id = "MR-DENSE-003" if came and len(change.arrived) > 1 else "MR-DENSE-002"
            else:
                clause_id = "MR-DENSE-005"
            self._expect(clause_id, req_id, got[req_id], row)
        # 3 regions
        if self.threshold is not None:
            order = sorted(got, key=got.__getitem__)
            have = regions(plan, order, self.prompt_lens, self.threshold)
            for row, (mine, sorted_one) in enumerate(zip(have, sorted(have), strict=True)):
                self._expect("MR-DENSE-006", order[row], mine, sorted_one)

    def _expect(self, clause_id: str, req_id: str, got: int, expected: int) -> None:
        self.tested.add(clause_id)
        if got != expected:
            self.findings.append((clause_id, req_id, got, expected))
