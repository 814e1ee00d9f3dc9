"""`modelrunner kernels check`: what compiles, what does not, what is not declared, and what cannot be asked."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gpu_backend.triton_support")  # the compiler needs triton, and gpu_backend torch besides

from conformance.commands import kernels
from conformance.kernels_check import TARGETS, read_signatures
from runner_api import ConfigError

FOREIGN = """
import triton
import triton.language as tl

@triton.jit
def double(x):
    return x + x

@triton.jit
def copy_kernel(x, y, n, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i * stride, double(tl.load(x + i, mask=i < n, other=0)), mask=i < n)

@triton.jit
def breaking_kernel(x, n, BLOCK: tl.constexpr):
    for i in range(0, n, BLOCK):
        if i > 3:
            break
        tl.store(x + i, 1.0)
"""
DECLARED = """
[[kernel]]
name = "copy_kernel"
types = { "*fp32" = "x y" }
constants = { BLOCK = 128, stride = 1 }

[[kernel]]
name = "copy_kernel"
types = { "*fp16" = "x y", i64 = "n" }
constants = { BLOCK = 256, num_warps = 8 }
"""
BREAKING = """
[[kernel]]
name = "foreign:breaking_kernel"
types = { "*fp32" = "x" }
constants = { BLOCK = 128 }
"""


def check(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    kernels(parser.add_subparsers())
    args = parser.parse_args(["kernels", "check", *argv])
    return args.run(args)


@pytest.fixture
def foreign(tmp_path: Path) -> str:
    (tmp_path / "foreign.py").write_text(FOREIGN)
    return str(tmp_path / "foreign.py")


def signatures(tmp_path: Path, text: str) -> str:
    (tmp_path / "signatures.toml").write_text(text)
    return str(tmp_path / "signatures.toml")


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return {k["name"]: k for k in json.loads(capsys.readouterr().out)["kernels"]}


def test_our_kernels_compile_as_declared_beside_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("gpu_backend.kv_cache", "gpu_backend.staged_write", "--targets", "sm_90", "--json") == 0
    found = report(capsys)
    assert set(found) == {"_reshape_and_cache_kernel", "_apply_staged_writes_kernel"}
    for kernel in found.values():
        target = kernel["targets"]["sm_90"]
        assert kernel["ok"]
        assert target["ok"]
        assert target["error"] is None
        assert target["registers"] > 0
        assert target["shared"] >= 0
        assert target["spills"] == 0


def test_a_foreign_module_is_compiled_as_the_file_says(
    foreign: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = signatures(tmp_path, DECLARED + BREAKING)
    assert check(foreign, "--signatures", file, "--targets", "sm_90", "gfx942", "--json") == 1
    found = report(capsys)
    assert set(found) == {"copy_kernel", "breaking_kernel"}  # `double` is no kernel
    assert found["copy_kernel"]["ok"]
    assert len(found["copy_kernel"]["targets"]["gfx942"]["signatures"]) == 2
    # The interpreter takes a `break`, the compiler does not.
    assert not found["breaking_kernel"]["ok"]
    assert "signature 0: " in found["breaking_kernel"]["targets"]["sm_90"]["error"]


def test_a_kernel_without_a_declaration_fails(foreign: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(foreign, "--signatures", signatures(tmp_path, DECLARED), "--targets", "sm_90") == 1
    out = capsys.readouterr().out
    assert "foreign:breaking_kernel for sm_90: no declaration" in out
    assert "1 of 2 kernels compile" in out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("x y", "x z", "not parameters of the kernel: z"),
        ("BLOCK = 128, ", "", "constexpr parameter 'BLOCK' has no value"),
        ('"x y" }', '"x y", i32 = "stride" }', "both a type and a constant: stride"),
    ],
)
def test_a_declaration_that_does_not_fit_fails(
    foreign: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    file = signatures(tmp_path, DECLARED.replace(old, new, 1))
    assert check(foreign, "--signatures", file, "--targets", "sm_90", "--json") == 1
    assert message in report(capsys)["copy_kernel"]["targets"]["sm_90"]["error"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["runner_api.errors"], "no kernel found in runner_api.errors"),
        (["runner_api.no_such_module"], "No module named"),
        (["gpu_backend", "--targets", "h100"], "no such target"),
        (["gpu_backend", "--targets", ","], "no target"),
        (["gpu_backend.kv_cache", "--signatures", "no_such_file.toml"], "cannot be read"),
    ],
)
def test_misuse_is_told(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(*argv) == 2
    assert message in capsys.readouterr().err


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.kernels_check.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"triton, which is not installed.*pip install modelrunner\[gpu\]"):
        check("--targets", "sm_90")


def test_a_declared_kernel_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("gpu_backend.kv_cache", "--signatures", signatures(tmp_path, DECLARED)) == 2
    assert "no such kernel in the modules: copy_kernel" in capsys.readouterr().err


def test_a_compiler_that_dies_fails_its_kernel_only(
    tmp_path: Path, foreign: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module that kills the process while the second kernel is compiled."""
    deadly = FOREIGN + (
        "\nimport os, signal\nfrom triton.compiler import ASTSource\n_make = ASTSource.make_ir\n"
        "def make_ir(self, *a, **k):\n"
        "    if self.name == 'breaking_kernel':\n        os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    return _make(self, *a, **k)\nASTSource.make_ir = make_ir\n"
    )
    Path(foreign).write_text(deadly)
    file = signatures(tmp_path, BREAKING + DECLARED.replace("128", "64").replace("256", "512"))
    assert check(foreign, "--signatures", file, "--targets", "sm_90", "--json") == 1
    found = report(capsys)
    assert found["copy_kernel"]["ok"]
    assert "killed by SIGSEGV" in found["breaking_kernel"]["targets"]["sm_90"]["error"]


def test_a_signatures_file_may_be_json_and_must_declare(tmp_path: Path) -> None:
    path = tmp_path / "signatures.json"
    path.write_text(json.dumps({"kernel": [{"name": "k", "types": {"*i32": "x"}, "constants": {"BLOCK": 4}}]}))
    assert read_signatures(str(path)) == {"k": [{"types": {"*i32": "x"}, "constants": {"BLOCK": 4}}]}
    for text in ("[]", "{}", '{"kernel": [{"types": {}}]}'):
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_signatures(str(path))


@pytest.mark.slow
def test_all_our_kernels_compile_for_all_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--json") == 0
    found = report(capsys)
    assert len(found) >= 21
    for kernel in found.values():
        assert set(kernel["targets"]) == set(TARGETS)
        assert all(t["registers"] for t in kernel["targets"].values())
