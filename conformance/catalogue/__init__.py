"""Public bug reports about model runners, as scenarios: data in `cases/*.toml`, and one engine that runs them.

A scenario says which requests run for how many tokens in each step, what is imposed (logits, tokens, drafts, masks, a
padded shape), and what must be seen: fields of the StepRecord, the runner's own draws, what comes out, an error that
must be raised, or that a request draws what it draws alone. It brings at least one faulty variant, a changed expression
that makes the reference (or the engine) do what the report describes, and which it must catch. Four levels:

    runner  steps of one runner (`runner_level`): requests, steps, expect
    stage   single stages on given arrays (`stage_level`): calls
    engine  scheduler, block pool, executor and runner to the end (`engine_level`): requests with `at` and `abort`,
            setup.limits, expect
    late    the host's part of each step, with all copies to the device held back (`late_level`): requests, steps

`scenario.py` holds every key with what it means, docs/write-a-scenario.md a worked example.

    python -m conformance.catalogue                       all cases on the reference
    python -m conformance.catalogue B21 K4 --variants     some cases or kinds, with their faulty variants
"""

from conformance.catalogue.judge import Result, caught, run, run_case, run_variants
from conformance.catalogue.scenario import Scenario, catalogue, parse, select

__all__ = ["Result", "Scenario", "catalogue", "caught", "parse", "run", "run_case", "run_variants", "select"]
