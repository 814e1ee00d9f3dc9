"""The paged KV cache: allocation, and writing new keys and values at their slots. Twin: cpu_reference/kv_cache.py."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gpu_backend.triton_support import entry, launch, signature, tile, tl, triton
from runner_api.kv_cache import KVCacheConfig

# One layer: the pair of tensors [num_blocks, block_size, num_kv_heads, head_size] (K, V); for the witness model the
# pair int64[num_blocks, block_size, 1, 1] (token, position).
LayerCache = tuple[torch.Tensor, torch.Tensor]


def allocate_kv_cache(kv_cache_config: KVCacheConfig, device: torch.device) -> dict[str, LayerCache]:
    """Zeroed caches by layer name, of the dtype that the layer's spec names."""
    caches = {}
    for group in kv_cache_config.groups:
        spec = group.spec
        shape = (kv_cache_config.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
        kind = getattr(torch, spec.dtype)
        for layer in group.layer_names:
            caches[layer] = (
                torch.zeros(shape, dtype=kind, device=device),
                torch.zeros(shape, dtype=kind, device=device),
            )
    return caches


def kernel_caches(caches: dict[str, LayerCache], kv_cache_config: KVCacheConfig) -> dict[str, LayerCache]:
    """The same memory as attention sees it: [num_blocks * r, block_size / r, heads, size], r kernel blocks in a block.

    Slots count token places one behind the other, so they are the same in both views.
    """
    seen = dict(caches)
    for group in kv_cache_config.groups:
        if group.blocks_per_kv_block > 1:
            for layer in group.layer_names:
                key, value = (c.view(-1, group.kernel_block_size, *c.shape[2:]) for c in caches[layer])
                seen[layer] = (key, value)
    return seen


@entry
@signature({"*fp32": "key value key_cache value_cache", "*i64": "slot_mapping"}, WIDTH=192, BLOCK=1024)
@signature({"*fp16": "key value key_cache value_cache", "*i64": "slot_mapping"}, WIDTH=1024, BLOCK=1024)
@signature({"*bf16": "key value key_cache value_cache", "*i64": "slot_mapping"}, WIDTH=1024, BLOCK=1024)
@signature({"*i64": "key value key_cache value_cache slot_mapping"}, key_stride=1, value_stride=1, WIDTH=1, BLOCK=64)
@triton.jit(do_not_specialize=["num_tokens"])
def _reshape_and_cache_kernel(
    key, key_stride, value, value_stride, slot_mapping, key_cache, value_cache, num_tokens, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # Element e of the flat [tokens, WIDTH] run is channel e % WIDTH of token e // WIDTH.
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token = e // WIDTH
    channel = e % WIDTH
    # 1 tokens that own a slot
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1)
    owned = slot >= 0
    # 2 block and offset: blocks lie one behind the other, so the slot itself counts token places
    place = slot * WIDTH + channel
    # 3 store
    k = tl.load(key + token * key_stride + channel, mask=owned, other=0)
    v = tl.load(value + token * value_stride + channel, mask=owned, other=0)
    tl.store(key_cache + place, k.to(key_cache.dtype.element_ty), mask=owned)
    tl.store(value_cache + place, v.to(value_cache.dtype.element_ty), mask=owned)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    """Store each token's key and value at its slot; tokens without a slot are skipped.

    Shapes: key, value: [tp, heads, size]; slot_mapping: int64[tp]; caches: [num_blocks, block_size, heads, size].
    Writes: the named slots of both caches. A negative slot must not be used as an index: it would be the last place.
    """
    num_tokens, heads, size = key.shape
    assert all(cache.is_contiguous() for cache in (key_cache, value_cache)), "a slot times its width is its place"
    assert all(num_tokens == 0 or x[0].is_contiguous() for x in (key, value)), "a token's channels lie side by side"
    width = tile(num_tokens * heads * size)
    launch(
        _reshape_and_cache_kernel, (triton.cdiv(num_tokens * heads * size, width),), key, key.stride(0), value,
        value.stride(0), slot_mapping, key_cache, value_cache, num_tokens, WIDTH=heads * size, BLOCK=width,
    )  # fmt: skip


def zero_blocks(caches: Iterable[LayerCache], block_ids: list[int]) -> None:
    """Blank whole blocks in every layer, before a step may read them."""
    for pair in caches:
        for cache in pair:
            for block in block_ids:
                cache[block].zero_()


def copy_blocks(caches: Iterable[LayerCache], copies: list[tuple[int, int]]) -> None:
    """Copy blocks (source, destination) in every layer: copy on write."""
    for pair in caches:
        for cache in pair:
            for source, destination in copies:
                cache[destination].copy_(cache[source])
