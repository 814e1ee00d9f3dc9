"""A right runner passes whatever it offers: what it does not offer is neither asked of it nor left without a reason.

The runner is the reference behind a door: what it does not declare it does not do, and whoever asks anyway gets an
exception, which the judge would report.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from conformance.evaluate import evaluate
from cpu_reference.runner import CAPABILITIES, CpuModelRunner
from engine_core.cli import main
from runner_api import Capability, CapabilityError, KVCacheConfig, RunnerConfig, StepRecord

C = Capability
RECORDED = {C.GENERATE, C.STEP_RECORD}
# Alone these can be shown only if worlds are made for them.
OFFERS: dict[str, frozenset[Capability]] = {
    "generate": frozenset({C.GENERATE}),
    "records": frozenset(RECORDED),
    **{f"records, {c}": frozenset({*RECORDED, c}) for c in (C.MULTI_GROUP, C.SLIDING_WINDOW, C.DRAFT_LAYOUT, C.TOP_K)},
    "records, grammar": frozenset({*RECORDED, C.GRAMMAR, C.FORCED_STEP}),
    **{
        f"all but {c}": CAPABILITIES - {c}
        for c in (C.STEP_RECORD, C.POISON, C.STATE_DIGEST, C.SEEDED_SAMPLING, C.PLAN_VALIDATION, C.PADDED_BATCH)
    },
}


class Guarded(CpuModelRunner):
    """Does what it offers; `offers` is set by the test's subclass."""

    stages = None  # type: ignore[assignment]

    def __init__(self, config: RunnerConfig, selection: Any = None) -> None:
        self.needs(C.DRAFT_LAYOUT, config.num_speculative_tokens)
        self.needs(C.RECORD_LOGITS, "logits" in config.record)
        self.needs(C.RECORD_KV, "kv" in config.record)
        super().__init__(config, selection)

    def needs(self, capability: Capability, used: object) -> None:
        if used and capability not in self.capabilities:
            raise CapabilityError("is not offered", field=str(capability))

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        self.needs(C.MULTI_GROUP, len(kv_cache_config.groups) > 1)
        self.needs(C.SLIDING_WINDOW, any(group.spec.sliding_window for group in kv_cache_config.groups))
        super().initialize_kv_cache(kv_cache_config)

    def execute_model(self, plan: Any, *, descriptor: Any = None, intermediate_tensors: Any = None) -> Any:
        self.needs(C.PADDED_BATCH, descriptor)
        return super().execute_model(plan, descriptor=descriptor, intermediate_tensors=intermediate_tensors)

    def sample_tokens(self, grammar: Any = None, *, forced: Any = None) -> Any:
        self.needs(C.GRAMMAR, grammar)
        self.needs(C.FORCED_STEP, forced)
        return super().sample_tokens(grammar, forced=forced)

    def last_step(self) -> StepRecord:
        self.needs(C.STEP_RECORD, "conformance" in sys._getframe(1).f_globals["__name__"])
        return super().last_step()

    def poison_unused(self, *args: Any, **kwargs: Any) -> None:
        self.needs(C.POISON, True)
        super().poison_unused(*args, **kwargs)

    def state_digest(self) -> Any:
        self.needs(C.STATE_DIGEST, True)
        return super().state_digest()


@pytest.mark.parametrize("offers", OFFERS.values(), ids=OFFERS)
def test_a_right_runner_passes_whatever_it_offers(offers: frozenset[Capability]) -> None:
    class Offering(Guarded):
        capabilities = offers - {C.STAGES}

    judged = evaluate(Offering, seeds=(0,), steps=20)
    assert judged.errors == []
    assert judged.failed == []
    assert set(judged.untested) <= {"MR-LOGPROB-001"}  # a few steps do not meet everything
    assert sum(count > 0 for count in judged.tested.values()) >= 10
    assert all(judged.skipped.values())


class Boasts(CpuModelRunner):
    """Declares what no clause asks for."""

    capabilities = CAPABILITIES | {C.POOLING, C.LORA}


def test_what_is_declared_and_not_judged_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{__name__}:Boasts", "--steps", "5", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [note for note in notes if "not judged" in note] == ["declared and not judged: pooling, lora"]
