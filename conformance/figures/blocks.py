"""Block tables, and the KV cache as a grid of blocks coloured by owner, with the slots of this step outlined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from conformance.figures.holdings import Holdings, follow
from conformance.figures.look import CELL, FAINT, GREY, INK, PALE, SMALL, VERMILION, Names
from conformance.figures.ragged import block_size as told_block_size
from conformance.figures.ragged import token_places
from conformance.figures.sheet import BOLD, Sheet, text_width
from runner_api import StepRecord
from runner_api.constants import NULL_BLOCK_ID

# A cache of more blocks is drawn without its free ones, and more blocks than the second number are not drawn.
MAX_FREE, MAX_BLOCKS = 240, 800
# Requests with longer tables are drawn without the middle of theirs.
MAX_TABLE = 9


@dataclass(frozen=True, slots=True)
class TableLine:
    """The block table of one live request in one group; seq_len: tokens with KV; scheduled: by this step."""

    req_id: str
    group: int
    blocks: tuple[int, ...]
    seq_len: int
    scheduled: bool


@dataclass(frozen=True, slots=True)
class BlockCell:
    """One block. owners: requests whose table holds it, in the order of the tables; none: free (0: the null block).

    size: its slots (0: not known); of groups of several sizes, that of the one which writes it, else of its last owner.
    filled: for each owner, how many of them hold KV by its own length. written: offsets that this step writes,
    ascending. wrong: those of them that a request without the block in its table writes, or padding, or two tokens.
    drawn: False where the picture leaves it out.
    """

    block: int
    owners: tuple[str, ...]
    size: int
    filled: tuple[int, ...]
    written: tuple[int, ...]
    wrong: tuple[int, ...] = ()
    drawn: bool = True


@dataclass(frozen=True, slots=True)
class BlocksPicture:
    """All tables (requests of the step in batch order, then the others), and blocks, ascending.

    block_size: of each group. blocks: all that are held or written, and of a small cache the free ones too. free: how
    many free ones are not among them. complete: whether the number of blocks is known.
    """

    block_size: tuple[int, ...]
    tables: tuple[TableLine, ...]
    blocks: tuple[BlockCell, ...]
    complete: bool
    free: int = 0


def blocks_data(
    records: StepRecord | Sequence[StepRecord], *, num_blocks: int | None = None, block_size: int | None = None
) -> BlocksPicture:
    """Tables and blocks after the last of the records; earlier ones tell of requests that it leaves out.

    num_blocks: of the cache, the null block included; None: up to the highest one held. block_size: of all groups;
    None: what the records' own slots say. Raises ConfigError where nothing says it.
    """
    record, holdings = follow(records)
    steps = [records] if isinstance(records, StepRecord) else records
    groups = max((len(h.blocks) for h in holdings.live.values()), default=0)
    sizes = tuple(block_size or _told(steps, g) for g in range(groups))
    return blocks_held(record, holdings, sizes, num_blocks)


def blocks_held(
    record: StepRecord, holdings: Holdings, sizes: Sequence[int], num_blocks: int | None = None
) -> BlocksPicture:
    """The same for whoever follows the steps himself. sizes: of the blocks of each group, 0 where it is not known."""
    order = [*record.req_ids, *(r for r in holdings.live if r not in record.req_ids)]
    tables = tuple(
        TableLine(r, g, holdings.live[r].blocks[g], holdings.live[r].seq_len, r in record.req_ids)
        for g in range(len(sizes))
        for r in order
        if g < len(holdings.live[r].blocks)
    )
    cells, free = _cells(record, tables, tuple(sizes), num_blocks)
    return BlocksPicture(tuple(sizes), tables, cells, num_blocks is not None, free)


def _told(steps: Sequence[StepRecord], group: int) -> int:
    """What the last step that wrote anything says."""
    last = next((s for s in reversed(steps) if s.num_tokens), steps[-1])
    return told_block_size(last, group)


def _cells(
    record: StepRecord, tables: tuple[TableLine, ...], sizes: tuple[int, ...], num_blocks: int | None
) -> tuple[tuple[BlockCell, ...], int]:
    """The blocks of the picture, and how many free ones are left out.

    What is written may be anything, so that it never tells how large the cache is.
    """
    filled: dict[int, dict[str, int]] = {}  # by block, then by owner
    size_of: dict[int, int] = {}
    for line in tables:
        size = sizes[line.group]
        for n, block in enumerate(line.blocks):
            if block != NULL_BLOCK_ID:
                size_of[block] = size
                mine = filled.setdefault(block, {})
                mine[line.req_id] = max(mine.get(line.req_id, 0), min(max(line.seq_len - n * size, 0), size))
    written, wrong, written_size = _writes(record, tables, sizes)
    size_of |= written_size
    total = max([NULL_BLOCK_ID, *filled]) + 1 if num_blocks is None else num_blocks
    met = {*filled, *written}
    everything = met | set(range(total)) if total <= MAX_FREE else met
    cells = []
    for k, block in enumerate(sorted(everything, key=lambda b: (b not in written, b not in filled, b))):
        mine, size = filled.get(block, {}), size_of.get(block, max(sizes, default=0))
        offsets, bad = (tuple(sorted(found.get(block, ()))) for found in (written, wrong))
        counts = tuple(min(count, size) for count in mine.values())
        cells.append(BlockCell(block, tuple(mine), size, counts, offsets, bad, k < MAX_BLOCKS))
    free = total - sum(0 <= b < total for b in everything)
    return tuple(sorted(cells, key=lambda c: c.block)), free


def _writes(
    record: StepRecord, tables: tuple[TableLine, ...], sizes: tuple[int, ...]
) -> tuple[dict[int, set[int]], dict[int, set[int]], dict[int, int]]:
    """Offsets that the step writes, by block; those of them that are wrong (see BlockCell); and sizes of the blocks."""
    holds = {(line.group, line.req_id, block) for line in tables for block in line.blocks if block != NULL_BLOCK_ID}
    written: dict[int, set[int]] = {}
    wrong: dict[int, set[int]] = {}
    size_of: dict[int, int] = {}
    for place in token_places(record) if record.num_reqs else ():
        for g, (size, slot) in enumerate(zip(sizes, place.slots, strict=False)):
            if slot < 0 or not size:
                continue
            block, offset = divmod(slot, size)
            size_of[block] = max(size, size_of.get(block, 0))
            if (g, place.req_id, block) not in holds or offset in written.get(block, ()):
                wrong.setdefault(block, set()).add(offset)
            written.setdefault(block, set()).add(offset)
    return written, wrong, size_of


def blocks(
    records: StepRecord | Sequence[StepRecord], *, num_blocks: int | None = None, block_size: int | None = None,
    names: Names | None = None,
) -> Any:  # fmt: skip
    """Figure of tables and cache (see the module)."""
    from conformance.figures.style import render

    data = blocks_data(records, num_blocks=num_blocks, block_size=block_size)
    names = names or Names(line.req_id for line in data.tables)
    sheet = Sheet()
    sizes = sorted(set(data.block_size))
    held = sum(bool(c.owners) for c in data.blocks)
    sheet.title(
        f"Block tables and KV cache: blocks of {' or '.join(map(str, sizes)) or '?'} tokens, {held} held",
        "A block is coloured by the request whose table holds it, as far as it is full. Framed: what this step writes. "
        "Grey name: not in this step.",
    )
    _draw_tables(sheet, data, names)
    _draw_cache(sheet, data, names)
    sheet.note(names.legend(line.req_id for line in data.tables))
    sheet.down(0.1)
    return render(sheet)


# -- tables ---------------------------------------------------------------------------------------------------


def _draw_tables(sheet: Sheet, data: BlocksPicture, names: Names) -> None:
    texts = max((text_width(str(b), CELL) for t in data.tables for b in t.blocks), default=0)
    cell = max(0.28, texts + 0.07)
    heads = (1.12 * text_width(names.short(t.req_id), CELL) + text_width(f"{t.seq_len}:", CELL) for t in data.tables)
    head = max(0.98, 0.1 + max(heads, default=0))
    for g in range(len(data.block_size)):
        lines = [t for t in data.tables if t.group == g]
        sheet.down(0.1)
        which = f"Block tables of group {g}" if len(data.block_size) > 1 else "Block tables"
        sheet.label(0.15, sheet.height, f"{which} (request, tokens with KV: its blocks)", align="left", bold=True)
        sheet.down(0.14)
        columns = 2 if len(lines) > 12 else 1
        most = MAX_TABLE if columns == 2 else 2 * MAX_TABLE
        most = min(most, int(((sheet.width - 0.3) / columns - head - 0.22) / cell) - 1)
        per_column = -(-len(lines) // columns)
        top = sheet.height
        for k, line in enumerate(lines):
            x = 0.15 + (k // per_column) * (sheet.width - 0.3) / columns
            _draw_table(sheet, line, x, top + (k % per_column) * 0.2, cell, most, head, names)
        sheet.height = top + per_column * 0.2
        if not lines:
            sheet.note("No request is held.")


def _draw_table(
    sheet: Sheet, line: TableLine, x: float, y: float, cell: float, most: int, head: float, names: Names
) -> None:  # fmt: skip
    middle = y + 0.09
    sheet.label(
        x, middle, names.short(line.req_id), align="left", bold=line.scheduled, colour=INK if line.scheduled else GREY
    )
    sheet.label(x + head, middle, f"{line.seq_len}:", align="right", colour=GREY)
    x += head + 0.07
    for block in _shortened(line.blocks, most):
        if block is None:
            more = f"+{len(line.blocks) - most}"
            wide = max(cell, text_width(more, SMALL) + 0.1)
            sheet.label(x + wide / 2 - 0.01, middle, more, colour=GREY, size=SMALL)
            x += wide - cell
        else:
            null = block == NULL_BLOCK_ID
            sheet.box(
                x, y, cell - 0.02, 0.18, fill="#ffffff" if null else names.fill(line.req_id), edge=PALE if null else ""
            )
            sheet.label(x + cell / 2 - 0.01, middle, str(block), colour=GREY if null else INK)
        x += cell


def _shortened(items: tuple[int, ...], most: int) -> list[int | None]:
    """At most so many, with None for those left out in the middle."""
    if len(items) <= most + 1:
        return list(items)
    front = most // 3
    return [*items[:front], None, *items[len(items) - (most - front) :]]


# -- cache ----------------------------------------------------------------------------------------------------


def _draw_cache(sheet: Sheet, data: BlocksPicture, names: Names) -> None:
    cells = [c for c in data.blocks if c.drawn]
    sheet.down(0.14)
    heading = "The cache, block by block" if data.complete else "The cache, up to the highest block held"
    sheet.label(0.15, sheet.height, heading, align="left", bold=True)
    sheet.down(0.12)
    texts = (text_width(f"{c.block} ", SMALL) + BOLD * text_width(_owner(c, names), SMALL) for c in cells)
    width, height = max(0.6, max(texts, default=0) + 0.06), 0.34
    per_line = int((sheet.width - 0.3) / width)
    top = sheet.height
    for k, cell in enumerate(cells):
        _draw_block(
            sheet, cell, 0.15 + (k % per_line) * width, top + (k // per_line) * height, width - 0.06, height - 0.07,
            names,
        )  # fmt: skip
    sheet.height = top + -(-len(cells) // per_line) * height + 0.05
    if any(len(c.owners) > 1 for c in cells):
        sheet.note("n req.: in n tables, as a shared prefix, or as an entry behind a sliding window that was given on.")
    if any(c.wrong for c in cells):
        sheet.note(
            "Orange frame: written by a request that does not own the block, by padding, or twice.", colour=VERMILION
        )
    free = data.free + sum(not c.drawn and not c.owners for c in data.blocks)
    left_out = sum(not c.drawn and bool(c.owners) for c in data.blocks)
    if free:
        sheet.note(f"{free} blocks that nobody holds are not drawn.")
    if left_out:
        sheet.note(f"{left_out} held blocks that this step does not write are not drawn either.")


def _owner(cell: BlockCell, names: Names) -> str:
    if cell.block == NULL_BLOCK_ID:
        return "null"
    if len(cell.owners) < 2:
        return names.short(cell.owners[0]) if cell.owners else ""
    return f"{len(cell.owners)} req."


def _draw_block(
    sheet: Sheet, cell: BlockCell, x: float, y: float, width: float, height: float, names: Names
) -> None:  # fmt: skip
    size = max(cell.size, 1)
    # 1 the name above, the slots below
    bar = 0.11
    middle = y + (height - bar) / 2
    sheet.label(x + 0.02, middle, str(cell.block), align="left", size=SMALL, colour=GREY)
    sheet.label(x + width - 0.02, middle, _owner(cell, names), align="right", size=SMALL, bold=bool(cell.owners))
    low = y + height - bar
    sheet.box(x, low, width, bar, fill=FAINT)
    # 2 as far as it is full, one stripe for each owner
    for k, (owner, filled) in enumerate(zip(cell.owners, cell.filled, strict=True)):
        part = bar / len(cell.owners)
        sheet.box(x, low + k * part, width * filled / size, part, fill=names.fill(owner))
    sheet.box(x, y, width, height, edge=names.stroke(cell.owners[0]) if cell.owners else PALE, line=0.8)
    # 3 what this step writes
    right = tuple(offset for offset in cell.written if offset not in cell.wrong)
    for written, colour in ((right, INK), (cell.wrong, VERMILION)):
        for _, run in groupby(enumerate(written), key=lambda pair: pair[1] - pair[0]):
            offsets = [offset for _, offset in run]
            sheet.box(
                x + width * offsets[0] / size, low - 0.01, width * len(offsets) / size, bar + 0.02, edge=colour,
                line=1.4, layer=4,
            )  # fmt: skip
