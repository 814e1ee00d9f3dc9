"""Play a story on a runner: a tiny scheduler that asks the runner for tokens and for nothing else.

It reads no record and knows no model. `Way` is everything in which two plays of one story may differ, and nothing of it
may change a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from conformance.metamorphic.story import Ask
from conformance.planned_step import spoil
from conformance.world_blocks import Ghost, WorldBlocks
from runner_api import (
    AsyncModelRunnerOutput,
    BatchDescriptor,
    CachedRequestData,
    CUDAGraphMode,
    GrammarOutput,
    KVCacheConfig,
    ModelRunner,
    ModelRunnerOutput,
    NewRequestData,
    RunnerConfig,
    RunnerError,
    SamplingParams,
    SchedulerOutput,
)
from runner_api.record_check import is_integer

# Ids, values and rank of one row of log probabilities.
Scores = tuple[tuple[int, ...], tuple[float, ...], int]
# A story that is not over by then never will be.
MOST_STEPS = 200


@dataclass(frozen=True, slots=True)
class Way:
    """How a story is played. Counts are of tokens, places of steps.

    shuffled: seed of the order of requests in each plan; None: the oldest first. chunks: the most that a step takes
    of a prompt, in turn. preempt: request to (outputs after which it leaves, steps that it is away), one after the
    other. left_out: in each step, seeded, some running requests are not scheduled. padded: more tokens and requests
    than the plan has. late: an output is taken when so many later steps have been sampled. reuse_prefix: computed
    blocks of others are taken over. ahead: blocks are handed out for so many tokens to come. spoilt: when a step is
    sampled, the lists of its plan are overwritten. graphs: captured shapes, of which the smallest that fits is
    asked for.
    """

    shuffled: int | None = None
    chunks: tuple[int, ...] = ()
    preempt: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    left_out: int | None = None
    padded: bool = False
    late: int = 0
    reuse_prefix: bool = False
    ahead: int = 0
    spoilt: bool = False
    graphs: tuple[BatchDescriptor, ...] = ()


BASE = Way()


@dataclass(frozen=True, slots=True)
class Token:
    """A token, the step of the play that drew it, and its log probabilities as far as its request asked for them (None:
    it asked for none, or none came)."""

    token: int
    step: int
    scores: Scores | None = None


class BrokenStory(Exception):
    """The runner gave a request no token where one was due, or one where none was. The story cannot go on."""

    def __init__(self, req_id: str, step: int, got: tuple[int, ...], due: int) -> None:
        super().__init__(f"step {step}, request {req_id!r}: {len(got)} tokens where {due} are due")
        self.req_id, self.step, self.got, self.due = req_id, step, got, due


@dataclass(slots=True, eq=False)
class _Part:
    """One request of a play, and all that is true of it."""

    ask: Ask
    blocks: tuple[list[int], ...]
    outputs: list[Token] = field(default_factory=list)
    drawn: int = 0  # outputs, with those on their way
    known: int = 0  # tokens when it was admitted last
    computed: int = 0
    reserved: int = 0  # blocks that it may still take
    back_at: int = 0  # the step from which it may be admitted
    preempted: int = 0  # how often

    @property
    def num_tokens(self) -> int:
        return len(self.ask.prompt) + self.drawn

    @property
    def tokens(self) -> list[int]:
        return [*self.ask.prompt, *(t.token for t in self.outputs)]


class Player:
    """Plays stories on one runner, one after the other.

    order: ids of all usable blocks, in the order in which they are handed out. vocab_size: of the model; requests with
    structured outputs get masks of it.
    """

    def __init__(
        self, runner: ModelRunner, config: RunnerConfig, kv_cache_config: KVCacheConfig, order: Sequence[int],
        way: Way = BASE, *, vocab_size: int,
    ) -> None:  # fmt: skip
        self.runner, self.config, self.way, self.vocab_size = runner, config, way, vocab_size
        self.meanwhile: Callable[[], object] = lambda: None  # called in each step, before it is sampled
        self.sizes = [g.spec.block_size for g in kv_cache_config.groups]
        self.unit = int(np.lcm.reduce(self.sizes))
        self.pool = WorldBlocks(order)
        self.step = 0
        self.counts: Counter[str] = Counter()  # what really happened, so that a law can say that it was put to the test
        self._finished: set[str] = set()  # told by the next plan
        self._preempted: set[str] = set()
        self._on_their_way: list[tuple[int, AsyncModelRunnerOutput, tuple[str, ...], dict[str, _Part]]] = []

    def play(self, asks: Sequence[Ask]) -> dict[str, list[Token]]:
        """Every request's tokens. Raises BrokenStory, and whatever the runner raises."""
        *_, played = self.steps(asks)
        return played

    def steps(self, asks: Sequence[Ask]) -> Iterator[dict[str, list[Token]]]:
        """Step by step, the tokens so far behind each; as `play`, which goes to the end at once."""
        start = self.step
        waiting = [_Part(ask, tuple([] for _ in self.sizes), back_at=start + ask.arrives) for ask in asks]
        everyone, self._running = list(waiting), list[_Part]()
        while waiting or self._running:
            if self.step - start > MOST_STEPS:
                stuck = (waiting or self._running)[0]
                raise BrokenStory(stuck.ask.req_id, self.step, (), 1)
            self._one_step(waiting)
            yield {part.ask.req_id: part.outputs for part in everyone}
        self._take_outputs(0)
        yield {part.ask.req_id: part.outputs for part in everyone}

    # -- one step ---------------------------------------------------------------------------------------------

    def _one_step(self, waiting: list[_Part]) -> None:
        self._let_go(waiting)
        new = self._admit(waiting)
        parts = self._chosen(new)
        if self.way.shuffled is not None:
            order = np.random.default_rng([self.way.shuffled, self.step]).permutation(len(parts))
            self.counts["shuffled"] += order.tolist() != sorted(order)
            parts = [parts[i] for i in order]
        chunks = self.way.chunks or (self.config.max_model_len,)
        most = chunks[self.step % len(chunks)]
        plan, due = self._plan(parts, new, most)
        done = self.runner.execute_model(plan, descriptor=self._descriptor(plan))
        self.meanwhile()
        if plan.num_scheduled_tokens:
            if done is not None:
                raise RunnerError(
                    "execute_model has sampled by itself", field="execute_model", got=done,
                    expected="None for a plan with tokens: sample_tokens follows",
                )  # fmt: skip
            handle = self.runner.sample_tokens(self._grammar(due))
            self._on_their_way.append((self.step, handle, tuple(plan.num_scheduled_tokens), due))
            if self.way.spoilt:
                spoil(plan)
                self.counts["spoilt"] += 1
        self.step += 1
        self._take_outputs(self.way.late)

    def _let_go(self, waiting: list[_Part]) -> None:
        """Requests that have all their tokens leave; so do those whose turn it is to be preempted."""
        for part in list(self._running):
            turns = self.way.preempt.get(part.ask.req_id, ())
            if part.drawn == part.ask.num_outputs:
                self._finished.add(part.ask.req_id)
            elif part.preempted < len(turns) and part.drawn >= turns[part.preempted][0]:
                self._take_outputs(0)  # whoever comes back is told its own tokens
                self._preempted.add(part.ask.req_id)
                part.back_at = self.step + turns[part.preempted][1]
                part.preempted += 1
                self.counts["preempted"] += 1
                waiting.append(part)
            else:
                continue
            self._running.remove(part)
            self._release(part)

    def _admit(self, waiting: list[_Part]) -> list[_Part]:
        """Everybody whose time has come, as long as there are rows, tokens and blocks."""
        new = []
        for part in list(waiting):
            most = len(part.ask.prompt) + part.ask.num_outputs + self.way.ahead
            need = sum(-(-most // size) for size in self.sizes)
            reserved = sum(p.reserved for p in self._running)
            if part.back_at > self.step or len(self._running) == self.config.max_num_reqs:
                continue
            if len(self.pool.free) - reserved < need:
                continue
            waiting.remove(part)
            part.known, part.computed, part.reserved = part.num_tokens, 0, need
            part.blocks = tuple([] for _ in self.sizes)
            if self.way.reuse_prefix:
                self._take_over_prefix(part)
            self._running.append(part)
            new.append(part)
        return new

    def _take_over_prefix(self, part: _Part) -> None:
        """Blocks that somebody has computed for the same first tokens, living or gone, as far as they are whole."""
        living = [(p.ask.prompt, min(p.computed, len(p.ask.prompt)), p.blocks) for p in self._running]
        gone = [(tuple(g.tokens), g.computed, g.blocks) for g in self.pool.ghosts]
        best, source = 0, None
        for prompt, computed, blocks in (*living, *gone):
            same = next((i for i, (s, t) in enumerate(zip(prompt, part.ask.prompt, strict=False)) if s != t), None)
            same = min(len(prompt), len(part.ask.prompt)) if same is None else same
            length = min(same, computed, len(part.ask.prompt) - 1) // self.unit * self.unit
            if length > best:
                best, source = length, blocks
        if source is None:
            return
        part.computed = best
        part.blocks = tuple(list(ids[: best // size]) for ids, size in zip(source, self.sizes, strict=True))
        for ids in part.blocks:
            for block in ids:
                self.pool.claim(block)
        part.reserved -= sum(map(len, part.blocks))
        self.counts["prefix_hit"] += 1

    def _chosen(self, new: list[_Part]) -> list[_Part]:
        """Who is scheduled. New ones always are."""
        if self.way.left_out is None:
            return list(self._running)
        luck = np.random.default_rng([self.way.left_out, self.step]).random(len(self._running)) < 0.6
        chosen = [p for p, lucky in zip(self._running, luck, strict=True) if lucky or p in new]
        chosen = chosen or list(self._running)
        self.counts["left_out"] += len(self._running) - len(chosen)
        return chosen

    def _plan(
        self, parts: Sequence[_Part], new: Sequence[_Part], most: int
    ) -> tuple[SchedulerOutput, dict[str, _Part]]:
        """The plan, and the requests for which it draws a token; everything advances as if it were done."""
        counts: dict[str, int] = {}
        fresh, cached, due = [], CachedRequestData(), {}
        for part in parts:
            req_id = part.ask.req_id
            left = max(part.known - part.computed, 1)
            n = min(left, most)
            self.counts["split"] += n < left
            added = self._blocks_for(part, part.computed + n)
            if part in new:
                blocks = tuple(list(ids) for ids in part.blocks)
                fresh.append(
                    NewRequestData(
                        req_id, list(part.ask.prompt), part.tokens, part.computed, blocks, part.ask.params,
                        part.ask.seed,
                    )
                )  # fmt: skip
            else:
                cached.req_ids.append(req_id)
                cached.num_computed_tokens.append(part.computed)
                cached.new_block_ids.append(added if any(added) else None)
                cached.num_output_tokens.append(part.drawn)
            counts[req_id] = n
            part.computed += n
            if part.computed >= part.known:
                due[req_id] = part
                part.drawn += 1
        plan = SchedulerOutput(
            fresh, cached, counts, sum(counts.values()), finished_req_ids=frozenset(self._finished),
            preempted_req_ids=frozenset(self._preempted),
        )  # fmt: skip
        self._finished, self._preempted = set(), set()
        return plan, due

    def _take_outputs(self, on_their_way: int) -> None:
        """Take the oldest outputs until so many are on their way."""
        while len(self._on_their_way) > on_their_way:
            step, handle, planned, due = self._on_their_way.pop(0)
            self.counts["late"] += step < self.step - 1
            output = handle.get_output()
            taken = _tokens(output, planned)
            again = _tokens(handle.get_output(), planned)
            if again != taken:
                raise RunnerError("a second get_output differs", field="get_output", got=again, expected=taken)
            for req_id in {**dict.fromkeys(taken), **due}:
                tokens, wanted = taken.get(req_id, ()), int(req_id in due)
                if len(tokens) != wanted:
                    raise BrokenStory(req_id, step, tokens, wanted)
                if wanted:
                    scores = _scores(output, req_id, due[req_id].ask.params, self.vocab_size)
                    due[req_id].outputs.append(Token(int(tokens[0]), step, scores))

    def _grammar(self, due: Mapping[str, _Part]) -> GrammarOutput | None:
        """The masks of those that draw a token in structured form; None: nobody does."""
        formed = {i: part for i, part in due.items() if part.ask.params.structured_outputs is not None}
        if not formed:
            return None
        allowed = np.zeros((len(formed), -(-self.vocab_size // 32) * 32), bool)
        for mask, part in zip(allowed, formed.values(), strict=True):
            mask[part.ask.formed(part.drawn, self.vocab_size)] = True
        words = np.packbits(allowed, axis=1, bitorder="little").view("<i4").astype(np.int32)
        return GrammarOutput(list(formed), words)

    # -- blocks and shapes ------------------------------------------------------------------------------------

    def _blocks_for(self, part: _Part, num_tokens: int) -> tuple[list[int], ...]:
        """Hand out what is missing for so many tokens, and for those that the way looks ahead."""
        added = []
        for ids, size in zip(part.blocks, self.sizes, strict=True):
            fresh = [self.pool.take() for _ in range(-(-(num_tokens + self.way.ahead) // size) - len(ids))]
            ids.extend(fresh)
            self.counts["ahead"] += bool(fresh) and (len(ids) - 1) * size >= num_tokens
            part.reserved -= len(fresh)
            added.append(fresh)
        return tuple(added)

    def _release(self, part: _Part) -> None:
        computed = min(part.computed, len(part.ask.prompt))
        self.pool.remember(Ghost(list(part.ask.prompt), computed, part.blocks, [0] * len(self.sizes)))
        for ids in part.blocks:
            for block in ids:
                self.pool.release(block)

    def _descriptor(self, plan: SchedulerOutput) -> BatchDescriptor | None:
        """The shape that the way asks for; None: the plan's own."""
        total, reqs = plan.total_num_scheduled_tokens, len(plan.num_scheduled_tokens)
        if not total:
            return None
        if self.way.padded:
            tokens = min(total + 1 + self.step % 5, self.config.max_num_batched_tokens)
            rows = min(reqs + self.step % 3, self.config.max_num_reqs)
            self.counts["padded"] += (tokens, rows) != (total, reqs)
            if self.step % 2:
                return BatchDescriptor(CUDAGraphMode.PIECEWISE, tokens, None)
            return BatchDescriptor(CUDAGraphMode.FULL, tokens, rows)
        lengths = list(plan.num_scheduled_tokens.values())
        fitting = [g for g in self.way.graphs if _fits(g, total, lengths)]
        self.counts["graph"] += bool(fitting)
        return min(fitting, key=lambda g: (g.num_tokens, g.num_reqs or 0), default=None)


def _tokens(output: ModelRunnerOutput, planned: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """An output's tokens by request; whoever is missing there has none. Raises RunnerError unless it names requests of
    the plan, each once, and gives integers, and no request an error: none of a story has a reason for one."""
    if Counter(output.req_ids) - Counter(planned):
        raise RunnerError(
            "the output names requests that are not the plan's, or one twice", field="req_ids", got=output.req_ids,
            expected=f"each once: {sorted(planned)}",
        )  # fmt: skip
    if not isinstance(output.errors, Mapping) or output.errors:
        raise RunnerError("an error without a reason", field="errors", got=output.errors, expected={})
    found = {req_id: tuple(tokens) for req_id, tokens in output.tokens().items()}
    for tokens in found.values():
        if not all(map(is_integer, tokens)):
            raise RunnerError("tokens are integers", field="sampled_token_ids", got=tokens, expected="integers")
    return found


def _scores(output: ModelRunnerOutput, req_id: str, params: SamplingParams, vocab_size: int) -> Scores | None:
    """What the request asked for of its row: column 0, then its listed or best tokens."""
    lists, listed, best = output.logprobs, params.logprob_token_ids, params.logprobs
    if lists is None or (listed is None and best is None):
        return None
    row = output.req_ids.index(req_id)
    if row >= min(map(len, (lists.token_ids, lists.logprobs, lists.ranks))):
        return None
    width = 1 + (len(listed) if listed is not None else vocab_size if best == -1 else best or 0)
    ids, values = (np.asarray(a[row])[:width].tolist() for a in (lists.token_ids, lists.logprobs))
    return tuple(ids), tuple(values), int(lists.ranks[row])


def _fits(graph: BatchDescriptor, total: int, lengths: Sequence[int]) -> bool:
    uniform = graph.uniform_token_count
    return (
        graph.num_tokens >= total
        and (graph.num_reqs is None or graph.num_reqs >= len(lengths))
        and (uniform is None or set(lengths) == {uniform})
        and (graph.max_query_len is None or graph.max_query_len >= max(lengths))
    )
