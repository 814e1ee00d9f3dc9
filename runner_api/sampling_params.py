"""How one request wants its tokens drawn, with the range checks that run when the object is built.

Source: vLLM 0.33 `SamplingParams`. What a runner cannot do yet it refuses at admission
(`required_capabilities`), so that no parameter is ever ignored.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner_api.capabilities import Capability
from runner_api.errors import SamplingParamsError, UnknownNameError

# Temperatures between 0 and this are lifted to it: a smaller divisor overflows float32 logits.
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 2.0
MAX_N = 16384
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request. Greedy is exactly `temperature == 0`; it switches top-k, top-p and min-p off.

    Raises `SamplingParamsError` naming the field, the value and the legal range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0 and -1 mean "all"; stored as 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16  # None: up to max_model_len
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _normalise(self) -> None:
        number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            self._set("temperature", MIN_TEMPERATURE)
        self._set("stop", (self.stop,) if isinstance(self.stop, str) else items("stop", self.stop or (), str))
        ids = items("stop_token_ids", self.stop_token_ids or (), numbers.Integral)
        self._set("stop_token_ids", tuple(dict.fromkeys(ids)))
        if self.seed == -1:
            self._set("seed", None)
        integer("top_k", self.top_k, -1, INT64_MAX)
        number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        number("min_p", self.min_p, 0.0, 1.0)
        if self.top_k == -1:
            self._set("top_k", 0)
        if self.greedy:
            self._set("top_k", 0)
            self._set("top_p", 1.0)
            self._set("min_p", 0.0)

    def _check(self) -> None:
        integer("n", self.n, 1, 1 if self.greedy else MAX_N)
        if self.seed is not None:
            integer("seed", self.seed, INT64_MIN, INT64_MAX)
        number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        if self.max_tokens is not None:
            integer("max_tokens", self.max_tokens, 1, INT64_MAX)
        integer("min_tokens", self.min_tokens, 0, INT64_MAX if self.max_tokens is None else self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                integer(name, value, -1, INT64_MAX)
        if any(not s for s in self.stop):
            raise SamplingParamsError("a stop string is empty", field="stop", got=self.stop)
        for token in self.stop_token_ids:
            integer("stop_token_ids", token, 0, INT64_MAX)
        allowed = self.allowed_token_ids
        if allowed is not None and not items("allowed_token_ids", allowed, numbers.Integral):
            raise SamplingParamsError("no token is allowed", field="allowed_token_ids", expected="at least one id")

    def required_capabilities(self) -> frozenset[Capability]:
        """What a runner must offer to serve these parameters (stop conditions are the engine's)."""
        needs = {
            Capability.SEEDED_SAMPLING: not self.greedy,
            Capability.TOP_K: self.top_k > 0,
            Capability.TOP_P: self.top_p < 1.0,
            Capability.MIN_P: self.min_p > 0.0,
            Capability.LOGPROBS: self.logprobs is not None,
            Capability.PROMPT_LOGPROBS: self.prompt_logprobs is not None,
            Capability.PENALTIES: bool(self.presence_penalty or self.frequency_penalty)
            or self.repetition_penalty != 1.0,
            Capability.LOGIT_BIAS: bool(self.logit_bias),
            Capability.ALLOWED_TOKEN_IDS: self.allowed_token_ids is not None,
            Capability.MIN_TOKENS: self.min_tokens > 0,
            Capability.BAD_WORDS: bool(self.bad_words_token_ids),
        }
        return frozenset(c for c, needed in needs.items() if needed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-ready; `from_dict` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping; an unknown key is an error that lists the valid names."""
        names = {f.name for f in dataclasses.fields(cls)}
        for key in values:
            if key not in names:
                raise UnknownNameError("sampling parameter", key, names)
        return cls(**{k: _hashable(v) for k, v in values.items()})


def _hashable(value: Any) -> Any:
    return tuple(_hashable(v) for v in value) if isinstance(value, list) else value


def items(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    """The value as a tuple; refuse what is not a list, tuple or set of `kind`."""
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(v, kind) for v in value):
        raise SamplingParamsError("wrong kind", field=name, got=value, expected=f"a list of {kind.__name__}")
    return tuple(value)


def number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Refuse what is not a finite real number in [low, high] (or (low, high] with `open_low`)."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_real or not low <= value <= high or value == math.inf or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise SamplingParamsError(
            "out of range", field=name, got=value, expected=f"a number in {bracket}{low}, {high}]"
        )


def integer(name: str, value: Any, low: int, high: int) -> None:
    """Refuse what is not an integer in [low, high]."""
    is_integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integral or not low <= value <= high:
        raise SamplingParamsError("out of range", field=name, got=value, expected=f"an integer in [{low}, {high}]")
