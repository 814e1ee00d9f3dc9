"""`modelrunner kernels check`: do kernels compile for GPUs that are not there, and what do they cost?

The compiling is done by `conformance.triton_sanitizer.compiler` in processes of its own, without the interpreter; here
the work is shared out, a compiler that dies is told from one that refuses, and the answers are put together.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from runner_api.errors import ConfigError

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
OWN_KERNELS = "gpu_backend"
WORKERS = 2
NUMBERS = ("registers", "shared", "spills")

SIGNATURES_HELP = """\
A kernel is a @triton.jit function that gives no value back and that no other one calls. How it is launched must be
declared: beside the kernel (its attribute compile_signatures), or in FILE, which is TOML (or JSON of the same form):

  [[kernel]]
  name = "my_package.kernels:copy_kernel"      # or copy_kernel alone
  types = { "*fp32" = "x y", i64 = "n" }       # type to parameters; those named nowhere are i32
  constants = { BLOCK = 128, DTYPE = "tl.float16", stride = 1, num_warps = 8 }

Several entries of one name are several ways of launching it; each is compiled. Exit codes: 0 all compile, 1 some do
not or are not declared, 2 misuse (no kernel found, a module that cannot be imported, an unreadable FILE).
"""


class CompilerProcessError(Exception):
    """The compiling process could not even list the kernels."""


def read_signatures(path: str) -> dict[str, list[dict[str, Any]]]:
    """Declarations by kernel name out of a signatures file. Raises: ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot be read: {e}", field="signatures", got=path, expected="a TOML or JSON file") from e
    declared: dict[str, list[dict[str, Any]]] = {}
    for entry in content.get("kernel", []) if isinstance(content, dict) else []:
        types, constants = entry.get("types", {}), entry.get("constants", {})
        if not (isinstance(entry.get("name"), str) and isinstance(types, dict) and isinstance(constants, dict)):
            raise ConfigError(
                "an entry has no name, or its types or constants are no table", field="signatures", got=entry,
                expected="name, types, constants", hint="See `modelrunner kernels check --help`",
            )  # fmt: skip
        declared.setdefault(entry["name"], []).append({"types": types, "constants": constants})
    if not declared:
        raise ConfigError("declares no kernel", field="signatures", got=path, expected="at least one [[kernel]]")
    return declared


def check_kernels(
    modules: list[str], declared: dict[str, list[dict[str, Any]]], targets: list[str], workers: int = WORKERS
) -> list[dict[str, Any]]:
    """Compile every kernel of the modules for every target: one entry per kernel, as in the command's JSON.

    Raises: CompilerProcessError if a module cannot be imported or a declared kernel is not there.
    """
    with ThreadPoolExecutor(workers) as pool:
        jobs = [(modules, declared, targets, (i, workers)) for i in range(workers)]
        shares = list(pool.map(lambda job: _compile_share(*job), jobs))
    kernels = shares[0][0]
    results = {key: result for _, done in shares for key, result in done.items()}
    return [_entry(i, kernel, targets, results) for i, kernel in enumerate(kernels)]


def _compile_share(
    modules: list[str], declared: dict[str, list[dict[str, Any]]], targets: list[str], share: tuple[int, int]
) -> tuple[list[dict[str, Any]], dict[tuple[int, int, str], dict[str, Any]]]:
    """One worker's results by (kernel, signature, target). A compiler that dies fails what it was compiling, and a
    new one goes on behind that."""
    kernels: list[dict[str, Any]] | None = None
    results: dict[tuple[int, int, str], dict[str, Any]] = {}
    while True:
        job = {"modules": modules, "declared": declared, "targets": targets, "share": share, "skip": len(results)}
        rc, facts, stderr = _run_compiler(job)
        started = None
        for fact in facts:
            if "error" in fact:
                raise CompilerProcessError(fact["error"])
            kernels = fact.get("kernels", kernels)
            started = tuple(fact["start"]) if "start" in fact else started
            if "done" in fact:
                results[tuple(fact["done"])] = fact["result"]
        if kernels is None or (rc != 0 and (started is None or started in results)):
            raise CompilerProcessError(f"the compiling process {_ending(rc)}: {stderr.strip()[-2000:]}")
        if rc == 0:
            return kernels, results
        results[started] = {"ok": False, "error": f"the compiler {_ending(rc)}", **dict.fromkeys(NUMBERS)}


def _run_compiler(job: dict[str, Any]) -> tuple[int, list[dict[str, Any]], str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "conformance.triton_sanitizer.compiler"],
        input=json.dumps(job), capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def _ending(rc: int) -> str:
    return f"was killed by {signal.Signals(-rc).name}" if rc < 0 else f"ended with exit code {rc}"


def _entry(
    i: int, kernel: dict[str, Any], targets: list[str], results: dict[tuple[int, int, str], dict[str, Any]]
) -> dict[str, Any]:
    """One kernel of the report. Over its signatures: the largest of each number, the first error."""
    by_target = {}
    for target in targets:
        ways = [results[i, j, target] for j in range(kernel["signatures"])]
        error = next((f"signature {j}: {w['error']}" for j, w in enumerate(ways) if not w["ok"]), None)
        if not ways:
            error = "no declaration of how it is launched"
        largest = {n: max((w[n] for w in ways if w[n] is not None), default=None) for n in NUMBERS}
        by_target[target] = {"ok": error is None, "error": error, **largest, "signatures": ways}
    ok = all(t["ok"] for t in by_target.values())
    return {"name": kernel["name"], "module": kernel["module"], "ok": ok, "targets": by_target}


def run_kernels_check(args: argparse.Namespace) -> int:
    """`modelrunner kernels check`: 0 = all compile, 1 = some do not, 2 = misuse."""
    targets = [t for text in args.targets for t in text.split(",") if t]
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("kernels are compiled by triton, which is not installed", hint="pip install modelrunner[gpu]")
    try:
        if not targets:
            raise ConfigError("no target", field="targets", got=args.targets, expected=", ".join(TARGETS))
        for target in targets:
            if not re.fullmatch(r"sm_\d+|gfx\w+", target):
                raise ConfigError("no such target", field="targets", got=target, expected="sm_90, gfx942, …")
        declared = read_signatures(args.signatures) if args.signatures else {}
        kernels = check_kernels(args.modules or [OWN_KERNELS], declared, targets)
    except (ConfigError, CompilerProcessError) as e:
        print(f"modelrunner kernels check: {e}", file=sys.stderr)
        return 2
    if not kernels:
        print(f"modelrunner kernels check: no kernel found in {', '.join(args.modules)}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"kernels": kernels}, indent=1))
    else:
        _print_report(kernels, targets)
    return 0 if all(k["ok"] for k in kernels) else 1


def _print_report(kernels: list[dict[str, Any]], targets: list[str]) -> None:
    width = max(len(k["name"]) for k in kernels)
    print("registers / shared bytes / spills".ljust(width) + "".join(f"{t:>18}" for t in targets))
    for k in kernels:
        print(k["name"].ljust(width) + "".join(f"{_cell(k['targets'][t]):>18}" for t in targets))
    for k in kernels:
        for target, t in k["targets"].items():
            if not t["ok"]:
                print(f"\n{k['module']}:{k['name']} for {target}: {t['error']}")
    failed = sum(not k["ok"] for k in kernels)
    print(f"\n{len(kernels) - failed} of {len(kernels)} kernels compile for {', '.join(targets)}")


def _cell(t: dict[str, Any]) -> str:
    return " / ".join("?" if t[n] is None else str(t[n]) for n in NUMBERS) if t["ok"] else "FAILS"
