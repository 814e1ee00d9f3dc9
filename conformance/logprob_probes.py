"""Clauses about log probabilities: of the tokens taken, in every mode, and of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from conformance.context import Mismatch
from conformance.probe import RECORDED, probe
from conformance.sampling_truth import RowHistory, after_grammar, columns_of, log_softmax, processed
from conformance.scene import MODEL, VOCAB, Actor, Scene, Sight, differs, row_differences, servable_part
from conformance.truth import witness_logits
from runner_api import Capability, LogprobsLists, SamplingParams
from runner_api.config import LOGPROBS_MODES

if TYPE_CHECKING:
    from conformance.probes import Bench

Found = dict[str, list[Mismatch]]
GREEDY = SamplingParams(temperature=0.0)
RAW, PROCESSED, LOGITS = "MR-LOGPROB-001", "MR-LOGPROB-003", "MR-LOGPROB-004"
LISTED_IDS = (49, 5, 0, 31)
TOP, LISTED, WIDTH, COUNTS, RANK, LOST = (f"MR-LOGPROB-{n:03}" for n in (5, 6, 7, 8, 2, 9))


def scores_of(raw: np.ndarray, history: RowHistory, mode: str) -> np.ndarray:
    """What log probabilities are taken from and how, by token: float64[V]."""
    x = processed(raw, history) if mode.startswith("processed") else after_grammar(raw, history)
    return log_softmax(x) if mode.endswith("logprobs") else x


# -- of tokens ----------------------------------------------------------------------------------------------------


@probe("LOGPROB-001..LOGPROB-009", *RECORDED, Capability.LOGPROBS, Capability.FORCED_STEP)
def log_probabilities_are_right(bench: Bench) -> Found:
    """One step on imposed logits in each mode: requests that ask for none, few, listed and all tokens."""
    offered = bench.capabilities
    found: Found = {}
    for n, mode in enumerate(LOGPROBS_MODES):
        asks: dict[str, dict[str, Any]] = {
            "none": {}, "zero": {"logprobs": 0}, "few": {"logprobs": 3, "temperature": 2.0, "top_k": 7},
            "listed": {"logprob_token_ids": LISTED_IDS, "temperature": 0.5},
            "biased": {"logprobs": 2, "logit_bias": {7: 9.0}, "presence_penalty": 1.0},
            "lost": {"logprobs": 1, "allowed_token_ids": (1, 2)},
        }  # fmt: skip
        if n in (1, 2):
            asks["all"] = {"logprobs": -1, "temperature": 1.5, "min_p": 0.3}
        params = {i: servable_part(GREEDY, p, offered) for i, p in asks.items()}
        scene = Scene(bench.runner, offered, [Actor(i, [3, 4], p, 9) for i, p in params.items()], logprobs_mode=mode)
        random = np.random.default_rng(n)
        logits = {i: (random.integers(-12, 13, VOCAB) / 4).astype(np.float32) for i in asks}
        imposed = {i: [7 if i == "biased" else 40] for i in asks}
        histories = {i: scene.actors[i].history() for i in asks}
        sight = scene.step(list(asks)[::-1], logits=logits, imposed=imposed)
        num_top = max(VOCAB if p.logprobs == -1 else p.logprobs or 0 for p in params.values())
        for i, p in params.items():
            scores = scores_of(logits[i], histories[i], mode)
            taken = imposed[i][0]
            rank = int((scores >= scores[taken]).sum())
            _judge(found, mode, sight, i, p, scores, taken, num_top, rank)
    return found


def _judge(
    found: Found, mode: str, sight: Sight, req_id: str, params: SamplingParams, scores: np.ndarray, taken: int,
    num_top: int, rank: int,
) -> None:  # fmt: skip
    """One request's row under the clauses that speak of it."""
    width = 1 + max(num_top, len(LISTED_IDS))
    values = LOGITS if mode.endswith("logits") else PROCESSED if mode.startswith("processed") else RAW
    lists = sight.logprobs(req_id)
    if lists is None or lists.token_ids.shape != lists.logprobs.shape:
        found.setdefault(WIDTH, []).append(Mismatch(WIDTH, "logprobs", req_id, (), None, f"{width} columns"))
        return
    ids, got = lists.token_ids[0], lists.logprobs[0].astype(np.float64)

    def note(clause: str, wrong: Sequence[Mismatch]) -> None:
        found.setdefault(clause, []).extend(wrong)

    wide = COUNTS if num_top == VOCAB else WIDTH
    note(wide, differs(wide, f"{mode}: columns", req_id, len(ids), width))
    if len(ids) != width:
        return
    # column 0: the token that was taken, also where it has no probability left
    note(values, differs(values, f"{mode}: token", req_id, int(ids[0]), taken))
    note(values, _close(values, mode, req_id, got[:1], scores[[taken]]))
    rank_clause = LOST if scores[taken] == -np.inf else RANK
    note(rank_clause, differs(rank_clause, f"{mode}: ranks", req_id, int(lists.ranks[0]), rank))
    # the others
    real = columns_of(scores, params, num_top)
    clause = LISTED if params.logprob_token_ids is not None else COUNTS if params.logprobs in (0, -1) else TOP
    note(clause, differs(clause, f"{mode}: ids", req_id, ids[1 : 1 + len(real)].tolist(), real))
    note(values, _close(values, mode, req_id, got[1 : 1 + len(real)], scores[ids[1 : 1 + len(real)]]))
    rest = list(zip(ids[1 + len(real) :].tolist(), got[1 + len(real) :].tolist(), strict=True))
    note(WIDTH, differs(WIDTH, f"{mode}: unused columns", req_id, rest, [(0, -np.inf)] * len(rest)))


def _close(clause: str, mode: str, req_id: str, got: np.ndarray, want: np.ndarray) -> list[Mismatch]:
    return row_differences(clause, mode, req_id, got, want) if len(want) else []


# -- of prompts ---------------------------------------------------------------------------------------------------

SCORED, CHUNKED, ONCE, PREFIX, AGAIN = (f"MR-LOGPROB-{n:03}" for n in (11, 12, 13, 14, 15))
PROMPTS = {
    "long": list(np.random.default_rng(1).integers(0, VOCAB, 13).tolist()),
    "two": [4, 9],
    "mid": [1, 2, 3, 1, 2, 3, 7],
    "none": [5, 6, 7, 8],
}


@probe("LOGPROB-011..LOGPROB-015", *RECORDED, Capability.PROMPT_LOGPROBS)
def prompts_are_scored(bench: Bench) -> Found:
    """Prompts whole and in chunks, behind a prefix, interrupted, and of requests that come back with outputs."""
    found: Found = {SCORED: [], CHUNKED: [], ONCE: [], PREFIX: [], AGAIN: []}
    # 1 in one step, and one token each after that
    scene = _prompts(bench)
    sights = [scene.step(list(PROMPTS)), scene.step(list(PROMPTS)[::-1])]
    due = {i: 0 for i in PROMPTS if i != "none"}
    whole = _delivered(found[ONCE], ONCE, sights, due)
    for i, lists in whole.items():
        found[SCORED] += _rows(SCORED, i, lists, PROMPTS[i], 0, scene.actors[i].params.prompt_logprobs)
    # 2 in chunks of three: a chunk that ends the prompt with its last token alone adds no row
    scene = _prompts(bench)
    sights = [scene.step(dict.fromkeys(PROMPTS, 3)) for _ in range(6)]
    chunked = _delivered(found[ONCE], ONCE, sights, {"long": 4, "two": 0, "mid": 2})
    for i, lists in chunked.items():
        found[CHUNKED] += _rows(CHUNKED, i, lists, PROMPTS[i], 0, scene.actors[i].params.prompt_logprobs)
    # 3 behind a prefix of eight tokens that another request has computed
    hit = Actor("hit", [*PROMPTS["long"][:8], 3, 2, 1], SamplingParams(temperature=0.0, prompt_logprobs=1))
    hit.computed, hit.prefix_of = 8, "long"
    scene = _prompts(bench, hit)
    scene.step(["long", "two"])
    sights = [scene.step({"hit": 2, "long": 1}), scene.step({"long": 1, "hit": 9}), scene.step(["hit", "two"])]
    for i, lists in _delivered(found[PREFIX], PREFIX, sights, {"hit": 1}).items():
        found[PREFIX] += _rows(PREFIX, i, lists, hit.prompt, 8, 1)
    # 4 away in the middle of the prompt, then away again behind an output
    scene = _prompts(bench)
    sights = [scene.step({"long": 5, "mid": 2}), scene.step({"mid": 1, "long": 4})]
    scene.preempt("long")
    sights += [scene.step({"mid": 1}), scene.step({"mid": 2, "long": 6}), scene.step({"long": 9, "mid": 9})]
    scene.preempt("long")
    sights += [scene.step(["mid"]), scene.step({"long": 4, "mid": 1}), scene.step(["long", "mid"])]
    for i, lists in _delivered(found[AGAIN], AGAIN, sights, {"long": 4, "mid": 4}).items():
        found[AGAIN] += _rows(AGAIN, i, lists, PROMPTS[i], 0, scene.actors[i].params.prompt_logprobs)
    return found


def _prompts(bench: Bench, *more: Actor) -> Scene:
    asks = {"long": 2, "two": 0, "mid": -1, "none": None}
    temperature = 1.0 if Capability.SEEDED_SAMPLING in bench.capabilities else 0.0
    actors = [Actor(i, PROMPTS[i], SamplingParams(temperature=temperature, prompt_logprobs=n)) for i, n in asks.items()]
    return Scene(bench.runner, bench.capabilities, [*actors, *more])


def _delivered(
    wrong: list[Mismatch], clause: str, sights: Sequence[Sight], due: Mapping[str, int]
) -> dict[str, LogprobsLists]:
    """What came, of the requests in `due`, which say with which step; anything else that comes is wrong."""
    came: dict[str, LogprobsLists] = {}
    for n, sight in enumerate(sights):
        got, wanted = dict(sight.output.prompt_logprobs), sorted(i for i in due if due[i] == n)
        wrong += differs(clause, f"prompt_logprobs of step {n}", None, sorted(got), wanted)
        came |= {i: lists for i, lists in got.items() if due.get(i) == n}
    return came


def _rows(
    clause: str, req_id: str, lists: LogprobsLists, prompt: Sequence[int], first: int, num_top: int | None
) -> list[Mismatch]:
    """All rows of one prompt against the witness model's definition: row t scores token first + 1 + t."""
    places = range(first, len(prompt) - 1)
    raw = witness_logits(MODEL, [prompt[: t + 1] for t in places])
    width = 1 + (VOCAB if num_top == -1 else num_top or 0)
    shapes = tuple(np.shape(a) for a in (lists.token_ids, lists.logprobs, lists.ranks))
    wanted = ((len(places), width), (len(places), width), (len(places),))
    if shapes != wanted:
        return differs(clause, "prompt_logprobs", req_id, shapes, wanted)
    found = []
    for n, t in enumerate(places):
        scores = log_softmax(raw[n].astype(np.float64))
        target = prompt[t + 1]
        ids = [target, *np.argsort(-scores, kind="stable")[: width - 1].tolist()]
        rank = int((scores >= scores[target]).sum())
        got = (np.asarray(lists.token_ids[n]).tolist(), int(lists.ranks[n]))
        found += differs(clause, f"prompt token {t + 1}", req_id, got, (ids, rank))
        found += _close(clause, "raw_logprobs", req_id, lists.logprobs[n].astype(np.float64), scores[ids])
    return found[:3]
