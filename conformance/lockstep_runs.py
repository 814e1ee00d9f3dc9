"""Lockstep of a runner and an oracle on generated plans: on worlds of the witness model, and on a real one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from conformance.comparison import Difference
from conformance.dense import DenseLlama, DenseLogits
from conformance.driver import KINDS, RandomDriver, draw_size
from conformance.evaluate import can_run
from conformance.foreign import all_let_go
from conformance.harness import build_runner, info_of
from conformance.lockstep import Divergence, Lockstep, LockstepResult, TokenPolicy
from conformance.world import PlanWorld
from runner_api import Capability, RunnerConfig
from runner_api.errors import safely
from runner_api.protocol import RunnerFactory

STEPS_PER_WORLD = 50
# A real model costs much more a step; its worlds are small.
MODEL_CONFIG = {"max_num_reqs": 4, "max_num_batched_tokens": 48, "max_model_len": 64}
MODEL_BLOCKS, MODEL_PROMPT = 40, 20


def lockstep_on_worlds(
    runner: RunnerFactory, oracle: RunnerFactory, steps: int, seed: int, lag: int | None = None,
    max_near_ties: float | None = None,
) -> LockstepResult:  # fmt: skip
    """Witness-model worlds of every kind in turn, until `steps` steps agree or one does not.

    lag None: alternate between taking outputs at once and a step late, where the runner offers it. The oracle records
    its logits, which are the candidate's too, so that a token may be a near tie by its certificate.
    """
    total, number = LockstepResult(), 0
    try:
        info = info_of(runner)
    except Exception as e:
        return _not_built(total, e)
    offered = info.capabilities
    kinds = [k for k in KINDS if can_run(k, offered)]
    while total.steps < steps and total.first is None:
        random = np.random.default_rng([seed, 1000 + number])
        late = number % 2 if Capability.ASYNC_OUTPUT in offered else 0
        size = draw_size(kinds[number % len(kinds)], random, offered=offered, layout=info.layout)
        with all_let_go():
            try:
                candidate, cache = build_runner(runner, size.model, size.config, size.num_blocks)
            except Exception as e:
                return _not_built(total, e)
            with_logits = replace(size.config, record=frozenset({"logits"}))
            reference, _ = build_runner(oracle, size.model, with_logits, size.num_blocks)
            world = PlanWorld(size.config, cache, size.model.vocab_size)
            policy = TokenPolicy(max_near_ties=max_near_ties)
            lockstep = Lockstep(candidate, reference, policy, late if lag is None else lag, total)
            _drive(lockstep, world, RandomDriver(random, offered), min(STEPS_PER_WORLD, steps - total.steps))
        number += 1
    return total


def _not_built(result: LockstepResult, e: Exception) -> LockstepResult:
    """The candidate came through the smoke test, and is asked for sizes that it must have: it fails, nobody misuses."""
    error = Difference("factory", (), None, None, "a runner", f"{type(e).__name__}: {safely(str, e)}")
    result.first = Divergence(result.steps, error, "")
    return result


@all_let_go()
def lockstep_on_model(
    runner: RunnerFactory, oracle: RunnerFactory, model: str, steps: int, seed: int, dtype: str = "float32",
    max_near_ties: float | None = None,
) -> LockstepResult:  # fmt: skip
    """One world on a real model, with token prompts drawn from its vocabulary; every token is certified.

    The oracle computes in float32, or float64 for a float64 candidate. For half-precision candidates the logit error
    is bounded by that of an independent dense run in the same format (conformance/dense.py).
    """
    from runner_api.checkpoint import load_checkpoint, resolve_model

    checkpoint = load_checkpoint(resolve_model(model))
    layout = info_of(runner).layout
    config = RunnerConfig(**MODEL_CONFIG, record=frozenset({"logits"}), dtype=dtype, layout=layout)
    half = dtype in ("float16", "bfloat16")
    dense = DenseLogits(DenseLlama(checkpoint, dtype)) if half else None
    policy = TokenPolicy(exact=False, dense=dense, max_near_ties=max_near_ties)
    candidate, cache = build_runner(runner, checkpoint, config, MODEL_BLOCKS)
    reference, _ = build_runner(oracle, checkpoint, replace(config, dtype="float32" if half else dtype), MODEL_BLOCKS)
    world = PlanWorld(config, cache, checkpoint.config.vocab_size)
    offered = candidate.describe().capabilities
    if half:
        offered -= {Capability.DRAFT_LAYOUT}  # the dense run follows one token a step
    driver = RandomDriver(seed, offered, max_prompt=MODEL_PROMPT)
    lockstep = Lockstep(candidate, reference, policy)
    _drive(lockstep, world, driver, steps)
    return lockstep.result


def _drive(lockstep: Lockstep, world: PlanWorld, driver: RandomDriver, steps: int) -> None:
    for _ in range(steps):
        step = driver.next_step(world)
        record = lockstep.step(step.plan, step.descriptor, step.forced, step.grammar)
        if record is None:
            return
        world.observe(record.tokens(), step.drafts_held())
    lockstep.finish()
