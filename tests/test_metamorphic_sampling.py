"""A request's tokens, log probabilities and ranks are its own: nothing about the batch may change a bit of them.

Every variation below runs requests that mix all sampling parameters, and holds each against the same request alone in a
fresh runner: on the witness model, on given logits (ties, -inf and NaN among them), and on llama-tiny up to certified
near ties. In CI each variation runs on cpu with 24 requests on the witness model and 24 on given logits, and on gpu, in
the interpreter, with 3 of each; rows are used again 80 times on cpu and 8 times on gpu. On a GPU: 1 to 1,024 rows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_variations import (
    PLAIN,
    DraftedRun,
    Request,
    Run,
    Schedule,
    Seen,
    V,
    alone,
    draw_requests,
    make_runner,
    same,
)

import conformance
from runner_api import SamplingParams, WitnessConfig, WitnessGroup

# -- variations -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.interpret)])
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "gpu":
        pytest.importorskip("gpu_backend.triton_support")
    return request.param


def sets(name: str, given_logits: bool) -> list[list[Request]]:
    """The sets of requests that every variation runs."""
    if name == "gpu":
        return [draw_requests(10, 3, 3)]
    return [draw_requests(seed, 8, 8) for seed in ((11, 12, 13) if given_logits else (21, 22, 23))]


_ALONE: dict[Any, dict[str, Seen]] = {}


def expected(name: str, requests: list[Request], given_logits: bool) -> dict[str, Seen]:
    """What each of them gives alone; worked out once."""
    key = (name, given_logits, *(r.req_id for r in requests))
    if key not in _ALONE:
        _ALONE[key] = alone(name, requests, given_logits)
    return _ALONE[key]


@dataclass(frozen=True)
class Variation:
    """What is other than with a request alone. rows: of the runner, None for as many as requests; parts: the requests
    that share a batch, by index."""

    schedule: Schedule = PLAIN
    rows: int | None = None
    free_rows: tuple[int, ...] | None = None
    parts: tuple[slice, ...] = (slice(None),)

    def play(self, name: str, requests: list[Request], given_logits: bool) -> dict[str, Seen]:
        seen: dict[str, Seen] = {}
        for part in self.parts:
            runner = make_runner(name, self.rows or len(requests), initial_free_rows=self.free_rows)
            seen |= Run(runner, self.schedule, given_logits).play(requests[part])
        return seen


VARIATIONS = {
    "neighbours": Variation(),
    "rows": Variation(rows=11, free_rows=(4, 10, 7, 1, 9, 0, 3, 8, 2, 6, 5)),
    "order": Variation(parts=(slice(None, None, -1),)),
    "batch size": Variation(rows=9, parts=(slice(0, 1), slice(1, 3), slice(3, None))),
    "chunks": Variation(Schedule(1, chunks=True)),
    "preemption": Variation(Schedule(2, preempts=True)),
    "waiting": Variation(Schedule(3, waits=True)),
    "padding": Variation(Schedule(4, pads=True), rows=16),
    "poison": Variation(Schedule(6, poisons=True, waits=True, preempts=True)),
    "all of it": Variation(Schedule(5, True, True, True, True, True), 12, (5, 11, 8, 2, 10, 1, 4, 0, 9, 3, 7, 6)),
}
# In the interpreter these do for given logits.
FEW = ("neighbours", "preemption", "all of it")
CASES = [
    pytest.param(name, given, variation, marks=[pytest.mark.interpret] if name == "gpu" else [])
    for name in ("cpu", "gpu")
    for given in ("witness", "given logits")
    for variation in VARIATIONS
    if name == "cpu" or given == "witness" or variation in FEW
]


@pytest.mark.parametrize(("name", "given", "variation"), CASES)
def test_nothing_about_the_batch_changes_a_request(name: str, given: str, variation: str) -> None:
    if name == "gpu":
        pytest.importorskip("gpu_backend.triton_support")
    given_logits = given == "given logits"
    for requests in sets(name, given_logits):
        same(VARIATIONS[variation].play(name, requests, given_logits), expected(name, requests, given_logits), requests)


NAMES = (
    "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "allowed_token_ids", "min_tokens",
    "bad_words_token_ids", "top_k", "top_p", "min_p", "logprobs", "logprob_token_ids", "prompt_logprobs", "extra_args",
    "trace_decode_token_ids", "thinking_token_budget", "structured_outputs", "temperature",
)  # fmt: skip
# Refused, or never drawn, together.
APART = {
    ("logprobs", "logprob_token_ids"), ("bad_words_token_ids", "trace_decode_token_ids"),
    ("prompt_logprobs", "trace_decode_token_ids"), ("trace_decode_token_ids", "thinking_token_budget"),
    ("trace_decode_token_ids", "structured_outputs"),
}  # fmt: skip


def test_the_requests_mix_every_parameter() -> None:
    """What the variations rest on: every two parameters meet in a request, every fault occurs, tokens are many."""
    requests = [r for given in (False, True) for rs in sets("cpu", given) for r in rs]
    neutral = SamplingParams()
    used = {n: {r.req_id for r in requests if getattr(r.params, n) != getattr(neutral, n)} for n in NAMES}
    assert {(a, b) for a, b in itertools.combinations(NAMES, 2) if not used[a] & used[b]} == APART
    seen = {
        given: [s for rs in sets("cpu", given) for s in expected("cpu", rs, given).values()] for given in (False, True)
    }
    assert {output[1] for s in seen[True] for output in s.outputs} == {0, 1, 2}
    assert len({output[0] for s in seen[False] for output in s.outputs}) > V // 2
    assert sum(s.prompt is not None for s in seen[False] + seen[True]) >= 10


def test_who_looks_at_the_processed_logits_changes_nothing(name: str) -> None:
    """Where a neighbour asks for log probabilities of processed logits they must be there, and the draw may go another
    way; likewise where a step is recorded. The other noise, too."""
    requests = draw_requests(15, *((8, 8) if name == "cpu" else (3, 3)))
    config = {"logprobs_mode": "processed_logprobs", "noise": "philox"}
    one_by_one = alone(name, requests, False, **config)
    assert any(r.params.logprobs is None and r.params.logprob_token_ids is None for r in requests)
    for recorded in (frozenset(), frozenset({"logits"})):
        together = Run(make_runner(name, len(requests), record=recorded, **config)).play(requests)
        same(together, one_by_one, requests)


# -- rows are used again ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_logits", [False, True], ids=["witness", "given logits"])
def test_a_row_remembers_nothing(name: str, given_logits: bool) -> None:
    """Occupied by a request with random parameters, freed, taken by another one: as in a fresh runner."""
    runner = make_runner(name, 2)
    rounds, num_outputs = (20, 3) if name == "cpu" else (2, 2)
    former = draw_requests(30 + given_logits, 2 * rounds, num_outputs)
    later = draw_requests(40 + given_logits, 2 * rounds, num_outputs)
    for i in range(0, 2 * rounds, 2):
        Run(runner, Schedule(i, preempts=i % 4 == 2), given_logits).play(former[i : i + 2])
        got = Run(runner, given_logits=given_logits).play(later[i : i + 2])
        same(got, alone(name, later[i : i + 2], given_logits), later[i : i + 2])


# -- drafts ---------------------------------------------------------------------------------------------------------

# Refused beside drafts.
WITHOUT = {"logprobs": None, "logprob_token_ids": None, "prompt_logprobs": None, "trace_decode_token_ids": None}


def test_a_row_behind_drafts_is_the_row_behind_tokens(name: str) -> None:
    """What a request draws behind d drafts is what it draws when these are its tokens, one step after the other."""
    num_reqs, num_outputs, rounds = (8, 12, 4) if name == "cpu" else (3, 6, 1)
    behind_drafts = 0
    for seed in range(50, 50 + rounds):
        requests = [replace(r, params=replace(r.params, **WITHOUT)) for r in draw_requests(seed, num_reqs, num_outputs)]
        plain = alone(name, requests, True)
        runner = make_runner(name, num_reqs, num_speculative_tokens=3)
        run = DraftedRun(runner, Schedule(seed, preempts=True, waits=True), True)
        run.play(requests)
        for r in requests:
            outputs = plain[r.req_id].outputs
            for index, own, taken, fault in run.drawn[r.req_id]:
                assert own == [o[0] for o in outputs[index : index + len(own)]], f"outputs from {index} on of {r}"
                assert fault == next((o[1] for o in outputs[index : index + taken] if o[1]), 0), f"fault of {r}"
                behind_drafts += len(own) - 1
    assert behind_drafts > rounds * num_reqs


# -- real models ------------------------------------------------------------------------------------------------------


def test_on_llama_tiny_up_to_near_ties(name: str) -> None:
    """Neither BLAS nor a GPU gives the same bits at every batch size: the logits may be off by the rounding of float32,
    and a token may be another one if these errors can turn its scores round. Lockstep's rule, held against oneself."""
    model = str(Path(conformance.__file__).parent / "data" / "checkpoints" / "llama-tiny")
    config = {"model": model, "limit": 48, "record": frozenset({"logits"})}
    requests, tokens, near_ties = draw_requests(60, *((8, 8) if name == "cpu" else (2, 2)), 512), 0, 0
    single, one_by_one = make_runner(name, 1, **config), {}
    for r in requests:
        one_by_one |= Run(single).play([r])
    for schedule in (Schedule(), Schedule(7, True, True, True, True))[0 if name == "cpu" else 1 :]:
        together = Run(make_runner(name, 12, **config), schedule).play(requests)
        for r in requests:
            here, there = one_by_one[r.req_id], together[r.req_id]
            largest = max(r.params.repetition_penalty, 1 / r.params.repetition_penalty)
            for a, b, (x, score), (y, _) in zip(here.outputs, there.outputs, here.rows, there.rows, strict=True):
                error = np.abs(x - y).max()
                assert error <= 1e-4 * np.abs(x).max()
                tokens += 1
                if a[:2] != b[:2]:  # from here on it is another text
                    lead = score[a[0]] - score[b[0]]
                    assert lead <= 2 * error * largest / (r.params.temperature or 1.0), f"no near tie: {a}, {b} of {r}"
                    near_ties += 1
                    break
                assert a[2:3] == b[2:3], f"scored ids of {r}"
    assert near_ties <= 1, f"{near_ties} near ties in {tokens} tokens"


# -- many rows, on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("given_logits", [False, True], ids=["witness", "given logits"])
def test_any_number_of_rows_on_a_gpu(given_logits: bool) -> None:
    """The first n of 1,024 requests, for n = 1, 8 and 64, as all of them at once."""
    pytest.importorskip("gpu_backend.triton_support")
    vocab_size, most = 8209, 1024
    requests = draw_requests(70 + given_logits, most, 3, vocab_size)
    config = {"model": WitnessConfig(vocab_size=vocab_size, groups=(WitnessGroup(16),))}
    together = Run(make_runner("gpu", most, **config), given_logits=given_logits).play(requests)
    for n in (1, 8, 64):
        runner = make_runner("gpu", most, **config)
        first = [requests[i] for i in np.linspace(0, most - 1, n).astype(int)]
        same(Run(runner, given_logits=given_logits).play(first), together, first)
    cut = Run(make_runner("gpu", most, **config), Schedule(8, chunks=True, preempts=True, pads=True), given_logits)
    same(cut.play(requests), together, requests)
