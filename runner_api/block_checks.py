"""Are the blocks of a plan possible? Ids, room for every position, and who writes where.

Part of plan validation (runner_api/validation.py). Works on runs of slots inside one block, never on single tokens,
and looks at other requests only where they hold the very block that is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from runner_api.config import RunnerConfig
from runner_api.constants import NULL_BLOCK_ID
from runner_api.errors import PlanError
from runner_api.kv_cache import KVCacheConfig, KVCacheSpec
from runner_api.live_request import LiveRequest, Scheduled
from runner_api.plan import BlockIds, SchedulerOutput


def check_group_count(kv_cache_config: KVCacheConfig, where: str, req_id: str, block_ids: BlockIds) -> None:
    """Blocks come as one list per KV cache group."""
    if len(block_ids) != len(kv_cache_config.groups):
        raise PlanError(
            "blocks of another number of KV cache groups",
            code="MR-ERR-028",
            field=f"{where}.block_ids",
            req_id=req_id,
            got=len(block_ids),
            expected=len(kv_cache_config.groups),
        )


def check_blocks(kv_cache_config: KVCacheConfig, max_model_len: int, req_id: str, n: int, request: Scheduled) -> None:
    """Every scheduled position has a block, and every block that the plan brings is one of the cache."""
    num_blocks, computed = kv_cache_config.num_blocks, request.computed
    for g, group in enumerate(kv_cache_config.groups):
        spec, where = group.spec, f"block_ids (group {g})"
        count = request.num_blocks(g)
        if spec.has_slot_mapping and count * spec.block_size < computed + n:
            raise PlanError(
                "a scheduled position has no block",
                code="MR-ERR-039",
                field=where,
                req_id=req_id,
                got=f"{count} blocks of {spec.block_size}",
                expected=f"room for {computed + n} tokens",
            )
        more = request.more[g]
        if not more:
            continue
        width = spec.block_table_width(max_model_len)
        if count > width:
            raise PlanError(
                "more blocks than the table has columns", code="MR-ERR-040", field=where, req_id=req_id,
                got=count, expected=f"at most {width}", hint="Raise max_model_len",
            )  # fmt: skip
        if min(more) > NULL_BLOCK_ID and max(more) < num_blocks:
            continue
        # The null block stands in for blocks that a window has left behind, and for nothing else.
        behind = max(computed - spec.window_reach, 0) // spec.block_size if spec.window_reach else 0
        for column, block in enumerate(more, len(request.held[g])):
            if not 0 < block < num_blocks and not (block == NULL_BLOCK_ID and column < behind):
                raise PlanError(
                    "block id out of range",
                    code="MR-ERR-041",
                    field=where,
                    req_id=req_id,
                    got=block,
                    expected=f"1 <= id < num_blocks = {num_blocks} (column {column})",
                )


class Run(NamedTuple):
    """Slots that a plan writes inside one block: offsets low .. high-1 of `block`, for `req_id`."""

    block: int
    low: int
    high: int
    req_id: str


class BlockHolders:
    """Which live requests hold a block, and in which column: one dict per KV cache group with slots.

    Kept up to date as blocks come and requests go, so that a check asks only for the blocks that it sees written.
    Where the configuration sets a group's reach to 0 its tables keep entries behind a window that the spec does not
    tell, which may be somebody else's by now: nobody counts as a holder there.
    """

    def __init__(self, config: RunnerConfig, kv_cache_config: KVCacheConfig) -> None:
        self.specs = [group.spec for group in kv_cache_config.groups]
        reach = config.window_reach or [None] * len(self.specs)
        self._watched = [spec.has_slot_mapping and r != 0 for spec, r in zip(self.specs, reach, strict=True)]
        self._columns: list[dict[int, dict[str, int]]] = [{} for _ in self.specs]

    def add(self, req_id: str, block_ids: BlockIds, first_columns: list[int]) -> None:
        """Blocks that come to stand at `first_columns[g]` and behind in the request's tables."""
        for columns, watched, ids, first in zip(self._columns, self._watched, block_ids, first_columns, strict=True):
            if watched:
                for column, block in enumerate(ids, first):
                    columns.setdefault(int(block), {})[req_id] = column

    def remove(self, req_id: str, block_ids: BlockIds) -> None:
        """The request is gone, and with it its hold on every block."""
        for columns, ids in zip(self._columns, block_ids, strict=True):
            for block in ids:
                holders = columns.get(block)
                if holders is not None:
                    holders.pop(req_id, None)
                    if not holders:
                        del columns[block]

    def columns(self, group: int, block: int) -> Mapping[str, int]:
        """Request id to column, of each live request that holds the block."""
        return self._columns[group].get(block, {})


class Loss(NamedTuple):
    """A slot that `run` writes while `owner` has computed `position` in it."""

    run: Run
    offset: int
    owner: str
    position: int


def check_writes(
    plan: SchedulerOutput,
    scheduled: Mapping[str, Scheduled],
    holders: BlockHolders,
    requests: Mapping[str, LiveRequest],
    freed: Collection[str],
    owners: Collection[str],
) -> None:
    """No slot is written twice in a step, and none that holds what one of `owners` has computed.

    freed: requests whose blocks this plan gives away.
    """
    for g, spec in enumerate(holders.specs):
        if spec.has_slot_mapping:
            runs = _runs(plan, scheduled, g, spec.block_size)
            _check_one_writer(runs, g)
            for loss in _losses(runs, g, holders, requests, freed):
                if loss.owner in owners:
                    raise _lost(loss, g)


def find_losers(
    plan: SchedulerOutput,
    scheduled: Mapping[str, Scheduled],
    holders: BlockHolders,
    requests: Mapping[str, LiveRequest],
) -> set[str]:
    """Requests that have computed something in slots that the plan writes for others."""
    losers = set()
    for g, spec in enumerate(holders.specs):
        if spec.has_slot_mapping:
            runs = _runs(plan, scheduled, g, spec.block_size)
            losers |= {loss.owner for loss in _losses(runs, g, holders, requests, ())}
    return losers


def _losses(
    runs: list[Run], group: int, holders: BlockHolders, requests: Mapping[str, LiveRequest], freed: Collection[str]
) -> Iterator[Loss]:
    spec = holders.specs[group]
    for run in runs:
        for other, column in holders.columns(group, run.block).items():
            if other != run.req_id and other not in freed:
                offset = _first_computed(run, requests[other], column, spec)
                if offset is not None:
                    yield Loss(run, offset, other, column * spec.block_size + offset)


def _runs(plan: SchedulerOutput, scheduled: Mapping[str, Scheduled], group: int, size: int) -> list[Run]:
    runs = []
    for req_id, n in plan.num_scheduled_tokens.items():
        request = scheduled[req_id]
        start, end = request.computed, request.computed + int(n)
        for column in range(start // size, (end - 1) // size + 1):
            low, high = max(start - column * size, 0), min(end - column * size, size)
            runs.append(Run(request.block(group, column), low, high, req_id))
    return runs


def _check_one_writer(runs: list[Run], group: int) -> None:
    runs.sort()
    for first, second in pairwise(runs):
        if first.block == second.block and second.low < first.high:
            raise PlanError(
                "two writes to one slot in one step",
                code="MR-ERR-042",
                field=f"block_ids (group {group})",
                req_id=second.req_id,
                got=f"block {second.block} offset {second.low}, also written for {first.req_id!r}",
                expected="each slot written once (reading shared blocks is legal)",
            )


def _first_computed(run: Run, live: LiveRequest, column: int, spec: KVCacheSpec) -> int | None:
    """`live` holds the block at `column`: the first offset of the run at which it has computed what it may still read.

    Behind its window it may hold blocks that have long been given to somebody else. While drafts are in flight only
    the positions that are computed whatever becomes of them count.
    """
    first = column * spec.block_size
    oldest = 0 if spec.sliding_window is None else max(live.computed_upper - spec.window_reach, 0)
    low, high = max(run.low, oldest - first), min(run.high, live.computed_lower - first)
    return low if low < high else None


def _lost(loss: Loss, group: int) -> PlanError:
    return PlanError(
        "a write to what another live request has computed",
        code="MR-ERR-047",
        field=f"block_ids (group {group})",
        req_id=loss.run.req_id,
        got=f"block {loss.run.block} offset {loss.offset}, position {loss.position} of {loss.owner!r}",
        expected="a block of its own behind the shared ones",
        hint="Copy the block first (kv_cache_block_copies)",
    )


def check_block_operations(kv_cache_config: KVCacheConfig, plan: SchedulerOutput) -> None:
    """Blocks to blank and to copy are blocks of the cache."""
    ids = [*plan.new_block_ids_to_zero, *(i for pair in plan.kv_cache_block_copies for i in pair)]
    for block in ids:
        if not 0 < block < kv_cache_config.num_blocks:
            raise PlanError(
                "block id out of range", code="MR-ERR-041", field="new_block_ids_to_zero / kv_cache_block_copies",
                got=block, expected=f"1 <= id < num_blocks = {kv_cache_config.num_blocks}",
            )  # fmt: skip
