"""Block pool and KV cache manager: the conservation law under any sequence of calls, and the order of reuse."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_core.block_pool import BlockPool
from engine_core.kv_cache_manager import KVCacheManager, hash_block
from engine_core.request import Request
from runner_api import (
    CapabilityError,
    EngineError,
    KVCacheConfig,
    KVCacheError,
    KVCacheGroup,
    KVCacheSpec,
    SamplingParams,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
)


def config(num_blocks: int, *groups: WitnessGroup) -> KVCacheConfig:
    return group_kv_cache_specs(WitnessConfig(groups=groups or (WitnessGroup(4),)).kv_cache_specs(), num_blocks)


def request(req_id: str, tokens: list[int], **kwargs) -> Request:
    return Request(req_id, tuple(tokens), SamplingParams(temperature=0.0), **kwargs)


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, cache and free blocks in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.holders: list[list[int]] = []
        self.contents: dict[int, tuple[bytes, int]] = {}

    @rule(count=st.integers(0, 4))
    def allocate(self, count):
        if count > self.pool.num_free:
            with pytest.raises(EngineError, match="not enough free blocks"):
                self.pool.allocate(count)
            return
        ids = self.pool.allocate(count)
        assert 0 not in ids
        assert len(set(ids)) == count
        assert not set(ids) & {b for held in self.holders for b in held}
        for block in ids:
            self.contents.pop(block, None)
        self.holders.append(ids)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), content=st.integers(0, 5), group=st.integers(0, 1))
    def cache(self, data, content, group):
        block = data.draw(st.sampled_from(sorted({b for held in self.holders for b in held})))
        key = (bytes([content]), group)
        if self.contents.get(block, key) != key:
            with pytest.raises(EngineError):
                self.pool.cache(block, key)
            return
        self.pool.cache(block, key)
        self.contents[block] = key

    @rule(content=st.integers(0, 5), group=st.integers(0, 1))
    def share(self, content, group):
        key = (bytes([content]), group)
        block = self.pool.find(key)
        assert (block is None) == (key not in self.contents.values())
        if block is not None:
            assert self.contents[block] == key
            self.pool.touch([block])
            self.holders.append([block])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data):
        ids = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.free(ids[::-1])

    @rule()
    def reset(self):
        idle = not any(self.holders)
        assert self.pool.reset_cache() == idle
        if idle:
            self.contents.clear()

    @invariant()
    def conserved(self):
        self.pool.check_conservation(self.holders)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase


class ManagerMachine(RuleBasedStateMachine):
    """Requests over a tiny alphabet come, grow and go; what is found by content must be that content."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager(config(8), max_model_len=64)
        self.requests: list[Request] = []
        self.count = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), data=st.data())
    def admit(self, tokens, data):
        new = request(str(self.count), tokens)
        self.count += 1
        hit, num_hit = self.manager.get_computed_blocks(new)
        assert num_hit == 4 * len(hit[0]) < len(tokens)
        n = data.draw(st.integers(1, len(tokens) - num_hit))
        held = {b for r in self.requests for b in self.manager.get_block_ids(r.req_id)[0]}
        free = self.manager.pool.num_free
        got = self.manager.allocate_slots(new, n, hit)
        if got is None:
            needed = -(-(num_hit + n) // 4)
            assert needed - len(set(hit[0]) & held) > free
            assert self.manager.pool.num_free == free
            return
        assert not set(got[0]) & held
        new.num_computed_tokens = num_hit + n
        self.requests.append(new)
        assert self.manager.get_block_ids(new.req_id)[0] == hit[0] + got[0]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        old = data.draw(st.sampled_from(self.requests))
        if old.num_computed_tokens == old.num_tokens:
            old.all_token_ids.append(token)
        if self.manager.allocate_slots(old, old.num_tokens - old.num_computed_tokens) is not None:
            old.num_computed_tokens = old.num_tokens

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data):
        self.manager.free(self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1))))

    @invariant()
    def conserved(self):
        self.manager.check_conservation()

    @invariant()
    def shared_blocks_hold_equal_prefixes(self):
        seen: dict[int, list[int]] = {}
        for r in self.requests:
            for column, block in enumerate(self.manager.get_block_ids(r.req_id)[0]):
                end = min((column + 1) * 4, r.num_computed_tokens)
                prefix = r.all_token_ids[:end]
                assert seen.setdefault(block, prefix) == prefix


ManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestManagerMachine = ManagerMachine.TestCase


def test_null_block_is_never_handed_out():
    pool = BlockPool(4)
    assert pool.allocate(3) == [1, 2, 3]
    with pytest.raises(EngineError, match="not enough free blocks"):
        pool.allocate(1)
    with pytest.raises(KVCacheError, match="null block"):
        BlockPool(1)


def test_reuse_order_unhashed_first_then_least_recently_used():
    pool = BlockPool(6)
    a, b, c, d, e = pool.allocate(5)
    for i, block in enumerate((a, b)):
        pool.cache(block, (bytes([i]), 0))
    pool.free([b, a])  # hashed, tail first: b is the next to be evicted
    pool.free([d, c])  # not hashed: to the front, the last one freed first
    pool.free([e])
    assert pool.allocate(5) == [e, c, d, b, a]
    assert pool.find((b"\0", 0)) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool.allocate(1),  # a block nobody holds
        lambda pool: pool.free([1]),  # a holder that no longer counts
        lambda pool: setattr(pool.blocks[2], "ref_cnt", 2),
        lambda pool: setattr(pool.blocks[2], "key", (b"x", 0)),
        lambda pool: pool.free_queue.remove(pool.blocks[4]),
    ],
)
def test_check_conservation_sees_damage(damage):
    pool = BlockPool(6)
    held = pool.allocate(2)
    pool.check_conservation([held])
    damage(pool)
    with pytest.raises(EngineError, match="inconsistent"):
        pool.check_conservation([held])


def test_misuse_is_refused():
    pool = BlockPool(3)
    for block in (0, 1):
        with pytest.raises(EngineError, match="nobody holds"):
            pool.free([block])
        with pytest.raises(EngineError, match="caching a block"):
            pool.cache(block, (b"x", 0))


def test_hash_chain_depends_on_everything_before():
    first = hash_block(b"", [1, 2, 3])
    assert first == hash_block(b"", [1, 2, 3])
    assert first != hash_block(b"", [1, 2, 4])
    assert first != hash_block(b"", [1, 2, 3], ("salt",))
    assert hash_block(b"", [1], ("ab", "c")) != hash_block(b"", [1], ("a", "bc"))
    assert hash_block(first, [4, 5, 6]) != hash_block(hash_block(b"", [0, 2, 3]), [4, 5, 6])
    assert hash_block(b"", [1, 256]) != hash_block(b"", [257, 0])


@pytest.mark.parametrize(("length", "blocks"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_hit_leaves_the_last_token_to_compute(length, blocks):
    manager = KVCacheManager(config(10), 64)
    tokens = list(range(12))
    manager.allocate_slots(request("a", tokens), 12)
    hit, num = manager.get_computed_blocks(request("b", tokens[:length]))
    assert (len(hit[0]), num) == (blocks, 4 * blocks)


def test_extra_keys_separate_requests():
    manager = KVCacheManager(config(10), 64)
    tokens = list(range(9))
    manager.allocate_slots(request("a", tokens, extra_keys=("tenant 1",)), 9)
    assert manager.get_computed_blocks(request("b", tokens))[1] == 0
    assert manager.get_computed_blocks(request("c", tokens, extra_keys=("tenant 2",)))[1] == 0
    assert manager.get_computed_blocks(request("d", tokens, extra_keys=("tenant 1",)))[1] == 8


def test_free_hits_are_not_evicted_by_their_own_allocation():
    manager = KVCacheManager(config(4), 64)
    a = request("a", list(range(12)))
    manager.allocate_slots(a, 12)
    manager.free(a)
    b = request("b", [*range(8), 99, 98])
    hit, num = manager.get_computed_blocks(b)
    assert num == 8
    new = manager.allocate_slots(b, 2, hit)
    assert new is not None
    assert not set(new[0]) & set(hit[0])
    manager.check_conservation()
    c = request("c", [5, 5, 5, 5, 5])
    assert manager.allocate_slots(c, 5) is None
    manager.check_conservation()


def test_several_groups_are_all_or_nothing():
    manager = KVCacheManager(config(7, WitnessGroup(4), WitnessGroup(2)), 64)
    a = request("a", list(range(8)))
    got = manager.allocate_slots(a, 8)
    assert got is not None
    assert [len(ids) for ids in got] == [2, 4]
    manager.check_conservation()
    assert manager.allocate_slots(request("b", [1]), 1) is None
    assert manager.pool.num_free == 0
    manager.free(a)
    assert manager.pool.num_free == 6


def test_lookahead_takes_blocks_beyond_the_step():
    manager = KVCacheManager(config(7), max_model_len=10)
    got = manager.allocate_slots(request("a", list(range(4))), 4, num_lookahead_tokens=1)
    assert got is not None
    assert len(got[0]) == 2
    got = manager.allocate_slots(request("b", list(range(9))), 9, num_lookahead_tokens=8)
    assert got is not None
    assert len(got[0]) == 3  # cut at max_model_len


def test_blocks_behind_a_window_are_released():
    manager = KVCacheManager(config(6, WitnessGroup(4, sliding_window=5)), 64)
    a = request("a", list(range(40)))
    held = []
    while a.num_computed_tokens < 40:
        assert manager.allocate_slots(a, 4) is not None
        a.num_computed_tokens += 4
        ids = manager.get_block_ids("a")[0]
        # A query at position p reads p - 4 .. p, so the next step needs everything from here on.
        first_read = max(a.num_computed_tokens - 4 - 4, 0)
        assert all(b == 0 for b in ids[: first_read // 4])
        assert all(b != 0 for b in ids[first_read // 4 :])
        held.append(sum(b != 0 for b in ids))
        manager.check_conservation()
    assert max(held) <= manager.max_blocks_needed(40, 4)
    manager.free(a)
    assert manager.pool.num_free == 5


def test_blocks_behind_a_window_pay_for_the_next_ones():
    manager = KVCacheManager(config(3, WitnessGroup(4, sliding_window=5)), 64)
    a = request("a", list(range(24)))
    for _ in range(6):  # two usable blocks carry any length
        assert manager.allocate_slots(a, 4) is not None
        a.num_computed_tokens += 4
        manager.check_conservation()


def test_the_end_of_a_freed_request_is_evicted_before_its_start():
    manager = KVCacheManager(config(4), 64)
    a = request("a", list(range(12)))
    manager.allocate_slots(a, 12)
    manager.free(a)
    for left in (8, 4, 0):
        manager.pool.allocate(1)
        assert manager.get_computed_blocks(request("b", [*range(12), 99]))[1] == left


def test_prefix_caching_is_refused_where_it_would_be_wrong():
    window = config(8, WitnessGroup(4, sliding_window=6))
    two = config(8, WitnessGroup(4), WitnessGroup(8))
    for bad in (window, two):
        with pytest.raises(CapabilityError, match="prefix caching needs a single KV cache group"):
            KVCacheManager(bad, 64, enable_prefix_caching=True)
        assert not KVCacheManager(bad, 64).enable_prefix_caching
    assert KVCacheManager(config(8), 64).enable_prefix_caching
    state = KVCacheConfig(8, (KVCacheGroup(("s",), KVCacheSpec(4, 1, 1, "float32", kind="state")),))
    with pytest.raises(CapabilityError, match="caches of tokens only"):
        KVCacheManager(state, 64)
