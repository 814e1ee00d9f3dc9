"""The slot mapping: which block and offset each token's KV goes to, and the sentinel -1 in the tail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conformance.figures.batch import MAX_TOKENS
from conformance.figures.look import VERMILION, Names
from conformance.figures.ragged import TokenPlace, need_tokens, token_places
from conformance.figures.ragged import block_size as told_block_size
from conformance.figures.sheet import Sheet
from conformance.figures.strip import Column, Row, draw_strip, thin_out
from runner_api import StepRecord
from runner_api.constants import PAD_SLOT_ID


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """One entry of a group's slot mapping. block, offset: where the slot lies; None for the sentinel.

    req_id, position: whose token it is; None in the tail. drawn: whether it has a column of its own. wrong: not the
    slot that the request's own table gives (in the tail: not the sentinel).
    """

    index: int
    req_id: str | None
    position: int | None
    slot: int
    block: int | None
    offset: int | None
    drawn: bool
    wrong: bool = False


@dataclass(frozen=True, slots=True)
class GroupSlots:
    """The slot mapping of one KV cache group."""

    group: int
    block_size: int
    places: tuple[SlotPlace, ...]


def slots_data(
    record: StepRecord, *, block_size: int | None = None, max_tokens: int = MAX_TOKENS
) -> tuple[GroupSlots, ...]:
    """Every entry of every group. block_size: of all groups; None: what the record's own slots say.

    With more than `max_tokens` entries, those whose position and slot go up by one on both sides are not drawn. Raises
    ConfigError for a step without tokens, and where no block size explains the slots.
    """
    need_tokens(record)
    tokens = token_places(record)
    groups = []
    for g in range(len(record.slot_mappings)):
        size = block_size or told_block_size(record, g)
        values = record.slot_mappings[g].tolist()
        places = []
        for i, slot in enumerate(values):
            real = slot != PAD_SLOT_ID
            wrong = _wrong(record, tokens[i], g, slot, size)
            drawn = wrong or len(values) <= max_tokens or not _inside(tokens, values, i)
            places.append(
                SlotPlace(
                    i, tokens[i].req_id, tokens[i].position, slot, slot // size if real else None,
                    slot % size if real else None, drawn, wrong,
                )
            )  # fmt: skip
        groups.append(GroupSlots(g, size, tuple(places)))
    return tuple(groups)


def _inside(tokens: tuple[Any, ...], values: list[int], i: int) -> bool:
    """Both neighbours are of the same request, and the slot follows from them."""
    if i in (0, len(values) - 1) or not tokens[i - 1].req_id == tokens[i].req_id == tokens[i + 1].req_id:
        return False
    step = 0 if values[i] == PAD_SLOT_ID else 1
    if not values[i - 1] + step == values[i] == values[i + 1] - step:
        return False
    a, here, b = (tokens[k].position for k in (i - 1, i, i + 1))
    return here is None or (a is not None and b is not None and a + 1 == here == b - 1)


def _wrong(record: StepRecord, token: TokenPlace, group: int, slot: int, size: int) -> bool:
    """Whether a slot is another one than the record's own table gives; what the record does not tell is not judged."""
    if token.req_id is None:
        return slot != PAD_SLOT_ID
    if group >= len(record.block_tables) or token.position is None:
        return False
    table = record.block_tables[group][record.row_of(token.req_id)]
    column, offset = divmod(token.position, size)
    return not 0 <= column < len(table) or slot != int(table[column]) * size + offset


def slots(
    record: StepRecord, *, block_size: int | None = None, names: Names | None = None, max_tokens: int = MAX_TOKENS
) -> Any:
    """Figure of the slot mapping (see the module)."""
    from conformance.figures.style import render

    data = slots_data(record, block_size=block_size, max_tokens=max_tokens)
    names = names or Names(record.req_ids)
    sheet = Sheet()
    sheet.title("The slot mapping: where each token's KV goes", "slot = block × block size + offset.")
    if not all(p.drawn for g in data for p in g.places):
        sheet.note("+n …: n more entries; position and slot go up by one (-1 stays -1).")
    if any(p.wrong for g in data for p in g.places):
        sheet.note("Framed: not the slot that the request's own block table gives, or not -1 in the tail.", VERMILION)
    for group in data:
        sheet.down(0.1)
        real = sum(p.req_id is not None for p in group.places)
        tail = len(group.places) - real
        which = f"Group {group.group}: blocks" if len(data) > 1 else "Blocks"
        clean = all(p.slot == PAD_SLOT_ID for p in group.places[real:])
        end = f", and a tail of {tail}{f' × {PAD_SLOT_ID}' if clean else ' that is not clean'}" if tail else ", no tail"
        sheet.label(
            0.15,
            sheet.height,
            f"{which} of {group.block_size} tokens; {real} token{'s' * (real != 1)}{end}",
            align="left",
            bold=True,
        )
        sheet.down(0.12)
        columns = thin_out([_column(p, names) for p in group.places], [p.drawn for p in group.places])
        rows = [Row("flat index", "index"), Row("position"), Row("block"), Row("offset"), Row("KV slot")]
        draw_strip(sheet, rows, columns, names)
    sheet.note(names.legend(record.req_ids))
    sheet.down(0.1)
    return render(sheet)


def _column(p: SlotPlace, names: Names) -> Column:
    texts = tuple("" if v is None else str(v) for v in (p.index, p.position, p.block, p.offset, p.slot))
    run = p.req_id or ""
    label = names.short(p.req_id) if run else "pad"
    return Column(texts, run, label, p.req_id, not run, wrong=frozenset({len(texts) - 1} if p.wrong else ()))
