"""The wire format: whatever is written is read back equal, and what is broken is refused with its path."""

import json
from fractions import Fraction

import numpy as np
import pytest
from sameness import same

from conformance.driver import KINDS, RandomDriver, draw_size
from conformance.harness import build_runner
from conformance.world import PlanWorld
from runner_api import (
    BatchDescriptor,
    CachedRequestData,
    Capability,
    ConfigError,
    CUDAGraphMode,
    ForcedStep,
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    LogprobsLists,
    ModelRunnerOutput,
    NewRequestData,
    PlanError,
    ReasoningConfig,
    RunnerConfig,
    RunnerError,
    RunnerInfo,
    SampleFault,
    SamplingParams,
    SamplingParamsError,
    SchedulerOutput,
    StepRecord,
    StructuredOutputsParams,
    UnknownNameError,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
    load_runner,
)
from runner_api.wire import array_from_json, array_to_json, error_from_json, error_to_json, from_json, to_json


def through(value, hint=None):
    """Out and back, as text that is strict JSON."""
    text = json.dumps(to_json(value, hint), allow_nan=False)
    return from_json(hint or type(value), json.loads(text))


@pytest.mark.parametrize(
    ("kind", "layout"), [(k, rows) for k in KINDS for rows in ("slots", "dense") if (k, rows) != ("drafts", "dense")]
)
def test_whole_worlds_come_back_equal(kind, layout):
    """Every size, plan, outcome, mask, output and record of a random world, with all parts that a record can have."""
    random = np.random.default_rng([3, KINDS.index(kind)])
    info = load_runner("cpu").describe()
    parts = frozenset({"logits", "kv", "intermediates"})
    size = draw_size(kind, random, parts, info.capabilities, layout)
    same(through(size.config), size.config)
    same(through(size.model), size.model)
    runner, cache = build_runner("cpu", size.model, size.config, size.num_blocks)
    same(through(cache), cache)
    world = PlanWorld(size.config, cache, size.model.vocab_size)
    driver = RandomDriver(random, info.capabilities)
    seen = 0
    for _ in range(25):
        step = driver.next_step(world)
        for value in (step.plan, step.descriptor, step.forced, step.grammar):
            if value is not None:
                same(through(value), value)
        output = runner.execute_model(step.plan, descriptor=step.descriptor)
        if output is None:
            output = runner.sample_tokens(step.grammar, forced=step.forced).get_output()
        record = runner.last_step()
        same(through(output), output)
        same(through(record), record)
        seen += record.num_tokens
        world.observe(record.tokens(), step.drafts_held())
    assert seen > 20


EXAMPLES = [
    RunnerConfig(),
    RunnerConfig(
        layout="dense", reorder_batch_threshold=2, window_reach=(0, 5), reasoning=ReasoningConfig((1, 2), (3,)),
        logits_processors=("some.module:factory",), record=frozenset({"kv", "logits"}),
    ),
    WitnessConfig(40, (WitnessGroup(4), WitnessGroup(8, 5))),
    group_kv_cache_specs(WitnessConfig().kv_cache_specs(), 7),
    BatchDescriptor(CUDAGraphMode.FULL, 16, 4),
    SamplingParams(
        temperature=0.3, logit_bias={7: -1.5}, stop="x", bad_words_token_ids=[(1, 2), (3,)],
        structured_outputs=StructuredOutputsParams(json={"type": "object"}), extra_args={"a": [1, None, "b"]},
    ),
    SchedulerOutput(
        [NewRequestData("a", [1, 2], [1, 2, 3], 0, ([1, 2], []), SamplingParams(), -(2**63), (11,))],
        CachedRequestData(["b"], [3], [None], [1], frozenset({"b"}), {"b": [4, 5, 6]}),
        {"a": 3, "b": 1}, 4, {"b": [-1]}, frozenset({"z", "y"}), frozenset({"x"}), [3], [(1, 2)], 1,
    ),
    ForcedStep(np.zeros((2, 3), np.int64), np.array([0, 1], np.int32), None, np.array([[np.nan, -np.inf]], np.float32)),
    GrammarOutput(["a"], np.array([[-1, 2**31 - 1]], np.int32), [2]),
    ModelRunnerOutput(
        ("a", "b"), ((3,), ()),
        LogprobsLists(np.zeros((2, 1), np.int32), np.array([[np.inf], [-1e-45]], np.float32), np.ones(2, np.int64)),
        {"a": LogprobsLists(np.zeros((0, 4), np.int32), np.zeros((0, 4), np.float32), np.zeros(0, np.int64))},
        {"b": SampleFault.NAN},
    ),
    StepRecord(
        SchedulerOutput(), block_tables=((np.zeros(0, np.int32), np.array([3], np.int32)), ()),
        kv={"a": np.zeros((2, 2, 0, 1, 4), np.float16)}, logits=np.full((1, 2), 0.1), extra={"note": ["x", 1.5]},
    ),
]  # fmt: skip


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda v: type(v).__name__)
def test_examples_come_back_equal(value):
    same(through(value), value)


def test_runner_infos_come_back_equal():
    for layout in ("slots", "dense"):
        info = load_runner("cpu", RunnerConfig(layout=layout)).describe()
        same(through(info), info)
        assert to_json(info)["capabilities"] == sorted(info.capabilities)
    foreign = RunnerInfo("x", "y", "1", "cpu", "float32", "slots", "murmur3", frozenset({Capability.GENERATE}))
    same(through(foreign), foreign)


def test_plain_hints():
    specs = WitnessConfig(groups=(WitnessGroup(4), WitnessGroup(2, 9))).kv_cache_specs()
    same(through(specs, dict[str, KVCacheSpec]), specs)


def test_defaults_are_left_out_and_names_are_told():
    assert to_json(RunnerConfig()) == {}
    assert to_json(SchedulerOutput()) == {}
    descriptor = BatchDescriptor(CUDAGraphMode.PIECEWISE, 8)
    assert to_json(descriptor) == {"cg_mode": "PIECEWISE", "num_tokens": 8}
    assert from_json(BatchDescriptor, {"cg_mode": 1, "num_tokens": 8}) == descriptor
    assert to_json(ForcedStep(np.array([[3, 4]]), np.array([2], np.int32))) == {
        "token_ids": [[3, 4]], "num_sampled": [2],
    }  # fmt: skip


def test_a_prompt_may_be_any_sequence_of_integers():
    for prompt in (range(1, 4), np.array([1, 2, 3], np.int32), (1, np.int64(2), 3)):
        new = NewRequestData("a", prompt, prompt, 0, ([1],))
        assert through(new).prompt_token_ids == [1, 2, 3]


def test_arrays_of_other_kinds_tell_them():
    for array in (
        np.array([[True, False]]), np.array(2**64 - 1, np.uint64), np.array([1, 2**64 - 1], np.uint64),
        np.zeros((0, 3), np.int8),
        np.array([0.1, np.nan, np.inf, -np.inf, 65504.0], np.float16), np.array([np.pi, 5e-324]),
    ):  # fmt: skip
        same(array_from_json(json.loads(json.dumps(array_to_json(array), allow_nan=False))), array)
    with pytest.raises(ConfigError, match="complex128"):
        array_to_json(np.zeros(1, complex))
    wide = StepRecord(SchedulerOutput(), idx_mapping=np.array([1], np.int32))
    assert to_json(wide)["idx_mapping"] == {"dtype": "int32", "shape": [1], "data": [1]}
    same(through(wide), wide)


BROKEN = [
    (RunnerConfig, {"max_num_req": 3}, UnknownNameError, "unknown field of RunnerConfig 'max_num_req'.*max_num_reqs"),
    (RunnerConfig, {"max_num_reqs": 0}, ConfigError, "max_num_reqs"),
    (RunnerConfig, {"logits_processors": [3]}, ConfigError, r"logits_processors\[0\]"),
    (RunnerConfig, [], ConfigError, "the fields of a RunnerConfig"),
    (SamplingParams, {"temperature": "hot"}, ConfigError, "temperature"),
    (SamplingParams, {"temperature": 9}, SamplingParamsError, "temperature"),
    (SamplingParams, {"logit_bias": {"x": 1}}, ConfigError, "logit_bias"),
    (BatchDescriptor, {"cg_mode": "full", "num_tokens": 1}, UnknownNameError, "cg_mode.*FULL, NONE, PIECEWISE"),
    (BatchDescriptor, {"cg_mode": 7, "num_tokens": 1}, UnknownNameError, "cg_mode"),
    (BatchDescriptor, {"cg_mode": "FULL"}, ConfigError, "lacks a field.*num_tokens"),
    (BatchDescriptor, {"cg_mode": "FULL", "num_tokens": True}, ConfigError, "num_tokens.*an integer"),
    (SchedulerOutput, {"num_scheduled_tokens": {"a": 1.0}}, ConfigError, r"num_scheduled_tokens\['a'\].*float"),
    (SchedulerOutput, {"num_scheduled_tokens": ["a"]}, ConfigError, "num_scheduled_tokens.*an object"),
    (SchedulerOutput, {"finished_req_ids": "ab"}, ConfigError, "finished_req_ids.*a list"),
    (SchedulerOutput, {"kv_cache_block_copies": [[1, 2, 3]]}, ConfigError, r"kv_cache_block_copies\[0\]"),
    (SchedulerOutput, {"new_block_ids_to_zero": [1, "2"]}, ConfigError, r"new_block_ids_to_zero\[1\]"),
    (SchedulerOutput, {"scheduled_cached_reqs": {"req_ids": [3]}}, ConfigError, r"scheduled_cached_reqs.req_ids\[0\]"),
    (StepRecord, {"plan": {}, "idx_mapping": [1.5]}, ConfigError, "idx_mapping"),
    (StepRecord, {"plan": {}, "idx_mapping": ["1"]}, ConfigError, "idx_mapping"),
    (StepRecord, {"plan": {}, "seq_lens": [2**31]}, ConfigError, "seq_lens.*out of range"),
    (StepRecord, {"plan": {}, "token_ids": [[1], [2, 3]]}, ConfigError, "token_ids.*different lengths"),
    (StepRecord, {"plan": {}, "token_ids": [1]}, ConfigError, "token_ids.*2 levels"),
    (StepRecord, {"plan": {}, "logits": [["NaN"]]}, ConfigError, "logits"),
    (StepRecord, {"plan": {}, "block_tables": [[[1], 2]]}, ConfigError, r"block_tables\[0\]\[1\]"),
    (StepRecord, {"plan": {}, "kv": {"a": {"dtype": "object", "shape": [1], "data": [1]}}}, ConfigError, "is no array"),
    (StepRecord, {"plan": {}, "kv": {"a": {"dtype": "int8", "shape": [2], "data": [1]}}}, ConfigError, "its shape"),
    (StepRecord, {"plan": {}, "kv": {"a": {"dtype": "uint64", "shape": [2], "data": [-1, 2**63]}}}, ConfigError, "kv"),
    (StepRecord, {"plan": {}, "kv": {"a": {"dtype": "uint64", "shape": [2], "data": [1.5, 2**63]}}}, ConfigError, "kv"),
    (StepRecord, {"plan": {}, "kv": {"a": {"dtype": "int8", "shape": [-1], "data": [1]}}}, ConfigError, "no shape"),
    (RunnerInfo, {"capabilities": ["fly"]}, ConfigError, "lacks a field"),
    (
        KVCacheConfig,
        {"num_blocks": 2, "groups": [{"layer_names": ["a"], "spec": {}}]},
        ConfigError,
        r"groups\[0\].spec",
    ),
]


@pytest.mark.parametrize(("cls", "data", "error", "text"), BROKEN)
def test_broken_data_is_refused_with_its_path(cls, data, error, text):
    with pytest.raises(error, match=text):
        from_json(cls, data)


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(ConfigError, match=r"scheduled_new_reqs\[0\].seed.*Fraction"):
        to_json(SchedulerOutput([NewRequestData("a", [1], [1], 0, ([1],), seed=Fraction(1, 2))]))
    with pytest.raises(ConfigError, match="a set"):
        to_json(SchedulerOutput(finished_req_ids=["a"]))
    with pytest.raises(ConfigError, match="a list"):
        to_json(SchedulerOutput(new_block_ids_to_zero=iter([1])))
    with pytest.raises(ConfigError, match=r"logits_processors\[0\]"):
        to_json(RunnerConfig(logits_processors=(lambda context: None,)))
    told = to_json(RunnerConfig(logits_processors=(json.JSONDecoder.decode,)))
    assert told == {"logits_processors": ["json.decoder:JSONDecoder.decode"]}


def test_wrong_kinds_that_json_can_hold_go_out_and_are_refused_on_arrival():
    """So that it is the runner's side that refuses a plan which nobody should make."""
    plan = SchedulerOutput(num_scheduled_tokens={"a": 1.0}, total_num_scheduled_tokens=True)
    data = to_json(plan)
    assert type(data["num_scheduled_tokens"]["a"]) is float
    assert data["total_num_scheduled_tokens"] is True
    with pytest.raises(ConfigError):
        from_json(SchedulerOutput, data)


def test_errors_keep_class_code_text_and_place():
    error = PlanError(
        "too long", code="MR-ERR-033", field="block_ids", req_id="a", got=[1, 2], expected=3, hint="Mend it"
    )
    back = error_from_json(json.loads(json.dumps(error_to_json(error))))
    assert type(back) is PlanError
    assert str(back) == str(error)
    assert (back.code, back.field, back.req_id, back.what, back.hint) == (
        error.code, error.field, error.req_id, error.what, error.hint,
    )  # fmt: skip
    assert (back.got, back.expected) == ("[1, 2]", "3")
    unknown = from_json(RunnerError, to_json(UnknownNameError("runner", "x", ["y"])))
    assert type(unknown) is UnknownNameError
    assert str(unknown).startswith("MR-ERR-004 unknown runner 'x'")


def test_errors_of_others_are_runner_errors():
    class Own(PlanError):
        pass

    assert error_to_json(Own("x"))["type"] == "PlanError"
    assert error_to_json(KeyError("x")) == {"type": "KeyError", "text": "'x'"}
    back = error_from_json({"type": "KeyError", "text": "'x'"})
    assert type(back) is RunnerError
    assert back.code == "MR-ERR-000"
    with pytest.raises(ConfigError, match="not an error"):
        error_from_json({"type": "PlanError"})


class Mute(Exception):
    """As foreign code may raise it: without a text."""

    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


def test_errors_of_any_content_have_a_text():
    """What stands in an error comes from a runner; a program that dies while it answers would hide it."""
    odd = PlanError("no", req_id=np.int64(3), got=Mute(), expected={1}, hint="x")
    odd.field = np.int64(3)
    data = json.loads(json.dumps(error_to_json(odd)))
    assert (data["field"], data["req_id"], data["hint"]) == ("np.int64(3)", "np.int64(3)", "x")
    assert (data["got"], data["expected"]) == ("<Mute without a text>", "{1}")
    assert type(error_from_json(data)) is PlanError
    assert error_to_json(Mute()) == {"type": "Mute", "text": "<Mute without a text>"}


def test_sets_of_several_kinds_are_written():
    """So that it is the runner's side that refuses them."""
    assert to_json(SchedulerOutput(finished_req_ids={"a", 2, 1}))["finished_req_ids"] == [1, 2, "a"]


@pytest.mark.parametrize("data", [[True, 3], [3, False], [True, False]])
@pytest.mark.parametrize("dtype", ["int32", "uint64", "float32"])
def test_true_and_false_are_no_numbers_of_an_array(data, dtype):
    with pytest.raises(ConfigError, match="no array of that kind"):
        array_from_json({"dtype": dtype, "shape": [2], "data": data})
    with pytest.raises(ConfigError, match="token_ids"):
        from_json(StepRecord, {"plan": {}, "token_ids": [[1, 2], data]})


ODD = (
    None, True, -1, 1.5, 2**70, "", "nan", "x", [], [[]], [1, "a"], {}, {"a": 1},
    {"dtype": "int32", "shape": [1], "data": ["7"]}, {"dtype": "int32", "shape": [0] * 99, "data": []},
)  # fmt: skip


def places(data, path=()):
    """Every place in plain JSON, outermost first."""
    yield path
    children = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in children:
        yield from places(value, (*path, key))


def replaced(data, path, value):
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = replaced(data[path[0]], path[1:], value)
    return copy


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda v: type(v).__name__)
def test_damaged_data_is_refused_or_read_but_never_crashes(value):
    """Every place in turn holds something else: a RunnerError, or a value that can be written again."""
    data = to_json(value)
    refused = 0
    for path in places(data):
        for odd in ODD:
            try:
                read = from_json(type(value), replaced(data, path, odd))
            except RunnerError:
                refused += 1
            else:
                to_json(read)
    assert refused >= len(ODD) - 2
