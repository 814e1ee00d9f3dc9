"""Is this call possible? Host checks of what comes beside a plan, the same for every runner.

The KV cache offered at start-up, the padded shape of a step, an imposed outcome. All read host facts alone: the
device may run behind. Plans themselves are checked in runner_api/validation.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from runner_api.checks import is_integer
from runner_api.config import BatchDescriptor, CUDAGraphMode, RunnerConfig
from runner_api.constants import PLACEHOLDER_TOKEN_ID
from runner_api.errors import CapabilityError, ConfigError, KVCacheError, PlanError
from runner_api.kv_cache import KVCacheConfig, KVCacheSpec
from runner_api.live_request import LiveRequest
from runner_api.plan import ForcedStep, GrammarOutput, SchedulerOutput


def check_kv_cache_config(
    config: RunnerConfig, kv_cache_config: KVCacheConfig, specs: Mapping[str, KVCacheSpec]
) -> tuple[int, ...]:
    """Refuse a cache that does not fit the model or the configuration; the answer is the window reach per group.

    specs: what the model proposes. A group may have another block size than the proposal; all else must be the same.
    """
    if not isinstance(kv_cache_config, KVCacheConfig):
        raise KVCacheError("is no KV cache", field="kv_cache_config", got=kv_cache_config, expected="a KVCacheConfig")
    groups = kv_cache_config.groups
    layers = [layer for group in groups for layer in group.layer_names]
    if sorted(layers) != sorted(specs):
        raise KVCacheError("layers differ from the model's", field="groups", got=layers, expected=sorted(specs))
    for g, group in enumerate(groups):
        for layer in group.layer_names:
            wanted = replace(specs[layer], block_size=group.spec.block_size)
            if group.spec != wanted:
                raise KVCacheError(
                    f"the spec differs from what layer {layer!r} of the model stores", field=f"groups[{g}].spec",
                    got=group.spec, expected=wanted, hint="Only the block size is free",
                )  # fmt: skip
    _check_tensors(kv_cache_config)
    return _window_reach(config, kv_cache_config)


def _check_tensors(kv_cache_config: KVCacheConfig) -> None:
    """Where allocations are listed, each layer has exactly one, of its own and of the right size."""
    if not kv_cache_config.tensors:
        return
    for tensor in kv_cache_config.tensors:
        if len(tensor.shared_by) > 1:
            raise CapabilityError("layers do not share memory here", field="tensors.shared_by", got=tensor.shared_by)
    sizes = {
        layer: group.spec.bytes_per_block * kv_cache_config.num_blocks
        for group in kv_cache_config.groups
        for layer in group.layer_names
    }
    listed = [layer for tensor in kv_cache_config.tensors for layer in tensor.shared_by]
    if sorted(listed) != sorted(sizes):
        raise KVCacheError("each layer has one tensor", field="tensors", got=listed, expected=sorted(sizes))
    for tensor in kv_cache_config.tensors:
        if tensor.size != sizes[tensor.shared_by[0]]:
            raise KVCacheError(
                f"the tensor of {tensor.shared_by[0]!r} is not as large as its blocks", field="tensors.size",
                got=tensor.size, expected=sizes[tensor.shared_by[0]],
            )  # fmt: skip


def _window_reach(config: RunnerConfig, kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    groups, reach = kv_cache_config.groups, config.window_reach
    if reach is None:
        return tuple(group.spec.window_reach for group in groups)
    if len(reach) != len(groups):
        raise ConfigError(
            "one entry per KV cache group", field="window_reach", got=reach, expected=f"{len(groups)} entries"
        )
    for g, group in enumerate(groups):
        if reach[g] and (group.spec.sliding_window is None or reach[g] < group.spec.window_reach):
            raise ConfigError(
                "would hide keys that attention reads", field=f"window_reach[{g}]", got=reach[g],
                expected=f"0, or at least {group.spec.window_reach}" if group.spec.sliding_window else "0: no window",
            )  # fmt: skip
    return reach


def check_descriptor(config: RunnerConfig, plan: SchedulerOutput, descriptor: BatchDescriptor | None) -> None:
    """Refuse a shape that no dispatch gives, that the plan does not fit into, or that the buffers do not hold.

    NONE pads nothing, PIECEWISE pads tokens and leaves requests alone, FULL fixes both. A plan without tokens launches
    nothing, so that only the types of its descriptor matter.
    """
    if descriptor is None:
        return
    _check_descriptor_types(descriptor)
    d, counts, total = descriptor, plan.num_scheduled_tokens, plan.total_num_scheduled_tokens
    if d.num_active_loras or d.num_ubatches != 1:
        raise CapabilityError("adapters and micro-batches are not offered", field="descriptor", got=d)
    if total == 0:
        return
    _check_mode(d, len(counts), total)
    reqs = len(counts) if d.num_reqs is None else d.num_reqs
    for name, got, low, high in (
        ("num_tokens", d.num_tokens, total, config.max_num_batched_tokens),
        ("num_reqs", reqs, len(counts), config.max_num_reqs),
    ):
        if not low <= got <= high:
            raise _descriptor_error(f"the plan has {low}, the buffers hold {high}", name, got, f"{low} .. {high}")
    uniform, longest = d.uniform_token_count, max(counts.values())
    if uniform is not None and set(counts.values()) != {uniform}:
        raise _descriptor_error(
            "the requests have other numbers of tokens", "uniform_token_count", uniform, sorted(set(counts.values()))
        )
    if d.max_query_len is not None and longest > d.max_query_len:
        raise _descriptor_error("a request has more tokens", "max_query_len", d.max_query_len, f"at least {longest}")


def _check_descriptor_types(d: BatchDescriptor) -> None:
    if not isinstance(d, BatchDescriptor):
        raise PlanError("not a descriptor", code="MR-ERR-043", field="descriptor", got=d, expected="a BatchDescriptor")
    if not isinstance(d.cg_mode, CUDAGraphMode):
        raise _descriptor_error("is no mode", "cg_mode", d.cg_mode, "a CUDAGraphMode")
    for name in ("num_tokens", "num_reqs", "uniform_token_count", "max_query_len", "num_active_loras", "num_ubatches"):
        value, optional = getattr(d, name), name in ("num_reqs", "uniform_token_count", "max_query_len")
        if not (is_integer(value) and value >= 0) and not (value is None and optional):
            raise _descriptor_error("is no count", name, value, "an integer >= 0" + " or None" * optional)


def _check_mode(d: BatchDescriptor, num_reqs: int, num_tokens: int) -> None:
    mode = d.cg_mode
    if mode is CUDAGraphMode.NONE and (d.num_tokens != num_tokens or d.num_reqs not in (None, num_reqs)):
        name, wanted = ("num_reqs", num_reqs) if d.num_tokens == num_tokens else ("num_tokens", num_tokens)
        raise _descriptor_error("a step without graphs pads nothing", name, getattr(d, name), wanted)
    if mode is CUDAGraphMode.PIECEWISE and d.num_reqs is not None:
        raise _descriptor_error("piecewise graphs do not pad requests", "num_reqs", d.num_reqs, "None")
    if mode is CUDAGraphMode.FULL and d.num_reqs is None:
        raise _descriptor_error("a full graph is captured for a number of requests", "num_reqs", None, "an integer")


def _descriptor_error(what: str, name: str, got: Any, expected: Any) -> PlanError:
    return PlanError(what, code="MR-ERR-043", field=f"descriptor.{name}", got=got, expected=expected)


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
    if forced is None:
        if total != r:
            raise CapabilityError(
                "drafts are not verified here", field="sample_tokens", hint="Give their outcome as a ForcedStep"
            )
        return
    if not isinstance(forced, ForcedStep):
        raise PlanError("not an outcome", code="MR-ERR-044", field="forced", got=forced, expected="a ForcedStep")
    token_ids = _array("token_ids", forced.token_ids, (r, 1 + k), "iu")
    n = _array("num_sampled", forced.num_sampled, (r,), "iu")
    held = np.zeros((0, k), np.int64)
    if forced.draft_token_ids is not None:
        held = _array("draft_token_ids", forced.draft_token_ids, (r, k), "iu")
    if forced.logits is not None:
        _array("logits", forced.logits, (total, vocab_size), "fiu")
    # A row with known tokens left is exact in the host's picture: it has no draft in flight.
    unfinished = np.array([requests[i].computed_upper < requests[i].prefill_len for i in req_ids])
    if ((n < np.where(unfinished, 0, 1)) | (n > np.where(unfinished, 0, num_logits))).any():
        raise PlanError(
            "no such number of sampled tokens", code="MR-ERR-045", field="forced.num_sampled", got=n.tolist(),
            expected=f"0 for unfinished prefills, otherwise 1 .. {num_logits.tolist()}",
        )  # fmt: skip
    taken = token_ids[np.arange(1 + k)[None, :] < n[:, None]]
    for name, ids, least in (("token_ids", taken, 0), ("draft_token_ids", held, PLACEHOLDER_TOKEN_ID)):
        if ids.size and (ids.min() < least or ids.max() >= vocab_size):
            raise PlanError(
                "token id out of range", code="MR-ERR-025", field=f"forced.{name}", got=ids.tolist(),
                expected=f"{least} <= id < {vocab_size}",
            )  # fmt: skip


def check_grammar(config: RunnerConfig, vocab_size: int, req_ids: Sequence[str], grammar: GrammarOutput | None) -> None:
    """Refuse masks that belong to no request of the step, or are not as many and as wide as they should be.

    req_ids: the requests of the step.
    """
    if grammar is None:
        return
    if not isinstance(grammar, GrammarOutput):
        raise _grammar_error("not the masks of grammars", "grammar", grammar, "a GrammarOutput")
    owners, where = grammar.structured_output_request_ids, "grammar.structured_output_request_ids"
    if not isinstance(owners, (list, tuple)) or not all(isinstance(r, str) for r in owners):
        raise _grammar_error("not a list of requests", where, owners, "a list of request ids")
    free = set(req_ids)
    for req_id in owners:
        if req_id not in free:
            raise _grammar_error("not a request of this step, once", where, req_id, "an id of the plan")
        free.remove(req_id)
    mask, where = grammar.grammar_bitmask, "grammar.grammar_bitmask"
    shape = (len(owners) * (1 + config.num_speculative_tokens), -(-vocab_size // 32))
    if not isinstance(mask, np.ndarray) or mask.dtype != np.int32:
        raise _grammar_error("not words of 32 tokens", where, getattr(mask, "dtype", type(mask).__name__), "int32")
    if mask.shape != shape:
        raise _grammar_error(
            "1 + num_speculative_tokens masks for each request, a bit for each token", where, mask.shape, shape
        )
    if grammar.num_acceptable_drafts is not None:
        raise CapabilityError(
            "drafts are not verified here", field="grammar.num_acceptable_drafts",
            got=grammar.num_acceptable_drafts, expected="None",
        )  # fmt: skip


def _grammar_error(what: str, where: str, got: Any, expected: Any) -> PlanError:
    return PlanError(what, code="MR-ERR-049", field=where, got=got, expected=expected)


def _array(name: str, value: Any, shape: tuple[int, ...], kinds: str) -> np.ndarray:
    """The value as an array, if it is one of this shape whose elements are of one of these NumPy kinds."""
    try:
        array = np.asarray(value)
    except Exception as e:  # ragged lists, and objects whose conversion fails
        raise PlanError(
            "cannot be read as an array",
            code="MR-ERR-044",
            field=f"forced.{name}",
            got=value,
            expected=f"shape {shape}",
        ) from e
    if array.shape != shape:
        raise PlanError(
            "array of another shape", code="MR-ERR-044", field=f"forced.{name}", got=array.shape, expected=shape
        )
    if array.dtype.kind not in kinds:
        raise PlanError(
            "array of another type", code="MR-ERR-044", field=f"forced.{name}", got=array.dtype,
            expected="real numbers" if "f" in kinds else "integers",
        )  # fmt: skip
    return array


def check_poison(kv_cache_config: KVCacheConfig, value: int, keep_blocks: Collection[int]) -> None:
    """Refuse a value that the int32 buffers cannot hold, and blocks to keep that are none."""
    if not is_integer(value) or not -(2**31) <= value < 2**31:
        raise ConfigError("does not fit the buffers", field="value", got=value, expected="a 32-bit integer")
    if not isinstance(keep_blocks, (Set, list, tuple)):
        raise ConfigError("not a collection of blocks", field="keep_blocks", got=keep_blocks, expected="a set of ids")
    for block in keep_blocks:
        if not is_integer(block) or not 0 <= block < kv_cache_config.num_blocks:
            raise ConfigError(
                "no such block", field="keep_blocks", got=block, expected=f"0 <= id < {kv_cache_config.num_blocks}"
            )


def check_model_reach(config: RunnerConfig, reach: int | None) -> None:
    """Refuse rows longer than the positions that a model knows. `reach`: None for a model that knows all."""
    if reach is not None and config.max_model_len > reach:
        raise ConfigError(
            "longer than the model reaches", field="max_model_len", got=config.max_model_len, expected=f"<= {reach}"
        )
