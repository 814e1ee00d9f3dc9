"""Fetch vLLM's wheel, judge its kernels alone and as stages of ours, write two pages: `make peers`.

The wheel (about 340 MB) is downloaded once, into a folder that git ignores. It is never installed and never imported
as a package: its compiled parts are not even unpacked.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from peers import stage_report
from peers.loader import LoaderError, unpack
from peers.recorder_names import missing_names
from peers.recorder_names import page as names_page
from peers.vllm_kernels import known_rows, page, run
from peers.vllm_package import VLLM

ROOT = Path(__file__).resolve().parents[2]


def fetch(folder: Path) -> Path:
    """The wheel, from `folder` or else downloaded into it by pip; its dependencies are left alone."""
    pattern = f"{VLLM.name}-{VLLM.version}-*.whl"
    if not (wheels := sorted(folder.glob(pattern))):
        requirement = f"{VLLM.name}=={VLLM.version}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", requirement, "-d"]
        subprocess.run([*command, str(folder)], check=True)
        wheels = sorted(folder.glob(pattern))
    if not wheels:
        raise LoaderError(f"pip downloaded no {pattern} into {folder}")
    return wheels[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="make peers", description=__doc__)
    parser.add_argument("--cache", type=Path, default=ROOT / ".peers", help="where the wheel is kept")
    parser.add_argument("--reports", type=Path, default=ROOT / "reports/peers", help="where the pages go")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    folder = args.cache.resolve() / f"{VLLM.name}-{VLLM.version}"
    wheel = fetch(args.cache)
    unpack(wheel, VLLM, folder)
    args.reports.mkdir(parents=True, exist_ok=True)
    stages = stage_report.page(stage_report.run(folder))
    write(args.reports / "vllm_stages.md", [*stages, *names_page(missing_names(wheel))])
    write(args.reports / "vllm_kernels.md", page(run(folder), known_rows(folder), folder))


def write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("\n".join(lines) + "\n")
    print(f"wrote {path}", flush=True)


main()
