"""Attributes replaced for a while, and put back exactly as they were."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

ABSENT: Any = object()


def replace(stack: ExitStack, target: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack closes, which puts back exactly what was there."""
    original = vars(target).get(name, ABSENT)
    if original is ABSENT:
        stack.callback(delattr, target, name)
    else:
        stack.callback(setattr, target, name, original)
    setattr(target, name, value)
