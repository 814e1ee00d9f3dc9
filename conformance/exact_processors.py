"""Custom logits processors beside a judged runner: instances of the judge's own, told the same, on float64 logits.

They know rows and nothing of requests, so that the rows may be the judge's. A processor that is not a pure function of
what it is told gives no certificates that mean anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from runner_api import NewRequestData, SamplingParams
from runner_api.logits_processors import (
    HostArrays,
    LogitsContext,
    build_processors,
    call_processor,
    edit_logits,
    tell_of_request,
)


class ExactProcessors:
    """All processors of a runner. What happens is kept until the first logits show the size of the vocabulary."""

    def __init__(self, factories: Sequence[Any], max_num_reqs: int) -> None:
        self.factories, self._max_num_reqs = tuple(factories), max_num_reqs
        self._built: list[Any] | None = None
        self._happened: list[Callable[[], None]] = []
        self._free = list(range(max_num_reqs))
        self._rows: dict[str, int] = {}
        self._edits: dict[tuple[int, str], bool] = {}  # (processor, request)

    def add(self, new: NewRequestData) -> None:
        """A request was admitted."""
        self._note(lambda: self._add(new))

    def remove(self, req_id: str) -> None:
        """A request left."""
        self._note(lambda: self._remove(req_id))

    def take(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """Tokens entered the state."""
        self._note(lambda: self._take(tokens))

    def apply(
        self, x: np.ndarray, req_ids: Sequence[str], owner: np.ndarray, positions: np.ndarray, input_ids: np.ndarray,
        local_pos: np.ndarray,
    ) -> None:  # fmt: skip
        """Let each processor edit the rows of requests that asked for it; x: float64[L, V], in place."""
        if self._built is None:
            self._built = build_processors(self.factories, self._max_num_reqs, x.shape[1], HostArrays())
        for event in self._happened:
            event()
        self._happened.clear()
        num_drafts = int(local_pos.max(initial=0))
        for p, processor in enumerate(self._built):
            chosen = np.flatnonzero([self._edits[p, req_ids[i]] for i in owner])
            if len(chosen):
                edited = x[chosen]
                rows = np.array([self._rows[req_ids[i]] for i in owner[chosen]], np.int64)
                context = LogitsContext(rows, positions[chosen], input_ids[chosen], local_pos[chosen], num_drafts)
                edit_logits(processor, edited, context)
                x[chosen] = edited

    # -- what happened, told when the processors are there ----------------------------------------------------

    def _note(self, event: Callable[[], None]) -> None:
        if self.factories:
            self._happened.append(event)

    def _add(self, new: NewRequestData) -> None:
        row = self._rows[new.req_id] = self._free.pop()
        params = new.sampling_params or SamplingParams(temperature=0.0)
        prompt, outputs = list(new.prompt_token_ids), list(new.prefill_token_ids[new.prompt_len :])
        for p, processor in enumerate(self._built or ()):
            self._edits[p, new.req_id] = tell_of_request(processor, row, params, prompt, outputs)

    def _remove(self, req_id: str) -> None:
        row = self._rows.pop(req_id, None)
        if row is not None:
            self._free.append(row)
            for processor in self._built or ():
                call_processor(processor, "remove_request", row)

    def _take(self, tokens: Mapping[str, Sequence[int]]) -> None:
        known = [r for r in tokens if r in self._rows]
        width = max((len(tokens[r]) for r in known), default=0)
        table = np.zeros((len(known), max(width, 1)), np.int64)
        for row, req_id in zip(table, known, strict=True):
            row[: len(tokens[req_id])] = tokens[req_id]
        rows = np.array([self._rows[r] for r in known], np.int64)
        counts = np.array([len(tokens[r]) for r in known], np.int32)
        for processor in self._built or ():
            call_processor(processor, "observe", rows.copy(), table.copy(), counts.copy())
