"""Random calls of the sampler's stages, for `conformance.stage_cases`: a batch with drafts, parameters by row.

Logits are quarters, so that sums and products are exact and ties are common; two rows more than are counted lie behind
them, and one row in the middle belongs to no request. Tables hold garbage behind their counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from conformance.stage_case import GARBAGE, KEPT, NEUTRAL, NO_ROW_SKIPPED, TIES, VALUES, StageCase
from runner_api import NO_ROW
from runner_api.constants import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
)

# Three words of bits, the last of them not full; above every token id of the batch.
VOCAB = 70
WORDS = -(-VOCAB // 32)
BEHIND = 2  # logits rows behind those that are counted
START, END, NATURAL = [64, 65], [66, 67, 68], [67, 68]
INF = np.float32(np.inf)


class SamplingBatch:
    """The logits rows of a batch: L of them, N rows, M tokens of a request."""

    def __init__(
        self, random: np.random.Generator, idx_mapping: np.ndarray, cu_num_logits: np.ndarray, seq_lens: np.ndarray,
        total_len: np.ndarray, tokens: np.ndarray, num_reqs: int,
    ) -> None:  # fmt: skip
        self.random, self.n, self.r = random, len(idx_mapping), num_reqs
        self.idx_mapping, self.cu_num_logits, self.seq_lens = idx_mapping, cu_num_logits, seq_lens
        self.total_len = total_len
        self.l = int(cu_num_logits[num_reqs])  # L
        counts = np.diff(cu_num_logits[: num_reqs + 1])
        owner = np.repeat(np.arange(num_reqs), counts)
        local = np.arange(self.l) - cu_num_logits[owner]
        self.local_pos = self._behind(local.astype(np.int32))
        self.positions = self._behind((seq_lens[owner] - counts[owner] + local).astype(np.int64))
        self.rows = np.concatenate([idx_mapping[owner], np.full(BEHIND, 3)])  # a row that is there
        self.prompt_len = np.maximum(total_len - random.integers(1, 9, self.n), 1).astype(np.int32)
        self.tokens = self._with_markers(tokens)
        places = np.minimum(self.positions[: self.l], tokens.shape[1] - 1)
        known = self.tokens[self.rows[: self.l], places]
        drafts = random.integers(10, 64, self.l)
        self.input_ids = self._behind(np.where(places < total_len[self.rows[: self.l]], known, drafts).astype(np.int32))
        # A row in the middle that belongs to no request; what it was to a request's drafts it still is.
        self.hole = int(random.integers(self.l))
        self.rows[self.hole] = NO_ROW

    def _behind(self, values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, np.full(BEHIND, GARBAGE, values.dtype)])

    def _with_markers(self, tokens: np.ndarray) -> np.ndarray:
        """Thinking starts in two of three rows, and ends or begins to end in some."""
        tokens = tokens.copy()
        for row in range(self.n):
            end, kind = int(self.total_len[row]), int(self.random.integers(6))
            if kind and end >= 6:
                tokens[row, end - 5 : end - 3] = START
            if kind in (2, 3) and end >= 6:
                tokens[row, end - kind + 1 : end] = END[: kind - 1]
            if kind == 4 and end >= 6:
                tokens[row, end - 2 : end] = NATURAL
        return tokens

    def logits(self) -> np.ndarray:
        """float32[L + behind, V]: quarters, every seventh of them at -inf."""
        x = (self.random.integers(-16, 17, (self.l + BEHIND, VOCAB)) / 4).astype(np.float32)
        x[self.random.random(x.shape) < 1 / 7] = -INF
        return x

    def _uses(self) -> np.ndarray:
        """bool[N]: which rows use a step; about half, and of the batch's rows at least one each way."""
        uses = self.random.random(self.n) < 0.5
        uses[self.idx_mapping[0]], uses[self.idx_mapping[1]] = True, False
        return uses

    def _regions(self, uses: np.ndarray | None, name: str = "logits", width: int = VOCAB) -> list[Any]:
        """uses: bool[L], None for all."""
        counted = np.arange(self.l + BEHIND) < self.l
        hole = np.arange(self.l + BEHIND) == self.hole
        used = counted & ~hole if uses is None else self._behind(uses) & counted & ~hole
        masks = (VALUES, used), (NEUTRAL, counted & ~hole & ~used), (NO_ROW_SKIPPED, hole), (KEPT, ~counted)
        return [(c, name, np.repeat(mask[:, None], width, axis=1)) for c, mask in masks]

    def _step(self, stage: str, uses: np.ndarray, logits: np.ndarray | None = None, **arrays: Any) -> StageCase:
        """A step of the sampler: `uses`: bool[N] by row."""
        logits = self.logits() if logits is None else logits
        real = np.where(self.rows[: self.l] >= 0, self.rows[: self.l], 0)
        inputs = {"expanded_idx_mapping": self.rows, **arrays, "num_logits": self.l, "logits": logits}
        return StageCase(stage, inputs, self._regions(uses[real]))

    def _table(self, width: int, dtype: Any = np.int32) -> np.ndarray:
        return np.full((self.n, width), GARBAGE, dtype)

    def _bits(self, count: int, share: float) -> np.ndarray:
        bits = self.random.random((count, WORDS * 32)) < share
        return np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)

    def _some(self, count: int) -> np.ndarray:
        return self.random.permutation(VOCAB)[:count]

    # -- the steps, in order ----------------------------------------------------------------------------------

    def cases(self) -> Iterator[StageCase]:
        yield self.grammar()
        uses = self._uses()
        yield self._step(
            "apply_allowed_token_ids", uses, restricted=uses.astype(np.int32), allowed_bitmask=self._bits(self.n, 0.3)
        )
        yield self.bias()
        yield self.min_tokens()
        yield from self.penalties()
        yield self.bad_words()
        yield self.thinking()
        yield from self.shape()
        yield from self.draw()
        yield self.replay()
        yield self.faults()
        yield from self.logprobs()

    def grammar(self) -> StageCase:
        mask_rows = self._behind(self.random.permutation(self.l + 3)[: self.l].astype(np.int32))
        mask_rows[: self.l][self.random.random(self.l) < 0.4] = -1
        mask_rows[self.hole] = -1
        inputs = {
            "mask_rows": mask_rows, "bitmask": self._bits(self.l + 3, 0.4), "num_logits": self.l,
            "logits": self.logits(),
        }  # fmt: skip
        return StageCase("apply_grammar_bitmask", inputs, self._regions(mask_rows[: self.l] >= 0))

    def bias(self) -> StageCase:
        uses = self._uses()
        num = np.where(uses, self.random.integers(1, 9, self.n), 0).astype(np.int32)
        ids, values = self._table(MAX_LOGIT_BIAS), self._table(MAX_LOGIT_BIAS, np.float32)
        for row, k in enumerate(num):
            ids[row, :k], values[row, :k] = self._some(k), self.random.integers(-8, 9, k) / 4
        return self._step("apply_logit_bias", uses, num_bias=num, bias_token_ids=ids, bias=values)

    def min_tokens(self) -> StageCase:
        uses = self._uses()
        num = np.where(uses, self.random.integers(1, 6, self.n), 0).astype(np.int32)
        stops = self._table(MAX_STOP_TOKEN_IDS)
        for row, k in enumerate(num):
            stops[row, :k] = self._some(k)
        # one longer than the row's sequence, as long, or shorter
        length = np.zeros(self.n, np.int64)
        length[self.idx_mapping[: self.r]] = self.seq_lens[: self.r]
        min_len = (length + self.random.integers(-1, 2, self.n)).astype(np.int32)
        logits = self.logits()
        for i in range(self.l):
            row = self.rows[i]
            if num[row] and self.random.random() < 0.6:  # nothing but stop tokens, one of them at -inf
                alone = np.full(VOCAB, -INF, np.float32)
                alone[stops[row, 1 : num[row]]] = logits[i, stops[row, 1 : num[row]]]
                logits[i] = alone
        return self._step(
            "apply_min_tokens", uses, logits, positions=self.positions, min_len=min_len, num_stop=num,
            stop_token_ids=stops, restores_stops=self.random.integers(0, 2, self.n).astype(np.int32),
        )  # fmt: skip

    def penalties(self) -> Iterator[StageCase]:
        added = np.concatenate([self.random.permutation(self.n)[:4], [0, 0]]).astype(np.int64)
        mine = np.isin(np.arange(self.n), added[:4])[:, None]
        tables = {"prompt_bitmask": self._table(WORDS), "output_counts": self._table(VOCAB)}
        regions = [
            (clause, name, np.broadcast_to(mask, table.shape))
            for name, table in tables.items()
            for clause, mask in ((VALUES, mine), (KEPT, ~mine))
        ]
        known = {"prompt_len": self.prompt_len, "total_len": self.total_len, "all_token_ids": self.tokens}
        inputs = {"rows": added, **known, "num_rows": 4, **tables}
        yield StageCase("count_prompt_and_output_tokens", inputs, regions)
        uses = self._uses()
        counts = (self.random.integers(0, 4, (self.n, VOCAB)) * (self.random.random((self.n, VOCAB)) < 0.3)).astype(
            np.int32
        )
        case = self._step(
            "apply_penalties", uses, expanded_local_pos=self.local_pos, input_ids=self.input_ids,
            repetition=np.where(uses, self.random.choice([1.0, 2.0, 0.5, 1.3], self.n), 1).astype(np.float32),
            frequency=np.where(uses, self.random.choice([0.0, 0.5, -0.25], self.n), 0).astype(np.float32),
            presence=np.where(uses, self.random.choice([0.25, 1.5], self.n), 0).astype(np.float32),
            prompt_bitmask=self._bits(self.n, 0.3), output_counts=counts,
        )  # fmt: skip
        # A product and a sum may be rounded once or twice.
        case.bounds["logits"] = np.where(case.regions[0][2], 2.0**-20, 0.0)
        yield case
        yield self.counting()

    def counting(self) -> StageCase:
        mapping = self.idx_mapping.copy()
        mapping[self.r - 1] = NO_ROW
        width = 1 + int(np.diff(self.cu_num_logits).max())
        sampled = self.random.integers(0, VOCAB, (self.n, width))
        sampled[0, :2] = 7  # twice the same token
        num_sampled = np.full(self.n, width, np.int32)
        num_sampled[1 : self.r] = self.random.integers(0, width + 1, self.r - 1)
        penalised = self._uses().astype(np.int32)
        rows = np.arange(self.n)
        live = np.isin(rows, mapping[: self.r - 1]) & (penalised > 0)
        last = rows == self.n - 1
        masks = (VALUES, live), (NO_ROW_SKIPPED, ~live & last), (KEPT, ~live & ~last)
        inputs = {
            "idx_mapping": mapping, "sampled_token_ids": sampled, "num_sampled": num_sampled, "penalised": penalised,
            "num_reqs": self.r, "output_counts": self._table(VOCAB),
        }  # fmt: skip
        regions = [(c, "output_counts", np.repeat(m[:, None], VOCAB, axis=1)) for c, m in masks]
        return StageCase("count_sampled_tokens", inputs, regions)

    def seen(self, i: int) -> tuple[list[int], int]:
        """(tokens up to and with the input of logits row i, prompt length) of a row with a request."""
        row, length = self.rows[i], int(self.positions[i]) + 1
        known = min(int(self.total_len[row]), length)
        drafts = self.input_ids[i + 1 - (length - known) : i + 1]
        return [*self.tokens[row, :known].tolist(), *drafts.tolist()], int(self.prompt_len[row])

    def bad_words(self) -> StageCase:
        uses = self._uses()
        num, ends = np.zeros(self.n, np.int32), self._table(MAX_BAD_WORDS)
        tokens = self._table(MAX_BAD_WORD_TOKENS)
        for i in range(self.l):
            row = self.rows[i]
            if row < 0 or not uses[row] or num[row]:
                continue
            words = self._words(*self.seen(int(i)))
            num[row] = len(words)
            ends[row, : len(words)] = np.cumsum([len(w) for w in words])
            flat = [t for w in words for t in w]
            tokens[row, : len(flat)] = flat
        return self._step(
            "apply_bad_words", num > 0, positions=self.positions, input_ids=self.input_ids, prompt_len=self.prompt_len,
            total_len=self.total_len, all_token_ids=self.tokens, num_bad_words=num, bad_word_ends=ends,
            bad_word_tokens=tokens,
        )  # fmt: skip

    def _words(self, seen: Sequence[int], prompt_len: int) -> list[list[int]]:
        """Words that match behind one logits row, that reach into the prompt, that miss by a token, of one token."""
        outputs = list(seen[prompt_len:])
        words = [[int(self.random.integers(VOCAB))], [*seen[prompt_len - 1 :], 11], [1, 2, 12]]
        for m in range(1, min(len(outputs), 4) + 1):
            words += [[*outputs[-m:], 20 + m], [*outputs[-m:-1], 69, 30 + m]]
        return words

    def thinking(self) -> StageCase:
        uses = self._uses()
        budget = np.where(uses, self.random.choice([0, 1, 3, 4, 60], self.n), -1).astype(np.int32)
        return self._step(
            "apply_thinking_budget", uses, positions=self.positions, input_ids=self.input_ids, total_len=self.total_len,
            all_token_ids=self.tokens, thinking_budget=budget, start_token_ids=np.array(START, np.int32),
            end_token_ids=np.array(END, np.int32), natural_end_token_ids=np.array(NATURAL, np.int32),
        )  # fmt: skip

    def shape(self) -> Iterator[StageCase]:
        uses = self._uses()
        temperature = np.where(uses, self.random.choice([0.5, 0.7, 2.0], self.n), self.random.integers(0, 2, self.n))
        yield self._step("apply_temperature", uses, temperature=temperature.astype(np.float32))
        uses = self._uses()
        share = np.where(uses, self.random.choice([0.05, 0.3, 1.0], self.n), 0).astype(np.float32)
        yield self._step("apply_min_p", uses, self._strange(self.logits()), min_p=share)
        uses = self._uses()
        k = np.where(uses, self.random.choice([1, 2, 7, 30, VOCAB], self.n), VOCAB).astype(np.int32)
        p = np.where(uses, self.random.choice([1e-6, 0.33, 0.91, 1.0], self.n), 1).astype(np.float32)
        p[(k == VOCAB) & uses] = 0.62
        yield self._step("apply_top_k_top_p", uses, self._strange(self.logits()), top_k=k, top_p=p)

    def _strange(self, logits: np.ndarray) -> np.ndarray:
        """Some rows hold a NaN, +inf, no token, or one value alone."""
        for i in range(0, self.l, 2):
            kind = int(self.random.integers(5))
            if kind == 0:
                logits[i, self._some(2)] = np.nan
            elif kind == 1:
                logits[i, self._some(2)] = INF
            elif kind == 2:
                logits[i] = -INF
            elif kind == 3:
                logits[i] = 1.5
        return logits

    def draw(self) -> Iterator[StageCase]:
        temperature = self.random.choice([0.0, 0.5, 1.0, 2.0], self.n).astype(np.float32)
        for t, strange in ((temperature, True), (np.zeros_like(temperature), False)):
            logits = self._strange(self.logits()) if strange else self.logits()
            inputs = {
                "expanded_idx_mapping": self.rows, "positions": self.positions, "temperature": t,
                "seeds": self.random.integers(-(2**63), 2**63 - 1, self.n), "noise": "murmur3", "num_logits": self.l,
                "logits": logits, "sampled": np.full(self.l + BEHIND, GARBAGE, np.int64),
                "faults": np.full(self.l + BEHIND, GARBAGE, np.int32),
            }  # fmt: skip
            counted = np.arange(self.l + BEHIND) < self.l
            greedy = counted & (t[self.rows] == 0) & (self.rows >= 0)
            regions = [
                (TIES, "sampled", greedy), (VALUES, "sampled", counted & ~greedy), (KEPT, "sampled", ~counted),
                (VALUES, "faults", counted), (KEPT, "faults", ~counted),
            ]  # fmt: skip
            yield StageCase("gumbel_sample", inputs, regions)

    def replay(self) -> StageCase:
        mapping = self.idx_mapping.copy()
        mapping[self.r - 1] = NO_ROW
        index = np.zeros(self.n, np.int64)
        prompt_len = self.seq_lens.copy()
        prompt_len[self.idx_mapping[: self.r]] = self.seq_lens[: self.r] - self.random.integers(-1, 4, self.r)
        index[: self.r] = self.seq_lens[: self.r] - prompt_len[self.idx_mapping[: self.r]]
        trace_len = self.random.integers(0, 5, self.n).astype(np.int32)
        trace_len[self.idx_mapping[0]] = index[0] + 1  # the last token of a list
        replaced = np.zeros((self.n, 3), bool)
        batch = np.arange(self.n)
        mine = (batch < self.r - 1) & (index >= 0) & (index < trace_len[self.idx_mapping])
        replaced[:, 0] = mine
        hole = np.zeros_like(replaced)
        hole[self.r - 1] = True
        inputs = {
            "idx_mapping": mapping, "seq_lens": self.seq_lens, "prompt_len": prompt_len.astype(np.int32),
            "trace_len": trace_len, "trace_token_ids": self.random.integers(10, 64, self.tokens.shape).astype(np.int32),
            "num_reqs": self.r, "sampled_token_ids": np.full((self.n, 3), GARBAGE, np.int64),
        }  # fmt: skip
        masks = (VALUES, replaced), (NO_ROW_SKIPPED, hole), (KEPT, ~replaced & ~hole)
        return StageCase("apply_trace_replay", inputs, [(c, "sampled_token_ids", m) for c, m in masks])

    def faults(self) -> StageCase:
        counts = np.diff(self.cu_num_logits[: self.r + 1])
        num_sampled = np.zeros(self.n, np.int32)
        num_sampled[: self.r] = self.random.integers(0, counts + 1)
        tail = np.arange(self.n) >= self.r
        inputs = {
            "cu_num_logits": self.cu_num_logits, "num_sampled": num_sampled,
            "row_faults": self._behind(self.random.integers(0, 3, self.l).astype(np.int32)), "num_reqs": self.r,
            "faults": np.full(self.n, GARBAGE, np.int32),
        }  # fmt: skip
        return StageCase("first_faults", inputs, [(VALUES, "faults", ~tail), (KEPT, "faults", tail)])

    # -- log probabilities ------------------------------------------------------------------------------------

    def logprobs(self) -> Iterator[StageCase]:
        size, top = self.l + BEHIND, 4
        width = top + 1
        counted = np.arange(size) < self.l
        logits, strange = self.logits(), self._strange(self.logits())
        taken = self._behind(self.random.integers(0, VOCAB, self.l))
        log_sum = np.full(size, GARBAGE, np.float32)
        yield StageCase(
            "compute_logprob_stats",
            {
                "token_ids": taken, "num_logits": self.l, "logits": strange, "log_sum": log_sum,
                "ranks": np.full(size, GARBAGE, np.int64),
            },
            [(c, name, m) for name in ("log_sum", "ranks") for c, m in ((VALUES, counted), (KEPT, ~counted))],
            {"log_sum": np.where(counted, 1e-5, 0.0)},
        )  # fmt: skip
        columns = np.full((size, width), GARBAGE, np.int32)
        whole = np.repeat(counted[:, None], width, axis=1)
        yield StageCase(
            "select_top_tokens", {"num_logits": self.l, "num_top": top, "logits": logits, "columns": columns},
            [(VALUES, "columns", whole), (KEPT, "columns", ~whole)],
        )  # fmt: skip
        uses = self._uses()
        num = np.where(uses, self.random.integers(1, width + 1, self.n), 0).astype(np.int32)
        listed = self._table(MAX_LOGPROB_TOKEN_IDS)
        for row, k in enumerate(num):
            listed[row, :k] = self._some(k)
        real = np.where(self.rows[: self.l] >= 0, self.rows[: self.l], 0)
        yield StageCase(
            "select_listed_tokens",
            {
                "expanded_idx_mapping": self.rows, "num_listed": num, "listed_token_ids": listed, "num_logits": self.l,
                "columns": columns,
            },
            self._regions(uses[real], "columns", width),
        )  # fmt: skip
        chosen = self.random.integers(-1, VOCAB, (size, width)).astype(np.int32)
        wide = np.repeat(counted[:, None], 1 + width, axis=1)
        outputs = {
            "logprob_token_ids": np.full(wide.shape, GARBAGE, np.int32),
            "logprobs": np.full(wide.shape, GARBAGE, np.float32),
        }
        yield StageCase(
            "gather_logprobs",
            {
                "token_ids": taken, "columns": chosen, "log_sum": self.random.standard_normal(size).astype(np.float32),
                "num_logits": self.l, "logits": logits, **outputs,
            },
            [(c, name, m) for name in outputs for c, m in ((VALUES, wide), (KEPT, ~wide))],
        )  # fmt: skip
