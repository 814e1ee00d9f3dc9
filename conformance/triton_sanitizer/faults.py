"""What can be wrong with a kernel, and how it is told: which kernel, which program, which line, which element."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """One kind of fault. The names are what reports and tests use."""

    OUT_OF_BOUNDS_READ = "out_of_bounds_read"
    OUT_OF_BOUNDS_WRITE = "out_of_bounds_write"
    UNINITIALISED_READ = "uninitialised_read"  # nothing wrote it, neither the host nor a program before
    WRITE_WRITE_RACE = "write_write_race"  # two programs store to one element
    READ_WRITE_RACE = "read_write_race"  # one program loads what another stores, in either order
    LANE_CONFLICT = "lane_conflict"  # two lanes of one store hit one element
    STORE_THEN_LOAD = "store_then_load"  # one program loads what it stored, with no barrier between
    ORDER_DEPENDENCE = "order_dependence"  # another order of programs gives another result
    INT32_OVERFLOW = "int32_overflow"
    MASKED_VALUE_USED = "masked_value_used"  # a lane masked off without `other` reaches a store or an address
    DEVICE_ASSERT = "device_assert"


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a kernel's source."""

    kernel: str
    file: str
    line: int
    source: str  # the line itself, stripped


class KernelFault(AssertionError):
    """One fault. `program` is (x, y, z); `argument`, `index`, `extent` say which element of which tensor argument.

    index: flat element offset from the argument's first element (may be negative or past the end); extent: how many
    elements the argument spans; other: the conflicting program, if there is one.
    """

    def __init__(
        self,
        kind: FaultKind,
        where: Where,
        program: tuple[int, int, int],
        *,
        argument: str | None = None,
        index: int | None = None,
        extent: int | None = None,
        other: tuple[int, int, int] | None = None,
        detail: str = "",
    ) -> None:
        self.kind = kind
        self.where = where
        self.program = program
        self.argument = argument
        self.index = index
        self.extent = extent
        self.other = other
        element = "" if argument is None else f" {argument}[{index}] of {extent} elements"
        against = "" if other is None else f", against program {other}"
        more = f" ({detail})" if detail else ""
        super().__init__(
            f"{kind.value}: {where.kernel} program {program}{against}:{element}{more}\n"
            f"  {where.file}:{where.line}: {where.source}"
        )
