"""Grammars in the engine: masks, the moment they are made, how they end a request, and what may go wrong."""

import gc
import random
import weakref

import numpy as np
import pytest
from engine_fake_runner import (
    CAPABILITIES,
    FakeRunner,
    ParityBackend,
    ParityMatcher,
    build_engine,
    expected,
    run_to_end,
)

from engine_core.structured_output import Constrained, GrammarError, fill_rows, grammar_output, usable_drafts
from runner_api import (
    Capability,
    CapabilityError,
    EngineError,
    ReasoningConfig,
    RunnerConfig,
    SamplingParams,
    StructuredOutputsParams,
)

EOS = 31


def params(length=None, **kwargs) -> SamplingParams:
    if length is not None:
        kwargs["structured_outputs"] = StructuredOutputsParams(regex=str(length))
    return SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": 30, **kwargs})


def is_alternating(tokens) -> bool:
    return all(token % 2 == i % 2 for i, token in enumerate(tokens))


def answers(engine, max_steps=2000):
    """Tokens, finish reason and error by request."""
    tokens, ends = {}, {}
    for _ in range(max_steps):
        if not engine.has_requests:
            return tokens, ends
        for output in engine.step():
            assert output.req_id not in ends, "an ended request speaks no more"
            tokens.setdefault(output.req_id, []).extend(output.new_token_ids)
            if output.finish_reason:
                ends[output.req_id] = (output.finish_reason, output.error)
        engine.scheduler.kv_cache_manager.check_conservation()
    raise AssertionError("not finished")


# -- the rows of a request ------------------------------------------------------------------------------------


def matcher(length=9, least=9, vocab_size=40, eos=(EOS,)):
    return ParityMatcher(length, least, vocab_size, eos)


def mask_of(m) -> np.ndarray:
    words = np.zeros(2, np.int32)
    m.fill_bitmask(words)
    return words


def test_rows_follow_the_drafts():
    m = matcher()
    m.accept(4)
    rows = np.full((4, 2), -1, np.int32)
    assert fill_rows(m, [7, 8, 9], rows) == 3
    assert m.taken == [4]
    for j in range(4):
        assert (rows[j] == mask_of(m)).all()
        assert m.accept([7, 8, 9, 12][j])


@pytest.mark.parametrize(
    ("drafts", "acceptable", "wanted"),
    [
        ([], 0, ["start", "free", "free", "free"]),
        ([4], 1, ["start", "after", "free", "free"]),
        ([-1, -1], 0, ["start", "free", "free", "free"]),
        ([4, -1, 5], 1, ["start", "after", "free", "free"]),
        ([4, 6, 5], 1, ["start", "after", "after", "after"]),  # 6 is refused: as behind 4
        ([5, 4, 5], 0, ["start", "start", "start", "start"]),
    ],
)
def test_rows_that_are_not_followed(drafts, acceptable, wanted):
    m = matcher()
    rows = np.full((4, 2), -1, np.int32)
    assert fill_rows(m, drafts, rows) == acceptable
    assert m.taken == []
    start = mask_of(m)
    m.accept(4)
    known = {"start": start, "after": mask_of(m), "free": np.int32([-1, -1])}
    assert rows.tolist() == [known[w].tolist() for w in wanted]


def test_a_draft_may_end_the_text():
    for m, drafts in ((matcher(length=2), [4, 7, 8]), (matcher(least=1), [4, EOS, 6])):
        rows = np.full((4, 2), -1, np.int32)
        assert fill_rows(m, drafts, rows) == 2
        assert m.taken == []
        m.accept(4)
        assert rows[1:].tolist() == [mask_of(m).tolist()] * 3
        assert usable_drafts(matcher(length=2), drafts[:2]) == ([4, 7] if drafts[1] == 7 else [4, -1])


def test_drafts_against_the_grammar_become_placeholders():
    m = matcher()
    assert usable_drafts(m, [4, 7, 7, 8]) == [4, 7, -1, -1]
    assert usable_drafts(m, [5, 4]) == [-1, -1]
    assert usable_drafts(m, [-1, 4]) == [-1, -1]
    assert usable_drafts(m, []) == []
    assert usable_drafts(matcher(length=1), [4, 5]) == [4, -1]
    assert m.taken == []


def test_masks_of_a_step():
    ok, broken = matcher(), matcher()
    broken.fails_after = 0
    output, failed = grammar_output(
        [Constrained("x", broken), Constrained("b", ok, [4]), Constrained("a", ok)], 2, vocab_size=40
    )
    assert isinstance(failed["x"], GrammarError)
    assert output.structured_output_request_ids == ["b", "a"]
    assert (output.grammar_bitmask.dtype, output.grammar_bitmask.shape) == (np.int32, (6, 2))
    assert output.num_acceptable_drafts == [1, 0]
    assert output.grammar_bitmask[[2, 4, 5]].tolist() == [[-1, -1]] * 3  # unused rows
    # Bit v % 32 of word v // 32; even tokens and no end at the start. 31 is the end, 40 tokens are 2 words.
    assert output.grammar_bitmask[0].view(np.uint32).tolist() == [0x55555555, 0x55]
    assert output.grammar_bitmask[1].view(np.uint32).tolist() == [0xAAAAAAAA & ~(1 << 31), 0xAA]
    assert grammar_output([], 2, 40) == (None, {})
    assert grammar_output([Constrained("a", ok)], 0, 40)[0].num_acceptable_drafts is None


# -- in the engine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"async_scheduling": True, "depth": 3}])
def test_a_grammar_ends_its_request_and_leaves_the_others_alone(options):
    engine, runner = build_engine(max_num_batched_tokens=4, **options)
    engine.add_request("a", [1, 2, 3, 4, 5], params(6))
    engine.add_request("b", [7, 8], params(max_tokens=9))
    engine.add_request("c", [5], params(3, max_tokens=2))
    tokens, ends = answers(engine)
    assert len(tokens["a"]) == 6
    assert is_alternating(tokens["a"])
    assert tokens["b"] == expected([7, 8], 0, 9, runner.model, 48)
    assert is_alternating(tokens["c"])
    assert ends == {"a": ("stop", None), "b": ("length", None), "c": ("length", None)}
    # Masks are made for the requests that sample, and for them alone.
    for plan, grammar in zip([p for p in runner.plans if p.num_scheduled_tokens], runner.grammars, strict=True):
        listed = set() if grammar is None else set(grammar.structured_output_request_ids)
        assert listed <= plan.num_scheduled_tokens.keys() - {"b"}
    assert runner.grammars[0] is None  # a chunk of the first prompt


def test_the_end_of_sequence_ends_it_too():
    """Not before the grammar allows it, also where the request ignores it otherwise; it is no text."""
    for ignore_eos in (False, True):
        engine, _ = build_engine(eos=(EOS,))
        request = engine.add_request("a", [1, 2], params("20,3", ignore_eos=ignore_eos))
        outputs = [o for _ in range(25) for o in engine.step()]
        tokens = [o.new_token_ids[0] for o in outputs]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", None)
        if tokens[-1] == EOS:
            assert len(tokens) > 3
            assert is_alternating(tokens[:-1])
        assert outputs[-1].ends_with_stop is (tokens[-1] == EOS)
        assert request.matcher.is_terminated()
    # Drawn at last only if the runner's own tokens happen to; so let it be the only one that is allowed.
    engine, _ = build_engine(eos=(EOS,))
    request = engine.add_request("a", [1, 2], params("20,3"))
    request.matcher.allows = lambda token: token == EOS
    (output,) = engine.step()
    assert (output.new_token_ids, output.finish_reason, output.ends_with_stop) == ((EOS,), "stop", True)


def test_the_last_token_of_a_grammar_is_text():
    engine, _ = build_engine(eos=(EOS,))
    engine.add_request("a", [1, 2], params(2))
    last = [o for _ in range(3) for o in engine.step()][-1]
    assert (last.finish_reason, last.ends_with_stop) == ("stop", False)


def test_masks_wait_for_the_tokens_under_way_and_the_model_does_not():
    engine, runner = build_engine(async_scheduling=True)
    engine.add_request("a", [1, 2], params(4))
    answers(engine)
    calls = runner.calls
    for step in range(3):  # launched first, then the token before is fetched, then drawn
        assert calls.index(("execute", step + 1)) < calls.index(("fetch", step)) < calls.index(("sample", step + 1))
    # Without a grammar in the step nobody waits: two steps are drawn before the first is fetched.
    engine, runner = build_engine(async_scheduling=True)
    engine.add_request("b", [1, 2], params(max_tokens=4))
    answers(engine)
    assert runner.calls.index(("sample", 1)) < runner.calls.index(("fetch", 0))
    # The first token of a grammar depends on no token under way.
    engine, runner = build_engine(async_scheduling=True)
    engine.add_request("b", [1, 2], params(max_tokens=8))
    engine.step()
    engine.add_request("a", [3], params(4))
    engine.step()
    assert runner.grammars[1].structured_output_request_ids == ["a"]
    assert runner.calls.index(("sample", 1)) < runner.calls.index(("fetch", 0))


def batch(seed):
    rng = random.Random(seed)
    requests = []
    for i in range(rng.randint(2, 5)):
        prompt = [rng.randrange(31) for _ in range(rng.choice([1, 2, 5, 11]))]
        form = rng.choice([None, "3", "7", "12", "9,2", "30,4"])
        requests.append((f"r{i}", prompt, params(form, seed=rng.randrange(99), max_tokens=rng.randint(4, 14))))
    return requests


LAYOUTS = [
    {"max_num_batched_tokens": 3},
    {"num_blocks": 10},
    {"num_blocks": 8, "prefix_caching": False, "layout": "dense"},
    {"async_scheduling": True},
    {"async_scheduling": True, "depth": 4, "num_blocks": 9},
    {"async_scheduling": True, "num_blocks": 8, "max_num_batched_tokens": 5, "prefix_caching": False},
    {"num_speculative_tokens": 3},
    {"num_speculative_tokens": 2, "num_blocks": 11, "max_num_batched_tokens": 6},
]


def test_tokens_do_not_depend_on_how_the_work_is_cut():
    """25 batches, each with 8 ways to cut it: chunks, preemptions, both layouts, asynchrony, drafts."""
    preempted = accepted = 0
    for seed in range(25):
        engine, _ = build_engine(eos=(EOS,))
        for request in batch(seed):
            engine.add_request(*request)
        wanted = answers(engine)
        for options in LAYOUTS:
            engine, runner = build_engine(eos=(EOS,), **{"max_num_reqs": 3, **options})
            for request in batch(seed):
                engine.add_request(*request)
            tokens, ends = {}, {}
            while engine.has_requests:
                for output in engine.step():
                    grown = tokens.setdefault(output.req_id, [])
                    grown.extend(output.new_token_ids)
                    accepted += (
                        len(output.new_token_ids) > 1 and engine.scheduler.requests.get(output.req_id) is not None
                    )
                    if output.finish_reason:
                        ends[output.req_id] = (output.finish_reason, output.error)
            assert (tokens, ends) == wanted, (seed, options)
            preempted += sum(len(p.preempted_req_ids) for p in runner.plans)
    assert preempted > 20
    assert accepted > 20


def test_drafts_of_the_plan_are_those_that_the_grammar_allows():
    engine, runner = build_engine(num_speculative_tokens=3)
    engine.add_request("a", [1, 2], params(12))
    answers(engine)
    planned = [p.scheduled_spec_decode_tokens["a"] for p in runner.plans if p.scheduled_spec_decode_tokens]
    assert any(-1 in drafts for drafts in planned)
    for drafts, grammar in zip(planned, runner.grammars[1:], strict=True):
        valid = [d for d in drafts if d >= 0]
        assert drafts == valid + [-1] * (len(drafts) - len(valid))
        assert grammar.num_acceptable_drafts == [len(valid)]
        assert grammar.grammar_bitmask.shape == (4, 1)


def test_every_request_has_a_matcher_of_its_own_and_takes_it_along():
    backends = []

    def make():
        backends.append(ParityBackend(32, ()))
        return backends[0]

    engine, _ = build_engine()
    engine.admission._make_grammar_backend = make
    for name in "ab":
        engine.add_request(name, [1, 2], params(5))
    engine.step()
    assert len(backends) == 1  # built once, when the first request needs it
    one, two = backends[0].compiled
    assert one is not two
    assert one.taken == two.taken != []
    gone = weakref.ref(engine.scheduler.requests["a"].matcher)
    engine.abort("a")
    run_to_end(engine)
    backends[0].compiled.clear()
    del one, two
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("options", "kwargs", "error", "text"),
    [
        ({}, {"length": "x"}, EngineError, r"structured_outputs\.regex: cannot be compiled"),
        ({"grammar": False}, {"length": 3}, EngineError, r"structured_outputs\['x'\].*no tokenizer"),
        ({}, {"length": 3, "n": 2, "temperature": 1.0}, EngineError, "one sequence"),
    ],
)
def test_a_refused_grammar_leaves_nothing_behind(options, kwargs, error, text):
    engine, _ = build_engine(**options)
    state = engine._rng.bit_generator.state
    with pytest.raises(error, match=text):
        engine.add_request("x", [1, 2], params(**{"seed": None, **kwargs}))
    assert not engine.has_requests
    assert engine._rng.bit_generator.state == state
    engine.add_request("x", [1, 2], params())


def test_a_runner_without_grammars_is_not_asked_for_them(monkeypatch):
    monkeypatch.setattr("engine_fake_runner.CAPABILITIES", CAPABILITIES - {Capability.GRAMMAR})
    engine, _ = build_engine()
    with pytest.raises(CapabilityError, match="grammar"):
        engine.add_request("x", [1, 2], params(3))
    assert not engine.has_requests


def test_a_thinking_budget_would_break_the_form(monkeypatch):
    monkeypatch.setattr("engine_fake_runner.CAPABILITIES", CAPABILITIES | {Capability.THINKING_BUDGET})
    engine, _ = build_engine()
    engine.admission.runner_config = RunnerConfig(reasoning=ReasoningConfig((1,), (2,)))
    with pytest.raises(EngineError, match="thinking_token_budget"):
        engine.add_request("x", [1, 2], params(3, thinking_token_budget=5))
    engine.add_request("x", [1, 2], params(thinking_token_budget=5))


def test_a_runner_that_does_not_keep_to_the_mask_is_found_out(monkeypatch):
    engine, _ = build_engine()
    engine.add_request("a", [1, 2], params(12))
    original = FakeRunner.sample_tokens
    monkeypatch.setattr(
        FakeRunner, "sample_tokens", lambda self, grammar=None, **kwargs: original(self, None, **kwargs)
    )
    with pytest.raises(
        EngineError, match=r"sampled_token_ids\['a'\]: the runner drew a token that the request's grammar"
    ):
        run_to_end(engine)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["fill_bitmask", "accept"])
def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(asynchronous, where):
    engine, runner = build_engine(async_scheduling=asynchronous)
    broken = engine.add_request("a", [1, 2], params(12))
    engine.add_request("b", [7, 8], params(max_tokens=9))
    engine.add_request("c", [3], params(8))
    original = getattr(broken.matcher, where)

    def failing(argument):
        if len(broken.matcher.taken) >= 3:
            raise GrammarError("too complex")
        return original(argument)

    setattr(broken.matcher, where, failing)
    tokens, ends = answers(engine)
    assert ends["a"] == ("error", "MR-ERR-010 too complex")
    assert len(tokens["a"]) == 3 + (where == "accept")
    assert is_alternating(tokens["a"])
    assert tokens["b"] == expected([7, 8], 0, 9, runner.model, 48)
    assert is_alternating(tokens["c"])
    assert (len(tokens["c"]), ends["c"]) == (8, ("stop", None))
    assert "a" in runner.plans[-1].finished_req_ids or any("a" in p.finished_req_ids for p in runner.plans)


# -- rows without a winner ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"async_scheduling": True, "depth": 4},
                                     {"num_speculative_tokens": 2}])  # fmt: skip
@pytest.mark.parametrize("outputs", [0, 3])
def test_a_fault_ends_its_request_alone(options, outputs):
    engine, runner = build_engine(**options)
    runner.faults["a"] = 2 + outputs
    engine.add_request("a", [1, 2], params())
    engine.add_request("b", [7, 8], params(max_tokens=9))
    tokens, ends = answers(engine)
    assert ends["a"][0] == "error"
    assert "NaN" in ends["a"][1]
    assert tokens["a"] == expected([1, 2], 0, 30, runner.model, 48)[: len(tokens["a"])]
    assert len(tokens["a"]) == outputs or options.get("num_speculative_tokens")
    assert tokens["b"] == expected([7, 8], 0, 9, runner.model, 48)
    assert ends["b"] == ("length", None)
    assert any("a" in p.finished_req_ids for p in runner.plans)
    engine.add_request("a", [5], params(max_tokens=1))  # the id is free again
    runner.faults.clear()
    assert run_to_end(engine) == {"a": expected([5], 0, 1, runner.model, 48)}


def test_a_grammar_that_leaves_no_token_is_such_a_fault():
    engine, _ = build_engine()
    request = engine.add_request("a", [1, 2], params(5))
    request.matcher.allows = lambda token: False
    (output,) = engine.step()
    assert (output.new_token_ids, output.finish_reason) == ((), "error")
    assert "no token is left to draw" in output.error
    assert request.status.finish_reason == "error"


def test_a_fault_of_a_preempted_request_under_way():
    """Preempted while the step with its fault runs: it waits for that news, and ends with it."""
    for seed in range(6):
        engine, runner = build_engine(
            num_blocks=8, prefix_caching=False, async_scheduling=True, max_num_batched_tokens=16
        )
        runner.faults["r2"] = 9 + seed
        for i in range(3):
            engine.add_request(f"r{i}", [i + 1] * 6, params(max_tokens=12))
        tokens, ends = answers(engine)
        assert ends["r2"][0] == "error"
        for i in range(2):
            assert tokens[f"r{i}"] == expected([i + 1] * 6, 0, 12, runner.model, 48)
        assert sum(len(p.preempted_req_ids) for p in runner.plans) > 0
