"""How long Hypothesis searches: `dev` at a desk, `ci` repeatable, `nightly` long and different each night."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

from runner_api import UnknownNameError

_SLOW_STEPS = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)

PROFILES: dict[str, settings] = {
    "dev": settings(max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=_SLOW_STEPS),
    "ci": settings(
        max_examples=150, stateful_step_count=30, deadline=None, derandomize=True, database=None, print_blob=True,
        suppress_health_check=_SLOW_STEPS, phases=(Phase.explicit, Phase.generate, Phase.shrink),
    ),
    "nightly": settings(
        max_examples=2000, stateful_step_count=50, deadline=None, print_blob=True, suppress_health_check=_SLOW_STEPS
    ),
}  # fmt: skip


def profile(name: str) -> settings:
    """The settings of one profile; an unknown name is an error that lists the profiles."""
    if name not in PROFILES:
        raise UnknownNameError("profile", name, PROFILES)
    return PROFILES[name]
