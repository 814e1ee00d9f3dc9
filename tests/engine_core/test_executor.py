"""Executor and worker: order of start-up, delivery, the copy at the boundary, and what a failure looks like."""

import pytest
from engine_fake_runner import FakeRunner, build_engine, expected, run_to_end

from engine_core.executor import AsyncOutputFuture, Executor, InProcessExecutor, WorkerError, copy_plan, make_executor
from engine_core.worker import Worker, WorkerConfig
from runner_api import (
    CachedRequestData,
    CallOrderError,
    EngineError,
    NewRequestData,
    PlanError,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    UnknownNameError,
    WitnessConfig,
    group_kv_cache_specs,
)


class LoggedRunner(FakeRunner):
    """Writes down which methods were called."""

    calls: list[str] = []  # noqa: RUF012

    def __init__(self, config) -> None:
        LoggedRunner.calls.append("init")
        super().__init__(config)

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name not in ("load_model", "get_kv_cache_specs", "initialize_kv_cache", "capture_graphs", "shutdown"):
            return found

        def logged(*args):
            LoggedRunner.calls.append(name)
            return found(*args)

        return logged


class BrokenRunner(FakeRunner):
    def execute_model(self, plan, **kwargs):
        if "bad" in plan.num_scheduled_tokens:
            raise ZeroDivisionError("in the middle of a step")
        return super().execute_model(plan, **kwargs)

    def sample_tokens(self, grammar=None, *, forced=None):
        output = super().sample_tokens(grammar)
        if "late" not in output.output.req_ids:
            return output

        class Late:
            def get_output(self):
                raise OSError("the copy failed")

        return Late()


def executor_for(cls=FakeRunner, **config) -> InProcessExecutor:
    target = f"{cls.__module__}:{cls.__name__}"
    executor = make_executor(WorkerConfig(target, WitnessConfig(32), RunnerConfig(**config)))
    assert isinstance(executor, InProcessExecutor)
    executor.initialize_from_config([group_kv_cache_specs(executor.get_kv_cache_specs()[0], 8)])
    return executor


def plan(req_id: str = "a", tokens: tuple[int, ...] = (1, 2)) -> SchedulerOutput:
    new = NewRequestData(req_id, list(tokens), list(tokens), 0, ([1],), SamplingParams(temperature=0.0))
    return SchedulerOutput([new], num_scheduled_tokens={req_id: len(tokens)}, total_num_scheduled_tokens=len(tokens))


def test_start_up_order():
    LoggedRunner.calls.clear()
    executor = executor_for(LoggedRunner)
    executor.shutdown()
    executor.shutdown()
    assert LoggedRunner.calls == [
        "init", "load_model", "get_kv_cache_specs", "initialize_kv_cache", "capture_graphs", "shutdown",
    ]  # fmt: skip


def test_results_come_in_rank_order():
    executor = executor_for()
    assert executor.get_kv_cache_specs() == [WitnessConfig(32).kv_cache_specs()]
    assert executor.collective_rpc("describe")[0].name == "fake"
    assert executor.collective_rpc(lambda worker, x: worker.rank + x, (5,)) == [5]
    assert executor.collective_rpc("describe", non_block=True).result()[0].name == "fake"
    assert executor.determine_available_memory()[0] > 0
    executor.check_health()


def test_a_step_is_two_calls_blocking_or_not():
    for non_block in (False, True):
        executor = executor_for()
        executed = executor.execute_model(plan(), non_block=non_block)
        assert (executed.result() if non_block else executed) is None
        sampled = executor.sample_tokens(non_block=non_block)
        output = sampled.result() if non_block else sampled
        assert output.tokens() == {"a": tuple(expected([1, 2], 0, 1, WitnessConfig(32), 99))}


def test_futures_fetch_once_and_do_not_time_out():
    fetched = []
    future = AsyncOutputFuture(lambda: fetched.append(1) or "value")
    with pytest.raises(EngineError, match="time out"):
        future.result(timeout=1)
    assert not fetched
    assert (future.result(), future.result()) == ("value", "value")
    assert fetched == [1]


def test_the_runner_never_sees_later_changes():
    blocks, ids = [1], ["a"]
    new = NewRequestData("b", [1], [1], 0, (blocks,))
    cached = CachedRequestData(ids, [1], [([2],)], [0])
    original = SchedulerOutput([new], cached, {"a": 1, "b": 1}, 2, {"a": [5]})
    copy = copy_plan(original)
    assert copy == original
    blocks.append(9)
    ids.append("z")
    cached.new_block_ids[0][0].append(9)
    original.num_scheduled_tokens["a"] = 7
    original.scheduled_spec_decode_tokens["a"].append(7)
    original.scheduled_new_reqs.clear()
    assert copy.scheduled_new_reqs[0].block_ids == ([1],)
    assert copy.scheduled_cached_reqs == CachedRequestData(["a"], [1], [([2],)], [0])
    assert copy.num_scheduled_tokens == {"a": 1, "b": 1}
    assert copy.scheduled_spec_decode_tokens == {"a": [5]}


def test_a_refused_plan_says_who_refused_and_changes_nothing():
    executor = executor_for()
    bad = plan()
    bad.total_num_scheduled_tokens = 3
    with pytest.raises(PlanError, match="counts do not add up") as caught:
        executor.execute_model(bad)
    assert caught.value.__notes__ == ["raised on rank 0 in execute_model"]
    executor.check_health()
    good = plan()
    assert executor.execute_model(good) is None
    assert executor.worker.runner.plans == [good]
    assert executor.worker.runner.plans[0] is not good


@pytest.mark.parametrize("where", ["bad", "late"])
def test_a_failed_step_fails_the_executor(where):
    executor, called = executor_for(BrokenRunner), []
    executor.register_failure_callback(lambda: called.append(1))
    future = executor.execute_model(plan(where), non_block=True)
    if where == "late":
        assert future.result() is None
        future = executor.sample_tokens(non_block=True)
    with pytest.raises(WorkerError) as caught:
        future.result()
    error = caught.value
    assert error.rank == 0
    assert error.method == {"bad": "execute_model", "late": "get_output"}[where]
    assert {"bad": "in the middle of a step", "late": "the copy failed"}[where] in error.worker_traceback
    assert "test_executor.py" in error.worker_traceback
    assert isinstance(error.__cause__, (ZeroDivisionError, OSError))
    for call in (executor.check_health, lambda: executor.execute_model(plan()), executor.get_kv_cache_specs):
        with pytest.raises(EngineError, match="has failed"):
            call()
    executor.register_failure_callback(lambda: called.append(2))
    assert called == [1, 2]
    executor.shutdown()


def test_an_error_outside_a_step_does_not_fail_the_executor():
    executor = executor_for()
    with pytest.raises(WorkerError, match="rank 0 failed in <lambda>: KeyError"):
        executor.collective_rpc(lambda worker: {}["x"])
    executor.check_health()


def test_wrong_order_and_wrong_names():
    executor = executor_for()
    with pytest.raises(CallOrderError, match="execute_model was not called"):
        executor.sample_tokens()
    with pytest.raises(UnknownNameError, match="load_model"):
        executor.collective_rpc("load_modle")
    with pytest.raises(UnknownNameError, match="uni"):
        make_executor(executor.config, "unit")
    with pytest.raises(CallOrderError, match="init_device"):
        Worker(executor.config).load_model()
    executor.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        executor.check_health()


def test_executor_by_class():
    class Counting(InProcessExecutor):
        pass

    config = WorkerConfig("engine_fake_runner:FakeRunner", WitnessConfig(32), RunnerConfig())
    assert isinstance(make_executor(config, Counting), Counting)
    with pytest.raises(TypeError, match="abstract"):
        Executor(config)


def test_memory_is_the_runners_word_if_it_has_one():
    executor = executor_for()
    executor.worker.runner.determine_available_memory = lambda: 12345
    assert executor.determine_available_memory() == [12345]


def test_engine_runs_on_it():
    engine, runner = build_engine()
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, seed=0, max_tokens=3))
    assert run_to_end(engine) == {"a": expected([1, 2, 3], 0, 3, runner.model, 48)}
    engine.shutdown()
    assert runner.is_shut_down
