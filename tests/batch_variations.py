"""Requests that mix all sampling parameters, and runs of them that differ in all that must not matter.

For tests that hold a request in one batch against the same request in another. Each request's own inputs (parameters,
masks, given logits, imposed tokens) are pure functions of its name; what a `Schedule` changes is around it.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from step_driver import Driver, full

from runner_api import (
    ForcedStep,
    GrammarOutput,
    LogprobsLists,
    ReasoningConfig,
    RunnerConfig,
    SamplingParams,
    StructuredOutputsParams,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
    load_runner,
)

ROOT = Path(__file__).parents[1]
V = 37  # a word and a bit of the grammar's mask
MODEL = WitnessConfig(vocab_size=V, groups=(WitnessGroup(4), WitnessGroup(2, 6)))
REASONING = ReasoningConfig((5,), (6, 7), (7,))
LIMIT = 40  # max_model_len


def example(name: str, attribute: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, attribute)


class Witness:
    """A custom processor that favours a token that every output so far decides on, in its order."""

    arguments = ("witness",)

    def __init__(self, max_num_reqs: int, vocab_size: int, arrays: Any) -> None:
        self.arrays, self.vocab_size = arrays, vocab_size
        self.state = arrays.zeros(max_num_reqs, "int64")

    def _after(self, state: Any, token: Any) -> Any:
        return (state * 31 + token + 1) % 65521

    def add_request(self, row: int, params: SamplingParams, prompt: list[int], outputs: list[int]) -> bool:
        state = 0
        for token in outputs:
            state = self._after(state, token)
        self.state[row] = state
        return "witness" in (params.extra_args or {})

    def observe(self, rows: Any, token_ids: Any, num_sampled: Any) -> None:
        state = self.state[rows]
        for k in range(token_ids.shape[1]):
            state = self.arrays.where(num_sampled > k, self._after(state, token_ids[:, k]), state)
        self.state[rows] = state

    def apply(self, logits: Any, context: Any) -> None:
        where, i, state = self.arrays.where, self.arrays.arange(len(logits)), self.state[context.rows]
        for k in range(1, context.num_drafts + 1):
            follows = context.local_pos >= k
            draft = context.input_ids[where(follows, i - context.local_pos + k, 0)]
            state = where(follows, self._after(state, draft), state)
        logits[i, state % self.vocab_size] = logits[i, state % self.vocab_size] + 6.0

    def ignore(self, *args: Any) -> None:
        pass

    validate = remove_request = move_rows = ignore


PROCESSORS = (Witness, example("ban_repeats", "BanRepeats"), example("boost_topic", "BoostTopic"))


# -- requests ---------------------------------------------------------------------------------------------------------


def stream(*names: Any) -> np.random.Generator:
    """Random numbers that depend on these names and on nothing else."""
    return np.random.default_rng(list(hashlib.sha256(",".join(map(str, names)).encode()).digest()))


@dataclass(frozen=True)
class Request:
    """One request, and all that a step brings along for it: a pure function of it and of its outputs so far."""

    req_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    num_outputs: int
    vocab_size: int = V

    @property
    def new(self) -> dict[str, Any]:
        return {"sampling_params": self.params, "seed": self.seed, "eos_token_ids": (0, 1)}

    def allowed(self, index: int) -> np.ndarray:
        """What its grammar allows as output `index`: bool[V]."""
        return stream("grammar", self.req_id, index).random(self.vocab_size) < 0.7

    def logits(self, index: int) -> np.ndarray:
        """Given logits, float32[V]: mostly random, with ties, excluded tokens, now and then nothing or a NaN."""
        random = stream("logits", self.req_id, index)
        x = (3 * random.standard_normal(self.vocab_size)).astype(np.float32)
        kind = random.integers(8)
        if kind in (0, 1):
            x = np.round(x)
        if kind in (1, 2):
            x[random.random(self.vocab_size) < 0.5] = -np.inf
        if kind == 3:
            x[:] = 0.5
        if kind == 4 and index % 3 == 2:
            x[random.integers(self.vocab_size)] = random.choice([np.nan, np.inf])
        if kind == 5 and index % 3 == 2:
            x[:] = -np.inf
        if index and chance(random, 0.4):
            x[self.imposed(index - 1)] += 9  # would be said again
        return x

    def imposed(self, index: int) -> int:
        random = stream("token", self.req_id, index)
        return int(random.integers(self.vocab_size if chance(random, 0.3) else 6))


def chance(random: np.random.Generator, p: float) -> bool:
    return bool(random.random() < p)


def draw_params(random: np.random.Generator, vocab_size: int = V) -> SamplingParams:
    """Parameters of one request: each is used with some probability, so that any two meet."""

    def ids(low: int, high: int) -> list[int]:
        return random.integers(0, min(vocab_size, V), random.integers(low, high)).tolist()

    p: dict[str, Any] = {"temperature": float(random.choice([0.0, 0.3, 1.0, 1.7], p=[0.2, 0.2, 0.3, 0.3]))}
    if chance(random, 0.1):
        return SamplingParams(**p)
    p["repetition_penalty"] = float(random.choice([1.0, 0.5, 1.4]))
    p["frequency_penalty"] = float(random.choice([0.0, -0.5, 1.1]))
    p["presence_penalty"] = float(random.choice([0.0, -0.7, 0.9]))
    p["min_tokens"], p["stop_token_ids"] = int(random.integers(0, 5)), ids(0, 6)
    if p["temperature"]:
        p["top_k"] = int(random.choice([0, 1, 7, vocab_size]))
        p["top_p"] = float(random.choice([1.0, 0.9, 0.4]))
        p["min_p"] = float(random.choice([0.0, 0.05, 0.5]))
    if chance(random, 0.4):
        p["logit_bias"] = {token: float(random.normal()) * 3 for token in ids(1, 9)}
    if chance(random, 0.3):
        p["allowed_token_ids"] = random.permutation(min(vocab_size, V))[: random.integers(8, V)].tolist()
    if chance(random, 0.5):
        p["logprobs"] = int(random.choice([0, 2, 5]))
    elif chance(random, 0.4):
        p["logprob_token_ids"] = ids(1, 5)
    if chance(random, 0.3):
        p["prompt_logprobs"] = int(random.choice([0, 3]))
    if chance(random, 0.5):
        p["extra_args"] = {"max_repeats": int(random.integers(1, 3))} if chance(random, 0.5) else {}
        if chance(random, 0.7):
            p["extra_args"]["witness"] = True
        if chance(random, 0.4):
            p["extra_args"] |= {"topic_token_ids": ids(1, 9), "topic_boost": float(random.normal())}
    if chance(random, 0.15):
        p["trace_decode_token_ids"] = ids(1, 6)
        p.pop("prompt_logprobs", None)
        return SamplingParams(**p)
    if chance(random, 0.4):
        words = [ids(1, 4) for _ in range(random.integers(1, 20))]
        p["bad_words_token_ids"] = words + [[token % 6 for token in word] for word in words]
    if chance(random, 0.3):
        p["thinking_token_budget"] = int(random.integers(0, 5))
    if chance(random, 0.3):
        p["structured_outputs"] = StructuredOutputsParams(regex=".*")
    return SamplingParams(**p)


def draw_requests(seed: int, count: int, num_outputs: int, vocab_size: int = V) -> list[Request]:
    requests = []
    for i in range(count):
        random = stream("request", seed, i)
        prompt = random.integers(0, min(V, vocab_size), random.integers(1, 14)).tolist()
        if chance(random, 0.3):
            prompt[random.integers(len(prompt))] = REASONING.start_token_ids[0]
        params = draw_params(random, vocab_size)
        requests.append(
            Request(f"{seed}.{i}", tuple(prompt), params, int(random.integers(-(2**63), 2**63 - 1)), num_outputs,
                    vocab_size)
        )  # fmt: skip
    return requests


# -- runs -------------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What came out for one request: per output (token, fault, scored ids, their log probabilities, rank)."""

    outputs: list[tuple[Any, ...]] = field(default_factory=list)
    prompt: Any = None
    rows: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # logits and scores, if recorded


@dataclass(frozen=True)
class Schedule:
    """How the steps of a run are cut. Numbers are drawn from `seed`."""

    seed: int = 0
    chunks: bool = False  # prompts, and what is computed again after a preemption, in pieces
    preempts: bool = False  # requests lose their row now and then, and come back
    waits: bool = False  # requests join one after another, and miss steps
    pads: bool = False  # more tokens and requests than there are
    poisons: bool = False  # before each step, whatever belongs to no request is overwritten with nonsense


PLAIN = Schedule()


def make_runner(name: str, num_rows: int, model: Any = MODEL, limit: int = LIMIT, **config: Any) -> Any:
    config = {
        "max_num_reqs": num_rows, "max_model_len": limit, "max_num_batched_tokens": num_rows * limit,
        "reasoning": REASONING, "logits_processors": PROCESSORS, **config,
    }  # fmt: skip
    runner = load_runner(name, RunnerConfig(**config))
    runner.load_model(model)
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), num_rows * (limit // 2 + 1) + 1))
    return runner


def scores_of(lists: LogprobsLists | None, i: int, params: SamplingParams) -> tuple[Any, ...]:
    """Row i, as wide as the request asked for: what others asked for widens the arrays."""
    ids = params.logprob_token_ids
    asked = len(ids) if ids is not None else params.logprobs
    if asked is None:
        return ()
    assert lists is not None
    return (lists.token_ids[i, : 1 + asked].tolist(), bits(lists.logprobs[i, : 1 + asked]), int(lists.ranks[i]))


def bits(x: np.ndarray) -> list[int]:
    """float32 by bit pattern; any NaN is one NaN."""
    x = np.asarray(x, np.float32)
    return np.where(np.isnan(x), np.float32("nan"), x).view(np.uint32).tolist()


def pack(allowed: np.ndarray) -> np.ndarray:
    words = np.zeros(-(-len(allowed) // 32) * 32, bool)
    words[: len(allowed)] = allowed
    return np.packbits(words, bitorder="little").view(np.int32)


@dataclass
class Run:
    """Requests on a runner until each has its outputs."""

    runner: Any
    schedule: Schedule = PLAIN
    given_logits: bool = False
    seen: dict[str, Seen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = stream("schedule", self.schedule.seed)
        self.driver = Driver(self.runner)
        self.requests: dict[str, Request] = {}

    def play(self, requests: Sequence[Request]) -> dict[str, Seen]:
        waiting, running = list(requests), []
        for r in requests:
            self.requests[r.req_id], self.seen[r.req_id] = r, Seen()
        while waiting or running:
            while waiting and (not self.schedule.waits or not running or chance(self.random, 0.5)):
                r = waiting.pop(0)
                if r.req_id in self.driver.tokens:
                    self.driver.readd(r.req_id, **r.new)
                else:
                    self.driver.add(r.req_id, r.prompt, **r.new)
                running.append(r)
            # New requests can not miss a step: they were announced.
            counts = {
                r.req_id: self._piece(r) for r in running if r.req_id in self.driver.waiting or self._takes_part()
            }
            if not counts:
                continue
            self._step(counts)
            for r in list(running):
                done = len(self.seen[r.req_id].outputs) >= r.num_outputs
                if done or (self.schedule.preempts and chance(self.random, 0.35)):
                    self.driver.remove(r.req_id, preempt=not done)
                    running.remove(r)
                    if not done:
                        waiting.append(r)
        self.runner.execute_model(self.driver.plan({}))  # the last ones leave
        return self.seen

    def _takes_part(self) -> bool:
        return not self.schedule.waits or chance(self.random, 0.7)

    def _piece(self, r: Request) -> int:
        missing = len(self.driver.tokens[r.req_id]) - self.driver.computed[r.req_id]
        return int(self.random.integers(1, missing + 1)) if self.schedule.chunks else missing

    def _step(self, counts: Mapping[str, int]) -> None:
        driver, runner = self.driver, self.runner
        samples = {i for i, n in counts.items() if driver.computed[i] + n == len(driver.tokens[i])}
        total, descriptor = sum(counts.values()), None
        if self.schedule.pads:
            rows, tokens = runner.config.max_num_reqs, runner.config.max_num_batched_tokens
            num_reqs = int(self.random.integers(len(counts), min(rows, len(counts) + 6) + 1))
            descriptor = full(int(self.random.integers(total, min(tokens, total + 20) + 1)), num_reqs)
        if self.schedule.poisons:
            runner.poison_unused()
        runner.execute_model(driver.plan(counts), descriptor=descriptor)
        grammar = self._grammar([i for i in counts if i in samples])
        forced = self._forced(samples) if self.given_logits else None
        output = runner.sample_tokens(grammar, forced=forced).get_output()
        drawn, record = output.tokens(), runner.last_step() if forced or runner.config.record else None
        for i, n in counts.items():
            driver.computed[i] += n
        for row, i in enumerate(output.req_ids):
            r, seen = self.requests[i], self.seen[i]
            if i in output.prompt_logprobs:
                assert seen.prompt is None, "delivered twice"
                lists = output.prompt_logprobs[i]
                seen.prompt = (lists.token_ids.tolist(), bits(lists.logprobs), lists.ranks.tolist())
            if i not in samples:
                assert drawn[i] == ()
                assert i not in output.errors
                assert record is None or not record.faults[row]
                continue
            index = len(seen.outputs)
            if forced is None:
                fault = output.errors.get(i, 0)
                assert len(drawn[i]) == (not fault)
                token = drawn[i][0] if drawn[i] else 0  # what the state takes
                own = token
            else:
                fault, own, token = int(record.faults[row]), int(record.token_ids[row, 0]), r.imposed(index)
            seen.outputs.append((own, int(fault), *scores_of(output.logprobs, row, r.params)))
            if runner.config.record:
                seen.rows.append((record.logits[row], record.intermediates["scores"][row]))
            driver.tokens[i].append(token)

    def _grammar(self, samples: list[str]) -> GrammarOutput | None:
        """Masks of the requests that have a grammar, in an order that has nothing to do with the batch's."""
        asking = [i for i in samples if self.requests[i].params.structured_outputs is not None]
        if not asking:
            return None
        asking = [asking[j] for j in self.random.permutation(len(asking))]
        masks = [self.requests[i].allowed(len(self.seen[i].outputs)) for i in asking]
        return GrammarOutput(asking, np.stack([pack(mask) for mask in masks]))

    def _forced(self, samples: set[str]) -> ForcedStep:
        """Given logits, and given tokens; rows that sample nothing get a NaN, which is nobody's fault."""
        order = self.runner.last_step().req_ids
        logits = np.full((len(order), self.requests[order[0]].vocab_size), np.nan, np.float32)
        tokens = np.zeros((len(order), 1), np.int64)
        for row, i in enumerate(order):
            if i in samples:
                index = len(self.seen[i].outputs)
                logits[row], tokens[row] = self.requests[i].logits(index), self.requests[i].imposed(index)
        return ForcedStep(tokens, np.array([int(i in samples) for i in order], np.int32), None, logits)


def alone(name: str, requests: Sequence[Request], given_logits: bool, **config: Any) -> dict[str, Seen]:
    """Each request in a runner of one row that has served nobody else."""
    seen: dict[str, Seen] = {}
    for r in requests:
        seen |= Run(make_runner(name, 1, **config), given_logits=given_logits).play([r])
    return seen


def same(got: Mapping[str, Seen], expected: Mapping[str, Seen], requests: Sequence[Request]) -> None:
    for r in requests:
        for index, (here, there) in enumerate(zip(got[r.req_id].outputs, expected[r.req_id].outputs, strict=True)):
            assert here == there, f"output {index} of {r}"
        assert got[r.req_id].prompt == expected[r.req_id].prompt, f"prompt of {r}"


# -- drafts -----------------------------------------------------------------------------------------------------------


@dataclass
class DraftedRun(Run):
    """Given logits, and given tokens as drafts: several rows of a request in one step, some of them taken back."""

    # request -> steps: (index of the first output, what was drawn in each row, how many rows count, fault)
    drawn: dict[str, list[tuple[int, list[int], int, int]]] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)

    def num_known(self, r: Request) -> int:
        return len(self.driver.tokens[r.req_id]) - len(r.prompt)

    def _piece(self, r: Request) -> int:
        missing, count = super()._piece(r), 0
        if missing == 1 and r.req_id not in self.driver.waiting:
            most = min(self.runner.config.num_speculative_tokens, r.num_outputs - self.num_known(r) - 1)
            count = int(self.random.integers(0, most + 1)) if self.num_known(r) else 0
        self.drafts[r.req_id] = [r.imposed(self.num_known(r) + j) for j in range(count)]
        return missing + count

    def _step(self, counts: Mapping[str, int]) -> None:
        driver, runner, k = self.driver, self.runner, self.runner.config.num_speculative_tokens
        # 1 the plan, with drafts that were held since the step before
        plan = driver.plan(counts)
        plan.scheduled_spec_decode_tokens = {i: self.drafts[i] for i in counts if self.drafts[i]}
        runner.execute_model(plan)
        # 2 logits of each row; how many of its drafts each request takes, and which ones it holds next
        order, logits = runner.last_step().req_ids, []
        tokens, taken = np.zeros((len(order), 1 + k), np.int64), np.zeros(len(order), np.int32)
        held = np.zeros((len(order), k), np.int64)
        for row, i in enumerate(order):
            r, num_rows = self.requests[i], 1 + len(self.drafts[i])
            index = self.num_known(r)
            samples = driver.computed[i] + counts[i] == len(driver.tokens[i]) + len(self.drafts[i])
            logits += [r.logits(index + j) if samples else np.full(V, np.nan, np.float32) for j in range(num_rows)]
            taken[row] = self.random.integers(1, num_rows + 1) if samples else 0
            tokens[row] = [r.imposed(index + j) for j in range(1 + k)]
            held[row] = [r.imposed(index + taken[row] + j) for j in range(k)]
        masks = self._masks([i for i, n in zip(order, taken, strict=True) if n])
        runner.sample_tokens(masks, forced=ForcedStep(tokens, taken, held, np.stack(logits)))
        # 3 what was drawn in each row, and what was taken
        record = runner.last_step()
        for row, i in enumerate(order):
            num_rows, n = 1 + len(self.drafts[i]), int(taken[row])
            index = self.num_known(self.requests[i])
            driver.computed[i] += counts[i] - (num_rows - n if n else 0)
            if n:
                own, fault = record.token_ids[row, :num_rows].tolist(), int(record.faults[row])
                self.drawn.setdefault(i, []).append((index, own, n, fault))
                self.seen[i].outputs += [()] * n
                driver.tokens[i] += tokens[row, :n].tolist()

    def _masks(self, samples: list[str]) -> GrammarOutput | None:
        asking = [i for i in samples if self.requests[i].params.structured_outputs is not None]
        if not asking:
            return None
        asking, rows = [asking[j] for j in self.random.permutation(len(asking))], []
        for r in (self.requests[i] for i in asking):
            rows += [
                pack(r.allowed(self.num_known(r) + j)) for j in range(self.runner.config.num_speculative_tokens + 1)
            ]
        return GrammarOutput(asking, np.stack(rows))
