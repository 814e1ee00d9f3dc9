"""Sum up what `benchmarks/gpu_test.sh` wrote as one Markdown page: python benchmarks/gpu_report.py FOLDER COMMIT.

A part that was left out (`ONLY`) has no file, and then no section.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy
import torch
import triton

from conformance.check_text import skipped_by_reason

REPLAYS = {
    "float32": "float32; `sampling` draws from the recorded logits",
    "model": "float32, `sampling` on the model's own logits",
    "bfloat16": "bfloat16",
}
LOGPROBS = ("logprob_token_ids", "logprobs", "ranks")


def lines(folder: Path, commit: str) -> Iterator[str]:
    """The page, line by line."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    yield f"# The Triton runner on {device}"
    yield ""
    yield (
        f"Commit {commit}, {date.today().isoformat()}; Python {platform.python_version()}, torch {torch.__version__}, "
        f"triton {triton.__version__}, NumPy {numpy.__version__}. Command: `make gpu-test`."
    )
    yield from clauses(folder / "gpu_check.json", "slots layout")
    yield from clauses(folder / "gpu_check_dense.json", "dense layout")
    yield from locksteps(folder)
    for name, title in REPLAYS.items():
        yield from replays(folder / f"gpu_replay_{name}.json", title)
    speed = folder / "gpu_sampling_speed.md"
    if speed.exists():
        yield f"\n## Sampling speed\n\n{speed.read_text().strip()}"
    for name, title in (
        ("gpu_bench_host", "Host time of a step, both layouts"), ("gpu_late_copy", "A pinned buffer reused too soon"),
    ):  # fmt: skip
        if (folder / f"{name}.txt").exists():
            yield f"\n## {title}\n\n```\n{(folder / f'{name}.txt').read_text().strip()}\n```"
    if (folder / "gpu_demo.txt").exists():
        yield f"\n## Demo\n\n`{last_line(folder / 'gpu_demo.txt')}`"
        yield f"\nWith a planted fault: `{last_line(folder / 'gpu_demo_fault.txt')}`"
    for name, title in (
        ("gpu_pytest", "Tests marked `gpu` or `interpret`"),
        ("gpu_metamorphic", "Metamorphic tests of sampling, 1 to 1,024 rows"),
        ("gpu_mutants", "Faults planted in the Triton runner (`modelrunner mutants --runner gpu`)"),
        ("gpu_catalogue", "The catalogue of public bugs (`python -m conformance.catalogue --runner gpu`)"),
    ):
        if (folder / f"{name}.txt").exists():
            yield f"\n## {title}\n\n`{last_line(folder / f'{name}.txt')}`"
    yield from seconds(folder / "gpu_seconds.txt")


def last_line(path: Path) -> str:
    text = path.read_text().strip() if path.exists() else ""
    return text.splitlines()[-1] if text else "(nothing was printed)"


def read(path: Path) -> Any:
    """The JSON object of a part; None if it was left out or did not get to its end."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def clauses(path: Path, title: str) -> Iterator[str]:
    report = read(path)
    if report is None:
        return
    yield f"\n## Clauses, {title}: {report['verdict']}\n\n`{report['runner']}`\n"
    yield "| area | MUST | SHOULD | skipped |\n|---|---|---|---|"
    for name, area in report["areas"].items():
        must, should = area["must"], area["should"]
        yield f"| {name} | {must[0]}/{must[1]} | {should[0]}/{should[1]} | {area['skipped']} |"
    for reason, ids in skipped_by_reason(report["clauses"]).items():
        yield f"\nSkipped ({reason}): {' '.join(ids)}"
    failed = [f"{i}: {c['first']}" for i, c in report["clauses"].items() if c["outcome"] == "fail"]
    if failed:
        yield "\nFailed: " + "; ".join(failed)


def locksteps(folder: Path) -> Iterator[str]:
    rows = [
        f"| {Path(entry['model']).name} | {entry['dtype'] or 'integers'} | {entry['verdict']} | {entry['steps']} "
        f"| {entry['elements']} | {entry['tokens']} | {entry['near_ties']} | {entry['expected_near_ties']:.1e} "
        f"| {entry['near_tie_cap']:.3g} |"
        for path in sorted(folder.glob("gpu_check*.json"))
        for entry in (read(path) or {"lockstep": ()})["lockstep"]
        if entry["dtype"] or path.stem in ("gpu_check", "gpu_check_dense")
    ]
    if rows:
        yield "\n## Lockstep with the NumPy reference\n"
        yield "| model | dtype | verdict | steps | elements | tokens | near ties | expected | at most |"
        yield "|---|---|---|---|---|---|---|---|---|"
        yield from rows


def replays(path: Path, title: str) -> Iterator[str]:
    report = read(path)
    if report is None:
        return
    yield f"\n## Replay of vLLM's recordings, {title}\n"
    yield (
        "| recording | steps | integer elements equal | different | tokens equal | near ties | different "
        "| log probabilities and ranks equal | different | verdict |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for r in report["recordings"]:
        counts = {scored: [0, 0] for scored in (False, True)}
        for name, f in r["fields"].items():
            counts[name in LOGPROBS][0] += f["equal"]
            counts[name in LOGPROBS][1] += f["different"]
        (equal, different), (scored, missed), t = counts[False], counts[True], r["tokens"]
        yield (
            f"| {r['recording']} | {r['steps']} | {equal} | {different} | {t['equal']} | {t['near_tie']} "
            f"| {t['different']} | {scored} | {missed} | {r['verdict']} |"
        )


def seconds(path: Path) -> Iterator[str]:
    if not path.exists() or not path.read_text().strip():
        return
    parts = [line.split(" ", 1) for line in path.read_text().splitlines()]
    yield f"\n## Seconds: {sum(int(n) for n, _ in parts)}\n"
    yield ", ".join(f"{name} {n}" for n, name in parts)


if __name__ == "__main__":
    print("\n".join(lines(Path(sys.argv[1]), sys.argv[2])))
