"""Plans of a world are always legal, every kind of action occurs, and the truth is the dense witness model's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from conformance.driver import KINDS, PALETTE, REASONING, RandomDriver, draw_size, palette
from conformance.truth import witness_logits
from conformance.world import EOS_TOKEN_IDS, GREEDY, PlanWorld
from runner_api import (
    NULL_BLOCK_ID,
    Capability,
    PlanValidator,
    RunnerConfig,
    SamplingParams,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
)

ACTIONS = {
    "add", "chunk", "decode", "preempt", "resume", "resume_same_plan", "finish", "abort_running", "abort_waiting",
    "abort_unknown", "empty_step", "add_without_tokens", "prefix_hit", "block_copy", "exhausted", "window_eviction",
    "padded", "verify",
}  # fmt: skip


def small_world(num_blocks: int = 40, window: int | None = None, **changes: int) -> PlanWorld:
    config = RunnerConfig(**{"max_num_reqs": 4, "max_num_batched_tokens": 32, "max_model_len": 40, **changes})
    groups = (WitnessGroup(4),) if window is None else (WitnessGroup(4), WitnessGroup(4, window))
    return PlanWorld(config, group_kv_cache_specs(WitnessConfig(groups=groups).kv_cache_specs(), num_blocks), 64)


def take_one_token(world: PlanWorld, **padding: int) -> object:
    step = world.close(**padding)
    world.observe({r: [9] if t.samples else [] for r, t in step.truth.requests.items()})
    return step


def drive(kind: str, seed: int, steps: int) -> Counter[str]:
    """A world without a runner: tokens are random, plans go to the validator alone."""
    random = np.random.default_rng(seed)
    size = draw_size(kind, random)
    cache = group_kv_cache_specs(size.model.kv_cache_specs(), size.num_blocks)
    world = PlanWorld(size.config, cache, size.model.vocab_size)
    driver = RandomDriver(random)
    validator = PlanValidator(size.config, cache, size.model.vocab_size, frozenset(Capability))
    for _ in range(steps):
        step = driver.next_step(world)
        validator.check(step.plan)
        validator.commit(step.plan)
        assert validator.requests.keys() == world.running.keys()
        tokens = {r: [int(random.integers(64))] if t.samples else [] for r, t in step.truth.requests.items()}
        if step.forced is not None:
            rows = zip(step.truth.order, step.forced.token_ids.tolist(), step.forced.num_sampled, strict=True)
            tokens = {r: taken[:n] for r, taken, n in rows}
        world.observe(tokens, step.drafts_held())
        owned = [b for r in world.running.values() for g, ids in enumerate(r.blocks) for b in ids[r.evicted[g] :]]
        assert not set(owned) & world.free_blocks, "a block is free and held"
        assert NULL_BLOCK_ID not in owned
    return world.counts


def test_plans_are_legal_and_every_action_occurs() -> None:
    counts: Counter[str] = Counter()
    for kind in KINDS:
        for seed in range(12):
            counts += drive(kind, seed, 40)
    assert not ACTIONS - counts.keys()


def test_the_same_seed_gives_the_same_plans() -> None:
    assert drive("groups", 7, 30) == drive("groups", 7, 30)


def test_an_action_that_is_not_possible_changes_nothing() -> None:
    world = small_world(num_blocks=4)  # three blocks of four tokens
    assert world.add([1] * 8, 8, req_id="a")
    assert not world.add([2] * 8, 8, req_id="b"), "two blocks are needed and one is left"
    assert not world.schedule("a", 1), "it is in the plan already"
    assert not world.preempt("a")
    assert not world.resume("a", 1)
    assert len(world.free_blocks) == 1
    step = world.close()
    assert list(step.plan.num_scheduled_tokens) == ["a"]
    assert world.counts["exhausted"] == 1


def test_a_prefix_hit_shares_full_blocks_and_survives_its_owner() -> None:
    world = small_world()
    world.add(list(range(10)), 10, req_id="a")
    take_one_token(world)
    first_two = world.running["a"].blocks[0][:2]
    world.finish("a")
    assert set(first_two) <= world.kept_blocks()
    (ghost,) = world.hit_sources()
    assert world.add_with_prefix(ghost, [50], 5)
    (new,) = world.close().plan.scheduled_new_reqs
    assert new.block_ids[0][:2] == first_two
    assert new.num_computed_tokens == 8
    assert new.prefill_token_ids == [0, 1, 2, 3, 4, 5, 6, 7, 50]


def test_a_copy_names_source_and_fresh_destination() -> None:
    world = small_world()
    world.add(list(range(10)), 10, req_id="a")
    take_one_token(world)
    source = world.running["a"]
    assert world.add_with_copy(source, 6, [50], 1)
    assert world.removable() == [], "the source must stay until the plan is closed"
    plan = world.close().plan
    ((copied_from, copied_to),) = plan.kv_cache_block_copies
    (new,) = plan.scheduled_new_reqs
    assert copied_from == source.blocks[0][1]
    assert new.block_ids[0][:2] == [source.blocks[0][0], copied_to]
    assert plan.new_block_ids_to_zero == [copied_to]


def test_blocks_behind_the_window_are_given_back() -> None:
    world = small_world(window=5)
    world.add(list(range(14)), 14, req_id="a")
    take_one_token(world)
    request = world.running["a"]
    assert request.evicted == [0, 2], "positions 0 .. 9 of 14 are out of reach"
    assert set(request.blocks[1][:2]) <= world.free_blocks


def test_a_resumed_request_knows_its_outputs() -> None:
    world = small_world()
    world.add([1, 2, 3], 3, req_id="a")
    take_one_token(world)
    world.preempt("a")
    assert world.resume("a", 2)
    step = world.close()
    (new,) = step.plan.scheduled_new_reqs
    assert (new.prompt_token_ids, new.prefill_token_ids) == ([1, 2, 3], [1, 2, 3, 9])
    assert step.truth.requests["a"].input_ids == (1, 2)
    assert not step.truth.requests["a"].samples


def test_a_padded_descriptor_stays_within_the_runner() -> None:
    world = small_world()
    world.add([1, 2, 3], 3, req_id="a")
    descriptor = world.close(pad_tokens=100, pad_reqs=100).descriptor
    assert descriptor is not None
    assert (descriptor.num_tokens, descriptor.num_reqs) == (32, 4)


@pytest.mark.parametrize("window", [None, 3])
def test_dense_logits_see_all_keys_or_the_window(window: int | None) -> None:
    config = WitnessConfig(groups=(WitnessGroup(4, window),))
    long, other = witness_logits(config, [[1, 2, 3, 4, 5], [9, 2, 3, 4, 5]])
    alone = witness_logits(config, [[1, 2, 3, 4, 5]])[0]
    assert np.array_equal(long, alone), "neighbours do not matter"
    assert np.array_equal(long, other) == (window is not None), "the first token is out of the window's reach"


# -- what requests ask for ----------------------------------------------------------------------------------------


def asked(kind: str, offered: frozenset[Capability], seed: int = 0, steps: int = 60) -> list[SamplingParams]:
    """Parameters of every request that a world of this kind adds."""
    random = np.random.default_rng(seed)
    size = draw_size(kind, random, offered=offered)
    cache = group_kv_cache_specs(size.model.kv_cache_specs(), size.num_blocks)
    world, driver = PlanWorld(size.config, cache, 64), RandomDriver(random, offered)
    found = []
    for _ in range(steps):
        step = driver.next_step(world)
        found += [n.sampling_params for n in step.plan.scheduled_new_reqs]
        world.observe({r: [1] if t.samples else [] for r, t in step.truth.requests.items()}, step.drafts_held())
    return found


def test_requests_ask_for_what_is_offered_and_for_no_more() -> None:
    everything = frozenset(Capability)
    met = frozenset().union(*(p.required_capabilities() for p in asked("wide", everything, steps=200)))
    assert met >= {c for p in PALETTE for c in p.required_capabilities()}
    for gone in (Capability.PENALTIES, Capability.SEEDED_SAMPLING, Capability.GRAMMAR, Capability.THINKING_BUDGET):
        needs = frozenset().union(*(p.required_capabilities() for p in asked("plain", everything - {gone})))
        assert gone not in needs
    assert all(p == GREEDY for p in asked("plain", frozenset()))


def test_where_drafts_are_verified_nobody_asks_for_log_probabilities() -> None:
    params = asked("drafts", frozenset(Capability), steps=120)
    assert len(params) > 30
    assert all(p.logprobs is p.logprob_token_ids is p.trace_decode_token_ids is None for p in params)


def test_budgets_for_thinking_need_its_markers() -> None:
    config = RunnerConfig(max_num_reqs=2)
    entries = palette(frozenset(Capability), config, 64)
    assert entries
    assert all(p.thinking_token_budget is None for p in entries)
    assert any(
        p.thinking_token_budget for p in palette(frozenset(Capability), replace(config, reasoning=REASONING), 64)
    )


@pytest.mark.parametrize("kind", ["wide", "drafts"])
def test_masks_are_those_of_sampling_requests_that_ask_for_a_form(kind: str) -> None:
    random = np.random.default_rng(1)
    size = draw_size(kind, random, offered=frozenset(Capability))
    cache = group_kv_cache_specs(size.model.kv_cache_specs(), size.num_blocks)
    world, driver = PlanWorld(size.config, cache, 64), RandomDriver(random)
    masked = unmasked = turned = 0
    for _ in range(150):
        step = driver.next_step(world)
        asking = [r for r, t in step.truth.requests.items() if t.samples and t.request.params.structured_outputs]
        owners = step.grammar.structured_output_request_ids if step.grammar else []
        assert set(owners) <= set(asking)
        assert len(set(owners)) == len(owners)
        if step.grammar:
            k = size.config.num_speculative_tokens
            assert step.grammar.grammar_bitmask.shape == (len(owners) * (1 + k), 2)
            assert step.grammar.grammar_bitmask.dtype == np.int32
        masked, unmasked = masked + len(owners), unmasked + len(asking) - len(owners)
        turned += owners != [r for r in step.truth.order if r in owners]
        world.observe({r: [1] if t.samples else [] for r, t in step.truth.requests.items()}, step.drafts_held())
    assert masked > 10
    assert unmasked
    assert turned or kind == "drafts", "masks in the batch's order prove little"


def test_a_request_knows_where_it_was_admitted() -> None:
    world = small_world()
    world.add(list(range(10)), 10, req_id="a")
    take_one_token(world)
    assert world.add_with_prefix(world.running["a"], [50, 51], 1)
    (new,) = world.close().plan.scheduled_new_reqs
    assert world.running[new.req_id].admitted_at == new.num_computed_tokens == 8
    assert new.eos_token_ids == EOS_TOKEN_IDS
