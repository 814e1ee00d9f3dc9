"""Each step of the sampler: cases worked by hand, then random batches with drafts against a slow second reading."""

import numpy as np
import pytest
from step_driver import new

from cpu_reference.request_state import RequestState
from cpu_reference.sample.allowed_token_ids import apply_allowed_token_ids
from cpu_reference.sample.bad_words import BadWords, apply_bad_words
from cpu_reference.sample.bitmask import allowed_by, pack_bits
from cpu_reference.sample.faults import first_faults
from cpu_reference.sample.grammar import apply_grammar_bitmask, grammar_mask_rows
from cpu_reference.sample.gumbel import gumbel_sample
from cpu_reference.sample.history import tokens_seen
from cpu_reference.sample.logit_bias import apply_logit_bias
from cpu_reference.sample.logits_rows import LogitsRows
from cpu_reference.sample.min_tokens import apply_min_tokens
from cpu_reference.sample.penalties import apply_penalties, count_prompt_and_output_tokens, count_sampled_tokens
from cpu_reference.sample.sampler import Sampler
from cpu_reference.sample.thinking_budget import apply_thinking_budget, last_occurrence
from cpu_reference.sample.trace_replay import apply_trace_replay
from runner_api import GrammarOutput, ReasoningConfig, RunnerConfig, SampleFault, SamplingParams
from runner_api.constants import FORCED_LOGIT, MAX_BAD_WORDS

INF, NAN = np.inf, np.nan
NOBODY = np.int64([-1])
ROW_0 = np.int64([0])


def i32(*values):
    return np.array(values, np.int32)


def f32(*values):
    return np.array(values, np.float32)


def i64(*values):
    return np.array(values, np.int64)


def same(got, expected):
    """Bit for bit, NaNs included."""
    got, expected = np.asarray(got), np.asarray(expected, got.dtype)
    return got.shape == expected.shape and got.tobytes() == expected.tobytes()


def table(width, *rows, dtype=np.int32):
    """Rows packed to the left of a table; what lies behind is garbage that nothing may read."""
    out = np.full((len(rows), width), -77, dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


# -- bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 1025])
def test_bits_there_and_back(vocab_size):
    chosen = np.random.default_rng(vocab_size).random(vocab_size) < 0.5
    words = pack_bits(np.flatnonzero(chosen).tolist(), vocab_size)
    assert words.dtype == np.int32
    assert words.shape == (-(-vocab_size // 32),)
    assert np.array_equal(allowed_by(words, vocab_size), chosen)


def test_the_lowest_bit_comes_first_and_the_highest_is_a_sign():
    assert pack_bits([0], 32).tolist() == [1]
    assert pack_bits([31], 32).tolist() == [-(2**31)]
    assert pack_bits([5, 5, 5], 32).tolist() == [32]
    assert allowed_by(i32(-1, -1), 40).all()  # bits past the vocabulary mean nothing


# -- allowed tokens, grammar --------------------------------------------------------------------------------------


def test_allowed_token_ids():
    x = f32([1, NAN, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4])
    masks = np.stack([pack_bits([1, 2, 2], 4), i32(-77)])
    apply_allowed_token_ids(i64(0, 1, -1), i32(1, 0), masks, 3, x)
    assert same(x, [[-INF, NAN, 3, -INF], [1, 2, 3, 4], [1, 2, 3, 4]])


def test_grammar_masks_belong_to_requests_by_id():
    """K = 2: each owns three masks, in the grammar's order; unused ones are garbage and stay unused."""
    grammar = GrammarOutput(["c", "a"], np.zeros((6, 1), np.int32))
    cu_num_logits = i32(0, 3, 4, 6)  # a: two drafts, b: none, c: one
    rows = grammar_mask_rows(["a", "b", "c"], cu_num_logits, grammar, 2)
    assert rows.dtype == np.int32
    assert rows.tolist() == [3, 4, 5, -1, 0, 1]
    nobody = GrammarOutput([], np.zeros((0, 1), np.int32))
    assert grammar_mask_rows(["a", "b", "c"], i32(0, 1, 2, 3), nobody, 0).tolist() == [-1, -1, -1]


def test_grammar_bitmask():
    x = np.tile(f32(1, 2, 3), (3, 1))
    apply_grammar_bitmask(i32(1, -1, 0), i32([0b101], [0b010]), 3, x)
    assert same(x, [[-INF, 2, -INF], [1, 2, 3], [1, -INF, 3]])


def test_masks_see_the_last_word_of_a_vocabulary():
    x = np.zeros((1, 1025), np.float32)
    words = np.full((1, 33), -1, np.int32)
    words[0, 32] = -2  # bit 0 of the last word is token 1024; the rest lies past the vocabulary
    apply_grammar_bitmask(i32(0), words, 1, x)
    assert np.flatnonzero(x[0] == -INF).tolist() == [1024]


# -- bias ---------------------------------------------------------------------------------------------------------


def test_logit_bias():
    """-inf is not brought back, a NaN stays, and what lies behind the count is not read."""
    x = np.tile(f32(1, -INF, NAN, INF, 0.1), (3, 1))
    ids, values = table(8, [4, 1, 2, 3], [0]), table(8, [0.2, 5, 5, -9], [7], dtype=np.float32)
    apply_logit_bias(i64(0, 1, -1), i32(4, 0), ids, values, 3, x)
    assert same(x[0], f32(1, -INF, NAN, INF, np.float32(0.1) + np.float32(0.2)))
    assert same(x[1:], np.tile(f32(1, -INF, NAN, INF, 0.1), (2, 1)))


# -- minimum length -----------------------------------------------------------------------------------------------


def min_tokens(logits, position, min_len, stops, restores=0, row=0):
    x = f32(logits)
    apply_min_tokens(i64(row), i64(position), i32(min_len), i32(len(stops)), table(128, stops), i32(restores), 1, x)
    return x[0]


@pytest.mark.parametrize(("position", "masked"), [(3, True), (6, True), (7, False), (9, False)])
def test_the_stop_token_comes_back_with_the_minimum_reached(position, masked):
    """min_tokens = 3 behind a prompt of 5: rows whose input stands at 4, 5 and 6 have 0, 1 and 2 outputs."""
    assert same(min_tokens([1, 2, 3], position, 8, [1, 2]), [1, -INF, -INF] if masked else [1, 2, 3])


def test_only_stop_tokens_are_left():
    """A grammar allows the stop token alone: it comes back where the request asks for that, and only there."""
    alone = [-INF, 2, -INF]
    assert same(min_tokens(alone, 0, 9, [1], restores=1), alone)
    assert same(min_tokens(alone, 0, 9, [1], restores=0), [-INF] * 3)
    # what was not finite before does not come back
    assert same(min_tokens([-INF, 2, -INF], 0, 9, [0, 1], restores=1), [-INF, 2, -INF])
    assert same(min_tokens([NAN, 2, -INF], 0, 9, [0, 1], restores=1), [-INF, 2, -INF])
    # something else is left
    assert same(min_tokens([0, 2, -INF], 0, 9, [1], restores=1), [0, -INF, -INF])
    assert same(min_tokens([NAN, 2, -INF], 0, 9, [1], restores=1), [NAN, -INF, -INF])


def test_no_minimum_and_no_row():
    assert same(min_tokens([1, 2], 0, 9, []), [1, 2])
    assert same(min_tokens([1, 2], 0, 9, [0], row=-1), [1, 2])


# -- penalties ----------------------------------------------------------------------------------------------------


def penalise(logits, repetition=1.0, frequency=0.0, presence=0.0, prompt=(), outputs=(), drafts=(), dtype=np.float32):
    """The row behind all of the drafts."""
    vocab_size = len(logits)
    x = np.tile(np.array(logits, dtype), (len(drafts) + 1, 1))
    counts = np.bincount(np.array(outputs, int), minlength=vocab_size)[None].astype(np.int32)
    apply_penalties(
        np.zeros(len(x), np.int64), np.arange(len(x), dtype=np.int32), i32(0, *drafts), f32(repetition), f32(frequency),
        f32(presence), pack_bits(prompt, vocab_size)[None], counts, len(x), x,
    )  # fmt: skip
    return x[-1]


def test_repetition():
    """Prompt, outputs and earlier drafts count; positive logits shrink, others grow; zero and -inf stay."""
    got = penalise([3, -3, 0, -INF, 3, 3, 3], 2.0, prompt=[0, 1, 2, 3], outputs=[4], drafts=[5])
    assert same(got, [1.5, -6, 0, -INF, 1.5, 1.5, 3])
    # the reciprocal is taken once and rounded: 3 * (1/3) and not 3 / 3
    assert penalise([5.0], 3.0, prompt=[0])[0] == np.float32(5) * (np.float32(1) / np.float32(3))
    assert penalise([5.0], 3.0, prompt=[0])[0] != np.float32(5) / np.float32(3)


def test_frequency_and_presence_do_not_see_the_prompt():
    got = penalise([1, 1, 1, -INF], frequency=0.5, presence=0.25, prompt=[0, 3], outputs=[1, 1, 2, 3], drafts=[2])
    assert same(got, [1, 1 - 2 * 0.5 - 0.25, 1 - 2 * 0.5 - 0.25, -INF])
    assert same(penalise([1, 1], frequency=-1.0, presence=-2.0, outputs=[1]), [1, 4])


def test_the_factor_comes_first():
    assert penalise([4.0], 2.0, 1.0, 0.5, outputs=[0])[0] == 4 / 2 - 1 - 0.5


def test_a_draft_that_is_not_known_counts_for_nothing():
    assert same(penalise([1, 1], 2.0, 1.0, 1.0, drafts=[-1, 1]), [1, -1.5])


def test_drafts_count_before_their_own_row_only():
    """Row j has seen drafts 0 .. j-1. The input of row 0 is the last output, which the counts hold already."""
    x = np.zeros((3, 3), np.float32)
    apply_penalties(
        i64(0, 0, 0), i32(0, 1, 2), i32(2, 0, 1), f32(1), f32(1), f32(0), i32([0]), i32([0, 0, 1]), 3, x,
    )  # fmt: skip
    assert same(x, [[0, 0, -1], [-1, 0, -1], [-1, -1, -1]])


def test_neutral_penalties_change_no_bit():
    rng = np.random.default_rng(3)
    x = rng.normal(0, 9, (2, 50)).astype(np.float32)
    x[0, :5] = [-0.0, 0.0, NAN, INF, -INF]
    before = x.copy()
    apply_penalties(
        i64(0, -1), i32(0, 0), i32(1, 1), f32(1), f32(0), f32(0), np.full((1, 2), -1, np.int32),
        np.full((1, 50), 9, np.int32), 2, x,
    )  # fmt: skip
    assert same(x, before)


def test_what_was_said_is_rebuilt_over_a_former_owners():
    tokens = table(16, [], [5, 6, 6, 7, 7, 7, 31], [1])
    bitmask, counts = np.full((3, 2), -77, np.int32), np.full((3, 40), -77, np.int32)
    count_prompt_and_output_tokens(i64(1, 2, 99), i32(0, 3, 1), i32(0, 7, 1), tokens, 2, bitmask, counts)
    assert same(bitmask[1], pack_bits([5, 6], 40))
    assert counts[1, [6, 7, 31]].tolist() == [0, 3, 1]  # 7 and 31 are outputs from before a preemption
    assert counts[1].sum() == 4
    assert same(bitmask[2], pack_bits([1], 40))
    assert not counts[2].any()
    assert (bitmask[0] == -77).all()
    assert (counts[0] == -77).all()


def test_counting_what_was_drawn():
    """Only penalised rows; only what was taken; a token drawn twice counts twice."""
    counts = np.zeros((4, 9), np.int32)
    sampled = i64([3, 3, 8], [4, 7, 7], [5, 7, 7], [6, 7, 7], [8, 8, 8])
    count_sampled_tokens(i64(2, 0, -1, 3, 1), sampled, i32(2, 1, 1, 0, 3), i32(1, 0, 1, 1), 4, counts)
    expected = np.zeros((4, 9), np.int32)
    expected[2, 3], expected[0, 4] = 2, 1
    assert np.array_equal(counts, expected)


# -- bad words ----------------------------------------------------------------------------------------------------


def banned(words, prompt, outputs, drafts=(), row=0):
    """Ids that the row behind all of the drafts may not take."""
    known = [*prompt, *outputs]
    flat = [t for w in words for t in w]
    n = len(drafts) + 1
    x = np.zeros((n, 40), np.float32)
    apply_bad_words(
        np.full(n, row, np.int64), len(known) - 1 + np.arange(n), i32(known[-1], *drafts), i32(len(prompt)),
        i32(len(known)), table(64, known), i32(len(words)), table(MAX_BAD_WORDS, np.cumsum([len(w) for w in words])),
        table(64, flat), n, x,
    )  # fmt: skip
    return np.flatnonzero(x[-1] == -INF).tolist()


@pytest.mark.parametrize(
    ("words", "prompt", "outputs", "drafts", "expected"),
    [
        ([[7]], [1], [], [], [7]),  # one token: always
        ([[2, 7]], [1], [2], [], [7]),
        ([[2, 7]], [1, 2], [], [], []),  # the prompt is never part of it
        ([[1, 2, 7]], [1], [2], [], []),  # … nor partly
        ([[2, 7]], [1], [2, 3], [], []),  # no longer the latest
        ([[2, 3, 7], [3, 8]], [1], [2, 3], [], [7, 8]),
        ([[2, 3, 7]], [1], [2], [3], [7]),  # across the border of known tokens and drafts
        ([[3, 4, 7]], [1], [2], [3, 4], [7]),
        ([[-1 + 1, 7]], [1], [2], [0], [7]),
        ([[0, 7]], [1], [2], [-1], []),  # a draft that is not known matches nothing
        ([[2, 2, 7]], [9], [2, 2, 2], [], [7]),
        ([[5, 6, 7]], [1], [6], [], []),  # longer than the output
    ],
)
def test_bad_words(words, prompt, outputs, drafts, expected):
    assert banned(words, prompt, outputs, drafts) == expected


def test_bad_words_of_nobody():
    assert banned([[7]], [1], [], row=-1) == []


def test_bad_words_are_packed_one_behind_the_other():
    step = BadWords(2, RequestState(2, 8, 0))
    words = ((1, 2, 3), (4,), (5, 6))
    step.add_request(1, SamplingParams(bad_words_token_ids=words), new("a", [1], [1]))
    assert step.num_bad_words.tolist() == [0, 3]
    assert step.bad_word_ends[1, :3].tolist() == [3, 4, 6]
    assert step.bad_word_tokens[1, :6].tolist() == [1, 2, 3, 4, 5, 6]
    assert step.row_widths(1) == {"bad_word_ends": 3, "bad_word_tokens": 6}
    step.add_request(1, SamplingParams(), new("a", [1], [1]))
    assert not step.used_by(i64(0, 1))
    assert step.row_widths(1) == {"bad_word_ends": 0, "bad_word_tokens": 0}


# -- thinking budget ----------------------------------------------------------------------------------------------

START, END, NATURAL = (20, 21), (5, 6, 3), (6, 3)


def forced(budget, known, drafts=(), start=START, end=END, natural=NATURAL, row=0):
    """The token that the row behind all drafts is made to take; None if it is free."""
    n = len(drafts) + 1
    x = np.full((n, 40), -INF, np.float32)  # also what a mask has dropped
    apply_thinking_budget(
        np.full(n, row, np.int64), len(known) - 1 + np.arange(n), i32(known[-1], *drafts), i32(len(known)),
        table(64, known), i32(budget), i32(*start), i32(*end), i32(*natural), n, x,
    )  # fmt: skip
    hit = np.flatnonzero(x[-1] != -INF)
    assert len(hit) < 2
    assert (x[-1, hit] == FORCED_LOGIT).all()
    return int(hit[0]) if len(hit) else None


@pytest.mark.parametrize(
    ("budget", "known", "drafts", "expected"),
    [
        (0, [20, 21], [], 5),  # no thought at all: the end comes at once
        (0, [20], [], None),  # the marker is not whole
        (0, [20, 21, 9], [], 5),
        (2, [1, 20, 21, 9], [], None),  # one token thought
        (2, [1, 20, 21, 9, 9], [], 5),
        (2, [1, 20, 21, 9, 9, 9], [], 5),
        (0, [20, 21, 9, 5], [], 6),  # the end goes on …
        (0, [20, 21, 9, 5, 6], [], 3),
        (0, [20, 21, 9, 5, 6, 3], [], None),  # … and is over
        (0, [20, 21, 6, 3], [], None),  # ended by itself
        (0, [20, 21, 6, 3, 20, 21], [], 5),  # and begun again
        (0, [20, 21, 6], [], 5),  # half a natural end is none, and not the start of the forced one
        (0, [9, 9], [], None),  # never begun
        (-1, [20, 21, 9, 9], [], None),  # no budget
        (0, [7, 20], [21], 5),  # markers across the border of known tokens and drafts
        (1, [7, 20], [21, 9], 5),
        (2, [7, 20], [21, 9], None),
        (0, [20, 21, 5], [6], 3),
        (0, [20, 21, 6], [3], None),
    ],
)
def test_thinking_budget(budget, known, drafts, expected):
    assert forced(budget, known, drafts) == expected


def test_thinking_of_nobody_and_with_one_token_markers():
    assert forced(0, [20, 21], row=-1) is None
    assert forced(1, [1, 2], start=(1,), end=(3,), natural=(3,)) == 3
    assert forced(1, [1, 2, 3], start=(1,), end=(3,), natural=(3,)) is None
    # "5 5 6": two tokens of the end stand there, though its first also stands one further back
    assert forced(0, [20, 21, 5, 5], end=(5, 5, 6), natural=(6,)) == 6
    assert forced(0, [20, 21, 5, 5, 5], end=(5, 5, 6), natural=(6,)) == 6


@pytest.mark.parametrize(
    ("tokens", "marker", "at"),
    [
        ([], [1], -1),
        ([1], [1], 0),
        ([1, 1], [1, 1], 0),
        ([1, 1, 1], [1, 1], 1),
        ([2, 1, 3], [1, 2], -1),
        ([1], [1, 2], -1),
    ],
)
def test_last_occurrence(tokens, marker, at):
    assert last_occurrence(i32(*tokens), i32(*marker)) == at


# -- trace, faults, history ---------------------------------------------------------------------------------------


def test_trace_replay():
    """Row 0 replays three tokens behind a prompt of four; index -1 is a prompt's middle, 3 lies past the list."""
    trace, drawn = table(8, [11, 12, 13], [14]), i64([1, 9], [1, 9], [1, 9], [1, 9], [1, 9], [1, 9])
    apply_trace_replay(i64(0, 0, 0, 0, -1, 1), i32(3, 4, 6, 7, 4, 2), i32(4, 2), i32(3, 0), trace, 6, drawn)
    assert drawn.tolist() == [[1, 9], [11, 9], [13, 9], [1, 9], [1, 9], [1, 9]]


def draw_faults(*rows, temperature=1.0):
    n = len(rows)
    sampled, faults = np.full(n, -9), np.full(n, -9, np.int32)
    with np.errstate(all="raise"):
        gumbel_sample(
            np.zeros(n, np.int64), np.arange(n), f32(temperature), i64(3), "murmur3", n, f32(*rows), sampled, faults
        )
    return list(zip(sampled.tolist(), faults.tolist(), strict=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_winner(temperature):
    rows = ([1, NAN, 2], [INF, NAN, 2], [-INF] * 3, [-INF, 5, -INF], [0, INF, INF], [-INF, -INF, NAN])
    assert draw_faults(*rows, temperature=temperature) == [
        (0, SampleFault.NAN), (0, SampleFault.NAN), (0, SampleFault.NO_TOKEN), (1, SampleFault.NONE),
        (1, SampleFault.NONE), (0, SampleFault.NAN),
    ]  # fmt: skip


def test_first_fault_that_counts():
    """Of rows past what was taken, and of requests that sample nothing, none counts."""
    faults = np.full(5, -9, np.int32)
    first_faults(i32(0, 3, 4, 6, 7), i32(2, 0, 2, 1), i32(0, 2, 1, 1, 2, 1, 0), 4, faults)
    assert faults.tolist() == [2, 0, 2, 0, -9]


def test_history_of_a_row():
    """Known tokens are the row's, even if more of them are known than the row has seen; the rest are drafts."""
    known = table(9, [5, 6, 7, 8])
    seen = lambda i, *positions: tokens_seen(i, 0, i64(*positions), i32(8, 30, 31), i32(4), known).tolist()  # noqa: E731
    assert seen(0, 3) == [5, 6, 7, 8]
    assert seen(0, 1) == [5, 6]  # a chunk that ends inside the prompt
    assert seen(2, 3, 4, 5) == [5, 6, 7, 8, 30, 31]
    assert seen(1, 3, 4, 5) == [5, 6, 7, 8, 30]


# -- all of them --------------------------------------------------------------------------------------------------

VOCAB, MAX_LEN, ROWS = 45, 40, 6
REASONING = ReasoningConfig((1, 2), (3, 4), (4,))


def some(rng, n):
    return rng.integers(0, VOCAB, n).tolist()


def random_params(rng):
    """Any mixture of parameters; each is neutral half of the time."""

    def maybe(value, neutral=None):
        return value if rng.random() < 0.5 else neutral

    return SamplingParams(
        temperature=float(rng.choice([0.0, 1.0, 0.5, 1.7])),
        top_k=maybe(int(rng.integers(1, VOCAB)), 0),
        top_p=maybe(float(rng.uniform(0.05, 1)), 1.0),
        min_p=maybe(float(rng.uniform(0, 0.5)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        max_tokens=None,
        min_tokens=maybe(int(rng.integers(1, 12)), 0),
        stop_token_ids=some(rng, 3),
        allowed_token_ids=maybe(some(rng, 30)),
        logit_bias=maybe({t: float(rng.normal(0, 3)) for t in some(rng, 5)}),
        bad_words_token_ids=maybe([some(rng, n) for n in (1, 2, 2, 3)]),
        thinking_token_budget=maybe(int(rng.integers(0, 5))),
    )


def sequence_of(rng):
    """Few different tokens, so that words and markers turn up."""
    prompt = rng.integers(0, 6, rng.integers(1, 8)).tolist()
    return prompt, rng.integers(0, 6, rng.integers(0, 10)).tolist()


class Batch:
    """Requests in rows of their own, some with drafts, and the logits rows of one step."""

    def __init__(self, requests, rows, logits, poison=None):
        """requests: (params, prompt, outputs, drafts, seed) each."""
        config = RunnerConfig(max_num_reqs=ROWS, max_model_len=MAX_LEN, reasoning=REASONING)
        self.states = RequestState(ROWS, MAX_LEN, 3, free_rows=list(reversed(rows)))
        self.sampler = Sampler(config, VOCAB, self.states)
        self.requests, self.logits = requests, logits
        if poison:
            poison(self.sampler, self.states)
        owner, local, positions, inputs = [], [], [], []
        for i, (params, prompt, outputs, drafts, seed) in enumerate(requests):
            known = [*prompt, *outputs]
            row = self.states.add_request(str(i), len(prompt), known, len(known) - 1)
            assert row == rows[i]
            added = new(str(i), known, [1], prompt=prompt, sampling_params=params, seed=seed, eos_token_ids=[7])
            self.sampler.add_request(row, added)
            for j in range(len(drafts) + 1):
                owner.append(row)
                local.append(j)
                positions.append(len(known) - 1 + j)
                inputs.append(drafts[j - 1] if j else known[-1])
        self.states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        self.rows = LogitsRows(len(owner), i64(*owner), i32(*local), i64(*positions), i32(*inputs), i64(*rows))

    def run(self):
        return self.sampler.sample(self.logits, self.rows, keep_scores=True)


def random_requests(rng, n):
    def drafts():
        return rng.integers(0, 6, rng.integers(0, 3)).tolist()

    return [(random_params(rng), *sequence_of(rng), drafts(), int(rng.integers(0, 99))) for _ in range(n)]


def num_rows(requests):
    return sum(len(drafts) + 1 for *_, drafts, _ in requests)


def slow(x, params, prompt, outputs):
    """The steps of one row, read again: plain Python, each token on its own. `outputs`: drafts before it included."""
    x, one = [np.float32(v) for v in x], np.float32(1)
    seen = [*prompt, *outputs]
    if params.allowed_token_ids is not None:
        x = [v if t in params.allowed_token_ids else np.float32(-INF) for t, v in enumerate(x)]
    for t, bias in (params.logit_bias or {}).items():
        x[t] = x[t] + np.float32(bias)
    if params.min_tokens > len(outputs):
        for t in {*params.stop_token_ids, 7}:
            x[t] = np.float32(-INF)
    factor = np.float32(params.repetition_penalty)
    for t in range(VOCAB):
        if factor != 1 and t in seen:
            x[t] = x[t] * (one / factor) if x[t] > 0 else x[t] * factor
        x[t] = x[t] - np.float32(params.frequency_penalty) * np.float32(outputs.count(t))
        x[t] = x[t] - np.float32(params.presence_penalty) * np.float32(t in outputs)
    for *beginning, last in params.bad_words_token_ids or ():
        if outputs[len(outputs) - len(beginning) :] == beginning:
            x[last] = np.float32(-INF)
    if params.thinking_token_budget is not None:
        thought = None  # tokens since the latest start that no end followed
        for t in range(len(seen)):
            if seen[t] == 4:
                thought = None
            if seen[t - 1 : t + 1] == [1, 2]:
                thought = 0
            elif thought is not None:
                thought += 1
        if thought is not None and thought >= params.thinking_token_budget:
            x[4 if seen[-1] == 3 else 3] = np.float32(FORCED_LOGIT)
    if params.temperature not in (0, 1):
        x = [v / np.float32(params.temperature) for v in x]
    return x


@pytest.mark.parametrize("seed", range(30))
def test_all_steps_against_a_slow_second_reading(seed):
    """Up to and with the temperature bit for bit; min-p, top-k and top-p are compared in their own tests."""
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, 4)
    logits = rng.normal(0, 3, (num_rows(requests), VOCAB)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -INF
    batch = Batch(requests, rng.permutation(ROWS)[:4].tolist(), logits)
    got = batch.run().processed
    i = 0
    for params, prompt, outputs, drafts, _ in requests:
        for j in range(len(drafts) + 1):
            expected = np.array(slow(logits[i], params, prompt, [*outputs, *drafts[:j]]), np.float32)
            kept = got[i] > -INF
            assert np.array_equal(got[i][kept], expected[kept])
            if params.top_k == 0 and params.top_p == 1 and params.min_p == 0:
                assert np.array_equal(got[i], expected)
            i += 1


def garbage(rng):
    """What former owners leave: other requests' parameters, then values that no request has."""

    def poison(sampler, states):
        for row in range(ROWS):
            prompt, outputs = sequence_of(rng)
            known = [*prompt, *outputs]
            states.prompt_len[row], states.total_len[row] = len(prompt), len(known)
            states.all_token_ids[row, : len(known)] = known
            params = random_params(rng)
            sampler.add_request(row, new("x", known, [1], prompt=prompt, sampling_params=params, eos_token_ids=[8]))
        sampler.apply_staged_writes()
        if rng.random() < 0.5:
            for values in sampler.row_tables().values():
                values[...] = -77 if values.dtype.kind == "i" else NAN

    return poison


@pytest.mark.parametrize("seed", range(20))
def test_a_row_forgets_its_former_owner(seed):
    """Rows that had other owners give the same bits as fresh ones, whatever these owners asked for."""
    rng = np.random.default_rng(100 + seed)
    requests = random_requests(rng, 4)
    logits = rng.normal(0, 3, (num_rows(requests), VOCAB)).astype(np.float32)
    rows = rng.permutation(ROWS)[:4].tolist()
    fresh, reused = Batch(requests, rows, logits).run(), Batch(requests, rows, logits, garbage(rng)).run()
    for name in ("sampled", "faults", "processed", "scores"):
        assert same(getattr(reused, name), getattr(fresh, name)), name


@pytest.mark.parametrize("seed", range(20))
def test_a_request_does_not_see_its_neighbours(seed):
    """Alone in another row, or among others: the same bits. Steps that only neighbours need change nothing."""
    rng = np.random.default_rng(200 + seed)
    requests = random_requests(rng, 4)
    logits = rng.normal(0, 3, (num_rows(requests), VOCAB)).astype(np.float32)
    together = Batch(requests, rng.permutation(ROWS)[:4].tolist(), logits).run()
    end = 0
    for request in requests:
        start, end = end, end + len(request[3]) + 1
        alone = Batch([request], [int(rng.integers(ROWS))], logits[start:end]).run()
        for name in ("sampled", "faults", "processed", "scores"):
            assert same(getattr(alone, name), getattr(together, name)[start:end]), name


@pytest.mark.parametrize("seed", range(10))
def test_a_draft_that_was_taken_is_a_token_like_others(seed):
    """Row j of d drafts is processed as the only row of a step in which drafts 0 .. j-1 are known outputs."""
    rng = np.random.default_rng(300 + seed)
    params, (prompt, outputs) = random_params(rng), sequence_of(rng)
    drafts = rng.integers(0, 6, 3).tolist()
    logits = rng.normal(0, 3, (4, VOCAB)).astype(np.float32)
    drafted = Batch([(params, prompt, outputs, drafts, 5)], [2], logits).run()
    for j in range(4):
        plain = Batch([(params, prompt, [*outputs, *drafts[:j]], [], 5)], [3], logits[j : j + 1]).run()
        assert same(plain.processed[0], drafted.processed[j])
        assert plain.sampled[0] == drafted.sampled[j]


def test_neutral_parameters_change_no_bit():
    """Alone, and beside a request that needs every step."""
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (2, VOCAB)).astype(np.float32)
    logits[0, :3] = [-0.0, INF, -INF]
    neutral = SamplingParams(
        temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0,
        repetition_penalty=1.0, min_tokens=0, logit_bias={}, bad_words_token_ids=(), thinking_token_budget=-1,
    )  # fmt: skip
    busy = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, presence_penalty=1.0, min_tokens=3, stop_token_ids=[1],
        repetition_penalty=2.0, logit_bias={1: 2.0}, bad_words_token_ids=[[1]], thinking_token_budget=0,
        allowed_token_ids=[1, 2, 3],
    )  # fmt: skip
    quiet = (neutral, [1, 2], [3], [], 4)
    assert same(Batch([quiet], [0], logits[:1]).run().processed, logits[:1])
    assert same(Batch([quiet, (busy, [1, 2], [3], [], 4)], [0, 5], logits).run().processed[0], logits[0])


def test_a_fault_stays_in_its_row():
    """A row of NaN, one without any token, and their neighbours, which are as they would be without them."""
    rng = np.random.default_rng(2)
    plain = (SamplingParams(top_k=5, top_p=0.9, min_p=0.01), [1], [], [], 3)
    impossible = (SamplingParams(allowed_token_ids=[3], bad_words_token_ids=[[3]]), [1], [], [], 3)
    logits = rng.normal(0, 3, (4, VOCAB)).astype(np.float32)
    logits[1, 7] = NAN
    got = Batch([plain, plain, impossible, plain], [0, 1, 2, 3], logits).run()
    assert got.faults.tolist() == [0, SampleFault.NAN, SampleFault.NO_TOKEN, 0]
    assert got.sampled[[1, 2]].tolist() == [0, 0]
    for i in (0, 3):
        assert got.sampled[i] == Batch([plain], [5], logits[i : i + 1]).run().sampled[0]
    # filters leave the row with the NaN whole
    assert np.array_equal(got.processed[1], logits[1], equal_nan=True)
