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
from runner_api.checks import is_integer
from runner_api.constants import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
)
from runner_api.errors import SamplingParamsError, UnknownNameError
from runner_api.structured_outputs import StructuredOutputsParams

# Temperatures between 0 and this are lifted to it: a smaller divisor overflows float32 logits.
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 2.0
MAX_N = 16384
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MAX = 2**31 - 1
FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
# Repetition penalties outside of this are not ordinary float32 numbers with an ordinary reciprocal.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 2.0**-126, 2.0**126


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
    logprob_token_ids: tuple[int, ...] | None = None  # score these instead of the top n
    thinking_token_budget: int | None = None  # needs RunnerConfig.reasoning
    structured_outputs: StructuredOutputsParams | None = None
    trace_decode_token_ids: tuple[int, ...] | None = None  # take these tokens instead of the drawn ones
    extra_args: Mapping[str, Any] | None = None  # for custom logits processors

    def __post_init__(self) -> None:
        self._normalise()
        self._check()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _normalise(self) -> None:
        """Plain Python numbers and tuples, so that equal parameters are equal objects and travel as JSON."""
        self._set("temperature", number("temperature", self.temperature, 0.0, MAX_TEMPERATURE))
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            self._set("temperature", MIN_TEMPERATURE)
        stop = () if self.stop is None else self.stop
        self._set("stop", (stop,) if isinstance(stop, str) else items("stop", stop, str))
        ids = token_ids("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids)
        self._set("stop_token_ids", tuple(dict.fromkeys(ids)))
        if self.seed is not None:
            seed = integer("seed", self.seed, INT64_MIN, INT64_MAX)
            self._set("seed", None if seed == -1 else seed)
        self._set("top_k", max(integer("top_k", self.top_k, -1, INT64_MAX), 0))
        self._set("top_p", number("top_p", self.top_p, 0.0, 1.0, open_low=True))
        self._set("min_p", number("min_p", self.min_p, 0.0, 1.0))
        if self.greedy:
            self._set("top_k", 0)
            self._set("top_p", 1.0)
            self._set("min_p", 0.0)
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", token_ids("allowed_token_ids", self.allowed_token_ids))
        if self.bad_words_token_ids is not None:
            words = items("bad_words_token_ids", self.bad_words_token_ids, (list, tuple))
            self._set("bad_words_token_ids", tuple(token_ids("bad_words_token_ids", word) for word in words))
        if self.logit_bias is not None:
            self._set("logit_bias", bias("logit_bias", self.logit_bias))
        for name in ("logprob_token_ids", "trace_decode_token_ids"):
            if getattr(self, name) is not None:
                self._set(name, token_ids(name, getattr(self, name)))
        if self.thinking_token_budget is not None:
            budget = integer("thinking_token_budget", self.thinking_token_budget, -1, INT64_MAX)
            self._set("thinking_token_budget", None if budget == -1 else min(budget, INT32_MAX))
        if self.structured_outputs is not None:
            self._set("structured_outputs", form("structured_outputs", self.structured_outputs))
        if self.extra_args is not None:
            self._set("extra_args", arguments("extra_args", self.extra_args))

    def _check(self) -> None:
        self._set("n", integer("n", self.n, 1, 1 if self.greedy else MAX_N))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, number(name, getattr(self, name), -2.0, 2.0))
        low, high = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        self._set("repetition_penalty", number("repetition_penalty", self.repetition_penalty, low, high))
        if self.max_tokens is not None:
            self._set("max_tokens", integer("max_tokens", self.max_tokens, 1, INT64_MAX))
        most = INT64_MAX if self.max_tokens is None else self.max_tokens
        self._set("min_tokens", integer("min_tokens", self.min_tokens, 0, most))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, integer(name, getattr(self, name), -1, INT64_MAX))
        if not isinstance(self.ignore_eos, bool):
            raise SamplingParamsError("a switch is on or off", field="ignore_eos", got=self.ignore_eos, expected="bool")
        if any(not s for s in self.stop):
            raise SamplingParamsError("a stop string is empty", field="stop", got=self.stop)
        if self.allowed_token_ids == ():
            raise SamplingParamsError("no token is allowed", field="allowed_token_ids", expected="at least one id")
        if any(not word for word in self.bad_words_token_ids or ()):
            raise SamplingParamsError(
                "a bad word has no token", field="bad_words_token_ids", got=self.bad_words_token_ids,
                expected="at least one id per word",
            )  # fmt: skip

        self._check_limits()
        self._check_logprobs()
        self._check_trace()

    def _check_limits(self) -> None:
        """What the sampler's tables have room for."""
        words = self.bad_words_token_ids or ()
        for name, count, most, what in (
            ("logit_bias", len(self.logit_bias or ()), MAX_LOGIT_BIAS, "tokens with a bias"),
            ("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS, "stop token ids"),
            ("bad_words_token_ids", len(words), MAX_BAD_WORDS, "bad words"),
            ("bad_words_token_ids", sum(map(len, words)), MAX_BAD_WORD_TOKENS, "tokens in all bad words"),
            ("logprob_token_ids", len(self.logprob_token_ids or ()), MAX_LOGPROB_TOKEN_IDS, "token ids to score"),
        ):
            if count > most:
                raise SamplingParamsError(f"too many {what}", field=name, got=count, expected=f"at most {most}")

    def _check_logprobs(self) -> None:
        ids = self.logprob_token_ids
        if ids is None:
            return
        if not ids:
            raise SamplingParamsError("no token to score", field="logprob_token_ids", expected="at least one id")
        if self.logprobs is not None and self.logprobs != len(ids):
            raise SamplingParamsError(
                "logprobs and logprob_token_ids ask for different numbers", field="logprobs", got=self.logprobs,
                expected=f"{len(ids)} or None",
            )  # fmt: skip

    def _check_trace(self) -> None:
        """A replayed request draws nothing, so nothing may depend on what it would have drawn."""
        if self.trace_decode_token_ids is None:
            return
        if not self.trace_decode_token_ids:
            raise SamplingParamsError("an empty trace", field="trace_decode_token_ids", expected="at least one id")
        for name, neutral in (
            ("n", 1), ("prompt_logprobs", None), ("structured_outputs", None), ("thinking_token_budget", None),
            ("bad_words_token_ids", None),
        ):  # fmt: skip
            if getattr(self, name) != neutral:
                raise SamplingParamsError(
                    "cannot be combined with trace_decode_token_ids", field=name, got=getattr(self, name),
                    expected=repr(neutral),
                )  # fmt: skip

    def required_capabilities(self) -> frozenset[Capability]:
        """What a runner must offer to serve these parameters (stop conditions are the engine's)."""
        needs = {
            Capability.SEEDED_SAMPLING: not self.greedy,
            Capability.TOP_K: self.top_k > 0,
            Capability.TOP_P: self.top_p < 1.0,
            Capability.MIN_P: self.min_p > 0.0,
            Capability.LOGPROBS: self.logprobs is not None or self.logprob_token_ids is not None,
            Capability.PROMPT_LOGPROBS: self.prompt_logprobs is not None,
            Capability.PENALTIES: bool(self.presence_penalty or self.frequency_penalty)
            or self.repetition_penalty != 1.0,
            Capability.LOGIT_BIAS: bool(self.logit_bias),
            Capability.ALLOWED_TOKEN_IDS: self.allowed_token_ids is not None,
            Capability.MIN_TOKENS: self.min_tokens > 0,
            Capability.BAD_WORDS: bool(self.bad_words_token_ids),
            Capability.THINKING_BUDGET: self.thinking_token_budget is not None,
            Capability.GRAMMAR: self.structured_outputs is not None,
            Capability.TRACE_REPLAY: self.trace_decode_token_ids is not None,
        }
        return frozenset(c for c, needed in needs.items() if needed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-ready; `from_dict` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping; an unknown key is an error that lists the valid names.

        JSON knows text keys only, so the token ids of `logit_bias` may come as text.
        """
        if not isinstance(values, Mapping):
            raise SamplingParamsError("parameters come as a mapping", got=values, expected="a dict of name to value")
        names = {f.name for f in dataclasses.fields(cls)}
        for key in values:
            if key not in names:
                raise UnknownNameError("sampling parameter", key, names)
        plain = dict(values)
        if isinstance(plain.get("logit_bias"), Mapping):
            plain["logit_bias"] = {
                int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in plain["logit_bias"].items()
            }
        return cls(**plain)


def items(name: str, value: Any, kind: type | tuple[type, ...]) -> tuple[Any, ...]:
    """The value as a tuple; refuse what is not a list, tuple or set of `kind`."""
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(v, kind) for v in value):
        kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise SamplingParamsError(
            "is not a list of the right kind", field=name, got=value, expected=f"a list of {kinds}"
        )
    return tuple(value)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """The token ids as a tuple; refuse what is no list of integers >= 0 (the model knows the upper end)."""
    return tuple(integer(name, token, 0, INT64_MAX) for token in items(name, value, object))


def bias(name: str, value: Any) -> dict[int, float]:
    """A copy with plain numbers; refuse what is not a mapping of token ids to numbers that float32 holds."""
    if not isinstance(value, Mapping):
        raise SamplingParamsError("is not a mapping", field=name, got=value, expected="a dict of token id to number")
    return {integer(name, k, 0, INT64_MAX): number(name, v, -FLOAT32_MAX, FLOAT32_MAX) for k, v in value.items()}


def form(name: str, value: Any) -> StructuredOutputsParams:
    """The form of an answer, also from a mapping of its fields."""
    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise SamplingParamsError("no form", field=name, got=value, expected="a StructuredOutputsParams or a mapping")
    names = {f.name for f in dataclasses.fields(StructuredOutputsParams)}
    for key in value:
        if key not in names:
            raise UnknownNameError("form", key, names, field=name)
    return StructuredOutputsParams(**value)


def arguments(name: str, value: Any) -> dict[str, Any]:
    """A copy; refuse what is not a mapping of names to anything."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise SamplingParamsError("is not a mapping of names", field=name, got=value, expected="a dict of str to value")
    return dict(value)


def number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """The value as a float; refuse what is not a finite real number in [low, high] (or (low, high])."""
    try:
        plain = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer or fraction beyond every float
        plain = math.inf
    if not math.isfinite(plain) or not low <= plain <= high or (open_low and plain == low):
        bracket = "(" if open_low else "["
        raise SamplingParamsError(
            "out of range", field=name, got=value, expected=f"a finite number in {bracket}{low}, {high}]"
        )
    return plain


def integer(name: str, value: Any, low: int, high: int) -> int:
    """The value as an int; refuse what is not an integer in [low, high]."""
    if not is_integer(value) or not low <= value <= high:
        raise SamplingParamsError("out of range", field=name, got=value, expected=f"an integer in [{low}, {high}]")
    return int(value)
