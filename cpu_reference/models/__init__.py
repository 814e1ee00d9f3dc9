"""Models that the reference runs, and how one is found for what `load_model` was given."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from cpu_reference.attn_metadata import AttentionMetadata
from cpu_reference.kv_cache import LayerCache
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
        input_ids: np.ndarray,
        positions: np.ndarray,
        kv_caches: dict[str, LayerCache],
        attn_metadata: dict[str, AttentionMetadata],
        intermediates: dict[str, np.ndarray] | None = None,
    ) -> np.ndarray:
        """Hidden state of every token: [tp, hidden]. `intermediates`, if given, is filled with named arrays."""
        ...

    def compute_logits(self, hidden_states: np.ndarray) -> np.ndarray:
        """[L, hidden] to [L, V]."""
        ...


def build_model(
    model: Any, dtype: str, parallel: ParallelContext = ONE_RANK, collectives: Collectives | None = None
) -> Model:
    """From a path, an open Checkpoint, a WitnessConfig or a model object.

    parallel: whose share of the weights is loaded; collectives: how its rank meets the others (None: it is alone).
    """
    from cpu_reference.models.llama import LlamaModel
    from cpu_reference.models.witness import WitnessModel

    if isinstance(model, WitnessConfig):
        return WitnessModel(model)
    if hasattr(model, "forward") and hasattr(model, "compute_logits"):
        return model
    if not hasattr(model, "tensor"):
        if not isinstance(model, str) and not hasattr(model, "__fspath__"):
            raise ConfigError(
                "not a model",
                field="model",
                got=model,
                expected="a path, a Checkpoint, a WitnessConfig or a model object",
            )
        from runner_api.checkpoint import load_checkpoint

        model = load_checkpoint(model)
    return LlamaModel(model, np.dtype(dtype), collectives or SingleRank(), rank=parallel.tp_rank, size=parallel.tp_size)
