"""Whether a request may be queued, and as what: every check that can be made before a step sees it.

What a runner would refuse in a plan must be refused here: there it would end every other request of the step too.
Knows the runner by its description and configuration only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from engine_core.logprobs import DEFAULT_MAX_LOGPROBS
from engine_core.request import Request
from engine_core.structured_output import GrammarBackend, Matcher
from runner_api import (
    Capability,
    CapabilityError,
    EngineError,
    NewRequestData,
    PlanError,
    RunnerConfig,
    RunnerInfo,
    SamplingParams,
)
from runner_api.checks import is_integer
from runner_api.logits_processors import HostArrays, LogitsProcessor, build_processors, check_params
from runner_api.new_request_checks import check_features, check_sampling_params


def require(runner_info: RunnerInfo, wanted: frozenset[Capability] | set[Capability], req_id: str | None) -> None:
    """Refuse what the runner does not offer. Raises `CapabilityError`."""
    missing = sorted(c.value for c in wanted - runner_info.capabilities)
    if missing:
        raise CapabilityError(
            f"runner {runner_info.name!r} does not offer {', '.join(missing)}",
            req_id=req_id,
            hint="`modelrunner runners` lists what each runner offers",
        )


class Admission:
    """The gate of one engine.

    eos_token_ids: tokens that end a request unless it says `ignore_eos`.
    grammar_backend: builds what compiles grammars; called when the first request needs it. None: there is no tokenizer.
    max_logprobs: the most log probabilities per token that a request may ask for, -1 for no limit.
    """

    def __init__(
        self,
        runner_info: RunnerInfo,
        runner_config: RunnerConfig,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        grammar_backend: Callable[[], GrammarBackend] | None,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
    ) -> None:
        self.runner_info = runner_info
        self.runner_config = runner_config
        self.vocab_size = vocab_size
        self.max_logprobs = max_logprobs
        # An end that the model cannot draw ends nothing.
        self.eos_token_ids = frozenset(t for t in eos_token_ids if t < vocab_size)
        self._make_grammar_backend = grammar_backend
        self._grammar_backend: GrammarBackend | None = None
        self._processors: list[LogitsProcessor] | None = None

    def admit(self, req_id: str, prompt_token_ids: Any, params: Any, extra_keys: Any) -> Request:
        """A request that every part of the engine can serve. Raises what `Engine.add_request` says."""
        self._check_types(req_id, prompt_token_ids, params, extra_keys)
        self._check_tokens(req_id, "prompt_token_ids", prompt_token_ids)
        self._check_params(req_id, params)
        eos = self.eos_token_ids
        if params.trace_decode_token_ids is not None:
            params, eos = self._replayed(params, len(prompt_token_ids)), frozenset()
        request = Request(req_id, tuple(map(int, prompt_token_ids)), params, params.seed or 0, eos, tuple(extra_keys))
        self._check_as_new(request)
        request.matcher = self._compile(req_id, params)  # last: it costs the most
        return request

    def _check_types(self, req_id: str, tokens: Any, params: Any, extra_keys: Any) -> None:
        if not isinstance(req_id, str):
            raise EngineError("a request is named by a string", field="req_id", got=req_id, expected="a str")
        if not isinstance(tokens, (list, tuple, range, np.ndarray)):
            raise EngineError(
                "not a list of token ids", field="prompt_token_ids", req_id=req_id, got=tokens, expected="a list"
            )
        if not isinstance(params, SamplingParams):
            raise EngineError(
                "not sampling parameters", field="params", req_id=req_id, got=params, expected="SamplingParams"
            )
        if not isinstance(extra_keys, (list, tuple)) or not all(isinstance(key, str) for key in extra_keys):
            raise EngineError(
                "keys are strings", field="extra_keys", req_id=req_id, got=extra_keys, expected="a tuple of str"
            )

    def _check_params(self, req_id: str, params: SamplingParams) -> None:
        for field in (
            "allowed_token_ids", "logit_bias", "stop_token_ids", "logprob_token_ids", "trace_decode_token_ids",
        ):  # fmt: skip
            self._check_tokens(req_id, field, getattr(params, field) or ())
        for word in params.bad_words_token_ids or ():
            self._check_tokens(req_id, "bad_words_token_ids", word)
        require(self.runner_info, params.required_capabilities(), req_id)
        self._check_thinking(req_id, params)
        self._check_processors(req_id, params)
        self._check_logprobs(req_id, params)
        if params.n != 1:
            raise EngineError(
                "one request is one sequence",
                field="n",
                req_id=req_id,
                got=params.n,
                expected="1",
                hint="Add n requests with a seed each, as LLM.generate does",
            )

    def _check_logprobs(self, req_id: str, params: SamplingParams) -> None:
        for field in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, field)
            if wanted is None:
                continue
            if wanted > self.vocab_size:
                raise EngineError(
                    "more log probabilities than tokens", field=field, req_id=req_id, got=wanted,
                    expected=f"-1 .. {self.vocab_size}",
                )  # fmt: skip
            if 0 <= self.max_logprobs < (self.vocab_size if wanted == -1 else wanted):
                raise EngineError(
                    "more log probabilities than this engine hands out", field=field, req_id=req_id,
                    got=f"-1, all {self.vocab_size}" if wanted == -1 else wanted,
                    expected=f"at most max_logprobs = {self.max_logprobs}",
                    hint="Raise the engine's max_logprobs, or set it to -1 for no limit",
                )  # fmt: skip
        for field in ("logprobs", "logprob_token_ids"):
            if getattr(params, field) is not None and self.runner_config.num_speculative_tokens:
                raise CapabilityError(
                    "log probabilities together with drafts", field=field, req_id=req_id, got=getattr(params, field),
                    expected="None, or num_speculative_tokens = 0",
                )  # fmt: skip

    def _check_thinking(self, req_id: str, params: SamplingParams) -> None:
        if params.thinking_token_budget is not None and params.structured_outputs is not None:
            raise EngineError(
                "the end of thinking is forced, whatever a grammar says", field="thinking_token_budget", req_id=req_id,
                got=params.thinking_token_budget, expected="None together with structured_outputs",
            )  # fmt: skip

    def _check_tokens(self, req_id: str, field: str, tokens: Iterable[Any]) -> None:
        for token in tokens:
            if not is_integer(token) or not 0 <= token < self.vocab_size:
                raise EngineError(
                    "not a token id", field=field, req_id=req_id, got=token, expected=f"0 <= id < {self.vocab_size}"
                )

    def _check_as_new(self, request: Request) -> None:
        """The checks that a runner's plan validator makes of a new request."""
        new = NewRequestData(
            request.req_id, request.prompt_token_ids, request.prompt_token_ids, 0, (), request.sampling_params,
            request.seed, tuple(request.eos_token_ids),
        )  # fmt: skip
        try:
            check_features(new, self.runner_info.capabilities)
            check_sampling_params(new, self.runner_config, self.vocab_size)
        except PlanError as e:
            raise EngineError(
                e.what, code=e.code, field=e.field, req_id=request.req_id, got=e.got, expected=e.expected, hint=e.hint
            ) from e

    def _check_processors(self, req_id: str, params: SamplingParams) -> None:
        """The engine has processors of its own, only to ask them what they refuse: the runner's may be far away."""
        factories = self.runner_config.logits_processors
        if self._processors is None:
            self._processors = build_processors(factories, 1, self.vocab_size, HostArrays())
        check_params(self._processors, params, req_id)

    def _replayed(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """Parameters of a request whose tokens are given: it stops where they do, and nowhere before."""
        room = max(1, self.runner_config.max_model_len - prompt_len)
        trace = (params.trace_decode_token_ids or ())[:room]
        most = len(trace) if params.max_tokens is None else min(len(trace), params.max_tokens)
        return replace(
            params, trace_decode_token_ids=trace, max_tokens=most, min_tokens=0, ignore_eos=True, stop=(),
            stop_token_ids=(),
        )  # fmt: skip

    def _compile(self, req_id: str, params: SamplingParams) -> Matcher | None:
        if params.structured_outputs is None:
            return None
        if self._make_grammar_backend is None:
            raise EngineError(
                "a grammar is about text, and this model has no tokenizer", field="structured_outputs", req_id=req_id,
                got=params.structured_outputs.kind, expected="None",
            )  # fmt: skip
        if self._grammar_backend is None:
            self._grammar_backend = self._make_grammar_backend()
        return self._grammar_backend.compile(params.structured_outputs)
