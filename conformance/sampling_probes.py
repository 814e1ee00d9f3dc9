"""Clauses about sampling parameters, on given logits: each request of a batch asks for one thing.

All of them run in one batch with their rows shuffled, so that a parameter read from a neighbour shows. Each history is
imposed; what the runner would have drawn, and on runners with log probabilities the whole processed row, is held
against `conformance.sampling_truth`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from conformance.context import Mismatch
from conformance.probe import RECORDED, probe
from conformance.sampling_truth import RowHistory, thinking_token
from conformance.scene import REASONING, VOCAB, Actor, Scene, differs, row_faults, servable
from runner_api import BatchDescriptor, Capability, CUDAGraphMode, SamplingParams

if TYPE_CHECKING:
    from conformance.probes import Bench

Found = dict[str, list[Mismatch]]
ClauseOf = Callable[[RowHistory], str]


@dataclass(frozen=True, slots=True)
class Wish:
    """One request, the outputs that are imposed on it, and the clause that answers for each of its rows."""

    clause: str | ClauseOf
    prompt: Sequence[int]
    said: Sequence[int]
    asks: dict[str, Any]
    seed: int = 0
    eos: Sequence[int] = ()
    row: Sequence[float] | None = None  # the logits of every step; None: random ones with many ties

    def answers(self, history: RowHistory) -> str:
        return self.clause if isinstance(self.clause, str) else self.clause(history)

    def params(self) -> SamplingParams:
        return SamplingParams(**{"temperature": 0.0, **self.asks})


def _min_tokens(history: RowHistory) -> str:
    return "MR-SAMPLE-016" if len(history.outputs) < history.params.min_tokens else "MR-SAMPLE-017"


def _thinking(history: RowHistory) -> str:
    if thinking_token(history) is None:
        return "MR-SAMPLE-027"
    begun = any(history.tokens[-n:] == END[:n] for n in range(1, len(END)))
    return "MR-SAMPLE-026" if begun else "MR-SAMPLE-025"


def _logs(*probabilities: float) -> list[float]:
    """Logits of these probabilities; every other token has next to none."""
    rest = [1e-6] * (VOCAB - len(probabilities))
    return np.log(np.array([*probabilities, *rest])).astype(np.float32).tolist()


START, END = list(REASONING.start_token_ids), list(REASONING.end_token_ids)
NATURAL = list(REASONING.natural_end_token_ids)
PENALTIES = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.25}
EVERYTHING = {
    "temperature": 0.5, "logit_bias": {4: 3.0, 9: -2.0, 49: 4.0}, "repetition_penalty": 1.5, "frequency_penalty": 0.5,
    "presence_penalty": 0.25, "bad_words_token_ids": ((4, 9), (33,)), "min_tokens": 2, "stop_token_ids": (4, 20),
    "min_p": 0.001, "top_k": 20, "top_p": 0.9,
}  # fmt: skip
# What one request asks for, mostly alone. Outputs repeat tokens and finish words; prompts hold tokens of their own.
WISHES: tuple[Wish, ...] = (
    Wish("MR-SAMPLE-013", [1, 2], [3, 31, 3], {"allowed_token_ids": (3, 31, 32, 49)}),
    Wish("MR-SAMPLE-014", [1], [5, 5, 5], {"logit_bias": {5: 3.0, 0: -2.5, 31: 0.25, 49: 6.0}}),
    Wish("MR-SAMPLE-014", [2], [7, 49, 0], {"logit_bias": {0: 5.5}, "temperature": 1.0}, seed=-7),
    # In sixteen bits this bias would be more than the seventh logit.
    Wish("MR-SAMPLE-014", [2], [7, 49, 0], {"logit_bias": {5: 0.30001}}, row=[0] * 7 + [0.30004]),
    Wish("MR-SAMPLE-015", [1, 2, 3], [3, 4, 3], {"allowed_token_ids": (3, 4, 33), "logit_bias": {7: 50.0, 33: 1.0}}),
    Wish(_min_tokens, [1, 7, 9], [2, 3, 4], {"min_tokens": 2, "stop_token_ids": (7, 9, 48)}, row=[0] * 7 + [9, 0, 8]),
    Wish("MR-SAMPLE-018", [4], [1, 2, 3], {"min_tokens": 3, "ignore_eos": True}, eos=(11, 49), row=[0] * 11 + [9]),
    Wish("MR-SAMPLE-019", [1, 2, 49, 2], [6, 6, 32], {"repetition_penalty": 2.0}),
    Wish("MR-SAMPLE-019", [8], [8, 9, 9], {"repetition_penalty": 0.8, "temperature": 1.3}, seed=5),
    Wish("MR-SAMPLE-020", [1], [6, 6, 6], {"frequency_penalty": 0.75}),
    Wish("MR-SAMPLE-021", [1], [6, 6, 6], {"presence_penalty": -1.5}),
    Wish(
        "MR-SAMPLE-022", [9, 9, 30, 9, 49], [1, 2, 3], {"frequency_penalty": 1.5, "presence_penalty": 1.0},
        row=[0] * 9 + [5] + [0] * 20 + [4.5],
    ),
    Wish("MR-SAMPLE-023", [5, 6], [1, 2, 3], {"bad_words_token_ids": ((8,), (1, 2, 33), (2, 3, 49), (2, 1), (3, 5))}),
    Wish("MR-SAMPLE-024", [5, 1], [2, 7, 1], {"bad_words_token_ids": ((1, 2), (1, 2, 7), (5, 1, 2, 4), (1, 9))}),
    Wish(_thinking, [*START, 3], [4, 5, *END, 6], {"thinking_token_budget": 2}),
    Wish(_thinking, [7, *START], [*NATURAL, 4, 4], {"thinking_token_budget": 1}),
    Wish(_thinking, [7, 8], [4, *START, 5], {"thinking_token_budget": 0, "temperature": 0.5}, seed=3),
    Wish("MR-SAMPLE-028", [1], [2, 3, 4], {"temperature": 0.7}, seed=11),
    Wish("MR-SAMPLE-028", [1, 2], [2, 3, 4], {"temperature": 2.0}, seed=2**40 + 1),
    Wish("MR-SAMPLE-029", [1], [2, 3, 4], {"temperature": 1.0, "min_p": 0.2}, seed=1),
    Wish("MR-SAMPLE-029", [1], [2, 3, 4], {"temperature": 1.0, "min_p": 1.0}, seed=1, row=[1, 3, 3, 0, 3, 2.75]),
    Wish("MR-SAMPLE-030", [1], [2, 3, 4], {"temperature": 1.0, "top_k": 5}, seed=8),
    Wish("MR-SAMPLE-030", [1], [2, 3, 4], {"temperature": 1.5, "top_k": 3}, seed=9, row=[1, 2, 4, 2, 2, 2]),
    Wish("MR-SAMPLE-030", [1], [2, 3, 4], {"temperature": 1.0, "top_k": VOCAB - 1}, seed=8),
    Wish("MR-SAMPLE-031", [1], [2, 3, 4], {"temperature": 1.0, "top_p": 0.7}, seed=8, row=_logs(0.15, 0.5, 0.3, 0.05)),
    Wish("MR-SAMPLE-031", [1], [2, 3, 4], {"temperature": 1.0, "top_p": 0.1}, seed=8, row=_logs(0.3, 0.4, 0.2, 0.1)),
    Wish(
        "MR-SAMPLE-032", [1], [2, 3, 4], {"temperature": 1.0, "top_k": 3, "top_p": 0.6}, seed=8,
        row=_logs(0.05, 0.25, 0.2, 0.1, 0.15, 0.25),
    ),
    Wish("MR-SAMPLE-033", [4, 9, 1, 2], [4, 9, 4, 4], EVERYTHING, seed=77),
    Wish("MR-SAMPLE-033", [33, 2], [9, 4, 9, 9], {**EVERYTHING, **PENALTIES, "temperature": 1.5}, seed=-77),
    Wish(
        "MR-SAMPLE-033", [4, 9, 1, 2], [4, 9, 4, 4],
        {"temperature": 0.5, "logit_bias": {4: 3.0, 9: -2.0}, **PENALTIES}, seed=78,
    ),
    Wish("MR-SAMPLE-034", [1, 4], [4, 4, 9], {}),
    Wish("MR-SAMPLE-034", [1, 4], [9, 4, 9], {"temperature": 1.0, "top_k": VOCAB, "top_p": 1.0}, seed=6),
    Wish("MR-SAMPLE-042", [1], [2, 3, 4], {"temperature": 1.0}, seed=2**63 - 1, row=[0.0]),
    Wish("MR-SAMPLE-042", [1], [2, 3, 4], {"temperature": 1.0}, seed=-(2**63), row=[0.0]),
    Wish("MR-SAMPLE-042", [1, 2, 3], [3, 4], {"temperature": 1.0}, seed=0, row=[0.0]),
    Wish("MR-SAMPLE-042", [1, 2, 3], [3, 4], {"temperature": 1.0}, seed=2**32, row=[0.0]),
)  # fmt: skip
MANY_STEPS = 6


@probe("SAMPLE-013..SAMPLE-034 SAMPLE-042", *RECORDED, Capability.FORCED_STEP)
def parameters_do_what_they_say(bench: Bench) -> Found:
    """Every wish of `WISHES` that the runner can serve, six steps long, in one batch."""
    wishes = {f"{i}": w for i, w in enumerate(WISHES) if servable(w.params(), bench.capabilities)}
    scene = Scene(bench.runner, bench.capabilities, _actors(bench, wishes), **_showing(bench))
    random = np.random.default_rng(2)
    found: Found = {}
    for n in range(MANY_STEPS):
        going = [i for i, w in wishes.items() if n <= len(w.said)]
        if not going:
            break
        random.shuffle(going)
        histories = {i: scene.actors[i].history() for i in going}
        logits = {i: _given(wishes[i].row, random) for i in going}
        imposed = {i: [[*wishes[i].said, 0][n]] for i in going}
        sight = scene.step(going, logits=logits, imposed=imposed)
        for i in going:
            wish, history = wishes[i], histories[i]
            clause = wish.answers(history)
            seen = sight.scores(i)
            wrong = row_faults(clause, i, logits[i], history, wish.seed, sight.drawn(i)[0], seen)
            if clause == "MR-SAMPLE-034" and seen is not None and not np.array_equal(seen, logits[i]):
                v = int(np.flatnonzero(seen != logits[i])[0])
                wrong = [Mismatch(clause, "processed logits", i, (v,), float(seen[v]), float(logits[i][v]))]
            found.setdefault(clause, []).extend(wrong)
    return found


def _actors(bench: Bench, wishes: dict[str, Wish]) -> list[Actor]:
    return [Actor(i, w.prompt, watched(bench, w.params()), w.seed, w.eos) for i, w in wishes.items()]


def watched(bench: Bench, params: SamplingParams) -> SamplingParams:
    """The same request asking for every token, where that can be asked for."""
    return replace(params, logprobs=-1) if Capability.LOGPROBS in bench.capabilities else params


def _showing(bench: Bench) -> dict[str, Any]:
    return {"logprobs_mode": "processed_logits"} if Capability.LOGPROBS in bench.capabilities else {}


def _scoring(bench: Bench) -> dict[str, Any]:
    return {"logprobs_mode": "processed_logprobs"} if Capability.LOGPROBS in bench.capabilities else {}


def _given(row: Sequence[float] | None, random: np.random.Generator) -> np.ndarray:
    """float32[V]: the given logits, zeros behind them; or quarters between -4 and 4, which float32 holds exactly."""
    if row is None:
        return (random.integers(-16, 17, VOCAB) / 4).astype(np.float32)
    return np.array([*row, *[0.0] * (VOCAB - len(row))], np.float32)


# -- drafts -------------------------------------------------------------------------------------------------------

# Behind a prompt and some outputs, three drafts: each asks for something that the drafts change.
DRAFTED: tuple[tuple[Wish, Sequence[int]], ...] = (
    (Wish("", [1, 2], [3, 4], {"presence_penalty": 2.0}), [5, 6, 5]),
    (Wish("", [5, 2], [3, 5], {"frequency_penalty": 1.0}), [5, 5, 7]),
    (Wish("", [9], [3, 4], {"repetition_penalty": 3.0, "temperature": 1.0}, seed=4), [6, 6, 6]),
    (Wish("", [9], [3, 4], {"bad_words_token_ids": ((4, 5, 10), (5, 6, 11), (6, 12))}), [5, 6, 8]),
    (Wish("", [9], [3, 4], {"min_tokens": 4, "stop_token_ids": (13, 14)}), [5, 6, 8]),
    (Wish("", [*START], [3, 4], {"thinking_token_budget": 3}), [5, END[0], END[1]]),
    (Wish("", [1], [2, 3], {"temperature": 1.0}, seed=9), [5, 6, 8]),
    (Wish("", [1], [2, 3], {}), [5, 6]),
)  # fmt: skip


@probe("SAMPLE-035", *RECORDED, Capability.FORCED_STEP, Capability.DRAFT_LAYOUT)
def drafts_count_as_said(bench: Bench) -> Found:
    """Three drafts behind two outputs: the draw after each row is that of a request which had put them out."""
    clause = "MR-SAMPLE-035"
    wishes = {f"{i}": w for i, (w, _) in enumerate(DRAFTED) if servable(w.params(), bench.capabilities)}
    drafts = {i: list(DRAFTED[int(i)][1]) for i in wishes}
    actors = [Actor(i, w.prompt, w.params(), w.seed) for i, w in wishes.items()]
    scene = Scene(bench.runner, bench.capabilities, actors, num_speculative_tokens=3)
    random = np.random.default_rng(4)
    held = {i: [*d, 0][:3] for i, d in drafts.items()}
    for n in range(2):
        scene.step(list(wishes), imposed={i: [w.said[n]] for i, w in wishes.items()}, next_drafts=held)
    histories = {i: [scene.actors[i].history(d[:j]) for j in range(len(d) + 1)] for i, d in drafts.items()}
    # The tokens that are spoken of lie on top and close together, so that what is done to one of them shows.
    logits = {i: _given(None, random) / 4 + np.zeros((len(d) + 1, 1), np.float32) for i, d in drafts.items()}
    for rows in logits.values():
        rows[:, 5:15] += 2.0
    count = {i: len(d) for i, d in drafts.items()}
    sight = scene.step(list(wishes)[::-1], logits=logits, imposed={i: [1] for i in wishes}, drafts=count)
    wrong: list[Mismatch] = []
    for i, wish in wishes.items():
        for j, (history, drawn) in enumerate(zip(histories[i], sight.drawn(i), strict=True)):
            wrong += row_faults(clause, i, logits[i][j], history, wish.seed, drawn, None)
    return {clause: wrong}


# -- what a draw may not depend on ---------------------------------------------------------------------------------

SOME = tuple(range(5, 25))
# Requests that draw for themselves, each with all that the runner offers of a list of parameters.
MIXED: tuple[tuple[str, Sequence[int], dict[str, Any], int], ...] = (
    ("k", [4, 9, *START, 1, 2], EVERYTHING, 77),
    ("a", [1, *START, 3, 3, 5, 6], {**PENALTIES, "temperature": 1.5, "thinking_token_budget": 5, "top_k": 30}, -3),
    ("z", START, {"temperature": 1.0, "allowed_token_ids": SOME, "logit_bias": {6: 4.0, 30: 9.0}}, 2**50),
    ("f", [*START, 2], {"temperature": 1.0, "bad_words_token_ids": ((6,), (7, 8), (9, 9, 9)), "top_p": 0.95}, 5),
    (
        "c", [8, 3, 1, 4, 9, 9, 2, 30, 31, 33, 5],
        {"temperature": 2.0, "presence_penalty": 2.0, "min_tokens": 3, "stop_token_ids": tuple(range(0, 50, 2))}, 6,
    ),
)  # fmt: skip
OUTPUTS = 4
MAX_CHUNK = 16


def cast(bench: Bench) -> list[Actor]:
    """The requests of `MIXED` with what the runner offers of their parameters, and all their log probabilities."""
    return [
        Actor(i, prompt, watched(bench, SamplingParams(**offered_part(asks, bench))), seed)
        for i, prompt, asks, seed in MIXED
    ]


def offered_part(asks: dict[str, Any], bench: Bench) -> dict[str, Any]:
    """Greedy, and the parameters that the runner can serve."""
    part: dict[str, Any] = {"temperature": 0.0}
    for name, value in asks.items():
        needs = SamplingParams(**{"temperature": 1.0, name: value}).required_capabilities()
        if needs - (frozenset() if name == "temperature" else {Capability.SEEDED_SAMPLING}) <= bench.capabilities:
            part[name] = value
    return part


Life = dict[str, list[tuple[int, bytes]]]


def live(
    scene: Scene, *, turned: bool = False, chunk: int = MAX_CHUNK, away: Sequence[str] = (),
    pad: tuple[int, int] | None = None,
) -> Life:  # fmt: skip
    """Run every request of the scene to `OUTPUTS` outputs: (token, log probabilities) of each.

    turned: the plan names them the other way round. chunk: most tokens of one request and step. away: requests that are
    preempted behind their second output, for two steps. pad: tokens and requests of padding.
    """
    ids = list(scene.actors)[::-1] if turned else list(scene.actors)
    told: Life = {i: [] for i in ids}
    back: dict[str, int] = {}
    for n in range(10 * OUTPUTS):
        going = [i for i in ids if len(told[i]) < OUTPUTS and n >= back.get(i, 0)]
        if all(len(rows) >= OUTPUTS for rows in told.values()):
            break
        counts = dict.fromkeys(going, chunk)
        sight = scene.step(counts, descriptor=_padded(scene, counts, pad))
        for i in going:
            tokens = sight.output.tokens().get(i, ())
            lists = sight.logprobs(i)
            if tokens:
                told[i].append((tokens[0], b"" if lists is None else lists.logprobs.tobytes() + lists.ranks.tobytes()))
            if i in away and i not in back and len(told[i]) == 2:
                scene.preempt(i)
                back[i] = n + 3
    return told


def _padded(scene: Scene, counts: dict[str, int], pad: tuple[int, int] | None) -> BatchDescriptor | None:
    if pad is None:
        return None
    tokens = sum(min(n, len(scene.actors[i].tokens) - scene.actors[i].computed) for i, n in counts.items())
    reqs = min(len(counts) + pad[1], scene.config.max_num_reqs)
    return BatchDescriptor(CUDAGraphMode.FULL, min(tokens + pad[0], scene.config.max_num_batched_tokens), reqs)


@probe("SAMPLE-036..SAMPLE-041 LOGPROB-016", *RECORDED)
def circumstances_change_nothing(bench: Bench) -> Found:
    """The same requests in another order, in other rows, in chunks, with an absence, padded, in rows that were used."""

    def scene(**changes: Any) -> Scene:
        return Scene(bench.runner, bench.capabilities, cast(bench), **_scoring(bench), **changes)

    plain = live(scene())
    rows = len(MIXED) + 1
    lives = {
        "MR-SAMPLE-037": live(scene(), turned=True),
        "MR-SAMPLE-038": live(scene(initial_free_rows=tuple(range(rows)))),
        "MR-SAMPLE-039": live(scene(), chunk=3),
        "MR-SAMPLE-040": live(scene(), away=("k", "a", "c")),
        "MR-SAMPLE-036": live(_used(bench)),
    }
    if Capability.PADDED_BATCH in bench.capabilities:
        lives["MR-SAMPLE-041"] = live(scene(), pad=(7, 3))
    found: Found = {}
    for clause, other in lives.items():
        found[clause] = []
        for i, told in plain.items():
            tokens, wanted = [t for t, _ in other[i]], [t for t, _ in told]
            found[clause] += differs(clause, "token_ids", i, tokens, wanted)
            if Capability.LOGPROBS in bench.capabilities and tokens == wanted:
                # The log probabilities of every token, all steps included.
                wrong = next((n for n in range(OUTPUTS) if other[i][n] != told[n]), None)
                for c in (clause, "MR-LOGPROB-016"):
                    at = differs(c, f"processed logprobs, as {clause}", i, wrong, None)
                    found.setdefault(c, []).extend(at)
    return found


def _used(bench: Bench) -> Scene:
    """A scene all of whose rows have been held by requests that asked for everything."""
    hosts, guests = cast(bench), []
    for n in range(len(hosts) + 1):
        asks = {
            **EVERYTHING, "temperature": 0.3, "allowed_token_ids": tuple(range(n, 45)), "min_tokens": 9,
            "logit_bias": {v: v % 7 - 3.0 for v in range(VOCAB)}, "stop_token_ids": tuple(range(20)),
            "thinking_token_budget": 0, "bad_words_token_ids": tuple((v, v + 1) for v in range(VOCAB - 1)),
        }  # fmt: skip
        if n == 1:
            replayed = {"trace_decode_token_ids": (1, 2, 3, 4, 5, 6)}
            asks = {**asks, "thinking_token_budget": None, "bad_words_token_ids": None, **replayed}
        params = SamplingParams(**offered_part(asks, bench))
        guests.append(Actor(f"guest{n}", [n, *START, 9, 9], watched(bench, params), -n))
    rows = len(guests)
    free = tuple(np.random.default_rng(rows + 1).permutation(rows).tolist())
    scene = Scene(
        bench.runner, bench.capabilities, [*hosts, *guests], max_num_reqs=rows, initial_free_rows=free,
        **_scoring(bench),
    )  # fmt: skip
    for _ in range(3):
        scene.step([g.req_id for g in guests])
    for guest in guests:
        scene.finish(guest.req_id)
        del scene.actors[guest.req_id]
    return scene
