"""Whether a case stands by itself: a right runner, alone on the plans, gives what is expected of the cell.

A story is told to a candidate with the oracle beside it, which takes the candidate's tokens. What is expected behind a
wrong token is the oracle's value after that token, and no right runner comes to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from conformance.case import Case
from conformance.cell import Cell, holds
from conformance.evaluate import record_parts
from conformance.foreign import all_let_go, own_copy
from conformance.harness import build_runner, info_of
from runner_api import Capability, ModelRunnerOutput, StepRecord
from runner_api.protocol import RunnerFactory


def steps_alone(
    case: Case, factory: RunnerFactory
) -> Iterator[tuple[StepRecord | None, ModelRunnerOutput]]:  # fmt: skip
    """Run the case on one runner: record (None from a runner that keeps none) and output of each step. Raises what the
    runner raises. Who calls this lets the runner go (`foreign.all_let_go`)."""
    runner, _ = build_runner(factory, case.model, case.config, case.num_blocks)
    offered = runner.describe().capabilities
    for step in case.steps:
        if step.keep_blocks is not None and Capability.POISON in offered:
            runner.poison_unused(keep_blocks=step.keep_blocks)
        output = runner.execute_model(own_copy(step.plan), descriptor=step.descriptor)
        if not isinstance(output, ModelRunnerOutput):
            output = runner.sample_tokens(step.grammar, forced=step.forced).get_output()
        yield runner.last_step() if Capability.STEP_RECORD in offered else None, output


@all_let_go()
def stands(case: Case, cell: Cell | None, oracle: RunnerFactory) -> bool:
    """cell None: the oracle need only run the plans. A cell in a part that the oracle does not record stands."""
    offered = info_of(oracle).capabilities
    parts = case.config.record & record_parts(offered)
    if cell is not None and cell.field in case.config.record - parts:
        return True
    try:
        output: ModelRunnerOutput | None = None
        record = earlier = None
        for seen in steps_alone(replace(case, config=replace(case.config, record=parts)), oracle):
            earlier, (record, output) = record, seen
        return cell is None or holds(cell, record, output, earlier)
    except Exception:  # no right runner follows such a case, or reads such a cell
        return False
