"""Grammars by xgrammar, for whoever has it installed; since it brings torch along, no extra of ours installs it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from engine_core.structured_output import GrammarError, TokenizerFacts, clear_bits
from runner_api import EngineError, StructuredOutputsParams

ANY_OBJECT = '{"type": "object"}'
MAX_ROLLBACK_TOKENS = 256  # more drafts than any step verifies


class XGrammarBackend:
    """See `structured_output.GrammarBackend`."""

    name = "xgrammar"

    def __init__(self, facts: TokenizerFacts) -> None:
        import xgrammar

        self._module = xgrammar
        self._facts = facts
        vocab_type = getattr(xgrammar.VocabType, _vocab_type(facts.serialized))
        info = xgrammar.TokenizerInfo(
            _vocabulary(facts),
            vocab_type,
            vocab_size=facts.vocab_size,
            stop_token_ids=list(facts.eos_token_ids) or None,
        )
        self._compiler = xgrammar.GrammarCompiler(info)

    def compile(self, params: StructuredOutputsParams) -> XGrammarMatcher:
        ends = self._facts.eos_token_ids
        try:
            inner = self._module.GrammarMatcher(
                self._compiled(params), override_stop_tokens=list(ends) or None, terminate_without_stop_token=not ends,
                max_rollback_tokens=MAX_ROLLBACK_TOKENS,
            )  # fmt: skip
        except Exception as e:  # the library raises RuntimeError and kinds of its own
            raise EngineError(
                "cannot be compiled: " + " ".join(str(e).split())[:300], field=f"structured_outputs.{params.kind}",
                got=getattr(params, params.kind), expected="a form that xgrammar knows",
            ) from e  # fmt: skip
        return XGrammarMatcher(inner, self._module.allocate_token_bitmask(1, self._facts.vocab_size), ends)

    def _compiled(self, params: StructuredOutputsParams) -> Any:
        compiler = self._compiler
        if params.json is not None or params.json_object is not None:
            # Not strict: as JSON Schema has it, an object may have more properties unless the schema forbids them.
            return compiler.compile_json_schema(params.json or ANY_OBJECT, strict_mode=False)
        if params.regex is not None:
            return compiler.compile_regex(params.regex)
        if params.choice is not None:
            texts = (json.dumps(text, ensure_ascii=False) for text in params.choice)
            return compiler.compile_grammar("root ::= " + " | ".join(texts))
        return compiler.compile_lark(params.grammar)  # an older xgrammar has no such method


class XGrammarMatcher:
    """See `structured_output.Matcher`."""

    def __init__(self, inner: Any, bitmask: Any, ends: tuple[int, ...]) -> None:
        self._inner = inner
        self._bitmask = bitmask  # a tensor of xgrammar's own, read as an array
        self._ends = ends

    def fill_bitmask(self, words: np.ndarray) -> None:
        self._fill()
        words[:] = np.asarray(self._bitmask)[0]

    def _fill(self) -> None:
        try:
            self._inner.fill_next_token_bitmask(self._bitmask, 0)
        except Exception as e:
            raise GrammarError(f"xgrammar gave the grammar up: {' '.join(str(e).split())[:300]}") from e

    def accept(self, token_id: int) -> bool:
        if self._inner.is_terminated():
            return False
        try:
            return bool(self._inner.accept_token(token_id))
        except Exception as e:
            raise GrammarError(f"xgrammar gave the grammar up: {' '.join(str(e).split())[:300]}") from e

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)

    def is_terminated(self) -> bool:
        """xgrammar itself waits for the end-of-sequence token, also where nothing else can come."""
        if self._inner.is_terminated():
            return True
        self._fill()
        words = np.asarray(self._bitmask)[0].copy()
        clear_bits(words, self._ends)
        return not words.any()


def _vocabulary(facts: TokenizerFacts) -> list[str]:
    """Each token as its tokenizer writes it; special ones are empty, since no text consists of them."""
    from tokenizers import Tokenizer

    special = set(facts.special_token_ids)
    words = [""] * facts.vocab_size
    for word, token in Tokenizer.from_str(facts.serialized).get_vocab(with_added_tokens=True).items():
        if token < facts.vocab_size and token not in special:
            words[token] = word
    return words


def _vocab_type(serialized: str) -> str:
    """How the tokenizer writes bytes, from the decoder that undoes it."""
    decoder = json.loads(serialized).get("decoder") or {}
    kinds = {decoder.get("type"), *(d.get("type") for d in decoder.get("decoders", ()))}
    if "ByteLevel" in kinds:
        return "BYTE_LEVEL"
    return "BYTE_FALLBACK" if "ByteFallback" in kinds else "RAW"
