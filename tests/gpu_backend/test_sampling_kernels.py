"""Temperature and draw against the NumPy twins, on given logits."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

import torch

from cpu_reference.sample import gumbel as cpu
from cpu_reference.sample.temperature import apply_temperature as cpu_apply_temperature
from gpu_backend.sample.gumbel import gumbel_sample, gumbel_scores
from gpu_backend.sample.temperature import apply_temperature
from gpu_backend.triton_support import resolve_device
from runner_api import NO_ROW, SampleFault

pytestmark = pytest.mark.interpret
DEVICE, _ = resolve_device("auto")
SCHEMES = ("murmur3", "philox")
NOISE_BOUND = 3e-6  # stated by gumbel_noise


def device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


def witness_like(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Multiples of 2^-16 in [0, 16): no rounding anywhere before the noise."""
    return (rng.integers(0, 2**20, shape) / 65536).astype(np.float32)


def draw(
    rows: np.ndarray, positions: np.ndarray, temperature: np.ndarray, seeds: np.ndarray, noise: str, logits: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and scores of the kernels."""
    sampled = torch.full((len(logits) + 1,), -9, dtype=torch.int64, device=DEVICE)
    faults = torch.full((len(logits) + 1,), -9, dtype=torch.int32, device=DEVICE)
    arguments = (*map(device, (rows, positions, temperature, seeds)), noise, len(logits), device(logits))
    gumbel_sample(*arguments, sampled, faults)
    assert int(sampled[-1]) == int(faults[-1]) == -9
    nothing = (logits == -np.inf).all(axis=1)
    assert faults[:-1].tolist() == np.where(nothing, SampleFault.NO_TOKEN, SampleFault.NONE).tolist()
    return sampled[:-1].cpu().numpy(), gumbel_scores(*arguments).cpu().numpy()


def greedy(logits: np.ndarray) -> np.ndarray:
    zeros = np.zeros(len(logits), np.int64)
    return draw(zeros, zeros, np.zeros(1, np.float32), np.zeros(1, np.int64), "murmur3", logits)[0]


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros((5, 1000), np.float32)
    logits[1, [7, 8, 999]] = 1
    logits[2, 999] = 1
    logits[3] = -1
    logits[4, 1:] = -np.inf
    assert greedy(logits).tolist() == [0, 7, 999, 0, 0]


def test_ties_across_tiles_go_to_the_lowest_id() -> None:
    logits = np.zeros((2, 128256), np.float32)
    logits[0, [65535, 65536, 128255]] = 3
    logits[1, [128000, 127999]] = 3
    assert greedy(logits).tolist() == [65535, 127999]


def test_minus_infinity_is_never_drawn_unless_there_is_nothing_else() -> None:
    rng = np.random.default_rng(0)
    logits = np.full((32, 70), -np.inf, np.float32)
    allowed = rng.integers(0, 70, 32)
    logits[np.arange(32), allowed] = -1e30
    logits[31] = -np.inf
    rows, positions = np.zeros(32, np.int64), np.arange(32)
    for scheme in SCHEMES:
        tokens, _ = draw(rows, positions, np.ones(1, np.float32), np.int64([5]), scheme, logits)
        np.testing.assert_array_equal(tokens[:31], allowed[:31])
        assert tokens[31] == 0  # as the twin's argmax
    assert (greedy(logits)[:31] == allowed[:31]).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("num_logits", "vocab_size"), [(6, 64), (5, 333), (1, 128256)])
def test_draws_equal_the_twins(scheme: str, num_logits: int, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = witness_like(rng, (num_logits, vocab_size))
    rows = rng.permutation(8)[:num_logits]
    positions, seeds = rng.integers(0, 2**20, num_logits), rng.integers(-(2**63), 2**63 - 1, 8)
    temperature = np.float32([1, 0.7, 0, 1, 2, 0.01, 0, 1])
    arguments = (rows, positions, temperature, seeds, scheme)
    tokens, scores = draw(*arguments, logits)
    exact = cpu.gumbel_scores(*arguments, num_logits, logits)
    # Half a step of float32 for the sum, beside the noise's own error.
    assert (np.abs(scores - exact) <= NOISE_BOUND + np.spacing(np.abs(scores)) / 2).all()
    np.testing.assert_array_equal(scores[temperature[rows] == 0], logits[temperature[rows] == 0])
    np.testing.assert_array_equal(tokens, scores.argmax(1))
    np.testing.assert_array_equal(tokens, exact.argmax(1))


def test_a_row_of_no_request_is_greedy() -> None:
    logits = np.float32([[0, 1, 0]])
    rows = np.int64([NO_ROW])
    # A row read at -1 would find this temperature and seed just before the tables.
    tables = np.float32([5, 1]), np.int64([77, 88])
    temperature, seeds = (device(t)[1:] for t in tables)
    sampled, faults = (torch.full((1,), 7, dtype=dtype, device=DEVICE) for dtype in (torch.int64, torch.int32))
    for position in range(20):
        gumbel_sample(
            device(rows), device(np.int64([position])), temperature, seeds, "murmur3", 1, device(logits), sampled,
            faults,
        )  # fmt: skip
        assert (int(sampled), int(faults)) == (1, SampleFault.NONE)


def test_temperature_is_the_twins_division() -> None:
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(5, 333)).astype(np.float32) * 30
    logits[2, :9] = -np.inf
    temperature, rows = np.float32([0, 1, 0.3, 1.7, 0.01]), np.int64([3, 0, 2, 4, 1])
    got, expected = device(logits), logits.copy()
    apply_temperature(device(rows), device(temperature), 5, got)
    cpu_apply_temperature(rows, temperature, 5, expected)
    np.testing.assert_array_equal(got.cpu().numpy(), expected)
