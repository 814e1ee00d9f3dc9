"""What a draw costs, as a multiple of reading the logits once.

    python benchmarks/sampling_speed.py [--report FILE] [--json] [--sweep] [--shapes 1024x32000,256x128256]

On an NVIDIA GPU: the time of a kernel that only reads the logits, then of greedy draws, of temperature alone, of top-k
50 with top-p 0.9 (goals: 1.3, 1.3 and 3 times the reading), and of what is beside them: other limits, the steps one by
one, and a top-p that sorts. All are replays of captured graphs over several sets of logits, more than the cache holds;
medians. Logits are like a model's (`model`: bell-shaped, with a head of some likely tokens) or without a head (`flat`).
--sweep also times other tilings of the kernels. Without a GPU: examples a second of both samplers, the Triton one in
the interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_backend.triton_support import INTERPRETED, tl, triton

SHAPES = "1024x32000,256x128256"
DTYPES = (torch.float32, torch.bfloat16)
CACHE_BYTES = 256 * 2**20  # more than any cache, so that every replay reads from memory
REPLAYS = 15
GOALS = {"greedy": 1.3, "temperature": 1.3, "top-k 50, top-p 0.9": 3.0}


@dataclass(frozen=True, slots=True)
class Case:
    """One way to draw: parameters that all rows have, and which code takes them."""

    name: str
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    kind: str = "model"
    noise: str = "murmur3"
    way: str = "at once"  # or "step by step", "sort"


CASES = (
    Case("greedy", temperature=0.0),
    Case("temperature"),
    Case("top-k 50, top-p 0.9", top_k=50, top_p=0.9),
    Case("temperature", kind="flat"),
    Case("top-k 50, top-p 0.9", kind="flat", top_k=50, top_p=0.9),
    Case("temperature", noise="philox"),
    Case("top-p 0.9", top_p=0.9),
    Case("top-p 0.9", kind="flat", top_p=0.9),
    Case("top-k 1000", top_k=1000),
    Case("min-p 0.05", min_p=0.05),
    Case("temperature", way="step by step"),
    Case("top-k 50, top-p 0.9", way="step by step", top_k=50, top_p=0.9),
    Case("top-p 0.9", way="sort", top_p=0.9),
)


@triton.jit
def _read_kernel(x, num_elements, out, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < num_elements, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.max(values, 0))


def logits_like(kind: str, num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Bell-shaped rows; those of `model` have 24 tokens above the rest, the likelier the fewer."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(num_rows, vocab_size, generator=generator, device="cuda") * 2
    if kind == "model":
        head = torch.randint(0, vocab_size, (num_rows, 24), generator=generator, device="cuda")
        lift = 16 - 4 * torch.log2(1 + torch.arange(24, device="cuda", dtype=torch.float32)) / 2
        x.scatter_(1, head, lift.expand(num_rows, 24).contiguous())
    return x.to(dtype)


def seconds(work: Callable[[int], None], copies: int, *, captured: bool = True) -> float:
    """Median seconds of a call; each of `copies` calls has its own data, and all are in one graph, if `captured`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(copies):
            work(i)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            for i in range(copies):
                work(i)
    taken = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        if captured:
            graph.replay()
        else:
            for i in range(copies):
                work(i)
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1000 / copies)
    return statistics.median(taken[2:])


class Rows:
    """L rows of logits in several copies, and the tables of a case."""

    def __init__(self, num_rows: int, vocab_size: int, dtype: torch.dtype, kind: str) -> None:
        self.l, self.v, self.dtype = num_rows, vocab_size, dtype
        self.num_bytes = num_rows * vocab_size * dtype.itemsize
        self.copies = max(2, -(-CACHE_BYTES // self.num_bytes) + 1)
        self.logits = [logits_like(kind, num_rows, vocab_size, dtype, i) for i in range(self.copies)]
        rng = np.random.default_rng(0)
        place = {"device": "cuda"}
        self.rows = torch.from_numpy(rng.permutation(num_rows)).to(**place)
        self.positions = torch.arange(num_rows, **place)
        self.seeds = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, num_rows)).to(**place)
        self.sampled = torch.zeros(num_rows, dtype=torch.int64, **place)
        self.faults = torch.zeros(num_rows, dtype=torch.int32, **place)

    def table(self, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((self.l,), value, dtype=dtype, device="cuda")

    def reading(self) -> float:
        """Seconds to read the logits once: the fastest of several tilings."""
        n, times = self.l * self.v, []
        for width, warps in ((2048, 4), (4096, 4), (8192, 8), (16384, 16)):
            out = torch.empty(triton.cdiv(n, width), device="cuda")

            def read(i: int, width: int = width, warps: int = warps, out: torch.Tensor = out) -> None:
                _read_kernel[(len(out),)](self.logits[i], n, out, BLOCK=width, num_warps=warps)

            times.append(seconds(read, self.copies))
        return min(times)

    def drawing(self, case: Case) -> float:
        """Seconds of the case's draw."""
        from gpu_backend.sample.candidates import SMALL_K
        from gpu_backend.sample.draw import draw
        from gpu_backend.sample.row_params import Limits

        temperature = self.table(case.temperature)
        limits = Limits(
            self.table(case.min_p), self.table(case.top_k or self.v, torch.int32), self.table(case.top_p)
        )  # fmt: skip
        limited = bool(case.top_k or case.top_p < 1 or case.min_p)
        short = case.top_k <= SMALL_K and (case.top_k > 0 or case.top_p == 1)

        def at_once(i: int) -> None:
            draw(
                self.rows, self.positions, temperature, self.seeds, case.noise, limits if limited else None, self.l,
                self.logits[i], self.sampled, self.faults, short=short,
            )  # fmt: skip

        def step_by_step(i: int) -> None:
            x = self.logits[i].to(torch.float32, copy=True)
            self._steps(case, x, temperature, limits)

        def sort(i: int) -> None:
            self._sorted_top_p(self.logits[i].to(torch.float32) / case.temperature, case.top_p)

        ways = {"at once": at_once, "step by step": step_by_step, "sort": sort}
        return seconds(ways[case.way], self.copies, captured=case.way != "sort")

    def _steps(self, case: Case, x: torch.Tensor, temperature: torch.Tensor, limits: Any) -> None:
        from gpu_backend.sample.gumbel import gumbel_sample
        from gpu_backend.sample.temperature import apply_temperature
        from gpu_backend.sample.top_k_top_p import apply_top_k_top_p

        apply_temperature(self.rows, temperature, self.l, x)
        if case.top_k or case.top_p < 1:
            apply_top_k_top_p(self.rows, limits.top_k, limits.top_p, self.l, x)
        gumbel_sample(
            self.rows, self.positions, temperature, self.seeds, case.noise, self.l, x, self.sampled, self.faults
        )  # fmt: skip

    @staticmethod
    def _sorted_top_p(x: torch.Tensor, p: float) -> torch.Tensor:
        """What a sort costs: the nucleus of each row, and no draw yet."""
        values, order = x.sort(dim=-1, descending=True)
        mass = values.softmax(-1)
        dropped = (mass.cumsum(-1) - mass) >= p
        return x.scatter(1, order, values.masked_fill(dropped, float("-inf")))


@contextmanager
def constants(module: Any, **values: Any) -> Iterator[None]:
    """A module's constants set for a while."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def tilings() -> Iterator[tuple[str, str, Any]]:
    """Other tilings of the kernels: (case, what is changed, a context)."""
    from gpu_backend.sample import candidates, group_bests

    for case in ("greedy", "temperature", "top-k 50, top-p 0.9"):
        for rows, width, tiles, warps in (
            (4, 256, 2, 1), (4, 256, 8, 1), (8, 256, 4, 1), (2, 256, 8, 1), (4, 512, 2, 1), (4, 512, 4, 1),
            (2, 512, 4, 1), (4, 1024, 2, 2), (4, 1024, 4, 4), (1, 2048, 2, 4),
        ):  # fmt: skip
            if case.startswith("top-k") and (rows, width, tiles) not in ((4, 256, 8), (4, 512, 2), (4, 1024, 2)):
                continue
            tiling = {"ROWS": rows, "WIDTH": width, "TILES": tiles, "num_warps": warps}
            yield case, f"tile {rows} x {width}, {tiles} tiles, {warps} warps", constants(
                group_bests, _TILES=tiling, PLAIN_GROUP=min(width, 512), FEW_ROWS=0
            )  # fmt: skip
    for at_once, warps in ((4, 1), (4, 2), (8, 2), (8, 4), (16, 4), (32, 8)):
        way = {"AT_ONCE": at_once, "num_warps": warps}
        yield "top-k 50, top-p 0.9", f"{at_once} groups at once, {warps} warps", constants(
            candidates, WAY_OF_MANY=way, WAY_OF_FEW=way
        )  # fmt: skip
    for group in (64, 256):
        yield "top-k 50, top-p 0.9", f"groups of {group}", constants(group_bests, LIMITED_GROUP=group)
    for width, warps in ((128, 1), (256, 2), (512, 1)):
        yield "top-k 50, top-p 0.9", f"lists of {width}, {warps} warps", constants(
            candidates, SHORT_LIST=width, SHORT_WARPS=warps
        )  # fmt: skip


def measure(shapes: list[tuple[int, int]], sweep: bool) -> Iterator[dict[str, Any]]:
    """A line per measurement."""
    for num_rows, vocab_size in shapes:
        for dtype in DTYPES:
            about = {"rows": num_rows, "vocabulary": vocab_size, "dtype": str(dtype).removeprefix("torch.")}
            for kind in ("model", "flat"):
                rows = Rows(num_rows, vocab_size, dtype, kind)
                once = rows.reading()
                if kind == "model":
                    yield about | {"case": "reading once", "seconds": once, "bytes_per_s": rows.num_bytes / once}
                for case in CASES:
                    if case.kind == kind:
                        yield about | _line(case, rows, once)
                if kind == "model" and sweep:
                    for name, change, context in tilings():
                        case = next(c for c in CASES if c.name == name and c.kind == kind)
                        try:
                            with context:
                                yield about | _line(case, rows, once) | {"change": change}
                        except Exception as e:  # a tiling that does not compile or fit is a result, too
                            yield about | {"case": name, "change": change, "error": f"{type(e).__name__}: {e}"[:120]}


def _line(case: Case, rows: Rows, once: float) -> dict[str, Any]:
    taken = rows.drawing(case)
    plain = case.way == "at once" and case.noise == "murmur3"
    return {
        "case": case.name, "kind": case.kind, "noise": case.noise, "way": case.way, "seconds": taken,
        "ratio": taken / once, "goal": GOALS.get(case.name) if plain else None,
    }  # fmt: skip


def page(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown, without a heading: it is part of a larger page."""
    yield (
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, triton {triton.__version__}. Medians of "
        f"{REPLAYS} graph replays; the ratio is to reading the logits once, in the same run. Command: "
        "`python benchmarks/sampling_speed.py`."
    )
    yield "\n| rows x vocabulary | dtype | draw | logits | us | times reading once | goal |"
    yield "|---|---|---|---|---|---|---|"
    for line in lines:
        if "change" in line:
            continue
        what = line["case"]
        if line.get("noise") == "philox":
            what += ", philox"
        if line.get("way", "at once") != "at once":
            what += f", {line['way']}"
        ratio = f"{line['ratio']:.2f}" if "ratio" in line else f"{line['bytes_per_s'] / 1e12:.2f} TB/s"
        goal = line.get("goal")
        met = "" if goal is None else f"{goal} {'met' if line['ratio'] <= goal else 'MISSED'}"
        yield (
            f"| {line['rows']} x {line['vocabulary']} | {line['dtype']} | {what} | {line.get('kind', '')} "
            f"| {line['seconds'] * 1e6:.1f} | {ratio} | {met} |"
        )
    swept = [line for line in lines if "change" in line]
    if swept:
        yield "\nOther tilings:\n\n| rows x vocabulary | dtype | draw | change | us | times |"
        yield "|---|---|---|---|---|---|"
        for line in swept:
            told = f"{line['seconds'] * 1e6:.1f} | {line['ratio']:.2f}" if "seconds" in line else f"| {line['error']}"
            shape = f"{line['rows']} x {line['vocabulary']} | {line['dtype']}"
            yield f"| {shape} | {line['case']} | {line['change']} | {told} |"


# -- without a GPU ----------------------------------------------------------------------------------------------------


def examples_per_second(num_rows: int = 8, vocab_size: int = 512, steps: int = 40) -> dict[str, Any]:
    """Logits rows a second of both samplers, parameters of every kind mixed."""
    from cpu_reference.request_state import RequestState
    from cpu_reference.sample.logits_rows import LogitsRows
    from cpu_reference.sample.sampler import Sampler
    from gpu_backend.packed_copy import PackedCopy
    from gpu_backend.request_state import RequestState as DeviceState
    from gpu_backend.sample.logits_rows import LogitsRows as DeviceRows
    from gpu_backend.sample.sampler import Sampler as DeviceSampler
    from runner_api import NewRequestData, RunnerConfig, SamplingParams

    config, cpu = RunnerConfig(max_num_reqs=num_rows, max_model_len=64), torch.device("cpu")
    kinds = (
        {"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9, "temperature": 0.7}, {"min_p": 0.1},
        {"repetition_penalty": 1.2}, {"logit_bias": {3: 2.0}}, {"top_k": 50, "top_p": 0.9},
    )  # fmt: skip
    states, device_states = RequestState(num_rows, 64, 0), DeviceState(num_rows, 64, 0, device=cpu)
    ours, twin = DeviceSampler(config, vocab_size, device_states, cpu), Sampler(config, vocab_size, states)
    packed = PackedCopy({**device_states.host_tables(), **ours.host_tables()}, 1 << 16, cpu)
    device_states.bind(packed), ours.bind(packed)
    for i in range(num_rows):
        params = SamplingParams(**{"temperature": 1.0, **kinds[i % len(kinds)]})
        new = NewRequestData(f"r{i}", [1, 2, 3], [1, 2, 3], 0, ([1],), params, seed=i)
        for state, sampler in ((states, twin), (device_states, ours)):
            sampler.add_request(state.add_request(new.req_id, 3, [1, 2, 3], 0), new)
    states.apply_staged_writes(), twin.apply_staged_writes()
    device_states.pack(packed), ours.pack(packed)
    packed.send()
    device_states.apply_staged_writes(packed), ours.apply_staged_writes(packed)
    logits = np.random.default_rng(0).normal(size=(num_rows, vocab_size)).astype(np.float32)
    batch, zeros = np.arange(num_rows), np.zeros(num_rows, np.int32)
    rows = LogitsRows(num_rows, batch, zeros, batch + 3, zeros, batch)
    moved = [torch.from_numpy(a) for a in (batch, zeros, batch + 3, zeros)]
    device_rows = DeviceRows(num_rows, *moved, batch, np.ones(num_rows, np.int32))
    given = torch.from_numpy(logits)
    speeds = {}
    for name, sample in (
        ("cpu_reference", lambda: twin.sample(logits, rows)),
        ("gpu_backend, interpreted", lambda: ours.sample(given, device_rows)),
    ):
        sample()
        start = time.perf_counter()
        for _ in range(steps):
            sample()
        speeds[name] = round(num_rows * steps / (time.perf_counter() - start), 1)
    same = bool((ours.sample(given, device_rows).sampled.numpy() == twin.sample(logits, rows).sampled).all())
    about = {"rows": num_rows, "vocabulary": vocab_size, "cores": os.cpu_count(), "machine": platform.machine()}
    return about | {"rows_per_s": speeds, "same_tokens": same}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="write the table to this file, too")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--sweep", action="store_true", help="time other tilings as well")
    parser.add_argument("--shapes", default=SHAPES, help="logits rows x vocabulary, comma-separated")
    args = parser.parse_args()
    if INTERPRETED:
        figures = examples_per_second()
        print(json.dumps(figures) if args.json else "\n".join(f"{k:>14}: {v}" for k, v in figures.items()))
        return 0
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",")]
    lines = []
    for line in measure(shapes, args.sweep):
        lines.append(line)
        told = "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items())
        print(json.dumps(line) if args.json else told, file=sys.stdout if args.json else sys.stderr, flush=True)
    text = "\n".join(page(lines))
    if args.report:
        args.report.write_text(text + "\n", encoding="utf-8")
    if not args.json:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
