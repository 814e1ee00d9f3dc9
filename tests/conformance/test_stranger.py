"""A stranger's runner (examples/stranger.py) comes in through each of the three ways: the right one passes, and each of
its faults is found, named by the right clause and shrunk to a few requests and steps."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conformance.clauses import clause, load_clauses
from conformance.evaluate import Evaluation, evaluate
from conformance.finding import Budget, find
from conformance.harness import build_runner
from conformance.probes import new, plan_of
from conformance.smoke import smoke
from engine_core.cli import main
from runner_api import (
    CapabilityError,
    KVCacheConfig,
    KVCacheGroup,
    RunnerConfig,
    RunnerError,
    WitnessConfig,
    WitnessGroup,
)
from runner_api.loader import load_factory, runner_names

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "stranger.py"
WAYS = ("entry point", "file", "process")
# Each fault and the clause that states what it breaks.
FAULTS = {"stale_padding": "MR-PAD-004", "wrong_row": "MR-INPUT-005", "chunk_edge": "MR-SLOT-001"}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if `pip install stranger` had been run: a module with a dist-info that names its entry points."""
    (tmp_path / "stranger.py").write_bytes(FILE.read_bytes())
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    names = ["stranger = stranger:build", *(f"stranger-{fault} = stranger:{fault}" for fault in FAULTS)]
    (info / "entry_points.txt").write_text("\n".join(["[modelrunner.runners]", *names, ""]))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("stranger", None)


def runner(way: str, fault: str | None = None) -> str:
    """The stranger's name on one of the three ways."""
    if way == "entry point":
        return f"stranger-{fault}" if fault else "stranger"
    if way == "file":
        return f"{FILE}:{fault or 'build'}"
    command = [sys.executable, str(FILE), "--serve", *(["--fault", fault] if fault else [])]
    return f"process:{shlex.join(command)}"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner in another process imports runner_api from here."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.usefixtures("installed")
def test_the_entry_points_are_there() -> None:
    assert runner_names()["stranger"] == "stranger:build"
    assert "cpu" in runner_names()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("installed")
def test_the_right_stranger_passes(way: str) -> None:
    name = runner(way)
    assert smoke(name) is None
    judged = evaluate(name, seeds=(0,), steps=20)
    assert judged.failed == []
    assert judged.errors == []
    assert judged.untested == []
    assert judged.passed
    assert_much_was_asked(judged)


def assert_much_was_asked(judged: Evaluation) -> None:
    tested = [c for c in load_clauses() if judged.tested[c]]
    areas = {clause(c).area for c in tested}
    assert len(tested) >= 60
    assert {"STATE", "BATCH", "INPUT", "SLOT", "KV", "PAD", "ATTN", "OUT", "META"} <= areas
    assert judged.skipped, "it does not offer everything"
    assert all(judged.skipped.values()), "whatever is skipped has a reason"
    assert set(tested).isdisjoint(judged.skipped)
    assert set(tested) | set(judged.skipped) == set(load_clauses())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("installed")
def test_a_fault_is_found_named_and_shrunk(way: str, fault: str) -> None:
    found = find(runner(way, fault), seed=0)
    assert found is not None
    assert found.clause_id == FAULTS[fault]
    assert len(found.case.steps) <= 3
    assert len({new.req_id for step in found.case.steps for new in step.plan.scheduled_new_reqs}) <= 3
    text = found.text()
    assert FAULTS[fault] in text
    assert clause(FAULTS[fault]).law in text


CRASHING = """
import os
from runner_api.loader import load_factory

class Crashing:
    lost = False

    def __init__(self, config):
        self._runner = load_factory("cpu")(config)

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def execute_model(self, plan, **more):
        if len(plan.num_scheduled_tokens) > 1:
            self.lost = True
            self.lose()
        return self._runner.execute_model(plan, **more)

    def shutdown(self):
        if self.lost:
            self.lose()

    def lose(self):
        raise RuntimeError("the device is lost")

class Dying(Crashing):
    def lose(self):
        os._exit(3)
"""


@pytest.fixture
def crashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A runner that cannot take a batch of two, nor be shut down afterwards, by the way that it comes in."""
    file = tmp_path / "crashing.py"
    file.write_text(CRASHING)
    info = tmp_path / "crashing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: crashing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[modelrunner.runners]\ncrashing = crashing:Crashing\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    serve = shlex.join([sys.executable, "-m", "runner_api.serve", f"{file}:Dying"])
    yield {
        "entry point": "crashing", "module": "crashing:Crashing", "file": f"{file}:Crashing",
        "process": f"process:{serve}",
    }  # fmt: skip
    sys.modules.pop("crashing", None)


@pytest.mark.parametrize("way", ["entry point", "module", "file", "process"])
def test_a_crash_is_found_and_shrunk(way: str, crashing: dict[str, str]) -> None:
    found = find(crashing[way], budget=Budget(attempts=20 if way == "process" else 60))
    assert found is not None
    assert found.clause_id is None
    assert found.error is not None
    assert ("the program ended" if way == "process" else "the device is lost") in found.error
    assert len(found.case.steps) <= (2 if way == "process" else 1)  # a program is started for every attempt
    assert found.num_requests == 2


def test_a_dead_program_needs_no_shutting_down(crashing: dict[str, str]) -> None:
    """The verdict on what killed it stands; the next runner gets a program of its own."""
    built, _ = build_runner(crashing["process"], WitnessConfig(), RunnerConfig(max_num_reqs=2), 4)
    with pytest.raises(RunnerError, match="the program ended"):
        built.execute_model(plan_of(new("a", [1], [1]), new("b", [1], [2])))
    built.shutdown()
    assert smoke(crashing["process"]) is None


@pytest.mark.usefixtures("installed")
def test_nothing_is_found_in_the_right_stranger() -> None:
    assert find(runner("file"), seed=0) is None


@pytest.mark.parametrize("fault", FAULTS)
def test_the_clauses_name_the_fault_too(fault: str) -> None:
    judged = evaluate(runner("file", fault), seeds=(0,), steps=40)
    assert FAULTS[fault] in judged.failed
    assert judged.errors == []
    assert not judged.passed


def test_the_command_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", runner("file", "wrong_row"), "--steps", "20"]) == 1
    out = capsys.readouterr().out
    assert "(planted fault: wrong_row)" in out.splitlines()[0]
    assert f"failed: MR-INPUT-005 {clause('MR-INPUT-005').law}" in out
    assert out.rstrip().splitlines()[-1].startswith("verdict: DIVERGE")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float64"}, {"num_speculative_tokens": 1}, {"layout": "dense"}, {"device": "cuda"},
        {"record": frozenset({"kv"})}, {"logits_processors": ("a:b",)}, {"window_reach": (4,)},
    ],
)  # fmt: skip
def test_what_it_cannot_do_it_refuses(changes: dict[str, object]) -> None:
    with pytest.raises(CapabilityError, match=next(iter(changes))):
        load_factory(runner("file"))(RunnerConfig(**changes))


def test_it_refuses_models_and_caches_that_it_does_not_know() -> None:
    built = load_factory(runner("file"))(RunnerConfig())
    for groups in ((WitnessGroup(4), WitnessGroup(8)), (WitnessGroup(4, sliding_window=3),)):
        with pytest.raises(CapabilityError, match="model"):
            built.load_model(WitnessConfig(groups=groups))
    built.load_model(WitnessConfig(groups=(WitnessGroup(4),)))
    ((layer, spec),) = built.get_kv_cache_specs().items()
    with pytest.raises(CapabilityError, match="kernel_block_size"):
        built.initialize_kv_cache(KVCacheConfig(8, (KVCacheGroup((layer,), spec, kernel_block_size=2),)))


def test_an_unknown_fault_is_refused() -> None:
    build = load_factory(runner("file"))
    with pytest.raises(CapabilityError, match="fault"):
        build(RunnerConfig(), fault="bad_hair")


def test_it_computes_the_witness_model() -> None:
    """Its logits of a prompt are those of the formula, pair by pair in plain integers."""
    from conformance.truth import witness_logits

    model = WitnessConfig(groups=(WitnessGroup(4),))
    built = load_factory(runner("file"))(RunnerConfig(record=frozenset({"logits"})))
    built.load_model(model)
    built.initialize_kv_cache(KVCacheConfig(8, (KVCacheGroup(("witness.0",), model.groups[0].kv_cache_spec()),)))
    built.execute_model(plan_of(new("a", [3, 1, 4, 1, 5], [6, 2])))
    built.sample_tokens()
    assert np.array_equal(built.last_step().logits, witness_logits(model, [[3, 1, 4, 1, 5]]))
