"""Draws what `sampling_data` found: a line for each token, a column with bars for each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance.figures.look import BLUE, GREY, INK, ORANGE, SMALL, VERMILION, cut, plain, tint
from conformance.figures.sampling import SamplingPicture, sampling_data
from conformance.figures.sheet import BOLD, Sheet, prose_width, wrapped
from runner_api import StepRecord

LINE = 0.22
TOKENS = 1.15  # the column of token ids
BREAKS = {"temperature": ("temper-", "ature"), "penalties": ("penal-", "ties")}  # where columns are narrow


def sampling(records: StepRecord | Sequence[StepRecord], req_id: str, **known: Any) -> Any:
    """Figure of one draw; the arguments are those of `sampling_data`."""
    from conformance.figures.style import render

    data = sampling_data(records, req_id, **known)
    sheet = Sheet()
    sheet.title(
        f"How request {cut(plain(req_id))} came to its token behind position {data.position}: {data.winner}",
        _story(data),
    )
    sheet.down(0.1)
    numbers = ["logit"] + ([] if data.noise is None else ["noise", "score"])
    left, width = TOKENS, (sheet.width - TOKENS - 0.15) / (len(data.steps) + 0.85 * len(numbers))
    width = min(width, 1.4)
    top = sheet.height
    # 1 heads
    details = [[part for line in s.detail for part in wrapped(line, SMALL, width - 0.06)] for s in data.steps]
    for c, step in enumerate(data.steps):
        x = left + c * width
        for k, line in enumerate((*_two_lines(step.name, width - 0.06), *details[c])):
            sheet.label(
                x + 0.03, top + k * 0.15, line, align="left", bold=k < 2, size=SMALL, colour=INK if k < 2 else GREY
            )
    start = left + len(data.steps) * width
    for c, name in enumerate(numbers):
        sheet.label(start + (c + 1) * 0.85 * width - 0.06, top + 0.15, name, align="right", bold=True, size=SMALL)
    sheet.label(left - 0.1, top + 0.3, "token", align="right", size=SMALL, colour=GREY)
    # 2 a line for each token, and one for all others
    y = top + 0.29 + 0.15 * max(1, *map(len, details))
    for n, token in enumerate(data.tokens):
        _draw_token(sheet, data, n, token, y, left, width, start)
        y += LINE
    sheet.label(left - 0.1, y + LINE / 2, "all others", align="right", colour=GREY, size=SMALL)
    for c, step in enumerate(data.steps):
        _draw_share(sheet, step.rest, left + c * width, y, width, tint(GREY, 0.4))
    y += LINE
    sheet.label(left - 0.1, y + LINE / 2, "tokens left", align="right", colour=GREY, size=SMALL)
    for c, step in enumerate(data.steps):
        sheet.label(left + c * width + 0.03, y + LINE / 2, str(step.left), align="left", colour=GREY, size=SMALL)
    sheet.height = y + LINE + 0.12
    if data.not_asked_for:
        sheet.note(f"Not asked for by this request: {', '.join(data.not_asked_for)}.")
    sheet.down(0.08)
    return render(sheet)


def _story(data: SamplingPicture) -> str:
    how = "Greedy: the best logit wins." if data.greedy else "The best sum of logit and noise wins."
    lead = "No other token is left." if data.second is None else f"It leads {data.second} by {data.margin:.4g}."
    drew = {"equal": "The runner drew it too."}.get(data.verdict, f"The runner drew {data.drawn}: {data.verdict}.")
    return f"{how} {lead} {drew}"


def _two_lines(name: str, width: float) -> tuple[str, str]:
    first, _, second = name.partition(" ")
    if prose_width(first, BOLD * SMALL) > width:
        first, second = BREAKS.get(name, (first, second))
    return ("", first) if not second else (first, second)


def _draw_token(
    sheet: Sheet, data: SamplingPicture, n: int, token: int, y: float, left: float, width: float, start: float
) -> None:  # fmt: skip
    middle, wins = y + LINE / 2, token == data.winner
    if wins:
        sheet.box(0.1, y + 0.005, sheet.width - 0.2, LINE - 0.01, fill=tint(ORANGE, 0.3), layer=0)
    mark = "winner" if wins else ("second" if token == data.second else "")
    if token == data.drawn and not wins:
        mark = "drawn"
    sheet.label(0.15, middle, mark, align="left", size=SMALL, bold=wins, colour=VERMILION if mark == "drawn" else GREY)
    sheet.label(left - 0.1, middle, str(token), align="right", bold=wins)
    for c, step in enumerate(data.steps):
        _draw_share(sheet, step.probabilities[n], left + c * width, y, width, ORANGE if wins else tint(BLUE, 0.6))
    numbers = [data.logits[n]] + ([] if data.noise is None else [data.noise[n], data.scores[n]])
    for c, value in enumerate(numbers):
        text = "out" if value == float("-inf") else f"{value:.3g}" if abs(value) >= 1e4 else f"{value:.2f}"
        last = c == len(numbers) - 1
        x = start + (c + 1) * 0.85 * width - 0.06
        sheet.label(x, middle, text, align="right", bold=wins and last, colour=GREY if text == "out" else INK)


def _draw_share(sheet: Sheet, share: float, x: float, y: float, width: float, colour: str) -> None:
    """A bar with its percentage; nothing but a dash for what is out."""
    if share > 0:
        sheet.box(x + 0.03, y + 0.04, max((width - 0.1) * share, 0.01), LINE - 0.08, fill=colour)
    text = "–" if share == 0 else ("<0.1%" if share < 0.001 else f"{100 * share:.1f}%")
    sheet.label(x + 0.06, y + LINE / 2, text, align="left", size=SMALL, colour=GREY if share == 0 else INK)
