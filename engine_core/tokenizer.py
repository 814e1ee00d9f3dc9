"""Text to token ids and back, for whatever checkpoint the engine serves.

Reads tokenizer.json of a Hugging Face folder, or rebuilds the byte-level BPE that a GGUF file describes in its
metadata; both end as one `tokenizers.Tokenizer`. Chat templates run in jinja2's sandbox, because they come with the
model file. Knows nothing of requests; `IncrementalDecoder` turns one request's ids into text as they arrive.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from engine_core.structured_output import TokenizerFacts
from runner_api.checkpoint import Checkpoint, load_checkpoint
from runner_api.checkpoint.safetensors_file import read_json
from runner_api.errors import CheckpointError, EngineError

# Token types of a GGUF vocabulary that are matched in text before BPE: control tokens, and those a user added.
CONTROL, USER_DEFINED = 3, 4
# How each named pre-tokenizer of a GGUF file cuts text: does every digit stand alone? A wrong cut still decodes
# to the same text but feeds the model other ids, so a name that is not here is refused.
GGUF_PRE_TOKENIZERS = {"smollm": True, "gpt-2": False}
REPLACEMENT = "\ufffd"


class Tokenizer:
    """One model's tokenizer.

    eos_token_ids: ids that end a text. vocab_size: number of tokens with a text (the model's own vocabulary may be
    padded beyond it). chat_template: jinja source, or None.
    """

    def __init__(
        self,
        backend: Any,
        *,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """backend: a `tokenizers.Tokenizer`. special_tokens: `bos_token` and the like, as a template may name them."""
        self._backend = backend
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._template: Any = None

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint | str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer that lies with a checkpoint (opened, or a path). Raises `CheckpointError`."""
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = load_checkpoint(checkpoint)
        return _from_gguf(checkpoint) if checkpoint.metadata else _from_folder(checkpoint)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Special tokens written in the text, such as `<|im_start|>`, become their single id.

        add_special_tokens: let the tokenizer put its own around the text (a Llama's begin-of-text). Switch it off for
        a text that came out of `apply_chat_template`, which has written them already.
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeEncodeError) as e:  # not a str, or one with half a surrogate pair
            raise EngineError("not a text", field="prompt", got=text, expected="a str of Unicode characters") from e

    def encode_bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of words that must not be said, for `SamplingParams.bad_words_token_ids`.

        A word is written in two ways, at the start of a text and behind a space; the second is taken too where it is
        another token sequence of the same length. Raises `EngineError` for an empty word.
        """
        found: list[tuple[int, ...]] = []
        for word in dict.fromkeys(words):
            if not isinstance(word, str) or not word.strip():
                raise EngineError("not a word", field="bad_words", got=word, expected="a text that is not blank")
            plain, spaced = (tuple(self.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " "))
            found.append(plain)
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                found.append(spaced)
        return tuple(dict.fromkeys(found))

    def facts(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> TokenizerFacts:
        """What a library of grammars must know. vocab_size: the model's, which may be larger than the tokenizer's."""
        special = tuple(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)
        return TokenizerFacts(self._backend.to_str(), self.vocab_size, vocab_size, eos_token_ids, special)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Bytes that are not UTF-8 become U+FFFD; ids beyond the vocabulary have no text."""
        ids = list(ids)
        for token in ids:
            if not 0 <= token < 2**32:
                raise EngineError("not a token id", field="token_ids", got=token, expected="0 <= id < 2^32")
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt of a conversation: `messages` of {"role", "content"}, oldest first, through the model's template.

        variables: further names the template may read (`tools`, `enable_thinking`, ...). Raises `EngineError`.
        """
        import jinja2

        if self.chat_template is None:
            raise EngineError("this model has no chat template", field="messages", hint="Give a plain prompt instead")
        try:
            if self._template is None:
                self._template = _environment().from_string(self.chat_template)
            values = {**self.special_tokens, "tools": None, **variables}
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as e:
            raise EngineError(
                f"the chat template refuses these messages: {e}", field="messages", got=messages,
                expected='a list of {"role": ..., "content": ...}',
            ) from e  # fmt: skip

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation's prompt. Raises `EngineError`."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt), add_special_tokens=False)


class IncrementalDecoder:
    """Text of one request as its ids arrive. The pieces, with `finish`, are exactly the text of all ids together.

    A character may be spread over several tokens: nothing is given out until the text is whole. Text is decoded from
    the piece before the last one on, because some tokenizers write a token differently at the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []  # of the previous piece, then of the one that is not given out yet
        self._given = 0  # how many of them have been given out

    def push(self, ids: int | Iterable[int]) -> str:
        """Take in the next id or ids; returns the text that is now complete, often one word, sometimes nothing."""
        self._ids.extend([ids] if isinstance(ids, int) else ids)
        text = self._pending()
        # An unfinished character decodes to U+FFFD at the end. (A real one waits for the text after it.)
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        return text

    def finish(self) -> str:
        """What is left when no more ids come, unfinished bytes as U+FFFD."""
        text = self._pending()
        self._ids, self._given = [], 0
        return text

    def _pending(self) -> str:
        given = self._tokenizer.decode(self._ids[: self._given], self._skip)
        return self._tokenizer.decode(self._ids, self._skip)[len(given) :]


def _from_folder(checkpoint: Checkpoint) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    folder = checkpoint.path
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            "no tokenizer", field=str(path), hint="Only tokenizer.json is read, not a SentencePiece tokenizer.model"
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as e:  # the library raises bare Exception
        raise CheckpointError(f"not a tokenizer: {e}", field=str(path)) from e
    extra = folder / "tokenizer_config.json"
    config = read_json(extra) if extra.is_file() else {}
    special = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            special[key] = value
    eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    eos_ids = checkpoint.config.eos_token_ids + (() if eos is None else (eos,))
    return Tokenizer(
        backend,
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        chat_template=_folder_template(folder, config),
        special_tokens=special,
    )


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja if there is one; else tokenizer_config.json, where it is a text or a list with names."""
    file = folder / "chat_template.jinja"
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise CheckpointError(f"cannot be read: {e}", field=str(file)) from e
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError("not a text", field=f"{folder / 'tokenizer_config.json'}: chat_template", got=template)
    return template


def _from_gguf(checkpoint: Checkpoint) -> Tokenizer:
    """Byte-level BPE from a GGUF file's vocabulary and merges.

    The key `add_bos_token` is not followed: chat templates write the first token themselves, and the published
    tokenizers of the models whose pre-tokenizers are known here put nothing in front of a plain text.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    tokens, types, merges, digits_alone = _gguf_vocabulary(checkpoint)
    try:
        pairs = [(left, right) for left, right in (m.split(" ") for m in merges)]
        backend = Backend(models.BPE({t: i for i, t in enumerate(tokens)}, pairs))
    except Exception as e:  # the library raises bare Exception; a merge that is not two words raises ValueError
        raise CheckpointError(f"vocabulary and merges do not fit: {e}", field=f"{checkpoint.path}: merges") from e
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level]) if digits_alone else byte_level
    backend.decoder = decoders.ByteLevel()
    typed = list(zip(tokens, types, strict=True))
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in typed if kind == CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False) for t, kind in typed if kind == USER_DEFINED])
    metadata = checkpoint.metadata
    names = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    ids = {new: metadata.get(f"tokenizer.ggml.{old}_token_id") for old, new in names.items()}
    special = {f"{new}_token": tokens[i] for new, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        eos_token_ids=checkpoint.config.eos_token_ids,
        chat_template=template if isinstance(template, str) else None,
        special_tokens=special,
    )


def _gguf_vocabulary(checkpoint: Checkpoint) -> tuple[list[str], list[int], list[str], bool]:
    """Tokens, their types, merges, and whether digits stand alone. Raises `CheckpointError`."""

    def value(key: str) -> Any:
        return checkpoint.metadata.get(f"tokenizer.ggml.{key}")

    def refuse(what: str, key: str, expected: str) -> CheckpointError:
        return CheckpointError(
            what, field=f"{checkpoint.path}: tokenizer.ggml.{key}", got=value(key), expected=expected,
            hint="The model's Hugging Face folder has a tokenizer.json",
        )  # fmt: skip

    if value("model") != "gpt2":
        raise refuse("unsupported kind of tokenizer", "model", "gpt2 (byte-level BPE)")
    if value("pre") not in GGUF_PRE_TOKENIZERS:
        raise refuse("unsupported pre-tokenizer", "pre", " or ".join(GGUF_PRE_TOKENIZERS))
    tokens, types, merges = value("tokens"), value("token_type"), value("merges")
    for key, values, kind in (("tokens", tokens, str), ("token_type", types, int), ("merges", merges, str)):
        if not isinstance(values, list) or not all(isinstance(v, kind) for v in values):
            raise refuse("missing or of another type", key, f"an array of {kind.__name__}")
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise refuse("tokens twice, or not one type each", "tokens", "distinct tokens, as many as token_type")
    if len(tokens) > checkpoint.config.vocab_size:
        raise refuse("more tokens than the model has", "tokens", f"at most {checkpoint.config.vocab_size}")
    return tokens, types, merges, GGUF_PRE_TOKENIZERS[value("pre")]


def _environment() -> Any:
    """What chat templates are written for: trimmed blocks, `break`, `raise_exception`, `tojson`, `strftime_now`."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
