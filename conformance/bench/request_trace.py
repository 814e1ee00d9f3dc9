"""The requests of the persistent-batch experiment: who arrives at which step, with how many tokens, and stays how long.

A few requests arrive each step, with prompts of 200 to 999 tokens; each active request gains one token a step and
leaves when its lifetime is used up. Numbers are drawn in the order of the program that asked the question first (a
program in Go), so that a seed gives its requests and its counts here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from conformance.bench.arguments import MOST_ARRIVALS, STEPS
from conformance.bench.go_random import GoRandom

ROWS, BLOCK_SIZE = 1024, 16

# How many steps the next request lives.
Lifetime = Callable[[GoRandom], int]


def as_given(random: GoRandom) -> int:
    return 50 + random.below(400)


def short(random: GoRandom) -> int:
    return 2 + random.below(4)


def fixed(steps: int) -> Lifetime:
    # A number is drawn all the same: every lifetime sees the same requests arrive, while rows are free.
    return lambda random: steps + random.below(1)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """tokens: known when it arrives; lifetime: steps, perhaps more than the trace has left."""

    req_id: str
    arrival: int
    tokens: int
    lifetime: int

    def tokens_at(self, step: int) -> int:
        """Tokens that are known when the step begins."""
        return self.tokens + step - self.arrival


@dataclass(frozen=True, slots=True)
class TraceStep:
    """number: of the step; left: finished by the step before; arrived: new; active: in order of arrival, new ones
    included."""

    number: int
    left: tuple[str, ...]
    arrived: tuple[TraceRequest, ...]
    active: tuple[TraceRequest, ...]


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """requests: in order of arrival; num_active: not finished when the trace ends; most_active: in any one step."""

    seed: int
    num_steps: int
    requests: tuple[TraceRequest, ...]
    num_active: int
    most_active: int

    @property
    def num_finished(self) -> int:
        return len(self.requests) - self.num_active

    @property
    def max_model_len(self) -> int:
        """Room for every request, rounded up to whole blocks, and for the token that its last step draws."""
        most = max((r.tokens + self._steps_of(r) for r in self.requests), default=0)
        return (most // BLOCK_SIZE + 1) * BLOCK_SIZE

    @property
    def entries_rebuilding(self) -> int:
        """Block-table entries, by arithmetic, if every step writes each active request's whole row."""
        lengths = (r.tokens + i for r in self.requests for i in range(self._steps_of(r)))
        return sum(tokens // BLOCK_SIZE + 1 for tokens in lengths)

    @property
    def entries_of_diffs(self) -> int:
        """… if a row is written when its request arrives, and one entry whenever a block boundary is crossed.

        A prompt that ends at a boundary pays for its next block twice, as in the original program."""
        rows = sum(r.tokens // BLOCK_SIZE + 1 for r in self.requests)
        gained = (r.tokens + i + 1 for r in self.requests for i in range(self._steps_of(r)))
        return rows + sum(tokens % BLOCK_SIZE == 1 for tokens in gained)

    def _steps_of(self, request: TraceRequest) -> int:
        return min(request.lifetime, self.num_steps - request.arrival)

    def walk(self) -> Iterator[TraceStep]:
        """The steps, in order."""
        coming, active = iter((*self.requests, None)), []
        newcomer = next(coming)
        for step in range(self.num_steps):
            # 1 whose last step was the one before
            left = tuple(r.req_id for r in active if r.arrival + r.lifetime == step)
            active = [r for r in active if r.arrival + r.lifetime > step]
            # 2 who arrives
            arrived = []
            while newcomer is not None and newcomer.arrival == step:
                arrived.append(newcomer)
                newcomer = next(coming)
            active += arrived
            yield TraceStep(step, left, tuple(arrived), tuple(active))


def request_trace(
    seed: int = 1, num_steps: int = STEPS, lifetime: Lifetime = as_given, most_arrivals: int = MOST_ARRIVALS
) -> RequestTrace:
    """Draw a trace: 0 .. most_arrivals requests a step, while rows are free.

    >>> trace = request_trace(seed=1, num_steps=100)
    >>> len(trace.requests), trace.num_finished, trace.entries_rebuilding, trace.entries_of_diffs
    (88, 1, 173399, 3753)
    """
    random, requests = GoRandom(seed), []
    num_active, most_active = 0, 0
    finishing = [0] * (num_steps + 1)  # requests whose last step is this one
    for step in range(num_steps):
        arrivals = random.below(most_arrivals + 1)
        while arrivals > 0 and num_active < ROWS:
            tokens = 200 + random.below(800)
            request = TraceRequest(f"r{len(requests)}", step, tokens, lifetime(random))
            requests.append(request)
            finishing[min(step + request.lifetime - 1, num_steps)] += 1
            num_active, arrivals = num_active + 1, arrivals - 1
        most_active = max(most_active, num_active)
        num_active -= finishing[step]
    return RequestTrace(seed, num_steps, tuple(requests), num_active, most_active)
