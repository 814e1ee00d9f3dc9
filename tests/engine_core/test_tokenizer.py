"""Tokenizers: text survives the round trip, chat prompts keep their special tokens, text streams out whole."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from engine_core.tokenizer import IncrementalDecoder, Tokenizer
from runner_api import CheckpointError, EngineError
from runner_api.checkpoint import Checkpoint, ModelConfig, RopeConfig, load_checkpoint, smollm2_path

FAST = settings(max_examples=150, deadline=None, derandomize=True, database=None)
TEXTS = [
    "", " ", "Hello, world!", "  two  spaces \n\n and lines\t", "year 2024, 3.14159 and ٣٤ and Ⅷ",
    "naïve café Straße", "日本語のテキスト", "👩‍👩‍👧‍👦 🇫🇷 e\u0301", "def f(x):\n    return x ** 2  # don't\n",
    "\u202eright to left\u202c", "a" * 300, "\x00\x01\x7f", "\ufffd", "<|im_start|>user\nhi<|im_end|>\n",
]  # fmt: skip
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # the 256 characters that stand for bytes
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)


class NoTensors:
    shapes: dict = {}  # noqa: RUF012

    def read(self, name):
        raise AssertionError("a tokenizer reads no tensor")


def checkpoint(path, metadata=None, vocab_size=300, eos=(2,)):
    config = ModelConfig(
        architecture="llama", hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=8, vocab_size=vocab_size, rms_norm_eps=1e-5, rope=RopeConfig(), max_position_embeddings=64,
        eos_token_ids=eos,
    )  # fmt: skip
    return Checkpoint(config, path, NoTensors(), metadata)


def gguf_metadata(**changes):
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, "he", "hel", "12", "<tool>"]
    metadata = {
        "model": "gpt2", "pre": "smollm", "tokens": tokens,
        "token_type": [3, 3, 3, *[1] * (len(tokens) - 4), 4], "merges": ["h e", "he l", "1 2"],
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return {f"tokenizer.ggml.{k}": v for k, v in {**metadata, **changes}.items() if v is not None}


def write_folder(folder, *, config=None, jinja=None):
    """A folder with a byte-level tokenizer.json that puts `<s>` in front, and what lies beside it."""
    backend = Backend(models.BPE({t: i for i, t in enumerate(["<s>", "</s>", *BYTES])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    return checkpoint(folder)


# ---- GGUF metadata


@pytest.fixture(scope="module")
def small():
    return Tokenizer.from_checkpoint(checkpoint("m.gguf", gguf_metadata()))


def test_merges_digits_and_special_tokens(small):
    def pieces(text):
        return [small.decode([i], skip_special_tokens=False) for i in small.encode(text)]

    assert pieces("hello") == ["hel", "l", "o"]
    assert pieces("12") == ["1", "2"]  # digits stand alone, so the merge "1 2" never applies
    assert pieces("a<|im_end|>b<tool>") == ["a", "<|im_end|>", "b", "<tool>"]
    assert small.encode("<|im_start|>") == [1]  # nothing is put in front
    assert small.eos_token_ids == (2,)
    assert small.vocab_size == 3 + 256 + 4


def test_the_named_pre_tokenizer_is_followed():
    joined = Tokenizer.from_checkpoint(checkpoint("m.gguf", gguf_metadata(pre="gpt-2")))
    assert joined.decode(joined.encode("12")[:1]) == "12"


def test_special_tokens_are_skipped_on_request_and_added_ones_never(small):
    ids = small.encode("<|im_start|>hi<tool><|im_end|>")
    assert small.decode(ids) == "hi<tool>"
    assert small.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<tool><|im_end|>"


@FAST
@given(text=st.text())
def test_any_text_survives_the_round_trip(small, text):
    assert small.decode(small.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model"),
        ({"pre": "deepseek-llm"}, "tokenizer.ggml.pre"),
        ({"pre": None}, "tokenizer.ggml.pre"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"token_type": [1]}, "not one type each"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "tokens twice"),
        ({"merges": [3]}, "tokenizer.ggml.merges"),
        ({"merges": ["h"]}, "merges do not fit"),
        ({"merges": ["zz yy"]}, "merges do not fit"),
        ({"tokens": [str(i) for i in range(301)], "token_type": [1] * 301}, "more tokens than the model has"),
    ],
)
def test_a_vocabulary_that_cannot_be_rebuilt_is_refused(changes, says):
    with pytest.raises(CheckpointError, match=says):
        Tokenizer.from_checkpoint(checkpoint("m.gguf", gguf_metadata(**changes)))


# ---- Hugging Face folders


def test_folder_tokenizer_adds_its_own_tokens_unless_told_not_to(tmp_path):
    config = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "chat_template": "{{ bos_token }}" + TEMPLATE}
    tokenizer = Tokenizer.from_checkpoint(write_folder(tmp_path, config=config))
    assert tokenizer.encode("a")[0] == 0
    assert tokenizer.encode("a", add_special_tokens=False) == tokenizer.encode("a")[1:]
    assert tokenizer.eos_token_ids == (2, 1)  # the model's, then the tokenizer's own
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "<s><|user|>hi<|assistant|>"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == "<s><|user|>hi"
    ids = tokenizer.encode_chat(messages)
    assert ids.count(0) == 1  # the template wrote <s>; it is not added a second time
    assert tokenizer.decode(ids) == "<|user|>hi<|assistant|>"


def test_where_the_template_is_looked_for(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    say = [{"role": "user", "content": ""}]
    tokenizer = Tokenizer.from_checkpoint(write_folder(tmp_path, config={"chat_template": named}))
    assert tokenizer.apply_chat_template(say) == "named"
    tokenizer = Tokenizer.from_checkpoint(write_folder(tmp_path, config={"chat_template": named}, jinja="file"))
    assert tokenizer.apply_chat_template(say) == "file"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", None, "no tokenizer"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", "[", "not readable as JSON"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja"),
    ],
)
def test_broken_tokenizer_files_are_refused(tmp_path, file, content, says):
    model = write_folder(tmp_path)
    (tmp_path / file).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=says):
        Tokenizer.from_checkpoint(model)


# ---- templates


def templated(source):
    return Tokenizer(Backend(models.BPE()), chat_template=source)


def test_templates_find_what_they_are_written_for():
    source = """
    {%- for m in messages %}
        {%- if loop.index > 1 %}{% break %}{% endif %}
{{ m.content | tojson }}
    {%- endfor %} {{ strftime_now("%Y") | length }} {{ tools is none }} {{ enable_thinking }}"""
    text = templated(source).apply_chat_template([{"content": "é<"}, {"content": "b"}], enable_thinking=False)
    assert text == '"é<" 4 True False'


@pytest.mark.parametrize(
    ("source", "messages", "says"),
    [
        (None, [], "no chat template"),
        ("{% for %}", [], "refuses"),
        ("{{ raise_exception('roles must alternate') }}", [], "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", [{"role": "user", "content": "x"}], "refuses"),
        ("{{ messages.__class__.__mro__ }}", [], "unsafe"),
        ("{{ messages.append(1) }}", [], "refuses"),
    ],
)
def test_templates_refuse_with_a_reason(source, messages, says):
    with pytest.raises(EngineError, match=says):
        templated(source).apply_chat_template(messages)


def test_what_is_not_text_or_an_id_is_refused(small):
    for prompt in (3, None, "\ud800"):
        with pytest.raises(EngineError, match="prompt"):
            small.encode(prompt)
    for token in (-1, 2**32):
        with pytest.raises(EngineError, match="token_ids"):
            small.decode([token])
    assert small.decode([299]) == ""  # a padded vocabulary has ids without a text


# ---- streaming


@FAST
@given(ids=st.lists(st.integers(0, 262), max_size=40), skip=st.booleans())
def test_pieces_are_the_whole_text_whatever_the_ids(small, ids, skip):
    decoder = IncrementalDecoder(small, skip_special_tokens=skip)
    pieces = [decoder.push(i) for i in ids]
    assert not any(p.endswith("\ufffd") for p in pieces)
    assert "".join(pieces) + decoder.finish() == small.decode(ids, skip)


@FAST
@given(text=st.text(), cut=st.integers(1, 5))
def test_text_streams_out_in_whole_characters(small, text, cut):
    decoder = IncrementalDecoder(small, skip_special_tokens=False)
    ids, out = small.encode(text), ""
    for i in range(0, len(ids), cut):
        out += decoder.push(ids[i : i + cut])
        assert text.startswith(out)
    assert out + decoder.finish() == text


def test_a_character_waits_for_its_last_byte(small):
    decoder = IncrementalDecoder(small)
    ids = small.encode("é!")
    assert [decoder.push(i) for i in ids] == ["", "é", "!"]
    assert decoder.finish() == ""
    decoder.push(ids[0])
    assert decoder.finish() == "\ufffd"


# ---- SmolLM2


@pytest.fixture(scope="module")
def smollm2():
    try:
        opened = load_checkpoint(smollm2_path())
    except CheckpointError as e:
        pytest.skip(str(e))
    Tokenizer.from_checkpoint(opened)  # imports the library
    start = time.perf_counter()
    tokenizer = Tokenizer.from_checkpoint(opened)
    assert time.perf_counter() - start < 2.0  # 0.1 s on an idle core; parsing the file again would show here
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_round_trip(smollm2, text):
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_smollm2_ids(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert smollm2.encode("2024") == [*smollm2.encode("2"), *smollm2.encode("0"), *smollm2.encode("24")]


def test_smollm2_chat(smollm2):
    prompt = smollm2.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    assert ids == smollm2.encode(prompt)
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert smollm2.decode(ids, skip_special_tokens=False) == prompt


# ---- what sampling and grammars ask of it


def test_bad_words_are_written_at_a_start_and_behind_a_space():
    """The second way counts only where it is as many tokens, and other ones."""
    tokens = ["<s>", *BYTES, "ha", "\u0120h", "\u0120ha"]
    backend = Backend(models.BPE({t: i for i, t in enumerate(tokens)}, [("h", "a"), ("\u0120", "ha"), ("\u0120", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = Tokenizer(backend)
    ids = {t: i for i, t in enumerate(tokens)}
    assert tokenizer.encode_bad_words(["ha"]) == ((ids["ha"],), (ids["\u0120ha"],))
    assert tokenizer.encode_bad_words([" ha", "ha"]) == ((ids["ha"],), (ids["\u0120ha"],))
    assert tokenizer.encode_bad_words(["x"]) == ((ids["x"],),)  # behind a space it is two tokens
    assert tokenizer.encode_bad_words(["hax"]) == ((ids["ha"], ids["x"]), (ids["\u0120ha"], ids["x"]))
    assert tokenizer.encode_bad_words([]) == ()
    for word in ("", " ", 5):
        with pytest.raises(EngineError, match="bad_words"):
            tokenizer.encode_bad_words(["ha", word])


def test_facts_for_grammars(small):
    facts = small.facts(300, (2,))
    assert (facts.num_tokens, facts.vocab_size, facts.eos_token_ids) == (263, 300, (2,))
    assert facts.special_token_ids == (0, 1, 2)
    assert Backend.from_str(facts.serialized).get_vocab_size() == 263
