"""Libraries of grammars: their masks against a brute-force reading of the language; whole answers on a tiny model."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine_core.llm import LLM
from engine_core.scheduler import Scheduler
from engine_core.structured_output import GrammarError, TokenizerFacts, make_grammar_backend
from engine_core.tokenizer import Tokenizer
from runner_api import EngineError, SamplingParams, StructuredOutputsParams, UnknownNameError

pytest.importorskip("llguidance")
needs_xgrammar = pytest.mark.skipif(find_spec("xgrammar") is None, reason="xgrammar is not installed")
DATA = Path(__file__).parents[2] / "conformance" / "data" / "checkpoints"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
END = 1
VOCAB_SIZE = 300  # of the model: more than the tokenizer has, and no multiple of 32
WORDS = ["ab", "abc", "bc", "ca", "tr", "ue", "true", '{"', '"}', '":', "12", "é", "日"]


def tokenizer() -> Tokenizer:
    """Bytes, some longer tokens, and two special ones."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {t: i for i, t in enumerate(["<s>", "</s>", *BYTES])}
    merges = []
    for word in WORDS:
        text = level.pre_tokenize_str(word)[0][0]
        for i in range(2, len(text) + 1):
            if text[:i] not in vocabulary:
                vocabulary[text[:i]] = len(vocabulary)
                merges.append((text[: i - 1], text[i - 1]))
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer, backend.decoder = level, decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(backend, eos_token_ids=(END,))


def token_bytes(backend: Backend) -> dict[int, bytes]:
    """What each token that is text stands for: a byte-level vocabulary writes every byte as one character."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    character = {b: chr(b) for b in plain}
    for b in range(256):
        character.setdefault(b, chr(256 + sum(c not in plain for c in range(b))))
    byte = {c: b for b, c in character.items()}
    return {i: bytes(byte[c] for c in t) for t, i in backend.get_vocab().items() if t not in ("<s>", "</s>")}


@pytest.fixture(scope="module")
def small():
    return tokenizer()


def make(name, small, vocab_size=VOCAB_SIZE, eos=(END,)):
    return make_grammar_backend(name, small.facts(vocab_size, eos))


def allowed(matcher, vocab_size=VOCAB_SIZE) -> set[int]:
    words = np.full(-(-vocab_size // 32), 0x5A5A5A5A, np.int32)
    matcher.fill_bitmask(words)
    return {v for v in range(vocab_size) if words[v // 32] >> (v % 32) & 1}


def check_walks(matcher, language: list[bytes], pieces: dict[int, bytes], rng: np.random.Generator) -> None:
    """Walk to the end of the text at random; at every place the mask is what the language says.

    One liberty is llguidance's: where the next byte is certain, it may insist on the tokens a tokenizer would take.
    """
    text = b""
    steps = 0
    while True:
        going_on = {t for t, piece in pieces.items() if any(word.startswith(text + piece) for word in language)}
        wanted = going_on | ({END} if text in language else set())
        terminated = matcher.is_terminated()
        assert terminated <= (wanted == {END})
        if terminated:
            break
        mask = allowed(matcher)
        certain = len({word[len(text) :][:1] for word in language if word.startswith(text)}) == 1
        assert mask and mask <= wanted if certain else mask == wanted, text
        for token in rng.choice(VOCAB_SIZE, 20):  # a token outside the mask is refused and changes nothing
            if token not in wanted:
                assert not matcher.accept(int(token))
        token = int(rng.choice(sorted(mask)))
        assert matcher.accept(token)
        steps += 1
        if token == END:
            assert matcher.is_terminated()
            break
        text += pieces[token]
    assert text in language
    matcher.rollback(steps)
    assert not matcher.is_terminated()
    assert allowed(matcher) == {t for t, piece in pieces.items() if any(w.startswith(piece) for w in language)}


LANGUAGES = {
    "choice": (
        {"choice": ["a", "ab", "abc", "bca", "été", "日本", 'say "ab"\n', "\\d", "{}", "<s>", "👩‍👧", "\x7f\u2028"]},
        ["a", "ab", "abc", "bca", "été", "日本", 'say "ab"\n', "\\d", "{}", "<s>", "👩‍👧", "\x7f\u2028"],
    ),
    "regex": ({"regex": "(ab|c){1,3}d?"}, None),
    "grammar": (
        {"grammar": 'start: pair | "x"\npair: "a" pair "b" | "c"'},
        ["x", *("a" * n + "c" + "b" * n for n in range(40))],
    ),
    "json": ({"json": {"enum": [12, True, "ab"]}}, ["12", "true", '"ab"']),
}


def words_of(name: str) -> list[bytes]:
    parts = ["", *(a + b + c for a in ("ab", "c") for b in ("", "ab", "c") for c in ("", "ab", "c"))]
    listed = LANGUAGES[name][1] or [p + end for p in dict.fromkeys(parts[1:]) for end in ("", "d")]
    return [word.encode() for word in listed]


@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize("library", ["llguidance", pytest.param("xgrammar", marks=needs_xgrammar)])
def test_masks_are_what_the_language_says(small, library, name):
    backend = make(library, small)
    pieces = token_bytes(small._backend)
    rng = np.random.default_rng(0)
    for _ in range(15):
        check_walks(backend.compile(StructuredOutputsParams(**LANGUAGES[name][0])), words_of(name), pieces, rng)


@needs_xgrammar
@pytest.mark.parametrize("name", ["choice", "regex"])
def test_both_libraries_give_the_same_bits(small, name):
    rng = np.random.default_rng(1)
    one, two = (
        make(b, small).compile(StructuredOutputsParams(**LANGUAGES[name][0])) for b in ("llguidance", "xgrammar")
    )
    while not one.is_terminated():
        assert allowed(one) == allowed(two)
        token = int(rng.choice(sorted(allowed(one))))
        assert one.accept(token)
        assert two.accept(token)
    assert two.is_terminated()


def test_several_ends_and_none(small):
    form = StructuredOutputsParams(regex="ab?")
    a = small.encode("a")[0]
    several = make("llguidance", small, eos=(END, 0)).compile(form)
    assert several.accept(a)
    assert {0, END} < allowed(several)
    assert several.accept(0)
    assert several.is_terminated()
    none = make("llguidance", small, eos=()).compile(form)
    assert none.accept(a)
    assert allowed(none) == {small.encode("b")[0]}
    assert none.accept(small.encode("b")[0])
    assert none.is_terminated()
    # An end that the tokenizer does not know cannot be asked for; a grammar that needs it ends by itself.
    assert make("llguidance", small, eos=(299,)).compile(form).accept(a)
    empty = make("llguidance", small).compile(StructuredOutputsParams(regex="a{0}"))
    assert allowed(empty) == {END}
    assert empty.accept(END)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "("}, r"structured_outputs\.regex: cannot be compiled.*unclosed group"),
        ({"regex": "(?=a)b"}, r"structured_outputs\.regex: .*look"),
        ({"regex": r"[^\s\S]"}, r"structured_outputs\.regex: .*no text can follow"),
        ({"json": {"type": "nope"}}, r"structured_outputs\.json: .*Invalid type: nope"),
        ({"json": {"not": {}}}, r"structured_outputs\.json: .*not"),
        ({"json": {"$ref": "http://example.com/x"}}, r"structured_outputs\.json: cannot be compiled"),
        ({"json": "false"}, r"structured_outputs\.json: .*[Uu]nsatisfiable"),
        ({"grammar": "start: missing"}, r"structured_outputs\.grammar: .*missing"),
        ({"choice": ["\ud800"]}, r"structured_outputs\.choice: cannot be compiled"),
    ],
)
def test_forms_that_cannot_be_kept(small, form, says):
    with pytest.raises(EngineError, match=says) as caught:
        make("llguidance", small).compile(StructuredOutputsParams(**form))
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, GrammarError)


def test_a_grammar_may_fail_on_the_way(small):
    """Too complex at one place, or a place from which no text leads on: an error, where a mask could only be wrong."""
    import llguidance

    backend = make("llguidance", small)
    a = small.encode("a")[0]
    backend._limits = llguidance.LLParserLimits(verbose_errors=False, step_max_items=40)
    matcher = backend.compile(StructuredOutputsParams(grammar='start: s\ns: "a" s | s "a" s | "b"'))

    def walk():
        for _ in range(50):
            assert matcher.accept(a)
            allowed(matcher)

    with pytest.raises(GrammarError, match="gave the grammar up"):
        walk()
    for broken in (lambda: matcher.accept(a), lambda: allowed(matcher), lambda: matcher.rollback(1)):
        with pytest.raises(GrammarError):
            broken()
    dead = make("llguidance", small).compile(StructuredOutputsParams(grammar='start: "b" x\nx: /[^\\s\\S]/'))
    assert dead.accept(small.encode("b")[0])
    with pytest.raises(GrammarError, match="no text can follow"):
        allowed(dead)


def test_which_library(small, monkeypatch):
    assert make("auto", small).name == "llguidance"
    with pytest.raises(UnknownNameError, match="'llguidance'"):
        LLM(None, grammar_backend="llguidence")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("auto", "xgrammar"):
        with pytest.raises(EngineError, match=r"no library that knows grammars.*xgrammar.*pip install"):
            make(name, small)
    monkeypatch.undo()
    with pytest.raises(EngineError, match="cannot read this model's tokenizer"):
        make_grammar_backend("llguidance", TokenizerFacts("{}", 5, 5, (1,)))


# -- whole answers on a tiny model with random weights --------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    for file in (DATA / "llama-tiny").iterdir():
        shutil.copy(file, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": END}))
    tokenizer()._backend.save(str(path / "tokenizer.json"))
    return path


def forms():
    """18 requests: a form each, one in six without; what the answer must be, as a regular expression."""
    person = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
        "required": ["a", "b"], "additionalProperties": False, "x-guidance": {"whitespace_flexible": False},
    }  # fmt: skip
    kinds = [
        ({"regex": r"[a-c]{2,9}\d"}, r"[a-c]{2,9}\d"),
        ({"choice": ["yes", "no", "été"]}, "yes|no|été"),
        ({"json": person}, r'\{"a":\d{1,2},"b":(true|false)\}'),
        ({"grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
        ({"regex": "(true|日){1,4}"}, "(true|日){1,4}"),
        (None, None),
    ]
    for i in range(18):
        form, pattern = kinds[i % len(kinds)]
        params = SamplingParams(
            max_tokens=40, seed=i, temperature=0.8, structured_outputs=form,
            top_k=0 if i % 2 else 50, frequency_penalty=0.5 * (i % 3),
        )  # fmt: skip
        yield [2 + (7 * i + j) % 256 for j in range(1 + i % 9)], params, pattern


OPTIONS = {"max_model_len": 128, "max_num_reqs": 8, "max_num_batched_tokens": 24}


def run(folder, **options):
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        prompts, params, patterns = zip(*forms(), strict=True)
        return llm.generate(list(prompts), list(params)), patterns


@pytest.fixture(scope="module")
def wanted(folder):
    return run(folder, max_num_reqs=1, dtype="float64")


def test_answers_have_the_form(wanted):
    outputs, patterns = wanted
    for output, pattern in zip(outputs, patterns, strict=True):
        if pattern is None:
            assert output.finish_reason == "length" or output.token_ids[-1] == END
        elif output.finish_reason == "stop":
            assert re.fullmatch(pattern, output.text), (output.text, pattern)
            assert output.stop_reason is None
        else:  # only the grammar without an upper length may run on
            assert pattern == r"\(*x\)*"
            assert re.fullmatch(r"\(*x?\)*", output.text)
    assert sum(output.finish_reason == "stop" for output in outputs) >= 12


@pytest.mark.parametrize(
    "options",
    [{}, {"async_scheduling": True}, {"async_scheduling": True, "num_blocks": 6}, {"num_blocks": 5}],
    ids=["batch", "async", "async-preempted", "preempted"],
)
def test_answers_do_not_depend_on_the_batch(folder, wanted, options, monkeypatch):
    """In float64, where the draws of a batch and of single requests are the same."""
    preempted = []
    original = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda self, r: (preempted.append(r.matcher), original(self, r)))
    outputs, _ = run(folder, dtype="float64", **options)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted[0]]
    assert [o.finish_reason for o in outputs] == [o.finish_reason for o in wanted[0]]
    assert [o.text for o in outputs] == [o.text for o in wanted[0]]
    assert any(m is not None for m in preempted) == ("num_blocks" in options)


def test_n_answers_of_a_form_and_a_refusal_before_anything_runs(folder):
    with LLM(str(folder), **OPTIONS) as llm:
        form = {"regex": "[a-z]{8}"}
        answers = llm.generate("ab", SamplingParams(n=4, seed=3, max_tokens=20, structured_outputs=form))
        assert all(re.fullmatch("[a-z]{8}", o.text) and o.finish_reason == "stop" for o in answers)
        assert len({o.text for o in answers}) == 4
        with pytest.raises(EngineError, match=r"structured_outputs\.regex"):
            llm.generate(["ab", "c"], [SamplingParams(), SamplingParams(structured_outputs={"regex": "("})])
        assert not llm.engine.has_unfinished_requests


def test_constraints_that_exclude_each_other_are_an_error_of_that_answer(folder):
    with LLM(str(folder), **OPTIONS) as llm:
        x = llm.tokenizer.encode("x")[0]
        bad = SamplingParams(structured_outputs={"choice": ["yes"]}, allowed_token_ids=[x], max_tokens=5)
        good = SamplingParams(structured_outputs={"choice": ["yes"]}, max_tokens=5)
        failed, fine = llm.generate(["ab", "ab"], [bad, good])
    assert (failed.finish_reason, failed.text, failed.token_ids) == ("error", "", [])
    assert "exclude each other" in failed.error
    assert (fine.finish_reason, fine.text, fine.error) == ("stop", "yes", None)


def test_min_tokens_give_way_to_a_grammar_that_is_complete(folder):
    """Where nothing but the end may come, it comes, however many tokens were asked for."""
    with LLM(str(folder), **OPTIONS) as llm:
        params = [
            SamplingParams(structured_outputs={"choice": ["a", "ab"]}, min_tokens=k, max_tokens=9) for k in (2, 6)
        ]
        outputs = llm.generate(["ab", "ab"], params)
    assert [(out.text, out.finish_reason) for out in outputs] == [("ab", "stop")] * 2
