"""Logits processors that scenarios name in `setup.config.logits_processors`."""

from __future__ import annotations

from typing import Any

from runner_api import SamplingParams, SamplingParamsError
from runner_api.checks import is_integer

NEVER = -float("inf")


class _ByRow:
    """One number by row, from the request's argument; -1 where it has none."""

    arguments: tuple[str, ...] = ()

    def __init__(self, max_num_reqs: int, vocab_size: int, arrays: Any) -> None:
        self.arrays, self.vocab_size = arrays, vocab_size
        self.value = arrays.zeros(max_num_reqs, "int64")

    def validate(self, params: SamplingParams) -> None:
        for name, value in (params.extra_args or {}).items():
            if name in self.arguments and not (is_integer(value) and 0 <= value < self.vocab_size):
                raise SamplingParamsError("not a token id", field=name, got=value)

    def add_request(self, row: int, params: SamplingParams, prompt: list[int], outputs: list[int]) -> bool:
        value = (params.extra_args or {}).get(self.arguments[0])
        self.value[row] = -1 if value is None else value
        return value is not None

    def remove_request(self, row: int) -> None:
        pass  # whoever comes sets all of the row

    def move_rows(self, moves: Any) -> None:
        for move in moves:
            to = self.arrays.array([move.target, move.source], "int64")
            self.value[to] = self.value[self.arrays.array([move.source, move.target], "int64")]

    def observe(self, rows: Any, token_ids: Any, num_sampled: Any) -> None:
        pass


class ForceToken(_ByRow):
    """extra_args={"force_token": t}: nothing but t can be drawn."""

    arguments = ("force_token",)

    def apply(self, logits: Any, context: Any) -> None:
        i, token = self.arrays.arange(len(logits)), self.value[context.rows]
        kept = logits[i, token] * 1
        logits[:] = NEVER
        logits[i, token] = kept


class BanLast(_ByRow):
    """extra_args={"ban_last": t}: neither the token drawn last can be drawn, nor t before anything is drawn."""

    arguments = ("ban_last",)

    def add_request(self, row: int, params: SamplingParams, prompt: list[int], outputs: list[int]) -> bool:
        edits = super().add_request(row, params, prompt, outputs)
        if outputs:
            self.value[row] = outputs[-1]
        return edits

    def observe(self, rows: Any, token_ids: Any, num_sampled: Any) -> None:
        # One token a step: these scenarios have no drafts.
        self.value[rows] = self.arrays.where(num_sampled > 0, token_ids[:, 0], self.value[rows])

    def apply(self, logits: Any, context: Any) -> None:
        logits[self.arrays.arange(len(logits)), self.value[context.rows]] = NEVER


class Spoil(_ByRow):
    """extra_args={"spoil": 0}: the logits are NaN, as a broken model's are."""

    arguments = ("spoil",)

    def apply(self, logits: Any, context: Any) -> None:
        logits[:] = float("nan")
