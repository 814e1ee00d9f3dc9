"""The sanitizer: a context in which every launch of a Triton kernel in the interpreter is judged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from conformance.triton_sanitizer import versions
from conformance.triton_sanitizer.faults import FaultKind, Where
from conformance.triton_sanitizer.memory import extent_of
from conformance.triton_sanitizer.patching import replace
from conformance.triton_sanitizer.unwritten import Unwritten
from runner_api.errors import ConfigError

if TYPE_CHECKING:
    from conformance.triton_sanitizer.judge import Judge

_BOUNDS = frozenset({FaultKind.OUT_OF_BOUNDS_READ, FaultKind.OUT_OF_BOUNDS_WRITE})


@dataclass(frozen=True, slots=True)
class Checks:
    """What a session looks for; see `sanitize`."""

    races: bool
    poison: bool | Literal["auto"]
    order: int | None
    overflow: bool
    masked_values: bool
    bf16: bool
    allow: frozenset[FaultKind]


class Session:
    """A sanitizer that is on inside `with`, and may be entered again after it was left.

    launches, programs, accesses: what was judged so far. `active` is False where Triton could not be patched: then
    kernels run in the plain interpreter, unjudged.
    """

    _entered: Session | None = None

    def __init__(self, checks: Checks, extra: Mapping[str, torch.Tensor] | None = None) -> None:
        self.checks = checks
        self.launches = self.programs = 0
        self.active = False
        self.known: dict[str, torch.Tensor] = dict(extra or {})  # reached through tables of addresses, by name
        self._marks: dict[int, tuple[Callable[[], torch.Tensor | None], Unwritten]] = {}
        self._stack: ExitStack | None = None
        self._judge: Judge | None = None

    @property
    def accesses(self) -> int:
        """Loads, stores and atomics that were judged, each counted once whatever its width."""
        return 0 if self._judge is None else self._judge.builder.accesses

    @property
    def last_kernel(self) -> Where:
        """The kernel launched last."""
        return Where("<none>", "<unknown>", 0, "") if self._judge is None else self._judge.last_kernel

    def register(self, name: str, tensor: torch.Tensor) -> None:
        """Make known a tensor that kernels reach through a table of addresses rather than as an argument."""
        self.known[name] = tensor

    def uninitialised(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a tensor with a pattern; a kernel that loads an element before anything wrote it is faulty.

        Returns the tensor. Raises ConfigError for one that is not in CPU memory, and outside of the session.
        """
        if Session._entered is not self:
            raise ConfigError("memory is marked while the sanitizer is on", hint="Mark it inside `with sanitize()`")
        if tensor.device.type != "cpu":
            raise ConfigError(
                "only memory of the CPU can be marked as unwritten", field="tensor", got=str(tensor.device),
                hint="Make the tensor on the CPU: kernels are interpreted",
            )  # fmt: skip
        self._mark(tensor, lambda: tensor)
        return tensor

    def _mark(self, tensor: torch.Tensor, alive: Callable[[], torch.Tensor | None]) -> None:
        size, itemsize = extent_of(tensor)
        if size and self.checks.poison and self.active:
            self._marks[tensor.data_ptr()] = (alive, Unwritten(tensor, size, itemsize))

    def live_marks(self) -> list[Unwritten]:
        """Marks whose tensor still exists and has unwritten elements left."""
        for address, (tensor, mark) in list(self._marks.items()):
            if tensor() is None or not mark.notice_host_writes():
                del self._marks[address]
        return [mark for _, mark in self._marks.values()]

    def __enter__(self) -> Session:
        patchable = versions.patchable()
        if Session._entered is not None:
            raise ConfigError(
                "a sanitizer is already on", field="sanitize", hint="Leave the outer `with sanitize()` first"
            )
        if patchable:
            with ExitStack() as stack:
                self._patch(stack)
                self._stack = stack.pop_all()
        Session._entered, self.active = self, patchable
        return self

    def __exit__(self, *_: object) -> None:
        Session._entered, self.active = None, False
        self._marks.clear()
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def _patch(self, stack: ExitStack) -> None:
        from conformance.triton_sanitizer.judge import Judge

        if self._judge is None:
            self._judge = Judge(self)
        self._judge.patch(stack)
        if self.checks.poison == "auto":
            for target, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
                replace(stack, target, name, self._marking(getattr(target, name)))

    def _marking(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A function that makes a tensor, which then marks it for as long as it lives."""

        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.device.type == "cpu" and tensor.layout == torch.strided:
                self._mark(tensor, weakref.ref(tensor))
            return tensor

        return made


def sanitize(
    *,
    bounds: bool = True,
    races: bool = True,
    poison: bool | Literal["auto"] = True,
    order: int | None = None,
    overflow: bool = True,
    masked_values: bool = True,
    bf16: bool = True,
    allow: Sequence[FaultKind] = (),
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Session:
    """A context in which launches are judged; a fault is raised from the launch as KernelFault.

    bounds: every unmasked lane inside the tensor argument that its address was derived from. races: programs against
    each other, lanes of one store, loads of what another lane stored. poison: loads of elements marked by
    `Session.uninitialised`; "auto" marks what torch.empty and its kin return too. order: run programs in the order
    that this number permutes them to. overflow: signed integers narrower than 64 bits. masked_values: lanes masked off
    without `other`. bf16: bfloat16 rounded to nearest even. allow: kinds that are not raised (an access outside is
    then left out). extra: tensors that kernels reach through tables of addresses, by name.

    A tensor of addresses may carry an attribute `points_to`, the tensors behind it: then they are known without extra.
    Raises (on entry): ConfigError outside of the interpreter, or inside another sanitizer.
    """
    checks = Checks(
        races=races, poison=poison, order=order, overflow=overflow, masked_values=masked_values, bf16=bf16,
        allow=frozenset(allow) if bounds else _BOUNDS.union(allow),
    )  # fmt: skip
    return Session(checks, extra)
