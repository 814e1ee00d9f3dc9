"""The experiments on the Triton runner, small enough for the interpreter: it tells its parts and counts its writes."""

from __future__ import annotations

import pytest

pytest.importorskip("gpu_backend.triton_support")

from conformance.bench import persistence
from conformance.bench.host import host_text, measure
from conformance.bench.persistence import compare
from conformance.bench.request_trace import request_trace, short
from conformance.bench.step_timer import PARTS, parts_of
from runner_api.loader import load_factory
from runner_api.selection import offered_layouts

pytestmark = pytest.mark.interpret

LAYOUTS = offered_layouts(load_factory("gpu"))


def test_parts_of_a_step() -> None:
    costs = measure("gpu", (2,), num_steps=1, vocab_size=16)
    assert set(costs.infos) == set(LAYOUTS)
    for steps in costs.batches[0].steps.values():
        assert set(parts_of(steps)) == set(PARTS) - {"record"}  # which is built when somebody asks
        assert all(s.total > 0 and s.output > 0 for s in steps)
    if "interpreter" in costs.infos[LAYOUTS[0]].device:
        assert "say nothing about a GPU" in " ".join(host_text(costs, 16, 1).split())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_entries_are_those_of_arithmetic(layout: str) -> None:
    trace = request_trace(1, 8, short)
    c = compare("gpu", trace, layout)
    assert c.info.layout == layout
    assert c.through_runner
    assert c.as_computed
    if layout == "slots":
        runs = sum(r.arrival == s.number or r.tokens_at(s.number) % 16 == 0 for s in trace.walk() for r in s.active)
        assert c.diffs.traffic["bytes_staged"] == 12 * runs + 4 * c.diffs.entries


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_that_are_sent_go_through_the_runner(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(persistence, "NOT_LONG", 0)
    c = compare("gpu", request_trace(1, 6, short), layout, timed_steps=1)
    assert c.through_runner
    assert c.as_computed
