"""Scenarios of one runner: run the steps, look at records and outputs, compare."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.catalogue.comparison import Difference, differ_between, differs, plain
from conformance.catalogue.scenario import ALL, Scenario, Setup, Step
from conformance.catalogue.script import Script, Share, config_of, model_of, params_of
from conformance.foreign import opened
from conformance.planned_step import spoil
from runner_api import (
    AsyncModelRunnerOutput,
    Capability,
    CapabilityError,
    ModelRunner,
    ModelRunnerOutput,
    RunnerError,
    SampleFault,
    StepRecord,
    group_kv_cache_specs,
)
from runner_api.loader import call_factory
from runner_api.protocol import RunnerFactory

# Fields of a record that have one entry per token, and one per request.
TOKEN_FIELDS = ("input_ids", "positions", "slot_mappings")
REQUEST_FIELDS = ("idx_mapping", "seq_lens", "num_sampled", "num_rejected", "seeds", "draft_token_ids", "faults")


def needs(case: Scenario, layout: str) -> frozenset[Capability]:
    """What a runner must offer for the scenario to mean anything."""
    setup, steps = case.setup, case.steps
    wanted = {
        Capability.GENERATE: True, Capability.STEP_RECORD: True,
        Capability.DENSE_LAYOUT: layout == "dense",
        Capability.MULTI_GROUP: len(setup.groups) > 1,
        Capability.SLIDING_WINDOW: any(g.window for g in setup.groups),
        Capability.FORCED_STEP: any(s.logits or s.take or s.hold for s in steps),
        Capability.PADDED_BATCH: any(s.pad for s in steps),
        Capability.DRAFT_LAYOUT: any(s.drafts or s.hold for s in steps),
        Capability.GRAMMAR: any(s.grammar for s in steps),
        Capability.POISON: any(s.poison for s in steps),
        Capability.ASYNC_OUTPUT: any(s.late for s in steps),
        Capability.PLAN_VALIDATION: any(s.refused for s in steps),
        Capability.SAMPLE_FAULTS: any(s.faults for s in steps),
        Capability.RECORD_KV: "kv" in setup.config.get("record", ()),
        Capability.LOGITS_PROCESSORS: bool(setup.config.get("logits_processors")),
    }  # fmt: skip
    asked = frozenset().union(*(params_of(r).required_capabilities() for r in case.requests))
    return asked | {c for c, wants in wanted.items() if wants}


class NotOffered(Exception):
    """The runner refuses what no capability is declared for."""


class Play:
    """One scenario on one runner of one layout."""

    def __init__(self, case: Scenario, layout: str, runner: str | RunnerFactory) -> None:
        self.case = case
        self.layout = layout
        self.factory = runner
        self.runner = _built(case.setup, layout, runner)
        self.script = Script(case.setup, layout, case.requests)
        self.found: list[Difference] = []
        self._late: list[tuple[str, Step, Any]] = []

    def run(self) -> list[Difference]:
        """All steps, then what must hold of them together."""
        number = 0
        for step in self.case.steps:
            for _ in range(step.repeat):
                number += 1
                if not self._step(f"step {number}", step):
                    return self.found  # a plan went through that must not: nothing after it means anything
        for where, step, handle in self._late:
            self._compare_output(where, step, handle.get_output())
        self._compare_all()
        return self.found

    # -- one step ---------------------------------------------------------------------------------------------

    def _step(self, where: str, step: Step) -> bool:
        if step.poison:
            self.runner.poison_unused(-77)
        if step.refused:
            return self._refused(where, step)
        plan, shares = self.script.plan(step)
        self.runner.execute_model(plan, descriptor=self.script.descriptor(step))
        if step.spoil:
            spoil(plan)
        if not shares:
            return True
        order = self.runner.last_step().req_ids
        if sorted(order) != sorted(shares):
            self.found += differs(f"{where} req_ids", sorted(order), sorted(shares))
            return False
        handle = self._sample(step, shares)
        record = self.runner.last_step()
        self._compare_record(where, step, record, shares)
        if step.late:
            self._late.append((where, step, handle))
        else:
            self._compare_output(where, step, handle.get_output())
        self._advance(step, shares)
        return True

    def _refused(self, where: str, step: Step) -> bool:
        """The plan or its shape must be refused, and nothing may change; or its masks or its outcome, and the step must
        still wait: it is sampled without them then."""
        kept, before = copy.deepcopy(self.script), self._digest()
        plan, shares = self.script.plan(step)
        got, waits = "accepted", False
        try:
            waits = self.runner.execute_model(plan, descriptor=self.script.descriptor(step)) is None
            if step.imposes and waits:
                self._sample(step, shares)
        except RunnerError as e:
            got = e.code
        self.found += differs(f"{where} refused", got, step.refused)
        if got == "accepted":
            return False
        if waits:
            # What becomes of drafts must be said: none of them is taken.
            take = {self.script.by_id(r).spec.name: 0 for r in shares} if step.drafts else {}
            plainly = replace(step, grammar=(), logits={}, take=take, hold={})
            self._sample(plainly, shares).get_output()
            self._advance(plainly, shares)
        else:
            self.script = kept
            self.found += differs(f"{where} state_digest", self._digest(), before)
        return True

    def _sample(self, step: Step, shares: Mapping[str, Share]) -> AsyncModelRunnerOutput:
        """With the masks, logits and outcome of the step."""
        forced = self.script.forced(step, self.runner.last_step().req_ids, shares)
        return self.runner.sample_tokens(self.script.grammar(step.grammar), forced=forced)

    def _advance(self, step: Step, shares: Mapping[str, Share]) -> None:
        record = self.runner.last_step()
        self.script.advance(step, shares, _drawn(record, shares), {r: list(t) for r, t in record.tokens().items()})

    def _digest(self) -> Any:
        offered = self.runner.describe().capabilities
        return dict(self.runner.state_digest()) if Capability.STATE_DIGEST in offered else None

    # -- what is seen -----------------------------------------------------------------------------------------

    def _compare_record(self, where: str, step: Step, record: StepRecord, shares: Mapping[str, Share]) -> None:
        for name, expected in step.seen.items():
            if isinstance(expected, Mapping):
                for request, value in expected.items():
                    req_id = self.script.lives[request].req_id
                    self.found += differs(f"{where} {name}[{request}]", of_request(record, name, req_id), value)
            else:
                self.found += differs(f"{where} {name}", _whole(record, name), expected)
        drawn = _drawn(record, shares)
        for request, expected in step.draws.items():
            want = [expected] if isinstance(expected, int) else expected
            self.found += differs(f"{where} draws[{request}]", drawn[self.script.lives[request].req_id], want)

    def _compare_output(self, where: str, step: Step, output: ModelRunnerOutput) -> None:
        tokens, index = output.tokens(), output.req_id_to_index
        for request, expected in step.tokens.items():
            want = [expected] if isinstance(expected, int) else expected
            self.found += differs(f"{where} tokens[{request}]", tokens.get(self.script.lives[request].req_id), want)
        if step.faults or any(self.script.lives[r].req_id in output.errors for r in step.tokens):
            got = {r: SampleFault(f).name for r, f in output.errors.items()}
            want_faults = {self.script.lives[r].req_id: f for r, f in step.faults.items()}
            self.found += differs(f"{where} faults", got, want_faults)
        for request, expected in step.logprobs.items():
            pairs = _scores(output, index[self.script.lives[request].req_id])
            if not expected:
                self.found += differs(f"{where} logprobs[{request}]", pairs, {})
            for token, value in dict(expected).items():
                self.found += differs(f"{where} logprobs[{request}][{token}]", pairs.get(int(token)), float(value))

    # -- all steps together -----------------------------------------------------------------------------------

    def _compare_all(self) -> None:
        expect, lives = self.case.expect, self.script.lives
        draws = {name: [draw for _, _, drawn, _ in life.outputs for draw in drawn] for name, life in lives.items()}
        for name in lives if expect.solo == ALL else expect.solo:
            self.found += differs(f"draws[{name}], as alone", draws[name], self._alone(name))
        self.found += differ_between("draws", draws, expect.alike, expect.differ, expect.varied)
        for name, want in expect.tokens.items():
            life = lives[name]
            self.found += differs(f"outputs[{name}]", life.tokens[len(life.spec.prompt) :], want)

    def _alone(self, name: str) -> list[int]:
        """What the request draws on a fresh runner without any other, the same logits and tokens imposed."""
        told = self.script.lives[name]
        spec = replace(told.spec, computed=0, blocks=None)
        runner, script = (
            _built(self.case.setup, self.layout, self.factory),
            Script(self.case.setup, self.layout, [spec]),
        )
        drawn: list[int] = []
        for logits, imposed, _, taken in told.outputs:
            step = Step(
                run=(name,), logits={} if logits is None else {name: tuple(map(tuple, logits))},
                take={name: taken} if imposed else {},
            )  # fmt: skip
            plan, shares = script.plan(step)
            runner.execute_model(plan)
            runner.sample_tokens(forced=script.forced(step, [told.req_id], shares)).get_output()
            record = runner.last_step()
            script.advance(step, shares, _drawn(record, shares), {r: list(t) for r, t in record.tokens().items()})
            drawn += _drawn(record, shares)[told.req_id]
        return drawn


def _built(setup: Setup, layout: str, runner: str | RunnerFactory) -> ModelRunner:
    built: ModelRunner = opened(call_factory(runner, config_of(setup, layout)))
    built.load_model(model_of(setup))
    cache = group_kv_cache_specs(built.get_kv_cache_specs(), setup.num_blocks)
    kernel_sizes = [g.kernel_block_size for g in setup.groups]
    if any(kernel_sizes):
        groups = zip(cache.groups, kernel_sizes, strict=True)
        cache = replace(cache, groups=tuple(replace(group, kernel_block_size=size) for group, size in groups))
        try:
            built.initialize_kv_cache(cache)
        except CapabilityError as e:
            raise NotOffered(str(e)) from e
        return built
    built.initialize_kv_cache(cache)
    return built


def _scores(output: ModelRunnerOutput, i: int) -> dict[int, float]:
    """Log probabilities of a row by token id; none where the step has none."""
    lists = output.logprobs
    return {} if lists is None else dict(zip(lists.token_ids[i].tolist(), lists.logprobs[i].tolist(), strict=True))


def _drawn(record: StepRecord, shares: Mapping[str, Share]) -> dict[str, list[int]]:
    """The runner's own choice after each logits row, by request."""
    ids = np.asarray(record.token_ids)
    return {r: ids[i, : 1 + shares[r].drafts].tolist() for i, r in enumerate(record.req_ids) if r in shares}


def _whole(record: StepRecord, name: str) -> Any:
    """A field as a list; per group only where there are several."""
    value = plain(getattr(record, name))
    return value[0] if name in ("slot_mappings", "block_tables") and len(value) == 1 else value


def of_request(record: StepRecord, name: str, req_id: str) -> Any:
    """What a field of the record says of one request: its tokens' entries, its own entry, its blocks or its KV."""
    i = record.row_of(req_id)
    if name == "kv":
        kv = plain(record.kv[req_id])
        return kv[0] if len(kv) == 1 else kv
    if name == "block_tables":
        tables = [plain(group[i]) for group in record.block_tables]
        return tables[0] if len(tables) == 1 else tables
    value = np.asarray(getattr(record, name))
    if name in TOKEN_FIELDS:
        low, high = int(record.query_start_loc[i]), int(record.query_start_loc[i + 1])
        part = plain(value[..., low:high])
        return part[0] if name == "slot_mappings" and len(part) == 1 else part
    if name not in REQUEST_FIELDS:
        raise KeyError(f"{name} is not a field by request: {', '.join((*TOKEN_FIELDS, *REQUEST_FIELDS))}")
    return plain(value[i])


def play(case: Scenario, layout: str, runner: str | RunnerFactory) -> list[Difference]:
    """Run the scenario's steps on one runner of this layout: what is not as it says. Raises what the runner raises."""
    return Play(case, layout, runner).run()
