"""The witness model: integer arithmetic that makes every index of a step visible in its tokens.

Writing KV stores the pair (token id, position) at the token's slot. Reading hashes every pair found through the
block table up to the query's own position, so one wrong slot, length, position or table entry changes the logits, and
nothing is rounded: two right runners agree bit for bit, whatever the batch. All sums wrap modulo 2^64.

For the token at position p of a request, in KV cache group g with window w (keys j from max(0, p - w + 1), or 0, to p):

    pair(j)   = kv_g[table_g[j // block_size] * block_size + j % block_size]
    h_g(p)    = sum over j of mix64(pair(j).token * TOKEN + pair(j).position * POSITION + (j + 1) * INDEX)
    hidden(p) = sum over g of h_g(p) * (2 * g + 1)
    logit(v)  = (mix64(hidden(p) + (v + 1) * VOCAB) >> 44) / 2^16          # 20 bits: exact in float32, in [0, 16)
"""

from __future__ import annotations

from dataclasses import dataclass

from runner_api.checks import check_integer
from runner_api.errors import ConfigError
from runner_api.kv_cache import KVCacheSpec

# Odd 64-bit multipliers with no pattern in common; mix64 is the splitmix64 finaliser (Steele et al. 2014).
TOKEN = 0x9E3779B97F4A7C15
POSITION = 0xC2B2AE3D27D4EB4F
INDEX = 0x165667B19E3779F9
VOCAB = 0xD6E8FEB86659FD93
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
LOGIT_SHIFT = 44
LOGIT_SCALE = 1.0 / 65536.0


@dataclass(frozen=True, slots=True)
class WitnessGroup:
    """One KV cache group of the witness model: one layer of this block size and window."""

    block_size: int = 16
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        self.kv_cache_spec()  # refuses sizes that cannot be

    def kv_cache_spec(self) -> KVCacheSpec:
        return KVCacheSpec(self.block_size, 1, 1, "int64", kind="token_position", sliding_window=self.sliding_window)


@dataclass(frozen=True, slots=True)
class WitnessConfig:
    """Pass it to `load_model` in place of a checkpoint."""

    vocab_size: int = 64
    groups: tuple[WitnessGroup, ...] = (WitnessGroup(),)

    def __post_init__(self) -> None:
        check_integer("vocab_size", self.vocab_size, 2)
        if not isinstance(self.groups, (tuple, list)) or not self.groups:
            raise ConfigError("no KV cache group", field="groups", got=self.groups, expected="at least one")
        for group in self.groups:
            if not isinstance(group, WitnessGroup):
                raise ConfigError("not a KV cache group", field="groups", got=group, expected="a WitnessGroup")

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """One layer `witness.<g>` per group."""
        return {f"witness.{g}": group.kv_cache_spec() for g, group in enumerate(self.groups)}
