"""One step of the reference on the witness model: what a plan becomes, printed."""

from runner_api import NewRequestData, RunnerConfig, SchedulerOutput, WitnessConfig, group_kv_cache_specs, load_runner

runner = load_runner("cpu", RunnerConfig(max_num_reqs=8))
runner.load_model(WitnessConfig())
runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), num_blocks=16))

prompts = {"A": [50, 51, 52], "B": [7] * 18}
new = [NewRequestData(name, ids, ids, 0, ([3 + i, 9 - i],)) for i, (name, ids) in enumerate(prompts.items())]
plan = SchedulerOutput(new, num_scheduled_tokens={"A": 3, "B": 18}, total_num_scheduled_tokens=21)
runner.execute_model(plan)
print(runner.sample_tokens().get_output().tokens())

step = runner.last_step()
for name in ("req_ids", "idx_mapping", "query_start_loc", "seq_lens", "positions", "slot_mappings", "logits_indices"):
    print(f"{name:16}", getattr(step, name))
