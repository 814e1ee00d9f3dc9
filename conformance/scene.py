"""A few requests of one runner, step by step: what a probe about sampling is written in.

A scene makes the plans, keeps the true history of every request, may impose logits and tokens, and reads off each step
what can be seen of it. On a runner with log probabilities that is a request's whole row: in the mode `processed_logits`
a request that asks for every token shows its logits after all steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conformance.context import Mismatch
from conformance.harness import build_runner
from conformance.noise import gumbel_noise
from conformance.planned_step import order_key
from conformance.sampling_truth import RowHistory, processed
from runner_api import (
    BatchDescriptor,
    CachedRequestData,
    Capability,
    ForcedStep,
    GrammarOutput,
    LogprobsLists,
    ModelRunnerOutput,
    NewRequestData,
    ReasoningConfig,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    StepRecord,
    WitnessConfig,
    WitnessGroup,
)
from runner_api.protocol import RunnerFactory

# No multiple of 32: the last word of every bitmask is not full.
VOCAB = 50
MODEL = WitnessConfig(VOCAB, (WitnessGroup(4),))
MAX_MODEL_LEN = 32
BLOCKS_EACH = MAX_MODEL_LEN // 4
# The forced end is longer than the natural one, as a transition phrase makes it, and begins like its own second token.
REASONING = ReasoningConfig((40, 41), (45, 45, 42, 43), (42, 43))
# Rounding of a float32 pipeline, relative to the value; and of a score with its noise.
TOLERANCE = 1e-5
NEAR = 2e-5


@dataclass(slots=True)
class Actor:
    """One request of a scene, and all that is true of it."""

    req_id: str
    prompt: Sequence[int]
    params: SamplingParams
    seed: int = 0
    eos_token_ids: Sequence[int] = ()
    outputs: list[int] = field(default_factory=list)
    computed: int = 0
    live: bool = False
    resumed_at: int = 0  # tokens known when it was added last
    prefix_of: str | None = None  # whose blocks hold the first `computed` tokens when it is added first

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.outputs]

    def history(self, drafts: Sequence[int] = (), allowed: np.ndarray | None = None) -> RowHistory:
        """Of the row that draws the next token, behind `drafts`."""
        tokens = [*self.tokens, *drafts]
        return RowHistory(tokens, len(self.prompt), self.params, self.eos_token_ids, REASONING, allowed)


@dataclass(frozen=True, slots=True)
class Sight:
    """What one step showed. Rows of `record` and of the log probabilities stand in `order`."""

    record: StepRecord
    output: ModelRunnerOutput
    order: tuple[str, ...]
    num_logits: Mapping[str, int]
    taken: Mapping[str, tuple[int, ...]]  # what entered the state

    def drawn(self, req_id: str) -> list[int]:
        """The runner's own draw after each logits row of the request."""
        return np.asarray(self.record.token_ids)[self.order.index(req_id), : self.num_logits[req_id]].tolist()

    def scores(self, req_id: str) -> np.ndarray | None:
        """The request's whole row by token id, float64[V], if it asked for every token; None if it did not."""
        lists = self.logprobs(req_id)
        if lists is None or lists.token_ids.shape[1] < 1 + VOCAB:
            return None
        row = np.full(VOCAB, np.nan)
        row[lists.token_ids[0, 1:]] = lists.logprobs[0, 1:]
        return row

    def logprobs(self, req_id: str) -> LogprobsLists | None:
        """The request's own row of the log probabilities, one row high."""
        lists = self.output.logprobs
        if lists is None:
            return None
        i = self.order.index(req_id)
        return LogprobsLists(lists.token_ids[i : i + 1], lists.logprobs[i : i + 1], lists.ranks[i : i + 1])


class Scene:
    """One runner on the small witness model. Rows are handed out in an order of their own unless told otherwise."""

    def __init__(
        self, runner: str | RunnerFactory, offered: frozenset[Capability], actors: Sequence[Actor], **changes: Any
    ) -> None:
        rows = len(actors) + 1
        shuffled = tuple(np.random.default_rng(rows).permutation(rows).tolist())
        config = RunnerConfig(
            max_num_reqs=rows, max_num_batched_tokens=8 * rows, max_model_len=MAX_MODEL_LEN, initial_free_rows=shuffled
        )
        if Capability.THINKING_BUDGET in offered:
            config = replace(config, reasoning=REASONING)
        config = replace(config, **changes)
        self.config = config
        self.runner = build_runner(runner, MODEL, config, 1 + config.max_num_reqs * BLOCKS_EACH)[0]
        self.actors = {a.req_id: a for a in actors}
        self._leaving: tuple[set[str], set[str]] = (set(), set())  # finished, preempted: told by the next plan
        self._free = list(range(config.max_num_reqs))  # groups of BLOCKS_EACH blocks
        self._held: dict[str, int] = {}

    # -- who is there -----------------------------------------------------------------------------------------

    def finish(self, req_id: str) -> None:
        self._leave(req_id, 0)

    def preempt(self, req_id: str) -> None:
        self._leave(req_id, 1)

    def _leave(self, req_id: str, how: int) -> None:
        actor = self.actors[req_id]
        actor.live, actor.computed = False, 0
        self._leaving[how].add(req_id)
        self._free.append(self._held.pop(req_id))

    # -- one step ---------------------------------------------------------------------------------------------

    def step(
        self,
        chunks: Mapping[str, int] | Sequence[str],
        *,
        logits: Mapping[str, np.ndarray] | None = None,
        imposed: Mapping[str, Sequence[int]] | None = None,
        drafts: Mapping[str, int] | None = None,
        next_drafts: Mapping[str, Sequence[int]] | None = None,
        grammar: GrammarOutput | None = None,
        descriptor: BatchDescriptor | None = None,
    ) -> Sight:
        """Run one step and follow it.

        chunks: how many known tokens of which requests, in the plan's order; names alone: all that is known. drafts:
        how many of the held drafts are verified besides. logits: float32[1 + drafts, V] by request. imposed: the tokens
        that enter the state, by request; needed with logits. next_drafts: what the rows hold from then on.
        """
        plan = self.plan(chunks, drafts)
        self.runner.execute_model(plan, descriptor=descriptor)
        order = self._order(plan, self.runner.last_step().req_ids)
        forced = self._forced(order, plan, logits, imposed, next_drafts) if imposed is not None else None
        output = self.runner.sample_tokens(grammar, forced=forced).get_output()
        record = self.runner.last_step()
        taken = _taken(record, order)
        for req_id, n in plan.num_scheduled_tokens.items():
            actor = self.actors[req_id]
            rejected = 1 + len(plan.scheduled_spec_decode_tokens.get(req_id, ())) - len(taken[req_id])
            actor.computed += n - (rejected if self._samples(actor, n) else 0)
            actor.outputs.extend(taken[req_id])
        num_logits = {r: 1 + len(plan.scheduled_spec_decode_tokens.get(r, ())) for r in order}
        return Sight(record, output, order, num_logits, taken)

    def _order(self, plan: SchedulerOutput, told: Sequence[str]) -> tuple[str, ...]:
        """The runner's own batch order, if it is one of the plan's requests; a wrong one is not what is judged here."""
        counts, drafts = plan.num_scheduled_tokens, plan.scheduled_spec_decode_tokens
        if sorted(told) == sorted(counts):
            return tuple(told)
        k = self.config.num_speculative_tokens
        return tuple(sorted(counts, key=lambda r: order_key(counts[r], len(drafts.get(r, ())), k)))

    def plan(
        self, chunks: Mapping[str, int] | Sequence[str], drafts: Mapping[str, int] | None = None
    ) -> SchedulerOutput:
        """The next plan, as `step` takes it. Who asks for one runs it."""
        drafts = drafts or {}
        cached, counts = CachedRequestData(), {}
        for req_id in chunks:
            actor = self.actors[req_id]
            left = len(actor.tokens) - actor.computed
            counts[req_id] = min(chunks[req_id], left) if isinstance(chunks, Mapping) else left
            counts[req_id] += drafts.get(req_id, 0)
            if actor.live:
                cached.req_ids.append(req_id)
                cached.num_computed_tokens.append(actor.computed)
                cached.new_block_ids.append(None)
                cached.num_output_tokens.append(len(actor.outputs))
        # New ones in the order of the cast, whatever the plan's: rows go by this order, batches by that one.
        new = [self._new(a) for a in self.actors.values() if a.req_id in counts and not a.live]
        finished, preempted = self._leaving
        self._leaving = (set(), set())
        return SchedulerOutput(
            new, cached, counts, sum(counts.values()), {r: [-1] * n for r, n in drafts.items() if n},
            frozenset(finished), frozenset(preempted),
        )  # fmt: skip

    def _new(self, actor: Actor) -> NewRequestData:
        place = self._held[actor.req_id] = self._free.pop(0)
        blocks = _blocks(place)
        if actor.computed and actor.prefix_of is not None:
            shared = actor.computed // 4
            blocks[:shared] = _blocks(self._held[actor.prefix_of])[:shared]
        actor.live, actor.resumed_at = True, len(actor.tokens)
        return NewRequestData(
            actor.req_id, list(actor.prompt), actor.tokens, actor.computed, (blocks,), actor.params, actor.seed,
            tuple(actor.eos_token_ids),
        )  # fmt: skip

    def _samples(self, actor: Actor, scheduled: int) -> bool:
        return actor.computed + scheduled >= actor.resumed_at

    def _forced(
        self, order: Sequence[str], plan: SchedulerOutput, logits: Mapping[str, np.ndarray] | None,
        imposed: Mapping[str, Sequence[int]], next_drafts: Mapping[str, Sequence[int]] | None,
    ) -> ForcedStep:  # fmt: skip
        k = self.config.num_speculative_tokens
        token_ids, num_sampled = np.zeros((len(order), 1 + k), np.int64), np.zeros(len(order), np.int32)
        for i, req_id in enumerate(order):
            if self._samples(self.actors[req_id], plan.num_scheduled_tokens[req_id]):
                tokens = imposed[req_id]
                token_ids[i, : len(tokens)] = tokens
                num_sampled[i] = len(tokens)
        held = None if next_drafts is None else np.array([next_drafts[r] for r in order], np.int64)
        rows = None if logits is None else np.concatenate([np.atleast_2d(logits[r]) for r in order]).astype(np.float32)
        return ForcedStep(token_ids, num_sampled, held, rows)


def _taken(record: StepRecord, order: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The tokens that entered the state, by request, whatever names the record gives its rows."""
    source = record.token_ids if record.forced_token_ids is None else record.forced_token_ids
    return {r: tuple(source[i, : int(record.num_sampled[i])].tolist()) for i, r in enumerate(order)}


def _blocks(place: int) -> list[int]:
    return list(range(1 + place * BLOCKS_EACH, 1 + (place + 1) * BLOCKS_EACH))


# -- judging ------------------------------------------------------------------------------------------------------


def row_faults(
    clause_id: str, req_id: str, raw: np.ndarray, history: RowHistory, seed: int, drawn: int, seen: np.ndarray | None
) -> list[Mismatch]:
    """One logits row against the rules: the whole processed row where it can be seen, and the token drawn."""
    want = processed(raw, history)
    found = []
    if seen is not None:
        found += row_differences(clause_id, "processed logits", req_id, seen, want)
    score = want + scores_noise(history, seed, len(want))
    best = int(score.argmax())
    close = 0 <= drawn < len(want) and score[best] - score[drawn] <= NEAR
    if drawn != best and not close:
        found.append(Mismatch(clause_id, "token_ids", req_id, (len(history.tokens),), drawn, best))
    return found


def scores_noise(history: RowHistory, seed: int, vocab_size: int) -> np.ndarray | float:
    """Gumbel noise of the token behind the history; none for a greedy request."""
    if history.params.greedy:
        return 0.0
    return gumbel_noise(np.array([seed]), np.array([len(history.tokens) - 1]), vocab_size, "murmur3")[0]


def row_differences(clause_id: str, name: str, req_id: str, got: np.ndarray, want: np.ndarray) -> list[Mismatch]:
    """The first element that is off by more than rounding; infinities must agree exactly."""
    with np.errstate(invalid="ignore"):
        right = (got == want) | (np.abs(got - want) <= TOLERANCE * (1 + np.abs(want))) & np.isfinite(want)
    wrong = np.flatnonzero(~right)
    if not len(wrong):
        return []
    v = int(wrong[0])
    return [Mismatch(clause_id, name, req_id, (v,), float(got[v]), float(want[v]))]


def differs(clause_id: str, name: str, req_id: str | None, got: Any, want: Any) -> list[Mismatch]:
    """One plain fact."""
    return [] if got == want else [Mismatch(clause_id, name, req_id, (), got, want)]


def servable(params: SamplingParams, offered: Collection[Capability]) -> bool:
    return params.required_capabilities() <= frozenset(offered)


def servable_part(base: SamplingParams, asks: Mapping[str, Any], offered: Collection[Capability]) -> SamplingParams:
    """`base` with those of the parameters, taken one after the other, that the runner can serve."""
    params = base
    for name, value in asks.items():
        more = replace(params, **{name: value})
        params = more if servable(more, offered) else params
    return params
