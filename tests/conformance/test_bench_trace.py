"""The requests of the persistent-batch experiment are those of the original program, number for number."""

from __future__ import annotations

import pytest

from conformance.bench.go_random import GoRandom
from conformance.bench.request_trace import (
    ROWS,
    Lifetime,
    as_given,
    fixed,
    request_trace,
    short,
)


@pytest.mark.parametrize(
    ("seed", "expected"), [(1, [81, 87, 47, 59, 81, 18, 25, 40, 56, 0]), (42, [5, 87])], ids=["1", "42"]
)
def test_numbers_of_go(seed: int, expected: list[int]) -> None:
    random = GoRandom(seed)
    assert [random.below(100) for _ in expected] == expected


# What the program in Go prints: joined, finished, active, entries rebuilding, entries of diffs.
@pytest.mark.parametrize(
    ("lifetime", "arrivals", "expected"),
    [
        (as_given, 2, (1974, 1742, 232, 20_588_110, 102_847)),
        (short, 2, (1974, 1970, 4, 263_324, 75_720)),
        (fixed(1), 599, (591_431, 591_431, 0, 22_464_843, 22_501_646)),
    ],
    ids=["as given", "short", "one step, many arrivals"],
)
def test_counts_of_the_program(lifetime: Lifetime, arrivals: int, expected: tuple[int, ...]) -> None:
    trace = request_trace(1, lifetime=lifetime, most_arrivals=arrivals)
    assert (
        len(trace.requests), trace.num_finished, trace.num_active, trace.entries_rebuilding, trace.entries_of_diffs
    ) == expected  # fmt: skip


def test_another_seed_gives_other_requests_and_the_same_law() -> None:
    trace = request_trace(2)
    assert trace.requests != request_trace(1).requests
    # The ratio is about the steps that a request lives: 206 +- 2 over ten seeds.
    assert 195 < trace.entries_rebuilding / trace.entries_of_diffs < 217


def test_lifetimes_differ_and_nothing_else_does() -> None:
    few, many = (request_trace(3, 50, fixed(n)) for n in (2, 9))
    assert [(r.req_id, r.arrival, r.tokens) for r in few.requests] == [
        (r.req_id, r.arrival, r.tokens) for r in many.requests
    ]
    assert {r.lifetime for r in many.requests} == {9}


def test_no_more_requests_than_rows() -> None:
    assert request_trace(1, 30, fixed(20), 200).most_active == ROWS


@pytest.mark.parametrize("lifetime", [short, fixed(1), fixed(30)], ids=["short", "1", "30"])
def test_walk(lifetime: Lifetime) -> None:
    trace = request_trace(5, 40, lifetime)
    lived: dict[str, int] = {}
    present: set[str] = set()
    entries = most = 0
    for step in trace.walk():
        assert present.issuperset(step.left)
        present = (present - set(step.left)) | {r.req_id for r in step.arrived}
        assert all(r.arrival == step.number for r in step.arrived)
        assert [r.req_id for r in step.active] == [r.req_id for r in trace.requests if r.req_id in present]
        most = max(most, len(present))
        for request in step.active:
            assert request.tokens_at(step.number) == request.tokens + lived.get(request.req_id, 0)
            lived[request.req_id] = lived.get(request.req_id, 0) + 1
            entries += request.tokens_at(step.number) // 16 + 1
            assert request.tokens_at(step.number) < trace.max_model_len
    assert step.number == 39
    assert (entries, most) == (trace.entries_rebuilding, trace.most_active)
    over = {r.req_id for r in trace.requests if lived[r.req_id] == r.lifetime}
    assert len(over) == trace.num_finished
