"""Calls of the sampler's stages for `conformance.kernel_battery`: ragged batches with drafts, garbage all around.

A batch has logits rows of requests with and without drafts, of an unfinished prompt, and of no request at all; its
logits hold everything that a float can be. Tokens are few, so that words and markers turn up by chance. Whatever lies
behind a count is an id that is in no vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from runner_api import NO_ROW, SampleFault

INF = np.float32(np.inf)
NOWHERE = 2**30  # an id far outside of every vocabulary
SIZES = ((1, 37, 7), (2, 100, 6), (3, 5, 7), (4, 10, 23))  # seed, vocabulary, rows
MANY_ROWS = 16
# A program of these takes many requests at once; one of the others takes a row, and many rows tell no more than few.
BY_REQUEST = ("count_sampled_tokens", "apply_trace_replay", "first_faults")
Markers = tuple[list[int], list[int], list[int]]  # start, end, natural end
MARKERS: tuple[Markers, ...] = (
    ([1], [2], [2]), ([1, 2], [3, 0, 1], [0, 1]), ([0], [1, 1, 1, 2], [1, 2]),
)  # fmt: skip


class SamplingBatch:
    """N rows; L logits rows of N - 2 requests and two of none.

    Every array is longer than the batch needs, but for the logits of every other batch: there the last row, which loses
    its last token, is the end of the memory.
    """

    def __init__(self, seed: int, vocab_size: int, num_rows: int = 7, num_drafts: int = 3) -> None:
        self.rng = rng = np.random.default_rng([seed, vocab_size])
        self.n, self.m, self.v, self.k = num_rows, 90, vocab_size, num_drafts
        self.words = -(-vocab_size // 32)
        self.num_tokens = min(vocab_size, 4)
        self.prompt_len = rng.integers(1, 12, self.n).astype(np.int32)
        self.total_len = (self.prompt_len + rng.choice([0, 0, 1, 2, 3, 9, 40, 70], self.n)).astype(np.int32)
        self.total_len[-1] = self.m  # full
        self.all_token_ids = self.integers((self.n, self.m), self.num_tokens)
        rows, local, positions, input_ids = [], [], [], []
        owners = [0, self.n - 1, *rng.permutation(np.arange(1, self.n - 1))[: self.n - 4]]
        # Logits rows of no request come first, so that none behind them has the number of its request.
        for place, row in enumerate([NO_ROW, NO_ROW, *rng.permutation(owners)]):
            known, drafts = int(self.total_len[row]), int(rng.integers(0, num_drafts + 1))
            first = known - 1
            if place == 2:  # of an unfinished prompt
                self.unfinished, first, drafts = row, int(self.prompt_len[row]) // 2, 0
            for j in range(1 + drafts):
                rows.append(row)
                local.append(j)
                positions.append(first + j)
                input_ids.append(self.all_token_ids[row, first] if j == 0 else rng.integers(0, self.num_tokens))
        self.l, self.last, tail = len(rows), rows[-1], 3
        self.spare = 0 if seed % 2 else 2
        self.rows = np.array([*rows, *rng.integers(0, self.n, tail)], np.int64)
        self.local = np.array([*local, *[9] * tail], np.int32)
        self.positions = np.array([*positions, *[2**40] * tail], np.int64)
        self.input_ids = np.array([*input_ids, *[NOWHERE] * tail], np.int32)
        others = rng.permutation(np.arange(1, self.n))
        self.mapping = np.array([others[0], NO_ROW, others[1], 0, *others[2:-1]])

    def integers(self, shape: Any, high: int, low: int = 0) -> np.ndarray:
        return self.rng.integers(low, high, shape).astype(np.int32)

    def bits(self, rows: int) -> np.ndarray:
        return self.rng.integers(-(2**31), 2**31, (rows, self.words)).astype(np.int32)

    def logits(self) -> np.ndarray:
        """float32[L + spare, V]; the spare rows belong to nobody."""
        x = (self.rng.normal(size=(self.l + self.spare, self.v)) * 3).astype(np.float32)
        some = self.rng.random(x.shape)
        for share, value in ((0.03, -INF), (0.06, np.nan), (0.08, INF), (0.11, 0.0), (0.14, -0.0)):
            x[(some < share) & (some >= share - 0.03)] = value
        x[self.rng.random(len(x)) < 0.1] = -INF
        return x

    @property
    def common(self) -> dict[str, Any]:
        return {"expanded_idx_mapping": self.rows, "num_logits": self.l, "logits": self.logits()}

    @property
    def history(self) -> dict[str, Any]:
        return {
            "positions": self.positions, "input_ids": self.input_ids, "total_len": self.total_len,
            "all_token_ids": self.all_token_ids,
        }  # fmt: skip

    def calls(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(stage, what is special about it, arguments)."""
        mask_rows, restricted = self.integers(self.l + 2, 6, -1), self.integers(self.n, 2)
        mask_rows[[0, self.l - 1]], restricted[[-1, self.last]] = 5, 1  # 5: the end of the table
        bitmask, allowed_bitmask = self.bits(6), self.bits(self.n)
        for words in (bitmask[5], allowed_bitmask[self.last]):
            words[(self.v - 1) // 32] &= ~(1 << (self.v - 1) % 32)
        yield "apply_grammar_bitmask", "", {
            "mask_rows": mask_rows, "bitmask": bitmask, "num_logits": self.l, "logits": self.logits()
        }  # fmt: skip
        yield "apply_allowed_token_ids", "", {
            "restricted": restricted, "allowed_bitmask": allowed_bitmask, **self.common
        }  # fmt: skip
        yield "apply_logit_bias", "", self._bias()
        yield "apply_min_tokens", "", self._min_tokens()
        yield "count_prompt_and_output_tokens", "", self._counted()
        yield from self._penalties()
        for width in (1, 4):
            yield "count_sampled_tokens", f"{width} tokens", self._sampled(width)
            yield "apply_trace_replay", f"{width} tokens", self._trace(width)
        yield "apply_bad_words", "", self._bad_words()
        for turn in range(3):
            for markers in MARKERS:
                yield "apply_thinking_budget", f"{markers} {turn}", self._thinking(markers)
        # Of the shortest sequence all of it has begun the end; there is no more of it.
        shortest = int(self.positions[: self.l][self.rows[: self.l] >= 0].min()) + 1
        yield "apply_thinking_budget", "all of it begun", self._thinking(([1], [1] * shortest + [2], [2]), 1)
        yield "apply_thinking_budget", "one token all over", self._thinking(([1], [1] * 9 + [2], [2]), 1)
        yield "apply_thinking_budget", "an end that is a start", self._thinking(([1], [3], [1]), 0)
        yield "first_faults", "", self._faults()

    def _bias(self) -> dict[str, Any]:
        width = 40
        num_bias = self.integers(self.n, min(self.v, width) + 1)
        num_bias[-1] = min(self.v, width)
        ids = np.full((self.n, width), NOWHERE, np.int32)
        for row, n in enumerate(num_bias):
            ids[row, :n] = self.rng.permutation(self.v)[:n]
        bias = self.rng.normal(size=(self.n, width)).astype(np.float32)
        return {"num_bias": num_bias, "bias_token_ids": ids, "bias": bias, **self.common}

    def _min_tokens(self) -> dict[str, Any]:
        width = 19
        num_stop = self.integers(self.n, min(self.v, width) + 1)
        stops = np.full((self.n, width), NOWHERE, np.int32)
        num_stop[0], num_stop[self.last] = 1, 4
        for row, n in enumerate(num_stop):
            stops[row, :n] = self.rng.permutation(self.v)[:n]
        more, restores = self.integers(self.n, 4), self.integers(self.n, 2)
        more[0] = more[self.last] = restores[self.last] = 2
        arrays = self.common
        for i in range(0, self.l, 2):  # rows where nothing but stop tokens is left, or one token more
            row = self.rows[i]
            others = np.setdiff1d(np.arange(self.v), stops[row, : num_stop[row]])
            arrays["logits"][i, others] = -INF
            if len(others) and i % 3:
                arrays["logits"][i, others[-1 if i % 4 else 0]] = 1
        # The last row has nothing but stop tokens, of which one alone may come back.
        x = arrays["logits"][self.l - 1]
        x[:], x[stops[self.last, :4]] = -INF, [np.nan, 1, INF, -INF]
        return {
            "positions": self.positions, "min_len": self.total_len + more, "num_stop": num_stop,
            "stop_token_ids": stops, "restores_stops": restores, **arrays,
        }  # fmt: skip

    def _counted(self) -> dict[str, Any]:
        return {
            "rows": self.rng.permutation(self.n), "prompt_len": self.prompt_len, "total_len": self.total_len,
            "all_token_ids": self.integers((self.n, self.m), self.v), "num_rows": self.n - 2,
            "prompt_bitmask": self.bits(self.n), "output_counts": self.integers((self.n, self.v), 9),
        }  # fmt: skip

    def _penalties(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for label, values in (
            ("", ([1.0, 1.7, 0.6, 1e-40], [0.0, 0.3, -1.1], [0.0, 0.7, -2.0])),
            ("repetition", ([1.0, 1.3], [0.0], [0.0])),
            ("frequency", ([1.0], [0.0, 0.5], [0.0])),
            ("presence", ([1.0], [0.0], [0.0, 0.5])),
            ("neutral", ([1.0], [0.0], [0.0])),
        ):
            names = ("repetition", "frequency", "presence")
            drawn = {name: self.rng.choice(v, self.n).astype(np.float32) for name, v in zip(names, values, strict=True)}
            yield "apply_penalties", label, {
                "expanded_local_pos": self.local, "input_ids": self.input_ids, "prompt_bitmask": self.bits(self.n),
                "output_counts": np.maximum(self.integers((self.n, self.v), 4, -3), 0), **drawn, **self.common,
            }  # fmt: skip

    def _sampled(self, width: int) -> dict[str, Any]:
        num_reqs = self.n - 2
        sampled = self.rng.integers(0, min(self.v, 3), (self.n, width))
        sampled[num_reqs:] = NOWHERE
        return {
            "idx_mapping": self.mapping, "sampled_token_ids": sampled,
            "num_sampled": self.integers(self.n, width + 1), "penalised": self.integers(self.n, 2),
            "num_reqs": num_reqs, "output_counts": self.integers((self.n, self.v), 9),
        }  # fmt: skip

    def _trace(self, width: int) -> dict[str, Any]:
        seq_lens = self.prompt_len[self.mapping] + self.integers(self.n, 9, -2)
        trace_len = self.integers(self.n, 9)
        trace_len[self.mapping[2]], seq_lens[2] = 3, self.prompt_len[self.mapping[2]] + 2  # its last token
        trace_len[self.mapping[3]], seq_lens[3] = 3, self.prompt_len[self.mapping[3]]  # its first
        return {
            "idx_mapping": self.mapping, "seq_lens": seq_lens, "prompt_len": self.prompt_len, "trace_len": trace_len,
            "trace_token_ids": self.integers((self.n, self.m), 2**31 - 1), "num_reqs": self.n - 2,
            "sampled_token_ids": self.rng.integers(0, 99, (self.n, width)),
        }  # fmt: skip

    def _bad_words(self) -> dict[str, Any]:
        max_words, max_tokens = 20, 80
        num_words = self.integers(self.n, max_words + 1)
        single = self.last
        num_words[0], num_words[self.unfinished], num_words[single] = 3, max_words, 1
        ends = np.full((self.n, max_words), NOWHERE, np.int32)
        words = np.full((self.n, max_tokens), NOWHERE, np.int32)
        for row, n in enumerate(num_words):
            ends[row, :n] = np.cumsum(self.integers(n, 5, 1)) if row != single else 1
            total = int(ends[row, n - 1]) if n else 0
            words[row, :total] = self.integers(total, self.num_tokens)
            words[row, ends[row, :n] - 1] = self.integers(n, self.v)  # a last token tells which word it is of
        words[single, 0] = self.v - 1
        # Every other word of a request is one that its last logits row has begun.
        for i in range(self.l):
            row, seen = int(self.rows[i]), self._seen(i)
            for w in range(0, num_words[row] if row >= 0 else 0, 2):
                lead = int(ends[row, w]) - 1 - (int(ends[row, w - 1]) if w else 0)
                tail = seen[max(len(seen) - lead, 0) :]
                words[row, ends[row, w] - 1 - len(tail) : ends[row, w] - 1] = tail
        return {
            "prompt_len": self.prompt_len, "num_bad_words": num_words, "bad_word_ends": ends,
            "bad_word_tokens": words, **self.history, **self.common,
        }  # fmt: skip

    def _seen(self, i: int) -> np.ndarray:
        """The tokens that logits row i has seen."""
        row, end = self.rows[i], int(self.positions[i]) + 1
        known = min(int(self.total_len[row]), end)
        return np.concatenate([self.all_token_ids[row, :known], self.input_ids[i + 1 - (end - known) : i + 1]])

    def _thinking(self, markers: Markers, token: int | None = None) -> dict[str, Any]:
        """Each request has something like a thought in it; how much of it is known and how much are drafts is left to
        chance. token: what every other token is."""
        start, end, natural_end = markers
        tokens, input_ids = self.all_token_ids.copy(), self.input_ids.copy()
        if token is not None:
            tokens[:] = token
        for i in range(self.l):
            row, position = self.rows[i], int(self.positions[i])
            if i + 1 < self.l and self.rows[i + 1] == row:
                continue  # the request's last logits row sees all of it
            said = int(self.rng.integers(0, len(end) + 1))
            parts = [start, self.rng.integers(4, 9, 3).tolist(), natural_end * int(self.rng.integers(0, 2)), end[:said]]
            thought = [t for part in parts for t in part][-position - 1 :]
            seen = self.rng.integers(0, 4, position + 1)
            if token is not None:
                seen[:] = token
                seen[: int(self.rng.integers(0, 2))] = 1
            else:
                seen[position + 1 - len(thought) :] = thought
            known = min(int(self.total_len[row]), position + 1)
            tokens[row, :known] = seen[:known]
            input_ids[i + 1 - (position + 1 - known) : i + 1] = seen[known:]
        names = ("start_token_ids", "end_token_ids", "natural_end_token_ids")
        budget = self.rng.choice([-1, 0, 0, 1, 2, 5], self.n) if token is None else np.zeros(self.n)
        return {
            "thinking_budget": budget.astype(np.int32),
            **self.history, "all_token_ids": tokens, "input_ids": input_ids, **self.common,
            **{name: np.array(marker, np.int32) for name, marker in zip(names, markers, strict=True)},
        }  # fmt: skip

    def _faults(self) -> dict[str, Any]:
        num_logits = self.integers(self.n, 5, 1)
        none, *some = SampleFault.NONE, SampleFault.NAN, SampleFault.NO_TOKEN
        return {
            "cu_num_logits": np.concatenate([[0], np.cumsum(num_logits)]).astype(np.int32),
            "num_sampled": self.rng.integers(0, num_logits + 1).astype(np.int32),
            "row_faults": self.rng.choice([none, none, none, *some], num_logits.sum()).astype(np.int32),
            "num_reqs": self.n - 2, "faults": np.full(self.n, -77, np.int32),
        }  # fmt: skip
