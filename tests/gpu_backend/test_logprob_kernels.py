"""Log probabilities on the device against the NumPy twin, stage by stage and whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

import torch
from step_driver import Driver

from cpu_reference.sample import logprob as cpu
from gpu_backend import triton_support
from gpu_backend.sample import logprob as gpu
from gpu_backend.triton_support import resolve_device
from runner_api import NO_ROW, RunnerConfig, SamplingParams, WitnessConfig, group_kv_cache_specs, load_runner

pytestmark = pytest.mark.interpret
DEVICE, _ = resolve_device("auto")
TOLERANCE = 2e-5
LOW, NAN = -np.inf, np.nan


@pytest.fixture(params=[16, 65536], ids=["narrow tiles", "wide tiles"])
def _tiles(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "TILE_LIMIT", request.param)


def device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


def host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()


def awkward(seed: int, num_logits: int, vocab_size: int) -> np.ndarray:
    """Random logits with ties, both zeros, -inf, NaN, +inf, large offsets, and rows of one kind only."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, (num_logits, vocab_size)).astype(np.float32)
    logits[1::7] = rng.integers(-2, 3, logits[1::7].shape)
    logits[2::7][rng.random(logits[2::7].shape) < 0.4] = LOW
    logits[3::7, rng.integers(0, vocab_size)] = NAN
    logits[4::7] = 0.0
    logits[4::7, ::3] = -0.0
    logits[5::7] = LOW
    logits[6::7] += 100.0
    logits[6, vocab_size // 2] = np.inf
    if num_logits > 10:
        logits[10, : vocab_size // 2] = NAN
        logits[10, vocab_size // 2 :] = LOW
    return logits


def near(got: np.ndarray, expected: np.ndarray) -> None:
    """The same NaNs and infinities; the rest within the tolerance."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(expected))
    finite = np.isfinite(expected)
    np.testing.assert_array_less(np.abs(got[finite] - expected[finite]), TOLERANCE)


SHAPES = [(1, 1), (1, 17), (7, 5), (13, 100), (22, 37), (5, 1037)]


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(("num_logits", "vocab_size"), SHAPES)
def test_stats(num_logits: int, vocab_size: int) -> None:
    rng = np.random.default_rng(1)
    logits = awkward(0, max(num_logits, 7), vocab_size)
    tokens = rng.integers(0, vocab_size, len(logits) + 1)
    expected = [np.full(len(logits) + 1, -9.0, np.float32), np.full(len(logits) + 1, -9)]
    got = [device(a) for a in expected]
    cpu.compute_logprob_stats(tokens, num_logits, logits, *expected)
    gpu.compute_logprob_stats(device(tokens), num_logits, device(logits), *got)
    near(host(got[0]), expected[0])
    np.testing.assert_array_equal(host(got[1]), expected[1])


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(("num_logits", "vocab_size"), SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_top_tokens(num_logits: int, vocab_size: int, share: float) -> None:
    logits = awkward(2, max(num_logits, 7), vocab_size)
    num_top = int(np.ceil(share * vocab_size))
    expected = np.full((num_logits + 1, num_top + 2), -9, np.int32)
    got = device(expected)
    cpu.select_top_tokens(num_logits, num_top, logits, expected)
    gpu.select_top_tokens(num_logits, num_top, device(logits), got)
    np.testing.assert_array_equal(host(got), expected)


def test_top_tokens_of_many_equal_groups() -> None:
    """Ties run across groups of neighbours and across the places where a selection is cut."""
    rng = np.random.default_rng(3)
    logits = rng.integers(0, 3, (6, 32 * 40 + 5)).astype(np.float32)
    logits[0] = 1.0
    logits[1, :] = LOW
    logits[2, -1] = 9.0
    expected = np.zeros((6, 15), np.int32)
    got = device(expected)
    cpu.select_top_tokens(6, 15, logits, expected)
    gpu.select_top_tokens(6, 15, device(logits), got)
    assert expected[0].tolist() == expected[1].tolist() == list(range(15))
    np.testing.assert_array_equal(host(got), expected)


def test_a_selection_is_cut_into_runs_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = awkward(4, 23, 90)
    expected = np.zeros((23, 90), np.int32)
    cpu.select_top_tokens(23, 90, logits, expected)
    for keys in (1, 700):
        monkeypatch.setattr(gpu, "KEYS_PER_RUN", keys)
        got = device(np.zeros_like(expected))
        gpu.select_top_tokens(23, 90, device(logits), got)
        np.testing.assert_array_equal(host(got), expected)


@pytest.mark.usefixtures("_tiles")
def test_listed_tokens_and_their_values() -> None:
    rng = np.random.default_rng(5)
    num_logits, vocab_size, rows = 21, 70, 8
    logits = awkward(6, num_logits, vocab_size)
    mapping = np.concatenate([[NO_ROW, 7, 0], rng.integers(0, rows, num_logits - 2)])
    num_listed = np.int32([0, 1, 19, 0, 4, 20, 0, 2])
    listed = rng.integers(0, vocab_size, (rows, 128)).astype(np.int32)
    listed[np.arange(128) >= num_listed[:, None]] = -77
    for num_top in (0, 6, 20):
        expected = np.full((num_logits + 1, 20), -9, np.int32)
        got = device(expected)
        cpu.select_top_tokens(num_logits, num_top, logits, expected)
        gpu.select_top_tokens(num_logits, num_top, device(logits), got)
        cpu.select_listed_tokens(mapping, num_listed, listed, num_logits, expected)
        gpu.select_listed_tokens(*map(device, (mapping, num_listed, listed)), num_logits, got)
        np.testing.assert_array_equal(host(got), expected)
        assert expected[1].tolist() == [*listed[7, :2], *[-1] * 18]
        tokens = rng.integers(0, vocab_size, num_logits + 1)
        log_sum = rng.normal(size=num_logits + 1).astype(np.float32)
        out = [np.full((num_logits + 1, 21), -9, np.int32), np.full((num_logits + 1, 21), -9.0, np.float32)]
        kernel_out = [device(a) for a in out]
        cpu.gather_logprobs(tokens, expected, log_sum, num_logits, logits, *out)
        gpu.gather_logprobs(device(tokens), got, device(log_sum), num_logits, device(logits), *kernel_out)
        np.testing.assert_array_equal(host(kernel_out[0]), out[0])
        np.testing.assert_array_equal(host(kernel_out[1]), out[1])  # one subtraction in float32 on both sides
        assert (out[1][1, 3:] == LOW).all()
        assert (out[0][1, 3:] == 0).all()


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("num_top", [0, 3, 500])
def test_whole(normalised: bool, num_top: int) -> None:
    rng = np.random.default_rng(7)
    logits = awkward(8, 30, 500)
    tokens = rng.integers(0, 500, 30)
    expected = cpu.compute_logprobs(logits, tokens, num_top, normalised)
    got = gpu.compute_logprobs(device(logits), device(tokens), num_top, normalised)
    np.testing.assert_array_equal(host(got.token_ids), expected.token_ids)
    np.testing.assert_array_equal(host(got.ranks), expected.ranks)
    near(host(got.logprobs), expected.logprobs)
    assert got.logprobs.dtype == torch.float32
    assert got.token_ids.dtype == torch.int32
    assert got.ranks.dtype == torch.int64


@pytest.mark.parametrize("vocab_size", [37, 5000])
def test_a_row_does_not_see_its_neighbours(vocab_size: int) -> None:
    """Bit for bit, in batches of any size and at any place."""
    rng = np.random.default_rng(9)
    logits = rng.normal(0, 5, (64, vocab_size)).astype(np.float32)
    tokens = rng.integers(0, vocab_size, 64)
    whole = gpu.compute_logprobs(device(logits), device(tokens), 4)
    for low, high in ((0, 1), (63, 64), (5, 12), (1, 64), (0, 33)):
        part = gpu.compute_logprobs(device(logits[low:high]), device(tokens[low:high]), 4)
        for a, b in zip(part.tensors(), whole.tensors(), strict=True):
            assert torch.equal(a, b[low:high])


def test_logits_of_bfloat16() -> None:
    """Half-precision logits are read as they are: ties are many, and go to the lower id."""
    rng = np.random.default_rng(10)
    logits = torch.from_numpy(rng.normal(0, 3, (5, 300)).astype(np.float32)).to(torch.bfloat16)
    tokens = torch.from_numpy(rng.integers(0, 300, 5))
    expected = cpu.compute_logprobs(logits.float().numpy(), tokens.numpy(), 9)
    got = gpu.compute_logprobs(logits.to(DEVICE), tokens.to(DEVICE), 9)
    np.testing.assert_array_equal(host(got.token_ids), expected.token_ids)
    np.testing.assert_array_equal(host(got.ranks), expected.ranks)
    near(host(got.logprobs), expected.logprobs)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_logits", "vocab_size"), [(1, 128256), (7, 32000), (256, 128256), (1024, 32000)])
@pytest.mark.parametrize("num_top", [0, 20, 128])
def test_large(num_logits: int, vocab_size: int, num_top: int) -> None:
    rng = np.random.default_rng(11)
    logits = rng.normal(0, 4, (num_logits, vocab_size)).astype(np.float32)
    logits[:, rng.integers(0, vocab_size, 50)] = logits[:, :1]
    logits[rng.random(logits.shape) < 0.1] = LOW
    tokens = rng.integers(0, vocab_size, num_logits)
    some = rng.permutation(num_logits)[:8]
    expected = cpu.compute_logprobs(logits[some], tokens[some], num_top)
    got = gpu.compute_logprobs(device(logits), device(tokens), num_top)
    np.testing.assert_array_equal(host(got.token_ids)[some], expected.token_ids)
    np.testing.assert_array_equal(host(got.ranks)[some], expected.ranks)
    near(host(got.logprobs)[some], expected.logprobs)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_nothing_waits_for_the_device(mode: str) -> None:
    """Answers, lists and prompts, in chunks: no wait between a plan and its output."""
    runner = load_runner(
        "gpu", RunnerConfig(max_num_reqs=4, max_num_batched_tokens=64, max_model_len=64, logprobs_mode=mode)
    )
    runner.load_model(WitnessConfig())
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), 64))
    driver = Driver(runner)
    asks = {"a": {"logprobs": 5, "prompt_logprobs": 2}, "b": {"logprob_token_ids": (1, 2)}, "c": {"prompt_logprobs": 0}}
    for round_ in range(2):  # kernels are compiled and loaded by the first
        names = {r: f"{r}{round_}" for r in asks}
        for r, ask in asks.items():
            driver.add(names[r], range(1, 12), sampling_params=SamplingParams(temperature=0.0, **ask))
        for n in (4, 7, 1):
            plan = driver.plan(dict.fromkeys(names.values(), n))
            torch.cuda.set_sync_debug_mode("error" if round_ else "default")
            try:
                runner.execute_model(plan)
                output = runner.sample_tokens()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            got = output.get_output()
            assert set(got.prompt_logprobs) == ({names["a"], names["c"]} if n == 7 else set())
            assert got.logprobs is not None
            for r in names.values():
                driver.computed[r] += n
                driver.tokens[r].extend(got.tokens()[r])
        for r in names.values():
            driver.remove(r)
