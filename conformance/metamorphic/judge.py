"""The laws: one story is played plainly, then once for each law in the way that the law says changes no token.

Only `execute_model`, `sample_tokens` and the tokens of outputs are used: no record, no oracle, no poison. Every play
has a fresh runner of the same kind. On a model of floats two plays may differ by rounding where two tokens are close:
judge it in float64, or with a model whose margins are wide.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from conformance.clauses import clause
from conformance.context import Mismatch
from conformance.foreign import let_go
from conformance.harness import build_runner, info_of
from conformance.layouts import InLayout
from conformance.metamorphic.player import BASE, BrokenStory, Player, Token, Way
from conformance.metamorphic.story import Ask, Story, tell_story
from conformance.probe import probe
from engine_core.engine_config import open_model
from runner_api import Capability, CapabilityError, ConfigError, RunnerConfig, WitnessConfig, WitnessGroup
from runner_api.loader import load_factory
from runner_api.protocol import RunnerFactory

if TYPE_CHECKING:
    from conformance.probes import Bench

Found = dict[str, list[Mismatch]]
Played = dict[str, list[Token]]
VOCAB = 64
# In the name of a device: kernels are interpreted there, and a step takes a hundred times as long.
INTERPRETER = "interpreter"
TWIN = "-twin"
# Two right runners differ by less in a log probability, relative or absolute.
ROUNDING = 1e-5
CHUNKS = (1, 4, 3, 2, 7)
ONE_GROUP = WitnessConfig(VOCAB, (WitnessGroup(4),))
TWO_GROUPS = WitnessConfig(VOCAB, (WitnessGroup(4), WitnessGroup(2, 6)))


@dataclass(frozen=True)
class Stage:
    """Where stories are played: a kind of runner, a model, and the story that is told.

    block_sizes: of the model's KV cache groups. changes: of the RunnerConfig, besides its sizes.
    """

    runner: str | RunnerFactory
    offered: frozenset[Capability]
    model: Any
    vocab_size: int
    seed: int
    story: Story
    block_sizes: tuple[int, ...]
    changes: Mapping[str, Any]

    @cached_property
    def config(self) -> RunnerConfig:
        rows = len(self.story.asks) + len(self.story.strangers)
        sizes = {
            "max_num_reqs": rows, "max_num_batched_tokens": rows * self.story.max_model_len,
            "max_model_len": self.story.max_model_len,
        }  # fmt: skip
        return RunnerConfig(**{**sizes, **self.changes})

    @cached_property
    def plainly(self) -> Played:
        return self.play(self.story.asks)[0]

    @cached_property
    def in_chunks(self) -> Played:
        """The story with its prompts in chunks, for laws that tell it so to compare with."""
        return self.play(self.story.asks, Way(chunks=CHUNKS))[0]

    def play(
        self, asks: Sequence[Ask], way: Way = BASE, *, before: Sequence[Ask] = (), other_blocks: bool = False,
        graphs: bool = False, beside: Sequence[Ask] = (), **changes: Any,
    ) -> tuple[Played, Mapping[str, int]]:  # fmt: skip
        """Tokens by request on a fresh runner, and what happened how often. before: a story that it plays first.
        beside: a story that a second runner plays meanwhile, in steps between those of the first, on the same blocks.
        """
        config = replace(self.config, **changes)
        num_blocks = self._num_blocks()
        runner, kv_cache_config = build_runner(self.runner, self.model, config, num_blocks)
        order = np.arange(1, num_blocks)
        if other_blocks:
            order = np.random.default_rng([self.seed, 3]).permutation(order)
        try:
            if graphs:
                way = replace(way, graphs=tuple(runner.capture_graphs()))
            player = Player(runner, config, kv_cache_config, order.tolist(), way, vocab_size=self.vocab_size)
            if before:
                player.play(before)
            if beside:
                player.meanwhile = partial(next, self._second(beside, config, order.tolist()), None)
            return player.play(asks), player.counts
        finally:
            let_go(runner)

    def _second(self, asks: Sequence[Ask], config: RunnerConfig, order: Sequence[int]) -> Iterator[Played]:
        """The steps of another runner, which is built for the first of them and shut down behind the last."""
        runner, kv_cache_config = build_runner(self.runner, self.model, config, self._num_blocks())
        yield from Player(runner, config, kv_cache_config, order, vocab_size=self.vocab_size).steps(asks)
        let_go(runner)

    def _num_blocks(self) -> int:
        """Scarce: who comes late is given blocks that others have had. Every request alone has room."""
        each = [len(a.prompt) + a.num_outputs for a in (*self.story.asks, *self.story.strangers)]
        total = sum(-(-n // size) for n in each for size in self.block_sizes)
        return 1 + max(total * 3 // 4, sum(-(-max(each) // size) for size in self.block_sizes))


@dataclass(frozen=True, slots=True)
class Retold:
    """A story told in another way. happened: whether what the way is about came up at all. plain: what to compare it
    with; None: the story told plainly."""

    played: Played
    happened: bool = True
    plain: Played | None = None


@dataclass(frozen=True, slots=True)
class Law:
    """A clause, how it tells the story, in words, and the play. changes: the tokens must be others, not the same.
    again: another play of the same, put on where the first shows nothing."""

    clause_id: str
    told: str
    play: Callable[[Stage], Retold]
    changes: bool = False
    again: Callable[[Stage], Retold] | None = None


def _in_another_way(way: Way, happened: str) -> Callable[[Stage], Retold]:
    """The same requests. happened: the player's count of what the way is about."""

    def play(stage: Stage) -> Retold:
        played, counts = stage.play(stage.story.asks, way)
        return Retold(played, counts[happened] > 0)

    return play


def _other_rows(stage: Stage) -> Retold:
    """Two strangers hold the first rows; rows are free in another order, where a runner can be told."""
    n = stage.config.max_num_reqs
    free = tuple(np.random.default_rng([stage.seed, 4]).permutation(n).tolist())
    early = [replace(a, arrives=0) for a in stage.story.strangers]
    later = [replace(a, arrives=a.arrives + 1) for a in reversed(stage.story.asks)]
    try:
        return Retold(stage.play([*early, *later], initial_free_rows=free)[0])
    except (CapabilityError, ConfigError):  # it has no such list
        return Retold(stage.play([*early, *later])[0])


def _other_blocks(stage: Stage) -> Retold:
    return Retold(stage.play(stage.story.asks, other_blocks=True)[0])


def _preempted(stage: Stage) -> Retold:
    """Everybody leaves once or twice: back at once, two steps later, and while others come and go."""
    turns = [((1, 0),), ((2, 2),), ((1, 1), (3, 0)), ((3, 4),), ((4, 1),), ((1, 3), (1, 1)), ((2, 0),)]
    asks = stage.story.asks
    way = Way(preempt={a.req_id: turns[i % len(turns)] for i, a in enumerate(asks)})
    played, counts = stage.play(asks, way)
    return Retold(played, counts["preempted"] > 0)


def _preempted_in_the_prompt(stage: Stage) -> Retold:
    """In chunks, so that every other request leaves before its first output; some once more behind it.

    Where chunks alone give other tokens it says nothing: that has a law of its own.
    """
    if not all(map(_same_tokens, stage.plainly.values(), stage.in_chunks.values())):
        return Retold({}, happened=False)
    turns = [((0, 1), (1, 0)), (), ((0, 0),), ((0, 2), (2, 1))]
    asks = stage.story.asks
    way = Way(chunks=CHUNKS, preempt={a.req_id: turns[i % len(turns)] for i, a in enumerate(asks)})
    played, counts = stage.play(asks, way)
    return Retold(played, counts["preempted"] > 0, stage.in_chunks)


def _with_strangers(stage: Stage) -> Retold:
    return Retold(stage.play([stage.story.strangers[0], *stage.story.asks, stage.story.strangers[1]])[0])


def _alone(stage: Stage) -> Retold:
    """Some of them, each on a runner of its own."""
    played: Played = {}
    for ask in stage.story.asks[1::2]:
        played |= stage.play([replace(ask, arrives=0)])[0]
    return Retold(played)


def _behind_others(stage: Stage) -> Retold:
    """The runner has served others before: the same prompts, all at once, the last one first, with parameters handed
    round."""
    asks = stage.story.asks
    others = [
        replace(a, req_id=f"old-{a.req_id}", params=asks[i - 1].params, seed=asks[i - 1].seed, arrives=0)
        for i, a in reversed(list(enumerate(asks)))
    ]
    return Retold(stage.play(asks, before=others)[0])


def _same_names(stage: Stage) -> Retold:
    """The runner has served others under the same names: each name had the next request's prompt, parameters and
    seed. They arrive a step later than plainly, when all is over that bore their names."""
    asks = stage.story.asks
    others = [replace(a, req_id=asks[i - 1].req_id, arrives=0) for i, a in enumerate(asks)]
    return Retold(stage.play([replace(a, arrives=a.arrives + 1) for a in asks], before=others)[0])


def _beside_another(stage: Stage) -> Retold:
    """A second runner serves every other name with the next request's prompt, parameters and seed."""
    asks = stage.story.asks
    others = [replace(a, req_id=asks[i - 1].req_id) for i, a in enumerate(asks)][::2]
    return Retold(stage.play(asks, beside=others)[0])


def _twins(stage: Stage) -> Retold:
    """Half of the requests once more under another name, each some steps later: both have the tokens of the story."""
    asks = stage.story.asks
    twins = [replace(a, req_id=f"{a.req_id}{TWIN}", arrives=a.arrives + 2) for a in asks[1::2]]
    rows = {"max_num_reqs": max(stage.config.max_num_reqs, len(asks) + len(twins))}
    return Retold(stage.play([*asks, *twins], **rows)[0])


def _graphs(stage: Stage) -> Retold:
    played, counts = stage.play(stage.story.asks, graphs=True)
    return Retold(played, counts["graph"] > 0)


def _taken_late(stage: Stage) -> Retold:
    """In chunks, so that the rows that draw a token are others in each step; with chunks alone to compare with."""
    asks = stage.story.asks
    played, counts = stage.play(asks, Way(chunks=CHUNKS, late=1))
    return Retold(played, counts["late"] > 0, stage.in_chunks)


def _plans_spoilt(stage: Stage) -> Retold:
    """With requests left out of steps, so that a runner needs again what it has been told."""
    asks = stage.story.asks
    plain, _ = stage.play(asks, Way(left_out=2))
    played, counts = stage.play(asks, Way(left_out=2, spoilt=True))
    return Retold(played, counts["spoilt"] > 0, plain)


def _other_prompts(stage: Stage) -> Retold:
    """The first token of every prompt is another one; what is compared is whether anything changed at all."""
    changed = [replace(a, prompt=(1 - min(a.prompt[0], 1), *a.prompt[1:])) for a in stage.story.asks]
    return Retold(stage.play(changed)[0])


def _other_seeds(stage: Stage) -> Retold:
    changed = [replace(a, seed=a.seed ^ 0x5DEECE66D) for a in stage.story.asks]
    return Retold(stage.play(changed)[0])


LAWS: tuple[Law, ...] = (
    Law("MR-META-001", "requests of each plan in another order", _in_another_way(Way(shuffled=5), "shuffled")),
    Law("MR-META-002", "other rows", _other_rows),
    Law("MR-META-003", "other blocks", _other_blocks),
    Law("MR-META-004", "prompts in chunks", _in_another_way(Way(chunks=CHUNKS), "split")),
    Law("MR-META-005", "preempted and resumed", _preempted, again=_preempted_in_the_prompt),
    Law("MR-META-006", "padded steps", _in_another_way(Way(padded=True), "padded")),
    Law("MR-META-007", "two strangers in between", _with_strangers),
    Law("MR-META-008", "prefixes from the cache", _in_another_way(Way(reuse_prefix=True), "prefix_hit")),
    Law("MR-META-009", "outputs taken late", _taken_late),
    Law("MR-META-010", "captured graphs", _graphs),
    Law("MR-META-011", "the same requests twice", _twins),
    Law("MR-META-012", "each request alone", _alone),
    Law("MR-META-013", "requests left out of steps", _in_another_way(Way(left_out=2), "left_out")),
    Law("MR-META-014", "behind other requests", _behind_others),
    Law("MR-META-015", "other prompts", _other_prompts, changes=True),
    Law("MR-META-016", "other seeds", _other_seeds, changes=True),
    Law("MR-META-017", "plans overwritten afterwards", _plans_spoilt),
    Law("MR-META-018", "blocks handed out ahead of need", _in_another_way(Way(ahead=3), "ahead")),
    Law("MR-META-019", "names that others have had", _same_names),
    Law("MR-META-020", "a second runner in between", _beside_another),
)


def judge_metamorphic(
    factory: str | RunnerFactory, *, model: Any = None, seed: int = 0,
    capabilities: frozenset[Capability] | None = None, **changes: Any,
) -> Found:  # fmt: skip
    """Mismatches by clause, for the laws that apply; a law that could not be put to the test is left out.

    model: whatever the runner's load_model takes and `open_model` knows the vocabulary of; None: the witness model.
    seed: of the story. capabilities: what to rely on; None: what the runner declares. changes: of the RunnerConfig
    (dtype, device …). Raises ConfigError if no law applies, BrokenStory if the plain story cannot be played.
    """
    runner = load_factory(factory)
    info = info_of(runner, **changes)
    offered = info.capabilities if capabilities is None else capabilities
    if info.layout == "dense":
        runner = InLayout(runner, "dense", stories=True)
    found = judge_stories(runner, offered, model, seed, changes)
    if not found:
        raise ConfigError(
            "no metamorphic law applies to this runner", field="capabilities", got=sorted(offered),
            expected=f"at least {Capability.GENERATE}",
        )  # fmt: skip
    return found


@probe("META-001..META-020", Capability.GENERATE)
def retold_stories(bench: Bench) -> Found:
    """Every metamorphic law that applies, on the witness model."""
    found: Found = {}
    for seed in bench.stories:
        for clause_id, mismatches in judge_stories(bench.runner, bench.capabilities, None, seed, {}).items():
            found.setdefault(clause_id, []).extend(mismatches)
    return found


@probe("OUT-004 OUT-016", Capability.GENERATE)
def greedy_tokens_are_the_models(bench: Bench) -> Found:
    """The story's greedy requests on the witness model, beside the `cpu` runner: the tokens of outputs alone.

    Of runners that keep a record the laws say more; to those that do not, nothing else says what the right token is.
    """
    models = {"MR-OUT-004": ONE_GROUP}
    if {Capability.MULTI_GROUP, Capability.SLIDING_WINDOW} <= bench.capabilities:
        models["MR-OUT-016"] = TWO_GROUPS
    found: Found = {clause_id: [] for clause_id in models}
    for (clause_id, model), seed in itertools.product(models.items(), bench.stories):
        stage = stage_of(bench.runner, frozenset({Capability.GENERATE}), model, seed, {})
        law = Law(clause_id, "the witness model", lambda other: Retold(other.play(other.story.asks)[0]))
        found[clause_id] += _ask(law, stage, _references_tokens(model, stage.story)) or []
    return found


@cache
def _references_tokens(model: WitnessConfig, story: Story) -> Played:
    """What the `cpu` runner draws in this story: worked out once, however many runners are judged."""
    stage = stage_of("cpu", frozenset({Capability.GENERATE}), model, 0, {"layout": "slots"})
    return replace(stage, story=story).plainly


def judge_stories(
    runner: str | RunnerFactory, offered: frozenset[Capability], model: Any, seed: int, changes: Mapping[str, Any]
) -> Found:
    """As `judge_metamorphic`, for a runner that takes plans in the shape of the slots layout; empty if none applies."""
    laws = [law for law in LAWS if not clause(law.clause_id).missing(offered)]
    if not laws:
        return {}
    stage = stage_of(runner, offered, model, seed, changes)
    base = stage.plainly
    found: Found = {}
    for law in laws:
        answer = _ask(law, stage, base)
        if answer is not None:
            found[law.clause_id] = answer
    return found


def stage_of(
    runner: str | RunnerFactory, offered: frozenset[Capability], model: Any, seed: int, changes: Mapping[str, Any]
) -> Stage:
    """Where this runner's stories are played. model: None for the witness model."""
    if model is None:
        model = TWO_GROUPS if {Capability.MULTI_GROUP, Capability.SLIDING_WINDOW} <= offered else ONE_GROUP
    facts = open_model(model)
    config = RunnerConfig(max_num_reqs=1, max_model_len=32, **changes)
    built, kv_cache_config = build_runner(runner, facts.model, config, 64)
    sizes = tuple(group.spec.block_size for group in kv_cache_config.groups)
    short = INTERPRETER in built.describe().device
    let_go(built)
    story = tell_story(seed, facts.vocab_size, int(np.lcm.reduce(sizes)), offered, short=short)
    return Stage(runner, offered, facts.model, facts.vocab_size, seed, story, sizes, changes)


def _ask(law: Law, stage: Stage, base: Played) -> list[Mismatch] | None:
    """None: what the law is about did not come up."""
    answer = _ask_once(law, stage, base)
    if answer == [] and law.again is not None:
        return _ask_once(replace(law, play=law.again), stage, base) or answer
    return answer


def _ask_once(law: Law, stage: Stage, base: Played) -> list[Mismatch] | None:
    try:
        retold = law.play(stage)
    except BrokenStory as e:
        name = f"number of tokens with {law.told}, step {e.step}"
        return [Mismatch(law.clause_id, name, e.req_id, (), len(e.got), e.due)]
    except Exception as e:  # the runner's: told plainly, the story came to its end
        return [Mismatch(law.clause_id, f"the story with {law.told}", None, (), repr(e), "tokens")]
    if not retold.happened:
        return None
    if law.changes:
        return _no_change(law, base, retold.played)
    return _differences(law, retold.plain or base, retold.played)


def _differences(law: Law, base: Played, played: Played) -> list[Mismatch]:
    """The first token of each request that is another one, or has other log probabilities; the one that was drawn first
    comes first."""
    found = []
    for req_id, tokens in played.items():
        wanted = base.get(req_id.removesuffix(TWIN))
        if wanted is None:
            continue  # a stranger
        pairs = enumerate(zip(tokens, wanted, strict=True))
        wrong = next(((k, got, want) for k, (got, want) in pairs if not same_token(got, want)), None)
        if wrong is not None:
            k, got, want = wrong
            what = "tokens" if got.token != want.token else "log probabilities"
            name = f"{what} with {law.told}, step {got.step} (told plainly: step {want.step})"
            pair = (got.token, want.token) if got.token != want.token else (got.scores, want.scores)
            found.append((got.step, Mismatch(law.clause_id, name, req_id, (k,), *pair)))
    return [mismatch for _, mismatch in sorted(found, key=lambda f: f[0])]


def same_token(got: Token, want: Token) -> bool:
    """Whether token, ids and rank are equal, and log probabilities to within rounding."""
    if got.token != want.token or (got.scores is None) != (want.scores is None):
        return False
    if got.scores is None or want.scores is None:
        return True
    (ids, values, rank), (other_ids, other_values, other_rank) = got.scores, want.scores
    same = (ids, rank, len(values)) == (other_ids, other_rank, len(other_values))
    return same and np.allclose(values, other_values, rtol=ROUNDING, atol=ROUNDING, equal_nan=True)


def _same_tokens(played: Sequence[Token], wanted: Sequence[Token]) -> bool:
    return len(played) == len(wanted) and all(map(same_token, played, wanted))


def _no_change(law: Law, base: Played, played: Played) -> list[Mismatch]:
    if any([t.token for t in tokens] != [t.token for t in base[req_id]] for req_id, tokens in played.items()):
        return []
    same = {req_id: [t.token for t in tokens] for req_id, tokens in played.items()}
    return [Mismatch(law.clause_id, f"tokens with {law.told}", None, (), same, "other tokens of at least one request")]
