"""From options to a running engine: model, worker, KV cache size, scheduler, in the order they depend on each other."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine_core.engine import Engine
from engine_core.executor import Executor, make_executor
from engine_core.kv_cache_manager import KVCacheManager
from engine_core.logprobs import DEFAULT_MAX_LOGPROBS
from engine_core.plan_builder import SchedulerConfig
from engine_core.scheduler import Scheduler
from engine_core.structured_output import GrammarBackend, check_backend_name, make_grammar_backend
from engine_core.tokenizer import Tokenizer
from engine_core.worker import WorkerConfig
from runner_api import (
    ConfigError,
    KVCacheConfig,
    KVCacheError,
    ReasoningConfig,
    RunnerConfig,
    RunnerFactory,
    group_kv_cache_specs,
)
from runner_api.checkpoint import Checkpoint, load_checkpoint, resolve_model
from runner_api.checks import check_bool, check_integer, check_name, check_names, check_options, is_integer
from runner_api.config import DTYPES, LAYOUTS, LOGPROBS_MODES, NOISE_SCHEMES, RECORD_PARTS
from runner_api.loader import decide_layout

DEFAULT_MAX_MODEL_LEN = 1024  # for models that do not say how far they reach
# The least value of each size. A request needs a token to read and one to draw.
_LEAST = {
    "max_num_reqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2, "num_blocks": 2, "kv_cache_memory_bytes": 1,
    "long_prefill_token_threshold": 0, "max_concurrent_batches": 1, "num_speculative_tokens": 0, "max_logprobs": -1,
    "reorder_batch_threshold": 1, "seed": 0,
}  # fmt: skip
_OPTIONAL = ("max_model_len", "num_blocks", "kv_cache_memory_bytes", "reorder_batch_threshold")
log = logging.getLogger("modelrunner")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every option of an engine. Raises ConfigError for what is of the wrong kind or out of range.

    model: a path, `smollm2`, an open `Checkpoint`, a `WitnessConfig`, or a model object of the runner.
    runner: an installed name, `package.module:factory`, or the factory itself. executor: how its workers are run.
    max_model_len: None = as far as the model reaches.
    num_blocks: of the KV cache, the null block included. Else `kv_cache_memory_bytes` worth of blocks. Else as many
        as all rows at full length need, if the free memory allows. The block size is the runner's.
    enable_prefix_caching: None = wherever the model's KV cache allows it.
    layout: of the runner's rows, and with it the shape of plans. None = environment and policy choose.
    reorder_batch_threshold, logprobs_mode, reasoning, logits_processors: see `RunnerConfig`.
    max_logprobs: the most log probabilities per token that a request may ask for, of answer or prompt; -1 = no limit.
    grammar_backend: "llguidance", "xgrammar", or "auto": the first of them that is installed.
    seed: from which requests without a seed draw theirs.
    """

    model: Any
    runner: str | RunnerFactory = "cpu"
    executor: str | type[Executor] = "uni"
    max_num_reqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool | None = None
    long_prefill_token_threshold: int = 0
    async_scheduling: bool = False
    max_concurrent_batches: int = 2
    num_speculative_tokens: int = 0
    layout: str | None = None
    reorder_batch_threshold: int | None = None
    noise: str = "murmur3"
    dtype: str = "float32"
    device: str = "auto"
    record: frozenset[str] = frozenset()
    logprobs_mode: str = "raw_logprobs"
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    reasoning: ReasoningConfig | None = None
    logits_processors: tuple[Any, ...] = ()
    grammar_backend: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, check_integer(name, value, least))
        check_bool("async_scheduling", self.async_scheduling)
        if self.enable_prefix_caching is not None:
            check_bool("enable_prefix_caching", self.enable_prefix_caching)
        for name, valid in (
            ("noise", NOISE_SCHEMES), ("dtype", DTYPES), ("logprobs_mode", LOGPROBS_MODES),
        ):  # fmt: skip
            check_name(name, getattr(self, name), valid)
        if self.layout is not None:
            check_name("layout", self.layout, LAYOUTS)
        check_backend_name(self.grammar_backend)
        if not isinstance(self.device, str):
            raise ConfigError("a device is named by a string", field="device", got=self.device, expected="a str")
        if not isinstance(self.runner, str) and not callable(self.runner):
            raise ConfigError("not a runner", field="runner", got=self.runner, expected="a name or a factory")
        object.__setattr__(self, "record", check_names("record", self.record, RECORD_PARTS))
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                "the size of the KV cache is given twice",
                field="num_blocks",
                got=f"{self.num_blocks} blocks and {self.kv_cache_memory_bytes} bytes",
                expected="num_blocks or kv_cache_memory_bytes",
            )

    @classmethod
    def from_options(cls, model: Any, options: Mapping[str, Any]) -> EngineConfig:
        """Build from keyword options; an unknown one is an error that lists the nearest valid names."""
        names = {f.name for f in dataclasses.fields(cls)} - {"model"}
        return cls(model, **check_options("engine option", options, names))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine itself must know of a model; the rest is the runner's."""

    model: Any  # for the runner's load_model
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_position_embeddings: int | None = None


def open_model(model: Any) -> ModelFacts:
    """Open a checkpoint if a name or path is given. Raises CheckpointError, ConfigError."""
    if isinstance(model, (str, os.PathLike)):
        model = load_checkpoint(resolve_model(os.fspath(model)))
    if isinstance(model, Checkpoint):
        c = model.config
        return ModelFacts(model, c.vocab_size, tuple(c.eos_token_ids), c.max_position_embeddings)
    vocab_size = getattr(model, "vocab_size", None)
    if vocab_size is None or not is_integer(vocab_size):
        raise ConfigError(
            "not a model",
            field="model",
            got=model,
            expected="a path, a name, a Checkpoint, a WitnessConfig or an object with vocab_size",
        )
    return ModelFacts(model, int(vocab_size))


def build_engine(config: EngineConfig, facts: ModelFacts, tokenizer: Tokenizer | None = None) -> Engine:
    """Bring an engine up. Whatever fails, the worker is shut down again. tokenizer: grammars need one."""
    reach = facts.max_position_embeddings
    max_model_len = config.max_model_len or reach or DEFAULT_MAX_MODEL_LEN
    if reach is not None and max_model_len > reach:
        raise ConfigError(
            "longer than the model reaches", field="max_model_len", got=max_model_len, expected=f"<= {reach}"
        )
    runner_config = RunnerConfig(
        max_num_reqs=config.max_num_reqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        layout=config.layout,
        reorder_batch_threshold=config.reorder_batch_threshold,
        noise=config.noise,
        dtype=config.dtype,
        device=config.device,
        num_speculative_tokens=config.num_speculative_tokens,
        max_concurrent_batches=config.max_concurrent_batches,
        record=config.record,
        logprobs_mode=config.logprobs_mode,
        reasoning=config.reasoning,
        logits_processors=config.logits_processors,
    )
    selection = decide_layout(config.runner, runner_config)
    scheduler_config = SchedulerConfig(
        max_num_reqs=config.max_num_reqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        layout=selection.layout,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        num_speculative_tokens=config.num_speculative_tokens,
        async_scheduling=config.async_scheduling,
    )
    _check_markers(config.reasoning, facts.vocab_size)
    executor = make_executor(WorkerConfig(config.runner, facts.model, runner_config, selection), config.executor)
    try:
        kv_cache_configs = _kv_cache_configs(config, executor, max_model_len)
        manager = KVCacheManager(kv_cache_configs[0], max_model_len, enable_prefix_caching=config.enable_prefix_caching)
        executor.initialize_from_config(kv_cache_configs)
        engine = Engine(
            executor,
            Scheduler(scheduler_config, manager),
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            seed=config.seed,
            grammar_backend=_grammar_backend(config, facts, tokenizer),
            max_logprobs=config.max_logprobs,
        )
    except BaseException:
        executor.shutdown()
        raise
    log.info(
        "engine: max_model_len=%d blocks=%d block_size=%s prefix_caching=%s async_scheduling=%s",
        max_model_len, manager.pool.num_blocks, [g.spec.block_size for g in manager.groups],
        manager.enable_prefix_caching, config.async_scheduling,
    )  # fmt: skip
    return engine


def _check_markers(reasoning: ReasoningConfig | None, vocab_size: int) -> None:
    if reasoning is None:
        return
    for name in ("start_token_ids", "end_token_ids", "natural_end_token_ids"):
        for token in getattr(reasoning, name):
            if token >= vocab_size:
                raise ConfigError(
                    "not a token id", field=f"reasoning.{name}", got=token, expected=f"0 <= id < {vocab_size}"
                )


def _grammar_backend(
    config: EngineConfig, facts: ModelFacts, tokenizer: Tokenizer | None
) -> Callable[[], GrammarBackend] | None:
    if tokenizer is None:
        return None
    return lambda: make_grammar_backend(
        config.grammar_backend, tokenizer.facts(facts.vocab_size, tuple(facts.eos_token_ids))
    )


def _kv_cache_configs(config: EngineConfig, executor: Executor, max_model_len: int) -> list[KVCacheConfig]:
    """One configuration per worker, all with the same number of blocks: what the poorest of them can hold."""
    specs = executor.get_kv_cache_specs()
    per_block = [group_kv_cache_specs(s, 2).bytes_per_block for s in specs]
    num_blocks = config.num_blocks
    if num_blocks is None:
        given = config.kv_cache_memory_bytes
        available = executor.determine_available_memory() if given is None else [given] * len(specs)
        num_blocks = min(memory // size for memory, size in zip(available, per_block, strict=True))
        if num_blocks < 2:
            raise KVCacheError(
                "no room for a KV cache",
                field="kv_cache_memory_bytes",
                got=min(available),
                expected=f"at least {2 * max(per_block)} bytes, two blocks",
            )
        if given is None:
            groups = group_kv_cache_specs(specs[0], 2).groups
            per_request = sum(-(-max_model_len // g.spec.block_size) for g in groups)
            num_blocks = min(num_blocks, 1 + config.max_num_reqs * per_request)
    return [group_kv_cache_specs(s, num_blocks) for s in specs]
