"""Clauses that no legal plan can test: call order, impossible plans, outputs taken late, neighbours.

A probe takes a `Bench`, builds the runners it needs and returns the mismatches of each clause it put to the test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from conformance.clauses import clause
from conformance.context import Mismatch
from conformance.dense_probes import DENSE_PROBES
from conformance.foreign import opened
from conformance.grammar_probes import (
    masks_behind_drafts,
    masks_belong_to_their_requests,
    misfits_are_refused,
    stops_come_back,
)
from conformance.harness import build_runner
from conformance.logprob_probes import log_probabilities_are_right, prompts_are_scored
from conformance.memory_probes import listed_blocks_read_as_zero, poison_fills_free_blocks
from conformance.metamorphic import greedy_tokens_are_the_models, retold_stories
from conformance.outcome_probes import (
    nan_rows_have_a_fault,
    processors_are_told,
    rows_without_a_token_have_a_fault,
    traces_are_replayed,
)
from conformance.outputs_probes import outputs_are_the_references
from conformance.probe import RECORDED, probe
from conformance.refusal_plans import accepted, bad_outcomes, more_bad_plans
from conformance.refusals import changed_parts, refusal
from conformance.sampling_probes import (
    circumstances_change_nothing,
    drafts_count_as_said,
    parameters_do_what_they_say,
)
from conformance.stage_laws import stages_alone
from conformance.tie_probes import ties_of_the_model_go_to_the_lowest_id
from runner_api import (
    BatchDescriptor,
    CachedRequestData,
    CallOrderError,
    Capability,
    CapabilityError,
    CUDAGraphMode,
    ForcedStep,
    ModelRunner,
    NewRequestData,
    PlanError,
    RunnerConfig,
    RunnerError,
    SamplingParams,
    SchedulerOutput,
    StructuredOutputsParams,
    WitnessConfig,
    WitnessGroup,
)
from runner_api.constants import MAX_STOP_TOKEN_IDS
from runner_api.loader import call_factory
from runner_api.protocol import RunnerFactory

Found = dict[str, list[Mismatch]]
GREEDY = SamplingParams(temperature=0.0)
# Three rows, twelve tokens a step, blocks of four: small enough that each limit is one token away.
CONFIG = RunnerConfig(max_num_reqs=3, max_num_batched_tokens=12, max_model_len=24)
MODEL = WitnessConfig(groups=(WitnessGroup(4),))
NUM_BLOCKS = 24


@dataclass(frozen=True, slots=True)
class Bench:
    """Fresh runners of one kind, all on the small witness model. stories: seeds of the stories that are retold."""

    runner: str | RunnerFactory
    capabilities: frozenset[Capability]
    stories: tuple[int, ...] = (0,)

    def fresh(self, **changes: Any) -> ModelRunner:
        return build_runner(self.runner, MODEL, replace(CONFIG, **changes), NUM_BLOCKS)[0]


def new(req_id: str, tokens: list[int], blocks: list[int], **changes: Any) -> NewRequestData:
    """A greedy request whose prompt is everything it knows; `changes` replace fields."""
    return replace(NewRequestData(req_id, tokens, tokens, 0, (blocks,), GREEDY), **changes)


def plan_of(*requests: NewRequestData, cached: Mapping[str, tuple[int, Any]] | None = None, **changes: Any) -> Any:
    """Schedule all of each new request, and one token of each cached one (id to computed count and new blocks)."""
    counts = {r.req_id: len(r.prefill_token_ids) - r.num_computed_tokens for r in requests}
    held = cached or {}
    counts |= dict.fromkeys(held, 1)
    data = CachedRequestData(list(held), [c for c, _ in held.values()], [b for _, b in held.values()], [1] * len(held))
    plan = SchedulerOutput(list(requests), data, counts, sum(counts.values()))
    return replace(plan, **changes)


def run(runner: ModelRunner, plan: SchedulerOutput, forced: ForcedStep | None = None) -> dict[str, tuple[int, ...]]:
    """One whole step; the tokens by request."""
    runner.execute_model(plan)
    return runner.sample_tokens(forced=forced).get_output().tokens()


def two_live(runner: ModelRunner) -> None:
    """The state that bad plans are tried on: `a` and `b`, three tokens computed and one sampled each."""
    run(runner, plan_of(new("a", [1, 2, 3], [1]), new("b", [4, 5, 6], [2])))


def bad_plans() -> dict[str, tuple[SchedulerOutput, BatchDescriptor | None]]:
    """One impossible plan per clause, for the state of `two_live`."""
    a, b = (3, None), (3, None)
    fresh = new("c", [7, 8], [3])
    plans: dict[str, SchedulerOutput] = {
        "MR-ERR-020": plan_of(cached={"a": a}, total_num_scheduled_tokens="1"),
        "MR-ERR-021": SchedulerOutput(num_scheduled_tokens={"a": 1}, total_num_scheduled_tokens=1),
        "MR-ERR-022": plan_of(new("a", [7, 8], [3])),
        "MR-ERR-023": plan_of(fresh, new("d", [7], [4]), cached={"a": a, "b": b}),
        "MR-ERR-024": plan_of(replace(fresh, prompt_token_ids=[7, 8, 9])),
        "MR-ERR-025": plan_of(new("c", [7, MODEL.vocab_size], [3])),
        "MR-ERR-026": plan_of(
            replace(fresh, num_computed_tokens=2), num_scheduled_tokens={"c": 1}, total_num_scheduled_tokens=1
        ),
        "MR-ERR-027": plan_of(replace(fresh, seed=2**63)),
        "MR-ERR-028": plan_of(replace(fresh, block_ids=([3], [4]))),
        "MR-ERR-029": plan_of(cached={"nobody": (3, None)}),
        "MR-ERR-030": plan_of(
            cached={"a": a, "b": b}, num_scheduled_tokens={"a": 1, "b": 0}, total_num_scheduled_tokens=1
        ),
        "MR-ERR-031": plan_of(cached={"a": a}, total_num_scheduled_tokens=2),
        "MR-ERR-032": plan_of(new("c", list(range(13)), [3, 4, 5, 6])),
        "MR-ERR-033": plan_of(cached={"a": a}, scheduled_spec_decode_tokens={"b": [-1]}),
        "MR-ERR-034": plan_of(
            scheduled_cached_reqs=CachedRequestData(["a"], [3, 3], [None], [1]), num_scheduled_tokens={"a": 1},
            total_num_scheduled_tokens=1,
        ),
        "MR-ERR-035": plan_of(
            scheduled_cached_reqs=CachedRequestData(["a"], [3], [None], [1], frozenset({"a"})),
            num_scheduled_tokens={"a": 1}, total_num_scheduled_tokens=1,
        ),
        "MR-ERR-036": plan_of(cached={"a": (2, None)}),
        "MR-ERR-037": plan_of(
            cached={"a": (3, ([3],))}, num_scheduled_tokens={"a": 2}, total_num_scheduled_tokens=2
        ),
        "MR-ERR-038": plan_of(new("c", list(range(24)), [3, 4, 5, 6, 7, 8], num_computed_tokens=12)),
        "MR-ERR-039": plan_of(new("c", [1, 2, 3, 4, 5], [3])),
        "MR-ERR-040": plan_of(new("c", [7, 8], [3] * 200)),  # past any rounding of the table's width
        "MR-ERR-041": plan_of(new("c", [7, 8], [0])),
        "MR-ERR-042": plan_of(new("c", [7, 8, 9, 1], [1]), cached={"a": a}),
        "MR-ERR-046": plan_of(
            replace(fresh, sampling_params=SamplingParams(temperature=0.0, logprobs=MODEL.vocab_size + 1))
        ),
        "MR-ERR-047": plan_of(new("c", [7, 8], [1]), cached={"a": a}),
        "MR-ERR-048": plan_of(replace(fresh, sampling_params=SamplingParams(temperature=1.0, n=2))),
    }  # fmt: skip
    tight = BatchDescriptor(CUDAGraphMode.FULL, 1, 1)
    cases: dict[str, tuple[SchedulerOutput, BatchDescriptor | None]] = {k: (p, None) for k, p in plans.items()}
    cases["MR-ERR-043"] = (plan_of(cached={"a": a, "b": b}), tight)
    return cases


# -- the probes -----------------------------------------------------------------------------------------------


@probe("ERR-001 ERR-020..ERR-043 ERR-046..ERR-048 ERR-101", Capability.GENERATE, Capability.PLAN_VALIDATION)
def impossible_plans_are_refused(bench: Bench) -> Found:
    """Each bad plan: refused with PlanError, state as before, the clause's own code, and the next step goes on."""
    found: Found = {"MR-ERR-101": []}
    runner: ModelRunner | None = None
    digests = Capability.STATE_DIGEST in bench.capabilities
    cases = [(clause_id, *case) for clause_id, case in bad_plans().items()]
    for clause_id, plan, descriptor in cases + [(c, p, None) for c, p in more_bad_plans(NUM_BLOCKS)]:
        if clause(clause_id).missing(bench.capabilities):
            continue
        if runner is None:
            runner = bench.fresh()
            two_live(runner)
            before = dict(runner.state_digest()) if digests else {}
        found.setdefault(clause_id, [])
        told = accepted(plan)
        run_it = partial(runner.execute_model, plan, descriptor=descriptor)
        wrong = refusal(run_it, clause_id, "execute_model", accepted=told)
        _add(found, wrong)
        if any(m.got == told for m in wrong):
            runner = None
            continue
        if digests:
            changed = changed_parts(before, runner.state_digest())
            found.setdefault("MR-ERR-001", [])
            if changed:
                wanted = f"as before {clause_id}"
                found["MR-ERR-001"].append(Mismatch("MR-ERR-001", "state_digest", None, (), changed, wanted))
                runner = None
    return found


def _add(found: Found, wrong: list[Mismatch]) -> None:
    for m in wrong:
        found[m.clause_id].append(m)


@probe("ERR-025 ERR-044 ERR-045 ERR-101", Capability.GENERATE, Capability.PLAN_VALIDATION, Capability.FORCED_STEP)
def impossible_outcomes_are_refused(bench: Bench) -> Found:
    """Each bad outcome: refused with PlanError, and the step still waits and draws what it would have drawn."""
    plan = plan_of(new("a", [1, 2, 3], [1]))
    outcomes = bad_outcomes(MODEL.vocab_size)
    found: Found = {clause_id: [] for clause_id in ("MR-ERR-025", "MR-ERR-044", "MR-ERR-045", "MR-ERR-101")}
    expected = run(bench.fresh(), plan)
    for clause_id, forced in outcomes:
        runner = bench.fresh()
        runner.execute_model(plan)
        sample = partial(runner.sample_tokens, forced=forced)
        wrong = refusal(sample, clause_id, "sample_tokens", "a", accepted=accepted(forced))
        _add(found, wrong)
        if any(m.clause_id == clause_id for m in wrong):
            continue
        after = runner.sample_tokens().get_output().tokens()
        if after != expected:
            found[clause_id].append(Mismatch(clause_id, "sampled_token_ids", "a", (), after, expected))
    return found


@probe("ERR-050 ERR-101", Capability.GENERATE, Capability.PLAN_VALIDATION, Capability.MIN_TOKENS)
def too_many_stop_tokens_are_refused(bench: Bench) -> Found:
    """One more end of the model than the table by row has room for; where nothing is held back it does not matter."""
    model = WitnessConfig(2 * MAX_STOP_TOKEN_IDS, (WitnessGroup(4),))
    runner = build_runner(bench.runner, model, CONFIG, NUM_BLOCKS)[0]
    ends = tuple(range(MAX_STOP_TOKEN_IDS + 1))
    held = new("a", [1, 2], [1], eos_token_ids=ends, sampling_params=SamplingParams(temperature=0.0, min_tokens=1))
    found: Found = {"MR-ERR-050": [], "MR-ERR-101": []}
    _add(found, refusal(lambda: run(runner, plan_of(held)), "MR-ERR-050", "execute_model", "a"))
    if not found["MR-ERR-050"]:
        run(runner, plan_of(replace(held, sampling_params=GREEDY)))
    return found


@probe("ERR-002 ERR-003", Capability.GENERATE, Capability.PLAN_VALIDATION)
def calls_out_of_order_are_refused(bench: Bench) -> Found:
    found: Found = {"MR-ERR-002": [], "MR-ERR-003": []}

    def refused(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except CallOrderError:
            return
        except Exception as e:
            found["MR-ERR-002"].append(Mismatch("MR-ERR-002", name, None, (), repr(e), "CallOrderError"))
        else:
            found["MR-ERR-002"].append(Mismatch("MR-ERR-002", name, None, (), "accepted", "CallOrderError"))

    step = plan_of(new("a", [1, 2, 3], [1]))
    bare = opened(call_factory(bench.runner, CONFIG))
    refused("get_kv_cache_specs", bare.get_kv_cache_specs)
    bare.load_model(MODEL)
    refused("execute_model", lambda: bare.execute_model(step))
    runner, twin = bench.fresh(), bench.fresh()
    if Capability.STEP_RECORD in bench.capabilities:
        refused("last_step", runner.last_step)
    refused("sample_tokens", runner.sample_tokens)
    runner.execute_model(step)
    refused("execute_model", lambda: runner.execute_model(plan_of(cached={"a": (3, None)})))
    expected = run(twin, step)
    try:
        got: Any = runner.sample_tokens().get_output().tokens()
    except CallOrderError as e:
        got = repr(e)
    if got != expected:
        found["MR-ERR-003"].append(Mismatch("MR-ERR-003", "sampled_token_ids", "a", (), got, expected))
    refused("sample_tokens", runner.sample_tokens)
    return found


# A value of every sampling parameter that asks something of a runner; all others are the engine's.
ASKED: dict[str, Any] = {
    "temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "seed": 1, "presence_penalty": 1.0,
    "frequency_penalty": 1.0, "repetition_penalty": 2.0, "min_tokens": 2, "logprobs": 1, "prompt_logprobs": 1,
    "allowed_token_ids": (1,), "logit_bias": {1: 2.0}, "bad_words_token_ids": ((1,),), "logprob_token_ids": (1,),
    "thinking_token_budget": 3, "structured_outputs": StructuredOutputsParams(regex="a"),
    "trace_decode_token_ids": (1,), "extra_args": {"a": 1},
}  # fmt: skip
OF_THE_ENGINE = frozenset({"n", "max_tokens", "stop", "stop_token_ids", "ignore_eos"})


def each_asked() -> list[SamplingParams]:
    """Every sampling parameter of a runner for itself: greedy, unless greedy switches it off. KeyError for one that
    `ASKED` does not know."""
    random = ("temperature", "top_k", "top_p", "min_p", "seed")
    names = [f.name for f in fields(SamplingParams) if f.name not in OF_THE_ENGINE]
    return [SamplingParams(**{"temperature": float(n in random), n: ASKED[n]}) for n in names]


@probe("ERR-005", Capability.GENERATE)
def capabilities_not_offered_are_refused(bench: Bench) -> Found:
    """Every sampling parameter whose capability is missing raises CapabilityError when a request asks for it.

    So do those that need something that the runner was not built with: markers of thinking, a logits processor.
    """
    runner, found = bench.fresh(), []
    for params in each_asked():
        unbuilt = params.thinking_token_budget is not None or params.extra_args
        if not unbuilt and not params.required_capabilities() - bench.capabilities:
            continue
        try:
            runner.execute_model(plan_of(new("a", [1], [1], sampling_params=params)))
        except CapabilityError:
            continue
        except RunnerError as e:
            got = repr(e)
        else:
            got = "accepted"
            runner = bench.fresh()
        wanted = sorted(c.value for c in params.required_capabilities() - bench.capabilities) or "what is not set up"
        found.append(Mismatch("MR-ERR-005", "sampling_params", "a", (), got, f"CapabilityError for {wanted}"))
    return {"MR-ERR-005": found}


@probe("ASYNC-002", Capability.GENERATE, Capability.ASYNC_OUTPUT)
def late_output_is_the_same(bench: Bench) -> Found:
    """Take the first step's output after two more steps, with another request moving into the same row."""
    runner, twin = bench.fresh(), bench.fresh()
    first = plan_of(new("a", [1, 2, 3], [1]), new("b", [4, 5, 6], [2]))
    second = plan_of(new("c", [9, 8], [3]), cached={"b": (3, None)}, finished_req_ids=frozenset({"a"}))
    # c leads the batch and draws nothing, where a stood and drew a token.
    second = replace(second, num_scheduled_tokens={"c": 1, "b": 1}, total_num_scheduled_tokens=2)
    runner.execute_model(first)
    handle = runner.sample_tokens()
    run(runner, second)
    got, expected = handle.get_output().tokens(), run(twin, first)
    wrong = [] if got == expected else [Mismatch("MR-ASYNC-002", "sampled_token_ids", None, (), got, expected)]
    return {"MR-ASYNC-002": wrong}


@probe("ASYNC-003", Capability.GENERATE)
def plans_are_copied(bench: Bench) -> Found:
    """Overwrite every list of the plan between the two calls and after them; the tokens stay what they were."""
    runner, twin = bench.fresh(), bench.fresh()
    a = new("a", [1, 2, 3], [1, 2])
    first = plan_of(a)
    then = [plan_of(cached={"a": (n, None)}) for n in (3, 4)]
    expected = [run(twin, plan_of(new("a", [1, 2, 3], [1, 2])))] + [run(twin, p) for p in then]
    runner.execute_model(first)
    a.prompt_token_ids[:] = a.prefill_token_ids[:] = [60, 60, 60]  # type: ignore[index]
    a.block_ids[0][:] = [9, 9]
    first.num_scheduled_tokens.clear()
    got = [runner.sample_tokens().get_output().tokens()] + [run(runner, p) for p in then]
    wrong = [] if got == expected else [Mismatch("MR-ASYNC-003", "sampled_token_ids", "a", (), got, expected)]
    return {"MR-ASYNC-003": wrong}


@probe("ASYNC-004", Capability.GENERATE, Capability.FORCED_STEP, Capability.ASYNC_OUTPUT)
def imposed_outcomes_are_copied(bench: Bench) -> Found:
    """Overwrite the arrays of an imposed outcome before its output is taken; so with the step that goes on from it."""
    runner, twin = bench.fresh(), bench.fresh()
    first, then = plan_of(new("a", [1, 2, 3], [1])), plan_of(cached={"a": (3, None)})
    token_ids, num_sampled = np.array([[5]], np.int64), np.array([1], np.int32)
    expected = [run(twin, first, ForcedStep(token_ids.copy(), num_sampled.copy())), run(twin, then)]
    runner.execute_model(first)
    handle = runner.sample_tokens(forced=ForcedStep(token_ids, num_sampled))
    token_ids[:], num_sampled[:] = 9, 0
    got = [handle.get_output().tokens(), run(runner, then)]
    wrong = [] if got == expected else [Mismatch("MR-ASYNC-004", "sampled_token_ids", "a", (), got, expected)]
    return {"MR-ASYNC-004": wrong}


@probe("STATE-005 STATE-010", Capability.GENERATE, Capability.STATE_DIGEST)
def unknown_ids_change_nothing(bench: Bench) -> Found:
    runner, twin = bench.fresh(), bench.fresh()
    empty = runner.state_digest()
    two_live(runner)
    two_live(twin)
    before, again = dict(runner.state_digest()), dict(runner.state_digest())
    found: Found = {"MR-STATE-010": [], "MR-STATE-005": []}
    if before != again:
        found["MR-STATE-010"].append(Mismatch("MR-STATE-010", "state_digest", None, (), "changes", "the same twice"))
    if before == dict(empty):
        found["MR-STATE-010"].append(Mismatch("MR-STATE-010", "state_digest", None, (), "unchanged", "follows a step"))
    runner.execute_model(SchedulerOutput(finished_req_ids=frozenset({"z"}), preempted_req_ids=frozenset({"y"})))
    twin.execute_model(SchedulerOutput())
    if dict(runner.state_digest()) != dict(twin.state_digest()):
        wanted = "as without them"
        found["MR-STATE-005"].append(Mismatch("MR-STATE-005", "state_digest", None, (), "changed", wanted))
    run(runner, plan_of(cached={"a": (3, None)}))
    if dict(runner.state_digest()) == before:
        found["MR-STATE-010"].append(Mismatch("MR-STATE-010", "state_digest", "a", (), "unchanged", "follows a decode"))
    return found


@probe("SAMPLE-011", Capability.GENERATE, Capability.SEEDED_SAMPLING)
def neighbours_do_not_matter(bench: Bench) -> Found:
    """One seeded request, alone in the last row and among two others in another row and other blocks."""
    params = SamplingParams(temperature=1.0)
    prompt, seed = [5, 4, 3], 2**62 + 11

    def tokens_of(runner: ModelRunner, blocks: list[int], others: list[NewRequestData]) -> list[tuple[int, ...]]:
        mine = new("m", prompt, blocks, sampling_params=params, seed=seed)
        taken = [run(runner, plan_of(*others, mine))["m"]]
        for n in range(3, 7):
            held = {o.req_id: (len(o.prefill_token_ids) + n - 3, None) for o in others}
            taken.append(run(runner, plan_of(cached={**held, "m": (n, None)}))["m"])
        return taken

    alone = tokens_of(bench.fresh(), [1, 2], [])
    others = [
        new("k", [1, 2], [5, 6], sampling_params=params, seed=1), new("z", [7], [7, 8], sampling_params=params, seed=2)
    ]  # fmt: skip
    among = tokens_of(bench.fresh(initial_free_rows=(1, 0, 2)), [4, 3], others)
    wrong = [] if alone == among else [Mismatch("MR-SAMPLE-011", "token_ids", "m", (), among, alone)]
    return {"MR-SAMPLE-011": wrong}


@probe("POST-002", *RECORDED, Capability.FORCED_STEP)
def forced_tokens_enter_the_state(bench: Bench) -> Found:
    runner, twin = bench.fresh(), bench.fresh()
    own = run(twin, plan_of(new("a", [1, 2, 3], [1])))["a"][0]
    imposed = (own + 1) % MODEL.vocab_size
    step = ForcedStep(np.array([[imposed]], np.int64), np.array([1], np.int32))
    output = run(runner, plan_of(new("a", [1, 2, 3], [1])), step)
    record = runner.last_step()
    run(runner, plan_of(cached={"a": (3, None)}))
    facts = {
        "sampled_token_ids": (output["a"], (imposed,)),
        "token_ids": (record.token_ids.tolist(), [[own]]),
        "forced_token_ids": (np.asarray(record.forced_token_ids).tolist(), [[imposed]]),
        "input_ids": (runner.last_step().input_ids.tolist(), [imposed]),
    }
    wrong = [Mismatch("MR-POST-002", name, "a", (), got, want) for name, (got, want) in facts.items() if got != want]
    return {"MR-POST-002": wrong}


@probe("ERR-001", Capability.GENERATE, Capability.PLAN_VALIDATION, Capability.STATE_DIGEST)
def a_refused_plan_is_not_begun(bench: Bench) -> Found:
    """A plan whose fault shows last, in its total: what it finishes and adds must not have happened."""
    runner = bench.fresh()
    two_live(runner)
    before = dict(runner.state_digest())
    plan = plan_of(new("c", [7, 8], [3]), cached={"a": (3, None)}, finished_req_ids=frozenset({"b"}))
    try:
        runner.execute_model(replace(plan, total_num_scheduled_tokens=plan.total_num_scheduled_tokens + 1))
    except PlanError:
        pass
    else:
        return {}  # MR-ERR-031 is told of it
    changed = changed_parts(before, runner.state_digest())
    wrong = [Mismatch("MR-ERR-001", "state_digest", None, (), changed, "as before")] if changed else []
    return {"MR-ERR-001": wrong}


@probe("STATE-007", *RECORDED)
def plans_without_tokens_change_rows(bench: Bench) -> Found:
    """`a` leaves by a plan without tokens, or by the plan that adds `c`: the same rows and tokens either way."""
    runner, twin = bench.fresh(), bench.fresh()
    two_live(runner)
    two_live(twin)
    runner.execute_model(SchedulerOutput(finished_req_ids=frozenset({"a"})))
    plan = plan_of(new("c", [7, 8], [3]), cached={"b": (3, None)})
    got = run(runner, plan), runner.last_step().idx_mapping.tolist()
    expected = run(twin, replace(plan, finished_req_ids=frozenset({"a"}))), twin.last_step().idx_mapping.tolist()
    wrong = [] if got == expected else [Mismatch("MR-STATE-007", "idx_mapping", None, (), got, expected)]
    return {"MR-STATE-007": wrong}


@probe("SAMPLE-001", *RECORDED, Capability.FORCED_STEP)
def ties_go_to_the_lowest_id(bench: Bench) -> Found:
    """Imposed logits with two equal maxima; the record tells what the runner itself would have drawn."""
    runner = bench.fresh()
    logits = np.zeros((1, MODEL.vocab_size), np.float32)
    logits[0, [7, 20]] = 1.0
    run(runner, plan_of(new("a", [1, 2, 3], [1])), ForcedStep(np.array([[9]]), np.array([1], np.int32), logits=logits))
    got = np.asarray(runner.last_step().token_ids).tolist()
    return {"MR-SAMPLE-001": [] if got == [[7]] else [Mismatch("MR-SAMPLE-001", "token_ids", "a", (), got, [[7]])]}


PROBES: tuple[Callable[[Bench], Found], ...] = (
    *DENSE_PROBES,
    impossible_plans_are_refused, impossible_outcomes_are_refused, calls_out_of_order_are_refused,
    too_many_stop_tokens_are_refused, capabilities_not_offered_are_refused,
    late_output_is_the_same, plans_are_copied, imposed_outcomes_are_copied,
    unknown_ids_change_nothing, neighbours_do_not_matter,
    forced_tokens_enter_the_state, a_refused_plan_is_not_begun, plans_without_tokens_change_rows,
    ties_go_to_the_lowest_id, stages_alone, parameters_do_what_they_say, drafts_count_as_said,
    circumstances_change_nothing, nan_rows_have_a_fault, rows_without_a_token_have_a_fault, traces_are_replayed,
    processors_are_told, log_probabilities_are_right, prompts_are_scored, masks_belong_to_their_requests,
    masks_behind_drafts, stops_come_back, misfits_are_refused, retold_stories,
    greedy_tokens_are_the_models, outputs_are_the_references, listed_blocks_read_as_zero,
    ties_of_the_model_go_to_the_lowest_id, poison_fills_free_blocks,
)  # fmt: skip
