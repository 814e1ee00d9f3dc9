"""Every computing file of gpu_backend has a twin in cpu_reference that reads alike: names, parameters, steps.

A reader of the one must find the same thing at the same place in the other; a stage may be swapped alone.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

ROOT = Path(__file__).parents[1]

# Files on one side only, with the reason.
ONE_SIDED = {
    "gpu_backend/triton_support.py": "where kernels run",
    "gpu_backend/packed_copy.py": "in NumPy there is nothing to send",
    "gpu_backend/copy_engine.py": "in NumPy there is nothing to send",
    "gpu_backend/dense/staging.py": "in NumPy there is nothing to send",
    "gpu_backend/group_tables.py": "in NumPy a list of arrays needs no address table",
    "cpu_reference/ragged.py": "a kernel finds the owner of a token by its program id",
    **dict.fromkeys(
        (
            f"gpu_backend/sample/{name}.py"
            for name in ("candidates", "cut", "draw", "group_bests", "keys", "row_params", "search")
        ),
        "the limits and the draw without sorting; the twin sorts",
    ),
}
# Names on one side only, with the reason.
ONE_SIDED_NAMES = {
    "runner.on_device": "a GPU must be made current",
    "runner.GpuModelRunner.kernel_launches": "the twin has no kernels",
    "stages.cpu_stages": "named after its backend",
    "stages.gpu_stages": "named after its backend",
    "inspection.host": "copies from the device",
    "block_table.BlockTables.count_gather": "the device gathers, and does not count",
    "async_output.start_for_host": "copies from the device, without waiting",
    "models.llama.to_torch": "weights come as NumPy arrays",
    "models.witness.witness_logits": "the twin needs one expression for it",
    "sample.noise.vocab_tiles": "how kernels are launched",
    "sample.grammar.send_masks": "in NumPy there is nothing to send",
}
# Functions whose parameters differ, with the reason.
OTHER_PARAMETERS = {
    "inspection.record_outcome": "built when asked for, from what the step kept",
    "kv_cache.allocate_kv_cache": "takes the device",
    "attn_metadata.AttentionMetadataBuilder.build": "takes the host's copy of query_start_loc: nothing is read back",
    "models.build_model": "takes the device",
    "sample.sampler.Sampler.observe": "takes the rows as the host knows them, too",
}
DEVICE_PARAMETERS = {"device", "copy_stream", "packed"}  # may come last, in methods


def modules(package: str) -> set[str]:
    return {str(p.relative_to(ROOT / package)) for p in (ROOT / package).rglob("*.py")} - {"__init__.py"}


def pairs() -> list[str]:
    return sorted(modules("cpu_reference") & modules("gpu_backend"))


def load(package: str, path: str) -> ModuleType:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return importlib.import_module(f"{package}.{name}")


def device_functions(module: ModuleType) -> dict[str, Any]:
    """What kernels call: Triton functions that are not launched themselves."""
    return {n: f.fn for n, f in vars(module).items() if hasattr(f, "fn") and not n.endswith("_kernel")}


def public(module: ModuleType) -> dict[str, Any]:
    """Public functions of a module, and public methods of its classes, by qualified name."""
    found = {}
    for name, value in vars(module).items():
        value = getattr(value, "fn", value)  # what a kernel's decorator hides
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(value):
            found |= {
                f"{name}.{method}": f
                for method, f in vars(value).items()
                if inspect.isfunction(f) and not method.startswith("_")
            }
        elif inspect.isfunction(value):
            found[name] = value
    return found


def neutral(name: str) -> str:
    return name.replace("CpuModelRunner", "ModelRunner").replace("GpuModelRunner", "ModelRunner")


def test_every_file_has_its_twin() -> None:
    lonely = {f"cpu_reference/{p}" for p in modules("cpu_reference") - modules("gpu_backend")}
    lonely |= {f"gpu_backend/{p}" for p in modules("gpu_backend") - modules("cpu_reference")}
    assert lonely == set(ONE_SIDED)


@pytest.mark.parametrize("path", pairs())
def test_public_functions_are_the_same_with_the_same_parameters(path: str) -> None:
    where = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    cpu, gpu = (public(load(package, path)) for package in ("cpu_reference", "gpu_backend"))
    kept = [{neutral(n): f for n, f in side.items() if f"{where}.{n}" not in ONE_SIDED_NAMES} for side in (cpu, gpu)]
    functions = [{n for n in side if "." not in n} for side in kept]
    inside = device_functions(load("gpu_backend", path))
    assert functions[0] <= functions[1], "a function of the twin is missing"
    assert functions[1] - functions[0] <= inside.keys(), "a function has no twin"
    assert {n for n in kept[0] if "." in n} <= kept[1].keys(), "a method of the twin is missing"
    for name in kept[0].keys() - inside.keys():
        here, there = (list(inspect.signature(side[name]).parameters) for side in kept)
        if f"{where}.{name}" in OTHER_PARAMETERS:
            assert here != there, f"{where}.{name} needs no exception"
            continue
        if "." in name:
            there = [p for p in there if p not in DEVICE_PARAMETERS]
        assert here == there, name


@pytest.mark.parametrize("path", pairs())
def test_twins_say_the_same_first_sentence_and_take_the_same_steps(path: str) -> None:
    cpu, gpu = load("cpu_reference", path), load("gpu_backend", path)
    for name, here in public(cpu).items():
        there = getattr(gpu, name, None)
        if "." in name or not inspect.isfunction(there):
            continue
        assert first_sentence(here) == first_sentence(there), name
        source = inspect.getsource(there)
        kernel = getattr(gpu, f"_{name}_kernel", None)
        if kernel is not None:
            parts = (kernel.fn, *device_functions(gpu).values())
            assert steps(inspect.getsource(here)) <= steps("".join(map(inspect.getsource, parts)) + source), name


def first_sentence(function: Any) -> str:
    text = " ".join((inspect.getdoc(function) or "").split())
    text = re.sub(r"float(32|64)", "float", text)  # the precision is each backend's own
    return re.split(r"(?<=[.:;])\s", text, maxsplit=1)[0].rstrip(".:;")


def steps(source: str) -> set[str]:
    """The numbers of the numbered comments."""
    return set(re.findall(r"^\s*# (\d+) ", source, re.MULTILINE))
