"""The blocks of a world: who holds which, what is free, and whose contents a prefix hit may still read."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from runner_api import NULL_BLOCK_ID


@dataclass(slots=True, eq=False)
class Ghost:
    """The computed blocks of a request that left, as long as nobody else was given one of them."""

    tokens: list[int]
    computed: int
    blocks: tuple[list[int], ...]
    evicted: list[int]


class WorldBlocks:
    """A pool with counted holders. Blocks are handed out in the order in which they became free.

    A request that left stays readable as a `Ghost` until one of its blocks is handed out.
    """

    def __init__(self, order: Iterable[int]) -> None:
        self.free = deque(order)
        self.ghosts: list[Ghost] = []
        self._holders: Counter[int] = Counter()

    def take(self) -> int:
        """A free block, whose old contents are lost with it."""
        block = self.free.popleft()
        self._holders[block] = 1
        if self.ghosts:
            self.ghosts = [g for g in self.ghosts if not any(block in ids for ids in g.blocks)]
        return block

    def claim(self, block: int) -> None:
        """One more request reads a block that others hold, or that is free with its contents intact."""
        if self._holders[block] == 0:
            self.free.remove(block)
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """One holder less; without holders the block is free, contents intact."""
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self.free.append(block)

    def remember(self, ghost: Ghost) -> None:
        """Keep a request that is leaving readable; only the latest few are kept."""
        self.ghosts = [*self.ghosts[-7:], ghost]

    def readable(self) -> frozenset[int]:
        """Blocks of ghosts."""
        return frozenset(b for ghost in self.ghosts for ids in ghost.blocks for b in ids if b != NULL_BLOCK_ID)
