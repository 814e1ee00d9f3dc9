"""What the host knows of a request: while it lives, and while a plan that schedules it is being checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class LiveRequest:
    """What the host knows of one request."""

    prompt_len: int
    prefill_len: int
    computed_upper: int  # if every draft in flight is accepted
    computed_lower: int  # if every draft in flight is rejected
    block_ids: tuple[list[int], ...]
    wants_logprobs: bool = False
    # Dense layout alone, where a preempted request stays known:
    prompt_token_ids: Sequence[int] = ()
    preempted: bool = False  # it can only come back as resumed

    @property
    def known_len(self) -> int:
        """Tokens known without drafts: the last known one has been computed, so one more was drawn."""
        return self.prefill_len if self.computed_upper < self.prefill_len else self.computed_upper + 1

    def start_over(self) -> None:
        """It has lost its blocks: everything that is known of it has to be computed again."""
        self.prefill_len = self.known_len
        self.computed_upper = self.computed_lower = 0
        self.block_ids = tuple([] for _ in self.block_ids)
        self.preempted = True


@dataclass(slots=True)
class Scheduled:
    """One request of the plan that is being checked: what it held before, and what the plan adds."""

    prefill_len: int
    computed: int
    held: Sequence[Sequence[int]]  # blocks checked by an earlier plan, per group
    more: Sequence[Sequence[int]]  # blocks that this plan brings, per group
    wants_logprobs: bool = False

    def num_blocks(self, group: int) -> int:
        return len(self.held[group]) + len(self.more[group])

    def block(self, group: int, column: int) -> int:
        held = self.held[group]
        return held[column] if column < len(held) else self.more[group][column - len(held)]
