"""One-step cases for single stages: a list of request records, and the arrays that stages read.

A case is drawn as one list of records, so that it shrinks to few and small requests; arrays are derived from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np


@dataclass(frozen=True, slots=True)
class RequestCase:
    """One request of a batch. Counts are those before the step; drafts only behind the known tokens."""

    computed: int
    prefill_len: int
    num_scheduled: int
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepCase:
    """One batch: its requests in batch order, their rows, and the sizes of the runner."""

    requests: tuple[RequestCase, ...]
    rows: tuple[int, ...]
    max_num_reqs: int
    block_sizes: tuple[int, ...]
    num_speculative_tokens: int = 0

    def arrays(self) -> dict[str, np.ndarray | list[np.ndarray] | int]:
        """What the index stages read, by parameter name.

        N rows, T tokens with three to spare, M tokens a request: idx_mapping int64[N] (tail -1); query_start_loc and
        cu_num_logits int32[N+1] (tail repeats the total); prefill_len, num_computed_tokens, total_len int32[N] by row;
        all_token_ids int32[N, M]; last_sampled_tokens int64[N]; draft_tokens int64[N, K]; block_tables G times
        int32[N, W]; num_blocks int32[G, N]. Rows without a request hold -77: whoever reads one is found out.
        """
        n, r, k = self.max_num_reqs, len(self.requests), self.num_speculative_tokens
        longest = max((q.computed + q.num_scheduled for q in self.requests), default=0)
        length = max([longest + 1, *(q.prefill_len for q in self.requests)])
        rows = list(self.rows)
        by_row = {name: np.full(n, -77, np.int32) for name in ("prefill_len", "num_computed_tokens", "total_len")}
        all_token_ids = np.full((n, length), -77, np.int32)
        last = np.full(n, -77, np.int64)
        drafts = np.full((n, k), -77, np.int64)
        for row, q in zip(rows, self.requests, strict=True):
            total = max(q.prefill_len, q.computed + 1)
            by_row["prefill_len"][row], by_row["num_computed_tokens"][row] = q.prefill_len, q.computed
            by_row["total_len"][row] = total
            all_token_ids[row, :total] = (np.arange(total) * 7 + row) % 64
            last[row] = all_token_ids[row, total - 1]
            drafts[row] = np.arange(k) + 100
        tables, num_blocks = [], np.zeros((len(self.block_sizes), n), np.int32)
        for g, size in enumerate(self.block_sizes):
            table = np.full((n, -(-length // size) + 1), -77, np.int32)
            first = 1
            for row, q in zip(rows, self.requests, strict=True):
                count = -(-(q.computed + q.num_scheduled) // size)
                table[row, :count] = np.arange(first + count - 1, first - 1, -1)
                num_blocks[g, row] = count
                first += count
            tables.append(table)
        return {
            "idx_mapping": np.array(rows + [-1] * (n - r), np.int64),
            "query_start_loc": self._running([q.num_scheduled for q in self.requests]),
            "cu_num_logits": self._running([1 + q.num_drafts for q in self.requests]),
            "num_reqs": r,
            **by_row,
            "all_token_ids": all_token_ids,
            "last_sampled_tokens": last,
            "draft_tokens": drafts,
            "block_tables": tables,
            "num_blocks": num_blocks,
        }

    @property
    def num_tokens(self) -> int:
        return sum(q.num_scheduled for q in self.requests)

    def _running(self, counts: list[int]) -> np.ndarray:
        sums = [0, *np.cumsum(counts, dtype=np.int64).tolist()]
        return np.array(sums + [sums[-1]] * (self.max_num_reqs - len(counts)), np.int32)


@st.composite
def request_cases(draw: st.DrawFn, num_speculative_tokens: int = 0, longest: int = 40) -> RequestCase:
    """A chunk of known tokens, or one decode token with its drafts."""
    prefill_len = draw(st.integers(1, longest), label="prefill_len")
    if draw(st.booleans(), label="decodes"):
        computed = prefill_len + draw(st.integers(0, 8), label="outputs")
        num_drafts = draw(st.integers(0, num_speculative_tokens), label="drafts")
        return RequestCase(computed, prefill_len, 1 + num_drafts, num_drafts)
    computed = draw(st.integers(0, prefill_len - 1), label="computed")
    return RequestCase(computed, prefill_len, draw(st.integers(1, prefill_len - computed), label="num_scheduled"))


@st.composite
def step_cases(
    draw: st.DrawFn, max_num_reqs: int = 8, num_groups: int = 1, num_speculative_tokens: int = 0
) -> StepCase:
    """A batch of up to `max_num_reqs` requests in permuted rows, with one block size per KV cache group."""
    one = request_cases(num_speculative_tokens)
    requests = draw(st.lists(one, max_size=max_num_reqs), label="requests")
    rows = draw(st.permutations(range(max_num_reqs)), label="rows")[: len(requests)]
    sizes = draw(st.lists(st.sampled_from([1, 2, 4, 16, 64]), min_size=num_groups, max_size=num_groups), label="sizes")
    return StepCase(tuple(requests), tuple(rows), max_num_reqs, tuple(sizes), num_speculative_tokens)
