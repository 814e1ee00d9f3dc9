"""Sum up what `benchmarks/gpu_test.sh` wrote as one Markdown page: python benchmarks/gpu_report.py FOLDER COMMIT."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import numpy
import torch
import triton


def lines(folder: Path, commit: str) -> Iterator[str]:
    """The page, line by line."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    yield f"# The Triton runner on {device}"
    yield ""
    yield (
        f"Commit {commit}, {date.today().isoformat()}; Python {platform.python_version()}, torch {torch.__version__}, "
        f"triton {triton.__version__}, NumPy {numpy.__version__}. Command: `make gpu-test`."
    )
    yield from clauses(folder)
    yield from locksteps(folder)
    for dtype in ("float32", "bfloat16"):
        yield from replays(folder, dtype)
    demo = folder / "gpu_demo.txt"
    if demo.exists():
        yield f"\n## Demo\n\n`{demo.read_text().splitlines()[-1]}`"
        fault = (folder / "gpu_demo_fault.txt").read_text().splitlines()[-1]
        yield f"\nWith a planted fault: `{fault}`"
    tests = (folder / "gpu_pytest.txt").read_text().strip().splitlines()[-1]
    yield f"\n## Tests marked `gpu` or `interpret`\n\n`{tests}`"


def clauses(folder: Path) -> Iterator[str]:
    report = json.loads((folder / "gpu_check.json").read_text())
    yield f"\n## Clauses: {report['verdict']}\n\n`{report['runner']}`\n"
    yield "| area | MUST | SHOULD | skipped |\n|---|---|---|---|"
    for name, area in report["areas"].items():
        must, should = area["must"], area["should"]
        yield f"| {name} | {must[0]}/{must[1]} | {should[0]}/{should[1]} | {area['skipped']} |"
    skipped = [f"{i} ({c['reason']})" for i, c in report["clauses"].items() if c["outcome"] == "skip"]
    if skipped:
        yield "\nSkipped: " + "; ".join(skipped)


def locksteps(folder: Path) -> Iterator[str]:
    yield "\n## Lockstep with the NumPy reference\n"
    yield "| model | dtype | verdict | steps | elements | tokens | near ties |\n|---|---|---|---|---|---|---|"
    for path in sorted(folder.glob("gpu_check*.json")):
        for entry in json.loads(path.read_text())["lockstep"]:
            if entry["dtype"] or path.stem == "gpu_check":
                yield (
                    f"| {Path(entry['model']).name} | {entry['dtype'] or 'integers'} | {entry['verdict']} "
                    f"| {entry['steps']} | {entry['elements']} | {entry['tokens']} | {entry['near_ties']} |"
                )


def replays(folder: Path, dtype: str) -> Iterator[str]:
    yield f"\n## Replay of vLLM's recordings, {dtype}\n"
    yield "| recording | steps | integer elements equal | different | tokens equal | near ties | different | verdict |"
    yield "|---|---|---|---|---|---|---|---|"
    for r in json.loads((folder / f"gpu_replay_{dtype}.json").read_text())["recordings"]:
        equal = sum(f["equal"] for f in r["fields"].values())
        different = sum(f["different"] for f in r["fields"].values())
        t = r["tokens"]
        yield (
            f"| {r['recording']} | {r['steps']} | {equal} | {different} | {t['equal']} | {t['near_tie']} "
            f"| {t['different']} | {r['verdict']} |"
        )


if __name__ == "__main__":
    print("\n".join(lines(Path(sys.argv[1]), sys.argv[2])))
