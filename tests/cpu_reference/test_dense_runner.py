"""Whole steps with packed rows, and the same stories told to fixed rows: tokens, log probabilities and KV are equal."""

import dataclasses
from collections import Counter
from itertools import pairwise

import pytest
from step_driver import GREEDY, full, make_plan, new
from two_layouts import EVERYTHING, PALETTE, Both, Counting, Story, make_layout, resuming, tell_random_story

from cpu_reference.dense.runner import DENSE_CAPABILITIES, DenseCpuModelRunner
from cpu_reference.layouts import build_runner
from cpu_reference.runner import CpuModelRunner
from runner_api import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    CapabilityError,
    DefaultModelState,
    RunnerConfig,
    SamplingParams,
    WitnessConfig,
    WitnessGroup,
    load_factory,
    load_stages,
)
from runner_api.logits_processors import RowMove

MODEL = WitnessConfig(vocab_size=50, groups=(WitnessGroup(4), WitnessGroup(3, sliding_window=5)))
ONE_GROUP = WitnessConfig(vocab_size=50, groups=(WitnessGroup(4),))
SMALL = {"max_num_reqs": 5, "max_num_batched_tokens": 40, "max_model_len": 40}
SEEDED = SamplingParams(temperature=1.0)


def both(model=MODEL, **config):
    return Both(model, **SMALL | config)


def dense(model=MODEL, **config):
    return make_layout("dense", model, 64, **SMALL | config)


def run(runner, plan, **rest):
    if runner.execute_model(plan, **rest) is EMPTY_MODEL_RUNNER_OUTPUT:
        return {}
    return runner.sample_tokens().get_output().tokens()


# -- the choice ---------------------------------------------------------------------------------------------------


def test_the_factory_builds_what_was_chosen(monkeypatch):
    monkeypatch.delenv("MODELRUNNER_LAYOUT", raising=False)
    for config, kind in (
        (RunnerConfig(), CpuModelRunner),
        (RunnerConfig(layout="slots"), CpuModelRunner),
        (RunnerConfig(layout="dense"), DenseCpuModelRunner),
        (RunnerConfig(reorder_batch_threshold=1), DenseCpuModelRunner),
        (RunnerConfig(num_speculative_tokens=2), CpuModelRunner),
    ):
        runner = build_runner(config)
        assert type(runner) is kind
        info = runner.describe()
        assert info.layout == info.selection.layout == runner.selection.layout
        assert info.selection.offered == ("slots", "dense")
    monkeypatch.setenv("MODELRUNNER_LAYOUT", "dense")
    assert build_runner(RunnerConfig()).describe().layout == "dense"
    assert load_factory("cpu_reference.layouts:build_runner").LAYOUTS == ("slots", "dense")
    assert load_stages("cpu_reference.layouts:build_runner").backend == "cpu"


@pytest.mark.parametrize("factory", [build_runner, DenseCpuModelRunner])
@pytest.mark.parametrize(
    ("field", "value"), [("num_speculative_tokens", 2), ("initial_free_rows", tuple(range(64)))], ids=str
)
def test_what_packed_rows_lack_is_refused(factory, field, value):
    with pytest.raises(CapabilityError) as caught:
        factory(RunnerConfig(layout="dense", **{field: value}))
    assert caught.value.field == field


def test_each_class_is_one_layout():
    for kind, other in ((CpuModelRunner, "dense"), (DenseCpuModelRunner, "slots")):
        with pytest.raises(CapabilityError, match="only one layout"):
            kind(RunnerConfig(layout=other))
    with pytest.raises(CapabilityError, match="reorder_batch_threshold"):
        CpuModelRunner(RunnerConfig(reorder_batch_threshold=1))
    info = dense().describe()
    assert info.capabilities == DENSE_CAPABILITIES
    assert "layout=dense" in info.line()


# -- single steps -------------------------------------------------------------------------------------------------


def known(count):
    return [t % 50 for t in range(count)]


def test_four_decodes_and_their_inputs():
    """1000, 512, 37 and 2047 tokens are there; one token of each is computed."""
    model = WitnessConfig(vocab_size=50, groups=(WitnessGroup(16),))
    runner = make_layout("dense", model, 300, max_num_reqs=8, max_num_batched_tokens=16, max_model_len=8192)
    added, first = [], 1
    for name, computed in zip("abcd", (1000, 512, 37, 2047), strict=True):
        count = -(-(computed + 1) // 16)
        added.append(new(name, known(computed + 1), range(first, first + count), computed))
        first += count
    run(runner, make_plan(dict.fromkeys("abcd", 1), added))
    record = runner.last_step()
    assert record.req_ids == tuple("abcd")
    assert record.idx_mapping.tolist() == [0, 1, 2, 3]
    assert record.positions.tolist() == [1000, 512, 37, 2047]
    assert record.seq_lens.tolist() == [1001, 513, 38, 2048]
    assert record.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert record.logits_indices.tolist() == [0, 1, 2, 3]
    assert record.input_ids.tolist() == [1000 % 50, 512 % 50, 37, 2047 % 50]
    blocks = [added[i].block_ids[0][p // 16] for i, p in enumerate(record.positions)]
    assert record.slot_mappings.tolist() == [[16 * b + p % 16 for b, p in zip(blocks, record.positions, strict=True)]]
    assert runner.block_tables.block_tables[0].shape[1] == 512
    assert runner.block_tables.bytes_committed == 8192
    assert runner.query_start_loc[4:].tolist() == [4] * 5
    assert not runner.seq_lens[4:].any()


def test_mixed_lengths_and_their_slots():
    model = WitnessConfig(vocab_size=50, groups=(WitnessGroup(8),))
    runner = make_layout("dense", model, 12, max_num_reqs=4, max_num_batched_tokens=8, max_model_len=16)
    tables = {"a": ([2, 3], 5, 2), "b": ([6, 7], 12, 1), "c": ([8, 9], 1, 3)}
    added = [new(name, known(c + n), blocks, c) for name, (blocks, c, n) in tables.items()]
    run(runner, make_plan({name: n for name, (_, _, n) in tables.items()}, added))
    record = runner.last_step()
    assert record.query_start_loc.tolist() == [0, 2, 3, 6]
    assert record.seq_lens.tolist() == [7, 13, 4]
    assert record.slot_mappings.tolist() == [[21, 22, 60, 65, 66, 67]]
    assert runner.block_tables.slot_mappings[0, 6:].tolist() == [-1, -1]


def test_rows_follow_the_plan():
    """Come in the plan's order, fill the lowest hole, condense: the batch is the rows."""
    runner = dense(ONE_GROUP)
    added = [new(name, [i + 1, 2], [i + 1]) for i, name in enumerate("ABCDE")]
    run(runner, make_plan(dict.fromkeys("ABCDE", 2), added))
    assert runner.last_step().req_ids == tuple("ABCDE")
    plan = make_plan(dict.fromkeys("ACE", 1), (), dict.fromkeys("ACE", (2, None)), finished_req_ids=frozenset("BD"))
    run(runner, plan)
    assert runner.last_step().req_ids == tuple("AEC")
    assert runner.last_step().idx_mapping.tolist() == [0, 1, 2]
    # X comes, C sits this one out: X takes C's row
    run(runner, make_plan({"A": 1, "E": 1, "X": 1}, [new("X", [3], [9])], {"A": (3, None), "E": (3, None)}))
    assert runner.last_step().req_ids == tuple("AEX")
    run(runner, make_plan({"C": 1, "X": 1}, (), {"C": (3, None), "X": (1, None)}))
    assert runner.last_step().req_ids == tuple("CX")
    assert runner.req_states.num_condense_moves == 2  # E, then X


def test_decodes_come_first_where_a_threshold_is_set():
    plans = Story([4], 64)
    runner = dense(ONE_GROUP, reorder_batch_threshold=1)
    for name, tokens in (("p", 3), ("d", 2), ("e", 9), ("c", 2), ("l", 12)):
        plans.add(name, known(tokens))

    def step(counts):
        drawn = run(runner, plans.plans(counts)["dense"])
        plans.drawn(counts, drawn)
        return "".join(runner.last_step().req_ids)

    assert step({"d": 2, "e": 3, "c": 2, "l": 4}) == "decl"  # all fresh
    assert step({"d": 1, "e": 1, "c": 1, "l": 3, "p": 3}) == "dcelp"
    assert runner.req_states.num_swaps == 1
    assert step({"d": 1, "e": 1, "c": 1, "l": 5, "p": 1}) == "dcpel"  # e, l and p stood wrong


def test_no_row_at_all():
    """A plan without tokens empties every row, and the next one fills them again, also where nothing ever ran."""
    runner = dense(ONE_GROUP)
    assert run(runner, make_plan({})) == {}
    assert run(runner, make_plan({}, [new("a", [1, 2, 3], [1])])) == {}
    assert runner.req_states.num_reqs == 0
    assert list(runner.waiting_requests) == ["a"]
    first = run(runner, make_plan({"a": 3}, (), {"a": (0, None)}))["a"]
    assert run(runner, make_plan({})) == {}
    assert runner.req_states.num_reqs == 0
    assert runner.waiting_requests["a"].token_ids == [1, 2, 3, *first]
    assert run(runner, make_plan({"a": 1}, (), {"a": (3, None)})).keys() == {"a"}
    assert run(runner, make_plan({}, finished_req_ids=frozenset("a"))) == {}
    assert runner.requests == {}
    assert runner.state_digest() == dense(ONE_GROUP).state_digest()


def test_a_request_that_is_finished_and_new_in_one_plan():
    """The first one's tokens, blocks, parameters and seed are gone."""
    told = []
    for before in (False, True):
        runner = dense(ONE_GROUP)
        if before:
            busy = SamplingParams(temperature=0.5, presence_penalty=2.0, logit_bias={3: 50.0}, prompt_logprobs=1)
            run(runner, make_plan({"a": 4}, [new("a", [9] * 6, [3, 4], sampling_params=busy, seed=8)]))
        plan = make_plan(
            {"a": 3}, [new("a", [1, 2, 3], [1], sampling_params=SEEDED, seed=5)], finished_req_ids=frozenset("a")
        )
        tokens = [run(runner, plan)]
        tokens.append(run(runner, make_plan({"a": 1}, (), {"a": (3, None)})))
        told.append((tokens, runner.state_digest()["request a"], runner.state_digest()["sampling a"]))
    assert told[0] == told[1]


def test_a_resumed_request_has_its_new_blocks_alone():
    runner = dense(ONE_GROUP)
    first = run(runner, make_plan({"a": 6, "b": 1}, [new("a", known(6), [3, 4]), new("b", [1], [5])]))
    run(runner, make_plan({"b": 1}, (), {"b": (1, None)}, preempted_req_ids=frozenset("a")))
    assert runner.waiting_requests["a"].block_ids == ([],)
    runner.poison_unused(-5)  # what it had is anybody's
    assert (runner.kv_caches["witness.0"][0][[3, 4]] == -5).all()
    plan = make_plan({"a": 7}, (), {"a": (0, [7, 8, 9])})
    run(runner, resuming(plan, {"a": known(6) + list(first["a"])}))
    assert runner.last_step().block_tables[0][0].tolist() == [7, 8, 9]
    assert runner.last_step().positions.tolist() == list(range(7))
    assert runner.requests["a"].block_ids == ([7, 8, 9],)


def test_preempted_and_resumed_in_one_plan():
    """Out of its row first, then in again; also where its row would be someone else's."""
    told = []
    for said in (False, True):
        runner = dense(ONE_GROUP)
        first = run(runner, make_plan({"a": 5, "b": 1}, [new("a", known(5), [3, 4]), new("b", [1], [5])]))
        plan = make_plan({"b": 1, "a": 6}, (), {"b": (1, None), "a": (0, [8, 9])})
        if said:
            plan.preempted_req_ids = frozenset("a")
        told.append(run(runner, resuming(plan, {"a": known(5) + list(first["a"])})))
        assert runner.last_step().req_ids == ("a", "b")
        assert runner.last_step().num_sampled.tolist() == [1, 1]
    assert told[0] == told[1]


def test_a_resumed_request_draws_nothing_before_it_has_caught_up():
    pair = both()
    pair.story.add("a", known(5), sampling_params=SEEDED)
    for counts in ({"a": 5}, {"a": 1}, {"a": 1}):
        pair.step(counts)
    pair.story.preempt("a")
    pair.step({})
    for n, count in ((3, 0), (4, 0), (1, 1), (1, 1)):
        pair.step({"a": n})
        assert len(pair.outputs[-1]["a"]) == count


def test_the_engine_may_use_its_lists_again_at_once():
    """What a request keeps for coming back is a copy."""
    runner, prompt, blocks = dense(ONE_GROUP), known(6), ([1, 2],)
    added = dataclasses.replace(new("a", prompt, blocks), prompt_token_ids=prompt, prefill_token_ids=prompt)
    plan = make_plan({"a": 3}, [added])
    assert plan.scheduled_new_reqs[0].prompt_token_ids is prompt
    runner.execute_model(plan)
    for used in (prompt, *blocks, plan.scheduled_new_reqs, plan.num_scheduled_tokens):
        used.clear()
    runner.sample_tokens()
    run(runner, make_plan({"b": 1}, [new("b", [1], [5])]))
    more = [[3]]
    plan = make_plan({"a": 3}, (), {"a": (3, tuple(more))})
    run(runner, plan)
    more[0].clear()
    assert runner.last_step().input_ids.tolist() == known(6)[3:]
    assert runner.requests["a"].block_ids == ([1, 2, 3],)


def test_outputs_may_be_taken_late():
    pair = both()
    early, late = pair.runners["dense"], dense()
    waiting = []
    for name, tokens in (("a", 5), ("b", 2), ("c", 3)):
        pair.story.add(name, known(tokens), sampling_params=SEEDED)
    for counts in ({"a": 5, "b": 2}, {"b": 1, "c": 3}, {"a": 1, "c": 1}, {"c": 1}):
        plan = pair.story.plans(counts)["dense"]
        early.execute_model(plan)
        late.execute_model(plan)
        output = early.sample_tokens().get_output()
        waiting.append((output, late.sample_tokens()))
        pair.story.drawn(counts, output.tokens())
    for output, later in waiting:
        assert later.get_output() == output


# -- what a request keeps while it has no row ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", PALETTE)
@pytest.mark.parametrize("chunk", [6, 2], ids=["whole prompt", "in chunks"])
def test_a_request_that_sits_out_steps(kind, chunk):
    """In the middle of its prompt and of its answer, while others take its row and go: it goes on as fixed rows do."""
    pair = both(**EVERYTHING)
    story = pair.story
    for name in "xyz":
        story.add(name, known(3), sampling_params=SEEDED, seed=ord(name))
    pair.step(dict.fromkeys("xyz", 3))
    story.add("a", [7, 1, 2, 4, 1, 2], sampling_params=PALETTE[kind], seed=3)
    while story.missing("a") > 1 or len(story.live["a"].tokens) < 13:
        pair.step({"x": 1, "a": min(chunk, story.missing("a"))} | ({"z": 1} if len(pair.outputs) % 2 else {}))
        pair.step({"z": 1, "y": 1} if len(pair.outputs) % 3 else {"y": 1})
        pair.step({})
    runner = pair.runners["dense"]
    assert runner.req_states.num_condense_moves > 0
    assert pair.outputs[-2]["a"] or chunk == 2
    if kind == "counting":
        drawn = story.live["a"].tokens[5:]
        assert {(b - a) % 50 for a, b in pairwise(drawn)} == {3}
    if kind == "told":
        assert story.live["a"].tokens[6:11] == [4, 7, 7, 30, 2]


def test_prompt_log_probabilities_collected_so_far_survive_a_step_without_a_row():
    """… and those of a request that starts over, or of another one of that name, do not."""
    asks = SamplingParams(temperature=0.0, prompt_logprobs=1)
    pair = both()
    story = pair.story
    story.add("b", known(3))
    story.add("a", known(9), sampling_params=asks)

    def rows_given(counts):
        story_plans = story.plans(counts)
        given = {}
        for layout, plan in story_plans.items():
            pair.runners[layout].execute_model(plan)
            output = pair.runners[layout].sample_tokens().get_output()
            given[layout] = {r: p.ranks.tolist() for r, p in output.prompt_logprobs.items() if p is not None}
        story.drawn(counts, output.tokens())
        assert given["slots"] == given["dense"]
        return {r: len(ranks) for r, ranks in given["dense"].items()}

    assert rows_given({"b": 3, "a": 4}) == {}
    assert rows_given({"b": 1}) == {}
    story.preempt("a")
    assert rows_given({"b": 1}) == {}
    assert rows_given({"b": 1, "a": 3}) == {}
    assert rows_given({"b": 1}) == {}
    assert rows_given({"a": 6}) == {"a": 8}
    assert rows_given({"a": 1}) == {}
    story.add("c", known(6), sampling_params=asks)
    assert rows_given({"c": 2}) == {}
    assert rows_given({"b": 1}) == {}
    story.finish("c")
    story.add("c", known(5), sampling_params=asks)
    assert rows_given({"c": 5}) == {"c": 4}
    assert pair.runners["dense"].sampler.prompt_logprobs._parts.keys() <= {"a", "b", "c"}


def test_processors_are_told_of_rows_in_order():
    """Who leaves, who comes, who moves; state and the right to edit go along."""
    runner = dense(ONE_GROUP, logits_processors=(Counting,), reorder_batch_threshold=1)
    (counting,) = runner.sampler.custom.processors
    params = [SamplingParams(temperature=0.0, extra_args=extra) for extra in (None, {"step": 1}, None, {"step": 2})]
    added = [new(name, [10 * i + 10], [i + 1], sampling_params=params[i]) for i, name in enumerate("abcd")]
    drawn = run(runner, make_plan(dict.fromkeys("abcd", 1), added))
    assert (drawn["b"], drawn["d"]) == ((21,), (42,))
    assert counting.told == [("add", row, 0) for row in range(4)]
    counting.told.clear()
    plan = make_plan(dict.fromkeys("cde", 1), [new("e", [5, 6], [9])], dict.fromkeys("cd", (1, None)))
    plan.finished_req_ids = frozenset("a")
    drawn = run(runner, plan)
    assert counting.told == [
        ("remove", 0), ("remove", 1), ("add", 0, 0), ("move", RowMove(3, 1), RowMove(0, 2, swap=True)),
    ]  # fmt: skip
    assert runner.last_step().req_ids == ("c", "d", "e")
    assert drawn["d"] == (44,)
    assert runner.sampler.custom.edits.tolist() == [[False, True, False, False, False]]
    counting.told.clear()
    drawn = run(runner, make_plan({"d": 1, "b": 1}, (), {"d": (2, None), "b": (1, None)}))
    assert counting.told == [("remove", 0), ("remove", 2), ("add", 0, 1)]
    assert (drawn["d"], drawn["b"]) == ((46,), (22,))


def test_a_models_own_state_is_told_of_rows():
    runner = dense(ONE_GROUP)
    told = []

    class State(DefaultModelState):
        def add(self, row, request):
            told.append(("add", request.req_id, row, list(request.prefill_token_ids), request.num_computed_tokens))

        def remove(self, req_id):
            told.append(("remove", req_id, runner.req_states.req_id_to_row[req_id]))

        def move_rows(self, moves):
            told.append(("move", *moves))

    runner._model_state = State()
    added = [new(name, [i, 2], [i + 1]) for i, name in enumerate("abc")]
    first = run(runner, make_plan(dict.fromkeys("abc", 2), added))
    run(runner, make_plan(dict.fromkeys("bc", 1), (), dict.fromkeys("bc", (2, None))))
    run(runner, make_plan({"a": 1}, (), {"a": (2, None)}, finished_req_ids=frozenset("bc")))
    assert told == [
        ("add", "a", 0, [0, 2], 0), ("add", "b", 1, [1, 2], 0), ("add", "c", 2, [2, 2], 0),
        ("remove", "a", 0), ("move", RowMove(2, 0)),
        ("remove", "b", 1), ("remove", "c", 0), ("add", "a", 0, [0, 2, *first["a"]], 2),
    ]  # fmt: skip


def test_a_greedy_row_does_not_stay_greedy():
    """A leaves, C moves into its row: with its own temperature, seed and everything."""
    pair = both()
    for name, params in (("a", GREEDY), ("b", SEEDED), ("c", SamplingParams(temperature=2.0))):
        pair.story.add(name, known(3), sampling_params=params, seed=ord(name))
    pair.step(dict.fromkeys("abc", 3))
    pair.story.finish("a")
    for _ in range(4):
        pair.step(dict.fromkeys("bc", 1))
    assert pair.runners["dense"].last_step().req_ids == ("c", "b")
    assert len({tokens["c"] for tokens in pair.outputs}) > 2


# -- looking in ---------------------------------------------------------------------------------------------------


def test_poison_reaches_no_token():
    """Of live requests with a row and without, and of freed rows, which stay as they are cleared."""
    clean, spoilt = both(**EVERYTHING), both(**EVERYTHING)
    for pair in (clean, spoilt):
        poison = ("slots", "dense") if pair is spoilt else ()
        for i, kind in enumerate(("penalised", "polite", "thinking", "told")):
            pair.story.add(kind, [7, 1, 2, 4, i], sampling_params=PALETTE[kind], seed=i)
        pair.step({"penalised": 5, "polite": 3, "thinking": 5})
        pair.step({"told": 5, "polite": 2}, poison=poison)
        pair.step({"thinking": 1}, poison=poison)
        pair.step({}, poison=poison)
        pair.step({"thinking": 1, "polite": 1, "told": 1}, poison=poison)
        pair.story.finish("polite")
        pair.step({"penalised": 1, "told": 1}, full(4, 3), poison=poison)
        pair.step({"penalised": 1, "thinking": 1}, full(5, 4), poison=poison)
    assert clean.outputs == spoilt.outputs
    digests = [pair.runners["dense"].state_digest() for pair in (clean, spoilt)]
    assert digests[0] == digests[1]
    spoilt.runners["dense"].poison_unused(-5)
    assert spoilt.runners["dense"].state_digest() == digests[0]


def test_the_digest_sees_requests_without_a_row_and_rows_without_a_request():
    def changed(change):
        runner = dense()
        added = [new("a", range(5), ([1, 2], [1, 2])), new("b", [1, 2], ([3], [3]))]
        run(runner, make_plan({"a": 5, "b": 2}, added))
        run(runner, make_plan({"b": 1}, (), {"b": (2, None)}))
        before = runner.state_digest()
        change(runner)
        after = runner.state_digest()
        return {name for name in before if before[name] != after[name]}

    def assign(array, index, value):
        array[index] = value

    assert changed(lambda r: None) == set()
    assert changed(lambda r: r.requests["a"].token_ids.append(3)) == {"request a"}
    assert changed(lambda r: r.requests["a"].block_ids[1].append(3)) == {"request a", "blocks a"}
    assert changed(lambda r: assign(r.kv_caches["witness.0"][0], (1, 0), 9)) == {"kv a"}
    assert changed(lambda r: assign(r.kv_caches["witness.0"][0], (3, 1), 9)) == {"kv b"}
    assert changed(lambda r: assign(r.req_states.all_token_ids, (0, 2), 9)) == {"request b"}
    assert changed(lambda r: assign(r.sampler.seeds, 0, 9)) == {"sampling b"}
    assert changed(lambda r: assign(r.sampler.seeds, 1, 9)) == {"free_rows"}
    assert changed(lambda r: assign(r.block_tables.block_tables[1], (4, 5), 9)) == {"free_rows"}
    assert changed(lambda r: r.poison_unused()) == set()


# -- stories ------------------------------------------------------------------------------------------------------


def random_story(seed, steps=60):
    pair = both(num_blocks=90, threshold=[None, 1, 3][seed % 3], **EVERYTHING)
    seen = tell_random_story(pair, seed, steps)
    rows = pair.runners["dense"].req_states
    seen["condense moves"], seen["swaps"] = rows.num_condense_moves, rows.num_swaps
    return seen


def test_the_same_stories_on_both_layouts():
    total = sum((random_story(seed) for seed in range(12)), Counter())
    assert total["condense moves"] > 100, total
    assert total["swaps"] > 100, total
    assert total["preempted"] > 100, total
    assert total["left out"] > 200, total
