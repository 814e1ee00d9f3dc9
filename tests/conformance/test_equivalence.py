"""Both layouts of one runner are the same runner; where they are not, the machine says so."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings

from conformance import equivalence
from conformance.equivalence import (
    LEAST,
    Parted,
    Tally,
    campaign,
    llama_tiny,
    main,
    run_model,
    run_world,
    search_equivalence,
)
from conformance.mutation import mutated
from conformance.profiles import profile
from runner_api import ConfigError

FEW = settings(profile("ci"), max_examples=30, stateful_step_count=15)


@pytest.mark.slow
def test_the_references_layouts_are_equivalent() -> None:
    """To the last bit on the witness model, and everything that moves rows was met often."""
    tally = Tally()
    for num_steps in (20, 22, 24):  # what is drawn goes with the program: where rows hardly moved, other stories follow
        search_equivalence("cpu", settings(profile("ci"), max_examples=300, stateful_step_count=num_steps), tally)
        if not tally.missing(LEAST):
            break
    print(tally.line())
    assert tally.runs >= 300
    assert tally.missing(LEAST) == {}
    assert tally.late_outputs > 500
    assert tally.near_ties == 0


def test_seeded_worlds_agree() -> None:
    tally = Tally()
    for number in range(16):
        run_world("cpu", 7, number, 20, tally)
    assert tally.steps == 16 * 20
    assert all(tally.events[name] for name in LEAST)


def test_a_real_models_layouts_are_equivalent() -> None:
    """Logits, KV and log probabilities within bounds, every token certified."""
    tally = Tally()
    for number in range(30):
        run_model("cpu", llama_tiny(), 0, number, 8, tally)
    assert tally.runs == 30
    assert tally.tokens > 200
    assert tally.events["swap"] > 20
    assert tally.near_ties <= tally.near_tie_cap


def test_the_gpu_runners_layouts_are_equivalent() -> None:
    pytest.importorskip("gpu_backend.triton_support")
    tally = Tally()
    for number in range(10):
        run_world("gpu", 3, 4 * number, 5, tally)
    assert tally.runs == 10
    assert tally.tokens > 5


# A fault of dense rows, and what it shows in.
FAULTS = {
    "counters": ("dense/rows.py", 'declare("num_computed_tokens", np.zeros(max_num_reqs, np.int32))',
                 "np.zeros(max_num_reqs, np.int32)"),
    "seeds": ("dense/runner.py", 'fields.declare(f"sampling {name}", table, table[0].copy())',
              'name == "seeds" or fields.declare(f"sampling {name}", table, table[0].copy())'),
    "blocks": ("dense/runner.py", "owned.extend(more)", "owned.extend(reversed(more))"),
    "outputs": ("dense/runner.py", ": rows.total_len[row]].tolist()", ": rows.prompt_len[row]].tolist()"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_parts_the_layouts(fault: tuple[str, str, str]) -> None:
    told: list[str] = []
    with mutated("cpu", *fault) as copy:
        assert campaign(copy.factory, 40, 0, llama_tiny(), 0, 20, told.append) == 1
    assert "PARTED witness" in told[-1]


def test_the_machine_finds_a_fault() -> None:
    with (
        mutated("cpu", *FAULTS["seeds"]) as copy,
        pytest.raises(Parted, match=r"seeds of \w+: dense -?\d+, slots -?\d+"),
    ):
        search_equivalence(copy.factory, FEW, Tally())


def test_a_fault_parts_the_layouts_on_a_real_model_too() -> None:
    told: list[str] = []
    with mutated("cpu", *FAULTS["counters"]) as copy:
        assert campaign(copy.factory, 0, 20, llama_tiny(), 1, 10, told.append) == 1
    assert told[-1].startswith("PARTED model")


def test_a_campaign_reports_what_it_met() -> None:
    told: list[str] = []
    assert campaign("cpu", 3, 1, llama_tiny(), 0, 6, told.append) == 0
    assert told[0].startswith("witness: 3 runs, 18 steps")
    assert told[1].startswith(f"{llama_tiny()}: 1 runs, 6 steps")
    assert told[2].startswith("verdict: AGREE")
    told.clear()
    with mutated("cpu", *FAULTS["outputs"]) as copy:
        assert campaign(copy.factory, 20, 0, llama_tiny(), 0, 20, told.append) == 1
    assert told[-1].startswith("PARTED witness seed=0 number=")


@pytest.mark.parametrize(("worlds", "models", "steps"), [(0, 0, 25), (3, 0, 0), (-1, 2, 5), (3, -3, 5)])
def test_nothing_to_run_is_refused(worlds: int, models: int, steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="nothing would be tested"):
        campaign("cpu", worlds, models, llama_tiny(), 0, steps)
    assert main([f"--worlds={worlds}", f"--models={models}", f"--steps={steps}"]) == 2
    assert "nothing would be tested" in capsys.readouterr().err


def test_runs_without_a_token_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokenless(runner: str, seed: int, number: int, steps: int, tally: Tally) -> None:
        tally.runs += 1
        tally.steps += steps

    monkeypatch.setattr(equivalence, "run_world", tokenless)
    told: list[str] = []
    assert campaign("cpu", 3, 1, llama_tiny(), 0, 6, told.append) == 1
    assert "verdict: DIVERGE" in told[-1]
    assert told[-1].endswith("no token was compared: witness")


def test_too_few_events_are_told() -> None:
    tally = Tally(near_ties=9, tokens=10)
    tally.events.update(condense_move=200, swap=50, preempt=49)
    assert tally.missing(LEAST) == {"preempt": 49, "prefix_hit": 0}
    assert np.isclose(tally.near_tie_cap, 3.0)
