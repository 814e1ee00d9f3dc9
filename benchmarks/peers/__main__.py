"""Fetch vLLM's wheel, judge its kernels, write the page: `make peers`.

The wheel (about 340 MB) is downloaded once, into a folder that git ignores. It is never installed and never imported
as a package: its compiled parts are not even unpacked.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from peers.loader import LoaderError, unpack
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
    parser.add_argument("--report", type=Path, default=ROOT / "reports/peers/vllm_kernels.md")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    folder = args.cache.resolve() / f"{VLLM.name}-{VLLM.version}"
    unpack(fetch(args.cache), VLLM, folder)
    text = "\n".join(page(run(folder), known_rows(folder), folder)) + "\n"
    args.report.parent.mkdir(parents=True, exist_ok=True)
    args.report.write_text(text)
    print(f"wrote {args.report}")


main()
