"""Runners in other processes: judged like any other, and every way in which a program can break the protocol."""

import json
import os
import signal
import sys
import textwrap
import time

import numpy as np
import pytest

from conformance.evaluate import evaluate
from conformance.harness import build_runner
from conformance.probes import CONFIG, GREEDY, MODEL, NUM_BLOCKS, bad_plans, new, plan_of, two_live
from runner_api import (
    SPEC_VERSION,
    BatchDescriptor,
    CallOrderError,
    Capability,
    CapabilityError,
    CheckpointError,
    ConfigError,
    CUDAGraphMode,
    ForcedStep,
    GrammarOutput,
    ModelRunner,
    NewRequestData,
    PlanError,
    RunnerConfig,
    RunnerError,
    SchedulerOutput,
    UnknownNameError,
    load_factory,
    load_runner,
    load_stages,
)
from runner_api.process_runner import ProcessFactory
from runner_api.serve import KEPT_OUTPUTS

SERVED = f"{sys.executable} -m runner_api.serve"
CPU = f"process:{SERVED} cpu_reference.layouts:build_runner"


@pytest.fixture(scope="module")
def cpu():
    """The reference in a process of its own."""
    factory = ProcessFactory(f"{SERVED} cpu")
    yield factory
    factory.close()


@pytest.fixture
def ready(cpu):
    return build_runner(cpu, MODEL, CONFIG, NUM_BLOCKS)[0]


# -- like one in this process -----------------------------------------------------------------------------------------


def test_the_reference_is_judged_through_the_pipe_as_it_is_here():
    """Every clause that can be carried is tested and passes; what is not tested is what the pipe does not carry."""
    here, there = (evaluate(name, seeds=(0,), steps=10) for name in ("cpu_reference.layouts:build_runner", CPU))
    assert there.passed, (there.failed, there.untested, there.errors)
    missing = set(there.skipped) - set(here.skipped)
    assert missing, "processors are objects: they cannot be carried"
    assert all(there.skipped[clause] == ("logits_processors",) for clause in missing)
    assert {c for c, n in there.tested.items() if n} == {c for c, n in here.tested.items() if n} - missing


@pytest.mark.parametrize("change", ["positions", "slots"])
def test_a_fault_behind_the_pipe_is_found(tmp_path, change):
    """The judge sees what the program built, not what it should have built."""
    (tmp_path / "faulty.py").write_text(
        textwrap.dedent(f"""
        from dataclasses import replace

        from cpu_reference.runner import CpuModelRunner


        class Faulty(CpuModelRunner):
            def last_step(self):
                record = super().last_step()
                if {change!r} == "positions":
                    return replace(record, positions=record.positions + (record.positions > 5))
                return replace(record, slot_mappings=record.slot_mappings + (record.slot_mappings > 20))
        """)
    )
    name = f"process:{SERVED} {tmp_path}/faulty.py:Faulty"
    found = evaluate(name, seeds=(0,), steps=10, enough=lambda e: bool(e.failed))
    assert {"positions": "MR-INPUT-002", "slots": "MR-SLOT-001"}[change] in found.failed


def test_it_is_a_model_runner_and_says_where_it_runs(cpu):
    runner = cpu(RunnerConfig())
    assert isinstance(runner, ModelRunner)
    here, there = load_runner("cpu").describe(), runner.describe()
    assert there.capabilities == here.capabilities - {Capability.LOGITS_PROCESSORS}
    assert there.notes == (
        f"in a process of its own: {cpu.command}", "not carried through the pipe: logits_processors",
    )  # fmt: skip
    assert (there.name, there.class_path, there.selection) == (here.name, here.class_path, here.selection)
    assert runner.capture_graphs() == ()
    assert runner.take_draft_token_ids() is None
    assert cpu.LAYOUTS == ("slots", "dense")
    assert cpu(RunnerConfig(layout="dense")).describe().layout == "dense"


def test_one_program_serves_many_runners_apart(cpu, ready):
    other = build_runner(cpu, MODEL, CONFIG, NUM_BLOCKS)[0]
    two_live(ready)
    assert ready.last_step().num_reqs == 2
    with pytest.raises(CallOrderError, match="no step has run"):
        other.last_step()
    assert ready.state_digest() != other.state_digest()
    two_live(other)
    assert ready.state_digest() == other.state_digest()


def test_runners_that_nobody_holds_are_shut_down(cpu, ready):
    lost = build_runner(cpu, MODEL, CONFIG, NUM_BLOCKS)[0]
    number, process = lost._number, cpu.process()
    del lost
    cpu(RunnerConfig())
    with pytest.raises(RunnerError, match="no such runner"):
        process.ask("describe", runner=number)
    two_live(ready)  # who is held is not touched


def test_a_program_that_ends_at_a_shutdown_is_started_again(tmp_path):
    factory = odd(tmp_path, "sys.exit(3)")
    lost, first = factory(RunnerConfig()), factory.process()
    del lost  # the next call shuts it down, which ends the program
    factory(RunnerConfig())
    assert factory.process() is not first
    assert factory.process().alive
    factory.close()


def test_outputs_may_be_taken_late_and_twice(ready):
    ready.execute_model(plan_of(new("a", [1, 2, 3], [1])))
    first = ready.sample_tokens()
    ready.execute_model(plan_of(cached={"a": (3, None)}))
    second = ready.sample_tokens()
    assert first.get_output().tokens()["a"] != second.get_output().tokens()["a"]
    assert first.get_output() == first.get_output()


def test_the_latest_outputs_alone_are_kept(ready):
    """A program that never forgets an output fills its memory."""
    handles = []
    for n in range(KEPT_OUTPUTS + 1):
        gone = frozenset({f"r{n - 1}"}) if n else frozenset()
        ready.execute_model(plan_of(new(f"r{n}", [1, 2, n % 50], [1]), finished_req_ids=gone))
        handles.append(ready.sample_tokens())
    with pytest.raises(RunnerError, match="no such output is kept"):
        handles[0].get_output()
    assert [h.get_output().req_ids for h in handles[1:]] == [(f"r{n}",) for n in range(1, KEPT_OUTPUTS + 1)]


def test_stages_run_alone(cpu):
    assert load_stages(cpu).stages.keys() == load_stages("cpu").stages.keys()
    here, there = load_stages("cpu"), load_stages(cpu)
    assert (there.backend, there.stages["move_rows"].outputs) == ("cpu", here.stages["move_rows"].outputs)
    given = {
        "num_scheduled_tokens": np.array([2, 1], np.int32),
        "num_reqs": 2,
        "query_start_loc": np.full(5, -9, np.int32),
    }
    out = there.run("prepare_query_start_loc", **given)
    assert out["query_start_loc"].tolist() == [0, 2, 3, 3, 3]
    assert out["query_start_loc"].dtype == np.int32
    assert given["query_start_loc"].tolist() == [-9] * 5
    with pytest.raises(UnknownNameError, match="prepare_query_start_loc"):
        cpu.process().ask("stage", name="prepare_query_start", arrays={})


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_refusals_come_back_as_themselves(ready):
    """Class, code, text and place, and the state is as before."""
    here = build_runner("cpu", MODEL, CONFIG, NUM_BLOCKS)[0]
    for runner in (here, ready):
        two_live(runner)
    before = ready.state_digest()
    for code, (plan, descriptor) in bad_plans().items():
        errors = []
        for runner in (here, ready):
            with pytest.raises(PlanError) as caught:
                runner.execute_model(plan, descriptor=descriptor)
            errors.append(caught.value)
        mine, told = errors
        assert told.code == mine.code == code
        assert (told.field or "").split(".")[0].split("[")[0] in (mine.field or "") or told.req_id == mine.req_id
        if code != "MR-ERR-020":  # a value of the wrong kind is refused where the line is read
            assert str(told) == str(mine)
    assert ready.state_digest() == before
    with pytest.raises(CallOrderError, match="MR-ERR-002"):
        ready.sample_tokens()


def test_a_bare_refusal_says_who_speaks_and_of_what(tmp_path):
    fault = "answer = {'id': request['id'], 'error': {'type': 'CapabilityError', 'text': 'slots layout only'%s}}"
    for more, said in (("", "process:{} describe: slots layout only"), (", 'field': 'layout'", "slots layout only")):
        factory = odd(tmp_path, fault % more)
        with pytest.raises(CapabilityError) as caught:
            built(factory).describe()
        assert str(caught.value) == said.format(factory.command)
        assert caught.value.what == "slots layout only"


def test_what_cannot_be_told_is_refused_as_a_runner_would(ready):
    odd = NewRequestData("a", iter([1]), [1], 0, ([1],), GREEDY)
    for plan in (plan_of(new("a", [1], [1]), finished_req_ids=["b"]), SchedulerOutput([odd]), "a plan"):
        with pytest.raises(PlanError, match="MR-ERR-020"):
            ready.execute_model(plan)
    good = plan_of(new("a", [1, 2, 3], [1]))
    for descriptor in (7, BatchDescriptor(1, 3), BatchDescriptor(CUDAGraphMode.NONE, 3.0)):
        with pytest.raises(PlanError, match="MR-ERR-043"):
            ready.execute_model(good, descriptor=descriptor)
    ready.execute_model(good)
    one = np.ones(1, np.int32)
    for forced in (7, ForcedStep([[5]], one), ForcedStep(np.zeros((1, 1), complex), one)):
        with pytest.raises(PlanError, match="MR-ERR-044"):
            ready.sample_tokens(forced=forced)
    for grammar in (7, GrammarOutput("a", np.zeros((1, 2), np.int32)), GrammarOutput(["a"], [[1, 2]])):
        with pytest.raises(PlanError, match="MR-ERR-049"):
            ready.sample_tokens(grammar)
    assert ready.sample_tokens().get_output().req_ids == ("a",)


def test_a_set_of_names_and_numbers_is_refused(ready):
    with pytest.raises(PlanError, match=r"MR-ERR-020.*finished_req_ids"):
        ready.execute_model(plan_of(finished_req_ids={1, "a"}))


def test_what_the_pipe_does_not_carry_is_refused(cpu, ready):
    with pytest.raises(CapabilityError, match="a model object"):
        cpu(RunnerConfig()).load_model(object())
    with pytest.raises(ConfigError, match="logits_processors"):
        cpu(RunnerConfig(logits_processors=(lambda *_: None,)))
    with pytest.raises(CapabilityError, match="intermediate_tensors"):
        ready.execute_model(plan_of(), intermediate_tensors=object())
    with pytest.raises(CapabilityError, match="pool"):
        ready.pool()
    with pytest.raises(CheckpointError, match=r"MR-ERR-007.*no such file"):
        cpu(RunnerConfig()).load_model("/nowhere/at/all")


def test_what_is_no_request_is_refused_and_the_program_goes_on(cpu):
    process = cpu.process()
    for op, fields, error, text in (
        ("steps", {}, UnknownNameError, "unknown operation 'steps'.*step"),
        ("_runner", {"number": 1}, UnknownNameError, "unknown operation"),
        ("step", {"runner": 1}, ConfigError, "step.*missing a required argument: 'plan'"),
        ("describe", {"runner": 1, "verbose": True}, ConfigError, "describe.*'verbose'"),
        ("describe", {"runner": "1"}, ConfigError, "an integer"),
        ("build", {"config": {"max_num_reqs": 0}}, ConfigError, "max_num_reqs"),
        ("load_model", {"runner": 1, "model": {}}, ConfigError, "no model"),
        ("start", {"spec_version": "1999"}, ConfigError, "another version"),
    ):
        with pytest.raises(error, match=text):
            process.ask(op, **fields)
    assert cpu(RunnerConfig()).describe().name == "cpu"


def test_methods_that_a_runner_lacks_are_refused_by_capability(tmp_path):
    (tmp_path / "bare.py").write_text(
        textwrap.dedent("""
        from cpu_reference.runner import CpuModelRunner


        class Bare:
            def __init__(self, config):
                self.inner = CpuModelRunner(config)
                for name in ("describe", "load_model", "get_kv_cache_specs", "initialize_kv_cache", "shutdown"):
                    setattr(self, name, getattr(self.inner, name))

            def execute_model(self, plan, *, descriptor=None):
                print("a stray print is no answer")
                raise KeyError("row 7")

            def sample_tokens(self, grammar=None, *, forced=None):
                raise NotImplementedError
        """)
    )
    factory = load_factory(f"process:{SERVED} {tmp_path}/bare.py:Bare")
    with pytest.raises(CapabilityError, match="offers no stages"):
        load_stages(factory)
    runner = factory(RunnerConfig())
    with pytest.raises(CapabilityError, match="no method last_step"):
        runner.last_step()
    with pytest.raises(RunnerError, match=r"failed in 'step': KeyError: 'row 7'.*stray print.*KeyError") as caught:
        runner.execute_model(plan_of())
    assert type(caught.value) is RunnerError, "a crash is not a refusal"
    assert runner.describe().name == "cpu"  # and the program goes on


def test_errors_of_any_content_are_answered(tmp_path):
    """The program goes on where an error has no text, or says of a request what JSON does not know."""
    (tmp_path / "odd_errors.py").write_text(
        textwrap.dedent("""
        import numpy as np

        from cpu_reference.runner import CpuModelRunner
        from runner_api import PlanError


        class Mute(Exception):
            def __str__(self):
                raise ValueError


        class Odd(CpuModelRunner):
            def execute_model(self, plan, *, descriptor=None):
                raise PlanError("no", code="MR-ERR-020", req_id=np.int64(3)) if descriptor is None else Mute
        """)
    )
    factory = ProcessFactory(f"{SERVED} {tmp_path}/odd_errors.py:Odd")
    runner = factory(RunnerConfig())
    with pytest.raises(PlanError, match=r"MR-ERR-020 \[np.int64\(3\)\]: no") as caught:
        runner.execute_model(plan_of())
    assert caught.value.req_id == "np.int64(3)"
    with pytest.raises(RunnerError, match="failed in 'step': Mute: <Mute without a text>"):
        runner.execute_model(plan_of(), descriptor=BatchDescriptor(CUDAGraphMode.NONE, 0))
    assert runner.describe().name == "cpu"
    factory.close()


def test_a_stage_must_fill_as_many_arrays_as_it_was_given(tmp_path):
    (tmp_path / "forgetful.py").write_text(
        textwrap.dedent("""
        from cpu_reference.runner import CpuModelRunner
        from runner_api.stages import StageSet, StageSpec


        class Forgetful(CpuModelRunner):
            @staticmethod
            def stages():
                spec = StageSpec("copy", lambda tables: tables.pop(), (), ("tables",))
                return StageSet("forgetful", {"copy": spec})
        """)
    )
    factory = ProcessFactory(f"{SERVED} {tmp_path}/forgetful.py:Forgetful")
    given = [np.zeros(2, np.int32), np.zeros(2, np.int32)]
    with pytest.raises(RunnerError, match=r"copy\.tables: another number of outputs.*got 1, expected 2"):
        load_stages(factory).run("copy", tables=given)
    factory.close()


# -- programs that break the protocol ---------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys, time
print("hello from stderr", file=sys.stderr, flush=True)
for line in sys.stdin:
    request = json.loads(line)
    answer = {"id": request["id"], "ok": None}
    if request["op"] == "start":
        answer["ok"] = {"spec_version": %(version)r, "name": "odd"}
    elif request["op"] == "build":
        answer["ok"] = {"runner": 1}
    else:
        %(fault)s
    print(json.dumps(answer), flush=True)
"""


def odd(tmp_path, fault, version=SPEC_VERSION):
    path = tmp_path / "odd.py"
    path.write_text(PROGRAM % {"fault": fault, "version": version})
    return ProcessFactory(f"{sys.executable} -S -E {path}", 20.0)


def built(factory, timeout=20.0):
    """A runner of a program that has started, however long that took; it waits this many seconds for an answer."""
    runner = factory(RunnerConfig())
    factory.process().timeout = timeout
    return runner


FAULTS = {
    "sys.exit(3)": "ended before it answered 'describe' .exit code 3.*hello from stderr",
    "os.kill(os.getpid(), 9)": "ended before it answered 'describe' .exit code -9",
    "sys.stderr.write('x' * 10**6); sys.exit('boom')": "exit code 1.*xxx.* | boom",
    "print('debug: 7')": "wrote something else to stdout.*debug: 7.*Print to stderr",
    "print('half a', end='', flush=True); sys.exit(3)": "ended before it answered.*got 'half a'",
    "print('Password:', end='', flush=True); time.sleep(30)": "no answer to 'describe'.*got 'Password:'",
    "print([1])": "wrote something else to stdout",
    "print('[' * 10**5)": "wrote something else to stdout",
    "answer['id'] = 7": "'describe' has another id .got 7, expected id 3",
    "del answer['ok']": "neither a result nor an error",
    "answer['error'] = {}": "neither a result nor an error",
    "answer['more'] = 1": "neither a result nor an error",
    "time.sleep(30)": "no answer to 'describe' within 0.5 s.*hello from stderr",
    "answer = {'id': request['id'], 'error': 'no'}": "cannot be read.*not an error",
    "answer = {'id': request['id'], 'error': {'type': 'Segfault', 'text': 'x'}}": "failed in 'describe': Segfault: x",
    "answer['ok'] = {'name': 'x'}": "answer to 'describe' cannot be read.*RunnerInfo lacks a field",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_programs_are_told_apart(tmp_path, fault):
    runner = built(odd(tmp_path, fault), timeout=0.5 if "sleep" in fault else 20.0)
    begin = time.monotonic()
    with pytest.raises(RunnerError, match=FAULTS[fault]) as caught:
        runner.describe()
    assert type(caught.value) is RunnerError
    assert time.monotonic() - begin < 10
    assert "\n" not in str(caught.value)


def test_an_ended_program_is_started_again(tmp_path):
    factory = odd(tmp_path, "sys.exit(3)")
    first, runner = factory.process(), factory(RunnerConfig())
    with pytest.raises(RunnerError, match="exit code 3"):
        runner.describe()
    with pytest.raises(RunnerError, match=r"ended before 'describe' was asked.*Build the runner again"):
        runner.describe()
    factory(RunnerConfig())
    second = factory.process()
    assert second is not first
    os.kill(second._popen.pid, signal.SIGKILL)
    second._popen.wait(10)
    factory(RunnerConfig())  # also one that died between two requests
    assert factory.process() is not second
    factory.close()


def test_noise_behind_an_answer_is_found_with_the_next_request(tmp_path):
    factory = odd(tmp_path, "answer['ok'] = {}; print(json.dumps(answer)); answer = 'bye'")
    runner = factory(RunnerConfig())
    assert runner.state_digest() == {}
    with pytest.raises(RunnerError, match=r"wrote something else to stdout when asked 'digest'.*bye"):
        runner.state_digest()


def test_requests_longer_than_a_pipe_go_through(cpu, ready, tmp_path):
    """Longer than what a pipe holds, both ways; and to a program that does not read on."""
    tokens = list(range(60)) * 4000
    with pytest.raises(PlanError):
        ready.execute_model(plan_of(new("a", tokens, [1])))
    deaf = built(odd(tmp_path, "os.close(0); time.sleep(30)"), timeout=0.5)
    with pytest.raises(RunnerError, match="no answer to 'digest'"):
        deaf.state_digest()
    blocked = built(odd(tmp_path, "time.sleep(30)"), timeout=0.5)
    with pytest.raises(RunnerError, match=r"no answer to 'step' within 0.5 s"):
        blocked.execute_model(plan_of(new("a", tokens, [1])))


def test_programs_that_cannot_be_started_or_speak_otherwise(tmp_path):
    for command, text in (
        ("/nowhere/runner --x", "cannot be started.*No such file"), ("", "no program is named"),
        ("'unclosed", "not a command line"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=text):
            load_factory(f"process:{command}")(RunnerConfig())
    with pytest.raises(ConfigError, match=r"another version.*got '1999.01', expected '20"):
        odd(tmp_path, "pass", version="1999.01")(RunnerConfig())
    with pytest.raises(RunnerError, match=r"'start'.*exit code"):
        load_factory(f"process:{sys.executable} -c 'raise SystemExit(4)'")(RunnerConfig())
    with pytest.raises(ConfigError, match="cannot be imported from 'no_such_module:x'"):
        load_factory(f"process:{SERVED} no_such_module:x")(RunnerConfig())


def test_the_time_to_wait_can_be_set(monkeypatch):
    assert ProcessFactory("x").timeout == 60.0
    assert ProcessFactory("x", 2).timeout == 2.0
    monkeypatch.setenv("MODELRUNNER_PROCESS_TIMEOUT", "300")
    assert ProcessFactory("x").timeout == 300.0
    for bad in ("soon", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("MODELRUNNER_PROCESS_TIMEOUT", bad)
        with pytest.raises(ConfigError, match="MODELRUNNER_PROCESS_TIMEOUT"):
            ProcessFactory("x")


def test_the_program_ends_with_us(tmp_path):
    """An orphan would keep a GPU; so the program ends when its requests end, and is killed if it does not listen."""
    factory = ProcessFactory(f"{SERVED} cpu")
    popen = factory.process()._popen
    factory.close()
    assert popen.returncode == 0
    stubborn = odd(tmp_path, "pass")
    popen = stubborn.process()._popen
    os.kill(popen.pid, signal.SIGSTOP)
    stubborn.process().close()
    assert popen.returncode == -signal.SIGKILL


def test_answers_are_one_line_each_and_strict_json(cpu):
    """As any other program would read them."""
    line = cpu.process()._exchange("describe", b'{"id": "mine", "op": "stages"}\n')
    answer = json.loads(line, parse_constant=pytest.fail)
    assert answer["id"] == "mine"
