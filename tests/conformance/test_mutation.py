"""The mutant machinery: one change, in a copy, and nothing of it left behind."""

from __future__ import annotations

import importlib
import inspect
import linecache
import sys
import textwrap

import numpy as np
import pytest

from conformance.mutation import mutated, rewrite_imports
from runner_api import ConfigError, RunnerConfig, load_factory, load_stages

PATH, OLD, NEW = "slot_mapping.py", "slot_mappings[g, num_tokens:] = PAD_SLOT_ID", "pass"
MAPPING = {
    "idx_mapping": np.arange(4), "query_start_loc": np.int32([0, 1, 1, 1, 1]), "positions": np.int64([3, 0]),
    "block_sizes": [8], "slot_mapping_enabled": [True], "dcp_sharded": [True], "dcp_size": 1, "dcp_rank": 0,
    "dcp_interleave": 1, "num_reqs": 1, "block_tables": [np.int32([[2]] * 4)],
    "slot_mappings": np.full((1, 2), 9),
}  # fmt: skip


def aliases() -> list[str]:
    return [name for name in sys.modules if name.startswith("_mutant_")]


def slots(stages) -> list[int]:
    return stages.run("compute_slot_mappings", **MAPPING)["slot_mappings"][0].tolist()


def test_several_places_change_together() -> None:
    tail = (PATH, "slot_mappings[g] = PAD_SLOT_ID", "slot_mappings[g] = 4")
    other = (
        "input_batch.py",
        "input_ids[query_start_loc[num_reqs] :] = 0",
        "input_ids[query_start_loc[num_reqs] :] = 5",
    )
    with mutated("cpu", PATH, OLD, NEW, tail, other) as mutant:
        stages = mutant.factory.stages()
        assert slots(stages) == [19, 9]
        off = stages.run("compute_slot_mappings", **MAPPING | {"slot_mapping_enabled": [False]})
        assert off["slot_mappings"].tolist() == [[4, 4]]
        assert "= 5" in inspect.getsource(stages.stages["combine_sampled_and_draft_tokens"].fn)
    with (
        pytest.raises(ConfigError, match="the text to replace occurs 0 times"),
        mutated("cpu", PATH, OLD, NEW, (PATH, OLD, "pass")),
    ):
        pass
    assert aliases() == []


def test_the_copy_is_changed_and_the_original_is_not() -> None:
    original = importlib.import_module("cpu_reference.slot_mapping")
    before = original.compute_slot_mappings
    with mutated("cpu", PATH, OLD, NEW) as mutant:
        assert slots(mutant.factory.stages()) == [19, 9]
        assert slots(load_stages("cpu")) == [19, -1]
        assert slots(load_stages(mutant.target)) == [19, 9]
        assert mutant.factory is not load_factory("cpu")
    assert importlib.import_module("cpu_reference.slot_mapping") is original
    assert original.compute_slot_mappings is before
    assert slots(load_stages("cpu")) == [19, -1]


def test_every_module_of_the_copy_refers_to_the_copy() -> None:
    with mutated("cpu", PATH, OLD, NEW) as mutant:
        runner = mutant.factory(RunnerConfig())
        assert runner.describe().class_path.startswith(mutant.alias + ".")
        for name in aliases():
            module = sys.modules[name]
            for key, value in vars(module).items():
                home = getattr(value, "__module__", None) or ""
                assert not str(home).startswith("cpu_reference"), f"{name}.{key} comes from the original"
        # Shared with the original: the contract, so that errors and outputs are the same classes.
        module = sys.modules[mutant.factory.__module__]
        assert module.RunnerConfig is RunnerConfig


def test_nothing_is_left_behind_even_after_an_exception() -> None:
    finders, cached = list(sys.meta_path), set(linecache.cache)

    def fail_inside() -> None:
        with mutated("cpu", PATH, OLD, NEW):
            assert aliases()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert not aliases()
    assert sys.meta_path == finders
    assert not {name for name in set(linecache.cache) - cached if "_mutant_" in name}
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("_mutant_0_cpu_reference")


def test_two_copies_can_live_side_by_side() -> None:
    with mutated("cpu", PATH, OLD, NEW) as first, mutated("cpu", PATH, "[g, num_tokens:]", "[g, 9:]") as second:
        assert first.alias != second.alias
        assert slots(second.factory.stages()) == [19, 9]
        assert slots(first.factory.stages()) == [19, 9]
    assert not aliases()


def test_a_package_path_names_the_same_runner() -> None:
    with mutated("cpu_reference.runner:CpuModelRunner", PATH, OLD, NEW) as mutant:
        assert slots(mutant.factory.stages()) == [19, 9]


def test_source_is_that_of_the_mutant() -> None:
    with mutated("cpu", PATH, OLD, "slot_mappings[g, num_tokens + 1 :] = PAD_SLOT_ID") as mutant:
        changed = mutant.factory.stages().stages["compute_slot_mappings"].fn
        assert "num_tokens + 1 :] = PAD_SLOT_ID" in inspect.getsource(changed)
        unchanged = mutant.factory.stages().stages["post_update"].fn
        original = load_stages("cpu").stages["post_update"].fn
        assert inspect.getsource(unchanged) == inspect.getsource(original)
        assert inspect.getsourcelines(unchanged)[1] == inspect.getsourcelines(original)[1]
        runner_module = sys.modules[mutant.factory.__module__]
        assert f"from {mutant.alias}.runner import" in inspect.getsource(runner_module)


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        (PATH, "no such text", "x", "occurs 0 times"),
        (PATH, "PAD_SLOT_ID", "0", "occurs 5 times"),
        (PATH, "", "x", "occurs 0 times"),
        (PATH, OLD, OLD, "nothing changes"),
        (PATH, OLD, "slot_mappings[g, = 1", "not Python"),
        ("no_such_file.py", OLD, NEW, "no such file"),
        ("../runner_api/plan.py", "total_num_scheduled_tokens: int = 0", "x", "no such file"),
    ],
)  # fmt: skip
def test_a_change_that_does_not_fit_is_refused(path: str, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message), mutated("cpu", path, old, new):
        pass
    assert not aliases()


def test_a_module_without_a_package_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a package"), mutated("string:Formatter", "string.py", "a", "b"):
        pass
    with pytest.raises(ConfigError, match="unknown runner"), mutated("cpy", PATH, OLD, NEW):
        pass


def test_imports_of_every_form_are_rewritten_and_lines_stay() -> None:
    source = textwrap.dedent(
        """\
        import p
        import p.a as x, os
        from p import (
            b,
        )
        def f():
            "p.a"; from p.c import d  # p.a
            import p.e
            return p.e.p
        from .p import z
        from papa import p as q; é = 1; from  p.f import g
        """
    )
    assert rewrite_imports(source, "p", "M") == textwrap.dedent(
        """\
        import M, M as p
        import M.a as x, os
        from M import (
            b,
        )
        def f():
            "p.a"; from M.c import d  # p.a
            import M.e, M as p
            return p.e.p
        from .p import z
        from papa import p as q; é = 1; from  M.f import g
        """
    )


def test_an_edited_file_is_read_again(tmp_path, monkeypatch) -> None:
    package = tmp_path / "toy_runner"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "numbers.py").write_text("one = 1\n")
    (package / "runner.py").write_text("import toy_runner.numbers\nfactory = lambda: toy_runner.numbers.one + 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with mutated("toy_runner.runner:factory", "runner.py", "+ 0", "+ 10") as mutant:
        assert mutant.factory() == 11
    (package / "numbers.py").write_text("one = 2  # longer\n")
    with mutated("toy_runner.runner:factory", "runner.py", "+ 0", "+ 10") as mutant:
        assert mutant.factory() == 12
    assert "toy_runner.runner" not in sys.modules
