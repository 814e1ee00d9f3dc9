"""A runner that a recording asks too much of is told what it does not offer, before which field it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import conformance
from conformance.replay import prepare_replay
from runner_api import Capability, CapabilityError, RunnerConfig
from runner_api.loader import call_factory

RECORDING = Path(conformance.__file__).parent / "data" / "recordings" / "mixed.jsonl"


def factory_of(*capabilities: Capability) -> Any:
    """Runners that offer these, and know no `window_reach`."""

    def factory(config: RunnerConfig) -> Any:
        if config.window_reach is not None:
            raise CapabilityError("is not offered", field="window_reach")
        runner: Any = call_factory("cpu", config)
        info = replace(runner.describe(), capabilities=frozenset(capabilities))
        runner.describe = lambda: info
        return runner

    return factory


def test_what_is_not_offered_comes_before_what_is_refused() -> None:
    with pytest.raises(CapabilityError, match="does not offer forced_step, record_logits"):
        prepare_replay(RECORDING, runner=factory_of(Capability.GENERATE))
    with pytest.raises(CapabilityError, match="window_reach: is not offered"):
        prepare_replay(RECORDING, runner=factory_of(*Capability))
