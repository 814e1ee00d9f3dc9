"""Impossible plans are refused, one clause at a time, and leave no trace; mutated ones never crash the runner."""

import copy
import dataclasses
import timeit

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from step_driver import GREEDY, force, full, make_plan, make_runner, new

from runner_api import (
    BatchDescriptor,
    CachedRequestData,
    Capability,
    CapabilityError,
    CUDAGraphMode,
    NewRequestData,
    PlanError,
    PlanValidator,
    RunnerConfig,
    RunnerError,
    SamplingParams,
    SchedulerOutput,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
)

MODEL = WitnessConfig(vocab_size=64, groups=(WitnessGroup(4), WitnessGroup(8, sliding_window=8)))
NUM_BLOCKS = 40


def mid_run():
    """A decodes (6 computed, 7 known), B stands in the middle of its prompt (6 of 10), one of four rows is free."""
    runner = make_runner(
        MODEL, NUM_BLOCKS, max_num_reqs=4, max_num_batched_tokens=24, max_model_len=40, num_speculative_tokens=2
    )
    added = [
        new("A", range(1, 7), ([1, 2], [21])),
        new("B", range(11, 21), ([3, 4], [22])),
        new("Z", [9, 9], ([5], [23])),
    ]
    runner.execute_model(make_plan({"A": 6, "B": 6, "Z": 2}, added))
    runner.sample_tokens(forced=force(runner, {"A": [40], "Z": [41]}, {"A": [50, 51]}))
    return runner


def good_plan() -> SchedulerOutput:
    """A decodes, B finishes its prompt with a new block, Z leaves, C comes."""
    return make_plan(
        {"A": 1, "B": 4, "C": 5},
        [new("C", range(30, 35), ([6, 7], [24]), seed=3)],
        {"A": (6, None), "B": (6, ([8], [25]))},
        finished_req_ids=frozenset({"Z", "never seen"}),
        new_block_ids_to_zero=[6],
        kv_cache_block_copies=[(1, 30)],
    )


def run(runner, plan, **rest):
    runner.execute_model(plan, **rest)
    return runner.sample_tokens().get_output().tokens(), runner.state_digest()


@pytest.fixture(scope="module")
def undisturbed():
    return run(mid_run(), good_plan())


@pytest.fixture
def runner():
    return mid_run()


def refused(runner, plan, code, field, req_id, undisturbed, error=PlanError, **rest):
    before = runner.state_digest()
    with pytest.raises(error) as caught:
        runner.execute_model(plan, **rest)
    e = caught.value
    assert (e.code, e.field, e.req_id) == (code, field, req_id), str(e)
    assert code in str(e)
    assert runner.state_digest() == before
    assert run(runner, good_plan()) == undisturbed


def change(**fields):
    """A good plan with some of its fields replaced."""
    return lambda: dataclasses.replace(good_plan(), **fields)


def change_new(**fields):
    return lambda: change(scheduled_new_reqs=[dataclasses.replace(good_plan().scheduled_new_reqs[0], **fields)])()


def change_cached(**fields):
    return lambda: change(scheduled_cached_reqs=dataclasses.replace(good_plan().scheduled_cached_reqs, **fields))()


def counts(total=None, drafts=None, **n):
    return change(
        num_scheduled_tokens=n,
        total_num_scheduled_tokens=sum(n.values()) if total is None else total,
        scheduled_spec_decode_tokens=drafts or {},
    )


def no_c(n, cached, **rest):
    """Without the new request."""
    return lambda: make_plan(n, (), cached, **rest)


CACHED, NEW, COUNTS = "scheduled_cached_reqs", "scheduled_new_reqs", "num_scheduled_tokens"
DRAFTS, BLOCKS_0, BLOCKS_1 = "scheduled_spec_decode_tokens", "block_ids (group 0)", "block_ids (group 1)"
ZERO_OR_COPY = "new_block_ids_to_zero / kv_cache_block_copies"

# name: (plan, code, field, request)
CLAUSES = {
    # 020 of the wrong kind
    "not a plan": (lambda: {"num_scheduled_tokens": {}}, 20, "plan", None),
    "finished is a list": (change(finished_req_ids=["Z"]), 20, "finished_req_ids", None),
    "finished is a string": (change(finished_req_ids="Z"), 20, "finished_req_ids", None),
    "preempted holds a number": (change(preempted_req_ids=frozenset({1})), 20, "preempted_req_ids", None),
    "preempted is None": (change(preempted_req_ids=None), 20, "preempted_req_ids", None),
    "new requests as dict": (change(scheduled_new_reqs={}), 20, NEW, None),
    "new request as dict": (change(scheduled_new_reqs=[{}]), 20, NEW, None),
    "id is a number": (change_new(req_id=5), 20, f"{NEW}.req_id", None),
    "prompt is a string": (change_new(prompt_token_ids="abcde"), 20, f"{NEW}.prompt_token_ids", "C"),
    "token is a float": (change_new(prefill_token_ids=[1.0] * 5), 20, f"{NEW}.prefill_token_ids", "C"),
    "token is a bool": (change_new(prefill_token_ids=[True] * 5), 20, f"{NEW}.prefill_token_ids", "C"),
    "tokens as floats": (change_new(prefill_token_ids=np.ones(5)), 20, f"{NEW}.prefill_token_ids", "C"),
    "tokens in two axes": (change_new(prefill_token_ids=np.ones((5, 1), int)), 20, f"{NEW}.prefill_token_ids", "C"),
    "computed is a bool": (change_new(num_computed_tokens=True), 20, f"{NEW}.num_computed_tokens", "C"),
    "seed is a float": (change_new(seed=3.0), 20, f"{NEW}.seed", "C"),
    "blocks as a set": (change_new(block_ids=({6, 7}, [24])), 20, f"{NEW}.block_ids", "C"),
    "blocks without groups": (change_new(block_ids=[6, 7]), 20, f"{NEW}.block_ids", "C"),
    "blocks as a generator": (change_new(block_ids=(iter([6, 7]), [24])), 20, f"{NEW}.block_ids", "C"),
    "params as dict": (change_new(sampling_params={"temperature": 0}), 20, f"{NEW}.sampling_params", "C"),
    "cached as dict": (change(scheduled_cached_reqs={}), 20, CACHED, None),
    "cached ids as a string": (change_cached(req_ids="AB"), 20, f"{CACHED}.req_ids", None),
    "cached computed as floats": (
        change_cached(num_computed_tokens=[6.0, 6.0]), 20, f"{CACHED}.num_computed_tokens", None
    ),
    "cached blocks as strings": (
        change_cached(new_block_ids=[None, ("8", "9")]), 20, f"{CACHED}.new_block_ids", None
    ),
    "output counts as text": (
        change_cached(num_output_tokens=["1", "0"]), 20, f"{CACHED}.num_output_tokens", None
    ),
    "all tokens as a list": (change_cached(all_token_ids=["A"]), 20, f"{CACHED}.all_token_ids", None),
    "resumed as a list": (change_cached(resumed_req_ids=["A"]), 20, f"{CACHED}.resumed_req_ids", None),
    "counts as pairs": (change(num_scheduled_tokens=[("A", 1)]), 20, COUNTS, None),
    "count is a float": (counts(total=10, A=1.0, B=4, C=5), 20, COUNTS, "A"),
    "count is None": (counts(total=9, A=None, B=4, C=5), 20, COUNTS, "A"),
    "total is a float": (counts(total=10.0, A=1, B=4, C=5), 20, "total_num_scheduled_tokens", None),
    "drafts as an array": (
        counts(A=2, B=4, C=5, drafts={"A": np.array([50])}), 20, DRAFTS, "A"
    ),
    "drafts as a string": (counts(A=2, B=4, C=5, drafts={"A": "x"}), 20, DRAFTS, "A"),
    "blocks to zero as None": (change(new_block_ids_to_zero=None), 20, "new_block_ids_to_zero", None),
    "copy of three": (change(kv_cache_block_copies=[(1, 2, 3)]), 20, "kv_cache_block_copies", None),
    "proposals as None": (change(num_spec_tokens_to_schedule=None), 20, "num_spec_tokens_to_schedule", None),
    # 021 .. the lists contradict each other
    "scheduled but not listed": (no_c({"A": 1, "B": 4}, {"A": (6, None)}), 21, COUNTS, "B"),
    "listed but not scheduled": (no_c({"A": 1}, {"A": (6, None), "B": (6, None)}), 21, CACHED, "B"),
    "live request added again": (change_new(req_id="A"), 22, NEW, "A"),
    "new request twice": (change(scheduled_new_reqs=good_plan().scheduled_new_reqs * 2), 22, NEW, "C"),
    "more requests than rows": (
        lambda: make_plan({}, [new(r, [1], ([6], [24])) for r in ("C", "D")]), 23, NEW, None
    ),
    # 024 .. new requests
    "no known token": (change_new(prefill_token_ids=[], prompt_token_ids=[]), 24, "prefill_token_ids", "C"),
    "fewer known tokens than prompt": (change_new(prefill_token_ids=[30, 31]), 24, "prefill_token_ids", "C"),
    "more tokens than max_model_len": (
        change_new(prefill_token_ids=[1] * 41, prompt_token_ids=[1]), 24, "prefill_token_ids", "C"
    ),
    "known tokens of another prompt": (change_new(prompt_token_ids=[30, 32]), 24, "prompt_token_ids", "C"),
    "token past the vocabulary": (
        change_new(prefill_token_ids=[30, 64, 1, 1, 1], prompt_token_ids=[30]), 25, "prefill_token_ids", "C"
    ),
    "negative token": (
        change_new(prefill_token_ids=[30, -1, 1, 1, 1], prompt_token_ids=[30]), 25, "prefill_token_ids", "C"
    ),
    "everything computed": (change_new(num_computed_tokens=5), 26, "num_computed_tokens", "C"),
    "computed below zero": (change_new(num_computed_tokens=-1), 26, "num_computed_tokens", "C"),
    "seed of 65 bits": (change_new(seed=2**63), 27, "seed", "C"),
    "one group too few": (change_new(block_ids=([6, 7],)), 28, f"{NEW}.block_ids", "C"),
    "one group too many": (
        change_cached(new_block_ids=[None, ([8], [25], [])]), 28, f"{CACHED}.block_ids", "B"
    ),
    "more log probabilities than tokens": (
        change_new(sampling_params=SamplingParams(temperature=0.0, logprobs=65)), 46, "sampling_params.logprobs", "C"
    ),
    "more log probabilities of the prompt than tokens": (
        change_new(sampling_params=SamplingParams(temperature=0.0, prompt_logprobs=65)), 46,
        "sampling_params.prompt_logprobs", "C"
    ),
    "eos ids as a set": (change_new(eos_token_ids={3}), 20, f"{NEW}.eos_token_ids", "C"),
    "eos id is a float": (change_new(eos_token_ids=[3.0]), 20, f"{NEW}.eos_token_ids", "C"),
    "eos id past the vocabulary": (change_new(eos_token_ids=[3, 64]), 25, "eos_token_ids", "C"),
    "eos id below zero": (change_new(eos_token_ids=[-1]), 25, "eos_token_ids", "C"),
    **{
        f"{field} past the vocabulary": (
            change_new(sampling_params=SamplingParams(temperature=0.0, **{field: value})), 25,
            f"sampling_params.{field}", "C"
        )
        for field, value in (
            ("allowed_token_ids", [1, 64]), ("logit_bias", {63: 1.0, 64: 1.0}), ("stop_token_ids", [64]),
            ("bad_words_token_ids", [[1], [2, 64, 3]]), ("logprob_token_ids", [0, 64]),
        )
    },
    "three answers": (
        change_new(sampling_params=SamplingParams(n=3)), 48, "sampling_params.n", "C"
    ),
    # 029 .. counts
    "unknown request": (counts(A=1, B=4, C=5, X=1), 29, COUNTS, "X"),
    "finished and scheduled": (change(finished_req_ids=frozenset({"A"})), 29, COUNTS, "A"),
    "cached request unknown": (
        change_cached(
            req_ids=["A", "B", "X"], num_computed_tokens=[6, 6, 0], new_block_ids=[None, ([8], [25]), None]
        ), 29, CACHED, "X"
    ),
    "cached request twice": (
        change_cached(req_ids=["A", "A"], num_computed_tokens=[6, 6], new_block_ids=[None, None]), 29, CACHED, "A"
    ),
    "no token": (counts(A=0, B=4, C=5), 30, COUNTS, "A"),
    "fewer tokens than drafts": (counts(A=2, B=4, C=5, drafts={"A": [50, 51]}), 30, COUNTS, "A"),
    "total too large": (counts(total=11, A=1, B=4, C=5), 31, "total_num_scheduled_tokens", None),
    "more than a step holds": (
        lambda: make_plan(
            {"C": 25}, [new("C", [1] * 30, ([*range(6, 14)], [24, 25, 26, 27]))]
        ), 32, "total_num_scheduled_tokens", None
    ),
    "drafts without tokens": (counts(A=1, B=4, C=5, drafts={"X": [1]}), 33, DRAFTS, "X"),
    "too many drafts": (
        counts(A=4, B=4, C=5, drafts={"A": [1, 2, 3]}), 33, DRAFTS, "A"
    ),
    "too many proposals": (change(num_spec_tokens_to_schedule=3), 33, "num_spec_tokens_to_schedule", None),
    "draft past the vocabulary": (counts(A=2, B=4, C=5, drafts={"A": [64]}), 25, DRAFTS, "A"),
    "draft below the placeholder": (counts(A=2, B=4, C=5, drafts={"A": [-2]}), 25, DRAFTS, "A"),
    # 034 .. cached requests
    "parallel lists": (change_cached(num_computed_tokens=[6]), 34, CACHED, None),
    "output counts of another length": (change_cached(num_output_tokens=[1, 0, 0]), 34, CACHED, None),
    "tokens of the dense layout": (change_cached(all_token_ids={"A": [1]}), 35, "all_token_ids", None),
    "resumed as cached": (change_cached(resumed_req_ids=frozenset({"A"})), 35, "resumed_req_ids", None),
    "computed runs ahead": (
        change_cached(num_computed_tokens=[7, 6]), 36, f"{CACHED}.num_computed_tokens", "A"
    ),
    "computed rewound": (change_cached(num_computed_tokens=[6, 5]), 36, f"{CACHED}.num_computed_tokens", "B"),
    # 037 .. lengths
    "decode of two": (counts(A=2, B=4, C=5), 37, COUNTS, "A"),
    "prefill past its end": (counts(A=1, B=5, C=5), 37, COUNTS, "B"),
    "drafts in mid-prefill": (
        no_c({"B": 3}, {"B": (6, ([8], [25]))}, drafts={"B": [-1, -1]}), 37, COUNTS, "B"
    ),
    # 039 .. blocks
    "no block for the last position": (change_new(block_ids=([6], [24])), 39, BLOCKS_0, "C"),
    "no block in the second group": (change_cached(new_block_ids=[None, ([8], [])]), 39, BLOCKS_1, "B"),
    "more blocks than columns": (change_new(block_ids=([6] * 33, [24])), 40, BLOCKS_0, "C"),
    "block past the cache": (change_new(block_ids=([6, 40], [24])), 41, BLOCKS_0, "C"),
    "null block": (change_new(block_ids=([0, 6], [24])), 41, BLOCKS_0, "C"),
    "null block inside the window": (change_new(block_ids=([6, 7], [0])), 41, BLOCKS_1, "C"),
    "negative block": (change_cached(new_block_ids=[None, ([-1], [25])]), 41, BLOCKS_0, "B"),
    "block of an unscheduled new request": (
        lambda: make_plan({}, [new("C", [1, 2], ([10**12], [24]))]), 41, BLOCKS_0, "C"
    ),
    "zeroing the null block": (change(new_block_ids_to_zero=[0]), 41, ZERO_OR_COPY, None),
    "copy to nowhere": (change(kv_cache_block_copies=[(1, 40)]), 41, ZERO_OR_COPY, None),
    "write into computed tokens": (change_new(block_ids=([1, 7], [24])), 47, BLOCKS_0, "C"),
    "write into a window": (change_new(block_ids=([6, 7], [21])), 47, BLOCKS_1, "C"),
    "one block, two writers": (change_new(block_ids=([8, 7], [24])), 42, BLOCKS_0, "C"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLAUSES)
def test_refused_without_a_trace(name, runner, undisturbed):
    build, number, field, req_id = CLAUSES[name]
    refused(runner, build(), f"MR-ERR-0{number}", field, req_id, undisturbed)


def test_past_max_model_len(runner, undisturbed):
    tokens, blocks = [1] * 40, ([*range(6, 16)], [24, 25, 26, 27, 28])
    plan = make_plan({"C": 2}, [new("C", tokens, blocks, computed=38)])
    refused(runner, plan, "MR-ERR-038", COUNTS, "C", undisturbed)


@pytest.mark.parametrize(
    "fields",
    [
        {"pooling_params": object()},
        {"lora_request": "adapter"},
        {"mm_features": ["image"]},
        {"prompt_embeds": np.zeros((5, 4))},
    ],
    ids=lambda f: next(iter(f)),
)
def test_features_that_are_not_offered(fields, runner, undisturbed):
    refused(runner, change_new(**fields)(), "MR-ERR-005", NEW, "C", undisturbed, error=CapabilityError)


@pytest.mark.parametrize(
    ("params", "field", "hint"),
    [
        ({"thinking_token_budget": 3}, "thinking_token_budget", "Set RunnerConfig.reasoning"),
        ({"trace_decode_token_ids": [3]}, "trace_decode_token_ids", "num_speculative_tokens = 0"),
        ({"extra_args": {"a": 1}}, "extra_args", "Set RunnerConfig.logits_processors"),
    ],
)
def test_what_the_runner_was_not_built_for(params, field, hint, runner, undisturbed):
    """The parameters are good, but this runner has no markers, no processors, and two drafts."""
    plan = change_new(sampling_params=SamplingParams(temperature=0.0, **params))()
    with pytest.raises(CapabilityError, match=hint):
        runner.execute_model(plan)
    refused(runner, plan, "MR-ERR-005", f"sampling_params.{field}", "C", undisturbed, error=CapabilityError)


@pytest.mark.parametrize("own", [128, 120, 0])
def test_a_minimum_masks_as_many_stop_tokens_as_there_is_room_for(own):
    """128 in all, its own and the model's, each counted once; more only matter where there is a minimum."""
    config = {"max_num_reqs": 1, "max_num_batched_tokens": 8, "max_model_len": 8}
    stops = list(range(own))
    for eos, min_tokens, fits in ((128, 1, True), (129, 1, False), (129, 0, True)):
        runner = make_runner(WitnessConfig(vocab_size=200), 8, **config)
        params = SamplingParams(temperature=0.0, stop_token_ids=stops, min_tokens=min_tokens)
        plan = make_plan({"a": 1}, [new("a", [1], [1], sampling_params=params, eos_token_ids=list(range(eos)))])
        if fits:
            runner.execute_model(plan)
            assert runner.sample_tokens().get_output().tokens()["a"][0] >= (eos if min_tokens else 0)
            continue
        with pytest.raises(PlanError, match="got 129, expected at most 128") as caught:
            runner.execute_model(plan)
        assert (caught.value.code, caught.value.field) == ("MR-ERR-050", "sampling_params.stop_token_ids")


@pytest.mark.parametrize(
    ("descriptor", "field"),
    [
        (BatchDescriptor(CUDAGraphMode.FULL, 9, 3), "descriptor.num_tokens"),
        (BatchDescriptor(CUDAGraphMode.FULL, 25, 3), "descriptor.num_tokens"),
        (BatchDescriptor(CUDAGraphMode.FULL, 12, 2), "descriptor.num_reqs"),
        (BatchDescriptor(CUDAGraphMode.FULL, 12, 5), "descriptor.num_reqs"),
        (BatchDescriptor(CUDAGraphMode.FULL, 12, 4, uniform_token_count=4), "descriptor.uniform_token_count"),
        (BatchDescriptor(CUDAGraphMode.FULL, 12, 4, max_query_len=4), "descriptor.max_query_len"),
        (BatchDescriptor(CUDAGraphMode.FULL, 12.0, 4), "descriptor.num_tokens"),
        (BatchDescriptor(CUDAGraphMode.FULL, None, 4), "descriptor.num_tokens"),
        (BatchDescriptor("FULL", 12, 4), "descriptor.cg_mode"),
        (BatchDescriptor(2, 12, 4), "descriptor.cg_mode"),
        (BatchDescriptor(CUDAGraphMode.NONE, 12), "descriptor.num_tokens"),
        (BatchDescriptor(CUDAGraphMode.NONE, 10, 4), "descriptor.num_reqs"),
        (BatchDescriptor(CUDAGraphMode.FULL, 12), "descriptor.num_reqs"),
        (BatchDescriptor(CUDAGraphMode.FULL, 12, 0), "descriptor.num_reqs"),
        (BatchDescriptor(CUDAGraphMode.PIECEWISE, 12, 4), "descriptor.num_reqs"),
        (BatchDescriptor(CUDAGraphMode.FULL, 12, 4, num_active_loras="x"), "descriptor.num_active_loras"),
        (("FULL", 12, 4), "descriptor"),
    ],
)
def test_descriptors_that_do_not_fit(descriptor, field, runner, undisturbed):
    refused(runner, good_plan(), "MR-ERR-043", field, None, undisturbed, descriptor=descriptor)


@pytest.mark.parametrize("descriptor", [5, "FULL", BatchDescriptor("FULL", 1, 1)])
def test_a_plan_without_tokens_does_not_excuse_its_descriptor(descriptor, runner):
    before = runner.state_digest()
    with pytest.raises(PlanError, match="MR-ERR-043"):
        runner.execute_model(make_plan({}, finished_req_ids=frozenset({"A"})), descriptor=descriptor)
    assert runner.state_digest() == before


@pytest.mark.parametrize("num_reqs", [None, 3])
def test_a_step_without_graphs_may_say_so(num_reqs, undisturbed):
    assert run(mid_run(), good_plan(), descriptor=BatchDescriptor(CUDAGraphMode.NONE, 10, num_reqs)) == undisturbed


def test_descriptors_for_what_is_not_offered(runner, undisturbed):
    for rest in ({"num_active_loras": 1}, {"num_ubatches": 2}):
        with pytest.raises(CapabilityError, match="adapters"):
            runner.execute_model(good_plan(), descriptor=dataclasses.replace(full(12, 4), **rest))
    assert run(runner, good_plan()) == undisturbed


def test_the_text_of_a_refusal(runner):
    """The text holds what, where, what came and what was expected."""
    with pytest.raises(PlanError) as caught:
        runner.execute_model(change_new(block_ids=([6, 40], [24]))())
    assert str(caught.value) == (
        "MR-ERR-041 block_ids (group 0)['C']: block id out of range "
        "(got 40, expected 1 <= id < num_blocks = 40 (column 1))"
    )


# -- what is legal although it looks odd ------------------------------------------------------------------------


def numpy_integers(value, kind):
    if isinstance(value, bool) or not isinstance(value, (int, list, tuple, dict, SchedulerOutput, NewRequestData,
                                                         CachedRequestData)):  # fmt: skip
        return value
    if isinstance(value, int):
        return kind(value)
    if isinstance(value, (list, tuple)):
        return type(value)(numpy_integers(v, kind) for v in value)
    if isinstance(value, dict):
        return {k: numpy_integers(v, kind) for k, v in value.items()}
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return type(value)(**{k: numpy_integers(v, kind) for k, v in fields.items()})


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_numpy_integers_are_integers(kind, undisturbed):
    """uint8 too: sums of counts must not wrap at 256, and nothing the plan holds may be changed in place."""
    runner, plan = mid_run(), numpy_integers(good_plan(), kind)
    kept = copy.deepcopy(plan)
    assert run(runner, plan) == undisturbed
    assert plan == kept
    assert all(type(r.computed_upper) is int for r in runner.validator.requests.values())


def test_small_numpy_counts_do_not_wrap():
    runner = make_runner(WitnessConfig(), 64, max_num_reqs=2, max_num_batched_tokens=512, max_model_len=512)
    count = np.uint8(200)
    added = [new(r, [1] * 200, range(1 + 20 * i, 15 + 20 * i)) for i, r in enumerate("AB")]
    plan = make_plan({}, added)
    plan.num_scheduled_tokens, plan.total_num_scheduled_tokens = {"A": count, "B": count}, 400
    assert len(run(runner, plan)[0]) == 2


def test_tokens_as_an_array_or_a_range(undisturbed):
    for tokens in (np.arange(30, 35, dtype=np.int32), range(30, 35), tuple(range(30, 35))):
        plan = change_new(prompt_token_ids=tokens, prefill_token_ids=tokens)()
        assert run(mid_run(), plan) == undisturbed


def test_same_step_resume_and_unknown_finished_ids(runner):
    """Preempted and added again by one plan: remove first. The row freed last is taken back at once."""
    row = runner.req_states.req_id_to_row["A"]
    plan = make_plan({"A": 7}, [new("A", [1, 2, 3, 4, 5, 6, 40], ([6, 7], [24]), prompt=range(1, 7))],
                     preempted_req_ids=frozenset({"A"}))  # fmt: skip
    run(runner, plan)
    assert runner.req_states.req_id_to_row["A"] == row


def test_null_blocks_behind_a_window_are_legal(runner):
    """A new request whose first 16 positions are computed and out of the window's reach (7): columns 0 and below."""
    tokens = [1] * 20
    plan = make_plan({"C": 4}, [new("C", tokens, ([6, 7, 8, 9, 10], [0, 24, 25]), computed=16)])
    assert len(run(runner, plan)[0]["C"]) == 1


def test_a_new_request_may_wait_for_its_first_tokens(runner):
    runner.execute_model(make_plan({}, [new("C", range(30, 35), ([6, 7], [24]))]))
    assert "C" in runner.req_states.req_id_to_row
    assert len(run(runner, make_plan({"C": 5}, (), {"C": (0, None)}))[0]["C"]) == 1


def test_drafts_in_flight_widen_the_bounds_until_they_are_settled():
    runner = mid_run()
    plan = make_plan({"A": 3}, (), {"A": (6, ([8], [25]))}, {"A": [-1, -1]})
    runner.execute_model(plan)
    live = runner.validator.requests["A"]
    assert (live.computed_lower, live.computed_upper) == (7, 9)
    runner.sample_tokens(forced=force(runner, {"A": [50, 44]}))
    assert (live.computed_lower, live.computed_upper) == (8, 9)  # one draft accepted: 8 are computed
    for computed in (7, 10):
        with pytest.raises(PlanError, match=r"8 \.\. 9"):
            runner.execute_model(make_plan({"A": 1}, (), {"A": (computed, None)}))
    runner.execute_model(make_plan({"A": 1}, (), {"A": (9, None)}))  # optimistic, and legal
    assert runner.last_step().positions.tolist() == [8]


# -- who may write where -----------------------------------------------------------------------------------------


def test_a_block_may_be_read_while_its_owner_goes_on_writing(runner):
    """C reads A's first five tokens in A's own blocks and goes on in a copy: nobody writes what A has computed."""
    plan = make_plan(
        {"A": 1, "C": 2}, [new("C", [1, 2, 3, 4, 5, 6], ([1, 6], [24]), computed=4)], {"A": (6, None)},
        kv_cache_block_copies=[(21, 24)],
    )  # fmt: skip
    assert len(run(runner, plan)[0]) == 2


def test_a_prefix_hit_on_what_the_same_step_writes_is_legal(runner):
    """B writes positions 6 to 9 (blocks 4 and 8); C takes the first 8 tokens as computed in the same plan."""
    tokens = [*range(11, 19), 1, 2]
    plan = make_plan({"B": 4, "C": 2}, [new("C", tokens, ([3, 4, 6], [22, 24]), computed=8)], {"B": (6, ([8], [25]))})
    assert len(run(runner, plan)[0]) == 2
    # From the next step on they are C's too.
    with pytest.raises(PlanError, match="MR-ERR-047"):
        runner.execute_model(make_plan({"D": 3}, [new("D", [1, 2, 3], ([4], [26]))], finished_req_ids=frozenset({"Z"})))


def test_blocks_of_requests_that_leave_are_free(runner):
    plan = make_plan({"C": 5}, [new("C", range(30, 35), ([1, 2], [21]))], finished_req_ids=frozenset({"A"}))
    assert len(run(runner, plan)[0]) == 1


def test_blocks_behind_a_window_are_free():
    """Group 1 has a window of 8: of A's 20 computed tokens the first 13 are out of reach, and so is its block 21."""
    runner = make_runner(MODEL, NUM_BLOCKS, max_num_reqs=4, max_num_batched_tokens=24, max_model_len=40)
    run(runner, make_plan({"A": 20}, [new("A", range(20), ([1, 2, 3, 4, 5], [21, 22, 23]))]))
    with pytest.raises(PlanError, match="position 13 of 'A'"):  # block 22 holds positions 8 to 15
        runner.execute_model(make_plan({"C": 8}, [new("C", range(8), ([6, 7], [22]))]))
    assert len(run(runner, make_plan({"C": 8}, [new("C", range(8), ([6, 7], [21]))]))[0]) == 1


def test_log_probabilities_and_drafts_exclude_each_other_in_a_step(runner, undisturbed):
    wants = SamplingParams(temperature=0.0, logprobs=1)
    added = [new("C", range(30, 35), ([6, 7], [24]), sampling_params=wants)]
    plan = make_plan({"A": 3, "C": 5}, added, {"A": (6, ([9], [26]))}, {"A": [-1, -1]})
    refused(runner, plan, "MR-ERR-005", DRAFTS, "C", undisturbed, error=CapabilityError)


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"logprobs": 1}, {"logprob_token_ids": [1]},
        {"prompt_logprobs": 1}, {"presence_penalty": 1.0}, {"logit_bias": {1: 1.0}}, {"allowed_token_ids": [1]},
        {"min_tokens": 1}, {"bad_words_token_ids": [[1]]}, {"thinking_token_budget": 1},
        {"structured_outputs": {"regex": "a"}}, {"trace_decode_token_ids": [1]}, {"extra_args": {"a": 1}},
    ],
    ids=lambda p: next(iter(p)),
)  # fmt: skip
def test_a_runner_that_offers_nothing_ignores_nothing(params):
    config = RunnerConfig(max_num_reqs=2, max_model_len=64)
    validator = PlanValidator(
        config, group_kv_cache_specs(WitnessConfig().kv_cache_specs(), 8), 64, frozenset({Capability.SEEDED_SAMPLING})
    )
    validator.check(make_plan({"a": 1}, [new("a", [1], [1], sampling_params=SamplingParams())]))
    with pytest.raises(CapabilityError, match="does not offer") as caught:
        validator.check(make_plan({"a": 1}, [new("a", [1], [1], sampling_params=SamplingParams(**params))]))
    assert caught.value.req_id == "a"


# -- cost ------------------------------------------------------------------------------------------------------


class Sealed(list):
    """A block list that may be indexed but not scanned."""

    def __iter__(self):
        raise AssertionError("the blocks of a live request were scanned")


def eight_decodes():
    config = RunnerConfig(max_num_reqs=64, max_num_batched_tokens=4096, max_model_len=8192)
    kv = group_kv_cache_specs(WitnessConfig().kv_cache_specs(), 6000)
    validator = PlanValidator(config, kv, 64, frozenset())
    ids = [f"r{i}" for i in range(8)]
    added = [new(r, [1] * 400, range(1 + 600 * i, 501 + 600 * i)) for i, r in enumerate(ids)]
    first = make_plan(dict.fromkeys(ids, 400), added)
    validator.check(first)
    validator.commit(first)
    return validator, make_plan(dict.fromkeys(ids, 1), (), dict.fromkeys(ids, (400, None)))


def test_a_check_does_not_scan_the_blocks_of_live_requests():
    validator, plan = eight_decodes()
    for live in validator.requests.values():
        live.block_ids = tuple(Sealed(ids) for ids in live.block_ids)
    validator.check(plan)


def test_a_check_of_eight_decodes_is_cheap():
    """About 50 microseconds on a laptop core; the bound leaves room for slow and busy machines."""
    validator, plan = eight_decodes()
    assert min(timeit.repeat(lambda: validator.check(plan), number=50, repeat=20)) / 50 < 500e-6


# -- mutated plans ----------------------------------------------------------------------------------------------

NODES = (SchedulerOutput, NewRequestData, CachedRequestData)


def paths(value, prefix=()):
    """Every place in a plan, as a path of field names, indices and keys."""
    if isinstance(value, NODES):
        children = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    elif isinstance(value, (list, tuple)):
        children = list(enumerate(value))
    elif isinstance(value, dict):
        children = list(value.items())
    else:
        children = []
    for key, child in children:
        yield (*prefix, key)
        yield from paths(child, (*prefix, key))


def get(value, path):
    for key in path:
        value = getattr(value, key) if isinstance(value, NODES) else value[key]
    return value


def rebuild(value, path, operation, argument):
    """A copy of the plan with one place changed; the original stays whole."""
    key, rest = path[0], path[1:]
    if isinstance(value, NODES):
        child = getattr(value, key)
        changed = rebuild(child, rest, operation, argument) if rest else edit(child, operation, argument)
        result = copy.copy(value)
        setattr(result, key, changed)
        return result
    items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    if rest:
        items[key] = rebuild(items[key], rest, operation, argument)
    elif operation == "drop":
        del items[key]
    elif operation == "rename" and isinstance(value, dict):
        items = {argument if k == key and argument.__hash__ else k: v for k, v in items.items()}
    elif operation == "duplicate" and not isinstance(value, dict):
        items = dict(enumerate([*list(value)[:key], value[key], *list(value)[key:]]))
    else:
        items[key] = edit(items[key], operation, argument)
    return items if isinstance(value, dict) else (tuple if isinstance(value, tuple) else list)(items.values())


def edit(child, operation, argument):
    if operation == "negate" and isinstance(child, int):
        return -child
    if operation == "add one" and isinstance(child, int):
        return child + 1
    if operation == "numpy" and isinstance(child, int) and abs(child) < 2**15:
        return np.int16(child)
    return argument


GOOD = dataclasses.replace(
    good_plan(), num_scheduled_tokens={"A": 2, "B": 4, "C": 5}, total_num_scheduled_tokens=11,
    scheduled_spec_decode_tokens={"A": [50]},
)  # fmt: skip
PATHS = sorted(set(paths(GOOD)), key=repr)
OPERATIONS = ("replace", "drop", "duplicate", "negate", "add one", "numpy", "rename")
ARGUMENTS = [
    None, True, False, -1, 0, 1, 7, 39, 40, 2**31, 2**63, -(2**63) - 1, 10**30, -(10**30), 1.0, 0.5, float("nan"),
    float("inf"), "", "A", "X", "abc", b"A", [], {}, (), set(), frozenset(), [None], ["A"], [[1]], ([1], [2]), [1, 2],
    [1.5], [True], [10**30], {"A": 1}, {"A": None}, {1: 2}, object(), np.array([1, 2]), np.array(3), np.zeros((2, 2)),
    np.float64(1), np.int64(3), np.uint8(250), np.bool_(True), range(3), iter([1]), int, GREEDY, 1j, SchedulerOutput(),
    NewRequestData("A", [1], [1], 0, ([1], [1])), CachedRequestData(["A"], [6], [None]),
]  # fmt: skip
MUTATIONS = st.lists(
    st.tuples(st.sampled_from(PATHS), st.sampled_from(OPERATIONS), st.integers(0, len(ARGUMENTS) - 1)),
    min_size=1, max_size=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed_drafts():
    return run_forced(mid_run(), GOOD)


def run_forced(runner, plan):
    runner.execute_model(plan)
    tokens = {"A": [50, 3], "B": [4], "C": [5]}
    return runner.sample_tokens(forced=force(runner, tokens)).get_output().tokens(), runner.state_digest()


@settings(max_examples=300)
@given(mutations=MUTATIONS)
def test_mutated_plans_do_not_crash(mutations, undisturbed_drafts):
    """Only RunnerError comes out of a broken plan; after a refusal the state is as before and the run goes on."""
    runner, plan = mid_run(), GOOD
    for path, operation, argument in mutations:
        try:
            get(plan, path)
        except (AttributeError, KeyError, IndexError, TypeError):
            continue  # an earlier mutation took the place away
        plan = rebuild(plan, path, operation, ARGUMENTS[argument])
    before = runner.state_digest()
    try:
        runner.execute_model(plan)
    except RunnerError:
        assert runner.state_digest() == before
        assert run_forced(runner, GOOD) == undisturbed_drafts
        return
    # accepted: then the whole step works
    if any(plan.scheduled_spec_decode_tokens.values()):
        with pytest.raises(CapabilityError, match="drafts"):
            runner.sample_tokens()
    elif plan.total_num_scheduled_tokens:
        runner.sample_tokens().get_output()


def test_single_mutations_exhaustively_at_the_top():
    """Every top-level field with every argument: the cheap half of the search, without chance."""
    runner, refusals = mid_run(), 0
    before = runner.state_digest()
    for field in dataclasses.fields(SchedulerOutput):
        for argument in ARGUMENTS:
            try:
                runner.validator.check(dataclasses.replace(GOOD, **{field.name: argument}))
            except RunnerError:
                refusals += 1
    assert refusals > 400
    assert runner.state_digest() == before
