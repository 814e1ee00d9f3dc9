"""What vLLM's choice of a model runner looks at, as plain values: no vLLM, no model, no GPU. See `vllm_policy`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner_api import ConfigError
from runner_api.checks import check_bool, check_integer, check_name, check_options

PLATFORMS = ("cuda", "rocm", "xpu", "tpu", "cpu", "oot", "unspecified")
CUDAGRAPH_MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise")
# And whatever ends in "mtp", one name per family of models.
SPECULATIVE_METHODS = (
    "eagle", "eagle3", "mtp", "draft_model", "dflash", "dspark", "ngram", "ngram_gpu", "suffix", "custom_class",
    "extract_hidden_states",
)  # fmt: skip
POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify", "embed&token_classify", "plugin")
# What is said of a drafter, and of which method's.
_OF_DRAFTER = {
    "parallel_drafting": None, "heterogeneous_vocabulary": None, "draft_lm_head_quantization": None,
    "adaptive_verification": None, "disable_padded_drafter_batch": None, "parse_mtp": None, "xpress": "dflash",
    "dflash_mixed_attention": "dflash", "dflash_candidate_heads": "dflash",
}  # fmt: skip
_NAMES: dict[str, tuple[str, ...] | None] = {
    "env": None, "platform": PLATFORMS, "distributed_executor_backend": None, "cudagraph_mode": CUDAGRAPH_MODES,
    "speculative_method": None, "pooling_task": POOLING_TASKS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """What the decision looks at; everything at vLLM's defaults unless said.

    Raises ConfigError for a value of the wrong kind, and for what is said of a drafter where there is none.
    """

    env: str | None = None  # the text of VLLM_USE_V2_MODEL_RUNNER; None: unset
    has_triton: bool = True
    platform: str = "cuda"  # "unspecified": no device was found; "oot": a plug-in's
    # -- the model
    architectures: tuple[str, ...] = ("LlamaForCausalLM",)
    is_moe: bool = False
    is_hybrid: bool = False
    is_attention_free: bool = False
    is_diffusion: bool = False
    is_multimodal: bool = False
    is_encoder_decoder: bool = False
    mm_encoder_only: bool = False
    pooling_task: str | None = None  # None: the model generates
    # -- ranks and steps
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    async_scheduling: bool | None = None  # None: wherever it is possible
    sequence_parallel: bool = False
    dual_batch_overlap: bool = False
    elastic_expert_parallel: bool = False
    batch_sharded_sampling: bool = False
    # -- compilation
    stock_torch_compile: bool = False
    cudagraph_mode: str = "full_and_piecewise"
    # -- features
    lora: bool = False
    custom_logits_processors: bool = False
    kv_sharing_fast_prefill: bool = False
    hisparse: bool = False
    watermarking: bool = False
    sampling_mask: bool = False
    trace_replay: bool = False
    aux_output: bool = False
    # -- speculation
    speculative_method: str | None = None
    parallel_drafting: bool = False
    heterogeneous_vocabulary: bool = False
    draft_lm_head_quantization: bool = False
    adaptive_verification: bool = False
    disable_padded_drafter_batch: bool = False
    parse_mtp: bool = False
    xpress: bool = False
    dflash_mixed_attention: bool = False  # sliding-window and full layers in one drafter
    dflash_candidate_heads: bool = False

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name == "architectures":
                object.__setattr__(self, f.name, _texts(f.name, value))
            elif f.name in _NAMES:
                _check_text(f.name, value, _NAMES[f.name], optional=f.default is None)
            elif type(f.default) is int:
                object.__setattr__(self, f.name, check_integer(f.name, value, 1))
            elif value is not None or f.default is not None:
                check_bool(f.name, value)
        method = self.speculative_method
        if method is not None and not method.endswith("mtp"):
            check_name("speculative_method", method, SPECULATIVE_METHODS)
        for name, needed in _OF_DRAFTER.items():
            if getattr(self, name) and (method is None or needed not in (None, method)):
                raise ConfigError(
                    "is said of a drafter, and there is none of that kind", field=name,
                    got=f"speculative_method={method}",
                    expected="a speculative_method" if needed is None else f"speculative_method={needed}",
                )  # fmt: skip

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> VllmConfig:
        """Build from a mapping; an unknown key is an error that lists the nearest valid names."""
        return cls(**check_options("vLLM option", values, {f.name for f in dataclasses.fields(cls)}))


def _check_text(name: str, value: Any, valid: tuple[str, ...] | None, *, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, str):
        raise ConfigError(
            "not a text", field=name, got=value, expected='a text, such as "1"' if name == "env" else "a text"
        )
    if valid is not None:
        check_name(name, value, valid)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
        raise ConfigError("not a list of names", field=name, got=value, expected="a list of texts")
    return tuple(value)
