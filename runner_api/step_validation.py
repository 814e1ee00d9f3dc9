"""Is this call possible? Host checks of what comes beside a plan, the same for every runner.

The KV cache offered at start-up, the padded shape of a step, an imposed outcome. All read host facts alone: the
device may run behind. Plans themselves are checked in runner_api/validation.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from runner_api.config import BatchDescriptor, RunnerConfig
from runner_api.constants import PLACEHOLDER_TOKEN_ID
from runner_api.errors import CapabilityError, ConfigError, KVCacheError, PlanError
from runner_api.kv_cache import KVCacheConfig, KVCacheSpec
from runner_api.plan import ForcedStep, SchedulerOutput
from runner_api.plan_types import is_integer
from runner_api.validation import LiveRequest


def check_kv_cache_config(
    config: RunnerConfig, kv_cache_config: KVCacheConfig, specs: Mapping[str, KVCacheSpec]
) -> tuple[int, ...]:
    """Refuse a cache that does not fit the model or the configuration; the answer is the window reach per group."""
    layers = [layer for group in kv_cache_config.groups for layer in group.layer_names]
    if sorted(layers) != sorted(specs):
        raise KVCacheError("layers differ from the model's", field="groups", got=layers, expected=sorted(specs))
    reach = config.window_reach or tuple(group.spec.window_reach for group in kv_cache_config.groups)
    if len(reach) != len(kv_cache_config.groups):
        raise ConfigError(
            "one entry per KV cache group", field="window_reach", got=reach,
            expected=f"{len(kv_cache_config.groups)} entries",
        )  # fmt: skip
    for g, group in enumerate(kv_cache_config.groups):
        if reach[g] and (group.spec.sliding_window is None or reach[g] < group.spec.window_reach):
            raise ConfigError(
                "would hide keys that attention reads", field=f"window_reach[{g}]", got=reach[g],
                expected=f"0, or at least {group.spec.window_reach}" if group.spec.sliding_window else "0: no window",
            )  # fmt: skip
        if group.kernel_block_size not in (None, group.spec.block_size):
            raise CapabilityError(
                "kernel blocks of another size", field="kernel_block_size",
                got=group.kernel_block_size, expected=group.spec.block_size,
            )  # fmt: skip
    return reach


def check_descriptor(config: RunnerConfig, plan: SchedulerOutput, descriptor: BatchDescriptor | None) -> None:
    """Refuse a padded shape that the plan does not fit into, or that the runner's buffers do not hold."""
    if descriptor is None or plan.total_num_scheduled_tokens == 0:
        return
    d, counts = descriptor, plan.num_scheduled_tokens
    if not isinstance(d, BatchDescriptor):
        raise PlanError("type", code="MR-ERR-043", field="descriptor", got=d, expected="a BatchDescriptor")
    for name in ("num_tokens", "num_reqs", "uniform_token_count", "max_query_len"):
        value = getattr(d, name)
        if not (is_integer(value) or (value is None and name != "num_tokens")):
            raise PlanError("type", code="MR-ERR-043", field=f"descriptor.{name}", got=value, expected="an integer")
    limits = {
        "num_tokens": (d.num_tokens, plan.total_num_scheduled_tokens, config.max_num_batched_tokens),
        "num_reqs": (len(counts) if d.num_reqs is None else d.num_reqs, len(counts), config.max_num_reqs),
    }
    for name, (got, low, high) in limits.items():
        if not low <= got <= high:
            raise PlanError(
                "padded size", code="MR-ERR-043", field=f"descriptor.{name}", got=got, expected=f"{low} .. {high}"
            )
    if d.num_active_loras or d.num_ubatches != 1:
        raise CapabilityError("adapters and micro-batches are not offered", field="descriptor", got=d)
    uniform, longest = d.uniform_token_count, max(counts.values())
    if uniform is not None and set(counts.values()) != {uniform}:
        raise PlanError(
            "not a uniform batch", code="MR-ERR-043", field="descriptor.uniform_token_count",
            got=sorted(set(counts.values())), expected=uniform,
        )  # fmt: skip
    if d.max_query_len is not None and longest > d.max_query_len:
        raise PlanError(
            "query longer than the bound", code="MR-ERR-043", field="descriptor.max_query_len",
            got=longest, expected=f"at most {d.max_query_len}",
        )  # fmt: skip


def check_forced(
    config: RunnerConfig,
    vocab_size: int,
    requests: Mapping[str, LiveRequest],
    req_ids: Sequence[str],
    num_logits: np.ndarray,
    forced: ForcedStep | None,
) -> None:
    """Refuse an imposed outcome that the step cannot have, and a step with drafts whose outcome is not imposed.

    requests: the validator's picture after the step's plan; req_ids: batch order; num_logits: int[R], 1 + drafts.
    """
    r, k, total = len(req_ids), config.num_speculative_tokens, int(num_logits.sum())
    if forced is not None and not isinstance(forced, ForcedStep):
        raise PlanError("type", code="MR-ERR-044", field="forced", got=forced, expected="a ForcedStep")
    if forced is None:
        if total != r:
            raise CapabilityError(
                "drafts are not verified here", field="sample_tokens", hint="Give their outcome as a ForcedStep"
            )
        return
    shapes = {
        "token_ids": (forced.token_ids, (r, 1 + k)),
        "num_sampled": (forced.num_sampled, (r,)),
        "draft_token_ids": (forced.draft_token_ids, (r, k)),
        "logits": (forced.logits, (total, vocab_size)),
    }
    for name, (array, shape) in shapes.items():
        if array is not None and np.shape(array) != shape:
            raise PlanError("shape", code="MR-ERR-044", field=f"forced.{name}", got=np.shape(array), expected=shape)
        kind = np.asarray(array).dtype.kind if array is not None else None
        if kind is not None and name != "logits" and kind not in "iu":
            raise PlanError("dtype", code="MR-ERR-044", field=f"forced.{name}", got=array, expected="integers")
    # A row with known tokens left is exact in the host's picture: it has no draft in flight.
    unfinished = np.array([requests[i].computed_upper < requests[i].prefill_len for i in req_ids])
    n = np.asarray(forced.num_sampled)
    if ((n < np.where(unfinished, 0, 1)) | (n > np.where(unfinished, 0, num_logits))).any():
        raise PlanError(
            "number of sampled tokens", code="MR-ERR-045", field="forced.num_sampled", got=n.tolist(),
            expected=f"0 for unfinished prefills, otherwise 1 .. {num_logits.tolist()}",
        )  # fmt: skip
    taken = np.asarray(forced.token_ids)[np.arange(1 + k)[None, :] < n[:, None]]
    held = np.asarray([] if forced.draft_token_ids is None else forced.draft_token_ids)
    for name, ids, least in (("token_ids", taken, 0), ("draft_token_ids", held, PLACEHOLDER_TOKEN_ID)):
        if ids.size and (ids.min() < least or ids.max() >= vocab_size):
            raise PlanError(
                "token id out of range", code="MR-ERR-025", field=f"forced.{name}", got=ids.tolist(),
                expected=f"{least} <= id < {vocab_size}",
            )  # fmt: skip


def check_model_reach(config: RunnerConfig, reach: int | None) -> None:
    """Refuse rows longer than the positions that a model knows. `reach`: None for a model that knows all."""
    if reach is not None and config.max_model_len > reach:
        raise ConfigError(
            "longer than the model reaches", field="max_model_len", got=config.max_model_len, expected=f"<= {reach}"
        )
