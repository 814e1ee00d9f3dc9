"""Per-request state in fixed rows: a request takes a free row and keeps it until it finishes or is preempted.

Nothing is ever moved. Freed rows keep their old values; whoever reads one would read another request's past, so
everything downstream goes through `idx_mapping` (batch index to row). Twin: cpu_reference/request_state.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from gpu_backend.packed_copy import PackedCopy
from gpu_backend.staged_write import StagedWriteTensor


class RequestState:
    """The rows. N = max_num_reqs, M = max_model_len, K = num_speculative_tokens.

    Host tables (`*_np`) know what the scheduler said, device tables what really happened; with drafts in flight the
    host's `num_computed_tokens_np` is an upper bound of the device's `num_computed_tokens`. The host never reads a
    device table during a step: it would have to wait.
    """

    # Rows that nobody has hold what their last owners left.
    clears_rows = False

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        num_speculative_tokens: int,
        free_rows: Iterable[int] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.req_id_to_row: dict[str, int] = {}
        self.row_to_req_id: dict[int, str] = {}
        # A stack: the row freed last is taken next.
        self.free_rows = list(range(max_num_reqs)) if free_rows is None else list(free_rows)
        # -- device tables ------------------------------------------------------------------------------------
        device = device or torch.device("cpu")
        self._all_token_ids = StagedWriteTensor(max_num_reqs, max_model_len, np.int32, device)
        self._total_len = StagedWriteTensor(max_num_reqs, 1, np.int32, device)
        self._num_computed_tokens = StagedWriteTensor(max_num_reqs, 1, np.int32, device)
        self.all_token_ids = self._all_token_ids.table  # int32[N, M] prompt, then outputs
        self.total_len = self._total_len.table[:, 0]  # int32[N] tokens known
        self.num_computed_tokens = self._num_computed_tokens.table[:, 0]  # int32[N] tokens whose KV is written
        self.last_sampled_tokens = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)  # int64[N]
        self.draft_tokens = torch.zeros(
            (max_num_reqs, num_speculative_tokens), dtype=torch.int64, device=device
        )  # int64[N, K]
        self.next_prefill_tokens = torch.zeros(
            (1, max_num_reqs), dtype=torch.int32, device=device
        )  # int32[lookahead, N]
        # -- tables that the host owns and the device only reads ----------------------------------------------
        self.prompt_len_np = np.zeros(max_num_reqs, np.int32)  # int32[N]
        self.prefill_len_np = np.zeros(max_num_reqs, np.int32)  # int32[N] prompt plus outputs known when added
        self.prompt_len: torch.Tensor  # int32[N], device; set by `bind`, as is the next
        self.prefill_len: torch.Tensor  # int32[N], device
        # -- host mirror --------------------------------------------------------------------------------------
        self.num_computed_tokens_np = np.zeros(max_num_reqs, np.int32)  # int32[N] upper bound
        self._rows_without_drafts: list[int] = []  # taken since the last `apply_staged_writes`
        self._ticket = 0  # of their device copy

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        return {"prompt_len": self.prompt_len_np, "prefill_len": self.prefill_len_np}

    def bind(self, packed: PackedCopy) -> None:
        """Take the device copies of the host's tables."""
        self.prompt_len, self.prefill_len = packed.views["prompt_len"], packed.views["prefill_len"]

    def add_request(
        self, req_id: str, prompt_len: int, prefill_token_ids: Sequence[int], num_computed_tokens: int
    ) -> int:
        """Give the request a row and stage its tokens and counters; the row is readable after `apply_staged_writes`."""
        row = self.free_rows.pop()
        self.req_id_to_row[req_id] = row
        self.row_to_req_id[row] = req_id
        prefill_len = len(prefill_token_ids)
        self.prompt_len_np[row] = prompt_len
        self.prefill_len_np[row] = prefill_len
        self._all_token_ids.stage_write(row, 0, prefill_token_ids)
        self._total_len.stage_write_elem(row, prefill_len)
        self._num_computed_tokens.stage_write_elem(row, num_computed_tokens)
        self.num_computed_tokens_np[row] = num_computed_tokens
        if self.draft_tokens.shape[1] > 0:
            self._rows_without_drafts.append(row)
        return row

    def remove_request(self, req_id: str) -> int | None:
        """Free the request's row; None (and no change) for an id that is not held."""
        row = self.req_id_to_row.pop(req_id, None)
        if row is None:
            return None
        del self.row_to_req_id[row]
        self.free_rows.append(row)
        return row

    def finish_requests(self, req_ids: Iterable[str], before: Callable[[str], None] | None = None) -> list[str]:
        """Free many, in sorted order, so that every rank pushes rows onto the stack alike. Returns those held.

        before: called for each of them while it still has its row."""
        held = [r for r in sorted(req_ids) if r in self.req_id_to_row]
        for req_id in held:
            if before is not None:
                before(req_id)
            self.remove_request(req_id)
        return held

    def pack(self, packed: PackedCopy) -> None:
        for table in (self._all_token_ids, self._total_len, self._num_computed_tokens):
            table.pack(packed)
        if self._rows_without_drafts:
            self._ticket = packed.add(np.array(self._rows_without_drafts, np.int64))

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        for table in (self._all_token_ids, self._total_len, self._num_computed_tokens):
            table.apply(packed)
        # Drafts of the rows' last owners must not be verified for the new ones.
        if self._rows_without_drafts:
            self.draft_tokens.index_fill_(0, packed.extra[self._ticket], 0)
            self._rows_without_drafts = []

    # -- for whoever looks in ---------------------------------------------------------------------------------

    def live_rows(self) -> Iterable[int]:
        """Rows that somebody has."""
        return self.row_to_req_id

    def row_tables(self) -> dict[str, np.ndarray | torch.Tensor]:
        """Every table by row; one that the host keeps is given as it is there."""
        return {
            "prompt_len": self.prompt_len_np, "prefill_len": self.prefill_len_np, "total_len": self.total_len,
            "num_computed_tokens": self.num_computed_tokens, "all_token_ids": self.all_token_ids,
            "last_sampled_tokens": self.last_sampled_tokens, "draft_tokens": self.draft_tokens,
        }  # fmt: skip

    def row_widths(self, row: int) -> dict[str, int]:
        """Of a live row: how many elements mean something, in tables where that is not all of them. Waits."""
        total = int(self.total_len[row])
        return {"all_token_ids": total, "last_sampled_tokens": int(total > self.prefill_len_np[row])}

    def unowned(self) -> list[int]:
        """The free rows, in the order in which they were freed."""
        return self.free_rows
