"""Rows packed at the front: the requests of this step stand in rows 0 .. n-1, and the row number is the batch index.

Whoever is not scheduled leaves its row, and keeps what it needs for coming back in a `CachedRequest`. Leaving makes
holes; newcomers fill the lowest holes, and `condense` moves the last rows into what is left. Freed rows are cleared.
The host knows how many tokens each request has, and not which ones it drew lately: those are in the device's table,
and are asked for when a request leaves its row and may come back.
Source: vLLM V1 `InputBatch`. Twin: cpu_reference/dense/rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from gpu_backend.async_output import start_for_host
from gpu_backend.dense.row_fields import RowFields
from gpu_backend.packed_copy import PackedCopy
from gpu_backend.staged_write import StagedWriteTensor
from runner_api import NO_ROW, CallOrderError, NewRequestData
from runner_api.logits_processors import RowMove

# Regions of the decode-first order.
DECODE, SHORT_EXTEND, LONG_EXTEND, PREFILL = range(4)


class LateTokens:
    """Tokens of the requests that leave their rows in one step, from the device's table to the host.

    The copy is queued with the step, behind everything that is still to be drawn for those rows; whoever wants its
    tokens waits, and nobody else does.
    """

    def __init__(self) -> None:
        self._places: list[np.ndarray] = []  # in the table, as one long row
        self._count = self._ticket = 0
        self._token_ids: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def ask(self, places: np.ndarray) -> Callable[[], list[int]]:
        """Ask for the tokens at some places; the answer is to be called in a later step."""
        start, stop = self._count, self._count + len(places)
        self._places.append(places)
        self._count = stop
        return lambda: self._get(start, stop)

    def pack(self, packed: PackedCopy) -> None:
        if self._count:
            self._ticket = packed.add(np.concatenate(self._places))

    def start(self, packed: PackedCopy, all_token_ids: torch.Tensor, copy_stream: torch.cuda.Stream | None) -> None:
        """Queue the copy, before rows change on the device."""
        if not self._count:
            return
        taken = all_token_ids.view(-1)[packed.extra[self._ticket]]
        (self._token_ids,) = start_for_host([taken], copy_stream)
        if copy_stream is not None:
            self._copied = torch.cuda.Event()
            self._copied.record(copy_stream)

    def _get(self, start: int, stop: int) -> list[int]:
        assert self._token_ids is not None, "the step that frees the row has been queued"
        if self._copied is not None:
            self._copied.synchronize()
        return self._token_ids[start:stop].tolist()


@dataclass(slots=True)
class CachedRequest:
    """What survives while a request has no row: enough to fill one again.

    new: what was announced: prompt, parameters, seed. The rest is what became of it; while the request has a row, that
    row knows tokens and counters better. late: where to ask for the tokens behind token_ids.
    """

    new: NewRequestData
    token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    late: Callable[[], list[int]] | None = field(default=None, repr=False, compare=False)

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

    def fetch_tokens(self) -> None:
        """Know all tokens: waits for those that are still on their way."""
        if self.late is not None:
            self.token_ids, self.late = self.token_ids + self.late(), None

    def start_over(self, token_ids: Sequence[int] | None = None) -> None:
        """Preempted: no block, nothing computed. token_ids: what is known now, where that is told."""
        self.block_ids = tuple([] for _ in self.block_ids)
        self.num_computed_tokens = 0
        if token_ids is not None:
            self.token_ids, self.late = list(token_ids), None


class DenseRows:
    """Tables by row. N = max_num_reqs, M = max_model_len; n live rows.

    Host tables (`*_np`) are kept; the device gets counters anew with every step, and keeps the tokens. The attributes
    that a step and the sampler read are named as in `gpu_backend.request_state.RequestState`.
    """

    # Rows that nobody has hold what they held at the start.
    clears_rows = True

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        device: torch.device | None = None,
        copy_stream: torch.cuda.Stream | None = None,
    ) -> None:
        device = device or torch.device("cpu")
        self.fields = RowFields(max_num_reqs)
        declare, n = self.fields.declare, max_num_reqs
        self.num_reqs = 0  # n
        self.req_id_to_row: dict[str, int] = {}
        self.req_ids = declare("req_ids", np.full(n, None, object), None)  # str or None
        self.total_len_np = declare("total_len", np.zeros(n, np.int32))  # int32[N] how many tokens there are
        self.prompt_len_np = declare("prompt_len", np.zeros(n, np.int32))  # int32[N]
        # int32[N] tokens whose KV is written; each plan says it again
        self.num_computed_tokens_np = declare("num_computed_tokens", np.zeros(n, np.int32))
        # A request samples once it has computed all the tokens that there are.
        self.prefill_len_np = self.total_len_np
        # -- what the host has seen of the tokens: all at the time when the request got its row ----------------
        self.num_known_np = np.zeros(n, np.int32)  # int32[N]
        self.known_token_ids_np = declare(  # int32[N, M]
            "known_token_ids", np.zeros((n, max_model_len), np.int32), count=self.num_known_np
        )
        declare("num_known", self.num_known_np)
        # int64[N] the row in which the request drew the token that it computes next; NO_ROW: the host has seen that
        self.previous_rows_np = declare("previous_rows", np.full(n, NO_ROW, np.int64), NO_ROW)
        # Fields that the twin does not need.
        self.own_fields = {"known_token_ids", "num_known", "previous_rows"}
        # -- device tables ------------------------------------------------------------------------------------
        self._copy_stream = copy_stream
        self._all_token_ids = StagedWriteTensor(n, max_model_len, np.int32, device)
        self.all_token_ids = self._all_token_ids.table  # int32[N, M] prompt, then outputs
        # int64[N] of the latest step, by the row that a request had in it: never moved
        self.last_sampled_tokens = torch.zeros(n, dtype=torch.int64, device=device)
        self.draft_tokens = torch.zeros((n, 0), dtype=torch.int64, device=device)  # there are no drafts
        # int32[N] or int64[N], as of the step's copy; set by `bind`
        self.total_len: torch.Tensor
        self.prefill_len: torch.Tensor
        self.prompt_len: torch.Tensor
        self.num_computed_tokens: torch.Tensor
        self.previous_rows: torch.Tensor
        self._late = LateTokens()  # of those who leave in this step
        self._holes: list[int] = []  # rows that nobody has between those that somebody has had; lowest last
        self._filling = False  # holes are being filled: nobody may leave until the next step
        self.moves: list[RowMove] = []  # of this step, in order
        self.num_condense_moves = self.num_swaps = 0  # so far

    # -- the step's copy --------------------------------------------------------------------------------------

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        return {
            "total_len": self.total_len_np, "prompt_len": self.prompt_len_np,
            "num_computed_tokens": self.num_computed_tokens_np, "previous_rows": self.previous_rows_np,
        }  # fmt: skip

    def bind(self, packed: PackedCopy) -> None:
        """Take the device copies of the host's tables, and bring the list of device tables there."""
        self.fields.bind()
        self.total_len = self.prefill_len = packed.views["total_len"]
        self.prompt_len, self.num_computed_tokens = packed.views["prompt_len"], packed.views["num_computed_tokens"]
        self.previous_rows = packed.views["previous_rows"]

    def pack(self, packed: PackedCopy) -> None:
        """Hand what happened to rows to the step's copy."""
        self._late.pack(packed)
        self.fields.pack(packed)
        self._all_token_ids.pack(packed)

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        """Let the device's tables follow: who leaves takes its tokens along, rows move, then newcomers are written."""
        self._late.start(packed, self.all_token_ids, self._copy_stream)
        self._late = LateTokens()
        self.fields.apply(packed)
        self._all_token_ids.apply(packed)

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
        self.fields.take(row)
        self.req_ids[row] = new.req_id
        self.known_token_ids_np[row, : len(tokens)] = tokens
        self.num_known_np[row] = self.total_len_np[row] = len(tokens)
        self.prompt_len_np[row] = new.prompt_len
        self.num_computed_tokens_np[row] = request.num_computed_tokens
        return row

    def stage_tokens(self, req_id: str) -> None:
        """Have the device's table written for a newcomer, in the row that it has when rows have moved."""
        row = self.req_id_to_row[req_id]
        self._all_token_ids.stage_write(row, 0, self.known_token_ids_np[row, : self.num_known_np[row]].tolist())

    def keep_tokens(self, request: CachedRequest) -> None:
        """Before a request leaves: have it keep its tokens, and where to ask for those that the host has not seen."""
        row = self.req_id_to_row[request.new.req_id]
        known, total = int(self.num_known_np[row]), int(self.total_len_np[row])
        request.token_ids, request.late = self.known_token_ids_np[row, :known].tolist(), None
        if known < total:
            request.late = self._late.ask(row * self.all_token_ids.shape[1] + np.arange(known, total))

    def advance(self, num_scheduled_tokens: np.ndarray) -> None:
        """A step has been queued: what it does to the counters is known without seeing a token.

        Shapes: num_scheduled_tokens: int32[n]."""
        n = self.num_reqs
        # 1 every scheduled token has its KV
        computed = self.num_computed_tokens_np[:n] = self.num_computed_tokens_np[:n] + num_scheduled_tokens
        # 2 who has computed all its tokens has drawn one more, which the device alone has seen
        self.total_len_np[:n] += computed >= self.total_len_np[:n]
        self.previous_rows_np[:n] = np.where(self.total_len_np[:n] > self.num_known_np[:n], np.arange(n), NO_ROW)

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
        computed = int(self.num_computed_tokens_np[row])
        if computed == 0:
            return PREFILL
        if num_scheduled > threshold:
            return LONG_EXTEND
        return DECODE if computed >= self.prompt_len_np[row] else SHORT_EXTEND

    # -- for whoever looks in ---------------------------------------------------------------------------------

    def live_rows(self) -> Iterable[int]:
        """Rows that somebody has."""
        return range(self.num_reqs)

    def row_tables(self) -> dict[str, np.ndarray | torch.Tensor]:
        """Every table by row; those of blocks and of the sampler are declared here too, and told by their owners."""
        return {
            "prompt_len": self.prompt_len_np, "total_len": self.total_len_np,
            "num_computed_tokens": self.num_computed_tokens_np, "all_token_ids": self.all_token_ids,
        }  # fmt: skip

    def row_widths(self, row: int) -> dict[str, int]:
        """Of a live row: how many elements mean something, in tables where that is not all of them."""
        return {"all_token_ids": int(self.total_len_np[row])}

    def unowned(self) -> list[bytes]:
        """What rows that nobody has hold, each content once: a single one while all of them are cleared."""
        known = sorted((f for f in self.fields if f.name not in self.own_fields), key=lambda f: f.name)
        free = [f.table[self.num_reqs :] for f in known if f.table.dtype != object]
        free = [table if isinstance(table, np.ndarray) else table.cpu().numpy() for table in free]
        rows = range(self.fields.max_num_reqs - self.num_reqs)
        return sorted({b"".join(table[row].tobytes() for table in free) for row in rows})
