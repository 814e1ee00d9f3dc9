"""A story: a few requests, what each asks for and when it comes. What they ask is what the runner can serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from conformance.scene import servable_part
from runner_api import Capability, SamplingParams

# The largest id that parameters name, and one; prompts keep to these ids too, so that any vocabulary will do.
MOST_IDS = 40
PAIRS = tuple((v, (7 * v + 3) % MOST_IDS) for v in range(MOST_IDS))


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. arrives: the first step that may schedule it; num_outputs: tokens until it ends."""

    req_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    arrives: int = 0
    num_outputs: int = 5

    def formed(self, number: int, vocab_size: int) -> list[int]:
        """Ids that its grammar allows for this output, counted from 1, if it asks for structured outputs."""
        return [v for v in range(vocab_size) if (v + 3 * number + sum(self.prompt)) % 8 == 0]


@dataclass(frozen=True, slots=True)
class Story:
    """asks: those whose tokens are compared; strangers: others, who may be there or not. unit: the smallest number of
    tokens that fills whole blocks of every KV cache group; max_model_len: enough for every request."""

    asks: tuple[Ask, ...]
    strangers: tuple[Ask, ...]
    unit: int
    max_model_len: int


def tell_story(seed: int, vocab_size: int, unit: int, offered: frozenset[Capability], *, short: bool = False) -> Story:
    """Requests of many sizes; `d` and `f` begin like `b`, whose first two units fill whole blocks.

    short: the first four of them and fewer tokens, for runners that take their time over each step.
    """
    random = np.random.default_rng([seed, 7])
    ids = min(vocab_size, MOST_IDS)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(random.integers(0, ids, length).tolist())

    wishes = _wishes(offered, ids)
    shared = prompt(2 * unit)
    seeds = random.integers(-(2**63), 2**63 - 1, len(wishes) + 1).tolist()
    prompts = [
        prompt(unit + 3), shared + prompt(3), prompt(3), shared + prompt(1), prompt(1), shared, prompt(unit - 1) + (1,)
    ]  # fmt: skip
    arrivals = (0, 0, 0, 2, 1, 5, 1)  # `d` while `b` is there, `f` when it has gone
    asks = tuple(
        Ask(f"{name}{len(tokens)}", tokens, wish, number, arrives)
        for name, tokens, wish, number, arrives in zip("kbqdzfa", prompts, wishes, seeds, arrivals, strict=False)
    )
    if short:
        asks = tuple(replace(a, num_outputs=3) for a in asks[:4])
    # Strangers want what nobody else wants at the same time, and one of them ends early.
    strangers = (
        Ask("x", prompt(unit + 1), wishes[2], 11, 0, 2), Ask("y", prompt(2), wishes[4], 12, 2, 5),
    )  # fmt: skip
    return Story(asks, strangers, unit, 4 * unit + 16)


def _wishes(offered: frozenset[Capability], ids: int) -> list[SamplingParams]:
    """What the requests ask for, one each; parameters that the runner cannot serve are left out of a wish."""
    greedy = SamplingParams(temperature=0.0)
    random = replace(greedy, temperature=1.0) if Capability.SEEDED_SAMPLING in offered else greedy
    some = tuple(range(1, ids, 3))
    wanted: Sequence[tuple[SamplingParams, dict[str, object]]] = (
        (greedy, {"logprobs": 2}),
        (random, {"top_k": 20, "top_p": 0.95, "min_p": 0.02, "logprobs": 0}),
        (greedy, {"repetition_penalty": 1.5, "frequency_penalty": 2.0, "presence_penalty": 1.5}),
        (random, {"logit_bias": {1: 6.0, min(7, ids - 1): 5.0}}),
        (random, {"allowed_token_ids": some, "bad_words_token_ids": _bad_words(ids), "logprob_token_ids": some[:3]}),
        (random, {"min_tokens": 3, "stop_token_ids": tuple(range(0, ids, 2))}),
        (random, {}),
    )
    return [servable_part(base, extra, offered) for base, extra in wanted]


def _bad_words(ids: int) -> tuple[tuple[int, ...], ...]:
    """Bad words: two single tokens out of what is allowed, and every pair."""
    return ((1,), (4,), *(pair for pair in PAIRS if max(pair) < ids))
