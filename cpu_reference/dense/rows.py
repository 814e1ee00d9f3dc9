"""Rows packed at the front: the requests of this step stand in rows 0 .. n-1, and the row number is the batch index.

Whoever is not scheduled leaves its row, and keeps what it needs for coming back in a `CachedRequest`. Leaving makes
holes; newcomers fill the lowest holes, and `condense` moves the last rows into what is left. Freed rows are cleared.
Source: vLLM V1 `InputBatch`. Twin: gpu_backend/dense/rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cpu_reference.dense.row_fields import RowFields
from runner_api import CallOrderError, NewRequestData
from runner_api.logits_processors import RowMove

# Regions of the decode-first order.
DECODE, SHORT_EXTEND, LONG_EXTEND, PREFILL = range(4)


@dataclass(slots=True)
class CachedRequest:
    """What survives while a request has no row: enough to fill one again.

    new: what was announced: prompt, parameters, seed. The rest is what became of it; while the request has a row, that
    row knows tokens and counters better.
    """

    new: NewRequestData
    token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int

    @classmethod
    def announced_by(cls, new: NewRequestData) -> CachedRequest:
        """A copy: a plan belongs to the engine, which may use its lists again."""
        kept = replace(
            new, prompt_token_ids=list(new.prompt_token_ids), prefill_token_ids=(), block_ids=(),
            eos_token_ids=tuple(new.eos_token_ids),
        )  # fmt: skip
        blocks = tuple(list(ids) for ids in new.block_ids)
        return cls(kept, list(new.prefill_token_ids), blocks, int(new.num_computed_tokens))

    def announcement(self) -> NewRequestData:
        """How a plan would announce the request now."""
        return replace(
            self.new, prefill_token_ids=self.token_ids, block_ids=self.block_ids,
            num_computed_tokens=self.num_computed_tokens,
        )  # fmt: skip

    def start_over(self, token_ids: Sequence[int] | None = None) -> None:
        """Preempted: no block, nothing computed. token_ids: what is known now, where that is told."""
        self.block_ids = tuple([] for _ in self.block_ids)
        self.num_computed_tokens = 0
        if token_ids is not None:
            self.token_ids = list(token_ids)


class DenseRows:
    """Tables by row. N = max_num_reqs, M = max_model_len; n live rows.

    The attributes that a step and the sampler read are named as in `cpu_reference.request_state.RequestState`.
    """

    # Rows that nobody has hold what they held at the start.
    clears_rows = True

    def __init__(self, max_num_reqs: int, max_model_len: int) -> None:
        self.fields = RowFields(max_num_reqs)
        declare = self.fields.declare
        self.num_reqs = 0  # n
        self.req_id_to_row: dict[str, int] = {}
        self.req_ids = declare("req_ids", np.full(max_num_reqs, None, object), None)  # str or None
        self.total_len = np.zeros(max_num_reqs, np.int32)  # int32[N] tokens known
        self.all_token_ids = declare(  # int32[N, M] prompt, then outputs
            "all_token_ids", np.zeros((max_num_reqs, max_model_len), np.int32), count=self.total_len
        )
        declare("total_len", self.total_len)
        self.prompt_len = declare("prompt_len", np.zeros(max_num_reqs, np.int32))  # int32[N]
        # int32[N] tokens whose KV is written
        self.num_computed_tokens = declare("num_computed_tokens", np.zeros(max_num_reqs, np.int32))
        # There is no device that could know better than the host, …
        self.num_computed_tokens_np = self.num_computed_tokens
        # … a request samples once it has computed all the tokens that are known, …
        self.prefill_len = self.total_len
        # … what is drawn goes to all_token_ids and is read there (by the row of its step, and never moved), …
        self.last_sampled_tokens = np.zeros(max_num_reqs, np.int64)
        # … and there are no drafts.
        self.draft_tokens = np.zeros((max_num_reqs, 0), np.int64)
        self._holes: list[int] = []  # rows that nobody has between those that somebody has had; lowest last
        self._filling = False  # holes are being filled: nobody may leave until the next step
        self.moves: list[RowMove] = []  # of this step, in order
        self.num_condense_moves = self.num_swaps = 0  # so far

    # -- in and out -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """All removals of a step come before all additions; this is where removals may begin again."""
        self._filling = False
        self.moves = []

    def remove(self, req_id: str) -> int | None:
        """Take a request out of its row, which is cleared; None (and no change) for one that has none.

        Raises CallOrderError once the step has begun to fill holes: the row would be taken for one of them."""
        if self._filling:
            raise CallOrderError("a row is freed after holes were filled", field="remove", req_id=req_id)
        row = self.req_id_to_row.pop(req_id, None)
        if row is None:
            return None
        self.fields.clear(row)
        self._holes.append(row)
        self._holes.sort(reverse=True)
        self.num_reqs -= 1
        return row

    def add(self, request: CachedRequest) -> int:
        """Give a request the lowest hole, or the next row behind the last, and write its tokens and counters."""
        self._filling = True
        row = self._holes.pop() if self._holes else self.num_reqs
        self.num_reqs += 1
        new, tokens = request.new, request.token_ids
        self.req_id_to_row[new.req_id] = row
        self.req_ids[row] = new.req_id
        self.all_token_ids[row, : len(tokens)] = tokens
        self.total_len[row] = len(tokens)
        self.prompt_len[row] = new.prompt_len
        self.num_computed_tokens[row] = request.num_computed_tokens
        return row

    # -- order ------------------------------------------------------------------------------------------------

    def condense(self) -> None:
        """Move the last requests into the holes that nobody filled, lowest hole first, until there is none below n."""
        self._filling = True
        last = self.num_reqs + len(self._holes) - 1
        while self._holes:
            # 1 the highest row that somebody has
            while last in self._holes:
                last -= 1
            # 2 the lowest hole, if it lies below
            if self._holes[-1] >= last:
                break
            self._move(last, self._holes.pop())
            last -= 1
        self._holes = []

    def _move(self, source: int, target: int) -> None:
        self.fields.move(source, target)
        self.req_id_to_row[self.req_ids[target]] = target
        self.moves.append(RowMove(source, target))
        self.num_condense_moves += 1

    def _swap(self, a: int, b: int) -> None:
        self.fields.swap(a, b)
        self.req_id_to_row[self.req_ids[a]], self.req_id_to_row[self.req_ids[b]] = a, b
        self.moves.append(RowMove(a, b, swap=True))
        self.num_swaps += 1

    def reorder(self, num_scheduled: Callable[[str], int], threshold: int | None) -> None:
        """Bring decodes to the front, then short extends, long extends and fresh prefills; None: keep the order.

        Rows that already stand in their region stay. The others go to the places of the others, by the cycles of
        that permutation.
        """
        if threshold is None:
            return
        regions = [self._region(row, num_scheduled(self.req_ids[row]), threshold) for row in range(self.num_reqs)]
        wanted = sorted(regions)
        # 1 who stands in a foreign region, in the order in which they are to stand
        misplaced = [row for row in range(self.num_reqs) if regions[row] != wanted[row]]
        arriving = sorted(misplaced, key=lambda row: regions[row])
        # 2 whose row each of those places gets
        source_of = dict(zip(misplaced, arriving, strict=True))
        # 3 cycle by cycle
        for start in misplaced:
            row = start
            while source_of[row] != start:
                source = source_of[row]
                self._swap(row, source)
                source_of[row], row = row, source
            source_of[row] = row

    def _region(self, row: int, num_scheduled: int, threshold: int) -> int:
        computed = int(self.num_computed_tokens[row])
        if computed == 0:
            return PREFILL
        if num_scheduled > threshold:
            return LONG_EXTEND
        return DECODE if computed >= self.prompt_len[row] else SHORT_EXTEND

    # -- for whoever looks in ---------------------------------------------------------------------------------

    def live_rows(self) -> Iterable[int]:
        """Rows that somebody has."""
        return range(self.num_reqs)

    def row_tables(self) -> dict[str, np.ndarray]:
        """Every table by row; those of blocks and of the sampler are declared here too, and told by their owners."""
        return {
            "prompt_len": self.prompt_len, "total_len": self.total_len,
            "num_computed_tokens": self.num_computed_tokens, "all_token_ids": self.all_token_ids,
        }  # fmt: skip

    def row_widths(self, row: int) -> dict[str, int]:
        """Of a live row: how many elements mean something, in tables where that is not all of them."""
        return {"all_token_ids": int(self.total_len[row])}

    def unowned(self) -> list[bytes]:
        """What rows that nobody has hold, each content once: a single one while all of them are cleared."""
        fields = sorted((field for field in self.fields if field.table.dtype != object), key=lambda f: f.name)
        tables = [field.table for field in fields]
        rows = range(self.num_reqs, self.fields.max_num_reqs)
        return sorted({b"".join(table[row].tobytes() for table in tables) for row in rows})
