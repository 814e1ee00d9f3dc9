"""Log probabilities of the drawn token and of the most likely ones, from unprocessed logits."""

from __future__ import annotations

import numpy as np

from runner_api.outputs import LogprobsLists


def compute_logprobs(logits: np.ndarray, token_ids: np.ndarray, num_logprobs: int) -> LogprobsLists:
    """Column 0: the drawn token; then the `num_logprobs` most likely, ties to the lower id.

    The rank of the drawn token counts the tokens whose logit is at least its own (1 = best).

    Shapes: logits: float[L, V]; token_ids: int64[L]. Returns token_ids int32[L, 1+n], logprobs float32[L, 1+n],
    ranks int64[L].
    """
    x = logits.astype(np.float64)
    # 1 log of the softmax denominator
    highest = x.max(axis=1, keepdims=True)
    log_sum = highest + np.log(np.exp(x - highest).sum(axis=1, keepdims=True))
    # 2 which tokens
    top = np.argsort(-x, axis=1, kind="stable")[:, :num_logprobs]
    chosen = np.concatenate([token_ids[:, None], top], axis=1)
    # 3 their log probabilities, and the drawn token's rank
    logprobs = np.take_along_axis(x, chosen, axis=1) - log_sum
    drawn = np.take_along_axis(x, token_ids[:, None], axis=1)
    return LogprobsLists(chosen.astype(np.int32), logprobs.astype(np.float32), (x >= drawn).sum(axis=1))
