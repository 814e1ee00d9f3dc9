"""Shared by all tests: Hypothesis profiles, and markers that say what a test needs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from conformance.profiles import PROFILES

for name, profile in PROFILES.items():
    settings.register_profile(name, profile)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, with the reason, where there is no NVIDIA GPU."""
    if not any(item.get_closest_marker("gpu") for item in items) or _has_cuda():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session", autouse=True)
def _fast_kernels() -> Iterator[None]:
    """Interpreted kernels run about twice as fast; nothing changes where there is no triton, or a GPU."""
    try:
        from gpu_backend.triton_support import INTERPRETED
    except ImportError:
        INTERPRETED = False
    if not INTERPRETED:
        yield
        return
    from conformance.triton_sanitizer import fast_interpreter

    with fast_interpreter():
        yield
