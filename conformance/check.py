"""`modelrunner check`: who is judged, smoke, clauses by area, lockstep, saved cases, findings, verdict.

`check --json` prints one object: runner, layout (of its rows, and the oracle's), spec_version, seed, rounds, against,
selection (ids, or null for all); smoke (null or text); areas (area to {must: [passed, asked], should: [passed, asked],
skipped}); clauses (id to {outcome: pass | fail | error | skip | xfail | xpass | untested, evaluations, reason, first,
issue}); outcomes (outcome to number of clauses); errors ([{where, error}]); counts (how often each kind of step
occurred); lockstep (a list of {model, dtype, verdict, steps, fields, elements, tokens, near_ties, near_tie_rate,
expected_near_ties, near_tie_cap, first}), lockstep_left_out (null or why); corpus ([{case, clause, outcome: agree |
diverge | skip | error, first}]); findings ([{clause, text}]); notes, faults (why it is no pass); verdict (AGREE or
DIVERGE).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from conformance.case import Case, run_case
from conformance.check_text import check_text
from conformance.clauses import select
from conformance.evaluate import SEEDS, WORLD_CLAUSES, evaluate
from conformance.evaluation import Evaluation
from conformance.expectations import Expectation, check_applying, load_expectations
from conformance.finding import Budget, Finding, find
from conformance.foreign import all_let_go, opened
from conformance.layouts import in_layout
from conformance.lockstep import AGREE, DIVERGE, LockstepResult
from conformance.lockstep_runs import lockstep_on_model, lockstep_on_worlds
from conformance.outcomes import Outcome, Results, results_of
from conformance.probe import RECORDED
from conformance.probe_findings import find_in_probes
from conformance.report_file import ReportWriter, footer_of, header_of
from conformance.smoke import smoke
from runner_api import SPEC_VERSION, Capability, ConfigError, ModelRunner, RunnerConfig, RunnerInfo
from runner_api.config import DTYPES
from runner_api.errors import safely
from runner_api.loader import call_factory, load_factory
from runner_api.protocol import RunnerFactory

# So many failed clauses are shrunk to the smallest plans that show them.
MOST_FINDINGS = 3


@all_let_go()
def run_check(args: argparse.Namespace) -> int:
    """The command. Returns 0 if the runner agrees, 1 if it diverges."""
    _check_arguments(args)
    expectations = load_expectations(args.expectations) if args.expectations else ()
    selection = select(args.clause) if args.clause else None
    runner = load_factory(args.runner) if args.layout is None else in_layout(args.runner, args.layout)
    built = opened(call_factory(runner, RunnerConfig(max_num_reqs=2)))
    info = built.describe()
    if args.save_corpus and Capability.GENERATE not in info.capabilities:
        raise ConfigError(
            "a corpus holds plans of whole steps, which this runner does not offer", field="--save-corpus",
            got=info.name, expected="the capability generate",
        )  # fmt: skip
    check_applying(expectations, info)
    oracle = in_layout(args.against, info.layout)
    opened(call_factory(oracle, RunnerConfig(max_num_reqs=2)))
    header = header_of(built, args.runner, args.against, args.seed, args.rounds, selection, args.expectations)
    writer = ReportWriter(args.report, header) if args.report else None
    try:
        report = _Check(args, runner, oracle, built, expectations, selection, writer).run()
    finally:
        if writer is not None:
            writer.close()
    print(json.dumps(report, indent=2) if args.json else "\n".join(check_text(report)))
    return 0 if report["verdict"] == AGREE else 1


def _check_arguments(args: argparse.Namespace) -> None:
    if args.steps < 1:
        raise ConfigError("nothing would be tested", field="--steps", got=args.steps, expected=">= 1")
    if args.rounds < 1:
        raise ConfigError("nothing would be tested", field="--rounds", got=args.rounds, expected=">= 1")
    if args.seed < 0:
        raise ConfigError("a seed is not negative", field="--seed", got=args.seed, expected=">= 0")
    if args.dtype is not None and not args.model:
        raise ConfigError(
            "the witness model computes in integers", field="--dtype", got=args.dtype, expected="--model beside it",
            hint="Add --model PATH, or leave --dtype out",
        )  # fmt: skip
    if args.max_near_ties is not None and not 0 <= args.max_near_ties <= 1:
        raise ConfigError("a rate per token", field="--max-near-ties", got=args.max_near_ties, expected="0 .. 1")
    for option in ("clause", "expectations", "report"):
        if args.lockstep_only and getattr(args, option):
            raise ConfigError(
                "lockstep alone asks no clause", field=f"--{option}", got=getattr(args, option),
                expected="without --lockstep-only",
            )  # fmt: skip
    if args.clause and args.model:
        raise ConfigError(
            "lockstep is left out where clauses are selected", field="--model", got=args.model, expected="no --clause"
        )


class _Check:
    """One run of the command."""

    def __init__(
        self, args: argparse.Namespace, runner: RunnerFactory, oracle: RunnerFactory, built: ModelRunner,
        expectations: Sequence[Expectation], selection: Sequence[str] | None, writer: ReportWriter | None,
    ) -> None:  # fmt: skip
        self.args, self.runner, self.oracle, self.writer = args, runner, oracle, writer
        self.info = built.describe()
        self.expectations, self.selection = expectations, selection
        self.results: Results | None = None
        self.evaluation: Evaluation | None = None
        self.lines: list[Mapping[str, Any]] = []
        self.testers: Mapping[str, tuple[str, ...]] = {}
        self.report: dict[str, Any] = {
            "runner": self.info.line(), "layout": self.info.layout, "spec_version": SPEC_VERSION, "seed": args.seed,
            "rounds": args.rounds, "against": args.against, "selection": None if selection is None else list(selection),
            "smoke": smoke(runner), "areas": {}, "clauses": {}, "outcomes": {}, "errors": [], "counts": {},
            "lockstep": [], "lockstep_left_out": None, "corpus": [], "findings": [], "notes": [], "faults": [],
        }  # fmt: skip

    def run(self) -> dict[str, Any]:
        """The report. One part after the other; each adds to `faults` what is no pass."""
        if self.report["smoke"] is None:
            self._clauses()
            self._lockstep()
            self._corpus()
            self._findings()
        else:
            self.report["faults"].append(f"smoke: {self.report['smoke']}")
        self.report["verdict"] = DIVERGE if self.report["faults"] else AGREE
        if self.writer is not None:
            if self.results is not None:
                self.writer.results(self.results)
            for line in self.lines:
                self.writer.line(line)
            faults, smoked = self.report["faults"], self.report["smoke"]
            self.writer.finish(footer_of(self.results, faults, self.report["verdict"], smoked))
        return self.report

    def _clauses(self) -> None:
        if self.args.lockstep_only:
            return
        seed, rounds = self.args.seed, self.args.rounds
        found = evaluate(
            self.runner, seeds=range(seed, seed + SEEDS * rounds), stories=range(seed, seed + rounds),
            oracle=self.oracle, layout=self.info.layout, selected=self.selection, info=self.info,
        )  # fmt: skip
        self.evaluation, self.testers = found, found.testers
        self.results = results = results_of(found, self.expectations)
        silent = unjudged(self.info, results) if self.selection is None else []
        declared = [f"declared and not judged: {', '.join(silent)}"] if silent else []
        self.report |= _told(results) | {
            "errors": [{"where": x.where, "error": x.error} for x in results.errors],
            "counts": dict(found.counts), "notes": [*results.notes, *declared], "faults": list(results.faults),
        }  # fmt: skip

    def _lockstep(self) -> None:
        missing = sorted(c.value for c in set(RECORDED) - self.info.capabilities)
        if missing:
            self._leave_lockstep_out(f"not offered: {', '.join(missing)}")
            return
        if self.selection is not None:
            self.report["lockstep_left_out"] = "clauses are selected"
            return
        args = self.args
        most = args.max_near_ties
        result = lockstep_on_worlds(self.runner, self.oracle, args.steps, args.seed, max_near_ties=most)
        self._add_lockstep("witness", None, result)
        if args.model:
            dtype = args.dtype or "float32"
            result = lockstep_on_model(
                self.runner, self.oracle, args.model, args.steps, args.seed, dtype, max_near_ties=most
            )
            self._add_lockstep(args.model, dtype, result)

    def _leave_lockstep_out(self, why: str) -> None:
        if self.args.lockstep_only or self.args.model:
            field = "--lockstep-only" if self.args.lockstep_only else "--model"
            raise ConfigError(f"this runner cannot run in lockstep, {why}", field=field, got=self.info.name)
        self.report["lockstep_left_out"] = why

    def _add_lockstep(self, model: str, dtype: str | None, result: LockstepResult) -> None:
        entry = _lockstep_entry(model, dtype, result)
        self.report["lockstep"].append(entry)
        if result.verdict != AGREE and self._expected:
            self.report["notes"].append(f"lockstep on {model} diverges, as it must: {', '.join(self._expected)} fail")
        elif result.verdict != AGREE:
            self.report["faults"].append(f"lockstep on {model} diverges")
        self._write({"kind": "lockstep", **entry})

    @property
    def _expected(self) -> list[str]:
        """Clauses of whole steps that fail as expected: where there is one, every run beside the oracle shows it."""
        return [] if self.results is None else [c for c in self.results.ids(Outcome.XFAIL) if c in WORLD_CLAUSES]

    def _corpus(self) -> None:
        if not self.args.corpus:
            return
        from conformance.corpus import ERROR, run_corpus

        for case in run_corpus(self.args.corpus, self.runner, self.oracle):
            entry = {"case": case.name, "clause": case.clause_id, "outcome": case.outcome, "first": case.first}
            self.report["corpus"].append(entry)
            if case.outcome == ERROR:
                self.report["faults"].append(f"case {case.name} of the corpus is no test: {case.first}")
            elif not case.agrees and case.failed not in self._expected:
                self.report["faults"].append(f"case {case.name} of the corpus diverges")
            self._write({"kind": "corpus", **entry})

    def _findings(self) -> None:
        """Shrink the first failures; keep what was found, and plans of rare shapes, if that is asked for."""
        if Capability.GENERATE not in self.info.capabilities:
            return
        found = self._find() if self.args.find or self.args.save_corpus else []
        for finding in found:
            self._take_in(finding)
        for finding in found if self.args.find else ():
            entry = {"clause": finding.clause_id, "text": finding.text()}
            self.report["findings"].append(entry)
            self._write({"kind": "finding", **entry})
        if self.args.save_corpus:
            self._save_corpus(found)

    def _find(self) -> list[Finding]:
        """The first thing that goes wrong, and the other failed clauses of worlds, MOST_FINDINGS in all."""
        failed = [] if self.results is None else [c for c in self.results.ids(Outcome.FAIL) if c in WORLD_CLAUSES]
        if not self.report["faults"]:
            return []
        sought: list[Collection[str] | None] = [(c,) for c in failed]
        if self.selection is None and not self._expected:
            sought.insert(0, None)  # whatever shows first; what is expected to fail would be found there
        found: list[Finding] = []
        for clauses in sought:
            known = {f.clause_id for f in found}
            if len(found) == MOST_FINDINGS or (clauses is not None and known & set(clauses)):
                continue
            try:
                finding = find(
                    self.args.runner, oracle=self.args.against, clauses=clauses, seed=self.args.seed,
                    budget=Budget(worlds=SEEDS * self.args.rounds), layout=self.info.layout,
                )  # fmt: skip
            except Exception as e:  # the verdict stands without it
                self.report["notes"].append(f"a failure could not be shrunk: {type(e).__name__}: {safely(str, e)}")
                continue
            if finding is None or (clauses is not None and finding.clause_id is None):
                told = self._outside_clauses() if clauses is None else [", ".join(clauses)]
                self.report["notes"] += [f"{what}: no world shows it by itself, not shrunk" for what in told]
            if finding is not None and not any(_same_cell(finding, other) for other in found):
                found.append(finding)
        self._find_in_probes(found)
        self.report["notes"] += self._not_shrunk({f.clause_id for f in found})
        return found

    def _find_in_probes(self, found: list[Finding]) -> None:
        """Add findings for failed clauses that worlds do not meet, up to MOST_FINDINGS in all."""
        failed = [] if self.results is None else [c for c in self.results.ids(Outcome.FAIL) if c not in WORLD_CLAUSES]
        for clause_id in failed:
            if len(found) == MOST_FINDINGS or clause_id in {f.clause_id for f in found}:
                continue
            try:
                finding = find_in_probes(
                    self.args.runner, clause_id, oracle=self.args.against, layout=self.info.layout
                )  # fmt: skip
            except Exception as e:  # the verdict stands without it
                self.report["notes"].append(f"{clause_id} could not be told: {type(e).__name__}: {safely(str, e)}")
                continue
            if finding is not None and not any(_same_cell(finding, other) for other in found):
                found.append(finding)

    def _take_in(self, finding: Finding) -> None:
        """The search looks at other worlds: a clause that fails there alone has failed, and the report must say so."""
        clause_id, mismatch = finding.clause_id, finding.mismatch
        if self.results is None or self.evaluation is None or clause_id is None or mismatch is None:
            return
        if self.results.clauses[clause_id].outcome not in (Outcome.PASS, Outcome.UNTESTED):
            return
        self.evaluation.note({clause_id: [mismatch]})
        others = self.report["faults"][len(self.results.faults) :]
        self.results = results_of(self.evaluation, self.expectations)
        self.report |= _told(self.results) | {"faults": [*self.results.faults, *others]}
        self.report["notes"].append(f"{clause_id}: found by the search for small plans alone, in a world of its own")

    def _outside_clauses(self) -> list[str]:
        """What went wrong and belongs to no clause: the first exception in a world, and lockstep."""
        errors = [] if self.results is None else self.results.errors
        worlds = [f"an exception in {e.where}" for e in errors if e.where.startswith("world ")]
        return [*worlds[:1], *(f"lockstep on {x['model']}" for x in self.report["lockstep"] if x["verdict"] != AGREE)]

    def _not_shrunk(self, found: Collection[str | None]) -> list[str]:
        """Failed clauses that worlds do not meet, by what has put them to the test; there is no plan to shrink."""
        failed = [] if self.results is None else self.results.ids(Outcome.FAIL)
        failed = [c for c in failed if c not in WORLD_CLAUSES and c not in found]
        by_tester: dict[str, list[str]] = {}
        for clause_id in failed:
            by_tester.setdefault(" or ".join(self.testers[clause_id]), []).append(clause_id)
        return [
            f"{', '.join(ids)}: shown by {tester} on its own plans, not shrunk" for tester, ids in by_tester.items()
        ]

    def _save_corpus(self, found: Sequence[Finding]) -> None:
        from conformance.corpus import rare_cases, save_case

        folder = self.args.save_corpus
        kept = [f for f in found if f.probe is None or self._fails_as_a_case(f)]
        for finding in kept:
            save_case(folder, finding.case, finding.clause_id, f"found in {self.info.name}, seed {self.args.seed}")
        rare: Mapping[str, Case] = {}
        if set(RECORDED) <= self.info.capabilities:
            rare = rare_cases(self.runner, self.args.seed, self.info.capabilities)
        for shape, case in rare.items():
            name = f"{self.info.layout}-{shape}".replace("_", "-")
            save_case(folder, case, None, f"rare shape: {shape}", name)
        self.report["notes"].append(f"corpus: {len(kept)} failing and {len(rare)} rare cases saved in {folder}")
        if len(kept) < len(found):
            told = ", ".join(str(f.clause_id) for f in found if f not in kept)
            self.report["notes"].append(f"corpus: {told} not saved, as no law of whole steps fails there")

    def _fails_as_a_case(self, finding: Finding) -> bool:
        """A case of the corpus is judged by the laws of whole steps, which a probe's plans need not break."""
        try:
            return not run_case(finding.case, self.runner, self.oracle).passed
        except ConfigError:  # it relies on what a probe imposed
            return False

    def _write(self, line: Mapping[str, Any]) -> None:
        """Kept until the clauses are written, of which the findings may say more."""
        self.lines.append(line)


def _told(results: Results) -> dict[str, Any]:
    """What a report says of clauses."""
    return {
        "areas": results.areas(),
        "clauses": {clause_id: result.as_json() for clause_id, result in results.clauses.items()},
        "outcomes": {outcome.value: len(results.ids(outcome)) for outcome in Outcome},
    }


def unjudged(info: RunnerInfo, results: Results) -> list[str]:
    """Capabilities that the runner declares and that no clause required which came to a result.

    Dtypes are no behaviour. Clauses of the dense layout require that layout.
    """
    quiet = (Outcome.SKIP, Outcome.UNTESTED)
    judged: set[Capability] = set()
    for result in results.clauses.values():
        if result.outcome not in quiet:
            judged |= result.clause.requires
            judged |= {Capability.DENSE_LAYOUT} if result.clause.layout == "dense" else set()
    return [c.value for c in Capability if c in info.capabilities - judged and c.value not in DTYPES]


def _same_cell(a: Finding, b: Finding) -> bool:
    """Whether two clauses fail by one element of one batch, or by one exception: the second telling would say nothing
    new."""
    if a.cell is None:
        return a.error is not None and a.error == b.error
    return (a.step, a.table, str(a.cell)) == (b.step, b.table, str(b.cell))


def _lockstep_entry(model: str, dtype: str | None, result: LockstepResult) -> dict[str, Any]:
    return {
        "model": model, "dtype": dtype, "verdict": result.verdict, "steps": result.steps, "fields": result.fields,
        "elements": result.elements, "tokens": result.tokens, "near_ties": result.near_ties,
        "near_tie_rate": result.near_ties / max(result.tokens, 1), "expected_near_ties": result.expected_near_ties,
        "near_tie_cap": result.near_tie_cap,
        "first": None if result.first is None else str(result.first),
    }  # fmt: skip
