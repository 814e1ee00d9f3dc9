"""The least that a runner must do before it is worth judging.

One that runs whole steps: one request, one token, an empty step, a finish. One that offers stages alone: its first
stage on one small batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.foreign import RAISED, all_let_go, shut_down
from conformance.harness import build_runner, info_of
from conformance.stage_cases import draw_cases
from runner_api import (
    CachedRequestData,
    Capability,
    NewRequestData,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    WitnessConfig,
    WitnessGroup,
    load_stages,
)
from runner_api.errors import safely
from runner_api.protocol import RunnerFactory

ADVICE = "The adapter itself is at fault, not a clause: mend this step first, the clauses would all fail for it."
ANSWERED = "execute_model answered an output for a plan with tokens; None is expected, and sample_tokens comes next"


def smoke(runner: str | RunnerFactory) -> str | None:
    """None if the runner comes through; otherwise what went wrong in which step."""
    try:
        offered = info_of(runner).capabilities
    except RAISED as e:
        return f"build the runner: {type(e).__name__}: {safely(str, e)}"
    if Capability.GENERATE in offered:
        return _whole_steps(runner, offered)
    if Capability.STAGES in offered:
        return _first_stage(runner)
    return "read its capabilities: it offers neither whole steps (generate) nor stages (stages); nothing can be judged"


@all_let_go()
def _whole_steps(runner: str | RunnerFactory, offered: frozenset[Capability]) -> str | None:
    stage = "build the runner and load the witness model"
    try:
        config = RunnerConfig(max_num_reqs=2, max_num_batched_tokens=8, max_model_len=16)
        built, cache = build_runner(runner, WitnessConfig(groups=(WitnessGroup(4),)), config, 8)
        groups = [(group.spec.block_size, group.spec.sliding_window) for group in cache.groups]
        if groups != [(4, None)]:
            return f"{stage}: get_kv_cache_specs gives (block size, window) {groups} by group, expected {[(4, None)]}"
        stage = "prefill three tokens of one request"
        new = NewRequestData("a", [1, 2, 3], [1, 2, 3], 0, ([1],), SamplingParams(temperature=0.0))
        plan = SchedulerOutput([new], num_scheduled_tokens={"a": 3}, total_num_scheduled_tokens=3)
        if built.execute_model(plan) is not None:
            return f"{stage}: {ANSWERED}"
        stage = "sample and take the output"
        tokens = built.sample_tokens().get_output().tokens()
        if list(tokens) != ["a"] or len(tokens["a"]) != 1:
            return f"{stage}: got {tokens!r}, expected one token of request 'a'"
        stage = "decode one token"
        plan = SchedulerOutput([], CachedRequestData(["a"], [3], [None], [1]), {"a": 1}, 1)
        if built.execute_model(plan) is not None:
            return f"{stage}: {ANSWERED}"
        built.sample_tokens().get_output()
        if Capability.STEP_RECORD in offered:
            stage = "read the record of the step"
            fed = built.last_step().input_ids.tolist()
            if fed != list(tokens["a"]):
                return f"{stage}: input_ids {fed!r}, expected the token drawn before, {tokens['a']!r}"
        stage = "run an empty step that finishes the request"
        output = built.execute_model(SchedulerOutput(finished_req_ids=frozenset({"a"})))
        if getattr(output, "req_ids", None) not in ((), []):
            return f"{stage}: got {output!r}, expected an output without requests"
        stage = "shut down"
        shut_down(built)
    except RAISED as e:
        return f"{stage}: {type(e).__name__}: {safely(str, e)}"
    return None


def _first_stage(runner: str | RunnerFactory) -> str | None:
    """Its outputs must come back, in the shapes and types in which they went in."""
    stage = "list the stages"
    try:
        stages = load_stages(runner)
        cases = [
            case for case in draw_cases(np.random.default_rng(0), load_stages("cpu")) if case.stage in stages.stages
        ]
        if not cases:
            return f"{stage}: {', '.join(sorted(stages.stages)) or 'none'}; no clause speaks of any of these"
        order = list(stages.stages)
        case = min(cases, key=lambda c: order.index(c.stage))
        stage = f"run stage {case.stage} on one batch"
        got = stages.run(case.stage, **case.arrays)
        for name in {region[1] for region in case.regions}:
            if _shape(got.get(name)) != _shape(case.arrays[name]):
                return f"{stage}: {name} came back as {_shape(got.get(name))}, expected {_shape(case.arrays[name])}"
    except RAISED as e:
        return f"{stage}: {type(e).__name__}: {safely(str, e)}"
    return None


def _shape(value: Any) -> str:
    """Types and shapes in words; those of each array in a list."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shape, value))
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
