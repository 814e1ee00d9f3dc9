"""`modelrunner check` and `modelrunner clauses`: who is judged, smoke, clauses by area, lockstep, verdict.

`check --json` prints one object: runner, layout (of its rows, and the oracle's), spec_version, seed, against; smoke
(null or text); areas (area to {must: [passed, total], should: [passed, total], skipped}); clauses (id to {outcome: pass
| fail | skip | untested, evaluations, reason, first}); errors ([{where, error}]); counts (how often each kind of step
occurred); lockstep (a list of {model, dtype, verdict, steps, fields, elements, tokens, near_ties, near_tie_rate,
expected_near_ties, near_tie_cap, first}); verdict (AGREE or DIVERGE).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.certificates import near_ties_text
from conformance.clauses import Clause, clause, load_clauses
from conformance.dense import DenseLlama, DenseLogits
from conformance.driver import KINDS, RandomDriver, draw_size
from conformance.evaluate import Evaluation, can_run, evaluate
from conformance.harness import build_runner
from conformance.layouts import in_layout
from conformance.lockstep import AGREE, DIVERGE, Lockstep, LockstepResult, TokenPolicy
from conformance.report import plain_table
from conformance.smoke import ADVICE, smoke
from conformance.world import PlanWorld
from runner_api import SPEC_VERSION, Capability, ConfigError, RunnerConfig
from runner_api.loader import call_factory, load_factory
from runner_api.protocol import RunnerFactory

STEPS_PER_WORLD = 50
# A real model costs much more a step; its worlds are small.
MODEL_CONFIG = {"max_num_reqs": 4, "max_num_batched_tokens": 48, "max_model_len": 64}
MODEL_BLOCKS, MODEL_PROMPT = 40, 20
# The second line of the text.
SHOWN = {"layout": "layout", "spec": "spec_version", "seed": "seed", "against": "against"}


def run_check(args: argparse.Namespace) -> int:
    """The command. Returns 0 if the runner agrees, 1 if it diverges."""
    if args.steps < 1:
        raise ConfigError("nothing would be tested", field="--steps", got=args.steps, expected=">= 1")
    if args.seed < 0:
        raise ConfigError("a seed is not negative", field="--seed", got=args.seed, expected=">= 0")
    if args.dtype is not None and not args.model:
        raise ConfigError(
            "the witness model computes in integers", field="--dtype", got=args.dtype, expected="--model beside it",
            hint="Add --model PATH, or leave --dtype out",
        )  # fmt: skip
    if args.max_near_ties is not None and not 0 <= args.max_near_ties <= 1:
        raise ConfigError("a rate per token", field="--max-near-ties", got=args.max_near_ties, expected="0 .. 1")
    dtype = args.dtype or "float32"
    runner = load_factory(args.runner) if args.layout is None else in_layout(args.runner, args.layout)
    info = call_factory(runner, RunnerConfig(max_num_reqs=2)).describe()
    oracle = in_layout(args.against, info.layout)
    call_factory(oracle, RunnerConfig(max_num_reqs=2))
    report: dict[str, Any] = {
        "runner": info.line(), "layout": info.layout, "spec_version": SPEC_VERSION, "seed": args.seed,
        "against": args.against,
        "smoke": smoke(runner), "areas": {}, "clauses": {}, "errors": [], "counts": {}, "lockstep": [],
    }  # fmt: skip
    if report["smoke"] is None:
        agreed = True
        if not args.lockstep_only:
            seeds = (args.seed, args.seed + 1, args.seed + 2)
            evaluation = evaluate(runner, seeds=seeds, oracle=oracle, layout=info.layout)
            _add_clauses(report, evaluation)
            agreed = evaluation.passed
        most = args.max_near_ties
        results = [("witness", lockstep_on_worlds(runner, oracle, args.steps, args.seed, max_near_ties=most))]
        if args.model:
            result = lockstep_on_model(runner, oracle, args.model, args.steps, args.seed, dtype, max_near_ties=most)
            results.append((args.model, result))
        report["lockstep"] = [_lockstep_entry(name, result) for name, result in results]
        if args.model:
            report["lockstep"][1]["dtype"] = dtype
        agreed = agreed and all(result.verdict == AGREE for _, result in results)
    else:
        agreed = False
    report["verdict"] = AGREE if agreed else DIVERGE
    print(json.dumps(report, indent=2) if args.json else "\n".join(_text(report)))
    return 0 if agreed else 1


def run_clauses(args: argparse.Namespace) -> int:
    """List the clauses whose id (with or without `MR-`) starts with `args.area`."""
    start = (args.area or "").upper()
    chosen = [c for c in load_clauses().values() if c.id.startswith(start) or c.id.startswith(f"MR-{start}")]
    if not chosen:
        clause(start)  # raises, with the nearest ids
    if args.json:
        entries = [
            {"id": c.id, "level": c.level, "layout": c.layout, "since": c.since,
             "requires": list(c.missing(frozenset())), "law": c.law, "source": c.source}
            for c in chosen
        ]  # fmt: skip
        print(json.dumps(entries, indent=2))
    else:
        lines = [[c.id, c.level, c.law, " ".join(c.missing(frozenset()))] for c in chosen]
        print(plain_table([["clause", "level", "law", "requires"], *lines]))
    return 0


# -- lockstep runs --------------------------------------------------------------------------------------------


def lockstep_on_worlds(
    runner: RunnerFactory, oracle: RunnerFactory, steps: int, seed: int, lag: int | None = None,
    max_near_ties: float | None = None,
) -> LockstepResult:  # fmt: skip
    """Witness-model worlds of every kind in turn, until `steps` steps agree or one does not.

    lag None: alternate between taking outputs at once and a step late, where the runner offers it. The oracle records
    its logits, which are the candidate's too, so that a token may be a near tie by its certificate.
    """
    info = call_factory(runner, RunnerConfig(max_num_reqs=2)).describe()
    offered = info.capabilities
    kinds = [k for k in KINDS if can_run(k, offered)]
    total, number = LockstepResult(), 0
    while total.steps < steps and total.first is None:
        random = np.random.default_rng([seed, 1000 + number])
        late = number % 2 if Capability.ASYNC_OUTPUT in offered else 0
        size = draw_size(kinds[number % len(kinds)], random, offered=offered, layout=info.layout)
        candidate, cache = build_runner(runner, size.model, size.config, size.num_blocks)
        with_logits = replace(size.config, record=frozenset({"logits"}))
        reference, _ = build_runner(oracle, size.model, with_logits, size.num_blocks)
        world = PlanWorld(size.config, cache, size.model.vocab_size)
        policy = TokenPolicy(max_near_ties=max_near_ties)
        lockstep = Lockstep(candidate, reference, policy, late if lag is None else lag, total)
        _drive(lockstep, world, RandomDriver(random, offered), min(STEPS_PER_WORLD, steps - total.steps))
        number += 1
    return total


def lockstep_on_model(
    runner: RunnerFactory, oracle: RunnerFactory, model: str, steps: int, seed: int, dtype: str = "float32",
    max_near_ties: float | None = None,
) -> LockstepResult:  # fmt: skip
    """One world on a real model, with token prompts drawn from its vocabulary; every token is certified.

    The oracle computes in float32, or float64 for a float64 candidate. For half-precision candidates the logit error
    is bounded by that of an independent dense run in the same format (conformance/dense.py).
    """
    from runner_api.checkpoint import load_checkpoint, resolve_model

    checkpoint = load_checkpoint(resolve_model(model))
    layout = call_factory(runner, RunnerConfig(max_num_reqs=2)).describe().layout
    config = RunnerConfig(**MODEL_CONFIG, record=frozenset({"logits"}), dtype=dtype, layout=layout)
    half = dtype in ("float16", "bfloat16")
    dense = DenseLogits(DenseLlama(checkpoint, dtype)) if half else None
    policy = TokenPolicy(exact=False, dense=dense, max_near_ties=max_near_ties)
    candidate, cache = build_runner(runner, checkpoint, config, MODEL_BLOCKS)
    reference, _ = build_runner(oracle, checkpoint, replace(config, dtype="float32" if half else dtype), MODEL_BLOCKS)
    world = PlanWorld(config, cache, checkpoint.config.vocab_size)
    offered = candidate.describe().capabilities
    if half:
        offered -= {Capability.DRAFT_LAYOUT}  # the dense run follows one token a step
    driver = RandomDriver(seed, offered, max_prompt=MODEL_PROMPT)
    lockstep = Lockstep(candidate, reference, policy)
    _drive(lockstep, world, driver, steps)
    return lockstep.result


def _drive(lockstep: Lockstep, world: PlanWorld, driver: RandomDriver, steps: int) -> None:
    for _ in range(steps):
        step = driver.next_step(world)
        record = lockstep.step(step.plan, step.descriptor, step.forced, step.grammar)
        if record is None:
            return
        world.observe(record.tokens(), step.drafts_held())
    lockstep.finish()


# -- the report -----------------------------------------------------------------------------------------------


def _outcome(c: Clause, e: Evaluation) -> str:
    if c.id in e.skipped:
        return "skip"
    if e.by_clause.get(c.id):
        return "fail"
    return "pass" if e.tested[c.id] else "untested"


def _add_clauses(report: dict[str, Any], e: Evaluation) -> None:
    for c in load_clauses().values():
        outcome = _outcome(c, e)
        mismatches = e.by_clause.get(c.id, [])
        reason = "not offered: " + ", ".join(e.skipped[c.id]) if c.id in e.skipped else None
        report["clauses"][c.id] = {
            "outcome": outcome, "evaluations": e.tested[c.id], "reason": reason,
            "first": str(mismatches[0]) if outcome == "fail" else None,
        }  # fmt: skip
        area = report["areas"].setdefault(c.area, {"must": [0, 0], "should": [0, 0], "skipped": 0})
        if outcome == "skip":
            area["skipped"] += 1
        elif c.level != "MAY":
            area[c.level.lower()][0] += outcome == "pass"
            area[c.level.lower()][1] += 1
    report["errors"] = [{"where": x.where, "error": x.error} for x in e.errors]
    report["counts"] = dict(e.counts)


def _lockstep_entry(model: str, result: LockstepResult) -> dict[str, Any]:
    return {
        "model": model, "dtype": None, "verdict": result.verdict, "steps": result.steps, "fields": result.fields,
        "elements": result.elements, "tokens": result.tokens, "near_ties": result.near_ties,
        "near_tie_rate": result.near_ties / max(result.tokens, 1), "expected_near_ties": result.expected_near_ties,
        "near_tie_cap": result.near_tie_cap,
        "first": None if result.first is None else str(result.first),
    }  # fmt: skip


def _text(report: dict[str, Any]) -> Iterator[str]:
    yield report["runner"]
    yield " ".join(f"{key}={report[name]}" for key, name in SHOWN.items())
    if report["smoke"] is not None:
        yield f"\nsmoke: FAILED in the step: {report['smoke']}\n{ADVICE}\n\nverdict: {DIVERGE}"
        return
    yield "smoke: ok\n"
    if report["areas"]:
        lines = [["area", "MUST", "SHOULD", "skipped"]]
        for name, area in report["areas"].items():
            cells = ["{}/{}".format(*area[level]) if area[level][1] else "-" for level in ("must", "should")]
            lines.append([name, *cells, str(area["skipped"] or "-")])
        yield plain_table(lines)
    yield from _exceptions(report)
    for entry in report["lockstep"]:
        where = f"{entry['model']} in {entry['dtype']}" if entry["dtype"] else entry["model"]
        yield (
            f"\nlockstep on {where}: {entry['verdict']} steps={entry['steps']} elements={entry['elements']} "
            f"tokens={entry['tokens']} "
            + near_ties_text(entry["near_ties"], entry["tokens"], entry["expected_near_ties"], entry["near_tie_cap"])
        )
        if entry["first"]:
            yield f"first divergence: {entry['first']}"
    if not report["areas"]:
        yield f"\nverdict: {report['verdict']} (lockstep alone: no clause was asked)"
        return
    must = [sum(area["must"][i] for area in report["areas"].values()) for i in (0, 1)]
    should = [sum(area["should"][i] for area in report["areas"].values()) for i in (0, 1)]
    counts = report["counts"]
    names = {"steps": "steps", "preempt": "preemptions", "prefix_hit": "prefix hits"}
    steps = ", ".join(f"{counts.get(key, 0)} {name}" for key, name in names.items())
    yield f"\nverdict: {report['verdict']} MUST {must[0]}/{must[1]} SHOULD {should[0]}/{should[1]} ({steps})"


def _exceptions(report: dict[str, Any]) -> Iterator[str]:
    """What is not a pass: failures with their first mismatch, errors, clauses that nothing tested, skipped ones."""
    for wanted, title in (("fail", "failed"), ("untested", "not tested")):
        chosen = [i for i, entry in report["clauses"].items() if entry["outcome"] == wanted]
        for clause_id in chosen:
            first = report["clauses"][clause_id]["first"]
            yield f"{title}: {clause_id} {clause(clause_id).law}" + (f"\n    {first}" if first else "")
    for entry in report["errors"]:
        yield f"error: {entry['where']}: {entry['error']}"
    for clause_id, entry in report["clauses"].items():
        if entry["outcome"] == "skip":
            yield f"skipped: {clause_id} ({entry['reason']})"
