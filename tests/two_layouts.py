"""One story told to two runners: a few requests come, wait, are preempted, come back and go.

`Story` keeps the books and writes each step's plan in both shapes: a preempted request comes back as new for fixed
rows, as cached and resumed for packed ones. Tokens, log probabilities and KV must be the same by request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from step_driver import GREEDY, full, make_plan, new

from cpu_reference.dense.runner import DenseCpuModelRunner
from cpu_reference.runner import CpuModelRunner
from runner_api import (
    BatchDescriptor,
    ModelRunnerOutput,
    ReasoningConfig,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    WitnessConfig,
    group_kv_cache_specs,
    load_factory,
)

RUNNERS = {"slots": CpuModelRunner, "dense": DenseCpuModelRunner}


def make_layout(layout: str, model: Any, num_blocks: int = 64, *, backend: str = "cpu", **config: Any) -> Any:
    """A runner of this layout, ready for its first plan."""
    factory = RUNNERS[layout] if backend == "cpu" else load_factory(backend)
    runner = factory(RunnerConfig(layout=layout, **config))
    runner.load_model(model)
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), num_blocks))
    return runner


def resuming(plan: SchedulerOutput, tokens: Mapping[str, Sequence[int]]) -> SchedulerOutput:
    """The plan with these of its cached requests resumed, from these tokens."""
    cached = replace(
        plan.scheduled_cached_reqs, resumed_req_ids=frozenset(tokens),
        all_token_ids={req_id: list(known) for req_id, known in tokens.items()},
    )  # fmt: skip
    return replace(plan, scheduled_cached_reqs=cached)


@dataclass
class Told:
    """What the engine knows of a request."""

    tokens: list[int]
    prompt_len: int
    rest: dict[str, Any]  # parameters, seed, …
    computed: int = 0
    blocks: tuple[list[int], ...] = ()
    fresh: bool = True  # no plan has named it yet
    preempted: bool = False


@dataclass
class Story:
    """Plans for any of the runners, told step by step. block_sizes: of the KV cache groups."""

    block_sizes: Sequence[int]
    num_blocks: int = 64
    live: dict[str, Told] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.free = [list(range(self.num_blocks - 1, 0, -1)) for _ in self.block_sizes]

    def add(self, req_id: str, tokens: Sequence[int], **rest: Any) -> None:
        self.live[req_id] = Told(list(tokens), len(tokens), rest, blocks=tuple([] for _ in self.block_sizes))

    def finish(self, req_id: str) -> None:
        self._give_back(self.live.pop(req_id))
        self.gone.add(req_id)

    def preempt(self, req_id: str, *, said: bool = True) -> None:
        """said: the next plan lists it. Fixed rows must be told in any case."""
        told = self.live[req_id]
        self._give_back(told)
        told.computed, told.preempted = 0, True
        self.preempted.add((req_id, said))

    def _give_back(self, told: Told) -> None:
        for free, ids in zip(self.free, told.blocks, strict=True):
            free.extend(reversed(ids))
        told.blocks = tuple([] for _ in self.block_sizes)

    def missing(self, req_id: str) -> int:
        """How many known tokens are not computed yet."""
        return len(self.live[req_id].tokens) - self.live[req_id].computed

    def plans(self, counts: Mapping[str, int]) -> dict[str, SchedulerOutput]:
        """The next step's plan, by layout."""
        fresh, back, cached, resumed_blocks = [], [], {}, {}
        for req_id, n in counts.items():
            told = self.live[req_id]
            more = []
            for size, free, held in zip(self.block_sizes, self.free, told.blocks, strict=True):
                missing = -(-(told.computed + n) // size) - len(held)
                more.append([free.pop() for _ in range(missing)])
                held.extend(more[-1])
            if told.fresh or told.preempted:
                prompt = told.tokens[: told.prompt_len]
                added = new(req_id, told.tokens, tuple(map(list, told.blocks)), prompt=prompt, **told.rest)
                (fresh if told.fresh else back).append(added)
                if not told.fresh:
                    resumed_blocks[req_id] = (0, tuple(map(list, told.blocks)))
            else:
                cached[req_id] = (told.computed, tuple(more) if any(more) else None)
            told.fresh = told.preempted = False
        gone, resumed = frozenset(self.gone), {added.req_id: added.prefill_token_ids for added in back}
        slots = make_plan(
            counts, fresh + back, cached, finished_req_ids=gone,
            preempted_req_ids=frozenset(req_id for req_id, _ in self.preempted),
        )  # fmt: skip
        dense = make_plan(
            counts, fresh, cached | resumed_blocks, finished_req_ids=gone,
            preempted_req_ids=frozenset(req_id for req_id, said in self.preempted if said),
        )  # fmt: skip
        self.gone, self.preempted = set(), set()
        return {"slots": slots, "dense": resuming(dense, resumed)}

    def drawn(self, counts: Mapping[str, int], tokens: Mapping[str, Sequence[int]]) -> None:
        """The step ran and gave these tokens."""
        for req_id, n in counts.items():
            self.live[req_id].computed += n
            self.live[req_id].tokens.extend(tokens[req_id])


def by_request(output: ModelRunnerOutput) -> dict[str, Any]:
    """All that an output says of each request, with numbers as their bits."""
    told = {}
    for i, req_id in enumerate(output.req_ids):
        own = [output.sampled_token_ids[i], output.errors.get(req_id)]
        if output.logprobs is not None:
            own += [np.asarray(getattr(output.logprobs, n)[i]).tolist() for n in ("token_ids", "logprobs", "ranks")]
        prompt = output.prompt_logprobs.get(req_id)
        if prompt is not None:
            own += [np.asarray(getattr(prompt, n)).tolist() for n in ("token_ids", "logprobs", "ranks")]
        told[req_id] = repr(own)
    return told


class Both:
    """A story told to a runner of each layout; every step must give the same by request."""

    def __init__(self, model: WitnessConfig, num_blocks: int = 64, threshold: int | None = None, **config: Any) -> None:
        config.setdefault("record", frozenset({"kv", "logits"}))
        self.runners = {
            "slots": make_layout("slots", model, num_blocks, **config),
            "dense": make_layout("dense", model, num_blocks, reorder_batch_threshold=threshold, **config),
        }
        self.story = Story([g.block_size for g in model.groups], num_blocks)
        self.outputs: list[dict[str, Any]] = []

    def step(
        self, counts: Mapping[str, int], descriptor: BatchDescriptor | None = None, poison: Collection[str] = ()
    ) -> None:
        """poison: the layouts whose unused memory is spoilt before the step."""
        told = {}
        for layout, plan in self.story.plans(counts).items():
            runner = self.runners[layout]
            if layout in poison:
                runner.poison_unused()
            if runner.execute_model(plan, descriptor=descriptor) is None:
                output = runner.sample_tokens().get_output()
                told[layout] = by_request(output)
                tokens = output.tokens()
        if not counts:
            return
        assert told["dense"] == told["slots"]
        slots, dense = (self.runners[layout].last_step() for layout in ("slots", "dense"))
        assert slots.kv.keys() == dense.kv.keys()
        for req_id, kv in slots.kv.items():
            assert np.array_equal(kv, dense.kv[req_id]), req_id
        self.outputs.append(tokens)
        self.story.drawn(counts, tokens)


# -- requests of all kinds ----------------------------------------------------------------------------------------

# One of each: every step of sampling is in use, and each request differs from the others in it.
PALETTE = {
    "greedy": GREEDY,
    "plain": SamplingParams(temperature=1.0),
    "hot": SamplingParams(temperature=1.7, top_k=7, top_p=0.8),
    "sharp": SamplingParams(temperature=0.6, min_p=0.05, logprobs=2),
    "penalised": SamplingParams(
        temperature=0.9, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3, prompt_logprobs=2
    ),
    "biased": SamplingParams(temperature=1.0, logit_bias={3: 4.0, 11: -100.0, 20: 3.0}, logprobs=0),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=[1, 2, 3, 5, 8, 13, 21, 34], logprob_token_ids=[1, 2]),
    "long": SamplingParams(temperature=1.0, min_tokens=4, stop_token_ids=[1, 2, 3, 4, 5, 6, 7, 8, 9]),
    "polite": SamplingParams(
        temperature=0.8, bad_words_token_ids=[[5], [1, 2], [3, 4, 6]], allowed_token_ids=list(range(9))
    ),
    "thinking": SamplingParams(temperature=1.0, thinking_token_budget=2),
    "told": SamplingParams(temperature=1.0, trace_decode_token_ids=[4, 7, 7, 30, 2], logprobs=1),
    "counting": SamplingParams(temperature=1.0, extra_args={"step": 3}),
}


class Counting:
    """Forces each request's tokens to go up in its own step, from its last one on; state by row, of its own."""

    arguments = ("step",)

    def __init__(self, max_num_reqs, vocab_size, arrays):
        self.vocab_size, self.told = vocab_size, []
        self.by_row = [None] * max_num_reqs  # [step, last token]

    def validate(self, params):
        pass

    def add_request(self, row, params, prompt_token_ids, output_token_ids):
        assert self.by_row[row] is None, "the row is somebody else's"
        self.told.append(("add", row, len(output_token_ids)))
        step = (params.extra_args or {}).get("step")
        self.by_row[row] = [step, [*prompt_token_ids, *output_token_ids][-1]]
        return step is not None

    def remove_request(self, row):
        self.told.append(("remove", row))
        self.by_row[row] = None

    def move_rows(self, moves):
        self.told.append(("move", *moves))
        for move in moves:
            there = self.by_row[move.target]
            assert (there is not None) == move.swap
            self.by_row[move.target], self.by_row[move.source] = self.by_row[move.source], there

    def observe(self, rows, token_ids, num_sampled):
        for row, token, n in zip(rows.tolist(), token_ids[:, 0].tolist(), num_sampled.tolist(), strict=True):
            if n:
                self.by_row[row][1] = token

    def apply(self, logits, context):
        for i, row in enumerate(context.rows.tolist()):
            step, last = self.by_row[row]
            logits[i, (last + step) % self.vocab_size] += 1000.0


EVERYTHING = {"reasoning": ReasoningConfig((7,), (8, 9)), "logits_processors": (Counting,)}


def tell_random_story(pair: Any, seed: int, steps: int) -> Counter[str]:
    """Requests with all kinds of parameters come, are computed in chunks, sit out, are preempted, come back and go.

    pair: has a `story` and `step`, as `Both`. The answer says how often what happened.
    """
    rng, story, seen, born = np.random.default_rng(seed), pair.story, Counter(), 0
    for _ in range(steps):
        for name in [n for n, told in story.live.items() if not told.fresh and not told.preempted]:
            luck = rng.random()
            if len(story.live[name].tokens) >= 36 or luck < 0.06:
                story.finish(name)
                seen["finished"] += 1
            elif luck < 0.11:
                story.preempt(name, said=bool(rng.integers(2)))
                seen["preempted"] += 1
        while len(story.live) < 5 and rng.random() < 0.6:
            kind = list(PALETTE)[rng.integers(len(PALETTE))]
            prompt = rng.integers(0, 10, rng.integers(1, 12)).tolist()
            story.add(f"{kind} {born}", prompt, sampling_params=PALETTE[kind], seed=int(rng.integers(2**31)))
            born += 1
        counts, budget = {}, 30
        for name in rng.permutation(list(story.live)).tolist():
            n = int(min(rng.integers(1, 9), story.missing(name), budget))
            if n and rng.random() < 0.75:
                counts[name], budget = n, budget - n
            elif not story.live[name].fresh:
                seen["left out"] += 1
        poison = [layout for layout in ("slots", "dense") if rng.random() < 0.3]
        pair.step(counts, full(40, 5) if rng.random() < 0.2 and counts else None, poison=poison)
    return seen
