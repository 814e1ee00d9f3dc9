"""Words and uniforms of the kernels against known answers and, bit for bit, against the NumPy twin."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

import torch

from cpu_reference.sample import noise as cpu
from gpu_backend.sample import noise as gpu
from gpu_backend.triton_support import resolve_device

pytestmark = pytest.mark.interpret
DEVICE, _ = resolve_device("auto")
SCHEMES = ("murmur3", "philox")
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# (seed, counter, first word of Philox4x32-10); the first is the published answer for zero key and counter.
PHILOX_WORDS = [
    (0, 0, 0x6627E8D5),
    (0, 1, 0xF8E4CCA4),
    (1, 0, 0xE3E80670),
    (42, 7, 0x5BBD83B1),
    (42, 2**30 + 7, 0xE77DF995),
    (42, 2**32, 0x42E0B8B3),
    (42, 2**32 + 7, 0x05B263F6),
    (-1, 0, 0x72A47709),
    (-2, 5, 0x10988774),
    (2**31, 3, 0xEE9DEDD7),
    (2**32, 3, 0xFC669D65),
    (123456789012345678, 1000, 0x6A7D206E),
    (INT64_MAX, 2**31, 0x9065EEFF),
    (INT64_MIN, 2**31 - 1, 0xE5D7FA22),
    (42, -1, 0x8F40BD76),
]
# (seed, position, token, murmur3 word, bits of the uniform, Gumbel noise)
MURMUR_WORDS = [
    (0, 0, 0, 0x8134CDF8, 0x3F0134CE, 0.352944997),
    (0, 0, 1, 0x00990201, 0x3B190202, 6.058697213),
    (1, 0, 0, 0x92228D1B, 0x3F12228D, 0.167324839),
    (42, 7, 0, 0x661EB28D, 0x3ECC3D65, 0.675299818),
    (42, 7, 1, 0x860D65EC, 0x3F060D66, 0.298964832),
    (42, 7, 31999, 0xDCC540F6, 0x3F5CC541, -0.684759250),
    (42, 7, 128255, 0x1DB18E38, 0x3DED8C72, 2.093236182),
    (42, 8, 0, 0xC784EDB3, 0x3F4784EE, -0.412955445),
    (-1, 0, 0, 0x3E003DC7, 0x3E7800F7, 1.282568268),
    (-2, 5, 3, 0xF2DF9C0A, 0x3F72DF9C, -1.088744557),
    (2**32 + 42, 7, 0, 0xC06096D3, 0x3F406097, -0.330890390),
    (123456789012345678, 1000, 151935, 0x44762489, 0x3E88EC49, 1.167341154),
    (INT64_MIN, 131071, 5, 0x1D597F73, 0x3DEACBFC, 2.105631854),
    (42, 2**30 + 7, 0, 0x97943F5E, 0x3F17943F, 0.108980988),
    (42 ^ 2**32, 2**30 + 7, 0, 0xFDA4A628, 0x3F7DA4A6, -1.544975088),
    (7, 29, 148238, 0xFFFFFFD5, 0x3F800000, -2.8115408),
    (7, 29, 25875, 0x00000009, 0x31180000, 19.929419),
]
# word -> bits of the philox uniform, before 0 is lifted to the smallest one
PHILOX_UNIFORMS = {
    0x00000000: 0x2FFFFFFF,
    0x00000001: 0x2FFFFFFF,
    0x3FFFFFFF: 0x3EFFFFFF,
    0x40000000: 0x3EFFFFFF,
    0x7FFFFFFF: 0x3F7FFFFF,
    0x80000000: 0x3F7FFFFF,
    0xFFFFFFFE: 0x2FFFFFFF,
    0xFFFFFFFF: 0x2FFFFFFF,
    0x6627E8D5: 0x3F4C4FD1,
    0xF8E4CCA4: 0x3D63666A,
}


def device(values: object, dtype: type[np.generic] = np.int64) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype)).to(DEVICE)


def host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()


def test_philox_gives_the_published_words() -> None:
    # A kernel shows no word of a bare (seed, counter): it takes that word as the key of a row. So the twin is held
    # against the table, and the row's words, two generators deep, against the twin.
    for seed, counter, word in PHILOX_WORDS:
        assert int(cpu.philox4x32(np.int64([seed]).view(np.uint64), np.int64([counter]).view(np.uint64))[0]) == word
    seeds, counters, _ = (np.int64(column) for column in zip(*PHILOX_WORDS, strict=True))
    words = host(gpu.noise_words(device(seeds), device(counters), 3, "philox"))
    np.testing.assert_array_equal(words, cpu.noise_words(seeds, counters, 3, "philox"))


def test_murmur3_gives_the_known_words_uniforms_and_noise() -> None:
    for seed, position, token, word, bits, noise in MURMUR_WORDS:
        words = gpu.noise_words(device([seed]), device([position]), token + 1, "murmur3")
        assert int(host(words)[0, token]) == word
        assert int(host(gpu.uniforms(words[:, token:], "murmur3")).view(np.uint32)[0, 0]) == bits
        drawn = host(gpu.gumbel_noise(device([seed]), device([position]), token + 1, "murmur3"))
        assert drawn[0, token] == pytest.approx(noise, abs=3e-6)


def test_philox_uniforms_at_the_edges() -> None:
    words = np.uint32(list(PHILOX_UNIFORMS))
    bits = host(gpu.uniforms(device(words, np.uint32), "philox")).view(np.uint32)
    np.testing.assert_array_equal(bits, np.uint32(list(PHILOX_UNIFORMS.values())))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_words_and_uniforms_are_the_twins_bits(scheme: str) -> None:
    rng = np.random.default_rng(11)
    edges = np.int64([0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, INT64_MIN, INT64_MAX])
    seeds = np.concatenate([np.repeat(edges, len(edges)), rng.integers(INT64_MIN, INT64_MAX, 40)])
    positions = np.concatenate([np.tile(edges, len(edges)), rng.integers(0, 2**40, 40)])
    words = gpu.noise_words(device(seeds), device(positions), 333, scheme)
    np.testing.assert_array_equal(host(words), cpu.noise_words(seeds, positions, 333, scheme))
    u = host(gpu.uniforms(words, scheme))
    np.testing.assert_array_equal(u.view(np.uint32), cpu.uniforms(host(words), scheme).view(np.uint32))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_uniforms_of_every_magnitude_are_the_twins_bits(scheme: str) -> None:
    around = [2**k + d for k in range(32) for d in (-1, 0, 1)] + [2**32 - 2**k for k in range(1, 32)]
    words = np.concatenate([np.uint32(around), np.random.default_rng(3).integers(0, 2**32, 70_001).astype(np.uint32)])
    u = host(gpu.uniforms(device(words, np.uint32), scheme))
    np.testing.assert_array_equal(u.view(np.uint32), cpu.uniforms(words, scheme).view(np.uint32))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_noise_is_within_its_bound(scheme: str) -> None:
    seeds, positions = np.int64([3, -5, 2**40, 77]), np.int64([0, 9, 100_000, 5])
    drawn = host(gpu.gumbel_noise(device(seeds), device(positions), 100_003, scheme))
    exact = cpu.gumbel_noise(seeds, positions, 100_003, scheme)
    assert drawn.dtype == np.float32
    assert np.abs(drawn - exact).max() <= 3e-6
