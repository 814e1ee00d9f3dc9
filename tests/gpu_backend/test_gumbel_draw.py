"""The draw: who wins, rows without a winner, and the composite against the steps one by one, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

import torch

from cpu_reference.sample import gumbel as cpu
from gpu_backend import triton_support
from gpu_backend.sample import candidates, draw, group_bests, row_params
from gpu_backend.sample.gumbel import gumbel_sample, gumbel_scores
from gpu_backend.sample.min_p import apply_min_p
from gpu_backend.sample.temperature import apply_temperature
from gpu_backend.sample.top_k_top_p import apply_top_k_top_p
from gpu_backend.triton_support import resolve_device
from runner_api import NO_ROW, SampleFault

pytestmark = pytest.mark.interpret
DEVICE, _ = resolve_device("auto")
SCHEMES = ("murmur3", "philox")


def device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).to(DEVICE)  # a copy


@pytest.fixture(params=["whole rows", "groups"])
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Rows in one tile, and rows of several groups."""
    if request.param == "groups":
        monkeypatch.setattr(triton_support, "TILE_LIMIT", 64)
    return request.param == "groups"


class Batch:
    """L logits rows of 9 state rows: greedy, T = 1, others; with limits of every kind, and without."""

    def __init__(self, seed: int, num_logits: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> None:
        rng = np.random.default_rng(seed)
        self.l, self.v = num_logits, vocab_size
        self.rows = rng.integers(0, 9, num_logits)
        self.positions = rng.integers(0, 2**33, num_logits)
        self.temperature = np.float32([0.7, 1, 0, 2, 1, 0.3, 1, 0.01, 0.5])
        self.seeds = rng.integers(-(2**63), 2**63 - 1, 9)
        k = np.int32([5, vocab_size, vocab_size, 3, vocab_size, 40, vocab_size, 17, vocab_size])
        self.top_k = np.minimum(k, vocab_size)
        self.top_p = np.float32([0.9, 0.9, 1, 1, 1, 0.5, 0.99, 1, 1])
        self.min_p = np.float32([0, 0, 0, 0.05, 0, 0, 0.3, 0.01, 0])
        logits = rng.normal(size=(num_logits, vocab_size)) * 4
        logits[1::4] = rng.integers(-3, 4, logits[1::4].shape)
        logits[2::4] = np.where(rng.random(logits[2::4].shape) < 0.9, -np.inf, logits[2::4])
        self.logits = torch.from_numpy(logits).to(dtype).to(DEVICE)

    def draw(self, scheme: str, *, limited: bool, short: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The composite's tokens and faults."""
        sampled, faults = device(np.full(self.l + 1, -9)), device(np.full(self.l + 1, -9, np.int32))
        limits = row_params.Limits(*map(device, (self.min_p, self.top_k, self.top_p)))
        given = self.logits.clone()
        draw.draw(
            *map(device, (self.rows, self.positions, self.temperature, self.seeds)), scheme,
            limits if limited else None, self.l, given, sampled, faults, short=short,
        )  # fmt: skip
        assert torch.equal(given.view(torch.uint8), self.logits.view(torch.uint8)), "logits are left as they are"
        assert (int(sampled[-1]), int(faults[-1])) == (-9, -9)
        return sampled[:-1].cpu().numpy(), faults[:-1].cpu().numpy()

    def step_by_step(self, scheme: str, *, limited: bool) -> tuple[np.ndarray, np.ndarray]:
        """The stages' tokens and faults."""
        rows, positions, temperature, seeds = map(device, (self.rows, self.positions, self.temperature, self.seeds))
        x = self.logits.to(torch.float32, copy=True)
        apply_temperature(rows, temperature, self.l, x)
        if limited:
            apply_min_p(rows, device(self.min_p), self.l, x)
            apply_top_k_top_p(rows, device(self.top_k), device(self.top_p), self.l, x)
        sampled, faults = device(np.zeros(self.l, np.int64)), device(np.zeros(self.l, np.int32))
        gumbel_sample(rows, positions, temperature, seeds, scheme, self.l, x, sampled, faults)
        return sampled.cpu().numpy(), faults.cpu().numpy()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_at_once_and_step_by_step_are_the_same_bits(scheme: str, dtype: torch.dtype, narrow: bool) -> None:
    if dtype == torch.bfloat16 and triton_support.INTERPRETED:
        pytest.skip("the interpreter knows no bfloat16")
    batch = Batch(1, 9, 200, dtype)
    for limited in (False, True):
        at_once, steps = batch.draw(scheme, limited=limited), batch.step_by_step(scheme, limited=limited)
        np.testing.assert_array_equal(at_once, steps)


def test_short_lists_and_long_ones_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(2, 9, 300)
    whole = batch.draw("murmur3", limited=True)
    monkeypatch.setattr(triton_support, "TILE_LIMIT", 128)
    for short, width in ((False, 2048), (True, 512), (True, 16)):
        monkeypatch.setattr(candidates, "SHORT_LIST", width)
        np.testing.assert_array_equal(batch.draw("murmur3", limited=True, short=short), whole)


def test_a_row_is_drawn_alike_in_every_batch(narrow: bool) -> None:
    batch = Batch(3, 6, 150)
    together = batch.draw("murmur3", limited=True)
    for i in range(6):
        alone = Batch(3, 6, 150)
        alone.l, alone.rows, alone.positions = 1, batch.rows[i : i + 1], batch.positions[i : i + 1]
        alone.logits = batch.logits[i : i + 1].clone()
        np.testing.assert_array_equal(alone.draw("murmur3", limited=True), np.array(together)[:, i : i + 1])


def special_rows(width: int) -> tuple[np.ndarray, list[int], list[int]]:
    """Logits, the tokens of a greedy draw, faults."""
    rows, tokens, faults = [], [], []
    for values, token, fault in (
        ({}, 0, SampleFault.NONE),  # flat: the lowest id
        ({7: 1, 9: 1, width - 1: 1}, 7, SampleFault.NONE),
        ({width - 1: 1}, width - 1, SampleFault.NONE),
        ({3: np.nan}, 0, SampleFault.NAN),
        ({width - 1: np.nan, 5: np.inf}, 0, SampleFault.NAN),
        ({90: np.inf, 70: np.inf}, 70, SampleFault.NONE),
        (dict.fromkeys(range(width), -np.inf), 0, SampleFault.NO_TOKEN),
        ({**dict.fromkeys(range(width), -np.inf), 81: -1e38}, 81, SampleFault.NONE),
        ({**dict.fromkeys(range(width), -np.inf), 81: np.nan}, 0, SampleFault.NAN),
        ({90: 3e38}, 90, SampleFault.NONE),
    ):
        row = np.zeros(width, np.float32)
        row[list(values)] = list(values.values())
        rows.append(row), tokens.append(token), faults.append(int(fault))
    return np.stack(rows), tokens, faults


def test_who_wins_and_who_does_not(narrow: bool) -> None:
    logits, tokens, faults = special_rows(130)
    n = len(logits)
    rows, zeros = np.zeros(n, np.int64), np.zeros(n, np.int64)
    rows[1] = NO_ROW
    for t in (0.0, 1.0):
        temperature, seeds = np.float32([t, 1]), np.int64([77, 88])
        sampled, found = device(zeros - 9), device(np.int32(zeros) - 9)
        # A row read at -1 would find another one's temperature just before its own table.
        tables = device(np.float32([5, *temperature]))[1:], device(np.int64([5, *seeds]))[1:]
        gumbel_sample(device(rows), device(zeros), *tables, "murmur3", n, device(logits), sampled, found)
        assert found.tolist() == faults
        if t == 0:
            assert sampled.tolist() == tokens
        else:
            sure = [1, 3, 4, 5, 6, 7, 8, 9]
            assert sampled[sure].tolist() == [tokens[i] for i in sure]


def test_scores_that_are_equal_in_float32_go_to_the_lowest_id(narrow: bool) -> None:
    """At 1e9 float32 is too coarse for noise: all tokens tie, while the bounds of their groups do not."""
    batch = Batch(9, 8, 300)
    batch.rows, batch.logits = np.full(8, 1), device(np.full((8, 300), 1e9, np.float32))
    batch.logits[1::2, :100] = -np.inf
    tokens, _ = batch.draw("murmur3", limited=False)
    assert tokens.tolist() == [0, 100] * 4


def test_quotients_that_are_infinite_fault_and_win_as_step_by_step(narrow: bool) -> None:
    """Far logits over a small temperature: several reach +inf, and all of a row may reach -inf."""
    batch = Batch(4, 4, 200)
    batch.rows = np.int64([5, 7, 5, 7])
    rng = np.random.default_rng(5)
    far = np.stack([rng.choice([3e38, 2e38, 1.0], 200), rng.choice([2e38, 1e37, 1e38], 200), np.full(200, -3e38),
                    np.full(200, -1e37)])  # fmt: skip
    batch.logits = device(far.astype(np.float32))
    for limited in (False, True):
        steps = batch.step_by_step("murmur3", limited=limited)
        np.testing.assert_array_equal(batch.draw("murmur3", limited=limited), steps)
    assert steps[1].tolist() == [0, 0, SampleFault.NO_TOKEN, SampleFault.NO_TOKEN]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bounds_of_groups_lie_just_above_their_scores(scheme: str) -> None:
    batch = Batch(6, 9, 20000)
    batch.rows = np.arange(9)
    batch.logits[2] *= 1e4
    batch.logits[3] += 2e5
    arguments = tuple(map(device, (batch.rows, batch.positions, batch.temperature, batch.seeds)))
    rows = row_params.look_up_draws(row_params.Draws(*arguments, scheme), None, 9, 20000, divide=True)
    groups = group_bests.group_bests(rows, scheme, 9, batch.logits, limited=False)
    x = batch.logits.clone()
    apply_temperature(arguments[0], arguments[2], 9, x)
    scores = gumbel_scores(*arguments, scheme, 9, x).cpu().numpy()
    padding = groups.num_groups * groups.width - 20000
    scores = np.pad(scores, ((0, 0), (0, padding)), constant_values=-np.inf)
    best = scores.reshape(9, groups.num_groups, groups.width).max(2)
    bests = groups.bests.cpu().numpy()
    assert best.shape == (9, 79)
    greedy = batch.temperature[batch.rows] == 0
    assert greedy.any()
    np.testing.assert_array_equal(bests[greedy], best[greedy])
    assert (bests[~greedy] > best[~greedy]).all()
    # ... and hardly above them: one group is looked at, or two
    looked_at = (bests > best.max(1, keepdims=True)).sum(1)
    assert looked_at[np.abs(best).max(1) < 1e3].max() <= 3, looked_at


def test_draws_are_the_twins(narrow: bool) -> None:
    batch = Batch(7, 9, 333)
    for scheme in SCHEMES:
        x = batch.logits.clone()
        apply_temperature(device(batch.rows), device(batch.temperature), 9, x)
        sampled, faults = np.zeros(9, np.int64), np.zeros(9, np.int32)
        cpu.gumbel_sample(
            batch.rows, batch.positions, batch.temperature, batch.seeds, scheme, 9, x.cpu().numpy(), sampled, faults
        )
        got = batch.draw(scheme, limited=False)
        np.testing.assert_array_equal(got, (sampled, faults))


# Every kind of batch, type and scheme compiles kernels of its own, so each size takes one of them.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_logits", "vocab_size", "dtype", "scheme"),
    [
        (1, 128256, torch.float32, "murmur3"), (7, 50257, torch.float16, "philox"),
        (64, 32000, torch.bfloat16, "murmur3"), (1024, 32000, torch.float32, "murmur3"),
    ],
)  # fmt: skip
def test_long_rows_at_once_and_step_by_step(num_logits: int, vocab_size: int, dtype: torch.dtype, scheme: str) -> None:
    batch = Batch(num_logits, num_logits, vocab_size, dtype)
    for limited, short in ((False, False), (True, False), (True, True)):
        steps = batch.step_by_step(scheme, limited=limited)
        np.testing.assert_array_equal(batch.draw(scheme, limited=limited, short=short), steps)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    batch = Batch(8, 9, 32000)
    tables = tuple(map(device, (batch.rows, batch.positions, batch.temperature, batch.seeds)))
    limits = row_params.Limits(*map(device, (batch.min_p, batch.top_k, batch.top_p)))
    sampled, faults = device(np.zeros(9, np.int64)), device(np.zeros(9, np.int32))
    for mode in ("default", "error"):  # once to compile
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for some in (None, limits):
                draw.draw(*tables, "murmur3", some, 9, batch.logits, sampled, faults)
                x = batch.logits.clone()
                apply_min_p(tables[0], limits.min_p, 9, x)
                apply_top_k_top_p(tables[0], limits.top_k, limits.top_p, 9, x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
