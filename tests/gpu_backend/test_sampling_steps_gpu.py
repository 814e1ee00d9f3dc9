"""The steps of the sampler against their NumPy twins: random ragged batches, drafts, rows without a request, garbage.

Logits hold everything that a float can be; whatever a step does not write must keep its bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

import torch

from conformance.kernel_battery_sampling import SamplingBatch
from gpu_backend import triton_support
from gpu_backend.sample.grammar import apply_grammar_bitmask, grammar_mask_rows, send_masks
from gpu_backend.triton_support import resolve_device
from runner_api import GrammarOutput, load_stages

pytestmark = pytest.mark.interpret

CPU, GPU = load_stages("cpu"), load_stages("gpu")
DEVICE, _ = resolve_device("auto")
BATCHES = [(seed, vocab_size) for vocab_size in (5, 33, 100) for seed in (10, 11)]
STEPS = sorted({stage for stage, _, _ in SamplingBatch(0, 5).calls()})


def check(name: str, **arrays: Any) -> dict[str, np.ndarray]:
    """Run the stage on both sides; all that it may write must have the same bits. The answer is the twin's."""
    with np.errstate(all="ignore"):
        expected = CPU.run(name, **arrays)
        got = GPU.run(name, **arrays)
    assert expected.keys() == got.keys()
    for output, here in expected.items():
        assert here.dtype == got[output].dtype, output
        np.testing.assert_array_equal(got[output], here, err_msg=f"{name}: {output}")
        if here.dtype == np.float32:
            kept, same = (bits(side) == bits(arrays[output]) for side in (here, got[output]))
            np.testing.assert_array_equal(same, kept, err_msg=f"{name}: bits of what is kept")
    return expected


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"i{array.itemsize}")


@pytest.mark.parametrize("widest", [16, 65536])
@pytest.mark.parametrize("step", STEPS)
def test_step_equals_its_twin(step: str, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow tiles make every loop run more than once."""
    monkeypatch.setattr(triton_support, "TILE_LIMIT", widest)
    changed = 0
    for seed, vocab_size in BATCHES if widest == 16 else BATCHES[::2]:
        for stage, _, arrays in SamplingBatch(seed, vocab_size).calls():
            if stage == step:
                for name, out in check(stage, **arrays).items():
                    changed += int((bits(out) != bits(arrays[name])).sum())
    assert changed > 5, "the batches show nothing of this step"


@pytest.mark.parametrize("step", [s for s in STEPS if s.startswith("apply_") and s != "apply_trace_replay"])
def test_rows_behind_the_batch_and_of_no_request_keep_every_bit(step: str) -> None:
    for stage, _, arrays in SamplingBatch(20, 33).calls():
        if stage == step:
            out, num_logits = GPU.run(stage, **arrays)["logits"], arrays["num_logits"]
            nobody = arrays.get("expanded_idx_mapping", arrays.get("mask_rows"))[:num_logits] < 0
            assert nobody.any()
            nobody = np.append(nobody, [True] * (len(out) - num_logits))
            np.testing.assert_array_equal(bits(out)[nobody], bits(arrays["logits"])[nobody])


def test_neutral_penalties_change_no_bit_even_of_garbage() -> None:
    (arrays,) = (a for s, label, a in SamplingBatch(3, 33).calls() if (s, label) == ("apply_penalties", "neutral"))
    arrays["prompt_bitmask"][:], arrays["output_counts"][:] = -1, 5
    np.testing.assert_array_equal(bits(GPU.run("apply_penalties", **arrays)["logits"]), bits(arrays["logits"]))


def test_a_penalty_is_a_product_of_its_own() -> None:
    """1 / factor is rounded once, then multiplied: for some factors a division gives other bits."""
    factors = np.float32([1.1, 1.3, 1.7])
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    out = GPU.run(
        "apply_penalties", expanded_idx_mapping=np.arange(3), expanded_local_pos=np.zeros(3, np.int32),
        input_ids=np.zeros(3, np.int32), repetition=factors, frequency=np.zeros(3, np.float32),
        presence=np.zeros(3, np.float32), prompt_bitmask=np.full((3, 2), -1, np.int32),
        output_counts=np.zeros((3, 64), np.int32), num_logits=3, logits=x,
    )["logits"]  # fmt: skip
    scale = factors[:, None]
    np.testing.assert_array_equal(out, np.where(x > 0, x * (np.float32(1) / scale), x * scale))
    assert (out != np.where(x > 0, x / scale, x * scale)).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_grammars_mask_is_laid_on_the_models_own_floats(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=dtype, device=DEVICE)
    rows, mask = (torch.tensor(a, dtype=torch.int32, device=DEVICE) for a in ([-1, 0], [[5 + 8]]))
    apply_grammar_bitmask(rows, mask, 2, logits)
    assert logits.float().tolist() == [[1, 2, 3], [4, -np.inf, 6]]


def test_masks_belong_to_requests_by_id_and_travel_in_one_copy() -> None:
    starts = np.array([0, 2, 3, 6])
    grammar = GrammarOutput(["c", "a"], np.arange(12, dtype=np.int32).reshape(6, 2))
    rows = grammar_mask_rows(["a", "b", "c"], starts, grammar, 2)
    assert rows.tolist() == [3, 4, -1, 0, 1, 2]
    sent_rows, sent_mask = send_masks(rows, grammar.grammar_bitmask, DEVICE)
    assert sent_rows.tolist() == rows.tolist()
    assert sent_mask.tolist() == grammar.grammar_bitmask.tolist()
    assert sent_rows.untyped_storage().data_ptr() == sent_mask.untyped_storage().data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [64, 300])
def test_steps_equal_their_twins_at_sizes_that_only_a_gpu_does(num_rows: int) -> None:
    for stage, _, arrays in SamplingBatch(7, 1031, num_rows).calls():
        check(stage, **arrays)
