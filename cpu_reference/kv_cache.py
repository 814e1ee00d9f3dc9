"""The paged KV cache: allocation, and writing new keys and values at their slots. Twin: gpu_backend/kv_cache.py."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from runner_api.errors import CapabilityError
from runner_api.kv_cache import KVCacheConfig

# One layer: the pair of arrays [num_blocks, block_size, num_kv_heads, head_size] (K, V); for the witness model the
# pair int64[num_blocks, block_size, 1, 1] (token, position).
LayerCache = tuple[np.ndarray, np.ndarray]


def allocate_kv_cache(kv_cache_config: KVCacheConfig) -> dict[str, LayerCache]:
    """Zeroed caches by layer name, of the dtype that the layer's spec names. Raises CapabilityError for bfloat16."""
    caches = {}
    for group in kv_cache_config.groups:
        spec = group.spec
        shape = (kv_cache_config.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
        if spec.dtype == "bfloat16":
            raise CapabilityError(
                "NumPy has no bfloat16", field="spec.dtype", got=spec.dtype, expected="'float32' or 'float64'"
            )
        kind = np.dtype(spec.dtype)
        for layer in group.layer_names:
            caches[layer] = (np.zeros(shape, kind), np.zeros(shape, kind))
    return caches


def kernel_caches(caches: dict[str, LayerCache], kv_cache_config: KVCacheConfig) -> dict[str, LayerCache]:
    """The same memory as attention sees it: [num_blocks * r, block_size / r, heads, size], r kernel blocks in a block.

    Slots count token places one behind the other, so they are the same in both views.
    """
    seen = dict(caches)
    for group in kv_cache_config.groups:
        if group.blocks_per_kv_block > 1:
            for layer in group.layer_names:
                key, value = (c.reshape(-1, group.kernel_block_size, *c.shape[2:]) for c in caches[layer])
                seen[layer] = (key, value)
    return seen


def reshape_and_cache(
    key: np.ndarray, value: np.ndarray, slot_mapping: np.ndarray, key_cache: np.ndarray, value_cache: np.ndarray
) -> None:
    """Store each token's key and value at its slot; tokens without a slot are skipped.

    Shapes: key, value: [tp, heads, size]; slot_mapping: int64[tp]; caches: [num_blocks, block_size, heads, size].
    Writes: the named slots of both caches. A negative slot must not be used as an index: it would be the last place.
    """
    # 1 tokens that own a slot
    owned = slot_mapping >= 0
    slots = slot_mapping[owned]
    # 2 block and offset
    block_size = key_cache.shape[1]
    block, offset = slots // block_size, slots % block_size
    # 3 store
    key_cache[block, offset] = key[owned]
    value_cache[block, offset] = value[owned]


def zero_blocks(caches: Iterable[LayerCache], block_ids: list[int]) -> None:
    """Blank whole blocks in every layer, before a step may read them."""
    for pair in caches:
        for cache in pair:
            cache[list(block_ids)] = 0


def copy_blocks(caches: Iterable[LayerCache], copies: list[tuple[int, int]]) -> None:
    """Copy blocks (source, destination) in every layer: copy on write."""
    for pair in caches:
        for cache in pair:
            for source, destination in copies:
                cache[destination] = cache[source]
