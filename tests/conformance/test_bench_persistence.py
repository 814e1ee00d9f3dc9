"""Rebuilding rows against applying diffs, on the cpu runner: every count is the runner's own, and is checked here."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest

from conformance.bench import persistence, plot
from conformance.bench.arguments import LIFETIMES
from conformance.bench.persistence import Comparison, answer, compare, spread, stops_paying
from conformance.bench.plot import plot_persistence
from conformance.bench.request_trace import RequestTrace, TraceStep, fixed, request_trace, short
from conformance.bench.step_timer import PARTS, StepTimer, clock_for, parts_of
from engine_core.cli import main
from runner_api import CapabilityError, ModelRunner, RunnerConfig, SchedulerOutput, load_runner
from runner_api.loader import listen_to_parts, table_traffic

LAYOUTS = ("slots", "dense")


@pytest.fixture(scope="module")
def trace() -> RequestTrace:
    return request_trace(4, 60)


@pytest.fixture(scope="module", params=LAYOUTS)
def compared(request: pytest.FixtureRequest, trace: RequestTrace) -> Comparison:
    """Every step through the runner."""
    return compare("cpu", trace, request.param, full=True)


def blocks_held(step: TraceStep) -> list[int]:
    """Blocks of each active request, those that the step brings included."""
    held = []
    for r in step.active:
        crossed = sum(tokens % 16 == 0 for tokens in range(r.tokens, r.tokens_at(step.number) + 1))
        held.append(r.tokens // 16 + 1 + crossed)
    return held


# -- what is written ------------------------------------------------------------------------------------------


def test_entries_are_those_of_arithmetic(compared: Comparison, trace: RequestTrace) -> None:
    assert compared.through_runner
    assert compared.as_computed
    assert compared.rebuild.entries == trace.entries_rebuilding > 20 * compared.diffs.entries
    assert compared.diffs.entries == trace.entries_of_diffs
    assert compared.rebuild.num_run == compared.diffs.num_run == 60


def test_entries_step_by_step(compared: Comparison, trace: RequestTrace) -> None:
    held: dict[str, int] = {}
    for step, rebuilt, written in zip(trace.walk(), compared.rebuild.written, compared.diffs.written, strict=True):
        assert rebuilt == sum(r.tokens_at(step.number) // 16 + 1 for r in step.active)
        now = dict(zip((r.req_id for r in step.active), blocks_held(step), strict=True))
        assert written == sum(n - held.get(req_id, 0) for req_id, n in now.items())
        held = now


@pytest.mark.parametrize("layout", LAYOUTS)
def test_laying_rows_counts_what_running_counts(
    monkeypatch: pytest.MonkeyPatch, trace: RequestTrace, layout: str
) -> None:
    monkeypatch.setattr(persistence, "NOT_LONG", 0)
    sampled = compare("cpu", trace, layout, timed_steps=3)
    assert not sampled.through_runner
    assert sampled.as_computed
    assert len(sampled.rebuild.times) == len(sampled.diffs.times) == 3
    assert sampled.rebuild.num_run == 6  # each behind the step before it
    assert sampled.rebuild.written == compare("cpu", trace, layout, full=True).rebuild.written


def test_bytes(compared: Comparison, trace: RequestTrace) -> None:
    steps, traffic = list(trace.walk()), compared.diffs.traffic
    if compared.info.layout == "slots":
        runs = sum(r.arrival == s.number or r.tokens_at(s.number) % 16 == 0 for s in steps for r in s.active)
        assert traffic["bytes_staged"] == 12 * runs + 4 * compared.diffs.entries
        assert traffic["bytes_gathered"] == 4 * sum(n for step in steps for n in blocks_held(step))
    else:
        width = -(-trace.max_model_len // 128) * 8  # columns, in whole runs of 128 tokens
        assert traffic["bytes_committed"] == 4 * width * sum(len(step.active) for step in steps)


def test_rows_moved_by_condense() -> None:
    trace = request_trace(6, 80, short, 20)
    traffic = compare("cpu", trace, "dense").diffs.traffic
    rows: list[str | None] = []
    held: dict[str, int] = {}
    moved = entries = 0
    for step in trace.walk():
        rows = [None if req_id in step.left else req_id for req_id in rows]
        for request in step.arrived:
            if None in rows:
                rows[rows.index(None)] = request.req_id
            else:
                rows.append(request.req_id)
        held |= dict(zip((r.req_id for r in step.active), blocks_held(step), strict=True))
        while None in rows:
            last = rows.pop()
            if last is not None:
                rows[rows.index(None)] = last
                moved, entries = moved + 1, entries + held[last]
    assert moved > 50
    assert (traffic["rows_moved"], traffic["entries_moved"]) == (moved, entries)


def test_short_requests_on_the_runner() -> None:
    c = compare("cpu", request_trace(lifetime=short), "slots")
    assert (c.rebuild.entries, c.diffs.entries) == (263_324, 75_720)
    assert f"{c.entry_ratio:.2f}" == "3.48"
    assert c.through_runner


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_program_on_the_runner(layout: str) -> None:
    c = compare("cpu", request_trace(), layout, timed_steps=2)
    assert (c.rebuild.entries, c.diffs.entries) == (20_588_110, 102_847)
    assert f"{c.entry_ratio:.2f}" == "200.18"
    if layout == "dense":
        assert c.diffs.traffic["rows_moved"] == 847


# -- times ----------------------------------------------------------------------------------------------------


def test_times_by_part(compared: Comparison) -> None:
    for way in (compared.rebuild, compared.diffs):
        assert set(parts_of(way.times)) == set(PARTS)
        assert all(s.total > 0 and min(s.parts.values()) >= 0 for s in way.times)
    # Rebuilding writes every row; that is where its time goes.
    assert compared.time_ratio > 1.5


def test_timer_adds_up_what_the_runner_tells() -> None:
    class Told:
        def execute_model(self, plan: SchedulerOutput) -> None:
            self.end_of_part("rows")  # at 1
            self.end_of_part("inputs")  # at 2
            self.end_of_part("rows")  # at 3

        def sample_tokens(self) -> Any:  # other: at 4
            return self

        def get_output(self) -> None:
            pass

        def end_of_part(self, name: str) -> None:
            raise AssertionError("nobody listens")

    told, ticks = Told(), iter(range(100))
    timer = StepTimer(told, lambda: next(ticks))  # type: ignore[arg-type]
    timer.run(SchedulerOutput.empty(), keep=False)
    assert timer.steps == []
    timer.run(SchedulerOutput.empty())
    assert timer.steps[0].parts == {"rows": 2, "inputs": 1, "other": 2}
    assert (timer.steps[0].total, timer.steps[0].output) == (5, 1)


def test_a_runner_that_tells_no_parts() -> None:
    assert not listen_to_parts(object(), print)
    assert table_traffic(object()) == {}


def test_clocks() -> None:
    info = load_runner("cpu").describe()
    assert clock_for(info)[1] == "processor time"
    # Where there is a device, processor time would leave out the waiting for it.
    assert clock_for(replace(info, device="cuda:0 NVIDIA H200"))[1] == "wall time"


# -- the answer -----------------------------------------------------------------------------------------------


def test_where_it_stops_paying() -> None:
    assert stops_paying({1: 0.99, 2: 1.02, 4: 1.5, 8: 1.01}) == 2
    assert stops_paying({2: 1.5}) is None
    points = {n: compare("cpu", request_trace(1, 60, fixed(n))) for n in (1, 8)}
    assert points[1].entry_ratio < 1.01 < 7 < points[8].entry_ratio < 8.5
    text = answer(points)
    assert text.startswith("Counted in entries, keeping rows stops paying at L = 1 (")
    assert "in time, it s" in text
    assert answer({8: points[8]}).startswith("Counted in entries, keeping rows still pays at L = 8 (")


def test_spread() -> None:
    assert spread([3, 5, 6], 10) == [3, 5, 6]
    assert spread([], 10) == []
    chosen = spread(range(1000), 50)
    assert len(set(chosen)) == 50
    assert {b - a for a, b in pairwise(chosen)} == {20}


# -- the command ----------------------------------------------------------------------------------------------


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "persistence", "--steps", "40", "--layout", "dense", "--lifetimes", "1", "4"]) == 0
    text = capsys.readouterr().out
    trace = request_trace(1, 40)
    for part in (
        f"seed 1: 40 steps, {len(trace.requests)} requests joined", "layout=dense", f"{trace.entries_rebuilding:,}",
        f"{trace.entries_of_diffs:,}", f"{trace.entries_rebuilding / trace.entries_of_diffs:.2f}", "rows moved",
        "update rows", "L = 4", "stops paying at L = 1",
    ):  # fmt: skip
        assert part in text, part


def test_command_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "persistence", "--steps", "40", "--seed", "9", "--short", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    trace = request_trace(9, 40, short)
    found = printed["traces"]["main"]
    assert (found["rebuild"]["entries"], found["diffs"]["entries"]) == (
        trace.entries_rebuilding, trace.entries_of_diffs,
    )  # fmt: skip
    assert (printed["seed"], printed["layout"], printed["answer"], printed["agrees"]) == (9, "slots", None, True)
    assert list(printed["traces"]) == ["main"]


def miscounting(config: RunnerConfig) -> ModelRunner:
    """A runner that loses an entry of every thousand."""
    runner: Any = load_runner("cpu", config)
    count = runner.table_traffic
    runner.table_traffic = lambda: {**count(), "entries": count()["entries"] * 999 // 1000}
    return runner


def silent(config: RunnerConfig) -> ModelRunner:
    """A runner that counts nothing."""
    runner: Any = load_runner("cpu", config)
    runner.table_traffic = dict
    return runner


def test_a_runner_that_counts_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "persistence", "--steps", "30", "--runner", f"{__name__}:miscounting"]) == 1
    assert "did not count what arithmetic says" in capsys.readouterr().out


def test_a_runner_that_does_not_count(trace: RequestTrace) -> None:
    with pytest.raises(CapabilityError, match="does not count"):
        compare(silent, trace)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--steps", "1"], "--steps"),
        (["--arrivals", "0"], "--arrivals"),
        (["--timed-steps", "0"], "--timed-steps"),
        (["--lifetimes", "0"], "--lifetimes"),
        (["--plot", "x.pdf"], ".png or .svg"),
        (["--runner", "nobody"], "nobody"),
        (["--layout", "loose"], "loose"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_misuse(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "persistence", *options]) == 2
    assert told in capsys.readouterr().err


def test_all_lifetimes_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "persistence", "--steps", "20", "--json", "--lifetimes"]) == 0
    assert list(json.loads(capsys.readouterr().out)["traces"]) == [
        "main",
        *(f"L = {lifetime}" for lifetime in LIFETIMES),
    ]
    assert LIFETIMES == (1, 2, 4, 8, 16, 64, 250)


# -- the plot -------------------------------------------------------------------------------------------------


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["bench", "persistence", "--plot", "x.png"]) == 2
    assert "pip install 'modelrunner[plot]'" in capsys.readouterr().err


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that is drawn, as matplotlib holds it."""
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []

    def kept(*args: Any, **kwargs: Any) -> Any:
        drawn.append(figure.Figure(*args, **kwargs))
        return drawn[-1]

    monkeypatch.setattr(plot, "_figure_class", lambda: kept)
    return drawn


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot(suffix: str, tmp_path: Any, compared: Comparison, trace: RequestTrace, figures: list[Any]) -> None:
    """What was counted step by step, and the ratios of the sweep, are what is drawn."""
    short_lived = compare("cpu", request_trace(4, 60, fixed(1)), compared.info.layout, full=True)
    file = tmp_path / f"drawn{suffix}"
    plot_persistence(str(file), compared, {1: short_lived, 8: compared})
    (figure,) = figures
    entries, ratios = figure.axes
    drawn = [(line.get_xdata(), line.get_ydata()) for line in entries.lines]
    assert [list(x) for x, _ in drawn] == [list(range(1, 61))] * 2
    assert [list(y) for _, y in drawn] == [list(accumulate(way.written)) for way in (compared.rebuild, compared.diffs)]
    assert [y[-1] for _, y in drawn] == [trace.entries_rebuilding, trace.entries_of_diffs]
    texts = [t.get_text() for t in entries.texts]
    assert texts == [f"rebuilding: {trace.entries_rebuilding:,}", f"diffs: {trace.entries_of_diffs:,}"]
    by_label = {line.get_label(): line for line in ratios.lines}
    for label, ratio in (("entries", "entry_ratio"), ("time of a step", "time_ratio")):
        assert list(by_label[label].get_xdata()) == [1, 8]
        assert list(by_label[label].get_ydata()) == [getattr(short_lived, ratio), getattr(compared, ratio)]
    assert [t.get_text() for t in ratios.get_legend().get_texts()] == ["entries", "time of a step"]
    assert figure.get_suptitle() == f"cpu, {compared.info.layout} layout, seed 4"
    start = file.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in start


def test_one_panel_without_a_sweep(tmp_path: Any, compared: Comparison, figures: list[Any]) -> None:
    plot_persistence(str(tmp_path / "drawn.svg"), compared, {})
    assert [len(panel.lines) for panel in figures[0].axes] == [2]
