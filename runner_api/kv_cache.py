"""Shapes and sizes of the KV cache: what a layer needs (spec), and what it got (config).

Source: vLLM 0.33 `KVCacheSpec`, `KVCacheConfig`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from runner_api.checks import is_integer
from runner_api.constants import BLOCK_TABLE_TOKEN_ALIGNMENT
from runner_api.errors import KVCacheError, UnknownNameError

KINDS = ("attention", "token_position", "state")
ITEM_SIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one attention layer stores for each token.

    kind: "attention" stores K and V `[num_kv_heads, head_size]` of `dtype`; "token_position" stores one
    (token, position) pair of int64, the witness model's cache; "state" has no slot mapping (its table names
    recurrent states, not token places).
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    kind: str = "attention"
    # Keys further than this behind the query are never read (None = all are).
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        sizes = {"block_size": self.block_size, "num_kv_heads": self.num_kv_heads, "head_size": self.head_size}
        if self.sliding_window is not None:
            sizes["sliding_window"] = self.sliding_window
        for name, value in sizes.items():
            if not is_integer(value) or value < 1:
                raise KVCacheError("not a size", field=name, got=value, expected="an integer >= 1")
        if not isinstance(self.dtype, str) or self.dtype not in ITEM_SIZE:
            raise UnknownNameError("dtype", self.dtype, ITEM_SIZE, field="dtype")
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise UnknownNameError("kind", self.kind, KINDS, field="kind")

    @property
    def has_slot_mapping(self) -> bool:
        return self.kind != "state"

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of one layer: 2 (K and V) * block_size * heads * head size * item size."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * ITEM_SIZE[self.dtype]

    @property
    def window_reach(self) -> int:
        """How many tokens before the current one a query reads; 0 = no window."""
        return self.sliding_window - 1 if self.sliding_window else 0

    def block_table_width(self, max_model_len: int) -> int:
        """Columns of this group's block table: enough for max_model_len, rounded up to whole 128-token runs.

        >>> KVCacheSpec(48, 1, 8, "float32").block_table_width(8192)
        176
        """
        num_blocks = -(-max_model_len // self.block_size)
        align = BLOCK_TABLE_TOKEN_ALIGNMENT // math.gcd(BLOCK_TABLE_TOKEN_ALIGNMENT, self.block_size)
        return -(-num_blocks // align) * align


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share one block table. Allocator blocks of `spec.block_size`; a kernel may use smaller ones."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    kernel_block_size: int | None = None

    def __post_init__(self) -> None:
        _check_layer_names("layer_names", self.layer_names)
        if not isinstance(self.spec, KVCacheSpec):
            raise KVCacheError("a group has one spec", field="spec", got=self.spec, expected="a KVCacheSpec")
        kernel = self.kernel_block_size
        if kernel is not None and (not is_integer(kernel) or kernel < 1 or self.spec.block_size % kernel):
            raise KVCacheError(
                "kernel block size does not divide the block size", field="kernel_block_size", got=kernel,
                expected=f"a divisor of {self.spec.block_size}",
            )  # fmt: skip
        if self.blocks_per_kv_block > 1 and not self.spec.has_slot_mapping:
            raise KVCacheError(
                "a state is not divided", field="kernel_block_size", got=kernel, expected=self.spec.block_size
            )

    @property
    def blocks_per_kv_block(self) -> int:
        """How many kernel blocks one block of the allocator holds."""
        return self.spec.block_size // (self.kernel_block_size or self.spec.block_size)


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One allocation of `size` bytes, used by each layer named in `shared_by`."""

    size: int
    shared_by: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_layer_names("shared_by", self.shared_by)
        if not is_integer(self.size) or self.size < 1:
            raise KVCacheError("not a size in bytes", field="size", got=self.size, expected="an integer >= 1")


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The cache of one rank: block ids 0 .. num_blocks-1 in every group (0 is the null block).

    `tensors` may be left empty; then every layer has memory of its own.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    tensors: tuple[KVCacheTensor, ...] = ()

    def __post_init__(self) -> None:
        if not is_integer(self.num_blocks) or self.num_blocks < 2:
            raise KVCacheError(
                "no cache has this many blocks",
                field="num_blocks",
                got=self.num_blocks,
                expected="an integer >= 2: block 0 is the null block",
            )
        for name, values, kind in (("groups", self.groups, KVCacheGroup), ("tensors", self.tensors, KVCacheTensor)):
            if not isinstance(values, (tuple, list)) or not all(isinstance(v, kind) for v in values):
                raise KVCacheError(
                    f"is not a tuple of {kind.__name__}", field=name, got=values, expected=f"{kind.__name__} objects"
                )

    @property
    def bytes_per_block(self) -> int:
        return sum(g.spec.bytes_per_block * len(g.layer_names) for g in self.groups)


def group_kv_cache_specs(specs: dict[str, KVCacheSpec], num_blocks: int) -> KVCacheConfig:
    """One group per distinct spec, in order of first appearance; one tensor per layer."""
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for layer, spec in specs.items():
        by_spec.setdefault(spec, []).append(layer)
    groups = tuple(KVCacheGroup(tuple(layers), spec) for spec, layers in by_spec.items())
    tensors = tuple(KVCacheTensor(spec.bytes_per_block * num_blocks, (layer,)) for layer, spec in specs.items())
    return KVCacheConfig(num_blocks, groups, tensors)


def _check_layer_names(field: str, names: tuple[str, ...]) -> None:
    if not isinstance(names, (tuple, list)) or not names or not all(isinstance(name, str) for name in names):
        raise KVCacheError("layers are named", field=field, got=names, expected="a tuple of at least one name")
