"""Whole steps on the witness model, bit for bit: the order of calls, and what tokens must not depend on."""

import dataclasses
import logging

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from step_driver import Driver, force, full, make_plan, make_runner, new

from cpu_reference.models.witness import mix64
from cpu_reference.runner import CAPABILITIES, CpuModelRunner
from runner_api import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    BatchDescriptor,
    CallOrderError,
    Capability,
    CapabilityError,
    ConfigError,
    CUDAGraphMode,
    ForcedStep,
    GrammarOutput,
    IntermediateTensors,
    KVCacheConfig,
    KVCacheError,
    KVCacheGroup,
    KVCacheSpec,
    ModelRunner,
    NewRequestData,
    PlanError,
    RunnerConfig,
    SamplingParams,
    UnknownNameError,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
    load_runner,
)
from runner_api import witness as w

TWO_GROUPS = WitnessConfig(vocab_size=64, groups=(WitnessGroup(4), WitnessGroup(3, sliding_window=5)))
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9)


def small(**config):
    config = {"max_num_reqs": 4, "max_num_batched_tokens": 48, "max_model_len": 48, "num_blocks": 60} | config
    return make_runner(TWO_GROUPS, **config)


def witness_token(tokens, groups=TWO_GROUPS.groups, vocab_size=64):
    """The greedy token after these, by the model's definition, from the tokens alone: no blocks, no batch."""
    p, hidden = len(tokens) - 1, 0
    for g, group in enumerate(groups):
        first = 0 if group.sliding_window is None else max(0, p - group.sliding_window + 1)
        for j in range(first, p + 1):
            word = tokens[j] * w.TOKEN + j * w.POSITION + (j + 1) * w.INDEX
            hidden += int(mix64(np.array([word % 2**64], np.uint64))[0]) * (2 * g + 1)
    keys = np.array([(hidden + (v + 1) * w.VOCAB) % 2**64 for v in range(vocab_size)], np.uint64)
    words = [int(word) >> 44 for word in mix64(keys)]
    return words.index(max(words))


# -- the protocol ------------------------------------------------------------------------------------------------


def test_the_runner_is_a_model_runner(caplog):
    with caplog.at_level(logging.INFO, "modelrunner"):
        runner = load_runner("cpu_reference.runner:CpuModelRunner", RunnerConfig(max_num_reqs=3))
    assert isinstance(runner, ModelRunner)
    assert len(caplog.records) == 1
    assert "runner=cpu class=cpu_reference.runner.CpuModelRunner" in caplog.text
    assert runner.describe().capabilities == CAPABILITIES
    assert runner.capture_graphs() == ()


def test_calls_before_their_time():
    runner = CpuModelRunner(RunnerConfig())
    for call in (
        runner.get_kv_cache_specs,
        lambda: runner.execute_model(make_plan({})),
        runner.sample_tokens,
        runner.last_step,
        runner.poison_unused,
        runner.state_digest,
    ):
        with pytest.raises(CallOrderError) as caught:
            call()
        assert caught.value.hint
    runner.load_model(WitnessConfig())
    with pytest.raises(CallOrderError):
        runner.execute_model(make_plan({}))


def test_execute_twice_and_sample_first():
    runner = small()
    with pytest.raises(CallOrderError, match="execute_model"):
        runner.sample_tokens()
    runner.execute_model(make_plan({"a": 2}, [new("a", [1, 2], ([1], [1]))]))
    with pytest.raises(CallOrderError, match="sample_tokens"):
        runner.execute_model(make_plan({"a": 1}, (), {"a": (2, None)}))
    with pytest.raises(CallOrderError):
        runner.poison_unused()
    expected = witness_token([1, 2])
    assert runner.sample_tokens().get_output().tokens() == {"a": (expected,)}
    with pytest.raises(CallOrderError):
        runner.sample_tokens()


def test_output_may_be_taken_late_and_twice():
    """Later steps, new owners of the row and poison do not change what an old output says."""
    runner, outputs = small(), []
    runner.execute_model(make_plan({"a": 2}, [new("a", [1, 2], ([1], [1]))]))
    outputs.append(runner.sample_tokens())
    runner.execute_model(make_plan({"a": 1}, (), {"a": (2, None)}))
    outputs.append(runner.sample_tokens())
    runner.execute_model(make_plan({"b": 2}, [new("b", [9, 9], ([1], [1]))], finished_req_ids=frozenset("a")))
    outputs.append(runner.sample_tokens())
    runner.poison_unused()
    first = witness_token([1, 2])
    expected = [{"a": (first,)}, {"a": (witness_token([1, 2, first]),)}, {"b": (witness_token([9, 9]),)}]
    for _ in range(2):
        assert [o.get_output().tokens() for o in outputs] == expected


def test_the_counts_of_an_old_output_are_its_own():
    """A step that samples nothing, then one that does, then the other way round: each output keeps its count."""
    runner = small()
    runner.execute_model(make_plan({"a": 2}, [new("a", [1, 2, 3], ([1], [1]))]))
    unfinished = runner.sample_tokens()
    runner.execute_model(make_plan({"a": 1}, (), {"a": (2, None)}))
    finished = runner.sample_tokens()
    runner.execute_model(make_plan({"b": 1}, [new("b", [1, 2], ([2], [2]))]))
    runner.sample_tokens()
    assert unfinished.get_output().tokens() == {"a": ()}
    assert finished.get_output().tokens() == {"a": (witness_token([1, 2, 3]),)}


def test_a_plan_is_read_during_execute_model_only():
    """The engine may reuse its lists at once."""
    runner, prompt, blocks = small(), [1, 2, 3], ([1], [1])
    plan = make_plan({"a": 3}, [NewRequestData("a", prompt, prompt, 0, blocks)])
    runner.execute_model(plan)
    for used in (prompt, *blocks, plan.scheduled_new_reqs, plan.num_scheduled_tokens):
        used.clear()
    first = witness_token([1, 2, 3])
    assert runner.sample_tokens().get_output().tokens() == {"a": (first,)}
    runner.execute_model(make_plan({"a": 1}, (), {"a": (3, ([], [2]))}))
    assert runner.sample_tokens().get_output().tokens() == {"a": (witness_token([1, 2, 3, first]),)}


def test_a_plan_without_tokens_changes_state_only():
    runner = small()
    output = runner.execute_model(make_plan({}, [new("a", [1, 2, 3], ([1], [1]))]))
    assert output is EMPTY_MODEL_RUNNER_OUTPUT
    assert runner.last_step().num_reqs == 0
    assert runner.last_step().req_ids == ()
    with pytest.raises(CallOrderError):
        runner.sample_tokens()
    assert runner.req_states.req_id_to_row == {"a": 3}
    runner.execute_model(make_plan({"a": 3}, (), {"a": (0, None)}))
    assert runner.sample_tokens().get_output().tokens() == {"a": (witness_token([1, 2, 3]),)}
    assert runner.execute_model(make_plan({}, finished_req_ids=frozenset("a"))) is EMPTY_MODEL_RUNNER_OUTPUT
    assert runner.req_states.req_id_to_row == {}
    assert runner.req_states.free_rows == [0, 1, 2, 3]


def test_finishing_an_unknown_request_changes_nothing():
    runner = small()
    runner.execute_model(make_plan({}, [new("a", [1, 2, 3], ([1], [1]))]))
    before = runner.state_digest()
    runner.execute_model(make_plan({}, finished_req_ids=frozenset("xy"), preempted_req_ids=frozenset("z")))
    assert runner.state_digest() == before
    assert sorted(runner.req_states.free_rows) == [0, 1, 2]


def test_rows_and_live_requests_share_the_table():
    """Free rows and live rows are a partition of all rows; both maps are each other's inverse; no row ever moves."""
    driver = Driver(small())
    states, rng, seen = driver.runner.req_states, np.random.default_rng(0), {}
    for step in range(40):
        live = sorted(driver.blocks)
        if len(live) == 4 or (live and rng.random() < 0.4):
            driver.remove(live[rng.integers(len(live))], preempt=bool(rng.integers(2)))
        driver.add(f"r{step}", [step, 1])
        driver.step({f"r{step}": 2})
        assert sorted([*states.free_rows, *states.row_to_req_id]) == [0, 1, 2, 3]
        assert {row: r for r, row in states.req_id_to_row.items()} == states.row_to_req_id
        assert states.req_id_to_row.keys() == driver.blocks.keys()
        for req_id, row in states.req_id_to_row.items():
            assert seen.setdefault(req_id, row) == row


def test_an_unfinished_prompt_samples_nothing():
    runner = small()
    runner.execute_model(make_plan({"a": 2}, [new("a", [1, 2, 3], ([1], [1]))]))
    output = runner.sample_tokens().get_output()
    assert output.sampled_token_ids == ((),)
    assert output.req_id_to_index == {"a": 0}
    assert runner.last_step().num_sampled.tolist() == [0]
    assert runner.last_step().tokens() == {"a": ()}


def test_what_is_not_offered_is_refused():
    for config in (
        {"layout": "dense"}, {"device": "cuda"}, {"dtype": "bfloat16"},
        {"parallel": dataclasses.replace(RunnerConfig().parallel, tp_size=2)},
    ):  # fmt: skip
        with pytest.raises(CapabilityError):
            CpuModelRunner(RunnerConfig(**config))
    runner = small()
    with pytest.raises(CapabilityError):
        runner.execute_model(make_plan({}), intermediate_tensors=IntermediateTensors({}))
    runner.execute_model(make_plan({"a": 1}, [new("a", [1], ([1], [1]))]))
    with pytest.raises(CapabilityError, match="drafts"):
        runner.sample_tokens(GrammarOutput(["a"], np.zeros((1, 2), np.int32), num_acceptable_drafts=[0]))
    assert runner.sample_tokens().get_output().tokens() == {"a": (witness_token([1]),)}
    with pytest.raises(CapabilityError):
        runner.pool()
    assert runner.take_draft_token_ids() is None
    runner.shutdown()
    with pytest.raises(CallOrderError):
        runner.execute_model(make_plan({}))


def test_caches_that_do_not_fit_the_model():
    runner = CpuModelRunner(RunnerConfig())
    runner.load_model(WitnessConfig())
    spec = KVCacheSpec(16, 1, 1, "int64", kind="token_position")
    with pytest.raises(KVCacheError, match="layers"):
        runner.initialize_kv_cache(KVCacheConfig(8, (KVCacheGroup(("other",), spec),)))
    with pytest.raises(ConfigError, match="model"):
        runner.load_model(17)


@pytest.mark.parametrize("reach", [(0,), (0, 3), (4, 4)])
def test_a_window_that_would_hide_what_is_read(reach):
    """One entry per group; none for a group that reads everything, none shorter than the model's window."""
    with pytest.raises(ConfigError) as caught:
        small(window_reach=reach)
    assert caught.value.field.startswith("window_reach")


def test_a_longer_window_reach_changes_the_table_but_no_token():
    plain, longer = Driver(small()), Driver(small(window_reach=(0, 8)))
    for driver in (plain, longer):
        driver.add("a", range(1, 15))
        driver.step({"a": 14})
        driver.decode("a", 4)
    assert plain.tokens == longer.tokens
    nulls = [(d.runner.last_step().block_tables[1][0] == 0).sum() for d in (plain, longer)]
    assert nulls == [(17 - 4) // 3, (17 - 8) // 3]


# -- forced outcomes -----------------------------------------------------------------------------------------------


def waiting(k=2):
    """Two requests whose step waits for its tokens: a has finished its prompt, b has not."""
    runner = small(num_speculative_tokens=k)
    runner.execute_model(make_plan({"a": 2, "b": 1}, [new("a", [1, 2], ([1], [1])), new("b", [3, 4], ([2], [2]))]))
    assert runner.last_step().req_ids == ("b", "a")
    return runner


@pytest.mark.parametrize(
    ("fields", "code", "where"),
    [
        ({"token_ids": np.zeros((2, 2), int)}, 44, "forced.token_ids"),
        ({"token_ids": np.zeros((2, 3))}, 44, "forced.token_ids"),
        ({"num_sampled": np.array([0, 1, 1])}, 44, "forced.num_sampled"),
        ({"num_sampled": np.array([0.0, 1.0])}, 44, "forced.num_sampled"),
        ({"draft_token_ids": np.zeros((2, 3), int)}, 44, "forced.draft_token_ids"),
        ({"logits": np.zeros((2, 5))}, 44, "forced.logits"),
        ({"num_sampled": np.array([1, 1])}, 45, "forced.num_sampled"),  # b's prompt is not finished
        ({"num_sampled": np.array([0, 0])}, 45, "forced.num_sampled"),
        ({"num_sampled": np.array([0, 2])}, 45, "forced.num_sampled"),  # a had no draft
        ({"token_ids": np.array([[0, 0, 0], [64, 0, 0]])}, 25, "forced.token_ids"),
        ({"token_ids": np.array([[0, 0, 0], [-1, 0, 0]])}, 25, "forced.token_ids"),
        ({"draft_token_ids": np.array([[0, 0], [64, 0]])}, 25, "forced.draft_token_ids"),
    ],
)
def test_outcomes_that_the_step_cannot_have(fields, code, where):
    """Refused with the step still waiting, so that the right outcome can follow."""
    runner = waiting()
    before = runner.state_digest()
    good = ForcedStep(np.zeros((2, 3), np.int64), np.array([0, 1], np.int32))
    with pytest.raises(PlanError) as caught:
        runner.sample_tokens(forced=dataclasses.replace(good, **fields))
    assert (caught.value.code, caught.value.field) == (f"MR-ERR-0{code}", where)
    with pytest.raises(PlanError):
        runner.sample_tokens(forced={"token_ids": []})
    assert runner.state_digest() == before
    assert runner.sample_tokens(forced=good).get_output().tokens() == {"a": (0,), "b": ()}


def test_entries_past_num_sampled_are_ignored():
    """Garbage there reaches neither the state nor the log probabilities."""
    results = []
    for garbage in (0, 10**6, -5):
        runner = small(num_speculative_tokens=2)
        ask = SamplingParams(temperature=0.0, logprobs=2)
        added = [new("a", [1, 2], ([1], [1]), sampling_params=ask), new("b", [3, 4], ([2], [2]), sampling_params=ask)]
        runner.execute_model(make_plan({"a": 2, "b": 1}, added))
        assert runner.last_step().req_ids == ("b", "a")
        forced = ForcedStep(np.array([[garbage] * 3, [7, garbage, garbage]]), np.array([0, 1], np.int32))
        output = runner.sample_tokens(forced=forced).get_output()
        results.append((output.tokens(), output.logprobs.ranks.tolist(), runner.state_digest()))
    assert results[0] == results[1] == results[2]


def test_forced_tokens_enter_the_state_and_the_record_keeps_the_own_draw():
    runner = waiting(k=0)
    own = witness_token([1, 2])
    imposed = (own + 1) % 64
    output = runner.sample_tokens(forced=force(runner, {"a": [imposed]})).get_output()
    record = runner.last_step()
    assert output.tokens()["a"] == (imposed,)
    assert record.token_ids[1, 0] == own
    assert record.forced_token_ids[1, 0] == imposed
    assert record.tokens() == {"a": (imposed,), "b": ()}
    runner.execute_model(make_plan({"a": 1}, (), {"a": (2, None)}))
    assert runner.last_step().input_ids.tolist() == [imposed]
    assert runner.sample_tokens().get_output().tokens() == {"a": (witness_token([1, 2, imposed]),)}


def test_forced_logits_replace_the_models():
    runner = waiting(k=0)
    logits = np.zeros((2, 64), np.float32)
    logits[:, 33] = 1
    forced = dataclasses.replace(force(runner, {"a": [5]}), logits=logits)
    runner.sample_tokens(forced=forced)
    assert runner.last_step().token_ids[:, 0].tolist() == [33, 33]


def test_drafts_need_an_outcome():
    runner = small(num_speculative_tokens=2)
    runner.execute_model(make_plan({"a": 2}, [new("a", [1, 2], ([1, 2], [1, 2]))]))
    runner.sample_tokens(forced=force(runner, {"a": [5]}, {"a": [6, 7]}))
    runner.execute_model(make_plan({"a": 3}, (), {"a": (2, None)}, {"a": [-1, -1]}))
    with pytest.raises(CapabilityError, match="drafts"):
        runner.sample_tokens()
    runner.sample_tokens(forced=force(runner, {"a": [6, 9]}))
    record = runner.last_step()
    assert record.num_sampled.tolist() == [2]
    assert record.num_rejected.tolist() == [1]
    # its own choice after each of the three rows: what a verifier would compare the drafts with
    assert record.token_ids.tolist() == [[witness_token([1, 2, 5]), witness_token([1, 2, 5, 6]),
                                          witness_token([1, 2, 5, 6, 7])]]  # fmt: skip


def test_a_row_does_not_inherit_drafts():
    """Drafts are held by the row until they are replaced, and cleared for its next owner."""
    runner = small(num_speculative_tokens=2)
    runner.execute_model(make_plan({"a": 2}, [new("a", [1, 2], ([1, 2], [1, 2]))]))
    runner.sample_tokens(forced=force(runner, {"a": [5]}, {"a": [6, 7]}))
    row = runner.req_states.req_id_to_row["a"]
    assert runner.req_states.draft_tokens[row].tolist() == [6, 7]
    runner.execute_model(make_plan({"a": 1}, (), {"a": (2, None)}))
    runner.sample_tokens()
    assert runner.req_states.draft_tokens[row].tolist() == [6, 7]
    plan = make_plan({"b": 2}, [new("b", [1, 2], ([1, 2], [1, 2]))], finished_req_ids=frozenset("a"))
    runner.execute_model(plan)
    assert runner.req_states.req_id_to_row == {"b": row}
    assert runner.req_states.draft_tokens[row].tolist() == [0, 0]


# -- what tokens do not depend on -------------------------------------------------------------------------------------


def history(driver, req_id):
    return driver.tokens[req_id]


def test_tokens_are_the_models():
    """Against the definition, from the tokens alone: both groups, the window, block boundaries."""
    driver = Driver(small())
    driver.add("a", [5, 6, 7])
    driver.add("b", [9] * 10)
    driver.step({"b": 10, "a": 3})
    driver.decode("ab", 12)
    for req_id, prompt in (("a", 3), ("b", 10)):
        tokens = history(driver, req_id)
        assert tokens[prompt:] == [witness_token(tokens[:n]) for n in range(prompt, len(tokens))]


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(1, 6), max_size=5), sampled=st.booleans())
def test_chunks_of_a_prompt_do_not_matter(cuts, sampled):
    rest = {"sampling_params": SAMPLED, "seed": 5} if sampled else {}
    runs = []
    for counts in ([14], cuts):
        driver, done = Driver(small()), 0
        driver.add("a", range(20, 34), **rest)
        for n in counts:
            n = min(n, 14 - done)
            if n:
                driver.step({"a": n})
            done += n
        if done < 14:
            driver.step({"a": 14 - done})
        driver.decode("a", 5)
        runs.append(driver.tokens["a"])
    assert runs[0] == runs[1]


@settings(max_examples=20)
@given(
    mode=st.sampled_from(list(CUDAGraphMode)), more_tokens=st.integers(0, 9), more_reqs=st.integers(0, 2),
    poison=st.booleans(),
)  # fmt: skip
def test_padding_does_not_matter(mode, more_tokens, more_reqs, poison):
    plain, padded = Driver(small()), Driver(small())
    for driver in (plain, padded):
        driver.add("a", range(7))
        driver.add("b", range(30, 41), sampling_params=SAMPLED, seed=3)
    for counts in ({"a": 7, "b": 6}, {"a": 1, "b": 5}, {"b": 1, "a": 1}, {"a": 1}):
        reqs = len(counts) + more_reqs if mode is CUDAGraphMode.FULL else None
        padding = 0 if mode is CUDAGraphMode.NONE else more_tokens
        descriptor = BatchDescriptor(mode, sum(counts.values()) + padding, reqs)
        if poison:
            padded.runner.poison_unused()
        assert plain.step(counts) == padded.step(counts, descriptor)
        record = padded.runner.last_step()
        assert record.descriptor == descriptor
        assert (record.slot_mappings[:, sum(counts.values()) :] == -1).all()
        assert (record.seq_lens[len(counts) :] == 0).all()
        assert len(record.seq_lens) == (reqs or len(counts))
        for group in record.block_tables:
            assert all(not row.any() for row in group[len(counts) :])
    assert plain.runner.state_digest() == padded.runner.state_digest()


@pytest.mark.parametrize("sampled", [False, True])
def test_a_resumed_request_goes_on_as_if_never_preempted(sampled):
    rest = {"sampling_params": SAMPLED, "seed": 11} if sampled else {}
    steady, resumed = Driver(small()), Driver(small())
    for driver in (steady, resumed):
        driver.add("a", range(40, 46), **rest)
        driver.add("b", range(6), **rest)
        driver.step({"a": 6, "b": 6})
        driver.decode("ab", 3)
    resumed.remove("a", preempt=True)
    resumed.step({"b": 1})
    resumed.readd("a", **rest)
    resumed.step({"a": 4, "b": 1})  # its outputs come back as known tokens, in two chunks
    resumed.step({"a": 6, "b": 1})
    steady.decode("ab", 6)
    resumed.decode("ab", 3)
    a, b = steady.tokens, resumed.tokens
    assert b["b"] == a["b"]
    assert b["a"] == a["a"][: len(b["a"])]
    assert len(b["a"]) == 6 + 4 + 1 + 3
    row = resumed.runner.req_states.req_id_to_row["a"]
    assert resumed.runner.req_states.prompt_len[row] == 6
    assert resumed.runner.req_states.prefill_len[row] == 10


def test_a_request_preempted_and_added_again_by_one_plan():
    steady, resumed = Driver(small()), Driver(small())
    for driver in (steady, resumed):
        driver.add("a", range(40, 46))
        driver.step({"a": 6})
        driver.decode("a", 2)
    resumed.remove("a", preempt=True)
    resumed.readd("a")
    resumed.step({"a": 8 + 1})
    steady.decode("a", 1)
    assert resumed.tokens == steady.tokens
    assert resumed.runner.req_states.req_id_to_row == steady.runner.req_states.req_id_to_row


def test_neither_row_nor_its_former_owner_matters():
    """Poison in everything unused before every step; rows and blocks change hands."""
    clean, dirty = Driver(small()), Driver(small(initial_free_rows=(2, 0, 3, 1)))
    for value, driver in ((None, clean), (-77, dirty)):
        driver.add("x", [60] * 20, sampling_params=SAMPLED, seed=1)
        driver.step({"x": 20})
        if value is not None:
            driver.decode("x", 3)
        driver.remove("x")
        for req_id, start in (("a", 0), ("b", 20), ("c", 40)):
            driver.add(req_id, range(start, start + 5), sampling_params=SAMPLED, seed=start)
        for counts in ({"a": 5, "b": 2}, {"c": 5, "b": 3}, dict.fromkeys("abc", 1), {"b": 1}, dict.fromkeys("cba", 1)):
            if value is not None:
                driver.runner.poison_unused(value)
            driver.step(counts)
    assert {r: clean.tokens[r] for r in "abc"} == {r: dirty.tokens[r] for r in "abc"}


def test_the_order_of_the_plan_does_not_matter():
    runs = []
    for order in ("abc", "cba"):
        driver = Driver(small())
        for req_id in "abc":
            driver.add(req_id, [ord(req_id) % 60] * 4, sampling_params=SAMPLED, seed=ord(req_id))
        driver.step(dict.fromkeys("abc", 4))
        driver.decode(order, 4)
        runs.append(driver.tokens)
    assert runs[0] == runs[1]


def test_cached_prefixes_are_read_from_their_blocks():
    """b shares a's full blocks and computes the rest alone; its tokens are those of a request that computed it all."""
    runner = small()
    prompt = list(range(12))
    runner.execute_model(make_plan({"a": 12}, [new("a", prompt, ([1, 2, 3], [1, 2, 3, 4]))]))
    runner.sample_tokens()
    runner.poison_unused()
    tail = new("b", [*prompt[:11], 50, 51], ([1, 2, 9, 10], [1, 2, 9, 10, 11]), computed=8)
    # group 1 has blocks of 3: positions 6 and 7 lie in its third block, which b must own to write 8 and later
    runner.kv_caches["witness.1"][0][9, :2], runner.kv_caches["witness.1"][1][9, :2] = (
        runner.kv_caches["witness.1"][0][3, :2], runner.kv_caches["witness.1"][1][3, :2]
    )  # fmt: skip
    runner.execute_model(make_plan({"b": 5}, [tail]))
    assert runner.sample_tokens().get_output().tokens() == {"b": (witness_token([*prompt[:11], 50, 51]),)}


# -- blocks that are zeroed or copied ----------------------------------------------------------------------------


def test_blocks_are_zeroed_then_copied_before_the_step_reads_them():
    """Copy on write: b continues a's half-filled block in a copy of its own."""
    runner = small()
    prompt = [1, 2, 3, 4, 5, 6]
    runner.execute_model(make_plan({"a": 6}, [new("a", prompt, ([1, 2], [1, 2]))]))
    runner.sample_tokens()
    runner.poison_unused()
    plan = make_plan(
        {"b": 2}, [new("b", [*prompt, 7, 8], ([1, 9], [1, 2, 10]), computed=6)], new_block_ids_to_zero=[9, 10, 11],
        kv_cache_block_copies=[(2, 9)],
    )  # fmt: skip
    runner.execute_model(plan)
    tokens, positions = (cache.reshape(60, -1) for cache in runner.kv_caches["witness.0"])
    assert tokens[9].tolist() == [5, 6, 7, 8]
    assert tokens[2].tolist() == [5, 6, -77, -77]
    assert tokens[11].tolist() == [0] * 4
    assert positions[11].tolist() == [0] * 4
    assert runner.sample_tokens().get_output().tokens() == {"b": (witness_token([*prompt, 7, 8]),)}


@pytest.mark.parametrize("ids", [[5, 6], (5, 6), [np.int32(5), np.int64(6)]])
def test_zeroing_takes_any_list_of_ids(ids):
    runner = small()
    runner.poison_unused()
    runner.execute_model(make_plan({}, new_block_ids_to_zero=ids))
    for layer in runner.kv_caches.values():
        for cache in layer:
            flat = cache.reshape(60, -1)
            assert not flat[[5, 6]].any()
            assert (flat[[1, 4, 7]] == -77).all()


# -- records, digests, metadata ----------------------------------------------------------------------------------


def test_kv_by_logical_position():
    """The record tells each request's pairs in order, whatever its blocks; behind a window they read 0."""
    runner = small(record=frozenset({"kv"}))
    runner.execute_model(make_plan({"a": 7}, [new("a", range(30, 37), ([8, 3], [9, 2, 5]))]))
    assert runner.last_step().kv == {}
    runner.sample_tokens()
    kv = runner.last_step().kv["a"]
    assert kv.dtype == np.int64
    pairs = [[30 + p, p] for p in range(7)]
    assert kv[0].tolist() == pairs
    assert kv[1].tolist() == [[0, 0]] * 3 + pairs[3:]  # 7 computed, reach 4


def test_requested_parts_only():
    bare, rich = small(), small(record=frozenset({"logits", "intermediates", "kv"}))
    for runner in (bare, rich):
        runner.execute_model(make_plan({"a": 2}, [new("a", [1, 2], ([1], [1]))]))
        runner.sample_tokens()
    assert bare.last_step().logits is None
    assert bare.last_step().kv == {}
    assert bare.last_step().intermediates == {}
    assert rich.last_step().logits.shape == (1, 64)
    assert rich.last_step().intermediates.keys() == {"hidden", "scores"}
    assert rich.last_step().intermediates["hidden"].shape == (2,)
    assert rich.last_step().logits.argmax() == rich.last_step().token_ids[0, 0]


def test_the_digest_sees_every_part():
    def changed(change):
        runner = small(num_speculative_tokens=1)
        runner.execute_model(make_plan({"a": 5}, [new("a", range(5), ([1, 2], [1, 2]))]))
        runner.sample_tokens()
        before, row = runner.state_digest(), runner.req_states.req_id_to_row["a"]
        change(runner, row)
        after = runner.state_digest()
        return {name for name in before if before[name] != after[name]}

    def assign(array, index, value):
        array[index] = value

    assert changed(lambda r, row: None) == set()
    assert changed(lambda r, row: assign(r.req_states.num_computed_tokens, row, 4)) == {"request a", "kv a"}
    assert changed(lambda r, row: assign(r.req_states.all_token_ids, (row, 2), 9)) == {"request a"}
    assert changed(lambda r, row: assign(r.req_states.draft_tokens, (row, 0), 9)) == {"request a"}
    assert changed(lambda r, row: assign(r.block_tables.num_blocks, (0, row), 3)) == {"blocks a"}
    assert changed(lambda r, row: assign(r.sampler.seeds, row, 9)) == {"sampling a"}
    assert changed(lambda r, row: assign(r.kv_caches["witness.0"][0], (1, 0), 9)) == {"kv a"}
    assert changed(lambda r, row: r.req_states.free_rows.reverse()) == {"free_rows"}
    # what is not defined does not count
    assert changed(lambda r, row: r.poison_unused()) == set()
    assert changed(lambda r, row: assign(r.req_states.all_token_ids, (row, 20), 9)) == set()


def test_metadata_is_built_once_per_group_and_shared():
    """Two layers of one spec share a group and its metadata object; two steps, two builds per group."""

    class TwoLayers:
        vocab_size = 8

        def __init__(self):
            self.seen = []

        def kv_cache_specs(self):
            spec, other = KVCacheSpec(4, 1, 1, "float32"), KVCacheSpec(2, 1, 1, "float32")
            return {"first": spec, "second": spec, "third": other}

        def forward(self, input_ids, positions, kv_caches, attn_metadata, intermediates=None):
            self.seen.append(attn_metadata)
            return np.zeros((len(input_ids), 1), np.float32)

        def compute_logits(self, hidden_states):
            return np.zeros((len(hidden_states), 8), np.float32)

    model = TwoLayers()
    runner = make_runner(model, 16, max_num_reqs=2, max_num_batched_tokens=8, max_model_len=8)
    assert [g.layer_names for g in runner.kv_cache_config.groups] == [("first", "second"), ("third",)]
    runner.execute_model(make_plan({"a": 3}, [new("a", [1, 2, 3], ([1], [2, 3]))]))
    runner.sample_tokens()
    assert runner.attn_metadata_builder.num_builds == 2
    runner.execute_model(make_plan({"a": 1}, (), {"a": (3, None)}))
    runner.sample_tokens()
    assert runner.attn_metadata_builder.num_builds == 4
    first, second = model.seen
    assert first["first"] is first["second"]
    assert first["first"] is not first["third"]
    assert first["first"] is not second["first"]
    assert second["third"].slot_mapping.tolist() == [3 * 2 + 1]
    assert second["first"].slot_mapping.tolist() == [1 * 4 + 3]


def test_buffers_stay_where_they_are():
    """Graphs read fixed addresses: no step may replace a buffer."""
    driver = Driver(small())
    runner = driver.runner
    buffers = {name: value for name, value in vars(runner).items() if isinstance(value, np.ndarray)} | {
        f"table {g}": t for g, t in enumerate(runner.block_tables.input_block_tables)
    }
    addresses = {name: b.ctypes.data for name, b in buffers.items()}
    assert len(addresses) > 10
    driver.add("a", range(5))
    driver.step({"a": 5})
    driver.decode("a", 2, descriptor=full(4, 4))
    now = {name: value.ctypes.data for name, value in vars(runner).items() if isinstance(value, np.ndarray)}
    assert now == {name: addresses[name] for name in now}
    for g, table in enumerate(runner.block_tables.input_block_tables):
        assert table.ctypes.data == addresses[f"table {g}"]


def test_declared_capabilities_do_not_promise_more():
    assert Capability.SPECULATIVE not in CAPABILITIES
    assert Capability.DRAFT_LAYOUT in CAPABILITIES
    assert Capability.CUDA_GRAPHS not in CAPABILITIES
    with pytest.raises(UnknownNameError):
        small(record=frozenset({"everything"}))


def test_one_group_per_distinct_spec():
    config = group_kv_cache_specs(TWO_GROUPS.kv_cache_specs(), 10)
    assert [g.layer_names for g in config.groups] == [("witness.0",), ("witness.1",)]
    assert [t.size for t in config.tensors] == [10 * 2 * 4 * 8, 10 * 2 * 3 * 8]
