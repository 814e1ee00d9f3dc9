"""Compile Triton kernels for targets that are not there: no GPU, no driver, no launch.

Runs as its own process (`python -m conformance.triton_sanitizer.compiler`), because one process cannot both interpret
and compile. Reads one JSON job from stdin, writes one JSON line per fact to stdout: first what kernels there are, then
a `start` and a `done` line for each compilation of its share, so that whoever started it knows what a crash was about.
`conformance.kernels_check` is that other side.

Which functions are kernels: `@triton.jit` functions that give no value back and that no other `@triton.jit` function
of the modules calls, and all that are declared.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, KernelInterface

triton.knobs.runtime.interpret = False  # a module that asks for the interpreter gets compiled kernels all the same

# Keywords of a declaration that are options of the launch, not parameters of the kernel.
LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion", "maxnreg")


class DeclarationError(Exception):
    """A declaration that does not fit its kernel."""


@dataclass(frozen=True)
class Kernel:
    """An entry kernel and the ways in which it is launched: `{"types", "constants"}` each."""

    module: str
    name: str
    fn: JITFunction
    signatures: tuple[dict[str, Any], ...]


def find_kernels(modules: list[str], declared: dict[str, list[dict[str, Any]]]) -> list[Kernel]:
    """The entry kernels of the modules (a package: of all its modules), in order of their source.

    declared: signatures by `module:kernel` or plain kernel name; they add to what stands beside the kernel.
    Raises: DeclarationError if a declared name is not found.
    """
    found, called = [], set()
    for module in _modules(modules):
        functions = {n: f for n, v in vars(module).items() if (f := _unwrapped(v)) and _home(f) == module.__name__}
        found.append((module, functions))
        called.update(*(_names_called(fn) for fn in functions.values()))
    kernels, unused = [], set(declared)
    for module, functions in found:
        for name, fn in functions.items():
            keys = {f"{module.__name__}:{name}", name} & set(declared)
            unused -= keys
            beside = getattr(vars(module)[name], "compile_signatures", None) or getattr(fn, "compile_signatures", ())
            signatures = (*beside, *(s for key in sorted(keys) for s in declared[key]))
            if signatures or not (name in called or _gives_a_value(fn)):
                kernels.append(Kernel(module.__name__, name, fn, signatures))
    if unused:
        raise DeclarationError(f"no such kernel in the modules: {', '.join(sorted(unused))}")
    return kernels


def _modules(names: list[str]) -> Iterator[ModuleType]:
    """Each module named, by import name or as a file; of a package every module inside."""
    for name in names:
        if name.endswith(".py"):
            path = Path(name)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
            yield module
            continue
        module = importlib.import_module(name)
        yield module
        for item in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
            yield importlib.import_module(item.name)


def _unwrapped(value: Any) -> JITFunction | None:
    """The jitted function inside autotuning and heuristics, or None."""
    while isinstance(value, KernelInterface) and not isinstance(value, JITFunction) and hasattr(value, "fn"):
        value = value.fn
    return value if isinstance(value, JITFunction) else None


def _home(fn: JITFunction) -> str:
    return fn.fn.__module__


def _tree(fn: JITFunction) -> ast.AST:
    return ast.parse(fn.src)


def _names_called(fn: JITFunction) -> set[str]:
    called = (n.func for n in ast.walk(_tree(fn)) if isinstance(n, ast.Call))
    return {f.id if isinstance(f, ast.Name) else f.attr for f in called if isinstance(f, ast.Name | ast.Attribute)}


def _gives_a_value(fn: JITFunction) -> bool:
    return any(isinstance(n, ast.Return) and n.value is not None for n in ast.walk(_tree(fn)))


def target_of(name: str) -> GPUTarget:
    """`sm_90` and `gfx942` as Triton's targets."""
    if m := re.fullmatch(r"sm_(\d+)", name):
        return GPUTarget("cuda", int(m[1]), 32)
    return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)


def source_of(kernel: JITFunction, declaration: dict[str, Any]) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton compiles, and the launch's options.

    Pointers are taken as multiples of 16 bytes, as allocators give them. Raises: DeclarationError.
    """
    params = [p.name for p in kernel.params]
    constexprs = {p.name for p in kernel.params if p.is_constexpr}
    type_of = {n: kind for kind, names in declaration["types"].items() for n in names.split()}
    constants = {k: _constant(v) for k, v in declaration["constants"].items()}
    options = {k: constants.pop(k) for k in LAUNCH_OPTIONS if k in constants and k not in params}
    if unknown := (type_of.keys() | constants.keys()) - set(params):
        raise DeclarationError(f"not parameters of the kernel: {', '.join(sorted(unknown))}")
    if twice := type_of.keys() & constants.keys():
        raise DeclarationError(f"both a type and a constant: {', '.join(sorted(twice))}")
    signature = inspect.signature(kernel.fn).parameters
    for name in sorted(constexprs - constants.keys()):
        if signature[name].default is inspect.Parameter.empty:
            raise DeclarationError(f"constexpr parameter {name!r} has no value")
        constants[name] = signature[name].default
    types = {n: "constexpr" if n in constants else type_of.get(n, "i32") for n in params}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(params) if types[n].startswith("*")}
    return ASTSource(kernel, types, constants, attrs), options


def _constant(value: Any) -> Any:
    """A value as it is, or the type that a string "tl.float16" names."""
    if isinstance(value, str) and value.startswith("tl."):
        return getattr(tl, value[3:])
    return value


def compile_kernel(kernel: JITFunction, declaration: dict[str, Any], target: str) -> dict[str, Any]:
    """Compile one kernel one way: `{"ok", "error", "registers", "shared", "spills"}`.

    registers: per thread; shared: bytes per program; spills: bytes of local memory per thread on NVIDIA, registers
    kept in memory on AMD. A number that the toolchain does not tell is None.
    """
    facts: dict[str, Any] = {"ok": False, "error": None, "registers": None, "shared": None, "spills": None}
    try:
        source, options = source_of(kernel, declaration)
        compiled = triton.compile(source, target=target_of(target), options=options)
    except Exception as e:  # whatever the compiler does not like
        return facts | {"error": f"{type(e).__name__}: {e}".strip()}
    facts |= {"ok": True, "shared": compiled.metadata.shared}
    if "cubin" in compiled.asm:
        return facts | _usage_of_cubin(compiled.asm["cubin"])
    return facts | _usage_of_amdgcn(compiled.asm.get("amdgcn", ""))


def _usage_of_cubin(cubin: bytes) -> dict[str, Any]:
    """Asks the cuobjdump that Triton ships."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = {key: int(n) for key, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told)}
    return {"registers": found.get("REG"), "spills": found["STACK"] + found["LOCAL"] if "STACK" in found else None}


def _usage_of_amdgcn(text: str) -> dict[str, Any]:
    """Reads the note that the AMD backend leaves in its assembly."""
    found = {key: int(n) for key, n in re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s*(\d+)", text)}
    spills = [found[k] for k in ("vgpr_spill_count", "sgpr_spill_count") if k in found]
    return {"registers": found.get("vgpr_count"), "spills": sum(spills) if spills else None}


def _say(**fact: Any) -> None:
    print(json.dumps(fact), flush=True)


def main() -> int:
    """Job: modules, declared, targets, share (this process takes tasks share[0], share[0] + share[1], …), skip (how
    many of its tasks are done already)."""
    job = json.load(sys.stdin)
    facts, sys.stdout = sys.stdout, sys.stderr  # what modules and compilers print is no fact
    try:
        kernels = find_kernels(job["modules"], job["declared"])
    except Exception as e:  # importing runs foreign code
        sys.stdout = facts
        _say(error=f"{type(e).__name__}: {e}")
        return 2
    sys.stdout = facts
    _say(kernels=[{"module": k.module, "name": k.name, "signatures": len(k.signatures)} for k in kernels])
    tasks = [(i, j, t) for i, k in enumerate(kernels) for j in range(len(k.signatures)) for t in job["targets"]]
    first, step = job["share"]
    for i, j, target in tasks[first::step][job["skip"] :]:
        _say(start=[i, j, target])
        sys.stdout = sys.stderr
        result = compile_kernel(kernels[i].fn, kernels[i].signatures[j], target)
        sys.stdout = facts
        _say(done=[i, j, target], result=result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
