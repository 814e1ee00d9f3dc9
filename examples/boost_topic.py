"""A custom logits processor that needs the request's parameters alone: it favours the tokens of a topic.

Run it for a demonstration, or name it: RunnerConfig(logits_processors=("boost_topic:BoostTopic",)).
"""

from __future__ import annotations

from typing import Any

from runner_api import SamplingParams, SamplingParamsError
from runner_api.checks import is_integer

MAX_TOKENS = 64


class BoostTopic:
    """extra_args={"topic_token_ids": [3, 17], "topic_boost": 2.5}: that much is added to the logits of these tokens."""

    arguments = ("topic_token_ids", "topic_boost")

    def __init__(self, max_num_reqs: int, vocab_size: int, arrays: Any) -> None:
        self.arrays = arrays
        self.vocab_size = vocab_size
        self.token_ids = arrays.zeros((max_num_reqs, MAX_TOKENS), "int64")
        self.boost = arrays.zeros(max_num_reqs, "float32")

    def validate(self, params: SamplingParams) -> None:
        args = params.extra_args or {}
        ids, boost = args.get("topic_token_ids", [0]), args.get("topic_boost", 0.0)
        if not isinstance(ids, (list, tuple)) or not 1 <= len(ids) <= MAX_TOKENS:
            raise SamplingParamsError(
                "no topic", field="topic_token_ids", got=ids, expected=f"a list of 1 to {MAX_TOKENS} token ids"
            )
        for token in ids:
            if not is_integer(token) or not 0 <= token < self.vocab_size:
                raise SamplingParamsError(
                    "no token", field="topic_token_ids", got=token, expected=f"0 <= id < {self.vocab_size}"
                )
        if isinstance(boost, bool) or not isinstance(boost, (int, float)) or not -100 <= boost <= 100:
            raise SamplingParamsError("out of range", field="topic_boost", got=boost, expected="from -100 to 100")
        if ("topic_token_ids" in args) != ("topic_boost" in args):
            raise SamplingParamsError(
                "half of it is missing", field="topic_boost", got=sorted(args),
                expected="topic_token_ids and topic_boost together",
            )  # fmt: skip

    # -- what happens to rows ----------------------------------------------------------------------------------

    def add_request(self, row: int, params: SamplingParams, prompt: list[int], outputs: list[int]) -> bool:
        args = params.extra_args or {}
        if "topic_token_ids" not in args:
            return False
        ids = list(args["topic_token_ids"])
        # What is left of the row repeats the first token: written twice, it has the same value both times.
        self.token_ids[row] = self.arrays.array(ids + ids[:1] * (MAX_TOKENS - len(ids)), "int64")
        self.boost[row] = args["topic_boost"]
        return True

    def remove_request(self, row: int) -> None:
        pass  # the next request in this row sets all of it, or is not edited

    def move_rows(self, moves: Any) -> None:
        for move in moves:
            to = self.arrays.array([move.target, move.source], "int64")
            came_from = self.arrays.array([move.source, move.target], "int64")
            for table in (self.token_ids, self.boost):
                table[to] = table[came_from]  # a one-way move leaves nothing that is read at its source

    def observe(self, rows: Any, token_ids: Any, num_sampled: Any) -> None:
        pass

    # -- the step ----------------------------------------------------------------------------------------------

    def apply(self, logits: Any, context: Any) -> None:
        i, ids = self.arrays.arange(len(logits))[:, None], self.token_ids[context.rows]
        logits[i, ids] = logits[i, ids] + self.boost[context.rows][:, None]


if __name__ == "__main__":
    from engine_core.llm import LLM
    from runner_api import WitnessConfig

    with LLM(WitnessConfig(), runner="cpu", logits_processors=(BoostTopic,)) as llm:
        for boost in (0.0, 4.0, 8.0):
            extra_args = {"topic_token_ids": [3, 17], "topic_boost": boost}
            params = SamplingParams(seed=1, max_tokens=24, extra_args=extra_args)
            print(f"{boost:+.1f} ", *llm.generate([[1, 2]], params)[0].token_ids)
