"""Which blocks each request owns, in each KV cache group, and which of them it can share.

Turns "request r will have n more tokens" into block ids, all groups or none. With prefix caching, full blocks of
known tokens are found again by a hash that chains over all tokens before them. Knows nothing of budgets or order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from engine_core.block_pool import BlockPool
from engine_core.request import Request
from runner_api import NULL_BLOCK_ID, CapabilityError, KVCacheConfig

BlockLists = tuple[list[int], ...]


def hash_block(previous: bytes, token_ids: Sequence[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    """Hash of one full block: sha256 over the hash before it, its tokens, and (first block) the extra keys.

    The chain makes equal hashes mean equal tokens from the very start of the sequence, which KV depends on. Extra
    keys are written with their lengths, so that ("ab", "c") and ("a", "bc") differ.
    """
    digest = hashlib.sha256(previous)
    digest.update(np.asarray(token_ids, dtype=np.int64).tobytes())
    if not previous:
        for key in extra_keys:
            raw = key.encode()
            digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


class KVCacheManager:
    """Block lists of all requests, over one pool.

    enable_prefix_caching: None = wherever it is possible. It is possible for a single group without a window: with
    several groups a hit would have to be valid in each at once, which this manager does not compute.

    Raises CapabilityError if asked for prefix caching where it is not possible, or for a group that is not a cache
    of tokens.
    """

    def __init__(
        self, kv_cache_config: KVCacheConfig, max_model_len: int, *, enable_prefix_caching: bool | None = None
    ) -> None:
        self.groups = kv_cache_config.groups
        self.max_model_len = max_model_len
        for g, group in enumerate(self.groups):
            if not group.spec.has_slot_mapping:
                raise CapabilityError(
                    "this engine allocates caches of tokens only",
                    field=f"groups[{g}]",
                    got=group.spec.kind,
                    expected="a kind with a slot mapping",
                )
        possible = len(self.groups) == 1 and not self.groups[0].spec.sliding_window
        if enable_prefix_caching and not possible:
            raise CapabilityError(
                "prefix caching needs a single KV cache group without a window",
                field="enable_prefix_caching",
                got=f"{len(self.groups)} groups, windows {[g.spec.sliding_window for g in self.groups]}",
                expected="one group, window None",
                hint="Leave enable_prefix_caching unset, or set it to False",
            )
        self.enable_prefix_caching = possible if enable_prefix_caching is None else enable_prefix_caching
        self.pool = BlockPool(kv_cache_config.num_blocks)
        self._blocks: dict[str, BlockLists] = {}
        self._num_cached: dict[str, int] = {}  # leading blocks of the request already in the pool's content map

    # -- capacity ---------------------------------------------------------------------------------------------

    def max_blocks_needed(self, num_tokens: int, max_step_tokens: int) -> int:
        """The most blocks a request of this length can hold at once, over all groups.

        max_step_tokens: tokens one step may add, lookahead included; it bounds what a windowed group keeps.
        """
        total = 0
        for group in self.groups:
            size, reach = group.spec.block_size, group.spec.window_reach
            blocks = -(-min(num_tokens, self.max_model_len) // size)
            if group.spec.sliding_window:
                blocks = min(blocks, -(-(reach + max_step_tokens) // size) + 1)
            total += blocks
        return total

    # -- prefix hits ------------------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> tuple[BlockLists, int]:
        """The longest cached prefix: blocks per group, and their number of tokens.

        At most num_tokens - 1 tokens: the last known token must be computed, or the step has no logits to draw from.
        """
        if not self.enable_prefix_caching or not request.reads_prefix_cache:
            return tuple([] for _ in self.groups), 0
        self._update_hashes(request)
        size = self.groups[0].spec.block_size
        hit: list[int] = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // size]:
            block = self.pool.find((block_hash, 0))
            if block is None:
                break
            hit.append(block)
        return (hit,), len(hit) * size

    def _update_hashes(self, request: Request) -> None:
        size, hashes = self.groups[0].spec.block_size, request.block_hashes
        for i in range(len(hashes), request.num_tokens // size):
            tokens = request.all_token_ids[i * size : (i + 1) * size]
            hashes.append(hash_block(hashes[-1] if hashes else b"", tokens, request.extra_keys))

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the request's full blocks among its first `num_tokens` tokens findable.

        Only known tokens count: a draft may be rejected, and its block must not be found under a wrong content.
        """
        if not self.enable_prefix_caching:
            return
        self._update_hashes(request)
        full = min(num_tokens, request.num_tokens) // self.groups[0].spec.block_size
        owned = self._blocks[request.req_id][0]
        for i in range(self._num_cached[request.req_id], full):
            self.pool.cache(owned[i], (request.block_hashes[i], 0))
        self._num_cached[request.req_id] = max(full, self._num_cached[request.req_id])

    # -- allocation -------------------------------------------------------------------------------------------

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hit: BlockLists | None = None, num_lookahead_tokens: int = 0
    ) -> BlockLists | None:
        """Give the request blocks for its next tokens; None (and nothing changed) if the pool is too full.

        hit: cached blocks to share, from `get_computed_blocks`; only for a request that owns none.
        num_lookahead_tokens: places past the step's tokens, which a drafter writes.

        Returns the newly taken ids per group, without those of `hit`. Full blocks of known tokens become findable at
        once, before their KV is written: a later request of the same step may share them. That is right only if a
        runner writes the KV of a whole batch, layer by layer, before any query of that layer reads.
        """
        new_request = request.req_id not in self._blocks
        owned = self._blocks.get(request.req_id) or tuple([] for _ in self.groups)
        hit = hit or tuple([] for _ in self.groups)
        computed = request.num_computed_tokens + len(hit[0]) * self.groups[0].spec.block_size
        num_tokens = min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        counts = [
            max(-(-num_tokens // group.spec.block_size) - len(ids) - len(shared), 0)
            for group, ids, shared in zip(self.groups, owned, hit, strict=True)
        ]
        behind = [self._behind_window(g, ids, computed) for g, ids in enumerate(owned)]
        # A hit that nobody holds sits in the free queue: sharing it uses up a free block too. A block behind a
        # window has this request as its only holder (windowed groups are never shared), so freeing it frees one.
        revived = sum(self.pool.ref_cnt(b) == 0 for ids in hit for b in ids)
        if sum(counts) + revived > self.pool.num_free + sum(map(len, behind)):
            return None
        for ids, columns in zip(owned, behind, strict=True):
            self.pool.free([ids[c] for c in reversed(columns)])
            for c in columns:
                ids[c] = NULL_BLOCK_ID
        # Hits first: an allocation could otherwise evict the very blocks that are about to be shared.
        for ids, shared in zip(owned, hit, strict=True):
            self.pool.touch(shared)
            ids.extend(shared)
        new = tuple(self.pool.allocate(count) for count in counts)
        for ids, more in zip(owned, new, strict=True):
            ids.extend(more)
        if new_request:
            self._blocks[request.req_id] = owned
            self._num_cached[request.req_id] = len(hit[0])
        self.cache_blocks(request, computed + num_new_tokens)
        return new

    def _behind_window(self, g: int, ids: list[int], computed: int) -> list[int]:
        """Columns of group g that no query at or after `computed` reads and that still hold a block.

        The runner's table keeps the old ids there; that is harmless, since it masks by position what it reads.
        """
        spec = self.groups[g].spec
        if not spec.sliding_window:
            return []
        columns = []
        for c in range(min(max(computed - spec.window_reach, 0) // spec.block_size, len(ids)) - 1, -1, -1):
            if ids[c] == NULL_BLOCK_ID:
                break  # everything before was released by an earlier step
            columns.append(c)
        return columns[::-1]

    def get_block_ids(self, req_id: str) -> BlockLists:
        """A copy of the request's block lists; released columns hold the null block."""
        return tuple(list(ids) for ids in self._blocks[req_id])

    def free(self, request: Request) -> None:
        """Give back everything the request holds, last block first. A request without blocks is a no-op."""
        for ids in self._blocks.pop(request.req_id, ()):
            self.pool.free([b for b in reversed(ids) if b != NULL_BLOCK_ID])
        self._num_cached.pop(request.req_id, None)

    def check_conservation(self) -> None:
        """Raise EngineError unless the pool's books and the block lists agree."""
        self.pool.check_conservation(ids for lists in self._blocks.values() for ids in lists)
