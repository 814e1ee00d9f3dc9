"""Plans for packed rows: what a preempted request must bring to come back, and what is refused without a trace."""

import copy
import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from step_driver import make_plan, new
from test_bad_plans import ARGUMENTS, OPERATIONS, get, paths, rebuild

from cpu_reference.dense.runner import DenseCpuModelRunner
from runner_api import (
    CapabilityError,
    PlanError,
    PlanValidator,
    RunnerConfig,
    RunnerError,
    SchedulerOutput,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
)

MODEL = WitnessConfig(vocab_size=64, groups=(WitnessGroup(4), WitnessGroup(8, sliding_window=8)))
NUM_BLOCKS = 40


def dense_runner(**config):
    config = {"max_num_reqs": 5, "max_num_batched_tokens": 24, "max_model_len": 40} | config
    runner = DenseCpuModelRunner(RunnerConfig(layout="dense", **config))
    runner.load_model(MODEL)
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), NUM_BLOCKS))
    return runner


def run(runner, plan):
    if runner.execute_model(plan) is not None:
        return {}, runner.state_digest()
    return runner.sample_tokens().get_output().tokens(), runner.state_digest()


FIRST = make_plan(
    {"A": 5, "B": 5, "P": 4, "W": 2, "Z": 2},
    [
        new("A", range(1, 7), ([1, 2], [21])),
        new("B", range(11, 21), ([3, 4], [22])),
        new("P", range(31, 35), ([5], [23])),
        new("W", [41, 42], ([7], [24])),
        new("Z", [9, 9], ([8], [25])),
    ],
)
SECOND = make_plan(
    {"A": 1, "B": 1, "Z": 1}, (), {"A": (5, None), "B": (5, None), "Z": (2, None)},
    preempted_req_ids=frozenset({"P", "never seen"}),
)  # fmt: skip


def mid_run():
    """A decodes (6 computed, 7 known), B stands in the middle of its prompt (6 of 10), P was preempted (5 known), W
    waits without a row (2 computed, 3 known), Z is about to leave."""
    runner = dense_runner()
    run(runner, FIRST)
    run(runner, SECOND)
    return runner


DRAWN = run(dense_runner(), FIRST)[0]["P"][0]  # by P, before it was preempted
P_TOKENS = [31, 32, 33, 34, DRAWN]


def good_plan() -> SchedulerOutput:
    """A decodes, B finishes its prompt with a new block, P comes back, W goes on, Z leaves, C comes."""
    plan = make_plan(
        {"A": 1, "B": 4, "P": 5, "W": 1, "C": 5},
        [new("C", range(50, 55), ([11, 12], [27]), seed=3)],
        {"A": (6, None), "B": (6, ([13], [28])), "P": (0, ([5, 10], [26])), "W": (2, None)},
        finished_req_ids=frozenset({"Z", "never seen"}),
        new_block_ids_to_zero=[11],
    )
    plan.scheduled_cached_reqs.resumed_req_ids = frozenset({"P"})
    plan.scheduled_cached_reqs.all_token_ids = {"P": list(P_TOKENS)}
    return plan


@pytest.fixture(scope="module")
def undisturbed():
    return run(mid_run(), good_plan())


def change(**fields):
    return lambda: dataclasses.replace(good_plan(), **fields)


def change_cached(**fields):
    return lambda: change(scheduled_cached_reqs=dataclasses.replace(good_plan().scheduled_cached_reqs, **fields))()


def resumed(tokens=P_TOKENS, blocks=([5, 10], [26]), computed=0, count=5, **fields):
    """The good plan with P coming back otherwise."""

    def build():
        plan = change_cached(
            num_computed_tokens=[6, 6, computed, 2], new_block_ids=[None, ([13], [28]), blocks, None],
            all_token_ids={"P": tokens},
        )()  # fmt: skip
        counts = {"A": 1, "B": 4, "P": count, "W": 1, "C": 5}
        return dataclasses.replace(
            plan, num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()), **fields
        )

    return build


def without_c(counts, cached, added=(), **rest):
    return lambda: make_plan(counts, added, cached, **rest)


CACHED, NEW, COUNTS, TOKENS = (
    "scheduled_cached_reqs", "scheduled_new_reqs", "num_scheduled_tokens", "all_token_ids",
)  # fmt: skip
BLOCKS_0, BLOCKS_1, COMPUTED = "block_ids (group 0)", "block_ids (group 1)", "scheduled_cached_reqs.num_computed_tokens"

# name: (plan, code, field, request)
CLAUSES = {
    # 020 of the wrong kind
    "tokens as a string": (resumed("abcde"), 20, f"{CACHED}.{TOKENS}", "P"),
    "tokens as floats": (resumed([31.0] * 5), 20, f"{CACHED}.{TOKENS}", "P"),
    "tokens as a set": (resumed(set(P_TOKENS)), 20, f"{CACHED}.{TOKENS}", "P"),
    "no tokens but None": (resumed(None), 20, f"{CACHED}.{TOKENS}", "P"),
    "all tokens as a list": (change_cached(all_token_ids=["P"]), 20, f"{CACHED}.{TOKENS}", None),
    "resumed as a list": (change_cached(resumed_req_ids=["P"]), 20, f"{CACHED}.resumed_req_ids", None),
    # 021 .. the lists contradict each other
    "resumed without tokens to compute": (
        change(num_scheduled_tokens={"A": 1, "B": 4, "W": 1, "C": 5}, total_num_scheduled_tokens=11), 21, CACHED, "P"
    ),
    "a preempted request as new": (
        without_c({"P": 5}, {}, [new("P", P_TOKENS, ([5, 10], [26]), prompt=range(31, 35))]), 22, NEW, "P"
    ),
    "a preempted request as new, preempted again": (
        without_c({"P": 5}, {}, [new("P", P_TOKENS, ([5, 10], [26]))], preempted_req_ids=frozenset({"P"})), 22, NEW, "P"
    ),
    "a waiting request as new": (without_c({"W": 2}, {}, [new("W", [41, 42], ([11], [27]))]), 22, NEW, "W"),
    "more scheduled than rows": (
        lambda: make_plan(
            dict.fromkeys("ABWCDE", 1), [new(r, [1], ([11 + i], [29 + i])) for i, r in enumerate("CDE")],
            {"A": (6, None), "B": (6, None), "W": (2, None)},
        ), 23, COUNTS, None
    ),
    # 024 .. what a resumed request knows
    "fewer tokens than prompt": (resumed(P_TOKENS[:3], count=3), 24, TOKENS, "P"),
    "no token": (resumed([]), 24, TOKENS, "P"),
    "more tokens than it can have drawn": (resumed([*P_TOKENS, 1], count=6), 24, TOKENS, "P"),
    "tokens of another prompt": (resumed([31, 32, 33, 35, DRAWN]), 24, TOKENS, "P"),
    "token past the vocabulary": (resumed([*P_TOKENS[:4], 64]), 25, TOKENS, "P"),
    "negative token": (resumed([*P_TOKENS[:4], -1]), 25, TOKENS, "P"),
    "everything computed": (resumed(computed=5, count=1), 26, COMPUTED, "P"),
    "computed below zero": (resumed(computed=-1), 26, COMPUTED, "P"),
    "one group too few": (resumed(blocks=([5, 10],)), 28, f"{CACHED}.block_ids", "P"),
    # 029 .. who
    "resumed twice": (
        change_cached(
            req_ids=["A", "B", "P", "W", "P"], num_computed_tokens=[6, 6, 0, 2, 0],
            new_block_ids=[None, ([13], [28]), ([5, 10], [26]), None, ([5, 10], [26])],
        ), 29, CACHED, "P"
    ),
    "resumed and finished": (change(finished_req_ids=frozenset({"P"})), 29, COUNTS, "P"),
    "waiting and finished": (change(finished_req_ids=frozenset({"W"})), 29, COUNTS, "W"),
    "drafts": (
        change(scheduled_spec_decode_tokens={"A": [1]}, num_scheduled_tokens={"A": 2, "B": 4, "P": 5, "W": 1, "C": 5},
               total_num_scheduled_tokens=17), 33, "scheduled_spec_decode_tokens", "A"
    ),
    # 035 .. how it comes back
    "resumed but not listed": (
        change_cached(resumed_req_ids=frozenset({"P", "X"})), 35, "resumed_req_ids", "X"
    ),
    "resumed without its tokens": (change_cached(all_token_ids={}), 35, TOKENS, "P"),
    "tokens of a request that goes on": (change_cached(all_token_ids={"P": P_TOKENS, "A": [1]}), 35, TOKENS, "A"),
    "a preempted request goes on": (
        change_cached(resumed_req_ids=frozenset(), all_token_ids={}), 35, CACHED, "P"
    ),
    "preempted by this plan, and goes on": (change(preempted_req_ids=frozenset({"A"})), 35, CACHED, "A"),
    "waiting, preempted by this plan, and goes on": (change(preempted_req_ids=frozenset({"W"})), 35, CACHED, "W"),
    "waiting request rewound": (change_cached(num_computed_tokens=[6, 6, 0, 1]), 36, COMPUTED, "W"),
    "waiting request runs ahead": (change_cached(num_computed_tokens=[6, 6, 0, 3]), 36, COMPUTED, "W"),
    "computed rewound without a preemption": (change_cached(num_computed_tokens=[0, 6, 0, 2]), 36, COMPUTED, "A"),
    # 037 .. lengths and blocks of a resumed request
    "more tokens than are known": (resumed(count=6), 37, COUNTS, "P"),
    "no block at all": (resumed(blocks=None), 39, BLOCKS_0, "P"),
    "its old blocks only": (resumed(blocks=([10], [26])), 39, BLOCKS_0, "P"),
    "no block in the second group": (resumed(blocks=([5, 10], [])), 39, BLOCKS_1, "P"),
    "more blocks than columns": (resumed(blocks=([5, 10, *[14] * 31], [26])), 40, BLOCKS_0, "P"),
    "block past the cache": (resumed(blocks=([5, 40], [26])), 41, BLOCKS_0, "P"),
    "null block": (resumed(blocks=([0, 10], [26])), 41, BLOCKS_0, "P"),
    "one block, two writers": (resumed(blocks=([11, 10], [26])), 42, BLOCKS_0, "P"),
    "write into what another one has computed": (resumed(blocks=([1, 10], [26])), 47, BLOCKS_0, "P"),
    "write into a window": (resumed(blocks=([5, 10], [21])), 47, BLOCKS_1, "P"),
    "write into what a waiting request goes on from": (resumed(blocks=([5, 7], [26])), 47, BLOCKS_0, "P"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLAUSES)
def test_refused_without_a_trace(name, undisturbed):
    build, number, field, req_id = CLAUSES[name]
    runner = mid_run()
    before, picture = runner.state_digest(), copy.deepcopy(runner.validator.requests)
    with pytest.raises(PlanError) as caught:
        runner.execute_model(build())
    e = caught.value
    assert (e.code, e.field, e.req_id) == (f"MR-ERR-0{number}", field, req_id), str(e)
    assert runner.state_digest() == before
    assert runner.validator.requests == picture
    assert run(runner, good_plan()) == undisturbed


def test_the_text_of_a_refusal():
    with pytest.raises(PlanError) as caught:
        mid_run().execute_model(change_cached(resumed_req_ids=frozenset(), all_token_ids={})())
    assert str(caught.value) == (
        "MR-ERR-035 scheduled_cached_reqs['P']: a preempted request cannot go on where it was (got 'not resumed', "
        "expected its id in resumed_req_ids, its tokens in all_token_ids, all its blocks)"
    )


# -- what is legal although it looks odd ------------------------------------------------------------------------


def test_who_leaves_and_comes_back_need_not_be_said():
    """Left out, its blocks written for another one: it was preempted, and must come back as such."""
    runner = mid_run()
    live = runner.validator.requests
    assert not live["W"].preempted
    taken = make_plan({"C": 3}, [new("C", [1, 2, 3], ([7], [24]))])
    run(runner, taken)
    assert live["W"].preempted
    assert (live["W"].prefill_len, live["W"].computed_upper, live["W"].block_ids) == (3, 0, ([], []))
    with pytest.raises(PlanError, match="MR-ERR-035"):
        runner.execute_model(make_plan({"W": 1}, (), {"W": (2, None)}))
    plan = make_plan({"W": 3, "C": 1}, (), {"W": (0, ([14], [30])), "C": (3, None)})
    plan.scheduled_cached_reqs.resumed_req_ids = frozenset({"W"})
    tokens = runner.requests["W"].token_ids
    assert len(tokens) == 3
    plan.scheduled_cached_reqs.all_token_ids = {"W": tokens}
    assert len(run(runner, plan)[0]["W"]) == 1
    assert not live["W"].preempted


def test_blocks_that_are_shared_or_not_computed_take_nobody_out():
    """A waiting request goes on where others only read its blocks, or write behind what it has computed there."""
    runner = mid_run()
    shared = new("C", [1, 2, 3, 4, 5], ([1, 11], [27]), computed=4)  # reads A's first block
    run(runner, make_plan({"C": 1, "W": 1}, [shared], {"W": (2, None)}, kv_cache_block_copies=[(21, 27)]))
    assert not any(live.preempted for name, live in runner.validator.requests.items() if name != "P")
    run(runner, make_plan({"A": 1}, (), {"A": (6, None)}))


def test_any_request_may_be_resumed():
    """Preempted and resumed within one plan, said or not: A starts again from its tokens, with other blocks."""
    for said in (False, True):
        runner = mid_run()
        row = runner.req_states.req_id_to_row["A"]
        tokens = runner.req_states.all_token_ids[row, :7].tolist()
        plan = make_plan({"A": 7}, (), {"A": (0, ([14, 15], [30]))})
        plan.scheduled_cached_reqs.resumed_req_ids = frozenset({"A"})
        plan.scheduled_cached_reqs.all_token_ids = {"A": tokens}
        if said:
            plan.preempted_req_ids = frozenset({"A"})
        assert len(run(runner, plan)[0]["A"]) == 1
        live = runner.validator.requests["A"]
        assert (live.prefill_len, live.computed_lower, live.computed_upper) == (7, 7, 7)
        assert live.known_len == 8
        # its old blocks are anybody's
        run(runner, make_plan({"D": 5}, [new("D", range(5), ([1, 2], [21]))]))


def test_a_resumed_request_may_know_less_than_it_drew(undisturbed):
    """An engine drops what was drawn by a step that ran while it preempted; with the same seed it is drawn again."""
    runner = mid_run()
    tokens, _ = run(runner, resumed(P_TOKENS[:4], blocks=([5], [26]), count=4)())
    assert tokens["P"] == (DRAWN,)
    assert {**tokens, "P": ()} == {**undisturbed[0], "P": ()}


def test_tokens_as_arrays_and_numpy_integers(undisturbed):
    for tokens in (np.array(P_TOKENS, np.int32), tuple(P_TOKENS)):
        assert run(mid_run(), resumed(tokens)()) == undisturbed
    assert run(mid_run(), resumed(computed=np.int64(0), count=np.uint8(5))()) == undisturbed


def test_a_prefix_hit_of_a_resumed_request(undisturbed):
    """P finds its first four tokens in its own old blocks, which nobody has written since."""
    tokens, _ = run(mid_run(), resumed(blocks=([5, 10], [23]), computed=4, count=1)())
    assert tokens == undisturbed[0]


def test_waiting_requests_hold_no_row():
    """Five rows serve any number of live requests; only who is scheduled stands in one."""
    runner = dense_runner(max_num_reqs=2)
    for i, name in enumerate("abcdef"):
        run(runner, make_plan({name: 1}, [new(name, [i, 1], ([i + 1], [i + 21]))]))
    assert len(runner.requests) == 6
    tokens, _ = run(runner, make_plan({"b": 1, "e": 1}, (), {"b": (1, None), "e": (1, None)}))
    assert tokens.keys() == {"b", "e"}


@pytest.mark.parametrize("name", ["P", "W"])
def test_who_is_finished_without_a_row_is_forgotten(name):
    """… and its name is free, also in the same plan."""
    runner = mid_run()
    plan = make_plan({name: 3}, [new(name, [1, 2, 3], ([14], [30]))], finished_req_ids=frozenset({name}))
    assert len(run(runner, plan)[0][name]) == 1
    run(runner, make_plan({}, finished_req_ids=frozenset({name, "A", "B", "W", "P", "Z"})))
    assert runner.requests == {}
    assert runner.validator.requests == {}
    assert runner.state_digest() == dense_runner().state_digest()


def test_each_layout_has_its_own_shape():
    """The validator of fixed rows forgets the preempted, that of packed rows does not; neither takes the other plan."""
    kv = group_kv_cache_specs(MODEL.kv_cache_specs(), NUM_BLOCKS)
    config = RunnerConfig(max_num_reqs=4, max_num_batched_tokens=24, max_model_len=40)
    first = make_plan({"a": 2}, [new("a", [1, 2], ([1], [21]))])
    preempting = make_plan({}, preempted_req_ids=frozenset({"a"}))
    as_new = make_plan({"a": 3}, [new("a", [1, 2, 3], ([1], [21]), prompt=[1, 2])])
    as_cached = make_plan({"a": 3}, (), {"a": (0, ([1], [21]))})
    as_cached.scheduled_cached_reqs.resumed_req_ids = frozenset({"a"})
    as_cached.scheduled_cached_reqs.all_token_ids = {"a": [1, 2, 3]}
    for layout, right, wrong, code in (("slots", as_new, as_cached, "029"), ("dense", as_cached, as_new, "022")):
        validator = PlanValidator(config, kv, 64, frozenset(), layout)
        for plan in (first, preempting):
            validator.check(plan)
            validator.commit(plan)
        with pytest.raises(PlanError, match=f"MR-ERR-{code}"):
            validator.check(wrong)
        validator.check(right)
        validator.commit(right)
        assert validator.requests["a"].known_len == 4


# -- mutated plans ----------------------------------------------------------------------------------------------

PATHS = sorted(set(paths(good_plan())), key=repr)
MUTATIONS = st.lists(
    st.tuples(st.sampled_from(PATHS), st.sampled_from(OPERATIONS), st.integers(0, len(ARGUMENTS) - 1)),
    min_size=1, max_size=3,
)  # fmt: skip


@settings(max_examples=120)
@given(mutations=MUTATIONS)
def test_mutated_plans_do_not_crash(mutations, undisturbed):
    """Only RunnerError comes out of a broken plan; after a refusal the state is as before and the run goes on."""
    runner, plan = mid_run(), good_plan()
    for path, operation, argument in mutations:
        try:
            get(plan, path)
        except (AttributeError, KeyError, IndexError, TypeError):
            continue  # an earlier mutation took the place away
        plan = rebuild(plan, path, operation, ARGUMENTS[argument])
    before = runner.state_digest()
    try:
        waiting = runner.execute_model(plan) is None
    except (PlanError, CapabilityError):
        assert runner.state_digest() == before
        assert run(runner, good_plan()) == undisturbed
        return
    if waiting:
        runner.sample_tokens().get_output()
    # … and what was accepted can be followed by a plan
    runner.execute_model(make_plan({}, finished_req_ids=frozenset("ABPWC")))


def test_single_mutations_exhaustively_among_the_cached():
    """Every field of the cached requests, and every token list, with every argument."""
    runner, refusals = mid_run(), 0
    before = runner.state_digest()
    for path in PATHS:
        if path[0] == "scheduled_cached_reqs":
            for argument in ARGUMENTS:
                try:
                    runner.validator.check(rebuild(good_plan(), path, "replace", argument))
                except RunnerError:
                    refusals += 1
    assert refusals > 1000
    assert runner.state_digest() == before
