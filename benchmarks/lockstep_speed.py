"""How many steps a second does lockstep compare? The `cpu` runner against a second one on the witness model.

Prints steps/s (planning, both runners, comparison), the mean batch and the mix of prefill and decode. No law is asked.
Run: python benchmarks/lockstep_speed.py [--steps 1000] [--rows 16]
"""

from __future__ import annotations

import argparse
import json
import time

from conformance.driver import RandomDriver
from conformance.harness import build_runner
from conformance.lockstep import Lockstep
from conformance.world import PlanWorld
from runner_api import RunnerConfig, WitnessConfig, WitnessGroup


def measure(steps: int, rows: int, seed: int = 0) -> dict[str, float | str]:
    """One run; the clock starts when both runners stand."""
    config = RunnerConfig(max_num_reqs=rows, max_num_batched_tokens=8 * rows, max_model_len=128)
    model = WitnessConfig(groups=(WitnessGroup(16),))
    candidate, cache = build_runner("cpu", model, config, 1 + 8 * rows)
    oracle, _ = build_runner("cpu", model, config, 1 + 8 * rows)
    world, driver = PlanWorld(config, cache, model.vocab_size), RandomDriver(seed, churn=0.01)
    lockstep = Lockstep(candidate, oracle)
    requests = prefills = mixed = 0
    start = time.perf_counter()
    for _ in range(steps):
        step = driver.next_step(world)
        record = lockstep.step(step.plan, step.descriptor)
        if record is None:
            break
        world.observe(record.tokens())
        kinds = [t.computed < t.prefill_len for t in step.truth.requests.values()]
        requests, prefills, mixed = requests + len(kinds), prefills + sum(kinds), mixed + (0 < sum(kinds) < len(kinds))
    seconds = time.perf_counter() - start
    result = lockstep.finish()
    return {
        "verdict": result.verdict,
        "steps": result.steps,
        "steps_per_s": round(result.steps / seconds, 1),
        "mean_batch": round(requests / result.steps, 2),
        "prefill_share": round(prefills / requests, 3),
        "mixed_steps_share": round(mixed / result.steps, 3),
        "tokens_per_step": round(world.counts["tokens"] / result.steps, 1),
        "elements_compared": result.elements,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.steps, args.rows)
    print(json.dumps(found) if args.json else "\n".join(f"{k:>18}: {v}" for k, v in found.items()))


if __name__ == "__main__":
    main()
