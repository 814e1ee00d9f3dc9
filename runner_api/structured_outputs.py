"""What form a request wants its answer to have. Source: vLLM 0.33 `StructuredOutputsParams`.

The engine compiles it to a grammar and hands the runner bits (`GrammarOutput`); a runner never sees a grammar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from runner_api.errors import SamplingParamsError

# A deeper schema is an attack on the compiler, not a form.
MAX_JSON_DEPTH = 64


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """Exactly one of the fields is set. Raises `SamplingParamsError` naming the field.

    json: a JSON schema (text, or a mapping, which is stored as text). regex: a regular expression for the whole answer.
    choice: the answer is one of these texts. grammar: a context-free grammar in Lark's notation. json_object: any JSON
    object.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            raise SamplingParamsError(
                "one form at a time", field="structured_outputs", got=given or "nothing",
                expected="exactly one of " + ", ".join(f.name for f in fields(self)),
            )  # fmt: skip
        getattr(self, f"_check_{given[0]}")()

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(f.name for f in fields(self) if getattr(self, f.name) is not None)

    def _check_json(self) -> None:
        schema: Any = self.json
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as e:
                raise SamplingParamsError(
                    "not JSON", field="structured_outputs.json", got=self.json, expected=f"a JSON schema ({e})"
                ) from e
        if not isinstance(schema, (Mapping, bool)):
            raise SamplingParamsError(
                "not a JSON schema", field="structured_outputs.json", got=schema, expected="an object, true or false"
            )
        if _depth(schema) > MAX_JSON_DEPTH:
            raise SamplingParamsError(
                "nested too deeply", field="structured_outputs.json", got=f"more than {MAX_JSON_DEPTH} levels",
                expected=f"at most {MAX_JSON_DEPTH} levels",
            )  # fmt: skip
        try:
            object.__setattr__(self, "json", json.dumps(schema, sort_keys=False))
        except (TypeError, ValueError) as e:
            raise SamplingParamsError(
                "cannot be written as JSON", field="structured_outputs.json", got=schema, expected=f"plain values ({e})"
            ) from e

    def _check_regex(self) -> None:
        if not isinstance(self.regex, str) or not self.regex or "\0" in self.regex:
            raise SamplingParamsError(
                "not a regular expression", field="structured_outputs.regex", got=self.regex,
                expected="text that is not empty and holds no NUL",
            )  # fmt: skip

    def _check_choice(self) -> None:
        choice: Any = self.choice
        if not isinstance(choice, (list, tuple)) or not choice or not all(isinstance(c, str) and c for c in choice):
            raise SamplingParamsError(
                "not a list of answers", field="structured_outputs.choice", got=choice,
                expected="at least one text, none of them empty",
            )  # fmt: skip
        object.__setattr__(self, "choice", tuple(choice))

    def _check_grammar(self) -> None:
        if not isinstance(self.grammar, str) or not self.grammar.strip():
            raise SamplingParamsError(
                "not a grammar", field="structured_outputs.grammar", got=self.grammar, expected="text that is not blank"
            )

    def _check_json_object(self) -> None:
        if self.json_object is not True:
            raise SamplingParamsError(
                "a switch that is on or absent", field="structured_outputs.json_object", got=self.json_object,
                expected="True or None",
            )  # fmt: skip


def _depth(value: Any, level: int = 1) -> int:
    """Levels of nesting; stops counting one past the limit."""
    if level > MAX_JSON_DEPTH or not isinstance(value, (Mapping, list)):
        return level
    inner = value.values() if isinstance(value, Mapping) else value
    return max((_depth(v, level + 1) for v in inner), default=level)
