"""The peers tool on a made-up package: files imported by path, stand-ins, patches, and a kernel judged by its name."""

from __future__ import annotations

import importlib
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

FILES = {
    "madeup/__init__.py": "raise RuntimeError('the package itself must not be imported')\n",
    "madeup/ops/scale.py": (
        "from madeup.config import FACTOR\nfrom madeup.ops.helpers import twice\n\n"
        "def scale(x):\n    return twice(x) * FACTOR\n"
    ),
    "madeup/ops/helpers.py": "def twice(x):\n    return x + x\n",
    "madeup/ops/stray.py": "import madeup.native\n",
    "madeup/ops/greedy.py": "from madeup.config import MORE\n",
}
SCALE, HELPERS = "madeup/ops/scale.py", "madeup/ops/helpers.py"
STUBS = {"madeup.config": {"FACTOR": 10}}


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peers.loader")


def wheel_of(folder: Path, files: dict[str, str]) -> Path:
    wheel = folder / "madeup-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def package(loader: Any, *files: str, patches: tuple[Any, ...] = (), stubs: Any = STUBS) -> Any:
    return loader.PeerPackage("madeup", "1.0", files, stubs, patches)


def test_files_are_imported_by_path_with_stand_ins(loader: Any, tmp_path: Path) -> None:
    taken = package(loader, SCALE, HELPERS)
    loader.unpack(wheel_of(tmp_path, FILES), taken, tmp_path / "out")
    with loader.loaded(taken, tmp_path / "out") as modules:
        assert modules[SCALE].scale(3) == 60
        assert modules[SCALE].__file__ == str(tmp_path / "out" / SCALE)
    assert not [name for name in sys.modules if name.split(".")[0] == "madeup"]
    assert not (tmp_path / "out/madeup/__init__.py").exists()


def test_an_import_that_nobody_decided_on_is_named(loader: Any, tmp_path: Path) -> None:
    taken = package(loader, "madeup/ops/stray.py")
    loader.unpack(wheel_of(tmp_path, FILES), taken, tmp_path / "out")
    with pytest.raises(loader.LoaderError, match=r"madeup\.native is imported"), loader.loaded(taken, tmp_path / "out"):
        pass
    assert not [name for name in sys.modules if name.split(".")[0] == "madeup"]


def test_an_attribute_that_a_stand_in_lacks_is_named(loader: Any, tmp_path: Path) -> None:
    taken = package(loader, "madeup/ops/greedy.py")
    loader.unpack(wheel_of(tmp_path, FILES), taken, tmp_path / "out")
    with pytest.raises(ImportError, match="MORE"), loader.loaded(taken, tmp_path / "out"):
        pass


def test_an_installed_copy_is_never_mixed_in(loader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = package(loader, HELPERS)
    loader.unpack(wheel_of(tmp_path, FILES), taken, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "madeup", importlib.import_module("json"))
    with pytest.raises(loader.LoaderError, match="imported already"), loader.loaded(taken, tmp_path / "out"):
        pass


def test_a_patch_changes_one_place_and_keeps_line_numbers(loader: Any, tmp_path: Path) -> None:
    patch = loader.Patch(HELPERS, "x + x", "x + x + 1", "a test")
    taken = package(loader, SCALE, HELPERS, patches=(patch,))
    loader.unpack(wheel_of(tmp_path, FILES), taken, tmp_path / "out")
    with loader.loaded(taken, tmp_path / "out") as modules:
        assert modules[SCALE].scale(3) == 70


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (HELPERS, "x - x", "x", "occurs 0 times"),
        (HELPERS, "x", "y", "occurs 3 times"),
        (HELPERS, "x + x", "x +\\\n x", "would move the lines"),
        ("madeup/ops/stray.py", "import", "from", "not among the chosen"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused(
    loader: Any, tmp_path: Path, file: str, old: str, new: str, message: str
) -> None:
    taken = package(loader, HELPERS, patches=(loader.Patch(file, old, new, "a test"),))
    with pytest.raises(loader.LoaderError, match=message):
        loader.unpack(wheel_of(tmp_path, FILES), taken, tmp_path / "out")


def test_a_file_that_moved_is_named(loader: Any, tmp_path: Path) -> None:
    with pytest.raises(loader.LoaderError, match=r"holds no madeup/ops/gone\.py"):
        loader.unpack(wheel_of(tmp_path, FILES), package(loader, "madeup/ops/gone.py"), tmp_path / "out")


# A kernel that doubles: from 5 elements on it forgets the last one. `most` of 8 stores one element too far.
KERNEL = """\
from madeup.triton_utils import tl, triton


@triton.jit
def _double_kernel(x_ptr, y_ptr, n, most, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0)
    tl.store(y_ptr + offset, x * 2, mask=offset < most)


def double(x, y, most):
    _double_kernel[(triton.cdiv(max(most, 1), 2),)](x, y, len(x), most, BLOCK=2)
"""
DOUBLE = "madeup/ops/double.py"


def doubling_family(harness: Any, torch: Any, most: Any) -> Any:
    """`most`: a case's number of elements -> how many the kernel stores."""

    def run(modules: Any, case: Any) -> Any:
        x = torch.from_numpy(case["x"].copy())
        y = torch.zeros_like(x)
        modules[DOUBLE].double(x, y, most(len(x)))
        return {"y": y.numpy()}

    def differ(case: Any, got: Any, notes: Counter[str]) -> str:
        notes["elements"] += len(case["x"])
        wrong = np.flatnonzero(got["y"] != 2 * case["x"])
        return f"y[{wrong[0]}] is {got['y'][wrong[0]]}" if len(wrong) else ""

    return harness.Family(
        title="doubling",
        file=DOUBLE,
        kernels=("_double_kernel",),
        oracle="2 x",
        draw=lambda rng, size: {"x": rng.integers(1, 9, 4 * size + 1)},
        run=run,
        differ=differ,
        smaller=lambda case: iter([{"x": case["x"][:-1]}] if len(case["x"]) > 1 else []),
        sizes=(1, 2),
        repeats=2,
    )


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("most", "kinds", "smallest"),
    [
        (lambda n: n, [], 0),
        (lambda n: n - 1 if n >= 5 else n, ["value"], 5),
        (lambda n: n + 1, ["out_of_bounds_write"], 1),
    ],
    ids=["right", "one too few", "one too many"],
)
def test_a_foreign_kernel_is_judged_by_name(
    loader: Any, tmp_path: Path, most: Any, kinds: list[str], smallest: int
) -> None:
    support = pytest.importorskip("gpu_backend.triton_support")
    if not support.INTERPRETED:
        pytest.skip("kernels are compiled in this process")
    import torch

    from conformance.triton_sanitizer import KernelFault, sanitize

    harness = importlib.import_module("peers.harness")
    stubs = {"madeup.triton_utils": {"tl": support.tl, "triton": support.triton}}
    taken = package(loader, DOUBLE, stubs=stubs)
    loader.unpack(wheel_of(tmp_path, {DOUBLE: KERNEL}), taken, tmp_path / "out")
    with loader.loaded(taken, tmp_path / "out") as modules:
        judge = harness.Judge(modules, lambda allow, order: sanitize(allow=allow, order=order), KernelFault)
        outcome = judge.judge(doubling_family(harness, torch, most))
    assert [f.wrong.kind for f in outcome.findings] == kinds
    assert outcome.cases == 4
    assert outcome.launches["_double_kernel"] == 4
    assert outcome.programs["_double_kernel"] >= 8
    for finding in outcome.findings:
        assert finding.cases == 4
        assert len(finding.case["x"]) == smallest
