"""Shared by all tests: Hypothesis profiles, and markers that say what a test needs."""

from __future__ import annotations

import os

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
