"""Grammars by llguidance: JSON schemas, regular expressions, choices, and context-free grammars in Lark's notation."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from engine_core.structured_output import GrammarError, TokenizerFacts, clear_bits
from runner_api import EngineError, StructuredOutputsParams

ANY_OBJECT = '{"type": "object"}'
# llguidance repeats its whole state in an error's text unless told not to.
NOT_VERBOSE = "<non-verbose/>"
DEAD_END = "NoExtension"  # its name for a state from which no token leads on


class LLGuidanceBackend:
    """See `structured_output.GrammarBackend`. Building one reads the whole vocabulary (a fifth of a second for 50k)."""

    name = "llguidance"

    def __init__(self, facts: TokenizerFacts) -> None:
        import llguidance

        # Only ends that the tokenizer knows; a list must not be empty.
        ends = [t for t in facts.eos_token_ids if t < facts.num_tokens]
        try:
            self._tokenizer = llguidance.LLTokenizer(
                facts.serialized, n_vocab=max(facts.vocab_size, facts.num_tokens), eos_token=ends or None
            )
        except ValueError as e:
            raise EngineError(
                f"llguidance cannot read this model's tokenizer: {_one_line(str(e))}", field="structured_outputs"
            ) from e
        self._matcher = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._vocab_size = facts.vocab_size
        self._ends = frozenset(ends)
        # A model without an end of sequence: llguidance picks one nevertheless, whose bit must not be set.
        self._stand_ins = tuple(set(self._tokenizer.eos_tokens) - self._ends)

    def compile(self, params: StructuredOutputsParams) -> LLGuidanceMatcher:
        field = f"structured_outputs.{params.kind}"
        try:
            inner = self._matcher(self._tokenizer, self._grammar(params), log_level=0, limits=self._limits)
        except ValueError as e:
            raise _refusal(field, params, str(e)) from e
        if inner.is_error():
            raise _refusal(field, params, inner.get_error())
        matcher = LLGuidanceMatcher(inner, self._ends, self._stand_ins)
        try:
            matcher.fill_bitmask(np.empty(-(-self._vocab_size // 32), np.int32))
        except GrammarError as e:  # one that admits no text at all
            raise _refusal(field, params, e.what) from e
        return matcher

    def _grammar(self, params: StructuredOutputsParams) -> str:
        """In llguidance's own notation."""
        if params.json is not None or params.json_object is not None:
            return self._matcher.grammar_from_json_schema(str(params.json or ANY_OBJECT))
        if params.regex is not None:
            return self._matcher.grammar_from_regex(params.regex)
        if params.choice is not None:
            # A Lark string is written as a JSON string is.
            return self._matcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in params.choice))
        return self._matcher.grammar_from_lark(str(params.grammar))


class LLGuidanceMatcher:
    """See `structured_output.Matcher`."""

    def __init__(self, inner: Any, ends: frozenset[int], stand_ins: tuple[int, ...]) -> None:
        self._inner = inner
        self._ends = ends
        self._stand_ins = stand_ins
        self._ended = False  # by an end-of-sequence token, which the inner matcher is not told of

    def fill_bitmask(self, words: np.ndarray) -> None:
        mask = np.frombuffer(self._inner.compute_bitmask(), np.int32)
        self._check()
        words[:] = mask[: len(words)]
        clear_bits(words, self._stand_ins)
        if not words.any():
            raise GrammarError("the grammar admits nothing more, and the model has no end of sequence")

    def accept(self, token_id: int) -> bool:
        if self._ended:
            return False
        if token_id in self._ends and self._inner.is_accepting():
            self._ended = True
            return True
        taken = self._inner.try_consume_tokens([token_id])
        self._check()
        return bool(taken)

    def rollback(self, num_tokens: int) -> None:
        inner = num_tokens - self._ended
        self._ended = False
        if inner and not self._inner.rollback(inner):
            self._check()

    def is_terminated(self) -> bool:
        return self._ended or bool(self._inner.is_stopped())

    def _check(self) -> None:
        if self._inner.is_error():
            reason = _one_line(self._inner.get_error())
            if reason.startswith(DEAD_END):
                reason = "no text can follow"
            raise GrammarError(f"llguidance gave the grammar up: {reason}")


def _refusal(field: str, params: StructuredOutputsParams, reason: str) -> EngineError:
    return EngineError(
        f"cannot be compiled: {_one_line(reason)}", field=field, got=getattr(params, params.kind),
        expected="a form that llguidance knows",
    )  # fmt: skip


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.replace(NOT_VERBOSE, "").split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
