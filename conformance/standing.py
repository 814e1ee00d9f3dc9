"""Whether a case stands by itself: a right runner, alone on the plans, gives what is expected of the cell.

A story is told to a candidate with the oracle beside it, which takes the candidate's tokens. What is expected behind a
wrong token is the oracle's value after that token, and no right runner comes to it.
"""

from __future__ import annotations

from dataclasses import replace

from conformance.case import Case
from conformance.cell import Cell, holds
from conformance.evaluate import record_parts
from conformance.foreign import all_let_go
from conformance.harness import build_runner, info_of
from runner_api import Capability, ModelRunnerOutput
from runner_api.protocol import RunnerFactory


@all_let_go()
def stands(case: Case, cell: Cell | None, oracle: RunnerFactory) -> bool:
    """cell None: the oracle need only run the plans. A cell in a part that the oracle does not record stands."""
    offered = info_of(oracle).capabilities
    parts = case.config.record & record_parts(offered)
    if cell is not None and cell.field in case.config.record - parts:
        return True
    try:
        runner, _ = build_runner(oracle, case.model, replace(case.config, record=parts), case.num_blocks)
        output: ModelRunnerOutput | None = None
        records = Capability.STEP_RECORD in offered
        record = earlier = None
        for step in case.steps:
            if step.keep_blocks is not None and Capability.POISON in offered:
                runner.poison_unused(keep_blocks=step.keep_blocks)
            earlier = record
            output = runner.execute_model(step.plan, descriptor=step.descriptor)
            if output is None:
                handle = runner.sample_tokens(step.grammar, forced=step.forced)
                output = handle.get_output()
            record = runner.last_step() if records else None
        return cell is None or holds(cell, record, output, earlier)
    except Exception:  # no right runner follows such a case, or reads such a cell
        return False
