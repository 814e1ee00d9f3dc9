"""Clauses about the KV cache that no world can test, because its requests never read what they have not computed."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from conformance.context import Mismatch
from conformance.harness import build_runner
from conformance.probe import RECORDED, probe
from runner_api import (
    Capability,
    ModelRunner,
    NewRequestData,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    WitnessConfig,
    WitnessGroup,
)

if TYPE_CHECKING:
    from conformance.probes import Bench

Found = dict[str, list[Mismatch]]
GROUPS = (WitnessGroup(4), WitnessGroup(2))
TOKENS = [9, 8, 7, 6, 5, 4, 3, 2]  # full blocks, and no token is 0
# Blocks of each group: those that `a` writes, and those of `b`, which takes them over in another order.
WRITTEN = ([3, 4], [6, 7, 8, 9])
TAKEN = ([4, 3, 5], [7, 6, 9, 8, 10])
# Of the blocks written, those that poison must leave alone: the second half of the tokens.
KEPT, POISON = (4, 8, 9), -55
# Neither the order of the tables nor that of the ids.
ZEROED = [5, 10, 4, 8, 7, 3, 9, 6]


@probe("KV-008", *RECORDED, Capability.RECORD_KV)
def listed_blocks_read_as_zero(bench: Bench) -> Found:
    """`a` writes blocks and ends; `b` takes them over zeroed, and says of the places in them that they are computed."""
    groups = len(GROUPS) if Capability.MULTI_GROUP in bench.capabilities else 1
    config = RunnerConfig(max_num_reqs=2, max_num_batched_tokens=12, max_model_len=16, record=frozenset({"kv"}))
    runner = build_runner(bench.runner, WitnessConfig(groups=GROUPS[:groups]), config, 11)[0]
    _add(runner, NewRequestData("a", TOKENS, TOKENS, 0, WRITTEN[:groups], SamplingParams(temperature=0.0)))
    longer = [*TOKENS, 1]
    fresh = NewRequestData("b", longer, longer, len(TOKENS), TAKEN[:groups], SamplingParams(temperature=0.0))
    _add(runner, fresh, {"a"}, [block for block in ZEROED if any(block in ids for ids in TAKEN[:groups])])
    return {"MR-KV-008": _not_zero(runner.last_step().kv.get("b"), groups)}


@probe("KV-009", *RECORDED, Capability.POISON, Capability.RECORD_KV)
def poison_fills_free_blocks(bench: Bench) -> Found:
    """`a` writes blocks and ends; they are poisoned but for the second half; `b` says that they are computed."""
    groups = len(GROUPS) if Capability.MULTI_GROUP in bench.capabilities else 1
    config = RunnerConfig(max_num_reqs=2, max_num_batched_tokens=12, max_model_len=16, record=frozenset({"kv"}))
    runner = build_runner(bench.runner, WitnessConfig(groups=GROUPS[:groups]), config, 11)[0]
    _add(runner, NewRequestData("a", TOKENS, TOKENS, 0, WRITTEN[:groups], SamplingParams(temperature=0.0)))
    runner.execute_model(SchedulerOutput(finished_req_ids=frozenset({"a"})))
    runner.poison_unused(POISON, keep_blocks=[b for b in KEPT if any(b in ids for ids in WRITTEN[:groups])])
    longer, blocks = [*TOKENS, 1], ([*WRITTEN[0], 5], [*WRITTEN[1], 10])
    fresh = NewRequestData("b", longer, longer, len(TOKENS), blocks[:groups], SamplingParams(temperature=0.0))
    _add(runner, fresh)
    half = len(TOKENS) // 2
    wanted = [(POISON, POISON)] * half + [(token, p) for p, token in enumerate(longer)][half:]
    kv = runner.last_step().kv.get("b")
    shape = (groups, len(longer), 2)
    if kv is None or kv.shape != shape:
        return {"MR-KV-009": [Mismatch("MR-KV-009", "kv", "b", (), None if kv is None else kv.shape, shape)]}
    found = []
    for g in range(groups):
        wrong = np.flatnonzero((kv[g] != wanted).any(axis=1)).tolist()
        found += [Mismatch("MR-KV-009", "kv", "b", (g, p), tuple(kv[g, p].tolist()), wanted[p]) for p in wrong[:1]]
    return {"MR-KV-009": found}


def _add(
    runner: ModelRunner, new: NewRequestData, finished: Collection[str] = (), zeroed: Collection[int] = ()
) -> None:  # fmt: skip
    n = len(new.prefill_token_ids) - new.num_computed_tokens
    plan = SchedulerOutput(
        [new], num_scheduled_tokens={new.req_id: n}, total_num_scheduled_tokens=n,
        finished_req_ids=frozenset(finished), new_block_ids_to_zero=list(zeroed),
    )  # fmt: skip
    runner.execute_model(plan)
    runner.sample_tokens().get_output()


def _not_zero(kv: np.ndarray | None, groups: int) -> list[Mismatch]:
    """The first place of each group that is not zero; kv: int64[groups, positions, 2] of (token, position)."""
    shape, wanted = None if kv is None else kv.shape, (groups, len(TOKENS) + 1, 2)
    if kv is None or shape != wanted:
        return [Mismatch("MR-KV-008", "kv", "b", (), shape, wanted)]
    found = []
    for g in range(groups):
        wrong = np.flatnonzero(kv[g, : len(TOKENS)].any(axis=1)).tolist()
        found += [Mismatch("MR-KV-008", "kv", "b", (g, p), tuple(kv[g, p].tolist()), (0, 0)) for p in wrong[:1]]
    return found
