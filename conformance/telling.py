"""Tell a story to a candidate and an oracle until something fails, or let a seeded driver make one up on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from conformance.case import Case, CaseStep
from conformance.divergence import Failure, NotLegal, Sides, run_step
from conformance.driver import RandomDriver, WorldSize
from conformance.evaluate import StepJudge
from conformance.foreign import all_let_go
from conformance.planned_step import PlannedStep
from conformance.shapes import shapes_of
from conformance.story import Story, StoryWorld
from runner_api import Capability, RunnerError


@dataclass(slots=True)
class Told:
    """What came of a story: the first failure, if any; what really took place, and the plans that it came to."""

    story: Story
    failure: Failure | None = None
    steps: list[CaseStep] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def case(self) -> Case:
        size = self.story.size
        return Case(size.config, size.model, size.num_blocks, tuple(self.steps)).tidy()


class Teller:
    """One candidate and one oracle in a world that writes its story."""

    def __init__(self, sides: Sides, size: WorldSize, block_order: tuple[int, ...], poison: bool = True) -> None:
        self.sides, self.size, self.block_order, self.poison = sides, size, block_order, poison
        self.judge: StepJudge = sides.judge(size)
        self.world = StoryWorld(size, self.judge.kv_cache_config, block_order)
        self.steps: list[CaseStep] = []
        self.shapes: Counter[str] = Counter()

    def run(self, step: PlannedStep) -> Failure | None:
        """One step on both sides, and the world told of it. Raises NotLegal."""
        poisons = self.poison and Capability.POISON in self.sides.offered
        keep = self.world.kept_blocks() if poisons else None
        kept = None if keep is None else keep | step.blocks_read()
        self.steps.append(CaseStep(step.plan, step.descriptor, step.forced, step.grammar, kept))
        self.shapes += shapes_of(step, self.size)
        return run_step(
            self.sides, self.judge, step, len(self.steps) - 1, keep, lambda _: self.judge.observe(self.world, step)
        )

    def told(self, failure: Failure | None = None) -> Told:
        story = Story(self.size, self.block_order, tuple(self.world.actions), self.poison)
        return Told(story, failure, self.steps, self.world.counts + self.shapes)


@all_let_go()
def tell(story: Story, sides: Sides) -> Told:
    """Until the first failure or the story's end. Raises NotLegal for a story that the oracle cannot follow."""
    teller = Teller(sides, story.size, story.block_order, story.poison)
    for action in story.actions:
        step = teller.world.tell(action)
        failure = None if step is None else teller.run(step)
        if failure is not None:
            return teller.told(failure)
    return teller.told()


@all_let_go()
def tell_at_random(
    sides: Sides, size: WorldSize, entropy: Sequence[int] | np.random.Generator, steps: int, *, poison: bool = True,
    watch: Callable[[Told], bool] | None = None,
) -> Told:  # fmt: skip
    """A story of `steps` plans that a seeded driver makes up, until the first failure.

    entropy: a seed, or a generator to draw from. watch: shown what came of it so far, after each step; it ends the
    story by saying True."""
    random = np.random.default_rng(entropy)
    order = tuple(random.permutation(np.arange(1, size.num_blocks)).tolist())
    teller = Teller(sides, size, order, poison)
    driver = RandomDriver(random, sides.offered)
    for _ in range(steps):
        step = driver.next_step(teller.world)
        teller.world.note(step)
        failure = teller.run(step)
        if failure is not None or (watch is not None and watch(teller.told())):
            return teller.told(failure)
    return teller.told()


def try_to_tell(story: Story, sides: Sides) -> Told | None:
    """As `tell`; None for a story that cannot be told: plans that the oracle refuses, sizes that a factory refuses."""
    try:
        return tell(story, sides)
    except (NotLegal, RunnerError):
        return None
