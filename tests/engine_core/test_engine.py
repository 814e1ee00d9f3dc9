"""The engine loop: admission, seeds, stops, depth, and what happens after a failure."""

import numpy as np
import pytest
from engine_fake_runner import CAPABILITIES, FakeRunner, build_engine, expected, run_to_end

from runner_api import (
    Capability,
    CapabilityError,
    EngineError,
    ModelRunnerOutput,
    ReasoningConfig,
    RunnerConfig,
    SamplingParams,
    SamplingParamsError,
    UnknownNameError,
    WitnessConfig,
    WitnessGroup,
)


def params(**kwargs) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": 4, **kwargs})


def test_outputs_arrive_step_by_step():
    engine, runner = build_engine(max_num_batched_tokens=4)
    engine.add_request("a", [1, 2, 3, 4, 5], params())
    want = expected([1, 2, 3, 4, 5], 0, 4, runner.model, 48)
    assert engine.step() == []  # a chunk
    for i in range(4):
        (output,) = engine.step()
        assert output.new_token_ids == (want[i],)
        assert output.finish_reason == ("length" if i == 3 else None)
    assert not engine.has_unfinished_requests
    assert engine.has_requests  # the runner has not been told yet
    assert engine.step() == []
    assert runner.plans[-1].finished_req_ids == {"a"}
    assert not engine.has_requests
    assert engine.step() == []
    assert len(runner.plans) == 6


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_asynchronous_steps_overlap(depth):
    engine, runner = build_engine(async_scheduling=True, depth=depth)
    engine.add_request("a", [1, 2], params(max_tokens=6))
    engine.add_request("b", [3], params(max_tokens=3))
    for launched in range(1, depth):
        assert engine.step() == []
        assert len(runner.plans) == launched
    assert [o.req_id for o in engine.step()] == ["a", "b"]
    got = run_to_end(engine)
    assert got["a"] == expected([1, 2], 0, 6, runner.model, 48)[1:]
    # Plans count tokens under way as outputs: the one sampled at position p - 1 is fed back at p.
    for plan in runner.plans:
        cached = plan.scheduled_cached_reqs
        for req_id, computed, outputs in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            assert outputs == computed - {"a": 2, "b": 1}[req_id] + 1
    # A request whose tokens under way reach its limit is not scheduled once more.
    assert sum("b" in p.num_scheduled_tokens for p in runner.plans) == 3


def test_asynchronous_stop_ignores_the_step_under_way():
    engine, runner = build_engine(async_scheduling=True)
    want = expected([1, 2], 0, 6, runner.model, 48)
    engine, runner = build_engine(async_scheduling=True, eos=(want[2],))
    engine.add_request("a", [1, 2], params(max_tokens=6))
    got = run_to_end(engine)["a"]
    assert got == want[: want.index(want[2]) + 1]
    assert sum("a" in p.num_scheduled_tokens for p in runner.plans) == len(got) + 1


def test_steps_under_way_are_waited_for():
    engine, runner = build_engine(async_scheduling=True)
    engine.add_request("a", [1, 2], params())
    assert engine.step() == []
    engine.abort("a")
    assert engine.step() == []  # the first step's tokens come too late
    assert runner.plans[-1].finished_req_ids == {"a"}
    assert engine.has_requests  # the plan that said so is unanswered
    assert engine.step() == []
    assert not engine.has_requests


def test_asynchronous_needs_the_capability(monkeypatch):
    monkeypatch.setattr("engine_fake_runner.CAPABILITIES", frozenset({Capability.GENERATE}))
    with pytest.raises(CapabilityError, match="async_output"):
        build_engine(async_scheduling=True)


def test_end_of_sequence_and_stop_token():
    engine, runner = build_engine()
    want = expected([9, 8], 0, 6, runner.model, 48)
    for kwargs, reason in [({"stop_token_ids": (want[1],)}, want[1]), ({}, None)]:
        engine, _ = build_engine(eos=() if kwargs else (want[1],))
        engine.add_request("a", [9, 8], params(max_tokens=6, **kwargs))
        last = [o for _ in range(9) for o in engine.step()][-1]
        assert (last.finish_reason, last.stop_reason) == ("stop", reason)
        assert last.new_token_ids == (want[1],)


def test_seeds_are_drawn_once_and_repeat():
    def seeds(engine_seed, *wanted):
        engine, _ = build_engine()
        engine._rng = type(engine._rng)(type(engine._rng.bit_generator)(engine_seed))
        return [engine.add_request(str(i), [1], SamplingParams(seed=seed)).seed for i, seed in enumerate(wanted)]

    first = seeds(0, None, 7, None)
    assert first[1] == 7
    assert first[0] != first[2]
    assert seeds(0, None, 7, None) == first
    assert seeds(1, None, 7, None)[0] != first[0]


def test_a_resumed_request_keeps_its_seed():
    engine, runner = build_engine(num_blocks=7, prefix_caching=False)
    for name in "abc":
        engine.add_request(name, [1] * 7, SamplingParams(max_tokens=8))
    run_to_end(engine)
    sent: dict[str, set[int]] = {}
    for plan in runner.plans:
        for new in plan.scheduled_new_reqs:
            sent.setdefault(new.req_id, set()).add(new.seed)
    assert sum(len(p.preempted_req_ids) for p in runner.plans) > 0
    assert all(len(seeds) == 1 for seeds in sent.values())
    assert len(set.union(*sent.values())) == 3


@pytest.mark.parametrize(
    ("prompt", "kwargs", "error", "text"),
    [
        ([32], {}, EngineError, r"prompt_token_ids\['x'\].*0 <= id < 32"),
        ([-1], {}, EngineError, "not a token id"),
        ([True], {}, EngineError, "not a token id"),
        ([1.0], {}, EngineError, "not a token id"),
        ([], {}, EngineError, "prompt length"),
        ([1], {"top_p": 0.5, "temperature": 1.0}, CapabilityError, "does not offer top_p"),
        ([1], {"min_tokens": 2}, CapabilityError, "min_tokens"),
        ([1], {"logprobs": 2}, CapabilityError, "logprobs"),
        ([1], {"allowed_token_ids": (99,)}, EngineError, "allowed_token_ids"),
        ([1], {"n": 2, "temperature": 1.0}, EngineError, "one sequence"),
        (None, {}, EngineError, "not a list of token ids"),
        ("ab", {}, EngineError, "not a list of token ids"),
        ({1: 2}, {}, EngineError, "not a list of token ids"),
        ([np.bool_(True)], {}, EngineError, "not a token id"),
        ([1], {"logit_bias": {99: 1.0}}, EngineError, "logit_bias"),
        ([1], {"bad_words_token_ids": ((99,),)}, EngineError, "bad_words_token_ids"),
        ([1], {"stop_token_ids": (32,)}, EngineError, "stop_token_ids"),
        ([1], {"logprob_token_ids": (32,)}, EngineError, "logprob_token_ids"),
        ([1], {"trace_decode_token_ids": (3, 32)}, EngineError, "trace_decode_token_ids"),
        ([1], {"trace_decode_token_ids": (3,)}, CapabilityError, "does not offer trace_replay"),
        ([1], {"thinking_token_budget": 3}, CapabilityError, "does not offer thinking_budget"),
        ([1], {"extra_args": {"x": 1}}, UnknownNameError, "extra_args"),
    ],
)
def test_admission(prompt, kwargs, error, text):
    engine, _ = build_engine()
    state = engine._rng.bit_generator.state
    with pytest.raises(error, match=text):
        engine.add_request("x", prompt, params(**{**kwargs, "seed": None}))
    assert not engine.has_requests
    assert engine._rng.bit_generator.state == state


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((5, [1], SamplingParams()), "req_id"),
        ((None, [1], SamplingParams()), "req_id"),
        (("x", [1], None), "params"),
        (("x", [1], {"temperature": 0}), "params"),
        (("x", [1], SamplingParams(), 5), "extra_keys"),
        (("x", [1], SamplingParams(), (5,)), "extra_keys"),
    ],
)
def test_a_bad_request_does_not_end_the_others(arguments, field):
    engine, runner = build_engine()
    engine.add_request("a", np.array([1, 2]), params())
    with pytest.raises(EngineError) as caught:
        engine.add_request(*arguments)
    assert caught.value.field == field
    assert list(engine.scheduler.requests) == ["a"]
    assert run_to_end(engine) == {"a": list(expected([1, 2], 0, 4, runner.model, 48))}


def test_more_log_probabilities_than_tokens_are_refused_before_the_runner_sees_them(monkeypatch):
    """The runner would refuse the plan, and with it every other request of the step."""
    monkeypatch.setattr("engine_fake_runner.CAPABILITIES", CAPABILITIES | {Capability.LOGPROBS})
    engine, _ = build_engine()
    with pytest.raises(EngineError, match="logprobs"):
        engine.add_request("x", [1], params(logprobs=33))
    assert not engine.has_requests


def test_drafts_need_a_runner_that_verifies_them(monkeypatch):
    monkeypatch.setattr("engine_fake_runner.CAPABILITIES", CAPABILITIES - {Capability.SPECULATIVE})
    with pytest.raises(CapabilityError, match="speculative"):
        build_engine(num_speculative_tokens=2)


def test_a_failure_is_final(monkeypatch):
    engine, _ = build_engine()
    engine.add_request("a", [1], params())

    def broken(self, *args, **kwargs):
        raise ValueError("no")

    monkeypatch.setattr(FakeRunner, "execute_model", broken)
    with pytest.raises(EngineError, match="rank 0 failed in execute_model: ValueError: no"):
        engine.step()
    for call in (engine.step, lambda: engine.add_request("b", [1], params())):
        with pytest.raises(EngineError, match="the engine stopped after WorkerError"):
            call()
    engine.shutdown()


def test_a_runner_that_answers_wrongly_is_found_out(monkeypatch):
    engine, _ = build_engine()
    engine.add_request("a", [1], params())
    original = FakeRunner.sample_tokens

    def renamed(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        output.output = ModelRunnerOutput(("b",), output.output.sampled_token_ids)
        return output

    monkeypatch.setattr(FakeRunner, "sample_tokens", renamed)
    with pytest.raises(EngineError, match="does not answer the plan"):
        engine.step()


# -- what the engine makes of parameters ----------------------------------------------------------------------


def test_plans_tell_the_ends_of_the_model():
    """Also of a resumed request. An end that the model cannot draw is none."""
    engine, runner = build_engine(eos=(9, 40, 3), num_blocks=7, prefix_caching=False)
    for name in "abc":
        engine.add_request(name, [1] * 7, params(max_tokens=8, ignore_eos=True))
    run_to_end(engine)
    new = [n for p in runner.plans for n in p.scheduled_new_reqs]
    assert len(new) > 3
    assert {n.eos_token_ids for n in new} == {(3, 9)}


@pytest.fixture
def offers_everything(monkeypatch):
    monkeypatch.setattr("engine_fake_runner.CAPABILITIES", frozenset(Capability))


@pytest.mark.parametrize(
    ("trace", "max_tokens", "kept"),
    [((5, 6, 7), None, 3), ((5, 6, 7), 9, 3), ((5, 6, 7), 2, 2), (tuple(range(30)) * 2, None, 46), ((4,) * 50, 47, 46)],
)
def test_a_replayed_request_stops_where_its_trace_does(offers_everything, trace, max_tokens, kept):
    engine, runner = build_engine(eos=(6,))  # max_model_len 48, prompt 2
    wanted = params(
        trace_decode_token_ids=trace, max_tokens=max_tokens, min_tokens=1, stop="x", stop_token_ids=(7,), top_k=5
    )
    request = engine.add_request("a", [1, 2], wanted)
    got = request.sampling_params
    assert got.trace_decode_token_ids == trace[:46]
    assert (got.max_tokens, got.min_tokens, got.ignore_eos, got.stop, got.stop_token_ids) == (kept, 0, True, (), ())
    assert got.top_k == wanted.top_k
    assert request.eos_token_ids == frozenset()
    assert len(run_to_end(engine)["a"]) == kept
    assert runner.plans[0].scheduled_new_reqs[0].eos_token_ids == ()


def test_a_trace_and_drafts_exclude_each_other(offers_everything):
    engine, _ = build_engine(num_speculative_tokens=2)
    with pytest.raises(CapabilityError, match="trace_decode_token_ids"):
        engine.add_request("a", [1], params(trace_decode_token_ids=(3,)))
    assert not engine.has_requests


def test_min_tokens_mask_so_many_ends_and_no_more(offers_everything):
    engine, _ = build_engine(eos=tuple(range(4)), model=WitnessConfig(200, (WitnessGroup(4),)))
    for many, ok in ((124, True), (125, False)):
        wanted = params(min_tokens=1, stop_token_ids=tuple(range(4, 4 + many)))
        if ok:
            engine.add_request("a", [1], wanted)
            continue
        with pytest.raises(EngineError, match=r"stop_token_ids\['b'\].*got 129, expected at most 128"):
            engine.add_request("b", [1], wanted)
    engine.add_request("c", [1], params(stop_token_ids=tuple(range(4, 130))))  # without min_tokens nothing is masked


def test_a_thinking_budget_needs_the_markers(offers_everything):
    engine, _ = build_engine()
    with pytest.raises(CapabilityError, match="thinking_token_budget"):
        engine.add_request("a", [1], params(thinking_token_budget=3))
    engine.admission.runner_config = RunnerConfig(reasoning=ReasoningConfig((1,), (2,)))
    engine.add_request("a", [1], params(thinking_token_budget=3))


class Picky:
    """A logits processor that refuses odd numbers."""

    arguments = ("even",)

    def __init__(self, max_num_reqs, vocab_size, arrays):
        assert arrays.where(arrays.arange(2) > 0, arrays.array([5, 6], "int64"), arrays.zeros(2, "int64")).tolist() == [
            0,
            6,
        ]

    def validate(self, params):
        if (params.extra_args or {}).get("even", 0) % 2:
            raise ValueError("odd")

    def add_request(self, *_):
        return False

    remove_request = move_rows = observe = apply = add_request


def test_processors_refuse_a_request_before_it_is_queued(offers_everything):
    engine, _ = build_engine()
    engine.admission.runner_config = RunnerConfig(logits_processors=(Picky,))
    with pytest.raises(SamplingParamsError, match="odd"):
        engine.add_request("a", [1], params(extra_args={"even": 3}))
    with pytest.raises(UnknownNameError, match="'even'"):
        engine.add_request("a", [1], params(extra_args={"evne": 2}))
    assert not engine.has_requests
    engine.add_request("a", [1], params(extra_args={"even": 4}))
