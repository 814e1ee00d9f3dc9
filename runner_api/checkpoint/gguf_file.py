"""A GGUF file of architecture `llama`: its metadata, and its tensors under their Hugging Face names in float32.

The header is parsed here, bounds checked, in a tenth of a second; tensors are read and dequantised one at a time.
Rows of q and k are put back into the order that "rotate half" needs: GGUF stores the two channels of a rotary pair
side by side (2i, 2i + 1), Hugging Face half a head apart (i, i + d/2). Skipping this leaves a model that still talks.
Layout of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runner_api.checkpoint.config import ModelConfig
from runner_api.checkpoint.rope import RopeConfig
from runner_api.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
# Metadata type number to struct format; numbers 8 and 9 are strings and arrays.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Factors on the wavelength of each rotary pair (how GGUF stores Llama 3.1's scaling). A part of the config.
ROPE_FREQS = "rope_freqs.weight"

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is [rows, columns], as NumPy counts (the file counts the other way round)."""

    shape: tuple[int, ...]
    type_number: int
    offset: int
    num_bytes: int


class GGUFFile:
    """One opened file. `metadata`: key to value; `shapes`: Hugging Face name to shape; values are read by `read`."""

    def __init__(self, path: Path) -> None:
        """Parse the header. Raises `CheckpointError` for a foreign, truncated or self-contradicting file."""
        self.path = path
        try:
            with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self.metadata, self.tensors = _parse(data)
        except (OSError, ValueError, struct.error) as e:  # ValueError: an empty file, text that is not UTF-8
            raise CheckpointError(
                f"not a whole GGUF file: {e}", field=str(path), hint="Fetch it again; it may be truncated"
            ) from e
        self.config = self._config()
        self._gguf_name = {hf_name(name): name for name in self.tensors if name != ROPE_FREQS}
        if len(self._gguf_name) != len(self.tensors) - (ROPE_FREQS in self.tensors):
            raise CheckpointError("two tensors with one meaning", field=str(path))
        self.shapes = {hf: self.tensors[name].shape for hf, name in self._gguf_name.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor by its Hugging Face name: float32, freshly read, dequantised, q and k in Hugging Face order."""
        values = self._dequantised(self._gguf_name[name])
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}.get(name.split(".")[-2])
        return values if heads is None else unpermute(values, heads)

    def _dequantised(self, name: str) -> np.ndarray:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.tensors[name]
        try:
            raw = np.fromfile(self.path, dtype=np.uint8, count=info.num_bytes, offset=info.offset)
        except OSError as e:
            raise CheckpointError(f"tensor {name!r} cannot be read: {e}", field=str(self.path)) from e
        if raw.size != info.num_bytes:
            raise CheckpointError("the file changed after it was opened", field=str(self.path), got=f"{raw.size} bytes")
        if info.type_number == GGMLQuantizationType.F64:
            return raw.view(np.float64).astype(np.float32).reshape(info.shape)
        try:
            # One row of blocks per last axis; a vector is a single row.
            rows = raw.reshape(-1, info.num_bytes // max(int(np.prod(info.shape[:-1])), 1))
            return dequantize(rows, GGMLQuantizationType(info.type_number)).astype(np.float32).reshape(info.shape)
        except (NotImplementedError, ValueError) as e:
            raise CheckpointError(
                f"tensor {name!r} is in a form that the gguf package cannot dequantise", field=str(self.path),
                got=GGMLQuantizationType(info.type_number).name,
            ) from e  # fmt: skip

    def _config(self) -> ModelConfig:
        get = _Metadata(self.metadata, self.path)
        architecture = get.text("general.architecture")
        if architecture != "llama":
            raise CheckpointError(
                "unsupported architecture", field=f"{self.path}: general.architecture", got=architecture,
                expected="llama", hint="Other supported models are read from their Hugging Face folder",
            )  # fmt: skip
        if get.integer("llama.expert_count", 0):
            raise CheckpointError("a mixture of experts", field=f"{self.path}: llama.expert_count", expected="0")
        heads = get.integer("llama.attention.head_count")
        hidden = get.integer("llama.embedding_length")
        head_dim = get.integer("llama.attention.key_length", 0) or hidden // max(heads, 1)
        rotated = get.integer("llama.rope.dimension_count", head_dim)
        if rotated != head_dim or get.integer("llama.attention.value_length", head_dim) != head_dim:
            raise CheckpointError(
                "key, value and rotated widths differ", field=f"{self.path}: llama.rope.dimension_count", got=rotated,
                expected=head_dim,
            )  # fmt: skip
        eos = [get.integer(f"tokenizer.ggml.{key}_token_id", -1) for key in ("eos", "eot")]
        bos = get.integer("tokenizer.ggml.bos_token_id", -1)
        embedding = self.tensors.get("token_embd.weight")
        return ModelConfig(
            architecture="llama",
            hidden_size=hidden,
            intermediate_size=get.integer("llama.feed_forward_length"),
            num_layers=get.integer("llama.block_count"),
            num_heads=heads,
            num_kv_heads=get.integer("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=get.integer("llama.vocab_size", embedding.shape[0] if embedding else 0),
            rms_norm_eps=get.number("llama.attention.layer_norm_rms_epsilon"),
            rope=self._rope(get),
            max_position_embeddings=get.integer("llama.context_length"),
            tie_word_embeddings="output.weight" not in self.tensors,
            qkv_bias="blk.0.attn_q.bias" in self.tensors,
            o_bias="blk.0.attn_output.bias" in self.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in self.tensors,
            eos_token_ids=tuple(dict.fromkeys(i for i in eos if i >= 0)),
            bos_token_id=bos if bos >= 0 else None,
        )

    def _rope(self, get: _Metadata) -> RopeConfig:
        theta = get.number("llama.rope.freq_base", 10000.0)
        kind = get.text("llama.rope.scaling.type", "none")
        if kind == "linear":
            return RopeConfig(theta, "linear", factor=get.number("llama.rope.scaling.factor"))
        if kind != "none":
            raise CheckpointError(
                "unsupported rope scaling", field=f"{self.path}: llama.rope.scaling.type", got=kind,
                expected="none or linear", hint="Read the model from its Hugging Face folder",
            )  # fmt: skip
        if ROPE_FREQS not in self.tensors:
            return RopeConfig(theta)
        factors = tuple(float(x) for x in self._dequantised(ROPE_FREQS).ravel())
        return RopeConfig(
            theta, "longrope", original_max_position=get.integer("llama.context_length"), attention_factor=1.0,
            short_factor=factors, long_factor=factors,
        )  # fmt: skip


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`; a name without translation stays as it is."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    return TOP_NAMES.get(name, name)


def unpermute(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows from interleaved pairs (2i, 2i + 1) back to halves (i, i + d/2), head by head.

    w: float32[heads * d, ...] weight or bias of q or k. Returns the same shape.
    """
    pairs = w.reshape(heads, w.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(w.shape)


class _Metadata:
    """Typed access to the metadata, so that a wrong type is a refusal with the key's name."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def _get(self, key: str, kinds: tuple[type, ...], default: Any) -> Any:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise CheckpointError(
                "missing" if value is None else "of another type", field=f"{self.path}: {key}", got=value,
                expected=kinds[0].__name__,
            )  # fmt: skip
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, (int,), default)
        if value >= 2**31:
            raise CheckpointError("too large", field=f"{self.path}: {key}", got=value, expected="< 2^31")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, (float, int), default))

    def text(self, key: str, default: str | None = None) -> str:
        return self._get(key, (str,), default)


class _Cursor:
    """A place in the file that moves on as values are taken. Reading past the end raises ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, n: int) -> bytes:
        if n > len(self.data) - self.at:
            raise ValueError(f"the header wants {n} bytes at {self.at}, the file has {len(self.data)}")
        self.at += n
        return self.data[self.at - n : self.at]

    def scalar(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0]

    def text(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def value(self, number: int) -> Any:
        """A metadata value of this type; arrays hold scalars or strings (the format's nested arrays are unused)."""
        if number == STRING:
            return self.text()
        if number in SCALARS:
            return self.scalar(SCALARS[number])
        if number != ARRAY:
            raise ValueError(f"unknown metadata type {number} before byte {self.at}")
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner == STRING:
            if count > len(self.data):  # each string takes eight bytes or more: do not start on an absurd count
                raise ValueError(f"an array of {count} strings in a file of {len(self.data)} bytes")
            return [self.text() for _ in range(count)]
        if inner not in SCALARS:
            raise ValueError(f"unknown array type {inner} before byte {self.at}")
        size = struct.calcsize("<" + SCALARS[inner])
        return list(struct.unpack(f"<{count}{SCALARS[inner]}", self.take(count * size)))


def _parse(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Header, metadata, tensor table, with every range checked against the file's size. Raises ValueError."""
    cursor = _Cursor(data)
    if cursor.take(4) != MAGIC:
        raise ValueError("it does not start with GGUF")
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise ValueError(f"version {version} (a big-endian file reads so too); versions {VERSIONS} are read")
    tensor_count, metadata_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"metadata key {key!r} comes twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    table = []
    for _ in range(tensor_count):
        name, num_dims = cursor.text(), cursor.scalar("I")
        if not 1 <= num_dims <= 4:
            raise ValueError(f"tensor {name!r} has {num_dims} dimensions")
        dims = [cursor.scalar("Q") for _ in range(num_dims)]
        table.append((name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment {alignment!r} is not a power of two")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_number, offset in table:
        if name in tensors:
            raise ValueError(f"tensor {name!r} comes twice")
        num_bytes = _num_bytes(name, shape, type_number)
        if start + offset + num_bytes > len(data):
            raise ValueError(f"tensor {name!r} ends at {start + offset + num_bytes}, the file at {len(data)}")
        tensors[name] = TensorInfo(shape, type_number, start + offset, num_bytes)
    return metadata, tensors


def _num_bytes(name: str, shape: tuple[int, ...], type_number: int) -> int:
    """Bytes of a tensor: its last axis is cut into blocks of a fixed number of values and bytes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_number)]
    count = 1
    for n in shape:
        count *= n
    if count < 1 or shape[-1] % block_values:
        raise ValueError(f"tensor {name!r} of shape {shape} is not made of blocks of {block_values}")
    return count // block_values * block_bytes
