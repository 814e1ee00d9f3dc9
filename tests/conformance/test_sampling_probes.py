"""The probes about sampling: the oracle passes them, each clause is tested where its capabilities are offered, and
what they ask is not near a bound where rounding decides."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from conformance.clauses import Clause, load_clauses
from conformance.evaluate import LAWS
from conformance.mutation import mutated
from conformance.outcome_probes import nan_rows_have_a_fault
from conformance.probes import PROBES, Bench
from conformance.sampling_mutants import SAMPLING_MUTANTS
from conformance.sampling_probes import MIXED, WISHES, Wish, cast, circumstances_change_nothing, live, offered_part
from conformance.sampling_truth import RowHistory, before_truncation, kept
from conformance.scene import REASONING, VOCAB, Actor, Scene
from cpu_reference.runner import CAPABILITIES, CpuModelRunner
from runner_api import Capability, KVCacheConfig, SamplingParams

AREAS = ("SAMPLE", "LOGPROB", "GRAMMAR")
SAMPLING = [c for c in load_clauses().values() if c.area in AREAS]
ALL = Bench("cpu", CAPABILITIES)
ABOUT_SAMPLING = [p for p in PROBES if p.__module__.endswith("_probes")]
# Those that a clause about sampling needs, and so may be absent where others are there.
NEEDED = sorted(frozenset().union(*(c.requires for c in SAMPLING)))


def test_there_are_enough_clauses() -> None:
    counts = Counter(c.area for c in SAMPLING if c.level == "MUST")
    assert sum(counts.values()) >= 60
    assert min(counts.values()) >= 8


@pytest.mark.parametrize("probe", ABOUT_SAMPLING, ids=lambda p: p.__name__)
def test_the_oracle_passes(probe) -> None:
    assert [str(m) for found in probe(ALL).values() for m in found] == []


@pytest.mark.parametrize("mutant_id", ["nan-stops-min-p", "nan-stops-top-k-top-p", "nan-stops-penalties"])
def test_a_nan_that_stops_a_step_for_its_neighbours_is_seen_without_stages(mutant_id: str) -> None:
    """Each neighbour asks for one step that may look at the whole batch."""
    m = next(m for m in SAMPLING_MUTANTS if m.id == mutant_id)
    with mutated("cpu", m.path, m.old, m.new) as copy:
        found = nan_rows_have_a_fault(Bench(copy.factory, CAPABILITIES - {Capability.STAGES}))
    assert [c for c, mismatches in found.items() if mismatches] == ["MR-SAMPLE-045"]


@pytest.mark.parametrize("c", [c for c in SAMPLING if c.id not in LAWS and c.id != "MR-SAMPLE-011"], ids=lambda c: c.id)
def test_a_clause_is_tested_wherever_its_capabilities_are_offered(c: Clause) -> None:
    """On a runner that offers these and nothing else."""
    bench = modest(c.requires)
    assert any(c.id in probe(bench) for probe in ABOUT_SAMPLING), sorted(c.requires)


def modest(offered: frozenset[Capability]) -> Bench:
    """The oracle with these capabilities alone: it refuses requests that need another."""

    class Modest(CpuModelRunner):
        def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
            super().initialize_kv_cache(kv_cache_config)
            self.validator.capabilities = offered

    return Bench(Modest, offered)


@pytest.mark.parametrize("gone", NEEDED)
def test_probes_ask_for_nothing_that_is_not_offered(gone: Capability) -> None:
    """With one capability less every clause that still applies is tested and passes."""
    bench = modest(CAPABILITIES - {gone})
    found: dict[str, list] = {}
    for probe in ABOUT_SAMPLING:
        for clause_id, wrong in probe(bench).items():
            found.setdefault(clause_id, []).extend(wrong)
    due = [c.id for c in SAMPLING if not c.missing(bench.capabilities)]
    assert [str(m) for clause_id in due for m in found.get(clause_id, ())] == []
    assert {c for c in due if c not in LAWS and c != "MR-SAMPLE-011"} <= set(found)


def _rows_of(wish: Wish) -> list[RowHistory]:
    lengths = range(min(len(wish.said) + 1, 6))
    return [
        RowHistory([*wish.prompt, *wish.said[:n]], len(wish.prompt), wish.params(), wish.eos, REASONING)
        for n in lengths
    ]


def test_every_parameter_clause_has_rows_that_speak_of_it() -> None:
    spoken = Counter(w.answers(history) for w in WISHES for history in _rows_of(w))
    assert {f"MR-SAMPLE-{n:03}" for n in (*range(13, 35), 42)} == set(spoken)
    assert min(spoken.values()) >= 2, spoken


@pytest.mark.parametrize(
    "wish", [w for w in WISHES if w.row is not None], ids=lambda w: getattr(w.clause, "__name__", w.clause)
)
def test_given_rows_lie_clear_of_their_bounds(wish: Wish) -> None:
    """Moving a bound by a ten-thousandth changes nothing that is kept, except where equality is what is asked."""
    x = np.array([*wish.row, *[0.0] * (VOCAB - len(wish.row))], np.float32)
    for history in _rows_of(wish):
        processed = before_truncation(x, history)
        params = history.params
        if 0 < params.min_p < 1 or params.top_p < 1:
            assert (kept(processed, params, 1e-4) == kept(processed, params, -1e-4)).all()


def test_the_circumstances_are_really_others() -> None:
    """Chunks, absence and padding take other steps than the plain life; the rows are other rows."""
    scenes = [Scene("cpu", CAPABILITIES, cast(ALL)) for _ in range(2)]
    rows = []
    for scene, chunk in zip(scenes, (16, 3), strict=True):
        live(scene, chunk=chunk)
        rows.append(scene.runner.last_step().num_reqs)
    assert rows[0] == len(MIXED)
    assert rows[1] < len(MIXED), "long prompts end later than short ones"


def test_parameters_that_are_not_offered_are_left_out() -> None:
    part = offered_part({"top_k": 3, "min_p": 0.5, "temperature": 1.0}, Bench("cpu", frozenset({Capability.TOP_K})))
    assert part == {"temperature": 0.0, "top_k": 3}


def test_a_scene_keeps_the_true_history() -> None:
    actors = [Actor("a", [1, 2, 3], SamplingParams(temperature=0.0)), Actor("b", [4], SamplingParams(temperature=0.0))]
    scene = Scene("cpu", CAPABILITIES, actors)
    scene.step({"a": 2, "b": 9})
    assert (actors[0].outputs, actors[0].computed, len(actors[1].outputs)) == ([], 2, 1)
    scene.step(["b", "a"], imposed={"a": [9], "b": [8]})
    assert actors[0].tokens == [1, 2, 3, 9]
    assert actors[1].tokens[-1] == 8
    scene.preempt("a")
    scene.step(["b"])
    sight = scene.step(["a"])
    assert sight.record.seq_lens.tolist() == [4]
    assert sight.record.input_ids.tolist() == [1, 2, 3, 9]


def test_a_draw_that_depends_on_the_row_is_noticed() -> None:
    class ByRow(CpuModelRunner):
        def execute_model(self, plan, **kwargs):  # type: ignore[no-untyped-def]
            done = super().execute_model(plan, **kwargs)
            self.sampler.seeds[:] = np.arange(len(self.sampler.seeds))
            return done

    found = circumstances_change_nothing(Bench(ByRow, CAPABILITIES))
    assert found["MR-SAMPLE-038"]
    assert not found["MR-SAMPLE-037"]
    assert not found["MR-SAMPLE-039"]
