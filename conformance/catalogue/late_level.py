"""Scenarios of a device that is steps behind its host: every copy to it is held back until somebody must wait for it.

The host prepares all steps; then the device looks at what each of them was sent. It is for runners that copy host
arrays to a device and let the copies be held: attributes `copies` (as in docs/late-copies.md) and `packed`, whose
`views` are the arrays on the device. No kernel runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from conformance.catalogue.comparison import Difference, differs, plain
from conformance.catalogue.scenario import Scenario
from conformance.catalogue.script import Script, config_of, model_of
from conformance.foreign import opened
from runner_api import ModelRunner, group_kv_cache_specs
from runner_api.loader import call_factory
from runner_api.protocol import RunnerFactory

HOOKS = ("copies", "_prepare_on_host", "_advance_on_host")


class HeldCopies:
    """A stream that does nothing until it is waited for. A copy reads its source when its turn comes, not before."""

    def __init__(self) -> None:
        self.num_copies = self.num_bytes = self.num_queued = self.num_done = 0
        self._queue: deque[Callable[[], object]] = deque()

    def copy(self, target: Any, source: Any) -> None:
        self.num_copies += 1
        self.num_bytes += source.nbytes
        self.launch(lambda: target.copy_(source))

    def launch(self, work: Callable[[], object]) -> None:
        self._queue.append(work)
        self.num_queued += 1

    def run(self, until: int) -> None:
        while self.num_done < until:
            self.num_done += 1
            self._queue.popleft()()

    def event(self) -> HeldEvent:
        return HeldEvent(self)


class HeldEvent:
    """A place in the stream; before any `record` nobody waits for it."""

    def __init__(self, stream: HeldCopies) -> None:
        self._stream, self._place = stream, 0

    def record(self) -> None:
        self._place = self._stream.num_queued

    def synchronize(self) -> None:
        self._stream.run(self._place)


def lacks(runner: ModelRunner) -> str:
    """Why the runner's copies cannot be held back; empty if they can."""
    missing = [name for name in HOOKS if not hasattr(runner, name)]
    return f"its copies to a device cannot be held back: it has no {', '.join(missing)}" if missing else ""


def play(case: Scenario, layout: str, runner: str | RunnerFactory) -> list[Difference]:
    """Run the host's part of the scenario's steps with every copy held back, then the copies: what was looked at and
    is not as it says. Raises what the runner raises."""
    built: Any = opened(call_factory(runner, config_of(case.setup, layout)))
    stream = built.copies = HeldCopies()
    built.load_model(model_of(case.setup))
    built.initialize_kv_cache(group_kv_cache_specs(built.get_kv_cache_specs(), case.setup.num_blocks))
    script = Script(case.setup, layout, case.requests)
    looked: list[dict[str, Any]] = []
    for step in case.steps:
        plan, shares = script.plan(step)
        built.validator.check(plan)
        built.validator.commit(plan)
        batch = built._prepare_on_host(plan, None)
        stream.launch(lambda: looked.append(_on_device(built)))
        built._advance_on_host(batch)
        # The host never sees a token here; which one it would be is of no matter.
        tokens = {r: [0] if share.samples else [] for r, share in shares.items()}
        script.advance(step, shares, tokens, tokens)
    stream.run(stream.num_queued)
    found: list[Difference] = []
    for n, (step, seen) in enumerate(zip(case.steps, looked, strict=True), 1):
        for name, expected in step.seen.items():
            # What is not named lies behind: buffers have room for the largest step.
            found += differs(f"step {n} {name} on the device", _cut(seen[name], plain(expected)), expected)
    return found


def _on_device(runner: Any) -> dict[str, Any]:
    """What was sent, as the device has it now; block_tables of the first group."""
    views = {name: plain(view.tolist()) for name, view in runner.packed.views.items()}
    return views | {"block_tables": runner.block_tables.input_block_tables[0].tolist()}


def _cut(values: Any, like: Any) -> Any:
    """As many values as are expected, at every depth."""
    if isinstance(like, list) and isinstance(values, list):
        return [_cut(v, x) for v, x in zip(values, like, strict=False)]
    return values
