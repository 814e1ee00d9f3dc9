"""`modelrunner bench persistence`: the experiment, its tables, and one sentence that answers it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from conformance.bench.arguments import LIFETIMES
from conformance.bench.persistence import Comparison, Way, answer, compare
from conformance.bench.plot import check_plot, plot_persistence
from conformance.bench.report_text import count, microseconds, number_table, ratio
from conformance.bench.request_trace import BLOCK_SIZE, ROWS, RequestTrace, as_given, fixed, request_trace, short
from conformance.bench.step_timer import PARTS, caveat, mean, parts_of
from runner_api import ConfigError

# Counters of the runner, as a line of the table; totals are not shown as a mean.
COUNTERS = {
    "bytes_staged": "bytes staged for them, a step",
    "bytes_gathered": "bytes gathered by row, a step",
    "bytes_committed": "bytes of whole rows sent, a step",
}
TOTALS = {"rows_moved": "rows moved to stay dense", "entries_moved": "entries moved with them"}


def run_persistence(args: argparse.Namespace) -> int:
    """The command. 0: the runner counted what arithmetic says, 1: it did not."""
    _check(args)
    options = {"timed_steps": args.timed_steps, "full": args.full}
    trace = request_trace(args.seed, args.steps, short if args.short else as_given, args.arrivals)
    say = _silent if args.json else _say
    say(_trace_line(trace))
    main = compare(args.runner, trace, args.layout, **options)
    say(main.info.line(), "", comparison_text(main))
    lifetimes = LIFETIMES if args.lifetimes == [] else sorted(set(args.lifetimes or ()))
    points = {}
    for lifetime in lifetimes:
        trace = request_trace(args.seed, args.steps, fixed(lifetime), args.arrivals)
        points[lifetime] = compare(args.runner, trace, args.layout, **options)
    if points:
        say("", sweep_text(points), "", answer(points))
    if args.plot:
        plot_persistence(args.plot, main, points)
        say("", f"plot: {args.plot}")
    agrees = all(c.as_computed for c in (main, *points.values()))
    if not agrees:
        say("", "the runner did not count what arithmetic says")
    if args.json:
        print(json.dumps(_json(main, points, agrees), indent=1))
    return 0 if agrees else 1


def _check(args: argparse.Namespace) -> None:
    for name, least in (("steps", 2), ("arrivals", 1), ("timed_steps", 1)):
        value = getattr(args, name)
        if value < least:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError("nothing would be measured", field=option, got=value, expected=f">= {least}")
    for lifetime in args.lifetimes or ():
        if lifetime < 1:
            raise ConfigError("a request lives a step at least", field="--lifetimes", got=lifetime, expected=">= 1")
    if args.plot:
        check_plot(args.plot)
        if not Path(args.plot).parent.is_dir():
            raise ConfigError("no such folder", field="--plot", got=args.plot, hint="Make it first")


def _say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def _silent(*lines: str) -> None:
    pass


def _trace_line(trace: RequestTrace) -> str:
    return (
        f"seed {trace.seed}: {trace.num_steps} steps, {len(trace.requests)} requests joined, "
        f"{trace.num_finished} finished, {trace.num_active} still active; {ROWS} rows, blocks of {BLOCK_SIZE}"
    )


def comparison_text(c: Comparison) -> str:
    """One trace: what both ways wrote and took."""
    lines = [["", "rebuilding", "diffs", "ratio"]]
    lines.append(["block-table entries written", count(c.rebuild.entries), count(c.diffs.entries), _entry_ratio(c)])
    for name, label in COUNTERS.items():
        ways = [way.per_step(name) for way in (c.rebuild, c.diffs)]
        if None not in ways:
            lines.append([label, *map(count, ways), ratio(*ways)])
    for name, label in TOTALS.items():
        if name in c.diffs.traffic:
            lines.append([label, *(count(way.traffic[name]) for way in (c.rebuild, c.diffs)), ""])
    times = [c.rebuild.times, c.diffs.times]
    lines.append([f"{c.clock} of a step, us", *(microseconds(mean(t)) for t in times), f"{c.time_ratio:.2f}"])
    for part in parts_of(c.diffs.times):
        seconds = [mean(t, part) for t in times]
        lines.append([f"  {PARTS.get(part, part)}", *map(microseconds, seconds), ratio(*seconds)])
    steps, timed = c.trace.num_steps, len(c.diffs.times)
    notes = [
        f"Entries as the runner counted them, all {steps} steps; times are means of {timed} steps.{caveat(c.info)}"
    ]
    if not c.through_runner:
        notes.append(
            f"Rebuilding: {c.rebuild.num_run} steps went through the runner, the rows of all were laid into its tables."
        )
    if "entries_moved" in c.diffs.traffic:
        both = c.diffs.entries + c.diffs.traffic["entries_moved"]
        notes.append(f"With the entries that were moved the ratio is {ratio(c.rebuild.entries, both)}.")
    return "\n".join([number_table(lines), *notes])


def _entry_ratio(c: Comparison) -> str:
    return ratio(c.rebuild.entries, c.diffs.entries)


def sweep_text(points: dict[int, Comparison]) -> str:
    """The sweep: a line per lifetime."""
    clock = next(iter(points.values())).clock
    lines = [["lifetime", "most active", "rebuilding", "diffs", "ratio", "rebuilding us", "diffs us", "ratio"]]
    for lifetime, c in points.items():
        seconds = [mean(way.times) for way in (c.rebuild, c.diffs)]
        lines.append(
            [f"L = {lifetime}", count(c.trace.most_active), count(c.rebuild.entries), count(c.diffs.entries),
             _entry_ratio(c), *map(microseconds, seconds), f"{c.time_ratio:.2f}"]
        )  # fmt: skip
    return f"{number_table(lines)}\nEntries written in all steps; {clock} of a step."


def _json(main: Comparison, points: dict[int, Comparison], agrees: bool) -> dict[str, Any]:
    trace = main.trace
    return {
        "runner": main.info.line(), "layout": main.info.layout, "clock": main.clock, "seed": trace.seed,
        "steps": trace.num_steps, "joined": len(trace.requests), "finished": trace.num_finished,
        "active": trace.num_active,
        "traces": {"main": _comparison_json(main)} | {f"L = {n}": _comparison_json(c) for n, c in points.items()},
        "answer": answer(points) if points else None, "agrees": agrees,
    }  # fmt: skip


def _comparison_json(c: Comparison) -> dict[str, Any]:
    return {
        "rebuild": _way_json(c.rebuild), "diffs": _way_json(c.diffs), "entry_ratio": c.entry_ratio,
        "time_ratio": c.time_ratio, "agrees": c.as_computed,
        "computed": {"rebuild": c.trace.entries_rebuilding, "diffs": c.trace.entries_of_diffs},
    }  # fmt: skip


def _way_json(way: Way) -> dict[str, Any]:
    return {
        "entries": way.entries, "steps_run": way.num_run, "traffic": way.traffic, "seconds": mean(way.times),
        "parts": {part: mean(way.times, part) for part in parts_of(way.times)},
    }  # fmt: skip
