"""Clauses about the masks of grammars: whose they are, which rows obey them, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from conformance.context import Mismatch
from conformance.probe import RECORDED, probe
from conformance.refusals import ACCEPTED, refusal
from conformance.sampling_probes import watched
from conformance.sampling_truth import after_grammar
from conformance.scene import VOCAB, Actor, Scene, differs, row_differences, row_faults
from runner_api import Capability, GrammarOutput, RunnerError, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from conformance.probes import Bench

Found = dict[str, list[Mismatch]]
WORDS = -(-VOCAB // 32)
FORM = StructuredOutputsParams(regex="a*")
OWN, OTHERS, BEHIND_DRAFTS, UNUSED, ONE_STEP, STOPS, MISFIT, RAW = (f"MR-GRAMMAR-{n:03}" for n in range(1, 9))


def packed(allowed: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """bool[masks, V] as words, least significant bit first; bits past the vocabulary are random."""
    bits = random.random((len(allowed), WORDS * 32)) < 0.5
    bits[:, :VOCAB] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)


@probe("GRAMMAR-001 GRAMMAR-002 GRAMMAR-005 GRAMMAR-008", *RECORDED, Capability.GRAMMAR, Capability.FORCED_STEP)
def masks_belong_to_their_requests(bench: Bench) -> Found:
    """Two of four requests have masks, listed against the batch's order; then nobody has one."""
    offered = bench.capabilities
    greedy, formed = SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, structured_outputs=FORM)
    random = np.random.default_rng(6)
    kinds = {"a": greedy, "m": formed, "c": greedy, "k": formed, "free": formed}
    actors = [Actor(i, [3, 4], watched(bench, p)) for i, p in kinds.items()]
    mode = {"logprobs_mode": "processed_logits"} if Capability.LOGPROBS in offered else {}
    scene = Scene(bench.runner, offered, actors, **mode)
    allowed = {i: random.random(VOCAB) < 0.3 for i in ("k", "m")}
    allowed["k"][:] = False
    allowed["k"][[0, 31, 32, 49]] = True
    mask = packed(np.stack(list(allowed.values())), random)
    found: Found = {OWN: [], OTHERS: [], ONE_STEP: []}
    for n in range(2):
        grammar = GrammarOutput(list(allowed), mask) if n == 0 else None
        ids = list(kinds)[:: 1 - 2 * n]
        logits = {i: (random.integers(-16, 17, VOCAB) / 4).astype(np.float32) for i in ids}
        sight_of = {i: scene.actors[i].history(allowed=allowed.get(i) if grammar else None) for i in ids}
        sight = scene.step(ids, logits=logits, imposed={i: [5] for i in ids}, grammar=grammar)
        for i in ids:
            clause = ONE_STEP if n else OWN if i in allowed else OTHERS
            found[clause] += row_faults(clause, i, logits[i], sight_of[i], 0, sight.drawn(i)[0], sight.scores(i))
    return found | _scored_behind_the_mask(bench)


def _scored_behind_the_mask(bench: Bench) -> Found:
    """Raw log probabilities, of a request with a bias that they must not see."""
    offered = bench.capabilities
    if Capability.LOGPROBS not in offered:
        return {}
    bias = {"logit_bias": {7: 3.0}} if Capability.LOGIT_BIAS in offered else {}
    params = SamplingParams(temperature=0.0, structured_outputs=FORM, logprobs=-1, **bias)
    scene = Scene(bench.runner, offered, [Actor("a", [3], params)], logprobs_mode="raw_logits")
    random = np.random.default_rng(7)
    allowed, logits = random.random(VOCAB) < 0.5, random.integers(-9, 10, VOCAB).astype(np.float32)
    allowed[7] = True
    history = scene.actors["a"].history(allowed=allowed)
    grammar = GrammarOutput(["a"], packed(allowed[None], random))
    sight = scene.step(["a"], logits={"a": logits}, imposed={"a": [7]}, grammar=grammar)
    seen = sight.scores("a")
    if seen is None:
        return {RAW: [Mismatch(RAW, "logprobs", "a", (), None, "asked for")]}
    return {RAW: row_differences(RAW, "raw_logits", "a", seen, after_grammar(logits, history))}


@probe("GRAMMAR-003 GRAMMAR-004", *RECORDED, Capability.GRAMMAR, Capability.FORCED_STEP, Capability.DRAFT_LAYOUT)
def masks_behind_drafts(bench: Bench) -> Found:
    """Requests with three, one and no drafts, each with four mask rows; those of rows that do not exist ban it all."""
    offered = bench.capabilities
    random = np.random.default_rng(8)
    formed = SamplingParams(temperature=0.0, structured_outputs=FORM)
    drafts = {"one": 1, "all": 3, "none": 0, "loose": 2}
    actors = [Actor(i, [3, 4], SamplingParams(temperature=0.0) if i == "loose" else formed) for i in drafts]
    scene = Scene(bench.runner, offered, actors, num_speculative_tokens=3)
    scene.step(list(drafts), imposed=dict.fromkeys(drafts, (5,)), next_drafts=dict.fromkeys(drafts, (6, 7, 8)))
    owners = ["none", "all", "one"]
    allowed = random.random((len(owners) * 4, VOCAB)) < 0.2
    for g, i in enumerate(owners):
        allowed[4 * g + drafts[i] + 1 : 4 * g + 4] = False
    logits = {i: random.integers(-16, 17, (d + 1, VOCAB)).astype(np.float32) for i, d in drafts.items()}
    grammar = GrammarOutput(owners, packed(allowed, random))
    imposed = dict.fromkeys(drafts, (5,))
    base = {i: scene.actors[i] for i in drafts}
    histories = {
        i: [
            base[i].history([6, 7, 8][:j], allowed[4 * owners.index(i) + j] if i in owners else None)
            for j in range(d + 1)
        ]
        for i, d in drafts.items()
    }
    sight = scene.step(list(drafts), logits=logits, imposed=imposed, drafts=drafts, grammar=grammar)
    found: Found = {BEHIND_DRAFTS: [], UNUSED: []}
    for i, rows in histories.items():
        clause = BEHIND_DRAFTS if drafts[i] == 3 else UNUSED
        for j, history in enumerate(rows):
            found[clause] += row_faults(clause, i, logits[i][j], history, 0, sight.drawn(i)[j], None)
    return found


@probe("GRAMMAR-006", *RECORDED, Capability.GRAMMAR, Capability.MIN_TOKENS, Capability.FORCED_STEP)
def stops_come_back(bench: Bench) -> Found:
    """min_tokens over a mask that leaves stop tokens alone: they come back for a request with a form."""
    offered = bench.capabilities
    asks: dict[str, Any] = {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (11, 49), "structured_outputs": FORM}
    params = {"only-stops": asks, "more": asks, "one-stop": {**asks, "stop_token_ids": (11, 12)}}
    actors = [Actor(i, [3, 4], watched(bench, SamplingParams(**p)), eos_token_ids=(20,)) for i, p in params.items()]
    mode = {"logprobs_mode": "processed_logits"} if Capability.LOGPROBS in offered else {}
    scene = Scene(bench.runner, offered, actors, **mode)
    allowed = np.zeros((3, VOCAB), bool)
    allowed[0, [11, 49, 20]] = True
    allowed[1, [11, 49, 20, 30]] = True
    allowed[2, [12]] = True
    random = np.random.default_rng(9)
    grammar = GrammarOutput(list(params), packed(allowed, random))
    logits = {i: (random.integers(-16, 17, VOCAB) / 4).astype(np.float32) for i in params}
    for row in logits.values():
        row[30] = -9.0  # not what would be drawn anyway
    histories = {i: scene.actors[i].history(allowed=allowed[g]) for g, i in enumerate(params)}
    sight = scene.step(list(params), logits=logits, imposed=dict.fromkeys(params, (5,)), grammar=grammar)
    wrong: list[Mismatch] = []
    for i, history in histories.items():
        wrong += row_faults(STOPS, i, logits[i], history, 0, sight.drawn(i)[0], sight.scores(i))
    return {STOPS: wrong}


@probe("GRAMMAR-007 ERR-049 ERR-101", *RECORDED, Capability.PLAN_VALIDATION, Capability.GRAMMAR)
def misfits_are_refused(bench: Bench) -> Found:
    """Masks of nobody, of another width, of another number: refused with their code, and the step still waits."""
    formed = SamplingParams(temperature=0.0, structured_outputs=FORM)
    scene, twin = (Scene(bench.runner, bench.capabilities, [Actor("a", [3, 4], formed)]) for _ in range(2))
    ones = np.full((2, WORDS), -1, np.int32)
    misfits: Sequence[tuple[str, GrammarOutput]] = (
        ("of nobody", GrammarOutput(["nobody"], ones[:1])),
        ("twice", GrammarOutput(["a", "a"], ones)),
        ("too many", GrammarOutput(["a"], ones)),
        ("too narrow", GrammarOutput(["a"], ones[:1, 1:])),
        ("of another type", GrammarOutput(["a"], ones[:1].astype(np.int64))),
    )
    found: Found = {MISFIT: [], "MR-ERR-049": [], "MR-ERR-101": []}
    want = twin.step(["a"]).output.tokens()
    runner = scene.runner
    runner.execute_model(scene.plan(["a"]))
    for what, grammar in misfits:
        for m in refusal(partial(runner.sample_tokens, grammar), "MR-ERR-049", f"grammar {what}", "a"):
            found[m.clause_id].append(m)
            if m.got == ACCEPTED:
                return {"MR-ERR-049": found["MR-ERR-049"]}
    try:
        tokens: Any = runner.sample_tokens().get_output().tokens()
    except RunnerError as e:
        tokens = repr(e)
    found[MISFIT] += differs(MISFIT, "sampled_token_ids", "a", tokens, want)
    return found
