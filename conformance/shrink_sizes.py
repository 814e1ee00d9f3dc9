"""Smaller worlds for the same story: fewer rows, tokens, blocks and groups, and nothing that is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from conformance.driver import WorldSize
from conformance.story import Close, Story
from runner_api import RunnerConfig, WitnessConfig, WitnessGroup

_SMALL = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def size_weight(story: Story) -> tuple[Any, ...]:
    """Part of `shrink.weight`: groups and options, then sizes, then how far the blocks are out of order."""
    config, groups = story.size.config, story.size.model.groups
    options = (
        len(groups) - 1 + sum(g.sliding_window is not None for g in groups) + (config.reasoning is not None)
        + (config.logprobs_mode != "raw_logprobs") + (config.initial_free_rows is not None)
        + (config.reorder_batch_threshold is not None) + len(config.record) + config.num_speculative_tokens
    )  # fmt: skip
    sizes = config.max_num_reqs + config.max_num_batched_tokens + config.max_model_len
    blocks = sum(g.block_size for g in groups) + sum(g.sliding_window or 0 for g in groups)
    order = story.block_order
    disorder = sum(a > b for a, b in pairwise(order))
    return options, sizes, blocks, story.size.num_blocks, disorder


def plainer_sizes(story: Story) -> Iterator[Story]:
    """Stories in smaller worlds. Whether what happens still fits is seen when they are told."""
    size = story.size
    for config in _configs(size.config):
        yield replace(story, size=replace(size, config=config))
    for model in _models(size.model):
        yield replace(story, size=replace(size, model=model))
    if size.config.num_speculative_tokens:
        yield from _fewer_drafts(story)
    if list(story.block_order) != sorted(story.block_order):
        yield replace(story, block_order=tuple(sorted(story.block_order)))
    for n in _lower(size.num_blocks, 2):
        order = tuple(b for b in story.block_order if b < n)
        yield replace(story, size=WorldSize(size.config, size.model, n), block_order=order)


def _configs(config: RunnerConfig) -> Iterator[RunnerConfig]:
    plain = RunnerConfig()
    for name in ("reasoning", "logprobs_mode", "initial_free_rows", "reorder_batch_threshold"):
        if getattr(config, name) != getattr(plain, name):
            yield replace(config, **{name: getattr(plain, name)})
    for part in sorted(config.record):
        yield replace(config, record=config.record - {part})
    for n in _lower(config.max_num_reqs, 1):
        yield _rows(config, n)
    for n in _lower(config.max_num_batched_tokens, 1):
        yield replace(config, max_num_batched_tokens=n)
    for n in _lower(config.max_model_len, 2):
        yield replace(config, max_model_len=n)


def with_rows(size: WorldSize, n: int) -> WorldSize:
    """The same world with n rows, fewer than it has."""
    return replace(size, config=_rows(size.config, n))


def _rows(config: RunnerConfig, n: int) -> RunnerConfig:
    rows = config.initial_free_rows
    kept = None if rows is None else tuple(r for r in rows if r < n)
    return replace(config, max_num_reqs=n, initial_free_rows=kept)


def _models(model: WitnessConfig) -> Iterator[WitnessConfig]:
    groups = model.groups
    if len(groups) > 1:
        yield from (replace(model, groups=(g,)) for g in groups)
    for n, g in enumerate(groups):
        for other in _groups(g):
            yield replace(model, groups=(*groups[:n], other, *groups[n + 1 :]))


def _groups(g: WitnessGroup) -> Iterator[WitnessGroup]:
    if g.sliding_window is not None:
        yield replace(g, sliding_window=None)
        yield from (replace(g, sliding_window=n) for n in _lower(g.sliding_window, 1))
    yield from (replace(g, block_size=n) for n in _lower(g.block_size, 2))


def _fewer_drafts(story: Story) -> Iterator[Story]:
    """Fewer drafts at once; the masks have a row for each."""
    config = story.size.config
    for k in range(config.num_speculative_tokens):
        actions = [
            replace(a, masks=tuple((r, m[: 1 + k]) for r, m in a.masks)) if isinstance(a, Close) else a
            for a in story.actions
        ]
        size = replace(story.size, config=replace(config, num_speculative_tokens=k))
        yield replace(story, size=size, actions=tuple(actions))


def _lower(value: int, least: int) -> Iterator[int]:
    """Small numbers first, then one less."""
    yield from dict.fromkeys(n for n in (*_SMALL, value // 2, value - 1) if least <= n < value)
