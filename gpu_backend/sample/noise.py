"""Random numbers as a pure function of (seed, position, token): no state, no order, no generator.

Two schemes: `murmur3` hashes all three at once (vLLM 0.33); `philox` derives a key from seed and position and counts
tokens (vLLM 0.26). Words and uniforms are the same bits on every backend; both generators are written out here
because those of Triton change between its versions. Twin: cpu_reference/sample/noise.py.

Arithmetic modulo 2^32 is meant to wrap, so its products and sums say `sanitize_overflow=False`.
"""

from __future__ import annotations

import torch

from gpu_backend.triton_support import INTERPRETED, launch, probe, signature, tile, tl, triton

MASK = tl.constexpr(0xFFFFFFFF)
PHILOX_A, PHILOX_B = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
PHILOX_KEY_A, PHILOX_KEY_B = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
PHILOX_SCALE = tl.constexpr(4.6566127342e-10)  # just below 2^-31, so that the largest uniform stays below 1
LOG_STEP = tl.constexpr(8.262958294867817e-08)  # 2^-23 log(2)


@triton.jit
def philox4x32(key, counter):
    """First word of Philox4x32 with ten rounds (Salmon et al. 2011).

    key: uint64 (low word, high word); counter: uint64, its words 0 and 1 (2 and 3 are zero). Gives uint32.
    """
    k0, k1 = (key & MASK).to(tl.uint32), (key >> 32).to(tl.uint32)
    c0, c1 = (counter & MASK).to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2 = c0 & 0
    c3 = c0 & 0
    for _ in tl.static_range(10):
        # 1 two 32 x 32 -> 64 bit products, as halves
        a_high, a_low = tl.umulhi(c0, PHILOX_A), tl.mul(c0, PHILOX_A, sanitize_overflow=False)
        b_high, b_low = tl.umulhi(c2, PHILOX_B), tl.mul(c2, PHILOX_B, sanitize_overflow=False)
        # 2 mix their halves with the other words and the key
        c0 = b_high ^ c1 ^ k0
        c1 = b_low
        c2 = a_high ^ c3 ^ k1
        c3 = a_low
        # 3 bump the key
        k0 = tl.add(k0, PHILOX_KEY_A, sanitize_overflow=False)
        k1 = tl.add(k1, PHILOX_KEY_B, sanitize_overflow=False)
    return c0


@triton.jit
def _rotl(x, r: tl.constexpr):
    return (x << r) | (x >> (32 - r))


@triton.jit
def _mix(h, word):
    word = _rotl(tl.mul(word, 0xCC9E2D51, sanitize_overflow=False), 15)
    word = tl.mul(word, 0x1B873593, sanitize_overflow=False)
    h = tl.mul(_rotl(h ^ word, 13), 5, sanitize_overflow=False)
    return tl.add(h, 0xE6546B64, sanitize_overflow=False)


@triton.jit
def row_key(seed, position, SCHEME: tl.constexpr):
    """What the words of a row's tokens have in common: uint32. seed, position: int64."""
    if SCHEME == "murmur3":
        seed = seed.to(tl.uint64)
        key = (seed & 0).to(tl.uint32)
        key = _mix(key, (seed & MASK).to(tl.uint32))
        key = _mix(key, (seed >> 32).to(tl.uint32))
        key = _mix(key, (position.to(tl.uint64) & MASK).to(tl.uint32))
    else:
        key = philox4x32(seed.to(tl.uint64), position.to(tl.uint64))
    return key


@triton.jit
def _murmur3_before_last(key, token_ids):
    """murmur3 without its last step, which leaves the upper half of a word as it is."""
    h = _mix(key, token_ids.to(tl.uint32)) ^ 16
    h = tl.mul(h ^ (h >> 16), 0x85EBCA6B, sanitize_overflow=False)
    return tl.mul(h ^ (h >> 13), 0xC2B2AE35, sanitize_overflow=False)


@triton.jit
def murmur3(seed, position, token_ids):
    """murmur3-32 of the words (seed low, seed high, position low, token id).

    seed, position: int64[rows, 1]; token_ids: uint64[1, tokens]. Gives uint32[rows, tokens].
    """
    return words_of(row_key(seed, position, "murmur3"), token_ids, "murmur3")


@triton.jit
def words_of(key, token_ids, SCHEME: tl.constexpr):
    """The random word of each (row, token): uint32. key: the row's, uint32[rows, 1]; token_ids: uint64[1, tokens]."""
    if SCHEME == "murmur3":
        words = _murmur3_before_last(key, token_ids)
        words = words ^ (words >> 16)
    else:
        words = philox4x32(key.to(tl.uint64), token_ids)
    return words


@triton.jit
def row_words(seed, position, token_ids, SCHEME: tl.constexpr):
    """The random word of each (row, token): uint32. seed, position: int64[rows, 1]; token_ids: uint64[1, tokens]."""
    if SCHEME == "murmur3":
        words = murmur3(seed, position, token_ids)
    else:
        words = words_of(row_key(seed, position, SCHEME), token_ids, SCHEME)
    return words


@triton.jit
def to_uniforms(words, SCHEME: tl.constexpr):
    """Words to float32 in (0, 1] (murmur3) or (0, 1) (philox); every rounding is a single one, so bits are fixed."""
    if SCHEME == "murmur3":
        high = (words >> 16).to(tl.float32) * 0.0000152587890625  # 2^-16
        low = ((words & 0xFFFF).to(tl.float32) + 0.5) * 0.00000000023283064365386963  # 2^-32
        u = high + low
    else:
        u = tl.maximum(_magnitude(words) * PHILOX_SCALE, PHILOX_SCALE)
    return u


@triton.jit
def _magnitude(words):
    """A word of philox as float32 in [0, 2^31]."""
    signed = words.to(tl.int32, bitcast=True)
    return tl.where(signed < 0, ~signed, signed).to(tl.float32)


@triton.jit
def to_gumbel(u):
    """-log(-log(1 - u)) in float32; 1 - u is kept from 0, where u is 1, by the smallest step of float32 below 1.

    Near 0, where the noise is largest, 1 - u forgets most of u: there log(1 - u) is its series
    -u (1 + u/2 + u^2/3 + ...). Eight terms for u < 1/8 leave out less than 1e-8 of the sum.
    """
    series = u * 0.125 + 0.14285714285714285
    series = series * u + 0.16666666666666666
    series = series * u + 0.2
    series = series * u + 0.25
    series = series * u + 0.3333333333333333
    series = series * u + 0.5
    series = (series * u + 1.0) * u
    exact = -tl.log(tl.maximum(1.0 - u, 0.000000059604644775390625))  # 2^-24
    return -tl.log(tl.where(u < 0.125, series, exact))


@triton.jit
def rough_logs(key, token_ids, SCHEME: tl.constexpr):
    """For each (row, token) a float32 r >= 0 with: noise < noise_most(SCHEME) - LOG_STEP * r + 1e-4.

    It costs little more than the words. The noise of u is at most -log(u), and u = w / 2^n (n = 32 or 31) of a word w.
    Read as an integer, the bits of the float32 w are at most 2^23 (127 + log2(w)); so with r those bits,
    -log(u) <= (127 + n) log(2) - 2^-23 log(2) r. (murmur3's last step, left out, changes w by less than a part in
    2^15, and roundings do less.)

    key: the row's, uint32[rows, 1]; token_ids: uint64[1, tokens].
    """
    if SCHEME == "murmur3":
        w = _murmur3_before_last(key, token_ids).to(tl.float32)
    else:
        w = _magnitude(words_of(key, token_ids, SCHEME))
    return w.to(tl.int32, bitcast=True).to(tl.float32)


@triton.jit
def noise_most(SCHEME: tl.constexpr):
    """What noise is left under by a rough logarithm of 0."""
    return 110.2104017090313 if SCHEME == "murmur3" else 109.51725452847136  # (127 + 32) log(2), (127 + 31) log(2)


@triton.jit
def tile_words(row, token, seeds, positions, num_rows, SCHEME: tl.constexpr):
    """The random words of a tile of rows and tokens."""
    seed = tl.load(seeds + row, mask=row < num_rows, other=0)
    position = tl.load(positions + row, mask=row < num_rows, other=0)
    return row_words(seed[:, None], position[:, None], token.to(tl.uint64)[None, :], SCHEME)


@probe
@signature({"*i64": "seeds positions", "*u32": "words"}, SCHEME="murmur3", ROWS=1, BLOCK=2048)
@signature({"*i64": "seeds positions", "*u32": "words"}, SCHEME="philox", ROWS=1, BLOCK=2048)
@triton.jit(do_not_specialize=["num_rows"])
def _noise_words_kernel(
    seeds,
    positions,
    num_rows,
    vocab_size,
    words,
    SCHEME: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (token < vocab_size)[None, :]
    drawn = tile_words(row, token, seeds, positions, num_rows, SCHEME)
    tl.store(words + (row * vocab_size)[:, None] + token[None, :], drawn, mask=inside)


def noise_words(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, scheme: str) -> torch.Tensor:
    """The random word of every (logits row, token): uint32[L, V].

    Shapes: seeds, positions: int64[L].
    """
    words = torch.empty(len(seeds), vocab_size, dtype=torch.uint32, device=seeds.device)
    grid, tiling = vocab_tiles(len(seeds), vocab_size)
    launch(_noise_words_kernel, grid, seeds, positions, len(seeds), vocab_size, words, SCHEME=scheme, **tiling)
    return words


@probe
@signature({"*u32": "words", "*fp32": "u"}, SCHEME="murmur3", BLOCK=1024)
@signature({"*u32": "words", "*fp32": "u"}, SCHEME="philox", BLOCK=1024)
@triton.jit(do_not_specialize=["num_words"])
def _uniforms_kernel(words, num_words, u, SCHEME: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(u + at, to_uniforms(tl.load(words + at, mask=at < num_words, other=0), SCHEME), mask=at < num_words)


def uniforms(words: torch.Tensor, scheme: str) -> torch.Tensor:
    """Words to float32 in (0, 1] (murmur3) or (0, 1) (philox); every rounding is a single one, so bits are fixed."""
    words = words.contiguous()
    u = torch.empty(words.shape, dtype=torch.float32, device=words.device)
    width = tile(words.numel())
    launch(_uniforms_kernel, (triton.cdiv(words.numel(), width),), words, words.numel(), u, SCHEME=scheme, BLOCK=width)
    return u


@probe
@signature({"*i64": "seeds positions", "*fp32": "noise"}, SCHEME="murmur3", ROWS=1, BLOCK=2048)
@signature({"*i64": "seeds positions", "*fp32": "noise"}, SCHEME="philox", ROWS=1, BLOCK=2048)
@triton.jit(do_not_specialize=["num_rows"])
def _gumbel_noise_kernel(
    seeds,
    positions,
    num_rows,
    vocab_size,
    noise,
    SCHEME: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (token < vocab_size)[None, :]
    words = tile_words(row, token, seeds, positions, num_rows, SCHEME)
    tl.store(noise + (row * vocab_size)[:, None] + token[None, :], to_gumbel(to_uniforms(words, SCHEME)), mask=inside)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, scheme: str) -> torch.Tensor:
    """Gumbel noise float32[L, V]: -log(-log(1 - u)) of the float32 uniform u; large where u is near 0.

    1 - u is kept from 0, where u rounds to 1, by the smallest step of float32 below 1. Within 3e-6 of the exact value
    for the same u (the noise reaches 22.9, where half a step of float32 is 1e-6).
    """
    noise = torch.empty(len(seeds), vocab_size, dtype=torch.float32, device=seeds.device)
    grid, tiling = vocab_tiles(len(seeds), vocab_size)
    launch(_gumbel_noise_kernel, grid, seeds, positions, len(seeds), vocab_size, noise, SCHEME=scheme, **tiling)
    return noise


def vocab_tiles(num_rows: int, vocab_size: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid (tiles of rows, tiles of the vocabulary) of a kernel over [rows, vocabulary], and its ROWS and BLOCK.

    A compiled program takes part of one row; an interpreted one, which costs the same whatever it holds, many rows.
    """
    width = tile(vocab_size, most=32768 if INTERPRETED else 2048)
    rows = tile(num_rows, most=65536 // width, least=1) if INTERPRETED else 1
    return (triton.cdiv(num_rows, rows), triton.cdiv(vocab_size, width)), {"ROWS": rows, "BLOCK": width}
