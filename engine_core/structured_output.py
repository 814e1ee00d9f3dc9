"""Answers of a given form: which tokens may come next, as bits for the runner, and how far an answer has come.

A grammar is compiled when a request is admitted. Its matcher lives with the request, through preemptions too; each
step it says which tokens may come next (`grammar_output`), and takes the token that came (`Request.append`). The
libraries that know grammars stand behind `GrammarBackend`; nothing here knows one. Source: vLLM 0.33.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from runner_api import PLACEHOLDER_TOKEN_ID, EngineError, GrammarOutput, StructuredOutputsParams, UnknownNameError
from runner_api.loader import load_object

ALL_TOKENS = np.int32(-1)  # 32 tokens, all allowed


class GrammarError(EngineError):
    """A grammar that was compiled and cannot be followed any further: too complex here, or a dead end. Its request
    ends with this error, the others go on."""


class Matcher(Protocol):
    """Where one answer stands in its grammar."""

    def fill_bitmask(self, words: np.ndarray) -> None:
        """Which tokens may come next, into words: int32[W], bit 1 = allowed, least significant bit first.

        An end-of-sequence token is among them where the text may end. Raises `GrammarError`."""
        ...

    def accept(self, token_id: int) -> bool:
        """Move on by a token. False, and nothing changes, if the grammar does not allow it. Raises `GrammarError`."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the latest accepted tokens."""
        ...

    def is_terminated(self) -> bool:
        """Has the text ended: by an end-of-sequence token, or because the grammar admits nothing more?"""
        ...


class GrammarBackend(Protocol):
    """A library that knows grammars, bound to one model's tokens."""

    name: str

    def compile(self, params: StructuredOutputsParams) -> Matcher:
        """A matcher at the start of the text. Raises `EngineError` naming the field for a form that it cannot keep."""
        ...


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a backend must know of a model's tokens.

    serialized: the tokenizer as the JSON of a `tokenizers.Tokenizer`. num_tokens: how many it has; vocab_size: the
    model's, from which the width of masks comes. special_token_ids: tokens that no text consists of.
    """

    serialized: str
    num_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...] = ()


# Name to `package.module:factory`; in the order in which "auto" looks for one that is installed.
BACKENDS = {
    "llguidance": "engine_core.grammar_llguidance:LLGuidanceBackend",
    "xgrammar": "engine_core.grammar_xgrammar:XGrammarBackend",
}
AUTO = "auto"
INSTALL_HINT = "pip install 'modelrunner[grammar]'"


def check_backend_name(name: str) -> None:
    """Refuse a name that is neither "auto" nor a backend's."""
    if name not in (AUTO, *BACKENDS):
        raise UnknownNameError("grammar backend", str(name), (AUTO, *BACKENDS), field="grammar_backend")


def make_grammar_backend(name: str, facts: TokenizerFacts) -> GrammarBackend:
    """Build a backend by name; "auto" takes the first that is installed. Raises `EngineError` if none is."""
    wanted = list(BACKENDS) if name == AUTO else [name]
    for candidate in wanted:
        if importlib.util.find_spec(candidate) is not None:
            factory: Callable[[TokenizerFacts], GrammarBackend] = load_object(
                BACKENDS[candidate], f"grammar backend {candidate!r}", "grammar_backend"
            )
            return factory(facts)
    raise EngineError(
        "no library that knows grammars is installed", field="structured_outputs",
        got=f"no {' and no '.join(wanted)}", hint=INSTALL_HINT,
    )  # fmt: skip


def clear_bits(words: np.ndarray, token_ids: Iterable[int]) -> None:
    """Take tokens out of a mask. words: int32[W], contiguous."""
    bits = words.view(np.uint32)
    for token in token_ids:
        bits[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)


# -- the masks of a step --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Constrained:
    """A request that samples in this step under a grammar. drafts: what the step verifies."""

    req_id: str
    matcher: Matcher
    drafts: Sequence[int] = ()


def grammar_output(
    constrained: Sequence[Constrained], num_speculative_tokens: int, vocab_size: int
) -> tuple[GrammarOutput | None, dict[str, GrammarError]]:
    """The masks of one step, and the requests whose grammar failed (they get none). No mask at all: None.

    Each request has 1 + K rows, as many as it could have drafts and one more; rows that it does not need are all ones.
    """
    stride, width = 1 + num_speculative_tokens, -(-vocab_size // 32)
    req_ids, masks, acceptable = [], [], []
    failed: dict[str, GrammarError] = {}
    for one in constrained:
        rows = np.full((stride, width), ALL_TOKENS, np.int32)
        try:
            acceptable.append(fill_rows(one.matcher, one.drafts, rows))
        except GrammarError as e:
            failed[one.req_id] = e
            continue
        req_ids.append(one.req_id)
        masks.append(rows)
    if not masks:
        return None, failed
    return GrammarOutput(req_ids, np.concatenate(masks), acceptable if num_speculative_tokens else None), failed


def fill_rows(matcher: Matcher, drafts: Sequence[int], rows: np.ndarray) -> int:
    """Masks of one request: row j is for the token behind its first j drafts. Returns how many drafts may be accepted.

    Shapes: rows: int32[>= 1 + drafts, W], all ones. A draft of -1 was thrown out by `usable_drafts`: whatever stands
    behind it is never taken, so it is left all ones. Behind a draft that ends the text, or that the grammar refuses,
    the row before is repeated.
    """
    matcher.fill_bitmask(rows[0])
    taken = 0
    try:
        for i, draft in enumerate(drafts):
            if draft == PLACEHOLDER_TOKEN_ID:
                break
            if not matcher.accept(draft):
                rows[i + 1 : len(drafts) + 1] = rows[i]
                break
            taken += 1
            if matcher.is_terminated():
                rows[i + 1 : len(drafts) + 1] = rows[i]
                break
            matcher.fill_bitmask(rows[i + 1])
    finally:
        if taken:
            matcher.rollback(taken)
    return taken


def usable_drafts(matcher: Matcher, drafts: Sequence[int]) -> list[int]:
    """The drafts with -1 in place of the first that the grammar refuses, and of all behind it."""
    taken = 0
    try:
        for draft in drafts:
            if draft < 0 or matcher.is_terminated() or not matcher.accept(draft):
                break
            taken += 1
        if taken:
            matcher.rollback(taken)
    except GrammarError:  # the next mask will say so again, and end the request
        taken = 0
    return [*drafts[:taken], *[PLACEHOLDER_TOKEN_ID] * (len(drafts) - taken)]
