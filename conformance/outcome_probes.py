"""Clauses about rows whose token is not simply drawn: faults, replayed traces; and about a user's own processors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from conformance.context import Mismatch
from conformance.probe import RECORDED, probe
from conformance.sampling_truth import RowHistory
from conformance.scene import MODEL, VOCAB, Actor, Scene, Sight, differs, row_differences, row_faults, scores_noise
from conformance.truth import witness_logits
from runner_api import Capability, RunnerError, SampleFault, SamplingParams, SamplingParamsError

if TYPE_CHECKING:
    from conformance.probes import Bench

Found = dict[str, list[Mismatch]]
NAN, NO_TOKEN = int(SampleFault.NAN), int(SampleFault.NO_TOKEN)


# -- faults -------------------------------------------------------------------------------------------------------


@probe("SAMPLE-043 SAMPLE-045", *RECORDED, Capability.FORCED_STEP, Capability.SAMPLE_FAULTS)
def nan_rows_have_a_fault(bench: Bench) -> Found:
    """Imposed logits that hold a NaN: one row keeps it to the end, another loses it on the way; both among others,
    which ask for whatever a sampler may do to a whole batch at once."""
    fault, near = "MR-SAMPLE-043", "MR-SAMPLE-045"
    offered = bench.capabilities
    random = {"temperature": 1.0} if Capability.SEEDED_SAMPLING in offered else {"temperature": 0.0}
    asks: dict[str, dict[str, Any]] = {"nan": random, "greedy-nan": {}, "b": random, "c": {}}
    if {Capability.SEEDED_SAMPLING, Capability.TOP_K, Capability.TOP_P, Capability.MIN_P} <= offered:
        asks["cut-nan"] = {"temperature": 1.0, "top_k": 2, "top_p": 0.5, "min_p": 0.1}
    if Capability.ALLOWED_TOKEN_IDS in offered:
        asks["a"] = {**random, "allowed_token_ids": (3, 4, 49)}
    neighbours = _who_ask_for_every_step(offered)
    asks |= neighbours
    actors = [Actor(i, [1, 2], SamplingParams(**{"temperature": 0.0, **p}), 9) for i, p in asks.items()]
    scene = Scene(bench.runner, offered, actors)
    logits = {i: (np.random.default_rng(len(i)).integers(-8, 9, VOCAB) / 4).astype(np.float32) for i in asks}
    logits |= {i: _row_for_neighbours() for i in neighbours}
    broken = {i: row.copy() for i, row in logits.items()}
    for i in asks:
        if i == "a" or i.endswith("nan"):
            broken[i][9] = np.nan
    broken["c"][30] = np.inf  # beats everything, and is no fault
    found: Found = {fault: [], near: []}
    ids = list(asks)
    for rows in (logits, broken, logits):
        histories = {i: scene.actors[i].history() for i in ids}
        sight = scene.step(ids, logits=rows, imposed={i: [5] for i in ids})
        faults = _faults(sight)
        for i in ids:
            faulty = rows is broken and i.endswith("nan")
            found[fault] += differs(fault, "faults", i, faults.get(i), NAN if faulty else 0)
            if faulty:
                continue
            drawn, row = sight.drawn(i)[0], rows[i]
            if i == "c" and rows is broken:
                found[fault] += differs(fault, "token_ids", i, drawn, 30)
            else:
                found[near] += row_faults(near, i, np.nan_to_num(row), histories[i], 9, drawn, None)
        ids = ids[::-1]
    return found


def _who_ask_for_every_step(offered: frozenset[Capability]) -> dict[str, dict[str, Any]]:
    """Neighbours of a NaN by name, with what they ask for: one for each step that may look at all rows together."""
    asks: dict[str, dict[str, Any]] = {
        "top_k": {"temperature": 1.0, "top_k": 1},
        "top_p": {"temperature": 1.0, "top_p": 0.01},
        "min_p": {"temperature": 1.0, "min_p": 0.99},
        "penalties": {"repetition_penalty": 2.0, "presence_penalty": 2.0},
        "bias": {"logit_bias": {7: 50.0}},
        "bad_words": {"bad_words_token_ids": ((5,),)},
    }
    params = {i: SamplingParams(**{"temperature": 0.0, **p}) for i, p in asks.items()}
    return {i: p for i, p in asks.items() if params[i].required_capabilities() <= offered}


def _row_for_neighbours() -> np.ndarray:
    """Token 5, which has been drawn before, wins by little: whatever these requests ask for decides their draw."""
    row = np.zeros(VOCAB, np.float32)
    row[[5, 20]] = 1.0, 0.5
    return row


@probe(
    "SAMPLE-044..SAMPLE-046", *RECORDED, Capability.SAMPLE_FAULTS, Capability.ALLOWED_TOKEN_IDS, Capability.BAD_WORDS
)
def rows_without_a_token_have_a_fault(bench: Bench) -> Found:
    """Two allowed tokens, both of them bad words: two such requests get an error each, their neighbours what they
    always get."""
    fault, near, early = "MR-SAMPLE-044", "MR-SAMPLE-045", "MR-SAMPLE-046"
    stuck = SamplingParams(temperature=0.0, allowed_token_ids=(3, 4), bad_words_token_ids=((3,), (4,)))
    free = SamplingParams(temperature=1.0 if Capability.SEEDED_SAMPLING in bench.capabilities else 0.0)

    def others() -> list[Actor]:
        return [Actor("b", [1, 2], free, 5), Actor("z", [3], free, -5)]

    alone = Scene(bench.runner, bench.capabilities, others())
    scene = Scene(
        bench.runner, bench.capabilities, [*others(), Actor("m", [1, 2, 3, 4, 5, 6], stuck), Actor("s", [7], stuck)]
    )
    found: Found = {fault: [], near: [], early: []}
    for n in range(4):
        sight = scene.step({"b": 9, "m": 4, "z": 9, "s": 9})
        faults, output = _faults(sight), sight.output
        tokens = output.tokens()
        if n == 0:  # four of six prompt tokens: no row of it counts
            found[early] += differs(early, "faults", "m", (faults.get("m"), output.errors.get("m")), (0, None))
            found[early] += differs(early, "sampled_token_ids", "m", tokens["m"], ())
        stuck_ids = ["s"] if n == 0 else ["m", "s"]
        for i in stuck_ids:
            found[fault] += differs(fault, "faults", i, faults.get(i), NO_TOKEN)
            found[fault] += differs(fault, "sampled_token_ids", i, tokens[i], ())
        wanted_errors = dict.fromkeys(stuck_ids, SampleFault.NO_TOKEN)
        found[fault] += differs(fault, "errors", None, dict(output.errors), wanted_errors)
        if n > 1:  # the state has taken token 0 and goes on
            found[fault] += differs(fault, "input_ids", "m", _fed(sight, "m"), 0)
        wanted = alone.step({"b": 9, "z": 9}).output.tokens()
        for i in ("b", "z"):
            found[near] += differs(near, "sampled_token_ids", i, tokens[i], wanted[i])
            found[near] += differs(near, "faults", i, faults.get(i), 0)
    return found


def _faults(sight: Sight) -> dict[str, int]:
    """By request; empty where the record has another length."""
    faults = np.asarray(sight.record.faults).tolist()
    return dict(zip(sight.order, faults, strict=True)) if len(faults) == len(sight.order) else {}


def _fed(sight: Sight, req_id: str) -> int | None:
    """The first token that the step fed for a request; None where the record does not tell."""
    at = int(sight.record.query_start_loc[sight.order.index(req_id)])
    return int(sight.record.input_ids[at]) if 0 <= at < len(sight.record.input_ids) else None


# -- traces -------------------------------------------------------------------------------------------------------


@probe("SAMPLE-047 SAMPLE-048 LOGPROB-010", *RECORDED, Capability.TRACE_REPLAY)
def traces_are_replayed(bench: Bench) -> Found:
    """One request replays three tokens, is away behind the second, and then draws for itself; beside two others."""
    offered = bench.capabilities
    token, back, scored = "MR-SAMPLE-047", "MR-SAMPLE-048", "MR-LOGPROB-010"
    random = {"temperature": 1.0} if Capability.SEEDED_SAMPLING in offered else {"temperature": 0.0}
    counted = {"logprobs": 2} if Capability.LOGPROBS in offered else {}
    trace = (9, 8, 49)
    traced = SamplingParams(**random, **counted, trace_decode_token_ids=trace)
    actors = [
        Actor("b", [5, 6], SamplingParams(**random), 3), Actor("t", [1, 2, 3], traced, 4),
        Actor("u", [1, 2, 3, 4], traced, 4),
    ]  # fmt: skip
    scene = Scene(bench.runner, offered, actors)
    found: Found = {token: [], back: []} | ({scored: []} if counted else {})
    gone = 0
    for n in range(7):
        ids = ["b", "u"] if n in (2, 3) else ["u", "t", "b"] if n % 2 else ["t", "b", "u"]
        histories = {i: scene.actors[i].history() for i in ids}
        sight = scene.step(ids)
        for i in ids:
            k, seed = len(histories[i].outputs), scene.actors[i].seed
            got = sight.output.tokens().get(i, ())
            clause = back if i == "t" and gone else token
            raw = witness_logits(MODEL, [histories[i].tokens])[0]
            if i == "b" or k >= len(trace):
                found[clause] += row_faults(clause, i, raw, histories[i], seed, (*got, -1)[0], None)
            else:
                found[clause] += differs(clause, "sampled_token_ids", i, got, (trace[k],))
                found[clause] += differs(clause, "token_ids", i, sight.drawn(i), [trace[k]])
                if counted:
                    found[scored] += _scored(scored, i, sight, raw, trace[k])
        if n == 1:
            scene.preempt("t")
            gone = 1
    return found


def _scored(clause: str, req_id: str, sight: Sight, raw: np.ndarray, token: int) -> list[Mismatch]:
    """Column 0 of the request against the softmax of the logits."""
    lists = sight.logprobs(req_id)
    if lists is None:
        return [Mismatch(clause, "logprobs", req_id, (), None, "asked for")]
    x = raw.astype(np.float64)
    wanted = x[token] - x.max() - np.log(np.exp(x - x.max()).sum())
    got = int(lists.token_ids[0, 0]), int(lists.ranks[0])
    return differs(clause, "logprob_token_ids, ranks", req_id, got, (token, int((raw >= raw[token]).sum()))) + (
        row_differences(clause, "logprobs", req_id, lists.logprobs[0, :1], np.array([wanted]))
    )


# -- custom processors --------------------------------------------------------------------------------------------

BOOST = "boost"  # extra_args: which token the processor of these probes sets to which logit, (token, logit)


class Recorder:
    """A processor that tells what it is told. It sets one token's logit for the requests that ask for it."""

    arguments = (BOOST,)

    def __init__(self, max_num_reqs: int, vocab_size: int, arrays: Any) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.boosts: dict[int, tuple[int, float]] = {}

    def validate(self, params: SamplingParams) -> None:
        asked = (params.extra_args or {}).get(BOOST)
        if asked is not None and asked[0] >= VOCAB:
            raise SamplingParamsError("no such token", field=BOOST, got=asked[0], expected=f"below {VOCAB}")

    def add_request(self, row: int, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]) -> bool:
        self.told.append(("add", int(row), [int(t) for t in prompt], [int(t) for t in outputs]))
        self.boosts.pop(row, None)
        if (params.extra_args or {}).get(BOOST) is None:
            return False
        self.boosts[int(row)] = params.extra_args[BOOST]  # type: ignore[index]
        return True

    def remove_request(self, row: int) -> None:
        self.told.append(("remove", int(row)))

    def move_rows(self, moves: Sequence[Any]) -> None:
        """Everything that is kept by row goes along, and who has just been told of a row is told where it ends up."""
        for m in moves:
            to = {m.source: m.target, m.target: m.source} if m.swap else {m.source: m.target}
            stay = {row: boost for row, boost in self.boosts.items() if row != m.target or m.swap}
            self.boosts = {to.get(row, row): boost for row, boost in stay.items()}
            self.told = [("add", to.get(t[1], t[1]), *t[2:]) if t[0] == "add" else t for t in self.told]

    def observe(self, rows: Any, token_ids: Any, num_sampled: Any) -> None:
        taken = zip(rows.tolist(), token_ids.tolist(), num_sampled.tolist(), strict=True)
        self.told.append(("observe", {row: tokens[:n] for row, tokens, n in taken}))

    def apply(self, logits: Any, context: Any) -> None:
        rows, positions, fed = context.rows.tolist(), context.positions.tolist(), context.input_ids.tolist()
        self.told.append(("apply", dict(zip(rows, zip(positions, fed, strict=True), strict=True))))
        for i, row in enumerate(rows):
            if row in self.boosts:
                token, logit = self.boosts[row]
                logits[i, token] = logit

    def take(self, kind: str) -> list[tuple[Any, ...]]:
        """What was told of this kind since the last question."""
        told = [t[1:] for t in self.told if t[0] == kind]
        self.told = [t for t in self.told if t[0] != kind]
        return told


# Who is scheduled in each step. p is preempted behind the second and comes back with outputs; q ends behind the fourth.
SCHEDULE = ("pqr", "pqr", "qr", "qr", "pr", "rp")


@probe("SAMPLE-049..SAMPLE-052", *RECORDED, Capability.LOGITS_PROCESSORS)
def processors_are_told(bench: Bench) -> Found:
    """A recording processor through adds, tokens, a preemption, a resumption and a finish."""
    offered = bench.capabilities
    rows_told, tokens_told, edits, refused = (f"MR-SAMPLE-{n:03}" for n in (49, 50, 51, 52))
    made: list[Recorder] = []

    def factory(max_num_reqs: int, vocab_size: int, arrays: Any) -> Recorder:
        made.append(Recorder(max_num_reqs, vocab_size, arrays))
        return made[-1]

    scene = Scene(bench.runner, offered, _boosted(offered), logits_processors=(factory,))
    found: Found = {rows_told: [], tokens_told: [], edits: []}
    if not made:
        return {rows_told: [Mismatch(rows_told, "logits_processors", None, (), "none built", "one built")]}
    told, row_of = made[-1], dict[str, int]()
    for n, ids in enumerate(SCHEDULE):
        adds = [i for i in scene.actors if i in ids and not scene.actors[i].live]
        histories = {i: scene.actors[i].history() for i in ids}
        left = [(row_of[i],) for i in {2: "p", 4: "q"}.get(n, "")]
        # r takes three of its four prompt tokens in its first step, and draws nothing
        sight = scene.step({i: 3 if i == "r" else 9 for i in ids})
        row_of = dict(zip(sight.order, sight.record.idx_mapping.tolist(), strict=False))
        added = [(row_of[i], list(scene.actors[i].prompt), histories[i].outputs) for i in adds]
        found[rows_told] += differs(rows_told, "add_request", None, told.take("add"), added)
        found[rows_told] += differs(rows_told, "remove_request", None, told.take("remove"), left)
        taken = {row_of[i]: list(tokens) for i, tokens in sight.taken.items()}
        found[tokens_told] += differs(tokens_told, "observe", None, told.take("observe"), [(taken,)])
        seen = {row_of[i]: (len(histories[i].tokens) - 1, histories[i].tokens[-1]) for i in ids if i != "q"}
        if n == 0:
            seen[row_of["r"]] = (2, 2)
        found[edits] += differs(edits, "apply", None, told.take("apply"), [(seen,)])
        for i in ids:
            if not (i == "r" and n == 0):
                found[edits] += _edited(edits, i, histories[i], scene.actors[i], sight)
        if n == 1:
            scene.preempt("p")
        if n == 3:
            scene.finish("q")
    return found | {refused: _refusal(bench, refused, factory)}


def _boosted(offered: frozenset[Capability]) -> list[Actor]:
    """p boosts a token that is a bad word of its own, r another one; q asks for nothing."""
    asks: dict[str, Any] = {"temperature": 0.5 if Capability.SEEDED_SAMPLING in offered else 0.0}
    banned = {"bad_words_token_ids": ((6,),)} if Capability.BAD_WORDS in offered else {}
    return [
        Actor("p", [1, 2, 3], SamplingParams(**asks, **banned, extra_args={BOOST: (6, 17.0)}), 4),
        Actor("q", [7, 8], SamplingParams(**asks), 5),
        Actor("r", [9, 3, 2, 1], SamplingParams(**asks, extra_args={BOOST: (30, 16.5)}), 6),
    ]


def _edited(clause: str, req_id: str, history: RowHistory, actor: Actor, sight: Sight) -> list[Mismatch]:
    """The draw of one request, whatever bad words have done to the token that it boosts."""
    x = witness_logits(MODEL, [history.tokens])[0].astype(np.float64)
    if actor.params.extra_args is not None:
        token, logit = actor.params.extra_args[BOOST]
        x[token] = logit
    score = x if actor.params.greedy else x / actor.params.temperature + scores_noise(history, actor.seed, VOCAB)
    return differs(clause, "token_ids", req_id, sight.drawn(req_id), [int(score.argmax())])


def _refusal(bench: Bench, clause: str, factory: Any) -> list[Mismatch]:
    """A request that the processor refuses, beside one that it does not: nothing of the plan happens."""
    bad = Actor("x", [1, 2], SamplingParams(temperature=0.0, extra_args={BOOST: (VOCAB, 1.0)}))
    good = Actor("g", [3, 4], SamplingParams(temperature=0.0))
    scene = Scene(bench.runner, bench.capabilities, [good, bad], logits_processors=(factory,))
    runner = scene.runner
    before = dict(runner.state_digest()) if Capability.STATE_DIGEST in bench.capabilities else {}
    try:
        scene.step(["g", "x"])
    except RunnerError:
        pass
    else:
        return [Mismatch(clause, "execute_model", "x", (), "accepted", "a RunnerError")]
    after = dict(runner.state_digest()) if Capability.STATE_DIGEST in bench.capabilities else {}
    if before != after:
        return [Mismatch(clause, "state_digest", "x", (), "changed", "as before")]
    good.live = bad.live = False
    twin = Scene(bench.runner, bench.capabilities, [Actor("g", [3, 4], good.params)])
    got, want = (s.step(["g"]).output.tokens() for s in (scene, twin))
    return differs(clause, "sampled_token_ids", "g", got, want)
