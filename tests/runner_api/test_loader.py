"""Runners by name or by path; nothing falls back."""

import sys
import types
from dataclasses import replace

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


def leaving(config):
    raise SystemExit(0)


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


def mute(config):
    raise Mute


@pytest.mark.parametrize(
    ("factory", "text"),
    [(leaving, "test_loader:leaving' cannot be built: SystemExit: 0"), (mute, "Mute without a text")],
)
def test_what_a_factory_raises_is_told(factory, text):
    with pytest.raises(ConfigError, match=text):
        load_runner(factory)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", None), ("class_path", 1), ("version", 2.0), ("device", 5), ("dtype", float), ("layout", None),
        ("noise", ()), ("capabilities", ["generate"]), ("capabilities", frozenset({"generate"})), ("notes", None),
        ("notes", ["x"]), ("notes", (1,)), ("selection", "foo"),
    ],
)  # fmt: skip
def test_a_runner_must_describe_itself_in_the_right_types(field, value):
    class Odd(load_factory(CPU)):
        def describe(self):
            return replace(super().describe(), **{field: value})

    with pytest.raises(ConfigError, match=f"RunnerInfo.{field}"):
        load_runner(Odd)


def test_missing_stages_are_told_by_name_with_the_remedy():
    with pytest.raises(CapabilityError, match=r"runner 'test_loader:raising' offers no stages\. .*`stages`"):
        load_stages(raising)


# -- factories in files, and the environment ----------------------------------------------------------------------


def test_a_factory_in_a_file(tmp_path, monkeypatch):
    """Found by path, relative or not; the file's directory is no place to import from, and a changed file is read."""
    file = tmp_path / "my runner.py"
    file.write_text(
        "from dataclasses import dataclass\n\n@dataclass\nclass Factory:\n    config: int\n    version = 1\n"
    )
    before = list(sys.path)
    factory = load_factory(f"{file}:Factory")
    assert factory(7).config == 7
    assert load_factory(f"{file}:Factory") is factory
    assert sys.path == before
    monkeypatch.chdir(tmp_path)
    assert load_factory("my runner.py:Factory") is factory
    assert load_factory("./my runner.py:Factory") is factory
    file.write_text(file.read_text().replace("version = 1", "version = 2 # later"))
    assert load_factory(f"{file}:Factory").version == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"), ("x = ", "SyntaxError"), ("import no_such_module_at_all", "ModuleNotFoundError"),
        ("raise KeyError('x')", "KeyError"), ("factori = 1", "no attribute 'factory'"), ("factory = 1", "callable"),
    ],
)  # fmt: skip
def test_files_without_a_factory(tmp_path, text, message):
    file = tmp_path / "broken.py"
    if text is not None:
        file.write_text(text)
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=message):
        load_factory(f"{file}:factory")
    left = [name for name in set(sys.modules) - before if name.endswith("_broken")]
    assert len(left) == (message in ("no attribute 'factory'", "callable")), "half a module is left behind"


def test_one_program_for_each_command_line():
    assert load_factory("process:program --a") is load_factory("process:program --a")
    assert load_factory("process:program --a") is not load_factory("process:program --b")


def test_misspelt_environment_variables_are_refused(monkeypatch):
    monkeypatch.setenv("MODELRUNNER_LAYUOT", "dense")
    with pytest.raises(UnknownNameError, match=r"MODELRUNNER_LAYUOT.*MODELRUNNER_LAYOUT, MODELRUNNER_PROCESS_TIMEOUT"):
        load_factory("cpu")
    monkeypatch.delenv("MODELRUNNER_LAYUOT")
    load_factory("cpu")
