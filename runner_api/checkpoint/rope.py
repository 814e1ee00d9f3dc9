"""Rotary position embedding: from the numbers of a model file to one frequency per pair of a head's channels.

A head of d channels is seen as d/2 pairs (i, i + d/2). At position p pair i is turned by the angle
p * inverse_frequency[i], and cos and sin are multiplied by `mscale`. Scaling schemes change only these two; the
rotation itself never changes. Knows nothing of files, dtypes or tables: whoever runs a model builds its own table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner_api.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# Above any number in use, and small enough that no formula below overflows.
LIMIT = 1e12
LEGACY_ROPE_TYPES = {"su": "longrope"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Numbers of one scheme. Fields that the scheme does not read keep their defaults.

    `original_max_position` is the length the model was first trained on; `attention_factor` is what cos and sin are
    multiplied by (None: the scheme's own rule). Raises `CheckpointError` naming the field.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise CheckpointError(
                "unknown rope type", field="rope_type", got=self.rope_type, expected=f"one of {', '.join(ROPE_TYPES)}"
            )
        positive = ["theta"]
        if self.rope_type != "default":
            positive += ["factor"]
        if self.rope_type in ("dynamic", "llama3", "yarn", "longrope"):
            positive += ["original_max_position"]
        if self.rope_type == "llama3":
            positive += ["low_freq_factor", "high_freq_factor"]
        if self.rope_type == "yarn":
            positive += ["beta_fast", "beta_slow"]
        if self.attention_factor is not None:
            positive += ["attention_factor"]
        for name in positive:
            value = getattr(self, name)
            if not 0 < value < LIMIT:  # false for NaN too
                raise CheckpointError("out of range", field=f"rope.{name}", got=value, expected=f"0 < x < {LIMIT:g}")
        if self.theta <= 1.0:
            raise CheckpointError("later pairs must turn slower", field="rope.theta", got=self.theta, expected="> 1")
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise CheckpointError(
                "not below rope.high_freq_factor", field="rope.low_freq_factor", got=self.low_freq_factor,
                expected=f"< {self.high_freq_factor}",
            )  # fmt: skip
        if self.rope_type == "longrope":
            for name in ("short_factor", "long_factor"):
                values = getattr(self, name)
                if not values or not all(0 < v < LIMIT for v in values):
                    raise CheckpointError("not a list of positive numbers", field=f"rope.{name}", got=values)
        if self.rope_type == "longrope" and self.attention_factor is None and self.original_max_position < 2:
            raise CheckpointError(
                "too small", field="rope.original_max_position", got=self.original_max_position, expected=">= 2"
            )

    def check_head_dim(self, head_dim: int) -> None:
        """Whether the numbers fit heads of this many channels. Raises `CheckpointError`."""
        if self.rope_type == "dynamic" and head_dim <= 2:
            raise CheckpointError("dynamic scaling needs more than one pair", field="head_dim", got=head_dim)
        if self.rope_type == "longrope":
            for name in ("short_factor", "long_factor"):
                got, expected = len(getattr(self, name)), head_dim // 2
                if got != expected:
                    raise CheckpointError("wrong length", field=f"rope.{name}", got=got, expected=expected)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_position: int) -> tuple[np.ndarray, float]:
    """The angle per position of each pair of channels, and the factor on cos and sin.

    head_dim: channels of a head, even. max_position: the longest sequence this run serves (longrope alone looks at it:
    past the trained length every position uses the long factors, so that a cached key never changes its angle).
    Returns float64[head_dim // 2] and mscale. Raises `CheckpointError` where the numbers do not fit head_dim.

    Sources: linear (kaiokendev 2023), dynamic NTK (bloc97 2023; taken at factor times the trained length, as vLLM
    does, instead of following the current length), llama3 (Llama 3.1), YaRN (arXiv 2309.00071), LongRoPE (2402.13753).
    """
    rope.check_head_dim(head_dim)
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    inverse = rope.theta**-exponent
    if rope.rope_type == "default":
        return inverse, 1.0
    if rope.rope_type == "linear":
        return inverse / rope.factor, 1.0
    if rope.rope_type == "dynamic":
        stretch = rope.factor * rope.factor - (rope.factor - 1.0)
        return (rope.theta * stretch ** (head_dim / (head_dim - 2))) ** -exponent, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim, inverse)
    return _longrope(rope, inverse, max_position)


def _llama3(rope: RopeConfig, inverse: np.ndarray) -> np.ndarray:
    """Short waves stay, long waves are stretched by `factor`, those between are blended by how often they turn."""
    turns = rope.original_max_position * inverse / (2 * math.pi)  # full turns within the trained length
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * inverse + (1.0 - keep) * inverse / rope.factor


def _yarn(rope: RopeConfig, head_dim: int, inverse: np.ndarray) -> tuple[np.ndarray, float]:
    """A straight ramp over the pair index, from the pair that turns beta_fast times to the one that turns beta_slow."""

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(rope.original_max_position / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp; without it the division below is 0 / 0
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    mscale = rope.attention_factor if rope.attention_factor is not None else yarn_mscale(rope.factor)
    return (1.0 - ramp) * inverse + ramp * inverse / rope.factor, mscale


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's rule for cos and sin: 1 + 0.1 * weight * ln(factor); nothing to make up for where nothing is stretched."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(rope: RopeConfig, inverse: np.ndarray, max_position: int) -> tuple[np.ndarray, float]:
    name = "long_factor" if max_position > rope.original_max_position else "short_factor"
    factors = np.array(getattr(rope, name), dtype=np.float64)
    if rope.attention_factor is not None:
        mscale = rope.attention_factor
    elif rope.factor <= 1.0:
        mscale = 1.0
    else:
        mscale = math.sqrt(1.0 + math.log(rope.factor) / math.log(rope.original_max_position))
    return inverse / factors, mscale


def rope_config_from_hf(hf: Mapping[str, Any], *, max_position: int, default_theta: float | None) -> RopeConfig:
    """Read `rope_parameters` (new files) or `rope_scaling` with `rope_theta` (old files) of a config.json.

    default_theta: what a file without a theta means; None where readers disagree, so that it is refused.
    Raises `CheckpointError` naming the key.
    """
    where, block = "rope_parameters", hf.get("rope_parameters")
    if block is None:
        where, block = "rope_scaling", hf.get("rope_scaling")
    block = {} if block is None else block
    if not isinstance(block, Mapping):
        raise CheckpointError("not an object", field=where, got=block)

    def number(key: str, default: float | None = None) -> float:
        value = block.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError("missing", field=f"{where}.{key}")
        return finite_number(value, f"{where}.{key}")

    partial = block.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise CheckpointError("only a part of each head is rotated", field="partial_rotary_factor", got=partial)
    rope_type = block.get("rope_type") or block.get("type") or "default"
    if not isinstance(rope_type, str):
        raise CheckpointError("not a name", field=f"{where}.rope_type", got=rope_type)
    rope_type = LEGACY_ROPE_TYPES.get(rope_type, rope_type)
    outer_theta = hf.get("rope_theta")
    theta = number("rope_theta", default_theta if outer_theta is None else finite_number(outer_theta, "rope_theta"))
    if rope_type not in ROPE_TYPES or rope_type == "default":
        return RopeConfig(theta, rope_type)  # refuses an unknown name before its own keys are looked for

    original = hf.get("original_max_position_embeddings")
    if original is None:
        original = number("original_max_position_embeddings", max_position)
    original = finite_number(original, "original_max_position_embeddings")
    if rope_type == "dynamic":
        original = max_position
    # yarn and longrope files may leave the factor out: it is the ratio of the two lengths.
    ratio = max_position / original if rope_type in ("yarn", "longrope") and original > 0 else None
    factor = number("factor", ratio)
    attention_factor = None if block.get("attention_factor") is None else number("attention_factor")
    if rope_type == "yarn" and attention_factor is None and block.get("mscale") and block.get("mscale_all_dim"):
        above, below = (yarn_mscale(factor, number(key)) for key in ("mscale", "mscale_all_dim"))
        attention_factor = above / below if below else math.inf  # infinity is refused by RopeConfig
    truncate = block.get("truncate", True)
    if not isinstance(truncate, bool):
        raise CheckpointError("not true or false", field=f"{where}.truncate", got=truncate)
    llama3 = rope_type == "llama3"
    return RopeConfig(
        theta=theta,
        rope_type=rope_type,
        factor=factor,
        low_freq_factor=number("low_freq_factor", None if llama3 else 1.0),
        high_freq_factor=number("high_freq_factor", None if llama3 else 4.0),
        original_max_position=int(original),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=truncate,
        short_factor=_numbers(block, "short_factor", where),
        long_factor=_numbers(block, "long_factor", where),
    )


def finite_number(value: Any, field: str) -> float:
    """The value as a float. Raises `CheckpointError` for anything else than a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300 or not math.isfinite(value):
        raise CheckpointError("not a number", field=field, got=value)
    return float(value)


def _numbers(block: Mapping[str, Any], key: str, where: str) -> tuple[float, ...]:
    values = block.get(key)
    if values is None:
        return ()
    if not isinstance(values, list):
        raise CheckpointError("not a list", field=f"{where}.{key}", got=values)
    return tuple(finite_number(v, f"{where}.{key}") for v in values)
