"""Plans at random: sizes of a world, and which action comes next, from one seeded NumPy generator.

The same seed gives the same plans for any runner, as long as the tokens told to the world are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from conformance.planned_step import PlannedStep, WorldRequest
from conformance.world import GREEDY, PlanWorld
from runner_api import (
    Capability,
    ForcedStep,
    GrammarOutput,
    ReasoningConfig,
    RunnerConfig,
    SamplingParams,
    StructuredOutputsParams,
    WitnessConfig,
    WitnessGroup,
)
from runner_api.config import LOGPROBS_MODES

# What the requests of a world may ask for, each with the capabilities it needs (read off the parameters themselves):
# the shape of the distribution alone, and everything else that a sampler does, one by one and mixed.
PLAIN = (
    GREEDY,
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.6),
    SamplingParams(temperature=2.0, min_p=0.2),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.5, logprobs=1),
    SamplingParams(temperature=1.0, top_k=1, logprobs=0),
)
FORM = StructuredOutputsParams(regex="[a-z]*")
PAIRS = tuple((v, (7 * v + 3) % 40) for v in range(40))
RICH = (
    SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, repetition_penalty=1.4, frequency_penalty=-0.3, top_p=0.9),
    SamplingParams(temperature=0.9, logit_bias={3: 4.0, 17: -6.0, 40: 2.5}, min_p=0.05),
    SamplingParams(temperature=0.0, allowed_token_ids=(1, 2, 3, 5, 8, 13, 21, 34)),
    SamplingParams(temperature=1.0, min_tokens=4, stop_token_ids=tuple(range(0, 32, 3)), top_k=40),
    SamplingParams(temperature=1.0, bad_words_token_ids=((2,), *PAIRS)),
    SamplingParams(temperature=0.8, thinking_token_budget=2),
    SamplingParams(temperature=1.2, trace_decode_token_ids=(4, 9, 2, 7, 1)),
    SamplingParams(temperature=0.0, trace_decode_token_ids=(8, 8), logprobs=2),
    SamplingParams(temperature=1.0, structured_outputs=FORM),
    SamplingParams(temperature=0.0, logprob_token_ids=(1, 40, 7)),
    SamplingParams(temperature=0.0, prompt_logprobs=2),
    SamplingParams(temperature=1.0, prompt_logprobs=0, logprobs=-1),
    SamplingParams(
        temperature=0.6, top_k=30, top_p=0.95, min_p=0.01, presence_penalty=0.4, frequency_penalty=0.7,
        repetition_penalty=1.2, logit_bias={3: 4.0, 5: -3.0}, min_tokens=3, stop_token_ids=(3, 40),
        bad_words_token_ids=PAIRS, thinking_token_budget=4, structured_outputs=FORM,
    ),
    SamplingParams(
        temperature=1.4, allowed_token_ids=tuple(range(0, 41, 2)), logit_bias={2: 3.0, 4: 3.0, 7: 9.0},
        repetition_penalty=0.7, presence_penalty=-1.0, top_p=0.8, logprobs=2,
    ),
)  # fmt: skip
PALETTE = (*PLAIN, *RICH)
# Markers of one token stand in many a random prompt.
REASONING = ReasoningConfig((7,), (9, 10), (10,))
KINDS = ("plain", "groups", "tiny", "wide", "drafts")
# What worlds of the kind "groups" are about; of a runner that offers one of the two they ask for that one.
GROUPS = frozenset({Capability.MULTI_GROUP, Capability.SLIDING_WINDOW})


@dataclass(frozen=True, slots=True)
class WorldSize:
    """Everything that a world and its runners are built from."""

    config: RunnerConfig
    model: WitnessConfig
    num_blocks: int


def palette(
    offered: frozenset[Capability], config: RunnerConfig, vocab_size: int, entries: Sequence[SamplingParams] = PALETTE
) -> list[SamplingParams]:
    """What requests may ask of a runner of these capabilities, built with this configuration.

    Where drafts may be scheduled nobody asks for log probabilities or replays a trace: they exclude each other in a
    step.
    """
    drafts = config.num_speculative_tokens > 0
    return [
        p
        for p in entries
        if p.required_capabilities() <= offered
        and not (drafts and (p.logprobs, p.logprob_token_ids, p.trace_decode_token_ids) != (None, None, None))
        and (p.thinking_token_budget is None or config.reasoning is not None)
        and vocab_size > 40  # the largest id that an entry names
    ]


def draw_size(
    kind: str, random: np.random.Generator, record: frozenset[str] = frozenset(),
    offered: frozenset[Capability] = frozenset(), layout: str = "slots",
) -> WorldSize:  # fmt: skip
    """Sizes of one world on the witness model.

    plain: one group, few rows, blocks scarce. groups: two groups with different block sizes, the second windowed, free
    rows in a permuted order. tiny: blocks of one token. wide: up to 64 rows, large blocks. drafts: imposed outcomes.
    offered: with it the world has markers of thinking, and log probabilities of any mode. layout: of the rows; dense
    ones have no order in which they are free, and may be reordered.
    """
    window = None
    if kind == "plain":
        sizes, rows, length, drafts = (int(random.choice([2, 3, 4, 8, 16])),), int(random.integers(4, 9)), 64, 0
    elif kind == "groups":
        small = int(random.choice([2, 4]))
        sizes, rows, length, drafts = (small, small * int(random.choice([1, 2]))), int(random.integers(3, 8)), 64, 0
        window = int(random.integers(3, 14))
        if offered & GROUPS == {Capability.MULTI_GROUP}:
            sizes, window = (small, 2 * small), None
        elif offered & GROUPS == {Capability.SLIDING_WINDOW}:
            sizes = (small,)
    elif kind == "tiny":
        sizes, rows, length, drafts = (1,), int(random.integers(1, 4)), 24, 0
    elif kind == "wide":
        sizes, rows, length, drafts = (int(random.choice([16, 32, 64])),), int(random.integers(16, 65)), 128, 0
    else:
        sizes, rows, length, drafts = (int(random.choice([2, 4, 8])),), int(random.integers(3, 7)), 64, 3
    groups = tuple(WitnessGroup(s, window if g == len(sizes) - 1 else None) for g, s in enumerate(sizes))
    free_rows = None if kind == "plain" else tuple(int(i) for i in random.permutation(rows))
    threshold = None
    if layout == "dense":
        free_rows, threshold = None, [None, 1, 4][int(random.integers(3))]
    config = RunnerConfig(
        layout=layout, reorder_batch_threshold=threshold,
        max_num_reqs=rows, max_num_batched_tokens=max(4 * rows, 24), max_model_len=length,
        num_speculative_tokens=drafts, initial_free_rows=free_rows, record=record,
        reasoning=REASONING if Capability.THINKING_BUDGET in offered else None,
        logprobs_mode=LOGPROBS_MODES[int(random.integers(4)) if Capability.LOGPROBS in offered else 0],
    )  # fmt: skip
    # About a third of what full rows would take: the pool must run dry now and then.
    per_request = sum(-(-length // s) for s in sizes)
    num_blocks = 2 + per_request + rows * per_request // 5
    return WorldSize(config, WitnessConfig(groups=groups), num_blocks)


class RandomDriver:
    """Draws one plan after another.

    capabilities: what the runner offers. churn: how readily a running request leaves or is preempted in a step, 0 .. 1.
    padding: the share of steps that get a padded shape. max_prompt: longest prompt (None: half of max_model_len).
    """

    def __init__(
        self, seed: int | np.random.Generator, capabilities: frozenset[Capability] = frozenset(Capability),
        max_prompt: int | None = None, churn: float = 0.06, padding: float = 0.4,
    ) -> None:  # fmt: skip
        self.random = np.random.default_rng(seed)
        self.capabilities = capabilities
        # What requests may ask for, worked out once a world: its configuration, plain entries, rich ones.
        self._asked: tuple[RunnerConfig, list[SamplingParams], list[SamplingParams]] | None = None
        self.pads = Capability.PADDED_BATCH in capabilities
        self.max_prompt = max_prompt
        self.churn = churn
        self.padding = padding

    def next_step(self, world: PlanWorld) -> PlannedStep:
        """One legal plan; with drafts it comes with the outcome to impose."""
        random = self.random
        quiet = random.random() < 0.05
        self._free_some(world)
        if not quiet:
            self._resume_some(world)
            self._extend(world)
            self._add_some(world)
        elif random.random() < 0.4 and world.free_rows:
            world.add(self._prompt(world), 0, self._params(world), self._seed())
        step = world.close(*self._padding())
        if world.config.num_speculative_tokens and step.plan.total_num_scheduled_tokens:
            step = replace(step, forced=draw_outcome(world, step, random))
        return replace(step, grammar=draw_masks(world, step, random))

    # -- the parts of a plan ----------------------------------------------------------------------------------

    def _free_some(self, world: PlanWorld) -> None:
        random = self.random
        for req_id in world.removable():
            request = world.running[req_id]
            old = len(request.tokens) - request.prompt_len > 12
            if world.room(request) < 1 or random.random() < (0.3 if old else self.churn):
                world.finish(req_id)
            elif random.random() < self.churn:
                world.preempt(req_id, told=self._told(world))
        if random.random() < self.churn:
            known = [*world.running, *world.waiting]
            unknown = random.random() < 0.5 or not known
            world.abort(f"ghost-{random.integers(99)}" if unknown else known[int(random.integers(len(known)))])

    def _told(self, world: PlanWorld) -> bool:
        """Whether a plan lists a preemption; with dense rows it need not."""
        return not world.dense or self.random.random() < 0.5

    def _resume_some(self, world: PlanWorld) -> None:
        for req_id in list(world.waiting):
            if len(world.waiting[req_id].tokens) >= world.config.max_model_len - 1:
                world.abort(req_id)
            elif world.free_rows and world.budget and self.random.random() < 0.4:
                world.resume(req_id, self._chunk(world))

    def _extend(self, world: PlanWorld) -> None:
        random = self.random
        for request in world.unscheduled():
            if not world.budget or (world.dense and not world.free_rows):
                return
            if random.random() < (0.25 if world.dense else 0.1) or request.req_id not in world.running:
                continue
            drafts = self._num_drafts(world, request)
            if world.schedule(request.req_id, self._chunk(world), drafts):
                continue
            # No block is left: the youngest request that the plan does not need yet gives its own back.
            victims = [r for r in world.removable() if r != request.req_id]
            if victims and world.preempt(victims[-1], told=self._told(world)):
                world.schedule(request.req_id, 1)

    def _add_some(self, world: PlanWorld) -> None:
        random = self.random
        if world.dense and random.random() < 0.5:
            return  # whoever left leaves a hole
        while world.free_rows and world.budget and random.random() < 0.7:
            sources, kind = world.hit_sources(), random.random()
            params, seed, chunk = self._params(world), self._seed(), self._chunk(world)
            tail = self._tokens(world, int(random.integers(1, 6)))
            if sources and kind < 0.25:
                source = sources[int(random.integers(len(sources)))]
                added = world.add_with_prefix(source, tail, chunk, params, seed)
            elif sources and kind < 0.55:
                source = sources[int(random.integers(len(sources)))]
                copied = int(random.integers(0, source.computed + 1))
                added = isinstance(source, WorldRequest) and world.add_with_copy(
                    source, copied, tail, chunk, params, seed
                )
            else:
                added = world.add(self._prompt(world), chunk, params, seed, spare_blocks=int(random.random() < 0.1))
            if not added and kind >= 0.55:
                return

    # -- draws ------------------------------------------------------------------------------------------------

    def _tokens(self, world: PlanWorld, n: int) -> list[int]:
        return self.random.integers(0, world.vocab_size, n).tolist()

    def _prompt(self, world: PlanWorld) -> list[int]:
        longest = self.max_prompt or max(world.config.max_model_len // 2, 1)
        return self._tokens(world, int(self.random.integers(1, longest + 1)))

    def _chunk(self, world: PlanWorld) -> int:
        return int(self.random.integers(1, max(world.config.max_num_batched_tokens // 2, 2)))

    def _params(self, world: PlanWorld) -> SamplingParams:
        if self._asked is None or self._asked[0] is not world.config:
            plain, rich = (
                palette(self.capabilities, world.config, world.vocab_size, entries) for entries in (PLAIN, RICH)
            )
            self._asked = world.config, plain or [GREEDY], rich
        _, plain, rich = self._asked
        choice = rich if rich and self.random.random() < 0.5 else plain
        return choice[int(self.random.integers(len(choice)))]

    def _seed(self) -> int:
        return int(self.random.integers(-(2**63), 2**63 - 1))

    def _num_drafts(self, world: PlanWorld, request: WorldRequest) -> int:
        k = world.config.num_speculative_tokens
        if not k or request.prefill_len - request.computed > 1 or self.random.random() < 0.3:
            return 0
        n = int(self.random.integers(1, k + 1))
        return n if 1 + n <= min(world.budget, world.room(request)) else 0

    def _padding(self) -> tuple[int, int | None]:
        if not self.pads or self.random.random() >= self.padding:
            return 0, 0
        reqs = None if self.random.random() < 0.3 else int(self.random.integers(0, 5))
        return int(self.random.integers(0, 9)), reqs


def draw_outcome(world: PlanWorld, step: PlannedStep, random: np.random.Generator) -> ForcedStep:
    """An outcome for a batch with drafts: some of them accepted, one more token, and new proposals for every row."""
    k, rows = world.config.num_speculative_tokens, len(step.truth.order)
    token_ids = random.integers(0, world.vocab_size, (rows, 1 + k))
    num_sampled = np.zeros(rows, np.int32)
    for i, req_id in enumerate(step.truth.order):
        truth = step.truth.requests[req_id]
        if truth.samples:
            # Drafts behind a prompt's last token were proposed before it was computed: none of them can be accepted.
            most = truth.num_drafts if truth.computed >= truth.prefill_len else 0
            accepted = int(random.integers(0, most + 1))
            token_ids[i, :accepted] = truth.drafts[:accepted]
            num_sampled[i] = 1 + accepted
    return ForcedStep(token_ids, num_sampled, random.integers(0, world.vocab_size, (rows, k)))


def draw_masks(world: PlanWorld, step: PlannedStep, random: np.random.Generator) -> GrammarOutput | None:
    """Masks for most of the sampling requests that ask for a form, in an order of their own; None if there are none.

    Every mask row is random, those of drafts that are not there and bits past the vocabulary included.
    """
    asking = [r for r, t in step.truth.requests.items() if t.samples and t.request.params.structured_outputs]
    owners = [r for r in asking if random.random() < 0.8]
    if not owners:
        return None
    random.shuffle(owners)
    count, width = len(owners) * (1 + world.config.num_speculative_tokens), -(-world.vocab_size // 32)
    return GrammarOutput(owners, random.integers(-(2**31), 2**31, (count, width)).astype(np.int32))
