"""The witness model on the device. Its definition is in runner_api/witness.py. Twin: cpu_reference/models/witness.py.

Sums wrap modulo 2^64, so they may be added in any order and the bits are the twin's. Tensors store the 64 bits as
int64, which torch can copy and index; kernels read them as uint64, so that shifts are logical.
"""

from __future__ import annotations

import torch

from gpu_backend.attn_metadata import AttentionMetadata
from gpu_backend.kv_cache import LayerCache, reshape_and_cache
from gpu_backend.triton_support import INTERPRETED, block, entry, launch, signature, tile, tl, triton
from runner_api import witness as w
from runner_api.kv_cache import KVCacheSpec
from runner_api.witness import WitnessConfig

TOKEN, POSITION, INDEX, VOCAB = (tl.constexpr(c) for c in (w.TOKEN, w.POSITION, w.INDEX, w.VOCAB))
MIX_1, MIX_2 = tl.constexpr(w.MIX_1), tl.constexpr(w.MIX_2)
LOGIT_SHIFT, LOGIT_SCALE = tl.constexpr(w.LOGIT_SHIFT), tl.constexpr(w.LOGIT_SCALE)


@triton.jit
def mix64(x):
    """The splitmix64 finaliser on uint64, modulo 2^64."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@entry
@signature(
    {"*i64": "token_cache position_cache hidden", "*i32": "block_table query_start_loc seq_lens"},
    cache_slot_stride=1, BLOCK_SIZE=16, WINDOW=0, GROUP=0, REQS=64, QUERIES=16, KEYS=64,
)  # fmt: skip
@signature(
    {"*i64": "token_cache position_cache hidden", "*i32": "block_table query_start_loc seq_lens"},
    cache_slot_stride=1, BLOCK_SIZE=5, WINDOW=7, GROUP=1, REQS=16, QUERIES=16, KEYS=64,
)  # fmt: skip
@triton.jit(do_not_specialize=["num_reqs"])
def _witness_attention_kernel(
    token_cache,
    position_cache,
    block_table,
    query_start_loc,
    seq_lens,
    num_reqs,
    hidden,
    cache_block_stride,
    cache_slot_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 = none
    GROUP: tl.constexpr,
    REQS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    # 1 each query's request: as many as end at or before it stand in front of that one
    request = tl.arange(0, REQS)
    ends = tl.load(query_start_loc + 1 + request, mask=request < num_reqs, other=2147483647)
    owner = tl.sum((ends[None, :] <= query[:, None]).to(tl.int32), 1)
    own = query < tl.load(query_start_loc + num_reqs)
    # 2 its position; a padding token stands before all keys
    end = tl.load(query_start_loc + 1 + owner, mask=own, other=0)
    at = tl.where(own, tl.load(seq_lens + owner, mask=own, other=0) - end + query, -1)
    total = tl.zeros([QUERIES], tl.uint64)
    for first_key in range(0, tl.max(at, 0) + 1, KEYS):
        # 3 each query sees the keys from the window's edge to itself; only those are read
        index = first_key + tl.arange(0, KEYS)
        seen = index[None, :] <= at[:, None]
        if WINDOW > 0:
            seen = seen & (at[:, None] - index[None, :] < WINDOW)
        # 4 the pair stored at their slots; block ids are widened before they are multiplied
        entries = block_table + (owner * table_stride)[:, None] + (index // BLOCK_SIZE)[None, :]
        place = tl.load(entries, mask=seen, other=0).to(tl.int64) * cache_block_stride
        place += ((index % BLOCK_SIZE) * cache_slot_stride)[None, :]
        token = tl.load(token_cache + place, mask=seen, other=0).to(tl.uint64)
        position = tl.load(position_cache + place, mask=seen, other=0).to(tl.uint64)
        # 5 hash and sum
        term = mix64(token * TOKEN + position * POSITION + ((index + 1).to(tl.uint64) * INDEX)[None, :])
        total += tl.sum(tl.where(seen, term, 0), 1)
    before = tl.load(hidden + query, mask=own, other=0).to(tl.uint64)
    tl.store(hidden + query, (before + total * (2 * GROUP + 1)).to(tl.int64), mask=own)


def witness_attention(
    token_cache: torch.Tensor,
    position_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_reqs: int,
    window: int | None,
    group: int,
    hidden: torch.Tensor,
) -> None:
    """Add to each token's hidden value the hash of the pairs it sees through its request's block table.

    A program owns a tile of tokens, of whichever requests: an interpreted program costs the same for one token as for
    hundreds.

    Shapes: caches: int64[num_blocks, block_size, 1, 1]; block_table: int32[num_reqs, W]; query_start_loc:
    int32[num_reqs+1]; seq_lens: int32[num_reqs]; hidden: int64[tp], the bits of the twin's uint64.
    Writes: hidden of the batch's tokens.
    """
    queries = tile(len(hidden), most=512 if INTERPRETED else 16)
    keys = tile(max(16384 // queries, 32) if INTERPRETED else 64)
    launch(
        _witness_attention_kernel, (triton.cdiv(len(hidden), queries),),
        token_cache, position_cache, block_table, query_start_loc, seq_lens, num_reqs, hidden,
        *token_cache.stride()[:2], block_table.stride(0), BLOCK_SIZE=token_cache.shape[1], WINDOW=window or 0,
        GROUP=group, REQS=block(num_reqs), QUERIES=queries, KEYS=keys,
    )  # fmt: skip


@entry
@signature({"*i64": "hidden_states", "*fp32": "logits"}, BLOCK=1024)
@triton.jit(do_not_specialize=["num_logits", "vocab_size"])
def _witness_logits_kernel(hidden_states, num_logits, vocab_size, logits, BLOCK: tl.constexpr):
    # Element e of the flat [L, V] run is token e % V of row e // V.
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = e // vocab_size
    token = e % vocab_size
    hidden = tl.load(hidden_states + row, mask=row < num_logits, other=0).to(tl.uint64)
    # 1 the top 20 bits of the hash of (hidden value, token)
    word = mix64(hidden + (token + 1).to(tl.uint64) * VOCAB) >> LOGIT_SHIFT
    # 2 as an exact float32 in [0, 16)
    tl.store(logits + e, word.to(tl.int32).to(tl.float32) * LOGIT_SCALE, mask=row < num_logits)


def witness_logits(hidden_states: torch.Tensor, vocab_size: int, logits: torch.Tensor) -> None:
    """The logits of every token, from the row's hidden value.

    Shapes: hidden_states: int64[L]; logits: float32[L, V], contiguous. Writes: logits.
    """
    width = tile(logits.numel())
    launch(
        _witness_logits_kernel, (triton.cdiv(logits.numel(), width),),
        hidden_states, len(hidden_states), vocab_size, logits, BLOCK=width,
    )  # fmt: skip


class WitnessModel:
    def __init__(self, config: WitnessConfig) -> None:
        self.config = config
        self.vocab_size = config.vocab_size

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self.config.kv_cache_specs()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: dict[str, LayerCache],
        attn_metadata: dict[str, AttentionMetadata],
        intermediates: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Hidden values as int64[tp, 1]."""
        hidden = torch.zeros(len(input_ids), dtype=torch.int64, device=input_ids.device)
        key, value = input_ids.to(torch.int64).view(-1, 1, 1), positions.view(-1, 1, 1)
        for g in range(len(self.config.groups)):
            layer = f"witness.{g}"
            cache, m = kv_caches[layer], attn_metadata[layer]
            # 1 every token's pair is written before any is read
            reshape_and_cache(key, value, m.slot_mapping, *cache)
            # 2 read them back through the block table
            witness_attention(*cache, m.block_table, m.query_start_loc, m.seq_lens, m.num_reqs, m.window, g, hidden)
        if intermediates is not None:
            intermediates["hidden"] = hidden.clone()
        return hidden[:, None]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """float32[L, V], exact."""
        logits = torch.empty(len(hidden_states), self.vocab_size, dtype=torch.float32, device=hidden_states.device)
        witness_logits(hidden_states.reshape(-1), self.vocab_size, logits)
        return logits
