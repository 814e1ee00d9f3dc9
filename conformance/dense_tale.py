"""Requests of a runner with dense rows and the plans that tell of them: what probes of this layout are written in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conformance.harness import build_runner
from runner_api import (
    CachedRequestData,
    Capability,
    ForcedStep,
    ModelRunner,
    NewRequestData,
    ReasoningConfig,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    WitnessConfig,
    WitnessGroup,
)
from runner_api.protocol import RunnerFactory

VOCAB = 50
# Two groups, so that tables of different widths move; blocks of five for each request and group.
SIZES = (4, 3)
MODEL = WitnessConfig(VOCAB, tuple(WitnessGroup(size) for size in SIZES))
ONE_GROUP = WitnessConfig(VOCAB, (WitnessGroup(4),))
BLOCKS_EACH = 6
CONFIG = RunnerConfig(max_num_reqs=6, max_num_batched_tokens=48, max_model_len=18, reorder_batch_threshold=1)
REASONING = ReasoningConfig((7,), (9, 10), (10,))


def busy_params(offered: Collection[Capability], n: int) -> SamplingParams:
    """Parameters that use whatever is offered, other ones for every n; 2 replays a trace, which excludes most of it."""
    if n == 2 and Capability.TRACE_REPLAY in offered:
        return SamplingParams(temperature=0.0, trace_decode_token_ids=(4, 9, 2))
    wants: tuple[tuple[Capability, dict[str, Any]], ...] = (
        (Capability.SEEDED_SAMPLING, {"temperature": 0.7 + 0.1 * n}),
        (Capability.TOP_K, {"top_k": 20 + n}),
        (Capability.TOP_P, {"top_p": 0.9 - 0.05 * n}),
        (Capability.MIN_P, {"min_p": 0.01 + 0.01 * n}),
        (
            Capability.PENALTIES,
            {"presence_penalty": 0.2 + n / 10, "frequency_penalty": 0.3 + n / 10, "repetition_penalty": 1.1 + n / 10},
        ),
        (Capability.LOGIT_BIAS, {"logit_bias": {3 + n: 1.5 + n, 20 - n: -2.0 - n}}),
        (Capability.ALLOWED_TOKEN_IDS, {"allowed_token_ids": tuple(range(n, VOCAB, 1 + n % 2))}),
        (Capability.MIN_TOKENS, {"min_tokens": 3 + n, "stop_token_ids": (30 + n, 40 - n)}),
        (Capability.BAD_WORDS, {"bad_words_token_ids": ((5 + n,), (6, 7 + n))}),
        (Capability.THINKING_BUDGET, {"thinking_token_budget": 2 + n}),
        (Capability.LOGPROBS, {"logprobs": 1 + n}),
        (Capability.PROMPT_LOGPROBS, {"prompt_logprobs": n % 3}),
    )
    asked: dict[str, Any] = {"temperature": 0.0}
    for capability, arguments in wants:
        if capability in offered:
            asked |= arguments
    return SamplingParams(**asked)


@dataclass(slots=True)
class Player:
    """One request, and what is true of it. place: which blocks it is given."""

    req_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    place: int
    outputs: list[int] = field(default_factory=list)
    computed: int = 0
    known: bool = False  # some plan has announced it
    preempted: bool = False
    owned: int = 0  # blocks per group that it has been given

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.outputs]


class Tale:
    """A runner with dense rows, and plans for it that are written in this layout's own shape.

    Outcomes are imposed where the runner lets them be, so that two tales never part for a draw.
    """

    def __init__(self, runner: str | RunnerFactory, offered: Collection[Capability], **changes: Any) -> None:
        self.offered = frozenset(offered)
        config = replace(CONFIG, layout="dense", **changes)
        if Capability.THINKING_BUDGET in offered:
            config = replace(config, reasoning=REASONING)
        self.model = MODEL if Capability.MULTI_GROUP in offered else ONE_GROUP
        groups = len(self.model.groups)
        self.runner: ModelRunner = build_runner(runner, self.model, config, 1 + 12 * BLOCKS_EACH * groups)[0]
        self.players: dict[str, Player] = {}
        self.finished: set[str] = set()
        self.preempted: set[str] = set()

    def add(self, req_id: str, prompt: Sequence[int], n: int, place: int | None = None, **changes: Any) -> None:
        """n: which parameters, seed and, unless told otherwise, place."""
        params = changes.pop("params", None) or busy_params(self.offered, n)
        self.players[req_id] = Player(req_id, list(prompt), params, 2**40 + n, n if place is None else place, **changes)

    def finish(self, *req_ids: str) -> None:
        for req_id in req_ids:
            del self.players[req_id]
            self.finished.add(req_id)

    def preempt(self, req_id: str, place: int, *, told: bool = True) -> None:
        """It will come back in other blocks."""
        p = self.players[req_id]
        p.computed, p.preempted, p.place, p.owned = 0, True, place, 0
        if told:
            self.preempted.add(req_id)

    def step(self, counts: Mapping[str, int] | Sequence[str]) -> Any:
        """Tokens of each request by name; names alone: all that is known. The output, still on its way."""
        plan = self.plan(counts)
        if self.runner.execute_model(plan) is not None:
            return None
        order = tuple(self.runner.last_step().req_ids)
        forced = self._outcome(order, plan) if Capability.FORCED_STEP in self.offered else None
        handle = self.runner.sample_tokens(forced=forced)
        taken = self.runner.last_step().tokens()
        for req_id, n in plan.num_scheduled_tokens.items():
            p = self.players[req_id]
            p.computed += n
            p.outputs.extend(taken[req_id])
        return handle

    def plan(self, counts: Mapping[str, int] | Sequence[str]) -> SchedulerOutput:
        new, cached, scheduled, tokens = [], CachedRequestData(), {}, {}
        for req_id in counts:
            p = self.players[req_id]
            left = len(p.tokens) - p.computed
            n = scheduled[req_id] = min(counts[req_id], left) if isinstance(counts, Mapping) else left
            blocks = self._blocks(p, p.computed + n)
            if not p.known:
                p.known = True
                new.append(
                    NewRequestData(req_id, list(p.prompt), p.tokens, p.computed, blocks, p.params, p.seed, (11,))
                )
                continue
            cached.req_ids.append(req_id)
            cached.num_computed_tokens.append(p.computed)
            cached.new_block_ids.append(blocks if any(blocks) else None)
            cached.num_output_tokens.append(len(p.outputs))
            if p.preempted:
                tokens[req_id], p.preempted = p.tokens, False
        cached.resumed_req_ids, cached.all_token_ids = frozenset(tokens), tokens
        finished, preempted = frozenset(self.finished), frozenset(self.preempted)
        self.finished, self.preempted = set(), set()
        return SchedulerOutput(new, cached, scheduled, sum(scheduled.values()), {}, finished, preempted)

    def _blocks(self, p: Player, end: int) -> tuple[list[int], ...]:
        """Fresh blocks up to a position, the same number in each group."""
        have, p.owned = p.owned, max(p.owned, *(-(-end // g.block_size) for g in self.model.groups))
        start = [1 + (p.place * len(self.model.groups) + g) * BLOCKS_EACH for g in range(len(self.model.groups))]
        return tuple(list(range(s + have, s + p.owned)) for s in start)

    def _outcome(self, order: Sequence[str], plan: SchedulerOutput) -> ForcedStep:
        """A token that tells whose it is and how many came before it."""
        tokens, counts = np.zeros((len(order), 1), np.int64), np.zeros(len(order), np.int32)
        for i, req_id in enumerate(order):
            p = self.players[req_id]
            if p.computed + plan.num_scheduled_tokens[req_id] == len(p.tokens):
                tokens[i], counts[i] = (7 * p.prompt[0] + 3 * len(p.outputs)) % VOCAB, 1
        return ForcedStep(tokens, counts)

    def digest(self) -> dict[str, str]:
        return dict(self.runner.state_digest())
