"""Models that this backend runs, and how one is found for what `load_model` was given.

Twin: cpu_reference/models/__init__.py.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from gpu_backend.attn_metadata import AttentionMetadata
from gpu_backend.kv_cache import LayerCache
from runner_api.config import ParallelContext
from runner_api.errors import ConfigError
from runner_api.kv_cache import KVCacheSpec
from runner_api.protocol import Collectives, SingleRank
from runner_api.witness import WitnessConfig

ONE_RANK = ParallelContext()


class Model(Protocol):
    """What the runner needs of a model; any object with these may be given to `load_model`."""

    vocab_size: int

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]: ...

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: dict[str, LayerCache],
        attn_metadata: dict[str, AttentionMetadata],
        intermediates: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Hidden state of every token: [tp, hidden]. `intermediates`, if given, is filled with named tensors.

        Must not wait for the device, and must give shapes that depend on the arguments' shapes alone.
        """
        ...

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[L, hidden] to float32[L, V]."""
        ...


def build_model(
    model: Any,
    dtype: str,
    device: torch.device,
    parallel: ParallelContext = ONE_RANK,
    collectives: Collectives | None = None,
) -> Model:
    """From a path, an open Checkpoint, a WitnessConfig or a model object.

    parallel: whose share of the weights is loaded; collectives: how its rank meets the others (None: it is alone).
    """
    from gpu_backend.models.llama import LlamaModel
    from gpu_backend.models.witness import WitnessModel

    if isinstance(model, WitnessConfig):
        return WitnessModel(model)
    if hasattr(model, "forward") and hasattr(model, "compute_logits"):
        return model
    if not hasattr(model, "tensor"):
        if not isinstance(model, str) and not hasattr(model, "__fspath__"):
            raise ConfigError(
                "not a model", field="model", got=model,
                expected="a path, a Checkpoint, a WitnessConfig or a model object",
            )  # fmt: skip
        from runner_api.checkpoint import load_checkpoint

        model = load_checkpoint(model)
    return LlamaModel(
        model, getattr(torch, dtype), device, collectives or SingleRank(), rank=parallel.tp_rank, size=parallel.tp_size
    )
