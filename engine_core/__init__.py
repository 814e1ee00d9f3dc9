"""What drives a runner: scheduler, KV block pool, engine loop, executor, worker, the `modelrunner` command."""
