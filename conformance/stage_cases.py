"""Random calls of single stages: a legal mixed batch, garbage in each output, and which clause judges which element.

The inputs of later stages are made here from the same batch, never by running earlier stages, so that one wrong stage
is one finding. The sampler's stages are in `conformance.sampling_stage_cases`; `conformance.stage_laws` runs the cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.dense_stage_cases import dense_cases
from conformance.sampling_stage_cases import SamplingBatch
from conformance.slot_stage_cases import SlotBatch
from conformance.stage_case import (
    ATTENTION,
    GARBAGE,
    KEPT,
    NO_ROW_SKIPPED,
    NO_SLOTS,
    VALUES,
    WHOLE,
    WIDE_SLOTS,
    StageCase,
)
from runner_api import NO_ROW, KVCacheSpec, StageSet


def draw_cases(random: np.random.Generator, oracle: StageSet) -> Iterator[StageCase]:
    """Every stage once or more, on one random batch. `oracle` tells how far attention may be off for its rounding."""
    b = _Batch(random)
    yield from b.staged_writes()
    yield b.query_start()
    yield b.prefill()
    yield b.positions_and_lengths()
    yield b.expansion()
    yield b.combination()
    yield b.gathered_tables()
    yield from b.slots()
    yield b.caching()
    yield from b.attention(oracle)
    yield from b.sampling()
    yield from b.after()
    yield from b.slot_variants()
    yield from dense_cases(random)


class _Batch:
    """A random mixed batch: N rows, R requests, K drafts, T tokens, M tokens of a request."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        n, r, k, m = 9, int(random.integers(3, 7)), int(random.integers(1, 4)), 96
        self.n, self.r, self.k, self.m = n, r, k, m
        self.idx_mapping = random.permutation(n).astype(np.int64)
        rows = self.idx_mapping[:r]
        self.drafts = random.integers(0, k + 1, r)
        self.drafts[0] = k
        self.scheduled = (1 + self.drafts).astype(np.int32)
        self.computed = random.integers(1, 40, n).astype(np.int32)
        self.prefill_len = random.integers(1, 40, n).astype(np.int32)
        for i, row in enumerate(rows):
            if i == 0 or i % 2 == 0:  # decodes and verifications
                self.computed[row] = self.prefill_len[row] + int(random.integers(0, 9))
            else:  # chunks; every other one ends the known tokens
                left = int(random.integers(1, 12))
                self.prefill_len[row] = self.computed[row] + left
                self.drafts[i] = 0
                self.scheduled[i] = left if i % 4 == 1 else max(left - 1, 1)
        self.query_start_loc = self._starts(self.scheduled)
        self.cu_num_logits = self._starts(1 + self.drafts)
        self.t = int(self.query_start_loc[-1])
        self.num_logits = int(self.cu_num_logits[-1])
        self.buffer = self.t + 6
        self.owner = np.repeat(np.arange(r), self.scheduled)
        offset = np.arange(self.t) - self.query_start_loc[self.owner]
        self.positions = self._full(self.buffer, np.int64)
        self.positions[: self.t] = self.computed[rows][self.owner] + offset
        self.seq_lens = np.zeros(n, np.int32)
        self.seq_lens[:r] = self.computed[rows] + self.scheduled
        self.tokens = random.integers(10, 64, (n, m)).astype(np.int32)
        self.draft_tokens = random.integers(10, 64, (n, k)).astype(np.int64)
        self.last_sampled = random.integers(10, 64, n).astype(np.int64)
        self.block_sizes = [4, 16]
        widths = [KVCacheSpec(s, 1, 1, "int64").block_table_width(m) for s in self.block_sizes]
        self.num_blocks_total = 1 + n * (m // 4)
        self.tables = [
            (1 + random.permutation(n * (m // 4)))[: n * (m // s)].reshape(n, -1).astype(np.int32)
            for s in self.block_sizes
        ]
        self.tables = [np.pad(t, ((0, 0), (0, w - t.shape[1]))) for t, w in zip(self.tables, widths, strict=True)]

    def _starts(self, lengths: np.ndarray) -> np.ndarray:
        """int32[N+1], tail as it must be."""
        starts = np.full(self.n + 1, int(lengths.sum()), np.int32)
        starts[: self.r + 1] = np.concatenate([[0], np.cumsum(lengths)])
        return starts

    @staticmethod
    def _full(shape: Any, dtype: Any) -> np.ndarray:
        return np.full(shape, GARBAGE, dtype)

    @staticmethod
    def _from(size: int, start: int) -> np.ndarray:
        """Mask of one axis from `start` on."""
        return np.arange(size) >= start

    def staged_writes(self) -> Iterator[StageCase]:
        rows = self.random.permutation(self.n)[:4]
        lengths = self.random.integers(1, 9, 4)
        starts = self.random.integers(1, 30, 4)
        base = self._full((self.n, self.m), np.int32)
        inside = np.zeros(base.shape, bool)
        for row, start, length in zip(rows, starts, lengths, strict=True):
            inside[row, start : start + length] = True
        yield StageCase(
            "apply_staged_writes",
            {
                "indices": rows.astype(np.int32), "starts": starts.astype(np.int32),
                "contents": self.random.integers(10, 64, lengths.sum()).astype(np.int32),
                "cu_lens": np.cumsum(lengths).astype(np.int32), "num_writes": 4, "base": base,
            },
            [(VALUES, "base", inside), (KEPT, "base", ~inside)],
        )  # fmt: skip

    def query_start(self) -> StageCase:
        tail = self._from(self.n + 1, self.r + 1)
        return StageCase(
            "prepare_query_start_loc",
            {
                "num_scheduled_tokens": self.scheduled, "num_reqs": self.r,
                "query_start_loc": self._full(self.n + 1, np.int32),
            },
            [(VALUES, "query_start_loc", ~tail), (WHOLE, "query_start_loc", tail)],
        )  # fmt: skip

    def prefill(self) -> StageCase:
        rows = self.idx_mapping[: self.r]
        prefilling = self.computed[rows] < self.prefill_len[rows]
        written = np.zeros(self.buffer, bool)
        written[: self.t] = prefilling[self.owner]
        touched = np.zeros((1, self.n), bool)
        touched[0, rows[prefilling]] = True
        return StageCase(
            "prepare_prefill_inputs",
            {
                "idx_mapping": self.idx_mapping, "query_start_loc": self.query_start_loc,
                "all_token_ids": self.tokens, "prefill_len": self.prefill_len,
                "num_computed_tokens": self.computed, "num_reqs": self.r,
                "input_ids": self._full(self.buffer, np.int32),
                "next_prefill_tokens": self._full((1, self.n), np.int32),
            },
            [
                (VALUES, "input_ids", written), (KEPT, "input_ids", ~written),
                (VALUES, "next_prefill_tokens", touched), (KEPT, "next_prefill_tokens", ~touched),
            ],
        )  # fmt: skip

    def positions_and_lengths(self) -> StageCase:
        tokens, reqs = self._from(self.buffer, self.t), self._from(self.n, self.r)
        return StageCase(
            "prepare_pos_seq_lens",
            {
                "idx_mapping": self.idx_mapping, "query_start_loc": self.query_start_loc,
                "num_computed_tokens": self.computed, "num_reqs": self.r,
                "positions": self._full(self.buffer, np.int64), "seq_lens": self._full(self.n, np.int32),
            },
            [
                (VALUES, "positions", ~tokens), (WHOLE, "positions", tokens),
                (VALUES, "seq_lens", ~reqs), (WHOLE, "seq_lens", reqs),
            ],
        )  # fmt: skip

    def expansion(self) -> StageCase:
        size = self.n * (1 + self.k)
        tail = self._from(size, self.num_logits)
        return StageCase(
            "expand_idx_mapping",
            {
                "idx_mapping": self.idx_mapping, "cu_num_logits": self.cu_num_logits, "num_reqs": self.r,
                "expanded_idx_mapping": self._full(size, np.int64), "expanded_local_pos": self._full(size, np.int32),
            },
            [
                (clause, name, mask)
                for name in ("expanded_idx_mapping", "expanded_local_pos")
                for clause, mask in ((VALUES, ~tail), (WHOLE, tail))
            ],
        )  # fmt: skip

    def combination(self) -> StageCase:
        size = self.n * (1 + self.k)
        logits, tokens = self._from(size, self.num_logits), self._from(self.buffer, self.t)
        return StageCase(
            "combine_sampled_and_draft_tokens",
            {
                "idx_mapping": self.idx_mapping, "query_start_loc": self.query_start_loc, "seq_lens": self.seq_lens,
                "prefill_len": self.prefill_len, "last_sampled_tokens": self.last_sampled,
                "draft_tokens": self.draft_tokens, "cu_num_logits": self.cu_num_logits, "num_reqs": self.r,
                "input_ids": self._full(self.buffer, np.int32), "logits_indices": self._full(size, np.int64),
            },
            [
                (VALUES, "logits_indices", ~logits), (WHOLE, "logits_indices", logits),
                (VALUES, "input_ids", ~tokens), (WHOLE, "input_ids", tokens),
            ],
        )  # fmt: skip

    def gathered_tables(self) -> StageCase:
        num_rows = self.r + 2
        num_blocks = np.stack([-(-(self.computed + 20) // s) for s in self.block_sizes]).astype(np.int32)
        out = [self._full(t.shape, np.int32) for t in self.tables]
        rows = self.idx_mapping[: self.r]
        defined, blank, beyond = [], [], []
        for g, t in enumerate(self.tables):
            mask = np.zeros(t.shape, bool)
            mask[: self.r] = np.arange(t.shape[1])[None, :] < num_blocks[g, rows][:, None]
            defined.append(mask)
            lines = np.arange(self.n)[:, None].repeat(t.shape[1], 1)
            blank.append((lines >= self.r) & (lines < num_rows))
            beyond.append(lines >= num_rows)
        return StageCase(
            "gather_block_tables",
            {
                "idx_mapping": self.idx_mapping, "num_computed_tokens": self.computed, "num_blocks": num_blocks,
                "block_sizes": self.block_sizes, "window_reach": [0, 7], "num_reqs": self.r, "num_rows": num_rows,
                "block_tables": self.tables, "input_block_tables": out,
            },
            [
                (clause, "input_block_tables", np.concatenate(masks, axis=1))
                for clause, masks in ((VALUES, defined), (WHOLE, blank), (KEPT, beyond))
            ],
        )  # fmt: skip

    def slots(self) -> Iterator[StageCase]:
        mapping = self.idx_mapping.copy()
        mapping[self.r - 1] = NO_ROW
        real = np.zeros((2, self.buffer), bool)
        real[:, : self.t] = self.owner < self.r - 1
        skipped = np.zeros_like(real)
        skipped[:, : self.t] = self.owner == self.r - 1
        tail = np.broadcast_to(self._from(self.buffer, self.t), real.shape)
        wide = [t + 2**27 for t in self.tables]
        first = np.arange(2)[:, None] == 0
        regions = [(VALUES, real), (NO_ROW_SKIPPED, skipped), (WHOLE, tail)]
        for tables, enabled, where in (
            (self.tables, [True, True], regions),
            (wide, [True, True], [(WIDE_SLOTS, real)]),
            (self.tables, [False, True], [(NO_SLOTS, np.broadcast_to(first, real.shape)), (VALUES, real & ~first)]),
        ):
            yield StageCase(
                "compute_slot_mappings",
                {
                    "idx_mapping": mapping, "query_start_loc": self.query_start_loc, "positions": self.positions,
                    "block_sizes": self.block_sizes, "slot_mapping_enabled": enabled, "dcp_sharded": enabled,
                    "dcp_size": 1, "dcp_rank": 0, "dcp_interleave": 1, "num_reqs": self.r,
                    "block_tables": tables, "slot_mappings": self._full((2, self.buffer), np.int64),
                },
                [(clause, "slot_mappings", mask) for clause, mask in where],
            )  # fmt: skip

    def caching(self) -> StageCase:
        shape = (8, 4, 2, 8)
        slots = self.random.permutation(31)[: self.buffer].astype(np.int64)[:12]
        slots[[3, 11]] = -1
        key, value = (self.random.standard_normal((12, 2, 8)).astype(np.float32) for _ in range(2))
        written = np.zeros((32, 2, 8), bool)
        written[slots[slots >= 0]] = True
        written = written.reshape(shape)
        return StageCase(
            "reshape_and_cache",
            {
                "key": key, "value": value, "slot_mapping": slots, "key_cache": self._full(shape, np.float32),
                "value_cache": self._full(shape, np.float32),
            },
            [
                (clause, name, mask)
                for name in ("key_cache", "value_cache")
                for clause, mask in ((VALUES, written), (KEPT, ~written))
            ],
        )  # fmt: skip

    def attention(self, oracle: StageSet) -> Iterator[StageCase]:
        tail = self._from(self.buffer, self.t)
        table = self.tables[0][self.idx_mapping]
        blocks = (self.num_blocks_total, 4)
        for window in (None, 6):
            pair = self.random.integers(0, 64, (2, *blocks, 1, 1))
            arrays = {
                "token_cache": pair[0], "position_cache": pair[1], "block_table": table,
                "query_start_loc": self.query_start_loc, "seq_lens": self.seq_lens, "num_reqs": self.r,
                "window": window, "group": 1, "hidden": self._full(self.buffer, np.uint64),
            }  # fmt: skip
            yield StageCase("witness_attention", arrays, [(VALUES, "hidden", ~tail), (KEPT, "hidden", tail)])
            q = self.random.standard_normal((self.buffer, 4, 16)).astype(np.float32)
            kv = self.random.standard_normal((2, *blocks, 2, 16)).astype(np.float32)
            arrays = {
                "query": q, "key_cache": kv[0], "value_cache": kv[1], "block_table": table,
                "query_start_loc": self.query_start_loc, "seq_lens": self.seq_lens, "num_reqs": self.r,
                "scale": 0.25, "window": window, "max_query_len": int(self.scheduled.max()),
                "out": np.full_like(q, np.nan),
            }  # fmt: skip
            regions = np.broadcast_to(tail[:, None, None], q.shape)
            yield StageCase(
                "paged_attention", arrays, [(ATTENTION, "out", ~regions), (WHOLE, "out", regions)],
                {"out": _rounding_bound(oracle, arrays)},
            )  # fmt: skip

    def sampling(self) -> Iterator[StageCase]:
        total = np.maximum(self.prefill_len, self.computed + 1).astype(np.int32)
        yield from SamplingBatch(
            self.random, self.idx_mapping, self.cu_num_logits, self.seq_lens, total, self.tokens, self.r
        ).cases()

    def after(self) -> Iterator[StageCase]:
        r, rows = self.r, self.idx_mapping[: self.r]
        tail = self._from(self.n, r)
        sampled = np.ones(self.n, np.int32)
        sampled[:r] = self.random.integers(1, 2 + self.drafts)
        counts = {
            "idx_mapping": self.idx_mapping, "seq_lens": self.seq_lens, "prefill_len": self.prefill_len,
            "cu_num_logits": self.cu_num_logits, "num_reqs": r, "num_sampled": sampled,
            "num_rejected": self._full(self.n, np.int32),
        }  # fmt: skip
        yield StageCase(
            "count_sampled_and_rejected", counts,
            [(c, name, m) for name in ("num_sampled", "num_rejected") for c, m in ((VALUES, ~tail), (KEPT, tail))],
        )  # fmt: skip
        mapping = self.idx_mapping.copy()
        mapping[r - 1] = NO_ROW
        rejected = np.zeros(self.n, np.int32)
        rejected[:r] = 1 + self.drafts - sampled[:r]
        live = np.zeros(self.n, bool)
        live[rows[: r - 1]] = True
        last = np.arange(self.n) == self.n - 1  # what an index of -1 would hit
        total = np.maximum(self.prefill_len, self.computed + 1).astype(np.int32)
        by_row = {"last_sampled_tokens": self.last_sampled, "total_len": total, "num_computed_tokens": self.computed}
        regions = [
            (clause, name, mask)
            for name in by_row
            for clause, mask in ((VALUES, live), (NO_ROW_SKIPPED, ~live & last), (KEPT, ~live & ~last))
        ]
        tokens = np.broadcast_to(live[:, None], self.tokens.shape)
        yield StageCase(
            "post_update",
            {
                "idx_mapping": mapping, "query_start_loc": self.query_start_loc,
                "sampled_token_ids": self.random.integers(10, 64, (self.n, 1 + self.k)), "num_sampled": sampled,
                "num_rejected": rejected, "num_reqs": r, **by_row, "all_token_ids": self.tokens,
            },
            [*regions, (VALUES, "all_token_ids", tokens), (KEPT, "all_token_ids", ~tokens)],
        )  # fmt: skip

    def slot_variants(self) -> Iterator[StageCase]:
        yield from SlotBatch(
            self.random, self.idx_mapping, self.query_start_loc, self.positions, self.seq_lens, self.tables, self.r
        ).cases()


def _rounding_bound(oracle: StageSet, arrays: dict[str, Any]) -> np.ndarray:
    """How far attention may lie from the oracle: as far as the oracle itself lies from float64 when its inputs have
    eight bits of mantissa, per head, and nowhere less than the largest such error."""
    exact = {k: v.astype(np.float64) if getattr(v, "dtype", None) == np.float32 else v for k, v in arrays.items()}
    coarse = {k: _eight_bits(v) if getattr(v, "dtype", None) == np.float64 else v for k, v in exact.items()}
    error = np.abs(oracle.run("paged_attention", **exact)["out"] - oracle.run("paged_attention", **coarse)["out"])
    return np.full_like(error, error.max())


def _eight_bits(x: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent)
