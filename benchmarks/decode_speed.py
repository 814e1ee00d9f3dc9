"""How fast the reference runs a real model: prefill of 128 tokens, decode at batch 1 and 8, in tokens a second.

    python benchmarks/decode_speed.py [MODEL] [--runner cpu] [--steps 24] [--json]

MODEL is a checkpoint or `smollm2` (the default). Medians over the steps; the machine's name is printed with them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time

import numpy as np

from runner_api import (
    CachedRequestData,
    NewRequestData,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    group_kv_cache_specs,
    load_runner,
)
from runner_api.checkpoint.smollm2 import resolve_model

PROMPT = 128


def measure(runner_name: str, model: str, batch: int, steps: int) -> dict[str, float]:
    """Median seconds of one prefill step (one request of 128 tokens) and of one decode step of the whole batch."""
    runner = load_runner(
        runner_name, RunnerConfig(max_num_reqs=batch, max_num_batched_tokens=PROMPT, max_model_len=512)
    )
    runner.load_model(resolve_model(model))
    specs = runner.get_kv_cache_specs()
    blocks_per_request = 16
    runner.initialize_kv_cache(group_kv_cache_specs(specs, 1 + batch * blocks_per_request))
    vocab = 1000
    rng = np.random.default_rng(0)
    prefill, decode = [], []
    for i in range(batch):
        blocks = list(range(1 + i * blocks_per_request, 1 + (i + 1) * blocks_per_request))
        tokens = rng.integers(0, vocab, PROMPT).tolist()
        new = NewRequestData(f"r{i}", tokens, tokens, 0, (blocks,), SamplingParams(temperature=0.0))
        prefill.append(
            step(
                runner,
                SchedulerOutput([new], num_scheduled_tokens={f"r{i}": PROMPT}, total_num_scheduled_tokens=PROMPT),
            )
        )
    ids = [f"r{i}" for i in range(batch)]
    for n in range(steps):
        cached = CachedRequestData(ids, [PROMPT + n] * batch, [None] * batch, [n + 1] * batch)
        decode.append(step(runner, SchedulerOutput([], cached, dict.fromkeys(ids, 1), batch)))
    return {"prefill_s": statistics.median(prefill), "decode_s": statistics.median(decode)}


def step(runner, plan: SchedulerOutput) -> float:
    start = time.perf_counter()
    runner.execute_model(plan)
    runner.sample_tokens().get_output()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--runner", default="cpu")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    one = measure(args.runner, args.model, 1, args.steps)
    eight = measure(args.runner, args.model, 8, args.steps)
    figures = {
        "prefill_128_tokens_per_s": round(PROMPT / eight["prefill_s"], 1),
        "decode_batch_1_tokens_per_s": round(1 / one["decode_s"], 1),
        "decode_batch_8_tokens_per_s": round(8 / eight["decode_s"], 1),
        "model": args.model,
        "runner": args.runner,
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "numpy": np.__version__,
    }
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:30} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
