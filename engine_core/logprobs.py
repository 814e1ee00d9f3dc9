"""What a step's log probabilities mean for one request: arrays by row in, its own by token id out.

A batch's arrays are as wide as its most curious request; the surplus columns of the others, and the filler behind a
list of token ids, are left out here.
"""

from __future__ import annotations

import numpy as np

from engine_core.request import Request
from runner_api import EngineError, ModelRunnerOutput

# The most that a request may ask for where nothing else is said. (vLLM's value.)
DEFAULT_MAX_LOGPROBS = 20


def token_logprobs(request: Request, output: ModelRunnerOutput) -> dict[int, float] | None:
    """Of the token that the request took, which comes first, and of those it asked for; None if it asked for none."""
    params = request.sampling_params
    if params.logprobs is None and params.logprob_token_ids is None:
        return None
    if output.logprobs is None:
        raise EngineError("no log probabilities came", field="logprobs", req_id=request.req_id)
    row = output.req_ids.index(request.req_id)
    wanted = len(params.logprob_token_ids) if params.logprob_token_ids else params.logprobs
    return _by_token(output.logprobs.token_ids[row], output.logprobs.logprobs[row], wanted)


def prompt_logprobs(request: Request, output: ModelRunnerOutput) -> list[dict[int, float] | None] | None:
    """One entry per prompt token, None for the first, which nothing comes before; None if the request asked for none.

    Called with the output of the step that finishes the prompt. Raises EngineError if the runner gives no rows or not
    the right number of them: the engine never lets it skip computed tokens of such a prompt.
    """
    wanted = request.sampling_params.prompt_logprobs
    if wanted is None:
        return None
    given = output.prompt_logprobs.get(request.req_id)
    expected = request.num_prompt_tokens - 1
    if given is None or len(given.token_ids) != expected:
        raise EngineError(
            "not the log probabilities of this prompt", field="prompt_logprobs", req_id=request.req_id,
            got="nothing" if given is None else f"{len(given.token_ids)} rows", expected=f"{expected} rows",
        )  # fmt: skip
    rows = zip(given.token_ids, given.logprobs, strict=True)
    return [None, *(_by_token(ids, values, wanted) for ids, values in rows)]


def _by_token(ids: np.ndarray, values: np.ndarray, wanted: int | None) -> dict[int, float]:
    """The first column, then `wanted` more (-1: all). A token that stands twice keeps its first place."""
    end = None if wanted is None or wanted < 0 else 1 + wanted
    found: dict[int, float] = {}
    for token, value in zip(ids[:end].tolist(), values[:end].tolist(), strict=True):
        found.setdefault(token, value)
    return found
