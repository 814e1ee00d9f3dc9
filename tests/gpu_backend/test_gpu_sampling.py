"""Whole steps that mix all sampling parameters: the GPU runner beside the NumPy runner, tokens and state alike.

`batch_variations` makes requests and schedules; here two runners get the same calls, and what comes back is compared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

import torch
from batch_variations import MODEL, PROCESSORS, REASONING, DraftedRun, Run, Schedule, draw_requests, make_runner, pack
from step_driver import Driver

from cpu_reference.request_state import RequestState as CpuRequestState
from cpu_reference.sample.logits_rows import LogitsRows as CpuLogitsRows
from cpu_reference.sample.sampler import Sampler as CpuSampler
from gpu_backend.packed_copy import PackedCopy
from gpu_backend.request_state import RequestState
from gpu_backend.sample.logits_rows import LogitsRows
from gpu_backend.sample.sampler import Sampler
from gpu_backend.triton_support import resolve_device
from runner_api import (
    BatchDescriptor,
    Capability,
    ForcedStep,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    RunnerConfig,
    SampleFault,
    SamplingParams,
    SchedulerOutput,
    StructuredOutputsParams,
)

pytestmark = pytest.mark.interpret
DEVICE, _ = resolve_device("auto")
V = MODEL.vocab_size
# What is refused beside drafts, left out.
BESIDE_DRAFTS = dict.fromkeys(("logprobs", "logprob_token_ids", "prompt_logprobs", "trace_decode_token_ids"))
# Without the logits in the record the draw takes temperature and limits by itself; with them they are steps.
RECORDS = [frozenset(), frozenset({"logits"})]


class Pair:
    """Both runners behind the calls of one. `digests`: how often the states were held against each other."""

    def __init__(self, num_rows: int, **config: Any) -> None:
        self.cpu, self.gpu = (make_runner(name, num_rows, **config) for name in ("cpu", "gpu"))
        self.config, self.kv_cache_config = self.cpu.config, self.cpu.kv_cache_config
        self.steps = 0

    def execute_model(self, plan: SchedulerOutput, descriptor: BatchDescriptor | None = None) -> Any:
        self.cpu.execute_model(plan, descriptor=descriptor)
        return self.gpu.execute_model(plan, descriptor=descriptor)

    def sample_tokens(self, grammar: GrammarOutput | None = None, forced: ForcedStep | None = None) -> Any:
        outputs = [runner.sample_tokens(grammar, forced=forced) for runner in (self.cpu, self.gpu)]
        self._compare(*(output.get_output() for output in outputs))
        return outputs[1]

    def poison_unused(self) -> None:
        self.cpu.poison_unused()
        self.gpu.poison_unused()

    def last_step(self) -> Any:
        return self.gpu.last_step()

    def _compare(self, here: ModelRunnerOutput, there: ModelRunnerOutput) -> None:
        self.steps += 1
        assert there.req_ids == here.req_ids
        assert there.sampled_token_ids == here.sampled_token_ids
        assert there.errors == here.errors
        scored = [(here.logprobs, there.logprobs)]
        assert here.prompt_logprobs.keys() == there.prompt_logprobs.keys()
        scored += [(here.prompt_logprobs[i], there.prompt_logprobs[i]) for i in here.prompt_logprobs]
        for a, b in scored:
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_array_equal(b.token_ids, a.token_ids)
                np.testing.assert_array_equal(b.ranks, a.ranks)
                np.testing.assert_allclose(b.logprobs, a.logprobs, atol=2e-5)
        a, b = self.cpu.last_step(), self.gpu.last_step()
        for name in ("token_ids", "num_sampled", "num_rejected", "faults", "seeds", "logits"):
            np.testing.assert_array_equal(getattr(b, name), getattr(a, name), err_msg=name)
        assert self.cpu.state_digest() == self.gpu.state_digest()


@pytest.mark.parametrize("record", RECORDS, ids=["draw at once", "step by step"])
@pytest.mark.parametrize("given_logits", [False, True], ids=["witness", "given logits"])
def test_mixed_requests_draw_the_same_tokens(given_logits: bool, record: frozenset[str]) -> None:
    pair, tokens = Pair(4, record=record), set()
    for seed in range(2):  # the second lot moves into rows that others had
        schedule = Schedule(seed, chunks=seed == 0, preempts=True, pads=True, poisons=True)
        seen = Run(pair, schedule, given_logits).play(draw_requests(60 + 2 * seed + given_logits, 4, 3))
        tokens |= {output[0] for s in seen.values() for output in s.outputs}
    assert pair.steps > 12
    assert len(tokens) > 8, "they are not all alike"


def test_mixed_requests_with_drafts() -> None:
    pair = Pair(4, num_speculative_tokens=3)
    for seed in (71, 72):
        requests = [replace(r, params=replace(r.params, **BESIDE_DRAFTS)) for r in draw_requests(seed, 4, 5)]
        DraftedRun(pair, Schedule(seed, preempts=True, poisons=True), True).play(requests)
    assert pair.steps > 8


def test_a_request_without_a_winner_gets_an_error_and_no_token() -> None:
    """Its neighbour, and the steps after, are as if nothing had been."""
    pair, alone = Pair(3), make_runner("cpu", 1)
    d, single = Driver(pair), Driver(alone)  # type: ignore[arg-type]
    allowed = SamplingParams(temperature=0.0, allowed_token_ids=(3, 4), structured_outputs=GRAMMAR)
    d.add("a", [1, 2], sampling_params=allowed)
    for driver in (d, single):
        driver.add("b", [5, 6, 7], sampling_params=SamplingParams(temperature=0.9), seed=4)
    mask = np.zeros(V, bool)
    for counts, names in (({"a": 2, "b": 3}, [8]), ({"a": 1, "b": 1}, [3, 9])):
        mask[:] = False
        mask[names] = True
        pair.execute_model(d.plan(counts))
        output = pair.sample_tokens(GrammarOutput(["a"], pack(mask)[None])).get_output()
        alone.execute_model(single.plan({"b": counts["b"]}))
        expected = alone.sample_tokens().get_output().tokens()["b"]
        assert output.tokens()["b"] == expected
        if names == [8]:
            assert output.errors == {"a": SampleFault.NO_TOKEN}
            assert output.tokens()["a"] == ()
        else:
            assert output.errors == {}
            assert output.tokens()["a"] == (3,)
        for name, token in (("a", output.tokens()["a"] or (0,)), ("b", expected)):
            d.computed[name] += counts[name]
            d.tokens[name].extend(token)
        single.computed["b"] += counts["b"]
        single.tokens["b"].extend(expected)


GRAMMAR = StructuredOutputsParams(regex=".*")


def test_what_the_reference_offers_is_offered() -> None:
    pair = Pair(2)
    missing = pair.cpu.describe().capabilities - pair.gpu.describe().capabilities
    assert missing == {Capability.FLOAT64}


# -- the sampler alone ------------------------------------------------------------------------------------------------


def sampler(vocab_size: int = V, **config: Any) -> tuple[Sampler, RequestState, PackedCopy]:
    c = RunnerConfig(max_num_reqs=8, max_model_len=32, reasoning=REASONING, **config)
    states = RequestState(8, 32, 0, None, DEVICE)
    ours = Sampler(c, vocab_size, states, DEVICE)
    packed = PackedCopy({**states.host_tables(), **ours.host_tables()}, 1 << 16, DEVICE)
    states.bind(packed), ours.bind(packed)
    return ours, states, packed


def admit(ours: Sampler, states: RequestState, packed: PackedCopy, requests: dict[str, NewRequestData]) -> list[int]:
    rows = []
    for req_id, new in requests.items():
        rows.append(states.add_request(req_id, new.prompt_len, new.prefill_token_ids, 0))
        ours.add_request(rows[-1], new)
    states.pack(packed), ours.pack(packed)
    packed.send()
    states.apply_staged_writes(packed), ours.apply_staged_writes(packed)
    return rows


def request(seed: int, **params: Any) -> NewRequestData:
    return NewRequestData("x", [1, 2], [1, 2, 3], 0, ([1],), SamplingParams(**params), seed=seed)


def logits_rows(rows: list[int]) -> LogitsRows:
    n = len(rows)
    on_device = (np.array(rows), np.zeros(n, np.int32), np.full(n, 2), np.full(n, 3, np.int32))
    return LogitsRows(n, *(torch.from_numpy(a).to(DEVICE) for a in on_device), np.array(rows), np.ones(n, np.int32))


def test_the_steps_and_their_order_are_the_twins() -> None:
    """Two runners whose steps are the same in another order differ for few requests: here every step has its say."""
    pair = Pair(1)
    steps = [[type(step).__name__ for step in runner.sampler.steps] for runner in (pair.cpu, pair.gpu)]
    assert steps[0] == steps[1]
    ours, states, packed = sampler(logits_processors=PROCESSORS)
    config = RunnerConfig(max_num_reqs=8, max_model_len=32, reasoning=REASONING, logits_processors=PROCESSORS)
    cpu_states = CpuRequestState(8, 32, 0)
    twin = CpuSampler(config, V, cpu_states)
    requests = {
        str(i): request(
            i, temperature=0.7 + i / 10, repetition_penalty=1.5, frequency_penalty=-0.5, presence_penalty=0.3,
            logit_bias={1: 2.0, 2: -1.0, 3: 4.0}, allowed_token_ids=list(range(i, V)), min_tokens=9,
            stop_token_ids=[7, 9 + i], bad_words_token_ids=[[3, 30], [31]], thinking_token_budget=i % 3,
            extra_args={"witness": True}, top_k=20 - i, top_p=0.9, min_p=0.01,
        )
        for i in range(4)
    }  # fmt: skip
    rows = admit(ours, states, packed, requests)
    for req_id, new in requests.items():
        twin.add_request(cpu_states.add_request(req_id, new.prompt_len, new.prefill_token_ids, 0), new)
    cpu_states.apply_staged_writes(), twin.apply_staged_writes()
    x = (np.random.default_rng(3).normal(size=(4, V)) * 4).astype(np.float32)
    got = ours.sample(torch.from_numpy(x).to(DEVICE), logits_rows(rows), keep_scores=True)
    there = logits_rows(rows)
    arrays = (there.expanded_idx_mapping, there.expanded_local_pos, there.positions, there.input_ids)
    expected = twin.sample(x, CpuLogitsRows(4, *(a.cpu().numpy() for a in arrays), np.array(rows)))
    np.testing.assert_array_equal(got.processed.cpu().numpy(), expected.processed)
    assert got.sampled.tolist() == expected.sampled.tolist()
    assert 0 < np.isfinite(expected.processed).sum() < 4 * V


@pytest.mark.parametrize("noise", ["murmur3", "philox"])
def test_at_once_and_step_by_step_give_the_same_tokens_and_faults(noise: str) -> None:
    ours, states, packed = sampler(300, noise=noise)
    rows = admit(ours, states, packed, {
        "greedy": request(1, temperature=0.0), "plain": request(2), "warm": request(3, temperature=1.3),
        "limits": request(4, temperature=0.7, top_k=9, top_p=0.8), "min": request(5, temperature=0.4, min_p=0.2),
        "said": request(6, frequency_penalty=1.0, top_p=0.5), "list": request(7, allowed_token_ids=[1, 2, 3], top_k=2),
    })  # fmt: skip
    rng = np.random.default_rng(8)
    for chosen in (rows, rows[:1], rows[1:3], rows[3:5], rows[5:]):
        x = (rng.normal(size=(len(chosen), 300)) * 3).astype(np.float32)
        x[rng.random(x.shape) < 0.2] = -np.inf
        x[-1, 5] = rng.choice([np.nan, np.inf, 0])
        logits = torch.from_numpy(x).to(DEVICE)
        at_once = ours.sample(logits, logits_rows(chosen))
        by_step = ours.sample(logits, logits_rows(chosen), keep_scores=True)
        assert at_once.processed is None
        assert by_step.processed is not None
        assert at_once.sampled.tolist() == by_step.sampled.tolist()
        assert at_once.faults.tolist() == by_step.faults.tolist()
        np.testing.assert_array_equal(logits.cpu().numpy(), x, "the model's logits stay as they are")


def test_steps_that_nobody_uses_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """And make no copy of the logits."""
    ours, states, packed = sampler()
    rows = admit(ours, states, packed, {"a": request(1, temperature=0.5), "b": request(2, frequency_penalty=1.0)})
    applied: list[str] = []
    for step in ours.steps:
        name = type(step).__name__
        monkeypatch.setattr(step, "apply", lambda *_, name=name: applied.append(name), raising=True)
    logits = torch.zeros(2, V, device=DEVICE)
    ours.sample(logits[:1], logits_rows(rows[:1]))
    assert applied == []
    ours.sample(logits, logits_rows(rows))
    assert applied == ["Penalties"]
    applied.clear()
    ours.sample(logits, logits_rows(rows), keep_scores=True)
    assert applied == ["Penalties", "Temperature"]


def test_parameters_travel_in_the_packed_copy_of_the_step() -> None:
    ours, states, packed = sampler()
    (row,) = admit(ours, states, packed, {"a": request(7, temperature=0.5, logit_bias={3: 1.5, 30: -2.0})})
    assert packed.num_copies == 1
    tables = {name: torch.as_tensor(t)[row].tolist() for name, t in ours.row_tables().items()}
    assert (tables["temperature"], tables["seeds"], tables["num_bias"]) == (0.5, 7, 2)
    assert (tables["bias_token_ids"][:2], tables["bias"][:2]) == ([3, 30], [1.5, -2.0])
    for name, view in packed.views.items():
        np.testing.assert_array_equal(view.cpu().numpy(), packed.tables[name])


def test_a_row_is_rewritten_whole() -> None:
    """After a request with everything, one with nothing leaves no table but those that a count hides."""
    ours, states, packed = sampler()
    (plain,) = admit(ours, states, packed, {"plain": request(1)})
    fresh = {name: torch.as_tensor(t)[plain].tolist() for name, t in ours.row_tables().items()}
    everything = request(
        9, temperature=0.3, top_k=3, top_p=0.5, min_p=0.1, frequency_penalty=1.0, logit_bias={1: 2.0},
        allowed_token_ids=[1, 2], min_tokens=3, stop_token_ids=[4], bad_words_token_ids=[[1, 2]], logprobs=2,
        thinking_token_budget=4, structured_outputs=GRAMMAR,
    )  # fmt: skip
    (row,) = admit(ours, states, packed, {"everything": everything})
    assert row != plain
    states.remove_request("everything"), ours.remove_request(row)
    (again,) = admit(ours, states, packed, {"again": request(1)})
    assert again == row
    hidden = ours.row_widths(row)
    assert set(hidden.values()) == {0}
    for name, table in ours.row_tables().items():
        if name not in hidden:
            assert torch.as_tensor(table)[row].tolist() == fresh[name], name


@pytest.mark.gpu
def test_nothing_waits_for_the_device_whatever_is_asked() -> None:
    requests = draw_requests(80, 12, 4)
    gpu = make_runner("gpu", 12)
    d = Driver(gpu)
    for r in requests:
        d.add(r.req_id, r.prompt, **r.new)
    # Kernels are compiled and loaded by the first steps.
    for step in range(4):
        counts = {r.req_id: len(d.tokens[r.req_id]) - d.computed[r.req_id] for r in requests}
        plan = d.plan(counts)
        asking = [r.req_id for r in requests if r.params.structured_outputs is not None]
        masks = GrammarOutput(asking, np.full((len(asking), -(-V // 32)), -1, np.int32))
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            gpu.execute_model(plan)
            output = gpu.sample_tokens(masks)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        drawn = output.get_output().tokens()
        for req_id, n in counts.items():
            d.computed[req_id] += n
            d.tokens[req_id].extend(drawn[req_id] or (0,))
