"""More impossible plans than one a clause: what else the sentences of the ERR clauses name.

They are for the state that probes of refusals begin with: `a` has its three tokens computed in block 1, `b` likewise
in block 2, and each has sampled one token; one row is free.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from runner_api import CachedRequestData, ForcedStep, NewRequestData, SamplingParams, SchedulerOutput
from runner_api.wire import to_json

# Longer plans are cut where they are told.
LONGEST = 400
NEW = NewRequestData("c", [7, 8], [7, 8], 0, ([3],), SamplingParams(temperature=0.0))


def more_bad_plans(num_blocks: int) -> list[tuple[str, SchedulerOutput]]:
    """Clause id and plan. num_blocks: of the KV cache."""
    copied, b = [(1, num_blocks)], CachedRequestData(["b"], [3], [None], [1])
    less: dict[str, Any] = {"num_scheduled_tokens": {"c": 2, "b": -1}, "total_num_scheduled_tokens": 1}
    return [
        ("MR-ERR-020", _goes_on(total_num_scheduled_tokens=1.5)),
        ("MR-ERR-020", _adds(prompt_token_ids=[7, "8"], prefill_token_ids=[7, "8"])),
        ("MR-ERR-020", _adds(block_ids=(["3"],))),
        ("MR-ERR-025", _adds(prompt_token_ids=[7, -1], prefill_token_ids=[7, -1])),
        ("MR-ERR-027", _adds(seed=-(2**63) - 1)),
        ("MR-ERR-028", _goes_on(([3], [4]))),
        ("MR-ERR-030", replace(_adds(), scheduled_cached_reqs=b, **less)),
        ("MR-ERR-041", _adds(block_ids=([-1],))),
        ("MR-ERR-041", _adds(block_ids=([num_blocks],))),
        ("MR-ERR-041", _goes_on(([num_blocks],))),
        ("MR-ERR-041", _goes_on(new_block_ids_to_zero=[num_blocks])),
        ("MR-ERR-041", _goes_on(kv_cache_block_copies=copied)),
    ]


def bad_outcomes(vocab_size: int) -> list[tuple[str, ForcedStep]]:
    """Clause id and outcome, for a step in which one request without drafts must sample one token."""
    token, one = np.array([[5]], np.int64), np.array([1], np.int32)
    return [
        ("MR-ERR-044", ForcedStep(np.array([[5], [5]], np.int64), one)),
        ("MR-ERR-044", ForcedStep(token.astype(np.float64), one)),
        ("MR-ERR-045", ForcedStep(token, np.array([0], np.int32))),
        ("MR-ERR-045", ForcedStep(token, np.array([2], np.int32))),
        ("MR-ERR-025", ForcedStep(np.array([[-1]], np.int64), one)),
        ("MR-ERR-025", ForcedStep(np.array([[vocab_size]], np.int64), one)),
    ]


def accepted(given: SchedulerOutput | ForcedStep) -> str:
    """What was accepted, in JSON without what is at its default; long plans are cut."""
    try:
        text = json.dumps(to_json(given), separators=(",", ":"))
    except ValueError:  # a part that JSON cannot hold
        text = repr(given)
    return f"accepted {text if len(text) <= LONGEST else text[:LONGEST] + ' …'}"


def _adds(**changes: Any) -> SchedulerOutput:
    """A plan that adds `c`; `changes` replace fields of the request."""
    return SchedulerOutput([replace(NEW, **changes)], num_scheduled_tokens={"c": 2}, total_num_scheduled_tokens=2)


def _goes_on(blocks: Any = None, **changes: Any) -> SchedulerOutput:
    """A plan of one more token each for `a`, with new blocks, and `b`; `changes` replace fields of the plan."""
    cached = CachedRequestData(["a", "b"], [3, 3], [blocks, None], [1, 1])
    return replace(SchedulerOutput([], cached, {"a": 1, "b": 1}, 2), **changes)
