"""Import single files of a package that is not installed, with stand-ins for what they import.

A wheel becomes a folder of a few patched files, and these become modules under their own dotted names: a file may
import another chosen file, a stand-in, or anything installed here. Any other import out of the package fails with the
name that needs a decision. Knows no particular package; what vLLM needs is in vllm_package.py.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any


class LoaderError(RuntimeError):
    """A file, an import or a patch that does not fit the package at hand."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One change of one line, so that line numbers stay those of the original file.

    `old` must occur exactly `times` times in `file`: a package that moved on is noticed, never half patched.
    """

    file: str
    old: str
    new: str
    reason: str
    times: int = 1

    def apply(self, text: str) -> str:
        """The file's text with the change made. Raises LoaderError where it does not fit."""
        found = text.count(self.old)
        if found != self.times:
            raise LoaderError(
                f"patch of {self.file}: {self.old!r} occurs {found} times, expected {self.times}; "
                "compare the patch with the package's version"
            )
        if self.old.count("\n") != self.new.count("\n"):
            raise LoaderError(f"patch of {self.file}: {self.old!r} would move the lines behind it")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class PeerPackage:
    """What to take from a package.

    files: paths inside the wheel, for instance "pkg/ops/topk.py"; stubs: dotted module name -> its attributes, for
    modules that are imported but not taken; patches: changes without which the interpreter cannot run a file.
    """

    name: str
    version: str
    files: tuple[str, ...]
    stubs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    patches: tuple[Patch, ...] = ()


def unpack(wheel: Path, package: PeerPackage, folder: Path) -> None:
    """Write the package's chosen files, patched, below `folder`. Raises LoaderError for one that is not there."""
    for stray in {p.file for p in package.patches} - set(package.files):
        raise LoaderError(f"patch of {stray}: that file is not among the chosen ones")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        for file in package.files:
            if file not in held:
                raise LoaderError(f"{wheel.name} holds no {file}; find where {package.name} moved it")
            text = archive.read(file).decode()
            for patch in package.patches:
                if patch.file == file:
                    text = patch.apply(text)
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)


class _Stub(ModuleType):
    """A stand-in module: what is not among its attributes is named in the error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"the stand-in for {self.__name__} has no {name!r}; add it to the package's stubs")


class _StubLoader(importlib.abc.Loader):
    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self.attributes = attributes

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self.attributes)


class _Finder(importlib.abc.MetaPathFinder):
    """Answers for every module below the package's name, so that an installed copy is never mixed in."""

    def __init__(self, package: PeerPackage, folder: Path) -> None:
        self.root = package.files[0].split("/", 1)[0]
        self.stubs = package.stubs
        self.files = {module_name(f): folder / f for f in package.files}
        known = [*self.stubs, *self.files]
        self.parents = {name.rsplit(".", n)[0] for name in known for n in range(1, name.count(".") + 1)} - set(known)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.root and not name.startswith(self.root + "."):
            return None
        has_children = any(other.startswith(name + ".") for other in [*self.stubs, *self.files])
        if name in self.stubs:
            return importlib.util.spec_from_loader(name, _StubLoader(self.stubs[name]), is_package=has_children)
        if name in self.files:
            where = [str(self.files[name].parent)] if has_children else None
            return importlib.util.spec_from_file_location(name, self.files[name], submodule_search_locations=where)
        if name in self.parents:
            return importlib.util.spec_from_loader(name, _StubLoader({}), is_package=True)
        raise LoaderError(f"{name} is imported, but is neither a chosen file nor a stub; add it to one of the two")


def module_name(file: str) -> str:
    """The dotted name of a file inside a wheel.

    >>> module_name("pkg/ops/topk.py"), module_name("pkg/__init__.py")
    ('pkg.ops.topk', 'pkg')
    """
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@contextmanager
def loaded(package: PeerPackage, folder: Path, files: Sequence[str] = ()) -> Iterator[dict[str, ModuleType]]:
    """Modules by file path, imported from what `unpack` wrote; all of the package's when `files` is empty.

    On leaving, every module below the package's name is forgotten. Raises LoaderError for an import nobody decided on
    and where modules of that name are imported already.
    """
    finder = _Finder(package, folder)

    def ours() -> list[str]:
        return [name for name in sys.modules if name == finder.root or name.startswith(finder.root + ".")]

    if already := ours():
        raise LoaderError(f"{already[0]} is imported already; load the peer in a process of its own")
    sys.meta_path.insert(0, finder)
    try:
        yield {file: importlib.import_module(module_name(file)) for file in files or package.files}
    finally:
        sys.meta_path.remove(finder)
        for name in ours():
            del sys.modules[name]
