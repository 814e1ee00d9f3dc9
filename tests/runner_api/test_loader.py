"""Runners by name or by path; nothing falls back."""

import sys
import types

import pytest

from runner_api import (
    CapabilityError,
    ConfigError,
    RunnerConfig,
    UnknownNameError,
    load_factory,
    load_runner,
    load_stages,
    runner_names,
)

CPU = "cpu_reference.runner:CpuModelRunner"


def test_the_installed_names():
    names = runner_names()
    assert names["cpu"] == "cpu_reference.layouts:build_runner"
    assert load_factory("cpu") is load_factory(names["cpu"])


def test_a_runner_is_built_from_its_config():
    runner = load_runner(CPU, RunnerConfig(max_num_reqs=3))
    assert runner.config.max_num_reqs == 3
    assert load_runner(CPU).config == RunnerConfig()
    assert "gather_block_tables" in load_stages(CPU).stages


def test_an_unknown_name_lists_the_nearest():
    with pytest.raises(UnknownNameError) as caught:
        load_runner("cpuu")
    assert "Did you mean 'cpu'" in str(caught.value)
    assert caught.value.field == "runner"


@pytest.mark.parametrize(
    "path",
    ["no_such_module:factory", "cpu_reference.runner:NoSuch", "cpu_reference.runner:", ":x", ".runner:x", "a b:c"],
)
def test_a_path_that_leads_nowhere(path):
    with pytest.raises(ConfigError) as caught:
        load_factory(path)
    assert path in str(caught.value)
    assert caught.value.hint
    assert caught.value.__cause__ is not None


def test_a_module_that_fails_when_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "broken_runner_module.py").write_text("raise RuntimeError('no driver')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="no driver"):
        load_factory("broken_runner_module:factory")


def test_a_nested_attribute_and_what_is_no_factory(monkeypatch):
    module = types.ModuleType("nested_runner_module")
    module.outer = types.SimpleNamespace(factory=lambda config: config, number=5)
    monkeypatch.setitem(sys.modules, "nested_runner_module", module)
    assert load_factory("nested_runner_module:outer.factory")(7) == 7
    with pytest.raises(ConfigError, match="callable"):
        load_factory("nested_runner_module:outer.number")
    with pytest.raises(CapabilityError, match="stages"):
        load_stages("nested_runner_module:outer.factory")


@pytest.mark.parametrize("name", [None, 5, ["cpu"]])
def test_what_is_neither_name_nor_factory(name):
    with pytest.raises(ConfigError, match="an installed name"):
        load_runner(name)


def raising(config):
    raise ValueError("no driver")


class Undescribed(load_factory(CPU)):
    """Says nothing of itself."""

    def describe(self):
        return "a runner"


@pytest.mark.parametrize(
    ("factory", "text"), [(raising, "no driver"), (lambda config: 5, "execute_model"), (Undescribed, "RunnerInfo")]
)
def test_a_factory_that_gives_no_runner(factory, text):
    with pytest.raises(ConfigError, match=text):
        load_runner(factory)
