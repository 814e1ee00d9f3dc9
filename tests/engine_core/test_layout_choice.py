"""The engine decides the layout, its workers decide again, and whoever comes to another decision does not start."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from unittest import mock

import pytest
from engine_fake_runner import FakeRunner

from engine_core import cli
from engine_core.executor import InProcessExecutor, make_executor
from engine_core.llm import LLM
from engine_core.worker import Worker, WorkerConfig
from runner_api import CapabilityError, ConfigError, EngineError, RunnerConfig, SamplingParams, WitnessConfig
from runner_api.loader import decide_layout
from runner_api.selection import LAYOUT_VARIABLE, LayoutDecision, resolve_layout

FAKE = "engine_fake_runner:FakeRunner"
MODEL = WitnessConfig(32)


@pytest.fixture(autouse=True)
def _variable_is_unset(monkeypatch):
    monkeypatch.delenv(LAYOUT_VARIABLE, raising=False)


class Choosing(FakeRunner):
    """Asks the resolver, as a runner with several layouts must."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.selection = resolve_layout("choosing", config, self.LAYOUTS)
        self.layout = self.selection.layout

    def describe(self):
        return dataclasses.replace(super().describe(), selection=self.selection)


def engine(runner=Choosing, **options):
    return LLM(MODEL, runner, max_model_len=16, num_blocks=8, **options)


def layouts_of(llm):
    return llm.engine.scheduler.config.layout, llm.runner_info.layout


# -- the engine's plans have the layout that was chosen -----------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "options", "layout"),
    [
        (None, {}, "slots"), (None, {"layout": "dense"}, "dense"), ("dense", {}, "dense"),
        ("dense", {"layout": "slots"}, "slots"), (None, {"reorder_batch_threshold": 1}, "dense"),
        (None, {"num_speculative_tokens": 1}, "slots"),
    ],
)  # fmt: skip
def test_scheduler_and_runner_have_the_same_layout(monkeypatch, variable, options, layout):
    if variable is not None:
        monkeypatch.setenv(LAYOUT_VARIABLE, variable)
    with engine(**options) as llm:
        assert layouts_of(llm) == (layout, layout)
        selection = llm.runner_info.selection
        assert selection.digest == llm.engine.executor.config.selection.digest
        assert selection.requested == options.get("layout")
        assert llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=2))


def test_a_runner_without_a_choice_is_explained_all_the_same():
    with engine(FakeRunner) as llm:
        assert llm.runner_info.selection == decide_layout(FakeRunner, RunnerConfig(max_model_len=16))
        assert llm.runner_info.line().endswith(llm.runner_info.selection.line())


def test_what_cannot_be_is_refused_before_a_worker_is_built(monkeypatch):
    def never(*args):
        raise AssertionError("a worker was built")

    monkeypatch.setattr("engine_core.engine_config.make_executor", never)
    with pytest.raises(CapabilityError, match="lacks drafts"):
        engine(layout="dense", num_speculative_tokens=1)
    monkeypatch.setenv(LAYOUT_VARIABLE, "v1")
    with pytest.raises(ConfigError, match="'slots' or 'dense'"):
        engine()


# -- a worker that sees something else ----------------------------------------------------------------------------


class Elsewhere(InProcessExecutor):
    """Its worker lives in another environment than the engine."""

    variable = "dense"

    def __init__(self, config) -> None:
        with mock.patch.dict(os.environ, {LAYOUT_VARIABLE: self.variable}):
            super().__init__(config)


class ElsewhereSlots(Elsewhere):
    variable = "slots"


class ElsewhereNonsense(Elsewhere):
    variable = "v2"


def test_a_worker_with_another_environment_does_not_start():
    with pytest.raises(EngineError) as caught:
        engine(executor=Elsewhere)
    error = caught.value
    assert "MODELRUNNER_LAYOUT is dense, not unset" in error.what
    planned = decide_layout(Choosing, RunnerConfig(max_model_len=16))
    assert error.expected == planned.line()
    assert error.got.startswith("layout dense by environment")
    assert error.got in str(error)
    assert planned.line() in str(error)
    assert error.__notes__ == ["raised on rank 0 in init_device"]


def test_another_reason_for_the_same_layout_is_another_decision():
    with pytest.raises(EngineError, match="MODELRUNNER_LAYOUT is slots, not unset"):
        engine(executor=ElsewhereSlots)
    with pytest.raises(EngineError, match="is dense, not unset"):
        engine(executor=Elsewhere, layout="slots")  # overruled, but it should not be there
    with engine(executor=ElsewhereSlots, layout="slots") as llm:
        assert layouts_of(llm) == ("slots", "slots")  # it says the same as the configuration


def test_a_worker_whose_variable_names_no_layout_says_so():
    with pytest.raises(ConfigError, match="got 'v2'"):
        engine(executor=ElsewhereNonsense)


def test_a_worker_with_other_packages_does_not_start():
    config = RunnerConfig()
    planned = decide_layout(FAKE, config)
    other = dataclasses.replace(planned, packages={**planned.packages, "numpy": "1.0"}, digest="0" * 12)
    with pytest.raises(EngineError, match=r"numpy is .*, not 1\.0"):
        make_executor(WorkerConfig(FAKE, MODEL, config, other))
    make_executor(WorkerConfig(FAKE, MODEL, config, planned)).shutdown()


def test_a_worker_with_another_configuration_does_not_start():
    planned = decide_layout(FAKE, RunnerConfig(max_num_reqs=3))
    with pytest.raises(EngineError, match="the configuration is another"):
        make_executor(WorkerConfig(FAKE, MODEL, RunnerConfig(max_num_reqs=4), planned))


def test_a_worker_that_nobody_planned_for_decides_alone(monkeypatch):
    monkeypatch.setenv(LAYOUT_VARIABLE, "dense")
    worker = Worker(WorkerConfig(Choosing, MODEL))
    worker.init_device()
    assert worker.describe().layout == "dense"


class Deaf(FakeRunner):
    """Says that it can build both, and asks nobody which."""

    built = None

    def __init__(self, config) -> None:
        super().__init__(config)
        self.layout = "dense"
        Deaf.built = self


def test_a_runner_that_does_not_ask_does_not_start():
    with pytest.raises(EngineError, match="another layout than plans are made for") as caught:
        engine(Deaf)
    assert (caught.value.got, "layout slots by policy" in caught.value.expected) == ("dense", True)
    assert Deaf.built.is_shut_down


CHILD = """
import pickle, sys
from engine_core.worker import Worker
worker = Worker(pickle.load(open(sys.argv[1], "rb")))
try:
    worker.init_device()
    print(worker.describe().line())
except Exception as e:
    print(type(e).__name__, e)
"""


@pytest.mark.parametrize("variable", [None, "dense"])
def test_a_worker_in_a_process_of_its_own(tmp_path, variable):
    """The configuration travels pickled; the environment is whatever the process has."""
    config = RunnerConfig(max_num_reqs=3)
    planned = decide_layout("cpu", config)
    path = tmp_path / "config"
    path.write_bytes(pickle.dumps(WorkerConfig("cpu", MODEL, config, planned)))
    env = {name: value for name, value in os.environ.items() if name != LAYOUT_VARIABLE}
    if variable:
        env[LAYOUT_VARIABLE] = variable
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, timeout=120, check=True, env=env
    )
    if variable is None:
        assert done.stdout.strip().endswith(planned.line())
    else:  # refused for one of two reasons: the runner has no such layout, or it was not planned for
        assert done.stdout.startswith(("CapabilityError", "EngineError"))
        assert "MODELRUNNER_LAYOUT" in done.stdout


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys):
    def call(*argv):
        code = cli.main(["runners", *map(str, argv)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_explain_one_runner(run):
    code, out, err = run("--explain", FAKE)
    assert (code, err) == (0, "")
    assert out == decide_layout(FAKE, RunnerConfig()).explain() + "\n"
    assert "chosen         slots, by policy (the default)" in out
    assert "chosen         dense, by configuration" in run("--explain", FAKE, "--layout", "dense")[1]


def test_explain_what_forces_and_what_forbids(run):
    out = run("--explain", FAKE, "--option", "reorder_batch_threshold=4")[1]
    assert "forced by      a batch order by threshold" in out
    assert "slots          forbidden: lacks a batch order by threshold" in out
    out = run("--explain", FAKE, "--option", "max_num_reqs=2", "--option", "initial_free_rows=[1, 0]")[1]
    assert "dense          forbidden: lacks a list of free rows" in out
    assert (
        decide_layout(FAKE, RunnerConfig(noise="philox")).digest
        in run("--explain", FAKE, "--option", "noise=philox")[1]
    )


def test_explain_for_machines(run):
    code, out, _ = run("--explain", FAKE, "cpu", "--json", "--layout", "slots")
    assert code == 0
    fake, cpu = json.loads(out)
    assert (fake["name"], fake["target"], fake["error"]) == (FAKE, FAKE, None)
    assert cpu["target"].startswith("cpu_reference.")
    assert fake["decision"].keys() == {f.name for f in dataclasses.fields(LayoutDecision)}
    assert fake["decision"]["digest"] == decide_layout(FAKE, RunnerConfig(layout="slots")).digest
    help_text = run("--help")[1]
    for key in [*fake, *fake["decision"]]:
        assert key in help_text


def test_explain_all_that_are_installed(run, monkeypatch):
    monkeypatch.setattr("engine_core.explain.runner_names", lambda: {"cpu": "cpu", "broken": "no_such_module:x"})
    code, out, _ = run("--explain")
    assert code == 0
    assert out.startswith("broken\n  no layout      MR-ERR-")
    assert "cpu\n  chosen         slots" in out
    assert json.loads(run("--explain", "--json")[1])[0]["decision"] is None


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--explain", "nope"), "expected one of cpu"),
        (("--explain", "no_such_module_xyz:x"), "cannot be imported"),
        (("--explain", FAKE, "--layout", "dense", "--option", "num_speculative_tokens=2"), "lacks drafts"),
        (("--explain", FAKE, "--option", "max_num_seqs=2"), "max_num_reqs"),
        (("--explain", FAKE, "--option", "max_num_reqs=x"), "an integer >= 1"),
        (("--explain", FAKE, "--option", "noise"), "NAME=VALUE"),
        (("--explain", FAKE, "--option", "noise=x", "--option", "noise=y"), "given twice"),
        (("--explain", FAKE, "--layout", "rows"), "invalid choice"),
        ((FAKE, "--layout", "dense"), "--layout: changes nothing"),
        ((FAKE, "--option", "noise=philox"), "--option: changes nothing"),
        ((FAKE, "--vllm-version", "seed"), "--vllm-version: changes nothing"),
        (("--explain-vllm", "x.json", FAKE), "RUNNER: changes nothing"),
        (("--explain-vllm", "x.json", "--layout", "dense"), "--layout: changes nothing"),
        (("--explain-vllm", "x.json", "--explain"), "not allowed with"),
        (("--explain-vllm", "/no/such/file.json"), "FileNotFoundError"),
    ],
)  # fmt: skip
def test_misuse(run, argv, text):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert text in err
    assert err.startswith("usage") or err.count("\n") == 1


def test_a_variable_that_names_no_layout_is_misuse(run, monkeypatch):
    monkeypatch.setenv(LAYOUT_VARIABLE, "v1")
    code, out, err = run("--explain", "cpu")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "'slots' or 'dense'" in err


def test_the_list_names_the_layout_and_why(run):
    code, out, _ = run("cpu")
    assert code == 0
    assert f"layout        slots, by {decide_layout('cpu', RunnerConfig()).reason}" in out
    (entry,) = json.loads(run("cpu", "--json")[1])
    assert entry["selection"]["digest"] == decide_layout("cpu", RunnerConfig()).digest


# -- vLLM's choice ------------------------------------------------------------------------------------------------


@pytest.fixture
def config_file(tmp_path):
    def write(values):
        path = tmp_path / "config.json"
        path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
        return path

    return write


def test_explain_vllm(run, config_file):
    path = config_file({"is_moe": True, "architectures": ["Qwen3MoeForCausalLM"]})
    code, out, err = run("--explain-vllm", path)
    assert (code, err) == (0, "")
    assert "vLLM seed: V1 (the dense layout), not eligible: a mixture of experts that is not listed\n" in out
    assert "vLLM 0.33: V2 (the slots layout), policy default\n" in out
    assert "seed" not in run("--explain-vllm", path, "--vllm-version", "0.33")[1]
    code, out, _ = run("--explain-vllm", path, "--json")
    assert [(d["version"], d["runner"], d["layout"]) for d in json.loads(out)] == [
        ("seed", "V1", "dense"), ("0.33", "V2", "slots"),
    ]  # fmt: skip
    help_text = run("--help")[1]
    for key in [*json.loads(out)[0], "speculative_method", "has_triton", "xpress"]:
        assert key in help_text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ("{", "JSONDecodeError"), ("[1]", "one JSON object"), ({"is_mo": True}, "Did you mean 'is_moe'"),
        ({"env": 1}, "got 1"), ("", "JSONDecodeError"),
        ("[" * 100_000, "RecursionError"), ({"parse_mtp": True}, "speculative_method"),
    ],
)  # fmt: skip
def test_configurations_of_vllm_that_are_none(run, config_file, values, text):
    code, out, err = run("--explain-vllm", config_file(values))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert text in err


def test_a_configuration_in_another_encoding(run, config_file):
    path = config_file("x")
    path.write_bytes(b'{"env": "\xff"}')
    code, _, err = run("--explain-vllm", path)
    assert (code, err.count("\n")) == (2, 1)
    assert "UnicodeDecodeError" in err
