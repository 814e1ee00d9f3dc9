"""Every error a user of the runner interface can meet: what, where, got, expected, what to do.

One tree, rooted in `RunnerError`, so that a caller (or a fuzzer) can tell a refusal from a crash.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

_UNSET = object()


class RunnerError(Exception):
    """Base class. `code` names the clause, the other fields say where the fault is and how to mend it.

    The text is one line: `CODE where: what (got …, expected …). Hint.`
    """

    default_code = "MR-ERR-000"

    def __init__(
        self,
        what: str,
        *,
        code: str | None = None,
        field: str | None = None,
        req_id: str | None = None,
        got: Any = _UNSET,
        expected: Any = _UNSET,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.code = code or self.default_code
        self.field = field
        self.req_id = req_id
        self.got = None if got is _UNSET else got
        self.expected = None if expected is _UNSET else expected
        self.hint = hint
        where = field or ""
        if req_id is not None:
            where += f"[{req_id!r}]"
        values = []
        if got is not _UNSET:
            values.append(f"got {_short(got)}")
        if expected is not _UNSET:
            values.append(f"expected {expected if isinstance(expected, str) else _short(expected)}")
        text = f"{self.code} {where + ': ' if where else ''}{what}"
        if values:
            text += f" ({', '.join(values)})"
        if hint:
            text += f". {hint}"
        super().__init__(text)


class PlanError(RunnerError):
    """A scheduler plan that no correct engine can produce. The runner's state is as before the call."""

    default_code = "MR-ERR-001"


class CallOrderError(RunnerError):
    """A method was called when the protocol does not allow it."""

    default_code = "MR-ERR-002"


class ConfigError(RunnerError, ValueError):
    """A configuration value is out of range or contradicts another one."""

    default_code = "MR-ERR-003"


# So many valid names are listed where another one was given.
MOST_LISTED = 60


class UnknownNameError(ConfigError):
    """A name (runner, option, field, model) that does not exist; the text lists the nearest valid ones, and all of them
    where they are few."""

    default_code = "MR-ERR-004"

    def __init__(self, kind: str, name: str, valid: Iterable[str], **kwargs: Any) -> None:
        valid = sorted(valid)
        near = difflib.get_close_matches(str(name), valid, n=3, cutoff=0.4)
        hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else None
        told = ", ".join(valid) if len(valid) <= MOST_LISTED else f"{len(valid)} names"
        super().__init__(f"unknown {kind} {name!r}", expected="one of " + (told or "(none)"), hint=hint, **kwargs)


class CapabilityError(RunnerError):
    """The runner does not offer what was asked; the text names the capability and who offers it."""

    default_code = "MR-ERR-005"


class SamplingParamsError(RunnerError, ValueError):
    """A sampling parameter is out of range."""

    default_code = "MR-ERR-006"


class CheckpointError(RunnerError):
    """A model file is missing, truncated, foreign, or holds something that this version cannot read."""

    default_code = "MR-ERR-007"


class TraceError(RunnerError):
    """A recording or trace file is broken, incomplete or of another version."""

    default_code = "MR-ERR-008"


class KVCacheError(RunnerError):
    """A KV cache configuration that does not fit the model or the device."""

    default_code = "MR-ERR-009"


class EngineError(RunnerError):
    """A request that the engine cannot serve, or a call it cannot answer."""

    default_code = "MR-ERR-010"


class LogitsProcessorError(RunnerError):
    """A custom logits processor raised, or broke its interface; the text names it and the method."""

    default_code = "MR-ERR-013"


def safely(show: Callable[[Any], str], value: Any) -> str:
    """`show(value)`, `repr` or `str`; where that raises, as foreign code may, its type and that it has no text."""
    try:
        return show(value)
    except Exception:
        return f"<{type(value).__name__} without a text>"


def _short(value: Any, limit: int = 120) -> str:
    text = safely(repr, value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
