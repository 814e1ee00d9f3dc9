"""Sampling through the whole runner: masks, faults, traces, preemption, processors, digest and poison."""

import numpy as np
import pytest
from step_driver import GREEDY, Driver, force, make_plan, make_runner, new

from runner_api import (
    ForcedStep,
    GrammarOutput,
    PlanError,
    ReasoningConfig,
    SampleFault,
    SamplingParams,
    WitnessConfig,
    WitnessGroup,
)

MODEL = WitnessConfig(vocab_size=50, groups=(WitnessGroup(4),))
WORDS = 2  # of a mask
ALL = -1


def small(**config):
    config = {"max_num_reqs": 4, "max_num_batched_tokens": 32, "max_model_len": 40, **config}
    return make_runner(MODEL, 64, **config)


def mask(*token_ids):
    words = np.zeros(WORDS, np.uint32)
    for token in token_ids:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def given(runner, logits, tokens=None):
    """The step's logits, imposed; its tokens are the row's best ones, or those given."""
    r = runner.last_step().num_reqs
    logits = np.asarray(logits, np.float32)
    taken = np.nan_to_num(logits, nan=-1).argmax(1) if tokens is None else np.array(tokens)
    return ForcedStep(taken[:, None].astype(np.int64), np.ones(r, np.int32), None, logits)


# -- grammars -------------------------------------------------------------------------------------------------------


def test_masks_go_to_their_requests():
    """Listed in another order than the batch's; who is not listed keeps all; the record holds what came before."""
    runner = small(record=frozenset({"logits"}))
    added = [new(r, [1, 2, ord(r) % 50], [i + 1], sampling_params=GREEDY) for i, r in enumerate("abc")]
    runner.execute_model(make_plan(dict.fromkeys("abc", 3), added))
    grammar = GrammarOutput(["c", "a"], np.stack([mask(7), mask(9)]))
    tokens = runner.sample_tokens(grammar).get_output().tokens()
    assert tokens["c"] == (7,)
    assert tokens["a"] == (9,)
    record = runner.last_step()
    assert np.isfinite(record.logits).all()
    b = record.req_ids.index("b")
    assert tokens["b"] == (record.logits[b].argmax(),)


def test_log_probabilities_know_of_the_mask():
    runner = small()
    ask = SamplingParams(temperature=0.7, logprobs=2)
    runner.execute_model(make_plan({"a": 1}, [new("a", [1], [1], sampling_params=ask)]))
    got = runner.sample_tokens(GrammarOutput(["a"], mask(7)[None])).get_output().logprobs
    assert got.token_ids[0, :2].tolist() == [7, 7]
    assert got.logprobs[0].tolist() == [0.0, 0.0, -np.inf]
    assert got.ranks.tolist() == [1]


@pytest.mark.parametrize(
    ("grammar", "field"),
    [
        ("mask", "grammar"),
        (GrammarOutput(["x"], mask(1)[None]), "grammar.structured_output_request_ids"),
        (GrammarOutput(["gone"], mask(1)[None]), "grammar.structured_output_request_ids"),
        (GrammarOutput(["a", "a"], np.stack([mask(1)] * 2)), "grammar.structured_output_request_ids"),
        (GrammarOutput("a", mask(1)[None]), "grammar.structured_output_request_ids"),
        (GrammarOutput([0], mask(1)[None]), "grammar.structured_output_request_ids"),
        (GrammarOutput(["a"], [[1, 1]]), "grammar.grammar_bitmask"),
        (GrammarOutput(["a"], mask(1)[None].astype(np.int64)), "grammar.grammar_bitmask"),
        (GrammarOutput(["a"], mask(1)[None].view(np.uint32)), "grammar.grammar_bitmask"),
        (GrammarOutput(["a"], mask(1)), "grammar.grammar_bitmask"),
        (GrammarOutput(["a"], mask(1)[None, :1]), "grammar.grammar_bitmask"),
        (GrammarOutput(["a"], np.stack([mask(1)] * 2)), "grammar.grammar_bitmask"),
        (GrammarOutput(["a"], np.zeros((0, WORDS), np.int32)), "grammar.grammar_bitmask"),
    ],
    ids=str,
)
def test_masks_that_do_not_fit_are_refused(grammar, field):
    """Before anything changes: the step can still be sampled, and gives what it would have given."""

    def waiting():
        runner = small()
        added = [new("a", [1, 2], [1]), new("gone", [3], [2])]
        runner.execute_model(make_plan({"a": 2, "gone": 1}, added))
        runner.sample_tokens()
        runner.execute_model(make_plan({"a": 1}, (), {"a": (2, None)}))
        return runner

    runner = waiting()
    before = runner.state_digest()
    with pytest.raises(PlanError) as caught:
        runner.sample_tokens(grammar)
    assert (caught.value.code, caught.value.field) == ("MR-ERR-049", field)
    assert runner.state_digest() == before
    assert runner.sample_tokens().get_output() == waiting().sample_tokens().get_output()


def test_with_drafts_each_request_owns_as_many_masks_as_rows_it_could_have():
    runner = small(num_speculative_tokens=2, record=frozenset({"logits"}))
    runner.execute_model(make_plan({"a": 2, "b": 2}, [new("a", [1, 2], [1]), new("b", [3, 4], [2])]))
    runner.sample_tokens(forced=force(runner, {"a": [5], "b": [6]}, {"a": [7, 8], "b": [9, 10]}))
    plan = make_plan({"a": 3, "b": 1}, (), {"a": (2, [3]), "b": (2, None)}, drafts={"a": [7, 8]})
    runner.execute_model(plan)
    grammar = GrammarOutput(["b", "a"], np.stack([mask(20), mask(), mask(), mask(21), mask(22), mask(23)]))
    output = runner.sample_tokens(grammar, forced=force(runner, {"a": [5], "b": [6]})).get_output()
    record = runner.last_step()
    a, b = record.req_ids.index("a"), record.req_ids.index("b")
    assert record.token_ids[a].tolist() == [21, 22, 23]
    assert record.token_ids[b].tolist() == [20, 0, 0]
    assert not output.errors  # the masks of nothing belong to rows that b does not have


# -- faults ---------------------------------------------------------------------------------------------------------

# Asks for what cannot be: its only token is out.
IMPOSSIBLE = SamplingParams(temperature=0.0, allowed_token_ids=[3], bad_words_token_ids=[[3]])


def test_a_request_without_a_token_fails_alone():
    """The others' tokens are those they draw without it; its row takes token 0 and goes on."""

    def run(ids):
        driver = Driver(small())
        for r in ids:
            params = IMPOSSIBLE if r == "x" else SamplingParams(temperature=1.0)
            driver.add(r, [1, 2, ord(r) % 50], sampling_params=params, seed=ord(r))
        drawn = [driver.step(dict.fromkeys(ids, 3))]
        outputs = [driver.runner.last_step()]
        return drawn[0], outputs[0], driver.runner

    drawn, record, runner = run("axb")
    assert drawn["x"] == ()
    alone, _, _ = run("ab")
    assert {r: drawn[r] for r in "ab"} == alone
    i = record.req_ids.index("x")
    assert record.faults.tolist() == [SampleFault.NO_TOKEN if r == "x" else 0 for r in record.req_ids]
    assert record.faults.dtype == np.int32
    assert record.num_sampled[i] == 1
    row = runner.req_states.req_id_to_row["x"]
    assert runner.req_states.all_token_ids[row, :4].tolist() == [1, 2, ord("x") % 50, 0]


def test_an_error_names_its_request():
    runner = small()
    runner.execute_model(
        make_plan({"a": 1, "x": 1}, [new("a", [1], [1]), new("x", [2], [2], sampling_params=IMPOSSIBLE)])
    )
    output = runner.sample_tokens()
    for _ in range(2):  # asked twice
        got = output.get_output()
        assert got.errors == {"x": SampleFault.NO_TOKEN}
        assert got.tokens()["x"] == ()
        assert len(got.tokens()["a"]) == 1


def test_nan_is_an_error_of_its_row():
    runner = small()
    runner.execute_model(make_plan({"a": 1, "b": 1}, [new("a", [1], [1]), new("b", [2], [2])]))
    logits = np.zeros((2, 50), np.float32)
    logits[:, 9] = 5
    logits[1, 3] = np.nan
    output = runner.sample_tokens(forced=given(runner, logits)).get_output()
    record = runner.last_step()
    assert record.faults.tolist() == [0, SampleFault.NAN]
    assert output.errors == {record.req_ids[1]: SampleFault.NAN}
    assert output.sampled_token_ids == ((9,), ())
    assert record.token_ids.tolist() == [[9], [0]]


def test_an_unfinished_prefill_has_no_fault():
    driver = Driver(small())
    driver.add("x", range(6), sampling_params=IMPOSSIBLE)
    driver.runner.execute_model(driver.plan({"x": 4}))
    output = driver.runner.sample_tokens().get_output()
    assert output.errors == {}
    assert driver.runner.last_step().faults.tolist() == [0]
    driver.computed["x"] = 4
    driver.runner.execute_model(driver.plan({"x": 2}))
    assert driver.runner.sample_tokens().get_output().errors == {"x": SampleFault.NO_TOKEN}


# -- what a request has said, and what is to come --------------------------------------------------------------------


def outputs(params, chunk=5, preempt_after=None, steps=8, neighbour=True, **config):
    """The tokens of request a (a prompt of five) and of its neighbour n, which draws a token in every step."""
    driver = Driver(small(**config))
    driver.add("a", [1, 2, 3, 1, 2], sampling_params=params, seed=3)
    if neighbour:
        driver.add("n", [7], sampling_params=SamplingParams(temperature=1.0, presence_penalty=2.0), seed=4)
    drawn = {"a": [], "n": []}
    while len(drawn["a"]) < steps:
        counts = {"a": min(chunk, len(driver.tokens["a"]) - driver.computed["a"])}
        if neighbour:
            counts["n"] = 1
        for r, tokens in driver.step(counts).items():
            drawn[r] += tokens
        if len(drawn["a"]) == preempt_after:
            preempt_after = None  # once
            driver.remove("a", preempt=True)
            driver.readd("a", sampling_params=params, seed=3)
    return drawn


TRACE = SamplingParams(temperature=1.0, trace_decode_token_ids=[11, 12, 13])
MIXED = SamplingParams(
    temperature=0.9, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.5, top_k=20, top_p=0.9,
    min_p=0.01, logit_bias={5: 2.0}, bad_words_token_ids=[[5, 5], [6]], min_tokens=6, stop_token_ids=[5, 8],
    thinking_token_budget=2,
)  # fmt: skip
REASONING = ReasoningConfig((1, 2), (3, 4), (4,))


@pytest.mark.parametrize("params", [TRACE, MIXED], ids=["trace", "mixed"])
@pytest.mark.parametrize("chunk", [2, 5])
@pytest.mark.parametrize("preempt_after", [None, 1, 2, 4])
def test_chunks_preemptions_and_neighbours_change_no_token(params, chunk, preempt_after):
    plain = outputs(params, neighbour=False, reasoning=REASONING)
    both = outputs(params, chunk, preempt_after, reasoning=REASONING, initial_free_rows=(2, 0, 3, 1))
    assert both["a"] == plain["a"]
    alone = outputs(SamplingParams(temperature=0.0), chunk)["n"]
    n = min(len(alone), len(both["n"]))
    assert both["n"][:n] == alone[:n]


def test_a_trace_is_taken_instead_of_what_is_drawn():
    assert outputs(TRACE)["a"][:3] == [11, 12, 13]
    plain = outputs(SamplingParams(temperature=1.0))["a"]
    assert plain[:3] != [11, 12, 13]


def test_a_trace_longer_than_a_sequence_is_cut():
    trace = SamplingParams(temperature=0.0, trace_decode_token_ids=[4] * 100)
    assert outputs(trace, steps=30)["a"] == [4] * 30


def test_log_probabilities_tell_of_the_replayed_token():
    runner = small(record=frozenset({"logits"}))
    params = SamplingParams(temperature=0.0, trace_decode_token_ids=[11], logprobs=0)
    runner.execute_model(make_plan({"a": 1}, [new("a", [1], [1], sampling_params=params)]))
    output, record = runner.sample_tokens().get_output(), runner.last_step()
    x = record.logits[0].astype(np.float64)
    assert output.sampled_token_ids == ((11,),)
    assert record.token_ids.tolist() == [[11]]
    assert output.logprobs.token_ids.tolist() == [[11]]
    assert output.logprobs.ranks.tolist() == [(x >= x[11]).sum()]
    assert record.intermediates["scores"][0].argmax() != 11  # the draw's own


def test_forced_tokens_count_as_said():
    """A frequency penalty sees what was imposed, not what would have been drawn."""
    runner = small()
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    runner.execute_model(make_plan({"a": 1}, [new("a", [1], [1], sampling_params=params)]))
    logits = np.zeros((1, 50), np.float32)
    logits[0, 9], logits[0, 8] = 5, 4
    runner.sample_tokens(forced=given(runner, logits, [8]))
    for computed, expected in ((1, 9), (2, 9), (3, 8)):
        runner.execute_model(make_plan({"a": 1}, (), {"a": (computed, None)}))
        step = given(runner, logits)
        runner.sample_tokens(forced=ForcedStep(np.int64([[expected]]), step.num_sampled, None, step.logits))
        assert runner.last_step().token_ids.tolist() == [[expected]], computed


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_models_own_stop_tokens_are_masked_too(ignore_eos):
    runner = small()
    params = SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=[8], ignore_eos=ignore_eos)
    runner.execute_model(make_plan({"a": 1}, [new("a", [1], [1], sampling_params=params, eos_token_ids=[9])]))
    logits = np.zeros((1, 50), np.float32)
    logits[0, [7, 8, 9]] = 5, 6, 7
    runner.sample_tokens(forced=given(runner, logits, [7]))
    assert runner.last_step().token_ids.tolist() == [[7]]
    runner.execute_model(make_plan({"a": 1}, (), {"a": (1, None)}))
    runner.sample_tokens(forced=given(runner, logits))
    assert runner.last_step().token_ids.tolist() == [[9]]


def test_a_grammar_that_allows_the_stop_token_alone_wins_over_the_minimum():
    for form, expected in (({"json_object": True}, 9), (None, 0)):
        runner = small()
        params = SamplingParams(temperature=0.0, min_tokens=5, structured_outputs=form)
        runner.execute_model(make_plan({"a": 1}, [new("a", [1], [1], sampling_params=params, eos_token_ids=[9])]))
        output = runner.sample_tokens(GrammarOutput(["a"], mask(9)[None])).get_output()
        assert runner.last_step().token_ids.tolist() == [[expected]]
        assert output.errors == ({} if form else {"a": SampleFault.NO_TOKEN})


# -- processors -----------------------------------------------------------------------------------------------------


class Listener:
    """Writes down all that it is told; edits the logits of requests that name a token."""

    arguments = ("token",)

    def __init__(self, max_num_reqs, vocab_size, arrays):
        self.told, self.token = [], {}

    def validate(self, params):
        if not isinstance((params.extra_args or {}).get("token", 0), int):
            raise ValueError("no token")

    def add_request(self, row, params, prompt_token_ids, output_token_ids):
        self.told.append(("add", row, list(prompt_token_ids), list(output_token_ids)))
        self.token[row] = (params.extra_args or {}).get("token")
        return self.token[row] is not None

    def remove_request(self, row):
        self.told.append(("remove", row))

    def move_rows(self, moves):
        raise AssertionError("rows never move here")

    def observe(self, rows, token_ids, num_sampled):
        self.told.append(("observe", rows.tolist(), token_ids[:, 0].tolist(), num_sampled.tolist()))

    def apply(self, logits, context):
        for i, row in enumerate(context.rows.tolist()):
            logits[i, self.token[row]] = 1e6


def test_processors_are_told_and_heard():
    runner = small(logits_processors=(Listener,), initial_free_rows=(0, 1, 2, 3))
    (listener,) = runner.sampler.custom.processors
    driver = Driver(runner)
    named = SamplingParams(temperature=1.0, extra_args={"token": 17})
    driver.add("a", [1, 2, 3], sampling_params=named)
    driver.add("b", [4])
    first = driver.step({"a": 2, "b": 1})
    assert first["a"] == ()
    second = driver.step({"a": 1, "b": 1})
    assert second["a"] == (17,)
    driver.remove("a", preempt=True)
    driver.readd("a", sampling_params=named)
    third = driver.step({"a": 4, "b": 1})
    assert third["a"] == (17,)
    rows = {"a": runner.last_step().idx_mapping[runner.last_step().req_ids.index("a")], "b": 2}
    assert rows["a"] == 3
    added = [t for t in listener.told if t[0] == "add"]
    assert added == [("add", 3, [1, 2, 3], []), ("add", 2, [4], []), ("add", 3, [1, 2, 3], [17])]
    assert ("remove", 3) in listener.told
    seen = [t for t in listener.told if t[0] == "observe"]
    assert [dict(zip(t[1], t[3], strict=True)) for t in seen] == [{3: 0, 2: 1}, {3: 1, 2: 1}, {3: 1, 2: 1}]
    assert [dict(zip(t[1], t[2], strict=True))[2] for t in seen] == [d["b"][0] for d in (first, second, third)]


def test_what_a_processor_refuses_changes_nothing():
    runner = small(logits_processors=(Listener,))
    before = runner.state_digest()
    for extra in ({"token": "seven"}, {"tokens": 7}):
        params = SamplingParams(extra_args=extra)
        with pytest.raises(ValueError, match="a"):
            runner.execute_model(make_plan({"a": 1}, [new("a", [1], [1], sampling_params=params)]))
        assert runner.state_digest() == before
        assert runner.sampler.custom.processors[0].told == []


# -- digest and poison ----------------------------------------------------------------------------------------------

BUSY = SamplingParams(
    temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=2.0,
    min_tokens=3, stop_token_ids=[1], logit_bias={1: 2.0}, bad_words_token_ids=[[1, 4], [2]], thinking_token_budget=0,
    allowed_token_ids=[1, 2, 3], logprob_token_ids=[4, 5],
)  # fmt: skip


def busy_runner(params=BUSY):
    runner = small(reasoning=REASONING)
    runner.execute_model(make_plan({"a": 3}, [new("a", [1, 2, 3], [1], sampling_params=params, seed=6)]))
    runner.sample_tokens()
    return runner


def test_the_digest_sees_every_table_and_nothing_behind_its_end():
    runner = busy_runner()
    row, digest = runner.req_states.req_id_to_row["a"], runner.state_digest()
    tables, widths = runner.sampler.row_tables(), runner.sampler.row_widths(row)
    assert len(tables) > 20
    assert {"seeds", "temperature", "bias", "stop_token_ids", "bad_word_tokens", "output_counts"} <= tables.keys()
    for name, values in tables.items():
        flat = values[row : row + 1].reshape(-1)
        for at, changes in ((0, widths.get(name, 1) > 0), (widths.get(name, len(flat)), False)):
            if at < len(flat):
                kept = flat[at].copy()
                flat[at] += 1
                assert (runner.state_digest() != digest) == changes, (name, at)
                flat[at] = kept
    assert runner.state_digest() == digest


@pytest.mark.parametrize("params", [BUSY, GREEDY], ids=["busy", "plain"])
def test_poison_reaches_all_that_is_not_defined_and_nothing_else(params):
    runner, twin = busy_runner(params), busy_runner(params)
    digest, row = runner.state_digest(), runner.req_states.req_id_to_row["a"]
    runner.poison_unused(-99)
    assert runner.state_digest() == digest
    widths = runner.sampler.row_widths(row)
    for name, values in runner.sampler.row_tables().items():
        poisoned = values == -99 if values.dtype.kind == "i" else np.isnan(values)
        assert poisoned[[r for r in range(4) if r != row]].all(), name
        if values.ndim == 2:
            assert poisoned[row, widths.get(name, values.shape[1]) :].all(), name
            assert not poisoned[row, : widths.get(name, values.shape[1])].any(), name
        else:
            assert not poisoned[row], name
    # … and whoever moves in next finds a clean row
    for r in (runner, twin):
        r.execute_model(make_plan({"a": 1, "b": 2}, [new("b", [5, 6], [2], sampling_params=BUSY)], {"a": (3, None)}))
    assert runner.sample_tokens().get_output().tokens() == twin.sample_tokens().get_output().tokens()
    assert runner.state_digest() == twin.state_digest()
