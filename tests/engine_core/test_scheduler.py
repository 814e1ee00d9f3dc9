"""The scheduler: every plan passes the validator, and tokens do not depend on how the work was cut into steps."""

import collections

import pytest
from engine_fake_runner import build_engine, expected, run_to_end
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.request import Request, RequestStatus
from runner_api import (
    CallOrderError,
    ConfigError,
    EngineError,
    ModelRunnerOutput,
    SamplingParams,
    UnknownNameError,
    WitnessConfig,
    WitnessGroup,
)

V = 32
# A small alphabet and few distinct prompts make common prefixes common.
PROMPTS = st.one_of(st.lists(st.integers(0, 1), min_size=1, max_size=26), st.integers(1, 26).map(lambda n: [3] * n))


def greedy(max_tokens: int | None = 6, **kwargs) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=kwargs.pop("seed", 0), max_tokens=max_tokens, **kwargs)


@st.composite
def engine_options(draw):
    """Every way to cut the work: rows, budget, chunk cap, blocks, sharing, layout, depth, drafts."""
    mode = draw(st.sampled_from(["sync", "async", "drafts"]))
    options = {
        "max_num_reqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": draw(st.integers(1, 20)),
        "max_model_len": draw(st.sampled_from([28, 33, 64])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 3])),
        "num_blocks": draw(st.integers(11, 18)),
        "layout": "slots" if mode == "drafts" else draw(st.sampled_from(["slots", "dense"])),
        "prefix_caching": draw(st.booleans()),
    }
    if mode == "async":
        options |= {"async_scheduling": True, "depth": draw(st.integers(2, 4))}
    if mode == "drafts":
        options |= {"num_speculative_tokens": draw(st.integers(1, 3))}
    return options


@settings(max_examples=250, deadline=None)
@given(options=engine_options(), data=st.data())
def test_tokens_depend_on_history_alone(options, data):
    engine, runner = build_engine(**options)
    longest = options["max_model_len"]
    wanted, got, aborted = {}, collections.defaultdict(list), set()
    finished: collections.Counter[str] = collections.Counter()
    arrivals = data.draw(st.lists(st.tuples(st.integers(0, 3), PROMPTS, st.integers(1, 9)), min_size=1, max_size=9))
    aborts = data.draw(st.sets(st.integers(0, 8), max_size=2))
    for i, (steps, prompt, max_tokens) in enumerate(arrivals):
        engine.add_request(f"r{i}", prompt, greedy(max_tokens, seed=len(prompt)))
        wanted[f"r{i}"] = expected(prompt, len(prompt), max_tokens, runner.model, longest)
        for _ in range(steps):
            for output in engine.step():
                got[output.req_id] += output.new_token_ids
                finished[output.req_id] += output.finish_reason is not None
            engine.scheduler.kv_cache_manager.check_conservation()
        if i in aborts and engine.abort(f"r{i}") is not None:
            aborted.add(f"r{i}")
    for req_id, tokens in run_to_end(engine).items():
        got[req_id] += tokens
    for req_id, tokens in wanted.items():
        if req_id in aborted:
            assert got[req_id] == tokens[: len(got[req_id])]
        else:
            assert got[req_id] == tokens
    pool = engine.scheduler.kv_cache_manager.pool
    assert pool.num_free == pool.num_blocks - 1
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    reported = collections.Counter(r for plan in runner.plans for r in plan.finished_req_ids)
    assert reported == dict.fromkeys(wanted, 1)
    assert not runner.validator.requests


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(26, 40),
    budget=st.integers(1, 20),
    windows=st.tuples(st.sampled_from([None, 3, 8]), st.sampled_from([None, 1, 6])),
    prompts=st.lists(PROMPTS, min_size=1, max_size=6),
    async_scheduling=st.booleans(),
)
def test_several_groups_and_windows(num_blocks, budget, windows, prompts, async_scheduling):
    model = WitnessConfig(V, (WitnessGroup(4, windows[0]), WitnessGroup(2, windows[1])))
    engine, _ = build_engine(
        num_blocks=num_blocks, model=model, max_num_batched_tokens=budget, async_scheduling=async_scheduling
    )
    for i, prompt in enumerate(prompts):
        engine.add_request(f"r{i}", prompt, greedy(7, seed=i))
    got = run_to_end(engine)
    assert got == {f"r{i}": expected(p, i, 7, model, 48) for i, p in enumerate(prompts)}


def test_every_kind_of_plan_is_produced():
    """One run that meets each situation a runner must serve; a kind that is never produced tests nothing."""
    kinds = collections.Counter()
    engine, runner = build_engine(num_blocks=11, max_num_reqs=3, max_num_batched_tokens=9, max_model_len=36)
    add = engine.add_request
    add("one", [7], greedy(3))
    add("long", list(range(20)), greedy(6))
    add("same", list(range(20)), greedy(12))
    add("writer", [9] * 8 + [1], greedy(2))
    add("reader", [9] * 8 + [2], greedy(2))
    for _ in range(5):
        engine.step()
    engine.abort("long")
    add("long", [4] * 12, greedy(6))
    run_to_end(engine)
    add("full", [5] * 30, greedy(None))
    engine.step()
    engine.abort("full")
    add("full", [6] * 30, greedy(None))
    run_to_end(engine)
    seen: dict[str, list[int]] = {}  # prefill length and computed tokens
    for plan in runner.plans:
        sizes = plan.num_scheduled_tokens
        if not sizes:
            kinds["empty with finished" if plan.finished_req_ids else "empty"] += 1
        for new in plan.scheduled_new_reqs:
            kinds["finished and new"] += new.req_id in plan.finished_req_ids
            resumed = len(new.prefill_token_ids) > len(new.prompt_token_ids) or new.req_id in seen
            kinds["resumed"] += resumed and new.req_id not in plan.finished_req_ids
            kinds["prefix hit"] += new.num_computed_tokens > 0
            kinds["one-token prompt"] += len(new.prompt_token_ids) == 1
            seen[new.req_id] = [len(new.prefill_token_ids), new.num_computed_tokens]
            whole = new.num_computed_tokens + sizes[new.req_id] == len(new.prefill_token_ids)
            kinds["whole prefill" if whole else "first chunk"] += 1
            writers = {b for other in plan.scheduled_new_reqs if other is not new for b in other.block_ids[0]}
            kinds["shares with a writer of the step"] += bool(writers & set(new.block_ids[0]))
        cached = plan.scheduled_cached_reqs
        for req_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            prefill, n = seen[req_id][0], sizes[req_id]
            if computed >= prefill:
                kinds["decode, new block" if blocks else "decode, no block"] += 1
            else:
                kinds["last chunk" if computed + n == prefill else "middle chunk"] += 1
            kinds["at the limit"] += computed + n == 35
        decodes = [r for r in cached.req_ids if sizes[r] == 1]
        kinds["mixed"] += bool(decodes) and len(sizes) > len(decodes)
        kinds["preempted"] += bool(plan.preempted_req_ids)
        kinds["rows full"] += len(sizes) == 3
    wanted = {
        "empty with finished", "finished and new", "resumed", "prefix hit", "one-token prompt", "whole prefill",
        "first chunk", "middle chunk", "last chunk", "shares with a writer of the step", "decode, new block",
        "decode, no block", "at the limit", "mixed", "preempted", "rows full",
    }  # fmt: skip
    assert wanted <= {kind for kind, count in kinds.items() if count}, kinds


def test_every_kind_of_drafted_plan_is_produced():
    kinds = collections.Counter()
    engine, runner = build_engine(num_speculative_tokens=3, max_num_batched_tokens=8, max_model_len=30)
    for i in range(3):
        engine.add_request(f"r{i}", [i] * (1 + i), greedy(None))
    got = run_to_end(engine)
    assert got == {f"r{i}": expected([i] * (1 + i), 0, 99, runner.model, 30) for i in range(3)}
    live, previous = set(), {}
    for plan in runner.plans:
        live = (live - plan.finished_req_ids - plan.preempted_req_ids) | {n.req_id for n in plan.scheduled_new_reqs}
        kinds["running but unscheduled"] += bool(live - plan.num_scheduled_tokens.keys())
        cached = plan.scheduled_cached_reqs
        for req_id, outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if req_id in previous:
                drafts, before = previous[req_id]
                accepted = outputs - before - 1
                kinds["all accepted" if accepted == drafts else "some accepted" if accepted else "none accepted"] += 1
            drafts = len(plan.scheduled_spec_decode_tokens.get(req_id, ()))
            previous[req_id] = drafts, outputs
            kinds["no drafts beside drafts"] += not drafts and bool(plan.scheduled_spec_decode_tokens)
            kinds["trimmed drafts"] += 0 < drafts < 3
    assert {
        "running but unscheduled", "all accepted", "some accepted", "none accepted", "no drafts beside drafts",
        "trimmed drafts",
    } <= {kind for kind, count in kinds.items() if count}, kinds  # fmt: skip


def test_preemption_takes_the_last_admitted_and_resumes_it_first():
    engine, runner = build_engine(num_blocks=7, prefix_caching=False, max_num_batched_tokens=30)
    for name in "abc":
        engine.add_request(name, [ord(name) % V] * 7, greedy(8))
    run_to_end(engine)
    events = [sorted(p.preempted_req_ids) for p in runner.plans if p.preempted_req_ids]
    assert events[0] == ["c"]
    admitted = [new.req_id for plan in runner.plans for new in plan.scheduled_new_reqs]
    assert admitted[:4] == ["a", "b", "c", admitted[3]]
    for plan in runner.plans:
        assert not plan.preempted_req_ids & plan.num_scheduled_tokens.keys()
    resumed = [n for p in runner.plans for n in p.scheduled_new_reqs if len(n.prefill_token_ids) > 7]
    assert resumed
    assert all(n.seed == 0 and list(n.prompt_token_ids) == [ord(n.req_id) % V] * 7 for n in resumed)


def test_a_preempted_request_goes_before_those_who_wait():
    engine, runner = build_engine(
        num_blocks=7, prefix_caching=False, max_num_batched_tokens=30, max_num_reqs=3, max_model_len=20
    )
    for name in "abcd":
        engine.add_request(name, [ord(name) % V] * 7, greedy(8))
    run_to_end(engine)
    order = [n.req_id for p in runner.plans for n in p.scheduled_new_reqs]
    assert order[:6] == ["a", "b", "c", "b", "c", "d"]  # d has waited since the start


def test_a_plan_that_preempts_admits_nobody():
    # b gives its blocks back; its own first chunk, or c, would fit into what a leaves of them.
    engine, runner = build_engine(num_blocks=5, prefix_caching=False, max_num_batched_tokens=3)
    engine.add_request("a", [1] * 8, greedy(5))
    engine.add_request("b", [2] * 8, greedy(5))
    engine.add_request("c", [3], greedy(2))
    run_to_end(engine)
    preempting = [p for p in runner.plans if p.preempted_req_ids]
    assert preempting
    assert not any(p.scheduled_new_reqs for p in preempting)


def test_drafted_requests_own_the_places_a_drafter_writes():
    k = 3
    engine, runner = build_engine(num_speculative_tokens=k, num_blocks=60)
    for i in range(3):
        engine.add_request(f"r{i}", [i] * (2 + i), greedy(20))
    owned: dict[str, int] = {}
    run_to_end(engine)
    for plan in runner.plans:
        cached = plan.scheduled_cached_reqs
        rows = [(n.req_id, n.num_computed_tokens, n.block_ids) for n in plan.scheduled_new_reqs]
        rows += zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for req_id, computed, blocks in rows:
            owned[req_id] = owned.get(req_id, 0) + (len(blocks[0]) if blocks else 0)
            needed = min(computed + plan.num_scheduled_tokens[req_id] + k, 48)
            assert owned[req_id] * 4 >= needed


def test_drafts_for_those_who_cannot_use_them():
    engine, _ = build_engine(num_speculative_tokens=2, max_num_batched_tokens=4)
    scheduler = engine.scheduler
    scheduler.add_request(Request("a", (1,) * 6, greedy()))
    scheduler.add_request(Request("b", (1,), greedy()))
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, ModelRunnerOutput(("a",), ((),)))
    scheduler.update_draft_token_ids({"a": [1, 2], "b": [1, 2], "gone": [1]})  # a chunk, waiting, unknown
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 2, "b": 1}
    assert not plan.scheduled_spec_decode_tokens
    scheduler.update_from_output(plan, ModelRunnerOutput(("a", "b"), ((5,), (6,))))
    with pytest.raises(EngineError, match="too many drafts"):
        scheduler.update_draft_token_ids({"a": [1, 2, 3]})
    scheduler.update_draft_token_ids({"a": [1, 2]})
    assert scheduler.schedule().scheduled_spec_decode_tokens == {"a": [1, 2]}


def test_dense_layout_resumes_as_cached():
    engine, runner = build_engine(num_blocks=7, prefix_caching=False, layout="dense")
    for name in "abc":
        engine.add_request(name, [ord(name) % V] * 7, greedy(8))
    got = run_to_end(engine)
    assert got == {n: expected([ord(n) % V] * 7, 0, 8, runner.model, 48) for n in "abc"}
    resumed = [p for p in runner.plans if p.scheduled_cached_reqs.resumed_req_ids]
    assert resumed
    for plan in resumed:
        cached = plan.scheduled_cached_reqs
        assert cached.all_token_ids.keys() == cached.resumed_req_ids
        assert not cached.resumed_req_ids & {n.req_id for n in plan.scheduled_new_reqs}
    assert sum(len(p.scheduled_new_reqs) for p in runner.plans) == 3


def test_running_requests_come_first():
    engine, runner = build_engine(max_num_batched_tokens=4)
    engine.add_request("a", [1] * 3, greedy(9))
    engine.add_request("b", [2] * 9, greedy(2))
    for _ in range(4):
        engine.step()
    assert [dict(p.num_scheduled_tokens) for p in runner.plans] == [
        {"a": 3, "b": 1}, {"a": 1, "b": 3}, {"a": 1, "b": 3}, {"a": 1, "b": 2},
    ]  # fmt: skip


def test_long_prompts_are_capped():
    engine, runner = build_engine(long_prefill_token_threshold=3, max_num_batched_tokens=8)
    engine.add_request("a", [1] * 8, greedy(1))
    engine.add_request("b", [2] * 4, greedy(1))
    run_to_end(engine)
    assert [dict(p.num_scheduled_tokens) for p in runner.plans] == [
        {"a": 3, "b": 3}, {"a": 3, "b": 1}, {"a": 2}, {},
    ]  # fmt: skip


def test_a_plan_handed_out_does_not_change():
    engine, _ = build_engine(async_scheduling=True)
    scheduler = engine.scheduler
    scheduler.add_request(Request("a", (1, 2, 3), greedy(4)))
    plan = scheduler.schedule()
    blocks = [list(ids) for ids in plan.scheduled_new_reqs[0].block_ids]
    scheduler.abort("a")
    scheduler.schedule()
    assert [list(ids) for ids in plan.scheduled_new_reqs[0].block_ids] == blocks
    assert plan.finished_req_ids == frozenset()


def test_abort_in_every_state():
    engine, runner = build_engine(max_num_reqs=1)
    engine.add_request("a", [1, 2], greedy(4))
    engine.add_request("b", [1, 2], greedy(4))
    engine.step()
    for name in "ba":  # waiting, running
        output = engine.abort(name)
        assert (output.finish_reason, output.new_token_ids) == ("abort", ())
        assert engine.abort(name) is None
    assert not engine.has_unfinished_requests
    assert engine.has_requests
    assert engine.step() == []
    assert not engine.has_requests
    assert runner.plans[-1].finished_req_ids == {"a", "b"}
    assert runner.plans[-1].total_num_scheduled_tokens == 0


def test_abort_and_reuse_of_an_id_while_its_step_runs():
    engine, _ = build_engine(async_scheduling=True)
    engine.add_request("a", [1, 2], greedy(4))
    assert engine.step() == []
    engine.abort("a")
    engine.add_request("a", [5, 6, 7], greedy(4))
    got = run_to_end(engine)
    assert got == {"a": expected([5, 6, 7], 0, 4, engine.executor.worker.runner.model, 48)}


def test_stop_order():
    def stopped(tokens, eos=frozenset(), **params):
        request = Request("a", (1,), SamplingParams(temperature=0.0, **params), eos_token_ids=eos)
        kept, status = request.append(tokens, 8)
        return kept, status, request.stop_reason

    assert stopped([5, 6, 7], frozenset({6})) == ([5, 6], RequestStatus.FINISHED_STOPPED, None)
    assert stopped([5, 6], frozenset({6}), stop_token_ids=(6,))[2] is None
    assert stopped([5, 6], frozenset({6}), stop_token_ids=(6,), ignore_eos=True)[2] == 6
    assert stopped([5, 6], frozenset({6}), max_tokens=2)[1] is RequestStatus.FINISHED_STOPPED
    assert stopped([5, 6, 7], max_tokens=2) == ([5, 6], RequestStatus.FINISHED_LENGTH, None)
    assert stopped(list(range(9)), max_tokens=None)[0] == list(range(7))
    assert stopped([5, 6], frozenset({9})) == ([5, 6], None, None)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"),
    [([], 1, "prompt length"), ([1] * 48, 1, "prompt length"), ([1] * 20, 30, "can never hold")],
)
def test_requests_that_can_never_finish_are_refused(prompt, max_tokens, field):
    engine, _ = build_engine(num_blocks=9)
    with pytest.raises(EngineError, match=field):
        engine.add_request("a", prompt, greedy(max_tokens))
    assert not engine.has_requests
    engine.add_request("a", [1] * 20, greedy(13))
    assert len(run_to_end(engine)["a"]) == 13


def test_live_id_is_refused():
    engine, _ = build_engine()
    engine.add_request("a", [1], greedy())
    with pytest.raises(EngineError, match="live"):
        engine.add_request("a", [1], greedy())


def test_results_that_do_not_answer_the_plan():
    def scheduled(prompt):
        engine, _ = build_engine(max_num_batched_tokens=4)
        engine.scheduler.add_request(Request("a", tuple(prompt), greedy()))
        return engine.scheduler, engine.scheduler.schedule()

    for prompt, output in [
        ([1, 2], ModelRunnerOutput()),
        ([1, 2], ModelRunnerOutput(("a",), ((),))),
        ([1, 2], ModelRunnerOutput(("a",), ((1, 2),))),
        ([1] * 6, ModelRunnerOutput(("a",), ((1,),))),
    ]:
        scheduler, plan = scheduled(prompt)
        with pytest.raises(EngineError, match="does not answer the plan"):
            scheduler.update_from_output(plan, output)
    scheduler, plan = scheduled([1, 2])
    with pytest.raises(CallOrderError, match="unanswered"):
        scheduler.schedule()
    _, other = scheduled([1, 2])
    with pytest.raises(CallOrderError, match="oldest"):
        scheduler.update_from_output(other, ModelRunnerOutput(("a",), ((1,),)))


def test_bad_limits():
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        build_engine(max_num_batched_tokens=0)
    with pytest.raises(UnknownNameError, match="slots"):
        build_engine(layout="slot")
    with pytest.raises(ConfigError, match="drafts"):
        build_engine(async_scheduling=True, num_speculative_tokens=2)
