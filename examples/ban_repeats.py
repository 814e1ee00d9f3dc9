"""A custom logits processor that keeps state by row: how often a token may be drawn in a row.

Run it for a demonstration, or name it: RunnerConfig(logits_processors=("ban_repeats:BanRepeats",)).
"""

from __future__ import annotations

from typing import Any

from runner_api import SamplingParams, SamplingParamsError
from runner_api.checks import is_integer

MOST = 2**31 - 1


class BanRepeats:
    """extra_args={"max_repeats": n}: a token that was drawn n times in a row can not be drawn once more."""

    arguments = ("max_repeats",)

    def __init__(self, max_num_reqs: int, vocab_size: int, arrays: Any) -> None:
        self.arrays = arrays
        self.max_repeats = arrays.zeros(max_num_reqs, "int64")
        self.last = arrays.zeros(max_num_reqs, "int64")  # the token drawn last
        self.times = arrays.zeros(max_num_reqs, "int64")  # how often it was, in a row; 0 = nothing is drawn yet

    def validate(self, params: SamplingParams) -> None:
        n = (params.extra_args or {}).get("max_repeats", 1)
        if not is_integer(n) or not 1 <= n <= MOST:
            raise SamplingParamsError("no count", field="max_repeats", got=n, expected=f"from 1 to {MOST}")

    # -- what happens to rows ----------------------------------------------------------------------------------

    def add_request(self, row: int, params: SamplingParams, prompt: list[int], outputs: list[int]) -> bool:
        wanted = (params.extra_args or {}).get("max_repeats", 0)
        times = 0
        while times < len(outputs) and outputs[-1 - times] == outputs[-1]:
            times += 1
        self.max_repeats[row] = wanted
        self.last[row] = outputs[-1] if outputs else 0
        self.times[row] = times
        return wanted > 0

    def remove_request(self, row: int) -> None:
        pass  # the next request in this row sets all of it

    def move_rows(self, moves: Any) -> None:
        for move in moves:
            to = self.arrays.array([move.target, move.source], "int64")
            came_from = self.arrays.array([move.source, move.target], "int64")
            for table in (self.max_repeats, self.last, self.times):
                table[to] = table[came_from]  # a one-way move leaves nothing that is read at its source

    def observe(self, rows: Any, token_ids: Any, num_sampled: Any) -> None:
        last, times = self.last[rows], self.times[rows]
        for k in range(token_ids.shape[1]):
            last, times = self._take(last, times, token_ids[:, k], num_sampled > k)
        self.last[rows], self.times[rows] = last, times

    # -- the step ----------------------------------------------------------------------------------------------

    def apply(self, logits: Any, context: Any) -> None:
        where, i = self.arrays.where, self.arrays.arange(len(logits))
        last, times = self.last[context.rows], self.times[context.rows]
        # 1 drafts before a row count as drawn there
        for k in range(1, context.num_drafts + 1):
            follows = context.local_pos >= k
            draft = context.input_ids[where(follows, i - context.local_pos + k, 0)]
            last, times = self._take(last, times, draft, follows)
        # 2 what was drawn too often is out
        banned = times >= self.max_repeats[context.rows]
        logits[i, last] = where(banned, -float("inf"), logits[i, last])

    def _take(self, last: Any, times: Any, token: Any, taken: Any) -> tuple[Any, Any]:
        """(last, times) after one more token, where it is taken."""
        where = self.arrays.where
        again = where((token == last) & (times > 0), times + 1, 1)
        return where(taken, token, last), where(taken, again, times)


if __name__ == "__main__":
    from engine_core.llm import LLM
    from runner_api import WitnessConfig

    with LLM(WitnessConfig(vocab_size=3), runner="cpu", logits_processors=(BanRepeats,)) as llm:
        for extra_args in ({}, {"max_repeats": 2}, {"max_repeats": 1}):
            params = SamplingParams(seed=1, max_tokens=24, extra_args=extra_args)
            print(f"{extra_args!s:20}", *llm.generate([[1, 2]], params)[0].token_ids)
