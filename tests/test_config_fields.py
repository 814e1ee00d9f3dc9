"""No option of a runner is silently ignored: each changes the step, or what the runner says of itself, or is refused.

One case per field of `RunnerConfig`, for every backend and every layout that it offers. A field without a case fails.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from step_driver import make_plan, new

from runner_api import (
    CapabilityError,
    ConfigError,
    ParallelContext,
    PlanError,
    ReasoningConfig,
    RunnerConfig,
    RunnerError,
    SamplingParams,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
    load_factory,
    load_runner,
)
from runner_api.config import LAYOUTS
from runner_api.selection import offered_layouts

BACKENDS = ("cpu", "gpu")
# Blocks of four tokens, and a window that reaches four tokens back.
MODEL = WitnessConfig(64, (WitnessGroup(4, sliding_window=5),))
BASE = {"max_num_reqs": 4, "max_num_batched_tokens": 16, "max_model_len": 32}
FAVOURITE = 7


class Favourite:
    """Draws one token whatever the logits."""

    arguments = ()

    def __init__(self, max_num_reqs, vocab_size, arrays):
        pass

    def validate(self, params):
        pass

    def add_request(self, row, params, prompt_token_ids, output_token_ids):
        return True

    def remove_request(self, row):
        pass

    def move_rows(self, moves):
        pass

    def observe(self, rows, token_ids, num_sampled):
        pass

    def apply(self, logits, context):
        logits[:, FAVOURITE] = 1000.0


# -- what is looked at --------------------------------------------------------------------------------------------


def step(runner, plan):
    """The record and the output of one step."""
    assert runner.execute_model(plan) is None
    output = runner.sample_tokens().get_output()
    return runner.last_step(), output


def prompts(*lengths, **params):
    """A plan of new requests A, B, … with a block for every four tokens."""
    added, free = [], iter(range(1, 32))
    for i, length in enumerate(lengths):
        blocks = [next(free) for _ in range(-(-length // 4))]
        sampling = SamplingParams(**{"temperature": 0.0, **params})
        added.append(new("ABCD"[i], range(10, 10 + length), blocks, sampling_params=sampling, seed=i + 1))
    return make_plan({r.req_id: r.prompt_len for r in added}, added)


def answer(runner, plan):
    """Whether a plan is taken."""
    try:
        step(runner, plan)
    except (PlanError, CapabilityError) as e:
        return e.code, e.field
    return "accepted"


def rows(runner):
    return step(runner, prompts(1, 1, 1))[0].idx_mapping


def batch_order(runner):
    """A prefill in an early row, a decode in a late one."""
    long = new("long", range(8), [1, 2])
    step(runner, make_plan({"long": 2, "short": 2}, [long, new("short", [5, 6], [3])]))
    return step(runner, make_plan({"long": 3, "short": 1}, cached={"long": (2, None), "short": (2, None)}))[0].req_ids


def drawn(runner):
    return step(runner, prompts(2, 3, 1, 4, temperature=1.0))[0].token_ids


def hidden_blocks(runner):
    """The block table of a decode, twelve tokens into its sequence."""
    step(runner, prompts(12))
    return step(runner, make_plan({"A": 1}, cached={"A": (12, [9])}))[0].block_tables[0][0]


def what_it_says(runner):
    info = runner.describe()
    return info.device, info.dtype, info.layout, info.noise, info.notes


@dataclasses.dataclass(frozen=True)
class Case:
    """value: another one than the default. look: what must change. refused: by backend and layout, whether it is
    refused instead."""

    value: Any
    look: Callable[[Any], Any]
    refused: Callable[[str, str], bool] = lambda backend, layout: False


def on_layout(name: str) -> Callable[[str, str], bool]:
    return lambda backend, layout: layout == name


def always(backend: str, layout: str) -> bool:
    return True


CASES = {
    "max_num_reqs": Case(2, lambda r: answer(r, prompts(1, 1, 1))),
    "max_num_batched_tokens": Case(4, lambda r: answer(r, prompts(5))),
    "max_model_len": Case(8, lambda r: answer(r, prompts(9))),
    # The other layout; see below.
    "layout": Case(None, lambda r: r.describe().layout),
    "reorder_batch_threshold": Case(1, batch_order, on_layout("slots")),
    "noise": Case("philox", drawn),
    "dtype": Case("float64", what_it_says, lambda backend, layout: backend == "gpu"),
    "device": Case("cuda", what_it_says, lambda backend, layout: backend == "cpu" or not has_cuda()),
    "num_speculative_tokens": Case(2, lambda r: step(r, prompts(2))[0].token_ids.shape, on_layout("dense")),
    "max_concurrent_batches": Case(3, lambda r: (r.describe().notes, len(getattr(r, "output_ring", ())))),
    "initial_free_rows": Case((1, 0, 3, 2), rows, on_layout("dense")),
    "window_reach": Case((8,), hidden_blocks),
    "logprobs_mode": Case("raw_logits", lambda r: step(r, prompts(2, logprobs=1))[1].logprobs.logprobs),
    "reasoning": Case(ReasoningConfig((1,), (2,)), lambda r: answer(r, prompts(2, thinking_token_budget=1))),
    "logits_processors": Case((Favourite,), drawn),
    "record": Case(frozenset({"logits"}), lambda r: step(r, prompts(2))[0].logits is None),
    "parallel": Case(ParallelContext(tp_size=2), what_it_says, always),
}


def has_cuda() -> bool:
    from gpu_backend.triton_support import HAS_CUDA, INTERPRETED

    return HAS_CUDA and not INTERPRETED


# -- the table, applied -------------------------------------------------------------------------------------------


def ready(backend, **options):
    runner = load_runner(backend, RunnerConfig(**{**BASE, **options}))
    runner.load_model(MODEL)
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), 32))
    return runner


def offered(backend):
    if backend == "gpu":
        pytest.importorskip("gpu_backend.triton_support")
    return offered_layouts(load_factory(backend))


@functools.cache
def by_default(backend, layout, look):
    return look(ready(backend, layout=layout))


def same(a, b):
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(RunnerConfig)])
def test_an_option_changes_something_or_is_refused(field, backend, layout):
    assert field in CASES, f"RunnerConfig.{field} has no case here: what does it change, and where is it refused?"
    layouts = offered(backend)
    if layout not in layouts:
        with pytest.raises(CapabilityError) as caught:
            ready(backend, layout=layout)
        assert caught.value.field == "layout"
        return
    case = CASES[field]
    options = {"layout": layout, field: case.value}
    if field == "layout":
        options["layout"] = next(name for name in LAYOUTS if name != layout)
    assert options[field] != getattr(RunnerConfig(), field)
    if case.refused(backend, layout) or options["layout"] not in layouts:
        with pytest.raises((CapabilityError, ConfigError)) as caught:
            ready(backend, **options)
        assert caught.value.field == field
        return
    changed = case.look(ready(backend, **options))
    assert not same(changed, by_default(backend, layout, case.look)), f"{field}={case.value!r} changed nothing"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_runners_of_one_configuration_look_the_same(backend, layout):
    """Or a change would prove nothing."""
    if layout not in offered(backend):
        pytest.skip(f"the {backend} runner offers no {layout} layout")
    for look in {case.look for case in CASES.values() if not case.refused(backend, layout)}:
        assert same(look(ready(backend, layout=layout)), by_default(backend, layout, look))


def test_the_table_holds_no_field_that_is_gone():
    assert CASES.keys() == {f.name for f in dataclasses.fields(RunnerConfig)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_changes_is_what_the_option_is_for(layout):
    """Looked at by hand, on the reference."""
    if layout not in offered("cpu"):
        pytest.skip(f"the cpu runner offers no {layout} layout")

    def look(field, **more):
        return CASES[field].look(ready("cpu", layout=layout, **{field: CASES[field].value, **more}))

    for field, clause in (("max_num_reqs", 23), ("max_num_batched_tokens", 32), ("max_model_len", 24)):
        assert look(field)[0] == f"MR-ERR-{clause:03}"
        assert by_default("cpu", layout, CASES[field].look) == "accepted"
    assert (look("logits_processors") == FAVOURITE).all()
    assert look("window_reach").tolist() == [0, 2, 3, 9]
    assert by_default("cpu", layout, hidden_blocks).tolist() == [0, 0, 3, 9]
    assert look("reasoning") == "accepted"
    assert look("record") is False
    assert "max_concurrent_batches" in look("max_concurrent_batches")[0][0]
    if layout == "slots":
        assert look("num_speculative_tokens") == (1, 3)
        assert look("initial_free_rows").tolist() == [2, 3, 0]
        assert by_default("cpu", layout, rows).tolist() == [3, 2, 1]
    else:
        assert by_default("cpu", layout, batch_order) == ("long", "short")
        assert look("reorder_batch_threshold") == ("short", "long")


def test_a_refusal_names_the_field():
    with pytest.raises(RunnerError) as caught:
        ready("cpu", layout="slots", reorder_batch_threshold=1)
    assert caught.value.field == "reorder_batch_threshold"
    assert "slots layout" in str(caught.value)
