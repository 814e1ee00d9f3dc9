"""What happened to each element of a piece of memory during one launch: who stored it, who loaded it, is it written.

Arrays with one entry per unit of memory, allocated when first needed; nothing here loops over elements. Knows neither
triton nor kernels: a program is a number from 1 on (0 means nobody), a stamp is the number of an access in the launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Index = slice | npt.NDArray[np.int64]  # units touched, one per lane; a slice where they lie side by side
Clock = dict[int, int]  # program -> the last stamp of it that certainly came before


@dataclass(frozen=True, slots=True)
class Clash:
    """Lane `lane` of an access met what program `program` had done to the same unit."""

    lane: int
    program: int


def _first_clash(programs: np.ndarray, stamps: np.ndarray, me: int, clock: Clock) -> Clash | None:
    """The first lane that another program touched before without anything that orders the two."""
    foreign = (programs != 0) & (programs != me)
    if not foreign.any():
        return None
    for program in np.unique(programs[foreign]).tolist() if clock else ():
        if program in clock:
            foreign &= ~((programs == program) & (stamps <= clock[program]))
    lanes = np.flatnonzero(foreign)
    return Clash(int(lanes[0]), int(programs[lanes[0]])) if lanes.size else None


class _Visitors:
    """For each unit the first program that came and the latest one that is not the first."""

    def __init__(self, units: int) -> None:
        self.first, self.first_stamp, self.other, self.other_stamp = np.zeros((4, units), np.int32)
        self.several = False

    def record(self, units: Index, me: int, stamp: int) -> None:
        first = self.first[units]
        second = (first != 0) & (first != me)
        if not second.any():
            self.first[units] = me
            self.first_stamp[units] = stamp
            return
        self.several = True
        self.other[units] = np.where(second, me, self.other[units])
        self.other_stamp[units] = np.where(second, stamp, self.other_stamp[units])
        self.first_stamp[units] = np.where(second, self.first_stamp[units], stamp)
        self.first[units] = np.where(second, first, me)

    def clash(self, units: Index, me: int, clock: Clock) -> Clash | None:
        clash = _first_clash(self.first[units], self.first_stamp[units], me, clock)
        if clash is None and self.several:
            clash = _first_clash(self.other[units], self.other_stamp[units], me, clock)
        return clash

    def repeat(self, times: int) -> None:
        for name in ("first", "first_stamp", "other", "other_stamp"):
            setattr(self, name, np.repeat(getattr(self, name), times))


class Shadow:
    """The history of `size` bytes from address `start` on, in units of `unit` bytes."""

    def __init__(self, start: int, size: int, unit: int) -> None:
        self.start = start
        self.unit = unit
        self.units = -(-size // unit)
        self.unwritten: npt.NDArray[np.bool_] | None = None  # bool[units]; None: all of it was written
        self._writer: npt.NDArray[np.int32] | None = None  # int32[units] program of the last plain store
        self._stamp = self._lane = np.zeros(0, np.int32)  # int32[units] its stamp, and the lane that stored
        self._lanes_of: dict[int, int] = {}  # stamp of a store -> how many lanes it had
        self._readers: _Visitors | None = None
        self._atomics: _Visitors | None = None

    def refine(self, unit: int) -> None:
        """Go over to smaller units, as an access through a narrower pointer type asks for."""
        times, self.unit = self.unit // unit, unit
        self.units *= times
        if self.unwritten is not None:
            self.unwritten = np.repeat(self.unwritten, times)
        if self._writer is not None:
            self._writer, self._stamp, self._lane = (
                np.repeat(a, times) for a in (self._writer, self._stamp, self._lane)
            )
        for visitors in (self._readers, self._atomics):
            if visitors is not None:
                visitors.repeat(times)

    def first_unwritten(self, units: Index) -> int | None:
        """The first lane of the access whose unit nobody wrote."""
        if self.unwritten is None:
            return None
        lanes = np.flatnonzero(self.unwritten[units])
        return int(lanes[0]) if lanes.size else None

    def mark_written(self, units: Index) -> None:
        if self.unwritten is not None:
            self.unwritten[units] = False

    def clash_with_store(self, units: Index, me: int, clock: Clock) -> Clash | None:
        return None if self._writer is None else _first_clash(self._writer[units], self._stamp[units], me, clock)

    def clash_with_load(self, units: Index, me: int, clock: Clock) -> Clash | None:
        return None if self._readers is None else self._readers.clash(units, me, clock)

    def clash_with_atomic(self, units: Index, me: int, clock: Clock) -> Clash | None:
        return None if self._atomics is None else self._atomics.clash(units, me, clock)

    def own_store_of_another_lane(
        self, units: Index, lanes: npt.NDArray[np.int32], num_lanes: int, me: int, since: int
    ) -> int | None:
        """The first lane that reads what another lane of this program stored after stamp `since`, the last barrier.

        One lane of two tensors of the same size is one thread's. A scalar is stored by one thread and read by all.
        """
        if self._writer is None:
            return None
        stamps = self._stamp[units]
        own = (self._writer[units] == me) & (stamps > since)
        if not own.any():
            return None
        if num_lanes > 1:
            for stamp in np.unique(stamps[own]).tolist():
                if self._lanes_of.get(stamp) == num_lanes:
                    own &= ~((stamps == stamp) & (self._lane[units] == lanes))
        found = np.flatnonzero(own)
        return int(found[0]) if found.size else None

    def record_load(self, units: Index, me: int, stamp: int) -> None:
        if self._readers is None:
            self._readers = _Visitors(self.units)
        self._readers.record(units, me, stamp)

    def record_atomic(self, units: Index, me: int, stamp: int) -> None:
        if self._atomics is None:
            self._atomics = _Visitors(self.units)
        self._atomics.record(units, me, stamp)

    def record_store(
        self, units: Index, lanes: npt.NDArray[np.int32], num_lanes: int, me: int, stamp: int
    ) -> int | None:
        """Note a store; the answer is the first lane whose unit a later lane of the same store hits as well."""
        if self._writer is None:
            self._writer, self._stamp, self._lane = np.zeros((3, self.units), np.int32)
        self._writer[units] = me
        self._stamp[units] = stamp
        self._lane[units] = lanes
        self._lanes_of[stamp] = num_lanes
        if isinstance(units, slice):
            return None
        lost = np.flatnonzero(self._lane[units] != lanes)
        return int(lost[0]) if lost.size else None

    def forget_program(self) -> None:
        """A program ended: how wide its stores were is asked for by nobody else."""
        self._lanes_of.clear()
