"""The light rooms import without torch, triton, transformers and matplotlib, and do not load them when present."""

import subprocess
import sys

HEAVY = ("torch", "triton", "transformers", "matplotlib")
ROOMS = ("runner_api", "cpu_reference", "engine_core", "conformance")


def fresh(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_rooms_import_where_the_heavy_packages_are_missing():
    """A finder in front of all others refuses them, as if they were not installed."""
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import {", ".join(ROOMS)}
from runner_api import *
import importlib, pkgutil
for room in (runner_api, cpu_reference):
    for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        importlib.import_module(module.name)
runner = runner_api.load_runner("cpu_reference.runner:CpuModelRunner")
runner.load_model(runner_api.WitnessConfig())
print(sorted(runner.get_kv_cache_specs()))
"""
    done = fresh(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['witness.0']"


def test_rooms_do_not_load_what_they_do_not_need():
    code = f"import sys, {', '.join(ROOMS)}, cpu_reference.runner; print([m for m in {HEAVY} if m in sys.modules])"
    done = fresh(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_contract_imports_none_of_the_other_rooms():
    code = (
        "import sys, runner_api; print([m for m in sys.modules if m.split('.')[0] in "
        + repr((*ROOMS[1:], "gpu_backend"))
        + "])"
    )
    done = fresh(code)
    assert done.stdout.strip() == "[]", done.stderr


def test_everything_promised_is_there():
    import runner_api

    assert all(hasattr(runner_api, name) for name in runner_api.__all__)
    assert sorted(set(runner_api.__all__)) == sorted(runner_api.__all__)
