"""The address space of one launch: every tensor argument in a region of its own, far away from all others.

A kernel sees made-up addresses. Regions lie 16 TiB apart with the tensor in the middle, so that the address itself
says which argument it was derived from, however far it strays: a neighbour's memory cannot be mistaken for one's own.
An access is judged first and only then turned into real addresses. Knows neither triton nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.triton_sanitizer.faults import FaultKind
from conformance.triton_sanitizer.shadow import Clash, Clock, Index, Shadow
from conformance.triton_sanitizer.unwritten import Unwritten

_REGION_BITS = 44
_FIRST = 1 << 60  # below 2^63, so that an address fits int64; far above anything that an operating system hands out
_PAGE = 4096  # addresses keep their place in a page, and so their alignment

Addresses = npt.NDArray[np.uint64]
Report = Callable[..., None]  # report(kind, **what a KernelFault says); returns if that kind is allowed


@dataclass(slots=True)
class Region:
    """One tensor: `size` bytes seen from `base` on, in truth from `real` on."""

    name: str
    base: int
    real: int
    size: int
    itemsize: int
    shadow: Shadow | None = None


def extent_of(tensor: Any) -> tuple[int, int]:
    """Bytes from a tensor's first to its last element, both included, and the bytes of one element."""
    itemsize = int(tensor.element_size())
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if 0 in shape:
        return 0, itemsize
    return (sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1) * itemsize, itemsize


class Memory:
    """All regions of one launch, and what its programs did to them."""

    def __init__(self, report: Report, *, races: bool) -> None:
        self._report = report
        self._races = races
        self._regions: list[Region] = []
        self._shadows: list[Shadow] = []
        self._me = 0  # the running program, counted from 1
        self._stamp = 0  # of the latest access
        self._barrier = 0  # stamp at the program's latest barrier
        self._clock: Clock = {}  # what came before the running program for certain
        self._clocks: dict[tuple[int, int], Clock] = {}  # (shadow, unit) -> what was released through it
        self._program_of: Callable[[int], tuple[int, int, int]] = lambda number: (number - 1, 0, 0)

    # Regions ---------------------------------------------------------------------------------------------------------

    def add(self, name: str, tensor: Any) -> int:
        """Give a tensor a region. The answer is the address that the kernel shall see."""
        real = int(tensor.data_ptr())
        size, itemsize = extent_of(tensor)
        base = _FIRST + (len(self._regions) << _REGION_BITS) + (1 << (_REGION_BITS - 1)) + real % _PAGE
        self._regions.append(Region(name, base, real, size, itemsize))
        return base

    def seal(self, marks: Iterable[Unwritten]) -> None:
        """All regions are there: regions that share memory share its history, and marks of unwritten memory come in."""
        marks = list(marks)
        if not self._races and not marks:
            return
        cluster: list[Region] = []
        end = 0
        for region in sorted((r for r in self._regions if r.size), key=lambda r: r.real):
            if cluster and region.real >= end:
                self._share(cluster, end, marks)
                cluster = []
            cluster.append(region)
            end = max(end, region.real + region.size)
        if cluster:
            self._share(cluster, end, marks)

    def _share(self, cluster: list[Region], end: int, marks: list[Unwritten]) -> None:
        start = cluster[0].real
        inside = [mark for mark in marks if mark.start < end and start < mark.start + mark.size]
        if not self._races and not inside:
            return
        widths = [(r.itemsize, r.real - start) for r in cluster] + [(m.itemsize, m.start - start) for m in inside]
        shadow = Shadow(start, end - start, math.gcd(*(n for pair in widths for n in pair)))
        for mark in inside:
            mark.lay_into(shadow)
        for region in cluster:
            region.shadow = shadow
        self._shadows.append(shadow)

    def take_marks(self, marks: Iterable[Unwritten]) -> None:
        """The launch is over: what it stored counts as written from now on."""
        for mark in marks:
            for shadow in self._shadows:
                mark.take_from(shadow)

    def to_address(self, values: npt.NDArray[Any]) -> Addresses:
        """Integers that become pointers: real addresses of known tensors turn into addresses of their regions."""
        addresses = values.view(np.uint64)
        seen = addresses.copy()
        for region in self._regions:
            inside = (addresses > region.real) & (addresses < region.real + region.size)
            seen[inside] = addresses[inside] + np.uint64(region.base - region.real)
        for region in reversed(self._regions):  # an exact start says more than an address somewhere inside
            starts = addresses == region.real
            seen[starts] = region.base
        return seen

    # Programs --------------------------------------------------------------------------------------------------------

    def begin_program(self, number: int, program_of: Callable[[int], tuple[int, int, int]]) -> None:
        self._me, self._clock, self._barrier, self._program_of = number, {}, self._stamp, program_of
        for shadow in self._shadows:
            shadow.forget_program()

    def barrier(self) -> None:
        self._barrier = self._stamp

    # Accesses --------------------------------------------------------------------------------------------------------

    def access(
        self,
        kind: str,
        pointers: Addresses,
        mask: npt.NDArray[np.bool_] | None,
        size: int,
        acquire: bool = False,
        release: bool = False,
    ) -> tuple[Addresses, npt.NDArray[np.bool_] | None]:
        """Judge one access ("load", "store" or "atomic") of `size` bytes a lane.

        Returns real addresses, and the mask without lanes that were found outside but allowed to be.
        """
        self._stamp += 1
        if mask is None or mask.all():
            flat, mask = pointers.reshape(-1), None
        else:
            flat = pointers[mask]
            if not flat.size:
                return np.zeros_like(pointers), mask
        lowest, highest = (flat.item(),) * 2 if flat.size == 1 else (int(flat.min()), int(flat.max()))
        number = (lowest - _FIRST) >> _REGION_BITS
        if 0 <= number < len(self._regions):
            region = self._regions[number]
            if region.base <= lowest and highest + size <= region.base + region.size:
                if region.shadow is not None:
                    lanes = _lanes(mask, flat.size)
                    self._touch(kind, region, flat, lanes, pointers.size, lowest, highest, size, acquire, release)
                return pointers - np.uint64(region.base - region.real), mask
        return self._access_many(kind, pointers, mask, flat, size)

    def _access_many(
        self, kind: str, pointers: Addresses, mask: npt.NDArray[np.bool_] | None, flat: Addresses, size: int
    ) -> tuple[Addresses, npt.NDArray[np.bool_] | None]:
        """The slow way: lanes outside, or lanes of several tensors in one access."""
        lanes = _lanes(mask, flat.size)
        numbers = (flat >> np.uint64(_REGION_BITS)).astype(np.int64) - (_FIRST >> _REGION_BITS)
        inside = np.zeros(flat.size, bool)
        real = np.zeros(flat.size, np.uint64)
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            if not 0 <= number < len(self._regions):
                self._report(
                    FaultKind.OUT_OF_BOUNDS_READ if kind == "load" else FaultKind.OUT_OF_BOUNDS_WRITE,
                    detail=f"address {int(flat[here[0]]):#x} comes from no tensor argument; a tensor behind a table "
                    "of addresses is made known by Session.register",
                )
                continue
            region = self._regions[number]
            offset = flat[here].astype(np.int64) - region.base
            fits = (offset >= 0) & (offset + size <= region.size)
            if not fits.all():
                worst = offset[~fits][0]
                self._report(
                    FaultKind.OUT_OF_BOUNDS_READ if kind == "load" else FaultKind.OUT_OF_BOUNDS_WRITE,
                    **_element(region, int(worst)),
                    detail=f"{int((~fits).sum())} of {flat.size} lanes are outside",
                )
                here = here[fits]
            inside[here] = True
            real[here] = flat[here] - np.uint64(region.base - region.real)
            if here.size and region.shadow is not None:
                part = flat[here]
                self._touch(kind, region, part, lanes[here], pointers.size, int(part.min()), int(part.max()), size)
        addresses = np.zeros(pointers.size, np.uint64)
        allowed = np.zeros(pointers.size, bool)
        addresses[lanes], allowed[lanes] = real, inside
        return addresses.reshape(pointers.shape), allowed.reshape(pointers.shape)

    def _touch(
        self,
        kind: str,
        region: Region,
        flat: Addresses,
        lanes: npt.NDArray[np.int32],
        num_lanes: int,
        lowest: int,
        highest: int,
        size: int,
        acquire: bool = False,
        release: bool = False,
    ) -> None:
        """Hold lanes of one region against its history, and add them to it."""
        shadow = region.shadow
        assert shadow is not None
        if size < shadow.unit:
            shadow.refine(size)
        units, lanes = _units(region, shadow, flat, lanes, lowest, highest, size)
        if kind != "store":
            lane = shadow.first_unwritten(units)
            if lane is not None:
                self._fault(FaultKind.UNINITIALISED_READ, region, shadow, units, lane)
        if self._races:
            if kind == "load":
                self._load(region, shadow, units, lanes, num_lanes)
            elif kind == "store":
                self._store(region, shadow, units, lanes, num_lanes)
            else:
                self._atomic(region, shadow, units)
                if num_lanes == 1:
                    self._synchronise((id(shadow), _unit(units, 0)), acquire, release)
        if kind != "load":
            shadow.mark_written(units)

    def _load(self, region: Region, shadow: Shadow, units: Index, lanes: npt.NDArray[np.int32], num: int) -> None:
        clash = shadow.clash_with_store(units, self._me, self._clock)
        if clash is None:
            clash = shadow.clash_with_atomic(units, self._me, self._clock)
        self._race(FaultKind.READ_WRITE_RACE, region, shadow, units, clash, "loads what another program wrote")
        lane = shadow.own_store_of_another_lane(units, lanes, num, self._me, self._barrier)
        if lane is not None:
            self._fault(
                FaultKind.STORE_THEN_LOAD, region, shadow, units, lane,
                detail="stored by another lane of this program with no tl.debug_barrier() in between",
            )  # fmt: skip
        shadow.record_load(units, self._me, self._stamp)

    def _store(self, region: Region, shadow: Shadow, units: Index, lanes: npt.NDArray[np.int32], num: int) -> None:
        clash = shadow.clash_with_store(units, self._me, self._clock)
        self._race(FaultKind.WRITE_WRITE_RACE, region, shadow, units, clash, "stores what another program stored")
        clash = shadow.clash_with_atomic(units, self._me, self._clock)
        self._race(FaultKind.WRITE_WRITE_RACE, region, shadow, units, clash, "plain store against an atomic one")
        clash = shadow.clash_with_load(units, self._me, self._clock)
        self._race(FaultKind.READ_WRITE_RACE, region, shadow, units, clash, "stores what another program loaded")
        lane = shadow.record_store(units, lanes, num, self._me, self._stamp)
        if lane is not None:
            self._fault(FaultKind.LANE_CONFLICT, region, shadow, units, lane, detail="two lanes store to it")

    def _atomic(self, region: Region, shadow: Shadow, units: Index) -> None:
        clash = shadow.clash_with_store(units, self._me, self._clock)
        self._race(FaultKind.WRITE_WRITE_RACE, region, shadow, units, clash, "atomic against a plain store")
        clash = shadow.clash_with_load(units, self._me, self._clock)
        self._race(FaultKind.READ_WRITE_RACE, region, shadow, units, clash, "atomic against a plain load")
        shadow.record_atomic(units, self._me, self._stamp)

    def _synchronise(self, place: tuple[int, int], acquire: bool, release: bool) -> None:
        """A scalar atomic orders programs: what was released through its place came before whoever acquires it."""
        released = self._clocks.get(place)
        if acquire and released:
            self._clock = released if not self._clock else _merged(self._clock, released)
        if release:
            if released is None:
                released = self._clocks[place] = dict(self._clock)
            elif released is not self._clock:
                released = self._clocks[place] = _merged(self._clock, released)
            released[self._me] = self._stamp

    def _race(
        self, kind: FaultKind, region: Region, shadow: Shadow, units: Index, clash: Clash | None, detail: str
    ) -> None:
        if clash is not None:
            other = self._program_of(clash.program)
            self._fault(kind, region, shadow, units, clash.lane, other=other, detail=detail)

    def _fault(self, kind: FaultKind, region: Region, shadow: Shadow, units: Index, lane: int, **what: Any) -> None:
        offset = shadow.start + _unit(units, lane) * shadow.unit - region.real
        self._report(kind, **_element(region, offset), **what)


def _element(region: Region, offset: int) -> dict[str, Any]:
    return {
        "argument": region.name,
        "index": offset // region.itemsize,
        "extent": region.size // region.itemsize,
    }


def _lanes(mask: npt.NDArray[np.bool_] | None, count: int) -> npt.NDArray[np.int32]:
    """Positions of the unmasked lanes in the whole tensor."""
    return np.arange(count, dtype=np.int32) if mask is None else np.flatnonzero(mask).astype(np.int32)


def _unit(units: Index, position: int) -> int:
    return units.start + position if isinstance(units, slice) else int(units[position])


def _units(
    region: Region,
    shadow: Shadow,
    flat: Addresses,
    lanes: npt.NDArray[np.int32],
    lowest: int,
    highest: int,
    size: int,
) -> tuple[Index, npt.NDArray[np.int32]]:
    """Units of the shadow that the lanes touch; a lane wider than a unit touches several."""
    origin = region.base - (region.real - shadow.start)
    times = size // shadow.unit
    if highest - lowest == (flat.size - 1) * size and (flat.size == 1 or bool((flat[1:] > flat[:-1]).all())):
        # `size` apart from first to last, ascending, and no lane narrower than that: side by side
        start = (lowest - origin) // shadow.unit
        if flat.size == 1 or bool((flat[1:] - flat[:-1] == np.uint64(size)).all()):
            return slice(start, start + flat.size * times), np.repeat(lanes, times) if times > 1 else lanes
    units = (flat.astype(np.int64) - origin) // shadow.unit
    if times > 1:
        units = (units[:, None] + np.arange(times)).reshape(-1)
        lanes = np.repeat(lanes, times)
    return units, lanes


def _merged(a: Clock, b: Clock) -> Clock:
    merged = dict(a)
    for program, stamp in b.items():
        merged[program] = max(stamp, merged.get(program, 0))
    return merged
