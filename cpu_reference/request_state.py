"""Per-request state in fixed rows: a request takes a free row and keeps it until it finishes or is preempted.

Nothing is ever moved. Freed rows keep their old values; whoever reads one would read another request's past, so
everything downstream goes through `idx_mapping` (batch index to row). Twin: gpu_backend/request_state.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from cpu_reference.staged_write import StagedWriteTensor


class RequestState:
    """The rows. N = max_num_reqs, M = max_model_len, K = num_speculative_tokens.

    Host tables know what the scheduler said, device tables what really happened; with drafts in flight the host's
    `num_computed_tokens_np` is an upper bound of the device's `num_computed_tokens`. (Here both are host memory; the
    split is kept because the rules about who may read which are part of the design.)
    """

    # Rows that nobody has hold what their last owners left.
    clears_rows = False

    def __init__(
        self, max_num_reqs: int, max_model_len: int, num_speculative_tokens: int, free_rows: Iterable[int] | None = None
    ) -> None:
        self.req_id_to_row: dict[str, int] = {}
        self.row_to_req_id: dict[int, str] = {}
        # A stack: the row freed last is taken next.
        self.free_rows = list(range(max_num_reqs)) if free_rows is None else list(free_rows)
        # -- device tables ------------------------------------------------------------------------------------
        self._all_token_ids = StagedWriteTensor(max_num_reqs, max_model_len, np.int32)
        self._total_len = StagedWriteTensor(max_num_reqs, 1, np.int32)
        self._num_computed_tokens = StagedWriteTensor(max_num_reqs, 1, np.int32)
        self.all_token_ids = self._all_token_ids.table  # int32[N, M] prompt, then outputs
        self.total_len = self._total_len.table[:, 0]  # int32[N] tokens known
        self.num_computed_tokens = self._num_computed_tokens.table[:, 0]  # int32[N] tokens whose KV is written
        self.last_sampled_tokens = np.zeros(max_num_reqs, np.int64)  # int64[N]
        self.draft_tokens = np.zeros((max_num_reqs, num_speculative_tokens), np.int64)  # int64[N, K]
        self.next_prefill_tokens = np.zeros((1, max_num_reqs), np.int32)  # int32[lookahead, N]
        # -- tables that the host owns and the device only reads ----------------------------------------------
        self.prompt_len = np.zeros(max_num_reqs, np.int32)  # int32[N]
        self.prefill_len = np.zeros(max_num_reqs, np.int32)  # int32[N] prompt plus outputs known when added
        # -- host mirror --------------------------------------------------------------------------------------
        self.num_computed_tokens_np = np.zeros(max_num_reqs, np.int32)  # int32[N] upper bound

    def add_request(
        self, req_id: str, prompt_len: int, prefill_token_ids: Sequence[int], num_computed_tokens: int
    ) -> int:
        """Give the request a row and stage its tokens and counters; the row is readable after `apply`."""
        row = self.free_rows.pop()
        self.req_id_to_row[req_id] = row
        self.row_to_req_id[row] = req_id
        prefill_len = len(prefill_token_ids)
        self.prompt_len[row] = prompt_len
        self.prefill_len[row] = prefill_len
        self._all_token_ids.stage_write(row, 0, prefill_token_ids)
        self._total_len.stage_write_elem(row, prefill_len)
        self._num_computed_tokens.stage_write_elem(row, num_computed_tokens)
        self.num_computed_tokens_np[row] = num_computed_tokens
        # Drafts of the row's last owner must not be verified for this one.
        self.draft_tokens[row] = 0
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

    def apply_staged_writes(self) -> None:
        self._all_token_ids.apply()
        self._total_len.apply()
        self._num_computed_tokens.apply()

    # -- for whoever looks in ---------------------------------------------------------------------------------

    def live_rows(self) -> Iterable[int]:
        """Rows that somebody has."""
        return self.row_to_req_id

    def row_tables(self) -> dict[str, np.ndarray]:
        """Every table by row."""
        return {
            "prompt_len": self.prompt_len, "prefill_len": self.prefill_len, "total_len": self.total_len,
            "num_computed_tokens": self.num_computed_tokens, "all_token_ids": self.all_token_ids,
            "last_sampled_tokens": self.last_sampled_tokens, "draft_tokens": self.draft_tokens,
        }  # fmt: skip

    def row_widths(self, row: int) -> dict[str, int]:
        """Of a live row: how many elements mean something, in tables where that is not all of them."""
        drawn = self.total_len[row] > self.prefill_len[row]
        return {"all_token_ids": int(self.total_len[row]), "last_sampled_tokens": int(drawn)}

    def unowned(self) -> list[int]:
        """The free rows, in the order in which they were freed."""
        return self.free_rows
