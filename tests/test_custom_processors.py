"""Custom logits processors on both backends: the interface, the two examples, whole runners, the page about them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from step_driver import make_plan, new

from engine_core.llm import LLM
from runner_api import (
    ConfigError,
    NewRequestData,
    RunnerConfig,
    RunnerError,
    SamplingParams,
    SamplingParamsError,
    UnknownNameError,
    WitnessConfig,
    group_kv_cache_specs,
    load_runner,
)
from runner_api.errors import LogitsProcessorError
from runner_api.logits_processors import RowMove, build_processors, check_params

ROOT = Path(__file__).parents[1]
N, V = 6, 12


def example(name: str, attribute: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, attribute)


BanRepeats, BoostTopic = example("ban_repeats", "BanRepeats"), example("boost_topic", "BoostTopic")


@dataclass
class Backend:
    """A backend's `CustomProcessors`, spoken to in NumPy."""

    build: Callable[..., Any]
    array: Callable[[Any, str], Any]
    numpy: Callable[[Any], np.ndarray]
    logits_rows: Callable[..., Any]

    def rows(self, owner: list[int], local: list[int] | None = None, input_ids: list[int] | None = None) -> Any:
        """LogitsRows of these state rows; drafts of one request stand one behind the other."""
        local = local or [0] * len(owner)
        first = [i for i, d in enumerate(local) if d == 0]
        counts = np.diff([*first, len(owner)])
        return self.logits_rows(
            len(owner), self.array(owner, "int64"), self.array(local, "int32"), self.array(range(len(owner)), "int64"),
            self.array(input_ids or [0] * len(owner), "int32"), np.array([owner[i] for i in first], np.int64),
            counts.astype(np.int32),
        )  # fmt: skip

    def apply(self, custom: Any, logits: np.ndarray, *args: Any) -> np.ndarray:
        edited = self.array(logits, "float32")
        custom.apply(self.rows(*args), edited)
        return self.numpy(edited)

    def observe(self, custom: Any, rows: list[int], token_ids: list[list[int]], num_sampled: list[int]) -> None:
        custom.observe(self.array(rows, "int64"), self.array(token_ids, "int64"), self.array(num_sampled, "int32"))


def cpu_backend() -> Backend:
    from cpu_reference.sample.custom import CustomProcessors
    from cpu_reference.sample.logits_rows import LogitsRows

    return Backend(
        lambda *factories: CustomProcessors(N, V, factories), lambda a, dtype: np.array(a, dtype), np.asarray,
        lambda *args: LogitsRows(*args[:6]),
    )  # fmt: skip


def gpu_backend() -> Backend:
    pytest.importorskip("gpu_backend.triton_support")
    import torch

    from gpu_backend.packed_copy import copy_to_device
    from gpu_backend.sample.custom import CustomProcessors
    from gpu_backend.sample.logits_rows import LogitsRows

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Backend(
        lambda *factories: CustomProcessors(N, V, factories, device),
        lambda a, dtype: copy_to_device(np.array(a, dtype), device), lambda a: a.cpu().numpy(), LogitsRows,
    )  # fmt: skip


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.interpret)])
def backend(request: pytest.FixtureRequest) -> Backend:
    return cpu_backend() if request.param == "cpu" else gpu_backend()


def request(outputs: list[int] | None = None) -> NewRequestData:
    return NewRequestData("r", [1, 2], [1, 2, *(outputs or [])], 0, ([1],))


def params(**extra: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, extra_args=extra or None)


class Recorder:
    """Writes down what it is told, and edits every row it sees."""

    arguments = ("edit",)

    def __init__(self, max_num_reqs: int, vocab_size: int, arrays: Any) -> None:
        assert (max_num_reqs, vocab_size) == (N, V)
        self.calls: list[Any] = []

    def validate(self, params: SamplingParams) -> None:
        pass

    def add_request(self, row, params, prompt, outputs):  # type: ignore[no-untyped-def]
        self.calls.append(("add", row, prompt, outputs))
        return (params.extra_args or {}).get("edit", False)

    def remove_request(self, row: int) -> None:
        self.calls.append(("remove", row))

    def move_rows(self, moves: Any) -> None:
        self.calls.append(("move", *moves))

    def observe(self, rows: Any, token_ids: Any, num_sampled: Any) -> None:
        self.calls.append(("observe", rows.tolist(), token_ids.tolist(), num_sampled.tolist()))
        rows[:], token_ids[:], num_sampled[:] = -5, -5, -5

    def apply(self, logits: Any, context: Any) -> None:
        parts = (context.rows, context.positions, context.input_ids, context.local_pos)
        self.calls.append(("apply", tuple(logits.shape), *(a.tolist() for a in parts), context.num_drafts))
        logits[:] = -1.0
        for a in parts:
            a[:] = -5


# -- what a processor is told, and what it can reach ---------------------------------------------------------------


def test_a_processor_sees_the_rows_of_requests_that_asked_and_no_others(backend):
    custom = backend.build(Recorder)
    for row in range(N):
        custom.add_request(row, params(edit=row in (1, 4)), request([7] * row))
    (told,) = custom.processors
    assert told.calls == [("add", row, [1, 2], [7] * row) for row in range(N)]
    told.calls.clear()
    logits = np.arange(4 * V, dtype=np.float32).reshape(4, V)
    edited = backend.apply(custom, logits, [4, 0, 1, 5], None, [10, 11, 12, 13])
    assert told.calls == [("apply", (2, V), [4, 1], [0, 2], [10, 12], [0, 0], 0)]
    assert (edited[[0, 2]] == -1).all()
    np.testing.assert_array_equal(edited[[1, 3]], logits[[1, 3]])


def test_drafts_of_a_request_come_with_it(backend):
    custom = backend.build(Recorder)
    custom.add_request(2, params(edit=True), request())
    custom.add_request(3, params(), request())
    backend.apply(custom, np.zeros((6, V)), [3, 3, 2, 2, 2, 0], [0, 1, 0, 1, 2, 0], [5, 6, 7, 8, 9, 4])
    assert custom.processors[0].calls[-1] == ("apply", (3, V), [2, 2, 2], [2, 3, 4], [7, 8, 9], [0, 1, 2], 2)


def test_whose_logits_are_edited_is_asked_when_a_request_moves_in(backend):
    custom = backend.build(Recorder, BanRepeats)
    batch = np.array([3, 5])
    assert not custom.used_by(batch)
    custom.add_request(5, params(edit=True), request())
    assert custom.used_by(batch)
    assert not custom.used_by(np.array([0, 4]))
    custom.add_request(5, params(), request())
    assert not custom.used_by(batch)
    custom.add_request(3, params(max_repeats=2), request())
    assert custom.used_by(batch)
    custom.remove_request(3)
    assert not custom.used_by(batch)
    assert custom.processors[0].calls[-1] == ("remove", 3)


def test_tokens_are_told_by_row_and_can_not_be_changed(backend):
    custom = backend.build(Recorder)
    rows, tokens, counts = (backend.array(*a) for a in (([3, 1], "int64"), ([[8], [9]], "int64"), ([1, 0], "int32")))
    custom.observe(rows, tokens, counts)
    assert custom.processors[0].calls == [("observe", [3, 1], [[8], [9]], [1, 0])]
    assert [backend.numpy(a).tolist() for a in (rows, tokens, counts)] == [[3, 1], [[8], [9]], [1, 0]]


def test_the_context_is_a_copy(backend):
    custom = backend.build(Recorder)
    custom.add_request(1, params(edit=True), request())
    rows = backend.rows([1], None, [6])
    custom.apply(rows, backend.array(np.zeros((1, V)), "float32"))
    context = (rows.expanded_idx_mapping, rows.positions, rows.input_ids, rows.expanded_local_pos)
    assert [int(a[0]) for a in context] == [1, 0, 6, 0]


def test_a_row_of_no_request_is_nobodys(backend):
    custom = backend.build(Recorder)
    custom.add_request(N - 1, params(edit=True), request())  # what index -1 would find
    logits = backend.array(np.zeros((2, V)), "float32")
    rows = backend.rows([N - 1, 0])
    rows.expanded_idx_mapping[1:] = -1
    custom.apply(rows, logits)
    assert backend.numpy(logits)[:, 0].tolist() == [-1, 0]


def test_moves_take_the_answer_and_the_state_along(backend):
    custom = backend.build(BanRepeats, Recorder)
    custom.add_request(0, params(max_repeats=1), request([5]))
    custom.add_request(1, params(), request([5]))
    custom.add_request(2, params(max_repeats=2), request([6, 6]))
    moves = [RowMove(0, 3), RowMove(3, 2, swap=True), RowMove(1, 0)]
    custom.move_rows(moves)
    assert custom.processors[1].calls[-1] == ("move", *moves)
    custom.remove_request(1)
    # the first is in row 2 now, the third in row 3, and the second, which did not ask, in row 0
    assert [custom.used_by(np.array([row])) for row in range(N)] == [False, False, True, True, False, False]
    edited = backend.apply(custom, np.zeros((4, V)), [0, 1, 2, 3])
    assert [np.flatnonzero(np.isinf(row)).tolist() for row in edited] == [[], [], [5], [6]]


def test_processors_run_in_order(backend):
    class Double(Recorder):
        arguments = ()

        def add_request(self, *args):
            return True

        def apply(self, logits, context):
            logits[:] = logits * 2

    custom = backend.build(BoostTopic, Double)
    custom.add_request(0, params(topic_token_ids=[3], topic_boost=1.5), request())
    assert backend.apply(custom, np.ones((1, V)), [0])[0].tolist() == [2.0] * 3 + [5.0] + [2.0] * 8


# -- what goes wrong -----------------------------------------------------------------------------------------------


class Broken(Recorder):
    """Raises, or answers wrongly, where it is told to."""

    where, answer = "", None

    def _maybe(self, method):
        if method == self.where and self.answer is None:
            raise ZeroDivisionError(f"in {method}")
        return self.answer if method == self.where else method == "add_request" or None

    def add_request(self, row, params, prompt, outputs):
        return self._maybe("add_request")

    def remove_request(self, row):
        return self._maybe("remove_request")

    def move_rows(self, moves):
        return self._maybe("move_rows")

    def observe(self, rows, token_ids, num_sampled):
        return self._maybe("observe")

    def apply(self, logits, context):
        return self._maybe("apply")


def use_all(backend, custom):
    custom.add_request(0, params(), request())
    custom.move_rows([RowMove(0, 1)])
    backend.observe(custom, [1], [[3]], [1])
    backend.apply(custom, np.zeros((1, V)), [1])
    custom.remove_request(1)


@pytest.mark.parametrize("method", ["add_request", "move_rows", "observe", "apply", "remove_request"])
def test_what_a_processor_raises_names_it(backend, method):
    custom = backend.build(type("Mine", (Broken,), {"where": method}))
    with pytest.raises(LogitsProcessorError) as caught:
        use_all(backend, custom)
    assert str(caught.value) == (
        f"MR-ERR-013 Mine.{method}: ZeroDivisionError: in {method}. "
        "The processor's own code failed; the step cannot go on"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("method", "answer", "text"),
    [
        ("add_request", 1, "Mine.add_request: does it edit this request's logits? (got 1, expected True or False as"),
        ("apply", "new logits", "Mine.apply: logits are edited in place (got 'new logits', expected nothing as"),
    ],
)
def test_an_answer_that_would_be_ignored_is_refused(backend, method, answer, text):
    custom = backend.build(type("Mine", (Broken,), {"where": method, "answer": answer}))
    with pytest.raises(LogitsProcessorError) as caught:
        use_all(backend, custom)
    assert text in str(caught.value)


def test_what_is_no_processor_is_refused():
    def fails(*args):
        raise OSError("no table")

    for factory, text in (
        (fails, "a logits processor cannot be built: OSError: no table"),
        (lambda: None, "a logits processor cannot be built: TypeError"),
        (lambda *args: object(), "expected an object that has validate, add_request, remove_request, move_rows, obser"),
        (
            type("Mine", (Recorder,), {"arguments": "edit"}),
            "expected an object that has arguments (the names in extra_",
        ),
        ("no_such_module:Thing", "logits processor 'no_such_module:Thing' cannot be imported"),
        ("runner_api.errors:_short", "a logits processor cannot be built: TypeError"),
    ):
        with pytest.raises(ConfigError) as caught:
            build_processors([factory], N, V, None)
        assert text in str(caught.value)
        assert caught.value.field == "logits_processors"


def test_a_processor_can_be_named():
    (built,) = build_processors([f"{__name__}:Recorder"], N, V, None)
    assert type(built).__name__ == "Recorder"


def test_arguments_are_checked_before_anything_changes():
    custom = cpu_backend().build(BanRepeats, BoostTopic)
    check_params(custom.processors, None, "r")
    check_params(custom.processors, params(), "r")
    check_params(custom.processors, params(max_repeats=3, topic_token_ids=[1, V - 1], topic_boost=2), "r")
    for extra, text in (
        ({"max_repeat": 3}, "extra_args['r']: unknown argument 'max_repeat' (expected one of max_repeats, topic_boost"),
        ({"max_repeats": 0}, "BanRepeats refuses the request: max_repeats: no count (got 0, expected from 1 to 2147"),
        ({"max_repeats": 2**31}, "no count (got 2147483648"),
        ({"max_repeats": True}, "no count (got True"),
        ({"max_repeats": "2"}, "no count (got '2'"),
        ({"topic_boost": 1.0}, "BoostTopic refuses the request: topic_boost: half of it is missing (got ['topic_boos"),
        ({"topic_token_ids": [1]}, "half of it is missing"),
        ({"topic_token_ids": [], "topic_boost": 1}, "no topic"),
        ({"topic_token_ids": [0] * 65, "topic_boost": 1}, "no topic"),
        ({"topic_token_ids": 5, "topic_boost": 1}, "no topic"),
        ({"topic_token_ids": [V], "topic_boost": 1}, "no token (got 12, expected 0 <= id < 12)"),
        ({"topic_token_ids": [-1], "topic_boost": 1}, "no token (got -1"),
        ({"topic_token_ids": [1.0], "topic_boost": 1}, "no token (got 1.0"),
        ({"topic_token_ids": [1], "topic_boost": float("nan")}, "out of range (got nan"),
        ({"topic_token_ids": [1], "topic_boost": True}, "out of range (got True"),
    ):
        with pytest.raises(RunnerError) as caught:
            check_params(custom.processors, params(**extra), "r")
        assert isinstance(caught.value, (SamplingParamsError, UnknownNameError))
        assert text in str(caught.value)
        assert caught.value.req_id == "r"
    with pytest.raises(UnknownNameError, match=r"expected one of \(none\)"):
        check_params([], params(max_repeats=1), "r")


def test_whatever_a_check_raises_is_a_refusal():
    class Mine(Recorder):
        def validate(self, params):
            raise KeyError("edit")

    with pytest.raises(SamplingParamsError, match="Mine refuses the request: KeyError: 'edit'"):
        check_params([Mine(N, V, None)], params(), "r")


# -- the examples --------------------------------------------------------------------------------------------------


def banned(edited: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(np.isinf(row)).tolist() for row in edited]


def test_repeats_are_banned_after_the_number_asked_for(backend):
    """Against counting in plain Python, with several tokens to a step."""
    random, custom = np.random.default_rng(1), backend.build(BanRepeats)
    history: dict[int, list[int]] = {row: random.integers(0, 2, row).tolist() for row in range(4)}
    most = {0: 1, 1: 2, 2: 3, 3: 2}
    for row, drawn in history.items():
        custom.add_request(row, params(max_repeats=most[row]), request(drawn))
    for _ in range(12):
        expected = []
        for row, drawn in history.items():
            tail = drawn[-most[row] :]
            expected.append([tail[0]] if len(tail) == most[row] and len(set(tail)) == 1 else [])
        assert banned(backend.apply(custom, np.zeros((4, V)), list(history))) == expected
        rows = random.permutation(4).tolist()
        tokens, counts = random.integers(0, 2, (4, 3)), random.integers(0, 4, 4)
        backend.observe(custom, rows, tokens.tolist(), counts.tolist())
        for row, taken, n in zip(rows, tokens.tolist(), counts, strict=True):
            history[row] += taken[:n]


def test_drafts_count_as_drawn_in_the_rows_behind_them(backend):
    custom = backend.build(BanRepeats)
    custom.add_request(0, params(max_repeats=2), request([5]))
    custom.add_request(1, params(max_repeats=1), request())
    custom.add_request(2, params(), request([5, 5, 5]))
    rows, local = [0, 0, 0, 0, 1, 2, 2, 1], [0, 1, 2, 3, 0, 0, 1, 0]
    input_ids = [5, 5, 5, 9, 2, 5, 5, 2]  # drafts 5, 5, 9; none; 5
    edited = backend.apply(custom, np.zeros((8, V)), rows, local, input_ids)
    assert banned(edited) == [[], [5], [5], [], [], [], [], []]


def test_the_prompt_is_not_drawn(backend):
    custom = backend.build(BanRepeats)
    custom.add_request(0, params(max_repeats=1), NewRequestData("r", [0, 0], [0, 0], 0, ([1],)))
    assert banned(backend.apply(custom, np.zeros((1, V)), [0])) == [[]]


def test_a_topic_is_boosted(backend):
    custom = backend.build(BoostTopic)
    custom.add_request(1, params(topic_token_ids=[0, 3], topic_boost=-2.5), request())
    custom.add_request(2, params(topic_token_ids=list(range(1, V)), topic_boost=0.25), request())
    edited = backend.apply(custom, np.ones((3, V)), [2, 0, 1])
    assert edited[0].tolist() == [1.0] + [1.25] * (V - 1)
    assert edited[1].tolist() == [1.0] * V
    assert edited[2].tolist() == [-1.5, 1, 1, -1.5] + [1.0] * (V - 4)


# -- whole runners ---------------------------------------------------------------------------------------------------


def generate(runner: str, processors: tuple[Any, ...], asks: list[SamplingParams], **options: Any) -> list[list[int]]:
    sizes = {"max_num_reqs": 4, "max_model_len": 48, **options}
    with LLM(WitnessConfig(vocab_size=6), runner=runner, logits_processors=processors, **sizes) as llm:
        return [out.token_ids for out in llm.generate([[1, 2, 3 + i % 3] for i in range(len(asks))], asks)]


def longest_run(tokens: list[int]) -> int:
    return max(len(run[0]) for run in re.finditer(r"(.)\1*", "".join(map(chr, tokens))))


EXTRA: list[dict[str, Any]] = [
    {}, {"max_repeats": 1}, {"max_repeats": 2}, {"topic_token_ids": [2, 4], "topic_boost": 3.0},
    {"topic_token_ids": [5], "topic_boost": 9.0, "max_repeats": 2}, {"topic_token_ids": [5], "topic_boost": 9.0},
]  # fmt: skip


def asks(num_tokens: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=1.0, seed=i, max_tokens=num_tokens, extra_args=extra or None)
        for i, extra in enumerate(EXTRA)
    ]


def test_examples_in_an_engine() -> None:
    """Requests come and go, four rows for six of them; a small cache makes the engine preempt some."""
    plain = generate("cpu", (), [SamplingParams(temperature=1.0, seed=i, max_tokens=40) for i in range(6)])
    edited = generate("cpu", (BanRepeats, BoostTopic), asks(40))
    assert edited[0] == plain[0]
    assert [longest_run(tokens) for tokens in edited[1:3]] == [1, 2]
    assert [tokens.count(5) for tokens in (edited[5], plain[5])] > [20, 0]
    assert edited[4].count(5) > 15
    assert longest_run(edited[4]) == 2
    assert max(map(longest_run, plain)) > 2
    assert generate("cpu", (BanRepeats, BoostTopic), asks(40), num_blocks=7) == edited
    assert generate("cpu", (BanRepeats, BoostTopic), asks(40), max_num_reqs=1) == edited


@pytest.mark.interpret
def test_both_runners_take_the_same_source() -> None:
    pytest.importorskip("gpu_backend.triton_support")
    processors = (BanRepeats, BoostTopic)
    assert generate("gpu", processors, asks(8)) == generate("cpu", processors, asks(8))


@pytest.mark.parametrize("runner", ["cpu", pytest.param("gpu", marks=pytest.mark.interpret)])
def test_a_refused_request_changes_nothing(runner: str) -> None:
    """In the runner itself: its plan is refused like any other impossible one, and the next one is served."""
    if runner == "gpu":
        pytest.importorskip("gpu_backend.triton_support")
    config = RunnerConfig(max_num_reqs=2, max_model_len=16, logits_processors=(BanRepeats, BoostTopic))
    held = load_runner(runner, config)
    held.load_model(WitnessConfig())
    held.initialize_kv_cache(group_kv_cache_specs(held.get_kv_cache_specs(), 4))
    before = held.state_digest()
    for extra in ({"max_repeats": 0}, {"topic": [3]}):
        refused = [new("A", [1, 2], [1]), new("B", [1], [2], sampling_params=params(**extra))]
        with pytest.raises(RunnerError) as caught:
            held.execute_model(make_plan({"A": 2, "B": 1}, refused))
        assert caught.value.req_id == "B"
        assert held.state_digest() == before
    held.execute_model(make_plan({"A": 2}, [new("A", [1, 2], [1], sampling_params=params(max_repeats=1))]))
    assert len(held.sample_tokens().get_output().tokens()["A"]) == 1


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    """In CUDA's sync debug mode: the step, and both examples."""
    backend = gpu_backend()
    import torch

    custom = backend.build(BanRepeats, BoostTopic)
    logits, rows = backend.array(np.zeros((4, V)), "float32"), backend.rows([3, 1, 1, 0], [0, 0, 1, 0], [5, 5, 6, 7])
    tokens = [backend.array(*a) for a in (([3, 1], "int64"), ([[8, 8], [9, 9]], "int64"), ([2, 1], "int32"))]
    torch.cuda.set_sync_debug_mode("error")
    try:
        custom.add_request(3, params(max_repeats=2, topic_token_ids=[1], topic_boost=1.0), request([5]))
        custom.add_request(1, params(max_repeats=1), request())
        custom.observe(*tokens)
        custom.apply(rows, logits)
        custom.move_rows([RowMove(3, 2), RowMove(2, 1, swap=True)])
        custom.remove_request(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert banned(backend.numpy(logits)) == [[8], [9], [6], []]


@pytest.mark.parametrize("runner", ["cpu", pytest.param("gpu", marks=pytest.mark.interpret)])
@pytest.mark.parametrize("method", ["add_request", "observe", "apply", "remove_request"])
def test_a_failing_processor_stops_the_engine_by_name(runner: str, method: str) -> None:
    if runner == "gpu":
        pytest.importorskip("gpu_backend.triton_support")
    mine = type("Mine", (Broken,), {"where": method, "__init__": lambda self, *args: None})
    with pytest.raises(RunnerError, match=rf"Mine.{method}: ZeroDivisionError: in {method}"):
        generate(runner, (mine,), [SamplingParams(max_tokens=2)] * 5, max_num_reqs=2)


# -- the page --------------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "custom-logits-processor.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("runner", ["cpu", pytest.param("gpu", marks=pytest.mark.interpret)])
def test_the_page_runs_as_it_stands(runner: str, capsys: pytest.CaptureFixture[str]) -> None:
    if runner == "gpu":
        pytest.importorskip("gpu_backend.triton_support")
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks] == ["python", "python", "text", "python", "text"]
    names: dict[str, Any] = {"__name__": "page"}
    for i, (kind, block) in enumerate(blocks):
        if kind == "python":
            program = block.replace('runner="cpu"', f'runner="{runner}"')
            if runner == "gpu":
                program = program.replace("max_tokens=200", "max_tokens=12")  # interpreted
            exec(compile(program, "custom-logits-processor.md", "exec"), names)
            shown = blocks[i + 1][1] if blocks[i + 1][0] == "text" else ""
            if runner == "gpu":
                shown = shown.replace("85", "12").replace("27", "12")
            assert capsys.readouterr().out == shown


def test_the_page_names_what_there_is() -> None:
    for target in re.findall(r"\]\(\.\./([\w./-]+)\)", PAGE):
        assert (ROOT / target).exists(), target
    from runner_api.logits_processors import METHODS, ArrayBackend

    for name in (*METHODS, "arguments", *(n for n in vars(ArrayBackend) if not n.startswith("_"))):
        assert f"`{name}" in PAGE or f"def {name}" in PAGE or f"{name} =" in PAGE, name
