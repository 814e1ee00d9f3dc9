"""What a model file says about its architecture, in one frozen dataclass, and the tensors that must then be there.

Turns the config.json of a Hugging Face folder into a `ModelConfig`; the GGUF reader fills the same class from its
metadata. A value that would change the arithmetic and is not supported is refused here, once, so that no runner has
to ask again. Knows nothing of files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from runner_api.checkpoint.rope import RopeConfig, finite_number, rope_config_from_hf
from runner_api.errors import CheckpointError

HF_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
# What a file without rope_theta means. Readers of Qwen files disagree (1e4 or 1e6), so there it must be said.
DEFAULT_THETA: dict[str, float | None] = {"llama": 10000.0, "qwen2": None, "qwen3": None}
_SIZES = (
    "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder with RMSNorm, rotary positions, grouped-query attention and a SiLU-gated MLP.

    qkv_bias, o_bias, mlp_bias: whether those projections have one. qk_norm: RMSNorm over each head of q and k before
    the rotation (qwen3). dtype: the name the file gives for its own weights. Raises `CheckpointError` naming the field.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise CheckpointError("too small", field=name, got=getattr(self, name), expected=">= 1")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                "heads cannot share key-value heads evenly", field="num_kv_heads", got=self.num_kv_heads,
                expected=f"a divisor of num_heads = {self.num_heads}",
            )  # fmt: skip
        if self.head_dim % 2:
            raise CheckpointError("odd: rotary positions turn pairs", field="head_dim", got=self.head_dim)
        if not (math.isfinite(self.rms_norm_eps) and 0 < self.rms_norm_eps < 1):
            raise CheckpointError("out of range", field="rms_norm_eps", got=self.rms_norm_eps, expected="0 < eps < 1")
        ids = self.eos_token_ids if self.bos_token_id is None else (*self.eos_token_ids, self.bos_token_id)
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise CheckpointError(
                    "outside the vocabulary", field="eos_token_ids / bos_token_id", got=token,
                    expected=f"0 <= id < vocab_size = {self.vocab_size}",
                )  # fmt: skip
        self.rope.check_head_dim(self.head_dim)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a model: canonical (Hugging Face) name to shape. Tied models have no `lm_head.weight`."""
    hidden, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    linears = {  # name: (shape [out, in], has a bias)
        "self_attn.q_proj": ((q, hidden), config.qkv_bias),
        "self_attn.k_proj": ((kv, hidden), config.qkv_bias),
        "self_attn.v_proj": ((kv, hidden), config.qkv_bias),
        "self_attn.o_proj": ((hidden, q), config.o_bias),
        "mlp.gate_proj": ((inner, hidden), config.mlp_bias),
        "mlp.up_proj": ((inner, hidden), config.mlp_bias),
        "mlp.down_proj": ((hidden, inner), config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        for name, (shape, bias) in linears.items():
            shapes[f"{layer}.{name}.weight"] = shape
            if bias:
                shapes[f"{layer}.{name}.bias"] = shape[:1]
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (d,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (d,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def model_config_from_hf(hf: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read a config.json (and generation_config.json, whose end-of-text ids are added).

    Raises `CheckpointError` naming the key that is missing, invalid or asks for what is not supported.
    """
    architecture = _architecture(hf)
    num_layers = _integer(hf, "num_hidden_layers")
    _refuse_unsupported(hf, num_layers)
    hidden, heads = _integer(hf, "hidden_size"), _integer(hf, "num_attention_heads")
    if heads < 1:
        raise CheckpointError("too small", field="num_attention_heads", got=heads, expected=">= 1")
    head_dim = _integer(hf, "head_dim", 0) or hidden // heads
    max_position = _integer(hf, "max_position_embeddings")
    if max_position < 1:
        raise CheckpointError("too small", field="max_position_embeddings", got=max_position, expected=">= 1")
    attention_bias = _flag(hf, "attention_bias")
    eos = {**dict.fromkeys(_ids(hf, "eos_token_id")), **dict.fromkeys(_ids(generation_config or {}, "eos_token_id"))}
    bos = _ids(hf, "bos_token_id")
    dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if not isinstance(dtype, str):
        raise CheckpointError("not a name", field="dtype", got=dtype)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=_integer(hf, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=_integer(hf, "num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=_integer(hf, "vocab_size"),
        rms_norm_eps=finite_number(hf.get("rms_norm_eps"), "rms_norm_eps"),
        rope=rope_config_from_hf(hf, max_position=max_position, default_theta=DEFAULT_THETA[architecture]),
        max_position_embeddings=max_position,
        tie_word_embeddings=_flag(hf, "tie_word_embeddings"),
        # Qwen2 has q, k and v biases whatever the file says, and never one on the output projection.
        qkv_bias=architecture == "qwen2" or _flag(hf, "qkv_bias", attention_bias),
        o_bias=architecture != "qwen2" and attention_bias,
        mlp_bias=architecture == "llama" and _flag(hf, "mlp_bias"),
        qk_norm=architecture == "qwen3",
        eos_token_ids=tuple(eos),
        bos_token_id=bos[0] if bos else None,
        dtype=dtype.removeprefix("torch."),
    )


def _architecture(hf: Mapping[str, Any]) -> str:
    names = hf.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError("missing or not a list of names", field="architectures", got=names)
    if names[0] not in HF_ARCHITECTURES:
        raise CheckpointError(
            "unsupported architecture", field="architectures", got=names[0],
            expected=f"one of {', '.join(HF_ARCHITECTURES)}",
        )  # fmt: skip
    return HF_ARCHITECTURES[names[0]]


def _refuse_unsupported(hf: Mapping[str, Any], num_layers: int) -> None:
    act = hf.get("hidden_act", "silu")
    if act != "silu":
        raise CheckpointError("unsupported activation", field="hidden_act", got=act, expected="silu")
    if hf.get("quantization_config") is not None:
        raise CheckpointError(
            "quantised weights", field="quantization_config", got=hf["quantization_config"], expected="absent",
            hint="Use the unquantised checkpoint, or a GGUF file (dequantised when read)",
        )  # fmt: skip
    # Qwen files carry a window that `use_sliding_window: false` switches off; and one used only by layers from
    # max_window_layers on. Files of other families have the window alone.
    window = hf.get("sliding_window") if hf.get("use_sliding_window", True) else None
    first = hf.get("max_window_layers", 0) if "use_sliding_window" in hf else 0
    slides = window is not None and (isinstance(first, bool) or not isinstance(first, int) or first < num_layers)
    layer_types = hf.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise CheckpointError("not a list", field="layer_types", got=layer_types)
    for kind in layer_types:
        if kind != "full_attention":
            raise CheckpointError("unsupported layer type", field="layer_types", got=kind, expected="full_attention")
    if slides and not layer_types:
        raise CheckpointError(
            "sliding-window attention is not supported", field="sliding_window", got=window, expected="null"
        )


def _integer(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = hf.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError("missing", field=key, expected="an integer")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise CheckpointError("not a size", field=key, got=value, expected="an integer from 0 to 2^31 - 1")
    return value


def _flag(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = hf.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError("not true or false", field=key, got=value)
    return value


def _ids(hf: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """An id, a list of ids or null, as a tuple."""
    value = hf.get(key)
    ids: Iterable[Any] = () if value is None else value if isinstance(value, list) else (value,)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise CheckpointError("not a token id", field=key, got=token, expected="an integer, a list of them or null")
    return tuple(ids)
