"""The pool of KV cache blocks: who is free, who is shared, and which full blocks can be found again by content.

Block ids are shared by all KV cache groups. Block 0 is the null block: taken out at the start, never handed out, so
that padding rows of a block table point at memory that belongs to nobody. Knows nothing of requests or tokens: it
counts references and maps hashes. The law that must hold after every call: free + held + 1 == num_blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from runner_api import NULL_BLOCK_ID, EngineError, KVCacheError

# A chained content hash and the KV cache group it belongs to: equal tokens have different KV in different groups.
BlockKey = tuple[bytes, int]


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One block. `prev` and `next` link it into the free queue while nobody holds it."""

    block_id: int
    ref_cnt: int = 0
    key: BlockKey | None = None  # set while the block is findable by content
    prev: KVCacheBlock | None = None
    next: KVCacheBlock | None = None


class FreeBlockQueue:
    """A doubly linked list of free blocks. Every operation is O(1), also taking one out of the middle.

    The head is handed out first. Two sentinels spare every operation the question whether it is at an end.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self._head.next, self._tail.prev = self._tail, self._head
        self._size = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def _link(self, before: KVCacheBlock, block: KVCacheBlock) -> None:
        after = before.next
        assert after is not None
        before.next, after.prev = block, block
        block.prev, block.next = before, after
        self._size += 1

    def append(self, block: KVCacheBlock) -> None:
        """Put at the back: used again last."""
        assert self._tail.prev is not None
        self._link(self._tail.prev, block)

    def prepend(self, block: KVCacheBlock) -> None:
        """Put at the front: used again first."""
        self._link(self._head, block)

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, wherever it is."""
        assert block.prev is not None
        assert block.next is not None, f"block {block.block_id} is not in the free queue"
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self._size -= 1

    def popleft(self) -> KVCacheBlock:
        block = self._head.next
        assert block is not None
        assert block is not self._tail, "the free queue is empty"
        self.remove(block)
        return block


class BlockPool:
    """Allocates, shares, frees and evicts blocks. Source: vLLM 0.33 `BlockPool`."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise KVCacheError(
                "too few blocks", field="num_blocks", got=num_blocks, expected=">= 2: block 0 is the null block"
            )
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.free_queue = FreeBlockQueue(self.blocks[NULL_BLOCK_ID + 1 :])
        # Two blocks may hold the same content (two requests computed it side by side). A block is never swapped
        # for its twin, so block tables only ever grow at their end.
        self._by_key: dict[BlockKey, dict[int, KVCacheBlock]] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks nobody holds; those that can still be found by content count as free."""
        return len(self.free_queue)

    def ref_cnt(self, block_id: int) -> int:
        return self.blocks[block_id].ref_cnt

    def find(self, key: BlockKey) -> int | None:
        """A block of this content, or None. It may be free: `touch` it before anything else is allocated."""
        found = self._by_key.get(key)
        return next(iter(found)) if found else None

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the queue; their old content can no longer be found."""
        if count > self.num_free:
            raise EngineError("not enough free blocks", field="allocate", got=count, expected=f"<= {self.num_free}")
        taken = []
        for _ in range(count):
            block = self.free_queue.popleft()
            self._evict(block)
            block.ref_cnt = 1
            taken.append(block.block_id)
        return taken

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each block, taking it out of the free queue if it was there."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one holder of each block, in the order given: pass a request's blocks last one first.

        A block without a holder goes to the front of the queue if its content cannot be found again (it is warm and
        worth nothing), to the back otherwise. Freed tail first, the end of a sequence is evicted before its start,
        which more requests share.
        """
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block_id == NULL_BLOCK_ID or block.ref_cnt < 1:
                raise EngineError("freeing a block that nobody holds", field="free", got=block_id)
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and block.key is None:
                self.free_queue.prepend(block)
            elif block.ref_cnt == 0:
                self.free_queue.append(block)

    def cache(self, block_id: int, key: BlockKey) -> None:
        """Make a held, full block findable by its content."""
        block = self.blocks[block_id]
        if block.ref_cnt < 1 or block.key not in (None, key):
            raise EngineError("caching a block that is free or holds something else", field="cache", got=block_id)
        block.key = key
        self._by_key.setdefault(key, {})[block_id] = block

    def _evict(self, block: KVCacheBlock) -> None:
        if block.key is not None:
            twins = self._by_key[block.key]
            del twins[block.block_id]
            if not twins:
                del self._by_key[block.key]
            block.key = None

    def reset_cache(self) -> bool:
        """Forget all content. Refused (False, nothing changed) while any block is held."""
        if self.num_free != self.num_blocks - 1:
            return False
        for block in self.blocks:
            self._evict(block)
        return True

    def check_conservation(self, holders: Iterable[Iterable[int]]) -> None:
        """Raise EngineError unless the books balance.

        holders: the block ids of each holder (null blocks are skipped). Checked: free + held + 1 == num_blocks;
        the reference count of a block is its number of holders; exactly the blocks without holder are queued, once
        each; a content key leads to blocks that carry it, and to no other.
        """
        counts = Counter(b for ids in holders for b in ids if b != NULL_BLOCK_ID)
        free = [block.block_id for block in self.free_queue]
        faults = []
        if len(free) != len(set(free)) or len(free) != self.num_free:
            faults.append(f"free queue of size {self.num_free} holds {free}")
        if len(free) + len(counts) + 1 != self.num_blocks:
            faults.append(f"{len(free)} free + {len(counts)} held + 1 != {self.num_blocks}")
        if both := counts.keys() & set(free):
            faults.append(f"both free and held: {sorted(both)}")
        wrong = [b.block_id for b in self.blocks if b.ref_cnt != counts[b.block_id]]
        if wrong:
            faults.append(f"reference count differs from the number of holders: {wrong}")
        mapped = {b: key for key, found in self._by_key.items() for b in found}
        carried = {b.block_id: b.key for b in self.blocks if b.key is not None}
        if mapped != carried or not all(self._by_key.values()):
            faults.append("content map and blocks disagree")
        if faults:
            raise EngineError("block pool is inconsistent: " + "; ".join(faults), field="block_pool")
