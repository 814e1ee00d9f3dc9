"""Run families of foreign kernels on generated inputs: checked by the sanitizer, compared with an oracle, shrunk.

A case is a dict of NumPy arrays and scalars. Knows no package: families come from the cases_*.py modules.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

Case = dict[str, Any]
Arrays = dict[str, np.ndarray]
Modules = Mapping[str, ModuleType]


@dataclass(frozen=True)
class Family:
    """Kernels that are launched together, how to feed them and what they must give.

    draw: (rng, size) -> case, larger with size; run: (modules, case) -> outputs; differ: (case, outputs, notes) ->
    what is wrong in one line, or "" (notes counts what was compared); fixed: cases to run before the drawn ones;
    smaller: a case -> simpler cases to try in turn; show: a case -> its parts that matter, for the page; remarks:
    kind of fault -> what is to be said on it.
    """

    title: str
    file: str
    kernels: tuple[str, ...]
    oracle: str
    draw: Callable[[np.random.Generator, int], Case]
    run: Callable[[Modules, Case], Arrays]
    differ: Callable[[Case, Arrays, Counter[str]], str]
    fixed: tuple[Case, ...] = ()
    smaller: Callable[[Case], Iterator[Case]] | None = None
    show: Callable[[Case], str] = lambda case: ""
    remarks: Mapping[str, str] = field(default_factory=dict)
    sizes: tuple[int, ...] = (1, 2, 3, 4)
    repeats: int = 6


@dataclass(frozen=True, slots=True)
class Wrong:
    """One thing that is wrong with one case.

    kind: a fault kind of the sanitizer, "value" or "error"; site: what two occurrences of one fault have in common.
    """

    kind: str
    kernel: str
    message: str
    site: str


@dataclass
class Finding:
    """One kind of fault of one family, at its smallest known input, and in how many cases it occurred."""

    wrong: Wrong
    case: Case
    cases: int = 1


@dataclass
class Outcome:
    """What happened to one family; launches, programs and accesses are those that were checked."""

    family: Family
    cases: int = 0
    launches: Counter[str] = field(default_factory=Counter)
    programs: Counter[str] = field(default_factory=Counter)
    accesses: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)


class _Counted:
    """A kernel that counts its launches; everything else is the kernel's own."""

    def __init__(self, name: str, kernel: Any, launches: Counter[str], programs: Counter[str]) -> None:
        self._name, self._kernel, self._launches, self._programs = name, kernel, launches, programs

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._kernel, attribute)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._launches[self._name] += 1
        self._programs[self._name] += int(np.prod(grid))
        return self._kernel[grid]


@contextmanager
def _counting(family: Family, modules: Modules, launches: Counter[str], programs: Counter[str]) -> Iterator[None]:
    module = modules[family.file]
    kernels = {name: getattr(module, name) for name in family.kernels}
    for name, kernel in kernels.items():
        setattr(module, name, _Counted(name, kernel, launches, programs))
    try:
        yield
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


# (kinds not to raise, order of programs) -> a context in which launches are checked; it yields what has `accesses`.
Sanitizer = Callable[[tuple[str, ...], int], AbstractContextManager[Any]]


class Judge:
    """Runs families of kernels. sanitizer: how launches are checked; fault: what it raises."""

    def __init__(self, modules: Modules, sanitizer: Sanitizer, fault: type[Exception]) -> None:
        self.modules, self.sanitizer, self.fault = modules, sanitizer, fault

    def judge(self, family: Family) -> Outcome:
        """Run every case of a family checked, with programs in a permuted order, then unchecked, comparing values."""
        outcome = Outcome(family)
        for number, case in enumerate(_cases(family)):
            outcome.cases += 1
            for wrong in self._all_wrong(case, outcome, number):
                known = next((f for f in outcome.findings if _same(f.wrong, wrong)), None)
                if known is None:
                    outcome.findings.append(Finding(wrong, case))
                else:
                    known.cases += 1
        for finding in outcome.findings:
            self._shrink(finding, family)
        return outcome

    def _all_wrong(self, case: Case, outcome: Outcome, order: int) -> Iterator[Wrong]:
        """Everything that is wrong with one case, at most one fault of a kind."""
        family = outcome.family
        kernels = ", ".join(family.kernels)
        # 1 accesses: a kind that was found is let through, so that it does not hide another
        allow: tuple[str, ...] = ()
        while True:
            launches, programs = Counter[str](), Counter[str]()
            try:
                with _counting(family, self.modules, launches, programs), self.sanitizer(allow, order) as session:
                    permuted = family.run(self.modules, case)
                    accesses = session.accesses
            except self.fault as found:
                wrong = _from_fault(found)
                yield wrong
                if wrong.kind in allow:
                    return
                allow = (*allow, wrong.kind)
            except Exception as error:  # whatever a foreign launch raises is a result of this tool
                yield _error(kernels, error)
                return
            else:
                break
        outcome.launches += launches
        outcome.programs += programs
        outcome.accesses += accesses
        if any(kind.startswith("out_of_bounds") for kind in allow):
            return  # unchecked it would overwrite memory of this process
        # 2 values
        try:
            plain = family.run(self.modules, case)
        except Exception as error:
            yield _error(kernels, error)
            return
        if message := family.differ(case, plain, outcome.notes):
            yield Wrong("value", kernels, message, re.sub(r"[\d.]+", "#", message.split(":")[0]))
        # 3 order of programs
        for name, value in plain.items():
            if not np.array_equal(value, permuted[name], equal_nan=value.dtype.kind == "f"):
                yield Wrong("order_dependence", kernels, f"{name} depends on the order in which programs run", name)

    def _shrink(self, finding: Finding, family: Family, budget: int = 300) -> None:
        """Replace a finding's case by simpler ones that show the same, as long as there are any."""

        def again(case: Case) -> Wrong | None:
            found = self._all_wrong(case, Outcome(family), 0)
            return next((wrong for wrong in found if _same(wrong, finding.wrong)), None)

        progress = family.smaller is not None
        while progress and budget > 0:
            progress = False
            for case in family.smaller(finding.case):  # type: ignore[misc]
                budget -= 1
                if (wrong := again(case)) is not None:
                    finding.case, finding.wrong, progress = case, wrong, True
                if progress or budget <= 0:
                    break


def _cases(family: Family) -> Iterator[Case]:
    yield from family.fixed
    name = zlib.crc32(family.title.encode())
    for size in family.sizes:
        for repeat in range(family.repeats):
            yield family.draw(np.random.default_rng([name, size, repeat]), size)


def _error(kernels: str, error: Exception) -> Wrong:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return Wrong("error", kernels, text, text)


def _from_fault(fault: Any) -> Wrong:
    """A KernelFault without the line of source that it quotes: the page names the place and leaves the code alone."""
    place = f"{fault.where.file}:{fault.where.line}"
    message = str(fault).splitlines()[0].removeprefix(f"{fault.kind}: {fault.where.kernel} ")
    return Wrong(str(fault.kind), fault.where.kernel, f"{place}: {message}", place)


def _same(a: Wrong, b: Wrong) -> bool:
    return (a.kind, a.kernel, a.site) == (b.kind, b.kernel, b.site)
