"""Import a runner's package a second time with one expression changed, while the original stays as it is.

The copy lives in memory under an alias (`_mutant_0_cpu_reference`): a finder on `sys.meta_path` serves the package's
own source files under that name, points their absolute imports of the package to the alias, and replaces one piece of
text in one file. Nothing is written to disk, and nothing of the copy is left in `sys.modules` afterwards. Which
changes are worth making, and who must notice them, is said in `conformance.mutants`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from runner_api.errors import ConfigError
from runner_api.loader import runner_names


@dataclass(frozen=True, slots=True)
class MutatedRunner:
    """A runner's factory out of a mutated copy; usable inside the `with` block that made it."""

    factory: Any
    target: str  # `alias.module:factory`, as the loader takes it
    alias: str
    package: str


@contextmanager
def mutated(runner: str, path: str, old: str, new: str, *more: tuple[str, str, str]) -> Iterator[MutatedRunner]:
    """Load `runner` from a copy of its package in which `old` reads `new`.

    runner: an installed name ("cpu") or "package.module:factory". path: the file, relative to the package
    ("slot_mapping.py", "sample/gumbel.py"). old: must occur exactly once in it. more: further (path, old, new), for a
    fault that takes two places.

    Raises: `ConfigError` if the runner is no package, the file is not there, `old` is not found exactly once, nothing
    changes, or the changed file is not Python.
    """
    package, module, attribute = _resolve(runner)
    root = _package_root(package)
    sources: dict[Path, str] = {}
    for change in ((path, old, new), *more):
        _change_source(sources, root, *change)
    alias = _free_alias(package)
    finder = _MutantFinder(package, alias, root, sources)
    finder.check_syntax()
    sys.meta_path.insert(0, finder)
    try:
        found: Any = importlib.import_module(alias + module[len(package) :])
        for part in attribute.split("."):
            found = getattr(found, part)
        yield MutatedRunner(found, f"{alias}{module[len(package) :]}:{attribute}", alias, package)
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n == alias or n.startswith(alias + ".")]:
            del sys.modules[name]
        for filename in finder.filenames:
            linecache.cache.pop(filename, None)


def _resolve(runner: str) -> tuple[str, str, str]:
    """(package, module, attribute) of a runner's factory."""
    target = runner if ":" in runner else runner_names().get(runner)
    if target is None:
        raise ConfigError("unknown runner", field="runner", got=runner, expected=f"one of {sorted(runner_names())}")
    module, _, attribute = target.partition(":")
    return module.partition(".")[0], module, attribute


def _package_root(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        raise ConfigError("not a package with source files", field="runner", got=package, expected="a package")
    return Path(spec.origin).parent


def _change_source(sources: dict[Path, str], root: Path, path: str, old: str, new: str) -> None:
    """Make one change in the sources at hand, which hold the files that are changed already."""
    file = (root / path).resolve()
    if not file.is_file() or not file.is_relative_to(root.resolve()):
        raise ConfigError("no such file in the package", field="path", got=path, expected=f"a file under {root.name}/")
    source = sources.get(root / path) or file.read_text(encoding="utf-8")
    count = source.count(old) if old else 0
    if count != 1:
        raise ConfigError(
            f"the text to replace occurs {count} times in {path}", field="old", got=old, expected="exactly once",
            hint="Give more of its surroundings, or follow the file where it has changed",
        )  # fmt: skip
    if old == new:
        raise ConfigError("nothing changes", field="new", got=new, expected="another text")
    sources[root / path] = source.replace(old, new)


def _free_alias(package: str) -> str:
    """The first alias not in use. Reusing names lets compiled code of unchanged files be reused too."""
    n = 0
    while f"_mutant_{n}_{package}" in sys.modules:
        n += 1
    return f"_mutant_{n}_{package}"


class _MutantFinder(importlib.abc.MetaPathFinder):
    """Finds every module of `alias` in the source files of `package`."""

    def __init__(self, package: str, alias: str, root: Path, sources: dict[Path, str]) -> None:
        self.package, self.alias, self.root = package, alias, root
        self.sources = sources  # of the changed files
        self.filenames: list[str] = []

    def check_syntax(self) -> None:
        for file, source in self.sources.items():
            path = str(file.relative_to(self.root))
            try:
                ast.parse(source, path)
            except SyntaxError as e:
                raise ConfigError(
                    f"{path} is not Python after the change: {e.msg}", field="new", got=e.text,
                    expected="one expression",
                ) from e  # fmt: skip

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.alias and not fullname.startswith(self.alias + "."):
            return None
        place = self.root.joinpath(*fullname.split(".")[1:])
        is_package = (place / "__init__.py").is_file()
        file = place / "__init__.py" if is_package else place.with_suffix(".py")
        if not file.is_file():
            return None
        loader = _MutantLoader(self, file)
        spec = importlib.util.spec_from_loader(fullname, loader, origin=loader.filename, is_package=is_package)
        assert spec is not None
        spec.has_location = True  # sets __file__
        return spec


class _MutantLoader(importlib.abc.InspectLoader):
    """One source file under the alias. Its file name stands beside the original, where no file is."""

    def __init__(self, finder: _MutantFinder, file: Path) -> None:
        self.finder, self.file = finder, file
        self.filename = str(file.with_name(f"{file.stem}.{finder.alias}.py"))

    def _compiled(self) -> tuple[str, CodeType]:
        f = self.finder
        if self.file in f.sources:
            return _compile(f.sources[self.file], f.package, f.alias, self.filename)
        # Keyed by the time of the last change too, so that an edited file is read again.
        return _compile_file(self.file, self.file.stat().st_mtime_ns, f.package, f.alias, self.filename)

    def get_source(self, fullname: str) -> str:
        return self._compiled()[0]

    def get_code(self, fullname: str) -> CodeType:
        return self._compiled()[1]

    def exec_module(self, module: ModuleType) -> None:
        source, code = self._compiled()
        # inspect.getsource (and with it Triton's jit) asks linecache, which would otherwise ask the disk.
        linecache.cache[self.filename] = (len(source), None, source.splitlines(keepends=True), self.filename)
        self.finder.filenames.append(self.filename)
        exec(code, module.__dict__)


@lru_cache(maxsize=512)
def _compile_file(file: Path, mtime_ns: int, package: str, alias: str, filename: str) -> tuple[str, CodeType]:
    return _compile(file.read_text(encoding="utf-8"), package, alias, filename)


def _compile(source: str, package: str, alias: str, filename: str) -> tuple[str, CodeType]:
    source = rewrite_imports(source, package, alias)
    return source, compile(source, filename, "exec", dont_inherit=True)


def rewrite_imports(source: str, package: str, alias: str) -> str:
    """Point the absolute imports of `package` to `alias`; line numbers and everything else stay.

    >>> rewrite_imports("from p.a import b; import p.a, q, p.c as d; import px", "p", "m")
    'from m.a import b; import m.a, m as p, q, m.c as d; import px'
    """
    # Edits in bytes, because ast counts columns so: (line, column, length of the old name, new text).
    edits: list[tuple[int, int, int, str]] = []
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    name = package.encode()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_inside(node.module or "", package):
            column = lines[node.lineno - 1].index(name, node.col_offset + len("from"))
            edits.append((node.lineno - 1, column, len(name), alias))
        elif isinstance(node, ast.Import):
            for item in node.names:
                if not _is_inside(item.name, package):
                    continue
                # `import p.a` binds the name p; `import m.a, m as p` binds it to the copy.
                full = alias + item.name[len(package) :]
                text = full if item.asname else f"{full}, {alias} as {package}"
                edits.append((item.lineno - 1, item.col_offset, len(item.name.encode()), text))
    for line, column, length, text in sorted(edits, reverse=True):
        lines[line] = lines[line][:column] + text.encode() + lines[line][column + length :]
    return b"".join(lines).decode()


def _is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")
