"""The ragged batch of one step: requests as coloured runs on the flat token axis, decodes first, padding hatched.

For each token its id, position and KV slot; where each request begins (`query_start_loc`) and which tokens are asked
for logits (`logits_indices`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conformance.figures.look import VERMILION, Names
from conformance.figures.ragged import RequestPlace, TokenPlace, need_tokens, request_places, token_places
from conformance.figures.sheet import Sheet
from conformance.figures.strip import Column, Row, draw_strip, thin_out
from runner_api import StepRecord

# Batches of more tokens are drawn without the inner tokens of long runs.
MAX_TOKENS = 100
MAX_COLUMNS = 320
# Pointers off the axis that are named one by one.
MAX_LOST = 12


@dataclass(frozen=True, slots=True)
class BatchPicture:
    """What the picture shows. drawn: for each token place, whether it has a column of its own.

    lost_logits: (row, index) of each of logits_indices that is no place of the axis. lost_starts: (entry, value) of
    each of query_start_loc that is none, nor the axis's end.
    """

    tokens: tuple[TokenPlace, ...]
    requests: tuple[RequestPlace, ...]
    drawn: tuple[bool, ...]
    lost_logits: tuple[tuple[int, int], ...] = ()
    lost_starts: tuple[tuple[int, int], ...] = ()


def batch_data(record: StepRecord, *, max_tokens: int = MAX_TOKENS) -> BatchPicture:
    """Every token and request place of the step. Raises ConfigError for a step without tokens.

    With more than `max_tokens` places, the inside of a run is left out where positions and slots go up by one: what is
    left out can be told from what is drawn.
    """
    need_tokens(record)
    tokens = token_places(record)
    drawn = (True,) * len(tokens)
    if len(tokens) > max_tokens:
        drawn = tuple(_is_corner(tokens, i) for i in range(len(tokens)))
        if sum(drawn) > MAX_COLUMNS:
            drawn = tuple(_is_end(tokens, i) for i in range(len(tokens)))
    return BatchPicture(tokens, request_places(record), drawn, *lost_pointers(record, len(tokens)))


def lost_pointers(record: StepRecord, places: int) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """`lost_logits` and `lost_starts` of a BatchPicture whose axis has so many places."""
    logits, starts = record.logits_indices.tolist(), record.query_start_loc.tolist()
    return (
        tuple((row, i) for row, i in enumerate(logits) if not 0 <= i < places),
        tuple((k, i) for k, i in enumerate(starts) if not 0 <= i <= places),
    )


def _is_end(tokens: tuple[TokenPlace, ...], i: int) -> bool:
    """The first or last of its request, or asked for logits."""
    ends = i in (0, len(tokens) - 1) or tokens[i - 1].req_id != tokens[i].req_id != tokens[i + 1].req_id
    before = i == 0 or tokens[i - 1].req_id != tokens[i].req_id
    after = i == len(tokens) - 1 or tokens[i + 1].req_id != tokens[i].req_id
    return ends or before or after or bool(tokens[i].logits_rows) or tokens[i].starts


def _is_corner(tokens: tuple[TokenPlace, ...], i: int) -> bool:
    """An end, or a place at which slots or positions do not just go up by one."""
    if _is_end(tokens, i):
        return True
    here = tokens[i]
    if here.padding:
        return tokens[i - 1].slots != here.slots
    return not (_follows(tokens[i - 1], here) and _follows(here, tokens[i + 1]))


def _follows(a: TokenPlace, b: TokenPlace) -> bool:
    up = all(x + 1 == y for x, y in zip(a.slots, b.slots, strict=True))
    return up and a.position is not None and b.position is not None and a.position + 1 == b.position


def batch(record: StepRecord, *, names: Names | None = None, max_tokens: int = MAX_TOKENS) -> Any:
    """Figure of one step's batch (see the module). names: of the requests, for colours that several pictures share."""
    from conformance.figures.style import render

    data = batch_data(record, max_tokens=max_tokens)
    names = names or Names(record.req_ids)
    sheet = Sheet()
    sheet.title(_title(record))
    sheet.note(
        "A blue index is an entry of query_start_loc: there a request begins, or the padding. ▲n: row n of the logits."
    )
    if not all(data.drawn):
        sheet.note(_left_out(data))
    sheet.note(lost_text(data.lost_logits, data.lost_starts), VERMILION)
    sheet.down(0.06)
    groups = len(record.slot_mappings)
    rows = [
        Row("flat index", "index"), Row("token id"), Row("position"),
        *(Row("KV slot" if groups == 1 else f"KV slot, group {g}") for g in range(groups)), Row("logits row", "mark"),
    ]  # fmt: skip
    columns = thin_out([_token_column(t, groups, names) for t in data.tokens], data.drawn)
    draw_strip(sheet, rows, columns, names)
    _draw_requests(sheet, record, data.requests, names)
    sheet.note(names.legend(record.req_ids))
    sheet.down(0.1)
    return render(sheet)


def _left_out(data: BatchPicture) -> str:
    corners = all(d or not _is_corner(data.tokens, i) for i, d in enumerate(data.drawn))
    if corners:
        return "+n …: n more tokens, whose positions and slots go up by one from the cell before (-1 stays -1)."
    return "+n …: n more tokens of the request, at consecutive positions; their slots are not drawn (see `slots`)."


def lost_text(logits: Sequence[tuple[int, int]], starts: Sequence[tuple[int, int]]) -> str:
    """What points at no place of the axis; empty where nothing does."""
    lost = [f"▲{row} at {i}" for row, i in logits]
    lost += [f"query_start_loc[{k}] = {i}" for k, i in starts]
    more = f", and {len(lost) - MAX_LOST} more" if len(lost) > MAX_LOST else ""
    return f"Not on the axis: {', '.join(lost[:MAX_LOST])}{more}." if lost else ""


def _title(record: StepRecord) -> str:
    def many(n: int, padded: int, what: str) -> str:
        text = f"{n} {what}{'s' * (n != 1)}"
        return f"{text}, padded to {padded}" if padded > n else text

    return (
        f"The batch: {many(record.num_reqs, record.num_reqs_padded, 'request')}; "
        f"{many(record.num_tokens, record.num_tokens_padded, 'token')}"
    )


def _token_column(t: TokenPlace, groups: int, names: Names) -> Column:
    slots = [str(s) for s in t.slots] + [""] * (groups - len(t.slots))
    mark = f"▲{','.join(map(str, t.logits_rows))}" if t.logits_rows else ""
    texts = (
        str(t.index), "" if t.token_id is None else str(t.token_id), "" if t.position is None else str(t.position),
        *slots, mark,
    )  # fmt: skip
    run = t.req_id if t.req_id is not None else ""
    return Column(texts, run, names.short(t.req_id) if run else "pad", t.req_id, t.padding, strong=t.starts)


def _draw_requests(sheet: Sheet, record: StepRecord, requests: tuple[RequestPlace, ...], names: Names) -> None:
    sheet.down(0.1)
    sheet.label(0.15, sheet.height, "Its requests, in batch order", align="left", bold=True)
    sheet.down(0.12)
    rows = [
        Row("batch index", "index"), Row("kind"), Row("row"), Row("query_start_loc"), Row("seq_len"),
        Row("sampled"),
    ]  # fmt: skip
    columns = []
    for p in requests:
        kind = {"drafts": f"d+{p.end - p.start - 1}", "decode": "dec", "prefill": f"p {p.end - p.start}"}
        sampled = (p.fault or " ".join(map(str, p.sampled)) or "none") if p.req_id else ""
        texts = (
            str(p.index), kind.get(p.kind, ""), "" if p.row is None else str(p.row), str(p.start), str(p.seq_len),
            sampled,
        )  # fmt: skip
        run = p.req_id if p.req_id is not None else ""
        wrong = frozenset({len(texts) - 1} if p.fault else ())
        columns.append(Column(texts, run, names.short(p.req_id) if run else "pad", p.req_id, not run, wrong=wrong))
    draw_strip(sheet, rows, columns, names)
    if any(p.fault for p in requests):
        sheet.note("Framed: an error and no token. The logits held a NaN, or left no token to draw.", VERMILION)
    end = f" query_start_loc ends at {int(record.query_start_loc[-1])}." if len(record.query_start_loc) else ""
    sheet.note(
        "dec: one token (an answer's, or the last of a prompt); d+n: an answer's token and n drafts; p n: n tokens of "
        f"a prompt.{end}"
    )
