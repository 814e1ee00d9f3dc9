"""Equal logits that the witness model has by itself: the lowest token id wins, for runners that are told no logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conformance.context import Mismatch
from conformance.probe import RECORDED, probe
from runner_api import Capability, NewRequestData, SamplingParams, SchedulerOutput

if TYPE_CHECKING:
    from conformance.probes import Bench

Found = dict[str, list[Mismatch]]
# Prompts behind which two tokens share the highest logit of the witness model with 64 tokens and one group without
# window, and those two.
TIES = (([14, 31, 3], (30, 58)), ([16, 2, 61], (15, 45)), ([16, 58, 1], (1, 32)), ([18, 50, 1], (2, 55)))


@probe("SAMPLE-001 OUT-004", Capability.GENERATE)
def ties_of_the_model_go_to_the_lowest_id(bench: Bench) -> Found:
    """Each prompt on a fresh runner; the tokens of outputs alone."""
    told = ["MR-OUT-004"]
    if {*RECORDED, Capability.RECORD_LOGITS} <= bench.capabilities:
        told.append("MR-SAMPLE-001")
    found: Found = {clause_id: [] for clause_id in told}
    for prompt, (lowest, _) in TIES:
        runner = bench.fresh()
        new = NewRequestData("a", prompt, prompt, 0, ([1],), SamplingParams(temperature=0.0))
        n = len(prompt)
        runner.execute_model(SchedulerOutput([new], num_scheduled_tokens={"a": n}, total_num_scheduled_tokens=n))
        got = tuple(runner.sample_tokens().get_output().tokens().get("a", ()))
        if got != (lowest,):
            where = f"tokens behind the prompt {prompt}, where two logits are the highest"
            for clause_id in told:
                found[clause_id].append(Mismatch(clause_id, where, "a", (), got, (lowest,)))
    return found
