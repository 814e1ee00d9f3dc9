"""A fast battery for single kernels: fixed ragged batches, every output poisoned, each held against the NumPy twin.

Where `conformance.stage_cases` draws small batches for any runner, these cases are made for kernels: sizes that are no
multiple of a tile, loops that run more than once, rows far from their batch index, ids beyond 2^27, and garbage in
every place that must not be read. `conformance.kernel_mutants` runs them on mutated kernels, the tests on the real
ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.kernel_battery_limits import LimitedRows, limited_rows
from conformance.kernel_battery_sampling import BY_REQUEST, MANY_ROWS, SIZES, SamplingBatch
from runner_api import NO_ROW, StageSet, WitnessConfig

POISON = -77
NOWHERE = 2**30  # a block id that lies outside of every cache
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
Outputs = dict[str, list[np.ndarray]]


@dataclass(frozen=True, slots=True)
class Side:
    """A backend's stages, the package (or its mutated copy) that they come from, and whether it is the twin."""

    package: str
    stages: StageSet
    is_twin: bool

    def call(self, module: str, function: str, *args: Any) -> np.ndarray:
        """A function of the package outside of its stages, given NumPy arrays."""
        fn = getattr(importlib.import_module(f"{self.package}.{module}"), function)
        moved = [self.stages.to_device(a.copy()) if isinstance(a, np.ndarray) else a for a in args]
        return self.stages.to_host(fn(*moved))


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One call. `bounds`: largest error allowed by output (or a function of what is expected), 0 where none is said;
    `tile`: the widest tile allowed."""

    name: str
    run: Callable[[Side], Outputs]
    bounds: dict[str, Any] = field(default_factory=dict)
    tile: int = 16


def differences(got: Outputs, expected: Outputs, bounds: dict[str, Any]) -> list[str]:
    """The outputs that differ, each with its first wrong element."""
    found = []
    for name, here in expected.items():
        for g, (a, b) in enumerate(zip(got[name], here, strict=True)):
            a = a.view(b.dtype) if a.dtype.kind in "iu" and a.dtype.itemsize == b.dtype.itemsize else a
            if name in bounds:
                bound = bounds[name](b) if callable(bounds[name]) else bounds[name]
                with np.errstate(invalid="ignore"):
                    wrong = ~((np.abs(a.astype(np.float64) - b) <= bound) | (a == b) | ((a != a) & (b != b)))
            else:
                wrong = ~((a == b) | ((a != a) & (b != b)))
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                found.append(f"{name}[{g}]{list(at)}: {a[at]} instead of {b[at]}")
    return found


def _stage(
    name: str, arrays: dict[str, Any], *, label: str = "", twin: dict[str, Any] | None = None,
    bounds: dict[str, Any] | None = None, tile: int = 16,
) -> KernelCase:  # fmt: skip
    """A stage's call. `twin`: what the twin is given instead, where the kernel gets traps."""

    def run(side: Side) -> Outputs:
        given = arrays | (twin or {}) if side.is_twin else arrays
        with np.errstate(invalid="ignore"):
            out = side.stages.run(name, **given)
        return {k: v if isinstance(v, list) else [v] for k, v in out.items()}

    return KernelCase(f"{name} {label}".strip(), run, bounds or {}, tile)


def _function(label: str, module: str, function: str, *args: Any, bound: Any = None, tile: int = 16) -> KernelCase:
    """A call of a function that both packages have at the same place."""

    def run(side: Side) -> Outputs:
        return {"out": [side.call(module, function, *args)]}

    return KernelCase(label, run, {} if bound is None else {"out": bound}, tile)


def kernel_cases() -> list[KernelCase]:
    """The whole battery; the same every time."""
    long, short, empty = _Batch.long(), _Batch.short(), _Batch.with_empty_rows()
    cases: list[KernelCase] = []
    for label, b in (("long", long), ("short", short), ("empty rows", empty)):
        cases += [c for make in b.index_stages() for c in make(label)]
    cases += [
        *_staged_writes(),
        *_gathers(),
        *_caching(),
        *_attention(),
        *_witness(),
        *_sampling_steps(),
        *_temperature(),
        *_limits(),
        *_draws(),
        _far_draws(),
        *_logprobs(),
        *_noise(),
        *_sharded_slots(),
        *_local_lengths(),
        *_kernel_blocks(),
        *_late_tokens(),
        *_row_moves(),
    ]
    return cases


class _Batch:
    """N rows, R requests in them; `requests`: (known, computed, scheduled, logits rows) of each."""

    def __init__(self, n: int, k: int, requests: list[tuple[int, int, int, int]], rows: list[int], seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.n, self.k, self.r, self.m = n, k, len(requests), 96
        self.rows = np.array(rows, np.int64)
        self.idx_mapping = np.full(n, NO_ROW, np.int64)
        self.idx_mapping[: self.r] = rows
        self.prefill_len = rng.integers(1, 60, n).astype(np.int32)
        self.computed = rng.integers(0, 60, n).astype(np.int32)
        known, computed, scheduled, logits = (np.array(column, np.int32) for column in zip(*requests, strict=True))
        self.prefill_len[rows], self.computed[rows] = known, computed
        self.num_logits = logits
        self.query_start_loc, self.cu_num_logits = self._starts(scheduled), self._starts(logits)
        self.scheduled = scheduled
        self.t = int(scheduled.sum())
        self.buffer = self.t + (37 if n > self.r else 0)  # a full batch leaves no room behind its tokens
        self.seq_lens = np.zeros(n, np.int32)
        self.seq_lens[: self.r] = computed + scheduled

    @classmethod
    def long(cls) -> _Batch:
        """Queries and runs of drafts longer than two tiles, and each way of standing to the known tokens."""
        requests = [
            (40, 40, 35, 35), (30, 30, 1, 1), (60, 5, 37, 1), (36, 16, 20, 1), (30, 20, 12, 3), (9, 8, 4, 4),
            (20, 23, 18, 18), (50, 49, 1, 1), (25, 25, 3, 3),
        ]  # fmt: skip
        return cls(31, 34, requests, [30, 4, 17, 2, 0, 9, 21, 12, 5], seed=1)

    @classmethod
    def short(cls) -> _Batch:
        """More requests than a tile holds, and no row without one; the last row is full to its last token."""
        requests = [(10, 8 + i % 5, 1 + i % 2, 1 + i % 2) for i in range(19)] + [(11, 11, 3, 3)]
        requests[7] = (96, 90, 6, 1)
        rows = [int(r) for r in np.random.default_rng(5).permutation(19)]
        return cls(20, 2, requests, [*rows[:7], 19, *rows[7:]], seed=2)

    @classmethod
    def with_empty_rows(cls) -> _Batch:
        requests = [(7, 7, 0, 0), (5, 9, 1, 1), (7, 3, 0, 0), (8, 7, 17, 17), (9, 9, 0, 0)]
        return cls(6, 17, requests, [3, 1, 5, 0, 2], seed=3)

    def _starts(self, lengths: np.ndarray) -> np.ndarray:
        padded = np.zeros(self.n, np.int32)
        padded[: self.r] = lengths
        return np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)

    @property
    def positions(self) -> np.ndarray:
        out = np.full(self.buffer, INT64_MAX // 2)
        runs = [self.computed[row] + np.arange(n) for row, n in zip(self.rows, self.scheduled, strict=True)]
        out[: self.t] = np.concatenate(runs)
        return out

    def index_stages(self) -> list[Callable[[str], Iterator[KernelCase]]]:
        return [self.starts, self.prefill, self.lengths, self.expansion, self.combination, self.slots, self.after]

    def starts(self, label: str) -> Iterator[KernelCase]:
        yield _stage("prepare_query_start_loc", {
            "num_scheduled_tokens": self.scheduled, "num_reqs": self.r, "query_start_loc": _poisoned(self.n + 1),
        }, label=label)  # fmt: skip

    def prefill(self, label: str) -> Iterator[KernelCase]:
        for lookahead in (1, 3):
            yield _stage("prepare_prefill_inputs", {
                "idx_mapping": self.idx_mapping, "query_start_loc": self.query_start_loc,
                "all_token_ids": self.rng.integers(0, 1000, (self.n, self.m)).astype(np.int32),
                "prefill_len": self.prefill_len, "num_computed_tokens": self.computed, "num_reqs": self.r,
                "input_ids": _poisoned(self.buffer), "next_prefill_tokens": _poisoned((lookahead, self.n)),
            }, label=f"{label}, lookahead {lookahead}")  # fmt: skip

    def lengths(self, label: str) -> Iterator[KernelCase]:
        yield _stage("prepare_pos_seq_lens", {
            "idx_mapping": self.idx_mapping, "query_start_loc": self.query_start_loc,
            "num_computed_tokens": self.computed, "num_reqs": self.r,
            "positions": _poisoned(self.buffer, np.int64), "seq_lens": _poisoned(self.n),
        }, label=label)  # fmt: skip

    def expansion(self, label: str) -> Iterator[KernelCase]:
        size = int(self.num_logits.sum()) + 21
        yield _stage("expand_idx_mapping", {
            "idx_mapping": self.idx_mapping, "cu_num_logits": self.cu_num_logits, "num_reqs": self.r,
            "expanded_idx_mapping": _poisoned(size, np.int64), "expanded_local_pos": _poisoned(size),
        }, label=label)  # fmt: skip

    def combination(self, label: str) -> Iterator[KernelCase]:
        if not self.scheduled.all():
            return  # a request without tokens has no last one
        size = int(self.num_logits.sum()) + 21
        yield _stage("combine_sampled_and_draft_tokens", {
            "idx_mapping": self.idx_mapping, "query_start_loc": self.query_start_loc, "seq_lens": self.seq_lens,
            "prefill_len": self.prefill_len, "last_sampled_tokens": self.rng.integers(0, 1000, self.n),
            "draft_tokens": self.rng.integers(0, 1000, (self.n, self.k)), "cu_num_logits": self.cu_num_logits,
            "num_reqs": self.r, "input_ids": _poisoned(self.buffer), "logits_indices": _poisoned(size, np.int64),
        }, label=label)  # fmt: skip

    def slots(self, label: str) -> Iterator[KernelCase]:
        mapping = self.idx_mapping.copy()
        mapping[1] = NO_ROW
        sizes, enabled = [16, 5, 4], [True, True, False]
        # Ids so large that a slot needs 64 bits; the table of a group without slots is too narrow to be read.
        tables = [
            2**31 - 1 - self.rng.integers(0, 1000, (self.n, -(-self.m // s) if on else 1))
            for s, on in zip(sizes, enabled, strict=True)
        ]
        yield _stage("compute_slot_mappings", {
            "idx_mapping": mapping, "query_start_loc": self.query_start_loc, "positions": self.positions,
            "block_sizes": sizes, "slot_mapping_enabled": enabled, "dcp_sharded": enabled, "dcp_size": 1, "dcp_rank": 0,
            "dcp_interleave": 1, "num_reqs": self.r, "block_tables": [t.astype(np.int32) for t in tables],
            "slot_mappings": _poisoned((3, self.buffer), np.int64),
        }, label=label)  # fmt: skip

    def after(self, label: str) -> Iterator[KernelCase]:
        sampled, rejected = _poisoned(self.n), np.zeros(self.n, np.int32)
        sampled[: self.r] = self.rng.integers(0, self.num_logits + 1)
        sampled[[0, self.r - 1]] = self.num_logits[[0, -1]]
        yield _stage("count_sampled_and_rejected", {
            "idx_mapping": self.idx_mapping, "seq_lens": self.seq_lens, "prefill_len": self.prefill_len,
            "cu_num_logits": self.cu_num_logits, "num_reqs": self.r, "num_sampled": sampled,
            "num_rejected": _poisoned(self.n),
        }, label=label)  # fmt: skip
        mapping = self.idx_mapping.copy()
        mapping[1] = NO_ROW
        rejected[: self.r] = self.num_logits - sampled[: self.r]
        yield _stage("post_update", {
            "idx_mapping": mapping, "query_start_loc": self.query_start_loc,
            "sampled_token_ids": self.rng.integers(0, 1000, (self.n, 1 + self.k)), "num_sampled": sampled,
            "num_rejected": rejected, "num_reqs": self.r, "last_sampled_tokens": _poisoned(self.n, np.int64),
            "total_len": self.rng.integers(0, self.m - 42, self.n).astype(np.int32),
            "all_token_ids": _poisoned((self.n, self.m)), "num_computed_tokens": self.computed,
        }, label=label)  # fmt: skip


def _poisoned(shape: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.full(shape, POISON, dtype)


def _staged_writes() -> Iterator[KernelCase]:
    rng = np.random.default_rng(6)
    for dtype in (np.int32, np.int64, np.float32):
        lengths = np.array([17, 1, 33, 16, 5])
        yield _stage("apply_staged_writes", {
            "indices": np.int32([6, 2, 0, 8, 3]), "starts": np.int32([40, 0, 17, 44, 3]),
            "contents": rng.integers(0, 1000, lengths.sum()).astype(dtype),
            "cu_lens": np.cumsum(lengths, dtype=np.int32),
            "num_writes": 5, "base": _poisoned((9, 60), dtype),
        }, label=np.dtype(dtype).name)  # fmt: skip


def _gathers() -> Iterator[KernelCase]:
    rng = np.random.default_rng(7)
    n, m = 11, 40
    sizes, reach = [4, 16, 4, 5, 1], [0, 7, 6, 1, 9]
    widths = [-(-m // s) for s in sizes]
    # What has been computed: around the places where one more block falls behind the window, and 0.
    computed = np.int32([0, 6, 7, 9, 10, 22, 23, 24, 30, 14, 37])
    num_blocks = np.stack([-(-(computed + 3) // s) for s in sizes]).astype(np.int32)
    num_blocks[:, 4] = 0
    mapping = np.full(n, NO_ROW, np.int64)
    mapping[:8] = [8, 3, 0, 6, 4, 10, 5, 2]
    for num_rows in (10, 8):
        yield _stage("gather_block_tables", {
            "idx_mapping": mapping, "num_computed_tokens": computed, "num_blocks": num_blocks, "block_sizes": sizes,
            "window_reach": reach, "num_reqs": 8, "num_rows": num_rows,
            "block_tables": [rng.integers(1, 1000, (n, w)).astype(np.int32) for w in widths],
            "input_block_tables": [_poisoned((n, w + 2)) for w in widths],
        }, label=f"{num_rows} rows")  # fmt: skip


def _caching() -> Iterator[KernelCase]:
    rng = np.random.default_rng(8)
    for dtype, heads_size in ((np.float32, (3, 5)), (np.int64, (1, 1))):
        slots = np.array([0, *rng.permutation(np.arange(1, 39))[:17], 39], np.int64)
        slots[[3, 11]] = -1
        key, value = (rng.integers(0, 1000, (19, *heads_size)).astype(dtype) for _ in range(2))
        yield _stage("reshape_and_cache", {
            "key": key, "value": value, "slot_mapping": slots, "key_cache": _poisoned((10, 4, *heads_size), dtype),
            "value_cache": _poisoned((10, 4, *heads_size), dtype),
        }, label=np.dtype(dtype).name)  # fmt: skip


def _paged(rng: np.random.Generator, requests: list[tuple[int, int]], block_size: int, window: int | None) -> Any:
    """Block tables for requests of (computed, scheduled): (table, table with traps, places that a query may read).

    A trap stands where no block may be looked up: behind the last key and, wholly, behind the window.
    """
    width = max(-(-(a + b) // block_size) for a, b in requests)
    ids = rng.permutation(len(requests) * width) + 1
    table = ids.reshape(len(requests), width).astype(np.int32)
    readable = np.zeros((len(ids) + 1, block_size), bool)
    trapped = np.full_like(table, NOWHERE)
    for i, (computed, scheduled) in enumerate(requests):
        if scheduled:
            first = 0 if window is None else max(computed - window + 1, 0)
            for j in range(first, computed + scheduled):
                readable[table[i, j // block_size], j % block_size] = True
                trapped[i, j // block_size] = table[i, j // block_size]
    return table, trapped, readable


# The longest request is the last, so that behind its blocks the table ends.
_MIXED = [(40, 1), (0, 20), (31, 9), (16, 1), (3, 0), (25, 17)]
_DECODES = [(0, 1), (15, 1), (16, 1), (49, 1)]


def _batch_of(requests: list[tuple[int, int]]) -> dict[str, Any]:
    counts = [b for _, b in requests]
    return {
        "query_start_loc": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        "seq_lens": np.int32([a + b for a, b in requests]), "num_reqs": len(requests),
    }  # fmt: skip


def _attention() -> Iterator[KernelCase]:
    rng = np.random.default_rng(9)
    for requests, block_size, heads, size, window, scale in (
        (_MIXED, 4, (6, 2), 24, None, 0.3), (_MIXED, 5, (4, 4), 16, 6, 0.3), (_DECODES, 16, (9, 1), 16, None, 0.3),
        (_MIXED[1:], 4, (4, 2), 16, 1, 0.3), (_MIXED, 16, (3, 1), 8, 17, 0.3),
        (_DECODES, 3, (2, 1), 16, None, 60.0),  # scores far apart: without a running maximum they overflow
    ):  # fmt: skip
        table, trapped, readable = _paged(rng, requests, block_size, window)
        batch = _batch_of(requests)
        t = int(batch["query_start_loc"][-1])
        query = np.full((t + 35, heads[0], size), np.nan)
        query[:t] = rng.normal(size=(t, heads[0], size))
        keys, values = (np.full((*readable.shape, heads[1], size), np.nan) for _ in range(2))
        keys[readable], values[readable] = rng.normal(size=(2, readable.sum(), heads[1], size))
        exact = {"query": query, "key_cache": keys, "value_cache": values, "out": np.full_like(query, POISON)}
        yield _stage("paged_attention", {
            **{k: v.astype(np.float32) for k, v in exact.items()}, **batch, "block_table": trapped, "scale": scale,
            "window": window, "max_query_len": max(b for _, b in requests),
        }, label=f"block {block_size}, heads {heads}, window {window}", twin={**exact, "block_table": table},
            bounds={"out": 1.5e-5 * max(scale, 0.3)})  # fmt: skip


def _witness() -> Iterator[KernelCase]:
    rng = np.random.default_rng(10)
    many = [(i % 7, 1 + i % 3) for i in range(18)]
    for requests, block_size, window, group in (
        (_MIXED, 4, None, 0), (_MIXED, 5, 6, 1), (_DECODES, 16, 17, 3), (many, 4, 1, 2),
        ([(2, 1), (48, 1)], 7, None, 1),
    ):  # fmt: skip
        table, trapped, readable = _paged(rng, requests, block_size, window)
        batch = _batch_of(requests)
        t = int(batch["query_start_loc"][-1])
        tokens, positions = rng.integers(0, 2**40, (2, *readable.shape, 1, 1))
        yield _stage("witness_attention", {
            "token_cache": tokens, "position_cache": positions, "block_table": trapped, **batch, "window": window,
            "group": group, "hidden": rng.integers(0, 2**63, t + 21).astype(np.uint64),
        }, label=f"group {group}, block {block_size}, window {window}, {len(requests)} requests",
            twin={"block_table": table},
        )  # fmt: skip
    hidden = rng.integers(INT64_MIN, INT64_MAX, 5)
    hidden[:2] = 0, -1

    def logits(side: Side) -> Outputs:
        model = importlib.import_module(f"{side.package}.models.witness").WitnessModel(WitnessConfig(vocab_size=37))
        states = hidden[:, None].view(np.uint64) if side.is_twin else hidden[:, None]
        return {"logits": [side.stages.to_host(model.compute_logits(side.stages.to_device(states.copy())))]}

    yield KernelCase("witness logits", logits)


def _sampling_steps() -> Iterator[KernelCase]:
    for seed, vocab_size, num_rows in SIZES:
        for stage, label, arrays in SamplingBatch(seed, vocab_size, num_rows).calls():
            if num_rows <= MANY_ROWS or stage in BY_REQUEST:
                yield _stage(stage, arrays, label=f"{label}, {vocab_size} tokens")
            if vocab_size == 5 and "bitmask" in "".join(arrays):  # a tile wider than all words of a row
                yield _stage(stage, arrays, label=f"{label}, {vocab_size} tokens at once", tile=64)


def _temperature() -> Iterator[KernelCase]:
    rng = np.random.default_rng(11)
    temperature = np.float32([0.7, 1, 0, 2, 0.01, 1, 1e-3, 3, 0.25])
    rows = np.concatenate([[5, 1, NO_ROW, 0], rng.integers(0, 8, 17), [3], [1] * 15, [7, 3, 9]])
    for num_logits in (21, 38):
        yield _stage("apply_temperature", {
            "expanded_idx_mapping": rows, "temperature": temperature, "num_logits": num_logits,
            "logits": rng.normal(size=(num_logits, 37)).astype(np.float32),
        }, label=f"{num_logits} rows")  # fmt: skip


def _limits() -> Iterator[KernelCase]:
    for label, tile, r, x in limited_rows():
        rows = {"expanded_idx_mapping": r.rows, "num_logits": r.l}
        exact = {"logits": x.astype(np.float64)}
        min_p = {**rows, "min_p": r.min_p, "logits": x}
        yield _stage("apply_min_p", min_p, label=label, tile=tile, twin=exact)
        limits = {**rows, "top_k": r.top_k, "top_p": r.top_p, "logits": x}
        yield _stage("apply_top_k_top_p", limits, label=label, tile=tile, twin=exact)
        yield _drawn_at_once(r, x, "philox" if r.v <= tile else "murmur3", label, tile)
        if r.v > tile:
            for scheme, bits in (("murmur3", 32), ("philox", 31)):
                yield _bounds_of_groups(r, x, scheme, bits, label, tile)
            for alone in (True, False):
                yield _lists_of_candidates(r, x, alone, label, tile)


def _bounds_of_groups(r: LimitedRows, x: np.ndarray, scheme: str, bits: int, label: str, tile: int) -> KernelCase:
    """Bounds of scores by group, against their formula in float64."""

    def words(side: Side) -> np.ndarray:
        drawn = side.call("sample.noise", "noise_words", r.seeds[r.rows], r.positions[: r.l], r.v, scheme)
        signed = drawn.view(np.int32)
        return drawn if bits == 32 else np.where(signed < 0, ~signed, signed).view(np.uint32)

    def run(side: Side) -> Outputs:
        if side.is_twin:
            with np.errstate(invalid="ignore"):
                return {"bests": [r.group_bounds(x, lambda: words(side), bits, tile)]}
        groups, params = (importlib.import_module(f"{side.package}.sample.{m}") for m in ("group_bests", "row_params"))
        move = side.stages.to_device
        tables = (move(a.copy()) for a in (r.rows, r.positions, r.temperature, r.seeds))
        rows = params.look_up_draws(params.Draws(*tables, scheme), None, r.l, r.v, divide=True)
        found = groups.group_bests(rows, scheme, r.l, move(x.copy()), limited=False)
        return {"bests": [side.stages.to_host(found.bests)]}

    return KernelCase(f"group bounds {scheme}, {label}", run, {"bests": lambda b: 3e-3 + 3e-6 * np.abs(b)}, tile)


def _lists_of_candidates(r: LimitedRows, x: np.ndarray, alone: bool, label: str, tile: int) -> KernelCase:
    """Who is listed, and the mass of the row where that is asked for."""

    def run(side: Side) -> Outputs:
        if side.is_twin:
            with np.errstate(over="ignore", divide="ignore"):
                found = r.lists(x, tile, tile, alone=alone)
        else:
            module, groups, params = (
                importlib.import_module(f"{side.package}.sample.{m}")
                for m in ("candidates", "group_bests", "row_params")
            )
            move = side.stages.to_device
            limits = params.Limits(*(move(a.copy()) for a in (r.min_p, r.top_k, r.top_p)))
            tables = (move(a.copy()) for a in (r.rows, r.positions, r.temperature, r.seeds))
            rows = params.look_up_draws(params.Draws(*tables, "murmur3"), limits, r.l, r.v, divide=True)
            logits = move(x.copy())
            lists = module.list_candidates(rows, r.l, logits, groups.group_maxima(r.l, logits), short=not alone)
            found = [side.stages.to_host(a) for a in (lists.entries, lists.lens, lists.totals)]
            found[0] = np.where(np.arange(lists.width) < found[1][:, None], found[0], 0)
        return {name: [array] for name, array in zip(("entries", "lens", "totals"), found, strict=True)}

    return KernelCase(f"candidates {alone=}, {label}", run, {}, tile)


def _drawn_at_once(r: LimitedRows, x: np.ndarray, scheme: str, label: str, tile: int) -> KernelCase:
    """The composite against the twin's steps one by one."""
    common = {"expanded_idx_mapping": r.rows, "num_logits": r.l}
    params = {"temperature": r.temperature, **r.without_greedy()}
    outputs = {"sampled": _poisoned(r.l + 2, np.int64), "faults": _poisoned(r.l + 2)}

    def step_by_step(side: Side, limited: bool) -> Outputs:
        logits = side.stages.run("apply_temperature", **common, temperature=r.temperature, logits=x)["logits"]
        logits = logits.astype(np.float64)
        for name, used in (("apply_min_p", ("min_p",)), ("apply_top_k_top_p", ("top_k", "top_p"))):
            if limited:
                logits = side.stages.run(name, **common, **{u: params[u] for u in used}, logits=logits)["logits"]
        drawn = side.stages.run(
            "gumbel_sample", **common, positions=r.positions, temperature=r.temperature, seeds=r.seeds, noise=scheme,
            logits=logits, **outputs,
        )  # fmt: skip
        return {f"{name}, {limited=}": [array] for name, array in drawn.items()}

    def at_once(side: Side, limited: bool) -> Outputs:
        draw, parameters = (importlib.import_module(f"{side.package}.sample.{m}") for m in ("draw", "row_params"))
        move = side.stages.to_device
        limits = parameters.Limits(*(move(params[n].copy()) for n in ("min_p", "top_k", "top_p"))) if limited else None
        out = {name: move(array.copy()) for name, array in outputs.items()}
        draw.draw(
            move(r.rows.copy()), move(r.positions.copy()), move(r.temperature.copy()), move(r.seeds.copy()), scheme,
            limits, r.l, move(x.copy()), *out.values(),
        )  # fmt: skip
        return {f"{name}, {limited=}": [side.stages.to_host(array)] for name, array in out.items()}

    def run(side: Side) -> Outputs:
        with np.errstate(invalid="ignore"):
            way = step_by_step if side.is_twin else at_once
            return {**way(side, False), **way(side, True)}

    return KernelCase(f"draw {scheme}, {label}", run, {}, tile)


def _draws() -> Iterator[KernelCase]:
    rng = np.random.default_rng(12)
    temperature = np.float32([0.7, 1, 0, 2, 0, 1, 0.5, 0.25])
    seeds = rng.integers(INT64_MIN, INT64_MAX, 8)
    for scheme in ("murmur3", "philox"):
        for num_logits, vocab_size in ((21, 37), (5, 300)):
            rows = np.concatenate([[0, 4, NO_ROW, 1, 7], rng.integers(0, 8, num_logits - 5)])
            logits = rng.integers(-2, 3, (num_logits, vocab_size)).astype(np.float32)
            positions = rng.integers(0, 2**33, num_logits)
            common = (rows, positions, temperature, seeds, scheme, num_logits, logits)
            label = f"{scheme}, {num_logits} x {vocab_size}"
            yield _function(f"gumbel_scores {label}", "sample.gumbel", "gumbel_scores", *common, bound=4e-6)
            names = ("expanded_idx_mapping", "positions", "temperature", "seeds", "noise", "num_logits", "logits")
            arrays = dict(zip(names, common, strict=True)) | {
                "sampled": _poisoned(num_logits + 2, np.int64), "faults": _poisoned(num_logits + 2)
            }  # fmt: skip
            yield _stage("gumbel_sample", arrays, label=label)
            yield _stage("gumbel_sample", arrays | {"temperature": np.zeros_like(temperature)}, label=f"greedy {label}")


def _logprobs() -> Iterator[KernelCase]:
    """Ties, both zeros, neighbouring floats, far values, -inf, NaN, +inf, a row of each alone; few of many tokens and
    all of them; lists in odd rows. Inputs end with the last row, so that a step further is a step outside."""
    rng = np.random.default_rng(15)
    near = np.nextafter(np.float32(-1), np.float32([-2, 0]))
    num_listed = np.int32([3, 0, 0, 5, 1, 0, 17, 2])
    listed = np.full((8, 128), NOWHERE, np.int32)
    for row, n in enumerate(num_listed):
        listed[row, :n] = rng.integers(0, 37, n)
    for num_logits, vocab_size, num_top, tile in (
        (21, 37, 0, 16), (5, 300, 4, 128), (11, 37, 17, 16), (3, 1200, 17, 128), (7, 70, 17, 64), (11, 37, 37, 128),
    ):  # fmt: skip
        width = max(num_top, 17)
        logits = rng.normal(0, 3, (num_logits, vocab_size)).astype(np.float32)
        logits[0, -1] = 300.0
        logits[1::5] = rng.choice(np.float32([1, 0, -0.0, -1, *near]), logits[1::5].shape)
        logits[2::5, ::2] = -np.inf
        logits[3::10] = -np.inf
        logits[4::10, 1::3] = np.nan
        logits[6::10] = np.where(rng.random(logits[6::10].shape) < 0.5, np.float32(np.nan), np.float32(-np.inf))
        logits[9::10, 7] = np.inf
        tokens = rng.integers(0, vocab_size, num_logits)
        label = f"{num_logits} x {vocab_size}"
        yield _stage("compute_logprob_stats", {
            "token_ids": tokens, "num_logits": num_logits, "logits": logits,
            "log_sum": np.full(num_logits + 1, np.float32(POISON)), "ranks": _poisoned(num_logits + 1, np.int64),
        }, label=f"{label}, {num_top}", bounds={"log_sum": 5e-6})  # fmt: skip
        columns = _poisoned((num_logits + 1, width))
        yield _stage("select_top_tokens", {
            "num_logits": num_logits, "num_top": num_top, "logits": logits, "columns": columns,
        }, label=f"{num_top} of {label}", tile=tile)  # fmt: skip
        mapping = np.concatenate([[6, NO_ROW, 0], rng.integers(0, 8, num_logits - 3)])
        yield _stage("select_listed_tokens", {
            "expanded_idx_mapping": mapping, "num_listed": num_listed, "listed_token_ids": listed,
            "num_logits": num_logits, "columns": columns,
        }, label=f"{label}, {num_top}")  # fmt: skip
        chosen = rng.integers(-1, vocab_size, (num_logits, width)).astype(np.int32)
        chosen[0, 3] = -1
        yield _stage("gather_logprobs", {
            "token_ids": tokens, "columns": chosen, "log_sum": rng.normal(size=num_logits).astype(np.float32),
            "num_logits": num_logits, "logits": logits, "logprob_token_ids": _poisoned((num_logits + 1, 1 + width)),
            "logprobs": np.full((num_logits + 1, 1 + width), np.float32(POISON)),
        }, label=f"{label}, {num_top}")  # fmt: skip


def _far_draws() -> KernelCase:
    """Logits so far out that float32 forgets the noise: all scores tie, the bounds of their groups do not."""
    rng = np.random.default_rng(16)
    logits = np.full((5, 150), np.float32(1e9))
    logits[1::2, :70] = -np.inf
    arrays = {
        "expanded_idx_mapping": np.zeros(5, np.int64), "positions": rng.integers(0, 999, 5), "noise": "murmur3",
        "temperature": np.ones(1, np.float32), "seeds": np.int64([7]), "num_logits": 5, "logits": logits,
        "sampled": _poisoned(5, np.int64), "faults": _poisoned(5),
    }  # fmt: skip

    def run(side: Side) -> Outputs:
        if side.is_twin:  # in float64, which forgets nothing
            return {"sampled": [np.int64([0, 70, 0, 70, 0])], "faults": [np.zeros(5, np.int32)]}
        return {name: [array] for name, array in side.stages.run("gumbel_sample", **arrays).items()}

    return KernelCase("gumbel_sample, scores that tie", run)


def _noise() -> Iterator[KernelCase]:
    rng = np.random.default_rng(13)
    edges = np.int64([0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, INT64_MIN, INT64_MAX])
    seeds = np.concatenate([edges, rng.integers(INT64_MIN, INT64_MAX, 10)])
    positions = np.concatenate([edges[::-1], rng.integers(0, 2**40, 10)])
    around = [2**k + d for k in range(32) for d in (-1, 0, 1)] + [2**32 - 2**k for k in range(1, 32)]
    words = np.array(around, np.uint32)
    # A word whose uniform rounds to 1, where the noise would be infinite: token 148238 of seed 7 at position 29.
    one = (np.int64([7]), np.int64([29]), 148240, "murmur3")
    yield _function("noise of a uniform of 1", "sample.noise", "gumbel_noise", *one, bound=_noise_bound, tile=65536)
    for scheme in ("murmur3", "philox"):
        yield _function(f"words {scheme}", "sample.noise", "noise_words", seeds, positions, 37, scheme)
        yield _function(f"uniforms {scheme}", "sample.noise", "uniforms", words, scheme)
        for vocab_size, tile in ((37, 16), (20000, 65536)):
            yield _function(
                f"noise {scheme}, {vocab_size}", "sample.noise", "gumbel_noise", seeds, positions, vocab_size, scheme,
                bound=_noise_bound, tile=tile,
            )  # fmt: skip


def _noise_bound(exact: np.ndarray) -> np.ndarray:
    """Between 2.015 and 4 the noise is the series for small u, which is as good as float32 allows; else as stated."""
    return np.where((exact > 2.015) & (exact < 4), 3.5e-7, 3e-6)


def _sharded_slots() -> Iterator[KernelCase]:
    """Runs of several tiles, a request without a row whose positions lead out of its table, three kinds of groups."""
    b = _Batch.long()
    mapping = b.idx_mapping.copy()
    mapping[1] = NO_ROW
    positions = b.positions
    positions[b.query_start_loc[1] : b.query_start_loc[2]] = INT64_MAX // 2
    for size, rank, interleave in ((2, 1, 1), (3, 0, 4), (3, 2, 2), (1, 0, 4)):
        # What a group without slots keeps is too narrow to be read, and so is a sharded one, but for its own positions.
        sizes, enabled, sharded = [16, 4, 4, 8], [True, True, False, True], [False, True, True, True]
        shares = [size if s else 1 for s in sharded]
        widths = [-(-b.m // (s * n)) if on else 1 for s, n, on in zip(sizes, shares, enabled, strict=True)]
        tables = [(2**31 - 1 - b.rng.integers(0, 1000, (b.n, w))).astype(np.int32) for w in widths]
        yield _stage("compute_slot_mappings", {
            "idx_mapping": mapping, "query_start_loc": b.query_start_loc, "positions": positions,
            "block_sizes": sizes, "slot_mapping_enabled": enabled, "dcp_sharded": sharded, "dcp_size": size,
            "dcp_rank": rank, "dcp_interleave": interleave, "num_reqs": b.r, "block_tables": tables,
            "slot_mappings": _poisoned((4, b.buffer), np.int64),
        }, label=f"rank {rank} of {size}, interleave {interleave}")  # fmt: skip


def _local_lengths() -> Iterator[KernelCase]:
    rng = np.random.default_rng(31)
    for size, rank, interleave in ((2, 0, 1), (2, 1, 8), (3, 1, 4), (5, 4, 3), (1, 0, 1)):
        for n, num_reqs in ((37, 35), (37, 3), (16, 16)):
            seq_lens = rng.integers(0, 60, n).astype(np.int32)
            seq_lens[:3] = [0, 2**31 - 1, size * interleave]
            yield _stage("compute_dcp_local_seq_lens", {
                "seq_lens": seq_lens, "dcp_size": size, "dcp_rank": rank, "dcp_interleave": interleave,
                "num_reqs": num_reqs, "dcp_local_seq_lens": _poisoned(n),
            }, label=f"{num_reqs} of {n} on rank {rank} of {size}, interleave {interleave}")  # fmt: skip


def _kernel_blocks() -> Iterator[KernelCase]:
    rng = np.random.default_rng(32)
    for parts, stride, width, num_rows in ((2, 2, 9, 7), (3, 5, 7, 8), (1, 4, 20, 3), (16, 16, 3, 1)):
        table = rng.integers(0, 2**26, (8, width)).astype(np.int32)
        table[1, 2:] = table[-1] = 0
        yield _stage("map_to_kernel_block_table", {
            "block_table": table, "blocks_per_kv_block": parts, "kernel_block_stride": stride, "num_rows": num_rows,
            "kernel_block_table": _poisoned((8, width * parts)),
        }, label=f"{parts} parts, {stride} apart")  # fmt: skip


def _late_tokens() -> Iterator[KernelCase]:
    """More requests than a tile holds; behind them, rows of an earlier step; sources in the last row, and a token wider
    than an input id."""
    rng = np.random.default_rng(33)
    for n, r, patched in ((37, 35, 20), (37, 16, 16), (20, 20, 0)):
        previous = rng.integers(0, n, n)
        previous[: r - patched] = NO_ROW
        previous[:r] = rng.permutation(previous[:r])
        previous[r - 1] = n - 1 if patched else NO_ROW
        scheduled = np.where(previous[:r] == NO_ROW, rng.integers(1, 4, r), 1)
        starts = np.concatenate([[0], np.cumsum(scheduled), np.full(n - r, scheduled.sum())]).astype(np.int32)
        yield _stage("patch_input_ids", {
            "previous_rows": previous, "query_start_loc": starts,
            "last_sampled_tokens": rng.integers(2**30, 2**31, n), "num_reqs": r,
            "input_ids": _poisoned(int(starts[-1]) + (5 if r < n else 0)),
        }, label=f"{patched} of {r} requests")  # fmt: skip


def _row_moves() -> Iterator[KernelCase]:
    """Chains, cycles and clearings in tables of several widths and types; rows that end with their tables."""
    rng = np.random.default_rng(34)
    n, widths = 12, (40, 1, 33)
    for label, pairs in (
        ("a chain and a cycle", [(3, 1), (5, 3), (NO_ROW, 5), (11, 0), (7, 11), (0, 7), (NO_ROW, 9)]),
        ("clearings", [(NO_ROW, 11), (NO_ROW, 0)]),
        ("one move", [(11, 4)]),
    ):
        tables = [rng.integers(1, 2**31, (n, w)).astype(np.int32) for w in widths]
        tables[2] = rng.normal(size=(n, widths[2])).astype(np.float32)
        listed = [
            (k, source, target, w if target == 11 else int(rng.integers(1, w + 1)))
            for source, target in pairs for k, w in enumerate(widths)
        ]  # fmt: skip
        moves = np.array(listed, np.int64)[rng.permutation(len(listed))].T
        yield _stage("move_rows", {
            "moves": np.ascontiguousarray(moves), "max_length": int(moves[3].max()), "tables": tables,
        }, label=label)  # fmt: skip
