"""Log probabilities of whole steps, of answers and of prompts, on both runners alike."""

import numpy as np
import pytest
from step_driver import Driver, force, make_plan, new

from runner_api import (
    CapabilityError,
    ForcedStep,
    GrammarOutput,
    PlanError,
    RunnerConfig,
    SampleFault,
    SamplingParams,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
    load_runner,
)
from runner_api.config import LOGPROBS_MODES

LOW, NAN = -np.inf, np.nan
VOCAB = WitnessConfig().vocab_size
TOLERANCE = 2e-5
RECORD = frozenset({"logits"})


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.interpret)])
def name(request):
    if request.param == "gpu":
        pytest.importorskip("gpu_backend.triton_support")
    return request.param


def make(name, model=None, **config):
    config = {"max_num_reqs": 8, "max_num_batched_tokens": 48, "max_model_len": 64, "record": RECORD} | config
    runner = load_runner(name, RunnerConfig(**config))
    runner.load_model(model or WitnessConfig(groups=(WitnessGroup(4),)))
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), 80))
    return runner


def greedy(**params):
    return SamplingParams(temperature=0.0, **params)


def step(driver, counts):
    """One step of a driver; its whole output and its record."""
    assert driver.runner.execute_model(driver.plan(counts)) is None
    output = driver.runner.sample_tokens().get_output()
    for req_id, n in counts.items():
        driver.computed[req_id] += n
        driver.tokens[req_id].extend(output.tokens()[req_id])
    return output, driver.runner.last_step()


def log_softmax(x):
    x = np.asarray(x, np.float64)
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def same(got, expected):
    """Two LogprobsLists, bit for bit."""
    for field in ("token_ids", "logprobs", "ranks"):
        a, b = getattr(got, field), getattr(expected, field)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_every_mode_on_a_mixed_batch(name, mode):
    """Values follow from the recorded logits; who asks for nothing has a row and changes nobody's."""
    runner = make(name, logprobs_mode=mode)
    driver = Driver(runner)
    bias = {5: 9.0, 6: -9.0}
    asks = {
        "all": greedy(logprobs=-1, logit_bias=bias),
        "few": SamplingParams(temperature=0.5, logprobs=3),
        "own": greedy(logprob_token_ids=(6, 5, 63, 5)),
        "none": greedy(),
    }
    for n, (req_id, params) in enumerate(asks.items()):
        driver.add(req_id, [7 * n + 1, 2, 3], sampling_params=params, seed=n)
    for counts in (dict.fromkeys(asks, 3), dict.fromkeys(asks, 1)):
        output, record = step(driver, counts)
        assert output.logprobs.token_ids.shape == (4, 1 + VOCAB)
        assert record.logprobs.tobytes() == output.logprobs.logprobs.tobytes()
        assert record.ranks.tolist() == output.logprobs.ranks.tolist()
        for i, req_id in enumerate(output.req_ids):
            x = record.logits[i].astype(np.float64)
            if mode.startswith("processed"):
                if req_id == "all":
                    x[list(bias)] += list(bias.values())
                x = x / (asks[req_id].temperature or 1.0)
            values = log_softmax(x) if mode.endswith("logprobs") else x
            (token,) = output.tokens()[req_id]
            order = np.argsort(-x, kind="stable")
            own = {"own": [6, 5, 63, 5]}.get(req_id, order.tolist())
            ids = [token, *own]
            assert output.logprobs.token_ids[i].tolist() == ids + [0] * (1 + VOCAB - len(ids))
            np.testing.assert_allclose(output.logprobs.logprobs[i, : len(ids)], values[ids], rtol=0, atol=TOLERANCE)
            assert (output.logprobs.logprobs[i, len(ids) :] == LOW).all()
            assert output.logprobs.ranks[i] == (x >= x[token]).sum()


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_what_is_recorded_changes_nothing(name, mode):
    """A runner may take another way where nobody looks at its logits."""
    outputs = []
    for record in (RECORD, frozenset()):
        driver = Driver(make(name, logprobs_mode=mode, record=record))
        driver.add("a", [1, 2], sampling_params=SamplingParams(temperature=0.7, top_k=9, logprobs=12), seed=5)
        driver.add("b", [3], sampling_params=SamplingParams(min_p=0.1, repetition_penalty=1.5), seed=6)
        driver.add("c", [4], sampling_params=greedy(logprobs=0, prompt_logprobs=0))
        outputs.append([step(driver, dict.fromkeys("abc", n) | {"a": n + first})[0] for n, first in ((1, 1), (1, 0))])
    for recorded, not_recorded in zip(*outputs, strict=True):
        assert recorded.tokens() == not_recorded.tokens()
        same(not_recorded.logprobs, recorded.logprobs)


def test_nobody_asks(name):
    output, record = step(driver_with(make(name), {"a": greedy()}), {"a": 2})
    assert output.logprobs is None
    assert record.logprobs is record.ranks is record.logprob_token_ids is None
    assert output.prompt_logprobs == {}


def driver_with(runner, asks, tokens=(1, 2)):
    driver = Driver(runner)
    for req_id, params in asks.items():
        driver.add(req_id, tokens, sampling_params=params)
    return driver


def test_zero_is_the_token_and_its_rank(name):
    output, record = step(driver_with(make(name), {"a": greedy(logprobs=0)}), {"a": 2})
    assert output.logprobs.token_ids.tolist() == [[int(record.logits[0].argmax())]]
    assert output.logprobs.ranks.tolist() == [1]


def test_the_token_taken_is_scored_not_the_one_drawn(name):
    """A forced token, and one of a trace, have the values that they would have if drawn."""
    runner = make(name)
    driver = driver_with(runner, {"a": greedy(logprobs=1), "t": greedy(logprobs=0, trace_decode_token_ids=(9, 8))})
    runner.execute_model(driver.plan({"a": 2, "t": 2}))
    output = runner.sample_tokens(forced=force(runner, {"a": [33], "t": [9]})).get_output()
    record = runner.last_step()
    assert output.tokens() == {"a": (33,), "t": (9,)}
    for i, req_id in enumerate(output.req_ids):
        token = {"a": 33, "t": 9}[req_id]
        assert output.logprobs.token_ids[i, 0] == token
        assert output.logprobs.logprobs[i, 0] == pytest.approx(log_softmax(record.logits[i])[token], abs=TOLERANCE)
        assert output.logprobs.ranks[i] == (record.logits[i] >= record.logits[i, token]).sum()


def test_a_replayed_trace_is_scored(name):
    driver = driver_with(make(name), {"t": greedy(logprobs=0, trace_decode_token_ids=(9, 8))})
    for counts, token in (({"t": 2}, 9), ({"t": 1}, 8)):
        output, record = step(driver, counts)
        assert output.logprobs.token_ids.tolist() == [[token]]
        assert output.logprobs.logprobs[0, 0] == pytest.approx(log_softmax(record.logits[0])[token], abs=TOLERANCE)


def given(runner, logits, req_ids, tokens=None, **params):
    """One step in which every request of two prompt tokens sees the given logits."""
    driver = driver_with(runner, {r: greedy(**params) for r in req_ids})
    runner.execute_model(driver.plan(dict.fromkeys(req_ids, 2)))
    order = runner.last_step().req_ids
    token_ids = np.array([[(tokens or {}).get(r, 0)] for r in order], np.int64)
    forced = ForcedStep(token_ids, np.ones(len(order), np.int32), None, np.stack([logits[r] for r in order]))
    return runner.sample_tokens(forced=forced).get_output()


def test_awkward_logits(name):
    """Ties, both zeros, tokens at -inf, NaN, +inf: as the clause says, and a neighbour never notices."""
    rows = {
        "ties": np.zeros(VOCAB, np.float32),
        "low": np.full(VOCAB, LOW, np.float32),
        "nan": np.zeros(VOCAB, np.float32),
        "high": np.zeros(VOCAB, np.float32),
    }
    rows["ties"][::2] = -0.0
    rows["low"][[3, 60]] = 1.0
    rows["nan"][[4, 5]] = NAN, LOW
    rows["high"][6] = np.inf
    output = given(make(name), rows, list(rows), {"low": 60, "nan": 4}, logprobs=-1)
    at = output.req_id_to_index
    lists = output.logprobs
    assert lists.token_ids[at["ties"], 1:].tolist() == list(range(VOCAB))
    np.testing.assert_allclose(lists.logprobs[at["ties"]], -np.log(VOCAB), atol=TOLERANCE)
    assert lists.ranks[at["ties"]] == VOCAB
    assert lists.token_ids[at["low"], :5].tolist() == [60, 3, 60, 0, 1]
    np.testing.assert_allclose(lists.logprobs[at["low"], :3], -np.log(2), atol=TOLERANCE)
    assert (lists.logprobs[at["low"], 3:] == LOW).all()
    assert lists.ranks[at["low"]] == 2
    assert np.isnan(lists.logprobs[at["nan"]]).all()
    assert lists.token_ids[at["nan"], -2:].tolist() == [5, 4]  # NaN comes last
    assert lists.ranks[at["nan"]] == 0
    assert np.isnan(lists.logprobs[at["high"]]).all()
    assert lists.token_ids[at["high"], 1] == 6
    assert lists.ranks[at["high"]] == VOCAB


def test_a_token_at_minus_infinity_has_the_rank_of_the_whole_vocabulary(name):
    """Also where the vocabulary is no multiple of any tile."""
    model = WitnessConfig(groups=(WitnessGroup(4),), vocab_size=37)
    logits = np.where(np.arange(37) < 5, 1.0, LOW).astype(np.float32)
    output = given(make(name, model), {"a": logits}, ["a"], {"a": 20}, logprobs=0)
    assert output.logprobs.ranks.tolist() == [37]
    assert output.logprobs.logprobs.tolist() == [[LOW]]


def test_raw_values_know_of_the_grammar_and_of_nothing_else(name):
    allowed = [3, 40, 41]
    bits = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    for token in allowed:
        bits[0, token // 32] |= np.uint32(1 << token % 32)
    runner = make(name)
    asks = {"free": greedy(logprobs=-1), "bound": SamplingParams(
        temperature=2.0, logprobs=-1, logit_bias={3: 50.0}, structured_outputs={"regex": "a"})}  # fmt: skip
    driver = driver_with(runner, asks)
    runner.execute_model(driver.plan({"free": 2, "bound": 2}))
    output = runner.sample_tokens(GrammarOutput(("bound",), bits.view(np.int32))).get_output()
    record = runner.last_step()
    assert output.tokens()["bound"] == (3,)
    for i, req_id in enumerate(output.req_ids):
        x = record.logits[i].astype(np.float64)
        assert np.isfinite(x).all()
        if req_id == "bound":
            x[~np.isin(np.arange(VOCAB), allowed)] = LOW
            assert output.logprobs.logprobs[i, 1:4].min() > LOW
            assert (output.logprobs.logprobs[i, 4:] == LOW).all()
        with np.errstate(invalid="ignore"):
            expected = log_softmax(x)[output.logprobs.token_ids[i]]
        np.testing.assert_allclose(output.logprobs.logprobs[i], expected, atol=TOLERANCE)


def test_a_request_without_a_winner_leaves_its_neighbours_values_alone(name):
    rng = np.random.default_rng(0)
    good = rng.normal(size=VOCAB).astype(np.float32)
    runner = make(name)
    driver = driver_with(runner, {"a": greedy(logprobs=2), "b": greedy(logprobs=2), "c": greedy(logprobs=2)})
    runner.execute_model(driver.plan({"a": 2, "b": 2, "c": 2}))
    order = runner.last_step().req_ids
    logits = np.stack([np.full(VOCAB, LOW, np.float32) if r == "b" else good for r in order])
    forced = ForcedStep(np.zeros((3, 1), np.int64), np.ones(3, np.int32), None, logits)
    output = runner.sample_tokens(forced=forced).get_output()
    expected = given(make(name), {"a": good}, ["a"], logprobs=2).logprobs
    for req_id in ("a", "c"):
        i = output.req_id_to_index[req_id]
        assert output.logprobs.logprobs[i].tobytes() == expected.logprobs[0].tobytes()
        assert output.logprobs.ranks[i] == expected.ranks[0]
    assert np.isnan(output.logprobs.logprobs[output.req_id_to_index["b"]]).all()
    assert set(output.errors) <= {"b"}
    assert all(fault is SampleFault.NO_TOKEN for fault in output.errors.values())


@pytest.mark.parametrize("params", [{"logprobs": 0}, {"logprob_token_ids": (1,)}])
def test_refused_in_a_step_with_drafts(name, params):
    runner = make(name, num_speculative_tokens=1)
    driver = driver_with(runner, {"a": greedy(**params), "b": greedy()})
    runner.execute_model(driver.plan({"a": 2, "b": 2}))
    tokens = runner.sample_tokens().get_output().tokens()
    before = runner.state_digest()
    plan = make_plan({"a": 1, "b": 2}, cached={"a": (2, None), "b": (2, None)}, drafts={"b": [1]})
    with pytest.raises(CapabilityError, match="drafts"):
        runner.execute_model(plan)
    assert runner.state_digest() == before
    assert tokens.keys() == {"a", "b"}


@pytest.mark.parametrize(
    "params", [{"logprobs": VOCAB + 1}, {"prompt_logprobs": VOCAB + 1}, {"logprob_token_ids": (VOCAB,)}]
)
def test_more_than_there_is(name, params):
    runner = make(name)
    with pytest.raises(PlanError, match=next(iter(params))):
        runner.execute_model(make_plan({"a": 1}, [new("a", [1], [1], sampling_params=greedy(**params))]))


# -- prompts ----------------------------------------------------------------------------------------------------------

PROMPT = [5, 9, 2, 44, 1, 60, 7, 7, 3, 21, 12, 8, 30]


def truth(name, prompt, num_top, first=0):
    """What a prompt's rows must say, from logits that a runner draws from: those behind prompt[: t + 1] score t + 1."""
    runner = make(name, max_num_reqs=len(prompt), max_num_batched_tokens=256)
    driver = Driver(runner)
    for t in range(first, len(prompt) - 1):
        driver.add(str(t), prompt[: t + 1])
    counts = {str(t): t + 1 for t in range(first, len(prompt) - 1)}
    _, record = step(driver, counts)
    x = np.stack([record.logits[record.row_of(r)] for r in counts])
    targets = np.array(prompt[first + 1 :])
    own = x[np.arange(len(targets)), targets]
    ids = np.concatenate([targets[:, None], np.argsort(-x, axis=1, kind="stable")[:, :num_top]], axis=1)
    return ids, np.take_along_axis(log_softmax(x), ids, axis=1), (x >= own[:, None]).sum(1)


def check(got, expected):
    ids, values, ranks = expected
    np.testing.assert_array_equal(got.token_ids, ids)
    np.testing.assert_allclose(got.logprobs, values, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(got.ranks, ranks)
    assert (got.token_ids.dtype, got.logprobs.dtype, got.ranks.dtype) == (np.int32, np.float32, np.int64)


@pytest.mark.parametrize("num_top", [0, 2, -1])
def test_row_t_scores_token_t_plus_1(name, num_top):
    driver = driver_with(make(name), {"a": greedy(prompt_logprobs=num_top)}, PROMPT)
    output, _ = step(driver, {"a": len(PROMPT)})
    (got,) = output.prompt_logprobs.values()
    check(got, truth(name, PROMPT, VOCAB if num_top == -1 else num_top))
    assert output.logprobs is None
    if num_top == -1:
        np.testing.assert_allclose(np.exp(got.logprobs[:, 1:].astype(np.float64)).sum(1), 1, atol=1e-5)


@pytest.mark.parametrize("cuts", [(12, 1), (1,) * 13, (5, 8), (11, 2)])
def test_any_chunking_gives_the_same_and_gives_it_once(name, cuts):
    """The last chunk of one token adds no row; nothing is handed out before, nor again while decoding."""
    whole, _ = step(driver_with(make(name), {"a": greedy(prompt_logprobs=3)}, PROMPT), {"a": 13})
    driver = driver_with(make(name), {"a": greedy(prompt_logprobs=3)}, PROMPT)
    outputs = [step(driver, {"a": n})[0] for n in (*cuts, 1, 1)]
    assert [list(o.prompt_logprobs) for o in outputs] == [[]] * (len(cuts) - 1) + [["a"], [], []]
    same(outputs[len(cuts) - 1].prompt_logprobs["a"], whole.prompt_logprobs["a"])


def test_neighbours_rows_and_runs_change_nothing(name, monkeypatch):
    """Prompts of several lengths and wishes together, in odd rows, a run of few rows at a time."""
    prompts = {"a": PROMPT, "b": PROMPT[3:], "c": [1, 2], "d": PROMPT[::-1]}
    wishes = {"a": 2, "b": None, "c": 0, "d": -1}
    alone = {
        r: step(driver_with(make(name), {r: greedy(prompt_logprobs=wishes[r])}, prompts[r]), {r: len(prompts[r])})[0]
        for r in prompts if wishes[r] is not None
    }  # fmt: skip
    module = __import__(f"{'cpu_reference' if name == 'cpu' else 'gpu_backend'}.sample.prompt_logprob", fromlist=["x"])
    for per_run in (1, 5 * VOCAB):
        monkeypatch.setattr(module, "LOGITS_PER_RUN", per_run)
        driver = Driver(make(name, initial_free_rows=(3, 0, 7, 1, 2, 4, 5, 6)))
        for r, prompt in prompts.items():
            driver.add(r, prompt, sampling_params=greedy(prompt_logprobs=wishes[r]))
        output, _ = step(driver, {r: len(p) for r, p in prompts.items()})
        assert set(output.prompt_logprobs) == set(alone)
        for r, expected in alone.items():
            same(output.prompt_logprobs[r], expected.prompt_logprobs[r])


def test_a_prompt_of_one_token_has_no_rows(name):
    output, _ = step(driver_with(make(name), {"a": greedy(prompt_logprobs=4)}, [9]), {"a": 1})
    got = output.prompt_logprobs["a"]
    assert got.token_ids.shape == got.logprobs.shape == (0, 5)
    assert got.ranks.shape == (0,)


def test_preempted_half_way_it_starts_over(name):
    whole, _ = step(driver_with(make(name), {"a": greedy(prompt_logprobs=1)}, PROMPT), {"a": 13})
    driver = driver_with(make(name), {"a": greedy(prompt_logprobs=1)}, PROMPT)
    step(driver, {"a": 6})
    driver.remove("a", preempt=True)
    driver.add("other", [1, 2, 3], sampling_params=greedy(prompt_logprobs=0))
    other, _ = step(driver, {"other": 3})
    assert list(other.prompt_logprobs) == ["other"]
    driver.readd("a", sampling_params=greedy(prompt_logprobs=1))
    step(driver, {"a": 4})
    output, _ = step(driver, {"a": 9})
    same(output.prompt_logprobs["a"], whole.prompt_logprobs["a"])


def test_resumed_with_outputs_it_gets_none_again(name):
    driver = driver_with(make(name), {"a": greedy(prompt_logprobs=1)}, PROMPT)
    first, _ = step(driver, {"a": 13})
    step(driver, {"a": 1})
    driver.remove("a", preempt=True)
    driver.readd("a", sampling_params=greedy(prompt_logprobs=1))
    again = [step(driver, {"a": n})[0] for n in (7, 8, 1)]
    assert list(first.prompt_logprobs) == ["a"]
    assert [o.prompt_logprobs for o in again] == [{}] * 3


def test_a_row_forgets_a_half_collected_prompt(name):
    """Finished half way; its row goes to others, one with a wish of its own and one without."""
    runner = make(name, max_num_reqs=1)
    expected, _ = step(driver_with(make(name), {"b": greedy(prompt_logprobs=2)}, PROMPT[:4]), {"b": 4})
    driver = driver_with(runner, {"a": greedy(prompt_logprobs=2)}, PROMPT)
    step(driver, {"a": 5})
    driver.remove("a")
    driver.add("b", PROMPT[:4], sampling_params=greedy(prompt_logprobs=2))
    output, _ = step(driver, {"b": 4})
    same(output.prompt_logprobs["b"], expected.prompt_logprobs["b"])
    driver.remove("b")
    driver.add("c", PROMPT[:4])
    output, _ = step(driver, {"c": 4})
    assert output.prompt_logprobs == {}


@pytest.mark.parametrize("hit", [4, 8, 12])
def test_behind_a_prefix_hit_rows_start_with_the_first_computed_token(name, hit):
    """The plan says that `hit` tokens are computed already: here by another request, whose blocks are shared."""
    runner = make(name)
    runner.execute_model(make_plan({"a": 13}, [new("a", PROMPT, [1, 2, 3, 4])]))
    runner.sample_tokens()
    shared = [*[1, 2, 3][: hit // 4], *[5, 6, 7, 8][: 4 - hit // 4]]
    added = new("b", PROMPT, shared, computed=hit, sampling_params=greedy(prompt_logprobs=2))
    runner.execute_model(make_plan({"b": 13 - hit}, [added]))
    got = runner.sample_tokens().get_output().prompt_logprobs["b"]
    if hit == 12:
        assert got.token_ids.shape == (0, 3)
    else:
        check(got, truth(name, PROMPT, 2, first=hit))


def test_a_finished_prompt_looks_the_same_however_it_was_computed(name):
    """The state behind it does not tell chunks, or a preemption, apart."""
    digests = []
    for cuts in ((13,), (6, 7)):
        driver = driver_with(make(name), {"a": greedy(prompt_logprobs=2, logprobs=1)}, PROMPT)
        for n in cuts:
            step(driver, {"a": n})
        digests.append(driver.runner.state_digest())
        driver.runner.poison_unused()
        output, _ = step(driver, {"a": 1})
        assert output.logprobs is not None
    assert digests[0] == digests[1]


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_modes_of_prompts(name, mode):
    """Nothing processes a prompt's logits: two of the four modes are one."""
    params = greedy(prompt_logprobs=-1, logit_bias={3: 50.0})
    output, _ = step(driver_with(make(name, logprobs_mode=mode), {"a": params}, PROMPT), {"a": 13})
    got = output.prompt_logprobs["a"]
    if mode.endswith("logprobs"):
        check(got, truth(name, PROMPT, VOCAB))
    else:
        np.testing.assert_allclose(log_softmax(got.logprobs[:, 1:]), truth(name, PROMPT, VOCAB)[1][:, 1:], atol=1e-4)
        assert got.logprobs.max() > 1


def test_drafts_of_others_and_forced_tokens_do_not_touch_a_prompt(name):
    runner = make(name, num_speculative_tokens=2)
    driver = driver_with(runner, {"b": greedy()}, [4, 5])
    runner.execute_model(driver.plan({"b": 2}))
    runner.sample_tokens(forced=force(runner, {"b": [6]}, {"b": [1, 2]}))
    added = new("a", PROMPT, [40, 41, 42, 43], sampling_params=greedy(prompt_logprobs=2))
    plan = make_plan({"a": 13, "b": 3}, [added], cached={"b": (2, [44])}, drafts={"b": [1, 2]})
    runner.execute_model(plan)
    output = runner.sample_tokens(forced=force(runner, {"a": [1], "b": [1, 9]})).get_output()
    check(output.prompt_logprobs["a"], truth(name, PROMPT, 2))


def test_outputs_that_are_asked_for_late_are_complete(name):
    """Several steps run before anybody looks; each output has its own values still."""
    late, prompt = make(name, max_concurrent_batches=3), {"a": greedy(prompt_logprobs=1, logprobs=2)}
    now = driver_with(make(name), prompt, PROMPT)
    expected = [step(now, {"a": n})[0] for n in (6, 7, 1)]
    driver = driver_with(late, prompt, PROMPT)
    waiting = []
    for n in (6, 7, 1):
        late.execute_model(driver.plan({"a": n}))
        waiting.append(late.sample_tokens())
        driver.computed["a"] += n
    for output, wanted in zip([w.get_output() for w in waiting], expected, strict=True):
        assert output.tokens() == wanted.tokens()
        same(output.logprobs, wanted.logprobs)
        assert output.prompt_logprobs.keys() == wanted.prompt_logprobs.keys()
        for req_id, lists in wanted.prompt_logprobs.items():
            same(output.prompt_logprobs[req_id], lists)
    assert waiting[1].get_output().prompt_logprobs["a"].token_ids.shape == (12, 2)
