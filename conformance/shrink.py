"""Make a failing story smaller until nothing smaller fails with the same clause.

A candidate is a shorter or plainer story; it is told again, and kept if it fails with the same key and weighs less.
Weights are compared part by part, steps first, so that every accepted candidate is progress and the search ends. No
clock and no chance: the same story shrinks to the same story.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from conformance.divergence import Sides
from conformance.shrink_sizes import plainer_sizes, size_weight, with_rows
from conformance.story import Action, Add, Close, Go, Leave, Outcome, Preempt, Resume, Story
from conformance.telling import Told, try_to_tell
from conformance.world import GREEDY
from runner_api import SamplingParams

ATTEMPTS = 2000
Weight = tuple[Any, ...]


@dataclass(slots=True)
class Shrunk:
    """The smallest telling that was found, and how many stories were told on the way. cut_off: there were more."""

    told: Told
    attempts: int
    cut_off: bool = False


def shrink(
    told: Told, sides: Sides, attempts: int = ATTEMPTS, also: Callable[[Told], bool] = lambda told: True
) -> Shrunk:
    """`told` has a failure. If its story does not fail when it is told again, it comes back as it is.

    also: what else must be true of a smaller story that fails; it is asked of such stories alone."""
    assert told.failure is not None
    key = told.failure.key
    return shrink_while(told, sides, lambda t: t.failure is not None and t.failure.key == key and also(t), attempts)


def shrink_while(told: Told, sides: Sides, holds: Callable[[Told], bool], attempts: int = ATTEMPTS) -> Shrunk:
    """The smallest story, by `weight`, of which something still holds."""
    search = _Search(sides, holds, attempts)
    again = search.told(told.story)
    if again is None:
        return Shrunk(told, search.attempts, search.cut_off)
    best, before = again, None
    while before != weight(best.story):
        before = weight(best.story)
        for proposals in (
            _without_actions, _without_requests, _with_merged_chunks, _without_pairs, _with_whole_prompts,
            _with_shorter_chunks, _plainer_actions, plainer_sizes,
        ):  # fmt: skip
            best = search.descend(best, proposals)
    named = search.renamed(best)
    return Shrunk(named, search.attempts, search.cut_off)


class _Search:
    """Tells candidates, each once, and counts them."""

    def __init__(self, sides: Sides, holds: Callable[[Told], bool], most: int) -> None:
        self.sides, self.holds, self.most = sides, holds, most
        self.attempts = 0
        self.cut_off = False
        self._seen: set[str] = set()

    def told(self, story: Story) -> Told | None:
        mark = repr(story)
        if mark in self._seen:
            return None
        if self.attempts >= self.most:
            self.cut_off = True
            return None
        self._seen.add(mark)
        self.attempts += 1
        told = try_to_tell(story, self.sides)
        return told if told is not None and self.holds(told) else None

    def descend(self, best: Told, proposals: Callable[[Story], Iterator[Story]]) -> Told:
        """Take the first proposal that still fails and weighs less, and propose again."""
        lightest, progress = weight(best.story), True
        while progress and not self.cut_off:
            progress = False
            for candidate in proposals(best.story):
                if weight(candidate) >= lightest:
                    continue
                told = self.told(candidate)
                if told is not None and weight(told.story) < lightest:
                    best, lightest, progress = told, weight(told.story), True
                    break
        return best

    def renamed(self, best: Told) -> Told:
        """Requests called a, b, c, … in the order in which they come, if that does not matter."""
        story = best.story
        names = dict(zip(story.requests, "abcdefghijklmnopqrstuvwxyz", strict=False))
        told = self.told(replace(story, actions=tuple(_rename(a, names) for a in story.actions)))
        return told or best


# -- weight -------------------------------------------------------------------------------------------------------


def weight(story: Story) -> Weight:
    """Steps, requests, actions, tokens and padding; then how plain the rest is."""
    tokens = sum(_tokens(a) for a in story.actions)
    plain = sum(_oddities(a) for a in story.actions)
    values = sum(sum(a.prompt) for a in story.actions if isinstance(a, Add))
    return (
        story.num_steps, len(story.requests), len(story.actions), tokens, plain, story.poison, *size_weight(story),
        values,
    )  # fmt: skip


def _tokens(a: Action) -> int:
    match a:
        case Add():
            return len(a.prompt) + a.num_tokens + a.shared
        case Go(_, num_tokens, num_drafts):
            return num_tokens + num_drafts
        case Resume(_, num_tokens):
            return num_tokens
        case Close(pad_tokens, pad_reqs):
            return pad_tokens + (pad_reqs or 0)
    return 0


def _oddities(a: Action) -> int:
    """How many things an action says that it need not say."""
    match a:
        case Add():
            return _odd_params(a.params) + (a.seed != 0) + a.spare_blocks + (a.source is not None) + a.copied
        case Preempt(_, told):
            return not told
        case Leave(_, aborted):
            return aborted
        case Close(_, pad_reqs, outcomes, masks):
            said = sum(o.accepted + (o.token != 0) + sum(d != 0 for d in o.drafts) for _, o in outcomes)
            return (pad_reqs is None) + said + len(masks)
    return 0


def _odd_params(params: SamplingParams) -> int:
    if params is GREEDY:
        return 0
    return sum(getattr(params, f.name) != getattr(GREEDY, f.name) for f in fields(SamplingParams))


# -- fewer actions ------------------------------------------------------------------------------------------------


def _with(story: Story, actions: list[Action]) -> Story:
    return replace(story, actions=tuple(actions))


def _without_actions(story: Story) -> Iterator[Story]:
    """Without a run of actions: long runs first."""
    actions = list(story.actions)
    length = len(actions) // 2
    while length >= 1:
        for start in range(0, len(actions) - 1, length):
            yield _with(story, actions[:start] + actions[min(start + length, len(actions) - 1) :])
        length //= 2


def _without_requests(story: Story) -> Iterator[Story]:
    """One request alone, then all but one; each also where the last blocks are handed out first, and all but one in a
    world with a row less: what fails only with full rows, or at the last block, goes with the request otherwise."""
    requests = story.requests
    last_first = tuple(sorted(story.block_order, reverse=True))
    for req_id in requests if len(requests) > 2 else ():
        for alone in _with_requests(story, {req_id}):
            yield alone
            yield replace(alone, block_order=last_first)
    for req_id in requests:
        for fewer in _with_requests(story, set(requests) - {req_id}):
            yield fewer
            if story.size.config.max_num_reqs > 1:
                yield replace(fewer, size=with_rows(story.size, story.size.config.max_num_reqs - 1))
            yield replace(fewer, block_order=last_first)


def _with_requests(story: Story, kept: set[str]) -> Iterator[Story]:
    """These requests alone; then with those that shared blocks of others, which compute them by themselves, in steps
    with room for that."""
    actions = [a for a in story.actions if isinstance(a, Close) or a.req_id in kept]
    yield _with(story, actions)
    bereft = [a for a in actions if isinstance(a, Add) and a.source is not None and a.source not in kept]
    if bereft:
        config = story.size.config
        room = config.max_num_batched_tokens + sum(a.shared for a in bereft)
        size = replace(story.size, config=replace(config, max_num_batched_tokens=room))
        own = [_on_its_own(a) if isinstance(a, Add) and a in bereft else a for a in actions]
        yield replace(_with(story, own), size=size)


def _on_its_own(a: Add) -> Add:
    """The same request, which computes what it shared."""
    prompt = (*range(1, a.shared + 1), *a.prompt)
    return replace(a, source=None, shared=0, copied=False, prompt=prompt, num_tokens=a.num_tokens + a.shared)


def _with_merged_chunks(story: Story) -> Iterator[Story]:
    """Two chunks of a request as one of as many tokens, in the place of the first or of the second."""
    actions = story.actions
    for n, a in enumerate(actions):
        if not isinstance(a, (Add, Go, Resume)):
            continue
        m = next((m for m in range(n + 1, len(actions)) if _of(actions[m]) == a.req_id), None)
        b = None if m is None else actions[m]
        if m is None or not isinstance(b, Go) or b.num_drafts:
            continue
        both = a.num_tokens + b.num_tokens
        yield _with(story, [*actions[:n], replace(a, num_tokens=both), *actions[n + 1 : m], *actions[m + 1 :]])
        rest = (*actions[:n], *actions[n + 1 : m])
        moved = replace(b, num_tokens=both) if isinstance(a, Go) else replace(a, num_tokens=both)
        yield _with(story, [*rest, moved, *actions[m + 1 :]])


def _of(a: Action) -> str | None:
    """Whose action it is; None for the end of a plan."""
    return None if isinstance(a, Close) else a.req_id


def _without_pairs(story: Story) -> Iterator[Story]:
    """Without two actions at once: a preemption and its resume, a step and what it made room for."""
    actions = list(story.actions)
    for j in range(len(actions) - 1):
        for i in range(max(j - 8, 0), j):
            yield _with(story, [a for n, a in enumerate(actions) if n not in (i, j)])


def _with_whole_prompts(story: Story) -> Iterator[Story]:
    """A prompt in one piece, without the chunk that came next."""
    actions = list(story.actions)
    for n, a in enumerate(actions):
        if not isinstance(a, Add) or a.num_tokens >= len(a.prompt):
            continue
        after = next((m for m in range(n + 1, len(actions)) if isinstance(actions[m], Go)
                      and actions[m].req_id == a.req_id), None)  # type: ignore[union-attr]  # fmt: skip
        rest = [b for m, b in enumerate(actions) if m != after]
        yield _with(story, [*rest[:n], replace(a, num_tokens=len(a.prompt)), *rest[n + 1 :]])


def _with_shorter_chunks(story: Story) -> Iterator[Story]:
    """A prompt and one of its chunks shorter by the same, so that what is left of the prompt behind them stays."""
    actions = list(story.actions)
    for n, a in enumerate(actions):
        if not isinstance(a, Add) or a.num_tokens >= len(a.prompt):
            continue
        for m, b in enumerate(actions[n:], n):
            if b is not a and not (isinstance(b, Go) and b.req_id == a.req_id):
                continue
            assert isinstance(b, Add | Go)
            for left in _less(b.num_tokens, 1 if b is a else 0):
                prompt = a.prompt[: len(a.prompt) - (b.num_tokens - left)]
                changed = list(actions)
                if b is a:
                    changed[n] = replace(a, prompt=prompt, num_tokens=left)
                else:
                    changed[n] = replace(a, prompt=prompt)
                    changed[m : m + 1] = [replace(b, num_tokens=left)] if left else []
                yield _with(story, changed)


# -- plainer actions ----------------------------------------------------------------------------------------------


def _plainer_actions(story: Story) -> Iterator[Story]:
    if story.poison:
        yield replace(story, poison=False)
    for n, a in enumerate(story.actions):
        for plainer in _plainer(a):
            yield replace(story, actions=(*story.actions[:n], plainer, *story.actions[n + 1 :]))


def _plainer(a: Action) -> Iterator[Action]:
    match a:
        case Add():
            yield from _plainer_add(a)
        case Go(req_id, num_tokens, num_drafts):
            yield from (Go(req_id, n, num_drafts) for n in _less(num_tokens, 1))
            yield from (Go(req_id, num_tokens, n) for n in _less(num_drafts, 0))
        case Resume(req_id, num_tokens):
            yield from (Resume(req_id, n) for n in _less(num_tokens, 1))
        case Preempt(req_id, told):
            if not told:
                yield Preempt(req_id)
        case Leave(req_id, aborted):
            if aborted:
                yield Leave(req_id)
        case Close():
            yield from _plainer_close(a)


def _plainer_add(a: Add) -> Iterator[Add]:
    if a.source is not None:
        yield replace(a, source=None, shared=0, copied=False)
        yield replace(a, source=None, shared=0, copied=False, prompt=(*range(1, a.shared + 1), *a.prompt))
        yield from (replace(a, shared=n) for n in _less(a.shared, 1))
    for n in _less(len(a.prompt), 1):
        yield replace(a, prompt=a.prompt[:n], num_tokens=min(a.num_tokens, n))
    if 0 < a.num_tokens < len(a.prompt):
        yield replace(a, prompt=a.prompt[: a.num_tokens])
    yield from (replace(a, num_tokens=n) for n in _less(a.num_tokens, 1))
    if a.params != GREEDY:
        yield replace(a, params=GREEDY)
        yield from (replace(a, params=p) for p in _plainer_params(a.params))
    if a.seed:
        yield from (replace(a, seed=s) for s in (0, 1, 2))
    if a.spare_blocks:
        yield replace(a, spare_blocks=0)
    yield replace(a, prompt=tuple(range(1, len(a.prompt) + 1)))
    yield replace(a, prompt=tuple(min(t, 9) for t in a.prompt))


def _plainer_params(params: SamplingParams) -> Iterator[SamplingParams]:
    """One parameter at its default, which is that of a greedy request; then shorter lists."""
    for f in fields(SamplingParams):
        value = getattr(params, f.name)
        if value == getattr(GREEDY, f.name):
            continue
        tries: list[Any] = [getattr(GREEDY, f.name)]
        if isinstance(value, tuple) and len(value) > 1:
            tries += [value[: len(value) // 2], value[:-1], value[1:]]
        for plainer in tries:
            try:
                yield replace(params, **{f.name: plainer})
            except ValueError:  # SamplingParamsError: the rest asks for it
                continue


def _plainer_close(a: Close) -> Iterator[Close]:
    if a.pad_tokens or a.pad_reqs or a.pad_reqs is None:
        yield replace(a, pad_tokens=0, pad_reqs=0)
    yield from (replace(a, pad_tokens=n) for n in _less(a.pad_tokens, 0))
    if a.pad_reqs is None:
        yield replace(a, pad_reqs=0)
    yield from (replace(a, pad_reqs=n) for n in _less(a.pad_reqs or 0, 0))
    for n in range(len(a.masks)):
        yield replace(a, masks=a.masks[:n] + a.masks[n + 1 :])
    for n, (req_id, o) in enumerate(a.outcomes):
        zeros = (0,) * len(o.drafts)
        for plainer in (Outcome(0, 0, zeros), replace(o, accepted=0), replace(o, token=0), replace(o, drafts=zeros)):
            if plainer != o:
                yield replace(a, outcomes=(*a.outcomes[:n], (req_id, plainer), *a.outcomes[n + 1 :]))


def _less(value: int, least: int) -> Iterator[int]:
    """Smaller values: the least, half, one less."""
    yield from dict.fromkeys(n for n in (least, value // 2, value - 1) if least <= n < value)


def _rename(a: Action, names: dict[str, str]) -> Action:
    match a:
        case Close():
            outcomes = tuple((names.get(r, r), o) for r, o in a.outcomes)
            return replace(a, outcomes=outcomes, masks=tuple((names.get(r, r), m) for r, m in a.masks))
        case Add():
            source = None if a.source is None else names.get(a.source, a.source)
            return replace(a, req_id=names.get(a.req_id, a.req_id), source=source)
    return replace(a, req_id=names.get(a.req_id, a.req_id))
