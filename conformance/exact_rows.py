"""Logits rows of one step after every step of the sampler up to the temperature, in float64, with rounding bounds.

The values come from the reference's own stages, run on float64 copies of the logits that a runner itself recorded;
what requests ask for and what they have said is known here from the plans. Beside each value runs a bound on how far a
runner that computes in float32 (or in another format) may lie from it: the roundings of each step, carried through the
steps behind it. A step that only drops tokens rounds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.exact_processors import ExactProcessors
from runner_api import NO_ROW, GrammarOutput, NewRequestData, ReasoningConfig, SamplingParams, StageSet, StepRecord
from runner_api.constants import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a runner computes behind the logits.

    unit: half a step below 1 of its format, the relative error of one rounding. largest: what is above overflows to
    infinity. series: noise of uniforms below this may come from a series of eight terms.
    """

    unit: float
    largest: float
    series: float

    @classmethod
    def of(cls, dtype: str) -> Arithmetic:
        """Of a runner by its dtype: half-precision logits are processed in float32."""
        if dtype == "float64":
            return cls(2.0**-53, float(np.finfo(np.float64).max), 0.0)
        return cls(2.0**-24, float(np.finfo(np.float32).max), 0.25)

    def noise_error(self, noise: np.ndarray) -> np.ndarray:
        """How far a runner's -log(-log(1 - u)) may lie from the exact value for the same uniform u.

        The inner logarithm is off by a relative 8 units: 1 - u is rounded, by up to 4.3 units of its logarithm above
        u = 1/8, and both logarithms by a unit or two. The outer one is rounded too. Below u = 1/4 vLLM 0.33 uses
        eight terms of the series of -log(1 - u), which leave out a relative u^8 / 9 and less.
        """
        u = -np.expm1(-np.exp(-noise))
        return self.unit * (8 + 4 * np.abs(noise)) + np.where(u < self.series, u**8 / 8, 0.0)


@dataclass(slots=True)
class KnownRequest:
    """A request as the judge knows it. tokens: prompt and outputs that are in the runner's state."""

    params: SamplingParams
    seed: int
    prompt_len: int
    tokens: list[int]
    stop_token_ids: tuple[int, ...] = ()

    @classmethod
    def admitted(cls, new: NewRequestData) -> KnownRequest:
        return cls(
            new.sampling_params or GREEDY, new.seed, new.prompt_len, list(new.prefill_token_ids), new.stop_token_ids
        )


@dataclass(slots=True)
class ExactRows:
    """L logits rows. raw: as recorded, after the grammar's mask; x, error: float64[L, V] processed; owner: int64[L]
    batch index; positions: int64[L]."""

    raw: np.ndarray
    x: np.ndarray
    error: np.ndarray
    owner: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class RowProcessor:
    """Processes the logits of a step. `stages`: the reference's. reasoning, processors: as the runner has them."""

    stages: StageSet
    arithmetic: Arithmetic
    reasoning: ReasoningConfig | None = None
    processors: ExactProcessors = field(default_factory=lambda: ExactProcessors((), 0))

    def process(
        self,
        record: StepRecord,
        logits: np.ndarray,
        requests: Sequence[KnownRequest],
        grammar: GrammarOutput | None = None,
        num_speculative_tokens: int = 0,
    ) -> ExactRows:
        """requests: of the batch, in batch order, as they were before the step. logits: float[L, V], left alone."""
        b = _Batch(self, record, logits, requests)
        if grammar is not None:
            b.mask_by_grammar(record, grammar, num_speculative_tokens)
        b.raw = b.x.copy()
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for step in (
                b.allow_listed, b.add_bias, b.keep_stops_out, b.penalise, b.ban_words, b.process_by_others,
                b.end_thinking, b.divide,
            ):  # fmt: skip
                step()
        b.error *= 1 + 2.0**-20  # the products of roundings, which the sum of their bounds leaves out
        return ExactRows(b.raw, b.x, b.error, b.owner, b.positions)


@dataclass
class _Batch:
    """The batch's parameters by batch index (which stands where a runner has its rows), and what comes of its rows."""

    processor: RowProcessor
    record: StepRecord
    logits: np.ndarray
    requests: Sequence[KnownRequest]
    raw: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        cu = self.record.cu_num_logits
        self.x = self.logits.astype(np.float64)
        self.error = np.zeros_like(self.x)
        self.num_logits, self.vocab_size = self.x.shape
        counts = np.diff(cu)
        self.owner = np.repeat(np.arange(len(self.requests)), counts)
        self.local_pos = (np.arange(self.num_logits) - np.repeat(cu[:-1], counts)).astype(np.int32)
        self.positions = np.asarray(self.record.positions[self.record.logits_indices], np.int64)
        self.input_ids = np.asarray(self.record.input_ids[self.record.logits_indices], np.int32)
        self.params = [r.params for r in self.requests]
        self.unit = self.processor.arithmetic.unit

    # -- the steps, in order ----------------------------------------------------------------------------------

    def mask_by_grammar(self, record: StepRecord, grammar: GrammarOutput, num_speculative_tokens: int) -> None:
        mask_rows = np.full(self.num_logits, NO_ROW, np.int32)
        for g, req_id in enumerate(grammar.structured_output_request_ids):
            if req_id in record.req_ids:
                own = self.owner == record.req_ids.index(req_id)
                mask_rows[own] = g * (1 + num_speculative_tokens) + self.local_pos[own]
        self._run("apply_grammar_bitmask", mask_rows=mask_rows, bitmask=np.asarray(grammar.grammar_bitmask, np.int32))

    def allow_listed(self) -> None:
        lists = [p.allowed_token_ids for p in self.params]
        if any(ids is not None for ids in lists):
            self._run(
                "apply_allowed_token_ids", expanded_idx_mapping=self.owner,
                restricted=np.array([ids is not None for ids in lists], np.int32),
                allowed_bitmask=np.stack([self._bits(ids or ()) for ids in lists]),
            )  # fmt: skip

    def add_bias(self) -> None:
        pairs = [p.logit_bias or {} for p in self.params]
        if not any(pairs):
            return
        before = self.x.copy()
        self._run(
            "apply_logit_bias", expanded_idx_mapping=self.owner, num_bias=self._lengths(pairs),
            bias_token_ids=self._packed([list(p) for p in pairs], MAX_LOGIT_BIAS, np.int32),
            bias=self._packed([list(p.values()) for p in pairs], MAX_LOGIT_BIAS, np.float32),
        )  # fmt: skip
        self._rounded(1, self.x != before)  # the sum

    def keep_stops_out(self) -> None:
        stops = [r.stop_token_ids if r.params.min_tokens > 0 else () for r in self.requests]
        if any(stops):
            self._run(
                "apply_min_tokens", expanded_idx_mapping=self.owner, positions=self.positions,
                min_len=np.array([r.prompt_len + min(r.params.min_tokens, 2**30) for r in self.requests], np.int32),
                num_stop=self._lengths(stops), stop_token_ids=self._packed(stops, MAX_STOP_TOKEN_IDS, np.int32),
                restores_stops=np.array([p.structured_outputs is not None for p in self.params], np.int32),
            )  # fmt: skip

    def penalise(self) -> None:
        by_row = {
            "repetition": np.array([p.repetition_penalty for p in self.params], np.float32),
            "frequency": np.array([p.frequency_penalty for p in self.params], np.float32),
            "presence": np.array([p.presence_penalty for p in self.params], np.float32),
        }
        if all((by_row[n] == neutral).all() for n, neutral in (("repetition", 1), ("frequency", 0), ("presence", 0))):
            return
        prompts = [r.tokens[: r.prompt_len] for r in self.requests]
        outputs = [np.bincount(r.tokens[r.prompt_len :], minlength=self.vocab_size) for r in self.requests]
        before = self.x.copy()
        self._run(
            "apply_penalties", expanded_idx_mapping=self.owner, expanded_local_pos=self.local_pos,
            input_ids=self.input_ids, **by_row, prompt_bitmask=np.stack([self._bits(p) for p in prompts]),
            output_counts=np.stack(outputs).astype(np.int32),
        )  # fmt: skip
        for i, owner in enumerate(self.owner):
            drafts = self.input_ids[i + 1 - self.local_pos[i] : i + 1]
            counts = outputs[owner] + np.bincount(drafts[drafts >= 0], minlength=self.vocab_size)
            seen = counts > 0
            seen[prompts[owner]] = True
            self._penalty_error(i, before[i], counts, seen, *(float(a[owner]) for a in by_row.values()))

    def _penalty_error(
        self, i: int, x: np.ndarray, counts: np.ndarray, seen: np.ndarray, factor: float, per_use: float, once: float
    ) -> None:
        """Row i was `x`. What it is now is known; its error is that of every operation on the way there."""
        error, u = self.error[i], self.unit
        if factor != 1:
            # 1 what was off before grows with the steeper branch; the reciprocal and the product are rounded
            x = np.where(seen, x * np.where(x > 0, 1 / factor, factor), x)
            error[seen] = error[seen] * max(factor, 1 / factor) + 2 * u * np.abs(x[seen])
        if per_use != 0:
            # 2 the product and the difference, where a count is not 0
            x = x - per_use * counts
            error += np.where(counts > 0, u * (np.abs(per_use * counts) + np.abs(x)), 0)
        if once != 0:
            # 3 the difference
            x = x - once * (counts > 0)
            error += np.where(counts > 0, u * np.abs(x), 0)
        self._settle()

    def ban_words(self) -> None:
        words = [p.bad_words_token_ids or () for p in self.params]
        if any(words):
            ends = [np.cumsum([len(word) for word in w]).tolist() for w in words]
            tokens = [[t for word in w for t in word] for w in words]
            self._run(
                "apply_bad_words", expanded_idx_mapping=self.owner, positions=self.positions,
                input_ids=self.input_ids, prompt_len=np.array([r.prompt_len for r in self.requests], np.int32),
                **self._known(), num_bad_words=self._lengths(words),
                bad_word_ends=self._packed(ends, MAX_BAD_WORDS, np.int32),
                bad_word_tokens=self._packed(tokens, MAX_BAD_WORD_TOKENS, np.int32),
            )  # fmt: skip

    def process_by_others(self) -> None:
        """Custom processors; what they edit is taken to be the outcome of a sum and a product or two."""
        if not self.processor.processors.factories:
            return
        before = self.x.copy()
        self.processor.processors.apply(
            self.x, self.record.req_ids, self.owner, self.positions, self.input_ids, self.local_pos
        )
        edited = (self.x != before) & np.isfinite(before)
        self.error[edited] += 4 * self.unit * np.abs(before[edited])
        self._rounded(4, edited)

    def end_thinking(self) -> None:
        budgets = [p.thinking_token_budget for p in self.params]
        r = self.processor.reasoning
        if r is None or all(b is None for b in budgets):
            return
        before = self.x.copy()
        self._run(
            "apply_thinking_budget", expanded_idx_mapping=self.owner, positions=self.positions,
            input_ids=self.input_ids, **self._known(),
            thinking_budget=np.array([-1 if b is None else b for b in budgets], np.int32),
            start_token_ids=np.array(r.start_token_ids, np.int32), end_token_ids=np.array(r.end_token_ids, np.int32),
            natural_end_token_ids=np.array(r.natural_end_token_ids, np.int32),
        )  # fmt: skip
        self.error[self.x != before] = 0  # set to a number that every format holds

    def divide(self) -> None:
        t = np.array([p.temperature for p in self.params], np.float32)
        if ((t == 0) | (t == 1)).all():
            return
        self._run("apply_temperature", expanded_idx_mapping=self.owner, temperature=t)
        divided = (t != 0) & (t != 1)
        rows = divided[self.owner]
        self.error[rows] /= t[self.owner][rows, None].astype(np.float64)
        # Triton's `/` on float32 is div.full, which is off by up to 2 steps, that is 4 units; IEEE division by one.
        self._rounded(4, np.broadcast_to(rows[:, None], self.x.shape))

    # -- errors -----------------------------------------------------------------------------------------------

    def _rounded(self, times: int, where: np.ndarray) -> None:
        """The values at `where` were rounded so often."""
        self.error[where] += times * self.unit * np.abs(self.x[where])
        self._settle()

    def _settle(self) -> None:
        """What a runner's format cannot hold is infinite, and what is not finite has no error."""
        too_large = np.abs(self.x) > self.processor.arithmetic.largest
        self.x[too_large] = np.copysign(np.inf, self.x[too_large])
        self.error[~np.isfinite(self.x)] = 0

    # -- tables -----------------------------------------------------------------------------------------------

    def _run(self, stage: str, **inputs: Any) -> None:
        self.x = self.processor.stages.run(stage, **inputs, num_logits=self.num_logits, logits=self.x)["logits"]

    def _known(self) -> dict[str, np.ndarray]:
        """Tokens of each request: total_len int32[R], all_token_ids int32[R, M]."""
        tokens = [r.tokens for r in self.requests]
        width = max(len(t) for t in tokens)
        return {"total_len": self._lengths(tokens), "all_token_ids": self._packed(tokens, width, np.int32)}

    @staticmethod
    def _lengths(lists: Sequence[Any]) -> np.ndarray:
        return np.array([len(x) for x in lists], np.int32)

    @staticmethod
    def _packed(lists: Sequence[Sequence[Any]], width: int, dtype: Any) -> np.ndarray:
        table = np.zeros((len(lists), width), dtype)
        for row, values in zip(table, lists, strict=True):
            row[: len(values)] = values
        return table

    def _bits(self, token_ids: Sequence[int]) -> np.ndarray:
        """The set as int32 words, 32 tokens each, least significant bit first."""
        bits = np.zeros(-(-self.vocab_size // 32) * 32, bool)
        bits[list(token_ids)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)
