"""The least that a runner must do before it is worth judging: one request, one token, an empty step, a finish."""

from __future__ import annotations

from conformance.harness import build_runner
from runner_api import (
    CachedRequestData,
    NewRequestData,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    WitnessConfig,
    WitnessGroup,
)
from runner_api.protocol import RunnerFactory

ADVICE = "The adapter itself is at fault, not a clause: mend this step first, the clauses would all fail for it."


def smoke(runner: str | RunnerFactory) -> str | None:
    """None if the runner comes through; otherwise what went wrong in which step."""
    stage = "build the runner and load the witness model"
    try:
        config = RunnerConfig(max_num_reqs=2, max_num_batched_tokens=8, max_model_len=16)
        built, _ = build_runner(runner, WitnessConfig(groups=(WitnessGroup(4),)), config, 8)
        stage = "prefill three tokens of one request"
        new = NewRequestData("a", [1, 2, 3], [1, 2, 3], 0, ([1],), SamplingParams(temperature=0.0))
        built.execute_model(SchedulerOutput([new], num_scheduled_tokens={"a": 3}, total_num_scheduled_tokens=3))
        stage = "sample and take the output"
        tokens = built.sample_tokens().get_output().tokens()
        if list(tokens) != ["a"] or len(tokens["a"]) != 1:
            return f"{stage}: got {tokens!r}, expected one token of request 'a'"
        stage = "decode one token"
        built.execute_model(SchedulerOutput([], CachedRequestData(["a"], [3], [None], [1]), {"a": 1}, 1))
        built.sample_tokens().get_output()
        stage = "read the record of the step"
        record = built.last_step()
        if record.input_ids.tolist() != list(tokens["a"]):
            return f"{stage}: input_ids {record.input_ids.tolist()!r}, expected the token drawn before, {tokens['a']!r}"
        stage = "run an empty step that finishes the request"
        output = built.execute_model(SchedulerOutput(finished_req_ids=frozenset({"a"})))
        if output is None or getattr(output, "req_ids", None) != ():
            return f"{stage}: got {output!r}, expected an output without requests"
        stage = "shut down"
        built.shutdown()
    except Exception as e:
        return f"{stage}: {type(e).__name__}: {e}"
    return None
