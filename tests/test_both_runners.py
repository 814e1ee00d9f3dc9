"""What every runner here does alike at its edges: the order of start-up calls, junk, hooks, what it says of itself."""

import importlib

import numpy as np
import pytest
from step_driver import make_plan, new

from runner_api import (
    CallOrderError,
    CapabilityError,
    DefaultModelState,
    ForcedStep,
    KVCacheConfig,
    KVCacheError,
    KVCacheGroup,
    ParallelContext,
    RunnerConfig,
    RunnerError,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
    load_runner,
)

MODEL = WitnessConfig(groups=(WitnessGroup(4),))
OTHER = WitnessConfig(groups=(WitnessGroup(4), WitnessGroup(8)))


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.interpret)])
def name(request):
    if request.param == "gpu":
        pytest.importorskip("gpu_backend.triton_support")
    return request.param


def make(name, model=MODEL, num_blocks=20, **config):
    config = {"max_num_reqs": 4, "max_num_batched_tokens": 32, "max_model_len": 32} | config
    runner = load_runner(name, RunnerConfig(**config))
    runner.load_model(model)
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), num_blocks))
    return runner


def first_plan():
    return make_plan({"A": 3}, [new("A", [1, 2, 3], [3])])


def step(runner, plan):
    runner.execute_model(plan)
    return runner.sample_tokens().get_output().tokens()


# -- start-up ------------------------------------------------------------------------------------------------------


def test_a_model_may_be_replaced_until_there_is_a_cache(name):
    runner = load_runner(name, RunnerConfig(max_num_reqs=4, max_num_batched_tokens=32, max_model_len=32))
    runner.load_model(OTHER)
    runner.load_model(MODEL)
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), 20))
    with pytest.raises(CallOrderError):
        runner.load_model(OTHER)
    assert step(runner, first_plan()) == step(make(name), first_plan())


def test_no_new_cache_while_a_step_waits(name):
    runner, expected = make(name), step(make(name), first_plan())
    runner.execute_model(first_plan())
    with pytest.raises(CallOrderError, match="sample_tokens"):
        runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), 20))
    assert runner.sample_tokens().get_output().tokens() == expected


def test_a_new_cache_between_steps_forgets_everything(name):
    runner, fresh = make(name), make(name, num_blocks=30)
    step(runner, first_plan())
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), 30))
    assert runner.state_digest() == fresh.state_digest()
    with pytest.raises(CallOrderError):
        runner.last_step()
    assert step(runner, first_plan()) == step(fresh, first_plan())
    assert runner.state_digest() == fresh.state_digest()


def test_a_cache_of_another_block_size_gives_the_same_tokens(name):
    spec = WitnessGroup(16).kv_cache_spec()
    runner = load_runner(name, RunnerConfig(max_num_reqs=4, max_num_batched_tokens=32, max_model_len=32))
    runner.load_model(MODEL)
    for bad in (None, KVCacheConfig(9, (KVCacheGroup(("witness.0",), WitnessGroup(4, 3).kv_cache_spec()),))):
        with pytest.raises(KVCacheError):
            runner.initialize_kv_cache(bad)
    runner.initialize_kv_cache(KVCacheConfig(9, (KVCacheGroup(("witness.0",), spec),)))
    assert step(runner, first_plan()) == step(make(name), first_plan())


class FloatModel:
    """One attention layer that keeps what `dtype` says, whatever the runner computes in."""

    vocab_size = 8

    def __init__(self, dtype):
        self.dtype = dtype

    def kv_cache_specs(self):
        from runner_api import KVCacheSpec

        return {"layer": KVCacheSpec(4, 2, 8, self.dtype)}

    def forward(self, *args, **kwargs):
        raise NotImplementedError

    compute_logits = forward


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_cache_is_of_the_dtype_that_its_spec_names(name, dtype):
    runner = make(name, FloatModel(dtype))
    assert [str(part.dtype).removeprefix("torch.") for part in runner.kv_caches["layer"]] == [dtype] * 2


def test_numpy_has_no_bfloat16():
    with pytest.raises(CapabilityError, match="bfloat16"):
        make("cpu", FloatModel("bfloat16"))


# -- junk ----------------------------------------------------------------------------------------------------------

ONE, V = np.array([[1]]), MODEL.vocab_size


class Hostile:
    def __array__(self, *args, **kwargs):
        raise OSError("no array here")


@pytest.mark.parametrize(
    "forced",
    [
        5, {"token_ids": ONE}, ForcedStep(None, None), ForcedStep(ONE, None), ForcedStep([[1], [1, 2]], [1]),
        ForcedStep(Hostile(), [1]), ForcedStep(np.array([["a"]]), np.array([1])), ForcedStep(ONE, np.array([1.0])),
        ForcedStep(np.array([[True]]), np.array([1])), ForcedStep(ONE, np.array([1]), np.zeros((1, 2), int)),
        ForcedStep(ONE, np.array([1]), None, np.array([["a"] * V])),
        ForcedStep(ONE, np.array([1]), None, np.array([[None] * V])),
        ForcedStep(ONE, np.array([1]), None, np.ones((1, V), complex)),
    ],
)  # fmt: skip
def test_junk_for_an_outcome_is_refused_and_the_step_waits_on(name, forced):
    runner = make(name)
    runner.execute_model(first_plan())
    before = runner.state_digest()
    with pytest.raises(RunnerError) as caught:
        runner.sample_tokens(forced=forced)
    assert caught.value.code == "MR-ERR-044"
    assert runner.state_digest() == before
    good = ForcedStep(np.array([[7]], np.uint64), np.array([1], np.uint8), None, np.zeros((1, V), np.int16))
    assert runner.sample_tokens(forced=good).get_output().tokens() == {"A": (7,)}


@pytest.mark.parametrize(
    "arguments", [(2**40,), ("x",), (None,), (1.5,), (True,), (-77, [999]), (-77, [-1]), (-77, ["a"]), (-77, 5)]
)
def test_junk_for_poison_is_refused(name, arguments):
    runner = make(name)
    step(runner, first_plan())
    before = runner.state_digest()
    with pytest.raises(RunnerError):
        runner.poison_unused(*arguments)
    runner.poison_unused(-77, {5, np.int64(6)})
    assert runner.state_digest() == before


def test_refusals_at_the_start_are_statements(name):
    with pytest.raises(CapabilityError, match="the slots layout, which the configuration asks for, lacks"):
        load_runner(name, RunnerConfig(layout="slots", reorder_batch_threshold=1))
    with pytest.raises(CapabilityError, match="several ranks are not offered"):
        load_runner(name, RunnerConfig(parallel=ParallelContext(tp_size=2, tp_rank=1)))


# -- hooks ---------------------------------------------------------------------------------------------------------


class Hooks(DefaultModelState):
    """Writes down the calls, and whether a request still has, or already has, its row."""

    def __init__(self):
        self.calls = []
        self.runner = None

    def add(self, row, request):
        assert self.runner.req_states.req_id_to_row[request.req_id] == row
        self.calls.append(f"add {request.req_id}")

    def remove(self, req_id):
        assert req_id in self.runner.req_states.req_id_to_row
        self.calls.append(f"remove {req_id}")

    def prepare_attn(self, batch):
        self.calls.append("prepare_attn")
        return {"another layer": "its metadata"}

    def prepare_inputs(self, batch):
        assert batch.attn_metadata["another layer"] == "its metadata"
        self.calls.append("prepare_inputs")
        return {"more": self.calls}

    def postprocess(self, batch, num_sampled):
        assert num_sampled.tolist() == [1] * batch.num_reqs
        self.calls.append("postprocess")


def test_a_models_own_state_is_told_of_every_step(name):
    module = importlib.import_module("gpu_backend.models" if name == "gpu" else "cpu_reference.models")
    runner = load_runner(name, RunnerConfig(max_num_reqs=2, max_num_batched_tokens=32, max_model_len=32))
    device = (runner.device,) if name == "gpu" else ()
    model, hooks = module.build_model(MODEL, "float32", *device), Hooks()
    hooks.runner, model.model_state, forward = runner, hooks, model.forward

    def told(*args, more):
        more.append("forward")
        return forward(*args)

    model.forward = told
    runner.load_model(model)
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), 20))
    tokens = step(runner, first_plan())
    step(runner, make_plan({"B": 2}, [new("B", [4, 5], [4])], finished_req_ids=frozenset({"A", "never seen"})))
    runner.execute_model(make_plan({}, finished_req_ids=frozenset({"B"})))
    whole = ["prepare_attn", "prepare_inputs", "forward", "postprocess"]
    assert hooks.calls == ["add A", *whole, "remove A", "add B", *whole, "remove B"]
    assert tokens == step(make(name), first_plan())


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (0, 2)])
def test_a_share_of_the_weights_cannot_be_loaded(name, rank, size):
    if name == "gpu":
        import torch

        from gpu_backend.models.llama import LlamaModel

        arguments = (None, torch.float32, torch.device("cpu"))
    else:
        from cpu_reference.models.llama import LlamaModel

        arguments = (None, np.dtype(np.float32))
    with pytest.raises(CapabilityError, match=f"rank {rank} of {size}"):
        LlamaModel(*arguments, rank=rank, size=size)


# -- how many outputs may be under way -----------------------------------------------------------------------------


def test_the_cpu_runner_says_that_its_outputs_are_complete_at_once():
    assert load_runner("cpu", RunnerConfig()).describe().notes == ()
    (note,) = load_runner("cpu", RunnerConfig(max_concurrent_batches=5)).describe().notes
    assert "max_concurrent_batches" in note


@pytest.mark.interpret
@pytest.mark.parametrize("depth", [1, 3])
def test_the_gpu_runner_copies_out_of_a_ring(depth):
    """Each step has its place, at an address that comes back after `depth` steps; late outputs stay what they were."""
    pytest.importorskip("gpu_backend.triton_support")
    runner, twin = make("gpu", max_concurrent_batches=depth), make("cpu")
    places, outputs, expected = [], [], []
    for n in range(3, 10):
        plan = first_plan() if n == 3 else make_plan({"A": 1}, (), {"A": (n - 1, [n] if n % 4 == 1 else None)})
        for r in (runner, twin):
            r.execute_model(plan)
        outputs.append(runner.sample_tokens())
        expected.append(twin.sample_tokens().get_output())
        places.append((runner.sampled_token_ids.data_ptr(), runner.num_sampled.data_ptr()))
        np.testing.assert_array_equal(runner.last_step().num_sampled, twin.last_step().num_sampled)
    assert len(set(places)) == depth
    assert places[depth:] == places[:-depth]
    assert [o.get_output() for o in outputs] == expected


@pytest.mark.interpret
def test_a_step_waits_for_the_copy_that_read_its_place_and_for_no_later_one(monkeypatch):
    pytest.importorskip("gpu_backend.triton_support")
    import torch

    waited = []

    class Stream:
        def wait_event(self, event):
            waited.append(event)

    runner = make("gpu", max_concurrent_batches=2)
    if runner.device.type != "cpu":
        pytest.skip("without a GPU a stub stands for its stream; with one, lockstep shows the outcome")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    for n in range(3, 8):
        runner.execute_model(
            first_plan() if n == 3 else make_plan({"A": 1}, (), {"A": (n - 1, [4] if n == 5 else None)})
        )
        runner.sample_tokens().copied = f"copy of step {n}"
    assert waited == [f"copy of step {n}" for n in (3, 4, 5)]
