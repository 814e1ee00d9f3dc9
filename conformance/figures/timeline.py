"""A trace from first step to last: what each request did in each step, and the free blocks underneath."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from conformance.figures.holdings import Holdings
from conformance.figures.look import BLUE, FAINT, GREEN, GREY, INK, ORANGE, PALE, SMALL, VERMILION, Names, tint
from conformance.figures.sheet import Sheet
from runner_api import ConfigError, SchedulerOutput, StepRecord, Trace

# More steps would be thinner than a line of print.
MAX_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Work:
    """What one request did in one step. kind: "prefill", "decode" or "drafts". tokens: scheduled, drafts included.

    accepted, rejected: of its drafts. sampled: tokens that it took. resumed: it came back from a preemption.
    """

    step: int
    req_id: str
    kind: str
    tokens: int
    accepted: int = 0
    rejected: int = 0
    sampled: int = 0
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Life:
    """When a request was held: spans of steps (first, last), broken by preemptions; its last step, if any, is `end`."""

    req_id: str
    spans: tuple[tuple[int, int], ...]
    preempted: tuple[int, ...]  # steps whose plan says so
    end: int | None


@dataclass(frozen=True, slots=True)
class TimelinePicture:
    """num_blocks: of the cache, None if not known; held: blocks in tables of live requests after each step."""

    num_steps: int
    work: tuple[Work, ...]
    lives: tuple[Life, ...]
    held: tuple[int, ...]
    num_blocks: int | None

    @property
    def free(self) -> tuple[int, ...] | None:
        """Blocks in no table after each step; the null block is not counted. None if the cache's size is not known."""
        return None if self.num_blocks is None else tuple(self.num_blocks - 1 - n for n in self.held)


@dataclass(slots=True)
class _Story:
    """A request while the trace is read. known: its tokens, prompt and answer; prompt: how many are to be prefilled."""

    first: int
    known: int
    prompt: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    away: bool = False
    end: int | None = None


def num_blocks_of(meta: Mapping[str, Any]) -> int | None:
    """The size of the cache where the header of a trace says it."""
    value = meta.get("num_blocks", meta.get("num_gpu_blocks_override"))
    return value if isinstance(value, int) else None


def requests_of(trace: Trace | Sequence[StepRecord]) -> tuple[str, ...]:
    """Every request of a trace in the order in which they came: for `Names` that several pictures share."""
    steps = trace.steps if isinstance(trace, Trace) else trace
    met = (r for s in steps for r in (*(n.req_id for n in s.plan.scheduled_new_reqs), *s.req_ids))
    return tuple(dict.fromkeys(met))


def timeline_data(trace: Trace | Sequence[StepRecord], *, num_blocks: int | None = None) -> TimelinePicture:
    """The whole trace. num_blocks: of the cache; None: what its header says. Raises ConfigError without steps."""
    steps = trace.steps if isinstance(trace, Trace) else tuple(trace)
    if not steps:
        raise ConfigError("no step to draw", field="trace", got="0 steps", expected="at least one")
    if num_blocks is None and isinstance(trace, Trace):
        num_blocks = num_blocks_of(trace.meta)
    holdings, stories, work, held = Holdings(), dict[str, _Story](), [], []
    for number, record in enumerate(steps):
        holdings.take(record)
        held.append(len(holdings.blocks_held()))
        _leave(record.plan, number, stories)
        resumed = _come(record.plan, number, stories)
        work += [_work(number, record, i, stories[r], r in resumed) for i, r in enumerate(record.req_ids)]
    last = len(steps) - 1
    lives = tuple(
        Life(
            r, tuple(s.spans) if s.away or s.end is not None else (*s.spans, (s.first, last)), tuple(s.preempted), s.end
        )
        for r, s in stories.items()
    )
    return TimelinePicture(len(steps), tuple(work), lives, tuple(held), num_blocks)


def returns(steps: Iterable[StepRecord]) -> list[frozenset[str]]:
    """For each step the requests that it brings back from a preemption, however its plan says so."""
    stories: dict[str, _Story] = {}
    back = []
    for number, record in enumerate(steps):
        _leave(record.plan, number, stories)
        back.append(frozenset(_come(record.plan, number, stories)))
    return back


def _leave(plan: SchedulerOutput, number: int, stories: dict[str, _Story]) -> None:
    """Plans tell of a request's end, and of its preemption, in the step behind its last one."""
    for req_id in sorted((plan.finished_req_ids | plan.preempted_req_ids) & stories.keys()):
        story = stories[req_id]
        if not story.away:
            story.spans.append((story.first, number - 1))
        story.away = True
        if req_id in plan.finished_req_ids:
            story.end = number - 1
        else:
            story.preempted.append(number)


def _come(plan: SchedulerOutput, number: int, stories: dict[str, _Story]) -> set[str]:
    """New requests and those that come back; the latter's ids."""
    resumed = set()
    for new in plan.scheduled_new_reqs:
        if new.req_id in stories and stories[new.req_id].end is None:
            resumed.add(new.req_id)
            stories[new.req_id].first, stories[new.req_id].away = number, False
        else:
            stories[new.req_id] = _Story(number, 0)
        stories[new.req_id].known = stories[new.req_id].prompt = len(new.prefill_token_ids)
    for req_id in plan.scheduled_cached_reqs.req_ids:
        story = stories.setdefault(req_id, _Story(number, 0))  # came before the first step that is drawn
        if story.away:
            resumed.add(req_id)
            story.first, story.away = number, False
            story.prompt = story.known  # all of it is computed again
    return resumed


def _work(number: int, record: StepRecord, i: int, story: _Story, resumed: bool) -> Work:
    req_id = record.req_ids[i]
    tokens = record.plan.num_scheduled_tokens.get(req_id, 0)
    drafts = len(record.plan.scheduled_spec_decode_tokens.get(req_id, ()))
    sampled = int(record.num_sampled[i]) if i < len(record.num_sampled) else 0
    computed = int(record.seq_lens[i]) - tokens if i < len(record.seq_lens) else 0
    # A decode computes the last token that is known, and nothing in front of it; the last of a prompt is none.
    newest = computed >= story.prompt and (computed + 1 == story.known or story.known == 0)
    decodes = tokens - drafts == 1 and not resumed and newest
    first_of_prompt = computed == 0
    kind = "drafts" if drafts else ("decode" if decodes and not first_of_prompt else "prefill")
    story.known = max(story.known, computed + tokens - drafts) + sampled if story.known else 0
    accepted = max(sampled - 1, 0) if drafts else 0
    if drafts and record.num_rejected is not None and len(record.num_rejected) > i:
        accepted = drafts - int(record.num_rejected[i])
    return Work(number, req_id, kind, tokens, accepted, drafts - accepted, sampled, resumed)


# -- drawing --------------------------------------------------------------------------------------------------

COLOURS = {"prefill": BLUE, "decode": ORANGE, "accepted": GREEN, "rejected": "#ffffff"}
LEFT, RIGHT = 0.85, 0.55
LANE, NARROW_LANE, MANY = 0.22, 0.17, 32  # many requests get narrower lanes


def timeline(
    trace: Trace | Sequence[StepRecord], *, num_blocks: int | None = None, names: Names | None = None
) -> Any:  # fmt: skip
    """Figure of a trace (see the module)."""
    from conformance.figures.style import render

    data = timeline_data(trace, num_blocks=num_blocks)
    if data.num_steps > MAX_STEPS:
        raise ConfigError(
            "cannot be drawn as one timeline", field="trace", got=f"{data.num_steps} steps",
            expected=f"at most {MAX_STEPS}", hint="Draw a part of it: timeline(trace.steps[a:b])",
        )  # fmt: skip
    names = names or Names(life.req_id for life in data.lives)
    sheet = Sheet()
    title = f"{trace.name}: " if isinstance(trace, Trace) else ""
    requests, steps = len(data.lives), data.num_steps
    sheet.title(f"{title}{requests} request{'s' * (requests != 1)} over {steps} step{'s' * (steps != 1)}")
    _draw_key(sheet)
    width = min((sheet.width - LEFT - RIGHT) / data.num_steps, 0.5)
    top = sheet.height
    lane = LANE if len(data.lives) <= MANY else NARROW_LANE
    lanes = {life.req_id: top + k * lane for k, life in enumerate(data.lives)}
    bottom = top + len(data.lives) * lane
    _draw_axis(sheet, data.num_steps, width, top, bottom)
    for life in data.lives:
        _draw_life(sheet, life, lanes[life.req_id], lane, width, names)
    away = {(life.req_id, b): b - a - 1 for life in data.lives for (_, a), (b, _) in pairwise(life.spans)}
    for work in data.work:
        gap = away.get((work.req_id, work.step), 0)
        _draw_work(sheet, work, lanes[work.req_id], lane, width, gap)
    sheet.height = bottom + 0.3
    _draw_cache(sheet, data, width)
    sheet.note(names.legend(life.req_id for life in data.lives))
    sheet.down(0.08)
    return render(sheet)


def _draw_key(sheet: Sheet) -> None:
    """What the marks mean, in one line: each is drawn as in the picture and named beside it."""
    y, x = sheet.height, 0.15
    for kind, text in (
        ("prefill", "prefill chunk"), ("decode", "decode"), ("accepted", "draft accepted"),
        ("rejected", "draft rejected"),
    ):  # fmt: skip
        sheet.box(x, y - 0.06, 0.12, 0.12, fill=COLOURS[kind], edge=VERMILION if kind == "rejected" else "")
        sheet.label(x + 0.18, y, text, align="left")
        x += 0.45 + 0.065 * len(text)
    for mark, text in ((_draw_cross, "preempted"), (_draw_return, "resumed")):
        mark(sheet, x + 0.08, y)
        sheet.label(x + 0.16, y, text, align="left")
        x += 0.42 + 0.065 * len(text)
    sheet.line(x + 0.04, y - 0.07, x + 0.04, y + 0.07, width=1.6)
    sheet.label(x + 0.14, y, "finished or aborted", align="left")
    sheet.down(0.2)


def _draw_axis(sheet: Sheet, steps: int, width: float, top: float, bottom: float) -> None:
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500) if n * width >= 0.28)
    for step in range(0, steps, every):
        x = LEFT + (step + 0.5) * width
        sheet.line(x, top, x, bottom, colour=FAINT, width=0.6, layer=0)
        sheet.label(x, bottom + 0.09, str(step), size=SMALL, colour=GREY)
    sheet.label(LEFT - 0.08, bottom + 0.09, "step", align="right", size=SMALL, colour=GREY)


def _draw_life(sheet: Sheet, life: Life, y: float, lane: float, width: float, names: Names) -> None:
    middle = y + lane / 2
    sheet.label(LEFT - 0.08, middle, names.short(life.req_id), align="right")
    for a, b in life.spans:
        sheet.line(LEFT + a * width, middle, LEFT + (b + 1) * width, middle, colour=PALE, width=1.0, layer=1)
    for (_, a), (b, _) in pairwise(life.spans):
        sheet.line(LEFT + (a + 1) * width, middle, LEFT + b * width, middle, colour=VERMILION, dashed=True)
    for step in life.preempted:
        _draw_cross(sheet, LEFT + step * width, y + 0.3 * lane)
    if life.end is not None:
        x = LEFT + (life.end + 1) * width
        sheet.line(x, y + 0.03, x, y + lane - 0.03, width=1.6)


def _draw_work(sheet: Sheet, work: Work, y: float, lane: float, width: float, gap: int) -> None:
    """gap: steps since its last span, for the length of the arrow of its return."""
    x, w = LEFT + work.step * width, max(width - 0.015, 0.6 * width)
    low = y + lane - 0.02
    if work.kind == "prefill":
        sheet.box(x, y + 0.02, w, lane - 0.04, fill=COLOURS["prefill"], layer=2)
        if width >= 0.2:
            sheet.label(x + w / 2, y + lane / 2, str(work.tokens), colour="#ffffff", size=SMALL)
    else:
        # one unit for the token of the answer, one more for each draft
        unit = (lane - 0.04) / max(work.tokens, 2)
        for n in range(1 + work.accepted + work.rejected):
            kind = "decode" if n == 0 else ("accepted" if n <= work.accepted else "rejected")
            edge = VERMILION if kind == "rejected" else ""
            sheet.box(x, low - (n + 1) * unit, w, unit, fill=COLOURS[kind], edge=edge, layer=2)
    if work.resumed:
        _draw_return(sheet, x, y + 0.65 * lane, min(max(gap * width, 0.05), 0.12))


def _draw_cross(sheet: Sheet, x: float, y: float) -> None:
    for up in (-0.035, 0.035):
        sheet.line(x - 0.035, y - up, x + 0.035, y + up, colour=VERMILION, width=1.6, layer=4)


def _draw_return(sheet: Sheet, x: float, y: float, length: float = 0.12) -> None:
    sheet.line(x - length, y, x, y, colour=GREEN, width=1.4, arrow=True, layer=4)


def _draw_cache(sheet: Sheet, data: TimelinePicture, width: float) -> None:
    """Free blocks as a step line; held ones where the size of the cache is not known."""
    values = data.free if data.free is not None else data.held
    what = "free blocks" if data.free is not None else "held blocks"
    most, height = max(*values, data.num_blocks - 1 if data.num_blocks else 1, 1), 0.6
    top = sheet.height
    sheet.label(LEFT - 0.08, top + 0.14, what.split()[0], align="right")
    sheet.label(LEFT - 0.08, top + 0.28, "blocks", align="right")
    for step, value in enumerate(values):
        h = height * value / most
        sheet.box(LEFT + step * width, top + height - h, width, h, fill=tint(GREY, 0.45))
    sheet.line(LEFT, top + height, LEFT + len(values) * width, top + height, width=0.6)
    right = LEFT + len(values) * width + 0.05
    sheet.line(LEFT, top, right - 0.05, top, colour=PALE, width=0.6, dashed=True)
    sheet.label(right, top, f"{most}", align="left", size=SMALL, colour=GREY)
    sheet.label(right, top + height, "0", align="left", size=SMALL, colour=GREY)
    sheet.height = top + height + 0.12
    lowest = min(values) if data.free is not None else max(values)
    where = values.index(lowest)
    sheet.note(f"{'Fewest' if data.free is not None else 'Most'} {what}: {lowest}, after step {where}.", colour=INK)
