"""Records for pictures: a reference runner on the witness model, with any number of requests, decodes and prefills."""

from __future__ import annotations

from functools import cache

from runner_api import (
    BatchDescriptor,
    CachedRequestData,
    CUDAGraphMode,
    NewRequestData,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    StepRecord,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
    load_runner,
)

BLOCK_SIZE = 16


def name(i: int) -> str:
    return f"r{i:03}"


@cache
def mixed_steps(num_reqs: int, padded: bool = True, prefix: str = "r") -> tuple[StepRecord, ...]:
    """Two steps: all prompts but those of the last quarter; then decodes of the old ones and prefills of the new ones.

    One request has one step of 21 tokens and one decode.
    """
    old = max(num_reqs * 3 // 4, 1)
    ids = [f"{prefix}{i:03}" for i in range(num_reqs)]
    lengths = [5 + (i * 7) % 40 for i in range(num_reqs)]
    runner = load_runner(
        "cpu",
        RunnerConfig(
            max_num_reqs=num_reqs + 3, max_model_len=128, max_num_batched_tokens=4096, record=frozenset({"logits"})
        ),
    )
    runner.load_model(WitnessConfig(vocab_size=512))
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), 4 * num_reqs + 8))
    free = iter(range(1, 4 * num_reqs + 8))

    def new(i: int) -> NewRequestData:
        tokens = [(3 + 11 * i + 5 * j) % 500 for j in range(lengths[i])]
        blocks = [next(free) for _ in range((lengths[i] + BLOCK_SIZE) // BLOCK_SIZE)]
        params = SamplingParams(temperature=0.8 if i % 2 else 0.0, top_k=20 if i % 2 else 0, seed=i)
        return NewRequestData(ids[i], tokens, tokens, 0, (blocks,), params, seed=i)

    first = SchedulerOutput(
        [new(i) for i in range(old)], CachedRequestData(), {ids[i]: lengths[i] for i in range(old)}, sum(lengths[:old])
    )
    counts = {ids[i]: 1 for i in range(old)} | {ids[i]: lengths[i] for i in range(old, num_reqs)}
    cached = CachedRequestData(ids[:old], lengths[:old], [None] * old, [1] * old)
    second = SchedulerOutput([new(i) for i in range(old, num_reqs)], cached, counts, sum(counts.values()))
    records = []
    for plan in (first, second):
        t = plan.total_num_scheduled_tokens
        shape = BatchDescriptor(CUDAGraphMode.FULL, t + 3, len(plan.num_scheduled_tokens) + 2) if padded else None
        runner.execute_model(plan, descriptor=shape)
        runner.sample_tokens().get_output()
        records.append(runner.last_step())
    return tuple(records)


@cache
def two_sizes() -> StepRecord:
    """Prompts of 32 and 19 tokens in a group with blocks of 16 and in one with blocks of 8."""
    runner = load_runner("cpu", RunnerConfig(max_num_reqs=4, max_model_len=64, max_num_batched_tokens=64))
    runner.load_model(WitnessConfig(groups=(WitnessGroup(16), WitnessGroup(8))))
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), 16))
    blocks = {"a": ([1, 2], [3, 4, 5, 6]), "b": ([7, 8], [9, 10, 11])}
    counts = {"a": 32, "b": 19}
    greedy = SamplingParams(temperature=0.0)
    new = [NewRequestData(r, [1] * n, [1] * n, 0, blocks[r], greedy) for r, n in counts.items()]
    runner.execute_model(SchedulerOutput(new, CachedRequestData(), counts, 51))
    runner.sample_tokens().get_output()
    return runner.last_step()
