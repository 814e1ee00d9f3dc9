"""What judging costs: the same launches in the stock interpreter, the fast one, and under the sanitizer.

    python benchmarks/sanitizer_speed.py [--rounds 7] [--json]

Modes take turns within a round, so that a busy machine slows all of them; ratios are those of the medians to the stock
interpreter's. Asked for: at most 1.5 with bounds, at most 3 with races as well, about 0.5 for the fast interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

from conformance.triton_sanitizer import fast_interpreter, sanitize

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "stock": nullcontext,
    "fast": fast_interpreter,
    "bounds": lambda: sanitize(races=False, poison=False, overflow=False, masked_values=False),
    "bounds+races": lambda: sanitize(overflow=False, masked_values=False),
    "everything": sanitize,
}


@triton.jit
def axpy(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2.0 * tl.load(x + i, mask=i < n, other=0.0) + tl.load(y + i, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def rms_norm(x, weight, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    values = tl.load(x + row * width + i, mask=i < width, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / width + 1e-5)
    tl.store(out + row * width + i, values * scale * tl.load(weight + i, mask=i < width, other=0.0), mask=i < width)


@triton.jit
def gather_rows(table, rows, out, width, num_rows, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows + r, mask=r < num_rows, other=0)
    j = tl.arange(0, BLOCK)
    mask = (r < num_rows)[:, None] & (j < width)[None, :]
    values = tl.load(table + row[:, None] * width + j[None, :], mask=mask, other=0.0)
    tl.store(out + r[:, None] * width + j[None, :], values, mask=mask)


@triton.jit
def count_steps(lengths, out, STEP: tl.constexpr):
    p = tl.program_id(0)
    total = 0
    for first in range(0, tl.load(lengths + p), STEP):
        total += tl.cdiv(first + 1, STEP)
    tl.store(out + p, total)


def workloads() -> dict[str, Callable[[], None]]:
    x, y, out = (torch.rand(64 * 1024) for _ in range(3))
    wide = [torch.rand(8 * 65536) for _ in range(3)]
    rows = torch.randint(0, 100, (300,), dtype=torch.int32)
    table, gathered = torch.rand(100, 60), torch.zeros(300, 60)
    hidden, normed, weight = torch.rand(64, 576), torch.zeros(64, 576), torch.rand(576)
    lengths, counts = torch.full((32,), 200, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    return {
        "axpy, 64 programs of 1024": lambda: axpy[(64,)](x, y, out, 64 * 1024 - 5, BLOCK=1024),
        "axpy, 8 programs of 65536": lambda: axpy[(8,)](*wide, 8 * 65536 - 5, BLOCK=65536),
        "RMSNorm, 64 rows of 576": lambda: rms_norm[(64,)](hidden, weight, normed, 576, BLOCK=1024),
        "gather, 300 rows of 60": lambda: gather_rows[(19,)](table, rows, gathered, 60, 300, ROWS=16, BLOCK=64),
        "scalar loop, 32 programs": lambda: count_steps[(32,)](lengths, counts, STEP=16),
    }


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of each workload in each mode."""
    medians: dict[str, dict[str, float]] = {}
    for name, work in workloads().items():
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(rounds + 1):
            for mode, context in MODES.items():
                with context():
                    start = time.perf_counter()
                    work()
                    times[mode].append(time.perf_counter() - start)
        medians[name] = {mode: statistics.median(taken[1:]) for mode, taken in times.items()}  # the first warms up
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    medians = measure(options.rounds)
    ratios = {name: {mode: taken[mode] / taken["stock"] for mode in MODES} for name, taken in medians.items()}
    overall = {mode: statistics.median(ratio[mode] for ratio in ratios.values()) for mode in MODES}
    if options.json:
        machine = {"machine": platform.processor() or platform.machine(), "triton": triton.__version__}
        print(json.dumps({**machine, "seconds": medians, "ratios": ratios, "median_ratio": overall}, indent=2))
        return
    print(f"triton {triton.__version__}, {platform.machine()}; times the stock interpreter's")
    print(f"{'':28}{'stock':>10}" + "".join(f"{mode:>14}" for mode in MODES if mode != "stock"))
    for name, ratio in ratios.items():
        cells = "".join(f"{ratio[mode]:14.2f}" for mode in MODES if mode != "stock")
        print(f"{name:28}{medians[name]['stock'] * 1000:7.1f} ms{cells}")
    print(f"{'median':38}" + "".join(f"{overall[mode]:14.2f}" for mode in MODES if mode != "stock"))


if __name__ == "__main__":
    main()
