"""A pytest fixture: kernels launched by the test are judged. Imports torch and triton only when a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def sanitized() -> Iterator[Any]:
    """A Session that is on for the test, with all checks."""
    from conformance.triton_sanitizer.session import sanitize

    with sanitize() as session:
        yield session
